/* tests/model_build.h - a small random hybrid model (qwen35) of a given shape as a GGUF, for shapes that no bundled model
 * has.  The weights mean nothing; their scales keep activations near one. */
#ifndef SPK_MODEL_BUILD_H
#define SPK_MODEL_BUILD_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/blocks.h"
#include "formats/gguf.h"
#include "tests/check.h"

typedef struct {
    uint32_t hidden, layers, heads, kv_heads, head_dim, k_heads, v_heads, gdn_dim, ff, vocab;
    uint32_t type;           /* of the matrices: F32 or Q8_0 */
} model_shape;

typedef struct {
    uint8_t             *kvs;
    uint64_t             kv_bytes, kv_count;
    spk_gguf_tensor_spec tensors[512];
    uint64_t             tensor_count;
} model_parts;

static void model_key(model_parts *m, const char *key, uint32_t type, const void *value, uint64_t size) {
    uint64_t length = strlen(key);
    uint8_t *at = m->kvs + m->kv_bytes;
    memcpy(at, &length, 8);
    memcpy(at + 8, key, length);
    memcpy(at + 8 + length, &type, 4);
    memcpy(at + 12 + length, value, size);
    m->kv_bytes += 12 + length + size;
    m->kv_count++;
}

static void model_u32(model_parts *m, const char *key, uint32_t value) { model_key(m, key, SPK_KV_U32, &value, 4); }

static void model_tensor(model_parts *m, int layer, const char *name, uint32_t type, uint64_t d0, uint64_t d1) {
    spk_gguf_tensor_spec *t = &m->tensors[m->tensor_count++];
    *t = (spk_gguf_tensor_spec){ .type = type, .dim_count = d1 == 0 ? 1 : 2, .dims = { d0, d1 == 0 ? 1 : d1, 1, 1 } };
    if (layer < 0) (void)snprintf(t->name, sizeof t->name, "%s", name);
    else (void)snprintf(t->name, sizeof t->name, "blk.%d.%s", layer, name);
}

static void model_layer(model_parts *m, const model_shape *s, int i) {
    uint64_t q = (uint64_t)s->heads * s->head_dim, kv = (uint64_t)s->kv_heads * s->head_dim;
    uint64_t k = (uint64_t)s->k_heads * s->gdn_dim, v = (uint64_t)s->v_heads * s->gdn_dim;
    model_tensor(m, i, "attn_norm.weight", SPK_TYPE_F32, s->hidden, 0);
    model_tensor(m, i, "post_attention_norm.weight", SPK_TYPE_F32, s->hidden, 0);
    if ((i + 1) % 2 == 0) {
        model_tensor(m, i, "attn_q.weight", s->type, s->hidden, 2 * q);
        model_tensor(m, i, "attn_k.weight", s->type, s->hidden, kv);
        model_tensor(m, i, "attn_v.weight", s->type, s->hidden, kv);
        model_tensor(m, i, "attn_output.weight", s->type, q, s->hidden);
        model_tensor(m, i, "attn_q_norm.weight", SPK_TYPE_F32, s->head_dim, 0);
        model_tensor(m, i, "attn_k_norm.weight", SPK_TYPE_F32, s->head_dim, 0);
    } else {
        model_tensor(m, i, "attn_qkv.weight", s->type, s->hidden, 2 * k + v);
        model_tensor(m, i, "attn_gate.weight", s->type, s->hidden, v);
        model_tensor(m, i, "ssm_conv1d.weight", SPK_TYPE_F32, 4, 2 * k + v);
        model_tensor(m, i, "ssm_dt.bias", SPK_TYPE_F32, s->v_heads, 0);
        model_tensor(m, i, "ssm_a", SPK_TYPE_F32, s->v_heads, 0);
        model_tensor(m, i, "ssm_alpha.weight", SPK_TYPE_F32, s->hidden, s->v_heads);
        model_tensor(m, i, "ssm_beta.weight", SPK_TYPE_F32, s->hidden, s->v_heads);
        model_tensor(m, i, "ssm_norm.weight", SPK_TYPE_F32, s->gdn_dim, 0);
        model_tensor(m, i, "ssm_out.weight", s->type, v, s->hidden);
    }
    model_tensor(m, i, "ffn_gate.weight", s->type, s->hidden, s->ff);
    model_tensor(m, i, "ffn_up.weight", s->type, s->hidden, s->ff);
    model_tensor(m, i, "ffn_down.weight", s->type, s->ff, s->hidden);
}

