/* kernels/device_cuda.cuh - what every decode kernel shares: launch edges, loads, scalar formulas, warp sums.
 *
 * Launch edges.  Kernels of a step form one chain with programmatic launch edges (sm_90 and later; plain edges before).
 * A kernel lets its successor start (chain_release), issues loads that depend on nothing written just before it, then waits
 * until its predecessor is complete (chain_wait) and only then reads activations.  A successor that fits beside its predecessor
 * has its loads in flight while that one runs, so shared memory is limited to about half of an SM's, and registers where weights are
 * held (held_*_cuda.cu): the streaming kernels measured faster with more (NOTES.md #14).
 *
 * What may be read before the wait: weights, whatever the step before wrote (states, caches, the position), since steps are
 * separate launches and those are ordered whole, and what a signal vouches for.
 */
#ifndef SPK_DEVICE_CUDA_CUH
#define SPK_DEVICE_CUDA_CUH

#include <cuda_fp16.h>
#include <stdint.h>
#include "kernels/cuda.h"
#include "kernels/ptx_cuda.cuh"

namespace spk {

constexpr unsigned FULL = 0xffffffffu;

__device__ __forceinline__ void chain_wait() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_wait();
#endif
}
__device__ __forceinline__ void chain_release() {
#if __CUDA_ARCH__ >= 900
    ptx::griddepcontrol_launch_dependents();
#endif
}

/* Activations were written by another SM: read them from L2. */
__device__ __forceinline__ float4 load_activation4(const float *p) { return __ldcg((const float4 *)p); }

/* Four unsigned code bytes times four signed activation bytes. */
__device__ __forceinline__ int dot_us(uint32_t codes, uint32_t x, int sum) { return ptx::dp4a_u32_s32(codes, x, sum); }
__device__ __forceinline__ int dot_ss(uint32_t codes, uint32_t x, int sum) { return __dp4a((int)codes, (int)x, sum); }

/* Signals (cuda.h); one thread.  All CTAs of the kernel that gives one are on the device before the one that awaits it starts. */
__device__ __forceinline__ void give(const spk_cuda_signal &s, uint32_t step) { ptx::store_release(s.d_flag, step + 1); }
/* What give needs: no kernel of the step but its last one changes it, so it may be asked for before the wait. */
__device__ __forceinline__ uint32_t step_of(const spk_cuda_signal &s) { return s.d_flag != nullptr ? __ldcg(s.d_step) : 0; }
__device__ __forceinline__ void await(const spk_cuda_signal &s) {
    const uint32_t value = __ldcg(s.d_step) + 1;
    while (ptx::load_acquire(s.d_flag) != value) {}
}

/* A kernel's arguments lie in constant memory, which is cold at every launch: a miss for each 64 bytes.  All at once, before
 * the wait, costs one. */
template <typename ARGS> __device__ __forceinline__ void touch_arguments(const ARGS &a) {
    const uint32_t *words = (const uint32_t *)&a;
    uint32_t seen = 0;
#pragma unroll
    for (uint32_t i = 0; i < sizeof(ARGS) / 4; i += 16) seen |= words[i];
    ptx::keep(seen);
}

/* Within 2^-20 relative of the exact values: hardware exponential (2 + |t|/16 ulp) and reciprocal. */
__device__ __forceinline__ float sigmoid(float t) { return __fdividef(1.0f, 1.0f + __expf(-t)); }
__device__ __forceinline__ float silu(float t) { return t * sigmoid(t); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}
/* Sum over the p lanes (a power of two) that share a row; every lane of the row gets it. */
__device__ __forceinline__ float lanes_sum(float v, uint32_t lane_count) {
    for (uint32_t o = lane_count >> 1; o > 0; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

/* Eight consecutive floats of a lane. */
struct eight {
    float4 low, high;
    __device__ __forceinline__ void add(const eight &o) {
        low.x += o.low.x; low.y += o.low.y; low.z += o.low.z; low.w += o.low.w;
        high.x += o.high.x; high.y += o.high.y; high.z += o.high.z; high.w += o.high.w;
    }
    __device__ __forceinline__ void store(float *p) const {
        *(float4 *)p = low;
        *(float4 *)(p + 4) = high;
    }
};
__device__ __forceinline__ eight load_eight(const float *p) { return { load_activation4(p), load_activation4(p + 4) }; }
__device__ __forceinline__ eight zero_eight() { return { make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0) }; }

/* Larger value, larger key; never zero for a number. */
__device__ __forceinline__ uint32_t order_bits(float value) {
    uint32_t bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float order_value(uint32_t bits) {
    return __uint_as_float(bits & 0x80000000u ? bits & 0x7fffffffu : ~bits);
}
/* Larger value first, then lower index. */
__device__ __forceinline__ unsigned long long order_key(float value, uint32_t index) {
    return (unsigned long long)order_bits(value) << 32 | (0xffffffffu - index);
}

} // namespace spk

#endif
