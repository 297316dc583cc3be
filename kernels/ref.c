/* kernels/ref.c - the reference table: every slot filled, nothing quantized.
 *
 * A new type gets its row here, and only here as long as no fast kernel reads it.
 */
#include "kernels/kernels_internal.h"

#define ROWS_ONLY { [SPK_LAYOUT_ROWS] = spk_ref_matmul }
#define ROWS_T32  { [SPK_LAYOUT_ROWS] = spk_ref_matmul, [SPK_LAYOUT_T32] = spk_ref_matmul }

static const spk_kernels table = {
    .name = "ref",
    .quantizes_activations = false,
    .kv_type = SPK_TYPE_F32,
    .matmul = {
        [SPK_TYPE_F32]    = ROWS_ONLY, [SPK_TYPE_F16]  = ROWS_ONLY, [SPK_TYPE_BF16]   = ROWS_ONLY,
        [SPK_TYPE_Q4_0]   = ROWS_ONLY, [SPK_TYPE_Q4_1] = ROWS_ONLY, [SPK_TYPE_Q5_0]   = ROWS_ONLY,
        [SPK_TYPE_Q5_1]   = ROWS_ONLY, [SPK_TYPE_Q2_K] = ROWS_ONLY, [SPK_TYPE_Q3_K]   = ROWS_ONLY,
        [SPK_TYPE_IQ4_NL] = ROWS_ONLY, [SPK_TYPE_IQ4_XS] = ROWS_ONLY,
        [SPK_TYPE_Q4_K]   = ROWS_T32,  [SPK_TYPE_Q5_K] = ROWS_T32,  [SPK_TYPE_Q6_K]   = ROWS_T32,
        [SPK_TYPE_Q8_0]   = ROWS_T32,
    },
    .quantize = spk_ref_quantize,
    .rms_norm = spk_ref_rms_norm,
    .swiglu = spk_ref_swiglu,
    .add_scaled = spk_ref_add_scaled,
    .top_k = spk_ref_top_k,
    .qk_norm_rope = spk_ref_qk_norm_rope,
    .kv_store = spk_ref_kv_store,
    .attend = spk_ref_attend,
    .sigmoid_gate = spk_ref_sigmoid_gate,
    .gdn_conv = spk_ref_gdn_conv,
    .l2_norm = spk_ref_l2_norm,
    .gdn_head = spk_ref_gdn_head,
};

const spk_kernels *spk_kernels_ref(void) { return &table; }
