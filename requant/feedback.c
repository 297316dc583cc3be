/* requant/feedback.c - coordinate descent on the codes of Q4_K and Q5_K blocks.  See feedback.h.
 *
 * For a row with error e the gradient g = M e is kept up to date, so that the best new value of one code is known at
 * once: changing weight c by s changes the error by 2 s g[c] + s^2 M[c][c].  Rows first settle by themselves, with
 * their scales, mins and factors, which are tried the same way.  With a metric, codes are then chosen for all rows
 * together: there the gradient is G E M.  It is kept exact for a block of columns while their codes are chosen; the
 * other columns get what has changed afterwards, in one product.
 */
#include "requant/feedback.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/blocks.h"
#include "formats/dequant.h"
#include "requant/quant_blocks_internal.h"

enum {
    SUB = 32, SUBS = SPK_SUPERBLOCK / SUB,
    SWEEPS_MAX = 30,               /* over the codes of a row, until none changes */
    ROUNDS_MAX = 3,                /* codes, then scales and factors, again */
    METRIC_SWEEPS_MAX = 6,
    METRIC_COLS = 8                /* columns whose gradient is exact at a time */
};

/* A row of blocks, taken apart. */
typedef struct {
    float   *d, *dmin;             /* [cols / 256] */
    uint8_t *scale, *min, *code;   /* [cols / 32] twice, [cols] */
    float   *decoded;              /* [cols] */
} row;

typedef struct {
    const spk_feedback_job *job;
    uint64_t rows, cols;
    int      code_max;
    row     *row;                  /* [rows] */
    float   *gradient, *change;    /* [cols] each: of the row at hand, and scratch */
    void    *memory;
} work;

/* ---- Blocks ---- */

static void take_scales(const uint8_t packed[12], uint8_t *scale, uint8_t *min) {
    for (int j = 0; j < SUBS; j++) spk_k4_scale_min(packed, j, &scale[j], &min[j]);
}

/* Weight 64 c + l has the low nibble of byte 32 c + l, weight 64 c + 32 + l the high one; bit k of high byte l belongs to
 * weight 32 k + l. */
static void take_codes(const uint8_t *nibbles, const uint8_t *high, uint8_t *code) {
    for (int i = 0; i < SPK_SUPERBLOCK; i++) {
        int sub = i / SUB, l = i % SUB;
        code[i] = (uint8_t)(nibbles[sub / 2 * SUB + l] >> 4 * (sub % 2) & 15);
        if (high != NULL) code[i] |= (uint8_t)((high[l] >> sub & 1) << 4);
    }
}

static void put_codes(const uint8_t *code, uint8_t *nibbles, uint8_t *high) {
    memset(nibbles, 0, SPK_SUPERBLOCK / 2);
    if (high != NULL) memset(high, 0, SUB);
    for (int i = 0; i < SPK_SUPERBLOCK; i++) {
        int sub = i / SUB, l = i % SUB;
        nibbles[sub / 2 * SUB + l] |= (uint8_t)((code[i] & 15) << 4 * (sub % 2));
        if (high != NULL) high[l] |= (uint8_t)(code[i] >> 4 << sub);
    }
}

static void take_block(const void *blocks, uint32_t type, uint64_t b, row *r) {
    uint8_t *scale = r->scale + b * SUBS, *min = r->min + b * SUBS, *code = r->code + b * SPK_SUPERBLOCK;
    if (type == SPK_TYPE_Q4_K) {
        spk_block_q4_k block;
        memcpy(&block, (const uint8_t *)blocks + b * sizeof block, sizeof block);
        r->d[b] = spk_f16_to_f32(block.d);
        r->dmin[b] = spk_f16_to_f32(block.dmin);
        take_scales(block.scales, scale, min);
        take_codes(block.qs, NULL, code);
    } else {
        spk_block_q5_k block;
        memcpy(&block, (const uint8_t *)blocks + b * sizeof block, sizeof block);
        r->d[b] = spk_f16_to_f32(block.d);
        r->dmin[b] = spk_f16_to_f32(block.dmin);
        take_scales(block.scales, scale, min);
        take_codes(block.qs, block.qh, code);
    }
}

