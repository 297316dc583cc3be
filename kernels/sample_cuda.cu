/* kernels/sample_cuda.cu - the token that ends a sampled step, drawn by one cluster of CTAs.
 *
 * Maths      kernels/sampling.h, bit for bit.  As in runtime/sample.c: candidates are counted and weighed by buckets of
 *            distance, and each of top-k, top-p and the draw orders only the candidates of the bucket in which the running
 *            count or weight passes its target.  A bucket of too many is cut into parts of its distances first.
 * Bytes      the logits once, from L2: 4 * vocab
 * Launch     16 CTAs of 512 threads in a cluster (8 or 1 where the device has no such clusters); each keeps the distances of
 *            its slice of the vocabulary in shared memory, or, of a slice too large, computes them anew in every pass.
 *            5 cluster barriers, 1 more for each of top-k and top-p
 * Reference  spk_sampler_next: the same token
 *
 * What decides the way through the kernel is the same in all CTAs, so barriers are met by all.  Sums are of integers, and
 * the order in which threads append to a list does not matter to who reads it: the same input gives the same token.
 */
#include <cooperative_groups.h>

#include "kernels/backend_cuda.cuh"
#include "kernels/choice_cuda.cuh"
#include "kernels/device_cuda.cuh"

namespace spk {
namespace {

typedef unsigned long long u64;

constexpr uint32_t THREADS = 512, WARPS = THREADS / 32, CLUSTER_MAX = 16;
constexpr uint32_t BUCKETS = SPK_SAMPLING_BUCKETS, PART_BITS = 9, PARTS = 1u << PART_BITS;   /* a bucket's parts, a part's parts */
constexpr uint32_t LIST_MAX = 256;                  /* candidates that are ordered */
enum { FIND_TOP_K, FIND_TOP_P, FIND_DRAW, FIND_COUNT };

/* A running count and weight of candidates. */
struct total { u64 weight, count; };
/* Distances [low, low + 2^shift): what lies before them, and how many candidates they have. */
struct window {
    total    before;
    uint32_t low, shift, member_count;
};
struct place {
    total    upto;               /* the candidate included */
    uint32_t id;
};

struct histogram_of_buckets { u64 weights[BUCKETS]; uint32_t counts[BUCKETS]; };
struct histogram_of_parts { u64 weights[PARTS]; uint32_t counts[PARTS]; };

/* Of one CTA; others of the cluster read and write it. */
struct alignas(16) memory {
    histogram_of_buckets buckets;                   /* merged over the cluster, then running totals */
    histogram_of_parts   parts;
    u64      lists[FIND_COUNT][LIST_MAX];           /* of the first CTA: distance, then id */
    u64      keys[LIST_MAX], key_weights[LIST_MAX];
    total    warp_totals[WARPS];
    u64      within[CLUSTER_MAX];                   /* weights that min-p keeps, by CTA */
    float    best[CLUSTER_MAX];
    uint32_t ties[CLUSTER_MAX];
    uint32_t list_counts[FIND_COUNT];
    u64      warp_sums[WARPS];
    window   found_window;
    place    found;
    spk_sampling options;
};

/* The cluster; where there are none, one CTA is all. */
struct cluster {
    uint32_t rank, size;
    __device__ __forceinline__ cluster() {
#if __CUDA_ARCH__ >= 900
        rank = cooperative_groups::this_cluster().block_rank();
        size = cooperative_groups::this_cluster().num_blocks();
#else
        rank = 0;
        size = 1;
#endif
    }
    template <typename T> __device__ __forceinline__ T *of(T *mine, uint32_t of_rank) const {
#if __CUDA_ARCH__ >= 900
        return cooperative_groups::this_cluster().map_shared_rank(mine, of_rank);
#else
        return mine;
#endif
    }
    template <typename T> __device__ __forceinline__ void tell_all(T *mine, T value) const {
        for (uint32_t r = 0; r < size; r++) *of(mine, r) = value;
    }
    __device__ __forceinline__ void sync() const {
#if __CUDA_ARCH__ >= 900
        cooperative_groups::this_cluster().sync();
#else
        __syncthreads();
#endif
    }
    /* Another CTA's memory may be touched once that CTA runs: each says so when it starts, and waits before its first touch. */
    __device__ __forceinline__ void say_started() const {
#if __CUDA_ARCH__ >= 900
        cooperative_groups::this_cluster().barrier_arrive();
#endif
    }
    __device__ __forceinline__ void wait_for_start() const {
#if __CUDA_ARCH__ >= 900
        cooperative_groups::this_cluster().barrier_wait();
#endif
    }
};

struct sample_args {
    spk_cuda_sample a;
    uint32_t        slice, is_kept;                 /* ids a CTA; whether their distances are kept in shared memory */
};

/* One CTA's view of the work. */
struct sampler {
    const sample_args &p;
    cluster   c;
    memory   &m;
    uint32_t *distances;                            /* [slice]; until the best is known, the logits' bits */
    uint32_t  first, count;                         /* of the slice */
    float     best, scale;

