/* tests/gpu_attention.c - the attention kernel against plain double precision, and its speed.  Without a GPU: status 77.
 *
 *   make build/tests/gpu_attention && build/tests/gpu_attention [--max-context N] [--seed N] [--bench]
 *
 * Each case: caches of given content with NaN bytes at positions that were not stored, one token, and then
 *   the output within the tolerance that kernels/attention_cuda.cu derives, computed here from the case's own numbers;
 *   the new row stored where and as kernels/attention_cache_cuda.cuh says, and no other byte of the caches changed;
 *   nothing written around the output; the same bits from a second run;
 *   the same for an output that comes in parts, as far as the device gives that many CTAs to a KV head (sixteen SMs do, but for the
 *   20 heads of 256); parts are merged here, and of a single part the bits are those of the output in one.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "tests/attention_parts.h"
#include "tests/gpu_attention_bench.h"
#include "tests/gpu_attention_case.h"

#define U 0x1p-24                  /* the largest relative error of one F32 rounding */
#define LOG2E 1.4426950408889634
#define LN2 0.6931471805599453

/* ---- The reference ---- */

/* x normed and rotated; size is what roundings are relative to: |a| + |b| of a rotation. */
static void norm_rotate(const shape *s, const float *x, const float *w, const float *cos_sin, float eps, double *out, double *size) {
    double squares = 0, n[DIM_MAX];
    for (uint32_t d = 0; d < s->dim; d++) squares += (double)x[d] * (double)x[d];
    double factor = 1 / sqrt(squares / s->dim + (double)eps);
    for (uint32_t d = 0; d < s->dim; d++) {
        n[d] = (double)x[d] * factor * (double)w[d];
        out[d] = n[d];
        size[d] = fabs(n[d]);
    }
    for (uint32_t i = 0, half = s->rope / 2; i < half; i++) {
        double cosine = (double)cos_sin[2 * i], sine = (double)cos_sin[2 * i + 1], a = n[i], b = n[i + half];
        out[i] = a * cosine - b * sine;
        out[i + half] = a * sine + b * cosine;
        size[i] = fabs(a * cosine) + fabs(b * sine);
        size[i + half] = fabs(a * sine) + fabs(b * cosine);
    }
}

/* One query head's q, in units of log2 of a weight. */
typedef struct { double q[DIM_MAX], size[DIM_MAX], top; } query;
static query query_of(const host_case *c, uint32_t head) {
    const shape *s = &c->s;
    query r = { .top = 0 };
    norm_rotate(s, c->q + (uint64_t)head * q_stride(s), c->q_norm, c->cos_sin, c->a.eps, r.q, r.size);
    for (uint32_t d = 0; d < s->dim; d++) {
        r.q[d] *= LOG2E / sqrt(s->dim);
        r.size[d] *= LOG2E / sqrt(s->dim);
        r.top = fmax(r.top, fabs((double)c->q_norm[d]) * LOG2E);
    }
    return r;
}

/* A score and its error bound, as derived in the kernel's header. */
static double score_of(const query *r, const double *k, uint32_t dim, double *error) {
    double sum = 0, size = 0, k_sum = 0;
    uint32_t terms = 0;
    for (uint32_t d = 0; d < dim; d++) {
        sum += r->q[d] * k[d];
        size += r->size[d] * fabs(k[d]);
        if (r->q[d] * k[d] != 0) {
            terms++;
            k_sum += fabs(k[d]);
        }
    }
    double additions = terms == 0 ? 0 : terms - 1;
    *error = (28 + (additions > 0 ? 6 : 0) + 2 * fmin(additions, 68)) * U * size + 0x1p-38 * r->top * k_sum + 2 * U * fabs(sum);
    return sum;
}

/* Sums of one head over rows, as they come; scores first, so that weights are relative to the largest. */
typedef struct { double top, total, error, weighted[DIM_MAX], size[DIM_MAX], error_size[DIM_MAX], v_sum[DIM_MAX]; uint64_t rows; } head_sums;
static void add_row(head_sums *t, double score, double score_error, double times, const double *v, uint32_t dim) {
    double weight = times * exp2(score - t->top), error = expm1(LN2 * (score_error + 2 * U * fabs(t->top - score))) + 12 * U;
    t->total += weight;
    t->error += weight * error;
    t->rows += weight * (double)(1 << 30) * 65536.0 > 0;
    for (uint32_t d = 0; d < dim; d++) {
        t->weighted[d] += weight * v[d];
        t->size[d] += weight * fabs(v[d]);
        t->error_size[d] += weight * fabs(v[d]) * error;
        t->v_sum[d] += fabs(v[d]) * times;
    }
}

