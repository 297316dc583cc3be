/* formats/gguf_internal.h - what the reader of one file, the reader of a model and the writer share. */
#ifndef SPK_GGUF_INTERNAL_H
#define SPK_GGUF_INTERNAL_H

#include "formats/gguf.h"
#include "formats/name_index.h"

enum {
    SPK_GGUF_HEADER_BYTES      = 24,     /* magic, u32 version, u64 tensor count, u64 metadata count */
    SPK_GGUF_ALIGNMENT_DEFAULT = 32
};

/* One file. */
typedef struct {
    char            *path;
    int              fd;
    const uint8_t   *bytes;              /* mapped; NULL: not open */
    uint64_t         size_bytes;
    spk_gguf_stamp   stamp;
    uint32_t         version;
    uint64_t         alignment_bytes;
    spk_kv_set       kvs;
    uint64_t         tensor_count;
    spk_gguf_tensor *tensors;            /* part_index 0 */
} spk_gguf_part;

/* Map and check one file by itself; its tensors' names may still be duplicates. */
SPK_MUST_CHECK spk_status spk_gguf_part_open(const char *path, spk_gguf_part *out, spk_error *err);
SPK_MUST_CHECK spk_status spk_gguf_part_look(const spk_gguf_part *part, spk_gguf_stamp *out, spk_error *err);
void spk_gguf_part_close(spk_gguf_part *part);           /* safe on a zeroed part */

/* The rules below hold for what is read and for what is written; `where` names the file in messages. */

/* general.alignment, or the default: a power of two up to the limit, stored as any integer type. */
SPK_MUST_CHECK spk_status spk_gguf_check_alignment(const spk_kv_set *kvs, const char *where, uint64_t *out_bytes,
                                                   spk_error *err);
/* Length and characters of a tensor's name; `place` says which tensor ("tensor 3 of 12"). */
SPK_MUST_CHECK spk_status spk_gguf_check_name(spk_text name, const char *where, const char *place, spk_error *err);
/* Type, dimensions and the bytes they make. */
SPK_MUST_CHECK spk_status spk_gguf_check_shape(const spk_gguf_tensor_spec *tensor, const char *where,
                                               uint64_t *out_bytes, spk_error *err);

/* value + alignment must not overflow. */
static inline uint64_t spk_gguf_align_up(uint64_t value, uint64_t alignment_bytes) {
    return (value + alignment_bytes - 1) & ~(alignment_bytes - 1);
}

#endif
