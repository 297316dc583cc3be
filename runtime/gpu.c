/* runtime/gpu.c - weights on the device, and one decode step as a chain of kernels.
 *
 * Residual sums are never kernels of their own: whoever norms next adds what is pending.  x alternates between two
 * buffers, since the CTA that writes the sum must not overtake those that still read the old one.
 */
#include "runtime/gpu.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda.h"
#include "runtime/model_internal.h"

struct spk_gpu_model {
    spk_cuda *cuda;
    uint8_t  *d_sections[SPK_PLACE_COUNT];
    uint64_t  section_bytes[SPK_PLACE_COUNT];
    float    *d_vectors;
};

struct spk_gpu_session {
    const spk_model     *model;
    const spk_gpu_model *gpu;
    spk_cuda      *cuda;
    spk_cuda_step *step;
    uint32_t       fusions, context_tokens;
    uint8_t       *d_memory;
    uint64_t       memory_bytes, state_bytes;   /* states come first, so that a reset clears one range */
    spk_cuda_sequence sequence;
    unsigned long long *d_best;
    uint32_t *d_arrivals;
    float    *x[2], *delta, *project, *mixed, *normed, *conv_out, *delta_out, *cos_sin, *partial;
    float    *router, *weight, *h, *shared_h, *shared_parts, *routed, *shared, *logits;
    double   *inverse_frequency;
    uint32_t *choice;
    struct { float *conv, *delta; uint16_t *k, *v; } *layers;
};

/* ---- The model ---- */

static spk_status refuse(const spk_model *m, const char *what, spk_error *err) {
    return spk_fail(err, SPK_E_UNSUPPORTED, "backend cuda: %s: %s", m->path, what);
}

static spk_status check_shapes(const spk_model *m, spk_error *err) {
    const spk_model_config *c = &m->config;
    if (c->hidden_size % 32 != 0 || c->expert_ff_size % 32 != 0 || c->shared_ff_size % 32 != 0 || c->dense_ff_size % 32 != 0)
        return refuse(m, "a width is not a multiple of 32", err);
    if (c->head_dim != 64 && c->head_dim != 128 && c->head_dim != 256) return refuse(m, "head_dim is not 64, 128 or 256", err);
    if (c->expert_count > 256 || c->expert_used_count > 64) return refuse(m, "more than 256 experts, or 64 used", err);
    if (c->head_count / c->kv_head_count > 8) return refuse(m, "more than 8 query heads share a KV head", err);
    if (c->full_attention_interval > 1 &&
        ((c->gdn_k_dim & (c->gdn_k_dim - 1)) != 0 || c->gdn_k_dim < 32 || c->gdn_k_dim > 256 || c->gdn_v_dim % 32 != 0 || c->gdn_v_dim > 256))
        return refuse(m, "GDN heads are not of 32, 64, 128 or 256", err);
    for (uint64_t i = 0; i < m->tensor_count; i++) {
        const spk_tensor *t = &m->tensors[i];
        uint32_t layer;
        spk_role role = spk_model_role(c, t->name, &layer);
        spk_matrix w = { .type = t->type, .layout = t->layout, .row_count = t->dims[1], .col_count = t->dims[0] };
        bool is_row_table = t->section == SPK_PLACE_EMBEDDING && (w.type == SPK_TYPE_Q8_0 || w.type == SPK_TYPE_Q4_K ||
                                                                  w.type == SPK_TYPE_Q5_K || w.type == SPK_TYPE_Q6_K);
        if (role == SPK_ROLE_EXTRA || spk_role_is_vector(role) || is_row_table || spk_cuda_accepts(&w)) continue;
        return spk_fail(err, SPK_E_UNSUPPORTED, "backend cuda: %s: tensor '%s' is %s in %s, %" PRIu64 " wide, which the GPU kernels do not take",
                        m->path, t->name, spk_type_name(t->type), spk_layout_name(t->layout), t->dims[0]);
    }
    return SPK_OK;
}

