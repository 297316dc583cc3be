/* tests/checkkern_ops.h - every operation but the products: fast against reference.
 *
 * exp of the fast table is within 2 u (kernels/vector_avx2.h).  With e = exp(-|t|), a sigmoid is 1 or e over 1 + e; an
 * error of 2 u in e moves it by 2 u / (1 + e) at most, the sum and the division round once each: 4 u.  silu has one
 * product more: 5 u.
 */
#ifndef SPK_CHECKKERN_OPS_H
#define SPK_CHECKKERN_OPS_H

#include "tests/checkkern_guarded.h"

#define SIGMOID_ERROR (4 * U)
#define SILU_ERROR    (5 * U)

static const uint64_t vector_lengths[] = { 1, 7, 8, 31, 128, 257, 2048 };
enum { LENGTH_COUNT = 7, LENGTH_MAX = 2048 };
static const float EPS = 1e-6f;

/* ---- quantize: exact, field by field, against its definition ---- */

static void check_quantize_group(const float *x, const spk_activation_pair *pair, int side, int g) {
    float largest = 0;
    for (int i = 0; i < 32; i++) largest = fmaxf(largest, fabsf(x[i]));
    float scale = largest / 127.0f;
    int sum[2] = { 0, 0 };
    for (int i = 0; i < 32; i++) {
        float quotient = scale == 0 ? 0 : nearbyintf(x[i] / scale);
        int q = (int)fmaxf(-127.0f, fminf(127.0f, quotient)), got = pair->q8[2 * g + i / 16][side][i % 16];
        EXPECT(got == q, "group %d element %d: q %d, want %d", g, i, got, q);
        sum[i / 16] += q;
    }
    for (int i = 0; i < 4; i++) EXPECT(memcmp(&pair->scale4[g][side][i], &scale, 4) == 0, "group %d: scale4", g);
    for (int h = 0; h < 2; h++)
        EXPECT(pair->sum16[g / 4][side][2 * g % 8 + h] == sum[h], "group %d half %d: sum16", g, h);
    EXPECT(pair->sum32[g / 4][side][g % 4] == scale * (float)(sum[0] + sum[1]), "group %d: sum32", g);
    EXPECT(pair->offset[g / 4][side][g % 4] == -32.0f * scale, "group %d: offset", g);
}

static void check_quantize(const spk_kernels *fast) {
    static const uint64_t cols[] = { 256, 512, 768, 1280, 2048 };
    for (size_t c = 0; c < sizeof cols / sizeof *cols; c++) {
        for (int p = 0; p < X_PATTERN_COUNT; p++) {
            DESCRIBE("cols=%llu x=%s", (unsigned long long)cols[c], x_names[p]);
            guarded g = guarded_new(spk_activation_bytes(cols[c]));
            spk_activation x = spk_activation_carve(g.data, cols[c]);
            fill((x_pattern)p, x.f32, cols[c]);
            if (p == X_RANDOM)           /* ties: max 127 makes the scale 1, so halves round to even */
                for (uint64_t i = 0; i < 32; i++) x.f32[i] = i == 0 ? 127.0f : (float)i - 15.5f;
            fast->quantize(&x);
            uint64_t blocks = cols[c] / 256;
            for (uint64_t k = 0; k < blocks; k++)
                for (int group = 0; group < 8; group++)
                    for (int side = 0; side < 2; side++)
                        if (blocks % 2 != 0 || side == (int)(k % 2))
                            check_quantize_group(x.f32 + 256 * k + 32 * group, &x.pairs[blocks % 2 ? k : k / 2], side,
                                                 group);
            guarded_free(&g);
        }
    }
    float lone[100] = { 1 };             /* a width without super-blocks has nothing to fill */
    spk_activation x = { .col_count = 100, .f32 = lone };
    fast->quantize(&x);
}

/* The product rounds and the difference rounds: u of each, and |scale q| is at most |x| + scale/2, |x| <= 127 scale. */
static void check_residual(const spk_kernels *fast) {
    static const uint64_t cols[] = { 512, 768, 2048 };
    for (size_t c = 0; c < sizeof cols / sizeof *cols; c++) {
        for (int p = 0; p < X_PATTERN_COUNT; p++) {
            DESCRIBE("cols=%llu x=%s", (unsigned long long)cols[c], x_names[p]);
            void *block = must(aligned_alloc(64, spk_activation_bytes(cols[c])));
            guarded out = guarded_new(cols[c] * 4);
            spk_activation x = spk_activation_carve(block, cols[c]);
            fill((x_pattern)p, x.f32, cols[c]);
            fast->quantize(&x);
            spk_activation_residual(&x, guarded_floats(&out));
            bool is_even = cols[c] / 256 % 2 == 0;
            for (uint64_t i = 0; i < cols[c]; i++) {
                const spk_activation_pair *pair = &x.pairs[is_even ? i / 512 : i / 256];
                uint64_t side = is_even ? i / 256 % 2 : 0;
                double scale = (double)pair->scale4[i % 256 / 32][side][0];
                double want = (double)x.f32[i] - scale * pair->q8[i % 256 / 16][side][i % 16];
                near("residual", i, (double)guarded_floats(&out)[i], want, 2 * U * 128 * scale + FLOOR);
            }
            guarded_free(&out);
            free(block);
        }
    }
}

