/* tests/test_calibration.c - error feedback with known answers, sums over inputs, the file of them, and files that are wrong. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/blocks.h"
#include "formats/dequant.h"
#include "formats/gguf.h"
#include "requant/calibration.h"
#include "requant/feedback.h"
#include "requant/imatrix.h"
#include "runtime/runtime.h"
#include "runtime/session_internal.h"
#include "runtime/watch.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

enum { ROWS = 24, COLS = 512 };
#define TINY36 "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf"

static char dir[GB_PATH_MAX], path[GB_PATH_MAX];
static spk_error err;

/* ---- Error feedback ---- */

typedef struct {
    float weights[ROWS * COLS], decoded[ROWS * COLS];
    float moment[COLS * COLS], metric[ROWS * ROWS];
    uint8_t blocks[ROWS * COLS / SPK_SUPERBLOCK * sizeof(spk_block_q5_k)];
} matrix;
static matrix m;

static void fill_identity(float *to, int n) {
    memset(to, 0, sizeof(float) * (size_t)(n * n));
    for (int i = 0; i < n; i++) to[i * n + i] = 1;
}

/* A sum of `count` outer products, and a little on the diagonal: symmetric and positive. */
static void fill_moment(float *to, int n, int count, uint64_t seed) {
    fill_identity(to, n);
    for (int i = 0; i < n; i++) to[i * n + i] = 0.05f;
    float *v = malloc(sizeof(float) * (size_t)n);
    for (int k = 0; k < count; k++) {
        for (int i = 0; i < n; i++) v[i] = check_uniform(&seed) + (i % 3 == 0 ? 0.5f : 0.0f);
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) to[i * n + j] += v[i] * v[j] / (float)count;
    }
    free(v);
}

static void fill_weights(uint64_t seed) {
    for (int i = 0; i < ROWS * COLS; i++)
        m.weights[i] = (check_uniform(&seed) + check_uniform(&seed) + check_uniform(&seed)) * 0.03f;
}

static void quantize(uint32_t type, bool has_feedback, bool has_metric) {
    spk_quant_job job = { .type = type, .row_count = ROWS, .col_count = COLS, .weights = m.weights, .blocks = m.blocks };
    spk_feedback_job feedback = { job, m.moment, has_metric ? m.metric : NULL };
    if (has_feedback) CHECK_OK(spk_quantize_feedback(&feedback, &err), err);
    else CHECK_OK(spk_quantize(&job, &err), err);
    spk_dequantize(type, m.blocks, ROWS * COLS, m.decoded);
}

/* trace(G E M E'); G is the identity without a metric. */
static double weighted_error(bool has_metric) {
    static double product[ROWS * COLS];
    double sum = 0;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) {
            product[r * COLS + c] = 0;
            for (int k = 0; k < COLS; k++)
                product[r * COLS + c] += (double)(m.decoded[r * COLS + k] - m.weights[r * COLS + k]) * (double)m.moment[k * COLS + c];
        }
    for (int r = 0; r < ROWS; r++)
        for (int s = 0; s < ROWS; s++)
            for (int c = 0; c < COLS && (has_metric || r == s); c++)
                sum += (has_metric ? (double)m.metric[r * ROWS + s] : 1.0) * product[r * COLS + c] *
                       (double)(m.decoded[s * COLS + c] - m.weights[s * COLS + c]);
    return sum;
}

static void feedback_lowers_the_weighted_error(void) {
    static const uint32_t types[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q5_K };
    fill_weights(1);
    fill_moment(m.moment, COLS, 300, 2);
    fill_moment(m.metric, ROWS, 4, 3);
    for (int t = 0; t < 2; t++) {
        quantize(types[t], false, false);
        double plain = weighted_error(false), plain_joint = weighted_error(true);
        quantize(types[t], true, false);
        double rows = weighted_error(false), rows_joint = weighted_error(true);
        CHECK(rows < 0.75 * plain, "%s: %g of %g", spk_type_name(types[t]), rows, plain);
        quantize(types[t], true, true);
        double joint = weighted_error(true);
        CHECK(joint < 0.7 * rows_joint && joint < 0.5 * plain_joint, "%s: joint %g, rows %g, plain %g",
              spk_type_name(types[t]), joint, rows_joint, plain_joint);
    }
}

/* Every input the same vector of ones: only the sum of a row's errors counts, and rounding some codes up and some down
 * makes it nearly nothing. */
