/* tests/checkkern_cuda_experts.h - routed experts on the GPU: gate and up, weighted down, and a whole layer with and without its
 * fusions.  Selection among ties is checkkern_cuda_router.h.
 *
 * Bounds beyond those of products and of checkkern_cuda_routing.h.  routed: a term for each rank, weight times product, in order:
 * (used + 3) u of the sum of sizes.
 */
#ifndef SPK_CHECKKERN_CUDA_EXPERTS_H
#define SPK_CHECKKERN_CUDA_EXPERTS_H

#include "tests/checkkern_cuda_sums.h"

enum { EXPERT_ALIGN = 4096 };

typedef struct {
    const char *name;
    uint32_t    hidden, ff, shared_ff, count, used;
    uint32_t    gate_type, down_type, shared_type;      /* gate_type: of up too */
    bool        is_full;
} expert_spec;

static const expert_spec expert_specs[] = {
    { "12 top-4", 256, 256, 256, 12, 4, Q4K, Q5K, Q8, false },
    { "12 top-4, narrow floats", 96, 32, 96, 12, 4, BF16, BF16, F32, false },
    { "9 top-1", 512, 256, 0, 9, 1, Q6K, Q4K, 0, false },
    { "16 top-16", 768, 256, 768, 16, 16, Q5K, Q6K, Q4K, false },
    { "two tiles a row", 512, 1536, 1536, 12, 4, Q5K, Q8, Q6K, false },
    { "tiles and floats", 512, 96, 256, 12, 4, Q8, BF16, Q8, false },
    { "512 top-10", 256, 256, 256, 512, 10, Q4K, Q4K, Q4K, false },
    { "1024 top-64", 256, 32, 0, 1024, 64, Q4K, F32, 0, false },
    { "held", 2048, 256, 512, 12, 4, Q4K, Q4K, Q8, false },      /* gate and up */
    { "held, shared too", 2048, 32, 256, 12, 4, Q4K, BF16, Q4K, false },      /* by the same kernel, in many rounds */
    { "held, shared too", 2048, 32, 256, 15, 4, Q4K, BF16, Q8, false },
    { "held", 512, 512, 512, 12, 4, Q4K, Q5K, Q4K, false },     /* down, of two super-blocks a row */
    { "held", 512, 512, 512, 12, 4, Q4K, Q6K, Q4K, false },
    { "held", 512, 512, 512, 9, 3, Q4K, Q5K, Q8, false },
    { "held", 2048, 768, 0, 12, 4, Q5K, Q6K, 0, false },
    { "held", 2048, 768, 0, 12, 3, Q4K, Q4K, 0, false },
    { "Qwen3.6", 2048, 512, 512, 256, 8, Q4K, Q5K, Q4K, true },
    { "Qwen3.6 native", 2048, 512, 512, 256, 8, Q4K, Q6K, Q8, true },
    { "Qwen3-30B", 2048, 768, 0, 128, 8, Q4K, Q6K, 0, true },
    { "Qwen3-30B", 2048, 768, 0, 128, 8, Q4K, Q4K, 0, true },
};

typedef struct {
    const expert_spec *spec;
    spk_matrix gate, up, down, shared_gate, shared_up, shared_down;      /* of expert 0 */
    uint64_t   stride_bytes;
} expert_set;

static spk_matrix expert_at(spk_matrix w, const expert_set *set, uint32_t expert) {
    w.data += expert * set->stride_bytes;
    return w;
}

static uint64_t matrix_bytes(uint32_t type, uint64_t rows, uint64_t cols) {
    return spk_layout_unit_bytes(layout_of(type), type, cols) * spk_layout_unit_count(layout_of(type), type, rows, cols);
}

