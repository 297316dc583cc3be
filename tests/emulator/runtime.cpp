/* tests/emulator/runtime.cpp - streams, events, graphs and launches. */
#include "cuda_fp16.h"
#include "cuda_runtime.h"

#include <chrono>
#include <mutex>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

using namespace emulator;

struct emulated_graph { std::deque<grid> grids; };
struct emulated_graph_exec { std::deque<grid> grids; };
struct emulated_stream {
    std::mutex lock;                        /* held while its work is done */
    std::deque<std::function<void()>> work;
    emulated_graph *recording;
};
struct emulated_event { emulated_stream *stream; double time_ms; };

namespace {

constexpr size_t DEVICE_BYTES = (size_t)16 << 30;
constexpr uint32_t CLUSTER_PORTABLE = 8, CLUSTER_MAX = 16, DYNAMIC_DEFAULT = 48 << 10;

struct function_limits { uint32_t dynamic_bytes = DYNAMIC_DEFAULT; bool has_large_clusters = false; };
std::map<const void *, function_limits> limits;
std::mutex limits_lock, kernels_lock;       /* kernels_lock: one host thread runs kernels */

uint32_t shared_per_cta() { return settings().sm_version >= 90 ? 232448 : 166912; }
uint32_t shared_per_sm() { return shared_per_cta() + 1024; }

void do_one(emulated_stream &s) {
    std::function<void()> work = std::move(s.work.front());
    s.work.pop_front();
    work();
}
void do_all(emulated_stream &s) {
    std::lock_guard<std::mutex> hold(s.lock);
    while (!s.work.empty()) do_one(s);
}
cudaError_t enqueue(cudaStream_t s, std::function<void()> work) {
    std::lock_guard<std::mutex> hold(s->lock);
    if (s->recording != nullptr) return cudaErrorStreamCaptureUnsupported;
    s->work.push_back(std::move(work));
    return cudaSuccess;
}

const float *make_half_values() {
    float *values = (float *)malloc(65536 * sizeof(float));
    for (uint32_t bits = 0; bits < 65536; bits++) {
        const uint32_t exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
        const float size = exponent == 31 ? (fraction != 0 ? NAN : INFINITY)
                                          : ldexpf((float)(exponent != 0 ? fraction | 0x400 : fraction), (int)std::max(exponent, 1u) - 25);
        values[bits] = bits & 0x8000 ? -size : size;
    }
    return values;
}

/* A kernel that touches what nobody has: say who. */
void on_bad_access(int number, siginfo_t *info, void *) {
    signal(number, SIG_DFL);
    if (self != nullptr) fail("address %p belongs to nobody", info->si_addr);
    raise(number);
}
void catch_bad_accesses() {
    static uint8_t stack[64 << 10];
    stack_t own = {};
    own.ss_sp = stack;
    own.ss_size = sizeof stack;
    struct sigaction action = {};
    action.sa_sigaction = on_bad_access;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    if (sigaltstack(&own, nullptr) == 0) (void)sigaction(SIGSEGV, &action, nullptr);
}

} // namespace

namespace emulator {
const float *const half_values = make_half_values();
}

/* ---- The device ---- */

const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    }
    return "unknown error";
}
cudaError_t cudaGetDeviceCount(int *count) {
#ifndef __SANITIZE_ADDRESS__
    static std::once_flag once;
    std::call_once(once, catch_bad_accesses);
#else
    (void)catch_bad_accesses;
#endif
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int) {
    snprintf(out->name, sizeof out->name, "emulated sm_%u", settings().sm_version);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrClockRate:
    case cudaDevAttrMemoryClockRate: *out = 1; break;
    case cudaDevAttrComputeCapabilityMajor: *out = (int)settings().sm_version / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *out = (int)settings().sm_version % 10; break;
    case cudaDevAttrMultiProcessorCount: *out = (int)settings().sm_count; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = (int)shared_per_sm(); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = (int)shared_per_cta(); break;
    }
    return cudaSuccess;
}

/* ---- Memory ---- */

