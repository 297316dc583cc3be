/* kernels/held_experts_cuda.cu - routed experts of one token, a warp's tiles at once in shared memory.
 *
 * Maths      as experts_cuda.cu, of which this is the short form: x of 2048 for gate and up; for down, h in tiles that a warp
 *            each takes, all of them at once
 * Bytes      Qwen3.6, Q4_K gate and up, Q5_K down: 9.4 MB and 5.8 MB a layer, plus 0.6 MB of the shared expert
 * Launch     up: a warp takes a gate and an up tile of one expert.  It selects for itself, only as far as its own rank, asks for
 *            its tiles, and prepares x while they come.  The shared expert's tiles are another warp's, which asks for them before the wait
 *            down: a CTA takes one row group of all ranks of its part and of the shared expert, a warp one tile.  It selects for itself,
 *            too, as soon as a signal says that the router's sums are there, so that its tiles come while up still runs; tiles and then
 *            ranks are added in order
 * Resources  at most 72 (up) and 80 (down) registers a thread for common types, since neighbours in the chain need their share of an SM
 * Reference  experts_cuda.cu: the same bits (tests/checkkern compares both with spk_kernels)
 */
#include <assert.h>

#include "kernels/backend_cuda.cuh"
#include "kernels/held_cuda.cuh"
#include "kernels/held_launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"
#include "kernels/select_cuda.cuh"

