/* requant/quant_exact.c - weights that a block can hold as they are, because they were decoded from such a block.
 *
 * A search looks for small errors, not for none: it would find a good grid near the one that a block was made of, and
 * requantizing a block to its own type would lose.  Here the grid is looked for by greatest common divisors, in the way
 * of Euclid, on floats: the remainders of decoded weights vanish but for rounding, those of others do not.  Weights
 * that are on no grid are told apart after a few divisions.
 *
 * Nothing is believed: a fit counts only if every weight comes back within TOLERANCE of the tile's largest.
 */
#include "requant/quant_internal.h"

#include <math.h>

#define TOLERANCE 0x1p-20f      /* of the largest weight: a few roundings of a decoder */
#define FACTOR_TOLERANCE 0x1p-17f   /* relative: how near a computed d is to an F16, if it is one */

static float nearest(float v) { return (v + 12582912.0f) - 12582912.0f; }   /* |v| < 2^22 */

static float larger(float a, float b) { return a > b ? a : b; }

static float smaller(float a, float b) { return a < b ? a : b; }

static float half_of(float v) { return spk_f16_to_f32(spk_f32_to_f16(v)); }

/* v[0], v[stride], ...: the greatest unit of which all are multiples but for `slack`; 0 if that is below `least` or if
 * all are 0.  slack is well below least. */
static float common_unit(const float *v, size_t count, size_t stride, float least, float slack) {
    float unit = 0;
    for (size_t i = 0; i < count; i++) {
        float rest = fabsf(v[i * stride]);
        while (rest > slack) {
            float remainder = fabsf(unit - rest * nearest(unit / rest));
            unit = rest;
            rest = remainder;
            if (unit < least) return 0;
        }
    }
    return unit;
}

static float largest_magnitude(const float *v, size_t count, size_t stride) {
    float largest = 0;
    for (size_t i = 0; i < count; i++) largest = larger(largest, fabsf(v[i * stride]));
    return largest;
}

/* unit / divisor as the F16 that it must be; 0 if it is none. */
static float factor_of(float unit, int divisor) {
    float wanted = unit / (float)divisor, factor = half_of(wanted);
    return factor > 0 && factor <= SPK_QUANT_F16_MAX && fabsf(factor - wanted) <= FACTOR_TOLERANCE * wanted ? factor : 0;
}

/* multiple / unit if that is a whole number from low to high; else low - 1. */
static int whole_ratio(float multiple, float unit, float slack, int low, int high) {
    float ratio = multiple / unit;
    if (!(ratio > (float)low - 0.5f && ratio < (float)high + 0.5f)) return low - 1;
    float whole = nearest(ratio);
    return fabsf(whole * unit - multiple) <= slack ? (int)whole : low - 1;
}

/* ---- Q8_0 ---- */

static bool q8_lane_exact(const spk_quant_tile *tile, size_t lane, spk_quant_q8_fit *out) {
    const float *x = &tile->x[0][lane];
    float peak = largest_magnitude(x, SPK_QUANT_DEPTH, SPK_QUANT_LANES), slack = peak * TOLERANCE;
    float unit = common_unit(x, SPK_QUANT_DEPTH, SPK_QUANT_LANES, peak / (SPK_QUANT_Q8_CODE_MAX + 0.5f), slack);
    out->d[lane] = 0;
    for (size_t i = 0; i < SPK_QUANT_DEPTH; i++) out->code[i][lane] = 0;
    if (peak == 0) return true;
    if (unit == 0) return false;
    for (int divisor = 1; peak * (float)divisor <= unit * (SPK_QUANT_Q8_CODE_MAX + 0.5f); divisor++) {
        float d = factor_of(unit, divisor);
        size_t i = 0;
        for (; d > 0 && i < SPK_QUANT_DEPTH; i++) {
            int code = whole_ratio(tile->x[i][lane], d, slack, -SPK_QUANT_Q8_CODE_MAX, SPK_QUANT_Q8_CODE_MAX);
            if (code < -SPK_QUANT_Q8_CODE_MAX) break;
            out->code[i][lane] = (int8_t)code;
        }
        if (i < SPK_QUANT_DEPTH) continue;
        out->d[lane] = spk_f32_to_f16(d);
        return true;
    }
    return false;
}

bool spk_quant_q8_exact(const spk_quant_tile *tile, spk_quant_q8_fit *out) {
    for (size_t lane = 0; lane < SPK_QUANT_LANES; lane++)
        if (!q8_lane_exact(tile, lane, out)) return false;
    return true;
}

/* ---- Q6_K ---- */

enum { Q6_GROUPS = 2, Q6_SUB_BLOCKS = 2 * SPK_QUANT_LANES, Q6_DEPTH = SPK_QUANT_DEPTH / Q6_GROUPS };

static const float *q6_sub_block(const spk_quant_tile *tile, size_t s) {
    return &tile->x[s / SPK_QUANT_LANES * Q6_DEPTH][s % SPK_QUANT_LANES];
}

