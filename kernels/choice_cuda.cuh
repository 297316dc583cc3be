/* kernels/choice_cuda.cuh - the end of a step: what was chosen, and where the next step goes on. */
#ifndef SPK_CHOICE_CUDA_CUH
#define SPK_CHOICE_CUDA_CUH

#include <stdint.h>
#include "kernels/cuda.h"

namespace spk {

/* One thread of the step's last kernel.  token is SPK_CUDA_TOKEN_FREE where there was none to choose; a step may follow all
 * the same before the host has seen that, and must find a token of the vocabulary. */
__device__ __forceinline__ void end_step(const spk_cuda_sequence &sequence, uint32_t token) {
    const uint32_t next = *sequence.d_position + 1;
    sequence.d_chosen[next] = token;
    if (sequence.d_tokens[next] == SPK_CUDA_TOKEN_FREE) sequence.d_tokens[next] = token != SPK_CUDA_TOKEN_FREE ? token : 0;
    *sequence.d_position = next;
    ++*sequence.d_step;
}

} // namespace spk

#endif
