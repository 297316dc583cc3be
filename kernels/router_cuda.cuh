/* kernels/router_cuda.cuh - logits of a router as sums in fixed point.
 *
 * A logit is sum_c W[e][c] norm[c] x[c] / rms(x).  The factor 1 / rms(x) is one number for all experts, so the rest is a sum of what any 16
 * columns contribute, and whoever completes 16 values of x can add their contribution before x is known as a whole: the output
 * projection does, and no kernel stands between it and the experts.  Contributions are F32 sums, rounded to 2^-32 and then added
 * as 64-bit integers: in any order the same bits.
 *
 * Error of a logit before the factor: 2^-33 for each 16 columns, and 7 roundings of 2^-24 in a contribution (norm, product, sums).  A contribution beyond
 * +-2^19 counts as 2^19 (a NaN as +2^19, which then goes with a factor that is NaN): 2048 of them do not wrap.
 */
#ifndef SPK_ROUTER_CUDA_CUH
#define SPK_ROUTER_CUDA_CUH

#include "kernels/input_cuda.cuh"

namespace spk {

constexpr uint32_t ROUTER_GROUP = SPK_CUDA_ROUTER_GROUP;       /* columns of a contribution */
constexpr float ROUTER_LARGEST = 0x1p19f, ROUTER_UNITS = 0x1p32f;

/* Where row i's sum is: four of them in a line of 128 bytes.  Every CTA of a projection adds to each at about the same time, and a slice of L2
 * takes one after another. */
__host__ __device__ __forceinline__ uint32_t router_place(uint32_t i) { return i / 4 * 16 + i % 4; }

__device__ __forceinline__ long long router_fixed(float contribution) {
    return __float2ll_rn(fmaxf(fminf(contribution, ROUTER_LARGEST), -ROUTER_LARGEST) * ROUTER_UNITS);
}
/* Of row i, in units of 2^-32 and without the factor: for comparisons. */
__device__ __forceinline__ float router_value(const spk_cuda_routing &a, uint32_t i) { return __ll2float_rn(__ldcg(a.sums + router_place(i))); }
/* What makes a logit of such a value, by one warp.  squares[g]: of x's g-th 16 values. */
__device__ __forceinline__ float router_scale(const spk_cuda_routing &a) {
    float total = 0.0f;
    for (uint32_t g = threadIdx.x & 31; g < a.column_count / ROUTER_GROUP; g += 32) total += __ldcg(a.squares + g);
    return rsqrtf(__fdividef(warp_sum(total), (float)a.column_count) + a.eps) * (1.0f / ROUTER_UNITS);
}

/* A row's weights of 16 columns in the arrangement of spk_cuda_router, times x of these columns: four sums of four, then of those. */
__device__ __forceinline__ float router_dot(const float4 *weights, uint32_t row_count, const float4 *x) {
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 w = weights[i * row_count], v = x[i];
        sums[i] = fmaf(w.w, v.w, fmaf(w.z, v.z, fmaf(w.y, v.y, w.x * v.x)));
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}
/* What 16 values x contribute to a row, by one thread. */
__device__ __forceinline__ void router_add(const spk_cuda_router &a, uint32_t row, const float4 *group_weights, const float4 *x) {
    const long long sum = router_fixed(router_dot(group_weights + row, a.row_count, x));
    atomicAdd((unsigned long long *)a.sums + router_place(row), (unsigned long long)sum);
}
__device__ __forceinline__ void router_square(const spk_cuda_router &a, uint32_t group, const float4 *x) { a.squares[group] = router_dot(x, 1, x); }
__host__ __device__ __forceinline__ uint32_t router_group_bytes(uint32_t row_count) { return row_count * ROUTER_GROUP * (uint32_t)sizeof(float); }

} // namespace spk

#endif
