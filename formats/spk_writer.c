/* formats/spk_writer.c - writes a pack in one pass: CONFIG, META, the data as it comes, the directory, the header last.
 *
 * Sections may be filled in turns, each from its beginning to its end.
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

/* From here on, what lies right need not be gathered: the outfile goes past the page cache. */
enum { STRAIGHT_BYTES_MIN = 1 << 20 };

/* A data section that is being filled. */
typedef struct {
    uint64_t      offset_bytes, size_bytes;  /* in the file */
    uint64_t      done_bytes;                /* whole chunks */
    uint64_t      fill_bytes;                /* of the chunk after them: they have been hashed */
    uint64_t      gathered_bytes;            /* the end of fill_bytes: not written yet, in `chunk` */
    uint64_t      kept_bytes;                /* whole chunks that an earlier run left, compared with their digests; 0 once others follow */
    uint64_t      left_next;                 /* the record behind the last that was replayed */
    uint64_t      chunk_first;               /* in the digests */
    uint8_t      *chunk;
    spk_digester *digester;                  /* of the chunk; NULL where the section is empty */
} data_section;

struct spk_pack_writer {
    spk_outfile    *file;
    char           *path;
    spk_disk_header header;              /* sections are added in the order of the file */
    uint64_t        tensor_count;
    uint64_t        section_bytes[SPK_PLACE_COUNT];
    uint32_t        expert_count;
    uint64_t        offset_bytes;        /* where the next section goes */
    data_section    data[SPK_PLACE_COUNT];
    spk_digest     *digests;
    uint64_t        digest_count;
    uint64_t        data_offset_bytes;   /* where the data begin in the file */
    spk_journal     journal;
    uint64_t        appended_end_bytes;  /* of data, where the last append ended */
    spk_journal_record *left;            /* records of an earlier run, read at once: this run's are written over them */
    uint64_t        left_count, replayed_bytes;
    bool            is_replaying;        /* what is appended lies in the file already */
    bool            resumes;             /* a full disk leaves what is done, too */
    spk_journal     dropped;             /* the journal as it was when its blocks were given back ... */
    uint64_t        dropped_done_bytes[SPK_PLACE_COUNT];     /* ... what it speaks of, of each data section ... */
    uint64_t        dropped_end_bytes;   /* ... the end of the sections then ... */
    spk_journal_record *dropped_records; /* ... and a copy; NULL: none */
};

static void free_writer(spk_pack_writer *writer) {
    spk_outfile_abort(writer->file);
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) {
        free(writer->data[p].chunk);
        spk_digester_destroy(writer->data[p].digester);
    }
    free(writer->path);
    free(writer->dropped_records);
    free(writer->left);
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

static bool has_journal(const spk_pack_writer *writer) { return writer->journal.base_bytes != 0; }

/* Gives the journal's blocks back, behind end_bytes. */
static spk_status drop_journal(spk_pack_writer *writer, uint64_t end_bytes) {
    free(writer->dropped_records);
    writer->dropped = writer->journal;
    writer->dropped_end_bytes = writer->offset_bytes;
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) writer->dropped_done_bytes[p] = writer->data[p].done_bytes;
    writer->dropped_records = spk_journal_take(&writer->journal, writer->file);
    writer->journal = (spk_journal){ .file = NULL };
    return spk_outfile_cut(writer->file, end_bytes, NULL);
}

static bool put_journal_back(spk_pack_writer *writer) {
    if (writer->dropped_records == NULL || spk_journal_put_back(&writer->dropped, writer->file, writer->dropped_records) != SPK_OK)
        return false;
    writer->journal = writer->dropped;
    return true;
}

/* The same, but what it does not speak of makes room for it: chunks since then, the one that is not whole, other sections. */
static bool put_journal_in_place(spk_pack_writer *writer) {
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) {
        const data_section *s = &writer->data[p];
        uint64_t done_bytes = writer->dropped_done_bytes[p];
        spk_outfile_release(writer->file, s->offset_bytes + done_bytes, s->size_bytes - done_bytes);
    }
    return spk_outfile_cut(writer->file, writer->dropped_end_bytes, NULL) == SPK_OK && put_journal_back(writer);
}

/* A full disk ends a run that was to be resumed: what it has done stays, for when there is room. */
static spk_status keep_for_resume(spk_pack_writer *writer, spk_status status, spk_error *err) {
    uint64_t done_bytes = 0;
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) done_bytes += writer->data[p].done_bytes;
    if (status != SPK_E_SPACE || !writer->resumes || done_bytes == 0) return status;
    if (!has_journal(writer) && !put_journal_in_place(writer)) return status;
    const char *kept_path = spk_outfile_keep(writer->file);
    if (err == NULL) return status;
    spk_error full = *err;
    const char *slash = strrchr(kept_path, '/');       /* it lies beside OUT, whose path is in the text already */
    return spk_fail(err, status, "%s; %s keeps what was done for --resume", full.text, slash != NULL ? slash + 1 : kept_path);
}

