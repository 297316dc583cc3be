/* kernels/table_avx2.c - the tables for CPUs with AVX2, FMA and F16C; the second also wants AVX-512 VL, BW, VNNI, GFNI.
 *
 * They differ in the four inner loops over T32 tiles.  Data only: nothing in a file that is compiled for AVX2 may run
 * before dispatch.c has looked at the CPU.
 */
#include "kernels/kernels_internal.h"

#define ROWS_ONLY     { [SPK_LAYOUT_ROWS] = spk_avx2_matmul_dequantized }
#define ROWS_T32(t32) { [SPK_LAYOUT_ROWS] = spk_avx2_matmul_dequantized, [SPK_LAYOUT_T32] = t32 }

/* top_k: a few hundred numbers are not worth a second form. */
#define TABLE(table_name, q4_k, q5_k, q6_k, q8_0)                                                            \
    {                                                                                                        \
        .name = table_name,                                                                                  \
        .quantizes_activations = true,                                                                       \
        .kv_type = SPK_TYPE_F16,                                                                             \
        .matmul = {                                                                                          \
            [SPK_TYPE_F32]    = { [SPK_LAYOUT_ROWS] = spk_avx2_matmul_f32 },                                 \
            [SPK_TYPE_F16]    = { [SPK_LAYOUT_ROWS] = spk_avx2_matmul_f16 },                                 \
            [SPK_TYPE_BF16]   = { [SPK_LAYOUT_ROWS] = spk_avx2_matmul_bf16 },                                \
            [SPK_TYPE_Q4_0]   = ROWS_ONLY, [SPK_TYPE_Q4_1] = ROWS_ONLY, [SPK_TYPE_Q5_0] = ROWS_ONLY,         \
            [SPK_TYPE_Q5_1]   = ROWS_ONLY, [SPK_TYPE_Q2_K] = ROWS_ONLY, [SPK_TYPE_Q3_K] = ROWS_ONLY,         \
            [SPK_TYPE_IQ4_NL] = ROWS_ONLY, [SPK_TYPE_IQ4_XS] = ROWS_ONLY,                                    \
            [SPK_TYPE_Q4_K]   = ROWS_T32(q4_k), [SPK_TYPE_Q5_K] = ROWS_T32(q5_k),                            \
            [SPK_TYPE_Q6_K]   = ROWS_T32(q6_k), [SPK_TYPE_Q8_0] = ROWS_T32(q8_0),                            \
        },                                                                                                   \
        .quantize = spk_avx2_quantize,                                                                       \
        .rms_norm = spk_avx2_rms_norm,                                                                       \
        .swiglu = spk_avx2_swiglu,                                                                           \
        .add_scaled = spk_avx2_add_scaled,                                                                   \
        .top_k = spk_ref_top_k,                                                                              \
        .qk_norm_rope = spk_avx2_qk_norm_rope,                                                               \
        .kv_store = spk_avx2_kv_store,                                                                       \
        .attend = spk_avx2_attend,                                                                           \
        .sigmoid_gate = spk_avx2_sigmoid_gate,                                                               \
        .gdn_conv = spk_avx2_gdn_conv,                                                                       \
        .l2_norm = spk_avx2_l2_norm,                                                                         \
        .gdn_head = spk_avx2_gdn_head,                                                                       \
    }

const spk_kernels spk_avx2_table =
    TABLE("avx2", spk_avx2_matmul_q4_k, spk_avx2_matmul_q5_k, spk_avx2_matmul_q6_k, spk_avx2_matmul_q8_0);

const spk_kernels spk_vnni_table =
    TABLE("vnni", spk_vnni_matmul_q4_k, spk_vnni_matmul_q5_k, spk_vnni_matmul_q6_k, spk_vnni_matmul_q8_0);
