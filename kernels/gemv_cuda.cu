/* kernels/gemv_cuda.cu - matrix times vector for one token, up to four matrices in one launch.
 *
 * Maths      y = W x, or y = silu(W x) * (U x); x is prepared by every CTA (device_cuda.cuh)
 * Bytes      the weights once; x from L2 for every CTA: 132 * 4 * count.  qkv + z of Qwen3.6 in Q4_K:
 *            12288 rows of 2048 = 14.2 MB
 * Launch     one CTA of 384 threads an SM, each working on one matrix; CTAs are shared out by bytes.  A warp takes a row
 *            group (tile), the first one in registers before chain_wait, each next one while the last is multiplied.
 * Reference  spk_kernels.matmul with int8 activations; tolerance in tile_cuda.cuh plus k/p + log2 p additions a row
 */
#include <algorithm>

#include "kernels/backend_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace spk {
namespace {

constexpr int WARPS = 12, THREADS = 32 * WARPS;

struct segment {
    row_matrix w, up;        /* up.data NULL: a plain product */
    float     *y;
    uint32_t   first_cta;
};

struct gemv_args {
    spk_cuda_source source;
    segment         segments[SPK_CUDA_SEGMENT_MAX];
    uint32_t        segment_count;
    spk_cuda_sequence   sequence;                   /* of a greedy end, with best and arrivals */
    unsigned long long *best;
    uint32_t           *arrivals;
};

struct output {
    float             *y;
    bool               keeps_best;
    unsigned long long best;
    __device__ __forceinline__ void put(uint32_t row, float value) {
        y[row] = value;
        if (keeps_best) best = max(best, order_key(value, row));
    }
};

/* Tiles of one warp in order: unit after unit, and of each the tiles of w, then those of up. */
struct tile_walk {
    uint32_t unit, part, index;      /* part 1: up */
    __device__ __forceinline__ const uint8_t *at(const segment &s) const {
        const row_matrix &m = part == 0 ? s.w : s.up;
        return m.unit(unit) + index * m.stride;
    }
    /* False at the end. */
    __device__ __forceinline__ bool next(const segment &s, uint32_t step) {
        if (++index < s.w.tiles_per_group) return true;
        index = 0;
        if (s.up.data != nullptr && part++ == 0) return true;
        part = 0;
        unit += step;
        return unit < s.w.unit_count;
    }
};

/* The segment's tiles, the first of them loaded by the caller. */
__device__ __forceinline__ void run_tiles(const segment &s, const shared_vector &v, tile_walk walk, uint32_t step, bool has_rest,
                                          raw_tile &raw, output &out) {
    const uint32_t lane = threadIdx.x & 31, chunks = chunks_of(s.w.type), kb = s.w.first_block(lane);
    float sum = 0.0f, gate = 0.0f;
    bool more = walk.unit < s.w.unit_count;
    while (more) {
        const tile_walk now = walk;
        sum += product_of(s.w.type, raw, v, now.index * s.w.lanes_per_row + kb, has_rest);
        more = walk.next(s, step);
        if (more) raw.load(walk.at(s), lane, chunks);
        if (now.index + 1 < s.w.tiles_per_group) continue;
        sum = row_sum(sum, s.w.lanes_per_row);
        if (s.up.data != nullptr && now.part == 0) {
            gate = sum;
        } else {
            uint32_t row = s.w.row(now.unit, lane);
            if (s.w.leads(lane) && row < s.w.row_count) out.put(row, s.up.data != nullptr ? silu(gate) * sum : sum);
        }
        sum = 0.0f;
    }
}

__device__ __forceinline__ void run_rows(const segment &s, const shared_vector &v, uint32_t count, uint32_t first, uint32_t step,
                                         output &out) {
    const uint32_t lane = threadIdx.x & 31;
    for (uint32_t row = first; row < s.w.unit_count; row += step) {
        float sum = row_product_of(s.w, row, v, count, lane);
        if (s.up.data != nullptr) sum = silu(sum) * row_product_of(s.up, row, v, count, lane);
        if (lane == 0) out.put(row, sum);
    }
}

/* The end of a greedy step: the best row over all CTAs is the next token.  The counter wraps to zero by itself, and the
 * last CTA clears the key, so that a replay finds both as the first step did. */
__device__ __forceinline__ void finish_greedy(const gemv_args &a, unsigned long long best) {
    __shared__ unsigned long long warp_best[WARPS];
    for (int o = 16; o > 0; o >>= 1) best = max(best, __shfl_xor_sync(FULL, best, o));
    if ((threadIdx.x & 31) == 0) warp_best[threadIdx.x >> 5] = best;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int w = 1; w < WARPS; w++) best = max(best, warp_best[w]);
    atomicMax(a.best, best);
    __threadfence();
    if (atomicInc(a.arrivals, gridDim.x - 1) != gridDim.x - 1) return;
    __threadfence();
    uint32_t token = 0xffffffffu - (uint32_t)atomicExch(a.best, 0ull);
    uint32_t position = *a.sequence.d_position + 1;
    a.sequence.d_chosen[position] = token;
    if (a.sequence.d_tokens[position] == SPK_CUDA_TOKEN_FREE) a.sequence.d_tokens[position] = token;
    *a.sequence.d_position = position;
}

