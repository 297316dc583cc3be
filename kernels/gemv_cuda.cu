/* kernels/gemv_cuda.cu - matrix times vector for one token, up to four matrices in one launch.
 *
 * Maths      y = W x, or y = silu(W x) * (U x); x is prepared by every CTA (input_cuda.cuh)
 * Bytes      the weights once; x from L2 for every CTA: 132 * 4 * count.  qkv + z of Qwen3.6 in Q4_K:
 *            12288 rows of 2048 = 14.2 MB
 * Launch     one CTA of 12 warps an SM, which takes either tiles or float rows: their vectors differ.  A warp's job is one or
 *            two row groups, or gate and up; its first stages are in flight before chain_wait.  A few
 *            float rows (a router, GDN's alpha and beta) ride along while x is prepared.
 * Resources  about half of an SM's shared memory, unless a stream is long
 * Reference  spk_kernels.matmul; tolerances in input_cuda.cuh and tile_cuda.cuh, plus k/p + log2 p additions a row
 */
#include <assert.h>

#include "kernels/backend_cuda.cuh"
#include "kernels/choice_cuda.cuh"
#include "kernels/held_launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace spk {
namespace {

constexpr uint32_t WARPS = 12, THREADS = 32 * WARPS;

struct segment {
    row_matrix w;
    const uint8_t *up;       /* of the same shape; NULL: a plain product */
    float     *y;
    const float *residual;
    uint32_t   first_job;    /* among the jobs of its kind */
};

struct gemv_args {
    spk_cuda_source source;
    segment         segments[SPK_CUDA_SEGMENT_MAX];   /* tiles, then floats, then floats that ride */
    uint32_t        tile_segments, float_segments, segment_count;   /* float_segments: end of those with jobs */
    uint32_t        tile_ctas, tile_jobs, float_jobs;
    uint32_t        units_per_job;                    /* of plain tile segments: 1 to TILES_MAX */
    uint32_t        stage_bytes, stage_count, warps;  /* warps: that take jobs; the ring is theirs */
    uint32_t        rider_count, rider_bytes;         /* rows that ride along; bytes of a CTA's */
    const float    *best_of;                          /* y of the segment whose largest output ends a greedy step, or NULL */
    spk_cuda_sequence   sequence;
    unsigned long long *best;
    uint32_t           *arrivals;
    bool                is_long;                      /* a stream of many rounds */
};

/* The jobs of one warp.  Neighbouring jobs go to different CTAs, so that all have as many, or in a long stream to neighbouring warps, which
 * reads memory 4 % faster where tiles are no multiple of 128 bytes. */
struct gemv_jobs {
    const gemv_args &a;
    uint32_t first, first_segment, last_segment;
    bool     is_tile;
    float    factor;
    float   *residual;                   /* shared: [TILES_MAX][32 lanes], for the rows of the job at hand */
    unsigned long long *best;            /* shared: largest key of the CTA, of a greedy end */

