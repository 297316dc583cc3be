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
    v8_column             z;                    /* x, turned */
    const spk_quant_tile *tile;
    v8                    turn[GROUP_COUNT], peak[GROUP_COUNT], zz_sum[GROUP_COUNT];
} q6_problem;

/* The best multiple of one coding: x ~ slope * code, with error + curvature * (slope' - slope)^2 for another slope'. */
typedef struct { v8 slope, error, curvature; } q6_candidate;

typedef struct {
    float d;
    v8    scale[GROUP_COUNT], error[GROUP_COUNT];
} q6_solution;

LANES_INLINE v8 load_weight(const spk_quant_tile *tile, int i, bool weighted) {
    return weighted ? v8_load(tile->w[i]) : v8_all(1.0f);
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

LANES_INLINE void q6_prepare(q6_problem *p, const spk_quant_tile *tile, bool weighted) {
    p->tile = tile;
    v8_column_begin(p->z, tile);
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        v8 low = v8_all(0.0f), high = v8_all(0.0f), zz_sum = v8_all(0.0f);
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            v8 x = v8_load(tile->x[i]);
            low = v8_min(x, low);
            high = v8_max(x, high);
        }
        p->turn[g] = v8_choose(v8_less(-low, high), v8_all(-1.0f), v8_all(1.0f));
        p->peak[g] = v8_max(high, -low);
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            v8 z = v8_load(tile->x[i]) * p->turn[g];
            p->z[i] = z;
            zz_sum += load_weight(tile, i, weighted) * z * z;
        }
        p->zz_sum[g] = zz_sum;
    }
}

#define q6_code(place) v8_clamp(v8_round(place), SPK_QUANT_Q6_CODE_MIN, SPK_QUANT_Q6_CODE_MAX)

/* Of the spans begin <= s < end. */
LANES_INLINE void q6_make_candidates(const q6_problem *p, int g, int begin, int end, bool weighted,
                                     q6_candidate (*out)[GROUP_COUNT]) {
    v8 inverse_peak = v8_inverse_or_zero(p->peak[g]);
    for (int s = begin; s < end; s += Q6_BATCH) {
        v8 inverse_step[Q6_BATCH], code_code[Q6_BATCH], code_z[Q6_BATCH];
        LANES_UNROLL for (int k = 0; k < Q6_BATCH; k++) {
            inverse_step[k] = inverse_peak * q6_span(s + k);
            code_code[k] = code_z[k] = v8_all(0.0f);
        }
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            v8 z = p->z[i], w = load_weight(p->tile, i, weighted);
            LANES_UNROLL for (int k = 0; k < Q6_BATCH; k++) {
                v8 code = q6_code(z * inverse_step[k]), weighted_code = weighted ? w * code : code;
                code_code[k] += weighted_code * code;
                code_z[k] += weighted_code * z;
            }
        }
        LANES_UNROLL for (int k = 0; k < Q6_BATCH; k++) {
            v8 slope = code_z[k] * v8_inverse_or_zero(code_code[k]);
            out[s + k][g] = (q6_candidate){ slope, p->zz_sum[g] - slope * code_z[k], code_code[k] };
        }
    }
}

/* Each lane takes the candidate that is best when its slope is rounded to a multiple of d. */
LANES_INLINE float q6_try_d(q6_candidate (*candidates)[GROUP_COUNT], int span_count, float d,
                            q6_solution *out) {
    float inverse_d = d > 0 ? 1.0f / d : 0.0f;
    out->d = d;
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        v8 best_error = v8_all(3e38f), best_scale = v8_all(0.0f);
        for (int k = 0; k < span_count; k++) {
            const q6_candidate *c = &candidates[k][g];
            v8 scale = v8_clamp(v8_round(c->slope * inverse_d), 0, SPK_QUANT_Q6_SCALE_MAX);
            v8 slope_off = scale * d - c->slope, error = c->error + c->curvature * slope_off * slope_off;
            v8i better = v8_less(error, best_error);
            best_error = v8_choose(better, error, best_error);
            best_scale = v8_choose(better, scale, best_scale);
        }
        out->error[g] = best_error;
        out->scale[g] = best_scale;
    }
    return v8_sum(&out->error[0]) + v8_sum(&out->error[1]);
}

/* The largest slope of the candidates that are best before slopes are rounded. */
LANES_INLINE float q6_top_slope(q6_candidate (*candidates)[GROUP_COUNT], int span_count) {
    v8 top = v8_all(0.0f);
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        v8 error = v8_all(3e38f), slope = v8_all(0.0f);
        for (int k = 0; k < span_count; k++) {
            v8i better = v8_less(candidates[k][g].error, error);
            error = v8_choose(better, candidates[k][g].error, error);
            slope = v8_choose(better, candidates[k][g].slope, slope);
        }
        top = v8_max(slope, top);
    }
    return v8_largest(&top);
}

