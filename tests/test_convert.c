/* tests/test_convert.c - packing whole models: what is copied, what is requantized, what is refused. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/dequant.h"
#include "formats/gguf.h"
#include "requant/plan_report.h"
#include "requant/quant.h"
#include "tests/convert_build.h"

/* ---- Requantized tensors, redone here matrix by matrix ---- */

typedef struct { double error, source, result, product, max; } sums;

static void add_errors(sums *s, const float *x, const float *y, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        double a = (double)x[i], b = (double)y[i];
        s->error += (a - b) * (a - b);
        s->source += a * a;
        s->result += b * b;
        s->product += a * b;
        if (fabs(a - b) > s->max) s->max = fabs(a - b);
    }
}

static bool is_near(double a, double b) { return fabs(a - b) <= 1e-9 * fabs(b); }

static void expect_requantized(const spk_pack *p, const spk_tensor *t, const spk_gguf_tensor *source,
                               const spk_imatrix *imatrix) {
    uint64_t weights = t->dims[0] * t->dims[1], matrices = spk_tensor_matrix_count(t);
    uint64_t source_bytes, bytes, section_bytes;
    CHECK_OK(spk_type_bytes(source->type, weights, &source_bytes, &err), err);
    CHECK_OK(spk_type_bytes(t->type, weights, &bytes, &err), err);
    const uint8_t *section = spk_pack_section(p, t->section, &section_bytes);
    float *x = malloc(weights * sizeof *x), *y = malloc(weights * sizeof *y);
    uint8_t *want = malloc(bytes), *got = malloc(bytes);
    sums s = { 0 };
    for (uint64_t m = 0; m < matrices; m++) {
        const float *importance = NULL;
        spk_imatrix_answer answer;
        if (imatrix != NULL)
            CHECK_OK(spk_imatrix_lookup(imatrix, t->name, t->dims[0], matrices, m, &answer, &importance, &err), err);
        spk_dequantize(source->type, source->data + m * source_bytes, weights, x);
        spk_quant_job job = { .type = t->type, .row_count = t->dims[1], .col_count = t->dims[0], .weights = x,
                              .importance = importance, .blocks = want };
        CHECK_OK(spk_quantize(&job, &err), err);
        spk_matrix matrix = spk_tensor_matrix(t, section, m);
        spk_layout_get_rows(&matrix, 0, t->dims[1], got);
        CHECK(memcmp(want, got, bytes) == 0, "%s matrix %d", t->name, (int)m);
        spk_dequantize(t->type, got, weights, y);
        add_errors(&s, x, y, weights);
    }
    CHECK(is_near(t->relative_rmse, sqrt(s.error / s.source)), "%s: %.12g", t->name, t->relative_rmse);
    CHECK(is_near(t->max_abs_error, s.max), "%s: %.12g, expected %.12g", t->name, t->max_abs_error, s.max);
    CHECK(is_near(t->cosine, s.product / sqrt(s.source * s.result)), "%s: %.12g", t->name, t->cosine);
    CHECK(t->relative_rmse > 0 && t->relative_rmse < 0.2, "%s: relative RMSE %g", t->name, t->relative_rmse);
    free(x);
    free(y);
    free(want);
    free(got);
}

static void expect_copied(const spk_pack *p, const spk_tensor *t, const spk_gguf_tensor *source) {
    uint64_t section_bytes, matrices = spk_tensor_matrix_count(t), bytes = source->size_bytes / matrices;
    const uint8_t *section = spk_pack_section(p, t->section, &section_bytes);
    uint8_t *got = malloc(bytes);
    for (uint64_t m = 0; m < matrices; m++) {
        spk_matrix matrix = spk_tensor_matrix(t, section, m);
        spk_layout_get_rows(&matrix, 0, t->dims[1], got);
        CHECK(memcmp(source->data + m * bytes, got, bytes) == 0, "%s matrix %d", t->name, (int)m);
    }
    CHECK(t->relative_rmse <= 0 && t->max_abs_error <= 0 && t->cosine >= 1, "%s is copied, with an error", t->name);
    free(got);
}

