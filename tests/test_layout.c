/* tests/test_layout.c - T32 tiles: geometry, the place of every byte, padding, interleaving, row access. */
#include "formats/layout.h"

#include <stdlib.h>

#include "formats/dequant.h"
#include "tests/check.h"

enum { POISON = 0xa5 };

static const uint32_t tiled_types[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K, SPK_TYPE_Q8_0 };
enum { TILED_TYPE_COUNT = 4 };

static const struct { uint64_t cols; uint32_t lanes_per_row; } widths[] = {
    { 256, 1 }, { 512, 2 }, { 768, 1 }, { 1024, 4 }, { 1280, 1 }, { 2048, 8 }, { 4096, 16 }, { 5120, 4 },
    { 8192, 32 }, { 12288, 16 }, { 16384, 32 }, { 17408, 4 },
};
enum { WIDTH_COUNT = sizeof widths / sizeof *widths };

static const uint64_t row_counts[] = { 1, 3, 4, 31, 32, 33, 100 };
enum { ROW_COUNT_COUNT = sizeof row_counts / sizeof *row_counts };

/* A matrix with its source rows, tiles and a second set of rows to read back into. */
typedef struct {
    spk_matrix       matrix;
    spk_t32_geometry g;
    uint64_t         row_bytes, rows_bytes, tiles_bytes;
    uint8_t         *rows, *tiles, *back;
} fixture;

static void must(int condition) {
    if (!condition) {
        fprintf(stderr, "  out of memory\n");
        exit(1);
    }
}

/* Random source rows, poisoned tiles whose stride is `gap` more than a tile. */
static fixture fixture_of(uint32_t type, uint64_t row_count, uint64_t cols, uint64_t gap) {
    fixture f = { .g = spk_t32_geometry_of(type, row_count, cols) };
    spk_error err;
    CHECK_OK(spk_type_bytes(type, cols, &f.row_bytes, &err), err);
    const uint64_t stride = f.g.tile_bytes + gap;
    f.rows_bytes = f.row_bytes * row_count;
    f.tiles_bytes = stride * f.g.tile_count;
    must((f.rows = malloc(f.rows_bytes)) != NULL);
    must((f.tiles = malloc(f.tiles_bytes)) != NULL);
    must((f.back = malloc(f.rows_bytes)) != NULL);
    uint64_t state = type + cols + row_count;
    for (uint64_t i = 0; i + 8 <= f.rows_bytes; i += 8) {
        const uint64_t random = check_random(&state);
        memcpy(f.rows + i, &random, 8);
    }
    for (uint64_t i = f.rows_bytes & ~UINT64_C(7); i < f.rows_bytes; i++) f.rows[i] = (uint8_t)check_random(&state);
    memset(f.tiles, POISON, f.tiles_bytes);
    memset(f.back, POISON, f.rows_bytes);
    f.matrix = (spk_matrix){ .data = f.tiles, .unit_stride_bytes = stride, .type = type, .layout = SPK_LAYOUT_T32,
                             .row_count = row_count, .col_count = cols };
    return f;
}

static void fixture_free(fixture *f) {
    free(f->rows);
    free(f->tiles);
    free(f->back);
}

/* Where byte `at` of a super-block (eight blocks for Q8_0) goes in its lane's tile: the table of layout.h, as a
 * formula from byte to place. */
static uint64_t place_in_tile(uint32_t type, uint64_t at, uint64_t lane) {
    uint64_t chunk = at / 16, byte = at % 16;
    if (type == SPK_TYPE_Q6_K) {
        if (at >= 208) return 6656 + 2 * lane + (at - 208);
        chunk = at >= 192 ? 0 : chunk + 1;
    } else if (type == SPK_TYPE_Q8_0) {
        const uint64_t block = at / 34, in_block = at % 34;
        chunk = in_block < 2 ? 0 : 1 + (32 * block + in_block - 2) / 16;
        byte = in_block < 2 ? 2 * block + in_block : (in_block - 2) % 16;
    }
    return 512 * chunk + 16 * lane + byte;
}

/* ---- Tests ---- */

