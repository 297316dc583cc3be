/* requant/resume.c - which conversion an unfinished pack belongs to.  See spk_convert_job_digest. */
#include "requant/convert_internal.h"

#include <string.h>
#include "formats/census.h"
#include "formats/version.h"

/* Field by field, since structs have padding. */
static void add_tensor(spk_digester *digester, const spk_tensor *t, uint64_t fitted_type) {
    const uint64_t numbers[] = { t->type, t->source_type, t->layout, t->section, t->dims[0], t->dims[1], t->dims[2], t->dims[3],
                                 t->offset_bytes, t->unit_stride_bytes, t->matrix_stride_bytes, fitted_type };
    spk_digester_add(digester, t->name, sizeof t->name);
    spk_digester_add(digester, numbers, sizeof numbers);
}

static spk_status add_importance(spk_digester *digester, const spk_imatrix *imatrix, const spk_tensor *t, spk_error *err) {
    for (uint64_t m = 0, count = spk_tensor_matrix_count(t); m < count; m++) {
        spk_imatrix_answer answer;
        const float *importance;
        SPK_TRY(spk_imatrix_lookup(imatrix, t->name, t->dims[0], count, m, &answer, &importance, err));
        if (importance != NULL) spk_digester_add(digester, importance, t->dims[0] * sizeof *importance);
        spk_digester_add(digester, &answer, sizeof answer);
    }
    return SPK_OK;
}

static void add_file(spk_digester *digester, const spk_gguf *file) {
    for (uint32_t part = 0; part < spk_gguf_part_count(file); part++) {
        spk_gguf_stamp stamp = spk_gguf_part_stamp(file, part);
        spk_digester_add(digester, &stamp, sizeof stamp);
    }
}

/* Of the runs and of what their records say: another name where that changes. */
static const char run_order[] = "sections in turns, notes by place";

spk_status spk_convert_job_digest(const spk_convert_job *job, spk_digest *out, spk_error *err) {
    const spk_convert_options *options = job->options;
    const spk_convert_plan *plan = job->plan;
    const uint32_t effort = options->effort;
    spk_digester *digester;
    SPK_TRY(spk_digester_create(&digester, err));
    spk_digester_add(digester, SPK_VERSION_TEXT, sizeof SPK_VERSION_TEXT);
    spk_digester_add(digester, run_order, sizeof run_order);
    spk_digester_add(digester, &effort, sizeof effort);
    add_file(digester, options->source);
    if (plan->fitted_count > 0) add_file(digester, options->weights);
    if (options->calibration != NULL) add_file(digester, spk_calibration_gguf(options->calibration));
    spk_status status = SPK_OK;
    for (uint64_t i = 0; i < plan->tensor_count && status == SPK_OK; i++) {
        const spk_tensor *t = &plan->tensors[i];
        add_tensor(digester, t, spk_convert_is_fitted(plan, i) ? plan->counterparts[i]->type + 1 : 0);
        if (options->imatrix != NULL && spk_tensor_is_requantized(t))
            status = add_importance(digester, options->imatrix, t, err);
    }
    if (status == SPK_OK) *out = spk_digester_result(digester);
    spk_digester_destroy(digester);
    return status;
}
