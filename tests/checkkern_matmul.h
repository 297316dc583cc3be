/* tests/checkkern_matmul.h - products: every type, layout and shape against sums in double.
 *
 * Weights are decoded here a second time, from the block formats alone, as w = main - offset: the two products whose
 * difference a K-quant weight is.  Three comparisons follow for each output:
 *   reference   against sum w x
 *   fast        against the sum that its own int8 activations define (tight: only F32 summation is allowed)
 *   fast        against sum w x (adds the error of rounding x to int8)
 */
#ifndef SPK_CHECKKERN_MATMUL_H
#define SPK_CHECKKERN_MATMUL_H

#include "tests/checkkern_guarded.h"
#include "tests/checkkern_weights.h"

enum { TOKENS_MAX = 7, ROWS_MAX = 100, COLS_MAX = 4096 };

/* ---- A matrix in both forms ---- */

typedef struct {
    uint8_t   *rows;             /* GGML rows, packed */
    uint64_t   row_bytes;
    uint8_t   *block;            /* units, and around and between them bytes that are NaN as any float or factor */
    spk_matrix matrix;
} test_matrix;

static test_matrix matrix_new(uint32_t type, uint32_t layout, uint64_t rows, uint64_t cols, w_pattern pattern,
                              uint64_t gap_bytes) {
    const spk_type_info *info = spk_type_find(type);
    test_matrix m = { .row_bytes = cols / info->block_weights * info->block_bytes };
    m.rows = must(malloc(rows * m.row_bytes));
    if (info->is_quantized)
        fill_blocks(info, pattern, m.rows, rows * cols / info->block_weights, &random_state);
    else
        fill_float_weights(type, pattern, m.rows, rows * cols, &random_state);
    uint64_t unit_bytes = spk_layout_unit_bytes(layout, type, cols), stride = unit_bytes + gap_bytes;
    uint64_t unit_count = spk_layout_unit_count(layout, type, rows, cols);
    size_t whole = (stride * unit_count + 2 * GUARD_BYTES + 63) / 64 * 64;
    m.block = must(aligned_alloc(64, whole));
    memset(m.block, 0xff, whole);
    uint8_t *units = m.block + GUARD_BYTES;
    m.matrix = (spk_matrix){ units, stride, type, layout, rows, cols };
    if (layout == SPK_LAYOUT_T32)
        spk_t32_pack(&m.matrix, 0, spk_t32_geometry_of(type, rows, cols).group_count, m.rows, units);
    else
        for (uint64_t r = 0; r < rows; r++) memcpy(units + r * stride, m.rows + r * m.row_bytes, m.row_bytes);
    return m;
}

static void matrix_free(test_matrix *m) {
    free(m->block);
    free(m->rows);
}

/* Units as a range counts them: row groups or rows. */
static uint64_t range_units(const spk_matrix *m) {
    if (m->layout == SPK_LAYOUT_ROWS) return m->row_count;
    return spk_t32_geometry_of(m->type, m->row_count, m->col_count).group_count;
}

typedef struct {
    void          *block[TOKENS_MAX];
    spk_activation x[TOKENS_MAX];
} test_tokens;

static void tokens_new(test_tokens *t, uint64_t cols, x_pattern pattern, const spk_kernels *fast) {
    for (int i = 0; i < TOKENS_MAX; i++) {
        t->block[i] = must(aligned_alloc(64, spk_activation_bytes(cols)));
        t->x[i] = spk_activation_carve(t->block[i], cols);
        fill(pattern, t->x[i].f32, cols);
        if (fast != NULL) fast->quantize(&t->x[i]);
    }
}

static void tokens_free(test_tokens *t) {
    for (int i = 0; i < TOKENS_MAX; i++) free(t->block[i]);
}

typedef struct { guarded out[TOKENS_MAX]; float *y[TOKENS_MAX]; } test_outputs;

static void outputs_new(test_outputs *o, uint64_t rows) {
    for (int t = 0; t < TOKENS_MAX; t++) {
        o->out[t] = guarded_new(rows * sizeof(float));
        o->y[t] = guarded_floats(&o->out[t]);
    }
}

static void outputs_free(test_outputs *o) {
    for (int t = 0; t < TOKENS_MAX; t++) guarded_free(&o->out[t]);
}

/* ---- Comparisons ---- */

