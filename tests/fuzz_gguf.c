/* tests/fuzz_gguf.c - the GGUF reader: what it accepts lies in the file, can be read whole, and comes out of the writer as the
 * same tensors and metadata; writing that again gives the same bytes.  A model among them can be placed. */
#include "formats/gguf.h"
#include "formats/model.h"
#include "tests/fuzz.h"
#include "tests/malformed_rows.h"

static void write_again(const spk_gguf *gguf, const char *path) {
    spk_error err;
    const spk_kv_set *kvs = spk_gguf_kvs(gguf);
    uint64_t count = spk_gguf_tensor_count(gguf);
    spk_gguf_tensor_spec *specs = calloc(count + 1, sizeof *specs);
    for (uint64_t i = 0; i < count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, i);
        memcpy(specs[i].name, t->name, sizeof specs[i].name);
        memcpy(specs[i].dims, t->dims, sizeof specs[i].dims);
        specs[i].type = t->type;
        specs[i].dim_count = t->dim_count;
    }
    const spk_kv *last = kvs->count > 0 ? &kvs->items[kvs->count - 1] : NULL;
    spk_gguf_writer_options options = { .path = path, .replace = true, .version = spk_gguf_version(gguf),
                                        .alignment_bytes = spk_gguf_alignment_bytes(gguf), .kv_count = kvs->count,
                                        .kv_bytes = last != NULL ? kvs->items[0].entry : NULL,
                                        .kv_bytes_size = last != NULL ? (uint64_t)(last->entry + last->entry_bytes - kvs->items[0].entry) : 0,
                                        .tensors = specs, .tensor_count = count };
    spk_gguf_writer *writer = NULL;
    FUZZ_ASSERT(spk_gguf_writer_begin(&options, &writer, &err) == SPK_OK, "%s", err.text);
    for (uint64_t i = 0; i < count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, i);
        FUZZ_ASSERT(spk_gguf_writer_append(writer, t->data, t->size_bytes, &err) == SPK_OK, "%s", err.text);
    }
    FUZZ_ASSERT(spk_gguf_writer_commit(writer, &err) == SPK_OK, "%s", err.text);
    free(specs);
}

static void expect_same(const spk_gguf *a, const spk_gguf *b) {
    const spk_kv_set *x = spk_gguf_kvs(a), *y = spk_gguf_kvs(b);
    FUZZ_ASSERT(x->count == y->count && spk_gguf_tensor_count(a) == spk_gguf_tensor_count(b), "counts");
    for (uint64_t i = 0; i < x->count; i++)
        FUZZ_ASSERT(x->items[i].entry_bytes == y->items[i].entry_bytes &&
                    memcmp(x->items[i].entry, y->items[i].entry, x->items[i].entry_bytes) == 0, "entry %d", (int)i);
    for (uint64_t i = 0; i < spk_gguf_tensor_count(a); i++) {
        const spk_gguf_tensor *s = spk_gguf_tensor_at(a, i), *t = spk_gguf_tensor_at(b, i);
        FUZZ_ASSERT(strcmp(s->name, t->name) == 0 && s->type == t->type && s->size_bytes == t->size_bytes &&
                    memcmp(s->data, t->data, s->size_bytes) == 0, "%s", s->name);
    }
}

/* Everything that is offered, read; every accessor of the metadata, called. */
static uint64_t read_all(const spk_gguf *gguf) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < spk_gguf_tensor_count(gguf); i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, i);
        FUZZ_ASSERT(t->file_offset_bytes <= spk_gguf_part_bytes(gguf, 0) &&
                    t->size_bytes <= spk_gguf_part_bytes(gguf, 0) - t->file_offset_bytes, "%s", t->name);
        FUZZ_ASSERT(spk_gguf_tensor_find(gguf, t->name) == t, "%s", t->name);
        for (uint64_t k = 0; k < t->size_bytes; k++) sum += t->data[k];
    }
    for (uint64_t i = 0; i < spk_gguf_kvs(gguf)->count; i++) {
        const spk_kv *kv = &spk_gguf_kvs(gguf)->items[i];
        const uint8_t *cursor = NULL;
        spk_text text;
        uint64_t number;
        double real;
        bool truth;
        while (spk_kv_next_text(kv, &cursor, &text)) sum += text.size_bytes;
        for (uint64_t k = 0; k < kv->count && k < 100; k++) sum += (uint64_t)spk_kv_u64(kv, k, &number) + spk_kv_f64(kv, k, &real);
        sum += (uint64_t)spk_kv_bool(kv, &truth) + spk_kv_text(kv, &text) + spk_kv_scalar_u64(kv, &number);
        for (uint64_t k = 0; k < kv->value_bytes; k++) sum += kv->value[k];
    }
    return sum;
}

