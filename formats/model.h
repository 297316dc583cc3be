/* formats/model.h - what spk knows about a model: its configuration, the role of each tensor, and where each
 * tensor goes in a pack.  Both the packer and the runtime (when it opens a GGUF) use exactly this.
 *
 * Refuses: architectures other than qwen35moe, qwen3moe and qwen35, and any shape beyond the limits.
 * What a newcomer gets wrong: ssm.group_count is the number of K heads and ssm.time_step_rank the number of V heads;
 * block_count includes MTP blocks, which decode never runs.
 */
#ifndef SPK_MODEL_H
#define SPK_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/kv.h"
#include "formats/layout.h"
#include "formats/status.h"

typedef enum { SPK_ARCH_QWEN35MOE = 1, SPK_ARCH_QWEN3MOE = 2, SPK_ARCH_QWEN35 = 3 } spk_arch;

enum {
    SPK_LAYER_COUNT_MAX       = 1024,
    SPK_EXPERT_COUNT_MAX      = 4096,
    SPK_EXPERT_USED_COUNT_MAX = 64,
    SPK_HEAD_COUNT_MAX        = 1024,
    SPK_HEAD_DIM_MAX          = 1024,
    SPK_CONV_KERNEL_MAX       = 16,
    SPK_WIDTH_MAX             = 1 << 20,     /* hidden, feed-forward, conv channels */
    SPK_VOCAB_MAX             = 1 << 24,
    SPK_CONTEXT_MAX           = 1 << 24
};

/* Stored in a pack's CONFIG section as it lies here: little-endian, 4-byte fields, no padding. */
typedef struct {
    uint32_t arch;                  /* spk_arch */
    uint32_t layer_count;           /* layers that decode runs: block_count - nextn_predict_layers */
    uint32_t mtp_layer_count;       /* blocks after them, carried but not run */
    uint32_t context_length;        /* trained context, tokens */
    uint32_t vocab_size;            /* rows of token_embd */
    uint32_t hidden_size;
    uint32_t head_count, kv_head_count;
    uint32_t head_dim;              /* key_length == value_length */
    uint32_t rope_dim;              /* even, <= head_dim */
    float    rope_base;
    float    rms_eps;
    uint32_t full_attention_interval; /* layer i is full attention iff (i+1) % this == 0; 1: all layers */
    uint32_t has_attention_gate;    /* attn_q rows hold [q, gate] per head */
    uint32_t gdn_k_head_count, gdn_v_head_count; /* 0 when there is no GDN layer */
    uint32_t gdn_k_dim, gdn_v_dim;  /* head sizes: state_size, inner_size / time_step_rank */
    uint32_t conv_kernel;
    uint32_t expert_count, expert_used_count;    /* 0 for a dense FFN */
    uint32_t expert_ff_size;
    uint32_t shared_ff_size;        /* 0: no shared expert */
    uint32_t dense_ff_size;         /* 0 for MoE */
    uint32_t is_tied;               /* no output.weight: token_embd is the LM head */
    uint32_t reserved[7];           /* zero */
} spk_model_config;
SPK_STATIC_ASSERT(sizeof(spk_model_config) == 128, "spk_model_config is an on-disk struct");

/* A tensor of a model, wherever it lies.  Order is the source's; that of a pack is by place. */
typedef struct {
    char     name[64];
    uint32_t type, source_type;     /* spk_type; they differ where the packer requantized */
    uint32_t dim_count;
    uint64_t dims[4];               /* ne0 first; dims[2]*dims[3] matrices of dims[1] rows of dims[0] */
    uint32_t layout;                /* spk_layout */
    uint32_t section;               /* spk_place */
    uint64_t offset_bytes;          /* of the first unit, from the start of the section's data */
    uint64_t unit_stride_bytes;     /* between rows (ROWS) or tiles (T32) */
    uint64_t matrix_stride_bytes;   /* between experts; 0 when there is one matrix */
    double   relative_rmse;         /* of a requant, against the dequantized source; 0 where copied */
    double   max_abs_error, cosine; /* likewise; cosine is 1 where copied */
} spk_tensor;