static void inputs_that_go_together_cancel_errors(void) {
    fill_weights(4);
    for (int i = 0; i < COLS * COLS; i++) m.moment[i] = i / COLS == i % COLS ? 1.0001f : 1.0f;
    quantize(SPK_TYPE_Q4_K, false, false);
    double plain = weighted_error(false);
    quantize(SPK_TYPE_Q4_K, true, false);
    double after = weighted_error(false);
    CHECK(after < 0.01 * plain, "%g of %g", after, plain);
}

/* With the identity there is nothing to gain from other columns: the error of each row is no larger than the search's. */
static void identity_moments_lose_nothing(void) {
    fill_weights(5);
    fill_identity(m.moment, COLS);
    fill_identity(m.metric, ROWS);
    quantize(SPK_TYPE_Q4_K, false, false);
    double plain = weighted_error(false);
    quantize(SPK_TYPE_Q4_K, true, true);
    double after = weighted_error(false);
    CHECK(after <= plain * 1.000001 && after > 0.9 * plain, "%g of %g", after, plain);
}

static void weights_on_the_grid_stay(void) {
    static uint8_t before[sizeof m.blocks];
    fill_weights(6);
    fill_moment(m.moment, COLS, 100, 7);
    fill_moment(m.metric, ROWS, 3, 8);
    quantize(SPK_TYPE_Q4_K, false, false);
    memcpy(m.weights, m.decoded, sizeof m.weights);
    memcpy(before, m.blocks, sizeof before);
    quantize(SPK_TYPE_Q4_K, true, true);
    CHECK(memcmp(m.decoded, m.weights, sizeof m.weights) == 0, "weights that were exact have changed");
}

static void zeros_and_constants_are_taken(void) {
    fill_moment(m.moment, COLS, 100, 9);
    fill_moment(m.metric, ROWS, 3, 10);
    memset(m.weights, 0, sizeof m.weights);
    for (int c = 0; c < COLS; c++) m.weights[COLS + c] = 0.25f, m.weights[2 * COLS + c] = c % 2 ? 65504.0f : -65504.0f;
    quantize(SPK_TYPE_Q4_K, true, true);
    for (int i = 0; i < ROWS * COLS; i++) CHECK(isfinite(m.decoded[i]), "weight %d", i);
    for (int c = 0; c < COLS; c++) CHECK(m.decoded[3 * COLS + c] == 0, "zero %d became %g", c, (double)m.decoded[3 * COLS + c]);
}

/* ---- Sums and their file ---- */

static spk_model *model;

static gguf_build bytes_of(const char *name) {
    gguf_build b = { 0 };
    FILE *file = fopen(name, "rb");
    for (int byte; file != NULL && (byte = getc(file)) != EOF;) gb_u8(&b, (uint8_t)byte);
    if (file != NULL) (void)fclose(file);
    return b;
}

static void collect(void *context, const spk_watched *w) {
    spk_collector_add(context, w->tensor_index, w->matrix_index, w->count, w->x, w->weight);
}

static void write_stats(const char *to, uint32_t threads, uint32_t token_count) {
    spk_session *session;
    spk_watch *watch;
    spk_collector *collector;
    uint32_t tokens[256];
    uint64_t seed = 11;
    for (uint32_t t = 0; t < token_count; t++) tokens[t] = (uint32_t)(check_random(&seed) % 4096);
    spk_session_options so = { .context_tokens = 256, .batch_tokens = 64 };
    spk_collector_options co = { .config = spk_model_shape(model), .where = TINY36, .has_moments = true, .thread_count = threads };
    co.tensors = spk_model_tensors(model, &co.tensor_count);
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    CHECK_OK(spk_collector_create(&co, &collector, &err), err);
    CHECK_OK(spk_watch_start(session, collect, collector, &watch, &err), err);
    CHECK_OK(spk_session_eval(session, tokens, token_count, SPK_LOGITS_NONE, NULL, &err), err);
    spk_calibration_file file = { .path = to, .replace = true, .dataset = "a/random", .chunk_tokens = 256, .chunk_count = 1 };
    CHECK_OK(spk_collector_write(collector, &file, &err), err);
    struct stat info;
    uint64_t most = spk_collector_file_bytes(collector), size = stat(to, &info) == 0 ? (uint64_t)info.st_size : 0;
    CHECK(size <= most && most < size + size / 20, "%s has %d bytes, at most %d expected", to, (int)size, (int)most);
    spk_watch_stop(watch);
    spk_collector_destroy(collector);
    spk_session_destroy(session);
}

