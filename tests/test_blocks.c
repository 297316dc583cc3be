/* tests/test_blocks.c - the type table, scalar conversions and packed scales of formats/blocks.h. */
#include "formats/blocks.h"

#include <math.h>
#include <pthread.h>

#include "tests/check.h"

static void type_table(void) {
    static const struct { uint32_t type, weights, bytes; const char *name; } expected[] = {
        { 0, 1, 4, "F32" },     { 1, 1, 2, "F16" },       { 30, 1, 2, "BF16" },     { 2, 32, 18, "Q4_0" },
        { 3, 32, 20, "Q4_1" },  { 6, 32, 22, "Q5_0" },    { 7, 32, 24, "Q5_1" },    { 8, 32, 34, "Q8_0" },
        { 10, 256, 84, "Q2_K" }, { 11, 256, 110, "Q3_K" }, { 12, 256, 144, "Q4_K" }, { 13, 256, 176, "Q5_K" },
        { 14, 256, 210, "Q6_K" }, { 20, 32, 18, "IQ4_NL" }, { 23, 256, 136, "IQ4_XS" },
    };
    enum { EXPECTED_COUNT = sizeof expected / sizeof *expected };
    for (int i = 0; i < EXPECTED_COUNT; i++) {
        const spk_type_info *info = spk_type_find(expected[i].type);
        CHECK(info != NULL, "%s", expected[i].name);
        if (info == NULL) continue;
        CHECK(info->type == expected[i].type && info->block_weights == expected[i].weights &&
              info->block_bytes == expected[i].bytes, "%s: %u weights in %u bytes", expected[i].name,
              info->block_weights, info->block_bytes);
        CHECK(info->is_quantized == (expected[i].weights > 1), "%s", expected[i].name);
        CHECK(strcmp(info->name, expected[i].name) == 0, "%s", info->name);
        CHECK(spk_type_find_name(expected[i].name) == info, "%s", expected[i].name);
        CHECK(strcmp(spk_type_name(expected[i].type), expected[i].name) == 0, "%s", expected[i].name);
    }
    int readable_count = 0;
    for (uint32_t type = 0; type < 1000; type++) readable_count += spk_type_find(type) != NULL;
    CHECK(readable_count == EXPECTED_COUNT, "%d readable types", readable_count);
    CHECK(spk_type_find(UINT32_MAX) == NULL, "the largest id");
    CHECK(spk_type_find_name("q4_K") == NULL && spk_type_find_name("") == NULL && spk_type_find_name("Q8_1") == NULL,
          "names are exact, and only of readable types");
}

static void names_of_other_types(void) {
    CHECK(strcmp(spk_type_name(9), "Q8_1") == 0 && strcmp(spk_type_name(17), "IQ2_XS") == 0, "known, not readable");
    CHECK(strcmp(spk_type_name(39), "MXFP4") == 0 && strcmp(spk_type_name(40), "NVFP4") == 0, "known, not readable");
    CHECK(strncmp(spk_type_name(31), "Q4_0_4_4", 8) == 0, "%s", spk_type_name(31));
    CHECK(strcmp(spk_type_name(63), "type 63") == 0, "%s", spk_type_name(63));
    CHECK(strcmp(spk_type_name(UINT32_MAX), "type 4294967295") == 0, "%s", spk_type_name(UINT32_MAX));
    const char *a = spk_type_name(1000), *b = spk_type_name(1001);
    CHECK(strcmp(a, "type 1000") == 0 && strcmp(b, "type 1001") == 0, "two in one message: %s, %s", a, b);
}

static void *other_thread(void *argument) {
    (void)argument;
    for (uint32_t type = 5000; type < 5010; type++) (void)spk_type_name(type);
    return NULL;
}

static void names_belong_to_the_thread(void) {
    const char *mine = spk_type_name(4000);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, other_thread, NULL) == 0, "a thread");
    (void)pthread_join(thread, NULL);
    CHECK(strcmp(mine, "type 4000") == 0, "%s", mine);
}

static void half_to_single(void) {
    for (uint32_t h = 0; h < 65536; h++) {
        const int exponent = (int)(h >> 10 & 31), mantissa = (int)(h & 1023);
        const float got = spk_f16_to_f32((uint16_t)h);
        CHECK((signbit(got) != 0) == (h >> 15 != 0), "sign of %04x", h);
        if (exponent == 31) {
            uint32_t bits;
            memcpy(&bits, &got, sizeof bits);
            CHECK((bits & 0x7fffffff) == (0x7f800000 | (uint32_t)mantissa << 13), "%04x: %08x", h, bits);
        } else {
            double expected = exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
            CHECK((double)fabsf(got) == expected, "%04x: %a, not %a", h, (double)fabsf(got), expected);
        }
        const uint16_t back = spk_f32_to_f16(got);
        if (exponent == 31 && mantissa != 0)
            CHECK((back & 0x7c00) == 0x7c00 && (back & 1023) != 0, "NaN %04x became %04x", h, back);
        else
            CHECK(back == h, "%04x came back as %04x", h, back);
    }
}

