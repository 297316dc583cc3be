/* runtime/compare.c - see compare.h.
 *
 * A position takes two passes over each model's logits (the maximum, then the sum of exponentials), one over each pair.
 *
 * The pair pass uses  KL(p || q) = sum_i p_i h(t_i),  t_i = ln(q_i / p_i),  h(t) = e^t - 1 - t >= 0,  which equals the
 * usual sum of p_i (-t_i) because sum q_i = sum p_i = 1.  The usual sum cancels: an error of 1e-7 in a log-sum-exp is
 * an error of 1e-7 in the KL, which for two nearly equal models is all of it.  Here an error e in t moves the sum by
 * e KL + e^2 / 2 only, and since no term is negative, relative errors do not grow in the addition.
 *
 * Exponentials are F32.  exp_f32 is within 2^-22 of the truth for its argument, and its argument x = logit - max
 * carries half an ulp, |x| 2^-24 at most, so p and q are within (|x| + 4) 2^-24 < 1e-5 wherever x does not underflow.
 * h is a series where |t| <= 1/2; elsewhere q - p - p t, whose parts are at most ten times larger than the term: 1e-4.
 */
#include "runtime/compare.h"

#include <assert.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 64 };                 /* independent sums: a fixed order of addition that the compiler can vectorise */

typedef struct {
    double   kl, nll;                /* nll: -ln p of the true next token */
    uint32_t top;
} point;

struct spk_compare {
    spk_compare_options options;
    uint64_t count, room;            /* positions scored, positions that the arrays below hold */
    double   *base_nll;
    uint32_t *base_top;
    point    *points[SPK_COMPARE_MODEL_COUNT_MAX - 1];
};

/* ---- One position ---- */

/* exp(x) for x <= 0: 2^n e^r with n = round(x / ln 2) and the Taylor series of e^r, |r| <= 0.347, to r^7 (the next
 * term is 5e-9).  Zero from n = -127 on, where 2^n has no exponent bits.  A branch would keep the loops below from
 * vectorising. */
static inline float exp_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = bits < 0xc2b00000u ? bits : 0xc2b00000u;      /* x = max(x, -88) of negative numbers, by their bits */
    memcpy(&x, &bits, sizeof x);
    const float round_magic = 0x1.8p23f;                 /* adding it leaves the integer in the low bits */
    const float ln2_high = 0x1.62ep-1f, ln2_low = 0x1.0bfbe8p-15f; /* high part: 12 bits, so n * ln2_high is exact */
    float shifted = x * 0x1.715476p+0f + round_magic;
    float n = shifted - round_magic;
    float r = (x - n * ln2_high) - n * ln2_low;
    float y = 1.0f / 5040;
    y = y * r + 1.0f / 720;
    y = y * r + 1.0f / 120;
    y = y * r + 1.0f / 24;
    y = y * r + 1.0f / 6;
    y = y * r + 0.5f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;                   /* 2^n */
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* condition ? yes : no, both already computed; a branch would keep the loop from vectorising. */
static inline float choose(bool condition, float yes, float no) {
    uint32_t mask = 0u - (uint32_t)condition, a, b;
    memcpy(&a, &yes, sizeof a);
    memcpy(&b, &no, sizeof b);
    a = (a & mask) | (b & ~mask);
    memcpy(&yes, &a, sizeof yes);
    return yes;
}

static double sum_of_lanes(const double lanes[LANES]) {
    double sum = 0;
    for (int l = 0; l < LANES; l++) sum += lanes[l];
    return sum;
}

/* What a position's logits look like on their own. */
typedef struct {
    const float *logits;
    float        max, scale;         /* p_i = scale * exp(logit_i - max) */
    double       log_sum_exp;
    uint32_t     top;
} distribution;

