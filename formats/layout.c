/* formats/layout.c - see layout.h.
 *
 * The permutation is written down once for each type (lane_*), and compiled in both directions.
 * What a newcomer gets wrong: chunks of a lane follow the planes' order, not the block's.  Q6_K has its scales before
 * ql and its d behind everything; Q8_0 gathers the scales of eight blocks in one chunk.
 */
#include "formats/layout.h"

#include <assert.h>
#include <stdio.h>

#include "formats/dequant.h"

enum {
    CHUNK_BYTES     = 16,
    PLANE_BYTES     = CHUNK_BYTES * SPK_T32_LANES,
    SUPERBLOCK_MAX  = 272,          /* eight Q8_0 blocks */
    Q6_K_D_OFFSET   = 13 * PLANE_BYTES
};
SPK_STATIC_ASSERT(SPK_T32_Q4_K_BYTES == SPK_T32_LANES * sizeof(spk_block_q4_k), "T32 adds nothing");
SPK_STATIC_ASSERT(SPK_T32_Q5_K_BYTES == SPK_T32_LANES * sizeof(spk_block_q5_k), "T32 adds nothing");
SPK_STATIC_ASSERT(SPK_T32_Q6_K_BYTES == SPK_T32_LANES * sizeof(spk_block_q6_k), "T32 adds nothing");
SPK_STATIC_ASSERT(SPK_T32_Q8_0_BYTES == SPK_T32_LANES * 8 * sizeof(spk_block_q8_0), "T32 adds nothing");
SPK_STATIC_ASSERT(SUPERBLOCK_MAX == 8 * sizeof(spk_block_q8_0), "the largest super-block");

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Part of a tile: lanes [lane_begin, lane_end), and where their super-blocks lie in GGML rows.  Lanes of a row are
 * neighbours in the row; the first lane of the part is at `rows`. */
typedef struct {
    uint8_t *tile, *rows;
    uint64_t row_bytes;
    uint32_t lanes_per_row;         /* a power of two */
    uint32_t lane_begin, lane_end;
} tile_part;

/* ---- The permutation ---- */

ALWAYS_INLINE void move(bool is_packing, uint8_t *in_tile, uint8_t *in_rows, size_t size_bytes) {
    if (is_packing)
        memcpy(in_tile, in_rows, size_bytes);
    else
        memcpy(in_rows, in_tile, size_bytes);
}

/* Chunks [plane, plane + count) of a lane, contiguous in the block. */
ALWAYS_INLINE void move_chunks(bool is_packing, uint8_t *tile, uint32_t lane, int plane, int count, uint8_t *block) {
    for (int c = 0; c < count; c++)
        move(is_packing, tile + PLANE_BYTES * (plane + c) + CHUNK_BYTES * lane, block + CHUNK_BYTES * c, CHUNK_BYTES);
}

ALWAYS_INLINE void lane_q4_k(bool is_packing, uint8_t *tile, uint32_t lane, uint8_t *block) {
    move_chunks(is_packing, tile, lane, 0, 9, block);
}

ALWAYS_INLINE void lane_q5_k(bool is_packing, uint8_t *tile, uint32_t lane, uint8_t *block) {
    move_chunks(is_packing, tile, lane, 0, 11, block);
}

ALWAYS_INLINE void lane_q6_k(bool is_packing, uint8_t *tile, uint32_t lane, uint8_t *block) {
    move_chunks(is_packing, tile, lane, 0, 1, block + offsetof(spk_block_q6_k, scales));
    move_chunks(is_packing, tile, lane, 1, 8, block + offsetof(spk_block_q6_k, ql));
    move_chunks(is_packing, tile, lane, 9, 4, block + offsetof(spk_block_q6_k, qh));
    move(is_packing, tile + Q6_K_D_OFFSET + 2 * lane, block + offsetof(spk_block_q6_k, d), 2);
}

ALWAYS_INLINE void lane_q8_0(bool is_packing, uint8_t *tile, uint32_t lane, uint8_t *blocks) {
    for (int i = 0; i < 8; i++) {
        uint8_t *block = blocks + (size_t)i * sizeof(spk_block_q8_0);
        move(is_packing, tile + CHUNK_BYTES * lane + 2 * i, block + offsetof(spk_block_q8_0, d), 2);
        move_chunks(is_packing, tile, lane, 1 + 2 * i, 2, block + offsetof(spk_block_q8_0, qs));
    }
}

typedef void part_fn(const tile_part *part);

