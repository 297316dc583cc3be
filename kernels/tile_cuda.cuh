/* kernels/tile_cuda.cuh - a lane's super-block of a T32 tile in registers, and its product with the input vector.
 *
 * Loads are 16 bytes a lane, 512 contiguous bytes a warp, and touch nothing else: they may run before chain_wait.  dot() is exact in the integer part; floats are combined group by group in a fixed order.
 * Bytes a warp: Q4_K 4608, Q5_K 5632, Q6_K 6720, Q8_0 8704 for 8192 weights.
 *
 * Must equal the reference on int8 activations within (16 + 8) * 2^-24 * sum |terms| a super-block: 8 or 16 group terms,
 * each two multiplications and one addition, then two products with the block's factors.
 */
#ifndef SPK_TILE_CUDA_CUH
#define SPK_TILE_CUDA_CUH

#include "kernels/device_cuda.cuh"

namespace spk {

/* A tile as it lies, whatever its type: loading it takes the same few instructions for all types, so that a kernel has one
 * place that loads and one that prepares x, and only the products differ. */
struct raw_tile {
    static constexpr int CHUNKS = 17;
    uint4 chunk[CHUNKS];
    __device__ __forceinline__ void load(const uint8_t *t, uint32_t lane, uint32_t chunk_count) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            if (i < (int)chunk_count) chunk[i] = load_weights(t + 512 * i + 16 * lane);
        if (chunk_count == 13) chunk[13].x = load_weights_u16(t + 6656 + 2 * lane);   /* Q6_K's d */
    }
};
__host__ __device__ __forceinline__ uint32_t chunks_of(uint32_t type) {
    return type == SPK_TYPE_Q4_K ? 9 : type == SPK_TYPE_Q5_K ? 11 : type == SPK_TYPE_Q6_K ? 13 : 17;
}

template <uint32_t TYPE> struct tile;

/* Scale and min codes of Q4_K and Q5_K: eight bytes each from three words. */
struct k4_scales {
    uint32_t scale[2], min[2];
    __device__ __forceinline__ explicit k4_scales(const uint4 &head) {
        scale[0] = head.y & 0x3f3f3f3fu;
        min[0] = head.z & 0x3f3f3f3fu;
        scale[1] = (head.w & 0x0f0f0f0fu) | ((head.y >> 2) & 0x30303030u);
        min[1] = ((head.w >> 4) & 0x0f0f0f0fu) | ((head.z >> 2) & 0x30303030u);
    }
    __device__ __forceinline__ float scale_at(int j) const { return (float)((scale[j / 4] >> (8 * (j % 4))) & 255u); }
    __device__ __forceinline__ float min_at(int j) const { return (float)((min[j / 4] >> (8 * (j % 4))) & 255u); }
};

__device__ __forceinline__ int dot16(const uint4 &codes, const uint4 &x, int sum) {
    sum = dot_us(codes.x, x.x, sum);
    sum = dot_us(codes.y, x.y, sum);
    sum = dot_us(codes.z, x.z, sum);
    return dot_us(codes.w, x.w, sum);
}
__device__ __forceinline__ uint4 low_nibbles(const uint4 &v) {
    return make_uint4(v.x & 0x0f0f0f0fu, v.y & 0x0f0f0f0fu, v.z & 0x0f0f0f0fu, v.w & 0x0f0f0f0fu);
}
__device__ __forceinline__ uint4 high_nibbles(const uint4 &v) {
    return make_uint4((v.x >> 4) & 0x0f0f0f0fu, (v.y >> 4) & 0x0f0f0f0fu, (v.z >> 4) & 0x0f0f0f0fu, (v.w >> 4) & 0x0f0f0f0fu);
}
/* Bits `bit`, bit+1, ... (mask of a byte's low bits) of every byte of h, moved to `to` and joined to v. */
template <uint32_t MASK, int TO> __device__ __forceinline__ uint4 join_bits(const uint4 &v, const uint4 &h, int bit) {
    return make_uint4(v.x | ((h.x >> bit) & MASK) << TO, v.y | ((h.y >> bit) & MASK) << TO,
                      v.z | ((h.z >> bit) & MASK) << TO, v.w | ((h.w >> bit) & MASK) << TO);
}

