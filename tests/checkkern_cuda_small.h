/* tests/checkkern_cuda_small.h - the small kernels of a step: embedding row, elementwise, norm. */
#ifndef SPK_CHECKKERN_CUDA_SMALL_H
#define SPK_CHECKKERN_CUDA_SMALL_H

#include "tests/checkkern_cuda_routing.h"

/* ---- elementwise ---- */

/* ADD is a + b, then + c, then + d, each rounded: exact bits.  SWIGLU: silu as in checkkern_cuda_product.h and a product. */
static void check_elementwise_case(device_case *t, spk_cuda_elementwise_op op, uint32_t count, uint32_t operand_count,
                                   x_pattern pattern) {
    DESCRIBE("elementwise %s of %u n=%u x=%s", op == SPK_CUDA_ADD ? "add" : "swiglu", operand_count, count, x_names[pattern]);
    case_begin(t);
    spk_cuda_elementwise e = {
        .op = op, .a = take_staged_as(t, count, pattern), .count = count, .out = take_floats(t, OUTPUT, count)
    };
    float *d_b = take_staged_as(t, count, X_RANDOM), *a = host_floats(t, e.a), *b = host_floats(t, d_b);
    e.b = d_b;
    if (operand_count > 2) e.c = take_staged_as(t, count, X_HUGE_AMONG_TINY);
    if (operand_count > 3) e.d = take_staged_as(t, count, X_RANDOM);
    for (uint32_t i = 0; op == SPK_CUDA_SWIGLU && i < count && pattern == X_RANDOM; i++)      /* all of the range of exp */
        a[i] = 110.0f * (float)(2 * (int64_t)i - count) / (float)count;
    case_record(t);
    spk_cuda_launch_elementwise(t->cuda, &e);
    case_run(t, 1);
    const float *got = result_floats(t, e.out);
    for (uint32_t i = 0; i < count; i++) {
        double x = (double)a[i];
        if (op == SPK_CUDA_ADD) {
            float sum = a[i] + b[i];
            if (e.c != NULL) sum += host_floats(t, e.c)[i];
            if (e.d != NULL) sum += host_floats(t, e.d)[i];
            EXPECT(memcmp(&got[i], &sum, sizeof sum) == 0 || (got[i] == 0 && sum == 0), "add[%u]: got %.9g want %.9g",
                   i, (double)got[i], (double)sum);
        } else {
            double want = silu_of(x) * (double)b[i];
            near("swiglu", i, (double)got[i], want, silu_error(x) * fabs((double)b[i]) + 2 * U * fabs(want) + FLOOR);
        }
    }
}

/* By the logit of a shared expert behind expert_count others. */
static void check_shared_scale_case(device_case *t, uint32_t count, uint32_t expert_count, uint32_t column_count, x_pattern pattern) {
    DESCRIBE("elementwise shared_scale n=%u behind %u experts, %u columns x=%s", count, expert_count, column_count, x_names[pattern]);
    case_begin(t);
    long long *d_sums = take_staged_sums(t, expert_count + 1);
    float *d_squares = take_staged_squares(t, column_count);
    const spk_cuda_elementwise e = { .op = SPK_CUDA_SHARED_SCALE,
                                     .a = take_staged_as(t, count, pattern),
                                     .routing = { .sums = d_sums, .squares = d_squares, .expert_count = expert_count,
                                                  .used_count = 1, .column_count = column_count, .eps = GPU_EPS },
                                     .out = take_floats(t, OUTPUT, count),
                                     .count = count };
    fill_squares(host_floats(t, d_squares), column_count, pattern == X_LARGE ? 1e9 : pattern == X_SUBNORMAL ? 0 : 1.5);
    ((long long *)host_of(t, d_sums))[place_of(expert_count)] = pattern == X_ZERO    ? -(INT64_C(1) << 62)
                                                                : pattern == X_LARGE ? (INT64_C(1) << 62) - 1
                                                                                     : INT64_C(-9876543210) * (1 + (int)count % 7);
    case_record(t);
    spk_cuda_launch_elementwise(t->cuda, &e);
    case_run(t, 1);
    const logit_source logits = staged_logits(t, &e.routing);
    double weight_error;
    const double weight = shared_weight_of(&logits, expert_count, &weight_error);
    for (uint32_t i = 0; i < count; i++) {
        const double x = (double)host_floats(t, e.a)[i], want = x * weight;
        near("shared_scale", i, (double)result_floats(t, e.out)[i], want, fabs(x) * weight_error + U * fabs(want) + FLOOR);
    }
}

