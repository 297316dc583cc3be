/* kernels/attention_cuda.cuh - what a CTA of attention works with: its task, its shared memory, its way through the cache, and
 * the new token's q, k and v.  See attention_cuda.cu.
 */
#ifndef SPK_ATTENTION_CUDA_CUH
#define SPK_ATTENTION_CUDA_CUH

#include "kernels/attention_cache_cuda.cuh"
#include "kernels/input_cuda.cuh"
#include "kernels/ring_cuda.cuh"

namespace spk {

constexpr uint32_t WARPS = 8, THREADS = 32 * WARPS, HEADS = 8, ROUND = 16 * WARPS;
constexpr uint32_t SPLIT_UNIT = 32, SPLITS_MAX = 256, SOLO_POSITIONS = 2 * ROUND;

/* CTAs that share the dimensions of V, where each has all scores of its positions. */
__host__ __device__ constexpr uint32_t slices_of(uint32_t dim) { return dim > 128 ? 2 : 1; }

struct attention_args {
    spk_cuda_attention a;
    uint32_t split_count, group_count, group_heads, stage_count;
};

/* What a CTA has to do. */
struct task {
    uint32_t team, kv_head, first_head, head_count;
    uint32_t position, begin, end;                   /* positions of its split; the new token has `position` */
    uint32_t split, split_count, slice, slice_count; /* slices of the dimensions of V */
    uint32_t is_first_group;                         /* of its KV head */

