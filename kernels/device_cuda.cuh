/* kernels/device_cuda.cuh - what every decode kernel shares: launch edges, streaming loads, the input vector in shared memory.
 *
 * Launch edges.  Kernels of a step form one chain with programmatic launch edges (sm_90 and later; plain edges before):
 * each kernel lets its successor start at once (chain_release), issues loads that depend on nothing written in this step,
 * then waits for its predecessor (chain_wait) and only then reads activations.  What may be read before the wait: weights,
 * and whatever the step before wrote (states, caches, the position), since steps are separate launches and those are
 * ordered whole.
 *
 * The input vector x of a GEMV is prepared by every CTA for itself: residual adds, RMSNorm, int8 codes with one F32 scale
 * per 32 (the same arithmetic as spk_activation on the CPU).  Sums are taken in an order that does not depend on the
 * number of threads: 8 values a lane, a butterfly over the warp's 256 values, then the 256-value chunks in order.
 */
#ifndef SPK_DEVICE_CUDA_CUH
#define SPK_DEVICE_CUDA_CUH

#include <cuda_fp16.h>
#include <stdint.h>
#include "kernels/cuda.h"

namespace spk {

constexpr unsigned FULL = 0xffffffffu;

__device__ __forceinline__ void chain_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void chain_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* 16 bytes of a weight: read once, so it should not displace anything. */
__device__ __forceinline__ uint4 load_weights(const uint8_t *p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
__device__ __forceinline__ unsigned short load_weights_u16(const uint8_t *p) {
    unsigned short v;
    asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}
/* Activations were written by another SM: read them from L2. */
__device__ __forceinline__ float4 load_activation4(const float *p) { return __ldcg((const float4 *)p); }

/* Four unsigned code bytes times four signed activation bytes. */
__device__ __forceinline__ int dot_us(uint32_t codes, uint32_t x, int sum) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(codes), "r"(x), "r"(sum));
    return r;
}
__device__ __forceinline__ int dot_ss(uint32_t codes, uint32_t x, int sum) { return __dp4a((int)codes, (int)x, sum); }

__device__ __forceinline__ float silu(float t) { return t / (1.0f + expf(-t)); }
__device__ __forceinline__ float sigmoid(float t) { return 1.0f / (1.0f + expf(-t)); }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

/* A prepared vector of n = 256 k values (or, for float weights alone, any n that is a multiple of 32) in shared memory.
 * Bytes: vector_bytes(n).  Lanes of a tile read consecutive super-blocks, so super-block is the fastest index:
 *   q8 [16 chunks][k] x 16 bytes, scale [8][k], sum32 [8][k] = scale * sum of codes, sum16 [16][k] likewise */
struct int8_vector {
    uint4 *q8;
    float *scale, *sum32, *sum16;
    uint32_t k;
};
struct shared_vector {
    int8_vector main, rest;   /* rest: what main's codes leave out, where the source has_rest */
    float *f32;
    float *chunk_sums;        /* [k] */
    uint32_t k;
};

constexpr uint32_t INT8_BYTES = 256 + 4 * (8 + 8 + 16);   /* of a super-block */
__host__ __device__ constexpr uint32_t vector_chunks(uint32_t n) { return (n + 255) / 256; }
__host__ __device__ constexpr uint32_t vector_bytes(uint32_t n) { return vector_chunks(n) * (2 * INT8_BYTES + 4 * 256 + 16); }

__device__ __forceinline__ int8_vector carve_int8(uint8_t *memory, uint32_t k) {
    int8_vector v;
    v.k = k;
    v.q8 = (uint4 *)memory;
    v.scale = (float *)(memory + 256 * k);
    v.sum32 = v.scale + 8 * k;
    v.sum16 = v.sum32 + 8 * k;
    return v;
}

__device__ __forceinline__ shared_vector carve_vector(uint8_t *memory, uint32_t n) {
    uint32_t k = vector_chunks(n);
    shared_vector v;
    v.k = k;
    v.main = carve_int8(memory, k);
    v.rest = carve_int8(memory + INT8_BYTES * k, k);
    v.f32 = (float *)(memory + 2 * INT8_BYTES * k);
    v.chunk_sums = v.f32 + 256 * k;
    return v;
}

/* A lane's eight values (8 lane .. of chunk kb) as int8, and what the codes leave out as a second vector where has_rest.
 * Whole warps only.  One copy of the code serves both parts. */
