/* kernels/rows_cuda.cuh - a matrix as GPU kernels walk it: units that one warp multiplies with the input vector.
 *
 * A unit is a row group of T32 (its first tile plus tiles_per_group - 1 more) or one row of floats.  Lanes that share a row
 * hold its sum together; the first of them leads.
 */
#ifndef SPK_ROWS_CUDA_CUH
#define SPK_ROWS_CUDA_CUH

#include "kernels/tile_cuda.cuh"

namespace spk {

struct row_matrix {
    const uint8_t *data;
    uint64_t       stride, unit_bytes;         /* between tiles (rows), between units */
    uint32_t       type, row_count, unit_count, tiles_per_group;
    uint32_t       lanes_per_row;              /* 32 for float rows */
    __device__ __forceinline__ const uint8_t *unit(uint32_t index) const { return data + index * unit_bytes; }
    __device__ __forceinline__ uint32_t first_block(uint32_t lane) const { return lane & (lanes_per_row - 1); }
    __device__ __forceinline__ bool leads(uint32_t lane) const { return first_block(lane) == 0; }
    __device__ __forceinline__ uint32_t row(uint32_t index, uint32_t lane) const { return (index * 32 + lane) / lanes_per_row; }
};

inline row_matrix make_row_matrix(const spk_matrix &w) {
    row_matrix m = { w.data, w.unit_stride_bytes, w.unit_stride_bytes, w.type, (uint32_t)w.row_count, (uint32_t)w.row_count, 1, 32 };
    if (w.layout == SPK_LAYOUT_T32) {
        spk_t32_geometry g = spk_t32_geometry_of(w.type, w.row_count, w.col_count);
        m.unit_bytes = g.tiles_per_group * w.unit_stride_bytes;
        m.unit_count = (uint32_t)g.group_count;
        m.tiles_per_group = (uint32_t)g.tiles_per_group;
        m.lanes_per_row = g.lanes_per_row;
    }
    return m;
}

/* Larger value, larger key; never zero for a number. */
__device__ __forceinline__ uint32_t order_bits(float value) {
    uint32_t bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
/* Larger value first, then lower row. */
__device__ __forceinline__ unsigned long long order_key(float value, uint32_t row) {
    return (unsigned long long)order_bits(value) << 32 | (0xffffffffu - row);
}

/* Eight weights of a float row. */
template <uint32_t T> struct float8 {
    static constexpr int BYTES = T == SPK_TYPE_F32 ? 32 : 16;
    uint4 raw[BYTES / 16];
    __device__ __forceinline__ void load(const uint8_t *p) {
#pragma unroll
        for (int i = 0; i < BYTES / 16; i++) raw[i] = load_weights(p + 16 * i);
    }
    __device__ __forceinline__ float at(int i) const {
        const uint4 &part = raw[T == SPK_TYPE_F32 ? i / 4 : 0];
        const int word = T == SPK_TYPE_F32 ? i % 4 : i / 2;
        uint32_t bits = word == 0 ? part.x : word == 1 ? part.y : word == 2 ? part.z : part.w;
        if (T == SPK_TYPE_F32) return __uint_as_float(bits);
        bits = (bits >> (16 * (i & 1))) & 0xffffu;
        return T == SPK_TYPE_BF16 ? __uint_as_float(bits << 16) : __half2float(__ushort_as_half((unsigned short)bits));
    }
};

template <uint32_t T>
__device__ __forceinline__ float dot_row(const uint8_t *row, const shared_vector &v, uint32_t count, uint32_t lane) {
    float sum = 0.0f;
#pragma unroll 2
    for (uint32_t at = 8 * lane; at < count; at += 256) {
        float8<T> w;
        w.load(row + (size_t)at * (float8<T>::BYTES / 8));
#pragma unroll
        for (int i = 0; i < 8; i++) sum = fmaf(w.at(i), v.f32[at + i], sum);
    }
    return warp_sum(sum);
}

/* A float row of a type known at run time; the rows' arithmetic is a small part of a step, so nothing is loaded ahead. */
__device__ __forceinline__ float row_product_of(const row_matrix &m, uint32_t row, const shared_vector &v, uint32_t count, uint32_t lane) {
    switch (m.type) {
    case SPK_TYPE_F32:  return dot_row<SPK_TYPE_F32>(m.unit(row), v, count, lane);
    case SPK_TYPE_F16:  return dot_row<SPK_TYPE_F16>(m.unit(row), v, count, lane);
    default:            return dot_row<SPK_TYPE_BF16>(m.unit(row), v, count, lane);
    }
}
__host__ __device__ __forceinline__ bool is_float(uint32_t type) {
    return type == SPK_TYPE_F32 || type == SPK_TYPE_F16 || type == SPK_TYPE_BF16;
}

} // namespace spk

#endif
