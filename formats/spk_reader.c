/* formats/spk_reader.c - opens a pack: maps the file, runs the rules of spk-format.md, hands out views.
 *
 * Refuses whatever breaks a rule; repairs nothing.  The weights are mapped and not read: spk_verify.c does that.
 * The file must stay as it is while it is open.  A mapped file that somebody truncates ends the process with SIGBUS;
 * packs are replaced by rename (formats/outfile.h), which leaves the old file whole for those who have it open.
 * No madvise here: the kernel's default read-ahead was as fast as any advice when verifying from a cold cache, and
 * only the runtime knows which sections it will read.
 */
#include "formats/spk_internal.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <zstd.h>

#include "formats/infile.h"

/* ---- File and header ---- */

static spk_status map_file(spk_pack *pack, spk_error *err) {
    SPK_TRY(spk_infile_open(pack->path, "a .spk pack", &pack->fd, &pack->file_bytes, err));
    if (pack->file_bytes == 0)
        return spk_fail(err, SPK_E_MAGIC, "%s: R1: not a .spk pack: the file is empty", pack->path);
    void *map = mmap(NULL, (size_t)pack->file_bytes, PROT_READ, MAP_SHARED, pack->fd, 0);
    if (map == MAP_FAILED)
        return spk_fail(err, SPK_E_IO, "%s: mapping %" PRIu64 " bytes: %s", pack->path, pack->file_bytes, strerror(errno));
    pack->map = map;
    return SPK_OK;
}

static spk_status read_header(spk_pack *pack, spk_error *err) {
    if (pack->file_bytes < SPK_HEADER_BYTES) {
        SPK_TRY(spk_rules_magic(pack->map, pack->file_bytes, pack->path, err));
        return spk_fail(err, SPK_E_CORRUPT, "%s: R5: truncated: file has %" PRIu64 " bytes, its header alone takes %d",
                        pack->path, pack->file_bytes, SPK_HEADER_BYTES);
    }
    memcpy(&pack->header, pack->map, sizeof pack->header);
    return spk_rules_header(&pack->header, pack->file_bytes, pack->path, err);
}

/* R11.  Contiguous sections (R9) keep this to less than a page each. */
static spk_status check_padding(const spk_pack *pack, spk_error *err) {
    for (uint32_t i = 0; i < pack->header.section_count; i++) {
        const spk_disk_section *s = &pack->header.sections[i];
        for (uint64_t at = s->offset_bytes + s->stored_bytes; at % SPK_BLOCK_ALIGN != 0; at++)
            if (pack->map[at] != 0)
                return spk_fail(err, SPK_E_CORRUPT,
                                "%s: R11: byte %" PRIu64 ", padding after section %s, is %u, expected 0",
                                pack->path, at, spk_section_name(s->id), pack->map[at]);
    }
    return SPK_OK;
}

static spk_status read_chunks(spk_pack *pack, spk_error *err) {
    const spk_disk_section *s = spk_section_find(&pack->header, SPK_SECTION_CHUNKS);
    pack->digests = malloc((size_t)s->stored_bytes + 1);
    if (pack->digests == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for checksums", pack->path);
    memcpy(pack->digests, pack->map + s->offset_bytes, (size_t)s->stored_bytes);
    return SPK_OK;
}

/* R12: metadata by their bytes, data by the digests of their chunks, which CHUNKS holds. */
static spk_status check_digests(const spk_pack *pack, spk_error *err) {
    for (uint32_t i = 0; i < pack->header.section_count; i++) {
        const spk_disk_section *s = &pack->header.sections[i];
        if (!spk_section_is_known(s->id)) continue;
        spk_digest digest = spk_section_is_data(s->id)
            ? spk_digest_of(pack->digests + spk_chunk_first(&pack->header, s), s->item_count * sizeof digest)
            : spk_digest_of(pack->map + s->offset_bytes, s->stored_bytes);
        if (memcmp(&digest, &s->digest, sizeof digest) != 0)
            return spk_fail(err, SPK_E_CHECKSUM, "%s: R12: section %s at %" PRIu64 " (%" PRIu64
                            " bytes) does not match its digest in the section table", pack->path,
                            spk_section_name(s->id), s->offset_bytes, s->stored_bytes);
    }
    return SPK_OK;
}

/* ---- Metadata sections ---- */

static spk_status read_config(spk_pack *pack, spk_error *err) {
    memcpy(&pack->config, pack->map + spk_section_find(&pack->header, SPK_SECTION_CONFIG)->offset_bytes,
           sizeof pack->config);
    bool has_experts = spk_section_find(&pack->header, SPK_PLACE_EXPERTS) != NULL;
    return spk_rules_config(&pack->config, has_experts, pack->path, err);
}

/* R14, of the frame.  The library also takes frames of earlier formats, and, as empty, those that are to be skipped: the magic
 * number tells them apart. */
static spk_status check_meta_frame(const spk_pack *pack, const spk_disk_section *s, const uint8_t *stored, spk_error *err) {
    uint32_t magic = 0;
    if (s->stored_bytes >= sizeof magic) memcpy(&magic, stored, sizeof magic);
    if (magic != ZSTD_MAGICNUMBER)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R14: META begins with %08" PRIx32 ", expected a zstd frame (%08x)", pack->path, magic,
                        ZSTD_MAGICNUMBER);
    unsigned long long content_bytes = ZSTD_getFrameContentSize(stored, s->stored_bytes);
    if (content_bytes == ZSTD_CONTENTSIZE_UNKNOWN || content_bytes == ZSTD_CONTENTSIZE_ERROR)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R14: META's zstd frame does not declare its size, expected %" PRIu64 " bytes",
                        pack->path, s->raw_bytes);
    if (content_bytes != s->raw_bytes)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R14: META's zstd frame declares %llu bytes, expected %" PRIu64, pack->path,
                        content_bytes, s->raw_bytes);
    size_t frame_bytes = ZSTD_findFrameCompressedSize(stored, s->stored_bytes);
    if (ZSTD_isError(frame_bytes))
        return spk_fail(err, SPK_E_CORRUPT, "%s: R14: META is not one whole zstd frame: %s", pack->path,
                        ZSTD_getErrorName(frame_bytes));
    if (frame_bytes != s->stored_bytes)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R14: META's zstd frame has %zu bytes, expected all %" PRIu64 " of the section",
                        pack->path, frame_bytes, s->stored_bytes);
    return SPK_OK;
}

