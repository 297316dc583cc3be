/* requant/quant_vectors_internal.h - the lanes of one tile or two as one vector, for the *_lanes.c files only.
 *
 * Each lane is one sub-block, eight are a tile, and tiles never meet, so a result does not depend on the width of the machine's
 * registers: the plain, the AVX2 and the AVX-512 build give the same bits.  The AVX-512 build has two tiles in a vector, so
 * that what a tile's lanes share (d, a sum over them) is a vector too, and what is decided for a tile is a choice of lanes.
 * Only comparing and choosing need help, since the compiler does not find the instructions by itself.  On a GPU, where
 * SPK_LANES_CUDA is set, a lane is a thread (requant/quant_vectors_cuda.cuh); so single lanes, tables and large arrays have
 * names here.  A file that defines SPK_LANES_ONE_TILE has one tile in a vector in every build.
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
#if defined(SPK_LANES_AVX512) && !defined(SPK_LANES_ONE_TILE)
#define LANES_PAIR
#endif
#if defined(SPK_LANES_AVX512)
#include <immintrin.h>
#define SPK_LANES_NAME(name) name##_avx512
#elif defined(SPK_LANES_AVX2)
#include <immintrin.h>
#define SPK_LANES_NAME(name) name##_avx2
#else
#define SPK_LANES_NAME(name) name##_plain
#endif
#ifdef LANES_PAIR
enum { LANES_TILES = SPK_QUANT_TILES_AVX512 };
#else
enum { LANES_TILES = 1 };
#endif
enum { LANES_COUNT = LANES_TILES * SPK_QUANT_LANES };

/* GCC has an opinion on the calling convention of such vectors where AVX is off, although every function here is
 * inlined.  The pragma silences it for results; arguments are macros' (pure expressions) or pointers. */
#pragma GCC diagnostic ignored "-Wpsabi"
#define LANES_INLINE static inline __attribute__((always_inline))
#define LANES_ENTRY                /* of a search: what quant.c calls */
#define LANES_TABLE static const
#define LANES_UNROLL               /* before a loop over an array that is to stay in registers */

typedef float   vec      __attribute__((vector_size(4 * LANES_COUNT)));
typedef int32_t vec_ints __attribute__((vector_size(4 * LANES_COUNT)));

/* One value for each row of a tile.  Once it is begun, each row is written after tile->x of that row was last read: a
 * GPU has it there. */
typedef vec vec_column[SPK_QUANT_DEPTH];
#define vec_column_begin(column, tiles) ((void)(tiles))
/* An array that this search may use `used` elements of, which are `most` at most. */
#define VEC_ARRAY(type, name, most, used) type name[most]

LANES_INLINE vec vec_all(float f) { return f - (vec){ 0 }; }

/* A number for each tile, known to all of its lanes. */
LANES_INLINE vec vec_of_tiles(const float numbers[LANES_TILES]) {
    vec v = { 0 };
    for (int j = 0; j < LANES_COUNT; j++) v[j] = numbers[j / SPK_QUANT_LANES];
    return v;
}
#define vec_of_tile(v, tile) ((v)[(tile) * SPK_QUANT_LANES])

/* vec_less: a mask, true where a < b.  vec_choose: yes where a mask is true, else no.  vec_any: whether it is anywhere.
 * vec_min, vec_max: a < b ? a : b and a > b ? a : b.  Of finite values.
 * Where registers are narrower than a vec GCC splits arithmetic into halves, but comparisons into single lanes; so the
 * sign of the difference is taken there (+ 0.0f turns -0 into 0: equal values are not less). */
