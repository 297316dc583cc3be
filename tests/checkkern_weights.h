/* tests/checkkern_weights.h - weights of every type for the kernel checker: patterns, and a second decoder.
 *
 * The decoder works from the block formats alone: w = main - offset, the two products whose difference a K-quant weight is, and
 * in which tolerances count.
 */
#ifndef SPK_CHECKKERN_WEIGHTS_H
#define SPK_CHECKKERN_WEIGHTS_H

#include "formats/dequant.h"
#include "formats/layout.h"
#include "tests/checkkern_common.h"

typedef enum { W_ZERO, W_ALL_ONES, W_SIGNS, W_TINY_SCALE, W_HUGE_SCALE, W_RANDOM } w_pattern;
static const char *const w_names[] = { "zero", "all-ones", "signs", "tiny-scale", "huge-scale", "random" };

static const struct { w_pattern w; x_pattern x; } matmul_cases[] = {
    { W_ZERO, X_RANDOM },          { W_ALL_ONES, X_ALTERNATING }, { W_ALL_ONES, X_LARGE },
    { W_SIGNS, X_ALTERNATING },    { W_TINY_SCALE, X_RANDOM },    { W_HUGE_SCALE, X_HUGE_AMONG_TINY },
    { W_RANDOM, X_ZERO },          { W_RANDOM, X_SUBNORMAL },     { W_RANDOM, X_HUGE_AMONG_TINY },
    { W_RANDOM, X_RANDOM },
};

/* Where a type's F16 factors lie in a block; -1: none. */
static void factor_offsets(uint32_t type, int out[2]) {
    out[0] = 0;
    out[1] = -1;
    switch (type) {
    case SPK_TYPE_Q4_1: case SPK_TYPE_Q5_1: case SPK_TYPE_Q4_K: case SPK_TYPE_Q5_K: out[1] = 2; break;
    case SPK_TYPE_Q2_K: out[0] = 80; out[1] = 82; break;
    case SPK_TYPE_Q3_K: out[0] = 108; break;
    case SPK_TYPE_Q6_K: out[0] = 208; break;
    default: break;
    }
}

static void fill_float_weights(uint32_t type, w_pattern pattern, uint8_t *out, uint64_t count, uint64_t *random) {
    for (uint64_t i = 0; i < count; i++) {
        float r = check_uniform(random), sign = i % 2 == 0 ? 1.0f : -1.0f;
        float w = pattern == W_ZERO ? 0.0f : pattern == W_ALL_ONES ? 1.0f : pattern == W_SIGNS ? sign
                : pattern == W_TINY_SCALE ? 1e-7f * r : pattern == W_HUGE_SCALE ? 6e4f * r : r;
        uint16_t half = spk_f32_to_f16(w);
        uint32_t bits;
        memcpy(&bits, &w, sizeof bits);
        if (type == SPK_TYPE_BF16) half = (uint16_t)(bits >> 16);
        if (type == SPK_TYPE_F32)
            memcpy(out + 4 * i, &w, 4);
        else
            memcpy(out + 2 * i, &half, 2);
    }
}

/* Quantized: any bytes are weights; only the factors are chosen. */
static void fill_blocks(const spk_type_info *type, w_pattern pattern, uint8_t *out, uint64_t block_count, uint64_t *random) {
    int at[2];
    factor_offsets(type->type, at);
    for (uint64_t b = 0; b < block_count; b++, out += type->block_bytes) {
        for (uint32_t i = 0; i < type->block_bytes; i++) {
            uint8_t signs = i % 2 == 0 ? 0x80 : 0x7f;
            out[i] = pattern == W_ALL_ONES ? 0xff : pattern == W_SIGNS ? signs : (uint8_t)check_random(random);
        }
        for (int f = 0; f < 2; f++) {
            float magnitude = 0.01f + 0.01f * (check_uniform(random) + 1);
            uint16_t half = pattern == W_ZERO ? 0 : pattern == W_TINY_SCALE ? (uint16_t)(1 + f)
                          : pattern == W_HUGE_SCALE ? 0x7bff : spk_f32_to_f16(magnitude);
            if (f == 0 && pattern == W_RANDOM && b % 3 == 0) half |= 0x8000;     /* factors may be negative */
            if (at[f] >= 0) memcpy(out + at[f], &half, 2);
        }
    }
}

/* ---- The second decoder: 256 weights of a type that T32 takes ---- */

static double f16_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return (double)spk_f16_to_f32(half);
}

static void decode_q45_k(const uint8_t *block, bool has_high, double *main_part, double *offset) {
    double d = f16_at(block), dmin = f16_at(block + 2);
    const uint8_t *packed = block + 4, *high = block + 16, *codes = block + (has_high ? 48 : 16);
    for (int i = 0; i < 256; i++) {
        int group = i / 32, in = i % 32;
        int s = group < 4 ? packed[group] & 63 : (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
        int m = group < 4 ? packed[group + 4] & 63 : packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
        int byte = codes[32 * (group / 2) + in], code = group % 2 == 0 ? byte & 15 : byte >> 4;
        if (has_high) code += (high[in] >> group & 1) * 16;
        main_part[i] = d * s * code;
        offset[i] = dmin * m;
    }
}

static void decode_q6_k(const uint8_t *block, double *main_part, double *offset) {
    double d = f16_at(block + 208);
    for (int i = 0; i < 256; i++) {
        int half = i / 128, quarter = i % 128 / 32, in = i % 32;
        int low = block[64 * half + 32 * (quarter % 2) + in];
        int code = (quarter < 2 ? low & 15 : low >> 4) + (block[128 + 32 * half + in] >> 2 * quarter & 3) * 16;
        int s = (int8_t)block[192 + i / 16];
        main_part[i] = d * s * code;
        offset[i] = d * s * 32;
    }
}

static void decode_row(uint32_t type, const uint8_t *row, uint64_t cols, double *main_part, double *offset) {
    const spk_type_info *info = spk_type_find(type);
    float plain[SPK_SUPERBLOCK];
    for (uint64_t i = 0; i < cols; i += SPK_SUPERBLOCK) {
        const uint8_t *block = row + i / info->block_weights * info->block_bytes;
        if (type == SPK_TYPE_Q4_K) {
            decode_q45_k(block, false, main_part + i, offset + i);
        } else if (type == SPK_TYPE_Q5_K) {
            decode_q45_k(block, true, main_part + i, offset + i);
        } else if (type == SPK_TYPE_Q6_K) {
            decode_q6_k(block, main_part + i, offset + i);
        } else {                 /* one factor: F32 holds these exactly, or test_dequant answers for them */
            uint64_t count = cols - i < SPK_SUPERBLOCK ? cols - i : SPK_SUPERBLOCK;
            spk_dequantize(type, block, count, plain);
            for (uint64_t j = 0; j < count; j++) {
                main_part[i + j] = (double)plain[j];
                offset[i + j] = 0;
            }
        }
    }
}

#endif
