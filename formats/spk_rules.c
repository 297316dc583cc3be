/* formats/spk_rules.c - the rules of spk-format.md for a pack's header and tensor directory.
 *
 * Reader and writer both run them: the one before it believes a file, the other before it publishes one.  They look at
 * nothing but their arguments, and every sum and product of numbers from a file is checked.
 */
#include "formats/spk_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/dequant.h"
#include "formats/infile.h"
#include "formats/name_index.h"

const char *const spk_provenance_text_keys[SPK_PROVENANCE_TEXT_COUNT] = {
    "source.name", "recipe.name", "recipe.text", "imatrix.name", "tool.version"
};

static const struct {
    uint32_t    id;
    const char *name;
} section_names[] = {
    { SPK_PLACE_STATIC, "STATIC" }, { SPK_PLACE_EXPERTS, "EXPERTS" }, { SPK_PLACE_EMBEDDING, "EMBEDDING" },
    { SPK_PLACE_EXTRA, "EXTRA" }, { SPK_SECTION_CONFIG, "CONFIG" }, { SPK_SECTION_TENSORS, "TENSORS" },
    { SPK_SECTION_META, "META" }, { SPK_SECTION_PROVENANCE, "PROVENANCE" }, { SPK_SECTION_CHUNKS, "CHUNKS" }
};
enum { KNOWN_SECTION_COUNT = sizeof section_names / sizeof *section_names };

const char *spk_section_name(uint32_t id) {
    for (size_t i = 0; i < KNOWN_SECTION_COUNT; i++)
        if (section_names[i].id == id) return section_names[i].name;
    return "unknown";
}

bool spk_section_is_known(uint32_t id) {
    for (size_t i = 0; i < KNOWN_SECTION_COUNT; i++)
        if (section_names[i].id == id) return true;
    return false;
}

const spk_disk_section *spk_section_find(const spk_disk_header *header, uint32_t id) {
    for (uint32_t i = 0; i < header->section_count; i++)
        if (header->sections[i].id == id) return &header->sections[i];
    return NULL;
}

uint64_t spk_chunk_count(uint64_t section_bytes) {
    return section_bytes / SPK_CHUNK_BYTES + (section_bytes % SPK_CHUNK_BYTES != 0);
}

uint64_t spk_chunk_first(const spk_disk_header *header, const spk_disk_section *section) {
    uint64_t first = 0;
    for (const spk_disk_section *s = header->sections; s < section; s++)
        if (spk_section_is_data(s->id)) first += s->item_count;
    return first;
}

/* ---- Digests ---- */

spk_digest spk_header_root(const spk_disk_header *header) {
    return spk_digest_of(header->sections, header->section_count * sizeof *header->sections);
}

spk_digest spk_header_checksum(const spk_disk_header *header) {
    spk_disk_header block = *header;
    memset(&block.checksum, 0, sizeof block.checksum);
    return spk_digest_of(&block, sizeof block);
}

/* ---- Header and section table ---- */

/* R1. */
spk_status spk_rules_magic(const uint8_t *bytes, uint64_t size_bytes, const char *where, spk_error *err) {
    uint8_t start[4] = { 0 };
    memcpy(start, bytes, size_bytes < sizeof start ? size_bytes : sizeof start);
    if (size_bytes >= SPK_MAGIC_BYTES && memcmp(bytes, SPK_MAGIC, SPK_MAGIC_BYTES) == 0) return SPK_OK;
    if (memcmp(start, SPK_MAGIC, sizeof start) == 0)
        return spk_fail(err, SPK_E_MAGIC, "%s: R1: not a .spk pack: damaged, perhaps by a text-mode transfer", where);
    if (memcmp(start, "GGUF", sizeof start) == 0)
        return spk_fail(err, SPK_E_MAGIC, "%s: R1: not a .spk pack, but a GGUF file: spk-pack makes a pack of it", where);
    const char *kind = spk_infile_kind(bytes, size_bytes);
    if (kind != NULL) return spk_fail(err, SPK_E_MAGIC, "%s: R1: not a .spk pack, but %s", where, kind);
    return spk_fail(err, SPK_E_MAGIC, "%s: R1: not a .spk pack: begins with bytes %02x %02x %02x %02x, expected 8f 53 50 4b", where,
                    start[0], start[1], start[2], start[3]);
}

