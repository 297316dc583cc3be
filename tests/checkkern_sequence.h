/* tests/checkkern_sequence.h - operations with memory: attention over a cache, the recurrent layers. */
#ifndef SPK_CHECKKERN_SEQUENCE_H
#define SPK_CHECKKERN_SEQUENCE_H

#include "tests/checkkern_ops.h"

/* ---- Attention ---- */

static void check_kv_store(const spk_kernels *table) {
    static const uint32_t dims[] = { 64, 128, 256, 20 };
    const size_t element = table->kv_type == SPK_TYPE_F16 ? 2 : 4;
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        for (int p = 0; p <= X_PATTERN_COUNT; p++) {
            DESCRIBE("%s head_dim=%u x=%s", table->name, dims[d], p == X_PATTERN_COUNT ? "f16 range" : x_names[p]);
            float *x = new_floats(dims[d]);
            fill(p == X_PATTERN_COUNT ? X_RANDOM : (x_pattern)p, x, dims[d]);
            for (uint32_t i = 0; p == X_PATTERN_COUNT && i < dims[d]; i++)      /* subnormal halves up to infinity */
                x[i] = ldexpf(x[i], (int)(check_random(&random_state) % 44) - 26);
            guarded g = guarded_new(3 * dims[d] * element);
            table->kv_store(x, dims[d], g.data, dims[d]);
            for (uint32_t i = 0; i < 3 * dims[d]; i++) {
                uint8_t want[4] = { POISON, POISON, POISON, POISON };
                if (i >= dims[d] && i < 2 * dims[d]) {
                    uint16_t half = spk_f32_to_f16(x[i - dims[d]]);
                    if (element == 2)
                        memcpy(want, &half, 2);
                    else
                        memcpy(want, &x[i - dims[d]], 4);
                }
                EXPECT(memcmp(g.data + i * element, want, element) == 0, "element %u", i);
            }
            guarded_free(&g);
            free(x);
        }
    }
}

typedef enum { A_EQUAL, A_ONE_DOMINATES, A_WIDE, A_RANDOM, A_COUNT } attend_pattern;
static const char *const a_names[] = { "equal scores", "one dominates", "wide scores", "random" };

/* The same values in both caches: F16 for the fast one, F32 for the reference. */
typedef struct {
    spk_attention_cache half, single;
    float              *q, *scores;
    uint64_t            count;
} attend_case;

static attend_case attend_new(uint32_t heads, uint32_t kv_heads, uint32_t dim, uint64_t count, attend_pattern pattern) {
    uint64_t elements = count * kv_heads * dim;
    attend_case c = { .q = new_floats(dim), .scores = new_floats(count), .count = count };
    c.half = (spk_attention_cache){ must(malloc(elements * 2)), must(malloc(elements * 2)), heads, kv_heads, dim };
    c.single = (spk_attention_cache){ new_floats(elements), new_floats(elements), heads, kv_heads, dim };
    float size = pattern == A_EQUAL ? 0.0f : pattern == A_WIDE ? 8.0f : 1.0f;
    uint64_t loud = check_random(&random_state) % count;
    for (uint32_t i = 0; i < dim; i++) c.q[i] = size * check_uniform(&random_state);
    for (uint64_t i = 0; i < elements; i++) {
        float k = size * check_uniform(&random_state);
        if (pattern == A_ONE_DOMINATES && i / (kv_heads * dim) == loud) k = 100 * c.q[i % dim];
        uint16_t kh = spk_f32_to_f16(k), vh = spk_f32_to_f16(check_uniform(&random_state));
        memcpy((uint16_t *)c.half.k + i, &kh, 2);
        memcpy((uint16_t *)c.half.v + i, &vh, 2);
        ((float *)c.single.k)[i] = spk_f16_to_f32(kh);
        ((float *)c.single.v)[i] = spk_f16_to_f32(vh);
    }
    return c;
}

static void attend_free(attend_case *c) {
    free(c->half.k), free(c->half.v), free(c->single.k), free(c->single.v), free(c->q), free(c->scores);
}

/* A score is dim/8 + 3 additions and a product by a rounded scale from exact: s = (dim/8 + 5) u sum|q k| / sqrt(dim);
 * so is the largest, which all share.  The reference's score is itself rounded, u |score|, and so is the difference to
 * the largest, at most 104 u where exp is not 0.  With exp (2 u), a weight is off by e = 2 s + 108 u of itself;
 * numerator and denominator together by 2 e.  Sums over positions add, of sum p |v|: 64 in a block, one for each block,
 * 16 to finish. */
