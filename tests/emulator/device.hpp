/* tests/emulator/device.hpp - CUDA C++'s functions for device code, as far as the project's kernels use them.
 *
 * Integers, conversions and roundings are exact.  What the hardware approximates (exponential, division, roots) is rounded
 * better here, but with its ranges: what it makes zero is zero.
 */
#ifndef SPK_EMULATOR_DEVICE_HPP
#define SPK_EMULATOR_DEVICE_HPP

#include "tests/emulator/emulator.hpp"

extern emulator::index3 threadIdx, blockIdx, blockDim, gridDim;     /* of the running thread */

#define SPK_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

/* ---- Barriers and lanes ---- */

inline void __syncthreads(SPK_HERE) { emulator::cta_barrier(file, line); }
inline void __syncwarp(unsigned mask = emulator::FULL_MASK, SPK_HERE) {
    emulator::meet(emulator::SYNCWARP, mask, nullptr, file, line, [](void *const *) {});
}
inline void __threadfence() {}

namespace emulator {

template <typename T> struct lane_value { T value; uint32_t from; T result; };
/* Each lane gets the value of lane `from`; of one that is not in the mask it would be anything: poison. */
template <typename T> inline T shuffle(uint32_t mask, T value, uint32_t from, const char *file, int line) {
    lane_value<T> mine = { value, from, value };
    meet(SHUFFLE, mask, &mine, file, line, [mask](void *const *lanes) {
        for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
            lane_value<T> &m = *(lane_value<T> *)lanes[__builtin_ctz(rest)];
            if ((mask >> m.from & 1) != 0) m.result = ((const lane_value<T> *)lanes[m.from])->value;
            else memset(&m.result, POISON, sizeof(T));
        }
    });
    return mine.result;
}

} // namespace emulator

template <typename T> inline T __shfl_sync(unsigned mask, T value, uint32_t from, SPK_HERE) {
    return emulator::shuffle(mask, value, from % emulator::WARP, file, line);
}
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int with, SPK_HERE) {
    return emulator::shuffle(mask, value, (emulator::self->lane ^ (uint32_t)with) % emulator::WARP, file, line);
}
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, unsigned by, SPK_HERE) {
    const uint32_t lane = emulator::self->lane;
    return emulator::shuffle(mask, value, lane >= by ? lane - by : lane, file, line);
}

inline unsigned __ballot_sync(unsigned mask, bool is_true, SPK_HERE) {
    struct { bool is_true; unsigned all; } mine = { is_true, 0 };
    emulator::meet(emulator::BALLOT, mask, &mine, file, line, [mask](void *const *lanes) {
        unsigned all = 0;
        for (uint32_t rest = mask; rest != 0; rest &= rest - 1)
            if (((const decltype(mine) *)lanes[__builtin_ctz(rest)])->is_true) all |= rest & -rest;
        for (uint32_t rest = mask; rest != 0; rest &= rest - 1) ((decltype(mine) *)lanes[__builtin_ctz(rest)])->all = all;
    });
    return mine.all;
}
inline unsigned __match_all_sync(unsigned mask, unsigned value, int *are_all_same, SPK_HERE) {
    struct { unsigned value; int same; } mine = { value, 1 };
    emulator::meet(emulator::MATCH, mask, &mine, file, line, [mask](void *const *lanes) {
        const unsigned first = ((const decltype(mine) *)lanes[__builtin_ctz(mask)])->value;
        int same = 1;
        for (uint32_t rest = mask; rest != 0; rest &= rest - 1)
            if (((const decltype(mine) *)lanes[__builtin_ctz(rest)])->value != first) same = 0;
        for (uint32_t rest = mask; rest != 0; rest &= rest - 1) ((decltype(mine) *)lanes[__builtin_ctz(rest)])->same = same;
    });
    *are_all_same = mine.same;
    return mine.same ? mask : 0;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, SPK_HERE) {
    struct { unsigned value, top; } mine = { value, 0 };
    emulator::meet(emulator::REDUCE, mask, &mine, file, line, [mask](void *const *lanes) {
        unsigned top = 0;
        for (uint32_t rest = mask; rest != 0; rest &= rest - 1) top = std::max(top, ((const decltype(mine) *)lanes[__builtin_ctz(rest)])->value);
        for (uint32_t rest = mask; rest != 0; rest &= rest - 1) ((decltype(mine) *)lanes[__builtin_ctz(rest)])->top = top;
    });
    return mine.top;
}