cudaError_t cudaMalloc(void **out, size_t size_bytes) {
    if (size_bytes > DEVICE_BYTES) return cudaErrorMemoryAllocation;
    *out = device_allocate(size_bytes);
    return *out != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void *memory) { return memory == nullptr || device_free(memory) ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = DEVICE_BYTES;
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void **out, size_t size_bytes, unsigned) { return cudaMalloc(out, size_bytes); }
cudaError_t cudaFreeHost(void *memory) { return cudaFree(memory); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size_bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    check_device_range(kind == cudaMemcpyHostToDevice ? to : from, size_bytes, "cudaMemcpyAsync");
    return enqueue(stream, [=] { memcpy(to, from, size_bytes); });
}
cudaError_t cudaMemsetAsync(void *memory, int byte, size_t size_bytes, cudaStream_t stream) {
    check_device_range(memory, size_bytes, "cudaMemsetAsync");
    return enqueue(stream, [=] { device_fill(memory, byte, size_bytes); });
}

/* ---- Streams and events ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned) {
    *out = new emulated_stream();
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    do_all(*stream);
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    do_all(*stream);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    std::lock_guard<std::mutex> hold(stream->lock);
    if (stream->work.empty()) return cudaSuccess;
    do_one(*stream);
    return cudaErrorNotReady;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned) {
    *out = new emulated_event();
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    event->stream = stream;
    return enqueue(stream, [event] {
        event->time_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
    });
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (event->stream != nullptr) do_all(*event->stream);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    *ms = (float)(end->time_ms - begin->time_ms);
    return cudaSuccess;
}

/* ---- Graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    stream->recording = new emulated_graph();
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
    *out = stream->recording;
    stream->recording = nullptr;
    return *out != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long) {
    *out = new emulated_graph_exec{ graph->grids };
    return cudaSuccess;
}
static void run_grids(std::deque<grid> grids) {
    std::lock_guard<std::mutex> hold(kernels_lock);
    run(grids);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
    return enqueue(stream, [grids = exec->grids] { run_grids(grids); });
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
    delete exec;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}

/* ---- Kernels ---- */

cudaError_t cudaFuncSetAttribute(const void *function, cudaFuncAttribute attribute, int value) {
    std::lock_guard<std::mutex> hold(limits_lock);
    if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) limits[function].has_large_clusters = value != 0;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
    if (value < 0 || (uint32_t)value > shared_per_cta() - STATIC_SHARED_MAX) return cudaErrorInvalidValue;
    limits[function].dynamic_bytes = (uint32_t)value;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *) {
    out->sharedSizeBytes = STATIC_SHARED_MAX;
    return cudaSuccess;
}

namespace emulator {

cudaError_t check_launch(const cudaLaunchConfig_t &config, const void *function, uint32_t *cluster_size, bool *is_programmatic) {
    std::lock_guard<std::mutex> hold(limits_lock);
    const function_limits &limit = limits[function];
    *cluster_size = 1;
    *is_programmatic = false;
    for (unsigned i = 0; i < config.numAttrs; i++) {
        const cudaLaunchAttribute &a = config.attrs[i];
        if (a.id == cudaLaunchAttributeClusterDimension) *cluster_size = a.val.clusterDim.x * a.val.clusterDim.y * a.val.clusterDim.z;
        if (a.id == cudaLaunchAttributeProgrammaticStreamSerialization) *is_programmatic = a.val.programmaticStreamSerializationAllowed != 0;
    }
    const uint64_t threads = (uint64_t)config.blockDim.x * config.blockDim.y * config.blockDim.z,
                   ctas = (uint64_t)config.gridDim.x * config.gridDim.y * config.gridDim.z;
    const bool is_too_new = settings().sm_version < 90 && (*cluster_size > 1 || *is_programmatic);
    if (threads == 0 || threads > CTA_THREADS_MAX || threads != config.blockDim.x || ctas == 0 || ctas > UINT32_MAX || is_too_new ||
        config.dynamicSmemBytes > limit.dynamic_bytes || *cluster_size > (limit.has_large_clusters ? CLUSTER_MAX : CLUSTER_PORTABLE) ||
        *cluster_size == 0 || ctas % *cluster_size != 0)
        return cudaErrorInvalidConfiguration;
    return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t &config, const void *function, std::function<void()> body) {
    grid g = {};
    const cudaError_t error = check_launch(config, function, &g.cluster_size, &g.is_programmatic);
    if (error != cudaSuccess) return error;
    g.function = function;
    g.body = std::move(body);
    g.size = { config.gridDim.x, config.gridDim.y, config.gridDim.z };
    g.block = { config.blockDim.x, 1, 1 };
    g.shared_bytes = (uint32_t)config.dynamicSmemBytes;
    if (config.stream->recording == nullptr) return enqueue(config.stream, [g] { run_grids({ g }); });
    config.stream->recording->grids.push_back(std::move(g));
    return cudaSuccess;
}

} // namespace emulator
