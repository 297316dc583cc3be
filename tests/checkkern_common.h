/* tests/checkkern_common.h - patterns, comparison and failures of the kernel checker.
 *
 * A tolerance is derived in a comment at the comparison that uses it.  In them u = 2^-24, the largest relative error
 * of one F32 rounding, and FLOOR the absolute error that underflow may add.
 */
#ifndef SPK_CHECKKERN_COMMON_H
#define SPK_CHECKKERN_COMMON_H

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/kernels.h"
#include "tests/check.h"

#define U 0x1p-24
#define FLOOR 0x1p-148          /* two roundings at the bottom of the subnormals */

enum { GUARD_BYTES = 128, POISON = 0xA5, FAILURES_SHOWN = 4 };

static char     case_text[256];    /* parameters of the case being run, for failure messages */
static uint64_t seed = 42;         /* of the whole run; printed first */
static uint64_t random_state;
static int      failures_of_op;

#define DESCRIBE(...) ((void)snprintf(case_text, sizeof case_text, __VA_ARGS__))

#define EXPECT(condition, ...)                                                                    \
    do {                                                                                          \
        if (!(condition)) {                                                                       \
            check_failures++;                                                                     \
            if (failures_of_op++ < FAILURES_SHOWN) {                                              \
                fprintf(stderr, "  %s:%d: [seed %llu; %s] ", __FILE__, __LINE__, (unsigned long long)seed, case_text); \
                fprintf(stderr, __VA_ARGS__);                                                     \
                fputc('\n', stderr);                                                              \
            }                                                                                     \
        }                                                                                         \
    } while (0)

static void *must(void *block) {
    if (block == NULL) {
        fprintf(stderr, "checkkern: out of memory\n");
        exit(1);
    }
    return block;
}

static bool is_poison(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits == 0xA5A5A5A5u;
}

static void near(const char *what, uint64_t index, double got, double want, double tolerance) {
    EXPECT(fabs(got - want) <= tolerance, "%s[%llu]: got %.9g want %.9g, off by %.3g, tolerance %.3g", what,
           (unsigned long long)index, got, want, fabs(got - want), tolerance);
}

/* Input patterns: adversarial ones first. */
typedef enum {
    X_ZERO, X_HUGE_AMONG_TINY, X_SUBNORMAL, X_LARGE, X_ALTERNATING, X_RANDOM, X_PATTERN_COUNT,
    X_CODES = X_PATTERN_COUNT,     /* int8 holds it exactly: groups of 32 integers times a power of two, 127 among them */
    X_ONE_HOT
} x_pattern;
static const char *const x_names[] = { "zero", "huge-among-tiny", "subnormal", "large", "alternating", "random", "codes", "one-hot" };

static void fill(x_pattern pattern, float *x, uint64_t n) {
    uint64_t huge = n != 0 ? check_random(&random_state) % n : 0;
    for (uint64_t i = 0; i < n; i++) {
        float r = check_uniform(&random_state), sign = i % 2 == 0 ? 1.0f : -1.0f;
        switch (pattern) {
        case X_ZERO: x[i] = 0; break;
        case X_HUGE_AMONG_TINY: x[i] = i == huge ? 1e15f * sign : 1e-3f * r; break;
        case X_SUBNORMAL: x[i] = 1e-40f * r; break;
        case X_LARGE: x[i] = 1e17f * sign; break;
        case X_ALTERNATING: x[i] = sign; break;
        case X_CODES: x[i] = ldexpf(i % 32 == 7 ? 127 * sign : truncf(127 * r), (int)(i / 32 % 9) - 6); break;
        case X_ONE_HOT: x[i] = i == huge ? sign : 0; break;
        default: x[i] = r; break;
        }
    }
}

#endif
