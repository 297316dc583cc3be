/* kernels/bandwidth_cuda.cu - what the device is, and how fast it reads its memory: the ceiling that spk-bench prints.
 *
 * Bytes: all of the buffer once a pass, nothing written but a sum and a time.  Launch: four CTAs of 512 threads an SM as far
 * as they fit, each thread with four loads of 16 bytes in flight, strided over the grid.  Reference: the
 * sum of the words that fill the buffer; a pass whose sum is another is an error, so no load can have been left out.
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/ptx_cuda.cuh"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

namespace spk {
namespace {

enum { THREADS = 512, CTAS_PER_SM = 4, LOADS = 4 };
constexpr unsigned char FILL_BYTE = 0x5d;
constexpr uint32_t FILL_WORD = 0x5d5d5d5du;
constexpr uint64_t BUFFER_BYTES_MIN = UINT64_C(64) << 20;
constexpr uint64_t BYTES_LEFT_FREE = UINT64_C(256) << 20;
/* Every thread of a full iteration: the buffer is a multiple of it, so that the loop has no tail. */
constexpr uint64_t iteration_bytes(uint64_t cta_count) { return cta_count * THREADS * LOADS * sizeof(uint4); }

struct read_result {
    uint32_t           sum;            /* of all 32-bit words, modulo 2^32 */
    uint32_t           unused;
    unsigned long long cycles, ns;     /* of the first CTA, from its start to its end */
};

__global__ void __launch_bounds__(THREADS, 2) read_kernel(const uint4 *words, uint64_t iteration_count, read_result *result) {
    unsigned long long start_cycles = 0, start_ns = 0;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        start_cycles = (unsigned long long)clock64();
        start_ns = ptx::globaltimer_ns();
    }
    const uint64_t stride = (uint64_t)gridDim.x * THREADS;
    const uint4 *p = words + (uint64_t)blockIdx.x * THREADS + threadIdx.x;
    uint32_t sum = 0;
#pragma unroll 1
    for (uint64_t i = 0; i < iteration_count; i++, p += LOADS * stride) {
        uint4 v[LOADS];
#pragma unroll
        for (int l = 0; l < LOADS; l++) v[l] = __ldcs(p + l * stride);
#pragma unroll
        for (int l = 0; l < LOADS; l++) sum += v[l].x + v[l].y + v[l].z + v[l].w;
    }
    for (int o = 16; o > 0; o >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, o);
    if (threadIdx.x % 32 == 0) atomicAdd(&result->sum, sum);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        result->cycles = (unsigned long long)clock64() - start_cycles;
        result->ns = ptx::globaltimer_ns() - start_ns;
    }
}

struct reader {
    uint4      *d_words;
    read_result *d_result;
    cudaEvent_t begin, end;
    uint32_t    cta_count;
    uint64_t    size_bytes;
};

void destroy_reader(reader *r) {
    if (r->d_words != nullptr) (void)cudaFree(r->d_words);
    if (r->d_result != nullptr) (void)cudaFree(r->d_result);
    if (r->begin != nullptr) (void)cudaEventDestroy(r->begin);
    if (r->end != nullptr) (void)cudaEventDestroy(r->end);
}

spk_status create_reader(spk_cuda *cuda, uint64_t max_bytes, reader *r, spk_error *err) {
    size_t available = 0, total = 0;
    int resident = 0;
    SPK_TRY(fail(cudaMemGetInfo(&available, &total), "asking for its memory", err));
    SPK_TRY(fail(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, read_kernel, THREADS, 0), "asking for its size", err));
    r->cta_count = cuda->sm_count * (uint32_t)(resident < CTAS_PER_SM ? resident : CTAS_PER_SM);
    uint64_t size = available > BYTES_LEFT_FREE ? available - BYTES_LEFT_FREE : 0;
    if (size > max_bytes) size = max_bytes;
    r->size_bytes = size / iteration_bytes(r->cta_count) * iteration_bytes(r->cta_count);
    if (r->size_bytes < BUFFER_BYTES_MIN)
        return spk_fail(err, SPK_E_MEMORY, "GPU: measuring the bandwidth needs %.2f GB, %.2f GB of %.2f GB are free",
                        (double)(BUFFER_BYTES_MIN + BYTES_LEFT_FREE) * 1e-9, (double)available * 1e-9, (double)total * 1e-9);
    SPK_TRY(fail(cudaMalloc((void **)&r->d_words, r->size_bytes), "memory for the bandwidth", err));
    SPK_TRY(fail(cudaMalloc((void **)&r->d_result, sizeof *r->d_result), "memory for the bandwidth", err));
    SPK_TRY(fail(cudaEventCreate(&r->begin), "a clock", err));
    SPK_TRY(fail(cudaEventCreate(&r->end), "a clock", err));
    return fail(cudaMemsetAsync(r->d_words, FILL_BYTE, r->size_bytes, cuda->stream), "clearing memory", err);
}