/* Per expert [gate and up, interleaved][down], as packs have them. */
static expert_set put_experts(device_case *t, const expert_spec *spec) {
    expert_set set = { .spec = spec };
    const uint32_t gate_layout = layout_of(spec->gate_type), down_layout = layout_of(spec->down_type);
    const uint64_t unit = spk_layout_unit_bytes(gate_layout, spec->gate_type, spec->hidden);
    const uint64_t down_at = (2 * matrix_bytes(spec->gate_type, spec->ff, spec->hidden) + 127) / 128 * 128;
    set.stride_bytes = (down_at + matrix_bytes(spec->down_type, spec->hidden, spec->ff) + EXPERT_ALIGN - 1) /
                       EXPERT_ALIGN * EXPERT_ALIGN;
    uint8_t *data = take_weights(t, set.stride_bytes * spec->count, EXPERT_ALIGN);
    set.gate = (spk_matrix){ data, 2 * unit, spec->gate_type, gate_layout, spec->ff, spec->hidden };
    set.up = (spk_matrix){ data + unit, 2 * unit, spec->gate_type, gate_layout, spec->ff, spec->hidden };
    set.down = (spk_matrix){ data + down_at,  spk_layout_unit_bytes(down_layout, spec->down_type, spec->ff),
                             spec->down_type, down_layout,
                             spec->hidden,    spec->ff };
    for (uint32_t e = 0; e < spec->count; e++) {
        const spk_matrix w[3] = { expert_at(set.gate, &set, e), expert_at(set.up, &set, e), expert_at(set.down, &set, e) };
        for (int i = 0; i < 3; i++) fill_matrix(t, &w[i], W_RANDOM);
    }
    if (spec->shared_ff != 0) {
        put_pair(t, spec->shared_type, layout_of(spec->shared_type), spec->shared_ff, spec->hidden, W_RANDOM,
                 &set.shared_gate, &set.shared_up);
        set.shared_down = put_matrix(t, spec->shared_type, spec->hidden, spec->shared_ff, W_RANDOM);
    }
    return set;
}

/* ---- Routing ---- */

typedef struct {
    spk_cuda_routing by_logits, by_choice;
    logit_source     logits;
    selection        expected;
} test_routing;

/* Choice and weight are those of the reference.  shared_logit: where rms is 1. */
static test_routing make_routing(device_case *t, const expert_spec *spec, double shared_logit) {
    test_routing r = { 0 };
    long long *d_sums = take_staged_sums(t, spec->count + 1), *sums = host_of(t, d_sums);
    float *d_squares = take_staged_squares(t, spec->hidden);
    for (uint32_t i = 0; i < spec->count; i++) sums[place_of(i)] = (long long)(8 * SUM_UNITS * (double)check_uniform(&random_state));
    sums[place_of(spec->count)] = (long long)(shared_logit * SUM_UNITS);
    fill_squares(host_floats(t, d_squares), spec->hidden, 1);
    r.by_logits = (spk_cuda_routing){ .sums = d_sums, .squares = d_squares, .expert_count = spec->count, .used_count = spec->used,
                                      .column_count = spec->hidden, .eps = GPU_EPS };
    r.logits = staged_logits(t, &r.by_logits);
    r.expected = select_of(&r.logits, spec->count, spec->used);
    uint32_t *d_choice = take(t, INPUT, spec->used * 4, 0);
    float *d_weight = take_floats(t, INPUT, spec->used);
    memcpy(host_of(t, d_choice), r.expected.choice, spec->used * 4);
    for (uint32_t i = 0; i < spec->used; i++) host_floats(t, d_weight)[i] = (float)r.expected.weight[i];
    r.by_choice = r.by_logits;
    r.by_choice.choice = d_choice;
    r.by_choice.weight = d_weight;
    return r;
}

/* ---- Gate and up ---- */

