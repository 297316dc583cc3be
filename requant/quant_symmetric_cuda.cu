/* requant/quant_symmetric_cuda.cu - quant_symmetric_lanes.c for a GPU. */
#include "requant/quant_kernel_cuda.cuh"

#include "requant/quant_symmetric_lanes.c"
#include "requant/quant_units_lanes.c"

namespace spk {

static __global__ void __launch_bounds__(QUANT_THREADS) quant_q6_kernel(const __grid_constant__ quant_args args) {
    const quant_work w = begin_tile(args);
    const spk_quant_tile *const tile = &w.own->tile;
    vec units, peaks;
    const bool may_be_exact = w.is_filled && q6_units(&tile, 0, &units, &peaks) && q6_units(&tile, 1, &units, &peaks);
    __syncwarp();
    spk_quant_q6_fit *const fit = &w.own->q6;
    if (w.is_filled) spk_quant_q6_cuda(&tile, args.effort, &fit);
    else make_zeros(w);
    __syncwarp();
    spk_quant_pack_q6_k(&w.own->q6, lane(), SPK_QUANT_LANES, (spk_block_q6_k *)w.own->block);
    end_tile(args, w, may_be_exact);
}

static __global__ void __launch_bounds__(QUANT_THREADS) quant_q8_kernel(const __grid_constant__ quant_args args) {
    const quant_work w = begin_tile(args);
    const spk_quant_tile *const tile = &w.own->tile;
    vec units, peaks;
    const bool may_be_exact = w.is_filled && q8_units(&tile, &units, &peaks);
    spk_quant_q8_fit *const fit = &w.own->q8;
    if (w.is_filled) spk_quant_q8_cuda(&tile, args.effort, &fit);
    else make_zeros(w);
    __syncwarp();
    spk_quant_pack_q8_0(&w.own->q8, lane(), SPK_QUANT_LANES, (spk_block_q8_0 *)w.own->block);
    end_tile(args, w, may_be_exact);
}

static uint32_t q6_shared_bytes(spk_quant_effort effort) {
    const size_t spans = effort == SPK_EFFORT_BEST ? Q6_BEST_SPAN_COUNT : Q6_NORMAL_SPAN_COUNT;
    return quant_shared_bytes(spans * GROUP_COUNT * sizeof(q6_candidate));
}
static uint32_t q8_shared_bytes(spk_quant_effort) { return quant_shared_bytes(0); }

const quant_kernel quant_q6 = { quant_q6_kernel, q6_shared_bytes };
const quant_kernel quant_q8 = { quant_q8_kernel, q8_shared_bytes };

} // namespace spk