/* Every tensor of the pack against the source; returns how many were requantized. */
static int check_pack(const char *pack_path, const char *source_path, const char *imatrix_path) {
    spk_pack *p = NULL;
    spk_gguf *source = NULL;
    spk_imatrix *imatrix = NULL;
    int requantized = 0;
    CHECK_OK(spk_pack_open(pack_path, &p, &err), err);
    CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
    if (imatrix_path != NULL) CHECK_OK(spk_imatrix_open(imatrix_path, &imatrix, &err), err);
    if (p == NULL || source == NULL) return -1;
    CHECK(spk_pack_tensor_count(p) == spk_gguf_tensor_count(source), "tensor count");
    for (uint64_t i = 0; i < spk_pack_tensor_count(p); i++) {
        const spk_tensor *t = &spk_pack_tensors(p)[i];
        const spk_gguf_tensor *s = spk_gguf_tensor_at(source, i);
        CHECK(strcmp(t->name, s->name) == 0 && t->source_type == s->type, "tensor %d: %s", (int)i, t->name);
        if (t->type == s->type) {
            expect_copied(p, t, s);
        } else {
            expect_requantized(p, t, s, imatrix);
            requantized++;
        }
    }
    spk_imatrix_close(imatrix);
    spk_gguf_close(source);
    spk_pack_close(p);
    return requantized;
}

static void requantized_tensors_are_the_quantizers_and_others_the_sources(void) {
    gb_make_dir(dir);
    const char *packed = in_dir("ffn.spk");
    CHECK_OK(pack(TINY36, packed, &(pack_request){ .recipe = "ffn" }), err);
    CHECK(check_pack(packed, TINY36, NULL) == 32, "24 shared and 8 routed tensors");
    spk_pack *p;
    CHECK_OK(spk_pack_open(packed, &p, &err), err);
    const spk_provenance *provenance = spk_pack_provenance(p);
    gguf_build source = gb_read(TINY36);
    spk_digest digest = spk_digest_of(source.bytes, source.size);
    CHECK(memcmp(&digest, &provenance->source_digest, sizeof digest) == 0, "digest of the source");
    CHECK(provenance->source_bytes == source.size, "size of the source");
    CHECK(strcmp(provenance->source_name, "tiny-qwen36-ud-q4_k_m.gguf") == 0, "%s", provenance->source_name);
    CHECK(strcmp(provenance->recipe_name, "ffn") == 0 && strstr(provenance->recipe_text, "rule blk") != NULL, "recipe");
    CHECK(strcmp(provenance->imatrix_name, "") == 0, "%s", provenance->imatrix_name);
    CHECK_OK(spk_pack_verify(p, 1, NULL, NULL, &err), err);
    gb_free(&source);
    spk_pack_close(p);
    gb_remove_dir(dir);
}

/* What a page is made of is the pack that was made, not one with the same name and tensors that came after it. */
static void another_pack_is_told_from_the_one_that_was_made(void) {
    gb_make_dir(dir);
    const char *packed = in_dir("a.spk"), *other = in_dir("b.spk");
    CHECK_OK(pack(TINY36, packed, &(pack_request){ .recipe = "ffn" }), err);
    CHECK_OK(pack(TINY36, other, &(pack_request){ .recipe = "ffn", .imatrix_path = "tests/models/tiny-qwen36.imatrix.gguf" }), err);
    spk_pack *made = NULL, *found = NULL;
    CHECK_OK(spk_pack_open(packed, &made, &err), err);
    CHECK_OK(spk_pack_open(other, &found, &err), err);
    spk_convert_plan plan = { .tensor_count = spk_pack_tensor_count(made) };
    plan.tensors = malloc(plan.tensor_count * sizeof *plan.tensors);
    memcpy(plan.tensors, spk_pack_tensors(made), plan.tensor_count * sizeof *plan.tensors);
    CHECK_OK(spk_plan_check_pack(&plan, made, &err), err);
    CHECK(spk_plan_check_pack(&plan, found, &err) == SPK_E_IO && strstr(err.text, "b.spk: was replaced") != NULL, "%s", err.text);
    spk_convert_plan_free(&plan);
    spk_pack_close(made);
    spk_pack_close(found);
    gb_remove_dir(dir);
}

