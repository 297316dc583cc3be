/* requant/source_weights.c - a more precise file of the same model, which requantized tensors are fitted from: whether it
 * belongs to the source, and what of it is used.  See spk_convert_plan_make.
 *
 * Two files of one model have the same configuration, and the same bytes in tensors that nobody quantizes (norms,
 * biases): that is the proof.  Tensors of a quantized type prove nothing, since two quantizations of the same weights
 * differ.
 */
#include "requant/convert_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "formats/census.h"

#define COMPARE_BYTES (UINT64_C(1) << 20)        /* read from each file at a time */

/* The two files and their names in messages. */
typedef struct {
    const spk_gguf *source, *weights;
    const char     *source_path, *weights_path;
} file_pair;

/* Not mtp_layer_count: blocks that decode does not run are often left out, and are never requantized. */
static spk_status check_configs(const file_pair *files, const spk_model_config *source,
                                const spk_model_config *weights, spk_error *err) {
    char expected[SPK_FINGERPRINT_SIZE], found[SPK_FINGERPRINT_SIZE];
    (void)spk_model_fingerprint(source, expected, sizeof expected);
    (void)spk_model_fingerprint(weights, found, sizeof found);
    if (strcmp(expected, found) != 0)
        return spk_fail(err, SPK_E_MISMATCH, "%s: is another model (%s) than %s (%s)", files->weights_path, found,
                        files->source_path, expected);
    const struct { const char *what; double expected, found; } others[] = {   /* what a fingerprint leaves out */
        { "context_length", source->context_length, weights->context_length },
        { "rope.freq_base", (double)source->rope_base, (double)weights->rope_base },
        { "attention.layer_norm_rms_epsilon", (double)source->rms_eps, (double)weights->rms_eps },
        { "number of tied output heads", source->is_tied, weights->is_tied },
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i].expected < others[i].found || others[i].expected > others[i].found)
            return spk_fail(err, SPK_E_MISMATCH, "%s: is another model than %s: %s is %.9g, expected %.9g",
                            files->weights_path, files->source_path, others[i].what, others[i].found,
                            others[i].expected);
    return SPK_OK;
}

/* a and b: the tensor in the source and in the other file, of the same unquantized type and shape. */
static spk_status compare_tensor(const file_pair *files, const spk_gguf_tensor *a, const spk_gguf_tensor *b,
                                 uint8_t *buffer, spk_error *err) {
    uint8_t *a_bytes = buffer, *b_bytes = buffer + COMPARE_BYTES;
    for (uint64_t at = 0; at < a->size_bytes; at += COMPARE_BYTES) {
        uint64_t left = a->size_bytes - at, count = left < COMPARE_BYTES ? left : COMPARE_BYTES, same = 0;
        SPK_TRY(spk_gguf_read(files->source, a->part_index, a->file_offset_bytes + at, count, a_bytes, err));
        SPK_TRY(spk_gguf_read(files->weights, b->part_index, b->file_offset_bytes + at, count, b_bytes, err));
        if (memcmp(a_bytes, b_bytes, count) == 0) continue;
        while (a_bytes[same] == b_bytes[same]) same++;
        uint64_t weight = (at + same) / spk_type_find(a->type)->block_bytes;
        return spk_fail(err, SPK_E_MISMATCH,
                        "%s: tensor '%s' (%s), row %" PRIu64 ", column %" PRIu64 ": differs from %s, so it is not the "
                        "same model", spk_gguf_part_path(files->weights, b->part_index), a->name, spk_type_name(a->type),
                        weight / a->dims[0], weight % a->dims[0], spk_gguf_part_path(files->source, a->part_index));
    }
    return SPK_OK;
}

