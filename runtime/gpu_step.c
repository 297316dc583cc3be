/* runtime/gpu_step.c - one decode step as a chain of kernels.
 *
 * Residual sums are never kernels of their own (with addnorm3): the product that makes a summand adds it to its rows of x, or,
 * where its sum is spread over CTAs, whoever norms next adds what is pending.  That one writes x to the other of two buffers, since
 * the CTA that writes the sum must not overtake those that still read the old one.
 */
#include "runtime/gpu_internal.h"

#include <string.h>

static spk_matrix on_device(const spk_gpu_session *s, spk_matrix w) { return spk_gpu_matrix(s->model, s->gpu, w); }
static const float *vector_on_device(const spk_gpu_session *s, const float *v) { return spk_gpu_vector(s->model, s->gpu, v); }

spk_cuda_attention spk_gpu_attention_shape(const spk_gpu_session *s) {
    const spk_model_config *c = &s->model->config;
    return (spk_cuda_attention){ .head_count = c->head_count, .kv_head_count = c->kv_head_count, .head_dim = c->head_dim,
                                 .rope_dim = c->rope_dim, .is_gated = c->has_attention_gate, .context_tokens = s->context_tokens,
                                 .kv_type = s->kv_type, .eps = c->rms_eps };
}

typedef struct {
    uint32_t     current;        /* which x buffer is the residual stream */
    const float *pending[3];     /* what has to be added to it; NULL from the first unused on */
} stream_state;

/* The normed input of the next GEMV.  Fused: sums and norm are its prologue; else they are kernels before it. */
static spk_cuda_source next_source(spk_gpu_session *s, stream_state *st, const float *norm, bool fused, bool has_rest) {
    const spk_model_config *c = &s->model->config;
    spk_cuda_source source = { .x = s->x[st->current], .add = { st->pending[0], st->pending[1], st->pending[2] },
                               .norm_weight = vector_on_device(s, norm), .eps = c->rms_eps, .count = c->hidden_size,
                               .has_rest = has_rest };
    bool has_sum = st->pending[0] != NULL;
    if (has_sum && fused) source.x_out = s->x[st->current ^= 1];
    if (!fused) {
        if (has_sum) {
            spk_cuda_elementwise add = { .op = SPK_CUDA_ADD, .a = source.x, .b = source.add[0], .c = source.add[1],
                                         .d = source.add[2], .out = s->x[st->current ^ 1], .count = c->hidden_size };
            spk_cuda_launch_elementwise(s->cuda, &add);
            st->current ^= 1;
        }
        spk_cuda_norm plain = { .source = { .x = s->x[st->current], .norm_weight = source.norm_weight, .eps = source.eps,
                                            .count = source.count }, .out = s->normed, .factor = s->norm_factor };
        spk_cuda_launch_norm(s->cuda, &plain);
        source = (spk_cuda_source){ .x = s->normed, .factor = s->norm_factor, .count = c->hidden_size, .has_rest = has_rest };
    }
    memset(st->pending, 0, sizeof st->pending);
    return source;
}

/* What was launched since the last mark belongs to a phase, which moves so many bytes. */
static void mark(spk_gpu_session *s, spk_phase phase, uint64_t bytes) {
    if (s->account != NULL) spk_gpu_account_mark(s->account, phase, spk_cuda_launch_count(s->cuda), bytes);
}
static uint64_t weight_bytes(const spk_matrix *w) {
    return w->data == NULL ? 0 : spk_layout_unit_bytes(w->layout, w->type, w->col_count) * spk_layout_unit_count(w->layout, w->type, w->row_count, w->col_count);
}
static uint64_t segment_bytes(const spk_cuda_gemv *g) {
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < g->segment_count; i++) bytes += weight_bytes(&g->segments[i].w) + weight_bytes(&g->segments[i].up);
    return bytes;
}

static bool is_streamed(const spk_gpu_session *s) { return !(s->fusions & SPK_FUSE_HELD); }

static void launch_gemv(const spk_gpu_session *s, spk_cuda_gemv *g) {
    g->is_streamed = is_streamed(s);
    spk_cuda_launch_gemv(s->cuda, g);
}

static void gemv_one(spk_gpu_session *s, spk_cuda_source source, spk_matrix w, float *y) {
    spk_cuda_gemv g = { .source = source, .segments = { { .w = on_device(s, w), .y = y } }, .segment_count = 1 };
    launch_gemv(s, &g);
}

/* The router of a layer that has experts. */
static spk_cuda_router router_of(const spk_gpu_session *s, uint32_t index) {
    const spk_model_config *c = &s->model->config;
    return (spk_cuda_router){ .weights = s->gpu->d_routers + index * spk_router_rows(c) * (uint64_t)c->hidden_size,
                              .row_count = spk_router_rows(c), .column_count = c->hidden_size,
                              .sums = s->router_sums + spk_cuda_router_words(index * spk_router_places(c)), .squares = s->router_squares };
}

