/* kernels/attention_cuda.cu - exact attention of one token over all positions, in one kernel.
 *
 * Maths      q, k = rope(rms_norm(.)); out = softmax(q k^T / sqrt(d)) v * sigmoid(gate)
 * Bytes      2 * kv_heads * head_dim * 2 (F16) or * 1.0625 (Q8) a position; Qwen3.6 at 32,768 positions: 67 or 36 MB a layer
 * Launch     CTAs of 256 threads; a row of CTAs (a team) for each KV head and, where more than 8 query heads share it, for each
 *            8 of these.  As many splits of the positions as fill the GPU with one CTA an SM; which of them work depends on the
 *            position alone, the others leave at once, so that the grid never changes:
 *              up to 128 positions  no split, since merging costs more than it saves; at head_dim 256 two CTAs halve the
 *                                   dimensions of V, and each has all scores
 *              up to 512            parts of a round, which the output projection merges while it reads them; without that no split up to
 *                                   256
 *              more                 splits of a multiple of 32 positions
 *            A round is 128 positions.  A warp has 16 of them for the scores (K is the A operand, 8 query heads are the
 *            columns of B) and 32 dimensions for the sum over V (V^T is A); softmax weights pass through shared memory, and
 *            that is all that warps exchange in a round.  Each warp copies its own blocks through its own ring of stages.
 * Merging    Splits leave their sums in scratch and count up a word; outputs are dealt out in shares to the first CTAs, which wait
 *            for the count and merge in order of split: results do not depend on who was last.  No CTA has to be resident for
 *            another to end (attention_merge_cuda.cuh).
 * Resources  at most 128 registers (sm_90); shared memory 112.4 KB (head_dim 256, F16), or what is half of an SM, or one stage a warp
 * Before the wait: the first stages, and as many again into L2; the norms' weights.  The row of the new token comes from q, k, v
 *            and replaces what lies in the copied stages, where it may be half written.
 *
 * Tolerance  u = 2^-24; s is a score in units of log2, sum q_i k_i log2(e) / sqrt(d), and T = sum |q_i k_i| of the same.
 *            q       norm and rotation in F32: 24 u of |a| + |b| of a rotation.  Kept as two F16 of q * 2^e, where 2^e makes the
 *                    largest that q can be (max |weight|) 2^13: 4 u of itself, and 2^-38 of that largest
 *            score   products are exact in F32; an addition of the tensor core is good for 2 u of its largest term.  A chain is 4
 *                    steps of 17 terms, and joining the chains takes 6 u: ds = (28 + 136 + 6) u T + 2 u |s|, which is 2^-16.6 T
 *                    at worst; rounding to nearest with random signs gives 2^-20 T
 *            weight  ln2 (ds + 2 u |top - s|) + 12 u: exp2, two F16, and once more where a later top shrinks it.  Weights are 2^14
 *                    at most before they become F16: what is lost below is 2^-39 of the largest
 *            sum     a chain is 8 steps of 17 terms: 272 u.  Then 4 u a round, 2 u a split, 40 u for parts, rows and totals
 *            out     the weights' errors, of sum p |v| / sum p and of |out|, and the sum's; the gate adds 20 u
 *            Terms that are zero count for nothing.  tests/gpu_attention.c computes this for each output and holds it to that.
 * Reference  spk_kernels.qk_norm_rope, kv_store, attend, sigmoid_gate
 */
#include <assert.h>

#include "kernels/attention_cuda.cuh"
#include "kernels/attention_merge_cuda.cuh"
#include "kernels/backend_cuda.cuh"

