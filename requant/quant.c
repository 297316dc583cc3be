/* requant/quant.c - rows to tiles, tiles to blocks, and the sums that describe a requant.
 *
 * The choice of codes and factors is elsewhere: quant_exact.c recognises weights that need no search, the *_lanes.c
 * files search.  What is decided here is what a search may assume: finite weights within the type's range, and
 * importance scaled to a mean of 1.
 */
#include "requant/quant.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "formats/cpu_features.h"
#include "requant/quant_blocks_internal.h"
#include "requant/quant_units_internal.h"

#define BUILD(name, tile_count, usable) \
    { #name, tile_count, usable, spk_quant_affine_##name, spk_quant_q6_##name, spk_quant_q8_##name, spk_quant_error_add_##name, \
      spk_quant_within_##name, spk_quant_fill_##name, spk_quant_nibbles_##name, spk_quant_fill_importance_##name, \
      spk_quant_affine_units_##name, spk_quant_symmetric_units_##name }
const spk_quant_build spk_quant_builds[] = {
    BUILD(plain, 1, spk_cpu_runs_plain),
#if defined(__x86_64__)
    BUILD(avx2, 1, spk_cpu_runs_avx2),
    BUILD(avx512, SPK_QUANT_TILES_AVX512, spk_cpu_runs_avx512),
#endif
};
const size_t spk_quant_build_count = sizeof spk_quant_builds / sizeof *spk_quant_builds;

/* The last that this CPU can run. */
static const spk_quant_build *best_build(void) {
    const spk_quant_build *build = &spk_quant_builds[0];
    for (size_t i = 1; i < spk_quant_build_count; i++)
        if (spk_quant_builds[i].usable()) build = &spk_quant_builds[i];
    return build;
}

/* ---- Tiles to blocks: where no search is needed, and by the search of a build ---- */

static bool make_exact_q4_k(const spk_quant_build *build, const spk_quant_tile *tile, void *out) {
    spk_quant_affine_units units;
    spk_quant_affine_fit fit;
    if (!build->affine_units(tile, 15, &units) || !spk_quant_affine_exact(tile, &units, 15, &fit)) return false;
    spk_quant_pack_q4_k(&fit, 0, 1, out);
    return true;
}

static bool make_exact_q5_k(const spk_quant_build *build, const spk_quant_tile *tile, void *out) {
    spk_quant_affine_units units;
    spk_quant_affine_fit fit;
    if (!build->affine_units(tile, 31, &units) || !spk_quant_affine_exact(tile, &units, 31, &fit)) return false;
    spk_quant_pack_q5_k(&fit, 0, 1, out);
    return true;
}

static bool make_exact_q6_k(const spk_quant_build *build, const spk_quant_tile *tile, void *out) {
    spk_quant_symmetric_units units;
    spk_quant_q6_fit fit;
    if (!build->symmetric_units(tile, 2, &units) || !spk_quant_q6_exact(tile, &units, &fit)) return false;
    spk_quant_pack_q6_k(&fit, 0, 1, out);
    return true;
}

static bool make_exact_q8_0(const spk_quant_build *build, const spk_quant_tile *tile, void *out) {
    spk_quant_symmetric_units units;
    spk_quant_q8_fit fit;
    if (!build->symmetric_units(tile, 1, &units) || !spk_quant_q8_exact(tile, &units, &fit)) return false;
    spk_quant_pack_q8_0(&fit, 0, 1, out);
    return true;
}

typedef struct {
    uint8_t bytes[SPK_QUANT_BLOCK_BYTES_MAX];
} made_blocks;

static void make_q4_k(const spk_quant_build *build, const spk_quant_tile *const tiles[], spk_quant_effort effort, made_blocks out[]) {
    spk_quant_affine_fit fits[SPK_QUANT_TILES_MAX], *const to[] = { &fits[0], &fits[1] };
    build->affine(tiles, 15, effort, to);
    for (uint32_t t = 0; t < build->tile_count; t++) {
        spk_block_q4_k *block = (spk_block_q4_k *)(void *)out[t].bytes;
        spk_quant_pack_q4_k_head(&fits[t], 0, 1, block);
        build->nibbles(fits[t].code, block->qs);
    }
}

static void make_q5_k(const spk_quant_build *build, const spk_quant_tile *const tiles[], spk_quant_effort effort, made_blocks out[]) {
    spk_quant_affine_fit fits[SPK_QUANT_TILES_MAX], *const to[] = { &fits[0], &fits[1] };
    build->affine(tiles, 31, effort, to);
    for (uint32_t t = 0; t < build->tile_count; t++) spk_quant_pack_q5_k(&fits[t], 0, 1, (spk_block_q5_k *)(void *)out[t].bytes);
}

static void make_q6_k(const spk_quant_build *build, const spk_quant_tile *const tiles[], spk_quant_effort effort, made_blocks out[]) {
    spk_quant_q6_fit fits[SPK_QUANT_TILES_MAX], *const to[] = { &fits[0], &fits[1] };
    build->q6(tiles, effort, to);
    for (uint32_t t = 0; t < build->tile_count; t++) spk_quant_pack_q6_k(&fits[t], 0, 1, (spk_block_q6_k *)(void *)out[t].bytes);
}

static void make_q8_0(const spk_quant_build *build, const spk_quant_tile *const tiles[], spk_quant_effort effort, made_blocks out[]) {
    spk_quant_q8_fit fits[SPK_QUANT_TILES_MAX], *const to[] = { &fits[0], &fits[1] };
    build->q8(tiles, effort, to);
    for (uint32_t t = 0; t < build->tile_count; t++) spk_quant_pack_q8_0(&fits[t], 0, 1, (spk_block_q8_0 *)(void *)out[t].bytes);
}

/* ---- Targets ---- */

typedef struct {
    uint32_t        type;
    spk_quant_shape shape;
    bool          (*make_exact)(const spk_quant_build *build, const spk_quant_tile *tile, void *out);
    void          (*make)(const spk_quant_build *build, const spk_quant_tile *const tiles[], spk_quant_effort effort, made_blocks out[]);
} target_info;

#define AFFINE_LOW (-SPK_QUANT_F16_MAX * SPK_QUANT_SCALE_MAX)
#define AFFINE_HIGH(code_max) (SPK_QUANT_F16_MAX * SPK_QUANT_SCALE_MAX * (code_max))
#define Q6_HIGH (SPK_QUANT_F16_MAX * SPK_QUANT_Q6_SCALE_MAX * -SPK_QUANT_Q6_CODE_MIN)
#define Q8_HIGH (SPK_QUANT_F16_MAX * SPK_QUANT_Q8_CODE_MAX)

static const target_info targets[] = {
    { SPK_TYPE_Q4_K, { 32, AFFINE_LOW, AFFINE_HIGH(15) }, make_exact_q4_k, make_q4_k },
    { SPK_TYPE_Q5_K, { 32, AFFINE_LOW, AFFINE_HIGH(31) }, make_exact_q5_k, make_q5_k },
    { SPK_TYPE_Q6_K, { 16, -Q6_HIGH, Q6_HIGH }, make_exact_q6_k, make_q6_k },
    { SPK_TYPE_Q8_0, { 32, -Q8_HIGH, Q8_HIGH }, make_exact_q8_0, make_q8_0 },
};

static const target_info *target_find(uint32_t type) {
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++)
        if (targets[i].type == type) return &targets[i];
    return NULL;
}

