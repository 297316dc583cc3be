/* tests/host_device.h - kernels/cuda.h on the host, one launch after another, to test what uses it without a GPU.
 *
 * Written from the contracts in cuda.h, with the GPU's kinds of rounding (floats, int8 codes) and none of its speed.  What a
 * signal lets a kernel read early (the routing of experts_down) is read the moment the signal is given or, with host_reads_late, when the kernel's turn comes; both happen on a GPU.  A step whose kernel would wait forever,
 * or would find a signal that is set already, fails.  host_fault plants one mistake, of the kinds that kernels have had.
 */
#ifndef SPK_HOST_DEVICE_H
#define SPK_HOST_DEVICE_H

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "kernels/cuda.h"
#include "kernels/kernels.h"
#include "tests/attention_parts.h"

typedef enum {
    FAULT_NONE,
    FAULT_LAST_ROW,             /* the last row of a matrix is left out */
    FAULT_PAST_THE_END,         /* one float written past an output */
    FAULT_ONE_WEIGHT,           /* one weight of a row is read as its neighbour */
    FAULT_NO_REST,              /* the second int8 vector is forgotten */
    FAULT_COARSE_CODES,         /* codes of 7 bits */
    FAULT_NORM_LENGTH,          /* RMSNorm over one value too few */
    FAULT_THIRD_ADD,            /* the third add is left out */
    FAULT_X_OUT,                /* x_out after the norm instead of before */
    FAULT_NORMS_TWICE,          /* x_out written over the input */
    FAULT_GREEDY_TIE,           /* the last of equal rows wins */
    FAULT_COUNTER,              /* a counter that does not wrap */
    FAULT_GIVEN_TOKEN,          /* a given token is overwritten */
    FAULT_DIFFERS,              /* not the same bits twice */
    FAULT_SLOW_ORDER,           /* fused and plain norms add in different orders */
    FAULT_EMBED_TOKEN,          /* the row of the next token */
    FAULT_ANGLE,                /* angle of the next position */
    FAULT_HEAD_MAP,             /* V head j uses K head j / ratio */
    FAULT_RING_SLOT,            /* u goes to the slot after its own */
    FAULT_STATE_ROW,            /* the last row of a state is not written */
    FAULT_BETA,                 /* delta without its write strength */
    FAULT_Z_ROW,                /* gate of the next head */
    FAULT_SQUARES,              /* squares of the next 32 */
    FAULT_HEAD_FACTOR,          /* every head has the first one's factor */
    FAULT_RESIDUAL,             /* the residual is left out */
    FAULT_SUM,                  /* the shared expert is left out of the sum */
    FAULT_SUM_AND_PARTS,        /* the parts are written beside the sum */
    FAULT_ATTEND_LAST,          /* the new position is not attended to */
    FAULT_ATTEND_TAIL,          /* one position too many */
    FAULT_ROPE,                 /* rotation by the wrong sign */
    FAULT_CACHE_ROW,            /* the new row is stored one position late */
    FAULT_PART_BORDER,          /* the second of attention's parts begins one position late */
    FAULT_PART_TOP,             /* a part's total goes with the largest score of the part before */
    FAULT_LAST_PART,            /* the last of four is forgotten where they are merged */
    FAULT_PART_TOTALS,          /* parts count by their totals alone */
    FAULT_TIE_ORDER,            /* equal logits: the higher index first */
    FAULT_NOT_CLEARED,          /* sums of routers are not cleared */
    FAULT_CLEARED_SHORT,        /* but for the last 16 rows' */
    FAULT_ROUTER_PLACE,         /* row i's sum is the i-th, on both sides */
    FAULT_ROUTER_NORM,          /* weights without the norm's */
    FAULT_ROUTER_SHARED_ROW,    /* the shared expert's row is an expert's */
    FAULT_ROUTER_LAYER,         /* weights of the first layer, in all layers */
    FAULT_ROUTER_LAST_GROUP,    /* the last 16 columns are left out */
    FAULT_ROUTER_CLAMP,         /* contributions up to 2^21 */
    FAULT_ROUTER_NAN,           /* a NaN contributes nothing */
    FAULT_ROUTER_ROUNDING,      /* contributions are rounded down */
    FAULT_ROUTER_ORDER,         /* a projection adds in another order */
    FAULT_ROUTER_FOLDED,        /* a projection adds to no router */
    FAULT_ROUTER_SQUARES,       /* squares of the next 16 values */
    FAULT_ROUTER_PAST_THE_END,  /* one sum more */
    FAULT_ROUTER_SCALE,         /* logits without 1 / rms */
    FAULT_ROUTER_EXACT,         /* sums are compared as integers */
    FAULT_WEIGHTS,              /* softmax over all experts instead of the chosen */
    FAULT_EXPERT_STRIDE,        /* up of the expert before */
    FAULT_SECOND_PART,          /* the last rank of the second part is left out */
    FAULT_SHARED_GATE,          /* the shared expert without its sigmoid */
    FAULT_SHARED_PLACE,         /* its logit is the expert_count-th word */
    FAULT_SHARED_UP,            /* its up is its gate */
    FAULT_SHARED_H,             /* it is made by the streaming kernel alone */
    FAULT_DOWN_BY_CHOICE,       /* by choice, weights are taken as if all were equal */
    FAULT_HELD_TIES,            /* FAULT_TIE_ORDER in expert kernels, but not streamed */
    FAULT_STREAMED_TIES,        /* streamed only */
    FAULT_DOWN_TIES,            /* in experts_down only: not the experts that h is of */
    FAULT_DOWN_RANK,            /* by logits, a rank of experts_down has the weight of the next */
    FAULT_ROUTED_EARLY,         /* routed_ready given before the kernel's wait: the logits are not complete */
    FAULT_NO_AWAIT,             /* experts_down routes as soon as the step has begun */
    FAULT_STALE_SIGNAL,         /* and where the step before has given its signal */
    FAULT_NO_ROUTED_SIGNAL,     /* routed_ready is not given */
    FAULT_STEP,                 /* a greedy end does not count its step */
    FAULT_COUNT
} host_fault_kind;
static host_fault_kind host_fault = FAULT_NONE;
static bool has_fault(host_fault_kind fault) { return host_fault == fault; }