/* ---- Elementwise and norms ---- */

/* Norms: the factor is a double rounded once, and two products: 3 u, and u for the reference's own rounding. */
static void check_norms(const spk_kernels *ref, const spk_kernels *fast) {
    for (int n = 0; n < LENGTH_COUNT; n++) {
        for (int p = 0; p < X_PATTERN_COUNT; p++) {
            uint64_t length = vector_lengths[n];
            DESCRIBE("n=%llu x=%s", (unsigned long long)length, x_names[p]);
            float *x = new_floats(length), *w = new_floats(length), *want = new_floats(length);
            guarded out = guarded_new(length * 4);
            float *got = guarded_floats(&out);
            fill((x_pattern)p, x, length);
            fill(X_RANDOM, w, length);
            ref->rms_norm(x, w, length, EPS, want);
            fast->rms_norm(x, w, length, EPS, got);
            for (uint64_t i = 0; i < length; i++)
                near("rms_norm", i, (double)got[i], (double)want[i], 4 * U * fabs((double)want[i]) + FLOOR);
            memcpy(got, x, length * 4);
            fast->rms_norm(got, w, length, EPS, got);
            float *in_place = new_floats(length);
            memcpy(in_place, got, length * 4);
            fast->rms_norm(x, w, length, EPS, got);
            EXPECT(memcmp(got, in_place, length * 4) == 0, "rms_norm in place differs");
            memcpy(want, x, length * 4);
            memcpy(got, x, length * 4);
            ref->l2_norm(want, length, EPS, 0.125f);
            fast->l2_norm(got, length, EPS, 0.125f);
            for (uint64_t i = 0; i < length; i++)
                near("l2_norm", i, (double)got[i], (double)want[i], 3 * U * fabs((double)want[i]) + FLOOR);
            guarded_free(&out);
            free(x), free(w), free(want), free(in_place);
        }
    }
}

/* gate sweeps all of the range in which exp is neither 0 nor infinite; a subnormal exp is off by 2^-149 at most, which
 * the other factors multiply. */
static void check_gates(const spk_kernels *ref, const spk_kernels *fast) {
    enum { COUNT = 100003 };
    float *gate = new_floats(COUNT), *up = new_floats(COUNT), *want = new_floats(COUNT);
    guarded out = guarded_new(COUNT * 4);
    float *got = guarded_floats(&out);
    for (int p = 0; p <= X_PATTERN_COUNT; p++) {
        DESCRIBE("gate=%s", p == X_PATTERN_COUNT ? "sweep -110..110" : x_names[p]);
        if (p < X_PATTERN_COUNT) fill((x_pattern)p, gate, COUNT);
        else for (int i = 0; i < COUNT; i++) gate[i] = 110.0f * (float)(2 * i - COUNT) / (float)COUNT;
        fill(X_RANDOM, up, COUNT);
        ref->swiglu(gate, up, COUNT, want);
        fast->swiglu(gate, up, COUNT, got);
        for (uint64_t i = 0; i < COUNT; i++)     /* silu, a product; the reference's rounding */
            near("swiglu", i, (double)got[i], (double)want[i], (SILU_ERROR + 2 * U) * fabs((double)want[i]) +
                 FLOOR * fmax(1, fabs((double)gate[i])));
        memcpy(want, up, COUNT * 4);
        memcpy(got, up, COUNT * 4);
        ref->sigmoid_gate(want, gate, COUNT);
        fast->sigmoid_gate(got, gate, COUNT);
        for (uint64_t i = 0; i < COUNT; i++)
            near("sigmoid_gate", i, (double)got[i], (double)want[i],
                 (SIGMOID_ERROR + 2 * U) * fabs((double)want[i]) + FLOOR);
        memcpy(want, up, COUNT * 4);
        memcpy(got, up, COUNT * 4);
        ref->add_scaled(want, gate, 0.3f, COUNT);
        fast->add_scaled(got, gate, 0.3f, COUNT);
        for (uint64_t i = 0; i < COUNT; i++)     /* one rounding each */
            near("add_scaled", i, (double)got[i], (double)want[i], 2 * U * fabs((double)want[i]) + FLOOR);
    }
    memcpy(got, gate, COUNT * 4);
    fast->swiglu(got, up, COUNT, got);
    fast->swiglu(gate, up, COUNT, want);
    EXPECT(memcmp(got, want, COUNT * 4) == 0, "swiglu in place differs");
    guarded_free(&out);
    free(gate), free(up), free(want);
}

