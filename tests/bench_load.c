/* tests/bench_load.c - what loading a pack onto the GPU costs, by strategy and threads: the figures that the constants of
 * runtime/gpu_load.c were chosen by.
 *
 *   make build/tests/bench_load && build/tests/bench_load [--cold] PACK
 *
 * The pack is read into the page cache first; every run opens it anew, is verified, includes all allocation of buffers, and
 * spot checks what arrived.  Without a GPU copies go nowhere, and the rest is timed.  --cold drops the pack from the page
 * cache instead (not all file systems do) and times reading from the disk.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "formats/cli.h"
#include "formats/pool.h"
#include "runtime/gpu_load_internal.h"

enum { MIB = 1 << 20, PAGE = 4096, CHECK_COUNT = 256, CHECK_BYTES = 64 << 10, REPEATS = 2 };
#define PAGE_COST_BYTES_MAX (UINT64_C(4) << 30)
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

static const char *const way_names[SPK_LOAD_WAY_COUNT] = { "pinned", "read", "direct", "memory" };

typedef struct {
    const char *path;
    spk_cuda   *cuda;                /* NULL: no GPU */
    uint8_t    *d_memory;            /* all sections but EXTRA */
    uint64_t    total_bytes;
} bench;

static void die(const spk_error *error) {
    fprintf(stderr, "bench_load: %s\n", error->text);
    exit(1);
}

/* ---- Copies that go nowhere ---- */

static bool null_pin(void *context, const void *memory, uint64_t size_bytes, bool is_host_writing) {
    (void)context; (void)memory; (void)size_bytes; (void)is_host_writing;
    return true;
}
static void null_unpin(void *context, const void *memory) { (void)context; (void)memory; }
static spk_status null_start(void *context, uint32_t slot, void *d_to, const void *from, uint64_t size_bytes, spk_error *err) {
    (void)context; (void)slot; (void)d_to; (void)from; (void)size_bytes; (void)err;
    return SPK_OK;
}
static spk_status null_wait(void *context, uint32_t slot, spk_error *err) {
    (void)context; (void)slot; (void)err;
    return SPK_OK;
}
static void null_close(void *context) { (void)context; }

static spk_transfer open_transfer(const bench *b, uint32_t slot_count, uint32_t stream_count) {
    spk_transfer transfer = { NULL, null_pin, null_unpin, null_start, null_wait, null_close };
    spk_error error;
    if (b->cuda != NULL && spk_cuda_transfer_open(b->cuda, slot_count, stream_count, &transfer, &error) != SPK_OK) die(&error);
    return transfer;
}

/* ---- Whole loads ---- */

static spk_pack *open_pack(const bench *b) {
    spk_pack *pack;
    spk_error error;
    if (spk_pack_open(b->path, &pack, &error) != SPK_OK) die(&error);
    return pack;
}

static void make_ranges(const bench *b, const spk_pack *pack, spk_load_range ranges[SPK_PLACE_COUNT]) {
    uint64_t at = 0;
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++) {
        ranges[s] = (spk_load_range){ .d_to = b->d_memory + at, .place = s + 1 };
        if (s + 1 != SPK_PLACE_EXTRA) ranges[s].bytes = spk_pack_section(pack, s + 1, &ranges[s].size_bytes);
        at += ranges[s].size_bytes;
    }
}

/* Blocks at random places of the device against the mapping. */
static void check_arrival(const bench *b, const spk_load_range ranges[SPK_PLACE_COUNT]) {
    static uint8_t got[CHECK_BYTES];
    uint64_t seed = 88172645463325252u;
    spk_error error;
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++)       /* after a cold run, without gigabytes of reading ahead */
        if (ranges[s].size_bytes > 0) (void)madvise((void *)(uintptr_t)ranges[s].bytes, ranges[s].size_bytes, MADV_RANDOM);
    for (int i = 0; b->cuda != NULL && i < CHECK_COUNT; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const spk_load_range *r = &ranges[(seed >> 60) % SPK_PLACE_COUNT];
        if (r->size_bytes == 0) continue;
        uint64_t size = r->size_bytes < CHECK_BYTES ? r->size_bytes : CHECK_BYTES, at = (seed >> 4) % (r->size_bytes - size + 1);
        if (i < 8) at = i % 2 ? 0 : r->size_bytes - size;
        if (spk_cuda_download(b->cuda, got, r->d_to + at, size, &error) != SPK_OK) die(&error);
        if (memcmp(got, r->bytes + at, size) != 0) {
            fprintf(stderr, "bench_load: WRONG BYTES in section %" PRIu32 " at %" PRIu64 "\n", r->place, at);
            exit(1);
        }
    }
}

