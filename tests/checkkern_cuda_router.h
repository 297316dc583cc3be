/* tests/checkkern_cuda_router.h - selection among ties: the top_k kernel, the selection inside the expert kernels, and the order
 * of the CPU reference (value descending, ties to the lower index; -0 equals +0), on thousands of tie-heavy cases.
 *
 * Each case is five launches on one vector of logits: top_k; experts_up and experts_down by its choice and weights; the same by
 * logits.  Both ways must give the same bits.  One x serves all cases of a shape, so an expert's h is the same bits wherever it
 * is chosen, and is compared with the reference once; so is its contribution to the routed sum.
 */
#ifndef SPK_CHECKKERN_CUDA_ROUTER_H
#define SPK_CHECKKERN_CUDA_ROUTER_H

#include "tests/checkkern_cuda_experts.h"

enum { ROUTER_BATCH = 8 };

typedef struct { expert_spec experts; uint32_t case_count, quick_count; } router_spec;
static const router_spec router_specs[] = {
    { { "router", 256, 32, 0, 12, 4, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 904, 16 },
    { { "router", 256, 32, 0, 128, 8, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 904, 8 },
    { { "router", 256, 256, 0, 256, 8, SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, 0, false }, 1504, 0 },
    { { "router", 256, 32, 0, 512, 10, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 904, 0 },
    { { "router", 256, 32, 0, 1024, 64, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 504, 0 },
    { { "router", 256, 32, 0, 64, 64, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 104, 0 },
    { { "router", 256, 32, 0, 33, 32, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 104, 8 },
    { { "router", 256, 32, 0, 1, 1, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 16, 8 },
};

typedef enum { L_FEW, L_FEW_LARGE, L_EQUAL, L_ZEROS, L_SUBNORMAL, L_RUNS, L_DISTINCT, L_EXTREME, L_COUNT } logit_pattern;
static const char *const logit_names[] = { "few values", "few large values", "all equal", "+0 and -0", "subnormal",
                                           "runs",       "distinct",         "extreme" };

static void fill_logits(float *logits, uint32_t count, logit_pattern pattern) {
    uint32_t levels = 1 + (uint32_t)(check_random(&random_state) % 6), run = 0;
    float value = check_uniform(&random_state);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t r = (uint32_t)(check_random(&random_state) % 1000), level = r % levels;
        bool is_odd = r % 2 != 0;
        switch (pattern) {
        case L_FEW: logits[i] = 0.5f * (float)level; break;
        case L_FEW_LARGE: logits[i] = -1e30f * (float)level; break;
        case L_EQUAL: logits[i] = value; break;
        case L_ZEROS: logits[i] = is_odd ? -0.0f : 0.0f; break;
        case L_SUBNORMAL: logits[i] = ldexpf(is_odd ? -1.0f : 1.0f, -149) * (float)level; break;
        case L_RUNS:
            if (run-- == 0) {
                run = r % 40;
                value = (float)(check_random(&random_state) % 5) - 2.0f;
            }
            logits[i] = value;
            break;
        case L_DISTINCT: logits[i] = 8 * check_uniform(&random_state); break;
        default:
            logits[i] = level == 0   ? (is_odd ? -FLT_MAX : FLT_MAX)
                        : level == 1 ? (is_odd ? -0.0f : 0.0f)
                                     : (float)level * (is_odd ? -1e-38f : 5e37f);
            break;
        }
    }
}

/* Buffers of one case of a batch. */
typedef struct {
    const float *logits;
    uint32_t    *choice;
    float       *weight, *h[2];
    spk_cuda_experts_down down[2];
} router_case;

static router_case make_router_case(device_case *t, const expert_set *set) {
    const expert_spec *spec = set->spec;
    router_case c = { .logits = take_staged(t, spec->count),
                      .choice = take(t, OUTPUT, spec->used * 4, 0),
                      .weight = take_floats(t, OUTPUT, spec->used) };
    for (int i = 0; i < 2; i++) {
        c.h[i] = take_floats(t, OUTPUT, (uint64_t)spec->used * spec->ff);
        c.down[i] = (spk_cuda_experts_down){ .down = set->down, .expert_stride_bytes = set->stride_bytes, .h = c.h[i] };
        take_parts(t, &c.down[i], spec->hidden);
        c.down[i].routing = (spk_cuda_routing){ .expert_count = spec->count, .used_count = spec->used };
    }
    c.down[0].routing.choice = c.choice;
    c.down[0].routing.weight = c.weight;
    c.down[1].routing.logits = c.logits;
    return c;
}

static void record_router_case(device_case *t, const expert_set *set, const router_case *c, const float *d_x) {
    const spk_cuda_top_k top = { .logits = c->logits,
                                 .choice = c->choice,
                                 .weight = c->weight,
                                 .expert_count = set->spec->count,
                                 .used_count = set->spec->used };
    spk_cuda_launch_top_k(t->cuda, &top);
    for (int i = 0; i < 2; i++) {
        const spk_cuda_experts_up up = { .source = { .x = d_x, .count = set->spec->hidden },
                                         .routing = c->down[i].routing,
                                         .gate = set->gate,
                                         .up = set->up,
                                         .expert_stride_bytes = set->stride_bytes,
                                         .h = c->h[i] };
        spk_cuda_launch_experts_up(t->cuda, &up);
        spk_cuda_launch_experts_down(t->cuda, &c->down[i]);
    }
}

/* What is known of the experts of a shape so far. */
typedef struct {
    bool    is_known[EXPERTS_MAX];
    float  *h;                   /* [count][ff] as the GPU gave it first */
    double *y, *y_error;         /* [count][hidden] of D h */
} expert_table;

/* h of an expert: against the reference when it is first chosen, the same bits ever after. */
static void check_known(device_case *t, const expert_set *set, expert_table *table, const vector_bounds *x,
                        const float *d_x, uint32_t expert, const float *d_h) {
    const expert_spec *spec = set->spec;
    float *known = table->h + (uint64_t)expert * spec->ff;
    if (table->is_known[expert]) {
        EXPECT(memcmp(known, result_of(t, d_h), spec->ff * sizeof(float)) == 0, "h of expert %u is not what it was",
               expert);
        return;
    }
    const spk_matrix gate = expert_at(set->gate, set, expert), up = expert_at(set->up, set, expert),
                     down = expert_at(set->down, set, expert);
    double *value = new_doubles(spec->ff), *error = new_doubles(spec->ff);
    expect_pair(t, &gate, &up, x, false, value, error);
    near_floats(t, "h", d_h, value, error, spec->ff);
    memcpy(known, result_of(t, d_h), spec->ff * sizeof(float));
    memcpy(host_floats(t, d_x), known, spec->ff * sizeof(float));      /* lent for a moment: bounds read staged values */
    const spk_cuda_source source = { .x = d_x, .count = spec->ff, .has_rest = 1 };
    vector_bounds v = source_bounds(t, &source);
    expect_product(t, &down, &v, true, table->y + (uint64_t)expert * spec->hidden,
                   table->y_error + (uint64_t)expert * spec->hidden);
    table->is_known[expert] = true;
    bounds_free(&v);
    free(value), free(error);
}

static void check_router_case(device_case *t, const expert_set *set, const router_case *c, expert_table *table,
                              const vector_bounds *x, const float *d_lent) {
    const expert_spec *spec = set->spec;
    const selection want = select_of(host_floats(t, c->logits), spec->count, spec->used);
    const uint32_t *choice = result_of(t, c->choice), parts = spk_cuda_experts_down_parts(t->cuda, &set->down, spec->used);
    double *value = new_doubles(spec->hidden), *error = new_doubles(spec->hidden);
    bool is_right = true;
    near_floats(t, "weight", c->weight, want.weight, want.weight_error, spec->used);
    for (uint32_t r = 0; r < spec->used; r++) {
        is_right = is_right && choice[r] == want.choice[r];
        EXPECT(choice[r] == want.choice[r], "place %u has expert %u, want %u", r, choice[r], want.choice[r]);
    }
    same_floats(t, "h by choice and by logits", c->h[0], c->h[1], (uint64_t)spec->used * spec->ff);
    for (uint32_t p = 0; p < parts; p++)
        same_floats(t, "routed by choice and by logits", c->down[0].routed[p], c->down[1].routed[p], spec->hidden);
    for (uint32_t r = 0; r < spec->used && is_right; r++) {
        const uint32_t e = want.choice[r];
        check_known(t, set, table, x, d_lent, e, c->h[0] + (uint64_t)r * spec->ff);
        for (uint32_t i = 0; i < spec->hidden; i++) {
            double y = table->y[(uint64_t)e * spec->hidden + i],
                   y_error = table->y_error[(uint64_t)e * spec->hidden + i], size = fabs(y) + y_error;
            value[i] += want.weight[r] * y;
            error[i] += want.weight[r] * y_error + want.weight_error[r] * size +
                        (spec->used + 3) * (U * want.weight[r] * size + FLOOR);
        }
    }
    if (is_right) check_parts(t, &c->down[0], parts, value, error);
    free(value), free(error);
}

static void check_router_spec(device_case *t, const router_spec *spec, uint32_t case_count) {
    const expert_spec *experts = &spec->experts;
    DESCRIBE("router %u top-%u", experts->count, experts->used);
    weights_drop(t);
    case_begin(t);
    const expert_set set = put_experts(t, experts);
    expert_table table = { .h = must(malloc((uint64_t)experts->count * experts->ff * sizeof(float))),
                           .y = new_doubles((uint64_t)experts->count * experts->hidden),
                           .y_error = new_doubles((uint64_t)experts->count * experts->hidden) };
    const float *d_x = take_staged_as(t, experts->hidden, X_RANDOM), *d_lent = take_staged(t, experts->ff);
    const spk_cuda_source source = { .x = d_x, .count = experts->hidden };
    vector_bounds x = source_bounds(t, &source);
    router_case cases[ROUTER_BATCH];
    for (uint32_t i = 0; i < ROUTER_BATCH; i++) cases[i] = make_router_case(t, &set);
    case_record(t);
    for (uint32_t i = 0; i < ROUTER_BATCH; i++) record_router_case(t, &set, &cases[i], d_x);
    spk_cuda_step *step = NULL;
    MUST(spk_cuda_step_end(t->cuda, &step, &must_error));
    for (uint32_t done = 0; done < case_count; done += ROUTER_BATCH) {
        for (uint32_t i = 0; i < ROUTER_BATCH; i++)
            fill_logits(host_of(t, cases[i].logits), experts->count, (logit_pattern)(i % L_COUNT));
        step_check(t, step, 1);
        for (uint32_t i = 0; i < ROUTER_BATCH; i++) {
            DESCRIBE("router %u top-%u case=%u logits=%s", experts->count, experts->used, done + i,
                     logit_names[i % L_COUNT]);
            check_router_case(t, &set, &cases[i], &table, &x, d_lent);
        }
    }
    spk_cuda_step_free(step);
    bounds_free(&x);
    free(table.h), free(table.y), free(table.y_error);
}

static void check_router(device_case *t, bool is_quick) {
    for (size_t i = 0; i < sizeof router_specs / sizeof *router_specs; i++) {
        uint32_t count = is_quick ? router_specs[i].quick_count : router_specs[i].case_count;
        if (count > 0) check_router_spec(t, &router_specs[i], count);
    }
}

#endif
