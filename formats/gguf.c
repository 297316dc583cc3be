/* formats/gguf.c - a GGUF model: one file, or the parts of a split one.
 *
 * A split model is PREFIX-00001-of-00003.gguf and so on; split.no (from 0) and split.count in each part must say the
 * same as its name.  Each part is a complete file with its own data start; the first one has the metadata.
 */
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "formats/gguf_internal.h"

enum { SUFFIX_BYTES = sizeof "-00001-of-00003.gguf" - 1, VIEW_PAGE_BYTES = 4096 /* where pages are larger, nothing is viewed */ };

struct spk_gguf {
    uint32_t         part_count;
    spk_gguf_part   *parts;
    uint64_t         tensor_count;
    spk_gguf_tensor *tensors;        /* of all parts */
    uint32_t        *slots;          /* by name */
    uint64_t         slot_count;
};

/* A part's place in its model. */
typedef struct {
    uint64_t index, count;
} split_place;

/* What the metadata says; 0 of 1 for a model in one file. */
static spk_status read_split(const spk_gguf_part *part, split_place *out, spk_error *err) {
    const spk_kv *no = spk_kv_find(&part->kvs, "split.no"), *count = spk_kv_find(&part->kvs, "split.count");
    *out = (split_place){ 0, 1 };
    if (no != NULL && !spk_kv_scalar_u64(no, &out->index))
        return spk_fail(err, SPK_E_CORRUPT, "%s: split.no is not a non-negative integer", part->path);
    if (count != NULL && !spk_kv_scalar_u64(count, &out->count))
        return spk_fail(err, SPK_E_CORRUPT, "%s: split.count is not a non-negative integer", part->path);
    if (out->count == 0) out->count = 1;                 /* what merging leaves behind */
    if (out->count > SPK_GGUF_PART_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: split.count is %" PRIu64 ", at most %d parts are accepted", part->path,
                        out->count, (int)SPK_GGUF_PART_COUNT_MAX);
    if (out->index >= out->count)
        return spk_fail(err, SPK_E_CORRUPT, "%s: split.no is %" PRIu64 ", expected less than split.count (%" PRIu64 ")",
                        part->path, out->index, out->count);
    return SPK_OK;
}

static bool read_digits(const char *text, uint64_t *out) {
    *out = 0;
    for (int i = 0; i < 5; i++) {
        if (text[i] < '0' || text[i] > '9') return false;
        *out = *out * 10 + (uint64_t)(text[i] - '0');
    }
    return true;
}

/* What the file's name says, with the number from 0; false if it is not a name of a part. */
static bool place_of_name(const char *path, split_place *out) {
    size_t length = strlen(path);
    if (length < SUFFIX_BYTES) return false;
    const char *suffix = path + length - SUFFIX_BYTES;
    if (suffix[0] != '-' || memcmp(suffix + 6, "-of-", 4) != 0 || strcmp(suffix + 15, ".gguf") != 0) return false;
    if (!read_digits(suffix + 1, &out->index) || !read_digits(suffix + 10, &out->count)) return false;
    if (out->index == 0) return false;
    out->index--;
    return true;
}

/* Open part `index` of a model of which `given` is another part. */
static spk_status open_sibling(const spk_gguf_part *given, split_place place, spk_gguf_part *out, spk_error *err) {
    char  *path = NULL;
    size_t prefix_bytes = strlen(given->path) - SUFFIX_BYTES;
    if (asprintf(&path, "%.*s-%05" PRIu64 "-of-%05" PRIu64 ".gguf", (int)prefix_bytes, given->path, place.index + 1,
                 place.count) < 0)
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", given->path);
    spk_status  status;
    split_place found = { 0, 0 };
    if (access(path, F_OK) != 0 && errno == ENOENT)
        status = spk_fail(err, SPK_E_MISSING, "%s: part %" PRIu64 " of %" PRIu64 " is missing", path, place.index + 1,
                          place.count);
    else
        status = spk_gguf_part_open(path, out, err);
    if (status == SPK_OK) status = read_split(out, &found, err);
    if (status == SPK_OK && (found.index != place.index || found.count != place.count))
        status = spk_fail(err, SPK_E_MISMATCH, "%s: says that it is part %" PRIu64 " of %" PRIu64 " (split.no, "
                          "split.count), expected part %" PRIu64 " of %" PRIu64, path, found.index + 1, found.count,
                          place.index + 1, place.count);
    free(path);
    return status;
}

