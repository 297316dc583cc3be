/* tests/emulator/include/kernels/ptx_cuda.cuh - kernels/ptx_cuda.cuh for the emulator: the same functions, on a CPU. */
#ifndef SPK_PTX_CUDA_CUH
#define SPK_PTX_CUDA_CUH

#include <cuda_fp16.h>
#include <time.h>

#include "tests/emulator/emulator.hpp"

#define SPK_DYNAMIC_SHARED(name) uint8_t *const name = emulator::self->block->shared

namespace spk {
namespace ptx {

inline uint8_t *dynamic_shared() { return emulator::self->block->shared; }
inline uint32_t shared_address(const void *p) { return emulator::shared_address_of(p); }

inline void griddepcontrol_wait() { emulator::wait_for_predecessor(); }
inline void griddepcontrol_launch_dependents() { emulator::release_dependents(); }

/* Whoever asks for what another CTA gives lets that one run first, and whoever gives it those that have asked. */
inline void store_release(uint32_t *to, uint32_t value) {
    *to = value;
    emulator::give_way();
}
inline uint32_t load_acquire(const uint32_t *from) {
    emulator::poll("ld.acquire");
    return *from;
}
inline unsigned long long load_relaxed(const unsigned long long *from) {
    emulator::poll("ld.relaxed");
    return *from;
}
inline void fence_acq_rel_gpu() {}

inline void cp_async_16(uint32_t to, const void *from) { emulator::copy_later(to, from, 16); }
inline void cp_async_4(uint32_t to, const void *from) { emulator::copy_later(to, from, 4); }
inline void cp_async_commit_group() { emulator::commit_copies(); }
template <int N> inline void cp_async_wait_group() { emulator::finish_copies(N); }
inline void cp_async_wait_all() { emulator::finish_copies(UINT32_MAX); }

inline void mbarrier_init(uint32_t barrier, uint32_t count) { emulator::barrier_init(barrier, count); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t size_bytes) { emulator::barrier_expect(barrier, size_bytes); }
inline uint32_t mbarrier_try_wait_parity(uint32_t barrier, uint32_t parity) {
    if (emulator::barrier_try_wait(barrier, parity)) return 1;
    emulator::poll("mbarrier.try_wait");
    return 0;
}
inline void cp_async_bulk(uint32_t to, const void *from, uint32_t size_bytes, uint32_t barrier) { emulator::bulk_copy(to, from, size_bytes, barrier); }
inline void cp_async_bulk_prefetch_l2(const void *from, uint32_t size_bytes) {
    if (size_bytes % 16 != 0 || (uintptr_t)from % 16 != 0) emulator::fail("prefetch: %u bytes from %p: not by 16", size_bytes, from);
    emulator::check_device_range(from, size_bytes, "prefetch");
}
inline void fence_proxy_async() {}

/* Four 8 x 8 matrices of halves: lane 8 i + r has the address of row r of matrix i; see attention_mma_cuda.cuh. */
inline void ldmatrix(uint32_t r[4], uint32_t address, bool is_transposed) {
    struct lane { const uint8_t *row; uint32_t *r; } mine = { emulator::shared_at(address, 16, 16, "ldmatrix"), r };
    emulator::meet(emulator::LDMATRIX, emulator::FULL_MASK, &mine, __FILE__, __LINE__, [is_transposed](void *const *lanes) {
        for (uint32_t l = 0; l < 32; l++)
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t g = l / 4, t = l % 4;
                uint16_t low, high;
                memcpy(&low, ((lane *)lanes[8 * i + (is_transposed ? 2 * t : g)])->row + 2 * (is_transposed ? g : 2 * t), 2);
                memcpy(&high, ((lane *)lanes[8 * i + (is_transposed ? 2 * t + 1 : g)])->row + 2 * (is_transposed ? g : 2 * t + 1), 2);
                ((lane *)lanes[l])->r[i] = (uint32_t)high << 16 | low;
            }
    });
}
inline void ldmatrix_x4(uint32_t r[4], uint32_t address) { ldmatrix(r, address, false); }
inline void ldmatrix_x4_trans(uint32_t r[4], uint32_t address) { ldmatrix(r, address, true); }

inline uint32_t movmatrix_trans(uint32_t x) {
    struct lane { uint32_t x, y; } mine = { x, 0 };
    emulator::meet(emulator::MOVMATRIX, emulator::FULL_MASK, &mine, __FILE__, __LINE__, [](void *const *lanes) {
        uint16_t m[8][8];
        for (uint32_t l = 0; l < 32; l++) {
            m[l / 4][l % 4 * 2] = (uint16_t)((lane *)lanes[l])->x;
            m[l / 4][l % 4 * 2 + 1] = (uint16_t)(((lane *)lanes[l])->x >> 16);
        }
        for (uint32_t l = 0; l < 32; l++) ((lane *)lanes[l])->y = (uint32_t)m[l % 4 * 2 + 1][l / 4] << 16 | m[l % 4 * 2][l / 4];
    });
    return mine.y;
}

/* Products are exact, and so is their sum in double but for its last bits; it then loses what a float has no room for, as the
 * tensor core's does. */
inline float toward_zero(double sum) {
    const float f = (float)sum;
    return fabs((double)f) > fabs(sum) ? nextafterf(f, 0.0f) : f;
}
inline void mma_m16n8k16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
    struct lane { float *c; const uint32_t *a; uint32_t b[2]; } mine = { c, a, { b0, b1 } };
    emulator::meet(emulator::MMA, emulator::FULL_MASK, &mine, __FILE__, __LINE__, [](void *const *lanes) {
        float a_of[16][16], b_of[8][16];
        for (uint32_t l = 0; l < 32; l++) {
            const lane &x = *(lane *)lanes[l];
            const uint32_t g = l / 4, t = l % 4;
            for (uint32_t h = 0; h < 2; h++) {
                for (uint32_t i = 0; i < 4; i++) a_of[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + h] = emulator::half_values[(uint16_t)(x.a[i] >> (16 * h))];
                for (uint32_t i = 0; i < 2; i++) b_of[g][2 * t + 8 * i + h] = emulator::half_values[(uint16_t)(x.b[i] >> (16 * h))];
            }
        }
        for (uint32_t l = 0; l < 32; l++)
            for (uint32_t i = 0; i < 4; i++) {
                float &to = ((lane *)lanes[l])->c[i];
                const float *row = a_of[l / 4 + 8 * (i / 2)], *column = b_of[l % 4 * 2 + i % 2];
                double sum = (double)to;
                for (uint32_t k = 0; k < 16; k++) sum += (double)(row[k] * column[k]);
                to = toward_zero(sum);
            }
    });
}

inline int dp4a_u32_s32(uint32_t a, uint32_t b, int sum) {
    for (int i = 0; i < 4; i++) sum += (int)(uint8_t)(a >> (8 * i)) * (int8_t)(b >> (8 * i));
    return sum;
}
inline float ex2_approx_ftz(float x) {
    const float y = exp2f(fabsf(x) < 0x1p-126f ? 0.0f : x);
    return fabsf(y) < 0x1p-126f ? 0.0f : y;
}

inline void keep(uint32_t value) { __asm__ volatile("" ::"r"(value)); }
inline unsigned long long globaltimer_ns() {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (unsigned long long)now.tv_sec * 1000000000u + (unsigned long long)now.tv_nsec;
}

} // namespace ptx
} // namespace spk

#endif
