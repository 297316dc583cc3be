/* tests/test_spk_damage.c - damaged and hostile packs: nothing gets past the rules of spk-format.md.
 *
 * Attacks patch a good pack and repair its digests; the number of the rule they break must be in the message.
 */
#include "formats/spk_internal.h"

#include <sys/mman.h>
#include <zstd.h>

#include "formats/gguf.h"
#include "tests/check.h"
#include "tests/spk_build.h"

/* ---- Damage ---- */

/* Every single bit, in place, in a shared mapping of the file.  Damage outside the weights is found by open alone. */
static void every_bit_flip_is_found(void) {
    static const model m = { { 4096, 0, 0, 0 }, &model_tensors[3], 2 };
    spk_error error;
    free(write_model(pack_path, &m, 4096));
    image i = read_image(pack_path);
    CHECK(i.size_bytes < 65536, "small");
    uint64_t weights = section_of(&i, SPK_PLACE_STATIC)->offset_bytes, missed = 0;
    FILE *file = fopen(pack_path, "r+b");
    uint8_t *map = mmap(NULL, i.size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    for (uint64_t bit = 0; bit < 8 * i.size_bytes; bit++) {
        uint64_t byte = bit / 8;
        map[byte] ^= (uint8_t)(1u << bit % 8);
        bool in_weights = byte >= weights && byte < weights + 4096;
        spk_status status = in_weights ? check_status(pack_path, &error) : open_status(pack_path, &error);
        if (status == SPK_OK && missed++ == 0) CHECK(false, "byte %u, bit %u", (unsigned)byte, (unsigned)(bit % 8));
        map[byte] ^= (uint8_t)(1u << bit % 8);
    }
    CHECK(missed == 0, "%u flips were not found", (unsigned)missed);
    CHECK(check_status(pack_path, &error) == SPK_OK, "%s", error.text);
    (void)munmap(map, i.size_bytes);
    (void)fclose(file);
    free(i.bytes);
}

static void cut_and_grown_files_are_refused(void) {
    image i = model_image();
    spk_error error;
    for (uint64_t size = 0; size <= i.size_bytes + 4096; size += size % 4096 < 2 || size % 4096 == 4095 ? 1 : 293) {
        if (size == i.size_bytes) continue;
        write_image(pack_path, i.bytes, size);
        spk_status status = open_status(pack_path, &error), want = size < 8 ? SPK_E_MAGIC : SPK_E_CORRUPT;
        CHECK(status == want, "%u bytes: %s", (unsigned)size, error.text);
        if (size >= 8) CHECK(strstr(error.text, size < i.size_bytes ? "truncated" : "after the end"), "%s", error.text);
    }
    free(i.bytes);
}

static void other_files_are_named(void) {
    spk_error error;
    CHECK(open_status(folder, &error) == SPK_E_IO && strstr(error.text, "directory"), "%s", error.text);
    CHECK(open_status("/nonexistent/x", &error) == SPK_E_IO && strstr(error.text, "No such file"), "%s", error.text);
    (void)unlink(other_path);
    CHECK(mkfifo(other_path, 0600) == 0, "fifo");
    CHECK(open_status(other_path, &error) == SPK_E_IO && strstr(error.text, "pipe"), "%s", error.text);
    (void)unlink(other_path);
}

/* Short files, and as large as a pack. */
static void what_was_found_is_named(void) {
    static const struct { const char *start, *text; } kinds[] = {
        { "GGUF", "a GGUF file: spk-pack makes a pack of it" },
        { "FUGG", "GGUF with its magic in reverse byte order" },
        { "\x8fSPK\n\x1a\n", "damaged, perhaps by a text-mode transfer" },           /* CR LF became LF */
        { "PK\x03\x04", "a zip archive" },
        { "<!DOCTYPE html>", "HTML or XML text: probably an error page" },
        { "\n {\"error\": 1}", "JSON text" },
        { "version https://git-lfs.github.com/spec/v1", "a Git LFS pointer" },
        { "abcd", "begins with bytes 61 62 63 64, expected 8f 53 50 4b" },
        { "a", "begins with bytes 61 00 00 00, expected 8f 53 50 4b" },
    };
    image i = model_image();
    spk_error error;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        memset(i.bytes, 0, 64);
        memcpy(i.bytes, kinds[k].start, strlen(kinds[k].start));
        for (int is_whole = 0; is_whole < 2; is_whole++) {
            write_image(pack_path, i.bytes, is_whole ? i.size_bytes : strlen(kinds[k].start));
            CHECK(open_status(pack_path, &error) == SPK_E_MAGIC && strstr(error.text, ": R1: not a .spk pack") != NULL &&
                  strstr(error.text, kinds[k].text) != NULL, "%s", error.text);
        }
    }
    free(i.bytes);
}

/* ---- Attacks with repaired digests ---- */

typedef enum { HEADER, SECTION, TENSOR } target;

