/* runtime/session.c - creating, resetting and feeding a session, and generating from it.
 *
 * All memory is allocated when the session is created: a state block (KV caches for the whole context, GDN states) and a
 * scratch block for one batch.  Evaluation allocates nothing and cannot fail once it has begun.
 */
#include "runtime/session_internal.h"
#include "runtime/tool.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { BATCH_TOKENS_DEFAULT = 64, ARENA_ALIGN = 64, JOB_SLOTS_STATIC = 8 };

/* First pass with base NULL counts, second pass carves. */
typedef struct {
    uint8_t *base;
    uint64_t used;
} arena;

static void *take(arena *a, uint64_t size_bytes) {
    uint64_t at = a->used;
    a->used += (size_bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN;
    return a->base == NULL ? NULL : a->base + at;
}

static spk_activation *take_activations(arena *a, uint64_t count, uint64_t col_count) {
    spk_activation *list = take(a, count * sizeof *list);
    for (uint64_t i = 0; i < count; i++) {
        void *block = take(a, spk_activation_bytes(col_count));
        if (a->base != NULL) list[i] = spk_activation_carve(block, col_count);
    }
    return list;
}

static uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

static void carve_scratch(spk_session *session, arena *a) {
    const spk_model_config *c = &session->model->config;
    spk_scratch *s = &session->s;
    uint64_t t = session->batch_tokens, f = sizeof(float);
    uint64_t key_dim = (uint64_t)c->gdn_k_head_count * c->gdn_k_dim, value_dim = (uint64_t)c->gdn_v_head_count * c->gdn_v_dim;
    uint64_t conv_dim = 2 * key_dim + value_dim, q_dim = (uint64_t)c->head_count * c->head_dim;
    uint64_t used = c->expert_used_count, shared = c->shared_ff_size + c->dense_ff_size;
    session->project_width = max_u64(conv_dim + value_dim + 2 * (uint64_t)c->gdn_v_head_count,
                                     (c->has_attention_gate ? 2 : 1) * q_dim + 2 * (uint64_t)c->kv_head_count * c->head_dim);
    s->x = take(a, t * c->hidden_size * f);
    s->delta = take(a, t * c->hidden_size * f);
    s->h = take_activations(a, 2 * t, c->hidden_size);
    s->project = take(a, t * session->project_width * f);
    s->conv_out = take(a, t * conv_dim * f);
    s->gdn_mixed = take_activations(a, 2 * t, value_dim);
    s->attention_mixed = take_activations(a, 2 * t, q_dim);
    s->cos_sin = take(a, t * c->rope_dim * f);
    s->scores = take(a, (uint64_t)spk_pool_thread_count(session->pool) * session->context_tokens * f);
    s->router = take(a, t * (c->expert_count + 1) * f);
    s->expert = take(a, t * used * sizeof(uint32_t));
    s->expert_weight = take(a, t * used * f);
    s->ff = take(a, t * used * 2 * c->expert_ff_size * f);
    s->ff_act = take_activations(a, 2 * t * used, c->expert_ff_size);
    s->expert_out = take(a, t * used * c->hidden_size * f);
    s->shared_ff = take(a, t * 2 * shared * f);
    s->shared_act = take_activations(a, 2 * t, shared);
    s->shared_out = take(a, t * c->hidden_size * f);
    s->gather = take(a, 2 * t * used * sizeof(spk_activation));
    s->gather_y = take(a, 4 * t * used * sizeof(float *));
    s->group_slots = take(a, t * used * sizeof(uint32_t));
    s->group_end = take(a, c->expert_count * sizeof(uint32_t));
    s->jobs = take(a, (2 * t * used + JOB_SLOTS_STATIC) * sizeof(spk_matmul_job));
    s->y = take(a, JOB_SLOTS_STATIC * 2 * t * sizeof(float *));
    s->rest = take(a, t * max_u64(session->project_width, (used + 1) * c->hidden_size) * f);
}

static void carve_state(spk_session *session, arena *a) {
    const spk_model *m = session->model;
    const spk_model_config *c = &m->config;
    uint64_t element_bytes = m->kernels->kv_type == SPK_TYPE_F16 ? 2 : 4;
    uint64_t kv_bytes = (uint64_t)session->context_tokens * c->kv_head_count * c->head_dim * element_bytes;
    uint64_t value_dim = (uint64_t)c->gdn_v_head_count * c->gdn_v_dim;
    uint64_t conv_dim = 2 * (uint64_t)c->gdn_k_head_count * c->gdn_k_dim + value_dim;
    for (uint32_t i = 0; i < c->layer_count; i++) {
        spk_layer_state *state = &session->layers[i];
        if (m->layers[i].is_attention) {
            state->cache = (spk_attention_cache){ .head_count = c->head_count, .kv_head_count = c->kv_head_count,
                                                  .head_dim = c->head_dim };
            state->cache.k = take(a, kv_bytes);
            state->cache.v = take(a, kv_bytes);
        } else {
            state->conv = take(a, (c->conv_kernel - 1) * conv_dim * sizeof(float));
            state->delta = take(a, value_dim * c->gdn_k_dim * sizeof(float));
        }
    }
}

/* Zeroed pages from the system: a long context costs memory only as it fills. */
static uint8_t *map_zeroed(uint64_t size_bytes) {
    void *memory = mmap(NULL, size_bytes + ARENA_ALIGN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                        -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static spk_status allocate(spk_session *session, spk_error *err) {
    const spk_model_config *c = &session->model->config;
    arena scratch = { 0 }, state = { 0 };
    session->layers = calloc(c->layer_count, sizeof *session->layers);
    session->inverse_frequency = malloc(c->rope_dim / 2 * sizeof(double));
    if (session->layers == NULL || session->inverse_frequency == NULL)
        return spk_fail(err, SPK_E_MEMORY, "out of memory for a session");
    carve_scratch(session, &scratch);
    carve_state(session, &state);
    session->state_bytes = state.used;
    session->scratch_bytes = scratch.used;
    session->scratch_memory = map_zeroed(scratch.used);
    session->state_memory = map_zeroed(state.used);
    if (session->scratch_memory == NULL || session->state_memory == NULL)
        return spk_fail(err, SPK_E_MEMORY, "cannot allocate %" PRIu64 " bytes of state and %" PRIu64
                        " of scratch for a context of %u tokens", state.used, scratch.used, session->context_tokens);
    scratch = (arena){ session->scratch_memory, 0 };
    state = (arena){ session->state_memory, 0 };
    carve_scratch(session, &scratch);
    carve_state(session, &state);
    for (uint32_t i = 0; i < c->rope_dim / 2; i++)
        session->inverse_frequency[i] = pow((double)c->rope_base, -2.0 * i / c->rope_dim);
    return SPK_OK;
}

spk_status spk_session_create(const spk_model *model, const spk_session_options *options, spk_session **out,
                              spk_error *err) {
    if (options->context_tokens == 0 || options->context_tokens > SPK_CONTEXT_MAX)
        return spk_fail(err, SPK_E_USAGE, "a context of %u tokens: expected 1 to %u", options->context_tokens,
                        (unsigned)SPK_CONTEXT_MAX);
    spk_session *session = calloc(1, sizeof *session);
    if (session == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for a session");
    uint32_t batch = options->batch_tokens ? options->batch_tokens : BATCH_TOKENS_DEFAULT;
    if (batch > SPK_BATCH_TOKENS_MAX) batch = SPK_BATCH_TOKENS_MAX;
    session->model = model;
    session->context_tokens = options->context_tokens;
    session->batch_tokens = batch < options->context_tokens ? batch : options->context_tokens;
    spk_status status;
    if (options->kv_q8 && model->gpu == NULL) {
        status = spk_fail(err, SPK_E_UNSUPPORTED, "a KV cache of q8: only the cuda backend has one");
    } else if (options->fusions_off != 0 && model->gpu == NULL) {
        status = spk_fail(err, SPK_E_UNSUPPORTED, "fused kernels to leave out: only the cuda backend has any");
    } else if (model->gpu != NULL) {
        status = spk_gpu_session_create(model, model->gpu, options->context_tokens, SPK_FUSE_ALL & ~options->fusions_off,
                                        options->kv_q8, &session->gpu, err);
    } else {
        status = spk_pool_create(model->thread_count, &session->pool, err);
        if (status == SPK_OK) status = allocate(session, err);
    }
    if (status != SPK_OK) {
        spk_session_destroy(session);
        return status;
    }
    *out = session;
    return SPK_OK;
}

void spk_session_destroy(spk_session *session) {
    if (session == NULL) return;
    spk_gpu_session_destroy(session->gpu);
    if (session->scratch_memory != NULL) (void)munmap(session->scratch_memory, session->scratch_bytes + ARENA_ALIGN);
    if (session->state_memory != NULL) (void)munmap(session->state_memory, session->state_bytes + ARENA_ALIGN);
    spk_pool_destroy(session->pool);
    free(session->layers);
    free(session->inverse_frequency);
    free(session);
}

void spk_session_reset(spk_session *session) {
    session->position = 0;
    if (session->gpu != NULL) {
        session->needs_reset = true;   /* done, and its failure reported, by the next evaluation */
        return;
    }
    const spk_model_config *c = &session->model->config;
    uint64_t value_dim = (uint64_t)c->gdn_v_head_count * c->gdn_v_dim;
    uint64_t conv_dim = 2 * (uint64_t)c->gdn_k_head_count * c->gdn_k_dim + value_dim;
    for (uint32_t i = 0; i < c->layer_count; i++) {
        if (session->model->layers[i].is_attention) continue;   /* positions beyond `position` are never read */
        memset(session->layers[i].conv, 0, (c->conv_kernel - 1) * conv_dim * sizeof(float));
        memset(session->layers[i].delta, 0, value_dim * c->gdn_k_dim * sizeof(float));
    }
}

uint32_t spk_session_position(const spk_session *session) { return session->position; }
uint64_t spk_session_state_bytes(const spk_session *session) {
    return session->gpu != NULL ? spk_gpu_session_bytes(session->gpu) : session->state_bytes;
}

/* The context must hold `count` more tokens, and the ids must be in the vocabulary. */
static spk_status check_tokens(const spk_session *session, const uint32_t *tokens, uint32_t count, spk_error *err) {
    uint32_t vocab = session->model->config.vocab_size;
    if (count > session->context_tokens - session->position)
        return spk_fail(err, SPK_E_LIMIT, "the context of %u tokens is full: %u used, %u more asked", session->context_tokens,
                        session->position, count);
    for (uint32_t i = 0; i < count; i++)
        if (tokens[i] >= vocab)
            return spk_fail(err, SPK_E_USAGE, "token %u of the input is %u, expected less than the vocabulary of %u", i,
                            tokens[i], vocab);
    return SPK_OK;
}

static spk_status reset_if_needed(spk_session *session, spk_error *err) {
    if (session->needs_reset) SPK_TRY(spk_gpu_reset(session->gpu, err));
    session->needs_reset = false;
    return SPK_OK;
}

spk_status spk_session_eval(spk_session *session, const uint32_t *tokens, uint32_t count, spk_logits which,
                            float *logits, spk_error *err) {
    uint32_t vocab = session->model->config.vocab_size;
    SPK_TRY(check_tokens(session, tokens, count, err));
    if (count == 0) return SPK_OK;
    if (session->gpu != NULL) {
        SPK_TRY(reset_if_needed(session, err));
        SPK_TRY(spk_gpu_eval(session->gpu, session->position, tokens, count, which, logits, err));
        session->position += count;
        return SPK_OK;
    }
    float *rows[SPK_BATCH_TOKENS_MAX];
    for (uint32_t done = 0; done < count;) {
        uint32_t step = count - done < session->batch_tokens ? count - done : session->batch_tokens;
        for (uint32_t t = 0; t < step; t++) {
            bool wanted = which == SPK_LOGITS_ALL || (which == SPK_LOGITS_LAST && done + t + 1 == count);
            rows[t] = !wanted ? NULL : which == SPK_LOGITS_LAST ? logits : logits + (uint64_t)(done + t) * vocab;
        }
        spk_forward(session, tokens + done, step, rows);
        session->position += step;
        done += step;
    }
    return SPK_OK;
}

spk_status spk_session_account(spk_session *session, uint32_t repeat_count, spk_account *out, spk_error *err) {
    static const uint32_t token = 0;
    if (session->gpu == NULL) return spk_fail(err, SPK_E_UNSUPPORTED, "only a step on a GPU is taken apart");
    SPK_TRY(check_tokens(session, &token, 1, err));
    SPK_TRY(reset_if_needed(session, err));
    return spk_gpu_account(session->gpu, session->position, repeat_count, out, err);
}

/* ---- Generation ---- */

/* Of the last token of tokens[count]; no token can be drawn from a NaN. */
static spk_status checked_logits(spk_session *session, const uint32_t *tokens, uint32_t count, float *logits, spk_error *err) {
    SPK_TRY(spk_session_eval(session, tokens, count, SPK_LOGITS_LAST, logits, err));
    return spk_tool_logits_check(session->model->path, session->position - 1, logits, session->model->config.vocab_size, err);
}

static spk_status generate_on_cpu(spk_session *session, const uint32_t *tokens, uint32_t count, const spk_generation *g,
                                  spk_error *err) {
    static const spk_sampler_options likeliest = { .temperature = 0 };
    uint32_t vocab = session->model->config.vocab_size;
    spk_sampler greedy = spk_sampler_start(&likeliest), *sampler = g->sampler != NULL ? g->sampler : &greedy;
    float *logits = malloc(vocab * sizeof *logits);
    void *scratch = malloc(spk_sampler_scratch_bytes(vocab));
    spk_status status = logits == NULL || scratch == NULL ? spk_fail(err, SPK_E_MEMORY, "out of memory for a vocabulary of %u", vocab)
                                                          : checked_logits(session, tokens, count, logits, err);
    for (uint32_t i = 0; status == SPK_OK; i++) {
        uint32_t token = spk_sampler_next(sampler, logits, vocab, scratch);
        if (!g->on_token(g->context, token) || i + 1 == g->token_limit) break;
        status = checked_logits(session, &token, 1, logits, err);
    }
    free(logits);
    free(scratch);
    return status;
}

static spk_status generate_on_gpu(spk_session *session, const uint32_t *tokens, uint32_t count, const spk_generation *g,
                                  spk_error *err) {
    uint32_t begin = session->position, token = tokens[count - 1];
    bool stopped = false;
    if (count > 1) SPK_TRY(spk_session_eval(session, tokens, count - 1, SPK_LOGITS_NONE, NULL, err));
    SPK_TRY(reset_if_needed(session, err));
    SPK_TRY(spk_gpu_generate(session->gpu, &session->position, &token, g, &stopped, err));
    if (token == SPK_TOKEN_NONE)
        return spk_fail(err, SPK_E_NONFINITE, "%s: position %u: the largest logit is not a finite number", session->model->path,
                        session->position - 1);
    bool is_done = stopped || session->position - begin - (count - 1) == g->token_limit;
    return is_done ? SPK_OK : check_tokens(session, &token, 1, err);     /* the context is full */
}

spk_status spk_session_generate(spk_session *session, const uint32_t *tokens, uint32_t count, const spk_generation *generation,
                                spk_error *err) {
    if (count == 0) return spk_fail(err, SPK_E_USAGE, "no token to go on from: at least one is needed");
    SPK_TRY(check_tokens(session, tokens, count, err));
    if (generation->token_limit == 0) return spk_session_eval(session, tokens, count, SPK_LOGITS_NONE, NULL, err);
    return session->gpu != NULL ? generate_on_gpu(session, tokens, count, generation, err)
                                : generate_on_cpu(session, tokens, count, generation, err);
}
