/* kernels/kernels.h - the operations of a decode step, as a table that each backend fills.
 *
 * spk_kernels_ref() fills every slot with plain F32 arithmetic on dequantized weights (double accumulation, no
 * contraction): the definition of each operation.  The fast tables multiply with int8 activations and keep an F16
 * cache.  Every kernel is a pure function over a *range* of independent units (row
 * groups, heads), so the caller splits ranges over threads in any way and gets the same bits.
 *
 * No allocation, no threads, no I/O, no globals.  Pointers do not alias unless said.  Tolerances of fast slots
 * against the reference are derived in tests/checkkern_*.h, where they are checked.
 *
 * Formulas: GGUF conventions of Qwen3 / Qwen3.5 models.  h below is always a normed input vector.
 */
#ifndef SPK_KERNELS_H
#define SPK_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "formats/layout.h"

/* ---- Activations ----
 *
 * One vector x[col_count], prepared once for all matrices that it multiplies.  f32 is always valid.  When the
 * table has quantizes_activations and col_count % 256 == 0, the pairs are valid too: x ~ scale * q per group of 32,
 *     scale = max|x| / 127 (F32),  q = round-half-even(x / scale) within -127..127,  all zero when scale is 0.
 * Laid out for T32, where a 32-byte vector is one 16-byte chunk of two neighbouring lanes: a pair is two
 * super-blocks of 256 side by side, 2i and 2i+1 in pair i.  When col_count/256 is odd, neighbouring lanes of a tile
 * are two rows with the same columns: pair i then holds super-block i twice, and kernels need no second form. */
typedef struct {
    int8_t  q8[16][2][16];     /* [chunk][super-block]: x[16 chunk .. + 15] */
    float   scale4[8][2][4];   /* [group][super-block]: the group's scale, four times */
    float   sum32[2][2][4];    /* [half][super-block]: groups 4 half .. + 3, scale * (sum of q), for K-quants' mins */
    float   offset[2][2][4];   /* the same groups: -32 * scale, for Q6_K, whose codes are 32 too large */
    int16_t sum16[2][2][8];    /* [half][super-block]: sum of q of chunks 8 half .. + 7, for Q6_K too */
} spk_activation_pair;

typedef struct {
    uint64_t             col_count;
    float               *f32;
    spk_activation_pair *pairs;    /* 64-byte aligned; NULL unless col_count % 256 == 0 */
} spk_activation;

/* Bytes that one activation of a width needs, and carving it out of a 64-byte aligned block of that size. */
uint64_t       spk_activation_bytes(uint64_t col_count);
spk_activation spk_activation_carve(void *block, uint64_t col_count);

/* What the codes leave out: rest[col_count] = x - scale * q, exact in F32 but for one rounding.  x is quantized.  A
 * second activation made of it makes a product about 250 times more exact: two vectors for one pass over the weights. */
void spk_activation_residual(const spk_activation *x, float *rest);

/* y[t][r] = sum_c W[r][c] x[t][c] for rows of units [unit_begin, unit_end) and t < token_count.
 * A unit is a row group of T32 (rows_per_group rows, the last group may be short) or a row of ROWS. */
typedef void spk_matmul_fn(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                           uint64_t unit_begin, uint64_t unit_end);

/* One layer's GDN shape and state for one sequence. */
typedef struct {
    uint32_t k_head_count, v_head_count;    /* V head j uses K head j % k_head_count */
    uint32_t k_dim, v_dim;
    uint32_t conv_kernel;
    float    eps;
} spk_gdn_shape;

/* One layer's KV cache for one sequence; the element type is the table's kv_type (F32 or F16). */
typedef struct {
    void    *k, *v;                          /* [position][kv_head][head_dim] */
    uint32_t head_count, kv_head_count, head_dim;
} spk_attention_cache;

