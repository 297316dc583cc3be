/* tests/checkkern_cuda_gemv.h - spk_cuda_launch_gemv: all types and widths, sources, segments, pairs, the greedy end; and that
 * what it folds in gives the bits of the kernels that it replaces.
 *
 * Bounds: checkkern_cuda_product.h.
 */
#ifndef SPK_CHECKKERN_CUDA_GEMV_H
#define SPK_CHECKKERN_CUDA_GEMV_H

#include "tests/checkkern_cuda_product.h"

static const uint32_t gpu_types[] = { SPK_TYPE_F32,  SPK_TYPE_F16,  SPK_TYPE_BF16, SPK_TYPE_Q8_0,
                                      SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K };
enum { GPU_TYPE_COUNT = 7 };
static const float GPU_EPS = 1e-6f;

/* ---- Sources ---- */

typedef struct {
    const char *name;
    uint32_t    add_count;
    bool        has_norm, has_squares, has_factor, has_x_out;
} source_kind;
enum { S_PLAIN, S_NORM, S_ADD1, S_ADD2, S_ADD3, S_SUM, S_HEADS, S_FACTOR, S_KIND_COUNT };
static const source_kind source_kinds[S_KIND_COUNT] = {
    { "plain", 0, false, false, false, false },     { "norm", 0, true, false, false, false },
    { "add1 norm", 1, true, false, false, true },   { "add2 norm", 2, true, false, false, true },
    { "add3 norm", 3, true, false, false, true },   { "add3", 3, false, false, false, true },
    { "head norms", 0, false, true, false, false }, { "factor", 0, false, false, true, false },
};

static spk_cuda_source make_source(device_case *t, const source_kind *kind, uint32_t count, uint32_t head_dim,
                                   bool has_rest, x_pattern pattern) {
    spk_cuda_source s = { .x = take_staged_as(t, count, pattern), .count = count, .has_rest = has_rest, .eps = GPU_EPS };
    for (uint32_t i = 0; i < kind->add_count; i++)
        s.add[i] = take_staged_as(t, count, i == 0 ? X_RANDOM : X_HUGE_AMONG_TINY);
    if (kind->has_norm) s.norm_weight = take_input_as(t, count, X_RANDOM);
    if (kind->has_squares) {         /* of zeros, of small and of large heads */
        float *d_squares = take_staged_as(t, count / 32, X_RANDOM), *squares = host_floats(t, d_squares);
        for (uint32_t i = 0; i < count / 32; i++)
            squares[i] = pattern == X_ZERO ? 0 : ldexpf(fabsf(squares[i]), (int)(i % 5) * 12 - 24);
        s.squares = d_squares;
        s.head_dim = head_dim;
    }
    if (kind->has_factor) {
        float *d_factor = take_staged(t, 1);
        *host_floats(t, d_factor) = pattern == X_CODES ? 0.5f : 0.3f;
        s.factor = d_factor;
    }
    if (kind->has_x_out) s.x_out = take_floats(t, OUTPUT, count);
    return s;
}

static void check_x_out(const device_case *t, const spk_cuda_source *s) {
    for (uint32_t i = 0; s->x_out != NULL && i < s->count; i++) {
        float sum = host_floats(t, s->x)[i];
        for (int a = 0; a < 3; a++)
            if (s->add[a] != NULL) sum += host_floats(t, s->add[a])[i];       /* in this order: what an ADD kernel gives */
        float got = result_floats(t, s->x_out)[i];
        EXPECT(memcmp(&got, &sum, sizeof sum) == 0 || (got == 0 && sum == 0), "x_out[%u]: got %.9g want %.9g", i,
               (double)got, (double)sum);
    }
}

/* ---- Cases ---- */

typedef struct { uint32_t type, rows; bool is_pair; } segment_spec;
typedef enum { ALONE, ADDED, IN_PLACE } residual_kind;  /* of the first segment: none, apart from y, y itself */
static const char *const residual_names[] = { "", " + residual", " + y" };
typedef struct {
    const char   *name;
    uint32_t      count, kind, head_dim;
    bool          has_rest, is_full;
    residual_kind residual;
    segment_spec  segments[SPK_CUDA_SEGMENT_MAX];       /* rows 0: no more */
} gemv_spec;

