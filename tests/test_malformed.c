/* tests/test_malformed.c - broken and unusual GGUF files: each gets the right status and a message that names the file
 * and says what was found (and expected), or, where the file is merely unusual, opens.
 *
 * Most rows are kinds of files from public bug reports against other readers.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include "formats/blocks.h"
#include "formats/gguf.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

static char dir[GB_PATH_MAX];

/* The file that most rows change: one metadata entry (44 bytes), tensor "t" (dimension count at 77), data. */
enum { VERSION_AT = 4, TENSOR_COUNT_AT = 8, KV_COUNT_AT = 16, KV_AT = GB_HEADER_BYTES, INFO_AT = KV_AT + 44 };

static void start(gguf_build *b, uint64_t tensor_count) {
    gb_header(b, 3, tensor_count, 1);
    gb_kv_string(b, "general.architecture", "test");
}

static void one(gguf_build *b, uint32_t type, uint64_t offset, const uint64_t *dims, uint32_t dim_count, size_t data) {
    start(b, 1);
    gb_tensor(b, "t", type, offset, dims, dim_count);
    gb_pad(b, 32);
    gb_fill(b, 0, data);
}

static void good(gguf_build *b) { one(b, SPK_TYPE_F32, 0, GB_DIMS(8, 2), 64); }

/* Two F32 tensors of 64 bytes each. */
static void two(gguf_build *b, const char *first, const char *second, uint64_t second_offset) {
    start(b, 2);
    gb_tensor(b, first, SPK_TYPE_F32, 0, GB_DIMS(16));
    gb_tensor(b, second, SPK_TYPE_F32, second_offset, GB_DIMS(16));
    gb_pad(b, 32);
    gb_fill(b, 0, 128);
}

static void named(gguf_build *b, const char *bytes, size_t size) {
    start(b, 1);
    gb_text(b, bytes, size);
    gb_tensor_rest(b, SPK_TYPE_F32, 0, GB_DIMS(8));
    gb_pad(b, 32);
    gb_fill(b, 0, 32);
}

/* No tensors, one entry; the caller adds its value. */
static void entry(gguf_build *b, const char *key, uint32_t type) {
    gb_header(b, 3, 0, 1);
    gb_key(b, key, type);
}

static void aligned(gguf_build *b, uint32_t type, const void *value, size_t size) {
    gb_header(b, 3, 1, 1);
    gb_kv(b, "general.alignment", type, value, size);
    gb_tensor(b, "t", SPK_TYPE_F32, 0, GB_DIMS(8));
    gb_pad(b, 64);
    gb_fill(b, 0, 64);
}

static void aligned_u32(gguf_build *b, uint32_t value) { aligned(b, SPK_KV_U32, &value, sizeof value); }
static void aligned_i32(gguf_build *b, int32_t value) { aligned(b, SPK_KV_I32, &value, sizeof value); }

/* ---- one builder a row ---- */

#define BUILD(name, ...) static void name(gguf_build *b) { __VA_ARGS__; }

BUILD(type_beyond_enum,    one(b, 0x7fffffff, 0, GB_DIMS(8), 32))
BUILD(type_minus_one,      one(b, UINT32_MAX, 0, GB_DIMS(8), 32))
BUILD(type_200,            one(b, 200, 0, GB_DIMS(8), 32))
BUILD(type_mxfp4,          one(b, 39, 0, GB_DIMS(32), 32))
BUILD(type_removed,        one(b, 31, 0, GB_DIMS(32), 32))
BUILD(type_iq2_xs,         one(b, 17, 0, GB_DIMS(256), 96))
BUILD(tensor_count_wraps,  good(b); gb_u64_at(b, TENSOR_COUNT_AT, UINT64_MAX / 24 + 2))
BUILD(tensor_count_signed, good(b); gb_u64_at(b, TENSOR_COUNT_AT, UINT64_MAX / 400 + 1))
BUILD(tensor_count_large,  good(b); gb_u64_at(b, TENSOR_COUNT_AT, 60000))
BUILD(tensor_count_more,   good(b); gb_u64_at(b, TENSOR_COUNT_AT, 2))
BUILD(tensor_count_less,   two(b, "a", "b", 64); gb_u64_at(b, TENSOR_COUNT_AT, 1))
BUILD(kv_count_wraps,      good(b); gb_u64_at(b, KV_COUNT_AT, UINT64_MAX / 13 + 2))
BUILD(kv_count_large,      good(b); gb_u64_at(b, KV_COUNT_AT, 60000))
BUILD(array_wraps,         gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_U32, UINT64_MAX / 4 + 2); gb_u32(b, 1))
BUILD(array_bomb,          gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_U64, 1 << 28); gb_u64(b, 1))
BUILD(array_string_bomb,   gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_STRING, 1 << 28); gb_string(b, "x"))
BUILD(string_max,          entry(b, "k", SPK_KV_STRING); gb_u64(b, UINT64_MAX); gb_u64(b, 0))
BUILD(string_in_array_max, gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_STRING, 1); gb_u64(b, UINT64_MAX))
BUILD(key_bomb,            gb_header(b, 3, 0, 1); gb_u64(b, (UINT64_C(1) << 48) - 1); gb_u32(b, 0))
BUILD(key_bomb_filled,     gb_header(b, 3, 0, 1); gb_u64(b, INT64_MAX); gb_fill(b, 'k', 64))
BUILD(key_too_long,        gb_header(b, 3, 0, 1); gb_u64(b, 65536); gb_fill(b, 'k', 65536); gb_u32(b, 0); gb_u8(b, 0))
BUILD(name_bomb,           start(b, 1); gb_u64(b, (UINT64_C(1) << 63) + 1); gb_fill(b, 'n', 64))
BUILD(sizes_wrap,          start(b, 4); for (int i = 0; i < 4; i++)
                               gb_tensor(b, &"a\0b\0c\0d"[2 * i], SPK_TYPE_F32, (uint64_t)i << 62, GB_DIMS(1ull << 60));
                           gb_pad(b, 32))
