/* formats/model.c - configuration from metadata, roles from names, fingerprints.  See model.h.
 *
 * Shapes are checked against tensors, never assumed: of two sources of one number (a key, a tensor's shape), the
 * tensor decides and a key that disagrees is refused.
 */
#include "formats/model.h"

#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *spk_arch_name(uint32_t arch) {
    switch (arch) {
    case SPK_ARCH_QWEN35MOE: return "qwen35moe";
    case SPK_ARCH_QWEN3MOE:  return "qwen3moe";
    case SPK_ARCH_QWEN35:    return "qwen35";
    default:                 return "unknown";
    }
}

bool spk_model_layer_is_attention(const spk_model_config *config, uint32_t layer) {
    return (layer + 1) % config->full_attention_interval == 0;
}

/* ---- Roles ---- */

enum { IN_GDN = 1, IN_ATTENTION = 2, IN_ANY = 3 };

/* Which layers a role occurs in, and its suffix after "blk.N.".  FFN_NORM has two names, by architecture. */
static const struct { spk_role role; int layers; const char *suffix; } layer_roles[] = {
    { SPK_ROLE_ATTN_NORM,     IN_ANY,       "attn_norm.weight" },
    { SPK_ROLE_GDN_QKV,       IN_GDN,       "attn_qkv.weight" },
    { SPK_ROLE_GDN_GATE,      IN_GDN,       "attn_gate.weight" },
    { SPK_ROLE_GDN_ALPHA,     IN_GDN,       "ssm_alpha.weight" },
    { SPK_ROLE_GDN_BETA,      IN_GDN,       "ssm_beta.weight" },
    { SPK_ROLE_GDN_CONV,      IN_GDN,       "ssm_conv1d.weight" },
    { SPK_ROLE_GDN_A,         IN_GDN,       "ssm_a" },
    { SPK_ROLE_GDN_DT,        IN_GDN,       "ssm_dt.bias" },
    { SPK_ROLE_GDN_NORM,      IN_GDN,       "ssm_norm.weight" },
    { SPK_ROLE_GDN_OUT,       IN_GDN,       "ssm_out.weight" },
    { SPK_ROLE_ATTN_Q,        IN_ATTENTION, "attn_q.weight" },
    { SPK_ROLE_ATTN_K,        IN_ATTENTION, "attn_k.weight" },
    { SPK_ROLE_ATTN_V,        IN_ATTENTION, "attn_v.weight" },
    { SPK_ROLE_ATTN_Q_NORM,   IN_ATTENTION, "attn_q_norm.weight" },
    { SPK_ROLE_ATTN_K_NORM,   IN_ATTENTION, "attn_k_norm.weight" },
    { SPK_ROLE_ATTN_OUT,      IN_ATTENTION, "attn_output.weight" },
    { SPK_ROLE_ROUTER,        IN_ANY,       "ffn_gate_inp.weight" },
    { SPK_ROLE_SHARED_ROUTER, IN_ANY,       "ffn_gate_inp_shexp.weight" },
    { SPK_ROLE_SHARED_GATE,   IN_ANY,       "ffn_gate_shexp.weight" },
    { SPK_ROLE_SHARED_UP,     IN_ANY,       "ffn_up_shexp.weight" },
    { SPK_ROLE_SHARED_DOWN,   IN_ANY,       "ffn_down_shexp.weight" },
    { SPK_ROLE_EXPERT_GATE,   IN_ANY,       "ffn_gate_exps.weight" },
    { SPK_ROLE_EXPERT_UP,     IN_ANY,       "ffn_up_exps.weight" },
    { SPK_ROLE_EXPERT_DOWN,   IN_ANY,       "ffn_down_exps.weight" },
    { SPK_ROLE_FFN_GATE,      IN_ANY,       "ffn_gate.weight" },
    { SPK_ROLE_FFN_UP,        IN_ANY,       "ffn_up.weight" },
    { SPK_ROLE_FFN_DOWN,      IN_ANY,       "ffn_down.weight" },
};
enum { LAYER_ROLE_COUNT = sizeof layer_roles / sizeof *layer_roles };

static const char *ffn_norm_suffix(uint32_t arch) {
    return arch == SPK_ARCH_QWEN3MOE ? "ffn_norm.weight" : "post_attention_norm.weight";
}

