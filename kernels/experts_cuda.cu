/* kernels/experts_cuda.cu - routed experts of one token: selection, gate and up, weighted down.
 *
 * Maths      experts_up: h[r] = silu(G_e x) * (U_e x), e = r-th of the largest logits (ties to the lower index), weights
 *            softmax over the chosen;  experts_down: routed = sum_r weight_r D_e h[r], shared = sigmoid(g) S h_shared
 * Bytes      Qwen3.6, Q4_K gate and up, Q5_K down: 9.4 MB and 5.8 MB a layer
 * Launch     up: CTAs of 256 threads, a warp takes a pair of tiles; warp 0 selects before x is prepared.
 *            down: one CTA for a row group of all ranks; a warp takes a rank, prepares its h, and the CTA adds the ranks in
 *            order: no atomics on floats, so the same token twice gives the same bits.  The shared expert has CTAs of
 *            its own in the same launch
 * Reference  spk_kernels.top_k, matmul, swiglu, add_scaled
 */
#include <algorithm>

#include "kernels/backend_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace spk {
namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS, USED_MAX = 64, EXPERTS_MAX = 256, KEYS = EXPERTS_MAX / 32;

/* ---- Selection ---- */

/* The k largest of n <= EXPERTS_MAX logits by one warp: k rounds of the best that is left.  A lane holds values lane + 32 i
 * as ordered keys; a taken key becomes 0, which no number has. */
__device__ __forceinline__ void select_top(const float *logits, uint32_t n, uint32_t k, uint32_t *choice, float *weight,
                                           uint32_t lane) {
    uint32_t keys[KEYS];
#pragma unroll
    for (uint32_t i = 0; i < KEYS; i++) keys[i] = lane + 32 * i < n ? order_bits(__ldcg(logits + lane + 32 * i)) : 0;
    float top = 0.0f, sum = 0.0f, mine[USED_MAX / 32] = { 0.0f };
    for (uint32_t r = 0; r < k; r++) {
        uint32_t best = 0, index = UINT32_MAX;
#pragma unroll
        for (uint32_t i = 0; i < KEYS; i++) best = max(best, keys[i]);
        best = __reduce_max_sync(FULL, best);
#pragma unroll
        for (uint32_t i = 0; i < KEYS; i++) index = keys[i] == best ? min(index, lane + 32 * i) : index;
        index = __reduce_min_sync(FULL, index);          /* ties: the lower index */
#pragma unroll
        for (uint32_t i = 0; i < KEYS; i++) keys[i] = index == lane + 32 * i ? 0 : keys[i];
        float value = __uint_as_float(best & 0x80000000u ? best & 0x7fffffffu : ~best);
        if (r == 0) top = value;
        float e = expf(value - top);
        sum += e;
#pragma unroll
        for (int i = 0; i < USED_MAX / 32; i++) mine[i] = r == lane + 32 * i ? e : mine[i];
        if (lane == 0) choice[r] = index;
    }
#pragma unroll
    for (int i = 0; i < USED_MAX / 32; i++)
        if (lane + 32 * i < k) weight[lane + 32 * i] = mine[i] / sum;
}

__global__ void __launch_bounds__(32) top_k_kernel(const __grid_constant__ spk_cuda_top_k a) {
    chain_release();
    chain_wait();
    select_top(a.logits, a.expert_count, a.used_count, a.choice, a.weight, threadIdx.x);
}

/* ---- Gate and up ---- */

struct up_args {
    spk_cuda_source source;
    row_matrix      gate, up;
    uint64_t        expert_stride;
    const float    *logits;
    uint32_t       *choice;
    float          *weight, *h;
    uint32_t        expert_count, used_count;
};

