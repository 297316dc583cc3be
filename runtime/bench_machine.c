/* runtime/bench_machine.c - see bench_machine.h. */
#include "runtime/bench_machine.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "formats/pool.h"
#include "runtime/bench_run.h"

#define CPU_BYTES_MIN (UINT64_C(512) << 20)
#define GPU_BYTES_MAX (UINT64_C(8) << 30)
enum { PIECE_BYTES = 2 << 20, PIECE_WORDS = PIECE_BYTES / 8, READ_AHEAD_WORDS = 512 };

/* ---- Names ---- */

/* What follows `key` and a colon in the first line of a file that begins so; "" if there is none. */
static void line_of(const char *path, const char *key, char *out, size_t out_bytes) {
    char line[256];
    FILE *file = fopen(path, "r");
    out[0] = '\0';
    while (file != NULL && out[0] == '\0' && fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, key, strlen(key)) != 0 || colon == NULL) continue;
        line[strcspn(line, "\n")] = '\0';
        (void)snprintf(out, out_bytes, "%.*s", (int)out_bytes - 1, colon + 1 + strspn(colon + 1, " "));
    }
    if (file != NULL) (void)fclose(file);
}

/* "NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build ...": the word that is a number with points. */
static void driver_version(char *out, size_t out_bytes) {
    char text[256], *state = NULL;
    out[0] = '\0';
    line_of("/proc/driver/nvidia/version", "NVRM version", text, sizeof text);
    for (char *word = strtok_r(text, " ", &state); word != NULL; word = strtok_r(NULL, " ", &state)) {
        if (word[strspn(word, "0123456789.")] != '\0' || strchr(word, '.') == NULL) continue;
        (void)snprintf(out, out_bytes, "%.*s", (int)out_bytes - 1, word);
        return;
    }
}

void spk_bench_describe(spk_bench_machine *m) {
    line_of("/proc/cpuinfo", "model name", m->cpu, sizeof m->cpu);
    if (m->cpu[0] == '\0') (void)snprintf(m->cpu, sizeof m->cpu, "unknown CPU");
    time_t now = time(NULL);
    struct tm utc;
    if (gmtime_r(&now, &utc) != NULL) (void)strftime(m->date, sizeof m->date, "%Y-%m-%d %H:%M UTC", &utc);
}

/* ---- Bandwidth ---- */

typedef struct { const uint64_t *words; uint64_t sums[SPK_POOL_THREAD_MAX]; } read_job;

static void read_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    read_job *job = context;
    uint64_t sums[8] = { 0 };
    for (uint64_t i = begin * PIECE_WORDS; i < end * PIECE_WORDS; i += 8) {
        __builtin_prefetch(job->words + i + READ_AHEAD_WORDS);
        for (uint64_t l = 0; l < 8; l++) sums[l] += job->words[i + l];
    }
    for (uint64_t l = 0; l < 8; l++) job->sums[thread_index] += sums[l];   /* used, so the loads stay */
}

static void touch_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    memset((uint64_t *)context + begin * PIECE_WORDS, 1, (end - begin) * PIECE_BYTES);
}

spk_status spk_bench_measure_cpu(spk_bench_machine *m, uint32_t thread_count, spk_error *err) {
    long cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
    m->cache_bytes = cache_bytes > 0 ? (uint64_t)cache_bytes : 0;
    uint64_t bytes = 4 * m->cache_bytes;
    if (bytes < CPU_BYTES_MIN) bytes = CPU_BYTES_MIN;
    uint64_t pieces = bytes / PIECE_BYTES;
    m->cpu_buffer_bytes = pieces * PIECE_BYTES;
    spk_pool *pool = NULL;
    SPK_TRY(spk_pool_create(thread_count, &pool, err));
    /* Large pages where there are any, so that the ceiling is the memory's and not the page tables'. */
    uint64_t *words = aligned_alloc(PIECE_BYTES, m->cpu_buffer_bytes + PIECE_BYTES);
    read_job job = { .words = words };
    if (words == NULL) {
        spk_pool_destroy(pool);
        return spk_fail(err, SPK_E_MEMORY, "bandwidth buffer of %" PRIu64 " bytes: out of memory", m->cpu_buffer_bytes);
    }
    (void)madvise(words, m->cpu_buffer_bytes, MADV_HUGEPAGE);
    m->thread_count = spk_pool_thread_count(pool);
    spk_pool_run(pool, pieces, 1, touch_pieces, words);
    for (int pass = 0; pass < SPK_BENCH_PASSES; pass++) {
        double start_s = spk_bench_now_s();
        spk_pool_run(pool, pieces, 1, read_pieces, &job);
        double rate = (double)m->cpu_buffer_bytes / (spk_bench_now_s() - start_s);
        if (rate > m->cpu_bytes_per_s) m->cpu_bytes_per_s = rate;
    }
    free(words);
    spk_pool_destroy(pool);
    return SPK_OK;
}

spk_status spk_bench_measure_gpu(spk_bench_machine *m, spk_cuda *cuda, spk_error *err) {
    driver_version(m->gpu_driver, sizeof m->gpu_driver);
    SPK_TRY(spk_cuda_describe(cuda, &m->gpu, err));
    SPK_TRY(spk_cuda_memory(cuda, &m->gpu_free_bytes, &m->gpu_memory_bytes, err));
    SPK_TRY(spk_cuda_read_bandwidth(cuda, GPU_BYTES_MAX, SPK_BENCH_PASSES, &m->gpu_read, err));
    m->has_gpu = true;
    return SPK_OK;
}
