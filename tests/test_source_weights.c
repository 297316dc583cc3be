/* tests/test_source_weights.c - requantized tensors fitted from a more precise file of the same model: what comes from
 * which file, and which files do not belong together. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/gguf.h"
#include "requant/convert_internal.h"
#include "tests/convert_build.h"

static const char FFN_TENSORS[] = ".*(ffn_down_exps|ffn_(gate|up|down)_shexp)\\.weight=Q4_K"; /* what ffn requantizes */

static gguf_build rows_of(const spk_pack *p, const spk_tensor *t) {
    uint64_t section_bytes, row_bytes = spk_layout_unit_bytes(SPK_LAYOUT_ROWS, t->type, t->dims[0]);
    const uint8_t *section = spk_pack_section(p, t->section, &section_bytes);
    uint8_t *rows = malloc(row_bytes * t->dims[1]);
    gguf_build b = { 0 };
    for (uint64_t m = 0; m < spk_tensor_matrix_count(t); m++) {
        spk_matrix matrix = spk_tensor_matrix(t, section, m);
        spk_layout_get_rows(&matrix, 0, t->dims[1], rows);
        gb_raw(&b, rows, row_bytes * t->dims[1]);
    }
    free(rows);
    return b;
}

static const spk_tensor *tensor_in(const spk_pack *p, const char *name) {
    for (uint64_t i = 0; i < spk_pack_tensor_count(p); i++)
        if (strcmp(spk_pack_tensors(p)[i].name, name) == 0) return &spk_pack_tensors(p)[i];
    return NULL;
}

/* The tensor has in both packs the same type, weights and error figures. */
static bool is_same(const spk_pack *p, const spk_tensor *t, const spk_pack *q) {
    const spk_tensor *u = tensor_in(q, t->name);
    if (u == NULL || u->type != t->type) return false;
    gguf_build a = rows_of(p, t), b = rows_of(q, u);
    bool is_equal = a.size == b.size && memcmp(a.bytes, b.bytes, a.size) == 0 &&
                    memcmp(&t->relative_rmse, &u->relative_rmse, sizeof t->relative_rmse) == 0 &&
                    memcmp(&t->max_abs_error, &u->max_abs_error, sizeof t->max_abs_error) == 0 &&
                    memcmp(&t->cosine, &u->cosine, sizeof t->cosine) == 0;
    gb_free(&a);
    gb_free(&b);
    return is_equal;
}

/* Requantized tensors of `packed` are those of the pack `better`, the others and the metadata those of `native`. */
static void expect_mix(const char *packed, const char *better, const char *native, int requantized_count) {
    spk_pack *p, *b, *n;
    int count = 0;
    CHECK_OK(spk_pack_open(packed, &p, &err), err);
    CHECK_OK(spk_pack_open(better, &b, &err), err);
    CHECK_OK(spk_pack_open(native, &n, &err), err);
    CHECK(spk_pack_tensor_count(p) == spk_pack_tensor_count(n), "tensors");
    for (uint64_t i = 0; i < spk_pack_tensor_count(p); i++) {
        const spk_tensor *t = &spk_pack_tensors(p)[i], *source = &spk_pack_tensors(n)[i];
        bool is_requantized = t->type != t->source_type;
        CHECK(t->source_type == source->type, "%s: source type %u", t->name, t->source_type);
        CHECK(is_same(p, t, is_requantized ? b : n), "%s is another", t->name);
        count += is_requantized;
    }
    CHECK(count == requantized_count, "%d requantized", count);
    const spk_kv_set *kvs = spk_pack_kvs(p), *want = spk_pack_kvs(n);
    CHECK(kvs->count == want->count && spk_kv_find(kvs, "quantize.imatrix.file") != NULL, "metadata of the other file");
    CHECK_OK(spk_pack_verify(p, 1, NULL, NULL, &err), err);
    spk_pack_close(p);
    spk_pack_close(b);
    spk_pack_close(n);
}

