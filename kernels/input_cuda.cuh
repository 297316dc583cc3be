/* kernels/input_cuda.cuh - the input vector of a product, prepared in shared memory by every CTA for itself.
 *
 * Source (kernels/cuda.h): residual sums, RMSNorm or head norms.  An RMSNorm's factor 1/rms is one number for the whole
 * vector, so it is left out of the codes and multiplied into the products: the vector needs one barrier, not two.
 *
 * For tiles: int8.  A group of 32 values has x = scale * q, |q| <= 127, scale = max|x| / 127; with has_rest two codes,
 * x = scale * (254 q + r), scale = max|x| / (127 * 254), r = what q leaves out.  Error of a value: max|x| / 254, with
 * has_rest max|x| / 64516, each plus 3 roundings of 2^-24.  A group whose largest value is below 1e-30 becomes zeros.
 * For float rows: F32.
 *
 * Order of every sum is fixed and independent of the number of threads: 8 values a lane, a butterfly over the warp's 256
 * values, then a butterfly over 32 chunks of 256.
 */
#ifndef SPK_INPUT_CUDA_CUH
#define SPK_INPUT_CUDA_CUH

#include "kernels/device_cuda.cuh"

namespace spk {

/* n values in k = n/256 (rounded up) super-blocks.  Lanes of a tile read the same chunk of consecutive super-blocks, so
 * super-block is the fastest index; `stride` (odd, at least k) keeps the stores of 16 chunks of one super-block apart.
 *   main, rest [16 chunks of 16 codes][stride]
 *   meta [8 groups][stride] = { scale, sum of x over the group's first 16, its last 16, all 32 } */
struct input_vector {
    uint4  *main, *rest;      /* rest NULL where the source has none */
    float4 *meta;
    float  *f32;              /* NULL in a CTA of tiles, whose vector is int8 */
    float  *chunk_sums;       /* [1 + RIDERS_MAX][k]: squares, products of riders */
    uint32_t k, stride;
};

__host__ __device__ constexpr uint32_t input_chunks(uint32_t n) { return (n + 255) / 256; }
constexpr uint32_t RIDERS_MAX = 8;     /* of a CTA */
__host__ __device__ constexpr uint32_t sums_bytes(uint32_t n) { return (4 * (1 + RIDERS_MAX) * input_chunks(n) + 15) / 16 * 16; }
__host__ __device__ constexpr uint32_t input_stride(uint32_t n) { return input_chunks(n) | 1; }
__host__ __device__ constexpr uint32_t int8_bytes(uint32_t n, bool has_rest) {
    return input_stride(n) * (256 * (has_rest ? 2 : 1) + 128) + sums_bytes(n);
}
__host__ __device__ constexpr uint32_t f32_bytes(uint32_t n) { return input_chunks(n) * 1024 + sums_bytes(n); }

__device__ __forceinline__ input_vector carve_int8(uint8_t *memory, uint32_t n, bool has_rest) {
    input_vector v;
    v.k = input_chunks(n);
    v.stride = input_stride(n);
    v.main = (uint4 *)memory;
    v.rest = has_rest ? v.main + 16 * v.stride : nullptr;
    v.meta = (float4 *)(v.main + (has_rest ? 32 : 16) * v.stride);
    v.chunk_sums = (float *)(v.meta + 8 * v.stride);
    v.f32 = nullptr;
    return v;
}
__device__ __forceinline__ input_vector carve_f32(uint8_t *memory, uint32_t n) {
    input_vector v = {};
    v.k = input_chunks(n);
    v.f32 = (float *)memory;
    v.chunk_sums = v.f32 + 256 * v.k;
    return v;
}

/* 1.5 * 2^23: x + MAGIC rounds |x| < 2^22 to a whole number, whose two's complement is in the sum's low bits.  Conversions run
 * at a fraction of the rate of additions. */
constexpr float MAGIC = 12582912.0f;
/* Four rounded values to four int8. */
__device__ __forceinline__ uint32_t pack_codes(float a, float b, float c, float d) {
    const uint32_t low = __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x0040), high = __byte_perm(__float_as_uint(c), __float_as_uint(d), 0x0040);
    return __byte_perm(low, high, 0x5410);
}

