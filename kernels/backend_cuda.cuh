/* kernels/backend_cuda.cuh - the device context behind spk_cuda, for the launch functions; private to kernels/. */
#ifndef SPK_BACKEND_CUDA_CUH
#define SPK_BACKEND_CUDA_CUH

#include <cuda_runtime.h>
#include "kernels/cuda.h"

struct spk_cuda {
    uint32_t     sm_count;
    bool         has_chain;      /* programmatic launch edges: sm_90 and later */
    uint32_t     shared_budget_bytes;   /* of a CTA that leaves room for the next kernel's: half of an SM and 12 KiB, since no
                                           kernel's neighbours take that much both */
    uint32_t     shared_alone_bytes;    /* of a CTA: no two that large fit on an SM.  Kernels in the chain ask for at least that
                                           much where a second CTA on one SM, and none on another, would make all wait */
    uint32_t     shared_long_bytes;     /* of a CTA that runs long enough to be better off alone */
    uint32_t     shared_max_bytes;      /* of a CTA, static and dynamic together */
    cudaStream_t stream;
    cudaError_t  first_error;    /* of the step being recorded */
    const char  *first_error_at;
    uint32_t     launch_count;   /* asked for in this recording; those from launch_limit on are left out */
    uint32_t     launch_limit, recorded_count;
};

namespace spk {

constexpr cudaError_t TOO_LARGE = cudaErrorInvalidConfiguration;    /* a launch that needs more shared memory than there is */
constexpr uint32_t CLUSTER_PORTABLE = 8;            /* CTAs that every device with clusters takes */

/* What the runtime answered to a call, as spk's status. */
inline spk_status fail(cudaError_t error, const char *what, spk_error *err) {
    if (error == cudaSuccess) return SPK_OK;
    return spk_fail(err, error == cudaErrorMemoryAllocation ? SPK_E_MEMORY : SPK_E_IO, "GPU: %s: %s", what,
                    cudaGetErrorString(error));
}

/* How a kernel is launched: attributes set, configuration filled.  Not to be copied. */
struct launch_shape {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t  config;
    cudaError_t         error;
    launch_shape(const launch_shape &) = delete;
    template <typename ARGS>
    launch_shape(void (*kernel)(ARGS), const spk_cuda *cuda, dim3 grid, uint32_t threads, uint32_t shared_bytes, uint32_t cluster_size)
        : attributes{}, config{} {
        const void *function = (const void *)kernel;
        /* The same split of L1 and shared memory for all kernels: an SM has to be empty to change it. */
        error = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
        /* The limit belongs to the function, not to this launch: always all that the device has, never less than another thread
         * may be about to use. */
        cudaFuncAttributes known = {};
        if (error == cudaSuccess) error = cudaFuncGetAttributes(&known, function);
        const uint32_t room = cuda->shared_max_bytes - (uint32_t)known.sharedSizeBytes;
        if (error == cudaSuccess && shared_bytes > room) error = TOO_LARGE;
        if (error == cudaSuccess) error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)room);
        if (error == cudaSuccess && cluster_size > CLUSTER_PORTABLE)
            error = cudaFuncSetAttribute(function, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        config.gridDim = grid;
        config.blockDim = dim3(threads);
        config.dynamicSmemBytes = shared_bytes;
        config.stream = cuda->stream;
        config.attrs = attributes;
        if (cluster_size > 1) {
            attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
            attributes[config.numAttrs++].val.clusterDim = { cluster_size, 1, 1 };
        }
        if (cuda->has_chain && cuda->recorded_count > 0) {
            attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
            attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
        }
    }
};

/* Record one kernel of the chain.  Clusters of more than one CTA need sm_90. */
template <typename ARGS>
void launch(spk_cuda *cuda, void (*kernel)(ARGS), dim3 grid, uint32_t threads, uint32_t shared_bytes, const ARGS &args,
            const char *name = "kernel", uint32_t cluster_size = 1) {
    if (cuda->launch_count++ >= cuda->launch_limit) return;
    launch_shape shape(kernel, cuda, grid, threads, shared_bytes, cluster_size);
    if (shape.error == cudaSuccess) shape.error = cudaLaunchKernelEx(&shape.config, kernel, args);
    if (shape.error != cudaSuccess && cuda->first_error == cudaSuccess) {
        cuda->first_error = shape.error;
        cuda->first_error_at = name;
    }
    cuda->recorded_count++;
}

} // namespace spk

#endif
