/* runtime/bench_main.c - spk-bench: load time, prefill and decode speed, how near decode comes to the memory limit, and what
 * each fused GPU kernel is worth.
 *
 * The ceiling is a plain read of a buffer larger than the caches, on the device that decodes, in the same process: what bytes
 * a token times tokens a second cannot pass, unless weights stay in a cache.  With two models, or two sessions of one, every
 * repeat measures one, then the other, so that a drifting machine touches both alike.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/cli.h"
#include "formats/model.h"
#include "formats/plain.h"
#include "formats/pool.h"
#include "formats/version.h"
#include "kernels/cuda.h"
#include "runtime/bench_account.h"
#include "runtime/bench_machine.h"
#include "runtime/bench_run.h"
#include "runtime/compare.h"
#include "runtime/runtime.h"
#include "runtime/tool.h"

static const char TOOL[] = "spk-bench";
enum { MODELS_MAX = 2, CONTEXTS_MAX = 16, REPEATS_MAX = 100, SWITCHES_MAX = 8, ACCOUNT_REPEATS = 12 };
#define TOKEN_SEED UINT64_C(1)

static const char HELP[] =
    "usage: spk-bench [options] MODEL [MODEL2]\n"
    "\n"
    "Measure a model (.spk or .gguf): load, prefill, and decode at several context lengths, beside the read bandwidth\n"
    "of this machine. With MODEL2 the two are measured in turn and their ratio is printed.\n"
    "\n"
    "  --contexts LIST  context lengths at which decode is measured, with commas     [128,512]\n"
    "  --tokens N       tokens of one decode measurement                             [32]\n"
    "  --prompt N       tokens of one prefill measurement                            [512]\n"
    "  --repeats N      measurements of each; the median is reported                 [3]\n"
    "  --ab LIST        instead of all that: one model, its decode with and without each of these fused GPU kernels in\n"
    "                   turn; names as for --no-fuse\n"
    "  --account        where the time of a step on a GPU goes, by phases; one model\n"
    "  --json FILE      also write the figures as JSON\n"
    "  --force          replace FILE if it exists\n"
    "  --backend NAME   auto, cpu, ref or cuda                                       [auto]\n"
    "  --kv TYPE        f16 or q8: the KV cache on a GPU                             [f16]\n"
    "  --no-fuse LIST   leave out fused GPU kernels: router, addnorm3, shexp, gdn-conv, gdn-core, held, or all\n"
    "  --fuse LIST      use only these of them                                       [all]\n"
    "  --threads N      worker threads                                               [all CPUs]\n"
    "  -h, --help       this text\n"
    "  -V, --version    version\n"
    "\n"
    "Token ids are a fixed pseudo-random sequence over the vocabulary; nothing is sampled and no token ends a run.\n"
    "A GPU walks the tokens of one measurement by itself; the logits of the last one come back.\n"
    "exit status: 0 done; 1 failed; 2 wrong usage\n"
    "example:     spk-bench --contexts 128,4096 model.gguf model.spk\n";

typedef struct {
    const char *json_path;
    uint64_t    contexts[CONTEXTS_MAX];
    uint32_t    context_count;
    uint64_t    token_count, prompt_count, repeat_count, thread_count;
    spk_backend backend;
    uint32_t    fusions_off;
    bool        is_kv_q8, is_forced;
    struct { const char *name; uint32_t bits; } switches[SWITCHES_MAX];
    uint32_t    switch_count;
    bool        has_account;
    const char *paths[MODELS_MAX];
    uint32_t    model_count;
} arguments;

typedef struct {
    spk_model   *model;
    double       load_s, first_token_s;  /* opening and laying out; then one token with cold weights */
    uint64_t     state_bytes;            /* caches, states and scratch of a session */
    uint64_t     device_bytes;           /* of a GPU: what model and session took */
    uint32_t    *tokens;                 /* capacity ids of the fixed sequence */
} subject;

/* Tokens a second, of a session. */
typedef struct { double prefill[REPEATS_MAX], decode[CONTEXTS_MAX][REPEATS_MAX]; } speeds;

/* What --ab measured of a switch. */
typedef struct { speeds with, without; bool is_same_bits[CONTEXTS_MAX]; } comparison;

typedef struct {
    const arguments *arguments;
    uint64_t capacity;                   /* tokens of the longest run */
    spk_bench_machine machine;
    spk_cuda *cuda;                      /* NULL without a GPU */
    subject   subjects[MODELS_MAX];
    spk_bench_run runs[MODELS_MAX];      /* of the models, or of one model with and without a switch */
    speeds    speeds[MODELS_MAX];
    comparison comparisons[SWITCHES_MAX];
    spk_account accounts[CONTEXTS_MAX];  /* of the one model */
    spk_outfile *json_file;              /* NULL if none was asked for, or it is done */
} bench;

