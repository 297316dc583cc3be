/* tests/attention_parts.h - the parts of attention's output and what they count for: the contract of kernels/cuda.h, written down a
 * second time. */
#ifndef SPK_ATTENTION_PARTS_H
#define SPK_ATTENTION_PARTS_H

#include <math.h>
#include "kernels/cuda.h"

/* In how many parts the output at a position comes, where part_totals is set. */
static inline uint32_t attention_part_count(uint32_t position) {
    return position < SPK_CUDA_PARTS_MAX * SPK_CUDA_PART_POSITIONS ? position / SPK_CUDA_PART_POSITIONS + 1 : 1;
}
/* weight[part_count] of a head; their sum is 1.  totals as part_totals has them. */
static inline void attention_part_weights(const float *totals, uint32_t head_count, uint32_t head, uint32_t part_count, double *weight) {
    double top = -INFINITY, all = 0;
    for (uint32_t p = 0; p < part_count; p++) top = fmax(top, (double)totals[2 * (p * head_count + head)]);
    for (uint32_t p = 0; p < part_count; p++) {
        const float *own = totals + 2 * (p * head_count + head);
        weight[p] = (double)own[1] * exp2((double)own[0] - top);
        all += weight[p];
    }
    for (uint32_t p = 0; p < part_count; p++) weight[p] /= all;
}
/* Value i, a head's, of the merged output; out [part][head][head_dim]. */
static inline double attention_merged(const float *out, uint64_t out_count, uint64_t i, uint32_t part_count, const double *weight) {
    double sum = 0;
    for (uint32_t p = 0; p < part_count; p++) sum += weight[p] * (double)out[p * out_count + i];
    return sum;
}

#endif