BUILD(size_near_max,       one(b, SPK_TYPE_F32, 0, GB_DIMS((UINT64_C(1) << 62) - 8), 32))
BUILD(size_past_64_bits,   one(b, SPK_TYPE_F32, 0, GB_DIMS(UINT64_C(1) << 62), 32))
BUILD(offset_near_max,     one(b, SPK_TYPE_F32, UINT64_MAX - 31, GB_DIMS(8), 32))
BUILD(size_one_mb,         one(b, SPK_TYPE_F32, 0, GB_DIMS(512, 512), 32))
BUILD(size_past_32_bits,   one(b, SPK_TYPE_Q4_K, 0, GB_DIMS(256, (1 << 24) + 1), 288))
BUILD(dim_2_42,            one(b, SPK_TYPE_F32, 0, GB_DIMS(1 << 22, (UINT64_C(1) << 42) + 1), 32))
BUILD(dim_minus_one,       one(b, SPK_TYPE_F32, 0, GB_DIMS(UINT64_MAX, 2), 32))
BUILD(dim_zero,            one(b, SPK_TYPE_F32, 0, GB_DIMS(8, 0), 32))
BUILD(dim_count_zero,      good(b); gb_u32_at(b, INFO_AT + 9, 0))
BUILD(dim_count_five,      one(b, SPK_TYPE_F32, 0, GB_DIMS(8, 1, 1, 1, 1), 32))
BUILD(dim_count_huge,      good(b); gb_u32_at(b, INFO_AT + 9, UINT32_MAX))
BUILD(row_q4_k,            one(b, SPK_TYPE_Q4_K, 0, GB_DIMS(128, 2), 144))
BUILD(row_q8_0,            one(b, SPK_TYPE_Q8_0, 0, GB_DIMS(40, 4), 170))
BUILD(empty_key,           gb_header(b, 3, 0, 1); gb_key(b, "", SPK_KV_U8); gb_u8(b, 1))
BUILD(duplicate_key,       gb_header(b, 3, 0, 2); gb_kv_u32(b, "general.x", 1); gb_kv_u32(b, "general.x", 2))
BUILD(value_type_13,       entry(b, "k", 13); gb_u64(b, 0))
BUILD(array_type_13,       gb_header(b, 3, 0, 1); gb_array(b, "k", 13, 2); gb_fill(b, 0, 64))
BUILD(array_nested,        gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_ARRAY, 1); gb_fill(b, 0, 64))
BUILD(bool_two,            entry(b, "k", SPK_KV_BOOL); gb_u8(b, 2))
BUILD(bool_array_two,      gb_header(b, 3, 0, 1); gb_array(b, "k", SPK_KV_BOOL, 3); gb_raw(b, "\0\1\2", 3))
BUILD(alignment_2_31,      aligned_u32(b, 0x80000000u))
BUILD(alignment_2_30,      aligned_u32(b, 0x40000000u))
BUILD(alignment_zero,      aligned_u32(b, 0))
BUILD(alignment_24,        aligned_u32(b, 24))
BUILD(alignment_negative,  aligned_i32(b, -32))
BUILD(alignment_i32,       aligned_i32(b, 64))
BUILD(alignment_float,     aligned(b, SPK_KV_F32, &(float){ 32 }, 4))
BUILD(alignment_string,    gb_header(b, 3, 0, 1); gb_kv_string(b, "general.alignment", "32"))
BUILD(alignment_array,     gb_header(b, 3, 0, 1); gb_array(b, "general.alignment", SPK_KV_U32, 1); gb_u32(b, 32))
BUILD(cut_after_infos,     start(b, 1); gb_tensor(b, "t", SPK_TYPE_F32, 0, GB_DIMS(8)))
BUILD(extra_bytes,         good(b); gb_fill(b, 0, 64))
BUILD(extra_no_tensors,    gb_header(b, 3, 0, 0); gb_fill(b, 0, 64))
BUILD(joined,              good(b); good(b))
BUILD(offset_end_less_one, one(b, SPK_TYPE_F32, 63, GB_DIMS(8), 64))
BUILD(offset_unaligned,    one(b, SPK_TYPE_F32, 16, GB_DIMS(8), 64))
BUILD(offset_past_end,     one(b, SPK_TYPE_F32, 64, GB_DIMS(8), 64))
BUILD(offset_end,          one(b, SPK_TYPE_F32, 32, GB_DIMS(16), 64))
BUILD(cut_in_data,         good(b); b->size -= 1)
BUILD(second_too_early,    two(b, "a", "b", 32))
BUILD(same_offset,         two(b, "a", "b", 0))
BUILD(first_offset_4096,   one(b, SPK_TYPE_F32, 4096, GB_DIMS(8), 4096 + 32))
BUILD(second_gap,          two(b, "a", "b", 64 + 4096); gb_fill(b, 0, 4096))
BUILD(data_at_odd_offset,  start(b, 1); gb_tensor(b, "t", SPK_TYPE_F32, 0, GB_DIMS(8)); gb_fill(b, 0, 32))
BUILD(duplicate_tensor,    two(b, "same", "same", 64))
BUILD(name_empty,          named(b, "", 0))
BUILD(name_64_bytes,       named(b, "0123456789012345678901234567890123456789012345678901234567890123", 64))
BUILD(name_63_bytes,       named(b, "012345678901234567890123456789012345678901234567890123456789012", 63))
BUILD(name_slash,          named(b, "../../etc/x", 11))
BUILD(name_nul,            named(b, "a\0b", 3))
BUILD(name_newline,        named(b, "a\nb", 3))
BUILD(name_delete,         named(b, "a\x7f", 2))
BUILD(big_endian,          gb_header(b, 0x03000000, UINT64_C(1) << 56, UINT64_C(1) << 56); gb_fill(b, 0, 64))
BUILD(version_0,           good(b); gb_u32_at(b, VERSION_AT, 0))
BUILD(version_1,           good(b); gb_u32_at(b, VERSION_AT, 1))
BUILD(version_4,           good(b); gb_u32_at(b, VERSION_AT, 4))
BUILD(magic_only,          gb_raw(b, "GGUF", 4))
BUILD(two_bytes,           gb_raw(b, "GG", 2))
BUILD(empty,               (void)b)
BUILD(html,                gb_raw(b, "\n<!DOCTYPE html><html><body>404</body></html>", 44))
BUILD(lfs_pointer,         gb_raw(b, "version https://git-lfs.github.com/spec/v1\noid sha256:0", 55))
BUILD(zip,                 gb_raw(b, "PK\x03\x04\x14\0\0\0\0\0\0\0", 12))
BUILD(safetensors,         gb_u64(b, 64); gb_raw(b, "{\"__metadata__\":{}}", 19))
BUILD(old_ggml,            gb_raw(b, "tjgg\x03\0\0\0", 8))
BUILD(reversed_magic,      gb_raw(b, "FUGG\0\0\0\x03", 8))
BUILD(other_bytes,         gb_raw(b, "\x01\x02\x03\x04" "56789", 9))
BUILD(no_tensors,          start(b, 0))
BUILD(unknown_keys,        gb_header(b, 3, 0, 2); gb_array(b, "x", SPK_KV_F64, 1); gb_u64(b, 0);
                           gb_array(b, "tokenizer.ggml.scores", SPK_KV_U8, 2); gb_raw(b, "ab", 2))