__device__ __forceinline__ void choose(const up_args &a, uint32_t *choice, float *weight, uint32_t lane) {
    if (a.logits == nullptr) {
        for (uint32_t r = lane; r < a.used_count; r += 32) choice[r] = __ldcg(a.choice + r);
        return;
    }
    select_top(a.logits, a.expert_count, a.used_count, choice, weight, lane);
    __syncwarp();
    for (uint32_t r = lane; blockIdx.x == 0 && r < a.used_count; r += 32) {
        a.choice[r] = choice[r];
        a.weight[r] = weight[r];
    }
}

struct pair_job {
    row_matrix gate, up;
    uint32_t   rank, unit;
    __device__ __forceinline__ pair_job(const up_args &a, const uint32_t *choice, uint32_t job)
        : gate(a.gate), up(a.up), rank(job / a.gate.unit_count), unit(job % a.gate.unit_count) {
        gate.data += choice[rank] * a.expert_stride;
        up.data += choice[rank] * a.expert_stride;
    }
    __device__ __forceinline__ const uint8_t *gate_unit() const { return gate.unit(unit); }
    __device__ __forceinline__ const uint8_t *up_unit() const { return up.unit(unit); }
    __device__ __forceinline__ void put(const up_args &a, float g, float u, uint32_t lane) const {
        uint32_t row = gate.row(unit, lane);
        if (gate.leads(lane) && row < gate.row_count) a.h[(size_t)rank * gate.row_count + row] = silu(g) * u;
    }
};

__device__ __forceinline__ float pair_sum(const row_matrix &m, uint32_t unit, raw_tile &raw, const shared_vector &v, uint32_t count,
                                          uint32_t lane) {
    if (is_float(m.type)) return row_product_of(m, unit, v, count, lane);
    float sum = 0.0f;
#pragma unroll 1
    for (uint32_t t = 0; t < m.tiles_per_group; t++) {
        if (t > 0) raw.load(m.unit(unit) + t * m.stride, lane, chunks_of(m.type));
        sum += product_of(m.type, raw, v, t * m.lanes_per_row + m.first_block(lane), false);
    }
    return row_sum(sum, m.lanes_per_row);
}

/* Weights are asked for as soon as the choice is known; x is prepared while they come. */
__global__ void __launch_bounds__(THREADS, 1) up_kernel(const __grid_constant__ up_args a) {
    chain_release();
    extern __shared__ __align__(16) uint8_t memory[];
    __shared__ uint32_t choice[USED_MAX];
    __shared__ float weight[USED_MAX];
    shared_vector v = carve_vector(memory, a.source.count);
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t first = blockIdx.x * WARPS + warp, step = gridDim.x * WARPS, end = a.used_count * a.gate.unit_count;
    norm_prefetch norm;
    norm.load(a.source);
    chain_wait();
    if (warp == 0) choose(a, choice, weight, lane);
    __syncthreads();
    raw_tile raw[2];
    if (first < end && !is_float(a.gate.type)) raw[0].load(pair_job(a, choice, first).gate_unit(), lane, chunks_of(a.gate.type));
    if (first < end && !is_float(a.up.type)) raw[1].load(pair_job(a, choice, first).up_unit(), lane, chunks_of(a.up.type));
    prepare_vector(a.source, v, norm, blockIdx.x == 0);
#pragma unroll 1
    for (uint32_t job = first; job < end; job += step) {
        const pair_job p(a, choice, job);
        if (job != first && !is_float(a.gate.type)) raw[0].load(p.gate_unit(), lane, chunks_of(a.gate.type));
        if (job != first && !is_float(a.up.type)) raw[1].load(p.up_unit(), lane, chunks_of(a.up.type));
        float sums[2];
#pragma unroll 1
        for (int side = 0; side < 2; side++) {
            const float sum = pair_sum(side == 0 ? p.gate : p.up, p.unit, raw[0], v, a.source.count, lane);
            if (side == 0) {
                sums[0] = sum;
                raw[0] = raw[1];
            } else {
                sums[1] = sum;
            }
        }
        p.put(a, sums[0], sums[1], lane);
    }
}

/* ---- Down ---- */

