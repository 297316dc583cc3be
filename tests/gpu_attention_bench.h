/* tests/gpu_attention_bench.h - the speed of the attention kernel; a part of tests/gpu_attention.c. */
#ifndef SPK_GPU_ATTENTION_BENCH_H
#define SPK_GPU_ATTENTION_BENCH_H

#include <time.h>

#include "tests/gpu_attention_case.h"

static double now_s(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Chains of 20 calls, each over caches of its own; as many chains as make 512 MB, so that no call finds its cache in L2. */
static void bench_case(const shape *s) {
    shape small = *s;
    small.count = 1;
    small.capacity = 32;
    host_case c = case_new(&small, P_RANDOM);
    c.s = *s;
    float *d_out;
    spk_error err;
    spk_cuda_attention a = arguments(&c, &d_out);
    uint64_t bytes = spk_cuda_attention_cache_bytes(&a), chains = UINT64_C(512000000) / (2 * bytes * BENCH_CALLS) + 1;
    uint8_t *memory = device(chains * BENCH_CALLS * 2 * bytes, NULL);
    must(spk_cuda_fill(cuda, memory, 0x3C, chains * BENCH_CALLS * 2 * bytes, &err), &err);
    spk_cuda_step **steps = must_have(calloc(chains, sizeof *steps));
    for (uint64_t i = 0; i < chains; i++) {
        spk_cuda_attention calls[BENCH_CALLS];
        for (uint64_t j = 0; j < BENCH_CALLS; j++) {
            calls[j] = a;
            calls[j].k_cache = memory + (i * BENCH_CALLS + j) * 2 * bytes;
            calls[j].v_cache = (uint8_t *)calls[j].k_cache + bytes;
        }
        steps[i] = record(calls, BENCH_CALLS);
    }
    double us[BENCH_REPEATS + 1];
    for (int repeat = 0; repeat <= BENCH_REPEATS; repeat++) {      /* the first warms up */
        double start = now_s();
        for (uint64_t i = 0; i < chains; i++) must(spk_cuda_step_run(cuda, steps[i], 1, &err), &err);
        must(spk_cuda_wait(cuda, &err), &err);
        us[repeat] = (now_s() - start) * 1e6 / (double)(chains * BENCH_CALLS);
    }
    qsort(us + 1, BENCH_REPEATS, sizeof *us, by_value);
    double read = 2.0 * (double)bytes * s->count / ((s->capacity + 31) / 32 * 32);
    printf("bench %u/%u heads of %u, %s: context %6u: %7.2f us a call (best %.2f), %6.1f MB, %5.0f GB/s\n", s->heads, s->kv_heads, s->dim,
           s->kv == SPK_CUDA_KV_Q8 ? "q8 " : "f16", s->count, us[1 + BENCH_REPEATS / 2], us[1], read * 1e-6, read * 1e-3 / us[1 + BENCH_REPEATS / 2]);
    fflush(stdout);
    for (uint64_t i = 0; i < chains; i++) spk_cuda_step_free(steps[i]);
    free(steps);
    spk_cuda_free(cuda, memory);
    arguments_free(&a, d_out);
    case_free(&c);
}

static void bench(void) {
    static const uint32_t contexts[] = { 128, 200, 256, 512, 1024, 2048, 4096, 16384, 32768 };
    printf("bench: %u SMs; medians of %d; every call's caches come from memory\n", spk_cuda_sm_count(cuda), BENCH_REPEATS);
    for (int i = 0; i < 2; i++)
        for (int kv = 0; kv < 2; kv++)
            for (size_t n = 0; n < sizeof contexts / sizeof *contexts; n++) {
                shape s = shapes[i];
                s.kv = (spk_cuda_kv_type)kv;
                s.count = s.capacity = contexts[n];
                bench_case(&s);
            }
}

#endif