/* A lane's eight values (8 lane .. of super-block kb) as codes.  Whole warps only. */
__device__ __forceinline__ void quantize_eight(const input_vector &v, uint32_t kb, uint32_t lane, const eight &value) {
    const float *x = (const float *)&value;
    float top = 0.0f, code[8];
#pragma unroll
    for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x[i]));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const bool is_zero = !(top >= 1e-30f);
    const float inverse = is_zero ? 0.0f : __fdividef(127.0f, top);
    float scale = is_zero ? 0.0f : top * (1.0f / 127.0f);
#pragma unroll
    for (int i = 0; i < 8; i++) code[i] = fmaf(x[i], inverse, MAGIC);
    const uint2 q = make_uint2(pack_codes(code[0], code[1], code[2], code[3]), pack_codes(code[4], code[5], code[6], code[7]));
    int sum = dot_ss(q.y, 0x01010101u, dot_ss(q.x, 0x01010101u, 0));
    const uint32_t at = (lane / 2) * v.stride + kb;
    if (v.rest != nullptr) {
        const float fine = inverse * 254.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) code[i] = fmaf(fmaf(-scale, code[i] - MAGIC, x[i]), fine, MAGIC);
        const uint2 r = make_uint2(pack_codes(code[0], code[1], code[2], code[3]), pack_codes(code[4], code[5], code[6], code[7]));
        sum = dot_ss(r.y, 0x01010101u, dot_ss(r.x, 0x01010101u, 254 * sum));
        scale *= 1.0f / 254.0f;
        ((uint2 *)v.rest)[2 * at + (lane & 1)] = r;
    }
    ((uint2 *)v.main)[2 * at + (lane & 1)] = q;
    const int first = sum + __shfl_xor_sync(FULL, sum, 1), second = __shfl_xor_sync(FULL, first, 2);
    if ((lane & 3) == 0)
        v.meta[(lane / 4) * v.stride + kb] =
            make_float4(scale, scale * (float)first, scale * (float)second, scale * (float)(first + second));
}

/* What of a source does not depend on the predecessor: norm weights of a thread's first eight values, fetched before
 * chain_wait, or each hop would pay a miss to memory for them. */
struct norm_prefetch {
    eight weight;
    __device__ __forceinline__ void load(const spk_cuda_source &s) {
        const uint32_t at = threadIdx.x * 8;
        weight = s.norm_weight != nullptr && at < s.count ? load_eight(s.norm_weight + at) : zero_eight();
    }
};

/* Eight weights of a float row times x, one after another. */
__device__ __forceinline__ float dot_eight(uint32_t type, const uint8_t *w, const float x[8]) {
    float sum = 0.0f;
    if (type == SPK_TYPE_F32) {
        const float4 low = *(const float4 *)w, high = *((const float4 *)w + 1);
        sum = fmaf(low.w, x[3], fmaf(low.z, x[2], fmaf(low.y, x[1], fmaf(low.x, x[0], sum))));
        return fmaf(high.w, x[7], fmaf(high.z, x[6], fmaf(high.y, x[5], fmaf(high.x, x[4], sum))));
    }
    const uint4 raw = *(const uint4 *)w;
    const uint32_t words[4] = { raw.x, raw.y, raw.z, raw.w };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = type == SPK_TYPE_BF16 ? make_float2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u))
                                                  : __half22float2(*(const __half2 *)&words[i]);
        sum = fmaf(pair.y, x[2 * i + 1], fmaf(pair.x, x[2 * i], sum));
    }
    return sum;
}

/* Float rows that ride along: while a CTA prepares x, each thread multiplies its eight values with theirs of a few rows, which it
 * fetched into shared memory before the wait; no other thread touches them.  For vectors that one pass of the CTA prepares.
 * Rows are 16-byte aligned. */
struct float_riders {
    uint8_t *memory;                     /* shared: [count][columns] of at most 4 bytes, 16-byte aligned */
    uint32_t is_f32, is_bf16, count;     /* is: a bit for each */
    __device__ __forceinline__ void load(uint32_t index, const uint8_t *row, uint32_t type, uint32_t columns) {
        const uint32_t at = threadIdx.x * 8, width = type == SPK_TYPE_F32 ? 4 : 2;
        is_f32 |= (type == SPK_TYPE_F32) << index;
        is_bf16 |= (type == SPK_TYPE_BF16) << index;
        if (at >= columns) return;
        const uint32_t to = ptx::shared_address(memory + (size_t)index * columns * 4 + at * 4);
        const uint8_t *from = row + (size_t)at * width;
        ptx::cp_async_16(to, from);
        if (width == 4) ptx::cp_async_16(to + 16, from + 16);
    }
    __device__ __forceinline__ void arrive() const { ptx::cp_async_wait_all(); }
    __device__ __forceinline__ float product(uint32_t index, const float x[8], uint32_t at, uint32_t columns) const {
        if (at >= columns) return 0.0f;
        const uint32_t type = (is_f32 >> index) & 1u ? SPK_TYPE_F32 : (is_bf16 >> index) & 1u ? SPK_TYPE_BF16 : SPK_TYPE_F16;
        return dot_eight(type, memory + (size_t)index * columns * 4 + at * 4, x);
    }
};

