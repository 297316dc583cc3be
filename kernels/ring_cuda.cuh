/* kernels/ring_cuda.cuh - weights on their way into shared memory: a ring of stages that one warp fills and reads.
 *
 * A stage is one piece (a tile, a stretch of a float row) or a few (a gate tile and its up tile, tiles of several row groups).  sm_90 and later: one lane
 * starts bulk copies and all lanes wait on the stage's barrier, so that nothing waits in registers and a stage costs two
 * instructions however many bytes it has.  Before sm_90: 16-byte asynchronous copies by all lanes, in order.
 *
 * Use: begin() once, fill() stages in order 0, 1, .. count-1, 0, ..; wait() for a stage in the same order; refill it only
 * after every lane has read it (__syncwarp).  Pieces are 16-byte aligned and multiples of 16 bytes.
 */
#ifndef SPK_RING_CUDA_CUH
#define SPK_RING_CUDA_CUH

#include "kernels/device_cuda.cuh"

namespace spk {

constexpr uint32_t RING_STAGES_MAX = 4;

struct warp_ring {
    uint8_t  *stages;             /* shared; stage_count * stage_bytes of this warp */
    uint64_t *barriers;           /* shared; stage_count of this warp */
    uint32_t  stage_bytes, stage_count;
    uint32_t  phases;             /* bit s: parity that ends the next wait for stage s */

    __device__ __forceinline__ void begin(uint8_t *ring, uint64_t *barrier_table, uint32_t bytes, uint32_t count) {
        const uint32_t warp = threadIdx.x >> 5;
        stage_bytes = bytes;
        stage_count = count;
        stages = ring + (size_t)warp * bytes * count;
        barriers = barrier_table + warp * RING_STAGES_MAX;
        phases = 0;
#if __CUDA_ARCH__ >= 900
        if ((threadIdx.x & 31) == 0)
            for (uint32_t s = 0; s < count; s++)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"((uint32_t)__cvta_generic_to_shared(barriers + s)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        __syncwarp();
#endif
    }
    __device__ __forceinline__ uint8_t *stage(uint32_t s) const { return stages + (size_t)s * stage_bytes; }

    /* piece_count pieces of size_bytes, `apart` bytes from each other; they come to lie side by side. */
    __device__ __forceinline__ void fill(uint32_t s, const uint8_t *from, int64_t apart, uint32_t size_bytes, uint32_t piece_count) {
#if __CUDA_ARCH__ >= 900
        if ((threadIdx.x & 31) == 0) {
            const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(barriers + s);
            uint32_t to = (uint32_t)__cvta_generic_to_shared(stage(s));
            asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(size_bytes * piece_count) : "memory");
            for (uint32_t i = 0; i < piece_count; i++, from += apart, to += size_bytes)
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             ::"r"(to), "l"(from), "r"(size_bytes), "r"(barrier) : "memory");
        }
#else
        for (uint32_t i = 0; i < piece_count; i++, from += apart) {
            const uint32_t to = (uint32_t)__cvta_generic_to_shared(stage(s) + i * size_bytes);
            for (uint32_t at = 16 * (threadIdx.x & 31); at < size_bytes; at += 512)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + at), "l"(from + at) : "memory");
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    /* A stage that is passed over: keeps the order of groups where copies are counted. */
    __device__ __forceinline__ void skip() {
#if __CUDA_ARCH__ < 900
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    __device__ __forceinline__ void wait(uint32_t s) {
#if __CUDA_ARCH__ >= 900
        const uint32_t barrier = (uint32_t)__cvta_generic_to_shared(barriers + s), parity = (phases >> s) & 1;
        uint32_t done = 0;
        while (!done)
            asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
        phases ^= 1u << s;
#else
        (void)s;
        switch (stage_count) {      /* all groups but those of the stages after this one */
        case 1:  asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 2:  asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 3:  asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        }
        __syncwarp();
#endif
    }
};

} // namespace spk

#endif