LANES_INLINE void q6_choose_d(q6_candidate (*candidates)[GROUP_COUNT], int span_count, int top_count,
                              q6_solution *out) {
    float top_slope = q6_top_slope(candidates, span_count);
    float least = q6_try_d(candidates, span_count, half_scale(top_slope / SPK_QUANT_Q6_SCALE_MAX), out);
    for (int t = 1; t < top_count; t++) {
        q6_solution tried;
        float d = half_scale(top_slope / (float)(SPK_QUANT_Q6_SCALE_MAX - 2 * t));
        float sum = q6_try_d(candidates, span_count, d, &tried);
        if (sum < least) least = sum, *out = tried;
    }
}

/* Places of codes for a scale; a scale of 0 has a step of 1 and the single code 0. */
LANES_INLINE v8 step_of(const v8 *scale, float d, v8 *inverse_step) {
    v8 step = *scale * d;
    *inverse_step = v8_inverse_or_zero(step);
    return v8_choose(v8_less(v8_all(0.0f), step), step, v8_all(1.0f));
}

LANES_INLINE v8 q6_measure(const q6_problem *p, int g, const v8 *scale, float d, bool weighted) {
    v8 inverse_step, step = step_of(scale, d, &inverse_step), sum = v8_all(0.0f);
    v8i filled = v8_less(v8_all(0.0f), inverse_step);
    for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
        v8 place = p->z[i] * inverse_step, off = place - q6_code(place);
        sum += load_weight(p->tile, i, weighted) * off * off;
    }
    return v8_choose(filled, sum * step * step, p->zz_sum[g]);
}

LANES_INLINE void q6_measure_solution(const q6_problem *p, q6_solution *s, bool weighted) {
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) s->error[g] = q6_measure(p, g, &s->scale[g], s->d, weighted);
}

LANES_INLINE float q6_error(const q6_solution *s) {
    return v8_sum(&s->error[0]) + v8_sum(&s->error[1]);
}

/* Best d for the codes as they are. */
LANES_INLINE void q6_solve_d(const q6_problem *p, q6_solution *s, bool weighted) {
    double code_code = 0, code_z = 0;
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        v8 inverse_step, code_code_lanes = v8_all(0.0f), code_z_lanes = v8_all(0.0f);
        (void)step_of(&s->scale[g], s->d, &inverse_step);
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            v8 code = q6_code(p->z[i] * inverse_step), weighted_code = load_weight(p->tile, i, weighted) * code;
            code_code_lanes += weighted_code * code;
            code_z_lanes += weighted_code * p->z[i];
        }
        for (int j = 0; j < SPK_QUANT_LANES; j++) {
            double scale = (double)v8_lane(s->scale[g], j);
            code_code += scale * scale * (double)v8_lane(code_code_lanes, j);
            code_z += scale * (double)v8_lane(code_z_lanes, j);
        }
    }
    if (!(code_code > 0)) return;
    q6_solution tried = *s;
    tried.d = half_scale((float)(code_z / code_code));
    if (!(tried.d > 0) || tried.d == s->d) return;
    q6_measure_solution(p, &tried, weighted);
    if (q6_error(&tried) < q6_error(s)) *s = tried;
}

LANES_INLINE void q6_try_neighbours(const q6_problem *p, q6_solution *s, int reach, bool weighted) {
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        v8 middle = s->scale[g];
        for (int a = -reach; a <= reach; a++) {
            v8 scale = v8_clamp(middle + (float)a, 0, SPK_QUANT_Q6_SCALE_MAX);
            v8 error = q6_measure(p, g, &scale, s->d, weighted);
            v8i better = v8_less(error, s->error[g]);
            s->error[g] = v8_choose(better, error, s->error[g]);
            s->scale[g] = v8_choose(better, scale, s->scale[g]);
        }
    }
}

/* As polish in quant_affine_lanes.c: where little is lost, many d are measured. */
LANES_INLINE void q6_polish(const q6_problem *p, q6_solution *s, bool weighted) {
    if (q6_error(s) > SPK_QUANT_SMALL_ERROR * (v8_sum(&p->zz_sum[0]) + v8_sum(&p->zz_sum[1]))) return;
    v8 slope[GROUP_COUNT] = { s->scale[0] * s->d, s->scale[1] * s->d }, larger = v8_max(slope[0], slope[1]);
    float top_slope = v8_largest(&larger);
    for (int top = SPK_QUANT_Q6_SCALE_MAX; top >= POLISH_TOP_MIN && top_slope > 0; top--) {
        q6_solution tried = { .d = half_scale(top_slope / (float)top) };
        float inverse_d = 1.0f / tried.d;
        LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
            tried.scale[g] = v8_clamp(v8_round(slope[g] * inverse_d), 0, SPK_QUANT_Q6_SCALE_MAX);
            tried.error[g] = q6_measure(p, g, &tried.scale[g], tried.d, weighted);
        }
        if (q6_error(&tried) < q6_error(s)) *s = tried;
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
    if (!(q6_error(s) < q6_error(&wider))) *s = wider;
}

