/* runtime/watch.c - see watch.h.
 *
 * How much an input counts is known only once its layer's output has been added to the residual stream, so jobs are held
 * until then: a mixer's until the FFN of its layer begins, an FFN's until the layer ends.  Their vectors lie untouched in
 * the session's scratch, but for the input of the mixer, which is copied.
 */
#include "runtime/watch.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/session_internal.h"

typedef struct {
    const uint8_t *data;           /* of the matrix: what tells it from others */
    uint64_t       tensor_index, matrix_index;
    spk_role       role;
} place;

typedef struct {
    const place    *place;
    const uint32_t *slots;         /* as in spk_matmul_job */
    uint32_t        count;
    uint64_t        first;         /* of the vectors below */
} held_job;

struct spk_watch {
    spk_session  *session;
    spk_watch_fn *fn;
    void         *context;
    place        *places;          /* by data */
    uint64_t      place_count;
    held_job     *jobs;
    uint64_t      job_count, job_room, vector_count, vector_room;
    const float **x;               /* [vector_room] */
    float        *weight;          /* [vector_room], of one job */
    float        *mixer_input;     /* [T][hidden] */
    double       *mean_square;     /* [T] of the residual stream */
};

static int by_data(const void *a, const void *b) {
    const place *x = a, *y = b;
    return (x->data > y->data) - (x->data < y->data);
}

static void fill_places(spk_watch *watch) {
    const spk_model *m = watch->session->model;
    for (uint64_t i = 0; i < m->tensor_count; i++) {
        const spk_tensor *t = &m->tensors[i];
        uint32_t layer;
        spk_role role = spk_model_role(&m->config, t->name, &layer);
        bool is_read = role != SPK_ROLE_EXTRA && (role != SPK_ROLE_TOKEN_EMBD || m->config.is_tied);
        if (!is_read || spk_role_is_protected(role)) continue;
        for (uint64_t e = 0; e < spk_tensor_matrix_count(t); e++)
            watch->places[watch->place_count++] =
                (place){ spk_tensor_matrix(t, m->sections[t->section - 1], e).data, i, e, role };
    }
    qsort(watch->places, watch->place_count, sizeof *watch->places, by_data);
}

static bool allocate(spk_watch *watch) {
    const spk_session *session = watch->session;
    const spk_model *m = session->model;
    uint64_t t = session->batch_tokens, used = m->config.expert_used_count, matrix_count = 0;
    for (uint64_t i = 0; i < m->tensor_count; i++) matrix_count += spk_tensor_matrix_count(&m->tensors[i]);
    /* At most three matrices read an expert's vectors (gate, up, down), three the mixer's input, three the dense FFN's. */
    watch->job_room = 3 * (t * used + 2);
    watch->vector_room = 3 * t * (used + 2);
    watch->places = malloc((matrix_count + 1) * sizeof *watch->places);
    watch->jobs = malloc(watch->job_room * sizeof *watch->jobs);
    watch->x = malloc(watch->vector_room * sizeof *watch->x);
    watch->weight = malloc(watch->vector_room * sizeof *watch->weight);
    watch->mixer_input = malloc(t * m->config.hidden_size * sizeof(float));
    watch->mean_square = malloc(t * sizeof *watch->mean_square);
    return watch->places && watch->jobs && watch->x && watch->weight && watch->mixer_input && watch->mean_square;
}