#ifdef LANES_PAIR
typedef __mmask16 vec_mask;
#define vec_less(a, b)                 _mm512_cmp_ps_mask((__m512)(a), (__m512)(b), _CMP_LT_OQ)
#define vec_choose(condition, yes, no) ((vec)_mm512_mask_blend_ps((condition), (__m512)(no), (__m512)(yes)))
#define vec_min(a, b)                  ((vec)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define vec_max(a, b)                  ((vec)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define vec_both(a, b)                 ((vec_mask)((a) & (b)))
#define vec_not(mask)                  _knot_mask16(mask)
#define vec_any(mask)                  ((mask) != 0)
#else
typedef vec_ints vec_mask;
#define vec_both(a, b)                 ((a) & (b))
#define vec_not(mask)                  (~(mask))
#ifdef SPK_LANES_AVX2
#define vec_less(a, b)                 ((vec_mask)((a) < (b)))
#define vec_choose(condition, yes, no) ((vec)_mm256_blendv_ps((__m256)(no), (__m256)(yes), (__m256)(condition)))
#define vec_min(a, b)                  ((vec)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define vec_max(a, b)                  ((vec)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define vec_any(mask)                  (_mm256_movemask_ps((__m256)(mask)) != 0)
#else
#define vec_less(a, b)                 ((vec_mask)(((a) - (b)) + 0.0f) >> 31)
#define vec_choose(condition, yes, no) ((vec)(((vec_ints)(yes) & (condition)) | ((vec_ints)(no) & ~(condition))))
#define vec_min(a, b)                  vec_choose(vec_less(a, b), a, b)
#define vec_max(a, b)                  vec_choose(vec_less(b, a), a, b)
LANES_INLINE bool vec_any_of(const vec_mask *mask) {
    int32_t any = 0;
    for (int j = 0; j < LANES_COUNT; j++) any |= (*mask)[j];
    return any != 0;
}
#define vec_any(mask)                  ({ vec_mask any_mask = (mask); vec_any_of(&any_mask); })
#endif
#endif
#define vec_any_lane(mask)             vec_any(mask)   /* on a GPU the other lanes must be asked */

/* Row i of the tiles' weights; and of their importance, which is one for all. */
#ifdef LANES_PAIR
LANES_INLINE vec vec_weights(const spk_quant_tile *const tiles[], int i) {
    __m512 low = _mm512_castps256_ps512(_mm256_load_ps(tiles[0]->x[i]));
    return (vec)_mm512_insertf32x8(low, _mm256_load_ps(tiles[1]->x[i]), 1);
}
LANES_INLINE vec vec_importance(const spk_quant_tile *const tiles[], int i) {
    return (vec)_mm512_broadcast_f32x8(_mm256_load_ps(tiles[0]->w[i]));
}
#else
LANES_INLINE vec vec_load(const float lanes[SPK_QUANT_LANES]) {
    vec v;
    memcpy(&v, lanes, sizeof v);
    return v;
}
#define vec_weights(tiles, i)    vec_load((tiles)[0]->x[i])
#define vec_importance(tiles, i) vec_load((tiles)[0]->w[i])
#endif

/* Over the lanes of each tile, in their order, known to all of them. */
#ifdef LANES_PAIR
LANES_INLINE vec vec_sum(const vec *v) {
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8);
    vec sum = (vec)_mm512_permutexvar_ps(first, (__m512)*v);
    for (int j = 1; j < SPK_QUANT_LANES; j++)
        sum += (vec)_mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(j)), (__m512)*v);
    return sum;
}

LANES_INLINE vec vec_largest(const vec *v) {
    __m512 most = (__m512)*v;
    most = _mm512_max_ps(most, _mm512_permute_ps(most, 0xB1));
    most = _mm512_max_ps(most, _mm512_permute_ps(most, 0x4E));
    return (vec)_mm512_max_ps(most, _mm512_shuffle_f32x4(most, most, 0xB1));
}
#else
LANES_INLINE vec vec_sum(const vec *v) {
    float sum = (*v)[0];
    for (int j = 1; j < LANES_COUNT; j++) sum += (*v)[j];
    return vec_all(sum);
}

LANES_INLINE vec vec_largest(const vec *v) {
    float largest = (*v)[0];
    for (int j = 1; j < LANES_COUNT; j++) largest = (*v)[j] > largest ? (*v)[j] : largest;
    return vec_all(largest);
}
#endif

/* Adds a[j] * b[j] of the lanes of each tile to its sum, in their order. */
LANES_INLINE void vec_add_products(const vec *a, const vec *b, double sums[LANES_TILES]) {
    float a_lanes[LANES_COUNT], b_lanes[LANES_COUNT];
    double products[LANES_COUNT];
    memcpy(a_lanes, a, sizeof a_lanes);
    memcpy(b_lanes, b, sizeof b_lanes);
    for (int j = 0; j < LANES_COUNT; j++) products[j] = (double)a_lanes[j] * (double)b_lanes[j];
    for (int t = 0; t < LANES_TILES; t++)
        for (int j = 0; j < SPK_QUANT_LANES; j++) sums[t] += products[t * SPK_QUANT_LANES + j];
}

