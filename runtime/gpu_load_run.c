/* runtime/gpu_load_run.c - the pipeline that fills a device: threads that each pin or read, start a copy, and hash.
 *
 * A thread takes the next piece and has slots of its own, so there is no queue and no lock on the way of the bytes: it waits
 * for the copy that used the slot before, makes the bytes ready, starts their copy, and hashes them while the link works.
 * With as many threads as CPUs the slowest of link, memory and disk sets the pace.
 *
 * The mapping is only touched where the plan says so: pages that somebody cuts off a mapped file are a signal, pages cut off a
 * file that is read are an error.
 */
#include "runtime/gpu_load_internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/pool.h"

enum {
    PAGE_BYTES         = 4096,
    HUGE_PAGE_BYTES    = 2 << 20,
    /* Pages are read ahead and dropped in runs, so one in 256 KiB tells: asking for each would take 0.1 s of a 22 GB pack. */
    PAGE_SAMPLE_BYTES  = 256 << 10,
    DIRECT_ALIGN       = 4096,
    READ_BYTES_MAX     = 1 << 30          /* of one call; the system takes 2 GiB - 4096 */
};

typedef struct {
    uint8_t    *buffer;                   /* NULL until needed */
    bool        is_buffer_pinned, is_copying;
    const void *pinned;                   /* piece of the mapping; NULL: none */
    uint64_t    pinned_bytes;
} slot;

typedef struct {
    const spk_load_job  *job;
    const spk_load_plan *plan;
    uint64_t             piece_count, total_bytes;
    int                  direct_fd;       /* -1: no direct reads */
    slot                *slots;           /* [thread][slots_per_thread] */
    uint32_t            *turns;           /* [thread]: slots it has used so far */
    _Atomic bool         is_pin_refused, is_direct_refused;
    _Atomic uint64_t     done_bytes, way_bytes[SPK_LOAD_WAY_COUNT];
    _Atomic uint64_t     first_failed;    /* piece; UINT64_MAX: none */
    pthread_mutex_t      error_lock;      /* of first_failed and error together */
    spk_error            error;
} load;

typedef struct {
    load                 *load;
    const spk_load_range *range;
    uint64_t              offset_bytes, size_bytes;   /* in the range */
    uint32_t              thread_index;
} piece;

/* ---- Slots ---- */

static spk_status finish_copy(load *l, slot *s, spk_error *err) {
    const spk_transfer *t = l->job->transfer;
    spk_status status = s->is_copying ? t->wait(t->context, (uint32_t)(s - l->slots), err) : SPK_OK;
    s->is_copying = false;
    if (s->pinned != NULL) {
        t->unpin(t->context, s->pinned);
        /* Else the process would hold, and at its end give back, the whole pack page by page. */
        if (l->job->pack != NULL) (void)madvise((void *)(uintptr_t)s->pinned, (size_t)s->pinned_bytes, MADV_DONTNEED);
        s->pinned = NULL;
    }
    return status;
}

/* The thread's next slot, its last copy done. */
static spk_status take_slot(const piece *p, slot **out, spk_error *err) {
    load *l = p->load;
    uint32_t count = l->plan->slots_per_thread, turn = l->turns[p->thread_index]++;
    *out = &l->slots[p->thread_index * count + turn % count];
    return finish_copy(l, *out, err);
}