static void put_block(const row *r, uint32_t type, uint64_t b, void *blocks) {
    const uint8_t *scale = r->scale + b * SUBS, *min = r->min + b * SUBS, *code = r->code + b * SPK_SUPERBLOCK;
    if (type == SPK_TYPE_Q4_K) {
        spk_block_q4_k block = { .d = spk_f32_to_f16(r->d[b]), .dmin = spk_f32_to_f16(r->dmin[b]) };
        spk_quant_pack_scales(scale, min, 0, 1, block.scales);
        put_codes(code, block.qs, NULL);
        memcpy((uint8_t *)blocks + b * sizeof block, &block, sizeof block);
    } else {
        spk_block_q5_k block = { .d = spk_f32_to_f16(r->d[b]), .dmin = spk_f32_to_f16(r->dmin[b]) };
        spk_quant_pack_scales(scale, min, 0, 1, block.scales);
        put_codes(code, block.qs, block.qh);
        memcpy((uint8_t *)blocks + b * sizeof block, &block, sizeof block);
    }
}

static float step_of(const row *r, uint64_t col) {
    return r->d[col / SPK_SUPERBLOCK] * (float)r->scale[col / SUB];
}

/* Weights of one super-block with other factors. */
static void decode(const row *r, uint64_t b, float d, float dmin, float *out) {
    for (uint64_t i = 0; i < SPK_SUPERBLOCK; i++) {
        uint64_t sub = b * SUBS + i / SUB;
        out[i] = d * (float)r->scale[sub] * (float)r->code[b * SPK_SUPERBLOCK + i] - dmin * (float)r->min[sub];
    }
}

/* ---- One row ---- */

static const float *moment_row(const work *w, uint64_t col) { return w->job->moment + col * w->cols; }

/* to += factor * from. */
static void add(float *restrict to, const float *restrict from, float factor, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) to[i] += factor * from[i];
}

/* out = M v, where v is 0 outside [begin, begin + count): v points to that part. */
static void product(const work *w, const float *v, uint64_t begin, uint64_t count, float *out) {
    memset(out, 0, w->cols * sizeof *out);
    for (uint64_t i = 0; i < count; i++)
        if (v[i] != 0) add(out, moment_row(w, begin + i), v[i], w->cols);
}

/* The code that is best where the gradient is g and the curvature m. */
static int best_code(int code, int code_max, float step, float g, float m) {
    float aim = (float)code - g / (m * step);
    if (!(aim > 0)) return 0;
    return aim >= (float)code_max ? code_max : (int)lrintf(aim);
}

/* Every code in turn, until none can be bettered; returns how many were changed. */
static uint64_t settle_codes(work *w, row *r) {
    uint64_t total = 0;
    for (int sweep = 0; sweep < SWEEPS_MAX; sweep++) {
        uint64_t changed = 0;
        for (uint64_t c = 0; c < w->cols; c++) {
            float step = step_of(r, c), g = w->gradient[c], m = moment_row(w, c)[c];
            if (!(step > 0)) continue;
            int code = best_code(r->code[c], w->code_max, step, g, m), more = code - r->code[c];
            float by = (float)more * step;
            if (more == 0 || !(by * (2 * g + by * m) < -1e-6f * fabsf(by * g))) continue;
            r->code[c] = (uint8_t)code;
            r->decoded[c] += by;
            add(w->gradient, moment_row(w, c), by, w->cols);
            changed++;
        }
        total += changed;
        if (changed == 0) break;
    }
    return total;
}