/* Outputs of all segments but the first are not aligned to more than a float. */
static spk_cuda_gemv make_gemv(device_case *t, const gemv_spec *spec, w_pattern w, x_pattern x) {
    spk_cuda_gemv g = { .source = make_source(t, &source_kinds[spec->kind], spec->count, spec->head_dim, spec->has_rest,
                                              x) };
    for (uint32_t i = 0; i < SPK_CUDA_SEGMENT_MAX && spec->segments[i].rows != 0; i++) {
        const segment_spec *from = &spec->segments[i];
        spk_cuda_segment *s = &g.segments[g.segment_count++];
        put_pair(t, from->type, layout_of(from->type), from->rows, spec->count, w, &s->w, from->is_pair ? &s->up : NULL);
        s->y = take(t, OUTPUT, from->rows * sizeof(float), i == 0 ? 0 : sizeof(float));
    }
    spk_cuda_segment *first = &g.segments[0];
    if (spec->residual == ADDED) first->residual = take_input_as(t, spec->segments[0].rows, X_RANDOM);
    if (spec->residual == IN_PLACE) {
        first->residual = first->y;
        fill(X_RANDOM, host_floats(t, first->y), spec->segments[0].rows);
    }
    return g;
}

static void check_gemv_outputs(device_case *t, const spk_cuda_gemv *g) {
    vector_bounds v = source_bounds(t, &g->source);
    for (uint32_t i = 0; i < g->segment_count; i++) {
        const spk_cuda_segment *s = &g->segments[i];
        double *value = new_doubles(s->w.row_count), *error = new_doubles(s->w.row_count);
        char what[32];
        (void)snprintf(what, sizeof what, "segment %u row", i);
        if (s->up.data != NULL) expect_pair(t, &s->w, &s->up, &v, g->source.has_rest, value, error);
        else expect_product(t, &s->w, &v, g->source.has_rest, value, error);
        for (uint64_t r = 0; s->residual != NULL && r < s->w.row_count; r++) {
            value[r] += (double)host_floats(t, s->residual)[r];
            error[r] += U * fabs(value[r]);
        }
        near_floats(t, what, s->y, value, error, s->w.row_count);
        free(value), free(error);
    }
    check_x_out(t, &g->source);
    bounds_free(&v);
}

/* The same launch by the streaming kernel, into outputs of its own. */
static spk_cuda_gemv streamed_twin(device_case *t, const spk_cuda_gemv *g) {
    spk_cuda_gemv twin = *g;
    twin.is_streamed = true;
    if (g->source.x_out != NULL) twin.source.x_out = take_floats(t, OUTPUT, g->source.count);
    for (uint32_t i = 0; i < g->segment_count; i++) {
        const spk_cuda_segment *from = &g->segments[i];
        spk_cuda_segment *to = &twin.segments[i];
        to->y = take_floats(t, OUTPUT, from->w.row_count);
        if (from->residual != from->y) continue;
        to->residual = to->y;
        memcpy(host_floats(t, to->y), host_floats(t, from->y), from->w.row_count * sizeof(float));
    }
    return twin;
}
static void check_same_gemv(const device_case *t, const spk_cuda_gemv *a, const spk_cuda_gemv *b) {
    for (uint32_t i = 0; i < a->segment_count; i++)
        same_floats(t, "held and streamed", a->segments[i].y, b->segments[i].y, a->segments[i].w.row_count);
    if (a->source.x_out != NULL) same_floats(t, "x_out, held and streamed", a->source.x_out, b->source.x_out, a->source.count);
}

static void describe_gemv(const gemv_spec *spec, w_pattern w, x_pattern x) {
    int at = snprintf(case_text, sizeof case_text, "gemv %s K=%u %s%s%s w=%s x=%s:", spec->name, spec->count,
                      source_kinds[spec->kind].name, spec->has_rest ? " two int8" : "", residual_names[spec->residual],
                      w_names[w], x_names[x]);
    for (uint32_t i = 0; i < SPK_CUDA_SEGMENT_MAX && spec->segments[i].rows != 0 && at < (int)sizeof case_text; i++)
        at += snprintf(case_text + at, sizeof case_text - (size_t)at, " %s%s x%u", spk_type_name(spec->segments[i].type),
                       spec->segments[i].is_pair ? " pair" : "", spec->segments[i].rows);
}

/* A launch that is described and made. */
static void run_gemv_case(device_case *t, const spk_cuda_gemv *g) {
    spk_cuda_gemv streamed = streamed_twin(t, g);
    case_record(t);
    spk_cuda_launch_gemv(t->cuda, g);
    spk_cuda_launch_gemv(t->cuda, &streamed);
    case_run(t, 1);
    check_gemv_outputs(t, g);
    check_same_gemv(t, g, &streamed);
}
static void check_gemv_case(device_case *t, const gemv_spec *spec, w_pattern w, x_pattern x) {
    describe_gemv(spec, w, x);
    case_begin(t);
    weights_drop(t);
    spk_cuda_gemv g = make_gemv(t, spec, w, x);
    run_gemv_case(t, &g);
}