struct down_args {
    row_matrix      down, shared_down;   /* shared_down.data NULL: no shared expert */
    uint64_t        expert_stride;
    const uint32_t *choice;
    const float    *weight, *h, *shared_h, *shared_logit;
    float          *routed, *shared;
    uint32_t        used_count, ff, shared_ff, slot_bytes, rows_per_cta, routed_ctas;
};

/* Prepare h of one slot for one warp: no norm, no sums, no CTA barrier. */
__device__ __forceinline__ void prepare_slot(const float *h, uint32_t count, const shared_vector &v, uint32_t lane) {
#pragma unroll 1
    for (uint32_t c = 0; c < v.k; c++) {
        uint32_t at = c * 256 + lane * 8;
        float x[8] = { 0, 0, 0, 0, 0, 0, 0, 0 };
        if (at < count) {
            *(float4 *)&x[0] = load_activation4(h + at);
            *(float4 *)&x[4] = load_activation4(h + at + 4);
        }
        *(float4 *)(v.f32 + at) = *(float4 *)&x[0];
        *(float4 *)(v.f32 + at + 4) = *(float4 *)&x[4];
        quantize_eight(v, c, lane, x, true);
    }
    __syncwarp();
}

/* Sums of unit_count units from `first` of one matrix by one warp, row i of the first unit at sums[i].  The first weights
 * are on their way while the vector is prepared. */
__device__ __forceinline__ void down_units(const row_matrix &m, uint32_t first, uint32_t unit_count, const float *h, uint32_t count,
                                           const shared_vector &v, float *sums, uint32_t lane) {
    const uint32_t rows_per_unit = 32 / m.lanes_per_row, chunks = chunks_of(m.type);
    const bool has_tiles = !is_float(m.type);
    raw_tile raw;
    if (has_tiles && first < m.unit_count) raw.load(m.unit(first), lane, chunks);
    prepare_slot(h, count, v, lane);
#pragma unroll 1
    for (uint32_t i = 0; i < unit_count && first + i < m.unit_count; i++) {
        float sum = 0.0f;
#pragma unroll 1
        for (uint32_t t = 0; has_tiles && t < m.tiles_per_group; t++) {
            if (i + t > 0) raw.load(m.unit(first + i) + t * m.stride, lane, chunks);
            sum += product_of(m.type, raw, v, t * m.lanes_per_row + m.first_block(lane), true);
        }
        sum = has_tiles ? row_sum(sum, m.lanes_per_row) : row_product_of(m, first + i, v, count, lane);
        if (m.leads(lane)) sums[i * rows_per_unit + lane / m.lanes_per_row] = sum;
    }
    __syncwarp();
}

/* A CTA of the routed experts: a warp takes a rank, the CTA adds the ranks in order. */
__device__ __forceinline__ void down_routed(const down_args &a, uint8_t *memory, float *sums) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = a.rows_per_cta / (32 / a.down.lanes_per_row);
    for (uint32_t rank = warp; rank < a.used_count; rank += WARPS) {
        row_matrix m = a.down;
        m.data += __ldcg(a.choice + rank) * a.expert_stride;
        down_units(m, blockIdx.x * units, units, a.h + (size_t)rank * a.ff, a.ff,
                             carve_vector(memory + (size_t)warp * a.slot_bytes, a.ff), sums + rank * a.rows_per_cta, lane);
    }
    const float rank_weight = lane < a.used_count ? __ldcg(a.weight + lane) : 0.0f;
    __syncthreads();
    if (warp != 0) return;
    for (uint32_t at = lane; at < (a.rows_per_cta + 31) / 32 * 32; at += 32) {
        float routed = 0.0f;
        for (uint32_t r = 0; r < a.used_count; r++) {
            float weight = r < 32 ? __shfl_sync(FULL, rank_weight, r) : __ldcg(a.weight + r);
            if (at < a.rows_per_cta) routed = fmaf(weight, sums[r * a.rows_per_cta + at], routed);
        }
        uint32_t row = blockIdx.x * a.rows_per_cta + at;
        if (at < a.rows_per_cta && row < a.down.row_count) a.routed[row] = routed;
    }
}