static void check_elementwise(device_case *t, bool is_quick) {
    static const uint32_t counts[] = { 1, 31, 32, 257, 2048, 9216, 16000 };
    for (uint32_t n = 0; n < (is_quick ? 4 : 7); n++)
        for (int p = 0; p < X_PATTERN_COUNT; p++) {
            for (uint32_t operands = 2; operands <= 4; operands++)
                check_elementwise_case(t, SPK_CUDA_ADD, counts[n], operands, (x_pattern)p);
            check_elementwise_case(t, SPK_CUDA_SWIGLU, counts[n], 2, (x_pattern)p);
            check_shared_scale_case(t, counts[n], 4 + 3 * n + (uint32_t)p, p % 2 == 0 ? 32 : 2048, (x_pattern)p);
        }
}

/* ---- norm ---- */

/* out = v * norm_weight: one rounding after the sums.  factor: as the RMSNorm of a source. */
static void check_norm_case(device_case *t, uint32_t count, uint32_t kind, x_pattern pattern) {
    DESCRIBE("norm n=%u %s x=%s", count, source_kinds[kind].name, x_names[pattern]);
    case_begin(t);
    spk_cuda_norm n = { .source = make_source(t, &source_kinds[kind], count, 0, false, pattern),
                        .out = take_floats(t, OUTPUT, count),
                        .factor = take_floats(t, OUTPUT, 1) };
    case_record(t);
    spk_cuda_launch_norm(t->cuda, &n);
    case_run(t, 1);
    spk_cuda_source sums = n.source;
    sums.norm_weight = NULL;
    vector_bounds v = source_bounds(t, &sums);
    double *value = new_doubles(count), *error = new_doubles(count), squares = 0, weighted = 0;
    for (uint32_t i = 0; i < count; i++) {
        double w = (double)host_floats(t, n.source.norm_weight)[i];
        value[i] = v.value[i] * w;
        error[i] = v.error[i] * fabs(w) + U * fabs(value[i]) + FLOOR;
        squares += v.value[i] * v.value[i];
        weighted += fabs(v.value[i]) * v.error[i];
    }
    double mean = squares / count + (double)GPU_EPS, factor = 1 / sqrt(mean);
    double off = factor * ((count / 64.0 + 18) * U + weighted / count / mean);
    near_floats(t, "norm", n.out, value, error, count);
    near_floats(t, "norm factor", n.factor, &factor, &off, 1);
    check_x_out(t, &n.source);
    bounds_free(&v);
    free(value), free(error);
}

static void check_norm(device_case *t, bool is_quick) {
    for (uint32_t k = 0; k < (is_quick ? 3 : 8); k++)
        for (uint32_t kind = S_NORM; kind <= S_ADD3; kind++)
            for (int p = 0; p < X_PATTERN_COUNT; p++) check_norm_case(t, gemv_counts[k], kind, (x_pattern)p);
}

/* ---- embed ---- */

enum { EMBED_CONTEXT = 32768 };
#define TWO_PI 6.283185307179586

/* d * scale * code and dmin * min round twice each, their difference once: 4 u of both.  position * turns is the same double on both
 * sides, and its cosine and sine, but for the last bits of a double, are rounded to float. */
