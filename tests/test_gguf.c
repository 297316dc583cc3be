/* tests/test_gguf.c - GGUF metadata, reader and writer on valid files: what is in the file is what comes back. */
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include "formats/blocks.h"
#include "formats/gguf.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

static char dir[GB_PATH_MAX];

/* Open what was built; NULL after a failed check.  Frees the build. */
static spk_gguf *open_build(gguf_build *b, const char *name) {
    char      path[GB_PATH_MAX];
    spk_gguf *gguf = NULL;
    spk_error err = { 0 };
    gb_save(b, gb_path(path, dir, name));
    gb_free(b);
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    return gguf;
}

/* ---- metadata ---- */

/* Name, value type, C type and three values for every number type; with bool and string, each once as a scalar and
 * once as an array, 24 entries. */
#define FOR_SCALARS(ROW)                                                                                  \
    ROW(u8, SPK_KV_U8, uint8_t, 0, 7, 255) ROW(i8, SPK_KV_I8, int8_t, -128, -1, 127)                      \
    ROW(u16, SPK_KV_U16, uint16_t, 0, 7, 65535) ROW(i16, SPK_KV_I16, int16_t, -32768, -1, 32767)          \
    ROW(u32, SPK_KV_U32, uint32_t, 0, 7, UINT32_MAX) ROW(i32, SPK_KV_I32, int32_t, INT32_MIN, -1, 1 << 30) \
    ROW(u64, SPK_KV_U64, uint64_t, 0, 7, UINT64_C(1) << 63)                                               \
    ROW(i64, SPK_KV_I64, int64_t, INT64_MIN, -1, INT64_MAX - 1023)                                        \
    ROW(f32, SPK_KV_F32, float, -1.5f, 0, 3e38f) ROW(f64, SPK_KV_F64, double, -1.5, 0, 1e300)