/* ---- One type at a time, all widths and patterns ---- */

static const uint32_t gemv_counts[] = { 256, 512, 768, 1024, 2048, 4096, 6144, 9216 };

static void check_gemv_types(device_case *t, bool is_quick) {
    static const uint32_t rows[] = { 1, 33, 100 }, float_counts[] = { 32, 96, 2080 };
    uint32_t counter = 0;
    for (uint32_t type = 0; type < GPU_TYPE_COUNT; type++) {
        bool is_float = is_float_type(gpu_types[type]);
        for (uint32_t k = 0; k < 8 + (is_float ? 3u : 0u); k++) {
            uint32_t count = k < 8 ? gemv_counts[k] : float_counts[k - 8];
            for (uint32_t r = 0; r < 3; r++) {
                if (is_quick && (counter++ % 3 != 0 || count > 2100)) continue;
                gemv_spec spec = {
                    .name = "one", .count = count, .kind = S_PLAIN, .segments = { { gpu_types[type], rows[r], false } }
                };
                for (size_t i = 0; i < sizeof matmul_cases / sizeof *matmul_cases; i++) {
                    spec.has_rest = i % 2 != r % 2;
                    check_gemv_case(t, &spec, matmul_cases[i].w, matmul_cases[i].x);
                }
                for (int rest = 0; rest < 2; rest++) {
                    spec.has_rest = rest;
                    check_gemv_case(t, &spec, W_RANDOM, X_CODES);
                    check_gemv_case(t, &spec, W_RANDOM, X_ONE_HOT);
                    check_gemv_case(t, &spec, W_RANDOM, X_RANDOM);
                }
            }
        }
    }
}

/* ---- Attention's parts ---- */

/* How the tops of a head's parts lie: near each other; all the same; one part's far above the others', none of which counts then; one
 * part that is of no position. */
typedef enum { TOPS_NEAR, TOPS_EQUAL, TOPS_FAR, TOPS_EMPTY, TOPS_COUNT } tops_pattern;
static const char *const tops_names[] = { "near", "equal", "far", "empty" };

/* (top, total) as the attention kernel has them: totals from 2^14 to 2^21, at most 128 weights of at most 2^14. */
static void fill_totals(float *totals, uint32_t head_count, uint32_t part_count, tops_pattern tops) {
    for (uint32_t head = 0; head < head_count; head++) {
        const uint32_t other = (uint32_t)(check_random(&random_state) % part_count);
        for (uint32_t p = 0; p < part_count; p++) {
            const float r = check_uniform(&random_state);
            float *own = totals + 2 * (p * head_count + head);
            own[0] = tops == TOPS_NEAR ? 12 * r : tops == TOPS_FAR ? (p == other ? -30000 : -30300) + r : 7;
            if (tops == TOPS_EMPTY && p == other) own[0] = -INFINITY;
            own[1] = own[0] == -INFINITY ? 0 : ldexpf(1 + fabsf(check_uniform(&random_state)), 14 + (int)(check_random(&random_state) % 7));
        }
    }
}
/* The source is attention's output at a position.  Parts that are not there, and their totals, are NaN. */
static void put_parts(device_case *t, spk_cuda_source *s, uint32_t head_dim, uint32_t position, tops_pattern tops, x_pattern x) {
    const uint32_t part_count = attention_part_count(position), head_count = s->count / head_dim;
    float *d_x = take_staged(t, SPK_CUDA_PARTS_MAX * s->count), *d_totals = take_staged(t, SPK_CUDA_PARTS_MAX * 2 * head_count);
    uint32_t *d_position = take(t, INPUT, sizeof position, 0);
    memset(host_floats(t, d_x), 0xff, SPK_CUDA_PARTS_MAX * s->count * sizeof(float));
    memset(host_floats(t, d_totals), 0xff, SPK_CUDA_PARTS_MAX * 2 * head_count * sizeof(float));
    for (uint32_t p = 0; p < part_count; p++) fill(x, host_floats(t, d_x) + p * s->count, s->count);
    if (part_count > 1) fill_totals(host_floats(t, d_totals), head_count, part_count, tops);
    memcpy(host_of(t, d_position), &position, sizeof position);
    s->x = d_x;
    s->part_totals = d_totals;
    s->d_position = d_position;
    s->head_dim = head_dim;
}

