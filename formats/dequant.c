/* formats/dequant.c - see dequant.h.
 *
 * One function a block, written from the format's formula.  Every product of a scale, a sub-scale and a code is exact
 * in F32 (at most 24 significant bits), so the only rounding is the one of adding or subtracting a minimum, and the
 * order of the factors does not matter.
 * What a newcomer gets wrong: codes of neighbouring weights are never in neighbouring nibbles.  A byte of a 32-block
 * holds weights j and j+16; in super-blocks j and j+32 (4-bit), or j, j+32, j+64 and j+96 (2-bit planes).
 */
#include "formats/dequant.h"

#include <assert.h>
#include <inttypes.h>

/* ---- Blocks of 32 ---- */

static void block_q4_0(const spk_block_q4_0 *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d);
    for (int j = 0; j < 16; j++) {
        out[j] = d * (float)((b->qs[j] & 15) - 8);
        out[j + 16] = d * (float)((b->qs[j] >> 4) - 8);
    }
}

static void block_q4_1(const spk_block_q4_1 *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d), m = spk_f16_to_f32(b->m);
    for (int j = 0; j < 16; j++) {
        out[j] = d * (float)(b->qs[j] & 15) + m;
        out[j + 16] = d * (float)(b->qs[j] >> 4) + m;
    }
}

/* The 5-bit code of weight w: four bits of qs, and bit w of the 32-bit word qh on top. */
static inline int code_of_5(const uint8_t qs[16], const uint8_t qh[4], int w) {
    int low = w < 16 ? qs[w] & 15 : qs[w - 16] >> 4;
    return low | ((qh[w / 8] >> (w % 8)) & 1) << 4;
}

static void block_q5_0(const spk_block_q5_0 *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d);
    for (int w = 0; w < 32; w++) out[w] = d * (float)(code_of_5(b->qs, b->qh, w) - 16);
}

static void block_q5_1(const spk_block_q5_1 *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d), m = spk_f16_to_f32(b->m);
    for (int w = 0; w < 32; w++) out[w] = d * (float)code_of_5(b->qs, b->qh, w) + m;
}

static void block_q8_0(const spk_block_q8_0 *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d);
    for (int j = 0; j < 32; j++) out[j] = d * (float)b->qs[j];
}

/* The 16 levels that a code of IQ4_NL and IQ4_XS stands for: finer near zero. */
static const int8_t iq4_levels[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

static inline void levels_32(float scale, const uint8_t *restrict qs, float *restrict out) {
    for (int j = 0; j < 16; j++) {
        out[j] = scale * (float)iq4_levels[qs[j] & 15];
        out[j + 16] = scale * (float)iq4_levels[qs[j] >> 4];
    }
}

static void block_iq4_nl(const spk_block_iq4_nl *restrict b, float *restrict out) {
    levels_32(spk_f16_to_f32(b->d), b->qs, out);
}

/* ---- Super-blocks of 256 ---- */

/* 16 sub-blocks of 16, each with a 4-bit scale (low nibble) and a 4-bit minimum. */
static void block_q2_k(const spk_block_q2_k *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d), dmin = spk_f16_to_f32(b->dmin);
    for (int s = 0; s < 16; s++) {
        const float scale = d * (float)(b->scales[s] & 15), min = dmin * (float)(b->scales[s] >> 4);
        const uint8_t *qs = b->qs + 32 * (s / 8) + 16 * (s % 2);
        const int shift = 2 * (s / 2 % 4);
        for (int l = 0; l < 16; l++) out[16 * s + l] = scale * (float)((qs[l] >> shift) & 3) - min;
    }
}

/* 16 sub-blocks of 16.  Scale s is 6 bits, biased by 32: four in a nibble of bytes 0..7, two in bytes 8..11.
 * A code is two bits of qs and one of hmask, biased by 4; bit s/2 of hmask belongs to sub-blocks s and s^1. */
static void block_q3_k(const spk_block_q3_k *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d);
    for (int s = 0; s < 16; s++) {
        const int low = (b->scales[s % 8] >> (s < 8 ? 0 : 4)) & 15;
        const int high = (b->scales[8 + s % 4] >> (2 * (s / 4))) & 3;
        const float scale = d * (float)((low | high << 4) - 32);
        const uint8_t *qs = b->qs + 32 * (s / 8) + 16 * (s % 2), *hmask = b->hmask + 16 * (s % 2);
        const int shift = 2 * (s / 2 % 4), bit = s / 2;
        for (int l = 0; l < 16; l++) {
            const int code = ((qs[l] >> shift) & 3) | ((hmask[l] >> bit) & 1) << 2;
            out[16 * s + l] = scale * (float)(code - 4);
        }
    }
}

