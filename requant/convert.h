/* requant/convert.h - GGUF to pack, streamed run by run; and pack to GGUF.
 *
 * Memory is bounded by runs in flight (a few MiB each), not by tensors or by the model.  The output depends on the
 * source, the recipe, the effort, the imatrix or calibration, the file of better weights (of all files the name too, which
 * provenance holds), the tool's version and that of libzstd, and on nothing else.  A weight whose type the recipe leaves
 * alone is never decoded: its bytes are moved.
 */
#ifndef SPK_CONVERT_H
#define SPK_CONVERT_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/gguf.h"
#include "formats/spk.h"
#include "requant/calibration.h"
#include "requant/imatrix.h"
#include "requant/quant.h"
#include "requant/quant_gpu.h"
#include "requant/recipe.h"

/* Called from one thread. */
typedef void spk_convert_progress_fn(void *context, uint64_t done_bytes, uint64_t total_bytes);

typedef struct {
    const spk_gguf    *source;           /* borrowed */
    const spk_gguf    *weights;          /* borrowed, or NULL: a more precise file of the same model, which requantized
                                          * tensors are fitted from; everything else is the source's */
    const char        *out_path;         /* may be NULL for a plan alone */
    bool               replace;
    struct spk_outfile *out_file;        /* begun at out_path, so that it is locked: spk_convert_run takes it over in every
                                          * case; NULL: that begins it */
    const spk_recipe  *recipe;           /* borrowed */
    const spk_imatrix *imatrix;          /* borrowed, or NULL */
    const spk_calibration *calibration;  /* borrowed, or NULL; then no imatrix */
    const char        *imatrix_name;     /* of either, for provenance; "" if none */
    spk_quant_effort   effort;           /* for provenance too */
    uint32_t           thread_count;     /* 0: one for each CPU of this process; never changes the output */
    bool               on_gpu;           /* quantize on the GPU, which was found; never changes the output; no calibration then */
    bool               resume;           /* go on with what a killed run of the same conversion left beside out_path; where the
                                          * disk is full leave what this one has done */
    spk_convert_progress_fn *progress;   /* may be NULL */
    void              *progress_context;
} spk_convert_options;

/* The plan: everything that is decided before the first weight is read. */
typedef struct {
    spk_model_config   config;
    uint64_t           tensor_count;
    spk_tensor        *tensors;          /* placed; errors filled in by spk_convert_run */
    spk_recipe_choice *choices;
    uint64_t           section_bytes[SPK_PLACE_COUNT];
    const struct spk_gguf_tensor **counterparts;  /* of tensors in options.weights, by name; NULL where there is none */
    uint64_t           fitted_count;     /* requantized tensors that are fitted from there; 0: that file is not used */
    uint64_t           resumed_bytes;    /* of data, filled in by spk_convert_run: what a killed run had done */
    uint64_t           importance_fallback_count; /* tensors or experts that were to use the imatrix or calibration and could not */
    char             **importance_fallbacks;      /* "blk.3.ffn_down_exps.weight expert 17: no usable values" */
} spk_convert_plan;

/* The configuration of a source alone, from which a recipe is chosen. */
SPK_MUST_CHECK spk_status spk_convert_config(const spk_gguf *source, spk_model_config *out, spk_error *err);

/* SPK_E_EXISTS if out_path is a part of the source or of the file of better weights.  Writes nothing, and reads no
 * weights but those that show that the two files belong together: tensors that are not requantized, and have the same
 * unquantized type in both.  (Of a quantized type they may differ: quantizers and their imatrix do.)  SPK_E_MISMATCH
 * where they differ, where configurations do, where a requantized tensor is less precise there, and where none is more
 * precise.  One that is as precise there (in bits a weight) is taken from the source. */
SPK_MUST_CHECK spk_status spk_convert_plan_make(const spk_convert_options *options, spk_convert_plan *out,
                                                spk_error *err);
void spk_convert_plan_free(spk_convert_plan *plan);      /* safe on a zeroed plan */
/* Whether a tensor is fitted from its counterpart: it is requantized, and more precise there. */
bool spk_convert_is_fitted(const spk_convert_plan *plan, uint64_t tensor_index);

/* Where to quantize: SPK_DEVICE_AUTO is the GPU where there is one, enough to do, and no calibration. */
typedef enum { SPK_DEVICE_AUTO = 0, SPK_DEVICE_CPU, SPK_DEVICE_CUDA } spk_convert_device;
/* *on_gpu for options.on_gpu, and then the GPU's name.  SPK_E_UNSUPPORTED if it must be a GPU and there is none. */
SPK_MUST_CHECK spk_status spk_convert_choose_device(spk_convert_device device, const spk_convert_options *options,
                                                    const spk_convert_plan *plan, bool *on_gpu,
                                                    char name[SPK_QUANT_GPU_NAME_SIZE], spk_error *err);

/* Do it.  On failure nothing is left at out_path (or what was there stays).  A source that changes meanwhile is
 * SPK_E_IO.  A block with a NaN or infinite scale that would be requantized is SPK_E_NONFINITE with tensor, expert, row and
 * block, and one with a weight that its new type cannot hold (spk_quant_range) is SPK_E_LIMIT, likewise. */
SPK_MUST_CHECK spk_status spk_convert_run(const spk_convert_options *options, spk_convert_plan *plan, spk_error *err);

typedef enum {
    SPK_UNPACK_IDENTICAL = 0, /* the source's bytes, by size and digest */
    SPK_UNPACK_EQUIVALENT,    /* its tensors and metadata, but not its bytes: it has padding other than zeros, or data
                               * in another order than tensor infos, or it was split */
    SPK_UNPACK_REQUANTIZED    /* some tensors are not the source's */
} spk_unpack_result;

/* Pack to GGUF: the source's metadata as it was (also where weights were requantized), tensors in the source's order,
 * GGML rows, padding of zeros; after the last tensor only as much of it as the source has.  *result is what this comes
 * to, found by hashing what is written.  The pack's data checksums are verified first.  SPK_E_EXISTS if out_path is the
 * pack itself. */
SPK_MUST_CHECK spk_status spk_unpack(const spk_pack *pack, const char *out_path, bool replace,
                                     spk_convert_progress_fn *progress, void *progress_context,
                                     spk_unpack_result *result, spk_error *err);

#endif
