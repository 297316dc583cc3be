/* runtime/run_main.c - spk-run: tokenize, decode, or write the logits of a teacher-forced pass. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/cli.h"
#include "formats/model.h"
#include "formats/plain.h"
#include "formats/pool.h"
#include "formats/version.h"
#include "runtime/runtime.h"
#include "runtime/tool.h"

static const char TOOL[] = "spk-run";

static const char HELP[] =
    "usage: spk-run [options] MODEL\n"
    "\n"
    "Decode text with a .spk pack, or with a .gguf as it is.\n"
    "\n"
    "  --prompt TEXT       text to continue\n"
    "  --prompt-file FILE  the same from a file\n"
    "  --tokens FILE       token ids instead of text, separated by commas or white space\n"
    "  --chat              the prompt is one user message; the model's chat markers are added\n"
    "  -n N                tokens to generate                                     [128]\n"
    "  --context N         room for prompt and generated tokens     [what is needed]\n"
    "  --temp X            temperature; 0 takes the most likely token              [0]\n"
    "  --top-k N --top-p X --min-p X   limits on the candidates, with --temp  [0 1 0: off]\n"
    "  --seed N            of the sampling                                         [0]\n"
    "  --backend NAME      auto, cpu, ref (plain F32) or cuda                   [auto]\n"
    "  --threads N         never changes a result                           [all CPUs]\n"
    "  --kv f16|q8         how the GPU keeps keys and values of the context       [f16]\n"
    "  --fuse LIST         GPU kernels to fuse, all others apart: router, addnorm3, shexp, gdn-conv, gdn-core, held  [all]\n"
    "  --no-fuse LIST      GPU kernels to run apart; never changes a result\n"
    "  --verify            check all checksums of the pack first\n"
    "  --tokenize          print the prompt's token ids on one line and stop\n"
    "  --logits OUT.f32    write float32 [tokens][vocab] of the prompt and stop; the file appears whole or not at all\n"
    "  --force             replace OUT.f32 if it exists\n"
    "  --json              one JSON object on stdout instead of text\n"
    "  -h, --help          this text        -V, --version   version\n"
    "\n"
    "Text goes to stdout as it comes, whatever characters it has; rates go to stderr, and a warning where prompt and\n"
    "generation may be longer than what the model was trained on.\n"
    "exit status: 0 done; 1 failed, a logit that is no finite number included; 2 wrong usage\n";

typedef struct {
    const char         *model_path, *prompt, *prompt_path, *tokens_path, *logits_path;
    bool                is_chat, is_tokenize, is_json, is_verify, is_forced;
    uint64_t            generate_count, context_tokens;
    spk_sampler_options sampler;
    spk_model_options   model;
    spk_session_options session;
} run_options;

typedef struct {
    spk_model     *model;
    spk_tokenizer *tokenizer;
    spk_session   *session;
    uint32_t      *prompt;
    size_t         prompt_count;
    uint32_t      *generated;
    uint32_t       generated_count;
    double         load_s, prefill_s, decode_s;
    spk_outfile   *logits_file;         /* NULL if none was asked for, or it is done */
} run_state;

/* ---- Options ---- */

static spk_status parse_float(const char *option, const char *text, double low, double high, float *out,
                              spk_error *err) {
    double value = 0;
    SPK_TRY(spk_cli_double(option, text, low, high, &value, err));
    *out = (float)value;
    return SPK_OK;
}

static spk_status parse_u32(const char *option, const char *text, uint64_t low, uint64_t high, uint32_t *out,
                            spk_error *err) {
    uint64_t value = 0;
    SPK_TRY(spk_cli_u64(option, text, low, high, &value, err));
    *out = (uint32_t)value;
    return SPK_OK;
}

enum { OPT_PROMPT = 256, OPT_PROMPT_FILE, OPT_TOKENS, OPT_CHAT, OPT_CONTEXT, OPT_TEMP, OPT_TOP_K, OPT_TOP_P, OPT_MIN_P,
       OPT_SEED, OPT_BACKEND, OPT_THREADS, OPT_KV, OPT_FUSE, OPT_NO_FUSE, OPT_VERIFY, OPT_TOKENIZE, OPT_LOGITS, OPT_JSON,
       OPT_FORCE };

