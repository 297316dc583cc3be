/* kernels/attention_merge_cuda.cuh - from sums of warps and splits to outputs.
 *
 * A team is the CTAs of one group of query heads.  Its splits leave their sums in scratch and count up a word.  The outputs are
 * dealt out in shares to the first CTAs; these wait for the count and merge, in order of split.  The word's high half has a bit
 * for each share that its CTA gave up, having waited too long; the CTA that completes the count takes these and zeroes the
 * word.  Nobody gives up once the count is complete: the exchange that says so fails.
 */
#ifndef SPK_ATTENTION_MERGE_CUDA_CUH
#define SPK_ATTENTION_MERGE_CUDA_CUH

#include "kernels/attention_cuda.cuh"

namespace spk {

constexpr uint32_t SHARES_MAX = 32, SHARE_UNIT = 64, MERGE_AHEAD = 6;
constexpr uint32_t POLLS_MAX = 4096;                 /* a millisecond or so; sums of one team are microseconds apart */
constexpr uint32_t SUM_STRIDE = 36;                  /* floats between heads of a warp's sums: no two lanes in one bank */

/* Words of all teams, then (top, total) [team][head][split], then sums [team][split][head][DIM]. */
struct team_scratch { unsigned long long *word; float2 *totals; float *sums; };
__host__ __device__ __forceinline__ size_t words_bytes(size_t team_count) { return (team_count * 8 + 255) / 256 * 256; }
template <class L> __device__ __forceinline__ team_scratch scratch_of(const context<L> &c) {
    uint8_t *at = (uint8_t *)c.p.a.partial;
    const size_t team_count = gridDim.y, splits = c.p.split_count;
    team_scratch scratch;
    scratch.word = (unsigned long long *)at + c.t.team;
    at += words_bytes(team_count);
    scratch.totals = (float2 *)at + c.t.team * splits * HEADS;
    at += team_count * splits * HEADS * sizeof(float2);
    scratch.sums = (float *)at + c.t.team * splits * HEADS * L::DIM;
    return scratch;
}

template <class L> __device__ __forceinline__ bool merges(const context<L> &c) { return c.t.split_count > 1 && !is_parted(c.p, c.t); }
/* The first head of the task's part in out. */
template <class L> __device__ __forceinline__ uint32_t part_head(const context<L> &c) { return is_parted(c.p, c.t) ? c.t.split * c.p.a.head_count : 0; }

/* Outputs go by four.  head is the team's. */
template <class L> __device__ __forceinline__ float4 load_gate(const context<L> &c, uint32_t head, uint32_t dim) {
    if (!c.p.a.is_gated) return make_float4(0, 0, 0, 0);
    return load_activation4(c.p.a.q + (size_t)(c.t.first_head + head) * (2 * L::DIM) + L::DIM + dim);
}
template <class L> __device__ __forceinline__ void put_out(const context<L> &c, uint32_t head, uint32_t dim, float4 x, float4 gate) {
    if (c.p.a.is_gated) {
        x.x *= sigmoid(gate.x);
        x.y *= sigmoid(gate.y);
        x.z *= sigmoid(gate.z);
        x.w *= sigmoid(gate.w);
    }
    *(float4 *)(c.p.a.out + (size_t)(part_head(c) + c.t.first_head + head) * L::DIM + dim) = x;
}
__device__ __forceinline__ void add_scaled(float4 &sum, float4 x, float factor) {
    sum.x = fmaf(x.x, factor, sum.x);
    sum.y = fmaf(x.y, factor, sum.y);
    sum.z = fmaf(x.z, factor, sum.z);
    sum.w = fmaf(x.w, factor, sum.w);
}

/* The four outputs that thread and i stand for: which head of the team, from which of its dimensions. */
template <class L> struct out_place {
    static constexpr uint32_t COUNT = L::DIM < 128 ? 1 : L::DIM / 128;   /* i < COUNT */
    uint32_t head, dim;
    bool     exists;
    __device__ __forceinline__ out_place(const task &t, uint32_t i) {
        const uint32_t fours = L::DIM / 4 / t.slice_count, at = i * THREADS + threadIdx.x;
        head = at / fours;
        dim = t.slice * (L::DIM / t.slice_count) + 4 * (at % fours);
        exists = head < t.head_count;
    }
};

/* For add_up_warps: asked for early, and for most shapes all that a thread needs. */
template <class L> __device__ __forceinline__ float4 load_first_gate(const context<L> &c) {
    const out_place<L> o(c.t, 0);
    return !merges(c) && o.exists ? load_gate(c, o.head, o.dim) : make_float4(0, 0, 0, 0);
}

/* Everybody's sums are in the warps' stages and totals in shared memory: into scratch, or as outputs where there is one split. */
template <class L> __device__ __forceinline__ void add_up_warps(const context<L> &c, float4 first_gate) {
    const uint32_t slices = L::SLICES / c.t.slice_count, warp_floats = stages<L>::BYTES / 4 * c.p.stage_count;
    const team_scratch scratch = scratch_of(c);
#pragma unroll
    for (uint32_t i = 0; i < out_place<L>::COUNT; i++) {
        const out_place<L> o(c.t, i);
        if (!o.exists) continue;
        const float *from = (const float *)c.ring + o.dim / L::SLICE % slices * warp_floats + o.head * SUM_STRIDE + o.dim % L::SLICE;
        float4 x = make_float4(0, 0, 0, 0);
        for (uint32_t w = 0; w < WARPS; w += slices) add_scaled(x, *(const float4 *)(from + w * warp_floats), 1.0f);
        const float4 low = *(const float4 *)&c.s.warp_sum[o.head][0], high = *(const float4 *)&c.s.warp_sum[o.head][4];
        const float total = ((low.x + low.y) + (low.z + low.w)) + ((high.x + high.y) + (high.z + high.w));
        if (merges(c)) {
            *(float4 *)(scratch.sums + ((size_t)c.t.split * HEADS + o.head) * L::DIM + o.dim) = x;
            if (o.dim == 0) scratch.totals[o.head * c.p.split_count + c.t.split] = make_float2(c.s.top[o.head], total);
        } else {
            float4 out = make_float4(0, 0, 0, 0);
            add_scaled(out, x, 1.0f / total);
            if (o.dim == 0 && is_parted(c.p, c.t)) ((float2 *)c.p.a.part_totals)[part_head(c) + c.t.first_head + o.head] = make_float2(c.s.top[o.head], total);
            put_out(c, o.head, o.dim, out, i == 0 ? first_gate : load_gate(c, o.head, o.dim));
        }
    }
}

/* A share is `units` times 64 outputs.  Threads are rows of one float4 for each four outputs; row i has splits i, i + rows .. */
struct merge_plan { uint32_t units, unit_count, columns, rows, row, column; };
template <class L> __device__ __forceinline__ merge_plan plan_of(const task &t) {
    merge_plan m;
    const uint32_t shares = min(t.split_count, SHARES_MAX);
    m.unit_count = t.head_count * L::DIM / SHARE_UNIT;
    m.units = (m.unit_count + shares - 1) / shares;
    m.columns = m.units * (SHARE_UNIT / 4);
    m.rows = THREADS / m.columns;
    m.row = threadIdx.x / m.columns;
    m.column = threadIdx.x % m.columns;
    return m;
}

/* By thread 0, once the CTA's sums are written: the shares that it has to merge, as bits.  Where there are any, all sums of
 * the team are visible afterwards. */
__device__ __forceinline__ uint32_t arrive(unsigned long long *word, const task &t, const merge_plan &m) {
    uint32_t shares = t.split * m.units < m.unit_count ? 1u << t.split : 0;
    fence_gpu();
    unsigned long long seen = atomicAdd(word, 1ull) + 1;
    if ((uint32_t)seen == t.split_count) {
        shares |= (uint32_t)(seen >> 32);
        __stcg(word, 0ull);                          /* who waits sees the full count or zero */
    } else if (shares != 0) {
        for (uint32_t polls = 0; seen != 0 && (uint32_t)seen != t.split_count; polls++) {
            if (polls < POLLS_MAX) {
                seen = ptx::load_relaxed(word);
                continue;
            }
            const unsigned long long before = atomicCAS(word, seen, seen | (unsigned long long)shares << 32);
            if (before == seen) return 0;
            seen = before;
        }
    }
    fence_gpu();
    return shares;
}

/* By one warp: what the sums of each split count for in a head, 2^(top - largest top) / total of all. */
template <class L> __device__ __forceinline__ void weigh_splits(const context<L> &c, const float2 *totals, float *weights) {
    float2 total[SPLITS_MAX / 32];
    float  top = -INFINITY, all = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < SPLITS_MAX / 32; i++)
        total[i] = 32 * i + c.lane < c.t.split_count ? __ldcg(totals + 32 * i + c.lane) : make_float2(-INFINITY, 0.0f);
#pragma unroll
    for (uint32_t i = 0; i < SPLITS_MAX / 32; i++) top = fmaxf(top, total[i].x);
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
#pragma unroll
    for (uint32_t i = 0; i < SPLITS_MAX / 32; i++) {
        total[i].x = exp2_fast(total[i].x - top);
        all = fmaf(total[i].x, total[i].y, all);
    }
    all = 1.0f / warp_sum(all);
#pragma unroll
    for (uint32_t i = 0; i < SPLITS_MAX / 32; i++)
        if (32 * i + c.lane < c.t.split_count) weights[32 * i + c.lane] = total[i].x * all;
}

