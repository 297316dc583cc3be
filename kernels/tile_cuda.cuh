/* kernels/tile_cuda.cuh - T32 tiles in shared memory times the int8 input vector: one lane, one super-block.
 *
 * One or two tiles at a time that need the same super-blocks of x (gate and up, or two row groups), so that x is read from
 * shared memory once for both: shared memory, not arithmetic, is what a product of tiles that have arrived waits for.
 * Integer parts are exact: with has_rest a group's sum is 254 q + r, at most 32 * 240 * (254 * 127 + 127) < 2^28 (nibbles
 * in the high half of a byte count 16 fold); Q8_0 likewise < 2^28.
 *
 * Loops are rolled, which measured faster twice (NOTES.md #16, #24).
 *
 * Must equal the reference on the same codes within (16 + 8) * 2^-24 * sum |terms| a super-block: 8 or 16 group terms, each
 * a conversion, two multiplications and one addition, then two products with the block's factors.
 */
#ifndef SPK_TILE_CUDA_CUH
#define SPK_TILE_CUDA_CUH

#include "kernels/input_cuda.cuh"

namespace spk {

constexpr uint32_t Q6_K_TAIL = 13 * 512;     /* where its d begin */

/* Chunk c of the input for a lane's super-block. */
template <bool REST> struct x_chunk {
    uint4 main, rest;
    __device__ __forceinline__ x_chunk(const input_vector &v, uint32_t kb, int c) {
        main = v.main[c * v.stride + kb];
        if (REST) rest = v.rest[c * v.stride + kb];
    }
};
/* Sum of a group's products so far, in codes: unsigned ones (nibbles and more) or signed ones (Q8_0). */
template <bool REST, bool SIGNED> struct code_sum {
    int main = 0, rest = 0;
    __device__ __forceinline__ static int dot(const uint4 &codes, const uint4 &x, int sum) {
        sum = SIGNED ? dot_ss(codes.x, x.x, sum) : dot_us(codes.x, x.x, sum);
        sum = SIGNED ? dot_ss(codes.y, x.y, sum) : dot_us(codes.y, x.y, sum);
        sum = SIGNED ? dot_ss(codes.z, x.z, sum) : dot_us(codes.z, x.z, sum);
        return SIGNED ? dot_ss(codes.w, x.w, sum) : dot_us(codes.w, x.w, sum);
    }
    __device__ __forceinline__ void add(const uint4 &codes, const x_chunk<REST> &x) {
        main = dot(codes, x.main, main);
        if (REST) rest = dot(codes, x.rest, rest);
    }
    __device__ __forceinline__ float value() const { return (float)(REST ? 254 * main + rest : main); }
};

__device__ __forceinline__ uint4 and4(const uint4 &v, uint32_t mask) {
    return make_uint4(v.x & mask, v.y & mask, v.z & mask, v.w & mask);
}
/* v, with bits (h >> right or << left) & mask joined in; one of the shifts is 0. */
__device__ __forceinline__ uint4 join4(const uint4 &v, const uint4 &h, int right, int left, uint32_t mask) {
    return make_uint4(v.x | (((h.x >> right) << left) & mask), v.y | (((h.y >> right) << left) & mask),
                      v.z | (((h.z >> right) << left) & mask), v.w | (((h.w >> right) << left) & mask));
}
/* v, with a bit of each byte of h joined in as its fifth: the one that `left` places bring there, round the end if negative.  One
 * shift, however little is known of `left`. */
__device__ __forceinline__ uint4 join_fifth(const uint4 &v, const uint4 &h, int left) {
    return make_uint4(v.x | (__funnelshift_l(h.x, h.x, left) & 0x10101010u), v.y | (__funnelshift_l(h.y, h.y, left) & 0x10101010u),
                      v.z | (__funnelshift_l(h.z, h.z, left) & 0x10101010u), v.w | (__funnelshift_l(h.w, h.w, left) & 0x10101010u));
}
__device__ __forceinline__ uint4 high_nibbles(const uint4 &v) {
    return make_uint4((v.x >> 4) & 0x0f0f0f0fu, (v.y >> 4) & 0x0f0f0f0fu, (v.z >> 4) & 0x0f0f0f0fu, (v.w >> 4) & 0x0f0f0f0fu);
}

/* Where a lane's bytes of a tile are: plane(i) is its 16 bytes of plane i, tail() the two of a Q6_K tile behind the planes.
 * Loops over them stay rolled (NOTES.md #16). */
struct shared_tile {
    static constexpr int UNROLL = 1;
    const uint8_t *tile;
    uint32_t       lane;
    __device__ __forceinline__ uint4 plane(int index) const { return *(const uint4 *)(tile + 512 * index + 16 * lane); }
    __device__ __forceinline__ uint16_t tail() const { return *(const uint16_t *)(tile + Q6_K_TAIL + 2 * lane); }
};

/* One tile or two; which one is known when a loop over them is unrolled. */
template <class FIRST, class SECOND> struct tile_pair {
    static constexpr int UNROLL = FIRST::UNROLL;
    const FIRST  &first;
    const SECOND &second;
    __device__ __forceinline__ uint4 plane(int tile, int index) const { return tile == 0 ? first.plane(index) : second.plane(index); }
};
template <class FIRST, class SECOND> __device__ __forceinline__ tile_pair<FIRST, SECOND> pair_of(const FIRST &first, const SECOND &second) { return { first, second }; }

/* Byte i of a word as a float: placed below 2^23's exponent, which is then taken away; cheaper than a conversion. */
__device__ __forceinline__ float byte_at(uint32_t word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388608.0f;
}

/* Scale and min codes of Q4_K and Q5_K: eight bytes each from three words. */
struct k4_scales {
    uint32_t scale[2], min[2];
    __device__ __forceinline__ void read(const uint4 &head) {
        scale[0] = head.y & 0x3f3f3f3fu;
        min[0] = head.z & 0x3f3f3f3fu;
        scale[1] = (head.w & 0x0f0f0f0fu) | ((head.y >> 2) & 0x30303030u);
        min[1] = ((head.w >> 4) & 0x0f0f0f0fu) | ((head.z >> 2) & 0x30303030u);
    }
    __device__ __forceinline__ float scale_at(int j) const { return byte_at(j < 4 ? scale[0] : scale[1], j % 4); }
    __device__ __forceinline__ float min_at(int j) const { return byte_at(j < 4 ? min[0] : min[1], j % 4); }
};

/* Q4_K, and Q5_K, which has two more planes with a fifth bit: T tiles of a pair. */
template <int T, bool REST, bool FIVE, class TILES>
__device__ __forceinline__ void dot_q45_k(const TILES &tiles, const input_vector &v, uint32_t kb, float out[T]) {
    constexpr int QS = FIVE ? 3 : 1;
    uint4 head[T], bits[T][2];
    k4_scales s[T];
    float product[T], mins[T];
#pragma unroll
    for (int t = 0; t < T; t++) {
        head[t] = tiles.plane(t, 0);
        s[t].read(head[t]);
        if (FIVE)
            for (int h = 0; h < 2; h++) bits[t][h] = tiles.plane(t, 1 + h);
        product[t] = mins[t] = 0.0f;
    }
#pragma unroll TILES::UNROLL
    for (int c = 0; c < 4; c++) {        /* 64 weights: low nibbles are group 2c, high nibbles 2c + 1 */
        code_sum<REST, false> low[T], high[T];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const x_chunk<REST> x_low(v, kb, 4 * c + h), x_high(v, kb, 4 * c + 2 + h);
#pragma unroll
            for (int t = 0; t < T; t++) {
                const uint4 qs = tiles.plane(t, QS + 2 * c + h);
                uint4 a = and4(qs, 0x0f0f0f0fu), b = FIVE ? high_nibbles(qs) : and4(qs, 0xf0f0f0f0u);
                if (FIVE) {
                    a = join_fifth(a, bits[t][h], 4 - 2 * c);
                    b = join_fifth(b, bits[t][h], 3 - 2 * c);
                }
                low[t].add(a, x_low);
                high[t].add(b, x_high);
            }
        }
        const float4 ml = v.meta[2 * c * v.stride + kb], mh = v.meta[(2 * c + 1) * v.stride + kb];
#pragma unroll
        for (int t = 0; t < T; t++) {
            product[t] = fmaf(ml.x * s[t].scale_at(2 * c), low[t].value(), product[t]);
            product[t] = fmaf(mh.x * (FIVE ? 1.0f : 0.0625f) * s[t].scale_at(2 * c + 1), high[t].value(), product[t]);
            mins[t] = fmaf(ml.w, s[t].min_at(2 * c), mins[t]);
            mins[t] = fmaf(mh.w, s[t].min_at(2 * c + 1), mins[t]);
        }
    }
#pragma unroll
    for (int t = 0; t < T; t++) {
        const float2 d = __half22float2(*(const __half2 *)&head[t].x);
        out[t] += d.x * product[t] - d.y * mins[t];
    }
}

