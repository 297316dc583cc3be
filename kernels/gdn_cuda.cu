/* kernels/gdn_cuda.cu - the recurrence of a GDN layer for one token: one kernel, or the parts it is made of.
 *
 * Maths      y = silu(conv(u)); q, k normalised; S *= decay; d = beta (v - S k); S += d k^T; o = S q;
 *            out = rms_norm(o) * silu(z).  With the old S: o = decay (S q) + d (k . q), so both products with S come from
 *            one pass over it.
 * Bytes      the state once in and once out: 2 * 4 * v_heads * v_dim * k_dim; Qwen3.6: 4.2 MB a layer
 * Launch     fused: one CTA of 512 threads a V head; its state (64 KB) is in registers before chain_wait.
 * Reference  spk_kernels.gdn_conv, l2_norm, gdn_head; sums of n terms differ by at most n * 2^-24 * sum |terms|
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/device_cuda.cuh"

namespace spk {
namespace {

constexpr int WARPS = 16, THREADS = 32 * WARPS;
constexpr int DIM_MAX = 256;

/* The convolution over the tokens before this one, oldest first. */
__device__ __forceinline__ float conv_past(const spk_cuda_gdn &g, uint32_t channel, uint32_t channels, uint32_t position) {
    float sum = 0.0f;
    for (uint32_t tap = 0; tap + 1 < g.conv_kernel; tap++) {
        uint32_t slot = (position + 1 + tap) % g.conv_kernel;
        sum = fmaf(g.taps[channel * g.conv_kernel + tap], __ldcg(g.conv_state + slot * channels + channel), sum);
    }
    return sum;
}

/* Factor of an L2 norm over n values in shared or global memory; one warp. */
__device__ __forceinline__ float l2_factor(const float *x, uint32_t n, float eps, uint32_t lane) {
    float sum = 0.0f;
    for (uint32_t i = lane; i < n; i += 32) sum = fmaf(x[i], x[i], sum);
    return 1.0f / fmaxf(sqrtf(warp_sum(sum)), eps);
}

struct head_gates { float decay, beta; };
__device__ __forceinline__ head_gates gates_of(float alpha, float beta, float a, float dt) {
    float t = alpha + dt;
    float softplus = t > 20.0f ? t : log1pf(expf(t));
    return { expf(a * softplus), sigmoid(beta) };
}

/* One column of the state: K values a lane, rows K * lane + i, moved in the widest pieces that K allows. */
template <int K> struct column { float s[K]; };
template <int K> struct piece { typedef float4 type; };
template <> struct piece<1> { typedef float type; };
template <> struct piece<2> { typedef float2 type; };
template <int K> __device__ __forceinline__ void load_column(column<K> &c, const float *state, uint32_t lane) {
    typedef typename piece<K>::type wide;
#pragma unroll
    for (uint32_t i = 0; i < K * sizeof(float) / sizeof(wide); i++) ((wide *)c.s)[i] = __ldcs((const wide *)(state + K * lane) + i);
}
template <int K> __device__ __forceinline__ void store_column(const column<K> &c, float *state, uint32_t lane) {
    typedef typename piece<K>::type wide;
#pragma unroll
    for (uint32_t i = 0; i < K * sizeof(float) / sizeof(wide); i++) __stcs((wide *)(state + K * lane) + i, ((const wide *)c.s)[i]);
}
template <int K>
__device__ __forceinline__ float step_column(column<K> &c, float *state, const float q[K], const float k[K], float v, float kq,
                                             head_gates gate, uint32_t lane) {
    float sk = 0.0f, sq = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i++) {
        sk = fmaf(c.s[i], k[i], sk);
        sq = fmaf(c.s[i], q[i], sq);
    }
    sk = warp_sum(sk);
    sq = warp_sum(sq);
    float d = gate.beta * (v - gate.decay * sk);
#pragma unroll
    for (int i = 0; i < K; i++) c.s[i] = fmaf(k[i], d, gate.decay * c.s[i]);
    store_column(c, state, lane);
    return fmaf(d, kq, gate.decay * sq);
}

template <int K> __device__ __forceinline__ float dot_kq(const float q[K], const float k[K]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < K; i++) sum = fmaf(k[i], q[i], sum);
    return warp_sum(sum);
}

/* Factor of an RMSNorm over n values in shared memory; every warp for itself. */
__device__ __forceinline__ float norm_factor(const float *o, uint32_t n, float eps, uint32_t lane) {
    float sum = 0.0f;
    for (uint32_t i = lane; i < n; i += 32) sum = fmaf(o[i], o[i], sum);
    return 1.0f / sqrtf(warp_sum(sum) / (float)n + eps);
}

__device__ __forceinline__ void start() {
    chain_wait();
}

struct head_memory { float q[DIM_MAX], k[DIM_MAX], v[DIM_MAX], o[DIM_MAX]; };

