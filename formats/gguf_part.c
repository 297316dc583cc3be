/* formats/gguf_part.c - reads and checks one GGUF file.
 *
 *   header        magic "GGUF", u32 version, u64 tensor count, u64 metadata count
 *   metadata      formats/kv
 *   tensor infos  each: u64 name length, name, u32 dimension count, u64 dimensions (ne0 first), u32 type, u64 offset
 *   padding       up to a multiple of the alignment: the data start, which offsets count from
 *   data          each tensor padded to the alignment; the last one need not be
 *
 * Every byte must be accounted for: tensors may lie in any order, but they must not overlap, and what separates them
 * (or follows the last one) is padding, so shorter than the alignment.  A larger gap means that the writer's idea of a
 * tensor's size is not ours, and reading on would give garbage without an error.  llama.cpp is stricter: it also wants
 * the data in the order of the infos.
 *
 * What a newcomer gets wrong: the alignment may be any power of two, 1 included, and it is known only after the
 * metadata; each part of a split model has its own.
 */
#include "formats/gguf_internal.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "formats/blocks.h"
#include "formats/cursor_internal.h"
#include "formats/dequant.h"
#include "formats/infile.h"

enum { TENSOR_INFO_BYTES_MIN = 8 + 4 + 4 + 8 };   /* no name and no dimensions: refused with their own messages */

/* ---- rules shared with the writer ---- */

spk_status spk_gguf_check_alignment(const spk_kv_set *kvs, const char *where, uint64_t *out_bytes, spk_error *err) {
    const spk_kv *kv = spk_kv_find(kvs, "general.alignment");
    uint64_t      alignment = SPK_GGUF_ALIGNMENT_DEFAULT;
    if (kv != NULL) {
        double value;
        bool   is_number = kv->type != SPK_KV_ARRAY && spk_kv_f64(kv, 0, &value);
        if (!is_number || kv->type == SPK_KV_F32 || kv->type == SPK_KV_F64)
            return spk_fail(err, SPK_E_CORRUPT, "%s: general.alignment has value type %" PRIu32
                            ", expected an integer (u32, type 4)", where, kv->type);
        if (!spk_kv_u64(kv, 0, &alignment))
            return spk_fail(err, SPK_E_CORRUPT, "%s: general.alignment is %.0f, expected a power of two", where, value);
    }
    if (alignment == 0 || (alignment & (alignment - 1)) != 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: general.alignment is %" PRIu64 ", expected a power of two", where,
                        alignment);
    if (alignment > SPK_GGUF_ALIGNMENT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: general.alignment is %" PRIu64 ", expected at most %d", where, alignment,
                        (int)SPK_GGUF_ALIGNMENT_MAX);
    *out_bytes = alignment;
    return SPK_OK;
}

