/* formats/dequant_lanes.c - the types that big matrices have, sixteen weights at a time; compiled once for each kind of
 * vector.  The formulas, and what a newcomer gets wrong, are as in formats/dequant.c.  Codes are put together as bytes, and only
 * then made wide.
 */
#include "formats/dequant_internal.h"

#include <string.h>

#include "formats/blocks.h"

#if defined(SPK_LANES_AVX512)
#include <immintrin.h>
#define LANES_NAME(name) name##_avx512
#elif defined(SPK_LANES_AVX2)
#include <immintrin.h>
#define LANES_NAME(name) name##_avx2
#else
#define LANES_NAME(name) name##_plain
#endif
#define LANES_INLINE static inline __attribute__((always_inline))

enum { WIDTH = 16 };
typedef uint8_t  codes  __attribute__((vector_size(WIDTH)));
typedef int8_t   signs  __attribute__((vector_size(WIDTH)));
typedef uint16_t halves __attribute__((vector_size(WIDTH)));

LANES_INLINE codes load(const uint8_t *bytes) {
    codes c;
    memcpy(&c, bytes, sizeof c);
    return c;
}

/* A shift of bytes; what comes in from the neighbour is not below `mask`. */
LANES_INLINE codes shifted(codes c, int count, uint8_t mask) { return (codes)((halves)c >> count) & mask; }

/* `value` where the bit is set. */
LANES_INLINE codes where_bit(codes c, uint8_t bit, uint8_t value) { return (codes)((c & bit) == bit) & value; }

/* out = scale * code - min; and scale * code with signed codes. */
#if defined(SPK_LANES_AVX512)
LANES_INLINE void put_affine(codes c, float scale, float min, float *out) {
    __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)c));
    _mm512_storeu_ps(out, code * scale - min);
}

LANES_INLINE void put_signed(codes c, float scale, float *out) {
    _mm512_storeu_ps(out, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)c)) * scale);
}
#elif defined(SPK_LANES_AVX2)
LANES_INLINE void put_affine(codes c, float scale, float min, float *out) {
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32((__m128i)c));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128((__m128i)c, WIDTH / 2)));
    _mm256_storeu_ps(out, low * scale - min);
    _mm256_storeu_ps(out + WIDTH / 2, high * scale - min);
}

LANES_INLINE void put_signed(codes c, float scale, float *out) {
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)c));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)c, WIDTH / 2)));
    _mm256_storeu_ps(out, low * scale);
    _mm256_storeu_ps(out + WIDTH / 2, high * scale);
}
#else
LANES_INLINE void put_affine(codes c, float scale, float min, float *out) {
    for (int i = 0; i < WIDTH; i++) out[i] = scale * (float)c[i] - min;
}

LANES_INLINE void put_signed(codes c, float scale, float *out) {
    const signs s = (signs)c;
    for (int i = 0; i < WIDTH; i++) out[i] = scale * (float)s[i];
}
#endif

/* ---- Blocks ---- */

LANES_INLINE void block_q8_0(const uint8_t *block, float *out) {
    spk_block_q8_0 b;
    memcpy(&b.d, block, sizeof b.d);
    const float d = spk_f16_to_f32(b.d);
    const uint8_t *qs = block + offsetof(spk_block_q8_0, qs);
    for (int i = 0; i < 32; i += WIDTH) put_signed(load(qs + i), d, out + i);
}

/* d * scale and dmin * minimum of sub-block j of Q4_K or Q5_K, whose blocks begin alike. */
typedef struct { float scale, min; } factors;
LANES_INLINE factors factors_of(float d, float dmin, const uint8_t *scales, int j) {
    uint8_t scale_code, min_code;
    spk_k4_scale_min(scales, j, &scale_code, &min_code);
    return (factors){ d * (float)scale_code, dmin * (float)min_code };
}

LANES_INLINE void block_q4_k(const uint8_t *block, float *out) {
    spk_block_q4_k b;
    memcpy(&b, block, offsetof(spk_block_q4_k, qs));
    const float d = spk_f16_to_f32(b.d), dmin = spk_f16_to_f32(b.dmin);
    const uint8_t *qs = block + offsetof(spk_block_q4_k, qs);
    for (int j = 0; j < 8; j += 2) {
        const factors low = factors_of(d, dmin, b.scales, j), high = factors_of(d, dmin, b.scales, j + 1);
        for (int i = 0; i < 32; i += WIDTH) {
            const codes q = load(qs + 16 * j + i);
            put_affine(q & 15, low.scale, low.min, out + 32 * j + i);
            put_affine(shifted(q, 4, 15), high.scale, high.min, out + 32 * j + 32 + i);
        }
    }
}