/* ---- One model ---- */

static double ceiling_of(const bench *b, const subject *s) {
    return spk_bench_is_on_gpu(s->model) ? b->machine.gpu_read.bytes_per_s : b->machine.cpu_bytes_per_s;
}

static spk_status open_model(const bench *b, uint32_t index, subject *s, spk_error *err) {
    const arguments *a = b->arguments;
    spk_cli_progress progress = { .what = a->paths[index] };
    spk_model_options options = { .backend = a->backend, .thread_count = (uint32_t)a->thread_count,
                                  .progress = spk_cli_progress_show, .progress_context = &progress };
    double start_s = spk_bench_now_s();
    spk_status status = spk_model_open(a->paths[index], &options, &s->model, err);
    s->load_s = spk_bench_now_s() - start_s;
    spk_cli_progress_end(&progress);
    if (status != SPK_OK) return status;
    spk_cli_note(TOOL, "on the CPU, not on the GPU", spk_model_gpu_refusal(s->model));
    SPK_TRY(spk_tool_output_check_model("--json", a->json_path, s->model, err));
    uint32_t vocab_size = spk_model_vocab_size(s->model);
    s->tokens = malloc(sizeof *s->tokens * b->capacity);
    if (s->tokens == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", a->paths[index]);
    uint64_t state = TOKEN_SEED;
    for (uint64_t i = 0; i < b->capacity; i++) {         /* a 64-bit linear congruence, its upper bits */
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        s->tokens[i] = (uint32_t)((state >> 33) % vocab_size);
    }
    return SPK_OK;
}

static spk_status start_run(const bench *b, const subject *s, uint32_t fusions_off, spk_bench_run *run, spk_error *err) {
    const spk_session_options options = { .context_tokens = (uint32_t)b->capacity, .fusions_off = fusions_off,
                                          .kv_q8 = b->arguments->is_kv_q8 };
    return spk_bench_start(s->model, s->tokens, &options, run, err);
}

/* Open, and evaluate one token. */
static spk_status start_subject(bench *b, uint32_t index, spk_error *err) {
    subject *s = &b->subjects[index];
    spk_bench_run *run = &b->runs[index];
    uint64_t free_before = 0, free_after = 0, total = 0;
    if (b->cuda != NULL) SPK_TRY(spk_cuda_memory(b->cuda, &free_before, &total, err));
    SPK_TRY(open_model(b, index, s, err));
    SPK_TRY(start_run(b, s, b->arguments->fusions_off, run, err));
    double start_s = spk_bench_now_s();
    SPK_TRY(spk_session_eval(run->session, s->tokens, 1, SPK_LOGITS_LAST, run->logits, err));
    s->first_token_s = spk_bench_now_s() - start_s;
    if (b->cuda != NULL) SPK_TRY(spk_cuda_memory(b->cuda, &free_after, &total, err));
    s->state_bytes = spk_session_state_bytes(run->session);
    s->device_bytes = free_before > free_after ? free_before - free_after : 0;
    return spk_tool_logits_check(b->arguments->paths[index], 0, run->logits, spk_model_vocab_size(s->model), err);
}

/* ---- Measuring ---- */

/* Repeats outside, runs inside: A B A B ...  Decode blocks of a context follow one another, so repeat r starts at
 * context + r * tokens; there is no way to step a recurrent state back. */
static spk_status measure_models(bench *b, spk_error *err) {
    const arguments *a = b->arguments;
    for (uint64_t r = 0; r < a->repeat_count; r++)
        for (uint32_t m = 0; m < a->model_count; m++)
            SPK_TRY(spk_bench_prefill(&b->runs[m], (uint32_t)a->prompt_count, &b->speeds[m].prefill[r], err));
    for (uint32_t c = 0; c < a->context_count; c++) {
        for (uint32_t m = 0; m < a->model_count; m++) SPK_TRY(spk_bench_go_to(&b->runs[m], (uint32_t)a->contexts[c], err));
        /* Before the blocks: behind them a step may take another way. */
        if (a->has_account) SPK_TRY(spk_session_account(b->runs[0].session, ACCOUNT_REPEATS, &b->accounts[c], err));
        for (uint64_t r = 0; r < a->repeat_count; r++)
            for (uint32_t m = 0; m < a->model_count; m++)
                SPK_TRY(spk_bench_decode(&b->runs[m], (uint32_t)a->token_count, &b->speeds[m].decode[c][r], err));
    }
    return SPK_OK;
}

/* Two sessions of one model, the second without the switch; and whether both say the same. */
static spk_status measure_switch(bench *b, uint32_t bits, comparison *out, spk_error *err) {
    const arguments *a = b->arguments;
    const subject *s = &b->subjects[0];
    spk_bench_run *with = &b->runs[0], *without = &b->runs[1];
    uint32_t count = (uint32_t)a->token_count;
    uint64_t logits_bytes = sizeof(float) * spk_model_vocab_size(s->model);
    /* gdn-conv is a part of what gdn-core does in one, and shows where that is off. */
    uint32_t off = bits == SPK_FUSE_GDN_CONV ? a->fusions_off | SPK_FUSE_GDN_CORE : a->fusions_off;
    SPK_TRY(start_run(b, s, off & ~bits, with, err));
    SPK_TRY(start_run(b, s, off | bits, without, err));
    for (uint32_t c = 0; c < a->context_count; c++) {
        SPK_TRY(spk_bench_go_to(with, (uint32_t)a->contexts[c], err));
        SPK_TRY(spk_bench_go_to(without, (uint32_t)a->contexts[c], err));
        out->is_same_bits[c] = true;
        for (uint64_t r = 0; r < a->repeat_count; r++) {
            SPK_TRY(spk_bench_decode(with, count, &out->with.decode[c][r], err));
            SPK_TRY(spk_bench_decode(without, count, &out->without.decode[c][r], err));
            if (memcmp(with->logits, without->logits, logits_bytes) != 0) out->is_same_bits[c] = false;
        }
    }
    return SPK_OK;
}

/* One switch after another, so that no more than two sessions take memory. */
static spk_status measure_switches(bench *b, spk_error *err) {
    for (uint32_t i = 0; i < b->arguments->switch_count; i++) {
        for (uint32_t m = 0; m < MODELS_MAX; m++) spk_bench_end(&b->runs[m]);
        SPK_TRY(measure_switch(b, b->arguments->switches[i].bits, &b->comparisons[i], err));
    }
    return SPK_OK;
}

/* ---- Report ---- */

typedef struct { double low, median, high; } spread;

static spread spread_of(const double *values, uint64_t count) {
    double sorted[REPEATS_MAX];
    memcpy(sorted, values, count * sizeof *sorted);
    spk_sort_doubles(sorted, count);
    return (spread){ sorted[0], spk_percentile(sorted, count, 0.5), sorted[count - 1] };
}

static void print_bandwidth(double bytes_per_s, uint64_t buffer_bytes) {
    char size[24];
    printf("read bandwidth %.1f GB/s (best of %d passes over %s)\n", bytes_per_s * 1e-9, SPK_BENCH_PASSES,
           spk_cli_bytes_text(buffer_bytes, size));
}

static void print_machine(const bench *b) {
    const spk_bench_machine *m = &b->machine;
    char text[24], text2[24];
    printf("spk %s, %s: %s", SPK_VERSION_TEXT, m->date, m->cpu);
    if (m->cpu_bytes_per_s > 0) {
        printf(", %" PRIu32 " thread%s\n", m->thread_count, m->thread_count == 1 ? "" : "s");
        print_bandwidth(m->cpu_bytes_per_s, m->cpu_buffer_bytes);
    } else {
        printf("\n");
    }
    if (!m->has_gpu) return;
    const spk_cuda_description *g = &m->gpu;
    printf("GPU %s, sm_%" PRIu32 ", %" PRIu32 " SMs, %s (%s in use before the model)\n", g->name, g->sm_version, g->sm_count,
           spk_cli_bytes_text(m->gpu_memory_bytes, text),
           spk_cli_bytes_text(m->gpu_memory_bytes - m->gpu_free_bytes, text2));
    printf("driver %s for CUDA %" PRIu32 ".%" PRIu32 ", built with CUDA %" PRIu32 ".%" PRIu32 "; SM clock %.0f MHz while "
           "reading, at most %.0f; memory clock %.0f MHz; started in %.2f s\n", m->gpu_driver[0] != '\0' ? m->gpu_driver : "of unknown version",
           g->driver_version / 1000, g->driver_version % 1000 / 10, g->runtime_version / 1000, g->runtime_version % 1000 / 10,
           m->gpu_read.sm_clock_hz * 1e-6, g->sm_clock_max_hz * 1e-6, g->memory_clock_hz * 1e-6, m->gpu_start_s);
    print_bandwidth(m->gpu_read.bytes_per_s, m->gpu_read.buffer_bytes);
}

/* Where the time of a load went, and which way the bytes took. */
static void print_load_times(const subject *s) {
    spk_load_times t;
    char bytes[24], pinned[24], direct[24];
    if (!spk_model_load_times(s->model, &t)) return;
    printf("                  of it weights %.3f s: %s at %.1f GB/s, %s of pinned pages, %s past the page cache; %s\n", t.load_s,
           spk_cli_bytes_text(t.bytes, bytes), (double)t.bytes / t.load_s * 1e-9, spk_cli_bytes_text(t.pinned_bytes, pinned),
           spk_cli_bytes_text(t.direct_bytes, direct), t.is_verified ? "verified" : "not verified");
}

static void print_subject(const bench *b, uint32_t index) {
    const subject *s = &b->subjects[index];
    uint64_t weight_bytes = spk_model_weight_bytes(s->model);
    char text[24], text2[24];
    printf("\n%s  (%s, %s backend; weights %s, %s a token)\n", spk_plain(b->arguments->paths[index]).text, spk_model_arch(s->model),
           spk_model_backend_name(s->model), spk_cli_bytes_text(weight_bytes, text),
           spk_cli_bytes_text(spk_model_bytes_per_token(s->model), text2));
    if (!spk_bench_is_on_gpu(s->model) && weight_bytes < b->machine.cache_bytes)
        printf("  (fits in the last-level cache of %s: the share of the bandwidth may pass 100 %%)\n",
               spk_cli_bytes_text(b->machine.cache_bytes, text));
    printf("  load            %10.3f s, then first token %.3f s\n", s->load_s, s->first_token_s);
    print_load_times(s);
    printf("  state           %10s, caches and scratch for %" PRIu64 " tokens%s\n", spk_cli_bytes_text(s->state_bytes, text),
           b->capacity, b->arguments->is_kv_q8 && spk_bench_is_on_gpu(s->model) ? " (KV in q8)" : "");
    if (spk_bench_is_on_gpu(s->model))
        printf("  device memory   %10s, %s of it neither weights nor state\n", spk_cli_bytes_text(s->device_bytes, text),
               spk_cli_bytes_text(s->device_bytes > weight_bytes + s->state_bytes
                                      ? s->device_bytes - weight_bytes - s->state_bytes : 0, text2));
}

static void print_speeds(const bench *b, uint32_t index) {
    const arguments *a = b->arguments;
    const subject *s = &b->subjects[index];
    spread prefill = spread_of(b->speeds[index].prefill, a->repeat_count);
    printf("  prefill         %10.2f tok/s  [%.2f %.2f]\n", prefill.median, prefill.low, prefill.high);
    for (uint32_t c = 0; c < a->context_count; c++) {
        spread d = spread_of(b->speeds[index].decode[c], a->repeat_count);
        double rate = (double)spk_model_bytes_per_token(s->model) * d.median;
        printf("  decode @%-7" PRIu64 " %10.2f tok/s  [%.2f %.2f]  %.1f GB/s of weights, %.0f %% of the bandwidth\n",
               a->contexts[c], d.median, d.low, d.high, rate * 1e-9, 100 * rate / ceiling_of(b, s));
        char line[SPK_BENCH_ACCOUNT_LINE];
        for (uint32_t i = 0; a->has_account && i < spk_bench_account_line_count(&b->accounts[c]); i++) {
            spk_bench_account_line(&b->accounts[c], i, 1 / d.median, ceiling_of(b, s), line);
            printf("    %s\n", line);
        }
    }
}

static void print_ratios(const bench *b) {
    const arguments *a = b->arguments;
    const speeds *s = b->speeds;
    printf("\nsecond / first    prefill %.3f", spread_of(s[1].prefill, a->repeat_count).median /
                                               spread_of(s[0].prefill, a->repeat_count).median);
    for (uint32_t c = 0; c < a->context_count; c++)
        printf("  decode @%" PRIu64 " %.3f", a->contexts[c], spread_of(s[1].decode[c], a->repeat_count).median /
                                                                spread_of(s[0].decode[c], a->repeat_count).median);
    printf("\n");
}

static double gain_of(const arguments *a, const comparison *c, uint32_t context) {
    return spread_of(c->with.decode[context], a->repeat_count).median /
           spread_of(c->without.decode[context], a->repeat_count).median - 1;
}

static void print_switches(const bench *b) {
    const arguments *a = b->arguments;
    printf("\n  %-10s %8s  %32s  %32s  %8s  %s\n", "fused", "context", "with, tok/s [low high]", "without, tok/s [low high]",
           "gain", "same bits");
    for (uint32_t i = 0; i < a->switch_count; i++) {
        const comparison *c = &b->comparisons[i];
        for (uint32_t n = 0; n < a->context_count; n++) {
            spread on = spread_of(c->with.decode[n], a->repeat_count), off = spread_of(c->without.decode[n], a->repeat_count);
            printf("  %-10s %8" PRIu64 "  %10.2f [%9.2f %9.2f]  %10.2f [%9.2f %9.2f]  %+6.2f %%  %s\n", a->switches[i].name,
                   a->contexts[n], on.median, on.low, on.high, off.median, off.low, off.high, 100 * gain_of(a, c, n),
                   c->is_same_bits[n] ? "yes" : "NO");
        }
    }
}

static void print_report(const bench *b) {
    const arguments *a = b->arguments;
    print_machine(b);
    printf("medians of %" PRIu64 "; in brackets lowest and highest; ", a->repeat_count);
    if (a->switch_count == 0) printf("prefill of %" PRIu64 " tokens, ", a->prompt_count);
    printf("decode of %" PRIu64 " tokens a time\n", a->token_count);
    for (uint32_t m = 0; m < a->model_count; m++) {
        print_subject(b, m);
        if (a->switch_count == 0) print_speeds(b, m);
    }
    if (a->switch_count > 0) print_switches(b);
    else if (a->model_count == 2) print_ratios(b);
}

static void add_samples(cJSON *object, const double *samples, uint64_t count) {
    spk_tool_json_number(object, "tok_per_s", spread_of(samples, count).median);
    cJSON *array = cJSON_AddArrayToObject(object, "samples");
    for (uint64_t i = 0; i < count; i++) cJSON_AddItemToArray(array, cJSON_CreateNumber(samples[i]));
}

static void add_speeds(const bench *b, uint32_t index, cJSON *object) {
    const arguments *a = b->arguments;
    const subject *s = &b->subjects[index];
    cJSON *prefill = cJSON_AddObjectToObject(object, "prefill");
    spk_tool_json_number(prefill, "tokens", (double)a->prompt_count);
    add_samples(prefill, b->speeds[index].prefill, a->repeat_count);
    cJSON *decode = cJSON_AddArrayToObject(object, "decode");
    for (uint32_t c = 0; c < a->context_count; c++) {
        double bytes_per_s = (double)spk_model_bytes_per_token(s->model) *
                             spread_of(b->speeds[index].decode[c], a->repeat_count).median;
        cJSON *row = cJSON_CreateObject();
        spk_tool_json_number(row, "context", (double)a->contexts[c]);
        spk_tool_json_number(row, "tokens", (double)a->token_count);
        add_samples(row, b->speeds[index].decode[c], a->repeat_count);
        spk_tool_json_number(row, "bytes_per_s", bytes_per_s);
        spk_tool_json_number(row, "fraction_of_ceiling", bytes_per_s / ceiling_of(b, s));
        if (a->has_account)
            cJSON_AddItemToObject(row, "account", spk_bench_account_json(&b->accounts[c], (double)spk_model_bytes_per_token(s->model) / bytes_per_s,
                                                                          ceiling_of(b, s)));
        cJSON_AddItemToArray(decode, row);
    }
}

static cJSON *subject_json(const bench *b, uint32_t index) {
    const subject *s = &b->subjects[index];
    cJSON *object = cJSON_CreateObject();
    cJSON_AddItemToObject(object, "path", spk_cli_json_string(b->arguments->paths[index]));
    cJSON_AddBoolToObject(object, "pack", spk_model_is_pack(s->model));
    cJSON_AddStringToObject(object, "model", spk_model_fingerprint_text(s->model));
    cJSON_AddStringToObject(object, "backend", spk_model_backend_name(s->model));
    spk_tool_json_number(object, "weight_bytes", (double)spk_model_weight_bytes(s->model));
    spk_tool_json_number(object, "bytes_per_token", (double)spk_model_bytes_per_token(s->model));
    spk_tool_json_number(object, "state_bytes", (double)s->state_bytes);
    spk_load_times t;
    if (spk_model_load_times(s->model, &t)) {
        spk_tool_json_number(object, "device_bytes", (double)s->device_bytes);
        spk_tool_json_number(object, "weights_load_s", t.load_s);
        cJSON_AddBoolToObject(object, "verified", t.is_verified);
    }
    spk_tool_json_number(object, "load_s", s->load_s);
    spk_tool_json_number(object, "first_token_s", s->first_token_s);
    if (b->arguments->switch_count == 0) add_speeds(b, index, object);
    return object;
}

static cJSON *switch_json(const bench *b, uint32_t index, uint32_t context) {
    const arguments *a = b->arguments;
    const comparison *c = &b->comparisons[index];
    cJSON *object = cJSON_CreateObject();
    cJSON_AddStringToObject(object, "fused", a->switches[index].name);
    spk_tool_json_number(object, "context", (double)a->contexts[context]);
    spk_tool_json_number(object, "gain", gain_of(a, c, context));
    cJSON_AddBoolToObject(object, "same_bits", c->is_same_bits[context]);
    add_samples(cJSON_AddObjectToObject(object, "with"), c->with.decode[context], a->repeat_count);
    add_samples(cJSON_AddObjectToObject(object, "without"), c->without.decode[context], a->repeat_count);
    return object;
}

static void add_machine(const spk_bench_machine *m, cJSON *report) {
    cJSON_AddItemToObject(report, "cpu", spk_cli_json_string(m->cpu));
    if (m->cpu_bytes_per_s > 0) {
        spk_tool_json_number(report, "threads", (double)m->thread_count);
        spk_tool_json_number(report, "ceiling_bytes_per_s", m->cpu_bytes_per_s);
        spk_tool_json_number(report, "ceiling_buffer_bytes", (double)m->cpu_buffer_bytes);
    }
    if (!m->has_gpu) return;
    cJSON *gpu = cJSON_AddObjectToObject(report, "gpu");
    cJSON_AddItemToObject(gpu, "name", spk_cli_json_string(m->gpu.name));
    cJSON_AddItemToObject(gpu, "driver", spk_cli_json_string(m->gpu_driver));
    const struct { const char *key; double value; } figures[] = {
        { "sm_version", m->gpu.sm_version }, { "sm_count", m->gpu.sm_count }, { "cuda_driver", m->gpu.driver_version },
        { "cuda_runtime", m->gpu.runtime_version }, { "sm_clock_max_hz", m->gpu.sm_clock_max_hz },
        { "sm_clock_hz", m->gpu_read.sm_clock_hz }, { "memory_clock_hz", m->gpu.memory_clock_hz },
        { "start_s", m->gpu_start_s }, { "memory_bytes", (double)m->gpu_memory_bytes }, { "free_bytes", (double)m->gpu_free_bytes },
        { "ceiling_bytes_per_s", m->gpu_read.bytes_per_s }, { "ceiling_buffer_bytes", (double)m->gpu_read.buffer_bytes },
    };
    for (size_t i = 0; i < sizeof figures / sizeof *figures; i++) spk_tool_json_number(gpu, figures[i].key, figures[i].value);
}

static spk_status write_json(bench *b, spk_error *err) {
    const arguments *a = b->arguments;
    cJSON *report = cJSON_CreateObject();
    cJSON_AddStringToObject(report, "tool", "spk-bench " SPK_VERSION_TEXT);
    cJSON_AddStringToObject(report, "date", b->machine.date);
    add_machine(&b->machine, report);
    cJSON *models = cJSON_AddArrayToObject(report, "models");
    for (uint32_t m = 0; m < a->model_count; m++) cJSON_AddItemToArray(models, subject_json(b, m));
    cJSON *switches = a->switch_count > 0 ? cJSON_AddArrayToObject(report, "switches") : NULL;
    for (uint32_t i = 0; i < a->switch_count; i++)
        for (uint32_t c = 0; c < a->context_count; c++) cJSON_AddItemToArray(switches, switch_json(b, i, c));
    spk_status status = spk_tool_json_commit(b->json_file, report, err);
    b->json_file = NULL;
    cJSON_Delete(report);
    return status;
}

/* ---- Command line ---- */

enum { OPT_CONTEXTS = 256, OPT_TOKENS, OPT_PROMPT, OPT_REPEATS, OPT_AB, OPT_JSON, OPT_BACKEND, OPT_KV, OPT_NO_FUSE, OPT_FUSE,
       OPT_THREADS, OPT_ACCOUNT, OPT_FORCE };

static const struct option LONG_OPTIONS[] = {
    { "contexts", required_argument, NULL, OPT_CONTEXTS }, { "tokens", required_argument, NULL, OPT_TOKENS },
    { "prompt", required_argument, NULL, OPT_PROMPT }, { "repeats", required_argument, NULL, OPT_REPEATS },
    { "ab", required_argument, NULL, OPT_AB }, { "json", required_argument, NULL, OPT_JSON },
    { "backend", required_argument, NULL, OPT_BACKEND }, { "kv", required_argument, NULL, OPT_KV },
    { "no-fuse", required_argument, NULL, OPT_NO_FUSE }, { "fuse", required_argument, NULL, OPT_FUSE },
    { "threads", required_argument, NULL, OPT_THREADS }, { "help", no_argument, NULL, 'h' },
    { "account", no_argument, NULL, OPT_ACCOUNT }, { "force", no_argument, NULL, OPT_FORCE }, { "version", no_argument, NULL, 'V' }, { 0 },
};

static spk_status take_contexts(char *list, arguments *a, spk_error *err) {
    char *state = NULL;
    a->context_count = 0;
    for (char *word = strtok_r(list, ",", &state); word != NULL; word = strtok_r(NULL, ",", &state)) {
        if (a->context_count == CONTEXTS_MAX)
            return spk_fail(err, SPK_E_USAGE, "--contexts: more than %d lengths", CONTEXTS_MAX);
        SPK_TRY(spk_cli_u64("--contexts", word, 1, SPK_CONTEXT_MAX, &a->contexts[a->context_count++], err));
    }
    return a->context_count > 0 ? SPK_OK : spk_fail(err, SPK_E_USAGE, "--contexts: expected lengths with commas");
}

static spk_status take_switches(char *list, arguments *a, spk_error *err) {
    char *state = NULL;
    a->switch_count = 0;
    for (char *word = strtok_r(list, ",", &state); word != NULL; word = strtok_r(NULL, ",", &state)) {
        if (a->switch_count == SWITCHES_MAX) return spk_fail(err, SPK_E_USAGE, "--ab: more than %d names", SWITCHES_MAX);
        uint32_t bits = 0;
        SPK_TRY(spk_tool_fusions("--ab", word, &bits, err));
        a->switches[a->switch_count].name = word;
        a->switches[a->switch_count++].bits = bits;
    }
    return a->switch_count > 0 ? SPK_OK : spk_fail(err, SPK_E_USAGE, "--ab: expected names with commas");
}

static spk_status take_option(int option, arguments *a, spk_error *err) {
    switch (option) {
    case OPT_CONTEXTS: return take_contexts(optarg, a, err);
    case OPT_TOKENS:   return spk_cli_u64("--tokens", optarg, 1, SPK_CONTEXT_MAX, &a->token_count, err);
    case OPT_PROMPT:   return spk_cli_u64("--prompt", optarg, 1, SPK_CONTEXT_MAX, &a->prompt_count, err);
    case OPT_REPEATS:  return spk_cli_u64("--repeats", optarg, 1, REPEATS_MAX, &a->repeat_count, err);
    case OPT_AB:       return take_switches(optarg, a, err);
    case OPT_NO_FUSE:
    case OPT_FUSE:     return spk_tool_fusions_off(option == OPT_FUSE, optarg, &a->fusions_off, err);
    case OPT_BACKEND:  return spk_tool_backend("--backend", optarg, &a->backend, err);
    case OPT_KV:       return spk_tool_kv("--kv", optarg, &a->is_kv_q8, err);
    case OPT_ACCOUNT:  a->has_account = true; return SPK_OK;
    case OPT_FORCE:    a->is_forced = true; return SPK_OK;
    case OPT_THREADS:  return spk_cli_u64("--threads", optarg, 1, SPK_POOL_THREAD_MAX, &a->thread_count, err);
    default:           a->json_path = optarg; return SPK_OK;
    }
}

/* Returns -1 to go on, else an exit status. */
static int parse_arguments(int argc, char **argv, arguments *a) {
    spk_error err;
    for (int option; (option = spk_cli_option(argc, argv, ":hV", LONG_OPTIONS, &err)) != -1;) {
        if (option == 'h' || option == 'V') {
            if (option == 'h') fputs(HELP, stdout);
            else printf("%s %s\n", TOOL, SPK_VERSION_TEXT);
            return spk_cli_finish(TOOL, SPK_EXIT_DONE);
        }
        if (option == '?' || take_option(option, a, &err) != SPK_OK) return spk_cli_usage(TOOL, "%s", err.text);
    }
    int model_count = argc - optind;
    if (model_count < 1 || model_count > MODELS_MAX)
        return spk_cli_usage(TOOL, "expected 1 or 2 models, got %d", model_count);
    for (int m = 0; m < model_count; m++) a->paths[m] = argv[optind + m];
    a->model_count = (uint32_t)model_count;
    if (a->switch_count > 0 && model_count != 1) return spk_cli_usage(TOOL, "--ab takes one model, got %d", model_count);
    if (a->has_account && (model_count != 1 || a->switch_count > 0)) return spk_cli_usage(TOOL, "--account takes one model, and no --ab");
    return -1;
}

/* The GPU before any model, so that its start-up is not part of a load.  Without one a model decides what to say. */
static spk_status open_gpu(bench *b, spk_error *err) {
    spk_error ignored;
    if (b->arguments->backend != SPK_BACKEND_AUTO && b->arguments->backend != SPK_BACKEND_CUDA) return SPK_OK;
    double start_s = spk_bench_now_s();
    if (spk_cuda_open(&b->cuda, &ignored) != SPK_OK) return SPK_OK;
    b->machine.gpu_start_s = spk_bench_now_s() - start_s;
    return spk_bench_measure_gpu(&b->machine, b->cuda, err);
}

static spk_status open_all(bench *b, spk_error *err) {
    const arguments *a = b->arguments;
    bool needs_cpu = false;
    spk_bench_describe(&b->machine);
    SPK_TRY(open_gpu(b, err));
    for (uint32_t m = 0; m < a->model_count; m++) {
        SPK_TRY(start_subject(b, m, err));
        needs_cpu |= !spk_bench_is_on_gpu(b->subjects[m].model);
    }
    if (a->has_account && needs_cpu)
        return spk_fail(err, SPK_E_UNSUPPORTED, "--account: %s runs on the %s backend, expected cuda", a->paths[0],
                        spk_model_backend_name(b->subjects[0].model));
    if (a->switch_count > 0 && needs_cpu)
        return spk_fail(err, SPK_E_UNSUPPORTED, "--ab: %s runs on the %s backend; only cuda has fused kernels to leave out",
                        a->paths[0], spk_model_backend_name(b->subjects[0].model));
    return needs_cpu ? spk_bench_measure_cpu(&b->machine, (uint32_t)a->thread_count, err) : SPK_OK;
}

static spk_status bench_models(bench *b, spk_error *err) {
    const arguments *a = b->arguments;
    b->capacity = a->switch_count > 0 ? 1 : a->prompt_count;
    for (uint32_t c = 0; c < a->context_count; c++) {
        uint64_t end = a->contexts[c] + a->repeat_count * a->token_count;
        if (end > b->capacity) b->capacity = end;
    }
    if (b->capacity > SPK_CONTEXT_MAX)
        return spk_fail(err, SPK_E_USAGE, "--contexts, --repeats and --tokens need a context of %" PRIu64
                        " tokens, at most %d", b->capacity, (int)SPK_CONTEXT_MAX);
    if (a->json_path != NULL)
        SPK_TRY(spk_tool_output_begin("--json", a->json_path, a->is_forced, a->paths, MODELS_MAX, 0, &b->json_file, err));
    SPK_TRY(open_all(b, err));
    SPK_TRY(a->switch_count > 0 ? measure_switches(b, err) : measure_models(b, err));
    print_report(b);
    if (b->json_file != NULL) SPK_TRY(write_json(b, err));
    for (uint32_t i = 0; i < a->switch_count; i++)
        for (uint32_t c = 0; c < a->context_count; c++)
            if (!b->comparisons[i].is_same_bits[c])
                return spk_fail(err, SPK_E_MISMATCH, "--ab %s: other logits without it, at a context of %" PRIu64,
                                a->switches[i].name, a->contexts[c]);
    return SPK_OK;
}

int main(int argc, char **argv) {
    spk_cli_guard_inputs(TOOL, spk_outfile_remove_all);
    static bench b;                      /* samples of every repeat: too large for a stack */
    arguments a = { .contexts = { 128, 512 }, .context_count = 2, .token_count = 32, .prompt_count = 512,
                    .repeat_count = 3 };
    spk_error err = { 0 };
    int exit_status = parse_arguments(argc, argv, &a);
    if (exit_status >= 0) return exit_status;
    b.arguments = &a;
    spk_tool_signals();
    exit_status = bench_models(&b, &err) == SPK_OK ? SPK_EXIT_DONE : spk_cli_fail(TOOL, &err);
    spk_outfile_abort(b.json_file);
    for (uint32_t m = 0; m < MODELS_MAX; m++) {
        spk_bench_end(&b.runs[m]);
        free(b.subjects[m].tokens);
        spk_model_close(b.subjects[m].model);
    }
    spk_cuda_close(b.cuda);
    return spk_cli_finish(TOOL, exit_status);
}