/* R1 to R5.  Magic and version lie where they lie in every version, so they are looked at before the checksum: a later
 * major version may compute it otherwise. */
static spk_status check_fixed(const spk_disk_header *h, uint64_t file_bytes, const char *where, spk_error *err) {
    SPK_TRY(spk_rules_magic((const uint8_t *)h, sizeof *h, where, err));
    if (h->version_major != SPK_VERSION_MAJOR)
        return spk_fail(err, SPK_E_VERSION, "%s: R2: format version %u.%u, this program reads version %d", where,
                        h->version_major, h->version_minor, SPK_VERSION_MAJOR);
    spk_digest checksum = spk_header_checksum(h);
    if (memcmp(&checksum, &h->checksum, sizeof checksum) != 0) {
        char stored[33], computed[33];
        spk_digest_text(&h->checksum, stored);
        spk_digest_text(&checksum, computed);
        return spk_fail(err, SPK_E_CHECKSUM, "%s: R3: header checksum is %s, expected %s", where, computed, stored);
    }
    uint32_t unknown = h->flags_required & ~SPK_FLAGS_REQUIRED_KNOWN;
    if (unknown != 0)
        return spk_fail(err, SPK_E_UNSUPPORTED, "%s: R4: needs feature bit %d, which this program does not know", where,
                        __builtin_ctz(unknown));
    if (h->file_bytes != file_bytes)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R5: %s: file has %" PRIu64 " bytes, header says %" PRIu64, where,
                        file_bytes < h->file_bytes ? "truncated" : "bytes after the end", file_bytes, h->file_bytes);
    return SPK_OK;
}

/* R6 and R7. */
static spk_status check_table(const spk_disk_header *h, const char *where, spk_error *err) {
    if (h->section_count == 0 || h->section_count > SPK_SECTION_COUNT_MAX)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R6: %" PRIu32 " sections, expected 1 to %d", where, h->section_count,
                        SPK_SECTION_COUNT_MAX);
    static const spk_disk_section unused;
    for (uint32_t i = h->section_count; i < SPK_SECTION_COUNT_MAX; i++)
        if (memcmp(&h->sections[i], &unused, sizeof unused) != 0)
            return spk_fail(err, SPK_E_CORRUPT, "%s: R6: unused table entry %" PRIu32 " is not zero", where, i);
    spk_digest root = spk_header_root(h);
    if (memcmp(&root, &h->root, sizeof root) != 0)
        return spk_fail(err, SPK_E_CHECKSUM, "%s: R7: root digest does not match the section table", where);
    return SPK_OK;
}

/* R8: which sections there are. */
static spk_status check_ids(const spk_disk_header *h, const char *where, spk_error *err) {
    for (uint32_t i = 0; i < h->section_count; i++) {
        const spk_disk_section *s = &h->sections[i];
        bool known = spk_section_is_known(s->id);
        if (!known && !(s->flags & SPK_SECTION_OPTIONAL))
            return spk_fail(err, SPK_E_UNSUPPORTED,
                            "%s: R8: needs section id %" PRIu32 ", which this program does not know",
                            where, s->id);
        if (known && s->flags != 0)
            return spk_fail(err, SPK_E_UNSUPPORTED, "%s: R8: section %s has flags %#" PRIx32 ", expected 0", where,
                            spk_section_name(s->id), s->flags);
        if (spk_section_find(h, s->id) != s)
            return spk_fail(err, SPK_E_CORRUPT, "%s: R8: section %s (id %" PRIu32 ") is there twice", where,
                            spk_section_name(s->id), s->id);
    }
    for (size_t i = 0; i < KNOWN_SECTION_COUNT; i++)
        if (!spk_section_is_data(section_names[i].id) && spk_section_find(h, section_names[i].id) == NULL)
            return spk_fail(err, SPK_E_CORRUPT, "%s: R8: section %s is missing", where, section_names[i].name);
    return SPK_OK;
}