static void check_attend_case(const spk_kernels *ref, const spk_kernels *fast, attend_case *c, uint32_t head) {
    const uint32_t dim = c->half.head_dim, kv_head = head / (c->half.head_count / c->half.kv_head_count);
    const uint64_t stride = (uint64_t)c->half.kv_head_count * dim;
    const float *k = (const float *)c->single.k + kv_head * dim, *v = (const float *)c->single.v + kv_head * dim;
    guarded scratch = guarded_new(c->count * 4), out = guarded_new(dim * 4);
    float want[256], *got = guarded_floats(&out);
    double score_error = 0, total = 0, weighted[256] = { 0 };
    ref->attend(&c->single, head, c->count - 1, c->q, c->scores, want);       /* leaves exp(score - largest) */
    fast->attend(&c->half, head, c->count - 1, c->q, guarded_floats(&scratch), got);
    for (uint64_t j = 0; j < c->count; j++) {
        double size = 0, p = (double)c->scores[j];
        for (uint32_t i = 0; i < dim; i++) {
            size += fabs((double)c->q[i] * (double)k[j * stride + i]);
            weighted[i] += p * fabs((double)v[j * stride + i]);
        }
        total += p;
        double error = (dim / 8.0 + 5) * U * size / sqrt(dim);
        if (error > score_error) score_error = error;
    }
    double e = 2 * score_error + 108 * U, steps = 64 + (double)c->count / 64 + 16;
    for (uint32_t i = 0; i < dim; i++)
        near("attend", i, (double)got[i], (double)want[i],
             (2 * e + steps * U) * weighted[i] / total + FLOOR * (double)c->count);
    guarded_free(&scratch);
    guarded_free(&out);
}

static void check_attend(const spk_kernels *ref, const spk_kernels *fast) {
    static const uint32_t dims[] = { 64, 128, 256, 20 };
    static const uint64_t counts[] = { 1, 2, 255, 256, 257, 32768 };
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++) {
            for (int p = 0; p < A_COUNT; p++) {
                bool is_long = counts[n] > 1000;
                if (is_long && p != A_RANDOM) continue;
                attend_case c = attend_new(6, is_long ? 1 : 3, dims[d], counts[n], (attend_pattern)p);
                for (uint32_t head = 0; head < (is_long ? 1u : 6u); head++) {
                    DESCRIBE("head_dim=%u positions=%llu head=%u %s", dims[d], (unsigned long long)counts[n], head,
                             a_names[p]);
                    check_attend_case(ref, fast, &c, head);
                }
                attend_free(&c);
            }
        }
    }
}

/* ---- Recurrent layers ---- */

/* The sum: 4 roundings of sum|tap x|, which silu, of slope at most 1.1, passes on; then silu's own error.  The states
 * are moved, not computed: equal bits. */
static void check_conv_case(const spk_kernels *ref, const spk_kernels *fast, uint64_t channels, uint32_t kernel,
                            x_pattern pattern) {
    const uint64_t past = (kernel - 1) * channels;
    float *u = new_floats(channels), *taps = new_floats(channels * kernel), *before = new_floats(past);
    float *ref_state = new_floats(past), *want = new_floats(channels);
    guarded state = guarded_new(past * 4), out = guarded_new(channels * 4);
    float *got = guarded_floats(&out);
    fill(pattern, u, channels);
    fill(pattern, before, past);
    fill(X_RANDOM, taps, channels * kernel);
    memcpy(ref_state, before, past * 4);
    memcpy(state.data, before, past * 4);
    ref->gdn_conv(u, taps, ref_state, channels, kernel, 0, channels, want);
    fast->gdn_conv(u, taps, guarded_floats(&state), channels, kernel, 0, channels, got);
    EXPECT(memcmp(state.data, ref_state, past * 4) == 0, "states differ");
    for (uint64_t c = 0; c < channels; c++) {
        double size = fabs((double)taps[c * kernel + kernel - 1] * (double)u[c]);
        for (uint32_t t = 0; t + 1 < kernel; t++)
            size += fabs((double)taps[c * kernel + t] * (double)before[t * channels + c]);
        near("gdn_conv", c, (double)got[c], (double)want[c],
             4.4 * U * size + (SILU_ERROR + U) * fabs((double)want[c]) + FLOOR * fmax(4, size));
    }
    /* The same bits in pieces, and nothing touched outside a piece. */
    uint64_t cut = channels / 3;
    memcpy(state.data, before, past * 4);
    memset(out.data, POISON, channels * 4);
    float *whole = new_floats(channels);
    fast->gdn_conv(u, taps, guarded_floats(&state), channels, kernel, 0, cut, got);
    for (uint64_t c = cut; c < channels; c++) EXPECT(is_poison(got[c]), "channel %llu written", (unsigned long long)c);
    fast->gdn_conv(u, taps, guarded_floats(&state), channels, kernel, cut, channels, got);
    EXPECT(memcmp(state.data, ref_state, past * 4) == 0, "states differ in pieces");
    memcpy(ref_state, before, past * 4);
    fast->gdn_conv(u, taps, ref_state, channels, kernel, 0, channels, whole);
    EXPECT(memcmp(whole, got, channels * 4) == 0, "pieces differ from the whole");
    guarded_free(&state);
    guarded_free(&out);
    free(u), free(taps), free(before), free(ref_state), free(want), free(whole);
}