/* Q6_K: chunk 8u + 2r + g of the super-block has 16 codes with the scale of that number; codes are 32 too large. */
template <bool REST, class TILE> __device__ __forceinline__ float dot_q6_k(const TILE &tile, const input_vector &v, uint32_t kb) {
    float product = 0.0f, offset = 0.0f;
    const uint4 scales = tile.plane(0);
#pragma unroll TILE::UNROLL
    for (int u = 0; u < 2; u++) {
        const uint2 words = u == 0 ? make_uint2(scales.x, scales.y) : make_uint2(scales.z, scales.w);
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const float4 meta = v.meta[(4 * u + r) * v.stride + kb];
#pragma unroll
            for (int g = 0; g < 2; g++) {
                const int j = 2 * r + g;
                const x_chunk<REST> x(v, kb, 8 * u + j);
                const uint4 low = tile.plane(1 + 4 * u + 2 * (r & 1) + g), bits = tile.plane(9 + 2 * u + g);
                const uint4 nibbles = r < 2 ? and4(low, 0x0f0f0f0fu) : high_nibbles(low);
                code_sum<REST, false> sum;
                sum.add(join4(nibbles, bits, r == 3 ? 2 : 0, r < 2 ? 4 - 2 * r : 0, 0x30303030u), x);
                const float scale = (float)(int8_t)((j < 4 ? words.x : words.y) >> (8 * (j % 4)));
                product = fmaf(meta.x * scale, sum.value(), product);
                offset = fmaf(g == 0 ? meta.y : meta.z, scale, offset);
            }
        }
    }
    return __half2float(__ushort_as_half(tile.tail())) * (product - 32.0f * offset);
}

