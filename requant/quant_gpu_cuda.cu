/* requant/quant_gpu_cuda.cu - the GPU's queues: weights there, one kernel, blocks back.
 *
 * What the CPU still does is what it is better at: it refuses NaNs, and looks again at the few tiles that may lie on a grid of
 * the type.
 */
#include "requant/quant_kernel_cuda.cuh"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>

extern "C" {
#include "formats/status.h"
}
#include "requant/quant_gpu.h"

namespace {

constexpr int SM_MAJOR_MIN = 8;
constexpr uint32_t TILE_WEIGHTS_MIN = 32;        /* the narrowest rows: a tile has at least so many weights of its own */

spk_status fail(cudaError_t error, const char *what, spk_error *err) {
    if (error == cudaSuccess) return SPK_OK;
    return spk_fail(err, error == cudaErrorMemoryAllocation ? SPK_E_MEMORY : SPK_E_IO, "GPU quantizer: %s: %s", what,
                    cudaGetErrorString(error));
}

spk_status unusable(cudaError_t error, spk_error *err) {
    if (error == cudaSuccess) return SPK_OK;
    (void)cudaGetLastError();
    return spk_fail(err, SPK_E_UNSUPPORTED, "GPU quantizer: no usable GPU: %s", cudaGetErrorString(error));
}

const spk::quant_kernel &kernel_of(uint32_t type) {
    switch (type) {
    case SPK_TYPE_Q6_K: return spk::quant_q6;
    case SPK_TYPE_Q8_0: return spk::quant_q8;
    default:            return spk::quant_affine;
    }
}

} // namespace

struct spk_quant_queue {
    uint64_t     weights_max;
    cudaStream_t stream;
    cudaEvent_t  begin, end, done;
    double       kernel_s;
    /* Host memory that is pinned, and the GPU's.  After the weights comes the importance, after the blocks what is exact. */
    float       *weights, *d_weights;
    uint8_t     *blocks, *d_blocks;
};

spk_status spk_quant_gpu_find(char name[SPK_QUANT_GPU_NAME_SIZE], spk_error *err) {
    int count = 0, major = 0;
    cudaFuncAttributes known = {};
    cudaDeviceProp properties = {};
    SPK_TRY(unusable(cudaGetDeviceCount(&count), err));
    if (count == 0) return spk_fail(err, SPK_E_UNSUPPORTED, "GPU quantizer: no usable GPU: no device");
    SPK_TRY(unusable(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), err));
    if (major < SM_MAJOR_MIN)
        return spk_fail(err, SPK_E_UNSUPPORTED, "GPU quantizer: the GPU is sm_%d0, expected sm_80 or later", major);
    const uint32_t types[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q6_K, SPK_TYPE_Q8_0 };
    for (uint32_t type : types) {
        const void *function = (const void *)kernel_of(type).function;
        SPK_TRY(unusable(cudaFuncGetAttributes(&known, function), err));
        SPK_TRY(unusable(cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared), err));
        SPK_TRY(unusable(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              (int)kernel_of(type).shared_bytes(SPK_EFFORT_BEST)), err));
    }
    SPK_TRY(unusable(cudaGetDeviceProperties(&properties, 0), err));
    (void)snprintf(name, SPK_QUANT_GPU_NAME_SIZE, "%s", properties.name);
    return SPK_OK;
}

static uint64_t blocks_bytes_max(const spk_quant_queue *queue) {
    return queue->weights_max / TILE_WEIGHTS_MIN * sizeof(spk_block_q8_0);
}

static spk_status fill_queue(spk_quant_queue *queue, spk_error *err) {
    const uint64_t in_bytes = 2 * queue->weights_max * sizeof(float);
    const uint64_t out_bytes = blocks_bytes_max(queue) + queue->weights_max / TILE_WEIGHTS_MIN;
    SPK_TRY(fail(cudaStreamCreateWithFlags(&queue->stream, cudaStreamNonBlocking), "opening a queue", err));
    SPK_TRY(fail(cudaEventCreate(&queue->begin), "opening a queue", err));
    SPK_TRY(fail(cudaEventCreate(&queue->end), "opening a queue", err));
    SPK_TRY(fail(cudaEventCreateWithFlags(&queue->done, cudaEventBlockingSync | cudaEventDisableTiming), "opening a queue", err));
    SPK_TRY(fail(cudaHostAlloc((void **)&queue->weights, in_bytes, cudaHostAllocMapped), "pinned memory", err));
    SPK_TRY(fail(cudaHostAlloc((void **)&queue->blocks, out_bytes, cudaHostAllocMapped), "pinned memory", err));
    SPK_TRY(fail(cudaMalloc((void **)&queue->d_weights, in_bytes), "memory for weights", err));
    return fail(cudaMalloc((void **)&queue->d_blocks, out_bytes), "memory for blocks", err);
}

spk_status spk_quant_queue_open(uint64_t weights_max, spk_quant_queue **out, spk_error *err) {
    spk_quant_queue *queue = (spk_quant_queue *)calloc(1, sizeof *queue);
    if (queue == nullptr) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    queue->weights_max = (weights_max + SPK_SUPERBLOCK - 1) / SPK_SUPERBLOCK * SPK_SUPERBLOCK;
    const spk_status status = fill_queue(queue, err);
    if (status != SPK_OK) {
        spk_quant_queue_close(queue);
        return status;
    }
    *out = queue;
    return SPK_OK;
}

