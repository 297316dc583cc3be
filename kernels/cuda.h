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
#include "kernels/sampling.h"

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

/* ---- Transfers: many threads fill the device's memory at the speed of its link ---- */

/* Device memory as it comes, 256-byte aligned: for what is overwritten as a whole.  Fails like spk_cuda_allocate. */
SPK_MUST_CHECK spk_status spk_cuda_allocate_raw(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **d_out,
                                                spk_error *err);

/* How bytes reach a device: a table, so that the loader (runtime/gpu_load_run.c) can be tested without one.  A slot holds one
 * copy at a time.  Any thread may call; a slot and a range of memory belong to one thread at a time. */
typedef struct {
    void *context;
    /* Pin page-aligned memory, so that copies out of it run at the link's speed and behind the caller's back.  Pages of a
     * read-only file mapping need is_host_writing false; memory that was never written must have it true, or the system's
     * page of zeros is what is pinned.  False: the system refuses, nothing happened. */
    bool     (*pin)(void *context, const void *memory, uint64_t size_bytes, bool is_host_writing);
    void     (*unpin)(void *context, const void *memory);      /* as pinned; no copy out of it may be under way */
    /* Start a copy.  `from` must stay as it is until wait.  Memory that is not pinned is taken too, slowly. */
    spk_status (*start)(void *context, uint32_t slot, void *d_to, const void *from, uint64_t size_bytes, spk_error *err);
    spk_status (*wait)(void *context, uint32_t slot, spk_error *err);   /* until the slot's last copy is done; sleeps */
    void     (*close)(void *context);          /* every copy must have been waited for */
} spk_transfer;

/* The GPU's.  Copies are spread over stream_count queues, which may run side by side: 1 to SPK_CUDA_STREAM_MAX. */
enum { SPK_CUDA_STREAM_MAX = 8 };
SPK_MUST_CHECK spk_status spk_cuda_transfer_open(spk_cuda *cuda, uint32_t slot_count, uint32_t stream_count,
                                                 spk_transfer *out, spk_error *err);

/* ---- A step: kernels recorded once, replayed for every token ---- */

SPK_MUST_CHECK spk_status spk_cuda_step_begin(spk_cuda *cuda, spk_error *err);
/* As spk_cuda_step_begin, but of what is launched only the first kernel_limit kernels are recorded, and ticks.  For measuring what
 * each kernel adds to a step. */
SPK_MUST_CHECK spk_status spk_cuda_step_begin_part(spk_cuda *cuda, uint32_t kernel_limit, spk_error *err);
/* Kernels launched since recording began, recorded or not; a launch function may launch several. */
uint32_t spk_cuda_launch_count(const spk_cuda *cuda);
/* Ends recording; *out replays what was recorded.  Frees nothing that the kernels use. */
SPK_MUST_CHECK spk_status spk_cuda_step_end(spk_cuda *cuda, spk_cuda_step **out, spk_error *err);
/* Queue `count` replays and return at once. */
SPK_MUST_CHECK spk_status spk_cuda_step_run(spk_cuda *cuda, const spk_cuda_step *step, uint32_t count, spk_error *err);
void     spk_cuda_step_free(spk_cuda_step *step);        /* NULL is fine */
/* Wait for everything queued. */
SPK_MUST_CHECK spk_status spk_cuda_wait(spk_cuda *cuda, spk_error *err);
/* *idle: everything queued is done.  Fails where something of it failed. */
SPK_MUST_CHECK spk_status spk_cuda_is_idle(spk_cuda *cuda, bool *idle, spk_error *err);

/* Host memory that kernels can write, zeroed: *d_out is its address on the device.  A word appears whole, soon after the
 * kernel's store.  Freed by unshare. */
SPK_MUST_CHECK spk_status spk_cuda_share(spk_cuda *cuda, uint64_t size_bytes, const char *what, void **out, void **d_out,
                                         spk_error *err);
void spk_cuda_unshare(spk_cuda *cuda, void *memory);

/* True if the GPU kernels take a matrix: F32 F16 BF16 in ROWS and Q4_K Q5_K Q6_K Q8_0 in T32, of a width that is a
 * multiple of 32. */
bool spk_cuda_accepts(const spk_matrix *w);