__device__ __forceinline__ void scale_eight(eight &value, float factor) {
    float *x = (float *)&value;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= factor;
}
__device__ __forceinline__ void add_scaled_eight(eight &sum, const eight &value, float factor) {
    float *x = (float *)&sum;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = fmaf(((const float *)&value)[i], factor, x[i]);
}
__device__ __forceinline__ void scale_by(eight &value, const eight &factors) {
    float *x = (float *)&value;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= ((const float *)&factors)[i];
}
/* Weights of an RMSNorm; returns the warp's sum of squares.  The factor is left out (see above). */
__device__ __forceinline__ float norm_eight(eight &value, const eight &weight) {
    float *x = (float *)&value, squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        squares = fmaf(x[i], x[i], squares);
        x[i] *= ((const float *)&weight)[i];
    }
    return warp_sum(squares);
}
/* Factor of the head that value `at` belongs to, from the sums of squares of its 32s, in order. */
__device__ __forceinline__ void load_head(const spk_cuda_source &s, uint32_t at, float sums[4]) {
    const uint32_t first = at / 32 & ~(s.head_dim / 32 - 1);
    if (s.head_dim == 128) {             /* at once: every warp of the GPU asks for these few lines */
        const float4 all = load_activation4(s.squares + first);
        sums[0] = all.x; sums[1] = all.y; sums[2] = all.z; sums[3] = all.w;
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) sums[i] = i < s.head_dim / 32 ? __ldcg(s.squares + first + i) : 0.0f;
}
__device__ __forceinline__ float head_factor_of(const spk_cuda_source &s, const float sums[4]) {
    float total = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) total += sums[i];
    return rsqrtf(__fdividef(total, (float)s.head_dim) + s.eps);
}

/* In how many parts attention's output comes, where it may come in parts. */
__device__ __forceinline__ uint32_t parts_at(uint32_t position) {
    return position < SPK_CUDA_PARTS_MAX * SPK_CUDA_PART_POSITIONS ? position / SPK_CUDA_PART_POSITIONS + 1 : 1;
}
/* Of x: known before the wait. */
__device__ __forceinline__ uint32_t parts_of(const spk_cuda_source &s) { return s.part_totals != nullptr ? parts_at(__ldcg(s.d_position)) : 1; }
/* What each part of a head counts for, part 0 to count - 1; `at` is of any of the head's values. */
struct part_weights {
    float2 total[SPK_CUDA_PARTS_MAX];    /* and top, first */
    float  weight[SPK_CUDA_PARTS_MAX];
    __device__ __forceinline__ void ask(const spk_cuda_source &s, uint32_t at, uint32_t count) {
        const uint32_t shift = __popc(s.head_dim - 1);       /* a power of two: no division on the way of x */
        const float2 *const own = (const float2 *)s.part_totals + (at >> shift);
#pragma unroll
        for (uint32_t p = 0; p < SPK_CUDA_PARTS_MAX; p++)
            if (p < count) total[p] = __ldcg(own + p * (s.count >> shift));
    }
    /* Products are rounded before they are added, whatever the compiler would like: every kernel makes the same bits. */
    __device__ __forceinline__ void make(uint32_t count) {
        float top = total[0].x, all = 0.0f;
#pragma unroll
        for (uint32_t p = 1; p < SPK_CUDA_PARTS_MAX; p++)
            if (p < count) top = fmaxf(top, total[p].x);
#pragma unroll
        for (uint32_t p = 0; p < SPK_CUDA_PARTS_MAX; p++) {
            weight[p] = p < count ? __fmul_rn(ptx::ex2_approx_ftz(total[p].x - top), total[p].y) : 0.0f;
            all = p == 0 ? weight[0] : all + weight[p];
        }
        all = __fdividef(1.0f, all);
#pragma unroll
        for (uint32_t p = 0; p < SPK_CUDA_PARTS_MAX; p++) weight[p] *= all;
    }
};
/* x of part 0 becomes that of all; a part at a time, with few registers. */
__device__ __forceinline__ void merge_parts(const spk_cuda_source &s, uint32_t at, uint32_t count, eight &x) {
    part_weights parts;
    parts.ask(s, at, count);
    parts.make(count);
    scale_eight(x, parts.weight[0]);
#pragma unroll
    for (uint32_t p = 1; p < SPK_CUDA_PARTS_MAX; p++)
        if (p < count) add_scaled_eight(x, load_eight(s.x + p * s.count + at), parts.weight[p]);
}

