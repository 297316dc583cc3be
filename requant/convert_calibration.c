/* requant/convert_calibration.c - requantized tensors and what calibration knows of them. */
#include "requant/convert_internal.h"

#include <inttypes.h>
#include <stdlib.h>

#include "formats/census.h"
#include "requant/feedback.h"

bool spk_convert_is_calibrated(const spk_convert_options *options, const spk_tensor *tensor) {
    return options->calibration != NULL && spk_tensor_is_requantized(tensor) && spk_feedback_can_make(tensor->type);
}

/* Whether the tensor's output is added to the residual stream, and by which part of which layer. */
static bool writes_residual(const spk_model_config *config, const spk_tensor *tensor, uint32_t *layer, bool *is_mixer) {
    spk_role role = spk_model_role(config, tensor->name, layer);
    *is_mixer = role == SPK_ROLE_ATTN_OUT || role == SPK_ROLE_GDN_OUT;
    return *is_mixer || role == SPK_ROLE_SHARED_DOWN || role == SPK_ROLE_EXPERT_DOWN || role == SPK_ROLE_FFN_DOWN;
}

static spk_status check_tensor(const spk_calibration *calibration, spk_convert_plan *plan, const spk_tensor *t,
                               spk_error *err) {
    uint64_t matrix_count = spk_tensor_matrix_count(t);
    uint32_t layer;
    bool is_mixer;
    spk_calibration_answer answer;
    if (writes_residual(&plan->config, t, &layer, &is_mixer))
        SPK_TRY(spk_calibration_metric(calibration, layer, is_mixer, plan->config.hidden_size, &answer, NULL, err));
    for (uint64_t m = 0; m < matrix_count; m++) {
        SPK_TRY(spk_calibration_moment(calibration, t->name, t->dims[0], matrix_count, m, &answer, NULL, err));
        if (answer == SPK_CALIBRATION_ABSENT) return spk_convert_note_fallback(plan, err, "%s: no moments", t->name);
        if (answer == SPK_CALIBRATION_FEW && matrix_count == 1)
            SPK_TRY(spk_convert_note_fallback(plan, err, "%s: saw fewer inputs than it has columns", t->name));
        else if (answer == SPK_CALIBRATION_FEW)
            SPK_TRY(spk_convert_note_fallback(plan, err, "%s expert %" PRIu64 ": saw fewer inputs than it has columns",
                                              t->name, m));
    }
    return SPK_OK;
}

spk_status spk_convert_check_calibration(const spk_convert_options *options, spk_convert_plan *plan, spk_error *err) {
    for (uint64_t i = 0; i < plan->tensor_count; i++)
        if (spk_convert_is_calibrated(options, &plan->tensors[i]))
            SPK_TRY(check_tensor(options->calibration, plan, &plan->tensors[i], err));
    return SPK_OK;
}

spk_status spk_convert_quantize_calibrated(const spk_convert_options *options, const spk_convert_plan *plan,
                                           const spk_tensor *tensor, uint64_t matrix_index, const spk_quant_job *quant,
                                           spk_error *err) {
    const spk_calibration *calibration = options->calibration;
    uint64_t cols = tensor->dims[0], rows = tensor->dims[1];
    uint32_t layer;
    bool is_mixer, is_whole = quant->row_count == rows;
    spk_calibration_answer answer, metric_answer = SPK_CALIBRATION_ABSENT;
    SPK_TRY(spk_calibration_moment(calibration, tensor->name, cols, spk_tensor_matrix_count(tensor), matrix_index, &answer,
                                   NULL, err));
    if (answer != SPK_CALIBRATION_FOUND) return spk_quantize(quant, err);
    bool has_metric = is_whole && writes_residual(&plan->config, tensor, &layer, &is_mixer);
    float *moment = malloc(cols * cols * sizeof *moment);
    float *metric = has_metric ? malloc(rows * rows * sizeof *metric) : NULL;
    spk_status status = SPK_OK;
    if (moment == NULL || (has_metric && metric == NULL))
        status = spk_fail(err, SPK_E_MEMORY, "out of memory for the moments of '%s'", tensor->name);
    if (status == SPK_OK)
        status = spk_calibration_moment(calibration, tensor->name, cols, spk_tensor_matrix_count(tensor), matrix_index,
                                        &answer, moment, err);
    if (status == SPK_OK && has_metric)
        status = spk_calibration_metric(calibration, layer, is_mixer, rows, &metric_answer, metric, err);
    spk_feedback_job job = { *quant, moment, metric_answer == SPK_CALIBRATION_FOUND ? metric : NULL };
    if (status == SPK_OK) status = spk_quantize_feedback(&job, err);
    free(moment);
    free(metric);
    return status;
}
