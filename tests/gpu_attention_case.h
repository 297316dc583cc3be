/* tests/gpu_attention_case.h - one token's attention as a test makes it on the host, and its launch; of tests/gpu_attention.c. */
#ifndef SPK_GPU_ATTENTION_CASE_H
#define SPK_GPU_ATTENTION_CASE_H

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/attention_cache.h"
#include "tests/check.h"

enum { EXIT_SKIPPED = 77, DIM_MAX = 256, GUARD_FLOATS = 64, FAILURES_SHOWN = 6, BENCH_CALLS = 20, BENCH_REPEATS = 9 };

typedef struct {
    uint32_t heads, kv_heads, dim, rope, is_gated;
    spk_cuda_kv_type kv;
    uint32_t capacity, count;      /* positions with room; positions with the new one */
} shape;

static const shape shapes[] = {    /* ratios of query to KV heads 8, 8, 1, 2, 4, 12, 10, 3 */
    { .heads = 16, .kv_heads = 2, .dim = 256, .rope = 64, .is_gated = 1 }, { .heads = 32, .kv_heads = 4, .dim = 128, .rope = 128 },
    { .heads = 3, .kv_heads = 3, .dim = 64, .rope = 64, .is_gated = 1 },   { .heads = 4, .kv_heads = 2, .dim = 64, .rope = 20 },
    { .heads = 8, .kv_heads = 2, .dim = 256, .rope = 256 },                { .heads = 12, .kv_heads = 1, .dim = 128, .rope = 90, .is_gated = 1 },
    { .heads = 20, .kv_heads = 2, .dim = 256, .rope = 2 },                 { .heads = 3, .kv_heads = 1, .dim = 128, .rope = 32 },
};

typedef enum { P_RANDOM, P_EQUAL, P_ZERO_Q, P_ONE_HOT, P_TWO, P_RISING, P_FALLING, P_HUGE, P_LAST, P_COUNT } pattern;
static const char *const pattern_names[] = { "random", "equal scores", "zero q", "one-hot q", "two positions", "rising scores",
                                             "falling scores", "huge scores", "last dominates" };

static spk_cuda *cuda;
static uint64_t  random_state = 42;
static int       shown;
static char      case_text[200];

#define EXPECT(condition, ...)                                       \
    do {                                                             \
        if (!(condition)) {                                          \
            check_failures++;                                        \
            if (shown++ < FAILURES_SHOWN) {                          \
                fprintf(stderr, "  [%s] ", case_text);               \
                fprintf(stderr, __VA_ARGS__);                        \
                fputc('\n', stderr);                                 \
            }                                                        \
        }                                                            \
    } while (0)

static void must(spk_status status, const spk_error *err) {
    if (status == SPK_OK) return;
    fprintf(stderr, "gpu_attention: %s\n", err->text);
    exit(1);
}
static void *must_have(void *memory) {
    if (memory != NULL) return memory;
    fprintf(stderr, "gpu_attention: out of memory\n");
    exit(1);
}

/* The arguments that do not depend on memory. */
static spk_cuda_attention described(const shape *s) {
    return (spk_cuda_attention){ .head_count = s->heads, .kv_head_count = s->kv_heads, .head_dim = s->dim, .rope_dim = s->rope,
                                 .is_gated = s->is_gated, .context_tokens = s->capacity, .kv_type = s->kv, .eps = 1e-6f };
}

/* ---- A case on the host ---- */

typedef struct {
    shape    s;
    spk_cuda_attention a;          /* described(&s) */
    float   *q, *k, *v, *q_norm, *k_norm, *cos_sin, *out;
    uint8_t *k_cache, *v_cache;    /* before the token; after_ as downloaded */
    uint8_t *k_after, *v_after;
    uint64_t cache_bytes;
} host_case;

static float *floats(uint64_t count) { return must_have(calloc(count, sizeof(float))); }
static uint32_t q_stride(const shape *s) { return (s->is_gated ? 2 : 1) * s->dim; }

static void fill_past(host_case *c, pattern p) {
    const shape *s = &c->s;
    float k[DIM_MAX], v[DIM_MAX], same[DIM_MAX];
    uint32_t a = s->count > 2 ? (uint32_t)(check_random(&random_state) % (s->count - 1)) : 0, b = s->count > 2 ? (a + 1) % (s->count - 1) : 0;
    for (uint32_t d = 0; d < s->dim; d++) same[d] = check_uniform(&random_state);
    for (uint32_t j = 0; j + 1 < s->count; j++)
        for (uint32_t h = 0; h < s->kv_heads; h++) {
            float along = (float)j / (float)s->count;
            for (uint32_t d = 0; d < s->dim; d++) {
                float r = check_uniform(&random_state), size = p == P_HUGE ? 300.0f : 2.0f;
                k[d] = size * r;
                if (p == P_EQUAL) k[d] = same[d];
                if (p == P_ONE_HOT) k[d] = 25.0f * r;
                if (p == P_TWO) k[d] = j == a ? 1.0f : j == b ? 1.25f : -60.0f;
                if (p == P_RISING) k[d] = 400.0f * along + 0.01f * r;
                if (p == P_FALLING) k[d] = -400.0f * along + 0.01f * r;
                v[d] = p == P_TWO && (j == a || j == b) ? (j == a ? 1.0f : -1.0f) : check_uniform(&random_state);
            }
            attention_put(&c->a, c->k_cache, false, j, h, k);
            attention_put(&c->a, c->v_cache, true, j, h, v);
        }
}

