/* tests/test_full_disk.c - conversions that run out of disk: it is said with what is needed and available, and OUT is whole or not
 * there; a run with --resume leaves what it has done.
 */
#include <errno.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "formats/outfile.h"
#include "tests/interrupted_build.h"

/* Whether the next sync finds the disk full, as where blocks are only found then. */
static bool is_sync_full;
int fsync(int fd) {
    bool is_full = is_sync_full;
    is_sync_full = false;
    if (!is_full) return (int)syscall(SYS_fsync, fd);
    errno = ENOSPC;
    return -1;
}

/* A disk on which a file may take so many bytes; and how many writes that reach past `full_once_bytes` find it full. */
static uint64_t disk_bytes = UINT64_MAX, full_once_bytes = UINT64_MAX;
static int      full_once_count;
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at) {
    struct stat info;
    bool is_full = full_once_count > 0 && size > 4096 && (uint64_t)at + size > full_once_bytes;
    if (is_full) full_once_count--;
    if (disk_bytes != UINT64_MAX && fstat(fd, &info) == 0) {
        uint64_t taken = (uint64_t)info.st_blocks * 512, left = disk_bytes > taken ? disk_bytes - taken : 0;
        is_full = is_full || left < 4096;
        if (size > left && !is_full) size = left / 4096 * 4096;
    }
    if (!is_full) return syscall(SYS_pwrite64, fd, bytes, size, at);
    errno = ENOSPC;
    return -1;
}

/* Runs the conversion in a process that may write files of `limit` bytes; at 0 the limit comes after the first check. */
static void a_file_size_limit_is_said_and_leaves_nothing(void) {
    make_fast_dir();
    const char *out = in_dir("out.spk");
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = { 3000000, 3000000 };
        (void)signal(SIGXFSZ, SIG_IGN);
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(3);
        if (convert(TINY36, out, &(run_request){ 0 }) != SPK_E_SPACE) _exit(1);
        _exit(strstr(err.text, "needs 1") != NULL && strstr(err.text, "may have only 3000000") != NULL ? 0 : 2);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child: %x", status);
    CHECK(gb_file_count(dir) == 0, "a file was left");
    child = fork();
    if (child == 0) {                                    /* the limit comes when the file is half written */
        spk_outfile *file = NULL;
        static uint8_t bytes[1 << 20];
        (void)signal(SIGXFSZ, SIG_IGN);
        if (spk_outfile_create(out, false, 4 << 20, &file, &err) != SPK_OK) _exit(3);
        struct rlimit limit = { 1500000, 1500000 };
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(4);
        if (spk_outfile_write(file, 0, bytes, sizeof bytes, &err) != SPK_OK) _exit(5);
        if (spk_outfile_write(file, 1 << 20, bytes, sizeof bytes, &err) != SPK_E_SPACE) _exit(1);
        spk_outfile_abort(file);
        _exit(strstr(err.text, "needs 4194304 bytes") != NULL && strstr(err.text, "only 1500000") != NULL ? 0 : 2);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child: %x", status);
    CHECK(gb_file_count(dir) == 0, "a file was left");
    gb_remove_dir(dir);
}

/* A file system of 8 MiB: seen before; and while writing, where another file takes the room meanwhile. */
static void a_small_file_system_is_said_and_left_empty(void) {
    make_fast_dir();
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        const char *out = in_dir("out.spk");
        if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
            mount("tmpfs", dir, "tmpfs", 0, "size=8m") != 0)
            _exit(77);
        if (convert(TINY36, out, &(run_request){ 0 }) != SPK_E_SPACE || gb_file_count(dir) != 0) _exit(1);
        if (strstr(err.text, "needs 1") == NULL || strstr(err.text, "only 8388608 bytes available") == NULL) _exit(2);
        spk_outfile *file = NULL, *other = NULL;
        static uint8_t bytes[1 << 20];
        if (spk_outfile_create(out, false, 6 << 20, &file, &err) != SPK_OK ||
            spk_outfile_create(in_dir("other"), false, 4 << 20, &other, &err) != SPK_OK)
            _exit(3);
        spk_status status = SPK_OK;
        for (uint64_t i = 0; i < 4 && status == SPK_OK; i++) status = spk_outfile_write(other, i << 20, bytes, sizeof bytes, &err);
        for (uint64_t i = 0; i < 6 && status == SPK_OK; i++) status = spk_outfile_write(file, i << 20, bytes, sizeof bytes, &err);
        spk_outfile_abort(file);
        spk_outfile_abort(other);
        if (status != SPK_E_SPACE || gb_file_count(dir) != 0) _exit(4);
        _exit(strstr(err.text, "needs 6291456 bytes") != NULL && strstr(err.text, "only 4194304 bytes available") != NULL ? 0 : 5);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child, "wait");
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) SKIP("no permission to mount a small file system");
    else CHECK(status == 0, "the child: %x", status);
    gb_remove_dir(dir);
}