namespace spk {
namespace {

/* ---- Gate and up ---- */

constexpr uint32_t KB = 8, COUNT = 256 * KB;

struct up_args {
    spk_cuda_source  source;
    spk_cuda_routing routing;
    const uint8_t   *gate, *up;
    uint64_t         expert_stride;
    uint32_t         unit_stride, unit_count, row_count;   /* of an expert */
    float           *h;
    const uint8_t   *shared_gate, *shared_up;
    uint32_t         shared_stride, shared_units, shared_rows;
    float           *shared_h;
    spk_cuda_signal  routed_ready;
};

/* Dynamic shared memory: x, keys of the selection, barriers, tiles. */
constexpr uint32_t KEYS_AT = (int8_bytes(COUNT, false) + 15) / 16 * 16, BARRIERS_AT = KEYS_AT + WARP_KEYS_BYTES;
template <uint32_t TYPE> __device__ __forceinline__ void ask_shared(const up_args &a, const tile_slots &own, uint32_t unit) {
    const uint64_t offset = (uint64_t)unit * a.shared_stride;
    own.fill(a.shared_gate + offset, tile_bytes_of(TYPE), a.shared_up + offset, tile_bytes_of(TYPE));
}
template <uint32_t WARPS> __host__ __device__ constexpr uint32_t up_tiles_at() { return (BARRIERS_AT + WARPS * (uint32_t)sizeof(uint64_t) + 127) / 128 * 128; }

/* Gate and up of four rows; h, where the lane has a row. */
template <uint32_t TYPE> __device__ __forceinline__ void put_pair(const tile_slots &own, const input_vector &v, float factor, uint32_t unit, uint32_t row_count, float *h) {
    const uint32_t lane = threadIdx.x & 31, row = unit * (32 / KB) + lane / KB;
    float sums[2] = { 0.0f, 0.0f };
    if constexpr (TYPE == SPK_TYPE_Q4_K || TYPE == SPK_TYPE_Q5_K) {
        dot_q45_k<2, false, TYPE == SPK_TYPE_Q5_K>(pair_of(own.tile(0), own.tile(tile_bytes_of(TYPE))), v, lane % KB, sums);
    } else {
        sums[0] = dot_tile<false, 1u << TYPE>(TYPE, own.tile(0), v, lane % KB);
        sums[1] = dot_tile<false, 1u << TYPE>(TYPE, own.tile(tile_bytes_of(TYPE)), v, lane % KB);
    }
    const float g = lanes_sum_of<KB>(sums[0]), u = lanes_sum_of<KB>(sums[1]);
    if (lane % KB == 0 && row < row_count) h[row] = silu(g * factor) * (u * factor);
}

/* Registers of a thread: with three warps in a quarter of an SM, room for four of the output projection's, which have 72, or three of
 * down's. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define UP_REGISTERS 168
#else
#define UP_REGISTERS (IS_ONE_ROUND ? 72 : 168)
#endif
/* SHARED: type of the shared expert's tiles, which are one more warp's; NO_TYPE: none. */
constexpr uint32_t NO_TYPE = UINT32_MAX;
template <uint32_t TYPE, uint32_t WARPS, bool IS_ONE_ROUND, uint32_t SHARED>
__global__ void __maxnreg__(UP_REGISTERS) held_up_kernel(const __grid_constant__ up_args a) {
    chain_release();
    touch_arguments(a);
    const input_vector v = carve_int8(ptx::dynamic_shared(), COUNT, false);
    const uint32_t warp = threadIdx.x >> 5, BYTES = tile_bytes_of(TYPE);
    const bool is_shared = SHARED != NO_TYPE && warp == WARPS;
    const tile_slots own = { ptx::dynamic_shared() + up_tiles_at<WARPS + 1>() + warp * 2 * BYTES, (uint64_t *)(ptx::dynamic_shared() + BARRIERS_AT) + warp };
    own.begin();
    uint32_t round = 0, shared_unit = blockIdx.x;
    if (is_shared && shared_unit < a.shared_units) ask_shared<SHARED>(a, own, shared_unit);
    const eight norm = a.source.norm_weight != nullptr && threadIdx.x * 8 < COUNT ? load_eight(a.source.norm_weight + threadIdx.x * 8) : zero_eight();
    const uint32_t signal_step = step_of(a.routed_ready), job_count = is_shared ? 0 : a.routing.used_count * a.unit_count;
    uint32_t job = blockIdx.x + gridDim.x * warp;
    chain_wait();
    if (a.routed_ready.d_flag != nullptr && blockIdx.x == gridDim.x - 1 && threadIdx.x == blockDim.x - 1) give(a.routed_ready, signal_step);
    routed_warp routed = { a.routing };
    static_assert(32 * WARPS >= WARP_EXPERTS_MAX, "a key a thread");
    const uint32_t key = routed.ask();   /* before x: what selection waits for */
    const auto ask = [&] {
        const uint32_t rank = job / a.unit_count, unit = job - rank * a.unit_count;
        const uint64_t offset = routed.of_rank(rank) * a.expert_stride + (uint64_t)unit * a.unit_stride;
        own.fill(a.gate + offset, BYTES, a.up + offset, BYTES);
    };
    const float factor = prepare_held<COUNT, 1, 0, false>(a.source, v, &norm, nullptr, false, [&] {
        routed.fetch((uint32_t *)(ptx::dynamic_shared() + KEYS_AT), key);
        if (job < job_count) ask();
    });
    if constexpr (SHARED != NO_TYPE) {
        for (; is_shared && shared_unit < a.shared_units; shared_unit += gridDim.x) {
            if (round > 0) ask_shared<SHARED>(a, own, shared_unit);
            own.wait(round++);
            put_pair<SHARED>(own, v, factor, shared_unit, a.shared_rows, a.shared_h);
            __syncwarp();
        }
    }
#pragma unroll 1
    while (job < job_count) {
        const uint32_t rank = job / a.unit_count;
        own.wait(round++);
        put_pair<TYPE>(own, v, factor, job - rank * a.unit_count, a.row_count, a.h + (size_t)rank * a.row_count);
        if (IS_ONE_ROUND) break;
        __syncwarp();                    /* all lanes have read what is copied over next */
        job += gridDim.x * WARPS;
        if (job < job_count) ask();
    }
}

/* ---- Down ---- */

struct down_side {
    const uint8_t *tiles;                /* NULL: none */
    const float   *h;                    /* of the first slot; slots are column_count apart */
    uint32_t       column_count, unit_stride, piece_stride, piece_count, type;
};
struct down_args : down_ends {
    down_side routed, shared;
    uint32_t  row_count;
};

template <uint32_t WARPS> constexpr uint32_t PIECES_AT = WARP_KEYS_BYTES + (WARPS * (uint32_t)sizeof(uint64_t) + 15) / 16 * 16;
/* Dynamic shared memory: keys of the selection, barriers, a piece of h for each warp, sums of its rows, weights of ranks, the rows' residuals, the shared expert's weight, the routers' scale. */
template <uint32_t LANES> __host__ __device__ constexpr uint32_t piece_bytes() { return (int8_bytes(256 * LANES, true) + 15) / 16 * 16; }
template <uint32_t LANES, uint32_t WARPS> __host__ __device__ constexpr uint32_t down_tiles_at() {
    return (PIECES_AT<WARPS> + WARPS * (piece_bytes<LANES>() + (32 / LANES + 1) * (uint32_t)sizeof(float)) + (32 / LANES + 2 + 3) * (uint32_t)sizeof(float) + 127) / 128 * 128;
}

/* Registers of a thread.  An SM's quarters have 16384 each, and one of them gets three of nine warps: 80 is what leaves room beside
 * two warps of 128 or three of 80, which the neighbours have there. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
#define DOWN_REGISTERS (LANES == 2 && TYPES == Q4_K ? 96 : 168)     /* what fits without spilling */
#else
#define DOWN_REGISTERS (LANES == 1 ? 80 : (TYPES & Q8_0) != 0 ? 168 : (TYPES & Q6_K) != 0 ? 96 : 80)
#endif

/* LANES of a row: a tile has LANES super-blocks of 32 / LANES rows. */
template <uint32_t TYPES, uint32_t LANES, uint32_t WARPS> __global__ void __maxnreg__(DOWN_REGISTERS)
held_down_kernel(const __grid_constant__ down_args a) {
    chain_release();
    touch_arguments(a);
    constexpr uint32_t ROWS = 32 / LANES, COLUMNS = 256 * LANES;
    uint8_t *const memory = ptx::dynamic_shared() + PIECES_AT<WARPS>;
    float (*const sums)[ROWS] = (float (*)[ROWS])(memory + WARPS * piece_bytes<LANES>()), *const weights = sums[WARPS],
          *const residual = weights + WARPS, *const shared_weight = residual + ROWS, *const scale = shared_weight + 1;
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = blockIdx.x % a.part_count, group = blockIdx.x / a.part_count;
    const uint32_t rank0 = a.routing.used_count * part / a.part_count, ranks = a.routing.used_count * (part + 1) / a.part_count - rank0;
    const bool has_shared = a.shared.tiles != nullptr && part == a.part_count - 1, is_shared = warp >= ranks * a.routed.piece_count;
    const down_side &side = is_shared ? a.shared : a.routed;
    const uint32_t tile_at = is_shared ? warp - ranks * a.routed.piece_count : warp, slot = tile_at / side.piece_count, piece = tile_at - slot * side.piece_count;
    const bool is_there = is_shared ? has_shared && slot == 0 : true;
    const input_vector v = carve_int8(memory + warp * piece_bytes<LANES>(), COLUMNS, true);
    const float *const h = side.h + (is_shared ? 0 : rank0 + slot) * side.column_count + piece * COLUMNS + lane * 8;
    const uint8_t *tile = side.tiles + (uint64_t)group * side.unit_stride + (uint64_t)piece * side.piece_stride;
    const tile_slots held = { ptx::dynamic_shared() + down_tiles_at<LANES, WARPS>() + warp * tile_bytes_max(TYPES), (uint64_t *)(ptx::dynamic_shared() + WARP_KEYS_BYTES) + warp };
    held.begin();
    if (is_shared && is_there) held.fill(tile, tile_bytes_of(side.type));
    volatile uint32_t *const place = (volatile uint32_t *)(scale + 1);     /* for the end; not kept in registers so long */
    if (threadIdx.x == 0) {
        place[0] = ranks;
        place[1] = part;
        place[2] = group;
    }
    if (a.routed_ready.d_flag == nullptr) chain_wait();
    else if (threadIdx.x == 0) await(a.routed_ready);    /* one of a CTA: a thousand would queue up at one slice of L2 */
    __syncthreads();
    /* Older than what the signal is about, used last: on their way to shared memory, where they take no registers. */
    if (a.sum_out != nullptr && threadIdx.x < ROWS && group * ROWS + threadIdx.x < a.row_count) ptx::cp_async_4(ptx::shared_address(residual + threadIdx.x), a.residual + group * ROWS + threadIdx.x);
    if (warp == 0) {
        const float own_scale = router_scale(a.routing);
        if (lane == 0) *scale = own_scale;
        if (lane == 0 && has_shared) *shared_weight = sigmoid(router_value(a.routing, a.routing.expert_count) * own_scale);
    }
    routed_warp chosen = { a.routing };
    chosen.fetch((uint32_t *)ptx::dynamic_shared());     /* its barrier: scale is there */
    if (!is_shared) {
        tile += chosen.of_rank(rank0 + slot) * a.expert_stride;
        held.fill(tile, tile_bytes_of(side.type));
        const float weight = chosen.weight_of(rank0 + slot, scale);
        if (lane == 0 && piece == 0) weights[slot] = weight;
    }
    chain_wait();
    if (is_there) {
        eight value[LANES];              /* of h, all asked for before any is used */
#pragma unroll
        for (uint32_t c = 0; c < LANES; c++) value[c] = load_eight(h + 256 * c);
#pragma unroll
        for (uint32_t c = 0; c < LANES; c++) quantize_eight(v, c, lane, value[c]);
        __syncwarp();
        held.wait(0);
        const float sum = lanes_sum_of<LANES>(dot_tile<true, TYPES>(side.type, held.tile(0), v, lane % LANES));
        if (lane % LANES == 0) sums[warp][lane / LANES] = sum;
    }
    ptx::cp_async_wait_all();
    __syncthreads();
    const uint32_t end_ranks = place[0], end_part = place[1], own_row = place[2] * ROWS + threadIdx.x;
    const bool adds_shared = a.shared.tiles != nullptr && end_part == a.part_count - 1;
    if (threadIdx.x >= ROWS || own_row >= a.row_count) return;
    float own[WARPS], weight[WARPS];     /* read at once, used in order */
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) {
        own[w] = sums[w][threadIdx.x];
        weight[w] = weights[w];
    }
    const float shared_gate = adds_shared ? *shared_weight : 0.0f;
    float routed = 0.0f, shared = 0.0f;
    if (a.routed.piece_count == 1 && a.shared.piece_count == 1) {
#pragma unroll
        for (uint32_t w = 0; w < WARPS; w++) {
            if (w < end_ranks) routed = fmaf(weight[w], own[w], routed);
            else if (w == end_ranks && adds_shared) shared = own[w];
        }
    } else {
        uint32_t at = 0;
        for (uint32_t r = 0; r < end_ranks; r++) {
            float sum = 0.0f;
            for (uint32_t p = 0; p < a.routed.piece_count; p++) sum += sums[at++][threadIdx.x];
            routed = fmaf(weights[r], sum, routed);
        }
        for (uint32_t p = 0; adds_shared && p < a.shared.piece_count; p++) shared += sums[at++][threadIdx.x];
    }
    shared = __fmul_rn(shared_gate, shared);
    if (a.sum_out != nullptr) {
        a.sum_out[own_row] = adds_shared ? residual[threadIdx.x] + routed + shared : residual[threadIdx.x] + routed;
        return;
    }
    a.routed_out[end_part][own_row] = routed;
    if (adds_shared) a.shared_out[own_row] = shared;
}

/* ---- The launches ---- */

struct up_kernel {
    uint32_t type, shared_type, warps, shared_bytes;     /* warps: of the routed experts */
    bool     is_one_round;               /* of jobs */
    void   (*kernel)(up_args);
};
template <uint32_t TYPE, uint32_t WARPS, bool IS_ONE_ROUND, uint32_t SHARED = NO_TYPE> constexpr up_kernel up_row() {
    return { TYPE, SHARED, WARPS, up_tiles_at<WARPS + 1>() + WARPS * 2 * tile_bytes_of(TYPE) + (SHARED != NO_TYPE ? 2 * tile_bytes_of(SHARED) : 0),
             IS_ONE_ROUND, held_up_kernel<TYPE, WARPS, IS_ONE_ROUND, SHARED> };
}
/* The first row that fits is taken. */
const up_kernel UP_KERNELS[] = {
    up_row<SPK_TYPE_Q4_K, 8, true, SPK_TYPE_Q4_K>(), up_row<SPK_TYPE_Q4_K, 8, true, SPK_TYPE_Q8_0>(), up_row<SPK_TYPE_Q4_K, 12, true>(),
    up_row<SPK_TYPE_Q4_K, 12, false>(), up_row<SPK_TYPE_Q5_K, 12, false>(),
};

struct down_kernel {
    uint32_t types, lanes, warps, shared_bytes;      /* warps: at most */
    void   (*kernel)(down_args);
};
template <uint32_t TYPES, uint32_t LANES, uint32_t WARPS> constexpr down_kernel row() { return { TYPES, LANES, WARPS, down_tiles_at<LANES, WARPS>() + WARPS * tile_bytes_max(TYPES), held_down_kernel<TYPES, LANES, WARPS> }; }
/* The first row that fits is taken. */
const down_kernel DOWN_KERNELS[] = {
    row<Q4_K, 2, 9>(), row<Q4_K | Q5_K, 2, 9>(), row<Q4_K | Q6_K, 2, 9>(), row<Q4_K | Q8_0, 2, 9>(), row<Q5_K | Q8_0, 2, 9>(),
    row<Q6_K | Q8_0, 2, 9>(), row<Q4_K, 1, 12>(), row<Q6_K, 1, 12>(),
};

down_side side_of(const row_matrix &m, const float *h, uint64_t column_count) {
    return { m.data, h, (uint32_t)column_count, (uint32_t)m.unit_stride, m.piece_stride, m.piece_count, m.type };
}

} // namespace

