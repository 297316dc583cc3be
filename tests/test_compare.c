/* tests/test_compare.c - the promises of runtime/compare.h, on distributions whose divergence is known. */
#include "runtime/compare.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "tests/check.h"

static const char *const names[] = { "BASE", "CAND", "OTHER" };
static spk_pool *pool;

static spk_compare *start(uint32_t vocab_size, uint32_t model_count, uint32_t window_positions) {
    spk_compare *compare = NULL;
    spk_error err = { 0 };
    spk_compare_options options = { .vocab_size = vocab_size, .model_count = model_count, .names = names,
                                    .window_positions = window_positions };
    CHECK_OK(spk_compare_create(&options, &compare, &err), err);
    return compare;
}

static spk_status add(spk_compare *compare, const float *base, const float *candidate, const uint32_t *next,
                      uint32_t count, spk_error *err) {
    const float *const logits[] = { base, candidate };
    return spk_compare_add(compare, logits, next, count, pool, err);
}

/* Summary of `count` positions of one candidate, each scored as a batch of its own. */
static spk_compare_summary summary_of(const float *base, const float *candidate, uint32_t vocab_size, uint32_t count,
                                      uint32_t window_positions) {
    spk_compare *compare = start(vocab_size, 2, window_positions);
    spk_compare_summary s = { 0 };
    spk_error err = { 0 };
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++)
        CHECK_OK(add(compare, base + i * vocab_size, candidate + i * vocab_size, &next, 1, &err), err);
    CHECK_OK(spk_compare_summarize(compare, 0, &s, &err), err);
    spk_compare_destroy(compare);
    return s;
}

static bool near(double a, double b, double tolerance) { return fabs(a - b) <= tolerance; }

static void log_of(const double *p, uint32_t count, double shift, float *out) {
    for (uint32_t i = 0; i < count; i++) out[i] = (float)(log(p[i]) + shift);
}

static void equal_logits_give_exactly_zero(void) {
    enum { VOCAB = 1003 };
    static float logits[2 * VOCAB];
    uint64_t seed = 1;
    for (size_t i = 0; i < 2 * VOCAB; i++) logits[i] = 20 * check_uniform(&seed);
    logits[7] = logits[VOCAB + 900] = -INFINITY;
    spk_compare_summary s = summary_of(logits, logits, VOCAB, 2, 1);
    CHECK(s.kl_mean == 0 && s.kl_se == 0 && s.kl_max == 0 && s.kl_window_se == 0, "KL %g", s.kl_mean);
    CHECK(s.top1 == 1 && s.top1_se == 0, "top-1 %g", s.top1);
    CHECK(s.dp_rms == 0 && s.dp_mean == 0 && s.ln_ppl_ratio == 0 && s.ln_ppl_ratio_se == 0, "likelihoods");
    CHECK(s.ppl_base == s.ppl_candidate, "perplexities %g %g", s.ppl_base, s.ppl_candidate);
}

static void known_divergences_come_out(void) {
    static const struct { double p[3], q[3], kl; } cases[] = {
        { { 0.5, 0.25, 0.25 }, { 0.25, 0.25, 0.5 }, 0.17328679513998632 },          /* ln(2) / 4 */
        { { 0.5, 0.5, 1e-30 }, { 0.9, 0.1, 1e-30 }, 0.5108256237659907 },           /* and not the reverse, 0.3681 */
        { { 1, 1e-30, 1e-30 }, { 0.5, 0.25, 0.25 }, 0.6931471805599453 },
        { { 0.2, 0.3, 0.5 }, { 0.2, 0.3, 0.5 }, 0 },
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        float base[6], candidate[6];
        log_of(cases[c].p, 3, 0, base);
        log_of(cases[c].q, 3, 5, candidate);             /* a constant added to all logits changes nothing */
        memcpy(base + 3, base, 3 * sizeof *base);
        memcpy(candidate + 3, candidate, 3 * sizeof *candidate);
        spk_compare_summary s = summary_of(base, candidate, 3, 2, 1);
        CHECK(near(s.kl_mean, cases[c].kl, 1e-6), "case %zu: KL %.9f, expected %.9f", c, s.kl_mean, cases[c].kl);
    }
}