/* Wherever the disk is full, the data or what follows them: a run with --resume leaves what it has done, and goes on from it when there
 * is room, after another one for which there was too little; one without it leaves nothing. */
static void a_full_disk_leaves_what_resume_goes_on_from(void) {
    make_fast_dir();
    const char *wanted = in_dir("wanted.spk"), *out = in_dir("out.spk");
    struct stat info = { .st_size = 0 };
    CHECK_OK(convert(TINY36, wanted, &(run_request){ 0 }), err);
    CHECK(stat(wanted, &info) == 0, "%s", wanted);
    const uint64_t whole = (uint64_t)info.st_size, disks[] = { 5 << 20, 9 << 20, whole - (1 << 20), whole - 65536, whole - 4096 };
    for (size_t i = 0; i < sizeof disks / sizeof *disks; i++) {
        run_request request = { 0 };
        disk_bytes = disks[i];
        CHECK(convert(TINY36, out, &request) == SPK_E_SPACE && strstr(err.text, "--resume") == NULL, "disk %d: %s", (int)i, err.text);
        CHECK(gb_file_count(dir) == 1, "disk %d: a file was left", (int)i);
        request.resume = true;
        for (int run = 0; run < 3; run++) {
            disk_bytes = disks[i] + (run == 1 ? 4096 : 0);
            spk_status status = convert(TINY36, out, &request);
            if (status == SPK_OK && run == 1) break;                        /* a block more was enough */
            char says[GB_PATH_MAX + 64];
            (void)snprintf(says, sizeof says, "; %s keeps what was done for --resume", strrchr(unfinished(), '/') + 1);
            CHECK(status == SPK_E_SPACE && strstr(err.text, says) != NULL, "disk %d, run %d: %s", (int)i, run, err.text);
            CHECK(strstr(err.text, "needs ") != NULL && gb_file_count(dir) == 2, "disk %d, run %d: %s", (int)i, run, err.text);
        }
        disk_bytes = UINT64_MAX;
        if (access(out, F_OK) != 0) CHECK_OK(convert(TINY36, out, &request), err);
        CHECK(request.resumed_bytes + (5 << 20) > disks[i], "disk %d: only %d bytes were taken over", (int)i, (int)request.resumed_bytes);
        CHECK(same_file_bytes(out, wanted) && gb_file_count(dir) == 2, "disk %d: another pack", (int)i);
        (void)remove(out);
    }
    disk_bytes = 65536;                                  /* nothing was done yet */
    CHECK(convert(TINY36, out, &(run_request){ .resume = true }) == SPK_E_SPACE && strstr(err.text, "--resume") == NULL, "%s", err.text);
    disk_bytes = UINT64_MAX;
    CHECK(gb_file_count(dir) == 1, "a file was left");
    run_request request = { .resume = true };
    is_sync_full = true;
    CHECK(convert(TINY36, out, &request) == SPK_E_SPACE && strstr(err.text, "keeps what was done for --resume") != NULL, "%s", err.text);
    CHECK_OK(convert(TINY36, out, &request), err);
    CHECK(request.resumed_bytes > whole - (1 << 20) && same_file_bytes(out, wanted), "%d bytes were taken over", (int)request.resumed_bytes);
    gb_remove_dir(dir);
}

/* Somebody else took the room for a moment: a run that is killed after that, with --resume or not, is gone on with all the same. */
static void a_kill_after_a_full_disk_is_gone_on_with(void) {
    make_fast_dir();
    const char *wanted = in_dir("wanted.spk"), *out = in_dir("out.spk");
    uint64_t resumed_bytes[2] = { 0 };
    CHECK_OK(pack(TINY36, wanted, &(pack_request){ .recipe = "native" }), err);
    full_once_bytes = 5 << 20;
    for (int is_full = 0; is_full < 2; is_full++) {
        full_once_count = is_full;                       /* in the child's memory, too */
        leave_unfinished(out, 11 << 20);
        full_once_count = 0;
        CHECK_OK(resume_native(out, &resumed_bytes[is_full]), err);
        CHECK(same_file_bytes(out, wanted), "another pack");
        (void)remove(out);
    }
    CHECK(resumed_bytes[0] > 0 && resumed_bytes[0] == resumed_bytes[1], "%d and %d bytes were taken over", (int)resumed_bytes[0],
          (int)resumed_bytes[1]);
    gb_remove_dir(dir);
}