LANES_INLINE void block_q5_k(const uint8_t *block, float *out) {
    spk_block_q5_k b;
    memcpy(&b, block, offsetof(spk_block_q5_k, qh));
    const float d = spk_f16_to_f32(b.d), dmin = spk_f16_to_f32(b.dmin);
    const uint8_t *qh = block + offsetof(spk_block_q5_k, qh), *qs = block + offsetof(spk_block_q5_k, qs);
    for (int j = 0; j < 8; j += 2) {
        const factors low = factors_of(d, dmin, b.scales, j), high = factors_of(d, dmin, b.scales, j + 1);
        for (int i = 0; i < 32; i += WIDTH) {
            const codes q = load(qs + 16 * j + i), fifth = load(qh + i);
            put_affine((q & 15) | where_bit(fifth, (uint8_t)(1 << j), 16), low.scale, low.min, out + 32 * j + i);
            put_affine(shifted(q, 4, 15) | where_bit(fifth, (uint8_t)(2 << j), 16), high.scale, high.min,
                       out + 32 * j + 32 + i);
        }
    }
}

LANES_INLINE void block_q6_k(const uint8_t *block, float *out) {
    spk_block_q6_k b;
    memcpy(b.scales, block + offsetof(spk_block_q6_k, scales), sizeof b.scales + sizeof b.d);
    const float d = spk_f16_to_f32(b.d);
    for (int half = 0; half < 2; half++) {
        const uint8_t *ql = block + offsetof(spk_block_q6_k, ql) + 64 * half, *qh = block + offsetof(spk_block_q6_k, qh) + 32 * half;
        for (int i = 0; i < 32; i += WIDTH) {
            const int8_t *scales = b.scales + 8 * half + i / 16;
            const codes even = load(ql + i), odd = load(ql + 32 + i), high = load(qh + i);
            float *to = out + 128 * half + i;
            put_signed(((even & 15) | (shifted(high, 0, 3) << 4)) - 32, d * (float)scales[0], to);
            put_signed(((odd & 15) | (shifted(high, 2, 3) << 4)) - 32, d * (float)scales[2], to + 32);
            put_signed((shifted(even, 4, 15) | (shifted(high, 4, 3) << 4)) - 32, d * (float)scales[4], to + 64);
            put_signed((shifted(odd, 4, 15) | (shifted(high, 6, 3) << 4)) - 32, d * (float)scales[6], to + 96);
        }
    }
}

/* ---- Rows ---- */

#define ROWS_OF(name, weights)                                                                                                \
    void LANES_NAME(spk_dequant_##name)(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out) {         \
        for (uint64_t i = 0; i < block_count; i++) block_##name(blocks + i * sizeof(spk_block_##name), out + i * (weights)); \
    }
ROWS_OF(q8_0, 32)
ROWS_OF(q4_k, SPK_SUPERBLOCK)
ROWS_OF(q5_k, SPK_SUPERBLOCK)
ROWS_OF(q6_k, SPK_SUPERBLOCK)

/* The bits of an F16 as F32, NaNs with what they carry, without a branch and without arithmetic on F32 subnormals. */
LANES_INLINE uint32_t widened(uint32_t h) {
    const uint32_t magnitude = (h & 0x7fff) << 13, smallest_normal = 113u << 23;
    float subnormal, one;
    uint32_t bits = magnitude | smallest_normal;
    memcpy(&subnormal, &bits, sizeof bits);
    memcpy(&one, &smallest_normal, sizeof one);
    subnormal -= one;
    memcpy(&bits, &subnormal, sizeof bits);
    const uint32_t bias = (h & 0x7c00) == 0x7c00 ? 224u << 23 : 112u << 23;
    return ((h & 0x7c00) == 0 ? bits : magnitude + bias) | (h & 0x8000) << 16;
}

void LANES_NAME(spk_dequant_f16)(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out) {
    for (uint64_t i = 0; i < block_count; i++) {
        uint16_t h;
        memcpy(&h, blocks + i * sizeof h, sizeof h);
        const uint32_t bits = widened(h);
        memcpy(&out[i], &bits, sizeof bits);
    }
}

void LANES_NAME(spk_dequant_bf16)(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out) {
    for (uint64_t i = 0; i < block_count; i++) {
        uint16_t h;
        memcpy(&h, blocks + i * sizeof h, sizeof h);
        const uint32_t bits = (uint32_t)h << 16;
        memcpy(&out[i], &bits, sizeof bits);
    }
}