/* R9: each section begins where the one before it ends, rounded up; the last one ends the file. */
static spk_status check_extents(const spk_disk_header *h, const char *where, spk_error *err) {
    uint64_t expected = SPK_HEADER_BYTES;
    for (uint32_t i = 0; i < h->section_count; i++) {
        const spk_disk_section *s = &h->sections[i];
        if (s->offset_bytes != expected)
            return spk_fail(err, SPK_E_CORRUPT, "%s: R9: section %s (id %" PRIu32 ") begins at %" PRIu64
                            ", expected %" PRIu64, where, spk_section_name(s->id), s->id, s->offset_bytes, expected);
        /* expected <= file_bytes here, so the difference cannot wrap. */
        if (s->stored_bytes == 0 || s->stored_bytes > h->file_bytes - expected)
            return spk_fail(err, SPK_E_CORRUPT, "%s: R9: section %s (id %" PRIu32 ") at %" PRIu64 " has %" PRIu64
                            " bytes, expected 1 to %" PRIu64, where, spk_section_name(s->id), s->id, s->offset_bytes,
                            s->stored_bytes, h->file_bytes - expected);
        expected += s->stored_bytes;
        uint64_t padding = (SPK_BLOCK_ALIGN - expected % SPK_BLOCK_ALIGN) % SPK_BLOCK_ALIGN;
        if (padding > h->file_bytes - expected)
            return spk_fail(err, SPK_E_CORRUPT, "%s: R9: padding of section %s (id %" PRIu32 ") reaches past the file",
                            where, spk_section_name(s->id), s->id);
        expected += padding;
    }
    if (expected != h->file_bytes)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R9: sections end at %" PRIu64 ", file at %" PRIu64, where, expected,
                        h->file_bytes);
    return SPK_OK;
}

typedef struct {
    uint64_t item_size;                  /* bytes of an item, 0 if they vary */
    uint64_t count_max, raw_max;
} section_shape;

static section_shape shape_of(uint32_t id) {
    switch (id) {
    case SPK_SECTION_CONFIG:     return (section_shape){ sizeof(spk_model_config), 1, sizeof(spk_model_config) };
    case SPK_SECTION_TENSORS:    return (section_shape){ sizeof(spk_disk_tensor), SPK_TENSOR_COUNT_MAX, UINT64_MAX };
    case SPK_SECTION_META:       return (section_shape){ 0, SPK_KV_COUNT_MAX, SPK_META_BYTES_MAX };
    case SPK_SECTION_PROVENANCE: return (section_shape){ 0, SPK_KV_COUNT_MAX, SPK_PROVENANCE_BYTES_MAX };
    case SPK_SECTION_CHUNKS:     return (section_shape){ sizeof(spk_digest), UINT64_MAX, UINT64_MAX };
    default:                     return (section_shape){ 0, UINT64_MAX, UINT64_MAX };
    }
}