    __device__ __forceinline__ sampler(const sample_args &args, memory &mine, uint32_t *kept) : p(args), m(mine), distances(kept) {
        first = min(c.rank * p.slice, p.a.vocab_size);
        count = min(p.slice, p.a.vocab_size - first);
    }

    __device__ __forceinline__ uint32_t distance_at(uint32_t i) const {
        if (i >= count) return SPK_SAMPLING_NO_CANDIDATE;
        return p.is_kept ? distances[i] : spk_sampling_distance(best, __ldcg(p.a.logits + first + i), scale);
    }

    /* ---- Passes over the slice ---- */

    /* The largest of all logits, NaNs aside; -infinity if there are no others. */
    __device__ __forceinline__ void read_logits() {
        constexpr uint32_t AHEAD = 4;
        const float *logits = p.a.logits + first;
        float top = -INFINITY;
        for (uint32_t base = threadIdx.x; base < count / 4; base += AHEAD * THREADS) {
            float4 v[AHEAD];
#pragma unroll
            for (uint32_t j = 0; j < AHEAD; j++)
                v[j] = base + j * THREADS < count / 4 ? load_activation4(logits + 4 * (base + j * THREADS))
                                                      : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
#pragma unroll
            for (uint32_t j = 0; j < AHEAD; j++) {
                top = fmaxf(top, fmaxf(fmaxf(v[j].x, v[j].y), fmaxf(v[j].z, v[j].w)));
                if (p.is_kept && base + j * THREADS < count / 4) ((float4 *)distances)[base + j * THREADS] = v[j];
            }
        }
        for (uint32_t i = count / 4 * 4 + threadIdx.x; i < count; i += THREADS) {
            const float v = __ldcg(logits + i);
            top = fmaxf(top, v);
            if (p.is_kept) distances[i] = __float_as_uint(v);
        }
#pragma unroll
        for (int o = 16; o > 0; o >>= 1) top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
        float *warp_best = (float *)m.warp_sums;
        if ((threadIdx.x & 31) == 0) warp_best[threadIdx.x >> 5] = top;
        __syncthreads();
        c.wait_for_start();
        if (threadIdx.x < c.size) {                 /* one thread for each CTA that is to know */
            for (uint32_t w = 0; w < WARPS; w++) top = fmaxf(top, warp_best[w]);
            *c.of(&m.best[c.rank], threadIdx.x) = top;
        }
        c.sync();
        scale = m.options.scale;
        best = m.best[0];
        for (uint32_t r = 1; r < c.size; r++) best = fmaxf(best, m.best[r]);
    }

    /* Count one candidate a lane; no bucket: none.  Lanes of one bucket share an addition. */
    __device__ __forceinline__ static void add_to(u64 *weights, uint32_t *counts, uint32_t bucket, u64 weight) {
        int are_all_same;
        (void)__match_all_sync(FULL, bucket, &are_all_same);
        if (!are_all_same) {
            if (bucket == SPK_SAMPLING_NO_CANDIDATE) return;
            atomicAdd(weights + bucket, weight);
            atomicAdd(counts + bucket, 1u);
        } else if (bucket != SPK_SAMPLING_NO_CANDIDATE) {
#pragma unroll
            for (int o = 16; o > 0; o >>= 1) weight += __shfl_xor_sync(FULL, weight, o);
            if ((threadIdx.x & 31) != 0) return;
            atomicAdd(weights + bucket, weight);
            atomicAdd(counts + bucket, 32u);
        }
    }