static void check_parts_case(device_case *t, const gemv_spec *spec, uint32_t position, tops_pattern tops, x_pattern x) {
    describe_gemv(spec, W_RANDOM, x);
    const size_t at = strlen(case_text);
    (void)snprintf(case_text + at, sizeof case_text - at, ", heads of %u, position %u, tops %s", spec->head_dim, position, tops_names[tops]);
    case_begin(t);
    weights_drop(t);
    spk_cuda_gemv g = make_gemv(t, spec, W_RANDOM, x);
    put_parts(t, &g.source, spec->head_dim, position, tops, x);
    run_gemv_case(t, &g);
}

/* Positions on both sides of where a part begins; a width whose kernel holds its weights, and others. */
static void check_gemv_parts(device_case *t, bool is_quick) {
    static const uint32_t positions[] = { 0, 127, 128, 255, 256, 383, 384, 511, 512, 70000 }, head_dims[] = { 64, 128, 256 };
    static const uint32_t held_types[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K, SPK_TYPE_Q8_0 };
    static const x_pattern patterns[] = { X_RANDOM, X_HUGE_AMONG_TINY, X_CODES, X_ZERO };
    for (uint32_t n = 0; n < sizeof positions / sizeof *positions; n++)
        for (uint32_t tops = 0; tops < TOPS_COUNT; tops++)
            for (uint32_t p = 0; p < (is_quick ? 1 : 4); p++) {
                const x_pattern x = patterns[is_quick ? (n / 2 + tops) % 2 : p];
                const uint32_t turn = n + tops + p;
                gemv_spec spec = { .name = "parts", .count = 4096, .head_dim = head_dims[turn % 3], .has_rest = true, .residual = IN_PLACE,
                                   .segments = { { held_types[turn % 4], 33, false } } };
                check_parts_case(t, &spec, positions[n], (tops_pattern)tops, x);
                spec.count = tops % 2 == 0 ? 768 : 2048;
                spec.has_rest = n % 4 < 2;
                spec.segments[0].type = gpu_types[turn % GPU_TYPE_COUNT];
                check_parts_case(t, &spec, positions[n], (tops_pattern)tops, x);
            }
}

static void check_gemv_sources(device_case *t, bool is_quick) {
    static const x_pattern patterns[] = { X_ZERO,        X_HUGE_AMONG_TINY, X_SUBNORMAL, X_LARGE,
                                          X_ALTERNATING, X_CODES,           X_RANDOM };
    static const uint32_t head_dims[] = { 32, 64, 128 };
    for (uint32_t kind = 0; kind < S_KIND_COUNT; kind++)
        for (uint32_t k = 0; k < 8; k++) {
            if (is_quick && (k % 2 != kind % 2 || gemv_counts[k] > 2048)) continue;
            for (uint32_t p = 0; p < 7; p++) {
                gemv_spec spec = { .name = "source",
                                   .count = gemv_counts[k],
                                   .kind = kind,
                                   .head_dim = head_dims[(k + p) % 3],
                                   .has_rest = p % 2 == 0,
                                   .residual = (residual_kind)((k + p) % 3),
                                   .segments = { { SPK_TYPE_F32, 33, false },
                                                 { SPK_TYPE_Q8_0, 33, false },
                                                 { SPK_TYPE_Q4_K, 5, false } } };
                check_gemv_case(t, &spec, W_RANDOM, patterns[p]);
                spec.has_rest = !spec.has_rest;
                check_gemv_case(t, &spec, W_RANDOM, patterns[p]);
            }
        }
    check_gemv_parts(t, is_quick);
}

