/* kernels/attention_mma_cuda.cuh - the instructions behind attention: tensor core products, their fragments, fences.
 *
 * Fragments of mma.m16n8k16 (PTX ISA), g = lane / 4, t = lane % 4; a register has two halves, the lower index in its low bits:
 *   A [16][16]  0: row g, columns 2t, 2t+1    1: row g+8, the same    2: row g, columns 2t+8, 2t+9    3: row g+8, the same
 *   B [16][8]   0: rows 2t, 2t+1 of column g  1: rows 2t+8, 2t+9
 *   C [16][8]   0, 1: row g, columns 2t, 2t+1                         2, 3: row g+8, the same
 * ldmatrix reads four 8 x 8 matrices of halves; lane 8 i + r gives the address of row r of matrix i, and register i gets
 * row g, columns 2t, 2t+1 of matrix i, or of its transpose.
 */
#ifndef SPK_ATTENTION_MMA_CUDA_CUH
#define SPK_ATTENTION_MMA_CUDA_CUH

#include "kernels/ptx_cuda.cuh"

namespace spk {

struct fragment_a { uint32_t r[4]; };

__device__ __forceinline__ fragment_a load_matrices(uint32_t address) {
    fragment_a a;
    ptx::ldmatrix_x4(a.r, address);
    return a;
}
__device__ __forceinline__ fragment_a load_matrices_transposed(uint32_t address) {
    fragment_a a;
    ptx::ldmatrix_x4_trans(a.r, address);
    return a;
}

/* c += a b */
__device__ __forceinline__ void multiply_add(float c[4], const fragment_a &a, uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16(c, a.r, b0, b1);
}

/* The 8 x 8 matrix of halves whose row g, columns 2t, 2t+1 the lane holds: row g, columns 2t, 2t+1 of its transpose. */
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) { return ptx::movmatrix_trans(x); }

/* 2^x within 2^-22 of itself; 0 below 2^-126. */
__device__ __forceinline__ float exp2_fast(float x) { return ptx::ex2_approx_ftz(x); }

/* Everything before is visible to the GPU before anything after; with a barrier in front, for the whole CTA. */
__device__ __forceinline__ void fence_gpu() { ptx::fence_acq_rel_gpu(); }

/* Plain stores to shared memory before, bulk copies to the same place after. */
__device__ __forceinline__ void fence_copies() {
#if __CUDA_ARCH__ >= 900
    ptx::fence_proxy_async();
#endif
}

/* Ask for a multiple of 16 bytes to come into the L2 cache; by one lane. */
__device__ __forceinline__ void prefetch_to_l2(const uint8_t *from, uint32_t size_bytes) {
#if __CUDA_ARCH__ >= 900
    ptx::cp_async_bulk_prefetch_l2(from, size_bytes);
#else
    (void)from;
    (void)size_bytes;
#endif
}

} // namespace spk

#endif