/* ---- Device and steps ---- */

typedef union {
    spk_cuda_embed embed;
    uint32_t *d_step;
    spk_cuda_gemv gemv;
    spk_cuda_gdn gdn;
    spk_cuda_attention attention;
    spk_cuda_experts_up up;
    spk_cuda_top_k top_k;
    spk_cuda_router_source router_source;
    struct { spk_cuda_router router; const float *x; } router;
    spk_cuda_experts_down down; spk_cuda_elementwise elementwise; spk_cuda_norm norm;
} launch_args;
typedef struct { float *v, *codes; float factor; uint32_t count; } host_vector;

typedef struct recorded {
    void (*run)(const launch_args *a);
    void (*read)(struct recorded *launch);           /* what `awaited` vouches for; NULL: run reads all */
    spk_cuda_signal     awaited;
    launch_args         args;
    spk_cuda_sequence   sequence;
    spk_cuda_gdn_fusion fusion;
    bool                is_read;                     /* in this replay */
    uint32_t            choice[64];                  /* what was read */
    float               weight[64];
} recorded;
enum { LAUNCHES_MAX = 1024 };
struct spk_cuda_step { recorded launches[LAUNCHES_MAX]; uint32_t count; };
struct spk_cuda { spk_cuda_step *open; uint32_t launch_count, launch_limit; recorded left_out; };
static uint32_t host_run_count;             /* of steps: FAULT_DIFFERS */

