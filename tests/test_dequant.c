/* tests/test_dequant.c - every weight type, against formulas written weight by weight from byte offsets, against hashes
 * of what GGML's own reference code makes of the same random blocks, and against a few blocks decoded by hand; in every
 * build that this CPU can run. */
#include "formats/dequant.h"
#include "formats/dequant_internal.h"
#include "formats/dequant_internal.h"

#include <math.h>
#include <stdlib.h>
#include <xxhash.h>

#include "tests/check.h"

enum { GOLDEN_BLOCKS = 64, VALUES_MAX = GOLDEN_BLOCKS * 256, BYTES_MAX = GOLDEN_BLOCKS * 210 };

/* scale_a and scale_b: offsets of the block's F16 fields, -1 for none.  golden_xxh3: XXH3-64 of the F32 values that
 * GGML (libggml-base of llama.cpp v0.4.0) decodes from random_blocks() with the type's id as the seed. */
typedef struct {
    uint32_t type;
    int      weights, bytes, scale_a, scale_b;
    uint64_t golden_xxh3;
} format;

static const format formats[] = {
    { SPK_TYPE_F32, 1, 4, -1, -1, 0xe449e6b89baf3991 },
    { SPK_TYPE_F16, 1, 2, 0, -1, 0xfb09732ae083618e },
    { SPK_TYPE_BF16, 1, 2, -1, -1, 0x8957486fcd078f15 },
    { SPK_TYPE_Q4_0, 32, 18, 0, -1, 0xa5e9dd2255748418 },
    { SPK_TYPE_Q4_1, 32, 20, 0, 2, 0x798bc3453f0fd06a },
    { SPK_TYPE_Q5_0, 32, 22, 0, -1, 0x13b98f6059945534 },
    { SPK_TYPE_Q5_1, 32, 24, 0, 2, 0x5058bc8dfe3ece23 },
    { SPK_TYPE_Q8_0, 32, 34, 0, -1, 0xc48a5b012fb9e615 },
    { SPK_TYPE_Q2_K, 256, 84, 80, 82, 0x9c935c05023a94a6 },
    { SPK_TYPE_Q3_K, 256, 110, 108, -1, 0xa2207617fcfb7a30 },
    { SPK_TYPE_Q4_K, 256, 144, 0, 2, 0x166f0395ce063c61 },
    { SPK_TYPE_Q5_K, 256, 176, 0, 2, 0xba591bcad01f4e1a },
    { SPK_TYPE_Q6_K, 256, 210, 208, -1, 0xe565f9d6887d6620 },
    { SPK_TYPE_IQ4_NL, 32, 18, 0, -1, 0x94cfac69e3c82d81 },
    { SPK_TYPE_IQ4_XS, 256, 136, 0, -1, 0x6d7a2df8e24fa382 },
};
enum { FORMAT_COUNT = sizeof formats / sizeof *formats };

static uint16_t load_16(const uint8_t *bytes) { return (uint16_t)(bytes[0] | bytes[1] << 8); }

static void store_16(uint8_t *bytes, uint16_t value) {
    bytes[0] = (uint8_t)value;
    bytes[1] = (uint8_t)(value >> 8);
}

/* Random codes and finite random scales: clearing the exponent's top bit leaves no infinity and no NaN.  The golden
 * hashes depend on this sequence. */
static void random_blocks(const format *f, uint64_t seed, int block_count, uint8_t *out) {
    uint64_t state = seed;
    for (int i = 0; i < block_count * f->bytes; i++) out[i] = (uint8_t)(check_random(&state) >> 56);
    for (int b = 0; b < block_count; b++) {
        uint8_t *block = out + b * f->bytes;
        if (f->type == SPK_TYPE_F32 || f->type == SPK_TYPE_BF16) block[f->bytes - 1] &= 0xbf;
        if (f->scale_a >= 0) block[f->scale_a + 1] &= 0xbf;
        if (f->scale_b >= 0) block[f->scale_b + 1] &= 0xbf;
    }
}

/* ---- Formulas, one weight at a time ---- */

static double half(const uint8_t *bytes) {
    const int h = load_16(bytes), exponent = h >> 10 & 31, mantissa = h & 1023;
    const double magnitude = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
    return h >> 15 ? -magnitude : magnitude;
}

static int bit(const uint8_t *bytes, int index) { return bytes[index / 8] >> (index % 8) & 1; }
static int nibble(const uint8_t *bytes, int at, int is_high) { return is_high ? bytes[at] >> 4 : bytes[at] % 16; }

/* Products of scale, sub-scale and code are exact in F32; adding a minimum rounds once. */
static float affine(double scale, int code, double addend) { return (float)(scale * code) + (float)addend; }