static void build_all_types(gguf_build *b, uint32_t version) {
    gb_header(b, version, 0, 24);
#define ROW(name, kind, ctype, first, second, third)         \
    {                                                        \
        const ctype values[] = { (first), (second), (third) }; \
        gb_kv(b, "one." #name, (kind), &values[2], sizeof values[2]); \
        gb_array(b, "many." #name, (kind), 3);               \
        gb_raw(b, values, sizeof values);                    \
    }
    FOR_SCALARS(ROW)
#undef ROW
    gb_kv(b, "one.bool", SPK_KV_BOOL, "\1", 1);
    gb_array(b, "many.bool", SPK_KV_BOOL, 3);
    gb_raw(b, "\0\1\0", 3);
    gb_key(b, "one.string", SPK_KV_STRING);
    gb_text(b, "a\0b\n", 4);
    gb_array(b, "many.string", SPK_KV_STRING, 3);
    gb_string(b, "x");
    gb_string(b, "");
    gb_string(b, "long enough");
}

static void check_all_types(const spk_kv_set *kvs) {
    spk_text text;
    bool     flag = false;
    double   number;
    uint64_t integer;
#define ROW(name, kind, ctype, first, second, third)                                                        \
    {                                                                                                       \
        const ctype   values[] = { (first), (second), (third) };                                            \
        const spk_kv *one = spk_kv_find(kvs, "one." #name), *many = spk_kv_find(kvs, "many." #name);        \
        CHECK(one != NULL && one->type == (kind) && one->element_type == (kind) && one->count == 1, #name); \
        CHECK(many != NULL && many->type == SPK_KV_ARRAY && many->element_type == (kind) && many->count == 3, #name); \
        CHECK(spk_kv_f64(one, 0, &number) && number == (double)values[2], "%s: %g", #name, number);         \
        for (uint64_t i = 0; i < 3; i++) {                                                                  \
            bool is_float = (kind) == SPK_KV_F32 || (kind) == SPK_KV_F64;                                   \
            bool fits = !is_float && (double)values[i] >= 0;                                                \
            CHECK(spk_kv_f64(many, i, &number) && number == (double)values[i], "%s[%d]", #name, (int)i);    \
            CHECK(spk_kv_u64(many, i, &integer) == fits, "%s[%d]", #name, (int)i);                          \
            CHECK(!fits || (double)integer == (double)values[i], "%s[%d]", #name, (int)i);                  \
        }                                                                                                   \
        CHECK(!spk_kv_u64(many, 3, &integer) && !spk_kv_f64(many, 3, &number), #name);                      \
        CHECK(!spk_kv_text(one, &text) && !spk_kv_bool(one, &flag), #name);                                 \
    }
    FOR_SCALARS(ROW)
#undef ROW
    CHECK(spk_kv_bool(spk_kv_find(kvs, "one.bool"), &flag) && flag, "bool");
    CHECK(!spk_kv_bool(spk_kv_find(kvs, "many.bool"), &flag), "an array is no scalar");
    CHECK(!spk_kv_u64(spk_kv_find(kvs, "one.bool"), 0, &integer), "a bool is no integer");
    const spk_kv *string = spk_kv_find(kvs, "one.string");
    CHECK(spk_kv_text(string, &text) && text.size_bytes == 4 && memcmp(text.bytes, "a\0b\n", 4) == 0, "any bytes");
    CHECK(!spk_kv_u64(string, 0, &integer) && !spk_kv_f64(string, 0, &number), "a string is no number");
}

static void every_value_type_reads_back(void) {
    for (uint32_t version = 2; version <= 3; version++) {
        gguf_build b = { 0 };
        build_all_types(&b, version);
        spk_gguf *gguf = open_build(&b, "types.gguf");
        if (gguf == NULL) continue;
        CHECK(spk_gguf_version(gguf) == version, "version %u", spk_gguf_version(gguf));
        CHECK(spk_gguf_kvs(gguf)->count == 24 && spk_gguf_tensor_count(gguf) == 0, "24 entries, no tensors");
        check_all_types(spk_gguf_kvs(gguf));
        spk_gguf_close(gguf);
    }
}

static void strings_of_an_array_come_in_order(void) {
    gguf_build b = { 0 };
    build_all_types(&b, 3);
    spk_gguf *gguf = open_build(&b, "types.gguf");
    if (gguf == NULL) return;
    static const char *const want[] = { "x", "", "long enough" };
    const spk_kv  *kv = spk_kv_find(spk_gguf_kvs(gguf), "many.string");
    const uint8_t *cursor = NULL;
    spk_text       text;
    int            count = 0;
    for (; spk_kv_next_text(kv, &cursor, &text); count++)
        CHECK(count < 3 && spk_text_equal(text, want[count]), "string %d", count);
    CHECK(count == 3 && !spk_kv_next_text(kv, &cursor, &text), "%d strings", count);
    cursor = NULL;
    CHECK(!spk_kv_next_text(spk_kv_find(spk_gguf_kvs(gguf), "many.u8"), &cursor, &text), "not an array of strings");
    CHECK(!spk_kv_next_text(NULL, &cursor, &text), "no entry");
    spk_gguf_close(gguf);
}

static void absent_keys_are_null_and_getters_refuse_them(void) {
    gguf_build b = { 0 };
    uint64_t   integer;
    double     number;
    spk_text   text;
    bool       flag;
    gb_header(&b, 3, 0, 0);
    spk_gguf *gguf = open_build(&b, "empty.gguf");
    if (gguf == NULL) return;
    const spk_kv *kv = spk_kv_find(spk_gguf_kvs(gguf), "general.name");
    CHECK(kv == NULL && !spk_kv_u64(kv, 0, &integer) && !spk_kv_f64(kv, 0, &number), "no entry");
    CHECK(!spk_kv_text(kv, &text) && !spk_kv_bool(kv, &flag), "no entry");
    CHECK(spk_gguf_tensor_find(gguf, "a") == NULL, "no tensors");
    spk_gguf_close(gguf);
    CHECK(spk_kv_find(&(spk_kv_set){ 0 }, "a") == NULL, "a zeroed set is empty");
}

/* Entries are views: their bytes, one after another, are the metadata as it lies in the file. */
static void entries_cover_the_metadata(void) {
    gguf_build b = { 0 };
    spk_kv_set set;
    uint64_t   used = 0;
    spk_error  err = { 0 };
    build_all_types(&b, 3);
    gb_fill(&b, 0xee, 5);                                /* what follows is not ours */
    const uint8_t *at = b.bytes + GB_HEADER_BYTES;
    spk_status     status = spk_kv_parse(at, b.size - GB_HEADER_BYTES, 24, "test", &set, &used, &err);
    CHECK(status == SPK_OK, "%s", err.text);
    if (status != SPK_OK) return;
    CHECK(used == b.size - GB_HEADER_BYTES - 5, "used %d", (int)used);
    for (uint64_t i = 0; i < set.count; at += set.items[i++].entry_bytes)
        CHECK(set.items[i].entry == at, "entry %d", (int)i);
    CHECK(at == b.bytes + b.size - 5, "entries end where the metadata ends");
    spk_kv_free(&set);
    CHECK(set.count == 0 && spk_kv_find(&set, "one.u8") == NULL, "freed");
    gb_free(&b);
}

/* ---- tensors ---- */

/* Three F32 tensors of 5, 1 and 8 weights, filled with bytes 1, 2, 3. */
static void build_three(gguf_build *b, uint32_t alignment, bool pad_end) {
    uint64_t second = (20 + (uint64_t)alignment - 1) / alignment * alignment;
    uint64_t third = (second + 4 + alignment - 1) / alignment * alignment;
    gb_header(b, 3, 3, 2);
    gb_kv_string(b, "general.architecture", "test");
    gb_kv_u32(b, "general.alignment", alignment);
    gb_tensor(b, "a", SPK_TYPE_F32, 0, GB_DIMS(5));
    gb_tensor(b, "b/c", SPK_TYPE_F32, second, GB_DIMS(1, 1, 1, 1));
    gb_tensor(b, "d", SPK_TYPE_F32, third, GB_DIMS(4, 2));
    gb_pad(b, alignment);
    gb_fill(b, 1, 20);
    gb_pad(b, alignment);
    gb_fill(b, 2, 4);
    gb_pad(b, alignment);
    gb_fill(b, 3, 32);
    if (pad_end) gb_pad(b, alignment);
}

static void check_data(const spk_gguf *gguf, const char *name, uint8_t value, uint64_t size_bytes) {
    const spk_gguf_tensor *t = spk_gguf_tensor_find(gguf, name);
    uint8_t                got[64];
    spk_error              err = { 0 };
    CHECK(t != NULL && t->size_bytes == size_bytes && size_bytes <= sizeof got, "%s", name);
    if (t == NULL) return;
    CHECK_OK(spk_gguf_read(gguf, t->part_index, t->file_offset_bytes, size_bytes, got, &err), err);
    for (uint64_t i = 0; i < size_bytes; i++)
        CHECK(t->data[i] == value && got[i] == value, "%s byte %d: %d, %d", name, (int)i, t->data[i], got[i]);
}

static void every_power_of_two_is_an_alignment(void) {
    for (uint32_t alignment = 1; alignment <= SPK_GGUF_ALIGNMENT_MAX; alignment *= 2)
        for (int pad_end = 0; pad_end < 2; pad_end++) {
            gguf_build b = { 0 };
            build_three(&b, alignment, pad_end);
            uint64_t  size = b.size;
            spk_gguf *gguf = open_build(&b, "alignment.gguf");
            if (gguf == NULL) continue;
            CHECK(spk_gguf_alignment_bytes(gguf) == alignment, "alignment %u", alignment);
            CHECK(spk_gguf_part_count(gguf) == 1 && spk_gguf_part_bytes(gguf, 0) == size, "one part");
            CHECK(spk_gguf_tensor_count(gguf) == 3, "three tensors");
            for (uint64_t i = 0; i < 3; i++)
                CHECK(spk_gguf_tensor_at(gguf, i)->file_offset_bytes % alignment == 0, "alignment %u", alignment);
            check_data(gguf, "a", 1, 20);
            check_data(gguf, "b/c", 2, 4);
            check_data(gguf, "d", 3, 32);
            spk_gguf_close(gguf);
        }
}

static void dimensions_come_as_stored(void) {
    gguf_build b = { 0 };
    build_three(&b, 32, true);
    spk_gguf *gguf = open_build(&b, "dims.gguf");
    if (gguf == NULL) return;
    const spk_gguf_tensor *a = spk_gguf_tensor_at(gguf, 0), *c = spk_gguf_tensor_at(gguf, 1),
                          *d = spk_gguf_tensor_at(gguf, 2);
    CHECK(strcmp(a->name, "a") == 0 && a->type == SPK_TYPE_F32, "info order");
    CHECK(a->dim_count == 1 && a->dims[0] == 5 && a->dims[1] == 1 && a->dims[3] == 1, "missing dimensions are 1");
    CHECK(c->dim_count == 4, "trailing dimensions of 1 are kept");
    CHECK(d->dim_count == 2 && d->dims[0] == 4 && d->dims[1] == 2, "ne0 first");
    spk_gguf_close(gguf);
}

static void data_may_lie_in_any_order(void) {
    gguf_build b = { 0 };
    gb_header(&b, 3, 2, 0);
    gb_tensor(&b, "last", SPK_TYPE_F32, 32, GB_DIMS(8));
    gb_tensor(&b, "first", SPK_TYPE_F32, 0, GB_DIMS(2));
    gb_pad(&b, 32);
    gb_fill(&b, 1, 8);
    gb_pad(&b, 32);
    gb_fill(&b, 2, 32);
    spk_gguf *gguf = open_build(&b, "order.gguf");
    if (gguf == NULL) return;
    check_data(gguf, "first", 1, 8);
    check_data(gguf, "last", 2, 32);
    CHECK(strcmp(spk_gguf_tensor_at(gguf, 0)->name, "last") == 0, "the list keeps the order of the infos");
    spk_gguf_close(gguf);
}

/* ---- split models ---- */

static void split_models_open_from_any_part(void) {
    static const char *const names[] = { "m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf" };
    char path[GB_PATH_MAX];
    for (uint16_t part = 0; part < 3; part++) {          /* the first has metadata only; each has its own alignment */
        gguf_build b = { 0 };
        gb_header(&b, 3, part, part == 0 ? 4 : 5);
        gb_kv_split(&b, part, 3, 3);
        gb_kv_string(&b, "general.name", part == 0 ? "first" : "other");
        if (part > 0) gb_kv_u32(&b, "general.alignment", part == 1 ? 8 : 64);
        if (part == 1) gb_tensor(&b, "a", SPK_TYPE_F32, 0, GB_DIMS(3));
        if (part == 2) gb_tensor(&b, "b", SPK_TYPE_F32, 0, GB_DIMS(2));
        if (part == 2) gb_tensor(&b, "c", SPK_TYPE_F32, 64, GB_DIMS(1));
        gb_pad(&b, part == 0 ? 32 : part == 1 ? 8 : 64);
        if (part == 1) gb_fill(&b, 1, 12);
        if (part == 2) gb_fill(&b, 2, 8);
        if (part == 2) gb_pad(&b, 64);
        if (part == 2) gb_fill(&b, 3, 4);
        gb_save(&b, gb_path(path, dir, names[part]));
        gb_free(&b);
    }
    for (int given = 0; given < 3; given++) {
        spk_gguf *gguf = NULL;
        spk_error err = { 0 };
        spk_text  name = { NULL, 0 };
        CHECK_OK(spk_gguf_open(gb_path(path, dir, names[given]), &gguf, &err), err);
        if (gguf == NULL) continue;
        CHECK(spk_gguf_part_count(gguf) == 3 && spk_gguf_tensor_count(gguf) == 3, "given part %d", given);
        for (uint32_t part = 0; part < 3; part++)
            CHECK(strcmp(spk_gguf_part_path(gguf, part), gb_path(path, dir, names[part])) == 0, "part %u", part);
        CHECK(spk_kv_text(spk_kv_find(spk_gguf_kvs(gguf), "general.name"), &name) && spk_text_equal(name, "first"),
              "metadata of the first part");
        CHECK(spk_gguf_tensor_at(gguf, 0)->part_index == 1 && spk_gguf_tensor_at(gguf, 2)->part_index == 2, "parts");
        check_data(gguf, "a", 1, 12);
        check_data(gguf, "b", 2, 8);
        check_data(gguf, "c", 3, 4);
        spk_gguf_close(gguf);
    }
}

/* ---- writer ---- */

/* A writer that is to make `gguf` again at `path`. */
static spk_gguf_writer *begin_copy(const spk_gguf *gguf, const char *path, spk_error *err) {
    const spk_kv_set     *kvs = spk_gguf_kvs(gguf);
    uint64_t              count = spk_gguf_tensor_count(gguf), kv_bytes = 0;
    spk_gguf_tensor_spec *specs = calloc(count + 1, sizeof *specs);
    spk_gguf_writer      *writer = NULL;
    if (specs == NULL) abort();
    for (uint64_t i = 0; i < kvs->count; i++) kv_bytes += kvs->items[i].entry_bytes;
    for (uint64_t i = 0; i < count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, i);
        memcpy(specs[i].name, t->name, sizeof t->name);
        memcpy(specs[i].dims, t->dims, sizeof t->dims);
        specs[i].type = t->type;
        specs[i].dim_count = t->dim_count;
    }
    CHECK_OK(spk_gguf_writer_begin(&(spk_gguf_writer_options){
        .path = path, .version = spk_gguf_version(gguf), .alignment_bytes = spk_gguf_alignment_bytes(gguf),
        .kv_bytes = kvs->count ? kvs->items[0].entry : NULL, .kv_bytes_size = kv_bytes, .kv_count = kvs->count,
        .tensors = specs, .tensor_count = count }, &writer, err), *err);
    free(specs);
    return writer;
}

static bool same_bytes(const char *a, const char *b) {
    enum { PIECE = 1 << 16 };
    static uint8_t x[PIECE], y[PIECE];
    FILE          *first = fopen(a, "rb"), *second = fopen(b, "rb");
    bool           same = first != NULL && second != NULL;
    while (same) {
        size_t got = fread(x, 1, PIECE, first);
        same = fread(y, 1, PIECE, second) == got && memcmp(x, y, got) == 0;
        if (got < PIECE) break;
    }
    if (first != NULL) fclose(first);
    if (second != NULL) fclose(second);
    return same;
}

/* Read a file, write it again from what was read, compare the bytes. */
static void check_copy(const char *path) {
    enum { PIECE = 100003 };                             /* cuts blocks and tensors anywhere */
    static uint8_t buffer[PIECE];
    char           copy[GB_PATH_MAX];
    spk_gguf      *gguf = NULL;
    spk_error      err = { 0 };
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    if (gguf == NULL) return;
    spk_gguf_writer *writer = begin_copy(gguf, gb_path(copy, dir, "copy.gguf"), &err);
    for (uint64_t i = 0; writer != NULL && i < spk_gguf_tensor_count(gguf); i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, i);
        for (uint64_t done = 0; done < t->size_bytes;) {
            uint64_t piece = t->size_bytes - done < PIECE ? t->size_bytes - done : PIECE;
            CHECK_OK(spk_gguf_read(gguf, 0, t->file_offset_bytes + done, piece, buffer, &err), err);
            CHECK(memcmp(buffer, t->data + done, piece) == 0, "read and map agree on %s", t->name);
            CHECK_OK(spk_gguf_writer_append(writer, buffer, piece, &err), err);
            done += piece;
        }
    }
    if (writer != NULL) CHECK_OK(spk_gguf_writer_commit(writer, &err), err);
    CHECK(same_bytes(path, copy), "%s: the copy differs", path);
    (void)remove(copy);
    spk_gguf_close(gguf);
}

static void rewriting_gives_the_same_bytes(void) {
    char path[GB_PATH_MAX];
    for (uint32_t alignment = 1; alignment <= 4096; alignment *= 4) {
        gguf_build b = { 0 };
        build_three(&b, alignment, true);
        gb_save(&b, gb_path(path, dir, "three.gguf"));
        gb_free(&b);
        check_copy(path);
    }
    gguf_build b = { 0 };
    build_all_types(&b, 2);
    gb_pad(&b, 32);
    gb_save(&b, gb_path(path, dir, "types.gguf"));
    gb_free(&b);
    check_copy(path);
}

static void bundled_models_rewrite_to_the_same_bytes(void) {
    static const struct { const char *path; uint64_t tensor_count; } models[] = {
        { "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf", 149 }, { "tests/models/tiny-qwen36.imatrix.gguf", 204 },
        { "tests/models/tiny-qwen3moe-q4_k_m.gguf", 51 },        { "tests/models/tiny-qwen35-q4_k_m.gguf", 56 },
        { "build/models/tiny-qwen36-bf16.gguf", 149 } };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        struct stat file;
        spk_gguf   *gguf = NULL;
        spk_error   err = { 0 };
        if (stat(models[i].path, &file) != 0 && strncmp(models[i].path, "build/", 6) == 0) {
            SKIP("build/models/tiny-qwen36-bf16.gguf is not unpacked");
            continue;
        }
        CHECK_OK(spk_gguf_open(models[i].path, &gguf, &err), err);
        if (gguf == NULL) continue;
        CHECK(spk_gguf_tensor_count(gguf) == models[i].tensor_count, "%s", models[i].path);
        spk_gguf_close(gguf);
        check_copy(models[i].path);
    }
}

/* A writer for one F32 tensor of eight weights, with changes to the options that a test made. */
static spk_status begin_small(spk_gguf_writer_options options, const char *path, spk_gguf_writer **out,
                              spk_error *err) {
    static const spk_gguf_tensor_spec spec = { "a", SPK_TYPE_F32, 1, { 8, 1, 1, 1 } };
    options.path = path;
    if (options.version == 0) options.version = 3;
    if (options.alignment_bytes == 0) options.alignment_bytes = 32;
    if (options.tensors == NULL) options.tensors = &spec;
    if (options.tensor_count == 0) options.tensor_count = 1;
    return spk_gguf_writer_begin(&options, out, err);
}

static void an_existing_file_is_replaced_only_on_demand(void) {
    char             path[GB_PATH_MAX];
    spk_gguf_writer *writer = NULL;
    spk_error        err = { 0 };
    gguf_build       b = { 0 };
    gb_fill(&b, 'x', 3);
    gb_save(&b, gb_path(path, dir, "there.gguf"));
    gb_free(&b);
    CHECK(begin_small((spk_gguf_writer_options){ 0 }, path, &writer, &err) == SPK_E_EXISTS, "%s", err.text);
    CHECK(strstr(err.text, "there.gguf") != NULL, "%s", err.text);
    CHECK_OK(begin_small((spk_gguf_writer_options){ .replace = true }, path, &writer, &err), err);
    CHECK_OK(spk_gguf_writer_append(writer, (float[8]){ 0 }, 32, &err), err);
    CHECK_OK(spk_gguf_writer_commit(writer, &err), err);
    check_copy(path);
}

static void wrong_amounts_of_data_publish_nothing(void) {
    char             path[GB_PATH_MAX];
    spk_gguf_writer *writer = NULL;
    spk_error        err = { 0 };
    int              count = gb_file_count(dir);
    gb_path(path, dir, "short.gguf");
    CHECK_OK(begin_small((spk_gguf_writer_options){ 0 }, path, &writer, &err), err);
    CHECK_OK(spk_gguf_writer_append(writer, (float[8]){ 0 }, 31, &err), err);
    CHECK(spk_gguf_writer_commit(writer, &err) == SPK_E_MISMATCH, "one byte short");
    CHECK(strstr(err.text, "got 31") != NULL && strstr(err.text, "expected 32") != NULL, "%s", err.text);
    CHECK_OK(begin_small((spk_gguf_writer_options){ 0 }, path, &writer, &err), err);
    CHECK(spk_gguf_writer_append(writer, (float[9]){ 0 }, 33, &err) == SPK_E_MISMATCH, "one byte too many");
    spk_gguf_writer_abort(writer);
    CHECK(gb_file_count(dir) == count, "nothing may be left");
}

/* One tensor of 20 bytes at alignment 32: the file may end in its padding, and its identity is that of its bytes. */
static void the_file_ends_where_it_is_wanted(void) {
    static const spk_gguf_tensor_spec spec = { "a", SPK_TYPE_F32, 1, { 5, 1, 1, 1 } };
    static uint8_t bytes[200];
    char     path[GB_PATH_MAX];
    spk_error err = { 0 };
    /* 24 of header, 8 + 1 + 4 + 8 + 4 + 8 of info: the data begin at 64 and end at 84. */
    static const uint64_t cases[][2] = { { 0, 96 }, { 83, 96 }, { 84, 84 }, { 85, 85 }, { 95, 95 }, { 96, 96 },
                                         { 97, 96 }, { UINT64_MAX, 96 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        spk_gguf_writer  *writer = NULL;
        spk_gguf_identity identity = { 0 };
        spk_gguf_writer_options options = { .replace = true, .tensors = &spec, .tensor_count = 1,
                                            .wanted_bytes = cases[i][0], .identity = &identity };
        CHECK_OK(begin_small(options, gb_path(path, dir, "end.gguf"), &writer, &err), err);
        for (int f = 0; f < 5; f++) CHECK_OK(spk_gguf_writer_append(writer, &(float){ 1 }, 4, &err), err);
        CHECK_OK(spk_gguf_writer_commit(writer, &err), err);
        FILE *file = fopen(path, "rb");
        size_t size = file == NULL ? 0 : fread(bytes, 1, sizeof bytes, file);
        if (file != NULL) (void)fclose(file);
        spk_digest digest = spk_digest_of(bytes, size);
        CHECK(size == cases[i][1] && identity.size_bytes == size, "%d wanted, %d bytes", (int)cases[i][0], (int)size);
        CHECK(memcmp(&identity.digest, &digest, sizeof digest) == 0, "case %zu: the digest", i);
        spk_gguf *gguf = NULL;
        CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
        spk_gguf_close(gguf);
    }
}

static void the_writer_keeps_the_rules_of_the_reader(void) {
    char             path[GB_PATH_MAX];
    spk_gguf_writer *writer = NULL;
    gguf_build       b = { 0 };
    int              count = gb_file_count(dir);
    gb_kv_u32(&b, "general.alignment", 64);
    const spk_gguf_tensor_spec twice[] = { { "a", SPK_TYPE_F32, 1, { 8, 1, 1, 1 } },
                                           { "a", SPK_TYPE_F32, 1, { 8, 1, 1, 1 } } };
    const spk_gguf_tensor_spec torn = { "a", SPK_TYPE_Q4_K, 1, { 128, 1, 1, 1 } };
    const spk_gguf_tensor_spec huge = { "a", SPK_TYPE_F32, 2, { UINT64_C(1) << 40, UINT64_C(1) << 18, 1, 1 } };
    const spk_gguf_tensor_spec nameless = { "", SPK_TYPE_F32, 1, { 8, 1, 1, 1 } };
    const struct { spk_gguf_writer_options options; spk_status want; const char *text; } cases[] = {
        { { .version = 1 }, SPK_E_VERSION, "version 1" },
        { { .kv_bytes = b.bytes, .kv_bytes_size = b.size, .kv_count = 1 }, SPK_E_MISMATCH, "says 64" },
        { { .kv_bytes = b.bytes, .kv_bytes_size = b.size }, SPK_E_MISMATCH, "metadata" },
        { { .alignment_bytes = 16 }, SPK_E_MISMATCH, "says 32" },
        { { .tensors = twice, .tensor_count = 2 }, SPK_E_CORRUPT, "duplicate tensor name 'a'" },
        { { .tensors = &torn, .tensor_count = 1 }, SPK_E_SHAPE, "multiple of 256" },
        { { .tensors = &huge, .tensor_count = 1 }, SPK_E_SPACE, "1152921504606" },
        { { .tensors = &nameless, .tensor_count = 1 }, SPK_E_CORRUPT, "empty name" },
    };
    gb_path(path, dir, "rules.gguf");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        spk_error  err = { 0 };
        spk_status status = begin_small(cases[i].options, path, &writer, &err);
        CHECK(status == cases[i].want && strstr(err.text, cases[i].text) != NULL, "case %zu: %s", i, err.text);
        CHECK(strstr(err.text, "rules.gguf") != NULL, "case %zu: %s", i, err.text);
    }
    CHECK(gb_file_count(dir) == count, "nothing may be left");
    gb_free(&b);
}

int main(void) {
    gb_make_dir(dir);
    RUN(every_value_type_reads_back);
    RUN(strings_of_an_array_come_in_order);
    RUN(absent_keys_are_null_and_getters_refuse_them);
    RUN(entries_cover_the_metadata);
    RUN(every_power_of_two_is_an_alignment);
    RUN(dimensions_come_as_stored);
    RUN(data_may_lie_in_any_order);
    RUN(split_models_open_from_any_part);
    RUN(rewriting_gives_the_same_bytes);
    RUN(bundled_models_rewrite_to_the_same_bytes);
    RUN(an_existing_file_is_replaced_only_on_demand);
    RUN(wrong_amounts_of_data_publish_nothing);
    RUN(the_file_ends_where_it_is_wanted);
    RUN(the_writer_keeps_the_rules_of_the_reader);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