/* R10: counts and sizes of the sections that this version knows. */
static spk_status check_shapes(const spk_disk_header *h, const char *where, spk_error *err) {
    uint64_t chunk_count = 0;
    for (uint32_t i = 0; i < h->section_count; i++) {
        const spk_disk_section *s = &h->sections[i];
        if (!spk_section_is_known(s->id)) continue;
        const char *name = spk_section_name(s->id);
        section_shape shape = shape_of(s->id);
        if (s->item_count > shape.count_max || s->raw_bytes > shape.raw_max)
            return spk_fail(err, SPK_E_LIMIT, "%s: R10: section %s holds %" PRIu64 " items in %" PRIu64
                            " bytes, expected at most %" PRIu64 " in %" PRIu64, where, name, s->item_count,
                            s->raw_bytes, shape.count_max, shape.raw_max);
        uint64_t items_bytes;
        if (shape.item_size != 0 && (__builtin_mul_overflow(s->item_count, shape.item_size, &items_bytes) ||
                                     items_bytes != s->stored_bytes))
            return spk_fail(err, SPK_E_CORRUPT,
                            "%s: R10: section %s has %" PRIu64 " bytes for %" PRIu64 " items of %" PRIu64,
                            where, name, s->stored_bytes, s->item_count, shape.item_size);
        if (s->id != SPK_SECTION_META && s->raw_bytes != s->stored_bytes)
            return spk_fail(err, SPK_E_CORRUPT,
                            "%s: R10: section %s: raw size is %" PRIu64 ", expected the stored %" PRIu64,
                            where, name, s->raw_bytes, s->stored_bytes);
        if (s->reserved != 0)
            return spk_fail(err, SPK_E_CORRUPT, "%s: R10: section %s: a reserved field is not zero", where, name);
        if (!spk_section_is_data(s->id)) continue;
        if (s->stored_bytes % SPK_BLOCK_ALIGN != 0 || s->item_count != spk_chunk_count(s->stored_bytes))
            return spk_fail(err, SPK_E_CORRUPT, "%s: R10: section %s has %" PRIu64 " bytes in %" PRIu64
                            " chunks, expected a multiple of %d in chunks of %d", where, name, s->stored_bytes,
                            s->item_count, SPK_BLOCK_ALIGN, SPK_CHUNK_BYTES);
        chunk_count += s->item_count;
    }
    const spk_disk_section *chunks = spk_section_find(h, SPK_SECTION_CHUNKS);
    if (chunks->item_count != chunk_count)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R10: CHUNKS has %" PRIu64 " digests for %" PRIu64 " chunks", where,
                        chunks->item_count, chunk_count);
    return SPK_OK;
}

spk_status spk_rules_header(const spk_disk_header *header, uint64_t file_bytes, const char *where, spk_error *err) {
    SPK_TRY(check_fixed(header, file_bytes, where, err));
    SPK_TRY(check_table(header, where, err));
    SPK_TRY(check_ids(header, where, err));
    SPK_TRY(check_extents(header, where, err));
    return check_shapes(header, where, err);
}

/* ---- Configuration ---- */

