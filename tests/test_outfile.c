/* tests/test_outfile.c - output files appear whole or not at all, and never in place of what should stay. */
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include "formats/outfile.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

static char dir[GB_PATH_MAX];

/* What somebody else does just before a lock is asked for, or before the n-th sync; called once. */
static void (*before_lock)(void), (*before_sync)(void);
static int syncs_until;
int flock(int fd, int operation) {
    void (*act)(void) = before_lock;
    before_lock = NULL;
    if (act != NULL) act();
    return (int)syscall(SYS_flock, fd, operation);
}
int fsync(int fd) {
    if (before_sync != NULL && --syncs_until == 0) {
        void (*act)(void) = before_sync;
        before_sync = NULL;
        act();
    }
    return (int)syscall(SYS_fsync, fd);
}

/* A disk that has so many bytes left, if there is one. */
static bool     is_disk_small;
static uint64_t disk_left_bytes;
int fstatvfs(int fd, struct statvfs *out) {
    struct statfs fs;
    if (fstatfs(fd, &fs) != 0) return -1;
    *out = (struct statvfs){ .f_frsize = (unsigned long)fs.f_bsize, .f_bavail = fs.f_bavail };
    if (is_disk_small) *out = (struct statvfs){ .f_frsize = 1, .f_bavail = disk_left_bytes };
    return 0;
}
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at) {
    if (is_disk_small && disk_left_bytes == 0) {
        errno = ENOSPC;
        return -1;
    }
    if (is_disk_small && size > disk_left_bytes) size = disk_left_bytes;
    ssize_t written = syscall(SYS_pwrite64, fd, bytes, size, at);
    if (is_disk_small && written > 0) disk_left_bytes -= (uint64_t)written;
    return written;
}

static void put_file(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0) abort();
}

static bool holds(const char *path, const char *text) {
    char  got[64] = { 0 };
    FILE *file = fopen(path, "rb");
    if (file == NULL) return false;
    size_t size = fread(got, 1, sizeof got - 1, file);
    fclose(file);
    return size == strlen(text) && memcmp(got, text, size) == 0;
}

/* The path of the temporary file;  if there is none. */
static char *temp_of(char path[GB_PATH_MAX]) {
    DIR *open_dir = opendir(dir);
    if (open_dir == NULL) abort();
    path[0] = '\0';
    for (struct dirent *entry; (entry = readdir(open_dir)) != NULL;)
        if (strncmp(entry->d_name, ".spk-", 5) == 0) gb_path(path, dir, entry->d_name);
    closedir(open_dir);
    return path;
}

static void write_text(spk_outfile *file, const char *text) {
    spk_error err = { 0 };
    CHECK_OK(spk_outfile_write(file, 0, text, strlen(text), &err), err);
}

static void the_file_appears_at_commit(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    CHECK_OK(spk_outfile_create(gb_path(path, dir, "new"), false, 6, &file, &err), err);
    CHECK_OK(spk_outfile_write(file, 3, "def", 3, &err), err);
    CHECK_OK(spk_outfile_write(file, 0, "abc", 3, &err), err);
    CHECK(access(path, F_OK) != 0, "nothing there before commit");
    CHECK_OK(spk_outfile_commit(file, &err), err);
    CHECK(holds(path, "abcdef") && gb_file_count(dir) == 1, "the file, and nothing else");
    (void)remove(path);
}

