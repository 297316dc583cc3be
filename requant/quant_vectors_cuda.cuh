/* requant/quant_vectors_cuda.cuh - the eight lanes of quant_vectors_internal.h as eight neighbouring threads of a GPU.
 *
 * Every operation is the one that a CPU does, rounded alike (the build switches contraction off), so the bytes are the same.
 * The eight threads go through the same branches; four such groups of a warp need not.
 * The launch's dynamic shared memory begins with a spk::super_block for each group; what follows is VEC_ARRAY's, a stretch of an
 * odd number of words for each thread, so that the same element of all threads lies in different banks.
 */
#ifndef SPK_QUANT_VECTORS_CUDA_CUH
#define SPK_QUANT_VECTORS_CUDA_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include "kernels/ptx_cuda.cuh"

#define SPK_LANES_NAME(name) name##_cuda
#define LANES_INLINE static __device__ __forceinline__
#define LANES_ENTRY  static __device__ __forceinline__
#define LANES_TABLE  static __device__ const
#define LANES_UNROLL _Pragma("unroll")

namespace spk {

enum { QUANT_THREADS = 32, QUANT_GROUPS = QUANT_THREADS / SPK_QUANT_LANES };     /* of a CTA */

/* What a group shares.  The block is made where the weights were. */
struct super_block {
    union {
        spk_quant_tile tile;
        uint8_t        block[SPK_QUANT_BLOCK_BYTES_MAX];
    };
    union {
        spk_quant_affine_fit affine;
        spk_quant_q6_fit     q6;
        spk_quant_q8_fit     q8;
        uint32_t             words[80];    /* so many that the groups of a warp use different banks */
    };
};
static_assert(sizeof(super_block) / 4 % 16 == 8, "eight banks further, or 24");

__device__ __forceinline__ uint32_t lane() { return threadIdx.x % SPK_QUANT_LANES; }
__device__ __forceinline__ uint32_t group_mask() { return 0xffu << (threadIdx.x / SPK_QUANT_LANES * SPK_QUANT_LANES); }

/* Words of an array for one thread. */
__host__ __device__ constexpr uint32_t array_words(size_t size_bytes) { return (uint32_t)(size_bytes / sizeof(float)) | 1; }

__device__ __forceinline__ float *array_at(size_t size_bytes) {
    return (float *)(ptx::dynamic_shared() + QUANT_GROUPS * sizeof(super_block)) + threadIdx.x * array_words(size_bytes);
}

} // namespace spk

#define VEC_ARRAY(type, name, most, used) type *const name = (type *)spk::array_at((used) * sizeof(type))

enum { LANES_TILES = 1 };
typedef float vec;
typedef bool  vec_mask;

/* In the tile, over its weights. */
struct vec_column {
    float *of_lane;
    __device__ __forceinline__ float &operator[](int i) const { return of_lane[i * SPK_QUANT_LANES]; }
};
LANES_INLINE void vec_column_begin(vec_column &column, const spk_quant_tile *const tiles[]) {
    column.of_lane = const_cast<float *>(&tiles[0]->x[0][spk::lane()]);
}

LANES_INLINE vec vec_weights(const spk_quant_tile *const tiles[], int i) { return tiles[0]->x[i][spk::lane()]; }
LANES_INLINE vec vec_importance(const spk_quant_tile *const tiles[], int i) { return tiles[0]->w[i][spk::lane()]; }
LANES_INLINE vec vec_all(float f) { return f; }
LANES_INLINE vec vec_of_tiles(const float numbers[LANES_TILES]) { return numbers[0]; }
#define vec_of_tile(v, tile) (v)
LANES_INLINE vec vec_lane(vec v, uint32_t j) {
    return __shfl_sync(spk::group_mask(), v, threadIdx.x / SPK_QUANT_LANES * SPK_QUANT_LANES % 32 + j);
}

#define vec_less(a, b)                 ((a) < (b))
#define vec_choose(condition, yes, no) ((condition) ? (yes) : (no))
#define vec_both(a, b)                 ((a) && (b))
#define vec_not(mask)                  (!(mask))
#define vec_any(mask)                  (mask)      /* in the thread: of what a tile's lanes share, or to save what changes nothing */
#define vec_any_lane(mask)             ((__ballot_sync(spk::group_mask(), (mask)) & spk::group_mask()) != 0)
LANES_INLINE vec vec_min(vec a, vec b) { return a < b ? a : b; }
LANES_INLINE vec vec_max(vec a, vec b) { return a > b ? a : b; }

LANES_INLINE vec vec_sum(const vec *v) {
    float sum = vec_lane(*v, 0);
    LANES_UNROLL for (uint32_t j = 1; j < SPK_QUANT_LANES; j++) sum += vec_lane(*v, j);
    return sum;
}
LANES_INLINE vec vec_largest(const vec *v) {
    float largest = vec_lane(*v, 0);
    LANES_UNROLL for (uint32_t j = 1; j < SPK_QUANT_LANES; j++) largest = vec_max(vec_lane(*v, j), largest);
    return largest;
}
LANES_INLINE void vec_add_products(const vec *a, const vec *b, double sums[LANES_TILES]) {
    LANES_UNROLL for (uint32_t j = 0; j < SPK_QUANT_LANES; j++) sums[0] += (double)vec_lane(*a, j) * (double)vec_lane(*b, j);
}

#define vec_store_bytes(v, out, field)  ((uint8_t *)(out)[0]->field)[spk::lane()] = (uint8_t)(int)(v)
#define vec_store_halves(v, out, field) (out)[0]->field[spk::lane()] = __half_as_ushort(__float2half_rn(v))
#define vec_store_half(v, out, field)   if (spk::lane() == 0) (out)[0]->field = __half_as_ushort(__float2half_rn(v))

LANES_INLINE vec vec_half_bits(const vec *v) { return (float)__half_as_ushort(__float2half_rn(*v)); }
LANES_INLINE vec vec_half_values(const vec *bits) { return __half2float(__ushort_as_half((uint16_t)*bits)); }
LANES_INLINE vec vec_half_round(const vec *v) { return __half2float(__float2half_rn(*v)); }

#endif