    /* All candidates by bucket; distances are kept from here on.  Returns this thread's share of the weight that min-p keeps. */
    __device__ __forceinline__ u64 fill_buckets(uint32_t distance_max) {
        u64 within = 0;
        for (uint32_t base = 0; base < count; base += THREADS) {
            const uint32_t i = base + threadIdx.x;
            uint32_t distance = SPK_SAMPLING_NO_CANDIDATE, bucket = SPK_SAMPLING_NO_CANDIDATE;
            u64 weight = 0;
            if (i < count) {
                const float logit = p.is_kept ? __uint_as_float(distances[i]) : __ldcg(p.a.logits + first + i);
                distance = spk_sampling_distance(best, logit, scale);
                if (p.is_kept) distances[i] = distance;
            }
            if (distance != SPK_SAMPLING_NO_CANDIDATE) {
                bucket = distance >> SPK_SAMPLING_BUCKET_BITS;
                weight = spk_sampling_weight(distance);
                if (distance <= distance_max) within += weight;
            }
            add_to(m.buckets.weights, m.buckets.counts, bucket, weight);
        }
        return within;
    }

    /* A window's candidates by part. */
    __device__ __forceinline__ void fill_parts(const window &w) {
        for (uint32_t i = threadIdx.x; i < PARTS; i += THREADS) m.parts.weights[i] = m.parts.counts[i] = 0;
        __syncthreads();
        for (uint32_t base = 0; base < count; base += THREADS) {
            const uint32_t distance = distance_at(base + threadIdx.x);
            const bool is_in = distance >> w.shift == w.low >> w.shift;
            add_to(m.parts.weights, m.parts.counts,
                   is_in ? distance >> (w.shift - PART_BITS) & (PARTS - 1) : SPK_SAMPLING_NO_CANDIDATE,
                   is_in ? spk_sampling_weight(distance) : 0);
        }
    }

    /* ---- Running totals ---- */

    /* Sum over the cluster; every CTA then has all of it.  Each adds up its share and hands that out. */
    __device__ __forceinline__ void merge(u64 *weights, uint32_t *counts, uint32_t n) const {
        c.sync();
        if (c.size == 1) return;
        const uint32_t own = (n + c.size - 1) / c.size, i = c.rank * own + threadIdx.x;   /* own <= THREADS: of 8 CTAs 312 */
        const bool has_one = threadIdx.x < own && i < n;
        u64 weight = 0;
        uint32_t members = 0;
        if (has_one) {
#pragma unroll 8                                    /* loads in flight together */
            for (uint32_t r = 0; r < c.size; r++) {
                weight += c.of(weights, r)[i];
                members += c.of(counts, r)[i];
            }
        }
        c.sync();
        if (has_one) {
            c.tell_all(weights + i, weight);
            c.tell_all(counts + i, members);
        }
        c.sync();
    }

    /* In place: each entry becomes the sum up to and including it. */
    template <uint32_t N> __device__ __forceinline__ void run_totals(u64 *weights, uint32_t *counts) const {
        constexpr uint32_t EACH = (N + THREADS - 1) / THREADS;
        const uint32_t begin = threadIdx.x * EACH, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        total mine = { 0, 0 };
        for (uint32_t i = begin; i < begin + EACH && i < N; i++) {
            mine.weight += weights[i];
            mine.count += counts[i];
        }
        total upto = mine;
#pragma unroll
        for (int o = 1; o < 32; o <<= 1) {
            const u64 weight = __shfl_up_sync(FULL, upto.weight, o), members = __shfl_up_sync(FULL, upto.count, o);
            if (lane < o) continue;
            upto.weight += weight;
            upto.count += members;
        }
        if (lane == 31) m.warp_totals[warp] = upto;
        __syncthreads();
        for (uint32_t w = 0; w < warp; w++) {
            upto.weight += m.warp_totals[w].weight;
            upto.count += m.warp_totals[w].count;
        }
        u64 weight = upto.weight - mine.weight;
        uint32_t members = (uint32_t)(upto.count - mine.count);
        for (uint32_t i = begin; i < begin + EACH && i < N; i++) {
            weights[i] = weight += weights[i];
            counts[i] = members += counts[i];
        }
        __syncthreads();
    }

    /* The entry of w, N of 2^shift distances each, in which the total passes the target. */
    template <uint32_t N>
    __device__ __forceinline__ window narrow(const u64 *weights, const uint32_t *counts, const window &w, uint32_t shift, bool by_weight,
                                             u64 target) const {
        __syncthreads();                            /* the last window has been read */
        const u64 rest = target - (by_weight ? w.before.weight : w.before.count);
        for (uint32_t i = threadIdx.x; i < N; i += THREADS) {
            const total before = { i > 0 ? weights[i - 1] : 0, i > 0 ? counts[i - 1] : 0 };
            if ((by_weight ? before.weight : before.count) > rest || rest >= (by_weight ? weights[i] : counts[i])) continue;
            m.found_window = { { w.before.weight + before.weight, w.before.count + before.count }, w.low + (i << shift), shift,
                               counts[i] - (uint32_t)before.count };
        }
        __syncthreads();
        return m.found_window;
    }

