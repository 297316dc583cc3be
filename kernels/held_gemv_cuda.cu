/* kernels/held_gemv_cuda.cu - matrix times vector for one token, tiles held in shared memory when the vector comes.
 *
 * Maths      as gemv_cuda.cu, of which this is the short form: rows one tile wide, tiles of one matrix type or a set of types,
 *            up to two rows of floats a CTA that ride along
 * Bytes      qkv + z of Qwen3.6 in Q4_K, 12288 rows of 2048: 14.2 MB; its output projection, 2048 rows of 4096: 4.7 MB
 * Launch     one CTA an SM, of 8 to 16 warps; as many threads as there are eights in x prepare it.  A warp's first one or two tiles are
 *            on their way before chain_wait; later ones are asked for when those are done.  Into the mixers, four warps' at a time:
 *            with all 14 MB under way, what the kernel before reads from L2 takes 1.4 us instead of 0.5 (NOTES.md #29)
 *            Out of the mixers, a CTA takes 16 neighbouring rows and then adds what they contribute to the router (router_cuda.cuh), whose
 *            weights of these columns, 16 KiB of Qwen3.6, are in shared memory by then
 * Resources  about half of an SM's registers; 11 or 20 KiB of shared memory, and the tiles of each warp
 * Reference  gemv_cuda.cu: the same bits (tests/checkkern compares both with spk_kernels.matmul)
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/held_cuda.cuh"
#include "kernels/held_launch_cuda.cuh"
#include "kernels/router_cuda.cuh"
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
constexpr uint32_t HELD_WARPS_MAX = 16;
struct held_args {
    spk_cuda_source source;
    held_segment    segments[SPK_CUDA_SEGMENT_MAX];
    rider_segment   riders[SPK_CUDA_SEGMENT_MAX];
    uint32_t        segment_count, rider_segment_count, job_count, rider_count;
    uint32_t        slots_at[HELD_WARPS_MAX];        /* of each warp, from the first on: a warp takes what its own jobs need */
    spk_cuda_router router;
    uint32_t        has_router, router_at;           /* at: of router_part in dynamic shared memory */
};

__device__ __forceinline__ const held_segment &segment_of(const held_args &a, uint32_t job) {
    uint32_t owner = 0;
#pragma unroll
    for (uint32_t i = 1; i < SPK_CUDA_SEGMENT_MAX; i++)
        if (i < a.segment_count && job >= a.segments[i].first_job) owner = i;
    return a.segments[owner];
}
__device__ __forceinline__ const uint8_t *tile_of(const held_segment &s, const uint8_t *tiles, uint32_t job) {
    return tiles + (uint64_t)(job - s.first_job) * s.stride_bytes;
}

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

/* What a warp does at a time: one tile; two jobs' tiles; or gate and up of a job. */
enum work { ONE_JOB, TWO_JOBS, PAIR };

/* ---- The router's part of 16 rows of y ---- */

/* In dynamic shared memory, at a.router_at: those rows; the barrier of the copy; the router's weights of these columns.  Half of the warps have
 * two rows each, the others none, and the last of those asks for the weights. */
struct router_part {
    float4   values[ROUTER_GROUP / 4];
    uint64_t barrier, align;
    __device__ __forceinline__ float4 *weights() { return (float4 *)(this + 1); }
    __device__ __forceinline__ tile_slots copy() { return { (uint8_t *)weights(), &barrier }; }
};
constexpr uint32_t ROUTER_WARPS = ROUTER_GROUP / 2;
__device__ __forceinline__ router_part &router_part_of(const held_args &a) { return *(router_part *)(ptx::dynamic_shared() + a.router_at); }
__device__ __forceinline__ bool copies_router() { return threadIdx.x / 32 == blockDim.x / 32 - 1; }
__device__ __forceinline__ void load_router(const held_args &a) {
    if (!copies_router()) return;
    const tile_slots copy = router_part_of(a).copy();
    const uint32_t bytes = router_group_bytes(a.router.row_count);
    copy.begin();
    copy.fill((const uint8_t *)a.router.weights + (uint64_t)blockIdx.x * bytes, bytes);
}
/* All threads, when the CTA's rows are stored.  Those that had none come first: they need no more than the barrier. */
__device__ __forceinline__ void add_router(const held_args &a) {
    router_part &part = router_part_of(a);
    if (copies_router()) part.copy().wait(0);
    __syncthreads();
    const uint32_t first = 32 * ROUTER_WARPS, place = threadIdx.x >= first ? threadIdx.x - first : threadIdx.x + blockDim.x - first;
    for (uint32_t row = place; row < a.router.row_count; row += blockDim.x) router_add(a.router, row, part.weights(), part.values);
    if (threadIdx.x == first - 1) router_square(a.router, blockIdx.x, part.values);
}