BUILD(split_no_alone,      gb_header(b, 3, 0, 1); gb_kv_u16(b, "split.no", 1))
BUILD(split_name,          gb_header(b, 3, 0, 3); gb_kv_split(b, 0, 3, 0))
BUILD(split_count_huge,    gb_header(b, 3, 0, 3); gb_kv_split(b, 0, 65535, 0))
BUILD(split_count_type,    gb_header(b, 3, 0, 1); gb_kv_string(b, "split.count", "3"))
BUILD(split_no_negative,   gb_header(b, 3, 0, 1); gb_kv(b, "split.no", SPK_KV_I8, "\xff", 1))
BUILD(split_no_array,      gb_header(b, 3, 0, 1); gb_array(b, "split.no", SPK_KV_U16, 1); gb_raw(b, "\0", 2))
BUILD(split_count_array,   gb_header(b, 3, 0, 1); gb_array(b, "split.count", SPK_KV_U16, 1); gb_raw(b, "\1", 2))
BUILD(split_count_zero,    gb_header(b, 3, 0, 3); gb_kv_split(b, 0, 0, 99))

typedef struct {
    const char *id;
    void (*build)(gguf_build *b);
    spk_status  want;
    const char *texts[3];       /* what the message must hold, beside the file's name */
} row;

#define ROW(builder, status, ...) { #builder, builder, status, { __VA_ARGS__ } }

