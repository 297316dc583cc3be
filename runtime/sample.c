/* runtime/sample.c - choosing a token from logits.
 *
 * Candidates leave a heap in descending order, so that only as many are ordered as the limits let through.  Sums are
 * doubles in a fixed order: a seed gives the same tokens everywhere that the logits are the same.
 */
#include "runtime/runtime.h"

#include <math.h>

typedef struct {
    float    logit;
    uint32_t id;
} candidate;

size_t spk_sampler_scratch_bytes(uint32_t vocab_size) { return (size_t)vocab_size * sizeof(candidate); }

spk_sampler spk_sampler_start(const spk_sampler_options *options) {
    return (spk_sampler){ .options = *options, .state = options->seed };
}

/* splitmix64: uniform in [0, 1) with 53 bits. */
static double next_uniform(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static uint32_t argmax(const float *logits, uint32_t count) {
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++)
        if (logits[i] > logits[best] || (isnan(logits[best]) && !isnan(logits[i]))) best = i;
    return best;
}

/* Higher logit first, then lower id. */
static bool precedes(candidate a, candidate b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

static void sift_down(candidate *heap, uint32_t count, uint32_t at) {
    candidate moving = heap[at];
    for (uint32_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && precedes(heap[child + 1], heap[child])) child++;
        if (!precedes(heap[child], moving)) break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
}

/* Takes the best out of a heap of *count; it ends up behind the heap's new end. */
static candidate pop(candidate *heap, uint32_t *count) {
    candidate best = heap[0];
    heap[0] = heap[--*count];
    heap[*count] = best;
    sift_down(heap, *count, 0);
    return best;
}

/* Weight of a candidate relative to the best one. */
static double weight_of(candidate c, float best, float temperature) {
    return exp(((double)c.logit - (double)best) / (double)temperature);
}

uint32_t spk_sampler_next(spk_sampler *sampler, const float *logits, uint32_t vocab_size, void *scratch) {
    const spk_sampler_options *o = &sampler->options;
    uint32_t best = argmax(logits, vocab_size);
    if (!isfinite(logits[best])) return SPK_TOKEN_NONE;
    if (!(o->temperature > 0.0f)) return best;
    candidate *heap = scratch;
    uint32_t count = 0;
    for (uint32_t i = 0; i < vocab_size; i++)
        if (logits[i] > -INFINITY) heap[count++] = (candidate){ logits[i], i };   /* NaN fails the comparison too */
    bool is_limited = o->top_k > 0 || o->top_p < 1.0f || o->min_p > 0.0f;
    if (is_limited)
        for (uint32_t i = count / 2; i-- > 0;) sift_down(heap, count, i);

    /* top-k: the k best, now at the array's end in descending order from the back. */
    uint32_t total = count, left = count, taken_max = o->top_k && o->top_k < count ? o->top_k : count;
    double sum = 0.0;
    if (taken_max < total) {
        for (uint32_t i = 0; i < taken_max; i++) sum += weight_of(pop(heap, &left), logits[best], o->temperature);
    } else {
        for (uint32_t i = 0; i < total; i++) sum += weight_of(heap[i], logits[best], o->temperature);
    }
    /* top-p and min-p: a prefix of the descending order.  Without limits all are kept, in whatever order. */
    double kept = is_limited ? 0.0 : sum;
    uint32_t kept_count = is_limited ? 0 : total;
    while (is_limited && kept_count < taken_max && (kept_count == 0 || kept < (double)o->top_p * sum)) {
        candidate c = taken_max < total ? heap[total - 1 - kept_count] : pop(heap, &left);
        double weight = weight_of(c, logits[best], o->temperature);
        if (kept_count > 0 && weight < (double)o->min_p) break;
        kept += weight;
        kept_count++;
    }
    double draw = next_uniform(&sampler->state) * kept;
    for (uint32_t i = 0; i < kept_count; i++) {
        candidate c = heap[total - 1 - i];
        draw -= weight_of(c, logits[best], o->temperature);
        if (draw < 0.0) return c.id;
    }
    return heap[total - kept_count].id;
}