static void expect_provenance(const char *packed, const char *weights_path, const char *weights_name) {
    spk_pack *p;
    CHECK_OK(spk_pack_open(packed, &p, &err), err);
    const spk_provenance *provenance = spk_pack_provenance(p);
    gguf_build source = gb_read(TINY36), weights = gb_read(weights_path);
    spk_digest digest = spk_digest_of(source.bytes, source.size), other = spk_digest_of(weights.bytes, weights.size);
    CHECK(memcmp(&digest, &provenance->source_digest, sizeof digest) == 0, "digest of the source");
    CHECK(provenance->source_bytes == source.size, "size of the source");
    CHECK(memcmp(&other, &provenance->weights_digest, sizeof other) == 0, "digest of the better file");
    CHECK(provenance->weights_bytes == weights.size, "size of the better file");
    CHECK(strcmp(provenance->weights_name, weights_name) == 0, "%s", provenance->weights_name);
    gb_free(&source);
    gb_free(&weights);
    spk_pack_close(p);
}

static void requants_are_the_better_files_and_everything_else_the_sources(void) {
    gb_make_dir(dir);
    const char *packed = in_dir("w.spk"), *better = in_dir("b.spk"), *native = in_dir("n.spk"), *plain = in_dir("p.spk");
    pack_request request = { .recipe = "ffn", .weights_path = TINY36_BF16, .thread_count = 1 };
    CHECK_OK(pack(TINY36, packed, &request), err);
    CHECK(request.fitted_count == 32, "%d fitted", (int)request.fitted_count);
    CHECK_OK(pack(TINY36_BF16, better, &(pack_request){ .recipe = "native", .set = FFN_TENSORS }), err);
    CHECK_OK(pack(TINY36, native, &(pack_request){ .recipe = "native" }), err);
    expect_mix(packed, better, native, 32);
    expect_provenance(packed, TINY36_BF16, "tiny-qwen36-bf16.gguf");
    for (uint32_t threads = 2; threads <= 5; threads += 3) {
        request = (pack_request){ .recipe = "ffn", .weights_path = TINY36_BF16, .thread_count = threads };
        CHECK_OK(pack(TINY36, in_dir("t.spk"), &request), err);
        CHECK(same_bytes(packed, in_dir("t.spk")), "%u threads make another pack", threads);
        (void)remove(in_dir("t.spk"));
    }
    CHECK_OK(pack(TINY36, plain, &(pack_request){ .recipe = "ffn" }), err);
    CHECK(!same_bytes(packed, plain), "the better file makes no difference");
    CHECK_OK(unpack(packed, in_dir("u.gguf")), err);
    CHECK(unpacked_as == SPK_UNPACK_REQUANTIZED, "not told");
    gb_remove_dir(dir);
}

static void importance_counts_there_too(void) {
    gb_make_dir(dir);
    const char *packed = in_dir("w.spk"), *better = in_dir("b.spk"), *native = in_dir("n.spk");
    pack_request request = { .recipe = "ffn", .weights_path = TINY36_BF16, .imatrix_path = IMATRIX };
    CHECK_OK(pack(TINY36, packed, &request), err);
    request = (pack_request){ .recipe = "native", .set = FFN_TENSORS, .imatrix_path = IMATRIX };
    CHECK_OK(pack(TINY36_BF16, better, &request), err);
    CHECK_OK(pack(TINY36, native, &(pack_request){ .recipe = "native" }), err);
    expect_mix(packed, better, native, 32);
    gb_remove_dir(dir);
}

static void a_split_better_file_makes_the_same_pack(void) {
    gb_make_dir(dir);
    uint64_t total = tensor_count_of(TINY36_BF16), half = total / 2;
    const char *names[] = { in_dir("b-00001-of-00002.gguf"), in_dir("b-00002-of-00002.gguf"), in_dir("both") };
    gguf_build both = { 0 };
    for (uint16_t part = 0; part < 2; part++) {
        edit e = { .tensor_begin = part == 0 ? 0 : half, .tensor_end = part == 0 ? half : total, .more_kv_count = 3 };
        gb_kv_split(&e.more_kvs, part, 2, (int32_t)total);
        write_edited(TINY36_BF16, names[part], &e);
        gb_free(&e.more_kvs);
        gguf_build bytes = gb_read(names[part]);
        gb_raw(&both, bytes.bytes, bytes.size);
        gb_free(&bytes);
    }
    gb_save(&both, names[2]);
    gb_free(&both);
    const char *split = in_dir("split.spk"), *better = in_dir("b.spk"), *native = in_dir("n.spk");
    CHECK_OK(pack(TINY36, split, &(pack_request){ .recipe = "ffn", .weights_path = names[1] }), err);
    CHECK_OK(pack(TINY36_BF16, better, &(pack_request){ .recipe = "native", .set = FFN_TENSORS }), err);
    CHECK_OK(pack(TINY36, native, &(pack_request){ .recipe = "native" }), err);
    expect_mix(split, better, native, 32);
    expect_provenance(split, names[2], "b-00001-of-00002.gguf");
    gb_remove_dir(dir);
}

