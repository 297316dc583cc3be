/* runtime/forward_ffn.c - the feed-forward part of a layer: routed experts, shared expert, or dense.
 *
 * Experts of a batch are grouped, so that each one's weights are read once for all tokens that chose it.  What a token gets
 * does not depend on the grouping: its experts' outputs are added in order of rank.
 */
#include "runtime/session_internal.h"

#include <math.h>
#include <string.h>

typedef struct {
    spk_session     *session;
    const spk_layer *layer;
    uint32_t         token_count;
} ffn_pass;

static bool has_shared(const spk_model_config *c) { return c->shared_ff_size + c->dense_ff_size > 0; }
static uint64_t shared_width(const spk_model_config *c) { return (uint64_t)c->shared_ff_size + c->dense_ff_size; }

static void top_k_tokens(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const ffn_pass *pass = context;
    spk_scratch *s = &pass->session->s;
    const spk_model_config *c = &pass->session->model->config;
    for (uint64_t t = begin; t < end; t++)
        pass->session->model->kernels->top_k(s->router + t * (c->expert_count + 1), c->expert_count, c->expert_used_count,
                                             s->expert + t * c->expert_used_count, s->expert_weight + t * c->expert_used_count);
}

/* Item: one (token, rank) of the routed experts, then one token of the shared expert. */
static void swiglu_items(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const ffn_pass *pass = context;
    spk_scratch *s = &pass->session->s;
    const spk_model_config *c = &pass->session->model->config;
    const spk_kernels *kernels = pass->session->model->kernels;
    uint64_t routed = (uint64_t)pass->token_count * c->expert_used_count;
    for (uint64_t i = begin; i < end; i++) {
        uint64_t width = i < routed ? c->expert_ff_size : shared_width(c);
        const float *gate = i < routed ? s->ff + i * 2 * width : s->shared_ff + (i - routed) * 2 * width;
        spk_activation *list = i < routed ? s->ff_act : s->shared_act;
        uint64_t count = i < routed ? routed : pass->token_count, at = i < routed ? i : i - routed;
        kernels->swiglu(gate, gate + width, width, list[at].f32);
        spk_quantize_with_rest(pass->session, list, count, at);
    }
}

/* delta = sum of weighted experts in order of rank, then the shared expert behind its sigmoid gate. */
static void combine_tokens(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    const ffn_pass *pass = context;
    spk_scratch *s = &pass->session->s;
    const spk_model_config *c = &pass->session->model->config;
    const spk_kernels *kernels = pass->session->model->kernels;
    for (uint64_t t = begin; t < end; t++) {
        float *delta = s->delta + t * c->hidden_size;
        memset(delta, 0, c->hidden_size * sizeof *delta);
        for (uint32_t rank = 0; rank < c->expert_used_count; rank++) {
            uint64_t slot = t * c->expert_used_count + rank;
            kernels->add_scaled(delta, s->expert_out + slot * c->hidden_size, s->expert_weight[slot], c->hidden_size);
        }
        if (c->shared_ff_size == 0) continue;
        float gate = s->router[t * (c->expert_count + 1) + c->expert_count];
        kernels->add_scaled(delta, s->shared_out + t * c->hidden_size, (float)(1.0 / (1.0 + exp(-(double)gate))),
                            c->hidden_size);
    }
}

/* A job on s.h: one int8 vector a token. */
static spk_matmul_job plain_job(spk_session *session, spk_matrix w, uint32_t slot, float *first, uint64_t stride, uint32_t n) {
    return spk_job(w, session->s.h, spk_output_rows(session, slot, first, session->s.rest, stride, n), n, false);
}

/* Jobs that need no routing: router, shared gate, and the shared (or dense) gate and up. */
static uint32_t static_jobs(spk_session *session, const spk_layer *layer, uint32_t n) {
    const spk_model_config *c = &session->model->config;
    spk_scratch *s = &session->s;
    uint32_t count = 0;
    if (c->expert_count > 0)
        s->jobs[count++] = plain_job(session, layer->router, 0, s->router, c->expert_count + 1, n);
    if (c->shared_ff_size > 0)
        s->jobs[count++] = plain_job(session, layer->shared_router, 1, s->router + c->expert_count, c->expert_count + 1, n);
    if (has_shared(c)) {
        uint64_t width = shared_width(c);
        s->jobs[count++] = plain_job(session, layer->shared_gate, 2, s->shared_ff, 2 * width, n);
        s->jobs[count++] = plain_job(session, layer->shared_up, 3, s->shared_ff + width, 2 * width, n);
    }
    return count;
}

