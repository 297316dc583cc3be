/* requant/quant_symmetric_lanes.c - the searches for Q6_K (weight = d * scale * code) and Q8_0 (weight = d * code).
 *
 * As in quant_affine_lanes.c the best of many codings is looked for, and a higher effort begins with what the one below
 * has found.  A newcomer may wonder that the largest weight
 * need not get the largest code: giving up a few of 127 levels costs less than a lucky coding saves.
 *
 * In Q6_K the codes reach -32 but only 31, so lanes are turned until their largest weight is negative (turn = 1 or -1);
 * the scale of a turned lane is stored negative.
 */
#include "requant/quant_vectors_internal.h"

enum {
    GROUP_COUNT = 2, GROUP_DEPTH = SPK_QUANT_DEPTH / GROUP_COUNT,   /* see spk_quant_tile */
    Q6_BATCH = 3, Q6_FAST_SPAN_COUNT = 9, Q6_FAST_WEIGHTED_SPAN_COUNT = 18, Q6_NORMAL_SPAN_COUNT = 27,
    Q6_BEST_SPAN_COUNT = 81,
    Q6_FAST_TOP_COUNT = 2, Q6_TOP_COUNT = 4, Q6_BEST_TOP_COUNT = 16, Q6_REACH = 3, Q6_BEST_REACH = 8,
    Q6_BEST_ROUNDS_MAX = 4,
    Q8_BATCH = 3, Q8_FAST_SPAN_COUNT = 6, Q8_SPAN_COUNT = 21, Q8_SPREAD = 7,
    POLISH_TOP_MIN = 64
};

/* With `best`, a start that is so much worse than what there is will not catch up. */
#define HOPELESS 1.03f

#define Q8_LEVELS_MAX 127.5f
#define Q8_LEVELS_MIN 105.0f

typedef struct {
    vec_column                   z;              /* x, turned */
    const spk_quant_tile *const *tiles;
    vec                          turn[GROUP_COUNT], peak[GROUP_COUNT], zz_sum[GROUP_COUNT];
} q6_problem;

/* The best multiple of one coding: x ~ slope * code, with error + curvature * (slope' - slope)^2 for another slope'. */
typedef struct { vec slope, error, curvature; } q6_candidate;

typedef struct {
    vec d;                                      /* one for a tile */
    vec scale[GROUP_COUNT], error[GROUP_COUNT];
} q6_solution;

LANES_INLINE q6_solution q6_choose(const vec_mask *is_yes, const q6_solution *yes, const q6_solution *no) {
    vec_mask condition = *is_yes;
    q6_solution s = { .d = vec_choose(condition, yes->d, no->d) };
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        s.scale[g] = vec_choose(condition, yes->scale[g], no->scale[g]);
        s.error[g] = vec_choose(condition, yes->error[g], no->error[g]);
    }
    return s;
}

/* Of all lanes of a tile. */
LANES_INLINE vec q6_error(const q6_solution *s) {
    return vec_sum(&s->error[0]) + vec_sum(&s->error[1]);
}

/* The tiles for which `tried` has the smaller error take it. */
LANES_INLINE void q6_keep_better(q6_solution *s, const q6_solution *tried) {
    vec_mask is_better = vec_less(q6_error(tried), q6_error(s));
    *s = q6_choose(&is_better, tried, s);
}

LANES_INLINE vec load_importance(const spk_quant_tile *const tiles[], int i, bool weighted) {
    return weighted ? vec_importance(tiles, i) : vec_all(1.0f);
}

LANES_INLINE int q6_span_count(spk_quant_effort effort) {
    return effort == SPK_EFFORT_BEST ? Q6_BEST_SPAN_COUNT : Q6_NORMAL_SPAN_COUNT;
}

/* Where the largest weight falls, in codes: the first 9, 27 and 81 are spread evenly over one range. */
LANES_INLINE float q6_span(int index) {
    LANES_TABLE int ninths[] = { 0, 3, 6, 1, 2, 4, 5, 7, 8 };
    int place = index % Q6_FAST_SPAN_COUNT * 9 + ninths[index / Q6_FAST_SPAN_COUNT];
    return 32.8f - 0.15f * (float)place;
}

