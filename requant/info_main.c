/* requant/info_main.c - spk-info: what a pack or a GGUF file holds. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "formats/census.h"
#include "formats/cli.h"
#include "formats/gguf.h"
#include "formats/plain.h"
#include "formats/pool.h"
#include "formats/spk_internal.h"
#include "formats/version.h"
#include "requant/repair.h"

#define TOOL "spk-info"

static const char help[] =
    "usage: spk-info [options] FILE\n"
    "\n"
    "Say what a pack or a GGUF file holds: model, types, sections, where a pack came from.  Opening a pack checks\n"
    "all of it but the weights; --verify checks those too.\n"
    "\n"
    "  --tensors           a line for each tensor\n"
    "  --verify            check every chunk of weights against its checksum (packs only)\n"
    "  --threads N         threads of --verify [all CPUs]\n"
    "  --repair SOURCE.gguf   make damaged chunks again, from the file that the pack was made from, and write them in place;\n"
    "                      with --imatrix, --calibration and --source-weights FILE where the pack was made with such; what is\n"
    "                      only copied needs none of them, and is repaired whichever are given\n"
    "  --json              the result as JSON on stdout, the recipe's text included\n"
    "  -h, --help          this text\n"
    "  -V, --version       program and format version\n"
    "\n"
    "exit status: 0 done; 1 failed, or the file is damaged; 2 wrong usage\n"
    "example: spk-info --verify qwen3.6.spk\n";

typedef struct {
    const char *path;
    const char *source_path, *imatrix_path, *calibration_path, *weights_path;   /* of --repair; source_path NULL: not asked for */
    uint64_t    thread_count;
    bool        is_tensors, is_verify, is_json;
} arguments;

/* The file, either kind. */
typedef struct {
    const arguments  *args;
    spk_pack         *pack;              /* one of these two is NULL */
    spk_gguf         *gguf;
    spk_tensor       *gguf_tensors;      /* those of `gguf`; owned */
    const spk_tensor *tensors;
    uint64_t          tensor_count, file_bytes;
    char              model[SPK_FINGERPRINT_SIZE];
    spk_error         no_model;          /* why a GGUF file is no model that spk runs; else status SPK_OK */
    uint64_t          verified_bytes, verified_chunks;
    double            verify_s;
    spk_repair_result repaired;
} subject;

/* ---- Opening ---- */

static spk_status look_at_pack(subject *s, spk_error *err) {
    const spk_model_config *config = spk_pack_config(s->pack);
    s->tensors = spk_pack_tensors(s->pack);
    s->tensor_count = spk_pack_tensor_count(s->pack);
    s->file_bytes = spk_pack_file_bytes(s->pack);
    SPK_TRY(spk_model_config_check(config, spk_pack_kvs(s->pack), s->tensors, s->tensor_count, s->args->path, err));
    (void)spk_model_fingerprint(config, s->model, sizeof s->model);
    return SPK_OK;
}

