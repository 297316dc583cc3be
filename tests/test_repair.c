/* tests/test_repair.c - damaged chunks are made again from the source, and nothing else is taken for it. */
#include "requant/repair.h"
#include "tests/convert_build.h"

static spk_repair_result result;

static spk_status repair(const char *pack_path, const char *source_path, const char *imatrix_path, const char *weights_path) {
    spk_gguf *source = NULL, *weights = NULL;
    spk_imatrix *imatrix = NULL;
    CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
    if (weights_path != NULL) CHECK_OK(spk_gguf_open(weights_path, &weights, &err), err);
    if (imatrix_path != NULL) CHECK_OK(spk_imatrix_open(imatrix_path, &imatrix, &err), err);
    spk_repair_options options = { .source = source, .weights = weights, .imatrix = imatrix };
    spk_status status = spk_repair(pack_path, &options, &result, &err);
    spk_imatrix_close(imatrix);
    spk_gguf_close(weights);
    spk_gguf_close(source);
    return status;
}

/* Damages bytes of every chunk but the second: one bit, a page of zeros, the last byte. */
static uint64_t damage(const char *path) {
    spk_pack *p = NULL;
    gguf_build b = gb_read(path);
    uint64_t count = 0, chunk = 0;
    CHECK_OK(spk_pack_open(path, &p, &err), err);
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t bytes, offset = spk_pack_section_file_offset(p, place);
        (void)spk_pack_section(p, place, &bytes);
        for (uint64_t at = 0; at < bytes; at += SPK_CHUNK_BYTES, chunk++) {
            uint64_t size = bytes - at < SPK_CHUNK_BYTES ? bytes - at : SPK_CHUNK_BYTES;
            if (chunk == 1) continue;
            if (chunk % 3 == 0) b.bytes[offset + at + size / 3] ^= 0x10;
            else if (chunk % 3 == 1) memset(b.bytes + offset + at + 4096, 0, 4096);
            else b.bytes[offset + at + size - 1] ^= 1;
            count++;
        }
    }
    spk_pack_close(p);
    gb_save(&b, path);
    gb_free(&b);
    return count;
}

static void damaged_chunks_are_made_again(void) {
    static const struct { const char *recipe, *imatrix; } kinds[] = {
        { "native", NULL }, { "ffn", NULL }, { "fast", IMATRIX } };
    gb_make_dir(dir);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        const char *wanted = in_dir("wanted.spk"), *path = in_dir("a.spk");
        pack_request request = { .recipe = kinds[i].recipe, .imatrix_path = kinds[i].imatrix, .replace = true };
        CHECK_OK(pack(TINY36, wanted, &request), err);
        CHECK_OK(pack(TINY36, path, &request), err);
        CHECK_OK(repair(path, TINY36, kinds[i].imatrix, NULL), err);
        CHECK(result.damaged_count == 0 && result.repaired_count == 0, "a whole pack");
        uint64_t count = damage(path);
        CHECK(count >= 3 && !same_bytes(path, wanted), "%d chunks are damaged", (int)count);
        CHECK_OK(repair(path, TINY36, kinds[i].imatrix, NULL), err);
        CHECK(result.damaged_count == count && result.repaired_count == count, "%d of %d, expected %d",
              (int)result.repaired_count, (int)result.damaged_count, (int)count);
        CHECK(same_bytes(path, wanted), "%s: the repaired pack differs", kinds[i].recipe);
    }
    gb_remove_dir(dir);
}

static void a_pack_fitted_from_better_weights_needs_them(void) {
    if (access(TINY36_BF16, R_OK) != 0) {
        SKIP("build/models/tiny-qwen36-bf16.gguf is not there (make test unpacks it)");
        return;
    }
    gb_make_dir(dir);
    const char *wanted = in_dir("wanted.spk"), *path = in_dir("a.spk");
    pack_request request = { .recipe = "ffn", .weights_path = TINY36_BF16 };
    CHECK_OK(pack(TINY36, wanted, &request), err);
    CHECK_OK(pack(TINY36, path, &request), err);
    uint64_t count = damage(path);
    CHECK(repair(path, TINY36, NULL, NULL) == SPK_E_MISMATCH, "%s", err.text);
    CHECK(strstr(err.text, "fitted from tiny-qwen36-bf16.gguf") != NULL && result.repaired_count < count, "%s", err.text);
    uint64_t first = result.repaired_count;              /* chunks without anything requantized */
    CHECK_OK(repair(path, TINY36, NULL, TINY36_BF16), err);
    CHECK(first + result.repaired_count == count && same_bytes(path, wanted), "the repaired pack differs");
    gb_remove_dir(dir);
}

static void what_was_made_with_an_imatrix_says_so(void) {
    gb_make_dir(dir);
    const char *path = in_dir("a.spk");
    CHECK_OK(pack(TINY36, path, &(pack_request){ .recipe = "fast", .imatrix_path = IMATRIX }), err);
    uint64_t count = damage(path);
    CHECK(repair(path, TINY36, NULL, NULL) == SPK_E_MISMATCH && strstr(err.text, "with the imatrix or calibration imatrix") != NULL, "%s", err.text);
    CHECK(result.damaged_count == count && result.repaired_count < count && strstr(err.text, "stay damaged") != NULL, "%s", err.text);
    spk_pack *p = NULL;
    CHECK_OK(spk_pack_open(path, &p, &err), err);
    CHECK(spk_pack_verify(p, 1, NULL, NULL, &err) == SPK_E_CHECKSUM, "what is damaged is still seen");
    spk_pack_close(p);
    gb_remove_dir(dir);
}