/* Set `size` bytes at `offset` of the header, a section's table entry (`which`: id) or a tensor (index) to `value`. */
typedef struct {
    target      in;
    uint64_t    which;
    size_t      offset, size;
    uint64_t    value;
    spk_status  status;
    const char *text;
} attack;

#define H(field) HEADER, 0, offsetof(spk_disk_header, field), sizeof((spk_disk_header *)0)->field
#define S(id, field) SECTION, id, offsetof(spk_disk_section, field), sizeof((spk_disk_section *)0)->field
#define T(index, field) TENSOR, index, offsetof(spk_disk_tensor, field), sizeof((spk_disk_tensor *)0)->field
#define T_DIM(index, dim) TENSOR, index, offsetof(spk_disk_tensor, dims) + 8 * (dim), 8
#define NAN_BITS UINT64_C(0x7ff8000000000000)

static const attack attacks[] = {
    { H(version_major), 2, SPK_E_VERSION, "version 2.0" }, { H(version_major), 0, SPK_E_VERSION, "R2" },
    { H(flags_required), 1u << 17, SPK_E_UNSUPPORTED, "bit 17" },
    { H(file_bytes), 1u << 30, SPK_E_CORRUPT, "R5: truncated" }, { H(file_bytes), 4096, SPK_E_CORRUPT, "R5: bytes" },
    { H(section_count), 0, SPK_E_CORRUPT, "R6" }, { H(section_count), 64, SPK_E_CORRUPT, "R6" },
    { H(section_count), UINT32_MAX, SPK_E_CORRUPT, "R6" }, { H(section_count), 7, SPK_E_CORRUPT, "R6" },
    { S(SPK_SECTION_META, id), 99, SPK_E_UNSUPPORTED, "R8: needs section id 99" },
    { S(SPK_SECTION_META, flags), 1, SPK_E_UNSUPPORTED, "R8" },
    { S(SPK_SECTION_META, flags), 2, SPK_E_UNSUPPORTED, "R8" },
    { S(SPK_SECTION_META, id), SPK_SECTION_CONFIG, SPK_E_CORRUPT, "R8: section CONFIG (id 16) is there twice" },
    { S(SPK_PLACE_STATIC, id), SPK_PLACE_EXPERTS, SPK_E_CORRUPT, "R8" },
    { S(SPK_SECTION_CHUNKS, id), SPK_PLACE_EXTRA, SPK_E_CORRUPT, "R8: section CHUNKS is missing" },
    { S(SPK_SECTION_META, offset_bytes), UINT64_C(1) << 63, SPK_E_CORRUPT, "R9" },
    { S(SPK_SECTION_META, offset_bytes), UINT64_MAX - 4095, SPK_E_CORRUPT, "R9" },
    { S(SPK_SECTION_META, offset_bytes), 4096, SPK_E_CORRUPT, "R9" },
    { S(SPK_SECTION_META, offset_bytes), 0, SPK_E_CORRUPT, "R9" },
    { S(SPK_PLACE_STATIC, stored_bytes), UINT64_MAX, SPK_E_CORRUPT, "R9: section STATIC (id 1) at 12288 has 1844" },
    { S(SPK_PLACE_STATIC, stored_bytes), UINT64_MAX - 12287, SPK_E_CORRUPT, "at 12288 has 1844" },   /* ends at 0 */
    { S(SPK_PLACE_STATIC, stored_bytes), 0, SPK_E_CORRUPT, "at 12288 has 0" },
    { S(SPK_PLACE_STATIC, stored_bytes), 8192, SPK_E_CORRUPT, "R9" },
    { S(SPK_SECTION_CHUNKS, stored_bytes), 4097, SPK_E_CORRUPT, "R9: section CHUNKS (id 20) at 53248 has 4097" },
    { S(SPK_PLACE_STATIC, raw_bytes), 8192, SPK_E_CORRUPT, "R10" },
    { S(SPK_PLACE_STATIC, reserved), 1, SPK_E_CORRUPT, "R10" },
    { S(SPK_PLACE_STATIC, item_count), 2, SPK_E_CORRUPT, "R10: section STATIC has 4096 bytes in 2 chunks" },
    { S(SPK_SECTION_TENSORS, item_count), UINT64_MAX, SPK_E_LIMIT, "R10" },
    { S(SPK_SECTION_TENSORS, item_count), 4, SPK_E_CORRUPT, "R10" },
    { S(SPK_SECTION_CHUNKS, item_count), UINT64_C(1) << 60, SPK_E_CORRUPT, "R10" },   /* times 16 wraps to 0 */
    { S(SPK_SECTION_CONFIG, stored_bytes), 127, SPK_E_CORRUPT, "R10" },
    { S(SPK_SECTION_META, item_count), 65537, SPK_E_LIMIT, "R10" },
    { S(SPK_SECTION_META, raw_bytes), UINT64_C(1) << 31, SPK_E_LIMIT, "R10" },
    { S(SPK_SECTION_META, raw_bytes), 1 << 30, SPK_E_CORRUPT, "R14" },
    { S(SPK_SECTION_META, raw_bytes), sizeof kv_bytes - 2, SPK_E_CORRUPT, "R14" },
    { S(SPK_SECTION_META, item_count), 2, SPK_E_CORRUPT, "R14" },
    { T(1, name), 0, SPK_E_CORRUPT, "R15" }, { TENSOR, 1, 4, 1, '\n', SPK_E_CORRUPT, "R15" },
    { TENSOR, 1, 63, 1, 'x', SPK_E_CORRUPT, "R15" }, { TENSOR, 1, 3, 1, 0, SPK_E_CORRUPT, "R15" },
    { T(1, type), 200, SPK_E_UNSUPPORTED, "R16: tensor 'blk.0.ffn_gate_exps.weight': type id 200" },
    { T(1, type), UINT32_MAX, SPK_E_UNSUPPORTED, "R16" }, { T(1, source_type), 39, SPK_E_UNSUPPORTED, "MXFP4" },
    { T(1, layout), 9, SPK_E_UNSUPPORTED, "layout id 9" }, { T(1, layout), 0, SPK_E_UNSUPPORTED, "R16" },
    { T(1, dim_count), 0, SPK_E_CORRUPT, "R17" }, { T(1, dim_count), 5, SPK_E_CORRUPT, "R17" },
    { T(1, dim_count), 2, SPK_E_CORRUPT, "R17" }, { T_DIM(1, 1), 0, SPK_E_CORRUPT, "R17" },
    { T_DIM(1, 3), 2, SPK_E_CORRUPT, "R17" }, { T_DIM(1, 0), 255, SPK_E_CORRUPT, "R17" },
    { T_DIM(0, 0), 33, SPK_E_CORRUPT, "R17" }, { T(0, layout), SPK_LAYOUT_T32, SPK_E_CORRUPT, "R17: tensor 'token" },
    { T(1, offset_bytes), 32, SPK_E_CORRUPT, "R18" }, { T(3, offset_bytes), 8, SPK_E_CORRUPT, "R18" },
    { T(1, unit_stride_bytes), 9217, SPK_E_CORRUPT, "R18" }, { T(1, matrix_stride_bytes), 12289, SPK_E_CORRUPT, "R18" },
    { T(3, unit_stride_bytes), 1026, SPK_E_CORRUPT, "R18" },
    { T(1, section), 0, SPK_E_CORRUPT, "R19" }, { T(1, section), 5, SPK_E_CORRUPT, "R19" },
    { T(1, section), SPK_PLACE_EXTRA, SPK_E_CORRUPT, "R19" }, { T(1, section), SPK_PLACE_STATIC, SPK_E_CORRUPT, "R19" },
    { T_DIM(1, 0), UINT64_C(1) << 63, SPK_E_CORRUPT, "R19" }, { T_DIM(1, 1), UINT64_MAX, SPK_E_CORRUPT, "R19" },
    { T_DIM(1, 2), UINT64_C(1) << 62, SPK_E_CORRUPT, "R19" }, { T_DIM(1, 2), 3, SPK_E_CORRUPT, "R19" },
    { T_DIM(1, 1), 33, SPK_E_CORRUPT, "R19" },
    { T(1, unit_stride_bytes), 4544, SPK_E_CORRUPT, "R19" }, { T(0, unit_stride_bytes), 0, SPK_E_CORRUPT, "R19" },
    { T(0, unit_stride_bytes), UINT64_MAX - 63, SPK_E_CORRUPT, "R19" },
    { T(0, unit_stride_bytes), UINT64_C(1) << 61, SPK_E_CORRUPT, "R19" },
    { T(0, unit_stride_bytes), 584, SPK_E_CORRUPT, "R19" },
    { T(1, matrix_stride_bytes), 4544, SPK_E_CORRUPT, "R19" }, { T(1, matrix_stride_bytes), 0, SPK_E_CORRUPT, "R19" },
    { T(1, matrix_stride_bytes), UINT64_MAX - 63, SPK_E_CORRUPT, "R19" },
    { T(1, matrix_stride_bytes), 20032, SPK_E_CORRUPT, "R19" }, { T(3, matrix_stride_bytes), 64, SPK_E_CORRUPT, "R19" },
    { T(3, offset_bytes), 3088, SPK_E_CORRUPT, "R19" }, { T(3, offset_bytes), UINT64_MAX - 15, SPK_E_CORRUPT, "R19" },
    { T(1, relative_rmse), NAN_BITS, SPK_E_CORRUPT, "R20" }, { T(1, cosine), NAN_BITS, SPK_E_CORRUPT, "R20" },
    { T(1, max_abs_error), NAN_BITS, SPK_E_CORRUPT, "R20" }, { T(1, reserved0), 1, SPK_E_CORRUPT, "R20" },
    { T(1, reserved[2]), 1, SPK_E_CORRUPT, "R20" },
    { T(3, offset_bytes), 1024, SPK_E_CORRUPT, "R21" }, { T(3, offset_bytes), 512, SPK_E_CORRUPT, "R21" },
    { T(2, offset_bytes), 4544, SPK_E_CORRUPT, "R21" }, { T(2, offset_bytes), 0, SPK_E_CORRUPT, "R21" },
};