static void check_conv(const spk_kernels *ref, const spk_kernels *fast) {
    static const uint64_t channels[] = { 1, 7, 8, 61, 768 };
    for (size_t c = 0; c < sizeof channels / sizeof *channels; c++)
        for (uint32_t kernel = 2; kernel <= 4; kernel++)
            for (int p = 0; p < X_PATTERN_COUNT; p++) {
                DESCRIBE("channels=%llu kernel=%u x=%s", (unsigned long long)channels[c], kernel, x_names[p]);
                check_conv_case(ref, fast, channels[c], kernel, (x_pattern)p);
            }
}

/* The reference against the sequence of steps in kernels.h, taken literally, in double.  It rounds the new state and
 * each of three stages of the output to float: 2 u of their size, through sums of k_dim products. */
static void check_delta_rule(const spk_gdn_shape *s, const float *before, const float *after, const float *q,
                             const float *k, const float *v, float decay, float beta, double *o) {
    for (uint32_t c = 0; c < s->v_dim; c++) {
        double row[256], predicted = 0, size = 0;
        for (uint32_t i = 0; i < s->k_dim; i++) {
            row[i] = (double)decay * (double)before[c * s->k_dim + i];
            predicted += row[i] * (double)k[i];
        }
        double d = (double)beta * ((double)v[c] - predicted);
        o[c] = 0;
        for (uint32_t i = 0; i < s->k_dim; i++) {
            size = fabs(row[i]) + fabs(d * (double)k[i]);
            row[i] += d * (double)k[i];
            o[c] += row[i] * (double)q[i];
            near("reference state", c * s->k_dim + i, (double)after[c * s->k_dim + i], row[i], 2 * U * size + FLOOR);
        }
    }
}

/* Bounds of one head, from the exact quantities.  With n = k_dim/8 + 4 additions in a sum:
 *   predicted  n u sum|S k|, so delta is off by D = beta (decay (n + 1) u sum|S k| + 3 u (|v| + |decay S.k|))
 *   state      3 u |decay S| + |k| D + 2 u |delta k|  =: E_i
 *   o          sum |q| E_i + (n + 1) u sum|S' q|      =: F_c
 *              each addition may also underflow, by FLOOR
 *   out        the norm's factor is off by the relative size of F (root mean square over that of o): G.  Then
 *              |f w silu(z)| (F_c + |o_c| G), and silu, the norm's products and roundings of both sides: 20 u. */
