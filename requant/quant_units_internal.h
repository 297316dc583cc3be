/* requant/quant_units_internal.h - the first question of quant_exact.c, lane by lane, for a GPU too: of what unit can the
 * weights of a lane be multiples?  Most that were not decoded from a block of the type say no here.
 */
#ifndef SPK_QUANT_UNITS_INTERNAL_H
#define SPK_QUANT_UNITS_INTERNAL_H

#include <math.h>

#include "requant/quant_internal.h"

/* Relative to the largest weight: a few roundings of a decoder, and what Euclid's steps make of them. */
#define SPK_QUANT_TOLERANCE       0x1p-22f
#define SPK_QUANT_UNIT_TOLERANCE  0x1p-19f

SPK_QUANT_INLINE float spk_quant_nearest(float v) { return (v + 12582912.0f) - 12582912.0f; }   /* |v| < 2^22 */

SPK_QUANT_INLINE float spk_quant_larger(float a, float b) { return a > b ? a : b; }

SPK_QUANT_INLINE float spk_quant_smaller(float a, float b) { return a < b ? a : b; }

/* v[0] - low, v[stride] - low, ...: the greatest unit of which all are multiples but for `slack`; 0 if that is below `least`
 * or if all are 0.  slack is well below least. */
SPK_QUANT_INLINE float spk_quant_common_unit(const float *v, size_t count, size_t stride, float low, float least,
                                             float slack) {
    float unit = 0;
    for (size_t i = 0; i < count; i++) {
        float rest = fabsf(v[i * stride] - low);
        while (rest > slack) {
            float remainder = fabsf(unit - rest * spk_quant_nearest(unit / rest));
            unit = rest;
            rest = remainder;
            if (unit < least) return 0;
        }
    }
    return unit;
}

SPK_QUANT_INLINE float spk_quant_largest_magnitude(const float *v, size_t count, size_t stride) {
    float largest = 0;
    for (size_t i = 0; i < count; i++) largest = spk_quant_larger(largest, fabsf(v[i * stride]));
    return largest;
}

/* Of lane j; 0 if there is none.  *peak: its largest magnitude. */
SPK_QUANT_INLINE float spk_quant_q8_unit(const spk_quant_tile *tile, size_t j, float *peak) {
    const float *x = &tile->x[0][j];
    *peak = spk_quant_largest_magnitude(x, SPK_QUANT_DEPTH, SPK_QUANT_LANES);
    return spk_quant_common_unit(x, SPK_QUANT_DEPTH, SPK_QUANT_LANES, 0.0f, *peak / (SPK_QUANT_Q8_CODE_MAX + 0.5f),
                                 *peak * SPK_QUANT_UNIT_TOLERANCE);
}

SPK_QUANT_INLINE const float *spk_quant_q6_sub_block(const spk_quant_tile *tile, size_t s) {
    return &tile->x[s / SPK_QUANT_LANES * (SPK_QUANT_DEPTH / 2)][s % SPK_QUANT_LANES];
}

/* The same of sub-block s. */
SPK_QUANT_INLINE float spk_quant_q6_unit(const spk_quant_tile *tile, size_t s, float *peak) {
    const float *x = spk_quant_q6_sub_block(tile, s);
    *peak = spk_quant_largest_magnitude(x, SPK_QUANT_DEPTH / 2, SPK_QUANT_LANES);
    return spk_quant_common_unit(x, SPK_QUANT_DEPTH / 2, SPK_QUANT_LANES, 0.0f, *peak / (0.5f - SPK_QUANT_Q6_CODE_MIN),
                                 *peak * SPK_QUANT_UNIT_TOLERANCE);
}

/* unit: of the differences; 0 if the weights are equal.  slack: of one weight. */
typedef struct { float low, range, unit, slack; } spk_quant_affine_lane;

/* Of lane j; false: there is no unit. */
SPK_QUANT_INLINE bool spk_quant_affine_unit(const spk_quant_tile *tile, size_t j, int code_max,
                                            spk_quant_affine_lane *out) {
    const float *x = &tile->x[0][j];
    float low = x[0], high = x[0];
    for (size_t i = 1; i < SPK_QUANT_DEPTH; i++) {
        low = spk_quant_smaller(low, x[i * SPK_QUANT_LANES]);
        high = spk_quant_larger(high, x[i * SPK_QUANT_LANES]);
    }
    float range = high - low, peak = spk_quant_larger(fabsf(low), fabsf(high)), least = range / ((float)code_max + 0.5f);
    out->low = low;
    out->range = range;
    out->unit = 0;
    out->slack = peak * SPK_QUANT_TOLERANCE;
    if (range <= peak * SPK_QUANT_TOLERANCE) return true;
    if (peak * SPK_QUANT_UNIT_TOLERANCE > least / 16) return false;      /* too few digits are left to be sure */
    float unit = spk_quant_common_unit(x, SPK_QUANT_DEPTH, SPK_QUANT_LANES, low, least, peak * SPK_QUANT_UNIT_TOLERANCE);
    if (unit == 0) return false;
    out->unit = range / spk_quant_nearest(range / unit);                 /* many small roundings become one */
    return true;
}

#endif