static spk_status look_at_gguf(subject *s, spk_error *err) {
    if (s->args->is_verify)
        return spk_fail(err, SPK_E_USAGE, "--verify: %s is a GGUF file, which has no checksums", s->args->path);
    s->tensor_count = spk_gguf_tensor_count(s->gguf);
    s->tensors = s->gguf_tensors = calloc(s->tensor_count + 1, sizeof *s->gguf_tensors);
    if (s->gguf_tensors == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", s->args->path);
    for (uint64_t i = 0; i < s->tensor_count; i++)
        spk_tensor_from_gguf(spk_gguf_tensor_at(s->gguf, i), &s->gguf_tensors[i]);
    for (uint32_t part = 0; part < spk_gguf_part_count(s->gguf); part++)
        s->file_bytes += spk_gguf_part_bytes(s->gguf, part);
    spk_model_config config;
    if (spk_model_config_read(spk_gguf_kvs(s->gguf), s->tensors, s->tensor_count, s->args->path, &config,
                              &s->no_model) == SPK_OK)
        (void)spk_model_fingerprint(&config, s->model, sizeof s->model);
    return SPK_OK;
}

static spk_status open_subject(subject *s, spk_error *err) {
    const char *path = s->args->path;
    spk_status status = spk_pack_open(path, &s->pack, err);
    if (status == SPK_OK) return look_at_pack(s, err);
    if (status != SPK_E_MAGIC) return status;
    status = spk_gguf_open(path, &s->gguf, err);
    if (status == SPK_OK) return look_at_gguf(s, err);
    return status != SPK_E_MAGIC ? status : spk_fail(err, status, "%s; nor is it a .spk pack", err->text);
}

/* Of a file that helps to repair: what is wrong with it stops only what needs it. */
static spk_status excuse(spk_status status, const spk_error *why, spk_error *err) {
    return status == SPK_E_MEMORY ? spk_fail(err, status, "%s", why->text) : SPK_OK;
}

/* Before the pack is opened for all else. */
static spk_status repair(subject *s, spk_error *err) {
    const arguments *args = s->args;
    spk_gguf *source = NULL, *weights = NULL;
    spk_imatrix *imatrix = NULL;
    spk_calibration *calibration = NULL;
    spk_cli_progress progress = { .what = "repairing" };
    spk_repair_options options = { .progress = spk_cli_progress_show, .progress_context = &progress };
    spk_error *no_weights = &options.no_weights, *no_statistics = &options.no_statistics;
    spk_status status = spk_gguf_open(args->source_path, &source, err);
    if (status == SPK_OK && args->weights_path != NULL)
        status = excuse(spk_gguf_open(args->weights_path, &weights, no_weights), no_weights, err);
    if (status == SPK_OK && args->imatrix_path != NULL)
        status = excuse(spk_imatrix_open(args->imatrix_path, &imatrix, no_statistics), no_statistics, err);
    if (status == SPK_OK && args->calibration_path != NULL)
        status = excuse(spk_calibration_open(args->calibration_path, &calibration, no_statistics), no_statistics, err);
    options.source = source;
    options.weights = weights;
    options.imatrix = imatrix;
    options.calibration = calibration;
    if (status == SPK_OK) status = spk_repair(args->path, &options, &s->repaired, err);
    spk_cli_progress_end(&progress);
    spk_calibration_close(calibration);
    spk_imatrix_close(imatrix);
    spk_gguf_close(weights);
    spk_gguf_close(source);
    return status;
}

static spk_status verify(subject *s, spk_error *err) {
    spk_cli_progress progress = { .what = "verifying" };
    double start_s = spk_cli_now_s();
    spk_status status = spk_pack_verify(s->pack, (uint32_t)s->args->thread_count, spk_cli_progress_show, &progress,
                                        err);
    spk_cli_progress_end(&progress);
    s->verify_s = spk_cli_now_s() - start_s;
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++) {
        uint64_t size_bytes;
        (void)spk_pack_section(s->pack, place, &size_bytes);
        s->verified_bytes += size_bytes;
        s->verified_chunks += spk_chunk_count(size_bytes);
    }
    return status;
}

static double gigabytes_per_second(const subject *s) {
    return s->verify_s > 0 ? 1e-9 * (double)s->verified_bytes / s->verify_s : 0;
}

/* ---- Text ---- */

static void print_provenance(const spk_pack *pack) {
    const spk_provenance *p = spk_pack_provenance(pack);
    char digest[33], text[24];
    spk_digest_text(&p->source_digest, digest);
    printf("source     %s (%s, %" PRIu64 " bytes, GGUF %" PRIu32 ", alignment %" PRIu64 ")\n           XXH3-128 %s\n",
           spk_plain(p->source_name).text, spk_cli_bytes_text(p->source_bytes, text), p->source_bytes, p->source_version, p->source_alignment_bytes,
           digest);
    if (*p->weights_name != '\0') {
        spk_digest_text(&p->weights_digest, digest);
        printf("requants   fitted from %s (%s, %" PRIu64 " bytes)\n           XXH3-128 %s\n", spk_plain(p->weights_name).text,
               spk_cli_bytes_text(p->weights_bytes, text), p->weights_bytes, digest);
    }
    printf("recipe     %s, imatrix %s, made by %s\n", spk_plain(p->recipe_name).text,
           *p->imatrix_name ? spk_plain(p->imatrix_name).text : "none", spk_plain(p->tool_version).text);
}

static void print_sections(const spk_disk_header *h) {
    printf("sections            offset         bytes   items  digest\n");
    for (uint32_t i = 0; i < h->section_count; i++) {
        const spk_disk_section *e = &h->sections[i];
        char digest[33], name[24];
        spk_digest_text(&e->digest, digest);
        if (spk_section_is_known(e->id))
            (void)snprintf(name, sizeof name, "%s", spk_section_name(e->id));
        else
            (void)snprintf(name, sizeof name, "id %" PRIu32, e->id);
        printf("  %-10s %13" PRIu64 " %13" PRIu64 " %7" PRIu64 "  %s\n", name, e->offset_bytes, e->stored_bytes,
               e->item_count, digest);
    }
}