/* Is a router part of the projection before it? */
static bool folds_router(const spk_gpu_session *s) {
    return s->model->config.expert_count > 0 && (s->fusions & SPK_FUSE_ROUTER) && (s->fusions & SPK_FUSE_ADDNORM3);
}
static uint64_t router_bytes(const spk_gpu_session *s) {
    return (uint64_t)spk_router_rows(&s->model->config) * s->model->config.hidden_size * sizeof(float);
}

/* x += W source, by the kernel itself or left for whoever norms next.  Out of a mixer the same kernel may make the router's sums. */
static void project_out(spk_gpu_session *s, stream_state *st, spk_cuda_source source, spk_matrix w, const spk_cuda_router *router) {
    float *x = s->x[st->current];
    bool fused = s->fusions & SPK_FUSE_ADDNORM3;
    spk_cuda_gemv g = { .source = source, .segment_count = 1,
                        .segments = { { .w = on_device(s, w), .y = fused ? x : s->delta, .residual = fused ? x : NULL } } };
    if (router != NULL) g.router = *router;
    launch_gemv(s, &g);
    if (!fused) st->pending[0] = s->delta;
}
static void project_mixer_out(spk_gpu_session *s, stream_state *st, spk_cuda_source source, spk_matrix w, uint32_t index) {
    const bool folds = folds_router(s);
    spk_cuda_router router = { 0 };
    if (folds) router = router_of(s, index);
    project_out(s, st, source, w, folds ? &router : NULL);
    mark(s, SPK_PHASE_MIXER_OUT, weight_bytes(&w) + (folds ? router_bytes(s) : 0));
}

static void add_segment(spk_gpu_session *s, spk_cuda_gemv *g, spk_matrix w, spk_matrix up, float *y) {
    g->segments[g->segment_count++] = (spk_cuda_segment){ .w = on_device(s, w), .up = on_device(s, up), .y = y };
}

static void record_gdn(spk_gpu_session *s, stream_state *st, uint32_t index) {
    const spk_model_config *c = &s->model->config;
    const spk_layer *layer = &s->model->layers[index];
    const spk_matrix none = { 0 };
    float *u = s->project, *z = u + spk_conv_dim(c), *alpha = z + spk_value_dim(c), *beta = alpha + c->gdn_v_head_count;
    spk_cuda_gemv g = { .source = next_source(s, st, layer->attn_norm, s->fusions & SPK_FUSE_ADDNORM3, true) };
    add_segment(s, &g, layer->gdn_qkv, none, u);
    add_segment(s, &g, layer->gdn_gate, none, z);
    add_segment(s, &g, layer->gdn_alpha, none, alpha);
    add_segment(s, &g, layer->gdn_beta, none, beta);
    launch_gemv(s, &g);
    mark(s, SPK_PHASE_GDN_IN, segment_bytes(&g));
    spk_cuda_gdn gdn = { .d_position = s->sequence.d_position, .u = u, .z = z, .alpha = alpha, .beta = beta,
                         .taps = vector_on_device(s, layer->gdn_taps), .a = vector_on_device(s, layer->gdn_a),
                         .dt = vector_on_device(s, layer->gdn_dt), .norm_weight = vector_on_device(s, layer->gdn_norm),
                         .conv_state = s->layers[index].conv, .delta_state = s->layers[index].delta,
                         .conv_out = s->conv_out, .delta_out = s->delta_out, .out = s->mixed, .squares = s->squares,
                         .k_head_count = c->gdn_k_head_count, .v_head_count = c->gdn_v_head_count, .k_dim = c->gdn_k_dim,
                         .v_dim = c->gdn_v_dim, .conv_kernel = c->conv_kernel, .eps = c->rms_eps };
    bool fused = (s->fusions & SPK_FUSE_GDN_CORE) && spk_cuda_gdn_can_fuse(c->gdn_k_dim, c->gdn_v_dim);
    spk_cuda_launch_gdn(s->cuda, &gdn, fused ? SPK_CUDA_GDN_FUSED
                                     : s->fusions & SPK_FUSE_GDN_CONV ? SPK_CUDA_GDN_CONV_FUSED : SPK_CUDA_GDN_PLAIN);
    mark(s, SPK_PHASE_GDN, 2 * sizeof(float) * spk_value_dim(c) * c->gdn_k_dim);      /* the state in and out */
    spk_cuda_source out = { .x = s->mixed, .count = (uint32_t)spk_value_dim(c), .has_rest = 1 };
    if (fused) {
        out.squares = s->squares;
        out.head_dim = c->gdn_v_dim;
        out.eps = c->rms_eps;
    }
    project_mixer_out(s, st, out, layer->gdn_out, index);
}