static spk_status refuse_logits(const char *name, uint64_t position, const float *logits, uint32_t vocab_size,
                                spk_error *err) {
    for (uint32_t i = 0; i < vocab_size; i++)
        if (!(logits[i] <= FLT_MAX))
            return spk_fail(err, SPK_E_NONFINITE, "%s: position %" PRIu64 ": the logit of token %" PRIu32 " is %s",
                            name, position, i, isnan(logits[i]) ? "NaN" : "+inf");
    return spk_fail(err, SPK_E_NONFINITE, "%s: position %" PRIu64 ": every logit is -inf", name, position);
}

/* False where the logits are no distribution: refuse_logits says why. */
static bool read_logits(const float *logits, uint32_t vocab_size, distribution *out) {
    float max[LANES];
    uint32_t bad[LANES] = { 0 };
    for (int l = 0; l < LANES; l++) max[l] = -INFINITY;
    uint32_t i = 0;
    for (; i + LANES <= vocab_size; i += LANES)
        for (int l = 0; l < LANES; l++) {
            float x = logits[i + (uint32_t)l];
            bad[l] |= x <= FLT_MAX ? 0u : 1u;
            max[l] = x > max[l] ? x : max[l];
        }
    for (; i < vocab_size; i++) {
        bad[0] |= logits[i] <= FLT_MAX ? 0u : 1u;
        max[0] = logits[i] > max[0] ? logits[i] : max[0];
    }
    for (int l = 1; l < LANES; l++) {
        bad[0] |= bad[l];
        max[0] = max[l] > max[0] ? max[l] : max[0];
    }
    if (bad[0] || max[0] == -INFINITY) return false;

    double sum[LANES] = { 0 };
    for (i = 0; i + LANES <= vocab_size; i += LANES)
        for (int l = 0; l < LANES; l++) sum[l] += (double)exp_f32(logits[i + (uint32_t)l] - max[0]);
    for (; i < vocab_size; i++) sum[0] += (double)exp_f32(logits[i] - max[0]);
    double total = sum_of_lanes(sum);
    uint32_t top = 0;
    while (logits[top] != max[0]) top++;
    *out = (distribution){ .logits = logits, .max = max[0], .scale = (float)(1 / total),
                           .log_sum_exp = (double)max[0] + log(total), .top = top };
    return true;
}

/* p h(t) for one token; shift is the base's log-sum-exp less the candidate's. */
static inline double kl_term(const distribution *base, const distribution *candidate, double shift, uint32_t i) {
    float b = base->logits[i], c = candidate->logits[i];
    float p = base->scale * exp_f32(b - base->max), q = candidate->scale * exp_f32(c - candidate->max);
    float t = (float)((double)c - (double)b + shift);
    float series = 1.0f / 40320;
    series = series * t + 1.0f / 5040;
    series = series * t + 1.0f / 720;
    series = series * t + 1.0f / 120;
    series = series * t + 1.0f / 24;
    series = series * t + 1.0f / 6;
    series = series * t + 0.5f;
    float near = p * (t * t * series), far = (q - p) - p * t;
    float elsewhere = choose(p > 0, far, q);             /* p = 0: t may be infinite or NaN, and the term is q */
    return (double)choose(fabsf(t) <= 0.5f, near, elsewhere);
}

static double kl_of(const distribution *base, const distribution *candidate, uint32_t vocab_size) {
    double sum[LANES] = { 0 }, shift = base->log_sum_exp - candidate->log_sum_exp;
    uint32_t i = 0;
    for (; i + LANES <= vocab_size; i += LANES)
        for (int l = 0; l < LANES; l++) sum[l] += kl_term(base, candidate, shift, i + (uint32_t)l);
    for (; i < vocab_size; i++) sum[0] += kl_term(base, candidate, shift, i);
    return sum_of_lanes(sum);
}

typedef struct {
    spk_compare        *compare;
    const float *const *logits;
    const uint32_t     *next_tokens;
    spk_status          status[SPK_COMPARE_BATCH_MAX];
} batch;