/* Aligned pieces past the page cache, unaligned ones through it, in one file. */
static void large_aligned_pieces_mix_with_others(void) {
    enum { MIB = 1 << 20 };
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    uint8_t     *piece = aligned_alloc(4096, MIB), *whole = calloc(3 * MIB + 5, 1);
    for (size_t i = 0; i < MIB; i++) piece[i] = (uint8_t)(i * 7 + i / 4096);
    CHECK_OK(spk_outfile_create(gb_path(path, dir, "large"), false, 3 * MIB + 5, &file, &err), err);
    CHECK_OK(spk_outfile_write(file, 2 * MIB, piece, MIB, &err), err);
    CHECK_OK(spk_outfile_write(file, 3 * MIB, piece, 5, &err), err);
    CHECK_OK(spk_outfile_write(file, 100, piece, 4096, &err), err);
    CHECK_OK(spk_outfile_write(file, MIB, piece, MIB, &err), err);
    CHECK_OK(spk_outfile_commit(file, &err), err);
    FILE *back = fopen(path, "rb");
    size_t size = back ? fread(whole, 1, 3 * MIB + 5, back) : 0;
    CHECK(size == 3 * MIB + 5 && back != NULL && fgetc(back) == EOF, "size %zu", size);
    CHECK(memcmp(whole + MIB, piece, MIB) == 0 && memcmp(whole + 2 * MIB, piece, MIB) == 0, "aligned pieces");
    CHECK(memcmp(whole + 100, piece, 4096) == 0 && memcmp(whole + 3 * MIB, piece, 5) == 0, "the others");
    if (back != NULL) (void)fclose(back);
    (void)remove(path);
    free(piece);
    free(whole);
}

static void abort_leaves_what_was_there(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    put_file(gb_path(path, dir, "old"), "old");
    CHECK_OK(spk_outfile_create(path, true, 3, &file, &err), err);
    write_text(file, "new");
    spk_outfile_abort(file);
    CHECK(holds(path, "old") && gb_file_count(dir) == 1, "unchanged");
    spk_outfile_abort(NULL);
    (void)remove(path);
}

static void replacing_needs_permission(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    put_file(gb_path(path, dir, "old"), "old");
    CHECK(spk_outfile_create(path, false, 3, &file, &err) == SPK_E_EXISTS, "%s", err.text);
    CHECK(strstr(err.text, path) != NULL && file == NULL, "%s", err.text);
    CHECK_OK(spk_outfile_create(path, true, 3, &file, &err), err);
    write_text(file, "new");
    CHECK_OK(spk_outfile_commit(file, &err), err);
    CHECK(holds(path, "new") && gb_file_count(dir) == 1, "replaced");
    (void)remove(path);
}

static void a_file_that_came_meanwhile_stays(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    CHECK_OK(spk_outfile_create(gb_path(path, dir, "race"), false, 3, &file, &err), err);
    write_text(file, "new");
    put_file(path, "other");
    CHECK(spk_outfile_commit(file, &err) == SPK_E_EXISTS, "%s", err.text);
    CHECK(holds(path, "other") && gb_file_count(dir) == 1, "the other file stays");
    (void)remove(path);
}

static void a_symbolic_link_stays_a_link(void) {
    char         path[GB_PATH_MAX], link[GB_PATH_MAX];
    struct stat  status;
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    put_file(gb_path(path, dir, "target"), "old");
    CHECK(symlink("target", gb_path(link, dir, "link")) == 0, "symlink");
    CHECK_OK(spk_outfile_create(link, true, 3, &file, &err), err);
    write_text(file, "new");
    CHECK_OK(spk_outfile_commit(file, &err), err);
    CHECK(holds(path, "new") && lstat(link, &status) == 0 && S_ISLNK(status.st_mode), "the target was replaced");
    (void)remove(path);
    CHECK(spk_outfile_create(link, true, 3, &file, &err) == SPK_E_IO, "a link to nothing");
    CHECK(strstr(err.text, link) != NULL && strstr(err.text, "does not exist") != NULL, "%s", err.text);
    (void)remove(link);
}

/* All that a file system takes as a name: nothing may be put behind it. */
static void a_name_may_have_full_length(void) {
    char         name[256], path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    memset(name, 'n', 255);
    name[255] = '\0';
    for (const char *n = name; n < name + 2; n++) {      /* 255 and 254 bytes */
        CHECK_OK(spk_outfile_create(gb_path(path, dir, n), false, 3, &file, &err), err);
        if (file == NULL) return;
        write_text(file, "new");
        CHECK_OK(spk_outfile_commit(file, &err), err);
        CHECK(holds(path, "new") && gb_file_count(dir) == 1, "%s", n);
        (void)remove(path);
    }
}

