/* formats/spk_verify.c - checks the weights of an open pack against their digests (R23, R24).
 *
 * Everything else was checked when the pack was opened.  Reads the whole file once, chunk by chunk on any number of
 * threads; what it reports does not depend on their number: it is the first bad chunk of the file.
 */
#include "formats/spk_internal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "formats/pool.h"

/* Chunks that a thread gets between two calls of progress: some hundred milliseconds of work. */
enum { BATCH_CHUNKS_PER_THREAD = 16 };

typedef struct {
    const spk_pack         *pack;
    const spk_disk_section *section;
    uint64_t                batch_begin;     /* chunk index of item 0 */
    _Atomic uint64_t        first_bad;       /* chunk index; UINT64_MAX: none */
} verify_job;

static uint64_t chunk_bytes_at(const spk_disk_section *s, uint64_t chunk) {
    uint64_t left = s->stored_bytes - chunk * SPK_CHUNK_BYTES;
    return left < SPK_CHUNK_BYTES ? left : SPK_CHUNK_BYTES;
}

static bool chunk_matches(const spk_pack *pack, const spk_disk_section *s, uint64_t chunk, const void *bytes) {
    spk_digest digest = spk_digest_of(bytes, chunk_bytes_at(s, chunk));
    return memcmp(&digest, &pack->digests[spk_chunk_first(&pack->header, s) + chunk], sizeof digest) == 0;
}

static void verify_chunks(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    (void)thread_index;
    verify_job *job = context;
    for (uint64_t i = begin; i < end; i++) {
        uint64_t chunk = job->batch_begin + i;
        const uint8_t *bytes = job->pack->map + job->section->offset_bytes + chunk * SPK_CHUNK_BYTES;
        if (chunk_matches(job->pack, job->section, chunk, bytes)) continue;
        uint64_t seen = atomic_load(&job->first_bad);
        while (chunk < seen && !atomic_compare_exchange_weak(&job->first_bad, &seen, chunk)) {}
    }
}

/* The first byte of a tensor at or after `from`, both in the section; UINT64_MAX if there is none. */
static uint64_t first_byte_from(const spk_tensor *t, uint64_t from) {
    if (from <= t->offset_bytes) return t->offset_bytes;
    spk_tensor_extent e = spk_tensor_extent_of(t);
    uint64_t at = from - t->offset_bytes;
    uint64_t matrix = e.matrix_count > 1 ? at / t->matrix_stride_bytes : 0;
    if (matrix >= e.matrix_count) return UINT64_MAX;
    uint64_t matrix_start = t->offset_bytes + matrix * t->matrix_stride_bytes;
    uint64_t unit = (from - matrix_start) / t->unit_stride_bytes;
    if (unit < e.unit_count && from - matrix_start - unit * t->unit_stride_bytes < e.unit_bytes) return from;
    if (unit + 1 < e.unit_count) return matrix_start + (unit + 1) * t->unit_stride_bytes;
    return matrix + 1 < e.matrix_count ? matrix_start + t->matrix_stride_bytes : UINT64_MAX;
}

static const spk_tensor *first_tensor_in(const spk_pack *pack, uint32_t place, uint64_t begin, uint64_t end) {
    const spk_tensor *first = NULL;
    uint64_t first_byte = end;
    for (uint64_t i = 0; i < pack->tensor_count; i++) {
        if (pack->tensors[i].section != place) continue;
        uint64_t byte = first_byte_from(&pack->tensors[i], begin);
        if (byte < first_byte) {
            first_byte = byte;
            first = &pack->tensors[i];
        }
    }
    return first;
}