spk_status run_pass(spk_cuda *cuda, const reader *r, float *ms, read_result *result, spk_error *err) {
    SPK_TRY(fail(cudaMemsetAsync(r->d_result, 0, sizeof *r->d_result, cuda->stream), "clearing memory", err));
    SPK_TRY(fail(cudaEventRecord(r->begin, cuda->stream), "measuring the bandwidth", err));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(r->cta_count);
    config.blockDim = dim3(THREADS);
    config.stream = cuda->stream;
    SPK_TRY(fail(cudaLaunchKernelEx(&config, read_kernel, (const uint4 *)r->d_words, r->size_bytes / iteration_bytes(r->cta_count), r->d_result),
                 "measuring the bandwidth", err));
    SPK_TRY(fail(cudaEventRecord(r->end, cuda->stream), "measuring the bandwidth", err));
    SPK_TRY(fail(cudaMemcpyAsync(result, r->d_result, sizeof *result, cudaMemcpyDeviceToHost, cuda->stream),
                 "copying from the GPU", err));
    SPK_TRY(fail(cudaStreamSynchronize(cuda->stream), "measuring the bandwidth", err));
    SPK_TRY(fail(cudaEventElapsedTime(ms, r->begin, r->end), "measuring the bandwidth", err));
    uint32_t expected = FILL_WORD * (uint32_t)(r->size_bytes / sizeof(uint32_t));
    if (result->sum == expected) return SPK_OK;
    return spk_fail(err, SPK_E_IO, "GPU: measuring the bandwidth: read the sum %08" PRIx32 ", expected %08" PRIx32,
                    result->sum, expected);
}

} // namespace
} // namespace spk

spk_status spk_cuda_read_bandwidth(spk_cuda *cuda, uint64_t max_bytes, uint32_t pass_count, spk_cuda_bandwidth *out,
                                   spk_error *err) {
    using namespace spk;
    reader r = {};
    read_result result = {};
    spk_cuda_bandwidth best = {};
    spk_status status = create_reader(cuda, max_bytes, &r, err);
    for (uint32_t pass = 0; pass < pass_count + 1 && status == SPK_OK; pass++) {   /* the first one warms up */
        float ms = 0;
        status = run_pass(cuda, &r, &ms, &result, err);
        double rate = ms > 0 ? (double)r.size_bytes / (ms * 1e-3) : 0;
        if (status != SPK_OK || pass == 0 || rate <= best.bytes_per_s) continue;
        best.bytes_per_s = rate;
        best.sm_clock_hz = result.ns > 0 ? (double)result.cycles / (double)result.ns * 1e9 : 0;
    }
    best.buffer_bytes = r.size_bytes;
    destroy_reader(&r);
    if (status == SPK_OK) *out = best;
    return status;
}

spk_status spk_cuda_describe(spk_cuda *cuda, spk_cuda_description *out, spk_error *err) {
    using namespace spk;
    cudaDeviceProp properties;
    int major = 0, minor = 0, sm_khz = 0, memory_khz = 0, driver = 0;
    SPK_TRY(fail(cudaGetDeviceProperties(&properties, 0), "asking what it is", err));
    SPK_TRY(fail(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "asking for its version", err));
    SPK_TRY(fail(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0), "asking for its version", err));
    SPK_TRY(fail(cudaDeviceGetAttribute(&sm_khz, cudaDevAttrClockRate, 0), "asking for its clocks", err));
    SPK_TRY(fail(cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, 0), "asking for its clocks", err));
    SPK_TRY(fail(cudaDriverGetVersion(&driver), "asking for the driver", err));
    memset(out, 0, sizeof *out);
    (void)snprintf(out->name, sizeof out->name, "%.*s", (int)sizeof out->name - 1, properties.name);
    out->sm_version = (uint32_t)(10 * major + minor);
    out->sm_count = cuda->sm_count;
    out->sm_clock_max_hz = sm_khz * 1e3;
    out->memory_clock_hz = memory_khz * 1e3;
    out->driver_version = (uint32_t)driver;
    out->runtime_version = CUDART_VERSION;
    return SPK_OK;
}

spk_status spk_cuda_memory(spk_cuda *cuda, uint64_t *out_free_bytes, uint64_t *out_total_bytes, spk_error *err) {
    (void)cuda;
    size_t available = 0, total = 0;
    SPK_TRY(spk::fail(cudaMemGetInfo(&available, &total), "asking for its memory", err));
    *out_free_bytes = available;
    *out_total_bytes = total;
    return SPK_OK;
}