typedef struct { double exact, exact_size, int8, int8_size, rounding; } row_sums;

/* All sums that the tolerances of one output need; sizes are sums of absolute values, main and offset apart. */
static row_sums sums_of(const double *main_part, const double *offset, const spk_activation *x, bool has_int8) {
    row_sums s = { 0 };
    for (uint64_t c = 0; c < x->col_count; c++) {
        double w = main_part[c] - offset[c], size = fabs(main_part[c]) + fabs(offset[c]), value = (double)x->f32[c];
        s.exact += w * value;
        s.exact_size += size * fabs(value);
        if (!has_int8) continue;
        uint64_t k = x->col_count / 256, block = c / 256;
        const spk_activation_pair *pair = &x->pairs[k % 2 == 0 ? block / 2 : block];
        uint64_t side = k % 2 == 0 ? block % 2 : 0;
        double scale = (double)pair->scale4[c % 256 / 32][side][0];
        double q = (double)pair->q8[c % 256 / 16][side][c % 16];
        s.int8 += w * scale * q;
        s.int8_size += size * scale * fabs(q);
        s.rounding += fabs(w) * scale;
    }
    return s;
}

/* An output of the fast table.
 *
 * T32, against the int8 sum.  Integer sums are exact and below 2^24, so become exact floats.  A product then meets, on
 * its way to y, at most: 3 roundings of its own factors; 8 additions in a super-block pair, once a pair or (Q8_0) all
 * along the row, k/2 or k pairs; 3 additions of the final sum.  So (8 k + 16) u of the sum of sizes.
 *   FLOOR counts for each addition, times the factor by which a scaled sum is multiplied later: 2^20 covers |d| and
 *   integer sums of these cases.
 * Against sum w x: an activation is off by scale/2, plus 2^-16 scale for the rounded quotient, plus 2^-143 where the
 *   scale is subnormal; weights as the formats define them are exact here.
 * ROWS: n/16 additions in each of 16 partial sums, one more for each piece of 2048 columns, 8 to finish; weights in F32
 *   may be off by 3 u of their parts. */
static void check_fast(const spk_matrix *m, uint64_t row, double y, const row_sums *s, double weight_sum) {
    if (m->layout == SPK_LAYOUT_T32) {
        double steps = 8 * (double)(m->col_count / 256) + 16;
        double summation = steps * (U * s->int8_size + FLOOR * 0x1p20);
        near("fast against int8", row, y, s->int8, summation);
        near("fast against exact", row, y, s->exact,
             summation + (0.5 + 0x1p-16) * s->rounding + 0x1p-143 * weight_sum);
    } else {
        double steps = (double)m->col_count / 16 + (double)m->col_count / 2048 + 12;
        near("fast", row, y, s->exact, steps * (U * s->exact_size + FLOOR));
    }
}

static void check_products(const test_matrix *tm, const test_tokens *tokens, const float *const *ref,
                           const float *const *fast) {
    static double main_part[COLS_MAX], offset[COLS_MAX];
    const spk_matrix *m = &tm->matrix;
    for (uint64_t row = 0; row < m->row_count; row++) {
        decode_row(m->type, tm->rows + row * tm->row_bytes, m->col_count, main_part, offset);
        double weight_sum = 0;
        for (uint64_t c = 0; c < m->col_count; c++) weight_sum += fabs(main_part[c] - offset[c]);
        for (int t = 0; t < TOKENS_MAX; t++) {
            row_sums s = sums_of(main_part, offset, &tokens->x[t], fast != NULL && m->layout == SPK_LAYOUT_T32);
            /* Weights in F32: d s, d s code, dmin m and the difference each round once; then the result. */
            near("reference", row, (double)ref[t][row], s.exact, 4 * U * s.exact_size + U * fabs(s.exact) + FLOOR);
            if (fast != NULL) check_fast(m, row, (double)fast[t][row], &s, weight_sum);
        }
    }
}

