/* requant/pipeline.c - runs on worker threads, written in order; each file's digest on a thread of its own.
 *
 * Workers take runs in a fixed order and fill a ring of buffers; the caller's thread appends them to the pack in that order.
 * So the file, the error sums and the error that is reported do not depend on the number of threads.  Sections take turns,
 * each as far as the others: what is searched for keeps the processors busy while what is only copied keeps the disk busy.
 *
 * A digest needs every byte of a file in file order, which is not the order of runs.  Its thread reads a little ahead of
 * what the workers have passed, so that it also warms the page cache for them, and no further, so that it does not push
 * out what they still need.
 */
#include "requant/convert_internal.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

#include "formats/pool.h"

#define RING_BYTES_MAX (UINT64_C(128) << 20)       /* of buffers in flight, where two runs fit into it */
#define DIGEST_CHUNK_BYTES (UINT64_C(1) << 20)
#define DIGEST_AHEAD_BYTES (UINT64_C(256) << 20)

typedef struct {
    uint8_t        *buffer;            /* a run begins in its first block, where it begins in a block of the pack */
    spk_quant_error errors[SPK_RUN_PIECE_MAX];
    spk_status      status;
    spk_error       error;
    bool            is_filled;
} ring_slot;

typedef struct pipeline pipeline;

/* The digest of the source, or of the file of better weights. */
typedef struct {
    pipeline       *pipe;
    const spk_gguf *file;
    uint64_t        passed_bytes;      /* by the workers; UINT64_MAX once all runs are written; guarded by the lock */
    pthread_t       thread;
    spk_digest      digest;
    spk_status      status;
    spk_error       error;
} digest_task;

struct pipeline {
    const spk_convert_job *job;
    digest_task            digests[SPK_CONVERT_FILE_COUNT];
    uint32_t               digest_count;
    pthread_mutex_t        lock;       /* guards everything below */
    pthread_cond_t         changed;
    const spk_run        **order;      /* [job->run_count] the runs as they are made and written */
    ring_slot             *slots;      /* run r of the order uses slot r % slot_count */
    uint64_t               slot_count;
    uint64_t               taken_count, written_count;   /* runs */
    bool                   is_stopping;
};

typedef struct {
    pipeline           *pipe;
    pthread_t           thread;
    spk_convert_scratch scratch;
} worker;

static uint8_t *run_bytes(const ring_slot *slot, const spk_run *run) { return slot->buffer + run->offset_bytes % SPK_BLOCK_ALIGN; }

static void *work(void *context) {
    worker *self = context;
    pipeline *pipe = self->pipe;
    const spk_convert_job *job = pipe->job;
    pthread_mutex_lock(&pipe->lock);
    for (;;) {
        while (!pipe->is_stopping && pipe->taken_count < job->run_count &&
               pipe->taken_count - pipe->written_count >= pipe->slot_count)
            pthread_cond_wait(&pipe->changed, &pipe->lock);
        if (pipe->is_stopping || pipe->taken_count == job->run_count) break;
        const spk_run *run = pipe->order[pipe->taken_count];
        ring_slot *slot = &pipe->slots[pipe->taken_count++ % pipe->slot_count];
        pthread_mutex_unlock(&pipe->lock);
        uint64_t passed_bytes[SPK_CONVERT_FILE_COUNT];
        slot->status = spk_convert_fill(job, run, &self->scratch, run_bytes(slot, run), slot->errors, passed_bytes,
                                        &slot->error);
        pthread_mutex_lock(&pipe->lock);
        slot->is_filled = true;
        for (uint32_t d = 0; d < pipe->digest_count; d++) pipe->digests[d].passed_bytes += passed_bytes[d];
        pthread_cond_broadcast(&pipe->changed);
    }
    pthread_mutex_unlock(&pipe->lock);
    return NULL;
}

/* False when the conversion has failed and the digest is no longer wanted. */
static bool wait_for_workers(const digest_task *task, uint64_t hashed_bytes) {
    pipeline *pipe = task->pipe;
    pthread_mutex_lock(&pipe->lock);
    while (!pipe->is_stopping && hashed_bytes > DIGEST_AHEAD_BYTES &&
           hashed_bytes - DIGEST_AHEAD_BYTES > task->passed_bytes)
        pthread_cond_wait(&pipe->changed, &pipe->lock);
    bool is_stopping = pipe->is_stopping;
    pthread_mutex_unlock(&pipe->lock);
    return !is_stopping;
}

