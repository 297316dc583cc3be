/* requant/quant_affine_lanes.c - the search for Q4_K and Q5_K, whose weights are d * scale * code - dmin * min.
 *
 * The squared error as a function of scale and min is a wide bowl with a rough floor: codes jump one by one, and how
 * well they happen to fall changes the error more than a small step in scale does.  So the best of many different
 * codings is looked for, not the bottom of the bowl:
 *
 *   1. For each sub-block, a number of codings: two to seventeen step sizes, three alignments of the lowest code.
 *      Least squares gives the best line through each coding, and the error of any other line is known from its
 *      curvature, without a new pass.
 *   2. For several d, then several dmin, each sub-block takes the coding that is best once scale and min are rounded
 *      to multiples of them; the d and dmin with the least sum win.
 *   3. d and dmin are solved again for all 256 codes at once, rounded to F16, kept if better; then each sub-block tries
 *      the neighbouring scales and mins, with codes chosen anew; then d and dmin once more.
 *
 * The fast search leaves the neighbours out; the best one does 3 from every d, for as long as it helps.  Each search
 * begins with what the one before has found, and so is never worse.
 *
 * From 2 on d and dmin are the F16 values that are stored, and errors are those of the codes that they decode.  Each
 * step of 3 keeps what it has unless the error falls.
 */
#include "requant/quant_vectors_internal.h"

enum {
    ALIGN_COUNT = 3,
    FAST_STEP_COUNT = 2, FAST_WEIGHTED_STEP_COUNT = 4, NORMAL_STEP_COUNT = 6, BEST_STEP_COUNT = 17,
    CANDIDATE_MAX = BEST_STEP_COUNT * ALIGN_COUNT,
    FACTOR_COUNT = 2,                                /* d, and then dmin, that are tried; those of best below */
    BEST_D_COUNT = 16, BEST_DMIN_COUNT = 6, BEST_ROUNDS_MAX = 4,
    POLISH_TOP_MIN = 40
};

/* With `best`, a start that is so much worse than what there is will not catch up. */
#define HOPELESS 1.03f

/* The rounding of one factor to F16, squared and relative. */
#define F16_ERROR 0x1p-24f

/* Codes that the range of a sub-block spans, less the largest code.  An effort uses the first so and so many. */
LANES_TABLE float spans_4bit[BEST_STEP_COUNT] = {
    -0.6f, 0.3f, -0.15f, -1.1f, 0.75f, -1.6f, 0, -0.3f, -0.45f, -0.85f, -1.35f, -1.9f, -2.2f, -2.6f, -3, 0.5f, 1 };
LANES_TABLE float spans_5bit[BEST_STEP_COUNT] = {
    -1.1f, 0.2f, -0.4f, -1.8f, -2.6f, 0.7f, -0.1f, -0.6f, -0.85f, -1.45f, -2.2f, -3, -3.5f, -4.2f, -5, 0.45f, 1 };
/* Where the smallest weight falls, in codes.  Between -0.5 and 0.5, so that no code is below 0. */
LANES_TABLE float alignments[ALIGN_COUNT] = { -0.1f, -0.45f, 0.25f };
typedef struct {
    v8_column             z;                   /* x - base */
    const spk_quant_tile *tile;
    float                 code_max;
    v8 base, range;                            /* smallest weight or 0, and from there to the largest */
    v8 weight, inverse_weight, z_sum, zz_sum;  /* sums of w, of w z, of w z z */
} problem;

typedef struct { v8 code, code_code, code_z; } code_sums;

/* The best line through one coding: x ~ slope * code + offset, and what other lines cost (see error_of).  An offset
 * above 0 cannot be stored; `aim` is the slope of the best line without one, and equal to slope elsewhere. */
typedef struct { v8 slope, offset, error, curvature, mean_code, aim; } candidate;

typedef struct {
    float d, dmin;
    v8    scale, min, error;                   /* error: sum of w (x - decoded)^2 */
} solution;