/* R14.  The declared size is checked (R10) before anything is allocated, and no byte beyond it is written. */
static spk_status read_meta(spk_pack *pack, spk_error *err) {
    const spk_disk_section *s = spk_section_find(&pack->header, SPK_SECTION_META);
    const uint8_t *stored = pack->map + s->offset_bytes;
    SPK_TRY(check_meta_frame(pack, s, stored, err));
    pack->kv_bytes = malloc(s->raw_bytes + 1);
    if (pack->kv_bytes == NULL)
        return spk_fail(err, SPK_E_MEMORY,
                        "%s: out of memory for %" PRIu64 " bytes of metadata", pack->path, s->raw_bytes);
    size_t got = ZSTD_decompress(pack->kv_bytes, s->raw_bytes, stored, s->stored_bytes);
    if (ZSTD_isError(got) || got != s->raw_bytes)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R14: META does not unpack to %" PRIu64 " bytes: %s", pack->path,
                        s->raw_bytes, ZSTD_isError(got) ? ZSTD_getErrorName(got) : "too few");
    uint64_t used = 0;
    SPK_TRY(spk_fail_in(pack->path, spk_kv_parse(pack->kv_bytes, s->raw_bytes, s->item_count, "R14: META", &pack->kvs, &used, err), err));
    if (used != s->raw_bytes)
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: R14: %" PRIu64 " metadata entries take %" PRIu64 " of %" PRIu64 " bytes",
                        pack->path, s->item_count, used, s->raw_bytes);
    return SPK_OK;
}

static spk_status read_tensors(spk_pack *pack, spk_error *err) {
    const spk_disk_section *s = spk_section_find(&pack->header, SPK_SECTION_TENSORS);
    static const uint64_t zeros[3];
    pack->tensors = malloc(s->item_count * sizeof *pack->tensors);
    if (pack->tensors == NULL)
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for %" PRIu64 " tensors", pack->path, s->item_count);
    for (uint64_t i = 0; i < s->item_count; i++) {
        spk_disk_tensor d;
        memcpy(&d, pack->map + s->offset_bytes + i * sizeof d, sizeof d);
        if (d.reserved0 != 0 || memcmp(d.reserved, zeros, sizeof zeros) != 0)
            return spk_fail(err, SPK_E_CORRUPT,
                            "%s: R20: tensor %" PRIu64 ": a reserved field is not zero", pack->path, i);
        spk_tensor t = { .type = d.type, .source_type = d.source_type, .dim_count = d.dim_count, .layout = d.layout,
                         .section = d.section, .offset_bytes = d.offset_bytes, .unit_stride_bytes = d.unit_stride_bytes,
                         .matrix_stride_bytes = d.matrix_stride_bytes, .relative_rmse = d.relative_rmse,
                         .max_abs_error = d.max_abs_error, .cosine = d.cosine };
        memcpy(t.name, d.name, sizeof t.name);
        memcpy(t.dims, d.dims, sizeof t.dims);
        pack->tensors[i] = t;
    }
    pack->tensor_count = s->item_count;
    uint64_t section_bytes[SPK_PLACE_COUNT];
    for (uint32_t p = 0; p < SPK_PLACE_COUNT; p++) (void)spk_pack_section(pack, p + 1, &section_bytes[p]);
    return spk_rules_tensors(pack->tensors, pack->tensor_count, section_bytes, pack->config.expert_count, pack->path,
                             err);
}