/* Move `given` to its place among the parts and open the others. */
static spk_status open_parts(spk_gguf *gguf, spk_gguf_part *given, spk_error *err) {
    split_place place, named = { 0, 0 };
    spk_status  status = read_split(given, &place, err);
    if (status == SPK_OK && place.count > 1) {
        if (!place_of_name(given->path, &named))
            status = spk_fail(err, SPK_E_MISMATCH, "%s: is part %" PRIu64 " of %" PRIu64 " of a split model, but its "
                              "name does not end in -%05" PRIu64 "-of-%05" PRIu64 ".gguf, so the other parts cannot be "
                              "found", given->path, place.index + 1, place.count, place.index + 1, place.count);
        else if (named.index != place.index || named.count != place.count)
            status = spk_fail(err, SPK_E_MISMATCH, "%s: says that it is part %" PRIu64 " of %" PRIu64 " (split.no, "
                              "split.count), expected part %" PRIu64 " of %" PRIu64 " by its name", given->path,
                              place.index + 1, place.count, named.index + 1, named.count);
    }
    if (status == SPK_OK) {
        gguf->parts = calloc(place.count, sizeof *gguf->parts);
        if (gguf->parts == NULL) status = spk_fail(err, SPK_E_MEMORY, "%s: out of memory", given->path);
    }
    if (status != SPK_OK) {
        spk_gguf_part_close(given);
        return status;
    }
    gguf->part_count = (uint32_t)place.count;
    gguf->parts[place.index] = *given;
    for (uint64_t i = 0; i < place.count; i++)
        if (i != place.index)
            SPK_TRY(open_sibling(&gguf->parts[place.index], (split_place){ i, place.count }, &gguf->parts[i], err));
    return SPK_OK;
}

/* split.tensors.count, where a part has it, is the total over all parts. */
static spk_status check_total(const spk_gguf *gguf, spk_error *err) {
    for (uint32_t i = 0; i < gguf->part_count; i++) {
        const spk_gguf_part *part = &gguf->parts[i];
        const spk_kv        *kv = spk_kv_find(&part->kvs, "split.tensors.count");
        uint64_t             declared;
        if (kv == NULL) continue;
        if (!spk_kv_scalar_u64(kv, &declared))
            return spk_fail(err, SPK_E_CORRUPT, "%s: split.tensors.count is not a non-negative integer", part->path);
        if (declared != gguf->tensor_count)
            return spk_fail(err, SPK_E_MISMATCH, "%s: split.tensors.count is %" PRIu64 ", but the %" PRIu32
                            " parts have %" PRIu64 " tensors", part->path, declared, gguf->part_count,
                            gguf->tensor_count);
    }
    return SPK_OK;
}

static spk_text name_of(const void *items, uint64_t index) {
    const char *name = ((const spk_gguf_tensor *)items)[index].name;
    return (spk_text){ name, strlen(name) };
}

