/* requant/budget_tensor.c - one tensor requantized in memory, by the code that fills packs, laid out as kernels read it. */
#include "requant/budget_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "requant/convert_internal.h"

#define PIECE_WEIGHTS (UINT64_C(1) << 18)          /* that a thread takes at a time: whole row groups */
enum { BLOCK_ALIGN = 4096 };

typedef struct {
    const spk_convert_job *job;
    const spk_tensor      *tensor;
    uint64_t               index, group_rows, group_bytes;    /* of the layout */
    uint64_t               piece_rows, pieces_per_matrix;
    uint8_t               *block;
    spk_convert_scratch   *scratches;      /* one for each thread */
    spk_status            *status;         /* one for each piece */
    spk_error             *errors;
} tensor_fill;

static void fill_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    tensor_fill *fill = context;
    const spk_tensor *t = fill->tensor;
    for (uint64_t i = begin; i < end; i++) {
        uint64_t matrix = i / fill->pieces_per_matrix, row = i % fill->pieces_per_matrix * fill->piece_rows;
        uint64_t row_end = row + fill->piece_rows < t->dims[1] ? row + fill->piece_rows : t->dims[1];
        uint64_t groups = (row_end - row + fill->group_rows - 1) / fill->group_rows;
        spk_run run = { .section = t->section, .size_bytes = groups * fill->group_bytes, .piece_count = 1,
                        .pieces = { { .tensor_index = fill->index, .matrix_index = matrix, .row_begin = row,
                                      .row_end = row_end } } };
        spk_quant_error sums[SPK_RUN_PIECE_MAX];
        uint64_t passed_bytes[SPK_CONVERT_FILE_COUNT];
        fill->status[i] = spk_convert_fill(fill->job, &run, &fill->scratches[thread_index],
                                           fill->block + matrix * t->matrix_stride_bytes + row / fill->group_rows * fill->group_bytes,
                                           sums, passed_bytes, &fill->errors[i]);
    }
}

/* The plan with the tensor's new type, and the tensor alone in memory of its own. */
static spk_status place_alone(const spk_convert_plan *plan, uint64_t index, uint32_t type, spk_tensor **out,
                              spk_error *err) {
    spk_tensor *tensors = malloc(plan->tensor_count * sizeof *tensors);
    if (tensors == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for %" PRIu64 " tensors", plan->tensor_count);
    memcpy(tensors, plan->tensors, plan->tensor_count * sizeof *tensors);
    spk_tensor *t = &tensors[index];
    uint64_t section_bytes[SPK_PLACE_COUNT];
    t->type = type;
    spk_status status = spk_model_place(&plan->config, tensors, plan->tensor_count, section_bytes, err);
    if (status != SPK_OK) {
        free(tensors);
        return status;
    }
    t->offset_bytes = 0;
    t->unit_stride_bytes = spk_layout_unit_bytes(t->layout, type, t->dims[0]);
    t->matrix_stride_bytes = spk_tensor_matrix_count(t) == 1 ? 0 :
                             t->unit_stride_bytes * spk_layout_unit_count(t->layout, type, t->dims[1], t->dims[0]);
    *out = tensors;
    return SPK_OK;
}

static spk_status fill_block(tensor_fill *fill, uint64_t piece_count, spk_pool *pool, spk_error *err) {
    uint32_t thread_count = spk_pool_thread_count(pool);
    spk_status status = SPK_OK;
    fill->scratches = calloc(thread_count, sizeof *fill->scratches);
    fill->status = calloc(piece_count, sizeof *fill->status);
    fill->errors = calloc(piece_count, sizeof *fill->errors);
    bool has_memory = fill->scratches != NULL && fill->status != NULL && fill->errors != NULL;
    for (uint32_t i = 0; i < thread_count && has_memory; i++)
        has_memory = spk_convert_scratch_alloc(fill->job, &fill->scratches[i]);
    if (!has_memory) status = spk_fail(err, SPK_E_MEMORY, "out of memory to requantize '%s'", fill->tensor->name);
    if (status == SPK_OK) spk_pool_run(pool, piece_count, 1, fill_pieces, fill);
    for (uint64_t i = 0; i < piece_count && status == SPK_OK; i++) {
        status = fill->status[i];
        if (status != SPK_OK && err != NULL) *err = fill->errors[i];
    }
    for (uint32_t i = 0; i < thread_count && fill->scratches != NULL; i++) spk_convert_scratch_free(&fill->scratches[i]);
    free(fill->scratches);
    free(fill->status);
    free(fill->errors);
    return status;
}

spk_status spk_budget_requantize(const spk_convert_options *options, const spk_convert_plan *plan, uint64_t index,
                                 uint32_t type, spk_pool *pool, spk_tensor *out, uint8_t **block, spk_error *err) {
    spk_convert_plan alone = *plan;
    SPK_TRY(place_alone(plan, index, type, &alone.tensors, err));
    const spk_tensor *t = &alone.tensors[index];
    spk_convert_job job = { .options = options, .plan = &alone, .stretch_weights_max = SPK_CONVERT_STRETCH_WEIGHTS };
    if (t->dims[0] > job.stretch_weights_max) job.stretch_weights_max = t->dims[0];
    tensor_fill fill = { .job = &job, .tensor = t, .index = index, .group_rows = 1, .group_bytes = t->unit_stride_bytes };
    if (t->layout == SPK_LAYOUT_T32) {
        spk_t32_geometry geometry = spk_t32_geometry_of(type, t->dims[1], t->dims[0]);
        fill.group_rows = geometry.rows_per_group;
        fill.group_bytes = geometry.tiles_per_group * t->unit_stride_bytes;
    }
    uint64_t piece_groups = PIECE_WEIGHTS / (fill.group_rows * t->dims[0]);
    fill.piece_rows = (piece_groups == 0 ? 1 : piece_groups) * fill.group_rows;
    fill.pieces_per_matrix = (t->dims[1] + fill.piece_rows - 1) / fill.piece_rows;
    job.piece_bytes_max = fill.piece_rows * spk_layout_unit_bytes(SPK_LAYOUT_ROWS, type, t->dims[0]);
    job.run_bytes_max = fill.piece_rows / fill.group_rows * fill.group_bytes;
    uint64_t size = (spk_tensor_span_bytes(t) + BLOCK_ALIGN - 1) / BLOCK_ALIGN * BLOCK_ALIGN;
    spk_status status = SPK_OK;
    fill.block = aligned_alloc(BLOCK_ALIGN, size);
    if (fill.block == NULL) status = spk_fail(err, SPK_E_MEMORY, "out of memory for %" PRIu64 " bytes of '%s'", size, t->name);
    else status = fill_block(&fill, fill.pieces_per_matrix * spk_tensor_matrix_count(t), pool, err);
    if (status == SPK_OK) {
        *out = *t;
        *block = fill.block;
    } else {
        free(fill.block);
    }
    free(alone.tensors);
    return status;
}
