/* kernels/backend_cuda.cuh - the device context behind spk_cuda, for the launch functions; private to kernels/. */
#ifndef SPK_BACKEND_CUDA_CUH
#define SPK_BACKEND_CUDA_CUH

#include <cuda_runtime.h>
#include "kernels/cuda.h"

struct spk_cuda {
    uint32_t     sm_count;
    bool         has_chain;      /* programmatic launch edges: sm_90 and later */
    cudaStream_t stream;
    cudaError_t  first_error;    /* of the step being recorded */
    const char  *first_error_at;
    uint32_t     launch_count;
};

namespace spk {

/* Record one kernel of the chain. */
template <typename ARGS>
void launch(spk_cuda *cuda, void (*kernel)(ARGS), dim3 grid, uint32_t threads, uint32_t shared_bytes, const ARGS &args,
            const char *name = "kernel") {
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 * 1024)
        error = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    cudaLaunchAttribute chain = {};
    chain.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    chain.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = cuda->stream;
    config.attrs = &chain;
    config.numAttrs = cuda->has_chain && cuda->launch_count > 0 ? 1 : 0;
    if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, args);
    if (error != cudaSuccess && cuda->first_error == cudaSuccess) {
        cuda->first_error = error;
        cuda->first_error_at = name;
    }
    cuda->launch_count++;
}

} // namespace spk

#endif