__device__ __forceinline__ float head_factor(const spk_cuda_source &s, uint32_t at) {
    float sums[4];
    load_head(s, at, sums);
    return head_factor_of(s, sums);
}

/* Sum of k values in shared memory, by every warp for itself: a butterfly over 32, then the 32s in order. */
__device__ __forceinline__ float sum_chunks(const float *sums, uint32_t k) {
    float total = 0.0f;
    for (uint32_t c = 0; c < k; c += 32) {
        const uint32_t at = c + (threadIdx.x & 31);
        total += warp_sum(at < k ? sums[at] : 0.0f);
    }
    return total;
}

/* Fill the vector.  All threads of the CTA, whole warps; ends with a barrier; returns the factor that products are still to be
 * multiplied by.  `writer`: this CTA stores x_out where it is set. */
__device__ __forceinline__ float prepare_input(const spk_cuda_source &s, const input_vector &v, const norm_prefetch &norm,
                                               const float_riders &riders, bool writer) {
    const uint32_t lane = threadIdx.x & 31, step = blockDim.x * 8, end = v.k * 256;
    const bool has_norm = s.norm_weight != nullptr;
    eight next = threadIdx.x * 8 < s.count ? load_eight(s.x + threadIdx.x * 8) : zero_eight();
    const uint32_t part_count = parts_of(s);
    const float given = s.factor != nullptr ? __ldcg(s.factor) : 1.0f;
#pragma unroll 1
    for (uint32_t at = threadIdx.x * 8; at < end; at += step) {
        eight value = next;
        const bool is_in = at < s.count;
        if (at + step < s.count) next = load_eight(s.x + at + step);
        if (part_count > 1 && is_in) merge_parts(s, at, part_count, value);
        const float factor = s.squares != nullptr && is_in ? head_factor(s, at) : 1.0f;
#pragma unroll 1
        for (int i = 0; i < 3 && s.add[i] != nullptr; i++)
            if (is_in) value.add(load_eight(s.add[i] + at));
        if (writer && s.x_out != nullptr && is_in) value.store(s.x_out + at);
        if (s.squares != nullptr) scale_eight(value, factor);
        if (has_norm) {
            const float squares = norm_eight(value, at == threadIdx.x * 8 ? norm.weight : is_in ? load_eight(s.norm_weight + at) : zero_eight());
            if (lane == 0) v.chunk_sums[at / 256] = squares;
        }
        if (riders.count > 0) riders.arrive();
#pragma unroll 1
        for (uint32_t r = 0; r < riders.count; r++) {
            const float sum = warp_sum(riders.product(r, (const float *)&value, at, s.count));
            if (lane == 0) v.chunk_sums[(r + 1) * v.k + at / 256] = sum;
        }
        if (v.f32 != nullptr) value.store(v.f32 + at);
        else quantize_eight(v, at / 256, lane, value);
    }
    __syncthreads();
    if (!has_norm) return given;
    return rsqrtf(__fdividef(sum_chunks(v.chunk_sums, v.k), (float)s.count) + s.eps);
}

/* A piece of a vector by one warp for itself: no norm, no sums, no CTA barrier. */
__device__ __forceinline__ void prepare_piece(const float *h, uint32_t count, const input_vector &v) {
    const uint32_t lane = threadIdx.x & 31;
#pragma unroll 2
    for (uint32_t c = 0; c < v.k; c++) {
        const uint32_t at = c * 256 + lane * 8;
        const eight value = at < count ? load_eight(h + at) : zero_eight();
        if (v.f32 != nullptr) value.store(v.f32 + at);
        else quantize_eight(v, c, lane, value);
    }
    __syncwarp();
}

} // namespace spk

#endif