typedef struct {
    spk_load_plan plan;
    uint32_t      stream_count;
    bool          is_unverified;     /* to see what verifying costs; for ways that need no file */
} strategy;

static double run_once(const bench *b, const strategy *s, uint64_t way_bytes[SPK_LOAD_WAY_COUNT]) {
    spk_pack *pack = open_pack(b);
    spk_load_range ranges[SPK_PLACE_COUNT];
    spk_error error;
    make_ranges(b, pack, ranges);
    if (b->cuda != NULL && spk_cuda_fill(b->cuda, b->d_memory, 0xa5, b->total_bytes, &error) != SPK_OK) die(&error);
    double start_s = spk_cli_now_s();
    spk_transfer transfer = open_transfer(b, spk_load_slot_count(&s->plan), s->stream_count);
    spk_load_job job = { .pack = s->is_unverified ? NULL : pack, .ranges = ranges, .range_count = SPK_PLACE_COUNT,
                         .transfer = &transfer };
    if (spk_load_run(&job, &s->plan, way_bytes, &error) != SPK_OK) die(&error);
    transfer.close(transfer.context);
    double seconds = spk_cli_now_s() - start_s;
    check_arrival(b, ranges);
    spk_pack_close(pack);
    return seconds;
}

static void run_strategy(const bench *b, const strategy *s, int repeats) {
    const spk_load_plan *p = &s->plan;
    uint64_t way_bytes[SPK_LOAD_WAY_COUNT];
    double best = 0;
    printf("%-7s %7" PRIu32 " %5" PRIu32 " %7" PRIu32 " %6" PRIu64 " %6" PRIu64 " %-4s", way_names[p->cached_way], p->thread_count,
           p->slots_per_thread, s->stream_count, p->piece_bytes / MIB, p->buffer_bytes / MIB, s->is_unverified ? "no" : "yes");
    for (int i = 0; i < repeats; i++) {
        double seconds = run_once(b, s, way_bytes);
        if (i == 0 || seconds < best) best = seconds;
        printf(" %7.3f", seconds);
        fflush(stdout);
    }
    printf("  %6.1f GB/s", 1e-9 * (double)b->total_bytes / best);
    for (int w = 0; w < SPK_LOAD_WAY_COUNT; w++)
        if (w != (int)p->cached_way && way_bytes[w] > 0) printf("  (%.0f %% by %s)", 100.0 * (double)way_bytes[w] / (double)b->total_bytes, way_names[w]);
    printf("\n");
}

static strategy strategy_of(spk_load_way way, uint32_t threads, uint32_t slots, uint32_t streams, uint64_t piece_mib,
                            uint64_t buffer_mib) {
    return (strategy){ .stream_count = streams,
                       .plan = { .cached_way = way, .uncached_way = way, .thread_count = threads, .slots_per_thread = slots,
                                 .piece_bytes = piece_mib * MIB, .buffer_bytes = buffer_mib * MIB } };
}

