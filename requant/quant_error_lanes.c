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

/* a * b + c where a * b is not rounded, as that of two floats is not: one instruction where there is one. */
#ifdef SPK_LANES_AVX2
#define exact_multiply_add(a, b, c) ((v4d)_mm256_fmadd_pd((__m256d)(a), (__m256d)(b), (__m256d)(c)))
#define larger_of(a, b)             ((v4d)_mm256_max_pd((__m256d)(a), (__m256d)(b)))
#define doubles_of(v)               ((v4d)_mm256_cvtps_pd((__m128)(v)))
#else
#define doubles_of(v)               __builtin_convertvector(v, v4d)
#define exact_multiply_add(a, b, c) ((a) * (b) + (c))
#define larger_of(a, b)             ((v4d)(((v4l)(a) & (v4l)((a) > (b))) | ((v4l)(b) & ~(v4l)((a) > (b)))))
#endif

LANES_INLINE void add_four(error_sums *s, v4f xf, v4f yf) {
    const v4l magnitude = { INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX };
    v4d x = doubles_of(xf), y = doubles_of(yf);
    v4d off = (v4d)((v4l)(x - y) & magnitude);
    s->error += off * off;
    s->source = exact_multiply_add(x, x, s->source);
    s->result = exact_multiply_add(y, y, s->result);
    s->product = exact_multiply_add(x, y, s->product);
    s->most = larger_of(off, s->most);
}

void SPK_LANES_NAME(spk_quant_error_add)(spk_quant_error *sums, const float *x, const float *y, uint64_t count) {
    error_sums s = { 0 };
    uint64_t i = 0;
    v4f xf, yf;
    for (; i + WAYS <= count; i += WAYS) {
        memcpy(&xf, x + i, sizeof xf);
        memcpy(&yf, y + i, sizeof yf);
        add_four(&s, xf, yf);
    }
    xf = yf = (v4f){ 0 };                /* zeros past the end add nothing */
    for (uint64_t k = 0; i + k < count; k++) xf[k] = x[i + k], yf[k] = y[i + k];
    add_four(&s, xf, yf);
    for (size_t k = 0; k < WAYS; k++) {
        spk_quant_error part = { s.error[k], s.source[k], s.result[k], s.product[k], s.most[k] };
        spk_quant_error_merge(sums, &part);
    }
}