/* rounds and splits: how many the kernel may have used, an upper bound. */
static void check_head(const host_case *c, uint32_t head, const head_sums *t, double rounds, double splits) {
    const shape *s = &c->s;
    for (uint32_t d = 0; d < s->dim; d++) {
        double want = t->weighted[d] / t->total, size = t->size[d] / t->total;
        double steps = 2 * fmin((double)t->rows - 1, 136) + (t->rows > 1 ? 4 * rounds + 2 * splits : 0) + 40;
        double error = t->error_size[d] / t->total + fabs(want) * t->error / t->total + steps * U * size + 0x1p-38 * t->v_sum[d] / t->total;
        if (s->is_gated) {
            double gate = 1 / (1 + exp(-(double)c->q[(uint64_t)head * q_stride(s) + s->dim + d]));
            want *= gate;
            error = error * gate + 20 * U * fabs(want);
        }
        double got = (double)c->out[GUARD_FLOATS + (uint64_t)head * s->dim + d];
        EXPECT(fabs(got - want) <= error + 0x1p-140, "head %u dim %u: got %.9g want %.9g, off by %.3g, tolerance %.3g", head, d, got, want,
               fabs(got - want), error);
    }
}

/* With the new row as it was stored: that has a check of its own. */
static void check_output(const host_case *c) {
    const shape *s = &c->s;
    const uint32_t ratio = s->heads / s->kv_heads, dim = s->dim;
    double *score = must_have(malloc(s->count * sizeof *score)), *error = must_have(malloc(s->count * sizeof *error));
    double *k = must_have(malloc((uint64_t)s->count * dim * sizeof *k)), *v = must_have(malloc((uint64_t)s->count * dim * sizeof *v));
    for (uint32_t kv_head = 0; kv_head < s->kv_heads; kv_head++) {
        for (uint32_t j = 0; j < s->count; j++)
            for (uint32_t d = 0; d < dim; d++) {
                k[(uint64_t)j * dim + d] = (double)attention_value(&c->a, c->k_after, false, j, kv_head, d);
                v[(uint64_t)j * dim + d] = (double)attention_value(&c->a, c->v_after, true, j, kv_head, d);
            }
        for (uint32_t head = kv_head * ratio; head < (kv_head + 1) * ratio; head++) {
            query r = query_of(c, head);
            head_sums t = { .top = -INFINITY };
            for (uint32_t j = 0; j < s->count; j++) {
                score[j] = score_of(&r, k + (uint64_t)j * dim, dim, &error[j]);
                t.top = fmax(t.top, score[j]);
            }
            for (uint32_t j = 0; j < s->count; j++) add_row(&t, score[j], error[j], 1, v + (uint64_t)j * dim, dim);
            check_head(c, head, &t, s->count / 128 + 1, spk_cuda_sm_count(cuda));
        }
    }
    free(score), free(error), free(k), free(v);
}

/* The new row is k normed and rotated, and v, to the precision of the cache. */
static void check_stored(const host_case *c) {
    const shape *s = &c->s;
    for (uint32_t h = 0; h < s->kv_heads; h++)
        for (int is_v = 0; is_v < 2; is_v++) {
            double want[DIM_MAX], size[DIM_MAX];
            float x[DIM_MAX];
            norm_rotate(s, c->k + (uint64_t)h * s->dim, c->k_norm, c->cos_sin, c->a.eps, want, size);
            for (uint32_t d = 0; d < s->dim; d++) {
                if (is_v) want[d] = (double)c->v[(uint64_t)h * s->dim + d], size[d] = 0;
                x[d] = (float)want[d];
            }
            for (uint32_t d = 0; d < s->dim; d++) {
                uint16_t half;
                double got = (double)attention_value(&c->a, is_v ? c->v_after : c->k_after, is_v, s->count - 1, h, d);
                double error = 28 * U * size[d] + 0x1p-11 * fabs(want[d]) + 0x1p-24;
                if (s->kv == SPK_CUDA_KV_Q8) error += 0.502 * (double)attention_scale(x + d / 32 * 32, &half) + 0x1p-11 * fabs(want[d]);
                EXPECT(fabs(got - want[d]) <= error, "stored %s of KV head %u dim %u: %.9g, expected %.9g, tolerance %.3g", is_v ? "v" : "k",
                       h, d, got, want[d], error);
            }
        }
}

