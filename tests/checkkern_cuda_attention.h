/* tests/checkkern_cuda_attention.h - spk_cuda_launch_attention at the contexts where splits and tiles begin and end.
 *
 * The cache beyond the position holds NaN.  The new row is compared as halves with what it must round; then the reference attends to
 * the cache as the GPU left it.
 *
 * Bounds (u = 2^-24):
 *   q, k       RMSNorm (head_dim/2 + 14) u, rotation 3 u of both parts; a stored half 2^-11 of itself or 2^-25
 *   score      (head_dim + 6) u sum|q k| / sqrt(d), and the error of q through sum|k|
 *   weight     exp(score - top).  __expf is within 2 + 1.173 |x| ulp, and x itself within 2 u |x|.  An online softmax multiplies
 *              by one such factor whenever its largest score rises: the exponents still add up to x, and the rises are no
 *              more than the longest rising subsequence R of the scores; merging warps and splits adds three.  So
 *              (4 (R + 4) + 5 x) u and twice the largest score error
 *   out        positions are shared by 8 warps at least: count/8 + 64 additions, in numerator and denominator
 * The same holds for what its parts merge to in double precision: a quotient and a gate's product for each part are two roundings
 * of the sum of sizes, for which the 64 have room. */
#ifndef SPK_CHECKKERN_CUDA_ATTENTION_H
#define SPK_CHECKKERN_CUDA_ATTENTION_H

#include "tests/attention_cache.h"
#include "tests/attention_parts.h"
#include "tests/checkkern_cuda_gemv.h"

typedef struct { uint32_t heads, kv_heads, dim, rope_dim; bool is_gated; } head_shape;
static const head_shape head_shapes[] = {
    { 16, 2, 256, 64, true }, { 32, 4, 128, 128, false }, { 6, 3, 64, 64, false },
    { 3, 1, 128, 32, true },  { 4, 4, 256, 256, false },
};
typedef enum { K_RANDOM, K_EQUAL, K_WIDE, K_RISING, K_COUNT } key_pattern;
static const char *const key_names[] = { "random", "equal", "wide", "rising" };
enum { CACHE_TAIL = 3, HEAD_DIM_MAX = 256 };

typedef struct {
    device_case       *t;
    spk_cuda_attention a;
    uint32_t           count;                 /* positions, the new one included */
    double            *want, *error;          /* [heads][dim] */
} attention_case;

/* A head of q or k after norm and rotation. */
static void head_bounds(const device_case *t, const spk_cuda_attention *a, const float *d_x, const float *d_weight,
                        double *value, double *error) {
    const float *x = host_floats(t, d_x), *w = host_floats(t, d_weight), *cos_sin = host_floats(t, a->cos_sin);
    double squares = 0;
    for (uint32_t i = 0; i < a->head_dim; i++) squares += (double)x[i] * (double)x[i];
    double factor = 1 / sqrt(squares / a->head_dim + (double)a->eps);
    for (uint32_t i = 0; i < a->head_dim; i++) {
        value[i] = (double)x[i] * factor * (double)w[i];
        error[i] = (a->head_dim / 2.0 + 14) * U * fabs(value[i]) + FLOOR * fmax(1, factor);
    }
    for (uint32_t i = 0, half = a->rope_dim / 2; i < half; i++) {
        double c = (double)cos_sin[2 * i], s = (double)cos_sin[2 * i + 1], p = value[i], q = value[i + half],
               off = error[i] + error[i + half];
        value[i] = p * c - q * s;
        value[i + half] = p * s + q * c;
        error[i] = error[i + half] = off + 3 * U * (fabs(p) + fabs(q));
    }
}

/* Longest rising subsequence, by patience. */
static uint32_t rising_length(const double *x, uint32_t count, double *piles) {
    uint32_t length = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t low = 0, high = length;
        while (low < high) {
            uint32_t middle = (low + high) / 2;
            if (piles[middle] < x[i]) low = middle + 1;
            else high = middle;
        }
        piles[low] = x[i];
        if (low == length) length++;
    }
    return length;
}

