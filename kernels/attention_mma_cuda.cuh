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

#include <stdint.h>

namespace spk {

__device__ __forceinline__ uint8_t *dynamic_shared() {
    extern __shared__ __align__(128) uint8_t dynamic_shared_memory[];
    return dynamic_shared_memory;
}
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

struct fragment_a { uint32_t r[4]; };

__device__ __forceinline__ fragment_a load_matrices(uint32_t address) {
    fragment_a a;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3]) : "r"(address) : "memory");
    return a;
}
__device__ __forceinline__ fragment_a load_matrices_transposed(uint32_t address) {
    fragment_a a;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(a.r[0]), "=r"(a.r[1]), "=r"(a.r[2]), "=r"(a.r[3]) : "r"(address) : "memory");
    return a;
}

/* c += a b */
__device__ __forceinline__ void multiply_add(float c[4], const fragment_a &a, uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

/* The 8 x 8 matrix of halves whose row g, columns 2t, 2t+1 the lane holds: row g, columns 2t, 2t+1 of its transpose. */
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* 2^x within 2^-22 of itself; 0 below 2^-126. */
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Everything before is visible to the GPU before anything after; with a barrier in front, for the whole CTA. */
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long *p) {
    unsigned long long v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}

/* Plain stores to shared memory before, bulk copies to the same place after. */
__device__ __forceinline__ void fence_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Ask for a multiple of 16 bytes to come into the L2 cache; by one lane. */
__device__ __forceinline__ void prefetch_to_l2(const uint8_t *from, uint32_t size_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(size_bytes) : "memory");
#else
    (void)from;
    (void)size_bytes;
#endif
}

} // namespace spk

#endif
