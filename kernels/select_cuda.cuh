/* kernels/select_cuda.cuh - the top experts of a token, by one CTA that needs them.
 *
 * Order: value descending, ties to the lower index.  Two rounds, each over keys that nothing else has:
 *   1. a warp takes 32 logits and ranks them among themselves; its best min(k, 32) become candidates
 *   2. four lanes take a candidate and count the larger candidates, each in a quarter of the groups; a count below k is a rank
 * No round waits for the one before it as k rounds of a maximum would.  A NaN is as large as its bits are.
 */
#ifndef SPK_SELECT_CUDA_CUH
#define SPK_SELECT_CUDA_CUH

#include "kernels/router_cuda.cuh"

namespace spk {

constexpr uint32_t USED_MAX = 64, EXPERTS_MAX = 1024;

struct chosen_experts {
    uint32_t choice[USED_MAX];
    float    value[USED_MAX], weight[USED_MAX];
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
__device__ __forceinline__ void select_top(const spk_cuda_routing &a, unsigned long long *keys, chosen_experts &out) {
    const uint32_t n = a.expert_count, k = a.used_count, lane = threadIdx.x & 31, groups = (n + 31) / 32, length = k < 32 ? k : 32, count = groups * length;
    for (uint32_t g = threadIdx.x >> 5; g < groups; g += blockDim.x >> 5) {
        const uint32_t index = 32 * g + lane;
        const uint32_t bits = index < n ? order_bits(router_value(a, index)) : 0;
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
            out.value[larger] = order_value((uint32_t)(key >> 32));
        }
    }
    __syncthreads();
}

/* Softmax over the chosen; one warp. */
__device__ __forceinline__ void weigh_chosen(uint32_t k, float scale, chosen_experts &c) {
    const uint32_t lane = threadIdx.x & 31;
    const float top = c.value[0];
    const float e0 = lane < k ? expf((c.value[lane] - top) * scale) : 0.0f, e1 = lane + 32 < k ? expf((c.value[lane + 32] - top) * scale) : 0.0f;
    const float sum = warp_sum(e0 + e1);
    if (lane < k) c.weight[lane] = e0 / sum;
    if (lane + 32 < k) c.weight[lane + 32] = e1 / sum;
    __syncwarp();
}

/* The choice, made from logits or read; ends with a barrier.  Weights are there for the warp that says so. */
__device__ __forceinline__ void route(const spk_cuda_routing &a, unsigned long long *keys, chosen_experts &chosen, bool weighs) {
    const uint32_t lane = threadIdx.x & 31;
    if (a.choice == nullptr) {
        select_top(a, keys, chosen);
        if (weighs) weigh_chosen(a.used_count, router_scale(a), chosen);
        return;
    }
    for (uint32_t r = threadIdx.x; r < a.used_count; r += blockDim.x) chosen.choice[r] = __ldcg(a.choice + r);
    for (uint32_t r = lane; weighs && r < a.used_count; r += 32) chosen.weight[r] = __ldcg(a.weight + r);
    __syncthreads();
}

/* The same choice by one warp for itself, one expert after another, of at most WARP_EXPERTS_MAX and WARP_USED_MAX: lane l holds
 * logits 8 l .. 8 l + 7, and lane r the value of rank r.  The CTA fetches the logits once, into WARP_EXPERTS_MAX keys in shared memory: if
 * every warp of the GPU did, it would wait for the few slices of L2 that have them (NOTES.md #19). */
constexpr uint32_t WARP_EXPERTS_MAX = 256, WARP_USED_MAX = 32, WARP_KEYS_BYTES = WARP_EXPERTS_MAX * sizeof(uint32_t);
/* A key of 0 is none. */
__device__ __forceinline__ uint32_t key_of(const spk_cuda_routing &a, uint32_t i) { return i < a.expert_count ? order_bits(router_value(a, i)) : 0; }
struct warp_choice {
    uint32_t keys[8], left[8];           /* left: the same in descending order, without those that were found */
    uint32_t found, last, value_bits;    /* found: how many so far; last: the last of them whose rank was asked for */

