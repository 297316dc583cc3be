/* tests/peer/peer_quant.c - our quantizers against llama.cpp's, at the same bytes: error of every matrix, and speed.
 *
 *   peer_quant LIBS [MODEL.gguf...]      LIBS: the folder of llama.cpp's libraries; without models the bundled ones
 *
 * Every matrix of the models, and made-up rows of three kinds, become Q4_K, Q5_K, Q6_K and Q8_0, without and, where
 * there is one, with the importance matrix.  The measure is the relative error, weighted by the importance where that
 * is used: sqrt(sum w (x - y)^2 / sum w x^2).  Large matrices are cut to their first rows, to keep it short.
 * Verdicts, at every effort: no matrix is worse than llama.cpp's (with the fast search at most two of some 400), and
 * the mean gain of each type is what `targets` promises.
 */
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "formats/blocks.h"
#include "formats/dequant.h"
#include "formats/gguf.h"
#include "requant/imatrix.h"
#include "requant/quant.h"
#include "tests/check.h"

enum { WEIGHTS_MAX = 1 << 16, MATRICES_MAX = 2, KINDS_MAX = 64, MADE_UP_COLS = 256, EFFORT_COUNT = 3 };

typedef size_t quantize_chunk_fn(int type, const float *source, void *out, int64_t first, int64_t row_count,
                                 int64_t col_count, const float *importance);

typedef struct {
    uint32_t type;
    double   mean_ratio_max[EFFORT_COUNT]; /* of our error to theirs, where both are not exact; by spk_quant_effort */
    double   log_ratio_sum;
    int      count, exact_count, worse_count;
    double   our_seconds, their_seconds, weight_count;
} target;

static const char *const effort_names[EFFORT_COUNT] = {
    [SPK_EFFORT_NORMAL] = "normal", [SPK_EFFORT_FAST] = "fast", [SPK_EFFORT_BEST] = "best",
};
static const int        worse_max[EFFORT_COUNT] = { [SPK_EFFORT_FAST] = 2 };
static spk_quant_effort effort;
static target           targets[] = {
    { .type = SPK_TYPE_Q4_K, .mean_ratio_max = { 0.98, 0.995, 0.97 } },
    { .type = SPK_TYPE_Q5_K, .mean_ratio_max = { 0.96, 0.98, 0.94 } },
    { .type = SPK_TYPE_Q6_K, .mean_ratio_max = { 0.95, 0.98, 0.94 } },
    { .type = SPK_TYPE_Q8_0, .mean_ratio_max = { 0.92, 0.96, 0.90 } },
};
enum { TARGET_COUNT = sizeof targets / sizeof *targets };

/* A line of the table: matrices of one kind to one type. */
typedef struct {
    char     name[48];
    uint32_t type;
    int      count;
    double   our_sum, their_sum, log_ratio_sum, ratio_max;
} kind;

static kind               kinds[KINDS_MAX];
static int                kind_count;
static quantize_chunk_fn *their_quantize;
static float              source[WEIGHTS_MAX], decoded[WEIGHTS_MAX];
static uint8_t            blocks[WEIGHTS_MAX * 34 / 32];