namespace spk {
namespace {

constexpr float    WEIGHT_SCALE = 16384.0f;          /* of the largest: small ones then keep their bits in two halves */
constexpr uint32_t SHARED_BYTES_MAX = 113 * 1024;

/* Scores of the lane: positions g and g + 8 of the warp's 16 from `first`, heads 2t and 2t + 1, as a C fragment has them. */
template <class L> __device__ __forceinline__ void score(const context<L> &c, cache_stream<L> &stream, uint32_t first, float down, float out[4]) {
    float high[L::DIM / 64][4] = {}, low[2][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < L::K_BLOCKS; i++) {
        uint8_t *block = stream.use(first);
        if (first < c.t.end) {
            if (c.t.has_new() && c.t.position - first < L::K_POSITIONS) {
                c.s.fresh[0].put_k(block, c.t.position - first, i, c.lane);
                fence_copies();
                __syncwarp();
            }
#pragma unroll
            for (uint32_t pair = 0; pair < L::K_DIMS / 32; pair++) {
                fragment_a a[2];
                L::load_k(block, pair, c.lane, a);
#pragma unroll
                for (uint32_t j = 0; j < 2; j++) {
                    const uint32_t step = i * (L::K_DIMS / 16) + 2 * pair + j;
                    const uint4 q = c.s.q[step][c.lane];
                    multiply_add(high[step / 4], a[j], q.x, q.y);
                    multiply_add(low[j], a[j], q.z, q.w);
                }
            }
        }
        stream.release();
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        float sum = low[0][i] + low[1][i];
#pragma unroll
        for (uint32_t j = 0; j < L::DIM / 64; j++) sum += high[j][i];
        out[i] = first + c.lane / 4 + i / 2 * 8 < c.t.end ? sum * down : -INFINITY;
    }
}

/* The online softmax of a lane's two heads, 2t and 2t + 1. */
struct softmax_state {
    float top[2], sum[2];                            /* sum: of the lane's own positions */