spk_status spk_rules_config(const spk_model_config *config, bool has_experts, const char *where, spk_error *err) {
    static const uint32_t zeros[sizeof config->reserved / sizeof *config->reserved];
    if (memcmp(config->reserved, zeros, sizeof zeros) != 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R13: a reserved field of CONFIG is not zero", where);
    if (has_experts && config->expert_count == 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R13: section EXPERTS in a pack of a model without experts", where);
    return SPK_OK;
}

/* ---- Tensors ---- */

spk_tensor_extent spk_tensor_extent_of(const spk_tensor *t) {
    spk_tensor_extent e = { .unit_bytes = spk_layout_unit_bytes(t->layout, t->type, t->dims[0]),
                            .unit_count = spk_layout_unit_count(t->layout, t->type, t->dims[1], t->dims[0]),
                            .matrix_count = spk_tensor_matrix_count(t), .span_bytes = spk_tensor_span_bytes(t) };
    e.matrix_bytes = (e.unit_count - 1) * t->unit_stride_bytes + e.unit_bytes;
    return e;
}

/* R15. */
static spk_status check_name(const spk_tensor *t, uint64_t index, const char *where, spk_error *err) {
    size_t length = strnlen(t->name, sizeof t->name);
    if (length == 0 || length == sizeof t->name)
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: R15: name of tensor %" PRIu64 " has %zu bytes, expected 1 to %zu", where,
                        index, length, sizeof t->name - 1);
    for (size_t i = 0; i < sizeof t->name; i++) {
        unsigned char c = (unsigned char)t->name[i];
        if (i < length ? c < 0x20 || c == 0x7f : c != 0)
            return spk_fail(err, SPK_E_CORRUPT, "%s: R15: name of tensor %" PRIu64 " ('%.63s'): byte %zu is %u", where,
                            index, t->name, i, c);
    }
    return SPK_OK;
}

/* R16 and R17: types, layout, shape. */
static spk_status check_kind(const spk_tensor *t, const char *where, spk_error *err) {
    const spk_type_info *type = spk_type_find(t->type);
    if (type == NULL || spk_type_find(t->source_type) == NULL)
        return spk_fail(err, SPK_E_UNSUPPORTED,
                        "%s: R16: tensor '%s': type id %" PRIu32 " (%s) is not supported", where,
                        t->name, type == NULL ? t->type : t->source_type,
                        spk_type_name(type == NULL ? t->type : t->source_type));
    if (t->layout != SPK_LAYOUT_ROWS && t->layout != SPK_LAYOUT_T32)
        return spk_fail(err, SPK_E_UNSUPPORTED, "%s: R16: tensor '%s': layout id %" PRIu32 " is not supported", where,
                        t->name, t->layout);
    if (t->dim_count < 1 || t->dim_count > 4)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R17: tensor '%s' has %" PRIu32 " dimensions, expected 1 to 4", where,
                        t->name, t->dim_count);
    for (uint32_t i = 0; i < 4; i++)
        if (t->dims[i] == 0 || (i >= t->dim_count && t->dims[i] != 1))
            return spk_fail(err, SPK_E_CORRUPT,
                            "%s: R17: tensor '%s': dimension %" PRIu32 " of %" PRIu32 " is %" PRIu64,
                            where, t->name, i, t->dim_count, t->dims[i]);
    if (t->dims[0] % type->block_weights != 0)
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: R17: tensor '%s': rows of %" PRIu64 " weights, %s needs a multiple of %"
                        PRIu32, where, t->name, t->dims[0], type->name, type->block_weights);
    if (t->layout == SPK_LAYOUT_T32 && !spk_t32_accepts(t->type, t->dims[0]))
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: R17: tensor '%s': T32 does not take %s with %" PRIu64 " columns", where,
                        t->name, type->name, t->dims[0]);
    return SPK_OK;
}

/* R18: what a kernel's loads rely on.  Row strides of quantized types are multiples of their blocks' alignment, 2. */
static spk_status check_alignment(const spk_tensor *t, const char *where, spk_error *err) {
    bool is_tiled = t->layout == SPK_LAYOUT_T32;
    uint64_t start = is_tiled ? 64 : 16;
    uint64_t unit = is_tiled ? 64 : t->type == SPK_TYPE_F32 ? 4 : 2;
    uint64_t matrix = t->section == SPK_PLACE_EXTRA ? unit : start;
    if (t->offset_bytes % start != 0 || t->unit_stride_bytes % unit != 0 || t->matrix_stride_bytes % matrix != 0)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R18: tensor '%s' (%s): offset %" PRIu64 ", unit stride %" PRIu64
                        ", matrix stride %" PRIu64 ", expected multiples of %" PRIu64 ", %" PRIu64 ", %" PRIu64, where,
                        t->name, spk_layout_name(t->layout), t->offset_bytes, t->unit_stride_bytes,
                        t->matrix_stride_bytes, start, unit, matrix);
    return SPK_OK;
}