static bool q6_codes(const spk_quant_tile *tile, size_t s, float step, float slack, spk_quant_q6_fit *out) {
    const float *x = q6_sub_block(tile, s);
    for (size_t i = 0; i < Q6_DEPTH; i++) {
        int code = whole_ratio(x[i * SPK_QUANT_LANES], step, slack, SPK_QUANT_Q6_CODE_MIN, SPK_QUANT_Q6_CODE_MAX);
        if (code < SPK_QUANT_Q6_CODE_MIN) return false;
        out->code[s / SPK_QUANT_LANES * Q6_DEPTH + i][s % SPK_QUANT_LANES] = (int8_t)code;
    }
    return true;
}

/* The unit of a sub-block is |d * scale| * (common divisor of its codes).  Either sign of the scale may be the one that
 * puts a weight at -32, and other writers use -128, and a negative d to get its opposite. */
static bool q6_sub_block_exact(const spk_quant_tile *tile, size_t s, float unit, float d, float slack,
                               spk_quant_q6_fit *out) {
    out->scale[s] = 0;
    if (unit == 0) return q6_codes(tile, s, 1.0f, slack, out);
    for (int divisor = 1; divisor <= -SPK_QUANT_Q6_CODE_MIN; divisor++) {
        int magnitude = whole_ratio(unit / (float)divisor, fabsf(d), slack, 1, -INT8_MIN);
        if (magnitude < 1) continue;
        for (int scale = -magnitude; scale <= magnitude; scale += 2 * magnitude) {
            if (scale > INT8_MAX || !q6_codes(tile, s, d * (float)scale, slack, out)) continue;
            out->scale[s] = (int8_t)scale;
            return true;
        }
    }
    return false;
}

bool spk_quant_q6_exact(const spk_quant_tile *tile, spk_quant_q6_fit *out) {
    float units[Q6_SUB_BLOCKS], most = 0, peak = 0;
    for (size_t s = 0; s < Q6_SUB_BLOCKS; s++) {
        const float *x = q6_sub_block(tile, s);
        float high = largest_magnitude(x, Q6_DEPTH, SPK_QUANT_LANES);
        units[s] = common_unit(x, Q6_DEPTH, SPK_QUANT_LANES, high / (0.5f - SPK_QUANT_Q6_CODE_MIN), high * TOLERANCE);
        if (units[s] == 0 && high > 0) return false;
        most = larger(most, units[s]);
        peak = larger(peak, high);
    }
    float unit = common_unit(units, Q6_SUB_BLOCKS, 1, most / (-INT8_MIN * (0.5f - SPK_QUANT_Q6_CODE_MIN)),
                             most * TOLERANCE / -INT8_MIN);
    if (unit == 0) return false;
    for (int divisor = 1; divisor <= -INT8_MIN; divisor++)
        for (int sign = 1; sign >= -1; sign -= 2) {
            float d = factor_of(unit, divisor) * (float)sign;
            size_t s = 0;
            while (d != 0 && s < Q6_SUB_BLOCKS && q6_sub_block_exact(tile, s, units[s], d, peak * TOLERANCE, out)) s++;
            if (s < Q6_SUB_BLOCKS) continue;
            out->d = spk_f32_to_f16(d);
            return true;
        }
    return false;
}

/* ---- Q4_K and Q5_K ---- */

typedef struct {
    const spk_quant_tile *tile;
    int   code_max;
    float slack;                          /* of one weight */
    float low[SPK_QUANT_LANES], range[SPK_QUANT_LANES], unit[SPK_QUANT_LANES];
    int   span[SPK_QUANT_LANES];          /* codes from the smallest weight to the largest, once scales are known */
    int   scale[SPK_QUANT_LANES];
    float d;
} affine_grid;

/* Units of all lanes, or false; a lane of equal weights has unit 0. */
static bool affine_units(affine_grid *grid) {
    float z[SPK_QUANT_DEPTH];
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) {
        const float *x = &grid->tile->x[0][j];
        float low = x[0], high = x[0];
        for (size_t i = 1; i < SPK_QUANT_DEPTH; i++) {
            low = smaller(low, x[i * SPK_QUANT_LANES]);
            high = larger(high, x[i * SPK_QUANT_LANES]);
        }
        for (size_t i = 0; i < SPK_QUANT_DEPTH; i++) z[i] = x[i * SPK_QUANT_LANES] - low;
        float range = high - low, slack = larger(fabsf(low), fabsf(high)) * TOLERANCE;
        float least = range / ((float)grid->code_max + 0.5f);
        grid->low[j] = low;
        grid->range[j] = range;
        grid->unit[j] = 0;
        if (range <= slack) continue;
        if (slack * 16 > least) return false;                /* too little of the weights is left to be sure */
        float unit = common_unit(z, SPK_QUANT_DEPTH, 1, least, slack);
        if (unit == 0) return false;
        grid->unit[j] = range / nearest(range / unit);       /* many small roundings become one */
        grid->slack = larger(grid->slack, slack);
    }
    return true;
}