static void geometry(void) {
    for (int w = 0; w < WIDTH_COUNT; w++) {
        for (int r = 0; r < ROW_COUNT_COUNT; r++) {
            const spk_t32_geometry g = spk_t32_geometry_of(SPK_TYPE_Q6_K, row_counts[r], widths[w].cols);
            const uint64_t p = widths[w].lanes_per_row, group_rows = 32 / p;
            CHECK(g.lanes_per_row == p && g.rows_per_group == group_rows && g.tile_bytes == 6720, "%llu columns: p %u",
                  (unsigned long long)widths[w].cols, g.lanes_per_row);
            CHECK(g.tiles_per_group * p * 256 == widths[w].cols, "tiles in a row");
            CHECK(g.group_count * group_rows >= row_counts[r] && (g.group_count - 1) * group_rows < row_counts[r],
                  "groups");
            CHECK(g.tile_count == g.tiles_per_group * g.group_count, "tiles");
            CHECK(spk_layout_unit_count(SPK_LAYOUT_T32, SPK_TYPE_Q6_K, row_counts[r], widths[w].cols) == g.tile_count,
                  "units are tiles");
        }
    }
    CHECK(spk_layout_unit_count(SPK_LAYOUT_ROWS, SPK_TYPE_F32, 77, 5) == 77, "units are rows");
    CHECK(spk_layout_unit_bytes(SPK_LAYOUT_ROWS, SPK_TYPE_F32, 5) == 20, "a row of F32");
    CHECK(spk_layout_unit_bytes(SPK_LAYOUT_ROWS, SPK_TYPE_Q6_K, 768) == 630, "a row of Q6_K");
    static const uint64_t tile_bytes[TILED_TYPE_COUNT] = { 4608, 5632, 6720, 8704 };
    for (int t = 0; t < TILED_TYPE_COUNT; t++)
        CHECK(spk_layout_unit_bytes(SPK_LAYOUT_T32, tiled_types[t], 512) == tile_bytes[t], "%s",
              spk_type_name(tiled_types[t]));
}

static void accepted_shapes(void) {
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT + 2; type++) {
        int is_tiled = 0;
        for (int t = 0; t < TILED_TYPE_COUNT; t++) is_tiled |= type == tiled_types[t];
        CHECK(spk_t32_accepts(type, 512) == is_tiled, "%s", spk_type_name(type));
    }
    CHECK(!spk_t32_accepts(SPK_TYPE_Q8_0, 0) && !spk_t32_accepts(SPK_TYPE_Q8_0, 32) &&
          !spk_t32_accepts(SPK_TYPE_Q8_0, 288) && !spk_t32_accepts(UINT32_MAX, 256), "not a multiple of 256");
    CHECK(strcmp(spk_layout_name(1), "ROWS") == 0 && strcmp(spk_layout_name(2), "T32") == 0 &&
          strcmp(spk_layout_name(9), "layout 9") == 0, "names");
}

/* Rows to tiles and back; every byte of the tiles against place_in_tile; zeros in the padding. */
static void round_trip(uint32_t type, uint64_t row_count, uint64_t cols) {
    fixture f = fixture_of(type, row_count, cols, 0);
    const unsigned long long c = cols, r = row_count;
    spk_t32_pack(&f.matrix, 0, f.g.group_count, f.rows, f.tiles);
    const uint64_t superblock_bytes = f.g.tile_bytes / 32, p = f.g.lanes_per_row;
    uint64_t misplaced = 0;
    for (uint64_t row = 0; row < f.g.group_count * f.g.rows_per_group; row++) {
        for (uint64_t s = 0; s < cols / 256; s++) {
            const uint64_t tile = row / f.g.rows_per_group * f.g.tiles_per_group + s / p;
            const uint64_t lane = row % f.g.rows_per_group * p + s % p;
            for (uint64_t at = 0; at < superblock_bytes; at++) {
                const uint8_t expected = row < row_count ? f.rows[row * f.row_bytes + s * superblock_bytes + at] : 0;
                misplaced += f.tiles[tile * f.g.tile_bytes + place_in_tile(type, at, lane)] != expected;
            }
        }
    }
    CHECK(misplaced == 0, "%s %llu x %llu: %llu bytes", spk_type_name(type), r, c, (unsigned long long)misplaced);
    spk_layout_get_rows(&f.matrix, 0, row_count, f.back);
    CHECK(memcmp(f.rows, f.back, f.rows_bytes) == 0, "%s %llu x %llu", spk_type_name(type), r, c);
    fixture_free(&f);
}

static void round_trips(void) {
    for (int t = 0; t < TILED_TYPE_COUNT; t++)
        for (int w = 0; w < WIDTH_COUNT; w++)
            for (int r = 0; r < ROW_COUNT_COUNT; r++) round_trip(tiled_types[t], row_counts[r], widths[w].cols);
}

