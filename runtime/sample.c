/* runtime/sample.c - choosing a token from logits, as kernels/sampling.h defines it.
 *
 * Candidates are counted and weighed by buckets of distance.  A running count or weight passes its target in one bucket, and
 * only that bucket's candidates are ordered: three times at most, for top-k, top-p and the draw.
 */
#include "runtime/sample_internal.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A vocabulary's distances, and what each bucket holds; memory is the caller's scratch. */
typedef struct {
    uint64_t *weights;        /* [SPK_SAMPLING_BUCKETS] */
    uint64_t *members;        /* [vocab], of one bucket: distance, then id */
    uint32_t *counts;         /* [SPK_SAMPLING_BUCKETS] */
    uint32_t *distances;      /* [vocab] */
    uint32_t  vocab_size;
} candidates;

size_t spk_sampler_scratch_bytes(uint32_t vocab_size) {
    return SPK_SAMPLING_BUCKETS * (sizeof(uint64_t) + sizeof(uint32_t)) + (size_t)vocab_size * (sizeof(uint64_t) + sizeof(uint32_t));
}

spk_sampler spk_sampler_start(const spk_sampler_options *options) {
    return (spk_sampler){ .options = *options, .state = options->seed };
}

spk_sampling spk_sampler_plan(const spk_sampler *sampler) {
    const spk_sampler_options *o = &sampler->options;
    double scale = 1.4426950408889634 / (double)o->temperature;
    bool has_top_p = o->top_p < 1.0f;
    double least = o->min_p > 0.0f ? -log2((double)o->min_p) : SPK_SAMPLING_OCTAVES;
    return (spk_sampling){
        .scale = scale < (double)FLT_MAX ? (float)scale : FLT_MAX,
        .top_k = o->top_k > 0 ? o->top_k : UINT32_MAX,
        .top_p = has_top_p && o->top_p > 0.0f ? (uint64_t)((double)o->top_p * 0x1p64) : 0,
        .has_top_p = has_top_p,
        .distance_max = least >= SPK_SAMPLING_OCTAVES ? SPK_SAMPLING_NO_CANDIDATE
                      : least <= 0.0 ? 0 : (uint32_t)(least * (1 << SPK_SAMPLING_FRACTION_BITS)),
        .state = sampler->state };
}

static uint32_t argmax(const float *logits, uint32_t count) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        if (logits[i] > logits[best] || (isnan(logits[best]) && !isnan(logits[i]))) best = i;
    return best;
}

static candidates measure(const float *logits, uint32_t vocab_size, float best, float scale, void *scratch) {
    candidates c = { .vocab_size = vocab_size };
    c.weights = scratch;
    c.members = c.weights + SPK_SAMPLING_BUCKETS;
    c.counts = (uint32_t *)(c.members + vocab_size);
    c.distances = c.counts + SPK_SAMPLING_BUCKETS;
    memset(c.weights, 0, SPK_SAMPLING_BUCKETS * sizeof *c.weights);
    memset(c.counts, 0, SPK_SAMPLING_BUCKETS * sizeof *c.counts);
    for (uint32_t i = 0; i < vocab_size; i++) c.distances[i] = spk_sampling_distance(best, logits[i], scale);
    for (uint32_t i = 0; i < vocab_size; i++) {
        if (c.distances[i] == SPK_SAMPLING_NO_CANDIDATE) continue;
        uint32_t bucket = c.distances[i] >> SPK_SAMPLING_BUCKET_BITS;
        c.weights[bucket] += spk_sampling_weight(c.distances[i]);
        c.counts[bucket]++;
    }
    return c;
}

/* A candidate, with count and weight of all up to it. */
typedef struct {
    uint64_t count, weight;
    uint32_t id;
} place;

static place all_of(const candidates *c) {
    place all = { 0 };
    for (uint32_t b = 0; b < SPK_SAMPLING_BUCKETS; b++) {
        all.count += c->counts[b];
        all.weight += c->weights[b];
    }
    return all;
}

static int ascending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The first candidate at which the running count or weight is larger than target, which is less than that of all. */
static place find(const candidates *c, bool by_weight, uint64_t target) {
    place at = { 0 };
    uint32_t bucket = 0, member_count = 0;
    while ((by_weight ? at.weight + c->weights[bucket] : at.count + c->counts[bucket]) <= target) {
        at.count += c->counts[bucket];
        at.weight += c->weights[bucket++];
    }
    for (uint32_t i = 0; i < c->vocab_size; i++)
        if (c->distances[i] >> SPK_SAMPLING_BUCKET_BITS == bucket) c->members[member_count++] = (uint64_t)c->distances[i] << 32 | i;
    qsort(c->members, member_count, sizeof *c->members, ascending);
    for (uint32_t i = 0; (by_weight ? at.weight : at.count) <= target; i++) {
        at.count++;
        at.weight += spk_sampling_weight((uint32_t)(c->members[i] >> 32));
        at.id = (uint32_t)c->members[i];
    }
    return at;
}

static uint64_t weight_within(const candidates *c, uint32_t distance_max) {
    uint64_t weight = 0;
    for (uint32_t i = 0; i < c->vocab_size; i++)
        if (c->distances[i] <= distance_max) weight += spk_sampling_weight(c->distances[i]);
    return weight;
}

uint32_t spk_sampler_next(spk_sampler *sampler, const float *logits, uint32_t vocab_size, void *scratch) {
    uint32_t best = argmax(logits, vocab_size);
    if (!isfinite(logits[best])) return SPK_TOKEN_NONE;
    if (spk_sampler_is_greedy(sampler)) return best;
    const spk_sampling s = spk_sampler_plan(sampler);
    const candidates c = measure(logits, vocab_size, logits[best], s.scale, scratch);
    place all = all_of(&c);
    uint64_t kept = s.top_k < all.count ? find(&c, false, s.top_k - 1).weight : all.weight;
    if (s.has_top_p) {
        uint64_t target = spk_sampling_share(s.top_p, kept);
        kept = find(&c, true, target > 0 ? target - 1 : 0).weight;
    }
    if (s.distance_max != SPK_SAMPLING_NO_CANDIDATE) {
        uint64_t within = weight_within(&c, s.distance_max);
        if (within < kept) kept = within;
    }
    sampler->state += SPK_SAMPLING_STATE_STEP;
    return find(&c, true, spk_sampling_share(spk_sampling_random(sampler->state), kept)).id;
}