/* Scales of all lanes for d; a lane of equal weights gets scale 0 for now. */
static bool affine_scales(affine_grid *grid, float d) {
    grid->d = d;
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) {
        grid->scale[j] = grid->span[j] = 0;
        if (grid->unit[j] == 0) continue;
        int divisor = 1;
        for (; divisor <= grid->code_max; divisor++) {
            int scale = whole_ratio(grid->unit[j] / (float)divisor, d, d * 0x1p-8f, 1, SPK_QUANT_SCALE_MAX);
            if (scale < 1) continue;
            grid->scale[j] = scale;
            grid->span[j] = (int)nearest(grid->range[j] / (d * (float)scale));
            break;
        }
        if (divisor > grid->code_max || grid->span[j] > grid->code_max) return false;
    }
    return true;
}

/* The min of lane j as a multiple of dmin, whatever code its smallest weight has; -1 if there is none. */
static int affine_lane_min(affine_grid *grid, size_t j, float dmin) {
    for (int code = 0; code <= grid->code_max - grid->span[j]; code++) {
        float depth = (float)code * (float)grid->scale[j] * grid->d - grid->low[j];
        if (fabsf(depth) <= grid->slack) return 0;
        if (dmin == 0) continue;
        int min = whole_ratio(depth, dmin, grid->slack, 0, SPK_QUANT_SCALE_MAX);
        if (min >= 0) return min;
    }
    if (grid->unit[j] > 0) return -1;
    /* Equal weights above 0: any scale and code whose product fits. */
    for (int min = 0; min <= SPK_QUANT_SCALE_MAX; min++)
        for (int code = 1; code <= grid->code_max; code++) {
            float height = (grid->low[j] + (float)min * dmin) / (float)code;
            int scale = whole_ratio(height, grid->d, grid->slack / (float)code, 1, SPK_QUANT_SCALE_MAX);
            if (scale < 1) continue;
            grid->scale[j] = scale;
            grid->span[j] = code;
            return min;
        }
    return -1;
}

/* Mins of all lanes for dmin, then the codes, each checked. */
static bool affine_finish(affine_grid *grid, float dmin, spk_quant_affine_fit *out) {
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) {
        int min = affine_lane_min(grid, j, dmin);
        if (min < 0) return false;
        out->min[j] = (uint8_t)min;
        out->scale[j] = (uint8_t)grid->scale[j];
        float step = grid->scale[j] > 0 ? grid->d * (float)grid->scale[j] : 1.0f;
        for (size_t i = 0; i < SPK_QUANT_DEPTH; i++) {
            float height = grid->tile->x[i][j] + (float)min * dmin;
            int code = whole_ratio(height, step, grid->slack, 0, grid->scale[j] > 0 ? grid->code_max : 0);
            if (code < 0) return false;
            out->code[i][j] = (uint8_t)code;
        }
    }
    out->d = spk_f32_to_f16(grid->d);
    out->dmin = spk_f32_to_f16(dmin);
    return true;
}

/* dmin from the lane that goes deepest: its depth is dmin times 1..63, for some code of its smallest weight. */
static bool affine_with_d(affine_grid *grid, spk_quant_affine_fit *out) {
    size_t deepest = 0;
    for (size_t j = 1; j < SPK_QUANT_LANES; j++)
        if (grid->low[j] < grid->low[deepest]) deepest = j;
    if (affine_finish(grid, 0.0f, out)) return true;
    for (int code = 0; code <= grid->code_max - grid->span[deepest]; code++) {
        float depth = (float)code * (float)grid->scale[deepest] * grid->d - grid->low[deepest];
        if (depth <= 0) continue;
        for (int min = SPK_QUANT_SCALE_MAX; min >= 1; min--) {
            float dmin = factor_of(depth, min);
            if (dmin > 0 && affine_finish(grid, dmin, out)) return true;
        }
    }
    return false;
}

bool spk_quant_affine_exact(const spk_quant_tile *tile, uint32_t code_max, spk_quant_affine_fit *out) {
    affine_grid grid = { .tile = tile, .code_max = (int)code_max };
    if (!affine_units(&grid)) return false;
    float most = largest_magnitude(grid.unit, SPK_QUANT_LANES, 1);
    if (most == 0) return false;
    float unit = common_unit(grid.unit, SPK_QUANT_LANES, 1, most / (SPK_QUANT_SCALE_MAX * ((float)code_max + 0.5f)),
                             most / (16 * SPK_QUANT_SCALE_MAX * (float)code_max));
    if (unit == 0) return false;
    unit = most / nearest(most / unit);
    for (int divisor = 1; divisor <= SPK_QUANT_SCALE_MAX; divisor++) {
        float d = factor_of(unit, divisor);
        if (d > 0 && affine_scales(&grid, d) && affine_with_d(&grid, out)) return true;
    }
    return false;
}