/* Position `index` of a batch into the arrays. */
static spk_status score_position(const batch *b, uint64_t index, spk_error *err) {
    spk_compare *compare = b->compare;
    const uint32_t vocab_size = compare->options.vocab_size, next = b->next_tokens[index];
    const uint64_t position = compare->count + index;
    distribution base = { 0 };
    for (uint32_t m = 0; m < compare->options.model_count; m++) {
        const char *name = compare->options.names[m];
        const float *logits = b->logits[m] + index * vocab_size;
        distribution own;
        if (!read_logits(logits, vocab_size, &own)) return refuse_logits(name, position, logits, vocab_size, err);
        double nll = own.log_sum_exp - (double)logits[next];
        if (!(nll < INFINITY))
            return spk_fail(err, SPK_E_NONFINITE, "%s: position %" PRIu64 ": the true next token %" PRIu32
                            " has probability zero", name, position, next);
        if (m == 0) {
            base = own;
            compare->base_nll[position] = nll;
            compare->base_top[position] = own.top;
            continue;
        }
        double kl = kl_of(&base, &own, vocab_size);
        if (!(kl < INFINITY))
            return spk_fail(err, SPK_E_NONFINITE, "%s: position %" PRIu64 ": a token that %s expects has probability "
                            "zero", name, position, compare->options.names[0]);
        compare->points[m - 1][position] = (point){ .kl = kl, .nll = nll, .top = own.top };
    }
    return SPK_OK;
}

static void score_range(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    batch *b = context;
    for (uint64_t i = begin; i < end; i++) b->status[i] = score_position(b, i, NULL);
}

/* ---- The collection ---- */

spk_status spk_compare_create(const spk_compare_options *options, spk_compare **out, spk_error *err) {
    assert(options->vocab_size >= 1 && options->window_positions >= 1);
    assert(options->model_count >= 2 && options->model_count <= SPK_COMPARE_MODEL_COUNT_MAX);
    spk_compare *compare = calloc(1, sizeof *compare);
    if (compare == NULL) return spk_fail(err, SPK_E_MEMORY, "comparison: out of memory");
    compare->options = *options;
    *out = compare;
    return SPK_OK;
}

void spk_compare_destroy(spk_compare *compare) {
    if (compare == NULL) return;
    free(compare->base_nll);
    free(compare->base_top);
    for (size_t c = 0; c < SPK_COMPARE_MODEL_COUNT_MAX - 1; c++) free(compare->points[c]);
    free(compare);
}

static spk_status make_room(spk_compare *compare, uint64_t count, spk_error *err) {
    if (compare->count + count > SPK_COMPARE_POSITION_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "comparison: more than %" PRIu64 " positions",
                        SPK_COMPARE_POSITION_COUNT_MAX);
    if (compare->count + count <= compare->room) return SPK_OK;
    uint64_t room = compare->room == 0 ? 4096 : 2 * compare->room;
    while (room < compare->count + count) room *= 2;
    double *base_nll = realloc(compare->base_nll, room * sizeof *base_nll);
    if (base_nll == NULL) return spk_fail(err, SPK_E_MEMORY, "comparison: out of memory");
    compare->base_nll = base_nll;
    uint32_t *base_top = realloc(compare->base_top, room * sizeof *base_top);
    if (base_top == NULL) return spk_fail(err, SPK_E_MEMORY, "comparison: out of memory");
    compare->base_top = base_top;
    for (uint32_t c = 0; c + 1 < compare->options.model_count; c++) {
        point *points = realloc(compare->points[c], room * sizeof *points);
        if (points == NULL) return spk_fail(err, SPK_E_MEMORY, "comparison: out of memory");
        compare->points[c] = points;
    }
    compare->room = room;
    return SPK_OK;
}