LANES_INLINE void prepare(problem *p, const spk_quant_tile *tile, float code_max, bool weighted) {
    v8 low = v8_all(0.0f), high = v8_load(tile->x[0]);   /* a min below 0 cannot be stored */
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 x = v8_load(tile->x[i]);
        low = v8_min(x, low);
        high = v8_max(x, high);
    }
    v8 weight = v8_all(0.0f), z_sum = v8_all(0.0f), zz_sum = v8_all(0.0f);
    v8_column_begin(p->z, tile);
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 z = v8_load(tile->x[i]) - low, w = weighted ? v8_load(tile->w[i]) : v8_all(1.0f), wz = w * z;
        p->z[i] = z;
        weight += w;
        z_sum += wz;
        zz_sum += wz * z;
    }
    p->tile = tile;
    p->code_max = code_max;
    p->base = low;
    p->range = high - low;
    p->weight = weight;
    p->inverse_weight = 1.0f / weight;
    p->z_sum = z_sum;
    p->zz_sum = zz_sum;
}

/* Sums over codes clamp(round(z * inverse_step + shift[k])). */
LANES_INLINE void sum_codes(const problem *p, const v8 *inverse_step, const v8 *shift, int count, const v8 *code_max,
                            bool clamp_low, bool weighted, code_sums *out) {
    LANES_UNROLL for (int k = 0; k < count; k++) out[k] = (code_sums){ v8_all(0.0f), v8_all(0.0f), v8_all(0.0f) };
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 z = p->z[i], scaled = z * *inverse_step, w = weighted ? v8_load(p->tile->w[i]) : v8_all(1.0f);
        LANES_UNROLL for (int k = 0; k < count; k++) {
            v8 code = v8_min(v8_round(scaled + shift[k]), *code_max);
            if (clamp_low) code = v8_max(code, v8_all(0.0f));
            v8 weighted_code = weighted ? w * code : code;
            out[k].code += weighted_code;
            out[k].code_code = weighted ? out[k].code_code + weighted_code * code : v8_whole_multiply_add(code, code, out[k].code_code);
            out[k].code_z += weighted_code * z;
        }
    }
}

LANES_INLINE candidate fit_line(const problem *p, const code_sums *sums) {
    v8 mean = sums->code * p->inverse_weight, curvature = sums->code_code - sums->code * mean;
    /* All codes equal: any line through the mean is as good; take the one through the base. */
    v8i spread = v8_less(sums->code_code * 1e-5f, curvature);
    v8 through_base = sums->code_z * v8_inverse_or_zero(sums->code_code);
    v8 slope = (sums->code_z - mean * p->z_sum) / v8_choose(spread, curvature, v8_all(1.0f));
    slope = v8_choose(spread, slope, through_base);
    curvature = v8_choose(spread, curvature, v8_all(0.0f));
    v8 offset = (p->z_sum - slope * sums->code) * p->inverse_weight;
    v8 lost = v8_max(offset + p->base, v8_all(0.0f)), pull = p->weight * mean;
    return (candidate){
        .slope = slope,
        .offset = offset + p->base,
        .error = p->zz_sum - slope * sums->code_z - offset * p->z_sum,
        .curvature = curvature,
        .mean_code = mean,
        .aim = slope + pull * lost * v8_inverse_or_zero(curvature + pull * mean),
    };
}

/* Of the steps step_begin <= s < step_end. */
LANES_INLINE void make_candidates(const problem *p, const float spans[BEST_STEP_COUNT], int step_begin, int step_end,
                                  bool weighted, candidate out[CANDIDATE_MAX]) {
    v8 inverse_range = v8_inverse_or_zero(p->range), shift[ALIGN_COUNT], code_max = v8_all(p->code_max);
    LANES_UNROLL for (int k = 0; k < ALIGN_COUNT; k++) shift[k] = v8_all(alignments[k]);
    for (int s = step_begin; s < step_end; s++) {
        code_sums sums[ALIGN_COUNT];
        v8 inverse_step = inverse_range * (p->code_max + spans[s]);
        sum_codes(p, &inverse_step, shift, ALIGN_COUNT, &code_max, false, weighted, sums);
        LANES_UNROLL for (int k = 0; k < ALIGN_COUNT; k++) out[s * ALIGN_COUNT + k] = fit_line(p, &sums[k]);
    }
}

