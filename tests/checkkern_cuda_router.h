/* tests/checkkern_cuda_router.h - selection among ties: the top_k kernel, the selection inside the expert kernels, and the order
 * of the CPU reference (value as F32 descending, ties to the lower index), on thousands of tie-heavy cases.
 *
 * Each case is nine launches on the sums of one router: top_k; experts_up and experts_down by its choice and weights and by sums,
 * each as a session launches them and streamed.  All four ways must give the same bits.  up signals, down awaits, as in a
 * session.  One x serves all cases of a shape, so an expert's h is the same bits wherever it is chosen, and is compared with the
 * reference once; so is its contribution to the routed sum.
 */
#ifndef SPK_CHECKKERN_CUDA_ROUTER_H
#define SPK_CHECKKERN_CUDA_ROUTER_H

#include "tests/checkkern_cuda_experts.h"

/* down_rows: of experts_down, its first rows.  Kernels that hold their weights have a selection of their own: more than 2000
 * cases for up's (an input of 2048), as many for down's (tiles of 512 or 256 columns). */
typedef struct { expert_spec experts; uint32_t down_rows, case_count, quick_count; } router_spec;
static const router_spec router_specs[] = {
    { { "up held", 2048, 32, 0, 12, 4, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 8, 510, 10 },
    { { "up held", 2048, 32, 0, 128, 8, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 8, 510, 10 },
    { { "up held", 2048, 32, 0, 256, 8, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 8, 910, 0 },
    { { "up held", 2048, 32, 0, 33, 32, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 8, 110, 10 },
    { { "up held", 2048, 32, 0, 1, 1, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 8, 20, 10 },
    { { "down held", 256, 512, 0, 12, 4, SPK_TYPE_Q4_K, SPK_TYPE_Q4_K, 0, false }, 32, 510, 10 },
    { { "down held", 256, 512, 0, 128, 8, SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, 0, false }, 32, 510, 10 },
    { { "down held", 256, 512, 0, 256, 8, SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, 0, false }, 32, 910, 0 },
    { { "down held", 256, 256, 0, 21, 19, SPK_TYPE_Q4_K, SPK_TYPE_Q4_K, 0, false }, 64, 110, 10 },
    { { "down held", 256, 512, 0, 1, 1, SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, 0, false }, 32, 20, 10 },
    { { "both held", 2048, 512, 0, 256, 8, SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, 0, false }, 2048, 40, 0 },
    { { "streamed", 256, 256, 0, 257, 8, SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, 0, false }, 256, 110, 0 },
    { { "streamed", 256, 32, 0, 512, 10, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 8, 510, 0 },
    { { "streamed", 256, 32, 0, 1024, 64, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 8, 310, 0 },
    { { "streamed", 256, 32, 0, 64, 64, SPK_TYPE_Q4_K, SPK_TYPE_BF16, 0, false }, 8, 110, 0 },
};

typedef enum {
    L_FEW, L_FEW_LARGE, L_EQUAL, L_ZEROS, L_UNITS, L_RUNS, L_DISTINCT, L_EXTREME, L_BELOW_F32, L_NEGATIVE, L_COUNT
} logit_pattern;
static const char *const logit_names[] = { "few values", "few large values", "all equal", "zeros",      "few units",
                                           "runs",       "distinct",         "extreme",   "below F32's precision", "negative" };
/* Of x, so that logits are of sizes that a softmax tells apart; 0: x is zero. */
static const double logit_rms[L_COUNT] = { 1, 0x1p25, 0.01, 0, 0x1p-32, 1, 4, 0x1p30, 0x1p-4, 0.5 };
static const float logit_eps[L_COUNT] = { 1e-6f, 1e-6f, 1e-6f, 1e-6f, 1e-24f, 1e-5f, 1e-6f, 1e-6f, 1e-6f, 1e-6f };
enum { ROUTER_BATCH = L_COUNT };       /* cases of a step: one of each kind */

/* In units of 2^-32. */
static void fill_logits(long long *sums, uint32_t count, logit_pattern pattern) {
    const long long one = INT64_C(1) << 32;
    uint32_t levels = 1 + (uint32_t)(check_random(&random_state) % 6), run = 0;
    long long value = (long long)(check_random(&random_state) % 4001 - 2000) * 54321987;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t r = (uint32_t)(check_random(&random_state) % 1000), level = r % levels;
        bool is_odd = r % 2 != 0;
        long long sum;
        switch (pattern) {
        case L_FEW: sum = one / 2 * level; break;
        case L_FEW_LARGE: sum = -(INT64_C(1) << 58) * level; break;
        case L_EQUAL: sum = value; break;
        case L_ZEROS: sum = 0; break;
        case L_UNITS: sum = is_odd ? -(long long)level : level; break;
        case L_RUNS:
            if (run-- == 0) {
                run = r % 40;
                value = one * ((long long)(check_random(&random_state) % 5) - 2);
            }
            sum = value;
            break;
        case L_DISTINCT: sum = (long long)(8 * SUM_UNITS * (double)check_uniform(&random_state)); break;
        case L_EXTREME:
            sum = level == 0 ? INT64_C(1) << 62 : level == 1 ? (is_odd ? 1 : 0) : (INT64_C(1) << (62 - 8 * level)) + (is_odd ? 0 : 1);
            if (r % 3 == 0) sum = -sum;
            break;
        case L_BELOW_F32:            /* F32 has a step of 2^17 there, and the half of it goes to the even one */
            sum = (INT64_C(1) << 40) + ((INT64_C(1) << 17) * 2 * (level % 3)) + (long long)(r * 131 % 65537) * (is_odd ? -1 : 1);
            break;
        default: sum = -one / 4 * (1 + (long long)level); break;
        }
        sums[place_of(i)] = sum;
    }
}

/* Bits of a way to route and multiply. */
enum { BY_LOGITS = 1, STREAMED = 2, WAYS = 4 };

/* One case of a batch. */
typedef struct {
    spk_cuda_routing logits;                 /* to select by */
    uint32_t    *choice;
    float       *weight;
    spk_cuda_experts_up   up[WAYS];
    spk_cuda_experts_down down[WAYS];
} router_case;

/* signals [WAYS]: routed_ready of each way. */
static router_case make_router_case(device_case *t, const expert_set *set, const float *d_x, const spk_cuda_signal *signals, logit_pattern pattern) {
    const expert_spec *spec = set->spec;
    router_case c = { .logits = { .sums = take_staged_sums(t, spec->count), .squares = take_staged_squares(t, spec->hidden), .expert_count = spec->count,
                                  .used_count = spec->used, .column_count = spec->hidden, .eps = logit_eps[pattern] },
                      .choice = take(t, OUTPUT, spec->used * 4, 0),
                      .weight = take_floats(t, OUTPUT, spec->used) };
    for (int way = 0; way < WAYS; way++) {
        spk_cuda_routing routing = c.logits;
        if (!(way & BY_LOGITS))      /* without a shared expert, that is all that is read */
            routing = (spk_cuda_routing){ .choice = c.choice, .weight = c.weight, .expert_count = spec->count, .used_count = spec->used };
        c.up[way] = (spk_cuda_experts_up){ .source = { .x = d_x, .count = spec->hidden },
                                           .routing = routing,
                                           .gate = set->gate,
                                           .up = set->up,
                                           .expert_stride_bytes = set->stride_bytes,
                                           .h = take_floats(t, OUTPUT, (uint64_t)spec->used * spec->ff),
                                           .routed_ready = signals[way],
                                           .is_streamed = way & STREAMED };
        c.down[way] = (spk_cuda_experts_down){ .routing = routing,
                                               .down = set->down,
                                               .expert_stride_bytes = set->stride_bytes,
                                               .h = c.up[way].h,
                                               .routed_ready = signals[way],
                                               .is_streamed = way & STREAMED };
        take_parts(t, &c.down[way], (uint32_t)set->down.row_count);
    }
    return c;
}

static void record_router_case(device_case *t, const router_case *c) {
    const spk_cuda_top_k top = { .routing = c->logits, .choice = c->choice, .weight = c->weight };
    spk_cuda_launch_top_k(t->cuda, &top);
    for (int way = 0; way < WAYS; way++) {
        spk_cuda_launch_experts_up(t->cuda, &c->up[way]);
        spk_cuda_launch_experts_down(t->cuda, &c->down[way]);
    }
}

/* What is known of the experts of a shape so far. */
typedef struct {
    bool    is_known[EXPERTS_MAX];
    float  *h;                   /* [count][ff] as the GPU gave it first */
    double *y, *y_error;         /* [count][down_rows] of D h */
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
    expect_product(t, &down, &v, true, table->y + expert * down.row_count, table->y_error + expert * down.row_count);
    table->is_known[expert] = true;
    bounds_free(&v);
    free(value), free(error);
}

static void check_router_case(device_case *t, const expert_set *set, const router_case *c, expert_table *table,
                              const vector_bounds *x, const float *d_lent) {
    const expert_spec *spec = set->spec;
    static const char *const names[WAYS][2] = {
        { 0 },
        { "h by choice and by sums", "routed by choice and by sums" },
        { "h by choice, held and streamed", "routed by choice, held and streamed" },
        { "h by choice and by sums, held and streamed", "routed by choice and by sums, held and streamed" }
    };
    const logit_source logits = staged_logits(t, &c->logits);
    const selection want = select_of(&logits, spec->count, spec->used);
    const uint32_t parts = spk_cuda_experts_down_parts(t->cuda, &set->down, spec->used);
    const uint64_t rows = set->down.row_count;
    double *value = new_doubles(rows), *error = new_doubles(rows);
    bool is_right = check_selection(t, &want, c->choice, c->weight, spec->used);
    for (int way = 1; way < WAYS; way++) {
        same_floats(t, names[way][0], c->up[0].h, c->up[way].h, (uint64_t)spec->used * spec->ff);
        for (uint32_t p = 0; p < parts; p++) same_floats(t, names[way][1], c->down[0].routed[p], c->down[way].routed[p], rows);
    }
    for (uint32_t r = 0; r < spec->used && is_right; r++) {
        const uint32_t e = want.choice[r];
        check_known(t, set, table, x, d_lent, e, c->up[0].h + (uint64_t)r * spec->ff);
        for (uint64_t i = 0; i < rows; i++) {
            double y = table->y[e * rows + i], y_error = table->y_error[e * rows + i], size = fabs(y) + y_error;
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
    DESCRIBE("router %u top-%u, %s", experts->count, experts->used, experts->name);
    weights_drop(t);
    case_begin(t);
    expert_set set = put_experts(t, experts);
    set.down.row_count = spec->down_rows;
    expert_table table = { .h = must(malloc((uint64_t)experts->count * experts->ff * sizeof(float))),
                           .y = new_doubles((uint64_t)experts->count * spec->down_rows),
                           .y_error = new_doubles((uint64_t)experts->count * spec->down_rows) };
    const float *d_x = take_staged_as(t, experts->hidden, X_RANDOM), *d_lent = take_staged(t, experts->ff);
    const spk_cuda_source source = { .x = d_x, .count = experts->hidden };
    vector_bounds x = source_bounds(t, &source);
    uint32_t *d_step = take_flags(t, 1), *d_flags = take_flags(t, ROUTER_BATCH * WAYS);
    router_case cases[ROUTER_BATCH];
    for (uint32_t i = 0; i < ROUTER_BATCH; i++) {
        spk_cuda_signal signals[WAYS];
        for (int way = 0; way < WAYS; way++) signals[way] = (spk_cuda_signal){ d_flags + i * WAYS + way, d_step };
        cases[i] = make_router_case(t, &set, d_x, signals, (logit_pattern)i);
    }
    case_record(t);
    for (uint32_t i = 0; i < ROUTER_BATCH; i++) record_router_case(t, &cases[i]);
    spk_cuda_launch_tick(t->cuda, d_step);
    spk_cuda_step *step = NULL;
    MUST(spk_cuda_step_end(t->cuda, &step, &must_error));
    for (uint32_t done = 0; done < case_count; done += ROUTER_BATCH) {
        for (uint32_t i = 0; i < ROUTER_BATCH; i++) {
            fill_logits(host_of(t, cases[i].logits.sums), experts->count, (logit_pattern)i);
            fill_squares(host_floats(t, cases[i].logits.squares), experts->hidden, logit_rms[i] * (done % 3 == 1 ? 4 : 1));
        }
        step_check(t, step, 1);
        for (uint32_t i = 0; i < ROUTER_BATCH; i++) {
            DESCRIBE("router %u top-%u, %s, case=%u logits=%s", experts->count, experts->used, experts->name, done + i,
                     logit_names[i]);
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
