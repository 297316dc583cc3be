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
/* Of a smaller span no alignment puts a weight above the largest code: it and 0.25 are below 0.5, by more than is rounded. */
#define SPAN_IN_RANGE 0.22f

typedef struct {
    vec_column                   z;            /* x - base */
    const spk_quant_tile *const *tiles;
    float                        code_max;
    vec base, range;                           /* smallest weight or 0, and from there to the largest */
    vec weight, inverse_weight, z_sum, zz_sum; /* sums of w, of w z, of w z z */
} problem;

typedef struct { vec code, code_code, code_z; } code_sums;

/* The best line through one coding: x ~ slope * code + offset, and what other lines cost (see error_of).  An offset
 * above 0 cannot be stored; `aim` is the slope of the best line without one, and equal to slope elsewhere. */
typedef struct { vec slope, offset, error, curvature, mean_code, aim; } candidate;

typedef struct {
    vec d, dmin;                               /* one of each for a tile */
    vec scale, min, error;                     /* error: sum of w (x - decoded)^2 */
} solution;

LANES_INLINE solution choose_solution(const vec_mask *is_yes, const solution *yes, const solution *no) {
    vec_mask condition = *is_yes;
    return (solution){
        .d = vec_choose(condition, yes->d, no->d),
        .dmin = vec_choose(condition, yes->dmin, no->dmin),
        .scale = vec_choose(condition, yes->scale, no->scale),
        .min = vec_choose(condition, yes->min, no->min),
        .error = vec_choose(condition, yes->error, no->error),
    };
}

/* The tiles for which `tried` has the smaller error take it. */
LANES_INLINE void keep_better(solution *s, const solution *tried) {
    vec_mask is_better = vec_less(vec_sum(&tried->error), vec_sum(&s->error));
    *s = choose_solution(&is_better, tried, s);
}

LANES_INLINE vec load_importance(const problem *p, int i, bool weighted) {
    return weighted ? vec_importance(p->tiles, i) : vec_all(1.0f);
}

LANES_INLINE void prepare(problem *p, const spk_quant_tile *const tiles[], float code_max, bool weighted) {
    vec low = vec_all(0.0f), high = vec_weights(tiles, 0);       /* a min below 0 cannot be stored */
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec x = vec_weights(tiles, i);
        low = vec_min(x, low);
        high = vec_max(x, high);
    }
    vec weight = vec_all(0.0f), z_sum = vec_all(0.0f), zz_sum = vec_all(0.0f);
    p->tiles = tiles;
    vec_column_begin(p->z, tiles);
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec z = vec_weights(tiles, i) - low, w = load_importance(p, i, weighted), wz = w * z;
        p->z[i] = z;
        weight += w;
        z_sum += wz;
        zz_sum += wz * z;
    }
    p->code_max = code_max;
    p->base = low;
    p->range = high - low;
    p->weight = weight;
    p->inverse_weight = 1.0f / weight;
    p->z_sum = z_sum;
    p->zz_sum = zz_sum;
}

LANES_INLINE void add_code(code_sums *sums, const vec *at_code, const vec *z, const vec *w, bool weighted) {
    vec code = *at_code, weighted_code = weighted ? *w * code : code;
    sums->code += weighted_code;
    sums->code_code = weighted ? sums->code_code + weighted_code * code : vec_whole_multiply_add(code, code, sums->code_code);
    sums->code_z += weighted_code * *z;
}

#define NO_SUMS ((code_sums){ vec_all(0.0f), vec_all(0.0f), vec_all(0.0f) })

