/* requant/convert.c - GGUF to pack: the plan, one run's work, and the frame around the pipeline.  See convert.h.
 *
 * What a newcomer gets wrong: a run's piece counts rows over all matrices of a tensor when matrix_index is 0 and the
 * tensor is plain, so places in messages are derived from the row's number in the whole tensor.
 */
#include "requant/convert.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "formats/census.h"
#include "formats/dequant.h"
#include "formats/outfile.h"
#include "formats/version.h"
#include "requant/convert_internal.h"

/* ---- The plan ---- */

spk_status spk_convert_out_of_memory(const spk_gguf *file, spk_error *err) {
    return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", spk_gguf_part_path(file, 0));
}

static spk_status refuse_as_output(const spk_gguf *file, const char *what, const char *out_path, spk_error *err) {
    for (uint32_t part = 0; part < spk_gguf_part_count(file); part++)
        if (spk_same_file(spk_gguf_part_path(file, part), out_path))
            return spk_fail(err, SPK_E_EXISTS, "%s: is %s, expected another path for the output", out_path, what);
    return SPK_OK;
}

static spk_status check_output(const spk_convert_options *options, spk_error *err) {
    if (options->out_path == NULL) return SPK_OK;
    SPK_TRY(refuse_as_output(options->source, "the source itself", options->out_path, err));
    if (options->weights == NULL) return SPK_OK;
    return refuse_as_output(options->weights, "the file of better weights", options->out_path, err);
}

spk_status spk_convert_note_fallback(spk_convert_plan *plan, spk_error *err, const char *format, ...) {
    uint64_t count = plan->importance_fallback_count;
    char **larger = realloc(plan->importance_fallbacks, (count + 1) * sizeof *larger), *text;
    if (larger == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    plan->importance_fallbacks = larger;
    va_list args;
    va_start(args, format);
    int length = vasprintf(&text, format, args);
    va_end(args);
    if (length < 0) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    plan->importance_fallbacks[count] = text;
    plan->importance_fallback_count = count + 1;
    return SPK_OK;
}

/* Every requantized matrix is looked up now, so that a wrong imatrix fails before an hour of work. */
static spk_status check_importance(const spk_imatrix *imatrix, spk_convert_plan *plan, spk_error *err) {
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        const spk_tensor *t = &plan->tensors[i];
        uint64_t matrix_count = spk_tensor_matrix_count(t);
        if (!spk_tensor_is_requantized(t)) continue;
        for (uint64_t m = 0; m < matrix_count; m++) {
            spk_imatrix_answer answer;
            const float *importance;
            SPK_TRY(spk_imatrix_lookup(imatrix, t->name, t->dims[0], matrix_count, m, &answer, &importance, err));
            if (answer == SPK_IMATRIX_ABSENT) {
                SPK_TRY(spk_convert_note_fallback(plan, err, "%s: no entry", t->name));
                break;
            }
            if (answer == SPK_IMATRIX_UNUSABLE && matrix_count == 1)
                SPK_TRY(spk_convert_note_fallback(plan, err, "%s: no usable values", t->name));
            else if (answer == SPK_IMATRIX_UNUSABLE)
                SPK_TRY(spk_convert_note_fallback(plan, err, "%s expert %" PRIu64 ": no usable values", t->name, m));
        }
    }
    return SPK_OK;
}

/* Configuration and unplaced tensors; the caller frees *tensors, in case of failure too. */
static spk_status read_model(const spk_gguf *source, spk_model_config *config, spk_tensor **tensors,
                             uint64_t *tensor_count, spk_error *err) {
    *tensor_count = spk_gguf_tensor_count(source);
    *tensors = calloc(*tensor_count + 1, sizeof **tensors);
    if (*tensors == NULL) return spk_convert_out_of_memory(source, err);
    for (uint64_t i = 0; i < *tensor_count; i++) spk_tensor_from_gguf(spk_gguf_tensor_at(source, i), &(*tensors)[i]);
    return spk_model_config_read(spk_gguf_kvs(source), *tensors, *tensor_count, spk_gguf_part_path(source, 0), config,
                                 err);
}

