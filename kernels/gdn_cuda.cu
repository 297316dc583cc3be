/* kernels/gdn_cuda.cu - the recurrence of a GDN layer for one token: one kernel, or the parts it is made of.
 *
 * Maths      y = silu(conv(u)); q, k normalised; S *= decay; d = beta (v - S k); S += d k^T; o = S q;
 *            out = rms_norm(o) * silu(z).  With the old S: o = decay (S q) + d (k . q), so both products with S come from
 *            one pass over it.
 * Bytes      the state once in and once out: 2 * 4 * v_heads * v_dim * k_dim; Qwen3.6: 4.2 MB a layer
 * Launch     fused: CTAs of 8 warps that own 32 columns of a V head; a warp has 4 columns of the state in registers before
 *            chain_wait.  The gated norm is left to the next product, whose CTAs prepare their input anyway.
 * Reference  spk_kernels.gdn_conv, l2_norm, gdn_head; sums of n terms differ by at most n * 2^-24 * sum |terms|
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/device_cuda.cuh"

#include <algorithm>

namespace spk {
namespace {

constexpr int DIM_MAX = 256;
constexpr uint32_t WARPS = 8, THREADS = 32 * WARPS, COLUMNS = 32, WARP_COLUMNS = COLUMNS / WARPS;   /* of a CTA */

/* The convolution over the tokens before this one, oldest first. */
__device__ __forceinline__ float conv_past(const spk_cuda_gdn &g, uint32_t channel, uint32_t channels, uint32_t position) {
    float sum = 0.0f;
    for (uint32_t tap = 0; tap + 1 < g.conv_kernel; tap++) {
        uint32_t slot = (position + 1 + tap) % g.conv_kernel;
        sum = fmaf(g.taps[channel * g.conv_kernel + tap], __ldcg(g.conv_state + slot * channels + channel), sum);
    }
    return sum;
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
/* C columns of a warp at once: their 2 C sums and k . q are butterflies side by side.  out[c] = S q of column c. */
template <int K, int C>
__device__ __forceinline__ void step_columns(column<K> s[C], const float q[K], const float k[K], const float v[C], head_gates gate, float out[C]) {
    float sums[2 * C + 1] = { 0.0f };
#pragma unroll
    for (int i = 0; i < K; i++) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            sums[2 * c] = fmaf(s[c].s[i], k[i], sums[2 * c]);
            sums[2 * c + 1] = fmaf(s[c].s[i], q[i], sums[2 * c + 1]);
        }
        sums[2 * C] = fmaf(k[i], q[i], sums[2 * C]);
    }
#pragma unroll
    for (int o = 16; o > 0; o >>= 1)
#pragma unroll
        for (int n = 0; n < 2 * C + 1; n++) sums[n] += __shfl_xor_sync(FULL, sums[n], o);
#pragma unroll
    for (int c = 0; c < C; c++) {
        const float d = gate.beta * (v[c] - gate.decay * sums[2 * c]);
#pragma unroll
        for (int i = 0; i < K; i++) s[c].s[i] = fmaf(k[i], d, gate.decay * s[c].s[i]);
        out[c] = fmaf(d, sums[2 * C], gate.decay * sums[2 * c + 1]);
    }
}

/* A lane's K values of a head's q or k, in shared memory or (from L2) as an earlier kernel left them. */
template <int K> __device__ __forceinline__ void take_shared(float out[K], const float *head, uint32_t lane) {
#pragma unroll
    for (int j = 0; j < K; j++) out[j] = head[K * lane + j];
}
template <int K> __device__ __forceinline__ void take_global(float out[K], const float *head, uint32_t lane) {
    typedef typename piece<K>::type wide;
#pragma unroll
    for (uint32_t i = 0; i < K * sizeof(float) / sizeof(wide); i++) ((wide *)out)[i] = __ldcg((const wide *)(head + K * lane) + i);
}
/* 1 / |x| over a warp's values. */
template <int K> __device__ __forceinline__ float l2_factor(const float x[K], float eps) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < K; j++) sum = fmaf(x[j], x[j], sum);
    return fminf(rsqrtf(warp_sum(sum)), 1.0f / eps);
}

/* The state before a position. */
__device__ __forceinline__ float *delta_before(const spk_cuda_gdn &g, uint32_t position) {
    return g.delta_state + (size_t)(position % SPK_CUDA_GDN_STATES) * g.v_head_count * g.v_dim * g.k_dim;
}

/* ---- All in one ---- */