static void each_rule_is_checked(void) {
    image good = model_image();
    for (size_t a = 0; a < sizeof attacks / sizeof *attacks; a++) {
        const attack *t = &attacks[a];
        image i = { malloc(good.size_bytes), good.size_bytes };
        memcpy(i.bytes, good.bytes, good.size_bytes);
        uint8_t *base = t->in == HEADER ? i.bytes
                      : t->in == SECTION ? (uint8_t *)section_of(&i, (uint32_t)t->which)
                                         : (uint8_t *)tensor_of(&i, t->which);
        memset(base + t->offset, 0, t->size);
        memcpy(base + t->offset, &t->value, t->size < 8 ? t->size : 8);
        seal(&i);
        write_image(pack_path, i.bytes, i.size_bytes);
        spk_error error;
        spk_status status = open_status(pack_path, &error);
        CHECK(status == t->status && strstr(error.text, t->text) != NULL, "attack %zu (expected %s): %s: %s", a,
              t->text, spk_status_name(status), error.text);
        free(i.bytes);
    }
    free(good.bytes);
}

/* Later minor versions, optional features and optional sections do not stop an old reader. */
static void optional_things_are_ignored(void) {
    image i = model_image();
    spk_error error;
    spk_disk_header *h = header_of(&i);
    h->version_minor = 77;
    h->flags_optional = UINT32_MAX;
    add_unknown_section(&i);
    write_image(pack_path, i.bytes, i.size_bytes);
    CHECK(check_status(pack_path, &error) == SPK_OK, "%s", error.text);
    i.bytes[i.size_bytes - 4090] ^= 1;                   /* but what is in the file is verified */
    write_image(pack_path, i.bytes, i.size_bytes);
    CHECK(open_status(pack_path, &error) == SPK_OK, "%s", error.text);
    CHECK(check_status(pack_path, &error) == SPK_E_CHECKSUM && strstr(error.text, "R24"), "%s", error.text);
    free(i.bytes);
}

