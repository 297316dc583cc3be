/* formats/place.c - where tensors go in a pack, and the runs that fill it.  See model.h.
 *
 * Placement is by *clusters*: one tensor; a gate/up pair whose tiles alternate; or the experts of a layer.  The order of
 * clusters is the order in which decode consumes them.  Runs are derived from offsets and strides alone, but only of places
 * that are given here: a pack's directory, which may be another's, has to be checked against them first.
 */
#include "formats/model.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "formats/dequant.h"
#include "formats/gguf.h"

enum { TENSOR_ALIGN = 128, EXPERT_ALIGN = 4096, SECTION_ALIGN = 4096 };
#define ROW_BYTES_MAX (UINT64_C(64) << 20)    /* a row is never cut, so it bounds the packer's buffers */
#define EXPERT_BYTES_MAX (UINT64_C(256) << 20)
#define SECTION_BYTES_MAX (UINT64_C(1) << 50)

static uint64_t align_up(uint64_t value, uint64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

uint64_t spk_tensor_matrix_count(const spk_tensor *tensor) { return tensor->dims[2] * tensor->dims[3]; }

void spk_tensor_from_gguf(const spk_gguf_tensor *source, spk_tensor *out) {
    *out = (spk_tensor){ .type = source->type, .source_type = source->type, .dim_count = source->dim_count, .cosine = 1.0 };
    memcpy(out->name, source->name, sizeof out->name);
    memcpy(out->dims, source->dims, sizeof out->dims);
}

uint64_t spk_tensor_bytes(const spk_tensor *t) {
    const spk_type_info *type = spk_type_find(t->type);
    return t->dims[0] / type->block_weights * type->block_bytes * t->dims[1] * spk_tensor_matrix_count(t);
}

uint64_t spk_tensor_bytes_per_token(const spk_model_config *config, const spk_tensor *t) {
    switch (t->section) {
    case SPK_PLACE_STATIC:    return spk_tensor_bytes(t);
    case SPK_PLACE_EXPERTS:
        if (config->expert_count == 0) return 0;   /* a directory's word against the configuration's */
        return spk_tensor_bytes(t) / config->expert_count * config->expert_used_count;
    case SPK_PLACE_EMBEDDING: return spk_tensor_bytes(t) / t->dims[1];
    default:                  return 0;
    }
}

spk_matrix spk_tensor_matrix(const spk_tensor *tensor, const uint8_t *section, uint64_t index) {
    return (spk_matrix){ .data = section + tensor->offset_bytes + index * tensor->matrix_stride_bytes,
                         .unit_stride_bytes = tensor->unit_stride_bytes, .type = tensor->type,
                         .layout = tensor->layout, .row_count = tensor->dims[1], .col_count = tensor->dims[0] };
}

static uint64_t unit_bytes_of(const spk_tensor *t) { return spk_layout_unit_bytes(t->layout, t->type, t->dims[0]); }
static uint64_t unit_count_of(const spk_tensor *t) {
    return spk_layout_unit_count(t->layout, t->type, t->dims[1], t->dims[0]);
}

uint64_t spk_tensor_span_bytes(const spk_tensor *tensor) {
    return (spk_tensor_matrix_count(tensor) - 1) * tensor->matrix_stride_bytes +
           (unit_count_of(tensor) - 1) * tensor->unit_stride_bytes + unit_bytes_of(tensor);
}

/* ---- Placement ---- */

typedef struct {
    uint64_t tensor_index;
    uint32_t section, layer, role;
} placed;

static int compare_placed(const void *a, const void *b) {
    const placed *x = a, *y = b;
    if (x->section != y->section) return x->section < y->section ? -1 : 1;
    if (x->layer != y->layer) return x->layer < y->layer ? -1 : 1;
    if (x->role != y->role) return x->role < y->role ? -1 : 1;
    return x->tensor_index < y->tensor_index ? -1 : x->tensor_index > y->tensor_index;
}

static uint32_t section_of(const spk_model_config *config, spk_role role) {
    switch (role) {
    case SPK_ROLE_EXTRA:       return SPK_PLACE_EXTRA;
    case SPK_ROLE_TOKEN_EMBD:  return config->is_tied ? SPK_PLACE_STATIC : SPK_PLACE_EMBEDDING;
    case SPK_ROLE_EXPERT_GATE: case SPK_ROLE_EXPERT_UP: case SPK_ROLE_EXPERT_DOWN: return SPK_PLACE_EXPERTS;
    default:                   return SPK_PLACE_STATIC;
    }
}

/* T32 for what decode multiplies by; float types and tables read by row stay in rows. */
static uint32_t layout_of(const spk_tensor *t, uint32_t section, spk_role role) {
    bool is_multiplied = section != SPK_PLACE_EXTRA && section != SPK_PLACE_EMBEDDING && !(role == SPK_ROLE_GDN_CONV);
    return is_multiplied && spk_t32_accepts(t->type, t->dims[0]) ? SPK_LAYOUT_T32 : SPK_LAYOUT_ROWS;
}

/* Every size that placement multiplies is bounded here; beyond this, 64-bit arithmetic cannot overflow. */
static spk_status check_sizes(const spk_tensor *t, spk_error *err) {
    uint64_t row_bytes, rows = 1;
    SPK_TRY(spk_type_bytes(t->type, t->dims[0], &row_bytes, err));
    if (row_bytes > ROW_BYTES_MAX)
        return spk_fail(err, SPK_E_LIMIT, "tensor '%s' has rows of %" PRIu64 " bytes, expected at most %" PRIu64, t->name,
                        row_bytes, ROW_BYTES_MAX);
    for (int i = 1; i < 4; i++)
        if (t->dims[i] == 0 || __builtin_mul_overflow(rows, t->dims[i], &rows) || rows > SECTION_BYTES_MAX / row_bytes / 64)
            return spk_fail(err, SPK_E_LIMIT, "tensor '%s' has more rows than a pack can hold", t->name);
    return SPK_OK;
}

static bool is_gate_of_pair(const spk_tensor *gate, const spk_tensor *up) {
    return gate->layout == SPK_LAYOUT_T32 && up->layout == SPK_LAYOUT_T32 && unit_count_of(gate) == unit_count_of(up);
}

/* Units of gate and up alternate; both tensors get offsets from `offset`.  Returns the bytes that one matrix takes. */
static uint64_t interleave(spk_tensor *gate, spk_tensor *up, uint64_t offset) {
    gate->offset_bytes = offset;
    up->offset_bytes = offset + unit_bytes_of(gate);
    gate->unit_stride_bytes = up->unit_stride_bytes = unit_bytes_of(gate) + unit_bytes_of(up);
    return gate->unit_stride_bytes * unit_count_of(gate);
}

static uint64_t place_plain(spk_tensor *t, uint64_t offset) {
    t->offset_bytes = offset;
    t->unit_stride_bytes = unit_bytes_of(t);
    t->matrix_stride_bytes = spk_tensor_matrix_count(t) > 1 ? t->unit_stride_bytes * unit_count_of(t) : 0;
    return t->unit_stride_bytes * unit_count_of(t) * spk_tensor_matrix_count(t);
}

/* One layer's experts: [gate|up][down] for each expert in turn. */
static spk_status place_experts(spk_tensor *gate, spk_tensor *up, spk_tensor *down, uint64_t *offset, spk_error *err) {
    uint64_t start = align_up(*offset, EXPERT_ALIGN), at = start;
    if (is_gate_of_pair(gate, up)) {
        at += interleave(gate, up, at);
    } else {
        (void)place_plain(gate, at);
        at = align_up(at + gate->unit_stride_bytes * unit_count_of(gate), TENSOR_ALIGN);
        (void)place_plain(up, at);
        at += up->unit_stride_bytes * unit_count_of(up);
    }
    at = align_up(at, TENSOR_ALIGN);
    (void)place_plain(down, at);
    at += down->unit_stride_bytes * unit_count_of(down);
    uint64_t stride = align_up(at - start, EXPERT_ALIGN), count = spk_tensor_matrix_count(gate);
    if (stride > EXPERT_BYTES_MAX)
        return spk_fail(err, SPK_E_LIMIT, "an expert of tensor '%s' takes %" PRIu64 " bytes, expected at most %" PRIu64,
                        gate->name, stride, EXPERT_BYTES_MAX);
    gate->matrix_stride_bytes = up->matrix_stride_bytes = down->matrix_stride_bytes = count > 1 ? stride : 0;
    *offset = start + stride * count;
    return SPK_OK;
}

static bool next_is(const placed *order, uint64_t count, uint64_t i, uint32_t role) {
    return i < count && order[i].role == role && order[i].layer == order[i - 1].layer &&
           order[i].section == order[i - 1].section;
}

static spk_status place_in_order(const placed *order, uint64_t count, spk_tensor *tensors,
                                 uint64_t section_bytes[SPK_PLACE_COUNT], spk_error *err) {
    uint64_t ends[SPK_PLACE_COUNT] = { 0 };
    for (uint64_t i = 0; i < count; i++) {
        uint64_t *end = &ends[order[i].section - 1];
        spk_tensor *t = &tensors[order[i].tensor_index];
        if (order[i].role == SPK_ROLE_EXPERT_GATE) {
            assert(next_is(order, count, i + 1, SPK_ROLE_EXPERT_UP) && next_is(order, count, i + 2, SPK_ROLE_EXPERT_DOWN));
            SPK_TRY(place_experts(t, &tensors[order[i + 1].tensor_index], &tensors[order[i + 2].tensor_index], end, err));
            i += 2;
        } else if ((order[i].role == SPK_ROLE_SHARED_GATE || order[i].role == SPK_ROLE_FFN_GATE) &&
                   next_is(order, count, i + 1, order[i].role + 1) &&
                   is_gate_of_pair(t, &tensors[order[i + 1].tensor_index])) {
            spk_tensor *up = &tensors[order[++i].tensor_index];
            uint64_t start = align_up(*end, TENSOR_ALIGN);
            *end = start + interleave(t, up, start);
            t->matrix_stride_bytes = up->matrix_stride_bytes = 0;
        } else {
            uint64_t start = align_up(*end, TENSOR_ALIGN);
            *end = start + place_plain(t, start);
        }
        if (*end > SECTION_BYTES_MAX)
            return spk_fail(err, SPK_E_LIMIT, "tensor '%s' ends beyond the largest section", t->name);
    }
    for (int s = 0; s < SPK_PLACE_COUNT; s++) section_bytes[s] = align_up(ends[s], SECTION_ALIGN);
    return SPK_OK;
}

spk_status spk_model_place(const spk_model_config *config, spk_tensor *tensors, uint64_t tensor_count,
                           uint64_t section_bytes[SPK_PLACE_COUNT], spk_error *err) {
    placed *order = malloc((tensor_count + 1) * sizeof *order);
    if (order == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for %" PRIu64 " tensors", tensor_count);
    spk_status status = SPK_OK;
    for (uint64_t i = 0; i < tensor_count && status == SPK_OK; i++) {
        uint32_t layer;
        spk_role role = spk_model_role(config, tensors[i].name, &layer);
        /* Global tensors follow the layers. */
        bool is_last = role == SPK_ROLE_OUTPUT_NORM || role == SPK_ROLE_OUTPUT || role == SPK_ROLE_TOKEN_EMBD;
        /* A tied table is read as the head, after the output norm. */
        uint32_t rank = role == SPK_ROLE_TOKEN_EMBD ? SPK_ROLE_OUTPUT : (uint32_t)role;
        uint32_t section = section_of(config, role);
        order[i] = (placed){ i, section, is_last ? SPK_LAYER_COUNT_MAX : layer, rank };
        tensors[i].section = section;
        tensors[i].layout = layout_of(&tensors[i], section, role);
        status = check_sizes(&tensors[i], err);
    }
    if (status == SPK_OK) {
        qsort(order, tensor_count, sizeof *order, compare_placed);
        status = place_in_order(order, tensor_count, tensors, section_bytes, err);
    }
    free(order);
    return status;
}

/* ---- Places that were stored ---- */

static spk_status compare_place(const spk_tensor *found, const spk_tensor *expected, const char *where, spk_error *err) {
    const struct { const char *name; uint64_t found, expected; } fields[] = {
        { "section id", found->section, expected->section },
        { "layout id", found->layout, expected->layout },
        { "offset", found->offset_bytes, expected->offset_bytes },
        { "unit stride", found->unit_stride_bytes, expected->unit_stride_bytes },
        { "matrix stride", found->matrix_stride_bytes, expected->matrix_stride_bytes },
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].found != fields[i].expected)
            return spk_fail(err, SPK_E_MISMATCH, "%s: tensor '%s': %s is %" PRIu64 ", expected %" PRIu64 ", where spk-pack puts it",
                            where, found->name, fields[i].name, fields[i].found, fields[i].expected);
    return SPK_OK;
}

spk_status spk_model_place_check(const spk_model_config *config, const spk_tensor *tensors, uint64_t tensor_count,
                                 const uint64_t section_bytes[SPK_PLACE_COUNT], const char *where, spk_error *err) {
    uint64_t expected_bytes[SPK_PLACE_COUNT] = { 0 };
    spk_tensor *expected = malloc((tensor_count + 1) * sizeof *expected);
    if (expected == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " tensors", where, tensor_count);
    memcpy(expected, tensors, tensor_count * sizeof *expected);
    spk_status status = spk_fail_in(where, spk_model_place(config, expected, tensor_count, expected_bytes, err), err);
    for (uint64_t i = 0; i < tensor_count && status == SPK_OK; i++)
        status = compare_place(&tensors[i], &expected[i], where, err);
    free(expected);
    for (int s = 0; s < SPK_PLACE_COUNT && status == SPK_OK; s++)
        if (section_bytes[s] != expected_bytes[s])
            status = spk_fail(err, SPK_E_MISMATCH, "%s: section id %d has %" PRIu64 " bytes, expected %" PRIu64
                              ", which its tensors take", where, s + 1, section_bytes[s], expected_bytes[s]);
    return status;
}

/* ---- Runs ---- */

typedef struct {
    spk_run *items;
    uint64_t count, room;
} run_list;

static spk_status push_run(run_list *list, const spk_run *run, spk_error *err) {
    if (list->count == list->room) {
        uint64_t room = list->room ? list->room * 2 : 256;
        spk_run *larger = realloc(list->items, room * sizeof *larger);
        if (larger == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for %" PRIu64 " runs", room);
        list->items = larger;
        list->room = room;
    }
    list->items[list->count++] = *run;
    return SPK_OK;
}

/* Tensors by section, then offset. */
static int compare_offsets(const void *a, const void *b) {
    const spk_tensor *x = *(const spk_tensor *const *)a, *y = *(const spk_tensor *const *)b;
    if (x->section != y->section) return x->section < y->section ? -1 : 1;
    if (x->offset_bytes != y->offset_bytes) return x->offset_bytes < y->offset_bytes ? -1 : 1;
    return x < y ? -1 : x > y;
}

static uint32_t rows_per_group(const spk_tensor *t) {
    return t->layout == SPK_LAYOUT_T32 ? spk_t32_geometry_of(t->type, t->dims[1], t->dims[0]).rows_per_group : 1;
}

/* Experts: a run for each, holding all rows of the cluster's tensors. */
static spk_status runs_of_experts(run_list *list, const spk_tensor *tensors, const spk_tensor *const *cluster,
                                  uint32_t count, spk_error *err) {
    for (uint64_t m = 0; m < spk_tensor_matrix_count(cluster[0]); m++) {
        spk_run run = { .section = cluster[0]->section, .piece_count = count,
                        .offset_bytes = cluster[0]->offset_bytes + m * cluster[0]->matrix_stride_bytes };
        for (uint32_t p = 0; p < count; p++)
            run.pieces[p] = (spk_piece){ (uint64_t)(cluster[p] - tensors), m, 0, cluster[p]->dims[1],
                                         cluster[p]->offset_bytes - cluster[0]->offset_bytes };
        SPK_TRY(push_run(list, &run, err));
    }
    return SPK_OK;
}

/* One matrix, or a gate/up pair, or contiguous rows of all matrices of a plain tensor: cut by whole row groups. */
static spk_status runs_of_rows(run_list *list, const spk_tensor *tensors, const spk_tensor *const *cluster,
                               uint32_t count, spk_error *err) {
    const spk_tensor *first = cluster[0];
    uint64_t group_rows = rows_per_group(first);
    uint64_t row_total = first->dims[1] * (count == 1 ? spk_tensor_matrix_count(first) : 1);
    uint64_t group_total = (row_total + group_rows - 1) / group_rows;
    uint64_t units_per_group = first->layout == SPK_LAYOUT_T32
        ? spk_t32_geometry_of(first->type, first->dims[1], first->dims[0]).tiles_per_group : 1;
    uint64_t group_bytes = units_per_group * first->unit_stride_bytes;
    uint64_t groups_per_run = SPK_RUN_BYTES_TARGET / group_bytes;
    if (groups_per_run == 0) groups_per_run = 1;
    for (uint64_t g = 0; g < group_total; g += groups_per_run) {
        uint64_t g_end = g + groups_per_run < group_total ? g + groups_per_run : group_total;
        uint64_t row_end = g_end * group_rows < row_total ? g_end * group_rows : row_total;
        spk_run run = { .section = first->section, .piece_count = count,
                        .offset_bytes = first->offset_bytes + g * group_bytes };
        for (uint32_t p = 0; p < count; p++)
            run.pieces[p] = (spk_piece){ (uint64_t)(cluster[p] - tensors), 0, g * group_rows, row_end,
                                         cluster[p]->offset_bytes - first->offset_bytes };
        SPK_TRY(push_run(list, &run, err));
    }
    return SPK_OK;
}

/* A cluster is a set of tensors whose spans overlap: their units alternate, or their experts do. */
static spk_status runs_of_clusters(run_list *list, const spk_tensor *tensors, const spk_tensor **sorted, uint64_t count,
                                   spk_error *err) {
    for (uint64_t i = 0; i < count;) {
        uint64_t end = sorted[i]->offset_bytes + spk_tensor_span_bytes(sorted[i]);
        uint32_t size = 1;
        while (i + size < count && sorted[i + size]->section == sorted[i]->section && sorted[i + size]->offset_bytes < end) {
            uint64_t next_end = sorted[i + size]->offset_bytes + spk_tensor_span_bytes(sorted[i + size]);
            if (next_end > end) end = next_end;
            size++;
        }
        if (size > SPK_RUN_PIECE_MAX)
            return spk_fail(err, SPK_E_CORRUPT, "tensor '%s' overlaps %u others", sorted[i]->name, size - 1);
        bool is_experts = size > 1 && spk_tensor_matrix_count(sorted[i]) > 1;
        SPK_TRY((is_experts ? runs_of_experts : runs_of_rows)(list, tensors, sorted + i, size, err));
        i += size;
    }
    return SPK_OK;
}

/* Each run reaches to the next one's start, so that padding belongs to somebody. */
static void close_gaps(run_list *list, const uint64_t section_bytes[SPK_PLACE_COUNT]) {
    for (uint64_t i = 0; i < list->count; i++) {
        spk_run *run = &list->items[i];
        bool has_next = i + 1 < list->count && list->items[i + 1].section == run->section;
        run->size_bytes = (has_next ? list->items[i + 1].offset_bytes : section_bytes[run->section - 1]) - run->offset_bytes;
    }
}

spk_status spk_model_runs(const spk_tensor *tensors, uint64_t tensor_count, const uint64_t section_bytes[SPK_PLACE_COUNT],
                          spk_run **out_runs, uint64_t *out_run_count, spk_error *err) {
    const spk_tensor **sorted = malloc((tensor_count + 1) * sizeof *sorted);
    if (sorted == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for %" PRIu64 " tensors", tensor_count);
    for (uint64_t i = 0; i < tensor_count; i++) sorted[i] = &tensors[i];
    qsort(sorted, tensor_count, sizeof *sorted, compare_offsets);
    run_list list = { 0 };
    spk_status status = runs_of_clusters(&list, tensors, sorted, tensor_count, err);
    free(sorted);
    if (status != SPK_OK) {
        free(list.items);
        return status;
    }
    close_gaps(&list, section_bytes);
    *out_runs = list.items;
    *out_run_count = list.count;
    return SPK_OK;
}

/* Pieces do not overlap, and most runs are nothing but their pieces. */
void spk_run_begin(const spk_run *run, const spk_tensor *tensors, uint8_t *run_buffer) {
    uint64_t piece_bytes = 0;
    for (uint32_t p = 0; p < run->piece_count; p++) {
        const spk_piece *piece = &run->pieces[p];
        const spk_tensor *t = &tensors[piece->tensor_index];
        piece_bytes += unit_bytes_of(t) * spk_layout_unit_count(t->layout, t->type, piece->row_end - piece->row_begin, t->dims[0]);
    }
    if (piece_bytes != run->size_bytes) memset(run_buffer, 0, run->size_bytes);
}

void spk_run_put(const spk_run *run, uint32_t piece_index, const spk_tensor *tensors, const uint8_t *rows,
                 uint8_t *run_buffer) {
    const spk_piece *piece = &run->pieces[piece_index];
    const spk_tensor *t = &tensors[piece->tensor_index];
    uint8_t *to = run_buffer + piece->offset_bytes;
    if (t->layout == SPK_LAYOUT_T32) {
        spk_matrix shape = { .unit_stride_bytes = t->unit_stride_bytes, .type = t->type, .layout = t->layout,
                             .row_count = t->dims[1], .col_count = t->dims[0] };
        uint32_t group_rows = rows_per_group(t);
        spk_t32_pack(&shape, piece->row_begin / group_rows, (piece->row_end + group_rows - 1) / group_rows, rows, to);
        return;
    }
    uint64_t row_bytes = unit_bytes_of(t);
    for (uint64_t r = 0; r < piece->row_end - piece->row_begin; r++)
        memcpy(to + r * t->unit_stride_bytes, rows + r * row_bytes, row_bytes);
}