/* Item: one query head. */
static void attention_bounds(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const attention_case *c = context;
    const spk_cuda_attention *a = &c->a;
    const uint32_t dim = a->head_dim;
    double *scores = new_doubles(c->count), *piles = new_doubles(c->count), q[HEAD_DIM_MAX], q_error[HEAD_DIM_MAX];
    (void)thread_index;
    for (uint64_t head = begin; head < end; head++) {
        const uint32_t kv_head = (uint32_t)head / (a->head_count / a->kv_head_count);
        const void *k = result_of(c->t, a->k_cache), *v = result_of(c->t, a->v_cache);
        const float *d_q = a->q + head * (a->is_gated ? 2 : 1) * dim;
        double top = -INFINITY, score_error = 0, total = 0, total_error = 0, *want = c->want + head * dim,
               *error = c->error + head * dim, size[HEAD_DIM_MAX] = { 0 };
        head_bounds(c->t, a, d_q, a->q_norm, q, q_error);
        for (uint32_t j = 0; j < c->count; j++) {
            double sum = 0, off = 0;
            for (uint32_t i = 0; i < dim; i++) {
                double key = (double)attention_value(a, k, false, j, kv_head, i);
                sum += q[i] * key;
                off += fabs(key) * (q_error[i] + (dim + 6) * U * fabs(q[i]));
            }
            scores[j] = sum / sqrt(dim);
            score_error = fmax(score_error, off / sqrt(dim));
            top = fmax(top, scores[j]);
        }
        const double rises = rising_length(scores, c->count, piles), steps = c->count / 8.0 + 64;
        for (uint32_t j = 0; j < c->count; j++) {
            double p = exp(scores[j] - top),
                   p_error = p * ((4 * (rises + 4) + 5 * (top - scores[j])) * U + 2 * score_error) + 0x1p-126;
            total += p;
            total_error += p_error;
            for (uint32_t i = 0; i < dim; i++) {
                double value = (double)attention_value(a, v, true, j, kv_head, i);
                want[i] += p * value;
                size[i] += p * fabs(value);
                error[i] += p_error * fabs(value);
            }
        }
        for (uint32_t i = 0; i < dim; i++) {
            want[i] /= total;
            error[i] = (error[i] + fabs(want[i]) * total_error + 2 * steps * U * size[i]) / total +
                       4 * U * fabs(want[i]) + FLOOR;
            double gate = a->is_gated ? (double)host_floats(c->t, d_q)[dim + i] : 0,
                   open = a->is_gated ? sigmoid_of(gate) : 1;
            error[i] = error[i] * open + (a->is_gated ? (fabs(want[i]) + error[i]) * (sigmoid_error(gate) + U * open) : 0);
            want[i] *= open;
        }
    }
    free(scores), free(piles);
}

/* The new row, and nothing else, in both caches: with the old row put back they are as they were. */
static void check_caches(const attention_case *c) {
    const spk_cuda_attention *a = &c->a;
    const uint32_t dim = a->head_dim, position = c->count - 1;
    const uint64_t cache_bytes = spk_cuda_attention_cache_bytes(a);
    const void *caches[2] = { a->k_cache, a->v_cache };
    for (int i = 0; i < 2; i++) {
        void *restored = must(malloc(cache_bytes));
        memcpy(restored, result_of(c->t, caches[i]), cache_bytes);
        for (uint32_t head = 0; head < a->kv_head_count; head++)
            attention_copy_row(a, restored, host_of(c->t, caches[i]), i == 1, position, head);
        EXPECT(memcmp(restored, host_of(c->t, caches[i]), cache_bytes) == 0, "%s of other positions was written", i == 0 ? "k" : "v");
        free(restored);
    }
    for (uint32_t head = 0; head < a->kv_head_count; head++) {
        double k[HEAD_DIM_MAX], k_error[HEAD_DIM_MAX];
        head_bounds(c->t, a, a->k + head * dim, a->k_norm, k, k_error);
        for (uint32_t i = 0; i < dim; i++) {
            near("stored k", head * dim + i, (double)attention_value(a, result_of(c->t, a->k_cache), false, position, head, i), k[i],
                 k_error[i] + (fabs(k[i]) + k_error[i]) * 0x1p-11 + 0x1p-25);
            float v = attention_value(a, result_of(c->t, a->v_cache), true, position, head, i),
                  want = spk_f16_to_f32(spk_f32_to_f16(host_floats(c->t, a->v)[head * dim + i]));
            EXPECT(v == want, "stored v[%u]: got %g want %g", head * dim + i, (double)v, (double)want);
        }
    }
}