static void check_gdn_case(const spk_kernels *ref, const spk_kernels *fast, const spk_gdn_shape *s, const float *before,
                           const float *q, const float *k, const float *v, const float *norm_w, const float *z) {
    const float decay = 0.9f, beta = 0.7f;
    const uint64_t elements = (uint64_t)s->k_dim * s->v_dim;
    float *ref_state = new_floats(elements), want[256];
    guarded state = guarded_new(elements * 4), out = guarded_new(s->v_dim * 4);
    const float *got = guarded_floats(&out), *after = guarded_floats(&state);
    double o[256], F[256], F_squares = 0, o_squares = 0, n = s->k_dim / 8.0 + 4;
    memcpy(ref_state, before, elements * 4);
    memcpy(state.data, before, elements * 4);
    ref->gdn_head(s, ref_state, q, k, v, decay, beta, norm_w, z, want);
    fast->gdn_head(s, guarded_floats(&state), q, k, v, decay, beta, norm_w, z, guarded_floats(&out));
    check_delta_rule(s, before, ref_state, q, k, v, decay, beta, o);
    for (uint32_t c = 0; c < s->v_dim; c++) {
        double dot = 0, size = 0, out_size = 0;
        for (uint32_t i = 0; i < s->k_dim; i++) {
            double product = (double)before[c * s->k_dim + i] * (double)k[i];
            dot += product;
            size += fabs(product);
        }
        double delta = (double)beta * ((double)v[c] - (double)decay * dot);
        double D = (double)beta * ((double)decay * (n + 1) * (U * size + FLOOR) +
                                   3 * U * (fabs((double)v[c]) + fabs((double)decay * dot)) + 3 * FLOOR);
        F[c] = 0;
        for (uint32_t i = 0; i < s->k_dim; i++) {
            uint64_t at = c * s->k_dim + i;
            double E = 3 * U * fabs((double)decay * (double)before[at]) + fabs((double)k[i]) * D +
                       2 * U * fabs(delta * (double)k[i]) + 2 * FLOOR;
            near("state", at, (double)after[at], (double)ref_state[at], E);
            F[c] += fabs((double)q[i]) * E;
            out_size += fabs((double)ref_state[at] * (double)q[i]);
        }
        F[c] += (n + 1) * (U * out_size + FLOOR);
        F_squares += F[c] * F[c];
        o_squares += o[c] * o[c];
    }
    double mean = o_squares / s->v_dim + (double)s->eps, factor = 1 / sqrt(mean), G = sqrt(F_squares / s->v_dim / mean);
    for (uint32_t c = 0; c < s->v_dim; c++) {
        double t = (double)z[c], gate = fabs((double)norm_w[c] * t / (1 + exp(-t)));
        double exact = o[c] * factor * (double)norm_w[c] * t / (1 + exp(-t));
        double passed_on = 1.01 * factor * gate * (F[c] + fabs(o[c]) * G);
        near("reference", c, (double)want[c], exact, passed_on + 8 * U * fabs(exact) + FLOOR);
        near("gdn_head", c, (double)got[c], (double)want[c],
             passed_on + 20 * U * fabs(exact) + FLOOR * fmax(1, fabs(t)));
    }
    guarded_free(&state);
    guarded_free(&out);
    free(ref_state);
}

/* All V heads of a layer, with V : K = ratio, the state of each from the step before. */
static void check_gdn(const spk_kernels *ref, const spk_kernels *fast) {
    static const uint32_t dims[][2] = { { 128, 128 }, { 64, 32 }, { 16, 12 }, { 12, 20 } };
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        for (uint32_t ratio = 1; ratio <= 3; ratio++) {
            for (int p = 0; p < X_PATTERN_COUNT; p++) {
                spk_gdn_shape s = { 2, 2 * ratio, dims[d][0], dims[d][1], 4, EPS };
                uint64_t elements = (uint64_t)s.k_dim * s.v_dim;
                float *q = new_floats(2 * s.k_dim), *k = new_floats(2 * s.k_dim), *state = new_floats(elements);
                float *v = new_floats(s.v_dim), *norm_w = new_floats(s.v_dim), *z = new_floats(s.v_dim);
                fill(X_RANDOM, q, 2 * s.k_dim);
                fill(X_RANDOM, k, 2 * s.k_dim);
                fill(X_RANDOM, norm_w, s.v_dim);
                for (uint32_t h = 0; h < s.k_head_count; h++) {
                    ref->l2_norm(q + h * s.k_dim, s.k_dim, EPS, 1.0f / sqrtf((float)s.k_dim));
                    ref->l2_norm(k + h * s.k_dim, s.k_dim, EPS, 1.0f);
                }
                for (uint32_t j = 0; j < s.v_head_count; j++) {
                    DESCRIBE("k_dim=%u v_dim=%u v:k=%u v_head=%u v,state=%s", s.k_dim, s.v_dim, ratio, j, x_names[p]);
                    uint32_t k_head = j % s.k_head_count;
                    fill(j == 0 ? X_ZERO : (x_pattern)p, state, elements);
                    fill((x_pattern)p, v, s.v_dim);
                    fill(X_RANDOM, z, s.v_dim);
                    for (uint32_t c = 0; c < s.v_dim; c++) z[c] *= 6;
                    check_gdn_case(ref, fast, &s, state, q + k_head * s.k_dim, k + k_head * s.k_dim, v, norm_w, z);
                }
                free(q), free(k), free(state), free(v), free(norm_w), free(z);
            }
        }
    }
}

#endif
