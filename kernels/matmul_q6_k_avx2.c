/* kernels/matmul_q6_k_avx2.c - y = W x, W in T32 tiles of Q6_K, x in int8.
 *
 * With codes c in 0..63 (weight c - 32) and a scale s for each 16, per group of 32:
 *   y += d * scale * ( sum_h s_h sum(c q) - 32 sum_h s_h sum(q) ),  both sums exact in int32.
 */
#include "kernels/t32_avx2.h"

AVX2_INLINE __m256i chunk_q6_k(__m256i codes, const int8_t q8[2][16], __m256i s) {
    /* maddubs: a pair is at most 2 * 63 * 127 = 16002; times |s| <= 128, four of them: far below 2^31. */
    return _mm256_madd_epi16(_mm256_maddubs_epi16(codes, _mm256_load_si256((const void *)q8)), s);
}

/* Chunk c of both lanes' sixteen scales, as int16 in every element; scales[h] holds scales 8h .. 8h + 7. */
AVX2_INLINE __m256i broadcast_scale(const __m256i scales[2], int chunk) {
    int byte = chunk % 8 * 2;
    return _mm256_shuffle_epi8(scales[chunk / 8], _mm256_set1_epi16((short)((byte + 1) << 8 | byte)));
}

AVX2_INLINE void pair_q6_k(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                           __m256 acc[]) {
    const uint8_t *lanes = tile + 32 * pair;
    const __m256i low4 = _mm256_set1_epi8(15), bits45 = _mm256_set1_epi8(0x30);
    __m256i packed = t32_plane(lanes, 0);
    const __m256i scales[2] = { _mm256_srai_epi16(_mm256_unpacklo_epi8(packed, packed), 8),
                                _mm256_srai_epi16(_mm256_unpackhi_epi8(packed, packed), 8) };
    __m256 sum[T32_TOKENS];
    for (int t = 0; t < token_count; t++) {
        __m256i low = _mm256_madd_epi16(scales[0], _mm256_load_si256((const void *)x[t]->sum16[0]));
        __m256i high = _mm256_madd_epi16(scales[1], _mm256_load_si256((const void *)x[t]->sum16[1]));
        sum[t] = _mm256_mul_ps(_mm256_cvtepi32_ps(low), _mm256_load_ps(x[t]->offset[0][0]));
        sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(high), _mm256_load_ps(x[t]->offset[1][0]), sum[t]);
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i high[2] = { t32_plane(lanes, 9 + 2 * half), t32_plane(lanes, 10 + 2 * half) };
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            /* Group 4 half + s: low bits from ql chunks 4 half + 2 (s % 2) + i, nibble s / 2; high bits 2s of qh. */
            __m256i codes[2];
            for (int i = 0; i < 2; i++) {
                __m256i ql = t32_plane(lanes, 1 + 4 * half + 2 * (s % 2) + i);
                if (s >= 2) ql = _mm256_srli_epi16(ql, 4);
                __m256i qh = s < 2 ? _mm256_slli_epi16(high[i], 4 - 2 * s) : _mm256_srli_epi16(high[i], 2 * s - 4);
                codes[i] = _mm256_or_si256(_mm256_and_si256(ql, low4), _mm256_and_si256(qh, bits45));
            }
            int g = 4 * half + s;
            __m256i s0 = broadcast_scale(scales, 2 * g), s1 = broadcast_scale(scales, 2 * g + 1);
            for (int t = 0; t < token_count; t++) {
                __m256i dot = _mm256_add_epi32(chunk_q6_k(codes[0], x[t]->q8[2 * g], s0),
                                               chunk_q6_k(codes[1], x[t]->q8[2 * g + 1], s1));
                sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_load_ps(x[t]->scale4[g][0]), sum[t]);
            }
        }
    }
    int32_t d_bits;
    memcpy(&d_bits, tile + 13 * T32_PLANE_BYTES + 4 * pair, sizeof d_bits);
    __m128i spread = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    __m256 d = _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_set1_epi32(d_bits), spread));
    for (int t = 0; t < token_count; t++) acc[t] = _mm256_fmadd_ps(sum[t], d, acc[t]);
}

void spk_avx2_matmul_q6_k(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                          uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q6_K_BYTES, pair_q6_k);
}
