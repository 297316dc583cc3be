/* runtime/sample_internal.h - a sampler as the kernels take it; private to runtime/. */
#ifndef SPK_SAMPLE_INTERNAL_H
#define SPK_SAMPLE_INTERNAL_H

#include "kernels/sampling.h"
#include "runtime/runtime.h"

static inline bool spk_sampler_is_greedy(const spk_sampler *sampler) {
    return sampler == NULL || !(sampler->options.temperature > 0.0f);
}

/* Of a sampler that is not greedy. */
spk_sampling spk_sampler_plan(const spk_sampler *sampler);

#endif