static void float_sources_are_requantized(void) {
    if (access(TINY36_BF16, R_OK) != 0) {
        SKIP("build/models/tiny-qwen36-bf16.gguf is not there (make test unpacks it)");
        return;
    }
    gb_make_dir(dir);
    const char *packed = in_dir("x.spk");
    CHECK_OK(pack(TINY36_BF16, packed, &(pack_request){ .recipe = "native", .set = ".*_exps\\.weight=Q6_K" }), err);
    CHECK(check_pack(packed, TINY36_BF16, NULL) == 24, "three tensors in each of eight layers");
    gb_remove_dir(dir);
}

static void the_number_of_threads_changes_nothing(void) {
    gb_make_dir(dir);
    const char *one = in_dir("1.spk"), *two = in_dir("2.spk"), *five = in_dir("5.spk");
    CHECK_OK(pack(TINY36, one, &(pack_request){ .recipe = "fast", .thread_count = 1 }), err);
    CHECK_OK(pack(TINY36, two, &(pack_request){ .recipe = "fast", .thread_count = 2 }), err);
    CHECK_OK(pack(TINY36, five, &(pack_request){ .recipe = "fast", .thread_count = 5 }), err);
    CHECK(same_bytes(one, two) && same_bytes(one, five), "packs differ");
    gb_remove_dir(dir);
}

/* ---- Sources made from the tiny model ---- */

/* Long enough for several runs, and the last row group is short. */
static void a_long_matrix_is_cut_and_comes_out_whole(void) {
    gb_make_dir(dir);
    const char *source = in_dir("long.gguf"), *packed = in_dir("long.spk"), *other = in_dir("long5.spk");
    write_edited(TINY36, source, &(edit){ .tensor_end = tensor_count_of(TINY36), .vocab_size = 40003 });
    expect_round_trip(source);
    pack_request request = { .recipe = "fast", .set = "token_embd\\.weight=Q6_K", .thread_count = 2 };
    CHECK_OK(pack(source, packed, &request), err);
    CHECK(check_pack(packed, source, NULL) == 24 + 8 + 4 + 18 + 2, "all of fast, and the embedding");
    request.thread_count = 5;
    CHECK_OK(pack(source, other, &request), err);
    CHECK(same_bytes(packed, other), "five threads make another pack than two");
    gb_remove_dir(dir);
}

