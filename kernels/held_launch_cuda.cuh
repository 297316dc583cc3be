/* kernels/held_launch_cuda.cuh - launches of kernels that hold their weights in registers.  False: not for this shape, nothing
 * was launched, and the streaming kernel takes it. */
#ifndef SPK_HELD_LAUNCH_CUDA_CUH
#define SPK_HELD_LAUNCH_CUDA_CUH

#include "kernels/cuda.h"

namespace spk {

bool launch_held_gemv(spk_cuda *cuda, const spk_cuda_gemv *args);
bool launch_held_experts_up(spk_cuda *cuda, const spk_cuda_experts_up *args);
bool launch_held_experts_down(spk_cuda *cuda, const spk_cuda_experts_down *args);

} // namespace spk

#endif
