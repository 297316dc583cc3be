/* requant/calibration.c - reads what requant/collector.c writes.  See calibration.h for the file. */
#include "requant/calibration.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/blocks.h"
#include "formats/gguf.h"
#include "requant/calibration_internal.h"

/* Share of the mean that is added to the diagonal: directions that the text never took are not free. */
#define DAMPING 0.05f

/* How far a correlation may be from what was measured: rounded to F16, by 2^-11 of itself, or 2^-25 where it is subnormal.
 * The rest of these is for sums that were made in F32. */
#define ROUNDING 0x1p-10
#define ROUNDING_LEAST 0x1p-20
enum { PIVOTS_AT_ONCE = 32 };      /* rows of a factorisation that stay in a core's cache */

struct spk_calibration {
    spk_gguf *gguf;
    uint64_t *first_matrix;        /* [tensors] index in the next of the tensor's first matrix */
    _Atomic bool *is_positive;     /* [matrices of moments and metrics] was seen to be so: it is taken again and again */
};

/* Scale and moment (or metric) of one name. */
typedef struct {
    const spk_gguf_tensor *scale, *moment;
} pair;

static const spk_gguf_tensor *find(const spk_calibration *c, const char *base, const char *suffix) {
    char name[SPK_GGUF_NAME_BYTES_MAX + 1];
    int size = snprintf(name, sizeof name, "%s%s", base, suffix);
    return size < (int)sizeof name ? spk_gguf_tensor_find(c->gguf, name) : NULL;
}

static spk_status refuse(const spk_calibration *c, spk_status status, const char *name, const char *why, spk_error *err) {
    return spk_fail(err, status, "%s: '%s': %s", spk_gguf_part_path(c->gguf, 0), name, why);
}

/* Both tensors of a name, of the right types and of shapes that belong together; both NULL if neither is there. */
static spk_status find_pair(const spk_calibration *c, const char *base, const char *scale_suffix, const char *moment_suffix,
                            pair *out, spk_error *err) {
    pair p = { find(c, base, scale_suffix), find(c, base, moment_suffix) };
    *out = p;
    if (p.scale == NULL && p.moment == NULL) return SPK_OK;
    if (p.scale == NULL || p.moment == NULL)
        return refuse(c, SPK_E_CORRUPT, (p.scale ? p.scale : p.moment)->name, "has no partner, scales and moments belong together", err);
    if (p.scale->type != SPK_TYPE_F32 || p.moment->type != SPK_TYPE_F16)
        return refuse(c, SPK_E_CORRUPT, p.moment->name, "expected F32 scales and F16 moments", err);
    uint64_t n = p.scale->dims[0];
    if (n > SPK_CALIBRATION_COLS_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: '%s': %" PRIu64 " columns, at most %d", spk_gguf_part_path(c->gguf, 0),
                        p.scale->name, n, SPK_CALIBRATION_COLS_MAX);
    bool is_triangle = p.moment->dims[0] == spk_triangle_count(n) && p.moment->dims[1] == p.scale->dims[1];
    bool is_flat = p.scale->dims[2] * p.scale->dims[3] * p.moment->dims[2] * p.moment->dims[3] == 1;
    if (n < 2 || !is_triangle || !is_flat)
        return refuse(c, SPK_E_CORRUPT, p.moment->name, "its shape is not the triangle of its scales", err);
    return SPK_OK;
}

static bool ends_with(const char *text, const char *suffix) {
    size_t size = strlen(text), suffix_size = strlen(suffix);
    return size > suffix_size && strcmp(text + size - suffix_size, suffix) == 0;
}

static spk_status check_tensors(const spk_calibration *c, spk_error *err) {
    bool has_moments = false;
    for (uint64_t i = 0; i < spk_gguf_tensor_count(c->gguf); i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(c->gguf, i);
        const char *suffix = ends_with(t->name, SPK_CALIBRATION_MOMENT) ? SPK_CALIBRATION_MOMENT
                           : ends_with(t->name, SPK_CALIBRATION_SCALE)  ? SPK_CALIBRATION_SCALE : NULL;
        if (suffix == NULL) continue;
        char base[SPK_GGUF_NAME_BYTES_MAX + 1];
        memcpy(base, t->name, sizeof base);
        base[strlen(base) - strlen(suffix)] = '\0';
        pair p;
        SPK_TRY(find_pair(c, base, SPK_CALIBRATION_SCALE, SPK_CALIBRATION_MOMENT, &p, err));
        const spk_gguf_tensor *counts = find(c, base, SPK_CALIBRATION_COUNTS);
        if (counts == NULL || counts->type != SPK_TYPE_F32 || counts->size_bytes != p.scale->dims[1] * sizeof(float))
            return refuse(c, SPK_E_CORRUPT, p.moment->name, "expected a count (F32) of each matrix beside it", err);
        has_moments = true;
    }
    if (!has_moments)
        return spk_fail(err, SPK_E_MISMATCH, "%s: has no moments, expected a file of spk-calibrate (--imatrix takes what it has)",
                        spk_gguf_part_path(c->gguf, 0));
    return SPK_OK;
}