static double plain_kl(const float *base, const float *candidate, uint32_t count) {
    long double sums[2] = { 0, 0 }, kl = 0;
    for (uint32_t i = 0; i < count; i++) {
        sums[0] += expl((long double)base[i]);
        sums[1] += expl((long double)candidate[i]);
    }
    long double shift = logl(sums[0]) - logl(sums[1]);
    for (uint32_t i = 0; i < count; i++)
        kl += expl((long double)base[i]) / sums[0] * ((long double)base[i] - (long double)candidate[i] - shift);
    return (double)kl;
}

static void agrees_with_long_double_from_tiny_to_large_differences(void) {
    enum { VOCAB = 4099 };                               /* not a multiple of the lanes */
    static float base[2 * VOCAB], candidate[2 * VOCAB];
    static const float spreads[] = { 1, 10, 40 }, changes[] = { 1e-4f, 1e-2f, 1, 15 };
    uint64_t seed = 3;
    for (size_t s = 0; s < sizeof spreads / sizeof *spreads; s++)
        for (size_t c = 0; c < sizeof changes / sizeof *changes; c++) {
            for (size_t i = 0; i < VOCAB; i++) {
                base[i] = base[VOCAB + i] = spreads[s] * check_uniform(&seed);
                candidate[i] = candidate[VOCAB + i] = base[i] + changes[c] * check_uniform(&seed);
            }
            double expected = plain_kl(base, candidate, VOCAB);
            spk_compare_summary summary = summary_of(base, candidate, VOCAB, 2, 1);
            CHECK(near(summary.kl_mean, expected, 1e-4 * expected), "spread %g change %g: KL %.10g, expected %.10g",
                  (double)spreads[s], (double)changes[c], summary.kl_mean, expected);
        }
}

static void likelihoods_are_good_to_1e_minus_5(void) {
    enum { VOCAB = 3001 };
    static float base[2 * VOCAB], candidate[2 * VOCAB];
    uint64_t seed = 5;
    for (size_t i = 0; i < VOCAB; i++) {
        base[i] = base[VOCAB + i] = 30 * check_uniform(&seed);
        candidate[i] = candidate[VOCAB + i] = 10 * check_uniform(&seed);
    }
    long double sums[2] = { 0, 0 };
    for (size_t i = 0; i < VOCAB; i++) {
        sums[0] += expl((long double)base[i]);
        sums[1] += expl((long double)candidate[i]);
    }
    double nll_base = (double)(logl(sums[0]) - (long double)base[0]);
    double nll_candidate = (double)(logl(sums[1]) - (long double)candidate[0]);
    spk_compare_summary s = summary_of(base, candidate, VOCAB, 2, 1);
    CHECK(near(log(s.ppl_base), nll_base, 1e-5), "base %.9g, expected %.9g", log(s.ppl_base), nll_base);
    CHECK(near(log(s.ppl_candidate), nll_candidate, 1e-5), "candidate %.9g, expected %.9g", log(s.ppl_candidate),
          nll_candidate);
    CHECK(near(s.ln_ppl_ratio, nll_candidate - nll_base, 2e-5), "ratio %.9g", s.ln_ppl_ratio);
    CHECK(near(s.dp_mean, exp(-nll_candidate) - exp(-nll_base), 1e-6), "delta p %.9g", s.dp_mean);
}

static void ties_go_to_the_lower_id(void) {
    static const float base[] = { 1, 3, 3, 0, 1, 3, 3, 0, 0, 1, 2, 3 };
    static const float candidate[] = { 1, 3, 2, 0, 1, 2, 3, 0, 3, 1, 2, 3 };
    spk_compare_summary s = summary_of(base, candidate, 4, 3, 1);    /* same; 1 against 2; 3 against 0 */
    CHECK(near(s.top1, 1.0 / 3, 1e-12), "top-1 %g", s.top1);
    CHECK(near(s.top1_se, sqrt(1.0 / 3 * 2 / 3 / 2), 1e-12), "s.e. %g", s.top1_se);
}

/* Base (1/2, 1/2) and candidate (a, 1 - a) with a = (1 + sqrt(1 - e^(-2 kl))) / 2 have exactly this divergence. */
static void pair_with_kl(double kl, float base[2], float candidate[2]) {
    double a = 0.5 * (1 + sqrt(1 - exp(-2 * kl)));
    base[0] = base[1] = 0;
    candidate[0] = (float)log(a);
    candidate[1] = (float)log(1 - a);
}

