/* runtime/trial.c - see trial.h.
 *
 * The candidate is a copy of the opened model's frame with layers of its own, whose matrices point to the model's bytes or
 * to blocks that were set.  Windows of the sample come first in the order in which logits of the base are kept.
 */
#include "runtime/trial.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "formats/pool.h"
#include "runtime/model_internal.h"

enum { BATCH = 32 };

/* One thread's. */
typedef struct {
    spk_session *base, *candidate;
    float       *base_logits, *candidate_logits;         /* [BATCH][vocab] */
    spk_pool    *pool;                                   /* of one thread, for statistics */
} trial_worker;

struct spk_trial {
    spk_model    *model;
    spk_model     base, candidate;       /* copies of the model's frame; the candidate's layers are its own */
    uint8_t     **blocks;                /* [tensor_count], owned; NULL: as in the model */
    uint32_t     *tokens;
    uint64_t      token_count, ctx, window_count, sample_count;
    bool         *is_sampled;            /* [window_count] */
    float       **kept;                  /* [window_count] logits of the base, [positions][vocab]; NULL: not kept */
    bool         *is_kept;               /* [window_count] filled */
    spk_pool     *pool;                  /* over windows */
    trial_worker *workers;               /* one for each thread of the pool */
    uint32_t      worker_count;
};

/* ---- Windows ---- */

static uint64_t window_begin(const spk_trial *trial, uint64_t window) { return window * trial->ctx; }

/* The last token of the text has no successor and is not evaluated. */
static uint64_t window_positions(const spk_trial *trial, uint64_t window) {
    uint64_t left = trial->token_count - 1 - window_begin(trial, window);
    return left < trial->ctx ? left : trial->ctx;
}

uint64_t spk_trial_ctx(const spk_trial *trial) { return trial->ctx; }

uint64_t spk_trial_position_count(const spk_trial *trial, bool is_whole) {
    if (is_whole) return trial->token_count - 1;
    uint64_t count = 0;
    for (uint64_t w = 0; w < trial->window_count; w++)
        if (trial->is_sampled[w]) count += window_positions(trial, w);
    return count;
}

/* ---- Opening ---- */

static spk_status out_of_memory(spk_error *err) { return spk_fail(err, SPK_E_MEMORY, "out of memory for trials"); }

static spk_status read_tokens(spk_trial *trial, const spk_trial_options *o, spk_error *err) {
    spk_tokenizer *tokenizer;
    size_t count = 0;
    SPK_TRY(spk_tokenizer_create(trial->model, &tokenizer, err));
    spk_status status = spk_tokenizer_encode(tokenizer, o->text, o->text_bytes, false, &trial->tokens, &count, err);
    spk_tokenizer_destroy(tokenizer);
    if (status != SPK_OK) return status;
    trial->token_count = count < o->token_count_max ? count : o->token_count_max;
    if (trial->token_count < o->position_count_min + 1 || trial->token_count - 1 > SPK_COMPARE_POSITION_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: %" PRIu64 " tokens; expected %" PRIu64 " to %" PRIu64 " (see --max-tokens)",
                        o->text_path, trial->token_count, o->position_count_min + 1, SPK_COMPARE_POSITION_COUNT_MAX + 1);
    return SPK_OK;
}

static spk_status choose_windows(spk_trial *trial, const spk_trial_options *o, spk_error *err) {
    trial->window_count = (trial->token_count - 1 + trial->ctx - 1) / trial->ctx;
    uint64_t sample = (o->sample_positions + trial->ctx - 1) / trial->ctx;
    trial->sample_count = sample < trial->window_count ? sample : trial->window_count;
    trial->is_sampled = calloc(trial->window_count, sizeof *trial->is_sampled);
    trial->is_kept = calloc(trial->window_count, sizeof *trial->is_kept);
    trial->kept = calloc(trial->window_count, sizeof *trial->kept);
    if (trial->is_sampled == NULL || trial->is_kept == NULL || trial->kept == NULL) return out_of_memory(err);
    for (uint64_t s = 0; s < trial->sample_count; s++)
        trial->is_sampled[s * trial->window_count / trial->sample_count] = true;
    uint64_t bytes = 0;
    for (int pass = 0; pass < 2; pass++)
        for (uint64_t w = 0; w < trial->window_count; w++) {
            uint64_t size = window_positions(trial, w) * trial->model->config.vocab_size * sizeof(float);
            if (trial->is_sampled[w] != (pass == 0) || bytes + size > SPK_TRIAL_KEPT_BYTES_MAX) continue;
            bytes += size;
            if ((trial->kept[w] = malloc(size)) == NULL) return out_of_memory(err);
        }
    return SPK_OK;
}

