/* kernels/cuda.h - the GPU backend's kernels as a C interface: a device, its memory, and a step that is recorded once and
 * replayed for every token.
 *
 * One device context belongs to one thread at a time.  Pointers named d_* are device memory.  A launch function only
 * records into the step that is being built; nothing runs before spk_cuda_step_run.  Launch functions cannot fail
 * alone: the first error is kept and returned by spk_cuda_step_end.
 *
 * Builds without nvcc link cuda_stub.c, where spk_cuda_open answers SPK_E_UNSUPPORTED "not built".
 */
#ifndef SPK_CUDA_H
#define SPK_CUDA_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {   /* the formats' headers are C and do not know of C++ */
#endif
#include "formats/layout.h"
#include "formats/status.h"

typedef struct spk_cuda spk_cuda;
typedef struct spk_cuda_step spk_cuda_step;

/* The first device, or SPK_E_UNSUPPORTED: not built, no driver, no device, or older than sm_80. */
SPK_MUST_CHECK spk_status spk_cuda_open(spk_cuda **out, spk_error *err);
void        spk_cuda_close(spk_cuda *cuda);              /* NULL is fine; frees nothing that was allocated from it */
uint32_t    spk_cuda_sm_count(const spk_cuda *cuda);

/* Zeroed device memory, 256-byte aligned.  A failure says what was asked and what is free. */
SPK_MUST_CHECK spk_status spk_cuda_allocate(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **d_out,
                                            spk_error *err);
void spk_cuda_free(spk_cuda *cuda, void *d_memory);
SPK_MUST_CHECK spk_status spk_cuda_upload(spk_cuda *cuda, void *d_to, const void *from, uint64_t size_bytes, spk_error *err);
SPK_MUST_CHECK spk_status spk_cuda_download(spk_cuda *cuda, void *to, const void *d_from, uint64_t size_bytes, spk_error *err);
/* Every byte becomes `byte`. */
SPK_MUST_CHECK spk_status spk_cuda_fill(spk_cuda *cuda, void *d_memory, uint8_t byte, uint64_t size_bytes, spk_error *err);

/* ---- A step: kernels recorded once, replayed for every token ---- */

SPK_MUST_CHECK spk_status spk_cuda_step_begin(spk_cuda *cuda, spk_error *err);
/* Ends recording; *out replays what was recorded.  Frees nothing that the kernels use. */
SPK_MUST_CHECK spk_status spk_cuda_step_end(spk_cuda *cuda, spk_cuda_step **out, spk_error *err);
/* Queue `count` replays and return at once. */
SPK_MUST_CHECK spk_status spk_cuda_step_run(spk_cuda *cuda, const spk_cuda_step *step, uint32_t count, spk_error *err);
void     spk_cuda_step_free(spk_cuda_step *step);        /* NULL is fine */
/* Wait for everything queued. */
SPK_MUST_CHECK spk_status spk_cuda_wait(spk_cuda *cuda, spk_error *err);

/* True if the GPU kernels take a matrix: F32 F16 BF16 in ROWS and Q4_K Q5_K Q6_K Q8_0 in T32, of a width that is a
 * multiple of 32. */
bool spk_cuda_accepts(const spk_matrix *w);

/* What steps share, in device memory.  A step evaluates tokens[position]; its end writes chosen[position + 1], copies it to
 * tokens[position + 1] if that is SPK_CUDA_TOKEN_FREE, and moves the position on.  So given tokens are forced by writing
 * them ahead, and free decoding needs nothing from the host. */
#define SPK_CUDA_TOKEN_FREE UINT32_MAX
typedef struct {
    uint32_t *d_tokens, *d_chosen;   /* [context + 1] */
    uint32_t *d_position;
} spk_cuda_sequence;

/* x = row of the embedding of the current token; cos_sin[rope_dim] = cos, sin of position * inverse_frequency[i]. */
typedef struct {
    spk_cuda_sequence sequence;
    spk_matrix    embedding;
    const double *d_inverse_frequency;   /* [rope_dim/2] */
    uint32_t      rope_dim;
    float        *d_x, *d_cos_sin;
} spk_cuda_embed;
void spk_cuda_launch_embed(spk_cuda *cuda, const spk_cuda_embed *args);

/* Input vector of a GEMV: x + add[0] + add[1] (each may be NULL), then RMSNorm if norm_weight is set.  count is a
 * multiple of 32.  x_out, where set, gets the sum before the norm and is none of the inputs. */
typedef struct {
    const float *x, *add[2], *norm_weight;
    float       *x_out;
    float        eps;
    uint32_t     count;
    uint32_t     has_rest;   /* 1: tiles multiply two int8 vectors, the second for what the first leaves out */
} spk_cuda_source;

/* y[row_count] = W x; or, where up.data is set, y = silu(W x) * (up x), both of one type and shape. */
typedef struct {
    spk_matrix w, up;        /* data are device pointers */
    float     *y;
} spk_cuda_segment;

enum { SPK_CUDA_SEGMENT_MAX = 4 };
typedef struct {
    spk_cuda_source  source;
    spk_cuda_segment segments[SPK_CUDA_SEGMENT_MAX];
    uint32_t         segment_count;
    /* Where set, this ends a greedy step: the largest output of the first segment (ties to the lower row) is chosen. */
    const spk_cuda_sequence *greedy;
    unsigned long long *d_best;          /* scratch for it: one key, zero before the first step, zero after each */
    uint32_t           *d_arrivals;      /* likewise: a counter that wraps to zero by itself */
} spk_cuda_gemv;
void spk_cuda_launch_gemv(spk_cuda *cuda, const spk_cuda_gemv *args);