static void statistics_are_those_done_by_hand(void) {
    static const double kls[] = { 0.1, 0.2, 0.3, 0.4, 1.0 }, other_kls[] = { 0.2, 0.2, 0.5, 0.4, 0.7 };
    float base[10], candidate[10], other[10];
    uint32_t next[5] = { 0, 0, 0, 0, 1 };
    double nll = 0, nll_square = 0, dp = 0, dp_square = 0;
    for (size_t i = 0; i < 5; i++) {
        pair_with_kl(kls[i], base + 2 * i, candidate + 2 * i);
        pair_with_kl(other_kls[i], base + 2 * i, other + 2 * i);
        double p = exp((double)candidate[2 * i + next[i]]), d = -log(p) - log(2);
        nll += d / 5, nll_square += d * d / 5, dp += (p - 0.5) / 5, dp_square += (p - 0.5) * (p - 0.5) / 5;
    }
    spk_compare *compare = start(2, 3, 2);
    const float *const logits[] = { base, candidate, other };
    spk_compare_summary s, o;
    spk_error err = { 0 };
    CHECK_OK(spk_compare_add(compare, logits, next, 5, pool, &err), err);
    CHECK_OK(spk_compare_summarize(compare, 0, &s, &err), err);
    CHECK_OK(spk_compare_summarize(compare, 1, &o, &err), err);
    spk_compare_destroy(compare);

    const double e = 1e-5;
    CHECK(s.positions == 5 && s.window_count == 3, "counts");
    CHECK(near(s.kl_mean, 0.4, e), "mean %g", s.kl_mean);
    CHECK(near(s.kl_se, sqrt(0.5 / 4 / 5), e), "s.e. %g", s.kl_se);       /* deviations -.3 -.2 -.1 0 .6: squares .5 */
    CHECK(near(s.kl_window_se, sqrt(3.0 / 2 * (0.25 + 0.01 + 0.36)) / 5, e), "window s.e. %g", s.kl_window_se);
    CHECK(near(s.kl_median, 0.3, e) && near(s.kl_p90, 0.4 + 0.6 * 0.6, e) && near(s.kl_p95, 0.4 + 0.6 * 0.8, e),
          "percentiles %g %g %g", s.kl_median, s.kl_p90, s.kl_p95);
    CHECK(near(s.kl_p99, 0.976, e) && near(s.kl_p999, 0.9976, e) && near(s.kl_max, 1, e), "tail %g %g %g", s.kl_p99,
          s.kl_p999, s.kl_max);
    CHECK(near(s.dp_mean, dp, e) && near(s.dp_rms, sqrt(dp_square), e), "delta p %g %g", s.dp_mean, s.dp_rms);
    CHECK(near(s.ppl_base, 2, e) && near(s.ppl_candidate, 2 * exp(nll), e), "perplexity %g %g", s.ppl_base,
          s.ppl_candidate);
    CHECK(near(s.ln_ppl_ratio, nll, e), "ratio %g", s.ln_ppl_ratio);
    CHECK(near(s.ln_ppl_ratio_se, sqrt((nll_square - nll * nll) / 4), e), "ratio s.e. %g", s.ln_ppl_ratio_se);
    CHECK(s.kl_diff_to_first == 0 && s.kl_diff_se == 0, "first against itself");
    /* differences .1 0 .2 0 -.3: mean 0, squares .14; far smaller than the two errors combined */
    CHECK(near(o.kl_diff_to_first, 0, e) && near(o.kl_diff_se, sqrt(0.14 / 4 / 5), e), "paired %g %g",
          o.kl_diff_to_first, o.kl_diff_se);
}

/* Summary of positions with these divergences, in windows of two. */
static spk_compare_summary summary_of_kls(const double kls[4]) {
    float base[8], candidate[8];
    for (size_t i = 0; i < 4; i++) pair_with_kl(kls[i], base + 2 * i, candidate + 2 * i);
    return summary_of(base, candidate, 2, 4, 2);
}