static void open_model(uint32_t threads) {
    spk_model_options options = { .backend = SPK_BACKEND_REF, .thread_count = threads };
    CHECK_OK(spk_model_open(TINY36, &options, &model, &err), err);
}

static void sums_do_not_depend_on_threads(void) {
    char other[GB_PATH_MAX];
    (void)gb_path(other, dir, "other.gguf");
    open_model(1);
    write_stats(path, 1, 200);
    spk_model_close(model);
    open_model(3);
    write_stats(other, 3, 200);
    spk_model_close(model);
    gguf_build a = bytes_of(path), b = bytes_of(other);
    CHECK(a.size > 100000 && a.size == b.size && memcmp(a.bytes, b.bytes, a.size) == 0, "%zu and %zu bytes", a.size, b.size);
    gb_free(&a);
    gb_free(&b);
}

/* The watch, the sums and the file against sums made here, of the shared expert's down projection; its importance is what
 * spk_imatrix reads from the same file. */
typedef struct { uint64_t tensor; double count, weight, sum2[256], moment[256][256]; } own_sums;

static void own_add(void *context, const spk_watched *w) {
    own_sums *own = context;
    if (w->tensor_index != own->tensor) return;
    for (uint32_t t = 0; t < w->count; t++) {
        own->count += 1;
        own->weight += (double)w->weight[t];
        for (int i = 0; i < 256; i++) {
            own->sum2[i] += (double)w->x[t][i] * (double)w->x[t][i];
            for (int j = 0; j < 256; j++) own->moment[i][j] += (double)w->weight[t] * (double)w->x[t][i] * (double)w->x[t][j];
        }
    }
}

static void file_holds_what_was_seen(void) {
    static own_sums own;
    static float moment[256 * 256];
    static const char name[] = "blk.3.ffn_down_shexp.weight";
    uint32_t tokens[256];
    uint64_t seed = 11, count;
    open_model(1);
    write_stats(path, 1, 256);
    const spk_tensor *tensors = spk_model_tensors(model, &count);
    for (own.tensor = 0; own.tensor < count && strcmp(tensors[own.tensor].name, name) != 0;) own.tensor++;
    for (int t = 0; t < 256; t++) tokens[t] = (uint32_t)(check_random(&seed) % 4096);
    spk_session *session;
    spk_watch *watch;
    spk_session_options so = { .context_tokens = 256, .batch_tokens = 64 };
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    CHECK_OK(spk_watch_start(session, own_add, &own, &watch, &err), err);
    CHECK_OK(spk_session_eval(session, tokens, 256, SPK_LOGITS_NONE, NULL, &err), err);
    spk_watch_stop(watch);
    spk_session_destroy(session);

    spk_calibration *calibration;
    spk_calibration_answer answer;
    CHECK_OK(spk_calibration_open(path, &calibration, &err), err);
    CHECK_OK(spk_calibration_moment(calibration, name, 256, 1, 0, &answer, moment, &err), err);
    CHECK(own.count == 256 && answer == SPK_CALIBRATION_FOUND, "%g vectors, answer %d", own.count, answer);
    double trace = 0, diagonal = 0, worst = 0;
    for (int i = 0; i < 256; i++) trace += own.moment[i][i], diagonal += (double)moment[i * 256 + i];
    CHECK(fabs(diagonal / 256 - 1) < 1e-4, "mean of the diagonal %g", diagonal / 256);
    for (int i = 0; i < 256; i++)
        for (int j = 0; j < i; j++) {
            double limit = sqrt(own.moment[i][i] * own.moment[j][j]);
            double got = (double)moment[i * 256 + j] * trace / 256 * 1.05, off = fabs(got - own.moment[i][j]) / limit;
            worst = off > worst ? off : worst;
        }
    CHECK(worst < 1e-3, "correlations are off by %g", worst);
    spk_calibration_close(calibration);

    spk_imatrix *imatrix;
    spk_imatrix_answer found;
    const float *importance;
    double sum = 0;
    for (int i = 0; i < 256; i++) sum += own.sum2[i];
    CHECK_OK(spk_imatrix_open(path, &imatrix, &err), err);
    CHECK_OK(spk_imatrix_lookup(imatrix, name, 256, 1, 0, &found, &importance, &err), err);
    for (int i = 0; i < 256 && importance != NULL; i++)
        CHECK(fabs((double)importance[i] * sum / 256 - own.sum2[i]) < 1e-4 * sum / 256, "importance of column %d", i);
    CHECK(found == SPK_IMATRIX_FOUND, "no importance");
    spk_imatrix_close(imatrix);
    spk_model_close(model);
}

