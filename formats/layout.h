/* formats/layout.h - how the rows of a weight matrix lie in memory: ROWS and T32.
 *
 * ROWS  GGML's own order: row after row of blocks.  Float types, tables that are read by row, and shapes that
 *       T32 does not take.
 * T32   Tiles of 32 super-blocks, one for each lane of a GPU warp, cut into planes of 16-byte chunks so that
 *       every load of a warp is 512 contiguous bytes.  Q4_K Q5_K Q6_K Q8_0 with col_count a multiple of 256.
 *       The CPU kernels read the same tiles: two lanes are one 32-byte vector.
 *
 * T32 geometry.  k = col_count/256 super-blocks a row (eight Q8_0 blocks count as one).  Let p be the largest
 * power of two that divides k, at most 32.  A tile holds R = 32/p rows by p consecutive super-blocks; lane l
 * is row l/p, super-block l%p.  A *row group* of R rows is k/p tiles, left to right; groups follow one
 * another.  The last group is padded with all-zero super-blocks, which decode to zero.
 *
 * Planes of a tile (chunk c of lane l is at 512*c + 16*l; all offsets in bytes):
 *   Q4_K  4608   0: d, dmin, scales   1..8: qs
 *   Q5_K  5632   0: d, dmin, scales   1..2: qh   3..10: qs
 *   Q6_K  6720   0: scales            1..8: ql   9..12: qh    then d of lane l at 6656 + 2*l
 *   Q8_0  8704   0: eight d           1..16: the 256 qs
 * Nothing is recoded: T32 is a permutation of the GGML bytes, and its inverse gives them back bit for bit.
 */
#ifndef SPK_LAYOUT_H
#define SPK_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/blocks.h"
#include "formats/status.h"

/* Stored in packs: stable. */
typedef enum { SPK_LAYOUT_ROWS = 1, SPK_LAYOUT_T32 = 2 } spk_layout;
const char *spk_layout_name(uint32_t layout);            /* "ROWS", "T32"; "layout 9" if unknown */

enum {
    SPK_T32_LANES      = 32,
    SPK_T32_Q4_K_BYTES = 4608,
    SPK_T32_Q5_K_BYTES = 5632,
    SPK_T32_Q6_K_BYTES = 6720,
    SPK_T32_Q8_0_BYTES = 8704
};

/* A matrix in memory, as every kernel takes it; rows x cols, y = W x.  A *unit* is what a stride steps over:
 * a row in ROWS, a tile in T32.  Units of two matrices may be interleaved (gate and up): then the stride is
 * larger than the unit.  `data` is 64-byte aligned for T32 and 16-byte aligned for ROWS. */
typedef struct {
    const uint8_t *data;              /* first unit, borrowed */
    uint64_t       unit_stride_bytes;
    uint32_t       type;              /* spk_type */
    uint32_t       layout;            /* spk_layout */
    uint64_t       row_count, col_count;
} spk_matrix;

typedef struct {
    uint32_t lanes_per_row;           /* p */
    uint32_t rows_per_group;          /* R = 32/p */
    uint64_t tiles_per_group;         /* k/p */
    uint64_t group_count;             /* ceil(row_count / R) */
    uint64_t tile_count;              /* tiles_per_group * group_count */
    uint64_t tile_bytes;
} spk_t32_geometry;

/* True if T32 takes a matrix of this type and width. */
bool spk_t32_accepts(uint32_t type, uint64_t col_count);
/* Geometry of an accepted matrix (asserted); row_count >= 1. */
spk_t32_geometry spk_t32_geometry_of(uint32_t type, uint64_t row_count, uint64_t col_count);

/* Bytes of a unit, and the number of units, of a matrix in a layout. */
uint64_t spk_layout_unit_bytes(uint32_t layout, uint32_t type, uint64_t col_count);
uint64_t spk_layout_unit_count(uint32_t layout, uint32_t type, uint64_t row_count, uint64_t col_count);

/* Row groups [group_begin, group_end) of a T32 matrix from GGML rows.  `rows` is the first row of group_begin,
 * rows lie `row_bytes` apart (exactly the type's row size); only rows below row_count are read.
 * `tiles` is where the first tile of group_begin goes; tiles are written unit_stride_bytes apart, bytes between
 * them are left alone.  Groups are independent: split them over threads as you like. */
void spk_t32_pack(const spk_matrix *shape, uint64_t group_begin, uint64_t group_end, const uint8_t *rows,
                  uint8_t *tiles);
/* The inverse: GGML rows [row_begin, row_end) of a matrix of either layout to `rows`, packed. */
void spk_layout_get_rows(const spk_matrix *matrix, uint64_t row_begin, uint64_t row_end, uint8_t *rows);
/* One row, dequantized to out[col_count].  Either layout, any readable type. */
void spk_layout_dequantize_row(const spk_matrix *matrix, uint64_t row, float *out);

#endif
