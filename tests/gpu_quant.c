/* tests/gpu_quant.c - the GPU's quantizer against the CPU's: the same bytes of every type, effort and kind of weights.
 *
 *   make build/tests/gpu_quant && build/tests/gpu_quant [--quick] [--bench]
 *
 * --quick is for a GPU that is emulated.  --bench: weights per second, of the kernels alone, and with both transfers, from as
 * many threads as there are CPUs (8 at most).  Exits 77 where there is no GPU. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "formats/dequant.h"
#include "formats/pool.h"
#include "requant/quant_gpu.h"
#include "requant/quant_internal.h"
#include "tests/check.h"

enum {
    EXIT_SKIPPED = 77, ROWS_MAX = 96, COLS = 512, WEIGHTS_MAX = ROWS_MAX * COLS, BYTES_MAX = WEIGHTS_MAX * 34 / 32,
    BENCH_THREADS_MAX = 8, BENCH_WEIGHTS = 1 << 23, BENCH_JOBS = 12, BENCH_COLS = 2048
};
static const uint32_t types[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K, SPK_TYPE_Q8_0 };
enum { TYPE_COUNT = sizeof types / sizeof *types };
static const spk_quant_effort efforts[] = { SPK_EFFORT_FAST, SPK_EFFORT_NORMAL, SPK_EFFORT_BEST };
static const char *const effort_names[] = { "fast", "normal", "best" };
enum { EFFORT_COUNT = sizeof efforts / sizeof *efforts };

static float            weights[WEIGHTS_MAX], importance[COLS];
static uint8_t          expected[BYTES_MAX], found[BYTES_MAX];
static uint64_t         row_count = ROWS_MAX;
static spk_quant_queue *queue;

/* ---- Weights ---- */

static float bell(uint64_t *state) {
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += check_uniform(state);
    return sum * 0.6f;
}

/* Heavy tails: a bell over the root of another one's square. */
static float student(uint64_t *state) {
    float b = bell(state), other = bell(state);
    return b / (fabsf(other) + 0.05f);
}

static float bell_weight(size_t r, size_t c, uint64_t *s)     { (void)r; (void)c; return bell(s) * 0.02f; }
static float uniform_weight(size_t r, size_t c, uint64_t *s)  { (void)r; (void)c; return check_uniform(s); }
static float student_weight(size_t r, size_t c, uint64_t *s)  { (void)r; (void)c; return student(s) * 0.01f; }
static float outlier_weight(size_t r, size_t c, uint64_t *s) {
    float b = bell(s) * 1e-3f;
    return c % 256 == (r * 37) % 256 ? (r % 2 == 0 ? 3.0f : -3.0f) : r % 3 == 0 ? b * 1e-3f : b;
}
static float odd_weight(size_t r, size_t c, uint64_t *s) {
    float b = bell(s) * 0.02f, u = check_uniform(s);
    switch (r % 12) {
    case 1:  return fabsf(b);
    case 2:  return -fabsf(b);
    case 3:  return 1 + b;
    case 4:  return u < 0.8f ? 0.0f : b;
    case 5:  return (c / 32) % 2 == 0 ? 0.0f : b;
    case 6:  return (c / 16) % 2 == 0 ? -0.0f : b;
    case 7:  return -0.7f;
    case 8:  return b * b * b * 100;
    case 9:  return c < 256 ? 0.0f : u < -0.5f ? -1.5f : 0.25f;
    case 10: return (float)((int)(u * 9)) * 0.375f;
    case 11: return 0.0f;
    default: return b;
    }
}
static float tiny_weight(size_t r, size_t c, uint64_t *s) {
    (void)c;
    return ldexpf(bell(s), (int)(r % 16) * -9);                       /* to below the smallest float */
}
static float lowest, highest;                                         /* that the type can hold */
static float huge_weight(size_t r, size_t c, uint64_t *s) {
    float b = bell(s) * 1e6f * (float)(r * r), x = c % 50 == 0 ? (c % 100 == 0 ? highest : lowest) : r % 4 == 0 ? highest : b;
    return fminf(fmaxf(x, lowest), highest);
}