static const row rows[] = {
    ROW(type_beyond_enum,    SPK_E_UNSUPPORTED, "'t'", "type id 2147483647", "Q4_K"),
    ROW(type_minus_one,      SPK_E_UNSUPPORTED, "'t'", "type id 4294967295"),
    ROW(type_200,            SPK_E_UNSUPPORTED, "'t'", "type id 200"),
    ROW(type_mxfp4,          SPK_E_UNSUPPORTED, "'t'", "type id 39", "MXFP4"),
    ROW(type_removed,        SPK_E_UNSUPPORTED, "'t'", "type id 31", "Q4_0_4_4"),
    ROW(type_iq2_xs,         SPK_E_UNSUPPORTED, "'t'", "IQ2_XS", "expected one of F32 F16"),
    ROW(tensor_count_wraps,  SPK_E_LIMIT, "768614336404564652 tensors", "at most 65536"),
    ROW(tensor_count_signed, SPK_E_LIMIT, "46116860184273880 tensors", "at most 65536"),
    ROW(tensor_count_large,  SPK_E_CORRUPT, "60000 tensors", "only 124 are left"),
    ROW(tensor_count_more,   SPK_E_CORRUPT, "tensor 2 of 2", "empty name", "tensor count"),
    ROW(tensor_count_less,   SPK_E_CORRUPT, "extra bytes after the last tensor"),
    ROW(kv_count_wraps,      SPK_E_LIMIT, "1418980313362273203 metadata entries", "at most 65536"),
    ROW(kv_count_large,      SPK_E_CORRUPT, "60000 metadata entries", "only 168 are left"),
    ROW(array_wraps,         SPK_E_LIMIT, "'k'", "4611686018427387905 elements", "at most 268435456"),
    ROW(array_bomb,          SPK_E_CORRUPT, "'k'", "268435456 elements of 8 bytes", "only 8 bytes are left"),
    ROW(array_string_bomb,   SPK_E_CORRUPT, "'k'", "268435456 elements", "only 9 bytes are left"),
    ROW(string_max,          SPK_E_CORRUPT, "'k'", "length 18446744073709551615", "only 8 bytes are left"),
    ROW(string_in_array_max, SPK_E_CORRUPT, "'k'", "length 18446744073709551615", "only 0 bytes are left"),
    ROW(key_bomb,            SPK_E_CORRUPT, "metadata entries", "only 12 are left"),
    ROW(key_bomb_filled,     SPK_E_CORRUPT, "metadata entry 1 of 1", "9223372036854775807", "only 64 bytes are left"),
    ROW(key_too_long,        SPK_E_LIMIT, "metadata entry 1 of 1", "65536 bytes", "at most 65535"),
    ROW(name_bomb,           SPK_E_LIMIT, "tensor 1 of 1", "9223372036854775809 bytes", "at most 63"),
    ROW(sizes_wrap,          SPK_E_CORRUPT, "'a'", "4611686018427387904 bytes", "the file has only"),
    ROW(size_near_max,       SPK_E_CORRUPT, "'t'", "18446744073709551584 bytes", "the file has only 160 bytes"),
    ROW(size_past_64_bits,   SPK_E_CORRUPT, "'t'", "[4611686018427387904]", "past 2^64"),
    ROW(offset_near_max,     SPK_E_CORRUPT, "'t'", "offset 18446744073709551584", "the file has only 160 bytes"),
    ROW(size_one_mb,         SPK_E_CORRUPT, "'t'", "1048576 bytes", "the file has only 160 bytes"),
    ROW(size_past_32_bits,   SPK_E_CORRUPT, "'t'", "2415919248 bytes", "the file has only"),
    ROW(dim_2_42,            SPK_E_CORRUPT, "'t'", "[4194304, 4398046511105]", "past 2^64"),
    ROW(dim_minus_one,       SPK_E_CORRUPT, "'t'", "[18446744073709551615, 2]", "past 2^64"),
    ROW(dim_zero,            SPK_E_CORRUPT, "'t'", "[8, 0]", "at least 1"),
    ROW(dim_count_zero,      SPK_E_CORRUPT, "'t'", "0 dimensions", "expected 1..4"),
    ROW(dim_count_five,      SPK_E_CORRUPT, "'t'", "5 dimensions", "expected 1..4"),
    ROW(dim_count_huge,      SPK_E_CORRUPT, "'t'", "4294967295 dimensions", "expected 1..4"),
    ROW(row_q4_k,            SPK_E_SHAPE, "'t'", "rows of 128 weights", "Q4_K needs a multiple of 256"),
    ROW(row_q8_0,            SPK_E_SHAPE, "'t'", "rows of 40 weights", "Q8_0 needs a multiple of 32"),
    ROW(empty_key,           SPK_E_CORRUPT, "metadata entry 1 of 1", "empty key"),
    ROW(duplicate_key,       SPK_E_CORRUPT, "metadata entry 2 of 2", "'general.x'", "duplicate key"),
    ROW(value_type_13,       SPK_E_CORRUPT, "'k'", "unknown value type 13", "expected 0..12"),
    ROW(array_type_13,       SPK_E_CORRUPT, "'k'", "unknown element type 13", "expected 0..12"),
    ROW(array_nested,        SPK_E_CORRUPT, "'k'", "array of arrays"),
    ROW(bool_two,            SPK_E_CORRUPT, "'k'", "boolean with value 2", "expected 0 or 1"),
    ROW(bool_array_two,      SPK_E_CORRUPT, "'k'", "boolean with value 2", "expected 0 or 1"),
    ROW(alignment_2_31,      SPK_E_LIMIT, "general.alignment is 2147483648", "at most 1048576"),
    ROW(alignment_2_30,      SPK_E_LIMIT, "general.alignment is 1073741824", "at most 1048576"),
    ROW(alignment_zero,      SPK_E_CORRUPT, "general.alignment is 0", "a power of two"),
    ROW(alignment_24,        SPK_E_CORRUPT, "general.alignment is 24", "a power of two"),
    ROW(alignment_negative,  SPK_E_CORRUPT, "general.alignment is -32", "a power of two"),
    ROW(alignment_i32,       SPK_OK, NULL),
    ROW(alignment_float,     SPK_E_CORRUPT, "general.alignment", "type 6", "an integer"),
    ROW(alignment_string,    SPK_E_CORRUPT, "general.alignment", "type 8", "an integer"),
    ROW(alignment_array,     SPK_E_CORRUPT, "general.alignment", "type 9", "an integer"),
    ROW(cut_after_infos,     SPK_E_CORRUPT, "'t'", "32 bytes", "the file has only 101 bytes"),
    ROW(extra_bytes,         SPK_E_CORRUPT, "64 extra bytes", "file has 256 bytes", "expected 192"),
    ROW(extra_no_tensors,    SPK_E_CORRUPT, "56 extra bytes", "file has 88 bytes", "expected 32"),
    ROW(joined,              SPK_E_CORRUPT, "192 extra bytes", "another GGUF begins there"),
    ROW(offset_end_less_one, SPK_E_CORRUPT, "'t'", "offset 63", "multiple of the alignment 32"),
    ROW(offset_unaligned,    SPK_E_CORRUPT, "'t'", "offset 16", "multiple of the alignment 32"),
    ROW(offset_past_end,     SPK_E_CORRUPT, "'t'", "offset 64", "the file has only 192 bytes"),
    ROW(offset_end,          SPK_E_CORRUPT, "'t'", "offset 32", "the file has only 192 bytes"),
    ROW(cut_in_data,         SPK_E_CORRUPT, "'t'", "64 bytes", "the file has only 191 bytes"),
    ROW(second_too_early,    SPK_E_CORRUPT, "'b' at data offset 32", "overlaps 'a'", "expected offset 64"),
    ROW(same_offset,         SPK_E_CORRUPT, "'b' at data offset 0", "overlaps 'a'", "expected offset 64"),
    ROW(first_offset_4096,   SPK_E_CORRUPT, "'t' at data offset 4096", "expected 0", "a gap of 4096 bytes"),
    ROW(second_gap,          SPK_E_CORRUPT, "'b' at data offset 4160", "expected 64", "a gap of 4096 bytes after 'a'"),
    ROW(data_at_odd_offset,  SPK_E_CORRUPT, "'t'", "file offset 128", "the file has only 133 bytes"),
    ROW(duplicate_tensor,    SPK_E_CORRUPT, "duplicate tensor name 'same'", "the same file"),
    ROW(name_empty,          SPK_E_CORRUPT, "tensor 1 of 1", "empty name"),
    ROW(name_64_bytes,       SPK_E_LIMIT, "tensor 1 of 1", "64 bytes", "at most 63"),
    ROW(name_63_bytes,       SPK_OK, NULL),
    ROW(name_slash,          SPK_OK, NULL),
    ROW(name_nul,            SPK_E_CORRUPT, "tensor 1 of 1", "control character", "0x00 at byte 1"),
    ROW(name_newline,        SPK_E_CORRUPT, "'a?b'", "control character", "0x0a at byte 1"),
    ROW(name_delete,         SPK_E_CORRUPT, "control character", "0x7f at byte 1"),
    ROW(big_endian,          SPK_E_VERSION, "big-endian", "version 3", "expected little-endian"),
    ROW(version_0,           SPK_E_VERSION, "version 0", "expected 2 or 3"),
    ROW(version_1,           SPK_E_VERSION, "version 1", "expected 2 or 3", "convert"),
    ROW(version_4,           SPK_E_VERSION, "version 4", "expected 2 or 3"),
    ROW(magic_only,          SPK_E_CORRUPT, "has 4 bytes", "takes 24", "truncated"),
    ROW(two_bytes,           SPK_E_CORRUPT, "has 2 bytes", "takes 24", "truncated"),
    ROW(empty,               SPK_E_MAGIC, "empty (0 bytes)", "expected a GGUF file"),
    ROW(html,                SPK_E_MAGIC, "not GGUF", "HTML"),
    ROW(lfs_pointer,         SPK_E_MAGIC, "not GGUF", "Git LFS pointer"),
    ROW(zip,                 SPK_E_MAGIC, "not GGUF", "zip archive"),
    ROW(safetensors,         SPK_E_MAGIC, "not GGUF", "safetensors"),
    ROW(old_ggml,            SPK_E_MAGIC, "not GGUF", "older than GGUF"),
    ROW(reversed_magic,      SPK_E_MAGIC, "not GGUF", "big-endian"),
    ROW(other_bytes,         SPK_E_MAGIC, "begins with bytes 01 02 03 04", "expected 47 47 55 46"),
    ROW(no_tensors,          SPK_OK, NULL),
    ROW(unknown_keys,        SPK_OK, NULL),
    ROW(split_no_alone,      SPK_E_CORRUPT, "split.no is 1", "less than split.count (1)"),
    ROW(split_name,          SPK_E_MISMATCH, "part 1 of 3", "does not end in -00001-of-00003.gguf"),
    ROW(split_count_huge,    SPK_E_LIMIT, "split.count is 65535", "at most 1024"),
    ROW(split_count_type,    SPK_E_CORRUPT, "split.count", "integer"),
    ROW(split_no_negative,   SPK_E_CORRUPT, "split.no", "integer"),
    ROW(split_no_array,      SPK_E_CORRUPT, "split.no", "integer"),
    ROW(split_count_array,   SPK_E_CORRUPT, "split.count", "integer"),
    ROW(split_count_zero,    SPK_OK, NULL),
};

