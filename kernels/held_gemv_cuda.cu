/* kernels/held_gemv_cuda.cu - matrix times vector for one token, weights held in registers when the vector comes.
 *
 * Maths      as gemv_cuda.cu, of which this is the short form: rows one tile wide, tiles of one matrix type or a set of types,
 *            up to two rows of floats a CTA that ride along
 * Bytes      qkv + z of Qwen3.6 in Q4_K, 12288 rows of 2048: 14.2 MB; its output projection, 2048 rows of 4096: 4.7 MB
 * Launch     one CTA an SM, of 8 warps; a thread prepares 8 values of x (2048) or twice 8 (4096).  A warp's first one to three tiles
 *            are on their way before chain_wait, the third into shared memory; each later one is asked for when one is done
 * Resources  at most 65536 registers a CTA, half of that for Q4_K; 11 KiB of shared memory, 42 with a tile a warp to spare
 * Reference  gemv_cuda.cu: the same bits (tests/checkkern compares both with spk_kernels.matmul)
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/held_cuda.cuh"
#include "kernels/held_launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace spk {
namespace {

struct held_segment {
    const uint8_t *tiles, *up;           /* up: of a pair */
    float         *y;
    const float   *residual;
    uint32_t       first_job, row_count, type, stride_bytes;   /* from tile to tile */
};
struct rider_segment {
    const uint8_t *rows;
    uint64_t       stride;
    float         *y;
    const float   *residual;
    uint32_t       first, type;
};
struct held_args {
    spk_cuda_source source;
    held_segment    segments[SPK_CUDA_SEGMENT_MAX];
    rider_segment   riders[SPK_CUDA_SEGMENT_MAX];
    uint32_t        segment_count, rider_segment_count, job_count, rider_count;
    spk_cuda_signal inputs_ready;
};

/* One warp's tiles in order: those of its jobs, of a pair gate and then up. */
template <uint32_t TYPES, bool IS_PAIR> struct tile_walk {
    const held_args &a;
    uint32_t job, step;
    bool     is_up;
    __device__ __forceinline__ bool is_there() const { return job < a.job_count; }
    __device__ __forceinline__ const held_segment &segment() const {
        uint32_t owner = 0;
#pragma unroll
        for (uint32_t i = 1; i < SPK_CUDA_SEGMENT_MAX; i++)
            if (i < a.segment_count && job >= a.segments[i].first_job) owner = i;
        return a.segments[owner];
    }
    __device__ __forceinline__ const uint8_t *tile(const held_segment &s) const {
        return (is_up ? s.up : s.tiles) + (uint64_t)(job - s.first_job) * s.stride_bytes;
    }
    __device__ __forceinline__ void load(held_tile<TYPES> &held) const {
        if (!is_there()) return;
        const held_segment &s = segment();
        held.load(s.type, tile(s), threadIdx.x & 31);
    }
    __device__ __forceinline__ void next() {
        if (IS_PAIR) is_up = !is_up;
        if (!is_up) job += step;
    }
};

/* The lane's row of a job's tile, and what is added to it. */
template <uint32_t KB> struct job_rows {
    uint32_t row;
    bool     is_mine;
    __device__ __forceinline__ job_rows(const held_segment &s, uint32_t job) {
        const uint32_t lane = threadIdx.x & 31;
        row = (job - s.first_job) * (32 / KB) + lane / KB;
        is_mine = lane % KB == 0 && row < s.row_count;
    }
};

struct rider_row {
    const rider_segment *s;
    uint32_t             row;
    __device__ __forceinline__ rider_row(const held_args &a, uint32_t index) {
        uint32_t owner = 0;
        for (uint32_t i = 1; i < a.rider_segment_count; i++)
            if (index >= a.riders[i].first) owner = i;
        s = &a.riders[owner];
        row = index - s->first;
    }
};
template <int RIDERS> __device__ __forceinline__ void load_riders(const held_args &a, uint32_t count, eight *riders) {
#pragma unroll
    for (int r = 0; r < RIDERS; r++) {
        const uint32_t index = blockIdx.x + r * gridDim.x;
        riders[r] = zero_eight();
        if (index >= a.rider_count || threadIdx.x * 8 >= count) continue;
        const rider_row rider(a, index);
        riders[r] = load_float_eight(rider.s->rows + rider.row * rider.s->stride, rider.s->type, threadIdx.x * 8);
    }
}
/* Rider r by the warp that is r-th from the last, from the sums that prepare_held left. */
template <int RIDERS> __device__ __forceinline__ void put_riders(const held_args &a, const input_vector &v, float factor) {
    const uint32_t r = (blockDim.x >> 5) - 1 - (threadIdx.x >> 5), index = blockIdx.x + r * gridDim.x;
    if (r >= RIDERS || index >= a.rider_count) return;
    const rider_row rider(a, index);
    const float residual = rider.s->residual != nullptr ? __ldcg(rider.s->residual + rider.row) : 0.0f;
    const float sum = sum_chunks(v.chunk_sums + (r + 1) * v.k, v.k);
    if ((threadIdx.x & 31) == 0) rider.s->y[rider.row] = __fadd_rn(__fmul_rn(sum, factor), residual);
}

