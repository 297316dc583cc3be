/* tests/checkkern_cuda_sums.h - routers: their weights as decode wants them, and their sums, by the kernel alone and by a projection,
 * which must give the same bits.
 *
 * Bounds, from kernels/router_cuda.cuh.  What 16 columns contribute is a sum in F32 with 7 roundings (norm weight, product, sums): 7 u of
 * the sum of sizes.  It is cut to +-2^19 and rounded to 2^-32.  Sums of that are exact.  Where a sum in F32 may overflow, it
 * contributes anything within the cut; a NaN contributes 2^19.  Squares: 6 roundings, and no cut.
 */
#ifndef SPK_CHECKKERN_CUDA_SUMS_H
#define SPK_CHECKKERN_CUDA_SUMS_H

#include "tests/checkkern_cuda_routing.h"

enum { GROUP = SPK_CUDA_ROUTER_GROUP };
#define CONTRIBUTION_MAX 0x1p19
#define CONTRIBUTION_STEPS 7.01

/* ---- Inputs ---- */

typedef enum {
    R_ZERO, R_HUGE_AMONG_TINY, R_SUBNORMAL, R_SMALL, R_LARGE, R_RANDOM, R_MIXED, R_AT_THE_CUT, R_OVERFLOW, R_NAN, R_INFINITE, R_COUNT
} router_pattern;
static const char *const router_names[] = { "zero",       "huge-among-tiny", "subnormal", "small", "large", "random", "magnitudes mixed",
                                            "at the cut", "overflow",        "NaN",       "infinite" };
static const x_pattern router_base[R_COUNT] = { X_ZERO,   X_HUGE_AMONG_TINY, X_SUBNORMAL, X_RANDOM, X_LARGE,  X_RANDOM,
                                                X_RANDOM, X_RANDOM,          X_RANDOM,    X_RANDOM, X_RANDOM };

static float nan_of_device(void) {           /* what it makes of any NaN: bits come back as they went */
    const uint32_t bits = 0x7fffffffu;
    float nan;
    memcpy(&nan, &bits, sizeof nan);
    return nan;
}
static void fill_router_input(router_pattern pattern, float *x, uint32_t count) {
    const uint32_t at = (uint32_t)(check_random(&random_state) % count), other = (uint32_t)(check_random(&random_state) % count);
    fill(router_base[pattern], x, count);
    for (uint32_t i = 0; i < count; i++) {
        const int r = (int)(check_random(&random_state) % 121);
        if (pattern == R_SMALL) x[i] *= 1e-5f;       /* what rounds is the unit of a sum */
        if (pattern == R_MIXED) x[i] = ldexpf(x[i], r - 60);
        if (pattern == R_AT_THE_CUT) x[i] = ldexpf(x[i], 16 + (int)(i / GROUP % 8));
        if (pattern == R_OVERFLOW) x[i] = copysignf(3e38f, x[i]);
    }
    if (pattern == R_NAN) x[at] = nan_of_device();
    if (pattern != R_INFINITE) return;
    x[at] = INFINITY;
    x[other] = -INFINITY;                    /* and now and then in one group */
    x[at / GROUP * GROUP + (at + 1) % GROUP] = count % 3 == 0 ? -INFINITY : 0.0f;
}

/* A router among the weights. */
typedef struct {
    spk_matrix experts, shared;              /* shared.data NULL: none */
    uint32_t   row_count, column_count;
    float     *rows, *norm;                  /* on the host: [row_count][column_count], [column_count] */
    const float *d_norm, *d_weights;
} test_router;

static float *arranged(const device_case *t, const test_router *r) { return (float *)(void *)(t->weights + ((const uint8_t *)r->d_weights - t->d_weights)); }
static uint64_t arranged_at(const test_router *r, uint32_t row, uint32_t column) { return ((uint64_t)(column / 4) * r->row_count + row) * 4 + column % 4; }

