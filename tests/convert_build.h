/* tests/convert_build.h - packing and unpacking by file names, and models made from others, for tests of both. */
#ifndef SPK_TEST_CONVERT_BUILD_H
#define SPK_TEST_CONVERT_BUILD_H

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/dequant.h"
#include "requant/convert.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

static const char TINY36[] = "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf";
static const char TINY36_BF16[] = "build/models/tiny-qwen36-bf16.gguf";
static const char IMATRIX[] = "tests/models/tiny-qwen36.imatrix.gguf";

static char dir[GB_PATH_MAX];       /* a new directory for each test */
static spk_error err;
static spk_unpack_result unpacked_as;

typedef struct {
    const char *recipe, *set, *imatrix_path, *weights_path;
    uint32_t    thread_count;
    bool        replace;
    uint64_t    fitted_count;       /* out: of requantized tensors, from weights_path */
    uint64_t    fallback_count;     /* out */
    char        fallbacks[2][80];   /* out: the first two */
} pack_request;

/* SOURCE to OUT; err has the message. */
static inline spk_status pack(const char *source_path, const char *out_path, pack_request *request) {
    spk_gguf *source = NULL, *weights = NULL;
    spk_recipe *recipe = NULL;
    spk_imatrix *imatrix = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    spk_status status = spk_gguf_open(source_path, &source, &err);
    if (status == SPK_OK && request->weights_path != NULL)
        status = spk_gguf_open(request->weights_path, &weights, &err);
    if (status == SPK_OK) status = spk_recipe_load(request->recipe, "", &recipe, &err);
    if (status == SPK_OK && request->set != NULL) status = spk_recipe_set(recipe, request->set, &err);
    if (status == SPK_OK && request->imatrix_path != NULL)
        status = spk_imatrix_open(request->imatrix_path, &imatrix, &err);
    spk_convert_options options = { .source = source, .weights = weights, .out_path = out_path, .replace = request->replace,
                                    .recipe = recipe, .imatrix = imatrix, .imatrix_name = "imatrix",
                                    .thread_count = request->thread_count };
    if (status == SPK_OK) status = spk_convert_plan_make(&options, &plan, &err);
    if (status == SPK_OK) {
        request->fitted_count = plan.fitted_count;
        request->fallback_count = plan.importance_fallback_count;
        for (uint64_t i = 0; i < plan.importance_fallback_count && i < 2; i++)
            (void)snprintf(request->fallbacks[i], 80, "%s", plan.importance_fallbacks[i]);
        status = spk_convert_run(&options, &plan, &err);
    }
    spk_convert_plan_free(&plan);
    spk_imatrix_close(imatrix);
    spk_recipe_free(recipe);
    spk_gguf_close(weights);
    spk_gguf_close(source);
    return status;
}

static inline spk_status unpack(const char *pack_path, const char *out_path) {
    spk_pack *p;
    spk_status status = spk_pack_open(pack_path, &p, &err);
    if (status != SPK_OK) return status;
    status = spk_unpack(p, out_path, false, NULL, NULL, &unpacked_as, &err);
    spk_pack_close(p);
    return status;
}

static inline bool same_bytes(const char *a, const char *b) {
    gguf_build x = gb_read(a), y = gb_read(b);
    bool is_same = x.size == y.size && memcmp(x.bytes, y.bytes, x.size) == 0;
    gb_free(&x);
    gb_free(&y);
    return is_same;
}

/* DIR/NAME, good until sixteen more were asked for. */
static inline const char *in_dir(const char *name) {
    static char paths[16][GB_PATH_MAX];
    static int next;
    return gb_path(paths[next++ % 16], dir, name);
}

/* A native pack of the source gives it back, byte for byte, and says so. */
static inline void expect_round_trip(const char *source_path) {
    const char *packed = in_dir("n.spk"), *back = in_dir("n.gguf");
    CHECK_OK(pack(source_path, packed, &(pack_request){ .recipe = "native" }), err);
    CHECK_OK(unpack(packed, back), err);
    CHECK(same_bytes(source_path, back), "%s comes back changed", source_path);
    CHECK(unpacked_as == SPK_UNPACK_IDENTICAL, "%s: not seen to be the source", source_path);
    (void)remove(packed);
    (void)remove(back);
}

/* ---- Sources made from another one ---- */