/* Nearest multiple of the half's spacing at this magnitude; rint rounds ties to even. */
static double rounded_to_half(double x) {
    int exponent;
    (void)frexp(x, &exponent);
    const int spacing = exponent - 11 > -24 ? exponent - 11 : -24;
    return ldexp(rint(ldexp(x, -spacing)), spacing);
}

static void single_to_half(void) {
    uint64_t state = 1;
    for (int i = 0; i < 200000; i++) {
        const uint64_t random = check_random(&state);
        float x = ldexpf(1.0f + (float)(random >> 41) * 0x1p-23f, (int)(random % 42) - 26);
        if (i % 4 == 0) {                        /* exactly between two halves: the even one wins */
            const uint16_t h = (uint16_t)(random >> 16) & 0x7bfe;
            x = 0.5f * (spk_f16_to_f32(h) + spk_f16_to_f32((uint16_t)(h + 1)));
        }
        const double expected = rounded_to_half((double)x);
        const float got = spk_f16_to_f32(spk_f32_to_f16(x)), negative = spk_f16_to_f32(spk_f32_to_f16(-x));
        if (expected > 65504)
            CHECK(isinf(got) && isinf(negative), "%a: %a", (double)x, (double)got);
        else
            CHECK((double)got == expected && negative == -got, "%a: %a, not %a", (double)x, (double)got, expected);
    }
    CHECK(spk_f32_to_f16(65519.996f) == 0x7bff && spk_f32_to_f16(65520.0f) == 0x7c00, "the largest half");
    CHECK(spk_f32_to_f16(-0.0f) == 0x8000 && spk_f32_to_f16(0x1p-149f) == 0, "zeros");
    CHECK(spk_f32_to_f16(0x1p-25f) == 0 && spk_f32_to_f16(0x1.8p-25f) == 1, "around the smallest subnormal");
}

static void bfloat_to_single(void) {
    CHECK(spk_bf16_to_f32(0x3f80) == 1.0f && spk_bf16_to_f32(0xc049) == -3.140625f, "bf16");
    CHECK(isinf(spk_bf16_to_f32(0x7f80)) && isnan(spk_bf16_to_f32(0x7fc0)) && spk_bf16_to_f32(1) == 0x1p-133f,
          "bf16 extremes");
}

/* Bits [first, first + count) of a byte string, lowest bit of byte 0 first. */
static unsigned bits_of(const uint8_t *bytes, int first, int count) {
    unsigned value = 0;
    for (int i = 0; i < count; i++) value |= (unsigned)(bytes[(first + i) / 8] >> ((first + i) % 8) & 1) << i;
    return value;
}

static void packed_scales(void) {
    uint64_t state = 2;
    for (int round = 0; round < 1000; round++) {
        uint8_t packed[12];
        for (int i = 0; i < 12; i++) packed[i] = (uint8_t)check_random(&state);
        for (int j = 0; j < 8; j++) {
            const int k = j % 4;                 /* the upper four have their top two bits above the lower four */
            const unsigned scale = j < 4 ? bits_of(packed, 8 * k, 6)
                                         : bits_of(packed, 64 + 8 * k, 4) + 16 * bits_of(packed, 8 * k + 6, 2);
            const unsigned min = j < 4 ? bits_of(packed, 32 + 8 * k, 6)
                                       : bits_of(packed, 68 + 8 * k, 4) + 16 * bits_of(packed, 38 + 8 * k, 2);
            uint8_t got_scale, got_min;
            spk_k4_scale_min(packed, j, &got_scale, &got_min);
            CHECK(got_scale == scale && got_min == min, "sub-block %d: %d %d, not %u %u", j, got_scale, got_min, scale,
                  min);
        }
    }
}

int main(void) {
    RUN(type_table);
    RUN(names_of_other_types);
    RUN(names_belong_to_the_thread);
    RUN(half_to_single);
    RUN(single_to_half);
    RUN(bfloat_to_single);
    RUN(packed_scales);
    return CHECK_EXIT();
}
