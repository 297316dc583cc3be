/* kernels/matmul_rows_avx2.c - y = W x in F32, W in ROWS: float types as they are, quantized ones dequantized first.
 *
 * Quantized matrices of ROWS are those whose width T32 does not take, and types that no recipe should leave in the
 * weights of a decode step: they are read correctly, and slowly.  Activations are never int8 here.
 */
#include "kernels/kernels_internal.h"
#include "kernels/vector_avx2.h"

#include "formats/dequant.h"

enum {
    TOKENS           = 4,       /* share one load of the weights */
    SUMS             = 2,       /* partial sums of 8 for each token */
    PIECE_WEIGHTS    = 2048,    /* dequantized at a time; a multiple of every block */
    TOKEN_BLOCK      = 16,      /* tokens that share one dequantization */
    BYTES_AHEAD      = 4096
};

/* Weights [col, col + 8) of a row, zeros where fewer are left. */
typedef __m256 load_fn(const uint8_t *row, uint64_t col, uint64_t left);

AVX2_INLINE __m256 load_f32(const uint8_t *row, uint64_t col, uint64_t left) {
    return avx2_load((const float *)(const void *)row + col, left);
}

AVX2_INLINE __m256 load_f16(const uint8_t *row, uint64_t col, uint64_t left) {
    return avx2_load_f16((const uint16_t *)(const void *)row + col, left);
}

AVX2_INLINE __m256 load_bf16(const uint8_t *row, uint64_t col, uint64_t left) {
    uint16_t halves[8] = { 0 };
    memcpy(halves, row + 2 * col, left >= 8 ? sizeof halves : left * sizeof *halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)halves)), 16));
}

/* sum[t] += w[0 .. count) . x[t].f32[col ..] for token_count (constant) tokens. */
AVX2_INLINE void dot_tokens(const uint8_t *w, uint32_t weight_bytes, uint64_t count, const spk_activation *x,
                            uint64_t col, float *sum, const int token_count, load_fn *load) {
    __m256 s[TOKENS][SUMS];
    for (int t = 0; t < token_count; t++)
        for (int j = 0; j < SUMS; j++) s[t][j] = _mm256_setzero_ps();
    uint64_t i = 0;
    for (; i + 8 * SUMS <= count; i += 8 * SUMS) {
        _mm_prefetch((const void *)(w + i * weight_bytes + BYTES_AHEAD), _MM_HINT_T1);
        for (uint64_t j = 0; j < SUMS; j++) {
            __m256 weights = load(w, i + 8 * j, 8);
            for (int t = 0; t < token_count; t++)
                s[t][j] = _mm256_fmadd_ps(weights, _mm256_loadu_ps(x[t].f32 + col + i + 8 * j), s[t][j]);
        }
    }
    for (; i < count; i += 8) {
        __m256 weights = load(w, i, count - i);
        for (int t = 0; t < token_count; t++)
            s[t][0] = _mm256_fmadd_ps(weights, avx2_load(x[t].f32 + col + i, count - i), s[t][0]);
    }
    for (int t = 0; t < token_count; t++) sum[t] += avx2_sum8(_mm256_add_ps(s[t][0], s[t][1]));
}

AVX2_INLINE void dot_all(const uint8_t *w, uint32_t weight_bytes, uint64_t count, const spk_activation *x, uint64_t col,
                         float *sum, uint32_t token_count, load_fn *load) {
    uint32_t t = 0;
    for (; t + TOKENS <= token_count; t += TOKENS)
        dot_tokens(w, weight_bytes, count, x + t, col, sum + t, TOKENS, load);
    for (; t < token_count; t++) dot_tokens(w, weight_bytes, count, x + t, col, sum + t, 1, load);
}

AVX2_INLINE void matmul_float(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                              uint64_t row_begin, uint64_t row_end, uint32_t weight_bytes, load_fn *load) {
    for (uint64_t row = row_begin; row < row_end; row++) {
        const uint8_t *from = w->data + row * w->unit_stride_bytes;
        for (uint32_t t0 = 0; t0 < token_count; t0 += TOKEN_BLOCK) {
            uint32_t tokens = token_count - t0 < TOKEN_BLOCK ? token_count - t0 : TOKEN_BLOCK;
            float sum[TOKEN_BLOCK] = { 0 };
            dot_all(from, weight_bytes, w->col_count, x + t0, 0, sum, tokens, load);
            for (uint32_t t = 0; t < tokens; t++) y[t0 + t][row] = sum[t];
        }
    }
}

void spk_avx2_matmul_f32(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                         uint64_t unit_begin, uint64_t unit_end) {
    matmul_float(w, x, y, token_count, unit_begin, unit_end, 4, load_f32);
}

void spk_avx2_matmul_f16(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                         uint64_t unit_begin, uint64_t unit_end) {
    matmul_float(w, x, y, token_count, unit_begin, unit_end, 2, load_f16);
}

void spk_avx2_matmul_bf16(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                          uint64_t unit_begin, uint64_t unit_end) {
    matmul_float(w, x, y, token_count, unit_begin, unit_end, 2, load_bf16);
}

void spk_avx2_matmul_dequantized(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                                 uint64_t unit_begin, uint64_t unit_end) {
    const spk_type_info *type = spk_type_find(w->type);
    float weights[PIECE_WEIGHTS];
    for (uint64_t row = unit_begin; row < unit_end; row++) {
        for (uint32_t t0 = 0; t0 < token_count; t0 += TOKEN_BLOCK) {
            uint32_t tokens = token_count - t0 < TOKEN_BLOCK ? token_count - t0 : TOKEN_BLOCK;
            float sum[TOKEN_BLOCK] = { 0 };
            const uint8_t *blocks = w->data + row * w->unit_stride_bytes;
            for (uint64_t col = 0; col < w->col_count; col += PIECE_WEIGHTS) {
                uint64_t left = w->col_count - col, count = left < PIECE_WEIGHTS ? left : PIECE_WEIGHTS;
                spk_dequantize(w->type, blocks, count, weights);
                dot_all((const uint8_t *)weights, 4, count, x + t0, col, sum, tokens, load_f32);
                blocks += count / type->block_weights * type->block_bytes;
            }
            for (uint32_t t = 0; t < tokens; t++) y[t0 + t][row] = sum[t];
        }
    }
}