static void every_more_precise_type_will_do(void) {
    gb_make_dir(dir);
    const char *floats = in_dir("f.gguf"), *packed = in_dir("w.spk"), *better = in_dir("b.spk");
    const char *native = in_dir("n.spk");
    CHECK_OK(pack(TINY36, native, &(pack_request){ .recipe = "native" }), err);
    for (uint32_t type = SPK_TYPE_F32; type <= SPK_TYPE_F16; type++) {
        pack_request exact = { .recipe = "native", .set = FFN_TENSORS, .replace = true };
        write_edited(TINY36_BF16, floats, &(edit){ .tensor_end = tensor_count_of(TINY36_BF16), .changed_name = "exp",
                                                   .changed_type = type });
        CHECK_OK(pack(TINY36, packed, &(pack_request){ .recipe = "ffn", .weights_path = floats, .replace = true }), err);
        CHECK_OK(pack(floats, better, &exact), err);
        expect_mix(packed, better, native, 32);
        if (type == SPK_TYPE_F32) {                            /* those of BF16, exactly */
            CHECK_OK(pack(TINY36_BF16, better, &exact), err);
            expect_mix(packed, better, native, 32);
        }
        (void)remove(floats);
    }

    /* Q8_0 is a better source than Q4_K. */
    const char *coarse = in_dir("coarse.gguf"), *ffn = in_dir("ffn.spk"), set[] = ".*ffn_down_shexp\\.weight=Q6_K";
    pack_request forced = { .recipe = "native", .set = set, .replace = true };
    CHECK_OK(pack(TINY36, ffn, &(pack_request){ .recipe = "ffn" }), err);
    CHECK_OK(unpack(ffn, coarse), err);
    CHECK_OK(pack(TINY36, better, &forced), err);
    forced.set = NULL;
    CHECK_OK(pack(coarse, native, &forced), err);
    forced.set = set;
    forced.weights_path = TINY36;
    CHECK_OK(pack(coarse, packed, &forced), err);
    expect_mix(packed, better, native, 8);
    gb_remove_dir(dir);
}

static void what_is_as_precise_is_the_sources(void) {
    gb_make_dir(dir);
    const char *mixed = in_dir("mixed.gguf"), *packed = in_dir("w.spk"), *plain = in_dir("p.spk");
    write_edited(TINY36_BF16, mixed, &(edit){ .tensor_end = tensor_count_of(TINY36_BF16), .other_path = TINY36,
                                              .changed_name = "shexp.weight" });
    pack_request request = { .recipe = "ffn", .weights_path = mixed };
    CHECK_OK(pack(TINY36, packed, &request), err);
    CHECK(request.fitted_count == 8, "%d fitted, expected routed down alone", (int)request.fitted_count);
    CHECK_OK(pack(TINY36, plain, &(pack_request){ .recipe = "ffn" }), err);
    spk_pack *p, *q;
    CHECK_OK(spk_pack_open(packed, &p, &err), err);
    CHECK_OK(spk_pack_open(plain, &q, &err), err);
    for (uint64_t i = 0; i < spk_pack_tensor_count(p); i++) {
        const spk_tensor *t = &spk_pack_tensors(p)[i];
        bool is_fitted = strstr(t->name, "ffn_down_exps") != NULL;
        CHECK(is_same(p, t, q) != is_fitted, "%s: from the wrong file", t->name);
    }
    spk_pack_close(p);
    spk_pack_close(q);
    gb_remove_dir(dir);
}

