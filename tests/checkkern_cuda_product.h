/* tests/checkkern_cuda_product.h - what a product on the GPU must give: input vectors, rows, and how far floats may be off.
 *
 * All bounds hold for any kernel that keeps the contracts of kernels/cuda.h; none is measured.  u = 2^-24.
 *
 * Input vector.  v in double from the source's formula.  Before it meets a weight, a kernel's float differs from it by `error`:
 *   sums       one rounding for each add: u of the sum of sizes each
 *   RMSNorm    the sum of squares is shared by a warp at least, so no value passes more than count/32 + 8 additions;
 *              root, quotients and products add 14 u (rsqrtf and division are within 2 ulp, 4 u).  Half of the former:
 *              (count/64 + 18) u, and the sums' own errors, weighted as they enter the mean
 *   head norm  at most 4 given sums: 10 u
 *   parts      2^(top - largest top): the difference rounds, ln2 u of itself, and ex2.approx is within 2^-22, 4 u; with a product
 *              that is 5 u + ln2 |difference| u of a part's weight, and of the sum of all their mean and 3 u.  A quotient of 4 u,
 *              two products and 3 additions follow: 13 u with what is of second order.  Below 2^-126 the power may be 0: a
 *              part's total is at most 2^7 times another's where checks make them, and so its weight 2^-118 at most
 *   sigmoid    1 / (1 + e), e = exp(-t): __expf is within 2 + 1.173 |t| ulp, (4 + 2.35 |t|) u, of which e / (1 + e) is passed
 *              on; the sum rounds and __fdividef is within 2 ulp: 5 u.  Where e is 2^126 or more, it may be 0.  silu has a
 *              product more
 * Codes.  A group of 32 is scale * q with scale = max|v| / 127; quotients are within 2^-14 of exact (127 times 8 u), so
 *   |v - scale q| <= (1/2 + 2^-14) scale, and with a second vector for what the first leaves out 1/254 of that; the scale
 *   itself, 4 u of a value.  Where quotients are all but integers, what they are off is all that the codes leave out.  A group
 *   below 1e-30 (before a norm's factor) may become zeros.
 *
 * Row of T32.  Integer sums are exact.  A lane adds 16 terms a super-block in floats, for each part (main and offset), each
 *   term after at most 8 roundings; super-blocks, lanes and factors follow: (24 tiles + 16) u of the sum of sizes, twice the
 *   tiles where two int8 vectors are multiplied one after the other.
 * Row of ROWS.  Shared by a warp, in pieces of 512 values or more: (count/32 + count/512 + 16) u of the sum of sizes.
 * FLOOR as in checkkern_matmul.h.
 */
#ifndef SPK_CHECKKERN_CUDA_PRODUCT_H
#define SPK_CHECKKERN_CUDA_PRODUCT_H

#include "tests/attention_parts.h"
#include "tests/checkkern_cuda.h"
#include "tests/checkkern_weights.h"

#define SIGMOID_FLOOR  0x1p-126
#define CODES_TINY     1.01e-30
#define PART_FLOOR     0x1p-118
#define LN2            0.6931471805599453
enum { GPU_COLS_MAX = 12288 };

static double sigmoid_of(double t) { return 1 / (1 + exp(-t)); }
static double sigmoid_error(double t) {
    double sigmoid = sigmoid_of(t);
    return sigmoid * ((4 + 2.35 * fabs(t)) * (1 - sigmoid) + 5) * U + SIGMOID_FLOOR;
}
static double silu_of(double t) { return t * sigmoid_of(t); }
static double silu_error(double t) { return fabs(t) * sigmoid_error(t) + U * fabs(silu_of(t)) + FLOOR; }
static double *new_doubles(uint64_t count) { return must(calloc(count + 1, sizeof(double))); }

/* ---- Matrices among the weights ---- */

static bool is_float_type(uint32_t type) { return type == SPK_TYPE_F32 || type == SPK_TYPE_F16 || type == SPK_TYPE_BF16; }
static uint32_t layout_of(uint32_t type) { return is_float_type(type) ? SPK_LAYOUT_ROWS : SPK_LAYOUT_T32; }
static spk_matrix on_host(const device_case *t, spk_matrix w) {
    w.data = t->weights + (w.data - t->d_weights);
    return w;
}

