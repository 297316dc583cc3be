/* kernels/experts_cuda.cu - routed experts of one token: selection, gate and up, weighted down.
 *
 * Maths      up: h[r] = silu(G_e x) * (U_e x), e the r-th of the chosen;
 *            down: routed = sum_r weight_r D_e h[r], shared = sigmoid(g) S h_shared
 * Bytes      Qwen3.6, Q4_K gate and up, Q5_K down: 9.4 MB and 5.8 MB a layer, plus 0.6 MB of the shared expert
 * Launch     up: a warp takes a gate and an up tile; weights are asked for as soon as the choice is known.
 *            down: selects for itself when a signal says that the router's sums are there, so that all its weights are in flight while up
 *            still runs.  A CTA takes one row group of all ranks of its part and of the shared expert, a warp one tile of one rank
 *            with its own piece of h; the CTA adds
 *            the tiles and then the ranks in order: no atomics on floats, so the same token twice gives the same bits
 * Reference  spk_kernels.top_k, matmul, swiglu, add_scaled; tolerances in input_cuda.cuh and tile_cuda.cuh
 */
#include <assert.h>

#include "kernels/backend_cuda.cuh"
#include "kernels/held_launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"
#include "kernels/select_cuda.cuh"

namespace spk {
namespace {

constexpr uint32_t WARPS = 12, THREADS = 32 * WARPS;
constexpr uint32_t DOWN_WARPS = 10, DOWN_THREADS = 32 * DOWN_WARPS;   /* eight ranks and the shared expert at once */

__global__ void __launch_bounds__(THREADS) top_k_kernel(const __grid_constant__ spk_cuda_top_k a) {
    chain_release();
    SPK_DYNAMIC_SHARED(memory);
    __shared__ chosen_experts chosen;
    chain_wait();
    const uint32_t used = a.routing.used_count;
    select_top(a.routing, (unsigned long long *)memory, chosen);
    if (threadIdx.x >= 32) return;
    weigh_chosen(used, router_scale(a.routing), chosen);
    for (uint32_t r = threadIdx.x; r < used; r += 32) {
        a.choice[r] = chosen.choice[r];
        a.weight[r] = chosen.weight[r];
    }
}

/* ---- Gate and up ---- */

struct up_args {
    spk_cuda_source  source;
    spk_cuda_routing routing;
    row_matrix       gate;
    const uint8_t   *up;             /* of gate's shape */
    uint64_t         expert_stride;
    float           *h;
    spk_cuda_signal  routed_ready;
    uint32_t         stage_bytes, stage_count, warps;   /* warps: that take jobs; the ring is theirs */
};

struct up_jobs {
    const up_args  &a;
    const uint32_t *choice;
    uint32_t        first;
    float           factor;
    __device__ __forceinline__ uint32_t step() const { return gridDim.x * a.warps; }
    __device__ __forceinline__ uint32_t end() const { return a.routing.used_count * a.gate.unit_count; }
    __device__ __forceinline__ job at(uint32_t index) const {
        const uint32_t rank = index / a.gate.unit_count;
        return { rank, index - rank * a.gate.unit_count, 2 };
    }
    __device__ __forceinline__ const row_matrix &shape(const job &) const { return a.gate; }
    __device__ __forceinline__ uint64_t offset(const job &j) const { return choice[j.owner] * a.expert_stride + j.unit * a.gate.unit_stride; }
    __device__ __forceinline__ const uint8_t *first_unit(const job &j) const { return a.gate.data + offset(j); }
    __device__ __forceinline__ int64_t apart(const job &) const { return a.up - a.gate.data; }
    __device__ __forceinline__ void prepare(const job &) const {}
    __device__ __forceinline__ void put(const job &j, const float sums[TILES_MAX]) const {
        const uint32_t lane = threadIdx.x & 31, row = a.gate.row(j.unit, lane);
        if (a.gate.leads(lane) && row < a.gate.row_count)
            a.h[(size_t)j.owner * a.gate.row_count + row] = silu(sums[0] * factor) * (sums[1] * factor);
    }
};

/* Dynamic shared memory: the vector, candidate keys, then the ring. */
__global__ void __launch_bounds__(THREADS, 1) up_kernel(const __grid_constant__ up_args a) {
    chain_release();
    touch_arguments(a);
    SPK_DYNAMIC_SHARED(memory);
    __shared__ uint64_t barriers[WARPS * RING_STAGES_MAX];
    __shared__ chosen_experts chosen;
    const uint32_t count = a.source.count;
    const bool floats = is_float(a.gate.type);
    const input_vector v = floats ? carve_f32(memory, count) : carve_int8(memory, count, false);
    const uint32_t vector = floats ? f32_bytes(count) : int8_bytes(count, false);
    const uint32_t ring_at = (vector + select_bytes(a.routing.expert_count, a.routing.used_count) + 127) / 128 * 128;
    warp_ring ring;
    ring.begin(memory + ring_at, barriers, a.stage_bytes, a.stage_count);
    norm_prefetch norm;
    norm.load(a.source);
    const float_riders none = {};
    const uint32_t warp = threadIdx.x >> 5;
    up_jobs jobs = { a, chosen.choice, warp < a.warps ? blockIdx.x + gridDim.x * warp : a.routing.used_count * a.gate.unit_count, 1.0f };
    chain_wait();
    jobs.factor = prepare_input(a.source, v, norm, none, false);
    if (a.routed_ready.d_flag != nullptr && blockIdx.x == 0 && threadIdx.x == 0) give(a.routed_ready, step_of(a.routed_ready));
    route(a.routing, (unsigned long long *)(memory + vector), chosen, false);
    __shared__ float kept[WARPS][TILES_MAX * 32];
    job_stream<up_jobs> stream(jobs, ring, kept[warp]);
    stream.start();
    stream.run(v);
}

/* ---- Down ---- */

/* One side: the routed experts, or the shared one. */
struct down_side {
    row_matrix   m;                  /* data NULL: none */
    const float *h;                  /* of the first slot; slots are column_count apart */
    uint32_t     column_count, units_per_cta;
};
struct down_args : down_ends {
    down_side routed, shared;
    uint32_t  rows_per_cta, stage_bytes, slot_bytes;
};

/* Job j of a CTA: piece (fastest), unit, slot; the shared expert's jobs come last. */
struct down_job {
    const down_side *side;
    uint32_t slot, unit, piece;
};
__device__ __forceinline__ uint32_t side_jobs(const down_side &s, uint32_t slots) { return slots * s.units_per_cta * s.m.piece_count; }
__device__ __forceinline__ down_job job_of(const down_args &a, uint32_t index, uint32_t routed_jobs) {
    down_job j;
    j.side = index < routed_jobs ? &a.routed : &a.shared;
    if (index >= routed_jobs) index -= routed_jobs;
    j.piece = index % j.side->m.piece_count;
    index /= j.side->m.piece_count;
    j.unit = index % j.side->units_per_cta;
    j.slot = index / j.side->units_per_cta;
    return j;
}

/* Rows of this CTA over its slots: tiles of a slot in order, then slots in order. */
__device__ __forceinline__ float add_slots(const down_side &s, const float *sums, uint32_t slots, uint32_t row, const float *weight) {
    const uint32_t unit = row >> (5 - s.m.row_shift), in_unit = row & (s.m.rows_per_unit() - 1);
    float total = 0.0f;
    for (uint32_t slot = 0; slot < slots; slot++) {
        float sum = 0.0f;
        for (uint32_t p = 0; p < s.m.piece_count; p++)
            sum += sums[((slot * s.units_per_cta + unit) * s.m.piece_count + p) * 32 + in_unit];
        total = weight != nullptr ? fmaf(weight[slot], sum, total) : sum;
    }
    return total;
}

/* Grid: row groups * parts.  Dynamic shared memory: candidate keys, a piece of h for each warp, the ring, sums [job][32]. */
__global__ void __launch_bounds__(DOWN_THREADS, 1) down_kernel(const __grid_constant__ down_args a) {
    chain_release();
    touch_arguments(a);
    SPK_DYNAMIC_SHARED(memory);
    __shared__ uint64_t barriers[DOWN_WARPS * RING_STAGES_MAX];
    __shared__ chosen_experts chosen;
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    const uint32_t part = blockIdx.x % a.part_count, group = blockIdx.x / a.part_count;
    const uint32_t rank0 = a.routing.used_count * part / a.part_count, ranks = a.routing.used_count * (part + 1) / a.part_count - rank0;
    const uint32_t routed_jobs = side_jobs(a.routed, ranks);
    const bool has_shared = a.shared.m.data != nullptr && part == a.part_count - 1;
    const uint32_t end = routed_jobs + (has_shared ? side_jobs(a.shared, 1) : 0);
    const uint32_t keys_bytes = (select_bytes(a.routing.expert_count, a.routing.used_count) + 127) / 128 * 128;
    uint8_t *const slots = memory + keys_bytes, *const ring_memory = slots + (size_t)warps * a.slot_bytes;
    float *const sums = (float *)(ring_memory + (size_t)warps * a.stage_bytes);
    warp_ring ring;
    ring.begin(ring_memory, barriers, a.stage_bytes, 1);
    if (a.routed_ready.d_flag == nullptr) chain_wait();
    else if (lane == 0 && warp == 0) await(a.routed_ready);
    __syncthreads();
    route(a.routing, (unsigned long long *)memory, chosen, warp == 0);
    auto fill = [&](const down_job &j) {
        const row_matrix &m = j.side->m;
        const uint32_t unit = group * j.side->units_per_cta + j.unit;
        const uint64_t offset = j.side == &a.routed ? chosen.choice[rank0 + j.slot] * a.expert_stride : 0;
        if (unit < m.unit_count) ring.fill(0, m.unit(unit) + offset + (size_t)j.piece * m.piece_stride, 0, m.size_of(j.piece), 1);
        else ring.skip();
    };
    down_job j = job_of(a, warp, routed_jobs);
    if (warp < end) fill(j);
    chain_wait();
    const float shared_logit = has_shared ? router_value(a.routing, a.routing.expert_count) * router_scale(a.routing) : 0.0f;
    const uint32_t own_row = group * a.rows_per_cta + threadIdx.x;      /* of the threads that end the CTA */
    const float residual = a.sum_out != nullptr && own_row < a.routed.m.row_count ? __ldcg(a.residual + own_row) : 0.0f;
#pragma unroll 1
    for (uint32_t index = warp; index < end; index += warps) {
        const row_matrix &m = j.side->m;
        const uint32_t columns = m.piece_columns(), from = j.piece * columns, count = min(columns, j.side->column_count - from);
        const input_vector v = is_float(m.type) ? carve_f32(slots + (size_t)warp * a.slot_bytes, columns)
                                                : carve_int8(slots + (size_t)warp * a.slot_bytes, columns, true);
        float sum[TILES_MAX] = { 0.0f };
        prepare_piece(j.side->h + (size_t)(j.side == &a.routed ? rank0 + j.slot : 0) * j.side->column_count + from, count, v);
        if (group * j.side->units_per_cta + j.unit < m.unit_count) {
            ring.wait(0);
            add_pieces(m, ring.stage(0), m.size_of(j.piece), 1, v, 0, lane, sum);
        }
        add_lanes(m, 1, sum);
        if (m.leads(lane)) sums[index * 32 + (lane >> m.row_shift)] = sum[0];
        __syncwarp();
        if (index + warps >= end) break;
        j = job_of(a, index + warps, routed_jobs);
        fill(j);
    }
    __syncthreads();
    if (threadIdx.x >= a.rows_per_cta || own_row >= a.routed.m.row_count) return;
    const float routed = add_slots(a.routed, sums, ranks, threadIdx.x, chosen.weight + rank0);
    const float shared = has_shared ? __fmul_rn(sigmoid(shared_logit), add_slots(a.shared, sums + routed_jobs * 32, 1, threadIdx.x, nullptr)) : 0.0f;
    if (a.sum_out != nullptr) {
        a.sum_out[own_row] = has_shared ? residual + routed + shared : residual + routed;
        return;
    }
    a.routed_out[part][own_row] = routed;
    if (has_shared) a.shared_out[own_row] = shared;
}

uint32_t slot_bytes_of(const row_matrix &m) {
    return ((is_float(m.type) ? f32_bytes(m.piece_columns()) : int8_bytes(m.piece_columns(), true)) + 127) / 128 * 128;
}

} // namespace
} // namespace spk