/* 6-bit scale (or, with is_min, minimum) of sub-block j: the 12 bytes at `s` of Q4_K and Q5_K. */
static int six_bits(const uint8_t *s, int j, int is_min) {
    if (j < 4) return s[j + 4 * is_min] % 64;
    return nibble(s, j + 4, is_min) + 16 * (s[j - 4 + 4 * is_min] / 64);
}

/* What a code of IQ4_NL and IQ4_XS stands for. */
static const int levels[16] = { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 };

static float weight_32(uint32_t type, const uint8_t *b, int w) {
    const int is_high = w >= 16, at = w % 16;
    switch (type) {
    case SPK_TYPE_Q4_0:   return (float)(half(b) * (nibble(b + 2, at, is_high) - 8));
    case SPK_TYPE_Q4_1:   return affine(half(b), nibble(b + 4, at, is_high), half(b + 2));
    case SPK_TYPE_Q5_0:   return (float)(half(b) * (nibble(b + 6, at, is_high) + 16 * bit(b + 2, w) - 16));
    case SPK_TYPE_Q5_1:   return affine(half(b), nibble(b + 8, at, is_high) + 16 * bit(b + 4, w), half(b + 2));
    case SPK_TYPE_Q8_0:   return (float)(half(b) * (b[2 + w] < 128 ? b[2 + w] : b[2 + w] - 256));
    default:              return (float)(half(b) * levels[nibble(b + 2, at, is_high)]);     /* IQ4_NL */
    }
}

static float weight_256(uint32_t type, const uint8_t *b, int w) {
    const int eighth = w / 32, sixteenth = w / 16, at = w % 32;
    const int pair_at = w / 128 * 32 + at, pair_shift = 2 * (w / 32 % 4);     /* two-bit planes of 128 weights */
    switch (type) {
    case SPK_TYPE_Q2_K:
        return affine(half(b + 80) * (b[sixteenth] % 16), b[16 + pair_at] >> pair_shift & 3,
                      -half(b + 82) * (b[sixteenth] / 16));
    case SPK_TYPE_Q3_K: {
        const int scale = nibble(b + 96, sixteenth % 8, sixteenth >= 8)
                          + 16 * (b[104 + sixteenth % 4] >> (2 * (sixteenth / 4)) & 3) - 32;
        const int code = (b[32 + pair_at] >> pair_shift & 3) - (b[at] >> eighth & 1 ? 0 : 4);
        return (float)(half(b + 108) * scale * code);
    }
    case SPK_TYPE_Q4_K:
        return affine(half(b) * six_bits(b + 4, eighth, 0), nibble(b + 16, w / 64 * 32 + at, eighth % 2),
                      -half(b + 2) * six_bits(b + 4, eighth, 1));
    case SPK_TYPE_Q5_K:
        return affine(half(b) * six_bits(b + 4, eighth, 0),
                      nibble(b + 48, w / 64 * 32 + at, eighth % 2) + 16 * (b[16 + at] >> eighth & 1),
                      -half(b + 2) * six_bits(b + 4, eighth, 1));
    case SPK_TYPE_Q6_K: {
        const int code = nibble(b, w / 128 * 64 + w % 64, w % 128 >= 64) + 16 * (b[128 + pair_at] >> pair_shift & 3);
        const int scale = b[192 + sixteenth] < 128 ? b[192 + sixteenth] : b[192 + sixteenth] - 256;
        return (float)(half(b + 208) * scale * (code - 32));
    }
    default: {                                   /* IQ4_XS */
        const int scale = nibble(b + 4, eighth / 2, eighth % 2) + 16 * (load_16(b + 2) >> (2 * eighth) & 3) - 32;
        return (float)(half(b) * scale * levels[nibble(b + 8, eighth * 16 + w % 16, w % 32 >= 16)]);
    }
    }
}

static float weight_1(uint32_t type, const uint8_t *b) {
    if (type == SPK_TYPE_F16) return (float)half(b);
    uint8_t bytes[4] = { 0, 0, b[0], b[1] };
    if (type == SPK_TYPE_F32) memcpy(bytes, b, 4);
    float value;
    memcpy(&value, bytes, 4);
    return value;
}

/* ---- Tests ---- */

static void build_against_formulas(const spk_dequant_build *build) {
    for (int i = 0; i < FORMAT_COUNT; i++) {
        const format *f = &formats[i];
        uint8_t blocks[BYTES_MAX];
        float got[VALUES_MAX];
        random_blocks(f, 1000 + f->type, GOLDEN_BLOCKS, blocks);
        spk_dequantize_with(build, f->type, blocks, (uint64_t)(GOLDEN_BLOCKS * f->weights), got);
        int wrong_count = 0;
        for (int w = 0; w < GOLDEN_BLOCKS * f->weights; w++) {
            const uint8_t *block = blocks + w / f->weights * f->bytes;
            const float expected = f->weights == 1    ? weight_1(f->type, block)
                                   : f->weights == 32 ? weight_32(f->type, block, w % 32)
                                                      : weight_256(f->type, block, w % 256);
            wrong_count += !(got[w] == expected);
        }
        CHECK(wrong_count == 0, "%s, %s: %d wrong weights", build->name, spk_type_name(f->type), wrong_count);
    }
}

