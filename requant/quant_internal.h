/* requant/quant_internal.h - what the files of the quantizers share: tiles, fits, and the table of search builds.
 *
 * A tile is 256 weights turned so that eight sub-blocks lie in eight lanes.  Searches work on tiles and know nothing
 * of GGML's bytes; quant.c turns rows into tiles and fits into blocks.
 */
#ifndef SPK_QUANT_INTERNAL_H
#define SPK_QUANT_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "requant/quant.h"

enum {
    SPK_QUANT_LANES = 8,
    SPK_QUANT_DEPTH = 32,                  /* weights of a tile in one lane */
    SPK_QUANT_SCALE_MAX = 63,              /* 6-bit scales and mins of Q4_K and Q5_K */
    SPK_QUANT_Q6_SCALE_MAX = 127,
    SPK_QUANT_Q6_CODE_MIN = -32, SPK_QUANT_Q6_CODE_MAX = 31,
    SPK_QUANT_Q8_CODE_MAX = 127            /* -128 is never used: integer kernels may negate codes */
};
#define SPK_QUANT_F16_MAX 65504.0f

/* For Q4_K, Q5_K and Q8_0 lane j holds sub-block (block) j: x[i][j] is weight 32 j + i.  For Q6_K, whose sub-blocks
 * have 16 weights, rows 0..15 hold sub-blocks 0..7 and rows 16..31 sub-blocks 8..15: x[16 g + i][j] is weight
 * 128 g + 16 j + i.  All x finite and within the type's range, not all 0; w > 0 with a mean near 1. */
typedef struct {
    _Alignas(32) float x[SPK_QUANT_DEPTH][SPK_QUANT_LANES];
    _Alignas(32) float w[SPK_QUANT_DEPTH][SPK_QUANT_LANES];   /* all 1 unless weighted */
    bool weighted;
} spk_quant_tile;

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

/* One build of the searches.  code_max: 15 for Q4_K, 31 for Q5_K. */
typedef struct {
    const char *name;
    bool      (*usable)(void);
    void      (*affine)(const spk_quant_tile *tile, uint32_t code_max, spk_quant_effort effort,
                         spk_quant_affine_fit *out);
    void      (*q6)(const spk_quant_tile *tile, spk_quant_effort effort, spk_quant_q6_fit *out);
    void      (*q8)(const spk_quant_tile *tile, spk_quant_effort effort, spk_quant_q8_fit *out);
    void      (*error_add)(spk_quant_error *sums, const float *x, const float *y, uint64_t count);
} spk_quant_build;

#define SPK_QUANT_DECLARE(build)                                                                                      \
    void spk_quant_affine_##build(const spk_quant_tile *tile, uint32_t code_max, spk_quant_effort effort,            \
                                  spk_quant_affine_fit *out);                                                        \
    void spk_quant_q6_##build(const spk_quant_tile *tile, spk_quant_effort effort, spk_quant_q6_fit *out);           \
    void spk_quant_q8_##build(const spk_quant_tile *tile, spk_quant_effort effort, spk_quant_q8_fit *out);           \
    void spk_quant_error_add_##build(spk_quant_error *sums, const float *x, const float *y, uint64_t count)
SPK_QUANT_DECLARE(plain);
SPK_QUANT_DECLARE(avx2);
SPK_QUANT_DECLARE(avx512);

/* The plain build first; all builds give the same bytes. */
extern const spk_quant_build spk_quant_builds[];
extern const size_t          spk_quant_build_count;

/* spk_quantize with a chosen build. */
SPK_MUST_CHECK spk_status spk_quantize_with(const spk_quant_build *build, const spk_quant_job *job, spk_error *err);

/* If the tile lies on a grid of the type (weights that were decoded from such a block), fill the fit with it and
 * return true; the search is not needed then.  Quick to say no. */
bool spk_quant_affine_exact(const spk_quant_tile *tile, uint32_t code_max, spk_quant_affine_fit *out);
bool spk_quant_q6_exact(const spk_quant_tile *tile, spk_quant_q6_fit *out);
bool spk_quant_q8_exact(const spk_quant_tile *tile, spk_quant_q8_fit *out);

#endif