/* Shape of a kernel: tile types (a set), super-blocks a row, warps, their work, rows of floats a CTA takes along, whether x has a rest,
 * registers. */
template <uint32_t TYPES_, uint32_t KB_, uint32_t WARPS_, work WORK_, int RIDERS_, bool REST_, uint32_t REGISTERS_> struct shape {
    static constexpr uint32_t TYPES = TYPES_, KB = KB_, WARPS = WARPS_, REGISTERS = REGISTERS_;
    static constexpr work WORK = WORK_;
    static constexpr int RIDERS = RIDERS_;
    static constexpr bool REST = REST_, HAS_TWO = WORK == TWO_JOBS || WORK == PAIR, IS_PAIR = WORK == PAIR;
    static constexpr bool HAS_ROUTER = KB == 16 && WORK == ONE_JOB, MAY_HAVE_PARTS = HAS_ROUTER;       /* out of the mixers; two rows a tile */
    /* A warp's first tiles are asked for when those of the warp that many before it have come; 0: at once. */
    static constexpr uint32_t BEHIND = WORK == TWO_JOBS && WARPS == 12 ? 4 : 0;
    static constexpr uint32_t PREPARING = KB == 16 && WARPS == 16 ? 512 : 256;     /* threads that prepare x */
};

/* Dynamic shared memory: x, barriers, tiles. */
template <class S> __host__ __device__ constexpr uint32_t barriers_at() { return (int8_bytes(256 * S::KB, S::REST) + 15) / 16 * 16; }
template <class S> __host__ __device__ constexpr uint32_t tiles_at() { return (barriers_at<S>() + S::WARPS * (uint32_t)sizeof(uint64_t) + 127) / 128 * 128; }

