/* kernels/t32_avx2.h - the loop over T32 tiles that the AVX2 products share; included by matmul_*_avx2.c only.
 *
 * A type gives one function: the products of a *pair*, two neighbouring lanes of a tile, which are 32 contiguous bytes
 * in every plane.  Integer sums of 32 weights are exact; what is added in F32, and in which order, depends on
 * the row alone: not on the number of tokens, nor on where a range of units begins.
 */
#ifndef SPK_T32_AVX2_H
#define SPK_T32_AVX2_H

#include <immintrin.h>
#include "kernels/kernels_internal.h"
#include "kernels/vector_avx2.h"

/* Inner loops come twice: for AVX2, and with AVX-512's byte products and GFNI in vectors of the same width, which take
 * up to a quarter fewer instructions.  Only functions so marked may use the latter. */
#define VNNI_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,gfni")))
#define VNNI_INLINE VNNI_TARGET AVX2_INLINE

enum {
    T32_PAIRS       = SPK_T32_LANES / 2,
    T32_PLANE_BYTES = 16 * SPK_T32_LANES,
    T32_TOKENS      = 4,    /* most tokens that share one unpacking of the weights */
    T32_TILES_AHEAD = 2     /* to L2; see NOTES.md for what else was measured */
};

/* Adds the products of lanes 2 pair and 2 pair + 1 of a tile, with token t's activations x[t], to acc[t]: elements
 * 0..3 from the first lane, 4..7 from the second.  token_count is a constant once inlined. */
typedef void t32_pair_fn(const uint8_t *tile, uint32_t pair, const spk_activation_pair *const x[], int token_count,
                         __m256 acc[]);

AVX2_INLINE __m256i t32_plane(const uint8_t *lanes, int plane) {
    return _mm256_loadu_si256((const void *)(lanes + T32_PLANE_BYTES * plane));
}

AVX2_INLINE __m256i t32_load(const void *p) { return _mm256_load_si256(p); }     /* of a spk_activation_pair */

/* ---- Codes: a nibble (0 low, 1 high) of every byte, with bits [from, from + count) of `high` from bit 4 on ---- */

typedef __m256i t32_codes_fn(__m256i nibbles, int nibble, __m256i high, int from, int count);

AVX2_INLINE __m256i t32_codes_avx2(__m256i nibbles, int nibble, __m256i high, int from, int count) {
    if (nibble == 1) nibbles = _mm256_srli_epi16(nibbles, 4);
    nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
    if (count == 0) return nibbles;
    high = from < 4 ? _mm256_slli_epi16(high, 4 - from) : _mm256_srli_epi16(high, from - 4);
    return _mm256_or_si256(nibbles, _mm256_and_si256(high, _mm256_set1_epi8((char)(((1 << count) - 1) << 4))));
}

/* Bits [from, from + count) of every byte to bits [to, to + count), the others 0, in one instruction: a product with an
 * 8 x 8 matrix of bits, whose byte 7 - i selects what bit i of the result is the parity of. */
VNNI_INLINE __m256i t32_move_bits(__m256i bytes, int from, int to, int count) {
    uint64_t matrix = 0;
    for (int i = 0; i < count; i++) matrix |= (UINT64_C(1) << (from + i)) << 8 * (7 - (to + i));
    return _mm256_gf2p8affine_epi64_epi8(bytes, _mm256_set1_epi64x((long long)matrix), 0);
}

VNNI_INLINE __m256i t32_codes_vnni(__m256i nibbles, int nibble, __m256i high, int from, int count) {
    const __m256i low4 = _mm256_set1_epi8(15);
    if (nibble == 1) nibbles = t32_move_bits(nibbles, 4, 0, 4);
    if (count == 0) return nibble == 1 ? nibbles : _mm256_and_si256(nibbles, low4);
    high = t32_move_bits(high, from, 4, count);
    if (nibble == 1) return _mm256_or_si256(nibbles, high);
    return _mm256_ternarylogic_epi32(nibbles, low4, high, 0xea);                 /* nibbles & low4 | high */
}

/* ---- Tiles ---- */

/* A pair's share of fetching: a sixteenth of the tile that is T32_TILES_AHEAD to L2, and, since two pairs share cache
 * lines, every second time the next line of every plane to L1.  Past the end of a matrix this fetches what follows it
 * in memory, or nothing: prefetches do not fault. */
