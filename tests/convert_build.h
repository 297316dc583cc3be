/* tests/convert_build.h - packing and unpacking by file names, for tests of both. */
#ifndef SPK_TEST_CONVERT_BUILD_H
#define SPK_TEST_CONVERT_BUILD_H

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    const char *recipe, *set, *imatrix_path;
    uint32_t    thread_count;
    bool        replace;
    uint64_t    fallback_count;     /* out */
    char        fallbacks[2][80];   /* out: the first two */
} pack_request;

/* SOURCE to OUT; err has the message. */
static inline spk_status pack(const char *source_path, const char *out_path, pack_request *request) {
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_imatrix *imatrix = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    spk_status status = spk_gguf_open(source_path, &source, &err);
    if (status == SPK_OK) status = spk_recipe_load(request->recipe, "", &recipe, &err);
    if (status == SPK_OK && request->set != NULL) status = spk_recipe_set(recipe, request->set, &err);
    if (status == SPK_OK && request->imatrix_path != NULL)
        status = spk_imatrix_open(request->imatrix_path, &imatrix, &err);
    spk_convert_options options = { .source = source, .out_path = out_path, .replace = request->replace,
                                    .recipe = recipe, .imatrix = imatrix, .imatrix_name = "imatrix",
                                    .thread_count = request->thread_count };
    if (status == SPK_OK) status = spk_convert_plan_make(&options, &plan, &err);
    if (status == SPK_OK) {
        request->fallback_count = plan.importance_fallback_count;
        for (uint64_t i = 0; i < plan.importance_fallback_count && i < 2; i++)
            (void)snprintf(request->fallbacks[i], 80, "%s", plan.importance_fallbacks[i]);
        status = spk_convert_run(&options, &plan, &err);
    }
    spk_convert_plan_free(&plan);
    spk_imatrix_close(imatrix);
    spk_recipe_free(recipe);
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

static inline gguf_build read_file(const char *path) {
    gguf_build b = { 0 };
    uint8_t chunk[65536];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        exit(1);
    }
    for (size_t got; (got = fread(chunk, 1, sizeof chunk, file)) > 0;) gb_raw(&b, chunk, got);
    (void)fclose(file);
    return b;
}

static inline bool same_bytes(const char *a, const char *b) {
    gguf_build x = read_file(a), y = read_file(b);
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

#endif
