/* requant/quant_tile_lanes.c - rows to tiles, and codes to bytes; compiled once for each kind of vector, see quant.h.
 *
 * A row's sub-blocks lie one after the other, a tile's side by side: squares of four by four weights are turned, two at a time
 * where a register holds eight.
 */
#include "requant/quant_vectors_internal.h"
#include "requant/quant_blocks_internal.h"

enum { SQUARE = 4 };

#ifdef SPK_LANES_AVX2
enum { SQUARES = 2 };                   /* lanes j.. and j + 4.. */
typedef __m256  part;
typedef int32_t part_bits __attribute__((vector_size(32)));
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

/* 0 for what is too small. */
LANES_INLINE part without_tiny(part p) {
    return (part)((part_bits)p & (((part_bits)p & 0x7fffffff) >= SPK_QUANT_TINY_BITS));
}

/* Four rows of SQUARES times four lanes. */
LANES_INLINE void turn_rows(const float *first, size_t lanes_apart, float out[][SPK_QUANT_LANES]) {
    part lane[SQUARE], pair[SQUARE];
    for (size_t k = 0; k < SQUARE; k++) lane[k] = without_tiny(load_part(first + k * lanes_apart, lanes_apart));
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

/* Sub-block s goes to lane s % 8, from row s / 8 * (its weights).  Importance is never tiny. */
LANES_INLINE void turn(const float values[SPK_SUPERBLOCK], uint32_t sub_block_weights, float lanes[SPK_QUANT_DEPTH][SPK_QUANT_LANES]) {
    for (uint32_t row = 0; row < SPK_QUANT_DEPTH; row += SQUARE) {
        uint32_t group = row / sub_block_weights, i = row % sub_block_weights;
        const float *first = values + group * SPK_QUANT_LANES * sub_block_weights + i;
        for (uint32_t lane = 0; lane < SPK_QUANT_LANES; lane += SQUARES * SQUARE)
            turn_rows(first + lane * sub_block_weights, sub_block_weights, (float (*)[SPK_QUANT_LANES])&lanes[row][lane]);
    }
}

/* The bits of the largest magnitude.  As numbers they are in the order of magnitudes, those that are not finite above all. */
LANES_INLINE uint32_t peak_bits(const float *weights, uint32_t count) {
    uint32_t peak = 0;
    for (uint32_t c = 0; c < count; c++) {
        uint32_t bits;
        memcpy(&bits, &weights[c], sizeof bits);
        bits &= 0x7fffffffu;
        peak = bits > peak ? bits : peak;
    }
    return peak;
}

LANES_INLINE bool all_within(const float *weights, uint64_t count, float low, float high) {
    uint32_t found = 0;
    for (uint64_t c = 0; c < count; c++) found |= !((weights[c] >= low) & (weights[c] <= high));
    return !found;
}

spk_quant_filled SPK_LANES_NAME(spk_quant_fill)(const float *weights, uint32_t count, const spk_quant_shape *shape, spk_quant_tile *tile) {
    alignas(32) float padded[SPK_SUPERBLOCK];
    const uint32_t bits = count == SPK_SUPERBLOCK ? peak_bits(weights, SPK_SUPERBLOCK) : peak_bits(weights, count);
    float peak;
    memcpy(&peak, &bits, sizeof peak);
    bool is_surely_within = peak <= -shape->low && peak <= shape->high;     /* not where the peak is a NaN */
    if (!is_surely_within && !all_within(weights, count, shape->low, shape->high)) return SPK_QUANT_BEYOND;
    if (count < SPK_SUPERBLOCK) {
        for (uint32_t c = 0; c < SPK_SUPERBLOCK; c++) padded[c] = c < count ? weights[c] : 0.0f;
        weights = padded;
    }
    if (shape->sub_block_weights == SPK_QUANT_DEPTH)
        turn(weights, SPK_QUANT_DEPTH, tile->x);
    else
        turn(weights, SPK_QUANT_DEPTH / 2, tile->x);
    return bits < SPK_QUANT_TINY_BITS ? SPK_QUANT_ALL_ZERO : SPK_QUANT_FILLED;
}

void SPK_LANES_NAME(spk_quant_fill_importance)(const float importance[SPK_SUPERBLOCK], const spk_quant_shape *shape, spk_quant_tile *tile) {
    turn(importance, shape->sub_block_weights, tile->w);
}

#ifdef SPK_LANES_AVX512
/* Eight rows: the four bytes of each one after the other. */
LANES_INLINE __m256i pairs_of_rows(const uint8_t code[][SPK_QUANT_LANES]) {
    __m512i rows = _mm512_loadu_si512(code);                            /* the pairs are in even bytes */
    return _mm512_cvtepi16_epi8(_mm512_or_si512(rows, _mm512_srli_epi16(rows, 4)));
}

/* Sixteen rows; within four of them, the bytes of a pair of sub-blocks side by side. */
LANES_INLINE __m512i pairs_turned(const uint8_t code[][SPK_QUANT_LANES]) {
    const __m512i turn = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm512_shuffle_epi8(_mm512_inserti64x4(_mm512_castsi256_si512(pairs_of_rows(code)), pairs_of_rows(code + 8), 1), turn);
}

void SPK_LANES_NAME(spk_quant_nibbles)(const uint8_t code[SPK_QUANT_DEPTH][SPK_QUANT_LANES], uint8_t out[SPK_SUPERBLOCK / 2]) {
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i low = pairs_turned(code), high = pairs_turned(code + 16);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi32(low, first, high));
    _mm512_storeu_si512(out + 64, _mm512_permutex2var_epi32(low, _mm512_add_epi32(first, _mm512_set1_epi32(2)), high));
}
#else
void SPK_LANES_NAME(spk_quant_nibbles)(const uint8_t code[SPK_QUANT_DEPTH][SPK_QUANT_LANES], uint8_t out[SPK_SUPERBLOCK / 2]) {
    for (size_t l = 0; l < SPK_QUANT_DEPTH; l++) spk_quant_pack_nibbles(spk_quant_eight_codes(code[l]), out, l);
}
#endif

bool SPK_LANES_NAME(spk_quant_within)(const float *weights, uint64_t count, float low, float high) {
    return all_within(weights, count, low, high);
}