/* Sums over codes round(z * inverse_step + alignments[k]), at most code_max, none below 0. */
LANES_INLINE void sum_aligned(const problem *p, const vec *inverse_step, bool in_range, bool weighted, code_sums out[ALIGN_COUNT]) {
    vec shift[ALIGN_COUNT], code_max = vec_all(p->code_max);
    LANES_UNROLL for (int k = 0; k < ALIGN_COUNT; k++) {
        shift[k] = vec_all(alignments[k]);
        out[k] = NO_SUMS;
    }
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec z = p->z[i], scaled = z * *inverse_step, w = load_importance(p, i, weighted);
        LANES_UNROLL for (int k = 0; k < ALIGN_COUNT; k++) {
            vec code = vec_round(scaled + shift[k]);
            if (!in_range) code = vec_min(code, code_max);
            add_code(&out[k], &code, &z, &w, weighted);
        }
    }
}

LANES_INLINE candidate fit_line(const problem *p, const code_sums *sums) {
    vec mean = sums->code * p->inverse_weight, curvature = sums->code_code - sums->code * mean;
    /* All codes equal: any line through the mean is as good; take the one through the base. */
    vec_mask spread = vec_less(sums->code_code * 1e-5f, curvature);
    vec slope = (sums->code_z - mean * p->z_sum) / vec_choose(spread, curvature, vec_all(1.0f));
    if (vec_any(vec_not(spread))) {
        vec through_base = sums->code_z * vec_inverse_or_zero(sums->code_code);
        slope = vec_choose(spread, slope, through_base);
        curvature = vec_choose(spread, curvature, vec_all(0.0f));
    }
    vec offset = (p->z_sum - slope * sums->code) * p->inverse_weight;
    vec lost = vec_max(offset + p->base, vec_all(0.0f)), pull = p->weight * mean, aim = slope;
    if (vec_any(vec_less(vec_all(0.0f), lost))) aim += pull * lost * vec_inverse_or_zero(curvature + pull * mean);
    return (candidate){
        .slope = slope,
        .offset = offset + p->base,
        .error = p->zz_sum - slope * sums->code_z - offset * p->z_sum,
        .curvature = curvature,
        .mean_code = mean,
        .aim = aim,
    };
}

/* Of the steps step_begin <= s < step_end. */
LANES_INLINE void make_candidates(const problem *p, const float spans[BEST_STEP_COUNT], int step_begin, int step_end,
                                  bool weighted, candidate out[CANDIDATE_MAX]) {
    vec inverse_range = vec_inverse_or_zero(p->range);
    for (int s = step_begin; s < step_end; s++) {
        code_sums sums[ALIGN_COUNT];
        vec inverse_step = inverse_range * (p->code_max + spans[s]);
        if (spans[s] < SPAN_IN_RANGE)
            sum_aligned(p, &inverse_step, true, weighted, sums);
        else
            sum_aligned(p, &inverse_step, false, weighted, sums);
        LANES_UNROLL for (int k = 0; k < ALIGN_COUNT; k++) out[s * ALIGN_COUNT + k] = fit_line(p, &sums[k]);
    }
}

/* Error of the line that is slope_off steeper than the best and, at the mean code, offset_off higher. */
LANES_INLINE vec error_of(const problem *p, const candidate *c, const vec *slope_off, const vec *offset_off) {
    return c->error + c->curvature * *slope_off * *slope_off + p->weight * *offset_off * *offset_off;
}

#define whole_scale(v) vec_clamp(vec_round(v), 0, SPK_QUANT_SCALE_MAX)

/* For each d, the sum over the lanes of the best candidate's error, if only the slopes are rounded, to multiples of d. */
LANES_INLINE void try_d(const problem *p, const candidate *candidates, int count, const vec d[FACTOR_COUNT], vec sums[FACTOR_COUNT]) {
    vec best[FACTOR_COUNT], inverse_d[FACTOR_COUNT];
    LANES_UNROLL for (int f = 0; f < FACTOR_COUNT; f++) {
        best[f] = vec_all(3e38f);
        inverse_d[f] = vec_inverse_or_zero(d[f]);
    }
    for (int k = 0; k < count; k++) {
        const candidate *c = &candidates[k];
        LANES_UNROLL for (int f = 0; f < FACTOR_COUNT; f++) {
            vec slope_off = whole_scale(c->aim * inverse_d[f]) * d[f] - c->slope;
            vec lost = vec_max(c->offset - c->mean_code * slope_off, vec_all(0.0f));
            best[f] = vec_min(error_of(p, c, &slope_off, &lost), best[f]);
        }
    }
    LANES_UNROLL for (int f = 0; f < FACTOR_COUNT; f++) sums[f] = vec_sum(&best[f]);
}

