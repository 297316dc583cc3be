/* requant/unpack.c - pack to GGUF.  See convert.h.
 *
 * Everything in the GGUF but the weights comes from META and PROVENANCE; weights are put back into GGML's rows.
 */
#include "requant/convert.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "formats/census.h"
#include "formats/outfile.h"

#define BUFFER_BYTES (UINT64_C(4) << 20) /* of rows at a time; one row where it is longer */

/* Verifying and writing both pass over the data once; progress counts the sum. */
typedef struct {
    spk_convert_progress_fn *progress;
    void                    *context;
    uint64_t                 verified_bytes, written_bytes, total_bytes;
} unpack_progress;

static void show(const unpack_progress *p) {
    if (p->progress != NULL) p->progress(p->context, p->verified_bytes + p->written_bytes, p->total_bytes);
}

static void show_verified(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    (void)total_bytes;
    unpack_progress *p = context;
    p->verified_bytes = done_bytes;
    show(p);
}

/* identity: NULL where the file cannot be the source's. */
static spk_status begin_gguf(const spk_pack *pack, const char *out_path, bool replace, spk_gguf_identity *identity,
                             spk_gguf_writer **out, spk_error *err) {
    const spk_provenance *provenance = spk_pack_provenance(pack);
    const spk_kv_set *kvs = spk_pack_kvs(pack);
    uint64_t tensor_count = spk_pack_tensor_count(pack);
    const spk_tensor *tensors = spk_pack_tensors(pack);
    spk_gguf_tensor_spec *specs = calloc(tensor_count + 1, sizeof *specs);
    if (specs == NULL)
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " tensors", out_path, tensor_count);
    for (uint64_t i = 0; i < tensor_count; i++) {
        SPK_STATIC_ASSERT(sizeof specs->name == sizeof tensors->name, "a name is copied whole");
        memcpy(specs[i].name, tensors[i].name, sizeof specs[i].name);
        memcpy(specs[i].dims, tensors[i].dims, sizeof specs[i].dims);
        specs[i].type = tensors[i].type;
        specs[i].dim_count = tensors[i].dim_count;
    }
    spk_gguf_writer_options options = { .path = out_path, .replace = replace,
                                        .version = provenance->source_version,
                                        .alignment_bytes = provenance->source_alignment_bytes,
                                        .kv_count = kvs->count, .tensors = specs, .tensor_count = tensor_count,
                                        .wanted_bytes = identity != NULL ? provenance->source_bytes : 0,
                                        .identity = identity };
    if (kvs->count > 0) { /* entries lie one after another */
        const spk_kv *last = &kvs->items[kvs->count - 1];
        options.kv_bytes = kvs->items[0].entry;
        options.kv_bytes_size = (uint64_t)(last->entry + last->entry_bytes - kvs->items[0].entry);
    }
    spk_status status = spk_gguf_writer_begin(&options, out, err);
    free(specs);
    return status;
}

static spk_status write_tensor(const spk_pack *pack, const spk_tensor *tensor, spk_gguf_writer *writer,
                               uint8_t *buffer, uint64_t buffer_bytes, unpack_progress *p, spk_error *err) {
    uint64_t section_bytes, row_bytes = spk_layout_unit_bytes(SPK_LAYOUT_ROWS, tensor->type, tensor->dims[0]);
    const uint8_t *section = spk_pack_section(pack, tensor->section, &section_bytes);
    uint64_t rows_at_once = buffer_bytes / row_bytes;
    for (uint64_t m = 0; m < spk_tensor_matrix_count(tensor); m++) {
        spk_matrix matrix = spk_tensor_matrix(tensor, section, m);
        for (uint64_t row = 0; row < matrix.row_count; row += rows_at_once) {
            uint64_t left = matrix.row_count - row, count = left < rows_at_once ? left : rows_at_once;
            spk_layout_get_rows(&matrix, row, row + count, buffer);
            SPK_TRY(spk_gguf_writer_append(writer, buffer, count * row_bytes, err));
            p->written_bytes += count * row_bytes;
            show(p);
        }
    }
    return SPK_OK;
}

static bool is_source(const spk_provenance *provenance, const spk_gguf_identity *found) {
    return found->size_bytes == provenance->source_bytes &&
           memcmp(&found->digest, &provenance->source_digest, sizeof found->digest) == 0;
}

spk_status spk_unpack(const spk_pack *pack, const char *out_path, bool replace, spk_convert_progress_fn *progress,
                      void *progress_context, spk_unpack_result *result, spk_error *err) {
    if (spk_same_file(spk_pack_path(pack), out_path))
        return spk_fail(err, SPK_E_EXISTS, "%s: is the pack itself, expected another path for the output", out_path);
    uint64_t tensor_count = spk_pack_tensor_count(pack), buffer_bytes = BUFFER_BYTES;
    const spk_tensor *tensors = spk_pack_tensors(pack);
    unpack_progress p = { .progress = progress, .context = progress_context };
    bool is_requantized = false;
    for (uint64_t i = 0; i < tensor_count; i++) {
        uint64_t row_bytes = spk_layout_unit_bytes(SPK_LAYOUT_ROWS, tensors[i].type, tensors[i].dims[0]);
        if (row_bytes > buffer_bytes) buffer_bytes = row_bytes;
        p.total_bytes += spk_tensor_bytes(&tensors[i]);
        is_requantized = is_requantized || spk_tensor_is_requantized(&tensors[i]);
    }
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t section_bytes;
        (void)spk_pack_section(pack, place, &section_bytes);
        p.total_bytes += section_bytes;
    }
    uint8_t *buffer = malloc(buffer_bytes);
    if (buffer == NULL)
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " bytes of rows", out_path, buffer_bytes);
    spk_gguf_writer *writer = NULL;
    spk_gguf_identity identity;
    spk_status status = begin_gguf(pack, out_path, replace, is_requantized ? NULL : &identity, &writer, err);
    if (status == SPK_OK) status = spk_pack_verify(pack, 0, show_verified, &p, err);
    for (uint64_t i = 0; i < tensor_count && status == SPK_OK; i++)
        status = write_tensor(pack, &tensors[i], writer, buffer, buffer_bytes, &p, err);
    if (status == SPK_OK) {
        status = spk_gguf_writer_commit(writer, err);
        writer = NULL;
    }
    if (status == SPK_OK)
        *result = is_requantized ? SPK_UNPACK_REQUANTIZED
                : is_source(spk_pack_provenance(pack), &identity) ? SPK_UNPACK_IDENTICAL : SPK_UNPACK_EQUIVALENT;
    spk_gguf_writer_abort(writer);
    free(buffer);
    return status;
}