static uint8_t *take_weights(device_case *t, uint64_t size_bytes, uint64_t align_bytes) {
    uint64_t begin = (t->weight_used + GUARD_BYTES + align_bytes - 1) / align_bytes * align_bytes;
    if (begin + size_bytes + GUARD_BYTES > WEIGHT_BYTES_MAX) {
        fprintf(stderr, "checkkern: a case needs more than %llu bytes of weights: %s\n",
                (unsigned long long)WEIGHT_BYTES_MAX, case_text);
        exit(1);
    }
    uint64_t end = begin + size_bytes + GUARD_BYTES;
    memset(t->weights + t->weight_used, 0xff, end - t->weight_used);      /* NaN, whatever reads it */
    t->weight_used = end;
    return t->d_weights + begin;
}

typedef struct { spk_matrix host; w_pattern pattern; uint64_t seed; } fill_job;

/* What a thread fills at a time: a row group of T32, or a row as a group of one. */
static spk_t32_geometry groups_of(const spk_matrix *w) {
    if (w->layout == SPK_LAYOUT_T32) return spk_t32_geometry_of(w->type, w->row_count, w->col_count);
    return (spk_t32_geometry){ .rows_per_group = 1, .tiles_per_group = 1, .group_count = w->row_count };
}

/* Item: one group, from random numbers of its own, so that threads do not matter. */
static void fill_groups(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const fill_job *job = context;
    const spk_matrix *w = &job->host;
    const spk_type_info *info = spk_type_find(w->type);
    const spk_t32_geometry g = groups_of(w);
    const uint64_t blocks = g.rows_per_group * w->col_count / info->block_weights;
    uint8_t *rows = must(malloc(blocks * info->block_bytes));
    (void)thread_index;
    for (uint64_t i = begin; i < end; i++) {
        uint64_t random = job->seed ^ (i + 1) * UINT64_C(0xD1B54A32D192ED03);
        uint8_t *to = (uint8_t *)(uintptr_t)w->data + i * g.tiles_per_group * w->unit_stride_bytes;
        if (info->is_quantized) fill_blocks(info, job->pattern, rows, blocks, &random);
        else fill_float_weights(info->type, job->pattern, rows, blocks, &random);
        if (w->layout == SPK_LAYOUT_T32) spk_t32_pack(w, i, i + 1, rows, to);
        else memcpy(to, rows, blocks * info->block_bytes);
    }
    free(rows);
}
static void fill_matrix(device_case *t, const spk_matrix *w, w_pattern pattern) {
    fill_job job = { on_host(t, *w), pattern, check_random(&random_state) };
    spk_pool_run(t->pool, groups_of(w).group_count, 64, fill_groups, &job);
}

/* A matrix, or a pair with interleaved units (as packs have gate and up). */
static void put_pair(device_case *t, uint32_t type, uint32_t layout, uint64_t rows, uint64_t cols, w_pattern pattern,
                     spk_matrix *w, spk_matrix *up) {
    uint64_t unit = spk_layout_unit_bytes(layout, type, cols), stride = up != NULL ? 2 * unit : unit;
    uint8_t *data = take_weights(t, stride * spk_layout_unit_count(layout, type, rows, cols), 128);
    *w = (spk_matrix){ data, stride, type, layout, rows, cols };
    fill_matrix(t, w, pattern);
    if (up == NULL) return;
    *up = (spk_matrix){ data + unit, stride, type, layout, rows, cols };
    fill_matrix(t, up, pattern);
}
static spk_matrix put_matrix(device_case *t, uint32_t type, uint64_t rows, uint64_t cols, w_pattern pattern) {
    spk_matrix w;
    put_pair(t, type, layout_of(type), rows, cols, pattern, &w, NULL);
    return w;
}

/* ---- Input vectors ---- */

typedef struct {
    uint32_t count;
    double  *value, *error, *rounding;     /* exact; of a kernel's float; of its codes besides */
    double   factor;                       /* the largest of its norms */
} vector_bounds;

static vector_bounds bounds_new(uint32_t count) {
    return (vector_bounds){
        .count = count, .value = new_doubles(count), .error = new_doubles(count), .rounding = new_doubles(count)
    };
}
static void bounds_free(vector_bounds *v) { free(v->value), free(v->error), free(v->rounding); }

