/* runtime/runtime.h - the C API: open a model, make sessions, evaluate tokens, read logits.
 *
 * Opaque handles, no global state, nothing is printed, nothing exits.
 *
 *   spk_model *model;  spk_session *session;  spk_error err;
 *   spk_model_options mo = { .backend = SPK_BACKEND_AUTO };
 *   if (spk_model_open("m.spk", &mo, &model, &err)) ...
 *   spk_session_options so = { .context_tokens = 4096 };
 *   if (spk_session_create(model, &so, &session, &err)) ...
 *   if (spk_session_eval(session, tokens, count, SPK_LOGITS_LAST, logits, &err)) ...
 *
 * Threads: a model is immutable once open and may be shared; a session belongs to one thread at a time.
 * Each session owns its worker threads.
 */
#ifndef SPK_RUNTIME_H
#define SPK_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "formats/status.h"

typedef struct spk_model spk_model;
typedef struct spk_session spk_session;
typedef struct spk_tokenizer spk_tokenizer;

typedef enum {
    SPK_BACKEND_AUTO = 0,   /* the fastest that this machine has */
    SPK_BACKEND_REF  = 1,   /* plain F32 on dequantized weights: the definition, slow */
    SPK_BACKEND_CPU  = 2,   /* int8 activations, AVX2; SPK_E_UNSUPPORTED where the CPU lacks it */
    SPK_BACKEND_CUDA = 3    /* an NVIDIA GPU; SPK_E_UNSUPPORTED where there is none or the build has no CUDA */
} spk_backend;

typedef struct {
    spk_backend backend;
    uint32_t    thread_count;      /* 0: all CPUs.  Never changes a result */
    /* May be NULL; called while a GGUF is laid out, and then while weights are copied to a GPU, from the caller's thread. */
    void      (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes);
    void       *progress_context;
} spk_model_options;

/* MODEL is a .spk pack (mapped) or a GGUF (laid out in memory as a native pack would be, so that both give the
 * same bits).  Told apart by content, not by name.  What of a pack goes to a GPU is checked against its checksums on the
 * way: SPK_E_CHECKSUM. */
SPK_MUST_CHECK spk_status spk_model_open(const char *path, const spk_model_options *options, spk_model **out,
                                         spk_error *err);
/* Check all checksums of a pack; a GGUF has none: SPK_E_UNSUPPORTED. */
SPK_MUST_CHECK spk_status spk_model_verify(const spk_model *model, spk_error *err);
/* Sessions and tokenizers of the model must be gone.  NULL is fine. */
void spk_model_close(spk_model *model);

uint32_t    spk_model_vocab_size(const spk_model *model);
uint32_t    spk_model_context_length(const spk_model *model);      /* trained */
const char *spk_model_arch(const spk_model *model);                /* "qwen35moe" */
const char *spk_model_fingerprint_text(const spk_model *model);
const char *spk_model_backend_name(const spk_model *model);        /* "ref", "avx2", "cuda" */
/* Why SPK_BACKEND_AUTO did not take the GPU that there is (the model does not fit, or its kernels do not take it); else NULL. */
const char *spk_model_gpu_refusal(const spk_model *model);
bool        spk_model_is_pack(const spk_model *model);
/* Bytes of weights that one decode step reads, by the shapes (experts: the used ones). */
uint64_t    spk_model_bytes_per_token(const spk_model *model);
uint64_t    spk_model_weight_bytes(const spk_model *model);

/* What opening a model for a GPU took. */
typedef struct {
    double   start_s;              /* the device's start-up: driver and context, on a thread of its own */
    double   start_wait_s;         /* of it, what was left when the host's side of the model was open */
    double   load_s;               /* then: device memory, reading, checking and copying the weights */
    uint64_t bytes;                /* of weights copied */
    uint64_t pinned_bytes;         /* of them, straight out of pages in memory that were pinned for it */
    uint64_t direct_bytes;         /* of them, read from the disk past the page cache; the rest was copied through buffers */
    bool     is_verified;          /* against a pack's checksums */
} spk_load_times;
bool spk_model_load_times(const spk_model *model, spk_load_times *out);   /* false on a CPU backend */

