/* kernels/select_cuda.cuh - the top experts of a token, by one CTA that needs them.
 *
 * Order: value descending, ties to the lower index.  Two rounds, each over keys that nothing else has:
 *   1. a warp takes 32 logits and ranks them among themselves; its best min(k, 32) become candidates
 *   2. four lanes take a candidate and count the larger candidates, each in a quarter of the groups; a count below k is a rank
 * No round waits for the one before it as k rounds of a maximum would.  A NaN is as large as its bits are.
 */
#ifndef SPK_SELECT_CUDA_CUH
#define SPK_SELECT_CUDA_CUH

#include "kernels/device_cuda.cuh"

namespace spk {

constexpr uint32_t USED_MAX = 64, EXPERTS_MAX = 1024;

struct chosen_experts {
    uint32_t choice[USED_MAX];
    float    logit[USED_MAX], weight[USED_MAX];
};

/* Bytes of candidate keys in shared memory. */
__host__ __device__ constexpr uint32_t select_bytes(uint32_t expert_count, uint32_t used_count) {
    return (expert_count + 31) / 32 * (used_count < 32 ? used_count : 32) * 8;
}

/* How many of the warp's 32 values are larger than the lane's, or equal and in a lower lane.  x ^ o is lower than x exactly if
 * x has the top bit of o. */
__device__ __forceinline__ uint32_t rank_in_warp(uint32_t bits, uint32_t lane) {
    uint32_t rank = 0;
#pragma unroll
    for (int o = 1; o < 32; o++) {
        const uint32_t top = o >= 16 ? 4 : o >= 8 ? 3 : o >= 4 ? 2 : o >= 2 ? 1 : 0;
        rank += __shfl_xor_sync(FULL, bits, o) + ((lane >> top) & 1u) > bits ? 1 : 0;
    }
    return rank;
}

/* All threads of the CTA; keys has select_bytes.  Ends with a barrier. */
__device__ __forceinline__ void select_top(const float *logits, uint32_t n, uint32_t k, unsigned long long *keys, chosen_experts &out) {
    const uint32_t lane = threadIdx.x & 31, groups = (n + 31) / 32, length = k < 32 ? k : 32, count = groups * length;
    for (uint32_t g = threadIdx.x >> 5; g < groups; g += blockDim.x >> 5) {
        const uint32_t index = 32 * g + lane;
        const uint32_t bits = index < n ? order_bits(__ldcg(logits + index) + 0.0f) : 0;      /* -0 ties with +0 */
        const uint32_t rank = rank_in_warp(bits, lane);
        if (rank < length) keys[g * length + rank] = index < n ? (unsigned long long)bits << 32 | (0xffffffffu - index) : 0;
    }
    __syncthreads();
    const uint32_t quarter = threadIdx.x & 3;
    for (uint32_t base = 0; base < count; base += blockDim.x / 4) {
        const uint32_t at = base + threadIdx.x / 4;
        const unsigned long long key = at < count ? keys[at] : 0;
        uint32_t larger = 0;
        for (uint32_t g = quarter; g < groups; g += 4)
#pragma unroll 8
            for (uint32_t i = 0; i < length; i++) larger += keys[g * length + i] > key ? 1 : 0;
        larger += __shfl_xor_sync(FULL, larger, 1);
        larger += __shfl_xor_sync(FULL, larger, 2);
        if (quarter == 0 && key != 0 && larger < k) {
            out.choice[larger] = 0xffffffffu - (uint32_t)key;
            out.logit[larger] = order_value((uint32_t)(key >> 32));
        }
    }
    __syncthreads();
}

/* Softmax over the chosen; one warp. */
__device__ __forceinline__ void weigh_chosen(uint32_t k, chosen_experts &c) {
    const uint32_t lane = threadIdx.x & 31;
    const float top = c.logit[0];
    const float e0 = lane < k ? expf(c.logit[lane] - top) : 0.0f, e1 = lane + 32 < k ? expf(c.logit[lane + 32] - top) : 0.0f;
    const float sum = warp_sum(e0 + e1);
    if (lane < k) c.weight[lane] = e0 / sum;
    if (lane + 32 < k) c.weight[lane + 32] = e1 / sum;
    __syncwarp();
}

/* The same choice by one warp for itself, without a barrier, one expert after another, of at most WARP_EXPERTS_MAX and
 * WARP_USED_MAX: lane l holds logits 8 l .. 8 l + 7, and rank r's answer ends in lane r. */
constexpr uint32_t WARP_EXPERTS_MAX = 256, WARP_USED_MAX = 32;
struct warp_choice {
    uint32_t bits[8];                    /* 0: none, or taken */
    uint32_t found, index, value_bits;   /* found: how many so far */
    __device__ __forceinline__ void load(const float *logits, uint32_t n) {
        const uint32_t at = 8 * (threadIdx.x & 31);
        found = index = value_bits = 0;
        float value[8];                  /* all asked for before any is used, whatever n is */
#pragma unroll
        for (int i = 0; i < 8; i++) value[i] = __ldcg(logits + min(at + i, n - 1));
#pragma unroll
        for (int i = 0; i < 8; i++) bits[i] = at + i < n ? max(order_bits(value[i] + 0.0f), 1u) : 0;
    }
    __device__ __forceinline__ void find_next() {
        const uint32_t lane = threadIdx.x & 31;
        uint32_t best = 0, hits = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) best = max(best, bits[i]);
        const uint32_t top = __reduce_max_sync(FULL, best), winner = __ffs(__ballot_sync(FULL, best == top)) - 1;
#pragma unroll
        for (int i = 0; i < 8; i++) hits |= (bits[i] == top) << i;
        const uint32_t mine = __ffs(hits) - 1;
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (lane == winner && mine == i) bits[i] = 0;
        const uint32_t at = 8 * winner + __shfl_sync(FULL, mine, winner);
        if (lane == found) {
            index = at;
            value_bits = top;
        }
        found++;
    }
    __device__ __forceinline__ uint32_t of_rank(uint32_t rank) {
        while (found <= rank) find_next();
        return __shfl_sync(FULL, index, rank);
    }
    /* Softmax over the first k, all of them found: in lane r that of rank r. */
    __device__ __forceinline__ float weight(uint32_t k) const {
        const uint32_t lane = threadIdx.x & 31;
        const float top = __shfl_sync(FULL, order_value(value_bits), 0), e = lane < k ? expf(order_value(value_bits) - top) : 0.0f;
        return e / warp_sum(e);
    }
};

} // namespace spk

#endif