void spk_quant_queue_close(spk_quant_queue *queue) {
    if (queue == nullptr) return;
    if (queue->d_blocks != nullptr) (void)cudaFree(queue->d_blocks);
    if (queue->d_weights != nullptr) (void)cudaFree(queue->d_weights);
    if (queue->blocks != nullptr) (void)cudaFreeHost(queue->blocks);
    if (queue->weights != nullptr) (void)cudaFreeHost(queue->weights);
    for (cudaEvent_t event : { queue->begin, queue->end, queue->done })
        if (event != nullptr) (void)cudaEventDestroy(event);
    if (queue->stream != nullptr) (void)cudaStreamDestroy(queue->stream);
    free(queue);
}

float *spk_quant_queue_weights(spk_quant_queue *queue) { return queue->weights; }
double spk_quant_queue_kernel_s(const spk_quant_queue *queue) { return queue->kernel_s; }

static spk_status launch(spk_quant_queue *queue, const spk::quant_args &args, spk_error *err) {
    const spk::quant_kernel &kernel = kernel_of(args.type);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((args.tile_count + spk::QUANT_GROUPS - 1) / spk::QUANT_GROUPS);
    config.blockDim = dim3(spk::QUANT_THREADS);
    config.dynamicSmemBytes = kernel.shared_bytes(args.effort);
    config.stream = queue->stream;
    SPK_TRY(fail(cudaEventRecord(queue->begin, queue->stream), "starting", err));
    SPK_TRY(fail(cudaLaunchKernelEx(&config, kernel.function, args), "starting", err));
    return fail(cudaEventRecord(queue->end, queue->stream), "starting", err);
}

/* Rows that fit into the queue, whose weights are there already where they lie in its memory. */
static spk_status quantize_rows(spk_quant_queue *queue, const spk_quant_job *job, double scale, spk_error *err) {
    const spk_type_info *info = spk_type_find(job->type);
    const uint64_t weight_count = job->row_count * job->col_count, row_tiles = (job->col_count + SPK_SUPERBLOCK - 1) / SPK_SUPERBLOCK;
    const uint64_t row_bytes = job->col_count / info->block_weights * info->block_bytes;
    const uint64_t blocks_bytes = job->row_count * row_bytes, tile_count = job->row_count * row_tiles;
    float *importance = queue->weights + queue->weights_max, *d_importance = queue->d_weights + queue->weights_max;
    uint8_t *exact = queue->blocks + blocks_bytes_max(queue), *d_exact = queue->d_blocks + blocks_bytes_max(queue);
    if (job->weights != queue->weights) memcpy(queue->weights, job->weights, weight_count * sizeof(float));
    SPK_TRY(fail(cudaMemcpyAsync(queue->d_weights, queue->weights, weight_count * sizeof(float), cudaMemcpyHostToDevice, queue->stream),
                 "copying weights", err));
    if (job->importance != nullptr) {
        memcpy(importance, job->importance, job->col_count * sizeof(float));
        SPK_TRY(fail(cudaMemcpyAsync(d_importance, importance, job->col_count * sizeof(float), cudaMemcpyHostToDevice, queue->stream),
                     "copying importance", err));
    }
    spk::quant_args args = {};
    args.weights = queue->d_weights;
    args.importance = job->importance != nullptr ? d_importance : nullptr;
    args.blocks = queue->d_blocks;
    args.exact = d_exact;
    args.importance_scale = scale;
    args.tile_count = (uint32_t)tile_count;
    args.row_tiles = (uint32_t)row_tiles;
    args.type = job->type;
    args.col_count = (uint32_t)job->col_count;
    args.row_bytes = (uint32_t)row_bytes;
    args.block_weights = info->block_weights;
    args.tile_bytes = SPK_SUPERBLOCK / info->block_weights * info->block_bytes;
    args.shape = *spk_quant_shape_of(job->type);
    args.effort = job->effort;
    SPK_TRY(launch(queue, args, err));
    SPK_TRY(fail(cudaMemcpyAsync(queue->blocks, queue->d_blocks, blocks_bytes, cudaMemcpyDeviceToHost, queue->stream), "copying blocks", err));
    SPK_TRY(fail(cudaMemcpyAsync(exact, d_exact, tile_count, cudaMemcpyDeviceToHost, queue->stream), "copying blocks", err));
    SPK_TRY(fail(cudaEventRecord(queue->done, queue->stream), "waiting", err));
    SPK_TRY(fail(cudaEventSynchronize(queue->done), "running", err));
    float kernel_ms = 0;
    SPK_TRY(fail(cudaEventElapsedTime(&kernel_ms, queue->begin, queue->end), "timing", err));
    queue->kernel_s += (double)kernel_ms * 1e-3;
    memcpy(job->blocks, queue->blocks, blocks_bytes);
    for (uint64_t t = 0; t < tile_count; t++)
        if (exact[t] != 0) spk_quant_make_exact(job, t / row_tiles, t % row_tiles * SPK_SUPERBLOCK);
    return SPK_OK;
}

spk_status spk_quantize_queued(spk_quant_queue *queue, const spk_quant_job *job, spk_error *err) {
    double scale;
    SPK_TRY(spk_quant_check(job, &scale, err));
    assert(job->col_count <= queue->weights_max);
    const uint64_t rows = queue->weights_max / job->col_count;
    const spk_type_info *info = spk_type_find(job->type);
    for (uint64_t row = 0; row < job->row_count; row += rows) {
        spk_quant_job part = *job;
        part.row_count = job->row_count - row < rows ? job->row_count - row : rows;
        part.weights = job->weights + row * job->col_count;
        part.blocks = (uint8_t *)job->blocks + row * (job->col_count / info->block_weights * info->block_bytes);
        SPK_TRY(quantize_rows(queue, &part, scale, err));
    }
    return SPK_OK;
}