template <> struct tile<SPK_TYPE_Q4_K> {
    uint4 head, qs[8];
    __device__ __forceinline__ explicit tile(const raw_tile &raw) : head(raw.chunk[0]) {
#pragma unroll
        for (int i = 0; i < 8; i++) qs[i] = raw.chunk[1 + i];
    }
    __device__ __forceinline__ float dot(const int8_vector &v, uint32_t kb) const {
        k4_scales s(head);
        float product = 0.0f, mins = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int low = 0, high = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                low = dot16(low_nibbles(qs[2 * c + h]), v.q8[(4 * c + h) * v.k + kb], low);
                high = dot16(high_nibbles(qs[2 * c + h]), v.q8[(4 * c + 2 + h) * v.k + kb], high);
            }
            product = fmaf(v.scale[2 * c * v.k + kb] * s.scale_at(2 * c), (float)low, product);
            product = fmaf(v.scale[(2 * c + 1) * v.k + kb] * s.scale_at(2 * c + 1), (float)high, product);
            mins = fmaf(v.sum32[2 * c * v.k + kb], s.min_at(2 * c), mins);
            mins = fmaf(v.sum32[(2 * c + 1) * v.k + kb], s.min_at(2 * c + 1), mins);
        }
        float2 d = __half22float2(*(const __half2 *)&head.x);
        return d.x * product - d.y * mins;
    }
};

template <> struct tile<SPK_TYPE_Q5_K> {
    uint4 head, qh[2], qs[8];
    __device__ __forceinline__ explicit tile(const raw_tile &raw) : head(raw.chunk[0]) {
#pragma unroll
        for (int i = 0; i < 2; i++) qh[i] = raw.chunk[1 + i];
#pragma unroll
        for (int i = 0; i < 8; i++) qs[i] = raw.chunk[3 + i];
    }
    __device__ __forceinline__ float dot(const int8_vector &v, uint32_t kb) const {
        k4_scales s(head);
        float product = 0.0f, mins = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int low = 0, high = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint4 lo = join_bits<0x01010101u, 4>(low_nibbles(qs[2 * c + h]), qh[h], 2 * c);
                uint4 hi = join_bits<0x01010101u, 4>(high_nibbles(qs[2 * c + h]), qh[h], 2 * c + 1);
                low = dot16(lo, v.q8[(4 * c + h) * v.k + kb], low);
                high = dot16(hi, v.q8[(4 * c + 2 + h) * v.k + kb], high);
            }
            product = fmaf(v.scale[2 * c * v.k + kb] * s.scale_at(2 * c), (float)low, product);
            product = fmaf(v.scale[(2 * c + 1) * v.k + kb] * s.scale_at(2 * c + 1), (float)high, product);
            mins = fmaf(v.sum32[2 * c * v.k + kb], s.min_at(2 * c), mins);
            mins = fmaf(v.sum32[(2 * c + 1) * v.k + kb], s.min_at(2 * c + 1), mins);
        }
        float2 d = __half22float2(*(const __half2 *)&head.x);
        return d.x * product - d.y * mins;
    }
};