/* Opening `path` must give `want` and a message with the texts and the name of the faulty file, which is `path` itself
 * if `faulty` is NULL. */
static void check_open(const char *id, const char *path, spk_status want, const char *faulty,
                       const char *const texts[3]) {
    const char *name = faulty != NULL ? faulty : strrchr(path, '/') + 1;
    spk_gguf   *gguf = NULL;
    spk_error   err = { 0 };
    spk_status  status = spk_gguf_open(path, &gguf, &err);
    CHECK(status == want, "%s: %s: %s", id, spk_status_name(status), err.text);
    if (status == SPK_OK) {
        spk_gguf_close(gguf);
        return;
    }
    CHECK(spk_gguf_open(path, &gguf, NULL) == want, "%s: without a place for the message", id);
    CHECK(gguf == NULL && err.status == status, "%s: output untouched, status %d", id, (int)err.status);
    CHECK(strstr(err.text, name) != NULL && strchr(err.text, '\n') == NULL, "%s: %s", id, err.text);
    for (int i = 0; i < 3 && texts[i] != NULL; i++)
        CHECK(strstr(err.text, texts[i]) != NULL, "%s: no \"%s\" in: %s", id, texts[i], err.text);
}

static void every_row_gets_its_message(void) {
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char       path[GB_PATH_MAX], name[100];
        gguf_build b = { 0 };
        (void)snprintf(name, sizeof name, "%s.gguf", rows[i].id);
        rows[i].build(&b);
        gb_save(&b, gb_path(path, dir, name));
        gb_free(&b);
        check_open(rows[i].id, path, rows[i].want, NULL, rows[i].texts);
    }
}

