/* formats/gguf_writer.c - writes one GGUF file, data as a stream.
 *
 * Layout as llama.cpp's: data in the order of the infos, every tensor padded with zeros to the alignment, the last one
 * too unless the caller wants the file to end before.  So the entries and tensors of such a file give that file again,
 * byte for byte.  Bytes are written in the order of the file, which is what the digest relies on.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "formats/gguf_internal.h"
#include "formats/outfile.h"

typedef struct {
    uint64_t begin, end;             /* file offsets of a tensor's data, without padding */
} span;

struct spk_gguf_writer {
    spk_outfile *file;
    char        *path;               /* for messages */
    uint64_t     alignment_bytes;
    uint64_t     at;                 /* file offset of the next byte */
    uint64_t     end;                /* of the file */
    uint64_t     tensor_count, tensor_index;
    span        *spans;
    spk_gguf_identity *identity;     /* the caller's, or NULL: then there is no digester */
    spk_digester      *digester;
};

static void free_writer(spk_gguf_writer *writer) {
    spk_digester_destroy(writer->digester);
    free(writer->path);
    free(writer->spans);
    free(writer);
}

static spk_text name_of(const void *items, uint64_t index) {
    const char *name = ((const spk_gguf_tensor_spec *)items)[index].name;
    return (spk_text){ name, strnlen(name, SPK_GGUF_NAME_BYTES_MAX + 1) };
}

/* The reader's rules for everything before the infos. */
static spk_status check_options(const spk_gguf_writer_options *o, spk_error *err) {
    if (o->version != 2 && o->version != 3)
        return spk_fail(err, SPK_E_VERSION, "%s: cannot write GGUF version %" PRIu32 ", expected 2 or 3", o->path,
                        o->version);
    if (o->tensor_count > SPK_GGUF_TENSOR_COUNT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: %" PRIu64 " tensors, at most %d can be written", o->path,
                        o->tensor_count, (int)SPK_GGUF_TENSOR_COUNT_MAX);
    spk_kv_set kvs;
    uint64_t   used_bytes, alignment_bytes = 0;
    SPK_TRY(spk_kv_parse(o->kv_bytes, o->kv_bytes_size, o->kv_count, o->path, &kvs, &used_bytes, err));
    spk_status status = spk_gguf_check_alignment(&kvs, o->path, &alignment_bytes, err);
    spk_kv_free(&kvs);
    if (status != SPK_OK) return status;
    if (used_bytes != o->kv_bytes_size)
        return spk_fail(err, SPK_E_MISMATCH, "%s: the %" PRIu64 " metadata entries take %" PRIu64 " bytes, but %" PRIu64
                        " were given", o->path, o->kv_count, used_bytes, o->kv_bytes_size);
    if (alignment_bytes != o->alignment_bytes)
        return spk_fail(err, SPK_E_MISMATCH, "%s: alignment %" PRIu64 " was asked for, but the metadata says %" PRIu64,
                        o->path, o->alignment_bytes, alignment_bytes);
    return SPK_OK;
}

static spk_status check_names(const spk_gguf_writer_options *o, spk_error *err) {
    for (uint64_t i = 0; i < o->tensor_count; i++)
        SPK_TRY(spk_gguf_check_name(name_of(o->tensors, i), o->path, "a tensor to write", err));
    uint32_t *slots = NULL;
    uint64_t  slot_count, duplicate;
    SPK_TRY(spk_name_index_build(o->tensors, o->tensor_count, name_of, o->path, &slots, &slot_count, &duplicate, err));
    free(slots);
    if (duplicate == SPK_NAME_NONE) return SPK_OK;
    return spk_fail(err, SPK_E_CORRUPT, "%s: duplicate tensor name '%s' to write; expected each name once", o->path,
                    o->tensors[duplicate].name);
}

/* Sizes and places of the tensors; writer->at becomes the data start, writer->end the file's size. */
static spk_status place_tensors(const spk_gguf_writer_options *o, spk_gguf_writer *writer, spk_error *err) {
    uint64_t header_bytes = SPK_GGUF_HEADER_BYTES + o->kv_bytes_size;
    for (uint64_t i = 0; i < o->tensor_count; i++)
        header_bytes += 8 + name_of(o->tensors, i).size_bytes + 4 + 8 * (uint64_t)o->tensors[i].dim_count + 4 + 8;
    uint64_t at = spk_gguf_align_up(header_bytes, o->alignment_bytes);
    writer->at = at;
    for (uint64_t i = 0; i < o->tensor_count; i++) {
        uint64_t size_bytes;
        SPK_TRY(spk_gguf_check_shape(&o->tensors[i], o->path, &size_bytes, err));
        if (size_bytes > INT64_MAX - SPK_GGUF_ALIGNMENT_MAX - at)
            return spk_fail(err, SPK_E_LIMIT, "%s: tensor '%s' of %" PRIu64 " bytes would end past 2^63", o->path,
                            o->tensors[i].name, size_bytes);
        writer->spans[i] = (span){ at, at + size_bytes };
        at = spk_gguf_align_up(at + size_bytes, o->alignment_bytes);
        bool is_cut = i + 1 == o->tensor_count && o->wanted_bytes >= writer->spans[i].end && o->wanted_bytes < at;
        if (is_cut) at = o->wanted_bytes;
    }
    writer->end = at;
    return SPK_OK;
}

/* The next bytes of the file. */
static spk_status write_next(spk_gguf_writer *writer, const void *bytes, uint64_t size_bytes, spk_error *err) {
    SPK_TRY(spk_outfile_write(writer->file, writer->at, bytes, size_bytes, err));
    if (writer->digester != NULL) spk_digester_add(writer->digester, bytes, size_bytes);
    writer->at += size_bytes;
    return SPK_OK;
}

