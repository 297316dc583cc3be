/* kernels/choice_cuda.cuh - the end of a step: what was chosen, and where the next step goes on. */
#ifndef SPK_CHOICE_CUDA_CUH
#define SPK_CHOICE_CUDA_CUH

#include <stdint.h>
#include "kernels/cuda.h"
#include "kernels/device_cuda.cuh"

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

/* The end of a greedy step, by all threads: the best row over all CTAs is the next token.  cta_best, in shared memory, is the CTA's largest
 * order_key.  The counter wraps to zero by itself, and the last CTA clears the key, so that a replay finds both as the first step did. */
__device__ __forceinline__ void finish_greedy(const spk_cuda_sequence &sequence, unsigned long long *best, uint32_t *arrivals, const unsigned long long *cta_best) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    atomicMax(best, *cta_best);
    __threadfence();
    if (atomicInc(arrivals, gridDim.x - 1) != gridDim.x - 1) return;
    __threadfence();
    const unsigned long long key = atomicExch(best, 0ull);       /* 0 where all were NaN, whose value is a NaN, too */
    const bool is_number = fabsf(order_value((uint32_t)(key >> 32))) < INFINITY;
    end_step(sequence, is_number ? 0xffffffffu - (uint32_t)key : SPK_CUDA_TOKEN_FREE);
}

} // namespace spk

#endif
