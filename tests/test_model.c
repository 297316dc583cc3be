/* tests/test_model.c - configuration, roles, fingerprints, placement and runs. */
#include <stdlib.h>
#include <string.h>

#include "formats/gguf.h"
#include "formats/model.h"
#include "tests/check.h"

static const char TINY36[] = "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf";
static const char TINY30[] = "tests/models/tiny-qwen3moe-q4_k_m.gguf";
static const char TINY35[] = "tests/models/tiny-qwen35-q4_k_m.gguf";

typedef struct {
    spk_gguf        *gguf;
    spk_tensor      *tensors;
    uint64_t         count;
    spk_model_config config;
} loaded;

static loaded load(const char *path) {
    spk_error err = { 0 };
    loaded m = { 0 };
    CHECK_OK(spk_gguf_open(path, &m.gguf, &err), err);
    m.count = spk_gguf_tensor_count(m.gguf);
    m.tensors = calloc(m.count + 1, sizeof *m.tensors);
    for (uint64_t i = 0; i < m.count; i++) spk_tensor_from_gguf(spk_gguf_tensor_at(m.gguf, i), &m.tensors[i]);
    CHECK_OK(spk_model_config_read(spk_gguf_kvs(m.gguf), m.tensors, m.count, path, &m.config, &err), err);
    return m;
}

static void unload(loaded *m) {
    free(m->tensors);
    spk_gguf_close(m->gguf);
}

static spk_tensor *tensor(loaded *m, const char *name) {
    for (uint64_t i = 0; i < m->count; i++)
        if (strcmp(m->tensors[i].name, name) == 0) return &m->tensors[i];
    CHECK(0, "no tensor %s", name);
    exit(1);
}

/* From now on the number `key` of a model's metadata is that of the four bytes at `value`. */
static void set_number(loaded *m, const char *key, const uint32_t *value) {
    spk_kv *kv = (spk_kv *)(uintptr_t)spk_kv_find(spk_gguf_kvs(m->gguf), key);
    CHECK(kv != NULL && kv->count == 1 && kv->value_bytes == 4, "%s", key);
    if (kv != NULL) kv->value = (const uint8_t *)value;
}

static spk_status read_config(loaded *m, spk_model_config *out, spk_error *err) {
    return spk_model_config_read(spk_gguf_kvs(m->gguf), m->tensors, m->count, "x", out, err);
}

static void fingerprints_tell_models_apart(void) {
    static const char *const want[][2] = {
        { TINY36, "qwen35moe L8 H256 V4096 attn4/2x64r16 gdn2/4x64x64c4i4 moe2/8x256+256" },
        { TINY30, "qwen3moe L4 H256 V4096 attn8/2x64r64 moe4/12x256+0" },
        { TINY35, "qwen35 L4 H256 V2048 attn4/2x64r16 gdn2/4x64x64c4i4 ffn768" },
    };
    for (int i = 0; i < 3; i++) {
        loaded m = load(want[i][0]);
        char text[SPK_FINGERPRINT_SIZE];
        size_t length = spk_model_fingerprint(&m.config, text, sizeof text);
        CHECK(strcmp(text, want[i][1]) == 0 && length == strlen(text), "%s", text);
        unload(&m);
    }
}

static void a_missing_or_misshapen_tensor_is_named(void) {
    spk_error err = { 0 };
    spk_model_config c;
    loaded m = load(TINY36);
    spk_tensor *t = tensor(&m, "blk.3.attn_q.weight");
    t->dims[1] /= 2;   /* a q without its gate rows */
    CHECK(spk_model_config_read(spk_gguf_kvs(m.gguf), m.tensors, m.count, TINY36, &c, &err) == SPK_E_SHAPE, "%s", err.text);
    CHECK(strstr(err.text, "blk.3.attn_q.weight") && strstr(err.text, "[256, 256") && strstr(err.text, "[256, 512"), "%s",
          err.text);
    t->dims[1] *= 2;
    CHECK(read_config(&m, &c, &err) == SPK_OK, "%s", err.text);
    strcpy(tensor(&m, "blk.5.ssm_a")->name, "blk.5.ssm_b");
    CHECK(read_config(&m, &c, &err) == SPK_E_MISSING, "%s", err.text);
    CHECK(strstr(err.text, "blk.5.ssm_a") != NULL, "%s", err.text);
    unload(&m);
}