spk_status spk_cuda_open(spk_cuda **out, spk_error *err) {
    (void)err;
    *out = calloc(1, sizeof **out);
    return *out != NULL ? SPK_OK : SPK_E_MEMORY;
}
void spk_cuda_close(spk_cuda *cuda) { free(cuda); }
uint32_t spk_cuda_sm_count(const spk_cuda *cuda) { (void)cuda; return 4; }
spk_status spk_cuda_allocate(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **d_out, spk_error *err) {
    (void)cuda, (void)what, (void)err;
    *d_out = calloc(1, size_bytes);
    return *d_out != NULL ? SPK_OK : SPK_E_MEMORY;
}
spk_status spk_cuda_allocate_raw(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **d_out, spk_error *err) {
    return spk_cuda_allocate(cuda, size_bytes, what, d_out, err);
}
void spk_cuda_free(spk_cuda *cuda, void *d_memory) { (void)cuda; free(d_memory); }
spk_status spk_cuda_upload(spk_cuda *cuda, void *d_to, const void *from, uint64_t size_bytes, spk_error *err) {
    (void)cuda, (void)err;
    memcpy(d_to, from, size_bytes);
    return SPK_OK;
}
spk_status spk_cuda_download(spk_cuda *cuda, void *to, const void *d_from, uint64_t size_bytes, spk_error *err) {
    (void)cuda, (void)err;
    memcpy(to, d_from, size_bytes);
    return SPK_OK;
}
static bool host_pin(void *context, const void *memory, uint64_t size_bytes, bool is_host_writing) {
    (void)context, (void)memory, (void)size_bytes, (void)is_host_writing;
    return false;
}
static void host_unpin(void *context, const void *memory) { (void)context, (void)memory; }
static spk_status host_start(void *context, uint32_t slot, void *d_to, const void *from, uint64_t size_bytes,
                             spk_error *err) {
    (void)context, (void)slot, (void)err;
    memcpy(d_to, from, size_bytes);
    return SPK_OK;
}
static spk_status host_finish(void *context, uint32_t slot, spk_error *err) {
    (void)context, (void)slot, (void)err;
    return SPK_OK;
}
static void host_close(void *context) { (void)context; }
spk_status spk_cuda_transfer_open(spk_cuda *cuda, uint32_t slot_count, uint32_t stream_count, spk_transfer *out,
                                  spk_error *err) {
    (void)cuda, (void)slot_count, (void)stream_count, (void)err;
    *out = (spk_transfer){ NULL, host_pin, host_unpin, host_start, host_finish, host_close };
    return SPK_OK;
}
spk_status spk_cuda_fill(spk_cuda *cuda, void *d_memory, uint8_t byte, uint64_t size_bytes, spk_error *err) {
    (void)cuda, (void)err;
    memset(d_memory, byte, size_bytes);
    return SPK_OK;
}
spk_status spk_cuda_wait(spk_cuda *cuda, spk_error *err) { (void)cuda, (void)err; return SPK_OK; }
spk_status spk_cuda_is_idle(spk_cuda *cuda, bool *idle, spk_error *err) {
    (void)cuda, (void)err;
    *idle = true;
    return SPK_OK;
}
spk_status spk_cuda_share(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **out, void **d_out, spk_error *err) {
    SPK_TRY(spk_cuda_allocate(cuda, size_bytes, what, out, err));
    *d_out = *out;
    return SPK_OK;
}
void spk_cuda_unshare(spk_cuda *cuda, void *memory) { (void)cuda; free(memory); }
spk_status spk_cuda_describe(spk_cuda *cuda, spk_cuda_description *out, spk_error *err) {
    (void)cuda, (void)err;
    *out = (spk_cuda_description){ .name = "host" };
    return SPK_OK;
}
spk_status spk_cuda_memory(spk_cuda *cuda, uint64_t *out_free_bytes, uint64_t *out_total_bytes, spk_error *err) {
    (void)cuda, (void)err;
    *out_free_bytes = *out_total_bytes = 0;
    return SPK_OK;
}
spk_status spk_cuda_read_bandwidth(spk_cuda *cuda, uint64_t max_bytes, uint32_t pass_count, spk_cuda_bandwidth *out,
                                   spk_error *err) {
    (void)cuda, (void)max_bytes, (void)pass_count, (void)out;
    return spk_fail(err, SPK_E_UNSUPPORTED, "not measured on the host");
}
spk_status spk_cuda_step_begin(spk_cuda *cuda, spk_error *err) { return spk_cuda_step_begin_part(cuda, UINT32_MAX, err); }
uint32_t spk_cuda_launch_count(const spk_cuda *cuda) { return cuda->launch_count; }
spk_status spk_cuda_step_begin_part(spk_cuda *cuda, uint32_t kernel_limit, spk_error *err) {
    (void)err;
    cuda->launch_count = 0;
    cuda->launch_limit = kernel_limit;
    cuda->open = calloc(1, sizeof *cuda->open);
    return cuda->open != NULL ? SPK_OK : SPK_E_MEMORY;
}
spk_status spk_cuda_step_end(spk_cuda *cuda, spk_cuda_step **out, spk_error *err) {
    if (cuda->open->count > LAUNCHES_MAX) return spk_fail(err, SPK_E_LIMIT, "too many launches");
    *out = cuda->open;
    cuda->open = NULL;
    return SPK_OK;
}
void spk_cuda_step_free(spk_cuda_step *step) { free(step); }

