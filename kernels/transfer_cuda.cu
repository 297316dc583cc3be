/* kernels/transfer_cuda.cu - device memory for weights, and copies to it from many threads.
 *
 * Nothing but calls of the CUDA runtime: what is copied, in which order, from where, is runtime/gpu_load_run.c.
 * Waiting sleeps instead of spinning: the threads that wait here share their cores with those that hash.
 */
#include "kernels/backend_cuda.cuh"

#include <assert.h>
#include <stdlib.h>

using spk::fail;

namespace {

struct copies {
    uint32_t     slot_count, stream_count;
    cudaStream_t streams[SPK_CUDA_STREAM_MAX];
    cudaEvent_t *events;         /* [slot_count]: the end of the slot's last copy */
};

bool pin(void *context, const void *memory, uint64_t size_bytes, bool is_host_writing) {
    (void)context;
    unsigned flags = is_host_writing ? cudaHostRegisterDefault : cudaHostRegisterReadOnly;
    if (cudaHostRegister(const_cast<void *>(memory), size_bytes, flags) == cudaSuccess) return true;
    (void)cudaGetLastError();    /* a refusal is no fault of a later call */
    return false;
}

void unpin(void *context, const void *memory) {
    (void)context;
    (void)cudaHostUnregister(const_cast<void *>(memory));
}

spk_status start(void *context, uint32_t slot, void *d_to, const void *from, uint64_t size_bytes, spk_error *err) {
    copies *c = static_cast<copies *>(context);
    assert(slot < c->slot_count);
    cudaStream_t stream = c->streams[slot % c->stream_count];
    SPK_TRY(fail(cudaMemcpyAsync(d_to, from, size_bytes, cudaMemcpyHostToDevice, stream), "copying the weights", err));
    return fail(cudaEventRecord(c->events[slot], stream), "copying the weights", err);
}

spk_status wait(void *context, uint32_t slot, spk_error *err) {
    copies *c = static_cast<copies *>(context);
    assert(slot < c->slot_count);
    return fail(cudaEventSynchronize(c->events[slot]), "copying the weights", err);
}

void close(void *context) {
    copies *c = static_cast<copies *>(context);
    for (uint32_t i = 0; c->events != nullptr && i < c->slot_count; i++)
        if (c->events[i] != nullptr) (void)cudaEventDestroy(c->events[i]);
    for (uint32_t i = 0; i < c->stream_count; i++)
        if (c->streams[i] != nullptr) (void)cudaStreamDestroy(c->streams[i]);
    free(c->events);
    free(c);
}

} // namespace

spk_status spk_cuda_allocate_raw(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **d_out, spk_error *err) {
    size_t available = 0, total = 0;
    void *memory = nullptr;
    (void)cuda;
    cudaError_t error = cudaMalloc(&memory, size_bytes ? size_bytes : 1);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&available, &total);
        return spk_fail(err, SPK_E_MEMORY, "GPU: %s needs %.2f GB, %.2f GB of %.2f GB are free", what,
                        (double)size_bytes * 1e-9, (double)available * 1e-9, (double)total * 1e-9);
    }
    SPK_TRY(fail(error, what, err));
    *d_out = memory;
    return SPK_OK;
}

spk_status spk_cuda_transfer_open(spk_cuda *cuda, uint32_t slot_count, uint32_t stream_count, spk_transfer *out,
                                  spk_error *err) {
    (void)cuda;
    assert(slot_count >= 1 && stream_count >= 1 && stream_count <= SPK_CUDA_STREAM_MAX);
    copies *c = static_cast<copies *>(calloc(1, sizeof(copies)));
    if (c == nullptr) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    c->slot_count = slot_count;
    c->stream_count = stream_count;
    c->events = static_cast<cudaEvent_t *>(calloc(slot_count, sizeof(cudaEvent_t)));
    cudaError_t error = c->events == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
    for (uint32_t i = 0; i < stream_count && error == cudaSuccess; i++)
        error = cudaStreamCreateWithFlags(&c->streams[i], cudaStreamNonBlocking);
    for (uint32_t i = 0; i < slot_count && error == cudaSuccess; i++)
        error = cudaEventCreateWithFlags(&c->events[i], cudaEventBlockingSync | cudaEventDisableTiming);
    if (error != cudaSuccess) {
        close(c);
        return fail(error, "preparing to copy the weights", err);
    }
    *out = (spk_transfer){ c, pin, unpin, start, wait, close };
    return SPK_OK;
}