bool launch_held_experts_up(spk_cuda *cuda, const spk_cuda_experts_up *args) {
    if (args->is_streamed || !warp_can_select(args->routing) || args->gate.layout != SPK_LAYOUT_T32 || args->source.count != COUNT || args->source.has_rest) return false;
    const bool has_shared = args->shared_h != nullptr;
    if (has_shared && args->shared_gate.layout != SPK_LAYOUT_T32) return false;
    const row_matrix gate = make_row_matrix(args->gate), shared = has_shared ? make_row_matrix(args->shared_gate) : row_matrix{};
    const up_args a = { args->source, args->routing, gate.data, args->up.data, args->expert_stride_bytes, (uint32_t)gate.unit_stride, gate.unit_count,
                        gate.row_count, args->h, shared.data, args->shared_up.data, (uint32_t)shared.unit_stride, shared.unit_count, shared.row_count,
                        args->shared_h, args->routed_ready };
    const uint32_t jobs = args->routing.used_count * gate.unit_count, ctas = std::min(jobs, cuda->sm_count);
    for (const up_kernel &k : UP_KERNELS) {
        if (k.shared_bytes > cuda->shared_max_bytes || k.type != gate.type || k.shared_type != (has_shared ? shared.type : NO_TYPE) || (k.is_one_round && jobs > k.warps * ctas)) continue;
        /* Two CTAs of an SM get their tiles in twice the time, and down waits for the last. */
        const uint32_t shared_bytes = std::max(k.shared_bytes, cuda->shared_alone_bytes);
        launch(cuda, k.kernel, ctas, 32 * (k.warps + has_shared), shared_bytes, a, "experts up, held");
        return true;
    }
    return false;
}

