/* tests/host_device_router.h - of host_device.h: routers as fixed-point sums, and the choice of experts by them. */
#ifndef SPK_HOST_DEVICE_ROUTER_H
#define SPK_HOST_DEVICE_ROUTER_H

#include "tests/host_device.h"

/* Where row i's sum is. */
static uint32_t host_place(uint32_t i) { return has_fault(FAULT_ROUTER_PLACE) ? i : i / 4 * 16 + i % 4; }

/* ---- Weights and sums ---- */

static void run_router_source(const launch_args *args) {
    const spk_cuda_router_source *s = &args->router_source;
    const uint64_t columns = s->experts.col_count, rows = s->experts.row_count + (s->shared.data != NULL);
    float *row = malloc(columns * sizeof *row);
    for (uint64_t r = 0; r < rows; r++) {
        const bool is_expert = r < s->experts.row_count || has_fault(FAULT_ROUTER_SHARED_ROW);
        spk_layout_dequantize_row(is_expert ? &s->experts : &s->shared, r < s->experts.row_count || !is_expert ? r % s->experts.row_count : 0, row);
        for (uint64_t c = 0; c < columns; c++)
            s->out[(c / 4 * rows + r) * 4 + c % 4] = has_fault(FAULT_ROUTER_NORM) ? row[c] : row[c] * s->norm_weight[c];
    }
    free(row);
}
void spk_cuda_launch_router_source(spk_cuda *cuda, const spk_cuda_router_source *args) {
    record(cuda, run_router_source)->args.router_source = *args;
}

