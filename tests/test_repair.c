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

/* Damages bytes of every chunk but the second: one bit, a page of zeros, the last byte; or one bit of every chunk. */
static uint64_t damage_chunks(const char *path, bool only_bits) {
    spk_pack *p = NULL;
    gguf_build b = gb_read(path);
    uint64_t count = 0, chunk = 0;
    CHECK_OK(spk_pack_open(path, &p, &err), err);
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t bytes, offset = spk_pack_section_file_offset(p, place);
        (void)spk_pack_section(p, place, &bytes);
        for (uint64_t at = 0; at < bytes; at += SPK_CHUNK_BYTES, chunk++) {
            uint64_t size = bytes - at < SPK_CHUNK_BYTES ? bytes - at : SPK_CHUNK_BYTES;
            if (chunk == 1 && !only_bits) continue;
            if (chunk % 3 == 0 || only_bits) b.bytes[offset + at + size / 3] ^= 0x10;
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
static uint64_t damage(const char *path) { return damage_chunks(path, false); }
static void flip_in_every_chunk(const char *path) { (void)damage_chunks(path, true); }

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
    CHECK(damage(path) == count, "the same damage");
    CHECK(repair(path, TINY36, NULL, "tests/models/tiny-qwen35-q4_k_m.gguf") == SPK_E_MISMATCH, "%s", err.text);
    CHECK(strstr(err.text, "cannot be made again, and stay damaged: tests/models/tiny-qwen35-q4_k_m.gguf: is another model") != NULL, "%s", err.text);
    CHECK(result.damaged_count == count && result.repaired_count == first && first > 0, "%d of %d, expected %d",
          (int)result.repaired_count, (int)result.damaged_count, (int)first);
    CHECK_OK(repair(path, TINY36, NULL, TINY36_BF16), err);
    CHECK(same_bytes(path, wanted), "the repaired pack differs");
    gb_remove_dir(dir);
}

/* An imatrix with another shape for the one tensor that is requantized. */
static void a_wrong_imatrix_stops_only_what_needs_it(void) {
    static const char tensor[] = "blk.5.ffn_down_exps.weight";
    static const float sums[4] = { 1, 2, 3, 4 }, counts[1] = { 1 };
    char name[80];
    gb_make_dir(dir);
    const char *wanted = in_dir("wanted.spk"), *path = in_dir("a.spk"), *wrong = in_dir("wrong.gguf");
    gguf_build b = { 0 };
    gb_header(&b, 3, 2, 1);
    gb_kv_string(&b, "general.type", "imatrix");
    (void)snprintf(name, sizeof name, "%s.in_sum2", tensor);
    gb_tensor(&b, name, SPK_TYPE_F32, 0, GB_DIMS(4, 1));
    (void)snprintf(name, sizeof name, "%s.counts", tensor);
    gb_tensor(&b, name, SPK_TYPE_F32, 32, GB_DIMS(1, 1));
    gb_pad(&b, 32);
    gb_raw(&b, sums, sizeof sums);
    gb_pad(&b, 32);
    gb_raw(&b, counts, sizeof counts);
    gb_pad(&b, 32);
    gb_save(&b, wrong);
    gb_free(&b);
    pack_request request = { .recipe = "native", .set = "blk\\.5\\.ffn_down_exps\\.weight=Q4_K", .imatrix_path = IMATRIX };
    CHECK_OK(pack(TINY36, wanted, &request), err);
    CHECK_OK(pack(TINY36, path, &request), err);
    uint64_t count = damage(path);
    CHECK(repair(path, TINY36, wrong, NULL) == SPK_E_MISMATCH, "%s", err.text);
    CHECK(strstr(err.text, "cannot be made again, and stay damaged: ") != NULL && strstr(err.text, wrong) != NULL &&
          strstr(err.text, " damaged chunks were repaired") != NULL, "%s", err.text);
    uint64_t first = result.repaired_count;
    CHECK(result.damaged_count == count && first > 0 && first < count, "%d of %d", (int)first, (int)result.damaged_count);
    CHECK_OK(repair(path, TINY36, IMATRIX, NULL), err);
    CHECK(result.damaged_count == count - first && result.repaired_count == count - first, "%d of %d", (int)result.repaired_count,
          (int)result.damaged_count);
    CHECK(same_bytes(path, wanted), "the repaired pack differs");
    gb_remove_dir(dir);
}

/* Files that the pack was not made with: nothing is made of them. */
static void files_that_were_not_used_are_not_needed(void) {
    gb_make_dir(dir);
    const char *wanted = in_dir("wanted.spk"), *path = in_dir("a.spk");
    CHECK_OK(pack(TINY36, wanted, &(pack_request){ .recipe = "ffn" }), err);
    CHECK_OK(pack(TINY36, path, &(pack_request){ .recipe = "ffn" }), err);
    uint64_t count = damage(path);
    CHECK_OK(repair(path, TINY36, IMATRIX, "tests/models/tiny-qwen35-q4_k_m.gguf"), err);
    CHECK(result.repaired_count == count && same_bytes(path, wanted), "%d of %d", (int)result.repaired_count, (int)count);
    gb_remove_dir(dir);
}

/* A file that was not opened stops only what cannot be made without it, and nothing where it was not used. */
static void files_that_do_not_open_stop_only_what_needs_them(void) {
    static const spk_error bad = { SPK_E_MAGIC, "junk: is no such file" };
    const spk_error none = { .status = SPK_OK };
    gb_make_dir(dir);
    const char *wanted = in_dir("wanted.spk"), *path = in_dir("a.spk");
    bool has_weights = access(TINY36_BF16, R_OK) == 0;
    for (int k = 0; k < 3; k++) {                        /* made with nothing, with an imatrix, with better weights */
        if (k == 2 && !has_weights) {
            SKIP("build/models/tiny-qwen36-bf16.gguf is not there (make test unpacks it)");
            break;
        }
        pack_request request = { .recipe = k == 0 ? "ffn" : "native", .replace = true, .imatrix_path = k == 1 ? IMATRIX : NULL,
                                 .set = k == 0 ? NULL : "blk\\.5\\.ffn_down_exps\\.weight=Q4_K",
                                 .weights_path = k == 2 ? TINY36_BF16 : NULL };
        CHECK_OK(pack(TINY36, wanted, &request), err);
        CHECK_OK(pack(TINY36, path, &request), err);
        uint64_t count = damage(path);
        spk_gguf *source = NULL;
        CHECK_OK(spk_gguf_open(TINY36, &source, &err), err);
        spk_repair_options options = { .source = source, .no_weights = k == 1 ? none : bad, .no_statistics = k == 2 ? none : bad };
        spk_status status = spk_repair(path, &options, &result, &err);
        if (k == 0) {
            CHECK(status == SPK_OK && result.repaired_count == count && same_bytes(path, wanted), "%d of %d", (int)result.repaired_count, (int)count);
        } else {
            CHECK(status == SPK_E_MISMATCH && strstr(err.text, " cannot be made again, and stay damaged: junk: is no such file; ") != NULL,
                  "%s", err.text);
            CHECK(result.damaged_count == count && result.repaired_count > 0 && result.repaired_count < count, "%d of %d",
                  (int)result.repaired_count, (int)count);
            CHECK_OK(repair(path, TINY36, request.imatrix_path, request.weights_path), err);
            CHECK(same_bytes(path, wanted), "the repaired pack differs");
        }
        spk_gguf_close(source);
    }
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

/* ---- Packs with every checksum right, and a directory that spk-pack does not make ---- */

typedef void change_fn(spk_convert_plan *plan);

static spk_tensor *named(const spk_convert_plan *plan, const char *name) {
    for (uint64_t i = 0; i < plan->tensor_count; i++)
        if (strcmp(plan->tensors[i].name, name) == 0) return &plan->tensors[i];
    CHECK(false, "no tensor %s", name);
    return plan->tensors;
}

/* The weights are zeros: all that is repaired is damaged. */
static void write_changed(const char *source_path, const char *path, change_fn *change) {
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan;
    spk_pack_writer *writer = NULL;
    CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
    CHECK_OK(spk_recipe_load("native", "", &recipe, &err), err);
    const spk_convert_options options = { .source = source, .out_path = path, .recipe = recipe, .imatrix_name = "" };
    CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
    change(&plan);
    gguf_build file = gb_read(source_path), kvs = { 0 };
    const spk_kv_set *set = spk_gguf_kvs(source);
    for (uint64_t i = 0; i < set->count; i++) gb_raw(&kvs, set->items[i].entry, set->items[i].entry_bytes);
    spk_pack_writer_options w = { .path = path, .replace = true, .config = &plan.config, .tensor_count = plan.tensor_count,
                                  .kv_bytes = kvs.bytes, .kv_bytes_size = kvs.size, .kv_count = set->count };
    memcpy(w.section_bytes, plan.section_bytes, sizeof w.section_bytes);
    CHECK_OK(spk_pack_writer_begin(&w, &writer, &err), err);
    for (int place = 0; place < SPK_PLACE_COUNT; place++) {
        void *zeros = calloc(1, plan.section_bytes[place] + 1);
        CHECK_OK(spk_pack_writer_append(writer, zeros, plan.section_bytes[place], &err), err);
        free(zeros);
    }
    const spk_provenance provenance = { .source_name = "source.gguf", .source_bytes = file.size,
                                        .source_digest = spk_digest_of(file.bytes, file.size), .source_version = 3,
                                        .source_alignment_bytes = 32, .recipe_name = "native", .recipe_text = "recipe native\n",
                                        .imatrix_name = "", .weights_name = "", .tool_version = "spk-pack 0" };
    CHECK_OK(spk_pack_writer_commit(writer, plan.tensors, &provenance, &err), err);
    gb_free(&file), gb_free(&kvs);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
}

static void exchange(spk_tensor *a, spk_tensor *b) {
    spk_tensor kept = *a;
    *a = *b;
    *b = kept;
}

/* Tensors whose units alternate, behind all that is in a section: unit `shift` of the stride, and a phase in it, for each. */
typedef struct {
    const char *name;
    spk_layout  layout;
    uint64_t    shift, phase;
} moved;

static void interleave(spk_convert_plan *plan, uint64_t stride, const moved *tensors, size_t count) {
    uint64_t *section_bytes = &plan->section_bytes[SPK_PLACE_STATIC - 1], begin = *section_bytes;
    for (size_t i = 0; i < count; i++) {
        spk_tensor *t = named(plan, tensors[i].name);
        t->section = SPK_PLACE_STATIC;
        t->layout = tensors[i].layout;
        t->offset_bytes = begin + tensors[i].shift * stride + tensors[i].phase;
        t->unit_stride_bytes = stride;
        uint64_t end = (t->offset_bytes + spk_tensor_span_bytes(t) + 4095) / 4096 * 4096;
        if (end > *section_bytes) *section_bytes = end;
    }
}

static void exchange_norm_and_matrix(spk_convert_plan *plan) {
    exchange(named(plan, "blk.0.ffn_up_shexp.weight"), named(plan, "blk.0.attn_norm.weight"));
}

static void exchange_table_and_conv(spk_convert_plan *plan) {
    exchange(named(plan, "token_embd.weight"), named(plan, "blk.1.ssm_conv1d.weight"));
}

/* The runs of the first reach as far as it has units; those of the second, more or fewer, lie in between. */
static void rows_with_a_late_vector(spk_convert_plan *plan) {
    interleave(plan, 16384, (moved[]){ { "output.weight", SPK_LAYOUT_ROWS, 0, 0 },
                                       { "output_norm.weight", SPK_LAYOUT_ROWS, 4094, 1024 } }, 2);
}

static void tiles_with_rows(spk_convert_plan *plan) {
    interleave(plan, 4800, (moved[]){ { "blk.0.ffn_up.weight", SPK_LAYOUT_T32, 22, 0 },
                                      { "blk.2.ssm_alpha.weight", SPK_LAYOUT_ROWS, 22, 4608 } }, 2);
}

static void tiles_with_fewer_tiles(spk_convert_plan *plan) {
    interleave(plan, 9280, (moved[]){ { "blk.0.attn_qkv.weight", SPK_LAYOUT_T32, 0, 0 },
                                      { "blk.1.ssm_beta.weight", SPK_LAYOUT_T32, 0, 4608 },
                                      { "blk.2.ssm_dt.bias", SPK_LAYOUT_ROWS, 1, 9216 } }, 3);
}

static void rows_with_one_row(spk_convert_plan *plan) {
    interleave(plan, 1216, (moved[]){ { "blk.0.attn_q.weight", SPK_LAYOUT_ROWS, 0, 0 },
                                      { "blk.3.ffn_norm.weight", SPK_LAYOUT_ROWS, 0, 192 } }, 2);
}

static void one_tensor_elsewhere(spk_convert_plan *plan) {
    interleave(plan, 4608, &(moved){ "blk.0.attn_q.weight", SPK_LAYOUT_T32, 0, 0 }, 1);
}

static void a_table_as_tiles(spk_convert_plan *plan) {
    spk_tensor *t = named(plan, "token_embd.weight");
    t->layout = SPK_LAYOUT_T32;
    t->unit_stride_bytes = spk_layout_unit_bytes(t->layout, t->type, t->dims[0]);
}

static void a_norm_among_extras(spk_convert_plan *plan) {
    spk_tensor *t = named(plan, "output_norm.weight");
    t->section = SPK_PLACE_EXTRA;
    t->offset_bytes = 0;
    plan->section_bytes[SPK_PLACE_EXTRA - 1] = 4096;
}

static void experts_farther_apart(spk_convert_plan *plan) {
    uint64_t *section_bytes = &plan->section_bytes[SPK_PLACE_EXPERTS - 1];
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        spk_tensor *t = &plan->tensors[i];
        if (t->section != SPK_PLACE_EXPERTS || strncmp(t->name, "blk.3.", 6) != 0) continue;
        *section_bytes += 4096 * (spk_tensor_matrix_count(t) - 1);
        t->matrix_stride_bytes += 4096;
    }
}

static void a_section_of_air(spk_convert_plan *plan) { plan->section_bytes[SPK_PLACE_STATIC - 1] += UINT64_C(80) << 20; }

static void a_router_requantized(spk_convert_plan *plan) {
    uint64_t at = (uint64_t)(named(plan, "blk.0.ffn_gate_inp.weight") - plan->tensors);
    plan->tensors[at].type = SPK_TYPE_Q8_0;
    CHECK_OK(spk_model_place(&plan->config, plan->tensors, plan->tensor_count, plan->section_bytes, &err), err);
}

static void an_extra_requantized(spk_convert_plan *plan) {
    named(plan, "extra.weight")->type = SPK_TYPE_Q4_K;
    CHECK_OK(spk_model_place(&plan->config, plan->tensors, plan->tensor_count, plan->section_bytes, &err), err);
}

/* Legal packs all, which open; the places of the last column are those that spk-pack gives. */
static void a_directory_that_is_not_the_sources_is_refused(void) {
    static const char tiny35[] = "tests/models/tiny-qwen35-q4_k_m.gguf", tiny3[] = "tests/models/tiny-qwen3moe-q4_k_m.gguf";
    static const struct { const char *source; change_fn *change; const char *text; } cases[] = {
        { TINY36, exchange_norm_and_matrix, "is not what spk-pack makes of" },
        { TINY36, exchange_table_and_conv, "is not what spk-pack makes of" },
        { tiny3, rows_with_a_late_vector, "tensor 'output.weight': layout id is 1, expected 2, where" },
        { tiny35, tiles_with_rows, "tensor 'blk.0.ffn_up.weight': offset is 2661504, expected 172032, where" },
        { tiny35, tiles_with_fewer_tiles, "tensor 'blk.0.attn_qkv.weight': offset is 2555904, expected 1024, where" },
        { tiny3, rows_with_one_row, "tensor 'blk.0.attn_q.weight': layout id is 1, expected 2, where" },
        { tiny3, one_tensor_elsewhere, "tensor 'blk.0.attn_q.weight': offset is 1675264, expected 1024, where" },
        { tiny35, a_table_as_tiles, "tensor 'token_embd.weight': layout id is 2, expected 1, where" },
        { TINY36, a_norm_among_extras, "tensor 'output_norm.weight': section id is 4, expected 1, where" },
        { tiny3, experts_farther_apart, "exps.weight': matrix stride is " },
        { tiny35, a_section_of_air, "section id 1 has 86441984 bytes, expected 2555904, which its tensors take" },
        { TINY36, a_router_requantized, "tensor 'blk.0.ffn_gate_inp.weight' is Q8_0, expected F32 as in " },
        { "extra.gguf", an_extra_requantized, "tensor 'extra.weight' is Q4_K, expected Q8_0 as in " },
    };
    gb_make_dir(dir);
    write_with_tensor(tiny35, in_dir("extra.gguf"), "extra.weight", SPK_TYPE_Q8_0, 256, 64);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path = in_dir("hostile.spk"), *before = in_dir("before.spk");
        const char *source = strchr(cases[i].source, '/') != NULL ? cases[i].source : in_dir(cases[i].source);
        write_changed(source, path, cases[i].change);
        flip_in_every_chunk(path);
        gguf_build b = gb_read(path);
        gb_save(&b, before);
        gb_free(&b);
        CHECK(repair(path, source, NULL, NULL) == SPK_E_MISMATCH && strstr(err.text, cases[i].text) != NULL, "case %d: %s", (int)i, err.text);
        CHECK(same_bytes(path, before), "case %d: the pack was written to", (int)i);
    }
    gb_remove_dir(dir);
}