/* The data sections of a pack.  Stored: stable. */
typedef enum {
    SPK_PLACE_STATIC    = 1,        /* read by every token, in the order in which layers consume them */
    SPK_PLACE_EXPERTS   = 2,        /* per layer, per expert: [gate|up tiles interleaved][down tiles], 4 KiB aligned */
    SPK_PLACE_EMBEDDING = 3,        /* token_embd by row, unless tied: then it is the head, in STATIC */
    SPK_PLACE_EXTRA     = 4         /* tensors that decode does not read (MTP blocks, unknown names) */
} spk_place;
enum { SPK_PLACE_COUNT = 4 };

/* Name, type and shape of a GGUF tensor; everything else zero, cosine 1. */
struct spk_gguf_tensor;
void spk_tensor_from_gguf(const struct spk_gguf_tensor *source, spk_tensor *out);
/* Weight bytes of a tensor, without padding. */
uint64_t spk_tensor_bytes(const spk_tensor *tensor);
/* Of these, the bytes that one decode step reads: used experts, one row of the embedding, nothing of EXTRA.
 * The tensor must be placed. */
uint64_t spk_tensor_bytes_per_token(const spk_model_config *config, const spk_tensor *tensor);

/* Configuration from metadata and tensor shapes.  Only name, type, dim_count and dims of the tensors are read.
 * Every decode tensor must be present with the expected shape: SPK_E_MISSING or SPK_E_SHAPE name the tensor.  A tensor
 * with a layer's name that the configuration has no place for is SPK_E_MISMATCH.
 * SPK_E_MISSING / SPK_E_CORRUPT / SPK_E_LIMIT the key, SPK_E_UNSUPPORTED the architecture or feature.
 * `where` names the file in messages. */
SPK_MUST_CHECK spk_status spk_model_config_read(const spk_kv_set *kvs, const spk_tensor *tensors,
                                                uint64_t tensor_count, const char *where,
                                                spk_model_config *out, spk_error *err);
/* A configuration that was stored beside the metadata and tensors that it was read from: it is read again, and SPK_E_MISMATCH
 * names the first field that differs. */
SPK_MUST_CHECK spk_status spk_model_config_check(const spk_model_config *stored, const spk_kv_set *kvs,
                                                 const spk_tensor *tensors, uint64_t tensor_count, const char *where,
                                                 spk_error *err);

bool spk_model_layer_is_attention(const spk_model_config *config, uint32_t layer);
/* "qwen35moe"; never NULL. */
const char *spk_arch_name(uint32_t arch);

/* The model's fingerprint: architecture and exact shape as one line of text, e.g.
 *   qwen35moe L40 H2048 V248320 attn16/2x256r64 gdn16/32x128x128c4i4 moe8/256x512+512
 * Recipes are chosen by it.  Returns the length; `size` of 160 is always enough. */
enum { SPK_FINGERPRINT_SIZE = 160 };
size_t spk_model_fingerprint(const spk_model_config *config, char *out, size_t size);

/* Roles, from names.  Decode reads every role but EXTRA.  Order of values is order of consumption in a layer. */
typedef enum {
    SPK_ROLE_EXTRA = 0, SPK_ROLE_TOKEN_EMBD,
    SPK_ROLE_ATTN_NORM,
    SPK_ROLE_GDN_QKV, SPK_ROLE_GDN_GATE, SPK_ROLE_GDN_ALPHA, SPK_ROLE_GDN_BETA, SPK_ROLE_GDN_CONV,
    SPK_ROLE_GDN_A, SPK_ROLE_GDN_DT, SPK_ROLE_GDN_NORM, SPK_ROLE_GDN_OUT,
    SPK_ROLE_ATTN_Q, SPK_ROLE_ATTN_K, SPK_ROLE_ATTN_V, SPK_ROLE_ATTN_Q_NORM, SPK_ROLE_ATTN_K_NORM, SPK_ROLE_ATTN_OUT,
    SPK_ROLE_FFN_NORM,
    SPK_ROLE_ROUTER, SPK_ROLE_SHARED_ROUTER,
    SPK_ROLE_SHARED_GATE, SPK_ROLE_SHARED_UP, SPK_ROLE_SHARED_DOWN,
    SPK_ROLE_EXPERT_GATE, SPK_ROLE_EXPERT_UP, SPK_ROLE_EXPERT_DOWN,
    SPK_ROLE_FFN_GATE, SPK_ROLE_FFN_UP, SPK_ROLE_FFN_DOWN,
    SPK_ROLE_OUTPUT_NORM, SPK_ROLE_OUTPUT,
    SPK_ROLE_COUNT
} spk_role;
/* Role and layer (0 for global tensors) of a name in a model; blocks >= layer_count are EXTRA. */
spk_role spk_model_role(const spk_model_config *config, const char *name, uint32_t *layer);
/* Router, norms, conv, ssm_a, dt, alpha, beta and shared router: never requantized. */
bool spk_role_is_protected(spk_role role);