spk_status spk_convert_config(const spk_gguf *source, spk_model_config *out, spk_error *err) {
    spk_tensor *tensors = NULL;
    uint64_t tensor_count;
    spk_status status = read_model(source, out, &tensors, &tensor_count, err);
    free(tensors);
    return status;
}

static spk_status make_plan(const spk_convert_options *options, spk_convert_plan *plan, spk_error *err) {
    const spk_gguf *source = options->source;
    SPK_TRY(check_output(options, err));
    SPK_TRY(read_model(source, &plan->config, &plan->tensors, &plan->tensor_count, err));
    plan->choices = calloc(plan->tensor_count + 1, sizeof *plan->choices);
    plan->counterparts = calloc(plan->tensor_count + 1, sizeof *plan->counterparts);
    if (plan->choices == NULL || plan->counterparts == NULL) return spk_convert_out_of_memory(source, err);
    spk_status status = spk_recipe_apply(options->recipe, &plan->config, plan->tensors, plan->tensor_count,
                                         plan->choices, err);
    if (status != SPK_OK) return spk_fail_in(spk_gguf_part_path(source, 0), status, err);
    for (uint64_t i = 0; i < plan->tensor_count; i++) plan->tensors[i].type = plan->choices[i].type;
    status = spk_model_place(&plan->config, plan->tensors, plan->tensor_count, plan->section_bytes, err);
    if (status != SPK_OK) return spk_fail_in(spk_gguf_part_path(source, 0), status, err);
    if (options->weights != NULL) SPK_TRY(spk_convert_check_weights(options, plan, err));
    if (options->calibration != NULL) return spk_convert_check_calibration(options, plan, err);
    return options->imatrix == NULL ? SPK_OK : check_importance(options->imatrix, plan, err);
}

spk_status spk_convert_plan_make(const spk_convert_options *options, spk_convert_plan *out, spk_error *err) {
    spk_convert_plan plan = { .tensor_count = 0 };
    spk_status status = make_plan(options, &plan, err);
    if (status == SPK_OK)
        *out = plan;
    else
        spk_convert_plan_free(&plan);
    return status;
}

void spk_convert_plan_free(spk_convert_plan *plan) {
    for (uint64_t i = 0; i < plan->importance_fallback_count; i++) free(plan->importance_fallbacks[i]);
    free(plan->importance_fallbacks);
    free(plan->tensors);
    free(plan->choices);
    free(plan->counterparts);
    *plan = (spk_convert_plan){ .tensor_count = 0 };
}

/* ---- One run ---- */

/* Rows [row_begin, row_begin + row_count) of a tensor, counted over all its matrices. */
typedef struct {
    const spk_gguf        *file;         /* what they are read from */
    const spk_gguf_tensor *source;       /* in that file */
    const spk_tensor      *tensor;
    uint64_t               source_row_bytes, row_bytes;
    uint64_t               row_begin, row_count;
} row_range;

static uint64_t row_bytes_of(uint32_t type, uint64_t col_count) {
    return spk_layout_unit_bytes(SPK_LAYOUT_ROWS, type, col_count);
}

static row_range rows_of_piece(const spk_convert_job *job, const spk_piece *piece) {
    const spk_convert_options *options = job->options;
    const spk_tensor *t = &job->plan->tensors[piece->tensor_index];
    bool is_fitted = spk_convert_is_fitted(job->plan, piece->tensor_index);
    const spk_gguf_tensor *source = is_fitted ? job->plan->counterparts[piece->tensor_index]
                                              : spk_gguf_tensor_at(options->source, piece->tensor_index);
    return (row_range){ .file = is_fitted ? options->weights : options->source, .source = source, .tensor = t,
                        .source_row_bytes = row_bytes_of(source->type, t->dims[0]),
                        .row_bytes = row_bytes_of(t->type, t->dims[0]),
                        .row_begin = piece->matrix_index * t->dims[1] + piece->row_begin,
                        .row_count = piece->row_end - piece->row_begin };
}

