/* runtime/gpu_load_internal.h - moving weights to a device, apart from the device: private to runtime/ and its tests. */
#ifndef SPK_GPU_LOAD_INTERNAL_H
#define SPK_GPU_LOAD_INTERNAL_H

#include "formats/spk.h"
#include "kernels/cuda.h"

/* How bytes get from the host to where the device copies them from. */
typedef enum {
    SPK_LOAD_PINNED,       /* copied out of the pinned pages of the mapping itself */
    SPK_LOAD_READ,         /* read through the page cache into a pinned buffer */
    SPK_LOAD_DIRECT,       /* read past the page cache into a pinned buffer */
    SPK_LOAD_MEMORY,       /* copied from the mapping into a pinned buffer */
    SPK_LOAD_WAY_COUNT
} spk_load_way;

/* The ways to try first.  What is refused falls back: PINNED and DIRECT to READ, READ of what is in no file to MEMORY. */
typedef struct {
    spk_load_way cached_way;         /* for pieces whose pages are in memory */
    spk_load_way uncached_way;       /* for the others */
    uint32_t     thread_count;       /* >= 1, the caller's included */
    uint32_t     slots_per_thread;   /* >= 1: copies under way that each thread goes ahead of */
    uint64_t     piece_bytes;        /* what a thread takes, and pins, at a time; a multiple of SPK_CHUNK_BYTES */
    uint64_t     buffer_bytes;       /* likewise; of one slot, where buffers are used */
} spk_load_plan;

static inline uint32_t spk_load_slot_count(const spk_load_plan *plan) { return plan->thread_count * plan->slots_per_thread; }

/* One section. */
typedef struct {
    const uint8_t *bytes;            /* on the host, page-aligned; of a pack: its mapping */
    uint64_t       size_bytes;       /* 0 is fine */
    uint8_t       *d_to;
    uint32_t       place;            /* of a pack: spk_place */
} spk_load_range;

typedef struct {
    const spk_pack       *pack;      /* NULL: bytes are plain memory, without a file and without checksums */
    const spk_load_range *ranges;
    uint32_t              range_count;
    const spk_transfer   *transfer;  /* has spk_load_slot_count slots */
    void                (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes);   /* may be NULL */
    void                 *progress_context;
} spk_load_job;

/* Move all ranges, every chunk of a pack checked against its checksum; returns when all is on the device.  Threads take
 * pieces in order; the error is that of the first piece that has one, whatever the number of threads, and is for a bad
 * chunk that of spk_pack_verify.  The pages of a pack's mapping are left unmapped.
 * progress is called by the caller's thread, with rising numbers.  way_bytes (may be NULL) says how the bytes went. */
SPK_MUST_CHECK spk_status spk_load_run(const spk_load_job *job, const spk_load_plan *plan,
                                       uint64_t way_bytes[SPK_LOAD_WAY_COUNT], spk_error *err);

#endif
