/* tests/test_unpack.c - packs back to GGUF: the source's bytes where that can be, and the truth about it where not. */
#include "formats/gguf.h"
#include "tests/convert_build.h"

static void a_native_pack_gives_the_source_back(void) {
    gb_make_dir(dir);
    expect_round_trip(TINY36);
    expect_round_trip("tests/models/tiny-qwen3moe-q4_k_m.gguf");
    expect_round_trip("tests/models/tiny-qwen35-q4_k_m.gguf");
    if (access(TINY36_BF16, R_OK) == 0) expect_round_trip(TINY36_BF16);
    else SKIP("build/models/tiny-qwen36-bf16.gguf is not there (make test unpacks it)");
    gb_remove_dir(dir);
}

/* ---- Legal sources that a GGUF writer of our kind would not have written ---- */

enum { ALIGNMENT = 32, LAST_PADDING = 16 };

/* The tiny model with a tensor of 16 bytes at the end of its list, so that 16 bytes of padding follow it. */
static gguf_build model_with_padded_end(void) {
    static const char last[] = "blk.0.ssm_dt.bias";
    spk_gguf *tiny;
    CHECK_OK(spk_gguf_open(TINY36, &tiny, &err), err);
    const spk_kv_set *kvs = spk_gguf_kvs(tiny);
    uint64_t count = spk_gguf_tensor_count(tiny), kv_bytes = 0, first = 0;
    for (uint64_t i = 0; i < kvs->count; i++) kv_bytes += kvs->items[i].entry_bytes;
    while (strcmp(spk_gguf_tensor_at(tiny, first++)->name, last) != 0) {}
    spk_gguf_tensor_spec *specs = calloc(count, sizeof *specs);
    for (uint64_t i = 0; i < count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(tiny, (first + i) % count);
        memcpy(specs[i].name, t->name, sizeof specs[i].name);
        memcpy(specs[i].dims, t->dims, sizeof specs[i].dims);
        specs[i].type = t->type;
        specs[i].dim_count = t->dim_count;
    }
    const char *path = in_dir("padded.gguf");
    spk_gguf_writer *writer;
    CHECK_OK(spk_gguf_writer_begin(&(spk_gguf_writer_options){
        .path = path, .version = 3, .alignment_bytes = ALIGNMENT, .kv_bytes = kvs->items[0].entry,
        .kv_bytes_size = kv_bytes, .kv_count = kvs->count, .tensors = specs, .tensor_count = count },
        &writer, &err), err);
    for (uint64_t i = 0; i < count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(tiny, (first + i) % count);
        CHECK_OK(spk_gguf_writer_append(writer, t->data, t->size_bytes, &err), err);
    }
    CHECK_OK(spk_gguf_writer_commit(writer, &err), err);
    free(specs);
    spk_gguf_close(tiny);
    gguf_build b = gb_read(path);
    (void)remove(path);
    return b;
}

static void padding_at_the_end_comes_back_as_it_was(void) {
    gb_make_dir(dir);
    gguf_build b = model_with_padded_end();
    const char *source = in_dir("source.gguf");
    static const size_t missing[] = { 0, 1, LAST_PADDING - 1, LAST_PADDING };
    for (size_t i = 0; i < sizeof missing / sizeof *missing; i++) {
        gb_save(&(gguf_build){ b.bytes, b.size - missing[i], b.capacity }, source);
        expect_round_trip(source);
    }
    gb_free(&b);
    gb_remove_dir(dir);
}

static bool same_content(const char *a_path, const char *b_path) {
    spk_gguf *a, *b;
    CHECK_OK(spk_gguf_open(a_path, &a, &err), err);
    CHECK_OK(spk_gguf_open(b_path, &b, &err), err);
    const spk_kv_set *x = spk_gguf_kvs(a), *y = spk_gguf_kvs(b);
    bool same = x->count == y->count && spk_gguf_tensor_count(a) == spk_gguf_tensor_count(b);
    for (uint64_t i = 0; same && i < x->count; i++)
        same = x->items[i].entry_bytes == y->items[i].entry_bytes &&
               memcmp(x->items[i].entry, y->items[i].entry, x->items[i].entry_bytes) == 0;
    for (uint64_t i = 0; same && i < spk_gguf_tensor_count(a); i++) {
        const spk_gguf_tensor *s = spk_gguf_tensor_at(a, i), *t = spk_gguf_tensor_at(b, i);
        same = strcmp(s->name, t->name) == 0 && s->type == t->type && s->size_bytes == t->size_bytes &&
               memcmp(s->data, t->data, s->size_bytes) == 0;
    }
    spk_gguf_close(a);
    spk_gguf_close(b);
    return same;
}