/* A model that its metadata describe as smaller than it is must not run without the rest. */
static void a_tensor_without_a_place_is_refused(void) {
    static const uint32_t seven = 7, eight = 8, none = 0, width = 256;
    loaded m = load(TINY36);
    spk_error err = { 0 };
    spk_model_config c;
    set_number(&m, "qwen35moe.block_count", &seven);
    CHECK(read_config(&m, &c, &err) == SPK_E_MISMATCH && strstr(err.text, "blk.7."), "%s", err.text);
    set_number(&m, "qwen35moe.block_count", &eight);
    set_number(&m, "qwen35moe.expert_shared_feed_forward_length", &none);
    CHECK(read_config(&m, &c, &err) == SPK_E_MISMATCH && strstr(err.text, "shexp"), "%s", err.text);
    set_number(&m, "qwen35moe.expert_shared_feed_forward_length", &width);
    strcpy(tensor(&m, "blk.0.ffn_gate_shexp.weight")->name, "blk.0.other.weight");
    CHECK(spk_model_config_read(spk_gguf_kvs(m.gguf), m.tensors, m.count, TINY36, &c, &err) == SPK_E_MISSING, "%s", err.text);
    unload(&m);
}

static void a_stored_configuration_is_not_believed(void) {
    loaded m = load(TINY36);
    spk_error err = { 0 };
    CHECK_OK(spk_model_config_check(&m.config, spk_gguf_kvs(m.gguf), m.tensors, m.count, "x", &err), err);
    for (size_t word = 0; word < sizeof m.config / 4 - 7; word++) {   /* the last seven are reserved */
        static const uint32_t values[] = { 0x7fffffffu, 0xffffffffu };   /* as floats: NaN */
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            spk_model_config c = m.config;
            memcpy((char *)&c + 4 * word, &values[v], 4);
            spk_status status = spk_model_config_check(&c, spk_gguf_kvs(m.gguf), m.tensors, m.count, "x", &err);
            CHECK(status == SPK_E_MISMATCH, "word %zu value %u: %s", word, values[v], status == SPK_OK ? "passed" : err.text);
        }
    }
    unload(&m);
}

/* Beyond every limit, negative, and 0 where something must be there: whichever number of the metadata it is. */
static void numbers_beyond_a_limit_are_refused(void) {
    static const char *const keys[] = {
        "block_count", "context_length", "embedding_length", "attention.head_count",
        "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "rope.dimension_count", "rope.freq_base", "attention.layer_norm_rms_epsilon",
        "full_attention_interval", "ssm.group_count", "ssm.time_step_rank", "ssm.state_size",
        "ssm.inner_size", "ssm.conv_kernel", "expert_count", "expert_used_count",
        "expert_feed_forward_length", "expert_shared_feed_forward_length" };
    static const uint32_t values[] = { 0x7fffffffu, 0xffffffffu, 0 };        /* as floats: NaN, NaN, 0 */
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
        for (size_t v = 0; v < sizeof values / sizeof *values; v++) {
            loaded m = load(TINY36);
            spk_error err = { 0 };
            spk_model_config c;
            char key[96];
            (void)snprintf(key, sizeof key, "qwen35moe.%s", keys[k]);
            set_number(&m, key, &values[v]);
            CHECK(read_config(&m, &c, &err) != SPK_OK && strstr(err.text, "x: ") == err.text, "%s = %u: %s", key, values[v], err.text);
            unload(&m);
        }
}

