/* formats/outfile.c - see outfile.h.
 *
 * PATH may be a symbolic link: the file it points to is replaced, so that the link stays.  The temporary name is short
 * and not made from PATH's, which may have all the length that a name can have.  A newcomer's trap: the rename alone
 * does not make a file durable; its bytes must be synced before, and the directory after.
 */
#include "formats/outfile.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { TEMP_TRY_COUNT = 1000 };     /* names of this process that runs that died may have left */

struct spk_outfile {
    int         fd;
    int         direct_fd;          /* the same file past the page cache; -1 where the file system has no such thing */
    bool        replace, has_old;
    struct stat old;                /* what is replaced, if there is something */
    char       *path;               /* where the file goes, links resolved */
    char       *temp_path;
    int         signal_slot;        /* in temp_paths; -1 if none */
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

static void remove_and_end(int signal_number) {
    for (int slot = 0; slot < SIGNAL_SLOT_COUNT; slot++) {
        char *path = atomic_exchange(&temp_paths[slot], NULL);
        if (path != NULL) (void)unlink(path);
    }
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
    if (file->fd >= 0) (void)close(file->fd);
    if (file->direct_fd >= 0) (void)close(file->direct_fd);
    bool is_taken = file->signal_slot >= 0 && atomic_exchange(&temp_paths[file->signal_slot], NULL) == NULL;
    if (!is_taken) free(file->temp_path);
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

/* Creates the file and enters it for removal, with no signal to this thread in between. */
static int open_temp(spk_outfile *file, mode_t mode) {
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    int fd = open(file->temp_path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode), code = errno;
    if (fd >= 0) enter_signal_slot(file);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    errno = code;
    return fd;
}

static spk_status create_temp(spk_outfile *file, spk_error *err) {
    const char *slash = strrchr(file->path, '/');
    int         folder_bytes = slash == NULL ? 0 : (int)(slash + 1 - file->path);
    mode_t      mode = file->has_old ? file->old.st_mode & 0777 : 0666;
    for (int number = 0; number < TEMP_TRY_COUNT; number++) {
        free(file->temp_path);
        if (asprintf(&file->temp_path, "%.*s.spk-%ld-%d", folder_bytes, file->path, (long)getpid(), number) < 0) {
            file->temp_path = NULL;
            return out_of_memory(file->path, err);
        }
        file->fd = open_temp(file, mode);
        if (file->fd >= 0 || errno != EEXIST) break;
    }
    if (file->fd < 0)
        return spk_fail(err, SPK_E_IO, "%s: cannot create a temporary file beside it: %s", file->path, strerror(errno));
    if (file->has_old) take_over_permissions(file);
    file->direct_fd = open(file->temp_path, O_WRONLY | O_DIRECT | O_CLOEXEC);
    return SPK_OK;
}

static spk_status check_space(const spk_outfile *file, uint64_t expected_bytes, spk_error *err) {
    struct statvfs fs;
    if (fstatvfs(file->fd, &fs) != 0)
        return spk_fail(err, SPK_E_IO, "%s: cannot ask for free space: %s", file->path, strerror(errno));
    uint64_t available;
    if (__builtin_mul_overflow((uint64_t)fs.f_bavail, (uint64_t)fs.f_frsize, &available)) return SPK_OK;
    if (available >= expected_bytes) return SPK_OK;
    return spk_fail(err, SPK_E_SPACE, "%s: needs %" PRIu64 " bytes, but the file system has only %" PRIu64
                    " bytes available", file->path, expected_bytes, available);
}

spk_status spk_outfile_create(const char *path, bool replace, uint64_t expected_bytes, spk_outfile **out,
                              spk_error *err) {
    spk_outfile *file = calloc(1, sizeof *file);
    if (file == NULL) return out_of_memory(path, err);
    file->fd = file->direct_fd = file->signal_slot = -1;
    file->replace = replace;
    spk_status status = check_target(file, path, err);
    if (status == SPK_OK) status = create_temp(file, err);
    if (status != SPK_OK) goto fail;
    status = check_space(file, expected_bytes, err);
    if (status != SPK_OK) {
        (void)unlink(file->temp_path);
        goto fail;
    }
    *out = file;
    return SPK_OK;
fail:
    free_outfile(file);
    return status;
}

/* Large aligned pieces go past the page cache: copying them into it costs more than half of a native conversion. */
static bool is_direct(const spk_outfile *file, uint64_t offset_bytes, const uint8_t *bytes, uint64_t size_bytes) {
    return file->direct_fd >= 0 && size_bytes >= DIRECT_BYTES_MIN && offset_bytes % DIRECT_ALIGN == 0 &&
           (uintptr_t)bytes % DIRECT_ALIGN == 0 && size_bytes % DIRECT_ALIGN == 0;
}

spk_status spk_outfile_write(spk_outfile *file, uint64_t offset_bytes, const void *bytes, uint64_t size_bytes,
                             spk_error *err) {
    const uint8_t *next = bytes;
    assert(offset_bytes <= INT64_MAX && size_bytes <= INT64_MAX - offset_bytes);
    bool direct_works = true;
    while (size_bytes > 0) {
        bool direct = direct_works && is_direct(file, offset_bytes, next, size_bytes);
        ssize_t written = pwrite(direct ? file->direct_fd : file->fd, next, size_bytes, (off_t)offset_bytes);
        if (written < 0 && errno == EINTR) continue;
        if (written < 0 && direct && errno == EINVAL) {     /* a stricter alignment than ours */
            direct_works = false;
            continue;
        }
        if (written <= 0) {
            int  code = written < 0 ? errno : ENOSPC;
            bool is_full = code == ENOSPC || code == EDQUOT;
            return spk_fail(err, is_full ? SPK_E_SPACE : SPK_E_IO, "%s: cannot write %" PRIu64 " bytes at %" PRIu64
                            ": %s", file->path, size_bytes, offset_bytes, strerror(code));
        }
        next += written;
        offset_bytes += (uint64_t)written;
        size_bytes -= (uint64_t)written;
    }
    return SPK_OK;
}

static spk_status sync_directory(const char *path, spk_error *err) {
    const char *slash = strrchr(path, '/');
    char       *directory = slash == NULL ? strdup(".") : strndup(path, slash == path ? 1 : (size_t)(slash - path));
    if (directory == NULL) return out_of_memory(path, err);
    spk_status status = SPK_OK;
    int        fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* EINVAL: a file system that has nothing to sync for directories. */
    if (fd < 0 || (fsync(fd) != 0 && errno != EINVAL))
        status = spk_fail(err, SPK_E_IO, "%s: is complete, but its directory cannot be synced: %s", path,
                          strerror(errno));
    if (fd >= 0) (void)close(fd);
    free(directory);
    return status;
}

/* Without `replace`, a file that appeared at the path since the start stays. */
static int publish(const spk_outfile *file) {
    if (file->replace) return rename(file->temp_path, file->path);
    int failed = renameat2(AT_FDCWD, file->temp_path, AT_FDCWD, file->path, RENAME_NOREPLACE);
    if (failed == 0 || (errno != EINVAL && errno != ENOSYS)) return failed;
    struct stat target;                                  /* a file system without that flag */
    if (lstat(file->path, &target) != 0) return rename(file->temp_path, file->path);
    errno = EEXIST;
    return -1;
}

spk_status spk_outfile_commit(spk_outfile *file, spk_error *err) {
    spk_status status = SPK_OK;
    if (fsync(file->fd) != 0) {
        bool is_full = errno == ENOSPC || errno == EDQUOT;
        status = spk_fail(err, is_full ? SPK_E_SPACE : SPK_E_IO, "%s: cannot sync: %s", file->path,
                          strerror(errno));
    } else if (publish(file) != 0) {
        status = spk_fail(err, errno == EEXIST ? SPK_E_EXISTS : SPK_E_IO, "%s: cannot rename %s to it: %s", file->path,
                          file->temp_path, strerror(errno));
    }
    if (status != SPK_OK) {
        spk_outfile_abort(file);
        return status;
    }
    status = sync_directory(file->path, err);
    free_outfile(file);
    return status;
}

void spk_outfile_abort(spk_outfile *file) {
    if (file == NULL) return;
    (void)unlink(file->temp_path);
    free_outfile(file);
}

bool spk_same_file(const char *a, const char *b) {
    struct stat first, second;
    return stat(a, &first) == 0 && stat(b, &second) == 0 && first.st_dev == second.st_dev &&
           first.st_ino == second.st_ino;
}
