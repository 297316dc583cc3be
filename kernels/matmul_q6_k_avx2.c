/* kernels/matmul_q6_k_avx2.c - y = W x, W in T32 tiles of Q6_K, x in int8.
 *
 * With codes c in 0..63 (weight c - 32) and a scale s for each 16, per group of 32:
 *   y += d * scale * ( sum_h s_h sum(c q) - 32 sum_h s_h sum(q) ),  both sums exact in int32.
 */
#include "kernels/t32_avx2.h"

/* Group g's two scales, spread as the dot function wants them, from int16 scales 0..7 and 8..15 of both lanes. */
typedef void spread_fn(const __m256i scales[2], int g, __m256i out[2]);
/* Products of a group, times their scales: four int32 a lane. */
typedef __m256i dot_fn(__m256i codes0, __m256i codes1, __m256i q0, __m256i q1, const __m256i spread[2]);

AVX2_INLINE __m256i spread_one(const __m256i scales[2], int index) {
    int byte = index % 8 * 2;
    return _mm256_shuffle_epi8(scales[index / 8], _mm256_set1_epi16((short)((byte + 1) << 8 | byte)));
}

AVX2_INLINE void spread_avx2(const __m256i scales[2], int g, __m256i out[2]) {
    out[0] = spread_one(scales, 2 * g);
    out[1] = spread_one(scales, 2 * g + 1);
}

/* maddubs: a pair is at most 2 * 63 * 127 = 16002; times |s| <= 128, four of them: far below 2^31. */
AVX2_INLINE __m256i dot_avx2(__m256i codes0, __m256i codes1, __m256i q0, __m256i q1, const __m256i spread[2]) {
    return _mm256_add_epi32(_mm256_madd_epi16(_mm256_maddubs_epi16(codes0, q0), spread[0]),
                            _mm256_madd_epi16(_mm256_maddubs_epi16(codes1, q1), spread[1]));
}

/* One vector: in each lane four times the first scale, then four times the second. */
VNNI_INLINE void spread_vnni(const __m256i scales[2], int g, __m256i out[2]) {
    int byte = g % 4 * 4;
    short first = (short)((byte + 1) << 8 | byte), second = (short)((byte + 3) << 8 | (byte + 2));
    __m128i order = _mm_setr_epi16(first, first, first, first, second, second, second, second);
    out[0] = out[1] = _mm256_shuffle_epi8(scales[g / 4], _mm256_broadcastsi128_si256(order));
}

/* Four products are at most 4 * 63 * 127 = 32004, so they fit in int16. */
VNNI_INLINE __m256i dot_vnni(__m256i codes0, __m256i codes1, __m256i q0, __m256i q1, const __m256i spread[2]) {
    __m256i sums0 = _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes0, q0);
    __m256i sums1 = _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes1, q1);
    return _mm256_madd_epi16(_mm256_packs_epi32(sums0, sums1), spread[0]);
}

/* d of both lanes, four times each. */
AVX2_INLINE __m256 factors(const uint8_t *tile, uint32_t pair) {
    int32_t both;
    memcpy(&both, tile + 13 * T32_PLANE_BYTES + 4 * pair, sizeof both);
    __m128i spread = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    return _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_set1_epi32(both), spread));
}

AVX2_INLINE void pair_q6_k(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                           __m256 acc[], t32_codes_fn *codes_of, spread_fn *spread_of, dot_fn *dot) {
    const uint8_t *lanes = tile + 32 * pair;
    __m256i packed = t32_plane(lanes, 0);
    const __m256i scales[2] = { _mm256_srai_epi16(_mm256_unpacklo_epi8(packed, packed), 8),
                                _mm256_srai_epi16(_mm256_unpackhi_epi8(packed, packed), 8) };
    __m256 sum[T32_TOKENS];
    for (int t = 0; t < token_count; t++) {
        __m256i low = _mm256_madd_epi16(scales[0], t32_load(x[t]->sum16[0]));
        __m256i high = _mm256_madd_epi16(scales[1], t32_load(x[t]->sum16[1]));
        sum[t] = _mm256_mul_ps(_mm256_cvtepi32_ps(low), _mm256_load_ps(x[t]->offset[0][0]));
        sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), _mm256_load_ps(x[t]->offset[1][0]), sum[t]);
    }
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        /* Low bits from ql chunks 4 half + 2 (s % 2) and the next, nibble s / 2; bits 2s of two qh chunks. */
        const int half = g / 4, s = g % 4, ql = 1 + 4 * half + 2 * (s % 2), qh = 9 + 2 * half;
        __m256i c0 = codes_of(t32_plane(lanes, ql), s / 2, t32_plane(lanes, qh), 2 * s, 2);
        __m256i c1 = codes_of(t32_plane(lanes, ql + 1), s / 2, t32_plane(lanes, qh + 1), 2 * s, 2);
        __m256i spread[2];
        spread_of(scales, g, spread);
        for (int t = 0; t < token_count; t++) {
            __m256i d = dot(c0, c1, t32_load(x[t]->q8[2 * g]), t32_load(x[t]->q8[2 * g + 1]), spread);
            sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d), _mm256_load_ps(x[t]->scale4[g][0]), sum[t]);
        }
    }
    __m256 d = factors(tile, pair);
    for (int t = 0; t < token_count; t++) acc[t] = _mm256_fmadd_ps(sum[t], d, acc[t]);
}

AVX2_INLINE void pair_avx2(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                           __m256 acc[]) {
    pair_q6_k(tile, pair, x, token_count, acc, t32_codes_avx2, spread_avx2, dot_avx2);
}

VNNI_INLINE void pair_vnni(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                           __m256 acc[]) {
    pair_q6_k(tile, pair, x, token_count, acc, t32_codes_vnni, spread_vnni, dot_vnni);
}

void spk_avx2_matmul_q6_k(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                          uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q6_K_BYTES, pair_avx2);
}

VNNI_TARGET void spk_vnni_matmul_q6_k(const spk_matrix *w, const spk_activation *x, float *const *y,
                                      uint32_t token_count, uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q6_K_BYTES, pair_vnni);
}
