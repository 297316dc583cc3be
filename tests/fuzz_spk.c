/* tests/fuzz_spk.c - the SPK reader, past its checksums: an input that only they refuse is sealed (digests made right again)
 * and given once more.  What is accepted decodes without touching a byte outside its section, and rewritten it is the same
 * pack; rewriting that again gives the same bytes. */
#include <stddef.h>
#include <stdint.h>

static size_t change_pack(uint8_t *bytes, size_t size, size_t size_max, uint64_t *state);
#define FUZZ_MUTATE change_pack
#define FUZZ_TEST_SECONDS 3

#include "formats/layout.h"
#include "tests/fuzz.h"
#include "tests/spk_build.h"

/* Where changes are worth most: header, table, and the sections that are not weights. */
static void region_of(const uint8_t *bytes, size_t size, uint64_t pick, size_t *at, size_t *length) {
    *at = 0;
    *length = size;
    if (size < SPK_HEADER_BYTES) return;
    const spk_disk_header *h = (const spk_disk_header *)(const void *)bytes;
    uint32_t count = h->section_count < SPK_SECTION_COUNT_MAX ? h->section_count : SPK_SECTION_COUNT_MAX;
    if (pick % 4 == 0 || count == 0) {
        *length = 64 + (size_t)count * sizeof(spk_disk_section);
        return;
    }
    const spk_disk_section *s = &h->sections[pick / 4 % count];
    if (s->offset_bytes < size && s->stored_bytes <= size - s->offset_bytes) {
        *at = s->offset_bytes;
        *length = s->stored_bytes;
    }
}

/* A field of a tensor's entry becomes another multiple of what its kind is aligned to, near or far. */
static void change_tensor(uint8_t *bytes, size_t size, uint64_t *state) {
    static const size_t fields[] = { 64, 72, 76, 80, 88, 96, 104, 112, 120, 128, 136 };   /* from type to matrix_stride */
    const spk_disk_header *h = (const spk_disk_header *)(const void *)bytes;
    for (uint32_t i = 0; size >= SPK_HEADER_BYTES && i < SPK_SECTION_COUNT_MAX; i++) {
        const spk_disk_section *s = &h->sections[i];
        if (s->id != SPK_SECTION_TENSORS || s->offset_bytes > size || s->stored_bytes > size - s->offset_bytes) continue;
        uint64_t count = s->stored_bytes / sizeof(spk_disk_tensor), value;
        if (count == 0) return;
        size_t field = fields[fuzz_below(state, sizeof fields / sizeof *fields)], width = field < 88 ? 4 : 8;
        uint8_t *at = bytes + s->offset_bytes + fuzz_below(state, count) * sizeof(spk_disk_tensor) + field;
        uint64_t step = UINT64_C(1) << fuzz_below(state, field < 120 ? 9 : 14);
        value = 0;
        memcpy(&value, at, width);
        value = fuzz_below(state, 4) == 0 ? step * fuzz_below(state, 64) : fuzz_below(state, 2) ? value + step : value - step;
        memcpy(at, &value, width);
        return;
    }
}

/* A change of size moves all that follows, so most changes keep it. */
static size_t change_pack(uint8_t *bytes, size_t size, size_t size_max, uint64_t *state) {
    uint8_t part[512];
    for (uint64_t i = 0, count = 1 + fuzz_below(state, 3); i < count; i++) {
        size_t at, length, kept;
        if (fuzz_below(state, 3) == 0) {
            change_tensor(bytes, size, state);
            continue;
        }
        if (fuzz_below(state, 16) == 0) {
            size = fuzz_change(bytes, size, size_max, state);
            continue;
        }
        region_of(bytes, size, check_random(state) >> 8, &at, &length);
        if (length == 0) continue;
        size_t from = fuzz_below(state, length), room = length - from < sizeof part ? length - from : sizeof part;
        memcpy(part, bytes + at + from, room);
        kept = fuzz_change(part, room, room, state);
        memcpy(bytes + at + from, part, kept);
    }
    return size;
}
#ifdef SPK_LIBFUZZER
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t size_max, unsigned seed);
size_t LLVMFuzzerCustomMutator(uint8_t *bytes, size_t size, size_t size_max, unsigned seed) {
    uint64_t state = seed;
    if (seed % 3 != 0) return change_pack(bytes, size, size_max, &state);
    size_t at, length;
    region_of(bytes, size, check_random(&state) >> 8, &at, &length);
    return length == 0 || LLVMFuzzerMutate(bytes + at, length, length) != 0 ? size : 1;
}
#endif

