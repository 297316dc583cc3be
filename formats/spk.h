/* formats/spk.h - the .spk pack: reader and writer.  The normative text is formats/spk-format.md.
 *
 * A pack is one self-contained file: header and section table (one 4096-byte block), CONFIG, TENSORS, META,
 * PROVENANCE and CHUNKS sections, then up to four data sections (spk_place), each 4096-byte aligned.
 *
 * Opening reads and checks everything but the weights; weights are mapped and only touched by kernels.
 */
#ifndef SPK_SPK_H
#define SPK_SPK_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/digest.h"
#include "formats/kv.h"
#include "formats/model.h"
#include "formats/status.h"

enum {
    SPK_VERSION_MAJOR = 1,
    SPK_VERSION_MINOR = 0,
    SPK_BLOCK_ALIGN   = 4096,
    SPK_CHUNK_BYTES   = 4 << 20          /* unit of data checksums */
};
#define SPK_META_BYTES_MAX (UINT64_C(1) << 30)   /* unpacked metadata: bounds a zstd bomb */

/* Where a pack came from; text fields are NUL-terminated, owned by whoever filled the struct. */
typedef struct {
    const char *source_name;             /* base name of the first part */
    uint64_t    source_bytes;            /* sum over parts */
    spk_digest  source_digest;           /* XXH3-128 of the parts' bytes, one after another */
    uint32_t    source_version;          /* of GGUF */
    uint64_t    source_alignment_bytes;
    const char *recipe_name;
    const char *recipe_text;             /* complete: recipe file and --set rules */
    const char *imatrix_name;            /* "" if none */
    const char *weights_name;            /* base name of the file that requantized weights are fitted from, of its first
                                          * part; "" if that is the source, and then the next two are zero */
    uint64_t    weights_bytes;           /* sum over parts */
    spk_digest  weights_digest;          /* as source_digest */
    const char *tool_version;            /* "spk-pack 0.1.0" */
} spk_provenance;

typedef struct spk_pack spk_pack;

/* Map and check: header, section table, all metadata sections (checksums included), every directory entry
 * against its section.  The weights are not read.  That CONFIG fits META and the tensors is the model's
 * business: spk_model_config_check.  Immutable once open; any number of threads may use it.
 * SPK_E_MAGIC, SPK_E_VERSION, SPK_E_UNSUPPORTED (required feature, layout), SPK_E_CHECKSUM, SPK_E_CORRUPT. */
SPK_MUST_CHECK spk_status spk_pack_open(const char *path, spk_pack **out, spk_error *err);
void spk_pack_close(spk_pack *pack);     /* NULL is fine */

const spk_model_config *spk_pack_config(const spk_pack *pack);
const spk_kv_set       *spk_pack_kvs(const spk_pack *pack);
const spk_provenance   *spk_pack_provenance(const spk_pack *pack);
uint64_t                spk_pack_tensor_count(const spk_pack *pack);
const spk_tensor       *spk_pack_tensors(const spk_pack *pack);         /* in the source's order */
/* Mapped bytes of a data section (spk_place); NULL and 0 if the pack has none.  4096-byte aligned. */
const uint8_t          *spk_pack_section(const spk_pack *pack, uint32_t place, uint64_t *size_bytes);
uint64_t                spk_pack_section_file_offset(const spk_pack *pack, uint32_t place);
uint64_t                spk_pack_file_bytes(const spk_pack *pack);
spk_digest              spk_pack_root(const spk_pack *pack);
uint32_t                spk_pack_version(const spk_pack *pack);         /* major << 16 | minor */
const char             *spk_pack_path(const spk_pack *pack);
/* The open file, for reads at an offset by any thread; closed with the pack.  Unlike the mapping it ends in an error, not in
 * a signal, where somebody has truncated the file. */
int                     spk_pack_file(const spk_pack *pack);

/* Check what opening did not: every data chunk, with thread_count threads.  SPK_E_CHECKSUM names the first bad chunk
 * and the first tensor in it.  progress (may be NULL) is called from the caller's thread with bytes done. */
