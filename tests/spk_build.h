/* tests/spk_build.h - small packs made by the writer, and patched afterwards, for tests.
 *
 * A test that patches a pack calls `seal`, which makes the digests right again, so that it reaches the rule it means.
 */
#ifndef SPK_TEST_SPK_BUILD_H
#define SPK_TEST_SPK_BUILD_H

#include "formats/spk_internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/check.h"

static char folder[] = "/tmp/spk-test-XXXXXX";
static char pack_path[64], other_path[64];

/* ---- A small model ---- */

enum { TENSOR_COUNT = 5, KV_COUNT = 3 };

/* One record each of text, array of texts and number. */
static const uint8_t kv_bytes[] =
    "\x14\0\0\0\0\0\0\0general.architecture\x08\0\0\0\x08\0\0\0\0\0\0\0qwen3moe"
    "\x06\0\0\0\0\0\0\0tokens\x09\0\0\0\x08\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0a\x02\0\0\0\0\0\0\0\xc4\xa0"
    "\x05\0\0\0\0\0\0\0count\x04\0\0\0\x07\0\0\0";

/* Two experts whose gate and up tiles alternate, a table, a vector, and a matrix after it. */
static const spk_tensor model_tensors[TENSOR_COUNT] = {
    { .name = "token_embd.weight", .type = SPK_TYPE_Q8_0, .source_type = SPK_TYPE_Q8_0, .dim_count = 2,
      .dims = { 64, 8, 1, 1 }, .layout = SPK_LAYOUT_ROWS, .section = SPK_PLACE_EMBEDDING, .unit_stride_bytes = 68,
      .cosine = 1 },
    { .name = "blk.0.ffn_gate_exps.weight", .type = SPK_TYPE_Q4_K, .source_type = SPK_TYPE_Q5_K, .dim_count = 3,
      .dims = { 256, 30, 2, 1 }, .layout = SPK_LAYOUT_T32, .section = SPK_PLACE_EXPERTS, .unit_stride_bytes = 9216,
      .matrix_stride_bytes = 12288, .relative_rmse = 0.07125, .max_abs_error = 0.5, .cosine = 0.9975 },
    { .name = "blk.0.ffn_up_exps.weight", .type = SPK_TYPE_Q4_K, .source_type = SPK_TYPE_Q4_K, .dim_count = 3,
      .dims = { 256, 30, 2, 1 }, .layout = SPK_LAYOUT_T32, .section = SPK_PLACE_EXPERTS, .offset_bytes = 4608,
      .unit_stride_bytes = 9216, .matrix_stride_bytes = 12288, .cosine = 1 },
    { .name = "blk.0.attn_norm.weight", .type = SPK_TYPE_F32, .source_type = SPK_TYPE_F32, .dim_count = 1,
      .dims = { 256, 1, 1, 1 }, .layout = SPK_LAYOUT_ROWS, .section = SPK_PLACE_STATIC, .unit_stride_bytes = 1024,
      .cosine = 1 },
    { .name = "output_norm.weight", .type = SPK_TYPE_F32, .source_type = SPK_TYPE_F32, .dim_count = 1,
      .dims = { 256, 1, 1, 1 }, .layout = SPK_LAYOUT_ROWS, .section = SPK_PLACE_STATIC, .offset_bytes = 1024,
      .unit_stride_bytes = 1024, .cosine = 1 },
};
typedef struct {
    uint64_t          section_bytes[SPK_PLACE_COUNT];
    const spk_tensor *tensors;
    uint64_t          tensor_count;
} model;
static const model small_model = { { 4096, 24576, 4096, 0 }, model_tensors, TENSOR_COUNT };

static const spk_model_config model_config = { .arch = SPK_ARCH_QWEN3MOE, .layer_count = 1, .vocab_size = 8,
                                               .hidden_size = 256, .expert_count = 2, .rope_base = 1e6f };
static const spk_provenance model_provenance = {
    .source_name = "tiny model.gguf", .source_bytes = UINT64_C(0x123456789ab), .source_digest = { { 1, 2, 3, 0xff } },
    .source_version = 3, .source_alignment_bytes = 64, .recipe_name = "test", .imatrix_name = "",
    .weights_name = "better model.gguf", .weights_bytes = UINT64_C(0xfedcba9876543), .weights_digest = { { 9, 8, 0xab } },
    .recipe_text = "recipe test\nabout \xe2\x9c\x93\nrule .* Q5_K -> Q4_K\n", .tool_version = "spk-pack 9.9.9"
};

static inline spk_pack_writer_options options_of(const char *path, const model *m) {
    spk_pack_writer_options o = { .path = path, .replace = true, .config = &model_config, .kv_bytes = kv_bytes,
                                  .kv_bytes_size = sizeof kv_bytes - 1, .kv_count = KV_COUNT,
                                  .tensor_count = m->tensor_count };
    memcpy(o.section_bytes, m->section_bytes, sizeof o.section_bytes);
    return o;
}

static inline uint64_t below(uint64_t *seed, uint64_t limit) { return check_random(seed) % limit; }

static inline uint8_t *random_bytes(uint64_t size_bytes, uint64_t seed) {
    uint8_t *bytes = malloc(size_bytes);
    for (uint64_t i = 0; i < size_bytes; i++) bytes[i] = (uint8_t)(check_random(&seed) >> 32);
    return bytes;
}

