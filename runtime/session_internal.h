/* runtime/session_internal.h - one sequence's state and scratch memory; private to runtime/. */
#ifndef SPK_SESSION_INTERNAL_H
#define SPK_SESSION_INTERNAL_H

#include "runtime/model_internal.h"

enum { SPK_BATCH_TOKENS_MAX = 512 };

/* State of one layer for one sequence. */
typedef struct {
    spk_attention_cache cache;      /* attention layers */
    float              *conv;       /* GDN: [conv_kernel-1][conv channel], oldest first, raw projections */
    float              *delta;      /* GDN: [V head][v_dim][k_dim] */
} spk_layer_state;

/* Scratch for a batch of up to batch_tokens tokens; T below.  Pointers into one arena. */
typedef struct {
    float          *x;              /* [T][hidden], the residual stream */
    float          *delta;          /* [T][hidden], a mixer's or FFN's output before it is added */
    spk_activation *h;              /* [2 T], normed input of a mixer, FFN or the head; see spk_matmul_job for the 2 */
    float          *project;        /* [T][project_width], outputs of the mixer's input projections */
    float          *conv_out;       /* [T][conv channels] */
    spk_activation *gdn_mixed;      /* [2 T], input of a GDN layer's output projection */
    spk_activation *attention_mixed; /* [2 T], likewise; widths differ, and int8 pairs depend on the width */
    float          *cos_sin;        /* [T][rope_dim] */
    float          *scores;         /* [thread][context], attention scores */
    float          *router;         /* [T][expert_count + 1], last: the shared expert's gate */
    uint32_t       *expert;         /* [T][used] */
    float          *expert_weight;  /* [T][used] */
    float          *ff;             /* [T][used][2 * expert_ff], gate then up */
    spk_activation *ff_act;         /* [2 T * used] */
    float          *expert_out;     /* [T * used][hidden] */
    float          *shared_ff;      /* [T][2 * shared or dense ff] */
    spk_activation *shared_act;     /* [2 T] */
    float          *shared_out;     /* [T][hidden] */
    spk_activation *gather;         /* [2 T * used], inputs grouped by expert */
    float         **gather_y;       /* [2][2 T * used], their outputs: gate and up, or down */
    uint32_t       *group_slots;    /* [T * used], slots (token * used + rank) grouped by expert */
    uint32_t       *group_end;      /* [expert_count], end of each expert's run in group_slots */
    struct spk_matmul_job *jobs;    /* [job_room] */
    float         **y;              /* [8][2 T], output pointers of the static projections */
    float          *rest;           /* products with what int8 left out, before they are added */
} spk_scratch;

/* One matrix times some vectors.
 *
 * With has_rest, x and y have 2 * token_count entries: x[token_count + t] is what the codes of x[t] leave out
 * (spk_activation_residual), y[token_count + t] is scratch, and its product is added to y[t]. */
typedef struct spk_matmul_job {
    spk_matrix            w;
    const spk_activation *x;        /* [token_count] */
    float *const         *y;        /* [token_count], each [row_count] */
    uint32_t              token_count;
    const uint32_t       *slots;    /* [token_count] token * used + rank of a routed expert's vectors; NULL: vector t is token t's */
    bool                  has_rest;
    uint64_t              unit_count, rows_per_unit;
} spk_matmul_job;

struct spk_session {
    const spk_model *model;
    spk_pool        *pool;
    uint32_t         position, context_tokens, batch_tokens;
    uint64_t         project_width;
    uint64_t         state_bytes, scratch_bytes;
    uint8_t         *state_memory;  /* all layers' states */
    uint8_t         *scratch_memory;
    spk_layer_state *layers;
    double          *inverse_frequency; /* [rope_dim/2] */
    spk_scratch      s;
    /* For tests, NULL otherwise: called after each layer of a batch, when the residual stream is s.x + s.delta and s.expert
     * the layer's choice.  Both vectors may be changed. */
    void           (*observe)(spk_session *session, uint32_t layer, uint32_t token_count, void *context);
    void            *observe_context;
    struct spk_watch *watch;        /* runtime/watch.h; NULL: nobody looks at the inputs of products */
    bool             needs_reset;   /* of the GPU session */
    spk_gpu_session *gpu;           /* set: everything above but the counts is unused */
};

/* x[t] and the layers' states advance by token_count tokens; logits of tokens whose pointer is not NULL.
 * 1 <= token_count <= batch_tokens, and the context has room. */
void spk_forward(spk_session *session, const uint32_t *tokens, uint32_t token_count, float *const *logits);

/* The FFN of one layer: s.delta = ffn(s.h).  s.h is prepared. */
void spk_forward_ffn(spk_session *session, const spk_layer *layer, uint32_t token_count);

/* All jobs, split over the pool by units. */
void spk_run_jobs(spk_session *session, const spk_matmul_job *jobs, uint32_t job_count);

/* runtime/watch.c.  Before each job of a session that is watched, and after each layer, as `observe`. */
void spk_watch_job(spk_session *session, const spk_matmul_job *job);
void spk_watch_layer_end(spk_session *session, uint32_t token_count);

/* True if products of this matrix are made of two int8 vectors where that is asked for. */
static inline bool spk_wants_rest(const spk_session *session, const spk_matrix *w) {
    return session->model->kernels->quantizes_activations && w->layout == SPK_LAYOUT_T32;
}
static inline spk_matmul_job spk_job(spk_matrix w, const spk_activation *x, float *const *y, uint32_t token_count,
                                     bool has_rest) {
    spk_matmul_job job = { w, x, y, token_count, NULL, has_rest, w.row_count, 1 };
    if (w.layout == SPK_LAYOUT_T32) {
        spk_t32_geometry geometry = spk_t32_geometry_of(w.type, w.row_count, w.col_count);
        job.unit_count = geometry.group_count;
        job.rows_per_unit = geometry.rows_per_group;
    }
    return job;
}

/* Prepare list[t], and list[count + t] as its rest, for a vector whose f32 has been written. */
void spk_quantize_with_rest(const spk_session *session, spk_activation *list, uint64_t count, uint64_t t);

/* Output pointers of a static projection in place `slot` of 8: y[t] = first + t * stride, and scratch for the rest at
 * rest + t * stride. */
float *const *spk_output_rows(spk_session *session, uint32_t slot, float *first, float *rest, uint64_t stride,
                              uint32_t token_count);

#endif