template <uint32_t KB> __device__ __forceinline__ float residual_of(const held_segment &s, uint32_t job) {
    const job_rows<KB> rows(s, job);
    return s.residual != nullptr && rows.is_mine ? __ldcg(s.residual + rows.row) : 0.0f;
}

constexpr uint32_t WARPS = 8;

/* Shape of a kernel: tile types (a set), super-blocks a row, tiles a warp holds (one more waits in shared memory where
 * SPARE_BYTES, a tile's, are set), rows of floats a CTA takes along. */
template <uint32_t TYPES_, uint32_t KB_, int AHEAD_, uint32_t SPARE_BYTES_, int RIDERS_, bool REST_, bool IS_PAIR_> struct shape {
    static constexpr uint32_t TYPES = TYPES_, KB = KB_, SPARE_BYTES = SPARE_BYTES_;
    static constexpr int AHEAD = AHEAD_, RIDERS = RIDERS_;
    static constexpr bool REST = REST_, IS_PAIR = IS_PAIR_;
};

/* Dynamic shared memory: x, the spare tiles, their barriers. */
template <class S> __host__ __device__ constexpr uint32_t vector_bytes() { return (int8_bytes(256 * S::KB, S::REST) + 127) / 128 * 128; }
template <class S> constexpr uint32_t shared_bytes() {
    return vector_bytes<S>() + (S::SPARE_BYTES > 0 ? WARPS * (S::SPARE_BYTES + RING_STAGES_MAX * (uint32_t)sizeof(uint64_t)) : 0);
}

template <class S> __global__ void __launch_bounds__(32 * WARPS, S::TYPES == Q4_K ? 2 : 1)
held_gemv_kernel(const __grid_constant__ held_args a) {
    chain_release();
    touch_arguments(a);
    constexpr uint32_t KB = S::KB, COUNT = 256 * KB;
    constexpr int AHEAD = S::AHEAD, RIDERS = S::RIDERS, EIGHTS = KB / WARPS;
    constexpr bool REST = S::REST, IS_PAIR = S::IS_PAIR;
    uint8_t *const memory = ptx::dynamic_shared();
    const input_vector v = carve_int8(memory, COUNT, REST);
    const uint32_t lane = threadIdx.x & 31, first = blockIdx.x + gridDim.x * (threadIdx.x >> 5), step = gridDim.x * WARPS;
    held_tile<S::TYPES> held[AHEAD];
    tile_walk<S::TYPES, IS_PAIR> ahead = { a, first, step, false }, walk = ahead;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        ahead.load(held[i]);
        ahead.next();
    }
    warp_ring spare = {};
    if constexpr (S::SPARE_BYTES > 0) {
        uint8_t *const tiles = memory + vector_bytes<S>();
        spare.begin(tiles, (uint64_t *)(tiles + WARPS * S::SPARE_BYTES), S::SPARE_BYTES, 1);
        if (ahead.is_there()) spare.fill(0, ahead.tile(ahead.segment()), 0, S::SPARE_BYTES, 1);
    }
    eight riders[RIDERS > 0 ? RIDERS : 1], norm[EIGHTS];
    load_riders<RIDERS>(a, COUNT, riders);
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
        norm[e] = a.source.norm_weight != nullptr ? load_eight(a.source.norm_weight + (threadIdx.x + e * blockDim.x) * 8) : zero_eight();
    const uint32_t signal_step = step_of(a.inputs_ready);
    chain_wait();
    if (a.inputs_ready.d_flag != nullptr && blockIdx.x == gridDim.x - 1 && threadIdx.x == blockDim.x - 1) give(a.inputs_ready, signal_step);
    float residual = walk.is_there() ? residual_of<KB>(walk.segment(), walk.job) : 0.0f;
    const float factor = prepare_held<COUNT, EIGHTS, RIDERS>(a.source, v, norm, riders, blockIdx.x == 0);
    if constexpr (RIDERS > 0) put_riders<RIDERS>(a, v, factor);
    float gate = 0.0f;
    bool has_spare = S::SPARE_BYTES > 0;
