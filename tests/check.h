/* tests/check.h - the test harness.  A test program is a main() of RUN() lines that returns CHECK_EXIT().
 * tests/run.sh counts the "ok", "FAIL" and "SKIP" lines of all programs. */
#ifndef SPK_CHECK_H
#define SPK_CHECK_H

#include <stdint.h>
#include <stdio.h>

static int check_failures;

#define CHECK(condition, ...)                                                 \
    do {                                                                      \
        if (!(condition)) {                                                   \
            check_failures++;                                                 \
            fprintf(stderr, "  %s:%d: %s: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                     \
            fputc('\n', stderr);                                              \
        }                                                                     \
    } while (0)

/* Calls into the library under test that must work: prints the error text where they do not. */
#define CHECK_OK(call, error) CHECK((call) == SPK_OK, "%s", (error).text)

#define RUN(function)                                                              \
    do {                                                                           \
        int failures_before = check_failures;                                      \
        function();                                                                \
        printf("%-4s %s\n", failures_before == check_failures ? "ok" : "FAIL", #function); \
        fflush(stdout);                                                            \
    } while (0)

/* A part that cannot run here: visible, and counted as skipped. */
#define SKIP(why) printf("SKIP %s: %s\n", __FILE__, (why))
#define CHECK_EXIT() (check_failures ? 1 : 0)

/* splitmix64.  Expected values depend on this sequence: never change it. */
static inline uint64_t check_random(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

/* Uniform in [-1, 1), 24 bits, the same on every machine. */
static inline float check_uniform(uint64_t *state) {
    return (float)((int32_t)(check_random(state) >> 40) - (1 << 23)) * 0x1p-23f;
}

#endif