LANES_INLINE void q6_prepare(q6_problem *p, const spk_quant_tile *const tiles[], bool weighted) {
    p->tiles = tiles;
    vec_column_begin(p->z, tiles);
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        vec low = vec_all(0.0f), high = vec_all(0.0f), zz_sum = vec_all(0.0f);
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            vec x = vec_weights(tiles, i);
            low = vec_min(x, low);
            high = vec_max(x, high);
        }
        p->turn[g] = vec_choose(vec_less(-low, high), vec_all(-1.0f), vec_all(1.0f));
        p->peak[g] = vec_max(high, -low);
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            vec z = vec_weights(tiles, i) * p->turn[g];
            p->z[i] = z;
            zz_sum += load_importance(tiles, i, weighted) * z * z;
        }
        p->zz_sum[g] = zz_sum;
    }
}

#define q6_code(place) vec_clamp(vec_round(place), SPK_QUANT_Q6_CODE_MIN, SPK_QUANT_Q6_CODE_MAX)

/* Of the spans begin <= s < end. */
LANES_INLINE void q6_make_candidates(const q6_problem *p, int g, int begin, int end, bool weighted,
                                     q6_candidate (*out)[GROUP_COUNT]) {
    vec inverse_peak = vec_inverse_or_zero(p->peak[g]);
    for (int s = begin; s < end; s += Q6_BATCH) {
        vec inverse_step[Q6_BATCH], code_code[Q6_BATCH], code_z[Q6_BATCH];
        LANES_UNROLL for (int k = 0; k < Q6_BATCH; k++) {
            inverse_step[k] = inverse_peak * q6_span(s + k);
            code_code[k] = code_z[k] = vec_all(0.0f);
        }
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            vec z = p->z[i], w = load_importance(p->tiles, i, weighted);
            LANES_UNROLL for (int k = 0; k < Q6_BATCH; k++) {
                vec code = q6_code(z * inverse_step[k]), weighted_code = weighted ? w * code : code;
                code_code[k] += weighted_code * code;
                code_z[k] += weighted_code * z;
            }
        }
        LANES_UNROLL for (int k = 0; k < Q6_BATCH; k++) {
            vec slope = code_z[k] * vec_inverse_or_zero(code_code[k]);
            out[s + k][g] = (q6_candidate){ slope, p->zz_sum[g] - slope * code_z[k], code_code[k] };
        }
    }
}

/* Each lane takes the candidate that is best when its slope is rounded to a multiple of d. */
LANES_INLINE void q6_try_d(q6_candidate (*candidates)[GROUP_COUNT], int span_count, const vec *d, q6_solution *out) {
    vec inverse_d = vec_inverse_or_zero(*d);
    out->d = *d;
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        vec best_error = vec_all(3e38f), best_scale = vec_all(0.0f);
        for (int k = 0; k < span_count; k++) {
            const q6_candidate *c = &candidates[k][g];
            vec scale = vec_clamp(vec_round(c->slope * inverse_d), 0, SPK_QUANT_Q6_SCALE_MAX);
            vec slope_off = scale * *d - c->slope, error = c->error + c->curvature * slope_off * slope_off;
            vec_mask better = vec_less(error, best_error);
            best_error = vec_min(error, best_error);
            best_scale = vec_choose(better, scale, best_scale);
        }
        out->error[g] = best_error;
        out->scale[g] = best_scale;
    }
}

/* The largest slope of the candidates that are best before slopes are rounded. */
LANES_INLINE vec q6_top_slope(q6_candidate (*candidates)[GROUP_COUNT], int span_count) {
    vec top = vec_all(0.0f);
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        vec error = vec_all(3e38f), slope = vec_all(0.0f);
        for (int k = 0; k < span_count; k++) {
            vec_mask better = vec_less(candidates[k][g].error, error);
            error = vec_min(candidates[k][g].error, error);
            slope = vec_choose(better, candidates[k][g].slope, slope);
        }
        top = vec_max(slope, top);
    }
    return vec_largest(&top);
}