static void record_attention(spk_gpu_session *s, stream_state *st, uint32_t index) {
    const spk_model_config *c = &s->model->config;
    const spk_layer *layer = &s->model->layers[index];
    const spk_matrix none = { 0 };
    float *q = s->project, *k = q + (c->has_attention_gate ? 2 : 1) * spk_q_dim(c), *v = k + (uint64_t)c->kv_head_count * c->head_dim;
    spk_cuda_gemv g = { .source = next_source(s, st, layer->attn_norm, s->fusions & SPK_FUSE_ADDNORM3, true) };
    add_segment(s, &g, layer->q, none, q);
    add_segment(s, &g, layer->k, none, k);
    add_segment(s, &g, layer->v, none, v);
    launch_gemv(s, &g);
    mark(s, SPK_PHASE_ATTENTION_IN, segment_bytes(&g));
    spk_cuda_attention attention = spk_gpu_attention_shape(s);
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
    attention.part_totals = spk_cuda_attention_has_parts(s->cuda, &attention) ? s->part_totals : NULL;
    spk_cuda_launch_attention(s->cuda, &attention);
    mark(s, SPK_PHASE_ATTENTION, 0);     /* by the position, which spk_gpu_account knows */
    project_mixer_out(s, st, (spk_cuda_source){ .x = s->mixed, .part_totals = attention.part_totals, .d_position = attention.d_position, .head_dim = c->head_dim,
                                                 .count = (uint32_t)spk_q_dim(c), .has_rest = 1 }, layer->attn_out, index);
}

static bool is_pair(const spk_layer *layer) {
    return layer->shared_gate.type == layer->shared_up.type && layer->shared_gate.layout == layer->shared_up.layout;
}

/* h[ff] = silu(gate x) * (up x) as separate kernels: the other side of the `shexp` switch, and what two types need. */
static void record_gate_up(spk_gpu_session *s, const spk_layer *layer, spk_cuda_source source, uint32_t ff, float *h) {
    gemv_one(s, source, layer->shared_gate, s->shared_parts);
    source.x_out = NULL;
    gemv_one(s, source, layer->shared_up, s->shared_parts + ff);
    spk_cuda_elementwise swiglu = { .op = SPK_CUDA_SWIGLU, .a = s->shared_parts, .b = s->shared_parts + ff, .out = h, .count = ff };
    spk_cuda_launch_elementwise(s->cuda, &swiglu);
}

static void record_dense(spk_gpu_session *s, stream_state *st, const spk_layer *layer, spk_cuda_source source) {
    uint32_t ff = s->model->config.dense_ff_size;
    spk_cuda_gemv g = { .source = source };
    add_segment(s, &g, layer->shared_gate, layer->shared_up, s->h);
    if (is_pair(layer)) launch_gemv(s, &g);
    else record_gate_up(s, layer, source, ff, s->h);
    project_out(s, st, (spk_cuda_source){ .x = s->h, .count = ff, .has_rest = 1 }, layer->shared_down, NULL);
    mark(s, SPK_PHASE_FFN, weight_bytes(&layer->shared_gate) + weight_bytes(&layer->shared_up) + weight_bytes(&layer->shared_down));
}

static void record_shared_down(spk_gpu_session *s, const spk_layer *layer, spk_cuda_routing routing) {
    const spk_model_config *c = &s->model->config;
    float *raw = s->shared_parts + 2 * (uint64_t)c->shared_ff_size;
    gemv_one(s, (spk_cuda_source){ .x = s->shared_h, .count = c->shared_ff_size, .has_rest = 1 }, layer->shared_down, raw);
    spk_cuda_elementwise scale = { .op = SPK_CUDA_SHARED_SCALE, .a = raw, .routing = routing, .out = s->shared, .count = c->hidden_size };
    spk_cuda_launch_elementwise(s->cuda, &scale);
}