/* The pack is made and gives a GGUF of the same content, and it is known that this is not the same file. */
static void expect_equivalent(const gguf_build *b, const char *what) {
    const char *source = in_dir("source.gguf"), *packed = in_dir("a.spk"), *back = in_dir("a.gguf");
    gb_save(b, source);
    CHECK_OK(pack(source, packed, &(pack_request){ .recipe = "native" }), err);
    CHECK_OK(unpack(packed, back), err);
    CHECK(unpacked_as == SPK_UNPACK_EQUIVALENT && !same_bytes(source, back), "%s: taken for the source", what);
    CHECK(same_content(source, back), "%s: other tensors or metadata", what);
    (void)remove(packed);
    (void)remove(back);
}

/* Where the data of a tensor begin; *info gets where its offset is stored in its info. */
static size_t data_of(const gguf_build *b, const char *name, size_t *info) {
    const char *path = in_dir("look.gguf");
    spk_gguf *gguf;
    gb_save(b, path);
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    const spk_gguf_tensor *t = spk_gguf_tensor_find(gguf, name);
    const uint8_t *found = memmem(b->bytes, b->size, name, strlen(name));
    *info = (size_t)(found - b->bytes) + strlen(name) + 4 + 8 * t->dim_count + 4;
    size_t offset = t->file_offset_bytes;
    spk_gguf_close(gguf);
    (void)remove(path);
    return offset;
}

static void other_padding_and_order_are_told(void) {
    gb_make_dir(dir);
    gguf_build b = model_with_padded_end();
    size_t a_info, dt_info, a = data_of(&b, "blk.1.ssm_a", &a_info), dt = data_of(&b, "blk.1.ssm_dt.bias", &dt_info);
    const size_t paddings[] = { a + 16, dt + 31, b.size - 1 };
    for (size_t i = 0; i < sizeof paddings / sizeof *paddings; i++) {
        b.bytes[paddings[i]] = 1;
        expect_equivalent(&b, "padding");
        b.bytes[paddings[i]] = 0;
    }
    uint8_t data[16], info[8];                           /* two tensors of 16 bytes change places, not their infos */
    memcpy(data, b.bytes + a, 16);
    memcpy(b.bytes + a, b.bytes + dt, 16);
    memcpy(b.bytes + dt, data, 16);
    memcpy(info, b.bytes + a_info, 8);
    memcpy(b.bytes + a_info, b.bytes + dt_info, 8);
    memcpy(b.bytes + dt_info, info, 8);
    expect_equivalent(&b, "order");
    gb_free(&b);
    gb_remove_dir(dir);
}

static void a_requant_is_told(void) {
    gb_make_dir(dir);
    CHECK_OK(pack(TINY36, in_dir("a.spk"), &(pack_request){ .recipe = "ffn" }), err);
    CHECK_OK(unpack(in_dir("a.spk"), in_dir("a.gguf")), err);
    CHECK(unpacked_as == SPK_UNPACK_REQUANTIZED, "not told");
    gb_remove_dir(dir);
}

/* ---- Refusals ---- */

static void a_damaged_pack_is_not_unpacked(void) {
    gb_make_dir(dir);
    const char *packed = in_dir("a.spk"), *out = in_dir("a.gguf");
    CHECK_OK(pack(TINY36, packed, &(pack_request){ .recipe = "native" }), err);
    gguf_build b = gb_read(packed);
    b.bytes[b.size / 2] ^= 1;
    gb_save(&b, packed);
    CHECK(unpack(packed, out) == SPK_E_CHECKSUM, "%s", err.text);
    CHECK(gb_file_count(dir) == 1, "a file was left");
    gb_free(&b);
    gb_remove_dir(dir);
}

int main(void) {
    RUN(a_native_pack_gives_the_source_back);
    RUN(padding_at_the_end_comes_back_as_it_was);
    RUN(other_padding_and_order_are_told);
    RUN(a_requant_is_told);
    RUN(a_damaged_pack_is_not_unpacked);
    return CHECK_EXIT();
}