static const struct option LONG_OPTIONS[] = {
    { "prompt", required_argument, NULL, OPT_PROMPT }, { "prompt-file", required_argument, NULL, OPT_PROMPT_FILE },
    { "tokens", required_argument, NULL, OPT_TOKENS }, { "chat", no_argument, NULL, OPT_CHAT },
    { "context", required_argument, NULL, OPT_CONTEXT }, { "temp", required_argument, NULL, OPT_TEMP },
    { "top-k", required_argument, NULL, OPT_TOP_K }, { "top-p", required_argument, NULL, OPT_TOP_P },
    { "min-p", required_argument, NULL, OPT_MIN_P }, { "seed", required_argument, NULL, OPT_SEED },
    { "backend", required_argument, NULL, OPT_BACKEND }, { "threads", required_argument, NULL, OPT_THREADS },
    { "kv", required_argument, NULL, OPT_KV }, { "fuse", required_argument, NULL, OPT_FUSE },
    { "no-fuse", required_argument, NULL, OPT_NO_FUSE },
    { "verify", no_argument, NULL, OPT_VERIFY }, { "tokenize", no_argument, NULL, OPT_TOKENIZE },
    { "logits", required_argument, NULL, OPT_LOGITS }, { "json", no_argument, NULL, OPT_JSON },
    { "force", no_argument, NULL, OPT_FORCE },
    { "help", no_argument, NULL, 'h' }, { "version", no_argument, NULL, 'V' }, { 0 },
};

static spk_status take_option(int option, run_options *o, spk_error *err) {
    switch (option) {
    case OPT_PROMPT:      o->prompt = optarg; return SPK_OK;
    case OPT_PROMPT_FILE: o->prompt_path = optarg; return SPK_OK;
    case OPT_TOKENS:      o->tokens_path = optarg; return SPK_OK;
    case OPT_CHAT:        o->is_chat = true; return SPK_OK;
    case 'n':             return spk_cli_u64("-n", optarg, 0, SPK_CONTEXT_MAX, &o->generate_count, err);
    case OPT_CONTEXT:     return spk_cli_u64("--context", optarg, 1, SPK_CONTEXT_MAX, &o->context_tokens, err);
    case OPT_TEMP:        return parse_float("--temp", optarg, 0, 100, &o->sampler.temperature, err);
    case OPT_TOP_K:       return parse_u32("--top-k", optarg, 0, UINT32_MAX, &o->sampler.top_k, err);
    case OPT_TOP_P:       return parse_float("--top-p", optarg, 0, 1, &o->sampler.top_p, err);
    case OPT_MIN_P:       return parse_float("--min-p", optarg, 0, 1, &o->sampler.min_p, err);
    case OPT_SEED:        return spk_cli_u64("--seed", optarg, 0, UINT64_MAX, &o->sampler.seed, err);
    case OPT_BACKEND:     return spk_tool_backend("--backend", optarg, &o->model.backend, err);
    case OPT_THREADS:     return parse_u32("--threads", optarg, 1, SPK_POOL_THREAD_MAX, &o->model.thread_count, err);
    case OPT_KV:          return spk_tool_kv("--kv", optarg, &o->session.kv_q8, err);
    case OPT_FUSE:        return spk_tool_fusions_off(true, optarg, &o->session.fusions_off, err);
    case OPT_NO_FUSE:     return spk_tool_fusions_off(false, optarg, &o->session.fusions_off, err);
    case OPT_VERIFY:      o->is_verify = true; return SPK_OK;
    case OPT_TOKENIZE:    o->is_tokenize = true; return SPK_OK;
    case OPT_LOGITS:      o->logits_path = optarg; return SPK_OK;
    case OPT_FORCE:       o->is_forced = true; return SPK_OK;
    default:              o->is_json = true; return SPK_OK;
    }
}

/* Returns -1 to go on, else an exit status. */
static int parse_options(int argc, char **argv, run_options *o) {
    spk_error err;
    for (int option; (option = spk_cli_option(argc, argv, ":n:hV", LONG_OPTIONS, &err)) != -1;) {
        if (option == 'h' || option == 'V') {
            if (option == 'h') fputs(HELP, stdout);
            else printf("spk-run %s\n", SPK_VERSION_TEXT);
            return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        }
        if (option == '?' || take_option(option, o, &err) != SPK_OK) return spk_cli_usage(TOOL, "%s", err.text);
    }
    if (argc - optind != 1) return spk_cli_usage(TOOL, "expected one MODEL, got %d arguments", argc - optind);
    o->model_path = argv[optind];
    int sources = (o->prompt != NULL) + (o->prompt_path != NULL) + (o->tokens_path != NULL);
    if (sources != 1) return spk_cli_usage(TOOL, "expected exactly one of --prompt, --prompt-file and --tokens");
    if (o->tokens_path != NULL && (o->is_chat || o->is_tokenize))
        return spk_cli_usage(TOOL, "--tokens gives ids, --chat and --tokenize need text");
    if ((o->is_tokenize || o->logits_path != NULL) && o->is_json)
        return spk_cli_usage(TOOL, "--json describes a generation, %s makes none",
                             o->is_tokenize ? "--tokenize" : "--logits");
    if (o->is_tokenize && o->logits_path != NULL)
        return spk_cli_usage(TOOL, "--tokenize and --logits exclude each other");
    return -1;
}