/* The same with the offsets rounded to multiples of -dmin, for each dmin; out[f] gets scales and mins. */
LANES_INLINE void try_dmin(const problem *p, const candidate *candidates, int count, const vec *d,
                           const vec dmin[FACTOR_COUNT], solution out[FACTOR_COUNT]) {
    vec inverse_d = vec_inverse_or_zero(*d), inverse_dmin[FACTOR_COUNT];
    LANES_UNROLL for (int f = 0; f < FACTOR_COUNT; f++) {
        inverse_dmin[f] = -vec_inverse_or_zero(dmin[f]);
        out[f] = (solution){ *d, dmin[f], vec_all(0.0f), vec_all(0.0f), vec_all(3e38f) };
    }
    for (int k = 0; k < count; k++) {
        const candidate *c = &candidates[k];
        vec scale = whole_scale(c->aim * inverse_d);
        vec slope_off = scale * *d - c->slope, offset = c->offset - c->mean_code * slope_off;
        LANES_UNROLL for (int f = 0; f < FACTOR_COUNT; f++) {
            solution *s = &out[f];
            vec min = whole_scale(offset * inverse_dmin[f]), offset_off = offset + min * dmin[f];
            vec error = error_of(p, c, &slope_off, &offset_off);
            vec_mask better = vec_less(error, s->error);
            s->error = vec_min(error, s->error);
            s->scale = vec_choose(better, scale, s->scale);
            s->min = vec_choose(better, min, s->min);
        }
    }
}

/* The factor that makes the largest slope or depth a little less than the largest scale or min: so many steps less. */
LANES_INLINE vec factor_of(const vec *largest, int chance, float step) {
    vec wanted = *largest / ((float)SPK_QUANT_SCALE_MAX - (float)chance * step);
    return vec_half_scale(&wanted);
}

/* The largest slope and depth (offset below 0) of the candidates that are best before factors are rounded. */
LANES_INLINE void find_tops(const problem *p, const candidate *candidates, int count, vec *top_slope, vec *top_depth) {
    vec error = vec_all(3e38f), slope = vec_all(0.0f), depth = vec_all(0.0f);
    for (int k = 0; k < count; k++) {
        const candidate *c = &candidates[k];
        vec slope_off = c->aim - c->slope, offset = c->offset - c->mean_code * slope_off;
        vec lost = vec_max(offset, vec_all(0.0f)), tried = error_of(p, c, &slope_off, &lost);
        vec_mask better = vec_less(tried, error);
        error = vec_min(tried, error);
        slope = vec_choose(better, c->aim, slope);
        depth = vec_choose(better, -offset, depth);
    }
    *top_slope = vec_largest(&slope);
    *top_depth = vec_max(vec_largest(&depth), vec_all(0.0f));
}

/* The best of dmin_count dmin for a d. */
LANES_INLINE void choose_dmin(const problem *p, const candidate *candidates, int count, int dmin_count, const vec *d,
                              const vec *top_depth, solution *out) {
    *out = (solution){ *d, *d, *d, *d, vec_all(3e38f) };
    for (int first = 0; first < dmin_count; first += FACTOR_COUNT) {
        vec dmin[FACTOR_COUNT];
        solution tried[FACTOR_COUNT];
        LANES_UNROLL for (int f = 0; f < FACTOR_COUNT; f++) dmin[f] = factor_of(top_depth, first + f, 1);
        try_dmin(p, candidates, count, d, dmin, tried);
        LANES_UNROLL for (int f = 0; f < FACTOR_COUNT; f++) keep_better(out, &tried[f]);
    }
}