/* Random contents: norms near 1, ssm_a negative, matrices with rows of norm about 1. */
static void model_fill(const spk_gguf_tensor_spec *t, uint8_t *out, uint64_t *seed) {
    uint64_t count = t->dims[0] * t->dims[1];
    bool is_norm = strstr(t->name, "norm") != NULL, is_a = strstr(t->name, "ssm_a") != NULL && t->dim_count == 1;
    float scale = 1.7f / sqrtf((float)t->dims[0]);
    for (uint64_t i = 0; t->type == SPK_TYPE_F32 && i < count; i++) {
        float r = check_uniform(seed), value = is_norm ? 1.0f + 0.3f * r : is_a ? -0.5f - 0.4f * r : scale * r;
        memcpy(out + 4 * i, &value, 4);
    }
    for (uint64_t b = 0; t->type == SPK_TYPE_Q8_0 && b < count / 32; b++) {
        spk_block_q8_0 block = { .d = spk_f32_to_f16(scale / 127.0f) };
        for (int i = 0; i < 32; i++) block.qs[i] = (int8_t)(127.0f * check_uniform(seed));
        memcpy(out + 34 * b, &block, 34);
    }
}

static void model_build(const char *path, const model_shape *s, uint64_t seed) {
    spk_error err = { 0 };
    spk_gguf_writer *writer = NULL;
    model_parts *m = calloc(1, sizeof *m);
    m->kvs = calloc(1, 1 << 16);
    uint64_t length = 6;
    uint8_t arch[14] = { 0 };
    memcpy(arch, &length, 8);
    memcpy(arch + 8, "qwen35", 6);
    model_key(m, "general.architecture", SPK_KV_STRING, arch, sizeof arch);
    const struct { const char *key; uint32_t value; } keys[] = {
        { "block_count", s->layers }, { "context_length", 1024 }, { "embedding_length", s->hidden },
        { "feed_forward_length", s->ff }, { "attention.head_count", s->heads }, { "attention.head_count_kv", s->kv_heads },
        { "attention.key_length", s->head_dim }, { "attention.value_length", s->head_dim },
        { "rope.dimension_count", s->head_dim / 4 }, { "ssm.conv_kernel", 4 }, { "ssm.state_size", s->gdn_dim },
        { "ssm.group_count", s->k_heads }, { "ssm.time_step_rank", s->v_heads }, { "ssm.inner_size", s->v_heads * s->gdn_dim },
        { "full_attention_interval", 2 } };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char full[64];
        (void)snprintf(full, sizeof full, "qwen35.%s", keys[i].key);
        model_u32(m, full, keys[i].value);
    }
    float eps = 1e-6f, base = 1e6f;
    model_key(m, "qwen35.attention.layer_norm_rms_epsilon", SPK_KV_F32, &eps, 4);
    model_key(m, "qwen35.rope.freq_base", SPK_KV_F32, &base, 4);
    model_tensor(m, -1, "token_embd.weight", s->type, s->hidden, s->vocab);
    model_tensor(m, -1, "output_norm.weight", SPK_TYPE_F32, s->hidden, 0);
    for (uint32_t i = 0; i < s->layers; i++) model_layer(m, s, (int)i);
    spk_gguf_writer_options options = { .path = path, .replace = true, .version = 3, .alignment_bytes = 32, .kv_bytes = m->kvs,
                                        .kv_bytes_size = m->kv_bytes, .kv_count = m->kv_count, .tensors = m->tensors,
                                        .tensor_count = m->tensor_count };
    CHECK_OK(spk_gguf_writer_begin(&options, &writer, &err), err);
    for (uint64_t i = 0; i < m->tensor_count; i++) {
        const spk_gguf_tensor_spec *t = &m->tensors[i];
        uint64_t bytes = t->type == SPK_TYPE_F32 ? 4 * t->dims[0] * t->dims[1] : t->dims[0] * t->dims[1] / 32 * 34;
        uint8_t *data = malloc(bytes);
        model_fill(t, data, &seed);
        CHECK_OK(spk_gguf_writer_append(writer, data, bytes, &err), err);
        free(data);
    }
    CHECK_OK(spk_gguf_writer_commit(writer, &err), err);
    free(m->kvs);
    free(m);
}

#endif