bool launch_held_experts_down(spk_cuda *cuda, const spk_cuda_experts_down *args) {
    if (args->is_streamed || !warp_can_select(args->routing) || args->down.layout != SPK_LAYOUT_T32) return false;
    const bool has_shared = args->shared_down.data != nullptr;
    if (has_shared && args->shared_down.layout != SPK_LAYOUT_T32) return false;
    const row_matrix routed = make_row_matrix(args->down), shared = has_shared ? make_row_matrix(args->shared_down) : row_matrix{};
    if (has_shared && shared.lanes_per_row != routed.lanes_per_row) return false;
    down_args a = {};
    (down_ends &)a = down_ends_of(cuda, args);
    a.routed = side_of(routed, args->h, args->down.col_count);
    a.shared.piece_count = 1;            /* of none: nothing is divided by zero */
    if (has_shared) a.shared = side_of(shared, args->shared_h, args->shared_down.col_count);
    a.row_count = routed.row_count;
    const uint32_t ranks = (args->routing.used_count + a.part_count - 1) / a.part_count;
    const uint32_t warps = ranks * routed.piece_count + (has_shared ? shared.piece_count : 0);
    const uint32_t types = 1u << routed.type | (has_shared ? 1u << shared.type : 0);
    for (const down_kernel &k : DOWN_KERNELS) {
        if ((types & ~k.types) != 0 || k.lanes != routed.lanes_per_row || warps > k.warps || k.shared_bytes > cuda->shared_max_bytes) continue;
        launch(cuda, k.kernel, routed.unit_count * a.part_count, 32 * warps, k.shared_bytes, a, "experts down, held");
        return true;
    }
    return false;
}

} // namespace spk