/* Huge pages of our own, pinned: a few milliseconds in all, where the driver's pinned memory takes tenths of a second. */
static spk_status need_buffer(load *l, slot *s, spk_error *err) {
    const spk_transfer *t = l->job->transfer;
    if (s->buffer != NULL) return SPK_OK;
    s->buffer = aligned_alloc(HUGE_PAGE_BYTES, (size_t)l->plan->buffer_bytes);
    if (s->buffer == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for copying the weights");
    (void)madvise(s->buffer, (size_t)l->plan->buffer_bytes, MADV_HUGEPAGE);
    s->is_buffer_pinned = t->pin(t->context, s->buffer, l->plan->buffer_bytes, true);
    return SPK_OK;
}

static void free_slot(load *l, slot *s) {
    const spk_transfer *t = l->job->transfer;
    if (s->is_buffer_pinned) t->unpin(t->context, s->buffer);
    free(s->buffer);
}

/* ---- Reading ---- */

static spk_status fail_short(const spk_pack *pack, spk_error *err) {
    struct stat now;
    uint64_t size_bytes = fstat(spk_pack_file(pack), &now) == 0 ? (uint64_t)now.st_size : 0;
    return spk_fail(err, SPK_E_CORRUPT, "%s: R5: truncated while it was read: file has %" PRIu64 " bytes, header says %" PRIu64,
                    spk_pack_path(pack), size_bytes, spk_pack_file_bytes(pack));
}

/* `is_direct` is cleared where the file system, or an alignment stricter than ours, does not allow it. */
static spk_status read_file(load *l, uint64_t offset_bytes, uint8_t *to, uint64_t size_bytes, bool *is_direct, spk_error *err) {
    const spk_pack *pack = l->job->pack;
    while (size_bytes > 0) {
        bool direct = *is_direct && offset_bytes % DIRECT_ALIGN == 0 && size_bytes % DIRECT_ALIGN == 0;
        size_t wanted = size_bytes < READ_BYTES_MAX ? (size_t)size_bytes : READ_BYTES_MAX;
        ssize_t got = pread(direct ? l->direct_fd : spk_pack_file(pack), to, wanted, (off_t)offset_bytes);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && direct && errno == EINVAL) {
            atomic_store(&l->is_direct_refused, true);
            *is_direct = false;
            continue;
        }
        if (got < 0)
            return spk_fail(err, SPK_E_IO, "%s: reading %" PRIu64 " bytes at %" PRIu64 ": %s", spk_pack_path(pack), size_bytes,
                            offset_bytes, strerror(errno));
        if (got == 0) return fail_short(pack, err);
        to += got;
        offset_bytes += (uint64_t)got;
        size_bytes -= (uint64_t)got;
    }
    return SPK_OK;
}

/* ---- One piece ---- */

/* Whole chunks, but for the section's last, from `at` in the piece. */
static spk_status verify(const piece *p, uint64_t at, const uint8_t *bytes, uint64_t size_bytes, spk_error *err) {
    const spk_pack *pack = p->load->job->pack;
    uint64_t first = (p->offset_bytes + at) / SPK_CHUNK_BYTES;
    for (uint64_t done = 0; pack != NULL && done < size_bytes; done += SPK_CHUNK_BYTES)
        SPK_TRY(spk_pack_verify_chunk(pack, p->range->place, first + done / SPK_CHUNK_BYTES, bytes + done, err));
    return SPK_OK;
}

static spk_status start_copy(const piece *p, slot *s, uint64_t at, const uint8_t *bytes, uint64_t size_bytes, spk_error *err) {
    const spk_transfer *t = p->load->job->transfer;
    SPK_TRY(t->start(t->context, (uint32_t)(s - p->load->slots), p->range->d_to + p->offset_bytes + at, bytes, size_bytes, err));
    s->is_copying = true;
    return SPK_OK;
}

/* *is_refused: nothing was done, another way must be taken. */
static spk_status move_pinned(const piece *p, bool *is_refused, spk_error *err) {
    load *l = p->load;
    const spk_transfer *t = l->job->transfer;
    const uint8_t *bytes = p->range->bytes + p->offset_bytes;
    slot *s;
    SPK_TRY(take_slot(p, &s, err));
    *is_refused = !t->pin(t->context, bytes, p->size_bytes, false);
    if (*is_refused) return SPK_OK;
    s->pinned = bytes;
    s->pinned_bytes = p->size_bytes;
    SPK_TRY(start_copy(p, s, 0, bytes, p->size_bytes, err));
    return verify(p, 0, bytes, p->size_bytes, err);
}

