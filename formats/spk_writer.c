/* formats/spk_writer.c - writes a pack in one pass: CONFIG, META, the data as it comes, the directory, the header last.
 *
 * Until the header is written and the file renamed there is no pack, so a run that dies leaves nothing that could be
 * taken for one.  Equal arguments give equal bytes: nothing here depends on time, names of machines or threads, and
 * every byte that carries nothing is zero.
 */
#include "formats/spk_internal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "formats/outfile.h"
#include "formats/spk_journal_internal.h"

/* 9 MB of tokenizer take 0.1 s at level 3; higher levels win a few hundred kB of a pack of gigabytes. */
enum { META_ZSTD_LEVEL = 3 };
/* What PROVENANCE takes at least: its texts come at the end, so asking whether the disk has room cannot count more. */
enum { PROVENANCE_BYTES_MIN = SPK_BLOCK_ALIGN };

struct spk_pack_writer {
    spk_outfile    *file;
    char           *path;
    spk_disk_header header;              /* sections are added in the order of the file */
    uint64_t        tensor_count;
    uint64_t        section_bytes[SPK_PLACE_COUNT];
    uint32_t        expert_count;
    uint64_t        offset_bytes;        /* where the next section, or chunk of data, goes */
    uint32_t        place_index;         /* data section that is being filled */
    uint64_t        place_done_bytes;    /* whole chunks of it */
    uint8_t        *chunk;               /* gathers pieces that are smaller than a chunk */
    uint64_t        chunk_fill_bytes;
    spk_digest     *digests;
    uint64_t        digest_count, digest_done_count;
    uint64_t        data_offset_bytes;   /* where the data begin in the file */
    spk_journal     journal;
    uint64_t        kept_bytes;          /* of data: whole chunks that an earlier run left, compared with their digests */
    uint64_t        replay_index;        /* of the next record of that run; 0: nothing (more) of it is taken over */
};

static void free_writer(spk_pack_writer *writer) {
    spk_outfile_abort(writer->file);
    free(writer->path);
    free(writer->chunk);
    free(writer->digests);
    free(writer);
}

static uint64_t round_up(uint64_t bytes) { return (bytes + SPK_BLOCK_ALIGN - 1) / SPK_BLOCK_ALIGN * SPK_BLOCK_ALIGN; }

/* ---- Sections ---- */

static void add_entry(spk_pack_writer *writer, spk_disk_section entry) {
    assert(writer->header.section_count < SPK_SECTION_COUNT_MAX);
    entry.offset_bytes = writer->offset_bytes;
    writer->header.sections[writer->header.section_count++] = entry;
    writer->offset_bytes += round_up(entry.stored_bytes);
}

/* Where the disk is full, the journal's blocks are given back, and it is tried again without one.  What the pack has lies in front of
 * here by then, but for the header. */
static spk_status write_bytes(spk_pack_writer *writer, uint64_t offset_bytes, const void *bytes, uint64_t size_bytes, spk_error *err) {
    spk_status status = spk_outfile_write(writer->file, offset_bytes, bytes, size_bytes, err);
    if (status != SPK_E_SPACE || writer->journal.base_bytes == 0) return status;
    writer->journal = (spk_journal){ .file = NULL };
    uint64_t end_bytes = offset_bytes > writer->offset_bytes ? offset_bytes : writer->offset_bytes;
    if (spk_outfile_cut(writer->file, end_bytes, NULL) != SPK_OK) return status;
    return spk_outfile_write(writer->file, offset_bytes, bytes, size_bytes, err);
}

/* A metadata section: its bytes, its padding, its table entry. */
static spk_status put_section(spk_pack_writer *writer, spk_disk_section entry, const void *bytes, spk_error *err) {
    static const uint8_t zeros[SPK_BLOCK_ALIGN];
    uint64_t stored = entry.stored_bytes;
    SPK_TRY(write_bytes(writer, writer->offset_bytes, bytes, stored, err));
    SPK_TRY(write_bytes(writer, writer->offset_bytes + stored, zeros, round_up(stored) - stored, err));
    entry.digest = spk_digest_of(bytes, stored);
    add_entry(writer, entry);
    return SPK_OK;
}