__device__ __forceinline__ void quantize_eight(const shared_vector &v, uint32_t kb, uint32_t lane, float x[8], bool has_rest) {
    uint8_t *base = (uint8_t *)v.main.q8;
#pragma unroll 1
    for (int part = 0; part < (has_rest ? 2 : 1); part++, base += INT8_BYTES * v.k) {
        const int8_vector to = carve_int8(base, v.k);
        float top = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x[i]));
        top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
        top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
        const float scale = top / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        uint32_t packed[2] = { 0, 0 };
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int q = max(-127, min(127, __float2int_rn(x[i] * inverse)));
            sum += q;
            packed[i / 4] |= (uint32_t)(q & 255) << (8 * (i % 4));
            x[i] = fmaf(-scale, (float)q, x[i]);
        }
        const int sum16 = sum + __shfl_xor_sync(FULL, sum, 1), sum32 = sum16 + __shfl_xor_sync(FULL, sum16, 2);
        const uint32_t chunk = lane / 2;
        ((uint2 *)to.q8)[(chunk * v.k + kb) * 2 + (lane & 1)] = make_uint2(packed[0], packed[1]);
        if ((lane & 1) == 0) to.sum16[chunk * v.k + kb] = scale * (float)sum16;
        if ((lane & 3) == 0) {
            to.scale[(lane / 4) * v.k + kb] = scale;
            to.sum32[(lane / 4) * v.k + kb] = scale * (float)sum32;
        }
    }
}

/* Eight consecutive floats of a lane. */
struct eight {
    float4 low, high;
    __device__ __forceinline__ void add(const eight &o) {
        low.x += o.low.x; low.y += o.low.y; low.z += o.low.z; low.w += o.low.w;
        high.x += o.high.x; high.y += o.high.y; high.z += o.high.z; high.w += o.high.w;
    }
};
__device__ __forceinline__ eight load_eight(const float *p) { return { load_activation4(p), load_activation4(p + 4) }; }
__device__ __forceinline__ eight zero_eight() { return { make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0) }; }

/* Norm weights of a warp's first chunk do not depend on the predecessor: fetched before chain_wait, or each hop pays a miss
 * to memory for them. */
struct norm_prefetch {
    eight weight;
    __device__ __forceinline__ void load(const spk_cuda_source &s) {
        uint32_t at = threadIdx.x * 8;
        weight = s.norm_weight != nullptr && at < s.count ? load_eight(s.norm_weight + at) : zero_eight();
    }
};

/* Fill the vector from a source (kernels/cuda.h).  All threads of the CTA; ends with a barrier.
 * `writer`: this CTA stores x_out where it is set. */
__device__ __forceinline__ void prepare_vector(const spk_cuda_source &s, const shared_vector &v, const norm_prefetch &norm, bool writer) {
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll 1
    for (uint32_t c = warp; c < v.k; c += warps) {
        const uint32_t at = c * 256 + lane * 8;
        eight x = zero_eight();
        if (at < s.count) {
            x = load_eight(s.x + at);
            const eight first = s.add[0] != nullptr ? load_eight(s.add[0] + at) : zero_eight();
            const eight second = s.add[1] != nullptr ? load_eight(s.add[1] + at) : zero_eight();
            x.add(first);            /* adding zeros changes no bit but the sign of a zero */
            x.add(second);
        }
        *(float4 *)(v.f32 + at) = x.low;
        *(float4 *)(v.f32 + at + 4) = x.high;
        if (writer && s.x_out != nullptr && at < s.count) {
            *(float4 *)(s.x_out + at) = x.low;
            *(float4 *)(s.x_out + at + 4) = x.high;
        }
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) squares = fmaf(((const float *)&x)[i], ((const float *)&x)[i], squares);
        squares = warp_sum(squares);
        if (lane == 0) v.chunk_sums[c] = squares;
    }
    __syncthreads();
    float factor = 1.0f;
    if (s.norm_weight != nullptr) {
        float total = 0.0f;
        for (uint32_t c = 0; c < v.k; c++) total += v.chunk_sums[c];
        factor = 1.0f / sqrtf(total / (float)s.count + s.eps);
    }
#pragma unroll 1
    for (uint32_t c = warp; c < v.k; c += warps) {
        const uint32_t at = c * 256 + lane * 8;
        eight value = { *(float4 *)(v.f32 + at), *(float4 *)(v.f32 + at + 4) };
        float *x = (float *)&value;
        if (s.norm_weight != nullptr) {
            const eight weight = c == warp ? norm.weight : at < s.count ? load_eight(s.norm_weight + at) : zero_eight();
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = x[i] * factor * ((const float *)&weight)[i];
            *(float4 *)(v.f32 + at) = value.low;
            *(float4 *)(v.f32 + at + 4) = value.high;
        }
        quantize_eight(v, c, lane, x, s.has_rest);
    }
    __syncthreads();
}

} // namespace spk

#endif