/* Weights of the shared expert's and of the routed experts' inputs against the session's own figures after the layer. */
typedef struct { uint64_t shared, routed; float weight[64]; double routed_sum; uint32_t count; } seen_weights;

static void keep_weights(void *context, const spk_watched *w) {
    seen_weights *seen = context;
    if (w->tensor_index == seen->shared) memcpy(seen->weight, w->weight, w->count * sizeof(float)), seen->count = w->count;
    for (uint32_t t = 0; t < w->count && w->tensor_index == seen->routed; t++) seen->routed_sum += (double)w->weight[t];
}

static void check_weights(spk_session *session, uint32_t layer, uint32_t token_count, void *context) {
    seen_weights *seen = context;
    const spk_model_config *c = &session->model->config;
    double routed = 0;
    if (layer != 3) return;
    CHECK(seen->count == token_count, "%u weights of %u tokens", seen->count, token_count);
    for (uint32_t t = 0; t < token_count; t++) {
        double sum = 0, gate = 1 / (1 + exp(-(double)session->s.router[t * (c->expert_count + 1) + c->expert_count]));
        for (uint32_t i = 0; i < c->hidden_size; i++) {
            double x = (double)session->s.x[t * c->hidden_size + i] + (double)session->s.delta[t * c->hidden_size + i];
            sum += x * x / c->hidden_size;
        }
        double want = gate * gate / sum, got = (double)seen->weight[t];
        CHECK(fabs(got - want) < 1e-3 * want, "token %u: %g, expected %g", t, got, want);
        for (uint32_t k = 0; k < c->expert_used_count; k++)
            routed += pow((double)session->s.expert_weight[t * c->expert_used_count + k], 2) / sum;
    }
    CHECK(fabs(seen->routed_sum - routed) < 1e-3 * routed, "experts: %g, expected %g", seen->routed_sum, routed);
}

static void inputs_weigh_what_their_outputs_do(void) {
    uint64_t count;
    uint32_t tokens[40];
    seen_weights seen = { .count = 0 };
    spk_session *session;
    spk_watch *watch;
    open_model(1);
    const spk_tensor *tensors = spk_model_tensors(model, &count);
    for (uint64_t i = 0; i < count; i++) {
        if (strcmp(tensors[i].name, "blk.3.ffn_down_shexp.weight") == 0) seen.shared = i;
        if (strcmp(tensors[i].name, "blk.3.ffn_down_exps.weight") == 0) seen.routed = i;
    }
    for (uint32_t t = 0; t < 40; t++) tokens[t] = 100 + 7 * t;
    spk_session_options so = { .context_tokens = 64, .batch_tokens = 64 };
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    CHECK_OK(spk_watch_start(session, keep_weights, &seen, &watch, &err), err);
    session->observe = check_weights;
    session->observe_context = &seen;
    CHECK_OK(spk_session_eval(session, tokens, 40, SPK_LOGITS_NONE, NULL, &err), err);
    CHECK(seen.count == 40, "nothing was seen");
    spk_watch_stop(watch);
    spk_session_destroy(session);
    spk_model_close(model);
}

/* 64 tokens: no expert sees as many as its 256 columns. */
static void experts_seen_too_rarely_say_so(void) {
    spk_calibration *calibration;
    spk_calibration_answer answer;
    open_model(1);
    write_stats(path, 1, 64);
    CHECK_OK(spk_calibration_open(path, &calibration, &err), err);
    CHECK_OK(spk_calibration_moment(calibration, "blk.0.ffn_down_exps.weight", 256, 8, 5, &answer, NULL, &err), err);
    CHECK(answer == SPK_CALIBRATION_FEW, "answer %d", answer);
    CHECK_OK(spk_calibration_moment(calibration, "blk.0.ffn_gate_exps.weight", 256, 8, 0, &answer, NULL, &err), err);
    CHECK(answer == SPK_CALIBRATION_ABSENT, "gate: answer %d", answer);
    CHECK(spk_calibration_moment(calibration, "blk.0.ffn_down_exps.weight", 512, 8, 0, &answer, NULL, &err) == SPK_E_MISMATCH,
          "another width");
    CHECK(spk_calibration_moment(calibration, "blk.0.ffn_down_exps.weight", 256, 9, 0, &answer, NULL, &err) == SPK_E_MISMATCH,
          "another number of experts");
    spk_calibration_close(calibration);
    spk_model_close(model);
}

