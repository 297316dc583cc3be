/* kernels/attend_avx2.c - one query head over an F16 cache.
 *
 * The cache is read twice, K for the scores and V for the sum; with many query heads to a KV head it comes from a near
 * cache after the first.  Sums over positions are made in blocks, so that their error grows with the number of
 * blocks and not of positions.
 */
#include "kernels/kernels_internal.h"
#include "kernels/vector_avx2.h"

#include <math.h>

enum {
    ROWS      = 4,      /* K rows that share a load of q */
    BLOCK     = 64,     /* positions; a block of V is 32 KiB at head_dim 256 */
    V_VECTORS = 8,      /* elements of V summed at a time, in vectors */
    K_AHEAD   = 8,      /* positions fetched ahead: rows of a head are too far apart for the CPU to guess */
    V_AHEAD   = 16
};

void spk_avx2_kv_store(const float *x, uint32_t head_dim, void *cache, uint64_t element_offset) {
    uint16_t *to = (uint16_t *)cache + element_offset;
    uint32_t i = 0;
    for (; i + 8 <= head_dim; i += 8)
        _mm_storeu_si128((void *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < head_dim; i++) to[i] = spk_f32_to_f16(x[i]);
}

/* scores[j] = scale * q.k[j] for j < count; returns the largest. */
static float score(const uint16_t *k, uint64_t stride, uint64_t count, const float *q, uint32_t dim, float scale,
                   float *scores) {
    float largest = -INFINITY;
    for (uint64_t j = 0; j < count; j += ROWS) {
        uint64_t rows = count - j < ROWS ? count - j : ROWS;
        const uint16_t *row[ROWS];
        __m256 sum[ROWS];
        for (uint64_t r = 0; r < ROWS; r++) {
            row[r] = k + (j + (r < rows ? r : 0)) * stride;     /* past the end: the first again, not stored */
            sum[r] = _mm256_setzero_ps();
        }
        for (uint32_t i = 0; i < dim; i += 8) {
            __m256 qi = avx2_load(q + i, dim - i);
            if (i % 32 == 0)
                for (int r = 0; r < ROWS; r++) _mm_prefetch((const void *)(row[r] + K_AHEAD * stride + i), _MM_HINT_T0);
            for (int r = 0; r < ROWS; r++) sum[r] = _mm256_fmadd_ps(avx2_load_f16(row[r] + i, dim - i), qi, sum[r]);
        }
        for (uint64_t r = 0; r < rows; r++) {
            scores[j + r] = avx2_sum8(sum[r]) * scale;
            if (scores[j + r] > largest) largest = scores[j + r];
        }
    }
    return largest;
}

/* p[j] = exp(p[j] - largest); returns the sum. */
static float exponentials(float *p, uint64_t count, float largest) {
    const __m256 shift = _mm256_set1_ps(largest);
    __m256 sum = _mm256_setzero_ps();
    for (uint64_t j = 0; j < count; j += 8) {
        uint64_t left = count - j;
        __m256 e = avx2_exp_nonpositive(_mm256_sub_ps(avx2_load(p + j, left), shift));
        avx2_store(p + j, left, e);
        sum = _mm256_add_ps(sum, left >= 8 ? e : _mm256_and_ps(e, _mm256_castsi256_ps(avx2_mask(left))));
    }
    return avx2_sum8(sum);
}

/* out[i] += sum_j p[j] v[j][i] for 8 vector_count elements (the last may be short: left of them in all). */
AVX2_INLINE void accumulate(const uint16_t *v, uint64_t stride, uint64_t count, const float *p, float *out,
                            uint64_t left, const int vector_count) {
    __m256 sum[V_VECTORS];
    for (int i = 0; i < vector_count; i++) sum[i] = _mm256_setzero_ps();
    for (uint64_t j = 0; j < count; j++) {
        __m256 pj = _mm256_broadcast_ss(p + j);
        for (int i = 0; i < vector_count; i += 4)
            _mm_prefetch((const void *)(v + (j + V_AHEAD) * stride + 8 * i), _MM_HINT_T0);
        for (int i = 0; i < vector_count; i++)
            sum[i] = _mm256_fmadd_ps(pj, avx2_load_f16(v + j * stride + 8 * i, left - 8 * (uint64_t)i), sum[i]);
    }
    for (int i = 0; i < vector_count; i++) {
        uint64_t here = left - 8 * (uint64_t)i;
        avx2_store(out + 8 * i, here, _mm256_add_ps(avx2_load(out + 8 * i, here), sum[i]));
    }
}

void spk_avx2_attend(const spk_attention_cache *cache, uint32_t head, uint64_t position, const float *q,
                     float *scores, float *out) {
    const uint32_t dim = cache->head_dim, kv_head = head / (cache->head_count / cache->kv_head_count);
    const uint64_t stride = (uint64_t)cache->kv_head_count * dim, count = position + 1;
    const uint16_t *k = (const uint16_t *)cache->k + (uint64_t)kv_head * dim;
    const uint16_t *v = (const uint16_t *)cache->v + (uint64_t)kv_head * dim;

    const float largest = score(k, stride, count, q, dim, 1.0f / sqrtf((float)dim), scores);
    float total = 0;
    memset(out, 0, dim * sizeof *out);
    for (uint64_t j = 0; j < count; j += BLOCK) {
        uint64_t block = count - j < BLOCK ? count - j : BLOCK;
        total += exponentials(scores + j, block, largest);
        uint32_t i = 0;
        for (; i + 8 * V_VECTORS <= dim; i += 8 * V_VECTORS)
            accumulate(v + j * stride + i, stride, block, scores + j, out + i, 8 * V_VECTORS, V_VECTORS);
        for (; i < dim; i += 8) accumulate(v + j * stride + i, stride, block, scores + j, out + i, dim - i, 1);
    }
    const __m256 factor = _mm256_set1_ps(1.0f / total);
    for (uint32_t i = 0; i < dim; i += 8)
        avx2_store(out + i, dim - i, _mm256_mul_ps(avx2_load(out + i, dim - i), factor));
}