static void paths_that_are_no_files(void) {
    char path[GB_PATH_MAX];
    check_open("absent", gb_path(path, dir, "absent.gguf"), SPK_E_IO, NULL, (const char *[3]){ "No such file" });
    gb_path(path, dir, "directory.gguf");
    CHECK(mkdir(path, 0700) == 0, "mkdir");
    check_open("directory", path, SPK_E_IO, NULL, (const char *[3]){ "is a directory", "expected a GGUF file" });
    gb_path(path, dir, "pipe.gguf");
    CHECK(mkfifo(path, 0600) == 0, "mkfifo");
    check_open("pipe", path, SPK_E_IO, NULL, (const char *[3]){ "is a pipe", "expected a GGUF file" });
    check_open("device", "/dev/null", SPK_E_IO, NULL, (const char *[3]){ "is a device", "expected a GGUF file" });
}

/* Parts of a split model with one tensor each. */
static void save_part(const char *name, uint16_t no, uint16_t count, int32_t total, const char *tensor) {
    char       path[GB_PATH_MAX];
    gguf_build b = { 0 };
    gb_header(&b, 3, 1, 3);
    gb_kv_split(&b, no, count, total);
    gb_tensor(&b, tensor, SPK_TYPE_F32, 0, GB_DIMS(8));
    gb_pad(&b, 32);
    gb_fill(&b, 0, 32);
    gb_save(&b, gb_path(path, dir, name));
    gb_free(&b);
}