/* ---- Running, and signals ---- */

static bool host_reads_late;
static spk_cuda_step  *running_step;
static const recorded *running;             /* the launch that runs */
static bool            is_given_twice;      /* a signal of this replay */

static bool is_given(const spk_cuda_signal *s) { return s->d_flag != NULL && *s->d_flag == *s->d_step + 1; }
static void host_read(recorded *r) {
    if (r->read != NULL && !r->is_read) r->read(r);
    r->is_read = true;
}
/* All kernels that await it may have started: each waits only for what it has asked for. */
static void host_give(const spk_cuda_signal *s) {
    if (s->d_flag == NULL) return;
    if (is_given(s)) is_given_twice = true;
    *s->d_flag = *s->d_step + 1;
    for (uint32_t i = 0; i < running_step->count && !host_reads_late; i++)
        if (running_step->launches[i].awaited.d_flag == s->d_flag) host_read(&running_step->launches[i]);
}
static void start_too_early(spk_cuda_step *step);

static spk_status replay(spk_cuda_step *step, spk_error *err) {
    running_step = step;
    is_given_twice = false;
    for (uint32_t i = 0; i < step->count; i++) {
        step->launches[i].is_read = false;
        if (is_given(&step->launches[i].awaited))
            return spk_fail(err, SPK_E_MISMATCH, "launch %u would find its signal set before the step", i);
    }
    start_too_early(step);
    for (uint32_t i = 0; i < step->count; i++) {
        recorded *r = &step->launches[i];
        if (r->awaited.d_flag != NULL && !is_given(&r->awaited))
            return spk_fail(err, SPK_E_MISSING, "launch %u would wait forever for its signal", i);
        host_read(r);
        running = r;
        r->run(&r->args);
        if (is_given_twice) return spk_fail(err, SPK_E_MISMATCH, "launch %u gives a signal that was set before", i);
    }
    return SPK_OK;
}
spk_status spk_cuda_step_run(spk_cuda *cuda, const spk_cuda_step *step, uint32_t count, spk_error *err) {
    (void)cuda;
    for (uint32_t n = 0; n < count; n++) SPK_TRY(replay((spk_cuda_step *)(uintptr_t)step, err));
    host_run_count++;
    return SPK_OK;
}
static recorded *record(spk_cuda *cuda, void (*run)(const launch_args *)) {
    recorded *r = cuda->launch_count++ < cuda->launch_limit ? &cuda->open->launches[cuda->open->count++ % LAUNCHES_MAX] : &cuda->left_out;
    r->run = run;
    return r;
}
static void host_tick(const launch_args *args) { ++*args->d_step; }
void spk_cuda_launch_tick(spk_cuda *cuda, uint32_t *d_step) {
    const uint32_t limit = cuda->launch_limit;
    cuda->launch_limit = UINT32_MAX;
    record(cuda, host_tick)->args.d_step = d_step;
    cuda->launch_limit = limit;
}
bool spk_cuda_accepts(const spk_matrix *w) { return w->col_count % 32 == 0; }

/* ---- Vectors and rows ---- */

static float host_sigmoid(float t) { return 1.0f / (1.0f + expf(-t)); }
static float host_silu(float t) { return t / (1.0f + expf(-t)); }

/* 1/rms of n floats, added by 32 lanes; in reverse where asked. */
static float host_rms(const float *x, uint32_t n, float eps, bool is_reverse) {
    float lanes[32] = { 0 }, sum = 0;
    uint32_t counted = has_fault(FAULT_NORM_LENGTH) ? n - 1 : n;
    for (uint32_t i = 0; i < counted; i++) lanes[i % 32] += x[is_reverse ? n - 1 - i : i] * x[is_reverse ? n - 1 - i : i];
    for (int i = 0; i < 32; i++) sum += lanes[i];
    return 1.0f / sqrtf(sum / (float)n + eps);
}