/* The header's table, by name: super-blocks whose fields hold their own plane numbers. */
static void planes(void) {
    uint8_t rows[32 * 272], tile[8704];
    static const struct { uint32_t type; int chunk_count; int first_plane[4], field_at[4]; } expected[] = {
        { SPK_TYPE_Q4_K, 9, { 0, 1, -1, -1 }, { 0, offsetof(spk_block_q4_k, qs), 0, 0 } },
        { SPK_TYPE_Q5_K, 11, { 0, 1, 3, -1 }, { 0, offsetof(spk_block_q5_k, qh), offsetof(spk_block_q5_k, qs), 0 } },
        { SPK_TYPE_Q6_K, 13, { 0, 1, 9, -1 },
          { offsetof(spk_block_q6_k, scales), offsetof(spk_block_q6_k, ql), offsetof(spk_block_q6_k, qh), 0 } },
    };
    for (int e = 0; e < 3; e++) {
        const uint64_t tile_bytes = spk_layout_unit_bytes(SPK_LAYOUT_T32, expected[e].type, 8192);
        const uint64_t bytes = tile_bytes / 32;
        for (int field = 0; field < 3 && expected[e].first_plane[field] >= 0; field++) {
            memset(rows, 0, sizeof rows);
            for (uint64_t lane = 0; lane < 32; lane++) rows[lane * bytes + (uint64_t)expected[e].field_at[field]] = 1;
            const spk_matrix shape = { .unit_stride_bytes = tile_bytes, .type = expected[e].type,
                                       .layout = SPK_LAYOUT_T32, .row_count = 1, .col_count = 8192 };
            spk_t32_pack(&shape, 0, 1, rows, tile);
            for (uint64_t i = 0; i < 512 * (uint64_t)expected[e].chunk_count; i++) {
                const int is_first_byte = i / 512 == (uint64_t)expected[e].first_plane[field] && i % 16 == 0;
                CHECK(tile[i] == is_first_byte, "%s field %d byte %llu", spk_type_name(expected[e].type), field,
                      (unsigned long long)i);
            }
        }
    }
    const spk_matrix q6 = { .unit_stride_bytes = 6720, .type = SPK_TYPE_Q6_K, .row_count = 1, .col_count = 8192 };
    memset(rows, 0, sizeof rows);
    for (int lane = 0; lane < 32; lane++) rows[lane * 210 + 208] = (uint8_t)(1 + lane);
    spk_t32_pack(&q6, 0, 1, rows, tile);
    for (int lane = 0; lane < 32; lane++) CHECK(tile[6656 + 2 * lane] == 1 + lane, "d of Q6_K lane %d", lane);
    const spk_matrix q8 = { .unit_stride_bytes = 8704, .type = SPK_TYPE_Q8_0, .row_count = 1, .col_count = 8192 };
    memset(rows, 0, sizeof rows);
    rows[272 * 3 + 34 * 5] = 0x11;               /* lane 3, block 5: d, and the last of its 32 codes */
    rows[272 * 3 + 34 * 5 + 33] = 0x22;
    spk_t32_pack(&q8, 0, 1, rows, tile);
    CHECK(tile[16 * 3 + 2 * 5] == 0x11, "d of Q8_0");
    CHECK(tile[512 * (1 + 2 * 5 + 1) + 16 * 3 + 15] == 0x22, "code of Q8_0");
}

/* Tiles with a gap between them, as gate and up lie: gaps keep their bytes, and reading skips them. */
static void interleaved(void) {
    for (int t = 0; t < TILED_TYPE_COUNT; t++) {
        for (int w = 0; w < WIDTH_COUNT; w += 2) {
            const uint64_t tile_bytes = spk_layout_unit_bytes(SPK_LAYOUT_T32, tiled_types[t], widths[w].cols);
            fixture f = fixture_of(tiled_types[t], 33, widths[w].cols, tile_bytes + 128);
            spk_t32_pack(&f.matrix, 0, f.g.group_count, f.rows, f.tiles);
            uint64_t touched = 0;
            for (uint64_t i = 0; i < f.tiles_bytes; i++)
                touched += i % f.matrix.unit_stride_bytes >= tile_bytes && f.tiles[i] != POISON;
            CHECK(touched == 0, "%s: %llu bytes of gaps", spk_type_name(tiled_types[t]), (unsigned long long)touched);
            spk_layout_get_rows(&f.matrix, 0, 33, f.back);
            CHECK(memcmp(f.rows, f.back, f.rows_bytes) == 0, "%s, %llu columns", spk_type_name(tiled_types[t]),
                  (unsigned long long)widths[w].cols);
            fixture_free(&f);
        }
    }
}