static void check_up_case(device_case *t, const expert_set *set, bool has_shared, uint32_t kind, x_pattern pattern) {
    const expert_spec *spec = set->spec;
    DESCRIBE("experts_up %s hidden=%u ff=%u %s shared=%s %s x=%s", spec->name, spec->hidden, spec->ff,
             spk_type_name(spec->gate_type), has_shared ? spk_type_name(spec->shared_type) : "none", source_kinds[kind].name, x_names[pattern]);
    case_begin(t);
    test_routing routing = make_routing(t, spec, 0);
    spk_cuda_experts_up up = { .source = make_source(t, &source_kinds[kind], spec->hidden, 0, false, pattern),
                               .routing = routing.by_logits,
                               .gate = set->gate,
                               .up = set->up,
                               .expert_stride_bytes = set->stride_bytes,
                               .h = take_floats(t, OUTPUT, (uint64_t)spec->used * spec->ff) };
    up.source.x_out = NULL;
    if (has_shared) {
        up.shared_gate = set->shared_gate;
        up.shared_up = set->shared_up;
        up.shared_h = take_floats(t, OUTPUT, spec->shared_ff);
    }
    spk_cuda_experts_up chosen = up, streamed = up;
    chosen.routing = routing.by_choice;
    chosen.h = take_floats(t, OUTPUT, (uint64_t)spec->used * spec->ff);
    streamed.is_streamed = true;
    streamed.h = take_floats(t, OUTPUT, (uint64_t)spec->used * spec->ff);
    if (has_shared) chosen.shared_h = take_floats(t, OUTPUT, spec->shared_ff);
    if (has_shared) streamed.shared_h = take_floats(t, OUTPUT, spec->shared_ff);
    case_record(t);
    spk_cuda_launch_experts_up(t->cuda, &up);
    spk_cuda_launch_experts_up(t->cuda, &chosen);
    spk_cuda_launch_experts_up(t->cuda, &streamed);
    case_run(t, 1);
    same_floats(t, "h by logits and by choice", up.h, chosen.h, (uint64_t)spec->used * spec->ff);
    same_floats(t, "h, held and streamed", up.h, streamed.h, (uint64_t)spec->used * spec->ff);
    if (has_shared) same_floats(t, "shared h by logits and by choice", up.shared_h, chosen.shared_h, spec->shared_ff);
    if (has_shared) same_floats(t, "shared h, held and streamed", up.shared_h, streamed.shared_h, spec->shared_ff);
    vector_bounds v = source_bounds(t, &up.source);
    double *value = new_doubles(spec->ff), *error = new_doubles(spec->ff);
    for (uint32_t r = 0; r < spec->used; r++) {
        char what[32];
        (void)snprintf(what, sizeof what, "h of rank %u", r);
        const spk_matrix gate = expert_at(set->gate, set, routing.expected.choice[r]),
                         wide = expert_at(set->up, set, routing.expected.choice[r]);
        expect_pair(t, &gate, &wide, &v, false, value, error);
        near_floats(t, what, up.h + (uint64_t)r * spec->ff, value, error, spec->ff);
    }
    free(value), free(error);
    if (has_shared) {
        value = new_doubles(spec->shared_ff), error = new_doubles(spec->shared_ff);
        expect_pair(t, &set->shared_gate, &set->shared_up, &v, false, value, error);
        near_floats(t, "shared h", up.shared_h, value, error, spec->shared_ff);
        free(value), free(error);
    }
    bounds_free(&v);
}

/* ---- Down ---- */

static void take_parts(device_case *t, spk_cuda_experts_down *down, uint32_t hidden) {
    for (int p = 0; p < SPK_CUDA_DOWN_PARTS_MAX; p++) down->routed[p] = take_floats(t, OUTPUT, hidden);
}
/* The sum of the parts that a launch has, and nothing in the others. */
static void check_parts(const device_case *t, const spk_cuda_experts_down *down, uint32_t parts, const double *value,
                        const double *error) {
    const uint64_t hidden = down->down.row_count;
    for (uint64_t i = 0; i < hidden; i++) {
        double sum = 0;
        for (uint32_t p = 0; p < parts; p++) sum += (double)result_floats(t, down->routed[p])[i];
        for (uint32_t p = parts; p < SPK_CUDA_DOWN_PARTS_MAX; p++)
            EXPECT(is_poison(result_floats(t, down->routed[p])[i]), "part %u of %u written", p, parts);
        if (fabs(value[i]) + error[i] <= (double)FLT_MAX) near("routed", i, sum, value[i], error[i]);
    }
}

