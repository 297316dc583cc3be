/* tests/gpu_layers.c - every layer of a model on the GPU against the CPU's reference, at full width.
 *
 *   gpu_layers [MODEL [tokens]]    default: the small models of the tree, 32 pseudo-random tokens.  MODEL is opened three
 *                                  times: a pack is only mapped, a GGUF laid out each time
 *
 * Errors of layers would add up, and one near-tie in a router would change all that follows.  So each layer gets the
 * reference's input, whatever the layer before it made; its own states and caches stay.  Reported for each layer, over
 * the tokens whose experts are the reference's: the largest |out - reference| / |reference's change| (2-norms; the change is what
 * the layer adds to the residual stream), for the GPU and for the CPU's int8 path, which quantizes in the same places and
 * is the yardstick: the GPU may be half as much again off as that path is in its worst layer.  At least half of the choices
 * of experts must be the reference's (near-ties are not), and all experts must be reached over the test.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/gpu_internal.h"
#include "runtime/session_internal.h"
#include "tests/check.h"

enum { TOKENS_DEFAULT = 32, TOKENS_MAX = SPK_BATCH_TOKENS_MAX };

/* One pass over the tokens. */
typedef struct {
    uint32_t  layer_count, token_count, hidden, used, expert_count;
    float    *out;             /* [layer][token][hidden] */
    uint32_t *choice;          /* [layer][token][used] */
    const float *forced;       /* the reference's out, or NULL */
} pass;

static void *must(void *memory) {
    if (memory != NULL) return memory;
    fprintf(stderr, "gpu_layers: out of memory\n");
    exit(1);
}
static void must_work(spk_status status, const spk_error *err) {
    if (status == SPK_OK) return;
    printf("FAIL gpu_layers: %s\n", err->text);
    exit(1);
}

static pass pass_new(const spk_model *m, uint32_t token_count, const float *forced) {
    const spk_model_config *c = &m->config;
    pass p = { c->layer_count, token_count, c->hidden_size, c->expert_used_count, c->expert_count, NULL, NULL, forced };
    p.out = must(calloc((size_t)p.layer_count * token_count * p.hidden, sizeof *p.out));
    p.choice = must(calloc((size_t)p.layer_count * token_count * p.used + 1, sizeof *p.choice));
    return p;
}
static void pass_free(pass *p) { free(p->out), free(p->choice); }
static float *out_at(const pass *p, uint32_t layer, uint32_t token) {
    return p->out + ((uint64_t)layer * p->token_count + token) * p->hidden;
}
static uint32_t *choice_at(const pass *p, uint32_t layer, uint32_t token) {
    return p->choice + ((uint64_t)layer * p->token_count + token) * p->used;
}

/* ---- The CPU ---- */

static void observe(spk_session *session, uint32_t layer, uint32_t token_count, void *context) {
    pass *p = context;
    for (uint32_t t = 0; t < token_count; t++) {
        float *x = session->s.x + (uint64_t)t * p->hidden, *delta = session->s.delta + (uint64_t)t * p->hidden,
              *out = out_at(p, layer, t);
        for (uint32_t i = 0; i < p->hidden; i++) out[i] = x[i] + delta[i];
        memcpy(choice_at(p, layer, t), session->s.expert + (uint64_t)t * p->used, p->used * sizeof(uint32_t));
        if (p->forced == NULL) continue;
        memcpy(x, p->forced + (out - p->out), p->hidden * sizeof *x);
        memset(delta, 0, p->hidden * sizeof *delta);
    }
}

/* All tokens as one batch.  The reference's pass (forced is NULL) chooses them, and gives the layers' first inputs
 * [token][hidden] in *embedding. */
