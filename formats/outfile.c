/* formats/outfile.c - see outfile.h.
 *
 * PATH may be a symbolic link: the file it points to is replaced, so that the link stays.  The temporary name is short,
 * since PATH's may have all the length that a name can have, and always the same for a name, so that two writers of one
 * path meet there: whoever has the lock writes, the other is refused.  A newcomer's traps: the rename alone does not make
 * a file durable, its bytes must be synced before and the directory after; and a lock is on a file, not on its name.  So
 * nobody removes or renames the name but who has locked the file that it leads to, created or not: between its creation
 * and its lock a file may be anybody's.  While that holds, what was seen of the name stays true.
 */
#include "formats/outfile.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include "formats/digest.h"

enum { TEMP_TRY_COUNT = 16 };       /* times that the name may change hands while we look at it */

struct spk_outfile {
    int         fd;
    int         directory_fd;       /* of the directory, to sync it */
    int         direct_fd;          /* the same file past the page cache; -1 where the file system has no such thing */
    bool        replace, has_old;
    bool        is_new;             /* the temporary file was not there before */
    bool        keeps;              /* what an earlier run left in the temporary file */
    bool        stays;              /* abort leaves the temporary file */
    _Atomic bool is_touched;        /* something was to be written */
    uint64_t    expected_bytes;     /* 0: not known */
    _Atomic uint64_t end_bytes;     /* of the farthest write */
    struct stat old;                /* what is replaced, if there is something */
    char       *path;               /* where the file goes, links resolved */
    char       *temp_path;
    int         signal_slot;        /* in temp_paths; -1 if none */
    bool        is_ending;          /* a signal's handler has taken temp_path out of the slot */
};

enum { DIRECT_ALIGN = 4096, DIRECT_BYTES_MIN = 1 << 20 };

/* Temporary files that a signal removes.  Whoever takes a path out of its slot owns the string, so that a handler never
 * reads one that another thread frees. */
enum { SIGNAL_SLOT_COUNT = 8 };
static _Atomic(char *) temp_paths[SIGNAL_SLOT_COUNT];

static void enter_signal_slot(spk_outfile *file) {
    for (int slot = 0; slot < SIGNAL_SLOT_COUNT; slot++) {
        char *empty = NULL;
        if (!atomic_compare_exchange_strong(&temp_paths[slot], &empty, file->temp_path)) continue;
        file->signal_slot = slot;
        return;
    }
}

/* Before the name is given up, or a signal would remove what the next writer makes of it. */
static void leave_signal_slot(spk_outfile *file) {
    if (file->signal_slot < 0) return;
    if (atomic_exchange(&temp_paths[file->signal_slot], NULL) == NULL) file->is_ending = true;
    file->signal_slot = -1;
}

void spk_outfile_remove_all(void) {
    for (int slot = 0; slot < SIGNAL_SLOT_COUNT; slot++) {
        char *path = atomic_exchange(&temp_paths[slot], NULL);
        if (path != NULL) (void)unlink(path);
    }
}

static void remove_and_end(int signal_number) {
    spk_outfile_remove_all();
    (void)raise(signal_number);     /* the default action by now: SA_RESETHAND */
}

void spk_outfile_remove_on_signals(void) {
    static const int ending[] = { SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGALRM, SIGVTALRM, SIGPROF, SIGXCPU,
                                  SIGUSR1, SIGUSR2, SIGBUS };   /* SIGBUS: a mapped input that somebody cut short */
    for (size_t i = 0; i < sizeof ending / sizeof *ending; i++) {
        struct sigaction action = { .sa_handler = remove_and_end, .sa_flags = (int)(SA_RESETHAND | SA_NODEFER) }, old;
        if (sigaction(ending[i], NULL, &old) != 0 || old.sa_handler != SIG_DFL) continue;
        (void)sigaction(ending[i], &action, NULL);
    }
    (void)signal(SIGXFSZ, SIG_IGN);
}

static spk_status out_of_memory(const char *path, spk_error *err) {
    return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
}

static void free_outfile(spk_outfile *file) {
    leave_signal_slot(file);
    if (file->fd >= 0) (void)close(file->fd);
    if (file->direct_fd >= 0) (void)close(file->direct_fd);
    if (file->directory_fd >= 0) (void)close(file->directory_fd);
    if (!file->is_ending) free(file->temp_path);
    free(file->path);
    free(file);
}