SPK_MUST_CHECK spk_status spk_pack_verify(const spk_pack *pack, uint32_t thread_count,
                                          void (*progress)(void *context, uint64_t done_bytes, uint64_t total_bytes),
                                          void *context, spk_error *err);
/* The same check for one chunk of a data section that the pack has: chunk_index counts from the section's start, bytes are
 * SPK_CHUNK_BYTES, or what is left of the section, wherever the caller has read them to.  Any thread. */
SPK_MUST_CHECK spk_status spk_pack_verify_chunk(const spk_pack *pack, uint32_t place, uint64_t chunk_index,
                                                const void *bytes, spk_error *err);

/* ---- Writer: sizes first, then the data sections, then the metadata. ---- */

typedef struct spk_pack_writer spk_pack_writer;

typedef struct {
    const char             *path;
    bool                    replace;
    struct spk_outfile     *file;        /* begun at path, for which replace and resume hold: taken over in every case.
                                          * NULL: it is begun here */
    const spk_model_config *config;
    const uint8_t          *kv_bytes;    /* GGUF entries exactly as in the source; borrowed until begin returns */
    uint64_t                kv_bytes_size, kv_count;
    uint64_t                tensor_count;
    uint64_t                section_bytes[SPK_PLACE_COUNT];   /* from spk_model_place; index place - 1 */
    const spk_digest       *job;         /* names all that the data depend on; NULL: a killed run cannot be gone on with */
    bool                    resume;      /* go on from what a killed run of the same job left, and leave what was done where this
                                          * run fails with SPK_E_SPACE (the message says so); job is not NULL */
} spk_pack_writer_options;

SPK_MUST_CHECK spk_status spk_pack_writer_begin(const spk_pack_writer_options *options, spk_pack_writer **out,
                                                spk_error *err);
/* Append data to a section (spk_place), in pieces of any size; hashes chunks as they pass.  One caller at a time.  Large pieces
 * whose address is their offset in the section, modulo SPK_BLOCK_ALIGN, are written from where they are; others are gathered. */
SPK_MUST_CHECK spk_status spk_pack_writer_append_to(spk_pack_writer *writer, uint32_t place, const void *bytes,
                                                    uint64_t size_bytes, spk_error *err);
/* The same to the first section that is not full, then to those after it: all bytes of STATIC, EXPERTS, EMBEDDING, EXTRA. */
SPK_MUST_CHECK spk_status spk_pack_writer_append(spk_pack_writer *writer, const void *bytes, uint64_t size_bytes,
                                                 spk_error *err);
/* Whether sections may take turns.  Else what is appended to one while those in front of it are not full makes the file system
 * write what is missing twice. */
bool spk_pack_writer_takes_turns(const spk_pack_writer *writer);
/* ---- Going on where a run was killed ----
 *
 * A caller that appends in stretches, always the same for a job, may leave a note after each.  In a run that resumes it asks,
 * before it makes a stretch, for one that is in the unfinished file already. */
enum { SPK_NOTE_BYTES_MAX = 208 };
/* After an append. */
void spk_pack_writer_note(spk_pack_writer *writer, const void *note, uint32_t note_bytes);
/* The next stretch, which has size_bytes of that section, out of the unfinished file: appends it and gives its note, as it was
 * left.  *done is false where it is not there, or not whole (chunks are compared with their digests); then the section is to be gone on
 * with by appending, which writes all that comes, whatever was left. */
SPK_MUST_CHECK spk_status spk_pack_writer_replay(spk_pack_writer *writer, uint32_t place, uint64_t size_bytes, void *note,
                                                 uint32_t note_bytes, bool *done, spk_error *err);
/* Bytes of data that were replayed. */
uint64_t spk_pack_writer_replayed_bytes(const spk_pack_writer *writer);
/* Writes the metadata sections and the header, fsync, rename.  Checks that every byte came, and runs the reader's
 * rules over the directory before it is published.  Frees the writer in every case. */
SPK_MUST_CHECK spk_status spk_pack_writer_commit(spk_pack_writer *writer, const spk_tensor *tensors,
                                                 const spk_provenance *provenance, spk_error *err);
void spk_pack_writer_abort(spk_pack_writer *writer);     /* removes the temporary file, but for `resume`; NULL is fine */

#endif