static void expect_decodes_inside(const spk_pack *pack) {
    fuzz_guarded guarded[SPK_PLACE_COUNT];
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t size;
        const uint8_t *section = spk_pack_section(pack, place, &size);
        guarded[place - 1] = fuzz_guard(section, size);
    }
    for (uint64_t i = 0; i < spk_pack_tensor_count(pack); i++) {
        const spk_tensor *t = &spk_pack_tensors(pack)[i];
        uint64_t row_bytes = spk_layout_unit_bytes(SPK_LAYOUT_ROWS, t->type, t->dims[0]);
        float *row = malloc(t->dims[0] * sizeof *row);
        uint8_t *ggml = malloc(row_bytes);
        FUZZ_ASSERT(row != NULL && ggml != NULL, "%s: a row of %d bytes that the section cannot hold", t->name, (int)row_bytes);
        for (uint64_t m = 0; m < spk_tensor_matrix_count(t); m++) {
            spk_matrix matrix = spk_tensor_matrix(t, guarded[t->section - 1].bytes, m);
            for (uint64_t r = 0; r < t->dims[1]; r++) {
                spk_layout_dequantize_row(&matrix, r, row);
                spk_layout_get_rows(&matrix, r, r + 1, ggml);
            }
        }
        free(row);
        free(ggml);
    }
    for (uint32_t place = 0; place < SPK_PLACE_COUNT; place++) fuzz_unguard(guarded[place]);
}

static spk_status write_again(const spk_pack *pack, const char *path, spk_error *err) {
    const spk_kv_set *kvs = spk_pack_kvs(pack);
    const spk_kv *last = kvs->count > 0 ? &kvs->items[kvs->count - 1] : NULL;
    spk_pack_writer_options options = { .path = path, .replace = true, .config = spk_pack_config(pack), .kv_count = kvs->count,
                                        .kv_bytes = last != NULL ? kvs->items[0].entry : (const uint8_t *)"",
                                        .kv_bytes_size = last != NULL ? (uint64_t)(last->entry + last->entry_bytes - kvs->items[0].entry) : 0,
                                        .tensor_count = spk_pack_tensor_count(pack) };
    spk_pack_writer *writer = NULL;
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++)
        (void)spk_pack_section(pack, place, &options.section_bytes[place - 1]);
    SPK_TRY(spk_pack_writer_begin(&options, &writer, err));
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t size;
        const uint8_t *section = spk_pack_section(pack, place, &size);
        spk_status status = spk_pack_writer_append(writer, section, size, err);
        FUZZ_ASSERT(status == SPK_OK, "%s", err->text);
    }
    return spk_pack_writer_commit(writer, spk_pack_tensors(pack), spk_pack_provenance(pack), err);
}

static bool same_tensor(const spk_tensor *a, const spk_tensor *b) {
    return strcmp(a->name, b->name) == 0 && a->type == b->type && a->source_type == b->source_type && a->layout == b->layout &&
           a->section == b->section && a->dim_count == b->dim_count && memcmp(a->dims, b->dims, sizeof a->dims) == 0 &&
           a->offset_bytes == b->offset_bytes && a->unit_stride_bytes == b->unit_stride_bytes &&
           a->matrix_stride_bytes == b->matrix_stride_bytes && memcmp(&a->relative_rmse, &b->relative_rmse, 8) == 0;
}

static void expect_same(const spk_pack *a, const spk_pack *b) {
    FUZZ_ASSERT(spk_pack_tensor_count(a) == spk_pack_tensor_count(b), "tensor counts");
    for (uint64_t i = 0; i < spk_pack_tensor_count(a); i++)
        FUZZ_ASSERT(same_tensor(&spk_pack_tensors(a)[i], &spk_pack_tensors(b)[i]), "%s", spk_pack_tensors(a)[i].name);
    FUZZ_ASSERT(memcmp(spk_pack_config(a), spk_pack_config(b), sizeof(spk_model_config)) == 0, "configuration");
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t x_size, y_size;
        const uint8_t *x = spk_pack_section(a, place, &x_size), *y = spk_pack_section(b, place, &y_size);
        FUZZ_ASSERT(x_size == y_size && (x_size == 0 || memcmp(x, y, x_size) == 0), "section %u", place);
    }
    FUZZ_ASSERT(spk_pack_kvs(a)->count == spk_pack_kvs(b)->count, "entries");
    FUZZ_ASSERT(strcmp(spk_pack_provenance(a)->recipe_text, spk_pack_provenance(b)->recipe_text) == 0, "provenance");
}