/* Where the disk is full, the journal's blocks are given back, and it is tried again without one; it comes back if there is room then.
 * What the pack has lies in front of here by then, but for the header. */
static spk_status write_bytes(spk_pack_writer *writer, uint64_t offset_bytes, const void *bytes, uint64_t size_bytes, spk_error *err) {
    spk_status status = spk_outfile_write(writer->file, offset_bytes, bytes, size_bytes, err);
    if (status != SPK_E_SPACE) return status;
    if (has_journal(writer)) {
        if (drop_journal(writer, offset_bytes > writer->offset_bytes ? offset_bytes : writer->offset_bytes) != SPK_OK) return status;
        status = spk_outfile_write(writer->file, offset_bytes, bytes, size_bytes, err);
        uint64_t end_bytes = offset_bytes + size_bytes > writer->offset_bytes ? offset_bytes + size_bytes : writer->offset_bytes;
        if (status == SPK_OK && !put_journal_back(writer)) status = spk_outfile_cut(writer->file, end_bytes, err);
    }
    return keep_for_resume(writer, status, err);
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
    writer->data_offset_bytes = writer->offset_bytes;
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) {
        uint64_t bytes = writer->section_bytes[p];
        writer->data[p].offset_bytes = writer->offset_bytes;
        if (bytes != 0)
            add_entry(writer, (spk_disk_section){ .id = p + 1, .stored_bytes = bytes, .raw_bytes = bytes,
                                                  .item_count = spk_chunk_count(bytes) });
    }
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

/* The section that the data end in, after so many bytes; NULL if none. */
static data_section *section_of_end(spk_pack_writer *writer, uint64_t end_bytes) {
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) {
        if (end_bytes <= writer->section_bytes[p]) return &writer->data[p];
        end_bytes -= writer->section_bytes[p];
    }
    return NULL;
}

/* Chunks are read again and compared, in each section up to the first that is not there or not whole. */
static void find_kept_chunks(spk_pack_writer *writer) {
    for (uint64_t i = 0; i < writer->left_count; i++) {
        const spk_journal_record *record = &writer->left[i];
        data_section *s = record->kind == SPK_JOURNAL_CHUNK ? section_of_end(writer, record->end_bytes) : NULL;
        if (s == NULL) continue;
        uint64_t at = s->offset_bytes + s->kept_bytes, end = writer->data_offset_bytes + record->end_bytes;
        if (end <= at || end - at > SPK_CHUNK_BYTES || spk_outfile_read(writer->file, at, s->chunk, end - at, NULL) != SPK_OK) continue;
        spk_digest digest = spk_digest_of(s->chunk, end - at);
        if (memcmp(&digest, &record->digest, sizeof digest) == 0) s->kept_bytes += end - at;
    }
}

/* All records behind the first; where memory is short, fewer. */
static void read_left(spk_pack_writer *writer) {
    uint64_t room = 0;
    spk_journal_record record;
    while (spk_journal_get(&writer->journal, writer->left_count + 1, &record)) {
        if (writer->left_count == room) {
            room = 2 * room + 64;
            spk_journal_record *grown = realloc(writer->left, room * sizeof *grown);
            if (grown == NULL) return;
            writer->left = grown;
        }
        writer->left[writer->left_count++] = record;
    }
}