static void split_models_that_do_not_fit(void) {
    char path[GB_PATH_MAX];
    save_part("gone-00002-of-00003.gguf", 1, 3, 3, "b");
    save_part("gone-00003-of-00003.gguf", 2, 3, 3, "c");
    check_open("first part missing", gb_path(path, dir, "gone-00002-of-00003.gguf"), SPK_E_MISSING,
               "gone-00001-of-00003.gguf", (const char *[3]){ "part 1 of 3 is missing" });
    save_part("swap-00001-of-00002.gguf", 1, 2, 2, "b");
    save_part("swap-00002-of-00002.gguf", 0, 2, 2, "a");
    check_open("reversed", gb_path(path, dir, "swap-00001-of-00002.gguf"), SPK_E_MISMATCH, NULL,
               (const char *[3]){ "part 2 of 2", "expected part 1 of 2" });
    save_part("mix-00001-of-00002.gguf", 0, 2, 2, "a");
    save_part("mix-00002-of-00002.gguf", 1, 3, 2, "b");
    check_open("count differs", gb_path(path, dir, "mix-00001-of-00002.gguf"), SPK_E_MISMATCH,
               "mix-00002-of-00002.gguf", (const char *[3]){ "part 2 of 3", "expected part 2 of 2" });
    check_open("count differs from the name", gb_path(path, dir, "mix-00002-of-00002.gguf"), SPK_E_MISMATCH, NULL,
               (const char *[3]){ "part 2 of 3", "expected part 2 of 2 by its name" });
    save_part("total-00001-of-00002.gguf", 0, 2, 3, "a");
    save_part("total-00002-of-00002.gguf", 1, 2, 3, "b");
    check_open("total", gb_path(path, dir, "total-00001-of-00002.gguf"), SPK_E_MISMATCH, NULL,
               (const char *[3]){ "split.tensors.count is 3", "2 parts have 2 tensors" });
    save_part("twice-00001-of-00002.gguf", 0, 2, 2, "same");
    save_part("twice-00002-of-00002.gguf", 1, 2, 2, "same");
    check_open("duplicate", gb_path(path, dir, "twice-00001-of-00002.gguf"), SPK_E_CORRUPT,
               "twice-00002-of-00002.gguf", (const char *[3]){ "duplicate tensor name 'same'", "first in",
                                                               "twice-00001-of-00002.gguf" });
    CHECK(truncate(gb_path(path, dir, "mix-00002-of-00002.gguf"), 50) == 0, "truncate");
    check_open("sibling cut", gb_path(path, dir, "mix-00001-of-00002.gguf"), SPK_E_CORRUPT,
               "mix-00002-of-00002.gguf", (const char *[3]){ "truncated" });
}

/* A tensor of 5 GiB whose data is a hole: sizes do not pass through 32 bits, and nothing reads the weights. */
static void large_sparse_files_open(void) {
    char            path[GB_PATH_MAX];
    gguf_build      b = { 0 };
    spk_gguf       *gguf = NULL;
    spk_error       err = { 0 };
    const uint64_t  size = UINT64_C(5) << 30;
    uint8_t         last[4] = { 1, 1, 1, 1 };
    one(&b, SPK_TYPE_F32, 0, GB_DIMS(1 << 20, 1280), 0);
    gb_save(&b, gb_path(path, dir, "large.gguf"));
    CHECK(truncate(path, (off_t)(b.size + size)) == 0, "truncate");
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    if (gguf != NULL) {
        CHECK(spk_gguf_tensor_at(gguf, 0)->size_bytes == size, "size");
        CHECK_OK(spk_gguf_read(gguf, 0, b.size + size - 4, 4, last, &err), err);
        CHECK(last[0] == 0 && last[3] == 0, "a hole reads as zeros");
        spk_gguf_close(gguf);
    }
    gb_free(&b);
    (void)remove(path);
}

static void a_file_that_shrinks_is_an_error(void) {
    char       path[GB_PATH_MAX];
    gguf_build b = { 0 };
    spk_gguf  *gguf = NULL;
    spk_error  err = { 0 };
    uint8_t    data[64];
    good(&b);
    gb_save(&b, gb_path(path, dir, "shrinks.gguf"));
    gb_free(&b);
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    if (gguf == NULL) return;
    const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, 0);
    CHECK(truncate(path, (off_t)t->file_offset_bytes + 10) == 0, "truncate");
    CHECK(spk_gguf_read(gguf, 0, t->file_offset_bytes, 64, data, &err) == SPK_E_IO, "%s", err.text);
    CHECK(strstr(err.text, "shrinks.gguf: the file shrank") != NULL && strstr(err.text, "expected 192 bytes") != NULL,
          "%s", err.text);
    spk_gguf_close(gguf);
}