    __device__ __forceinline__ gemv_jobs(const gemv_args &args, bool tiles, float *warp_residual, unsigned long long *cta_best)
        : a(args), is_tile(tiles), factor(1.0f), residual(warp_residual), best(cta_best) {
        const uint32_t cta = is_tile ? blockIdx.x : blockIdx.x - a.tile_ctas, warp = threadIdx.x >> 5;
        first = warp >= a.warps ? end() : a.is_long ? cta * a.warps + warp : cta + ctas() * warp;
        first_segment = is_tile ? 0 : a.tile_segments;
        last_segment = (is_tile ? a.tile_segments : a.float_segments) - 1;
    }
    __device__ __forceinline__ uint32_t ctas() const { return is_tile ? a.tile_ctas : gridDim.x - a.tile_ctas; }
    __device__ __forceinline__ uint32_t step() const { return ctas() * a.warps; }
    __device__ __forceinline__ uint32_t end() const { return is_tile ? a.tile_jobs : a.float_jobs; }
    __device__ __forceinline__ job at(uint32_t index) const {
        uint32_t owner = first_segment;
        while (owner < last_segment && index >= a.segments[owner + 1].first_job) owner++;
        const segment &s = a.segments[owner];
        if (is_float(s.w.type) || s.up != nullptr) return { owner, index - s.first_job, s.up != nullptr ? 2u : 1u };
        const uint32_t unit = (index - s.first_job) * a.units_per_job;
        return { owner, unit, min(a.units_per_job, s.w.unit_count - unit) };
    }
    __device__ __forceinline__ const row_matrix &shape(const job &j) const { return a.segments[j.owner].w; }
    __device__ __forceinline__ const uint8_t *first_unit(const job &j) const { return shape(j).unit(j.unit); }
    __device__ __forceinline__ int64_t apart(const job &j) const {
        const segment &s = a.segments[j.owner];
        return s.up != nullptr ? s.up - s.w.data : (int64_t)s.w.unit_stride;
    }
    /* Residuals are on their way to shared memory while the products are made. */
    __device__ __forceinline__ void prepare(const job &j) const {
        const segment &s = a.segments[j.owner];
        const uint32_t lane = threadIdx.x & 31;
        if (s.residual == nullptr || !s.w.leads(lane)) return;
#pragma unroll 1
        for (uint32_t i = 0; i < j.count; i++) {
            const uint32_t row = s.w.row(j.unit + i, lane);
            if (row < s.w.row_count) ptx::cp_async_4(ptx::shared_address(residual + 32 * i + lane), s.residual + row);
        }
    }
    __device__ __forceinline__ void put(const job &j, const float sums[TILES_MAX]) const {
        const segment &s = a.segments[j.owner];
        const uint32_t lane = threadIdx.x & 31;
        if (!s.w.leads(lane)) return;
        if (s.up != nullptr) {
            put_row(s, s.w.row(j.unit, lane), silu(sums[0] * factor) * (sums[1] * factor));
            return;
        }
        if (s.residual != nullptr) ptx::cp_async_wait_all();
#pragma unroll
        for (uint32_t i = 0; i < TILES_MAX; i++)
            if (i < j.count) put_row(s, s.w.row(j.unit + i, lane), __fadd_rn(__fmul_rn(sums[i], factor), s.residual != nullptr ? residual[32 * i + lane] : 0.0f));
    }
    __device__ __forceinline__ void put_row(const segment &s, uint32_t row, float value) const {
        if (row >= s.w.row_count) return;
        s.y[row] = value;
        if (s.y == a.best_of && value == value) atomicMax(best, order_key(value + 0.0f, row));   /* both zeros tie */
    }
};

/* Rows of float segments as riders: row b of all of them and row b + CTAs ride in CTA b. */
struct rider_row {
    const segment *s;
    uint32_t       row;
    __device__ __forceinline__ rider_row(const gemv_args &a, uint32_t index) {
        uint32_t owner = a.float_segments;
        while (owner + 1 < a.segment_count && index >= a.segments[owner + 1].first_job) owner++;
        s = &a.segments[owner];
        row = index - s->first_job;
    }
};
__device__ __forceinline__ void load_riders(const gemv_args &a, float_riders &riders) {
    riders.is_f32 = riders.is_bf16 = riders.count = 0;
#pragma unroll 1
    for (uint32_t index = blockIdx.x; index < a.rider_count; index += gridDim.x) {
        const rider_row rider(a, index);
        riders.load(riders.count++, rider.s->w.unit(rider.row), rider.s->w.type, a.source.count);
    }
}
/* By warp r, from the sums that prepare_input left. */
__device__ __forceinline__ void put_riders(const gemv_args &a, const input_vector &v, float factor) {
    const uint32_t warp = threadIdx.x >> 5, index = blockIdx.x + warp * gridDim.x;
    if (warp >= RIDERS_MAX || index >= a.rider_count) return;
    const rider_row rider(a, index);
    const float residual = rider.s->residual != nullptr ? __ldcg(rider.s->residual + rider.row) : 0.0f;
    const float sum = sum_chunks(v.chunk_sums + (warp + 1) * v.k, v.k);
    if ((threadIdx.x & 31) == 0) rider.s->y[rider.row] = __fadd_rn(__fmul_rn(sum, factor), residual);
}

/* Dynamic shared memory: the vector, then the ring. */
__global__ void __launch_bounds__(THREADS, 1) gemv_kernel(const __grid_constant__ gemv_args a) {
    chain_release();
    touch_arguments(a);
    SPK_DYNAMIC_SHARED(memory);
    __shared__ uint64_t barriers[WARPS * RING_STAGES_MAX];
    const bool is_tile = blockIdx.x < a.tile_ctas, has_rest = a.source.has_rest != 0;
    const uint32_t count = a.source.count;
    const input_vector v = is_tile ? carve_int8(memory, count, has_rest) : carve_f32(memory, count);
    const uint32_t vector_bytes = (is_tile ? int8_bytes(count, has_rest) : f32_bytes(count)) + 127;
    __shared__ unsigned long long best;
    if (threadIdx.x == 0) best = 0;      /* before the barrier that ends prepare_input */
    __shared__ float residual[WARPS][TILES_MAX * 32];
    gemv_jobs jobs(a, is_tile, residual[threadIdx.x >> 5], &best);
    warp_ring ring;
    ring.begin(memory + vector_bytes / 128 * 128 + a.rider_bytes, barriers, a.stage_bytes, a.stage_count);
    __shared__ float kept[WARPS][TILES_MAX * 32];
    job_stream<gemv_jobs> stream(jobs, ring, kept[threadIdx.x >> 5]);
    stream.start();
    float_riders riders;
    riders.memory = memory + vector_bytes / 128 * 128;
    load_riders(a, riders);
    norm_prefetch norm;
    norm.load(a.source);
    chain_wait();
    jobs.factor = prepare_input(a.source, v, norm, riders, blockIdx.x == 0);
    put_riders(a, v, jobs.factor);
    stream.run(v);
    if (a.best_of != nullptr) finish_greedy(a.sequence, a.best, a.arrivals, &best);
}

/* ---- The launch ---- */

struct shape {               /* of one kind of segments: tiles or floats */
    uint32_t jobs, stage_bytes;
    uint64_t job_bytes;
};
shape shape_of(const gemv_args &a, uint32_t begin, uint32_t end, uint32_t units_per_job) {
    shape s = {};
    for (uint32_t i = begin; i < end; i++) {
        const segment &g = a.segments[i];
        const uint32_t units = is_float(g.w.type) || g.up != nullptr ? 1 : units_per_job, pieces = g.up != nullptr ? 2 : units;
        s.jobs += (g.w.unit_count + units - 1) / units;
        s.stage_bytes = std::max(s.stage_bytes, pieces * g.w.piece_bytes);
        s.job_bytes = std::max(s.job_bytes, (uint64_t)pieces * g.w.piece_bytes * g.w.piece_count);
    }
    return s;
}
uint32_t rounds_of(uint32_t jobs, uint32_t ctas) { return (jobs + ctas * WARPS - 1) / (ctas * WARPS); }

/* Warps of a CTA that have a job: the first ones. */
uint32_t ring_warps(const shape &s, uint32_t ctas) { return s.jobs == 0 ? 0 : std::min(WARPS, (s.jobs + ctas - 1) / ctas); }

/* CTAs for tiles: what makes the slower kind's rounds of warps shortest, then its bytes. */
uint32_t split_ctas(const shape &tiles, const shape &floats, uint32_t cta_count) {
    if (floats.jobs == 0) return std::min(cta_count, tiles.jobs);
    if (tiles.jobs == 0) return 0;
    uint32_t best = 1;
    uint64_t least[2] = { UINT64_MAX, UINT64_MAX };
    for (uint32_t n = 1; n < cta_count; n++) {
        const uint64_t rounds = std::max(rounds_of(tiles.jobs, n) * tiles.job_bytes, rounds_of(floats.jobs, cta_count - n) * floats.job_bytes);
        const uint64_t bytes = std::max((tiles.jobs + n - 1) / n * tiles.job_bytes, (floats.jobs + cta_count - n - 1) / (cta_count - n) * floats.job_bytes);
        if (rounds > least[0] || (rounds == least[0] && bytes >= least[1])) continue;
        least[0] = rounds;
        least[1] = bytes;
        best = n;
    }
    return best;
}

/* A matrix of few float rows rides in the CTAs of the launch, two rows each at most, where one pass prepares x.  The
 * sums are those that float jobs make, in the same order. */
bool rides(const spk_cuda *cuda, const spk_cuda_gemv *args, const spk_cuda_segment &s) {
    static_assert(RIDERS_MAX >= 2 * SPK_CUDA_SEGMENT_MAX && RIDERS_MAX <= WARPS, "a CTA's riders");
    return is_float(s.w.type) && s.up.data == nullptr && (args->greedy == nullptr || &s != args->segments) &&
           args->source.count <= 8 * THREADS && s.w.row_count <= 2 * cuda->sm_count;
}

void number_jobs(gemv_args &a) {
    uint32_t next = 0;
    for (uint32_t i = 0; i < a.segment_count; i++) {
        if (i == a.tile_segments || i == a.float_segments) next = 0;
        a.segments[i].first_job = next;
        next += shape_of(a, i, i + 1, a.units_per_job).jobs;
    }
}

/* Jobs, CTAs and ring: units joined where that makes one round of two; deep rings for long streams.  Returns the bytes of
 * shared memory. */
uint32_t plan(spk_cuda *cuda, gemv_args &a, uint32_t *cta_count) {
    const uint32_t vector = std::max(a.tile_segments > 0 || a.float_segments == 0 ? int8_bytes(a.source.count, a.source.has_rest) : 0,
                                     a.tile_segments < a.float_segments ? f32_bytes(a.source.count) : 0) + 128;
    const shape floats = shape_of(a, a.tile_segments, a.float_segments, 1), riders = shape_of(a, a.float_segments, a.segment_count, 1);
    shape tiles = shape_of(a, 0, a.tile_segments, 1);
    a.units_per_job = 1;
    a.rider_count = riders.jobs;
    a.rider_bytes = (riders.jobs + cuda->sm_count - 1) / cuda->sm_count * a.source.count * 4;
    a.tile_ctas = split_ctas(tiles, floats, cuda->sm_count);
    for (uint32_t units = 2; units <= TILES_MAX && tiles.jobs > 0 && rounds_of(tiles.jobs, a.tile_ctas) > 1; units++) {
        const shape joined = shape_of(a, 0, a.tile_segments, units);
        const uint32_t ctas = split_ctas(joined, floats, cuda->sm_count);
        if (rounds_of(joined.jobs, ctas) > 1 || vector + a.rider_bytes + ring_warps(joined, ctas) * joined.stage_bytes > cuda->shared_budget_bytes) continue;
        a.units_per_job = units;
        a.tile_ctas = ctas;
        tiles = joined;
    }
    a.tile_jobs = tiles.jobs;
    a.float_jobs = floats.jobs;
    if (floats.jobs == 0) a.tile_ctas = std::max(a.tile_ctas, std::min(cuda->sm_count, a.rider_count));
    *cta_count = floats.jobs == 0 ? a.tile_ctas : tiles.jobs > 0 || a.rider_count > 0 ? cuda->sm_count : std::min(cuda->sm_count, floats.jobs);
    a.stage_bytes = (std::max(tiles.stage_bytes, floats.stage_bytes) + 127) / 128 * 128;
    uint32_t wanted = 1;
    if (tiles.jobs > 0) wanted = std::max(wanted, rounds_of(tiles.jobs, a.tile_ctas) * a.segments[0].w.piece_count);
    for (uint32_t i = a.tile_segments; i < a.float_segments; i++)
        wanted = std::max(wanted, rounds_of(floats.jobs, *cta_count - a.tile_ctas) * a.segments[i].w.piece_count);
    a.is_long = wanted > 8;
    const uint32_t budget = a.is_long ? cuda->shared_long_bytes : cuda->shared_budget_bytes;
    a.stage_count = std::min(wanted, RING_STAGES_MAX);
    const uint32_t fixed = vector + a.rider_bytes;
    a.warps = std::max({ 1u, ring_warps(tiles, a.tile_ctas), ring_warps(floats, *cta_count - a.tile_ctas) });
    while (a.stage_count > 1 && fixed + a.warps * a.stage_count * a.stage_bytes > budget) a.stage_count--;
    while (a.warps > 1 && fixed + a.warps * a.stage_bytes > cuda->shared_long_bytes) a.warps--;      /* GPUs with 100 KB an SM */
    number_jobs(a);
    return fixed + a.warps * a.stage_count * a.stage_bytes;
}

} // namespace
} // namespace spk

