/* requant/repair.c - see repair.h.
 *
 * The pack's directory is a plan: types and places are in it, so no recipe is needed.  The runs that touch a damaged chunk
 * are filled as in a conversion.  So it must be a plan that a conversion could have: a pack may be legal and have its tensors
 * elsewhere, and filling runs of such places would write past them.
 */
#include "requant/repair.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "formats/census.h"
#include "requant/convert_internal.h"

#define READ_BYTES (UINT64_C(4) << 20)   /* of the source at a time */

typedef struct {
    const spk_repair_options *options;
    spk_pack           *pack;
    int                 fd;              /* of the pack, for writing */
    spk_convert_options convert;
    spk_convert_plan    plan;
    spk_convert_job     job;
    spk_convert_scratch scratch;
    uint8_t            *chunk, *run_buffer;
    uint64_t            done_bytes, total_bytes;
    spk_repair_result   result;
    spk_error           unfit;           /* what is wrong with a file that the pack was made with, and that is not used then */
    spk_error           first_failure;   /* of a chunk that cannot be made, or comes out otherwise */
} repair;

static void advance(repair *r, uint64_t bytes) {
    r->done_bytes += bytes;
    if (r->options->progress != NULL) r->options->progress(r->options->progress_context, r->done_bytes, r->total_bytes);
}

static uint64_t source_bytes(const spk_gguf *source) {
    uint64_t sum = 0;
    for (uint32_t part = 0; part < spk_gguf_part_count(source); part++) sum += spk_gguf_part_bytes(source, part);
    return sum;
}

/* ---- Is it the source? ---- */

static spk_status digest_source(repair *r, spk_digester *digester, spk_error *err) {
    const spk_gguf *source = r->options->source;
    for (uint32_t part = 0; part < spk_gguf_part_count(source); part++) {
        uint64_t size = spk_gguf_part_bytes(source, part);
        for (uint64_t at = 0, count; at < size; at += count) {
            count = size - at < READ_BYTES ? size - at : READ_BYTES;
            SPK_TRY(spk_gguf_read(source, part, at, count, r->chunk, err));
            spk_digester_add(digester, r->chunk, count);
            advance(r, count);
        }
    }
    return SPK_OK;
}

static spk_status check_source(repair *r, spk_error *err) {
    const spk_provenance *p = spk_pack_provenance(r->pack);
    const char *path = spk_gguf_part_path(r->options->source, 0);
    uint64_t bytes = source_bytes(r->options->source);
    if (bytes != p->source_bytes)
        return spk_fail(err, SPK_E_MISMATCH, "%s: has %" PRIu64 " bytes; %s was made from %s of %" PRIu64 " bytes", path, bytes,
                        spk_pack_path(r->pack), p->source_name, p->source_bytes);
    spk_digester *digester;
    SPK_TRY(spk_digester_create(&digester, err));
    spk_status status = digest_source(r, digester, err);
    spk_digest digest = spk_digester_result(digester);
    spk_digester_destroy(digester);
    SPK_TRY(status);
    if (memcmp(&digest, &p->source_digest, sizeof digest) == 0) return SPK_OK;
    return spk_fail(err, SPK_E_MISMATCH, "%s: is not the file that %s was made from (%s): another digest", path,
                    spk_pack_path(r->pack), p->source_name);
}

/* The source's tensor, in its type or in one that a recipe can choose for it. */
static spk_status check_tensor(const repair *r, uint64_t index, spk_error *err) {
    const spk_tensor *t = &spk_pack_tensors(r->pack)[index];
    const spk_gguf_tensor *s = spk_gguf_tensor_at(r->options->source, index);
    const char *path = spk_pack_path(r->pack), *source_path = spk_gguf_part_path(r->options->source, 0);
    if (strcmp(t->name, s->name) != 0 || t->source_type != s->type || memcmp(t->dims, s->dims, sizeof t->dims) != 0)
        return spk_fail(err, SPK_E_MISMATCH, "%s: tensor %" PRIu64 ", '%s', is not what spk-pack makes of '%s' of %s", path, index,
                        t->name, s->name, source_path);
    uint32_t layer;
    spk_role role = spk_model_role(spk_pack_config(r->pack), t->name, &layer);
    bool may_change = spk_quant_can_make(t->type) && role != SPK_ROLE_EXTRA && !spk_role_is_protected(role);
    if (!spk_tensor_is_requantized(t) || may_change) return SPK_OK;
    return spk_fail(err, SPK_E_MISMATCH, "%s: tensor '%s' is %s, expected %s as in %s: spk-pack does not requantize it so", path,
                    t->name, spk_type_name(t->type), spk_type_name(t->source_type), source_path);
}

