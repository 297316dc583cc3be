/* kernels/held_cuda.cuh - tiles held in registers, and the input vector prepared in one pass of the CTA.
 *
 * A kernel that holds its weights has asked for them before its input is there, keeps them where no barrier and no second
 * trip through shared memory is needed, and leaves its successor's CTA room on the SM.  It is for rows that are one tile
 * wide and fit a few to a warp; everything else is streamed (ring_cuda.cuh).  Sums are made in the same order: same bits.
 */
#ifndef SPK_HELD_CUDA_CUH
#define SPK_HELD_CUDA_CUH

#include "kernels/tile_cuda.cuh"

namespace spk {

/* ---- Tiles ---- */

constexpr uint32_t Q4_K = 1u << SPK_TYPE_Q4_K, Q5_K = 1u << SPK_TYPE_Q5_K, Q6_K = 1u << SPK_TYPE_Q6_K, Q8_0 = 1u << SPK_TYPE_Q8_0;
__host__ __device__ constexpr int planes_of(uint32_t type) {
    return type == SPK_TYPE_Q4_K ? 9 : type == SPK_TYPE_Q5_K ? 11 : type == SPK_TYPE_Q6_K ? 13 : 17;
}
__host__ __device__ constexpr int planes_max(uint32_t types) { return types & Q8_0 ? 17 : types & Q6_K ? 13 : types & Q5_K ? 11 : 9; }

/* A lane's share of a tile of one of TYPES, a set; where that is a single one, `type` is not looked at. */
template <uint32_t TYPES> struct held_tile {
    static constexpr int UNROLL = 8;     /* registers have no index: loops over planes are unrolled whole */
    uint4    planes[planes_max(TYPES)];
    uint16_t end;
    __device__ __forceinline__ uint4 plane(int index) const { return planes[index]; }
    __device__ __forceinline__ uint16_t tail() const { return end; }
    __device__ __forceinline__ static bool is(uint32_t which, uint32_t type) {
        return (TYPES & 1u << which) != 0 && (TYPES == 1u << which || type == which);
    }
    __device__ __forceinline__ static int plane_count(uint32_t type) {
        return is(SPK_TYPE_Q4_K, type) ? 9 : is(SPK_TYPE_Q5_K, type) ? 11 : is(SPK_TYPE_Q6_K, type) ? 13 : 17;
    }
    __device__ __forceinline__ void load(uint32_t type, const uint8_t *tile, uint32_t lane) {
#pragma unroll
        for (int i = 0; i < planes_max(TYPES); i++)
            if (i < plane_count(type)) planes[i] = __ldcs((const uint4 *)(tile + 512 * i + 16 * lane));
        if (is(SPK_TYPE_Q6_K, type)) end = __ldcs((const uint16_t *)(tile + Q6_K_TAIL + 2 * lane));
    }
    /* From shared memory, where it lies as in memory. */
    __device__ __forceinline__ void take(const uint8_t *tile, uint32_t lane) {
        const shared_tile from = { tile, lane };
#pragma unroll
        for (int i = 0; i < planes_max(TYPES); i++) planes[i] = from.plane(i);
        if (TYPES & Q6_K) end = from.tail();
    }
    template <bool REST> __device__ __forceinline__ float dot(uint32_t type, const input_vector &v, uint32_t kb) const {
        const held_tile one[1] = { *this };
        float sum = 0.0f;
        if (is(SPK_TYPE_Q4_K, type)) dot_q45_k<1, REST, false>(one, v, kb, &sum);
        else if (is(SPK_TYPE_Q5_K, type)) dot_q45_k<1, REST, true>(one, v, kb, &sum);
        else if (is(SPK_TYPE_Q6_K, type)) sum = dot_q6_k<REST>(*this, v, kb);
        else if (is(SPK_TYPE_Q8_0, type)) sum = dot_q8_0<REST>(*this, v, kb);
        return sum;
    }
};

/* Sum over LANES neighbouring lanes, in the order of lanes_sum. */
template <uint32_t LANES> __device__ __forceinline__ float lanes_sum_of(float v) {
#pragma unroll
    for (uint32_t o = LANES >> 1; o > 0; o >>= 1) v += __shfl_xor_sync(FULL, v, o);
    return v;
}

/* ---- The input ---- */

/* Eight values of a row of floats of any type. */
__device__ __forceinline__ eight load_float_eight(const uint8_t *row, uint32_t type, uint32_t at) {
    if (type == SPK_TYPE_F32) {
        const float4 *const from = (const float4 *)(row + 4 * at);
        return { __ldcs(from), __ldcs(from + 1) };
    }
    const uint4 raw = __ldcs((const uint4 *)(row + 2 * at));
    const uint32_t words[4] = { raw.x, raw.y, raw.z, raw.w };
    eight value;
#pragma unroll
    for (int i = 0; i < 4; i++)
        ((float2 *)&value)[i] = type == SPK_TYPE_BF16 ? make_float2(__uint_as_float(words[i] << 16), __uint_as_float(words[i] & 0xffff0000u))
                                                      : __half22float2(*(const __half2 *)&words[i]);
    return value;
}

/* A thread's share of a source; what every source has is asked for at once, of all shares before any is used. */
struct source_eight {
    eight value;
    float sums[4];                       /* of the head's squares */
    __device__ __forceinline__ void ask(const spk_cuda_source &s, uint32_t at) {
        value = load_eight(s.x + at);
        if (s.squares != nullptr) load_head(s, at, sums);
    }
    __device__ __forceinline__ void add(const spk_cuda_source &s, uint32_t at) {
        if (s.add[0] == nullptr) return;
        const eight first = load_eight(s.add[0] + at), second = s.add[1] != nullptr ? load_eight(s.add[1] + at) : zero_eight();
        value.add(first);
        if (s.add[1] != nullptr) value.add(second);
        if (s.add[2] != nullptr) value.add(load_eight(s.add[2] + at));
    }
};

/* What prepare_input makes of a vector of COUNT values, in one pass: a thread has EIGHTS times eight of them, and as many of
 * RIDERS rows of floats.  norm: the thread's norm weights, where the source has any.  The products with riders are left in
 * v.chunk_sums.  At least COUNT / 8 / EIGHTS threads, all of the CTA; ends with a barrier. */
template <uint32_t COUNT, int EIGHTS, int RIDERS>
__device__ __forceinline__ float prepare_held(const spk_cuda_source &s, const input_vector &v, const eight *norm, const eight *riders, bool writer) {
    static_assert(RIDERS == 0 || EIGHTS == 1, "riders");
    constexpr uint32_t ROUND = COUNT / EIGHTS;
    const uint32_t at0 = threadIdx.x * 8, lane = threadIdx.x & 31;
    const bool has_norm = s.norm_weight != nullptr;
    const float given = s.factor != nullptr ? __ldcg(s.factor) : 1.0f;
    if (at0 < ROUND) {
        source_eight own[EIGHTS];
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) own[e].ask(s, at0 + e * ROUND);
#pragma unroll
        for (int e = 0; e < EIGHTS; e++) {
            const uint32_t at = at0 + e * ROUND;
            eight &value = own[e].value;
            own[e].add(s, at);
            if (writer && s.x_out != nullptr) value.store(s.x_out + at);
            if (s.squares != nullptr) scale_eight(value, head_factor_of(s, own[e].sums));
            if (has_norm) {
                const float squares = norm_eight(value, norm[e]);
                if (lane == 0) v.chunk_sums[at / 256] = squares;
            }
#pragma unroll
            for (int r = 0; r < RIDERS; r++) {
                const float *const w = (const float *)&riders[r], *const x = (const float *)&value;
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; i++) sum = fmaf(w[i], x[i], sum);
                sum = warp_sum(sum);
                if (lane == 0) v.chunk_sums[(r + 1) * v.k + at / 256] = sum;
            }
            quantize_eight(v, at / 256, lane, value);
        }
    }
    __syncthreads();
    if (!has_norm) return given;
    return rsqrtf(__fdividef(sum_chunks(v.chunk_sums, v.k), (float)COUNT) + s.eps);
}

} // namespace spk

#endif