/* Whole numbers from -128 to 255 to bytes: eight at out[0]->field, then at out[1]->field. */
#define vec_store_bytes(v, out, field) \
    do { \
        uint8_t bytes[LANES_COUNT]; \
        vec_bytes(&(v), bytes); \
        for (int t = 0; t < LANES_TILES; t++) memcpy((out)[t]->field, bytes + t * SPK_QUANT_LANES, SPK_QUANT_LANES); \
    } while (0)
LANES_INLINE void vec_bytes(const vec *v, uint8_t bytes[LANES_COUNT]) {
#ifdef LANES_PAIR
    _mm_storeu_si128((__m128i *)bytes, _mm512_cvtepi32_epi8(_mm512_cvttps_epi32((__m512)*v)));
#else
    typedef int8_t byte8 __attribute__((vector_size(8)));
    byte8 narrow = __builtin_convertvector(__builtin_convertvector(*v, vec_ints), byte8);
    memcpy(bytes, &narrow, sizeof narrow);
#endif
}

/* F16 values to their bits, as numbers, and back. */
LANES_INLINE vec vec_half_bits(const vec *v) {
    vec bits = *v;
    for (int j = 0; j < LANES_COUNT; j++) bits[j] = (float)spk_f32_to_f16((*v)[j]);
    return bits;
}

LANES_INLINE vec vec_half_values(const vec *bits) {
    vec v = *bits;
    for (int j = 0; j < LANES_COUNT; j++) v[j] = spk_f16_to_f32((uint16_t)(*bits)[j]);
    return v;
}

/* Those of v's lanes at out[0]->field[0..7], then at out[1]->field. */
#define vec_store_halves(v, out, field) \
    for (int j = 0; j < LANES_COUNT; j++) (out)[j / SPK_QUANT_LANES]->field[j % SPK_QUANT_LANES] = spk_f32_to_f16((v)[j])
/* That of the number that a tile's lanes share. */
#define vec_store_half(v, out, field) \
    for (int t = 0; t < LANES_TILES; t++) (out)[t]->field = spk_f32_to_f16(vec_of_tile(v, t))

/* The nearest F16 of 0 <= v < 65520, as a float: bits that it has not are rounded off, of small ones by an addition. */
LANES_INLINE vec vec_half_round(const vec *v) {
#ifdef LANES_PAIR
    return (vec)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)*v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    vec_ints bits = (vec_ints)*v, rounded = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff;
    return vec_choose(vec_less(*v, vec_all(0x1p-14f)), (*v + 0.5f) - 0.5f, (vec)rounded);
#endif
}
#endif

/* a * b + c of whole numbers below 2^24, result included: nothing is rounded, so one instruction where there is one. */
#ifdef LANES_PAIR
#define vec_whole_multiply_add(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#elif defined(SPK_LANES_AVX2)
#define vec_whole_multiply_add(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#else
#define vec_whole_multiply_add(a, b, c) ((a) * (b) + (c))
#endif

#define vec_clamp(v, low, high)        vec_min(vec_max(v, vec_all(low)), vec_all(high))

/* To the nearest integer, ties to even, for |v| < 2^22: the sum has no bits left for a fraction. */
#define vec_round(v)                   (((v) + 12582912.0f) - 12582912.0f)

/* 1 / v, and 0 where v is not positive. */
#define vec_inverse_or_zero(v) \
    vec_choose(vec_less(vec_all(0.0f), v), 1.0f / vec_choose(vec_less(vec_all(0.0f), v), v, vec_all(1.0f)), vec_all(0.0f))

/* The F16 nearest to v >= 0, as a float; at most the largest finite one, and not 0 unless v is. */
LANES_INLINE vec vec_half_scale(const vec *v) {
    vec capped = vec_min(*v, vec_all(SPK_QUANT_F16_MAX)), rounded = vec_half_round(&capped);
    vec_mask lost = vec_less(rounded, vec_min(capped, vec_all(0x1p-24f)));
    return vec_choose(lost, vec_all(0x1p-24f), rounded);
}

#endif
