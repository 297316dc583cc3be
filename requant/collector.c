/* requant/collector.c - sums over the inputs of matrices, and the file of them.  See calibration.h.
 *
 * Elements of a sum are added in the order of the vectors, whoever adds them: rows of a moment are shared out over threads.
 * Of one call the sum is made first, so that a float holds many thousand vectors.
 */
#include "requant/calibration.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/blocks.h"
#include "formats/gguf.h"
#include "formats/outfile.h"
#include "formats/pool.h"
#include "requant/calibration_internal.h"

enum { ROWS_PER_PIECE = 16 };
#define ALONE_PRODUCTS_MAX (UINT64_C(1) << 22)     /* an addition of so few is not worth waking other threads */

/* Sums of one tensor.  A tensor that reads what another reads has none of its own. */
typedef struct {
    const spk_tensor *tensor;      /* NULL: not collected */
    uint64_t          owner;       /* index of the tensor whose sums these are */
    uint64_t          cols, matrix_count;
    double           *sum2, *weight_sum;   /* [matrix][cols], [matrix] */
    uint64_t         *count;               /* [matrix] */
    float            *moment;              /* [matrix][cols (cols + 1) / 2], diagonal included; or NULL */
} sums;

struct spk_collector {
    spk_collector_options options;
    spk_pool *pool;
    sums     *of;                  /* [tensor_count] */
    float   **metric;              /* [2 * layer_count]: mixer, ffn */
    float    *row_scratch;         /* [thread][cols] */
    uint64_t  cols_max, bytes;
};

/* The role of the first matrix that reads the same vectors. */
static spk_role first_reader(spk_role role) {
    switch (role) {
    case SPK_ROLE_GDN_GATE: return SPK_ROLE_GDN_QKV;
    case SPK_ROLE_ATTN_K: case SPK_ROLE_ATTN_V: return SPK_ROLE_ATTN_Q;
    case SPK_ROLE_SHARED_UP: return SPK_ROLE_SHARED_GATE;
    case SPK_ROLE_EXPERT_UP: return SPK_ROLE_EXPERT_GATE;
    case SPK_ROLE_FFN_UP: return SPK_ROLE_FFN_GATE;
    default: return role;
    }
}

/* Gate and up of experts have as many columns as the model is wide, and there are many: their moments would fill memory. */
static bool wants_moment(const spk_collector *c, spk_role role, uint64_t cols) {
    return c->options.has_moments && role != SPK_ROLE_EXPERT_GATE && role != SPK_ROLE_EXPERT_UP &&
           cols <= SPK_CALIBRATION_COLS_MAX;
}

static bool allocate_sums(spk_collector *c, sums *s, spk_role role) {
    uint64_t values = s->cols * s->matrix_count, triangle = spk_triangle_count(s->cols + 1);
    s->sum2 = calloc(values, sizeof *s->sum2);
    s->weight_sum = calloc(s->matrix_count, sizeof *s->weight_sum);
    s->count = calloc(s->matrix_count, sizeof *s->count);
    c->bytes += values * sizeof *s->sum2;
    if (!wants_moment(c, role, s->cols)) return s->sum2 && s->weight_sum && s->count;
    s->moment = calloc(triangle * s->matrix_count, sizeof *s->moment);
    c->bytes += triangle * s->matrix_count * sizeof *s->moment;
    return s->sum2 && s->weight_sum && s->count && s->moment;
}

static bool is_collected(const spk_collector *c, const spk_tensor *t, spk_role role) {
    if (role == SPK_ROLE_EXTRA || spk_role_is_protected(role)) return false;
    if (role == SPK_ROLE_TOKEN_EMBD && !c->options.config->is_tied) return false;
    return t->dim_count >= 2;
}

static bool fill_sums(spk_collector *c) {
    const spk_collector_options *o = &c->options;
    for (uint64_t i = 0; i < o->tensor_count; i++) {
        const spk_tensor *t = &o->tensors[i];
        uint32_t layer, other_layer;
        spk_role role = spk_model_role(o->config, t->name, &layer), first = first_reader(role);
        if (!is_collected(c, t, role)) continue;
        sums *s = &c->of[i];
        *s = (sums){ .tensor = t, .owner = i, .cols = t->dims[0], .matrix_count = spk_tensor_matrix_count(t) };
        for (uint64_t k = 0; k < o->tensor_count && first != role; k++)
            if (spk_model_role(o->config, o->tensors[k].name, &other_layer) == first && other_layer == layer) s->owner = k;
        if (s->cols > c->cols_max) c->cols_max = s->cols;
        if (s->owner == i && !allocate_sums(c, s, role)) return false;
    }
    return true;
}

