/* kernels/backend_cuda.cu - device, memory, and recording a step.
 *
 * Refuses: devices older than sm_80.  The tools start without a driver: cudart is linked statically and the driver is only
 * looked for in spk_cuda_open.
 */
#include "kernels/backend_cuda.cuh"

#include <stdlib.h>

struct spk_cuda_step {
    cudaGraph_t     graph;
    cudaGraphExec_t exec;
};

using spk::fail;

/* Of a kernel, at most; and how much more than half of an SM a kernel may take, since none's neighbours take that much both. */
enum { STATIC_SHARED_MAX = 8192, OVER_HALF_BYTES = 12288 };

/* Is there code for this device in the program? */
static __global__ void __launch_bounds__(32) probe_kernel() {}

/* Whatever is wrong with the device or the driver, it is not usable. */
static spk_status unusable(cudaError_t error, const char *what, spk_error *err) {
    if (error == cudaSuccess) return SPK_OK;
    (void)cudaGetLastError();
    return spk_fail(err, SPK_E_UNSUPPORTED, "backend cuda: no usable GPU: %s: %s", what, cudaGetErrorString(error));
}

spk_status spk_cuda_open(spk_cuda **out, spk_error *err) {
    int count = 0, major = 0, sms = 0, sm_shared = 0, cta_shared = 0;
    cudaFuncAttributes known = {};
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0)
        return spk_fail(err, SPK_E_UNSUPPORTED, "backend cuda: no usable GPU: %s",
                        error != cudaSuccess ? cudaGetErrorString(error) : "no device");
    SPK_TRY(unusable(cudaSetDevice(0), "choosing the device", err));
    SPK_TRY(unusable(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "asking for its version", err));
    SPK_TRY(unusable(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "asking for its size", err));
    SPK_TRY(unusable(cudaDeviceGetAttribute(&sm_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0), "asking for its size", err));
    SPK_TRY(unusable(cudaDeviceGetAttribute(&cta_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0), "asking for its size", err));
    if (major < 8 || sms < 2)
        return spk_fail(err, SPK_E_UNSUPPORTED, "backend cuda: the GPU is sm_%d0 with %d multiprocessors, expected sm_80 or later and two",
                        major, sms);
    SPK_TRY(unusable(cudaFuncGetAttributes(&known, (const void *)probe_kernel), "code for it", err));
    spk_cuda *cuda = (spk_cuda *)calloc(1, sizeof *cuda);
    if (cuda == nullptr) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    const spk_status status = unusable(cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking), "opening the device", err);
    if (status != SPK_OK) {
        free(cuda);
        return status;
    }
    cuda->sm_count = (uint32_t)sms;
    cuda->has_chain = major >= 9;
    cuda->shared_max_bytes = (uint32_t)cta_shared;
    cuda->shared_alone_bytes = (uint32_t)sm_shared / 2;
    cuda->shared_long_bytes = cuda->shared_max_bytes - STATIC_SHARED_MAX;
    const uint32_t half = (uint32_t)sm_shared / 2 + OVER_HALF_BYTES;
    cuda->shared_budget_bytes = half < cuda->shared_long_bytes ? half : cuda->shared_long_bytes;
    *out = cuda;
    return SPK_OK;
}

void spk_cuda_close(spk_cuda *cuda) {
    if (cuda == nullptr) return;
    (void)cudaStreamDestroy(cuda->stream);
    free(cuda);
}

uint32_t    spk_cuda_sm_count(const spk_cuda *cuda) { return cuda->sm_count; }

spk_status spk_cuda_allocate(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **d_out, spk_error *err) {
    void *memory = nullptr;
    SPK_TRY(spk_cuda_allocate_raw(cuda, size_bytes, what, &memory, err));
    spk_status status = spk_cuda_fill(cuda, memory, 0, size_bytes, err);
    if (status != SPK_OK) {
        (void)cudaFree(memory);
        return status;
    }
    *d_out = memory;
    return SPK_OK;
}

void spk_cuda_free(spk_cuda *cuda, void *d_memory) {
    (void)cuda;
    (void)cudaFree(d_memory);
}