void spk_cuda_launch_gemv(spk_cuda *cuda, const spk_cuda_gemv *args) {
    using namespace spk;
    if (launch_held_gemv(cuda, args) || launch_long_gemv(cuda, args)) return;
    gemv_args a = {};
    a.source = args->source;
    uint32_t *const ends[3] = { &a.tile_segments, &a.float_segments, &a.segment_count };
    uint32_t count = 0;
    for (uint32_t kind = 0; kind < 3; kind++) {          /* tiles, floats, riders */
        for (uint32_t i = 0; i < args->segment_count; i++) {
            const spk_cuda_segment &s = args->segments[i];
            assert(s.up.data == nullptr || (s.up.type == s.w.type && s.up.layout == s.w.layout && s.up.row_count == s.w.row_count));
            const uint32_t own = !is_float(s.w.type) ? 0 : rides(cuda, args, s) ? 2 : 1;
            if (own == kind) a.segments[count++] = { make_row_matrix(s.w), s.up.data, s.y, s.residual, 0 };
        }
        *ends[kind] = count;
    }
    if (args->greedy != nullptr) {
        a.best_of = args->segments[0].y;
        a.sequence = *args->greedy;
        a.best = args->d_best;
        a.arrivals = args->d_arrivals;
    }
    uint32_t cta_count = 0;
    const uint32_t shared_bytes = plan(cuda, a, &cta_count);
    launch(cuda, gemv_kernel, cta_count, THREADS, shared_bytes, a, "gemv");
    if (args->router.sums != nullptr) spk_cuda_launch_router(cuda, &args->router, args->segments[0].y);
}