#pragma unroll 1
    while (walk.is_there()) {
        const held_segment &s = walk.segment();
        const job_rows<KB> rows(s, walk.job);
        const uint32_t type = s.type;
        const bool is_up = walk.is_up;
        const float sum = lanes_sum_of<KB>(held[0].template dot<REST>(type, v, lane % KB)), own = residual;
#pragma unroll
        for (int i = 0; i + 1 < AHEAD; i++) held[i] = held[i + 1];
        if (has_spare && ahead.is_there()) {
            spare.wait(0);
            held[AHEAD - 1].take(spare.stage(0), lane);
        } else {
            ahead.load(held[AHEAD - 1]);
        }
        has_spare = false;
        ahead.next();
        walk.next();
        if (IS_PAIR && !is_up) {
            gate = sum;
            continue;
        }
        if (walk.is_there()) residual = residual_of<KB>(walk.segment(), walk.job);
        if (!rows.is_mine) continue;
        s.y[rows.row] = IS_PAIR ? silu(gate * factor) * (sum * factor) : __fadd_rn(__fmul_rn(sum, factor), own);
    }
}

/* ---- The launch ---- */

struct held_kernel {
    uint32_t types, kb, riders, shared_bytes;
    bool     has_rest, is_pair;
    void   (*kernel)(held_args);
};
template <uint32_t TYPES, uint32_t KB, int AHEAD, uint32_t SPARE_BYTES, int RIDERS, bool REST, bool IS_PAIR = false>
constexpr held_kernel row() {
    typedef shape<TYPES, KB, AHEAD, SPARE_BYTES, RIDERS, REST, IS_PAIR> own;
    return { TYPES, KB, RIDERS, shared_bytes<own>(), REST, IS_PAIR, held_gemv_kernel<own> };
}
constexpr uint32_t SPARE = 9 * 512;     /* a Q4_K tile: qkv + z of Qwen3.6 are three tiles a warp */
/* The first row that fits is taken. */
const held_kernel KERNELS[] = {
    row<Q4_K, 8, 2, SPARE, 1, true>(), row<Q5_K, 8, 2, 0, 1, true>(), row<Q6_K, 8, 2, 0, 1, true>(), row<Q8_0, 8, 2, 0, 1, true>(),
    row<Q4_K | Q6_K, 8, 2, 0, 0, true>(), row<Q4_K | Q8_0, 8, 2, 0, 0, true>(),
    row<Q4_K, 8, 2, 0, 2, false, true>(), row<Q8_0, 8, 2, 0, 2, false, true>(),
    row<Q4_K, 8, 2, 0, 1, false>(), row<Q8_0, 8, 2, 0, 1, false>(),
    row<Q4_K, 16, 1, 0, 0, true>(), row<Q5_K, 16, 1, 0, 0, true>(),
    row<Q6_K, 16, 1, 0, 0, true>(), row<Q8_0, 16, 1, 0, 0, true>(),
};
constexpr uint32_t ROUNDS_MAX = 8;       /* of a warp: longer streams are better off with a deep ring */

/* One segment, or false where it is not for these kernels. */
bool add_segment(const spk_cuda_segment &s, uint32_t kb, held_args &a, uint32_t *types) {
    if (is_float(s.w.type)) {
        a.riders[a.rider_segment_count++] = { s.w.data, s.w.unit_stride_bytes, s.y, s.residual, a.rider_count, s.w.type };
        a.rider_count += (uint32_t)s.w.row_count;
        return s.up.data == nullptr;
    }
    const row_matrix m = make_row_matrix(s.w);
    if (m.piece_count != 1 || m.lanes_per_row != kb) return false;
    *types |= 1u << m.type;
    a.segments[a.segment_count++] = { m.data, s.up.data, s.y, s.residual, a.job_count, m.row_count, m.type, (uint32_t)m.unit_stride };
    a.job_count += m.unit_count;
    return true;
}

} // namespace

bool launch_held_gemv(spk_cuda *cuda, const spk_cuda_gemv *args) {
    const uint32_t kb = args->source.count / 256;
    if (args->greedy != nullptr || args->is_streamed || args->source.count % 256 != 0) return false;
    held_args a = {};
    a.source = args->source;
    a.inputs_ready = args->inputs_ready;
    uint32_t types = 0;
    for (uint32_t i = 0; i < args->segment_count; i++)
        if (!add_segment(args->segments[i], kb, a, &types)) return false;
    const bool is_pair = a.segment_count == 0 || a.segments[0].up != nullptr;
    for (uint32_t i = 0; i < a.segment_count; i++)
        if ((a.segments[i].up != nullptr) != is_pair || (is_pair && i > 0)) return false;
    for (const held_kernel &k : KERNELS) {
        if ((types & ~k.types) != 0 || kb != k.kb || (args->source.has_rest != 0) != k.has_rest || is_pair != k.is_pair) continue;
        if (a.rider_count > k.riders * cuda->sm_count || a.job_count > ROUNDS_MAX * WARPS * cuda->sm_count) continue;
        launch(cuda, k.kernel, std::min(cuda->sm_count, std::max(a.job_count, a.rider_count)), 32 * WARPS, k.shared_bytes, a, "gemv, held");
        return true;
    }
    return false;
}

} // namespace spk