/* Codes of each group of 32; `tiny`: what may become zero. */
static void bound_codes(vector_bounds *v, bool has_rest, double tiny) {
    for (uint32_t g = 0; g < v->count; g += 32) {
        double top = 0, error = 0;
        for (uint32_t i = g; i < g + 32; i++) {
            top = fmax(top, fabs(v->value[i]));
            error = fmax(error, v->error[i]);
        }
        double half = (0.5 + 0x1p-14) * (top + error) / 127, left = has_rest ? half / 254 + 0x1p-14 * half / 127 : half,
               most = 0;
        for (uint32_t i = g; i < g + 32 && top > 0; i++) {
            double q = v->value[i] * 127 / top;
            most = fmax(most, fabs(q - nearbyint(q)));
        }
        if (error == 0 && most < 0x1p-14) left = fmin(left, most * top / 127);
        for (uint32_t i = g; i < g + 32; i++)
            v->rounding[i] = top + error < tiny ? top + error : left + 4 * U * fabs(v->value[i]);
    }
}

static void bound_rms(const device_case *t, const spk_cuda_source *s, vector_bounds *v) {
    const float *weight = host_floats(t, s->norm_weight);
    double squares = 0, weighted = 0;
    for (uint32_t i = 0; i < v->count; i++) {
        squares += v->value[i] * v->value[i];
        weighted += fabs(v->value[i]) * v->error[i];
    }
    double mean = squares / v->count + (double)s->eps, factor = 1 / sqrt(mean);
    double relative = (v->count / 64.0 + 18) * U + weighted / v->count / mean;
    for (uint32_t i = 0; i < v->count; i++) {
        double w = (double)weight[i], exact = v->value[i] * factor * w;
        v->error[i] = fabs(w) * factor * v->error[i] + fabs(exact) * relative + FLOOR * fmax(1, factor);
        v->value[i] = exact;
    }
    v->factor = factor;
}
/* By the squares that a GDN kernel leaves. */
static void bound_heads(const device_case *t, const spk_cuda_source *s, vector_bounds *v) {
    for (uint32_t head = 0; head < v->count; head += s->head_dim) {
        double squares = 0;
        for (uint32_t i = 0; i < s->head_dim / 32; i++) squares += (double)host_floats(t, s->squares)[head / 32 + i];
        double factor = 1 / sqrt(squares / s->head_dim + (double)s->eps);
        for (uint32_t i = head; i < head + s->head_dim; i++) {
            v->value[i] *= factor;
            v->error[i] = v->error[i] * factor + 10 * U * fabs(v->value[i]) + FLOOR * fmax(1, factor);
        }
        v->factor = fmax(v->factor, factor);
    }
}

/* By the parts that attention leaves. */
static void bound_parts(const device_case *t, const spk_cuda_source *s, vector_bounds *v) {
    const uint32_t part_count = attention_part_count(*(const uint32_t *)host_of(t, s->d_position)), head_count = s->count / s->head_dim;
    const float *x = host_floats(t, s->x), *totals = host_floats(t, s->part_totals);
    if (part_count == 1) return;
    for (uint32_t head = 0; head < head_count; head++) {
        double weight[SPK_CUDA_PARTS_MAX], relative[SPK_CUDA_PARTS_MAX], top = -INFINITY, mean = 0;
        attention_part_weights(totals, head_count, head, part_count, weight);
        for (uint32_t p = 0; p < part_count; p++) top = fmax(top, (double)totals[2 * (p * head_count + head)]);
        for (uint32_t p = 0; p < part_count; p++) {
            relative[p] = weight[p] == 0 ? 0 : (5 + LN2 * (top - (double)totals[2 * (p * head_count + head)])) * U;
            mean += weight[p] * relative[p];
        }
        for (uint32_t i = head * s->head_dim; i < (head + 1) * s->head_dim; i++) {
            v->value[i] = attention_merged(x, s->count, i, part_count, weight);
            v->error[i] = FLOOR;
            for (uint32_t p = 0; p < part_count; p++)
                v->error[i] += fabs((double)x[p * s->count + i]) * (weight[p] * (relative[p] + mean + 13 * U) + PART_FLOOR);
        }
    }
}

