/* kernels/ptx_cuda.cuh - the instructions that CUDA C++ has no name for, one function each and nothing else.
 *
 * Named after the instruction; what it does is in the PTX ISA, why it is used where it is called.  The kernels have no inline
 * assembly but this: tests/emulator has a file of the same name in front of it, with the same functions for a CPU.
 * A shared address is an address in the CTA's shared memory, of 32 bits.
 */
#ifndef SPK_PTX_CUDA_CUH
#define SPK_PTX_CUDA_CUH

#include <stdint.h>

namespace spk {
namespace ptx {

/* ---- Shared memory ---- */

/* The launch's dynamic shared memory, uint8_t name[]; and as a pointer. */
#define SPK_DYNAMIC_SHARED(name) extern __shared__ __align__(128) uint8_t name[]
__device__ __forceinline__ uint8_t *dynamic_shared() {
    SPK_DYNAMIC_SHARED(dynamic_shared_memory);
    return dynamic_shared_memory;
}
__device__ __forceinline__ uint32_t shared_address(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- Launch edges: sm_90 and later ---- */

__device__ __forceinline__ void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void griddepcontrol_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

/* ---- Order of global memory ---- */

__device__ __forceinline__ void store_release(uint32_t *to, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *from) {
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long *from) {
    unsigned long long value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

/* ---- Asynchronous copies ---- */

__device__ __forceinline__ void cp_async_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_4(uint32_t to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/* ---- Bulk copies and the barriers that they complete: sm_90 and later ---- */

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t size_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size_bytes) : "memory");
}
__device__ __forceinline__ uint32_t mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}
__device__ __forceinline__ void cp_async_bulk(uint32_t to, const void *from, uint32_t size_bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(size_bytes), "r"(barrier) : "memory");
}
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void *from, uint32_t size_bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(size_bytes) : "memory");
}
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* ---- Matrices of a warp ---- */

__device__ __forceinline__ void ldmatrix_x4(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t r[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
/* c += a b */
__device__ __forceinline__ void mma_m16n8k16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* ---- Arithmetic ---- */

/* Four unsigned bytes of a times four signed ones of b. */
__device__ __forceinline__ int dp4a_u32_s32(uint32_t a, uint32_t b, int sum) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
    return r;
}
__device__ __forceinline__ float ex2_approx_ftz(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- The compiler and the clock ---- */

/* Whatever made `value` is not left out.  An empty statement would do for the compiler, but ptxas does not see those. */
__device__ __forceinline__ void keep(uint32_t value) {
    asm volatile("{\n .reg .pred p;\n setp.eq.u32 p, %0, 1;\n @p nanosleep.u32 0;\n}" ::"r"(value));
}
__device__ __forceinline__ unsigned long long globaltimer_ns() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

} // namespace ptx
} // namespace spk

#endif
