/* tests/emulator/include/cuda_fp16.h - half precision, as far as the project's kernels use it; every operation rounds exactly. */
#ifndef SPK_EMULATOR_CUDA_FP16_H
#define SPK_EMULATOR_CUDA_FP16_H

#include <stdint.h>
#include "cuda_runtime.h"

struct __half { uint16_t bits; };
struct alignas(4) __half2 { __half x, y; };

namespace emulator {

extern const float *const half_values;           /* [65536] */

enum half_rounding { TO_NEAREST, UP };
/* Of any double that is finite, infinite or NaN. */
inline uint16_t half_bits(double value, half_rounding rounding) {
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    const double size = fabs(value);
    if (value != value) return 0x7fff;
    if (isinf(value)) return (uint16_t)(sign | 0x7c00);
    int exponent = 0;
    (void)frexp(size, &exponent);                /* size < 2^exponent */
    const int step = exponent - 11 > -24 ? exponent - 11 : -24;      /* of the last bit */
    const double scaled = ldexp(size, -step);
    const double whole = rounding == TO_NEAREST ? nearbyint(scaled) : sign != 0 ? floor(scaled) : ceil(scaled);
    const double rounded = ldexp(whole, step);
    if (rounded >= 65536.0) return (uint16_t)(sign | (rounding == UP && sign != 0 ? 0x7bff : 0x7c00));
    if (whole < 1024.0 || step == -24) return (uint16_t)(sign | (uint16_t)whole);     /* 1024 here is the smallest normal number */
    const int carried = whole >= 2048.0 ? 1 : 0;
    return (uint16_t)(sign | (uint16_t)((step + carried + 25) << 10) | ((uint16_t)(carried ? whole / 2 : whole) & 0x3ff));
}

} // namespace emulator

inline __half __ushort_as_half(unsigned short bits) { return { bits }; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline float __half2float(__half h) { return emulator::half_values[h.bits]; }
inline __half __float2half_rn(float v) { return { emulator::half_bits((double)v, emulator::TO_NEAREST) }; }
inline __half __float2half_ru(float v) { return { emulator::half_bits((double)v, emulator::UP) }; }
inline __half2 __half2half2(__half h) { return { h, h }; }
inline float2 __half22float2(__half2 h) { return { __half2float(h.x), __half2float(h.y) }; }
inline __half2 __floats2half2_rn(float a, float b) { return { __float2half_rn(a), __float2half_rn(b) }; }
/* Sums and products of two halves are exact in double. */
inline __half2 __hmul2(__half2 a, __half2 b) {
    return { { emulator::half_bits((double)__half2float(a.x) * (double)__half2float(b.x), emulator::TO_NEAREST) },
             { emulator::half_bits((double)__half2float(a.y) * (double)__half2float(b.y), emulator::TO_NEAREST) } };
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return { { emulator::half_bits((double)__half2float(a.x) - (double)__half2float(b.x), emulator::TO_NEAREST) },
             { emulator::half_bits((double)__half2float(a.y) - (double)__half2float(b.y), emulator::TO_NEAREST) } };
}

#endif