/* The source's vector; everything is read from the pictures on the host. */
static vector_bounds source_bounds(const device_case *t, const spk_cuda_source *s) {
    vector_bounds v = bounds_new(s->count);
    for (uint32_t i = 0; i < s->count; i++) v.value[i] = (double)host_floats(t, s->x)[i];
    if (s->part_totals != NULL) bound_parts(t, s, &v);
    for (uint32_t i = 0; i < s->count; i++) {
        double sum = v.value[i], size = fabs(sum), steps = 0;
        for (int a = 0; a < 3; a++) {
            if (s->add[a] == NULL) continue;
            sum += (double)host_floats(t, s->add[a])[i];
            size += fabs((double)host_floats(t, s->add[a])[i]);
            steps++;
        }
        v.value[i] = sum;
        v.error[i] += steps * U * size;
    }
    if (s->norm_weight != NULL) bound_rms(t, s, &v);
    if (s->squares != NULL) bound_heads(t, s, &v);
    if (s->factor != NULL) v.factor = fabs((double)*host_floats(t, s->factor));
    for (uint32_t i = 0; s->factor != NULL && i < s->count; i++) {
        v.value[i] *= (double)*host_floats(t, s->factor);
        v.error[i] *= v.factor;          /* multiplied later, with the products: their slack has it */
    }
    bound_codes(&v, s->has_rest, CODES_TINY * fmax(1, v.factor));
    return v;
}

/* ---- Rows ---- */

typedef struct {
    spk_matrix w;                           /* on the host */
    const vector_bounds *v;
    bool    has_rest;
    double *value, *error;
} row_job;

static double row_steps(const spk_matrix *w, bool has_rest) {
    if (w->layout != SPK_LAYOUT_T32) return (double)w->col_count / 32 + (double)w->col_count / 512 + 16;
    return 24 * (has_rest ? 2 : 1) * (double)spk_t32_geometry_of(w->type, w->row_count, w->col_count).tiles_per_group + 16;
}

static void expect_rows(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const row_job *job = context;
    const bool has_codes = job->w.layout == SPK_LAYOUT_T32;
    const double steps = row_steps(&job->w, job->has_rest);
    double main_part[GPU_COLS_MAX], offset[GPU_COLS_MAX];
    uint8_t row_bytes[GPU_COLS_MAX * sizeof(float)];
    (void)thread_index;
    for (uint64_t row = begin; row < end; row++) {
        double sum = 0, bound = 0, size = 0;
        spk_layout_get_rows(&job->w, row, row + 1, row_bytes);
        decode_row(job->w.type, row_bytes, job->w.col_count, main_part, offset);
        for (uint64_t c = 0; c < job->w.col_count; c++) {
            double weight = main_part[c] - offset[c], error = job->v->error[c] + (has_codes ? job->v->rounding[c] : 0);
            sum += weight * job->v->value[c];
            bound += fabs(weight) * error;
            size += (fabs(main_part[c]) + fabs(offset[c])) * (fabs(job->v->value[c]) + error);
        }
        job->value[row] = sum;
        job->error[row] = bound + steps * (U * size + FLOOR * 0x1p20);
    }
}

/* w is a device matrix. */
static void expect_product(device_case *t, const spk_matrix *w, const vector_bounds *v, bool has_rest, double *value,
                           double *error) {
    row_job job = { on_host(t, *w), v, has_rest, value, error };
    spk_pool_run(t->pool, w->row_count, 16, expect_rows, &job);
}

/* silu(g) * u, with errors of g and u; silu's slope is at most 1.1. */
static void expect_swiglu(const double *g, const double *g_error, double *u, double *u_error, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
        double silu = silu_of(g[i]), exact = silu * u[i];
        double silu_off = 1.1 * g_error[i] + silu_error(g[i]);
        u_error[i] = silu_off * (fabs(u[i]) + u_error[i]) + fabs(silu) * u_error[i] + 2 * U * fabs(exact) + FLOOR;
        u[i] = exact;
    }
}
/* value, error [rows]: of silu(gate v) * (up v). */
static void expect_pair(device_case *t, const spk_matrix *gate, const spk_matrix *up, const vector_bounds *v,
                        bool has_rest, double *value, double *error) {
    double *g = new_doubles(gate->row_count), *g_error = new_doubles(gate->row_count);
    expect_product(t, gate, v, has_rest, g, g_error);
    expect_product(t, up, v, has_rest, value, error);
    expect_swiglu(g, g_error, value, error, gate->row_count);
    free(g), free(g_error);
}

#endif