static void check_embed_case(device_case *t, uint32_t type, uint32_t layout, uint32_t rows, uint32_t cols,
                             uint32_t rope_dim, uint32_t position, uint32_t token, w_pattern pattern) {
    DESCRIBE("embed %s %s %ux%u rope=%u position=%u token=%u w=%s", spk_type_name(type), spk_layout_name(layout), rows,
             cols, rope_dim, position, token, w_names[pattern]);
    case_begin(t);
    weights_drop(t);
    spk_cuda_embed e = { .rope_dim = rope_dim,
                         .d_x = take_floats(t, OUTPUT, cols),
                         .d_cos_sin = take_floats(t, OUTPUT, rope_dim) };
    put_pair(t, type, layout, rows, cols, pattern, &e.embedding, NULL);
    e.sequence = (spk_cuda_sequence){ .d_tokens = take(t, INPUT, (EMBED_CONTEXT + 1) * 4, 0),
                                      .d_chosen = take(t, INPUT, (EMBED_CONTEXT + 1) * 4, 0),
                                      .d_position = take(t, INPUT, 4, 0) };
    ((uint32_t *)host_of(t, e.sequence.d_tokens))[position] = token;
    *(uint32_t *)host_of(t, e.sequence.d_position) = position;
    e.clear_count = 1 + (rows + cols + token) % 1100;
    e.d_clear = take(t, OUTPUT, sum_words(e.clear_count) * sizeof *e.d_clear, 0);
    double *d_turns = take(t, INPUT, rope_dim / 2 * sizeof(double), 0), *turns = host_of(t, d_turns);
    for (uint32_t i = 0; i < rope_dim / 2; i++) turns[i] = pow(1e7, -2.0 * i / rope_dim) / TWO_PI;
    e.d_turns = d_turns;
    case_record(t);
    spk_cuda_launch_embed(t->cuda, &e);
    case_run(t, 1);
    const long long *cleared = result_of(t, e.d_clear), *before = host_of(t, e.d_clear);
    for (uint64_t i = 0, words = sum_words(e.clear_count); i < words; i++) {
        const bool is_sum = i % 16 < 4 && i / 16 * 4 + i % 16 < e.clear_count;
        EXPECT(cleared[i] == (is_sum ? 0 : before[i]), "word %llu of %u cleared sums is %llx", (unsigned long long)i, e.clear_count,
               (unsigned long long)cleared[i]);
    }
    double main_part[GPU_COLS_MAX], offset[GPU_COLS_MAX], error[GPU_COLS_MAX];
    uint8_t row[GPU_COLS_MAX * sizeof(float)];
    spk_matrix on = on_host(t, e.embedding);
    spk_layout_get_rows(&on, token, token + 1, row);
    decode_row(type, row, cols, main_part, offset);
    for (uint32_t i = 0; i < cols; i++) {
        error[i] = is_float_type(type) ? 0 : 4 * U * (fabs(main_part[i]) + fabs(offset[i])) + FLOOR;
        main_part[i] -= offset[i];
    }
    near_floats(t, "embed", e.d_x, main_part, error, cols);
    for (uint32_t i = 0; i < rope_dim / 2; i++) {
        double turned = (double)position * turns[i], angle = TWO_PI * (turned - nearbyint(turned)),
               want[2] = { cos(angle), sin(angle) };
        for (uint32_t j = 0; j < 2; j++)
            near("cos_sin", 2 * i + j, (double)result_floats(t, e.d_cos_sin)[2 * i + j], want[j],
                 1.01 * U * fabs(want[j]) + 0x1p-48);
    }
}

static void check_embed(device_case *t, bool is_quick) {
    static const uint32_t cols[] = { 256, 768, 2048, 4096 };
    for (uint32_t type = 0; type < GPU_TYPE_COUNT; type++)
        for (uint32_t layout = SPK_LAYOUT_ROWS; layout <= SPK_LAYOUT_T32; layout++) {
            if (layout == SPK_LAYOUT_T32 && is_float_type(gpu_types[type])) continue;
            for (uint32_t k = 0; k < 4; k++) {
                if (is_quick && k > 1) continue;
                for (int w = W_ZERO; w <= W_RANDOM; w++) {
                    uint32_t rows = k % 2 == 0 ? 100 : 33, token = w % 2 == 0 ? rows - 1 : (uint32_t)w;
                    check_embed_case(t, gpu_types[type], layout, rows, cols[k], w % 2 == 0 ? 64 : 256,
                                     w == W_RANDOM ? 32767 : (uint32_t)w, token, (w_pattern)w);
                }
            }
        }
}

#endif