/* Kernels of the GPU backend that can be switched off, for comparison; results are bit-identical. */
typedef enum {
    SPK_FUSE_ROUTER   = 1,         /* the top experts are selected by the kernel that uses them */
    SPK_FUSE_ADDNORM3 = 2,         /* routed + shared + residual, and the RMSNorm that follows, folded into the products around */
    SPK_FUSE_SHEXP    = 4,         /* shared expert: gate, up and SwiGLU in one; down with its gate in one */
    SPK_FUSE_GDN_CONV = 8,         /* convolution, SiLU and L2 norms in one */
    SPK_FUSE_GDN_CORE = 16,        /* the whole recurrence in one; gdn-conv then has no effect */
    SPK_FUSE_HELD     = 32,        /* not a fusion: weights held in registers, where a shape allows it, instead of streamed */
    SPK_FUSE_ALL      = 63
} spk_fusion;

typedef struct {
    uint32_t context_tokens;       /* capacity, >= 1; KV memory is allocated for it at once */
    uint32_t batch_tokens;         /* most tokens evaluated together; 0: 64.  Never changes a result */
    uint32_t fusions_off;          /* spk_fusion bits that the GPU backend leaves out; 0 on a CPU, or SPK_E_UNSUPPORTED */
    bool     kv_q8;                /* the GPU backend keeps keys and values as int8 with a scale for each 32 instead of F16 */
} spk_session_options;

SPK_MUST_CHECK spk_status spk_session_create(const spk_model *model, const spk_session_options *options,
                                             spk_session **out, spk_error *err);
void     spk_session_destroy(spk_session *session);                /* NULL is fine */
void     spk_session_reset(spk_session *session);                  /* position 0, empty state */
uint32_t spk_session_position(const spk_session *session);         /* tokens evaluated so far */
uint64_t spk_session_state_bytes(const spk_session *session);

/* Where the time of one decode step on a GPU goes: phases in order of a layer; seconds and bytes of all layers together. */
typedef enum {
    SPK_PHASE_EMBED, SPK_PHASE_GDN_IN, SPK_PHASE_GDN, SPK_PHASE_ATTENTION_IN, SPK_PHASE_ATTENTION, SPK_PHASE_MIXER_OUT,
    SPK_PHASE_ROUTER,              /* with the shared expert's gate and up */
    SPK_PHASE_EXPERTS_UP,
    SPK_PHASE_EXPERTS_DOWN,        /* with the shared expert's */
    SPK_PHASE_FFN,                 /* of a dense model */
    SPK_PHASE_HEAD,
    SPK_PHASE_COUNT
} spk_phase;
enum { SPK_ACCOUNT_KERNELS_MAX = 8192 };
typedef struct spk_account {
    struct { uint32_t kernel_count; uint64_t bytes; double s; } phases[SPK_PHASE_COUNT];    /* bytes: weights, states, keys and values */
    double   replay_s, node_s;     /* of a step that does nothing; of one kernel more that does nothing */
    uint32_t kernel_count;
    uint8_t  phase_of[SPK_ACCOUNT_KERNELS_MAX];
} spk_account;
/* Measures beginnings of growing length of the step at the session's position, which stays where it is; some ten seconds.
 * SPK_E_UNSUPPORTED on a CPU, SPK_E_LIMIT where the context has no room for one more token. */
SPK_MUST_CHECK spk_status spk_session_account(spk_session *session, uint32_t repeat_count, spk_account *out, spk_error *err);

typedef enum { SPK_LOGITS_NONE = 0, SPK_LOGITS_LAST = 1, SPK_LOGITS_ALL = 2 } spk_logits;

/* Evaluate `count` tokens after those before.  logits is [vocab] for LAST, [count][vocab] for ALL, unused for NONE.
 * SPK_E_LIMIT if the context is full (nothing is evaluated), SPK_E_USAGE for an id >= vocab.
 * A token's logits do not depend on how tokens were split into calls or batches. */
SPK_MUST_CHECK spk_status spk_session_eval(spk_session *session, const uint32_t *tokens, uint32_t count,
                                           spk_logits which, float *logits, spk_error *err);

/* ---- Tokenizer: byte-level BPE of the model's own vocabulary (pre-tokenizers qwen2 and qwen35). ---- */

SPK_MUST_CHECK spk_status spk_tokenizer_create(const spk_model *model, spk_tokenizer **out, spk_error *err);
void spk_tokenizer_destroy(spk_tokenizer *tokenizer);              /* NULL is fine */

/* Token ids of text[size] (any bytes; invalid UTF-8 is kept byte by byte).  User-defined tokens are always
 * recognised in the text, control tokens only with parse_special.  No BOS is added.
 * *out is allocated, freed by the caller with free(); NULL if there are no tokens. */