/* The shared expert's row, if any, is one of row_count, and of another type. */
static test_router put_router(device_case *t, uint32_t row_count, uint32_t column_count, uint32_t type, bool has_shared) {
    static const uint32_t others[] = { [SPK_TYPE_F32] = SPK_TYPE_BF16, [SPK_TYPE_F16] = SPK_TYPE_F32, [SPK_TYPE_BF16] = SPK_TYPE_F16 };
    const uint32_t expert_count = row_count - has_shared;
    const uint64_t bytes = (uint64_t)row_count * column_count * sizeof(float);
    test_router r = { .row_count = row_count, .column_count = column_count, .rows = must(malloc(bytes)) };
    r.experts = put_matrix(t, type, expert_count, column_count, W_RANDOM);
    if (has_shared) r.shared = put_matrix(t, others[type], 1, column_count, W_RANDOM);
    r.d_norm = (const float *)(const void *)take_weights(t, column_count * sizeof(float), 32);
    r.norm = (float *)(void *)(t->weights + ((const uint8_t *)r.d_norm - t->d_weights));
    r.d_weights = (const float *)(const void *)take_weights(t, bytes, 16);
    fill(X_RANDOM, r.norm, column_count);
    const spk_matrix experts = on_host(t, r.experts), shared = has_shared ? on_host(t, r.shared) : experts;
    float *to = arranged(t, &r);
    for (uint32_t i = 0; i < row_count; i++) {
        float *row = r.rows + (uint64_t)i * column_count;
        spk_layout_dequantize_row(i < expert_count ? &experts : &shared, i < expert_count ? i : 0, row);
        for (uint32_t c = 0; c < column_count; c++) to[arranged_at(&r, i, c)] = row[c] * r.norm[c];
    }
    return r;
}
static void router_free(test_router *r) { free(r->rows); }
static spk_cuda_router make_router(device_case *t, const test_router *r) {
    return (spk_cuda_router){ .weights = r->d_weights, .row_count = r->row_count, .column_count = r->column_count,
                              .sums = take_sums(t, r->row_count),
                              .squares = take_floats(t, OUTPUT, r->column_count / GROUP) };
}

/* ---- What must come out ---- */

/* Of 16 columns, from column c on: cut, not rounded.  Returns the largest error. */
static double contribution_of(const test_router *r, uint32_t row, uint32_t c, const float *x, double *value) {
    const float *w = r->rows + (uint64_t)row * r->column_count;
    double sum = 0, size = 0, x_size = 0;
    for (uint32_t i = c; i < c + GROUP; i++) {
        const double term = isfinite(x[i]) ? (double)w[i] * (double)r->norm[i] * (double)x[i] : (double)(w[i] * r->norm[i] * x[i]);
        sum += term;
        size += fabs(term);
        x_size += fabs((double)x[i]);
    }
    *value = isnan(sum) ? CONTRIBUTION_MAX : fmax(fmin(sum, CONTRIBUTION_MAX), -CONTRIBUTION_MAX);
    if (isnan(sum) || isinf(sum)) return 0;
    const double error = CONTRIBUTION_STEPS * U * size + 0x1p-150 * (x_size + 16 * CONTRIBUTION_STEPS);
    if (size + error > (double)FLT_MAX) {
        *value = 0;
        return CONTRIBUTION_MAX;
    }
    const double low = fmax(fmin(sum - error, CONTRIBUTION_MAX), -CONTRIBUTION_MAX), high = fmax(fmin(sum + error, CONTRIBUTION_MAX), -CONTRIBUTION_MAX);
    *value = (low + high) / 2;
    return low == high ? 0 : (high - low) / 2 + 0.5 / SUM_UNITS;
}