static spk_status digest_parts(digest_task *task, spk_digester *digester, uint8_t *chunk, spk_error *err) {
    uint64_t hashed_bytes = 0;
    for (uint32_t part = 0; part < spk_gguf_part_count(task->file); part++) {
        uint64_t size = spk_gguf_part_bytes(task->file, part);
        for (uint64_t at = 0; at < size;) {
            uint64_t count = size - at < DIGEST_CHUNK_BYTES ? size - at : DIGEST_CHUNK_BYTES;
            if (!wait_for_workers(task, hashed_bytes)) return SPK_OK;
            const uint8_t *bytes;
            SPK_TRY(spk_gguf_view(task->file, part, at, count, chunk, &bytes, err));
            spk_digester_add(digester, bytes, count);
            spk_gguf_forget(task->file, part, at, count);
            at += count;
            hashed_bytes += count;
        }
    }
    return SPK_OK;
}

static void *digest_file(void *context) {
    digest_task *task = context;
    spk_digester *digester = NULL;
    uint8_t *chunk = malloc(DIGEST_CHUNK_BYTES);
    task->status = chunk == NULL ? spk_fail(&task->error, SPK_E_MEMORY, "out of memory for a digest")
                                 : spk_digester_create(&digester, &task->error);
    if (task->status == SPK_OK) task->status = digest_parts(task, digester, chunk, &task->error);
    if (task->status == SPK_OK) task->digest = spk_digester_result(digester);
    free(chunk);
    spk_digester_destroy(digester);
    return NULL;
}

void spk_convert_scratch_free(spk_convert_scratch *scratch) {
    free(scratch->rows);
    free(scratch->source);
    if (scratch->queue == NULL) free(scratch->weights);
    spk_quant_queue_close(scratch->queue);
    free(scratch->decoded);
}

bool spk_convert_scratch_alloc(const spk_convert_job *job, spk_convert_scratch *scratch) {
    scratch->rows = malloc(job->piece_bytes_max + 1);
    scratch->source = malloc(job->stretch_weights_max * sizeof(float)); /* no type is wider than F32 */
    scratch->weights = malloc(job->stretch_weights_max * sizeof(float));
    scratch->decoded = malloc(job->stretch_weights_max * sizeof(float));
    return scratch->rows && scratch->source && scratch->weights && scratch->decoded;
}

spk_status spk_convert_scratch_use_gpu(const spk_convert_job *job, spk_convert_scratch *scratch, spk_error *err) {
    SPK_TRY(spk_quant_queue_open(job->stretch_weights_max, &scratch->queue, err));
    free(scratch->weights);
    scratch->weights = spk_quant_queue_weights(scratch->queue);
    return SPK_OK;
}

/* Each section's runs in their order; the sections in turns, unless the writer wants them one after the other. */
static void order_runs(pipeline *pipe, const spk_pack_writer *writer) {
    const spk_convert_job *job = pipe->job;
    const uint64_t *section_bytes = job->plan->section_bytes;
    uint64_t next[SPK_PLACE_COUNT] = { 0 };
    double done_bytes[SPK_PLACE_COUNT] = { 0 };
    bool takes_turns = spk_pack_writer_takes_turns(writer);
    for (uint64_t r = job->run_count; r-- > 0;) next[job->runs[r].section - 1] = r;
    for (uint64_t r = 0; r < job->run_count; r++) {
        uint32_t least = SPK_PLACE_COUNT;
        for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) {
            bool has_runs = next[p] < job->run_count && job->runs[next[p]].section == p + 1;
            if (has_runs && (least == SPK_PLACE_COUNT ||
                             (takes_turns && done_bytes[p] * (double)section_bytes[least] < done_bytes[least] * (double)section_bytes[p])))
                least = p;
        }
        pipe->order[r] = &job->runs[next[least]++];
        done_bytes[least] += (double)pipe->order[r]->size_bytes;
    }
}

/* The runs that a killed run of this conversion had written, before the threads start: in each section up to the first that is not whole.
 * They come first in the order then. */
