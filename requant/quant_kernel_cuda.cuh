/* requant/quant_kernel_cuda.cuh - what the kernels of the quantizers share: a super-block comes in, is searched, goes out.
 *
 * Eight threads have a super-block, a CTA is one warp.  Includes the vectors, so a *_cuda.cu file includes this before the
 * search that it compiles.
 */
#ifndef SPK_QUANT_KERNEL_CUDA_CUH
#define SPK_QUANT_KERNEL_CUDA_CUH

#define SPK_LANES_CUDA
#include <cuda_runtime.h>
#include <math.h>

extern "C" {
#include "requant/quant_internal.h"
}
#include "requant/quant_blocks_internal.h"
#include "requant/quant_vectors_internal.h"

namespace spk {

struct quant_args {
    const float *weights, *importance;     /* [row][col_count], [col_count] or NULL */
    uint8_t     *blocks, *exact;           /* exact[tile]: 1 where the CPU may find that no search was needed */
    double       importance_scale;
    uint32_t     tile_count, row_tiles;    /* of all rows, of one */
    uint32_t     type, col_count, row_bytes, tile_bytes, block_weights;
    spk_quant_shape  shape;
    spk_quant_effort effort;
};

/* Bytes of dynamic shared memory of a CTA whose threads have an array of so many bytes each. */
constexpr uint32_t quant_shared_bytes(size_t array_bytes) {
    return (uint32_t)(QUANT_GROUPS * sizeof(super_block) + QUANT_THREADS * array_words(array_bytes) * sizeof(float));
}

/* One group's work.  Groups past the last tile do the last one again, and keep it to themselves. */
struct quant_work {
    super_block *own;
    uint32_t     tile, row, col, col_count;
    bool         is_mine, is_filled;       /* is_filled: not all weights are 0 */
};

__device__ __forceinline__ bool all_lanes(bool is_true) {
    return (__ballot_sync(group_mask(), is_true) & group_mask()) == group_mask();
}

/* Where weight c of a tile lies in it, in words. */
__device__ __forceinline__ uint32_t place_of(const quant_args &args, uint32_t c) {
    const uint32_t weights = args.shape.sub_block_weights, sub_block = c / weights;
    return (sub_block / SPK_QUANT_LANES * weights + c % weights) * SPK_QUANT_LANES + sub_block % SPK_QUANT_LANES;
}

__device__ __forceinline__ quant_work begin_tile(const quant_args &args) {
    const uint32_t wanted = blockIdx.x * QUANT_GROUPS + threadIdx.x / SPK_QUANT_LANES;
    quant_work w;
    w.own = (super_block *)ptx::dynamic_shared() + threadIdx.x / SPK_QUANT_LANES;
    w.is_mine = wanted < args.tile_count;
    w.tile = w.is_mine ? wanted : args.tile_count - 1;
    w.row = w.tile / args.row_tiles;
    w.col = w.tile % args.row_tiles * SPK_SUPERBLOCK;
    w.col_count = min(args.col_count - w.col, (uint32_t)SPK_SUPERBLOCK);
    const float *from = args.weights + (uint64_t)w.row * args.col_count + w.col;
    float *x = &w.own->tile.x[0][0], *importance = &w.own->tile.w[0][0];
    bool is_zero = true;
    for (uint32_t c = 4 * lane(); c < SPK_SUPERBLOCK; c += 4 * SPK_QUANT_LANES) {
        float v[4] = { 0, 0, 0, 0 };
        if (c < w.col_count) {
            const float4 four = *(const float4 *)(from + c);
            v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
        }
        LANES_UNROLL for (uint32_t k = 0; k < 4; k++) {
            const float clipped = spk_quant_clip(v[k], args.shape.low, args.shape.high);
            is_zero = is_zero && clipped == 0;
            x[place_of(args, c + k)] = clipped;
        }
        if (args.importance == nullptr) continue;
        LANES_UNROLL for (uint32_t k = 0; k < 4; k++)
            importance[place_of(args, c + k)] =
                c < w.col_count ? spk_quant_scaled_importance(args.importance[w.col + c + k], args.importance_scale) : 1.0f;
    }
    if (lane() == 0) w.own->tile.weighted = args.importance != nullptr;
    w.is_filled = !all_lanes(is_zero);
    __syncwarp();
    return w;
}

/* The fit of a tile of zeros; packed, that is what quant.c writes. */
__device__ __forceinline__ void make_zeros(const quant_work &w) {
    for (uint32_t i = lane(); i < sizeof w.own->words / sizeof *w.own->words; i += SPK_QUANT_LANES) w.own->words[i] = 0;
}

/* The packed block goes out.  Blocks have an even size. */
__device__ __forceinline__ void end_tile(const quant_args &args, const quant_work &w, bool may_be_exact) {
    const uint32_t size_bytes = w.col_count / args.block_weights * (args.tile_bytes / (SPK_SUPERBLOCK / args.block_weights));
    uint16_t *to = (uint16_t *)(args.blocks + (uint64_t)w.row * args.row_bytes + w.col / SPK_SUPERBLOCK * args.tile_bytes);
    const uint16_t *from = (const uint16_t *)w.own->block;
    __syncwarp();
    for (uint32_t i = lane(); i < size_bytes / 2 && w.is_mine; i += SPK_QUANT_LANES) to[i] = from[i];
    if (lane() == 0 && w.is_mine) args.exact[w.tile] = may_be_exact;
}

/* A kernel's launch, and what it takes at most. */
struct quant_kernel {
    void   (*function)(quant_args);
    uint32_t (*shared_bytes)(spk_quant_effort effort);
};
extern const quant_kernel quant_affine, quant_q6, quant_q8;

} // namespace spk

#endif