static void record_experts(spk_gpu_session *s, uint32_t index, spk_cuda_source source, stream_state *st) {
    const spk_layer *layer = &s->model->layers[index];
    const spk_model_config *c = &s->model->config;
    const spk_matrix none = { 0 };
    bool has_shared = c->shared_ff_size > 0, fuse_shared = s->fusions & SPK_FUSE_SHEXP;
    spk_cuda_signal routed_ready = { s->flags + index, s->sequence.d_step };
    spk_cuda_router router = router_of(s, index);
    spk_cuda_routing routing = { .sums = router.sums, .squares = router.squares, .expert_count = c->expert_count, .used_count = c->expert_used_count,
                                 .column_count = c->hidden_size, .eps = c->rms_eps };
    if (!folds_router(s)) spk_cuda_launch_router(s->cuda, &router, s->x[st->current]);
    if (!(s->fusions & SPK_FUSE_ROUTER)) {
        spk_cuda_top_k top = { routing, s->choice, s->weight };
        spk_cuda_launch_top_k(s->cuda, &top);
        routing.choice = s->choice;
        routing.weight = s->weight;
    }
    bool is_shared_pair = fuse_shared && is_pair(layer);
    if (has_shared && !is_shared_pair) record_gate_up(s, layer, source, c->shared_ff_size, s->shared_h);
    const uint64_t shared_bytes = weight_bytes(&layer->shared_gate) + weight_bytes(&layer->shared_up);
    mark(s, SPK_PHASE_ROUTER, (folds_router(s) ? 0 : router_bytes(s)) + (is_shared_pair ? 0 : shared_bytes));
    spk_cuda_experts_up up = { .source = source, .routing = routing, .gate = on_device(s, layer->expert_gate.first),
                               .up = on_device(s, layer->expert_up.first), .expert_stride_bytes = layer->expert_gate.stride_bytes,
                               .h = s->h, .routed_ready = routed_ready, .is_streamed = is_streamed(s) };
    if (has_shared && is_shared_pair) {
        up.shared_gate = on_device(s, layer->shared_gate);
        up.shared_up = on_device(s, layer->shared_up);
        up.shared_h = s->shared_h;
    }
    spk_cuda_launch_experts_up(s->cuda, &up);
    mark(s, SPK_PHASE_EXPERTS_UP, c->expert_used_count * (weight_bytes(&layer->expert_gate.first) + weight_bytes(&layer->expert_up.first)) + (is_shared_pair ? shared_bytes : 0));
    if (has_shared && !fuse_shared) record_shared_down(s, layer, routing);
    spk_cuda_experts_down down = { .routing = routing, .routed_ready = routed_ready, .down = on_device(s, layer->expert_down.first),
                                   .shared_down = has_shared && fuse_shared ? on_device(s, layer->shared_down) : none,
                                   .expert_stride_bytes = layer->expert_down.stride_bytes, .h = s->h, .shared_h = s->shared_h,
                                   .routed = { s->routed[0], s->routed[1] },
                                   .shared = s->shared, .is_streamed = is_streamed(s) };
    uint32_t parts = spk_cuda_experts_down_parts(s->cuda, &down.down, c->expert_used_count), next = 0;
    bool adds = (s->fusions & SPK_FUSE_ADDNORM3) && parts == 1 && (!has_shared || fuse_shared);
    if (adds) down.residual = down.sum = s->x[st->current];
    spk_cuda_launch_experts_down(s->cuda, &down);
    mark(s, SPK_PHASE_EXPERTS_DOWN, c->expert_used_count * weight_bytes(&layer->expert_down.first) + weight_bytes(&layer->shared_down));
    if (adds) return;
    for (uint32_t p = 0; p < parts; p++) st->pending[next++] = s->routed[p];
    if (has_shared) st->pending[next] = s->shared;
}

void spk_gpu_record_step(spk_gpu_session *s) {
    const spk_model *m = s->model;
    stream_state st = { 0 };
    spk_cuda_embed embed = { .sequence = s->sequence, .embedding = on_device(s, m->embedding), .d_turns = s->turns,
                             .rope_dim = m->config.rope_dim, .d_x = s->x[0], .d_cos_sin = s->cos_sin, .d_clear = s->router_sums, .clear_count = m->config.layer_count * spk_router_places(&m->config) };
    bool fuse_norm = s->fusions & SPK_FUSE_ADDNORM3;
    spk_cuda_launch_embed(s->cuda, &embed);
    mark(s, SPK_PHASE_EMBED, 0);
    for (uint32_t i = 0; i < m->config.layer_count; i++) {
        if (m->layers[i].is_attention) record_attention(s, &st, i);
        else record_gdn(s, &st, i);
        spk_cuda_source source = next_source(s, &st, m->layers[i].ffn_norm, fuse_norm, false);
        if (m->config.expert_count > 0) record_experts(s, i, source, &st);
        else record_dense(s, &st, &m->layers[i], source);
        if (s->observe != NULL) {
            s->observe(s, i, s->x[st.current], st.pending, s->observe_context);
            memset(st.pending, 0, sizeof st.pending);
        }
    }
    spk_cuda_gemv head = { .source = next_source(s, &st, m->output_norm, fuse_norm, false), .greedy = s->is_sampled ? NULL : &s->sequence, .d_best = s->d_best,
                           .d_arrivals = s->d_arrivals };
    add_segment(s, &head, m->output, (spk_matrix){ 0 }, s->logits);
    launch_gemv(s, &head);
    mark(s, SPK_PHASE_HEAD, weight_bytes(&m->output));
    if (s->is_sampled && !s->is_account) spk_gpu_record_draw(s);
}