spk_status spk_compare_add(spk_compare *compare, const float *const *logits, const uint32_t *next_tokens,
                           uint32_t count, spk_pool *pool, spk_error *err) {
    assert(count >= 1 && count <= SPK_COMPARE_BATCH_MAX);
    SPK_TRY(make_room(compare, count, err));
    batch b = { .compare = compare, .logits = logits, .next_tokens = next_tokens };
    spk_pool_run(pool, count, 1, score_range, &b);
    for (uint32_t i = 0; i < count; i++)
        if (b.status[i] != SPK_OK) return score_position(&b, i, err);   /* again, for the text of the first failure */
    compare->count += count;
    return SPK_OK;
}

spk_status spk_compare_append(spk_compare *compare, const spk_compare *more, spk_error *err) {
    assert(compare->options.vocab_size == more->options.vocab_size &&
           compare->options.model_count == more->options.model_count);
    SPK_TRY(make_room(compare, more->count, err));
    memcpy(compare->base_nll + compare->count, more->base_nll, more->count * sizeof *more->base_nll);
    memcpy(compare->base_top + compare->count, more->base_top, more->count * sizeof *more->base_top);
    for (uint32_t c = 0; c + 1 < compare->options.model_count; c++)
        memcpy(compare->points[c] + compare->count, more->points[c], more->count * sizeof(point));
    compare->count += more->count;
    return SPK_OK;
}

uint64_t spk_compare_position_count(const spk_compare *compare) { return compare->count; }

spk_compare_point spk_compare_at(const spk_compare *compare, uint32_t candidate, uint64_t position) {
    assert(candidate + 1 < compare->options.model_count && position < compare->count);
    const point *p = &compare->points[candidate][position];
    return (spk_compare_point){ .kl = p->kl, .nll_base = compare->base_nll[position], .nll_candidate = p->nll,
                                .top_base = compare->base_top[position], .top_candidate = p->top };
}

/* ---- The summary ---- */

typedef struct { double mean, se; } estimate;

/* Mean and its standard error from sums over n >= 2 values taken relative to their mean: the second pass of two. */
static double standard_error(double square_sum, double n) { return sqrt(square_sum / (n - 1) / n); }

static estimate kl_minus(const point *points, const point *others, uint64_t count) {
    estimate e = { 0, 0 };
    double n = (double)count, squares = 0;
    for (uint64_t i = 0; i < count; i++) e.mean += (points[i].kl - (others ? others[i].kl : 0)) / n;
    for (uint64_t i = 0; i < count; i++) {
        double d = points[i].kl - (others ? others[i].kl : 0) - e.mean;
        squares += d * d;
    }
    e.se = standard_error(squares, n);
    return e;
}

/* Windows as draws; the last one may be short, so this is the error of a ratio of sums: with S_w the window's sum of
 * deviations from the overall mean, sqrt(W / (W - 1) * sum S_w^2) / n. */
static double kl_window_error(const point *points, uint64_t count, uint64_t window_positions, double mean,
                              uint64_t *window_count) {
    *window_count = (count + window_positions - 1) / window_positions;
    if (*window_count < 2) return 0;
    double squares = 0, windows = (double)*window_count;
    for (uint64_t begin = 0; begin < count; begin += window_positions) {
        double sum = 0;
        for (uint64_t i = begin; i < count && i < begin + window_positions; i++) sum += points[i].kl - mean;
        squares += sum * sum;
    }
    return sqrt(windows / (windows - 1) * squares) / (double)count;
}

static int compare_doubles(const void *a, const void *b) {
    double x, y;
    memcpy(&x, a, sizeof x);
    memcpy(&y, b, sizeof y);
    return (x > y) - (x < y);
}

void spk_sort_doubles(double *values, uint64_t count) { qsort(values, count, sizeof *values, compare_doubles); }

double spk_percentile(const double *sorted, uint64_t count, double share) {
    double place = share * (double)(count - 1);
    uint64_t below = (uint64_t)place;
    if (below + 1 >= count) return sorted[count - 1];
    return sorted[below] + (place - (double)below) * (sorted[below + 1] - sorted[below]);
}