/* What is at `path` now may be replaced; file->path gets the name to write to. */
static spk_status check_target(spk_outfile *file, const char *path, spk_error *err) {
    struct stat link;
    if (path[0] == '\0') return spk_fail(err, SPK_E_IO, "the output path is empty");
    if (stat(path, &file->old) != 0) {
        if (errno != ENOENT) return spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
        if (lstat(path, &link) == 0)
            return spk_fail(err, SPK_E_IO, "%s: is a symbolic link to a file that does not exist; refusing to write",
                            path);
        file->path = strdup(path);
        return file->path != NULL ? SPK_OK : out_of_memory(path, err);
    }
    if (!S_ISREG(file->old.st_mode))
        return spk_fail(err, SPK_E_IO, "%s: is %s; only a regular file can be replaced", path,
                        S_ISDIR(file->old.st_mode) ? "a directory" : "a device, pipe or socket");
    if (!file->replace) return spk_fail(err, SPK_E_EXISTS, "%s: exists already", path);
    if (faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) != 0)
        return spk_fail(err, SPK_E_IO, "%s: is write-protected (%s); refusing to replace it", path, strerror(errno));
    file->has_old = true;
    file->path = realpath(path, NULL);
    return file->path != NULL ? SPK_OK : spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
}

/* Whoever could not read the old file must not be able to read the new one, so the mode is there from the start. */
static void take_over_permissions(spk_outfile *file) {
    struct stat now;
    /* Not to be had everywhere: another user's file, a file system without owners.  The file is no worse then. */
    bool is_owned = fstat(file->fd, &now) == 0 && now.st_uid == file->old.st_uid && now.st_gid == file->old.st_gid;
    is_owned = is_owned || fchown(file->fd, file->old.st_uid, file->old.st_gid) == 0;
    (void)is_owned;
    (void)fchmod(file->fd, file->old.st_mode & 0777);    /* what the umask took away */
}

/* ".spk-" and half a digest of PATH's name, beside it. */
static spk_status name_temp(spk_outfile *file, spk_error *err) {
    const char *slash = strrchr(file->path, '/'), *name = slash == NULL ? file->path : slash + 1;
    spk_digest  digest = spk_digest_of(name, strlen(name));
    char        text[33];
    spk_digest_text(&digest, text);
    if (asprintf(&file->temp_path, "%.*s.spk-%.16s", (int)(name - file->path), file->path, text) >= 0) return SPK_OK;
    file->temp_path = NULL;
    return out_of_memory(file->path, err);
}

/* Whether a name leads to an open file; *info gets what is known of that file. */
static bool leads_to(const char *path, int fd, struct stat *info) {
    struct stat named;
    return fstat(fd, info) == 0 && lstat(path, &named) == 0 && named.st_dev == info->st_dev && named.st_ino == info->st_ino;
}

/* A temporary file that was there: ours, and no other name for somebody else's. */
static spk_status check_left_over(const spk_outfile *file, const struct stat *info, spk_error *err) {
    bool is_ours = info->st_uid == geteuid() || (file->has_old && info->st_uid == file->old.st_uid);
    if (S_ISREG(info->st_mode) && info->st_nlink == 1 && is_ours) return SPK_OK;
    return spk_fail(err, SPK_E_IO, "%s: %s is in the way: it is not an unfinished file of this user; please remove it",
                    file->path, file->temp_path);
}

/* One attempt: file->fd is the locked temporary file, or -1 where the name changed hands meanwhile. */
static spk_status take_temp(spk_outfile *file, mode_t mode, spk_error *err) {
    struct stat info;
    int  fd = open(file->temp_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    bool is_new = fd >= 0, was_there = !is_new && errno == EEXIST;
    if (was_there) fd = open(file->temp_path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 && was_there && errno == ENOENT) return SPK_OK;
    if (fd < 0)
        return spk_fail(err, SPK_E_IO, "%s: cannot create the temporary file %s: %s", file->path, file->temp_path,
                        strerror(errno));
    spk_status status = SPK_OK;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)     /* other errors: a file system without locks */
        status = spk_fail(err, SPK_E_EXISTS, "%s: is being written already (%s is locked)", file->path,
                          file->temp_path);
    bool is_there = status == SPK_OK && leads_to(file->temp_path, fd, &info);
    is_new = is_new && is_there && info.st_size == 0;                   /* nobody else was here before the lock */
    if (is_there && !is_new) status = check_left_over(file, &info, err);
    if (status == SPK_OK && is_there && (is_new || file->keeps)) {
        file->fd = fd;
        file->is_new = is_new;
        if (is_new) enter_signal_slot(file);
        return SPK_OK;
    }
    if (is_there && status == SPK_OK) (void)unlink(file->temp_path);    /* what a run that was killed left, to start clean */
    (void)close(fd);
    return status;
}