/* Writes the model with data in pieces of piece_bytes; returns the data, which the caller frees. */
static inline uint8_t *write_model(const char *path, const model *m, uint64_t piece_bytes) {
    uint64_t total = 0;
    for (int p = 0; p < SPK_PLACE_COUNT; p++) total += m->section_bytes[p];
    uint8_t *data = random_bytes(total, 7);
    spk_error error = { 0 };
    spk_pack_writer *writer = NULL;
    spk_pack_writer_options options = options_of(path, m);
    CHECK_OK(spk_pack_writer_begin(&options, &writer, &error), error);
    for (uint64_t at = 0; at < total; at += piece_bytes) {
        uint64_t left = total - at;
        CHECK_OK(spk_pack_writer_append(writer, data + at, left < piece_bytes ? left : piece_bytes, &error), error);
    }
    CHECK_OK(spk_pack_writer_commit(writer, m->tensors, &model_provenance, &error), error);
    return data;
}

/* ---- Files in memory ---- */

typedef struct {
    uint8_t *bytes;
    uint64_t size_bytes;
} image;

static inline image read_image(const char *path) {
    image result = { 0 };
    FILE *file = fopen(path, "rb");
    struct stat info;
    CHECK(file != NULL && fstat(fileno(file), &info) == 0, "%s", path);
    if (file == NULL) return result;
    result.size_bytes = (uint64_t)info.st_size;
    result.bytes = calloc(1, result.size_bytes + 2 * SPK_BLOCK_ALIGN);     /* room for attacks */
    CHECK(fread(result.bytes, 1, result.size_bytes, file) == result.size_bytes, "%s", path);
    (void)fclose(file);
    return result;
}

static inline void write_image(const char *path, const uint8_t *bytes, uint64_t size_bytes) {
    FILE *file = fopen(path, "wb");
    CHECK(file != NULL && fwrite(bytes, 1, size_bytes, file) == size_bytes, "%s", path);
    if (file != NULL) (void)fclose(file);
}

static inline image model_image(void) {
    free(write_model(pack_path, &small_model, 1000));
    return read_image(pack_path);
}

static inline spk_disk_header *header_of(image *i) { return (spk_disk_header *)(void *)i->bytes; }

static inline spk_disk_section *section_of(image *i, uint32_t id) {
    spk_disk_header *h = header_of(i);
    for (int s = 0; s < SPK_SECTION_COUNT_MAX; s++)
        if (h->sections[s].id == id) return &h->sections[s];
    return NULL;
}

static inline spk_disk_tensor *tensor_of(image *i, uint64_t index) {
    return (spk_disk_tensor *)(void *)(i->bytes + section_of(i, SPK_SECTION_TENSORS)->offset_bytes) + index;
}

/* Makes all metadata digests right again; those of data are left. */
static inline void seal(image *i) {
    spk_disk_header *h = header_of(i);
    for (uint32_t s = 0; s < SPK_SECTION_COUNT_MAX && s < h->section_count; s++) {
        spk_disk_section *e = &h->sections[s];
        bool in_file = e->offset_bytes <= i->size_bytes && e->stored_bytes <= i->size_bytes - e->offset_bytes;
        if (e->id > SPK_PLACE_COUNT && in_file) e->digest = spk_digest_of(i->bytes + e->offset_bytes, e->stored_bytes);
    }
    if (h->section_count <= SPK_SECTION_COUNT_MAX) h->root = spk_header_root(h);
    h->checksum = spk_header_checksum(h);
}

/* At the end an optional section of a kind that no reader of today knows. */
static inline void add_unknown_section(image *i) {
    spk_disk_header *h = header_of(i);
    h->sections[h->section_count++] = (spk_disk_section){ .id = 1000, .flags = 1, .offset_bytes = i->size_bytes,
                                                          .stored_bytes = 10, .raw_bytes = 5, .item_count = 9 };
    memcpy(i->bytes + i->size_bytes, "0123456789", 10);
    i->size_bytes += 4096;
    h->file_bytes = i->size_bytes;
    seal(i);
}

static inline spk_status open_status(const char *path, spk_error *error) {
    spk_pack *pack = NULL;
    *error = (spk_error){ 0 };
    spk_status status = spk_pack_open(path, &pack, error);
    if (status == SPK_OK) spk_pack_close(pack);
    return status;
}

static inline spk_status check_status(const char *path, spk_error *error) {
    spk_pack *pack = NULL;
    *error = (spk_error){ 0 };
    spk_status status = spk_pack_open(path, &pack, error);
    if (status != SPK_OK) return status;
    status = spk_pack_verify(pack, 1, NULL, NULL, error);
    spk_pack_close(pack);
    return status;
}

/* Call first and last in main(). */
static inline bool open_folder(void) {
    (void)snprintf(pack_path, sizeof pack_path, "%s/a.spk", mkdtemp(folder) != NULL ? folder : "/nonexistent");
    (void)snprintf(other_path, sizeof other_path, "%s/b.spk", folder);
    return pack_path[1] == 't';
}

static inline void close_folder(void) {
    (void)unlink(pack_path);
    (void)unlink(other_path);
    CHECK(rmdir(folder) == 0, "no temporary file is left in %s", folder);
}

#endif