static spk_status replay_runs(pipeline *pipe, spk_pack_writer *writer, spk_quant_error *errors, spk_error *err) {
    const spk_convert_job *job = pipe->job;
    SPK_STATIC_ASSERT(sizeof(spk_quant_error) * SPK_RUN_PIECE_MAX <= SPK_NOTE_BYTES_MAX, "the error sums are the note");
    if (!job->options->resume) return SPK_OK;
    const spk_run **rest = malloc((job->run_count + 1) * sizeof *rest);
    if (rest == NULL) return spk_convert_out_of_memory(job->options->source, err);
    bool is_over[SPK_PLACE_COUNT] = { false };
    uint64_t rest_count = 0;
    spk_status status = SPK_OK;
    for (uint64_t r = 0; r < job->run_count && status == SPK_OK; r++) {
        const spk_run *run = pipe->order[r];
        spk_quant_error sums[SPK_RUN_PIECE_MAX];
        bool is_there = false;
        if (!is_over[run->section - 1])
            status = spk_pack_writer_replay(writer, run->section, run->size_bytes, sums, sizeof sums, &is_there, err);
        if (!is_there) {
            is_over[run->section - 1] = true;
            rest[rest_count++] = run;
            continue;
        }
        for (uint32_t p = 0; p < run->piece_count; p++)
            spk_quant_error_merge(&errors[run->pieces[p].tensor_index], &sums[p]);
        pipe->order[pipe->written_count++] = run;
    }
    pipe->taken_count = pipe->written_count;
    for (uint64_t r = 0; r < rest_count && status == SPK_OK; r++) pipe->order[pipe->written_count + r] = rest[r];
    free(rest);
    return status;
}

/* Takes filled runs in order until all are written or one has failed. */
static spk_status write_runs(pipeline *pipe, spk_pack_writer *writer, spk_quant_error *errors, spk_error *err) {
    const spk_convert_job *job = pipe->job;
    uint64_t done_bytes = 0, total_bytes = 0;
    for (uint64_t r = 0; r < job->run_count; r++) total_bytes += job->runs[r].size_bytes;
    for (uint64_t r = 0; r < pipe->written_count; r++) done_bytes += pipe->order[r]->size_bytes;    /* replayed */
    for (uint64_t r = pipe->written_count; r < job->run_count; r++) {
        ring_slot *slot = &pipe->slots[r % pipe->slot_count];
        pthread_mutex_lock(&pipe->lock);
        while (!slot->is_filled) pthread_cond_wait(&pipe->changed, &pipe->lock);
        pthread_mutex_unlock(&pipe->lock);
        if (slot->status != SPK_OK) {
            if (err != NULL) *err = slot->error;
            return slot->status;
        }
        const spk_run *run = pipe->order[r];
        SPK_TRY(spk_pack_writer_append_to(writer, run->section, run_bytes(slot, run), run->size_bytes, err));
        spk_pack_writer_note(writer, slot->errors, sizeof slot->errors);
        for (uint32_t p = 0; p < run->piece_count; p++)
            spk_quant_error_merge(&errors[run->pieces[p].tensor_index], &slot->errors[p]);
        pthread_mutex_lock(&pipe->lock);
        slot->is_filled = false;
        pipe->written_count++;
        pthread_cond_broadcast(&pipe->changed);
        pthread_mutex_unlock(&pipe->lock);
        done_bytes += run->size_bytes;
        if (job->options->progress != NULL)
            job->options->progress(job->options->progress_context, done_bytes, total_bytes);
    }
    return SPK_OK;
}