spk_status spk_collector_create(const spk_collector_options *options, spk_collector **out, spk_error *err) {
    spk_collector *c = calloc(1, sizeof *c);
    if (c == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for sums");
    c->options = *options;
    spk_status status = spk_pool_create(options->thread_count, &c->pool, err);
    if (status == SPK_OK) {
        c->of = calloc(options->tensor_count + 1, sizeof *c->of);
        c->metric = calloc(2 * (uint64_t)options->config->layer_count + 1, sizeof *c->metric);
        bool has_memory = c->of != NULL && c->metric != NULL && fill_sums(c);
        if (has_memory) {
            uint64_t floats = (c->cols_max + 1) * spk_pool_thread_count(c->pool);
            has_memory = (c->row_scratch = malloc(floats * sizeof(float))) != NULL;
        }
        if (!has_memory)
            status = spk_fail(err, SPK_E_MEMORY, "out of memory for sums: %" PRIu64 " bytes so far", c->bytes);
    }
    if (status == SPK_OK) *out = c;
    else spk_collector_destroy(c);
    return status;
}

void spk_collector_destroy(spk_collector *c) {
    if (c == NULL) return;
    for (uint64_t i = 0; c->of != NULL && i < c->options.tensor_count; i++) {
        free(c->of[i].sum2);
        free(c->of[i].weight_sum);
        free(c->of[i].count);
        free(c->of[i].moment);
    }
    for (uint64_t i = 0; c->metric != NULL && i < 2 * (uint64_t)c->options.config->layer_count; i++) free(c->metric[i]);
    free(c->of);
    free(c->metric);
    free(c->row_scratch);
    spk_pool_destroy(c->pool);
    free(c);
}

uint64_t spk_collector_bytes(const spk_collector *c) { return c->bytes; }

/* ---- Adding ---- */

typedef struct {
    spk_collector      *collector;
    float              *moment;
    uint64_t            cols;
    uint32_t            count;
    const float *const *x;
    const float        *weight;
} addition;

static void add_rows(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const addition *a = context;
    float *row = a->collector->row_scratch + thread_index * (a->collector->cols_max + 1);
    for (uint64_t i = begin; i < end; i++) {
        memset(row, 0, (i + 1) * sizeof *row);
        for (uint32_t t = 0; t < a->count; t++) {
            const float *x = a->x[t], factor = a->weight[t] * x[i];
            for (uint64_t j = 0; j <= i; j++) row[j] += factor * x[j];
        }
        float *to = a->moment + spk_triangle_count(i + 1);
        for (uint64_t j = 0; j <= i; j++) to[j] += row[j];
    }
}

void spk_collector_add(spk_collector *c, uint64_t tensor_index, uint64_t matrix_index, uint32_t count,
                       const float *const *x, const float *weight) {
    sums *s = &c->of[tensor_index];
    if (s->tensor == NULL || s->owner != tensor_index) return;
    assert(matrix_index < s->matrix_count);
    double *sum2 = s->sum2 + matrix_index * s->cols;
    for (uint32_t t = 0; t < count; t++) {
        for (uint64_t i = 0; i < s->cols; i++) sum2[i] += (double)x[t][i] * (double)x[t][i];
        s->weight_sum[matrix_index] += (double)weight[t];
    }
    s->count[matrix_index] += count;
    if (s->moment == NULL) return;
    addition a = { c, s->moment + matrix_index * spk_triangle_count(s->cols + 1), s->cols, count, x, weight };
    if (count * spk_triangle_count(s->cols + 1) <= ALONE_PRODUCTS_MAX) add_rows(&a, 0, s->cols, 0);
    else spk_pool_run(c->pool, s->cols, ROWS_PER_PIECE, add_rows, &a);
}

uint64_t spk_collector_few_count(const spk_collector *c, uint64_t tensor_index) {
    const sums *s = &c->of[c->of[tensor_index].owner];
    uint64_t few = 0;
    if (c->of[tensor_index].tensor == NULL || s->moment == NULL) return 0;
    for (uint64_t m = 0; m < s->matrix_count; m++) few += s->count[m] < s->cols;
    return few;
}

/* ---- Metrics ---- */

/* Shares of the diagonal: of errors as such, and of errors that routers see, each router less than the one before.
 * Found by trial, requant/NOTES.md. */
#define METRIC_PLAIN_SHARE 0.7
#define METRIC_DISTANCE_FACTOR 0.2

void spk_metric_begin(float *metric, uint64_t hidden) { memset(metric, 0, hidden * hidden * sizeof *metric); }

void spk_metric_add_router(float *metric, uint64_t hidden, const float *rows, uint64_t row_count, uint32_t distance) {
    float factor = (float)pow(METRIC_DISTANCE_FACTOR, distance);
    for (uint64_t r = 0; r < row_count; r++)
        for (uint64_t i = 0; i < hidden; i++) {
            const float *row = rows + r * hidden, scaled = factor * row[i];
            for (uint64_t j = 0; j < hidden; j++) metric[i * hidden + j] += scaled * row[j];
        }
}

void spk_metric_end(float *metric, uint64_t hidden) {
    double trace = 0;
    for (uint64_t i = 0; i < hidden; i++) trace += (double)metric[i * hidden + i];
    bool has_routers = trace > 0 && isfinite(trace);
    float factor = has_routers ? (float)((1 - METRIC_PLAIN_SHARE) * (double)hidden / trace) : 0.0f;
    for (uint64_t i = 0; i < hidden * hidden; i++) metric[i] = has_routers ? metric[i] * factor : 0.0f;
    for (uint64_t i = 0; i < hidden; i++) metric[i * hidden + i] += has_routers ? (float)METRIC_PLAIN_SHARE : 1.0f;
}

spk_status spk_collector_set_metric(spk_collector *c, uint32_t layer, bool is_mixer, const float *metric,
                                    spk_error *err) {
    uint64_t hidden = c->options.config->hidden_size;
    float **slot = &c->metric[2 * (uint64_t)layer + (is_mixer ? 0 : 1)];
    assert(layer < c->options.config->layer_count && *slot == NULL);
    *slot = malloc(hidden * hidden * sizeof(float));
    if (*slot == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for a metric of layer %" PRIu32, layer);
    memcpy(*slot, metric, hidden * hidden * sizeof(float));
    return SPK_OK;
}

/* ---- The file ---- */

typedef struct {
    const spk_collector  *collector;
    spk_gguf_tensor_spec *specs;   /* NULL while they are counted */
    uint64_t              spec_count, data_bytes;
    spk_gguf_writer      *writer;  /* NULL while specs are made */
    spk_error            *err;
    spk_status            status;
} output;

/* The next tensor of the file: its spec in the first passes, its bytes in the last. */
static void put(output *o, const char *base, const char *suffix, uint32_t type, uint64_t cols, uint64_t rows,
                const void *bytes) {
    if (o->status != SPK_OK) return;
    uint64_t size = cols * rows * (type == SPK_TYPE_F16 ? 2 : sizeof(float));
    if (o->writer != NULL) {
        o->status = spk_gguf_writer_append(o->writer, bytes, size, o->err);
        return;
    }
    if (o->specs != NULL) {
        spk_gguf_tensor_spec *spec = &o->specs[o->spec_count];
        *spec = (spk_gguf_tensor_spec){ .type = type, .dim_count = 2, .dims = { cols, rows, 1, 1 } };
        if (snprintf(spec->name, sizeof spec->name, "%s%s", base, suffix) >= (int)sizeof spec->name)
            o->status = spk_fail(o->err, SPK_E_LIMIT, "%s: '%s%s' is longer than the name of a tensor may be",
                                 o->collector->options.where, base, suffix);
    }
    o->data_bytes += size;
    o->spec_count++;
}

/* One matrix of a symmetric one [n][n] given by `at`: scales, and correlations below the diagonal. */
static void split(const float *triangle, uint64_t n, double weight_sum, float *scale, uint16_t *correlation) {
    double inverse = weight_sum > 0 ? 1 / weight_sum : 0;
    for (uint64_t i = 0; i < n; i++)
        scale[i] = (float)sqrt((double)triangle[spk_triangle_count(i + 1) + i] * inverse);
    for (uint64_t i = 1; i < n; i++)
        for (uint64_t j = 0; j < i; j++) {
            double product = (double)scale[i] * (double)scale[j];
            double c = product > 0 ? (double)triangle[spk_triangle_count(i + 1) + j] * inverse / product : 0;
            c = c > 1 ? 1 : c < -1 ? -1 : c;
            correlation[spk_triangle_count(i) + j] = spk_f32_to_f16((float)c);
        }
}

static void put_sums(output *o, const sums *s, const char *name) {
    uint64_t n = s->cols, triangle = spk_triangle_count(n), values = n * s->matrix_count;
    bool is_last_pass = o->writer != NULL;
    float *floats = is_last_pass ? malloc((values + s->matrix_count) * sizeof *floats) : NULL;
    float *scale = is_last_pass && s->moment ? malloc(values * sizeof *scale) : NULL;
    uint16_t *correlation = is_last_pass && s->moment ? malloc((triangle * s->matrix_count + 1) * sizeof *correlation) : NULL;
    if (is_last_pass && (floats == NULL || (s->moment && (scale == NULL || correlation == NULL))))
        o->status = spk_fail(o->err, SPK_E_MEMORY, "out of memory to write '%s'", name);
    if (is_last_pass && o->status == SPK_OK) {
        for (uint64_t i = 0; i < values; i++) floats[i] = (float)s->sum2[i];
        for (uint64_t i = 0; i < values && o->status == SPK_OK; i++)
            if (!isfinite(floats[i]))
                o->status = spk_fail(o->err, SPK_E_NONFINITE, "%s: '%s': inputs of column %" PRIu64 " are NaN, infinite or too large",
                                     o->collector->options.where, name, i % n);
        for (uint64_t m = 0; m < s->matrix_count; m++) {
            floats[values + m] = (float)s->count[m];
            if (s->moment != NULL)
                split(s->moment + m * spk_triangle_count(n + 1), n, s->weight_sum[m], scale + m * n, correlation + m * triangle);
        }
    }
    put(o, name, SPK_CALIBRATION_SUM2, SPK_TYPE_F32, n, s->matrix_count, floats);
    put(o, name, SPK_CALIBRATION_COUNTS, SPK_TYPE_F32, 1, s->matrix_count, floats == NULL ? NULL : floats + values);
    if (s->moment != NULL && n > 1) {
        put(o, name, SPK_CALIBRATION_SCALE, SPK_TYPE_F32, n, s->matrix_count, scale);
        put(o, name, SPK_CALIBRATION_MOMENT, SPK_TYPE_F16, triangle, s->matrix_count, correlation);
    }
    free(floats);
    free(scale);
    free(correlation);
}

static void put_metric(output *o, const float *metric, uint64_t n, uint32_t layer, bool is_mixer) {
    char base[64];
    (void)snprintf(base, sizeof base, SPK_CALIBRATION_METRIC_BASE, layer, is_mixer ? "attn" : "ffn");
    uint64_t triangle = spk_triangle_count(n);
    bool is_last_pass = o->writer != NULL;
    float *full = is_last_pass ? malloc((spk_triangle_count(n + 1) + n) * sizeof *full) : NULL;
    uint16_t *correlation = is_last_pass ? malloc((triangle + 1) * sizeof *correlation) : NULL;
    if (is_last_pass && (full == NULL || correlation == NULL))
        o->status = spk_fail(o->err, SPK_E_MEMORY, "out of memory to write '%s'", base);
    float *scale = full == NULL ? NULL : full + spk_triangle_count(n + 1);
    if (is_last_pass && o->status == SPK_OK) {
        for (uint64_t i = 0; i < n; i++)
            memcpy(full + spk_triangle_count(i + 1), metric + i * n, (i + 1) * sizeof *full);
        split(full, n, 1, scale, correlation);
    }
    put(o, base, SPK_CALIBRATION_METRIC_SCALE, SPK_TYPE_F32, n, 1, scale);
    put(o, base, SPK_CALIBRATION_METRIC, SPK_TYPE_F16, triangle, 1, correlation);
    free(full);
    free(correlation);
}

static void put_all(output *o) {
    const spk_collector *c = o->collector;
    for (uint64_t i = 0; i < c->options.tensor_count && o->status == SPK_OK; i++)
        if (c->of[i].tensor != NULL) put_sums(o, &c->of[c->of[i].owner], c->of[i].tensor->name);
    for (uint32_t k = 0; k < 2 * c->options.config->layer_count && o->status == SPK_OK; k++)
        if (c->metric[k] != NULL && c->options.config->hidden_size > 1)
            put_metric(o, c->metric[k], c->options.config->hidden_size, k / 2, k % 2 == 0);
}

/* Metadata as llama.cpp's imatrix files have it: entries one after another, as formats/kv.h describes them. */
typedef struct { uint8_t bytes[1024]; uint64_t size, count; } metadata;

static void add_bytes(metadata *m, const void *bytes, uint64_t size) {
    assert(m->size + size <= sizeof m->bytes);
    memcpy(m->bytes + m->size, bytes, size);
    m->size += size;
}
static void add_u32(metadata *m, uint32_t value) { add_bytes(m, &value, sizeof value); }
static void add_string(metadata *m, const char *text, uint64_t size) {
    add_bytes(m, &size, sizeof size);
    add_bytes(m, text, size);
}
static void add_key(metadata *m, const char *key, uint32_t type) {
    add_string(m, key, strlen(key));
    add_u32(m, type);
    m->count++;
}

enum { DATASET_BYTES_MAX = 512, ALIGNMENT = 32 };
/* Of a tensor, besides its data: its padding, and its info, which has a name, counts and dimensions. */
enum { TENSOR_BYTES_MAX = ALIGNMENT + sizeof(spk_gguf_tensor_spec) + 2 * sizeof(uint64_t) };

static void make_metadata(metadata *m, const spk_calibration_file *file) {
    const char *slash = strrchr(file->dataset, '/'), *name = slash == NULL ? file->dataset : slash + 1;
    uint64_t one = 1, size = strlen(name);
    add_key(m, "general.type", SPK_KV_STRING);
    add_string(m, "imatrix", strlen("imatrix"));
    add_key(m, "imatrix.datasets", SPK_KV_ARRAY);
    add_u32(m, SPK_KV_STRING);
    add_bytes(m, &one, sizeof one);
    add_string(m, name, size < DATASET_BYTES_MAX ? size : DATASET_BYTES_MAX);
    add_key(m, "imatrix.chunk_count", SPK_KV_U32);
    add_u32(m, file->chunk_count);
    add_key(m, "imatrix.chunk_size", SPK_KV_U32);
    add_u32(m, file->chunk_tokens);
}

uint64_t spk_collector_file_bytes(const spk_collector *c) {
    output o = { .collector = c };
    put_all(&o);
    return sizeof(metadata) + o.spec_count * TENSOR_BYTES_MAX + o.data_bytes;
}

spk_status spk_collector_write(const spk_collector *c, const spk_calibration_file *file, spk_error *err) {
    output o = { .collector = c, .err = err };
    metadata meta = { .size = 0 };
    make_metadata(&meta, file);
    put_all(&o);
    o.specs = calloc(o.spec_count + 1, sizeof *o.specs);
    if (o.specs == NULL)
        o.status = spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " tensors", file->path, o.spec_count);
    o.spec_count = 0;
    put_all(&o);
    spk_gguf_writer_options options = { .path = file->path, .replace = file->replace, .file = file->file, .version = 3,
                                        .alignment_bytes = ALIGNMENT, .kv_bytes = meta.bytes, .kv_bytes_size = meta.size,
                                        .kv_count = meta.count, .tensors = o.specs, .tensor_count = o.spec_count };
    if (o.status == SPK_OK) o.status = spk_gguf_writer_begin(&options, &o.writer, err);
    else spk_outfile_abort(file->file);
    free(o.specs);
    if (o.status != SPK_OK) return o.status;
    put_all(&o);
    if (o.status == SPK_OK) return spk_gguf_writer_commit(o.writer, err);
    spk_gguf_writer_abort(o.writer);
    return o.status;
}