static spk_status put_config(spk_pack_writer *writer, const spk_model_config *config, spk_error *err) {
    return put_section(writer, (spk_disk_section){ .id = SPK_SECTION_CONFIG, .stored_bytes = sizeof *config,
                                                   .raw_bytes = sizeof *config, .item_count = 1 }, config, err);
}

/* The entries must parse: a pack that its own reader refuses is not written (R10, R14). */
static spk_status check_meta(const spk_pack_writer_options *o, spk_error *err) {
    if (o->kv_bytes_size > SPK_META_BYTES_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: R10: %" PRIu64 " bytes of metadata, expected at most %" PRIu64, o->path,
                        o->kv_bytes_size, SPK_META_BYTES_MAX);
    spk_kv_set kvs = { 0 };
    uint64_t used = 0;
    SPK_TRY(spk_fail_in(o->path, spk_kv_parse(o->kv_bytes, o->kv_bytes_size, o->kv_count, "R14: META", &kvs, &used, err), err));
    spk_kv_free(&kvs);
    if (used != o->kv_bytes_size)
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: R14: %" PRIu64 " metadata entries take %" PRIu64 " of %" PRIu64 " bytes",
                        o->path, o->kv_count, used, o->kv_bytes_size);
    return SPK_OK;
}

/* The packed metadata, freed by the caller.  One thread and a fixed level, so that the bytes are always the same. */
static spk_status compress_meta(const spk_pack_writer_options *o, void **out, size_t *out_size, spk_error *err) {
    SPK_TRY(check_meta(o, err));
    size_t room = ZSTD_compressBound(o->kv_bytes_size);
    void *packed = malloc(room);
    if (packed == NULL) return spk_fail(err, SPK_E_MEMORY,
                                        "%s: out of memory for %zu bytes of metadata", o->path, room);
    size_t size = ZSTD_compress(packed, room, o->kv_bytes, o->kv_bytes_size, META_ZSTD_LEVEL);
    if (ZSTD_isError(size)) {
        free(packed);
        return spk_fail(err, SPK_E_MEMORY, "%s: packing the metadata: %s", o->path, ZSTD_getErrorName(size));
    }
    *out = packed;
    *out_size = size;
    return SPK_OK;
}

/* The data sections lie one after another; their digests come with the data. */
static void add_data_entries(spk_pack_writer *writer) {
    uint64_t data_offset = writer->data_offset_bytes = writer->offset_bytes;
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) {
        uint64_t bytes = writer->section_bytes[p];
        if (bytes != 0)
            add_entry(writer, (spk_disk_section){ .id = p + 1, .stored_bytes = bytes, .raw_bytes = bytes,
                                                  .item_count = spk_chunk_count(bytes) });
    }
    writer->offset_bytes = data_offset;
}

/* ---- Begin ---- */

/* No pack that fits is refused beforehand; one that turns out not to fit is when it is written. */
static uint64_t least_bytes_of(const spk_pack_writer *writer, size_t meta_bytes) {
    uint64_t total = SPK_HEADER_BYTES + round_up(sizeof(spk_model_config)) + round_up(meta_bytes) +
                     round_up(writer->tensor_count * sizeof(spk_disk_tensor)) + PROVENANCE_BYTES_MIN +
                     round_up(writer->digest_count * sizeof(spk_digest));
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) total += writer->section_bytes[p];
    return total;
}

/* Chunks are read again and compared, in order, up to the first that is not there or not whole. */
static uint64_t count_kept_bytes(spk_pack_writer *writer) {
    spk_journal_record record;
    uint64_t kept_bytes = 0;
    for (uint64_t i = 1; spk_journal_get(&writer->journal, i, &record); i++) {
        if (record.kind != SPK_JOURNAL_CHUNK) continue;
        uint64_t size = record.end_bytes - kept_bytes;
        if (record.end_bytes < kept_bytes || size > SPK_CHUNK_BYTES ||
            spk_outfile_read(writer->file, writer->data_offset_bytes + kept_bytes, writer->chunk, size, NULL) != SPK_OK)
            break;
        spk_digest digest = spk_digest_of(writer->chunk, size);
        if (memcmp(&digest, &record.digest, sizeof digest) != 0) break;
        kept_bytes = record.end_bytes;
    }
    return kept_bytes;
}