/* A run that was killed has left its temporary file; that of another output is not ours to touch. */
static void a_stale_temporary_file_is_no_obstacle(void) {
    char         path[GB_PATH_MAX], stale[GB_PATH_MAX];
    spk_outfile *file = NULL, *second = NULL;
    spk_error    err = { 0 };
    put_file(gb_path(stale, dir, ".spk-0123456789abcdef"), "stale");
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        if (spk_outfile_create(gb_path(path, dir, "new"), false, 3, &file, &err) == SPK_OK) write_text(file, "killed");
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, NULL, 0) == child && gb_file_count(dir) == 2, "a file was left");
    CHECK_OK(spk_outfile_create(gb_path(path, dir, "new"), false, 3, &file, &err), err);
    CHECK_OK(spk_outfile_create(gb_path(path, dir, "second"), false, 3, &second, &err), err);
    if (file == NULL || second == NULL) return;
    write_text(second, "2nd");
    write_text(file, "new");
    CHECK_OK(spk_outfile_commit(second, &err), err);
    CHECK_OK(spk_outfile_commit(file, &err), err);
    CHECK(holds(path, "2nd") && holds(gb_path(path, dir, "new"), "new"), "both files");
    CHECK(holds(stale, "stale") && gb_file_count(dir) == 3, "what is not ours stays");
    (void)remove(path);
    (void)remove(gb_path(path, dir, "second"));
    (void)remove(stale);
}

/* Leaves a temporary file of "new" with some bytes in it, as a run does that is killed. */
static void leave_temporary_file(void) {
    char path[GB_PATH_MAX];
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        spk_outfile *file = NULL;
        if (spk_outfile_create(gb_path(path, dir, "new"), false, 3, &file, NULL) == SPK_OK) write_text(file, "left");
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, NULL, 0) == child && gb_file_count(dir) == 1, "a file was left");
}

/* How a child ends that reopens "new", writes to it or not, and then aborts (signal_number 0) or gets a signal. */
static int reopen_and_end(bool writes, int signal_number) {
    char path[GB_PATH_MAX];
    int  status = 0;
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        spk_outfile *file = NULL;
        char         left[4];
        spk_outfile_remove_on_signals();
        if (spk_outfile_reopen(gb_path(path, dir, "new"), false, 0, &file, NULL) != SPK_OK) _exit(1);
        if (spk_outfile_read(file, 0, left, 4, NULL) != SPK_OK || memcmp(left, "left", 4) != 0) _exit(2);
        if (spk_outfile_expect(file, UINT64_C(1) << 60, NULL) != SPK_E_SPACE || spk_outfile_expect(file, 4, NULL) != SPK_OK) _exit(3);
        if (writes) write_text(file, "more");
        if (signal_number != 0) (void)raise(signal_number);
        spk_outfile_abort(file);
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "fork");
    return status;
}

/* Whoever only looked at what a killed run left, leaves it to the next one. */
static void what_was_left_stays_until_it_is_written_to(void) {
    for (int ending = 0; ending < 2; ending++) {
        int signal_number = ending == 0 ? 0 : SIGTERM, status;
        leave_temporary_file();
        status = reopen_and_end(false, signal_number);
        CHECK(status == signal_number && gb_file_count(dir) == 1, "ended with %x, %d files", (unsigned)status, gb_file_count(dir));
        status = reopen_and_end(true, signal_number);
        CHECK(status == signal_number && gb_file_count(dir) == 0, "ended with %x, %d files", (unsigned)status, gb_file_count(dir));
    }
}

