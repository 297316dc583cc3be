/* tests/malformed_rows.h - broken and unusual GGUF files, a line each: id, the public report of such a file where there is
 * one, what is done with it, how it is built, and the status and texts of the message that it must give.
 *
 * What a tool of another project did with such a file is not said here; the reports are in their trackers.  Two kinds have
 * tests of their own: a wrong block header (mlx#3664) in test_dequant.c, parts of split models in test_malformed.c.
 */
#ifndef SPK_TEST_MALFORMED_ROWS_H
#define SPK_TEST_MALFORMED_ROWS_H

#include <math.h>
#include <string.h>
#include "formats/blocks.h"
#include "formats/gguf.h"
#include "formats/status.h"
#include "tests/gguf_build.h"

static gguf_build malformed_model;      /* a whole small model (tests/model_build.h), filled in by the test, */
static size_t malformed_model_data;     /* and where its data begin */

/* The file that most rows change: one metadata entry (44 bytes), tensor "t" (dimension count at 77), data. */
enum { VERSION_AT = 4, TENSOR_COUNT_AT = 8, KV_COUNT_AT = 16, KV_AT = GB_HEADER_BYTES, INFO_AT = KV_AT + 44 };

static inline void start(gguf_build *b, uint64_t tensor_count) {
    gb_header(b, 3, tensor_count, 1);
    gb_kv_string(b, "general.architecture", "test");
}

static inline void one(gguf_build *b, uint32_t type, uint64_t offset, const uint64_t *dims, uint32_t dim_count, size_t data) {
    start(b, 1);
    gb_tensor(b, "t", type, offset, dims, dim_count);
    gb_pad(b, 32);
    gb_fill(b, 0, data);
}

/* What spk-calibrate writes of a matrix "a" with three columns: scales of 2, but the first, and correlations 1-0, 2-0, 2-1. */
static inline void stats(gguf_build *b, float scale, float first, float second, float third) {
    float    values[] = { 9, scale, 2, 2 };
    uint16_t correlations[] = { spk_f32_to_f16(first), spk_f32_to_f16(second), spk_f32_to_f16(third) };
    start(b, 3);
    gb_tensor(b, "a.counts", SPK_TYPE_F32, 0, GB_DIMS(1, 1));
    gb_tensor(b, "a.in_scale", SPK_TYPE_F32, 32, GB_DIMS(3, 1));
    gb_tensor(b, "a.in_moment", SPK_TYPE_F16, 64, GB_DIMS(3, 1));
    gb_pad(b, 32);
    gb_raw(b, values, sizeof *values);
    gb_pad(b, 32);
    gb_raw(b, values + 1, 3 * sizeof *values);
    gb_pad(b, 32);
    gb_raw(b, correlations, sizeof correlations);
}

static inline void good(gguf_build *b) { one(b, SPK_TYPE_F32, 0, GB_DIMS(8, 2), 64); }

/* Two F32 tensors of 64 bytes each. */
static inline void two(gguf_build *b, const char *first, const char *second, uint64_t second_offset) {
    start(b, 2);
    gb_tensor(b, first, SPK_TYPE_F32, 0, GB_DIMS(16));
    gb_tensor(b, second, SPK_TYPE_F32, second_offset, GB_DIMS(16));
    gb_pad(b, 32);
    gb_fill(b, 0, 128);
}

static inline void named(gguf_build *b, const char *bytes, size_t size) {
    start(b, 1);
    gb_text(b, bytes, size);
    gb_tensor_rest(b, SPK_TYPE_F32, 0, GB_DIMS(8));
    gb_pad(b, 32);
    gb_fill(b, 0, 32);
}

/* No tensors, one entry; the caller adds its value. */
static inline void entry(gguf_build *b, const char *key, uint32_t type) {
    gb_header(b, 3, 0, 1);
    gb_key(b, key, type);
}

static inline void aligned(gguf_build *b, uint32_t type, const void *value, size_t size) {
    gb_header(b, 3, 1, 1);
    gb_kv(b, "general.alignment", type, value, size);
    gb_tensor(b, "t", SPK_TYPE_F32, 0, GB_DIMS(8));
    gb_pad(b, 64);
    gb_fill(b, 0, 64);
}

static inline void aligned_u32(gguf_build *b, uint32_t value) { aligned(b, SPK_KV_U32, &value, sizeof value); }
static inline void aligned_i32(gguf_build *b, int32_t value) { aligned(b, SPK_KV_I32, &value, sizeof value); }

