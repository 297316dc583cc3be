/* kernels/long_gemv_cuda.cu - one long matrix times vector for one token: the output head.
 *
 * Maths      as gemv_cuda.cu, of which this is the short form: one matrix of tiles whose rows are one tile wide, x as one int8 vector, no
 *            residual
 * Bytes      Qwen3.6 in Q6_K, 248320 rows of 2048: 417 MB; in Q4_K 286 MB
 * Launch     one CTA an SM, alone there, which streams tiles through rings of its warps; neighbouring warps have neighbouring tiles.  It
 *            cannot start before its predecessor has left, so x is asked for before the weights: behind a full ring it took 4 us.
 * Resources  166 to 213 KB of shared memory, which leaves no room beside experts down
 * Reference  gemv_cuda.cu: the same bits (tests/checkkern compares both with spk_kernels.matmul)
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/choice_cuda.cuh"
#include "kernels/held_cuda.cuh"
#include "kernels/held_launch_cuda.cuh"
#include "kernels/rows_cuda.cuh"

namespace spk {
namespace {

constexpr uint32_t KB = 8, COUNT = 256 * KB, ROWS = 32 / KB;

struct long_args {
    spk_cuda_source     source;
    const uint8_t      *tiles;
    float              *y;
    uint32_t            unit_stride, unit_count, row_count;
    bool                is_greedy;
    spk_cuda_sequence   sequence;
    unsigned long long *best;
    uint32_t           *arrivals;
};

/* Dynamic shared memory: x, barriers, the CTA's best key, rings. */
constexpr uint32_t BARRIERS_AT = (int8_bytes(COUNT, false) + 15) / 16 * 16;
template <uint32_t WARPS> __host__ __device__ constexpr uint32_t best_at() { return BARRIERS_AT + WARPS * RING_STAGES_MAX * (uint32_t)sizeof(uint64_t); }
template <uint32_t WARPS> __host__ __device__ constexpr uint32_t rings_at() { return (best_at<WARPS>() + (uint32_t)sizeof(unsigned long long) + 127) / 128 * 128; }

template <uint32_t TYPE, uint32_t WARPS, uint32_t STAGES> __global__ void __launch_bounds__(32 * WARPS, 1) long_gemv_kernel(const __grid_constant__ long_args a) {
    chain_release();
    touch_arguments(a);
    constexpr uint32_t BYTES = tile_bytes_of(TYPE);
    static_assert(STAGES <= RING_STAGES_MAX, "");
    const uint32_t lane = threadIdx.x & 31, at = threadIdx.x * 8, step = gridDim.x * WARPS;
    const input_vector v = carve_int8(ptx::dynamic_shared(), COUNT, false);
    unsigned long long *const cta_best = (unsigned long long *)(ptx::dynamic_shared() + best_at<WARPS>());
    if (threadIdx.x == 0) *cta_best = 0;
    warp_ring ring;
    ring.begin(ptx::dynamic_shared() + rings_at<WARPS>(), (uint64_t *)(ptx::dynamic_shared() + BARRIERS_AT), BYTES, STAGES);
    const eight norm = at < COUNT && a.source.norm_weight != nullptr ? load_eight(a.source.norm_weight + at) : zero_eight();
    uint32_t unit = blockIdx.x * WARPS + threadIdx.x / 32, asked = unit;
    const auto ask = [&](uint32_t stage) {
        if (asked < a.unit_count) ring.fill(stage, a.tiles + (uint64_t)asked * a.unit_stride, 0, BYTES, 1);
        else ring.skip();
        asked += step;
    };
    chain_wait();
    const float factor = prepare_held<COUNT, 1, 0, false>(a.source, v, &norm, nullptr, blockIdx.x == 0, [&] {
#pragma unroll
        for (uint32_t s = 0; s < STAGES; s++) ask(s);
    });
    unsigned long long best = 0;
    uint32_t stage = 0;
#pragma unroll 1
    for (; unit < a.unit_count; unit += step) {
        ring.wait(stage);
        const shared_tile tile = { ring.stage(stage), lane };
        const float sum = dot_tile<false, 1u << TYPE>(TYPE, tile, v, lane % KB);
        __syncwarp();
        ask(stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        const float value = __fmul_rn(lanes_sum_of<KB>(sum), factor) + 0.0f;     /* both zeros tie */
        const uint32_t row = unit * ROWS + lane / KB;
        if (lane % KB != 0 || row >= a.row_count) continue;
        a.y[row] = value;
        if (value == value) best = max(best, order_key(value, row));
    }
    if (!a.is_greedy) return;
    if (best != 0) atomicMax(cta_best, best);
    finish_greedy(a.sequence, a.best, a.arrivals, cta_best);
}

/* ---- The launch ---- */

struct long_kernel {
    uint32_t type, warps, shared_bytes;
    void   (*kernel)(long_args);
};
template <uint32_t TYPE, uint32_t WARPS, uint32_t STAGES> constexpr long_kernel row() {
    return { TYPE, WARPS, rings_at<WARPS>() + WARPS * STAGES * tile_bytes_of(TYPE), long_gemv_kernel<TYPE, WARPS, STAGES> };
}
const long_kernel KERNELS[] = { row<SPK_TYPE_Q4_K, 12, 3>(), row<SPK_TYPE_Q5_K, 12, 3>(), row<SPK_TYPE_Q6_K, 12, 2>(), row<SPK_TYPE_Q8_0, 12, 2>() };
constexpr uint32_t ROUNDS_MIN = 2;       /* of a warp */

} // namespace

bool launch_long_gemv(spk_cuda *cuda, const spk_cuda_gemv *args) {
    const spk_cuda_segment &s = args->segments[0];
    if (args->is_streamed || args->segment_count != 1 || args->router.sums != nullptr || args->source.part_totals != nullptr || is_float(s.w.type) || s.up.data != nullptr ||
        s.residual != nullptr || args->source.count != COUNT || args->source.has_rest) return false;
    const row_matrix m = make_row_matrix(s.w);
    if (m.piece_count != 1 || m.lanes_per_row != KB) return false;
    long_args a = { args->source, m.data, s.y, (uint32_t)m.unit_stride, m.unit_count, m.row_count, args->greedy != nullptr, {}, args->d_best, args->d_arrivals };
    if (a.is_greedy) a.sequence = *args->greedy;
    for (const long_kernel &k : KERNELS) {
        if (k.type != m.type || k.shared_bytes > cuda->shared_long_bytes || m.unit_count < ROUNDS_MIN * k.warps * cuda->sm_count) continue;
        launch(cuda, k.kernel, cuda->sm_count, 32 * k.warps, k.shared_bytes, a, "gemv, long");
        return true;
    }
    return false;
}

} // namespace spk