/* Where they lie, or in the buffer. */
static spk_status view_rows(const row_range *range, uint8_t *buffer, const uint8_t **out, spk_error *err) {
    return spk_gguf_view(range->file, range->source->part_index,
                         range->source->file_offset_bytes + range->row_begin * range->source_row_bytes,
                         range->row_count * range->source_row_bytes, buffer, out, err);
}

/* What is wrong with one of the file's blocks, counted from the first row of the range. */
static spk_status refuse_block(const row_range *range, uint64_t block, spk_status status, const char *what, spk_error *err) {
    const spk_tensor *t = range->tensor;
    uint64_t blocks_per_row = t->dims[0] / spk_type_find(range->source->type)->block_weights;
    uint64_t row = range->row_begin + block / blocks_per_row;
    char expert[40] = "";
    if (spk_tensor_matrix_count(t) > 1)
        (void)snprintf(expert, sizeof expert, "expert %" PRIu64 ", ", row / t->dims[1]);
    return spk_fail(err, status, "%s: tensor '%s', %srow %" PRIu64 ", block %" PRIu64 ": %s, cannot be requantized",
                    spk_gguf_part_path(range->file, range->source->part_index), t->name, expert, row % t->dims[1],
                    block % blocks_per_row, what);
}

/* Once they are used, so that the process does not come to hold the whole file. */
static void forget_rows(const row_range *range) {
    spk_gguf_forget(range->file, range->source->part_index,
                    range->source->file_offset_bytes + range->row_begin * range->source_row_bytes,
                    range->row_count * range->source_row_bytes);
}

static spk_status refuse_nonfinite(const row_range *range, const uint8_t *source, spk_error *err) {
    const spk_type_info *type = spk_type_find(range->source->type);
    uint64_t bad = spk_find_nonfinite(type->type, source, range->row_count * (range->tensor->dims[0] / type->block_weights));
    if (bad == UINT64_MAX) return SPK_OK;
    return refuse_block(range, bad, SPK_E_NONFINITE, type->is_quantized ? "NaN or infinite scale" : "NaN or infinite weight", err);
}

/* What a quantizer says of a weight that it does not take, with its place in the file; else what it says.  No NaN comes so far, but of
 * a file that is changed after refuse_nonfinite. */
static spk_status refuse_beyond(const row_range *range, const float *weights, spk_status status, spk_error *err) {
    uint32_t type = range->tensor->type, block_weights = spk_type_find(range->source->type)->block_weights;
    bool is_of_a_weight = status == SPK_E_LIMIT || status == SPK_E_NONFINITE;
    uint64_t bad = is_of_a_weight ? spk_quant_find_beyond(type, weights, range->row_count * range->tensor->dims[0]) : UINT64_MAX;
    if (bad == UINT64_MAX) return status;
    if (status == SPK_E_NONFINITE) return refuse_block(range, bad / block_weights, status, "NaN or infinite weight", err);
    float low, high;
    char what[120];
    spk_quant_range(type, &low, &high);
    (void)snprintf(what, sizeof what, "weight %.9g is beyond what spk writes as %s (%.9g to %.9g)", (double)weights[bad], spk_type_name(type),
                   (double)low, (double)high);
    return refuse_block(range, bad / block_weights, SPK_E_LIMIT, what, err);
}

/* Rows that are summed at a time: the sums are in the pack, to the last bit. */
static uint64_t summed_rows_of(const spk_tensor *t) {
    uint64_t rows = SPK_CONVERT_STRETCH_WEIGHTS / t->dims[0];
    return rows == 0 ? 1 : rows;
}

/* Rows that are made at a time: of a calibrated matrix as many as there are. */
static uint64_t stretch_rows_of(const spk_convert_options *options, const spk_tensor *t, bool on_gpu) {
    if (spk_convert_is_calibrated(options, t)) return t->dims[1];
    return summed_rows_of(t) * (on_gpu ? SPK_CONVERT_GPU_STRETCHES : 1);
}