/* The d that makes the largest slope so many steps less than the largest scale. */
LANES_INLINE vec q6_factor(const vec *top_slope, int less) {
    vec wanted = *top_slope / (float)(SPK_QUANT_Q6_SCALE_MAX - less);
    return vec_half_scale(&wanted);
}

LANES_INLINE void q6_choose_d(q6_candidate (*candidates)[GROUP_COUNT], int span_count, int top_count,
                              q6_solution *out) {
    vec top_slope = q6_top_slope(candidates, span_count), d = q6_factor(&top_slope, 0);
    q6_try_d(candidates, span_count, &d, out);
    for (int t = 1; t < top_count; t++) {
        q6_solution tried;
        d = q6_factor(&top_slope, 2 * t);
        q6_try_d(candidates, span_count, &d, &tried);
        q6_keep_better(out, &tried);
    }
}

/* Places of codes for a scale; a scale of 0 has a step of 1 and the single code 0. */
LANES_INLINE vec step_of(const vec *scale, const vec *d, vec *inverse_step) {
    vec step = *scale * *d;
    *inverse_step = vec_inverse_or_zero(step);
    return vec_choose(vec_less(vec_all(0.0f), step), step, vec_all(1.0f));
}

LANES_INLINE vec q6_measure(const q6_problem *p, int g, const vec *scale, const vec *d, bool weighted) {
    vec inverse_step, step = step_of(scale, d, &inverse_step), sum = vec_all(0.0f);
    vec_mask filled = vec_less(vec_all(0.0f), inverse_step);
    for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
        vec place = p->z[i] * inverse_step, off = place - q6_code(place);
        sum += load_importance(p->tiles, i, weighted) * off * off;
    }
    return vec_choose(filled, sum * step * step, p->zz_sum[g]);
}

LANES_INLINE void q6_measure_solution(const q6_problem *p, q6_solution *s, bool weighted) {
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) s->error[g] = q6_measure(p, g, &s->scale[g], &s->d, weighted);
}

/* Best d for the codes as they are. */
LANES_INLINE void q6_solve_d(const q6_problem *p, q6_solution *s, bool weighted) {
    double code_code[LANES_TILES] = { 0 }, code_z[LANES_TILES] = { 0 };
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        vec inverse_step, code_code_lanes = vec_all(0.0f), code_z_lanes = vec_all(0.0f);
        (void)step_of(&s->scale[g], &s->d, &inverse_step);
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            vec code = q6_code(p->z[i] * inverse_step), weighted_code = load_importance(p->tiles, i, weighted) * code;
            code_code_lanes += weighted_code * code;
            code_z_lanes += weighted_code * p->z[i];
        }
        vec scale_scale = s->scale[g] * s->scale[g];
        vec_add_products(&scale_scale, &code_code_lanes, code_code);
        vec_add_products(&s->scale[g], &code_z_lanes, code_z);
    }
    float d[LANES_TILES];
    LANES_UNROLL for (int t = 0; t < LANES_TILES; t++) {
        float solved = code_code[t] > 0 ? (float)(code_z[t] / code_code[t]) : 0.0f;
        d[t] = solved > 0 ? solved : vec_of_tile(s->d, t);
    }
    vec wanted = vec_of_tiles(d);
    q6_solution tried = *s;
    tried.d = vec_half_scale(&wanted);
    q6_measure_solution(p, &tried, weighted);
    q6_keep_better(s, &tried);
}

LANES_INLINE void q6_try_neighbours(const q6_problem *p, q6_solution *s, int reach, bool weighted) {
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        vec middle = s->scale[g];
        for (int a = -reach; a <= reach; a++) {
            vec scale = vec_clamp(middle + (float)a, 0, SPK_QUANT_Q6_SCALE_MAX);
            vec error = q6_measure(p, g, &scale, &s->d, weighted);
            vec_mask better = vec_less(error, s->error[g]);
            s->error[g] = vec_min(error, s->error[g]);
            s->scale[g] = vec_choose(better, scale, s->scale[g]);
        }
    }
}

