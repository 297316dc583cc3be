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
    gguf_build b = read_file(path);
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
    gguf_build b = read_file(path);
    gb_save(&b, before);
    gb_free(&b);
    CHECK(repair(path, "tests/models/tiny-qwen35-q4_k_m.gguf", NULL, NULL) == SPK_E_MISMATCH, "%s", err.text);
    CHECK(strstr(err.text, "was made from tiny-qwen36-ud-q4_k_m.gguf of 13946944 bytes") != NULL, "%s", err.text);
    b = read_file(TINY36);
    b.bytes[b.size - 1000] ^= 1;
    gb_save(&b, source);
    gb_free(&b);
    CHECK(repair(path, source, NULL, NULL) == SPK_E_MISMATCH && strstr(err.text, "another digest") != NULL, "%s", err.text);
    CHECK(same_bytes(path, before), "the pack was written to");
    b = read_file(path);
    b.bytes[9000] ^= 1;                                  /* what describes the weights cannot be repaired */
    gb_save(&b, path);
    gb_free(&b);
    CHECK(repair(path, TINY36, NULL, NULL) == SPK_E_CHECKSUM && strstr(err.text, "R12") != NULL, "%s", err.text);
    gb_remove_dir(dir);
}

int main(void) {
    RUN(damaged_chunks_are_made_again);
    RUN(a_pack_fitted_from_better_weights_needs_them);
    RUN(what_was_made_with_an_imatrix_says_so);
    RUN(another_source_is_refused);
    return CHECK_EXIT();
}