/* All that lies between sums. */
static void check_between_sums(const device_case *t, const test_router *r, const long long *d_sums) {
    const long long *got = result_of(t, d_sums);
    for (uint64_t i = 0, words = sum_words(r->row_count); i < words; i++) {
        const uint64_t row = i / 16 * 4 + i % 16;
        if (i % 16 < 4 && row < r->row_count) continue;
        EXPECT(is_poison(((const float *)(const void *)got)[2 * i]) && is_poison(((const float *)(const void *)got)[2 * i + 1]),
               "word %llu of the sums of %u rows was written", (unsigned long long)i, r->row_count);
    }
}
static void check_sums(const device_case *t, const test_router *r, const float *x, const long long *d_sums) {
    const long long *got = result_of(t, d_sums);
    for (uint32_t row = 0; row < r->row_count; row++) {
        double sum = 0, size = 0, error = 0, value;
        for (uint32_t c = 0; c < r->column_count; c += GROUP) {
            error += contribution_of(r, row, c, x, &value);
            sum += value;
            size += fabs(value);
        }
        near("sum", row, (double)got[place_of(row)] / SUM_UNITS, sum, error + 0x1p-45 * size);      /* of doubles, the latter */
    }
}
static void check_squares(const device_case *t, uint32_t column_count, const float *x, const float *d_squares) {
    const float *got = result_floats(t, d_squares);
    for (uint32_t g = 0; g < column_count / GROUP; g++) {
        double sum = 0;
        for (uint32_t i = GROUP * g; i < GROUP * (g + 1); i++) sum += (double)x[i] * (double)x[i];
        const double error = 6.01 * U * sum + GROUP * FLOOR;
        if (isnan(sum)) EXPECT(isnan(got[g]), "squares[%u]: %.9g, want a NaN", g, (double)got[g]);
        else if (isinf(sum) || sum - error > (double)FLT_MAX) EXPECT(isinf(got[g]) && got[g] > 0, "squares[%u]: %.9g, want infinity", g, (double)got[g]);
        else if (sum + error <= (double)FLT_MAX) near("squares", g, (double)got[g], sum, error);
    }
}
static void same_router(const device_case *t, const char *what, const spk_cuda_router *a, const spk_cuda_router *b) {
    const long long *x = result_of(t, a->sums), *y = result_of(t, b->sums);
    const float *u = result_floats(t, a->squares), *v = result_floats(t, b->squares);
    for (uint32_t i = 0; i < a->row_count; i++)
        EXPECT(x[place_of(i)] == y[place_of(i)], "%s: sums[%u] are %lld and %lld", what, i, x[place_of(i)], y[place_of(i)]);
    for (uint32_t g = 0; g < a->column_count / GROUP; g++)
        EXPECT((isnan(u[g]) && isnan(v[g])) || memcmp(&u[g], &v[g], sizeof *u) == 0, "%s: squares[%u] are %.9g and %.9g", what, g,
               (double)u[g], (double)v[g]);
}

/* ---- Alone ---- */

static void check_router_source(device_case *t, const test_router *r) {
    const spk_cuda_router_source source = { .experts = r->experts, .shared = r->shared, .norm_weight = r->d_norm,
                                            .out = take_floats(t, OUTPUT, (uint64_t)r->row_count * r->column_count) };
    case_record(t);
    spk_cuda_launch_router_source(t->cuda, &source);
    case_run(t, 1);
    const float *got = result_floats(t, source.out), *want = arranged(t, r);
    for (uint32_t row = 0; row < r->row_count; row++)
        for (uint32_t c = 0; c < r->column_count; c++) {
            const uint64_t at = arranged_at(r, row, c);
            EXPECT(memcmp(&got[at], &want[at], sizeof *got) == 0, "weight of row %u, column %u is %.9g, want %.9g", row, c, (double)got[at], (double)want[at]);
        }
}