/* Error of the line that is slope_off steeper than the best and, at the mean code, offset_off higher. */
LANES_INLINE v8 error_of(const problem *p, const candidate *c, const v8 *slope_off, const v8 *offset_off) {
    return c->error + c->curvature * *slope_off * *slope_off + p->weight * *offset_off * *offset_off;
}

/* Sum over the lanes of the best candidate's error, if only the slopes are rounded, to multiples of d. */
LANES_INLINE float try_d(const problem *p, const candidate *candidates, int count, float d) {
    v8 best = v8_all(3e38f);
    float inverse_d = d > 0 ? 1.0f / d : 0.0f;
    for (int k = 0; k < count; k++) {
        const candidate *c = &candidates[k];
        v8 scale = v8_clamp(v8_round(c->aim * inverse_d), 0, SPK_QUANT_SCALE_MAX), slope_off = scale * d - c->slope;
        v8 lost = v8_max(c->offset - c->mean_code * slope_off, v8_all(0.0f));
        best = v8_min(error_of(p, c, &slope_off, &lost), best);
    }
    return v8_sum(&best);
}

/* The same with the offsets rounded to multiples of -dmin; *out gets scales and mins. */
LANES_INLINE void try_d_dmin(const problem *p, const candidate *candidates, int count, float d, float dmin,
                             solution *out) {
    float inverse_d = d > 0 ? 1.0f / d : 0.0f, inverse_dmin = dmin > 0 ? 1.0f / dmin : 0.0f;
    *out = (solution){ d, dmin, v8_all(0.0f), v8_all(0.0f), v8_all(3e38f) };
    for (int k = 0; k < count; k++) {
        const candidate *c = &candidates[k];
        v8 scale = v8_clamp(v8_round(c->aim * inverse_d), 0, SPK_QUANT_SCALE_MAX);
        v8 slope_off = scale * d - c->slope, offset = c->offset - c->mean_code * slope_off;
        v8 min = v8_clamp(v8_round(offset * -inverse_dmin), 0, SPK_QUANT_SCALE_MAX), offset_off = offset + min * dmin;
        v8 error = error_of(p, c, &slope_off, &offset_off);
        v8i better = v8_less(error, out->error);
        out->error = v8_choose(better, error, out->error);
        out->scale = v8_choose(better, scale, out->scale);
        out->min = v8_choose(better, min, out->min);
    }
}

/* The factor that makes the largest slope or depth a little less than the largest scale or min: so many steps less. */
LANES_INLINE float factor_of(float largest, int chance, float step) {
    return half_scale(largest / ((float)SPK_QUANT_SCALE_MAX - (float)chance * step));
}

/* The largest slope and depth (offset below 0) of the candidates that are best before factors are rounded. */
LANES_INLINE void find_tops(const problem *p, const candidate *candidates, int count, float *top_slope,
                            float *top_depth) {
    v8 error = v8_all(3e38f), slope = v8_all(0.0f), depth = v8_all(0.0f);
    for (int k = 0; k < count; k++) {
        const candidate *c = &candidates[k];
        v8 slope_off = c->aim - c->slope, offset = c->offset - c->mean_code * slope_off;
        v8 lost = v8_max(offset, v8_all(0.0f)), tried = error_of(p, c, &slope_off, &lost);
        v8i better = v8_less(tried, error);
        error = v8_choose(better, tried, error);
        slope = v8_choose(better, c->aim, slope);
        depth = v8_choose(better, -offset, depth);
    }
    *top_slope = v8_largest(&slope);
    *top_depth = v8_largest(&depth);
    if (!(*top_depth > 0)) *top_depth = 0;
}

/* The best of factor_count dmin for a d. */
LANES_INLINE void choose_dmin(const problem *p, const candidate *candidates, int count, int factor_count, float d,
                              float top_depth, solution *out) {
    try_d_dmin(p, candidates, count, d, factor_of(top_depth, 0, 1), out);
    for (int f = 1; f < factor_count; f++) {
        solution tried;
        try_d_dmin(p, candidates, count, d, factor_of(top_depth, f, 1), &tried);
        if (v8_sum(&tried.error) < v8_sum(&out->error)) *out = tried;
    }
}

