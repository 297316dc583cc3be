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

#include "requant/quant_blocks_internal.h"

static bool always_usable(void) { return true; }

#if defined(__x86_64__)
static bool has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static bool has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

#define BUILD(name, usable) \
    { #name, usable, spk_quant_affine_##name, spk_quant_q6_##name, spk_quant_q8_##name, spk_quant_error_add_##name }
const spk_quant_build spk_quant_builds[] = {
    BUILD(plain, always_usable),
#if defined(__x86_64__)
    BUILD(avx2, has_avx2),
    BUILD(avx512, has_avx512),
#endif
};
const size_t spk_quant_build_count = sizeof spk_quant_builds / sizeof *spk_quant_builds;

/* ---- Tiles to blocks, by the search of a build; without one (NULL) only what needs none, else false ---- */

static bool make_q4_k(const spk_quant_build *build, const spk_quant_tile *tile, spk_quant_effort effort, void *out) {
    spk_quant_affine_fit fit;
    spk_block_q4_k block;
    if (!spk_quant_affine_exact(tile, 15, &fit)) {
        if (build == NULL) return false;
        build->affine(tile, 15, effort, &fit);
    }
    spk_quant_pack_q4_k(&fit, 0, 1, &block);
    memcpy(out, &block, sizeof block);
    return true;
}

static bool make_q5_k(const spk_quant_build *build, const spk_quant_tile *tile, spk_quant_effort effort, void *out) {
    spk_quant_affine_fit fit;
    spk_block_q5_k block;
    if (!spk_quant_affine_exact(tile, 31, &fit)) {
        if (build == NULL) return false;
        build->affine(tile, 31, effort, &fit);
    }
    spk_quant_pack_q5_k(&fit, 0, 1, &block);
    memcpy(out, &block, sizeof block);
    return true;
}

static bool make_q6_k(const spk_quant_build *build, const spk_quant_tile *tile, spk_quant_effort effort, void *out) {
    spk_quant_q6_fit fit;
    spk_block_q6_k block;
    if (!spk_quant_q6_exact(tile, &fit)) {
        if (build == NULL) return false;
        build->q6(tile, effort, &fit);
    }
    spk_quant_pack_q6_k(&fit, 0, 1, &block);
    memcpy(out, &block, sizeof block);
    return true;
}

static bool make_q8_0(const spk_quant_build *build, const spk_quant_tile *tile, spk_quant_effort effort, void *out) {
    spk_quant_q8_fit fit;
    spk_block_q8_0 blocks[SPK_QUANT_LANES];
    if (!spk_quant_q8_exact(tile, &fit)) {
        if (build == NULL) return false;
        build->q8(tile, effort, &fit);
    }
    spk_quant_pack_q8_0(&fit, 0, 1, blocks);
    memcpy(out, blocks, sizeof blocks);
    return true;
}

/* ---- Targets ---- */

typedef struct {
    uint32_t        type;
    spk_quant_shape shape;
    bool          (*make)(const spk_quant_build *build, const spk_quant_tile *tile, spk_quant_effort effort, void *out);
} target_info;

#define AFFINE_LOW (-SPK_QUANT_F16_MAX * SPK_QUANT_SCALE_MAX)
#define AFFINE_HIGH(code_max) (SPK_QUANT_F16_MAX * SPK_QUANT_SCALE_MAX * (code_max))
#define Q6_HIGH (SPK_QUANT_F16_MAX * SPK_QUANT_Q6_SCALE_MAX * -SPK_QUANT_Q6_CODE_MIN)
#define Q8_HIGH (SPK_QUANT_F16_MAX * SPK_QUANT_Q8_CODE_MAX)

static const target_info targets[] = {
    { SPK_TYPE_Q4_K, { 32, AFFINE_LOW, AFFINE_HIGH(15) }, make_q4_k },
    { SPK_TYPE_Q5_K, { 32, AFFINE_LOW, AFFINE_HIGH(31) }, make_q5_k },
    { SPK_TYPE_Q6_K, { 16, -Q6_HIGH, Q6_HIGH }, make_q6_k },
    { SPK_TYPE_Q8_0, { 32, -Q8_HIGH, Q8_HIGH }, make_q8_0 },
};

static const target_info *target_find(uint32_t type) {
    for (size_t i = 0; i < sizeof targets / sizeof *targets; i++)
        if (targets[i].type == type) return &targets[i];
    return NULL;
}

const spk_quant_shape *spk_quant_shape_of(uint32_t type) { return &target_find(type)->shape; }

bool spk_quant_can_make(uint32_t type) { return target_find(type) != NULL; }

/* ---- Rows to tiles ---- */

typedef float v4 __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int v4i __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (v4i){ __VA_ARGS__ })
#endif

/* Four rows of four to four columns: out[i * out_stride + lane] = in[lane * in_stride + i]. */
static inline void turn_four(const float *in, size_t in_stride, float *out, size_t out_stride) {
    v4 row[4], pair[4];
    for (size_t k = 0; k < 4; k++) memcpy(&row[k], in + k * in_stride, sizeof row[k]);
    for (size_t k = 0; k < 2; k++) {
        pair[k] = SHUFFLE(row[2 * k], row[2 * k + 1], 0, 4, 1, 5);
        pair[k + 2] = SHUFFLE(row[2 * k], row[2 * k + 1], 2, 6, 3, 7);
    }
    for (size_t k = 0; k < 4; k += 2) {
        row[k] = SHUFFLE(pair[k], pair[k + 1], 0, 1, 4, 5);
        row[k + 1] = SHUFFLE(pair[k], pair[k + 1], 2, 3, 6, 7);
    }
    for (size_t k = 0; k < 4; k++) memcpy(out + k * out_stride, &row[k], sizeof row[k]);
}

