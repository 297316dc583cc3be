/* formats/gguf.h - GGUF reader and writer, version 2 and 3, little-endian.
 *
 * The reader maps the file (all parts of a split model), checks every count, length, offset and product in
 * 64-bit checked arithmetic against the named limits and the file's size, and never looks at weights.
 * It carries unknown keys and tensors of unknown use untouched; a tensor of an unknown *type* is refused, since
 * its size cannot be known.
 */
#ifndef SPK_GGUF_H
#define SPK_GGUF_H

#include <stdint.h>
#include "formats/digest.h"
#include "formats/kv.h"
#include "formats/status.h"

enum {
    SPK_GGUF_TENSOR_COUNT_MAX = 65536,
    SPK_GGUF_NAME_BYTES_MAX   = 63,      /* as llama.cpp */
    SPK_GGUF_ALIGNMENT_MAX    = 1 << 20,
    SPK_GGUF_PART_COUNT_MAX   = 1024,
    SPK_GGUF_DIM_COUNT_MAX    = 4
};

typedef struct spk_gguf_tensor {
    char     name[SPK_GGUF_NAME_BYTES_MAX + 1]; /* NUL-terminated; no control characters */
    uint32_t type;                              /* a type that spk_type_find knows */
    uint32_t dim_count;                         /* 1..4 */
    uint64_t dims[4];                           /* ne0 first, each >= 1; missing ones are 1 */
    uint64_t size_bytes;                        /* exact, without padding */
    uint32_t part_index;                        /* which file of a split model */
    uint64_t file_offset_bytes;                 /* of the data, in that file */
    const uint8_t *data;                        /* mapped, read-only; aligned as in the file, up to a page */
} spk_gguf_tensor;

typedef struct spk_gguf spk_gguf;

/* Open a model; any part of a split one may be given, the others are found beside it by name.
 * On success the caller owns *out.  The object is immutable: any number of threads may read it. */
SPK_MUST_CHECK spk_status spk_gguf_open(const char *path, spk_gguf **out, spk_error *err);
void spk_gguf_close(spk_gguf *gguf);                     /* NULL is fine */

uint32_t          spk_gguf_version(const spk_gguf *gguf);          /* 2 or 3, of the first part */
uint64_t          spk_gguf_alignment_bytes(const spk_gguf *gguf);  /* of the first part */
const spk_kv_set *spk_gguf_kvs(const spk_gguf *gguf);              /* of the first part, split.* included */
uint64_t          spk_gguf_tensor_count(const spk_gguf *gguf);     /* over all parts */
/* In file order, parts one after another. */
const spk_gguf_tensor *spk_gguf_tensor_at(const spk_gguf *gguf, uint64_t index);
const spk_gguf_tensor *spk_gguf_tensor_find(const spk_gguf *gguf, const char *name); /* NULL if absent */

uint32_t    spk_gguf_part_count(const spk_gguf *gguf);
const char *spk_gguf_part_path(const spk_gguf *gguf, uint32_t part_index);
uint64_t    spk_gguf_part_bytes(const spk_gguf *gguf, uint32_t part_index);

/* What shows, without reading it, that a file is the one that was opened, and as it was then. */
typedef struct {
    uint64_t device, inode, size_bytes, modified_s, modified_ns;
} spk_gguf_stamp;
spk_gguf_stamp spk_gguf_part_stamp(const spk_gguf *gguf, uint32_t part_index);   /* when it was opened */
/* SPK_E_IO, naming the part, if one has another size or time of change than when it was opened. */
SPK_MUST_CHECK spk_status spk_gguf_check_unchanged(const spk_gguf *gguf, spk_error *err);

/* Copy bytes [offset, offset + size) of a part into `out` with pread: a file that shrank is an error here, not a signal.
 * Thread-safe. */
SPK_MUST_CHECK spk_status spk_gguf_read(const spk_gguf *gguf, uint32_t part_index, uint64_t offset_bytes,
                                        uint64_t size_bytes, void *out, spk_error *err);
/* The same bytes where they lie in the mapping, without a copy: the converter's way to read.  They are brought in first, so a file
 * that has shrunk is an error here, too; one that shrinks while *out is used is a signal.  Where the system cannot do that, they
 * are copied to buffer[size_bytes].  Valid while gguf and buffer are.  Thread-safe. */
SPK_MUST_CHECK spk_status spk_gguf_view(const spk_gguf *gguf, uint32_t part_index, uint64_t offset_bytes,
                                        uint64_t size_bytes, void *buffer, const uint8_t **out, spk_error *err);
/* The mapping no longer holds these pages, until somebody asks for them again.  Any thread, at any time. */
void spk_gguf_forget(const spk_gguf *gguf, uint32_t part_index, uint64_t offset_bytes, uint64_t size_bytes);

/* ---- Writer.  Writes a temporary file, then fsync and rename (formats/outfile.h); nothing is left on failure. ---- */

typedef struct {
    char     name[SPK_GGUF_NAME_BYTES_MAX + 1];
    uint32_t type, dim_count;
    uint64_t dims[4];
} spk_gguf_tensor_spec;

typedef struct spk_gguf_writer spk_gguf_writer;

/* What tells two files apart. */
typedef struct {
    uint64_t   size_bytes;
    spk_digest digest;
} spk_gguf_identity;

typedef struct {
    const char                 *path;
    bool                        replace;         /* else an existing path is SPK_E_EXISTS */
    struct spk_outfile         *file;            /* begun at path: taken over in every case; NULL: it is begun here */
    uint32_t                    version;         /* 2 or 3 */
    uint64_t                    alignment_bytes; /* must agree with general.alignment in kv_bytes, 32 if absent */
    const uint8_t              *kv_bytes;        /* serialised entries, borrowed until begin returns */
    uint64_t                    kv_bytes_size, kv_count;
    const spk_gguf_tensor_spec *tensors;         /* borrowed until begin returns */
    uint64_t                    tensor_count;
    uint64_t                    wanted_bytes;    /* padding of the last tensor stops at this size of the file, if it is
                                                  * reached there; else (0) that tensor is padded like the others */
    spk_gguf_identity          *identity;        /* filled in by a commit that succeeds; NULL: not wanted */
} spk_gguf_writer_options;

/* Writes header and tensor infos.  SPK_E_SPACE if the file system has less room than the whole file needs. */
SPK_MUST_CHECK spk_status spk_gguf_writer_begin(const spk_gguf_writer_options *options,
                                                spk_gguf_writer **out, spk_error *err);
/* Append data of the tensors in order, in pieces of any size; padding is added (zeros) by the writer. */
SPK_MUST_CHECK spk_status spk_gguf_writer_append(spk_gguf_writer *writer, const void *bytes,
                                                 uint64_t size_bytes, spk_error *err);
/* Checks that every byte was given, fsync, rename.  Frees the writer in every case. */
SPK_MUST_CHECK spk_status spk_gguf_writer_commit(spk_gguf_writer *writer, spk_error *err);
void spk_gguf_writer_abort(spk_gguf_writer *writer);     /* removes the temporary file; NULL is fine */

#endif