/* Past the end of all that the pack can take; a multiple of the record's size. */
static void begin_journal(spk_pack_writer *writer, const spk_pack_writer_options *o, uint64_t base_bytes) {
    spk_journal_record job = { .kind = SPK_JOURNAL_JOB, .digest = *o->job }, left;
    writer->journal = (spk_journal){ .file = writer->file, .base_bytes = round_up(base_bytes), .job = *o->job };
    if (o->resume && spk_journal_get(&writer->journal, 0, &left) && left.kind == SPK_JOURNAL_JOB &&
        memcmp(&left.digest, &job.digest, sizeof job.digest) == 0) {
        read_left(writer);
        find_kept_chunks(writer);
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

static spk_status begin_sections(spk_pack_writer *writer, spk_error *err) {
    uint64_t chunk_first = 0;
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) {
        data_section *s = &writer->data[p];
        s->size_bytes = writer->section_bytes[p];
        s->chunk_first = chunk_first;
        chunk_first += spk_chunk_count(s->size_bytes);
        if (s->size_bytes == 0) continue;
        SPK_TRY(spk_digester_create(&s->digester, err));
        s->chunk = aligned_alloc(SPK_BLOCK_ALIGN, SPK_CHUNK_BYTES);     /* so that outfile can go past the page cache */
        if (s->chunk == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for a chunk", writer->path);
    }
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
    writer->resumes = options->resume;
    writer->header.version_major = SPK_VERSION_MAJOR;
    writer->header.version_minor = SPK_VERSION_MINOR;
    memcpy(writer->header.magic, SPK_MAGIC, SPK_MAGIC_BYTES);
    writer->path = strdup(options->path);
    writer->digests = malloc((writer->digest_count + 1) * sizeof *writer->digests);
    void *meta = NULL;
    size_t meta_bytes = 0;
    spk_status status = SPK_OK;
    if (writer->path == NULL || writer->digests == NULL)
        status = spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " digests", options->path,
                          writer->digest_count);
    if (status == SPK_OK) status = begin_sections(writer, err);
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

static uint64_t filled_bytes(const data_section *s) { return s->done_bytes + s->fill_bytes; }

/* Bytes of a section from `begin` on, unless an earlier run has left them. */
static spk_status write_data(spk_pack_writer *writer, const data_section *s, uint64_t begin, const void *bytes,
                             uint64_t size_bytes, spk_error *err) {
    if (begin + size_bytes <= s->kept_bytes) return SPK_OK;
    return write_bytes(writer, s->offset_bytes + begin, bytes, size_bytes, err);
}

/* The chunk that is being filled is whole. */
static spk_status end_chunk(spk_pack_writer *writer, data_section *s, spk_error *err) {
    SPK_TRY(write_data(writer, s, filled_bytes(s) - s->gathered_bytes, s->chunk, s->gathered_bytes, err));
    spk_digest digest = spk_digester_result(s->digester);
    spk_digester_reset(s->digester);
    writer->digests[s->chunk_first + s->done_bytes / SPK_CHUNK_BYTES] = digest;
    s->done_bytes = filled_bytes(s);
    s->fill_bytes = s->gathered_bytes = 0;
    uint64_t end_bytes = s->offset_bytes + s->done_bytes - writer->data_offset_bytes;
    spk_journal_put(&writer->journal, (spk_journal_record){ .kind = SPK_JOURNAL_CHUNK, .end_bytes = end_bytes,
                                                            .digest = digest });
    return SPK_OK;
}

static spk_status fail_too_much(const spk_pack_writer *writer, uint64_t size_bytes, spk_error *err) {
    return spk_fail(err, SPK_E_MISMATCH, "%s: %" PRIu64 " bytes of data more than the sections take", writer->path, size_bytes);
}

/* Writes what comes from where it is, but for a block that was begun, which is completed, and one that is begun, which is gathered. */
static spk_status write_straight(spk_pack_writer *writer, data_section *s, const uint8_t *bytes, uint64_t size_bytes, uint64_t *rest_bytes,
                                 spk_error *err) {
    uint64_t begin = filled_bytes(s), head_bytes = (SPK_BLOCK_ALIGN - begin % SPK_BLOCK_ALIGN) % SPK_BLOCK_ALIGN;
    memcpy(s->chunk + s->gathered_bytes, bytes, head_bytes);
    SPK_TRY(write_data(writer, s, begin - s->gathered_bytes, s->chunk, s->gathered_bytes + head_bytes, err));
    *rest_bytes = (size_bytes - head_bytes) % SPK_BLOCK_ALIGN;
    SPK_TRY(write_data(writer, s, begin + head_bytes, bytes + head_bytes, size_bytes - head_bytes - *rest_bytes, err));
    memcpy(s->chunk, bytes + size_bytes - *rest_bytes, *rest_bytes);
    s->gathered_bytes = 0;                   /* of the chunks before the last */
    return SPK_OK;
}

spk_status spk_pack_writer_append_to(spk_pack_writer *writer, uint32_t place, const void *bytes, uint64_t size_bytes, spk_error *err) {
    data_section *s = &writer->data[place - 1];
    const uint8_t *next = bytes;
    uint64_t room_bytes = s->size_bytes - filled_bytes(s), rest_bytes = 0;
    if (size_bytes > room_bytes) return fail_too_much(writer, size_bytes - room_bytes, err);
    if (!writer->is_replaying) s->kept_bytes = 0;        /* what is made again need not be what was left */
    bool is_straight = size_bytes >= STRAIGHT_BYTES_MIN && ((uintptr_t)next - filled_bytes(s)) % SPK_BLOCK_ALIGN == 0;
    if (is_straight) SPK_TRY(write_straight(writer, s, next, size_bytes, &rest_bytes, err));
    while (size_bytes > 0) {
        uint64_t left = s->size_bytes - s->done_bytes, chunk_bytes = left < SPK_CHUNK_BYTES ? left : SPK_CHUNK_BYTES;
        uint64_t take = chunk_bytes - s->fill_bytes < size_bytes ? chunk_bytes - s->fill_bytes : size_bytes;
        spk_digester_add(s->digester, next, take);
        if (!is_straight) {
            memcpy(s->chunk + s->gathered_bytes, next, take);
            s->gathered_bytes += take;
        }
        s->fill_bytes += take;
        if (s->fill_bytes == chunk_bytes) SPK_TRY(end_chunk(writer, s, err));
        next += take;
        size_bytes -= take;
    }
    if (is_straight) s->gathered_bytes = rest_bytes;
    writer->appended_end_bytes = s->offset_bytes + filled_bytes(s) - writer->data_offset_bytes;
    return SPK_OK;
}

spk_status spk_pack_writer_append(spk_pack_writer *writer, const void *bytes, uint64_t size_bytes, spk_error *err) {
    const uint8_t *next = bytes;
    for (uint32_t p = 0; p < SPK_PLACE_COUNT && size_bytes > 0; p++) {
        uint64_t room_bytes = writer->data[p].size_bytes - filled_bytes(&writer->data[p]);
        uint64_t take = room_bytes < size_bytes ? room_bytes : size_bytes;
        SPK_TRY(spk_pack_writer_append_to(writer, p + 1, next, take, err));
        next += take;
        size_bytes -= take;
    }
    return size_bytes == 0 ? SPK_OK : fail_too_much(writer, size_bytes, err);
}

bool spk_pack_writer_takes_turns(const spk_pack_writer *writer) { return spk_outfile_has_holes(writer->file); }

/* ---- Going on where a run was killed ---- */

void spk_pack_writer_note(spk_pack_writer *writer, const void *note, uint32_t note_bytes) {
    assert(note_bytes <= SPK_NOTE_BYTES_MAX);
    spk_journal_record record = { .kind = SPK_JOURNAL_NOTE, .note_bytes = note_bytes, .end_bytes = writer->appended_end_bytes };
    memcpy(record.note, note, note_bytes);
    spk_journal_put(&writer->journal, record);
}

/* The note of the stretch that ends there; NULL if none was left.  A section's are in order, but for what a run left that was itself one
 * that resumed. */
static const spk_journal_record *find_note(spk_pack_writer *writer, data_section *s, uint64_t end_bytes, uint32_t note_bytes) {
    for (uint64_t n = 0; n < writer->left_count; n++) {
        const uint64_t i = (s->left_next + n) % writer->left_count;
        const spk_journal_record *record = &writer->left[i];
        if (record->kind != SPK_JOURNAL_NOTE || record->end_bytes != end_bytes || record->note_bytes != note_bytes) continue;
        s->left_next = i + 1;
        return record;
    }
    return NULL;
}

spk_status spk_pack_writer_replay(spk_pack_writer *writer, uint32_t place, uint64_t size_bytes, void *note, uint32_t note_bytes,
                                  bool *done, spk_error *err) {
    data_section *s = &writer->data[place - 1];
    const uint64_t begin = filled_bytes(s);
    *done = false;
    if (begin + size_bytes > s->kept_bytes) return SPK_OK;
    const spk_journal_record *record = find_note(writer, s, s->offset_bytes + begin + size_bytes - writer->data_offset_bytes, note_bytes);
    if (record == NULL) return SPK_OK;
    uint8_t *bytes = malloc(size_bytes + 1);
    if (bytes == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " bytes", writer->path, size_bytes);
    spk_status status = spk_outfile_read(writer->file, s->offset_bytes + begin, bytes, size_bytes, err);
    writer->is_replaying = true;
    if (status == SPK_OK) status = spk_pack_writer_append_to(writer, place, bytes, size_bytes, err);
    writer->is_replaying = false;
    free(bytes);
    if (status != SPK_OK) return status;
    memcpy(note, record->note, note_bytes);
    spk_pack_writer_note(writer, note, note_bytes);
    writer->replayed_bytes += size_bytes;
    *done = true;
    return SPK_OK;
}

uint64_t spk_pack_writer_replayed_bytes(const spk_pack_writer *writer) { return writer->replayed_bytes; }

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
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++)
        if (filled_bytes(&writer->data[p]) != writer->section_bytes[p])
            return spk_fail(err, SPK_E_MISMATCH, "%s: section %s ended after %" PRIu64 " of %" PRIu64 " bytes", writer->path,
                            spk_section_name(p + 1), filled_bytes(&writer->data[p]), writer->section_bytes[p]);
    SPK_TRY(put_tensors(writer, tensors, err));
    SPK_TRY(put_provenance(writer, provenance, err));
    SPK_TRY(put_chunks(writer, err));
    SPK_TRY(put_header(writer, err));
    spk_status cut = spk_outfile_cut(writer->file, writer->header.file_bytes, err);  /* the journal, or what another job left there */
    if (cut != SPK_OK) return keep_for_resume(writer, cut, err);
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
