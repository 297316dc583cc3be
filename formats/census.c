/* formats/census.c - see census.h. */
#include "formats/census.h"

void spk_census_take(const spk_tensor *tensors, uint64_t tensor_count, spk_census *out) {
    *out = (spk_census){ .requantized_count = 0 };
    for (uint64_t i = 0; i < tensor_count; i++) {
        const spk_tensor *t = &tensors[i];
        out->of[t->source_type][t->type].tensor_count++;
        out->of[t->source_type][t->type].byte_count += spk_tensor_bytes(t);
        if (spk_tensor_is_requantized(t)) out->requantized_count++;
    }
}