/* Neighbours and d in turns, until neither finds anything. */
LANES_INLINE void q6_refine(const q6_problem *p, bool weighted, q6_solution *s) {
    for (int round = 0; round < Q6_BEST_ROUNDS_MAX; round++) {
        float before = q6_error(s);
        q6_solve_d(p, s, weighted);
        q6_try_neighbours(p, s, Q6_BEST_REACH, weighted);
        if (!(q6_error(s) < before)) return;
    }
}

/* From what the normal search has found: that, and what many d begin with, each refined. */
LANES_INLINE void q6_search_best(const q6_problem *p, bool weighted,
                                 q6_candidate (*candidates)[GROUP_COUNT], q6_solution *s) {
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++)
        q6_make_candidates(p, g, Q6_NORMAL_SPAN_COUNT, Q6_BEST_SPAN_COUNT, weighted, candidates);
    float top_slope = q6_top_slope(candidates, Q6_BEST_SPAN_COUNT);
    q6_refine(p, weighted, s);
    for (int t = 0; t < Q6_BEST_TOP_COUNT; t++) {
        q6_solution tried;
        float d = half_scale(top_slope / (float)(SPK_QUANT_Q6_SCALE_MAX - t));
        (void)q6_try_d(candidates, Q6_BEST_SPAN_COUNT, d, &tried);
        q6_measure_solution(p, &tried, weighted);
        if (q6_error(&tried) > HOPELESS * q6_error(s)) continue;
        q6_refine(p, weighted, &tried);
        if (q6_error(&tried) < q6_error(s)) *s = tried;
    }
    q6_polish(p, s, weighted);
}

LANES_INLINE void q6_search(const spk_quant_tile *tile, spk_quant_effort effort, bool weighted, spk_quant_q6_fit *out) {
    q6_problem p;
    typedef q6_candidate pair[GROUP_COUNT];
    V8_ARRAY(pair, candidates, Q6_BEST_SPAN_COUNT, q6_span_count(effort));
    q6_solution s;
    q6_prepare(&p, tile, weighted);
    q6_search_fast(&p, weighted, candidates, &s);
    if (effort != SPK_EFFORT_FAST) q6_search_normal(&p, weighted, candidates, &s);
    if (effort == SPK_EFFORT_BEST) q6_search_best(&p, weighted, candidates, &s);
    LANES_ONCE out->d = half_bits_of(s.d);
    LANES_UNROLL for (int g = 0; g < GROUP_COUNT; g++) {
        v8 inverse_step, scale = s.scale[g] * p.turn[g];
        (void)step_of(&s.scale[g], s.d, &inverse_step);
        v8_store_bytes(&scale, out->scale + g * SPK_QUANT_LANES);
        for (int i = g * GROUP_DEPTH; i < (g + 1) * GROUP_DEPTH; i++) {
            v8 code = q6_code(p.z[i] * inverse_step);
            v8_store_bytes(&code, out->code[i]);
        }
    }
}

LANES_ENTRY void SPK_LANES_NAME(spk_quant_q6)(const spk_quant_tile *tile, spk_quant_effort effort, spk_quant_q6_fit *out) {
    if (tile->weighted) {
        q6_search(tile, effort, true, out);
    } else {
        q6_search(tile, effort, false, out);
    }
}

/* ---- Q8_0: eight blocks, each with a d of its own ---- */

/* half_scale of each lane. */
LANES_INLINE v8 half_scales(const v8 *v) {
    v8 capped = v8_min(*v, v8_all(SPK_QUANT_F16_MAX)), bits = v8_half_bits(&capped), rounded = v8_half_values(&bits);
    v8i lost = v8_less(rounded, v8_min(capped, v8_all(0x1p-24f)));
    return v8_choose(lost, v8_all(0x1p-24f), rounded);
}

#define q8_code(place) v8_clamp(v8_round(place), -SPK_QUANT_Q8_CODE_MAX, SPK_QUANT_Q8_CODE_MAX)

LANES_INLINE void q8_measure(const spk_quant_tile *tile, const v8 *d, int count, bool weighted, v8 *errors) {
    v8 inverse_d[Q8_BATCH];
    LANES_UNROLL for (int k = 0; k < count; k++) {
        inverse_d[k] = v8_inverse_or_zero(d[k]);
        errors[k] = v8_all(0.0f);
    }
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 x = v8_load(tile->x[i]), w = load_weight(tile, i, weighted);
        LANES_UNROLL for (int k = 0; k < count; k++) {
            v8 place = x * inverse_d[k], off = place - q8_code(place);
            errors[k] += weighted ? w * off * off : off * off;
        }
    }
    LANES_UNROLL for (int k = 0; k < count; k++) errors[k] *= d[k] * d[k];
}