/* value, error [hidden] of the routed sum: h [used][ff] as the host has it. */
static void expect_routed(device_case *t, const expert_set *set, const selection *s, const float *d_h, double *value,
                          double *error) {
    const expert_spec *spec = set->spec;
    double *y = new_doubles(spec->hidden), *y_error = new_doubles(spec->hidden), *size = new_doubles(spec->hidden);
    memset(value, 0, spec->hidden * sizeof *value);
    memset(error, 0, spec->hidden * sizeof *error);
    for (uint32_t r = 0; r < spec->used; r++) {
        const spk_cuda_source source = { .x = d_h + (uint64_t)r * spec->ff, .count = spec->ff, .has_rest = 1 };
        const spk_matrix down = expert_at(set->down, set, s->choice[r]);
        vector_bounds v = source_bounds(t, &source);
        expect_product(t, &down, &v, true, y, y_error);
        for (uint32_t i = 0; i < spec->hidden; i++) {
            value[i] += s->weight[r] * y[i];
            error[i] += s->weight[r] * y_error[i] + s->weight_error[r] * (fabs(y[i]) + y_error[i]);
            size[i] += s->weight[r] * (fabs(y[i]) + y_error[i]);
        }
        bounds_free(&v);
    }
    for (uint32_t i = 0; i < spec->hidden; i++) error[i] += (spec->used + 3) * (U * size[i] + FLOOR);
    free(y), free(y_error), free(size);
}

static void check_shared_down(device_case *t, const expert_set *set, const logit_source *logits, const spk_cuda_experts_down *down) {
    const uint32_t hidden = set->spec->hidden;
    const spk_cuda_source source = { .x = down->shared_h, .count = set->spec->shared_ff, .has_rest = 1 };
    double gate_error, gate = shared_weight_of(logits, set->spec->count, &gate_error);
    double *value = new_doubles(hidden), *error = new_doubles(hidden);
    vector_bounds v = source_bounds(t, &source);
    expect_product(t, &down->shared_down, &v, true, value, error);
    for (uint32_t i = 0; i < hidden; i++) {
        error[i] = gate * error[i] + (fabs(value[i]) + error[i]) * gate_error + U * fabs(value[i]) * gate + FLOOR;
        value[i] *= gate;
    }
    near_floats(t, "shared", down->shared, value, error, hidden);
    bounds_free(&v);
    free(value), free(error);
}

/* Launches: by logits, by choice, the same streamed, and (where there is one part) by choice into a residual sum. */
typedef struct { spk_cuda_experts_down by_logits, by_choice, streamed, summed; } down_case;

static down_case make_down(device_case *t, const expert_set *set, const test_routing *routing, bool has_shared,
                           x_pattern pattern) {
    const expert_spec *spec = set->spec;
    down_case c = { .by_logits = { .routing = routing->by_logits,
                                   .down = set->down,
                                   .expert_stride_bytes = set->stride_bytes,
                                   .h = take_staged_as(t, spec->used * spec->ff, pattern) } };
    if (has_shared) {
        c.by_logits.shared_h = take_staged_as(t, spec->shared_ff, pattern);
        c.by_logits.shared_down = set->shared_down;
    }
    c.by_choice = c.by_logits;
    c.by_choice.routing = routing->by_choice;
    c.streamed = c.summed = c.by_choice;
    c.streamed.is_streamed = true;
    spk_cuda_experts_down *const all[4] = { &c.by_logits, &c.by_choice, &c.streamed, &c.summed };
    for (int i = 0; i < 4; i++) {
        take_parts(t, all[i], spec->hidden);
        if (has_shared) all[i]->shared = take_floats(t, OUTPUT, spec->hidden);
    }
    c.summed.sum = take_floats(t, OUTPUT, spec->hidden);
    c.summed.residual = pattern == X_RANDOM ? c.summed.sum : take_staged_as(t, spec->hidden, X_RANDOM);
    if (pattern == X_RANDOM) fill(X_RANDOM, host_floats(t, c.summed.sum), spec->hidden);
    return c;
}