spk_status spk_gguf_check_name(spk_text name, const char *where, const char *place, spk_error *err) {
    if (name.size_bytes == 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: %s: empty name (or a wrong tensor count)", where, place);
    if (name.size_bytes > SPK_GGUF_NAME_BYTES_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: %s: name of %" PRIu64 " bytes, expected at most %d", where, place,
                        name.size_bytes, (int)SPK_GGUF_NAME_BYTES_MAX);
    for (uint64_t i = 0; i < name.size_bytes; i++) {
        uint8_t c = (uint8_t)name.bytes[i];
        if (c < 0x20 || c == 0x7f)
            return spk_fail(err, SPK_E_CORRUPT, "%s: %s: name '%.*s' has a control character (0x%02x at byte %" PRIu64
                            ")", where, place, (int)name.size_bytes, name.bytes, c, i);
    }
    return SPK_OK;
}

/* "[256, 2]" */
static const char *dims_text(const uint64_t dims[4], uint32_t dim_count, char out[96]) {
    int used = snprintf(out, 96, "[%" PRIu64, dims[0]);
    for (uint32_t i = 1; i < dim_count; i++) used += snprintf(out + used, 96 - (size_t)used, ", %" PRIu64, dims[i]);
    (void)snprintf(out + used, 96 - (size_t)used, "]");
    return out;
}

static spk_status bad_type(const spk_gguf_tensor_spec *tensor, const char *where, spk_error *err) {
    char readable[200] = "";
    for (uint32_t type = 0, used = 0; type < SPK_TYPE_LIMIT && used < sizeof readable; type++)
        if (spk_type_find(type) != NULL)
            used += (uint32_t)snprintf(readable + used, sizeof readable - used, " %s", spk_type_name(type));
    return spk_fail(err, SPK_E_UNSUPPORTED, "%s: tensor '%s' has type id %" PRIu32 " (%s), which spk cannot read; "
                    "expected one of%s", where, tensor->name, tensor->type, spk_type_name(tensor->type), readable);
}

spk_status spk_gguf_check_shape(const spk_gguf_tensor_spec *tensor, const char *where, uint64_t *out_bytes,
                                spk_error *err) {
    const char *name = tensor->name;
    if (tensor->dim_count < 1 || tensor->dim_count > SPK_GGUF_DIM_COUNT_MAX)
        return spk_fail(err, SPK_E_CORRUPT, "%s: tensor '%s' has %" PRIu32 " dimensions, expected 1..%d", where, name,
                        tensor->dim_count, (int)SPK_GGUF_DIM_COUNT_MAX);
    char     text[96];
    uint64_t weight_count = 1;
    dims_text(tensor->dims, tensor->dim_count, text);
    for (uint32_t i = 0; i < tensor->dim_count; i++) {
        if (tensor->dims[i] == 0)
            return spk_fail(err, SPK_E_CORRUPT, "%s: tensor '%s' has dimensions %s, expected each to be at least 1",
                            where, name, text);
        if (__builtin_mul_overflow(weight_count, tensor->dims[i], &weight_count))
            return spk_fail(err, SPK_E_CORRUPT, "%s: tensor '%s' has dimensions %s: their product is past 2^64", where,
                            name, text);
    }
    const spk_type_info *info = spk_type_find(tensor->type);
    if (info == NULL) return bad_type(tensor, where, err);
    if (tensor->dims[0] % info->block_weights != 0)
        return spk_fail(err, SPK_E_SHAPE, "%s: tensor '%s' has rows of %" PRIu64 " weights; %s needs a multiple of %"
                        PRIu32, where, name, tensor->dims[0], info->name, info->block_weights);
    if (spk_type_bytes(tensor->type, weight_count, out_bytes, NULL) != SPK_OK)
        return spk_fail(err, SPK_E_CORRUPT, "%s: tensor '%s' of type %s and dimensions %s: its size is past 2^64 bytes",
                        where, name, info->name, text);
    return SPK_OK;
}

/* ---- opening and header ---- */

spk_status spk_gguf_part_look(const spk_gguf_part *part, spk_gguf_stamp *out, spk_error *err) {
    struct stat info;
    if (fstat(part->fd, &info) != 0) return spk_fail(err, SPK_E_IO, "%s: %s", part->path, strerror(errno));
    *out = (spk_gguf_stamp){ info.st_dev, info.st_ino, (uint64_t)info.st_size, (uint64_t)info.st_mtim.tv_sec,
                             (uint64_t)info.st_mtim.tv_nsec };
    return SPK_OK;
}

static spk_status map_file(const char *path, spk_gguf_part *part, spk_error *err) {
    SPK_TRY(spk_infile_open(path, "a GGUF file", &part->fd, &part->size_bytes, err));
    SPK_TRY(spk_gguf_part_look(part, &part->stamp, err));
    if (part->size_bytes == 0) return spk_fail(err, SPK_E_MAGIC, "%s: is empty (0 bytes), expected a GGUF file", path);
    void *mapped = mmap(NULL, part->size_bytes, PROT_READ, MAP_PRIVATE, part->fd, 0);
    if (mapped == MAP_FAILED) return spk_fail(err, SPK_E_IO, "%s: cannot map: %s", path, strerror(errno));
    part->bytes = mapped;
    return SPK_OK;
}

static spk_status check_magic(const spk_gguf_part *part, spk_error *err) {
    const char *kind = spk_infile_kind(part->bytes, part->size_bytes);
    uint8_t     start[4] = { 0 };
    uint64_t    start_bytes = part->size_bytes < sizeof start ? part->size_bytes : sizeof start;
    memcpy(start, part->bytes, start_bytes);
    if (memcmp(start, "GGUF", start_bytes) == 0 && part->size_bytes < SPK_GGUF_HEADER_BYTES)
        return spk_fail(err, SPK_E_CORRUPT, "%s: has %" PRIu64 " bytes, a GGUF header alone takes %d: truncated",
                        part->path, part->size_bytes, (int)SPK_GGUF_HEADER_BYTES);
    if (memcmp(start, "GGUF", sizeof start) == 0) return SPK_OK;
    if (kind != NULL) return spk_fail(err, SPK_E_MAGIC, "%s: is not GGUF but %s", part->path, kind);
    return spk_fail(err, SPK_E_MAGIC, "%s: is not GGUF: begins with bytes %02x %02x %02x %02x, expected 47 47 55 46",
                    part->path, start[0], start[1], start[2], start[3]);
}

static spk_status check_version(const spk_gguf_part *part, spk_error *err) {
    if (part->version == 2 || part->version == 3) return SPK_OK;
    uint32_t swapped = __builtin_bswap32(part->version);
    if (swapped >= 1 && swapped <= 0xff)
        return spk_fail(err, SPK_E_VERSION, "%s: big-endian GGUF (version %" PRIu32 " in reverse byte order), expected "
                        "little-endian", part->path, swapped);
    return spk_fail(err, SPK_E_VERSION, "%s: GGUF version %" PRIu32 ", expected 2 or 3%s", part->path, part->version,
                    part->version == 1 ? "; version 1 is obsolete, convert the model again" : "");
}

/* ---- tensors ---- */

static spk_status parse_tensor(const spk_gguf_part *part, spk_cursor *cursor, uint64_t index, spk_gguf_tensor *tensor,
                               spk_error *err) {
    char place[64];
    (void)snprintf(place, sizeof place, "tensor %" PRIu64 " of %" PRIu64, index + 1, part->tensor_count);
    spk_text             name;
    spk_gguf_tensor_spec spec = { .dims = { 1, 1, 1, 1 } };
    if (!spk_cursor_take(cursor, &name.size_bytes, sizeof name.size_bytes)) goto cut;
    name.bytes = (const char *)spk_cursor_here(cursor);
    if (name.size_bytes <= SPK_GGUF_NAME_BYTES_MAX && !spk_cursor_take(cursor, spec.name, name.size_bytes)) goto cut;
    SPK_TRY(spk_gguf_check_name(name, part->path, place, err));

    if (!spk_cursor_take(cursor, &spec.dim_count, sizeof spec.dim_count)) goto cut;
    if (spec.dim_count <= SPK_GGUF_DIM_COUNT_MAX &&      /* else refused by check_shape */
        (!spk_cursor_take(cursor, spec.dims, spec.dim_count * sizeof *spec.dims) ||
         !spk_cursor_take(cursor, &spec.type, sizeof spec.type) ||
         !spk_cursor_take(cursor, &tensor->file_offset_bytes, sizeof tensor->file_offset_bytes)))
        goto cut;
    SPK_TRY(spk_gguf_check_shape(&spec, part->path, &tensor->size_bytes, err));
    memcpy(tensor->name, spec.name, sizeof tensor->name);
    memcpy(tensor->dims, spec.dims, sizeof tensor->dims);
    tensor->type = spec.type;
    tensor->dim_count = spec.dim_count;
    return SPK_OK;
cut:
    return spk_fail(err, SPK_E_CORRUPT, "%s: %s: the file ends inside its description, after %" PRIu64
                    " bytes: truncated", part->path, place, part->size_bytes);
}

/* Turns the offset in the data into a file offset. */
static spk_status place_tensor(const spk_gguf_part *part, uint64_t data_start, spk_gguf_tensor *tensor,
                               spk_error *err) {
    uint64_t offset = tensor->file_offset_bytes;
    if (offset % part->alignment_bytes != 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: tensor '%s' has data offset %" PRIu64 ", expected a multiple of the "
                        "alignment %" PRIu64, part->path, tensor->name, offset, part->alignment_bytes);
    uint64_t data_bytes = part->size_bytes > data_start ? part->size_bytes - data_start : 0;
    if (offset > data_bytes || tensor->size_bytes > data_bytes - offset)
        return spk_fail(err, SPK_E_CORRUPT, "%s: tensor '%s' needs %" PRIu64 " bytes at data offset %" PRIu64
                        " (file offset %" PRIu64 " + %" PRIu64 "), but the file has only %" PRIu64 " bytes: truncated "
                        "or corrupt", part->path, tensor->name, tensor->size_bytes, offset, data_start, offset,
                        part->size_bytes);
    tensor->file_offset_bytes = data_start + offset;
    tensor->data = part->bytes + tensor->file_offset_bytes;
    return SPK_OK;
}

static int by_offset(const void *a, const void *b) {
    const spk_gguf_tensor *x = *(const spk_gguf_tensor *const *)a, *y = *(const spk_gguf_tensor *const *)b;
    if (x->file_offset_bytes != y->file_offset_bytes) return x->file_offset_bytes < y->file_offset_bytes ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* Tensors in the order of their data: neither overlap nor gap.  *end_bytes gets the end of the last one. */
static spk_status check_sequence(const spk_gguf_part *part, uint64_t data_start, uint64_t *end_bytes, spk_error *err) {
    const spk_gguf_tensor **order = malloc(part->tensor_count * sizeof *order);
    if (order == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for the tensor list", part->path);
    for (uint64_t i = 0; i < part->tensor_count; i++) order[i] = &part->tensors[i];
    qsort(order, part->tensor_count, sizeof *order, by_offset);

    spk_status status = SPK_OK;
    uint64_t   end = data_start;
    for (uint64_t i = 0; i < part->tensor_count && status == SPK_OK; i++) {
        const spk_gguf_tensor *t = order[i], *before = i > 0 ? order[i - 1] : NULL;
        uint64_t               expected = spk_gguf_align_up(end, part->alignment_bytes) - data_start;
        uint64_t               found = t->file_offset_bytes - data_start;
        if (before != NULL && found < expected)
            status = spk_fail(err, SPK_E_CORRUPT, "%s: tensor '%s' at data offset %" PRIu64 " overlaps '%s' (%s, %"
                              PRIu64 " bytes at %" PRIu64 "); expected offset %" PRIu64, part->path, t->name, found,
                              before->name, spk_type_name(before->type), before->size_bytes,
                              before->file_offset_bytes - data_start, expected);
        else if (found > expected)
            status = spk_fail(err, SPK_E_CORRUPT, "%s: tensor '%s' at data offset %" PRIu64 ", expected %" PRIu64
                              ": a gap of %" PRIu64 " bytes after %s%s%s", part->path, t->name, found, expected,
                              found - expected, before ? "'" : "", before ? before->name : "the data start",
                              before ? "'" : "");
        end = t->file_offset_bytes + t->size_bytes;
    }
    free(order);
    *end_bytes = end;
    return status;
}

/* After the content only padding may follow. */
static spk_status check_end(const spk_gguf_part *part, uint64_t end_bytes, spk_error *err) {
    uint64_t padded = spk_gguf_align_up(end_bytes, part->alignment_bytes);
    if (part->size_bytes <= padded) return SPK_OK;
    bool is_joined = part->size_bytes - padded >= 4 && memcmp(part->bytes + padded, "GGUF", 4) == 0;
    return spk_fail(err, SPK_E_CORRUPT, "%s: %" PRIu64 " extra bytes after the last tensor (file has %" PRIu64
                    " bytes, expected %" PRIu64 ")%s", part->path, part->size_bytes - padded, part->size_bytes, padded,
                    is_joined ? "; another GGUF begins there: joined files? parts of a split model stay separate" : "");
}

static spk_status parse_tensors(spk_gguf_part *part, spk_cursor *cursor, spk_error *err) {
    if (part->tensor_count > spk_cursor_left(cursor) / TENSOR_INFO_BYTES_MIN)
        return spk_fail(err, SPK_E_CORRUPT, "%s: %" PRIu64 " tensors need at least %" PRIu64 " bytes of description, "
                        "but only %" PRIu64 " are left: truncated", part->path, part->tensor_count,
                        part->tensor_count * TENSOR_INFO_BYTES_MIN, spk_cursor_left(cursor));
    if (part->tensor_count == 0) return check_end(part, cursor->at, err);
    part->tensors = calloc(part->tensor_count, sizeof *part->tensors);
    if (part->tensors == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for the tensor list", part->path);
    for (uint64_t i = 0; i < part->tensor_count; i++)
        SPK_TRY(parse_tensor(part, cursor, i, &part->tensors[i], err));
    uint64_t data_start = spk_gguf_align_up(cursor->at, part->alignment_bytes), end = 0;
    for (uint64_t i = 0; i < part->tensor_count; i++) SPK_TRY(place_tensor(part, data_start, &part->tensors[i], err));
    SPK_TRY(check_sequence(part, data_start, &end, err));
    return check_end(part, end, err);
}

static spk_status parse_part(spk_gguf_part *part, spk_error *err) {
    SPK_TRY(check_magic(part, err));
    spk_cursor cursor = { part->bytes, part->size_bytes, 4 };
    uint64_t   kv_count = 0, kv_bytes = 0;
    (void)spk_cursor_take(&cursor, &part->version, sizeof part->version);  /* check_magic saw a whole header */
    (void)spk_cursor_take(&cursor, &part->tensor_count, sizeof part->tensor_count);
    (void)spk_cursor_take(&cursor, &kv_count, sizeof kv_count);
    SPK_TRY(check_version(part, err));
    if (part->tensor_count > SPK_GGUF_TENSOR_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: %" PRIu64 " tensors, at most %d are accepted", part->path,
                        part->tensor_count, (int)SPK_GGUF_TENSOR_COUNT_MAX);
    SPK_TRY(spk_kv_parse(spk_cursor_here(&cursor), spk_cursor_left(&cursor), kv_count, part->path, &part->kvs,
                         &kv_bytes, err));
    cursor.at += kv_bytes;
    SPK_TRY(spk_gguf_check_alignment(&part->kvs, part->path, &part->alignment_bytes, err));
    return parse_tensors(part, &cursor, err);
}

spk_status spk_gguf_part_open(const char *path, spk_gguf_part *out, spk_error *err) {
    spk_gguf_part part = { .fd = -1, .path = strdup(path) };
    spk_status    status = part.path != NULL ? map_file(path, &part, err)
                                             : spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
    if (status == SPK_OK) status = parse_part(&part, err);
    if (status == SPK_OK)
        *out = part;
    else
        spk_gguf_part_close(&part);
    return status;
}

void spk_gguf_part_close(spk_gguf_part *part) {
    if (part->path == NULL) return;                      /* never opened */
    spk_kv_free(&part->kvs);
    free(part->tensors);
    if (part->bytes != NULL) (void)munmap((void *)(uintptr_t)part->bytes, part->size_bytes);
    if (part->fd >= 0) (void)close(part->fd);
    free(part->path);
    *part = (spk_gguf_part){ 0 };
}
