/* tests/attention_cache.h - what attention's caches hold, by position: the layout of kernels/attention_cache_cuda.cuh, written
 * down a second time on purpose.  Of the arguments, kv_head_count, head_dim, context_tokens and kv_type are used. */
#ifndef SPK_ATTENTION_CACHE_H
#define SPK_ATTENTION_CACHE_H

#include <math.h>
#include "formats/blocks.h"
#include "kernels/cuda.h"

/* Bytes of one KV head's part of a cache. */
static inline uint64_t attention_head_bytes(const spk_cuda_attention *a) {
    uint64_t values = ((uint64_t)a->context_tokens + 31) / 32 * 32 * a->head_dim;
    return a->kv_type == SPK_CUDA_KV_Q8 ? values + values / 16 : 2 * values;
}
static inline uint32_t attention_code_bytes(const spk_cuda_attention *a) { return a->kv_type == SPK_CUDA_KV_Q8 ? 1 : 2; }

/* Where the code of a dimension lies, and for Q8 its scale, an F16. */
typedef struct { uint64_t code, scale; } attention_place;
static inline attention_place attention_find(const spk_cuda_attention *a, bool is_v, uint32_t position, uint32_t kv_head, uint32_t dim) {
    uint32_t code_bytes = attention_code_bytes(a), positions = is_v ? 32 : 16, dims = is_v ? 32 : a->head_dim < 128 ? a->head_dim : 128;
    uint32_t row_bytes = dims * code_bytes, chunks = row_bytes / 16, rows_of_line = row_bytes < 128 ? 128 / row_bytes : 1;
    uint32_t codes = positions * row_bytes, block = codes + (code_bytes == 1 ? positions * dims / 32 * 2 : 0);
    uint32_t row = position % positions, in_block = dim % dims, chunk = in_block * code_bytes / 16;
    uint64_t base = kv_head * attention_head_bytes(a) + ((uint64_t)(position / positions) * (a->head_dim / dims) + dim / dims) * block;
    chunk ^= row / rows_of_line % (chunks < 8 ? chunks : 8);
    return (attention_place){ base + row * row_bytes + chunk * 16 + in_block * code_bytes % 16, base + codes + (in_block / 32 * positions + row) * 2 };
}

static inline uint16_t attention_half(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline void attention_put_half(uint8_t *p, uint16_t half) { p[0] = (uint8_t)half, p[1] = (uint8_t)(half >> 8); }

static inline float attention_value(const spk_cuda_attention *a, const void *cache, bool is_v, uint32_t position, uint32_t kv_head, uint32_t dim) {
    attention_place at = attention_find(a, is_v, position, kv_head, dim);
    const uint8_t *bytes = cache;
    if (a->kv_type == SPK_CUDA_KV_F16) return spk_f16_to_f32(attention_half(bytes + at.code));
    return spk_f16_to_f32(spk_f32_to_f16((float)(bytes[at.code] - 128) * spk_f16_to_f32(attention_half(bytes + at.scale))));
}

/* The Q8 scale of 32 values. */
static inline float attention_scale(const float *x, uint16_t *half) {
    float top = 0;
    for (int i = 0; i < 32; i++) top = fmaxf(top, fabsf(x[i]));
    *half = spk_f32_to_f16(top / 127.0f);
    if (spk_f16_to_f32(*half) < top / 127.0f) (*half)++;
    return spk_f16_to_f32(*half);
}

/* A KV head's row x[head_dim]. */
static inline void attention_put(const spk_cuda_attention *a, void *cache, bool is_v, uint32_t position, uint32_t kv_head, const float *x) {
    uint8_t *bytes = cache;
    for (uint32_t d = 0; d < a->head_dim; d++) {
        attention_place at = attention_find(a, is_v, position, kv_head, d);
        if (a->kv_type == SPK_CUDA_KV_F16) {
            attention_put_half(bytes + at.code, spk_f32_to_f16(x[d]));
            continue;
        }
        uint16_t half;
        float scale = attention_scale(x + d / 32 * 32, &half);
        long code = scale > 0 ? lrintf(x[d] / scale) : 0;
        bytes[at.code] = (uint8_t)(128 + (code > 127 ? 127 : code < -127 ? -127 : code));
        attention_put_half(bytes + at.scale, half);
    }
}

/* The row's bytes in `to` become those of `from`. */
static inline void attention_copy_row(const spk_cuda_attention *a, void *to, const void *from, bool is_v, uint32_t position, uint32_t kv_head) {
    uint8_t *out = to;
    const uint8_t *in = from;
    for (uint32_t d = 0; d < a->head_dim; d++) {
        attention_place at = attention_find(a, is_v, position, kv_head, d);
        for (uint32_t i = 0; i < attention_code_bytes(a); i++) out[at.code + i] = in[at.code + i];
        for (uint32_t i = 0; i < 2 && a->kv_type == SPK_CUDA_KV_Q8; i++) out[at.scale + i] = in[at.scale + i];
    }
}

#endif
