/* requant/quant_exact.c - weights that a block can hold as they are, because they were decoded from such a block.
 *
 * A search looks for small errors, not for none: it would find a good grid near the one that a block was made of, and
 * requantizing a block to its own type would lose.  Here the grid is looked for by greatest common divisors, in the way
 * of Euclid, on floats: the remainders of decoded weights vanish but for rounding, those of others do not.  Lane by lane
 * that is quant_units_lanes.c; here the units of the lanes become factors, scales and codes.
 *
 * Nothing is believed: a fit counts only if every weight comes back within SPK_QUANT_TOLERANCE of the tile's largest.  Nothing is looked
 * for without end: weights that were made for it fit many units and fail late.
 */
#include "requant/quant_units_internal.h"

#include <string.h>

static inline float nearest(float v) { return (v + 12582912.0f) - 12582912.0f; }   /* |v| < 2^22 */

static inline float larger(float a, float b) { return a > b ? a : b; }

/* The greatest unit of which all of v are multiples but for `slack`; 0 if that is below `least` or if all are 0.  slack is
 * well below least.  What quant_units_lanes.c does for the lanes of a tile, for what it has found. */
static float common_unit(const float *v, size_t count, float least, float slack) {
    float unit = 0;
    for (size_t i = 0; i < count; i++) {
        float rest = fabsf(v[i]);
        while (rest > slack) {
            float remainder = fabsf(unit - rest * nearest(unit / rest));
            unit = rest;
            rest = remainder;
            if (unit < least) return 0;
        }
    }
    return unit;
}

static float half_of(float v) { return spk_f16_to_f32(spk_f32_to_f16(v)); }

/* unit / divisor as the F16 that it must be; 0 if it is none.  slack is that of unit. */
static float factor_of(float unit, int divisor, float slack) {
    float factor = half_of(unit / (float)divisor);
    if (factor == 0 || factor > SPK_QUANT_F16_MAX) return 0;
    return fabsf(factor * (float)divisor - unit) <= slack ? factor : 0;
}

/* multiple / unit if that is a whole number from low to high; else low - 1. */
static int whole_ratio(float multiple, float unit, float slack, int low, int high) {
    float ratio = multiple / unit;
    if (!(ratio > (float)low - 0.5f && ratio < (float)high + 0.5f)) return low - 1;
    float whole = nearest(ratio);
    return fabsf(whole * unit - multiple) <= slack ? (int)whole : low - 1;
}

/* ---- Q8_0 ---- */

static bool q8_lane_exact(const spk_quant_tile *tile, const spk_quant_symmetric_units *units, size_t lane, spk_quant_q8_fit *out) {
    float peak = units->peak[lane], unit = units->unit[lane], slack = peak * SPK_QUANT_TOLERANCE;
    out->d[lane] = 0;
    for (size_t i = 0; i < SPK_QUANT_DEPTH; i++) out->code[i][lane] = 0;
    if (peak == 0) return true;
    for (int divisor = 1; peak * (float)divisor <= unit * (SPK_QUANT_Q8_CODE_MAX + 0.5f); divisor++) {
        float d = factor_of(unit, divisor, slack);
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

bool spk_quant_q8_exact(const spk_quant_tile *tile, const spk_quant_symmetric_units *units, spk_quant_q8_fit *out) {
    for (size_t lane = 0; lane < SPK_QUANT_LANES; lane++)
        if (!q8_lane_exact(tile, units, lane, out)) return false;
    return true;
}

/* ---- Q6_K ---- */

/* TRIES: sub-blocks that are tried before a super-block counts as not exact.  Decoded ones took at most 32. */
enum { Q6_SUB_BLOCKS = 2 * SPK_QUANT_LANES, Q6_DEPTH = SPK_QUANT_DEPTH / 2, Q6_TRIES_MAX = 1 << 12 };

/* Codes of one sub-block, of which step = d * scale may be negative. */
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
        for (int scale = magnitude; scale >= -magnitude; scale -= 2 * magnitude) {
            if (scale > INT8_MAX || !q6_codes(tile, s, d * (float)scale, slack, out)) continue;
            out->scale[s] = (int8_t)scale;
            return true;
        }
    }
    return false;
}

bool spk_quant_q6_exact(const spk_quant_tile *tile, const spk_quant_symmetric_units *units, spk_quant_q6_fit *out) {
    float most = 0, peak = 0;
    for (size_t s = 0; s < Q6_SUB_BLOCKS; s++) {
        most = larger(most, units->unit[s]);
        peak = larger(peak, units->peak[s]);
    }
    float unit = common_unit(units->unit, Q6_SUB_BLOCKS, most / (-INT8_MIN * (0.5f - SPK_QUANT_Q6_CODE_MIN)),
                             most * SPK_QUANT_UNIT_TOLERANCE / -INT8_MIN);
    if (unit == 0) return false;
    /* The largest of the units is d times a product of a scale and a code. */
    int product_max = -INT8_MIN * -SPK_QUANT_Q6_CODE_MIN, divisor_max = (int)((float)product_max * unit / most + 0.5f);
    int tries = 0;
    for (int divisor = 1; divisor <= divisor_max && tries < Q6_TRIES_MAX; divisor++)
        for (int sign = 1; sign >= -1; sign -= 2) {
            float d = factor_of(unit, divisor, unit * SPK_QUANT_TOLERANCE) * (float)sign;
            size_t s = 0;
            while (d != 0 && s < Q6_SUB_BLOCKS && q6_sub_block_exact(tile, s, units->unit[s], d, peak * SPK_QUANT_TOLERANCE, out)) s++;
            tries += (int)s + 1;
            if (s < Q6_SUB_BLOCKS) continue;
            out->d = spk_f32_to_f16(d);
            return true;
        }
    return false;
}

