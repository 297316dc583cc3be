/* requant/convert_calibration.c - requantized tensors and what calibration knows of them. */
#include "requant/convert_internal.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

#include "formats/census.h"
#include "formats/pool.h"
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

/* ---- Matrices that no inputs can have ---- */

enum { METRIC = -1 };
typedef struct {
    uint64_t tensor_index;
    int64_t  matrix_index;                   /* METRIC: not one of its moments, but what its output is weighed with */
} matrix_place;

/* Threads take matrices in order; of several bad ones the first is told. */
typedef struct {
    const spk_calibration  *calibration;
    const spk_convert_plan *plan;
    const matrix_place     *places;
    pthread_mutex_t         lock;            /* of the next three */
    uint64_t                bad_index;       /* UINT64_MAX: none yet */
    spk_status              status;
    spk_error               error;
} matrix_check;

/* The matrix itself, or only whether there is one (out NULL). */
static spk_status take_matrix(const matrix_check *check, const matrix_place *place, spk_calibration_answer *answer, float *out,
                              spk_error *err) {
    const spk_tensor *t = &check->plan->tensors[place->tensor_index];
    uint32_t layer;
    bool is_mixer;
    if (place->matrix_index != METRIC)
        return spk_calibration_moment(check->calibration, t->name, t->dims[0], spk_tensor_matrix_count(t),
                                      (uint64_t)place->matrix_index, answer, out, err);
    *answer = SPK_CALIBRATION_ABSENT;
    if (!writes_residual(&check->plan->config, t, &layer, &is_mixer)) return SPK_OK;
    return spk_calibration_metric(check->calibration, layer, is_mixer, check->plan->config.hidden_size, answer, out, err);
}

/* Taking a matrix checks it, and only the first time. */
static spk_status check_matrix(const matrix_check *check, const matrix_place *place, spk_error *err) {
    const spk_tensor *t = &check->plan->tensors[place->tensor_index];
    uint64_t size = place->matrix_index == METRIC ? check->plan->config.hidden_size : t->dims[0];
    spk_calibration_answer answer;
    SPK_TRY(take_matrix(check, place, &answer, NULL, err));
    if (answer != SPK_CALIBRATION_FOUND) return SPK_OK;
    float *matrix = malloc(size * size * sizeof *matrix);
    if (matrix == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for the moments of '%s'", t->name);
    spk_status status = take_matrix(check, place, &answer, matrix, err);
    free(matrix);
    return status;
}

static void check_matrices(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    matrix_check *check = context;
    (void)thread_index;
    for (uint64_t i = begin; i < end; i++) {
        spk_error error;
        (void)pthread_mutex_lock(&check->lock);
        bool is_needed = i < check->bad_index;
        (void)pthread_mutex_unlock(&check->lock);
        spk_status status = is_needed ? check_matrix(check, &check->places[i], &error) : SPK_OK;
        if (status == SPK_OK) continue;
        (void)pthread_mutex_lock(&check->lock);
        if (i < check->bad_index) {
            check->bad_index = i;
            check->status = status;
            check->error = error;
        }
        (void)pthread_mutex_unlock(&check->lock);
    }
}

static spk_status run_check(const spk_convert_options *options, matrix_check *check, uint64_t place_count, spk_error *err) {
    spk_pool *pool;
    SPK_TRY(spk_pool_create(options->thread_count, &pool, err));
    (void)pthread_mutex_init(&check->lock, NULL);
    spk_pool_run(pool, place_count, 1, check_matrices, check);
    (void)pthread_mutex_destroy(&check->lock);
    spk_pool_destroy(pool);
    if (check->status != SPK_OK && err != NULL) *err = check->error;
    return check->status;
}

spk_status spk_convert_check_calibration(const spk_convert_options *options, spk_convert_plan *plan, spk_error *err) {
    uint64_t place_count = 0;
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        if (!spk_convert_is_calibrated(options, &plan->tensors[i])) continue;
        SPK_TRY(check_tensor(options->calibration, plan, &plan->tensors[i], err));
        place_count += spk_tensor_matrix_count(&plan->tensors[i]) + 1;
    }
    if (place_count == 0) return SPK_OK;
    matrix_place *places = malloc(place_count * sizeof *places);
    if (places == NULL) return spk_convert_out_of_memory(options->source, err);
    place_count = 0;
    for (uint64_t i = 0; i < plan->tensor_count; i++)
        for (int64_t m = METRIC; m < (int64_t)spk_tensor_matrix_count(&plan->tensors[i]); m++)
            if (spk_convert_is_calibrated(options, &plan->tensors[i])) places[place_count++] = (matrix_place){ i, m };
    matrix_check check = { .calibration = options->calibration, .plan = plan, .places = places, .bad_index = UINT64_MAX };
    spk_status status = run_check(options, &check, place_count, err);
    free(places);
    return status;
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