/* ---- Input ---- */

static spk_status read_prompt(const run_options *o, run_state *r, spk_error *err) {
    char *text = NULL;
    size_t size = o->prompt != NULL ? strlen(o->prompt) : 0;
    const char *path = o->prompt_path != NULL ? o->prompt_path : o->tokens_path;
    if (path != NULL) SPK_TRY(spk_cli_read_file(path, SPK_TOOL_TEXT_BYTES_MAX, &text, &size, err));
    const char *prompt = text != NULL ? text : o->prompt;
    spk_status status;
    if (o->tokens_path != NULL) {
        status = spk_tool_tokens(path, text, size, spk_model_vocab_size(r->model), &r->prompt, &r->prompt_count, err);
    } else if (o->is_chat) {
        status = spk_tokenizer_chat(r->tokenizer, prompt, size, &r->prompt, &r->prompt_count, err);
    } else {
        status = spk_tokenizer_encode(r->tokenizer, prompt, size, true, &r->prompt, &r->prompt_count, err);
    }
    free(text);
    if (status != SPK_OK || r->prompt_count > 0 || o->is_tokenize) return status;
    return path != NULL ? spk_fail(err, SPK_E_CORRUPT, "%s: holds no token, at least one is needed", path)
                        : spk_fail(err, SPK_E_USAGE, "--prompt '': at least one token is needed");
}

/* ---- What the tool does ---- */

static void print_ids(const run_state *r) {
    for (size_t i = 0; i < r->prompt_count; i++) printf(i ? " %" PRIu32 : "%" PRIu32, r->prompt[i]);
    printf("\n");
}

enum { LOGITS_STEP = 16 };           /* tokens a batch */

/* Rows are written as they come, so that a long text needs memory for one batch only. */
static spk_status write_rows(const run_options *o, run_state *r, float *rows, spk_error *err) {
    uint32_t vocab = spk_model_vocab_size(r->model);
    uint64_t row_bytes = vocab * sizeof *rows;
    for (size_t done = 0; done < r->prompt_count; done += LOGITS_STEP) {
        uint32_t step = r->prompt_count - done < LOGITS_STEP ? (uint32_t)(r->prompt_count - done) : LOGITS_STEP;
        SPK_TRY(spk_session_eval(r->session, r->prompt + done, step, SPK_LOGITS_ALL, rows, err));
        for (uint32_t i = 0; i < step; i++)
            SPK_TRY(spk_tool_logits_check(o->model_path, done + i, rows + (size_t)i * vocab, vocab, err));
        SPK_TRY(spk_outfile_write(r->logits_file, done * row_bytes, rows, step * row_bytes, err));
    }
    return SPK_OK;
}

/* Before the model is loaded, so that a bad path costs no time. */
static spk_status begin_logits(const run_options *o, run_state *r, spk_error *err) {
    const char *const inputs[] = { o->prompt_path, o->tokens_path, o->model_path };
    return spk_tool_output_begin("--logits", o->logits_path, o->is_forced, inputs, 3, 0, &r->logits_file, err);
}

static spk_status write_logits(const run_options *o, run_state *r, spk_error *err) {
    uint64_t row_bytes = spk_model_vocab_size(r->model) * sizeof(float);
    SPK_TRY(spk_tool_output_check_model("--logits", o->logits_path, r->model, err));
    SPK_TRY(spk_outfile_expect(r->logits_file, r->prompt_count * row_bytes, err));
    float *rows = malloc(LOGITS_STEP * row_bytes);
    spk_status status = rows == NULL ? spk_fail(err, SPK_E_MEMORY, "out of memory") : write_rows(o, r, rows, err);
    free(rows);
    if (status != SPK_OK) return status;
    spk_outfile *file = r->logits_file;
    r->logits_file = NULL;
    return spk_outfile_commit(file, err);
}