SPK_MUST_CHECK spk_status spk_tokenizer_encode(const spk_tokenizer *tokenizer, const char *text, size_t size_bytes,
                                               bool parse_special, uint32_t **out, size_t *out_count, spk_error *err);

/* Bytes of one token, in memory owned by the tokenizer; control tokens have none unless render_special. */
const char *spk_tokenizer_piece(const spk_tokenizer *tokenizer, uint32_t token, bool render_special, size_t *size_bytes);
bool        spk_tokenizer_is_end(const spk_tokenizer *tokenizer, uint32_t token);   /* any end-of-generation token */
/* Token ids of a conversation's first turn in ChatML: the user's text, then the header of the assistant's answer.
 * Control tokens in user_text[size_bytes] are plain text, so a user cannot end the turn or open another.  *out as
 * for encode.  SPK_E_UNSUPPORTED if the vocabulary lacks <|im_start|> or <|im_end|>. */
SPK_MUST_CHECK spk_status spk_tokenizer_chat(const spk_tokenizer *tokenizer, const char *user_text, size_t size_bytes,
                                             uint32_t **out, size_t *out_count, spk_error *err);

/* Streaming UTF-8: append piece bytes, take out what forms whole characters; incomplete tails wait, invalid bytes
 * become U+FFFD.  Zero-initialise. */
typedef struct { unsigned char pending[4]; unsigned pending_count; } spk_utf8_stream;
/* out has room for 3 * (size_bytes + 4) bytes; returns the bytes written.  flush: the stream ends here. */
size_t spk_utf8_push(spk_utf8_stream *stream, const char *bytes, size_t size_bytes, bool flush, char *out);

/* ---- Sampling ---- */

typedef struct {
    float    temperature;          /* 0: greedy (ties to the lower id) */
    uint32_t top_k;                /* 0: off */
    float    top_p;                /* 1: off */
    float    min_p;                /* 0: off */
    uint64_t seed;
} spk_sampler_options;

typedef struct { spk_sampler_options options; uint64_t state; } spk_sampler;
spk_sampler spk_sampler_start(const spk_sampler_options *options);
#define SPK_TOKEN_NONE UINT32_MAX
/* One token from logits[vocab]; order: temperature 0 shortcut, top-k, softmax at temperature, top-p, min-p, draw.  Ties of
 * probability go to the lower id.  kernels/sampling.h has the definition, in integers: the same logits and state give the same
 * token on every backend.  A token 2^-39 times as likely as the best, or less, is never drawn, nor is a NaN;
 * SPK_TOKEN_NONE, and no number is drawn, if the largest of the others is not finite, or there are none.
 * scratch: spk_sampler_scratch_bytes, aligned for 8-byte integers. */
uint32_t spk_sampler_next(spk_sampler *sampler, const float *logits, uint32_t vocab_size, void *scratch);
size_t   spk_sampler_scratch_bytes(uint32_t vocab_size);

/* ---- Generation ---- */

typedef struct {
    spk_sampler *sampler;          /* moves on by one draw a token; NULL or a temperature of 0: greedy */
    uint32_t     token_limit;      /* most tokens to choose; 0: only evaluate the input */
    /* Called with each token as it is chosen; false ends the generation with it: an end token, for one
     * (spk_tokenizer_is_end).  Must not use the session. */
    bool       (*on_token)(void *context, uint32_t token);
    void        *context;
} spk_generation;

/* Evaluate tokens[count >= 1], choose one from the last one's logits, evaluate that, and so on: the tokens are those of
 * spk_session_eval and spk_sampler_next in turn.  On a GPU the next step runs while on_token is called, and waits only for
 * one that takes longer than a step.
 *
 * The last token chosen has not been evaluated, all others have, whatever ended the generation: a chat goes on by giving it
 * as the first of the next input.  A token that finds the context full is the last one, with SPK_E_LIMIT unless it ends
 * the generation anyway; SPK_E_LIMIT, too, and nothing is evaluated, where the input alone is too long.
 * SPK_E_USAGE for no input or an id >= vocab; SPK_E_NONFINITE where a logit is NaN or infinite, of which a GPU sees only
 * the largest. */
SPK_MUST_CHECK spk_status spk_session_generate(spk_session *session, const uint32_t *tokens, uint32_t count,
                                               const spk_generation *generation, spk_error *err);

#endif