/* Outside the new row the caches are as they were: put the old row back and compare. */
static void check_untouched(const host_case *c) {
    const shape *s = &c->s;
    for (int is_v = 0; is_v < 2; is_v++) {
        const uint8_t *before = is_v ? c->v_cache : c->k_cache, *after = is_v ? c->v_after : c->k_after;
        uint8_t *restored = must_have(malloc(c->cache_bytes));
        memcpy(restored, after, c->cache_bytes);
        for (uint32_t h = 0; h < s->kv_heads; h++) attention_copy_row(&c->a, restored, before, is_v, s->count - 1, h);
        EXPECT(memcmp(restored, before, c->cache_bytes) == 0, "the %s cache was changed outside the new row", is_v ? "V" : "K");
        free(restored);
    }
}

/* ---- Running a case ---- */

/* Two runs into d_out[count], whose bytes are 0xFF before each: out is what the first made of it. */
static void run_twice(const spk_cuda_attention *a, float *d_out, uint64_t count, float *out) {
    float *again = floats(count);
    spk_error err;
    spk_cuda_step *step = record(a, 1);
    for (int i = 0; i < 2; i++) {
        must(spk_cuda_fill(cuda, d_out, 0xFF, count * 4, &err), &err);
        must(spk_cuda_step_run(cuda, step, 1, &err), &err);
        must(spk_cuda_wait(cuda, &err), &err);
        must(spk_cuda_download(cuda, i == 0 ? out : again, d_out, count * 4, &err), &err);
    }
    EXPECT(memcmp(out, again, count * 4) == 0, "a second run gives other bits");
    spk_cuda_step_free(step);
    free(again);
}
static void expect_unwritten(const float *out, uint64_t from, uint64_t to) {
    for (uint64_t i = from; i < to; i++) {
        uint32_t bits;
        memcpy(&bits, &out[i], 4);
        EXPECT(bits == UINT32_MAX, "written beside the output, %lld floats from its begin", (long long)(i - GUARD_FLOATS));
    }
}
static void run(host_case *c, const spk_cuda_attention *a, float *d_out) {
    const uint64_t end = GUARD_FLOATS + (uint64_t)c->s.heads * c->s.dim;
    run_twice(a, d_out, end + GUARD_FLOATS, c->out);
    expect_unwritten(c->out, 0, GUARD_FLOATS);
    expect_unwritten(c->out, end, end + GUARD_FLOATS);
}

/* The same with an output in parts, and behind it, between guards, their totals; c->out, what `whole` gave, becomes what the parts merge to. */
static void run_parted(host_case *c, const spk_cuda_attention *whole) {
    const shape *s = &c->s;
    const uint32_t part_count = attention_part_count(s->count - 1);
    const uint64_t out_count = (uint64_t)s->heads * s->dim, begin = GUARD_FLOATS, end = begin + part_count * out_count,
                   totals = begin + SPK_CUDA_PARTS_MAX * out_count + GUARD_FLOATS,
                   totals_end = totals + (part_count > 1 ? 2 * part_count * s->heads : 0),
                   guarded = totals + 2 * SPK_CUDA_PARTS_MAX * s->heads + GUARD_FLOATS;
    float *d_out = device(guarded * 4, NULL), *out = floats(guarded), *merged = c->out + GUARD_FLOATS;
    spk_cuda_attention a = *whole;
    a.out = d_out + begin;
    a.part_totals = d_out + totals;
    run_twice(&a, d_out, guarded, out);
    expect_unwritten(out, 0, begin);
    expect_unwritten(out, end, totals);
    expect_unwritten(out, totals_end, guarded);
    if (part_count == 1) EXPECT(memcmp(out + begin, merged, out_count * 4) == 0, "a single part has other bits");
    for (uint64_t i = 0; i < out_count && part_count > 1; i++) {
        double weight[SPK_CUDA_PARTS_MAX];
        attention_part_weights(out + totals, s->heads, (uint32_t)(i / s->dim), part_count, weight);
        merged[i] = (float)attention_merged(out + begin, out_count, i, part_count, weight);
    }
    spk_cuda_free(cuda, d_out);
    free(out);
}