static spk_status print_piece(const run_state *r, spk_utf8_stream *stream, uint32_t token, spk_error *err) {
    size_t size = 0;
    const char *piece = spk_tokenizer_piece(r->tokenizer, token, false, &size);
    char out[3 * 4096];
    for (size_t at = 0; at < size; at += 1024) {
        size_t part = size - at < 1024 ? size - at : 1024;
        (void)fwrite(out, 1, spk_utf8_push(stream, piece + at, part, false, out), stdout);
    }
    if (fflush(stdout) == 0 && !ferror(stdout)) return SPK_OK;
    return spk_fail(err, SPK_E_IO, "writing the output: %s", strerror(errno));
}

/* Context of on_token. */
typedef struct {
    const run_options *options;
    run_state         *run;
    spk_utf8_stream    stream;
    double             start_s;
    spk_status         status;      /* of the output */
    spk_error         *err;
} generation;

static bool take_token(void *context, uint32_t token) {
    generation *g = context;
    run_state *r = g->run;
    if (r->prefill_s == 0) r->prefill_s = spk_cli_now_s() - g->start_s;
    if (spk_tokenizer_is_end(r->tokenizer, token)) return false;
    r->generated[r->generated_count++] = token;
    if (!g->options->is_json) g->status = print_piece(r, &g->stream, token, g->err);
    return g->status == SPK_OK;
}

/* The prompt's time ends with the first token. */
static spk_status generate(const run_options *o, run_state *r, spk_error *err) {
    generation g = { .options = o, .run = r, .start_s = spk_cli_now_s(), .status = SPK_OK, .err = err };
    spk_sampler sampler = spk_sampler_start(&o->sampler);
    spk_generation what = { .sampler = &sampler, .token_limit = (uint32_t)o->generate_count, .on_token = take_token, .context = &g };
    spk_status status = spk_session_generate(r->session, r->prompt, (uint32_t)r->prompt_count, &what, err);
    double total_s = spk_cli_now_s() - g.start_s;
    if (r->prefill_s == 0) r->prefill_s = total_s;
    r->decode_s = total_s - r->prefill_s;
    if (!o->is_json) {
        char tail[16];
        (void)fwrite(tail, 1, spk_utf8_push(&g.stream, "", 0, true, tail), stdout);
        printf("\n");
    }
    return g.status != SPK_OK ? g.status : status;
}

/* Decode steps: all but the last generated token were evaluated. */
static double decode_rate(const run_state *r) {
    return r->generated_count > 1 && r->decode_s > 0 ? (r->generated_count - 1) / r->decode_s : 0;
}

static double prefill_rate(const run_state *r) { return r->prefill_s > 0 ? (double)r->prompt_count / r->prefill_s : 0; }

/* Everything generated, as text that the caller frees; NULL when out of memory. */
static char *generated_text(const run_state *r) {
    size_t room = 0, size = 0, written = 0;
    for (uint32_t i = 0; i < r->generated_count; i++) {
        (void)spk_tokenizer_piece(r->tokenizer, r->generated[i], false, &size);
        room += 3 * (size + 4);
    }
    char *text = malloc(room + 16);
    if (text == NULL) return NULL;
    spk_utf8_stream stream = { 0 };
    for (uint32_t i = 0; i < r->generated_count; i++) {
        const char *piece = spk_tokenizer_piece(r->tokenizer, r->generated[i], false, &size);
        written += spk_utf8_push(&stream, piece, size, false, text + written);
    }
    written += spk_utf8_push(&stream, "", 0, true, text + written);
    text[written] = '\0';
    return text;
}

static spk_status print_json(const run_options *o, const run_state *r, spk_error *err) {
    cJSON *root = cJSON_CreateObject();
    char *text = generated_text(r);
    cJSON_AddItemToObject(root, "model", spk_cli_json_string(o->model_path));
    cJSON_AddBoolToObject(root, "pack", spk_model_is_pack(r->model));
    cJSON_AddStringToObject(root, "backend", spk_model_backend_name(r->model));
    spk_tool_json_number(root, "prompt_tokens", (double)r->prompt_count);
    if (text != NULL) cJSON_AddStringToObject(root, "text", text);
    cJSON *ids = cJSON_AddArrayToObject(root, "tokens");
    for (uint32_t i = 0; i < r->generated_count; i++) cJSON_AddItemToArray(ids, cJSON_CreateNumber(r->generated[i]));
    spk_tool_json_number(root, "state_bytes", (double)spk_session_state_bytes(r->session));
    spk_tool_json_number(root, "load_s", r->load_s);
    spk_tool_json_number(root, "prefill_tokens_per_s", prefill_rate(r));
    spk_tool_json_number(root, "decode_tokens_per_s", decode_rate(r));
    char *line = text != NULL ? spk_plain_json(root, false) : NULL;
    if (line != NULL) printf("%s\n", line);
    spk_status status = line != NULL ? SPK_OK : spk_fail(err, SPK_E_MEMORY, "JSON report: out of memory");
    free(line);
    free(text);
    cJSON_Delete(root);
    return status;
}

