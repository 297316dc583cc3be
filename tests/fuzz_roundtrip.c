/* tests/fuzz_roundtrip.c - GGUF -> pack -> GGUF -> pack, for a small model whose header and data are changed in any way: what is
 * packed verifies, unpacks to the same tensors and metadata, and packs again to the same sections. */
#include "formats/gguf.h"
#include "formats/outfile.h"
#include "formats/spk.h"
#include "requant/convert.h"
#include "tests/fuzz.h"
#include "tests/model_build.h"

/* False where the model is refused: then nothing may be left. */
static bool pack(const char *source_path, const char *out_path, bool may_fail) {
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    spk_error err = { 0 };
    spk_status status = spk_gguf_open(source_path, &source, &err);
    if (status == SPK_OK) status = spk_recipe_load("native", "", &recipe, &err);
    spk_convert_options options = { .source = source, .out_path = out_path, .replace = true, .recipe = recipe,
                                    .imatrix_name = "", .thread_count = 1 };
    if (status == SPK_OK) status = spk_convert_plan_make(&options, &plan, &err);
    if (status == SPK_OK) status = spk_convert_run(&options, &plan, &err);
    FUZZ_ASSERT(status == SPK_OK || (may_fail && err.text[0] != '\0'), "%s", err.text);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
    return status == SPK_OK;
}

static spk_unpack_result unpack(const spk_pack *p, const char *out_path) {
    spk_unpack_result result = SPK_UNPACK_REQUANTIZED;
    spk_error err = { 0 };
    FUZZ_ASSERT(spk_pack_verify(p, 1, NULL, NULL, &err) == SPK_OK, "%s", err.text);
    FUZZ_ASSERT(spk_unpack(p, out_path, true, NULL, NULL, &result, &err) == SPK_OK, "%s", err.text);
    FUZZ_ASSERT(result != SPK_UNPACK_REQUANTIZED, "nothing was requantized");
    return result;
}

static void expect_same_model(const char *a_path, const char *b_path) {
    spk_gguf *a = NULL, *b = NULL;
    spk_error err = { 0 };
    FUZZ_ASSERT(spk_gguf_open(a_path, &a, &err) == SPK_OK && spk_gguf_open(b_path, &b, &err) == SPK_OK, "%s", err.text);
    FUZZ_ASSERT(spk_gguf_tensor_count(a) == spk_gguf_tensor_count(b) && spk_gguf_kvs(a)->count == spk_gguf_kvs(b)->count, "counts");
    for (uint64_t i = 0; i < spk_gguf_tensor_count(a); i++) {
        const spk_gguf_tensor *s = spk_gguf_tensor_at(a, i), *t = spk_gguf_tensor_at(b, i);
        FUZZ_ASSERT(strcmp(s->name, t->name) == 0 && s->type == t->type && s->size_bytes == t->size_bytes &&
                    memcmp(s->data, t->data, s->size_bytes) == 0, "%s", s->name);
    }
    for (uint64_t i = 0; i < spk_gguf_kvs(a)->count; i++) {
        const spk_kv *x = &spk_gguf_kvs(a)->items[i], *y = &spk_gguf_kvs(b)->items[i];
        FUZZ_ASSERT(x->entry_bytes == y->entry_bytes && memcmp(x->entry, y->entry, x->entry_bytes) == 0, "entry %d", (int)i);
    }
    spk_gguf_close(a);
    spk_gguf_close(b);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    const char *packed = fuzz_path("a.spk"), *back = fuzz_path("b.gguf"), *again = fuzz_path("c.spk");
    const char *source = fuzz_file(bytes, size);
    spk_pack *first = NULL, *second = NULL;
    spk_error err = { 0 };
    if (!pack(source, packed, true)) return 0;
    fuzz_accepted_count++;
    FUZZ_ASSERT(spk_pack_open(packed, &first, &err) == SPK_OK, "%s", err.text);
    spk_unpack_result result = unpack(first, back);
    expect_same_model(source, back);
    if (result == SPK_UNPACK_IDENTICAL) {
        struct stat info;
        FUZZ_ASSERT(stat(back, &info) == 0 && (size_t)info.st_size == size, "identical, but of another size");
    }
    FUZZ_ASSERT(pack(back, again, false), "packing again");
    FUZZ_ASSERT(spk_pack_open(again, &second, &err) == SPK_OK, "%s", err.text);
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t x_size, y_size;
        const uint8_t *x = spk_pack_section(first, place, &x_size), *y = spk_pack_section(second, place, &y_size);
        FUZZ_ASSERT(x_size == y_size && (x_size == 0 || memcmp(x, y, x_size) == 0), "section %u", place);
    }
    spk_pack_close(first);
    spk_pack_close(second);
    FUZZ_ASSERT(gb_file_count(fuzz_dir) <= 3, "a file was left");
    return 0;
}

void fuzz_seeds(void) {
    static const model_shape shapes[] = { { 32, 1, 1, 1, 32, 1, 1, 32, 32, 8, SPK_TYPE_F32 },
                                          { 32, 2, 2, 1, 16, 1, 2, 32, 64, 8, SPK_TYPE_Q8_0 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        gguf_build b = { 0 };
        uint8_t piece[65536];
        const char *path = fuzz_path("seed.gguf");
        model_build(path, &shapes[i], i);
        FILE *file = fopen(path, "rb");
        if (file == NULL) abort();
        for (size_t got; (got = fread(piece, 1, sizeof piece, file)) > 0;) gb_raw(&b, piece, got);
        (void)fclose(file);
        (void)unlink(path);
        fuzz_seed(b.bytes, b.size);
        gb_free(&b);
    }
}
