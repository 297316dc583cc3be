/* requant/quant_vectors_internal.h - eight floats at a time, for the *_lanes.c files only.
 *
 * Each lane is one sub-block and never meets another, so a result does not depend on the width of the machine's
 * registers: the plain, the AVX2 and the AVX-512 build give the same bits.  Only comparing and choosing need help, since the
 * compiler does not find the instructions by itself.  On a GPU, where SPK_LANES_CUDA is set, a lane is a thread
 * (requant/quant_vectors_cuda.cuh); so single lanes, tables and large arrays have names here.
 */
#ifndef SPK_QUANT_VECTORS_INTERNAL_H
#define SPK_QUANT_VECTORS_INTERNAL_H

#include <stdint.h>
#include <string.h>
#include "requant/quant_internal.h"

/* Squared error to sum of squares.  Below this, a relative error of 0.2 %, searches measure what they else compute. */
#define SPK_QUANT_SMALL_ERROR 0x1p-18f

#ifdef SPK_LANES_CUDA
#include "requant/quant_vectors_cuda.cuh"
#else
#ifdef SPK_LANES_AVX2
#include <immintrin.h>
#ifdef SPK_LANES_AVX512          /* the same source again: more registers, the same eight lanes */
#define SPK_LANES_NAME(name) name##_avx512
#else
#define SPK_LANES_NAME(name) name##_avx2
#endif
#else
#define SPK_LANES_NAME(name) name##_plain
#endif

/* GCC has an opinion on the calling convention of such vectors where AVX is off, although every function here is
 * inlined.  The pragma silences it for results; arguments are macros' (pure expressions) or pointers. */
#pragma GCC diagnostic ignored "-Wpsabi"
#define LANES_INLINE static inline __attribute__((always_inline))
#define LANES_ENTRY                /* of a search: what quant.c calls */
#define LANES_TABLE static const
#define LANES_UNROLL               /* before a loop over an array that is to stay in registers */
#define LANES_ONCE                 /* before a statement that stores what all lanes share */

typedef float   v8  __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));

/* One value for each row of a tile.  Once it is begun, each row is written after tile->x of that row was last read: a
 * GPU has it there. */
typedef v8 v8_column[SPK_QUANT_DEPTH];
#define v8_column_begin(column, tile) ((void)(tile))
/* An array that this search may use `used` elements of, which are `most` at most. */
#define V8_ARRAY(type, name, most, used) type name[most]
/* Lane j, known to all. */
#define v8_lane(v, j) ((v)[j])

LANES_INLINE v8 v8_load(const float lanes[SPK_QUANT_LANES]) {
    v8 v;
    memcpy(&v, lanes, sizeof v);
    return v;
}

LANES_INLINE v8 v8_all(float f) {
    return (v8){ f, f, f, f, f, f, f, f };
}

/* v8_less: all ones where a < b, else 0.  v8_choose: yes where a lane of the v8i condition is all ones, no where it is
 * 0.  v8_min, v8_max: a < b ? a : b and a > b ? a : b.  Of finite values.
 * Where registers are narrower than v8 GCC splits arithmetic into halves, but comparisons into single lanes; so the
 * sign of the difference is taken there (+ 0.0f turns -0 into 0: equal values are not less). */
#ifdef SPK_LANES_AVX2
#define v8_less(a, b)                 ((v8i)((a) < (b)))
#define v8_choose(condition, yes, no) ((v8)_mm256_blendv_ps((__m256)(no), (__m256)(yes), (__m256)(condition)))
#define v8_min(a, b)                  ((v8)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define v8_max(a, b)                  ((v8)_mm256_max_ps((__m256)(a), (__m256)(b)))
#else
#define v8_less(a, b)                 ((v8i)(((a) - (b)) + 0.0f) >> 31)
#define v8_choose(condition, yes, no) ((v8)(((v8i)(yes) & (condition)) | ((v8i)(no) & ~(condition))))
#define v8_min(a, b)                  v8_choose(v8_less(a, b), a, b)
#define v8_max(a, b)                  v8_choose(v8_less(b, a), a, b)
#endif

/* In the order of the lanes. */
LANES_INLINE float v8_sum(const v8 *v) {
    float sum = 0;
    for (int j = 0; j < SPK_QUANT_LANES; j++) sum += (*v)[j];
    return sum;
}

LANES_INLINE float v8_largest(const v8 *v) {
    float largest = (*v)[0];
    for (int j = 1; j < SPK_QUANT_LANES; j++) largest = (*v)[j] > largest ? (*v)[j] : largest;
    return largest;
}

/* Whole numbers from -128 to 255 to bytes. */
LANES_INLINE void v8_store_bytes(const v8 *v, void *bytes) {
    typedef int8_t byte8 __attribute__((vector_size(8)));
    byte8 narrow = __builtin_convertvector(__builtin_convertvector(*v, v8i), byte8);
    memcpy(bytes, &narrow, sizeof narrow);
}

#define half_bits_of  spk_f32_to_f16
#define half_value_of spk_f16_to_f32

/* F16 values to their bits, as numbers, and back. */
LANES_INLINE v8 v8_half_bits(const v8 *v) {
    v8 bits = *v;
    for (int j = 0; j < SPK_QUANT_LANES; j++) bits[j] = (float)half_bits_of((*v)[j]);
    return bits;
}

LANES_INLINE v8 v8_half_values(const v8 *bits) {
    v8 v = *bits;
    for (int j = 0; j < SPK_QUANT_LANES; j++) v[j] = half_value_of((uint16_t)(*bits)[j]);
    return v;
}

LANES_INLINE void v8_store_halves(const v8 *v, uint16_t halves[SPK_QUANT_LANES]) {
    for (int j = 0; j < SPK_QUANT_LANES; j++) halves[j] = half_bits_of((*v)[j]);
}
#endif

/* a * b + c of whole numbers below 2^24, result included: nothing is rounded, so one instruction where there is one. */
#ifdef __FMA__
#define v8_whole_multiply_add(a, b, c) ((v8)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#else
#define v8_whole_multiply_add(a, b, c) ((a) * (b) + (c))
#endif

#define v8_clamp(v, low, high)        v8_min(v8_max(v, v8_all(low)), v8_all(high))

/* To the nearest integer, ties to even, for |v| < 2^22: the sum has no bits left for a fraction. */
#define v8_round(v)                   (((v) + 12582912.0f) - 12582912.0f)

/* 1 / v, and 0 where v is not positive. */
#define v8_inverse_or_zero(v) \
    v8_choose(v8_less(v8_all(0.0f), v), 1.0f / v8_choose(v8_less(v8_all(0.0f), v), v, v8_all(1.0f)), v8_all(0.0f))

/* The F16 nearest to f >= 0, as a float; at most the largest finite one, and not 0 unless f is. */
LANES_INLINE float half_scale(float f) {
    if (f >= SPK_QUANT_F16_MAX) return SPK_QUANT_F16_MAX;
    float rounded = half_value_of(half_bits_of(f));
    return rounded == 0.0f && f > 0.0f ? 0x1p-24f : rounded;
}

#endif
