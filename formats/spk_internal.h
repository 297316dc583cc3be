/* formats/spk_internal.h - what the reader, writer and verifier of packs share: on-disk structs and rules.
 *
 * Rule numbers (R1, R2, ...) are those of spk-format.md, and error texts begin with them.  Every multi-byte field is
 * little-endian, which is also the only byte order spk runs on, so structs are copied as they lie.
 */
#ifndef SPK_SPK_INTERNAL_H
#define SPK_SPK_INTERNAL_H

#include <stddef.h>
#include <stdint.h>
#include "formats/spk.h"

/* The first byte is not ASCII, CR LF shows a text-mode transfer, 1A stops `type` on old systems. */
#define SPK_MAGIC "\x8fSPK\r\n\x1a\n"
enum { SPK_MAGIC_BYTES = 8, SPK_HEADER_BYTES = SPK_BLOCK_ALIGN };

enum {
    SPK_SECTION_COUNT_MAX  = 63,         /* what fits in the header block */
    SPK_TENSOR_COUNT_MAX   = 65536,
    SPK_SHARED_TENSOR_MAX  = 16          /* tensors of which one address range may hold interleaved parts (R21) */
};
#define SPK_PROVENANCE_BYTES_MAX (UINT64_C(1) << 24)
#define SPK_FLAGS_REQUIRED_KNOWN UINT32_C(0)     /* no required feature exists yet */

/* Ids 1..4 are the data sections: spk_place. */
enum {
    SPK_SECTION_CONFIG = 16, SPK_SECTION_TENSORS = 17, SPK_SECTION_META = 18, SPK_SECTION_PROVENANCE = 19,
    SPK_SECTION_CHUNKS = 20
};
enum { SPK_SECTION_OPTIONAL = 1 };       /* section flag: a reader that does not know the id skips the section */

typedef struct {
    uint32_t   id, flags;
    uint64_t   offset_bytes;             /* from the start of the file */
    uint64_t   stored_bytes;             /* without the padding after it */
    uint64_t   raw_bytes;                /* after decompression; META only, else stored_bytes */
    spk_digest digest;
    uint64_t   item_count;               /* tensors, metadata entries, records, chunks; CONFIG: 1 */
    uint64_t   reserved;                 /* zero */
} spk_disk_section;
SPK_STATIC_ASSERT(sizeof(spk_disk_section) == 64 && offsetof(spk_disk_section, digest) == 32, "on disk");

typedef struct {
    uint8_t          magic[SPK_MAGIC_BYTES];
    uint16_t         version_major, version_minor;
    uint32_t         flags_required, flags_optional;
    uint32_t         section_count;
    uint64_t         file_bytes;
    spk_digest       root;               /* of the section table */
    spk_digest       checksum;           /* of this block, with this field zero */
    spk_disk_section sections[SPK_SECTION_COUNT_MAX];
} spk_disk_header;
SPK_STATIC_ASSERT(sizeof(spk_disk_header) == SPK_HEADER_BYTES, "on disk");
SPK_STATIC_ASSERT(offsetof(spk_disk_header, file_bytes) == 24 && offsetof(spk_disk_header, checksum) == 48, "on disk");
SPK_STATIC_ASSERT(offsetof(spk_disk_header, sections) == 64, "on disk");

typedef struct {
    char     name[64];                   /* NUL-padded */
    uint32_t type, source_type, layout, section, dim_count;
    uint32_t reserved0;                  /* zero */
    uint64_t dims[4];
    uint64_t offset_bytes, unit_stride_bytes, matrix_stride_bytes;
    double   relative_rmse, max_abs_error, cosine;
    uint64_t reserved[3];                /* zero */
} spk_disk_tensor;
SPK_STATIC_ASSERT(sizeof(spk_disk_tensor) == 192 && offsetof(spk_disk_tensor, dims) == 88, "on disk");
SPK_STATIC_ASSERT(offsetof(spk_disk_tensor, relative_rmse) == 144, "on disk");

