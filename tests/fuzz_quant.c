/* tests/fuzz_quant.c - quantize -> dequantize, and the layouts.
 *
 * Any floats: refused, where one is not finite, or blocks that decode to finite numbers, no farther off than zeros would be;
 * what a block holds exactly is found again.  Any blocks: decoded within their bytes, and T32 tiles give them back.  The
 * first byte chooses type and effort. */
#include <math.h>

#include "formats/dequant.h"
#include "formats/layout.h"
#include "requant/quant.h"
#include "tests/fuzz.h"

static const uint32_t all_types[] = {
    SPK_TYPE_F32, SPK_TYPE_F16, SPK_TYPE_BF16, SPK_TYPE_Q4_0, SPK_TYPE_Q4_1, SPK_TYPE_Q5_0, SPK_TYPE_Q5_1, SPK_TYPE_Q8_0,
    SPK_TYPE_Q2_K, SPK_TYPE_Q3_K, SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K, SPK_TYPE_IQ4_NL, SPK_TYPE_IQ4_XS };
static const uint32_t made_types[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K, SPK_TYPE_Q8_0 };
enum { ALL_TYPES = 15, MADE_TYPES = 4, WEIGHTS = 256 };

static double square_error(const float *x, const float *y) {
    double sum = 0;
    for (int i = 0; i < WEIGHTS; i++) sum += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
    return sum;
}

static spk_status quantize(uint32_t type, spk_quant_effort effort, const float *weights, const float *importance, uint8_t *blocks) {
    spk_quant_job job = { .type = type, .row_count = 1, .col_count = WEIGHTS, .weights = weights, .importance = importance,
                          .blocks = blocks, .effort = effort };
    return spk_quantize(&job, NULL);
}

static void check_floats(uint32_t type, spk_quant_effort effort, const uint8_t *bytes, size_t size) {
    const spk_type_info *info = spk_type_find(type);
    size_t block_bytes = WEIGHTS / info->block_weights * info->block_bytes;
    float x[WEIGHTS] = { 0 }, y[WEIGHTS], z[WEIGHTS], zeros[WEIGHTS] = { 0 }, importance[WEIGHTS];
    uint8_t empty[WEIGHTS * 4] = { 0 };
    memcpy(x, bytes, size < sizeof x ? size : sizeof x);
    bool is_finite = true, is_held = true, is_small = true;
    float low, high;
    spk_quant_range(type, &low, &high);
    for (int i = 0; i < WEIGHTS; i++) {
        is_finite &= isfinite(x[i]) != 0;
        is_held &= x[i] >= low && x[i] <= high;
        is_small &= fabsf(x[i]) < 60000.0f;              /* else codes at the ends of their range are clipped */
        importance[i] = 1;
    }
    fuzz_guarded blocks = fuzz_guard(empty, block_bytes), again = fuzz_guard(empty, block_bytes);
    spk_status status = quantize(type, effort, x, NULL, blocks.bytes);
    bool is_right = is_held ? status == SPK_OK : status == SPK_E_LIMIT || (!is_finite && status == SPK_E_NONFINITE);
    FUZZ_ASSERT(is_right, "%s of %s", spk_status_name(status), info->name);
    if (is_held) {
        fuzz_accepted_count++;
        spk_dequantize(type, blocks.bytes, WEIGHTS, y);
        for (int i = 0; i < WEIGHTS; i++) FUZZ_ASSERT(isfinite(y[i]), "%s: weight %d is %g", info->name, i, (double)y[i]);
        double error = square_error(x, y), none = square_error(x, zeros);
        FUZZ_ASSERT(!is_small || error <= none * 1.0001, "%s: error %g, zeros have %g", info->name, error, none);
        FUZZ_ASSERT(quantize(type, effort, x, importance, again.bytes) == SPK_OK, "%s with importance", info->name);
        FUZZ_ASSERT(quantize(type, effort, y, NULL, again.bytes) == SPK_OK, "%s again", info->name);
        spk_dequantize(type, again.bytes, WEIGHTS, z);
        double moved = square_error(y, z), size_of_y = square_error(y, zeros);
        FUZZ_ASSERT(moved <= 1e-4 * size_of_y, "%s: what decodes to y becomes something else: %g of %g", info->name, moved, size_of_y);
    }
    fuzz_unguard(blocks);
    fuzz_unguard(again);
}