static void add_errors(const row_range *range, uint64_t summed_rows, const spk_convert_scratch *scratch, spk_quant_error *sums) {
    uint64_t cols = range->tensor->dims[0];
    for (uint64_t row = 0; row < range->row_count; row += summed_rows) {
        uint64_t rows = range->row_count - row < summed_rows ? range->row_count - row : summed_rows;
        spk_quant_error_add(sums, scratch->weights + row * cols, scratch->decoded + row * cols, rows * cols);
    }
}

/* A few rows of one matrix: source -> floats -> blocks -> floats, and the difference. */
static spk_status requantize_stretch(const spk_convert_job *job, const row_range *range, const float *importance,
                                     spk_convert_scratch *scratch, uint8_t *out, spk_quant_error *sums,
                                     spk_error *err) {
    const spk_tensor *t = range->tensor;
    const spk_convert_options *options = job->options;
    uint64_t weight_count = range->row_count * t->dims[0];
    const uint8_t *source;
    SPK_TRY(view_rows(range, scratch->source, &source, err));
    SPK_TRY(refuse_nonfinite(range, source, err));
    spk_dequantize(range->source->type, source, weight_count, scratch->weights);
    spk_quant_job quant = { .type = t->type, .row_count = range->row_count, .col_count = t->dims[0],
                            .weights = scratch->weights, .importance = importance, .blocks = out,
                            .effort = options->effort };
    bool is_calibrated = spk_convert_is_calibrated(options, t);
    spk_status status = is_calibrated
        ? spk_convert_quantize_calibrated(options, job->plan, t, range->row_begin / t->dims[1], &quant, err)
        : scratch->queue != NULL ? spk_quantize_queued(scratch->queue, &quant, err) : spk_quantize(&quant, err);
    SPK_TRY(refuse_beyond(range, scratch->weights, status, err));
    spk_dequantize(t->type, out, weight_count, scratch->decoded);
    add_errors(range, is_calibrated ? range->row_count : summed_rows_of(t), scratch, sums);
    return SPK_OK;
}

static spk_status requantize_rows(const spk_convert_job *job, const row_range *range, spk_convert_scratch *scratch,
                                  spk_quant_error *sums, spk_error *err) {
    const spk_tensor *t = range->tensor;
    uint64_t stretch_rows = stretch_rows_of(job->options, t, scratch->queue != NULL), done = 0;
    while (done < range->row_count) {
        row_range stretch = *range;
        stretch.row_begin = range->row_begin + done;
        uint64_t matrix = stretch.row_begin / t->dims[1], matrix_end = (matrix + 1) * t->dims[1] - range->row_begin;
        uint64_t end = done + stretch_rows < range->row_count ? done + stretch_rows : range->row_count;
        stretch.row_count = (end < matrix_end ? end : matrix_end) - done;
        const float *importance = NULL;
        spk_imatrix_answer answer;
        if (job->options->imatrix != NULL)
            SPK_TRY(spk_imatrix_lookup(job->options->imatrix, t->name, t->dims[0], spk_tensor_matrix_count(t), matrix,
                                       &answer, &importance, err));
        SPK_TRY(requantize_stretch(job, &stretch, importance, scratch, scratch->rows + done * range->row_bytes, sums,
                                   err));
        done += stretch.row_count;
    }
    return SPK_OK;
}

spk_status spk_convert_fill(const spk_convert_job *job, const spk_run *run, spk_convert_scratch *scratch,
                            uint8_t *buffer, spk_quant_error errors[SPK_RUN_PIECE_MAX],
                            uint64_t passed_bytes[SPK_CONVERT_FILE_COUNT], spk_error *err) {
    spk_run_begin(run, job->plan->tensors, buffer);
    memset(errors, 0, SPK_RUN_PIECE_MAX * sizeof *errors);
    memset(passed_bytes, 0, SPK_CONVERT_FILE_COUNT * sizeof *passed_bytes);
    for (uint32_t p = 0; p < run->piece_count; p++) {
        row_range range = rows_of_piece(job, &run->pieces[p]);
        const uint8_t *rows = scratch->rows;
        if (spk_tensor_is_requantized(range.tensor))
            SPK_TRY(requantize_rows(job, &range, scratch, &errors[p], err));
        else
            SPK_TRY(view_rows(&range, scratch->rows, &rows, err));
        spk_run_put(run, p, job->plan->tensors, rows, buffer);
        forget_rows(&range);
        const spk_gguf_tensor *counterpart = job->plan->counterparts[run->pieces[p].tensor_index];
        uint64_t col_count = range.tensor->dims[0];
        passed_bytes[SPK_CONVERT_SOURCE] += range.row_count * row_bytes_of(range.tensor->source_type, col_count);
        if (counterpart != NULL)
            passed_bytes[SPK_CONVERT_WEIGHTS] += range.row_count * row_bytes_of(counterpart->type, col_count);
    }
    return SPK_OK;
}