/* One list of tensors over all parts. */
static spk_status join_tensors(spk_gguf *gguf, spk_error *err) {
    const char *first_path = gguf->parts[0].path;
    for (uint32_t i = 0; i < gguf->part_count; i++) gguf->tensor_count += gguf->parts[i].tensor_count;
    if (gguf->part_count > 1) SPK_TRY(check_total(gguf, err));
    if (gguf->tensor_count > SPK_GGUF_TENSOR_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: %" PRIu64 " tensors in all parts, at most %d are accepted", first_path,
                        gguf->tensor_count, (int)SPK_GGUF_TENSOR_COUNT_MAX);
    gguf->tensors = calloc(gguf->tensor_count + 1, sizeof *gguf->tensors);   /* + 1: there may be none */
    if (gguf->tensors == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for the tensor list", first_path);
    uint64_t count = 0;
    for (uint32_t i = 0; i < gguf->part_count; i++) {
        spk_gguf_part *part = &gguf->parts[i];
        for (uint64_t t = 0; t < part->tensor_count; t++) {
            gguf->tensors[count] = part->tensors[t];
            gguf->tensors[count++].part_index = i;
        }
        free(part->tensors);
        part->tensors = NULL;
    }
    uint64_t duplicate;
    SPK_TRY(spk_name_index_build(gguf->tensors, gguf->tensor_count, name_of, first_path, &gguf->slots,
                                 &gguf->slot_count, &duplicate, err));
    if (duplicate == SPK_NAME_NONE) return SPK_OK;
    const spk_gguf_tensor *again = &gguf->tensors[duplicate], *first = spk_gguf_tensor_find(gguf, again->name);
    return spk_fail(err, SPK_E_CORRUPT, "%s: duplicate tensor name '%s' (first in %s); expected each name once",
                    gguf->parts[again->part_index].path, again->name,
                    first->part_index == again->part_index ? "the same file" : gguf->parts[first->part_index].path);
}

spk_status spk_gguf_open(const char *path, spk_gguf **out, spk_error *err) {
    spk_gguf_part given = { 0 };
    SPK_TRY(spk_gguf_part_open(path, &given, err));
    spk_gguf *gguf = calloc(1, sizeof *gguf);
    if (gguf == NULL) {
        spk_gguf_part_close(&given);
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
    }
    spk_status status = open_parts(gguf, &given, err);
    if (status == SPK_OK) status = join_tensors(gguf, err);
    if (status == SPK_OK)
        *out = gguf;
    else
        spk_gguf_close(gguf);
    return status;
}

void spk_gguf_close(spk_gguf *gguf) {
    if (gguf == NULL) return;
    for (uint32_t i = 0; i < gguf->part_count; i++) spk_gguf_part_close(&gguf->parts[i]);
    free(gguf->parts);
    free(gguf->tensors);
    free(gguf->slots);
    free(gguf);
}

uint32_t          spk_gguf_version(const spk_gguf *gguf) { return gguf->parts[0].version; }
uint64_t          spk_gguf_alignment_bytes(const spk_gguf *gguf) { return gguf->parts[0].alignment_bytes; }
const spk_kv_set *spk_gguf_kvs(const spk_gguf *gguf) { return &gguf->parts[0].kvs; }
uint64_t          spk_gguf_tensor_count(const spk_gguf *gguf) { return gguf->tensor_count; }
uint32_t          spk_gguf_part_count(const spk_gguf *gguf) { return gguf->part_count; }

const spk_gguf_tensor *spk_gguf_tensor_at(const spk_gguf *gguf, uint64_t index) {
    assert(index < gguf->tensor_count);
    return &gguf->tensors[index];
}

const spk_gguf_tensor *spk_gguf_tensor_find(const spk_gguf *gguf, const char *name) {
    uint64_t index = spk_name_index_find(gguf->slots, gguf->slot_count, gguf->tensors, name_of,
                                         (spk_text){ name, strlen(name) });
    return index == SPK_NAME_NONE ? NULL : &gguf->tensors[index];
}

const char *spk_gguf_part_path(const spk_gguf *gguf, uint32_t part_index) {
    assert(part_index < gguf->part_count);
    return gguf->parts[part_index].path;
}

uint64_t spk_gguf_part_bytes(const spk_gguf *gguf, uint32_t part_index) {
    assert(part_index < gguf->part_count);
    return gguf->parts[part_index].size_bytes;
}

spk_gguf_stamp spk_gguf_part_stamp(const spk_gguf *gguf, uint32_t part_index) {
    assert(part_index < gguf->part_count);
    return gguf->parts[part_index].stamp;
}

spk_status spk_gguf_check_unchanged(const spk_gguf *gguf, spk_error *err) {
    for (uint32_t i = 0; i < gguf->part_count; i++) {
        const spk_gguf_part *part = &gguf->parts[i];
        spk_gguf_stamp now;
        SPK_TRY(spk_gguf_part_look(part, &now, err));
        if (memcmp(&now, &part->stamp, sizeof now) != 0)
            return spk_fail(err, SPK_E_IO, "%s: was changed while it was read (%" PRIu64 " bytes, %" PRIu64
                            " when it was opened)", part->path, now.size_bytes, part->stamp.size_bytes);
    }
    return SPK_OK;
}

spk_status spk_gguf_read(const spk_gguf *gguf, uint32_t part_index, uint64_t offset_bytes, uint64_t size_bytes,
                         void *out, spk_error *err) {
    assert(part_index < gguf->part_count);
    const spk_gguf_part *part = &gguf->parts[part_index];
    assert(offset_bytes <= part->size_bytes && size_bytes <= part->size_bytes - offset_bytes);
    uint8_t *next = out;
    while (size_bytes > 0) {
        ssize_t got = pread(part->fd, next, size_bytes, (off_t)offset_bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0)
            return spk_fail(err, SPK_E_IO, "%s: cannot read %" PRIu64 " bytes at %" PRIu64 ": %s", part->path,
                            size_bytes, offset_bytes, strerror(errno));
        if (got == 0)
            return spk_fail(err, SPK_E_IO, "%s: the file shrank while it was read: nothing at %" PRIu64
                            ", expected %" PRIu64 " bytes", part->path, offset_bytes, part->size_bytes);
        next += got;
        offset_bytes += (uint64_t)got;
        size_bytes -= (uint64_t)got;
    }
    return SPK_OK;
}

/* The pages of a range of a part's mapping; false where the system cannot do it, or the file has no such pages any more. */
static bool advise(const spk_gguf *gguf, uint32_t part_index, uint64_t offset_bytes, uint64_t size_bytes, int advice) {
    const uint64_t in_page = offset_bytes % VIEW_PAGE_BYTES;
    const uint8_t *begin = gguf->parts[part_index].bytes + (offset_bytes - in_page);
    return madvise((void *)(uintptr_t)begin, size_bytes + in_page, advice) == 0;
}

spk_status spk_gguf_view(const spk_gguf *gguf, uint32_t part_index, uint64_t offset_bytes, uint64_t size_bytes,
                         void *buffer, const uint8_t **out, spk_error *err) {
#ifdef MADV_POPULATE_READ
    *out = gguf->parts[part_index].bytes + offset_bytes;
    if (advise(gguf, part_index, offset_bytes, size_bytes, MADV_POPULATE_READ)) return SPK_OK;
#endif
    *out = buffer;
    return spk_gguf_read(gguf, part_index, offset_bytes, size_bytes, buffer, err);
}

void spk_gguf_forget(const spk_gguf *gguf, uint32_t part_index, uint64_t offset_bytes, uint64_t size_bytes) {
    (void)advise(gguf, part_index, offset_bytes, size_bytes, MADV_DONTNEED);
}