/* As polish in quant_affine_lanes.c: where little is lost, many d are measured. */
LANES_INLINE void q6_polish(const q6_problem *p, q6_solution *s, bool weighted) {
    vec whole = vec_sum(&p->zz_sum[0]) + vec_sum(&p->zz_sum[1]);
    vec slope[GROUP_COUNT] = { s->scale[0] * s->d, s->scale[1] * s->d }, larger = vec_max(slope[0], slope[1]);
    vec top_slope = vec_largest(&larger);
    vec_mask is_open = vec_both(vec_not(vec_less(SPK_QUANT_SMALL_ERROR * whole, q6_error(s))), vec_less(vec_all(0.0f), top_slope));
    for (int top = SPK_QUANT_Q6_SCALE_MAX; top >= POLISH_TOP_MIN && vec_any(is_open); top--) {
        vec wanted = top_slope / (float)top;
        q6_solution tried = { .d = vec_half_scale(&wanted) };
        vec inverse_d = vec_inverse_or_zero(tried.d);
        LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
            tried.scale[g] = vec_clamp(vec_round(slope[g] * inverse_d), 0, SPK_QUANT_Q6_SCALE_MAX);
            tried.error[g] = q6_measure(p, g, &tried.scale[g], &tried.d, weighted);
        }
        vec_mask is_better = vec_both(is_open, vec_less(q6_error(&tried), q6_error(s)));
        *s = q6_choose(&is_better, &tried, s);
    }
}

LANES_INLINE int q6_fast_span_count(bool weighted) {
    return weighted ? Q6_FAST_WEIGHTED_SPAN_COUNT : Q6_FAST_SPAN_COUNT;
}

LANES_INLINE void q6_search_fast(const q6_problem *p, bool weighted,
                                 q6_candidate (*candidates)[GROUP_COUNT], q6_solution *s) {
    int span_count = q6_fast_span_count(weighted);
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) q6_make_candidates(p, g, 0, span_count, weighted, candidates);
    q6_choose_d(candidates, span_count, Q6_FAST_TOP_COUNT, s);
    q6_measure_solution(p, s, weighted);
    q6_solve_d(p, s, weighted);
    q6_polish(p, s, weighted);
}

/* From what the fast search has found, which is kept where it is better. */
LANES_INLINE void q6_search_normal(const q6_problem *p, bool weighted,
                                   q6_candidate (*candidates)[GROUP_COUNT], q6_solution *s) {
    q6_solution wider;
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++)
        q6_make_candidates(p, g, q6_fast_span_count(weighted), Q6_NORMAL_SPAN_COUNT, weighted, candidates);
    q6_choose_d(candidates, Q6_NORMAL_SPAN_COUNT, Q6_TOP_COUNT, &wider);
    q6_measure_solution(p, &wider, weighted);
    q6_solve_d(p, &wider, weighted);
    q6_try_neighbours(p, &wider, Q6_REACH, weighted);
    q6_solve_d(p, &wider, weighted);
    q6_polish(p, &wider, weighted);
    vec_mask is_better = vec_less(q6_error(s), q6_error(&wider));
    *s = q6_choose(&is_better, s, &wider);
}

/* Neighbours and d in turns, until neither finds anything; for the tiles that take part. */
LANES_INLINE void q6_refine(const q6_problem *p, bool weighted, const vec_mask *takes_part, q6_solution *s) {
    vec_mask is_open = *takes_part;
    for (int round = 0; round < Q6_BEST_ROUNDS_MAX && vec_any(is_open); round++) {
        q6_solution next = *s;
        q6_solve_d(p, &next, weighted);
        q6_try_neighbours(p, &next, Q6_BEST_REACH, weighted);
        vec before = q6_error(s);
        *s = q6_choose(&is_open, &next, s);
        is_open = vec_both(is_open, vec_less(q6_error(s), before));
    }
}