/* In a process whose files, or whose file system, at DIR/fs, may have `limit_bytes`: its exit status.  The pack has needed_bytes. */
static int convert_within(bool is_mounted, uint64_t limit_bytes, uint64_t needed_bytes, const char *set, const char *wanted) {
    const char *at = in_dir("fs"), *out = is_mounted ? in_dir("fs/out.spk") : in_dir("out.spk");
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit limit = { limit_bytes, limit_bytes };
        char size[32];
        (void)snprintf(size, sizeof size, "size=%llu", (unsigned long long)limit_bytes);
        (void)signal(SIGXFSZ, SIG_IGN);
        if (!is_mounted && setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(3);
        if (is_mounted && (unshare(CLONE_NEWNS) != 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
                           mount("tmpfs", at, "tmpfs", 0, size) != 0))
            _exit(77);
        spk_status status = convert(TINY36, out, &(run_request){ .set = set });
        if (status == SPK_OK) _exit(same_file_bytes(out, wanted) && check_failures == 0 ? 0 : 4);
        unsigned long long needed = 0, had = 0;          /* needed: up to where the pack was when it was found, at least */
        const char *told = strstr(err.text, "needs ");
        int read = told == NULL ? 0
            : is_mounted ? sscanf(told, "needs %llu bytes, but the file system has only %llu bytes available", &needed, &had)
                         : sscanf(told, "needs %llu bytes, but files of this process may have only %llu (ulimit -f)", &needed, &had);
        bool is_told = read == 2 && had == limit_bytes && needed > had && needed <= needed_bytes;
        if (status != SPK_E_SPACE || !is_told) _exit(5);
        _exit(gb_file_count(is_mounted ? at : dir) == (is_mounted ? 0 : 2) ? 1 : 6);      /* DIR has fs and wanted.spk */
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status), "the child: %x", status);
    return WEXITSTATUS(status);
}

/* Nothing that fits is refused, and what is short of a block leaves nothing: whether that is known beforehand, or only at the end,
 * where provenance (here a recipe's text) takes more than a block. */
static void a_pack_that_just_fits_is_made(void) {
    static char longer[6000];
    (void)memset(longer, 'x', sizeof longer - 1);
    static const char head[] = ".*_(gate|up|down", tail[] = ")_shexp\\.weight=Q4_K";
    memcpy(longer, head, sizeof head - 1);
    longer[sizeof head - 1] = '|';
    memcpy(longer + sizeof longer - sizeof tail, tail, sizeof tail);
    const char *const sets[] = { NULL, longer };
    make_fast_dir();
    const char *wanted = in_dir("wanted.spk"), *at = in_dir("fs");
    CHECK(mkdir(at, 0755) == 0, "mkdir");
    for (int s = 0; s < 2; s++)
        for (int is_mounted = 0; is_mounted < 2; is_mounted++) {
            struct stat info = { .st_size = 0 };
            CHECK_OK(convert(TINY36, wanted, &(run_request){ .replace = true, .set = sets[s] }), err);
            CHECK(stat(wanted, &info) == 0, "%s", wanted);
            int fits = convert_within(is_mounted, (uint64_t)info.st_size, (uint64_t)info.st_size, sets[s], wanted);
            if (fits == 77) {
                SKIP("no permission to mount a small file system");
                continue;
            }
            CHECK(fits == 0, "%d, mounted %d: a pack of %d bytes: %d", s, is_mounted, (int)info.st_size, fits);
            (void)remove(in_dir("out.spk"));
            int lacks = convert_within(is_mounted, (uint64_t)info.st_size - 4096, (uint64_t)info.st_size, sets[s], wanted);
            CHECK(lacks == 1, "%d, mounted %d: a block less: %d", s, is_mounted, lacks);
        }
    gb_remove_dir(dir);
}

int main(void) {
    RUN(a_file_size_limit_is_said_and_leaves_nothing);
    RUN(a_small_file_system_is_said_and_left_empty);
    RUN(a_pack_that_just_fits_is_made);
    RUN(a_full_disk_leaves_what_resume_goes_on_from);
    RUN(a_kill_after_a_full_disk_is_gone_on_with);
    return CHECK_EXIT();
}