LANES_INLINE void choose_factors(const problem *p, const candidate *candidates, int count, solution *out) {
    vec top_slope, top_depth, d[FACTOR_COUNT], sums[FACTOR_COUNT];
    find_tops(p, candidates, count, &top_slope, &top_depth);
    LANES_UNROLL for (int f = 0; f < FACTOR_COUNT; f++) d[f] = factor_of(&top_slope, f, 1);
    try_d(p, candidates, count, d, sums);
    LANES_UNROLL for (int f = 1; f < FACTOR_COUNT; f++) {
        vec_mask better = vec_less(sums[f], sums[0]);
        sums[0] = vec_min(sums[f], sums[0]);
        d[0] = vec_choose(better, d[f], d[0]);
    }
    choose_dmin(p, candidates, count, FACTOR_COUNT, &d[0], &top_depth, out);
}

/* What coding needs to know of a scale.  A scale of 0 has a single code, 0. */
typedef struct { vec step, inverse_step, code_max; } grid;

LANES_INLINE grid grid_of(const problem *p, const vec *d, const vec *scale) {
    vec step = *scale * *d;
    vec_mask positive = vec_less(vec_all(0.0f), step);
    grid g = { .step = vec_choose(positive, step, vec_all(1.0f)),
               .code_max = vec_choose(positive, vec_all(p->code_max), vec_all(0.0f)) };
    g.inverse_step = 1.0f / g.step;
    return g;
}

#define grid_code(g, place) vec_min(vec_max(vec_round(place), vec_all(0.0f)), (g)->code_max)

LANES_INLINE void measure(const problem *p, const grid *g, const vec *shift, int count, bool weighted, vec *errors) {
    LANES_UNROLL for (int k = 0; k < count; k++) errors[k] = vec_all(0.0f);
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec scaled = p->z[i] * g->inverse_step, w = load_importance(p, i, weighted);
        LANES_UNROLL for (int k = 0; k < count; k++) {
            vec place = scaled + shift[k], off = place - grid_code(g, place);
            errors[k] += weighted ? w * off * off : off * off;
        }
    }
    LANES_UNROLL for (int k = 0; k < count; k++) errors[k] *= g->step * g->step;
}

LANES_INLINE vec shift_of(const problem *p, const solution *s, const grid *g, const vec *min) {
    return (*min * s->dmin + p->base) * g->inverse_step;
}

LANES_INLINE void measure_solution(const problem *p, solution *s, bool weighted) {
    grid g = grid_of(p, &s->d, &s->scale);
    vec shift = shift_of(p, s, &g, &s->min);
    measure(p, &g, &shift, 1, weighted, &s->error);
}

/* Of the codes as they are. */
LANES_INLINE code_sums sum_codes(const problem *p, const solution *s, bool weighted) {
    grid g = grid_of(p, &s->d, &s->scale);
    vec shift = shift_of(p, s, &g, &s->min);
    code_sums sums = NO_SUMS;
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec z = p->z[i], code = grid_code(&g, z * g.inverse_step + shift), w = load_importance(p, i, weighted);
        add_code(&sums, &code, &z, &w, weighted);
    }
    return sums;
}

/* Both at once. */
LANES_INLINE code_sums measure_and_sum(const problem *p, solution *s, bool weighted) {
    grid g = grid_of(p, &s->d, &s->scale);
    vec shift = shift_of(p, s, &g, &s->min), error = vec_all(0.0f);
    code_sums sums = NO_SUMS;
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec z = p->z[i], place = z * g.inverse_step + shift, code = grid_code(&g, place), off = place - code;
        vec w = load_importance(p, i, weighted);
        error += weighted ? w * off * off : off * off;
        add_code(&sums, &code, &z, &w, weighted);
    }
    s->error = error * (g.step * g.step);
    return sums;
}

/* Normal equations of x ~ d A - dmin B with A = scale * code and B = min. */
typedef struct { double aa, ab, bb, ax, bx; } normal_equations;