const spk_quant_shape *spk_quant_shape_of(uint32_t type) { return &target_find(type)->shape; }

bool spk_quant_can_make(uint32_t type) { return target_find(type) != NULL; }

void spk_quant_range(uint32_t type, float *low, float *high) {
    *low = target_find(type)->shape.low;
    *high = target_find(type)->shape.high;
}

uint64_t spk_quant_find_beyond(uint32_t type, const float *weights, uint64_t count) {
    const spk_quant_shape *shape = spk_quant_shape_of(type);
    for (uint64_t i = 0; i < count; i++)
        if (!(weights[i] >= shape->low && weights[i] <= shape->high)) return i;
    return UINT64_MAX;
}

/* ---- Rows to tiles ---- */

static void fill_importance(const spk_quant_build *build, const float *importance, double scale, uint32_t count,
                            const target_info *target, spk_quant_tile *tile) {
    float scaled[SPK_SUPERBLOCK];
    for (uint32_t c = 0; c < SPK_SUPERBLOCK; c++)
        scaled[c] = importance != NULL && c < count ? spk_quant_scaled_importance(importance[c], scale) : 1.0f;
    build->fill_importance(scaled, &target->shape, tile);
    tile->weighted = importance != NULL;
}

static spk_status check_weights(const spk_quant_job *job, spk_error *err) {
    float low, high;
    spk_quant_range(job->type, &low, &high);
    for (uint64_t row = 0; row < job->row_count; row++) {
        const float *weights = job->weights + row * job->col_count;
        if (best_build()->within(weights, job->col_count, low, high)) continue;
        uint64_t c = spk_quant_find_beyond(job->type, weights, job->col_count);
        if (!isfinite(weights[c]))
            return spk_fail(err, SPK_E_NONFINITE, "row %" PRIu64 ", column %" PRIu64 ": weight is %s", row, c,
                            isnan(weights[c]) ? "NaN" : "infinite");
        return spk_fail(err, SPK_E_LIMIT, "row %" PRIu64 ", column %" PRIu64 ": weight %.9g is beyond what spk writes as %s (%.9g to %.9g)", row, c,
                        (double)weights[c], spk_type_name(job->type), (double)low, (double)high);
    }
    return SPK_OK;
}