/* Short for tables, here and in the headers that include this one. */
#define F32 SPK_TYPE_F32
#define F16 SPK_TYPE_F16
#define BF16 SPK_TYPE_BF16
#define Q8 SPK_TYPE_Q8_0
#define Q4K SPK_TYPE_Q4_K
#define Q5K SPK_TYPE_Q5_K
#define Q6K SPK_TYPE_Q6_K
static const gemv_spec gemv_launches[] = {
    { "four types", 2048, S_ADD2, 0, true, false, ALONE,
      { { Q8, 100, false }, { Q4K, 33, false }, { F32, 32, false }, { F32, 1, false } } },
    { "four types", 768, S_NORM, 0, false, false, ALONE,
      { { Q6K, 40, false }, { Q5K, 70, false }, { F16, 9, false }, { BF16, 130, false } } },
    { "floats first", 1280, S_ADD1, 0, true, false, ADDED,
      { { F32, 5, false }, { Q5K, 31, false }, { BF16, 3, false }, { Q6K, 64, false } } },
    { "four floats", 512, S_PLAIN, 0, false, false, IN_PLACE,
      { { F32, 1, false }, { F16, 1, false }, { BF16, 1, false }, { F32, 700, false } } },
    { "floats and pair", 1024, S_ADD1, 0, false, false, ALONE, { { F32, 12, false }, { F32, 1, false }, { Q4K, 96, true } } },
    { "pairs", 512, S_NORM, 0, false, false, ALONE,
      { { Q8, 33, true }, { Q4K, 1, true }, { BF16, 5, true }, { Q6K, 40, true } } },
    { "pairs", 9216, S_PLAIN, 0, true, false, ALONE, { { Q5K, 9, true }, { F16, 100, true }, { F32, 2, true } } },
    { "one row", 256, S_HEADS, 32, true, false, ADDED, { { Q6K, 1, false } } },
    /* Qwen3.6-35B-A3B: GDN in and out, attention in, shared expert; recipe safe, then native */
    { "gdn in", 2048, S_ADD3, 0, true, true, ALONE,
      { { Q4K, 8192, false }, { Q4K, 4096, false }, { F32, 32, false }, { F32, 32, false } } },
    { "gdn in", 2048, S_ADD2, 0, true, true, ALONE,
      { { Q8, 8192, false }, { Q8, 4096, false }, { F32, 32, false }, { F32, 32, false } } },
    { "gdn out", 4096, S_HEADS, 128, true, true, IN_PLACE, { { Q4K, 2048, false } } },
    { "gdn out", 4096, S_HEADS, 128, true, true, IN_PLACE, { { Q8, 2048, false } } },
    { "attention in", 2048, S_ADD3, 0, true, true, ALONE, { { Q4K, 8192, false }, { Q8, 512, false }, { Q8, 512, false } } },
    { "attention out", 4096, S_PLAIN, 0, true, true, IN_PLACE, { { Q4K, 2048, false } } },
    { "shared", 2048, S_NORM, 0, false, true, ALONE, { { Q4K, 512, true } } },
    { "shared", 2048, S_NORM, 0, false, true, ALONE, { { Q8, 512, true } } },
    { "head", 2048, S_ADD3, 0, false, true, ALONE, { { Q6K, 248320, false } } },
    { "head", 2048, S_NORM, 0, false, true, ALONE, { { Q4K, 248317, false } } },
    { "head", 2048, S_FACTOR, 0, false, true, ALONE, { { Q5K, 20001, false } } },
    { "head", 2048, S_NORM, 0, false, true, ALONE, { { Q8, 20002, false } } },
    /* long enough for that kernel on the emulator's six SMs, with a last row group that is not whole */
    { "long", 2048, S_ADD3, 0, false, false, ALONE, { { Q6K, 1001, false } } },
    { "long", 2048, S_NORM, 0, false, false, ALONE, { { Q4K, 830, false } } },
    { "long", 2048, S_FACTOR, 0, false, false, ALONE, { { Q5K, 779, false } } },
    { "long", 2048, S_ADD2, 0, false, false, ALONE, { { Q8, 777, false } } },
    /* Qwen3-30B-A3B */
    { "attention in", 2048, S_ADD2, 0, true, true, ALONE, { { Q4K, 4096, false }, { Q4K, 512, false }, { Q6K, 512, false } } },
    /* what kernels with held weights are for, with rows that are no multiple of a tile's */
    { "held", 2048, S_NORM, 0, true, false, ALONE, { { Q4K, 97, false }, { Q4K, 5, false }, { F32, 31, false }, { BF16, 2, false } } },
    { "held, five", 2048, S_ADD2, 0, true, false, ADDED, { { Q5K, 70, false }, { F16, 3, false } } },
    { "held, six", 2048, S_FACTOR, 0, true, false, IN_PLACE, { { Q6K, 33, false } } },
    { "held, eight", 2048, S_ADD3, 0, true, false, ALONE, { { Q8, 41, false }, { Q8, 8, false }, { Q8, 1, false } } },
    { "held, two types", 2048, S_NORM, 0, true, false, ALONE, { { Q4K, 66, false }, { Q4K, 12, false }, { Q6K, 10, false } } },
    { "held, two types", 2048, S_NORM, 0, true, false, ALONE, { { Q4K, 66, false }, { Q8, 12, false }, { Q8, 10, false } } },
    { "held, one int8", 2048, S_NORM, 0, false, false, ALONE, { { Q4K, 97, false } } },
    { "held, one int8", 2048, S_PLAIN, 0, false, false, ADDED, { { Q8, 97, false } } },
    { "held pair", 2048, S_ADD1, 0, false, false, ALONE, { { Q4K, 90, true } } },
    { "held pair", 2048, S_NORM, 0, false, false, ALONE, { { Q8, 34, true } } },
    { "floats and pair", 2048, S_NORM, 0, false, false, ADDED, { { BF16, 12, false }, { Q8, 34, true } } },
    { "one int8 and floats", 2048, S_PLAIN, 0, false, false, ADDED, { { Q8, 97, false }, { F32, 2, false } } },
    { "plain and pair", 2048, S_NORM, 0, false, false, ALONE, { { Q4K, 33, false }, { Q4K, 40, true } } },     /* streamed, then */
    { "held, floats alone", 2048, S_NORM, 0, false, false, ALONE, { { F32, 12, false }, { F16, 3, false } } },
    { "held, wide", 4096, S_HEADS, 128, true, false, IN_PLACE, { { Q4K, 35, false } } },
    { "held, wide", 4096, S_PLAIN, 0, true, false, ADDED, { { Q5K, 9, false } } },
    { "held, wide", 4096, S_NORM, 0, true, false, ALONE, { { Q6K, 18, false }, { Q6K, 1, false } } },
    { "held, wide", 4096, S_HEADS, 32, true, false, ALONE, { { Q8, 35, false } } },
    /* dense */
    { "ffn up", 4096, S_ADD1, 0, false, true, ALONE, { { Q4K, 9216, true } } },
    { "ffn down", 9216, S_PLAIN, 0, true, true, IN_PLACE, { { Q6K, 4096, false } } },
};

