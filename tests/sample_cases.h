/* tests/sample_cases.h - logits and options that a sampler could get wrong, for test_sample.c and gpu_sample.c. */
#ifndef SPK_SAMPLE_CASES_H
#define SPK_SAMPLE_CASES_H

#include <float.h>
#include <math.h>
#include <stddef.h>

#include "runtime/runtime.h"
#include "tests/check.h"

static const char *const SAMPLE_LOGITS[] = {
    "flat", "peaked", "all equal", "one above equals", "half -inf", "NaNs among numbers", "one number, else -inf",
    "one number, else NaN", "all NaN", "all -inf", "one +inf", "huge range", "many ties", "two clusters", "one ulp apart",
    "zeros and denormals", "best is last", "as a language model's" };
enum { SAMPLE_LOGITS_COUNT = sizeof SAMPLE_LOGITS / sizeof *SAMPLE_LOGITS };

static inline float sample_logit(int kind, uint32_t i, uint32_t vocab, uint32_t odd_one, uint64_t *random) {
    float u = check_uniform(random);
    switch (kind) {
    case 0:  return u;
    case 1:  return 40.0f * u;
    case 2:  return 3.5f;
    case 3:  return i == odd_one ? 4.0f : 3.5f;
    case 4:  return i % 2 == odd_one % 2 ? 4.0f * u : -INFINITY;
    case 5:  return i % 3 == 0 ? (u > 0 ? NAN : -NAN) : 6.0f * u;
    case 6:  return i == odd_one ? -1e30f : -INFINITY;
    case 7:  return i == odd_one ? -5.0f : NAN;
    case 8:  return NAN;
    case 9:  return -INFINITY;
    case 10: return i == odd_one ? INFINITY : u;
    case 11: return u * (i % 5 == 0 ? FLT_MAX : 10.0f);
    case 12: return roundf(8.0f * u) / 4.0f;
    case 13: return (i % 100 == odd_one % 100 ? 20.0f : -20.0f) + u;
    case 14: return 16.0f - 0x1p-20f * (float)((i + odd_one) % vocab);
    case 15: return i % 3 == 0 ? 0.0f : i % 3 == 1 ? -0.0f : u * FLT_MIN;
    case 16: return i + 1 == vocab ? 9.0f : 4.0f * u;
    default: return 3.0f * u + 2.0f * check_uniform(random) + (i == odd_one ? 17.0f : i % 997 == odd_one % 997 ? 14.0f + u : 0.0f);
    }
}
static inline void sample_fill(int kind, float *logits, uint32_t vocab, uint64_t seed) {
    uint64_t random = seed;
    uint32_t odd_one = (uint32_t)(check_random(&random) % vocab);
    for (uint32_t i = 0; i < vocab; i++) logits[i] = sample_logit(kind, i, vocab, odd_one, &random);
}

enum { SAMPLE_OPTIONS_COUNT = 26 };
static inline spk_sampler_options sample_options(int index, uint32_t vocab) {
    const spk_sampler_options list[SAMPLE_OPTIONS_COUNT] = {
        { .temperature = 1, .top_p = 1 }, { .temperature = 0.7f, .top_k = 20, .top_p = 0.8f }, { .temperature = 1, .top_k = 1, .top_p = 1 },
        { .temperature = 1, .top_k = vocab, .top_p = 1 }, { .temperature = 1, .top_k = vocab - 1, .top_p = 1 },
        { .temperature = 1, .top_k = vocab + 5, .top_p = 1 }, { .temperature = 1, .top_k = UINT32_MAX, .top_p = 0.5f },
        { .temperature = 1, .top_p = 0 }, { .temperature = 1, .top_p = 1e-30f }, { .temperature = 1, .top_p = 0.95f },
        { .temperature = 1, .top_p = 0.999999f }, { .temperature = 2, .top_p = 0x1.fffffep-1f },
        { .temperature = 1, .top_p = 1, .min_p = 1 }, { .temperature = 1, .top_p = 1, .min_p = 0.05f },
        { .temperature = 1, .top_p = 1, .min_p = 1e-30f }, { .temperature = 1, .top_p = 1, .min_p = 0x1p-39f },
        { .temperature = 1e-3f, .top_p = 1 }, { .temperature = 1e-42f, .top_p = 1 }, { .temperature = 100, .top_p = 1 },
        { .temperature = 1e30f, .top_p = 0.3f }, { .temperature = FLT_MAX, .top_k = 7, .top_p = 1 },
        { .temperature = 0.6f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f }, { .temperature = 1.5f, .top_k = 300, .top_p = 0.9f },
        { .temperature = 1.2f, .top_k = 1000, .top_p = 0.99f, .min_p = 0.001f }, { .temperature = 1, .top_k = 2, .top_p = 0.5f },
        { .temperature = 0.2f, .top_p = 0.9f, .min_p = 0.5f } };
    return list[index];
}

#endif