static void check_case(const shape *s, pattern p) {
    (void)snprintf(case_text, sizeof case_text, "%u/%u heads of %u, rope %u, %s%s, %u positions, %s", s->heads, s->kv_heads, s->dim, s->rope,
                   s->kv == SPK_CUDA_KV_Q8 ? "q8" : "f16", s->is_gated ? ", gated" : "", s->count, pattern_names[p]);
    host_case c = case_new(s, p);
    float *d_out;
    spk_error err;
    spk_cuda_attention a = arguments(&c, &d_out);
    EXPECT(spk_cuda_attention_cache_bytes(&a) == c.cache_bytes, "cache_bytes");
    a.k_cache = device(c.cache_bytes, c.k_cache);
    a.v_cache = device(c.cache_bytes, c.v_cache);
    run(&c, &a, d_out);
    must(spk_cuda_download(cuda, c.k_after, a.k_cache, c.cache_bytes, &err), &err);
    must(spk_cuda_download(cuda, c.v_after, a.v_cache, c.cache_bytes, &err), &err);
    check_untouched(&c);
    check_stored(&c);
    check_output(&c);
    if (spk_cuda_attention_has_parts(cuda, &a)) {
        run_parted(&c, &a);
        if (attention_part_count(s->count - 1) > 1) check_output(&c);
    }
    spk_cuda_free(cuda, a.k_cache);
    spk_cuda_free(cuda, a.v_cache);
    arguments_free(&a, d_out);
    case_free(&c);
}

/* ---- The cases ---- */

static const uint32_t counts[] = { 1, 2, 17, 33, 128, 129, 255, 256, 257, 289, 384, 385, 512, 513, 1001, 4096, 8200, 32768, 131073 };
enum { SHAPES = sizeof shapes / sizeof *shapes, COUNTS = sizeof counts / sizeof *counts };
static uint32_t max_count = 32768;

/* Every length; every pattern for the first two shapes, those that find most for the others; the longest for the first two. */
static void check_shape(int index, spk_cuda_kv_type kv) {
    const shape *base = &shapes[index];
    int before = check_failures;
    for (int n = 0; n < COUNTS; n++)
        for (int p = 0; p < P_COUNT; p++) {
            bool is_long = counts[n] > 1001, is_far = counts[n] > 8200;
            if (counts[n] > max_count || (is_long && p != P_RANDOM && p != P_RISING) || (is_far && (p != P_RANDOM || index > 1))) continue;
            if (index > 1 && p != P_RANDOM && p != P_RISING && p != P_ONE_HOT) continue;
            shape s = *base;
            s.kv = kv;
            s.count = counts[n];
            s.capacity = counts[n] + (uint32_t)(n % 3) * 70;
            check_case(&s, (pattern)p);
        }
    printf("%-4s attention %u/%u heads of %u, %s\n", before == check_failures ? "ok" : "FAIL", base->heads, base->kv_heads, base->dim,
           kv == SPK_CUDA_KV_Q8 ? "q8" : "f16");
    fflush(stdout);
    shown = 0;
}

