/* formats/census.h - sums over a model's tensors: how many of each type, and which the packer requantized. */
#ifndef SPK_CENSUS_H
#define SPK_CENSUS_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/model.h"

static inline bool spk_tensor_is_requantized(const spk_tensor *tensor) { return tensor->type != tensor->source_type; }

typedef struct {
    struct { uint64_t tensor_count, byte_count; } of[SPK_TYPE_LIMIT][SPK_TYPE_LIMIT];    /* [source_type][type] */
    uint64_t requantized_count;
} spk_census;

/* Types must be below SPK_TYPE_LIMIT, as those of every file are that was opened. */
void spk_census_take(const spk_tensor *tensors, uint64_t tensor_count, spk_census *out);

#endif
