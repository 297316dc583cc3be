/* requant/unpack_main.c - spk-unpack: pack to GGUF. */
#include <inttypes.h>
#include <stdio.h>
#include "formats/census.h"
#include "formats/cli.h"
#include "formats/outfile.h"
#include "formats/plain.h"
#include "formats/version.h"
#include "requant/convert.h"

#define TOOL "spk-unpack"

static const char help[] =
    "usage: spk-unpack [options] IN.spk OUT.gguf\n"
    "\n"
    "Turn a pack back into one GGUF file.  The pack's checksums are verified first.  If nothing was requantized, the\n"
    "result is compared with the source's size and digest, and a line on stderr says whether it is the same file:\n"
    "it is, unless the source was split, has padding that is not zero, or data in another order than its tensor list.\n"
    "Metadata is the source's, also where weights were requantized: general.file_type and quantize.* then still\n"
    "describe the source.\n"
    "\n"
    "  --force             replace OUT.gguf if it exists\n"
    "  --quiet             no progress and no notes on stderr\n"
    "  -h, --help          this text\n"
    "  -V, --version       program version\n"
    "\n"
    "exit status: 0 done; 1 failed, nothing written; 2 wrong usage\n"
    "example: spk-unpack qwen3.6.spk qwen3.6.gguf\n";

typedef struct {
    const char *in_path, *out_path;
    bool        is_forced, is_quiet;
} arguments;

/* Through spk_fail, which makes a pack's texts fit for a terminal. */
static void print_note(const spk_pack *pack, const char *out_path, spk_unpack_result result) {
    spk_error note;
    spk_census census;
    const spk_provenance *provenance = spk_pack_provenance(pack);
    switch (result) {
    case SPK_UNPACK_IDENTICAL:
        (void)spk_fail(&note, SPK_OK, "%s: identical to the source", out_path);
        break;
    case SPK_UNPACK_EQUIVALENT:
        (void)spk_fail(&note, SPK_OK, "%s: same tensors and metadata, but not the same bytes as the source (padding or "
                       "order, or it was split)", out_path);
        break;
    case SPK_UNPACK_REQUANTIZED:
        spk_census_take(spk_pack_tensors(pack), spk_pack_tensor_count(pack), &census);
        (void)spk_fail(&note, SPK_OK, "%s: %" PRIu64 " tensors were requantized (recipe %s)", out_path,
                       census.requantized_count, provenance->recipe_name);
        break;
    }
    fprintf(stderr, TOOL ": %s\n", note.text);
}

static spk_status unpack(const arguments *args, spk_error *err) {
    spk_pack *pack;
    SPK_TRY(spk_pack_open(args->in_path, &pack, err));
    spk_cli_progress progress = { .what = "unpacking" };
    spk_unpack_result result;
    spk_status status = spk_unpack(pack, args->out_path, args->is_forced,
                                   args->is_quiet ? NULL : spk_cli_progress_show, &progress, &result, err);
    spk_cli_progress_end(&progress);
    if (status == SPK_OK) {
        if (!args->is_quiet) print_note(pack, args->out_path, result);
        printf("%s: %" PRIu64 " tensors, from %s\n", spk_plain(args->out_path).text, spk_pack_tensor_count(pack),
               spk_plain(args->in_path).text);
    }
    spk_pack_close(pack);
    return status;
}

int main(int argc, char **argv) {
    spk_cli_guard_inputs(TOOL, spk_outfile_remove_all);
    spk_outfile_remove_on_signals();
    enum { OPT_FORCE = 256, OPT_QUIET };
    static const struct option long_options[] = {
        { "force", no_argument, NULL, OPT_FORCE }, { "quiet", no_argument, NULL, OPT_QUIET },
        { "help", no_argument, NULL, 'h' },        { "version", no_argument, NULL, 'V' },
        { NULL, 0, NULL, 0 },
    };
    arguments args = { .in_path = NULL };
    spk_error err;
    int option;
    while ((option = spk_cli_option(argc, argv, ":hV", long_options, &err)) != -1) {
        switch (option) {
        case OPT_FORCE: args.is_forced = true; break;
        case OPT_QUIET: args.is_quiet = true; break;
        case 'h':       fputs(help, stdout); return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        case 'V':       puts(TOOL " " SPK_VERSION_TEXT); return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        default:        return spk_cli_usage(TOOL, "%s", err.text);
        }
    }
    if (argc - optind != 2)
        return spk_cli_usage(TOOL, "expected IN.spk and OUT.gguf, found %d path%s", argc - optind,
                             argc - optind == 1 ? "" : "s");
    args.in_path = argv[optind];
    args.out_path = argv[optind + 1];
    int exit_status = unpack(&args, &err) == SPK_OK ? SPK_EXIT_DONE : spk_cli_fail(TOOL, &err);
    return spk_cli_finish(TOOL, exit_status);
}