static void roles_follow_the_layer(void) {
    loaded m = load(TINY36);
    uint32_t layer = 99;
    CHECK(spk_model_role(&m.config, "blk.3.attn_q.weight", &layer) == SPK_ROLE_ATTN_Q && layer == 3, "layer %u", layer);
    CHECK(spk_model_role(&m.config, "blk.2.attn_q.weight", &layer) == SPK_ROLE_EXTRA, "a GDN layer has no q");
    CHECK(spk_model_role(&m.config, "blk.2.attn_qkv.weight", &layer) == SPK_ROLE_GDN_QKV && layer == 2, "layer %u", layer);
    CHECK(spk_model_role(&m.config, "blk.8.attn_norm.weight", &layer) == SPK_ROLE_EXTRA, "block 8 is not run");
    CHECK(spk_model_role(&m.config, "blk.03.attn_norm.weight", &layer) == SPK_ROLE_EXTRA, "leading zero");
    CHECK(spk_model_role(&m.config, "blk.99999999999.attn_norm.weight", &layer) == SPK_ROLE_EXTRA, "overflow");
    CHECK(spk_model_role(&m.config, "blk.0.ffn_gate.weight", &layer) == SPK_ROLE_EXTRA, "no dense FFN here");
    CHECK(spk_model_role(&m.config, "blk.0.ffn_gate_inp.weight", &layer) == SPK_ROLE_ROUTER, "router");
    CHECK(spk_role_is_protected(SPK_ROLE_ROUTER) && spk_role_is_protected(SPK_ROLE_GDN_ALPHA) &&
          !spk_role_is_protected(SPK_ROLE_GDN_QKV) && !spk_role_is_protected(SPK_ROLE_OUTPUT), "protected roles");
    unload(&m);
}

/* Every byte of every section belongs to exactly one run, and no weight byte of one tensor to another. */
static void check_placement(const char *path) {
    spk_error err = { 0 };
    loaded m = load(path);
    uint64_t bytes[SPK_PLACE_COUNT], run_count = 0, at = 0;
    spk_run *runs = NULL;
    CHECK_OK(spk_model_place(&m.config, m.tensors, m.count, bytes, &err), err);
    CHECK_OK(spk_model_runs(m.tensors, m.count, bytes, &runs, &run_count, &err), err);
    uint32_t section = 0;
    for (uint64_t i = 0; i < run_count; i++) {
        while (runs[i].section != section) {
            CHECK(section == 0 || at == bytes[section - 1], "%s: section %u ends at %lu", path, section, (unsigned long)at);
            section++, at = 0;
        }
        CHECK(runs[i].offset_bytes == at, "%s: run %lu leaves a gap", path, (unsigned long)i);
        at += runs[i].size_bytes;
    }
    free(runs);

    for (int s = 0; s < SPK_PLACE_COUNT; s++) {
        uint8_t *owner = calloc(bytes[s] + 1, 1);
        for (uint64_t i = 0; i < m.count; i++) {
            const spk_tensor *t = &m.tensors[i];
            if (t->section != (uint32_t)s + 1) continue;
            uint64_t unit = spk_layout_unit_bytes(t->layout, t->type, t->dims[0]);
            uint64_t units = spk_layout_unit_count(t->layout, t->type, t->dims[1], t->dims[0]);
            CHECK(t->offset_bytes % 64 == 0 && t->offset_bytes + spk_tensor_span_bytes(t) <= bytes[s], "%s", t->name);
            for (uint64_t e = 0; e < spk_tensor_matrix_count(t); e++)
                for (uint64_t u = 0; u < units; u++)
                    for (uint64_t b = 0; b < unit; b++) {
                        uint8_t *o = &owner[t->offset_bytes + e * t->matrix_stride_bytes + u * t->unit_stride_bytes + b];
                        if (*o) CHECK(0, "%s: %s shares a byte", path, t->name);
                        *o = 1;
                    }
        }
        free(owner);
    }
    unload(&m);
}

static void sections_are_covered_once(void) {
    check_placement(TINY36);
    check_placement(TINY30);
    check_placement(TINY35);
    check_placement("build/models/tiny-qwen36-bf16.gguf");
}