static host_case case_new(const shape *s, pattern p) {
    host_case c = { .s = *s, .a = described(s) };
    c.cache_bytes = attention_head_bytes(&c.a) * s->kv_heads;
    bool is_one_hot = p == P_ONE_HOT || p == P_TWO || p == P_RISING || p == P_FALLING;
    c.q = floats((uint64_t)s->heads * q_stride(s)), c.k = floats((uint64_t)s->kv_heads * s->dim), c.v = floats((uint64_t)s->kv_heads * s->dim);
    c.q_norm = floats(s->dim), c.k_norm = floats(s->dim), c.cos_sin = floats(s->rope), c.out = floats((uint64_t)s->heads * s->dim + 2 * GUARD_FLOATS);
    c.k_cache = must_have(malloc(c.cache_bytes)), c.v_cache = must_have(malloc(c.cache_bytes));
    c.k_after = must_have(malloc(c.cache_bytes)), c.v_after = must_have(malloc(c.cache_bytes));
    memset(c.k_cache, 0xFF, c.cache_bytes);
    memset(c.v_cache, 0xFF, c.cache_bytes);
    for (uint32_t d = 0; d < s->dim; d++) {
        c.q_norm[d] = is_one_hot ? 1.0f + 0.3f * fabsf(check_uniform(&random_state)) : 1.0f + 0.5f * check_uniform(&random_state);
        c.k_norm[d] = (p == P_LAST ? 40.0f : p == P_TWO ? 0.01f : 1.0f) * (1.0f + 0.5f * check_uniform(&random_state));
    }
    for (uint32_t i = 0; i < s->rope / 2; i++) {
        double angle = is_one_hot ? 0 : 3.2 * (double)check_uniform(&random_state);
        c.cos_sin[2 * i] = (float)cos(angle), c.cos_sin[2 * i + 1] = (float)sin(angle);
    }
    for (uint32_t h = 0; h < s->heads; h++) {
        float *row = c.q + (uint64_t)h * q_stride(s);
        uint32_t hot = (uint32_t)(check_random(&random_state) % s->dim);
        for (uint32_t d = 0; d < s->dim; d++) row[d] = p == P_ZERO_Q ? 0 : is_one_hot ? (d == hot ? 3.0f : 0) : 2.0f * check_uniform(&random_state);
        for (uint32_t d = s->dim; d < q_stride(s); d++) row[d] = 5.0f * check_uniform(&random_state);
    }
    uint32_t ratio = s->heads / s->kv_heads;
    for (uint32_t i = 0; i < s->kv_heads * s->dim; i++) {
        c.k[i] = check_uniform(&random_state), c.v[i] = 3.0f * check_uniform(&random_state);
        if (p == P_LAST) c.k[i] = c.q[(uint64_t)(i / s->dim * ratio) * q_stride(s) + i % s->dim];
    }
    fill_past(&c, p);
    return c;
}

static void case_free(host_case *c) {
    free(c->q), free(c->k), free(c->v), free(c->q_norm), free(c->k_norm), free(c->cos_sin), free(c->out);
    free(c->k_cache), free(c->v_cache), free(c->k_after), free(c->v_after);
}

/* ---- On the device ---- */

static void *device(uint64_t size_bytes, const void *from) {
    spk_error err;
    void *memory = NULL;
    must(spk_cuda_allocate(cuda, size_bytes, "a buffer", &memory, &err), &err);
    if (from != NULL) must(spk_cuda_upload(cuda, memory, from, size_bytes, &err), &err);
    return memory;
}

/* Everything but the caches, on the device. */
static spk_cuda_attention arguments(const host_case *c, float **d_out) {
    const shape *s = &c->s;
    uint32_t position = s->count - 1;
    spk_cuda_attention a = described(s);
    *d_out = device(((uint64_t)s->heads * s->dim + 2 * GUARD_FLOATS) * 4, NULL);
    a.d_position = device(4, &position);
    a.q = device((uint64_t)s->heads * q_stride(s) * 4, c->q);
    a.k = device((uint64_t)s->kv_heads * s->dim * 4, c->k);
    a.v = device((uint64_t)s->kv_heads * s->dim * 4, c->v);
    a.q_norm = device(s->dim * 4, c->q_norm);
    a.k_norm = device(s->dim * 4, c->k_norm);
    a.cos_sin = device(s->rope * 4, c->cos_sin);
    a.partial = device(spk_cuda_attention_scratch_bytes(cuda, &a), NULL);
    a.out = *d_out + GUARD_FLOATS;
    return a;
}
static void arguments_free(const spk_cuda_attention *a, float *d_out) {
    const void *const all[] = { a->d_position, a->q, a->k, a->v, a->q_norm, a->k_norm, a->cos_sin, a->partial, d_out };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) spk_cuda_free(cuda, (void *)(uintptr_t)all[i]);
}

static spk_cuda_step *record(const spk_cuda_attention *calls, uint32_t count) {
    spk_error err;
    spk_cuda_step *step = NULL;
    must(spk_cuda_step_begin(cuda, &err), &err);
    for (uint32_t i = 0; i < count; i++) spk_cuda_launch_attention(cuda, &calls[i]);
    must(spk_cuda_step_end(cuda, &step, &err), &err);
    return step;
}

#endif
