/* tests/fuzz.h - a fuzzer is a file with LLVMFuzzerTestOneInput and fuzz_seeds; this makes a program of it.
 *
 * With clang's libFuzzer (`make fuzz`) it is a coverage-guided fuzzer.  Otherwise it is an ordinary program that replays the
 * seeds, which are made by code, and then mutations of them: always the same ones, numbered, so that a finding can be had
 * again.  A property that does not hold, a crash, or more than a few seconds of work leaves the input in FUZZ_FINDING_DIR [.].
 *
 *   fuzz_X                       seeds, then some seconds of mutations (the test)
 *   fuzz_X --seconds N           the same for N seconds
 *   fuzz_X --first K             from mutation K on
 *   fuzz_X --write-corpus DIR    the seeds as files, for libFuzzer
 *   fuzz_X FILE...               these inputs alone
 */
#ifndef SPK_TEST_FUZZ_H
#define SPK_TEST_FUZZ_H

#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include "tests/check.h"
#include "tests/gguf_build.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
size_t LLVMFuzzerMutate(uint8_t *bytes, size_t size, size_t size_max);

static uint64_t fuzz_accepted_count;     /* inputs that got past the reader: counted by the target */

#define FUZZ_ASSERT(condition, ...)                                                    \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);            \
            fprintf(stderr, __VA_ARGS__);                                              \
            fputc('\n', stderr);                                                       \
            abort();                                                                   \
        }                                                                              \
    } while (0)

/* ---- Inputs as files ---- */

/* A path that opens `bytes`; good until the next call. */
static inline const char *fuzz_file(const uint8_t *bytes, size_t size) {
    static int fd = -1;
    static char path[64];
    if (fd < 0) {
        fd = memfd_create("input", MFD_CLOEXEC);
        (void)snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    }
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, bytes, size, 0) != (ssize_t)size) abort();
    return path;
}

/* DIR/NAME in a directory in memory that is removed at the end. */
static char fuzz_dir[GB_PATH_MAX];
static inline void fuzz_remove_dir(void) { gb_remove_dir(fuzz_dir); }
static inline const char *fuzz_path(const char *name) {
    static char paths[4][GB_PATH_MAX];
    static unsigned next;
    if (fuzz_dir[0] == '\0') {
        if (access("/dev/shm", W_OK) == 0) (void)setenv("TMPDIR", "/dev/shm", 0);
        gb_make_dir(fuzz_dir);
        (void)atexit(fuzz_remove_dir);
    }
    return gb_path(paths[next++ % 4], fuzz_dir, name);
}