/* Changes decoded[begin ..] by `by` if that lowers the error; change is scratch. */
static bool take_if_better(work *w, row *r, const float *by, uint64_t begin, uint64_t count) {
    product(w, by, begin, count, w->change);
    double gain = 0;
    for (uint64_t i = 0; i < count; i++)
        gain += (double)by[i] * (2 * (double)w->gradient[begin + i] + (double)w->change[begin + i]);
    if (!(gain < 0)) return false;
    for (uint64_t i = 0; i < count; i++) r->decoded[begin + i] += by[i];
    add(w->gradient, w->change, 1, w->cols);
    return true;
}

/* Scale and min of a sub-block to neighbouring ones, codes as they are. */
static void try_scales(work *w, row *r, uint64_t sub) {
    static const int moves[][2] = { { 1, 0 }, { -1, 0 }, { 0, 1 }, { 0, -1 }, { 1, 1 }, { -1, -1 }, { 1, -1 }, { -1, 1 } };
    float d = r->d[sub / SUBS], dmin = r->dmin[sub / SUBS], by[SUB];
    for (size_t k = 0; k < sizeof moves / sizeof *moves; k++) {
        int scale = r->scale[sub] + moves[k][0], min = r->min[sub] + moves[k][1];
        if (scale < 0 || scale > SPK_QUANT_SCALE_MAX || min < 0 || min > SPK_QUANT_SCALE_MAX) continue;
        for (uint64_t i = 0; i < SUB; i++)
            by[i] = d * (float)moves[k][0] * (float)r->code[sub * SUB + i] - dmin * (float)moves[k][1];
        if (!take_if_better(w, r, by, sub * SUB, SUB)) continue;
        r->scale[sub] = (uint8_t)scale;
        r->min[sub] = (uint8_t)min;
    }
}

/* d and dmin of a super-block by least squares, codes as they are. */
static void try_factors(work *w, row *r, uint64_t b) {
    float slope[SPK_SUPERBLOCK], depth[SPK_SUPERBLOCK], by[SPK_SUPERBLOCK];
    uint64_t begin = b * SPK_SUPERBLOCK;
    decode(r, b, 1, 0, slope);
    decode(r, b, 0, 1, depth);
    double ss = 0, sd = 0, dd = 0, gs = 0, gd = 0;
    product(w, slope, begin, SPK_SUPERBLOCK, w->change);
    for (uint64_t i = 0; i < SPK_SUPERBLOCK; i++) {
        ss += (double)slope[i] * (double)w->change[begin + i];
        sd += (double)depth[i] * (double)w->change[begin + i];
        gs += (double)slope[i] * (double)w->gradient[begin + i];
        gd += (double)depth[i] * (double)w->gradient[begin + i];
    }
    product(w, depth, begin, SPK_SUPERBLOCK, w->change);
    for (uint64_t i = 0; i < SPK_SUPERBLOCK; i++) dd += (double)depth[i] * (double)w->change[begin + i];
    double determinant = ss * dd - sd * sd;
    if (!(determinant > 1e-9 * ss * dd)) return;
    double d = (double)r->d[b] - (gs * dd - gd * sd) / determinant;
    double dmin = (double)r->dmin[b] - (gd * ss - gs * sd) / determinant;
    if (!(d > 0 && dmin >= 0 && d < (double)SPK_QUANT_F16_MAX && dmin < (double)SPK_QUANT_F16_MAX)) return;
    float new_d = spk_f16_to_f32(spk_f32_to_f16((float)d)), new_dmin = spk_f16_to_f32(spk_f32_to_f16((float)dmin));
    if (!(new_d > 0)) return;
    decode(r, b, new_d, new_dmin, by);
    for (uint64_t i = 0; i < SPK_SUPERBLOCK; i++) by[i] -= r->decoded[begin + i];
    if (!take_if_better(w, r, by, begin, SPK_SUPERBLOCK)) return;
    r->d[b] = new_d;
    r->dmin[b] = new_dmin;
}