/* A head's state in registers, and all that does not depend on the predecessor, before the wait: K values a lane of each of
 * C columns a warp, the convolution of the past, gates' constants, the norm's weights. */
template <int K, int C> __global__ void __launch_bounds__(THREADS, 1) fused_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    constexpr uint32_t DIM = 32 * K;
    __shared__ head_memory m;
    const uint32_t head = blockIdx.x, k_head = head % g.k_head_count, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t key_dim = g.k_head_count * DIM, channels = 2 * key_dim + g.v_head_count * DIM, i = threadIdx.x;
    const uint32_t part = i / DIM, at = i % DIM;      /* q, k, v channels of the first 3 DIM threads */
    const uint32_t channel = part < 2 ? part * key_dim + k_head * DIM + at : 2 * key_dim + head * DIM + at;
    const bool has_channel = part < 3, has_value = i < DIM;
    column<K> s[C];
#pragma unroll
    for (int c = 0; c < C; c++) load_column(s[c], g.delta_state + ((size_t)head * DIM + warp + WARPS * c) * DIM, lane);
    const uint32_t position = __ldcg(g.d_position);
    const float past = has_channel ? conv_past(g, channel, channels, position) : 0.0f;
    const float tap = has_channel ? g.taps[channel * g.conv_kernel + g.conv_kernel - 1] : 0.0f;
    const float a = g.a[head], dt = g.dt[head], norm_weight = has_value ? g.norm_weight[i] : 0.0f;
    start();
    const float u = has_channel ? __ldcg(g.u + channel) : 0.0f, z = has_value ? __ldcg(g.z + head * DIM + i) : 0.0f;
    const head_gates gate = gates_of(__ldcg(g.alpha + head), __ldcg(g.beta + head), a, dt);
    if (has_channel) {
        (part == 0 ? m.q : part == 1 ? m.k : m.v)[at] = silu(fmaf(tap, u, past));
        if (part == 2 || head < g.k_head_count) g.conv_state[(position % g.conv_kernel) * channels + channel] = u;
    }
    __syncthreads();
    /* Every warp norms q and k for itself: one barrier less than sharing the factors. */
    const float q_factor = l2_factor(m.q, DIM, g.eps, lane) * (1.0f / sqrtf((float)DIM)), k_factor = l2_factor(m.k, DIM, g.eps, lane);
    float q[K], k[K];
#pragma unroll
    for (int j = 0; j < K; j++) {
        q[j] = m.q[K * lane + j] * q_factor;
        k[j] = m.k[K * lane + j] * k_factor;
    }
    const float kq = dot_kq<K>(q, k);
#pragma unroll
    for (int c = 0; c < C; c++) {
        uint32_t row = warp + WARPS * c;
        float value = step_column(s[c], g.delta_state + ((size_t)head * DIM + row) * DIM, q, k, m.v[row], kq, gate, lane);
        if (lane == 0) m.o[row] = value;
    }
    __syncthreads();
    const float factor = norm_factor(m.o, DIM, g.eps, lane);
    if (has_value) g.out[head * DIM + i] = m.o[i] * factor * norm_weight * silu(z);
}

/* ---- The parts ---- */

/* A CTA is one head of q, k or v channels. */
template <bool NORM> __global__ void __launch_bounds__(DIM_MAX) conv_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    __shared__ float y[DIM_MAX];
    __shared__ float factor;
    const uint32_t k_heads = g.k_head_count, key_dim = k_heads * g.k_dim, channels = 2 * key_dim + g.v_head_count * g.v_dim;
    const bool is_v = blockIdx.x >= 2 * k_heads;
    const uint32_t width = is_v ? g.v_dim : g.k_dim;
    const uint32_t channel = (is_v ? 2 * key_dim + (blockIdx.x - 2 * k_heads) * g.v_dim : blockIdx.x * g.k_dim) + threadIdx.x;
    start();
    const uint32_t position = __ldcg(g.d_position);
    if (threadIdx.x < width) {
        float u = __ldcg(g.u + channel);
        float past = conv_past(g, channel, channels, position);
        y[threadIdx.x] = silu(fmaf(g.taps[channel * g.conv_kernel + g.conv_kernel - 1], u, past));
        g.conv_state[(position % g.conv_kernel) * channels + channel] = u;
    }
    __syncthreads();
    if (NORM && !is_v && threadIdx.x < 32) {
        float f = l2_factor(y, width, g.eps, threadIdx.x);
        if (threadIdx.x == 0) factor = blockIdx.x < k_heads ? f * (1.0f / sqrtf((float)g.k_dim)) : f;
    }
    __syncthreads();
    if (threadIdx.x < width) g.conv_out[channel] = NORM && !is_v ? y[threadIdx.x] * factor : y[threadIdx.x];
}

