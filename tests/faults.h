/* tests/faults.h - makes the k-th call of a kind fail, and counts what is not given back.
 *
 * The linker sends the library's calls here (--wrap, see FAULT_WRAPS in the Makefile): nothing in the library knows of it.
 * Calls that libzstd, libpcre2 and libc make among themselves are not seen, so the allocations inside are made to fail by
 * the functions that the library calls: strdup, asprintf, open_memstream, XXH3_createState, ZSTD_compress, ...
 */
#ifndef SPK_TEST_FAULTS_H
#define SPK_TEST_FAULTS_H

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

typedef enum {
    FAULT_NONE, FAULT_MEMORY, FAULT_OPEN, FAULT_STAT, FAULT_READ, FAULT_END, FAULT_READ_SHORT, FAULT_WRITE, FAULT_FULL,
    FAULT_WRITE_SHORT, FAULT_INTERRUPT, FAULT_SYNC, FAULT_CUT, FAULT_RENAME, FAULT_MAP, FAULT_VIEW, FAULT_THREAD, FAULT_KIND_COUNT
} fault_kind;
static const char *const fault_names[FAULT_KIND_COUNT] = {
    "none", "memory", "open", "stat", "read", "end of file", "short read", "write", "disk full", "short write", "interrupted",
    "sync", "truncate", "rename", "map", "view", "thread" };

static fault_kind fault_armed;
static int fault_sync_code = EIO, fault_full_code = ENOSPC;
static bool fault_is_viewless;           /* as where the system cannot bring pages of a mapping: all of it is read */
static _Atomic int64_t fault_left;       /* calls of the kind until it fires */
static _Atomic bool fault_fired;
static _Atomic int64_t mapped_bytes, thread_count;

/* ---- Blocks that are not freed ---- */

enum { BLOCK_SLOTS = 1 << 16 };
static pthread_mutex_t block_lock = PTHREAD_MUTEX_INITIALIZER;
static void *blocks[BLOCK_SLOTS];
static int64_t block_count;
static bool is_counting;