/* Tokens one after another, as a session does: what was stored at one position is what later ones read. */
static void sequence_of_tokens(void) {
    shape s = { .heads = 8, .kv_heads = 2, .dim = 64, .rope = 32, .capacity = 300, .count = 1 };
    for (int kv = 0; kv < 2; kv++) {
        s.kv = (spk_cuda_kv_type)kv;
        s.count = 1;
        host_case c = case_new(&s, P_RANDOM);
        float *d_out;
        spk_error err;
        spk_cuda_attention a = arguments(&c, &d_out);
        a.k_cache = device(c.cache_bytes, c.k_cache);
        a.v_cache = device(c.cache_bytes, c.v_cache);
        for (uint32_t position = 0; position < s.capacity; position++) {
            c.s.count = position + 1;
            (void)snprintf(case_text, sizeof case_text, "sequence, token %u, kv %d", position, kv);
            for (uint32_t i = 0; i < s.heads * s.dim; i++) c.q[i] = check_uniform(&random_state);
            for (uint32_t i = 0; i < s.kv_heads * s.dim; i++) c.k[i] = check_uniform(&random_state), c.v[i] = check_uniform(&random_state);
            must(spk_cuda_upload(cuda, (void *)(uintptr_t)a.d_position, &position, 4, &err), &err);
            must(spk_cuda_upload(cuda, (void *)(uintptr_t)a.q, c.q, s.heads * s.dim * 4, &err), &err);
            must(spk_cuda_upload(cuda, (void *)(uintptr_t)a.k, c.k, s.kv_heads * s.dim * 4, &err), &err);
            must(spk_cuda_upload(cuda, (void *)(uintptr_t)a.v, c.v, s.kv_heads * s.dim * 4, &err), &err);
            run(&c, &a, d_out);
            memcpy(c.k_cache, c.k_after, position > 0 ? c.cache_bytes : 0);
            memcpy(c.v_cache, c.v_after, position > 0 ? c.cache_bytes : 0);
            must(spk_cuda_download(cuda, c.k_after, a.k_cache, c.cache_bytes, &err), &err);
            must(spk_cuda_download(cuda, c.v_after, a.v_cache, c.cache_bytes, &err), &err);
            check_untouched(&c);
            check_stored(&c);
            if (position % 7 == 0 || position > 250) check_output(&c);
        }
        spk_cuda_free(cuda, a.k_cache);
        spk_cuda_free(cuda, a.v_cache);
        arguments_free(&a, d_out);
        case_free(&c);
    }
    shown = 0;
}

/* Caches of more than 4 GiB, all zeros but for a few rows of the last KV head. */
static void offsets_beyond_4_gib(void) {
    shape s = { .heads = 8, .kv_heads = 8, .dim = 256, .rope = 64, .capacity = 1200000, .count = 1 }, small = s;
    static const uint32_t rows[] = { 5, 600001, 1199900 };
    enum { ROWS = sizeof rows / sizeof *rows };
    spk_error err;
    void *k_cache = NULL, *v_cache = NULL;
    const spk_cuda_attention wide = described(&s);
    if (spk_cuda_allocate(cuda, spk_cuda_attention_cache_bytes(&wide), "K", &k_cache, &err) != SPK_OK ||
        spk_cuda_allocate(cuda, spk_cuda_attention_cache_bytes(&wide), "V", &v_cache, &err) != SPK_OK) {
        spk_cuda_free(cuda, k_cache);
        SKIP("too little GPU memory for caches of more than 4 GiB");
        return;
    }
    (void)snprintf(case_text, sizeof case_text, "beyond 4 GiB");
    small.capacity = 32;
    host_case c = case_new(&small, P_RANDOM);
    c.s = s;
    c.s.count = s.capacity - 7;
    double k[ROWS + 2][DIM_MAX] = { { 0 } }, v[ROWS + 2][DIM_MAX] = { { 0 } };
    query r = query_of(&c, 7);
    for (int i = 0; i < ROWS; i++)
        for (uint32_t d = 0; d < s.dim; d++) {
            uint16_t half[2] = { spk_f32_to_f16((float)(r.q[d] * (22 + i))), spk_f32_to_f16(check_uniform(&random_state)) };
            k[i][d] = (double)spk_f16_to_f32(half[0]), v[i][d] = (double)spk_f16_to_f32(half[1]);
            must(spk_cuda_upload(cuda, (uint8_t *)k_cache + attention_find(&wide, false, rows[i], 7, d).code, &half[0], 2, &err), &err);
            must(spk_cuda_upload(cuda, (uint8_t *)v_cache + attention_find(&wide, true, rows[i], 7, d).code, &half[1], 2, &err), &err);
        }
    float *d_out;
    spk_cuda_attention a = arguments(&c, &d_out);
    a.k_cache = k_cache;
    a.v_cache = v_cache;
    run(&c, &a, d_out);
    for (uint32_t d = 0; d < s.dim; d++) {
        uint16_t half[2];
        must(spk_cuda_download(cuda, &half[0], (uint8_t *)k_cache + attention_find(&wide, false, c.s.count - 1, 7, d).code, 2, &err), &err);
        must(spk_cuda_download(cuda, &half[1], (uint8_t *)v_cache + attention_find(&wide, true, c.s.count - 1, 7, d).code, 2, &err), &err);
        k[ROWS][d] = (double)spk_f16_to_f32(half[0]), v[ROWS][d] = (double)spk_f16_to_f32(half[1]);
    }
    head_sums t = { .top = -INFINITY };
    double score[ROWS + 2], error[ROWS + 2];
    for (int i = 0; i < ROWS + 2; i++) {             /* the last: a row of zeros, many times */
        score[i] = score_of(&r, k[i], s.dim, &error[i]);
        t.top = fmax(t.top, score[i]);
    }
    for (int i = 0; i < ROWS + 2; i++) add_row(&t, score[i], error[i], i <= ROWS ? 1 : (double)c.s.count - ROWS - 1, v[i], s.dim);
    check_head(&c, 7, &t, s.capacity / 128 + 1, spk_cuda_sm_count(cuda));
    spk_cuda_free(cuda, k_cache);
    spk_cuda_free(cuda, v_cache);
    arguments_free(&a, d_out);
    case_free(&c);
    shown = 0;
}