/* Slots (token * used + rank) sorted by expert, stable; returns through `group` the end of each expert's run. */
static void group_by_expert(spk_session *session, uint32_t slot_count, uint32_t *group_end) {
    const spk_model_config *c = &session->model->config;
    spk_scratch *s = &session->s;
    memset(group_end, 0, c->expert_count * sizeof *group_end);
    for (uint32_t i = 0; i < slot_count; i++) group_end[s->expert[i]]++;
    uint32_t sum = 0;
    for (uint32_t e = 0; e < c->expert_count; e++) {
        uint32_t count = group_end[e];
        group_end[e] = sum;
        sum += count;
    }
    for (uint32_t i = 0; i < slot_count; i++) s->group_slots[group_end[s->expert[i]]++] = i;
}

/* Gate and up of every expert that a token chose.  Inputs: s.h by token; outputs: s.ff by slot. */
static uint32_t gate_up_jobs(spk_session *session, const spk_layer *layer, const uint32_t *group_end) {
    const spk_model_config *c = &session->model->config;
    spk_scratch *s = &session->s;
    uint32_t count = 0, begin = 0;
    uint64_t ff = c->expert_ff_size, slots = (uint64_t)session->batch_tokens * c->expert_used_count;
    for (uint32_t e = 0; e < c->expert_count; begin = group_end[e], e++) {
        uint32_t size = group_end[e] - begin;
        if (size == 0) continue;
        for (uint32_t i = begin; i < group_end[e]; i++) {
            uint32_t slot = s->group_slots[i];
            s->gather[i] = s->h[slot / c->expert_used_count];
            s->gather_y[i] = s->ff + slot * 2 * ff;
            s->gather_y[slots + i] = s->ff + slot * 2 * ff + ff;
        }
        s->jobs[count] = spk_job(spk_expert_at(&layer->expert_gate, e), s->gather + begin, s->gather_y + begin, size, false);
        s->jobs[count++].slots = s->group_slots + begin;
        s->jobs[count] = spk_job(spk_expert_at(&layer->expert_up, e), s->gather + begin, s->gather_y + slots + begin, size, false);
        s->jobs[count++].slots = s->group_slots + begin;
    }
    return count;
}

/* Down of every chosen expert; inputs and outputs of a job and of its rest lie side by side. */
static uint32_t down_jobs(spk_session *session, const spk_layer *layer, uint32_t slot_count, const uint32_t *group_end) {
    const spk_model_config *c = &session->model->config;
    spk_scratch *s = &session->s;
    uint32_t count = 0, begin = 0;
    for (uint32_t e = 0; e < c->expert_count; begin = group_end[e], e++) {
        uint32_t size = group_end[e] - begin;
        if (size == 0) continue;
        spk_activation *x = s->gather + 2 * (uint64_t)begin;
        float **y = s->gather_y + 2 * (uint64_t)begin;
        for (uint32_t i = 0; i < size; i++) {
            uint32_t slot = s->group_slots[begin + i];
            x[i] = s->ff_act[slot];
            x[size + i] = s->ff_act[slot_count + slot];
            y[i] = s->expert_out + (uint64_t)slot * c->hidden_size;
            y[size + i] = s->rest + (uint64_t)slot * c->hidden_size;
        }
        spk_matrix w = spk_expert_at(&layer->expert_down, e);
        s->jobs[count] = spk_job(w, x, y, size, spk_wants_rest(session, &w));
        s->jobs[count++].slots = s->group_slots + begin;
    }
    return count;
}

void spk_forward_ffn(spk_session *session, const spk_layer *layer, uint32_t token_count) {
    const spk_model_config *c = &session->model->config;
    spk_scratch *s = &session->s;
    ffn_pass pass = { session, layer, token_count };
    uint32_t slot_count = token_count * c->expert_used_count, shared_count = has_shared(c) ? token_count : 0;
    spk_run_jobs(session, s->jobs, static_jobs(session, layer, token_count));
    if (slot_count > 0) {
        spk_pool_run(session->pool, token_count, 1, top_k_tokens, &pass);
        group_by_expert(session, slot_count, s->group_end);
        spk_run_jobs(session, s->jobs, gate_up_jobs(session, layer, s->group_end));
    }
    spk_pool_run(session->pool, slot_count + shared_count, 1, swiglu_items, &pass);
    uint32_t job_count = slot_count > 0 ? down_jobs(session, layer, slot_count, s->group_end) : 0;
    float *shared_out = c->dense_ff_size > 0 ? s->delta : s->shared_out;   /* a dense FFN is the whole result */
    if (shared_count > 0) {
        float *rest = s->rest + (uint64_t)slot_count * c->hidden_size;
        float *const *y = spk_output_rows(session, 4, shared_out, rest, c->hidden_size, token_count);
        s->jobs[job_count++] = spk_job(layer->shared_down, s->shared_act, y, token_count, spk_wants_rest(session, &layer->shared_down));
    }
    spk_run_jobs(session, s->jobs, job_count);
    if (slot_count > 0) spk_pool_run(session->pool, token_count, 1, combine_tokens, &pass);
}
