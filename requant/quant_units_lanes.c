/* requant/quant_units_lanes.c - the first question of quant_exact.c, for all lanes at once: of what unit can the weights of a
 * lane be multiples?  Most weights that were not decoded from a block of the type get a no here.  Compiled once for each kind
 * of vector, and for a GPU.
 */
#define SPK_LANES_ONE_TILE
#include "requant/quant_vectors_internal.h"
#include "requant/quant_units_internal.h"

LANES_INLINE vec magnitude_of(const vec *v) { return vec_max(*v, -*v); }

/* Of the lanes that are open: the greatest unit of which all of x[begin..end) - low are multiples but for `slack`, by Euclid's
 * algorithm.  False if that of any of them is below `least`, or if there is none because all are 0.  slack is well below least. */
LANES_INLINE bool common_units(const spk_quant_tile *const tiles[], int begin, int end, const vec *low, const vec *least,
                               const vec *slack, const vec_mask *open, vec *units) {
    vec unit = vec_all(0.0f), none = vec_all(0.0f);
    for (int i = begin; i < end; i++) {
        vec off = vec_weights(tiles, i) - *low, rest = magnitude_of(&off);
        for (;;) {
            vec_mask is_left = vec_both(*open, vec_less(*slack, rest));
            if (!vec_any_lane(is_left)) break;
            /* A rest of two units or more: the step is an exchange, which needs no division. */
            vec_mask is_larger = vec_both(is_left, vec_not(vec_less(rest, unit + unit)));
            vec smaller = vec_choose(is_larger, unit, rest);
            unit = vec_choose(is_larger, rest, unit);
            rest = smaller;
            if (vec_any_lane(vec_both(is_larger, vec_less(unit, *least)))) return false;
            is_left = vec_both(is_left, vec_less(*slack, rest));
            if (!vec_any_lane(is_left)) break;
            vec divisor = vec_choose(is_left, rest, vec_all(1.0f)), remainder = unit - rest * vec_round(unit / divisor);
            unit = vec_choose(is_left, rest, unit);
            rest = vec_choose(is_left, magnitude_of(&remainder), rest);
            if (vec_any_lane(vec_both(is_left, vec_less(unit, *least)))) return false;
        }
    }
    *units = vec_choose(*open, unit, none);
    return !vec_any_lane(vec_both(*open, vec_not(vec_less(none, unit))));
}

/* The largest magnitude of each lane. */
LANES_INLINE vec peaks_of(const spk_quant_tile *const tiles[], int begin, int end) {
    vec most = vec_all(0.0f);
    for (int i = begin; i < end; i++) {
        vec x = vec_weights(tiles, i);
        most = vec_max(magnitude_of(&x), most);
    }
    return most;
}

/* Rows begin..end) of weights that are a unit times codes of a magnitude up to code_max. */
LANES_INLINE bool symmetric_units(const spk_quant_tile *const tiles[], int begin, int end, int code_max, vec *units, vec *peaks) {
    vec none = vec_all(0.0f), most = peaks_of(tiles, begin, end);
    vec least = most / ((float)code_max + 0.5f), slack = most * SPK_QUANT_UNIT_TOLERANCE;
    vec_mask open = vec_less(none, most);
    *peaks = most;
    return common_units(tiles, begin, end, &none, &least, &slack, &open, units);
}

LANES_INLINE bool q8_units(const spk_quant_tile *const tiles[], vec *units, vec *peaks) {
    return symmetric_units(tiles, 0, SPK_QUANT_DEPTH, SPK_QUANT_Q8_CODE_MAX, units, peaks);
}

/* Of the sub-blocks of group 0 or 1. */
LANES_INLINE bool q6_units(const spk_quant_tile *const tiles[], int group, vec *units, vec *peaks) {
    const int depth = SPK_QUANT_DEPTH / 2;
    return symmetric_units(tiles, group * depth, (group + 1) * depth, -SPK_QUANT_Q6_CODE_MIN, units, peaks);
}

typedef struct { vec low, range, unit, slack; } affine_lanes;

LANES_INLINE bool affine_units(const spk_quant_tile *const tiles[], int code_max, affine_lanes *out) {
    vec low = vec_weights(tiles, 0), high = low, low_odd = vec_weights(tiles, 1), high_odd = low_odd, minus_low;
    for (int i = 2; i < SPK_QUANT_DEPTH; i += 2) {       /* two chains: neither waits for the other */
        vec x = vec_weights(tiles, i), odd = vec_weights(tiles, i + 1);
        low = vec_min(x, low);
        high = vec_max(x, high);
        low_odd = vec_min(odd, low_odd);
        high_odd = vec_max(odd, high_odd);
    }
    low = vec_min(low_odd, low);
    high = vec_max(high_odd, high);
    minus_low = -low;
    vec range = high - low, peak = vec_max(magnitude_of(&minus_low), magnitude_of(&high));
    vec least = range / ((float)code_max + 0.5f), slack = peak * SPK_QUANT_UNIT_TOLERANCE, unit;
    vec_mask open = vec_less(peak * SPK_QUANT_TOLERANCE, range);
    /* Too few digits may be left to be sure. */
    if (vec_any_lane(vec_both(open, vec_less(least / 16.0f, slack)))) return false;
    if (!common_units(tiles, 0, SPK_QUANT_DEPTH, &low, &least, &slack, &open, &unit)) return false;
    vec count = vec_round(range / vec_choose(open, unit, vec_all(1.0f)));    /* many small roundings become one */
    unit = vec_choose(open, range / vec_choose(open, count, vec_all(1.0f)), vec_all(0.0f));
    *out = (affine_lanes){ low, range, unit, peak * SPK_QUANT_TOLERANCE };
    return true;
}

#ifndef SPK_LANES_CUDA
bool SPK_LANES_NAME(spk_quant_affine_units)(const spk_quant_tile *tile, int code_max, spk_quant_affine_units *out) {
    affine_lanes lanes;
    if (!affine_units(&tile, code_max, &lanes)) return false;
    memcpy(out->low, &lanes.low, sizeof out->low);
    memcpy(out->range, &lanes.range, sizeof out->range);
    memcpy(out->unit, &lanes.unit, sizeof out->unit);
    memcpy(out->slack, &lanes.slack, sizeof out->slack);
    return true;
}

bool SPK_LANES_NAME(spk_quant_symmetric_units)(const spk_quant_tile *tile, uint32_t group_count, spk_quant_symmetric_units *out) {
    vec units, peaks;
    for (uint32_t g = 0; g < group_count; g++) {
        if (!(group_count == 1 ? q8_units(&tile, &units, &peaks) : q6_units(&tile, (int)g, &units, &peaks))) return false;
        memcpy(out->unit + g * SPK_QUANT_LANES, &units, sizeof units);
        memcpy(out->peak + g * SPK_QUANT_LANES, &peaks, sizeof peaks);
    }
    return true;
}
#endif