/* Eight sub-blocks of 32 with a 6-bit scale and minimum each; a pair of them shares 32 bytes of qs. */
static void block_q4_k(const spk_block_q4_k *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d), dmin = spk_f16_to_f32(b->dmin);
    for (int j = 0; j < 8; j += 2) {
        uint8_t scale_code[2], min_code[2];
        spk_k4_scale_min(b->scales, j, &scale_code[0], &min_code[0]);
        spk_k4_scale_min(b->scales, j + 1, &scale_code[1], &min_code[1]);
        const float low_scale = d * (float)scale_code[0], low_min = dmin * (float)min_code[0];
        const float high_scale = d * (float)scale_code[1], high_min = dmin * (float)min_code[1];
        const uint8_t *qs = b->qs + 16 * j;
        for (int l = 0; l < 32; l++) {
            out[32 * j + l] = low_scale * (float)(qs[l] & 15) - low_min;
            out[32 * j + 32 + l] = high_scale * (float)(qs[l] >> 4) - high_min;
        }
    }
}

/* As Q4_K; bit j of qh[l] is the fifth bit of weight l of sub-block j. */
static void block_q5_k(const spk_block_q5_k *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d), dmin = spk_f16_to_f32(b->dmin);
    for (int j = 0; j < 8; j++) {
        uint8_t scale_code, min_code;
        spk_k4_scale_min(b->scales, j, &scale_code, &min_code);
        const float scale = d * (float)scale_code, min = dmin * (float)min_code;
        const uint8_t *qs = b->qs + 32 * (j / 2);
        const int shift = 4 * (j % 2);
        for (int l = 0; l < 32; l++)
            out[32 * j + l] = scale * (float)(((qs[l] >> shift) & 15) | ((b->qh[l] >> j) & 1) << 4) - min;
    }
}

/* 16 sub-blocks of 16 with a signed scale.  Within a half of 128 weights, run r of 32 takes nibble r/2 of 32 bytes of
 * ql (the second 32 for odd r) and bit pair r of qh. */
static void block_q6_k(const spk_block_q6_k *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d);
    for (int s = 0; s < 16; s++) {
        const int half = s / 8, run = s / 2 % 4;
        const uint8_t *ql = b->ql + 64 * half + 32 * (run % 2) + 16 * (s % 2), *qh = b->qh + 32 * half + 16 * (s % 2);
        const int low_shift = 4 * (run / 2), high_shift = 2 * run;
        const float scale = d * (float)b->scales[s];
        for (int l = 0; l < 16; l++) {
            const int code = ((ql[l] >> low_shift) & 15) | ((qh[l] >> high_shift) & 3) << 4;
            out[16 * s + l] = scale * (float)(code - 32);
        }
    }
}

/* Eight sub-blocks of 32 with a 6-bit scale, biased by 32: a nibble of scales_l and two bits of scales_h. */
static void block_iq4_xs(const spk_block_iq4_xs *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d);
    for (int j = 0; j < 8; j++) {
        const int low = (b->scales_l[j / 2] >> (4 * (j % 2))) & 15, high = (b->scales_h >> (2 * j)) & 3;
        levels_32(d * (float)((low | high << 4) - 32), b->qs + 16 * j, out + 32 * j);
    }
}

/* ---- Rows of blocks.  Blocks may lie at odd addresses: each is copied to an aligned struct first. ---- */

typedef void rows_fn(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out);

#define ROWS_OF(name, weights)                                                                               \
    static void rows_##name(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out) {     \
        for (uint64_t i = 0; i < block_count; i++) {                                                         \
            spk_block_##name b;                                                                              \
            memcpy(&b, blocks + i * sizeof b, sizeof b);                                                     \
            block_##name(&b, out + i * (weights));                                                           \
        }                                                                                                    \
    }
ROWS_OF(q4_0, 32)
ROWS_OF(q4_1, 32)
ROWS_OF(q5_0, 32)
ROWS_OF(q5_1, 32)
ROWS_OF(q8_0, 32)
ROWS_OF(iq4_nl, 32)
ROWS_OF(q2_k, SPK_SUPERBLOCK)
ROWS_OF(q3_k, SPK_SUPERBLOCK)
ROWS_OF(q4_k, SPK_SUPERBLOCK)
ROWS_OF(q5_k, SPK_SUPERBLOCK)
ROWS_OF(q6_k, SPK_SUPERBLOCK)
ROWS_OF(iq4_xs, SPK_SUPERBLOCK)

static void rows_f32(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out) {
    memcpy(out, blocks, block_count * sizeof *out);
}