/* A warp's tiles of a round. */
template <class S> struct tile_round {
    const held_args &a;
    uint32_t         job, index;         /* index: of the round */
    uint32_t         type[2];
    __device__ __forceinline__ static uint32_t step() { return gridDim.x * S::WARPS; }
    /* Found again each time, as addresses would take registers meanwhile. */
    __device__ __forceinline__ tile_slots slots() const { return slots_of(threadIdx.x / 32); }
    __device__ __forceinline__ tile_slots slots_of(uint32_t warp) const {
        return { ptx::dynamic_shared() + tiles_at<S>() + a.slots_at[warp], (uint64_t *)(ptx::dynamic_shared() + barriers_at<S>()) + warp };
    }
    __device__ __forceinline__ void begin() {
        job = blockIdx.x + gridDim.x * (threadIdx.x / 32);
        if (S::HAS_ROUTER && a.has_router) job = threadIdx.x / 32 < ROUTER_WARPS ? blockIdx.x * ROUTER_WARPS + threadIdx.x / 32 : a.job_count;
        index = 0;
        slots().begin();
        if constexpr (S::BEHIND > 0) {
            __syncthreads();             /* all barriers are set up */
            const uint32_t warp = threadIdx.x / 32;
            if (warp >= S::BEHIND && is_there()) slots_of(warp - S::BEHIND).wait(0);
        }
        load();
    }
    __device__ __forceinline__ bool is_there() const { return job < a.job_count; }
    __device__ __forceinline__ bool has_two() const { return S::WORK == PAIR || (S::WORK == TWO_JOBS && job + step() < a.job_count); }
    __device__ __forceinline__ void load() {
        if (!is_there()) return;
        const held_segment &s = segment_of(a, job);
        const uint8_t *const first = tile_of(s, s.tiles, job);
        type[0] = s.type;
        if (!has_two()) {
            slots().fill(first, tile_bytes_of(s.type));
            return;
        }
        const uint32_t other = S::IS_PAIR ? job : job + step();
        const held_segment &o = S::IS_PAIR ? s : segment_of(a, other);
        type[1] = o.type;
        slots().fill(first, tile_bytes_of(s.type), tile_of(o, S::IS_PAIR ? o.up : o.tiles, other), tile_bytes_of(o.type));
    }
    __device__ __forceinline__ void dot(const input_vector &v, float sums[2]) const {
        const uint32_t kb = threadIdx.x % S::KB;
        const tile_slots own = slots();
        own.wait(index);
        const shared_tile first = own.tile(0);
        sums[0] = sums[1] = 0.0f;
        if (!has_two()) {
            sums[0] = dot_tile<S::REST, S::TYPES>(type[0], first, v, kb);
        } else {
            const shared_tile second = own.tile(tile_bytes_of(type[0]));
            if (type_is<S::TYPES>(SPK_TYPE_Q4_K, type[0]) && type_is<S::TYPES>(SPK_TYPE_Q4_K, type[1])) {
                dot_q45_k<2, S::REST, false>(pair_of(first, second), v, kb, sums);
            } else if (type_is<S::TYPES>(SPK_TYPE_Q5_K, type[0]) && type_is<S::TYPES>(SPK_TYPE_Q5_K, type[1])) {
                dot_q45_k<2, S::REST, true>(pair_of(first, second), v, kb, sums);
            } else {
                sums[0] = dot_tile<S::REST, S::TYPES>(type[0], first, v, kb);
                sums[1] = dot_tile<S::REST, S::TYPES>(type[1], second, v, kb);
            }
            sums[1] = lanes_sum_of<S::KB>(sums[1]);
        }
        sums[0] = lanes_sum_of<S::KB>(sums[0]);
    }
    __device__ __forceinline__ void next() {
        job += (S::WORK == TWO_JOBS ? 2 : 1) * step();
        index++;
        __syncwarp();                    /* all lanes have read what is copied over now */
        load();
    }
};

template <class S> __device__ __forceinline__ float residual_of(const held_segment &s, uint32_t job) {
    const job_rows<S::KB> rows(s, job);
    return s.residual != nullptr && rows.is_mine ? __ldcg(s.residual + rows.row) : 0.0f;
}
/* What is added to a job's rows, asked for with x where a warp has one tile: with two, registers are short and it is rarely used. */
template <class S> __device__ __forceinline__ float residual_ahead(const held_args &a, uint32_t job) {
    return S::HAS_TWO || job >= a.job_count ? 0.0f : residual_of<S>(segment_of(a, job), job);
}
template <class S> __device__ __forceinline__ void put(const held_args &a, uint32_t job, float sum, float factor, float ahead) {
    const held_segment &s = segment_of(a, job);
    const job_rows<S::KB> rows(s, job);
    const float residual = S::HAS_TWO ? residual_of<S>(s, job) : ahead;
    if (!rows.is_mine) return;
    const float y = __fadd_rn(__fmul_rn(sum, factor), residual);
    s.y[rows.row] = y;
    if (!S::HAS_ROUTER || !a.has_router) return;
    ((float *)router_part_of(a).values)[rows.row % ROUTER_GROUP] = y;
}

template <class S> __device__ __forceinline__ void put_rounds(const held_args &a, tile_round<S> &round, const input_vector &v, float factor, float residual) {
#pragma unroll 1
    while (round.is_there()) {
        const uint32_t job = round.job, other = round.has_two() && !S::IS_PAIR ? job + round.step() : a.job_count;
        float sums[2];
        round.dot(v, sums);
        round.next();
        if constexpr (S::IS_PAIR) {
            const job_rows<S::KB> rows(a.segments[0], job);
            if (rows.is_mine) a.segments[0].y[rows.row] = silu(sums[0] * factor) * (sums[1] * factor);
        } else {
            put<S>(a, job, sums[0], factor, residual);
            if (other < a.job_count) put<S>(a, other, sums[1], factor, 0.0f);
            residual = residual_ahead<S>(a, round.job);
        }
    }
}