static void the_upper_bound_takes_the_larger_error(void) {
    static const double equal_windows[] = { 0.1, 0.3, 0.1, 0.3 }, equal_positions[] = { 0.1, 0.1, 0.3, 0.3 };
    const double e = 1e-5, plain = sqrt(0.04 / 3 / 4), between_windows = sqrt(2 * 0.08) / 4;
    spk_compare_summary s = summary_of_kls(equal_windows);
    CHECK(near(s.kl_window_se, 0, e), "windows alike: %g", s.kl_window_se);
    CHECK(near(spk_compare_kl_upper(&s), 0.2 + 1.645 * plain, e), "plain error: %g", spk_compare_kl_upper(&s));
    s = summary_of_kls(equal_positions);
    CHECK(near(s.kl_se, plain, e), "plain error is smaller: %g", s.kl_se);
    CHECK(near(spk_compare_kl_upper(&s), 0.2 + 1.645 * between_windows, e), "windows: %g", spk_compare_kl_upper(&s));
}

static void the_lower_bound_of_a_share_knows_how_few_there_were(void) {
    static const struct { uint64_t positions; double top1, lower; } cases[] = {
        { 2, 1, 0.424987 }, { 99, 1, 0.973394 }, { 25691, 1, 0.999895 },       /* n / (n + 1.645^2) */
        { 10, 0.5, 0.269256 }, { 1000, 0.9, 0.883298 }, { 10, 0, 0 },     /* roots of (p - x)^2 = z^2 x (1 - x) / n */
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        spk_compare_summary s = { .positions = cases[c].positions, .top1 = cases[c].top1 };
        CHECK(near(spk_compare_top1_lower(&s), cases[c].lower, 6e-7), "case %zu: %.6f", c, spk_compare_top1_lower(&s));
    }
}

static void zero_probabilities_count_or_are_refused(void) {
    const float none = -INFINITY;
    const float base[] = { 0, 0, none, 0, 0, none }, both[] = { 0, 0, none, 0, 0, none }, more[] = { 0, 0, 0, 0, 0, 0 };
    spk_compare_summary s = summary_of(base, both, 3, 2, 1);
    CHECK(s.kl_mean == 0, "masked in both: %g", s.kl_mean);
    s = summary_of(base, more, 3, 2, 1);
    CHECK(near(s.kl_mean, log(1.5), 1e-6), "candidate spreads over a third token: %g", s.kl_mean);

    const float missing[] = { 0, none, none };
    uint32_t next = 0;
    spk_error err = { 0 };
    spk_compare *compare = start(3, 2, 1);
    CHECK(add(compare, base, missing, &next, 1, &err) == SPK_E_NONFINITE, "infinite KL");
    CHECK(strstr(err.text, "CAND: position 0") != NULL && strstr(err.text, "BASE") != NULL, "%s", err.text);
    next = 2;
    CHECK(add(compare, base, more, &next, 1, &err) == SPK_E_NONFINITE, "infinite likelihood");
    CHECK(strstr(err.text, "BASE: position 0: the true next token 2") != NULL, "%s", err.text);
    spk_compare_destroy(compare);
}

static void nan_and_infinity_name_model_position_and_token(void) {
    enum { VOCAB = 200 };
    static const float bad[] = { NAN, INFINITY };
    static float good[3 * VOCAB], broken[3 * VOCAB];
    static const uint32_t next[3] = { 0 };
    for (size_t b = 0; b < 2; b++)
        for (size_t where = 2 * VOCAB + 5; where < 3 * VOCAB; where += 193) {     /* token 5: a lane; 198: the tail */
            spk_compare *compare = start(VOCAB, 2, 1);
            spk_error err = { 0 };
            char expected[80];
            memset(broken, 0, sizeof broken);
            broken[where] = bad[b];
            CHECK_OK(add(compare, good, good, next, 3, &err), err);
            CHECK(add(compare, good, broken, next, 3, &err) == SPK_E_NONFINITE, "value %g", (double)bad[b]);
            (void)snprintf(expected, sizeof expected, "CAND: position 5: the logit of token %zu is %s", where % VOCAB,
                           b == 0 ? "NaN" : "+inf");
            CHECK(strstr(err.text, expected) != NULL, "%s; expected %s", err.text, expected);
            CHECK(add(compare, broken, good, next, 3, &err) == SPK_E_NONFINITE, "base");
            CHECK(strstr(err.text, "BASE: position 5") != NULL, "%s", err.text);
            CHECK(spk_compare_position_count(compare) == 3, "nothing is added by a failed batch");
            spk_compare_destroy(compare);
        }
    float masked[VOCAB];
    spk_error err = { 0 };
    for (size_t i = 0; i < VOCAB; i++) masked[i] = -INFINITY;
    spk_compare *compare = start(VOCAB, 2, 1);
    CHECK(add(compare, masked, good, next, 1, &err) == SPK_E_NONFINITE, "all -inf");
    CHECK(strstr(err.text, "every logit is -inf") != NULL, "%s", err.text);
    spk_compare_destroy(compare);
}