LANES_INLINE void choose_factors(const problem *p, const candidate *candidates, int count, solution *out) {
    float top_slope, top_depth, d = 0, least = 3e38f;
    find_tops(p, candidates, count, &top_slope, &top_depth);
    for (int f = 0; f < FACTOR_COUNT; f++) {
        float tried = factor_of(top_slope, f, 1), sum = try_d(p, candidates, count, tried);
        if (sum < least) least = sum, d = tried;
    }
    choose_dmin(p, candidates, count, FACTOR_COUNT, d, top_depth, out);
}

/* What coding needs to know of a scale.  A scale of 0 has a single code, 0. */
typedef struct { v8 step, inverse_step, code_max; } grid;

LANES_INLINE grid grid_of(const problem *p, float d, const v8 *scale) {
    v8 step = *scale * d;
    v8i positive = v8_less(v8_all(0.0f), step);
    grid g = { .step = v8_choose(positive, step, v8_all(1.0f)),
               .code_max = v8_choose(positive, v8_all(p->code_max), v8_all(0.0f)) };
    g.inverse_step = 1.0f / g.step;
    return g;
}

LANES_INLINE void measure(const problem *p, const grid *g, const v8 *shift, int count, bool weighted, v8 *errors) {
    LANES_UNROLL for (int k = 0; k < count; k++) errors[k] = v8_all(0.0f);
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 scaled = p->z[i] * g->inverse_step, w = weighted ? v8_load(p->tile->w[i]) : v8_all(1.0f);
        LANES_UNROLL for (int k = 0; k < count; k++) {
            v8 place = scaled + shift[k];
            v8 off = place - v8_min(v8_max(v8_round(place), v8_all(0.0f)), g->code_max);
            errors[k] += weighted ? w * off * off : off * off;
        }
    }
    LANES_UNROLL for (int k = 0; k < count; k++) errors[k] *= g->step * g->step;
}

LANES_INLINE v8 shift_of(const problem *p, const solution *s, const grid *g, const v8 *min) {
    return (*min * s->dmin + p->base) * g->inverse_step;
}

LANES_INLINE void measure_solution(const problem *p, solution *s, bool weighted) {
    grid g = grid_of(p, s->d, &s->scale);
    v8 shift = shift_of(p, s, &g, &s->min);
    measure(p, &g, &shift, 1, weighted, &s->error);
}

/* Best d and dmin for the codes as they are; returns the mean code of each lane. */
LANES_INLINE v8 solve_factors(const problem *p, solution *s, bool weighted) {
    grid g = grid_of(p, s->d, &s->scale);
    v8 shift = shift_of(p, s, &g, &s->min);
    code_sums sums;
    sum_codes(p, &g.inverse_step, &shift, 1, &g.code_max, true, weighted, &sums);
    v8 code_x = sums.code_z + p->base * sums.code, x_sum = p->z_sum + p->base * p->weight;
    /* Normal equations of x ~ d A - dmin B with A = scale * code and B = min. */
    double aa = 0, ab = 0, bb = 0, ax = 0, bx = 0;
    for (int j = 0; j < SPK_QUANT_LANES; j++) {
        double scale = (double)v8_lane(s->scale, j), min = (double)v8_lane(s->min, j);
        aa += scale * scale * (double)v8_lane(sums.code_code, j);
        ab += scale * min * (double)v8_lane(sums.code, j);
        bb += min * min * (double)v8_lane(p->weight, j);
        ax += scale * (double)v8_lane(code_x, j);
        bx += min * (double)v8_lane(x_sum, j);
    }
    double determinant = aa * bb - ab * ab;
    solution tried = *s;
    if (determinant > 1e-9 * aa * bb) {
        tried.d = half_scale((float)((ax * bb - bx * ab) / determinant));
        tried.dmin = half_scale((float)((ax * ab - bx * aa) / determinant));
    } else if (aa > 0) {
        tried.d = half_scale((float)((ax + tried.dmin * ab) / aa));
    } else if (bb > 0) {
        tried.dmin = half_scale((float)(-bx / bb));
    }
    if (tried.d >= 0 && tried.dmin >= 0 && (tried.d != s->d || tried.dmin != s->dmin)) {
        measure_solution(p, &tried, weighted);
        if (v8_sum(&tried.error) < v8_sum(&s->error)) *s = tried;
    }
    return sums.code * p->inverse_weight;
}

