/* kernels/gdn_avx2.c - the recurrent layers: short convolution and delta rule.
 *
 * A head's state is v_dim rows of k_dim floats that never meet: a row is read twice while it is in L1, written once,
 * and gives one output element.  64 KiB a head in and out is what a token costs, whatever the arithmetic.
 */
#include "kernels/kernels_internal.h"
#include "kernels/vector_avx2.h"

enum { CHANNELS = 8, TAPS = 4, ROWS = 4 };

/* Eight channels with four taps.  state rows are state_stride apart. */
AVX2_INLINE void conv8(const float *u, const float *taps, float *state, uint64_t state_stride, float *y) {
    /* taps [channel][4] to one vector a tap: channels c and c + 4 share a vector, then 4 x 4 in each half. */
    __m256 row[4];
    for (int i = 0; i < 4; i++) {
        __m256 low = _mm256_castps128_ps256(_mm_loadu_ps(taps + TAPS * i));
        row[i] = _mm256_insertf128_ps(low, _mm_loadu_ps(taps + TAPS * (i + 4)), 1);
    }
    __m256 a = _mm256_unpacklo_ps(row[0], row[1]), b = _mm256_unpacklo_ps(row[2], row[3]);
    __m256 c = _mm256_unpackhi_ps(row[0], row[1]), d = _mm256_unpackhi_ps(row[2], row[3]);
    __m256 s0 = _mm256_loadu_ps(state), s1 = _mm256_loadu_ps(state + state_stride);
    __m256 s2 = _mm256_loadu_ps(state + 2 * state_stride), now = _mm256_loadu_ps(u);

    __m256 sum = _mm256_mul_ps(_mm256_shuffle_ps(a, b, 0x44), s0);
    sum = _mm256_fmadd_ps(_mm256_shuffle_ps(a, b, 0xee), s1, sum);
    sum = _mm256_fmadd_ps(_mm256_shuffle_ps(c, d, 0x44), s2, sum);
    sum = _mm256_fmadd_ps(_mm256_shuffle_ps(c, d, 0xee), now, sum);
    _mm256_storeu_ps(state, s1);
    _mm256_storeu_ps(state + state_stride, s2);
    _mm256_storeu_ps(state + 2 * state_stride, now);
    _mm256_storeu_ps(y, avx2_silu(sum));
}

void spk_avx2_gdn_conv(const float *u, const float *taps, float *state, uint64_t channel_count, uint32_t conv_kernel,
                       uint64_t channel_begin, uint64_t channel_end, float *y) {
    if (conv_kernel != TAPS) {
        spk_ref_gdn_conv(u, taps, state, channel_count, conv_kernel, channel_begin, channel_end, y);
        return;
    }
    uint64_t c = channel_begin;
    for (; c + CHANNELS <= channel_end; c += CHANNELS) conv8(u + c, taps + TAPS * c, state + c, channel_count, y + c);
    if (c == channel_end) return;
    /* A short rest goes through copies, so that where a range ends does not change a bit. */
    const uint64_t left = channel_end - c, left_bytes = left * sizeof(float);
    float u8[CHANNELS] = { 0 }, taps8[CHANNELS * TAPS] = { 0 }, state8[(TAPS - 1) * CHANNELS] = { 0 }, y8[CHANNELS];
    memcpy(u8, u + c, left_bytes);
    memcpy(taps8, taps + TAPS * c, TAPS * left_bytes);
    for (uint64_t t = 0; t < TAPS - 1; t++) memcpy(state8 + t * CHANNELS, state + t * channel_count + c, left_bytes);
    conv8(u8, taps8, state8, CHANNELS, y8);
    for (uint64_t t = 0; t < TAPS - 1; t++) memcpy(state + t * channel_count + c, state8 + t * CHANNELS, left_bytes);
    memcpy(y + c, y8, left_bytes);
}

void spk_avx2_gdn_head(const spk_gdn_shape *shape, float *state, const float *q, const float *k, const float *v,
                       float decay, float beta, const float *norm_w, const float *z, float *out) {
    const uint32_t k_dim = shape->k_dim, v_dim = shape->v_dim;
    if (k_dim % 8 != 0 || v_dim % ROWS != 0) {
        spk_ref_gdn_head(shape, state, q, k, v, decay, beta, norm_w, z, out);
        return;
    }
    const __m256 keep = _mm256_set1_ps(decay);
    for (uint32_t c = 0; c < v_dim; c += ROWS) {
        float *row[ROWS];
        __m256 sum[ROWS], delta[ROWS];
        for (uint32_t r = 0; r < ROWS; r++) {
            row[r] = state + (uint64_t)(c + r) * k_dim;
            sum[r] = _mm256_setzero_ps();
        }
        for (uint32_t i = 0; i < k_dim; i += 8) {
            __m256 ki = _mm256_loadu_ps(k + i);
            for (int r = 0; r < ROWS; r++) sum[r] = _mm256_fmadd_ps(_mm256_loadu_ps(row[r] + i), ki, sum[r]);
        }
        for (uint32_t r = 0; r < ROWS; r++) {
            delta[r] = _mm256_set1_ps(beta * (v[c + r] - decay * avx2_sum8(sum[r])));
            sum[r] = _mm256_setzero_ps();
        }
        for (uint32_t i = 0; i < k_dim; i += 8) {
            __m256 ki = _mm256_loadu_ps(k + i), qi = _mm256_loadu_ps(q + i);
            for (int r = 0; r < ROWS; r++) {
                __m256 s = _mm256_mul_ps(keep, _mm256_loadu_ps(row[r] + i));
                s = _mm256_fmadd_ps(delta[r], ki, s);
                _mm256_storeu_ps(row[r] + i, s);
                sum[r] = _mm256_fmadd_ps(s, qi, sum[r]);
            }
        }
        for (uint32_t r = 0; r < ROWS; r++) out[c + r] = avx2_sum8(sum[r]);
    }
    spk_avx2_rms_norm(out, norm_w, v_dim, shape->eps, out);
    for (uint32_t c = 0; c < v_dim; c += 8) {
        uint64_t left = v_dim - c;
        avx2_store(out + c, left, _mm256_mul_ps(avx2_load(out + c, left), avx2_silu(avx2_load(z + c, left))));
    }
}