AVX2_INLINE void t32_prefetch(const uint8_t *tile, uint64_t stride_bytes, uint32_t pair, const int tile_bytes) {
    const int share_lines = (tile_bytes / 64 + T32_PAIRS - 1) / T32_PAIRS;
    const uint8_t *far = tile + T32_TILES_AHEAD * stride_bytes + pair * (uint32_t)share_lines * 64;
    for (int line = 0; line < share_lines; line++) _mm_prefetch((const void *)(far + 64 * line), _MM_HINT_T1);
    if (pair % 2 != 0) return;
    const uint8_t *near = pair + 2 < T32_PAIRS ? tile + 32 * (pair + 2) : tile + stride_bytes;
    for (int plane = 0; plane < tile_bytes / T32_PLANE_BYTES; plane++)
        _mm_prefetch((const void *)(near + T32_PLANE_BYTES * plane), _MM_HINT_T0);
}

/* y[t][row], y[t][row + 1] from the accumulators of one slot. */
AVX2_INLINE void t32_store(const __m256 sums[], uint32_t slot_rows, uint64_t row, uint64_t row_count, float *const *y,
                           const int token_count) {
    for (int t = 0; t < token_count; t++) {
        float low = avx2_sum4(_mm256_castps256_ps128(sums[t])), high = avx2_sum4(_mm256_extractf128_ps(sums[t], 1));
        y[t][row] = slot_rows == 1 ? low + high : low;
        if (slot_rows == 2 && row + 1 < row_count) y[t][row + 1] = high;
    }
}

/* One row group for token_count (constant) tokens. */
AVX2_INLINE void t32_group(const spk_matrix *w, const spk_t32_geometry *g, uint64_t group, const spk_activation *x,
                           float *const *y, const int token_count, bool fetches, const int tile_bytes,
                           t32_pair_fn *pair_fn) {
    /* A slot is what one accumulator serves: a row, or two rows where a row is a single lane. */
    const uint32_t slot_rows = g->lanes_per_row == 1 ? 2 : 1, slot_pairs = g->lanes_per_row * slot_rows / 2;
    const uint64_t row_begin = group * g->rows_per_group, rows_left = w->row_count - row_begin;
    const uint32_t row_count = rows_left < g->rows_per_group ? (uint32_t)rows_left : g->rows_per_group;
    const uint32_t slot_count = (row_count + slot_rows - 1) / slot_rows;
    const uint8_t *tile = w->data + group * g->tiles_per_group * w->unit_stride_bytes;
    __m256 sums[T32_PAIRS][T32_TOKENS];

    for (uint64_t i = 0; i < g->tiles_per_group; i++, tile += w->unit_stride_bytes) {
        uint32_t pair = 0;
        for (uint32_t slot = 0; slot < slot_count; slot++) {
            const spk_activation_pair *pairs[T32_TOKENS];
            __m256 acc[T32_TOKENS];
            for (int t = 0; t < token_count; t++) {
                pairs[t] = x[t].pairs + i * slot_pairs;
                acc[t] = i == 0 ? _mm256_setzero_ps() : sums[slot][t];
            }
            for (uint32_t j = 0; j < slot_pairs; j++, pair++) {
                if (fetches) t32_prefetch(tile, w->unit_stride_bytes, pair, tile_bytes);
                pair_fn(tile, pair, pairs, token_count, acc);
                for (int t = 0; t < token_count; t++) pairs[t]++;
            }
            for (int t = 0; t < token_count; t++) sums[slot][t] = acc[t];
        }
    }
    for (uint32_t slot = 0; slot < slot_count; slot++)
        t32_store(sums[slot], slot_rows, row_begin + slot * slot_rows, w->row_count, y, token_count);
}

AVX2_INLINE void t32_matmul(const spk_matrix *w, const spk_activation *x, float *const *y, uint32_t token_count,
                            uint64_t unit_begin, uint64_t unit_end, const int tile_bytes, t32_pair_fn *pair_fn) {
    const spk_t32_geometry g = spk_t32_geometry_of(w->type, w->row_count, w->col_count);
    for (uint64_t group = unit_begin; group < unit_end; group++) {
        uint32_t t = 0;
        for (; t + T32_TOKENS <= token_count; t += T32_TOKENS)
            t32_group(w, &g, group, x + t, y + t, T32_TOKENS, t == 0, tile_bytes, pair_fn);
        for (; t + 2 <= token_count; t += 2) t32_group(w, &g, group, x + t, y + t, 2, t == 0, tile_bytes, pair_fn);
        for (; t < token_count; t++) t32_group(w, &g, group, x + t, y + t, 1, t == 0, tile_bytes, pair_fn);
    }
}

#endif