/* residual + routed (+ shared), as an ADD kernel rounds it, and the parts not written. */
static void check_sum(const device_case *t, const down_case *c) {
    for (uint64_t i = 0; i < c->summed.down.row_count; i++) {
        float sum = host_floats(t, c->summed.residual)[i] + result_floats(t, c->by_choice.routed[0])[i];
        if (c->by_choice.shared != NULL) sum += result_floats(t, c->by_choice.shared)[i];
        float got = result_floats(t, c->summed.sum)[i];
        EXPECT(memcmp(&got, &sum, sizeof sum) == 0, "sum[%llu]: got %.9g want %.9g", (unsigned long long)i, (double)got,
               (double)sum);
        EXPECT(is_poison(result_floats(t, c->summed.routed[0])[i]), "routed[%llu] written beside the sum",
               (unsigned long long)i);
        EXPECT(c->summed.shared == NULL || is_poison(result_floats(t, c->summed.shared)[i]),
               "shared[%llu] written beside the sum", (unsigned long long)i);
    }
}

static void check_down_case(device_case *t, const expert_set *set, bool has_shared, x_pattern pattern) {
    const expert_spec *spec = set->spec;
    const uint32_t parts = spk_cuda_experts_down_parts(t->cuda, &set->down, spec->used);
    DESCRIBE("experts_down %s hidden=%u ff=%u %s shared=%s parts=%u h=%s", spec->name, spec->hidden, spec->ff,
             spk_type_name(spec->down_type), has_shared ? spk_type_name(spec->shared_type) : "none", parts,
             x_names[pattern]);
    EXPECT(parts >= 1 && parts <= SPK_CUDA_DOWN_PARTS_MAX, "parts %u", parts);
    case_begin(t);
    test_routing routing = make_routing(t, spec, pattern == X_ZERO ? -90 : pattern == X_CODES ? 0 : 0.7);
    down_case c = make_down(t, set, &routing, has_shared, pattern);
    case_record(t);
    spk_cuda_launch_experts_down(t->cuda, &c.by_logits);
    spk_cuda_launch_experts_down(t->cuda, &c.by_choice);
    spk_cuda_launch_experts_down(t->cuda, &c.streamed);
    if (parts == 1) spk_cuda_launch_experts_down(t->cuda, &c.summed);
    case_run(t, 1);
    double *value = new_doubles(spec->hidden), *error = new_doubles(spec->hidden);
    expect_routed(t, set, &routing.expected, c.by_logits.h, value, error);
    check_parts(t, &c.by_logits, parts, value, error);
    check_parts(t, &c.by_choice, parts, value, error);
    if (has_shared) {
        check_shared_down(t, set, &routing.logits, &c.by_logits);
        same_floats(t, "shared", c.by_logits.shared, c.by_choice.shared, spec->hidden);
        same_floats(t, "shared, held and streamed", c.by_choice.shared, c.streamed.shared, spec->hidden);
    }
    for (uint32_t p = 0; p < parts; p++) same_floats(t, "routed, held and streamed", c.by_choice.routed[p], c.streamed.routed[p], spec->hidden);
    if (parts == 1) check_sum(t, &c);
    free(value), free(error);
}

/* ---- A whole layer, out of its mixer: fused with a signal as in a step, held and streamed, fused without, and with no fusions: the same
 * bits ---- */

static void gemv_one(device_case *t, spk_cuda_source source, spk_matrix w, float *y) {
    const spk_cuda_gemv g = { .source = source, .segments = { { .w = w, .y = y } }, .segment_count = 1 };
    spk_cuda_launch_gemv(t->cuda, &g);
}