/* True if the model's decode step has this role at all (in some layer). */
static bool role_is_used(const spk_model_config *c, spk_role role) {
    switch (role) {
    case SPK_ROLE_ROUTER: case SPK_ROLE_EXPERT_GATE: case SPK_ROLE_EXPERT_UP: case SPK_ROLE_EXPERT_DOWN:
        return c->expert_count > 0;
    case SPK_ROLE_SHARED_ROUTER: case SPK_ROLE_SHARED_GATE: case SPK_ROLE_SHARED_UP: case SPK_ROLE_SHARED_DOWN:
        return c->shared_ff_size > 0;
    case SPK_ROLE_FFN_GATE: case SPK_ROLE_FFN_UP: case SPK_ROLE_FFN_DOWN:
        return c->dense_ff_size > 0;
    case SPK_ROLE_OUTPUT:
        return !c->is_tied;
    default:
        return true;
    }
}

spk_role spk_model_role(const spk_model_config *config, const char *name, uint32_t *layer) {
    *layer = 0;
    if (strcmp(name, "token_embd.weight") == 0) return SPK_ROLE_TOKEN_EMBD;
    if (strcmp(name, "output_norm.weight") == 0) return SPK_ROLE_OUTPUT_NORM;
    if (strcmp(name, "output.weight") == 0) return config->is_tied ? SPK_ROLE_EXTRA : SPK_ROLE_OUTPUT;
    if (strncmp(name, "blk.", 4) != 0) return SPK_ROLE_EXTRA;
    const char *digit = name + 4;
    uint32_t index = 0, digit_count = 0;
    for (; *digit >= '0' && *digit <= '9' && digit_count < 6; digit++, digit_count++)
        index = index * 10 + (uint32_t)(*digit - '0');
    bool has_leading_zero = digit_count > 1 && name[4] == '0';
    if (digit_count == 0 || has_leading_zero || *digit != '.' || index >= config->layer_count) return SPK_ROLE_EXTRA;
    const char *suffix = digit + 1;
    int kind = spk_model_layer_is_attention(config, index) ? IN_ATTENTION : IN_GDN;
    spk_role role = SPK_ROLE_EXTRA;
    if (strcmp(suffix, ffn_norm_suffix(config->arch)) == 0) {
        role = SPK_ROLE_FFN_NORM;
    } else {
        for (size_t i = 0; i < LAYER_ROLE_COUNT; i++)
            if ((layer_roles[i].layers & kind) && strcmp(suffix, layer_roles[i].suffix) == 0) role = layer_roles[i].role;
    }
    if (!role_is_used(config, role)) return SPK_ROLE_EXTRA;
    *layer = role == SPK_ROLE_EXTRA ? 0 : index;
    return role;
}

bool spk_role_is_protected(spk_role role) {
    switch (role) {
    case SPK_ROLE_ATTN_NORM: case SPK_ROLE_FFN_NORM: case SPK_ROLE_OUTPUT_NORM:
    case SPK_ROLE_ATTN_Q_NORM: case SPK_ROLE_ATTN_K_NORM:
    case SPK_ROLE_GDN_ALPHA: case SPK_ROLE_GDN_BETA: case SPK_ROLE_GDN_CONV: case SPK_ROLE_GDN_A:
    case SPK_ROLE_GDN_DT: case SPK_ROLE_GDN_NORM:
    case SPK_ROLE_ROUTER: case SPK_ROLE_SHARED_ROUTER:
        return true;
    default:
        return false;
    }
}

/* ---- Tensor lookup and shape checks ---- */

/* Names sorted once, so that checking a model of many tensors stays O(n log n). */
typedef struct {
    const spk_tensor **sorted;
    uint64_t           count;
    const char        *where;
} tensor_index;

static int compare_names(const void *a, const void *b) {
    return strcmp((*(const spk_tensor *const *)a)->name, (*(const spk_tensor *const *)b)->name);
}