typedef struct {
    uint64_t    tensor_begin, tensor_end;
    const char *omitted_key;         /* left out of the metadata, or NULL */
    gguf_build  more_kvs;            /* appended to it */
    uint64_t    more_kv_count;
    uint64_t    vocab_size;          /* != 0: token_embd and output get so many rows, of random weights */
    const char *changed_name;        /* tensors whose name has this in it ... */
    const char *other_path;          /* ... are taken from that file; or, where it is NULL, ... */
    uint32_t    changed_type;        /* ... are written as F32, F16 or BF16 */
} edit;

static inline bool has_vocab(const spk_gguf_tensor *t) {
    return strcmp(t->name, "token_embd.weight") == 0 || strcmp(t->name, "output.weight") == 0;
}

static inline void append_as(spk_gguf_writer *writer, const spk_gguf_tensor *t, uint32_t type) {
    uint64_t count = t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
    float *weights = malloc(count * sizeof *weights);
    uint16_t *halves = malloc(count * sizeof *halves);
    spk_dequantize(t->type, t->data, count, weights);
    for (uint64_t i = 0; i < count && type != SPK_TYPE_F32; i++) {
        uint32_t bits;
        memcpy(&bits, &weights[i], sizeof bits);
        halves[i] = type == SPK_TYPE_F16 ? spk_f32_to_f16(weights[i]) : (uint16_t)(bits >> 16);
    }
    const void *bytes = type == SPK_TYPE_F32 ? (const void *)weights : halves;
    CHECK_OK(spk_gguf_writer_append(writer, bytes, count * (type == SPK_TYPE_F32 ? 4 : 2), &err), err);
    free(weights);
    free(halves);
}

/* A tensor's data, from the source or, with rows made up, random with small scales. */
static inline void append_tensor(spk_gguf_writer *writer, const spk_gguf_tensor *t, uint64_t vocab_size) {
    if (vocab_size == 0 || !has_vocab(t)) {
        CHECK_OK(spk_gguf_writer_append(writer, t->data, t->size_bytes, &err), err);
        return;
    }
    const spk_type_info *type = spk_type_find(t->type);
    uint64_t row_bytes = t->dims[0] / type->block_weights * type->block_bytes, seed = t->type;
    uint8_t *row = malloc(row_bytes);
    for (uint64_t r = 0; r < vocab_size; r++) {
        for (uint64_t i = 0; i < row_bytes; i++) row[i] = (uint8_t)check_random(&seed);
        for (uint64_t block = 0; block < row_bytes; block += type->block_bytes) {
            /* d ends a Q6_K block and begins a Q8_0 one. */
            uint64_t d = t->type == SPK_TYPE_Q6_K ? block + type->block_bytes - 2 : block;
            row[d] = (uint8_t)r;
            row[d + 1] = 0x10;
        }
        CHECK_OK(spk_gguf_writer_append(writer, row, row_bytes, &err), err);
    }
    free(row);
}

static inline void write_edited(const char *source_path, const char *out_path, const edit *e) {
    spk_gguf *source, *other = NULL;
    CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
    if (e->other_path != NULL) CHECK_OK(spk_gguf_open(e->other_path, &other, &err), err);
    gguf_build kvs = { 0 };
    uint64_t kv_count = e->more_kv_count, tensor_count = e->tensor_end - e->tensor_begin;
    for (uint64_t i = 0; i < spk_gguf_kvs(source)->count; i++) {
        const spk_kv *kv = &spk_gguf_kvs(source)->items[i];
        if (e->omitted_key != NULL && spk_text_equal(kv->key, e->omitted_key)) continue;
        gb_raw(&kvs, kv->entry, kv->entry_bytes);
        kv_count++;
    }
    if (e->more_kv_count > 0) gb_raw(&kvs, e->more_kvs.bytes, e->more_kvs.size);
    spk_gguf_tensor_spec *specs = calloc(tensor_count, sizeof *specs);
    const spk_gguf_tensor **tensors = calloc(tensor_count, sizeof *tensors);
    for (uint64_t i = 0; i < tensor_count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(source, e->tensor_begin + i);
        bool is_changed = e->changed_name != NULL && strstr(t->name, e->changed_name) != NULL;
        if (is_changed && other != NULL) t = spk_gguf_tensor_find(other, t->name);
        tensors[i] = t;
        memcpy(specs[i].name, t->name, sizeof specs[i].name);
        memcpy(specs[i].dims, t->dims, sizeof specs[i].dims);
        specs[i].type = is_changed && other == NULL ? e->changed_type : t->type;
        specs[i].dim_count = t->dim_count;
        if (e->vocab_size != 0 && has_vocab(t)) specs[i].dims[1] = e->vocab_size;
    }
    spk_gguf_writer_options options = { .path = out_path, .version = 3, .kv_bytes = kvs.bytes,
                                        .kv_bytes_size = kvs.size, .kv_count = kv_count,
                                        .alignment_bytes = spk_gguf_alignment_bytes(source), .tensors = specs,
                                        .tensor_count = tensor_count };
    spk_gguf_writer *writer;
    CHECK_OK(spk_gguf_writer_begin(&options, &writer, &err), err);
    for (uint64_t i = 0; i < tensor_count; i++)
        if (specs[i].type != tensors[i]->type) append_as(writer, tensors[i], specs[i].type);
        else append_tensor(writer, tensors[i], e->vocab_size);
    CHECK_OK(spk_gguf_writer_commit(writer, &err), err);
    gb_free(&kvs);
    free(specs);
    free(tensors);
    spk_gguf_close(other);
    spk_gguf_close(source);
}