/* No signal to this thread comes between a file's creation and its entry for removal. */
static spk_status create_temp(spk_outfile *file, spk_error *err) {
    sigset_t all, before;
    mode_t   mode = file->has_old ? file->old.st_mode & 0777 : 0666;
    SPK_TRY(name_temp(file, err));
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    spk_status status = SPK_OK;
    for (int attempt = 0; attempt < TEMP_TRY_COUNT && status == SPK_OK && file->fd < 0; attempt++)
        status = take_temp(file, mode, err);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (status == SPK_OK && file->fd < 0)
        status = spk_fail(err, SPK_E_EXISTS, "%s: other processes keep taking the temporary file %s", file->path,
                          file->temp_path);
    SPK_TRY(status);
    if (file->has_old) take_over_permissions(file);
    struct stat own, direct;
    file->direct_fd = open(file->temp_path, O_WRONLY | O_DIRECT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file->direct_fd < 0 || (fstat(file->fd, &own) == 0 && fstat(file->direct_fd, &direct) == 0 && own.st_dev == direct.st_dev &&
                                own.st_ino == direct.st_ino))
        return SPK_OK;
    (void)close(file->direct_fd);        /* somebody has taken the name, who cares for no locks */
    file->direct_fd = -1;
    return SPK_OK;
}

/* What the file may take: what is free, and what it has by now.  False where it cannot be asked for. */
static bool find_available(const spk_outfile *file, uint64_t *bytes) {
    struct statvfs fs;
    struct stat    info;
    if (fstatvfs(file->fd, &fs) != 0 || fstat(file->fd, &info) != 0) return false;
    if (__builtin_mul_overflow((uint64_t)fs.f_bavail, (uint64_t)fs.f_frsize, bytes) ||
        __builtin_add_overflow((uint64_t)info.st_blocks * 512, *bytes, bytes))
        *bytes = UINT64_MAX;
    return true;
}

/* What files of this process may have; UINT64_MAX: there is no limit. */
static uint64_t size_limit(void) {
    struct rlimit limit;
    bool is_limited = getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return is_limited ? (uint64_t)limit.rlim_cur : UINT64_MAX;
}

/* "needs N bytes, but ...": what was expected, or what was written up to here where that is more. */
static spk_status fail_full(const spk_outfile *file, bool is_quota, spk_error *err) {
    uint64_t available, end_bytes = atomic_load(&file->end_bytes);
    uint64_t needed_bytes = end_bytes > file->expected_bytes ? end_bytes : file->expected_bytes;
    if (size_limit() < needed_bytes)
        return spk_fail(err, SPK_E_SPACE, "%s: needs %" PRIu64 " bytes, but files of this process may have only %" PRIu64
                        " (ulimit -f)", file->path, needed_bytes, size_limit());
    if (is_quota)
        return spk_fail(err, SPK_E_SPACE, "%s: needs %" PRIu64 " bytes, but the disk quota is used up", file->path, needed_bytes);
    if (!find_available(file, &available))
        return spk_fail(err, SPK_E_SPACE, "%s: needs %" PRIu64 " bytes, but the file system is full", file->path, needed_bytes);
    return spk_fail(err, SPK_E_SPACE, "%s: needs %" PRIu64 " bytes, but the file system has only %" PRIu64
                    " bytes available", file->path, needed_bytes, available);
}

static spk_status check_space(const spk_outfile *file, spk_error *err) {
    uint64_t available;
    if (!find_available(file, &available))
        return spk_fail(err, SPK_E_IO, "%s: cannot ask for free space: %s", file->path, strerror(errno));
    if (available >= file->expected_bytes && size_limit() >= file->expected_bytes) return SPK_OK;
    return fail_full(file, false, err);
}

/* At the beginning: only the sync itself is left to fail when the work is done. */
static spk_status open_directory(spk_outfile *file, spk_error *err) {
    const char *path = file->path, *slash = strrchr(path, '/');
    char       *directory = slash == NULL ? strdup(".") : strndup(path, slash == path ? 1 : (size_t)(slash - path));
    if (directory == NULL) return out_of_memory(path, err);
    file->directory_fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int code = errno;
    free(directory);
    if (file->directory_fd >= 0) return SPK_OK;
    return spk_fail(err, SPK_E_IO, "%s: its directory cannot be opened to sync it: %s", path, strerror(code));
}

