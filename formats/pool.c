/* formats/pool.c - see pool.h.
 *
 * One 32-bit `epoch` runs everything: odd while a run is open, even between runs.  Workers wait for it to become an odd
 * value that they have not seen, first spinning, then in a futex.
 *
 * A worker enters a run by raising `active` and then looking at the epoch again; the caller closes a run by making the
 * epoch even and then waiting for `active` to be 0.  Both use sequentially consistent operations, so either the worker
 * sees the run closed and leaves without touching it, or the caller sees the worker and waits.  So a run never waits
 * for a worker that has not woken up, and the job's fields are only written while no worker can read them.
 */
#include "formats/pool.h"

#include <assert.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    CACHE_LINE_BYTES = 64,
    SPIN_NS          = 50000,       /* a futex wake-up costs some tens of microseconds; decode phases are closer */
    PAUSES_PER_CHECK = 16           /* between looks at the clock */
};

typedef struct {
    spk_pool *pool;
    pthread_t thread;
    uint32_t  thread_index;
} worker;

struct spk_pool {
    /* The job: written by the caller between runs, read by workers inside one. */
    spk_pool_fn *fn;
    void        *context;
    uint64_t     item_count, grain, piece_count;
    uint32_t     thread_count;
    bool         is_spinning;       /* a CPU for each thread, so that waiting in a loop takes nothing from the others */
    worker      *workers;           /* [thread_count - 1] */

    /* Each on a cache line of its own: they are written at different times by different threads. */
    alignas(CACHE_LINE_BYTES) _Atomic uint32_t epoch;
    _Atomic uint32_t sleeper_count; /* workers that may be in futex_wait(epoch) */
    _Atomic bool     is_stopping;
    alignas(CACHE_LINE_BYTES) _Atomic uint32_t active;   /* workers inside, or looking */
    _Atomic bool     is_caller_asleep;
    alignas(CACHE_LINE_BYTES) _Atomic uint64_t next_piece;
};

/* ---- Waiting ---- */

static void futex_wait(_Atomic uint32_t *word, uint32_t expected) {
    /* EAGAIN and EINTR need no care: every caller looks at the word again. */
    (void)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, uint32_t count) {
    (void)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count < INT_MAX ? count : INT_MAX, NULL, NULL, 0);
}

static inline void cpu_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t now_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static inline bool is_new_run(uint32_t epoch, uint32_t seen) { return epoch % 2 == 1 && epoch != seen; }

/* 0, which is past, where threads share CPUs. */
static uint64_t spin_deadline_ns(const spk_pool *pool) { return pool->is_spinning ? now_ns() + SPIN_NS : 0; }

/* Returns when a run other than `seen` is open, or the pool is stopping. */
static void wait_for_run(spk_pool *pool, uint32_t seen) {
    const uint64_t deadline_ns = spin_deadline_ns(pool);
    do {
        for (int i = 0; i < PAUSES_PER_CHECK; i++) {
            if (is_new_run(atomic_load(&pool->epoch), seen) || atomic_load(&pool->is_stopping)) return;
            cpu_pause();
        }
    } while (now_ns() < deadline_ns);

    /* Counted before the epoch is read: a caller that opens a run later sees the sleeper, and one that opened it
     * earlier has changed the word, so that futex_wait returns at once. */
    atomic_fetch_add(&pool->sleeper_count, 1);
    for (uint32_t epoch; !is_new_run(epoch = atomic_load(&pool->epoch), seen) && !atomic_load(&pool->is_stopping);)
        futex_wait(&pool->epoch, epoch);
    atomic_fetch_sub(&pool->sleeper_count, 1);
}

static void wait_for_workers(spk_pool *pool) {
    const uint64_t deadline_ns = spin_deadline_ns(pool);
    do {
        for (int i = 0; i < PAUSES_PER_CHECK; i++) {
            if (atomic_load(&pool->active) == 0) return;
            cpu_pause();
        }
    } while (now_ns() < deadline_ns);

    atomic_store(&pool->is_caller_asleep, true);
    for (uint32_t active; (active = atomic_load(&pool->active)) != 0;) futex_wait(&pool->active, active);
    atomic_store(&pool->is_caller_asleep, false);
}

/* ---- Running ---- */

static void take_pieces(spk_pool *pool, uint32_t thread_index) {
    for (;;) {
        const uint64_t piece = atomic_fetch_add_explicit(&pool->next_piece, 1, memory_order_relaxed);
        if (piece >= pool->piece_count) return;
        const uint64_t begin = piece * pool->grain, left = pool->item_count - begin;
        pool->fn(pool->context, begin, begin + (left < pool->grain ? left : pool->grain), thread_index);
    }
}

