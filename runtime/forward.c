/* runtime/forward.c - one batch of tokens through all layers, on the CPU.
 *
 * The order of operations is that of model.h's architectures:
 *   x += mixer(rms_norm(x; attn_norm));  x += ffn(rms_norm(x; ffn_norm));  logits = W rms_norm(x; output_norm)
 * Work is split over the pool by units whose results do not depend on the split: row groups, heads, tokens.  Recurrences
 * (convolution, delta rule) walk the batch's tokens in order inside one head.
 *
 * Vectors are int8 with one scale per 32 where the kernels quantize.  The inputs and outputs of mixers and the inputs of down
 * projections are two such vectors, the second for what the first leaves out: most of the error of a step comes from
 * there (measured: kernels/NOTES.md), and it decides which experts the router takes.
 *
 * What a newcomer gets wrong: V head j uses K head j % K heads; attn_q rows hold [q, gate] per head; q is scaled once by
 * 1/sqrt(k_dim) after its L2 norm.
 */
#include "runtime/session_internal.h"

#include <math.h>
#include <string.h>

typedef struct {
    spk_session        *session;
    const spk_layer    *layer;
    spk_layer_state    *state;
    uint32_t            token_count;
} layer_pass;

/* ---- Matrix products ---- */

typedef struct {
    const spk_kernels    *kernels;
    const spk_matmul_job *jobs;
} job_pass;

static void add_rest(const spk_matmul_job *job, uint64_t unit_begin, uint64_t unit_end) {
    uint64_t row = unit_begin * job->rows_per_unit, end = unit_end * job->rows_per_unit;
    if (end > job->w.row_count) end = job->w.row_count;
    for (uint32_t t = 0; t < job->token_count; t++)
        for (uint64_t r = row; r < end; r++) job->y[t][r] += job->y[job->token_count + t][r];
}

static void run_job_units(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const job_pass *pass = context;
    uint64_t first = 0;   /* first unit of the current job */
    for (const spk_matmul_job *job = pass->jobs; begin < end; first += job->unit_count, job++) {
        uint64_t job_end = first + job->unit_count;
        if (begin >= job_end) continue;
        uint64_t stop = end < job_end ? end : job_end;
        uint32_t vector_count = job->has_rest ? 2 * job->token_count : job->token_count;
        pass->kernels->matmul[job->w.type][job->w.layout](&job->w, job->x, job->y, vector_count, begin - first, stop - first);
        if (job->has_rest) add_rest(job, begin - first, stop - first);
        begin = stop;
    }
}

void spk_run_jobs(spk_session *session, const spk_matmul_job *jobs, uint32_t job_count) {
    uint64_t unit_count = 0;
    for (uint32_t i = 0; i < job_count; i++) unit_count += jobs[i].unit_count;
    if (session->watch != NULL)
        for (uint32_t i = 0; i < job_count; i++) spk_watch_job(session, &jobs[i]);
    /* About sixteen pieces a thread: small enough to level out, large enough to stream. */
    uint64_t grain = unit_count / (16 * (uint64_t)spk_pool_thread_count(session->pool));
    job_pass pass = { session->model->kernels, jobs };
    spk_pool_run(session->pool, unit_count, grain ? grain : 1, run_job_units, &pass);
}

/* ---- Vectors ---- */

void spk_quantize_with_rest(const spk_session *session, spk_activation *list, uint64_t count, uint64_t t) {
    const spk_kernels *kernels = session->model->kernels;
    kernels->quantize(&list[t]);
    if (list[t].pairs == NULL || !kernels->quantizes_activations) return;
    spk_activation_residual(&list[t], list[count + t].f32);
    kernels->quantize(&list[count + t]);
}

float *const *spk_output_rows(spk_session *session, uint32_t slot, float *first, float *rest, uint64_t stride,
                              uint32_t token_count) {
    float **y = session->s.y + (uint64_t)slot * 2 * session->batch_tokens;
    for (uint32_t t = 0; t < token_count; t++) {
        y[t] = first + t * stride;
        y[token_count + t] = rest + t * stride;
    }
    return y;
}

typedef struct {
    spk_session *session;
    const float *weight;
    const float *add;       /* [T][hidden] added to x first, or NULL */
    uint32_t     token_count;
    bool         has_rest;
} norm_pass;