/* From what the normal search has found: that, and what many d begin with, each refined. */
LANES_INLINE void q6_search_best(const q6_problem *p, bool weighted,
                                 q6_candidate (*candidates)[GROUP_COUNT], q6_solution *s) {
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++)
        q6_make_candidates(p, g, Q6_NORMAL_SPAN_COUNT, Q6_BEST_SPAN_COUNT, weighted, candidates);
    vec top_slope = q6_top_slope(candidates, Q6_BEST_SPAN_COUNT);
    vec_mask all = vec_less(vec_all(0.0f), vec_all(1.0f));
    q6_refine(p, weighted, &all, s);
    for (int t = 0; t < Q6_BEST_TOP_COUNT; t++) {
        q6_solution tried;
        vec d = q6_factor(&top_slope, t);
        q6_try_d(candidates, Q6_BEST_SPAN_COUNT, &d, &tried);
        q6_measure_solution(p, &tried, weighted);
        vec_mask is_hopeful = vec_not(vec_less(HOPELESS * q6_error(s), q6_error(&tried)));
        q6_refine(p, weighted, &is_hopeful, &tried);
        vec_mask is_better = vec_both(is_hopeful, vec_less(q6_error(&tried), q6_error(s)));
        *s = q6_choose(&is_better, &tried, s);
    }
    q6_polish(p, s, weighted);
}

LANES_INLINE void q6_search(const spk_quant_tile *const tiles[], spk_quant_effort effort, bool weighted, spk_quant_q6_fit *const out[]) {
    q6_problem p;
    typedef q6_candidate pair[GROUP_COUNT];
    VEC_ARRAY(pair, candidates, Q6_BEST_SPAN_COUNT, q6_span_count(effort));
    q6_solution s;
    q6_prepare(&p, tiles, weighted);
    q6_search_fast(&p, weighted, candidates, &s);
    if (effort != SPK_EFFORT_FAST) q6_search_normal(&p, weighted, candidates, &s);
    if (effort == SPK_EFFORT_BEST) q6_search_best(&p, weighted, candidates, &s);
    vec_store_half(s.d, out, d);
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        vec inverse_step, scale = s.scale[g] * p.turn[g];
        (void)step_of(&s.scale[g], &s.d, &inverse_step);
        vec_store_bytes(scale, out, scale + g * SPK_QUANT_LANES);
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            vec code = q6_code(p.z[i] * inverse_step);
            vec_store_bytes(code, out, code[i]);
        }
    }
}

LANES_ENTRY void SPK_LANES_NAME(spk_quant_q6)(const spk_quant_tile *const tiles[], spk_quant_effort effort,
                                              spk_quant_q6_fit *const out[]) {
    if (tiles[0]->weighted) {
        q6_search(tiles, effort, true, out);
    } else {
        q6_search(tiles, effort, false, out);
    }
}

/* ---- Q8_0: eight blocks, each with a d of its own ---- */

#define q8_code(place) vec_clamp(vec_round(place), -SPK_QUANT_Q8_CODE_MAX, SPK_QUANT_Q8_CODE_MAX)

LANES_INLINE void q8_measure(const spk_quant_tile *const tiles[], const vec *d, int count, bool weighted, vec *errors) {
    vec inverse_d[Q8_BATCH];
    LANES_UNROLL for (int k = 0; k < count; k++) {
        inverse_d[k] = vec_inverse_or_zero(d[k]);
        errors[k] = vec_all(0.0f);
    }
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec x = vec_weights(tiles, i), w = load_importance(tiles, i, weighted);
        LANES_UNROLL for (int k = 0; k < count; k++) {
            vec place = x * inverse_d[k], off = place - q8_code(place);
            errors[k] += weighted ? w * off * off : off * off;
        }
    }
    LANES_UNROLL for (int k = 0; k < count; k++) errors[k] *= d[k] * d[k];
}

/* What each lane has found. */
typedef struct { vec d, error; } q8_solution;

LANES_INLINE void q8_keep_better(q8_solution *s, const vec *d, const vec *error) {
    vec_mask better = vec_less(*error, s->error);
    s->error = vec_min(*error, s->error);
    s->d = vec_choose(better, *d, s->d);
}