/* Each pack breaks one rule that a patched field cannot express. */
static void check_broken(image *i, spk_status want, const char *text) {
    spk_error error;
    write_image(pack_path, i->bytes, i->size_bytes);
    spk_status status = open_status(pack_path, &error);
    CHECK(status == want && strstr(error.text, text), "expected %s: %s", text, error.text);
    free(i->bytes);
}

static void other_header_rules_are_checked(void) {
    image i = model_image();
    i.bytes[4000] = 1;
    check_broken(&i, SPK_E_CHECKSUM, "R3");
    i = model_image();
    header_of(&i)->sections[40].digest.bytes[3] = 1;
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R6: unused");
    i = model_image();
    header_of(&i)->file_bytes = i.size_bytes -= 10;
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R9: padding of section CHUNKS (id 20) reaches past the file");
    i = model_image();
    header_of(&i)->file_bytes = i.size_bytes += 4096;
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R9: sections end at 57344, file at 61440");
    i = model_image();
    spk_disk_section *chunks = section_of(&i, SPK_SECTION_CHUNKS);
    chunks->item_count = 4;
    chunks->stored_bytes = chunks->raw_bytes = 64;
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R10: CHUNKS has 4 digests for 3 chunks");
    i = model_image();
    spk_disk_section *data = section_of(&i, SPK_PLACE_STATIC);
    data->stored_bytes = data->raw_bytes = 4095;
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R10: section STATIC has 4095 bytes in 1 chunks");
    i = model_image();
    header_of(&i)->root.bytes[0] ^= 1;
    header_of(&i)->checksum = spk_header_checksum(header_of(&i));
    check_broken(&i, SPK_E_CHECKSUM, "R7");
}

static void other_rules_are_checked(void) {
    image i = model_image();
    i.bytes[section_of(&i, SPK_SECTION_CONFIG)->offset_bytes + 128] = 1;
    check_broken(&i, SPK_E_CORRUPT, "R11");
    i = model_image();
    i.bytes[section_of(&i, SPK_SECTION_CHUNKS)->offset_bytes + 17] ^= 1;
    seal(&i);
    check_broken(&i, SPK_E_CHECKSUM, "R12: section EXPERTS");
    i = model_image();
    i.bytes[section_of(&i, SPK_SECTION_CONFIG)->offset_bytes + 127] = 1;
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R13");
    uint32_t expert_count = 0;                           /* a division by it awaits who believes this */
    i = model_image();
    memcpy(i.bytes + section_of(&i, SPK_SECTION_CONFIG)->offset_bytes + 76, &expert_count, sizeof expert_count);
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R13: section EXPERTS in a pack of a model without experts");
    expert_count = 3;
    i = model_image();
    memcpy(i.bytes + section_of(&i, SPK_SECTION_CONFIG)->offset_bytes + 76, &expert_count, sizeof expert_count);
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R19: tensor 'blk.0.ffn_gate_exps.weight' in section EXPERTS has 2 matrices");
    i = model_image();
    memcpy(tensor_of(&i, 4)->name, tensor_of(&i, 3)->name, 64);
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R15: tensor 'blk.0.attn_norm.weight' is there twice");
}

