/* requant/quant_vectors_cuda.cuh - the eight lanes of quant_vectors_internal.h as eight neighbouring threads of a GPU.
 *
 * Every operation is the one that a CPU does, rounded alike (the build switches contraction off), so the bytes are the same.
 * The eight threads go through the same branches; four such groups of a warp need not.
 * The launch's dynamic shared memory begins with a spk::super_block for each group; what follows is V8_ARRAY's, a stretch of an
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
#define LANES_ONCE   if (spk::lane() == 0)

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

#define V8_ARRAY(type, name, most, used) type *const name = (type *)spk::array_at((used) * sizeof(type))

typedef float v8;
typedef bool  v8i;

/* In the tile, over its weights. */
struct v8_column {
    float *of_lane;
    __device__ __forceinline__ float &operator[](int i) const { return of_lane[i * SPK_QUANT_LANES]; }
};
LANES_INLINE void v8_column_begin(v8_column &column, const spk_quant_tile *tile) {
    column.of_lane = const_cast<float *>(&tile->x[0][spk::lane()]);
}

LANES_INLINE v8 v8_load(const float lanes[SPK_QUANT_LANES]) { return lanes[spk::lane()]; }
LANES_INLINE v8 v8_all(float f) { return f; }
LANES_INLINE v8 v8_lane(v8 v, uint32_t j) {
    return __shfl_sync(spk::group_mask(), v, threadIdx.x / SPK_QUANT_LANES * SPK_QUANT_LANES % 32 + j);
}

#define v8_less(a, b)                 ((a) < (b))
#define v8_choose(condition, yes, no) ((condition) ? (yes) : (no))
LANES_INLINE v8 v8_min(v8 a, v8 b) { return a < b ? a : b; }
LANES_INLINE v8 v8_max(v8 a, v8 b) { return a > b ? a : b; }

LANES_INLINE float v8_sum(const v8 *v) {
    float sum = 0;
    LANES_UNROLL for (uint32_t j = 0; j < SPK_QUANT_LANES; j++) sum += v8_lane(*v, j);
    return sum;
}
LANES_INLINE float v8_largest(const v8 *v) {
    float largest = v8_lane(*v, 0);
    LANES_UNROLL for (uint32_t j = 1; j < SPK_QUANT_LANES; j++) largest = v8_max(v8_lane(*v, j), largest);
    return largest;
}

LANES_INLINE void v8_store_bytes(const v8 *v, void *bytes) { ((uint8_t *)bytes)[spk::lane()] = (uint8_t)(int)*v; }

LANES_INLINE uint16_t half_bits_of(float f) { return __half_as_ushort(__float2half_rn(f)); }
LANES_INLINE float half_value_of(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
LANES_INLINE v8 v8_half_bits(const v8 *v) { return (float)half_bits_of(*v); }
LANES_INLINE v8 v8_half_values(const v8 *bits) { return half_value_of((uint16_t)*bits); }
LANES_INLINE void v8_store_halves(const v8 *v, uint16_t halves[SPK_QUANT_LANES]) { halves[spk::lane()] = half_bits_of(*v); }

#endif