/* Room for the prompt and all that is generated but the last token. */
static spk_status start_session(const run_options *o, run_state *r, spk_error *err) {
    uint64_t generate_count = o->logits_path != NULL ? 0 : o->generate_count;
    uint64_t needed = r->prompt_count + (generate_count > 0 ? generate_count - 1 : 0);
    uint32_t trained = spk_model_context_length(r->model);
    if (o->context_tokens != 0 && needed > o->context_tokens)
        return spk_fail(err, SPK_E_LIMIT, "--context %" PRIu64 ": a prompt of %zu tokens and -n %" PRIu64
                        " need %" PRIu64, o->context_tokens, r->prompt_count, generate_count, needed);
    if (needed > SPK_CONTEXT_MAX)
        return spk_fail(err, SPK_E_LIMIT, "a prompt of %zu tokens and -n %" PRIu64 " need a context of %" PRIu64
                        " tokens, at most %d", r->prompt_count, generate_count, needed, (int)SPK_CONTEXT_MAX);
    if (needed > trained)
        fprintf(stderr, "%s: warning: prompt and generation may take %" PRIu64 " tokens; the model was trained on %"
                PRIu32 "\n", TOOL, needed, trained);
    r->generated = malloc((generate_count + 1) * sizeof *r->generated);
    if (r->generated == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    spk_session_options so = o->session;
    so.context_tokens = (uint32_t)(o->context_tokens ? o->context_tokens : needed);
    return spk_session_create(r->model, &so, &r->session, err);
}

static spk_status prepare(const run_options *o, run_state *r, spk_error *err) {
    spk_cli_progress progress = { .what = "laying out" };
    spk_model_options mo = o->model;
    mo.progress = spk_cli_progress_show;
    mo.progress_context = &progress;
    double start = spk_cli_now_s();
    spk_status status = spk_model_open(o->model_path, &mo, &r->model, err);
    spk_cli_progress_end(&progress);
    SPK_TRY(status);
    spk_cli_note(TOOL, "on the CPU, not on the GPU", spk_model_gpu_refusal(r->model));
    r->load_s = spk_cli_now_s() - start;
    if (o->is_verify) SPK_TRY(spk_model_verify(r->model, err));
    if (o->tokens_path == NULL || o->logits_path == NULL) SPK_TRY(spk_tokenizer_create(r->model, &r->tokenizer, err));
    SPK_TRY(read_prompt(o, r, err));
    return o->is_tokenize ? SPK_OK : start_session(o, r, err);
}

static spk_status run(const run_options *o, run_state *r, spk_error *err) {
    if (o->logits_path != NULL) SPK_TRY(begin_logits(o, r, err));
    SPK_TRY(prepare(o, r, err));
    if (o->is_tokenize) {
        print_ids(r);
        return SPK_OK;
    }
    if (o->logits_path != NULL) return write_logits(o, r, err);
    SPK_TRY(generate(o, r, err));
    if (o->is_json) SPK_TRY(print_json(o, r, err));
    (void)fflush(stdout);
    fprintf(stderr, "%s: %s, loaded in %.2f s; prompt %zu tokens at %.1f tok/s; generated %" PRIu32 " at %.1f tok/s\n",
            TOOL, spk_model_backend_name(r->model), r->load_s, r->prompt_count, prefill_rate(r), r->generated_count,
            decode_rate(r));
    return SPK_OK;
}

int main(int argc, char **argv) {
    spk_cli_guard_inputs(TOOL, spk_outfile_remove_all);
    run_options o = { .generate_count = 128, .sampler = { .top_p = 1.0f } };
    run_state r = { 0 };
    spk_error err = { 0 };
    int exit_status = parse_options(argc, argv, &o);
    if (exit_status >= 0) return exit_status;
    spk_tool_signals();
    exit_status = run(&o, &r, &err) == SPK_OK ? SPK_EXIT_DONE : spk_cli_fail(TOOL, &err);
    spk_outfile_abort(r.logits_file);
    spk_session_destroy(r.session);
    spk_tokenizer_destroy(r.tokenizer);
    spk_model_close(r.model);
    free(r.prompt);
    free(r.generated);
    return spk_cli_finish(TOOL, exit_status);
}