    __device__ __forceinline__ void load(const uint32_t *from) {
        found = last = value_bits = 0;
        const uint4 low = *(const uint4 *)(from + 8 * (threadIdx.x & 31)), high = *(const uint4 *)(from + 8 * (threadIdx.x & 31) + 4);
        keys[0] = low.x; keys[1] = low.y; keys[2] = low.z; keys[3] = low.w;
        keys[4] = high.x; keys[5] = high.y; keys[6] = high.z; keys[7] = high.w;
#pragma unroll
        for (int i = 0; i < 8; i++) left[i] = keys[i];
        /* Batcher's network for 8. */
        order(0, 1); order(2, 3); order(4, 5); order(6, 7);
        order(0, 2); order(1, 3); order(4, 6); order(5, 7);
        order(1, 2); order(5, 6);
        order(0, 4); order(1, 5); order(2, 6); order(3, 7);
        order(2, 4); order(3, 5);
        order(1, 2); order(3, 4); order(5, 6);
    }
    __device__ __forceinline__ void order(int i, int j) {
        const uint32_t larger = max(left[i], left[j]);
        left[j] = min(left[i], left[j]);
        left[i] = larger;
    }
    /* The next one's key and the lane that has it. */
    __device__ __forceinline__ uint32_t top_key(uint32_t &winner) const {
        const uint32_t top = __reduce_max_sync(FULL, left[0]);
        winner = __ffs(__ballot_sync(FULL, left[0] == top)) - 1;
        return top;
    }
    __device__ __forceinline__ void pop(uint32_t top, uint32_t winner) {
        const uint32_t lane = threadIdx.x & 31;
        const bool is_mine = lane == winner;
#pragma unroll
        for (int i = 0; i < 7; i++) left[i] = is_mine ? left[i + 1] : left[i];
        if (is_mine) left[7] = 0;
        if (lane == found) value_bits = top;
        found++;
    }
    /* Ranks in ascending order. */
    __device__ __forceinline__ uint32_t of_rank(uint32_t rank) {
        uint32_t winner, top;
        if (found > rank) return last;
        while (found < rank) {
            top = top_key(winner);
            pop(top, winner);
        }
        top = top_key(winner);
        /* Of the lane's equal keys the first that was not found yet. */
        uint32_t equal = 0, skipped = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            equal |= (keys[i] == top) << i;
            skipped += (keys[i] == top) - (left[i] == top);
        }
        for (; skipped > 0 && (threadIdx.x & 31) == winner; skipped--) equal &= equal - 1;
        pop(top, winner);
        return last = 8 * winner + __shfl_sync(FULL, __ffs(equal) - 1, winner);
    }
    /* Softmax over the first k, in lane r that of rank r. */
    __device__ __forceinline__ float weigh(uint32_t k, float scale) {
        while (found < k) {
            uint32_t winner;
            const uint32_t top = top_key(winner);
            pop(top, winner);
        }
        const uint32_t lane = threadIdx.x & 31;
        const float top = __shfl_sync(FULL, order_value(value_bits), 0), e = lane < k ? expf((order_value(value_bits) - top) * scale) : 0.0f;
        return e / warp_sum(e);
    }
};
/* Ranks as a warp learns them: found, or read.  Ranks in ascending order. */
struct routed_warp {
    const spk_cuda_routing &a;
    warp_choice             made;
    /* All threads; keys has WARP_KEYS_BYTES, 16-byte aligned.  Ends with a barrier where this warp selects. */
    __device__ __forceinline__ void fetch(uint32_t *keys) {
        if (a.choice != nullptr) return;
        for (uint32_t i = threadIdx.x; i < WARP_EXPERTS_MAX; i += blockDim.x) keys[i] = key_of(a, i);
        __syncthreads();
        made.load(keys);
    }
    /* The same in two steps, by at least WARP_EXPERTS_MAX threads: loads that are needed later may be issued between them. */
    __device__ __forceinline__ uint32_t ask() const { return a.choice == nullptr && threadIdx.x < WARP_EXPERTS_MAX ? key_of(a, threadIdx.x) : 0; }
    __device__ __forceinline__ void fetch(uint32_t *keys, uint32_t own_key) {
        if (a.choice != nullptr) return;
        if (threadIdx.x < WARP_EXPERTS_MAX) keys[threadIdx.x] = own_key;
        __syncthreads();
        made.load(keys);
    }
    __device__ __forceinline__ uint32_t of_rank(uint32_t rank) { return a.choice == nullptr ? made.of_rank(rank) : __ldcg(a.choice + rank); }
    __device__ __forceinline__ float weight_of(uint32_t rank, const float *scale) {      /* of router_scale; read where this warp selects */
        return a.choice == nullptr ? __shfl_sync(FULL, made.weigh(a.used_count, *scale), rank) : __ldcg(a.weight + rank);
    }
};
inline bool warp_can_select(const spk_cuda_routing &r) { return r.choice != nullptr || (r.expert_count <= WARP_EXPERTS_MAX && r.used_count <= WARP_USED_MAX); }

} // namespace spk

#endif