/* In PROVENANCE, byte `at` after the first occurrence of `text` becomes `value`. */
static void check_record(const char *text, size_t at, uint8_t value, const char *message) {
    image i = model_image();
    const spk_disk_section *s = section_of(&i, SPK_SECTION_PROVENANCE);
    uint8_t *found = memmem(i.bytes + s->offset_bytes, s->stored_bytes, text, strlen(text));
    CHECK(found != NULL, "%s", text);
    if (found != NULL) found[at] = value;
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, message);
}

/* Replaces the value of a number in PROVENANCE by an array of one such number. */
static void number_becomes_array(const char *key, uint32_t type) {
    static const uint64_t one = 1;
    const uint32_t array = SPK_KV_ARRAY;
    image i = model_image();
    spk_disk_section *s = section_of(&i, SPK_SECTION_PROVENANCE);
    uint8_t *start = i.bytes + s->offset_bytes, *kind = memmem(start, s->stored_bytes, key, strlen(key));
    CHECK(kind != NULL, "%s", key);
    kind += strlen(key);
    uint8_t *value = kind + sizeof type, *end = start + s->stored_bytes;
    memmove(value + 12, value, (size_t)(end - value));   /* into the padding */
    memcpy(kind, &array, sizeof array);
    memcpy(value, &type, sizeof type);
    memcpy(value + 4, &one, sizeof one);
    s->stored_bytes += 12;
    s->raw_bytes += 12;
    seal(&i);
    char text[80];
    (void)snprintf(text, sizeof text, "R22: PROVENANCE has no number '%s'", key);
    check_broken(&i, SPK_E_CORRUPT, text);
}

static void provenance_has_no_arrays(void) {
    number_becomes_array("source.bytes", SPK_KV_U64);
    number_becomes_array("source.alignment", SPK_KV_U64);
    number_becomes_array("source.gguf_version", SPK_KV_U32);
}

static void provenance_is_checked(void) {
    check_record("source.name", 0, 'S', "R22: PROVENANCE has no text 'source.name'");
    check_record("tiny model", 4, 0, "R22: PROVENANCE has no text 'source.name'");       /* holds a NUL */
    check_record("source.bytes", 0, 'S', "R22: PROVENANCE has no number 'source.bytes'");
    check_record("source.alignment", 16, SPK_KV_F64, "R22: PROVENANCE has no number 'source.alignment'");
    check_record("010203ff", 7, 'F', "R22: PROVENANCE: 'source.gguf_version' or 'source.xxh3_128' is malformed");
    check_record("weights.name", 0, 'W', "R22: PROVENANCE has no text 'weights.name'");
    check_record("weights.bytes", 0, 'W', "R22: PROVENANCE has no number 'weights.bytes'");
    check_record("weights.xxh3_128", 0, 'W', "R22: PROVENANCE has no text 'weights.xxh3_128'");
    check_record("better model", 0, 0, "R22: PROVENANCE has no text 'weights.name'");    /* holds a NUL */
    check_record("0908ab", 5, 'B', "R22: PROVENANCE: 'weights.name' or 'weights.xxh3_128' is malformed");
    image i = model_image();
    section_of(&i, SPK_SECTION_PROVENANCE)->item_count--;
    seal(&i);
    check_broken(&i, SPK_E_CORRUPT, "R22");
}

/* META is replaced by `frame`, which claims raw_bytes in the table; `text` is in the message, behind the rule. */
static void check_meta(const void *frame, uint64_t size_bytes, uint64_t raw_bytes, uint64_t kv_count, const char *text) {
    image i = model_image();
    spk_disk_section *s = section_of(&i, SPK_SECTION_META);
    memset(i.bytes + s->offset_bytes, 0, 4096);
    memcpy(i.bytes + s->offset_bytes, frame, size_bytes);
    s->stored_bytes = size_bytes;
    s->raw_bytes = raw_bytes;
    s->item_count = kv_count;
    seal(&i);
    char message[120];
    (void)snprintf(message, sizeof message, "R14: %s", text);
    check_broken(&i, SPK_E_CORRUPT, message);
}