/* The same bits for fewer tokens, for pieces of the range, and nothing written outside it. */
static void check_splits(const spk_matrix *m, const test_tokens *tokens, spk_matmul_fn *fn, float *const *whole) {
    static const uint32_t counts[] = { 1, 2, 5 };
    const uint64_t units = range_units(m), per = m->layout == SPK_LAYOUT_T32
        ? spk_t32_geometry_of(m->type, m->row_count, m->col_count).rows_per_group : 1;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        test_outputs part;
        outputs_new(&part, m->row_count);
        uint64_t begin = units / 3, end = units - units / 4;
        fn(m, tokens->x, part.y, counts[i], begin, end);
        uint64_t row_begin = begin * per, row_end = end * per < m->row_count ? end * per : m->row_count;
        for (uint32_t t = 0; t < TOKENS_MAX; t++) {
            for (uint64_t r = 0; r < m->row_count; r++) {
                bool is_inside = t < counts[i] && r >= row_begin && r < row_end;
                bool is_right = is_inside ? memcmp(&part.y[t][r], &whole[t][r], 4) == 0 : is_poison(part.y[t][r]);
                EXPECT(is_right, "row %llu %s, %u tokens, units %llu..%llu", (unsigned long long)r,
                       is_inside ? "differs" : "was written", counts[i], (unsigned long long)begin,
                       (unsigned long long)end);
            }
        }
        fn(m, tokens->x, part.y, counts[i], 0, begin);
        fn(m, tokens->x, part.y, counts[i], end, units);
        for (uint32_t t = 0; t < counts[i]; t++)
            EXPECT(memcmp(part.y[t], whole[t], m->row_count * 4) == 0, "pieces differ from the whole");
        outputs_free(&part);
    }
}

static void check_shape(const spk_kernels *ref, const spk_kernels *fast, uint32_t type, uint32_t layout, uint64_t rows,
                        uint64_t cols) {
    for (size_t i = 0; i < sizeof matmul_cases / sizeof *matmul_cases; i++) {
        w_pattern wp = matmul_cases[i].w;
        x_pattern xp = matmul_cases[i].x;
        uint64_t gap = i % 2 == 0 ? 0 : layout == SPK_LAYOUT_T32 ? spk_layout_unit_bytes(layout, type, cols) : 64;
        DESCRIBE("%s %s rows=%llu cols=%llu gap=%llu w=%s x=%s", spk_type_name(type), spk_layout_name(layout),
                 (unsigned long long)rows, (unsigned long long)cols, (unsigned long long)gap, w_names[wp], x_names[xp]);
        test_matrix m = matrix_new(type, layout, rows, cols, wp, gap);
        test_tokens tokens;
        tokens_new(&tokens, cols, xp, fast);
        test_outputs a, b;
        outputs_new(&a, rows);
        outputs_new(&b, rows);
        ref->matmul[type][layout](&m.matrix, tokens.x, a.y, TOKENS_MAX, 0, range_units(&m.matrix));
        if (fast != NULL) {
            spk_matmul_fn *fn = fast->matmul[type][layout];
            fn(&m.matrix, tokens.x, b.y, TOKENS_MAX, 0, range_units(&m.matrix));
            check_splits(&m.matrix, &tokens, fn, b.y);
        }
        check_products(&m, &tokens, (const float *const *)a.y, fast != NULL ? (const float *const *)b.y : NULL);
        outputs_free(&a);
        outputs_free(&b);
        tokens_free(&tokens);
        matrix_free(&m);
    }
}

static const uint64_t check_rows[] = { 1, 3, 31, 33, ROWS_MAX };
static const uint64_t check_t32_cols[] = { 256, 512, 768, 1280, 2048, COLS_MAX };

static void check_matmul(const spk_kernels *ref, const spk_kernels *fast, const spk_type_info *type, uint32_t layout) {
    static const uint64_t float_cols[] = { 1, 7, 100, 2048, 2500 }, rows_of_32[] = { 32, 96, 2048, 2336 };
    static const uint64_t rows_of_256[] = { 256, 768, 2304 };
    const uint64_t *cols = check_t32_cols;
    size_t count = sizeof check_t32_cols / sizeof *check_t32_cols;
    if (layout == SPK_LAYOUT_ROWS) {
        cols = type->block_weights == 1 ? float_cols : type->block_weights == 32 ? rows_of_32 : rows_of_256;
        count = type->block_weights == 1 ? 5 : type->block_weights == 32 ? 4 : 3;
    }
    for (size_t c = 0; c < count; c++)
        for (size_t r = 0; r < sizeof check_rows / sizeof *check_rows; r++)
            if (layout == SPK_LAYOUT_T32 || check_rows[r] <= 3)
                check_shape(ref, fast, type->type, layout, check_rows[r], cols[c]);
}

#endif
