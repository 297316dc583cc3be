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
                ptx::mbarrier_init(ptx::shared_address(barriers + s), 1);
        ptx::fence_mbarrier_init();
        __syncwarp();
#endif
    }
    __device__ __forceinline__ uint8_t *stage(uint32_t s) const { return stages + (size_t)s * stage_bytes; }

    /* piece_count pieces of size_bytes, `apart` bytes from each other; they come to lie side by side. */
    __device__ __forceinline__ void fill(uint32_t s, const uint8_t *from, int64_t apart, uint32_t size_bytes, uint32_t piece_count) {
#if __CUDA_ARCH__ >= 900
        if ((threadIdx.x & 31) == 0) {
            const uint32_t barrier = ptx::shared_address(barriers + s);
            uint32_t to = ptx::shared_address(stage(s));
            ptx::mbarrier_arrive_expect_tx(barrier, size_bytes * piece_count);
            for (uint32_t i = 0; i < piece_count; i++, from += apart, to += size_bytes)
                ptx::cp_async_bulk(to, from, size_bytes, barrier);
        }
#else
        for (uint32_t i = 0; i < piece_count; i++, from += apart) {
            const uint32_t to = ptx::shared_address(stage(s) + i * size_bytes);
            for (uint32_t at = 16 * (threadIdx.x & 31); at < size_bytes; at += 512) ptx::cp_async_16(to + at, from + at);
        }
        ptx::cp_async_commit_group();
#endif
    }
    /* A stage that is passed over: keeps the order of groups where copies are counted. */
    __device__ __forceinline__ void skip() {
#if __CUDA_ARCH__ < 900
        ptx::cp_async_commit_group();
#endif
    }
    __device__ __forceinline__ void wait(uint32_t s) {
#if __CUDA_ARCH__ >= 900
        const uint32_t barrier = ptx::shared_address(barriers + s), parity = (phases >> s) & 1;
        while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {}
        phases ^= 1u << s;
#else
        (void)s;
        switch (stage_count) {      /* all groups but those of the stages after this one */
        case 1:  ptx::cp_async_wait_group<0>(); break;
        case 2:  ptx::cp_async_wait_group<1>(); break;
        case 3:  ptx::cp_async_wait_group<2>(); break;
        default: ptx::cp_async_wait_group<3>(); break;
        }
        __syncwarp();
#endif
    }
};

} // namespace spk

#endif