typedef struct spk_kernels {
    const char *name;                        /* "ref", "avx2", "vnni" */
    bool        quantizes_activations;
    uint32_t    kv_type;                     /* SPK_TYPE_F32 or SPK_TYPE_F16 */

    /* By [type][layout]; never NULL for a type that spk_type_find knows in ROWS, and for the four T32 types. */
    spk_matmul_fn *matmul[SPK_TYPE_LIMIT][3];

    /* Fills everything but f32 (which the caller has written); a no-op in tables that do not quantize. */
    void (*quantize)(spk_activation *x);

    /* y[i] = x[i] * w[i] / sqrt(mean(x^2) + eps), n elements; y may be x. */
    void (*rms_norm)(const float *x, const float *w, uint64_t n, float eps, float *y);

    /* out[i] = silu(gate[i]) * up[i]; silu(t) = t / (1 + exp(-t)).  out may be gate or up. */
    void (*swiglu)(const float *gate, const float *up, uint64_t n, float *out);

    /* out[i] += scale * x[i]. */
    void (*add_scaled)(float *out, const float *x, float scale, uint64_t n);

    /* The k largest of logits[n], by value descending, ties to the lower index; weights = softmax over the k.
     * k <= n. */
    void (*top_k)(const float *logits, uint32_t n, uint32_t k, uint32_t *index, float *weight);

    /* In place on one head x[head_dim]: RMSNorm with w, then half-split rotation of the first rope_dim elements,
     * pair (i, i + rope_dim/2), angle = cos_sin[2i], cos_sin[2i+1] precomputed by the caller in double. */
    void (*qk_norm_rope)(float *x, const float *w, uint32_t head_dim, uint32_t rope_dim, const float *cos_sin,
                         float eps);

    /* Store one head's k or v at element offset of the cache, converting to kv_type. */
    void (*kv_store)(const float *x, uint32_t head_dim, void *cache, uint64_t element_offset);

    /* One query head against positions 0..position: softmax(q.k / sqrt(head_dim)) v.
     * q and out are [head_dim]; scores is scratch of position + 1 floats. */
    void (*attend)(const spk_attention_cache *cache, uint32_t head, uint64_t position, const float *q,
                   float *scores, float *out);

    /* out[i] *= sigmoid(gate[i]). */
    void (*sigmoid_gate)(float *out, const float *gate, uint64_t n);

    /* Causal depthwise convolution and SiLU of channels [channel_begin, channel_end) for one token.
     * taps [channel][conv_kernel], tap 0 oldest; state [conv_kernel-1][channel_count], oldest first: raw inputs of
     * the previous tokens; the state is shifted and u appended.  y[c] = silu(sum taps * history). */
    void (*gdn_conv)(const float *u, const float *taps, float *state, uint64_t channel_count, uint32_t conv_kernel,
                     uint64_t channel_begin, uint64_t channel_end, float *y);

    /* x[n] / max(sqrt(sum x^2), eps) * scale, in place. */
    void (*l2_norm)(float *x, uint64_t n, float eps, float scale);

    /* One V head's delta rule for one token, then the gated norm.
     * state [v_dim][k_dim] (contiguous along the K dimension), q and k normalised, q already scaled by 1/sqrt(k_dim):
     *   S *= decay;  d = beta * (v - S k);  S += d k^T;  o = S q;  out = rms_norm(o; norm_w) * silu(z)  */
    void (*gdn_head)(const spk_gdn_shape *shape, float *state, const float *q, const float *k, const float *v,
                     float decay, float beta, const float *norm_w, const float *z, float *out);
} spk_kernels;

const spk_kernels *spk_kernels_ref(void);
/* NULL where the CPU or the build lacks AVX2, FMA and F16C. */
const spk_kernels *spk_kernels_avx2(void);
/* The same with the byte products of AVX-512 in vectors of 32 bytes; NULL where the CPU lacks VL, BW, VNNI or GFNI. */
const spk_kernels *spk_kernels_vnni(void);
/* The fastest of these two that this CPU runs; NULL if neither. */
const spk_kernels *spk_kernels_fast(void);

#endif
