/* requant/quant_internal.h - what the files of the quantizers share: tiles, fits, and the table of search builds.
 *
 * A tile is 256 weights turned so that eight sub-blocks lie in eight lanes.  Searches work on tiles and know nothing
 * of GGML's bytes; quant.c turns rows into tiles and fits into blocks.
 */
#ifndef SPK_QUANT_INTERNAL_H
#define SPK_QUANT_INTERNAL_H

#include <math.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "requant/quant.h"

enum {
    SPK_QUANT_LANES = 8,
    SPK_QUANT_DEPTH = 32,                  /* weights of a tile in one lane */
    SPK_QUANT_TILES_AVX512 = 2, SPK_QUANT_TILES_MAX = 2,   /* that a build searches side by side */
    SPK_QUANT_SCALE_MAX = 63,              /* 6-bit scales and mins of Q4_K and Q5_K */
    SPK_QUANT_Q6_SCALE_MAX = 127,
    SPK_QUANT_Q6_CODE_MIN = -32, SPK_QUANT_Q6_CODE_MAX = 31,
    SPK_QUANT_Q8_CODE_MAX = 127            /* -128 is never used: integer kernels may negate codes */
};
#define SPK_QUANT_F16_MAX 65504.0f
#define SPK_QUANT_BLOCK_BYTES_MAX (8 * sizeof(spk_block_q8_0))     /* of a tile */

/* For code that a GPU runs too (SPK_LANES_CUDA: a *_cuda.cu file is being compiled). */
#ifdef SPK_LANES_CUDA
#define SPK_QUANT_INLINE static __device__ __forceinline__
#else
#define SPK_QUANT_INLINE static inline
#endif

/* For Q4_K, Q5_K and Q8_0 lane j holds sub-block (block) j: x[i][j] is weight 32 j + i.  For Q6_K, whose sub-blocks
 * have 16 weights, rows 0..15 hold sub-blocks 0..7 and rows 16..31 sub-blocks 8..15: x[16 g + i][j] is weight
 * 128 g + 16 j + i.  All x finite and within the type's range, not all 0; w > 0 with a mean near 1. */
typedef struct {
    alignas(32) float x[SPK_QUANT_DEPTH][SPK_QUANT_LANES];
    alignas(32) float w[SPK_QUANT_DEPTH][SPK_QUANT_LANES];   /* all 1 unless weighted */
    bool weighted;
} spk_quant_tile;

/* What a type's tiles are made of. */
typedef struct {
    uint32_t sub_block_weights;            /* of a lane, in one group of the tile */
    float    low, high;                    /* what a block can decode to at most */
} spk_quant_shape;

/* See requant/quant_units_internal.h. */
typedef struct spk_quant_affine_units spk_quant_affine_units;
typedef struct spk_quant_symmetric_units spk_quant_symmetric_units;

/* Q4_K and Q5_K: weight = d * scale[j] * code - dmin * min[j]. */
typedef struct {
    uint16_t d, dmin;
    uint8_t  scale[SPK_QUANT_LANES], min[SPK_QUANT_LANES];
    uint8_t  code[SPK_QUANT_DEPTH][SPK_QUANT_LANES];
} spk_quant_affine_fit;

/* Q6_K: weight = d * scale[8 g + j] * code[16 g + i][j], codes -32..31. */
typedef struct {
    uint16_t d;
    int8_t   scale[2 * SPK_QUANT_LANES];
    int8_t   code[SPK_QUANT_DEPTH][SPK_QUANT_LANES];
} spk_quant_q6_fit;

/* Eight blocks of Q8_0: weight = d[j] * code. */
typedef struct {
    uint16_t d[SPK_QUANT_LANES];
    int8_t   code[SPK_QUANT_DEPTH][SPK_QUANT_LANES];
} spk_quant_q8_fit;

/* What filling a tile with weights has shown. */
typedef enum { SPK_QUANT_FILLED, SPK_QUANT_ALL_ZERO, SPK_QUANT_BEYOND } spk_quant_filled;

/* One build of the searches, each for tile_count tiles at once, of the same importance; the same tile twice is as good.
 * code_max: 15 for Q4_K, 31 for Q5_K. */
typedef struct {
    const char *name;
    uint32_t    tile_count;
    bool      (*usable)(void);
    void      (*affine)(const spk_quant_tile *const tiles[], uint32_t code_max, spk_quant_effort effort,
                         spk_quant_affine_fit *const out[]);
    void      (*q6)(const spk_quant_tile *const tiles[], spk_quant_effort effort, spk_quant_q6_fit *const out[]);
    void      (*q8)(const spk_quant_tile *const tiles[], spk_quant_effort effort, spk_quant_q8_fit *const out[]);
    void      (*error_add)(spk_quant_error *sums, const float *x, const float *y, uint64_t count);
    bool      (*within)(const float *weights, uint64_t count, float low, float high);   /* false of a NaN, too */
    /* Weights of a row to a tile, 0 past the last. */
    spk_quant_filled (*fill)(const float *weights, uint32_t count, const spk_quant_shape *shape, spk_quant_tile *tile);
    /* The codes of Q4_K: out[32 c + l] has those of sub-blocks 2 c and, on top, 2 c + 1. */
    void      (*nibbles)(const uint8_t code[SPK_QUANT_DEPTH][SPK_QUANT_LANES], uint8_t out[SPK_SUPERBLOCK / 2]);
    void      (*fill_importance)(const float importance[SPK_SUPERBLOCK], const spk_quant_shape *shape, spk_quant_tile *tile);
    /* False where the weights of some lane have no unit: then there is no exact fit. */
    bool      (*affine_units)(const spk_quant_tile *tile, int code_max, spk_quant_affine_units *out);
    bool      (*symmetric_units)(const spk_quant_tile *tile, uint32_t group_count, spk_quant_symmetric_units *out);
} spk_quant_build;