/* ---- GDN ---- */

/* One layer's recurrence for one token.  u [2 key_dim + value_dim], z [value_dim], alpha and beta [v_head_count] are a
 * GEMV's outputs; out [value_dim] is the input of the output projection.
 * conv_state is a ring [conv_kernel][channel_count]: slot (position % conv_kernel) gets this token's u.
 * delta_state [v_head][v_dim][k_dim].  k_dim is 32, 64, 128 or 256; v_dim a multiple of 32, at most 256. */
typedef struct {
    const uint32_t *d_position;
    const float *u, *z, *alpha, *beta;
    const float *taps, *a, *dt, *norm_weight;   /* as in the model: [channel][conv_kernel], [v_head] twice, [v_dim] */
    float   *conv_state, *delta_state;
    float   *conv_out;       /* [2 key_dim + value_dim]; scratch of the kernels that are not fused */
    float   *delta_out;      /* [value_dim]; likewise */
    float   *out;
    uint32_t k_head_count, v_head_count, k_dim, v_dim, conv_kernel;
    float    eps;
} spk_cuda_gdn;
/* All in one kernel, or: convolution + SiLU + L2 norms in one; convolution + SiLU, then L2 norms; then the delta rule and
 * the gated norm in one each.  All give the same bits.  FUSED means CONV_FUSED where k_dim is not v_dim or is 256. */
typedef enum { SPK_CUDA_GDN_PLAIN, SPK_CUDA_GDN_CONV_FUSED, SPK_CUDA_GDN_FUSED } spk_cuda_gdn_fusion;
void spk_cuda_launch_gdn(spk_cuda *cuda, const spk_cuda_gdn *args, spk_cuda_gdn_fusion fusion);

/* ---- Attention ---- */

/* One layer for one token: norms and rotation of q and k, storing k and v, softmax(q k) v over all positions, the
 * sigmoid gate.  q [head][(2 if gated) * head_dim], k and v [kv_head][head_dim] are a GEMV's outputs.
 * Caches are F16 [position][kv_head][head_dim].  head_dim is 64, 128 or 256; head_count / kv_head_count at most 8. */
typedef struct {
    const uint32_t *d_position;
    const float *q, *k, *v, *q_norm, *k_norm, *cos_sin;
    uint16_t *k_cache, *v_cache;
    float    *partial;       /* spk_cuda_attention_scratch_bytes */
    float    *out;           /* [head][head_dim] */
    uint32_t  head_count, kv_head_count, head_dim, rope_dim, is_gated;
    float     eps;
} spk_cuda_attention;
uint64_t spk_cuda_attention_scratch_bytes(const spk_cuda *cuda, const spk_cuda_attention *args);
void     spk_cuda_launch_attention(spk_cuda *cuda, const spk_cuda_attention *args);

/* ---- Experts ---- */

/* Routed experts' gate and up for one token: h[rank][expert_ff] = silu(G x) * (U x) for the chosen experts.
 * Where logits is set, every CTA selects the top experts for itself (value descending, ties to the lower index) and the
 * first one writes choice and weight; else choice and weight are read.  At most 256 experts, 64 used. */
typedef struct {
    spk_cuda_source source;
    spk_matrix      gate, up;        /* expert 0; device pointers */
    uint64_t        expert_stride_bytes;
    const float    *logits;          /* [expert_count], or NULL */
    uint32_t       *choice;          /* [used] */
    float          *weight;          /* [used], softmax over the chosen */
    float          *h;
    uint32_t        expert_count, used_count;
} spk_cuda_experts_up;
void spk_cuda_launch_experts_up(spk_cuda *cuda, const spk_cuda_experts_up *args);

/* Selection alone: choice and weight from logits. */
typedef struct {
    const float *logits;
    uint32_t    *choice;
    float       *weight;
    uint32_t     expert_count, used_count;
} spk_cuda_top_k;
void spk_cuda_launch_top_k(spk_cuda *cuda, const spk_cuda_top_k *args);

/* routed[hidden] = sum over ranks of weight * D_choice h[rank], in order of rank;
 * shared[hidden] = sigmoid(*shared_logit) * (S shared_h), where shared_down.data is set. */
typedef struct {
    spk_matrix      down, shared_down;
    uint64_t        expert_stride_bytes;
    const uint32_t *choice;
    const float    *weight, *h, *shared_h, *shared_logit;
    float          *routed, *shared;
    uint32_t        used_count;
} spk_cuda_experts_down;     /* h and shared_h are multiplied as two int8 vectors (has_rest) */
void spk_cuda_launch_experts_down(spk_cuda *cuda, const spk_cuda_experts_down *args);

/* out = a * b elementwise forms that fused kernels fold in: for the switches' other side. */
typedef enum { SPK_CUDA_ADD, SPK_CUDA_SWIGLU, SPK_CUDA_SIGMOID_SCALE } spk_cuda_elementwise_op;
typedef struct {
    spk_cuda_elementwise_op op;
    const float *a, *b, *c;  /* ADD: a + b + c (c may be NULL); SWIGLU: silu(a) * b; SIGMOID_SCALE: a * sigmoid(*b) */
    float       *out;
    uint32_t     count;
} spk_cuda_elementwise;
void spk_cuda_launch_elementwise(spk_cuda *cuda, const spk_cuda_elementwise *args);

/* RMSNorm alone: out = source's vector, summed and normed. */
typedef struct {
    spk_cuda_source source;
    float          *out;
} spk_cuda_norm;
void spk_cuda_launch_norm(spk_cuda *cuda, const spk_cuda_norm *args);

#ifdef __cplusplus
}
#endif
#endif