static void a_file_that_is_not_used_leaves_no_trace(void) {
    gb_make_dir(dir);
    const char *with = in_dir("w.spk"), *without = in_dir("p.spk");
    CHECK_OK(pack(TINY36, with, &(pack_request){ .recipe = "native", .weights_path = TINY36_BF16 }), err);
    CHECK_OK(pack(TINY36, without, &(pack_request){ .recipe = "native" }), err);
    CHECK(same_bytes(with, without), "packs differ");
    gb_remove_dir(dir);
}

/* ---- Refusals ---- */

static void expect_refused(const char *weights_path, spk_status want, const char *in_message) {
    expect_no_pack(TINY36, (pack_request){ .recipe = "ffn", .weights_path = weights_path }, want, in_message);
    const char *slash = strrchr(weights_path, '/');
    CHECK(strstr(err.text, slash + 1) != NULL, "does not name the file: %s", err.text);
}

static void another_model_is_refused(void) {
    gb_make_dir(dir);
    expect_refused("tests/models/tiny-qwen3moe-q4_k_m.gguf", SPK_E_MISMATCH, "is another model (qwen3moe");
    const char *other = in_dir("other.gguf");
    static const struct { const char *key; uint32_t type; float f32; uint32_t u32; const char *message; } cases[] = {
        { "qwen35moe.rope.freq_base", SPK_KV_F32, 12345, 0, "rope.freq_base is 12345, expected " },
        { "qwen35moe.attention.layer_norm_rms_epsilon", SPK_KV_F32, 0.5f, 0, "rms_epsilon is 0.5, expected " },
        { "qwen35moe.context_length", SPK_KV_U32, 0, 77, "context_length is 77, expected " },
        { "qwen35moe.expert_used_count", SPK_KV_U32, 0, 3, "moe3/8x256+256) than " } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        edit e = { .tensor_end = tensor_count_of(TINY36_BF16), .omitted_key = cases[i].key, .more_kv_count = 1 };
        if (cases[i].type == SPK_KV_F32) gb_kv_f32(&e.more_kvs, cases[i].key, cases[i].f32);
        else gb_kv_u32(&e.more_kvs, cases[i].key, cases[i].u32);
        write_edited(TINY36_BF16, other, &e);
        gb_free(&e.more_kvs);
        expect_refused(other, SPK_E_MISMATCH, cases[i].message);
        (void)remove(other);
    }
    write_edited(TINY36, other, &(edit){ .tensor_end = tensor_count_of(TINY36), .vocab_size = 40 });
    expect_refused(other, SPK_E_MISMATCH, "V40 ");
    gb_remove_dir(dir);
}

/* Where a tensor's bytes begin in the file. */
static uint64_t offset_of(const char *path, const char *name) {
    spk_gguf *gguf;
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    const spk_gguf_tensor *t = spk_gguf_tensor_find(gguf, name);
    CHECK(t != NULL, "%s: no %s", path, name);
    uint64_t offset = t == NULL ? 0 : t->file_offset_bytes;
    spk_gguf_close(gguf);
    return offset;
}

static void a_missing_or_misshapen_tensor_is_named(void) {
    gb_make_dir(dir);
    const char *other = in_dir("other.gguf"), name[] = "blk.1.ffn_up_shexp.weight";
    gguf_build b = gb_read(TINY36_BF16);
    uint8_t *at = memmem(b.bytes, b.size, name, strlen(name));
    CHECK(at != NULL, "%s", name);
    at[0] = 'x';
    gb_save(&b, other);
    expect_refused(other, SPK_E_MISSING, name);
    at[0] = 'b';
    gb_u64_at(&b, (size_t)(at - b.bytes) + strlen(name) + 4, 128);
    gb_u64_at(&b, (size_t)(at - b.bytes) + strlen(name) + 12, 512);
    gb_save(&b, other);
    expect_refused(other, SPK_E_SHAPE, name);
    gb_free(&b);
    gb_remove_dir(dir);
}

