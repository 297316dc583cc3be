/* requant/quant_gpu_stub.c - the GPU's quantizer of a build without CUDA: there is none.  Linked instead of *_cuda.cu. */
#include "requant/quant_gpu.h"

#include <assert.h>
#include <stddef.h>

spk_status spk_quant_gpu_find(char name[SPK_QUANT_GPU_NAME_SIZE], spk_error *err) {
    (void)name;
    return spk_fail(err, SPK_E_UNSUPPORTED, "GPU quantizer: not built: make found no nvcc, or was told CUDA=0");
}

/* Unreachable: no GPU was found. */
#pragma GCC diagnostic ignored "-Wunused-parameter"
spk_status spk_quant_queue_open(uint64_t weights_max, spk_quant_queue **out, spk_error *err) {
    assert(0);
    return SPK_E_UNSUPPORTED;
}
void   spk_quant_queue_close(spk_quant_queue *queue) { assert(queue == NULL); }
float *spk_quant_queue_weights(spk_quant_queue *queue) { assert(0); return NULL; }
double spk_quant_queue_kernel_s(const spk_quant_queue *queue) { assert(0); return 0; }
spk_status spk_quantize_queued(spk_quant_queue *queue, const spk_quant_job *job, spk_error *err) {
    assert(0);
    return SPK_E_UNSUPPORTED;
}