static void check_gemv_launches(device_case *t, bool is_quick) {
    for (size_t i = 0; i < sizeof gemv_launches / sizeof *gemv_launches; i++) {
        if (is_quick && gemv_launches[i].is_full) continue;
        check_gemv_case(t, &gemv_launches[i], W_RANDOM, X_CODES);
        check_gemv_case(t, &gemv_launches[i], W_RANDOM, X_HUGE_AMONG_TINY);
        check_gemv_case(t, &gemv_launches[i], W_RANDOM, X_RANDOM);
    }
}

/* ---- The greedy end ---- */

enum { GREEDY_CONTEXT = 8, GREEDY_POSITION = 3, GREEDY_STEPS = 3, GREEDY_STEP = 70000 };

/* A sequence at GREEDY_POSITION, all tokens free. */
static spk_cuda_sequence take_sequence(device_case *t, region_kind step_kind, uint32_t step) {
    spk_cuda_sequence q = { .d_tokens = take(t, OUTPUT, (GREEDY_CONTEXT + 1) * 4, 0),
                            .d_chosen = take(t, OUTPUT, (GREEDY_CONTEXT + 1) * 4, 0),
                            .d_position = take(t, OUTPUT, 4, 0),
                            .d_step = take(t, step_kind, 4, 0) };
    uint32_t *tokens = host_of(t, q.d_tokens);
    for (int i = 0; i <= GREEDY_CONTEXT; i++) tokens[i] = SPK_CUDA_TOKEN_FREE;
    *(uint32_t *)host_of(t, q.d_position) = GREEDY_POSITION;
    *(uint32_t *)host_of(t, q.d_step) = step;
    return q;
}
static void end_greedily(device_case *t, spk_cuda_gemv *g, const spk_cuda_sequence *q) {
    g->greedy = q;
    g->d_best = take(t, COUNTER, sizeof *g->d_best, 0);
    g->d_arrivals = take(t, COUNTER, sizeof *g->d_arrivals, 0);
    memset(host_of(t, g->d_best), 0, sizeof *g->d_best);
    memset(host_of(t, g->d_arrivals), 0, sizeof *g->d_arrivals);
}