struct spk_pack {
    char            *path;
    int              fd;
    const uint8_t   *map;                /* the whole file */
    uint64_t         file_bytes;
    spk_disk_header  header;             /* a copy, so that what was checked is what is used */
    spk_digest      *digests;            /* CHUNKS, likewise */
    spk_model_config config;
    uint64_t         tensor_count;
    spk_tensor      *tensors;
    uint8_t         *kv_bytes;           /* META, unpacked */
    spk_kv_set       kvs;
    spk_provenance   provenance;         /* its texts are owned */
};

/* NULL if there is none. */
const spk_disk_section *spk_section_find(const spk_disk_header *header, uint32_t id);
/* "META"; "unknown" for an id that version 1.0 does not define. */
const char *spk_section_name(uint32_t id);
bool spk_section_is_known(uint32_t id);
static inline bool spk_section_is_data(uint32_t id) { return id >= 1 && id <= SPK_PLACE_COUNT; }

/* Chunks of a data section; the last may be short. */
uint64_t spk_chunk_count(uint64_t section_bytes);
/* Index in CHUNKS of the digest of the first chunk of a data section of this header's table. */
uint64_t spk_chunk_first(const spk_disk_header *header, const spk_disk_section *section);

/* Root and checksum of a header whose other fields are set. */
spk_digest spk_header_root(const spk_disk_header *header);
spk_digest spk_header_checksum(const spk_disk_header *header);

/* R1, of a file's first bytes: what else it seems to be is named. */
SPK_MUST_CHECK spk_status spk_rules_magic(const uint8_t *bytes, uint64_t size_bytes, const char *where, spk_error *err);
/* R1 to R10, of a header block and the size of its file. */
SPK_MUST_CHECK spk_status spk_rules_header(const spk_disk_header *header, uint64_t file_bytes, const char *where,
                                           spk_error *err);
/* R13; has_experts: the pack has a section EXPERTS. */
SPK_MUST_CHECK spk_status spk_rules_config(const spk_model_config *config, bool has_experts, const char *where,
                                           spk_error *err);
/* R15 to R21, of all tensors; section_bytes by place - 1, expert_count as in CONFIG. */
SPK_MUST_CHECK spk_status spk_rules_tensors(const spk_tensor *tensors, uint64_t tensor_count,
                                            const uint64_t section_bytes[SPK_PLACE_COUNT], uint32_t expert_count,
                                            const char *where, spk_error *err);

/* Extent of a tensor that passed the rules. */
typedef struct {
    uint64_t unit_bytes, unit_count;     /* of one matrix */
    uint64_t matrix_count;
    uint64_t matrix_bytes;               /* first to past the last byte of a matrix, gaps included */
    uint64_t span_bytes;                 /* likewise of the tensor */
} spk_tensor_extent;
spk_tensor_extent spk_tensor_extent_of(const spk_tensor *tensor);

/* Keys of the PROVENANCE records that are texts, in the order of the fields in spk_provenance. */
enum { SPK_PROVENANCE_TEXT_COUNT = 5 };
extern const char *const spk_provenance_text_keys[SPK_PROVENANCE_TEXT_COUNT];
#define SPK_PROVENANCE_BYTES_KEY     "source.bytes"
#define SPK_PROVENANCE_DIGEST_KEY    "source.xxh3_128"
#define SPK_PROVENANCE_VERSION_KEY   "source.gguf_version"
#define SPK_PROVENANCE_ALIGNMENT_KEY "source.alignment"
/* Three more, together or not at all. */
#define SPK_PROVENANCE_WEIGHTS_NAME_KEY   "weights.name"
#define SPK_PROVENANCE_WEIGHTS_BYTES_KEY  "weights.bytes"
#define SPK_PROVENANCE_WEIGHTS_DIGEST_KEY "weights.xxh3_128"

#endif