static spk_status make_candidate(spk_trial *trial, spk_error *err) {
    const spk_model *model = trial->model;
    size_t layer_bytes = model->config.layer_count * sizeof *model->layers;
    trial->base = trial->candidate = *model;
    trial->candidate.layers = malloc(layer_bytes);
    trial->blocks = calloc(model->tensor_count, sizeof *trial->blocks);
    if (trial->candidate.layers == NULL || trial->blocks == NULL) return out_of_memory(err);
    memcpy(trial->candidate.layers, model->layers, layer_bytes);
    return SPK_OK;
}

static spk_status make_workers(spk_trial *trial, uint32_t thread_count, spk_error *err) {
    if (thread_count == 0) thread_count = spk_cpu_count();
    trial->worker_count = thread_count < trial->window_count ? thread_count : (uint32_t)trial->window_count;
    trial->base.thread_count = trial->candidate.thread_count = thread_count / trial->worker_count;
    trial->workers = calloc(trial->worker_count, sizeof *trial->workers);
    if (trial->workers == NULL) return out_of_memory(err);
    SPK_TRY(spk_pool_create(trial->worker_count, &trial->pool, err));
    spk_session_options options = { .context_tokens = (uint32_t)trial->ctx, .batch_tokens = BATCH };
    uint64_t logit_bytes = sizeof(float) * BATCH * trial->model->config.vocab_size;
    for (uint32_t i = 0; i < trial->worker_count; i++) {
        trial_worker *worker = &trial->workers[i];
        SPK_TRY(spk_session_create(&trial->base, &options, &worker->base, err));
        SPK_TRY(spk_session_create(&trial->candidate, &options, &worker->candidate, err));
        SPK_TRY(spk_pool_create(1, &worker->pool, err));
        worker->base_logits = malloc(logit_bytes);
        worker->candidate_logits = malloc(logit_bytes);
        if (worker->base_logits == NULL || worker->candidate_logits == NULL) return out_of_memory(err);
    }
    return SPK_OK;
}

static spk_status open_trial(spk_trial *trial, const spk_trial_options *o, spk_error *err) {
    spk_model_options options = { .backend = spk_kernels_fast() == NULL ? SPK_BACKEND_REF : SPK_BACKEND_CPU,
                                  .thread_count = o->thread_count };
    SPK_TRY(spk_model_open_gguf(o->model, &options, &trial->model, err));
    uint32_t trained = spk_model_context_length(trial->model);
    if (o->ctx > trained)
        return spk_fail(err, SPK_E_USAGE, "--ctx %" PRIu64 ": %s was trained on %" PRIu32 " tokens", o->ctx,
                        spk_model_path(trial->model), trained);
    trial->ctx = o->ctx != 0 ? o->ctx : trained < SPK_TRIAL_CTX_DEFAULT ? trained : SPK_TRIAL_CTX_DEFAULT;
    SPK_TRY(read_tokens(trial, o, err));
    SPK_TRY(choose_windows(trial, o, err));
    SPK_TRY(make_candidate(trial, err));
    return make_workers(trial, o->thread_count, err);
}

spk_status spk_trial_open(const spk_trial_options *options, spk_trial **out, spk_error *err) {
    assert(options->position_count_min >= 2 && options->sample_positions >= 1);
    spk_trial *trial = calloc(1, sizeof *trial);
    if (trial == NULL) return out_of_memory(err);
    spk_status status = open_trial(trial, options, err);
    if (status == SPK_OK) *out = trial;
    else spk_trial_close(trial);
    return status;
}

void spk_trial_close(spk_trial *trial) {
    if (trial == NULL) return;
    for (uint32_t i = 0; trial->workers != NULL && i < trial->worker_count; i++) {
        trial_worker *worker = &trial->workers[i];
        spk_session_destroy(worker->base);
        spk_session_destroy(worker->candidate);
        spk_pool_destroy(worker->pool);
        free(worker->base_logits);
        free(worker->candidate_logits);
    }
    for (uint64_t w = 0; trial->kept != NULL && w < trial->window_count; w++) free(trial->kept[w]);
    for (uint64_t i = 0; trial->blocks != NULL && i < trial->model->tensor_count; i++) free(trial->blocks[i]);
    spk_pool_destroy(trial->pool);
    free(trial->workers);
    free(trial->kept);
    free(trial->is_kept);
    free(trial->is_sampled);
    free(trial->blocks);
    free(trial->candidate.layers);
    free(trial->tokens);
    spk_model_close(trial->model);
    free(trial);
}

/* ---- The candidate ---- */