static void *worker_main(void *argument) {
    const worker *self = argument;
    spk_pool *pool = self->pool;
    uint32_t seen = 0;
    for (;;) {
        wait_for_run(pool, seen);
        if (atomic_load(&pool->is_stopping)) return NULL;
        atomic_fetch_add(&pool->active, 1);
        seen = atomic_load(&pool->epoch);
        if (seen % 2 == 1) take_pieces(pool, self->thread_index);
        if (atomic_fetch_sub(&pool->active, 1) == 1 && atomic_load(&pool->is_caller_asleep))
            futex_wake(&pool->active, 1);
    }
}

void spk_pool_run(spk_pool *pool, uint64_t item_count, uint64_t grain, spk_pool_fn *fn, void *context) {
    assert(grain >= 1);
    if (pool->thread_count == 1 || item_count <= grain) {
        for (uint64_t begin = 0; begin < item_count;) {
            const uint64_t left = item_count - begin, end = begin + (left < grain ? left : grain);
            fn(context, begin, end, 0);
            begin = end;
        }
        return;
    }
    pool->fn = fn;
    pool->context = context;
    pool->item_count = item_count;
    pool->grain = grain;
    pool->piece_count = (item_count - 1) / grain + 1;
    atomic_store_explicit(&pool->next_piece, 0, memory_order_relaxed);
    atomic_fetch_add(&pool->epoch, 1);
    const uint64_t wanted = pool->piece_count - 1;
    const uint32_t sleeper_count = atomic_load(&pool->sleeper_count);
    if (sleeper_count > 0) futex_wake(&pool->epoch, wanted < sleeper_count ? (uint32_t)wanted : sleeper_count);
    take_pieces(pool, 0);
    atomic_fetch_add(&pool->epoch, 1);
    wait_for_workers(pool);
}

/* ---- Life ---- */

uint32_t spk_cpu_count(void) {
    cpu_set_t cpus;
    const bool has_set = sched_getaffinity(0, sizeof cpus, &cpus) == 0;
    const long count = has_set ? CPU_COUNT(&cpus) : sysconf(_SC_NPROCESSORS_ONLN);   /* no: it has too few bits */
    if (count < 1) return 1;
    return count < SPK_POOL_THREAD_MAX ? (uint32_t)count : SPK_POOL_THREAD_MAX;
}

/* Ends the first `started` workers and frees the pool. */
static void stop(spk_pool *pool, uint32_t started) {
    if (started > 0) {
        atomic_store(&pool->is_stopping, true);
        atomic_fetch_add(&pool->epoch, 2);       /* changes the futex word, opens nothing */
        futex_wake(&pool->epoch, started);
    }
    for (uint32_t i = 0; i < started; i++) (void)pthread_join(pool->workers[i].thread, NULL);
    free(pool->workers);
    free(pool);
}

spk_status spk_pool_create(uint32_t thread_count, spk_pool **out, spk_error *err) {
    const uint32_t cpu_count = spk_cpu_count();
    if (thread_count == 0) thread_count = cpu_count;
    if (thread_count > SPK_POOL_THREAD_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%" PRIu32 " threads: at most %d", thread_count, (int)SPK_POOL_THREAD_MAX);
    spk_pool *pool = aligned_alloc(CACHE_LINE_BYTES, sizeof *pool);
    if (pool == NULL) return spk_fail(err, SPK_E_MEMORY, "thread pool: out of memory");
    memset(pool, 0, sizeof *pool);
    pool->thread_count = thread_count;
    pool->is_spinning = thread_count <= cpu_count;
    if (thread_count > 1 && (pool->workers = calloc(thread_count - 1, sizeof *pool->workers)) == NULL) {
        stop(pool, 0);
        return spk_fail(err, SPK_E_MEMORY, "thread pool: out of memory");
    }
    for (uint32_t i = 0; i + 1 < thread_count; i++) {
        pool->workers[i] = (worker){ .pool = pool, .thread_index = i + 1 };
        const int code = pthread_create(&pool->workers[i].thread, NULL, worker_main, &pool->workers[i]);
        if (code != 0) {
            stop(pool, i);
            return spk_fail(err, SPK_E_IO, "starting thread %" PRIu32 " of %" PRIu32 ": %s", i + 2, thread_count,
                            strerror(code));
        }
    }
    *out = pool;
    return SPK_OK;
}

void spk_pool_destroy(spk_pool *pool) {
    if (pool != NULL) stop(pool, pool->thread_count - 1);
}

uint32_t spk_pool_thread_count(const spk_pool *pool) { return pool->thread_count; }