static void a_split_source_makes_the_same_pack(void) {
    gb_make_dir(dir);
    uint64_t total = tensor_count_of(TINY36), half = total / 2;
    const char *names[] = { in_dir("m-00001-of-00002.gguf"), in_dir("m-00002-of-00002.gguf") };
    for (uint16_t part = 0; part < 2; part++) {
        edit e = { .tensor_begin = part == 0 ? 0 : half, .tensor_end = part == 0 ? half : total, .more_kv_count = 3 };
        gb_kv_split(&e.more_kvs, part, 2, (int32_t)total);
        write_edited(TINY36, names[part], &e);
        gb_free(&e.more_kvs);
    }
    const char *split = in_dir("split.spk"), *single = in_dir("single.spk");
    CHECK_OK(pack(names[1], split, &(pack_request){ .recipe = "ffn" }), err);   /* any part will do */
    CHECK_OK(pack(TINY36, single, &(pack_request){ .recipe = "ffn" }), err);
    spk_pack *a, *b;
    CHECK_OK(spk_pack_open(split, &a, &err), err);
    CHECK_OK(spk_pack_open(single, &b, &err), err);
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t a_bytes, b_bytes;
        const uint8_t *x = spk_pack_section(a, place, &a_bytes), *y = spk_pack_section(b, place, &b_bytes);
        CHECK(a_bytes == b_bytes && (a_bytes == 0 || memcmp(x, y, a_bytes) == 0), "section %u differs", place);
    }
    CHECK(spk_kv_find(spk_pack_kvs(a), "split.count") == NULL, "split.count in a pack of one file");
    uint64_t parts_bytes = 0;
    for (int part = 0; part < 2; part++) {
        gguf_build bytes = gb_read(names[part]);
        parts_bytes += bytes.size;
        gb_free(&bytes);
    }
    CHECK(spk_pack_provenance(a)->source_bytes == parts_bytes, "bytes of both parts");
    CHECK(strcmp(spk_pack_provenance(a)->source_name, "m-00001-of-00002.gguf") == 0, "named after the first part");
    spk_pack_close(a);
    spk_pack_close(b);

    split = in_dir("native.spk");
    const char *merged = in_dir("merged.gguf");
    CHECK_OK(pack(names[0], split, &(pack_request){ .recipe = "native" }), err);
    CHECK_OK(unpack(split, merged), err);
    CHECK(unpacked_as == SPK_UNPACK_EQUIVALENT, "not the bytes of the two parts");
    CHECK(same_bytes(merged, TINY36), "the parts, merged, are the model that was split");
    gb_remove_dir(dir);
}

static void odd_tokenizer_arrays_are_carried(void) {
    gb_make_dir(dir);
    edit e = { .tensor_end = tensor_count_of(TINY36), .omitted_key = "tokenizer.ggml.token_type", .more_kv_count = 4 };
    gb_array(&e.more_kvs, "tokenizer.ggml.token_type", SPK_KV_U8, 3);       /* too short, and of another type */
    gb_raw(&e.more_kvs, "\x01\x02\xff", 3);
    gb_array(&e.more_kvs, "tokenizer.ggml.scores", SPK_KV_F64, 0);
    gb_array(&e.more_kvs, "tokenizer.ggml.precompiled_charsmap", SPK_KV_I8, 2);
    gb_raw(&e.more_kvs, "\xff\xff", 2);
    gb_array(&e.more_kvs, "tokenizer.ggml.added_tokens", SPK_KV_STRING, 2);
    gb_text(&e.more_kvs, "<0x-1>\0", 7);
    gb_text(&e.more_kvs, "", 0);
    const char *source = in_dir("odd.gguf");
    write_edited(TINY36, source, &e);
    expect_round_trip(source);
    gb_free(&e.more_kvs);
    gb_remove_dir(dir);
}

/* ---- Refusals ---- */

static void a_nonfinite_source_is_refused_where_it_is_requantized(void) {
    gb_make_dir(dir);
    static const struct { const char *tensor; uint64_t block, byte; uint16_t half; const char *where; } cases[] = {
        { "blk.2.ffn_down_exps.weight", 3 * 256 + 17, 0, 0x7e00, "expert 3, row 17, block 0" },   /* Q5_K: d */
        { "blk.2.ffn_down_exps.weight", 7 * 256 + 255, 2, 0xfc00, "expert 7, row 255, block 0" }, /* Q5_K: dmin */
        { "blk.7.ffn_down_exps.weight", 1, 208, 0x7c00, "expert 0, row 1, block 0" },             /* Q6_K */
        { "blk.1.ffn_up_shexp.weight", 5 * 8 + 3, 0, 0x7c01, "row 5, block 3" } };                /* Q8_0 */
    const char *source = in_dir("bad.gguf");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gguf_build b = gb_read(TINY36);
        spk_gguf *tiny;
        CHECK_OK(spk_gguf_open(TINY36, &tiny, &err), err);
        const spk_gguf_tensor *t = spk_gguf_tensor_find(tiny, cases[i].tensor);
        uint64_t block_bytes = spk_type_find(t->type)->block_bytes;
        memcpy(b.bytes + t->file_offset_bytes + cases[i].block * block_bytes + cases[i].byte, &cases[i].half, 2);
        spk_gguf_close(tiny);
        gb_save(&b, source);
        gb_free(&b);
        for (uint32_t threads = 1; threads <= 5; threads += 4) {
            pack_request request = { .recipe = "ffn", .thread_count = threads };
            expect_no_pack(source, request, SPK_E_NONFINITE, cases[i].tensor);
            CHECK(strstr(err.text, cases[i].where) != NULL, "%s is not in: %s", cases[i].where, err.text);
        }
    }
    expect_round_trip(source);   /* what is only copied may hold anything */
    gb_remove_dir(dir);
}