static void a_replaced_file_keeps_its_permissions(void) {
    static const mode_t modes[] = { 0600, 0640, 0664, 0777 };
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    put_file(gb_path(path, dir, "old"), "old");
    for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
        struct stat before, after;
        CHECK(chmod(path, modes[i]) == 0, "chmod");
        if (geteuid() == 0) CHECK(chown(path, 65534, 65534) == 0, "chown");
        CHECK(stat(path, &before) == 0, "stat");
        CHECK_OK(spk_outfile_create(path, true, 3, &file, &err), err);
        write_text(file, "new");
        CHECK_OK(spk_outfile_commit(file, &err), err);
        CHECK(stat(path, &after) == 0 && after.st_mode == before.st_mode, "mode %o, expected %o",
              (unsigned)after.st_mode, (unsigned)before.st_mode);
        CHECK(after.st_uid == before.st_uid && after.st_gid == before.st_gid, "the owner stays");
        CHECK(after.st_ino != before.st_ino, "it was replaced");
    }
    (void)remove(path);
}

/* As a user for whom the mode counts: root may write to any file, and replaces it. */
static void a_write_protected_file_is_refused(void) {
    char path[GB_PATH_MAX];
    int  status = 0;
    put_file(gb_path(path, dir, "old"), "old");
    CHECK(chmod(path, 0444) == 0 && chmod(dir, 0777) == 0, "chmod");
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        spk_outfile *file = NULL;
        spk_error    err = { 0 };
        if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) _exit(3);
        if (spk_outfile_create(path, true, 3, &file, &err) != SPK_E_IO) _exit(1);
        _exit(strstr(err.text, path) != NULL && strstr(err.text, "write-protected") != NULL ? 0 : 2);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "the child: %x", status);
    CHECK(holds(path, "old") && gb_file_count(dir) == 1, "unchanged");
    CHECK(chmod(dir, 0700) == 0, "chmod");
    if (geteuid() == 0) {
        spk_outfile *file = NULL;
        spk_error    err = { 0 };
        struct stat  after;
        CHECK_OK(spk_outfile_create(path, true, 3, &file, &err), err);
        write_text(file, "new");
        CHECK_OK(spk_outfile_commit(file, &err), err);
        CHECK(holds(path, "new") && stat(path, &after) == 0 && (after.st_mode & 0777) == 0444, "root replaces it");
    }
    (void)remove(path);
}

