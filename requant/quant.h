/* requant/quant.h - weight quantizers: rows of floats to GGML blocks of Q4_K, Q5_K, Q6_K and Q8_0.
 *
 * Pure functions: no I/O, no globals, no allocation, no threads.  Super-blocks are independent, so rows may be
 * split over threads in any way.  Same bytes on every CPU: no contraction, and the AVX2 and AVX-512 builds of the search
 * are the same source compiled again (lanes are independent, each in scalar order).
 *
 * What is minimised: sum over a super-block of w[c] * (x[c] - decoded[c])^2, with w = importance[c] where given, else 1
 * for every weight - the plain squared error, which is what the reports print.
 */
#ifndef SPK_QUANT_H
#define SPK_QUANT_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/blocks.h"
#include "formats/status.h"

/* Types that spk_quantize can make. */
bool spk_quant_can_make(uint32_t type);

/* How long the search for a block's scales and codes takes.  The squared error of a super-block is never larger at a
 * higher effort.  Weights that a block holds exactly are found at every effort. */
typedef enum {
    SPK_EFFORT_NORMAL = 0,
    SPK_EFFORT_FAST,           /* some three times as fast, error a little larger */
    SPK_EFFORT_BEST            /* some ten times as slow, error a little smaller */
} spk_quant_effort;

typedef struct {
    uint32_t     type;         /* target: Q4_K, Q5_K, Q6_K or Q8_0 */
    uint64_t     row_count;    /* >= 1 */
    uint64_t     col_count;    /* a multiple of the target's block */
    const float *weights;      /* [row_count][col_count], borrowed */
    const float *importance;   /* [col_count], finite, >= 0, not all zero (the caller sanitises); or NULL */
    void        *blocks;       /* row_count * row bytes, no alignment needed; every byte is written */
    spk_quant_effort effort;
} spk_quant_job;

/* The least and the largest weight that spk_quantize takes for a type that it can make: what its searches reach with the largest F16
 * factor, scale and code.  The formats hold a little more, which it does not use: scales of -128 in Q6_K, codes of -128 in Q8_0,
 * factors below zero in Q4_K and Q5_K. */
void spk_quant_range(uint32_t type, float *low, float *high);
/* Index of the first weight outside of that range, or NaN; UINT64_MAX if there is none. */
uint64_t spk_quant_find_beyond(uint32_t type, const float *weights, uint64_t count);

/* SPK_E_NONFINITE or SPK_E_LIMIT names row and column (relative to the job) of the first weight that is NaN or infinite, or outside
 * of the type's range, and some blocks may be written; SPK_E_SHAPE if col_count does not fit.
 * An all-zero super-block gives all-zero bytes in d and codes that decode to exactly 0. */
SPK_MUST_CHECK spk_status spk_quantize(const spk_quant_job *job, spk_error *err);

/* Sums that describe a requant; plain doubles, so that parts add up in a fixed order. */
typedef struct {
    double error_square_sum;   /* sum (x - y)^2 */
    double source_square_sum;  /* sum x^2 */
    double result_square_sum;  /* sum y^2 */
    double product_sum;        /* sum x y */
    double max_abs_error;
} spk_quant_error;
/* Add one stretch of source x and result y to *sums. */
void   spk_quant_error_add(spk_quant_error *sums, const float *x, const float *y, uint64_t count);
void   spk_quant_error_merge(spk_quant_error *sums, const spk_quant_error *more);
double spk_quant_error_relative_rmse(const spk_quant_error *sums);  /* sqrt(error/source); 0 if both are 0 */
double spk_quant_error_cosine(const spk_quant_error *sums);         /* 1 if both are 0 */

#endif