static void print_types(const subject *s) {
    spk_census census;
    spk_census_take(s->tensors, s->tensor_count, &census);
    for (uint32_t from = 0; from < SPK_TYPE_LIMIT; from++)
        for (uint32_t to = 0; to < SPK_TYPE_LIMIT; to++) {
            if (census.of[from][to].tensor_count == 0) continue;
            char types[64];
            (void)snprintf(types, sizeof types, from == to ? "%s" : "%s -> %s", spk_type_name(from), spk_type_name(to));
            printf("type       %-16s %6" PRIu64 " tensors %15" PRIu64 " bytes\n", types,
                   census.of[from][to].tensor_count, census.of[from][to].byte_count);
        }
}

static void print_tensor(const subject *s, const spk_tensor *t) {
    char dims[96];
    size_t used = 0;
    for (uint32_t i = 0; i < t->dim_count; i++)
        used += (size_t)snprintf(dims + used, sizeof dims - used, i == 0 ? "%" PRIu64 : "x%" PRIu64, t->dims[i]);
    printf("  %-40s %-6s %-18s %12" PRIu64 " bytes", spk_plain(t->name).text, spk_type_name(t->type), dims, spk_tensor_bytes(t));
    if (s->pack != NULL) printf("  %-4s %s", spk_layout_name(t->layout), spk_section_name(t->section));
    if (spk_tensor_is_requantized(t))
        printf("  from %s, rel. RMSE %.6f", spk_type_name(t->source_type), t->relative_rmse);
    putchar('\n');
}

static void print_text(const subject *s) {
    char text[24], root[33];
    printf("file       %s (%s, %" PRIu64 " bytes)\n", spk_plain(s->args->path).text, spk_cli_bytes_text(s->file_bytes, text),
           s->file_bytes);
    if (s->pack != NULL) {
        spk_digest digest = spk_pack_root(s->pack);
        spk_digest_text(&digest, root);
        printf("format     spk %u.%u, root %s\n", spk_pack_version(s->pack) >> 16, spk_pack_version(s->pack) & 0xffff,
               root);
    } else {
        printf("format     GGUF %" PRIu32 ", alignment %" PRIu64 ", %" PRIu32 " file%s\n", spk_gguf_version(s->gguf),
               spk_gguf_alignment_bytes(s->gguf), spk_gguf_part_count(s->gguf),
               spk_gguf_part_count(s->gguf) == 1 ? "" : "s");
    }
    if (s->no_model.status == SPK_OK)
        printf("model      %s\n", s->model);
    else
        printf("model      none that spk runs: %s\n", s->no_model.text);
    if (s->pack != NULL) print_provenance(s->pack);
    printf("metadata   %" PRIu64 " entries\n",
           (s->pack != NULL ? spk_pack_kvs(s->pack) : spk_gguf_kvs(s->gguf))->count);
    print_types(s);
    if (s->pack != NULL) print_sections(&s->pack->header);
    if (s->args->is_tensors) {
        printf("tensors\n");
        for (uint64_t i = 0; i < s->tensor_count; i++) print_tensor(s, &s->tensors[i]);
    }
    if (s->args->source_path != NULL)
        printf("repaired   %" PRIu64 " damaged chunks (%" PRIu64 " bytes)\n", s->repaired.repaired_count,
               s->repaired.repaired_bytes);
    if (s->args->is_verify)
        printf("verified %" PRIu64 " bytes in %" PRIu64 " chunks at %.2f GB/s\n", s->verified_bytes, s->verified_chunks,
               gigabytes_per_second(s));
}

/* ---- JSON ---- */

static void add_number(cJSON *object, const char *name, uint64_t value) {
    (void)cJSON_AddNumberToObject(object, name, (double)value);
}

static void add_text(cJSON *object, const char *name, const char *text) {
    (void)cJSON_AddItemToObject(object, name, spk_cli_json_string(text));
}

static void add_digest(cJSON *object, const char *name, spk_digest digest) {
    char text[33];
    spk_digest_text(&digest, text);
    add_text(object, name, text);
}

static cJSON *add_item(cJSON *list) {
    cJSON *item = cJSON_CreateObject();
    (void)cJSON_AddItemToArray(list, item);
    return item;
}