/* Channels of a CTA: q and k of its head's key head, and its own 32 of v; each thread has at most two. */
template <int K> struct channel_of {
    uint32_t part, at, channel;          /* part 0: q, 1: k, 2: v; at: within q, k or the CTA's columns */
    bool     is_one, is_mine;            /* is_mine: this CTA keeps its place in the ring */
    __device__ __forceinline__ channel_of(const spk_cuda_gdn &g, uint32_t i, uint32_t head, uint32_t columns_at) {
        constexpr uint32_t DIM = 32 * K;
        const uint32_t key_dim = g.k_head_count * DIM;
        part = i / DIM < 2 ? i / DIM : 2;
        at = i - part * DIM;
        is_one = i < 2 * DIM + COLUMNS;
        channel = part < 2 ? part * key_dim + (head % g.k_head_count) * DIM + at : 2 * key_dim + head * DIM + columns_at + at;
        is_mine = part == 2 || (head < g.k_head_count && columns_at == 0);
    }
};

template <int K> __global__ void __launch_bounds__(THREADS, 2) fused_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    touch_arguments(g);
    constexpr uint32_t DIM = 32 * K, CTAS = DIM / COLUMNS, ROUNDS = (2 * DIM + COLUMNS + THREADS - 1) / THREADS;
    float *const shared_q = (float *)ptx::dynamic_shared(), *const shared_k = shared_q + DIM, *const shared_v = shared_k + DIM,
          *const warp_squares = shared_v + COLUMNS, *const shared_gates = warp_squares + WARPS;
    const uint32_t head = blockIdx.x / CTAS, columns_at = blockIdx.x % CTAS * COLUMNS, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t channels = (2 * g.k_head_count + g.v_head_count) * DIM;
    const uint32_t position = __ldcg(g.d_position);
    const size_t at = ((size_t)head * DIM + columns_at + warp * WARP_COLUMNS) * DIM;
    const float *const before = delta_before(g, position) + at;
    float *const after = delta_before(g, position + 1) + at;
    float past[ROUNDS], tap[ROUNDS];
#pragma unroll
    for (uint32_t r = 0; r < ROUNDS; r++) {
        const channel_of<K> c(g, threadIdx.x + r * THREADS, head, columns_at);
        past[r] = c.is_one ? conv_past(g, c.channel, channels, position) : 0.0f;
        tap[r] = c.is_one ? g.taps[c.channel * g.conv_kernel + g.conv_kernel - 1] : 0.0f;
    }
    const float a = g.a[head], dt = g.dt[head];
    const uint32_t own = columns_at + warp * WARP_COLUMNS + lane % WARP_COLUMNS;   /* column that this lane writes, of the first few */
    const float norm_weight = g.norm_weight[own];
    column<K> s[WARP_COLUMNS];
#pragma unroll
    for (uint32_t c = 0; c < WARP_COLUMNS; c++) load_column(s[c], before + c * DIM, lane);
    chain_wait();
    const bool gates = warp == WARPS - 1;     /* one warp: a thousand asking for two lines would queue up at L2 */
    const float alpha = gates ? __ldcg(g.alpha + head) : 0.0f, beta = gates ? __ldcg(g.beta + head) : 0.0f;
    const float z = __ldcg(g.z + head * DIM + own);
    float u[ROUNDS];
#pragma unroll
    for (uint32_t r = 0; r < ROUNDS; r++) {
        const channel_of<K> c(g, threadIdx.x + r * THREADS, head, columns_at);
        u[r] = c.is_one ? __ldcg(g.u + c.channel) : 0.0f;
    }
#pragma unroll
    for (uint32_t r = 0; r < ROUNDS; r++) {
        const channel_of<K> c(g, threadIdx.x + r * THREADS, head, columns_at);
        if (!c.is_one) continue;
        (c.part == 0 ? shared_q : c.part == 1 ? shared_k : shared_v)[c.at] = silu(fmaf(tap[r], u[r], past[r]));
        if (c.is_mine) g.conv_state[(position % g.conv_kernel) * channels + c.channel] = u[r];
    }
    if (gates) {
        const head_gates made = gates_of(alpha, beta, a, dt);
        if (lane == 0) {
            shared_gates[0] = made.decay;
            shared_gates[1] = made.beta;
        }
    }
    __syncthreads();
    const head_gates gate = { shared_gates[0], shared_gates[1] };
    float q[K], k[K], v[WARP_COLUMNS], out[WARP_COLUMNS];
    take_shared<K>(q, shared_q, lane);
    take_shared<K>(k, shared_k, lane);
    const float q_factor = l2_factor<K>(q, g.eps) * (1.0f / sqrtf((float)DIM)), k_factor = l2_factor<K>(k, g.eps);
#pragma unroll
    for (int j = 0; j < K; j++) {
        q[j] *= q_factor;
        k[j] *= k_factor;
    }
#pragma unroll
    for (uint32_t c = 0; c < WARP_COLUMNS; c++) v[c] = shared_v[warp * WARP_COLUMNS + c];
    step_columns<K, WARP_COLUMNS>(s, q, k, v, gate, out);
    float squares = 0.0f, value = 0.0f;
