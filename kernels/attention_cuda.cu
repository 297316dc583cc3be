/* kernels/attention_cuda.cu - exact attention of one token over all positions, split over the KV cache.
 *
 * Maths      q, k = rope(rms_norm(.)); out = softmax(q k^T / sqrt(d)) v * sigmoid(gate)
 * Bytes      4 * head_dim * kv_heads a position; Qwen3.6 at 32,768 tokens: 67 MB a layer
 * Launch     attend: one CTA of 256 threads a (KV head, split), as many splits as fill the GPU; short contexts leave the
 *            last ones empty, so the grid never changes.  A warp walks positions; a lane owns head_dim/32 dimensions of
 *            all query heads of the KV head, so K and V are read once for the group, four positions ahead.
 *            combine: one CTA a query head merges the splits and applies the gate.
 * Reference  spk_kernels.qk_norm_rope, kv_store, attend, sigmoid_gate.  Scores differ by head_dim * 2^-24 * sum |q k|,
 *            exponentials by 2 ulp of expf, the sum by the number of positions a warp walks
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/device_cuda.cuh"

namespace spk {
namespace {

constexpr int WARPS = 8, THREADS = 32 * WARPS, SPLIT_POSITIONS_MIN = 32, AHEAD = 4;

struct attention_args {
    spk_cuda_attention a;
    uint32_t           split_count;
};

/* Positions of a split: [begin, end) of count. */
struct range { uint32_t begin, end; };
__device__ __forceinline__ range split_range(uint32_t split, uint32_t split_count, uint32_t count) {
    uint32_t size = max((count + split_count - 1) / split_count, (uint32_t)SPLIT_POSITIONS_MIN);
    return { min(split * size, count), min((split + 1) * size, count) };
}

/* Norm and rotation of one head by one warp; D values a lane, i = 32 j + lane. */
template <int DIM>
__device__ __forceinline__ void norm_rope(const attention_args &p, const float *x, const float *weight, float *out, uint32_t lane) {
    float v[DIM / 32], sum = 0.0f;
#pragma unroll
    for (int j = 0; j < DIM / 32; j++) {
        v[j] = __ldcg(x + 32 * j + lane);
        sum = fmaf(v[j], v[j], sum);
    }
    float factor = 1.0f / sqrtf(warp_sum(sum) / (float)DIM + p.a.eps);
#pragma unroll
    for (int j = 0; j < DIM / 32; j++) out[32 * j + lane] = v[j] * factor * weight[32 * j + lane];
    __syncwarp();
    uint32_t half = p.a.rope_dim / 2;
    for (uint32_t i = lane; i < half; i += 32) {
        float c = __ldcg(p.a.cos_sin + 2 * i), s = __ldcg(p.a.cos_sin + 2 * i + 1), a = out[i], b = out[i + half];
        out[i] = a * c - b * s;
        out[i + half] = a * s + b * c;
    }
    __syncwarp();
}

/* V consecutive halves of a cache row, as they come. */
template <int V> struct halves;
template <> struct halves<8> { uint4 raw; };
template <> struct halves<4> { uint2 raw; };
template <> struct halves<2> { uint32_t raw; };
template <int V> __device__ __forceinline__ halves<V> load_halves(const uint16_t *p) {
    return { __ldcg((const decltype(halves<V>::raw) *)p) };
}
template <int V> __device__ __forceinline__ void to_floats(const halves<V> &h, float out[V]) {
    const __half2 *pairs = (const __half2 *)&h.raw;
#pragma unroll
    for (int i = 0; i < V / 2; i++) *(float2 *)&out[2 * i] = __half22float2(pairs[i]);
}