static uint8_t *put(uint8_t *at, const void *bytes, uint64_t size_bytes) {
    if (size_bytes > 0) memcpy(at, bytes, size_bytes);   /* no metadata: bytes may be NULL */
    return at + size_bytes;
}

/* Header, metadata, infos and the padding up to the data. */
static spk_status write_head(const spk_gguf_writer_options *o, spk_gguf_writer *writer, spk_error *err) {
    uint64_t data_start = writer->at;
    uint8_t *head = calloc(1, data_start), *at = head;
    if (head == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for the header", o->path);
    at = put(at, "GGUF", 4);
    at = put(at, &o->version, sizeof o->version);
    at = put(at, &o->tensor_count, sizeof o->tensor_count);
    at = put(at, &o->kv_count, sizeof o->kv_count);
    at = put(at, o->kv_bytes, o->kv_bytes_size);
    for (uint64_t i = 0; i < o->tensor_count; i++) {
        const spk_gguf_tensor_spec *t = &o->tensors[i];
        spk_text                    name = name_of(o->tensors, i);
        uint64_t                    offset = writer->spans[i].begin - data_start;
        at = put(at, &name.size_bytes, sizeof name.size_bytes);
        at = put(at, name.bytes, name.size_bytes);
        at = put(at, &t->dim_count, sizeof t->dim_count);
        at = put(at, t->dims, t->dim_count * sizeof *t->dims);
        at = put(at, &t->type, sizeof t->type);
        at = put(at, &offset, sizeof offset);
    }
    writer->at = 0;
    spk_status status = write_next(writer, head, data_start, err);
    free(head);
    return status;
}

spk_status spk_gguf_writer_begin(const spk_gguf_writer_options *options, spk_gguf_writer **out, spk_error *err) {
    spk_status       status = check_options(options, err);
    spk_gguf_writer *writer = NULL;
    if (status == SPK_OK) status = check_names(options, err);
    if (status == SPK_OK) writer = calloc(1, sizeof *writer);
    if (writer != NULL) {
        writer->file = options->file;
        writer->path = strdup(options->path);
        writer->spans = calloc(options->tensor_count + 1, sizeof *writer->spans);  /* + 1: there may be none */
        writer->tensor_count = options->tensor_count;
        writer->alignment_bytes = options->alignment_bytes;
        writer->identity = options->identity;
    } else {
        spk_outfile_abort(options->file);
    }
    if (status == SPK_OK && (writer == NULL || writer->path == NULL || writer->spans == NULL))
        status = spk_fail(err, SPK_E_MEMORY, "%s: out of memory", options->path);
    if (status == SPK_OK && options->identity != NULL) status = spk_digester_create(&writer->digester, err);
    if (status == SPK_OK) status = place_tensors(options, writer, err);
    if (status == SPK_OK && writer->file != NULL) status = spk_outfile_expect(writer->file, writer->end, err);
    else if (status == SPK_OK) status = spk_outfile_create(options->path, options->replace, writer->end, &writer->file, err);
    if (status == SPK_OK) status = write_head(options, writer, err);
    if (status == SPK_OK)
        *out = writer;
    else
        spk_gguf_writer_abort(writer);
    return status;
}

/* Zeros from the end of a tensor to the next multiple of the alignment, or to the end of the file. */
static spk_status write_padding(spk_gguf_writer *writer, spk_error *err) {
    static const uint8_t zeros[4096];
    uint64_t             end = spk_gguf_align_up(writer->at, writer->alignment_bytes);
    if (end > writer->end) end = writer->end;
    while (writer->at < end) {
        uint64_t piece = end - writer->at < sizeof zeros ? end - writer->at : sizeof zeros;
        SPK_TRY(write_next(writer, zeros, piece, err));
    }
    return SPK_OK;
}

spk_status spk_gguf_writer_append(spk_gguf_writer *writer, const void *bytes, uint64_t size_bytes, spk_error *err) {
    const uint8_t *next = bytes;
    while (size_bytes > 0) {
        if (writer->tensor_index == writer->tensor_count)
            return spk_fail(err, SPK_E_MISMATCH, "%s: %" PRIu64 " bytes of data more than the %" PRIu64 " tensors take",
                            writer->path, size_bytes, writer->tensor_count);
        uint64_t left = writer->spans[writer->tensor_index].end - writer->at;
        uint64_t piece = size_bytes < left ? size_bytes : left;
        SPK_TRY(write_next(writer, next, piece, err));
        next += piece;
        size_bytes -= piece;
        if (piece == left) {
            SPK_TRY(write_padding(writer, err));
            writer->tensor_index++;
        }
    }
    return SPK_OK;
}

spk_status spk_gguf_writer_commit(spk_gguf_writer *writer, spk_error *err) {
    if (writer->tensor_index < writer->tensor_count) {
        span       next = writer->spans[writer->tensor_index];
        spk_status status = spk_fail(err, SPK_E_MISMATCH, "%s: tensor %" PRIu64 " of %" PRIu64 " got %" PRIu64
                                     " bytes of data, expected %" PRIu64, writer->path, writer->tensor_index + 1,
                                     writer->tensor_count, writer->at - next.begin, next.end - next.begin);
        spk_gguf_writer_abort(writer);
        return status;
    }
    spk_status status = spk_outfile_commit(writer->file, err);
    if (status == SPK_OK && writer->identity != NULL)
        *writer->identity = (spk_gguf_identity){ writer->end, spk_digester_result(writer->digester) };
    free_writer(writer);
    return status;
}

void spk_gguf_writer_abort(spk_gguf_writer *writer) {
    if (writer == NULL) return;
    spk_outfile_abort(writer->file);
    free_writer(writer);
}