/* False when out of memory. */
static bool number_matrices(spk_calibration *c) {
    uint64_t tensor_count = spk_gguf_tensor_count(c->gguf), matrix_count = 0;
    c->first_matrix = calloc(tensor_count + 1, sizeof *c->first_matrix);
    for (uint64_t i = 0; c->first_matrix != NULL && i < tensor_count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(c->gguf, i);
        c->first_matrix[i] = matrix_count;
        if (t->type == SPK_TYPE_F16) matrix_count += t->dims[1];          /* a row each, in the file: no overflow */
    }
    c->is_positive = calloc(matrix_count + 1, sizeof *c->is_positive);
    return c->first_matrix != NULL && c->is_positive != NULL;
}

spk_status spk_calibration_open(const char *path, spk_calibration **out, spk_error *err) {
    spk_calibration *c = calloc(1, sizeof *c);
    if (c == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
    spk_status status = spk_gguf_open(path, &c->gguf, err);
    if (status == SPK_OK) status = check_tensors(c, err);
    if (status == SPK_OK && !number_matrices(c)) status = spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
    if (status == SPK_OK) *out = c;
    else spk_calibration_close(c);
    return status;
}

void spk_calibration_close(spk_calibration *c) {
    if (c == NULL) return;
    spk_gguf_close(c->gguf);
    free(c->first_matrix);
    free(c->is_positive);
    free(c);
}

const spk_gguf *spk_calibration_gguf(const spk_calibration *c) { return c->gguf; }

/* Matrix `index` of a pair, checked number by number, into out[n][n]; out may be NULL.  *trace gets the sum of its diagonal. */
static spk_status take_matrix(const spk_calibration *c, const pair *p, uint64_t index, float *out, double *trace,
                              spk_error *err) {
    uint64_t n = p->scale->dims[0], triangle = spk_triangle_count(n);
    const uint8_t *scales = p->scale->data + index * n * sizeof(float);
    const uint8_t *correlations = p->moment->data + index * triangle * sizeof(uint16_t);
    float *scale = malloc(n * sizeof *scale);
    if (scale == NULL) return refuse(c, SPK_E_MEMORY, p->scale->name, "out of memory", err);
    memcpy(scale, scales, n * sizeof *scale);
    bool is_good = true;
    *trace = 0;
    for (uint64_t i = 0; i < n; i++) {
        is_good &= scale[i] >= 0 && scale[i] <= 1e18f;         /* false of NaN; squares stay finite */
        *trace += (double)scale[i] * (double)scale[i];
    }
    for (uint64_t i = 1; i < n && is_good; i++)
        for (uint64_t j = 0; j < i; j++) {
            uint16_t bits;
            memcpy(&bits, correlations + (spk_triangle_count(i) + j) * sizeof bits, sizeof bits);
            float value = spk_f16_to_f32(bits);
            is_good &= value >= -1 && value <= 1;
            if (out != NULL) out[i * n + j] = out[j * n + i] = value * scale[i] * scale[j];
        }
    for (uint64_t i = 0; i < n && out != NULL; i++) out[i * n + i] = scale[i] * scale[i];
    free(scale);
    return is_good ? SPK_OK : refuse(c, SPK_E_CORRUPT, p->moment->name,
                                     "a scale is negative or not finite, or a correlation is not between -1 and 1", err);
}

static void damp(float *matrix, uint64_t n, double trace) {
    float factor = (float)((double)n / (trace * (1 + (double)DAMPING)));
    for (uint64_t i = 0; i < n * n; i++) matrix[i] *= factor;
    for (uint64_t i = 0; i < n; i++) matrix[i * n + i] += DAMPING / (1 + DAMPING);
}

/* rows: the upper triangle, row after row, each from its diagonal; factorised in place (U' D^-1 U).  The first row whose pivot is
 * not above 0, or n. */
static uint64_t first_bad_pivot(double *rows, uint64_t n) {
    for (uint64_t begin = 0; begin < n; begin += PIVOTS_AT_ONCE) {
        uint64_t end = begin + PIVOTS_AT_ONCE < n ? begin + PIVOTS_AT_ONCE : n;
        for (uint64_t i = begin; i < n; i++) {
            double *row = rows + i * n - spk_triangle_count(i) - i;        /* row[j], j >= i */
            for (uint64_t k = begin; k < end && k < i; k++) {
                const double *pivot_row = rows + k * n - spk_triangle_count(k) - k;
                double factor = pivot_row[i] / pivot_row[k];
                for (uint64_t j = i; j < n; j++) row[j] -= factor * pivot_row[j];
            }
            if (i < end && !(row[i] > 0)) return i;
        }
    }
    return n;
}

/* A matrix must be one of second moments, x'Mx > 0 for every x, once it is damped.  Rounding is allowed for: what errors of at most
 * e[i][j] in the correlations take from x'Mx is no more than the sums of e over j, on the diagonal, give. */
static spk_status check_positive(const spk_calibration *c, const pair *p, uint64_t index, const float *matrix, double trace,
                                 spk_error *err) {
    const uint64_t n = p->scale->dims[0];
    _Atomic bool *is_positive = &c->is_positive[c->first_matrix[p->moment - spk_gguf_tensor_at(c->gguf, 0)] + index];
    if (*is_positive) return SPK_OK;
    double *rows = malloc(spk_triangle_count(n + 1) * sizeof *rows), *scale = malloc(n * sizeof *scale);
    spk_status status = rows && scale ? SPK_OK : refuse(c, SPK_E_MEMORY, p->moment->name, "out of memory", err);
    for (uint64_t i = 0; i < n && status == SPK_OK; i++) scale[i] = sqrt((double)matrix[i * n + i]);
    for (uint64_t i = 0; i < n && status == SPK_OK; i++) {
        double *row = rows + i * n - spk_triangle_count(i) - i, allowed = 0;
        for (uint64_t j = 0; j < n; j++) {
            double value = (double)matrix[i * n + j];
            if (j >= i) row[j] = value;
            if (scale[j] > 0) allowed += ROUNDING * fabs(value) / scale[j] + ROUNDING_LEAST * scale[i];
        }
        row[i] += allowed * scale[i] + (double)DAMPING * trace / (double)n;
    }
    uint64_t bad = status == SPK_OK ? first_bad_pivot(rows, n) : n;
    free(rows);
    free(scale);
    if (bad == n && status == SPK_OK) *is_positive = true;
    if (bad == n) return status;
    char expert[40] = "";
    if (p->scale->dims[1] > 1) (void)snprintf(expert, sizeof expert, "expert %" PRIu64 ", ", index);
    return spk_fail(err, SPK_E_CORRUPT, "%s: '%s', %srow %" PRIu64 ": no inputs have such moments (not positive definite, with "
                    "rounding allowed for)", spk_gguf_part_path(c->gguf, 0), p->moment->name, expert, bad);
}

spk_status spk_calibration_moment(const spk_calibration *c, const char *tensor_name, uint64_t col_count,
                                  uint64_t matrix_count, uint64_t matrix_index, spk_calibration_answer *answer, float *out,
                                  spk_error *err) {
    assert(matrix_index < matrix_count);
    pair p;
    SPK_TRY(find_pair(c, tensor_name, SPK_CALIBRATION_SCALE, SPK_CALIBRATION_MOMENT, &p, err));
    *answer = SPK_CALIBRATION_ABSENT;
    if (p.scale == NULL) return SPK_OK;
    if (p.scale->dims[0] != col_count || p.scale->dims[1] != matrix_count)
        return spk_fail(err, SPK_E_MISMATCH, "%s: '%s' has %" PRIu64 " columns and %" PRIu64 " matrices, the tensor has %"
                        PRIu64 " and %" PRIu64, spk_gguf_part_path(c->gguf, 0), p.scale->name, p.scale->dims[0],
                        p.scale->dims[1], col_count, matrix_count);
    double trace;
    float count;
    memcpy(&count, find(c, tensor_name, SPK_CALIBRATION_COUNTS)->data + matrix_index * sizeof count, sizeof count);
    SPK_TRY(take_matrix(c, &p, matrix_index, out, &trace, err));
    *answer = count >= (float)col_count && trace > 1e-30 ? SPK_CALIBRATION_FOUND : SPK_CALIBRATION_FEW;
    if (*answer != SPK_CALIBRATION_FOUND || out == NULL) return SPK_OK;
    SPK_TRY(check_positive(c, &p, matrix_index, out, trace, err));
    damp(out, col_count, trace);
    return SPK_OK;
}

spk_status spk_calibration_metric(const spk_calibration *c, uint32_t layer, bool is_mixer, uint64_t hidden,
                                  spk_calibration_answer *answer, float *out, spk_error *err) {
    char base[64];
    (void)snprintf(base, sizeof base, SPK_CALIBRATION_METRIC_BASE, layer, is_mixer ? "attn" : "ffn");
    pair p;
    double trace;
    SPK_TRY(find_pair(c, base, SPK_CALIBRATION_METRIC_SCALE, SPK_CALIBRATION_METRIC, &p, err));
    *answer = SPK_CALIBRATION_ABSENT;
    if (p.scale == NULL) return SPK_OK;
    if (p.scale->dims[0] != hidden || p.scale->dims[1] != 1)
        return spk_fail(err, SPK_E_MISMATCH, "%s: '%s' has %" PRIu64 " elements, the model is %" PRIu64 " wide",
                        spk_gguf_part_path(c->gguf, 0), p.scale->name, p.scale->dims[0], hidden);
    SPK_TRY(take_matrix(c, &p, 0, out, &trace, err));
    if (!(trace > 1e-30)) return refuse(c, SPK_E_CORRUPT, p.scale->name, "all scales are 0", err);
    if (out != NULL) SPK_TRY(check_positive(c, &p, 0, out, trace, err));
    if (out != NULL) damp(out, hidden, trace);
    *answer = SPK_CALIBRATION_FOUND;
    return SPK_OK;
}
