/* requant/quant_symmetric_cuda.cu - quant_symmetric_lanes.c for a GPU. */
#include "requant/quant_kernel_cuda.cuh"

#include "requant/quant_symmetric_lanes.c"

namespace spk {

static __global__ void __launch_bounds__(QUANT_THREADS) quant_q6_kernel(const __grid_constant__ quant_args args) {
    const quant_work w = begin_tile(args);
    bool has_units = true;
    for (uint32_t s = lane(); s < 2 * SPK_QUANT_LANES; s += SPK_QUANT_LANES) {
        float peak;
        has_units = has_units && (spk_quant_q6_unit(&w.own->tile, s, &peak) != 0 || peak == 0);
    }
    const bool may_be_exact = w.is_filled && all_lanes(has_units);
    __syncwarp();
    if (w.is_filled) spk_quant_q6_cuda(&w.own->tile, args.effort, &w.own->q6);
    else make_zeros(w);
    __syncwarp();
    spk_quant_pack_q6_k(&w.own->q6, lane(), SPK_QUANT_LANES, (spk_block_q6_k *)w.own->block);
    end_tile(args, w, may_be_exact);
}

static __global__ void __launch_bounds__(QUANT_THREADS) quant_q8_kernel(const __grid_constant__ quant_args args) {
    const quant_work w = begin_tile(args);
    float peak;
    const bool has_unit = spk_quant_q8_unit(&w.own->tile, lane(), &peak) != 0 || peak == 0;
    const bool may_be_exact = w.is_filled && all_lanes(has_unit);
    if (w.is_filled) spk_quant_q8_cuda(&w.own->tile, args.effort, &w.own->q8);
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