#pragma unroll
    for (uint32_t c = 0; c < WARP_COLUMNS; c++) {
        squares = fmaf(out[c], out[c], squares);
        value = lane == c ? out[c] : value;
    }
    if (lane < WARP_COLUMNS) g.out[head * DIM + own] = value * norm_weight * silu(z);
    if (lane == 0) warp_squares[warp] = squares;
#pragma unroll
    for (uint32_t c = 0; c < WARP_COLUMNS; c++) store_column(s[c], after + c * DIM, lane);
    __syncthreads();
    if (threadIdx.x > 0) return;
    float total = 0.0f;
#pragma unroll
    for (uint32_t w = 0; w < WARPS; w++) total += warp_squares[w];
    g.squares[blockIdx.x] = total;
}

/* ---- The parts ---- */

/* A CTA is one head of q, k or v channels. */
__global__ void __launch_bounds__(DIM_MAX) conv_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    const uint32_t k_heads = g.k_head_count, key_dim = k_heads * g.k_dim, channels = 2 * key_dim + g.v_head_count * g.v_dim;
    const bool is_v = blockIdx.x >= 2 * k_heads;
    const uint32_t channel = (is_v ? 2 * key_dim + (blockIdx.x - 2 * k_heads) * g.v_dim : blockIdx.x * g.k_dim) + threadIdx.x;
    chain_wait();
    const uint32_t position = __ldcg(g.d_position);
    if (threadIdx.x >= (is_v ? g.v_dim : g.k_dim)) return;
    const float u = __ldcg(g.u + channel), past = conv_past(g, channel, channels, position);
    g.conv_out[channel] = silu(fmaf(g.taps[channel * g.conv_kernel + g.conv_kernel - 1], u, past));
    g.conv_state[(position % g.conv_kernel) * channels + channel] = u;
}

/* L2 norm of one head of q or k by one warp: y gets it. */
template <int K> __device__ __forceinline__ void norm_head(const spk_cuda_gdn &g, float v[K], float *y) {
    float factor = l2_factor<K>(v, g.eps);
    if (blockIdx.x < g.k_head_count) factor *= 1.0f / sqrtf((float)g.k_dim);
#pragma unroll
    for (int j = 0; j < K; j++) y[K * (threadIdx.x & 31) + j] = v[j] * factor;
}
template <int K> __global__ void __launch_bounds__(32) l2_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    chain_wait();
    float *const head = g.conv_out + blockIdx.x * g.k_dim;
    float v[K];
    take_global<K>(v, head, threadIdx.x);
    norm_head<K>(g, v, head);
}
/* The convolution and the norms. */
template <int K> __global__ void __launch_bounds__(DIM_MAX) conv_norm_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    float *const y = (float *)ptx::dynamic_shared();
    const uint32_t k_heads = g.k_head_count, key_dim = k_heads * g.k_dim, channels = 2 * key_dim + g.v_head_count * g.v_dim;
    const bool is_v = blockIdx.x >= 2 * k_heads;
    const uint32_t head_at = is_v ? 2 * key_dim + (blockIdx.x - 2 * k_heads) * g.v_dim : blockIdx.x * g.k_dim, channel = head_at + threadIdx.x;
    chain_wait();
    const uint32_t position = __ldcg(g.d_position);
    if (threadIdx.x < (is_v ? g.v_dim : g.k_dim)) {
        const float u = __ldcg(g.u + channel), past = conv_past(g, channel, channels, position);
        const float value = silu(fmaf(g.taps[channel * g.conv_kernel + g.conv_kernel - 1], u, past));
        g.conv_state[(position % g.conv_kernel) * channels + channel] = u;
        if (is_v) g.conv_out[channel] = value;
        else y[threadIdx.x] = value;
    }
    if (is_v) return;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    float v[K];
    take_shared<K>(v, y, threadIdx.x);
    norm_head<K>(g, v, g.conv_out + head_at);
}

/* A CTA is 32 columns of a V head. */
template <int K> __global__ void __launch_bounds__(THREADS) delta_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    const uint32_t ctas = g.v_dim / COLUMNS, head = blockIdx.x / ctas, lane = threadIdx.x & 31;
    const uint32_t column_at = blockIdx.x % ctas * COLUMNS + (threadIdx.x >> 5) * WARP_COLUMNS, key_dim = g.k_head_count * g.k_dim;
    const uint32_t position = __ldcg(g.d_position);
    const size_t at = ((size_t)head * g.v_dim + column_at) * g.k_dim;
    const float *const before = delta_before(g, position) + at;
    float *const after = delta_before(g, position + 1) + at;
    column<K> s[WARP_COLUMNS];