template <class S> __global__ void __maxnreg__(S::REGISTERS) held_gemv_kernel(const __grid_constant__ held_args a) {
    chain_release();
    touch_arguments(a);
    constexpr uint32_t COUNT = 256 * S::KB, PREPARING = S::PREPARING;
    constexpr int RIDERS = S::RIDERS, EIGHTS = COUNT / PREPARING / 8;
    const input_vector v = carve_int8(ptx::dynamic_shared(), COUNT, S::REST);
    const uint32_t part_count = S::MAY_HAVE_PARTS ? parts_of(a.source) : 1;     /* asked for before the tiles, or it comes after them */
    eight riders[RIDERS > 0 ? RIDERS : 1], norm[EIGHTS];
    load_riders<RIDERS>(a, COUNT, riders);
#pragma unroll
    for (int e = 0; e < EIGHTS; e++)
        norm[e] = a.source.norm_weight != nullptr && threadIdx.x < PREPARING ? load_eight(a.source.norm_weight + (threadIdx.x + e * PREPARING) * 8) : zero_eight();
    tile_round<S> round = { a };
    round.begin();
    if (S::HAS_ROUTER && a.has_router) load_router(a);
    chain_wait();
    float residual = residual_ahead<S>(a, round.job);
    const float factor = prepare_held<COUNT, EIGHTS, RIDERS, S::MAY_HAVE_PARTS>(a.source, v, norm, riders, blockIdx.x == 0, nothing(), part_count);
    if constexpr (RIDERS > 0) put_riders<RIDERS>(a, v, factor);
    put_rounds(a, round, v, factor, residual);
    if (S::HAS_ROUTER && a.has_router) add_router(a);
}

/* ---- The launch ---- */

struct held_kernel {
    uint32_t types, kb, warps, jobs, riders;     /* jobs: a CTA's at most */
    uint32_t tiles_at;                           /* in shared memory */
    bool     has_two, has_rest, is_pair;         /* has_two: tiles a warp at a time */
    void   (*kernel)(held_args);
};
constexpr uint32_t ROUNDS_MAX = 8;       /* of a warp: longer streams are better off with a deep ring */
template <uint32_t TYPES, uint32_t KB, uint32_t WARPS, work WORK, int RIDERS, bool REST, uint32_t REGISTERS> constexpr held_kernel row() {
    typedef shape<TYPES, KB, WARPS, WORK, RIDERS, REST, REGISTERS> own;
    return { TYPES, KB, WARPS, ROUNDS_MAX * WARPS, RIDERS, tiles_at<own>(),
             own::HAS_TWO, REST, own::IS_PAIR, held_gemv_kernel<own> };
}
/* Registers: a quarter of an SM has 16384, and what runs beside a kernel takes half of them. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr uint32_t FOUR = 128, THREE = 168, TWO = 255;   /* warps a quarter; only sm_90 needs them to fit beside each other */
#else
constexpr uint32_t FOUR = 72, THREE = 80, TWO = 128;
#endif
/* The first row that fits is taken. */
const held_kernel KERNELS[] = {
    /* into the mixers */
    row<Q4_K, 8, 12, TWO_JOBS, 1, true, THREE>(), row<Q5_K, 8, 8, TWO_JOBS, 1, true, TWO>(), row<Q6_K, 8, 8, TWO_JOBS, 1, true, TWO>(),
    row<Q8_0, 8, 8, TWO_JOBS, 1, true, TWO>(), row<Q4_K | Q6_K, 8, 12, TWO_JOBS, 0, true, THREE>(), row<Q4_K | Q8_0, 8, 12, TWO_JOBS, 0, true, THREE>(),
    /* gate and up of a shared expert or a dense layer, together and alone */
    row<Q4_K, 8, 8, PAIR, 0, false, TWO>(), row<Q8_0, 8, 8, PAIR, 0, false, TWO>(),
    row<Q4_K, 8, 8, TWO_JOBS, 0, false, TWO>(), row<Q8_0, 8, 8, TWO_JOBS, 0, false, TWO>(),
    /* out of the mixers */
    row<Q4_K, 16, 16, ONE_JOB, 0, true, FOUR>(), row<Q5_K, 16, 16, ONE_JOB, 0, true, FOUR>(),
    row<Q6_K, 16, 16, ONE_JOB, 0, true, FOUR>(), row<Q8_0, 16, 16, ONE_JOB, 0, true, FOUR>(),
};

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