static void metric_weighs_what_routers_read(void) {
    float metric[16], rows[8] = { 1, -1, 0, 0, 0, 0, 2, 0 };
    spk_metric_begin(metric, 4);
    spk_metric_add_router(metric, 4, rows, 1, 0);
    spk_metric_end(metric, 4);
    CHECK(fabsf(metric[0] - 1.3f) < 1e-6f && fabsf(metric[1] + 0.6f) < 1e-6f && fabsf(metric[10] - 0.7f) < 1e-6f, "%g %g %g",
          (double)metric[0], (double)metric[1], (double)metric[10]);
    spk_metric_begin(metric, 4);
    spk_metric_end(metric, 4);
    CHECK(metric[0] == 1 && metric[1] == 0, "without routers");
}

/* ---- Files that are wrong ---- */

enum { N = 4, TRIANGLE = 6 };
typedef struct {
    const char *scale_name;
    uint32_t    scale_type, moment_type;
    uint64_t    scale_dims[2], moment_dims[2], counts;
    float       scale, correlation;
    spk_status  at_open, at_lookup;
    const char *says;
} wrong_file;

static void put_file(const wrong_file *f) {
    gguf_build b = { 0 };
    gb_header(&b, 3, f->counts > 0 ? 3 : 2, 1);
    gb_kv_string(&b, "general.type", "imatrix");
    gb_tensor(&b, f->scale_name, f->scale_type, 0, GB_DIMS(f->scale_dims[0], f->scale_dims[1]));
    gb_tensor(&b, "a.in_moment", f->moment_type, 32, GB_DIMS(f->moment_dims[0], f->moment_dims[1]));
    if (f->counts > 0) gb_tensor(&b, "a.counts", SPK_TYPE_F32, 64, GB_DIMS(1, f->counts));
    gb_pad(&b, 32);
    size_t data = b.size;
    for (int i = 0; i < 8; i++) gb_raw(&b, &f->scale, sizeof f->scale);      /* every tensor has 32 bytes with its padding */
    uint16_t half = spk_f32_to_f16(f->correlation);
    for (int i = 0; i < 16; i++) gb_raw(&b, &half, sizeof half);
    float count = 1000;
    while (b.size < data + (f->counts > 0 ? 96 : 64)) gb_raw(&b, &count, sizeof count);
    gb_save(&b, path);
    gb_free(&b);
}

static void wrong_files_are_refused(void) {
    const uint32_t f32 = SPK_TYPE_F32, f16 = SPK_TYPE_F16;
    const wrong_file files[] = {
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, 1, 0.5f, SPK_OK, SPK_OK, "" },
        { "a.other", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, 1, 0.5f, SPK_E_CORRUPT, SPK_OK, "has no partner" },
        { "a.in_scale", f16, f16, { N, 1 }, { TRIANGLE, 1 }, 1, 1, 0.5f, SPK_E_CORRUPT, SPK_OK, "expected F32 scales" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE + 1, 1 }, 1, 1, 0.5f, SPK_E_CORRUPT, SPK_OK, "is not the triangle" },
        { "a.in_scale", f32, f16, { N, 2 }, { TRIANGLE, 1 }, 2, 1, 0.5f, SPK_E_CORRUPT, SPK_OK, "is not the triangle" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 0, 1, 0.5f, SPK_E_CORRUPT, SPK_OK, "a count (F32) of each matrix" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 2, 1, 0.5f, SPK_E_CORRUPT, SPK_OK, "a count (F32) of each matrix" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, -1, 0.5f, SPK_OK, SPK_E_CORRUPT, "a scale is negative" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, NAN, 0.5f, SPK_OK, SPK_E_CORRUPT, "not finite" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, 1, 1.5f, SPK_OK, SPK_E_CORRUPT, "between -1 and 1" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, 1, NAN, SPK_OK, SPK_E_CORRUPT, "between -1 and 1" },
        /* Four inputs of which each two are opposed: -1/3 is as far as that can go, and a twentieth is added to the diagonal. */
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, 7, -0.33f, SPK_OK, SPK_OK, "" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, 7, -0.36f, SPK_OK, SPK_E_CORRUPT, "'a.in_moment', row 3: no inputs" },
        { "a.in_scale", f32, f16, { N, 1 }, { TRIANGLE, 1 }, 1, 7, -0.9f, SPK_OK, SPK_E_CORRUPT, "'a.in_moment', row 2: no inputs" },
        { "a.in_scale", f32, f16, { N, 2 }, { TRIANGLE, 2 }, 2, 7, -0.36f, SPK_OK, SPK_E_CORRUPT, "'a.in_moment', expert 1, row 3: no" },
    };
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        spk_calibration *calibration = NULL;
        spk_calibration_answer answer;
        float moment[N * N];
        uint64_t matrix_count = files[i].scale_dims[1];
        put_file(&files[i]);
        spk_status status = spk_calibration_open(path, &calibration, &err);
        CHECK(status == files[i].at_open, "file %zu: %s: %s", i, spk_status_name(status), status ? err.text : "");
        if (status == SPK_OK)
            status = spk_calibration_moment(calibration, "a", N, matrix_count, matrix_count - 1, &answer, moment, &err);
        if (files[i].at_open == SPK_OK)
            CHECK(status == files[i].at_lookup, "file %zu: %s at lookup", i, spk_status_name(status));
        CHECK(status == SPK_OK || (strstr(err.text, files[i].says) && strstr(err.text, path) && !strchr(err.text, '\n')),
              "file %zu: %s", i, err.text);
        spk_calibration_close(calibration);
    }
}