    /* Scores become weights, 2^14 2^(score - top), as B fragments in shared memory; shrink is what older sums must be
     * multiplied by. */
    template <class L> __device__ __forceinline__ void advance(const context<L> &c, const float score[4], float shrink[2]) {
        const uint32_t head = c.lane % 4 * 2;
        float largest[2] = { fmaxf(score[0], score[2]), fmaxf(score[1], score[3]) };
#pragma unroll
        for (int o = 4; o <= 16; o *= 2) {
            const float other0 = __shfl_xor_sync(FULL, largest[0], o), other1 = __shfl_xor_sync(FULL, largest[1], o);
            largest[0] = fmaxf(largest[0], other0);
            largest[1] = fmaxf(largest[1], other1);
        }
        if (c.lane < 4) {
            c.s.warp_top[head][c.warp] = largest[0];
            c.s.warp_top[head + 1][c.warp] = largest[1];
        }
        __syncthreads();
        float weight[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 x = *(const float4 *)&c.s.warp_top[head + h][0], y = *(const float4 *)&c.s.warp_top[head + h][4];
            const float round_top = fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), fmaxf(fmaxf(y.x, y.y), fmaxf(y.z, y.w)));
            const float now = fmaxf(top[h], round_top);
            shrink[h] = exp2_fast(top[h] - now);
            top[h] = now;
            weight[h] = exp2_fast(score[h] - now) * WEIGHT_SCALE;
            weight[2 + h] = exp2_fast(score[2 + h] - now) * WEIGHT_SCALE;
            sum[h] = fmaf(sum[h], shrink[h], weight[h] + weight[2 + h]);
        }
        uint32_t high[2], low[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {                /* C has a position's two heads in a register, B a head's two positions */
            const __half2 upper = __floats2half2_rn(weight[2 * i], weight[2 * i + 1]);
            const float2 back = __half22float2(upper);
            const __half2 lower = __floats2half2_rn(weight[2 * i] - back.x, weight[2 * i + 1] - back.y);
            high[i] = transpose_matrix(*(const uint32_t *)&upper);
            low[i] = transpose_matrix(*(const uint32_t *)&lower);
        }
        c.s.weights[c.warp][c.lane] = make_uint4(high[0], high[1], low[0], low[1]);
        __syncthreads();
    }
    /* Tops and totals of the warp, and its sums into its first stage: all stages have been used. */
    template <class L> __device__ __forceinline__ void leave(const context<L> &c, const cache_stream<L> &stream, const float sums[2][4]) {
        const uint32_t head = c.lane % 4 * 2;
        float *own = (float *)stream.ring.stage(0) + head * SUM_STRIDE;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
#pragma unroll
            for (uint32_t m = 0; m < 2; m++) own[i % 2 * SUM_STRIDE + 16 * m + L::v_row(c.lane / 4, i / 2)] = sums[m][i];
#pragma unroll
        for (int o = 4; o <= 16; o *= 2) {
            const float other0 = __shfl_xor_sync(FULL, sum[0], o), other1 = __shfl_xor_sync(FULL, sum[1], o);
            sum[0] += other0;
            sum[1] += other1;
        }
        if (c.lane < 4)
            for (int h = 0; h < 2; h++) {
                c.s.warp_sum[head + h][c.warp] = sum[h];
                c.s.top[head + h] = top[h];          /* the same in all warps */
            }
    }
};

/* The new token's v into its place of a stage, and zeros after it as far as a product reaches: a weight of 0 does not help
 * against NaN.  The stage starts at position `first`. */
template <class L> __device__ __forceinline__ void put_new_v(const context<L> &c, const cache_stream<L> &stream, uint32_t first, uint8_t *stage) {
    const uint32_t row = (c.t.position - first) % L::V_POSITIONS;
    uint8_t *block = stage + (c.t.position - first) / L::V_POSITIONS * L::V_BLOCK;
    for (uint32_t later = row + 1; later % 16 != 0; later++) {
        if (c.lane < L::V_ROW / 4) ((uint32_t *)(block + later * L::V_ROW))[c.lane] = 0;
        if (L::ELEMENT_BYTES == 1 && c.lane == 0) ((__half *)(block + L::V_CODES))[later] = __ushort_as_half(0);
    }
    c.s.fresh[1].put_v(block, row, stream.v_slice, c.lane);
    fence_copies();
    __syncwarp();
}

/* sums[tile of 16 dimensions] of the warp's 32 dimensions over its part of the round: C fragments, row dimension, column head. */
template <class L> __device__ __forceinline__ void add_values(const context<L> &c, cache_stream<L> &stream, uint32_t round, const float shrink[2],
                                                              float sums[2][4]) {
    using S = stages<L>;
    const uint4 (*weights)[32] = c.s.weights + (stream.v_begin - c.t.begin) / 16;
    float high[2][4] = {}, low[2][4] = {};
#pragma unroll
    for (uint32_t i = 0; i < S::V_COUNT; i++) {
        if (i >= stream.v_count) break;
        const uint32_t first = stream.v_begin + round * ROUND + i * S::V_POSITIONS;
        uint8_t *stage = stream.use(first);
        if (c.t.has_new() && c.t.position - first < S::V_POSITIONS) put_new_v(c, stream, first, stage);
#pragma unroll
        for (uint32_t step = 0; step < S::V_POSITIONS / 16; step++) {
            if (first + 16 * step >= c.t.end) break;
            fragment_a a[2];
            L::load_v(stage + step / 2 * L::V_BLOCK, step % 2, c.lane, a);
            const uint4 w = weights[i * (S::V_POSITIONS / 16) + step][c.lane];
#pragma unroll
            for (uint32_t m = 0; m < 2; m++) {
                multiply_add(high[m], a[m], w.x, w.y);
                multiply_add(low[m], a[m], w.z, w.w);
            }
        }
        stream.release();
    }
#pragma unroll
    for (uint32_t m = 0; m < 2; m++)
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) sums[m][i] = fmaf(sums[m][i], shrink[i % 2], high[m][i] + low[m][i]);
}