    /* ---- Finding a candidate ---- */

    /* The first candidate at which the running count or weight is larger than target, which is less than that of all.
     * The id is known to the first CTA, of a tie among many only for the draw. */
    __device__ __forceinline__ place find(uint32_t which, bool by_weight, u64 target) {
        const window all = {};
        window w = narrow<BUCKETS>(m.buckets.weights, m.buckets.counts, all, SPK_SAMPLING_BUCKET_BITS, by_weight, target);
        while (w.member_count > LIST_MAX && w.shift > 0) {
            fill_parts(w);
            merge(m.parts.weights, m.parts.counts, PARTS);
            run_totals<PARTS>(m.parts.weights, m.parts.counts);
            w = narrow<PARTS>(m.parts.weights, m.parts.counts, w, w.shift - PART_BITS, by_weight, target);
        }
        return w.member_count <= LIST_MAX ? pick(which, w, by_weight, target) : pick_tie(which, w, by_weight, target);
    }

    /* Of a window with few candidates: all in one list, and each adds up those before it. */
    __device__ __forceinline__ place pick(uint32_t which, const window &w, bool by_weight, u64 target) const {
        for (uint32_t base = 0; base < count; base += THREADS) {
            const uint32_t distance = distance_at(base + threadIdx.x);
            if (distance >> w.shift != w.low >> w.shift) continue;
            const uint32_t at = atomicAdd(c.of(&m.list_counts[which], 0), 1u);
            c.of(m.lists[which], 0)[at] = (u64)distance << 32 | (first + base + threadIdx.x);
        }
        c.sync();
        if (which == FIND_DRAW && c.rank != 0) return {};       /* nobody reads this CTA's memory any more */
        u64 key = 0;
        if (threadIdx.x < w.member_count) {
            key = c.of(m.lists[which], 0)[threadIdx.x];
            m.keys[threadIdx.x] = key;
            m.key_weights[threadIdx.x] = spk_sampling_weight((uint32_t)(key >> 32));
        }
        __syncthreads();
        if (threadIdx.x < w.member_count) {
            total upto = w.before;
            for (uint32_t i = 0; i < w.member_count; i++) {
                if (m.keys[i] > key) continue;
                upto.weight += m.key_weights[i];
                upto.count++;
            }
            const u64 reached = by_weight ? upto.weight : upto.count, step = by_weight ? m.key_weights[threadIdx.x] : 1;
            if (reached > target && reached - step <= target) m.found = { upto, (uint32_t)key };
        }
        __syncthreads();
        return m.found;
    }

    /* Of a window with one distance and many candidates. */
    __device__ __forceinline__ place pick_tie(uint32_t which, const window &w, bool by_weight, u64 target) const {
        const u64 weight = spk_sampling_weight(w.low);
        const u64 index = by_weight ? (target - w.before.weight) / weight : target - w.before.count;
        place found = { { w.before.weight + (index + 1) * weight, w.before.count + index + 1 }, 0 };
        if (which != FIND_DRAW) return found;
        const uint32_t lane = threadIdx.x & 31;
        if (threadIdx.x < 32) {                     /* rare: one warp will do */
            uint32_t mine = 0;
            for (uint32_t base = 0; base < count; base += 32)
                mine += __popc(__ballot_sync(FULL, distance_at(base + lane) == w.low));
            if (lane == 0) c.tell_all(&m.ties[c.rank], mine);
        }
        c.sync();
        u64 seen = 0;
        for (uint32_t r = 0; r < c.rank; r++) seen += m.ties[r];
        if (threadIdx.x < 32 && seen <= index && index < seen + m.ties[c.rank])
            for (uint32_t base = 0; base < count && seen <= index; base += 32) {
                const unsigned are_ties = __ballot_sync(FULL, distance_at(base + lane) == w.low);
                const bool is_it = (are_ties >> lane & 1) && seen + __popc(are_ties & ((1u << lane) - 1)) == index;
                if (is_it) c.of(&m.found, 0)->id = first + base + lane;
                seen += __popc(are_ties);
            }
        c.sync();
        found.id = m.found.id;
        return found;
    }

