/* kernels/ops_avx2.c - norms, gates and activation quantization.
 *
 * Elements are F32; the factor of a norm is computed in double and rounded once.
 */
#include "kernels/kernels_internal.h"
#include "kernels/vector_avx2.h"

#include <math.h>

void spk_avx2_rms_norm(const float *x, const float *w, uint64_t n, float eps, float *y) {
    const __m256 factor = _mm256_set1_ps((float)(1 / sqrt(avx2_sum_squares(x, n) / (double)n + (double)eps)));
    for (uint64_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_mul_ps(avx2_load(x + i, n - i), factor);
        avx2_store(y + i, n - i, _mm256_mul_ps(v, avx2_load(w + i, n - i)));
    }
}

void spk_avx2_l2_norm(float *x, uint64_t n, float eps, float scale) {
    const __m256 factor = _mm256_set1_ps((float)((double)scale / fmax(sqrt(avx2_sum_squares(x, n)), (double)eps)));
    for (uint64_t i = 0; i < n; i += 8) avx2_store(x + i, n - i, _mm256_mul_ps(avx2_load(x + i, n - i), factor));
}

void spk_avx2_swiglu(const float *gate, const float *up, uint64_t n, float *out) {
    for (uint64_t i = 0; i < n; i += 8)
        avx2_store(out + i, n - i, _mm256_mul_ps(avx2_silu(avx2_load(gate + i, n - i)), avx2_load(up + i, n - i)));
}

void spk_avx2_sigmoid_gate(float *out, const float *gate, uint64_t n) {
    for (uint64_t i = 0; i < n; i += 8)
        avx2_store(out + i, n - i, _mm256_mul_ps(avx2_load(out + i, n - i), avx2_sigmoid(avx2_load(gate + i, n - i))));
}

void spk_avx2_add_scaled(float *out, const float *x, float scale, uint64_t n) {
    const __m256 s = _mm256_set1_ps(scale);
    for (uint64_t i = 0; i < n; i += 8)
        avx2_store(out + i, n - i, _mm256_fmadd_ps(s, avx2_load(x + i, n - i), avx2_load(out + i, n - i)));
}

void spk_avx2_qk_norm_rope(float *x, const float *w, uint32_t head_dim, uint32_t rope_dim, const float *cos_sin,
                           float eps) {
    spk_avx2_rms_norm(x, w, head_dim, eps, x);
    const uint32_t pairs = rope_dim / 2;
    for (uint32_t i = 0; i < pairs; i++) {
        float a = x[i], b = x[i + pairs], cosine = cos_sin[2 * i], sine = cos_sin[2 * i + 1];
        x[i] = a * cosine - b * sine;
        x[i + pairs] = a * sine + b * cosine;
    }
}

/* Group g of a super-block, from 32 floats to side `side` of its pair. */
static void quantize_group(const float *x, spk_activation_pair *pair, int side, int g) {
    const __m256 sign = _mm256_set1_ps(-0.0f), limit = _mm256_set1_ps(127.0f);
    __m256 v[4], largest = _mm256_setzero_ps();
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v[i]));
    }
    const float scale = avx2_max8(largest) / 127.0f;
    /* A scale that is 0 (max|x| below 2^-142 or so) must give zeros; one that is subnormal is coarse: limit codes. */
    const __m256 divisor = _mm256_set1_ps(scale == 0.0f ? 1.0f : scale);
    __m256i q[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_min_ps(_mm256_max_ps(_mm256_div_ps(v[i], divisor), _mm256_xor_ps(limit, sign)), limit);
        q[i] = _mm256_cvtps_epi32(v[i]);             /* round half to even, the default mode */
    }
    __m256i codes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    codes = _mm256_permutevar8x32_epi32(codes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm_store_si128((void *)pair->q8[2 * g][side], _mm256_castsi256_si128(codes));
    _mm_store_si128((void *)pair->q8[2 * g + 1][side], _mm256_extracti128_si256(codes, 1));

    /* Sums of 16: each quarter of codes + 128 is a sum of eight absolute differences to 0. */
    __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    int first = (int)(_mm256_extract_epi64(sums, 0) + _mm256_extract_epi64(sums, 1)) - 16 * 128;
    int second = (int)(_mm256_extract_epi64(sums, 2) + _mm256_extract_epi64(sums, 3)) - 16 * 128;
    pair->sum16[g / 4][side][2 * g % 8] = (int16_t)first;
    pair->sum16[g / 4][side][2 * g % 8 + 1] = (int16_t)second;
    pair->sum32[g / 4][side][g % 4] = scale * (float)(first + second);
    pair->offset[g / 4][side][g % 4] = -32.0f * scale;
    _mm_store_ps(pair->scale4[g][side], _mm_set1_ps(scale));
}

void spk_avx2_quantize(spk_activation *x) {
    if (x->pairs == NULL) return;
    const uint64_t superblock_count = x->col_count / SPK_SUPERBLOCK;
    const bool is_even = superblock_count % 2 == 0;
    for (uint64_t k = 0; k < superblock_count; k++) {
        const float *from = x->f32 + k * SPK_SUPERBLOCK;
        spk_activation_pair *pair = x->pairs + (is_even ? k / 2 : k);
        for (int g = 0; g < 8; g++) {
            if (is_even) {
                quantize_group(from + 32 * g, pair, (int)(k % 2), g);
            } else {
                quantize_group(from + 32 * g, pair, 0, g);
                quantize_group(from + 32 * g, pair, 1, g);
            }
        }
    }
}