/* Of 16 values: four sums of four, then of those; or one after another. */
static float host_dot16(const float *w, uint64_t step, const float *x, bool is_plain) {
    float sums[4], all = 0;
    for (uint32_t i = 0; i < 4; i++) {
        sums[i] = w[i * step] * x[4 * i];
        for (uint32_t j = 1; j < 4; j++) sums[i] = fmaf(w[i * step + j], x[4 * i + j], sums[i]);
    }
    for (uint32_t i = 0; is_plain && i < 16; i++) all += w[i / 4 * step + i % 4] * x[i];
    return is_plain ? all : (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
static long long host_fixed(float contribution) {
    const float most = 0x1p19f;
    if (has_fault(FAULT_ROUTER_NAN) && isnan(contribution)) return 0;
    contribution = fmaxf(fminf(contribution, has_fault(FAULT_ROUTER_CLAMP) ? 2 * most : most), -most);
    return has_fault(FAULT_ROUTER_ROUNDING) ? (long long)floorf(contribution * 0x1p32f) : llrintf(contribution * 0x1p32f);
}
static const float *first_router;           /* that was recorded since has_fault(FAULT_ROUTER_LAYER): all layers use it */
static void host_router(const spk_cuda_router *a, const float *x, bool is_folded) {
    const float *weights = has_fault(FAULT_ROUTER_LAYER) ? first_router : a->weights;
    const uint64_t step = 4 * (uint64_t)a->row_count;
    for (uint32_t g = 0; g < a->column_count / SPK_CUDA_ROUTER_GROUP; g++) {
        const float *values = x + g * SPK_CUDA_ROUTER_GROUP;
        if (has_fault(FAULT_ROUTER_LAST_GROUP) && (g + 1) * SPK_CUDA_ROUTER_GROUP == a->column_count) continue;
        for (uint32_t r = 0; r < a->row_count; r++)
            a->sums[host_place(r)] += host_fixed(host_dot16(weights + 4 * g * step + 4 * r, step, values, is_folded && has_fault(FAULT_ROUTER_ORDER)));
        a->squares[has_fault(FAULT_ROUTER_SQUARES) ? g ^ 1 : g] = host_dot16(values, 4, values, false);
    }
    if (has_fault(FAULT_ROUTER_PAST_THE_END)) a->sums[host_place((a->row_count + 3) / 4 * 4)] = 1;
}
static void run_router(const launch_args *args) { host_router(&args->router.router, args->router.x, false); }
static void note_router(const spk_cuda_router *a) {
    if (has_fault(FAULT_ROUTER_LAYER) && first_router == NULL) first_router = a->weights;
}
void spk_cuda_launch_router(spk_cuda *cuda, const spk_cuda_router *args, const float *x) {
    recorded *r = record(cuda, run_router);
    r->args.router.router = *args;
    r->args.router.x = x;
    note_router(args);
}

/* ---- The choice ---- */

static float host_value(const spk_cuda_routing *a, uint32_t i) { return (float)a->sums[host_place(i)]; }
/* A logit is a value times this. */
static float host_scale(const spk_cuda_routing *a) {
    float lanes[32] = { 0 }, sum = 0;
    for (uint32_t g = 0; g < a->column_count / SPK_CUDA_ROUTER_GROUP; g++) lanes[g % 32] += a->squares[g];
    for (int i = 0; i < 32; i++) sum += lanes[i];
    return has_fault(FAULT_ROUTER_SCALE) ? 0x1p-32f : 0x1p-32f / sqrtf(sum / (float)a->column_count + a->eps);
}
static float host_shared_weight(const spk_cuda_routing *a) {
    if (has_fault(FAULT_SHARED_GATE)) return 1.0f;
    return host_sigmoid((float)a->sums[has_fault(FAULT_SHARED_PLACE) ? a->expert_count : host_place(a->expert_count)] * host_scale(a));
}

static bool goes_before(const spk_cuda_routing *a, uint32_t i, uint32_t j, bool is_higher_first) {
    const long long x = a->sums[host_place(i)], y = a->sums[host_place(j)];
    if (has_fault(FAULT_ROUTER_EXACT) && x != y) return x > y;
    if ((float)x != (float)y) return (float)x > (float)y;
    return is_higher_first ? i > j : i < j;
}
static void host_select(const spk_cuda_routing *a, bool is_higher_first, uint32_t *choice, float *weight) {
    const float scale = host_scale(a);
    bool taken[1024] = { false };
    float sum = 0;
    for (uint32_t r = 0; r < a->used_count; r++) {
        uint32_t best = a->expert_count;
        for (uint32_t i = 0; i < a->expert_count; i++)
            if (!taken[i] && (best == a->expert_count || goes_before(a, i, best, is_higher_first))) best = i;
        taken[best] = true;
        choice[r] = best;
        sum += weight[r] = expf((host_value(a, best) - host_value(a, choice[0])) * scale);
    }
    for (uint32_t i = 0; has_fault(FAULT_WEIGHTS) && i < a->expert_count; i++)
        if (!taken[i]) sum += expf((host_value(a, i) - host_value(a, choice[0])) * scale);
    for (uint32_t r = 0; r < a->used_count; r++) weight[r] /= sum;
}
static bool is_higher_first(bool is_streamed) {
    return has_fault(FAULT_TIE_ORDER) || has_fault(is_streamed ? FAULT_STREAMED_TIES : FAULT_HELD_TIES);
}
static void host_route(const spk_cuda_routing *a, bool is_higher_first, uint32_t *choice, float *weight) {
    if (a->choice == NULL) {
        host_select(a, is_higher_first, choice, weight);
        return;
    }
    for (uint32_t r = 0; r < a->used_count; r++)
        choice[r] = a->choice[r] < a->expert_count ? a->choice[r] : 0; /* read too early */
    if (a->weight != NULL) memcpy(weight, a->weight, a->used_count * sizeof *weight);
    for (uint32_t r = 0; has_fault(FAULT_DOWN_BY_CHOICE) && r < a->used_count; r++) weight[r] = 1.0f / (float)a->used_count;
}
static void run_top_k(const launch_args *args) {
    const spk_cuda_top_k *a = &args->top_k;
    host_select(&a->routing, has_fault(FAULT_TIE_ORDER), a->choice, a->weight);
}
void spk_cuda_launch_top_k(spk_cuda *cuda, const spk_cuda_top_k *args) { record(cuda, run_top_k)->args.top_k = *args; }

#endif