/* R19: strides step over whole units and matrices, and everything lies in the section. */
static spk_status check_bounds(const spk_tensor *t, const uint64_t section_bytes[SPK_PLACE_COUNT],
                               uint32_t expert_count, const char *where, spk_error *err) {
    if (t->section < 1 || t->section > SPK_PLACE_COUNT || section_bytes[t->section - 1] == 0)
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: R19: tensor '%s' is in section %" PRIu32 ", which the pack does not have",
                        where, t->name, t->section);
    uint64_t limit = section_bytes[t->section - 1], row_bytes, matrix_count, row_count, weight_bytes;
    /* Every row takes bytes, so this bounds all products below. */
    if (spk_type_bytes(t->type, t->dims[0], &row_bytes, NULL) != SPK_OK ||
        __builtin_mul_overflow(t->dims[2], t->dims[3], &matrix_count) ||
        __builtin_mul_overflow(matrix_count, t->dims[1], &row_count) ||
        __builtin_mul_overflow(row_count, row_bytes, &weight_bytes) || weight_bytes > limit)
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: R19: tensor '%s' does not fit into the %" PRIu64 " bytes of section %s",
                        where, t->name, limit, spk_section_name(t->section));
    if (t->section == SPK_PLACE_EXPERTS && matrix_count != expert_count)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R19: tensor '%s' in section EXPERTS has %" PRIu64
                        " matrices, expected one for each of %" PRIu32 " experts", where, t->name, matrix_count,
                        expert_count);
    uint64_t unit_bytes = spk_layout_unit_bytes(t->layout, t->type, t->dims[0]);
    uint64_t unit_count = spk_layout_unit_count(t->layout, t->type, t->dims[1], t->dims[0]);
    uint64_t matrix_bytes, end;
    if (t->unit_stride_bytes < unit_bytes ||
        __builtin_mul_overflow(unit_count - 1, t->unit_stride_bytes, &matrix_bytes) ||
        __builtin_add_overflow(matrix_bytes, unit_bytes, &matrix_bytes))
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: R19: tensor '%s': unit stride %" PRIu64 " for %" PRIu64 " units of %" PRIu64
                        " bytes", where, t->name, t->unit_stride_bytes, unit_count, unit_bytes);
    if (matrix_count == 1 ? t->matrix_stride_bytes != 0 : t->matrix_stride_bytes < matrix_bytes)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R19: tensor '%s': matrix stride %" PRIu64 " for %" PRIu64
                        " matrices of %" PRIu64 " bytes", where, t->name, t->matrix_stride_bytes, matrix_count,
                        matrix_bytes);
    if (__builtin_mul_overflow(matrix_count - 1, t->matrix_stride_bytes, &end) ||
        __builtin_add_overflow(end, matrix_bytes, &end) || __builtin_add_overflow(end, t->offset_bytes, &end) ||
        end > limit)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R19: tensor '%s' at offset %" PRIu64 " reaches past the %" PRIu64
                        " bytes of section %s", where, t->name, t->offset_bytes, limit, spk_section_name(t->section));
    return SPK_OK;
}

/* R20, the rest of an entry. */
static spk_status check_figures(const spk_tensor *t, const char *where, spk_error *err) {
    if (!isfinite(t->relative_rmse) || !isfinite(t->max_abs_error) || !isfinite(t->cosine))
        return spk_fail(err, SPK_E_CORRUPT, "%s: R20: tensor '%s': an error figure is not finite", where, t->name);
    return SPK_OK;
}

static spk_text name_of(const void *items, uint64_t index) {
    const char *name = ((const spk_tensor *)items)[index].name;
    return (spk_text){ name, strlen(name) };
}

/* R15, the part that takes all names. */
static spk_status check_unique(const spk_tensor *tensors, uint64_t count, const char *where, spk_error *err) {
    uint32_t *slots;
    uint64_t slot_count, duplicate;
    SPK_TRY(spk_name_index_build(tensors, count, name_of, where, &slots, &slot_count, &duplicate, err));
    free(slots);
    if (duplicate != SPK_NAME_NONE)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R15: tensor '%s' is there twice", where, tensors[duplicate].name);
    return SPK_OK;
}

static int compare_offsets(const void *a, const void *b) {
    const spk_tensor *x = *(const spk_tensor *const *)a, *y = *(const spk_tensor *const *)b;
    if (x->section != y->section) return x->section < y->section ? -1 : 1;
    return x->offset_bytes < y->offset_bytes ? -1 : x->offset_bytes > y->offset_bytes;
}