template <bool REST, class TILE> __device__ __forceinline__ float dot_q8_0(const TILE &tile, const input_vector &v, uint32_t kb) {
    float product = 0.0f;
    const uint4 scales = tile.plane(0);
#pragma unroll TILE::UNROLL
    for (int j = 0; j < 8; j++) {
        code_sum<REST, true> sum;
#pragma unroll
        for (int h = 0; h < 2; h++) sum.add(tile.plane(1 + 2 * j + h), x_chunk<REST>(v, kb, 2 * j + h));
        const uint32_t pair = j < 2 ? scales.x : j < 4 ? scales.y : j < 6 ? scales.z : scales.w;
        const float scale = __half2float(__ushort_as_half((uint16_t)(j & 1 ? pair >> 16 : pair)));
        product = fmaf(v.meta[j * v.stride + kb].x * scale, sum.value(), product);
    }
    return product;
}

/* Sets of matrix types. */
constexpr uint32_t Q4_K = 1u << SPK_TYPE_Q4_K, Q5_K = 1u << SPK_TYPE_Q5_K, Q6_K = 1u << SPK_TYPE_Q6_K, Q8_0 = 1u << SPK_TYPE_Q8_0;
constexpr uint32_t ANY_TYPE = Q4_K | Q5_K | Q6_K | Q8_0;
/* Whether a type, one of TYPES, is WHICH; not looked at where there is only one. */
template <uint32_t TYPES> __device__ __forceinline__ bool type_is(uint32_t which, uint32_t type) {
    return (TYPES & 1u << which) != 0 && (TYPES == 1u << which || type == which);
}

/* A tile of one of TYPES times super-block kb. */
template <bool REST, uint32_t TYPES, class TILE>
__device__ __forceinline__ float dot_tile(uint32_t type, const TILE &tile, const input_vector &v, uint32_t kb) {
    float sum = 0.0f;
    if (type_is<TYPES>(SPK_TYPE_Q4_K, type)) dot_q45_k<1, REST, false>(pair_of(tile, tile), v, kb, &sum);
    else if (type_is<TYPES>(SPK_TYPE_Q5_K, type)) dot_q45_k<1, REST, true>(pair_of(tile, tile), v, kb, &sum);
    else if (type_is<TYPES>(SPK_TYPE_Q6_K, type)) sum = dot_q6_k<REST>(tile, v, kb);
    else if (type_is<TYPES>(SPK_TYPE_Q8_0, type)) sum = dot_q8_0<REST>(tile, v, kb);
    return sum;
}

/* Most tiles that a warp multiplies at once. */
constexpr uint32_t TILES_MAX = 2;

/* sums[t] += the lane's super-block of tile t times kb of x.  Tile t lies t * tile_bytes on. */
template <bool REST>
__device__ __forceinline__ void add_tiles(uint32_t type, const uint8_t *tile, uint32_t tile_bytes, uint32_t tile_count, const input_vector &v,
                                          uint32_t kb, uint32_t lane, float sums[TILES_MAX]) {
    if (type == SPK_TYPE_Q4_K && tile_count == 2) {
        const shared_tile first = { tile, lane }, second = { tile + tile_bytes, lane };
        dot_q45_k<2, REST, false>(pair_of(first, second), v, kb, sums);
        return;
    }
    /* Larger types wait for their own bytes: one at a time, with fewer registers. */
#pragma unroll 1
    for (uint32_t t = 0; t < tile_count; t++) {
        const shared_tile one = { tile + t * tile_bytes, lane };
        const float sum = dot_tile<REST, ANY_TYPE>(type, one, v, kb);
        if (t == 0) sums[0] += sum;
        else sums[1] += sum;
    }
}

} // namespace spk

#endif