static spk_status run_cpu(const char *path, spk_backend backend, uint32_t *tokens, uint32_t token_count,
                          const float *forced, pass *out, float **embedding, spk_error *err) {
    spk_model *model;
    spk_session *session;
    const spk_model_options mo = { .backend = backend };
    const spk_session_options so = { .context_tokens = token_count, .batch_tokens = token_count };
    SPK_TRY(spk_model_open(path, &mo, &model, err));
    must_work(spk_session_create(model, &so, &session, err), err);
    *out = pass_new(model, token_count, forced);
    if (forced == NULL) {
        uint64_t random = 1;
        *embedding = must(malloc((size_t)token_count * out->hidden * sizeof **embedding));
        for (uint32_t t = 0; t < token_count; t++) {
            tokens[t] = (uint32_t)(check_random(&random) % spk_model_vocab_size(model));
            spk_layout_dequantize_row(&model->embedding, tokens[t], *embedding + (uint64_t)t * out->hidden);
        }
    }
    session->observe = observe;
    session->observe_context = out;
    must_work(spk_session_eval(session, tokens, token_count, SPK_LOGITS_NONE, NULL, err), err);
    spk_session_destroy(session);
    spk_model_close(model);
    return SPK_OK;
}

/* ---- The GPU ---- */

/* On the device. */
typedef struct {
    const pass *p;
    float      *outputs;        /* [layer][hidden]: the residual stream after each layer */
    float      *inputs;         /* [layer][hidden]: what the next layer gets instead */
    float      *zeros;          /* [hidden] */
    float      *weight;         /* [used] */
    uint32_t   *choice;         /* [layer][used] */
} trace;

static void *device_memory(spk_gpu_session *g, uint64_t size_bytes) {
    spk_error err = { 0 };
    void *d_memory = NULL;
    must_work(spk_cuda_allocate(g->cuda, size_bytes, "layer outputs", &d_memory, &err), &err);
    return d_memory;
}

/* While a step is recorded: keep the layer's output and choice, and give the next layer its input. */
static void record_trace(spk_gpu_session *g, uint32_t layer, float *x, const float *const pending[3], void *context) {
    const trace *t = context;
    const spk_model_config *c = &g->model->config;
    const uint64_t at = (uint64_t)layer * c->hidden_size;
    const spk_cuda_elementwise sum = { .op = SPK_CUDA_ADD,
                                       .a = x,
                                       .b = pending[0] != NULL ? pending[0] : t->zeros,
                                       .c = pending[1],
                                       .d = pending[2],
                                       .out = t->outputs + at,
                                       .count = c->hidden_size };
    const spk_cuda_elementwise copy = {
        .op = SPK_CUDA_ADD, .a = t->inputs + at, .b = t->zeros, .out = x, .count = c->hidden_size
    };
    spk_cuda_launch_elementwise(g->cuda, &sum);
    spk_cuda_launch_elementwise(g->cuda, &copy);
    if (c->expert_count == 0) return;
    const spk_cuda_top_k top = { .routing = { .sums = g->router_sums + spk_cuda_router_words(layer * spk_router_places(c)),
                                              .squares = g->router_squares,
                                              .expert_count = c->expert_count,
                                              .used_count = c->expert_used_count,
                                              .column_count = c->hidden_size,
                                              .eps = c->rms_eps },
                                 .choice = t->choice + (uint64_t)layer * c->expert_used_count,
                                 .weight = t->weight };
    spk_cuda_launch_top_k(g->cuda, &top);
}

/* The session's step once more, traced. */
static trace trace_begin(spk_gpu_session *g, const pass *p) {
    const uint64_t vectors_bytes = (uint64_t)p->layer_count * p->hidden * sizeof(float);
    return (trace){ p,
                    device_memory(g, vectors_bytes),
                    device_memory(g, vectors_bytes),
                    device_memory(g, p->hidden * sizeof(float)),
                    device_memory(g, (p->used + 1) * sizeof(float)),
                    device_memory(g, ((uint64_t)p->layer_count * p->used + 1) * sizeof(uint32_t)) };
}
static void trace_record(spk_gpu_session *g, trace *t, spk_error *err) {
    g->observe = record_trace;
    g->observe_context = t;
    spk_cuda_step_free(g->step);
    g->step = NULL;
    must_work(spk_gpu_record(g, false, &g->step, err), err);
}
static void trace_end(spk_gpu_session *g, const trace *t) {
    void *memory[] = { t->outputs, t->inputs, t->zeros, t->weight, t->choice };
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) spk_cuda_free(g->cuda, memory[i]);
}

