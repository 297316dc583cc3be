/* kernels/held_cuda.cuh - a warp's tiles held in shared memory, and the input vector prepared in one pass of the CTA.
 *
 * A kernel that holds its weights has asked for them, all that it has at a time, before its input is there, and leaves its successor's
 * CTA room on the SM.  They come by bulk copies: behind loads of weights into registers, those of x arrived late (NOTES.md #20).
 * It is for rows that are one tile wide and fit a few to a warp; everything else is streamed (ring_cuda.cuh).  Sums are made in the
 * same order: same bits.
 */
#ifndef SPK_HELD_CUDA_CUH
#define SPK_HELD_CUDA_CUH

#include "kernels/tile_cuda.cuh"

namespace spk {

/* ---- Tiles ---- */

__host__ __device__ constexpr uint32_t tile_bytes_of(uint32_t type) {
    return type == SPK_TYPE_Q4_K ? 9 * 512 : type == SPK_TYPE_Q5_K ? 11 * 512 : type == SPK_TYPE_Q6_K ? 13 * 512 + 64 : 17 * 512;
}
__host__ __device__ constexpr uint32_t tile_bytes_max(uint32_t types) {
    return tile_bytes_of(types & Q8_0 ? SPK_TYPE_Q8_0 : types & Q6_K ? SPK_TYPE_Q6_K : types & Q5_K ? SPK_TYPE_Q5_K : SPK_TYPE_Q4_K);
}

/* One or two tiles of a warp, side by side in shared memory, that are asked for and waited for together. */
struct tile_slots {
    uint8_t  *memory;                    /* 16-byte aligned */
    uint64_t *barrier;
    __device__ __forceinline__ void begin() const {
#if __CUDA_ARCH__ >= 900
        if ((threadIdx.x & 31) == 0) ptx::mbarrier_init(ptx::shared_address(barrier), 1);
        ptx::fence_mbarrier_init();
        __syncwarp();
#endif
    }
    /* After every lane has read what was there before.  second_bytes 0: one tile. */
    __device__ __forceinline__ void fill(const uint8_t *first, uint32_t first_bytes, const uint8_t *second = nullptr, uint32_t second_bytes = 0) const {
        const uint32_t to = ptx::shared_address(memory), lane = threadIdx.x & 31;
#if __CUDA_ARCH__ >= 900
        if (lane > 0) return;
        ptx::mbarrier_arrive_expect_tx(ptx::shared_address(barrier), first_bytes + second_bytes);
        ptx::cp_async_bulk(to, first, first_bytes, ptx::shared_address(barrier));
        if (second_bytes > 0) ptx::cp_async_bulk(to + first_bytes, second, second_bytes, ptx::shared_address(barrier));
#else
        for (uint32_t at = 16 * lane; at < first_bytes; at += 512) ptx::cp_async_16(to + at, first + at);
        for (uint32_t at = 16 * lane; at < second_bytes; at += 512) ptx::cp_async_16(to + first_bytes + at, second + at);
        ptx::cp_async_commit_group();
#endif
    }
    /* For the n-th time, from 0. */
    __device__ __forceinline__ void wait(uint32_t n) const {
#if __CUDA_ARCH__ >= 900
        while (!ptx::mbarrier_try_wait_parity(ptx::shared_address(barrier), n & 1)) {}
#else
        (void)n;
        ptx::cp_async_wait_group<0>();
        __syncwarp();
#endif
    }
    __device__ __forceinline__ shared_tile tile(uint32_t at_bytes) const { return { memory + at_bytes, threadIdx.x & 31 }; }
};

/* Sum over LANES neighbouring lanes, in the order of lanes_sum. */
template <uint32_t LANES> __device__ __forceinline__ float lanes_sum_of(float v) {
#pragma unroll
    for (uint32_t o = LANES >> 1; o > 0; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

/* ---- The input ---- */

/* Eight values of a row of floats of any type. */
__device__ __forceinline__ eight load_float_eight(const uint8_t *row, uint32_t type, uint32_t at) {
    if (type == SPK_TYPE_F32) {
        const float4 *const from = (const float4 *)(row + 4 * at);
        return { __ldcs(from), __ldcs(from + 1) };
    }
    const uint4 raw = __ldcs((const uint4 *)(row + 2 * at));
    const uint32_t words[4] = { raw.x, raw.y, raw.z, raw.w };
    eight value;
#pragma unroll
    for (int i = 0; i < 4; i++)
        ((float2 *)&value)[i] = type == SPK_TYPE_BF16 ? make_float2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u))
                                                      : __half22float2(*(const __half2 *)&words[i]);
    return value;
}

/* A thread's share of a source; what every source has is asked for at once, of all shares before any is used. */
template <bool MAY_HAVE_PARTS> struct source_eight {
    eight value;
    float sums[4];                       /* of the head's squares */
    eight more[SPK_CUDA_PARTS_MAX - 1];  /* of the parts behind the first */
    part_weights parts;
    __device__ __forceinline__ void ask(const spk_cuda_source &s, uint32_t at, uint32_t part_count) {
        value = load_eight(s.x + at);
        if (s.squares != nullptr) load_head(s, at, sums);
        if (!MAY_HAVE_PARTS || part_count == 1) return;
        parts.ask(s, at, part_count);
#pragma unroll
        for (uint32_t p = 1; p < SPK_CUDA_PARTS_MAX; p++)
            if (p < part_count) more[p - 1] = load_eight(s.x + p * s.count + at);
    }
    __device__ __forceinline__ void add(const spk_cuda_source &s, uint32_t at, uint32_t part_count) {
        if (MAY_HAVE_PARTS && part_count > 1) merge(part_count);
        if (s.add[0] == nullptr) return;
        value.add(load_eight(s.add[0] + at));
        if (s.add[1] != nullptr) value.add(load_eight(s.add[1] + at));
        if (s.add[2] != nullptr) value.add(load_eight(s.add[2] + at));
    }
    /* As merge_parts. */
    __device__ __forceinline__ void merge(uint32_t part_count) {
        parts.make(part_count);
        scale_eight(value, parts.weight[0]);
#pragma unroll
        for (uint32_t p = 1; p < SPK_CUDA_PARTS_MAX; p++)
            if (p < part_count) add_scaled_eight(value, more[p - 1], parts.weight[p]);
    }
};

/* sum_chunks of 8 or 16, by every thread for itself: the butterfly's order without its shuffles. */
template <uint32_t COUNT> __device__ __forceinline__ float sum_chunks_of(const float *sums) {
    static_assert(COUNT == 8 || COUNT == 16, "");
    float part[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; i++) part[i] = COUNT == 16 ? sums[i] + sums[i + COUNT / 2] : sums[i];
    return ((part[0] + part[4]) + (part[2] + part[6])) + ((part[1] + part[5]) + (part[3] + part[7]));
}

/* What prepare_input makes of a vector of COUNT values, in one pass: a thread has EIGHTS times eight of them, and as many of
 * RIDERS rows of floats.  norm: the thread's norm weights, where the source has any.  The products with riders are left in
 * v.chunk_sums.  part_count: parts_of the source, where MAY_HAVE_PARTS.  At least COUNT / 8 / EIGHTS threads, all of the CTA; ends with
 * a barrier.  asked() is called by all as soon as the vector is on its way. */
struct nothing { __device__ __forceinline__ void operator()() const {} };
template <uint32_t COUNT, int EIGHTS, int RIDERS, bool MAY_HAVE_PARTS = false, class ASKED = nothing>
__device__ __forceinline__ float prepare_held(const spk_cuda_source &s, const input_vector &v, const eight *norm, const eight *riders, bool writer,
                                              ASKED asked = {}, uint32_t part_count = 1) {
    static_assert(RIDERS == 0 || EIGHTS == 1, "riders");
    constexpr uint32_t ROUND = COUNT / EIGHTS;
    const uint32_t at0 = threadIdx.x * 8, lane = threadIdx.x & 31;
    const bool has_norm = s.norm_weight != nullptr;
    const float given = s.factor != nullptr ? __ldcg(s.factor) : 1.0f;
    source_eight<MAY_HAVE_PARTS> own[EIGHTS];
    if (at0 < ROUND) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) own[e].ask(s, at0 + e * ROUND, part_count);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) own[e].add(s, at0 + e * ROUND, part_count);
    }
    asked();
    if (at0 < ROUND) {
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const uint32_t at = at0 + e * ROUND;
            eight &value = own[e].value;
            if (writer && s.x_out != nullptr) value.store(s.x_out + at);
            if (s.squares != nullptr) scale_eight(value, head_factor_of(s, own[e].sums));
            if (has_norm) {
                const float squares = norm_eight(value, norm[e]);
                if (lane == 0) v.chunk_sums[at / 256] = squares;
            }
#pragma unroll
            for (int r = 0; r < RIDERS; r++) {
                const float *const w = (const float *)&riders[r], *const x = (const float *)&value;
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) sum = fmaf(w[i], x[i], sum);
                sum = warp_sum(sum);
                if (lane == 0) v.chunk_sums[(r + 1) * v.k + at / 256] = sum;
            }
            quantize_eight(v, at / 256, lane, value);
        }
    }
    __syncthreads();
    if (!has_norm) return given;
    return rsqrtf(__fdividef(sum_chunks_of<COUNT / 256>(v.chunk_sums), (float)COUNT) + s.eps);
}

} // namespace spk

#endif