void spk_cuda_launch_top_k(spk_cuda *cuda, const spk_cuda_top_k *args) {
    spk::launch(cuda, spk::top_k_kernel, 1, spk::THREADS, spk::select_bytes(args->routing.expert_count, args->routing.used_count), *args, "top k");
}

void spk_cuda_launch_experts_up(spk_cuda *cuda, const spk_cuda_experts_up *args) {
    using namespace spk;
    assert(args->up.type == args->gate.type && args->up.layout == args->gate.layout);
    if (launch_held_experts_up(cuda, args)) return;
    if (args->shared_h != nullptr) {     /* by a kernel of its own */
        spk_cuda_gemv shared = {};
        shared.source = args->source;
        shared.segments[shared.segment_count++] = { args->shared_gate, args->shared_up, args->shared_h, nullptr };
        shared.is_streamed = args->is_streamed;
        spk_cuda_launch_gemv(cuda, &shared);
        spk_cuda_experts_up routed = *args;
        routed.shared_h = nullptr;
        spk_cuda_launch_experts_up(cuda, &routed);
        return;
    }
    up_args a = { args->source, args->routing, make_row_matrix(args->gate), args->up.data, args->expert_stride_bytes, args->h,
                  args->routed_ready, 0, 1, 1 };
    const uint32_t jobs = args->routing.used_count * a.gate.unit_count, ctas = std::min(jobs, cuda->sm_count);
    const uint32_t vector = (is_float(a.gate.type) ? f32_bytes(args->source.count) : int8_bytes(args->source.count, false)) +
                            select_bytes(args->routing.expert_count, args->routing.used_count) + 128;
    const uint32_t wanted = (jobs + ctas * WARPS - 1) / (ctas * WARPS) * a.gate.piece_count;
    a.stage_bytes = (2 * a.gate.piece_bytes + 127) / 128 * 128;
    a.stage_count = std::min(wanted, RING_STAGES_MAX);
    a.warps = std::min(WARPS, (jobs + ctas - 1) / ctas);
    while (a.stage_count > 1 && vector + a.warps * a.stage_count * a.stage_bytes > cuda->shared_budget_bytes) a.stage_count--;
    while (a.warps > 1 && vector + a.warps * a.stage_bytes > cuda->shared_long_bytes) a.warps--;
    launch(cuda, up_kernel, ctas, THREADS, vector + a.warps * a.stage_count * a.stage_bytes, a, "experts up");
}