void spk_trial_set(spk_trial *trial, uint64_t index, const spk_tensor *tensor, uint8_t *block) {
    const spk_tensor *own = &trial->model->tensors[index];
    uint32_t layer;
    spk_role role = spk_model_role(&trial->model->config, own->name, &layer);
    assert(role != SPK_ROLE_EXTRA && !spk_role_is_vector(role));
    free(trial->blocks[index]);
    trial->blocks[index] = block;
    if (block == NULL) tensor = own;
    const uint8_t *section = block == NULL ? trial->model->sections[own->section - 1] : block;
    spk_model_bind_matrix(&trial->candidate, layer, role, spk_tensor_matrix(tensor, section, 0),
                          tensor->matrix_stride_bytes);
}

/* ---- Measuring ---- */

typedef struct {
    spk_trial    *trial;
    uint64_t     *windows;               /* [window_count], ascending */
    spk_compare **compares;              /* [window_count], each of its window alone */
    spk_status   *status;                /* [window_count] */
    spk_error    *errors;                /* [window_count] */
} measurement;

static spk_status score_window(spk_trial *trial, trial_worker *worker, uint64_t window, spk_compare *compare,
                               spk_error *err) {
    const uint64_t vocab = trial->model->config.vocab_size, count = window_positions(trial, window);
    const uint32_t *tokens = trial->tokens + window_begin(trial, window);
    spk_session_reset(worker->base);
    spk_session_reset(worker->candidate);
    for (uint64_t done = 0; done < count;) {
        uint32_t step = count - done < BATCH ? (uint32_t)(count - done) : BATCH;
        float *base = trial->kept[window] != NULL ? trial->kept[window] + done * vocab : worker->base_logits;
        if (!trial->is_kept[window])
            SPK_TRY(spk_session_eval(worker->base, tokens + done, step, SPK_LOGITS_ALL, base, err));
        SPK_TRY(spk_session_eval(worker->candidate, tokens + done, step, SPK_LOGITS_ALL, worker->candidate_logits, err));
        const float *logits[2] = { base, worker->candidate_logits };
        SPK_TRY(spk_compare_add(compare, logits, tokens + done + 1, step, worker->pool, err));
        done += step;
    }
    trial->is_kept[window] = trial->kept[window] != NULL;
    return SPK_OK;
}

static void score_windows(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    measurement *m = context;
    for (uint64_t i = begin; i < end; i++)
        m->status[i] = score_window(m->trial, &m->trial->workers[thread_index], m->windows[i], m->compares[i],
                                    &m->errors[i]);
}

static spk_status make_compare(const spk_trial *trial, spk_compare **out, spk_error *err) {
    static const char *const names[] = { "the model", "the model with requantized tensors" };
    spk_compare_options options = { .vocab_size = trial->model->config.vocab_size, .model_count = 2, .names = names,
                                    .window_positions = (uint32_t)trial->ctx };
    return spk_compare_create(&options, out, err);
}

/* The windows, put together in the order of the text. */
static spk_status summarize(const measurement *m, uint64_t count, spk_compare_summary *out, spk_error *err) {
    spk_compare *all;
    SPK_TRY(make_compare(m->trial, &all, err));
    spk_status status = SPK_OK;
    for (uint64_t i = 0; i < count && status == SPK_OK; i++) {
        status = m->status[i];
        if (status == SPK_OK) status = spk_compare_append(all, m->compares[i], err);
        else (void)spk_fail(err, status, "window of token %" PRIu64 ": %s", window_begin(m->trial, m->windows[i]),
                            m->errors[i].text);
    }
    if (status == SPK_OK) status = spk_compare_summarize(all, 0, out, err);
    spk_compare_destroy(all);
    return status;
}

spk_status spk_trial_measure(spk_trial *trial, bool is_whole, spk_compare_summary *out, spk_error *err) {
    uint64_t count = 0;
    measurement m = { .trial = trial, .windows = calloc(trial->window_count, sizeof *m.windows),
                      .compares = calloc(trial->window_count, sizeof(spk_compare *)),
                      .status = calloc(trial->window_count, sizeof *m.status),
                      .errors = calloc(trial->window_count, sizeof *m.errors) };
    bool has_memory = m.windows != NULL && m.compares != NULL && m.status != NULL && m.errors != NULL;
    spk_status status = has_memory ? SPK_OK : out_of_memory(err);
    for (uint64_t w = 0; w < trial->window_count && status == SPK_OK; w++) {
        if (!is_whole && !trial->is_sampled[w]) continue;
        m.windows[count] = w;
        status = make_compare(trial, &m.compares[count], err);
        if (status == SPK_OK) count++;
    }
    if (status == SPK_OK) {
        spk_pool_run(trial->pool, count, 1, score_windows, &m);
        status = summarize(&m, count, out, err);
    }
    for (uint64_t i = 0; i < count; i++) spk_compare_destroy(m.compares[i]);
    free(m.windows);
    free(m.compares);
    free(m.status);
    free(m.errors);
    return status;
}