/* ---- Q4_K and Q5_K ---- */

/* Lanes and depths that are tried for a super-block before it counts as not exact.  77,000 decoded blocks of eight kinds took at most 995; a
 * whole search can be 10^9. */
enum { AFFINE_TRIES_MAX = 1 << 13 };

typedef struct {
    const spk_quant_tile *tile;
    const float *low, *range, *unit;      /* by lane, see spk_quant_affine_units */
    int   code_max;
    float slack;                          /* of one weight */
    float d;                              /* being tried */
    uint32_t tries_left;
} affine_grid;

static bool affine_may_try(affine_grid *grid) { return grid->tries_left > 0 && grid->tries_left-- > 0; }

/* The scale of lane j whose step is its unit over `divisor`, and the codes that the lane's range then spans; 0 if there
 * is none. */
static int affine_scale(const affine_grid *grid, size_t j, int divisor, int *span) {
    int scale = whole_ratio(grid->unit[j] / (float)divisor, grid->d, grid->d * 0x1p-8f, 1, SPK_QUANT_SCALE_MAX);
    if (scale < 1) return 0;
    *span = (int)nearest(grid->range[j] / (grid->d * (float)scale));
    return *span <= grid->code_max ? scale : 0;
}

/* Whether all lanes have a scale for d: most wrong d fail here. */
static bool affine_has_scales(const affine_grid *grid) {
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) {
        int divisor = 1, span;
        if (grid->unit[j] == 0) continue;
        while (divisor <= grid->code_max && affine_scale(grid, j, divisor, &span) == 0) divisor++;
        if (divisor > grid->code_max) return false;
    }
    return true;
}

/* Whether lane j can be made of scale and dmin; *min gets the min, whatever code the smallest weight then has. */
static bool affine_min(const affine_grid *grid, size_t j, int scale, int span, float dmin, int *min) {
    for (int code = 0; code <= grid->code_max - span; code++) {
        float depth = (float)(code * scale) * grid->d - grid->low[j];
        *min = 0;
        if (fabsf(depth) <= grid->slack) return true;
        if (dmin > 0) *min = whole_ratio(depth, dmin, grid->slack, 1, SPK_QUANT_SCALE_MAX);
        if (*min > 0) return true;
    }
    return false;
}

/* Scale and min of lane j. */
static bool affine_lane(affine_grid *grid, size_t j, float dmin, int *scale, int *min) {
    int span;
    if (!affine_may_try(grid)) return false;
    for (int divisor = 1; grid->unit[j] > 0 && divisor <= grid->code_max; divisor++) {
        *scale = affine_scale(grid, j, divisor, &span);
        if (*scale > 0 && affine_min(grid, j, *scale, span, dmin, min)) return true;
    }
    if (grid->unit[j] > 0) return false;
    /* Equal weights: no scale at all if they are a multiple of dmin, else any scale and code whose product fits. */
    *scale = 0;
    if (affine_min(grid, j, 0, grid->code_max, dmin, min)) return true;
    for (*min = 0; *min <= SPK_QUANT_SCALE_MAX; ++*min)
        for (int code = 1; code <= grid->code_max; code++) {
            float height = (grid->low[j] + (float)*min * dmin) / (float)code;
            *scale = whole_ratio(height, grid->d, grid->slack / (float)code, 1, SPK_QUANT_SCALE_MAX);
            if (*scale > 0) return true;
        }
    return false;
}

/* What a lane's codes follow from: weight + lift = step * code, and code < limit. */
typedef struct { float lift[SPK_QUANT_LANES], step[SPK_QUANT_LANES], limit[SPK_QUANT_LANES]; } affine_codes;

/* Codes of a row, each as whole_ratio has it; without branches, so that they are made side by side. */
static bool affine_row(const affine_codes *c, const float x[SPK_QUANT_LANES], float slack, uint8_t codes[SPK_QUANT_LANES]) {
    float ratio[SPK_QUANT_LANES], whole[SPK_QUANT_LANES], off[SPK_QUANT_LANES];
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) {
        float height = x[j] + c->lift[j];
        ratio[j] = height / c->step[j];
        whole[j] = nearest(ratio[j]);
        off[j] = fabsf(whole[j] * c->step[j] - height);
    }
    int32_t good = 1;
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) good &= (ratio[j] > -0.5f) & (ratio[j] < c->limit[j]) & (off[j] <= slack);
    for (size_t j = 0; j < SPK_QUANT_LANES && good; j++) codes[j] = (uint8_t)whole[j];
    return good;
}