/* One token: the reference's layer outputs in, the GPU's out. */
static void trace_token(spk_session *session, const trace *t, pass *p, uint32_t token, uint32_t index, spk_error *err) {
    spk_cuda *cuda = session->gpu->cuda;
    const uint64_t vector_bytes = p->hidden * sizeof(float), choice_bytes = p->used * sizeof(uint32_t);
    for (uint32_t i = 0; i < p->layer_count; i++) {
        const float *input = p->forced + (out_at(p, i, index) - p->out);
        must_work(spk_cuda_upload(cuda, t->inputs + (uint64_t)i * p->hidden, input, vector_bytes, err), err);
    }
    must_work(spk_session_eval(session, &token, 1, SPK_LOGITS_NONE, NULL, err), err);
    for (uint32_t i = 0; i < p->layer_count; i++) {
        must_work(spk_cuda_download(cuda, out_at(p, i, index), t->outputs + (uint64_t)i * p->hidden, vector_bytes, err),
                  err);
        if (p->used == 0) continue;
        must_work(spk_cuda_download(cuda, choice_at(p, i, index), t->choice + (uint64_t)i * p->used, choice_bytes, err),
                  err);
    }
}

static spk_status run_gpu(const char *path, const uint32_t *tokens, uint32_t token_count, const float *forced, pass *p,
                          spk_error *err) {
    spk_model *model;
    spk_session *session;
    const spk_model_options mo = { .backend = SPK_BACKEND_CUDA };
    const spk_session_options so = { .context_tokens = token_count };
    SPK_TRY(spk_model_open(path, &mo, &model, err));
    must_work(spk_session_create(model, &so, &session, err), err);
    *p = pass_new(model, token_count, forced);
    trace t = trace_begin(session->gpu, p);
    trace_record(session->gpu, &t, err);
    for (uint32_t i = 0; i < token_count; i++) trace_token(session, &t, p, tokens[i], i, err);
    trace_end(session->gpu, &t);
    spk_session_destroy(session);
    spk_model_close(model);
    return SPK_OK;
}

/* ---- Comparison ---- */

typedef struct { double worst, mean; uint32_t same_count; } layer_report;

static int by_id(const void *a, const void *b) {
    return (*(const uint32_t *)a > *(const uint32_t *)b) - (*(const uint32_t *)a < *(const uint32_t *)b);
}
static bool same_experts(const pass *a, const pass *b, uint32_t layer, uint32_t token) {
    uint32_t x[SPK_EXPERT_USED_COUNT_MAX], y[SPK_EXPERT_USED_COUNT_MAX];
    memcpy(x, choice_at(a, layer, token), a->used * sizeof *x);
    memcpy(y, choice_at(b, layer, token), a->used * sizeof *y);
    qsort(x, a->used, sizeof *x, by_id);
    qsort(y, a->used, sizeof *y, by_id);
    return memcmp(x, y, a->used * sizeof *x) == 0;
}

static layer_report compare_layer(const pass *ref, const pass *other, const float *embedding, uint32_t layer) {
    layer_report r = { 0 };
    for (uint32_t t = 0; t < ref->token_count; t++) {
        if (!same_experts(ref, other, layer, t)) continue;
        const float *before = layer == 0 ? embedding + (uint64_t)t * ref->hidden : out_at(ref, layer - 1, t),
                    *want = out_at(ref, layer, t), *got = out_at(other, layer, t);
        double off = 0, change = 0;
        for (uint32_t i = 0; i < ref->hidden; i++) {
            off += ((double)got[i] - (double)want[i]) * ((double)got[i] - (double)want[i]);
            change += ((double)want[i] - (double)before[i]) * ((double)want[i] - (double)before[i]);
        }
        double relative = change > 0 ? sqrt(off / change) : off > 0 ? INFINITY : 0;
        if (!(relative <= r.worst)) r.worst = relative;       /* NaN stays */
        r.mean += relative;
        r.same_count++;
    }
    if (r.same_count > 0) r.mean /= r.same_count;
    return r;
}

