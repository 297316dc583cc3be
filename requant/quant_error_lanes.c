/* requant/quant_error_lanes.c - the sums of a requant's error; compiled once for each kind of vector, see quant.h.
 *
 * Four independent sums in the order of the weights, whatever the width of the machine's registers. */
#include <math.h>

#include "requant/quant_vectors_internal.h"

enum { WAYS = 4 };
typedef float   v4f __attribute__((vector_size(16)));
typedef double  v4d __attribute__((vector_size(32)));
typedef int64_t v4l __attribute__((vector_size(32)));

typedef struct { v4d error, source, result, product, most; } error_sums;

LANES_INLINE void add_four(error_sums *s, v4f xf, v4f yf) {
    const v4l magnitude = { INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX };
    v4d x = __builtin_convertvector(xf, v4d), y = __builtin_convertvector(yf, v4d);
    v4d off = (v4d)((v4l)(x - y) & magnitude);
    v4l larger = (v4l)(off > s->most);
    s->error += off * off;
    s->source += x * x;
    s->result += y * y;
    s->product += x * y;
    s->most = (v4d)(((v4l)off & larger) | ((v4l)s->most & ~larger));
}

void SPK_LANES_NAME(spk_quant_error_add)(spk_quant_error *sums, const float *x, const float *y, uint64_t count) {
    error_sums s = { 0 };
    for (uint64_t i = 0; i < count; i += WAYS) {
        v4f xf = { 0 }, yf = { 0 };      /* zeros past the end add nothing */
        if (i + WAYS <= count) {
            memcpy(&xf, x + i, sizeof xf);
            memcpy(&yf, y + i, sizeof yf);
        } else {
            for (uint64_t k = 0; i + k < count; k++) xf[k] = x[i + k], yf[k] = y[i + k];
        }
        add_four(&s, xf, yf);
    }
    for (size_t k = 0; k < WAYS; k++) {
        spk_quant_error part = { s.error[k], s.source[k], s.result[k], s.product[k], s.most[k] };
        spk_quant_error_merge(sums, &part);
    }
}