/* What each lane has found. */
typedef struct { v8 d, error; } q8_solution;

LANES_INLINE void q8_keep_better(q8_solution *s, const v8 *d, const v8 *error) {
    v8i better = v8_less(*error, s->error);
    s->error = v8_choose(better, *error, s->error);
    s->d = v8_choose(better, *d, s->d);
}

/* Many d that give up a few of the 127 levels; those of a lower effort come first. */
LANES_INLINE void q8_search_spans(const spk_quant_tile *tile, const v8 *peak, int span_count, bool weighted,
                                  q8_solution *s) {
    for (int first = 0; first < span_count; first += Q8_BATCH) {
        v8 d[Q8_BATCH], errors[Q8_BATCH];
        LANES_UNROLL for (int k = 0; k < Q8_BATCH; k++) {
            int index = first + k, place = index % Q8_SPREAD * 3 + index / Q8_SPREAD;
            v8 wanted = *peak / (127.0f - 0.5f * (float)place);
            d[k] = half_scales(&wanted);
        }
        q8_measure(tile, d, Q8_BATCH, weighted, errors);
        LANES_UNROLL for (int k = 0; k < Q8_BATCH; k++) q8_keep_better(s, &d[k], &errors[k]);
    }
}

/* The best d for the codes as they are. */
LANES_INLINE void q8_solve_d(const spk_quant_tile *tile, bool weighted, q8_solution *s) {
    v8 inverse_d = v8_inverse_or_zero(s->d), code_code = v8_all(0.0f), code_x = v8_all(0.0f), error;
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 x = v8_load(tile->x[i]), code = q8_code(x * inverse_d), wc = load_weight(tile, i, weighted) * code;
        code_code += wc * code;
        code_x += wc * x;
    }
    v8 solved = code_x * v8_inverse_or_zero(code_code), d = half_scales(&solved);
    q8_measure(tile, &d, 1, weighted, &error);
    q8_keep_better(s, &d, &error);
}

/* Every F16 from where the largest weight gets code Q8_LEVELS_MAX to where it gets Q8_LEVELS_MIN. */
LANES_INLINE void q8_search_all(const spk_quant_tile *tile, const v8 *peak, bool weighted, q8_solution *s) {
    v8 low = *peak / Q8_LEVELS_MAX, high = *peak / Q8_LEVELS_MIN, d_first = half_scales(&low), d_last = half_scales(&high);
    v8 first = v8_half_bits(&d_first), last = v8_half_bits(&d_last), steps = last - first;
    int step_count = (int)v8_largest(&steps);
    for (int step = 0; step <= step_count; step += Q8_BATCH) {
        v8 d[Q8_BATCH], errors[Q8_BATCH];
        LANES_UNROLL for (int k = 0; k < Q8_BATCH; k++) {
            v8 bits = v8_min(first + (float)(step + k), last);
            d[k] = v8_half_values(&bits);
        }
        q8_measure(tile, d, Q8_BATCH, weighted, errors);
        LANES_UNROLL for (int k = 0; k < Q8_BATCH; k++) q8_keep_better(s, &d[k], &errors[k]);
    }
}

LANES_INLINE void q8_search(const spk_quant_tile *tile, spk_quant_effort effort, bool weighted, spk_quant_q8_fit *out) {
    v8 peak = v8_all(0.0f);
    q8_solution s = { v8_all(0.0f), v8_all(3e38f) };
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 x = v8_load(tile->x[i]);
        peak = v8_max(v8_max(x, -x), peak);
    }
    q8_search_spans(tile, &peak, effort == SPK_EFFORT_FAST ? Q8_FAST_SPAN_COUNT : Q8_SPAN_COUNT, weighted, &s);
    if (effort != SPK_EFFORT_FAST) q8_solve_d(tile, weighted, &s);
    if (effort == SPK_EFFORT_BEST) q8_search_all(tile, &peak, weighted, &s);
    v8 inverse_d = v8_inverse_or_zero(s.d);
    v8_store_halves(&s.d, out->d);
    for (int i = 0; i < SPK_QUANT_DEPTH; i++) {
        v8 code = q8_code(v8_load(tile->x[i]) * inverse_d);
        v8_store_bytes(&code, out->code[i]);
    }
}

LANES_ENTRY void SPK_LANES_NAME(spk_quant_q8)(const spk_quant_tile *tile, spk_quant_effort effort, spk_quant_q8_fit *out) {
    if (tile->weighted) {
        q8_search(tile, effort, true, out);
    } else {
        q8_search(tile, effort, false, out);
    }
}