/* ---- The frame ---- */

spk_status spk_convert_make_job(const spk_convert_options *options, const spk_convert_plan *plan, spk_convert_job *out,
                                spk_error *err) {
    spk_convert_job job = { .options = options, .plan = plan, .stretch_weights_max = SPK_CONVERT_STRETCH_WEIGHTS };
    spk_status status = spk_model_runs(plan->tensors, plan->tensor_count, plan->section_bytes, &job.runs,
                                       &job.run_count, err);
    if (status != SPK_OK) return spk_fail_in(spk_gguf_part_path(options->source, 0), status, err);
    for (uint64_t i = 0; i < job.run_count; i++) {
        const spk_run *run = &job.runs[i];
        if (run->size_bytes > job.run_bytes_max) job.run_bytes_max = run->size_bytes;
        for (uint32_t p = 0; p < run->piece_count; p++) {
            row_range range = rows_of_piece(&job, &run->pieces[p]);
            uint64_t bytes = range.row_count * range.row_bytes, cols = range.tensor->dims[0];
            if (bytes > job.piece_bytes_max) job.piece_bytes_max = bytes;
            if (!spk_tensor_is_requantized(range.tensor)) continue;
            uint64_t rows = stretch_rows_of(options, range.tensor, options->on_gpu);
            if (rows > range.row_count) rows = range.row_count;
            if (rows * cols > job.stretch_weights_max) job.stretch_weights_max = rows * cols;
        }
    }
    *out = job;
    return SPK_OK;
}

/* The source's entries for the pack.  Of a split model that is now one file the split.* keys are left out. */
static spk_status make_kv_bytes(const spk_gguf *source, uint8_t **out, uint64_t *out_size, uint64_t *out_count,
                                spk_error *err) {
    const spk_kv_set *kvs = spk_gguf_kvs(source);
    bool is_split = spk_gguf_part_count(source) > 1;
    uint64_t size = 0, count = 0;
    for (uint64_t i = 0; i < kvs->count; i++) size += kvs->items[i].entry_bytes;
    uint8_t *bytes = malloc(size + 1);
    if (bytes == NULL) return spk_convert_out_of_memory(source, err);
    size = 0;
    for (uint64_t i = 0; i < kvs->count; i++) {
        const spk_kv *kv = &kvs->items[i];
        if (is_split && kv->key.size_bytes >= 6 && memcmp(kv->key.bytes, "split.", 6) == 0) continue;
        memcpy(bytes + size, kv->entry, kv->entry_bytes);
        size += kv->entry_bytes;
        count++;
    }
    *out = bytes;
    *out_size = size;
    *out_count = count;
    return SPK_OK;
}

static spk_status begin_pack(const spk_convert_job *job, spk_pack_writer **out, spk_error *err) {
    const spk_convert_options *options = job->options;
    const spk_convert_plan *plan = job->plan;
    spk_digest digest;
    spk_pack_writer_options pack = { .path = options->out_path, .replace = options->replace, .file = options->out_file,
                                     .config = &plan->config, .tensor_count = plan->tensor_count, .job = &digest,
                                     .resume = options->resume };
    memcpy(pack.section_bytes, plan->section_bytes, sizeof pack.section_bytes);
    uint8_t *kv_bytes = NULL;
    spk_status status = spk_convert_job_digest(job, &digest, err);
    if (status == SPK_OK) status = make_kv_bytes(options->source, &kv_bytes, &pack.kv_bytes_size, &pack.kv_count, err);
    pack.kv_bytes = kv_bytes;
    if (status == SPK_OK) status = spk_pack_writer_begin(&pack, out, err);
    else spk_outfile_abort(options->out_file);
    free(kv_bytes);
    return status;
}

