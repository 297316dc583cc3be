/* requant/unpack_main.c - spk-unpack: pack to GGUF. */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include "formats/cli.h"
#include "formats/outfile.h"
#include "formats/version.h"
#include "requant/convert.h"

#define TOOL "spk-unpack"

static const char help[] =
    "usage: spk-unpack [options] IN.spk OUT.gguf\n"
    "\n"
    "Turn a pack back into one GGUF file.  The pack's checksums are verified first.  If nothing was requantized and\n"
    "the source was one file, OUT.gguf is that file, byte for byte.  Metadata is the source's, also where weights\n"
    "were requantized: general.file_type and quantize.* then still describe the source.\n"
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

static uint64_t requantized_count(const spk_pack *pack) {
    uint64_t count = 0;
    for (uint64_t i = 0; i < spk_pack_tensor_count(pack); i++)
        if (spk_pack_tensors(pack)[i].type != spk_pack_tensors(pack)[i].source_type) count++;
    return count;
}

static spk_status unpack(const arguments *args, spk_error *err) {
    spk_pack *pack;
    SPK_TRY(spk_pack_open(args->in_path, &pack, err));
    spk_cli_progress progress = { .what = "unpacking" };
    spk_outfile_remove_on_signals();
    spk_status status = spk_unpack(pack, args->out_path, args->is_forced,
                                   args->is_quiet ? NULL : spk_cli_progress_show, &progress, err);
    spk_cli_progress_end(&progress);
    if (status == SPK_OK) {
        uint64_t count = requantized_count(pack);
        if (count > 0 && !args->is_quiet)
            fprintf(stderr, TOOL ": %" PRIu64 " tensors of %s were requantized (recipe %s)\n", count, args->out_path,
                    spk_pack_provenance(pack)->recipe_name);
        printf("%s: %" PRIu64 " tensors, from %s\n", args->out_path, spk_pack_tensor_count(pack), args->in_path);
    }
    spk_pack_close(pack);
    return status;
}

int main(int argc, char **argv) {
    enum { OPT_FORCE = 256, OPT_QUIET };
    static const struct option long_options[] = {
        { "force", no_argument, NULL, OPT_FORCE }, { "quiet", no_argument, NULL, OPT_QUIET },
        { "help", no_argument, NULL, 'h' },        { "version", no_argument, NULL, 'V' },
        { NULL, 0, NULL, 0 },
    };
    arguments args = { .in_path = NULL };
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, ":hV", long_options, NULL)) != -1) {
        switch (option) {
        case OPT_FORCE: args.is_forced = true; break;
        case OPT_QUIET: args.is_quiet = true; break;
        case 'h':       fputs(help, stdout); return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        case 'V':       puts(TOOL " " SPK_VERSION_TEXT); return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        default:
            return optopt > 0 && optopt < OPT_FORCE ? spk_cli_usage(TOOL, "unknown option '-%c'", optopt)
                                                    : spk_cli_usage(TOOL, "unknown option '%s'", argv[optind - 1]);
        }
    }
    if (argc - optind != 2)
        return spk_cli_usage(TOOL, "expected IN.spk and OUT.gguf, found %d path%s", argc - optind,
                             argc - optind == 1 ? "" : "s");
    args.in_path = argv[optind];
    args.out_path = argv[optind + 1];
    spk_error err;
    int exit_status = unpack(&args, &err) == SPK_OK ? SPK_EXIT_DONE : spk_cli_fail(TOOL, &err);
    return spk_cli_finish(TOOL, exit_status);
}
