/* formats/dequant.c - see dequant.h.
 *
 * One function a block, written from the format's formula; those of the types that big matrices have are in
 * dequant_lanes.c.  Every product of a scale, a sub-scale and a code is exact in F32 (at most 24 significant bits), so the
 * only rounding is the one of adding or subtracting a minimum, and the order of the factors does not matter.
 * What a newcomer gets wrong: codes of neighbouring weights are never in neighbouring nibbles.  A byte of a 32-block
 * holds weights j and j+16; in super-blocks j and j+32 (4-bit), or j, j+32, j+64 and j+96 (2-bit planes).
 */
#include "formats/dequant.h"

#include <assert.h>
#include <inttypes.h>

#include "formats/cpu_features.h"
#include "formats/dequant_internal.h"

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

/* Eight sub-blocks of 32 with a 6-bit scale, biased by 32: a nibble of scales_l and two bits of scales_h. */
static void block_iq4_xs(const spk_block_iq4_xs *restrict b, float *restrict out) {
    const float d = spk_f16_to_f32(b->d);
    for (int j = 0; j < 8; j++) {
        const int low = (b->scales_l[j / 2] >> (4 * (j % 2))) & 15, high = (b->scales_h >> (2 * j)) & 3;
        levels_32(d * (float)((low | high << 4) - 32), b->qs + 16 * j, out + 32 * j);
    }
}

/* ---- Rows of blocks.  Blocks may lie at odd addresses: each is copied to an aligned struct first. ---- */

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
ROWS_OF(iq4_nl, 32)
ROWS_OF(q2_k, SPK_SUPERBLOCK)
ROWS_OF(q3_k, SPK_SUPERBLOCK)
ROWS_OF(iq4_xs, SPK_SUPERBLOCK)

static void rows_f32(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out) {
    memcpy(out, blocks, block_count * sizeof *out);
}

/* ---- The tables ---- */

#define BUILD(name, usable) \
    { #name, usable, spk_dequant_f16_##name, spk_dequant_bf16_##name, spk_dequant_q8_0_##name, spk_dequant_q4_k_##name, \
      spk_dequant_q5_k_##name, spk_dequant_q6_k_##name }
const spk_dequant_build spk_dequant_builds[] = {
    BUILD(plain, spk_cpu_runs_plain),
#if defined(__x86_64__)
    BUILD(avx2, spk_cpu_runs_avx2),
    BUILD(avx512, spk_cpu_runs_avx512),
#endif
};
const size_t spk_dequant_build_count = sizeof spk_dequant_builds / sizeof *spk_dequant_builds;

#define F16_EXPONENT  0x7c00u     /* all ones: infinity or NaN */
#define BF16_EXPONENT 0x7f80u

/* `scales` are the byte offsets of the block's 16-bit floats, the first one twice where there is only one.  For an F32
 * weight it is the upper half, which has the whole exponent.  No `rows`: a build has them. */
static const struct {
    spk_dequant_rows *rows;
    uint16_t          exponent_mask;
    uint8_t           scales[2];
} formats[SPK_TYPE_LIMIT] = {
#define ONE_SCALE(name, field, rows) { rows, F16_EXPONENT, \
    { offsetof(spk_block_##name, field), offsetof(spk_block_##name, field) } }
#define TWO_SCALES(name, field, other, rows) { rows, F16_EXPONENT, \
    { offsetof(spk_block_##name, field), offsetof(spk_block_##name, other) } }
    [SPK_TYPE_F32] = { rows_f32, BF16_EXPONENT, { 2, 2 } },
    [SPK_TYPE_F16] = { NULL, F16_EXPONENT, { 0, 0 } },
    [SPK_TYPE_BF16] = { NULL, BF16_EXPONENT, { 0, 0 } },
    [SPK_TYPE_Q4_0] = ONE_SCALE(q4_0, d, rows_q4_0),
    [SPK_TYPE_Q4_1] = TWO_SCALES(q4_1, d, m, rows_q4_1),
    [SPK_TYPE_Q5_0] = ONE_SCALE(q5_0, d, rows_q5_0),
    [SPK_TYPE_Q5_1] = TWO_SCALES(q5_1, d, m, rows_q5_1),
    [SPK_TYPE_Q8_0] = ONE_SCALE(q8_0, d, NULL),
    [SPK_TYPE_Q2_K] = TWO_SCALES(q2_k, d, dmin, rows_q2_k),
    [SPK_TYPE_Q3_K] = ONE_SCALE(q3_k, d, rows_q3_k),
    [SPK_TYPE_Q4_K] = TWO_SCALES(q4_k, d, dmin, NULL),
    [SPK_TYPE_Q5_K] = TWO_SCALES(q5_k, d, dmin, NULL),
    [SPK_TYPE_Q6_K] = ONE_SCALE(q6_k, d, NULL),
    [SPK_TYPE_IQ4_NL] = ONE_SCALE(iq4_nl, d, rows_iq4_nl),
    [SPK_TYPE_IQ4_XS] = ONE_SCALE(iq4_xs, d, rows_iq4_xs),
};

static spk_dequant_rows *rows_of(const spk_dequant_build *build, uint32_t type) {
    switch (type) {
    case SPK_TYPE_F16:  return build->f16;
    case SPK_TYPE_BF16: return build->bf16;
    case SPK_TYPE_Q8_0: return build->q8_0;
    case SPK_TYPE_Q4_K: return build->q4_k;
    case SPK_TYPE_Q5_K: return build->q5_k;
    case SPK_TYPE_Q6_K: return build->q6_k;
    default:            return formats[type].rows;
    }
}

void spk_dequantize_with(const spk_dequant_build *build, uint32_t type, const void *blocks, uint64_t count, float *out) {
    const spk_type_info *info = spk_type_find(type);
    assert(info != NULL && count % info->block_weights == 0);
    rows_of(build, type)(blocks, count / info->block_weights, out);
}

/* The last build that this CPU can run. */
void spk_dequantize(uint32_t type, const void *blocks, uint64_t count, float *out) {
    const spk_dequant_build *build = &spk_dequant_builds[0];
    for (size_t i = 1; i < spk_dequant_build_count; i++)
        if (spk_dequant_builds[i].usable()) build = &spk_dequant_builds[i];
    spk_dequantize_with(build, type, blocks, count, out);
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