/* Each lane tries the scales next to its own, each with the min that keeps the mean in place and its neighbours. */
LANES_INLINE void try_neighbours(const problem *p, solution *s, const v8 *mean_code, bool weighted) {
    v8 min_per_scale = s->dmin > 0 ? *mean_code * (s->d / s->dmin) : v8_all(0.0f);
    v8 scale0 = s->scale, min0 = s->min;
    for (int a = -1; a <= 1; a++) {
        v8 scale = v8_clamp(scale0 + (float)a, 0, SPK_QUANT_SCALE_MAX);
        v8 middle = v8_round(min0 + min_per_scale * (scale - scale0)), min[3], shift[3], errors[3];
        grid g = grid_of(p, s->d, &scale);
        LANES_UNROLL for (int b = 0; b < 3; b++) {
            min[b] = v8_clamp(middle + (float)(b - 1), 0, SPK_QUANT_SCALE_MAX);
            shift[b] = shift_of(p, s, &g, &min[b]);
        }
        measure(p, &g, shift, 3, weighted, errors);
        LANES_UNROLL for (int b = 0; b < 3; b++) {
            v8i better = v8_less(errors[b], s->error);
            s->error = v8_choose(better, errors[b], s->error);
            s->scale = v8_choose(better, scale, s->scale);
            s->min = v8_choose(better, min[b], s->min);
        }
    }
}

/* Where next to nothing is lost - a single large weight among tiny ones - closed forms drown in rounding, and what is
 * left to lose is the rounding of d and dmin themselves.  So pairs of them are measured, each with the scales and mins
 * nearest to those of the solution, until no more is lost than one such rounding. */
LANES_INLINE void polish(const problem *p, solution *s, bool weighted) {
    v8 squares = p->zz_sum + p->base * (2.0f * p->z_sum + p->base * p->weight);      /* of x */
    float whole = v8_sum(&squares);
    if (v8_sum(&s->error) > SPK_QUANT_SMALL_ERROR * whole) return;
    v8 slope = s->scale * s->d, depth = s->min * s->dmin;
    float top_slope = v8_largest(&slope), top_depth = v8_largest(&depth);
    int min_top_last = top_depth > 0 ? POLISH_TOP_MIN : SPK_QUANT_SCALE_MAX;
    for (int scale_top = SPK_QUANT_SCALE_MAX; scale_top >= POLISH_TOP_MIN; scale_top--)
        for (int min_top = SPK_QUANT_SCALE_MAX; min_top >= min_top_last; min_top--) {
            if (v8_sum(&s->error) <= F16_ERROR * whole) return;
            float d = half_scale(top_slope / (float)scale_top), dmin = half_scale(top_depth / (float)min_top);
            float inverse_d = d > 0 ? 1.0f / d : 0.0f, inverse_dmin = dmin > 0 ? 1.0f / dmin : 0.0f;
            solution tried = { .d = d, .dmin = dmin };
            tried.scale = v8_clamp(v8_round(slope * inverse_d), 0, SPK_QUANT_SCALE_MAX);
            tried.min = v8_clamp(v8_round(depth * inverse_dmin), 0, SPK_QUANT_SCALE_MAX);
            measure_solution(p, &tried, weighted);
            if (v8_sum(&tried.error) < v8_sum(&s->error)) *s = tried;
        }
}

LANES_INLINE void write_fit(const problem *p, const solution *s, spk_quant_affine_fit *out) {
    grid g = grid_of(p, s->d, &s->scale);
    v8 shift = shift_of(p, s, &g, &s->min);
    LANES_ONCE out->d = half_bits_of(s->d);
    LANES_ONCE out->dmin = half_bits_of(s->dmin);
    v8_store_bytes(&s->scale, out->scale);
    v8_store_bytes(&s->min, out->min);
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 code = v8_min(v8_max(v8_round(p->z[i] * g.inverse_step + shift), v8_all(0.0f)), g.code_max);
        v8_store_bytes(&code, out->code[i]);
    }
}

LANES_INLINE int candidate_count(spk_quant_effort effort) {
    return (effort == SPK_EFFORT_BEST ? BEST_STEP_COUNT : NORMAL_STEP_COUNT) * ALIGN_COUNT;
}