static void run_warm_table(const bench *b, uint32_t cpu_count) {
    static const uint32_t parts[] = { 4, 2, 1 };         /* of the CPUs */
    static const spk_load_way ways[] = { SPK_LOAD_PINNED, SPK_LOAD_READ, SPK_LOAD_MEMORY };
    uint64_t late = 2 * b->total_bytes / (32 * MIB) / cpu_count + 1;     /* slots enough: nothing is unpinned before the end */
    printf("\nway     threads slots streams  piece buffer ver.  seconds (each run)\n");
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++)
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            strategy s = strategy_of(ways[w], cpu_count / parts[i], 2, 2, 32, 4);
            if (s.plan.thread_count >= 1) run_strategy(b, &s, REPEATS);
        }
    const strategy others[] = {
        strategy_of(SPK_LOAD_PINNED, cpu_count, (uint32_t)late, 2, 32, 4), strategy_of(SPK_LOAD_PINNED, cpu_count, 2, 1, 32, 4),
        strategy_of(SPK_LOAD_PINNED, cpu_count, 2, 2, 8, 4), strategy_of(SPK_LOAD_PINNED, cpu_count, 2, 2, 16, 4),
        strategy_of(SPK_LOAD_PINNED, cpu_count, 2, 2, 128, 4), strategy_of(SPK_LOAD_PINNED, cpu_count, 4, 2, 32, 4),
        strategy_of(SPK_LOAD_READ, cpu_count, 2, 1, 32, 4), strategy_of(SPK_LOAD_READ, cpu_count, 2, 4, 32, 4),
        strategy_of(SPK_LOAD_READ, cpu_count, 3, 2, 32, 4), strategy_of(SPK_LOAD_READ, cpu_count, 4, 2, 32, 4),
        strategy_of(SPK_LOAD_READ, cpu_count, 2, 2, 32, 8), strategy_of(SPK_LOAD_READ, cpu_count, 2, 2, 32, 16),
        strategy_of(SPK_LOAD_READ, cpu_count, 2, 2, 4, 4), strategy_of(SPK_LOAD_READ, cpu_count, 1, 2, 32, 4),
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) run_strategy(b, &others[i], REPEATS);
    strategy unverified = strategy_of(SPK_LOAD_PINNED, cpu_count, 2, 2, 32, 4);
    unverified.is_unverified = true;
    run_strategy(b, &unverified, REPEATS);
    unverified.plan.cached_way = unverified.plan.uncached_way = SPK_LOAD_MEMORY;
    run_strategy(b, &unverified, REPEATS);
}

/* ---- What pages cost ---- */

typedef enum { COST_POPULATE, COST_PIN, COST_UNPIN, COST_HASH, COST_READ, COST_RING } cost_kind;

typedef struct {
    const spk_transfer *transfer;
    cost_kind      kind;
    const uint8_t *bytes;
    uint64_t       size_bytes, piece_bytes, file_offset;
    int            fd;
    uint8_t       *buffers[SPK_POOL_THREAD_MAX];
    _Atomic uint64_t sum, failure_count;
} cost_job;

static void cost_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    cost_job *job = context;
    const spk_transfer *t = job->transfer;
    for (uint64_t i = begin; i < end; i++) {
        const uint8_t *at = job->bytes + i * job->piece_bytes;
        bool fine = true;
        if (job->kind == COST_POPULATE)
            fine = madvise((void *)(uintptr_t)at, (size_t)job->piece_bytes, MADV_POPULATE_READ) == 0;
        if (job->kind == COST_PIN) fine = t->pin(t->context, at, job->piece_bytes, false);
        if (job->kind == COST_UNPIN) t->unpin(t->context, at);
        if (job->kind == COST_HASH)
            for (uint64_t chunk = 0; chunk < job->piece_bytes; chunk += SPK_CHUNK_BYTES)
                atomic_fetch_add(&job->sum, spk_digest_of(at + chunk, SPK_CHUNK_BYTES).bytes[0]);
        if (job->kind == COST_READ) {
            if (job->buffers[thread_index] == NULL) job->buffers[thread_index] = aligned_alloc(2 * MIB, SPK_CHUNK_BYTES);
            for (uint64_t chunk = 0; chunk < job->piece_bytes; chunk += SPK_CHUNK_BYTES)
                fine = fine && pread(job->fd, job->buffers[thread_index], SPK_CHUNK_BYTES,
                                     (off_t)(job->file_offset + i * job->piece_bytes + chunk)) == SPK_CHUNK_BYTES;
        }
        if (job->kind == COST_RING) {
            uint8_t *buffer = aligned_alloc(2 * MIB, SPK_CHUNK_BYTES);
            (void)madvise(buffer, SPK_CHUNK_BYTES, MADV_HUGEPAGE);
            fine = t->pin(t->context, buffer, SPK_CHUNK_BYTES, true);
            if (fine) t->unpin(t->context, buffer);
            free(buffer);
        }
        if (!fine) atomic_fetch_add(&job->failure_count, 1);
    }
}