/* What --resume may go on from stays until it is written to; what the name leads to instead of our file is not ours. */
static void remove_temp(const spk_outfile *file) {
    struct stat info;
    if (file->stays) return;
    if ((!file->keeps || file->is_new || file->is_touched) && leads_to(file->temp_path, file->fd, &info)) (void)unlink(file->temp_path);
}

static spk_status begin(const char *path, bool replace, bool keeps, uint64_t expected_bytes, spk_outfile **out,
                        spk_error *err) {
    spk_outfile *file = calloc(1, sizeof *file);
    if (file == NULL) return out_of_memory(path, err);
    file->fd = file->directory_fd = file->direct_fd = file->signal_slot = -1;
    file->replace = replace;
    file->keeps = keeps;
    file->expected_bytes = expected_bytes;
    spk_status status = check_target(file, path, err);
    if (status == SPK_OK) status = open_directory(file, err);
    if (status == SPK_OK) status = create_temp(file, err);
    if (status == SPK_OK) status = check_space(file, err);
    if (status == SPK_OK) {
        *out = file;
        return SPK_OK;
    }
    spk_outfile_abort(file);
    return status;
}

spk_status spk_outfile_create(const char *path, bool replace, uint64_t expected_bytes, spk_outfile **out,
                              spk_error *err) {
    return begin(path, replace, false, expected_bytes, out, err);
}

spk_status spk_outfile_reopen(const char *path, bool replace, uint64_t expected_bytes, spk_outfile **out,
                              spk_error *err) {
    return begin(path, replace, true, expected_bytes, out, err);
}

spk_status spk_outfile_expect(spk_outfile *file, uint64_t expected_bytes, spk_error *err) {
    file->expected_bytes = expected_bytes;
    return check_space(file, err);
}

/* Large aligned pieces go past the page cache: copying them into it costs more than half of a native conversion. */
static bool is_direct(const spk_outfile *file, uint64_t offset_bytes, const uint8_t *bytes, uint64_t size_bytes) {
    return file->direct_fd >= 0 && size_bytes >= DIRECT_BYTES_MIN && offset_bytes % DIRECT_ALIGN == 0 &&
           (uintptr_t)bytes % DIRECT_ALIGN == 0 && size_bytes % DIRECT_ALIGN == 0;
}

/* Before it is written. */
static void note_write(spk_outfile *file, uint64_t end_bytes) {
    if (!atomic_exchange(&file->is_touched, true) && file->signal_slot < 0) enter_signal_slot(file);
    uint64_t farthest = atomic_load(&file->end_bytes);
    while (farthest < end_bytes && !atomic_compare_exchange_weak(&file->end_bytes, &farthest, end_bytes)) {}
}

spk_status spk_outfile_write(spk_outfile *file, uint64_t offset_bytes, const void *bytes, uint64_t size_bytes,
                             spk_error *err) {
    const uint8_t *next = bytes;
    assert(offset_bytes <= INT64_MAX && size_bytes <= INT64_MAX - offset_bytes);
    const uint64_t end_bytes = offset_bytes + size_bytes;
    bool direct_works = true;
    note_write(file, end_bytes);
    while (size_bytes > 0) {
        bool direct = direct_works && is_direct(file, offset_bytes, next, size_bytes);
        ssize_t written = pwrite(direct ? file->direct_fd : file->fd, next, size_bytes, (off_t)offset_bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && direct && errno == EINVAL) {     /* a stricter alignment than ours */
            direct_works = false;
            continue;
        }
        if (written <= 0) {
            int code = written < 0 ? errno : ENOSPC;
            if (code == ENOSPC || code == EDQUOT || code == EFBIG) return fail_full(file, code == EDQUOT, err);
            return spk_fail(err, SPK_E_IO, "%s: cannot write %" PRIu64 " bytes at %" PRIu64 ": %s", file->path, size_bytes,
                            offset_bytes, strerror(code));
        }
        next += written;
        offset_bytes += (uint64_t)written;
        size_bytes -= (uint64_t)written;
    }
    return SPK_OK;
}