/* Another size, and one byte in the padding of the same size: neither may write into the pack. */
static void another_source_is_refused(void) {
    gb_make_dir(dir);
    const char *path = in_dir("a.spk"), *before = in_dir("before.spk"), *source = in_dir("source.gguf");
    CHECK_OK(pack(TINY36, path, &(pack_request){ .recipe = "native" }), err);
    (void)damage(path);
    gguf_build b = gb_read(path);
    gb_save(&b, before);
    gb_free(&b);
    CHECK(repair(path, "tests/models/tiny-qwen35-q4_k_m.gguf", NULL, NULL) == SPK_E_MISMATCH, "%s", err.text);
    CHECK(strstr(err.text, "was made from tiny-qwen36-ud-q4_k_m.gguf of 13946944 bytes") != NULL, "%s", err.text);
    b = gb_read(TINY36);
    b.bytes[b.size - 1000] ^= 1;
    gb_save(&b, source);
    gb_free(&b);
    CHECK(repair(path, source, NULL, NULL) == SPK_E_MISMATCH && strstr(err.text, "another digest") != NULL, "%s", err.text);
    CHECK(same_bytes(path, before), "the pack was written to");
    b = gb_read(path);
    b.bytes[9000] ^= 1;                                  /* what describes the weights cannot be repaired */
    gb_save(&b, path);
    gb_free(&b);
    CHECK(repair(path, TINY36, NULL, NULL) == SPK_E_CHECKSUM && strstr(err.text, "R12") != NULL, "%s", err.text);
    gb_remove_dir(dir);
}

/* A pack with every checksum right, whose directory has two tensors exchanged: nothing of it is taken for granted. */
static void exchange_tensors(const char *path, const char *first, const char *second) {
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan;
    spk_pack_writer *writer = NULL;
    CHECK_OK(spk_gguf_open(TINY36, &source, &err), err);
    CHECK_OK(spk_recipe_load("native", "", &recipe, &err), err);
    const spk_convert_options options = { .source = source, .out_path = path, .recipe = recipe, .imatrix_name = "" };
    CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
    uint64_t a = 0, b = 0;
    for (uint64_t i = 0; i < plan.tensor_count; i++) {
        if (strcmp(plan.tensors[i].name, first) == 0) a = i;
        if (strcmp(plan.tensors[i].name, second) == 0) b = i;
    }
    CHECK(a != b, "%s and %s", first, second);
    spk_tensor kept = plan.tensors[a];
    plan.tensors[a] = plan.tensors[b];
    plan.tensors[b] = kept;
    gguf_build file = gb_read(TINY36), kvs = { 0 };
    const spk_kv_set *set = spk_gguf_kvs(source);
    for (uint64_t i = 0; i < set->count; i++) gb_raw(&kvs, set->items[i].entry, set->items[i].entry_bytes);
    spk_pack_writer_options w = { .path = path, .config = &plan.config, .tensor_count = plan.tensor_count, .kv_bytes = kvs.bytes,
                                  .kv_bytes_size = kvs.size, .kv_count = set->count };
    memcpy(w.section_bytes, plan.section_bytes, sizeof w.section_bytes);
    CHECK_OK(spk_pack_writer_begin(&w, &writer, &err), err);
    for (int place = 0; place < SPK_PLACE_COUNT; place++) {
        void *zeros = calloc(1, plan.section_bytes[place] + 1);
        CHECK_OK(spk_pack_writer_append(writer, zeros, plan.section_bytes[place], &err), err);
        free(zeros);
    }
    const spk_provenance provenance = { .source_name = "tiny-qwen36-ud-q4_k_m.gguf", .source_bytes = file.size,
                                        .source_digest = spk_digest_of(file.bytes, file.size), .source_version = 3,
                                        .source_alignment_bytes = 32, .recipe_name = "native", .recipe_text = "recipe native\n",
                                        .imatrix_name = "", .weights_name = "", .tool_version = "spk-pack 0" };
    CHECK_OK(spk_pack_writer_commit(writer, plan.tensors, &provenance, &err), err);
    gb_free(&file), gb_free(&kvs);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
}

static void a_directory_that_is_not_the_sources_is_refused(void) {
    static const char *const pairs[][2] = { { "blk.0.ffn_up_shexp.weight", "blk.0.attn_norm.weight" },
                                            { "token_embd.weight", "blk.1.ssm_conv1d.weight" } };
    for (size_t i = 0; i < 2; i++) {
        gb_make_dir(dir);
        const char *path = in_dir("hostile.spk");
        exchange_tensors(path, pairs[i][0], pairs[i][1]);
        (void)damage(path);
        CHECK(repair(path, TINY36, NULL, NULL) == SPK_E_MISMATCH && strstr(err.text, "is not what spk-pack makes of") != NULL, "%s", err.text);
        gb_remove_dir(dir);
    }
}

int main(void) {
    RUN(damaged_chunks_are_made_again);
    RUN(a_pack_fitted_from_better_weights_needs_them);
    RUN(what_was_made_with_an_imatrix_says_so);
    RUN(another_source_is_refused);
    RUN(a_directory_that_is_not_the_sources_is_refused);
    return CHECK_EXIT();
}