static void settle_row(work *w, row *r, const float *weights) {
    float *error = w->change;
    for (uint64_t c = 0; c < w->cols; c++) error[c] = r->decoded[c] - weights[c];
    memset(w->gradient, 0, w->cols * sizeof *w->gradient);
    for (uint64_t c = 0; c < w->cols; c++) add(w->gradient, moment_row(w, c), error[c], w->cols);
    (void)settle_codes(w, r);
    for (int round = 0; round < ROUNDS_MAX; round++) {
        for (uint64_t sub = 0; sub < w->cols / SUB; sub++) try_scales(w, r, sub);
        for (uint64_t b = 0; b < w->cols / SPK_SUPERBLOCK; b++) try_factors(w, r, b);
        if (settle_codes(w, r) == 0) break;
    }
}

/* ---- All rows together ---- */

typedef struct {
    float *gradient;               /* [rows][cols]: G E M */
    float *near;                   /* [rows][METRIC_COLS]: the block's part of it, kept exact */
    float *moved;                  /* [rows][METRIC_COLS]: G times the changes of the block's columns */
} joint;

/* out[rows][cols] = G E M. */
static void joint_gradient(const work *w, float *scratch, float *out) {
    const float *metric = w->job->metric, *weights = w->job->job.weights;
    memset(scratch, 0, w->rows * w->cols * sizeof *scratch);
    memset(out, 0, w->rows * w->cols * sizeof *out);
    for (uint64_t r = 0; r < w->rows; r++)
        for (uint64_t c = 0; c < w->cols; c++)
            add(scratch + r * w->cols, moment_row(w, c), w->row[r].decoded[c] - weights[r * w->cols + c], w->cols);
    for (uint64_t r = 0; r < w->rows; r++)
        for (uint64_t k = 0; k < w->rows; k++)
            add(out + r * w->cols, scratch + k * w->cols, metric[r * w->rows + k], w->cols);
}

/* Codes of columns [begin, begin + METRIC_COLS) of every row; returns how many were changed. */
static uint64_t settle_columns(work *w, joint *j, uint64_t begin) {
    const float *metric = w->job->metric;
    uint64_t changed = 0;
    for (uint64_t r = 0; r < w->rows; r++)
        memcpy(j->near + r * METRIC_COLS, j->gradient + r * w->cols + begin, METRIC_COLS * sizeof(float));
    memset(j->moved, 0, w->rows * METRIC_COLS * sizeof(float));
    for (uint64_t r = 0; r < w->rows; r++)
        for (uint64_t k = 0; k < METRIC_COLS; k++) {
            row *own = &w->row[r];
            uint64_t c = begin + k;
            float step = step_of(own, c), g = j->near[r * METRIC_COLS + k];
            float m = moment_row(w, c)[c] * metric[r * w->rows + r];
            if (!(step > 0)) continue;
            int code = best_code(own->code[c], w->code_max, step, g, m), more = code - own->code[c];
            float by = (float)more * step;
            if (more == 0 || !(by * (2 * g + by * m) < -1e-6f * fabsf(by * g))) continue;
            own->code[c] = (uint8_t)code;
            own->decoded[c] += by;
            changed++;
            for (uint64_t a = 0; a < w->rows; a++) {
                float pull = metric[r * w->rows + a] * by;     /* symmetric: column r is row r */
                j->moved[a * METRIC_COLS + k] += pull;
                add(j->near + a * METRIC_COLS, moment_row(w, c) + begin, pull, METRIC_COLS);
            }
        }
    if (changed == 0) return 0;
    for (uint64_t r = 0; r < w->rows; r++)
        for (uint64_t k = 0; k < METRIC_COLS; k++)
            add(j->gradient + r * w->cols, moment_row(w, begin + k), j->moved[r * METRIC_COLS + k], w->cols);
    return changed;
}