/* State of the online softmax of G query heads in one warp: acc [head][V dimensions of the lane], sums relative to top. */
template <int G, int V> struct softmax_state {
    float acc[G][V], top[G], sum[G];
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int h = 0; h < G; h++) {
            top[h] = -INFINITY;
            sum[h] = 0.0f;
#pragma unroll
            for (int i = 0; i < V; i++) acc[h][i] = 0.0f;
        }
    }
    /* One position: scores of all heads, then its value with their weights. */
    __device__ __forceinline__ void add(const float q[G][V], const float k[V], const float v[V]) {
        float score[G];
#pragma unroll
        for (int h = 0; h < G; h++) {
            score[h] = 0.0f;
#pragma unroll
            for (int i = 0; i < V; i++) score[h] = fmaf(q[h][i], k[i], score[h]);
        }
#pragma unroll
        for (int h = 0; h < G; h++) score[h] = warp_sum(score[h]);
#pragma unroll
        for (int h = 0; h < G; h++) {
            if (score[h] > top[h]) {                     /* uniform over the warp: scores are */
                float shrink = __expf(top[h] - score[h]);
                top[h] = score[h];
                sum[h] *= shrink;
#pragma unroll
                for (int i = 0; i < V; i++) acc[h][i] *= shrink;
            }
            float weight = __expf(score[h] - top[h]);
            sum[h] += weight;
#pragma unroll
            for (int i = 0; i < V; i++) acc[h][i] = fmaf(weight, v[i], acc[h][i]);
        }
    }
};

template <int DIM, int G> __global__ void __launch_bounds__(THREADS) attend_kernel(const __grid_constant__ attention_args p) {
    chain_release();
    constexpr int V = DIM / 32;
    __shared__ float q_shared[G][DIM], fresh[2][DIM];
    __shared__ float merge_acc[WARPS][DIM], merge_top[WARPS][G], merge_sum[WARPS][G];
    const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x >> 5, kv_head = blockIdx.y, split = blockIdx.x;
    const uint32_t group = p.a.head_count / p.a.kv_head_count, q_stride = (p.a.is_gated ? 2 : 1) * DIM;
    const uint32_t position = __ldcg(p.a.d_position);      /* written by the step before: no need to wait for it */
    const range r = split_range(split, p.split_count, position + 1);
    const uint32_t end = min(r.end, position);              /* cached positions; the new one is in shared memory */
    const bool owns_new = r.end == position + 1;
    const size_t row = (size_t)p.a.kv_head_count * DIM, column = (size_t)kv_head * DIM + V * lane;
    /* The past is in the cache: the first positions are on their way before the wait. */
    halves<V> k_next[AHEAD], v_next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        uint32_t j = r.begin + warp + WARPS * i;
        if (j < end) {
            k_next[i] = load_halves<V>(p.a.k_cache + j * row + column);
            v_next[i] = load_halves<V>(p.a.v_cache + j * row + column);
        }
    }
    chain_wait();
    if (r.begin >= r.end) return;
    for (uint32_t h = warp; h < group; h += WARPS)
        norm_rope<DIM>(p, p.a.q + (kv_head * group + h) * q_stride, p.a.q_norm, q_shared[h], lane);
    if (owns_new && warp == WARPS - 1) {
        norm_rope<DIM>(p, p.a.k + kv_head * DIM, p.a.k_norm, fresh[0], lane);
        size_t at = position * row + (size_t)kv_head * DIM;
        for (uint32_t i = lane; i < DIM; i += 32) {         /* as the cache rounds it, here too */
            const __half k = __float2half_rn(fresh[0][i]), v = __float2half_rn(__ldcg(p.a.v + kv_head * DIM + i));
            p.a.k_cache[at + i] = __half_as_ushort(k);
            p.a.v_cache[at + i] = __half_as_ushort(v);
            fresh[0][i] = __half2float(k);
            fresh[1][i] = __half2float(v);
        }
    }
    __syncthreads();
    float q[G][V];
    const float scale = 1.0f / sqrtf((float)DIM);
#pragma unroll
    for (int h = 0; h < G; h++)
#pragma unroll
        for (int i = 0; i < V; i++) q[h][i] = h < (int)group ? q_shared[h][V * lane + i] * scale : 0.0f;
    softmax_state<G, V> s;
    s.clear();
    for (uint32_t base = r.begin + warp; base < end; base += WARPS * AHEAD) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            uint32_t j = base + WARPS * i, later = j + WARPS * AHEAD;
            if (j >= end) break;
            float k[V], v[V];
            to_floats<V>(k_next[i], k);
            to_floats<V>(v_next[i], v);
            if (later < end) {
                k_next[i] = load_halves<V>(p.a.k_cache + later * row + column);
                v_next[i] = load_halves<V>(p.a.v_cache + later * row + column);
            }
            s.add(q, k, v);
        }
    }
    if (owns_new && warp == 0) {
        float k[V], v[V];
#pragma unroll
        for (int i = 0; i < V; i++) {
            k[i] = fresh[0][V * lane + i];
            v[i] = fresh[1][V * lane + i];
        }
        s.add(q, k, v);
    }
    /* Merge the warps, one query head at a time, in order of warp. */
    if (lane == 0)