/* A small file with a bit of everything; *data_end gets the end of the last tensor, before padding. */
static void build_rich(gguf_build *b, size_t *data_end) {
    gb_header(b, 3, 2, 5);
    gb_kv_u32(b, "general.alignment", 16);
    gb_kv_string(b, "general.name", "rich");
    gb_array(b, "s", SPK_KV_STRING, 2);
    gb_string(b, "one");
    gb_string(b, "");
    gb_array(b, "f", SPK_KV_F32, 2);
    gb_u64(b, 0);
    gb_kv(b, "b", SPK_KV_BOOL, "\1", 1);
    gb_tensor(b, "a", SPK_TYPE_Q8_0, 0, GB_DIMS(32));
    gb_tensor(b, "c", SPK_TYPE_F16, 48, GB_DIMS(5, 2));
    gb_pad(b, 16);
    gb_fill(b, 1, 34);
    gb_pad(b, 16);
    gb_fill(b, 2, 20);
    *data_end = b->size;
    gb_pad(b, 16);
}

/* Open, and read all that was accepted; the sanitizer build turns a read out of bounds into a failure. */
static void open_and_touch(const char *path, spk_status *status, spk_error *err) {
    spk_gguf *gguf = NULL;
    *status = spk_gguf_open(path, &gguf, err);
    if (*status != SPK_OK) return;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < spk_gguf_tensor_count(gguf); i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, i);
        CHECK(t->file_offset_bytes + t->size_bytes <= spk_gguf_part_bytes(gguf, 0), "%s in the file", t->name);
        for (uint64_t k = 0; k < t->size_bytes; k++) sum += t->data[k];
    }
    for (uint64_t i = 0; i < spk_gguf_kvs(gguf)->count; i++) {
        const spk_kv  *kv = &spk_gguf_kvs(gguf)->items[i];
        const uint8_t *cursor = NULL;
        spk_text       text;
        while (spk_kv_next_text(kv, &cursor, &text)) sum += text.size_bytes;
        for (uint64_t k = 0; k < kv->value_bytes; k++) sum += kv->value[k];
    }
    CHECK(sum > 0, "something was read");
    spk_gguf_close(gguf);
}

static void every_truncation_is_an_error(void) {
    char       path[GB_PATH_MAX];
    gguf_build b = { 0 };
    size_t     data_end;
    build_rich(&b, &data_end);
    gb_path(path, dir, "cut.gguf");
    for (size_t size = b.size + 1; size-- > 0;) {
        spk_error  err = { 0 };
        spk_status status;
        gb_save(&(gguf_build){ b.bytes, size, size }, path);
        open_and_touch(path, &status, &err);
        CHECK((status == SPK_OK) == (size >= data_end), "%d bytes: %s", (int)size, err.text);
        CHECK(size >= data_end || strstr(err.text, "cut.gguf") != NULL, "%d bytes: %s", (int)size, err.text);
        CHECK(status == SPK_OK || status == SPK_E_CORRUPT || size == 0, "%d bytes: %s", (int)size, err.text);
    }
    gb_free(&b);
}

/* Whatever a byte becomes, the file is refused with a message or all that it offers can be read. */
static void every_changed_byte_is_survived(void) {
    char       path[GB_PATH_MAX];
    gguf_build b = { 0 };
    size_t     data_end;
    int        refused = 0;
    build_rich(&b, &data_end);
    gb_path(path, dir, "change.gguf");
    for (size_t at = 0; at < b.size; at++) {
        const uint8_t original = b.bytes[at], changed[] = { 0, 0xff, (uint8_t)(original + 1) };
        for (int i = 0; i < 3; i++) {
            spk_error  err = { 0 };
            spk_status status;
            b.bytes[at] = changed[i];
            gb_save(&b, path);
            open_and_touch(path, &status, &err);
            CHECK(status == SPK_OK || strstr(err.text, "change.gguf") != NULL, "byte %d: %s", (int)at, err.text);
            refused += status != SPK_OK;
        }
        b.bytes[at] = original;
    }
    CHECK(refused > 200, "only %d changes were refused", refused);
    gb_free(&b);
}

int main(void) {
    gb_make_dir(dir);
    RUN(every_row_gets_its_message);
    RUN(paths_that_are_no_files);
    RUN(split_models_that_do_not_fit);
    RUN(large_sparse_files_open);
    RUN(a_file_that_shrinks_is_an_error);
    RUN(every_truncation_is_an_error);
    RUN(every_changed_byte_is_survived);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