/* A weight that the new type cannot hold, and the largest that it can: for each type, of a source in F32, and the first of two. */
static void a_weight_beyond_its_new_type_is_refused_by_its_place(void) {
    static const struct { const char *type; float low, high; } targets[] = {
        { "Q4_K", -65504.0f * 63, 65504.0f * 63 * 15 }, { "Q5_K", -65504.0f * 63, 65504.0f * 63 * 31 },
        { "Q6_K", -65504.0f * 127 * 32, 65504.0f * 127 * 32 }, { "Q8_0", -65504.0f * 127, 65504.0f * 127 } };
    static const char tensor[] = "blk.2.ffn_down_exps.weight";
    gb_make_dir(dir);
    char source[GB_PATH_MAX], packed[GB_PATH_MAX];
    (void)gb_path(source, dir, "f32.gguf");
    (void)gb_path(packed, dir, "a.spk");
    write_edited(TINY36, source, &(edit){ .tensor_end = tensor_count_of(TINY36), .changed_name = "blk.2.ffn_down_exps",
                                          .changed_type = SPK_TYPE_F32 });
    gguf_build b = gb_read(source);
    spk_gguf *file;
    CHECK_OK(spk_gguf_open(source, &file, &err), err);
    uint8_t *first = b.bytes + spk_gguf_tensor_find(file, tensor)->file_offset_bytes + ((3 * 256 + 17) * 256 + 100) * sizeof(float);
    uint8_t *second = first + 4 * 256 * 256 * sizeof(float);
    spk_gguf_close(file);
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++)
        for (int k = 0; k < 2; k++) {
            char set[80], text[200];
            float limit = k == 0 ? targets[t].high : targets[t].low, beyond = nextafterf(limit, 2 * limit);
            (void)snprintf(set, sizeof set, "blk\\.2\\.ffn_down_exps\\.weight=%s", targets[t].type);
            (void)snprintf(text, sizeof text, "f32.gguf: tensor '%s', expert 3, row 17, block 100: weight %.9g is beyond what spk writes as %s (",
                           tensor, (double)beyond, targets[t].type);
            memcpy(first, &limit, sizeof limit), memcpy(second, &limit, sizeof limit);
            gb_save(&b, source);
            CHECK_OK(pack(source, packed, &(pack_request){ .recipe = "native", .set = set, .replace = true }), err);
            (void)remove(packed);
            memcpy(first, &beyond, sizeof beyond), memcpy(second, &beyond, sizeof beyond);
            gb_save(&b, source);
            for (uint32_t threads = 1; threads <= 5; threads += 4) {
                expect_no_pack(source, (pack_request){ .recipe = "native", .set = set, .thread_count = threads }, SPK_E_LIMIT, tensor);
                CHECK(strstr(err.text, text) != NULL, "'%s' is not in: %s", text, err.text);
            }
        }
    gb_free(&b);
    gb_remove_dir(dir);
}