#define SPK_QUANT_DECLARE(build)                                                                                      \
    void spk_quant_affine_##build(const spk_quant_tile *const tiles[], uint32_t code_max, spk_quant_effort effort,   \
                                  spk_quant_affine_fit *const out[]);                                                \
    void spk_quant_q6_##build(const spk_quant_tile *const tiles[], spk_quant_effort effort, spk_quant_q6_fit *const out[]); \
    void spk_quant_q8_##build(const spk_quant_tile *const tiles[], spk_quant_effort effort, spk_quant_q8_fit *const out[]); \
    void spk_quant_error_add_##build(spk_quant_error *sums, const float *x, const float *y, uint64_t count);         \
    bool spk_quant_within_##build(const float *weights, uint64_t count, float low, float high);                      \
    spk_quant_filled spk_quant_fill_##build(const float *weights, uint32_t count, const spk_quant_shape *shape,      \
                                            spk_quant_tile *tile);                                                   \
    void spk_quant_nibbles_##build(const uint8_t code[SPK_QUANT_DEPTH][SPK_QUANT_LANES], uint8_t out[SPK_SUPERBLOCK / 2]); \
    void spk_quant_fill_importance_##build(const float importance[SPK_SUPERBLOCK], const spk_quant_shape *shape,     \
                                           spk_quant_tile *tile);                                                    \
    bool spk_quant_affine_units_##build(const spk_quant_tile *tile, int code_max, spk_quant_affine_units *out);      \
    bool spk_quant_symmetric_units_##build(const spk_quant_tile *tile, uint32_t group_count, spk_quant_symmetric_units *out)
SPK_QUANT_DECLARE(plain);
SPK_QUANT_DECLARE(avx2);
SPK_QUANT_DECLARE(avx512);

const spk_quant_shape *spk_quant_shape_of(uint32_t type);     /* of a type that spk_quantize can make */

/* A weight as a tile has it.  Below TINY (TINY_BITS), half of the smallest F16, no block holds a smaller weight, and 0 is nearer. */
#define SPK_QUANT_TINY      0x1p-26f
#define SPK_QUANT_TINY_BITS 0x32800000
SPK_QUANT_INLINE float spk_quant_clip(float x, float low, float high) {
    x = x < low ? low : x;
    x = x > high ? high : x;
    return fabsf(x) < SPK_QUANT_TINY ? 0.0f : x;
}

/* Importance as a tile has it.  Columns without importance still decide ties: a sub-block that the imatrix never saw is
 * then coded like any other. */
#define SPK_QUANT_IMPORTANCE_FLOOR 0x1p-20f
SPK_QUANT_INLINE float spk_quant_scaled_importance(float importance, double scale) {
    float w = (float)((double)importance * scale);
    return w > SPK_QUANT_IMPORTANCE_FLOOR ? w : SPK_QUANT_IMPORTANCE_FLOOR;
}

/* Refuses what spk_quantize refuses; *scale is what the job's importance is multiplied with to get a mean of 1. */
SPK_MUST_CHECK spk_status spk_quant_check(const spk_quant_job *job, double *scale, spk_error *err);

/* Tile `col / 256` of a row of the job, quantized anew if it lies on a grid of the type; else its blocks stay as they are. */
void spk_quant_make_exact(const spk_quant_job *job, uint64_t row, uint64_t col);

/* The plain build first; all builds give the same bytes. */
extern const spk_quant_build spk_quant_builds[];
extern const size_t          spk_quant_build_count;

/* spk_quantize with a chosen build. */
SPK_MUST_CHECK spk_status spk_quantize_with(const spk_quant_build *build, const spk_quant_job *job, spk_error *err);

/* ---- quant_exact.c: weights that were decoded from a block of the type ---- */

/* If the tile, whose units these are, lies on a grid of the type (weights that were decoded from such a block), fill the
 * fit with it and return true; the search is not needed then. */
bool spk_quant_affine_exact(const spk_quant_tile *tile, const spk_quant_affine_units *units, uint32_t code_max,
                            spk_quant_affine_fit *out);
bool spk_quant_q6_exact(const spk_quant_tile *tile, const spk_quant_symmetric_units *units, spk_quant_q6_fit *out);
bool spk_quant_q8_exact(const spk_quant_tile *tile, const spk_quant_symmetric_units *units, spk_quant_q8_fit *out);

#endif
