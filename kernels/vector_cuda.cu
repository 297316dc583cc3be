/* kernels/vector_cuda.cu - the small kernels of a step: embedding row, RMSNorm, elementwise sums and gates.
 *
 * The fused path needs only the embedding; the others are what fused kernels fold in, kept as the other side of each switch.
 * They share prepare_input and the scalar formulas with the fused kernels, and so give the same bits.
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/router_cuda.cuh"

namespace spk {
namespace {

struct tick_args { uint32_t *d_step; };

constexpr int THREADS = 256;

/* Byte i of a block whose row begins at `row`; tiles are addressed through their planes. */
struct block_bytes {
    const uint8_t *base;
    uint32_t       lane;
    bool           is_tile;
    /* Offset within a super-block's fields, in a tile: plane * 512 + 16 * lane + byte. */
    __device__ __forceinline__ uint8_t at(uint32_t ggml_offset, uint32_t plane, uint32_t plane_byte) const {
        return is_tile ? base[512 * plane + 16 * lane + plane_byte] : base[ggml_offset];
    }
};

/* Weight i (0..255) of a super-block. */
__device__ float q8_0_at(const block_bytes &b, uint32_t i) {
    uint32_t j = i / 32, q = b.is_tile ? 0 : 34 * j;
    uint16_t d = (uint16_t)(b.at(q, 0, 2 * j) | b.at(q + 1, 0, 2 * j + 1) << 8);
    return __half2float(__ushort_as_half(d)) * (float)(int8_t)b.at(q + 2 + i % 32, 1 + i / 16, i % 16);
}
__device__ float k45_at(const block_bytes &b, uint32_t i, bool is_q5) {
    uint32_t j = i / 32, l = i % 32, c = i / 64;
    uint32_t qs_plane = is_q5 ? 3 : 1, qs_offset = is_q5 ? 48 : 16;
    uint16_t d = (uint16_t)(b.at(0, 0, 0) | b.at(1, 0, 1) << 8), m = (uint16_t)(b.at(2, 0, 2) | b.at(3, 0, 3) << 8);
    const uint32_t scales = 4;           /* first of the packed scale bytes, in a block and in plane 0 */
    const uint32_t k = j & 3, low = b.at(scales + k, 0, scales + k), mid = b.at(scales + 4 + k, 0, scales + 4 + k);
    const uint32_t high = b.at(scales + 8 + k, 0, scales + 8 + k);
    const uint32_t scale = j < 4 ? low & 63u : (high & 15u) | (low >> 6) << 4, min = j < 4 ? mid & 63u : (high >> 4) | (mid >> 6) << 4;
    uint32_t at = 32 * c + l, q = b.at(qs_offset + at, qs_plane + at / 16, at % 16);
    q = j & 1 ? q >> 4 : q & 15u;
    if (is_q5) q |= (uint32_t)((b.at(16 + l, 1 + l / 16, l % 16) >> j) & 1u) << 4;
    return __half2float(__ushort_as_half(d)) * scale * q - __half2float(__ushort_as_half(m)) * min;
}
__device__ float q6_k_at(const block_bytes &b, uint32_t i) {
    uint32_t t = i / 128, r = (i % 128) / 32, l = i % 32, at = 64 * t + 32 * (r & 1) + l, h = 32 * t + l;
    uint32_t low = b.at(at, 1 + at / 16, at % 16), high = b.at(128 + h, 9 + h / 16, h % 16);
    low = r < 2 ? low & 15u : low >> 4;
    int q = (int)(low | ((high >> (2 * r)) & 3u) << 4) - 32;
    float scale = (float)(int8_t)b.at(192 + i / 16, 0, i / 16);
    uint16_t d = b.is_tile ? *(const uint16_t *)(b.base + 6656 + 2 * b.lane) : (uint16_t)(b.base[208] | b.base[209] << 8);
    return __half2float(__ushort_as_half(d)) * scale * (float)q;
}

struct embed_args {
    spk_cuda_embed a;
    uint32_t       tile_lanes_per_row, tiles_per_group, block_bytes_plain;
};

/* Weight `column` of a row. */
__device__ float weight_at(const embed_args &p, uint64_t row, uint32_t column) {
    const spk_matrix &w = p.a.embedding;
    if (w.layout == SPK_LAYOUT_ROWS) {
        const uint8_t *start = w.data + row * w.unit_stride_bytes;
        switch (w.type) {
        case SPK_TYPE_F32:  return ((const float *)start)[column];
        case SPK_TYPE_F16:  return __half2float(((const __half *)start)[column]);
        case SPK_TYPE_BF16: return __uint_as_float((uint32_t)((const uint16_t *)start)[column] << 16);
        default: break;
        }
    }
    block_bytes b;
    uint32_t kb = column / 256;
    b.is_tile = w.layout == SPK_LAYOUT_T32;
    if (b.is_tile) {
        uint32_t rows = 32 / p.tile_lanes_per_row;
        uint64_t tile = row / rows * p.tiles_per_group + kb / p.tile_lanes_per_row;
        b.base = w.data + tile * w.unit_stride_bytes;
        b.lane = (uint32_t)(row % rows) * p.tile_lanes_per_row + kb % p.tile_lanes_per_row;
    } else {
        b.base = w.data + row * w.unit_stride_bytes + (size_t)kb * p.block_bytes_plain;
        b.lane = 0;
    }
    switch (w.type) {
    case SPK_TYPE_Q8_0: return q8_0_at(b, column % 256);
    case SPK_TYPE_Q4_K: return k45_at(b, column % 256, false);
    case SPK_TYPE_Q5_K: return k45_at(b, column % 256, true);
    default:            return q6_k_at(b, column % 256);
    }
}