static void cost(cost_job *job, cost_kind kind, const char *name, uint32_t thread_count) {
    spk_pool *pool;
    spk_error error;
    if (spk_pool_create(thread_count, &pool, &error) != SPK_OK) die(&error);
    job->kind = kind;
    job->failure_count = 0;
    double start_s = spk_cli_now_s();
    spk_pool_run(pool, job->size_bytes / job->piece_bytes, 1, cost_pieces, job);
    double seconds = spk_cli_now_s() - start_s, gib = (double)job->size_bytes / (1 << 30);
    spk_pool_destroy(pool);
    for (uint32_t i = 0; i < thread_count; i++) {
        free(job->buffers[i]);
        job->buffers[i] = NULL;
    }
    printf("%-44s %7" PRIu32 " %6" PRIu64 " %9.4f s/GiB %7.1f GB/s", name, thread_count, job->piece_bytes / MIB, seconds / gib,
           1e-9 * (double)job->size_bytes / seconds);
    if (job->failure_count > 0) printf("  REFUSED: %" PRIu64, (uint64_t)job->failure_count);
    printf("\n");
}

static void run_page_costs(const bench *b, uint32_t cpu_count) {
    static const uint64_t pieces[] = { 4, 32, 256 };
    spk_transfer transfer = open_transfer(b, 1, 1);
    printf("\npages in the page cache%*s threads  piece\n", 21, "");
    for (int round = 0; round < 4; round++) {
        uint32_t threads = round == 0 ? 1 : round == 1 ? (cpu_count + 3) / 4 : cpu_count;
        spk_pack *pack = open_pack(b);
        uint64_t size, expert_bytes;
        (void)spk_pack_section(pack, SPK_PLACE_STATIC, &size);
        (void)spk_pack_section(pack, SPK_PLACE_EXPERTS, &expert_bytes);
        uint32_t place = expert_bytes > size ? SPK_PLACE_EXPERTS : SPK_PLACE_STATIC;
        const uint8_t *bytes = spk_pack_section(pack, place, &size);
        if (size > PAGE_COST_BYTES_MAX) size = PAGE_COST_BYTES_MAX;
        cost_job *job = calloc(1, sizeof *job);
        *job = (cost_job){ .transfer = &transfer, .bytes = bytes, .fd = spk_pack_file(pack), .piece_bytes = 32 * MIB,
                           .file_offset = spk_pack_section_file_offset(pack, place), .size_bytes = size / (32 * MIB) * (32 * MIB) };
        if (job->size_bytes == 0) break;
        cost(job, COST_READ, "pread into 4 MiB buffers", threads);
        for (size_t p = 0; p < (round == 3 ? sizeof pieces / sizeof *pieces : 1); p++) {
            if (round == 3) job->piece_bytes = pieces[p] * MIB;
            cost(job, COST_PIN, "pin, pages not mapped yet", threads);
            cost(job, COST_UNPIN, "unpin", threads);
            (void)madvise((void *)(uintptr_t)bytes, (size_t)size, MADV_DONTNEED);
        }
        job->piece_bytes = 32 * MIB;
        cost(job, COST_POPULATE, "MADV_POPULATE_READ", threads);
        cost(job, COST_PIN, "pin, pages mapped", threads);
        cost(job, COST_UNPIN, "unpin", threads);
        cost(job, COST_HASH, "hash, pages mapped", threads);
        job->size_bytes = (uint64_t)threads * 2 * SPK_CHUNK_BYTES;
        job->piece_bytes = SPK_CHUNK_BYTES;
        cost(job, COST_RING, "buffers: allocate, pin, unpin, free", threads);
        free(job);
        spk_pack_close(pack);
    }
    transfer.close(transfer.context);
}

/* ---- Cold ---- */