/* d and dmin before they are rounded; those of a tile whose equations say nothing stay. */
LANES_INLINE void solve_equations(const normal_equations *e, float *d, float *dmin) {
    double determinant = e->aa * e->bb - e->ab * e->ab;
    if (determinant > 1e-9 * e->aa * e->bb) {
        *d = (float)((e->ax * e->bb - e->bx * e->ab) / determinant);
        *dmin = (float)((e->ax * e->ab - e->bx * e->aa) / determinant);
    } else if (e->aa > 0) {
        *d = (float)((e->ax + (double)*dmin * e->ab) / e->aa);
    } else if (e->bb > 0) {
        *dmin = (float)(-e->bx / e->bb);
    }
}

/* Below 0 for F16. */
#define IS_NEGATIVE(factor) ((factor) < -0x1p-25f)

/* Best d and dmin for the codes as they are, whose sums these are. */
LANES_INLINE void solve_factors(const problem *p, solution *s, const code_sums *sums, bool weighted) {
    vec code_x = sums->code_z + p->base * sums->code, x_sum = p->z_sum + p->base * p->weight;
    vec scale_scale = s->scale * s->scale, scale_min = s->scale * s->min, min_min = s->min * s->min;
    double aa[LANES_TILES] = { 0 }, ab[LANES_TILES] = { 0 }, bb[LANES_TILES] = { 0 }, ax[LANES_TILES] = { 0 }, bx[LANES_TILES] = { 0 };
    vec_add_products(&scale_scale, &sums->code_code, aa);
    vec_add_products(&scale_min, &sums->code, ab);
    vec_add_products(&min_min, &p->weight, bb);
    vec_add_products(&s->scale, &code_x, ax);
    vec_add_products(&s->min, &x_sum, bx);
    float d[LANES_TILES], dmin[LANES_TILES];
    LANES_UNROLL for (int t = 0; t < LANES_TILES; t++) {
        float old_d = vec_of_tile(s->d, t), old_dmin = vec_of_tile(s->dmin, t);
        normal_equations equations = { aa[t], ab[t], bb[t], ax[t], bx[t] };
        d[t] = old_d, dmin[t] = old_dmin;
        solve_equations(&equations, &d[t], &dmin[t]);
        if (IS_NEGATIVE(d[t]) || IS_NEGATIVE(dmin[t])) d[t] = old_d, dmin[t] = old_dmin;
    }
    solution tried = *s;
    vec wanted_d = vec_max(vec_of_tiles(d), vec_all(0.0f)), wanted_dmin = vec_max(vec_of_tiles(dmin), vec_all(0.0f));
    tried.d = vec_half_scale(&wanted_d);
    tried.dmin = vec_half_scale(&wanted_dmin);
    measure_solution(p, &tried, weighted);
    keep_better(s, &tried);
}

/* For each lane, the mins from one below the middle to one above; but for the middle itself, where that is what *s has. */
LANES_INLINE void try_mins(const problem *p, solution *s, const vec *scale, const vec *middle, bool has_middle, bool weighted) {
    vec min[3], shift[3], errors[3];
    int count = has_middle ? 2 : 3, step = has_middle ? 2 : 1;
    grid g = grid_of(p, &s->d, scale);
    LANES_UNROLL for (int b = 0; b < count; b++) {
        min[b] = vec_clamp(*middle + (float)(b * step - 1), 0, SPK_QUANT_SCALE_MAX);
        shift[b] = shift_of(p, s, &g, &min[b]);
    }
    measure(p, &g, shift, count, weighted, errors);
    LANES_UNROLL for (int b = 0; b < count; b++) {
        vec_mask better = vec_less(errors[b], s->error);
        s->error = vec_min(errors[b], s->error);
        s->scale = vec_choose(better, *scale, s->scale);
        s->min = vec_choose(better, min[b], s->min);
    }
}