/* After the norm (3 u here, 1 u in the reference): two products and a sum, 2 u each side of the larger. */
static void check_rope(const spk_kernels *ref, const spk_kernels *fast) {
    static const uint32_t dims[][2] = { { 64, 64 }, { 128, 128 }, { 256, 64 }, { 256, 256 }, { 96, 32 }, { 12, 6 } };
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        for (int p = 0; p < X_PATTERN_COUNT; p++) {
            uint32_t dim = dims[d][0], rope = dims[d][1];
            DESCRIBE("head_dim=%u rope_dim=%u x=%s", dim, rope, x_names[p]);
            float *w = new_floats(dim), *angles = new_floats(rope), *want = new_floats(dim), *normed = new_floats(dim);
            guarded out = guarded_new(dim * 4);
            float *got = guarded_floats(&out);
            fill((x_pattern)p, got, dim);
            fill(X_RANDOM, w, dim);
            for (uint32_t i = 0; i < rope / 2; i++) {
                double theta = 32768 * pow(1e7, -2.0 * i / rope);
                angles[2 * i] = (float)cos(theta);
                angles[2 * i + 1] = (float)sin(theta);
            }
            memcpy(want, got, dim * 4);
            ref->rms_norm(got, w, dim, EPS, normed);
            ref->qk_norm_rope(want, w, dim, rope, angles, EPS);
            fast->qk_norm_rope(got, w, dim, rope, angles, EPS);
            for (uint32_t i = 0; i < dim; i++) {
                uint32_t a = i < rope ? i % (rope / 2) : i, b = i < rope ? a + rope / 2 : i;
                double size = fabs((double)normed[a]) + fabs((double)normed[b]);
                near("qk_norm_rope", i, (double)got[i], (double)want[i], 8 * U * size + 4 * FLOOR);
            }
            guarded_free(&out);
            free(w), free(angles), free(want), free(normed);
        }
    }
}

/* ---- top_k: exactly a stable sort, in both tables ---- */

static void check_top_k_case(const spk_kernels *table, const float *logits, uint32_t n, uint32_t k) {
    guarded index = guarded_new(k * 4), weight = guarded_new(k * 4);
    uint32_t *got = (uint32_t *)(void *)index.data;
    table->top_k(logits, n, k, got, guarded_floats(&weight));
    double sum = 0, largest = 0;
    bool taken[512] = { false };
    for (uint32_t i = 0; i < k; i++) {
        uint32_t best = n;
        for (uint32_t j = 0; j < n; j++)
            if (!taken[j] && (best == n || logits[j] > logits[best])) best = j;
        taken[best] = true;
        EXPECT(got[i] == best, "%s: place %u has %u, want %u", table->name, i, got[i], best);
        if (i == 0) largest = (double)logits[best];
        sum += exp((double)logits[best] - largest);
    }
    for (uint32_t i = 0; i < k && got[i] < n; i++)     /* one rounding from double, and slack for the sum's own order */
        near("top_k weight", i, (double)guarded_floats(&weight)[i], exp((double)logits[got[i]] - largest) / sum, 2 * U);
    guarded_free(&index);
    guarded_free(&weight);
}

static void check_top_k(const spk_kernels *table) {
    static const uint32_t shapes[][2] = { { 12, 4 }, { 256, 8 }, { 8, 8 }, { 1, 1 } };
    float logits[512];
    for (int i = 0; i < 4000; i++) {
        uint32_t n = shapes[i % 4][0], k = shapes[i % 4][1], levels = 1 + (uint32_t)(check_random(&random_state) % 6);
        DESCRIBE("n=%u k=%u levels=%u case=%d", n, k, levels, i);
        for (uint32_t j = 0; j < n; j++)
            logits[j] = (float)(check_random(&random_state) % levels) * (i % 3 == 0 ? -1e30f : 0.5f);
        check_top_k_case(table, logits, n, k);
    }
    for (uint32_t p = 0; p < X_PATTERN_COUNT; p++) {
        DESCRIBE("n=512 k=10 x=%s", x_names[p]);
        fill((x_pattern)p, logits, 512);
        check_top_k_case(table, logits, 512, 10);
    }
}

#endif
