/* kernels/matmul_q45_k_avx2.c - y = W x, W in T32 tiles of Q4_K or Q5_K, x in int8.
 *
 * Per group of 32, with codes c, 6-bit scale s and min m:
 *   y += d * scale * s * sum(c q)  -  dmin * m * scale * sum(q),  the sums exact in integers.
 * Q5_K is Q4_K with a fifth bit of each code in two more planes.
 */
#include "kernels/t32_avx2.h"

/* Products of a group, times its scale, byte `g` of each lane of factors: four int32 a lane. */
typedef __m256i dot_fn(__m256i codes0, __m256i codes1, __m256i q0, __m256i q1, __m256i scale);
typedef __m256i spread_fn(__m256i factors, int g);

AVX2_INLINE __m256i spread_avx2(__m256i factors, int g) {          /* as int16 */
    return _mm256_shuffle_epi8(factors, _mm256_set1_epi16((short)(0x8000 | g)));
}

/* Two halves of two products each: at most 4 * 31 * 127 = 15748 in int16. */
AVX2_INLINE __m256i dot_avx2(__m256i codes0, __m256i codes1, __m256i q0, __m256i q1, __m256i scale) {
    __m256i sums = _mm256_add_epi16(_mm256_maddubs_epi16(codes0, q0), _mm256_maddubs_epi16(codes1, q1));
    return _mm256_madd_epi16(sums, scale);
}

VNNI_INLINE __m256i spread_vnni(__m256i factors, int g) {          /* as int32 */
    return _mm256_shuffle_epi8(factors, _mm256_set1_epi32((int)(0x80808000u | (unsigned)g)));
}

/* Eight products are at most 8 * 31 * 127 = 31496: the low int16 of a sum is all of it, and the high one, its sign,
 * meets a 0 of the scale. */
VNNI_INLINE __m256i dot_vnni(__m256i codes0, __m256i codes1, __m256i q0, __m256i q1, __m256i scale) {
    __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes0, q0);
    return _mm256_madd_epi16(_mm256_dpbusd_epi32(sums, codes1, q1), scale);
}

/* Scales 0..7 in bytes 0..7, mins 0..7 in bytes 8..15 of each 128-bit half, from headers d, dmin, packed[12].  With
 * `packed` as words A B C, scales are A & 63, then C & 15 | A >> 6 << 4; mins are B & 63, then C >> 4 | B >> 6 << 4. */
AVX2_INLINE __m256i scales_and_mins(__m256i header) {
    __m256i low = _mm256_srlv_epi32(_mm256_shuffle_epi32(header, _MM_SHUFFLE(3, 2, 3, 1)),
                                    _mm256_setr_epi32(0, 0, 0, 4, 0, 0, 0, 4));
    __m256i high = _mm256_srli_epi32(_mm256_shuffle_epi32(header, _MM_SHUFFLE(2, 2, 1, 1)), 2);
    const __m256i low_mask = _mm256_set1_epi64x(0x0f0f0f0f3f3f3f3f);
    const __m256i high_mask = _mm256_set1_epi64x(0x3030303000000000);
    return _mm256_or_si256(_mm256_and_si256(low, low_mask), _mm256_and_si256(high, high_mask));
}

/* Unsigned bytes first .. first + 3 of each half, as floats. */
AVX2_INLINE __m256 bytes_to_floats(__m256i bytes, int first) {
    const __m128i zero_extend = _mm_add_epi32(_mm_setr_epi32(0, 1, 2, 3), _mm_set1_epi32((int)0x80808000u | first));
    return _mm256_cvtepi32_ps(_mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(zero_extend)));
}

/* The header's d of both lanes, four times each, and dmin likewise. */
AVX2_INLINE __m256 factors_of(__m256i header, __m256 *dmin) {
    const __m128i spread = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    __m256i both = _mm256_shuffle_epi8(header, _mm256_broadcastsi128_si256(spread));
    both = _mm256_permute4x64_epi64(both, _MM_SHUFFLE(3, 1, 2, 0));
    *dmin = _mm256_cvtph_ps(_mm256_extracti128_si256(both, 1));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(both));
}