/* What is asked of better weights is asked of a directory that was checked, and of a file that may lack anything. */
static void better_weights_may_lack_what_is_not_decoded(void) {
    static const char tiny35[] = "tests/models/tiny-qwen35-q4_k_m.gguf";
    gb_make_dir(dir);
    const char *source = in_dir("extra.gguf"), *path = in_dir("a.spk"), *wanted = in_dir("wanted.spk");
    write_with_tensor(tiny35, source, "extra.weight", SPK_TYPE_Q8_0, 256, 64);
    write_changed(source, path, an_extra_requantized);
    flip_in_every_chunk(path);
    CHECK(repair(path, source, NULL, tiny35) == SPK_E_MISMATCH && strstr(err.text, "'extra.weight' is Q4_K") != NULL, "%s", err.text);
    CHECK_OK(pack(source, wanted, &(pack_request){ .recipe = "native" }), err);
    CHECK_OK(pack(source, path, &(pack_request){ .recipe = "native", .replace = true }), err);
    flip_in_every_chunk(path);
    CHECK_OK(repair(path, source, NULL, tiny35), err);
    CHECK(same_bytes(path, wanted), "the repaired pack differs");
    gb_remove_dir(dir);
}

int main(void) {
    RUN(damaged_chunks_are_made_again);
    RUN(a_pack_fitted_from_better_weights_needs_them);
    RUN(a_wrong_imatrix_stops_only_what_needs_it);
    RUN(files_that_were_not_used_are_not_needed);
    RUN(files_that_do_not_open_stop_only_what_needs_them);
    RUN(what_was_made_with_an_imatrix_says_so);
    RUN(another_source_is_refused);
    RUN(a_directory_that_is_not_the_sources_is_refused);
    RUN(better_weights_may_lack_what_is_not_decoded);
    return CHECK_EXIT();
}