/* Scales and mins of all lanes, then the codes, each checked. */
static bool affine_finish(affine_grid *grid, float dmin, spk_quant_affine_fit *out) {
    affine_codes c;
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) {
        int scale, min;
        if (!affine_lane(grid, j, dmin, &scale, &min)) return false;
        out->min[j] = (uint8_t)min;
        out->scale[j] = (uint8_t)scale;
        c.lift[j] = (float)min * dmin;
        c.step[j] = scale > 0 ? grid->d * (float)scale : 1.0f;
        c.limit[j] = (scale > 0 ? (float)grid->code_max : 0.0f) + 0.5f;
    }
    for (size_t i = 0; i < SPK_QUANT_DEPTH; i++)
        if (!affine_row(&c, grid->tile->x[i], grid->slack, out->code[i])) return false;
    out->d = spk_f32_to_f16(grid->d);
    out->dmin = spk_f32_to_f16(dmin);
    return true;
}

/* factor_of the divisors 1 to SPK_QUANT_SCALE_MAX; without branches, so that they are made side by side.  unit > 0. */
static void factors_of(float unit, float slack, float out[SPK_QUANT_SCALE_MAX]) {
    for (int k = 0; k < SPK_QUANT_SCALE_MAX; k++) {
        float divisor = (float)(k + 1), wanted = unit / divisor, small = (wanted + 0.5f) - 0.5f, normal;
        uint32_t bits;
        memcpy(&bits, &wanted, sizeof bits);
        bits = (bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu;
        memcpy(&normal, &bits, sizeof normal);
        float factor = wanted < 0x1p-14f ? small : normal;
        bool fits = (factor <= SPK_QUANT_F16_MAX) & (fabsf(factor * divisor - unit) <= slack);
        out[k] = fits ? factor : 0.0f;
    }
}

/* Lane j has a min, which is its depth for some scale and some code of its smallest weight: dmin is that depth over
 * 1 to 63. */
static bool affine_with_lane(affine_grid *grid, size_t j, spk_quant_affine_fit *out) {
    int divisor_max = grid->unit[j] > 0 ? grid->code_max : 1;
    for (int divisor = 1; divisor <= divisor_max; divisor++) {
        int span = grid->code_max, scale = 0;                /* equal weights: code 0 of scale 0 */
        if (grid->unit[j] > 0 && (scale = affine_scale(grid, j, divisor, &span)) == 0) continue;
        for (int code = 0; code <= grid->code_max - span; code++) {
            float depth = (float)(code * scale) * grid->d - grid->low[j];
            float dmin[SPK_QUANT_SCALE_MAX];
            if (!(depth > 0)) continue;
            if (!affine_may_try(grid)) return false;
            factors_of(depth, grid->slack, dmin);
            for (int min = SPK_QUANT_SCALE_MAX; min >= 1; min--)
                if (dmin[min - 1] > 0 && affine_finish(grid, dmin[min - 1], out)) return true;
        }
    }
    return false;
}

static bool affine_with_d(affine_grid *grid, spk_quant_affine_fit *out) {
    if (!affine_has_scales(grid)) return false;
    if (affine_finish(grid, 0.0f, out)) return true;
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) {
        int scale, min;
        if (!affine_lane(grid, j, 0.0f, &scale, &min) && affine_with_lane(grid, j, out)) return true;
    }
    return false;
}

bool spk_quant_affine_exact(const spk_quant_tile *tile, const spk_quant_affine_units *units, uint32_t code_max,
                            spk_quant_affine_fit *out) {
    affine_grid grid = { .tile = tile, .low = units->low, .range = units->range, .unit = units->unit, .code_max = (int)code_max, .tries_left = AFFINE_TRIES_MAX };
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) grid.slack = larger(grid.slack, units->slack[j]);
    float most = 0, relative_slack = 0;                      /* the largest unit, and how well it is known */
    for (size_t j = 0; j < SPK_QUANT_LANES; j++) {
        if (grid.unit[j] <= most) continue;
        most = grid.unit[j];
        relative_slack = 2 * grid.slack / grid.range[j];
    }
    if (most == 0) return false;
    float unit = common_unit(grid.unit, SPK_QUANT_LANES, most / (SPK_QUANT_SCALE_MAX * ((float)code_max + 0.5f)),
                             most / (16 * SPK_QUANT_SCALE_MAX * (float)code_max));
    if (unit == 0) return false;
    unit = most / nearest(most / unit);
    /* The largest of the units is d times a product of a scale and a difference of codes. */
    int divisor_max = (int)((float)(SPK_QUANT_SCALE_MAX * grid.code_max) * unit / most + 0.5f);
    for (int divisor = 1; divisor <= divisor_max && grid.tries_left > 0; divisor++) {
        grid.d = factor_of(unit, divisor, unit * relative_slack);
        if (grid.d > 0 && affine_with_d(&grid, out)) return true;
    }
    return false;
}