AVX2_INLINE void pair_q45_k(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                            __m256 acc[], const bool has_high, t32_codes_fn *codes_of, spread_fn *spread_of,
                            dot_fn *dot) {
    const uint8_t *lanes = tile + 32 * pair;
    const int first_plane = has_high ? 3 : 1, high_count = has_high ? 1 : 0;
    __m256i header = t32_plane(lanes, 0), factors = scales_and_mins(header);
    __m256 sum[T32_TOKENS];
    for (int t = 0; t < token_count; t++) sum[t] = _mm256_setzero_ps();
#pragma GCC unroll 8
    for (int g = 0; g < 8; g++) {
        /* Nibble g % 2 of two chunks, and of Q5_K bit g of the two chunks of high bits. */
        const int plane = first_plane + g / 2 * 2;
        __m256i c0 = codes_of(t32_plane(lanes, plane), g % 2, t32_plane(lanes, 1), g, high_count);
        __m256i c1 = codes_of(t32_plane(lanes, plane + 1), g % 2, t32_plane(lanes, 2), g, high_count);
        __m256i scale = spread_of(factors, g);
        for (int t = 0; t < token_count; t++) {
            __m256i d = dot(c0, c1, t32_load(x[t]->q8[2 * g]), t32_load(x[t]->q8[2 * g + 1]), scale);
            sum[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d), _mm256_load_ps(x[t]->scale4[g][0]), sum[t]);
        }
    }
    __m256 dmin, d = factors_of(header, &dmin);
    __m256 min0 = bytes_to_floats(factors, 8), min1 = bytes_to_floats(factors, 12);
    for (int t = 0; t < token_count; t++) {
        __m256 mins = _mm256_mul_ps(min0, _mm256_load_ps(x[t]->sum32[0][0]));
        mins = _mm256_fmadd_ps(min1, _mm256_load_ps(x[t]->sum32[1][0]), mins);
        acc[t] = _mm256_fmadd_ps(sum[t], d, acc[t]);
        acc[t] = _mm256_fnmadd_ps(mins, dmin, acc[t]);
    }
}

AVX2_INLINE void pair_q4_k_avx2(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[],
                                int token_count, __m256 acc[]) {
    pair_q45_k(tile, pair, x, token_count, acc, false, t32_codes_avx2, spread_avx2, dot_avx2);
}

AVX2_INLINE void pair_q5_k_avx2(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[],
                                int token_count, __m256 acc[]) {
    pair_q45_k(tile, pair, x, token_count, acc, true, t32_codes_avx2, spread_avx2, dot_avx2);
}

VNNI_INLINE void pair_q4_k_vnni(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[],
                                int token_count, __m256 acc[]) {
    pair_q45_k(tile, pair, x, token_count, acc, false, t32_codes_vnni, spread_vnni, dot_vnni);
}

VNNI_INLINE void pair_q5_k_vnni(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[],
                                int token_count, __m256 acc[]) {
    pair_q45_k(tile, pair, x, token_count, acc, true, t32_codes_vnni, spread_vnni, dot_vnni);
}

void spk_avx2_matmul_q4_k(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                          uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q4_K_BYTES, pair_q4_k_avx2);
}

void spk_avx2_matmul_q5_k(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                          uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q5_K_BYTES, pair_q5_k_avx2);
}

VNNI_TARGET void spk_vnni_matmul_q4_k(const spk_matrix *w, const spk_activation *x, float *const *y,
                                      uint32_t token_count, uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q4_K_BYTES, pair_q4_k_vnni);
}

VNNI_TARGET void spk_vnni_matmul_q5_k(const spk_matrix *w, const spk_activation *x, float *const *y,
                                      uint32_t token_count, uint64_t unit_begin, uint64_t unit_end) {
    t32_matmul(w, x, y, token_count, unit_begin, unit_end, SPK_T32_Q5_K_BYTES, pair_q5_k_vnni);
}
