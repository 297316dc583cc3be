/* requant/quant_tile_lanes.c - rows to tiles; compiled once for each kind of vector, see quant.h.
 *
 * A row's sub-blocks lie one after the other, a tile's side by side: squares of four by four weights are turned, two at a time
 * where a register holds eight.
 */
#include "requant/quant_vectors_internal.h"

enum { SQUARE = 4 };

#ifdef SPK_LANES_AVX2
enum { SQUARES = 2 };                   /* lanes j.. and j + 4.. */
typedef __m256 part;
LANES_INLINE part load_part(const float *first, size_t lanes_apart) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(first)), _mm_loadu_ps(first + SQUARE * lanes_apart), 1);
}
#define low_pairs(a, b)  _mm256_unpacklo_ps(a, b)
#define high_pairs(a, b) _mm256_unpackhi_ps(a, b)
#define low_halves(a, b)  ((part)_mm256_unpacklo_pd((__m256d)(a), (__m256d)(b)))
#define high_halves(a, b) ((part)_mm256_unpackhi_pd((__m256d)(a), (__m256d)(b)))
#else
enum { SQUARES = 1 };
typedef float   part      __attribute__((vector_size(16)));
typedef int32_t part_bits __attribute__((vector_size(16)));
LANES_INLINE part load_part(const float *first, size_t lanes_apart) {
    part p;
    (void)lanes_apart;
    memcpy(&p, first, sizeof p);
    return p;
}
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (part_bits){ __VA_ARGS__ })
#endif
#define low_pairs(a, b)   SHUFFLE(a, b, 0, 4, 1, 5)
#define high_pairs(a, b)  SHUFFLE(a, b, 2, 6, 3, 7)
#define low_halves(a, b)  SHUFFLE(a, b, 0, 1, 4, 5)
#define high_halves(a, b) SHUFFLE(a, b, 2, 3, 6, 7)
#endif

/* Four rows of SQUARES times four lanes. */
LANES_INLINE void turn_rows(const float *first, size_t lanes_apart, float out[][SPK_QUANT_LANES]) {
    part lane[SQUARE], pair[SQUARE];
    for (size_t k = 0; k < SQUARE; k++) lane[k] = load_part(first + k * lanes_apart, lanes_apart);
    for (size_t k = 0; k < 2; k++) {
        pair[k] = low_pairs(lane[2 * k], lane[2 * k + 1]);
        pair[k + 2] = high_pairs(lane[2 * k], lane[2 * k + 1]);
    }
    for (size_t k = 0; k < SQUARE; k += 2) {
        part low = low_halves(pair[k], pair[k + 1]), high = high_halves(pair[k], pair[k + 1]);
        memcpy(out[k], &low, sizeof low);
        memcpy(out[k + 1], &high, sizeof high);
    }
}

/* Sub-block s goes to lane s % 8, from row s / 8 * (its weights). */
LANES_INLINE void turn(const float values[SPK_SUPERBLOCK], uint32_t sub_block_weights, float lanes[SPK_QUANT_DEPTH][SPK_QUANT_LANES]) {
    for (uint32_t row = 0; row < SPK_QUANT_DEPTH; row += SQUARE) {
        uint32_t group = row / sub_block_weights, i = row % sub_block_weights;
        const float *first = values + group * SPK_QUANT_LANES * sub_block_weights + i;
        for (uint32_t lane = 0; lane < SPK_QUANT_LANES; lane += SQUARES * SQUARE)
            turn_rows(first + lane * sub_block_weights, sub_block_weights, (float (*)[SPK_QUANT_LANES])&lanes[row][lane]);
    }
}

bool SPK_LANES_NAME(spk_quant_fill)(const float *weights, uint32_t count, const spk_quant_shape *shape, spk_quant_tile *tile) {
    alignas(32) float clipped[SPK_SUPERBLOCK];
    uint32_t bits[SPK_SUPERBLOCK], any = 0;
    float low = shape->low, high = shape->high;
    if (count == SPK_SUPERBLOCK) {
        for (uint32_t c = 0; c < SPK_SUPERBLOCK; c++) clipped[c] = spk_quant_clip(weights[c], low, high);
    } else {
        for (uint32_t c = 0; c < SPK_SUPERBLOCK; c++) clipped[c] = c < count ? spk_quant_clip(weights[c], low, high) : 0.0f;
    }
    memcpy(bits, clipped, sizeof bits);
    for (uint32_t c = 0; c < SPK_SUPERBLOCK; c++) any |= bits[c] << 1;    /* without the sign */
    if (shape->sub_block_weights == SPK_QUANT_DEPTH)
        turn(clipped, SPK_QUANT_DEPTH, tile->x);
    else
        turn(clipped, SPK_QUANT_DEPTH / 2, tile->x);
    return any != 0;
}

void SPK_LANES_NAME(spk_quant_fill_importance)(const float importance[SPK_SUPERBLOCK], const spk_quant_shape *shape, spk_quant_tile *tile) {
    turn(importance, shape->sub_block_weights, tile->w);
}

bool SPK_LANES_NAME(spk_quant_finite)(const float *weights, uint64_t count) {
    uint32_t found = 0;
    for (uint64_t c = 0; c < count; c++) {
        uint32_t bits;
        memcpy(&bits, &weights[c], sizeof bits);
        found |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return !found;
}