/* Two parts where one row group a CTA would leave half of the SMs idle. */
uint32_t spk_cuda_experts_down_parts(const spk_cuda *cuda, const spk_matrix *down, uint32_t used_count) {
    return used_count > 1 && 2 * spk::make_row_matrix(*down).unit_count <= cuda->sm_count ? 2 : 1;
}

void spk_cuda_launch_experts_down(spk_cuda *cuda, const spk_cuda_experts_down *args) {
    using namespace spk;
    if (launch_held_experts_down(cuda, args)) return;
    down_args a = {};
    (down_ends &)a = down_ends_of(cuda, args);
    a.routed = { make_row_matrix(args->down), args->h, (uint32_t)args->down.col_count, 1 };
    a.shared.units_per_cta = a.shared.m.piece_count = 1;      /* of none: a warp without a job divides by them */
    if (args->shared_down.data != nullptr) a.shared = { make_row_matrix(args->shared_down), args->shared_h, (uint32_t)args->shared_down.col_count, 1 };
    /* Whole units of both matrices; rows of a unit are powers of two. */
    a.rows_per_cta = std::max(a.routed.m.rows_per_unit(), a.shared.m.data != nullptr ? a.shared.m.rows_per_unit() : 1);
    a.routed.units_per_cta = a.rows_per_cta / a.routed.m.rows_per_unit();
    a.stage_bytes = a.routed.m.piece_bytes;
    a.slot_bytes = slot_bytes_of(a.routed.m);
    uint32_t jobs = (args->routing.used_count + a.part_count - 1) / a.part_count * a.routed.units_per_cta * a.routed.m.piece_count;
    if (a.shared.m.data != nullptr) {
        a.shared.units_per_cta = a.rows_per_cta / a.shared.m.rows_per_unit();
        a.stage_bytes = std::max(a.stage_bytes, a.shared.m.piece_bytes);
        a.slot_bytes = std::max(a.slot_bytes, slot_bytes_of(a.shared.m));
        jobs += a.shared.units_per_cta * a.shared.m.piece_count;
    }
    a.stage_bytes = (a.stage_bytes + 127) / 128 * 128;
    const uint32_t keys_bytes = (select_bytes(args->routing.expert_count, args->routing.used_count) + 127) / 128 * 128;
    const uint32_t groups = (a.routed.m.row_count + a.rows_per_cta - 1) / a.rows_per_cta, fixed = keys_bytes + jobs * 128;
    uint32_t warps = std::min(jobs, DOWN_WARPS);
    while (warps > 1 && fixed + warps * (a.slot_bytes + a.stage_bytes) > cuda->shared_long_bytes) warps--;
    launch(cuda, down_kernel, groups * a.part_count, 32 * warps, fixed + warps * (a.slot_bytes + a.stage_bytes), a, "experts down");
}
