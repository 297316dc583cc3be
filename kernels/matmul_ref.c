/* kernels/matmul_ref.c - y = W x by definition: dequantize, multiply, add in double.
 *
 * Takes every type in every layout, so that a fast kernel always has something to be compared with.  It never looks
 * at quantized activations.  Weights pass through a buffer on the stack, a piece of a row at a time, and each piece
 * serves a block of tokens.
 *
 * A product of two floats is exact in double; the sum rounds at 2^-53 a step, so the result is the correctly rounded
 * float in all but rare cases.
 */
#include "kernels/kernels_internal.h"

#include <assert.h>
#include "formats/dequant.h"

enum {
    PIECE_WEIGHTS = SPK_T32_LANES * SPK_SUPERBLOCK,     /* the part of a row that one tile can hold */
    TOKEN_BLOCK   = 16,
    SUM_LANES     = 8
};

/* Weights [col, col + count) of a row; returns count.  Of a T32 matrix: what one tile holds, seen as a narrow matrix
 * of its own. */
static uint64_t dequantize_piece(const spk_matrix *w, const spk_t32_geometry *tiles, uint64_t row, uint64_t col,
                                 float *out) {
    if (w->layout == SPK_LAYOUT_T32) {
        uint64_t width = (uint64_t)tiles->lanes_per_row * SPK_SUPERBLOCK, rows = tiles->rows_per_group;
        uint64_t unit = row / rows * tiles->tiles_per_group + col / width;
        spk_matrix tile = *w;
        tile.data += unit * w->unit_stride_bytes;
        tile.row_count = rows;
        tile.col_count = width;
        spk_layout_dequantize_row(&tile, row % rows, out);
        return width;
    }
    const spk_type_info *type = spk_type_find(w->type);
    uint64_t left = w->col_count - col, count = left < PIECE_WEIGHTS ? left : PIECE_WEIGHTS;
    const uint8_t *blocks = w->data + row * w->unit_stride_bytes + col / type->block_weights * type->block_bytes;
    spk_dequantize(w->type, blocks, count, out);
    return count;
}

static double dot(const float *a, const float *b, uint64_t count) {
    double lane[SUM_LANES] = { 0 }, sum = 0;
    uint64_t i = 0;
    for (; i + SUM_LANES <= count; i += SUM_LANES)
        for (uint64_t j = 0; j < SUM_LANES; j++) lane[j] += (double)a[i + j] * (double)b[i + j];
    for (; i < count; i++) sum += (double)a[i] * (double)b[i];
    for (uint64_t j = 0; j < SUM_LANES; j++) sum += lane[j];
    return sum;
}

void spk_ref_matmul(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                    uint64_t unit_begin, uint64_t unit_end) {
    spk_t32_geometry tiles = { .rows_per_group = 1 };
    if (w->layout == SPK_LAYOUT_T32) tiles = spk_t32_geometry_of(w->type, w->row_count, w->col_count);
    uint64_t row_end = unit_end * tiles.rows_per_group;
    if (row_end > w->row_count) row_end = w->row_count;
    float weights[PIECE_WEIGHTS];

    for (uint64_t row = unit_begin * tiles.rows_per_group; row < row_end; row++) {
        for (uint32_t t0 = 0; t0 < token_count; t0 += TOKEN_BLOCK) {
            uint32_t tokens = token_count - t0 < TOKEN_BLOCK ? token_count - t0 : TOKEN_BLOCK;
            double sum[TOKEN_BLOCK] = { 0 };
            for (uint64_t col = 0; col < w->col_count;) {
                uint64_t count = dequantize_piece(w, &tiles, row, col, weights);
                for (uint32_t t = 0; t < tokens; t++) sum[t] += dot(weights, x[t0 + t].f32 + col, count);
                col += count;
            }
            for (uint32_t t = 0; t < tokens; t++) y[t0 + t][row] = (float)sum[t];
        }
    }
}