#define PART_FUNCTION(function, lane_function, is_packing, superblock_bytes)                       \
    static void function(const tile_part *part) {                                                  \
        uint8_t *row = part->rows;                                                                 \
        for (uint32_t lane = part->lane_begin; lane < part->lane_end; row += part->row_bytes) {    \
            uint8_t *block = row;                                                                  \
            do {                                                                                   \
                lane_function(is_packing, part->tile, lane, block);                                \
                block += (superblock_bytes);                                                       \
            } while ((++lane & (part->lanes_per_row - 1)) != 0 && lane < part->lane_end);          \
        }                                                                                          \
    }
#define PART_FUNCTIONS(name, superblock_bytes)                              \
    PART_FUNCTION(pack_##name, lane_##name, true, superblock_bytes)         \
    PART_FUNCTION(unpack_##name, lane_##name, false, superblock_bytes)
PART_FUNCTIONS(q4_k, sizeof(spk_block_q4_k))
PART_FUNCTIONS(q5_k, sizeof(spk_block_q5_k))
PART_FUNCTIONS(q6_k, sizeof(spk_block_q6_k))
PART_FUNCTIONS(q8_0, 8 * sizeof(spk_block_q8_0))

static const struct {
    part_fn *pack, *unpack;
    uint32_t tile_bytes;            /* 0: T32 does not take this type */
} tilings[SPK_TYPE_LIMIT] = {
    [SPK_TYPE_Q4_K] = { pack_q4_k, unpack_q4_k, SPK_T32_Q4_K_BYTES },
    [SPK_TYPE_Q5_K] = { pack_q5_k, unpack_q5_k, SPK_T32_Q5_K_BYTES },
    [SPK_TYPE_Q6_K] = { pack_q6_k, unpack_q6_k, SPK_T32_Q6_K_BYTES },
    [SPK_TYPE_Q8_0] = { pack_q8_0, unpack_q8_0, SPK_T32_Q8_0_BYTES },
};

/* ---- Geometry ---- */

const char *spk_layout_name(uint32_t layout) {
    if (layout == SPK_LAYOUT_ROWS) return "ROWS";
    if (layout == SPK_LAYOUT_T32) return "T32";
    static _Thread_local char unknown[24];
    (void)snprintf(unknown, sizeof unknown, "layout %u", layout);
    return unknown;
}

bool spk_t32_accepts(uint32_t type, uint64_t col_count) {
    return type < SPK_TYPE_LIMIT && tilings[type].tile_bytes != 0 && col_count != 0 && col_count % SPK_SUPERBLOCK == 0;
}

spk_t32_geometry spk_t32_geometry_of(uint32_t type, uint64_t row_count, uint64_t col_count) {
    assert(spk_t32_accepts(type, col_count) && row_count >= 1);
    const uint64_t superblocks = col_count / SPK_SUPERBLOCK, lowest_bit = superblocks & (~superblocks + 1);
    spk_t32_geometry g = { .tile_bytes = tilings[type].tile_bytes };
    g.lanes_per_row = lowest_bit < SPK_T32_LANES ? (uint32_t)lowest_bit : SPK_T32_LANES;
    g.rows_per_group = SPK_T32_LANES / g.lanes_per_row;
    g.tiles_per_group = superblocks / g.lanes_per_row;
    g.group_count = (row_count - 1) / g.rows_per_group + 1;
    g.tile_count = g.tiles_per_group * g.group_count;
    return g;
}

static uint64_t row_bytes_of(uint32_t type, uint64_t col_count) {
    uint64_t bytes = 0;
    const spk_status status = spk_type_bytes(type, col_count, &bytes, NULL);
    assert(status == SPK_OK);
    (void)status;
    return bytes;
}

uint64_t spk_layout_unit_bytes(uint32_t layout, uint32_t type, uint64_t col_count) {
    if (layout == SPK_LAYOUT_ROWS) return row_bytes_of(type, col_count);
    assert(layout == SPK_LAYOUT_T32 && spk_t32_accepts(type, col_count));
    return tilings[type].tile_bytes;
}

uint64_t spk_layout_unit_count(uint32_t layout, uint32_t type, uint64_t row_count, uint64_t col_count) {
    if (layout == SPK_LAYOUT_ROWS) return row_count;
    assert(layout == SPK_LAYOUT_T32);
    return spk_t32_geometry_of(type, row_count, col_count).tile_count;
}

/* ---- Rows to tiles and back ---- */

/* All tiles of one row group: `part` describes the first one, its rows and lanes; the others follow. */
static void move_group(part_fn *move_part, tile_part part, const spk_t32_geometry *g, uint64_t stride_bytes) {
    const uint64_t bytes_in_row = g->tile_bytes / SPK_T32_LANES * g->lanes_per_row;
    for (uint64_t t = 0; t < g->tiles_per_group; t++) {
        move_part(&part);
        part.tile += stride_bytes;
        part.rows += bytes_in_row;
    }
}

void spk_t32_pack(const spk_matrix *shape, uint64_t group_begin, uint64_t group_end, const uint8_t *rows,
                  uint8_t *tiles) {
    const spk_t32_geometry g = spk_t32_geometry_of(shape->type, shape->row_count, shape->col_count);
    assert(group_begin <= group_end && group_end <= g.group_count && shape->unit_stride_bytes >= g.tile_bytes);
    const uint64_t row_bytes = row_bytes_of(shape->type, shape->col_count);
    for (uint64_t group = group_begin; group < group_end; group++) {
        const uint64_t rows_left = shape->row_count - group * g.rows_per_group;
        uint32_t row_count = g.rows_per_group;
        if (rows_left < row_count) {
            row_count = (uint32_t)rows_left;
            for (uint64_t t = 0; t < g.tiles_per_group; t++)
                memset(tiles + t * shape->unit_stride_bytes, 0, g.tile_bytes);
        }
        /* Packing only reads `rows`; one struct serves both directions. */
        const tile_part part = { .tile = tiles, .rows = (uint8_t *)(uintptr_t)rows, .row_bytes = row_bytes,
                                 .lanes_per_row = g.lanes_per_row, .lane_end = row_count * g.lanes_per_row };
        move_group(tilings[shape->type].pack, part, &g, shape->unit_stride_bytes);
        rows += row_bytes * row_count;
        tiles += g.tiles_per_group * shape->unit_stride_bytes;
    }
}

void spk_layout_get_rows(const spk_matrix *matrix, uint64_t row_begin, uint64_t row_end, uint8_t *rows) {
    assert(row_begin <= row_end && row_end <= matrix->row_count);
    const uint64_t row_bytes = row_bytes_of(matrix->type, matrix->col_count);
    if (matrix->layout == SPK_LAYOUT_ROWS) {
        for (uint64_t row = row_begin; row < row_end; row++, rows += row_bytes)
            memcpy(rows, matrix->data + row * matrix->unit_stride_bytes, row_bytes);
        return;
    }
    assert(matrix->layout == SPK_LAYOUT_T32);
    if (row_begin == row_end) return;
    const spk_t32_geometry g = spk_t32_geometry_of(matrix->type, matrix->row_count, matrix->col_count);
    for (uint64_t row = row_begin; row < row_end;) {
        const uint64_t group = row / g.rows_per_group, first_row = group * g.rows_per_group;
        const uint64_t group_end = first_row + g.rows_per_group, end = group_end < row_end ? group_end : row_end;
        const uint8_t *tiles = matrix->data + group * g.tiles_per_group * matrix->unit_stride_bytes;
        /* Unpacking only reads tiles. */
        const tile_part part = { .tile = (uint8_t *)(uintptr_t)tiles, .rows = rows, .row_bytes = row_bytes,
                                 .lanes_per_row = g.lanes_per_row,
                                 .lane_begin = (uint32_t)(row - first_row) * g.lanes_per_row,
                                 .lane_end = (uint32_t)(end - first_row) * g.lanes_per_row };
        move_group(tilings[matrix->type].unpack, part, &g, matrix->unit_stride_bytes);
        rows += row_bytes * (end - row);
        row = end;
    }
}

void spk_layout_dequantize_row(const spk_matrix *matrix, uint64_t row, float *out) {
    assert(row < matrix->row_count);
    if (matrix->layout == SPK_LAYOUT_ROWS) {
        spk_dequantize(matrix->type, matrix->data + row * matrix->unit_stride_bytes, matrix->col_count, out);
        return;
    }
    assert(matrix->layout == SPK_LAYOUT_T32);
    const spk_t32_geometry g = spk_t32_geometry_of(matrix->type, matrix->row_count, matrix->col_count);
    const uint32_t first_lane = (uint32_t)(row % g.rows_per_group) * g.lanes_per_row;
    const uint8_t *tiles = matrix->data + row / g.rows_per_group * g.tiles_per_group * matrix->unit_stride_bytes;
    uint8_t superblock[SUPERBLOCK_MAX];
    for (uint64_t s = 0; s < matrix->col_count / SPK_SUPERBLOCK; s++) {
        const uint32_t lane = first_lane + (uint32_t)(s % g.lanes_per_row);
        const uint8_t *tile = tiles + s / g.lanes_per_row * matrix->unit_stride_bytes;
        const tile_part part = { .tile = (uint8_t *)(uintptr_t)tile, .rows = superblock, .lanes_per_row = 1,
                                 .lane_begin = lane, .lane_end = lane + 1 };
        tilings[matrix->type].unpack(&part);
        spk_dequantize(matrix->type, superblock, SPK_SUPERBLOCK, out + s * SPK_SUPERBLOCK);
    }
}
