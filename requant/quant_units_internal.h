/* requant/quant_units_internal.h - what quant_units_lanes.c finds, and quant_exact.c goes on from: of what unit the weights of
 * each lane are multiples, as far as a lane can tell.
 */
#ifndef SPK_QUANT_UNITS_INTERNAL_H
#define SPK_QUANT_UNITS_INTERNAL_H

#include "requant/quant_internal.h"

/* Relative to the largest weight: a few roundings of a decoder, and what Euclid's steps make of them. */
#define SPK_QUANT_TOLERANCE       0x1p-22f
#define SPK_QUANT_UNIT_TOLERANCE  0x1p-19f

/* unit: of the differences of a lane's weights, 0 if they are equal.  slack: of one weight. */
struct spk_quant_affine_units {
    float low[SPK_QUANT_LANES], range[SPK_QUANT_LANES], unit[SPK_QUANT_LANES], slack[SPK_QUANT_LANES];
};

/* By sub-block (Q6_K, two groups of lanes) or block (Q8_0, one group); 0 if its weights, and so their largest magnitude, are 0. */
struct spk_quant_symmetric_units {
    float unit[2 * SPK_QUANT_LANES], peak[2 * SPK_QUANT_LANES];
};

#endif