/* One share's outputs from all splits; the ring's memory is free. */
template <class L> __device__ __forceinline__ void merge_share(const context<L> &c, const team_scratch &scratch, const merge_plan &m, uint32_t share) {
    float (*weights)[SPLITS_MAX] = (float (*)[SPLITS_MAX])c.ring;        /* [head][split] */
    float4 *row_sums = (float4 *)(c.ring + HEADS * SPLITS_MAX * sizeof(float));      /* [row][column] */
    const uint32_t at = 4 * (share * m.columns + m.column), head = at / L::DIM, dim = at % L::DIM, count = c.t.split_count;
    const uint32_t first_head = share * m.units * SHARE_UNIT / L::DIM;
    const uint32_t last_head = (min((share + 1) * m.units, m.unit_count) * SHARE_UNIT - 1) / L::DIM;
    const bool exists = m.row < m.rows && at < m.unit_count * SHARE_UNIT;
    const float *sums = scratch.sums + at;
    float4 ahead[MERGE_AHEAD], gate = make_float4(0, 0, 0, 0), sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (uint32_t i = 0; i < MERGE_AHEAD; i++)
        if (exists && m.row + i * m.rows < count) ahead[i] = load_activation4(sums + (size_t)(m.row + i * m.rows) * (HEADS * L::DIM));
    if (exists && m.row == 0) gate = load_gate(c, head, dim);
    if (c.warp >= first_head && c.warp <= last_head) weigh_splits(c, scratch.totals + c.warp * c.p.split_count, weights[c.warp]);
    __syncthreads();
    if (exists) {
#pragma unroll
        for (uint32_t i = 0; i < MERGE_AHEAD; i++)
            if (m.row + i * m.rows < count) add_scaled(sum, ahead[i], weights[head][m.row + i * m.rows]);
        for (uint32_t split = m.row + MERGE_AHEAD * m.rows; split < count; split += m.rows)
            add_scaled(sum, load_activation4(sums + (size_t)split * (HEADS * L::DIM)), weights[head][split]);
        row_sums[m.row * m.columns + m.column] = sum;
    }
    __syncthreads();
    if (exists && m.row == 0) {
        for (uint32_t i = 1; i < m.rows; i++) add_scaled(sum, row_sums[i * m.columns + m.column], 1.0f);
        put_out(c, head, dim, sum, gate);
    }
    __syncthreads();
}

/* All of the above after add_up_warps, where there are several splits. */
template <class L> __device__ __forceinline__ void merge_splits(const context<L> &c) {
    const team_scratch scratch = scratch_of(c);
    const merge_plan m = plan_of<L>(c.t);
    __syncthreads();
    if (threadIdx.x == 0) c.s.shares = arrive(scratch.word, c.t, m);
    __syncthreads();
    for (uint32_t shares = c.s.shares; shares != 0; shares &= shares - 1) merge_share(c, scratch, m, __ffs((int)shares) - 1);
}

} // namespace spk

#endif
