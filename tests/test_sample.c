/* tests/test_sample.c - the sampler's promises. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/runtime.h"
#include "tests/check.h"

enum { VOCAB = 1000, DRAWS = 20000 };
static float logits[VOCAB];
static void *scratch;

static void fill(uint64_t seed) {
    for (int i = 0; i < VOCAB; i++) logits[i] = 4.0f * check_uniform(&seed);
}

static uint32_t draw_once(spk_sampler_options o) {
    spk_sampler s = spk_sampler_start(&o);
    return spk_sampler_next(&s, logits, VOCAB, scratch);
}

static void temperature_zero_takes_the_largest_and_ties_go_low(void) {
    fill(1);
    logits[17] = logits[900] = 10.0f;
    CHECK(draw_once((spk_sampler_options){ .top_p = 1 }) == 17, "tie");
    logits[5] = NAN;
    CHECK(draw_once((spk_sampler_options){ .top_p = 1 }) == 17, "a NaN is never chosen");
    CHECK(draw_once((spk_sampler_options){ .temperature = 1, .top_k = 1, .top_p = 1 }) == 17, "top-k 1 is greedy");
    CHECK(draw_once((spk_sampler_options){ .temperature = 1, .top_p = 0 }) == 17, "top-p 0 is greedy");
    CHECK(draw_once((spk_sampler_options){ .temperature = 1, .top_p = 1, .min_p = 1 }) == 17 ||
          draw_once((spk_sampler_options){ .temperature = 1, .top_p = 1, .min_p = 1 }) == 900, "min-p 1 keeps the best");
}

static void no_token_comes_from_logits_that_are_no_distribution(void) {
    static const float bad[] = { NAN, -INFINITY, INFINITY };
    for (size_t b = 0; b < sizeof bad / sizeof *bad; b++)
        for (int way = 0; way < 3; way++) {
            spk_sampler_options o = { .temperature = way > 0 ? 0.8f : 0, .top_k = way > 1 ? 40 : 0, .top_p = 1 };
            for (int i = 0; i < VOCAB; i++) logits[i] = bad[b];
            CHECK(draw_once(o) == SPK_TOKEN_NONE, "all %g, way %d", (double)bad[b], way);
            logits[700] = 1;
            CHECK(draw_once(o) == (bad[b] > 0 ? SPK_TOKEN_NONE : 700), "all %g but one, way %d", (double)bad[b], way);
        }
}

/* How often each token comes, against softmax restricted to `allowed`. */
static void check_frequencies(spk_sampler_options o, const unsigned char *allowed, const char *what) {
    static uint32_t seen[VOCAB];
    memset(seen, 0, sizeof seen);
    spk_sampler s = spk_sampler_start(&o);
    for (int i = 0; i < DRAWS; i++) seen[spk_sampler_next(&s, logits, VOCAB, scratch)]++;
    double sum = 0;
    for (int i = 0; i < VOCAB; i++) if (allowed[i]) sum += exp(logits[i] / (double)o.temperature);
    for (int i = 0; i < VOCAB; i++) {
        double p = allowed[i] ? exp(logits[i] / (double)o.temperature) / sum : 0;
        double expected = p * DRAWS, spread = sqrt(DRAWS * p * (1 - p));
        CHECK(allowed[i] || seen[i] == 0, "%s: token %d was not allowed", what, i);
        CHECK(fabs(seen[i] - expected) <= 5.5 * spread + 1, "%s: token %d came %u times, expected %.1f", what, i, seen[i],
              expected);
    }
}

static int by_logit(const void *a, const void *b) {
    float x = logits[*(const int *)a], y = logits[*(const int *)b];
    return x < y ? 1 : x > y ? -1 : *(const int *)a - *(const int *)b;
}

static void limits_keep_exactly_the_candidates_they_name(void) {
    static unsigned char allowed[VOCAB];
    static int order[VOCAB];
    fill(2);
    for (int i = 0; i < VOCAB; i++) order[i] = i;
    qsort(order, VOCAB, sizeof *order, by_logit);

    memset(allowed, 1, sizeof allowed);
    check_frequencies((spk_sampler_options){ .temperature = 0.7f, .top_p = 1, .seed = 3 }, allowed, "no limits");

    memset(allowed, 0, sizeof allowed);
    for (int i = 0; i < 40; i++) allowed[order[i]] = 1;
    check_frequencies((spk_sampler_options){ .temperature = 1.3f, .top_k = 40, .top_p = 1, .seed = 4 }, allowed, "top-k");

    double total = 0, kept = 0;
    memset(allowed, 0, sizeof allowed);
    for (int i = 0; i < VOCAB; i++) total += exp(logits[i]);
    for (int i = 0; i < VOCAB && kept < 0.6f * total; i++) allowed[order[i]] = 1, kept += exp(logits[order[i]]);
    check_frequencies((spk_sampler_options){ .temperature = 1, .top_p = 0.6f, .seed = 5 }, allowed, "top-p");

    memset(allowed, 0, sizeof allowed);
    for (int i = 0; i < VOCAB; i++) allowed[i] = exp(logits[i] - logits[order[0]]) >= 0.2f;
    check_frequencies((spk_sampler_options){ .temperature = 1, .top_p = 1, .min_p = 0.2f, .seed = 6 }, allowed, "min-p");
}

static void a_seed_repeats(void) {
    fill(7);
    spk_sampler_options o = { .temperature = 1, .top_p = 0.9f, .seed = 11 };
    spk_sampler a = spk_sampler_start(&o), b = spk_sampler_start(&o);
    o.seed = 12;
    spk_sampler other = spk_sampler_start(&o);
    int same = 0;
    for (int i = 0; i < 100; i++) {
        uint32_t x = spk_sampler_next(&a, logits, VOCAB, scratch);
        CHECK(x == spk_sampler_next(&b, logits, VOCAB, scratch), "draw %d", i);
        same += x == spk_sampler_next(&other, logits, VOCAB, scratch);
    }
    CHECK(same < 50, "another seed gives other tokens");
}

int main(void) {
    scratch = malloc(spk_sampler_scratch_bytes(VOCAB));
    RUN(temperature_zero_takes_the_largest_and_ties_go_low);
    RUN(no_token_comes_from_logits_that_are_no_distribution);
    RUN(limits_keep_exactly_the_candidates_they_name);
    RUN(a_seed_repeats);
    free(scratch);
    return CHECK_EXIT();
}