static void build_against_ggml(const spk_dequant_build *build) {
    for (int i = 0; i < FORMAT_COUNT; i++) {
        const format *f = &formats[i];
        uint8_t blocks[BYTES_MAX + 1];
        float values[VALUES_MAX];
        const uint64_t count = (uint64_t)(GOLDEN_BLOCKS * f->weights);
        for (int shift = 0; shift < 2; shift++) {       /* at an even and at an odd address */
            random_blocks(f, f->type, GOLDEN_BLOCKS, blocks + shift);
            spk_dequantize_with(build, f->type, blocks + shift, count, values);
            const uint64_t hash = XXH3_64bits(values, count * sizeof *values);
            CHECK(hash == f->golden_xxh3, "%s, %s: %016llx", build->name, spk_type_name(f->type), (unsigned long long)hash);
        }
    }
}

/* All bit patterns, NaNs with their payloads included, and counts that fill no vector. */
static void build_widens_every_half(const spk_dequant_build *build) {
    static uint16_t halves[1 << 16];
    static float got[1 << 16];
    for (uint32_t h = 0; h < 1 << 16; h++) halves[h] = (uint16_t)h;
    for (uint32_t begin = 0; begin < 40; begin++) {
        const uint32_t count = begin == 0 ? 1 << 16 : begin;
        uint32_t wrong_count = 0;
        for (uint32_t t = 0; t < 2; t++) {
            spk_dequantize_with(build, t ? SPK_TYPE_BF16 : SPK_TYPE_F16, halves + begin, count, got);
            for (uint32_t i = 0; i < count; i++) {
                const uint16_t h = halves[begin + i];
                const float expected = t ? spk_bf16_to_f32(h) : spk_f16_to_f32(h);
                wrong_count += memcmp(&got[i], &expected, sizeof expected) != 0;
            }
        }
        CHECK(wrong_count == 0, "%s: %u wrong from %u", build->name, wrong_count, begin);
    }
}

static void every_build(void (*test)(const spk_dequant_build *build)) {
    for (size_t b = 0; b < spk_dequant_build_count; b++)
        if (spk_dequant_builds[b].usable()) test(&spk_dequant_builds[b]);
}

static void against_formulas(void) { every_build(build_against_formulas); }
static void against_ggml(void) { every_build(build_against_ggml); }
static void every_half(void) { every_build(build_widens_every_half); }

/* One code or scale bit set in an otherwise simple block, where a wrong reading of the format puts it elsewhere. */
static void by_hand(void) {
    float out[256];
    uint8_t b[256] = { 0 };
    store_16(b, 0x3c00);                         /* d = 1 */
    b[2] = 0xf0;
    spk_dequantize(SPK_TYPE_Q4_0, b, 32, out);
    CHECK(out[0] == -8 && out[16] == 7 && out[1] == -8, "Q4_0: %g %g", (double)out[0], (double)out[16]);
    spk_dequantize(SPK_TYPE_IQ4_NL, b, 32, out);
    CHECK(out[0] == -127 && out[16] == 113, "IQ4_NL: %g %g", (double)out[0], (double)out[16]);
    spk_dequantize(SPK_TYPE_Q8_0, b, 32, out);
    CHECK(out[0] == -16 && out[31] == 0, "Q8_0: %g %g", (double)out[0], (double)out[31]);
    b[2] = 0;
    b[4] = 0x04;                                 /* bit 18 of qh */
    spk_dequantize(SPK_TYPE_Q5_0, b, 32, out);
    CHECK(out[18] == 0 && out[2] == -16, "Q5_0: %g %g", (double)out[18], (double)out[2]);

    memset(b, 0, sizeof b);                      /* Q5_K: scale 3 of sub-block 5, whose fifth bit is bit 5 of qh */
    store_16(b, 0x4000);                         /* d = 2 */
    b[4 + 9] = 0x03;
    b[16 + 7] = 0x20;
    spk_dequantize(SPK_TYPE_Q5_K, b, 256, out);
    CHECK(out[5 * 32 + 7] == 96 && out[7] == 0 && out[5 * 32 + 6] == 0, "Q5_K: %g", (double)out[5 * 32 + 7]);
    memset(b + 16, 0, 160);                      /* Q4_K: high nibble of qs[64 + 7] */
    b[16 + 64 + 7] = 0xa0;
    spk_dequantize(SPK_TYPE_Q4_K, b, 256, out);
    CHECK(out[5 * 32 + 7] == 60 && out[4 * 32 + 7] == 0, "Q4_K: %g", (double)out[5 * 32 + 7]);

    memset(b, 0, sizeof b);                      /* Q6_K: signed scale, d behind everything */
    store_16(b + 208, 0x3800);                   /* d = 0.5 */
    b[192 + 15] = 0xfe;                          /* -2 */
    spk_dequantize(SPK_TYPE_Q6_K, b, 256, out);
    CHECK(out[255] == 32 && out[239] == 0, "Q6_K: %g %g", (double)out[255], (double)out[239]);
    memset(b, 0, sizeof b);                      /* Q3_K: code bias 4 where hmask is clear, scale bias 32 */
    store_16(b + 108, 0x3c00);
    b[16 + 1] = 0x80;                            /* hmask of weight 32*7 + 17 */
    spk_dequantize(SPK_TYPE_Q3_K, b, 256, out);
    CHECK(out[0] == 128 && out[241] == 0 && out[240] == 128, "Q3_K: %g %g", (double)out[0], (double)out[241]);
}