spk_status spk_outfile_read(spk_outfile *file, uint64_t offset_bytes, void *bytes, uint64_t size_bytes, spk_error *err) {
    uint8_t *next = bytes;
    while (size_bytes > 0) {
        ssize_t got = pread(file->fd, next, size_bytes, (off_t)offset_bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            return spk_fail(err, SPK_E_IO, "%s: cannot read %" PRIu64 " bytes at %" PRIu64 " of the unfinished file: %s",
                            file->path, size_bytes, offset_bytes, got < 0 ? strerror(errno) : "it ends before");
        next += got;
        offset_bytes += (uint64_t)got;
        size_bytes -= (uint64_t)got;
    }
    return SPK_OK;
}

bool spk_outfile_has_holes(const spk_outfile *file) {
    static const uint32_t without[] = { MSDOS_SUPER_MAGIC, 0x2011BAB0 /* exFAT */, 0x7366746E /* ntfs3 */, 0x5346544E /* NTFS */ };
    struct statfs fs;
    if (fstatfs(file->fd, &fs) != 0) return false;
    for (size_t i = 0; i < sizeof without / sizeof *without; i++)
        if ((uint32_t)fs.f_type == without[i]) return false;
    return true;
}

static spk_status sync_file(const spk_outfile *file, spk_error *err) {
    if (fsync(file->fd) == 0) return SPK_OK;
    if (errno == ENOSPC || errno == EDQUOT)
        return fail_full(file, errno == EDQUOT, err);
    return spk_fail(err, SPK_E_IO, "%s: cannot sync: %s", file->path, strerror(errno));
}

/* Synced first: what is cut off is what a run that dies in the long sync would go on from. */
spk_status spk_outfile_cut(spk_outfile *file, uint64_t size_bytes, spk_error *err) {
    if (atomic_load(&file->end_bytes) > size_bytes) atomic_store(&file->end_bytes, size_bytes);
    SPK_TRY(sync_file(file, err));
    if (ftruncate(file->fd, (off_t)size_bytes) == 0) return SPK_OK;
    return spk_fail(err, SPK_E_IO, "%s: cannot cut it to %" PRIu64 " bytes: %s", file->path, size_bytes, strerror(errno));
}

void spk_outfile_release(spk_outfile *file, uint64_t offset_bytes, uint64_t size_bytes) {
    if (size_bytes > 0) (void)fallocate(file->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset_bytes, (off_t)size_bytes);
}

static spk_status sync_directory(const spk_outfile *file, spk_error *err) {
    /* EINVAL: a file system that has nothing to sync for directories. */
    if (fsync(file->directory_fd) == 0 || errno == EINVAL) return SPK_OK;
    return spk_fail(err, SPK_E_IO, "%s: is complete, but its directory cannot be synced: %s", file->path, strerror(errno));
}

/* Without `replace`, a file that appeared at the path since the start stays. */
static int rename_temp(const spk_outfile *file) {
    if (file->replace) return rename(file->temp_path, file->path);
    int failed = renameat2(AT_FDCWD, file->temp_path, AT_FDCWD, file->path, RENAME_NOREPLACE);
    if (failed == 0 || (errno != EINVAL && errno != ENOSYS)) return failed;
    struct stat target;                                  /* a file system without that flag */
    if (lstat(file->path, &target) != 0) return rename(file->temp_path, file->path);
    errno = EEXIST;
    return -1;
}

static spk_status publish(spk_outfile *file, spk_error *err) {
    struct stat info;
    leave_signal_slot(file);
    if (file->is_ending) return spk_fail(err, SPK_E_IO, "%s: a signal ends the process", file->path);
    if (!leads_to(file->temp_path, file->fd, &info))
        return spk_fail(err, SPK_E_IO, "%s: its temporary file %s was removed or replaced while it was written", file->path, file->temp_path);
    if (rename_temp(file) == 0) return SPK_OK;
    return spk_fail(err, errno == EEXIST ? SPK_E_EXISTS : SPK_E_IO, "%s: cannot rename %s to it: %s", file->path, file->temp_path,
                    strerror(errno));
}

spk_status spk_outfile_commit(spk_outfile *file, spk_error *err) {
    spk_status status = sync_file(file, err);
    if (status == SPK_OK) status = publish(file, err);
    if (status != SPK_OK) {
        spk_outfile_abort(file);
        return status;
    }
    status = sync_directory(file, err);
    free_outfile(file);
    return status;
}

void spk_outfile_abort(spk_outfile *file) {
    if (file == NULL) return;
    leave_signal_slot(file);
    if (file->fd >= 0) remove_temp(file);
    free_outfile(file);
}

const char *spk_outfile_keep(spk_outfile *file) {
    file->stays = true;
    return file->temp_path;
}

bool spk_same_file(const char *a, const char *b) {
    struct stat first, second;
    return stat(a, &first) == 0 && stat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}
