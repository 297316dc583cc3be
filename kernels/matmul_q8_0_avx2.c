/* kernels/matmul_q8_0_avx2.c - y = W x, W in T32 tiles of Q8_0, x in int8.
 *
 * Per group of 32:  y += (d * scale) * sum(w * q), the sum exact in int32.
 *
 * The byte products take one unsigned operand, so w's sign moves to the activation: |w| times q with w's sign.
 */
#include "kernels/t32_avx2.h"

/* Adds |w| * q of a chunk to four int32 a lane. */
typedef __m256i dot_fn(__m256i sum, __m256i magnitude, __m256i q);

/* |w| is at most 128 (as unsigned) and |q| at most 127: two products are at most 32512, so nothing saturates. */
AVX2_INLINE __m256i dot_avx2(__m256i sum, __m256i magnitude, __m256i q) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, q), _mm256_set1_epi16(1)));
}

VNNI_INLINE __m256i dot_vnni(__m256i sum, __m256i magnitude, __m256i q) {
    return _mm256_dpbusd_epi32(sum, magnitude, q);
}

AVX2_INLINE void pair_q8_0(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                           __m256 acc[], dot_fn *dot) {
    const uint8_t *lanes = tile + 32 * pair;
    /* d[h]: factors of groups 4h .. 4h + 3 of both lanes. */
    __m256i header = t32_plane(lanes, 0);
    __m256 first = _mm256_cvtph_ps(_mm256_castsi256_si128(header));
    __m256 second = _mm256_cvtph_ps(_mm256_extracti128_si256(header, 1));
    __m256 d[2] = { _mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31) };
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        __m256i w0 = t32_plane(lanes, 1 + 2 * g), w1 = t32_plane(lanes, 2 + 2 * g);
        __m256i magnitude0 = _mm256_abs_epi8(w0), magnitude1 = _mm256_abs_epi8(w1);
        __m256 dg = _mm256_permutevar_ps(d[g / 4], _mm256_set1_epi32(g % 4));
        for (int t = 0; t < token_count; t++) {
            __m256i sum = dot(_mm256_setzero_si256(), magnitude0, _mm256_sign_epi8(t32_load(x[t]->q8[2 * g]), w0));
            sum = dot(sum, magnitude1, _mm256_sign_epi8(t32_load(x[t]->q8[2 * g + 1]), w1));
            __m256 factor = _mm256_mul_ps(dg, _mm256_load_ps(x[t]->scale4[g][0]));
            acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), factor, acc[t]);
        }
    }
}

AVX2_INLINE void pair_avx2(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                           __m256 acc[]) {
    pair_q8_0(tile, pair, x, token_count, acc, dot_avx2);
}

VNNI_INLINE void pair_vnni(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                           __m256 acc[]) {
    pair_q8_0(tile, pair, x, token_count, acc, dot_vnni);
}

void spk_avx2_matmul_q8_0(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                          uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q8_0_BYTES, pair_avx2);
}

VNNI_TARGET void spk_vnni_matmul_q8_0(const spk_matrix *w, const spk_activation *x, float *const *y,
                                      uint32_t token_count, uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q8_0_BYTES, pair_vnni);
}