static void add_types(cJSON *root, const subject *s) {
    spk_census census;
    spk_census_take(s->tensors, s->tensor_count, &census);
    cJSON *list = cJSON_AddArrayToObject(root, "types");
    for (uint32_t from = 0; from < SPK_TYPE_LIMIT; from++)
        for (uint32_t to = 0; to < SPK_TYPE_LIMIT; to++) {
            if (census.of[from][to].tensor_count == 0) continue;
            cJSON *item = add_item(list);
            add_text(item, "type", spk_type_name(to));
            add_text(item, "source_type", spk_type_name(from));
            add_number(item, "tensors", census.of[from][to].tensor_count);
            add_number(item, "bytes", census.of[from][to].byte_count);
        }
}

static void add_tensors(cJSON *root, const subject *s) {
    cJSON *list = cJSON_AddArrayToObject(root, "tensors");
    for (uint64_t i = 0; i < s->tensor_count; i++) {
        const spk_tensor *t = &s->tensors[i];
        cJSON *item = add_item(list), *dims;
        add_text(item, "name", t->name);
        add_text(item, "type", spk_type_name(t->type));
        dims = cJSON_AddArrayToObject(item, "dims");
        for (uint32_t d = 0; d < t->dim_count; d++)
            (void)cJSON_AddItemToArray(dims, cJSON_CreateNumber((double)t->dims[d]));
        add_number(item, "bytes", spk_tensor_bytes(t));
        if (s->pack == NULL) continue;
        add_text(item, "source_type", spk_type_name(t->source_type));
        add_text(item, "layout", spk_layout_name(t->layout));
        add_text(item, "section", spk_section_name(t->section));
        add_number(item, "offset_bytes", t->offset_bytes);
        add_number(item, "unit_stride_bytes", t->unit_stride_bytes);
        add_number(item, "matrix_stride_bytes", t->matrix_stride_bytes);
        (void)cJSON_AddNumberToObject(item, "relative_rmse", t->relative_rmse);
        (void)cJSON_AddNumberToObject(item, "max_abs_error", t->max_abs_error);
        (void)cJSON_AddNumberToObject(item, "cosine", t->cosine);
    }
}

static void add_pack(cJSON *root, const spk_pack *pack) {
    const spk_provenance *p = spk_pack_provenance(pack);
    cJSON *from = cJSON_AddObjectToObject(root, "provenance");
    add_text(from, "source_name", p->source_name);
    add_number(from, "source_bytes", p->source_bytes);
    add_digest(from, "source_xxh3_128", p->source_digest);
    add_number(from, "source_gguf_version", p->source_version);
    add_number(from, "source_alignment_bytes", p->source_alignment_bytes);
    add_text(from, "recipe_name", p->recipe_name);
    add_text(from, "recipe_text", p->recipe_text);
    add_text(from, "imatrix_name", p->imatrix_name);
    add_text(from, "tool_version", p->tool_version);
    if (*p->weights_name != '\0') {
        add_text(from, "weights_name", p->weights_name);
        add_number(from, "weights_bytes", p->weights_bytes);
        add_digest(from, "weights_xxh3_128", p->weights_digest);
    }
    cJSON *list = cJSON_AddArrayToObject(root, "sections");
    for (uint32_t i = 0; i < pack->header.section_count; i++) {
        const spk_disk_section *e = &pack->header.sections[i];
        cJSON *item = add_item(list);
        add_text(item, "name", spk_section_name(e->id));
        add_number(item, "id", e->id);
        add_number(item, "offset_bytes", e->offset_bytes);
        add_number(item, "stored_bytes", e->stored_bytes);
        add_number(item, "raw_bytes", e->raw_bytes);
        add_number(item, "items", e->item_count);
        add_digest(item, "digest", e->digest);
    }
}

