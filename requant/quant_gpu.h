/* requant/quant_gpu.h - spk_quantize on a GPU: the same source compiled once more, and the same bytes.
 *
 * A queue is one thread's way to the GPU, with memory of its own on both sides; several of them run side by side.
 * Builds without nvcc link quant_gpu_stub.c, where spk_quant_gpu_find answers SPK_E_UNSUPPORTED "not built".
 */
#ifndef SPK_QUANT_GPU_H
#define SPK_QUANT_GPU_H

#ifdef __cplusplus
extern "C" {
#endif
#include "requant/quant.h"

enum { SPK_QUANT_GPU_NAME_SIZE = 256 };

/* Its name, or SPK_E_UNSUPPORTED: not built, no driver, no device, or older than sm_80. */
SPK_MUST_CHECK spk_status spk_quant_gpu_find(char name[SPK_QUANT_GPU_NAME_SIZE], spk_error *err);

typedef struct spk_quant_queue spk_quant_queue;

/* Room for weights_max weights at a time, at least a row; some 5 bytes each of pinned memory and as much on the GPU.  Where
 * spk_quant_gpu_find has found a GPU. */
SPK_MUST_CHECK spk_status spk_quant_queue_open(uint64_t weights_max, spk_quant_queue **out, spk_error *err);
void   spk_quant_queue_close(spk_quant_queue *queue);                  /* NULL is fine */
/* [weights_max]: weights of a job that lie here, from the beginning, need not be copied once more. */
float *spk_quant_queue_weights(spk_quant_queue *queue);
/* Seconds that the GPU has spent in the queue's kernels, transfers not counted. */
double spk_quant_queue_kernel_s(const spk_quant_queue *queue);

/* As spk_quantize, and waits for the result.  Also SPK_E_IO, if the GPU fails. */
SPK_MUST_CHECK spk_status spk_quantize_queued(spk_quant_queue *queue, const spk_quant_job *job, spk_error *err);

#ifdef __cplusplus
}
#endif
#endif
