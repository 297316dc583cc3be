/* tests/test_pool.c - the thread pool: every item exactly once, limits of pieces, cost of small runs, idle workers. */
#include "formats/pool.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/check.h"

enum { ITEM_MAX = 5000 };

static double seconds_of(clockid_t clock) {
    struct timespec now;
    (void)clock_gettime(clock, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static spk_pool *pool_of(uint32_t thread_count) {
    spk_pool *pool = NULL;
    spk_error err = { 0 };
    CHECK_OK(spk_pool_create(thread_count, &pool, &err), err);
    if (pool == NULL) exit(1);
    return pool;
}

/* Plain counters, so that a thread sanitizer sees any run that returns before its items are done. */
typedef struct {
    uint64_t item_count, grain;
    uint32_t thread_count;
    uint8_t  times[ITEM_MAX];
    uint8_t  is_bad[ITEM_MAX];
} tally;

static void count_items(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    tally *t = context;
    const int is_bad = begin >= end || end > t->item_count || end - begin > t->grain || thread_index >= t->thread_count;
    for (uint64_t i = begin; i < end; i++) {
        t->times[i]++;
        t->is_bad[i] = (uint8_t)is_bad;
    }
}

static void every_item_once(void) {
    static const uint64_t item_counts[] = { 0, 1, 2, 3, 7, 64, 1000, ITEM_MAX };
    static const uint64_t grains[] = { 1, 2, 5, 64, ITEM_MAX, UINT64_MAX };
    static tally t;
    for (uint32_t thread_count = 1; thread_count <= 8; thread_count++) {
        spk_pool *pool = pool_of(thread_count);
        CHECK(spk_pool_thread_count(pool) == thread_count, "%u threads", spk_pool_thread_count(pool));
        for (int i = 0; i < 8; i++) {
            for (int g = 0; g < 6; g++) {
                memset(&t, 0, sizeof t);
                t.item_count = item_counts[i];
                t.grain = grains[g];
                t.thread_count = thread_count;
                spk_pool_run(pool, t.item_count, t.grain, count_items, &t);
                int wrong_count = 0;
                for (uint64_t k = 0; k < ITEM_MAX; k++)
                    wrong_count += t.times[k] != (k < t.item_count) || t.is_bad[k] != 0;
                CHECK(wrong_count == 0, "%u threads, %llu items, grain %llu: %d", thread_count,
                      (unsigned long long)t.item_count, (unsigned long long)t.grain, wrong_count);
            }
        }
        spk_pool_destroy(pool);
    }
    spk_pool_destroy(NULL);
}

/* Runs that depend on each other: run n reads what all items of run n-1 wrote, as the phases of a decode step do. */
typedef struct {
    const uint64_t *in;
    uint64_t       *out;
} step;

enum { STEP_ITEMS = 37 };

static void mix(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    const step *s = context;
    (void)thread_index;
    for (uint64_t i = begin; i < end; i++) {
        uint64_t sum = i;
        for (int k = 0; k < STEP_ITEMS; k++) sum = sum * 31 + s->in[k];
        s->out[i] = sum;
    }
}

static uint64_t mixed(uint32_t thread_count, uint64_t grain, int run_count) {
    uint64_t values[2][STEP_ITEMS] = { { 0 } };
    spk_pool *pool = pool_of(thread_count);
    for (int run = 0; run < run_count; run++) {
        step s = { .in = values[run % 2], .out = values[1 - run % 2] };
        spk_pool_run(pool, STEP_ITEMS, grain, mix, &s);
    }
    spk_pool_destroy(pool);
    return values[run_count % 2][5];
}

static void runs_in_sequence(void) {
    const uint64_t expected = mixed(1, 1, 2000);
    for (uint32_t thread_count = 2; thread_count <= 5; thread_count++)
        for (uint64_t grain = 1; grain <= 13; grain += 6)
            CHECK(mixed(thread_count, grain, 2000) == expected, "%u threads, grain %llu", thread_count,
                  (unsigned long long)grain);
}

static void add_one(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    uint32_t *counters = context;
    (void)thread_index;
    for (uint64_t i = begin; i < end; i++) counters[i]++;
}

static void tiny_runs(void) {
    uint32_t counters[2] = { 0, 0 };
    spk_pool *pool = pool_of(2);
    const double start_s = seconds_of(CLOCK_MONOTONIC);
    for (int i = 0; i < 20000; i++) spk_pool_run(pool, 2, 1, add_one, counters);
    const double took_s = seconds_of(CLOCK_MONOTONIC) - start_s;
    spk_pool_destroy(pool);
    CHECK(counters[0] == 20000 && counters[1] == 20000, "%u %u", counters[0], counters[1]);
    CHECK(took_s < 5, "20,000 runs of two items took %.2f s", took_s);      /* 250 us each: far above any good run */
}

static void nap(long ns) {
    struct timespec pause = { .tv_nsec = ns };
    (void)nanosleep(&pause, NULL);
}

/* Runs after pauses of every length around the moment at which workers stop spinning and go to sleep. */
static void runs_after_pauses(void) {
    uint32_t counters[3] = { 0, 0, 0 };
    spk_pool *pool = pool_of(3);
    for (int i = 0; i < 300; i++) {
        nap(1000L * i);
        spk_pool_run(pool, 3, 1, add_one, counters);
    }
    spk_pool_destroy(pool);
    for (int i = 0; i < 3; i++) CHECK(counters[i] == 300, "item %d ran %u times", i, counters[i]);
}

typedef struct {
    _Atomic uint32_t started_count;
    uint32_t         threads_seen[4];
} meeting;

/* Each item waits until all four run; then the caller's own ends and the others go on for a while. */
static void meet(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    meeting *m = context;
    (void)end;
    m->threads_seen[begin] = thread_index;
    atomic_fetch_add(&m->started_count, 1);
    for (int i = 0; i < 20000 && atomic_load(&m->started_count) < 4; i++) nap(500000);
    if (thread_index != 0) nap(100000000);
}

static void long_items(void) {
    spk_pool *pool = pool_of(4);
    for (int round = 0; round < 3; round++) {
        meeting m = { 0 };
        const double start_s = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
        spk_pool_run(pool, 4, 1, meet, &m);
        const double cpu_s = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - start_s;
        uint32_t seen = 0;
        for (int i = 0; i < 4; i++) seen |= 1u << m.threads_seen[i];
        CHECK(seen == 15, "threads %x: not all at the same time", seen);
        CHECK(cpu_s < 0.05, "a caller that waits 0.1 s for others used %.3f s of CPU time", cpu_s);
    }
    spk_pool_destroy(pool);
}

static void idle_workers_sleep(void) {
    uint32_t counters[2] = { 0, 0 };
    spk_pool *pool = pool_of(2);
    spk_pool_run(pool, 2, 1, add_one, counters);
    const double start_s = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    nap(100000000);
    const double cpu_s = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - start_s;
    spk_pool_destroy(pool);
    CHECK(cpu_s < 0.02, "%.3f s of CPU time in 0.1 s without work", cpu_s);
}

static void thread_counts(void) {
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0, "affinity");
    spk_pool *pool = pool_of(0);
    CHECK(spk_pool_thread_count(pool) == (uint32_t)CPU_COUNT(&before), "%u threads", spk_pool_thread_count(pool));
    CHECK(spk_cpu_count() == (uint32_t)CPU_COUNT(&before), "%u CPUs", spk_cpu_count());
    spk_pool_destroy(pool);

    size_t cpu = 0;
    while (!CPU_ISSET(cpu, &before)) cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0, "affinity");
    pool = pool_of(0);
    CHECK(spk_pool_thread_count(pool) == 1, "%u threads on one CPU", spk_pool_thread_count(pool));
    spk_pool_destroy(pool);
    CHECK(mixed(3, 1, 200) == mixed(1, 1, 200), "three threads on one CPU");
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0, "affinity");

    spk_error err = { 0 };
    CHECK(spk_pool_create(SPK_POOL_THREAD_MAX + 1, &pool, &err) == SPK_E_LIMIT, "too many threads");
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/* In a child whose address space has no room for the threads' stacks. */
static void refused_threads(void) {
    const pid_t child = fork();
    if (child == 0) {
        const struct rlimit limit = { .rlim_cur = UINT64_C(64) << 20, .rlim_max = UINT64_C(64) << 20 };
        spk_pool *pool = NULL;
        spk_error err = { 0 };
        if (setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
        if (spk_pool_create(64, &pool, &err) != SPK_E_IO || pool != NULL) _exit(3);
        if (strstr(err.text, " of 64: ") == NULL) _exit(4);
        if (spk_pool_create(2, &pool, &err) != SPK_OK) _exit(5);        /* the others were joined and are gone */
        spk_pool_destroy(pool);
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", status);
}
#endif

int main(void) {
    RUN(every_item_once);
    RUN(runs_in_sequence);
    RUN(tiny_runs);
    RUN(runs_after_pauses);
    RUN(long_items);
    RUN(idle_workers_sleep);
    RUN(thread_counts);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    RUN(refused_threads);
#else
    SKIP("refused_threads: an address space limit and sanitizers do not go together");
#endif
    return CHECK_EXIT();
}