/* What all ways have: the projection's source and weights, and the router with the norm before it. */
typedef struct {
    const expert_set *set;
    test_router       router;
    spk_cuda_source   mixed;
    spk_matrix        out;
} layer_inputs;
typedef struct {
    spk_cuda_router  router;
    spk_cuda_routing routing;
    float    *x, *shared_h, *h, *shared, *weight;      /* x: the residual stream, to which the projection adds */
    uint32_t *choice;
    spk_cuda_experts_down down;
} layer_buffers;
static layer_buffers take_layer(device_case *t, const layer_inputs *in, long long *d_sums, const float *residual) {
    const expert_spec *spec = in->set->spec;
    layer_buffers b = { .x = take_floats(t, OUTPUT, spec->hidden),
                        .shared_h = take_floats(t, OUTPUT, spec->shared_ff),
                        .h = take_floats(t, OUTPUT, (uint64_t)spec->used * spec->ff),
                        .shared = take_floats(t, OUTPUT, spec->hidden),
                        .weight = take_floats(t, OUTPUT, spec->used),
                        .choice = take(t, OUTPUT, spec->used * 4, 0) };
    take_parts(t, &b.down, spec->hidden);
    memcpy(host_floats(t, b.x), residual, spec->hidden * sizeof(float));
    b.router = (spk_cuda_router){ .weights = in->router.d_weights, .row_count = in->router.row_count, .column_count = spec->hidden,
                                  .sums = d_sums, .squares = take_floats(t, OUTPUT, spec->hidden / GROUP) };
    b.routing = (spk_cuda_routing){ .sums = d_sums, .squares = b.router.squares, .expert_count = spec->count, .used_count = spec->used,
                                    .column_count = spec->hidden, .eps = GPU_EPS };
    return b;
}

static void record_fused(device_case *t, const layer_inputs *in, layer_buffers *b, spk_cuda_signal routed_ready, bool is_streamed) {
    const expert_set *set = in->set;
    const spk_cuda_gemv out = { .source = in->mixed,
                                .segments = { { .w = in->out, .y = b->x, .residual = b->x } },
                                .segment_count = 1,
                                .router = b->router,
                                .is_streamed = is_streamed };
    spk_cuda_launch_gemv(t->cuda, &out);
    const spk_cuda_experts_up up = { .source = { .x = b->x, .norm_weight = in->router.d_norm, .eps = GPU_EPS, .count = set->spec->hidden },
                                     .routing = b->routing,
                                     .gate = set->gate,
                                     .up = set->up,
                                     .expert_stride_bytes = set->stride_bytes,
                                     .h = b->h,
                                     .shared_gate = set->shared_gate,
                                     .shared_up = set->shared_up,
                                     .shared_h = b->shared_h,
                                     .routed_ready = routed_ready,
                                     .is_streamed = is_streamed };
    spk_cuda_launch_experts_up(t->cuda, &up);
    b->down.routing = b->routing;
    b->down.routed_ready = routed_ready;
    b->down.is_streamed = is_streamed;
    b->down.down = set->down;
    b->down.shared_down = set->shared_down;
    b->down.expert_stride_bytes = set->stride_bytes;
    b->down.h = b->h;
    b->down.shared_h = b->shared_h;
    b->down.shared = b->shared;
    spk_cuda_launch_experts_down(t->cuda, &b->down);
}