__global__ void __launch_bounds__(THREADS, 1) gemv_kernel(const __grid_constant__ gemv_args a) {
    chain_release();
    extern __shared__ __align__(16) uint8_t memory[];
    shared_vector v = carve_vector(memory, a.source.count);
    uint32_t index = 0;
    while (index + 1 < a.segment_count && blockIdx.x >= a.segments[index + 1].first_cta) index++;
    const segment &s = a.segments[index];
    const uint32_t end_cta = index + 1 < a.segment_count ? a.segments[index + 1].first_cta : gridDim.x;
    const uint32_t first = (blockIdx.x - s.first_cta) * WARPS + (threadIdx.x >> 5), step = (end_cta - s.first_cta) * WARPS;
    const bool has_tiles = !is_float(s.w.type);
    output out = { s.y, a.best != nullptr && index == 0, 0 };
    const tile_walk walk = { first, 0, 0 };
    raw_tile raw;
    norm_prefetch norm;
    if (has_tiles && first < s.w.unit_count) raw.load(walk.at(s), threadIdx.x & 31, chunks_of(s.w.type));
    norm.load(a.source);
    chain_wait();
    prepare_vector(a.source, v, norm, blockIdx.x == 0);
    if (has_tiles) run_tiles(s, v, walk, step, a.source.has_rest, raw, out);
    else run_rows(s, v, a.source.count, first, step, out);
    if (a.best != nullptr) finish_greedy(a, out.best);
}

uint64_t bytes_of(const spk_cuda_segment &from) {
    return spk_layout_unit_count(from.w.layout, from.w.type, from.w.row_count, from.w.col_count) *
           spk_layout_unit_bytes(from.w.layout, from.w.type, from.w.col_count) * (from.up.data != nullptr ? 2 : 1);
}

/* CTAs by bytes, at least one each, none without work for a warp. */
uint32_t share_ctas(const spk_cuda_gemv *args, segment *segments, uint32_t cta_count) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < args->segment_count; i++) total += bytes_of(args->segments[i]);
    uint32_t next = 0;
    for (uint32_t i = 0; i < args->segment_count; i++) {
        uint32_t left = args->segment_count - 1 - i, most = std::max(cta_count - std::min(cta_count, next + left), 1u);
        uint32_t want = (uint32_t)((bytes_of(args->segments[i]) * cta_count + total / 2) / total);
        uint32_t useful = segments[i].w.unit_count;   /* a warp in every CTA rather than every warp of a few */
        segments[i].first_cta = next;
        next += std::max(1u, std::min({ i + 1 == args->segment_count ? most : want, useful, most }));
    }
    return next;
}

} // namespace
} // namespace spk

void spk_cuda_launch_gemv(spk_cuda *cuda, const spk_cuda_gemv *args) {
    using namespace spk;
    gemv_args a = {};
    a.source = args->source;
    a.segment_count = args->segment_count;
    for (uint32_t i = 0; i < args->segment_count; i++) {
        const spk_cuda_segment &s = args->segments[i];
        a.segments[i] = { make_row_matrix(s.w), make_row_matrix(s.up.data != nullptr ? s.up : s.w), s.y, 0 };
        if (s.up.data == nullptr) a.segments[i].up.data = nullptr;
    }
    if (args->greedy != nullptr) {
        a.sequence = *args->greedy;
        a.best = args->d_best;
        a.arrivals = args->d_arrivals;
    }
    uint32_t ctas = share_ctas(args, a.segments, spk_cuda_sm_count(cuda));
    launch(cuda, gemv_kernel, ctas, THREADS, vector_bytes(args->source.count), a, "gemv");
}
