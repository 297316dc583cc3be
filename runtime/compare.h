/* runtime/compare.h - how far a candidate's predictions are from a base model's: statistics over a text's positions.
 *
 * Logits go in, batch by batch; a summary comes out.  Knows nothing of models, sessions or files.
 *
 * Every statistic covers the full vocabulary.  KL is KL(base || candidate) in nats; a newcomer's trap is the reverse.
 * Standard errors are those of the mean of independent positions, as the field reports them.  Neighbouring positions
 * of a text are correlated, so they are optimistic; kl_window_se, which takes each window as one draw, is the second
 * opinion, and itself rough where windows are few.
 */
#ifndef SPK_COMPARE_H
#define SPK_COMPARE_H

#include <stdint.h>
#include "formats/pool.h"
#include "formats/status.h"

enum {
    SPK_COMPARE_MODEL_COUNT_MAX = 16,        /* base included */
    SPK_COMPARE_BATCH_MAX       = 64         /* positions of one spk_compare_add */
};
#define SPK_COMPARE_POSITION_COUNT_MAX (UINT64_C(1) << 24)
/* How many standard errors the bounds below lie from the estimate: one-sided 95 % of a normal distribution. */
#define SPK_COMPARE_BOUND_SIGMAS 1.645

typedef struct spk_compare spk_compare;

typedef struct {
    uint32_t           vocab_size;           /* >= 1 */
    uint32_t           model_count;          /* 2 .. SPK_COMPARE_MODEL_COUNT_MAX: base, then candidates */
    const char *const *names;                /* [model_count], for messages; borrowed while the object lives */
    uint32_t           window_positions;     /* >= 1: each run of so many positions began from an empty state */
} spk_compare_options;

SPK_MUST_CHECK spk_status spk_compare_create(const spk_compare_options *options, spk_compare **out, spk_error *err);
void spk_compare_destroy(spk_compare *compare);          /* NULL is fine */

/* Score the next `count` positions (1 .. SPK_COMPARE_BATCH_MAX) of the text: logits[m] is [count][vocab_size] of model
 * m, next_tokens[i] < vocab_size the token that truly follows position i.  Positions are spread over the pool; its
 * threads never change the result.  A logit of -inf is a probability of zero.  SPK_E_NONFINITE names model, position
 * and token of a NaN or +inf, and model and position where a probability of zero makes the KL or the likelihood
 * infinite; nothing is added then.  SPK_E_LIMIT past SPK_COMPARE_POSITION_COUNT_MAX.
 *
 * Accuracy: every term of the KL sum is >= 0 (see compare.c), so its relative error is that of a term, below 1e-4;
 * equal logits give exactly 0.  A token's negative log-likelihood is good to 1e-5. */
SPK_MUST_CHECK spk_status spk_compare_add(spk_compare *compare, const float *const *logits, const uint32_t *next_tokens,
                                          uint32_t count, spk_pool *pool, spk_error *err);

/* The positions of `more`, of the same vocabulary and number of models, after those that are there.  SPK_E_LIMIT past
 * SPK_COMPARE_POSITION_COUNT_MAX. */
SPK_MUST_CHECK spk_status spk_compare_append(spk_compare *compare, const spk_compare *more, spk_error *err);

uint64_t spk_compare_position_count(const spk_compare *compare);

/* One position of a candidate. */
typedef struct {
    double   kl;
    double   nll_base, nll_candidate;        /* -ln of the true next token's probability */
    uint32_t top_base, top_candidate;        /* the likeliest tokens */
} spk_compare_point;
/* candidate: 0 .. model_count - 2; position < spk_compare_position_count. */
spk_compare_point spk_compare_at(const spk_compare *compare, uint32_t candidate, uint64_t position);

/* One candidate against the base.  *_se are standard errors; percentiles interpolate between order statistics. */
typedef struct {
    uint64_t positions;
    double   top1, top1_se;                  /* share with the same arg max, ties to the lower id; binomial */
    double   kl_mean, kl_se;
    uint64_t window_count;
    double   kl_window_se;                   /* windows as the independent draws; 0 where there are fewer than two */
    double   kl_median, kl_p90, kl_p95, kl_p99, kl_p999, kl_max;
    double   dp_mean, dp_rms;                /* p_candidate - p_base of the true next token */
    double   ppl_base, ppl_candidate;        /* exp of the mean negative log-likelihood */
    double   ln_ppl_ratio, ln_ppl_ratio_se;  /* ln(ppl_candidate / ppl_base), paired by position */
    double   kl_diff_to_first, kl_diff_se;   /* mean KL less that of the first candidate, paired by position */
} spk_compare_summary;

/* candidate: 0 .. model_count - 2.  SPK_E_LIMIT with fewer than two positions, SPK_E_NONFINITE where a perplexity
 * is beyond a double.  Every number of *out is finite. */
SPK_MUST_CHECK spk_status spk_compare_summarize(const spk_compare *compare, uint32_t candidate,
                                                spk_compare_summary *out, spk_error *err);

void   spk_sort_doubles(double *values, uint64_t count);              /* ascending; no NaN */
/* Of sorted values (count >= 1), share 0 .. 1, interpolated between order statistics: 0.5 is the median. */
double spk_percentile(const double *sorted, uint64_t count, double share);

/* What gates compare with a limit: one-sided bounds of about 95 %, so that a short text needs a wider margin.
 * Upper: kl_mean + SPK_COMPARE_BOUND_SIGMAS standard errors, the larger of kl_se and kl_window_se.
 * Lower: Wilson's score bound of top1, positions taken as independent.  It is below 1 even where every position agrees,
 * since the next one may not: n / (n + SPK_COMPARE_BOUND_SIGMAS^2) of n. */
double spk_compare_kl_upper(const spk_compare_summary *summary);
double spk_compare_top1_lower(const spk_compare_summary *summary);

#endif