/* A CTA of one warp is one head of q or k. */
__global__ void __launch_bounds__(32) l2_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    start();
    float *x = g.conv_out + blockIdx.x * g.k_dim, y[DIM_MAX / 32];
    for (uint32_t i = threadIdx.x, n = 0; i < g.k_dim; i += 32, n++) y[n] = __ldcg(x + i);
    float sum = 0.0f;
    for (uint32_t n = 0; n < g.k_dim / 32; n++) sum = fmaf(y[n], y[n], sum);
    float factor = 1.0f / fmaxf(sqrtf(warp_sum(sum)), g.eps);
    if (blockIdx.x < g.k_head_count) factor *= 1.0f / sqrtf((float)g.k_dim);
    for (uint32_t i = threadIdx.x, n = 0; i < g.k_dim; i += 32, n++) x[i] = y[n] * factor;
}

template <int K> __global__ void __launch_bounds__(THREADS) delta_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    __shared__ head_memory m;
    const uint32_t head = blockIdx.x, key_dim = g.k_head_count * g.k_dim;
    start();
    if (threadIdx.x < g.k_dim) {
        m.q[threadIdx.x] = __ldcg(g.conv_out + (head % g.k_head_count) * g.k_dim + threadIdx.x);
        m.k[threadIdx.x] = __ldcg(g.conv_out + key_dim + (head % g.k_head_count) * g.k_dim + threadIdx.x);
    }
    if (threadIdx.x < g.v_dim) m.v[threadIdx.x] = __ldcg(g.conv_out + 2 * key_dim + head * g.v_dim + threadIdx.x);
    __syncthreads();
    const uint32_t lane = threadIdx.x & 31;
    const head_gates gate = gates_of(__ldcg(g.alpha + head), __ldcg(g.beta + head), g.a[head], g.dt[head]);
    float q[K], k[K];
    for (int j = 0; j < K; j++) {
        q[j] = m.q[K * lane + j];
        k[j] = m.k[K * lane + j];
    }
    const float kq = dot_kq<K>(q, k);
    for (uint32_t c = threadIdx.x >> 5; c < g.v_dim; c += WARPS) {
        float *state = g.delta_state + ((size_t)head * g.v_dim + c) * g.k_dim;
        column<K> s;
        load_column(s, state, lane);
        float value = step_column(s, state, q, k, m.v[c], kq, gate, lane);
        if (lane == 0) g.delta_out[head * g.v_dim + c] = value;
    }
}

__global__ void __launch_bounds__(DIM_MAX) norm_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    __shared__ float o[DIM_MAX];
    start();
    if (threadIdx.x < g.v_dim) o[threadIdx.x] = __ldcg(g.delta_out + blockIdx.x * g.v_dim + threadIdx.x);
    __syncthreads();
    const uint32_t at = blockIdx.x * g.v_dim + threadIdx.x;
    const float factor = norm_factor(o, g.v_dim, g.eps, threadIdx.x & 31);
    if (threadIdx.x < g.v_dim) g.out[at] = o[threadIdx.x] * factor * g.norm_weight[threadIdx.x] * silu(__ldcg(g.z + at));
}

typedef void gdn_kernel(spk_cuda_gdn);
gdn_kernel *delta_of(uint32_t k_dim) {
    switch (k_dim / 32) {
    case 1:  return delta_kernel<1>;
    case 2:  return delta_kernel<2>;
    case 4:  return delta_kernel<4>;
    default: return delta_kernel<8>;
    }
}
/* NULL where a head's state does not fit the registers of a CTA. */
gdn_kernel *fused_of(uint32_t k_dim, uint32_t v_dim) {
    if (k_dim != v_dim) return nullptr;
    switch (k_dim / 32) {
    case 1:  return fused_kernel<1, 2>;
    case 2:  return fused_kernel<2, 4>;
    case 4:  return fused_kernel<4, 8>;
    default: return nullptr;
    }
}

} // namespace
} // namespace spk

void spk_cuda_launch_gdn(spk_cuda *cuda, const spk_cuda_gdn *args, spk_cuda_gdn_fusion fusion) {
    using namespace spk;
    uint32_t heads = args->v_head_count, conv_ctas = 2 * args->k_head_count + heads;
    gdn_kernel *fused = fusion == SPK_CUDA_GDN_FUSED ? fused_of(args->k_dim, args->v_dim) : nullptr;
    if (fused != nullptr) {
        launch(cuda, fused, heads, THREADS, 0, *args, "gdn");
        return;
    }
    launch(cuda, fusion != SPK_CUDA_GDN_PLAIN ? conv_kernel<true> : conv_kernel<false>, conv_ctas, DIM_MAX, 0, *args, "gdn conv");
    if (fusion == SPK_CUDA_GDN_PLAIN) launch(cuda, l2_kernel, 2 * args->k_head_count, 32, 0, *args, "gdn l2 norm");
    launch(cuda, delta_of(args->k_dim), heads, THREADS, 0, *args, "gdn delta");
    launch(cuda, norm_kernel, heads, DIM_MAX, 0, *args, "gdn norm");
}