static const char *base_name(const spk_gguf *file) {
    const char *path = spk_gguf_part_path(file, 0), *slash = strrchr(path, '/');
    return slash == NULL ? path : slash + 1;
}

static uint64_t file_bytes(const spk_gguf *file) {
    uint64_t sum = 0;
    for (uint32_t part = 0; part < spk_gguf_part_count(file); part++) sum += spk_gguf_part_bytes(file, part);
    return sum;
}

/* What wrote the pack, and with what effort if not the usual one. */
static const char *tool_version(spk_quant_effort effort) {
    switch (effort) {
    case SPK_EFFORT_FAST: return "spk-pack " SPK_VERSION_TEXT ", effort fast";
    case SPK_EFFORT_BEST: return "spk-pack " SPK_VERSION_TEXT ", effort best";
    default:              return "spk-pack " SPK_VERSION_TEXT;
    }
}

static spk_provenance make_provenance(const spk_convert_options *options, const spk_convert_plan *plan,
                                      const spk_digest digests[SPK_CONVERT_FILE_COUNT]) {
    const spk_gguf *source = options->source;
    bool is_learnt = options->imatrix != NULL || options->calibration != NULL;
    spk_provenance provenance = { .source_name = base_name(source), .source_bytes = file_bytes(source),
                                  .source_digest = digests[SPK_CONVERT_SOURCE],
                                  .source_version = spk_gguf_version(source),
                                  .source_alignment_bytes = spk_gguf_alignment_bytes(source),
                                  .recipe_name = spk_recipe_name(options->recipe),
                                  .recipe_text = spk_recipe_text(options->recipe),
                                  .imatrix_name = is_learnt ? options->imatrix_name : "",
                                  .weights_name = "", .tool_version = tool_version(options->effort) };
    if (plan->fitted_count > 0) {
        provenance.weights_name = base_name(options->weights);
        provenance.weights_bytes = file_bytes(options->weights);
        provenance.weights_digest = digests[SPK_CONVERT_WEIGHTS];
    }
    return provenance;
}

spk_status spk_convert_run(const spk_convert_options *options, spk_convert_plan *plan, spk_error *err) {
    assert(options->out_path != NULL);
    spk_convert_job job = { .runs = NULL };
    spk_pack_writer *writer = NULL;
    spk_digest digests[SPK_CONVERT_FILE_COUNT];
    spk_quant_error *errors = calloc(plan->tensor_count + 1, sizeof *errors);
    spk_status status = errors == NULL ? spk_convert_out_of_memory(options->source, err) : SPK_OK;
    if (status == SPK_OK) status = spk_convert_make_job(options, plan, &job, err);
    if (status == SPK_OK) status = begin_pack(&job, &writer, err);
    else spk_outfile_abort(options->out_file);
    if (status == SPK_OK) status = spk_convert_pipeline(&job, writer, errors, digests, err);
    if (status == SPK_OK) status = spk_gguf_check_unchanged(options->source, err);
    if (status == SPK_OK && plan->fitted_count > 0) status = spk_gguf_check_unchanged(options->weights, err);
    if (status == SPK_OK) {
        plan->resumed_bytes = spk_pack_writer_replayed_bytes(writer);
        for (uint64_t i = 0; i < plan->tensor_count; i++) {
            spk_tensor *t = &plan->tensors[i];
            if (!spk_tensor_is_requantized(t)) continue;
            t->relative_rmse = spk_quant_error_relative_rmse(&errors[i]);
            t->max_abs_error = errors[i].max_abs_error;
            t->cosine = spk_quant_error_cosine(&errors[i]);
        }
        spk_provenance provenance = make_provenance(options, plan, digests);
        status = spk_pack_writer_commit(writer, plan->tensors, &provenance, err);
        writer = NULL;
    }
    spk_pack_writer_abort(writer);
    free(job.runs);
    free(errors);
    return status;
}