static void norm_tokens(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const norm_pass *pass = context;
    const spk_model *m = pass->session->model;
    uint64_t hidden = m->config.hidden_size;
    for (uint64_t t = begin; t < end; t++) {
        float *x = pass->session->s.x + t * hidden;
        spk_activation *h = pass->session->s.h;
        if (pass->add != NULL) m->kernels->add_scaled(x, pass->add + t * hidden, 1.0f, hidden);
        m->kernels->rms_norm(x, pass->weight, hidden, m->config.rms_eps, h[t].f32);
        if (pass->has_rest) spk_quantize_with_rest(pass->session, h, pass->token_count, t);
        else m->kernels->quantize(&h[t]);
    }
}

/* x += add (if any); h = rms_norm(x; weight), ready for matmul. */
static void norm(spk_session *session, const float *weight, const float *add, uint32_t token_count, bool has_rest) {
    norm_pass pass = { session, weight, add, token_count, has_rest };
    spk_pool_run(session->pool, token_count, 1, norm_tokens, &pass);
}

/* A job of a mixer's input projections: outputs side by side in project, from column `offset`. */
static spk_matmul_job project_in(spk_session *session, spk_matrix w, uint32_t slot, uint64_t offset, uint32_t n) {
    uint64_t width = session->project_width;
    float *const *y = spk_output_rows(session, slot, session->s.project + offset, session->s.rest + offset, width, n);
    return spk_job(w, session->s.h, y, n, spk_wants_rest(session, &w));
}

typedef struct {
    spk_session    *session;
    spk_activation *mixed;
    uint32_t        token_count;
} mixed_pass;

static void quantize_mixed(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const mixed_pass *pass = context;
    for (uint64_t t = begin; t < end; t++) spk_quantize_with_rest(pass->session, pass->mixed, pass->token_count, t);
}

/* s.delta = W mixed, for the mixer's output projection. */
static void project_out(spk_session *session, spk_matrix w, spk_activation *mixed, uint32_t n) {
    mixed_pass pass = { session, mixed, n };
    spk_pool_run(session->pool, n, 1, quantize_mixed, &pass);
    float *const *y = spk_output_rows(session, 0, session->s.delta, session->s.rest, session->model->config.hidden_size, n);
    spk_matmul_job job = spk_job(w, mixed, y, n, spk_wants_rest(session, &w));
    spk_run_jobs(session, &job, 1);
}

/* ---- GDN ---- */

/* Item: one head of q, k or v channels, through the batch. */
static void gdn_conv_heads(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const layer_pass *pass = context;
    spk_session *session = pass->session;
    const spk_model_config *c = &session->model->config;
    const spk_kernels *kernels = session->model->kernels;
    uint64_t k_heads = c->gdn_k_head_count, key_dim = k_heads * c->gdn_k_dim;
    uint64_t conv_dim = 2 * key_dim + (uint64_t)c->gdn_v_head_count * c->gdn_v_dim;
    float q_scale = (float)(1.0 / sqrt((double)c->gdn_k_dim));
    for (uint64_t head = begin; head < end; head++) {
        bool is_v = head >= 2 * k_heads;
        uint64_t width = is_v ? c->gdn_v_dim : c->gdn_k_dim;
        uint64_t channel = is_v ? 2 * key_dim + (head - 2 * k_heads) * c->gdn_v_dim : head * c->gdn_k_dim;
        for (uint32_t t = 0; t < pass->token_count; t++) {
            float *y = session->s.conv_out + t * conv_dim;
            kernels->gdn_conv(session->s.project + t * session->project_width, pass->layer->gdn_taps, pass->state->conv,
                              conv_dim, c->conv_kernel, channel, channel + width, y);
            if (!is_v) kernels->l2_norm(y + channel, width, c->rms_eps, head < k_heads ? q_scale : 1.0f);
        }
    }
}

/* Decay and write strength of V head j: exp(a * softplus(alpha + dt)), sigmoid(beta). */
static void gdn_gates(const spk_layer *layer, const float *alpha, const float *beta, uint64_t j, float *decay,
                      float *write) {
    double t = (double)alpha[j] + (double)layer->gdn_dt[j];
    double softplus = t > 20.0 ? t : log1p(exp(t));
    *decay = (float)exp((double)layer->gdn_a[j] * softplus);
    *write = (float)(1.0 / (1.0 + exp(-(double)beta[j])));
}