/* Past the end of all that the pack can take; a multiple of the record's size. */
static void begin_journal(spk_pack_writer *writer, const spk_pack_writer_options *o, uint64_t base_bytes) {
    spk_journal_record job = { .kind = SPK_JOURNAL_JOB, .digest = *o->job }, left;
    writer->journal = (spk_journal){ .file = writer->file, .base_bytes = round_up(base_bytes), .job = *o->job };
    if (o->resume && spk_journal_get(&writer->journal, 0, &left) && left.kind == SPK_JOURNAL_JOB &&
        memcmp(&left.digest, &job.digest, sizeof job.digest) == 0) {
        writer->kept_bytes = count_kept_bytes(writer);
        writer->replay_index = 1;
    }
    spk_journal_put(&writer->journal, job);
}

static spk_status begin_file(spk_pack_writer *writer, const spk_pack_writer_options *o, const void *meta,
                             size_t meta_bytes, spk_error *err) {
    uint64_t least_bytes = least_bytes_of(writer, meta_bytes);
    if (writer->file != NULL) SPK_TRY(spk_outfile_expect(writer->file, least_bytes, err));
    else SPK_TRY(o->resume ? spk_outfile_reopen(o->path, o->replace, least_bytes, &writer->file, err)
                           : spk_outfile_create(o->path, o->replace, least_bytes, &writer->file, err));
    SPK_TRY(put_config(writer, o->config, err));
    spk_disk_section entry = { .id = SPK_SECTION_META, .stored_bytes = meta_bytes, .raw_bytes = o->kv_bytes_size,
                               .item_count = o->kv_count };
    SPK_TRY(put_section(writer, entry, meta, err));
    add_data_entries(writer);
    if (o->job != NULL && spk_outfile_has_holes(writer->file)) begin_journal(writer, o, least_bytes + SPK_PROVENANCE_BYTES_MAX);
    return SPK_OK;
}

spk_status spk_pack_writer_begin(const spk_pack_writer_options *options, spk_pack_writer **out, spk_error *err) {
    spk_pack_writer *writer = calloc(1, sizeof *writer);
    if (writer == NULL) {
        spk_outfile_abort(options->file);
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", options->path);
    }
    writer->file = options->file;
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) {
        assert(options->section_bytes[p] % SPK_BLOCK_ALIGN == 0);
        writer->section_bytes[p] = options->section_bytes[p];
        writer->digest_count += spk_chunk_count(options->section_bytes[p]);
    }
    writer->tensor_count = options->tensor_count;
    writer->expert_count = options->config->expert_count;
    writer->offset_bytes = SPK_HEADER_BYTES;
    writer->header.version_major = SPK_VERSION_MAJOR;
    writer->header.version_minor = SPK_VERSION_MINOR;
    memcpy(writer->header.magic, SPK_MAGIC, SPK_MAGIC_BYTES);
    writer->path = strdup(options->path);
    writer->chunk = aligned_alloc(SPK_BLOCK_ALIGN, SPK_CHUNK_BYTES);   /* so that outfile can go past the page cache */
    writer->digests = malloc((writer->digest_count + 1) * sizeof *writer->digests);
    void *meta = NULL;
    size_t meta_bytes = 0;
    spk_status status = SPK_OK;
    if (writer->path == NULL || writer->chunk == NULL || writer->digests == NULL)
        status = spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " digests", options->path,
                          writer->digest_count);
    if (status == SPK_OK)
        status = spk_rules_config(options->config, options->section_bytes[SPK_PLACE_EXPERTS - 1] != 0, options->path,
                                  err);
    if (status == SPK_OK) status = compress_meta(options, &meta, &meta_bytes, err);
    if (status == SPK_OK) status = begin_file(writer, options, meta, meta_bytes, err);
    free(meta);
    if (status == SPK_OK)
        *out = writer;
    else
        free_writer(writer);
    return status;
}

/* ---- Data ---- */