/* Three steps of one launch.  tokens[position + 1] is free, given or free again; rows may all be equal. */
static void check_greedy_case(device_case *t, uint32_t type, uint32_t rows, uint32_t count, w_pattern w, bool is_alone) {
    DESCRIBE("greedy %s rows=%u K=%u w=%s", spk_type_name(type), rows, count, w_names[w]);
    const gemv_spec spec = { .count = count,
                             .kind = S_NORM,
                             .segments = { { type, rows, false }, { SPK_TYPE_F32, 3, false } } };
    case_begin(t);
    weights_drop(t);
    spk_cuda_gemv g = make_gemv(t, &spec, w, X_RANDOM);
    if (is_alone) g.segment_count = 1;
    const spk_cuda_sequence q = take_sequence(t, OUTPUT, GREEDY_STEP);
    const uint32_t given = rows + 7;
    ((uint32_t *)host_of(t, q.d_tokens))[GREEDY_POSITION + 2] = given;
    end_greedily(t, &g, &q);
    case_record(t);
    spk_cuda_launch_gemv(t->cuda, &g);
    case_run(t, GREEDY_STEPS);
    check_gemv_outputs(t, &g);
    const float *y = result_floats(t, g.segments[0].y);
    uint32_t best = 0;
    for (uint32_t r = 1; r < rows; r++) if (y[r] > y[best]) best = r;
    const uint32_t *chosen = result_of(t, q.d_chosen), *after = result_of(t, q.d_tokens);
    EXPECT(*(const uint32_t *)result_of(t, q.d_position) == GREEDY_POSITION + GREEDY_STEPS, "position is %u",
           *(const uint32_t *)result_of(t, q.d_position));
    EXPECT(*(const uint32_t *)result_of(t, q.d_step) == GREEDY_STEP + GREEDY_STEPS, "the count of steps is %u",
           *(const uint32_t *)result_of(t, q.d_step));
    for (uint32_t i = 0; i <= GREEDY_CONTEXT; i++) {
        bool is_new = i > GREEDY_POSITION && i <= GREEDY_POSITION + GREEDY_STEPS;
        uint32_t want = is_new ? best : 0xA5A5A5A5u, token = i == GREEDY_POSITION + 2 ? given
                                                             : is_new                 ? best
                                                                                      : SPK_CUDA_TOKEN_FREE;
        EXPECT(chosen[i] == want, "chosen[%u] is %u, want %u", i, chosen[i], want);
        EXPECT(after[i] == token, "tokens[%u] is %u, want %u", i, after[i], token);
    }
}

static void check_greedy(device_case *t, bool is_quick) {
    static const uint32_t rows[] = { 1, 2, 33, 1000, 5003, 151936 };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (is_quick && rows[i] > 1000) continue;
        check_greedy_case(t, SPK_TYPE_Q6_K, rows[i], 512, W_RANDOM, false);
        check_greedy_case(t, SPK_TYPE_F32, rows[i], 512, W_ALL_ONES, false);      /* all rows equal: the first wins */
        check_greedy_case(t, SPK_TYPE_Q4_K, rows[i], 256, W_ZERO, false);
        check_greedy_case(t, SPK_TYPE_BF16, rows[i], 96, W_RANDOM, false);
    }
    /* Alone, and long on this device; all rows equal: the first wins. */
    const uint32_t long_rows = 140 * spk_cuda_sm_count(t->cuda) + 1;
    check_greedy_case(t, SPK_TYPE_Q6_K, long_rows, 2048, W_RANDOM, true);
    check_greedy_case(t, SPK_TYPE_Q4_K, long_rows, 2048, W_ZERO, true);
}

/* ---- The same bits, folded in or not ---- */

/* x and its adds in one ADD kernel. */
static void launch_sum(device_case *t, const spk_cuda_source *s, float *out) {
    spk_cuda_elementwise add = {
        .op = SPK_CUDA_ADD, .a = s->x, .b = s->add[0], .c = s->add[1], .d = s->add[2], .out = out, .count = s->count
    };
    spk_cuda_launch_elementwise(t->cuda, &add);
}