static void host_vector_free(host_vector *x) { free(x->v), free(x->codes); }
/* codes: what int8 makes of v. */
static void host_quantize(host_vector *x, bool has_rest) {
    float steps = has_fault(FAULT_COARSE_CODES) ? 63.0f : 127.0f;
    for (uint32_t g = 0; g < x->count; g += 32) {
        float top = 0;
        for (uint32_t i = g; i < g + 32; i++) top = fmaxf(top, fabsf(x->v[i]));
        bool is_zero = !(top >= 1e-30f);
        float scale = is_zero ? 0 : top * (1.0f / steps), inverse = is_zero ? 0 : steps / top;
        for (uint32_t i = g; i < g + 32; i++) {
            float q = rintf(x->v[i] * inverse),
                  left = has_rest && !has_fault(FAULT_NO_REST) ? rintf((x->v[i] - scale * q) * inverse * 254.0f) : 0;
            x->codes[i] = scale * (1.0f / 254.0f) * (254.0f * q + left);
        }
    }
}

/* Value i of a source that may come in parts. */
static float host_merged(const spk_cuda_source *s, uint32_t i) {
    uint32_t part_count = s->part_totals != NULL ? attention_part_count(*s->d_position) : 1, head_count;
    if (part_count == 1) return s->x[i];
    double weight[SPK_CUDA_PARTS_MAX];
    float totals[SPK_CUDA_PARTS_MAX * 2];
    head_count = s->count / s->head_dim;
    for (uint32_t p = 0; p < part_count; p++) {
        const float *own = s->part_totals + 2 * (p * head_count + i / s->head_dim);
        totals[2 * p] = has_fault(FAULT_PART_TOTALS) ? 0 : own[0];
        totals[2 * p + 1] = has_fault(FAULT_LAST_PART) && p == 3 ? 0 : own[1];
    }
    attention_part_weights(totals, 1, 0, part_count, weight);
    return (float)attention_merged(s->x, s->count, i, part_count, weight);
}

/* A norm's factor is left to the products; x_out is written. */
static host_vector host_source(const spk_cuda_source *s, bool is_norm_kernel) {
    host_vector x = { malloc(s->count * sizeof(float)), malloc(s->count * sizeof(float)),
                      s->factor != NULL ? *s->factor : 1.0f, s->count };
    for (uint32_t i = 0; i < s->count; i++) {
        x.v[i] = host_merged(s, i);
        for (int a = 0; a < 3; a++)
            if (s->add[a] != NULL && !(a == 2 && has_fault(FAULT_THIRD_ADD))) x.v[i] += s->add[a][i];
    }
    if (s->x_out != NULL)
        memcpy(has_fault(FAULT_NORMS_TWICE) ? (float *)(uintptr_t)s->x : s->x_out, x.v, s->count * sizeof(float));
    if (s->squares != NULL) {
        for (uint32_t h = 0; h < s->count; h += s->head_dim) {
            float sum = 0;
            for (uint32_t i = 0; i < s->head_dim / 32; i++)
                sum += s->squares[(has_fault(FAULT_HEAD_FACTOR) ? 0 : h / 32) + i];
            float factor = 1.0f / sqrtf(sum / (float)s->head_dim + s->eps);
            for (uint32_t i = h; i < h + s->head_dim; i++) x.v[i] *= factor;
        }
    } else if (s->norm_weight != NULL) {
        x.factor = host_rms(x.v, s->count, s->eps, is_norm_kernel && has_fault(FAULT_SLOW_ORDER));
        for (uint32_t i = 0; i < s->count; i++) x.v[i] *= s->norm_weight[i];
        if (s->x_out != NULL && has_fault(FAULT_X_OUT)) memcpy(s->x_out, x.v, s->count * sizeof(float));
    }
    host_quantize(&x, s->has_rest);
    return x;
}

