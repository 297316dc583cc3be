/* tests/test_sample.c - the sampler's promises. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/sample_internal.h"
#include "tests/sample_cases.h"

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

/* ---- The definition in kernels/sampling.h ---- */

static void weights_are_powers_of_two(void) {
    double worst = 0;
    for (uint32_t f = 0; f < 1u << SPK_SAMPLING_FRACTION_BITS; f += 5) {
        double exact = exp2(SPK_SAMPLING_OCTAVES - f * 0x1p-24), weight = (double)spk_sampling_weight(f);
        worst = fmax(worst, fabs(weight / exact - 1));
    }
    printf("# worst relative error of a weight: 2^%.1f\n", log2(worst));
    CHECK(worst < 0x1p-22, "error %g", worst);
    for (uint32_t octave = 0; octave < SPK_SAMPLING_OCTAVES; octave++) {
        uint64_t one = UINT64_C(1) << (SPK_SAMPLING_OCTAVES - octave), weight = spk_sampling_weight(octave << SPK_SAMPLING_FRACTION_BITS);
        CHECK(weight == one, "octave %u", octave);
    }
    CHECK(spk_sampling_distance(3, 3, 1) == 0, "the best");
    CHECK(spk_sampling_distance(3, 1, 1.5f) == 3u << SPK_SAMPLING_FRACTION_BITS, "three octaves");
    CHECK(spk_sampling_distance(39, 0, 1) == SPK_SAMPLING_NO_CANDIDATE, "too far");
    CHECK(spk_sampling_distance(39, 0x1p-18f, 1) < SPK_SAMPLING_NO_CANDIDATE, "just near enough");
}

static int by_key(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* As the definition says, over all candidates in order. */
static uint32_t plain_draw(const spk_sampler *sampler) {
    static uint64_t order[VOCAB];
    const spk_sampler_options *o = &sampler->options;
    uint32_t count = 0, kept = 0;
    uint64_t sum = 0, within = 0, run = 0;
    float best = -INFINITY;
    for (int i = 0; i < VOCAB; i++) if (logits[i] > best) best = logits[i];
    if (!isfinite(best)) return SPK_TOKEN_NONE;
    float scale = (float)fmin(1.4426950408889634 / (double)o->temperature, FLT_MAX);
    for (uint32_t i = 0; i < VOCAB; i++) {
        uint32_t distance = spk_sampling_distance(best, logits[i], scale);
        if (distance != SPK_SAMPLING_NO_CANDIDATE) order[count++] = (uint64_t)distance << 32 | i;
    }
    qsort(order, count, sizeof *order, by_key);
    if (o->top_k > 0 && o->top_k < count) count = o->top_k;
    for (uint32_t i = 0; i < count; i++) sum += spk_sampling_weight((uint32_t)(order[i] >> 32));
    uint64_t wanted = o->top_p < 1 ? spk_sampling_share((uint64_t)((double)o->top_p * 0x1p64), sum) : sum;
    while (kept == 0 || run < wanted) run += spk_sampling_weight((uint32_t)(order[kept++] >> 32));
    double farthest = o->min_p > 0 ? -log2((double)o->min_p) : INFINITY;
    for (uint32_t i = 0; i < kept && (double)(order[i] >> 32) * 0x1p-24 <= farthest; i++)
        within += spk_sampling_weight((uint32_t)(order[i] >> 32));
    uint64_t draw = spk_sampling_share(spk_sampling_random(sampler->state + SPK_SAMPLING_STATE_STEP), within), upto = 0;
    for (uint32_t i = 0;; i++) {
        upto += spk_sampling_weight((uint32_t)(order[i] >> 32));
        if (upto > draw) return (uint32_t)order[i];
    }
}

static void the_token_is_the_one_that_the_definition_names(void) {
    for (int kind = 0; kind < SAMPLE_LOGITS_COUNT; kind++)
        for (int option = 0; option < SAMPLE_OPTIONS_COUNT; option++) {
            uint32_t wrong = 0;
            for (uint64_t seed = 0; seed < 40; seed++) {
                sample_fill(kind, logits, VOCAB, seed);
                spk_sampler_options o = sample_options(option, VOCAB);
                o.seed = seed * 77 + (uint64_t)option;
                spk_sampler s = spk_sampler_start(&o);
                uint32_t expected = plain_draw(&s), token = spk_sampler_next(&s, logits, VOCAB, scratch);
                wrong += token != expected;
                CHECK(s.state == o.seed + (token == SPK_TOKEN_NONE ? 0 : SPK_SAMPLING_STATE_STEP), "one number a token");
            }
            CHECK(wrong == 0, "logits '%s', options %d: %u of 40 differ", SAMPLE_LOGITS[kind], option, wrong);
        }
}

int main(void) {
    scratch = malloc(spk_sampler_scratch_bytes(VOCAB));
    RUN(temperature_zero_takes_the_largest_and_ties_go_low);
    RUN(no_token_comes_from_logits_that_are_no_distribution);
    RUN(limits_keep_exactly_the_candidates_they_name);
    RUN(a_seed_repeats);
    RUN(weights_are_powers_of_two);
    RUN(the_token_is_the_one_that_the_definition_names);
    free(scratch);
    return CHECK_EXIT();
}