static void fill_caches(device_case *t, const attention_case *c, key_pattern pattern) {
    void *k = host_of(t, c->a.k_cache), *v = host_of(t, c->a.v_cache);
    float keys[HEAD_DIM_MAX], values[HEAD_DIM_MAX];
    memset(k, 0xff, spk_cuda_attention_cache_bytes(&c->a));                   /* NaN where nothing was stored */
    memset(v, 0xff, spk_cuda_attention_cache_bytes(&c->a));
    for (uint32_t j = 0; j + 1 < c->count; j++)
        for (uint32_t head = 0; head < c->a.kv_head_count; head++) {
            for (uint32_t i = 0; i < c->a.head_dim; i++) {
                float rise = (float)j / (float)c->count, key = check_uniform(&random_state);
                keys[i] = pattern == K_EQUAL ? 0.25f : pattern == K_WIDE ? 8 * key : pattern == K_RISING ? 3 * rise : key;
                values[i] = check_uniform(&random_state);
            }
            attention_put(&c->a, k, false, j, head, keys);
            attention_put(&c->a, v, true, j, head, values);
        }
}

/* The same attention with an output that may come in parts. */
static spk_cuda_attention parted_twin(device_case *t, const spk_cuda_attention *a) {
    spk_cuda_attention twin = *a;
    twin.out = take_floats(t, OUTPUT, (uint64_t)SPK_CUDA_PARTS_MAX * a->head_count * a->head_dim);
    twin.part_totals = take_floats(t, OUTPUT, (uint64_t)SPK_CUDA_PARTS_MAX * 2 * a->head_count);
    return twin;
}
/* From the first that must not be written on. */
static void check_poison(const device_case *t, const char *what, const float *d_got, uint64_t from, uint64_t count) {
    for (uint64_t i = from; i < count; i++)
        EXPECT(is_poison(result_floats(t, d_got)[i]), "%s[%llu] was written: %.9g", what, (unsigned long long)i, (double)result_floats(t, d_got)[i]);
}
static void check_parts_of_attention(const attention_case *c, const spk_cuda_attention *a) {
    const uint32_t part_count = attention_part_count(c->count - 1), heads = a->head_count, out_count = heads * a->head_dim;
    check_poison(c->t, "part", a->out, (uint64_t)part_count * out_count, (uint64_t)SPK_CUDA_PARTS_MAX * out_count);
    check_poison(c->t, "total", a->part_totals, part_count == 1 ? 0 : part_count * 2 * heads, SPK_CUDA_PARTS_MAX * 2 * heads);
    if (part_count == 1) {
        same_floats(c->t, "attention, in one part or none", a->out, c->a.out, out_count);
        return;
    }
    for (uint32_t i = 0; i < out_count; i++) {
        double weight[SPK_CUDA_PARTS_MAX];
        attention_part_weights(result_floats(c->t, a->part_totals), heads, i / a->head_dim, part_count, weight);
        near("attention, merged", i, attention_merged(result_floats(c->t, a->out), out_count, i, part_count, weight), c->want[i], c->error[i]);
    }
}

