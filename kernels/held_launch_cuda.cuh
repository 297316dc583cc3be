/* kernels/held_launch_cuda.cuh - launches of kernels that hold their weights when their input comes.  False: not for this shape, nothing
 * was launched, and the streaming kernel takes it. */
#ifndef SPK_HELD_LAUNCH_CUDA_CUH
#define SPK_HELD_LAUNCH_CUDA_CUH

#include "kernels/backend_cuda.cuh"

namespace spk {

/* What both kernels of experts' down are told, streaming and held. */
struct down_ends {
    spk_cuda_routing routing;
    spk_cuda_signal  routed_ready;
    uint64_t         expert_stride;
    float           *routed_out[SPK_CUDA_DOWN_PARTS_MAX], *shared_out, *sum_out;
    const float     *residual;
    uint32_t         part_count;
};
inline down_ends down_ends_of(const spk_cuda *cuda, const spk_cuda_experts_down *args) {
    down_ends ends = { args->routing, args->routed_ready, args->expert_stride_bytes, {}, args->shared, args->sum,
                       args->residual, spk_cuda_experts_down_parts(cuda, &args->down, args->routing.used_count) };
    for (int p = 0; p < SPK_CUDA_DOWN_PARTS_MAX; p++) ends.routed_out[p] = args->routed[p];
    return ends;
}

bool launch_held_gemv(spk_cuda *cuda, const spk_cuda_gemv *args);
bool launch_long_gemv(spk_cuda *cuda, const spk_cuda_gemv *args);      /* long_gemv_cuda.cu, whose weights pass by */
bool launch_held_experts_up(spk_cuda *cuda, const spk_cuda_experts_up *args);
bool launch_held_experts_down(spk_cuda *cuda, const spk_cuda_experts_down *args);

} // namespace spk

#endif