/* Intervals [0, a_bytes) and [distance, distance + b_bytes) repeated every `period` bytes do not touch. */
static bool are_disjoint_in_period(uint64_t a_bytes, uint64_t b_bytes, uint64_t distance, uint64_t period) {
    uint64_t phase = distance % period;
    return phase >= a_bytes && period - phase >= b_bytes;
}

/* R21 for two tensors of a section whose spans meet, a starting no later than b.  Legal in two ways: their matrices
 * have one stride and alternate, or their units do within matrices that lie side by side. */
static bool may_share(const spk_tensor *a, const spk_tensor *b) {
    spk_tensor_extent ea = spk_tensor_extent_of(a), eb = spk_tensor_extent_of(b);
    uint64_t distance = b->offset_bytes - a->offset_bytes;
    if (a->matrix_stride_bytes != b->matrix_stride_bytes) return false;
    uint64_t period = a->matrix_stride_bytes;
    if (period != 0 && are_disjoint_in_period(ea.matrix_bytes, eb.matrix_bytes, distance, period)) return true;
    if (a->unit_stride_bytes != b->unit_stride_bytes) return false;
    /* Matrix i of b must end before matrix i + 1 of a begins: then only equal i can meet. */
    if (period != 0 && (distance >= period || eb.matrix_bytes > period - distance)) return false;
    return are_disjoint_in_period(ea.unit_bytes, eb.unit_bytes, distance, a->unit_stride_bytes);
}

/* R21.  In order of offset, a tensor is compared with those before it whose spans have not ended. */
static spk_status check_sorted(const spk_tensor *const *sorted, uint64_t count, const char *where, spk_error *err) {
    const spk_tensor *open[SPK_SHARED_TENSOR_MAX];
    uint32_t open_count = 0;
    for (uint64_t i = 0; i < count; i++) {
        const spk_tensor *t = sorted[i];
        uint32_t kept = 0;
        for (uint32_t k = 0; k < open_count; k++) {
            const spk_tensor *o = open[k];
            if (o->section != t->section || t->offset_bytes - o->offset_bytes >= spk_tensor_span_bytes(o)) continue;
            if (!may_share(o, t))
                return spk_fail(err, SPK_E_CORRUPT,
                                "%s: R21: tensors '%s' and '%s' overlap in section %s", where, o->name,
                                t->name, spk_section_name(t->section));
            open[kept++] = o;
        }
        if (kept == SPK_SHARED_TENSOR_MAX)
            return spk_fail(err, SPK_E_LIMIT,
                            "%s: R21: tensor '%s' is interleaved with more than %d others", where, t->name,
                            SPK_SHARED_TENSOR_MAX - 1);
        open[kept] = t;
        open_count = kept + 1;
    }
    return SPK_OK;
}

static spk_status check_overlap(const spk_tensor *tensors, uint64_t count, const char *where, spk_error *err) {
    const spk_tensor **sorted = malloc((count + 1) * sizeof *sorted);
    if (sorted == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " tensors", where, count);
    for (uint64_t i = 0; i < count; i++) sorted[i] = &tensors[i];
    qsort(sorted, count, sizeof *sorted, compare_offsets);
    spk_status status = check_sorted(sorted, count, where, err);
    free(sorted);
    return status;
}

spk_status spk_rules_tensors(const spk_tensor *tensors, uint64_t tensor_count,
                             const uint64_t section_bytes[SPK_PLACE_COUNT], uint32_t expert_count, const char *where,
                             spk_error *err) {
    for (uint64_t i = 0; i < tensor_count; i++) {
        SPK_TRY(check_name(&tensors[i], i, where, err));
        SPK_TRY(check_kind(&tensors[i], where, err));
        SPK_TRY(check_alignment(&tensors[i], where, err));
        SPK_TRY(check_bounds(&tensors[i], section_bytes, expert_count, where, err));
        SPK_TRY(check_figures(&tensors[i], where, err));
    }
    SPK_TRY(check_unique(tensors, tensor_count, where, err));
    return check_overlap(tensors, tensor_count, where, err);
}