/* Floats by 32 lanes; tiles in exact groups of 16, added in float within a super-block. */
static float host_row(const spk_matrix *w, uint64_t row, const host_vector *x) {
    float weights[16384], lanes[32] = { 0 }, sum = 0;
    const bool is_tile = w->layout == SPK_LAYOUT_T32;
    double exact = 0, group;
    spk_layout_dequantize_row(w, row, weights);
    if (has_fault(FAULT_ONE_WEIGHT)) weights[w->col_count / 2] = weights[w->col_count / 2 + 1];
    for (uint64_t c = 0; !is_tile && c < w->col_count; c++) lanes[c / 8 % 32] += weights[c] * x->v[c];
    for (int i = 0; i < 32; i++) exact += (double)lanes[i];
    for (uint64_t c = 0; is_tile && c < w->col_count; c += 256, exact += (double)sum) {
        sum = 0;
        for (uint64_t g = c; g < c + 256; g += 16) {
            group = 0;
            for (uint64_t i = g; i < g + 16; i++) group += (double)weights[i] * (double)x->codes[i];
            sum += (float)group;
        }
    }
    return (float)exact * x->factor;
}
static void host_rows(const spk_matrix *w, const spk_matrix *up, const host_vector *x, const float *residual, float *y) {
    uint64_t rows = has_fault(FAULT_LAST_ROW) ? w->row_count - 1 : w->row_count;
    for (uint64_t r = 0; r < rows; r++) {
        float sum = host_row(w, r, x);
        if (up->data != NULL) sum = host_silu(sum) * host_row(up, r, x);
        y[r] = residual != NULL && !has_fault(FAULT_RESIDUAL) ? sum + residual[r] : sum;
    }
    if (has_fault(FAULT_PAST_THE_END)) y[w->row_count] = 1;
    if (has_fault(FAULT_DIFFERS) && host_run_count % 2 == 1) y[0] = nextafterf(y[0], 2);
}

/* host_device_router.h */
static uint32_t host_place(uint32_t row);
static void note_router(const spk_cuda_router *router);
static void host_router(const spk_cuda_router *router, const float *x, bool is_folded);
static float host_shared_weight(const spk_cuda_routing *routing);
static bool is_higher_first(bool is_streamed);
static void host_route(const spk_cuda_routing *routing, bool is_higher_first, uint32_t *choice, float *weight);

/* ---- GEMV, norm, elementwise, embedding ---- */

static void run_gemv(const launch_args *args) {
    const spk_cuda_gemv *g = &args->gemv;
    host_vector x = host_source(&g->source, false);
    for (uint32_t i = 0; i < g->segment_count; i++)          /* as the GPU's launch asserts */
        assert(g->segments[i].up.data == NULL || g->segments[i].up.type == g->segments[i].w.type);
    for (uint32_t i = 0; i < g->segment_count; i++)
        host_rows(&g->segments[i].w, &g->segments[i].up, &x, g->segments[i].residual, g->segments[i].y);
    host_vector_free(&x);
    if (g->router.sums != NULL && !has_fault(FAULT_ROUTER_FOLDED)) host_router(&g->router, g->segments[0].y, true);
    if (g->greedy == NULL) return;
    const spk_cuda_sequence *q = &running->sequence;
    const float *y = g->segments[0].y;
    uint32_t best = 0, position = *q->d_position + 1;
    for (uint32_t r = 1; r < g->segments[0].w.row_count; r++)
        if (y[r] > y[best] || (has_fault(FAULT_GREEDY_TIE) && y[r] == y[best])) best = r;
    if (has_fault(FAULT_COUNTER)) ++*g->d_arrivals;
    q->d_chosen[position] = best;
    if (q->d_tokens[position] == SPK_CUDA_TOKEN_FREE || has_fault(FAULT_GIVEN_TOKEN)) q->d_tokens[position] = best;
    *q->d_position = position;
    if (!has_fault(FAULT_STEP)) ++*q->d_step;
}
void spk_cuda_launch_gemv(spk_cuda *cuda, const spk_cuda_gemv *args) {
    recorded *r = record(cuda, run_gemv);
    r->args.gemv = *args;
    if (args->router.sums != NULL) note_router(&args->router);
    if (args->greedy != NULL) r->sequence = *args->greedy;
}

static void run_norm(const launch_args *args) {
    host_vector x = host_source(&args->norm.source, true);
    memcpy(args->norm.out, x.v, x.count * sizeof(float));
    *args->norm.factor = x.factor;
    host_vector_free(&x);
}
void spk_cuda_launch_norm(spk_cuda *cuda, const spk_cuda_norm *args) { record(cuda, run_norm)->args.norm = *args; }