static spk_status put_chunk(spk_pack_writer *writer, const void *bytes, uint64_t size_bytes, spk_error *err) {
    spk_digest digest = spk_digest_of(bytes, size_bytes);
    uint64_t end_bytes = writer->offset_bytes + size_bytes - writer->data_offset_bytes;
    if (end_bytes > writer->kept_bytes)
        SPK_TRY(write_bytes(writer, writer->offset_bytes, bytes, size_bytes, err));
    spk_journal_put(&writer->journal, (spk_journal_record){ .kind = SPK_JOURNAL_CHUNK, .end_bytes = end_bytes,
                                                            .digest = digest });
    writer->digests[writer->digest_done_count++] = digest;
    writer->offset_bytes += size_bytes;
    writer->place_done_bytes += size_bytes;
    writer->chunk_fill_bytes = 0;
    return SPK_OK;
}

/* Bytes of the chunk that is being filled; 0 when all sections are full. */
static uint64_t current_chunk_bytes(spk_pack_writer *writer) {
    while (writer->place_index < SPK_PLACE_COUNT &&
           writer->place_done_bytes == writer->section_bytes[writer->place_index]) {
        writer->place_index++;
        writer->place_done_bytes = 0;
    }
    if (writer->place_index == SPK_PLACE_COUNT) return 0;
    uint64_t left = writer->section_bytes[writer->place_index] - writer->place_done_bytes;
    return left < SPK_CHUNK_BYTES ? left : SPK_CHUNK_BYTES;
}

spk_status spk_pack_writer_append(spk_pack_writer *writer, const void *bytes, uint64_t size_bytes, spk_error *err) {
    const uint8_t *next = bytes;
    while (size_bytes > 0) {
        uint64_t chunk_bytes = current_chunk_bytes(writer);
        if (chunk_bytes == 0)
            return spk_fail(err, SPK_E_MISMATCH,
                            "%s: %" PRIu64 " bytes of data more than the sections take", writer->path,
                            size_bytes);
        uint64_t take = chunk_bytes - writer->chunk_fill_bytes;
        if (take > size_bytes) take = size_bytes;
        if (take == chunk_bytes && (uintptr_t)next % SPK_BLOCK_ALIGN == 0) {
            SPK_TRY(put_chunk(writer, next, chunk_bytes, err));      /* straight from the caller */
        } else {
            memcpy(writer->chunk + writer->chunk_fill_bytes, next, take);
            writer->chunk_fill_bytes += take;
            if (writer->chunk_fill_bytes == chunk_bytes) SPK_TRY(put_chunk(writer, writer->chunk, chunk_bytes, err));
        }
        next += take;
        size_bytes -= take;
    }
    return SPK_OK;
}

/* ---- Going on where a run was killed ---- */

/* Data appended so far. */
static uint64_t appended_bytes(const spk_pack_writer *writer) {
    return writer->offset_bytes - writer->data_offset_bytes + writer->chunk_fill_bytes;
}

void spk_pack_writer_note(spk_pack_writer *writer, const void *note, uint32_t note_bytes) {
    assert(note_bytes <= SPK_NOTE_BYTES_MAX);
    spk_journal_record record = { .kind = SPK_JOURNAL_NOTE, .note_bytes = note_bytes, .end_bytes = appended_bytes(writer) };
    memcpy(record.note, note, note_bytes);
    spk_journal_put(&writer->journal, record);
}

/* A record is overwritten by its equal while it is replayed: a stretch brings the same chunks, then its note. */
spk_status spk_pack_writer_replay(spk_pack_writer *writer, uint64_t size_bytes, void *note, uint32_t note_bytes,
                                  bool *done, spk_error *err) {
    uint64_t begin = appended_bytes(writer), end = begin + size_bytes;
    spk_journal_record record = { .kind = 0 };
    *done = false;
    if (writer->replay_index == 0) return SPK_OK;
    while (spk_journal_get(&writer->journal, writer->replay_index, &record) && record.kind == SPK_JOURNAL_CHUNK)
        writer->replay_index++;
    if (end > writer->kept_bytes || record.kind != SPK_JOURNAL_NOTE || record.end_bytes != end ||
        record.note_bytes != note_bytes) {
        writer->replay_index = 0;
        return SPK_OK;
    }
    uint8_t *bytes = malloc(size_bytes + 1);
    if (bytes == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " bytes", writer->path, size_bytes);
    spk_status status = spk_outfile_read(writer->file, writer->data_offset_bytes + begin, bytes, size_bytes, err);
    if (status == SPK_OK) status = spk_pack_writer_append(writer, bytes, size_bytes, err);
    free(bytes);
    if (status != SPK_OK) return status;
    memcpy(note, record.note, note_bytes);
    spk_pack_writer_note(writer, note, note_bytes);
    writer->replay_index++;
    *done = true;
    return SPK_OK;
}