static void record_plain(device_case *t, const layer_inputs *in, layer_buffers *b) {
    const expert_set *set = in->set;
    const expert_spec *spec = set->spec;
    float *normed = take_floats(t, SCRATCH, spec->hidden), *factor = take_floats(t, SCRATCH, 1),
          *raw = take_floats(t, SCRATCH, spec->hidden);
    float *gate = take_floats(t, SCRATCH, spec->shared_ff), *wide = take_floats(t, SCRATCH, spec->shared_ff);
    gemv_one(t, in->mixed, in->out, raw);
    const spk_cuda_elementwise sum = { .op = SPK_CUDA_ADD, .a = b->x, .b = raw, .out = b->x, .count = spec->hidden };
    spk_cuda_launch_elementwise(t->cuda, &sum);
    const spk_cuda_norm norm = {
        .source = { .x = b->x, .norm_weight = in->router.d_norm, .eps = GPU_EPS, .count = spec->hidden },
        .out = normed,
        .factor = factor
    };
    spk_cuda_launch_norm(t->cuda, &norm);
    const spk_cuda_source ready = { .x = normed, .factor = factor, .count = spec->hidden },
                          shared = { .x = b->shared_h, .count = spec->shared_ff, .has_rest = 1 };
    spk_cuda_launch_router(t->cuda, &b->router, b->x);
    gemv_one(t, ready, set->shared_gate, gate);
    gemv_one(t, ready, set->shared_up, wide);
    const spk_cuda_elementwise swiglu = {
        .op = SPK_CUDA_SWIGLU, .a = gate, .b = wide, .out = b->shared_h, .count = spec->shared_ff
    };
    spk_cuda_launch_elementwise(t->cuda, &swiglu);
    const spk_cuda_top_k top = { .routing = b->routing, .choice = b->choice, .weight = b->weight };
    spk_cuda_launch_top_k(t->cuda, &top);
    spk_cuda_routing chosen = b->routing;
    chosen.choice = b->choice;
    chosen.weight = b->weight;
    const spk_cuda_experts_up up = { .source = ready,
                                     .routing = chosen,
                                     .gate = set->gate,
                                     .up = set->up,
                                     .expert_stride_bytes = set->stride_bytes,
                                     .h = b->h };
    spk_cuda_launch_experts_up(t->cuda, &up);
    gemv_one(t, shared, set->shared_down, raw);
    const spk_cuda_elementwise scale = {
        .op = SPK_CUDA_SHARED_SCALE, .a = raw, .routing = b->routing, .out = b->shared, .count = spec->hidden
    };
    spk_cuda_launch_elementwise(t->cuda, &scale);
    b->down.routing = chosen;
    b->down.down = set->down;
    b->down.expert_stride_bytes = set->stride_bytes;
    b->down.h = b->h;
    spk_cuda_launch_experts_down(t->cuda, &b->down);
}

static void same_layer(const device_case *t, const expert_spec *spec, const layer_buffers *a, const layer_buffers *b) {
    same_floats(t, "x", a->x, b->x, spec->hidden);
    same_router(t, "router", &a->router, &b->router);
    same_floats(t, "shared h", a->shared_h, b->shared_h, spec->shared_ff);
    same_floats(t, "h", a->h, b->h, (uint64_t)spec->used * spec->ff);
    same_floats(t, "shared", a->shared, b->shared, spec->hidden);
    for (uint32_t p = 0; p < SPK_CUDA_DOWN_PARTS_MAX; p++)
        same_floats(t, "routed", a->down.routed[p], b->down.routed[p], spec->hidden);
}

/* Flags and d_step go on from run to run, as in a session. */
static uint32_t *take_flags(device_case *t, uint32_t count) {
    uint32_t *d_flags = take(t, SCRATCH, count * sizeof *d_flags, 0);
    memset(host_of(t, d_flags), 0, count * sizeof *d_flags);
    return d_flags;
}

/* As a step begins: the sums of all layers' routers are whatever the step before left, and become zero. */
static void record_clear(device_case *t, spk_matrix embedding, float *d_row, long long *d_sums, uint32_t row_count) {
    const spk_cuda_embed clear = { .sequence = { .d_tokens = t->d_zero, .d_position = t->d_zero }, .embedding = embedding, .d_x = d_row,
                                   .d_clear = d_sums, .clear_count = row_count };
    spk_cuda_launch_embed(t->cuda, &clear);
}

