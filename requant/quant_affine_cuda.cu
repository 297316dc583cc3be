/* requant/quant_affine_cuda.cu - quant_affine_lanes.c for a GPU. */
#include "requant/quant_kernel_cuda.cuh"

#include "requant/quant_affine_lanes.c"
#include "requant/quant_units_lanes.c"

namespace spk {

/* CTAs that an SM must have room for.  Left to itself the compiler takes 168 registers for sm_100, which is a few too little. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1000
#define AFFINE_BOUNDS QUANT_THREADS, 8
#else
#define AFFINE_BOUNDS QUANT_THREADS
#endif
static __global__ void __launch_bounds__(AFFINE_BOUNDS) quant_affine_kernel(const __grid_constant__ quant_args args) {
    const uint32_t code_max = args.type == SPK_TYPE_Q4_K ? 15 : 31;
    const quant_work w = begin_tile(args);
    const spk_quant_tile *const tile = &w.own->tile;
    affine_lanes lanes;
    const bool may_be_exact = w.is_filled && affine_units(&tile, (int)code_max, &lanes);
    __syncwarp();
    spk_quant_affine_fit *const fit = &w.own->affine;
    if (w.is_filled) spk_quant_affine_cuda(&tile, code_max, args.effort, &fit);
    else make_zeros(w);
    __syncwarp();
    if (args.type == SPK_TYPE_Q4_K) spk_quant_pack_q4_k(&w.own->affine, lane(), SPK_QUANT_LANES, (spk_block_q4_k *)w.own->block);
    else spk_quant_pack_q5_k(&w.own->affine, lane(), SPK_QUANT_LANES, (spk_block_q5_k *)w.own->block);
    end_tile(args, w, may_be_exact);
}

static uint32_t affine_shared_bytes(spk_quant_effort effort) {
    const size_t steps = effort == SPK_EFFORT_BEST ? BEST_STEP_COUNT : NORMAL_STEP_COUNT;
    return quant_shared_bytes(steps * ALIGN_COUNT * sizeof(candidate));
}

const quant_kernel quant_affine = { quant_affine_kernel, affine_shared_bytes };

} // namespace spk