/* What the importance is multiplied with to get a mean of 1. */
static double importance_scale(const spk_quant_job *job) {
    if (job->importance == NULL) return 1.0;
    double sum = 0;
    for (uint64_t c = 0; c < job->col_count; c++) sum += (double)job->importance[c];
    assert(sum > 0);
    return (double)job->col_count / sum;
}

/* The blocks of an all-zero tile: no scales, and codes that are 0 in the type's way of writing them. */
static void make_zeros(const target_info *target, uint8_t *out, size_t size_bytes) {
    memset(out, 0, size_bytes);
    spk_block_q6_k q6_zeros = { .d = 0 };
    memset(q6_zeros.qh, 0xAA, sizeof q6_zeros.qh);
    if (target->type == SPK_TYPE_Q6_K) memcpy(out, &q6_zeros, sizeof q6_zeros);
}

static spk_status check_shape(const spk_quant_job *job, spk_error *err) {
    assert(target_find(job->type) != NULL && job->row_count >= 1);
    const spk_type_info *info = spk_type_find(job->type);
    if (job->col_count == 0 || job->col_count % info->block_weights != 0)
        return spk_fail(err, SPK_E_SHAPE, "%" PRIu64 " columns do not make blocks of %u, as %s needs", job->col_count,
                        (unsigned)info->block_weights, info->name);
    return SPK_OK;
}

spk_status spk_quant_check(const spk_quant_job *job, double *scale, spk_error *err) {
    SPK_TRY(check_shape(job, err));
    SPK_TRY(check_weights(job, err));
    *scale = importance_scale(job);
    return SPK_OK;
}

/* The tile of the columns from `col`: how many they are, and where its blocks are. */
static uint32_t columns_of(const spk_quant_job *job, uint64_t col) {
    uint64_t left = job->col_count - col;
    return left < SPK_SUPERBLOCK ? (uint32_t)left : SPK_SUPERBLOCK;
}

static size_t bytes_of(const spk_quant_job *job, uint64_t col_count) {
    const spk_type_info *info = spk_type_find(job->type);
    return (size_t)(col_count / info->block_weights * info->block_bytes);
}

static uint8_t *blocks_at(const spk_quant_job *job, uint64_t row, uint64_t col) {
    return (uint8_t *)job->blocks + row * bytes_of(job, job->col_count) + bytes_of(job, col);
}

void spk_quant_make_exact(const spk_quant_job *job, uint64_t row, uint64_t col) {
    const target_info *target = target_find(job->type);
    uint32_t count = columns_of(job, col);
    spk_quant_tile tile;
    made_blocks blocks;
    const spk_quant_build *build = best_build();
    if (build->fill(job->weights + row * job->col_count + col, count, &target->shape, &tile) == SPK_QUANT_FILLED &&
        target->make_exact(build, &tile, blocks.bytes))
        memcpy(blocks_at(job, row, col), blocks.bytes, bytes_of(job, count));
}

