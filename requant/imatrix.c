/* requant/imatrix.c - reads importance matrices: GGUF files of general.type "imatrix", and the older .dat files.
 *
 * GGUF: for a weight NAME the tensors NAME.in_sum2 [cols, matrices], sums of x^2, and NAME.counts, how many tokens each
 * matrix saw.  Files converted from .dat have all experts in one row of in_sum2 and a single count.
 *
 * .dat, little-endian: i32 entries, then for each i32 name bytes, name, i32 calls, i32 values, f32 values.  A value is
 * the mean of x^2 times calls; experts lie one after another.  What follows the entries (chunks, data set) is not read.
 */
#include "requant/imatrix.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/blocks.h"
#include "formats/gguf.h"
#include "formats/infile.h"
#include "formats/name_index.h"

enum {
    ENTRY_COUNT_MAX = SPK_GGUF_TENSOR_COUNT_MAX,
    VALUE_COUNT_MAX = 1 << 26            /* of one entry; 512 experts of 8192 columns are 1 << 22 */
};

typedef struct {
    char     name[SPK_GGUF_NAME_BYTES_MAX + 1];
    uint64_t value_count, slice_count;   /* slices of equal size, each with a count of its own in the file */
    float   *values;                     /* usable ones of a slice have a mean of 1; a slice never counted is all 0 */
} entry;

struct spk_imatrix {
    char     *path;
    uint64_t  entry_count;
    entry    *entries;
    uint32_t *slots;                     /* name index over entries */
    uint64_t  slot_count;
};

static spk_text entry_name(const void *items, uint64_t index) {
    const entry *e = (const entry *)items + index;
    return (spk_text){ e->name, strlen(e->name) };
}

static bool is_usable(float value) { return isfinite(value) && value >= 0; }

/* Sums or means of one slice to values with a mean of 1. */
static void scale_slice(float *values, uint64_t value_count, float count) {
    double sum = 0;
    uint64_t usable_count = 0;
    for (uint64_t i = 0; i < value_count; i++)
        if (is_usable(values[i])) {
            sum += (double)values[i];
            usable_count++;
        }
    bool counted = count > 0;            /* NaN is not */
    double scale = counted && sum > 0 ? (double)usable_count / sum : 0;
    for (uint64_t i = 0; i < value_count; i++)
        if (!counted || is_usable(values[i])) values[i] = counted ? (float)((double)values[i] * scale) : 0.0f;
}

/* The next entry of *imatrix, with room for its values; it is counted at once, so that closing frees it. */
static spk_status add_entry(spk_imatrix *imatrix, spk_text name, uint64_t value_count, entry **out, spk_error *err) {
    entry *e = &imatrix->entries[imatrix->entry_count];
    assert(name.size_bytes < sizeof e->name);
    memcpy(e->name, name.bytes, name.size_bytes);
    e->name[name.size_bytes] = '\0';
    e->value_count = value_count;
    e->slice_count = 1;
    e->values = malloc(value_count * sizeof *e->values);
    if (e->values == NULL)
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " values of '%s'", imatrix->path,
                        value_count, e->name);
    imatrix->entry_count++;
    *out = e;
    return SPK_OK;
}

/* ---- GGUF ---- */

/* The name without the suffix, or size 0 if it has another one. */
static spk_text without_suffix(const char *name, const char *suffix) {
    size_t size = strlen(name), suffix_size = strlen(suffix);
    if (size <= suffix_size || strcmp(name + size - suffix_size, suffix) != 0) return (spk_text){ name, 0 };
    return (spk_text){ name, size - suffix_size };
}

static const spk_gguf_tensor *find_partner(const spk_gguf *gguf, spk_text base, const char *suffix) {
    char name[SPK_GGUF_NAME_BYTES_MAX + 1];
    int size = snprintf(name, sizeof name, "%.*s%s", (int)base.size_bytes, base.bytes, suffix);
    return size < (int)sizeof name ? spk_gguf_tensor_find(gguf, name) : NULL;
}

static spk_status read_floats(const spk_gguf *gguf, const spk_gguf_tensor *tensor, float *out, spk_error *err) {
    return spk_gguf_read(gguf, tensor->part_index, tensor->file_offset_bytes, tensor->size_bytes, out, err);
}