__global__ void __launch_bounds__(THREADS) embed_kernel(const __grid_constant__ embed_args p) {
    chain_release();
    chain_wait();
    const uint32_t position = __ldcg(p.a.sequence.d_position), token = __ldcg(p.a.sequence.d_tokens + position);
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    if (i < p.a.embedding.col_count) p.a.d_x[i] = weight_at(p, token, i);
    for (uint32_t c = i; c < p.a.clear_count; c += gridDim.x * THREADS) p.a.d_clear[router_place(c)] = 0;
    if (i < p.a.rope_dim / 2) {
        double turns = (double)position * p.a.d_turns[i], sine, cosine;
        sincospi(2.0 * (turns - rint(turns)), &sine, &cosine);
        p.a.d_cos_sin[2 * i] = (float)cosine;
        p.a.d_cos_sin[2 * i + 1] = (float)sine;
    }
}

__global__ void __launch_bounds__(THREADS) norm_kernel(const __grid_constant__ spk_cuda_norm a) {
    chain_release();
    SPK_DYNAMIC_SHARED(memory);
    const input_vector v = carve_f32(memory, a.source.count);
    norm_prefetch norm;
    norm.load(a.source);
    chain_wait();
    const float_riders none = {};
    const float factor = prepare_input(a.source, v, norm, none, true);
    for (uint32_t i = threadIdx.x; i < a.source.count; i += THREADS) a.out[i] = v.f32[i];
    if (threadIdx.x == 0) *a.factor = factor;
}

__global__ void __launch_bounds__(THREADS) elementwise_kernel(const __grid_constant__ spk_cuda_elementwise e) {
    chain_release();
    chain_wait();
    const uint32_t i = blockIdx.x * THREADS + threadIdx.x;
    float a = i < e.count ? __ldcg(e.a + i) : 0.0f;
    if (i >= e.count && e.op != SPK_CUDA_SHARED_SCALE) return;
    switch (e.op) {
    case SPK_CUDA_ADD:
        a += __ldcg(e.b + i);
        if (e.c != nullptr) a += __ldcg(e.c + i);
        if (e.d != nullptr) a += __ldcg(e.d + i);
        break;
    case SPK_CUDA_SWIGLU:
        a = silu(a) * __ldcg(e.b + i);
        break;
    case SPK_CUDA_SHARED_SCALE:
        a = a * sigmoid(router_value(e.routing, e.routing.expert_count) * router_scale(e.routing));
        break;
    }
    if (i < e.count) e.out[i] = a;
}

__global__ void __launch_bounds__(32) tick_kernel(const __grid_constant__ tick_args a) {
    chain_release();
    chain_wait();
    if (threadIdx.x == 0) ++*a.d_step;
}

} // namespace
} // namespace spk

void spk_cuda_launch_tick(spk_cuda *cuda, uint32_t *d_step) {
    const uint32_t limit = cuda->launch_limit;
    cuda->launch_limit = UINT32_MAX;
    spk::launch(cuda, spk::tick_kernel, 1, 32, 0, spk::tick_args{ d_step }, "tick");
    cuda->launch_limit = limit;
}

void spk_cuda_launch_embed(spk_cuda *cuda, const spk_cuda_embed *args) {
    spk::embed_args p = { *args, 1, 1, 0 };
    const spk_matrix &w = args->embedding;
    if (w.layout == SPK_LAYOUT_T32) {
        spk_t32_geometry g = spk_t32_geometry_of(w.type, w.row_count, w.col_count);
        p.tile_lanes_per_row = g.lanes_per_row;
        p.tiles_per_group = (uint32_t)g.tiles_per_group;
    }
    p.block_bytes_plain = w.type == SPK_TYPE_Q8_0 ? 8 * 34 : (uint32_t)spk_layout_unit_bytes(SPK_LAYOUT_ROWS, w.type, 256);
    uint32_t threads_wanted = (uint32_t)w.col_count > args->rope_dim ? (uint32_t)w.col_count : args->rope_dim;
    spk::launch(cuda, spk::embed_kernel, (threads_wanted + spk::THREADS - 1) / spk::THREADS, spk::THREADS, 0, p, "embedding");
}

void spk_cuda_launch_norm(spk_cuda *cuda, const spk_cuda_norm *args) {
    spk::launch(cuda, spk::norm_kernel, 1, spk::THREADS, spk::f32_bytes(args->source.count), *args, "norm");
}

void spk_cuda_launch_elementwise(spk_cuda *cuda, const spk_cuda_elementwise *args) {
    spk::launch(cuda, spk::elementwise_kernel, (args->count + spk::THREADS - 1) / spk::THREADS, spk::THREADS, 0, *args, "elementwise");
}