static void check_attention_case(device_case *t, const head_shape *s, uint32_t count, key_pattern pattern) {
    DESCRIBE("attention heads=%u/%u dim=%u rope=%u%s context=%u k=%s", s->heads, s->kv_heads, s->dim, s->rope_dim,
             s->is_gated ? " gated" : "", count, key_names[pattern]);
    const uint32_t q_width = s->heads * (s->is_gated ? 2 : 1) * s->dim,
                   kv_width = s->kv_heads * s->dim;
    case_begin(t);
    attention_case c = { .t = t,
                         .count = count,
                         .want = new_doubles((uint64_t)s->heads * s->dim),
                         .error = new_doubles((uint64_t)s->heads * s->dim) };
    uint32_t *d_position = take(t, INPUT, 4, 0), position = count - 1;
    memcpy(host_of(t, d_position), &position, sizeof position);
    c.a = (spk_cuda_attention){ .d_position = d_position,
                                .head_count = s->heads,
                                .kv_head_count = s->kv_heads,
                                .head_dim = s->dim,
                                .rope_dim = s->rope_dim,
                                .is_gated = s->is_gated,
                                .eps = GPU_EPS,
                                .q = take_staged_as(t, q_width, X_RANDOM),
                                .k = take_staged_as(t, kv_width, X_RANDOM),
                                .v = take_staged_as(t, kv_width, X_RANDOM),
                                .q_norm = take_input_as(t, s->dim, X_RANDOM),
                                .k_norm = take_input_as(t, s->dim, X_RANDOM),
                                .context_tokens = count + CACHE_TAIL,
                                .out = take_floats(t, OUTPUT, (uint64_t)s->heads * s->dim) };
    c.a.k_cache = take(t, OUTPUT, spk_cuda_attention_cache_bytes(&c.a), 0);
    c.a.v_cache = take(t, OUTPUT, spk_cuda_attention_cache_bytes(&c.a), 0);
    float *d_cos_sin = take_staged(t, s->rope_dim);
    for (uint32_t i = 0; i < s->rope_dim / 2; i++) {
        double angle = (double)position * pow(1e7, -2.0 * i / s->rope_dim);
        host_floats(t, d_cos_sin)[2 * i] = (float)cos(angle);
        host_floats(t, d_cos_sin)[2 * i + 1] = (float)sin(angle);
    }
    c.a.cos_sin = d_cos_sin;
    uint64_t scratch_bytes = spk_cuda_attention_scratch_bytes(t->cuda, &c.a);
    c.a.partial = take(t, SCRATCH, scratch_bytes, 0);
    memset(host_of(t, c.a.partial), 0, scratch_bytes);
    fill_caches(t, &c, pattern);
    const bool has_parts = spk_cuda_attention_has_parts(t->cuda, &c.a);
    spk_cuda_attention parted = parted_twin(t, &c.a);
    case_record(t);
    spk_cuda_launch_attention(t->cuda, &c.a);
    if (has_parts) spk_cuda_launch_attention(t->cuda, &parted);
    case_run(t, 1);
    check_caches(&c);
    spk_pool_run(t->pool, s->heads, 1, attention_bounds, &c);
    near_floats(t, "attention", c.a.out, c.want, c.error, (uint64_t)s->heads * s->dim);
    if (has_parts) check_parts_of_attention(&c, &parted);
    free(c.want), free(c.error);
}

/* Both sides of where a part begins.  Quick: of the shape that has parts on a device of four SMs. */
static void check_attention_parts(device_case *t, bool is_quick) {
    static const uint32_t counts[] = { 128, 129, 256, 257, 384, 385, 512, 513 };
    for (size_t s = 0; s < sizeof head_shapes / sizeof *head_shapes; s++)
        for (size_t n = 0; n < sizeof counts / sizeof *counts; n++)
            for (int p = 0; p < K_COUNT; p++)
                if (!is_quick || (s == 3 && (p == K_RANDOM || p == K_WIDE))) check_attention_case(t, &head_shapes[s], counts[n], (key_pattern)p);
}

static void check_attention(device_case *t, bool is_quick) {
    static const uint32_t counts[] = { 1, 2, 31, 255, 256, 257, 1000, 4099, 32768 };
    for (size_t s = 0; s < sizeof head_shapes / sizeof *head_shapes; s++)
        for (uint32_t n = 0; n < (is_quick ? 6 : 9); n++)
            for (int p = 0; p < K_COUNT; p++) {
                bool is_long = counts[n] > 1000;
                if ((is_long && (p != K_RANDOM || s > 1)) || (is_quick && s != 2 && n != 4)) continue;
                check_attention_case(t, &head_shapes[s], counts[n], (key_pattern)p);
            }
    check_attention_parts(t, is_quick);
}

#endif