/* Many d that give up a few of the 127 levels; those of a lower effort come first. */
LANES_INLINE void q8_search_spans(const spk_quant_tile *const tiles[], const vec *peak, int span_count, bool weighted,
                                  q8_solution *s) {
    for (int first = 0; first < span_count; first += Q8_BATCH) {
        vec d[Q8_BATCH], errors[Q8_BATCH];
        LANES_UNROLL for (int k = 0; k < Q8_BATCH; k++) {
            int index = first + k, place = index % Q8_SPREAD * 3 + index / Q8_SPREAD;
            vec wanted = *peak / (127.0f - 0.5f * (float)place);
            d[k] = vec_half_scale(&wanted);
        }
        q8_measure(tiles, d, Q8_BATCH, weighted, errors);
        LANES_UNROLL for (int k = 0; k < Q8_BATCH; k++) q8_keep_better(s, &d[k], &errors[k]);
    }
}

/* The best d for the codes as they are. */
LANES_INLINE void q8_solve_d(const spk_quant_tile *const tiles[], bool weighted, q8_solution *s) {
    vec inverse_d = vec_inverse_or_zero(s->d), code_code = vec_all(0.0f), code_x = vec_all(0.0f), error;
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec x = vec_weights(tiles, i), code = q8_code(x * inverse_d), wc = load_importance(tiles, i, weighted) * code;
        code_code += wc * code;
        code_x += wc * x;
    }
    vec solved = code_x * vec_inverse_or_zero(code_code), d = vec_half_scale(&solved);
    q8_measure(tiles, &d, 1, weighted, &error);
    q8_keep_better(s, &d, &error);
}

/* Every F16 from where the largest weight gets code Q8_LEVELS_MAX to where it gets Q8_LEVELS_MIN. */
LANES_INLINE void q8_search_all(const spk_quant_tile *const tiles[], const vec *peak, bool weighted, q8_solution *s) {
    vec low = *peak / Q8_LEVELS_MAX, high = *peak / Q8_LEVELS_MIN, d_first = vec_half_scale(&low), d_last = vec_half_scale(&high);
    vec first = vec_half_bits(&d_first), last = vec_half_bits(&d_last), steps = last - first;
    int step_count = 0;
    steps = vec_largest(&steps);
    for (int t = 0; t < LANES_TILES; t++)
        if (step_count < (int)vec_of_tile(steps, t)) step_count = (int)vec_of_tile(steps, t);
    for (int step = 0; step <= step_count; step += Q8_BATCH) {
        vec d[Q8_BATCH], errors[Q8_BATCH];
        LANES_UNROLL for (int k = 0; k < Q8_BATCH; k++) {
            vec bits = vec_min(first + (float)(step + k), last);
            d[k] = vec_half_values(&bits);
        }
        q8_measure(tiles, d, Q8_BATCH, weighted, errors);
        LANES_UNROLL for (int k = 0; k < Q8_BATCH; k++) q8_keep_better(s, &d[k], &errors[k]);
    }
}

LANES_INLINE void q8_search(const spk_quant_tile *const tiles[], spk_quant_effort effort, bool weighted, spk_quant_q8_fit *const out[]) {
    vec peak = vec_all(0.0f);
    q8_solution s = { vec_all(0.0f), vec_all(3e38f) };
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec x = vec_weights(tiles, i);
        peak = vec_max(vec_max(x, -x), peak);
    }
    q8_search_spans(tiles, &peak, effort == SPK_EFFORT_FAST ? Q8_FAST_SPAN_COUNT : Q8_SPAN_COUNT, weighted, &s);
    if (effort != SPK_EFFORT_FAST) q8_solve_d(tiles, weighted, &s);
    if (effort == SPK_EFFORT_BEST) q8_search_all(tiles, &peak, weighted, &s);
    vec inverse_d = vec_inverse_or_zero(s.d);
    vec_store_halves(s.d, out, d);
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        vec code = q8_code(vec_weights(tiles, i) * inverse_d);
        vec_store_bytes(code, out, code[i]);
    }
}

LANES_ENTRY void SPK_LANES_NAME(spk_quant_q8)(const spk_quant_tile *const tiles[], spk_quant_effort effort, spk_quant_q8_fit *const out[]) {
    if (tiles[0]->weighted) {
        q8_search(tiles, effort, true, out);
    } else {
        q8_search(tiles, effort, false, out);
    }
}