spk_status spk_cuda_upload(spk_cuda *cuda, void *d_to, const void *from, uint64_t size_bytes, spk_error *err) {
    SPK_TRY(fail(cudaMemcpyAsync(d_to, from, size_bytes, cudaMemcpyHostToDevice, cuda->stream), "copying to the GPU", err));
    return spk_cuda_wait(cuda, err);
}
spk_status spk_cuda_download(spk_cuda *cuda, void *to, const void *d_from, uint64_t size_bytes, spk_error *err) {
    SPK_TRY(fail(cudaMemcpyAsync(to, d_from, size_bytes, cudaMemcpyDeviceToHost, cuda->stream), "copying from the GPU", err));
    return spk_cuda_wait(cuda, err);
}
spk_status spk_cuda_fill(spk_cuda *cuda, void *d_memory, uint8_t byte, uint64_t size_bytes, spk_error *err) {
    SPK_TRY(fail(cudaMemsetAsync(d_memory, byte, size_bytes, cuda->stream), "clearing memory", err));
    return spk_cuda_wait(cuda, err);
}
spk_status spk_cuda_wait(spk_cuda *cuda, spk_error *err) {
    return fail(cudaStreamSynchronize(cuda->stream), "running", err);
}

spk_status spk_cuda_step_begin(spk_cuda *cuda, spk_error *err) { return spk_cuda_step_begin_part(cuda, UINT32_MAX, err); }

spk_status spk_cuda_step_begin_part(spk_cuda *cuda, uint32_t kernel_limit, spk_error *err) {
    cuda->launch_limit = kernel_limit;
    cuda->first_error = cudaSuccess;
    cuda->first_error_at = nullptr;
    cuda->launch_count = cuda->recorded_count = 0;
    return fail(cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal), "recording a step", err);
}

uint32_t spk_cuda_launch_count(const spk_cuda *cuda) { return cuda->launch_count; }

spk_status spk_cuda_step_end(spk_cuda *cuda, spk_cuda_step **out, spk_error *err) {
    spk_cuda_step *step = (spk_cuda_step *)calloc(1, sizeof *step);
    cudaGraph_t graph = nullptr;
    cudaError_t error = cudaStreamEndCapture(cuda->stream, &graph);
    if (cuda->first_error != cudaSuccess) {
        error = cuda->first_error;
    } else if (error == cudaSuccess && step != nullptr) {
        step->graph = graph;
        error = cudaGraphInstantiate(&step->exec, graph, 0);
    }
    if (error != cudaSuccess || step == nullptr) {
        if (graph != nullptr) (void)cudaGraphDestroy(graph);
        free(step);
        if (error == spk::TOO_LARGE && cuda->first_error_at != nullptr)
            return spk_fail(err, SPK_E_UNSUPPORTED, "GPU: %s: a matrix of the model is too wide for this GPU's shared memory", cuda->first_error_at);
        return error == cudaSuccess ? spk_fail(err, SPK_E_MEMORY, "out of memory")
                                    : fail(error, cuda->first_error_at ? cuda->first_error_at : "recording a step", err);
    }
    *out = step;
    return SPK_OK;
}

spk_status spk_cuda_step_run(spk_cuda *cuda, const spk_cuda_step *step, uint32_t count, spk_error *err) {
    for (uint32_t i = 0; i < count; i++)
        SPK_TRY(fail(cudaGraphLaunch(step->exec, cuda->stream), "starting a step", err));
    return SPK_OK;
}

void spk_cuda_step_free(spk_cuda_step *step) {
    if (step == nullptr) return;
    (void)cudaGraphExecDestroy(step->exec);
    (void)cudaGraphDestroy(step->graph);
    free(step);
}


bool spk_cuda_accepts(const spk_matrix *w) {
    if (w->col_count % 32 != 0) return false;
    if (w->layout == SPK_LAYOUT_T32) return true;
    return w->type == SPK_TYPE_F32 || w->type == SPK_TYPE_F16 || w->type == SPK_TYPE_BF16;
}