static void rows_f16(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out) {
    for (uint64_t i = 0; i < block_count; i++) {
        uint16_t h;
        memcpy(&h, blocks + i * sizeof h, sizeof h);
        out[i] = spk_f16_to_f32(h);
    }
}

static void rows_bf16(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out) {
    for (uint64_t i = 0; i < block_count; i++) {
        uint16_t h;
        memcpy(&h, blocks + i * sizeof h, sizeof h);
        out[i] = spk_bf16_to_f32(h);
    }
}

/* ---- The table ---- */

#define F16_EXPONENT  0x7c00u     /* all ones: infinity or NaN */
#define BF16_EXPONENT 0x7f80u

/* `scales` are the byte offsets of the block's 16-bit floats, the first one twice where there is only one.  For an F32
 * weight it is the upper half, which has the whole exponent. */
static const struct {
    rows_fn *rows;
    uint16_t exponent_mask;
    uint8_t  scales[2];
} formats[SPK_TYPE_LIMIT] = {
#define ONE_SCALE(name, field) { rows_##name, F16_EXPONENT, \
    { offsetof(spk_block_##name, field), offsetof(spk_block_##name, field) } }
#define TWO_SCALES(name, field, other) { rows_##name, F16_EXPONENT, \
    { offsetof(spk_block_##name, field), offsetof(spk_block_##name, other) } }
    [SPK_TYPE_F32] = { rows_f32, BF16_EXPONENT, { 2, 2 } },
    [SPK_TYPE_F16] = { rows_f16, F16_EXPONENT, { 0, 0 } },
    [SPK_TYPE_BF16] = { rows_bf16, BF16_EXPONENT, { 0, 0 } },
    [SPK_TYPE_Q4_0] = ONE_SCALE(q4_0, d),
    [SPK_TYPE_Q4_1] = TWO_SCALES(q4_1, d, m),
    [SPK_TYPE_Q5_0] = ONE_SCALE(q5_0, d),
    [SPK_TYPE_Q5_1] = TWO_SCALES(q5_1, d, m),
    [SPK_TYPE_Q8_0] = ONE_SCALE(q8_0, d),
    [SPK_TYPE_Q2_K] = TWO_SCALES(q2_k, d, dmin),
    [SPK_TYPE_Q3_K] = ONE_SCALE(q3_k, d),
    [SPK_TYPE_Q4_K] = TWO_SCALES(q4_k, d, dmin),
    [SPK_TYPE_Q5_K] = TWO_SCALES(q5_k, d, dmin),
    [SPK_TYPE_Q6_K] = ONE_SCALE(q6_k, d),
    [SPK_TYPE_IQ4_NL] = ONE_SCALE(iq4_nl, d),
    [SPK_TYPE_IQ4_XS] = ONE_SCALE(iq4_xs, d),
};

void spk_dequantize(uint32_t type, const void *blocks, uint64_t count, float *out) {
    const spk_type_info *info = spk_type_find(type);
    assert(info != NULL && count % info->block_weights == 0);
    formats[type].rows(blocks, count / info->block_weights, out);
}

spk_status spk_type_bytes(uint32_t type, uint64_t count, uint64_t *out_bytes, spk_error *err) {
    const spk_type_info *info = spk_type_find(type);
    assert(info != NULL);
    if (count % info->block_weights != 0)
        return spk_fail(err, SPK_E_SHAPE, "%" PRIu64 " weights: %s needs a multiple of %" PRIu32, count, info->name,
                        info->block_weights);
    uint64_t bytes;
    if (__builtin_mul_overflow(count / info->block_weights, (uint64_t)info->block_bytes, &bytes))
        return spk_fail(err, SPK_E_LIMIT, "%" PRIu64 " weights of %s: more than 2^64 bytes", count, info->name);
    *out_bytes = bytes;
    return SPK_OK;
}

uint64_t spk_find_nonfinite(uint32_t type, const void *blocks, uint64_t block_count) {
    const spk_type_info *info = spk_type_find(type);
    assert(info != NULL);
    const uint32_t mask = formats[type].exponent_mask;
    const uint8_t *first = (const uint8_t *)blocks + formats[type].scales[0];
    const uint8_t *second = (const uint8_t *)blocks + formats[type].scales[1];
    for (uint64_t i = 0; i < block_count; i++, first += info->block_bytes, second += info->block_bytes) {
        uint16_t a, b;
        memcpy(&a, first, sizeof a);
        memcpy(&b, second, sizeof b);
        if ((a & mask) == mask || (b & mask) == mask) return i;
    }
    return UINT64_MAX;
}