    /* Sum over all threads of the cluster. */
    __device__ __forceinline__ u64 sum_within(u64 value) const {
#pragma unroll
        for (int o = 16; o > 0; o >>= 1) value += __shfl_xor_sync(FULL, value, o);
        if ((threadIdx.x & 31) == 0) m.warp_sums[threadIdx.x >> 5] = value;
        __syncthreads();
        value = 0;
        for (uint32_t w = 0; w < WARPS; w++) value += m.warp_sums[w];
        if (threadIdx.x == 0) c.tell_all(&m.within[c.rank], value);
        c.sync();
        value = 0;
        for (uint32_t r = 0; r < c.size; r++) value += m.within[r];
        return value;
    }
};

__device__ __forceinline__ void clear(memory &m) {
    for (uint32_t i = threadIdx.x; i < BUCKETS; i += THREADS) m.buckets.weights[i] = m.buckets.counts[i] = 0;
    if (threadIdx.x < FIND_COUNT) m.list_counts[threadIdx.x] = 0;
}

__global__ void __launch_bounds__(THREADS, 1) sample_kernel(const __grid_constant__ sample_args p) {
    chain_release();
    SPK_DYNAMIC_SHARED(shared);
    memory &m = *(memory *)shared;
    sampler s(p, m, (uint32_t *)(shared + sizeof(memory)));
    const spk_sampling &options = m.options;
    if (threadIdx.x == 0) m.options = *p.a.d_sampling;   /* the last step's, or the host's: no need to wait */
    s.c.say_started();
    clear(m);
    chain_wait();
    s.read_logits();
    const bool is_first = s.c.rank == 0 && threadIdx.x == 0;
    if (!(fabsf(s.best) < INFINITY)) {
        if (is_first) end_step(p.a.sequence, SPK_CUDA_TOKEN_FREE);
        return;
    }
    u64 within = s.fill_buckets(options.distance_max);
    s.merge(m.buckets.weights, m.buckets.counts, BUCKETS);
    s.run_totals<BUCKETS>(m.buckets.weights, m.buckets.counts);
    u64 kept = m.buckets.weights[BUCKETS - 1];
    if (options.top_k < m.buckets.counts[BUCKETS - 1]) kept = s.find(FIND_TOP_K, false, options.top_k - 1).upto.weight;
    if (options.has_top_p) {
        const u64 target = spk_sampling_share(options.top_p, kept);
        kept = s.find(FIND_TOP_P, true, target > 0 ? target - 1 : 0).upto.weight;
    }
    if (options.distance_max != SPK_SAMPLING_NO_CANDIDATE) kept = min(kept, s.sum_within(within));
    const uint64_t state = options.state + SPK_SAMPLING_STATE_STEP;
    const place drawn = s.find(FIND_DRAW, true, spk_sampling_share(spk_sampling_random(state), kept));
    if (!is_first) return;
    p.a.d_sampling->state = state;
    end_step(p.a.sequence, drawn.id);
}

constexpr uint32_t SHARED_MAX = 113 * 1024;         /* half of an SM */

struct shape { uint32_t cluster_size, slice, is_kept, shared_bytes; };
shape shape_of(uint32_t cluster_size, uint32_t vocab_size) {
    shape s = { cluster_size, ((vocab_size + cluster_size - 1) / cluster_size + 3) / 4 * 4, 0, (uint32_t)sizeof(memory) };
    s.is_kept = s.slice <= (SHARED_MAX - s.shared_bytes) / sizeof(uint32_t);
    if (s.is_kept) s.shared_bytes += s.slice * (uint32_t)sizeof(uint32_t);
    return s;
}

/* Of the largest cluster that is allowed and fits the device. */
shape choose_shape(const spk_cuda *cuda, uint32_t vocab_size, uint32_t cluster_max) {
    for (uint32_t size = CLUSTER_MAX; cuda->has_chain && size >= CLUSTER_MAX / 2; size /= 2) {
        const shape s = shape_of(size, vocab_size);
        if (cluster_max != 0 && size > cluster_max) continue;
        launch_shape config(sample_kernel, cuda, size, THREADS, s.shared_bytes, size);
        int cluster_count = 0;
        if (config.error == cudaSuccess && cudaOccupancyMaxActiveClusters(&cluster_count, sample_kernel, &config.config) == cudaSuccess &&
            cluster_count > 0)
            return s;
        (void)cudaGetLastError();
    }
    return shape_of(1, vocab_size);
}

} // namespace
} // namespace spk

void spk_cuda_launch_sample(spk_cuda *cuda, const spk_cuda_sample *args) {
    using namespace spk;
    const shape s = choose_shape(cuda, args->vocab_size, args->cluster_max);
    const sample_args p = { *args, s.slice, s.is_kept };
    launch(cuda, sample_kernel, s.cluster_size, THREADS, s.shared_bytes, p, "sampling", s.cluster_size);
}