static spk_status move_buffered(const piece *p, spk_load_way *way, spk_error *err) {
    load *l = p->load;
    bool is_direct = *way == SPK_LOAD_DIRECT;
    for (uint64_t at = 0; at < p->size_bytes; at += l->plan->buffer_bytes) {
        uint64_t left = p->size_bytes - at, size = left < l->plan->buffer_bytes ? left : l->plan->buffer_bytes;
        slot *s;
        SPK_TRY(take_slot(p, &s, err));
        SPK_TRY(need_buffer(l, s, err));
        if (*way == SPK_LOAD_MEMORY) {
            memcpy(s->buffer, p->range->bytes + p->offset_bytes + at, size);
        } else {
            uint64_t section = spk_pack_section_file_offset(l->job->pack, p->range->place);
            SPK_TRY(read_file(l, section + p->offset_bytes + at, s->buffer, size, &is_direct, err));
        }
        SPK_TRY(start_copy(p, s, at, s->buffer, size, err));
        SPK_TRY(verify(p, at, s->buffer, size, err));
    }
    if (*way == SPK_LOAD_DIRECT && !is_direct) *way = SPK_LOAD_READ;
    return SPK_OK;
}

/* Looks at the page cache, not at the pages.  Where the system does not tell, it says yes: reading is right in both cases. */
static bool is_cached(const piece *p) {
    const uint8_t *bytes = p->range->bytes + p->offset_bytes;
    if (p->load->job->pack == NULL) return true;
    for (uint64_t at = 0; at < p->size_bytes; at += PAGE_SAMPLE_BYTES) {
        unsigned char page = 0;
        if (mincore((void *)(uintptr_t)(bytes + at), PAGE_BYTES, &page) == 0 && (page & 1) == 0) return false;
    }
    return true;
}

static spk_load_way choose_way(const piece *p) {
    const load *l = p->load;
    spk_load_way way = l->plan->cached_way;
    if (way != l->plan->uncached_way && !is_cached(p)) way = l->plan->uncached_way;
    if (way == SPK_LOAD_PINNED && atomic_load(&l->is_pin_refused)) way = SPK_LOAD_READ;
    if (way == SPK_LOAD_DIRECT && (l->direct_fd < 0 || atomic_load(&l->is_direct_refused))) way = SPK_LOAD_READ;
    return way == SPK_LOAD_READ && l->job->pack == NULL ? SPK_LOAD_MEMORY : way;
}

static spk_status move_piece(const piece *p, spk_error *err) {
    load *l = p->load;
    spk_load_way way = choose_way(p);
    bool is_pinned = way == SPK_LOAD_PINNED, is_refused = false;
    if (is_pinned) SPK_TRY(move_pinned(p, &is_refused, err));
    if (is_refused) {
        atomic_store(&l->is_pin_refused, true);
        way = choose_way(p);
    }
    if (!is_pinned || is_refused) SPK_TRY(move_buffered(p, &way, err));
    atomic_fetch_add(&l->way_bytes[way], p->size_bytes);
    return SPK_OK;
}

/* ---- All pieces ---- */

static uint64_t piece_count_of(const load *l, const spk_load_range *r) {
    return r->size_bytes / l->plan->piece_bytes + (r->size_bytes % l->plan->piece_bytes != 0);
}

static piece piece_at(load *l, uint64_t index, uint32_t thread_index) {
    const spk_load_range *r = l->job->ranges;
    for (; index >= piece_count_of(l, r); r++) index -= piece_count_of(l, r);
    uint64_t offset = index * l->plan->piece_bytes, left = r->size_bytes - offset;
    return (piece){ .load = l, .range = r, .offset_bytes = offset, .thread_index = thread_index,
                    .size_bytes = left < l->plan->piece_bytes ? left : l->plan->piece_bytes };
}

static void note_failure(load *l, uint64_t index, const spk_error *error) {
    (void)pthread_mutex_lock(&l->error_lock);
    if (index < atomic_load(&l->first_failed)) {
        atomic_store(&l->first_failed, index);
        l->error = *error;
    }
    (void)pthread_mutex_unlock(&l->error_lock);
}