/* Codings of few steps, and no neighbours.  Weights make the bowl deeper in places that few steps miss. */
LANES_INLINE int fast_step_count(bool weighted) {
    return weighted ? FAST_WEIGHTED_STEP_COUNT : FAST_STEP_COUNT;
}

LANES_INLINE void search_fast(const problem *p, const float *spans, bool weighted, candidate *candidates, solution *s) {
    int step_count = fast_step_count(weighted);
    make_candidates(p, spans, 0, step_count, weighted, candidates);
    choose_factors(p, candidates, step_count * ALIGN_COUNT, s);
    measure_solution(p, s, weighted);
    (void)solve_factors(p, s, weighted);
    polish(p, s, weighted);
}

/* From what the fast search has found, which is kept where it is better. */
LANES_INLINE void search_normal(const problem *p, const float *spans, bool weighted, candidate *candidates,
                                solution *s) {
    solution wider;
    make_candidates(p, spans, fast_step_count(weighted), NORMAL_STEP_COUNT, weighted, candidates);
    choose_factors(p, candidates, NORMAL_STEP_COUNT * ALIGN_COUNT, &wider);
    measure_solution(p, &wider, weighted);
    v8 mean_code = solve_factors(p, &wider, weighted);
    try_neighbours(p, &wider, &mean_code, weighted);
    (void)solve_factors(p, &wider, weighted);
    polish(p, &wider, weighted);
    if (!(v8_sum(&s->error) < v8_sum(&wider.error))) *s = wider;
}

/* Neighbours and factors in turns, until neither finds anything. */
LANES_INLINE void refine(const problem *p, bool weighted, solution *s) {
    for (int round = 0; round < BEST_ROUNDS_MAX; round++) {
        float before = v8_sum(&s->error);
        v8 mean_code = solve_factors(p, s, weighted);
        try_neighbours(p, s, &mean_code, weighted);
        if (!(v8_sum(&s->error) < before)) return;
    }
}

/* From what the normal search has found: that, and for every d the best pair, each refined. */
LANES_INLINE void search_best(const problem *p, const float *spans, bool weighted, candidate *candidates, solution *s) {
    int count = BEST_STEP_COUNT * ALIGN_COUNT;
    float top_slope, top_depth;
    make_candidates(p, spans, NORMAL_STEP_COUNT, BEST_STEP_COUNT, weighted, candidates);
    find_tops(p, candidates, count, &top_slope, &top_depth);
    refine(p, weighted, s);
    for (int f = 0; f < BEST_D_COUNT; f++) {
        solution tried;
        choose_dmin(p, candidates, count, BEST_DMIN_COUNT, factor_of(top_slope, f, 0.5f), top_depth, &tried);
        measure_solution(p, &tried, weighted);
        if (v8_sum(&tried.error) > HOPELESS * v8_sum(&s->error)) continue;
        refine(p, weighted, &tried);
        if (v8_sum(&tried.error) < v8_sum(&s->error)) *s = tried;
    }
    polish(p, s, weighted);
}

LANES_INLINE void search(const spk_quant_tile *tile, float code_max, const float *spans, spk_quant_effort effort,
                         bool weighted, spk_quant_affine_fit *out) {
    problem p;
    V8_ARRAY(candidate, candidates, CANDIDATE_MAX, candidate_count(effort));
    solution s;
    prepare(&p, tile, code_max, weighted);
    search_fast(&p, spans, weighted, candidates, &s);
    if (effort != SPK_EFFORT_FAST) search_normal(&p, spans, weighted, candidates, &s);
    if (effort == SPK_EFFORT_BEST) search_best(&p, spans, weighted, candidates, &s);
    write_fit(&p, &s, out);
}

LANES_ENTRY void SPK_LANES_NAME(spk_quant_affine)(const spk_quant_tile *tile, uint32_t code_max, spk_quant_effort effort,
                                                  spk_quant_affine_fit *out) {
    const float *spans = code_max == 15 ? spans_4bit : spans_5bit;
    if (tile->weighted) {
        search(tile, (float)code_max, spans, effort, true, out);
    } else {
        search(tile, (float)code_max, spans, effort, false, out);
    }
}