/* Two CTAs an SM, or as many as the registers of a Q8 cache at head_dim 256 leave room for. */
#if __CUDA_ARCH__ == 800
#define CTAS_PER_SM 1
#else
#define CTAS_PER_SM 2
#endif
template <class L> __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) attention_kernel(const __grid_constant__ attention_args p) {
    chain_release();
    touch_arguments(p);
    const task t = task_of<L>(p);
    if (!t.works()) return;
    const context<L> c = { p, t, *(shared_state<L> *)ptx::dynamic_shared(), ptx::dynamic_shared() + state_bytes<L>(), threadIdx.x >> 5, threadIdx.x & 31 };
    cache_stream<L> stream;
    stream.begin(c);
    stream.start(c.lane);
    new_token<L> token;
    token.start(c);
    chain_wait();
    token.finish(c);
    const float4 gate = load_first_gate(c);
    __syncthreads();
    store_fresh(c);
    softmax_state state = { { -INFINITY, -INFINITY }, { 0.0f, 0.0f } };
    float sums[2][4] = {};
    for (uint32_t round = 0; t.begin + round * ROUND < t.end; round++) {
        float scores[4], shrink[2];
        score(c, stream, stream.k_begin + round * ROUND, token.range.down, scores);
        state.advance(c, scores, shrink);
        add_values(c, stream, round, shrink, sums);
    }
    state.leave(c, stream, sums);
    __syncthreads();
    add_up_warps(c, gate);
    if (merges(c)) merge_splits(c);
}

attention_args arguments_of(const spk_cuda *cuda, const spk_cuda_attention *a) {
    attention_args p = { *a, 0, 0, 0, 0 };
    const uint32_t ratio = a->head_count / a->kv_head_count;
    p.group_count = (ratio + HEADS - 1) / HEADS;
    p.group_heads = (ratio + p.group_count - 1) / p.group_count;
    p.split_count = cuda->sm_count / (a->kv_head_count * p.group_count);
    if (p.split_count == 0) p.split_count = 1;
    if (p.split_count > SPLITS_MAX) p.split_count = SPLITS_MAX;
    return p;
}

template <class L> void launch_attention(spk_cuda *cuda, attention_args p) {
    constexpr uint32_t bytes = WARPS * stages<L>::BYTES;     /* of all warps' stage */
    const uint32_t budget = cuda->shared_budget_bytes < SHARED_BYTES_MAX ? cuda->shared_budget_bytes : SHARED_BYTES_MAX;
    p.stage_count = (budget - state_bytes<L>()) / bytes;
    if (p.stage_count > RING_STAGES_MAX) p.stage_count = RING_STAGES_MAX;
    if (p.stage_count == 0) p.stage_count = 1;
    launch(cuda, attention_kernel<L>, dim3(p.split_count, p.a.kv_head_count * p.group_count), THREADS, state_bytes<L>() + p.stage_count * bytes, p,
           "attention");
}

template <int DIM> void launch_attention(spk_cuda *cuda, const attention_args &p) {
    if (p.a.kv_type == SPK_CUDA_KV_Q8) launch_attention<cache_layout<DIM, true>>(cuda, p);
    else launch_attention<cache_layout<DIM, false>>(cuda, p);
}

} // namespace
} // namespace spk

bool spk_cuda_attention_has_parts(const spk_cuda *cuda, const spk_cuda_attention *args) {
    return spk::arguments_of(cuda, args).split_count >= SPK_CUDA_PARTS_MAX * spk::slices_of(args->head_dim);
}

uint64_t spk_cuda_attention_cache_bytes(const spk_cuda_attention *args) {
    const uint64_t values = (uint64_t)args->kv_head_count * ((args->context_tokens + 31ull) / 32 * 32) * args->head_dim;
    return args->kv_type == SPK_CUDA_KV_Q8 ? values + values / 16 : 2 * values;
}

uint64_t spk_cuda_attention_scratch_bytes(const spk_cuda *cuda, const spk_cuda_attention *args) {
    const spk::attention_args p = spk::arguments_of(cuda, args);
    const uint64_t teams = (uint64_t)args->kv_head_count * p.group_count;
    return spk::words_bytes(teams) + teams * p.split_count * spk::HEADS * (sizeof(float2) + args->head_dim * sizeof(float));
}

void spk_cuda_launch_attention(spk_cuda *cuda, const spk_cuda_attention *args) {
    const spk::attention_args p = spk::arguments_of(cuda, args);
    assert(args->part_totals == nullptr || spk_cuda_attention_has_parts(cuda, args));
    switch (args->head_dim) {
    case 64:  spk::launch_attention<64>(cuda, p); break;
    case 128: spk::launch_attention<128>(cuda, p); break;
    default:  spk::launch_attention<256>(cuda, p); break;
    }
}