/* Sets the u32 of a key in a copy of the tiny model. */
static void write_with_u32(const char *path, const char *key, uint32_t value) {
    gguf_build b = gb_read(TINY36);
    uint8_t *at = memmem(b.bytes, b.size, key, strlen(key));
    CHECK(at != NULL && at[strlen(key)] == SPK_KV_U32, "%s", key);
    if (at != NULL) memcpy(at + strlen(key) + 4, &value, sizeof value);
    gb_save(&b, path);
    gb_free(&b);
}

static void a_zero_count_is_refused(void) {
    static const char *const keys[] = { "block_count", "attention.head_count", "attention.head_count_kv",
                                        "embedding_length", "ssm.time_step_rank", "ssm.group_count",
                                        "expert_used_count" };
    gb_make_dir(dir);
    const char *source = in_dir("zero.gguf");
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char key[80];
        (void)snprintf(key, sizeof key, "qwen35moe.%s", keys[i]);
        write_with_u32(source, key, 0);
        int before = gb_file_count(dir);
        CHECK(pack(source, in_dir("no.spk"), &(pack_request){ .recipe = "native" }) != SPK_OK, "%s of 0", keys[i]);
        CHECK(strstr(err.text, "zero.gguf") != NULL && strstr(err.text, keys[i]) != NULL, "%s: %s", keys[i], err.text);
        CHECK(gb_file_count(dir) == before, "a file was left");
    }
    gb_remove_dir(dir);
}

static void the_source_and_existing_files_are_kept(void) {
    gb_make_dir(dir);
    const char *source = in_dir("a.gguf"), *link_path = in_dir("b.gguf"), *packed = in_dir("a.spk");
    gguf_build b = gb_read(TINY36);
    gb_save(&b, source);
    CHECK(symlink(source, link_path) == 0, "symlink");
    pack_request forced = { .recipe = "native", .replace = true };
    CHECK(pack(source, source, &forced) == SPK_E_EXISTS && strstr(err.text, "source"), "%s", err.text);
    CHECK(pack(source, link_path, &forced) == SPK_E_EXISTS && strstr(err.text, "source"), "%s", err.text);
    CHECK(same_bytes(source, TINY36), "the source was written to");

    gguf_build old = { 0 };
    gb_raw(&old, "old", 3);
    gb_save(&old, packed);
    CHECK(pack(source, packed, &(pack_request){ .recipe = "native" }) == SPK_E_EXISTS, "%s", err.text);
    uint16_t infinity = 0x7c00;
    spk_gguf *tiny;
    CHECK_OK(spk_gguf_open(TINY36, &tiny, &err), err);
    memcpy(b.bytes + spk_gguf_tensor_find(tiny, "blk.7.ffn_down_shexp.weight")->file_offset_bytes, &infinity, 2);
    spk_gguf_close(tiny);
    gb_save(&b, source);
    CHECK(pack(source, packed, &(pack_request){ .recipe = "ffn", .replace = true }) == SPK_E_NONFINITE, "%s", err.text);
    gguf_build still = gb_read(packed);
    CHECK(still.size == 3 && memcmp(still.bytes, "old", 3) == 0, "an old file went with a failure");
    gb_free(&still);
    CHECK_OK(pack(source, packed, &forced), err);
    spk_pack *p;
    CHECK_OK(spk_pack_open(packed, &p, &err), err);
    CHECK(spk_unpack(p, packed, true, NULL, NULL, &unpacked_as, &err) == SPK_E_EXISTS, "%s", err.text);
    CHECK(spk_unpack(p, source, false, NULL, NULL, &unpacked_as, &err) == SPK_E_EXISTS, "%s", err.text);
    spk_pack_close(p);
    gb_free(&old);
    gb_free(&b);
    gb_remove_dir(dir);
}

/* ---- Importance ---- */