static spk_status upload_model(const spk_model *m, spk_gpu_model *g, const spk_model_options *options, spk_error *err) {
    uint64_t total = 0, done = 0;
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++) {
        g->section_bytes[s] = s + 1 == SPK_PLACE_EXTRA ? 0 : m->section_bytes[s];
        total += g->section_bytes[s];
    }
    void *memory = NULL;
    SPK_TRY(spk_cuda_allocate(g->cuda, total, "the model's weights", &memory, err));
    g->d_sections[0] = memory;
    for (uint32_t s = 1; s < SPK_PLACE_COUNT; s++) g->d_sections[s] = g->d_sections[s - 1] + g->section_bytes[s - 1];
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++) {
        for (uint64_t at = 0; at < g->section_bytes[s];) {
            uint64_t size = g->section_bytes[s] - at < (UINT64_C(64) << 20) ? g->section_bytes[s] - at : UINT64_C(64) << 20;
            SPK_TRY(spk_cuda_upload(g->cuda, g->d_sections[s] + at, m->sections[s] + at, size, err));
            at += size;
            done += size;
            if (options->progress) options->progress(options->progress_context, done, total);
        }
    }
    void *vectors = NULL;
    SPK_TRY(spk_cuda_allocate(g->cuda, m->vector_count * sizeof(float), "the model's vectors", &vectors, err));
    g->d_vectors = vectors;
    return spk_cuda_upload(g->cuda, g->d_vectors, m->vectors, m->vector_count * sizeof(float), err);
}