/* Item: one V head, through the batch. */
static void gdn_delta_heads(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const layer_pass *pass = context;
    spk_session *session = pass->session;
    const spk_model_config *c = &session->model->config;
    spk_gdn_shape shape = { c->gdn_k_head_count, c->gdn_v_head_count, c->gdn_k_dim, c->gdn_v_dim, c->conv_kernel, c->rms_eps };
    uint64_t key_dim = (uint64_t)c->gdn_k_head_count * c->gdn_k_dim, value_dim = (uint64_t)c->gdn_v_head_count * c->gdn_v_dim;
    uint64_t conv_dim = 2 * key_dim + value_dim;
    for (uint64_t j = begin; j < end; j++) {
        uint64_t k_head = j % c->gdn_k_head_count;
        float *state = pass->state->delta + j * c->gdn_v_dim * c->gdn_k_dim;
        for (uint32_t t = 0; t < pass->token_count; t++) {
            const float *y = session->s.conv_out + t * conv_dim;
            const float *z = session->s.project + t * session->project_width + conv_dim;
            float decay, write;
            gdn_gates(pass->layer, z + value_dim, z + value_dim + c->gdn_v_head_count, j, &decay, &write);
            session->model->kernels->gdn_head(&shape, state, y + k_head * c->gdn_k_dim, y + key_dim + k_head * c->gdn_k_dim,
                                              y + 2 * key_dim + j * c->gdn_v_dim, decay, write, pass->layer->gdn_norm,
                                              z + j * c->gdn_v_dim, session->s.gdn_mixed[t].f32 + j * c->gdn_v_dim);
        }
    }
}

static void forward_gdn(layer_pass *pass) {
    spk_session *session = pass->session;
    const spk_layer *layer = pass->layer;
    const spk_model_config *c = &session->model->config;
    uint32_t n = pass->token_count;
    uint64_t value_dim = (uint64_t)c->gdn_v_head_count * c->gdn_v_dim;
    uint64_t conv_dim = 2 * (uint64_t)c->gdn_k_head_count * c->gdn_k_dim + value_dim;
    spk_matmul_job jobs[] = {   /* outputs in project: u | z | alpha | beta */
        project_in(session, layer->gdn_qkv, 0, 0, n),
        project_in(session, layer->gdn_gate, 1, conv_dim, n),
        project_in(session, layer->gdn_alpha, 2, conv_dim + value_dim, n),
        project_in(session, layer->gdn_beta, 3, conv_dim + value_dim + c->gdn_v_head_count, n),
    };
    spk_run_jobs(session, jobs, 4);
    spk_pool_run(session->pool, 2 * (uint64_t)c->gdn_k_head_count + c->gdn_v_head_count, 1, gdn_conv_heads, pass);
    spk_pool_run(session->pool, c->gdn_v_head_count, 1, gdn_delta_heads, pass);
    project_out(session, layer->gdn_out, session->s.gdn_mixed, n);
}

/* ---- Attention ---- */

static uint64_t q_stride(const spk_model_config *c) { return (c->has_attention_gate ? 2 : 1) * (uint64_t)c->head_dim; }

/* Item: one head of q, or one KV head, through the batch: norm, rotation, and storing k and v. */
static void attention_heads(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const layer_pass *pass = context;
    spk_session *session = pass->session;
    const spk_model_config *c = &session->model->config;
    const spk_kernels *kernels = session->model->kernels;
    uint64_t q_width = c->head_count * q_stride(c), kv_width = (uint64_t)c->kv_head_count * c->head_dim;
    for (uint64_t item = begin; item < end; item++) {
        for (uint32_t t = 0; t < pass->token_count; t++) {
            float *row = session->s.project + t * session->project_width;
            const float *cos_sin = session->s.cos_sin + (uint64_t)t * c->rope_dim;
            if (item < c->head_count) {
                kernels->qk_norm_rope(row + item * q_stride(c), pass->layer->q_norm, c->head_dim, c->rope_dim, cos_sin,
                                      c->rms_eps);
                continue;
            }
            uint64_t kv_head = item - c->head_count;
            float *k = row + q_width + kv_head * c->head_dim, *v = k + kv_width;
            uint64_t at = ((uint64_t)(session->position + t) * c->kv_head_count + kv_head) * c->head_dim;
            kernels->qk_norm_rope(k, pass->layer->k_norm, c->head_dim, c->rope_dim, cos_sin, c->rms_eps);
            kernels->kv_store(k, c->head_dim, pass->state->cache.k, at);
            kernels->kv_store(v, c->head_dim, pass->state->cache.v, at);
        }
    }
}