static void check_accepted(const spk_pack *pack) {
    const char *first = fuzz_path("first.spk"), *second = fuzz_path("second.spk");
    spk_pack *again = NULL;
    spk_error err = { 0 };
    char text[SPK_FINGERPRINT_SIZE];
    fuzz_accepted_count++;
    expect_decodes_inside(pack);
    if (spk_model_config_check(spk_pack_config(pack), spk_pack_kvs(pack), spk_pack_tensors(pack), spk_pack_tensor_count(pack), "x", &err) == SPK_OK)
        FUZZ_ASSERT(spk_model_fingerprint(spk_pack_config(pack), text, sizeof text) < sizeof text, "%s", text);
    FUZZ_ASSERT(write_again(pack, first, &err) == SPK_OK, "%s", err.text);
    FUZZ_ASSERT(spk_pack_open(first, &again, &err) == SPK_OK, "%s", err.text);
    FUZZ_ASSERT(spk_pack_verify(again, 1, NULL, NULL, &err) == SPK_OK, "%s", err.text);
    expect_same(pack, again);
    FUZZ_ASSERT(write_again(again, second, &err) == SPK_OK, "%s", err.text);
    image x = read_image(first), y = read_image(second);
    FUZZ_ASSERT(x.size_bytes == y.size_bytes && memcmp(x.bytes, y.bytes, x.size_bytes) == 0, "written twice, two files");
    free(x.bytes);
    free(y.bytes);
    spk_pack_close(again);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    spk_pack *pack = NULL;
    spk_error err = { 0 };
    spk_status status = spk_pack_open(fuzz_file(bytes, size), &pack, &err);
    if (status == SPK_E_CHECKSUM && size >= SPK_HEADER_BYTES) {
        image sealed = { malloc(size), size };
        memcpy(sealed.bytes, bytes, size);
        seal(&sealed);
        status = spk_pack_open(fuzz_file(sealed.bytes, size), &pack, &err);
        free(sealed.bytes);
    }
    FUZZ_ASSERT(status == SPK_OK || (err.text[0] != '\0' && strchr(err.text, '\n') == NULL), "'%s'", err.text);
    if (status == SPK_OK) check_accepted(pack);
    spk_pack_close(pack);
    return 0;
}

/* META as `frame`, with no entries. */
static void seed_with_meta(const void *frame, uint64_t size_bytes) {
    image i = model_image();
    spk_disk_section *meta = section_of(&i, SPK_SECTION_META);
    memset(i.bytes + meta->offset_bytes, 0, SPK_BLOCK_ALIGN);
    memcpy(i.bytes + meta->offset_bytes, frame, size_bytes);
    meta->stored_bytes = size_bytes;
    meta->raw_bytes = meta->item_count = 0;
    seal(&i);
    fuzz_seed(i.bytes, i.size_bytes);
    free(i.bytes);
}

/* Packs of all sections, of one, and of none that a reader of today knows all of; and with empty metadata: a frame of nothing, one
 * that is to be skipped, and one of a format before. */
void fuzz_seeds(void) {
    static const model norms = { { 4096, 0, 0, 0 }, &model_tensors[3], 2 };
    (void)open_folder();
    image i = model_image();
    fuzz_seed(i.bytes, i.size_bytes);
    seed_with_meta("\x28\xb5\x2f\xfd\x20\0\x01\0\0", 9);
    seed_with_meta("\x5a\x2a\x4d\x18\x04\0\0\0abcd", 12);
    seed_with_meta("\x27\xb5\x2f\xfd\0\0\xc0\0\0", 9);
    header_of(&i)->version_minor = 7;
    add_unknown_section(&i);
    fuzz_seed(i.bytes, i.size_bytes);
    free(i.bytes);
    free(write_model(pack_path, &norms, 4096));
    i = read_image(pack_path);
    fuzz_seed(i.bytes, i.size_bytes);
    free(i.bytes);
    close_folder();
}