spk_status spk_gpu_model_create(const spk_model *model, const spk_model_options *options, spk_gpu_model **out, spk_error *err) {
    spk_gpu_model *g = calloc(1, sizeof *g);
    if (g == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    spk_status status = spk_cuda_open(&g->cuda, err);
    if (status == SPK_OK) status = check_shapes(model, err);
    if (status == SPK_OK) status = upload_model(model, g, options, err);
    if (status != SPK_OK) {
        spk_gpu_model_destroy(g);
        return status;
    }
    *out = g;
    return SPK_OK;
}

void spk_gpu_model_destroy(spk_gpu_model *g) {
    if (g == NULL) return;
    if (g->d_sections[0] != NULL) spk_cuda_free(g->cuda, g->d_sections[0]);
    if (g->d_vectors != NULL) spk_cuda_free(g->cuda, g->d_vectors);
    spk_cuda_close(g->cuda);
    free(g);
}

/* The device's copy of a host matrix or vector of the model. */
static spk_matrix on_device(const spk_gpu_session *s, spk_matrix w) {
    const spk_model *m = s->model;
    for (uint32_t i = 0; i < SPK_PLACE_COUNT; i++)
        if (w.data >= m->sections[i] && w.data < m->sections[i] + m->section_bytes[i]) {
            w.data = s->gpu->d_sections[i] + (w.data - m->sections[i]);
            return w;
        }
    w.data = NULL;
    return w;
}
static const float *vector_on_device(const spk_gpu_session *s, const float *v) {
    return v == NULL ? NULL : s->gpu->d_vectors + (v - s->model->vectors);
}

/* ---- Memory of a session ---- */

typedef struct { uint8_t *base; uint64_t used; } arena;
static void *take(arena *a, uint64_t size_bytes) {
    uint64_t at = a->used;
    a->used += (size_bytes + 255) / 256 * 256;
    return a->base == NULL ? NULL : a->base + at;
}
static float *take_floats(arena *a, uint64_t count) { return take(a, count * sizeof(float)); }

static spk_cuda_attention attention_shape(const spk_model_config *c) {
    return (spk_cuda_attention){ .head_count = c->head_count, .kv_head_count = c->kv_head_count, .head_dim = c->head_dim,
                                 .rope_dim = c->rope_dim, .is_gated = c->has_attention_gate, .eps = c->rms_eps };
}

static uint64_t key_dim(const spk_model_config *c) { return (uint64_t)c->gdn_k_head_count * c->gdn_k_dim; }
static uint64_t value_dim(const spk_model_config *c) { return (uint64_t)c->gdn_v_head_count * c->gdn_v_dim; }
static uint64_t conv_dim(const spk_model_config *c) { return 2 * key_dim(c) + value_dim(c); }
static uint64_t q_dim(const spk_model_config *c) { return (uint64_t)c->head_count * c->head_dim; }

static void carve(spk_gpu_session *s, arena *a) {
    const spk_model_config *c = &s->model->config;
    uint64_t kv_elements = (uint64_t)s->context_tokens * c->kv_head_count * c->head_dim;
    spk_cuda_attention shape = attention_shape(c);
    for (uint32_t i = 0; i < c->layer_count; i++) {
        if (s->model->layers[i].is_attention) continue;
        s->layers[i].conv = take_floats(a, c->conv_kernel * conv_dim(c));
        s->layers[i].delta = take_floats(a, value_dim(c) * c->gdn_k_dim);
    }
    s->sequence.d_position = take(a, sizeof(uint32_t));
    s->state_bytes = a->used;
    for (uint32_t i = 0; i < c->layer_count; i++) {
        if (!s->model->layers[i].is_attention) continue;
        s->layers[i].k = take(a, kv_elements * sizeof(uint16_t));
        s->layers[i].v = take(a, kv_elements * sizeof(uint16_t));
    }
    s->sequence.d_tokens = take(a, ((uint64_t)s->context_tokens + 1) * sizeof(uint32_t));
    s->sequence.d_chosen = take(a, ((uint64_t)s->context_tokens + 1) * sizeof(uint32_t));
    s->d_best = take(a, sizeof *s->d_best);
    s->d_arrivals = take(a, sizeof *s->d_arrivals);
    s->inverse_frequency = take(a, c->rope_dim / 2 * sizeof(double));
    s->choice = take(a, c->expert_used_count * sizeof(uint32_t));
    for (int i = 0; i < 2; i++) s->x[i] = take_floats(a, c->hidden_size);
    s->delta = take_floats(a, c->hidden_size);
    s->normed = take_floats(a, c->hidden_size);
    uint64_t gdn_width = conv_dim(c) + value_dim(c) + 2 * (uint64_t)c->gdn_v_head_count + 128;
    uint64_t attention_width = 2 * q_dim(c) + 2 * (uint64_t)c->kv_head_count * c->head_dim + 128;
    s->project = take_floats(a, gdn_width > attention_width ? gdn_width : attention_width);
    s->mixed = take_floats(a, value_dim(c) > q_dim(c) ? value_dim(c) : q_dim(c));
    s->conv_out = take_floats(a, conv_dim(c));
    s->delta_out = take_floats(a, value_dim(c));
    s->cos_sin = take_floats(a, c->rope_dim);
    s->partial = take(a, spk_cuda_attention_scratch_bytes(s->cuda, &shape));
    s->router = take_floats(a, c->expert_count + 1);
    s->weight = take_floats(a, c->expert_used_count);
    s->h = take_floats(a, (uint64_t)c->expert_used_count * c->expert_ff_size + c->dense_ff_size);
    s->shared_h = take_floats(a, c->shared_ff_size);
    s->shared_parts = take_floats(a, 2 * (uint64_t)c->shared_ff_size + c->hidden_size);
    s->routed = take_floats(a, c->hidden_size);
    s->shared = take_floats(a, c->hidden_size);
    s->logits = take_floats(a, c->vocab_size);
}

/* ---- The step ---- */

typedef struct {
    uint32_t     current;        /* which x buffer is the residual stream */
    const float *pending[2];     /* what has to be added to it */
} stream_state;

/* The normed input of the next GEMV.  Fused: sums and norm are its prologue; else they are kernels before it. */
static spk_cuda_source next_source(spk_gpu_session *s, stream_state *st, const float *norm, bool fused, bool has_rest) {
    const spk_model_config *c = &s->model->config;
    spk_cuda_source source = { .x = s->x[st->current], .add = { st->pending[0], st->pending[1] },
                               .norm_weight = vector_on_device(s, norm), .eps = c->rms_eps, .count = c->hidden_size,
                               .has_rest = has_rest };
    bool has_sum = st->pending[0] != NULL;
    if (has_sum && fused) source.x_out = s->x[st->current ^= 1];
    if (!fused) {
        if (has_sum) {
            spk_cuda_elementwise add = { .op = SPK_CUDA_ADD, .a = source.x, .b = source.add[0], .c = source.add[1],
                                         .out = s->x[st->current ^ 1], .count = c->hidden_size };
            spk_cuda_launch_elementwise(s->cuda, &add);
            st->current ^= 1;
        }
        spk_cuda_norm plain = { .source = { .x = s->x[st->current], .norm_weight = source.norm_weight, .eps = source.eps,
                                            .count = source.count }, .out = s->normed };
        spk_cuda_launch_norm(s->cuda, &plain);
        source = (spk_cuda_source){ .x = s->normed, .count = c->hidden_size, .has_rest = has_rest };
    }
    st->pending[0] = st->pending[1] = NULL;
    return source;
}

static void gemv_one(spk_gpu_session *s, spk_cuda_source source, spk_matrix w, float *y) {
    spk_cuda_gemv g = { .source = source, .segments = { { .w = on_device(s, w), .y = y } }, .segment_count = 1 };
    spk_cuda_launch_gemv(s->cuda, &g);
}

static void add_segment(spk_gpu_session *s, spk_cuda_gemv *g, spk_matrix w, spk_matrix up, float *y) {
    g->segments[g->segment_count++] = (spk_cuda_segment){ .w = on_device(s, w), .up = on_device(s, up), .y = y };
}

static void record_gdn(spk_gpu_session *s, stream_state *st, uint32_t index) {
    const spk_model_config *c = &s->model->config;
    const spk_layer *layer = &s->model->layers[index];
    const spk_matrix none = { 0 };
    float *u = s->project, *z = u + conv_dim(c), *alpha = z + value_dim(c), *beta = alpha + c->gdn_v_head_count;
    spk_cuda_gemv g = { .source = next_source(s, st, layer->attn_norm, s->fusions & SPK_FUSE_ADDNORM3, true) };
    add_segment(s, &g, layer->gdn_qkv, none, u);
    add_segment(s, &g, layer->gdn_gate, none, z);
    add_segment(s, &g, layer->gdn_alpha, none, alpha);
    add_segment(s, &g, layer->gdn_beta, none, beta);
    spk_cuda_launch_gemv(s->cuda, &g);
    spk_cuda_gdn gdn = { .d_position = s->sequence.d_position, .u = u, .z = z, .alpha = alpha, .beta = beta,
                         .taps = vector_on_device(s, layer->gdn_taps), .a = vector_on_device(s, layer->gdn_a),
                         .dt = vector_on_device(s, layer->gdn_dt), .norm_weight = vector_on_device(s, layer->gdn_norm),
                         .conv_state = s->layers[index].conv, .delta_state = s->layers[index].delta,
                         .conv_out = s->conv_out, .delta_out = s->delta_out, .out = s->mixed,
                         .k_head_count = c->gdn_k_head_count, .v_head_count = c->gdn_v_head_count, .k_dim = c->gdn_k_dim,
                         .v_dim = c->gdn_v_dim, .conv_kernel = c->conv_kernel, .eps = c->rms_eps };
    spk_cuda_launch_gdn(s->cuda, &gdn, s->fusions & SPK_FUSE_GDN_CORE ? SPK_CUDA_GDN_FUSED
                                     : s->fusions & SPK_FUSE_GDN_CONV ? SPK_CUDA_GDN_CONV_FUSED : SPK_CUDA_GDN_PLAIN);
    gemv_one(s, (spk_cuda_source){ .x = s->mixed, .count = (uint32_t)value_dim(c), .has_rest = 1 }, layer->gdn_out, s->delta);
}

static void record_attention(spk_gpu_session *s, stream_state *st, uint32_t index) {
    const spk_model_config *c = &s->model->config;
    const spk_layer *layer = &s->model->layers[index];
    const spk_matrix none = { 0 };
    float *q = s->project, *k = q + (c->has_attention_gate ? 2 : 1) * q_dim(c), *v = k + (uint64_t)c->kv_head_count * c->head_dim;
    spk_cuda_gemv g = { .source = next_source(s, st, layer->attn_norm, s->fusions & SPK_FUSE_ADDNORM3, true) };
    add_segment(s, &g, layer->q, none, q);
    add_segment(s, &g, layer->k, none, k);
    add_segment(s, &g, layer->v, none, v);
    spk_cuda_launch_gemv(s->cuda, &g);
    spk_cuda_attention attention = attention_shape(c);
    attention.d_position = s->sequence.d_position;
    attention.q = q;
    attention.k = k;
    attention.v = v;
    attention.q_norm = vector_on_device(s, layer->q_norm);
    attention.k_norm = vector_on_device(s, layer->k_norm);
    attention.cos_sin = s->cos_sin;
    attention.k_cache = s->layers[index].k;
    attention.v_cache = s->layers[index].v;
    attention.partial = s->partial;
    attention.out = s->mixed;
    spk_cuda_launch_attention(s->cuda, &attention);
    gemv_one(s, (spk_cuda_source){ .x = s->mixed, .count = (uint32_t)q_dim(c), .has_rest = 1 }, layer->attn_out, s->delta);
}

static void record_dense(spk_gpu_session *s, const spk_layer *layer, spk_cuda_source source) {
    spk_cuda_gemv g = { .source = source };
    add_segment(s, &g, layer->shared_gate, layer->shared_up, s->h);
    spk_cuda_launch_gemv(s->cuda, &g);
    gemv_one(s, (spk_cuda_source){ .x = s->h, .count = s->model->config.dense_ff_size, .has_rest = 1 }, layer->shared_down, s->routed);
}

/* The shared expert as separate kernels: the other side of the `shexp` switch. */
static void record_shared_up(spk_gpu_session *s, const spk_layer *layer, spk_cuda_source source) {
    uint32_t ff = s->model->config.shared_ff_size;
    gemv_one(s, source, layer->shared_gate, s->shared_parts);
    gemv_one(s, source, layer->shared_up, s->shared_parts + ff);
    spk_cuda_elementwise swiglu = { .op = SPK_CUDA_SWIGLU, .a = s->shared_parts, .b = s->shared_parts + ff, .out = s->shared_h, .count = ff };
    spk_cuda_launch_elementwise(s->cuda, &swiglu);
}
static void record_shared_down(spk_gpu_session *s, const spk_layer *layer) {
    const spk_model_config *c = &s->model->config;
    float *raw = s->shared_parts + 2 * (uint64_t)c->shared_ff_size;
    gemv_one(s, (spk_cuda_source){ .x = s->shared_h, .count = c->shared_ff_size, .has_rest = 1 }, layer->shared_down, raw);
    spk_cuda_elementwise scale = { .op = SPK_CUDA_SIGMOID_SCALE, .a = raw, .b = s->router + c->expert_count, .out = s->shared,
                                   .count = c->hidden_size };
    spk_cuda_launch_elementwise(s->cuda, &scale);
}

static void record_experts(spk_gpu_session *s, const spk_layer *layer, spk_cuda_source source, const stream_state *st) {
    const spk_model_config *c = &s->model->config;
    const spk_matrix none = { 0 };
    bool has_shared = c->shared_ff_size > 0, fuse_shared = s->fusions & SPK_FUSE_SHEXP;
    spk_cuda_gemv g = { .source = source };
    add_segment(s, &g, layer->router, none, s->router);
    if (has_shared) add_segment(s, &g, layer->shared_router, none, s->router + c->expert_count);
    bool same_pair = layer->shared_gate.type == layer->shared_up.type && layer->shared_gate.layout == layer->shared_up.layout;
    if (has_shared && fuse_shared && same_pair) add_segment(s, &g, layer->shared_gate, layer->shared_up, s->shared_h);
    spk_cuda_launch_gemv(s->cuda, &g);
    /* From here on the sum is in x: whoever needs the normed vector again norms that. */
    spk_cuda_source again = source.norm_weight == NULL ? source
        : (spk_cuda_source){ .x = s->x[st->current], .norm_weight = source.norm_weight, .eps = source.eps, .count = source.count };
    if (has_shared && !(fuse_shared && same_pair)) record_shared_up(s, layer, again);
    if (!(s->fusions & SPK_FUSE_ROUTER)) {
        spk_cuda_top_k top = { s->router, s->choice, s->weight, c->expert_count, c->expert_used_count };
        spk_cuda_launch_top_k(s->cuda, &top);
    }
    spk_cuda_experts_up up = { .source = again, .gate = on_device(s, layer->expert_gate.first), .up = on_device(s, layer->expert_up.first),
                               .expert_stride_bytes = layer->expert_gate.stride_bytes,
                               .logits = s->fusions & SPK_FUSE_ROUTER ? s->router : NULL, .choice = s->choice, .weight = s->weight,
                               .h = s->h, .expert_count = c->expert_count, .used_count = c->expert_used_count };
    spk_cuda_launch_experts_up(s->cuda, &up);
    if (has_shared && !fuse_shared) record_shared_down(s, layer);
    spk_cuda_experts_down down = { .down = on_device(s, layer->expert_down.first),
                                   .shared_down = has_shared && fuse_shared ? on_device(s, layer->shared_down) : none,
                                   .expert_stride_bytes = layer->expert_down.stride_bytes, .choice = s->choice, .weight = s->weight,
                                   .h = s->h, .shared_h = s->shared_h, .shared_logit = s->router + c->expert_count,
                                   .routed = s->routed, .shared = s->shared, .used_count = c->expert_used_count };
    spk_cuda_launch_experts_down(s->cuda, &down);
}

static void record_step(spk_gpu_session *s) {
    const spk_model *m = s->model;
    stream_state st = { 0 };
    spk_cuda_embed embed = { .sequence = s->sequence, .embedding = on_device(s, m->embedding), .d_inverse_frequency = s->inverse_frequency,
                             .rope_dim = m->config.rope_dim, .d_x = s->x[0], .d_cos_sin = s->cos_sin };
    bool fuse_norm = s->fusions & SPK_FUSE_ADDNORM3;
    spk_cuda_launch_embed(s->cuda, &embed);
    for (uint32_t i = 0; i < m->config.layer_count; i++) {
        if (m->layers[i].is_attention) record_attention(s, &st, i);
        else record_gdn(s, &st, i);
        st.pending[0] = s->delta;
        spk_cuda_source source = next_source(s, &st, m->layers[i].ffn_norm, fuse_norm, false);
        if (m->config.expert_count > 0) record_experts(s, &m->layers[i], source, &st);
        else record_dense(s, &m->layers[i], source);
        st.pending[0] = s->routed;
        st.pending[1] = m->config.shared_ff_size > 0 ? s->shared : NULL;
    }
    spk_cuda_gemv head = { .source = next_source(s, &st, m->output_norm, fuse_norm, false), .greedy = &s->sequence, .d_best = s->d_best,
                           .d_arrivals = s->d_arrivals };
    add_segment(s, &head, m->output, (spk_matrix){ 0 }, s->logits);
    spk_cuda_launch_gemv(s->cuda, &head);
}

/* ---- Sessions ---- */

static spk_status prepare_session(spk_gpu_session *s, spk_error *err) {
    const spk_model_config *c = &s->model->config;
    SPK_TRY(spk_cuda_open(&s->cuda, err));
    s->layers = calloc(c->layer_count, sizeof *s->layers);
    double *frequency = malloc(c->rope_dim / 2 * sizeof *frequency);
    spk_status status = s->layers == NULL || frequency == NULL ? spk_fail(err, SPK_E_MEMORY, "out of memory") : SPK_OK;
    arena a = { 0 };
    void *memory = NULL;
    if (status == SPK_OK) {
        carve(s, &a);
        s->memory_bytes = a.used;
        status = spk_cuda_allocate(s->cuda, a.used, "a session's caches and states", &memory, err);
    }
    if (status == SPK_OK) {
        s->d_memory = memory;
        a = (arena){ s->d_memory, 0 };
        carve(s, &a);
        for (uint32_t i = 0; i < c->rope_dim / 2; i++) frequency[i] = pow((double)c->rope_base, -2.0 * i / c->rope_dim);
        status = spk_cuda_upload(s->cuda, s->inverse_frequency, frequency, c->rope_dim / 2 * sizeof *frequency, err);
    }
    free(frequency);
    SPK_TRY(status);
    SPK_TRY(spk_cuda_step_begin(s->cuda, err));
    record_step(s);
    return spk_cuda_step_end(s->cuda, &s->step, err);
}

spk_status spk_gpu_session_create(const spk_model *model, const spk_gpu_model *gpu, uint32_t context_tokens, uint32_t fusions,
                                  spk_gpu_session **out, spk_error *err) {
    spk_gpu_session *s = calloc(1, sizeof *s);
    if (s == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    s->model = model;
    s->gpu = gpu;
    s->context_tokens = context_tokens;
    s->fusions = fusions;
    spk_status status = prepare_session(s, err);
    if (status != SPK_OK) {
        spk_gpu_session_destroy(s);
        return status;
    }
    *out = s;
    return SPK_OK;
}

void spk_gpu_session_destroy(spk_gpu_session *s) {
    if (s == NULL) return;
    spk_cuda_step_free(s->step);
    if (s->d_memory != NULL) spk_cuda_free(s->cuda, s->d_memory);
    spk_cuda_close(s->cuda);
    free(s->layers);
    free(s);
}

uint64_t spk_gpu_session_bytes(const spk_gpu_session *s) { return s->memory_bytes; }

spk_status spk_gpu_reset(spk_gpu_session *s, spk_error *err) { return spk_cuda_fill(s->cuda, s->d_memory, 0, s->state_bytes, err); }

spk_status spk_gpu_eval(spk_gpu_session *s, uint32_t position, const uint32_t *tokens, uint32_t count, spk_logits which,
                        float *logits, spk_error *err) {
    static const uint32_t open_end = SPK_CUDA_TOKEN_FREE;
    uint32_t vocab = s->model->config.vocab_size;
    SPK_TRY(spk_cuda_upload(s->cuda, s->sequence.d_tokens + position, tokens, count * sizeof *tokens, err));
    SPK_TRY(spk_cuda_upload(s->cuda, s->sequence.d_tokens + position + count, &open_end, sizeof open_end, err));
    if (which != SPK_LOGITS_ALL) {
        SPK_TRY(spk_cuda_step_run(s->cuda, s->step, count, err));
        if (which == SPK_LOGITS_NONE) return spk_cuda_wait(s->cuda, err);
        return spk_cuda_download(s->cuda, logits, s->logits, vocab * sizeof *logits, err);
    }
    for (uint32_t i = 0; i < count; i++) {
        SPK_TRY(spk_cuda_step_run(s->cuda, s->step, 1, err));
        SPK_TRY(spk_cuda_download(s->cuda, logits + (uint64_t)i * vocab, s->logits, vocab * sizeof *logits, err));
    }
    return SPK_OK;
}