/* ---- Memory ---- */

template <typename T> inline T __ldcg(const T *p) { return *p; }
template <typename T> inline T __ldcs(const T *p) { return *p; }
template <typename T> inline void __stcg(T *p, T value) { *p = value; }
template <typename T> inline void __stcs(T *p, T value) { *p = value; }

/* One thread runs at a time; races.cpp does not look at these. */
#define SPK_ATOMIC __attribute__((no_sanitize("thread"), noinline))
template <typename T> SPK_ATOMIC T atomicAdd(T *p, T value) {
    const T before = *p;
    *p = before + value;
    return before;
}
template <typename T> SPK_ATOMIC T atomicMax(T *p, T value) {
    const T before = *p;
    if (value > before) *p = value;
    return before;
}
template <typename T> SPK_ATOMIC T atomicExch(T *p, T value) {
    const T before = *p;
    *p = value;
    return before;
}
template <typename T> SPK_ATOMIC T atomicCAS(T *p, T expected, T value) {
    const T before = *p;
    if (before == expected) *p = value;
    return before;
}
SPK_ATOMIC inline unsigned atomicInc(unsigned *p, unsigned last) {
    const unsigned before = *p;
    *p = before >= last ? 0 : before + 1;
    return before;
}

/* ---- Integers and bits ---- */

template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) { return (std::common_type_t<A, B>)b < (std::common_type_t<A, B>)a ? b : a; }
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) { return (std::common_type_t<A, B>)a < (std::common_type_t<A, B>)b ? b : a; }

inline unsigned __float_as_uint(float v) {
    unsigned bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned long long)((unsigned __int128)a * b >> 64); }

inline unsigned __funnelshift_l(unsigned low, unsigned high, int left) {
    return (unsigned)(((uint64_t)high << 32 | low) << ((unsigned)left & 31) >> 32);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned which = selector >> (4 * i) & 15;
        const uint8_t byte = (uint8_t)(both >> (8 * (which & 7)));
        r |= (unsigned)(which & 8 ? (byte & 0x80 ? 0xff : 0) : byte) << (8 * i);
    }
    return r;
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 4; i++) sum += (int)(int8_t)((unsigned)a >> (8 * i)) * (int8_t)((unsigned)b >> (8 * i));
    return sum;
}

/* ---- Floats ---- */

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline int __float2int_rn(float v) { return v != v ? 0 : v >= 0x1p31f ? INT32_MAX : v <= -0x1p31f ? INT32_MIN : (int)lrintf(v); }
inline long long __float2ll_rn(float v) { return v != v ? INT64_MIN : v >= 0x1p63f ? INT64_MAX : v <= -0x1p63f ? INT64_MIN : llrintf(v); }
inline float __ll2float_rn(long long v) { return (float)v; }
inline float rsqrtf(float v) { return (float)(1.0 / sqrt((double)v)); }
inline float __expf(float v) { return exp2f(v * 1.4426950408889634f); }
inline float __fdividef(float a, float b) { return fabsf(b) > 0x1p126f && fabsf(b) < INFINITY ? a * 0.0f : a / b; }
inline void sincospi(double v, double *sine, double *cosine) {
    const double turned = v - 2.0 * rint(v / 2.0);
    *sine = sin(M_PI * turned);
    *cosine = cos(M_PI * turned);
}

inline long long clock64() {
    static long long count;
    return count += 1000;
}

#endif