static spk_status kl_percentiles(const point *points, uint64_t count, spk_compare_summary *s, spk_error *err) {
    double *sorted = malloc(count * sizeof *sorted);
    if (sorted == NULL) return spk_fail(err, SPK_E_MEMORY, "comparison: out of memory");
    for (uint64_t i = 0; i < count; i++) sorted[i] = points[i].kl;
    spk_sort_doubles(sorted, count);
    s->kl_median = spk_percentile(sorted, count, 0.5);
    s->kl_p90 = spk_percentile(sorted, count, 0.9);
    s->kl_p95 = spk_percentile(sorted, count, 0.95);
    s->kl_p99 = spk_percentile(sorted, count, 0.99);
    s->kl_p999 = spk_percentile(sorted, count, 0.999);
    s->kl_max = sorted[count - 1];
    free(sorted);
    return SPK_OK;
}

/* Everything about the true next token. */
static void likelihoods(const double *base_nll, const point *points, uint64_t count, spk_compare_summary *s) {
    double n = (double)count, base = 0, candidate = 0, squares = 0, dp_squares = 0;
    for (uint64_t i = 0; i < count; i++) {
        base += base_nll[i] / n;
        candidate += points[i].nll / n;
        double dp = exp(-points[i].nll) - exp(-base_nll[i]);
        s->dp_mean += dp / n;
        dp_squares += dp * dp / n;
    }
    s->dp_rms = sqrt(dp_squares);
    s->ppl_base = exp(base);
    s->ppl_candidate = exp(candidate);
    s->ln_ppl_ratio = candidate - base;
    for (uint64_t i = 0; i < count; i++) {
        double d = points[i].nll - base_nll[i] - s->ln_ppl_ratio;
        squares += d * d;
    }
    s->ln_ppl_ratio_se = standard_error(squares, n);
}

spk_status spk_compare_summarize(const spk_compare *compare, uint32_t candidate, spk_compare_summary *out,
                                 spk_error *err) {
    assert(candidate + 1 < compare->options.model_count);
    const uint64_t count = compare->count;
    const point *points = compare->points[candidate];
    const char *name = compare->options.names[candidate + 1];
    if (count < 2)
        return spk_fail(err, SPK_E_LIMIT, "%s: %" PRIu64 " positions scored; statistics need at least 2", name, count);
    spk_compare_summary s = { .positions = count };
    double n = (double)count;

    uint64_t same = 0;
    for (uint64_t i = 0; i < count; i++) same += points[i].top == compare->base_top[i];
    s.top1 = (double)same / n;
    s.top1_se = sqrt(s.top1 * (1 - s.top1) / (n - 1));

    estimate kl = kl_minus(points, NULL, count), diff = kl_minus(points, compare->points[0], count);
    s.kl_mean = kl.mean;
    s.kl_se = kl.se;
    s.kl_diff_to_first = diff.mean;
    s.kl_diff_se = diff.se;
    s.kl_window_se = kl_window_error(points, count, compare->options.window_positions, kl.mean, &s.window_count);
    SPK_TRY(kl_percentiles(points, count, &s, err));
    likelihoods(compare->base_nll, points, count, &s);
    if (!(s.ppl_base < INFINITY) || !(s.ppl_candidate < INFINITY))
        return spk_fail(err, SPK_E_NONFINITE, "%s: the perplexity is too large for a double",
                        s.ppl_base < INFINITY ? name : compare->options.names[0]);
    *out = s;
    return SPK_OK;
}

double spk_compare_kl_upper(const spk_compare_summary *summary) {
    return summary->kl_mean + SPK_COMPARE_BOUND_SIGMAS * fmax(summary->kl_se, summary->kl_window_se);
}

double spk_compare_top1_lower(const spk_compare_summary *summary) {
    const double z = SPK_COMPARE_BOUND_SIGMAS, n = (double)summary->positions, p = summary->top1;
    return (p + z * z / (2 * n) - z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))) / (1 + z * z / n);
}