static spk_status settle_jointly(work *w, spk_error *err) {
    joint j = { .gradient = malloc(w->rows * w->cols * sizeof(float)),
                .near = malloc(w->rows * METRIC_COLS * sizeof(float)),
                .moved = malloc(w->rows * METRIC_COLS * sizeof(float)) };
    float *scratch = malloc(w->rows * w->cols * sizeof(float));
    bool has_memory = j.gradient && j.near && j.moved && scratch;
    if (has_memory) joint_gradient(w, scratch, j.gradient);
    for (int sweep = 0; sweep < METRIC_SWEEPS_MAX && has_memory; sweep++) {
        uint64_t changed = 0;
        for (uint64_t c = 0; c < w->cols; c += METRIC_COLS) changed += settle_columns(w, &j, c);
        if (changed * 1000 < w->rows * w->cols / 4) break;     /* a quarter of a per mille: not worth another sweep */
    }
    free(j.gradient);
    free(j.near);
    free(j.moved);
    free(scratch);
    return has_memory ? SPK_OK : spk_fail(err, SPK_E_MEMORY, "out of memory for the gradient of a matrix");
}

/* ---- The whole ---- */

bool spk_feedback_can_make(uint32_t type) { return type == SPK_TYPE_Q4_K || type == SPK_TYPE_Q5_K; }

static bool allocate(work *w) {
    uint64_t blocks = w->cols / SPK_SUPERBLOCK, subs = w->cols / SUB;
    uint64_t floats = w->rows * (2 * blocks + w->cols) + 2 * w->cols, bytes = w->rows * (2 * subs + w->cols);
    w->row = calloc(w->rows, sizeof *w->row);
    w->memory = malloc(floats * sizeof(float) + bytes);
    if (w->row == NULL || w->memory == NULL) return false;
    float *at = w->memory;
    w->gradient = at, at += w->cols;
    w->change = at, at += w->cols;
    uint8_t *byte = (uint8_t *)(at + w->rows * (2 * blocks + w->cols));
    for (uint64_t r = 0; r < w->rows; r++) {
        row *own = &w->row[r];
        own->d = at, at += blocks;
        own->dmin = at, at += blocks;
        own->decoded = at, at += w->cols;
        own->scale = byte, byte += subs;
        own->min = byte, byte += subs;
        own->code = byte, byte += w->cols;
    }
    return true;
}

static spk_status improve(work *w, spk_error *err) {
    const spk_quant_job *job = &w->job->job;
    uint64_t blocks = w->cols / SPK_SUPERBLOCK;
    const spk_type_info *info = spk_type_find(job->type);
    for (uint64_t r = 0; r < w->rows; r++) {
        row *own = &w->row[r];
        uint8_t *out = (uint8_t *)job->blocks + r * blocks * info->block_bytes;
        for (uint64_t b = 0; b < blocks; b++) {
            take_block(out, job->type, b, own);
            decode(own, b, own->d[b], own->dmin[b], own->decoded + b * SPK_SUPERBLOCK);
        }
        settle_row(w, own, job->weights + r * w->cols);
    }
    if (w->job->metric != NULL) SPK_TRY(settle_jointly(w, err));
    for (uint64_t r = 0; r < w->rows; r++)
        for (uint64_t b = 0; b < blocks; b++)
            put_block(&w->row[r], job->type, b, (uint8_t *)job->blocks + r * blocks * info->block_bytes);
    return SPK_OK;
}

spk_status spk_quantize_feedback(const spk_feedback_job *job, spk_error *err) {
    assert(spk_feedback_can_make(job->job.type));
    SPK_TRY(spk_quantize(&job->job, err));
    work w = { .job = job, .rows = job->job.row_count, .cols = job->job.col_count,
               .code_max = job->job.type == SPK_TYPE_Q4_K ? 15 : 31 };
    spk_status status = allocate(&w) ? improve(&w, err)
                                     : spk_fail(err, SPK_E_MEMORY, "out of memory for the codes of a matrix");
    free(w.row);
    free(w.memory);
    return status;
}