/* Entries that do not parse: the rule and the section are named, whichever of the two it is. */
static void bad_entries_name_rule_and_section(void) {
    static const struct { const char *text; size_t at; uint8_t value; const char *message; } records[] = {
        { "source.name", 11, 77, "R22: PROVENANCE: metadata entry 1 of 12 'source.name': unknown value type 77" },
        { "source.name", 18, 1, "R22: PROVENANCE: metadata entry 1 of 12 'source.name': the string has length" },
        { "source.gguf_version", 19, SPK_KV_BOOL, "R22: PROVENANCE: metadata entry 8 of 12 'source.gguf_version': boolean with value 3" },
    };
    for (size_t k = 0; k < sizeof records / sizeof *records; k++)
        check_record(records[k].text, records[k].at, records[k].value, records[k].message);
    for (size_t cut = 1; cut <= 3; cut++) {
        image i = model_image();
        spk_disk_section *s = section_of(&i, SPK_SECTION_PROVENANCE);
        s->stored_bytes = s->raw_bytes -= cut;
        memset(i.bytes + s->offset_bytes + s->stored_bytes, 0, cut);
        seal(&i);
        check_broken(&i, SPK_E_CORRUPT, "R22: PROVENANCE: metadata entry 12 of 12 'weights.xxh3_128': the string has length 32");
    }
    static const struct { size_t at; uint8_t value; uint64_t kv_count; const char *text; } entries[] = {
        { 0, 0, 3, "META: metadata entry 1 of 3: empty key" },
        { 28, 77, 3, "META: metadata entry 1 of 3 'general.architecture': unknown value type 77" },
        { 3, 1, 3, "META: metadata entry 1 of 3: the key has length" },
        { 0, 20, 60000, "META: 60000 metadata entries need at least" },
        { 0, 20, 4, "META: metadata entry 4 of 4: the data ends inside the length of the key: truncated" },
    };
    for (size_t k = 0; k < sizeof entries / sizeof *entries; k++) {
        uint8_t raw[sizeof kv_bytes], frame[2 * sizeof kv_bytes + 64];
        memcpy(raw, kv_bytes, sizeof kv_bytes);
        raw[entries[k].at] = entries[k].value;
        size_t size = ZSTD_compress(frame, sizeof frame, raw, sizeof kv_bytes - 1, 3);
        check_meta(frame, size, sizeof kv_bytes - 1, entries[k].kv_count, entries[k].text);
    }
}

static void packed_metadata_cannot_grow(void) {
    enum { BOMB_BYTES = 8 << 20 };
    uint8_t frame[4096];
    uint8_t *zeros = calloc(1, BOMB_BYTES);
    size_t size = ZSTD_compress(frame, sizeof frame, zeros, BOMB_BYTES, 3);
    free(zeros);
    CHECK(!ZSTD_isError(size), "a bomb of %zu bytes", size);
    check_meta(frame, size, 100, 1, "META's zstd frame declares 8388608 bytes, expected 100");
    check_meta(frame, size, BOMB_BYTES, 0, "0 metadata entries take 0 of 8388608 bytes");
    check_meta(frame, size - 1, BOMB_BYTES, 0, "META is not one whole zstd frame");      /* cut */
    size = ZSTD_compress(frame, sizeof frame, kv_bytes, sizeof kv_bytes - 1, 3);
    /* Good metadata, but in two frames. */
    uint8_t frames[4096];
    size_t half = ZSTD_compress(frames, sizeof frames, kv_bytes, 50, 3);
    size_t other_half = ZSTD_compress(frames + half, sizeof frames - half, kv_bytes + 50, sizeof kv_bytes - 1 - 50, 3);
    check_meta(frames, half + other_half, sizeof kv_bytes - 1, KV_COUNT, "META's zstd frame declares 50 bytes, expected");
    /* A frame that says less than it holds: its content size (one byte at 5, for sizes below 256) is patched. */
    frame[5] = 50;
    check_meta(frame, size, 50, 1, "META does not unpack to 50 bytes");
    check_meta("no zstd frame", 13, 100, 1, "META begins with 7a206f6e, expected a zstd frame (fd2fb528)");
    check_meta("\x28\xb5", 2, 100, 1, "META begins with 00000000");
}

/* Frames that the library takes for empty ones: to be skipped, of any of the sixteen kinds; and good metadata with such a frame
 * before or behind them, or something else behind. */
static void only_one_real_frame_is_metadata(void) {
    enum { KV_SIZE = sizeof kv_bytes - 1 };
    for (uint8_t kind = 0; kind < 16; kind++) {
        char text[80];
        uint8_t skipped[4096] = { (uint8_t)(0x50 | kind), 0x2a, 0x4d, 0x18, 16 };
        (void)snprintf(text, sizeof text, "META begins with 184d2a5%x, expected a zstd frame (fd2fb528)", kind);
        check_meta(skipped, 24, 0, 0, text);
        size_t size = ZSTD_compress(skipped + 24, sizeof skipped - 24, kv_bytes, KV_SIZE, 3);
        check_meta(skipped, 24 + size, KV_SIZE, KV_COUNT, text);
    }
    uint8_t frames[4096];
    size_t size = ZSTD_compress(frames, sizeof frames, kv_bytes, KV_SIZE, 3), empty_size;
    memcpy(frames + size, "\x50\x2a\x4d\x18\0\0\0\0", 8);
    check_meta(frames, size + 8, KV_SIZE, KV_COUNT, "META's zstd frame has");
    frames[size] = 0;
    check_meta(frames, size + 1, KV_SIZE, KV_COUNT, "META's zstd frame has");
    empty_size = ZSTD_compress(frames + size, sizeof frames - size, "", 0, 3);           /* adds nothing, and is one more */
    check_meta(frames, size + empty_size, KV_SIZE, KV_COUNT, "META's zstd frame has");
    ZSTD_CCtx *context = ZSTD_createCCtx();
    (void)ZSTD_CCtx_setParameter(context, ZSTD_c_contentSizeFlag, 0);
    size = ZSTD_compress2(context, frames, sizeof frames, kv_bytes, KV_SIZE);
    (void)ZSTD_freeCCtx(context);
    check_meta(frames, size, KV_SIZE, KV_COUNT, "META's zstd frame does not declare its size");
}