/* Each lane tries the scales next to its own, each with the min that keeps the mean in place and its neighbours. */
LANES_INLINE void try_neighbours(const problem *p, solution *s, const code_sums *sums, bool weighted) {
    vec_mask has_dmin = vec_less(vec_all(0.0f), s->dmin);
    vec mean_code = sums->code * p->inverse_weight, scale0 = s->scale, min0 = s->min;
    vec min_per_scale = mean_code * (s->d / vec_choose(has_dmin, s->dmin, vec_all(1.0f)));
    min_per_scale = vec_choose(has_dmin, min_per_scale, vec_all(0.0f));
    for (int a = -1; a <= 1; a++) {
        vec scale = vec_clamp(scale0 + (float)a, 0, SPK_QUANT_SCALE_MAX);
        vec middle = vec_round(min0 + min_per_scale * (scale - scale0));
        if (a == 0)
            try_mins(p, s, &scale0, &min0, true, weighted);
        else
            try_mins(p, s, &scale, &middle, false, weighted);
    }
}

/* Where next to nothing is lost - a single large weight among tiny ones - closed forms drown in rounding, and what is
 * left to lose is the rounding of d and dmin themselves.  So pairs of them are measured, each with the scales and mins
 * nearest to those of the solution, until no more is lost than one such rounding. */
LANES_INLINE void polish(const problem *p, solution *s, bool weighted) {
    vec squares = p->zz_sum + p->base * (2.0f * p->z_sum + p->base * p->weight);      /* of x */
    vec whole = vec_sum(&squares);
    vec_mask is_open = vec_not(vec_less(SPK_QUANT_SMALL_ERROR * whole, vec_sum(&s->error)));
    if (!vec_any(is_open)) return;
    vec slope = s->scale * s->d, depth = s->min * s->dmin;
    vec top_slope = vec_largest(&slope), top_depth = vec_largest(&depth);
    vec_mask has_depth = vec_less(vec_all(0.0f), top_depth);
    int min_top_last = vec_any(has_depth) ? POLISH_TOP_MIN : SPK_QUANT_SCALE_MAX;
    for (int scale_top = SPK_QUANT_SCALE_MAX; scale_top >= POLISH_TOP_MIN; scale_top--)
        for (int min_top = SPK_QUANT_SCALE_MAX; min_top >= min_top_last; min_top--) {
            is_open = vec_both(is_open, vec_less(F16_ERROR * whole, vec_sum(&s->error)));
            if (!vec_any(is_open)) return;
            vec d = top_slope / (float)scale_top, dmin = top_depth / (float)min_top;
            solution tried = { .d = vec_half_scale(&d), .dmin = vec_half_scale(&dmin) };
            tried.scale = whole_scale(slope * vec_inverse_or_zero(tried.d));
            tried.min = whole_scale(depth * vec_inverse_or_zero(tried.dmin));
            measure_solution(p, &tried, weighted);
            /* Without a depth there is one dmin to try. */
            vec_mask is_new = min_top == SPK_QUANT_SCALE_MAX ? is_open : vec_both(is_open, has_depth);
            vec_mask is_better = vec_both(is_new, vec_less(vec_sum(&tried.error), vec_sum(&s->error)));
            *s = choose_solution(&is_better, &tried, s);
        }
}

LANES_INLINE void write_fit(const problem *p, const solution *s, spk_quant_affine_fit *const out[]) {
    grid g = grid_of(p, &s->d, &s->scale);
    vec shift = shift_of(p, s, &g, &s->min);
    vec_store_half(s->d, out, d);
    vec_store_half(s->dmin, out, dmin);
    vec_store_bytes(s->scale, out, scale);
    vec_store_bytes(s->min, out, min);
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec code = grid_code(&g, p->z[i] * g.inverse_step + shift);
        vec_store_bytes(code, out, code[i]);
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
    code_sums sums = measure_and_sum(p, s, weighted);
    solve_factors(p, s, &sums, weighted);
    polish(p, s, weighted);
}

