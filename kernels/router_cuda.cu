/* kernels/router_cuda.cu - a router's weights as decode wants them, and its sums by a kernel of its own, where no output projection
 * makes them.
 *
 * Maths      router_cuda.cuh
 * Bytes      Qwen3.6: 257 rows of 2048 F32, 2.1 MB
 * Launch     a CTA takes 16 columns, a thread a row of them
 * Reference  spk_kernels.matmul within the error of router_cuda.cuh
 */
#include "kernels/backend_cuda.cuh"
#include "kernels/held_cuda.cuh"
#include "kernels/router_cuda.cuh"

namespace spk {
namespace {

constexpr uint32_t THREADS = 256;

__global__ void __launch_bounds__(THREADS) arrange_kernel(const __grid_constant__ spk_cuda_router_source a) {
    chain_release();
    chain_wait();
    const uint32_t columns = (uint32_t)a.experts.col_count, expert_count = (uint32_t)a.experts.row_count;
    const uint32_t row_count = expert_count + (a.shared.data != nullptr), at = (blockIdx.x * THREADS + threadIdx.x) * 8, row = at / columns, column = at % columns;
    if (row >= row_count) return;
    const spk_matrix &w = row < expert_count ? a.experts : a.shared;
    eight weights = load_float_eight(w.data + (row < expert_count ? row : 0) * w.unit_stride_bytes, w.type, column);
    scale_by(weights, load_eight(a.norm_weight + column));
    float4 *const to = (float4 *)a.out + column / 4 * row_count + row;
    to[0] = weights.low;
    to[row_count] = weights.high;
}

struct router_args {
    spk_cuda_router router;
    const float    *x;
};
__global__ void __launch_bounds__(THREADS) router_kernel(const __grid_constant__ router_args a) {
    chain_release();
    chain_wait();
    const uint32_t group = blockIdx.x;
    const float4 *const weights = (const float4 *)a.router.weights + group * 4 * a.router.row_count;
    float4 x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = load_activation4(a.x + group * ROUTER_GROUP + 4 * i);
    for (uint32_t row = threadIdx.x; row < a.router.row_count; row += THREADS) router_add(a.router, row, weights, x);
    if (threadIdx.x == 0) router_square(a.router, group, x);
}

} // namespace
} // namespace spk

void spk_cuda_launch_router_source(spk_cuda *cuda, const spk_cuda_router_source *args) {
    const uint64_t eights = (args->experts.row_count + (args->shared.data != nullptr)) * args->experts.col_count / 8;
    spk::launch(cuda, spk::arrange_kernel, (uint32_t)((eights + spk::THREADS - 1) / spk::THREADS), spk::THREADS, 0, *args, "router's weights");
}

void spk_cuda_launch_router(spk_cuda *cuda, const spk_cuda_router *args, const float *x) {
    spk::launch(cuda, spk::router_kernel, args->column_count / spk::ROUTER_GROUP, spk::THREADS, 0, spk::router_args{ *args, x }, "router");
}