static void what_cannot_be_a_file_is_refused(void) {
    char path[GB_PATH_MAX];
    CHECK(mkfifo(gb_path(path, dir, "pipe"), 0600) == 0, "mkfifo");
    const struct { const char *path, *text; } cases[] = {
        { dir, "is a directory" }, { path, "pipe" }, { "/dev/null", "device" }, { "", "empty" },
        { "/no/such/directory/x", "No such file or directory" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        spk_outfile *file = NULL;
        spk_error    err = { 0 };
        CHECK(spk_outfile_create(cases[i].path, true, 1, &file, &err) == SPK_E_IO && file == NULL, "%s", cases[i].path);
        CHECK(strstr(err.text, cases[i].text) != NULL && strstr(err.text, cases[i].path) != NULL, "%s", err.text);
    }
    (void)remove(path);
}

static void too_little_space_is_seen_before_writing(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    gb_path(path, dir, "large");
    CHECK(spk_outfile_create(path, false, UINT64_C(1) << 60, &file, &err) == SPK_E_SPACE, "%s", err.text);
    CHECK(strstr(err.text, "needs 1152921504606846976 bytes") != NULL && strstr(err.text, "available") != NULL, "%s",
          err.text);
    CHECK(gb_file_count(dir) == 0, "nothing is left");
    CHECK_OK(spk_outfile_create(path, false, 0, &file, &err), err);
    CHECK(spk_outfile_expect(file, UINT64_C(1) << 60, &err) == SPK_E_SPACE, "%s", err.text);
    CHECK(strstr(err.text, "needs 1152921504606846976 bytes") != NULL && strstr(err.text, path) != NULL, "%s", err.text);
    CHECK_OK(spk_outfile_expect(file, 3, &err), err);
    spk_outfile_abort(file);
    CHECK(gb_file_count(dir) == 0, "nothing is left");
}

/* What the one file in the directory, the temporary one, has taken, as an outfile sees it. */
static uint64_t taken_bytes(void) {
    char        path[GB_PATH_MAX];
    struct stat info = { .st_size = 0 };
    CHECK(stat(temp_of(path), &info) == 0, "stat");
    return (uint64_t)info.st_blocks * 512;
}

static void expect_full(const spk_error *err, const char *path, uint64_t needed_bytes, uint64_t available_bytes) {
    char text[sizeof err->text];
    (void)snprintf(text, sizeof text, "%s: needs %" PRIu64 " bytes, but the file system has only %" PRIu64 " bytes available", path,
                   needed_bytes, available_bytes);
    CHECK(err->status == SPK_E_SPACE && strcmp(err->text, text) == 0, "%s; expected %s", err->text, text);
}

/* Both figures, to the byte: beforehand; while it is written, with what the file has taken; beyond what was expected; and after a cut. */
static void a_full_disk_says_what_is_needed_and_available(void) {
    enum { MIB = 1 << 20 };
    static uint8_t bytes[MIB];
    char           path[GB_PATH_MAX];
    spk_outfile   *file = NULL;
    spk_error      err = { 0 };
    gb_path(path, dir, "full");
    memset(bytes, 7, sizeof bytes);
    is_disk_small = true;
    disk_left_bytes = 5 * MIB;
    CHECK(spk_outfile_create(path, false, 5 * MIB + 1, &file, &err) == SPK_E_SPACE, "%s", err.text);
    expect_full(&err, path, 5 * MIB + 1, 5 * MIB);
    for (int is_cut = 0; is_cut < 2; is_cut++) {
        disk_left_bytes = 5 * MIB;
        CHECK_OK(spk_outfile_create(path, false, 4 * MIB, &file, &err), err);
        CHECK_OK(spk_outfile_write(file, 0, bytes, MIB, &err), err);
        CHECK_OK(spk_outfile_write(file, 9 * MIB, bytes, 4096, &err), err);    /* with a hole in front */
        if (is_cut) CHECK_OK(spk_outfile_cut(file, 2 * MIB, &err), err);
        disk_left_bytes = 8192;
        CHECK(spk_outfile_write(file, MIB, bytes, MIB, &err) == SPK_E_SPACE, "%s", err.text);
        expect_full(&err, path, is_cut ? 4 * MIB : 9 * MIB + 4096, taken_bytes());
        disk_left_bytes = 12288;                              /* now there is some beside */
        CHECK(spk_outfile_expect(file, 6 * MIB, &err) == SPK_E_SPACE, "%s", err.text);
        expect_full(&err, path, is_cut ? 6 * MIB : 9 * MIB + 4096, taken_bytes() + 12288);
        spk_outfile_abort(file);
    }
    is_disk_small = false;
    CHECK(gb_file_count(dir) == 0, "nothing is left");
}

static void what_is_to_be_kept_is_left(void) {
    char         path[GB_PATH_MAX], temp[GB_PATH_MAX], back[4] = { 0 };
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    CHECK_OK(spk_outfile_create(gb_path(path, dir, "kept"), false, 3, &file, &err), err);
    write_text(file, "abc");
    CHECK(strcmp(spk_outfile_keep(file), temp_of(temp)) == 0, "its path");
    spk_outfile_abort(file);
    CHECK(access(path, F_OK) != 0 && holds(temp, "abc"), "left, and not published");
    CHECK_OK(spk_outfile_reopen(path, false, 3, &file, &err), err);
    CHECK_OK(spk_outfile_read(file, 0, back, 3, &err), err);
    CHECK(strcmp(back, "abc") == 0, "%s", back);
    write_text(file, "def");
    spk_outfile_abort(file);
    CHECK(gb_file_count(dir) == 0, "nothing is left");
}

static void a_signal_removes_the_temporary_file(void) {
    static const int signals[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGALRM, SIGXCPU, SIGUSR1, SIGBUS };
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) {
        char  path[GB_PATH_MAX];
        int   status = 0;
        pid_t child;
        gb_path(path, dir, "interrupted");
        (void)fflush(NULL);
        child = fork();
        if (child == 0) {
            spk_outfile *file = NULL;
            (void)signal(signals[i], SIG_DFL);           /* may come ignored, as under nohup */
            (void)setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
            spk_outfile_remove_on_signals();
            if (spk_outfile_create(path, false, 3, &file, NULL) != SPK_OK || gb_file_count(dir) != 1) _exit(1);
            (void)raise(signals[i]);
            _exit(2);
        }
        CHECK(child > 0 && waitpid(child, &status, 0) == child, "fork");
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == signals[i], "ends by signal %d: %x", signals[i], status);
        CHECK(gb_file_count(dir) == 0, "nothing is left after signal %d", signals[i]);
    }
}