static void nonfinite_scales(void) {
    static const uint16_t f16_bad[] = { 0x7c00, 0xfc00, 0x7e00, 0xfc01 };
    static const uint16_t bf16_bad[] = { 0x7f80, 0xff80, 0x7fc0, 0xff81 };
    for (int i = 0; i < FORMAT_COUNT; i++) {
        const format *f = &formats[i];
        const char *name = spk_type_name(f->type);
        uint8_t blocks[BYTES_MAX];
        random_blocks(f, 77, GOLDEN_BLOCKS, blocks);
        CHECK(spk_find_nonfinite(f->type, blocks, GOLDEN_BLOCKS) == UINT64_MAX, "%s: all finite", name);
        CHECK(spk_find_nonfinite(f->type, blocks, 0) == UINT64_MAX, "%s: nothing", name);
        const int is_bf16 = f->type == SPK_TYPE_BF16 || f->type == SPK_TYPE_F32;
        const int offsets[2] = { is_bf16 ? f->bytes - 2 : f->scale_a, f->scale_b };
        for (int o = 0; o < 2; o++) {
            for (int v = 0; v < 4 && offsets[o] >= 0; v++) {
                random_blocks(f, 77, GOLDEN_BLOCKS, blocks);
                for (int at = GOLDEN_BLOCKS - 1; at >= 0; at -= 21) {
                    store_16(blocks + at * f->bytes + offsets[o], (is_bf16 ? bf16_bad : f16_bad)[v]);
                    CHECK(spk_find_nonfinite(f->type, blocks, GOLDEN_BLOCKS) == (uint64_t)at, "%s: block %d", name, at);
                }
            }
        }
        if (f->weights == 1) continue;
        memset(blocks, 0xff, (size_t)f->bytes);  /* codes of all ones are no NaN */
        store_16(blocks + f->scale_a, 0x7bff);
        if (f->scale_b >= 0) store_16(blocks + f->scale_b, 0xfbff);
        CHECK(spk_find_nonfinite(f->type, blocks, 1) == UINT64_MAX, "%s: the largest finite scale", name);
    }
}

static void type_bytes(void) {
    spk_error err = { 0 };
    for (int i = 0; i < FORMAT_COUNT; i++) {
        const format *f = &formats[i];
        const uint64_t weights = (uint64_t)f->weights, most = UINT64_MAX / (uint64_t)f->bytes;
        uint64_t bytes = 1;
        CHECK_OK(spk_type_bytes(f->type, 0, &bytes, &err), err);
        CHECK(bytes == 0, "nothing");
        CHECK_OK(spk_type_bytes(f->type, 7 * weights, &bytes, &err), err);
        CHECK(bytes == 7 * (uint64_t)f->bytes, "%s: %llu", spk_type_name(f->type), (unsigned long long)bytes);
        if (f->weights > 1) {
            CHECK(spk_type_bytes(f->type, weights - 1, &bytes, &err) == SPK_E_SHAPE, "part of a block");
            CHECK(strstr(err.text, spk_type_name(f->type)) != NULL, "%s", err.text);
        }
        if (most >= UINT64_MAX / weights) continue;     /* cannot overflow */
        CHECK_OK(spk_type_bytes(f->type, most * weights, &bytes, &err), err);
        CHECK(spk_type_bytes(f->type, (most + 1) * weights, &bytes, &err) == SPK_E_LIMIT, "more than 64 bits");
        CHECK(bytes == most * (uint64_t)f->bytes, "untouched on failure");
    }
}

int main(void) {
    RUN(against_formulas);
    RUN(against_ggml);
    RUN(every_half);
    RUN(by_hand);
    RUN(nonfinite_scales);
    RUN(type_bytes);
    return CHECK_EXIT();
}