/* Reads every row of every matrix of an accepted pack, as a kernel would. */
static void read_all_rows(const spk_pack *pack) {
    uint8_t *rows = malloc(1 << 20);
    for (uint64_t i = 0; i < spk_pack_tensor_count(pack); i++) {
        const spk_tensor *t = &spk_pack_tensors(pack)[i];
        uint64_t section_bytes;
        const uint8_t *section = spk_pack_section(pack, t->section, &section_bytes);
        for (uint64_t m = 0; m < spk_tensor_matrix_count(t); m++) {
            spk_matrix matrix = spk_tensor_matrix(t, section, m);
            spk_layout_get_rows(&matrix, 0, t->dims[1], rows);
        }
    }
    free(rows);
}

/* One to four bytes of table, directory, metadata and provenance set to small or extreme values, digests repaired:
 * either an error, or a pack whose every row can be read.  The sanitizers are the judges. */
static void mutated_packs_are_refused_or_safe(void) {
    enum { TRIALS = 4000 };
    static const uint8_t values[] = { 0, 1, 2, 3, 4, 0x0f, 0x10, 0x40, 0x7f, 0x80, 0xff };
    image good = model_image();
    image i = { malloc(good.size_bytes), good.size_bytes };
    uint64_t seed = 11, accepted = 0;
    for (int trial = 0; trial < TRIALS; trial++) {
        memcpy(i.bytes, good.bytes, good.size_bytes);
        for (uint64_t n = 1 + below(&seed, 4); n-- > 0;) {
            spk_disk_section whole = { .offset_bytes = 64, .stored_bytes = 8 * 64 }, *s = &whole;
            static const uint32_t ids[] = { SPK_SECTION_TENSORS, SPK_SECTION_TENSORS, SPK_SECTION_META,
                                            SPK_SECTION_PROVENANCE };
            if (below(&seed, 8)) s = section_of(&good, ids[below(&seed, 4)]);
            i.bytes[s->offset_bytes + below(&seed, s->stored_bytes)] = values[below(&seed, sizeof values)];
        }
        seal(&i);
        write_image(pack_path, i.bytes, i.size_bytes);
        spk_error error;
        spk_pack *pack = NULL;
        if (spk_pack_open(pack_path, &pack, &error) != SPK_OK) continue;
        accepted++;
        read_all_rows(pack);
        spk_status status = spk_pack_verify(pack, 1, NULL, NULL, &error);
        CHECK(status == SPK_OK, "trial %d: the data were not touched: %s", trial, error.text);
        spk_pack_close(pack);
    }
    CHECK(accepted > TRIALS / 50 && accepted < TRIALS, "%u accepted", (unsigned)accepted);
    free(i.bytes);
    free(good.bytes);
}

/* ---- Overlap ---- */

/* Marks the bytes of a tensor; true if one was marked before. */
static bool mark(const spk_tensor *t, uint8_t *map) {
    spk_tensor_extent e = spk_tensor_extent_of(t);
    bool hit = false;
    for (uint64_t m = 0; m < e.matrix_count; m++)
        for (uint64_t u = 0; u < e.unit_count; u++)
            for (uint64_t b = 0; b < e.unit_bytes; b++) {
                uint8_t *at = map + t->offset_bytes + m * t->matrix_stride_bytes + u * t->unit_stride_bytes + b;
                hit |= *at != 0;
                *at = 1;
            }
    return hit;
}