/* Three tensors of 16 bytes, one after another. */
static inline void gb_three(gguf_build *b) {
    for (int i = 0; i < 3; i++) gb_tensor(b, &"a\0b\0c"[2 * i], SPK_TYPE_F32, 16 * (uint64_t)i, GB_DIMS(4));
}

static inline void model(gguf_build *b) { gb_raw(b, malformed_model.bytes, malformed_model.size); }

static inline void set_u32(gguf_build *b, const char *key, uint32_t value) {
    uint8_t *at = memmem(b->bytes, b->size, key, strlen(key));
    if (at == NULL) abort();
    memcpy(at + strlen(key) + 4, &value, sizeof value);
}

/* The scale of a Q8_0 block of a matrix. */
static inline void set_half(gguf_build *b, const char *name, size_t block, uint16_t value) {
    const uint8_t *info = memmem(b->bytes, b->size, name, strlen(name));
    if (info == NULL) abort();
    uint64_t offset;
    memcpy(&offset, info + strlen(name) + 4 + 2 * 8 + 4, sizeof offset);
    memcpy(b->bytes + malformed_model_data + offset + block * 34, &value, sizeof value);
}

#define MALFORMED_ROWS(ROW) \
    ROW(type_beyond_enum, "CVE-2024-21802", OPEN, (one(b, 0x7fffffff, 0, GB_DIMS(8), 32)), \
        (SPK_E_UNSUPPORTED, "'t'", "type id 2147483647", "Q4_K")) \
    ROW(type_minus_one, "llama.cpp#11975", OPEN, (one(b, UINT32_MAX, 0, GB_DIMS(8), 32)), \
        (SPK_E_UNSUPPORTED, "'t'", "type id 4294967295")) \
    ROW(type_200, "llama.cpp#11975", OPEN, (one(b, 200, 0, GB_DIMS(8), 32)), (SPK_E_UNSUPPORTED, "'t'", "type id 200")) \
    ROW(type_mxfp4, "llama.cpp#11975", OPEN, (one(b, 39, 0, GB_DIMS(32), 32)), \
        (SPK_E_UNSUPPORTED, "'t'", "type id 39", "MXFP4")) \
    ROW(type_removed, "llama.cpp#11975", OPEN, (one(b, 31, 0, GB_DIMS(32), 32)), \
        (SPK_E_UNSUPPORTED, "'t'", "type id 31", "Q4_0_4_4")) \
    ROW(type_iq2_xs, "", OPEN, (one(b, 17, 0, GB_DIMS(256), 96)), \
        (SPK_E_UNSUPPORTED, "'t'", "IQ2_XS", "expected one of F32 F16")) \
    ROW(tensor_count_wraps, "CVE-2024-21825", OPEN, (good(b); gb_u64_at(b, TENSOR_COUNT_AT, UINT64_MAX / 24 + 2)), \
        (SPK_E_LIMIT, "768614336404564652 tensors", "at most 65536")) \
    ROW(tensor_count_signed, "llama.cpp#15711", OPEN, (good(b); gb_u64_at(b, TENSOR_COUNT_AT, UINT64_MAX / 400 + 1)), \
        (SPK_E_LIMIT, "46116860184273880 tensors", "at most 65536")) \
    ROW(tensor_count_large, "", OPEN, (good(b); gb_u64_at(b, TENSOR_COUNT_AT, 60000)), \
        (SPK_E_CORRUPT, "60000 tensors", "only 124 are left")) \
    ROW(tensor_count_more, "llama.cpp#8761", OPEN, (good(b); gb_u64_at(b, TENSOR_COUNT_AT, 2)), \
        (SPK_E_CORRUPT, "tensor 2 of 2", "empty name", "tensor count")) \
    ROW(tensor_count_less, "llama.cpp#27349", OPEN, (two(b, "a", "b", 64); gb_u64_at(b, TENSOR_COUNT_AT, 1)), \
        (SPK_E_CORRUPT, "extra bytes after the last tensor")) \
    ROW(kv_count_wraps, "CVE-2024-21836", OPEN, (good(b); gb_u64_at(b, KV_COUNT_AT, UINT64_MAX / 13 + 2)), \
        (SPK_E_LIMIT, "1418980313362273203 metadata entries", "at most 65536")) \
    ROW(kv_count_large, "", OPEN, (good(b); gb_u64_at(b, KV_COUNT_AT, 60000)), \
        (SPK_E_CORRUPT, "60000 metadata entries", "only 168 are left")) \
    ROW(array_wraps, "CVE-2024-23605", OPEN, \
        (gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_U32, UINT64_MAX / 4 + 2); gb_u32(b, 1)), \
        (SPK_E_LIMIT, "'k'", "4611686018427387905 elements", "at most 268435456")) \
    ROW(array_bomb, "CVE-2024-23605", OPEN, (gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_U64, 1 << 28); gb_u64(b, 1)), \
        (SPK_E_CORRUPT, "'k'", "268435456 elements of 8 bytes", "only 8 bytes are left")) \
    ROW(array_string_bomb, "ollama#16175", OPEN, \
        (gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_STRING, 1 << 28); gb_string(b, "x")), \
        (SPK_E_CORRUPT, "'k'", "268435456 elements", "only 9 bytes are left")) \
    ROW(string_max, "CVE-2024-23496", OPEN, (entry(b, "k", SPK_KV_STRING); gb_u64(b, UINT64_MAX); gb_u64(b, 0)), \
        (SPK_E_CORRUPT, "'k'", "length 18446744073709551615", "only 8 bytes are left")) \
    ROW(string_in_array_max, "CVE-2024-23496", OPEN, \
        (gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_STRING, 1); gb_u64(b, UINT64_MAX)), \
        (SPK_E_CORRUPT, "'k'", "length 18446744073709551615", "only 0 bytes are left")) \
    ROW(key_bomb, "ollama#17032", OPEN, (gb_header(b, 3, 0, 1); gb_u64(b, (UINT64_C(1) << 48) - 1); gb_u32(b, 0)), \
        (SPK_E_CORRUPT, "metadata entries", "only 12 are left")) \
    ROW(key_bomb_filled, "ollama#17042", OPEN, (gb_header(b, 3, 0, 1); gb_u64(b, INT64_MAX); gb_fill(b, 'k', 64)), \
        (SPK_E_CORRUPT, "metadata entry 1 of 1", "9223372036854775807", "only 64 bytes are left")) \
    ROW(key_too_long, "", OPEN, \
        (gb_header(b, 3, 0, 1); gb_u64(b, 65536); gb_fill(b, 'k', 65536); gb_u32(b, 0); gb_u8(b, 0)), \
        (SPK_E_LIMIT, "metadata entry 1 of 1", "65536 bytes", "at most 65535")) \
    ROW(name_bomb, "ollama#16136", OPEN, (start(b, 1); gb_u64(b, (UINT64_C(1) << 63) + 1); gb_fill(b, 'n', 64)), \
        (SPK_E_LIMIT, "tensor 1 of 1", "9223372036854775809 bytes", "at most 63")) \
    ROW(sizes_wrap, "CVE-2025-53630", OPEN, \
        (start(b, 4); for (int i = 0; i < 4; i++) gb_tensor(b, &"a\0b\0c\0d"[2 * i], SPK_TYPE_F32, (uint64_t)i << 62, GB_DIMS(1ull << 60)); gb_pad(b, 32)), \
        (SPK_E_CORRUPT, "'a'", "4611686018427387904 bytes", "the file has only")) \
    ROW(size_near_max, "CVE-2026-27940", OPEN, (one(b, SPK_TYPE_F32, 0, GB_DIMS((UINT64_C(1) << 62) - 8), 32)), \
        (SPK_E_CORRUPT, "'t'", "18446744073709551584 bytes", "the file has only 160 bytes")) \
    ROW(size_past_64_bits, "CVE-2026-27940", OPEN, (one(b, SPK_TYPE_F32, 0, GB_DIMS(UINT64_C(1) << 62), 32)), \
        (SPK_E_CORRUPT, "'t'", "[4611686018427387904]", "past 2^64")) \
    ROW(offset_near_max, "CVE-2026-27940", OPEN, (one(b, SPK_TYPE_F32, UINT64_MAX - 31, GB_DIMS(8), 32)), \
        (SPK_E_CORRUPT, "'t'", "offset 18446744073709551584", "the file has only 160 bytes")) \
    ROW(size_one_mb, "CVE-2026-7482", OPEN, (one(b, SPK_TYPE_F32, 0, GB_DIMS(512, 512), 32)), \
        (SPK_E_CORRUPT, "'t'", "1048576 bytes", "the file has only 160 bytes")) \
    ROW(size_past_32_bits, "CVE-2026-53923", OPEN, (one(b, SPK_TYPE_Q4_K, 0, GB_DIMS(256, (1 << 24) + 1), 288)), \
        (SPK_E_CORRUPT, "'t'", "2415919248 bytes", "the file has only")) \
    ROW(dim_2_42, "llama.cpp#18674", OPEN, (one(b, SPK_TYPE_F32, 0, GB_DIMS(1 << 22, (UINT64_C(1) << 42) + 1), 32)), \
        (SPK_E_CORRUPT, "'t'", "[4194304, 4398046511105]", "past 2^64")) \
    ROW(dim_minus_one, "zackshen/gguf#15", OPEN, (one(b, SPK_TYPE_F32, 0, GB_DIMS(UINT64_MAX, 2), 32)), \
        (SPK_E_CORRUPT, "'t'", "[18446744073709551615, 2]", "past 2^64")) \
    ROW(dim_zero, "llama.cpp#24263", OPEN, (one(b, SPK_TYPE_F32, 0, GB_DIMS(8, 0), 32)), \
        (SPK_E_CORRUPT, "'t'", "[8, 0]", "at least 1")) \
    ROW(dim_count_zero, "", OPEN, (good(b); gb_u32_at(b, INFO_AT + 9, 0)), \
        (SPK_E_CORRUPT, "'t'", "0 dimensions", "expected 1..4")) \
    ROW(dim_count_five, "sparkinfer#11", OPEN, (one(b, SPK_TYPE_F32, 0, GB_DIMS(8, 1, 1, 1, 1), 32)), \
        (SPK_E_CORRUPT, "'t'", "5 dimensions", "expected 1..4")) \
    ROW(dim_count_huge, "ollama#14489", OPEN, (good(b); gb_u32_at(b, INFO_AT + 9, UINT32_MAX)), \
        (SPK_E_CORRUPT, "'t'", "4294967295 dimensions", "expected 1..4")) \
    ROW(row_q4_k, "llama.cpp#1921", OPEN, (one(b, SPK_TYPE_Q4_K, 0, GB_DIMS(128, 2), 144)), \
        (SPK_E_SHAPE, "'t'", "rows of 128 weights", "Q4_K needs a multiple of 256")) \
    ROW(row_q8_0, "llama.cpp#28474", OPEN, (one(b, SPK_TYPE_Q8_0, 0, GB_DIMS(40, 4), 170)), \
        (SPK_E_SHAPE, "'t'", "rows of 40 weights", "Q8_0 needs a multiple of 32")) \
    ROW(empty_key, "llama.cpp#24263", OPEN, (gb_header(b, 3, 0, 1); gb_key(b, "", SPK_KV_U8); gb_u8(b, 1)), \
        (SPK_E_CORRUPT, "metadata entry 1 of 1", "empty key")) \
    ROW(duplicate_key, "llama.cpp#19856", OPEN, \
        (gb_header(b, 3, 0, 2); gb_kv_u32(b, "general.x", 1); gb_kv_u32(b, "general.x", 2)), \
        (SPK_E_CORRUPT, "metadata entry 2 of 2", "'general.x'", "duplicate key")) \
    ROW(value_type_13, "", OPEN, (entry(b, "k", 13); gb_u64(b, 0)), \
        (SPK_E_CORRUPT, "'k'", "unknown value type 13", "expected 0..12")) \
    ROW(array_type_13, "sparkinfer#6", OPEN, (gb_header(b, 3, 0, 1); gb_array(b, "k", 13, 2); gb_fill(b, 0, 64)), \
        (SPK_E_CORRUPT, "'k'", "unknown element type 13", "expected 0..12")) \
    ROW(array_nested, "", OPEN, (gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_ARRAY, 1); gb_fill(b, 0, 64)), \
        (SPK_E_CORRUPT, "'k'", "array of arrays")) \
    ROW(bool_two, "", OPEN, (entry(b, "k", SPK_KV_BOOL); gb_u8(b, 2)), \
        (SPK_E_CORRUPT, "'k'", "boolean with value 2", "expected 0 or 1")) \
    ROW(bool_array_two, "", OPEN, (gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_BOOL, 3); gb_raw(b, "\0\1\2", 3)), \
        (SPK_E_CORRUPT, "'k'", "boolean with value 2", "expected 0 or 1")) \
    ROW(alignment_2_31, "llama.cpp#24997", OPEN, (aligned_u32(b, 0x80000000u)), \
        (SPK_E_LIMIT, "general.alignment is 2147483648", "at most 1048576")) \
    ROW(alignment_2_30, "llama.cpp#24997", OPEN, (aligned_u32(b, 0x40000000u)), \
        (SPK_E_LIMIT, "general.alignment is 1073741824", "at most 1048576")) \
    ROW(alignment_zero, "sparkinfer#24", OPEN, (aligned_u32(b, 0)), \
        (SPK_E_CORRUPT, "general.alignment is 0", "a power of two")) \
    ROW(alignment_24, "hrx-system#278", OPEN, (aligned_u32(b, 24)), \
        (SPK_E_CORRUPT, "general.alignment is 24", "a power of two")) \
    ROW(alignment_negative, "sparkinfer#24", OPEN, (aligned_i32(b, -32)), \
        (SPK_E_CORRUPT, "general.alignment is -32", "a power of two")) \
    ROW(alignment_i32, "llama.cpp#26318", OPEN, (aligned_i32(b, 64)), (SPK_OK, NULL)) \
    ROW(alignment_float, "", OPEN, (aligned(b, SPK_KV_F32, &(float){ 32 }, 4)), \
        (SPK_E_CORRUPT, "general.alignment", "type 6", "an integer")) \
    ROW(alignment_string, "", OPEN, (gb_header(b, 3, 0, 1); gb_kv_string(b, "general.alignment", "32")), \
        (SPK_E_CORRUPT, "general.alignment", "type 8", "an integer")) \
    ROW(alignment_array, "", OPEN, \
        (gb_header(b, 3, 0, 1); gb_array(b, "general.alignment", SPK_KV_U32, 1); gb_u32(b, 32)), \
        (SPK_E_CORRUPT, "general.alignment", "type 9", "an integer")) \
    ROW(cut_after_infos, "hrx-system#278", OPEN, (start(b, 1); gb_tensor(b, "t", SPK_TYPE_F32, 0, GB_DIMS(8))), \
        (SPK_E_CORRUPT, "'t'", "32 bytes", "the file has only 101 bytes")) \
    ROW(extra_bytes, "ollama#8456", OPEN, (good(b); gb_fill(b, 0, 64)), \
        (SPK_E_CORRUPT, "64 extra bytes", "file has 256 bytes", "expected 192")) \
    ROW(extra_no_tensors, "", OPEN, (gb_header(b, 3, 0, 0); gb_fill(b, 0, 64)), \
        (SPK_E_CORRUPT, "56 extra bytes", "file has 88 bytes", "expected 32")) \
    ROW(joined, "llama.cpp#9613", OPEN, (good(b); good(b)), \
        (SPK_E_CORRUPT, "192 extra bytes", "another GGUF begins there")) \
    ROW(offset_end_less_one, "sparkinfer#27", OPEN, (one(b, SPK_TYPE_F32, 63, GB_DIMS(8), 64)), \
        (SPK_E_CORRUPT, "'t'", "offset 63", "multiple of the alignment 32")) \
    ROW(offset_unaligned, "", OPEN, (one(b, SPK_TYPE_F32, 16, GB_DIMS(8), 64)), \
        (SPK_E_CORRUPT, "'t'", "offset 16", "multiple of the alignment 32")) \
    ROW(offset_past_end, "", OPEN, (one(b, SPK_TYPE_F32, 64, GB_DIMS(8), 64)), \
        (SPK_E_CORRUPT, "'t'", "offset 64", "the file has only 192 bytes")) \
    ROW(offset_end, "", OPEN, (one(b, SPK_TYPE_F32, 32, GB_DIMS(16), 64)), \
        (SPK_E_CORRUPT, "'t'", "offset 32", "the file has only 192 bytes")) \
    ROW(cut_in_data, "llama.cpp#6885", OPEN, (good(b); b->size -= 1), \
        (SPK_E_CORRUPT, "'t'", "64 bytes", "the file has only 191 bytes")) \
    ROW(second_too_early, "ik_llama.cpp#2437", OPEN, (two(b, "a", "b", 32)), \
        (SPK_E_CORRUPT, "'b' at data offset 32", "overlaps 'a'", "expected offset 64")) \
    ROW(same_offset, "", OPEN, (two(b, "a", "b", 0)), \
        (SPK_E_CORRUPT, "'b' at data offset 0", "overlaps 'a'", "expected offset 64")) \
    ROW(first_offset_4096, "ik_llama.cpp#432", OPEN, (one(b, SPK_TYPE_F32, 4096, GB_DIMS(8), 4096 + 32)), \
        (SPK_E_CORRUPT, "'t' at data offset 4096", "expected 0", "a gap of 4096 bytes")) \
    ROW(second_gap, "ik_llama.cpp#432", OPEN, (two(b, "a", "b", 64 + 4096); gb_fill(b, 0, 4096)), \
        (SPK_E_CORRUPT, "'b' at data offset 4160", "expected 64", "a gap of 4096 bytes after 'a'")) \
    ROW(data_at_odd_offset, "", OPEN, (start(b, 1); gb_tensor(b, "t", SPK_TYPE_F32, 0, GB_DIMS(8)); gb_fill(b, 0, 32)), \
        (SPK_E_CORRUPT, "'t'", "file offset 128", "the file has only 133 bytes")) \
    ROW(duplicate_tensor, "llama.cpp#6836", OPEN, (two(b, "same", "same", 64)), \
        (SPK_E_CORRUPT, "duplicate tensor name 'same'", "the same file")) \
    ROW(name_empty, "", OPEN, (named(b, "", 0)), (SPK_E_CORRUPT, "tensor 1 of 1", "empty name")) \
    ROW(name_64_bytes, "", OPEN, (named(b, "0123456789012345678901234567890123456789012345678901234567890123", 64)), \
        (SPK_E_LIMIT, "tensor 1 of 1", "64 bytes", "at most 63")) \
    ROW(name_63_bytes, "", OPEN, (named(b, "012345678901234567890123456789012345678901234567890123456789012", 63)), \
        (SPK_OK, NULL)) \
    ROW(name_slash, "", OPEN, (named(b, "../../etc/x", 11)), (SPK_OK, NULL)) \
    ROW(name_nul, "", OPEN, (named(b, "a\0b", 3)), \
        (SPK_E_CORRUPT, "tensor 1 of 1", "control character", "0x00 at byte 1")) \
    ROW(name_newline, "", OPEN, (named(b, "a\nb", 3)), (SPK_E_CORRUPT, "'a\\u{a}b'", "control character", "0x0a at byte 1")) \
    ROW(name_delete, "", OPEN, (named(b, "a\x7f", 2)), (SPK_E_CORRUPT, "control character", "0x7f at byte 1")) \
    ROW(big_endian, "llama.cpp#12863", OPEN, \
        (gb_header(b, 0x03000000, UINT64_C(1) << 56, UINT64_C(1) << 56); gb_fill(b, 0, 64)), \
        (SPK_E_VERSION, "big-endian", "version 3", "expected little-endian")) \
    ROW(version_0, "", OPEN, (good(b); gb_u32_at(b, VERSION_AT, 0)), (SPK_E_VERSION, "version 0", "expected 2 or 3")) \
    ROW(version_1, "", OPEN, (good(b); gb_u32_at(b, VERSION_AT, 1)), \
        (SPK_E_VERSION, "version 1", "expected 2 or 3", "convert")) \
    ROW(version_4, "", OPEN, (good(b); gb_u32_at(b, VERSION_AT, 4)), (SPK_E_VERSION, "version 4", "expected 2 or 3")) \
    ROW(magic_only, "", OPEN, (gb_raw(b, "GGUF", 4)), (SPK_E_CORRUPT, "has 4 bytes", "takes 24", "truncated")) \
    ROW(two_bytes, "", OPEN, (gb_raw(b, "GG", 2)), (SPK_E_CORRUPT, "has 2 bytes", "takes 24", "truncated")) \
    ROW(empty, "", OPEN, (;), (SPK_E_MAGIC, "empty (0 bytes)", "expected a GGUF file")) \
    ROW(html, "miniclaw#495", OPEN, (gb_raw(b, "\n<!DOCTYPE html><html><body>404</body></html>", 44)), \
        (SPK_E_MAGIC, "not GGUF", "HTML")) \
    ROW(lfs_pointer, "", OPEN, (gb_raw(b, "version https://git-lfs.github.com/spec/v1\noid sha256:0", 55)), \
        (SPK_E_MAGIC, "not GGUF", "Git LFS pointer")) \
    ROW(zip, "", OPEN, (gb_raw(b, "PK\x03\x04\x14\0\0\0\0\0\0\0", 12)), (SPK_E_MAGIC, "not GGUF", "zip archive")) \
    ROW(safetensors, "", OPEN, (gb_u64(b, 64); gb_raw(b, "{\"__metadata__\":{}}", 19)), \
        (SPK_E_MAGIC, "not GGUF", "safetensors")) \
    ROW(safetensors_like_text, "", OPEN, (gb_u64(b, 0x7b20); gb_raw(b, "{\"__metadata__\":{}}", 19)), \
        (SPK_E_MAGIC, "not GGUF", "safetensors")) \
    ROW(html_with_mark, "", OPEN, (gb_raw(b, "\xef\xbb\xbf<html><body>404</body></html>", 32)), (SPK_E_MAGIC, "not GGUF", "HTML")) \
    ROW(old_ggml, "", OPEN, (gb_raw(b, "tjgg\x03\0\0\0", 8)), (SPK_E_MAGIC, "not GGUF", "older than GGUF")) \
    ROW(reversed_magic, "", OPEN, (gb_raw(b, "FUGG\0\0\0\x03", 8)), (SPK_E_MAGIC, "not GGUF", "big-endian")) \
    ROW(other_bytes, "", OPEN, (gb_raw(b, "\x01\x02\x03\x04" "56789", 9)), \
        (SPK_E_MAGIC, "begins with bytes 01 02 03 04", "expected 47 47 55 46")) \
    ROW(no_tensors, "", OPEN, (start(b, 0)), (SPK_OK, NULL)) \
    ROW(unknown_keys, "CVE-2025-49847", OPEN, \
        (gb_header(b, 3, 0, 2); gb_array(b, "x", SPK_KV_F64, 1); gb_u64(b, 0); gb_array(b, "tokenizer.ggml.scores", SPK_KV_U8, 2); gb_raw(b, "ab", 2)), \
        (SPK_OK, NULL)) \
    ROW(split_no_alone, "wllama#135", OPEN, (gb_header(b, 3, 0, 1); gb_kv_u16(b, "split.no", 1)), \
        (SPK_E_CORRUPT, "split.no is 1", "less than split.count (1)")) \
    ROW(split_name, "", OPEN, (gb_header(b, 3, 0, 3); gb_kv_split(b, 0, 3, 0)), \
        (SPK_E_MISMATCH, "part 1 of 3", "does not end in -00001-of-00003.gguf")) \
    ROW(split_count_huge, "", OPEN, (gb_header(b, 3, 0, 3); gb_kv_split(b, 0, 65535, 0)), \
        (SPK_E_LIMIT, "split.count is 65535", "at most 1024")) \
    ROW(split_count_type, "", OPEN, (gb_header(b, 3, 0, 1); gb_kv_string(b, "split.count", "3")), \
        (SPK_E_CORRUPT, "split.count", "integer")) \
    ROW(split_no_negative, "", OPEN, (gb_header(b, 3, 0, 1); gb_kv(b, "split.no", SPK_KV_I8, "\xff", 1)), \
        (SPK_E_CORRUPT, "split.no", "integer")) \
    ROW(split_no_array, "", OPEN, (gb_header(b, 3, 0, 1); gb_array(b, "split.no", SPK_KV_U16, 1); gb_raw(b, "\0", 2)), \
        (SPK_E_CORRUPT, "split.no", "integer")) \
    ROW(split_count_array, "", OPEN, \
        (gb_header(b, 3, 0, 1); gb_array(b, "split.count", SPK_KV_U16, 1); gb_raw(b, "\1", 2)), \
        (SPK_E_CORRUPT, "split.count", "integer")) \
    ROW(split_count_zero, "", OPEN, (gb_header(b, 3, 0, 3); gb_kv_split(b, 0, 0, 99)), (SPK_OK, NULL)) \
    ROW(alignment_16, "ollama#18130", OPEN, \
        (gb_header(b, 3, 3, 1); gb_kv_u32(b, "general.alignment", 16); gb_three(b); gb_pad(b, 16); gb_fill(b, 0, 48)), \
        (SPK_OK, NULL)) \
    ROW(alignment_16_as_32, "ollama#18130", OPEN, (gb_header(b, 3, 3, 0); gb_three(b); gb_pad(b, 32); gb_fill(b, 0, 48)), \
        (SPK_E_CORRUPT, "'b'", "offset 16", "multiple of the alignment 32")) \
    ROW(other_arrays, "CVE-2025-49847", OPEN, \
        (gb_header(b, 3, 0, 3); gb_array(b, "i8", SPK_KV_I8, 3); gb_raw(b, "\xff\0\1", 3); gb_array(b, "bool", SPK_KV_BOOL, 2); gb_raw(b, "\0\1", 2); gb_array(b, "f64", SPK_KV_F64, 0)), \
        (SPK_OK, NULL)) \
    ROW(array_cut_by_one, "CVE-2025-49847", OPEN, \
        (gb_header(b, 3, 0, 1); gb_array(b, "tokenizer.ggml.scores", SPK_KV_F32, 2); gb_raw(b, "1234567", 7)), \
        (SPK_E_CORRUPT, "'tokenizer.ggml.scores'", "2 elements of 4 bytes", "only 7 bytes are left")) \
    ROW(zero_block_count, "CVE-2024-39720", PACK, (model(b); set_u32(b, "qwen35.block_count", 0)), \
        (SPK_E_CORRUPT, "block_count is 0", "at least one layer")) \
    ROW(zero_head_count, "CVE-2024-8063", PACK, (model(b); set_u32(b, "qwen35.attention.head_count", 0)), \
        (SPK_E_CORRUPT, "attention.head_count is 0")) \
    ROW(block_count_more, "llama.cpp#8761", PACK, (model(b); set_u32(b, "qwen35.block_count", 3)), \
        (SPK_E_MISSING, "'blk.2.", "is missing")) \
    ROW(block_count_less, "llama.cpp#27349", PACK, (model(b); set_u32(b, "qwen35.block_count", 1)), \
        (SPK_E_MISMATCH, "'blk.1.", "no place")) \
    ROW(scale_infinite, "llama.cpp#6884", PACK, (model(b); set_half(b, "blk.0.ffn_down.weight", 5, 0x7c00)), \
        (SPK_E_NONFINITE, "'blk.0.ffn_down.weight'", "row 0, block 5", "infinite scale")) \
    ROW(scale_nan, "llama.cpp#7311", PACK, (model(b); set_half(b, "blk.1.ffn_down.weight", 8 * 255 + 7, 0x7e00)), \
        (SPK_E_NONFINITE, "'blk.1.ffn_down.weight'", "row 255, block 7", "NaN")) \
    ROW(scale_nan_copied, "llama.cpp#8661", PACK, (model(b); set_half(b, "blk.1.ffn_up.weight", 1, 0x7e00)), \
        (SPK_OK, NULL)) \
    ROW(model_as_it_is, "", PACK, (model(b)), (SPK_OK, NULL)) \
    ROW(moments_of_inputs, "", STATS, (stats(b, 2, 0.5f, -0.25f, 0.5f)), (SPK_OK, NULL)) \
    ROW(moments_of_nothing, "", STATS, (stats(b, 2, 1, 1, -1)), (SPK_E_CORRUPT, "'a.in_moment'", "row 2: no inputs have such")) \
    ROW(moments_two_opposed, "", STATS, (stats(b, 2, -0.75f, -0.75f, -0.75f)), (SPK_E_CORRUPT, "'a.in_moment'", "row 2: ")) \
    ROW(moment_scale_negative, "", STATS, (stats(b, -2, 0, 0, 0)), (SPK_E_CORRUPT, "'a.in_moment'", "a scale is negative")) \
    ROW(moment_scale_infinite, "", STATS, (stats(b, (float)INFINITY, 0, 0, 0)), (SPK_E_CORRUPT, "'a.in_moment'", "not finite")) \
    ROW(moment_above_scales, "", STATS, (stats(b, 2, 0, 1.25f, 0)), (SPK_E_CORRUPT, "'a.in_moment'", "not between -1 and 1")) \
    ROW(model_cut, "CVE-2026-7482", PACK, (model(b); b->size -= 4096), (SPK_E_CORRUPT, "the file has only", "truncated"))

/* Open it; also pack it, with ffn_down requantized to Q4_K; open it as a calibration and take the moments of "a". */
typedef enum { OPEN, PACK, STATS } row_stage;

typedef struct {
    const char *id, *report;
    row_stage   stage;
    void (*build)(gguf_build *b);
    spk_status  want;
    const char *texts[3];       /* what the message must hold, beside the file's name */
} row;

#define ROW_BUILDER(id, report, stage, build, want) static void id(gguf_build *b) { (void)b; ROW_BARE build; }
#define ROW_BARE(...) __VA_ARGS__
#define ROW_STATUS(status, ...) status
#define ROW_TEXTS(status, ...) __VA_ARGS__
#define ROW_ENTRY(id, report, stage, build, want) { #id, report, stage, id, ROW_STATUS want, { ROW_TEXTS want } },

MALFORMED_ROWS(ROW_BUILDER)
static const row rows[] = { MALFORMED_ROWS(ROW_ENTRY) };
enum { ROW_COUNT = sizeof rows / sizeof *rows };

#endif