/* What steps share, in device memory.  A step evaluates tokens[position]; its end writes chosen[position + 1], copies it to
 * tokens[position + 1] if that is SPK_CUDA_TOKEN_FREE, and moves the position on.  So given tokens are forced by writing
 * them ahead, and free decoding needs nothing from the host. */
#define SPK_CUDA_TOKEN_FREE UINT32_MAX
typedef struct {
    uint32_t *d_tokens, *d_chosen;   /* [context + 1]; no kernel reads chosen, which may lie in host memory */
    uint32_t *d_position;
    uint32_t *d_step;                /* counts the steps that ended; never set back */
} spk_cuda_sequence;

/* How a kernel that was started early learns that something other than its predecessor's whole work is complete: another one
 * sets *d_flag to *d_step + 1.  d_flag NULL: there is no such signal, and the kernel waits for its predecessor. */
typedef struct {
    uint32_t       *d_flag;
    const uint32_t *d_step;
} spk_cuda_signal;

/* Ends a part of a step: counts it (*d_step), but stays at its position. */
void spk_cuda_launch_tick(spk_cuda *cuda, uint32_t *d_step);

/* x = row of the embedding of the current token; cos_sin[rope_dim] = cos, sin of 2 pi position * turns[i]. */
typedef struct {
    spk_cuda_sequence sequence;
    spk_matrix    embedding;
    const double *d_turns;               /* [rope_dim/2]: turns a position, rope_base^(-2 i / rope_dim) / 2 pi */
    uint32_t      rope_dim;
    float        *d_x, *d_cos_sin;
    long long    *d_clear;               /* sums of clear_count rows of routers (spk_cuda_router) become zero */
    uint32_t      clear_count;
} spk_cuda_embed;
void spk_cuda_launch_embed(spk_cuda *cuda, const spk_cuda_embed *args);

/* Input vector of a GEMV: v = x + add[0] + add[1] + add[2] (each add may be NULL), then one of
 *   norm_weight set    RMSNorm over all: v * norm_weight / rms(v)
 *   squares set        per head of head_dim (32, 64 or 128): v / sqrt(mean + eps), where mean is the sum of the head's
 *                      squares[i / 32] / head_dim: what spk_cuda_launch_gdn leaves when FUSED
 *   factor set         v as a norm kernel left it, still to be multiplied by *factor
 *   part_totals set    per head of head_dim (64, 128 or 256): what spk_cuda_launch_attention left there and in x at position *d_position
 * count is a multiple of 32.  x_out, where set, gets the sum before the norm and is none of the inputs. */
typedef struct {
    const float *x, *add[3], *norm_weight, *squares, *factor, *part_totals;
    const uint32_t *d_position;          /* of part_totals */
    float       *x_out;
    float        eps;
    uint32_t     count, head_dim;
    uint32_t     has_rest;   /* 1: tiles multiply two int8 vectors, the second for what the first leaves out */
} spk_cuda_source;

/* y[row_count] = W x; or, where up.data is set, y = silu(W x) * (up x), both of one type and shape.
 * residual, where set, is added: y = residual + W x; it may be y itself, and was complete when the kernel began. */
typedef struct {
    spk_matrix   w, up;      /* data are device pointers */
    float       *y;
    const float *residual;
} spk_cuda_segment;

/* A router: sums[e] = sum over c of W[e][c] * norm[c] * x[c] in units of 2^-32, where W's rows are the experts' and, behind them, the
 * shared one's; squares[g] = the sum of squares of x's 16 values from 16 g on.  Logits are sums times 2^-32 / rms(x)
 * (kernels/router_cuda.cuh).  A kernel adds to sums: they are zero before its launch.  column_count is that of x, a multiple of 32.
 * weights[c / 4][e][c % 4] = W[e][c] * norm[c], 16-byte aligned, is what spk_cuda_launch_router_source makes. */
enum { SPK_CUDA_ROUTER_GROUP = 16, SPK_CUDA_ROUTER_COLUMNS_MAX = 32768 };
/* Row e's sum is sums[e / 4 * 16 + e % 4]: four of them in 128 bytes (kernels/router_cuda.cuh says why).  Words for row_count rows, a
 * multiple of 4: */