static void place_model(const spk_gguf *gguf) {
    uint64_t count = spk_gguf_tensor_count(gguf), section_bytes[SPK_PLACE_COUNT], run_count;
    spk_tensor *tensors = calloc(count + 1, sizeof *tensors);
    spk_model_config config;
    spk_run *runs;
    spk_error err;
    char text[SPK_FINGERPRINT_SIZE];
    for (uint64_t i = 0; i < count; i++) spk_tensor_from_gguf(spk_gguf_tensor_at(gguf, i), &tensors[i]);
    if (spk_model_config_read(spk_gguf_kvs(gguf), tensors, count, "x", &config, &err) == SPK_OK &&
        spk_model_place(&config, tensors, count, section_bytes, &err) == SPK_OK) {
        FUZZ_ASSERT(spk_model_fingerprint(&config, text, sizeof text) < sizeof text, "%s", text);
        FUZZ_ASSERT(spk_model_runs(tensors, count, section_bytes, &runs, &run_count, &err) == SPK_OK, "%s", err.text);
        free(runs);
    }
    free(tensors);
}

static bool same_files(const char *a, const char *b) {
    uint8_t x[4096], y[4096];
    FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
    if (f == NULL || g == NULL) abort();
    bool is_same = true;
    for (size_t got = 1; is_same && got > 0;) {
        got = fread(x, 1, sizeof x, f);
        is_same = fread(y, 1, sizeof y, g) == got && memcmp(x, y, got) == 0;
    }
    (void)fclose(f);
    (void)fclose(g);
    return is_same;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    spk_gguf *gguf = NULL, *again = NULL;
    spk_error err = { 0 };
    if (spk_gguf_open(fuzz_file(bytes, size), &gguf, &err) != SPK_OK) {
        FUZZ_ASSERT(err.text[0] != '\0' && strchr(err.text, '\n') == NULL, "'%s'", err.text);
        return 0;
    }
    fuzz_accepted_count++;
    volatile uint64_t sum = read_all(gguf);
    (void)sum;
    place_model(gguf);
    const char *first = fuzz_path("first.gguf"), *second = fuzz_path("second.gguf");
    write_again(gguf, first);
    FUZZ_ASSERT(spk_gguf_open(first, &again, &err) == SPK_OK, "%s", err.text);
    expect_same(gguf, again);
    write_again(again, second);
    FUZZ_ASSERT(same_files(first, second), "written twice, two files");
    spk_gguf_close(again);
    spk_gguf_close(gguf);
    return 0;
}

/* The malformed files that are small, and one with a bit of everything. */
void fuzz_seeds(void) {
    for (size_t i = 0; i < ROW_COUNT; i++) {
        gguf_build b = { 0 };
        if (rows[i].stage == PACK) continue;
        rows[i].build(&b);
        if (b.size < 8192) fuzz_seed(b.bytes, b.size);
        gb_free(&b);
    }
    for (uint32_t alignment = 1; alignment <= 64; alignment *= 8) {
        gguf_build b = { 0 };
        gb_header(&b, 3, 3, 7);
        gb_kv_u32(&b, "general.alignment", alignment);
        gb_kv_string(&b, "general.architecture", "qwen35");
        gb_array(&b, "s", SPK_KV_STRING, 2);
        gb_string(&b, "one");
        gb_string(&b, "");
        gb_array(&b, "f", SPK_KV_F32, 2);
        gb_u64(&b, 0);
        gb_kv(&b, "b", SPK_KV_BOOL, "\1", 1);
        gb_kv_f32(&b, "x", 1.5f);
        gb_array(&b, "n", SPK_KV_I16, 3);
        gb_raw(&b, "\1\0\2\0\3\0", 6);
        gb_tensor(&b, "a", SPK_TYPE_Q8_0, 0, GB_DIMS(32));
        uint64_t next = (34 + alignment - 1) / alignment * alignment, last = (next + 20 + alignment - 1) / alignment * alignment;
        gb_tensor(&b, "c", SPK_TYPE_F16, next, GB_DIMS(5, 2));
        gb_tensor(&b, "d", SPK_TYPE_BF16, last, GB_DIMS(1, 1, 2, 1));
        gb_pad(&b, alignment);
        gb_fill(&b, 1, 34);
        gb_pad(&b, alignment);
        gb_fill(&b, 2, 20);
        gb_pad(&b, alignment);
        gb_fill(&b, 3, 4);
        fuzz_seed(b.bytes, b.size);
        gb_free(&b);
    }
}