#pragma unroll
    for (uint32_t c = 0; c < WARP_COLUMNS; c++) load_column(s[c], before + c * g.k_dim, lane);
    chain_wait();
    const head_gates gate = gates_of(__ldcg(g.alpha + head), __ldcg(g.beta + head), g.a[head], g.dt[head]);
    float q[K], k[K], v[WARP_COLUMNS], out[WARP_COLUMNS];
    take_global<K>(q, g.conv_out + (head % g.k_head_count) * g.k_dim, lane);
    take_global<K>(k, g.conv_out + key_dim + (head % g.k_head_count) * g.k_dim, lane);
#pragma unroll
    for (uint32_t c = 0; c < WARP_COLUMNS; c++) v[c] = __ldcg(g.conv_out + 2 * key_dim + head * g.v_dim + column_at + c);
    step_columns<K, WARP_COLUMNS>(s, q, k, v, gate, out);
#pragma unroll
    for (uint32_t c = 0; c < WARP_COLUMNS; c++) {
        store_column(s[c], after + c * g.k_dim, lane);
        if (lane == 0) g.delta_out[head * g.v_dim + column_at + c] = out[c];
    }
}

/* A CTA of one warp is one V head; squares are added as the fused kernel and its reader do: four columns, eight of those, then
 * the 32s in order. */
__global__ void __launch_bounds__(32) norm_kernel(const __grid_constant__ spk_cuda_gdn g) {
    chain_release();
    __shared__ float fours[DIM_MAX / 4];
    const uint32_t lane = threadIdx.x, head_at = blockIdx.x * g.v_dim;
    chain_wait();
    for (uint32_t c = lane; c < g.v_dim / 4; c += 32) {
        const float4 o = load_activation4(g.delta_out + head_at + 4 * c);
        fours[c] = fmaf(o.w, o.w, fmaf(o.z, o.z, fmaf(o.y, o.y, fmaf(o.x, o.x, 0.0f))));
    }
    __syncwarp();
    float total = 0.0f;
    for (uint32_t b = 0; b < g.v_dim / COLUMNS; b++) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < COLUMNS / 4; i++) sum += fours[b * (COLUMNS / 4) + i];
        total += sum;
    }
    const float factor = rsqrtf(__fdividef(total, (float)g.v_dim) + g.eps);
    for (uint32_t i = lane; i < g.v_dim; i += 32)
        g.out[head_at + i] = __ldcg(g.delta_out + head_at + i) * g.norm_weight[i] * silu(__ldcg(g.z + head_at + i)) * factor;
}

typedef void gdn_kernel(spk_cuda_gdn);
struct kernels_of_dim { gdn_kernel *fused, *conv_norm, *l2, *delta; };
template <int K> constexpr kernels_of_dim kernels_for() { return { K <= 4 ? fused_kernel<K <= 4 ? K : 4> : nullptr, conv_norm_kernel<K>, l2_kernel<K>, delta_kernel<K> }; }
kernels_of_dim kernels_of(uint32_t k_dim) {
    switch (k_dim / 32) {
    case 1:  return kernels_for<1>();
    case 2:  return kernels_for<2>();
    case 4:  return kernels_for<4>();
    default: return kernels_for<8>();
    }
}

} // namespace
} // namespace spk

bool spk_cuda_gdn_can_fuse(uint32_t k_dim, uint32_t v_dim) { return k_dim == v_dim && k_dim <= 128; }

void spk_cuda_launch_gdn(spk_cuda *cuda, const spk_cuda_gdn *args, spk_cuda_gdn_fusion fusion) {
    using namespace spk;
    const uint32_t heads = args->v_head_count, conv_ctas = 2 * args->k_head_count + heads, delta_ctas = heads * args->v_dim / COLUMNS;
    const kernels_of_dim k = kernels_of(args->k_dim);
    if (fusion == SPK_CUDA_GDN_FUSED) {
        /* A quarter of an SM: beside a CTA of the kernel before, which takes more than half, there is room for one, not for two. */
        const uint32_t shared_bytes = (2 * args->k_dim + COLUMNS + WARPS + 2) * (uint32_t)sizeof(float);
        launch(cuda, k.fused, delta_ctas, THREADS, std::max(shared_bytes, cuda->shared_alone_bytes / 2), *args, "gdn");
        return;
    }
    if (fusion == SPK_CUDA_GDN_CONV_FUSED) {
        launch(cuda, k.conv_norm, conv_ctas, DIM_MAX, DIM_MAX * sizeof(float), *args, "gdn conv");
    } else {
        launch(cuda, conv_kernel, conv_ctas, DIM_MAX, 0, *args, "gdn conv");
        launch(cuda, k.l2, 2 * args->k_head_count, 32, 0, *args, "gdn l2 norm");
    }
    launch(cuda, k.delta, delta_ctas, THREADS, 0, *args, "gdn delta");
    launch(cuda, norm_kernel, heads, 32, 0, *args, "gdn norm");
}