    __device__ __forceinline__ bool works() const { return split < split_count && slice < slice_count; }
    __device__ __forceinline__ bool has_new() const { return position < end; }
};

static_assert(SPK_CUDA_PART_POSITIONS == ROUND, "a part is a round");
/* Are the splits parts, which whoever reads the output merges? */
__device__ __forceinline__ bool is_parted(const attention_args &p, const task &t) { return p.a.part_totals != nullptr && parts_at(t.position) > 1; }

template <class L> __device__ __forceinline__ task task_of(const attention_args &p) {
    task t;
    t.position = __ldcg(p.a.d_position);             /* written by the step before: no need to wait for it */
    t.team = blockIdx.y;
    t.kv_head = t.team / p.group_count;
    const uint32_t ratio = p.a.head_count / p.a.kv_head_count, first = t.team % p.group_count * p.group_heads;
    t.first_head = t.kv_head * ratio + first;
    t.head_count = min(p.group_heads, ratio - first);
    const uint32_t count = t.position + 1;
    uint32_t size = count;
    t.split_count = t.slice_count = 1;
    t.split = t.slice = 0;
    if (count <= SOLO_POSITIONS || is_parted(p, t) || p.split_count == 1) {
        if (p.split_count > 1) t.slice_count = slices_of(L::DIM);
        t.slice = blockIdx.x;
        if (is_parted(p, t)) {
            size = ROUND;
            t.split_count = parts_at(t.position);
            t.split = blockIdx.x / t.slice_count;
            t.slice = blockIdx.x % t.slice_count;
        }
    } else {
        size = (count + p.split_count - 1) / p.split_count;
        size = (size + SPLIT_UNIT - 1) / SPLIT_UNIT * SPLIT_UNIT;
        t.split_count = (count + size - 1) / size;
        t.split = blockIdx.x;
    }
    t.begin = t.split * size;
    t.end = min(t.begin + size, count);
    t.is_first_group = first == 0;
    return t;
}

template <class L> struct shared_state {
    uint4    q[L::DIM / 16][32];                     /* B fragments of all heads: two registers of high halves, two of low */
    uint4    weights[ROUND / 16][32];                /* likewise of a round's softmax weights */
    uint64_t barriers[WARPS * RING_STAGES_MAX];
    float    warp_top[HEADS][WARPS], warp_sum[HEADS][WARPS], top[HEADS];
    cache_row<L> fresh[2];                           /* k and v of the new token */
    uint32_t shares;
};
template <class L> __host__ __device__ constexpr uint32_t state_bytes() { return (sizeof(shared_state<L>) + 127) / 128 * 128; }

/* Everything that the parts of a CTA share; `ring` is the memory of all warps' stages. */
template <class L> struct context {
    const attention_args &p;
    const task      &t;
    shared_state<L> &s;
    uint8_t         *ring;
    uint32_t         warp, lane;
};

/* A stage is a K block, or a part of 64 positions of V (32 at head_dim 64). */
template <class L> struct stages {
    static constexpr uint32_t V_BLOCKS = L::DIM < 128 ? 1 : 2, V_POSITIONS = V_BLOCKS * L::V_POSITIONS;
    static constexpr uint32_t V_COUNT = L::DIM / 2 / V_POSITIONS;        /* of a round, where a CTA has all dimensions */
    static constexpr uint32_t BYTES = L::K_BLOCK;
    static_assert(V_BLOCKS * L::V_BLOCK == BYTES, "stages have one size");
};

/* A warp's way through the cache: in each round the K blocks of its 16 positions, then its part of V. */
template <class L> struct cache_stream {
    using S = stages<L>;
    warp_ring      ring;
    const uint8_t *k, *v;                            /* of round 0 */
    uint32_t k_begin, v_begin, cached, v_count;      /* first positions; end of those in the cache; V stages of a round */
    uint32_t v_slice;                                /* which 32 dimensions of V */
    uint32_t slot, round, index;                     /* the stage to use next; the one to ask for next */

    __device__ __forceinline__ void begin(const context<L> &c) {
        const uint32_t slices = L::SLICES / c.t.slice_count, part = c.warp / slices;
        const size_t head = L::head_bytes(c.p.a.context_tokens) * c.t.kv_head;
        ring.begin(c.ring, c.s.barriers, S::BYTES, c.p.stage_count);
        cached = min(c.t.end, c.t.position);
        v_count = S::V_COUNT / c.t.slice_count;
        v_slice = c.t.slice * slices + c.warp % slices;
        k_begin = c.t.begin + 16 * c.warp;
        v_begin = c.t.begin + part * v_count * S::V_POSITIONS;
        k = (const uint8_t *)c.p.a.k_cache + head + L::k_offset(k_begin);
        v = (const uint8_t *)c.p.a.v_cache + head + L::v_offset(v_begin) + v_slice * L::V_BLOCK;
        slot = round = index = 0;
    }
    /* What a stage is filled from: pieces that lie `APART` from each other; none where the cache has nothing for it. */
    struct source { const uint8_t *from; uint32_t size_bytes, piece_count; };
    static constexpr int64_t APART = L::SLICES * L::V_BLOCK;
    __device__ __forceinline__ source next() {
        source s;
        if (index < L::K_BLOCKS) {
            s.from = k + L::k_offset(round * ROUND) + index * L::K_BLOCK;
            s.size_bytes = L::K_BLOCK;
            s.piece_count = k_begin + round * ROUND < cached;
        } else {
            const uint32_t ahead = round * ROUND + (index - L::K_BLOCKS) * S::V_POSITIONS;
            s.from = v + L::v_offset(ahead);
            s.size_bytes = L::V_BLOCK;
            s.piece_count = (v_begin + ahead < cached) + (S::V_BLOCKS == 2 && v_begin + ahead + L::V_POSITIONS < cached);
        }
        if (++index == L::K_BLOCKS + v_count) {
            index = 0;
            round++;
        }
        return s;
    }
    __device__ __forceinline__ void fill(uint32_t stage) {
        const source s = next();
        if (s.piece_count > 0) ring.fill(stage, s.from, APART, s.size_bytes, s.piece_count);
        else ring.skip();
    }
    /* Ask for all stages, and for as many again to come into L2. */
    __device__ __forceinline__ void start(uint32_t lane) {
        for (uint32_t i = 0; i < ring.stage_count; i++) fill(i);
        const uint32_t asked_round = round, asked_index = index;
        for (uint32_t i = 0; i < ring.stage_count; i++) {
            const source s = next();
            for (uint32_t j = 0; lane == 0 && j < s.piece_count; j++) prefetch_to_l2(s.from + j * APART, s.size_bytes);
        }
        round = asked_round;
        index = asked_index;
    }
    /* The next stage; it holds something from the cache if first < cached. */
    __device__ __forceinline__ uint8_t *use(uint32_t first) {
        if (first < cached) ring.wait(slot);
        return ring.stage(slot);
    }
    __device__ __forceinline__ void release() {
        __syncwarp();
        fill(slot);
        slot = slot + 1 == ring.stage_count ? 0 : slot + 1;
    }
};

/* A head's values in a warp: the lane has x[i] and x[i + rope_dim / 2] of rotations i = lane, lane + 32 .., and what is not
 * rotated, x[rope_dim + lane] ..  Places that do not exist hold zeros. */
template <int DIM> struct head_values {
    static constexpr uint32_t PAIRS = DIM / 64, REST = DIM / 32;
    float a[PAIRS], b[PAIRS], rest[REST];

    /* f(value, start, ahead) for x[start + ahead]; ahead is a constant multiple of 32. */
    template <typename F> __device__ __forceinline__ void each(uint32_t rope_dim, uint32_t lane, F f) {
        const uint32_t half = rope_dim / 2;
#pragma unroll
        for (uint32_t j = 0; j < PAIRS; j++)
            if (32 * j + lane < half) {
                f(a[j], lane, 32 * j);
                f(b[j], half + lane, 32 * j);
            }
#pragma unroll
        for (uint32_t j = 0; j < REST; j++)
            if (rope_dim + 32 * j + lane < DIM) f(rest[j], rope_dim + lane, 32 * j);
    }
    __device__ __forceinline__ void clear() { *this = {}; }
    __device__ __forceinline__ void load(const float *x, uint32_t rope_dim, uint32_t lane) {
        each(rope_dim, lane, [x](float &value, uint32_t start, uint32_t ahead) { value = __ldcg(x + start + ahead); });
    }
    __device__ __forceinline__ float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < PAIRS; j++) sum = fmaf(a[j], a[j], fmaf(b[j], b[j], sum));
#pragma unroll
        for (uint32_t j = 0; j < REST; j++) sum = fmaf(rest[j], rest[j], sum);
        return sum;
    }
    __device__ __forceinline__ void norm(float squares_of_all, float eps, const float *weight, uint32_t rope_dim, uint32_t lane) {
        const float factor = rsqrtf(squares_of_all / (float)DIM + eps);
        each(rope_dim, lane, [factor, weight](float &value, uint32_t start, uint32_t ahead) { value = value * factor * weight[start + ahead]; });
    }
    __device__ __forceinline__ void rotate(const float2 turn[PAIRS]) {
#pragma unroll
        for (uint32_t j = 0; j < PAIRS; j++) {
            const float x = a[j], y = b[j];
            a[j] = x * turn[j].x - y * turn[j].y;
            b[j] = x * turn[j].y + y * turn[j].x;
        }
    }
};