/* ---- All groups of cases, each in a process of its own: the reference is what takes the time ---- */

static bool open_device(bool is_saying_so) {
    spk_error err;
    spk_status status = spk_cuda_open(&cuda, &err);
    if (status == SPK_E_UNSUPPORTED) {
        if (is_saying_so) printf("no GPU: skipped (%s)\n", err.text);
        return false;
    }
    must(status, &err);
    return true;
}

enum { GROUPS = 2 * SHAPES + 2 };
/* Exit status. */
static int check_group(int group) {
    if (!open_device(group == 0)) return EXIT_SKIPPED;
    random_state += (uint64_t)group << 32;
    if (group < 2 * SHAPES) check_shape(group / 2, group % 2 ? SPK_CUDA_KV_Q8 : SPK_CUDA_KV_F16);
    else if (group == 2 * SHAPES) RUN(sequence_of_tokens);
    else if (max_count >= 32768) RUN(offsets_beyond_4_gib);
    spk_cuda_close(cuda);
    return CHECK_EXIT();
}

/* As many at once as there are CPUs; the worst exit status, skipped before passed. */
static int check_side_by_side(void) {
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int running = 0, failed = 0, skipped = 0;
    for (int group = 0; group < GROUPS || running > 0;) {
        if (group < GROUPS && running < (cpus > 1 ? cpus : 1)) {
            fflush(stdout);
            const pid_t child = fork();
            if (child == 0) {
                const int result = check_group(group);
                fflush(stdout);
                _exit(result);
            }
            failed += child < 0;
            running += child > 0;
            group++;
            continue;
        }
        int result = 0;
        if (wait(&result) < 0) break;
        running--;
        skipped += WIFEXITED(result) && WEXITSTATUS(result) == EXIT_SKIPPED;
        failed += !WIFEXITED(result) || (WEXITSTATUS(result) != 0 && WEXITSTATUS(result) != EXIT_SKIPPED);
    }
    return failed > 0 ? 1 : skipped > 0 ? EXIT_SKIPPED : 0;
}

int main(int argc, char **argv) {
    bool is_bench = false;
    for (int i = 1; i < argc; i++) {
        char *end = argv[i];
        if (strcmp(argv[i], "--bench") == 0) {
            is_bench = true;
            continue;
        }
        if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) random_state = strtoull(argv[++i], &end, 10);
        else if (strcmp(argv[i], "--max-context") == 0 && i + 1 < argc) max_count = (uint32_t)strtoul(argv[++i], &end, 10);
        if (end == argv[i] || *end != '\0') {
            fprintf(stderr, "usage: gpu_attention [--max-context N] [--seed N] [--bench]\n");
            return 2;
        }
    }
    const int status = check_side_by_side();
    if (status != 0 || !is_bench) return status;
    if (!open_device(true)) return EXIT_SKIPPED;
    bench();
    spk_cuda_close(cuda);
    return 0;
}