/* A CTA of the shared expert: a warp takes rows_per_cta rows. */
__device__ __forceinline__ void down_shared(const down_args &a, uint8_t *memory, float *sums) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, units = a.rows_per_cta / (32 / a.shared_down.lanes_per_row);
    const uint32_t part = (blockIdx.x - a.routed_ctas) * WARPS + warp;
    float *own = sums + warp * a.rows_per_cta;
    const float gate = sigmoid(__ldcg(a.shared_logit));
    down_units(a.shared_down, part * units, units, a.shared_h, a.shared_ff,
                         carve_vector(memory + (size_t)warp * a.slot_bytes, a.shared_ff), own, lane);
    for (uint32_t at = lane; at < a.rows_per_cta; at += 32) {
        uint32_t row = part * a.rows_per_cta + at;
        if (row < a.shared_down.row_count) a.shared[row] = own[at] * gate;
    }
}

/* Dynamic shared memory: a vector for each warp, then sums [rank or warp][rows_per_cta]. */
__global__ void __launch_bounds__(THREADS, 1) down_kernel(const __grid_constant__ down_args a) {
    chain_release();
    extern __shared__ __align__(16) uint8_t memory[];
    float *sums = (float *)(memory + (size_t)WARPS * a.slot_bytes);
    chain_wait();
    if (blockIdx.x < a.routed_ctas) down_routed(a, memory, sums);
    else down_shared(a, memory, sums);
}

} // namespace
} // namespace spk

void spk_cuda_launch_top_k(spk_cuda *cuda, const spk_cuda_top_k *args) {
    spk::launch(cuda, spk::top_k_kernel, 1, 32, 0, *args, "top k");
}

void spk_cuda_launch_experts_up(spk_cuda *cuda, const spk_cuda_experts_up *args) {
    using namespace spk;
    up_args a = { args->source, make_row_matrix(args->gate), make_row_matrix(args->up), args->expert_stride_bytes, args->logits,
                  args->choice, args->weight, args->h, args->expert_count, args->used_count };
    uint32_t ctas = std::min((a.used_count * a.gate.unit_count + WARPS - 1) / WARPS, cuda->sm_count);
    launch(cuda, up_kernel, ctas, THREADS, vector_bytes(args->source.count), a, "experts up");
}

void spk_cuda_launch_experts_down(spk_cuda *cuda, const spk_cuda_experts_down *args) {
    using namespace spk;
    down_args a = { make_row_matrix(args->down), {}, args->expert_stride_bytes, args->choice, args->weight, args->h, args->shared_h,
                    args->shared_logit, args->routed, args->shared, args->used_count, (uint32_t)args->down.col_count, 0, 0, 0, 0 };
    if (args->shared_down.data != nullptr) {
        a.shared_down = make_row_matrix(args->shared_down);
        a.shared_ff = (uint32_t)args->shared_down.col_count;
    }
    /* Few rows a CTA, for many CTAs; whole units of both matrices. */
    a.rows_per_cta = std::max({ 8u, 32 / a.down.lanes_per_row, a.shared_down.data ? 32 / a.shared_down.lanes_per_row : 0 });
    a.slot_bytes = vector_bytes(std::max(a.ff, a.shared_ff));
    a.routed_ctas = (a.down.row_count + a.rows_per_cta - 1) / a.rows_per_cta;
    const uint32_t shared_rows_per_cta = WARPS * a.rows_per_cta;
    const uint32_t shared_ctas = a.shared_down.data != nullptr ? (a.down.row_count + shared_rows_per_cta - 1) / shared_rows_per_cta : 0;
    const uint32_t shared_bytes = WARPS * a.slot_bytes + std::max(a.used_count, (uint32_t)WARPS) * a.rows_per_cta * (uint32_t)sizeof(float);
    launch(cuda, down_kernel, a.routed_ctas + shared_ctas, THREADS, shared_bytes, a, "experts down");
}