static inline uint64_t spk_cuda_router_words(uint64_t row_count) { return row_count * 4; }
typedef struct {
    const float *weights;
    uint32_t     row_count, column_count;
    long long   *sums;
    float       *squares;
} spk_cuda_router;
/* experts and shared (one row; data NULL: none): F32, F16 or BF16 in ROWS. */
typedef struct {
    spk_matrix   experts, shared;
    const float *norm_weight;
    float       *out;
} spk_cuda_router_source;
void spk_cuda_launch_router_source(spk_cuda *cuda, const spk_cuda_router_source *args);

enum { SPK_CUDA_SEGMENT_MAX = 4 };
typedef struct {
    spk_cuda_source  source;
    spk_cuda_segment segments[SPK_CUDA_SEGMENT_MAX];
    uint32_t         segment_count;
    spk_cuda_router  router;             /* where sums is set: of the only segment's outputs y */
    /* Where set, this ends a greedy step: the largest output of the first segment (ties to the lower row) is chosen. */
    const spk_cuda_sequence *greedy;
    unsigned long long *d_best;          /* scratch for it: one key, zero before the first step, zero after each */
    uint32_t           *d_arrivals;      /* likewise: a counter that wraps to zero by itself */
    bool             is_streamed;        /* the kernel for all shapes, also where there is a faster one; the same bits */
} spk_cuda_gemv;
void spk_cuda_launch_gemv(spk_cuda *cuda, const spk_cuda_gemv *args);
/* A router alone; x as a residual stream has it. */
void spk_cuda_launch_router(spk_cuda *cuda, const spk_cuda_router *args, const float *x);

/* ---- GDN ---- */

/* One layer's recurrence for one token.  u [2 key_dim + value_dim], alpha and beta [v_head_count] are a GEMV's outputs.
 * conv_state is a ring [conv_kernel][channel_count]: slot (position % conv_kernel) gets this token's u.
 * delta_state [SPK_CUDA_GDN_STATES][v_head][v_dim][k_dim]: the state before position p has index p % SPK_CUDA_GDN_STATES, so
 * that with two of them the last token can be taken back.  k_dim is 32, 64, 128 or 256; v_dim a multiple of 32, at most 256. */
enum { SPK_CUDA_GDN_STATES = 2 };
typedef struct {
    const uint32_t *d_position;
    const float *u, *z, *alpha, *beta;
    const float *taps, *a, *dt, *norm_weight;   /* as in the model: [channel][conv_kernel], [v_head] twice, [v_dim] */
    float   *conv_state, *delta_state;
    float   *conv_out;       /* [2 key_dim + value_dim]; scratch of the kernels that are not fused */
    float   *delta_out;      /* [value_dim]; likewise */
    float   *out;            /* [value_dim] */
    float   *squares;        /* [value_dim / 32]; for FUSED */
    uint32_t k_head_count, v_head_count, k_dim, v_dim, conv_kernel;
    float    eps;
} spk_cuda_gdn;
/* FUSED: one kernel; out gets o * norm_weight * silu(z), and the norm's factors are left to the next GEMV's source (squares).
 * CONV_FUSED: convolution + SiLU + L2 norms in one, then the delta rule, then the gated norm: out is the input of the output
 * projection.  PLAIN: convolution + SiLU and the L2 norms too are kernels of their own.  All give the same bits. */
typedef enum { SPK_CUDA_GDN_PLAIN, SPK_CUDA_GDN_CONV_FUSED, SPK_CUDA_GDN_FUSED } spk_cuda_gdn_fusion;
bool spk_cuda_gdn_can_fuse(uint32_t k_dim, uint32_t v_dim);   /* for FUSED: equal, at most 128 */
void spk_cuda_launch_gdn(spk_cuda *cuda, const spk_cuda_gdn *args, spk_cuda_gdn_fusion fusion);

/* ---- Attention ---- */

/* How keys and values are kept: as F16 values, or as int8 with an F16 scale for each 32 dimensions of a position, 1.0625
 * bytes a value; x is then off by at most 1/254 of the largest of its 32, and 2^-11 of itself. */
typedef enum { SPK_CUDA_KV_F16, SPK_CUDA_KV_Q8 } spk_cuda_kv_type;

/* One layer for one token: norms and rotation of q and k, storing k and v at *d_position, softmax(q k) v over all positions
 * up to it, the sigmoid gate.  q [head][(2 if gated) * head_dim], k and v [kv_head][head_dim] are a GEMV's outputs;
 * q_norm and k_norm [head_dim]; cos_sin [rope_dim] as embed makes it; it, x and the output are 16-byte aligned.
 * head_dim is 64, 128 or 256; rope_dim is even and at most head_dim; head_count is a multiple of kv_head_count.
 * Caches are spk_cuda_attention_cache_bytes each, 256-byte aligned, of any content at positions that were not stored.
 * Their layout is the kernel's own (kernels/attention_cache_cuda.cuh). */