/* From what the fast search has found, which is kept where it is better. */
LANES_INLINE void search_normal(const problem *p, const float *spans, bool weighted, candidate *candidates,
                                solution *s) {
    solution wider;
    make_candidates(p, spans, fast_step_count(weighted), NORMAL_STEP_COUNT, weighted, candidates);
    choose_factors(p, candidates, NORMAL_STEP_COUNT * ALIGN_COUNT, &wider);
    code_sums sums = measure_and_sum(p, &wider, weighted);
    solve_factors(p, &wider, &sums, weighted);
    try_neighbours(p, &wider, &sums, weighted);
    sums = sum_codes(p, &wider, weighted);
    solve_factors(p, &wider, &sums, weighted);
    polish(p, &wider, weighted);
    vec_mask is_better = vec_less(vec_sum(&s->error), vec_sum(&wider.error));
    *s = choose_solution(&is_better, s, &wider);
}

/* Neighbours and factors in turns, until neither finds anything; for the tiles that take part. */
LANES_INLINE void refine(const problem *p, bool weighted, const vec_mask *takes_part, solution *s) {
    vec_mask is_open = *takes_part;
    for (int round = 0; round < BEST_ROUNDS_MAX && vec_any(is_open); round++) {
        solution next = *s;
        code_sums sums = sum_codes(p, &next, weighted);
        solve_factors(p, &next, &sums, weighted);
        try_neighbours(p, &next, &sums, weighted);
        vec before = vec_sum(&s->error);
        *s = choose_solution(&is_open, &next, s);
        is_open = vec_both(is_open, vec_less(vec_sum(&s->error), before));
    }
}

/* From what the normal search has found: that, and for every d the best pair, each refined. */
LANES_INLINE void search_best(const problem *p, const float *spans, bool weighted, candidate *candidates, solution *s) {
    int count = BEST_STEP_COUNT * ALIGN_COUNT;
    vec top_slope, top_depth;
    make_candidates(p, spans, NORMAL_STEP_COUNT, BEST_STEP_COUNT, weighted, candidates);
    find_tops(p, candidates, count, &top_slope, &top_depth);
    vec_mask all = vec_less(vec_all(0.0f), vec_all(1.0f));
    refine(p, weighted, &all, s);
    for (int f = 0; f < BEST_D_COUNT; f++) {
        solution tried;
        vec d = factor_of(&top_slope, f, 0.5f);
        choose_dmin(p, candidates, count, BEST_DMIN_COUNT, &d, &top_depth, &tried);
        measure_solution(p, &tried, weighted);
        vec_mask is_hopeful = vec_not(vec_less(HOPELESS * vec_sum(&s->error), vec_sum(&tried.error)));
        refine(p, weighted, &is_hopeful, &tried);
        vec_mask is_better = vec_both(is_hopeful, vec_less(vec_sum(&tried.error), vec_sum(&s->error)));
        *s = choose_solution(&is_better, &tried, s);
    }
    polish(p, s, weighted);
}

LANES_INLINE void search(const spk_quant_tile *const tiles[], float code_max, const float *spans, spk_quant_effort effort,
                         bool weighted, spk_quant_affine_fit *const out[]) {
    problem p;
    VEC_ARRAY(candidate, candidates, CANDIDATE_MAX, candidate_count(effort));
    solution s;
    prepare(&p, tiles, code_max, weighted);
    search_fast(&p, spans, weighted, candidates, &s);
    if (effort != SPK_EFFORT_FAST) search_normal(&p, spans, weighted, candidates, &s);
    if (effort == SPK_EFFORT_BEST) search_best(&p, spans, weighted, candidates, &s);
    write_fit(&p, &s, out);
}

LANES_ENTRY void SPK_LANES_NAME(spk_quant_affine)(const spk_quant_tile *const tiles[], uint32_t code_max,
                                                  spk_quant_effort effort, spk_quant_affine_fit *const out[]) {
    const float *spans = code_max == 15 ? spans_4bit : spans_5bit;
    if (tiles[0]->weighted) {
        search(tiles, (float)code_max, spans, effort, true, out);
    } else {
        search(tiles, (float)code_max, spans, effort, false, out);
    }
}