/* A step that ends greedily, since a signal holds for one step. */
enum { LAYER_WAYS = 4, LAYER_FLAGS = 2 };
static void check_expert_layer(device_case *t, const expert_set *set) {
    const expert_spec *spec = set->spec;
    /* 4096 columns: held, where the emulator has the time. */
    const uint32_t mixed_count = spec->is_full || spec->hidden <= 512 ? 4096 : 256, places = (spec->count + 1 + 3) / 4 * 4;
    DESCRIBE("experts' layer %s, fused with signals, held and streamed, fused and not", spec->name);
    case_begin(t);
    layer_inputs in = { .set = set, .mixed = { .x = take_staged_as(t, mixed_count, X_RANDOM), .count = mixed_count, .has_rest = 1 } };
    in.out = put_matrix(t, SPK_TYPE_Q4_K, spec->hidden, mixed_count, W_RANDOM);
    in.router = put_router(t, spec->count + 1, spec->hidden, SPK_TYPE_F32, true);
    const spk_matrix ends = put_matrix(t, SPK_TYPE_F32, 3, spec->hidden, W_RANDOM);
    long long *d_sums = take(t, OUTPUT, LAYER_WAYS * sum_words(places) * sizeof *d_sums, 0);
    float *residual = must(malloc(spec->hidden * sizeof *residual));
    fill(X_RANDOM, residual, spec->hidden);
    layer_buffers ways[LAYER_WAYS];
    for (uint32_t i = 0; i < LAYER_WAYS; i++) ways[i] = take_layer(t, &in, d_sums + i * sum_words(places), residual);
    free(residual);
    layer_buffers *const signalled = &ways[0], *const plain = &ways[3];
    const spk_cuda_sequence q = take_sequence(t, SCRATCH, 0);
    uint32_t *flags = take_flags(t, LAYER_FLAGS);
    const spk_cuda_signal signals[LAYER_FLAGS] = { { flags, q.d_step }, { flags + 1, q.d_step } }, none = { 0 };
    spk_cuda_gemv end = { .source = { .x = signalled->x, .count = spec->hidden },
                          .segments = { { .w = ends, .y = take_floats(t, OUTPUT, 3) } },
                          .segment_count = 1 };
    end_greedily(t, &end, &q);
    float *d_row = take_floats(t, SCRATCH, spec->hidden);
    case_record(t);
    record_clear(t, ends, d_row, d_sums, LAYER_WAYS * places);
    record_fused(t, &in, signalled, signals[0], false);
    record_fused(t, &in, &ways[1], signals[1], true);
    record_fused(t, &in, &ways[2], none, false);
    record_plain(t, &in, plain);
    spk_cuda_launch_gemv(t->cuda, &end);
    case_run(t, 1);
    for (uint32_t i = 1; i < LAYER_WAYS; i++) same_layer(t, spec, signalled, &ways[i]);
    check_sums(t, &in.router, result_floats(t, signalled->x), signalled->router.sums);
    const logit_source logits = logits_of(result_of(t, plain->router.sums), result_floats(t, plain->router.squares), &plain->routing);
    const selection want = select_of(&logits, spec->count, spec->used);
    check_selection(t, &want, plain->choice, plain->weight, spec->used);
    for (int run = 0; run < 2; run++)
        for (int i = 0; i < LAYER_FLAGS; i++) {
            const uint32_t flag = *(const uint32_t *)back_of(t, run, flags + i),
                           step = *(const uint32_t *)back_of(t, run, q.d_step);
            EXPECT(flag == (uint32_t)run + 1 && step == flag, "after run %d signal %d is %u, and %u steps were counted", run, i,
                   flag, step);
        }
    router_free(&in.router);
}

/* ---- All ---- */

static void check_experts(device_case *t, bool is_quick) {
    static const x_pattern patterns[] = { X_ZERO,  X_HUGE_AMONG_TINY, X_SUBNORMAL, X_ALTERNATING,
                                          X_CODES, X_ONE_HOT,         X_RANDOM };
    for (size_t i = 0; i < sizeof expert_specs / sizeof *expert_specs; i++) {
        const expert_spec *spec = &expert_specs[i];
        if (is_quick && (spec->is_full || spec->count > 100 || spec->ff > 1000 || spec->used > 8)) continue;
        weights_drop(t);
        const expert_set set = put_experts(t, spec);
        for (uint32_t p = is_quick ? 4 : 0; p < 7; p++) {
            check_up_case(t, &set, spec->shared_ff != 0 && p != 5, p % 2 == 0 ? S_NORM : S_PLAIN, patterns[p]);
            check_down_case(t, &set, spec->shared_ff != 0 && p != 2, patterns[p]);
        }
        check_up_case(t, &set, spec->shared_ff != 0, S_ADD2, X_RANDOM);
        check_up_case(t, &set, spec->shared_ff != 0, S_FACTOR, X_RANDOM);
        if (spec->shared_ff != 0) check_expert_layer(t, &set);
    }
}

#endif