/* Random placements of small tensors against a map of bytes: what the rule accepts never overlaps. */
static void accepted_placements_never_overlap(void) {
    enum { BYTES = 4096, TRIALS = 20000 };
    static const uint64_t sections[SPK_PLACE_COUNT] = { BYTES, 0, 0, 0 };
    uint64_t seed = 5, accepted = 0, interleaved = 0, overlapping = 0;
    for (int trial = 0; trial < TRIALS; trial++) {
        spk_tensor t[3];
        uint64_t unit = 16 * (1 + below(&seed, 12)), matrix = unit * (1 + below(&seed, 4)) + 16 * below(&seed, 3);
        for (int k = 0; k < 3; k++) {
            t[k] = (spk_tensor){ .type = SPK_TYPE_F32, .dim_count = 3, .layout = SPK_LAYOUT_ROWS,
                                 .section = SPK_PLACE_STATIC, .offset_bytes = 16 * below(&seed, 64) };
            t[k].name[0] = (char)('a' + k);
            t[k].dims[0] = 4 * (1 + below(&seed, 8));
            t[k].dims[1] = 1 + below(&seed, 3);
            t[k].dims[2] = 1 + below(&seed, 3);
            t[k].dims[3] = 1;
            t[k].unit_stride_bytes = below(&seed, 8) ? unit : 16 * (1 + below(&seed, 12));
            if (t[k].dims[2] > 1) t[k].matrix_stride_bytes = below(&seed, 8) ? matrix : 16 * (1 + below(&seed, 20));
        }
        spk_error error;
        bool taken = spk_rules_tensors(t, 3, sections, 0, "", &error) == SPK_OK;
        bool by_overlap = !taken && strstr(error.text, "R21") != NULL;
        if (!taken && !by_overlap) continue;             /* broken for another reason */
        static uint8_t map[BYTES];
        memset(map, 0, sizeof map);
        bool hit = false;
        for (int k = 0; k < 3; k++) hit |= mark(&t[k], map);
        CHECK(!(taken && hit), "trial %d", trial);
        accepted += taken;
        overlapping += hit;
        for (int k = 1; k < 3; k++)
            interleaved += taken && t[k].offset_bytes > t[0].offset_bytes &&
                           t[k].offset_bytes < t[0].offset_bytes + spk_tensor_span_bytes(&t[0]);
    }
    CHECK(accepted > 100 && interleaved > 100 && overlapping > 100, "too few of a kind: %u %u %u", (unsigned)accepted,
          (unsigned)interleaved, (unsigned)overlapping);
}

/* Vectors of 16 bytes that alternate with a stride of 16 * count. */
static spk_status status_of_interleaved(uint32_t count, spk_error *error) {
    static const uint64_t sections[SPK_PLACE_COUNT] = { 4096, 0, 0, 0 };
    spk_tensor tensors[SPK_SHARED_TENSOR_MAX + 1] = { 0 };
    for (uint32_t i = 0; i < count; i++)
        tensors[i] = (spk_tensor){ .name = { (char)('a' + i) }, .dim_count = 2, .dims = { 4, 3, 1, 1 },
                                   .layout = SPK_LAYOUT_ROWS, .section = SPK_PLACE_STATIC, .offset_bytes = 16 * i,
                                   .unit_stride_bytes = 16 * count };
    return spk_rules_tensors(tensors, count, sections, 0, "x", error);
}

static void interleaving_is_bounded(void) {
    spk_error error;
    CHECK(status_of_interleaved(SPK_SHARED_TENSOR_MAX, &error) == SPK_OK, "%s", error.text);
    CHECK(status_of_interleaved(SPK_SHARED_TENSOR_MAX + 1, &error) == SPK_E_LIMIT && strstr(error.text, "R21"), "%s",
          error.text);
}

/* The rules must take what the packer makes: every bundled model, as it is placed. */
static void placements_of_real_models_are_taken(void) {
    static const char *const paths[] = { "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf",
                                         "tests/models/tiny-qwen3moe-q4_k_m.gguf",
                                         "tests/models/tiny-qwen35-q4_k_m.gguf" };
    for (size_t p = 0; p < sizeof paths / sizeof *paths; p++) {
        spk_error error = { 0 };
        spk_gguf *gguf = NULL;
        CHECK_OK(spk_gguf_open(paths[p], &gguf, &error), error);
        if (gguf == NULL) continue;
        uint64_t count = spk_gguf_tensor_count(gguf), section_bytes[SPK_PLACE_COUNT];
        spk_tensor *tensors = calloc(count, sizeof *tensors);
        for (uint64_t i = 0; i < count; i++) spk_tensor_from_gguf(spk_gguf_tensor_at(gguf, i), &tensors[i]);
        spk_model_config config;
        CHECK_OK(spk_model_config_read(spk_gguf_kvs(gguf), tensors, count, paths[p], &config, &error), error);
        CHECK_OK(spk_model_place(&config, tensors, count, section_bytes, &error), error);
        CHECK_OK(spk_rules_tensors(tensors, count, section_bytes, config.expert_count, paths[p], &error), error);
        free(tensors);
        spk_gguf_close(gguf);
    }
}

int main(void) {
    if (!open_folder()) return 1;
    RUN(every_bit_flip_is_found);
    RUN(cut_and_grown_files_are_refused);
    RUN(other_files_are_named);
    RUN(what_was_found_is_named);
    RUN(each_rule_is_checked);
    RUN(optional_things_are_ignored);
    RUN(other_header_rules_are_checked);
    RUN(other_rules_are_checked);
    RUN(provenance_is_checked);
    RUN(bad_entries_name_rule_and_section);
    RUN(provenance_has_no_arrays);
    RUN(packed_metadata_cannot_grow);
    RUN(only_one_real_frame_is_metadata);
    RUN(mutated_packs_are_refused_or_safe);
    RUN(accepted_placements_never_overlap);
    RUN(interleaving_is_bounded);
    RUN(placements_of_real_models_are_taken);
    close_folder();
    return CHECK_EXIT();
}