static spk_status tensor_index_make(const spk_tensor *tensors, uint64_t count, const char *where, tensor_index *out,
                                    spk_error *err) {
    out->sorted = malloc((count + 1) * sizeof *out->sorted);
    if (out->sorted == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", where);
    out->count = count;
    out->where = where;
    for (uint64_t i = 0; i < count; i++) out->sorted[i] = &tensors[i];
    qsort(out->sorted, count, sizeof *out->sorted, compare_names);
    return SPK_OK;
}

static int compare_key(const void *key, const void *element) {
    return strcmp(key, (*(const spk_tensor *const *)element)->name);
}

static const spk_tensor *tensor_find(const tensor_index *index, const char *name) {
    const spk_tensor **found = bsearch(name, index->sorted, index->count, sizeof *index->sorted, compare_key);
    return found == NULL ? NULL : *found;
}

static spk_status expect_shape(const tensor_index *index, const char *name, uint64_t d0, uint64_t d1, uint64_t d2,
                               spk_error *err) {
    const spk_tensor *t = tensor_find(index, name);
    if (t == NULL) return spk_fail(err, SPK_E_MISSING, "%s: tensor '%s' is missing", index->where, name);
    if (t->dims[0] != d0 || t->dims[1] != d1 || t->dims[2] != d2 || t->dims[3] != 1)
        return spk_fail(err, SPK_E_SHAPE,
                        "%s: tensor '%s' has shape [%" PRIu64 ", %" PRIu64 ", %" PRIu64 ", %" PRIu64
                        "], expected [%" PRIu64 ", %" PRIu64 ", %" PRIu64 ", 1]",
                        index->where, name, t->dims[0], t->dims[1], t->dims[2], t->dims[3], d0, d1, d2);
    return SPK_OK;
}

/* The shape [d0, d1, d2] that a role must have. */
static void role_shape(const spk_model_config *c, spk_role role, uint64_t d[3]) {
    uint64_t hidden = c->hidden_size, key_dim = (uint64_t)c->gdn_k_head_count * c->gdn_k_dim;
    uint64_t value_dim = (uint64_t)c->gdn_v_head_count * c->gdn_v_dim, conv_dim = 2 * key_dim + value_dim;
    uint64_t q_dim = (uint64_t)c->head_count * c->head_dim, kv_dim = (uint64_t)c->kv_head_count * c->head_dim;
    d[0] = hidden;
    d[1] = d[2] = 1;
    switch (role) {
    case SPK_ROLE_TOKEN_EMBD: case SPK_ROLE_OUTPUT: d[1] = c->vocab_size; break;
    case SPK_ROLE_GDN_QKV:     d[1] = conv_dim; break;
    case SPK_ROLE_GDN_GATE:    d[1] = value_dim; break;
    case SPK_ROLE_GDN_ALPHA: case SPK_ROLE_GDN_BETA: d[1] = c->gdn_v_head_count; break;
    case SPK_ROLE_GDN_CONV:    d[0] = c->conv_kernel; d[1] = conv_dim; break;
    case SPK_ROLE_GDN_A: case SPK_ROLE_GDN_DT: d[0] = c->gdn_v_head_count; break;
    case SPK_ROLE_GDN_NORM:    d[0] = c->gdn_v_dim; break;
    case SPK_ROLE_GDN_OUT:     d[0] = value_dim; d[1] = hidden; break;
    case SPK_ROLE_ATTN_Q:      d[1] = c->has_attention_gate ? 2 * q_dim : q_dim; break;
    case SPK_ROLE_ATTN_K: case SPK_ROLE_ATTN_V: d[1] = kv_dim; break;
    case SPK_ROLE_ATTN_Q_NORM: case SPK_ROLE_ATTN_K_NORM: d[0] = c->head_dim; break;
    case SPK_ROLE_ATTN_OUT:    d[0] = q_dim; d[1] = hidden; break;
    case SPK_ROLE_ROUTER:      d[1] = c->expert_count; break;
    case SPK_ROLE_SHARED_GATE: case SPK_ROLE_SHARED_UP: d[1] = c->shared_ff_size; break;
    case SPK_ROLE_SHARED_DOWN: d[0] = c->shared_ff_size; d[1] = hidden; break;
    case SPK_ROLE_EXPERT_GATE: case SPK_ROLE_EXPERT_UP: d[1] = c->expert_ff_size; d[2] = c->expert_count; break;
    case SPK_ROLE_EXPERT_DOWN: d[0] = c->expert_ff_size; d[1] = hidden; d[2] = c->expert_count; break;
    case SPK_ROLE_FFN_GATE: case SPK_ROLE_FFN_UP: d[1] = c->dense_ff_size; break;
    case SPK_ROLE_FFN_DOWN:    d[0] = c->dense_ff_size; d[1] = hidden; break;
    default: break;
    }
}

static spk_status check_role(const spk_model_config *c, const tensor_index *index, spk_role role, const char *name,
                             spk_error *err) {
    uint64_t d[3];
    role_shape(c, role, d);
    return expect_shape(index, name, d[0], d[1], d[2], err);
}

static spk_status check_tensors(const spk_model_config *c, const tensor_index *index, spk_error *err) {
    SPK_TRY(check_role(c, index, SPK_ROLE_TOKEN_EMBD, "token_embd.weight", err));
    SPK_TRY(check_role(c, index, SPK_ROLE_OUTPUT_NORM, "output_norm.weight", err));
    if (!c->is_tied) SPK_TRY(check_role(c, index, SPK_ROLE_OUTPUT, "output.weight", err));
    for (uint32_t layer = 0; layer < c->layer_count; layer++) {
        int kind = spk_model_layer_is_attention(c, layer) ? IN_ATTENTION : IN_GDN;
        char name[64];
        for (size_t i = 0; i < LAYER_ROLE_COUNT; i++) {
            if (!(layer_roles[i].layers & kind) || !role_is_used(c, layer_roles[i].role)) continue;
            (void)snprintf(name, sizeof name, "blk.%u.%s", layer, layer_roles[i].suffix);
            SPK_TRY(check_role(c, index, layer_roles[i].role, name, err));
        }
        (void)snprintf(name, sizeof name, "blk.%u.%s", layer, ffn_norm_suffix(c->arch));
        SPK_TRY(check_role(c, index, SPK_ROLE_FFN_NORM, name, err));
    }
    return SPK_OK;
}

/* A tensor with the name of a layer's role, in a place where this configuration does not read it, means that the
 * configuration is not the model's: fewer layers, no shared expert, another kind of layer.  Decoding would go on without
 * it, silently. */
static spk_status check_strays(const spk_model_config *c, const tensor_index *index, spk_error *err) {
    for (uint64_t i = 0; i < index->count; i++) {
        unsigned block;
        int end = 0;
        uint32_t layer;
        const char *name = index->sorted[i]->name;
        if (sscanf(name, "blk.%5u.%n", &block, &end) != 1 || end == 0) continue;
        bool is_known = strcmp(name + end, ffn_norm_suffix(c->arch)) == 0;
        for (size_t r = 0; r < LAYER_ROLE_COUNT && !is_known; r++) is_known = strcmp(name + end, layer_roles[r].suffix) == 0;
        bool is_mtp = block >= c->layer_count && block < c->layer_count + c->mtp_layer_count;
        if (!is_known || is_mtp || spk_model_role(c, name, &layer) != SPK_ROLE_EXTRA) continue;
        return spk_fail(err, SPK_E_MISMATCH, "%s: tensor '%s' has no place in a model of %u layers as its metadata describe it",
                        index->where, name, c->layer_count);
    }
    return SPK_OK;
}

/* ---- Limits and consistency of a configuration ---- */

static spk_status check_range(const char *where, const char *what, uint64_t value, uint64_t low, uint64_t high,
                              spk_error *err) {
    if (value < low || value > high)
        return spk_fail(err, value < low ? SPK_E_CORRUPT : SPK_E_LIMIT,
                        "%s: %s is %" PRIu64 ", expected %" PRIu64 " to %" PRIu64, where, what, value, low, high);
    return SPK_OK;
}

static spk_status check_config_moe(const spk_model_config *c, const char *where, spk_error *err) {
    bool is_moe = c->arch != SPK_ARCH_QWEN35;
    if (!is_moe) {
        if (c->expert_count || c->expert_used_count || c->expert_ff_size || c->shared_ff_size)
            return spk_fail(err, SPK_E_CORRUPT, "%s: a dense model with experts", where);
        return check_range(where, "feed_forward_length", c->dense_ff_size, 1, SPK_WIDTH_MAX, err);
    }
    if (c->dense_ff_size) return spk_fail(err, SPK_E_CORRUPT, "%s: a model of experts with a dense FFN", where);
    SPK_TRY(check_range(where, "expert_count", c->expert_count, 1, SPK_EXPERT_COUNT_MAX, err));
    uint64_t used_max = c->expert_count < SPK_EXPERT_USED_COUNT_MAX ? c->expert_count : SPK_EXPERT_USED_COUNT_MAX;
    SPK_TRY(check_range(where, "expert_used_count", c->expert_used_count, 1, used_max, err));
    SPK_TRY(check_range(where, "expert_feed_forward_length", c->expert_ff_size, 1, SPK_WIDTH_MAX, err));
    return check_range(where, "expert_shared_feed_forward_length", c->shared_ff_size, 0, SPK_WIDTH_MAX, err);
}

static spk_status check_config_gdn(const spk_model_config *c, const char *where, spk_error *err) {
    if (c->full_attention_interval == 1) {
        if (c->gdn_k_head_count || c->gdn_v_head_count || c->gdn_k_dim || c->gdn_v_dim || c->conv_kernel)
            return spk_fail(err, SPK_E_CORRUPT, "%s: GDN sizes in a model without GDN layers", where);
        return SPK_OK;
    }
    SPK_TRY(check_range(where, "ssm.group_count (GDN K heads)", c->gdn_k_head_count, 1, SPK_HEAD_COUNT_MAX, err));
    SPK_TRY(check_range(where, "ssm.time_step_rank (GDN V heads)", c->gdn_v_head_count, 1, SPK_HEAD_COUNT_MAX, err));
    SPK_TRY(check_range(where, "ssm.state_size", c->gdn_k_dim, 1, SPK_HEAD_DIM_MAX, err));
    SPK_TRY(check_range(where, "GDN value head size", c->gdn_v_dim, 1, SPK_HEAD_DIM_MAX, err));
    SPK_TRY(check_range(where, "ssm.conv_kernel", c->conv_kernel, 1, SPK_CONV_KERNEL_MAX, err));
    if (c->gdn_v_head_count % c->gdn_k_head_count != 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: %u GDN V heads are not a multiple of %u K heads", where,
                        c->gdn_v_head_count, c->gdn_k_head_count);
    return SPK_OK;
}

static spk_status check_config(const spk_model_config *c, const char *where, spk_error *err) {
    SPK_TRY(check_range(where, "architecture id", c->arch, SPK_ARCH_QWEN35MOE, SPK_ARCH_QWEN35, err));
    SPK_TRY(check_range(where, "layer count", c->layer_count, 1, SPK_LAYER_COUNT_MAX, err));
    SPK_TRY(check_range(where, "nextn_predict_layers", c->mtp_layer_count, 0, SPK_LAYER_COUNT_MAX, err));
    SPK_TRY(check_range(where, "context_length", c->context_length, 1, SPK_CONTEXT_MAX, err));
    SPK_TRY(check_range(where, "vocabulary size", c->vocab_size, 1, SPK_VOCAB_MAX, err));
    SPK_TRY(check_range(where, "embedding_length", c->hidden_size, 1, SPK_WIDTH_MAX, err));
    SPK_TRY(check_range(where, "attention.head_count", c->head_count, 1, SPK_HEAD_COUNT_MAX, err));
    SPK_TRY(check_range(where, "attention.head_count_kv", c->kv_head_count, 1, c->head_count, err));
    SPK_TRY(check_range(where, "attention.key_length", c->head_dim, 2, SPK_HEAD_DIM_MAX, err));
    SPK_TRY(check_range(where, "rope.dimension_count", c->rope_dim, 2, c->head_dim, err));
    SPK_TRY(check_range(where, "full_attention_interval", c->full_attention_interval, 1, SPK_LAYER_COUNT_MAX, err));
    if (c->rope_dim % 2 != 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: rope.dimension_count is %u, expected an even number", where, c->rope_dim);
    if (c->head_count % c->kv_head_count != 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: %u attention heads are not a multiple of %u KV heads", where,
                        c->head_count, c->kv_head_count);
    if (!(c->rms_eps > 0.0f && c->rms_eps < 1.0f))
        return spk_fail(err, SPK_E_CORRUPT, "%s: layer_norm_rms_epsilon is %g, expected between 0 and 1", where,
                        (double)c->rms_eps);
    if (!(c->rope_base > 1.0f && isfinite(c->rope_base)))
        return spk_fail(err, SPK_E_CORRUPT, "%s: rope.freq_base is %g, expected above 1", where, (double)c->rope_base);
    if (c->has_attention_gate != (c->arch != SPK_ARCH_QWEN3MOE) || c->is_tied > 1)
        return spk_fail(err, SPK_E_CORRUPT, "%s: a flag of the model configuration is out of range", where);
    SPK_TRY(check_config_gdn(c, where, err));
    return check_config_moe(c, where, err);
}

/* ---- Reading the metadata ---- */

typedef struct {
    const spk_kv_set *kvs;
    const char       *arch, *where;
} metadata;

static const spk_kv *find_key(const metadata *m, const char *key, char full[128]) {
    (void)snprintf(full, 128, "%s.%s", m->arch, key);
    return spk_kv_find(m->kvs, full);
}

/* An unsigned number.  An array (one value a layer) is taken if its non-zero elements agree. */
static spk_status read_u32(const metadata *m, const char *key, const uint32_t *fallback, uint32_t *out, spk_error *err) {
    char full[128];
    const spk_kv *kv = find_key(m, key, full);
    if (kv == NULL) {
        if (fallback == NULL) return spk_fail(err, SPK_E_MISSING, "%s: key '%s' is missing", m->where, full);
        *out = *fallback;
        return SPK_OK;
    }
    uint64_t result = 0;
    for (uint64_t i = 0; i < kv->count; i++) {
        uint64_t value;
        if (!spk_kv_u64(kv, i, &value) || value > UINT32_MAX)
            return spk_fail(err, SPK_E_CORRUPT, "%s: key '%s' is not an unsigned 32-bit number", m->where, full);
        if (value != 0 && result != 0 && value != result)
            return spk_fail(err, SPK_E_UNSUPPORTED, "%s: key '%s' differs between layers (%" PRIu64 " and %" PRIu64 ")",
                            m->where, full, result, value);
        if (value != 0) result = value;
    }
    *out = (uint32_t)result;
    return SPK_OK;
}

static spk_status read_f32(const metadata *m, const char *key, const float *fallback, float *out, spk_error *err) {
    char full[128];
    const spk_kv *kv = find_key(m, key, full);
    double value;
    if (kv == NULL) {
        if (fallback == NULL) return spk_fail(err, SPK_E_MISSING, "%s: key '%s' is missing", m->where, full);
        *out = *fallback;
        return SPK_OK;
    }
    if (kv->count != 1 || !spk_kv_f64(kv, 0, &value))
        return spk_fail(err, SPK_E_CORRUPT, "%s: key '%s' is not a number", m->where, full);
    *out = (float)value;
    return SPK_OK;
}

/* Rotary scaling changes the arithmetic; running without it would be silently wrong. */
static spk_status refuse_rope_scaling(const metadata *m, spk_error *err) {
    char full[128];
    spk_text kind;
    const spk_kv *kv = find_key(m, "rope.scaling.type", full);
    if (kv == NULL) return SPK_OK;
    if (!spk_kv_text(kv, &kind) || !(spk_text_equal(kind, "none") || spk_text_equal(kind, "")))
        return spk_fail(err, SPK_E_UNSUPPORTED, "%s: key '%s': scaled rotary embeddings are not supported, expected 'none'",
                        m->where, full);
    return SPK_OK;
}

static spk_status read_gdn(const metadata *m, spk_model_config *c, spk_error *err) {
    static const uint32_t interval_default = 4;
    SPK_TRY(read_u32(m, "full_attention_interval", &interval_default, &c->full_attention_interval, err));
    if (c->full_attention_interval <= 1) return SPK_OK;
    uint32_t inner;
    SPK_TRY(read_u32(m, "ssm.group_count", NULL, &c->gdn_k_head_count, err));
    SPK_TRY(read_u32(m, "ssm.time_step_rank", NULL, &c->gdn_v_head_count, err));
    SPK_TRY(read_u32(m, "ssm.state_size", NULL, &c->gdn_k_dim, err));
    SPK_TRY(read_u32(m, "ssm.inner_size", NULL, &inner, err));
    SPK_TRY(read_u32(m, "ssm.conv_kernel", NULL, &c->conv_kernel, err));
    if (c->gdn_v_head_count == 0 || inner % c->gdn_v_head_count != 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: ssm.inner_size %u is not a multiple of ssm.time_step_rank %u", m->where,
                        inner, c->gdn_v_head_count);
    c->gdn_v_dim = inner / c->gdn_v_head_count;
    return SPK_OK;
}

/* dims[1] of a tensor as a width; 0 where it is absent. */
static uint32_t width_of(const tensor_index *index, const char *name) {
    const spk_tensor *t = tensor_find(index, name);
    return t == NULL || t->dims[1] > UINT32_MAX ? 0 : (uint32_t)t->dims[1];
}

static spk_status read_ffn(const metadata *m, const tensor_index *index, spk_model_config *c, spk_error *err) {
    if (c->arch == SPK_ARCH_QWEN35) return read_u32(m, "feed_forward_length", NULL, &c->dense_ff_size, err);
    SPK_TRY(read_u32(m, "expert_count", NULL, &c->expert_count, err));
    SPK_TRY(read_u32(m, "expert_used_count", NULL, &c->expert_used_count, err));
    if (tensor_find(index, "blk.0.ffn_gate_up_exps.weight") != NULL)
        return spk_fail(err, SPK_E_UNSUPPORTED,
                        "%s: tensor 'blk.0.ffn_gate_up_exps.weight': merged gate and up experts are not supported, "
                        "expected ffn_gate_exps and ffn_up_exps", m->where);
    uint32_t expert_ff = width_of(index, "blk.0.ffn_gate_exps.weight");
    uint32_t shared_ff = width_of(index, "blk.0.ffn_gate_shexp.weight");
    SPK_TRY(read_u32(m, "expert_feed_forward_length", &expert_ff, &c->expert_ff_size, err));
    return read_u32(m, "expert_shared_feed_forward_length", &shared_ff, &c->shared_ff_size, err);
}

static spk_status read_config(const metadata *m, const tensor_index *index, spk_model_config *c, spk_error *err) {
    static const uint32_t zero = 0;
    static const float rope_base_default = 10000.0f;
    uint32_t block_count, value_dim, key_dim_default;
    SPK_TRY(read_u32(m, "block_count", NULL, &block_count, err));
    SPK_TRY(read_u32(m, "nextn_predict_layers", &zero, &c->mtp_layer_count, err));
    if (c->mtp_layer_count >= block_count)
        return spk_fail(err, SPK_E_CORRUPT, "%s: block_count is %u with %u MTP blocks, expected at least one layer",
                        m->where, block_count, c->mtp_layer_count);
    c->layer_count = block_count - c->mtp_layer_count;
    SPK_TRY(read_u32(m, "context_length", NULL, &c->context_length, err));
    SPK_TRY(read_u32(m, "embedding_length", NULL, &c->hidden_size, err));
    SPK_TRY(read_u32(m, "attention.head_count", NULL, &c->head_count, err));
    SPK_TRY(read_u32(m, "attention.head_count_kv", &c->head_count, &c->kv_head_count, err));
    key_dim_default = c->head_count ? c->hidden_size / c->head_count : 0;
    SPK_TRY(read_u32(m, "attention.key_length", &key_dim_default, &c->head_dim, err));
    SPK_TRY(read_u32(m, "attention.value_length", &c->head_dim, &value_dim, err));
    if (value_dim != c->head_dim)
        return spk_fail(err, SPK_E_UNSUPPORTED, "%s: attention.value_length is %u, expected key_length %u", m->where,
                        value_dim, c->head_dim);
    SPK_TRY(read_u32(m, "rope.dimension_count", &c->head_dim, &c->rope_dim, err));
    SPK_TRY(read_f32(m, "rope.freq_base", &rope_base_default, &c->rope_base, err));
    SPK_TRY(read_f32(m, "attention.layer_norm_rms_epsilon", NULL, &c->rms_eps, err));
    SPK_TRY(refuse_rope_scaling(m, err));
    c->full_attention_interval = 1;
    c->has_attention_gate = c->arch != SPK_ARCH_QWEN3MOE;
    if (c->arch != SPK_ARCH_QWEN3MOE) SPK_TRY(read_gdn(m, c, err));
    c->vocab_size = width_of(index, "token_embd.weight");
    if (c->vocab_size == 0)
        return spk_fail(err, SPK_E_MISSING, "%s: tensor 'token_embd.weight' is missing", m->where);
    c->is_tied = tensor_find(index, "output.weight") == NULL;
    return read_ffn(m, index, c, err);
}

spk_status spk_model_config_read(const spk_kv_set *kvs, const spk_tensor *tensors, uint64_t tensor_count,
                                 const char *where, spk_model_config *out, spk_error *err) {
    spk_text arch;
    const spk_kv *kv = spk_kv_find(kvs, "general.architecture");
    if (kv == NULL) return spk_fail(err, SPK_E_MISSING, "%s: key 'general.architecture' is missing", where);
    if (!spk_kv_text(kv, &arch))
        return spk_fail(err, SPK_E_CORRUPT, "%s: key 'general.architecture' is not a string", where);
    spk_model_config config = { 0 };
    for (uint32_t id = SPK_ARCH_QWEN35MOE; id <= SPK_ARCH_QWEN35; id++)
        if (spk_text_equal(arch, spk_arch_name(id))) config.arch = id;
    if (config.arch == 0) {
        int shown = arch.size_bytes < 64 ? (int)arch.size_bytes : 64;
        return spk_fail(err, SPK_E_UNSUPPORTED,
                        "%s: general.architecture is '%.*s', expected qwen35moe, qwen3moe or qwen35", where, shown,
                        arch.bytes);
    }
    metadata m = { kvs, spk_arch_name(config.arch), where };
    tensor_index index;
    SPK_TRY(tensor_index_make(tensors, tensor_count, where, &index, err));
    spk_status status = read_config(&m, &index, &config, err);
    if (status == SPK_OK) status = check_config(&config, where, err);
    if (status == SPK_OK) status = check_tensors(&config, &index, err);
    if (status == SPK_OK) status = check_strays(&config, &index, err);
    free(index.sorted);
    if (status == SPK_OK) *out = config;
    return status;
}

/* ---- A stored configuration ---- */

#define FIELD(field, is_float) { #field, offsetof(spk_model_config, field), is_float }
static const struct { const char *name; size_t offset_bytes; bool is_float; } config_fields[] = {
    FIELD(arch, false), FIELD(layer_count, false), FIELD(mtp_layer_count, false), FIELD(context_length, false),
    FIELD(vocab_size, false), FIELD(hidden_size, false), FIELD(head_count, false), FIELD(kv_head_count, false),
    FIELD(head_dim, false), FIELD(rope_dim, false), FIELD(rope_base, true), FIELD(rms_eps, true),
    FIELD(full_attention_interval, false), FIELD(has_attention_gate, false), FIELD(gdn_k_head_count, false),
    FIELD(gdn_v_head_count, false), FIELD(gdn_k_dim, false), FIELD(gdn_v_dim, false), FIELD(conv_kernel, false),
    FIELD(expert_count, false), FIELD(expert_used_count, false), FIELD(expert_ff_size, false), FIELD(shared_ff_size, false),
    FIELD(dense_ff_size, false), FIELD(is_tied, false),
};
enum { CONFIG_FIELD_COUNT = sizeof config_fields / sizeof *config_fields };
SPK_STATIC_ASSERT(CONFIG_FIELD_COUNT * sizeof(uint32_t) == offsetof(spk_model_config, reserved), "every field is compared");

static void config_field_text(uint32_t bits, bool is_float, char out[24]) {
    float value;
    memcpy(&value, &bits, sizeof value);
    if (is_float) (void)snprintf(out, 24, "%.9g", (double)value);
    else (void)snprintf(out, 24, "%" PRIu32, bits);
}

spk_status spk_model_config_check(const spk_model_config *stored, const spk_kv_set *kvs, const spk_tensor *tensors,
                                  uint64_t tensor_count, const char *where, spk_error *err) {
    spk_model_config config;
    SPK_TRY(spk_model_config_read(kvs, tensors, tensor_count, where, &config, err));
    for (size_t i = 0; i < CONFIG_FIELD_COUNT; i++) {
        uint32_t found, expected;
        memcpy(&found, (const char *)stored + config_fields[i].offset_bytes, sizeof found);
        memcpy(&expected, (const char *)&config + config_fields[i].offset_bytes, sizeof expected);
        if (found == expected) continue;
        char found_text[24], expected_text[24];
        config_field_text(found, config_fields[i].is_float, found_text);
        config_field_text(expected, config_fields[i].is_float, expected_text);
        return spk_fail(err, SPK_E_MISMATCH, "%s: CONFIG: %s is %s, expected %s, as the metadata and tensors say", where,
                        config_fields[i].name, found_text, expected_text);
    }
    return SPK_OK;
}

size_t spk_model_fingerprint(const spk_model_config *c, char *out, size_t size) {
    char gdn[48] = "", ffn[48];
    if (c->full_attention_interval > 1)
        (void)snprintf(gdn, sizeof gdn, " gdn%u/%ux%ux%uc%ui%u", c->gdn_k_head_count, c->gdn_v_head_count, c->gdn_k_dim,
                       c->gdn_v_dim, c->conv_kernel, c->full_attention_interval);
    if (c->expert_count > 0)
        (void)snprintf(ffn, sizeof ffn, "moe%u/%ux%u+%u", c->expert_used_count, c->expert_count, c->expert_ff_size,
                       c->shared_ff_size);
    else
        (void)snprintf(ffn, sizeof ffn, "ffn%u", c->dense_ff_size);
    int length = snprintf(out, size, "%s L%u H%u V%u attn%u/%ux%ur%u%s %s", spk_arch_name(c->arch), c->layer_count,
                          c->hidden_size, c->vocab_size, c->head_count, c->kv_head_count, c->head_dim, c->rope_dim, gdn,
                          ffn);
    return length < 0 ? 0 : (size_t)length;
}