static spk_status fail_at(const spk_pack *pack, const spk_disk_section *s, uint64_t chunk, spk_error *err) {
    uint64_t begin = chunk * SPK_CHUNK_BYTES, size_bytes = chunk_bytes_at(s, chunk);
    const spk_tensor *tensor = first_tensor_in(pack, s->id, begin, begin + size_bytes);
    return spk_fail(err, SPK_E_CHECKSUM,
                    "%s: R23: chunk %" PRIu64 " of section %s (%" PRIu64 " bytes at file offset %" PRIu64
                    ") does not match its digest; first tensor in it: %s", pack->path, chunk,
                    spk_section_name(s->id), size_bytes, s->offset_bytes + begin,
                    tensor != NULL ? tensor->name : "none, it is padding");
}

spk_status spk_pack_verify_chunk(const spk_pack *pack, uint32_t place, uint64_t chunk_index, const void *bytes,
                                 spk_error *err) {
    const spk_disk_section *s = spk_section_find(&pack->header, place);
    assert(spk_section_is_data(place) && s != NULL && chunk_index < s->item_count);
    return chunk_matches(pack, s, chunk_index, bytes) ? SPK_OK : fail_at(pack, s, chunk_index, err);
}

typedef struct {
    void   (*show)(void *context, uint64_t done_bytes, uint64_t total_bytes);
    void    *context;
    uint64_t done_bytes, total_bytes;
} verify_progress;

static void advance(verify_progress *progress, uint64_t size_bytes) {
    progress->done_bytes += size_bytes;
    if (progress->show != NULL) progress->show(progress->context, progress->done_bytes, progress->total_bytes);
}

static spk_status verify_data(spk_pool *pool, verify_job *job, verify_progress *progress, spk_error *err) {
    uint64_t batch = (uint64_t)spk_pool_thread_count(pool) * BATCH_CHUNKS_PER_THREAD;
    for (uint64_t begin = 0; begin < job->section->item_count; begin += batch) {
        uint64_t left = job->section->item_count - begin, count = left < batch ? left : batch;
        job->batch_begin = begin;
        spk_pool_run(pool, count, 1, verify_chunks, job);
        uint64_t bad = atomic_load(&job->first_bad);
        if (bad != UINT64_MAX) return fail_at(job->pack, job->section, bad, err);
        advance(progress, (count - 1) * SPK_CHUNK_BYTES + chunk_bytes_at(job->section, begin + count - 1));
    }
    return SPK_OK;
}

/* R24: sections of ids that this version does not know have one digest for all their bytes. */
static spk_status verify_unknown(const spk_pack *pack, const spk_disk_section *s, verify_progress *progress,
                                 spk_error *err) {
    spk_digest digest = spk_digest_of(pack->map + s->offset_bytes, s->stored_bytes);
    if (memcmp(&digest, &s->digest, sizeof digest) != 0)
        return spk_fail(err, SPK_E_CHECKSUM,
                        "%s: R24: section id %" PRIu32 " (%" PRIu64 " bytes at file offset %" PRIu64
                        ") does not match its digest", pack->path, s->id, s->stored_bytes, s->offset_bytes);
    advance(progress, s->stored_bytes);
    return SPK_OK;
}

spk_status spk_pack_verify(const spk_pack *pack, uint32_t thread_count,
                           void (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes), void *context,
                           spk_error *err) {
    const spk_disk_header *h = &pack->header;
    verify_progress state = { .show = progress, .context = context };
    for (uint32_t i = 0; i < h->section_count; i++)
        if (spk_section_is_data(h->sections[i].id) || !spk_section_is_known(h->sections[i].id))
            state.total_bytes += h->sections[i].stored_bytes;
    spk_pool *pool;
    SPK_TRY(spk_pool_create(thread_count, &pool, err));
    spk_status status = SPK_OK;
    for (uint32_t i = 0; i < h->section_count && status == SPK_OK; i++) {
        const spk_disk_section *s = &h->sections[i];
        if (!spk_section_is_known(s->id)) {
            status = verify_unknown(pack, s, &state, err);
        } else if (spk_section_is_data(s->id)) {
            verify_job job = { .pack = pack, .section = s, .first_bad = UINT64_MAX };
            status = verify_data(pool, &job, &state, err);
        }
    }
    spk_pool_destroy(pool);
    return status;
}