template <> struct tile<SPK_TYPE_Q6_K> {
    uint4 scales, ql[8], qh[4];
    unsigned short d;
    __device__ __forceinline__ explicit tile(const raw_tile &raw) : scales(raw.chunk[0]), d((unsigned short)raw.chunk[13].x) {
#pragma unroll
        for (int i = 0; i < 8; i++) ql[i] = raw.chunk[1 + i];
#pragma unroll
        for (int i = 0; i < 4; i++) qh[i] = raw.chunk[9 + i];
    }
    __device__ __forceinline__ float scale_at(int j) const {
        const uint32_t words[4] = { scales.x, scales.y, scales.z, scales.w };
        return (float)(int8_t)(words[j / 4] >> (8 * (j % 4)));
    }
    /* Chunk 8t + 2r + g of the super-block: 16 codes with scale 8t + 2r + g. */
    __device__ __forceinline__ float dot(const int8_vector &v, uint32_t kb) const {
        float product = 0.0f, offset = 0.0f;
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int r = 0; r < 4; r++) {
    #pragma unroll
                for (int g = 0; g < 2; g++) {
                    const uint4 &low = ql[4 * t + 2 * (r & 1) + g];
                    uint4 codes = join_bits<0x03030303u, 4>(r < 2 ? low_nibbles(low) : high_nibbles(low), qh[2 * t + g], 2 * r);
                    int c = 8 * t + 2 * r + g;
                    float sum = (float)dot16(codes, v.q8[c * v.k + kb], 0);
                    product = fmaf(v.scale[(c / 2) * v.k + kb] * scale_at(c), sum, product);
                    offset = fmaf(v.sum16[c * v.k + kb], scale_at(c), offset);
                }
            }
        return __half2float(__ushort_as_half(d)) * (product - 32.0f * offset);
    }
};

template <> struct tile<SPK_TYPE_Q8_0> {
    uint4 d, qs[16];
    __device__ __forceinline__ explicit tile(const raw_tile &raw) : d(raw.chunk[0]) {
#pragma unroll
        for (int i = 0; i < 16; i++) qs[i] = raw.chunk[1 + i];
    }
    __device__ __forceinline__ float dot(const int8_vector &v, uint32_t kb) const {
        const uint32_t words[4] = { d.x, d.y, d.z, d.w };
        float product = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int sum = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 &q = qs[2 * j + h], x = v.q8[(2 * j + h) * v.k + kb];
                sum = dot_ss(q.x, x.x, sum);
                sum = dot_ss(q.y, x.y, sum);
                sum = dot_ss(q.z, x.z, sum);
                sum = dot_ss(q.w, x.w, sum);
            }
            float scale = __half2float(__ushort_as_half((unsigned short)(words[j / 2] >> (16 * (j % 2)))));
            product = fmaf(v.scale[j * v.k + kb] * scale, (float)sum, product);
        }
        return product;
    }
};

/* The product with the input vector: one int8 vector, or two in turn. */
template <uint32_t T> __device__ __forceinline__ float product(const raw_tile &raw, const shared_vector &v, uint32_t kb, bool has_rest) {
    const tile<T> w(raw);
    float sum = 0.0f;
    uint8_t *base = (uint8_t *)v.main.q8;
#pragma unroll 1
    for (int part = 0; part < (has_rest ? 2 : 1); part++, base += INT8_BYTES * v.k) sum += w.dot(carve_int8(base, v.k), kb);
    return sum;
}
__device__ __forceinline__ float product_of(uint32_t type, const raw_tile &raw, const shared_vector &v, uint32_t kb, bool has_rest) {
    switch (type) {
    case SPK_TYPE_Q4_K: return product<SPK_TYPE_Q4_K>(raw, v, kb, has_rest);
    case SPK_TYPE_Q5_K: return product<SPK_TYPE_Q5_K>(raw, v, kb, has_rest);
    case SPK_TYPE_Q6_K: return product<SPK_TYPE_Q6_K>(raw, v, kb, has_rest);
    default:            return product<SPK_TYPE_Q8_0>(raw, v, kb, has_rest);
    }
}

/* Sum over the p lanes that share a row; every lane of the row gets it. */
__device__ __forceinline__ float row_sum(float v, uint32_t lanes_per_row) {
    for (uint32_t o = lanes_per_row >> 1; o > 0; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

} // namespace spk

#endif