static void a_tensor_that_nobody_quantizes_must_be_the_same(void) {
    gb_make_dir(dir);
    const char *other = in_dir("other.gguf");
    static const struct { const char *name; uint64_t weight; const char *place; } cases[] = {
        { "blk.3.attn_norm.weight", 17, "(F32), row 0, column 17: differs from packs/" },
        { "blk.0.ssm_conv1d.weight", 4 * 5 + 2, "(F32), row 5, column 2: differs" },
        { "output_norm.weight", 255, "(F32), row 0, column 255: differs" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gguf_build b = gb_read(TINY36_BF16);
        b.bytes[offset_of(TINY36_BF16, cases[i].name) + 4 * cases[i].weight + 1] ^= 1;
        gb_save(&b, other);
        gb_free(&b);
        expect_refused(other, SPK_E_MISMATCH, cases[i].name);
        CHECK(strstr(err.text, cases[i].place) != NULL, "'%s' is not in: %s", cases[i].place, err.text);
    }
    (void)remove(other);                              /* where no tensor can be compared, there is no proof */
    write_edited(TINY36_BF16, other, &(edit){ .tensor_end = tensor_count_of(TINY36_BF16), .changed_name = "",
                                              .changed_type = SPK_TYPE_F16 });
    expect_refused(other, SPK_E_MISMATCH, "nothing shows that it is the same model as ");
    gb_remove_dir(dir);
}

static void a_less_precise_file_is_refused(void) {
    gb_make_dir(dir);
    const char *ffn = in_dir("ffn.spk"), *coarse = in_dir("coarse.gguf"), *mixed = in_dir("mixed.gguf");
    CHECK_OK(pack(TINY36, ffn, &(pack_request){ .recipe = "ffn" }), err);
    CHECK_OK(unpack(ffn, coarse), err);
    write_edited(TINY36_BF16, mixed, &(edit){ .tensor_end = tensor_count_of(TINY36_BF16), .other_path = coarse,
                                              .changed_name = "blk.5.ffn_down_shexp" });
    expect_refused(mixed, SPK_E_MISMATCH, "tensor 'blk.5.ffn_down_shexp.weight' is Q4_K, less precise than in ");
    expect_refused(TINY36, SPK_E_MISMATCH, "no tensor that is requantized is more precise there than in ");
    gb_remove_dir(dir);
}

static void a_nonfinite_better_weight_is_refused_where_it_is_used(void) {
    gb_make_dir(dir);
    const char *other = in_dir("other.gguf");
    static const struct { const char *name; uint64_t weight; uint16_t value; const char *place; } cases[] = {
        { "blk.2.ffn_down_exps.weight", (3 * 256 + 17) * 256 + 100, 0x7fc0, "expert 3, row 17, block 100: NaN" },
        { "blk.6.ffn_gate_shexp.weight", 5 * 256 + 3, 0xff80, "row 5, block 3: NaN or infinite weight" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        gguf_build b = gb_read(TINY36_BF16);
        memcpy(b.bytes + offset_of(TINY36_BF16, cases[i].name) + 2 * cases[i].weight, &cases[i].value, 2);
        gb_save(&b, other);
        gb_free(&b);
        expect_refused(other, SPK_E_NONFINITE, cases[i].name);
        CHECK(strstr(err.text, cases[i].place) != NULL, "'%s' is not in: %s", cases[i].place, err.text);
        pack_request request = { .recipe = "native", .set = "blk\\.1\\.ffn_up_shexp\\.weight=Q4_K",
                                 .weights_path = other, .replace = true };
        CHECK_OK(pack(TINY36, in_dir("ok.spk"), &request), err);   /* what is not used may hold anything */
        (void)remove(in_dir("ok.spk"));
    }
    gb_remove_dir(dir);
}

/* Tensors that decode does not read are the source's whatever the other file has by that name. */
static void an_extra_of_another_shape_is_no_counterpart(void) {
    gb_make_dir(dir);
    const char *source = in_dir("s.gguf"), *weights = in_dir("w.gguf"), *packed = in_dir("p.spk"), *wanted = in_dir("n.spk");
    write_with_tensor(TINY36, source, "extra.weight", SPK_TYPE_F32, 100, 3);
    write_with_tensor(TINY36_BF16, weights, "extra.weight", SPK_TYPE_Q8_0, 256, 5);
    pack_request request = { .recipe = "ffn", .weights_path = weights };
    CHECK_OK(pack(source, packed, &request), err);
    CHECK(request.fitted_count == 32, "%d fitted", (int)request.fitted_count);
    CHECK_OK(pack(source, wanted, &(pack_request){ .recipe = "ffn", .weights_path = TINY36_BF16 }), err);
    spk_pack *p = NULL, *n = NULL;
    CHECK_OK(spk_pack_open(packed, &p, &err), err);
    CHECK_OK(spk_pack_open(wanted, &n, &err), err);
    for (uint64_t i = 0; i < spk_pack_tensor_count(p); i++)
        CHECK(is_same(p, &spk_pack_tensors(p)[i], n), "%s is another", spk_pack_tensors(p)[i].name);
    spk_pack_close(p);
    spk_pack_close(n);
    gb_remove_dir(dir);
}

/* No recipe requantizes what decode does not read; a plan that does is refused, not believed. */
static void what_is_requantized_must_be_in_the_better_file(void) {
    gb_make_dir(dir);
    const char *path = in_dir("s.gguf"), *shaped = in_dir("w.gguf");
    write_with_tensor(TINY36, path, "extra.weight", SPK_TYPE_Q8_0, 256, 5);
    write_with_tensor(TINY36_BF16, shaped, "extra.weight", SPK_TYPE_BF16, 256, 4);
    const char *const others[] = { TINY36_BF16, shaped };
    for (size_t i = 0; i < 2; i++) {
        spk_gguf *source = NULL, *weights = NULL;
        spk_recipe *recipe = NULL;
        spk_convert_plan plan = { .tensor_count = 0 };
        CHECK_OK(spk_gguf_open(path, &source, &err), err);
        CHECK_OK(spk_gguf_open(others[i], &weights, &err), err);
        CHECK_OK(spk_recipe_load("ffn", "", &recipe, &err), err);
        spk_convert_options options = { .source = source, .weights = weights, .recipe = recipe, .imatrix_name = "" };
        CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
        plan.tensors[plan.tensor_count - 1].type = SPK_TYPE_Q4_K;
        CHECK(spk_convert_check_weights(&options, &plan, &err) == SPK_E_MISMATCH &&
              strstr(err.text, "has no tensor 'extra.weight' of the shape that it has in ") != NULL, "%s", err.text);
        spk_convert_plan_free(&plan);
        spk_recipe_free(recipe);
        spk_gguf_close(weights);
        spk_gguf_close(source);
    }
    gb_remove_dir(dir);
}

static void the_better_file_is_not_written_to(void) {
    gb_make_dir(dir);
    const char *weights = in_dir("w.gguf");
    gguf_build b = gb_read(TINY36_BF16);
    gb_save(&b, weights);
    gb_free(&b);
    pack_request request = { .recipe = "ffn", .weights_path = weights, .replace = true };
    CHECK(pack(TINY36, weights, &request) == SPK_E_EXISTS && strstr(err.text, "better weights") != NULL, "%s", err.text);
    CHECK(same_bytes(weights, TINY36_BF16), "the file was written to");
    gb_remove_dir(dir);
}

int main(void) {
    if (access(TINY36_BF16, R_OK) != 0) {
        SKIP("build/models/tiny-qwen36-bf16.gguf is not there (make test unpacks it)");
        return CHECK_EXIT();
    }
    RUN(requants_are_the_better_files_and_everything_else_the_sources);
    RUN(importance_counts_there_too);
    RUN(a_split_better_file_makes_the_same_pack);
    RUN(every_more_precise_type_will_do);
    RUN(what_is_as_precise_is_the_sources);
    RUN(a_file_that_is_not_used_leaves_no_trace);
    RUN(another_model_is_refused);
    RUN(a_missing_or_misshapen_tensor_is_named);
    RUN(a_tensor_that_nobody_quantizes_must_be_the_same);
    RUN(a_less_precise_file_is_refused);
    RUN(a_nonfinite_better_weight_is_refused_where_it_is_used);
    RUN(an_extra_of_another_shape_is_no_counterpart);
    RUN(what_is_requantized_must_be_in_the_better_file);
    RUN(the_better_file_is_not_written_to);
    return CHECK_EXIT();
}