static void experts_are_contiguous_and_gate_and_up_alternate(void) {
    spk_error err = { 0 };
    loaded m = load(TINY36);
    uint64_t bytes[SPK_PLACE_COUNT];
    CHECK_OK(spk_model_place(&m.config, m.tensors, m.count, bytes, &err), err);
    spk_tensor *gate = tensor(&m, "blk.1.ffn_gate_exps.weight"), *up = tensor(&m, "blk.1.ffn_up_exps.weight");
    spk_tensor *down = tensor(&m, "blk.1.ffn_down_exps.weight");
    CHECK(gate->layout == SPK_LAYOUT_T32 && gate->section == SPK_PLACE_EXPERTS && gate->offset_bytes % 4096 == 0, "gate");
    CHECK(up->offset_bytes == gate->offset_bytes + SPK_T32_Q4_K_BYTES, "up follows gate's tile");
    CHECK(gate->unit_stride_bytes == 2 * SPK_T32_Q4_K_BYTES && up->unit_stride_bytes == gate->unit_stride_bytes, "strides");
    CHECK(down->offset_bytes == gate->offset_bytes + 16 * SPK_T32_Q4_K_BYTES, "down follows all 8 + 8 tiles");
    CHECK(gate->matrix_stride_bytes == up->matrix_stride_bytes && gate->matrix_stride_bytes == down->matrix_stride_bytes &&
          gate->matrix_stride_bytes % 4096 == 0 && gate->matrix_stride_bytes < 16 * 4608 + 8 * 5632 + 4096, "expert stride");
    spk_tensor *embd = tensor(&m, "token_embd.weight"), *out = tensor(&m, "output.weight");
    CHECK(embd->section == SPK_PLACE_EMBEDDING && embd->layout == SPK_LAYOUT_ROWS, "embedding is read by row");
    CHECK(out->section == SPK_PLACE_STATIC && out->layout == SPK_LAYOUT_T32, "head");
    CHECK(tensor(&m, "blk.0.attn_qkv.weight")->offset_bytes < tensor(&m, "blk.0.ssm_out.weight")->offset_bytes &&
          tensor(&m, "blk.0.ssm_out.weight")->offset_bytes < tensor(&m, "blk.0.ffn_gate_shexp.weight")->offset_bytes &&
          tensor(&m, "blk.7.ffn_down_shexp.weight")->offset_bytes < out->offset_bytes, "order of consumption");
    unload(&m);
}

static void what_decode_does_not_read_goes_to_extra(void) {
    spk_error err = { 0 };
    loaded m = load(TINY36);
    uint64_t bytes[SPK_PLACE_COUNT];
    spk_tensor odd[2] = { { .name = "blk.0.unknown.weight", .type = SPK_TYPE_Q4_K, .dim_count = 4, .dims = { 512, 3, 2, 2 } },
                          { .name = "blk.8.attn_q.weight", .type = SPK_TYPE_Q4_0, .dim_count = 2, .dims = { 64, 5, 1, 1 } } };
    CHECK_OK(spk_model_place(&m.config, odd, 2, bytes, &err), err);
    for (int i = 0; i < 2; i++)
        CHECK(odd[i].section == SPK_PLACE_EXTRA && odd[i].layout == SPK_LAYOUT_ROWS, "%s", odd[i].name);
    spk_tensor alone = { .section = SPK_PLACE_EXPERTS, .type = SPK_TYPE_F32, .dims = { 4, 4, 1, 1 } };
    CHECK(spk_tensor_bytes_per_token(&(spk_model_config){ 0 }, &alone) == 0, "experts in a model without them");
    odd[0].dims[1] = UINT64_C(1) << 62;
    CHECK(spk_model_place(&m.config, odd, 2, bytes, &err) == SPK_E_LIMIT, "rows beyond any section");
    odd[0].dims[1] = 1;
    odd[0].dims[0] = UINT64_C(1) << 40;
    CHECK(spk_model_place(&m.config, odd, 2, bytes, &err) == SPK_E_LIMIT, "a row beyond the limit");
    unload(&m);
}

int main(void) {
    RUN(fingerprints_tell_models_apart);
    RUN(a_missing_or_misshapen_tensor_is_named);
    RUN(a_tensor_without_a_place_is_refused);
    RUN(a_stored_configuration_is_not_believed);
    RUN(numbers_beyond_a_limit_are_refused);
    RUN(roles_follow_the_layer);
    RUN(sections_are_covered_once);
    RUN(experts_are_contiguous_and_gate_and_up_alternate);
    RUN(what_decode_does_not_read_goes_to_extra);
    return CHECK_EXIT();
}