/* The directory must be one that could have come of the source: its tensors are read there by their index, and a pack's
 * checksums do not say who made it. */
static spk_status check_directory(const repair *r, spk_error *err) {
    const spk_gguf *source = r->options->source;
    uint64_t count = spk_pack_tensor_count(r->pack), section_bytes[SPK_PLACE_COUNT];
    if (count != spk_gguf_tensor_count(source))
        return spk_fail(err, SPK_E_MISMATCH, "%s: has %" PRIu64 " tensors, %s has %" PRIu64, spk_pack_path(r->pack), count,
                        spk_gguf_part_path(source, 0), spk_gguf_tensor_count(source));
    for (uint64_t i = 0; i < count; i++) SPK_TRY(check_tensor(r, i, err));
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++)
        (void)spk_pack_section(r->pack, place, &section_bytes[place - 1]);
    return spk_model_place_check(spk_pack_config(r->pack), spk_pack_tensors(r->pack), count, section_bytes, spk_pack_path(r->pack),
                                 err);
}

/* ---- The work ---- */

static spk_quant_effort effort_of(const spk_provenance *p) {
    if (strstr(p->tool_version, ", effort fast") != NULL) return SPK_EFFORT_FAST;
    return strstr(p->tool_version, ", effort best") != NULL ? SPK_EFFORT_BEST : SPK_EFFORT_NORMAL;
}

/* What stops a repair: it is no fault of the files that help. */
static bool is_of_the_system(spk_status status) { return status == SPK_E_IO || status == SPK_E_MEMORY; }

/* A file of better weights that is not the one: what was fitted from it cannot be made, all else can. */
static spk_status use_weights(repair *r, spk_error *err) {
    if (*spk_pack_provenance(r->pack)->weights_name == '\0') return SPK_OK;
    r->unfit = r->options->no_weights;
    if (r->options->weights == NULL) return SPK_OK;
    r->convert.weights = r->options->weights;
    spk_status status = spk_convert_check_weights(&r->convert, &r->plan, &r->unfit);
    if (status == SPK_OK) return SPK_OK;
    if (is_of_the_system(status)) return spk_fail(err, status, "%s", r->unfit.text);
    r->convert.weights = NULL;
    r->plan.fitted_count = 0;
    memset(r->plan.counterparts, 0, r->plan.tensor_count * sizeof *r->plan.counterparts);
    return SPK_OK;
}

static spk_status make_job(repair *r, spk_error *err) {
    const spk_provenance *p = spk_pack_provenance(r->pack);
    spk_convert_plan *plan = &r->plan;
    r->convert = (spk_convert_options){ .source = r->options->source, .imatrix_name = "", .effort = effort_of(p) };
    if (*p->imatrix_name != '\0') {
        r->convert.imatrix = r->options->imatrix;
        r->convert.calibration = r->options->calibration;
    }
    plan->config = *spk_pack_config(r->pack);
    plan->tensor_count = spk_pack_tensor_count(r->pack);
    plan->tensors = calloc(plan->tensor_count + 1, sizeof *plan->tensors);
    plan->counterparts = calloc(plan->tensor_count + 1, sizeof *plan->counterparts);
    if (plan->tensors == NULL || plan->counterparts == NULL) return spk_convert_out_of_memory(r->options->source, err);
    memcpy(plan->tensors, spk_pack_tensors(r->pack), plan->tensor_count * sizeof *plan->tensors);
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++)
        (void)spk_pack_section(r->pack, place, &plan->section_bytes[place - 1]);
    SPK_TRY(use_weights(r, err));
    if (*p->imatrix_name != '\0' && r->unfit.status == SPK_OK) r->unfit = r->options->no_statistics;
    SPK_TRY(spk_convert_make_job(&r->convert, plan, &r->job, err));
    r->run_buffer = malloc(r->job.run_bytes_max + 1);
    if (r->run_buffer == NULL || !spk_convert_scratch_alloc(&r->job, &r->scratch))
        return spk_convert_out_of_memory(r->options->source, err);
    return SPK_OK;
}