/* Sub-block s goes to lane s % 8, from row s / 8 * (its weights). */
static void turn(const float values[SPK_SUPERBLOCK], uint32_t sub_block_weights,
                 float lanes[SPK_QUANT_DEPTH][SPK_QUANT_LANES]) {
    for (uint32_t row = 0; row < SPK_QUANT_DEPTH; row += 4) {
        uint32_t group = row / sub_block_weights, i = row % sub_block_weights;
        const float *first = values + group * SPK_QUANT_LANES * sub_block_weights + i;
        for (uint32_t lane = 0; lane < SPK_QUANT_LANES; lane += 4)
            turn_four(first + lane * sub_block_weights, sub_block_weights, &lanes[row][lane], SPK_QUANT_LANES);
    }
}

/* False if all weights are 0. */
static bool fill_weights(const float *weights, uint32_t count, const target_info *target, spk_quant_tile *tile) {
    float clipped[SPK_SUPERBLOCK] = { 0 }, low = target->shape.low, high = target->shape.high;
    uint32_t bits[SPK_SUPERBLOCK], any = 0;
    for (uint32_t c = 0; c < count; c++) clipped[c] = spk_quant_clip(weights[c], low, high);
    memcpy(bits, clipped, sizeof bits);
    for (uint32_t c = 0; c < SPK_SUPERBLOCK; c++) any |= bits[c] << 1;    /* without the sign */
    turn(clipped, target->shape.sub_block_weights, tile->x);
    return any != 0;
}

static void fill_importance(const float *importance, double scale, uint32_t count, const target_info *target,
                            spk_quant_tile *tile) {
    float scaled[SPK_SUPERBLOCK];
    for (uint32_t c = 0; c < SPK_SUPERBLOCK; c++)
        scaled[c] = importance != NULL && c < count ? spk_quant_scaled_importance(importance[c], scale) : 1.0f;
    turn(scaled, target->shape.sub_block_weights, tile->w);
    tile->weighted = importance != NULL;
}

static spk_status check_finite(const spk_quant_job *job, spk_error *err) {
    for (uint64_t row = 0; row < job->row_count; row++) {
        const float *weights = job->weights + row * job->col_count;
        uint32_t found = 0;
        for (uint64_t c = 0; c < job->col_count; c++) {
            uint32_t bits;
            memcpy(&bits, &weights[c], sizeof bits);
            found |= (bits & 0x7f800000u) == 0x7f800000u;
        }
        if (!found) continue;
        for (uint64_t c = 0; c < job->col_count; c++)
            if (!isfinite(weights[c]))
                return spk_fail(err, SPK_E_NONFINITE, "row %" PRIu64 ", column %" PRIu64 ": weight is %s", row, c,
                                isnan(weights[c]) ? "NaN" : "infinite");
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

spk_status spk_quant_check(const spk_quant_job *job, double *scale, spk_error *err) {
    assert(target_find(job->type) != NULL && job->row_count >= 1);
    const spk_type_info *info = spk_type_find(job->type);
    if (job->col_count == 0 || job->col_count % info->block_weights != 0)
        return spk_fail(err, SPK_E_SHAPE, "%" PRIu64 " columns do not make blocks of %u, as %s needs", job->col_count,
                        (unsigned)info->block_weights, info->name);
    SPK_TRY(check_finite(job, err));
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
    uint8_t blocks[SPK_QUANT_BLOCK_BYTES_MAX];
    if (fill_weights(job->weights + row * job->col_count + col, count, target, &tile) &&
        target->make(NULL, &tile, job->effort, blocks))
        memcpy(blocks_at(job, row, col), blocks, bytes_of(job, count));
}

spk_status spk_quantize_with(const spk_quant_build *build, const spk_quant_job *job, spk_error *err) {
    const target_info *target = target_find(job->type);
    double scale;
    SPK_TRY(spk_quant_check(job, &scale, err));
    spk_quant_tile tile;
    uint8_t blocks[SPK_QUANT_BLOCK_BYTES_MAX];
    /* Columns outside, rows inside: a tile's importance is turned once for all rows. */
    for (uint64_t col = 0; col < job->col_count; col += SPK_SUPERBLOCK) {
        uint32_t count = columns_of(job, col);
        size_t count_bytes = bytes_of(job, count);
        fill_importance(job->importance != NULL ? job->importance + col : NULL, scale, count, target, &tile);
        for (uint64_t row = 0; row < job->row_count; row++) {
            uint8_t *out = blocks_at(job, row, col);
            if (fill_weights(job->weights + row * job->col_count + col, count, target, &tile)) {
                (void)target->make(build, &tile, job->effort, blocks);
                memcpy(out, blocks, count_bytes);
            } else {
                make_zeros(target, out, count_bytes);
            }
        }
    }
    return SPK_OK;
}

/* The last that this CPU can run. */
static const spk_quant_build *best_build(void) {
    const spk_quant_build *build = &spk_quant_builds[0];
    for (size_t i = 1; i < spk_quant_build_count; i++)
        if (spk_quant_builds[i].usable()) build = &spk_quant_builds[i];
    return build;
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