static void drop_from_cache(const bench *b) {
    unsigned char in = 0;
    int fd = open(b->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fsync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) printf("cannot drop from the page cache\n");
    if (fd >= 0) (void)close(fd);
    spk_pack *pack = open_pack(b);
    uint64_t size, in_count = 0, count = 0;
    const uint8_t *bytes = spk_pack_section(pack, SPK_PLACE_STATIC, &size);
    for (uint64_t at = 0; at < size; at += 16 * MIB, count++)
        in_count += mincore((void *)(uintptr_t)(bytes + at), PAGE, &in) != 0 || (in & 1);
    if (in_count > count / 10 + 1) printf("NOT COLD: %" PRIu64 " of %" PRIu64 " pages are still there\n", in_count, count);
    spk_pack_close(pack);
}

static void run_cold_table(const bench *b, uint32_t cpu_count) {
    const strategy table[] = {
        strategy_of(SPK_LOAD_DIRECT, cpu_count, 2, 2, 32, 4), strategy_of(SPK_LOAD_DIRECT, (cpu_count + 1) / 2, 2, 2, 32, 4),
        strategy_of(SPK_LOAD_DIRECT, (cpu_count + 3) / 4, 2, 2, 32, 4), strategy_of(SPK_LOAD_DIRECT, cpu_count, 2, 2, 32, 16),
        strategy_of(SPK_LOAD_READ, cpu_count, 2, 2, 32, 4),
    };
    printf("\ncold\nway     threads slots streams  piece buffer ver.  seconds\n");
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        drop_from_cache(b);
        run_strategy(b, &table[i], 1);
    }
}

/* ---- Main ---- */

static void open_device(bench *b) {
    spk_error error;
    void *memory = NULL;
    double start_s = spk_cli_now_s();
    spk_status status = spk_cuda_open(&b->cuda, &error);
    double opened_s = spk_cli_now_s();
    if (status == SPK_E_UNSUPPORTED) {
        printf("NO GPU (%s): copies go nowhere\n", error.text);
        b->cuda = NULL;
        return;
    }
    if (status != SPK_OK) die(&error);
    if (spk_cuda_allocate_raw(b->cuda, b->total_bytes, "the pack", &memory, &error) != SPK_OK) die(&error);
    double allocated_s = spk_cli_now_s();
    if (spk_cuda_fill(b->cuda, memory, 0, b->total_bytes, &error) != SPK_OK) die(&error);
    printf("CUDA start-up %.3f s; allocating %.2f GB %.4f s; clearing it %.4f s\n", opened_s - start_s,
           1e-9 * (double)b->total_bytes, allocated_s - opened_s, spk_cli_now_s() - allocated_s);
    b->d_memory = memory;
}

int main(int argc, char **argv) {
    bool is_cold = argc == 3 && strcmp(argv[1], "--cold") == 0;
    if (argc != (is_cold ? 3 : 2)) {
        fprintf(stderr, "usage: bench_load [--cold] PACK\n");
        return 2;
    }
    bench b = { .path = argv[argc - 1] };
    struct utsname system;
    spk_load_range ranges[SPK_PLACE_COUNT];
    uint32_t cpu_count = spk_cpu_count();
    double start_s = spk_cli_now_s();
    spk_pack *pack = open_pack(&b);
    double opened_s = spk_cli_now_s();
    make_ranges(&b, pack, ranges);
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++) b.total_bytes += ranges[s].size_bytes;
    spk_pack_close(pack);
    if (uname(&system) == 0) printf("%s %s, %" PRIu32 " CPUs; ", system.sysname, system.release, cpu_count);
    printf("opening the pack on the host %.3f s\n", opened_s - start_s);
    open_device(&b);
    if (is_cold) {
        run_cold_table(&b, cpu_count);
    } else {
        strategy warm_up = strategy_of(SPK_LOAD_READ, cpu_count, 2, 2, 32, 4);
        printf("\nfirst, from wherever it is\n");
        run_strategy(&b, &warm_up, 1);
        run_page_costs(&b, cpu_count);
        run_warm_table(&b, cpu_count);
    }
    if (b.d_memory != NULL) spk_cuda_free(b.cuda, b.d_memory);
    spk_cuda_close(b.cuda);
    return 0;
}