uint32_t tile_bytes_at(const held_args &a, uint32_t job) {
    uint32_t owner = 0;
    while (owner + 1 < a.segment_count && job >= a.segments[owner + 1].first_job) owner++;
    return job < a.job_count ? tile_bytes_of(a.segments[owner].type) : 0;
}
/* Where each warp's tiles begin: as far apart as its largest round in any CTA.  Returns the bytes of all. */
uint32_t place_slots(held_args &a, const held_kernel &k, uint32_t cta_count) {
    const uint32_t step = cta_count * k.warps;
    uint32_t at = 0;
    if (a.has_router) {
        const uint32_t bytes = (tile_bytes_of(a.segments[0].type) + 127) / 128 * 128;
        for (uint32_t warp = 0; warp < ROUTER_WARPS; warp++) a.slots_at[warp] = warp * bytes;
        return ROUTER_WARPS * bytes;
    }
    for (uint32_t warp = 0; warp < k.warps; warp++) {
        uint32_t most = 0;
        for (uint32_t cta = 0; cta < cta_count; cta++)
            for (uint32_t job = cta + cta_count * warp; job < a.job_count; job += (k.has_two && !k.is_pair ? 2 : 1) * step)
                most = std::max(most, tile_bytes_at(a, job) + (!k.has_two ? 0 : k.is_pair ? tile_bytes_at(a, job) : tile_bytes_at(a, job + step)));
        a.slots_at[warp] = at;
        at += (most + 127) / 128 * 128;
    }
    return at;
}

} // namespace

bool launch_held_gemv(spk_cuda *cuda, const spk_cuda_gemv *args) {
    const uint32_t kb = args->source.count / 256;
    if (args->greedy != nullptr || args->is_streamed || args->source.count % 256 != 0 || (args->source.part_totals != nullptr && kb != 16)) return false;
    held_args a = {};
    a.source = args->source;
    a.router = args->router;
    uint32_t types = 0;
    for (uint32_t i = 0; i < args->segment_count; i++)
        if (!add_segment(args->segments[i], kb, a, &types)) return false;
    const bool is_pair = a.segment_count == 0 || a.segments[0].up != nullptr;
    for (uint32_t i = 0; i < a.segment_count; i++)
        if ((a.segments[i].up != nullptr) != is_pair || (is_pair && i > 0)) return false;
    if (args->router.sums != nullptr) {
        if (kb != 16 || a.segment_count != 1 || is_pair || args->segments[0].w.row_count % ROUTER_GROUP != 0) return false;
        a.has_router = true;
    }
    for (const held_kernel &k : KERNELS) {
        if ((types & ~k.types) != 0 || kb != k.kb || (args->source.has_rest != 0) != k.has_rest || is_pair != k.is_pair) continue;
        if (a.rider_count > k.riders * cuda->sm_count || a.job_count > k.jobs * cuda->sm_count) continue;
        const uint32_t ctas = a.has_router ? a.job_count / ROUTER_WARPS : std::min(cuda->sm_count, std::max(a.job_count, a.rider_count));
        uint32_t shared_bytes = k.tiles_at + place_slots(a, k, ctas);
        if (a.has_router) {
            a.router_at = shared_bytes;
            shared_bytes += (uint32_t)sizeof(router_part) + router_group_bytes(a.router.row_count);
        }
        if (k.has_rest && k.has_two) shared_bytes = std::max(shared_bytes, cuda->shared_alone_bytes);     /* into the mixers */
        if (shared_bytes > cuda->shared_max_bytes) continue;
        launch(cuda, k.kernel, ctas, 32 * k.warps, shared_bytes, a, "gemv, held");
        return true;
    }
    return false;
}

} // namespace spk
