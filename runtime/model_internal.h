/* runtime/model_internal.h - an opened model as the runtime sees it; private to runtime/. */
#ifndef SPK_MODEL_INTERNAL_H
#define SPK_MODEL_INTERNAL_H

#include "formats/gguf.h"
#include "formats/model.h"
#include "formats/pool.h"
#include "formats/spk.h"
#include "kernels/kernels.h"
#include "runtime/gpu.h"
#include "runtime/runtime.h"

/* The matrices of one expert layer: expert e is `first` moved by e * stride_bytes. */
typedef struct {
    spk_matrix first;
    uint64_t   stride_bytes;
} spk_expert_matrix;

/* One layer; what a kind of layer does not have is zero. */
typedef struct {
    bool         is_attention;
    const float *attn_norm, *ffn_norm;                      /* [hidden] */
    spk_matrix   gdn_qkv, gdn_gate, gdn_alpha, gdn_beta, gdn_out;
    const float *gdn_taps;                                  /* [conv channel][conv_kernel] */
    const float *gdn_a, *gdn_dt, *gdn_norm;                 /* [V head], [V head], [v_dim] */
    spk_matrix   q, k, v, attn_out;
    const float *q_norm, *k_norm;                           /* [head_dim] */
    spk_matrix   router, shared_router;
    spk_matrix   shared_gate, shared_up, shared_down;       /* of the shared expert, or of a dense FFN */
    spk_expert_matrix expert_gate, expert_up, expert_down;
} spk_layer;

struct spk_model {
    char                *path;
    spk_pack            *pack;          /* one of pack and gguf is set */
    const spk_gguf      *gguf;
    spk_gguf            *own_gguf;      /* gguf, where it is the model's own */
    uint8_t             *native;        /* sections laid out from a GGUF, anonymous memory */
    size_t               native_bytes;
    spk_tensor          *native_tensors;
    const spk_tensor    *tensors;
    uint64_t             tensor_count;
    const uint8_t       *sections[SPK_PLACE_COUNT];
    uint64_t             section_bytes[SPK_PLACE_COUNT];
    spk_model_config     config;
    const spk_kv_set    *kvs;
    const spk_kernels   *kernels;
    uint32_t             thread_count;  /* of its sessions */
    char                 fingerprint[SPK_FINGERPRINT_SIZE];
    float               *vectors;       /* all small vectors as floats; layers point into it */
    uint64_t             vector_count;  /* floats in it */
    spk_gpu_model       *gpu;           /* NULL on a CPU backend */
    char                *gpu_refusal;   /* why not on a GPU that there is; or NULL */
    spk_layer           *layers;
    spk_matrix           embedding, output;
    const float         *output_norm;
};

/* As spk_model_open of a GGUF that is open already, on a CPU: no second file can come in between.  It must outlive the model. */
SPK_MUST_CHECK spk_status spk_model_open_gguf(const spk_gguf *gguf, const spk_model_options *options, spk_model **out,
                                              spk_error *err);
/* Roles that the runtime keeps as float vectors instead of matrices. */
bool              spk_role_is_vector(spk_role role);
/* From now on the matrix, or the experts, of a role that is no vector; a tied embedding is the head too. */
void              spk_model_bind_matrix(spk_model *model, uint32_t layer, spk_role role, spk_matrix w,
                                        uint64_t matrix_stride_bytes);
const spk_kv_set *spk_model_kvs(const spk_model *model);
const char       *spk_model_path(const spk_model *model);

static inline spk_matrix spk_expert_at(const spk_expert_matrix *m, uint32_t expert) {
    spk_matrix w = m->first;
    w.data += (uint64_t)expert * m->stride_bytes;
    return w;
}

#endif