static void die(const char *what, const char *text) {
    fprintf(stderr, "peer_quant: %s: %s\n", what, text);
    exit(1);
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static kind *kind_of(const char *name, uint32_t type) {
    for (int i = 0; i < kind_count; i++)
        if (kinds[i].type == type && strcmp(kinds[i].name, name) == 0) return &kinds[i];
    if (kind_count == KINDS_MAX) die("kinds", "too many");
    kind *k = &kinds[kind_count++];
    k->type = type;
    snprintf(k->name, sizeof k->name, "%s", name);
    return k;
}

static void square_sums(const float *x, const float *importance, uint64_t row_count, uint64_t col_count, double *error,
                        double *whole) {
    for (uint64_t i = 0; i < row_count * col_count; i++) {
        double w = importance ? importance[i % col_count] : 1, off = (double)x[i] - decoded[i];
        *error += w * off * off;
        *whole += w * x[i] * x[i];
    }
}

/* One matrix to one type in both ways; *error gets ours, then theirs, then the sum of squares. */
static void compare_one(target *t, const float *x, const float *importance, uint64_t row_count, uint64_t col_count,
                        double error[3]) {
    spk_error err = { 0 };
    spk_quant_job job = { t->type, row_count, col_count, x, importance, blocks, effort };
    double start = now_s(), unused = 0;
    if (spk_quantize(&job, &err)) die("quantize", err.text);
    t->our_seconds += now_s() - start;
    spk_dequantize(t->type, blocks, row_count * col_count, decoded);
    square_sums(x, importance, row_count, col_count, &error[0], &error[2]);
    start = now_s();
    their_quantize((int)t->type, x, blocks, 0, (int64_t)row_count, (int64_t)col_count, importance);
    t->their_seconds += now_s() - start;
    t->weight_count += (double)(row_count * col_count);
    spk_dequantize(t->type, blocks, row_count * col_count, decoded);
    square_sums(x, importance, row_count, col_count, &error[1], &unused);
}

/* matrix_count matrices of row_count x col_count in `source`; importance of each, or NULL. */
static void compare(const char *kind_name, const char *name, const float *const *importance, uint64_t matrix_count,
                    uint64_t row_count, uint64_t col_count) {
    for (int i = 0; i < TARGET_COUNT; i++) {
        target *t = &targets[i];
        double error[3] = { 0 };
        for (uint64_t m = 0; m < matrix_count; m++)
            compare_one(t, source + m * row_count * col_count, importance ? importance[m] : NULL, row_count, col_count,
                        error);
        double ours = sqrt(error[0] / error[2]), theirs = sqrt(error[1] / error[2]);
        kind *k = kind_of(kind_name, t->type);
        k->count++;
        k->our_sum += ours;
        k->their_sum += theirs;
        t->count++;
        if (ours < 1e-6) {               /* the same type, or one that holds it: nothing is lost */
            t->exact_count++;
            continue;
        }
        double ratio = ours / theirs;
        k->log_ratio_sum += log(ratio);
        if (ratio > k->ratio_max) k->ratio_max = ratio;
        t->log_ratio_sum += log(ratio);
        if (ratio > 1.0001) {
            t->worse_count++;
            printf("   worse: %s %s to %s: %.4e, theirs %.4e\n", name, kind_name, spk_type_name(t->type), ours, theirs);
        }
    }
}

static void compare_tensor(const spk_gguf_tensor *tensor, const spk_imatrix *imatrix) {
    uint64_t cols = tensor->dims[0], rows = tensor->dims[1], matrices = tensor->dims[2], bytes, row_bytes;
    spk_error err = { 0 };
    char kind_name[48];
    if (tensor->dim_count < 2 || cols % SPK_SUPERBLOCK != 0 || tensor->type == SPK_TYPE_F32) return;
    uint64_t used = matrices < MATRICES_MAX ? matrices : MATRICES_MAX, rows_used = WEIGHTS_MAX / cols / used;
    if (rows_used > rows) rows_used = rows;
    if (rows_used == 0 || spk_type_bytes(tensor->type, rows * cols, &bytes, &err) ||
        spk_type_bytes(tensor->type, cols, &row_bytes, &err))
        die(tensor->name, "shape");
    for (uint64_t m = 0; m < used; m++)
        spk_dequantize(tensor->type, tensor->data + m * bytes, rows_used * cols, source + m * rows_used * cols);
    snprintf(kind_name, sizeof kind_name, "%s", spk_type_name(tensor->type));
    compare(kind_name, tensor->name, NULL, used, rows_used, cols);
    if (!imatrix) return;
    const float *importance[MATRICES_MAX];
    for (uint64_t m = 0; m < used; m++) {
        spk_imatrix_answer answer;
        if (spk_imatrix_lookup(imatrix, tensor->name, cols, matrices, m, &answer, &importance[m], &err))
            die("imatrix", err.text);
        if (answer != SPK_IMATRIX_FOUND) return;
    }
    snprintf(kind_name, sizeof kind_name, "%s, imatrix", spk_type_name(tensor->type));
    compare(kind_name, tensor->name, importance, used, rows_used, cols);
}

static void compare_model(const char *path) {
    spk_error err = { 0 };
    spk_gguf *gguf = NULL;
    spk_imatrix *imatrix = NULL;
    if (spk_gguf_open(path, &gguf, &err)) die("model", err.text);
    if (strstr(path, "tiny-qwen36") && spk_imatrix_open("tests/models/tiny-qwen36.imatrix.gguf", &imatrix, &err))
        die("imatrix", err.text);
    for (uint64_t i = 0; i < spk_gguf_tensor_count(gguf); i++) compare_tensor(spk_gguf_tensor_at(gguf, i), imatrix);
    spk_imatrix_close(imatrix);
    spk_gguf_close(gguf);
}

static double uniform(uint64_t *state) { return ((double)(check_random(state) >> 11) + 0.5) * 0x1p-53; }

static double normal(uint64_t *state) {
    double radius = sqrt(-2 * log(uniform(state)));
    return radius * cos(6.283185307179586 * uniform(state));
}

static void compare_made_up(void) {
    static const char *const names[] = { "normal", "Student t5", "outliers" };
    float importance[MADE_UP_COLS];
    const float *const one[] = { importance };
    for (int n = 0; n < 3; n++) {
        uint64_t state = 1;
        for (int i = 0; i < WEIGHTS_MAX; i++) {
            double x = normal(&state), squares = 0;
            for (int j = 0; n == 1 && j < 5; j++) squares += pow(normal(&state), 2);
            if (n == 1) x /= sqrt(squares / 5);
            if (n == 2 && check_random(&state) % 200 == 0) x *= 20;
            source[i] = (float)(0.02 * x);
        }
        for (int c = 0; c < MADE_UP_COLS; c++) importance[c] = (float)exp(normal(&state));
        char with[48];
        snprintf(with, sizeof with, "%s, imatrix", names[n]);
        compare(names[n], "made-up rows", NULL, 1, WEIGHTS_MAX / MADE_UP_COLS, MADE_UP_COLS);
        compare(with, "made-up rows", one, 1, WEIGHTS_MAX / MADE_UP_COLS, MADE_UP_COLS);
    }
}

static void report(void) {
    printf("   %-5s from %-20s %8s %10s %10s %8s %8s\n", "to", "", "matrices", "ours %", "theirs %", "ratio", "worst");
    for (int i = 0; i < TARGET_COUNT; i++)
        for (int j = 0; j < kind_count; j++) {
            const kind *k = &kinds[j];
            if (k->type != targets[i].type) continue;
            printf("   %-5s from %-20s %8d %10.4f %10.4f", spk_type_name(k->type), k->name, k->count,
                   100 * k->our_sum / k->count, 100 * k->their_sum / k->count);
            if (k->ratio_max > 0) printf(" %8.4f %8.4f\n", exp(k->log_ratio_sum / k->count), k->ratio_max);
            else printf("%18s\n", "exact");
        }
    for (int i = 0; i < TARGET_COUNT; i++) {
        const target *t = &targets[i];
        double mean = exp(t->log_ratio_sum / (t->count - t->exact_count));
        double wanted = t->mean_ratio_max[effort];
        bool good = t->worse_count <= worse_max[effort] && mean <= wanted;
        printf("   %s, %s: %.1f million weights a second on one core, llama.cpp %.1f: %.1f times as many\n",
               spk_type_name(t->type), effort_names[effort], t->weight_count / t->our_seconds / 1e6,
               t->weight_count / t->their_seconds / 1e6, t->their_seconds / t->our_seconds);
        printf("%s quantizer %s, %s: error %.2f %% below llama.cpp's on average (at least %.1f), "
               "%d of %d matrices worse\n", good ? "ok" : "FAIL", spk_type_name(t->type), effort_names[effort],
               100 * (1 - mean), 100 * (1 - wanted), t->worse_count, t->count);
        if (!good) check_failures++;
    }
}

/* All matrices at one effort. */
static void compare_all(const char *const *models, int model_count) {
    kind_count = 0;
    memset(kinds, 0, sizeof kinds);
    for (int i = 0; i < TARGET_COUNT; i++) {
        target fresh = { .type = targets[i].type };
        memcpy(fresh.mean_ratio_max, targets[i].mean_ratio_max, sizeof fresh.mean_ratio_max);
        targets[i] = fresh;
    }
    compare_made_up();
    for (int i = 0; i < model_count; i++) compare_model(models[i]);
    report();
}

int main(int argc, char **argv) {
    static const char *const bundled[] = {
        "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf", "tests/models/tiny-qwen35-q4_k_m.gguf",
        "tests/models/tiny-qwen3moe-q4_k_m.gguf", "build/peer/tiny-qwen36-bf16.gguf",
    };
    char path[4096];
    if (argc < 2) die("usage", "peer_quant LIBS [MODEL.gguf...]");
    snprintf(path, sizeof path, "%s/libggml-base.so", argv[1]);
    void *library = dlopen(path, RTLD_NOW);
    if (!library) die(path, dlerror());
    /* A function pointer from an object pointer, which only POSIX allows. */
    *(void **)&their_quantize = dlsym(library, "ggml_quantize_chunk");
    if (!their_quantize) die(path, "no ggml_quantize_chunk");
    for (int e = 0; e < EFFORT_COUNT; e++) {
        effort = (spk_quant_effort)e;
        printf("   effort %s\n", effort_names[e]);
        if (argc > 2) compare_all((const char *const *)argv + 2, argc - 2);
        else compare_all(bundled, sizeof bundled / sizeof *bundled);
    }
    return CHECK_EXIT();
}