/* Bytes [begin, begin + size) of a section, out of the runs that touch them. */
static spk_status make_bytes(repair *r, uint32_t place, uint64_t begin, uint64_t size, spk_error *err) {
    memset(r->chunk, 0, size);
    for (uint64_t i = 0; i < r->job.run_count; i++) {
        const spk_run *run = &r->job.runs[i];
        if (run->section != place || run->offset_bytes >= begin + size || run->offset_bytes + run->size_bytes <= begin) continue;
        spk_quant_error sums[SPK_RUN_PIECE_MAX];
        uint64_t passed[SPK_CONVERT_FILE_COUNT];
        SPK_TRY(spk_convert_fill(&r->job, run, &r->scratch, r->run_buffer, sums, passed, err));
        uint64_t from = run->offset_bytes > begin ? run->offset_bytes : begin, end = run->offset_bytes + run->size_bytes;
        if (end > begin + size) end = begin + size;
        memcpy(r->chunk + (from - begin), r->run_buffer + (from - run->offset_bytes), end - from);
    }
    return SPK_OK;
}

static spk_status write_chunk(const repair *r, uint64_t at, uint64_t size, spk_error *err) {
    for (uint64_t done = 0; done < size;) {
        ssize_t written = pwrite(r->fd, r->chunk + done, size - done, (off_t)(at + done));
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0)
            return spk_fail(err, SPK_E_IO, "%s: cannot write %" PRIu64 " bytes at %" PRIu64 ": %s", spk_pack_path(r->pack),
                            size - done, at + done, strerror(errno));
        done += (uint64_t)written;
    }
    return SPK_OK;
}

/* The chunk as it is in the file, in r->chunk. */
static spk_status read_chunk(const repair *r, uint64_t at, uint64_t size, spk_error *err) {
    for (uint64_t done = 0; done < size;) {
        ssize_t got = pread(spk_pack_file(r->pack), r->chunk + done, size - done, (off_t)(at + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0)
            return spk_fail(err, SPK_E_IO, "%s: cannot read %" PRIu64 " bytes at %" PRIu64 ": %s", spk_pack_path(r->pack),
                            size - done, at + done, got < 0 ? strerror(errno) : "the file shrank");
        done += (uint64_t)got;
    }
    return SPK_OK;
}

/* The first chunk that stays damaged; `why` it cannot be made, or NULL where it only comes out otherwise. */
static void note_failure(repair *r, uint64_t at, uint64_t size, const char *why) {
    const spk_provenance *p = spk_pack_provenance(r->pack);
    bool needs_weights = *p->weights_name != '\0', needs_imatrix = *p->imatrix_name != '\0';
    if (r->first_failure.status != SPK_OK) return;
    if (why != NULL)
        (void)spk_fail(&r->first_failure, SPK_E_MISMATCH, "%s: %" PRIu64 " bytes at file offset %" PRIu64 " cannot be made again, "
                       "and stay damaged: %s", spk_pack_path(r->pack), size, at, why);
    else
        (void)spk_fail(&r->first_failure, SPK_E_MISMATCH, "%s: %" PRIu64 " bytes at file offset %" PRIu64 " come out otherwise than "
                       "they were, and stay damaged: made by %s%s%s%s%s", spk_pack_path(r->pack), size, at, p->tool_version,
                       needs_weights ? ", fitted from " : "", needs_weights ? p->weights_name : "",
                       needs_imatrix ? ", with the imatrix or calibration " : "", needs_imatrix ? p->imatrix_name : "");
}

static spk_status repair_chunk(repair *r, uint32_t place, uint64_t index, uint64_t size, spk_error *err) {
    uint64_t begin = index * SPK_CHUNK_BYTES, at = spk_pack_section_file_offset(r->pack, place) + begin;
    spk_error unlike;
    if (r->job.runs == NULL) SPK_TRY(make_job(r, err));
    spk_status status = make_bytes(r, place, begin, size, &unlike);
    if (is_of_the_system(status)) return spk_fail(err, status, "%s", unlike.text);
    if (status == SPK_OK && spk_pack_verify_chunk(r->pack, place, index, r->chunk, NULL) == SPK_OK) {
        SPK_TRY(write_chunk(r, at, size, err));
        r->result.repaired_count++;
        r->result.repaired_bytes += size;
    } else {                                             /* without a file that it was made with, that is why */
        note_failure(r, at, size, r->unfit.status != SPK_OK ? r->unfit.text : status != SPK_OK ? unlike.text : NULL);
    }
    return SPK_OK;
}

static spk_status repair_sections(repair *r, spk_error *err) {
    spk_error damage;
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t section_bytes, offset = spk_pack_section_file_offset(r->pack, place);
        (void)spk_pack_section(r->pack, place, &section_bytes);
        for (uint64_t at = 0, size; at < section_bytes; at += size) {
            size = section_bytes - at < SPK_CHUNK_BYTES ? section_bytes - at : SPK_CHUNK_BYTES;
            SPK_TRY(read_chunk(r, offset + at, size, err));
            advance(r, size);
            if (spk_pack_verify_chunk(r->pack, place, at / SPK_CHUNK_BYTES, r->chunk, &damage) == SPK_OK) continue;
            r->result.damaged_count++;
            SPK_TRY(repair_chunk(r, place, at / SPK_CHUNK_BYTES, size, err));
        }
    }
    return SPK_OK;
}