typedef struct {
    const uint32_t *d_position;
    const float *q, *k, *v, *q_norm, *k_norm, *cos_sin;
    void     *k_cache, *v_cache;
    float    *partial;       /* spk_cuda_attention_scratch_bytes, zero before the first step; layers may share it */
    float    *out;           /* [head][head_dim]; where part_totals is set, SPK_CUDA_PARTS_MAX of them */
    /* [SPK_CUDA_PARTS_MAX][head] of (top, total), or NULL.  Where set, a context of up to SPK_CUDA_PARTS_MAX * SPK_CUDA_PART_POSITIONS positions
     * comes in parts of SPK_CUDA_PART_POSITIONS: out[p] is what part p alone gives, and of several the result is the mean weighted with
     * total * 2^(top - the largest top).  Of one part, or of a longer context, out[0] is the result, and no totals are written. */
    float    *part_totals;
    uint32_t  head_count, kv_head_count, head_dim, rope_dim, is_gated;
    uint32_t  context_tokens;                    /* positions that the caches have room for */
    spk_cuda_kv_type kv_type;
    float     eps;
} spk_cuda_attention;
enum { SPK_CUDA_PART_POSITIONS = 128, SPK_CUDA_PARTS_MAX = 4 };
/* Whether part_totals may be set. */
bool     spk_cuda_attention_has_parts(const spk_cuda *cuda, const spk_cuda_attention *args);
/* Bytes of k_cache, and as many of v_cache: positions are rounded up to 32. */
uint64_t spk_cuda_attention_cache_bytes(const spk_cuda_attention *args);
uint64_t spk_cuda_attention_scratch_bytes(const spk_cuda *cuda, const spk_cuda_attention *args);
void     spk_cuda_launch_attention(spk_cuda *cuda, const spk_cuda_attention *args);

/* ---- Experts ---- */

/* How an expert kernel learns which experts to use.  choice NULL: every CTA selects for itself from a router's sums (the larger
 * first, as F32; ties to the lower index; weights are a softmax of the logits of those chosen).  Else choice and weight [used_count]
 * are read.  The shared expert's sum is that of row expert_count.  At most 1024 experts, 64 used. */
typedef struct {
    const long long *sums;               /* of spk_cuda_router, as squares */
    const float     *squares;
    const uint32_t  *choice;
    const float     *weight;
    uint32_t         expert_count, used_count, column_count;     /* column_count: of the router's x */
    float            eps;
} spk_cuda_routing;

/* Routed experts' gate and up, of one type and shape, for one token: h[rank][expert_ff] = silu(G x) * (U x) for the chosen
 * experts, and the same of the shared one where shared_h is set.  source.x_out is not written and source.has_rest is 0: x is multiplied as
 * one int8 vector.
 * routed_ready: where set, it is given as soon as this kernel knows that what `routing` names is complete. */
typedef struct {
    spk_cuda_source  source;
    spk_cuda_routing routing;
    spk_matrix       gate, up;        /* expert 0; device pointers */
    uint64_t         expert_stride_bytes;
    float           *h;
    spk_matrix       shared_gate, shared_up;
    float           *shared_h;
    spk_cuda_signal  routed_ready;
    bool             is_streamed;     /* as of a GEMV */
} spk_cuda_experts_up;
void spk_cuda_launch_experts_up(spk_cuda *cuda, const spk_cuda_experts_up *args);

/* Selection alone: choice and weight from a router's sums.  routing.choice is NULL. */
typedef struct {
    spk_cuda_routing routing;
    uint32_t        *choice;
    float           *weight;
} spk_cuda_top_k;
void spk_cuda_launch_top_k(spk_cuda *cuda, const spk_cuda_top_k *args);

/* routed[p][hidden] = sum over the ranks of part p of weight * D_choice h[rank], in order of rank; parts are consecutive
 * ranks, and their count is spk_cuda_experts_down_parts.
 * shared[hidden] = sigmoid(the shared expert's logit) * (S shared_h), where shared_down.data is set.
 * sum, where set (one part only): sum = residual + routed (+ shared) instead; residual may be sum itself.
 * routed_ready: what `routing` names is complete; with it the experts' weights are asked for while their h are still being made. */
