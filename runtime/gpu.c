/* runtime/gpu.c - a model and a session on the device: what the kernels take, memory, evaluation. */
#include "runtime/gpu_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>


/* ---- The model ---- */

static spk_status refuse(const spk_model *m, const char *what, spk_error *err) {
    return spk_fail(err, SPK_E_UNSUPPORTED, "backend cuda: %s: %s", m->path, what);
}

static spk_status check_shapes(const spk_model *m, spk_error *err) {
    const spk_model_config *c = &m->config;
    if (c->hidden_size % 32 != 0 || c->expert_ff_size % 32 != 0 || c->shared_ff_size % 32 != 0 || c->dense_ff_size % 32 != 0)
        return refuse(m, "a width is not a multiple of 32", err);
    if (c->head_dim != 64 && c->head_dim != 128 && c->head_dim != 256) return refuse(m, "head_dim is not 64, 128 or 256", err);
    if (c->expert_count > 1024 || c->expert_used_count > 64) return refuse(m, "more than 1024 experts, or 64 used", err);
    if (c->expert_count > 0 && c->hidden_size > SPK_CUDA_ROUTER_COLUMNS_MAX) return refuse(m, "experts of a hidden size above 32768", err);
    if (c->full_attention_interval > 1 &&
        ((c->gdn_k_dim & (c->gdn_k_dim - 1)) != 0 || c->gdn_k_dim < 32 || c->gdn_k_dim > 256 || c->gdn_v_dim % 32 != 0 || c->gdn_v_dim > 256))
        return refuse(m, "GDN heads are not of 32, 64, 128 or 256", err);
    for (uint32_t i = 0; i < c->layer_count && c->expert_count > 0; i++)
        if (m->layers[i].expert_gate.first.type != m->layers[i].expert_up.first.type)
            return refuse(m, "an expert's gate and up are of two types", err);
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

spk_status spk_gpu_model_create(const spk_model *model, const spk_model_options *options, spk_gpu_start *start,
                                spk_gpu_model **out, spk_error *err) {
    spk_gpu_model *g = calloc(1, sizeof *g);
    if (g == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    spk_status status = spk_gpu_start_take(start, &g->cuda, &g->times, err);
    if (status == SPK_OK) status = check_shapes(model, err);
    if (status == SPK_OK) status = spk_gpu_load(model, g, options, err);
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
    if (g->d_routers != NULL) spk_cuda_free(g->cuda, g->d_routers);
    spk_cuda_close(g->cuda);
    free(g);
}

const spk_load_times *spk_gpu_model_times(const spk_gpu_model *g) { return &g->times; }

/* ---- Memory of a session ---- */

typedef struct { uint8_t *base; uint64_t used; } arena;
static void *take(arena *a, uint64_t size_bytes) {
    uint64_t at = a->used;
    a->used += (size_bytes + 255) / 256 * 256;
    return a->base == NULL ? NULL : a->base + at;
}
static float *take_floats(arena *a, uint64_t count) { return take(a, count * sizeof(float)); }


static void carve(spk_gpu_session *s, arena *a) {
    const spk_model_config *c = &s->model->config;
    spk_cuda_attention shape = spk_gpu_attention_shape(s);
    for (uint32_t i = 0; i < c->layer_count; i++) {
        if (s->model->layers[i].is_attention) continue;
        s->layers[i].conv = take_floats(a, c->conv_kernel * spk_conv_dim(c));
        s->layers[i].delta = take_floats(a, SPK_CUDA_GDN_STATES * spk_value_dim(c) * c->gdn_k_dim);
    }
    s->sequence.d_position = take(a, sizeof(uint32_t));
    s->state_bytes = a->used;
    for (uint32_t i = 0; i < c->layer_count; i++) {
        if (!s->model->layers[i].is_attention) continue;
        s->layers[i].k = take(a, spk_cuda_attention_cache_bytes(&shape));
        s->layers[i].v = take(a, spk_cuda_attention_cache_bytes(&shape));
    }
    s->sequence.d_tokens = take(a, ((uint64_t)s->context_tokens + 1) * sizeof(uint32_t));
    s->d_sampling = take(a, sizeof *s->d_sampling);
    s->d_best = take(a, sizeof *s->d_best);
    s->d_arrivals = take(a, sizeof *s->d_arrivals);
    s->turns = take(a, c->rope_dim / 2 * sizeof(double));
    s->choice = take(a, c->expert_used_count * sizeof(uint32_t));
    s->sequence.d_step = take(a, sizeof(uint32_t));
    s->flags = take(a, (uint64_t)c->layer_count * sizeof(uint32_t));
    for (int i = 0; i < 2; i++) s->x[i] = take_floats(a, c->hidden_size);
    s->delta = take_floats(a, c->hidden_size);
    s->normed = take_floats(a, c->hidden_size);
    uint64_t gdn_width = spk_conv_dim(c) + spk_value_dim(c) + 2 * (uint64_t)c->gdn_v_head_count + 128;
    uint64_t attention_width = 2 * spk_q_dim(c) + 2 * (uint64_t)c->kv_head_count * c->head_dim + 128;
    s->project = take_floats(a, gdn_width > attention_width ? gdn_width : attention_width);
    uint64_t mixed_width = SPK_CUDA_PARTS_MAX * spk_q_dim(c);
    s->mixed = take_floats(a, spk_value_dim(c) > mixed_width ? spk_value_dim(c) : mixed_width);
    s->part_totals = take_floats(a, 2 * SPK_CUDA_PARTS_MAX * (uint64_t)c->head_count);
    s->conv_out = take_floats(a, spk_conv_dim(c));
    s->delta_out = take_floats(a, spk_value_dim(c));
    s->cos_sin = take_floats(a, c->rope_dim);
    s->partial = take(a, spk_cuda_attention_scratch_bytes(s->cuda, &shape));
    s->router_sums = take(a, spk_cuda_router_words(c->layer_count * spk_router_places(c)) * sizeof(long long));
    s->router_squares = take_floats(a, c->hidden_size / SPK_CUDA_ROUTER_GROUP);
    s->weight = take_floats(a, c->expert_used_count);
    s->h = take_floats(a, (uint64_t)c->expert_used_count * c->expert_ff_size + c->dense_ff_size);
    s->shared_h = take_floats(a, c->shared_ff_size);
    s->shared_parts = take_floats(a, 2 * ((uint64_t)c->shared_ff_size + c->dense_ff_size) + c->hidden_size);
    for (int i = 0; i < SPK_CUDA_DOWN_PARTS_MAX; i++) s->routed[i] = take_floats(a, c->hidden_size);
    s->norm_factor = take_floats(a, 1);
    s->squares = take_floats(a, spk_value_dim(c) / 32);
    s->shared = take_floats(a, c->hidden_size);
    s->logits = take_floats(a, c->vocab_size);
}

/* ---- Sessions ---- */

static spk_status prepare_session(spk_gpu_session *s, spk_error *err) {
    const spk_model_config *c = &s->model->config;
    SPK_TRY(spk_cuda_open(&s->cuda, err));
    s->layers = calloc(c->layer_count, sizeof *s->layers);
    double *turns = malloc(c->rope_dim / 2 * sizeof *turns);
    spk_status status = s->layers == NULL || turns == NULL ? spk_fail(err, SPK_E_MEMORY, "out of memory") : SPK_OK;
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
        for (uint32_t i = 0; i < c->rope_dim / 2; i++) turns[i] = pow((double)c->rope_base, -2.0 * i / c->rope_dim) / (2 * acos(-1.0));
        status = spk_cuda_upload(s->cuda, s->turns, turns, c->rope_dim / 2 * sizeof *turns, err);
    }
    free(turns);
    SPK_TRY(status);
    void *chosen = NULL, *d_chosen = NULL;
    SPK_TRY(spk_cuda_share(s->cuda, ((uint64_t)s->context_tokens + 1) * sizeof *s->chosen, "a session's tokens", &chosen, &d_chosen, err));
    s->chosen = chosen;
    s->sequence.d_chosen = d_chosen;
    return spk_gpu_record(s, false, &s->step, err);
}

spk_status spk_gpu_record(spk_gpu_session *s, bool is_sampled, spk_cuda_step **out, spk_error *err) {
    SPK_TRY(spk_cuda_step_begin(s->cuda, err));
    s->is_sampled = is_sampled;
    spk_gpu_record_step(s);
    return spk_cuda_step_end(s->cuda, out, err);
}

spk_status spk_gpu_session_create(const spk_model *model, const spk_gpu_model *gpu, uint32_t context_tokens, uint32_t fusions, bool kv_q8,
                                  spk_gpu_session **out, spk_error *err) {
    spk_gpu_session *s = calloc(1, sizeof *s);
    if (s == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    s->model = model;
    s->gpu = gpu;
    s->context_tokens = context_tokens;
    s->fusions = fusions;
    s->kv_type = kv_q8 ? SPK_CUDA_KV_Q8 : SPK_CUDA_KV_F16;
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
    spk_cuda_step_free(s->sampled_step);
    if (s->chosen != NULL) spk_cuda_unshare(s->cuda, s->chosen);
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