static void threads_and_batches_change_no_bit(void) {
    enum { VOCAB = 301, POSITIONS = 5000 };              /* more than the arrays hold at first */
    static float base[64 * VOCAB], candidate[64 * VOCAB];
    static uint32_t next[64];
    uint64_t seed = 9;
    for (size_t i = 0; i < 64 * VOCAB; i++) {
        base[i] = 8 * check_uniform(&seed);
        candidate[i] = base[i] + check_uniform(&seed);
    }
    for (size_t i = 0; i < 64; i++) next[i] = (uint32_t)(check_random(&seed) % VOCAB);
    spk_compare_summary results[2];
    for (uint32_t run = 0; run < 2; run++) {
        spk_pool *own_pool = NULL;
        spk_error err = { 0 };
        CHECK_OK(spk_pool_create(run == 0 ? 1 : 3, &own_pool, &err), err);
        spk_compare *compare = start(VOCAB, 2, 512);
        uint32_t batch = run == 0 ? 40 : 8;              /* both divide POSITIONS; position i is row i % 40 */
        for (uint32_t done = 0; done < POSITIONS; done += batch) {
            uint32_t row = done % 40;
            const float *const logits[] = { base + row * VOCAB, candidate + row * VOCAB };
            CHECK_OK(spk_compare_add(compare, logits, next + row, batch, own_pool, &err), err);
        }
        memset(&results[run], 0, sizeof results[run]);
        CHECK_OK(spk_compare_summarize(compare, 0, &results[run], &err), err);
        spk_compare_destroy(compare);
        spk_pool_destroy(own_pool);
    }
    CHECK(results[0].positions == POSITIONS && results[0].kl_mean > 0, "positions %d", (int)results[0].positions);
    CHECK(memcmp(&results[0], &results[1], sizeof results[0]) == 0, "KL %.17g and %.17g", results[0].kl_mean,
          results[1].kl_mean);
}

static void too_little_or_too_unlikely_is_an_error(void) {
    const float base[] = { 0, 0 }, sure[] = { -2000, 0 };
    const uint32_t next = 0;
    spk_compare_summary s;
    spk_error err = { 0 };
    spk_compare *compare = start(2, 2, 1);
    CHECK_OK(add(compare, base, sure, &next, 1, &err), err);
    CHECK(spk_compare_summarize(compare, 0, &s, &err) == SPK_E_LIMIT, "one position");
    CHECK_OK(add(compare, base, sure, &next, 1, &err), err);
    CHECK(spk_compare_summarize(compare, 0, &s, &err) == SPK_E_NONFINITE, "perplexity e^2000");
    CHECK(strstr(err.text, "CAND") != NULL && strstr(err.text, "perplexity") != NULL, "%s", err.text);
    spk_compare_destroy(compare);
}

int main(void) {
    spk_error err = { 0 };
    CHECK_OK(spk_pool_create(2, &pool, &err), err);
    RUN(equal_logits_give_exactly_zero);
    RUN(known_divergences_come_out);
    RUN(agrees_with_long_double_from_tiny_to_large_differences);
    RUN(likelihoods_are_good_to_1e_minus_5);
    RUN(ties_go_to_the_lower_id);
    RUN(statistics_are_those_done_by_hand);
    RUN(the_upper_bound_takes_the_larger_error);
    RUN(the_lower_bound_of_a_share_knows_how_few_there_were);
    RUN(zero_probabilities_count_or_are_refused);
    RUN(nan_and_infinity_name_model_position_and_token);
    RUN(threads_and_batches_change_no_bit);
    RUN(too_little_or_too_unlikely_is_an_error);
    spk_pool_destroy(pool);
    return CHECK_EXIT();
}
