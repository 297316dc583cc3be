/* tests/checkkern_cuda_routing.h - the sums of a router as tests give and expect them: places, logits, the choice of experts.
 *
 * Bounds.  A value is a sum as F32, exactly.  The scale that makes a logit of it is 2^-32 / sqrt(mean + eps), where squares of 16 are
 * added by a warp: groups/32 + 5 additions, a division and an addition, all halved by the root, and the root: SCALE_STEPS.  A weight of
 * the softmax is e/sum, e = expf((value - top) * scale): the difference and the product round once each, and expf gives 4 u; the sum
 * adds used_count of them.
 */
#ifndef SPK_CHECKKERN_CUDA_ROUTING_H
#define SPK_CHECKKERN_CUDA_ROUTING_H

#include "tests/checkkern_cuda_gemv.h"

enum { EXPERTS_MAX = 1024, USED_MAX = 64 };
#define SUM_UNITS 0x1p32
#define SCALE_STEPS(column_count) (((column_count) / 512.0 + 5 + 5) / 2 + 4)

/* ---- Sums ---- */

/* Four sums in a line of 128 bytes. */
static uint64_t place_of(uint32_t row) { return row / 4 * 16 + row % 4; }
static uint64_t sum_words(uint32_t row_count) { return spk_cuda_router_words((row_count + 3) / 4 * 4); }

/* Zeros, where rows have their sums; all else is poisoned, and must stay so. */
static long long *take_sums(device_case *t, uint32_t row_count) {
    long long *d_sums = take(t, OUTPUT, sum_words(row_count) * sizeof *d_sums, 0);
    for (uint32_t i = 0; i < row_count; i++) ((long long *)host_of(t, d_sums))[place_of(i)] = 0;
    return d_sums;
}
/* Staged, poisoned; sums are to be written to their places. */
static long long *take_staged_sums(device_case *t, uint32_t row_count) {
    const uint64_t bytes = sum_words(row_count) * sizeof(long long);
    long long *d_sums = (long long *)(void *)take_staged(t, (uint32_t)(bytes / sizeof(float)));
    memset(host_of(t, d_sums), POISON, bytes);
    return d_sums;
}
static float *take_staged_squares(device_case *t, uint32_t column_count) {
    return take_staged(t, column_count / SPK_CUDA_ROUTER_GROUP);
}
/* Of an x whose root mean square is about `rms`. */
static void fill_squares(float *squares, uint32_t column_count, double rms) {
    for (uint32_t g = 0; g < column_count / SPK_CUDA_ROUTER_GROUP; g++)
        squares[g] = (float)(SPK_CUDA_ROUTER_GROUP * rms * rms * (1 + 0.9 * (double)check_uniform(&random_state)));
}

/* ---- Logits ---- */

/* Of sums and squares on the host. */
typedef struct {
    const long long *sums;
    double scale, scale_error;               /* error: relative */
} logit_source;
static logit_source logits_of(const long long *sums, const float *squares, const spk_cuda_routing *routing) {
    double total = 0;
    for (uint32_t g = 0; g < routing->column_count / SPK_CUDA_ROUTER_GROUP; g++) total += (double)squares[g];
    return (logit_source){ sums, 1 / (SUM_UNITS * sqrt(total / routing->column_count + (double)routing->eps)),
                           SCALE_STEPS(routing->column_count) * U };
}
static logit_source staged_logits(const device_case *t, const spk_cuda_routing *routing) {
    return logits_of(host_of(t, routing->sums), host_floats(t, routing->squares), routing);
}
static float value_at(const logit_source *l, uint32_t row) { return (float)l->sums[place_of(row)]; }

/* sigmoid of the shared expert's logit; its slope is at most sigmoid (1 - sigmoid). */
static double shared_weight_of(const logit_source *l, uint32_t expert_count, double *error) {
    const double logit = (double)value_at(l, expert_count) * l->scale, off = fabs(logit) * (l->scale_error + U);
    const double low = sigmoid_of(logit - off), high = sigmoid_of(logit + off);
    *error = fmax(sigmoid_error(logit - off), sigmoid_error(logit + off)) + (high - low);
    return sigmoid_of(logit);
}

typedef struct {
    uint32_t choice[USED_MAX];
    double   weight[USED_MAX], weight_error[USED_MAX];
} selection;

/* By the reference table's order; weights in double. */
static selection select_of(const logit_source *l, uint32_t count, uint32_t used) {
    selection s;
    float values[EXPERTS_MAX], rounded[USED_MAX];
    double sum = 0, sum_error = 4 * U, apart[USED_MAX];
    for (uint32_t i = 0; i < count; i++) values[i] = value_at(l, i);
    spk_kernels_ref()->top_k(values, count, used, s.choice, rounded);
    for (uint32_t r = 0; r < used; r++) {
        apart[r] = ((double)values[s.choice[0]] - (double)values[s.choice[r]]) * l->scale;
        sum += s.weight[r] = exp(-apart[r]);
    }
    for (uint32_t r = 0; r < used; r++) {
        s.weight[r] /= sum;
        sum_error += s.weight[r] > 0 ? s.weight[r] * apart[r] * (l->scale_error + 2 * U) : 0;
    }
    for (uint32_t r = 0; r < used; r++) {
        const double off = s.weight[r] > 0 ? apart[r] * (l->scale_error + 2 * U) : 0;
        s.weight_error[r] = s.weight[r] * (off + sum_error + (4 + used + 3) * U) + 0x1p-126;
    }
    return s;
}

/* top_k's choice and weights.  False: the choice is wrong. */
static bool check_selection(const device_case *t, const selection *want, const uint32_t *d_choice, const float *d_weight,
                            uint32_t used) {
    const uint32_t *choice = result_of(t, d_choice);
    bool is_right = true;
    for (uint32_t r = 0; r < used; r++) {
        is_right = is_right && choice[r] == want->choice[r];
        EXPECT(choice[r] == want->choice[r], "place %u has expert %u, want %u", r, choice[r], want->choice[r]);
    }
    near_floats(t, "weight", d_weight, want->weight, want->weight_error, used);
    return is_right;
}

#endif