static void run_elementwise(const launch_args *args) {
    const spk_cuda_elementwise *e = &args->elementwise;
    for (uint32_t i = 0; i < e->count; i++) {
        float a = e->a[i];
        if (e->op == SPK_CUDA_SWIGLU) a = host_silu(a) * e->b[i];
        if (e->op == SPK_CUDA_SHARED_SCALE) a = a * host_shared_weight(&e->routing);
        if (e->op == SPK_CUDA_ADD) {
            a += e->b[i];
            if (e->c != NULL) a += e->c[i];
            if (e->d != NULL && !has_fault(FAULT_THIRD_ADD)) a += e->d[i];
        }
        e->out[i] = a;
    }
}
void spk_cuda_launch_elementwise(spk_cuda *cuda, const spk_cuda_elementwise *args) {
    record(cuda, run_elementwise)->args.elementwise = *args;
}

static void run_embed(const launch_args *args) {
    const spk_cuda_embed *e = &args->embed;
    uint32_t position = *e->sequence.d_position, token = e->sequence.d_tokens[position];
    if (has_fault(FAULT_EMBED_TOKEN)) token = token == 0 ? 1 : token - 1;
    spk_layout_dequantize_row(&e->embedding, token, e->d_x);
    for (uint32_t i = 0; i < e->clear_count && !has_fault(FAULT_NOT_CLEARED); i++)
        if (i + 16 < e->clear_count || !has_fault(FAULT_CLEARED_SHORT)) e->d_clear[host_place(i)] = 0;
    for (uint32_t i = 0; i < e->rope_dim / 2; i++) {
        double turns = (position + (has_fault(FAULT_ANGLE) ? 1 : 0)) * e->d_turns[i],
               angle = 2 * acos(-1.0) * (turns - rint(turns));
        e->d_cos_sin[2 * i] = (float)cos(angle);
        e->d_cos_sin[2 * i + 1] = (float)sin(angle);
    }
}
void spk_cuda_launch_embed(spk_cuda *cuda, const spk_cuda_embed *args) { record(cuda, run_embed)->args.embed = *args; }

/* ---- Experts ---- */

static void run_experts_up(const launch_args *args) {
    const spk_cuda_experts_up *a = &args->up;
    uint32_t choice[64];
    float weight[64];
    if (!has_fault(FAULT_ROUTED_EARLY) && !has_fault(FAULT_NO_ROUTED_SIGNAL)) host_give(&a->routed_ready);
    host_route(&a->routing, is_higher_first(a->is_streamed), choice, weight);
    spk_cuda_source source = a->source;
    source.x_out = NULL;
    host_vector x = host_source(&source, false);
    if (a->shared_h != NULL && !(has_fault(FAULT_SHARED_H) && !a->is_streamed))
        host_rows(&a->shared_gate, has_fault(FAULT_SHARED_UP) ? &a->shared_gate : &a->shared_up, &x, NULL, a->shared_h);
    for (uint32_t r = 0; r < a->routing.used_count; r++) {
        spk_matrix gate = a->gate, up = a->up;
        uint32_t other = has_fault(FAULT_EXPERT_STRIDE) && choice[r] > 0 ? choice[r] - 1 : choice[r];
        gate.data += choice[r] * a->expert_stride_bytes;
        up.data += other * a->expert_stride_bytes;
        host_rows(&gate, &up, &x, NULL, a->h + r * gate.row_count);
    }
    host_vector_free(&x);
}
void spk_cuda_launch_experts_up(spk_cuda *cuda, const spk_cuda_experts_up *args) {
    record(cuda, run_experts_up)->args.up = *args;
}

