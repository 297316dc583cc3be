/* kernels/host_cuda.cu - what the host sees of the device while it runs. */
#include "kernels/backend_cuda.cuh"

#include <string.h>

using spk::fail;

spk_status spk_cuda_share(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **out, void **d_out, spk_error *err) {
    (void)cuda;
    void *memory = nullptr, *device_memory = nullptr;
    SPK_TRY(fail(cudaHostAlloc(&memory, size_bytes, cudaHostAllocMapped), what, err));
    const cudaError_t error = cudaHostGetDevicePointer(&device_memory, memory, 0);
    if (error != cudaSuccess) {
        (void)cudaFreeHost(memory);
        return fail(error, what, err);
    }
    memset(memory, 0, size_bytes);
    *out = memory;
    *d_out = device_memory;
    return SPK_OK;
}

void spk_cuda_unshare(spk_cuda *cuda, void *memory) {
    (void)cuda;
    (void)cudaFreeHost(memory);
}

spk_status spk_cuda_is_idle(spk_cuda *cuda, bool *idle, spk_error *err) {
    const cudaError_t error = cudaStreamQuery(cuda->stream);
    *idle = error == cudaSuccess;
    return error == cudaErrorNotReady ? SPK_OK : fail(error, "running", err);
}