spk_status spk_watch_start(spk_session *session, spk_watch_fn *fn, void *context, spk_watch **out, spk_error *err) {
    if (session->gpu != NULL)
        return spk_fail(err, SPK_E_UNSUPPORTED, "inputs of products are seen on the backends cpu and ref only");
    assert(session->watch == NULL);
    spk_watch *watch = calloc(1, sizeof *watch);
    if (watch == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for a watch");
    *watch = (spk_watch){ .session = session, .fn = fn, .context = context };
    if (!allocate(watch)) {
        spk_watch_stop(watch);
        return spk_fail(err, SPK_E_MEMORY, "out of memory for a watch");
    }
    fill_places(watch);
    session->watch = watch;
    *out = watch;
    return SPK_OK;
}

void spk_watch_stop(spk_watch *watch) {
    if (watch == NULL) return;
    watch->session->watch = NULL;
    free(watch->places);
    free(watch->jobs);
    free(watch->x);
    free(watch->weight);
    free(watch->mixer_input);
    free(watch->mean_square);
    free(watch);
}

/* ---- While the session runs ---- */

static bool is_mixer_input(spk_role role) {
    return role == SPK_ROLE_GDN_QKV || role == SPK_ROLE_GDN_GATE || role == SPK_ROLE_ATTN_Q || role == SPK_ROLE_ATTN_K ||
           role == SPK_ROLE_ATTN_V;
}
static bool is_mixer(spk_role role) {
    return is_mixer_input(role) || role == SPK_ROLE_GDN_OUT || role == SPK_ROLE_ATTN_OUT;
}
static bool is_shared(spk_role role) {
    return role == SPK_ROLE_SHARED_GATE || role == SPK_ROLE_SHARED_UP || role == SPK_ROLE_SHARED_DOWN;
}
static bool is_head(spk_role role) { return role == SPK_ROLE_OUTPUT || role == SPK_ROLE_TOKEN_EMBD; }

static float weight_of(const spk_watch *watch, const held_job *job, uint32_t t) {
    const spk_session *session = watch->session;
    const spk_model_config *c = &session->model->config;
    uint32_t token = job->slots == NULL ? t : job->slots[t] / c->expert_used_count;
    double factor = 1;
    if (job->slots != NULL) factor = (double)session->s.expert_weight[job->slots[t]];
    else if (is_shared(job->place->role))
        factor = 1 / (1 + exp(-(double)session->s.router[(uint64_t)token * (c->expert_count + 1) + c->expert_count]));
    return (float)(factor * factor / watch->mean_square[token]);
}

/* Hands over what is held; the residual stream is s.x, plus delta where that is not NULL. */
static void release(spk_watch *watch, const float *delta, uint32_t token_count) {
    const spk_session *session = watch->session;
    uint64_t hidden = session->model->config.hidden_size;
    for (uint32_t t = 0; t < token_count; t++) {
        const float *x = session->s.x + t * hidden;
        double sum = 0;
        for (uint64_t i = 0; i < hidden; i++) {
            double v = (double)x[i] + (delta == NULL ? 0.0 : (double)delta[t * hidden + i]);
            sum += v * v;
        }
        watch->mean_square[t] = sum / (double)hidden + (double)session->model->config.rms_eps;
    }
    for (uint64_t j = 0; j < watch->job_count; j++) {
        const held_job *job = &watch->jobs[j];
        for (uint32_t t = 0; t < job->count; t++)
            watch->weight[t] = is_head(job->place->role) ? 1.0f : weight_of(watch, job, t);
        spk_watched watched = { job->place->tensor_index, job->place->matrix_index, job->count, watch->x + job->first,
                                watch->weight };
        watch->fn(watch->context, &watched);
    }
    watch->job_count = watch->vector_count = 0;
}

static void hold(spk_watch *watch, const place *where, const spk_matmul_job *job) {
    uint64_t hidden = watch->session->model->config.hidden_size;
    assert(watch->job_count < watch->job_room && watch->vector_count + job->token_count <= watch->vector_room);
    watch->jobs[watch->job_count++] = (held_job){ where, job->slots, job->token_count, watch->vector_count };
    for (uint32_t t = 0; t < job->token_count; t++) {
        const float *x = job->x[t].f32;
        if (is_mixer_input(where->role)) {
            float *copy = watch->mixer_input + t * hidden;
            memcpy(copy, x, hidden * sizeof *copy);
            x = copy;
        }
        watch->x[watch->vector_count++] = x;
    }
}

void spk_watch_job(spk_session *session, const spk_matmul_job *job) {
    spk_watch *watch = session->watch;
    place key = { .data = job->w.data };
    const place *where = bsearch(&key, watch->places, watch->place_count, sizeof key, by_data);
    if (where == NULL) return;
    bool begins_ffn = watch->job_count > 0 && is_mixer(watch->jobs[0].place->role) && !is_mixer(where->role);
    if (begins_ffn) release(watch, NULL, watch->jobs[0].count);
    hold(watch, where, job);
    if (is_head(where->role)) release(watch, NULL, 0);
}

void spk_watch_layer_end(spk_session *session, uint32_t token_count) {
    release(session->watch, session->s.delta, token_count);
}

/* ---- The model ---- */

const spk_tensor *spk_model_tensors(const spk_model *model, uint64_t *count) {
    *count = model->tensor_count;
    return model->tensors;
}

const spk_model_config *spk_model_shape(const spk_model *model) { return &model->config; }

void spk_model_router_rows(const spk_model *model, uint32_t layer, float *rows) {
    const spk_layer *l = &model->layers[layer];
    uint64_t hidden = model->config.hidden_size, experts = model->config.expert_count;
    for (uint64_t e = 0; e < experts; e++) spk_layout_dequantize_row(&l->router, e, rows + e * hidden);
    for (uint64_t i = 0; i < hidden; i++) {
        double sum = 0;
        for (uint64_t e = 0; e < experts; e++) sum += (double)rows[e * hidden + i];
        float mean = (float)(sum / (double)experts);
        for (uint64_t e = 0; e < experts; e++) rows[e * hidden + i] = (rows[e * hidden + i] - mean) * l->ffn_norm[i];
    }
}