/* The source and, behind its tensors, one more with data of zeros. */
static inline void write_with_tensor(const char *source_path, const char *out_path, const char *name, uint32_t type, uint64_t d0,
                                     uint64_t d1) {
    spk_gguf *source;
    CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
    gguf_build kvs = { 0 };
    uint64_t kv_count = spk_gguf_kvs(source)->count, count = spk_gguf_tensor_count(source), zeros_bytes = 0;
    for (uint64_t i = 0; i < kv_count; i++) gb_raw(&kvs, spk_gguf_kvs(source)->items[i].entry, spk_gguf_kvs(source)->items[i].entry_bytes);
    spk_gguf_tensor_spec *specs = calloc(count + 1, sizeof *specs);
    for (uint64_t i = 0; i < count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(source, i);
        specs[i] = (spk_gguf_tensor_spec){ .type = t->type, .dim_count = t->dim_count };
        memcpy(specs[i].name, t->name, sizeof specs[i].name);
        memcpy(specs[i].dims, t->dims, sizeof specs[i].dims);
    }
    specs[count] = (spk_gguf_tensor_spec){ .type = type, .dim_count = 2, .dims = { d0, d1, 1, 1 } };
    (void)snprintf(specs[count].name, sizeof specs[count].name, "%s", name);
    spk_gguf_writer_options options = { .path = out_path, .replace = true, .version = 3, .kv_bytes = kvs.bytes,
                                        .kv_bytes_size = kvs.size, .kv_count = kv_count,
                                        .alignment_bytes = spk_gguf_alignment_bytes(source), .tensors = specs,
                                        .tensor_count = count + 1 };
    spk_gguf_writer *writer;
    CHECK_OK(spk_gguf_writer_begin(&options, &writer, &err), err);
    for (uint64_t i = 0; i < count; i++) append_tensor(writer, spk_gguf_tensor_at(source, i), 0);
    CHECK_OK(spk_type_bytes(type, d0 * d1, &zeros_bytes, &err), err);
    void *zeros = calloc(1, zeros_bytes);
    CHECK_OK(spk_gguf_writer_append(writer, zeros, zeros_bytes, &err), err);
    CHECK_OK(spk_gguf_writer_commit(writer, &err), err);
    free(zeros);
    gb_free(&kvs);
    free(specs);
    spk_gguf_close(source);
}

static inline uint64_t tensor_count_of(const char *path) {
    spk_gguf *source;
    CHECK_OK(spk_gguf_open(path, &source, &err), err);
    uint64_t count = spk_gguf_tensor_count(source);
    spk_gguf_close(source);
    return count;
}

/* Packing is refused with that status and text, and leaves no file. */
static inline void expect_no_pack(const char *source_path, pack_request request, spk_status want, const char *in_message) {
    int before = gb_file_count(dir);
    const char *packed = in_dir("no.spk");
    CHECK(pack(source_path, packed, &request) == want, "expected %s: %s", spk_status_name(want), err.text);
    CHECK(strstr(err.text, in_message) != NULL, "'%s' is not in: %s", in_message, err.text);
    CHECK(gb_file_count(dir) == before, "a file was left");
}

#endif