/* Groups packed one by one, and rows read in pieces that begin and end inside groups. */
static void parts_equal_the_whole(void) {
    for (int t = 0; t < TILED_TYPE_COUNT; t++) {
        for (int w = 0; w < WIDTH_COUNT; w++) {
            fixture f = fixture_of(tiled_types[t], 100, widths[w].cols, 64);
            uint8_t *whole = malloc(f.tiles_bytes);
            must(whole != NULL);
            memset(whole, POISON, f.tiles_bytes);
            spk_t32_pack(&f.matrix, 0, f.g.group_count, f.rows, whole);
            uint64_t state = 3;
            for (uint64_t begin = 0, end; begin < f.g.group_count; begin = end) {
                end = begin + 1 + check_random(&state) % 3;
                if (end > f.g.group_count) end = f.g.group_count;
                spk_t32_pack(&f.matrix, begin, end, f.rows + begin * f.g.rows_per_group * f.row_bytes,
                             f.tiles + begin * f.g.tiles_per_group * f.matrix.unit_stride_bytes);
            }
            CHECK(memcmp(whole, f.tiles, f.tiles_bytes) == 0, "%s, %llu columns", spk_type_name(tiled_types[t]),
                  (unsigned long long)widths[w].cols);
            for (uint64_t begin = 0, end; begin < 100; begin = end) {
                end = begin + check_random(&state) % 12;
                if (end > 100) end = 100;
                spk_layout_get_rows(&f.matrix, begin, end, f.back + begin * f.row_bytes);
            }
            CHECK(memcmp(f.rows, f.back, f.rows_bytes) == 0, "%s, %llu columns", spk_type_name(tiled_types[t]),
                  (unsigned long long)widths[w].cols);
            free(whole);
            fixture_free(&f);
        }
    }
}

static void dequantized_rows(void) {
    static float expected[17408], got[17408];
    for (int t = 0; t < TILED_TYPE_COUNT; t++) {
        for (int w = 0; w < WIDTH_COUNT; w++) {
            fixture f = fixture_of(tiled_types[t], 33, widths[w].cols, 0);
            spk_t32_pack(&f.matrix, 0, f.g.group_count, f.rows, f.tiles);
            for (uint64_t row = 0; row < 33; row++) {
                spk_dequantize(tiled_types[t], f.rows + row * f.row_bytes, widths[w].cols, expected);
                spk_layout_dequantize_row(&f.matrix, row, got);
                CHECK(memcmp(expected, got, widths[w].cols * sizeof *got) == 0, "%s, %llu columns, row %llu",
                      spk_type_name(tiled_types[t]), (unsigned long long)widths[w].cols, (unsigned long long)row);
            }
            fixture_free(&f);
        }
    }
}

/* ROWS, tight and with a stride, for every type that has a width of 256. */
static void rows_layout(void) {
    enum { ROWS = 5, COLS = 256, GAP = 48 };
    static uint8_t data[ROWS * (COLS * 4 + GAP)], back[ROWS * COLS * 4];
    uint64_t state = 4;
    for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)check_random(&state);
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++) {
        if (spk_type_find(type) == NULL) continue;
        const uint64_t row_bytes = spk_layout_unit_bytes(SPK_LAYOUT_ROWS, type, COLS);
        for (uint64_t gap = 0; gap <= GAP; gap += GAP) {
            const spk_matrix matrix = { .data = data, .unit_stride_bytes = row_bytes + gap, .type = type,
                                        .layout = SPK_LAYOUT_ROWS, .row_count = ROWS, .col_count = COLS };
            spk_layout_get_rows(&matrix, 1, ROWS, back);
            for (uint64_t row = 1; row < ROWS; row++) {
                const uint8_t *source = data + row * (row_bytes + gap);
                CHECK(memcmp(source, back + (row - 1) * row_bytes, row_bytes) == 0, "%s row", spk_type_name(type));
                float expected[COLS], got[COLS];
                spk_dequantize(type, source, COLS, expected);
                spk_layout_dequantize_row(&matrix, row, got);
                CHECK(memcmp(expected, got, sizeof got) == 0, "%s, dequantized", spk_type_name(type));
            }
        }
    }
}

int main(void) {
    RUN(geometry);
    RUN(accepted_shapes);
    RUN(round_trips);
    RUN(planes);
    RUN(interleaved);
    RUN(parts_equal_the_whole);
    RUN(dequantized_rows);
    RUN(rows_layout);
    return CHECK_EXIT();
}