/* To write to what was opened to be read, and to no file that has taken its name meanwhile. */
static spk_status open_to_write(repair *r, const char *pack_path, spk_error *err) {
    struct stat opened, found;
    r->fd = open(pack_path, O_RDWR | O_CLOEXEC);
    if (r->fd < 0 || fstat(r->fd, &found) != 0 || fstat(spk_pack_file(r->pack), &opened) != 0)
        return spk_fail(err, SPK_E_IO, "%s: cannot be opened to repair it: %s", pack_path, strerror(errno));
    if (opened.st_dev == found.st_dev && opened.st_ino == found.st_ino) return SPK_OK;
    return spk_fail(err, SPK_E_IO, "%s: was replaced while it was opened", pack_path);
}

static spk_status run(repair *r, const char *pack_path, spk_error *err) {
    SPK_TRY(spk_pack_open(pack_path, &r->pack, err));
    SPK_TRY(spk_model_config_check(spk_pack_config(r->pack), spk_pack_kvs(r->pack), spk_pack_tensors(r->pack),
                                   spk_pack_tensor_count(r->pack), pack_path, err));
    r->total_bytes = spk_pack_provenance(r->pack)->source_bytes;
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t section_bytes;
        (void)spk_pack_section(r->pack, place, &section_bytes);
        r->total_bytes += section_bytes;
    }
    r->chunk = malloc(SPK_CHUNK_BYTES);
    if (r->chunk == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory for a chunk", pack_path);
    SPK_TRY(open_to_write(r, pack_path, err));
    SPK_TRY(check_source(r, err));
    SPK_TRY(check_directory(r, err));
    SPK_TRY(repair_sections(r, err));
    SPK_TRY(spk_gguf_check_unchanged(r->options->source, err));
    if (fsync(r->fd) != 0) return spk_fail(err, SPK_E_IO, "%s: cannot sync: %s", pack_path, strerror(errno));
    if (r->first_failure.status == SPK_OK) return SPK_OK;
    return spk_fail(err, r->first_failure.status, "%s; %" PRIu64 " of %" PRIu64 " damaged chunks were repaired", r->first_failure.text,
                    r->result.repaired_count, r->result.damaged_count);
}

spk_status spk_repair(const char *pack_path, const spk_repair_options *options, spk_repair_result *result, spk_error *err) {
    repair r = { .options = options, .fd = -1 };
    spk_status status = run(&r, pack_path, err);
    *result = r.result;
    spk_convert_scratch_free(&r.scratch);
    spk_convert_plan_free(&r.plan);
    free(r.job.runs);
    free(r.run_buffer);
    free(r.chunk);
    if (r.fd >= 0) (void)close(r.fd);
    spk_pack_close(r.pack);
    return status;
}