/* Sums by an ADD kernel and the norm by its own kernel, then the product with what is left to do (factor). */
static void check_folded_norm(device_case *t, uint32_t kind, uint32_t type, uint32_t count, bool has_rest) {
    const gemv_spec spec = { .name = "folded norm",
                             .count = count,
                             .kind = kind,
                             .has_rest = has_rest,
                             .segments = { { type, 65, false }, { F32, 9, false } } };
    describe_gemv(&spec, W_RANDOM, X_RANDOM);
    case_begin(t);
    weights_drop(t);
    spk_cuda_gemv fused = make_gemv(t, &spec, W_RANDOM, X_RANDOM), plain = fused;
    const spk_cuda_source *s = &fused.source;
    float *sum = take_floats(t, OUTPUT, count), *normed = take_floats(t, OUTPUT, count),
          *factor = take_floats(t, OUTPUT, 1), *y[2];
    for (uint32_t i = 0; i < 2; i++) plain.segments[i].y = y[i] = take_floats(t, OUTPUT, fused.segments[i].w.row_count);
    case_record(t);
    spk_cuda_launch_gemv(t->cuda, &fused);
    if (s->add[0] != NULL) launch_sum(t, s, sum);
    spk_cuda_norm norm = {
        .source = { .x = s->add[0] != NULL ? sum : s->x, .norm_weight = s->norm_weight, .eps = s->eps, .count = count },
        .out = normed,
        .factor = factor
    };
    spk_cuda_launch_norm(t->cuda, &norm);
    plain.source = (spk_cuda_source){ .x = normed, .factor = factor, .count = count, .has_rest = has_rest };
    spk_cuda_launch_gemv(t->cuda, &plain);
    case_run(t, 1);
    for (uint32_t i = 0; i < 2; i++)
        same_floats(t, "folded norm", fused.segments[i].y, y[i], fused.segments[i].w.row_count);
    if (s->x_out != NULL) same_floats(t, "folded sum", s->x_out, sum, count);
}

/* A residual against an ADD kernel. */
static void check_folded_residual(device_case *t, uint32_t type, uint32_t count, bool has_rest) {
    const gemv_spec spec = { .name = "folded sum", .count = count, .kind = S_NORM, .has_rest = has_rest, .residual = ADDED,
                             .segments = { { type, 100, false } } };
    describe_gemv(&spec, W_RANDOM, X_RANDOM);
    case_begin(t);
    weights_drop(t);
    spk_cuda_gemv fused = make_gemv(t, &spec, W_RANDOM, X_RANDOM), plain = fused;
    float *y = take_floats(t, OUTPUT, 100), *sum = take_floats(t, OUTPUT, 100);
    plain.segments[0].y = y;
    plain.segments[0].residual = NULL;
    spk_cuda_elementwise add = { .op = SPK_CUDA_ADD, .a = fused.segments[0].residual, .b = y, .out = sum, .count = 100 };
    case_record(t);
    spk_cuda_launch_gemv(t->cuda, &fused);
    spk_cuda_launch_gemv(t->cuda, &plain);
    spk_cuda_launch_elementwise(t->cuda, &add);
    case_run(t, 1);
    same_floats(t, "folded sum", fused.segments[0].y, sum, 100);
}

/* A pair against two products and SWIGLU. */
static void check_folded_pair(device_case *t, uint32_t type, uint32_t count, uint32_t rows, bool has_rest) {
    const gemv_spec spec = { .name = "folded pair",
                             .count = count,
                             .kind = S_NORM,
                             .has_rest = has_rest,
                             .segments = { { type, rows, true } } };
    describe_gemv(&spec, W_RANDOM, X_RANDOM);
    case_begin(t);
    weights_drop(t);
    spk_cuda_gemv pair = make_gemv(t, &spec, W_RANDOM, X_RANDOM), plain = pair;
    float *g = take_floats(t, OUTPUT, rows), *u = take_floats(t, OUTPUT, rows), *y = take_floats(t, OUTPUT, rows);
    plain.segments[0] = (spk_cuda_segment){ .w = pair.segments[0].w, .y = g };
    plain.segments[1] = (spk_cuda_segment){ .w = pair.segments[0].up, .y = u };
    plain.segment_count = 2;
    spk_cuda_elementwise swiglu = { .op = SPK_CUDA_SWIGLU, .a = g, .b = u, .out = y, .count = rows };
    case_record(t);
    spk_cuda_launch_gemv(t->cuda, &pair);
    spk_cuda_launch_gemv(t->cuda, &plain);
    spk_cuda_launch_elementwise(t->cuda, &swiglu);
    case_run(t, 1);
    same_floats(t, "folded pair", pair.segments[0].y, y, rows);
}

static void check_folded(device_case *t, bool is_quick) {
    static const uint32_t counts[] = { 256, 768, 2048, 4096 };
    for (uint32_t type = 0; type < GPU_TYPE_COUNT; type++)
        for (uint32_t k = 0; k < 4; k++) {
            if (is_quick && k % 2 != type % 2) continue;
            for (uint32_t kind = S_NORM; kind <= S_ADD3; kind++)
                check_folded_norm(t, kind, gpu_types[type], counts[k], (kind + k) % 2);
            check_folded_residual(t, gpu_types[type], counts[k], (type + k) % 2);
            check_folded_pair(t, gpu_types[type], counts[k], 100, type % 2);
            check_folded_pair(t, gpu_types[type], counts[k], 512, false);
        }
}

#endif