static void on_signal(int signal_number) { (void)signal_number; }

/* An ignored signal, and one that the program handles itself, leave the file alone. */
static void other_dispositions_stay(void) {
    char  path[GB_PATH_MAX];
    int   status = 0;
    gb_path(path, dir, "whole");
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        spk_outfile *file = NULL;
        (void)signal(SIGPIPE, SIG_IGN);
        (void)signal(SIGUSR1, on_signal);
        spk_outfile_remove_on_signals();
        if (spk_outfile_create(path, false, 3, &file, NULL) != SPK_OK) _exit(1);
        (void)raise(SIGPIPE);
        (void)raise(SIGUSR1);
        _exit(spk_outfile_write(file, 0, "new", 3, NULL) == SPK_OK && spk_outfile_commit(file, NULL) == SPK_OK ? 0 : 2);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "the child: %x", status);
    CHECK(holds(path, "new") && gb_file_count(dir) == 1, "the file is there");
    (void)remove(path);
}

static void same_file_compares_what_paths_lead_to(void) {
    char a[GB_PATH_MAX], b[GB_PATH_MAX], link_path[GB_PATH_MAX];
    put_file(gb_path(a, dir, "a"), "x");
    put_file(gb_path(b, dir, "b"), "x");
    CHECK(link(a, gb_path(link_path, dir, "c")) == 0, "link");
    CHECK(spk_same_file(a, a) && spk_same_file(a, link_path), "one file by two names");
    CHECK(!spk_same_file(a, b), "two files with the same bytes");
    CHECK(!spk_same_file(a, gb_path(b, dir, "absent")) && !spk_same_file(b, b), "files that do not exist");
}

/* ---- Two writers ---- */

static char         contested[GB_PATH_MAX];
static spk_outfile *other;
static bool         other_resumes;

static void begin_other(void) {
    spk_error err = { 0 };
    CHECK_OK((other_resumes ? spk_outfile_reopen : spk_outfile_create)(contested, false, 3, &other, &err), err);
}

/* Between a file's creation and its lock another writer comes: it has the file, or makes its own; never are both at it. */
static void a_writer_between_creation_and_lock_wins(void) {
    for (int resumes = 0; resumes < 2; resumes++) {
        char         temp[GB_PATH_MAX];
        spk_outfile *file = NULL;
        spk_error    err = { 0 };
        gb_path(contested, dir, "contested");
        other_resumes = resumes;
        before_lock = begin_other;
        CHECK(spk_outfile_create(contested, false, 3, &file, &err) == SPK_E_EXISTS && strstr(err.text, "is being written already") != NULL,
              "%s", err.text);
        CHECK(temp_of(temp)[0] != '\0', "the other's file stays");
        write_text(other, "two");
        CHECK_OK(spk_outfile_commit(other, &err), err);
        CHECK(holds(contested, "two") && gb_file_count(dir) == 1, "the other's file, and nothing else");
        (void)remove(contested);
    }
}