static spk_status read_gguf_entry(spk_imatrix *imatrix, const spk_gguf *gguf, const spk_gguf_tensor *sums,
                                  spk_text base, spk_error *err) {
    const spk_gguf_tensor *counts = find_partner(gguf, base, ".counts");
    if (counts == NULL)
        return spk_fail(err, SPK_E_CORRUPT, "%s: '%s' has no counts beside it", imatrix->path, sums->name);
    if (sums->type != SPK_TYPE_F32 || counts->type != SPK_TYPE_F32)
        return spk_fail(err, SPK_E_CORRUPT, "%s: '%s' is %s and its counts are %s, both must be F32", imatrix->path,
                        sums->name, spk_type_name(sums->type), spk_type_name(counts->type));
    uint64_t value_count = sums->size_bytes / sizeof(float), slice_count = counts->size_bytes / sizeof(float);
    if (slice_count != value_count / sums->dims[0])
        return spk_fail(err, SPK_E_CORRUPT, "%s: '%s' has %" PRIu64 " rows, but %" PRIu64 " counts", imatrix->path,
                        sums->name, value_count / sums->dims[0], slice_count);
    if (value_count > VALUE_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: '%s' has %" PRIu64 " values, at most %d", imatrix->path, sums->name,
                        value_count, VALUE_COUNT_MAX);
    entry *e = NULL;
    SPK_TRY(add_entry(imatrix, base, value_count, &e, err));
    e->slice_count = slice_count;
    SPK_TRY(read_floats(gguf, sums, e->values, err));
    float *count = malloc(slice_count * sizeof *count);
    if (count == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for counts", imatrix->path);
    spk_status status = read_floats(gguf, counts, count, err);
    uint64_t slice_values = value_count / slice_count;
    for (uint64_t s = 0; status == SPK_OK && s < slice_count; s++)
        scale_slice(e->values + s * slice_values, slice_values, count[s]);
    free(count);
    return status;
}

static spk_status read_gguf_entries(spk_imatrix *imatrix, const spk_gguf *gguf, spk_error *err) {
    spk_text type = { "", 0 };
    bool has_type = spk_kv_text(spk_kv_find(spk_gguf_kvs(gguf), "general.type"), &type);
    if (!has_type || !spk_text_equal(type, "imatrix"))
        return spk_fail(err, SPK_E_MISMATCH, "%s: general.type is '%.*s', an importance matrix has 'imatrix'",
                        imatrix->path, (int)(type.size_bytes < 64 ? type.size_bytes : 64), type.bytes);
    uint64_t tensor_count = spk_gguf_tensor_count(gguf);
    imatrix->entries = calloc(tensor_count + 1, sizeof *imatrix->entries);
    if (imatrix->entries == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for entries", imatrix->path);
    for (uint64_t i = 0; i < tensor_count; i++) {
        const spk_gguf_tensor *tensor = spk_gguf_tensor_at(gguf, i);
        spk_text base = without_suffix(tensor->name, ".in_sum2");
        if (base.size_bytes > 0) {
            SPK_TRY(read_gguf_entry(imatrix, gguf, tensor, base, err));
            continue;
        }
        base = without_suffix(tensor->name, ".counts");
        if (base.size_bytes > 0 && find_partner(gguf, base, ".in_sum2") == NULL)
            return spk_fail(err, SPK_E_CORRUPT, "%s: '%s' has no in_sum2 beside it", imatrix->path, tensor->name);
    }
    return SPK_OK;
}

/* ---- .dat ---- */

typedef struct {
    FILE       *file;
    const char *path;
    uint64_t    left_bytes;              /* of the file */
} dat_reader;

static spk_status dat_take(dat_reader *reader, void *out, uint64_t size_bytes, const char *what, spk_error *err) {
    if (size_bytes > reader->left_bytes)
        return spk_fail(err, SPK_E_CORRUPT, "%s: ends in %s: %" PRIu64 " bytes needed, %" PRIu64 " left", reader->path,
                        what, size_bytes, reader->left_bytes);
    if (fread(out, 1, size_bytes, reader->file) != size_bytes)
        return spk_fail(err, SPK_E_IO, "%s: cannot read %s: %s", reader->path, what,
                        ferror(reader->file) ? strerror(errno) : "the file became shorter");
    reader->left_bytes -= size_bytes;
    return SPK_OK;
}

static spk_status dat_take_entry(dat_reader *reader, spk_imatrix *imatrix, int32_t index, spk_error *err) {
    int32_t name_bytes, call_count, value_count;
    char name[SPK_GGUF_NAME_BYTES_MAX];
    SPK_TRY(dat_take(reader, &name_bytes, sizeof name_bytes, "a name's length", err));
    if (name_bytes < 1 || name_bytes > (int32_t)sizeof name)
        return spk_fail(err, SPK_E_CORRUPT, "%s: entry %d: a name of %d bytes, 1 to %zu are possible", reader->path,
                        (int)index, (int)name_bytes, sizeof name);
    SPK_TRY(dat_take(reader, name, (uint64_t)name_bytes, "a name", err));
    if (memchr(name, '\0', (size_t)name_bytes) != NULL)
        return spk_fail(err, SPK_E_CORRUPT, "%s: entry %d: NUL in the name", reader->path, (int)index);
    SPK_TRY(dat_take(reader, &call_count, sizeof call_count, "a count of calls", err));
    SPK_TRY(dat_take(reader, &value_count, sizeof value_count, "a count of values", err));
    if (value_count < 1)
        return spk_fail(err, SPK_E_CORRUPT, "%s: '%.*s': %d values", reader->path, (int)name_bytes, name,
                        (int)value_count);
    if (value_count > VALUE_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: '%.*s': %d values, at most %d", reader->path, (int)name_bytes, name,
                        (int)value_count, VALUE_COUNT_MAX);
    uint64_t values_bytes = (uint64_t)value_count * sizeof(float);
    if (values_bytes > reader->left_bytes)                /* before anything of that size is allocated */
        return spk_fail(err, SPK_E_CORRUPT, "%s: '%.*s': %d values need %" PRIu64 " bytes, %" PRIu64 " are left",
                        reader->path, (int)name_bytes, name, (int)value_count, values_bytes, reader->left_bytes);
    entry *e = NULL;
    SPK_TRY(add_entry(imatrix, (spk_text){ name, (uint64_t)name_bytes }, (uint64_t)value_count, &e, err));
    SPK_TRY(dat_take(reader, e->values, values_bytes, "values", err));
    scale_slice(e->values, e->value_count, (float)call_count);
    return SPK_OK;
}

static spk_status read_dat_entries(spk_imatrix *imatrix, dat_reader *reader, spk_error *err) {
    int32_t entry_count = 0;
    if (reader->left_bytes >= sizeof entry_count)
        SPK_TRY(dat_take(reader, &entry_count, sizeof entry_count, "the count of entries", err));
    if (entry_count < 1 || entry_count > ENTRY_COUNT_MAX)
        return spk_fail(err, SPK_E_MAGIC, "%s: no importance matrix: neither GGUF nor a count of 1 to %d entries",
                        reader->path, ENTRY_COUNT_MAX);
    imatrix->entries = calloc((size_t)entry_count, sizeof *imatrix->entries);
    if (imatrix->entries == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for entries", reader->path);
    for (int32_t i = 0; i < entry_count; i++) SPK_TRY(dat_take_entry(reader, imatrix, i, err));
    return SPK_OK;
}

/* ---- Both ---- */

/* Says whether the file begins as GGUF does. */
static spk_status open_file(const char *path, dat_reader *out, bool *is_gguf, spk_error *err) {
    char magic[4] = { 0 };
    int fd;
    uint64_t size_bytes;
    SPK_TRY(spk_infile_open(path, "an importance matrix file", &fd, &size_bytes, err));
    FILE *file = fdopen(fd, "rb");
    if (file == NULL) {
        (void)close(fd);
        return spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
    }
    if (size_bytes >= sizeof magic && fread(magic, 1, sizeof magic, file) != sizeof magic) {
        spk_status status = spk_fail(err, SPK_E_IO, "%s: cannot read its first bytes: %s", path,
                                     ferror(file) ? strerror(errno) : "the file became shorter");
        (void)fclose(file);
        return status;
    }
    *is_gguf = memcmp(magic, "GGUF", sizeof magic) == 0;
    rewind(file);
    *out = (dat_reader){ .file = file, .path = path, .left_bytes = size_bytes };
    return SPK_OK;
}

static spk_status read_entries(spk_imatrix *imatrix, spk_error *err) {
    dat_reader reader = { .file = NULL };
    bool is_gguf = false;
    SPK_TRY(open_file(imatrix->path, &reader, &is_gguf, err));
    spk_status status;
    if (is_gguf) {
        spk_gguf *gguf = NULL;
        status = spk_gguf_open(imatrix->path, &gguf, err);
        if (status == SPK_OK) status = read_gguf_entries(imatrix, gguf, err);
        spk_gguf_close(gguf);
    } else {
        status = read_dat_entries(imatrix, &reader, err);
    }
    (void)fclose(reader.file);
    if (status == SPK_OK && imatrix->entry_count == 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: has no entries", imatrix->path);
    return status;
}

static spk_status index_entries(spk_imatrix *imatrix, spk_error *err) {
    uint64_t duplicate;
    SPK_TRY(spk_name_index_build(imatrix->entries, imatrix->entry_count, entry_name, imatrix->path,
                                 &imatrix->slots, &imatrix->slot_count, &duplicate, err));
    if (duplicate != SPK_NAME_NONE)
        return spk_fail(err, SPK_E_CORRUPT, "%s: two entries are named '%s'", imatrix->path,
                        imatrix->entries[duplicate].name);
    return SPK_OK;
}

spk_status spk_imatrix_open(const char *path, spk_imatrix **out, spk_error *err) {
    spk_imatrix *imatrix = calloc(1, sizeof *imatrix);
    if (imatrix != NULL) imatrix->path = strdup(path);
    spk_status status = SPK_OK;
    if (imatrix == NULL || imatrix->path == NULL) status = spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
    if (status == SPK_OK) status = read_entries(imatrix, err);
    if (status == SPK_OK) status = index_entries(imatrix, err);
    if (status == SPK_OK)
        *out = imatrix;
    else
        spk_imatrix_close(imatrix);
    return status;
}

void spk_imatrix_close(spk_imatrix *imatrix) {
    if (imatrix == NULL) return;
    for (uint64_t i = 0; i < imatrix->entry_count; i++) free(imatrix->entries[i].values);
    free(imatrix->entries);
    free(imatrix->slots);
    free(imatrix->path);
    free(imatrix);
}

uint64_t spk_imatrix_entry_count(const spk_imatrix *imatrix) { return imatrix->entry_count; }

spk_status spk_imatrix_lookup(const spk_imatrix *imatrix, const char *tensor_name, uint64_t col_count,
                              uint64_t matrix_count, uint64_t matrix_index, spk_imatrix_answer *answer,
                              const float **out, spk_error *err) {
    assert(col_count >= 1 && matrix_index < matrix_count);
    *answer = SPK_IMATRIX_ABSENT;
    *out = NULL;
    uint64_t index = spk_name_index_find(imatrix->slots, imatrix->slot_count, imatrix->entries, entry_name,
                                         (spk_text){ tensor_name, strlen(tensor_name) });
    if (index == SPK_NAME_NONE) return SPK_OK;
    const entry *e = &imatrix->entries[index];
    if (e->value_count % col_count != 0 || e->value_count / col_count != matrix_count ||
        (e->slice_count != 1 && e->slice_count != matrix_count))
        return spk_fail(err, SPK_E_MISMATCH,
                        "%s: '%s' has %" PRIu64 " x %" PRIu64 " values, the tensor has %" PRIu64 " columns and %" PRIu64
                        " matrices", imatrix->path, tensor_name, e->value_count / e->slice_count, e->slice_count,
                        col_count, matrix_count);
    const float *values = e->values + matrix_index * col_count;
    bool usable = true, any = false;
    for (uint64_t c = 0; c < col_count; c++) {
        usable &= is_usable(values[c]);
        any |= values[c] > 0;
    }
    *answer = usable && any ? SPK_IMATRIX_FOUND : SPK_IMATRIX_UNUSABLE;
    if (*answer == SPK_IMATRIX_FOUND) *out = values;
    return SPK_OK;
}