/* Three inputs that are nearly the same and outweigh all others.  Their correlations are rounded in F16 to 1, 1 and 1 - 2^-11, which
 * 1 - 2^-12, 1 - 2^-12 and 1 - 2^-11 may be: vectors that exist, but not with the rounded ones, for which the damping of so many
 * columns is too small. */
static void rounding_is_no_reason_to_refuse(void) {
    enum { COUNT = 1024 };
    static float moment[COUNT * COUNT];
    gguf_build b = { 0 };
    gb_header(&b, 3, 3, 1);
    gb_kv_string(&b, "general.type", "imatrix");
    gb_tensor(&b, "a.counts", SPK_TYPE_F32, 0, GB_DIMS(1, 1));
    gb_tensor(&b, "a.in_scale", SPK_TYPE_F32, 32, GB_DIMS(COUNT, 1));
    gb_tensor(&b, "a.in_moment", SPK_TYPE_F16, 32 + COUNT * sizeof(float), GB_DIMS(COUNT * (COUNT - 1) / 2, 1));
    gb_pad(&b, 32);
    float count = 2000, large = 1, small = 1e-3f;
    gb_raw(&b, &count, sizeof count);
    gb_pad(&b, 32);
    for (int i = 0; i < COUNT; i++) gb_raw(&b, i < 3 ? &large : &small, sizeof large);
    for (int i = 0; i < COUNT * (COUNT - 1) / 2; i++) {
        uint16_t half = spk_f32_to_f16(i < 2 ? 1 : i == 2 ? 1 - 0x1p-11f : 0);
        gb_raw(&b, &half, sizeof half);
    }
    gb_save(&b, path);
    gb_free(&b);
    spk_calibration *calibration = NULL;
    spk_calibration_answer answer = SPK_CALIBRATION_ABSENT;
    CHECK_OK(spk_calibration_open(path, &calibration, &err), err);
    CHECK_OK(spk_calibration_moment(calibration, "a", COUNT, 1, 0, &answer, moment, &err), err);
    CHECK(answer == SPK_CALIBRATION_FOUND, "answer %d", answer);
    spk_calibration_close(calibration);
}

static void an_imatrix_alone_is_refused(void) {
    spk_calibration *calibration = NULL;
    CHECK(spk_calibration_open("tests/models/tiny-qwen36.imatrix.gguf", &calibration, &err) == SPK_E_MISMATCH, "opened");
    CHECK(strstr(err.text, "has no moments") != NULL && calibration == NULL, "%s", err.text);
}

int main(void) {
    gb_make_dir(dir);
    (void)gb_path(path, dir, "stats.gguf");
    RUN(feedback_lowers_the_weighted_error);
    RUN(inputs_that_go_together_cancel_errors);
    RUN(identity_moments_lose_nothing);
    RUN(weights_on_the_grid_stay);
    RUN(zeros_and_constants_are_taken);
    RUN(sums_do_not_depend_on_threads);
    RUN(file_holds_what_was_seen);
    RUN(inputs_weigh_what_their_outputs_do);
    RUN(experts_seen_too_rarely_say_so);
    RUN(metric_weighs_what_routers_read);
    RUN(wrong_files_are_refused);
    RUN(rounding_is_no_reason_to_refuse);
    RUN(an_imatrix_alone_is_refused);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