/* A file whose name somebody has given to another one is neither published nor is the other one removed. */
static void a_name_that_leads_elsewhere_is_left_alone(void) {
    for (int commits = 0; commits < 2; commits++) {
        char         temp[GB_PATH_MAX];
        spk_outfile *file = NULL;
        spk_error    err = { 0 };
        CHECK_OK(spk_outfile_create(gb_path(contested, dir, "contested"), false, 3, &file, &err), err);
        write_text(file, "one");
        (void)remove(temp_of(temp));
        other_resumes = false;
        begin_other();
        write_text(other, "two");
        if (commits)
            CHECK(spk_outfile_commit(file, &err) == SPK_E_IO && strstr(err.text, "removed or replaced") != NULL, "%s", err.text);
        else spk_outfile_abort(file);
        CHECK(access(contested, F_OK) != 0 && holds(temp_of(temp), "two"), "nothing published, nothing removed");
        CHECK_OK(spk_outfile_commit(other, &err), err);
        CHECK(holds(contested, "two") && gb_file_count(dir) == 1, "the other's file, and nothing else");
        (void)remove(contested);
    }
}

static char next_temp[GB_PATH_MAX];
static void begin_next_and_end(void) {
    put_file(next_temp, "next");         /* another process's: its slot is not ours */
    spk_outfile_remove_all();
}
static void a_signal_after_the_rename_removes_nothing(void) {
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    CHECK_OK(spk_outfile_create(gb_path(contested, dir, "contested"), false, 3, &file, &err), err);
    write_text(file, "one");
    (void)temp_of(next_temp);
    syncs_until = 2;                     /* the file's, then the directory's */
    before_sync = begin_next_and_end;
    CHECK_OK(spk_outfile_commit(file, &err), err);
    CHECK(holds(contested, "one") && holds(next_temp, "next"), "both files");
    (void)remove(contested);
    (void)remove(next_temp);
}

/* Its sync is the last thing that can fail: that it cannot be had is known at the beginning. */
static void a_directory_that_cannot_be_synced_is_refused_at_once(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    const uid_t user = geteuid();
    CHECK(chmod(dir, 0300) == 0 && (user != 0 || (chown(dir, 65534, (gid_t)-1) == 0 && seteuid(65534) == 0)), "not as root, who may open any");
    CHECK(spk_outfile_create(gb_path(path, dir, "new"), false, 3, &file, &err) == SPK_E_IO && strstr(err.text, "its directory") != NULL, "%s",
          err.text);
    CHECK(seteuid(user) == 0 && (user != 0 || chown(dir, user, (gid_t)-1) == 0) && chmod(dir, 0700) == 0, "as before");
}

int main(void) {
    gb_make_dir(dir);
    RUN(the_file_appears_at_commit);
    RUN(large_aligned_pieces_mix_with_others);
    RUN(abort_leaves_what_was_there);
    RUN(replacing_needs_permission);
    RUN(a_file_that_came_meanwhile_stays);
    RUN(a_symbolic_link_stays_a_link);
    RUN(a_name_may_have_full_length);
    RUN(a_stale_temporary_file_is_no_obstacle);
    RUN(what_was_left_stays_until_it_is_written_to);
    RUN(a_replaced_file_keeps_its_permissions);
    RUN(a_write_protected_file_is_refused);
    RUN(what_cannot_be_a_file_is_refused);
    RUN(too_little_space_is_seen_before_writing);
    RUN(a_full_disk_says_what_is_needed_and_available);
    RUN(what_is_to_be_kept_is_left);
    RUN(a_signal_removes_the_temporary_file);
    RUN(other_dispositions_stay);
    RUN(a_writer_between_creation_and_lock_wins);
    RUN(a_name_that_leads_elsewhere_is_left_alone);
    RUN(a_signal_after_the_rename_removes_nothing);
    RUN(a_directory_that_cannot_be_synced_is_refused_at_once);
    RUN(same_file_compares_what_paths_lead_to);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
