/* kernels/cuda_stub.c - the GPU backend of a build without CUDA: spk_cuda_open says so, and nothing else can be reached
 * without what it returns.  Linked instead of the *_cuda.cu files. */
#include "kernels/cuda.h"

#include <assert.h>
#include <stddef.h>

spk_status spk_cuda_open(spk_cuda **out, spk_error *err) {
    (void)out;
    return spk_fail(err, SPK_E_UNSUPPORTED, "backend cuda: not built: make found no nvcc, or was told CUDA=0");
}
void spk_cuda_close(spk_cuda *cuda) { assert(cuda == NULL); (void)cuda; }
bool spk_cuda_accepts(const spk_matrix *w) { (void)w; return true; }

/* Unreachable: there is no spk_cuda to call them with. */
#define UNREACHABLE_STATUS(name, ...) spk_status name(__VA_ARGS__) { assert(0); return SPK_E_UNSUPPORTED; }
#define UNREACHABLE(name, ...) void name(__VA_ARGS__) { assert(0); }
#pragma GCC diagnostic ignored "-Wunused-parameter"
uint32_t spk_cuda_sm_count(const spk_cuda *cuda) { assert(0); return 0; }
UNREACHABLE_STATUS(spk_cuda_allocate, spk_cuda *cuda, uint64_t size_bytes, const char *what, void **d_out, spk_error *err)
void spk_cuda_free(spk_cuda *cuda, void *d_memory) { assert(d_memory == NULL); }
UNREACHABLE_STATUS(spk_cuda_upload, spk_cuda *cuda, void *d_to, const void *from, uint64_t size_bytes, spk_error *err)
UNREACHABLE_STATUS(spk_cuda_download, spk_cuda *cuda, void *to, const void *d_from, uint64_t size_bytes, spk_error *err)
UNREACHABLE_STATUS(spk_cuda_fill, spk_cuda *cuda, void *d_memory, uint8_t byte, uint64_t size_bytes, spk_error *err)
UNREACHABLE_STATUS(spk_cuda_allocate_raw, spk_cuda *cuda, uint64_t size_bytes, const char *what, void **d_out,
                   spk_error *err)
UNREACHABLE_STATUS(spk_cuda_transfer_open, spk_cuda *cuda, uint32_t slot_count, uint32_t stream_count, spk_transfer *out,
                   spk_error *err)
UNREACHABLE_STATUS(spk_cuda_step_begin, spk_cuda *cuda, spk_error *err)
UNREACHABLE_STATUS(spk_cuda_step_begin_part, spk_cuda *cuda, uint32_t kernel_limit, spk_error *err)
uint32_t spk_cuda_launch_count(const spk_cuda *cuda) { assert(0); return 0; }
UNREACHABLE(spk_cuda_launch_tick, spk_cuda *cuda, uint32_t *d_step)
UNREACHABLE_STATUS(spk_cuda_step_end, spk_cuda *cuda, spk_cuda_step **out, spk_error *err)
UNREACHABLE_STATUS(spk_cuda_step_run, spk_cuda *cuda, const spk_cuda_step *step, uint32_t count, spk_error *err)
void spk_cuda_step_free(spk_cuda_step *step) { assert(step == NULL); }
UNREACHABLE_STATUS(spk_cuda_wait, spk_cuda *cuda, spk_error *err)
UNREACHABLE(spk_cuda_launch_embed, spk_cuda *cuda, const spk_cuda_embed *args)
UNREACHABLE(spk_cuda_launch_gemv, spk_cuda *cuda, const spk_cuda_gemv *args)
UNREACHABLE(spk_cuda_launch_router_source, spk_cuda *cuda, const spk_cuda_router_source *args)
UNREACHABLE(spk_cuda_launch_router, spk_cuda *cuda, const spk_cuda_router *args, const float *x)
UNREACHABLE(spk_cuda_launch_gdn, spk_cuda *cuda, const spk_cuda_gdn *args, spk_cuda_gdn_fusion fusion)
UNREACHABLE(spk_cuda_launch_attention, spk_cuda *cuda, const spk_cuda_attention *args)
bool spk_cuda_attention_has_parts(const spk_cuda *cuda, const spk_cuda_attention *args) { assert(0); return false; }
uint64_t spk_cuda_attention_cache_bytes(const spk_cuda_attention *args) { assert(0); return 0; }
uint64_t spk_cuda_attention_scratch_bytes(const spk_cuda *cuda, const spk_cuda_attention *args) { assert(0); return 0; }
UNREACHABLE(spk_cuda_launch_top_k, spk_cuda *cuda, const spk_cuda_top_k *args)
UNREACHABLE(spk_cuda_launch_experts_up, spk_cuda *cuda, const spk_cuda_experts_up *args)
UNREACHABLE(spk_cuda_launch_experts_down, spk_cuda *cuda, const spk_cuda_experts_down *args)
UNREACHABLE(spk_cuda_launch_elementwise, spk_cuda *cuda, const spk_cuda_elementwise *args)
UNREACHABLE(spk_cuda_launch_norm, spk_cuda *cuda, const spk_cuda_norm *args)
UNREACHABLE_STATUS(spk_cuda_is_idle, spk_cuda *cuda, bool *idle, spk_error *err)
UNREACHABLE_STATUS(spk_cuda_share, spk_cuda *cuda, uint64_t size_bytes, const char *what, void **out, void **d_out, spk_error *err)
void spk_cuda_unshare(spk_cuda *cuda, void *memory) { assert(memory == NULL); }
UNREACHABLE(spk_cuda_launch_sample, spk_cuda *cuda, const spk_cuda_sample *args)
bool spk_cuda_gdn_can_fuse(uint32_t k_dim, uint32_t v_dim) { assert(0); return false; }
uint32_t spk_cuda_experts_down_parts(const spk_cuda *cuda, const spk_matrix *down, uint32_t used_count) { assert(0); return 0; }
UNREACHABLE_STATUS(spk_cuda_describe, spk_cuda *cuda, spk_cuda_description *out, spk_error *err)
UNREACHABLE_STATUS(spk_cuda_memory, spk_cuda *cuda, uint64_t *out_free_bytes, uint64_t *out_total_bytes, spk_error *err)
UNREACHABLE_STATUS(spk_cuda_read_bandwidth, spk_cuda *cuda, uint64_t max_bytes, uint32_t pass_count, spk_cuda_bandwidth *out, spk_error *err)