enum { SPK_CUDA_DOWN_PARTS_MAX = 2 };
typedef struct {
    spk_cuda_routing routing;
    spk_matrix       down, shared_down;
    uint64_t         expert_stride_bytes;
    const float     *h, *shared_h;
    float           *routed[SPK_CUDA_DOWN_PARTS_MAX], *shared, *sum;
    const float     *residual;
    spk_cuda_signal  routed_ready;
    bool             is_streamed;     /* as of a GEMV */
} spk_cuda_experts_down;     /* h and shared_h are multiplied as two int8 vectors (has_rest) */
uint32_t spk_cuda_experts_down_parts(const spk_cuda *cuda, const spk_matrix *down, uint32_t used_count);
void     spk_cuda_launch_experts_down(spk_cuda *cuda, const spk_cuda_experts_down *args);

/* out = a * b elementwise forms that fused kernels fold in: for the switches' other side. */
typedef enum { SPK_CUDA_ADD, SPK_CUDA_SWIGLU, SPK_CUDA_SHARED_SCALE } spk_cuda_elementwise_op;
typedef struct {
    spk_cuda_elementwise_op op;
    const float *a, *b, *c, *d;   /* ADD: a + b + c + d (c, d may be NULL); SWIGLU: silu(a) * b; SHARED_SCALE: a * sigmoid(the shared expert's logit) */
    spk_cuda_routing routing;     /* of SHARED_SCALE */
    float       *out;
    uint32_t     count;
} spk_cuda_elementwise;
void spk_cuda_launch_elementwise(spk_cuda *cuda, const spk_cuda_elementwise *args);

/* RMSNorm alone, of source's sum: out = v * norm_weight, factor = 1 / rms(v), which whoever reads out multiplies in. */
typedef struct {
    spk_cuda_source source;
    float          *out, *factor;
} spk_cuda_norm;
void spk_cuda_launch_norm(spk_cuda *cuda, const spk_cuda_norm *args);

/* ---- Sampling ---- */

/* The end of a step that is not greedy: what spk_sampler_next draws from the same logits with the same options and state.
 * The options and the state lie in *d_sampling, and the state moves on.  Where there is nothing to draw from, chosen is
 * SPK_CUDA_TOKEN_FREE, the state stays, and the sequence goes on with token 0. */
typedef struct {
    spk_cuda_sequence sequence;
    const float      *logits;        /* [vocab_size], 16-byte aligned */
    uint32_t          vocab_size;    /* at most 2^24 */
    uint32_t          cluster_max;   /* CTAs at work; 0: as many as the device takes.  Never changes a result */
    spk_sampling     *d_sampling;
} spk_cuda_sample;
void spk_cuda_launch_sample(spk_cuda *cuda, const spk_cuda_sample *args);

/* ---- What the device is, for reports ---- */

typedef struct {
    char     name[128];
    uint32_t sm_version, sm_count;                    /* 90 is sm_90 */
    uint32_t driver_version, runtime_version;         /* of CUDA: 13000 is 13.0; driver: the newest that it can run */
    double   sm_clock_max_hz, memory_clock_hz;
} spk_cuda_description;
SPK_MUST_CHECK spk_status spk_cuda_describe(spk_cuda *cuda, spk_cuda_description *out, spk_error *err);
/* Device memory, of all processes. */
SPK_MUST_CHECK spk_status spk_cuda_memory(spk_cuda *cuda, uint64_t *out_free_bytes, uint64_t *out_total_bytes,
                                          spk_error *err);

/* The fastest of pass_count passes (at least 1, after one more to warm up) that only read a buffer of max_bytes, or of what
 * is free; SPK_E_MEMORY below 64 MiB.  Every pass's sum is checked.  Queued steps must have ended. */
typedef struct {
    uint64_t buffer_bytes;
    double   bytes_per_s;
    double   sm_clock_hz;                             /* while that pass ran */
} spk_cuda_bandwidth;
SPK_MUST_CHECK spk_status spk_cuda_read_bandwidth(spk_cuda *cuda, uint64_t max_bytes, uint32_t pass_count,
                                                  spk_cuda_bandwidth *out, spk_error *err);

#ifdef __cplusplus
}
#endif
#endif