/* Sets layout, section, offset and strides of every tensor from name, type and dims, and the size in bytes of each
 * data section (index place-1; a multiple of 4096, 0 if empty).  A pure function of its arguments: the same
 * model gives the same places everywhere.  Alignments: 128 for every tensor, 4096 for every expert. */
SPK_MUST_CHECK spk_status spk_model_place(const spk_model_config *config, spk_tensor *tensors,
                                          uint64_t tensor_count, uint64_t section_bytes[SPK_PLACE_COUNT],
                                          spk_error *err);

/* Places and section sizes that a pack's directory has, where a pack may have others: they are given again, and SPK_E_MISMATCH
 * names the first tensor and field, or section, that differs.  The configuration must be these tensors' (spk_model_config_check). */
SPK_MUST_CHECK spk_status spk_model_place_check(const spk_model_config *config, const spk_tensor *tensors,
                                                uint64_t tensor_count, const uint64_t section_bytes[SPK_PLACE_COUNT],
                                                const char *where, spk_error *err);

/* ---- Runs: the pieces of work that fill the sections.  ----
 *
 * A run is a contiguous range of a section, filled from whole row groups of one to three tensors (an expert's gate,
 * up and down; or some rows of one matrix; or of a gate/up pair).  Runs of a placement, in order, cover every byte of
 * every section exactly once, padding included, so a packer can stream them and a loader can fill them in parallel. */
enum { SPK_RUN_PIECE_MAX = 3 };
#define SPK_RUN_BYTES_TARGET (UINT64_C(4) << 20)   /* long matrices are cut at about this; an expert is never cut */

typedef struct {
    uint64_t tensor_index;
    uint64_t matrix_index;          /* expert */
    uint64_t row_begin, row_end;    /* row_begin is a multiple of the layout's rows_per_group */
    uint64_t offset_bytes;          /* of its first unit, from the start of the run */
} spk_piece;

typedef struct {
    uint32_t  section;              /* spk_place */
    uint64_t  offset_bytes;         /* in the section */
    uint64_t  size_bytes;
    uint32_t  piece_count;
    spk_piece pieces[SPK_RUN_PIECE_MAX];
} spk_run;

/* Runs of tensors placed by spk_model_place, by section and offset.  The caller frees *out_runs with free(). */
SPK_MUST_CHECK spk_status spk_model_runs(const spk_tensor *tensors, uint64_t tensor_count,
                                         const uint64_t section_bytes[SPK_PLACE_COUNT],
                                         spk_run **out_runs, uint64_t *out_run_count, spk_error *err);
/* Put GGML rows (of the tensor's type, packed, row_begin..row_end) of one piece into a run's buffer of size_bytes.
 * Before the first piece, spk_run_begin zeroes what none of them writes. */
void spk_run_begin(const spk_run *run, const spk_tensor *tensors, uint8_t *run_buffer);
void spk_run_put(const spk_run *run, uint32_t piece_index, const spk_tensor *tensors, const uint8_t *rows,
                 uint8_t *run_buffer);

/* Matrix `index` (expert) of a tensor whose section data begins at `section`. */
spk_matrix spk_tensor_matrix(const spk_tensor *tensor, const uint8_t *section, uint64_t index);
uint64_t   spk_tensor_matrix_count(const spk_tensor *tensor);
/* Bytes from the first to past the last byte that the tensor occupies, gaps included. */
uint64_t   spk_tensor_span_bytes(const spk_tensor *tensor);

#endif