#pragma unroll
        for (int h = 0; h < G; h++) {
            merge_top[warp][h] = s.top[h];
            merge_sum[warp][h] = s.sum[h];
        }
    float *partial = p.a.partial + (size_t)(kv_head * p.split_count + split) * group * (DIM + 2);
#pragma unroll
    for (int h = 0; h < G; h++) {
        if (h >= (int)group) break;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < V; i++) merge_acc[warp][V * lane + i] = s.acc[h][i];
        __syncthreads();
        float top = -INFINITY, sum = 0.0f;
        for (int w = 0; w < WARPS; w++) top = fmaxf(top, merge_top[w][h]);
        for (uint32_t i = threadIdx.x; i < DIM; i += THREADS) {
            float value = 0.0f;
            for (int w = 0; w < WARPS; w++) value = fmaf(__expf(merge_top[w][h] - top), merge_acc[w][i], value);
            partial[h * (DIM + 2) + i] = value;
        }
        for (int w = 0; w < WARPS; w++) sum = fmaf(__expf(merge_top[w][h] - top), merge_sum[w][h], sum);
        if (threadIdx.x == 0) {
            partial[h * (DIM + 2) + DIM] = top;
            partial[h * (DIM + 2) + DIM + 1] = sum;
        }
    }
}

/* A CTA is one query head; splits in order. */
template <int DIM> __global__ void __launch_bounds__(DIM) combine_kernel(const __grid_constant__ attention_args p) {
    chain_release();
    const uint32_t group = p.a.head_count / p.a.kv_head_count, head = blockIdx.x, kv_head = head / group;
    chain_wait();
    const uint32_t count = __ldcg(p.a.d_position) + 1;
    const float *partial = p.a.partial + ((size_t)kv_head * p.split_count * group + head % group) * (DIM + 2);
    const size_t stride = (size_t)group * (DIM + 2);
    uint32_t used = 0;
    float top = -INFINITY, sum = 0.0f, value = 0.0f;
    while (used < p.split_count && split_range(used, p.split_count, count).begin < count) used++;
    for (uint32_t s = 0; s < used; s++) top = fmaxf(top, __ldcg(partial + s * stride + DIM));
    for (uint32_t s = 0; s < used; s++) {
        float weight = __expf(__ldcg(partial + s * stride + DIM) - top);
        sum = fmaf(weight, __ldcg(partial + s * stride + DIM + 1), sum);
        value = fmaf(weight, __ldcg(partial + s * stride + threadIdx.x), value);
    }
    float out = value / sum;
    if (p.a.is_gated) out *= sigmoid(__ldcg(p.a.q + head * 2 * DIM + DIM + threadIdx.x));
    p.a.out[head * DIM + threadIdx.x] = out;
}

uint32_t splits_of(const spk_cuda *cuda, const spk_cuda_attention *args) {
    uint32_t splits = cuda->sm_count / args->kv_head_count;
    return splits == 0 ? 1 : splits;
}

template <int DIM> void launch_attention(spk_cuda *cuda, const attention_args &p) {
    uint32_t group = p.a.head_count / p.a.kv_head_count;
    dim3 grid(p.split_count, p.a.kv_head_count);
    launch(cuda, group <= 2 ? attend_kernel<DIM, 2> : group <= 4 ? attend_kernel<DIM, 4> : attend_kernel<DIM, 8>, grid, THREADS,
           0, p, "attention");
    launch(cuda, combine_kernel<DIM>, p.a.head_count, DIM, 0, p, "attention combine");
}

} // namespace
} // namespace spk

uint64_t spk_cuda_attention_scratch_bytes(const spk_cuda *cuda, const spk_cuda_attention *args) {
    return (uint64_t)spk::splits_of(cuda, args) * args->head_count * (args->head_dim + 2) * sizeof(float);
}

void spk_cuda_launch_attention(spk_cuda *cuda, const spk_cuda_attention *args) {
    spk::attention_args p = { *args, spk::splits_of(cuda, args) };
    switch (args->head_dim) {
    case 64:  spk::launch_attention<64>(cuda, p); break;
    case 128: spk::launch_attention<128>(cuda, p); break;
    default:  spk::launch_attention<256>(cuda, p); break;
    }
}