static spk_status find_text(const spk_pack *pack, const spk_kv_set *records, const char *key, spk_text *out,
                            spk_error *err) {
    if (!spk_kv_text(spk_kv_find(records, key), out) || memchr(out->bytes, 0, out->size_bytes) != NULL)
        return spk_fail(err, SPK_E_CORRUPT, "%s: R22: PROVENANCE has no text '%s'", pack->path, key);
    return SPK_OK;
}

static spk_status find_u64(const spk_pack *pack, const spk_kv_set *records, const char *key, uint64_t *out,
                           spk_error *err) {
    if (!spk_kv_scalar_u64(spk_kv_find(records, key), out))
        return spk_fail(err, SPK_E_CORRUPT, "%s: R22: PROVENANCE has no number '%s'", pack->path, key);
    return SPK_OK;
}

static bool parse_digest(spk_text text, spk_digest *out) {
    if (text.size_bytes != 2 * sizeof out->bytes) return false;
    for (size_t i = 0; i < text.size_bytes; i++) {
        char c = text.bytes[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0) return false;
        out->bytes[i / 2] = (uint8_t)(out->bytes[i / 2] << 4 | digit);
    }
    return true;
}

static spk_status copy_text(const spk_pack *pack, const spk_kv_set *records, const char *key, const char **out,
                            spk_error *err) {
    spk_text text;
    SPK_TRY(find_text(pack, records, key, &text, err));
    *out = strndup(text.bytes, text.size_bytes);
    return *out != NULL ? SPK_OK : spk_fail(err, SPK_E_MEMORY, "%s: out of memory for provenance", pack->path);
}

/* The records of a second source, which are there if one of them is. */
static spk_status fill_weights(spk_pack *pack, const spk_kv_set *records, spk_error *err) {
    spk_provenance *p = &pack->provenance;
    if (spk_kv_find(records, SPK_PROVENANCE_WEIGHTS_NAME_KEY) == NULL &&
        spk_kv_find(records, SPK_PROVENANCE_WEIGHTS_BYTES_KEY) == NULL &&
        spk_kv_find(records, SPK_PROVENANCE_WEIGHTS_DIGEST_KEY) == NULL) {
        p->weights_name = strdup("");
        return p->weights_name != NULL ? SPK_OK
                                       : spk_fail(err, SPK_E_MEMORY, "%s: out of memory for provenance", pack->path);
    }
    spk_text digest;
    SPK_TRY(copy_text(pack, records, SPK_PROVENANCE_WEIGHTS_NAME_KEY, &p->weights_name, err));
    SPK_TRY(find_u64(pack, records, SPK_PROVENANCE_WEIGHTS_BYTES_KEY, &p->weights_bytes, err));
    SPK_TRY(find_text(pack, records, SPK_PROVENANCE_WEIGHTS_DIGEST_KEY, &digest, err));
    if (*p->weights_name == '\0' || !parse_digest(digest, &p->weights_digest))
        return spk_fail(err, SPK_E_CORRUPT, "%s: R22: PROVENANCE: '%s' or '%s' is malformed", pack->path,
                        SPK_PROVENANCE_WEIGHTS_NAME_KEY, SPK_PROVENANCE_WEIGHTS_DIGEST_KEY);
    return SPK_OK;
}

/* R22, of parsed records.  Texts are copied, so that they end with a NUL. */
static spk_status fill_provenance(spk_pack *pack, const spk_kv_set *records, spk_error *err) {
    spk_provenance *p = &pack->provenance;
    const char **texts[SPK_PROVENANCE_TEXT_COUNT] = { &p->source_name, &p->recipe_name, &p->recipe_text,
                                                      &p->imatrix_name, &p->tool_version };
    for (size_t i = 0; i < SPK_PROVENANCE_TEXT_COUNT; i++)
        SPK_TRY(copy_text(pack, records, spk_provenance_text_keys[i], texts[i], err));
    spk_text text;
    uint64_t version;
    SPK_TRY(find_u64(pack, records, SPK_PROVENANCE_BYTES_KEY, &p->source_bytes, err));
    SPK_TRY(find_u64(pack, records, SPK_PROVENANCE_ALIGNMENT_KEY, &p->source_alignment_bytes, err));
    SPK_TRY(find_u64(pack, records, SPK_PROVENANCE_VERSION_KEY, &version, err));
    SPK_TRY(find_text(pack, records, SPK_PROVENANCE_DIGEST_KEY, &text, err));
    if (version > UINT32_MAX || !parse_digest(text, &p->source_digest))
        return spk_fail(err, SPK_E_CORRUPT, "%s: R22: PROVENANCE: '%s' or '%s' is malformed", pack->path,
                        SPK_PROVENANCE_VERSION_KEY, SPK_PROVENANCE_DIGEST_KEY);
    p->source_version = (uint32_t)version;
    return fill_weights(pack, records, err);
}