/* One router, all inputs. */
static void check_router_alone(device_case *t, uint32_t row_count, uint32_t column_count, uint32_t type, bool has_shared) {
    weights_drop(t);
    case_begin(t);
    test_router r = put_router(t, row_count, column_count, type, has_shared);
    DESCRIBE("weights of a router %s %ux%u%s", spk_type_name(type), row_count, column_count, has_shared ? ", the last row shared" : "");
    check_router_source(t, &r);
    for (int p = 0; p < R_COUNT; p++) {
        DESCRIBE("sums of a router %s %ux%u%s x=%s", spk_type_name(type), row_count, column_count, has_shared ? ", the last row shared" : "",
                 router_names[p]);
        case_begin(t);
        const spk_cuda_router router = make_router(t, &r);
        float *d_x = take_staged(t, column_count);
        fill_router_input((router_pattern)p, host_floats(t, d_x), column_count);
        case_record(t);
        spk_cuda_launch_router(t->cuda, &router, d_x);
        case_run(t, 1);
        check_sums(t, &r, host_floats(t, d_x), router.sums);
        check_between_sums(t, &r, router.sums);
        check_squares(t, column_count, host_floats(t, d_x), router.squares);
    }
    router_free(&r);
}

/* ---- Out of a projection ---- */

typedef struct { gemv_spec gemv; uint32_t row_count, type; bool has_shared; } projection_spec;      /* row_count: of the router */
static const projection_spec projection_specs[] = {
    /* of 4096 columns: by kernels with held weights */
    { { "out, held", 4096, S_HEADS, 128, true, false, IN_PLACE, { { Q4K, 96, false } } }, 257, F32, true },
    { { "out, held", 4096, S_PLAIN, 0, true, false, ADDED, { { Q5K, 32, false } } }, 5, F16, true },
    { { "out, held", 4096, S_NORM, 0, true, false, ALONE, { { Q6K, 64, false } } }, 513, BF16, false },
    { { "out, held", 4096, S_HEADS, 64, true, false, IN_PLACE, { { Q8, 160, false } } }, 129, F32, true },
    { { "out, held", 4096, S_PLAIN, 0, true, false, ADDED, { { Q4K, 32, false } } }, 1, F32, false },
    { { "out, held", 4096, S_PLAIN, 0, true, false, IN_PLACE, { { Q8, 32, false } } }, 300, BF16, true },
    /* not */
    { { "out", 256, S_PLAIN, 0, true, false, IN_PLACE, { { Q4K, 64, false } } }, 13, F32, true },
    { { "out", 2048, S_HEADS, 128, true, false, ADDED, { { Q8, 96, false } } }, 128, BF16, false },
    { { "out", 512, S_PLAIN, 0, false, false, ALONE, { { BF16, 96, false } } }, 5, F32, true },
    { { "out", 4096, S_NORM, 0, false, false, IN_PLACE, { { Q5K, 32, false } } }, 257, F32, true },
    { { "out", 6144, S_PLAIN, 0, true, false, IN_PLACE, { { Q6K, 64, false } } }, 300, F16, false },
    /* Qwen3.6-35B-A3B, safe and native; Qwen3-30B-A3B; a wide one */
    { { "out, router", 4096, S_HEADS, 128, true, true, IN_PLACE, { { Q4K, 2048, false } } }, 257, F32, true },
    { { "out, router", 4096, S_HEADS, 128, true, true, IN_PLACE, { { Q8, 2048, false } } }, 257, BF16, true },
    { { "out, router", 4096, S_PLAIN, 0, true, true, IN_PLACE, { { Q4K, 2048, false } } }, 128, F32, false },
    { { "out, router", 4096, S_PLAIN, 0, true, true, IN_PLACE, { { Q6K, 4096, false } } }, 513, F32, true },
};