static void importance_is_used_and_what_lacks_it_is_listed(void) {
    gb_make_dir(dir);
    const char *with = in_dir("with.spk"), *without = in_dir("without.spk"), *imatrix = in_dir("imatrix.gguf");
    pack_request request = { .recipe = "fast", .imatrix_path = IMATRIX };
    CHECK_OK(pack(TINY36, with, &request), err);
    CHECK(request.fallback_count == 1 && strcmp(request.fallbacks[0], "output.weight: no entry") == 0, "%d: %s",
          (int)request.fallback_count, request.fallbacks[0]);
    CHECK(check_pack(with, TINY36, IMATRIX) == 55, "all of fast");
    CHECK_OK(pack(TINY36, without, &(pack_request){ .recipe = "fast" }), err);
    CHECK(!same_bytes(with, without), "importance makes no difference");

    gguf_build b = gb_read(IMATRIX);      /* expert 3 was never counted, and expert 5 is NaN */
    spk_gguf *entries;
    CHECK_OK(spk_gguf_open(IMATRIX, &entries, &err), err);
    const spk_gguf_tensor *counts = spk_gguf_tensor_find(entries, "blk.4.ffn_down_exps.weight.counts");
    const spk_gguf_tensor *values = spk_gguf_tensor_find(entries, "blk.4.ffn_down_exps.weight.in_sum2");
    CHECK(counts != NULL && values != NULL && values->dims[0] == 256, "the imatrix of the tiny model");
    if (counts != NULL && values != NULL) {
        float zero = 0, nan = NAN;
        memcpy(b.bytes + counts->file_offset_bytes + 3 * sizeof zero, &zero, sizeof zero);
        memcpy(b.bytes + values->file_offset_bytes + (5 * 256 + 100) * sizeof nan, &nan, sizeof nan);
    }
    spk_gguf_close(entries);
    gb_save(&b, imatrix);
    gb_free(&b);
    request = (pack_request){ .recipe = "ffn", .imatrix_path = imatrix, .replace = true };
    CHECK_OK(pack(TINY36, with, &request), err);
    CHECK(request.fallback_count == 2 &&
          strcmp(request.fallbacks[0], "blk.4.ffn_down_exps.weight expert 3: no usable values") == 0 &&
          strcmp(request.fallbacks[1], "blk.4.ffn_down_exps.weight expert 5: no usable values") == 0,
          "%d: %s; %s", (int)request.fallback_count, request.fallbacks[0], request.fallbacks[1]);
    CHECK(check_pack(with, TINY36, imatrix) == 32, "all of ffn");
    gb_remove_dir(dir);
}

static void an_imatrix_of_another_model_is_refused(void) {
    gb_make_dir(dir);
    pack_request request = { .recipe = "native", .imatrix_path = IMATRIX,
                             .set = "blk\\.0\\.ffn_down_exps\\.weight=Q5_K" };
    expect_no_pack("tests/models/tiny-qwen3moe-q4_k_m.gguf", request, SPK_E_MISMATCH, "blk.0.ffn_down_exps.weight");
    gb_remove_dir(dir);
}

int main(void) {
    RUN(requantized_tensors_are_the_quantizers_and_others_the_sources);
    RUN(another_pack_is_told_from_the_one_that_was_made);
    RUN(float_sources_are_requantized);
    RUN(the_number_of_threads_changes_nothing);
    RUN(a_long_matrix_is_cut_and_comes_out_whole);
    RUN(a_split_source_makes_the_same_pack);
    RUN(odd_tokenizer_arrays_are_carried);
    RUN(a_nonfinite_source_is_refused_where_it_is_requantized);
    RUN(a_weight_beyond_its_new_type_is_refused_by_its_place);
    RUN(a_zero_count_is_refused);
    RUN(the_source_and_existing_files_are_kept);
    RUN(importance_is_used_and_what_lacks_it_is_listed);
    RUN(an_imatrix_of_another_model_is_refused);
    return CHECK_EXIT();
}