/* Two sums at once: their shuffles run side by side. */
__device__ __forceinline__ float2 warp_sums(float x, float y) {
#pragma unroll
    for (int o = 16; o > 0; o >>= 1) {
        const float other_x = __shfl_xor_sync(FULL, x, o), other_y = __shfl_xor_sync(FULL, y, o);
        x += other_x;
        y += other_y;
    }
    return make_float2(x, y);
}

/* Powers of two: q * up is at most 2^14, and scores times down are what they should be.  A normed and rotated head has no
 * value above sqrt(head_dim) max |weight|, and sqrt(head_dim) goes with the scale of the scores. */
struct q_range { float up, down; };
template <int DIM> __device__ __forceinline__ q_range range_of(const float *weight, uint32_t lane) {
    float top = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < DIM / 32; i++) top = fmaxf(top, fabsf(weight[32 * i + lane]));
    top = __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(top)));
    const uint32_t exponent = max(14u, min(254u, __float_as_uint(top * 1.4426951f) >> 23));
    return { __uint_as_float((267 - exponent) << 23), __uint_as_float((exponent - 13) << 23) };
}

/* From q, k and v of the new token: fragments of q, and rows for the cache. */
template <class L> struct new_token {
    q_range range;

    /* Room in shared memory until the first round needs it: the norms' weights of q and k, and a row. */
    static __device__ __forceinline__ float *room(const context<L> &c, int row) {
        static_assert(3 * L::DIM * sizeof(float) <= sizeof c.s.weights, "");
        return (float *)c.s.weights + row * L::DIM;
    }
    /* What depends on nothing of this step. */
    __device__ __forceinline__ void start(const context<L> &c) {
        for (uint32_t i = threadIdx.x; i < 2 * L::DIM; i += THREADS)
            room(c, 0)[i] = __ldcg(i < L::DIM ? c.p.a.q_norm + i : c.p.a.k_norm + i - L::DIM);
        __syncthreads();
        range = range_of<L::DIM>(room(c, 0), c.lane);
        if (threadIdx.x == 0 && c.p.a.rope_dim >= 4) prefetch_to_l2((const uint8_t *)c.p.a.cos_sin, c.p.a.rope_dim / 4 * 16);      /* last read a few layers ago */
    }
    /* The rest.  Warp h has query head h; the last two warps also have k and v, where the CTA needs them. */
    __device__ __forceinline__ void finish(const context<L> &c) {
        const spk_cuda_attention &a = c.p.a;
        const bool has_k = c.t.has_new() && c.warp == WARPS - 1, has_v = c.t.has_new() && c.warp == WARPS - 2;
        head_values<L::DIM> q, fresh;
        float2 turn[head_values<L::DIM>::PAIRS];
        q.clear();
        fresh.clear();
        if (c.warp < c.t.head_count) q.load(a.q + (size_t)(c.t.first_head + c.warp) * ((a.is_gated ? 2 : 1) * L::DIM), a.rope_dim, c.lane);
        if (has_k) fresh.load(a.k + (size_t)c.t.kv_head * L::DIM, a.rope_dim, c.lane);
        if (has_v) fresh.load(a.v + (size_t)c.t.kv_head * L::DIM, 0, c.lane);
#pragma unroll
        for (uint32_t j = 0; j < head_values<L::DIM>::PAIRS; j++)
            turn[j] = 32 * j + c.lane < a.rope_dim / 2 ? __ldcg((const float2 *)a.cos_sin + 32 * j + c.lane) : make_float2(0, 0);
        const float2 squares = warp_sums(q.squares(), fresh.squares());
        q.norm(squares.x, a.eps, room(c, 0), a.rope_dim, c.lane);
        q.rotate(turn);
        if (has_k) {
            fresh.norm(squares.y, a.eps, room(c, 1), a.rope_dim, c.lane);
            fresh.rotate(turn);
        }
        put_q(c, q);
        if (has_k || has_v) put_fresh(c, fresh, has_v ? 0 : a.rope_dim, c.s.fresh[has_v]);
    }

private:
    __device__ __forceinline__ void put_q(const context<L> &c, head_values<L::DIM> &q) const {
        const float scale = 1.4426950408889634f / sqrtf((float)L::DIM) * range.up;
        uint8_t *fragments = (uint8_t *)c.s.q + 64 * c.warp;
        q.each(c.p.a.rope_dim, c.lane, [fragments, scale](float &value, uint32_t start, uint32_t ahead) {
            const float x = value * scale;
            const __half high = __float2half_rn(x), low = __float2half_rn(x - __half2float(high));
            __half *to = (__half *)(fragments + start / 16 * 512 + L::b_offset(start % 16) + ahead / 16 * 512);
            to[0] = high;
            to[4] = low;
        });
    }
    static __device__ __forceinline__ void put_fresh(const context<L> &c, head_values<L::DIM> &x, uint32_t rope_dim, cache_row<L> &row) {
        if (L::ELEMENT_BYTES == 2) {
            __half *to = (__half *)row.codes;
            x.each(rope_dim, c.lane, [to](float &value, uint32_t start, uint32_t ahead) { to[start + ahead] = __float2half_rn(value); });
        } else {
            if (rope_dim > 0) {                      /* k: into order of dimension */
                float *in_order = room(c, 2);
                x.each(rope_dim, c.lane, [in_order](float &value, uint32_t start, uint32_t ahead) { in_order[start + ahead] = value; });
                __syncwarp();
#pragma unroll
                for (uint32_t j = 0; j < L::DIM / 32; j++) x.rest[j] = in_order[32 * j + c.lane];
            }
            row.quantize(x.rest, c.lane);
        }
    }
};

/* The new row into the cache; by all warps of one CTA of a KV head. */
template <class L> __device__ __forceinline__ void store_fresh(const context<L> &c) {
    if (!c.t.has_new() || !c.t.is_first_group || c.t.slice != 0) return;
    const size_t head = L::head_bytes(c.p.a.context_tokens) * c.t.kv_head;
    const uint32_t position = c.t.position;
    for (uint32_t i = c.warp; i < L::K_BLOCKS + L::SLICES; i += WARPS)
        if (i < L::K_BLOCKS)
            c.s.fresh[0].put_k((uint8_t *)c.p.a.k_cache + head + L::k_offset(position) + i * L::K_BLOCK, position % L::K_POSITIONS, i, c.lane);
        else
            c.s.fresh[1].put_v((uint8_t *)c.p.a.v_cache + head + L::v_offset(position) + (i - L::K_BLOCKS) * L::V_BLOCK,
                               position % L::V_POSITIONS, i - L::K_BLOCKS, c.lane);
}

} // namespace spk

#endif