/* Item: one query head of one token. */
static void attend_heads(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const layer_pass *pass = context;
    spk_session *session = pass->session;
    const spk_model_config *c = &session->model->config;
    float *scores = session->s.scores + (uint64_t)thread_index * session->context_tokens;
    for (uint64_t item = begin; item < end; item++) {
        uint64_t t = item / c->head_count, head = item % c->head_count;
        const float *q = session->s.project + t * session->project_width + head * q_stride(c);
        float *out = session->s.attention_mixed[t].f32 + head * c->head_dim;
        session->model->kernels->attend(&pass->state->cache, (uint32_t)head, session->position + t, q, scores, out);
        if (c->has_attention_gate) session->model->kernels->sigmoid_gate(out, q + c->head_dim, c->head_dim);
    }
}

static void forward_attention(layer_pass *pass) {
    spk_session *session = pass->session;
    const spk_layer *layer = pass->layer;
    const spk_model_config *c = &session->model->config;
    uint32_t n = pass->token_count;
    uint64_t q_width = c->head_count * q_stride(c), kv_width = (uint64_t)c->kv_head_count * c->head_dim;
    spk_matmul_job jobs[] = {   /* outputs in project: q (with gates) | k | v */
        project_in(session, layer->q, 0, 0, n),
        project_in(session, layer->k, 1, q_width, n),
        project_in(session, layer->v, 2, q_width + kv_width, n),
    };
    spk_run_jobs(session, jobs, 3);
    spk_pool_run(session->pool, (uint64_t)c->head_count + c->kv_head_count, 1, attention_heads, pass);
    spk_pool_run(session->pool, (uint64_t)n * c->head_count, 1, attend_heads, pass);
    project_out(session, layer->attn_out, session->s.attention_mixed, n);
}

/* ---- The whole step ---- */

static void embed(spk_session *session, const uint32_t *tokens, uint32_t token_count) {
    const spk_model_config *c = &session->model->config;
    for (uint32_t t = 0; t < token_count; t++) {
        spk_layout_dequantize_row(&session->model->embedding, tokens[t], session->s.x + (uint64_t)t * c->hidden_size);
        for (uint32_t i = 0; i < c->rope_dim / 2; i++) {
            double angle = (double)(session->position + t) * session->inverse_frequency[i];
            float *cos_sin = session->s.cos_sin + (uint64_t)t * c->rope_dim + 2 * i;
            cos_sin[0] = (float)cos(angle);
            cos_sin[1] = (float)sin(angle);
        }
    }
}

/* Logits of the tokens that want them: their normed vectors are moved together first. */
static void head(spk_session *session, uint32_t token_count, float *const *logits) {
    spk_activation wanted_h[SPK_BATCH_TOKENS_MAX];
    float *wanted_y[SPK_BATCH_TOKENS_MAX];
    uint32_t wanted = 0;
    for (uint32_t t = 0; t < token_count; t++) {
        if (logits[t] == NULL) continue;
        wanted_h[wanted] = session->s.h[t];
        wanted_y[wanted++] = logits[t];
    }
    if (wanted == 0) return;
    spk_matmul_job job = spk_job(session->model->output, wanted_h, wanted_y, wanted, false);
    spk_run_jobs(session, &job, 1);
}

void spk_forward(spk_session *session, const uint32_t *tokens, uint32_t token_count, float *const *logits) {
    const spk_model *m = session->model;
    const float *pending = NULL;    /* a block's output that the next norm adds to x */
    embed(session, tokens, token_count);
    for (uint32_t i = 0; i < m->config.layer_count; i++) {
        layer_pass pass = { session, &m->layers[i], &session->layers[i], token_count };
        norm(session, m->layers[i].attn_norm, pending, token_count, true);
        if (m->layers[i].is_attention) forward_attention(&pass);
        else forward_gdn(&pass);
        norm(session, m->layers[i].ffn_norm, session->s.delta, token_count, false);
        spk_forward_ffn(session, &m->layers[i], token_count);
        pending = session->s.delta;
        if (session->watch != NULL) spk_watch_layer_end(session, token_count);
        if (session->observe != NULL) session->observe(session, i, token_count, session->observe_context);
    }
    norm(session, m->output_norm, pending, token_count, false);
    head(session, token_count, logits);
}
