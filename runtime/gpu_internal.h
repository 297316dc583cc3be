/* runtime/gpu_internal.h - what the files of the GPU side share; private to runtime/gpu*.c. */
#ifndef SPK_GPU_INTERNAL_H
#define SPK_GPU_INTERNAL_H

#include <time.h>

#include "kernels/cuda.h"
#include "runtime/gpu.h"
#include "runtime/model_internal.h"

struct spk_gpu_model {
    spk_cuda *cuda;
    uint8_t  *d_sections[SPK_PLACE_COUNT];
    uint64_t  section_bytes[SPK_PLACE_COUNT];
    float    *d_vectors, *d_routers;            /* of all layers, as spk_cuda_router has them */
    spk_load_times times;
};

struct spk_gpu_session {
    const spk_model     *model;
    const spk_gpu_model *gpu;
    spk_cuda      *cuda;
    spk_cuda_step *step, *sampled_step;         /* sampled: recorded when first needed */
    bool           is_sampled;                  /* the step that is being recorded */
    uint32_t       fusions, context_tokens;
    spk_cuda_kv_type kv_type;
    uint8_t       *d_memory;
    uint64_t       memory_bytes, state_bytes;   /* states come first, so that a reset clears one range */
    spk_cuda_sequence sequence;
    uint32_t      *chosen;                      /* sequence.d_chosen lies in host memory: here */
    spk_sampling  *d_sampling;
    unsigned long long *d_best;
    uint32_t *d_arrivals;
    float    *x[2], *delta, *project, *mixed, *normed, *conv_out, *delta_out, *cos_sin, *partial;
    float    *part_totals, *weight, *router_squares, *h, *shared_h, *shared_parts, *routed[SPK_CUDA_DOWN_PARTS_MAX], *shared, *norm_factor, *squares, *logits;
    double   *turns;
    long long *router_sums;              /* of all layers: cleared when a step begins */
    uint32_t *choice, *flags;            /* flags: a signal a layer */
    struct { float *conv, *delta; void *k, *v; } *layers;
    bool           is_account;                  /* the step that is being recorded ends with its logits: gpu_account.c */
    struct spk_account *account;                /* where it is marked, or NULL */
    /* For tests, NULL otherwise: called while a step is recorded, after each layer, when the residual stream is x + pending[0]
     * + .. (NULL from the first unused on).  May record kernels; what they leave in x goes on alone. */
    void (*observe)(spk_gpu_session *session, uint32_t layer, float *x, const float *const pending[3], void *context);
    void  *observe_context;
};

static inline uint64_t spk_key_dim(const spk_model_config *c) { return (uint64_t)c->gdn_k_head_count * c->gdn_k_dim; }
static inline uint64_t spk_value_dim(const spk_model_config *c) { return (uint64_t)c->gdn_v_head_count * c->gdn_v_dim; }
static inline uint64_t spk_conv_dim(const spk_model_config *c) { return 2 * spk_key_dim(c) + spk_value_dim(c); }
/* Rows of a layer's router, the shared expert's with them; and those that its sums take, as spk_cuda_router_words wants them. */
static inline uint32_t spk_router_rows(const spk_model_config *c) { return c->expert_count + (c->shared_ff_size > 0); }
static inline uint32_t spk_router_places(const spk_model_config *c) { return (spk_router_rows(c) + 3) / 4 * 4; }
static inline uint64_t spk_q_dim(const spk_model_config *c) { return (uint64_t)c->head_count * c->head_dim; }

static inline double spk_gpu_now_s(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* gpu_start.c: the device that was started; the caller closes it.  Fills start_s and start_wait_s. */
SPK_MUST_CHECK spk_status spk_gpu_start_take(spk_gpu_start *start, spk_cuda **out, spk_load_times *times, spk_error *err);

/* gpu_load.c: all sections but EXTRA to the device, those of a pack checked against its checksums on the way. */
SPK_MUST_CHECK spk_status spk_gpu_load(const spk_model *model, spk_gpu_model *gpu, const spk_model_options *options,
                                       spk_error *err);

/* The device's copy of a host matrix or vector of the model. */
spk_matrix   spk_gpu_matrix(const spk_model *model, const spk_gpu_model *gpu, spk_matrix w);
const float *spk_gpu_vector(const spk_model *model, const spk_gpu_model *gpu, const float *v);

/* gpu_step.c: the shape of an attention layer, and the whole step as launches into the session's open recording. */
spk_cuda_attention spk_gpu_attention_shape(const spk_gpu_session *session);
void spk_gpu_record_step(spk_gpu_session *session);

/* gpu_account.c: kernels up to the kernel_count-th that are not marked yet belong to a phase. */
void spk_gpu_account_mark(spk_account *account, spk_phase phase, uint32_t kernel_count, uint64_t bytes);

/* gpu.c: a step that ends with the largest logit, or with a draw. */
SPK_MUST_CHECK spk_status spk_gpu_record(spk_gpu_session *session, bool is_sampled, spk_cuda_step **out, spk_error *err);
/* gpu_generate.c: the end of a sampled step. */
void spk_gpu_record_draw(spk_gpu_session *session);

#endif
