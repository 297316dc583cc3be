/* kernels/attention_cache_cuda.cuh - how keys and values lie in the cache, and how they become operands of the tensor cores.
 *
 * A cache is cut into blocks that a warp copies whole; [kv_head], then
 *   K  [position / 16][head_dim / KD] blocks of 16 positions x KD dimensions, KD = min(128, head_dim)
 *   V  [position / 32][head_dim / 32] blocks of 32 positions x 32 dimensions
 * with the positions of a KV head rounded up to 32.  A block's codes are [position][dimension], where chunk c (16 bytes) of
 * row r lies at chunk c ^ (r / max(1, 128 / row bytes) % min(8, chunks of a row)): eight rows of one chunk are then in
 * different banks of shared memory, where the block lies as it does here.
 *
 * F16: a code is the value.  Q8: a code is a byte, 128 + k for -127 <= k <= 127; the value is f16(k * scale), and each 32
 * dimensions of a position share an F16 scale, |x| / 127 of the largest rounded up, so that nothing is clipped and
 *   |x - value| <= scale / 2 + 2^-11 |value|.
 * The scales follow a block's codes: K [KD / 32][16 positions], V [32 positions].  32 as in Q8_0, since rotated keys have few
 * large dimensions which must not spoil the other 224; they cost 1/16 more bytes.
 */
#ifndef SPK_ATTENTION_CACHE_CUDA_CUH
#define SPK_ATTENTION_CACHE_CUDA_CUH

#include <cuda_fp16.h>
#include "kernels/attention_mma_cuda.cuh"
#include "kernels/cuda.h"