/* Decoded from blocks with any scales and codes, of a type: the grids of `kind`. */
static void fill_decoded(uint32_t type, uint64_t *state) {
    const spk_type_info *info = spk_type_find(type);
    for (size_t at = 0; at < row_count * COLS / info->block_weights; at++) {
        uint8_t *block = found + at * info->block_bytes;
        for (size_t i = 0; i < info->block_bytes; i++) block[i] = (uint8_t)(check_random(state) >> 40);
        uint16_t d = spk_f32_to_f16(ldexpf(1.0f + fabsf(check_uniform(state)), (int)(check_random(state) % 16) - 14));
        uint16_t dmin = spk_f32_to_f16(spk_f16_to_f32(d) * (4 + 8 * fabsf(check_uniform(state))));
        memcpy(type == SPK_TYPE_Q6_K ? block + offsetof(spk_block_q6_k, d) : block, &d, sizeof d);
        if (type == SPK_TYPE_Q4_K || type == SPK_TYPE_Q5_K) memcpy(block + offsetof(spk_block_q4_k, dmin), &dmin, 2);
    }
    spk_dequantize(type, found, row_count * COLS, weights);
}

/* ---- The comparison ---- */

static spk_quant_job job_of(uint32_t type, spk_quant_effort effort, bool is_weighted, void *blocks) {
    return (spk_quant_job){ .type = type, .row_count = row_count, .col_count = COLS, .weights = weights,
                            .importance = is_weighted ? importance : NULL, .blocks = blocks, .effort = effort };
}

static uint64_t bytes_of(const spk_quant_job *job) {
    const spk_type_info *info = spk_type_find(job->type);
    return job->row_count * job->col_count / info->block_weights * info->block_bytes;
}

static void compare(spk_quant_job job, const char *what) {
    spk_error err = { 0 };
    job.blocks = expected;
    CHECK_OK(spk_quantize(&job, &err), err);
    memset(found, 0x5A, sizeof found);
    job.blocks = found;
    CHECK_OK(spk_quantize_queued(queue, &job, &err), err);
    uint64_t bytes = bytes_of(&job), block_bytes = spk_type_find(job.type)->block_bytes, at = 0, differing = 0;
    for (uint64_t b = 0; b < bytes / block_bytes; b++)
        if (memcmp(expected + b * block_bytes, found + b * block_bytes, block_bytes) != 0 && differing++ == 0) at = b;
    CHECK(differing == 0, "%s %s%s, %s: %d of %d blocks differ, first block %d", spk_type_name(job.type),
          job.effort == SPK_EFFORT_FAST ? "fast" : job.effort == SPK_EFFORT_BEST ? "best" : "normal",
          job.importance != NULL ? " weighted" : "", what, (int)differing, (int)(bytes / block_bytes), (int)at);
    CHECK(bytes == sizeof found || found[bytes] == 0x5A, "%s, %s: a byte past the end", spk_type_name(job.type), what);
}

static void compare_type(uint32_t type, const char *what) {
    for (size_t e = 0; e < EFFORT_COUNT; e++)
        for (int is_weighted = 0; is_weighted < 2; is_weighted++)
            compare(job_of(type, efforts[e], is_weighted, NULL), what);
}
static void compare_all(const char *what) {
    for (size_t t = 0; t < TYPE_COUNT; t++) compare_type(types[t], what);
}

static void fill(float (*weight)(size_t, size_t, uint64_t *), uint64_t seed) {
    for (size_t r = 0; r < row_count; r++)
        for (size_t c = 0; c < COLS; c++) weights[r * COLS + c] = weight(r, c, &seed);
    for (size_t c = 0; c < COLS; c++) {
        float u = check_uniform(&seed);
        importance[c] = c / 64 == 3 ? 0.0f : u * u * u * u * 20 + 0.05f;
    }
}

/* ---- Tests ---- */

static void gaussian_weights(void) { fill(bell_weight, 1); compare_all("Gaussian"); }
static void uniform_weights(void)  { fill(uniform_weight, 2); compare_all("uniform"); }
static void heavy_tails(void)      { fill(student_weight, 3); compare_all("Student-t"); }
static void outliers(void)         { fill(outlier_weight, 4); compare_all("outliers"); }
static void odd_rows_and_zeros(void) { fill(odd_weight, 5); compare_all("odd rows"); }
static void tiny_weights(void)     { fill(tiny_weight, 6); compare_all("tiny"); }
static void huge_weights(void) {
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        spk_quant_range(types[t], &lowest, &highest);
        fill(huge_weight, 7);
        compare_type(types[t], "huge");
    }
}