static inline size_t block_home(const void *p) { return (size_t)(((uintptr_t)p >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> 48); }

static inline void *block_add(void *p) {
    if (p == NULL || !is_counting) return p;
    pthread_mutex_lock(&block_lock);
    size_t at = block_home(p);
    while (blocks[at] != NULL) at = (at + 1) % BLOCK_SLOTS;
    blocks[at] = p;
    if (++block_count == BLOCK_SLOTS) abort();
    pthread_mutex_unlock(&block_lock);
    return p;
}

static inline void block_remove(void *p) {
    if (p == NULL) return;
    pthread_mutex_lock(&block_lock);
    size_t at = block_home(p);
    while (blocks[at] != NULL && blocks[at] != p) at = (at + 1) % BLOCK_SLOTS;
    if (blocks[at] == p) {
        block_count--;
        for (size_t hole = at, next = (at + 1) % BLOCK_SLOTS;; next = (next + 1) % BLOCK_SLOTS) {
            if (blocks[next] == NULL) {
                blocks[hole] = NULL;
                break;
            }
            if ((next - block_home(blocks[next])) % BLOCK_SLOTS >= (next - hole) % BLOCK_SLOTS) {
                blocks[hole] = blocks[next];
                hole = next;
            }
        }
    }
    pthread_mutex_unlock(&block_lock);
}

/* ---- The faults ---- */

static inline bool fault_now(fault_kind kind, int code) {
    if (kind != fault_armed || atomic_fetch_sub(&fault_left, 1) != 1) return false;
    atomic_store(&fault_fired, true);
    errno = code;
    return true;
}

#define WRAP(type, name, parameters) type __real_##name parameters; type __wrap_##name parameters; type __wrap_##name parameters
#define WRAP_MEMORY(name, parameters, arguments) \
    WRAP(void *, name, parameters) { return fault_now(FAULT_MEMORY, ENOMEM) ? NULL : block_add(__real_##name arguments); }

WRAP_MEMORY(malloc, (size_t size), (size))
WRAP_MEMORY(calloc, (size_t count, size_t size), (count, size))
WRAP_MEMORY(aligned_alloc, (size_t alignment, size_t size), (alignment, size))
WRAP_MEMORY(strdup, (const char *text), (text))
WRAP_MEMORY(strndup, (const char *text, size_t size), (text, size))
WRAP_MEMORY(realpath, (const char *path, char *out), (path, out))
WRAP(void *, realloc, (void *block, size_t size)) {
    if (fault_now(FAULT_MEMORY, ENOMEM)) return NULL;
    void *moved = __real_realloc(block, size);
    if (moved == NULL) return NULL;
    block_remove(block);
    return block_add(moved);
}
WRAP(void, free, (void *block)) {
    block_remove(block);
    __real_free(block);
}
int __wrap_asprintf(char **out, const char *format, ...) __attribute__((format(printf, 2, 3)));
int __wrap_asprintf(char **out, const char *format, ...) {
    if (fault_now(FAULT_MEMORY, ENOMEM)) return -1;
    va_list args;
    va_start(args, format);
    int length = vasprintf(out, format, args);
    va_end(args);
    if (length >= 0) (void)block_add(*out);
    return length;
}
WRAP(void *, XXH3_createState, (void)) { return fault_now(FAULT_MEMORY, ENOMEM) ? NULL : block_add(__real_XXH3_createState()); }
WRAP(int, XXH3_freeState, (void *state)) {
    block_remove(state);
    return __real_XXH3_freeState(state);
}
WRAP(void *, pcre2_match_data_create_8, (uint32_t pairs, void *context)) {
    return fault_now(FAULT_MEMORY, ENOMEM) ? NULL : __real_pcre2_match_data_create_8(pairs, context);
}
enum { ZSTD_NO_MEMORY = -64 };
WRAP(size_t, ZSTD_compress, (void *to, size_t room, const void *from, size_t size, int level)) {
    return fault_now(FAULT_MEMORY, ENOMEM) ? (size_t)ZSTD_NO_MEMORY : __real_ZSTD_compress(to, room, from, size, level);
}
WRAP(size_t, ZSTD_decompress, (void *to, size_t room, const void *from, size_t size)) {
    return fault_now(FAULT_MEMORY, ENOMEM) ? (size_t)ZSTD_NO_MEMORY : __real_ZSTD_decompress(to, room, from, size);
}
/* The buffer of a memory stream is the caller's once it is closed; it is not counted, only its stream is refused. */
WRAP(FILE *, open_memstream, (char **bytes, size_t *size)) {
    return fault_now(FAULT_MEMORY, ENOMEM) ? NULL : __real_open_memstream(bytes, size);
}

static void (*fault_before_open)(const char *path, int flags);     /* NULL: nothing */
int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...) {
    va_list args;
    va_start(args, flags);
    mode_t mode = va_arg(args, mode_t);
    va_end(args);
    if (fault_before_open != NULL) fault_before_open(path, flags);
    return fault_now(FAULT_OPEN, EMFILE) ? -1 : __real_open(path, flags, mode);
}
WRAP(FILE *, fopen, (const char *path, const char *mode)) {
    return fault_now(FAULT_OPEN, EMFILE) ? NULL : __real_fopen(path, mode);
}
WRAP(FILE *, fdopen, (int fd, const char *mode)) { return fault_now(FAULT_MEMORY, ENOMEM) ? NULL : __real_fdopen(fd, mode); }
WRAP(int, fstat, (int fd, struct stat *out)) { return fault_now(FAULT_STAT, EIO) ? -1 : __real_fstat(fd, out); }
WRAP(int, fstatvfs, (int fd, struct statvfs *out)) { return fault_now(FAULT_STAT, EIO) ? -1 : __real_fstatvfs(fd, out); }

static inline bool read_fault(size_t *size, ssize_t *result) {
    *result = -1;
    if (fault_now(FAULT_READ, EIO) || fault_now(FAULT_INTERRUPT, EINTR)) return true;
    *result = 0;
    if (fault_now(FAULT_END, 0)) return true;
    if (*size > 1 && fault_now(FAULT_READ_SHORT, 0)) *size /= 2;
    return false;
}
WRAP(ssize_t, pread, (int fd, void *out, size_t size, off_t at)) {
    ssize_t result;
    return read_fault(&size, &result) ? result : __real_pread(fd, out, size, at);
}
WRAP(ssize_t, read, (int fd, void *out, size_t size)) {
    ssize_t result = -1;
    return fault_now(FAULT_READ, EIO) ? result : __real_read(fd, out, size);
}
WRAP(size_t, fread, (void *out, size_t size, size_t count, FILE *file)) {
    if (!fault_now(FAULT_READ, EIO)) return __real_fread(out, size, count, file);
    return 0;
}
WRAP(ssize_t, pwrite, (int fd, const void *bytes, size_t size, off_t at)) {
    if (fault_now(FAULT_WRITE, EIO) || fault_now(FAULT_FULL, fault_full_code) || fault_now(FAULT_INTERRUPT, EINTR)) return -1;
    if (size > 1 && fault_now(FAULT_WRITE_SHORT, 0)) size /= 2;
    return __real_pwrite(fd, bytes, size, at);
}
/* Thousands of them: no disk is asked. */
WRAP(int, fsync, (int fd)) {
    (void)fd;
    return fault_now(FAULT_SYNC, fault_sync_code) ? -1 : 0;
}
WRAP(int, ftruncate, (int fd, off_t size)) { return fault_now(FAULT_CUT, EIO) ? -1 : __real_ftruncate(fd, size); }
WRAP(int, rename, (const char *from, const char *to)) { return fault_now(FAULT_RENAME, EIO) ? -1 : __real_rename(from, to); }
WRAP(int, renameat2, (int from_fd, const char *from, int to_fd, const char *to, unsigned flags)) {
    return fault_now(FAULT_RENAME, EIO) ? -1 : __real_renameat2(from_fd, from, to_fd, to, flags);
}
WRAP(void *, mmap, (void *at, size_t size, int protection, int flags, int fd, off_t offset)) {
    if (fault_now(FAULT_MAP, ENOMEM)) return MAP_FAILED;
    void *map = __real_mmap(at, size, protection, flags, fd, offset);
    if (map != MAP_FAILED) atomic_fetch_add(&mapped_bytes, (int64_t)size);
    return map;
}
WRAP(int, madvise, (void *at, size_t size, int advice)) {
    if (!fault_is_viewless && !fault_now(FAULT_VIEW, EFAULT)) return __real_madvise(at, size, advice);
    errno = fault_is_viewless ? EINVAL : EFAULT;
    return -1;
}
WRAP(int, munmap, (void *at, size_t size)) {
    atomic_fetch_sub(&mapped_bytes, (int64_t)size);
    return __real_munmap(at, size);
}
WRAP(int, pthread_create, (pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *context)) {
    if (fault_now(FAULT_THREAD, 0)) return EAGAIN;
    int code = __real_pthread_create(thread, attributes, start, context);
    if (code == 0) atomic_fetch_add(&thread_count, 1);
    return code;
}
WRAP(int, pthread_join, (pthread_t thread, void **result)) {
    int code = __real_pthread_join(thread, result);
    if (code == 0) atomic_fetch_sub(&thread_count, 1);
    return code;
}

#endif