namespace spk {

template <int ROW_BYTES> __device__ __forceinline__ uint32_t chunk_offset(uint32_t row, uint32_t chunk) {
    constexpr uint32_t chunks = ROW_BYTES / 16, rows_of_line = ROW_BYTES < 128 ? 128 / ROW_BYTES : 1;
    return row * ROW_BYTES + 16 * (chunk ^ (row / rows_of_line % (chunks < 8 ? chunks : 8)));
}

/* Two codes of x, the bytes that the selector names, as scaled halves: 0x6400 | byte is 1024 + byte, exactly. */
__device__ __forceinline__ uint32_t dequantize(uint32_t x, uint32_t selector, __half2 scale) {
    const uint32_t biased = __byte_perm(x, 0x64646464u, selector);
    const __half2 value = __hmul2(__hsub2(*(const __half2 *)&biased, __half2half2(__ushort_as_half(0x6480))), scale);
    return *(const uint32_t *)&value;
}

template <int HEAD_DIM, bool IS_Q8> struct cache_layout {
    static constexpr int DIM = HEAD_DIM, ELEMENT_BYTES = IS_Q8 ? 1 : 2, SLICE = 32;
    static constexpr int K_POSITIONS = 16, K_DIMS = DIM < 128 ? DIM : 128, K_ROW = K_DIMS * ELEMENT_BYTES;
    static constexpr int K_CODES = K_POSITIONS * K_ROW, K_BLOCK = K_CODES + (IS_Q8 ? K_POSITIONS * K_DIMS / 32 * 2 : 0);
    static constexpr int K_BLOCKS = DIM / K_DIMS;                       /* of 16 positions */
    static constexpr int V_POSITIONS = 32, V_ROW = SLICE * ELEMENT_BYTES;
    static constexpr int V_CODES = V_POSITIONS * V_ROW, V_BLOCK = V_CODES + (IS_Q8 ? V_POSITIONS * 2 : 0);
    static constexpr int SLICES = DIM / SLICE;                          /* V blocks of 32 positions */
    static_assert(K_BLOCKS * K_BLOCK * 2 == SLICES * V_BLOCK, "both caches have the same size");

    static __host__ __device__ size_t head_bytes(uint32_t context_tokens) {
        return (size_t)((context_tokens + 31) / 32) * SLICES * V_BLOCK;
    }
    static __device__ __forceinline__ size_t k_offset(uint32_t position) {
        return (size_t)(position / K_POSITIONS) * (K_BLOCKS * K_BLOCK);
    }
    static __device__ __forceinline__ size_t v_offset(uint32_t position) {
        return (size_t)(position / V_POSITIONS) * (SLICES * V_BLOCK);
    }

    /* Which dimension of q meets a half of a K fragment: where dimension i of 16 lies in a B fragment (t, register, half). */
    static __device__ __forceinline__ uint32_t b_offset(uint32_t i) {
        const uint32_t t = IS_Q8 ? i / 4 : i % 8 / 2, reg = IS_Q8 ? i / 2 % 2 : i / 8;
        return 16 * t + 4 * reg + 2 * (i % 2);
    }
    /* Which dimension of 16 is row g (high: g + 8) of a V fragment. */
    static __device__ __forceinline__ uint32_t v_row(uint32_t g, uint32_t high) { return IS_Q8 ? 2 * g + high : g + 8 * high; }

    /* Keys as A: rows are a block's 16 positions, columns dimensions 32 pair .. +16 and +16 .. +32. */
    static __device__ __forceinline__ void load_k(const uint8_t *block, uint32_t pair, uint32_t lane, fragment_a a[2]) {
        const uint32_t row = lane % 16, high = lane / 16;
        if (!IS_Q8) {
#pragma unroll
            for (uint32_t j = 0; j < 2; j++)
                a[j] = load_matrices(ptx::shared_address(block + chunk_offset<K_ROW>(row, 4 * pair + 2 * j + high)));
        } else {    /* a register is 4 dimensions of a row: two for columns 2t, 2t+1 and two for 2t+8, 2t+9, as b_offset says */
            const fragment_a x = load_matrices(ptx::shared_address(block + chunk_offset<K_ROW>(row, 2 * pair + high)));
            const __half *scales = (const __half *)(block + K_CODES) + K_POSITIONS * pair + lane / 4;
            const __half2 low_rows = __half2half2(scales[0]), high_rows = __half2half2(scales[8]);
#pragma unroll
            for (uint32_t j = 0; j < 2; j++) {
                a[j].r[0] = dequantize(x.r[2 * j], 0x4140, low_rows);
                a[j].r[1] = dequantize(x.r[2 * j + 1], 0x4140, high_rows);
                a[j].r[2] = dequantize(x.r[2 * j], 0x4342, low_rows);
                a[j].r[3] = dequantize(x.r[2 * j + 1], 0x4342, high_rows);
            }
        }
    }
    /* Values as A: rows are dimensions 0 .. 16 (a[0]) and 16 .. 32 of the block, columns its positions 16 step .. +16. */
    static __device__ __forceinline__ void load_v(const uint8_t *block, uint32_t step, uint32_t lane, fragment_a a[2]) {
        if (!IS_Q8) {
            const uint32_t row = 16 * step + lane % 8 + lane / 16 * 8, high = lane / 8 % 2;
#pragma unroll
            for (uint32_t m = 0; m < 2; m++)
                a[m] = load_matrices_transposed(ptx::shared_address(block + chunk_offset<V_ROW>(row, 2 * m + high)));
        } else {    /* a register is dimensions 2g, 2g+1 of position 2t, then of 2t+1: even ones are rows g, odd ones g + 8 */
            const uint32_t row = 16 * step + lane % 16;
            const fragment_a x = load_matrices_transposed(ptx::shared_address(block + chunk_offset<V_ROW>(row, lane / 16)));
            const __half2 *scales = (const __half2 *)(block + V_CODES) + 8 * step + lane % 4;
#pragma unroll
            for (uint32_t m = 0; m < 2; m++) {
                a[m].r[0] = dequantize(x.r[2 * m], 0x4240, scales[0]);
                a[m].r[1] = dequantize(x.r[2 * m], 0x4341, scales[0]);
                a[m].r[2] = dequantize(x.r[2 * m + 1], 0x4240, scales[4]);
                a[m].r[3] = dequantize(x.r[2 * m + 1], 0x4341, scales[4]);
            }
        }
    }
};

/* A row as it is stored, in order of dimension. */
template <class L> struct cache_row {
    alignas(16) uint8_t codes[L::DIM * L::ELEMENT_BYTES];
    __half scales[L::DIM / 32];

    /* Q8 from values; by one warp, whose lane has x[32 j + lane]. */
    __device__ __forceinline__ void quantize(const float x[L::DIM / 32], uint32_t lane) {
#pragma unroll
        for (int j = 0; j < L::DIM / 32; j++) {
            const float top = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(fabsf(x[j]))));
            const __half half_scale = __float2half_ru(top / 127.0f);
            const float scale = __half2float(half_scale), inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
            codes[32 * j + lane] = (uint8_t)(128 + max(-127, min(127, __float2int_rn(x[j] * inverse))));
            if (lane == 0) scales[j] = half_scale;
        }
    }
    /* Into a K block (shared memory or cache) as its row, dimensions K_DIMS index and on; by one warp. */
    __device__ __forceinline__ void put_k(uint8_t *block, uint32_t row, uint32_t index, uint32_t lane) const {
        if (lane < L::K_ROW / 16) *(uint4 *)(block + chunk_offset<L::K_ROW>(row, lane)) = *(const uint4 *)(codes + index * L::K_ROW + 16 * lane);
        if (L::ELEMENT_BYTES == 1 && lane < L::K_DIMS / 32)
            ((__half *)(block + L::K_CODES))[L::K_POSITIONS * lane + row] = scales[index * L::K_DIMS / 32 + lane];
    }
    __device__ __forceinline__ void put_v(uint8_t *block, uint32_t row, uint32_t slice, uint32_t lane) const {
        if (lane < L::V_ROW / 16) *(uint4 *)(block + chunk_offset<L::V_ROW>(row, lane)) = *(const uint4 *)(codes + slice * L::V_ROW + 16 * lane);
        if (L::ELEMENT_BYTES == 1 && lane == 0) ((__half *)(block + L::V_CODES))[row] = scales[slice];
    }
};

} // namespace spk

#endif
