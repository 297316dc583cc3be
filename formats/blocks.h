/* formats/blocks.h - GGML tensor types: ids, block structs, scalar conversions.
 *
 * The one definition of every block, shared by C and CUDA.  All fields are little-endian; spk runs on
 * little-endian machines only (asserted in blocks.c).  Layout facts: GGML's block formats.
 */
#ifndef SPK_BLOCKS_H
#define SPK_BLOCKS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Type ids as stored in GGUF. */
typedef enum {
    SPK_TYPE_F32 = 0, SPK_TYPE_F16 = 1, SPK_TYPE_Q4_0 = 2, SPK_TYPE_Q4_1 = 3,
    SPK_TYPE_Q5_0 = 6, SPK_TYPE_Q5_1 = 7, SPK_TYPE_Q8_0 = 8,
    SPK_TYPE_Q2_K = 10, SPK_TYPE_Q3_K = 11, SPK_TYPE_Q4_K = 12, SPK_TYPE_Q5_K = 13, SPK_TYPE_Q6_K = 14,
    SPK_TYPE_IQ4_NL = 20, SPK_TYPE_IQ4_XS = 23,
    SPK_TYPE_BF16 = 30,
    SPK_TYPE_LIMIT = 64      /* every id above is below this; sizes dispatch tables */
} spk_type;

#define SPK_SUPERBLOCK 256   /* weights in a K-quant super-block */

typedef struct { uint16_t d; uint8_t qs[16]; } spk_block_q4_0;
typedef struct { uint16_t d, m; uint8_t qs[16]; } spk_block_q4_1;
typedef struct { uint16_t d; uint8_t qh[4]; uint8_t qs[16]; } spk_block_q5_0;
typedef struct { uint16_t d, m; uint8_t qh[4]; uint8_t qs[16]; } spk_block_q5_1;
typedef struct { uint16_t d; int8_t qs[32]; } spk_block_q8_0;
typedef struct { uint8_t scales[16]; uint8_t qs[64]; uint16_t d, dmin; } spk_block_q2_k;
typedef struct { uint8_t hmask[32]; uint8_t qs[64]; uint8_t scales[12]; uint16_t d; } spk_block_q3_k;
typedef struct { uint16_t d, dmin; uint8_t scales[12]; uint8_t qs[128]; } spk_block_q4_k;
typedef struct { uint16_t d, dmin; uint8_t scales[12]; uint8_t qh[32]; uint8_t qs[128]; } spk_block_q5_k;
typedef struct { uint8_t ql[128]; uint8_t qh[64]; int8_t scales[16]; uint16_t d; } spk_block_q6_k;
typedef struct { uint16_t d; uint8_t qs[16]; } spk_block_iq4_nl;
typedef struct { uint16_t d; uint16_t scales_h; uint8_t scales_l[4]; uint8_t qs[128]; } spk_block_iq4_xs;

#ifdef __cplusplus
#define SPK_STATIC_ASSERT static_assert
#else
#define SPK_STATIC_ASSERT _Static_assert
#endif
SPK_STATIC_ASSERT(sizeof(spk_block_q4_0) == 18 && sizeof(spk_block_q4_1) == 20, "block size");
SPK_STATIC_ASSERT(sizeof(spk_block_q5_0) == 22 && sizeof(spk_block_q5_1) == 24, "block size");
SPK_STATIC_ASSERT(sizeof(spk_block_q8_0) == 34 && sizeof(spk_block_q2_k) == 84, "block size");
SPK_STATIC_ASSERT(sizeof(spk_block_q3_k) == 110 && sizeof(spk_block_q4_k) == 144, "block size");
SPK_STATIC_ASSERT(sizeof(spk_block_q5_k) == 176 && sizeof(spk_block_q6_k) == 210, "block size");
SPK_STATIC_ASSERT(sizeof(spk_block_iq4_nl) == 18 && sizeof(spk_block_iq4_xs) == 136, "block size");

/* One row of the type table. */
typedef struct {
    uint32_t    type;          /* spk_type */
    const char *name;          /* "Q4_K" */
    uint32_t    block_weights; /* weights in a block: 1, 32 or 256 */
    uint32_t    block_bytes;
    int         is_quantized;  /* 0 for F32 F16 BF16 */
} spk_type_info;

/* NULL for an id that spk cannot read the weights of. */
const spk_type_info *spk_type_find(uint32_t type);
/* By name, case-sensitive ("Q4_K"); NULL if unknown. */
const spk_type_info *spk_type_find_name(const char *name);
/* The name, or "type 39" for an id that is not in the table.  Known GGML ids without a row here
 * (MXFP4, IQ2_XS, ...) are named too.  Points into static storage; never NULL.  Thread-safe.
 * "type 39" texts are the calling thread's, and reused by its fourth later call. */
const char *spk_type_name(uint32_t type);

/* IEEE half to single, exact (subnormals, infinities and NaN payloads included). */
static inline float spk_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (mantissa << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112u) << 23) | (mantissa << 13);
    } else {                                     /* zero or subnormal: mantissa * 2^-24, exact in f32 */
        float magnitude = (float)mantissa * 0x1p-24f;
        memcpy(&bits, &magnitude, sizeof bits);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Single to half, round to nearest even; overflow gives infinity, NaN stays NaN. */
static inline uint16_t spk_f32_to_f16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000u);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);       /* >= 65520 rounds to infinity */
    if (magnitude < 0x38800000u) {                                        /* below 2^-14: subnormal half */
        float absolute;
        memcpy(&absolute, &magnitude, sizeof absolute);
        float shifted = absolute + 0.5f;         /* ulp of [0.5,1) is 2^-24: the addition rounds for us */
        uint32_t raw;
        memcpy(&raw, &shifted, sizeof raw);
        return (uint16_t)(sign | (raw - 0x3f000000u));
    }
    uint32_t rounded = magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u);
    return (uint16_t)(sign | (rounded >> 13));
}

static inline float spk_bf16_to_f32(uint16_t h) {
    uint32_t bits = (uint32_t)h << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* The 6-bit scale and min of sub-block j (0..7) of a Q4_K or Q5_K block, from its 12 packed bytes. */
static inline void spk_k4_scale_min(const uint8_t packed[12], int j, uint8_t *scale, uint8_t *min) {
    if (j < 4) {
        *scale = packed[j] & 63u;
        *min = packed[j + 4] & 63u;
    } else {
        *scale = (uint8_t)((packed[j + 4] & 15u) | ((packed[j - 4] >> 6) << 4));
        *min = (uint8_t)((packed[j + 4] >> 4) | ((packed[j] >> 6) << 4));
    }
}

#endif