static spk_status read_provenance(spk_pack *pack, spk_error *err) {
    const spk_disk_section *s = spk_section_find(&pack->header, SPK_SECTION_PROVENANCE);
    spk_kv_set records = { 0 };
    uint64_t used = 0;
    const uint8_t *bytes = pack->map + s->offset_bytes;
    SPK_TRY(spk_fail_in(pack->path, spk_kv_parse(bytes, s->stored_bytes, s->item_count, "R22: PROVENANCE", &records, &used, err), err));
    spk_status status = used == s->stored_bytes ? fill_provenance(pack, &records, err)
        : spk_fail(err, SPK_E_CORRUPT, "%s: R22: %" PRIu64 " PROVENANCE records take %" PRIu64 " of %" PRIu64 " bytes",
                   pack->path, s->item_count, used, s->stored_bytes);
    spk_kv_free(&records);
    return status;
}

/* ---- Public ---- */

/* In this order: each step relies on the rules that those before it have checked. */
static spk_status check_all(spk_pack *pack, spk_error *err) {
    SPK_TRY(read_header(pack, err));
    SPK_TRY(check_padding(pack, err));
    SPK_TRY(read_chunks(pack, err));
    SPK_TRY(check_digests(pack, err));
    SPK_TRY(read_config(pack, err));
    SPK_TRY(read_meta(pack, err));
    SPK_TRY(read_tensors(pack, err));
    return read_provenance(pack, err);
}

spk_status spk_pack_open(const char *path, spk_pack **out, spk_error *err) {
    spk_pack *pack = calloc(1, sizeof *pack);
    if (pack == NULL || (pack->path = strdup(path)) == NULL) {
        free(pack);
        return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
    }
    pack->fd = -1;
    spk_status status = map_file(pack, err);
    if (status == SPK_OK) status = check_all(pack, err);
    if (status == SPK_OK)
        *out = pack;
    else
        spk_pack_close(pack);
    return status;
}

void spk_pack_close(spk_pack *pack) {
    if (pack == NULL) return;
    const char *texts[] = { pack->provenance.source_name, pack->provenance.recipe_name, pack->provenance.recipe_text,
                            pack->provenance.imatrix_name, pack->provenance.tool_version,
                            pack->provenance.weights_name };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) free((char *)(uintptr_t)texts[i]);
    spk_kv_free(&pack->kvs);
    free(pack->kv_bytes);
    free(pack->tensors);
    if (pack->map != NULL) (void)munmap((void *)(uintptr_t)pack->map, (size_t)pack->file_bytes);
    if (pack->fd >= 0) (void)close(pack->fd);
    free(pack->digests);
    free(pack->path);
    free(pack);
}

const spk_model_config *spk_pack_config(const spk_pack *pack) { return &pack->config; }
const spk_kv_set *spk_pack_kvs(const spk_pack *pack) { return &pack->kvs; }
const spk_provenance *spk_pack_provenance(const spk_pack *pack) { return &pack->provenance; }
uint64_t spk_pack_tensor_count(const spk_pack *pack) { return pack->tensor_count; }
const spk_tensor *spk_pack_tensors(const spk_pack *pack) { return pack->tensors; }
uint64_t spk_pack_file_bytes(const spk_pack *pack) { return pack->file_bytes; }
spk_digest spk_pack_root(const spk_pack *pack) { return pack->header.root; }
const char *spk_pack_path(const spk_pack *pack) { return pack->path; }
int spk_pack_file(const spk_pack *pack) { return pack->fd; }

uint32_t spk_pack_version(const spk_pack *pack) {
    return (uint32_t)pack->header.version_major << 16 | pack->header.version_minor;
}

const uint8_t *spk_pack_section(const spk_pack *pack, uint32_t place, uint64_t *size_bytes) {
    assert(spk_section_is_data(place));
    const spk_disk_section *s = spk_section_find(&pack->header, place);
    *size_bytes = s == NULL ? 0 : s->stored_bytes;
    return s == NULL ? NULL : pack->map + s->offset_bytes;
}

uint64_t spk_pack_section_file_offset(const spk_pack *pack, uint32_t place) {
    assert(spk_section_is_data(place));
    const spk_disk_section *s = spk_section_find(&pack->header, place);
    return s == NULL ? 0 : s->offset_bytes;
}
