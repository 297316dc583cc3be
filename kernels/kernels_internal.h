/* kernels/kernels_internal.h - what the files of kernels/ share and nobody else includes.
 *
 * The reference functions have names here because faster tables fall back to them slot by slot.
 */
#ifndef SPK_KERNELS_INTERNAL_H
#define SPK_KERNELS_INTERNAL_H

#include "kernels/kernels.h"

/* Pairs of an activation of this width: see spk_activation_pair. */
static inline uint64_t spk_activation_pair_count(uint64_t col_count) {
    uint64_t superblock_count = col_count / SPK_SUPERBLOCK;
    return superblock_count % 2 == 0 ? superblock_count / 2 : superblock_count;
}

/* Contracts: the slots of the same names in spk_kernels. */
spk_matmul_fn spk_ref_matmul;                                                       /* any type, any layout */
void spk_ref_quantize(spk_activation *x);
void spk_ref_rms_norm(const float *x, const float *w, uint64_t n, float eps, float *y);
void spk_ref_swiglu(const float *gate, const float *up, uint64_t n, float *out);
void spk_ref_add_scaled(float *out, const float *x, float scale, uint64_t n);
void spk_ref_top_k(const float *logits, uint32_t n, uint32_t k, uint32_t *index, float *weight);
void spk_ref_qk_norm_rope(float *x, const float *w, uint32_t head_dim, uint32_t rope_dim, const float *cos_sin,
                          float eps);
void spk_ref_kv_store(const float *x, uint32_t head_dim, void *cache, uint64_t element_offset);
void spk_ref_attend(const spk_attention_cache *cache, uint32_t head, uint64_t position, const float *q,
                    float *scores, float *out);
void spk_ref_sigmoid_gate(float *out, const float *gate, uint64_t n);
void spk_ref_gdn_conv(const float *u, const float *taps, float *state, uint64_t channel_count, uint32_t conv_kernel,
                      uint64_t channel_begin, uint64_t channel_end, float *y);
void spk_ref_l2_norm(float *x, uint64_t n, float eps, float scale);
void spk_ref_gdn_head(const spk_gdn_shape *shape, float *state, const float *q, const float *k, const float *v,
                      float decay, float beta, const float *norm_w, const float *z, float *out);

/* ---- AVX2, FMA and F16C; called only through the table that spk_kernels_avx2 returns ---- */

extern const spk_kernels spk_avx2_table, spk_vnni_table;     /* the second: with AVX-512 VL, BW, VNNI and GFNI */

/* Contracts: the slots of the same names in spk_kernels. */
spk_matmul_fn spk_avx2_matmul_q4_k, spk_avx2_matmul_q5_k, spk_avx2_matmul_q6_k, spk_avx2_matmul_q8_0;   /* T32 */
spk_matmul_fn spk_vnni_matmul_q4_k, spk_vnni_matmul_q5_k, spk_vnni_matmul_q6_k, spk_vnni_matmul_q8_0;   /* T32 */
spk_matmul_fn spk_avx2_matmul_f32, spk_avx2_matmul_f16, spk_avx2_matmul_bf16;                           /* ROWS */
spk_matmul_fn spk_avx2_matmul_dequantized;                                                              /* ROWS, any */
void spk_avx2_quantize(spk_activation *x);
void spk_avx2_rms_norm(const float *x, const float *w, uint64_t n, float eps, float *y);
void spk_avx2_swiglu(const float *gate, const float *up, uint64_t n, float *out);
void spk_avx2_add_scaled(float *out, const float *x, float scale, uint64_t n);
void spk_avx2_qk_norm_rope(float *x, const float *w, uint32_t head_dim, uint32_t rope_dim, const float *cos_sin,
                           float eps);
void spk_avx2_kv_store(const float *x, uint32_t head_dim, void *cache, uint64_t element_offset);
void spk_avx2_attend(const spk_attention_cache *cache, uint32_t head, uint64_t position, const float *q,
                     float *scores, float *out);
void spk_avx2_sigmoid_gate(float *out, const float *gate, uint64_t n);
void spk_avx2_gdn_conv(const float *u, const float *taps, float *state, uint64_t channel_count, uint32_t conv_kernel,
                       uint64_t channel_begin, uint64_t channel_end, float *y);
void spk_avx2_l2_norm(float *x, uint64_t n, float eps, float scale);
void spk_avx2_gdn_head(const spk_gdn_shape *shape, float *state, const float *q, const float *k, const float *v,
                       float decay, float beta, const float *norm_w, const float *z, float *out);

#endif