/* False when out of memory. */
static bool print_json(const subject *s) {
    cJSON *root = cJSON_CreateObject();
    bool is_pack = s->pack != NULL;
    add_text(root, "file", s->args->path);
    add_number(root, "file_bytes", s->file_bytes);
    add_text(root, "format", is_pack ? "spk" : "gguf");
    add_number(root, "version_major", is_pack ? spk_pack_version(s->pack) >> 16 : spk_gguf_version(s->gguf));
    if (is_pack) {
        add_number(root, "version_minor", spk_pack_version(s->pack) & 0xffff);
        add_digest(root, "root", spk_pack_root(s->pack));
        add_pack(root, s->pack);
    } else {
        add_number(root, "alignment_bytes", spk_gguf_alignment_bytes(s->gguf));
        add_number(root, "parts", spk_gguf_part_count(s->gguf));
    }
    if (s->no_model.status == SPK_OK) add_text(root, "model", s->model);
    add_number(root, "metadata_entries", (is_pack ? spk_pack_kvs(s->pack) : spk_gguf_kvs(s->gguf))->count);
    add_types(root, s);
    if (s->args->is_tensors) add_tensors(root, s);
    if (s->args->source_path != NULL) {
        cJSON *repaired = cJSON_AddObjectToObject(root, "repaired");
        add_number(repaired, "chunks", s->repaired.repaired_count);
        add_number(repaired, "bytes", s->repaired.repaired_bytes);
    }
    if (s->args->is_verify) {
        cJSON *verified = cJSON_AddObjectToObject(root, "verified");
        add_number(verified, "bytes", s->verified_bytes);
        add_number(verified, "chunks", s->verified_chunks);
        (void)cJSON_AddNumberToObject(verified, "seconds", s->verify_s);
    }
    char *text = spk_plain_json(root, true);
    cJSON_Delete(root);
    if (text != NULL) puts(text);
    free(text);
    return text != NULL;
}

/* ---- Main ---- */

static int run(const arguments *args) {
    subject s = { .args = args };
    spk_error err;
    int exit_status = SPK_EXIT_DONE;
    if ((args->source_path != NULL && repair(&s, &err) != SPK_OK) || open_subject(&s, &err) != SPK_OK || (args->is_verify && verify(&s, &err) != SPK_OK)) {
        exit_status = spk_cli_fail(TOOL, &err);
    } else if (!args->is_json) {
        print_text(&s);
    } else if (!print_json(&s)) {
        fprintf(stderr, TOOL ": out of memory\n");
        exit_status = SPK_EXIT_FAILED;
    }
    free(s.gguf_tensors);
    spk_gguf_close(s.gguf);
    spk_pack_close(s.pack);
    return spk_cli_finish(TOOL, exit_status);
}

int main(int argc, char **argv) {
    spk_cli_guard_inputs(TOOL, NULL);
    enum { OPT_TENSORS = 256, OPT_VERIFY, OPT_THREADS, OPT_JSON, OPT_REPAIR, OPT_IMATRIX, OPT_CALIBRATION, OPT_WEIGHTS };
    static const struct option long_options[] = {
        { "tensors", no_argument, NULL, OPT_TENSORS },       { "verify", no_argument, NULL, OPT_VERIFY },
        { "threads", required_argument, NULL, OPT_THREADS }, { "json", no_argument, NULL, OPT_JSON },
        { "repair", required_argument, NULL, OPT_REPAIR },   { "imatrix", required_argument, NULL, OPT_IMATRIX },
        { "source-weights", required_argument, NULL, OPT_WEIGHTS }, { "calibration", required_argument, NULL, OPT_CALIBRATION },
        { "help", no_argument, NULL, 'h' },                  { "version", no_argument, NULL, 'V' },
        { NULL, 0, NULL, 0 },
    };
    arguments args = { .path = NULL };
    spk_error err;
    int option;
    while ((option = spk_cli_option(argc, argv, ":hV", long_options, &err)) != -1) {
        switch (option) {
        case OPT_TENSORS: args.is_tensors = true; break;
        case OPT_VERIFY:  args.is_verify = true; break;
        case OPT_THREADS:
            if (spk_cli_u64("--threads", optarg, 1, SPK_POOL_THREAD_MAX, &args.thread_count, &err) != SPK_OK)
                return spk_cli_usage(TOOL, "%s", err.text);
            break;
        case OPT_JSON:    args.is_json = true; break;
        case OPT_REPAIR:  args.source_path = optarg; break;
        case OPT_IMATRIX: args.imatrix_path = optarg; break;
        case OPT_WEIGHTS: args.weights_path = optarg; break;
        case OPT_CALIBRATION: args.calibration_path = optarg; break;
        case 'h':         fputs(help, stdout); return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        case 'V':
            printf(TOOL " " SPK_VERSION_TEXT ", reads .spk %d.%d\n", SPK_VERSION_MAJOR, SPK_VERSION_MINOR);
            return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        default:          return spk_cli_usage(TOOL, "%s", err.text);
        }
    }
    if (argc - optind != 1) return spk_cli_usage(TOOL, "expected one FILE, found %d", argc - optind);
    if (args.source_path == NULL && (args.imatrix_path != NULL || args.calibration_path != NULL || args.weights_path != NULL))
        return spk_cli_usage(TOOL, "--imatrix, --calibration and --source-weights are for --repair");
    args.path = argv[optind];
    return run(&args);
}