uint32_t spk_cuda_experts_down_parts(const spk_cuda *cuda, const spk_matrix *down, uint32_t used_count) {
    (void)cuda;
    return used_count > 1 && down->row_count <= 256 ? 2 : 1;
}
static void read_down(recorded *r) {
    const spk_cuda_experts_down *a = &r->args.down;
    const uint32_t used = a->routing.used_count;
    host_route(&a->routing, is_higher_first(a->is_streamed) || has_fault(FAULT_DOWN_TIES), r->choice, r->weight);
    if (!has_fault(FAULT_DOWN_RANK) || a->routing.choice != NULL) return;
    const float first = r->weight[0];
    for (uint32_t i = 0; i < used; i++) r->weight[i] = i + 1 < used ? r->weight[i + 1] : first;
}
static void run_experts_down(const launch_args *args) {
    const spk_cuda_experts_down *a = &args->down;
    const uint32_t used = a->routing.used_count, parts = spk_cuda_experts_down_parts(NULL, &a->down, used);
    const spk_matrix none = { 0 };
    const uint32_t *choice = running->choice;
    const float *weight = running->weight;
    const uint64_t rows = a->down.row_count;
    float *y = calloc(rows + 1, sizeof *y), *routed[2] = { calloc(rows, sizeof *y), calloc(rows, sizeof *y) },
          *shared = calloc(rows, sizeof *y);
    for (uint32_t r = 0; r < used; r++) {
        const spk_cuda_source source = { .x = a->h + r * a->down.col_count,
                                         .count = (uint32_t)a->down.col_count,
                                         .has_rest = 1 };
        spk_matrix down = a->down;
        host_vector x = host_source(&source, false);
        down.data += choice[r] * a->expert_stride_bytes;
        host_rows(&down, &none, &x, NULL, y);
        for (uint64_t i = 0; i < down.row_count && !(has_fault(FAULT_SECOND_PART) && r + 1 == used && parts == 2); i++)
            routed[parts == 2 && r >= used / 2 ? 1 : 0][i] += weight[r] * y[i];
        host_vector_free(&x);
    }
    if (a->shared_down.data != NULL) {
        const spk_cuda_source source = { .x = a->shared_h, .count = (uint32_t)a->shared_down.col_count, .has_rest = 1 };
        host_vector x = host_source(&source, false);
        host_rows(&a->shared_down, &none, &x, NULL, y);
        for (uint64_t i = 0; i < rows; i++) shared[i] = y[i] * host_shared_weight(&a->routing);
        host_vector_free(&x);
    }
    const bool has_shared = a->shared_down.data != NULL;
    for (uint64_t i = 0; a->sum != NULL && i < rows; i++) {
        a->sum[i] = a->residual[i] + routed[0][i];
        if (has_shared && !has_fault(FAULT_SUM)) a->sum[i] += shared[i];
    }
    if (a->sum == NULL || has_fault(FAULT_SUM_AND_PARTS)) {
        for (uint32_t p = 0; p < parts; p++)
            memcpy(a->routed[p], routed[p], (has_fault(FAULT_LAST_ROW) ? rows - 1 : rows) * sizeof *y);
        if (has_shared) memcpy(a->shared, shared, rows * sizeof *y);
    }
    if (has_fault(FAULT_PAST_THE_END)) a->routed[0][rows] = 1;
    free(y), free(routed[0]), free(routed[1]), free(shared);
}
void spk_cuda_launch_experts_down(spk_cuda *cuda, const spk_cuda_experts_down *args) {
    recorded *r = record(cuda, run_experts_down);
    r->args.down = *args;
    r->read = read_down;
    r->awaited = args->routed_ready;
}

/* Before any kernel of the step has run: what faults do then. */
static void start_too_early(spk_cuda_step *step) {
    for (uint32_t i = 0; i < step->count; i++) {
        recorded *r = &step->launches[i];
        const spk_cuda_signal *s = &r->awaited;
        if (has_fault(FAULT_ROUTED_EARLY) && r->run == run_experts_up) host_give(&r->args.up.routed_ready);
        if (r->run != run_experts_down || s->d_flag == NULL) continue;
        const bool was_given = *s->d_step > 0 && *s->d_flag == *s->d_step;
        if (has_fault(FAULT_NO_AWAIT) || (has_fault(FAULT_STALE_SIGNAL) && was_given)) host_read(r);
    }
}

/* ---- Sampling: recorded by sessions, but no test here draws ---- */

static void run_sample(const launch_args *args) { (void)args; abort(); }
void spk_cuda_launch_sample(spk_cuda *cuda, const spk_cuda_sample *args) { (void)args; record(cuda, run_sample); }

#include "tests/host_device_router.h"
#include "tests/host_device_sequence.h"

#endif