/* Pieces behind one that failed are left out; those before it were taken earlier and are finished, so that the first error of
 * the file is found. */
static void move_pieces(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    load *l = context;
    const spk_load_job *job = l->job;
    for (uint64_t i = begin; i < end && i < atomic_load(&l->first_failed); i++) {
        piece p = piece_at(l, i, thread_index);
        spk_error error;
        if (move_piece(&p, &error) != SPK_OK) {
            note_failure(l, i, &error);
            return;
        }
        uint64_t done = atomic_fetch_add(&l->done_bytes, p.size_bytes) + p.size_bytes;
        if (thread_index == 0 && job->progress != NULL && done < l->total_bytes)
            job->progress(job->progress_context, done, l->total_bytes);
    }
}

/* Also after a failure: no copy may run on when its memory is given back. */
static void finish_slots(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    load *l = context;
    (void)thread_index;
    for (uint64_t i = begin; i < end; i++) {
        spk_error error;
        if (finish_copy(l, &l->slots[i], &error) != SPK_OK) note_failure(l, l->piece_count, &error);
        free_slot(l, &l->slots[i]);
    }
}

/* Another description of the same file, whatever lies at its path by now; -1 where there is no /proc or no direct reading. */
static int open_direct(const spk_load_job *job, const spk_load_plan *plan) {
    char path[32];
    if (job->pack == NULL || (plan->cached_way != SPK_LOAD_DIRECT && plan->uncached_way != SPK_LOAD_DIRECT)) return -1;
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", spk_pack_file(job->pack));
    return open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
}

static spk_status run(load *l, spk_error *err) {
    const spk_load_plan *plan = l->plan;
    uint32_t slot_count = spk_load_slot_count(plan);
    spk_pool *pool = NULL;
    l->slots = calloc(slot_count, sizeof *l->slots);
    l->turns = calloc(plan->thread_count, sizeof *l->turns);
    if (l->slots == NULL || l->turns == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory for copying the weights");
    SPK_TRY(spk_pool_create(plan->thread_count, &pool, err));
    spk_pool_run(pool, l->piece_count, 1, move_pieces, l);
    spk_pool_run(pool, slot_count, 1, finish_slots, l);
    spk_pool_destroy(pool);
    if (atomic_load(&l->first_failed) != UINT64_MAX) {
        if (err != NULL) *err = l->error;
        return l->error.status;
    }
    if (l->job->progress != NULL) l->job->progress(l->job->progress_context, l->total_bytes, l->total_bytes);
    return SPK_OK;
}

spk_status spk_load_run(const spk_load_job *job, const spk_load_plan *plan, uint64_t way_bytes[SPK_LOAD_WAY_COUNT],
                        spk_error *err) {
    assert(plan->thread_count >= 1 && plan->slots_per_thread >= 1);
    assert(plan->piece_bytes > 0 && plan->piece_bytes % SPK_CHUNK_BYTES == 0);
    assert(plan->buffer_bytes > 0 && plan->buffer_bytes % SPK_CHUNK_BYTES == 0);
    load l = { .job = job, .plan = plan, .first_failed = UINT64_MAX, .error_lock = PTHREAD_MUTEX_INITIALIZER,
               .direct_fd = open_direct(job, plan) };
    for (uint32_t r = 0; r < job->range_count; r++) {
        l.piece_count += piece_count_of(&l, &job->ranges[r]);
        l.total_bytes += job->ranges[r].size_bytes;
    }
    spk_status status = run(&l, err);
    for (int w = 0; way_bytes != NULL && w < SPK_LOAD_WAY_COUNT; w++) way_bytes[w] = atomic_load(&l.way_bytes[w]);
    free(l.slots);
    free(l.turns);
    if (l.direct_fd >= 0) (void)close(l.direct_fd);
    return status;
}
