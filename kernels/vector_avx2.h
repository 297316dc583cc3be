/* kernels/vector_avx2.h - small vector functions that the AVX2 files share.
 *
 * Vectors of any length: loads and stores take how many elements are left, so that a tail goes through the
 * same arithmetic as everything before it, and nothing past it is touched.
 */
#ifndef SPK_VECTOR_AVX2_H
#define SPK_VECTOR_AVX2_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define AVX2_INLINE static inline __attribute__((always_inline))

AVX2_INLINE __m256i avx2_mask(uint64_t left) {      /* left < 8 */
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* p[0 .. min(left, 8)), zeros behind. */
AVX2_INLINE __m256 avx2_load(const float *p, uint64_t left) {
    return left >= 8 ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, avx2_mask(left));
}

AVX2_INLINE void avx2_store(float *p, uint64_t left, __m256 v) {
    if (left >= 8)
        _mm256_storeu_ps(p, v);
    else
        _mm256_maskstore_ps(p, avx2_mask(left), v);
}

AVX2_INLINE __m256 avx2_load_f16(const uint16_t *p, uint64_t left) {
    if (left >= 8) return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p));
    uint16_t halves[8] = { 0 };
    memcpy(halves, p, left * sizeof *p);
    return _mm256_cvtph_ps(_mm_loadu_si128((const void *)halves));
}

/* (0 + 2) + (1 + 3). */
AVX2_INLINE float avx2_sum4(__m128 v) {
    __m128 two = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

AVX2_INLINE float avx2_sum8(__m256 v) {
    return avx2_sum4(_mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1)));
}

AVX2_INLINE float avx2_max8(__m256 v) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* exp(x) for x <= 0 (softmax, and sigmoids by symmetry); NaN gives a number.
 * x = n ln 2 + r with |r| <= 0.3466; Taylor to r^7, whose remainder r^8/8! is below 2^-27 of the result.  Rounding of r
 * costs 0.35 of 2^-24, the last steps of the polynomial 1.35: within 2 * 2^-24 where the result is normal, within
 * the least subnormal below.  (Measured over every third float: 1.32.) */
AVX2_INLINE __m256 avx2_exp_nonpositive(__m256 x) {
    x = _mm256_max_ps(x, _mm256_set1_ps(-104.0f));   /* exp(-104) rounds to 0 */
    __m256 n = _mm256_mul_ps(x, _mm256_set1_ps(0x1.715476p+0f));
    n = _mm256_round_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.62e4p-1f), x);       /* ln 2, 15 bits: the product is exact */
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0x1.7f7d1cp-20f), r);           /* and the rest of it */
    static const float inverse_factorial[] = { 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f };
    __m256 p = _mm256_set1_ps(1.0f / 5040);
    for (int i = 0; i < 7; i++) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(inverse_factorial[i]));
    /* times 2^n in two steps, since n may lie below the least exponent */
    __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), bias = _mm256_set1_epi32(127);
    __m256i first = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    __m256i second = _mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(whole, half), bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(first)), _mm256_castsi256_ps(second));
}

/* 1 / (1 + exp(-t)), from e = exp(-|t|), which cannot overflow: 1 or e over 1 + e.  Within 4 * 2^-24. */
AVX2_INLINE __m256 avx2_sigmoid(__m256 t) {
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 e = avx2_exp_nonpositive(_mm256_or_ps(t, _mm256_set1_ps(-0.0f)));
    __m256 above = _mm256_blendv_ps(one, e, t);      /* by the sign bit of t */
    return _mm256_div_ps(above, _mm256_add_ps(one, e));
}

AVX2_INLINE __m256 avx2_silu(__m256 t) { return _mm256_mul_ps(t, avx2_sigmoid(t)); }

/* sum x^2 in double: exact products, so neither large nor small elements are lost, for next to nothing. */
AVX2_INLINE double avx2_sum_squares(const float *x, uint64_t n) {
    __m256d sum[2] = { _mm256_setzero_pd(), _mm256_setzero_pd() };
    for (uint64_t i = 0; i < n; i += 8) {
        __m256 v = avx2_load(x + i, n - i);
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(v)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
        sum[0] = _mm256_fmadd_pd(low, low, sum[0]);
        sum[1] = _mm256_fmadd_pd(high, high, sum[1]);
    }
    double lane[4];
    _mm256_storeu_pd(lane, _mm256_add_pd(sum[0], sum[1]));
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
}

#endif