/* Experts that a pass reached: of a layer, or (layer UINT32_MAX) of any. */
static uint32_t experts_reached(const pass *p, uint32_t layer) {
    uint32_t count = 0;
    uint8_t *is_reached = must(calloc(p->expert_count + 1, 1));
    for (uint32_t i = 0; i < p->layer_count; i++)
        for (uint64_t j = 0; (layer == UINT32_MAX || layer == i) && j < (uint64_t)p->token_count * p->used; j++)
            is_reached[choice_at(p, i, 0)[j]] = 1;
    for (uint32_t e = 0; e < p->expert_count; e++) count += is_reached[e];
    free(is_reached);
    return count;
}

static void judge(const pass *ref, const pass *cpu, const pass *gpu, const float *embedding) {
    double yardstick = 0, worst = 0;
    uint32_t same = 0, least_reached = UINT32_MAX, total = ref->layer_count * ref->token_count;
    printf("layer,gpu_worst,gpu_mean,cpu_worst,cpu_mean,gpu_same_choices,cpu_same_choices,experts_reached\n");
    for (uint32_t i = 0; i < ref->layer_count; i++) {
        const layer_report c = compare_layer(ref, cpu, embedding, i), g = compare_layer(ref, gpu, embedding, i);
        const uint32_t reached = experts_reached(gpu, i);
        printf("%u,%.5f,%.5f,%.5f,%.5f,%u,%u,%u\n", i, g.worst, g.mean, c.worst, c.mean, g.same_count, c.same_count,
               reached);
        yardstick = fmax(yardstick, c.worst);
        if (!(g.worst <= worst)) worst = g.worst;
        same += g.same_count;
        if (reached < least_reached) least_reached = reached;
    }
    printf("worst layer: gpu %.5f, cpu %.5f; %u of %u choices as the reference's; experts reached: %u of %u, in every "
           "layer %u or more\n",
           worst, yardstick, same, total, experts_reached(gpu, UINT32_MAX), ref->expert_count, least_reached);
    CHECK(worst <= 1.5 * yardstick, "the GPU is off by %.5f, the CPU's int8 path by %.5f", worst, yardstick);
    CHECK(2 * same >= total, "only %u of %u choices are the reference's", same, total);
    CHECK(experts_reached(gpu, UINT32_MAX) == ref->expert_count, "%u of %u experts reached: give more tokens",
          experts_reached(gpu, UINT32_MAX), ref->expert_count);
}

static void check_model(const char *path, uint32_t token_count) {
    spk_error err = { 0 };
    uint32_t tokens[TOKENS_MAX];
    pass ref, cpu, gpu;
    float *embedding = NULL;
    int before = check_failures;
    must_work(run_cpu(path, SPK_BACKEND_REF, tokens, token_count, NULL, &ref, &embedding, &err), &err);
    spk_status status = run_cpu(path, SPK_BACKEND_CPU, tokens, token_count, ref.out, &cpu, NULL, &err);
    if (status == SPK_OK) {
        status = run_gpu(path, tokens, token_count, ref.out, &gpu, &err);
        if (status == SPK_OK) {
            printf("# %s\n", path);
            judge(&ref, &cpu, &gpu, embedding);
            printf("%-4s gpu_layers\n", check_failures == before ? "ok" : "FAIL");
            pass_free(&gpu);
        }
        pass_free(&cpu);
    }
    if (status == SPK_E_UNSUPPORTED) SKIP(err.text);
    else must_work(status, &err);
    pass_free(&ref);
    free(embedding);
}

int main(int argc, char **argv) {
    static const char *const small_models[] = { "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf",
                                                "tests/models/tiny-qwen3moe-q4_k_m.gguf",
                                                "tests/models/tiny-qwen35-q4_k_m.gguf" };
    uint32_t token_count = argc == 3 ? (uint32_t)strtoul(argv[2], NULL, 10) : TOKENS_DEFAULT;
    if (argc > 3 || token_count == 0 || token_count > TOKENS_MAX) {
        fprintf(stderr, "usage: gpu_layers [MODEL [tokens, at most %d]]\n", (int)TOKENS_MAX);
        return 2;
    }
    if (argc > 1) check_model(argv[1], token_count);
    for (size_t i = 0; argc == 1 && i < sizeof small_models / sizeof *small_models; i++)
        check_model(small_models[i], token_count);
    return CHECK_EXIT();
}
