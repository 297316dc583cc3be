/* kernels/sampling.h - the arithmetic of drawing a token, shared by runtime/sample.c and sample_cuda.cu: the same operations
 * on both sides, so that for the same logits and the same state both choose the same token, bit for bit.
 *
 * A candidate's distance from the best is log2 of how much less likely it is, in fixed point with 24 bits of fraction;
 * its weight is 2^-distance, of which the best has 2^39.  A token 39 octaves below the best or more is no candidate, nor is a
 * NaN.  Order: distance ascending, ties (which have equal weights) to the lower id.  With C and W the running count and
 * weight in that order, every limit is a prefix:
 *
 *   top-k   the first k candidates; their weight is S
 *   top-p   up to the first with W >= floor(top_p * S), and at least one
 *   min-p   those whose distance is at most -log2(min_p)
 *   draw    of the shortest prefix, of weight K: the first with W > floor(u * K), u the next uniform number
 *
 * Sums are of integers, so that any order of adding gives the same; they fit 63 bits for a vocabulary of 2^24.
 * Floating point is F32, each operation rounded by itself: compile C with -ffp-contract=off.
 */
#ifndef SPK_SAMPLING_H
#define SPK_SAMPLING_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __CUDA_ARCH__
#define SPK_SAMPLING_FN __device__ __forceinline__
#define SPK_SAMPLING_MUL(a, b) __fmul_rn(a, b)
#define SPK_SAMPLING_ADD(a, b) __fadd_rn(a, b)
#elif defined __CUDACC__
#define SPK_SAMPLING_FN __host__ __device__ inline
#define SPK_SAMPLING_MUL(a, b) ((a) * (b))
#define SPK_SAMPLING_ADD(a, b) ((a) + (b))
#else
#define SPK_SAMPLING_FN static inline
#define SPK_SAMPLING_MUL(a, b) ((a) * (b))
#define SPK_SAMPLING_ADD(a, b) ((a) + (b))
#endif

enum {
    SPK_SAMPLING_OCTAVES       = 39,
    SPK_SAMPLING_FRACTION_BITS = 24,
    SPK_SAMPLING_BUCKET_BITS   = 18,        /* of a distance; a bucket is 1/64 octave wide */
    SPK_SAMPLING_BUCKETS       = SPK_SAMPLING_OCTAVES << (SPK_SAMPLING_FRACTION_BITS - SPK_SAMPLING_BUCKET_BITS)
};
#define SPK_SAMPLING_NO_CANDIDATE UINT32_MAX

/* Options in the form in which they are used. */
typedef struct {
    float    scale;              /* octaves a unit of the logits: log2(e) / temperature */
    uint32_t top_k;              /* UINT32_MAX: off */
    uint64_t top_p;              /* in 2^-64 */
    uint32_t has_top_p;
    uint32_t distance_max;       /* min-p; SPK_SAMPLING_NO_CANDIDATE: off */
    uint64_t state;              /* of the random numbers */
} spk_sampling;

/* logit may be anything; best is finite. */
SPK_SAMPLING_FN uint32_t spk_sampling_distance(float best, float logit, float scale) {
    float octaves = SPK_SAMPLING_MUL(SPK_SAMPLING_ADD(best, -logit), scale);
    bool  is_near = octaves < (float)SPK_SAMPLING_OCTAVES;       /* false for a NaN */
    int32_t fixed = (int32_t)SPK_SAMPLING_MUL(is_near ? octaves : 0.0f, (float)(1 << SPK_SAMPLING_FRACTION_BITS));
    return is_near ? (uint32_t)fixed : SPK_SAMPLING_NO_CANDIDATE;
}

/* Of a candidate's distance.  The fraction's power is a polynomial with an error below 2^-26, and 24 bits are kept of it. */
SPK_SAMPLING_FN uint64_t spk_sampling_weight(uint32_t distance) {
    float x = SPK_SAMPLING_MUL((float)(distance & ((1u << SPK_SAMPLING_FRACTION_BITS) - 1)), 0x1p-24f);
    float p = 0x1.e2025cp-14f;
    p = SPK_SAMPLING_ADD(SPK_SAMPLING_MUL(p, x), -0x1.529848p-10f);
    p = SPK_SAMPLING_ADD(SPK_SAMPLING_MUL(p, x), 0x1.3a79c4p-7f);
    p = SPK_SAMPLING_ADD(SPK_SAMPLING_MUL(p, x), -0x1.c6a652p-5f);
    p = SPK_SAMPLING_ADD(SPK_SAMPLING_MUL(p, x), 0x1.ebfba8p-3f);
    p = SPK_SAMPLING_ADD(SPK_SAMPLING_MUL(p, x), -0x1.62e430p-1f);
    p = SPK_SAMPLING_ADD(SPK_SAMPLING_MUL(p, x), 1.0f);
    uint64_t mantissa = (uint64_t)(uint32_t)SPK_SAMPLING_MUL(p, 0x1p24f);
    return (mantissa << (SPK_SAMPLING_OCTAVES - 24)) >> (distance >> SPK_SAMPLING_FRACTION_BITS);
}

/* floor(fraction * whole), fraction in 2^-64. */
SPK_SAMPLING_FN uint64_t spk_sampling_share(uint64_t fraction, uint64_t whole) {
#ifdef __CUDA_ARCH__
    return __umul64hi(fraction, whole);
#else
    return (uint64_t)((unsigned __int128)fraction * whole >> 64);
#endif
}

/* splitmix64: the next number, uniform over 64 bits. */
#define SPK_SAMPLING_STATE_STEP UINT64_C(0x9E3779B97F4A7C15)
SPK_SAMPLING_FN uint64_t spk_sampling_random(uint64_t state_after_step) {
    uint64_t z = state_after_step;
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

#endif