static void exact_grids(void) {
    static const uint32_t grids[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K, SPK_TYPE_Q8_0 };
    uint64_t state = 8;
    for (size_t g = 0; g < sizeof grids / sizeof *grids; g++) {
        fill_decoded(grids[g], &state);
        compare_all(spk_type_name(grids[g]));
    }
}

static void rows_of_any_block_count(void) {
    fill(bell_weight, 9);
    for (uint64_t cols = 32; cols <= COLS; cols += cols < 256 ? 96 : 64)
        for (int is_weighted = 0; is_weighted < 2; is_weighted++) {
            spk_quant_job job = job_of(SPK_TYPE_Q8_0, SPK_EFFORT_NORMAL, is_weighted, NULL);
            job.col_count = cols;
            job.row_count = 5;
            compare(job, "narrow rows");
        }
}

static void jobs_larger_than_the_queue(void) {
    spk_quant_queue *whole = queue, *small = NULL;
    spk_error err = { 0 };
    CHECK_OK(spk_quant_queue_open(3 * COLS, &small, &err), err);
    if (small == NULL) return;
    fill(bell_weight, 10);
    queue = small;
    for (int is_weighted = 0; is_weighted < 2; is_weighted++) {
        spk_quant_job job = job_of(SPK_TYPE_Q4_K, SPK_EFFORT_NORMAL, is_weighted, NULL);
        job.row_count = row_count < 11 ? row_count : 11;
        compare(job, "in parts");
    }
    queue = whole;
    spk_quant_queue_close(small);
}

static void weights_in_the_queues_memory(void) {
    fill(bell_weight, 11);
    memcpy(spk_quant_queue_weights(queue), weights, row_count * COLS * sizeof *weights);
    spk_quant_job job = job_of(SPK_TYPE_Q6_K, SPK_EFFORT_NORMAL, false, NULL);
    job.weights = spk_quant_queue_weights(queue);
    compare(job, "its own memory");
}

static void refuses_what_the_cpu_refuses(void) {
    spk_error err = { 0 };
    fill(bell_weight, 12);
    weights[1 * COLS + 300] = NAN;
    spk_quant_job job = job_of(SPK_TYPE_Q5_K, SPK_EFFORT_NORMAL, false, found);
    CHECK(spk_quantize_queued(queue, &job, &err) == SPK_E_NONFINITE, "%s", err.text);
    CHECK(strstr(err.text, "row 1, column 300") != NULL, "%s", err.text);
    weights[1 * COLS + 300] = 1e30f;
    CHECK(spk_quantize_queued(queue, &job, &err) == SPK_E_LIMIT, "%s", err.text);
    CHECK(strstr(err.text, "row 1, column 300: weight 1.00000002e+30 is beyond what spk writes as Q5_K") != NULL, "%s", err.text);
    job.col_count = 288;
    CHECK(spk_quantize_queued(queue, &job, &err) == SPK_E_SHAPE, "%s", err.text);
}

/* ---- Speed ---- */

typedef struct {
    spk_quant_queue *queue;
    spk_quant_job    job;
    spk_status       status;
    spk_error        err;
    pthread_t        thread;
} bench_worker;

static void *bench_work(void *context) {
    bench_worker *w = context;
    for (int j = 0; j < BENCH_JOBS && w->status == SPK_OK; j++) w->status = spk_quantize_queued(w->queue, &w->job, &w->err);
    return NULL;
}

