/* tests/emulator/runtime.hpp - the CUDA runtime's functions for the host, as far as the project uses them.
 *
 * What is asynchronous is done when somebody waits for it, or asks whether it is done: who does not wait finds nothing there.
 */
#ifndef SPK_EMULATOR_RUNTIME_HPP
#define SPK_EMULATOR_RUNTIME_HPP

#include "tests/emulator/emulator.hpp"

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorNotReady = 600,
    cudaErrorStreamCaptureUnsupported = 900
};
enum cudaDeviceAttr {
    cudaDevAttrClockRate,
    cudaDevAttrMemoryClockRate,
    cudaDevAttrComputeCapabilityMajor,
    cudaDevAttrComputeCapabilityMinor,
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor,
    cudaDevAttrMaxSharedMemoryPerBlockOptin
};
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributePreferredSharedMemoryCarveout,
    cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum cudaLaunchAttributeID { cudaLaunchAttributeNone, cudaLaunchAttributeClusterDimension, cudaLaunchAttributeProgrammaticStreamSerialization };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal };
enum { cudaSharedmemCarveoutMaxShared = 100 };
enum { cudaHostAllocMapped = 2, cudaHostRegisterDefault = 0, cudaHostRegisterReadOnly = 8 };
enum { cudaStreamNonBlocking = 1, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };

struct cudaDeviceProp { char name[256]; };
struct cudaFuncAttributes { size_t sharedSizeBytes; };
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    union {
        struct { unsigned x, y, z; } clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};
typedef struct emulated_stream *cudaStream_t;
typedef struct emulated_event *cudaEvent_t;
typedef struct emulated_graph *cudaGraph_t;
typedef struct emulated_graph_exec *cudaGraphExec_t;
struct cudaLaunchConfig_t {
    dim3     gridDim, blockDim;
    size_t   dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

const char *cudaGetErrorString(cudaError_t error);
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count);
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int device);
cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr attribute, int device);
inline cudaError_t cudaDriverGetVersion(int *out) { return *out = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaMalloc(void **out, size_t size_bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMemGetInfo(size_t *available, size_t *total);
cudaError_t cudaHostAlloc(void **out, size_t size_bytes, unsigned flags);
cudaError_t cudaFreeHost(void *memory);
inline cudaError_t cudaHostGetDevicePointer(void **out, void *memory, unsigned) { return *out = memory, cudaSuccess; }
inline cudaError_t cudaHostRegister(void *, size_t, unsigned) { return cudaSuccess; }
inline cudaError_t cudaHostUnregister(void *) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size_bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *memory, int byte, size_t size_bytes, cudaStream_t stream);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags);
inline cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *function);

namespace emulator {
cudaError_t launch(const cudaLaunchConfig_t &config, const void *function, std::function<void()> body);
cudaError_t check_launch(const cudaLaunchConfig_t &config, const void *function, uint32_t *cluster_size, bool *is_programmatic);
}

template <typename... PARAMETERS, typename... ARGUMENTS>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(PARAMETERS...), ARGUMENTS &&...arguments) {
    return emulator::launch(*config, (const void *)kernel, [kernel, arguments...] { kernel(arguments...); });
}
template <typename KERNEL> cudaError_t cudaOccupancyMaxActiveClusters(int *out, KERNEL kernel, const cudaLaunchConfig_t *config) {
    uint32_t cluster_size;
    bool is_programmatic;
    *out = 1;
    return emulator::check_launch(*config, (const void *)kernel, &cluster_size, &is_programmatic);
}
template <typename KERNEL> cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, KERNEL, int, size_t) { return *out = 2, cudaSuccess; }

#endif