uint64_t spk_pack_writer_kept_bytes(const spk_pack_writer *writer) { return writer->kept_bytes; }

/* ---- Commit ---- */

static spk_status put_tensors(spk_pack_writer *writer, const spk_tensor *tensors, spk_error *err) {
    SPK_TRY(spk_rules_tensors(tensors, writer->tensor_count, writer->section_bytes, writer->expert_count, writer->path,
                              err));
    uint64_t size_bytes = writer->tensor_count * sizeof(spk_disk_tensor);
    spk_disk_tensor *disk = calloc(writer->tensor_count, sizeof *disk);
    if (disk == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for the directory", writer->path);
    for (uint64_t i = 0; i < writer->tensor_count; i++) {
        const spk_tensor *t = &tensors[i];
        disk[i] = (spk_disk_tensor){ .type = t->type, .source_type = t->source_type, .layout = t->layout,
                                     .section = t->section, .dim_count = t->dim_count, .offset_bytes = t->offset_bytes,
                                     .unit_stride_bytes = t->unit_stride_bytes,
                                     .matrix_stride_bytes = t->matrix_stride_bytes, .relative_rmse = t->relative_rmse,
                                     .max_abs_error = t->max_abs_error, .cosine = t->cosine };
        memcpy(disk[i].name, t->name, sizeof disk[i].name);
        memcpy(disk[i].dims, t->dims, sizeof disk[i].dims);
    }
    spk_status status = put_section(writer, (spk_disk_section){ .id = SPK_SECTION_TENSORS, .stored_bytes = size_bytes,
                                                                .raw_bytes = size_bytes,
                                                                .item_count = writer->tensor_count }, disk, err);
    free(disk);
    return status;
}

/* A record is a GGUF key-value entry.  Write errors of a memory stream show up when it is closed. */
static void put_record(FILE *records, const char *key, uint32_t type, const void *value, size_t value_bytes) {
    uint64_t key_bytes = strlen(key);
    (void)fwrite(&key_bytes, sizeof key_bytes, 1, records);
    (void)fwrite(key, 1, key_bytes, records);
    (void)fwrite(&type, sizeof type, 1, records);
    if (type == SPK_KV_STRING) {
        uint64_t length = value_bytes;
        (void)fwrite(&length, sizeof length, 1, records);
    }
    (void)fwrite(value, 1, value_bytes, records);
}

static uint64_t put_records(FILE *records, const spk_provenance *p) {
    const char *texts[SPK_PROVENANCE_TEXT_COUNT] = { p->source_name, p->recipe_name, p->recipe_text, p->imatrix_name,
                                                     p->tool_version };
    for (size_t i = 0; i < SPK_PROVENANCE_TEXT_COUNT; i++)
        put_record(records, spk_provenance_text_keys[i], SPK_KV_STRING, texts[i], strlen(texts[i]));
    char digest[33];
    spk_digest_text(&p->source_digest, digest);
    put_record(records, SPK_PROVENANCE_BYTES_KEY, SPK_KV_U64, &p->source_bytes, sizeof p->source_bytes);
    put_record(records, SPK_PROVENANCE_DIGEST_KEY, SPK_KV_STRING, digest, 32);
    put_record(records, SPK_PROVENANCE_VERSION_KEY, SPK_KV_U32, &p->source_version, sizeof p->source_version);
    put_record(records, SPK_PROVENANCE_ALIGNMENT_KEY, SPK_KV_U64, &p->source_alignment_bytes,
               sizeof p->source_alignment_bytes);
    if (p->weights_name == NULL || *p->weights_name == '\0') return SPK_PROVENANCE_TEXT_COUNT + 4;
    spk_digest_text(&p->weights_digest, digest);
    put_record(records, SPK_PROVENANCE_WEIGHTS_NAME_KEY, SPK_KV_STRING, p->weights_name, strlen(p->weights_name));
    put_record(records, SPK_PROVENANCE_WEIGHTS_BYTES_KEY, SPK_KV_U64, &p->weights_bytes, sizeof p->weights_bytes);
    put_record(records, SPK_PROVENANCE_WEIGHTS_DIGEST_KEY, SPK_KV_STRING, digest, 32);
    return SPK_PROVENANCE_TEXT_COUNT + 7;
}

static spk_status put_provenance(spk_pack_writer *writer, const spk_provenance *provenance, spk_error *err) {
    char *bytes = NULL;
    size_t size_bytes = 0;
    FILE *records = open_memstream(&bytes, &size_bytes);
    if (records == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for provenance", writer->path);
    uint64_t count = put_records(records, provenance);
    bool failed = ferror(records) != 0;
    failed = fclose(records) != 0 || failed;
    spk_status status = failed
        ? spk_fail(err, SPK_E_MEMORY, "%s: out of memory for provenance", writer->path)
        : put_section(writer, (spk_disk_section){ .id = SPK_SECTION_PROVENANCE, .stored_bytes = size_bytes,
                                                  .raw_bytes = size_bytes, .item_count = count }, bytes, err);
    free(bytes);
    return status;
}

static spk_status put_chunks(spk_pack_writer *writer, spk_error *err) {
    for (uint32_t i = 0; i < writer->header.section_count; i++) {
        spk_disk_section *s = &writer->header.sections[i];
        if (spk_section_is_data(s->id))
            s->digest = spk_digest_of(writer->digests + spk_chunk_first(&writer->header, s),
                                      s->item_count * sizeof(spk_digest));
    }
    uint64_t size_bytes = writer->digest_count * sizeof(spk_digest);
    return put_section(writer, (spk_disk_section){ .id = SPK_SECTION_CHUNKS, .stored_bytes = size_bytes,
                                                   .raw_bytes = size_bytes, .item_count = writer->digest_count },
                       writer->digests, err);
}

static spk_status put_header(spk_pack_writer *writer, spk_error *err) {
    spk_disk_header *h = &writer->header;
    h->file_bytes = writer->offset_bytes;
    h->root = spk_header_root(h);
    h->checksum = spk_header_checksum(h);
    SPK_TRY(spk_rules_header(h, h->file_bytes, writer->path, err));
    return write_bytes(writer, 0, h, sizeof *h, err);
}

static spk_status finish(spk_pack_writer *writer, const spk_tensor *tensors, const spk_provenance *provenance,
                         spk_error *err) {
    if (current_chunk_bytes(writer) != 0)
        return spk_fail(err, SPK_E_MISMATCH,
                        "%s: section %s ended after %" PRIu64 " of %" PRIu64 " bytes", writer->path,
                        spk_section_name(writer->place_index + 1), writer->place_done_bytes + writer->chunk_fill_bytes,
                        writer->section_bytes[writer->place_index]);
    SPK_TRY(put_tensors(writer, tensors, err));
    SPK_TRY(put_provenance(writer, provenance, err));
    SPK_TRY(put_chunks(writer, err));
    SPK_TRY(put_header(writer, err));
    SPK_TRY(spk_outfile_cut(writer->file, writer->header.file_bytes, err));      /* the journal, or what another job left there */
    spk_outfile *file = writer->file;
    writer->file = NULL;                 /* commit frees it in every case */
    return spk_outfile_commit(file, err);
}

spk_status spk_pack_writer_commit(spk_pack_writer *writer, const spk_tensor *tensors, const spk_provenance *provenance,
                                  spk_error *err) {
    spk_status status = finish(writer, tensors, provenance, err);
    free_writer(writer);
    return status;
}

void spk_pack_writer_abort(spk_pack_writer *writer) {
    if (writer != NULL) free_writer(writer);
}