/* Held, streamed, and by the kernel alone of what the first made. */
typedef struct { spk_cuda_gemv held, streamed; spk_cuda_router alone; } projection_case;
static projection_case make_projection(device_case *t, const projection_spec *spec, const test_router *r, x_pattern x) {
    projection_case c = { .held = make_gemv(t, &spec->gemv, W_RANDOM, x) };
    c.streamed = streamed_twin(t, &c.held);
    c.held.router = make_router(t, r);
    c.streamed.router = make_router(t, r);
    c.alone = make_router(t, r);
    return c;
}
static void run_projection(device_case *t, const projection_case *c, const test_router *r) {
    const float *d_y = c->held.segments[0].y;
    case_record(t);
    spk_cuda_launch_gemv(t->cuda, &c->held);
    spk_cuda_launch_router(t->cuda, &c->alone, d_y);
    spk_cuda_launch_gemv(t->cuda, &c->streamed);
    case_run(t, 1);
    check_sums(t, r, result_floats(t, d_y), c->alone.sums);
    check_sums(t, r, result_floats(t, d_y), c->held.router.sums);
    check_between_sums(t, r, c->alone.sums);
    check_between_sums(t, r, c->held.router.sums);
    check_between_sums(t, r, c->streamed.router.sums);
    check_squares(t, r->column_count, result_floats(t, d_y), c->held.router.squares);
    same_router(t, "by the projection and alone", &c->held.router, &c->alone);
    same_router(t, "by the projection, held and streamed", &c->held.router, &c->streamed.router);
    check_same_gemv(t, &c->held, &c->streamed);
}

static void describe_projection(const projection_spec *spec, w_pattern w, x_pattern x, const char *y_name) {
    describe_gemv(&spec->gemv, w, x);
    const size_t at = strlen(case_text);
    (void)snprintf(case_text + at, sizeof case_text - at, ", router %s x%u%s%s", spk_type_name(spec->type), spec->row_count, y_name != NULL ? " y=" : "",
                   y_name != NULL ? y_name : "");
}
static void check_projection(device_case *t, const projection_spec *spec) {
    static const x_pattern patterns[] = { X_CODES, X_HUGE_AMONG_TINY, X_RANDOM };
    const uint32_t column_count = spec->gemv.segments[0].rows;
    for (int p = 0; p < 3; p++) {
        describe_projection(spec, W_RANDOM, patterns[p], NULL);
        weights_drop(t);
        case_begin(t);
        test_router r = put_router(t, spec->row_count, column_count, spec->type, spec->has_shared);
        const projection_case c = make_projection(t, spec, &r, patterns[p]);
        run_projection(t, &c, &r);
        check_gemv_outputs(t, &c.held);
        router_free(&r);
    }
    /* y is the residual. */
    projection_spec adding = *spec;
    adding.gemv.residual = ADDED;
    for (int p = 0; p < R_COUNT; p++) {
        describe_projection(&adding, W_RANDOM, X_ZERO, router_names[p]);
        weights_drop(t);
        case_begin(t);
        test_router r = put_router(t, spec->row_count, column_count, spec->type, spec->has_shared);
        const projection_case c = make_projection(t, &adding, &r, X_ZERO);
        float *residual = host_floats(t, c.held.segments[0].residual);
        fill_router_input((router_pattern)p, residual, column_count);
        run_projection(t, &c, &r);
        const float *y = result_floats(t, c.held.segments[0].y);
        for (uint32_t i = 0; i < column_count; i++)
            EXPECT(y[i] == residual[i] || (isnan(y[i]) && isnan(residual[i])), "y[%u] is %.9g, want the residual %.9g", i, (double)y[i], (double)residual[i]);
        router_free(&r);
    }
}

static void check_router_sums(device_case *t, bool is_quick) {
    static const uint32_t rows[] = { 1, 5, 128, 129, 257, 300, 513 }, columns[] = { 32, 2048, 4096 },
                          types[] = { SPK_TYPE_F32, SPK_TYPE_F16, SPK_TYPE_BF16 };
    for (uint32_t r = 0; r < 7; r++)
        for (uint32_t i = 0; i < 18; i++) {
            const uint32_t c = i % 3, type = i / 3 % 3;
            const bool has_shared = i / 9 != 0;
            if ((is_quick && (c != r % 3 || type != (r + r / 3) % 3 || has_shared != (r % 2 != 0))) || (has_shared && rows[r] == 1)) continue;
            check_router_alone(t, rows[r], columns[c], types[type], has_shared);
        }
    for (size_t i = 0; i < sizeof projection_specs / sizeof *projection_specs; i++)
        if (!is_quick || !projection_specs[i].gemv.is_full) check_projection(t, &projection_specs[i]);
}

#endif