static spk_status compare_untouched(const file_pair *files, const spk_convert_plan *plan, uint8_t *buffer,
                                    spk_error *err) {
    uint64_t compared_count = 0;
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        const spk_gguf_tensor *a = spk_gguf_tensor_at(files->source, i), *b = plan->counterparts[i];
        if (spk_tensor_is_requantized(&plan->tensors[i]) || b == NULL || b->type != a->type || spk_type_find(a->type)->is_quantized)
            continue;
        SPK_TRY(compare_tensor(files, a, b, buffer, err));
        compared_count++;
    }
    if (compared_count == 0)
        return spk_fail(err, SPK_E_MISMATCH,
                        "%s: nothing shows that it is the same model as %s: no tensor has the same unquantized type in "
                        "both", files->weights_path, files->source_path);
    return SPK_OK;
}

/* Negative: a is less precise, in bits a weight; 0: as precise. */
static int compare_precision(uint32_t a, uint32_t b) {
    const spk_type_info *x = spk_type_find(a), *y = spk_type_find(b);
    uint32_t x_bits = x->block_bytes * y->block_weights, y_bits = y->block_bytes * x->block_weights;
    return (x_bits > y_bits) - (x_bits < y_bits);
}

bool spk_convert_is_fitted(const spk_convert_plan *plan, uint64_t tensor_index) {
    const spk_tensor *t = &plan->tensors[tensor_index];
    const spk_gguf_tensor *counterpart = plan->counterparts[tensor_index];
    return spk_tensor_is_requantized(t) && counterpart != NULL &&
           compare_precision(counterpart->type, t->source_type) > 0;
}

/* A worse source is refused rather than passed over: it is the wrong file, or the two are swapped. */
static spk_status choose_fitted(const file_pair *files, spk_convert_plan *plan, spk_error *err) {
    bool is_requantized = false;
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        const spk_tensor *t = &plan->tensors[i];
        const spk_gguf_tensor *counterpart = plan->counterparts[i];
        if (!spk_tensor_is_requantized(t)) continue;
        is_requantized = true;
        if (counterpart == NULL)
            return spk_fail(err, SPK_E_MISMATCH, "%s: has no tensor '%s' of the shape that it has in %s, where it is requantized",
                            files->weights_path, t->name, files->source_path);
        if (compare_precision(counterpart->type, t->source_type) < 0)
            return spk_fail(err, SPK_E_MISMATCH, "%s: tensor '%s' is %s, less precise than in %s (%s)",
                            files->weights_path, t->name, spk_type_name(counterpart->type), files->source_path,
                            spk_type_name(t->source_type));
        if (spk_convert_is_fitted(plan, i)) plan->fitted_count++;
    }
    if (is_requantized && plan->fitted_count == 0)
        return spk_fail(err, SPK_E_MISMATCH,
                        "%s: no tensor that is requantized is more precise there than in %s",
                        files->weights_path, files->source_path);
    return SPK_OK;
}

spk_status spk_convert_check_weights(const spk_convert_options *options, spk_convert_plan *plan, spk_error *err) {
    const file_pair files = { .source = options->source, .weights = options->weights,
                              .source_path = spk_gguf_part_path(options->source, 0),
                              .weights_path = spk_gguf_part_path(options->weights, 0) };
    spk_model_config config;
    SPK_TRY(spk_convert_config(options->weights, &config, err));
    SPK_TRY(check_configs(&files, &plan->config, &config, err));
    for (uint64_t i = 0; i < plan->tensor_count; i++) {      /* what decode does not read may have another shape there */
        const spk_gguf_tensor *found = spk_gguf_tensor_find(options->weights, plan->tensors[i].name);
        bool is_alike = found != NULL && memcmp(found->dims, plan->tensors[i].dims, sizeof found->dims) == 0;
        plan->counterparts[i] = is_alike ? found : NULL;
    }
    SPK_TRY(choose_fitted(&files, plan, err));
    uint8_t *buffer = malloc(2 * COMPARE_BYTES);
    if (buffer == NULL) return spk_convert_out_of_memory(options->weights, err);
    spk_status status = compare_untouched(&files, plan, buffer, err);
    free(buffer);
    return status;
}