static double now_s(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The kernels of one queue alone, then all queues at a time. */
static void bench_type(bench_worker *workers, uint32_t worker_count, uint32_t type, size_t effort, bool is_weighted) {
    static float columns[BENCH_COLS];
    for (size_t c = 0; c < BENCH_COLS; c++) columns[c] = importance[c % COLS];
    for (uint32_t w = 0; w < worker_count; w++) {
        workers[w].job.type = type;
        workers[w].job.effort = efforts[effort];
        workers[w].job.importance = is_weighted ? columns : NULL;
    }
    double before_s = spk_quant_queue_kernel_s(workers[0].queue);
    (void)bench_work(&workers[0]);
    double kernel_s = spk_quant_queue_kernel_s(workers[0].queue) - before_s, start_s = now_s();
    uint32_t started = 0;
    while (started < worker_count && pthread_create(&workers[started].thread, NULL, bench_work, &workers[started]) == 0) started++;
    for (uint32_t w = 0; w < started; w++) pthread_join(workers[w].thread, NULL);
    double wall_s = now_s() - start_s, count = (double)BENCH_JOBS * BENCH_WEIGHTS;
    for (uint32_t w = 0; w < worker_count; w++) CHECK_OK(workers[w].status, workers[w].err);
    printf("%-5s %-6s %-10s %8.2f G weights/s in kernels %8.2f G weights/s with transfers, %u threads\n", spk_type_name(type),
           effort_names[effort], is_weighted ? "weighted" : "", count / kernel_s * 1e-9, count * started / wall_s * 1e-9, started);
}

static void bench(void) {
    static bench_worker workers[BENCH_THREADS_MAX];
    uint32_t worker_count = spk_cpu_count() < BENCH_THREADS_MAX ? spk_cpu_count() : BENCH_THREADS_MAX;
    uint8_t *blocks = malloc((size_t)worker_count * BENCH_WEIGHTS * 2);
    row_count = ROWS_MAX;
    fill(bell_weight, 13);
    for (uint32_t w = 0; w < worker_count && blocks != NULL; w++) {
        spk_error err = { 0 };
        CHECK_OK(spk_quant_queue_open(BENCH_WEIGHTS, &workers[w].queue, &err), err);
        if (workers[w].queue == NULL) worker_count = w;
        if (workers[w].queue == NULL) break;
        float *to = spk_quant_queue_weights(workers[w].queue);
        for (size_t i = 0; i < BENCH_WEIGHTS; i += WEIGHTS_MAX)
            memcpy(to + i, weights, (BENCH_WEIGHTS - i < WEIGHTS_MAX ? BENCH_WEIGHTS - i : WEIGHTS_MAX) * sizeof *to);
        workers[w].job = (spk_quant_job){ .row_count = BENCH_WEIGHTS / BENCH_COLS, .col_count = BENCH_COLS, .weights = to,
                                          .blocks = blocks + (size_t)w * BENCH_WEIGHTS * 2 };
    }
    for (size_t e = 0; e < EFFORT_COUNT && worker_count > 0 && blocks != NULL; e++)
        for (size_t t = 0; t < TYPE_COUNT; t++)
            for (int is_weighted = 0; is_weighted < 2; is_weighted++) bench_type(workers, worker_count, types[t], e, is_weighted);
    for (uint32_t w = 0; w < worker_count; w++) spk_quant_queue_close(workers[w].queue);
    free(blocks);
}

int main(int argc, char **argv) {
    bool is_bench = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) row_count = 12;
        else if (strcmp(argv[i], "--bench") == 0) is_bench = true;
        else return fprintf(stderr, "usage: gpu_quant [--quick] [--bench]\n"), 2;
    }
    char name[SPK_QUANT_GPU_NAME_SIZE];
    spk_error err = { 0 };
    if (spk_quant_gpu_find(name, &err) != SPK_OK) {
        printf("SKIP the quantizer of a GPU: %s\n", err.text);
        return EXIT_SKIPPED;
    }
    printf("GPU: %s\n", name);
    CHECK_OK(spk_quant_queue_open(WEIGHTS_MAX, &queue, &err), err);
    if (queue == NULL) return 1;
    RUN(gaussian_weights);
    RUN(uniform_weights);
    RUN(heavy_tails);
    RUN(outliers);
    RUN(odd_rows_and_zeros);
    RUN(tiny_weights);
    RUN(huge_weights);
    RUN(exact_grids);
    RUN(rows_of_any_block_count);
    RUN(jobs_larger_than_the_queue);
    RUN(weights_in_the_queues_memory);
    RUN(refuses_what_the_cpu_refuses);
    if (is_bench) bench();
    spk_quant_queue_close(queue);
    return CHECK_EXIT();
}