/* A copy of `size` bytes that ends at a page nobody may touch, with another before its first page. */
typedef struct { uint8_t *bytes, *map; size_t map_bytes; } fuzz_guarded;
static inline fuzz_guarded fuzz_guard(const void *bytes, size_t size) {
    enum { PAGE = 4096 };
    size_t inner = (size + PAGE - 1) / PAGE * PAGE;
    fuzz_guarded g = { .map_bytes = inner + 2 * PAGE };
    g.map = mmap(NULL, g.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (g.map == MAP_FAILED || mprotect(g.map, PAGE, PROT_NONE) != 0 || mprotect(g.map + PAGE + inner, PAGE, PROT_NONE) != 0)
        abort();
    g.bytes = g.map + PAGE + inner - size;
    if (size > 0) memcpy(g.bytes, bytes, size);
    return g;
}
static inline void fuzz_unguard(fuzz_guarded g) { (void)munmap(g.map, g.map_bytes); }

/* ---- Seeds ---- */

/* Calls fuzz_seed for each. */
void fuzz_seeds(void);

enum { FUZZ_SEED_MAX = 512 };
static gguf_build fuzz_seed_list[FUZZ_SEED_MAX];
static size_t fuzz_seed_count;

static inline void fuzz_seed(const void *bytes, size_t size) {
    if (fuzz_seed_count == FUZZ_SEED_MAX) abort();
    gb_raw(&fuzz_seed_list[fuzz_seed_count++], bytes, size);
}

/* ---- Mutations ---- */

static inline uint64_t fuzz_below(uint64_t *state, uint64_t limit) { return check_random(state) % limit; }

/* One change; `size` bytes of room for size_max.  Returns the new size. */
static inline size_t fuzz_change(uint8_t *bytes, size_t size, size_t size_max, uint64_t *state) {
    static const uint64_t edges[] = { 0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535,
                                      65536, INT32_MAX, UINT32_MAX, UINT64_C(1) << 32, INT64_MAX, UINT64_C(1) << 63,
                                      UINT64_MAX, UINT64_MAX - 7, UINT64_MAX - 4095 };
    if (size == 0) {
        if (size_max > 0) bytes[0] = (uint8_t)check_random(state);
        return size_max > 0;
    }
    size_t at = fuzz_below(state, size), left = size - at, length = 1 + fuzz_below(state, left < 64 ? left : 64);
    uint64_t value = edges[fuzz_below(state, sizeof edges / sizeof *edges)];
    size_t width = (size_t)1 << fuzz_below(state, 4);
    if (width > left) width = 1;
    switch (fuzz_below(state, 9)) {
    case 0: bytes[at] ^= (uint8_t)(1u << fuzz_below(state, 8)); return size;
    case 1: bytes[at] = (uint8_t)check_random(state); return size;
    case 2: case 3: memcpy(bytes + at, &value, width); return size;
    case 4: {                                            /* a little more or less */
        uint64_t number = 0;
        memcpy(&number, bytes + at, width);
        number += fuzz_below(state, 2) ? 1 + fuzz_below(state, 16) : UINT64_MAX - fuzz_below(state, 16);
        memcpy(bytes + at, &number, width);
        return size;
    }
    case 5: memmove(bytes + at, bytes + at + length, left - length); return size - length;
    case 6:                                              /* twice */
        if (size + length > size_max) return size;
        memmove(bytes + at + length, bytes + at, left);
        return size + length;
    case 7: memmove(bytes + at, bytes + fuzz_below(state, size - length + 1), length); return size;   /* from elsewhere */
    default: return fuzz_below(state, 8) ? size : at;    /* cut */
    }
}

#ifndef SPK_LIBFUZZER


/* Changes an input as it likes; the default makes one to four changes anywhere. */
#ifndef FUZZ_MUTATE
static inline size_t fuzz_mutate(uint8_t *bytes, size_t size, size_t size_max, uint64_t *state) {
    for (uint64_t i = 0, count = 1 + fuzz_below(state, 4); i < count; i++) size = fuzz_change(bytes, size, size_max, state);
    return size;
}
#define FUZZ_MUTATE fuzz_mutate
#endif

#ifndef FUZZ_TEST_SECONDS
#define FUZZ_TEST_SECONDS 1
#endif

static const uint8_t *fuzz_now_bytes;
static size_t fuzz_now_size;
static const char *fuzz_name;
static uint64_t fuzz_now_number;

static void fuzz_save(int signal_number) {
    char path[GB_PATH_MAX];
    const char *parent = getenv("FUZZ_FINDING_DIR");
    (void)signal(signal_number, SIG_DFL);
    (void)snprintf(path, sizeof path, "%s/%s-%" PRIu64, parent != NULL ? parent : ".", fuzz_name, fuzz_now_number);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ssize_t written = fd >= 0 ? write(fd, fuzz_now_bytes, fuzz_now_size) : -1;
    fprintf(stderr, "%s: input %" PRIu64 " (%zd bytes) is in %s\n", fuzz_name, fuzz_now_number, written, path);
    (void)raise(signal_number);
}

enum { FUZZ_INPUT_SECONDS_MAX = 4 };    /* CPU time of one input: more is a finding */
static void fuzz_limit_time(time_t seconds) {
    const struct itimerval limit = { .it_value = { .tv_sec = seconds } };
    if (setitimer(ITIMER_PROF, &limit, NULL) != 0) abort();
}

static void fuzz_one(const uint8_t *bytes, size_t size, uint64_t number) {
    fuzz_now_bytes = bytes;
    fuzz_now_size = size;
    fuzz_now_number = number;
    fuzz_limit_time(FUZZ_INPUT_SECONDS_MAX);
    (void)LLVMFuzzerTestOneInput(bytes, size);
    fuzz_limit_time(0);
}

static double fuzz_now_s(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void fuzz_run_file(const char *path) {
    gguf_build b = gb_read(path);
    fuzz_one(b.bytes, b.size, 0);
    gb_free(&b);
}

static void fuzz_write_corpus(const char *parent) {
    for (size_t i = 0; i < fuzz_seed_count; i++) {
        char path[GB_PATH_MAX], name[32];
        (void)snprintf(name, sizeof name, "seed-%03zu", i);
        gb_save(&fuzz_seed_list[i], gb_path(path, parent, name));
    }
}

/* Returns the number of mutations. */
static uint64_t fuzz_mutations(double seconds, uint64_t first) {
    enum { ROOM = 4096 };
    uint64_t number = first;
    for (double end_s = fuzz_now_s() + seconds; fuzz_now_s() < end_s; number++) {
        uint64_t state = number;
        const gguf_build *seed = &fuzz_seed_list[fuzz_below(&state, fuzz_seed_count)];
        uint8_t *bytes = malloc(seed->size + ROOM);
        if (bytes == NULL) abort();
        if (seed->size > 0) memcpy(bytes, seed->bytes, seed->size);
        size_t size = FUZZ_MUTATE(bytes, seed->size, seed->size + ROOM, &state);
        fuzz_one(bytes, size, number);
        free(bytes);
    }
    return number - first;
}

int main(int argc, char **argv) {
    static const int crashes[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGPROF };
    double seconds = FUZZ_TEST_SECONDS;
    uint64_t first = 1;
    fuzz_name = strrchr(argv[0], '/') != NULL ? strrchr(argv[0], '/') + 1 : argv[0];
    for (size_t i = 0; i < sizeof crashes / sizeof *crashes; i++) (void)signal(crashes[i], fuzz_save);
    int i = 1;
    for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
        if (strcmp(argv[i], "--seconds") == 0) seconds = atof(argv[i + 1]);
        else if (strcmp(argv[i], "--first") == 0) first = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--write-corpus") == 0) {
            fuzz_seeds();
            fuzz_write_corpus(argv[i + 1]);
            return 0;
        }
    }
    for (int file = i; file < argc; file++) fuzz_run_file(argv[file]);
    if (i < argc) return 0;
    fuzz_seeds();
    for (size_t s = 0; s < fuzz_seed_count; s++) fuzz_one(fuzz_seed_list[s].bytes, fuzz_seed_list[s].size, 0);
    uint64_t seeds_accepted = fuzz_accepted_count;
    fuzz_accepted_count = 0;
    uint64_t count = fuzz_mutations(seconds, first);
    printf("# %s: %zu seeds, %" PRIu64 " of them accepted; %" PRIu64 " mutations from %" PRIu64 " on, %" PRIu64 " accepted\n",
           fuzz_name, fuzz_seed_count, seeds_accepted, count, first, fuzz_accepted_count);
    printf("%s %s\n", seeds_accepted > 0 && (fuzz_accepted_count > 0 || count < 100) ? "ok  " : "FAIL", fuzz_name);
    for (size_t s = 0; s < fuzz_seed_count; s++) gb_free(&fuzz_seed_list[s]);
    return CHECK_EXIT();
}

#endif
#endif