/* Any bytes as rows of a matrix of 256 columns. */
static void check_blocks(uint32_t type, const uint8_t *bytes, size_t size) {
    const spk_type_info *info = spk_type_find(type);
    size_t row_bytes = WEIGHTS / info->block_weights * info->block_bytes, row_count = size / row_bytes;
    if (row_count == 0) return;
    if (row_count > 70) row_count = 70;
    fuzz_guarded rows = fuzz_guard(bytes, row_count * row_bytes);
    float x[WEIGHTS], y[WEIGHTS];
    for (size_t r = 0; r < row_count; r++) spk_dequantize(type, rows.bytes + r * row_bytes, WEIGHTS, x);
    (void)spk_find_nonfinite(type, rows.bytes, row_count * WEIGHTS / info->block_weights);
    if (spk_t32_accepts(type, WEIGHTS)) {
        spk_t32_geometry g = spk_t32_geometry_of(type, row_count, WEIGHTS);
        uint64_t tile = spk_layout_unit_bytes(SPK_LAYOUT_T32, type, WEIGHTS);
        uint64_t unit_count = spk_layout_unit_count(SPK_LAYOUT_T32, type, row_count, WEIGHTS);
        uint8_t *empty = calloc(unit_count, tile), *back = malloc(row_count * row_bytes);
        fuzz_guarded tiles = fuzz_guard(empty, unit_count * tile);
        spk_matrix m = { .data = tiles.bytes, .unit_stride_bytes = tile, .type = type, .layout = SPK_LAYOUT_T32,
                         .row_count = row_count, .col_count = WEIGHTS };
        spk_t32_pack(&m, 0, g.group_count, rows.bytes, tiles.bytes);
        spk_layout_get_rows(&m, 0, row_count, back);
        FUZZ_ASSERT(memcmp(back, rows.bytes, row_count * row_bytes) == 0, "%s: tiles give other rows", info->name);
        for (size_t r = 0; r < row_count; r++) {
            spk_layout_dequantize_row(&m, r, x);
            spk_dequantize(type, rows.bytes + r * row_bytes, WEIGHTS, y);
            FUZZ_ASSERT(memcmp(x, y, sizeof x) == 0, "%s: row %zu decodes otherwise in tiles", info->name, r);
        }
        fuzz_accepted_count++;
        fuzz_unguard(tiles);
        free(empty);
        free(back);
    }
    fuzz_unguard(rows);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size == 0) return 0;
    unsigned choice = bytes[0];
    if (choice % 2 == 0) check_floats(made_types[choice / 2 % MADE_TYPES], (spk_quant_effort)(choice / 8 % 3), bytes + 1, size - 1);
    else check_blocks(all_types[choice / 2 % ALL_TYPES], bytes + 1, size - 1);
    return 0;
}

void fuzz_seeds(void) {
    uint64_t state = 5;
    for (unsigned choice = 0; choice < 48; choice++) {
        uint8_t bytes[1 + 4 * WEIGHTS];
        bytes[0] = (uint8_t)choice;
        for (int i = 0; i < WEIGHTS; i++) {
            float value = check_uniform(&state) * (choice < 24 ? 0.05f : i % 17 == 0 ? 100.0f : 1e-6f);
            memcpy(bytes + 1 + 4 * i, &value, 4);
        }
        fuzz_seed(bytes, sizeof bytes);
    }
    /* Found: seconds went by before no exact block had been found for these. */
    uint8_t endless[1 + 4 * 33] = { 18 };
    for (int i = 0; i <= 32; i++) {
        float value = i < 32 ? -0x1.858584p+6f : -0x1.8722f4p-6f;
        memcpy(endless + 1 + 4 * i, &value, 4);
    }
    fuzz_seed(endless, sizeof endless);
}