/* Tiles of the same columns that wait until there are as many as a build searches at once. */
typedef struct {
    spk_quant_tile tiles[SPK_QUANT_TILES_MAX];
    uint8_t       *out[SPK_QUANT_TILES_MAX];
    uint32_t       count;
    size_t         size_bytes;         /* of the blocks of one */
} waiting_tiles;

static void search_waiting(const spk_quant_build *build, const target_info *target, spk_quant_effort effort, waiting_tiles *waiting) {
    const spk_quant_tile *tiles[SPK_QUANT_TILES_MAX];
    made_blocks blocks[SPK_QUANT_TILES_MAX];
    for (uint32_t t = 0; t < build->tile_count; t++) tiles[t] = &waiting->tiles[t < waiting->count ? t : 0];
    target->make(build, tiles, effort, blocks);
    for (uint32_t t = 0; t < waiting->count; t++) memcpy(waiting->out[t], blocks[t].bytes, waiting->size_bytes);
    waiting->count = 0;
}

spk_status spk_quantize_with(const spk_quant_build *build, const spk_quant_job *job, spk_error *err) {
    const target_info *target = target_find(job->type);
    SPK_TRY(check_shape(job, err));
    double scale = importance_scale(job);
    waiting_tiles waiting;
    made_blocks blocks;
    /* Columns outside, rows inside: a tile's importance is turned once for all rows. */
    for (uint64_t col = 0; col < job->col_count; col += SPK_SUPERBLOCK) {
        uint32_t count = columns_of(job, col);
        waiting.count = 0;
        waiting.size_bytes = bytes_of(job, count);
        for (uint32_t t = 0; t < build->tile_count; t++)
            fill_importance(build, job->importance != NULL ? job->importance + col : NULL, scale, count, target, &waiting.tiles[t]);
        for (uint64_t row = 0; row < job->row_count; row++) {
            spk_quant_tile *tile = &waiting.tiles[waiting.count];
            uint8_t *out = blocks_at(job, row, col);
            spk_quant_filled filled = build->fill(job->weights + row * job->col_count + col, count, &target->shape, tile);
            if (filled == SPK_QUANT_BEYOND) return check_weights(job, err);          /* which is the first */
            if (filled == SPK_QUANT_ALL_ZERO) {
                make_zeros(target, out, waiting.size_bytes);
            } else if (target->make_exact(build, tile, blocks.bytes)) {
                memcpy(out, blocks.bytes, waiting.size_bytes);
            } else {
                waiting.out[waiting.count++] = out;
                if (waiting.count == build->tile_count) search_waiting(build, target, job->effort, &waiting);
            }
        }
        if (waiting.count > 0) search_waiting(build, target, job->effort, &waiting);
    }
    return SPK_OK;
}

spk_status spk_quantize(const spk_quant_job *job, spk_error *err) { return spk_quantize_with(best_build(), job, err); }

/* ---- Sums ---- */

void spk_quant_error_add(spk_quant_error *sums, const float *x, const float *y, uint64_t count) {
    best_build()->error_add(sums, x, y, count);
}

void spk_quant_error_merge(spk_quant_error *sums, const spk_quant_error *more) {
    sums->error_square_sum += more->error_square_sum;
    sums->source_square_sum += more->source_square_sum;
    sums->result_square_sum += more->result_square_sum;
    sums->product_sum += more->product_sum;
    if (more->max_abs_error > sums->max_abs_error) sums->max_abs_error = more->max_abs_error;
}

double spk_quant_error_relative_rmse(const spk_quant_error *sums) {
    if (sums->error_square_sum == 0) return 0;
    return sqrt(sums->error_square_sum / sums->source_square_sum);
}

double spk_quant_error_cosine(const spk_quant_error *sums) {
    double norms = sqrt(sums->source_square_sum) * sqrt(sums->result_square_sum);
    if (sums->source_square_sum == 0 && sums->result_square_sum == 0) return 1;
    return norms > 0 ? sums->product_sum / norms : 0;
}