/* Starts the threads, writes, and joins them whatever happened. */
static spk_status run_threads(pipeline *pipe, worker *workers, uint32_t worker_count, spk_pack_writer *writer,
                              spk_quant_error *errors, spk_error *err) {
    uint32_t digesting = 0, started = 0;
    while (digesting < pipe->digest_count &&
           pthread_create(&pipe->digests[digesting].thread, NULL, digest_file, &pipe->digests[digesting]) == 0)
        digesting++;
    while (digesting == pipe->digest_count && started < worker_count &&
           pthread_create(&workers[started].thread, NULL, work, &workers[started]) == 0)
        started++;
    spk_status status = started < worker_count
        ? spk_fail(err, SPK_E_MEMORY, "cannot start %u threads", worker_count + pipe->digest_count)
        : write_runs(pipe, writer, errors, err);
    pthread_mutex_lock(&pipe->lock);
    for (uint32_t d = 0; d < pipe->digest_count && status == SPK_OK; d++) pipe->digests[d].passed_bytes = UINT64_MAX;
    if (status != SPK_OK) pipe->is_stopping = true;
    pthread_cond_broadcast(&pipe->changed);
    pthread_mutex_unlock(&pipe->lock);
    for (uint32_t w = 0; w < started; w++) pthread_join(workers[w].thread, NULL);
    for (uint32_t d = 0; d < digesting; d++) {
        const digest_task *task = &pipe->digests[d];
        pthread_join(task->thread, NULL);
        if (status != SPK_OK || task->status == SPK_OK) continue;
        if (err != NULL) *err = task->error;
        status = task->status;
    }
    return status;
}

spk_status spk_convert_pipeline(const spk_convert_job *job, spk_pack_writer *writer, spk_quant_error *errors,
                                spk_digest digests[SPK_CONVERT_FILE_COUNT], spk_error *err) {
    uint32_t worker_count = job->options->thread_count != 0 ? job->options->thread_count : spk_cpu_count();
    if (worker_count > SPK_POOL_THREAD_MAX) worker_count = SPK_POOL_THREAD_MAX;
    uint64_t slot_count = 2 * (uint64_t)worker_count + 2, fitting = RING_BYTES_MAX / (job->run_bytes_max + 1);
    if (slot_count > fitting) slot_count = fitting < 2 ? 2 : fitting;
    if (worker_count > slot_count) worker_count = (uint32_t)slot_count;

    pipeline pipe = { .job = job, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER,
                      .order = malloc((job->run_count + 1) * sizeof *pipe.order), .slots = calloc(slot_count, sizeof(ring_slot)), .slot_count = slot_count,
                      .digest_count = job->plan->fitted_count > 0 ? SPK_CONVERT_FILE_COUNT : 1 };
    pipe.digests[SPK_CONVERT_SOURCE].file = job->options->source;
    pipe.digests[SPK_CONVERT_WEIGHTS].file = job->options->weights;
    for (uint32_t d = 0; d < pipe.digest_count; d++) pipe.digests[d].pipe = &pipe;
    worker *workers = calloc(worker_count, sizeof *workers);
    bool has_memory = pipe.order != NULL && pipe.slots != NULL && workers != NULL;
    uint64_t buffer_bytes = (job->run_bytes_max / SPK_BLOCK_ALIGN + 2) * SPK_BLOCK_ALIGN;
    for (uint64_t s = 0; s < slot_count && has_memory; s++)
        has_memory = (pipe.slots[s].buffer = aligned_alloc(SPK_BLOCK_ALIGN, buffer_bytes)) != NULL;
    if (has_memory) order_runs(&pipe, writer);
    for (uint32_t w = 0; w < worker_count && has_memory; w++) {
        workers[w].pipe = &pipe;
        has_memory = spk_convert_scratch_alloc(job, &workers[w].scratch);
    }
    spk_status status = has_memory
        ? replay_runs(&pipe, writer, errors, err)
        : spk_fail(err, SPK_E_MEMORY, "out of memory for %" PRIu64 " buffers of %" PRIu64 " bytes", slot_count,
                   job->run_bytes_max);
    for (uint32_t w = 0; w < worker_count && status == SPK_OK && job->options->on_gpu; w++)
        status = spk_convert_scratch_use_gpu(job, &workers[w].scratch, err);
    if (status == SPK_OK) status = run_threads(&pipe, workers, worker_count, writer, errors, err);
    for (uint32_t d = 0; d < pipe.digest_count && status == SPK_OK; d++) digests[d] = pipe.digests[d].digest;
    for (uint64_t s = 0; s < slot_count && pipe.slots != NULL; s++) free(pipe.slots[s].buffer);
    for (uint32_t w = 0; w < worker_count && workers != NULL; w++) spk_convert_scratch_free(&workers[w].scratch);
    free(pipe.order);
    free(pipe.slots);
    free(workers);
    pthread_cond_destroy(&pipe.changed);
    pthread_mutex_destroy(&pipe.lock);
    return status;
}
