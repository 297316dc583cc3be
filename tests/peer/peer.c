/* tests/peer/peer.c - compares spk with llama.cpp (its shipped libraries) and prints ok/FAIL lines for run.sh.
 *
 *   peer LIBS tokens  MODEL.gguf STRINGS.txt       token ids of hard strings, random strings and long runs
 *   peer LIBS chars   MODEL.gguf                   token ids around every assigned character
 *   peer LIBS ids     MODEL.gguf STRINGS.txt       our ids, one JSON object a line, for js_ids.js
 *   peer LIBS speed   MODEL.gguf TEXT...           MB/s of both tokenizers, and creation times; asserts nothing
 *   peer LIBS logits  MODEL.gguf TOKENS OURS.f32 LIMIT NAME   mean KL(ours||theirs) over the full vocabulary
 *   peer LIBS f32     IN.gguf OUT.gguf             every tensor to F32: llama.cpp's arithmetic without rounding
 *   peer LIBS requant IN.gguf OUT.gguf TYPE PART.. tensors whose name contains a PART become TYPE, others stay
 *
 * LIBS is the folder of llama.cpp's libraries.  MODEL may be a vocabulary without tensors.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "ggml-backend.h"
#include "llama.h"
#include "formats/blocks.h"
#include "formats/gguf.h"
#include "runtime/tokenizer_internal.h"
#include "tests/check.h"

enum { CHARACTERS_PER_TEXT = 512, FAILURES_SHOWN = 5, RANDOM_STRINGS = 20000 };

typedef struct {
    spk_tokenizer            *ours;
    struct llama_model       *model;
    const struct llama_vocab *theirs;
    double                    our_seconds, their_seconds;   /* to load */
} pair;

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void die(const char *what, const char *text) {
    fprintf(stderr, "peer: %s: %s\n", what, text);
    exit(1);
}

static void *allocate(size_t size) {
    void *memory = malloc(size ? size : 1);
    if (!memory) die("memory", "none left");
    return memory;
}

static void verdict(bool good, const char *name) {
    printf("%s %s\n", good ? "ok" : "FAIL", name);
    if (!good) check_failures++;
}

static char *read_all(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END)) die(path, "cannot be opened");
    const long end = ftell(f);
    rewind(f);
    char *bytes = allocate((size_t)end + 1);
    if (end < 0 || fread(bytes, 1, (size_t)end, f) != (size_t)end) die(path, "cannot be read");
    fclose(f);
    *size = (size_t)end;
    bytes[*size] = 0;
    return bytes;
}

/* Metadata alone, since a vocabulary file has no tensors and spk_gguf_open refuses that. */
static spk_tokenizer *load_ours(const char *path) {
    size_t size;
    char *file = read_all(path, &size);
    uint64_t kv_count, used;
    if (size < 24 || memcmp(file, "GGUF", 4) != 0) die(path, "not a GGUF file");
    memcpy(&kv_count, file + 16, sizeof kv_count);
    spk_kv_set kvs = {0};
    spk_tokenizer *t = NULL;
    spk_error err = {0};
    if (spk_kv_parse((const uint8_t *)file + 24, size - 24, kv_count, path, &kvs, &used, &err)) die(path, err.text);
    if (spk_tokenizer_from_kvs(&kvs, path, &t, &err)) die(path, err.text);
    spk_kv_free(&kvs);
    free(file);
    return t;
}

static void quiet(enum ggml_log_level level, const char *text, void *unused) {
    (void)unused;
    if (level == GGML_LOG_LEVEL_ERROR) fputs(text, stderr);
}

static pair open_pair(const char *path) {
    pair p = {0};
    const double start = now_s();
    p.ours = load_ours(path);
    p.our_seconds = now_s() - start;
    struct llama_model_params options = llama_model_default_params();
    options.vocab_only = true;
    p.model = llama_model_load_from_file(path, options);
    p.their_seconds = now_s() - start - p.our_seconds;
    if (!p.model) die(path, "llama.cpp cannot load it");
    p.theirs = llama_model_get_vocab(p.model);
    return p;
}

static void close_pair(pair *p) {
    spk_tokenizer_destroy(p->ours);
    llama_model_free(p->model);
}

static uint32_t *encode_ours(const pair *p, const char *text, size_t size, size_t *count) {
    uint32_t *ids = NULL;
    spk_error err = {0};
    if (spk_tokenizer_encode(p->ours, text, size, true, &ids, count, &err)) die("encode", err.text);
    return ids;
}

static int32_t *encode_theirs(const pair *p, const char *text, size_t size, size_t *count) {
    int32_t *ids = allocate((size + 8) * sizeof *ids);
    const int32_t found = llama_tokenize(p->theirs, text, (int32_t)size, ids, (int32_t)size + 8, false, true);
    if (found < 0) die("llama_tokenize", "too many tokens");
    *count = (size_t)found;
    return ids;
}

static bool same_ids(const pair *p, const char *text, size_t size) {
    size_t our_count, their_count, same = 0;
    uint32_t *ours = encode_ours(p, text, size, &our_count);
    int32_t *theirs = encode_theirs(p, text, size, &their_count);
    while (same < our_count && same < their_count && ours[same] == (uint32_t)theirs[same]) same++;
    const bool good = same == our_count && same == their_count;
    static int shown;
    if (!good && shown++ < FAILURES_SHOWN) {
        fprintf(stderr, "  %zu ids, not %zu; first difference at %zu:", our_count, their_count, same);
        for (size_t i = same; i < same + 6; i++)
            fprintf(stderr, " %lld/%lld", i < our_count ? (long long)ours[i] : -1,
                    i < their_count ? (long long)theirs[i] : -1);
        fprintf(stderr, "\n  text: '%.*s'\n", (int)(size < 200 ? size : 200), text);
    }
    free(ours);
    free(theirs);
    return good;
}

/* ---- Strings ---- */

static size_t put_code(char *out, uint32_t code) {
    if (code < 0x80) return out[0] = (char)code, 1;
    const size_t more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    static const unsigned char lead[] = { 0, 0xC0, 0xE0, 0xF0 };
    for (size_t i = more; i > 0; i--, code >>= 6) out[i] = (char)(0x80 | (code & 0x3F));
    out[0] = (char)(lead[more] | code);
    return more + 1;
}

/* One line of the strings file in place; returns its size. */
static size_t unescape(char *line) {
    char *out = line;
    for (const char *in = line; *in; in++) {
        if (*in != '\\') {
            *out++ = *in;
            continue;
        }
        char *end;
        switch (*++in) {
        case 'n': *out++ = '\n'; break;
        case 'r': *out++ = '\r'; break;
        case 't': *out++ = '\t'; break;
        case 'e': break;
        case '\\': *out++ = '\\'; break;
        case 'x': {
            const char digits[] = { in[1], in[2], 0 };
            *out++ = (char)strtoul(digits, &end, 16);
            if (*end) die("strings", line);
            in += 2;
            break;
        }
        case 'u': {
            const uint32_t code = (uint32_t)strtoul(in + 2, &end, 16);
            if (in[1] != '{' || *end != '}') die("strings", line);
            in = end;               /* before writing, since out may catch up */
            out += put_code(out, code);
            break;
        }
        default: die("strings: unknown escape", line);
        }
    }
    return (size_t)(out - line);
}

/* Calls use(context, text, size) for each string of the file; returns how many. */
static size_t each_string(const char *path, void (*use)(void *context, const char *text, size_t size), void *context) {
    size_t size, count = 0;
    char *file = read_all(path, &size);
    for (char *line = file, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        if (!*line || (line[0] == '#' && line[1] == ' ')) continue;
        use(context, line, unescape(line));
        count++;
    }
    free(file);
    return count;
}

typedef struct { const pair *p; size_t different; } comparison;

static void compare_one(void *context, const char *text, size_t size) {
    comparison *c = context;
    c->different += !same_ids(c->p, text, size);
}

static const char *const fragments[] = {
    "a", "e", "th", "The", "S", "t", "ll", "RE", "ve", "\xC3\xA9", "\xD0\x96\xD0\xB8", "\xE4\xB8\xAD",
    "\xE6\x96\x87", "\xED\x95\x9C", "\xF0\x90\x90\x80", "\xCA\xB0", "1", "42", "\xD9\xA3", "\xC2\xBD",
    "\xE2\x85\xA7", "\xCC\x81", "\xE0\xA4\xBE", "\xE2\x83\x9D", "\xEF\xB8\x8F", "'", "'s", "\"", "!", "--", "_",
    "+", "\xE2\x82\xAC", "\xE3\x80\x82", "\xF0\x9F\x98\x80", "\xE2\x80\x8D", " ", " ", "  ", "\t", "\n", "\r\n",
    "\v", "\xC2\x85", "\xC2\xA0", "\xE2\x80\x83", "\xE2\x80\xA8", "\xE3\x80\x80", "\x01", "\x7F", "\xC2\xAD",
    "\xEE\x80\x80", "\xCD\xB8", "<|im_end|>", "<|im_", "<think>", "ing", " the", ".\n", "{", "}\n",
};

static size_t compare_random(const pair *p) {
    uint64_t seed = 1;
    size_t different = 0;
    for (int round = 0; round < RANDOM_STRINGS; round++) {
        char text[1024];
        size_t size = 0;
        for (uint64_t i = check_random(&seed) % 40; i > 0; i--) {
            const char *f = fragments[check_random(&seed) % (sizeof fragments / sizeof *fragments)];
            memcpy(text + size, f, strlen(f));
            size += strlen(f);
        }
        different += !same_ids(p, text, size);
    }
    return different;
}

static size_t compare_runs(const pair *p) {
    enum { SIZE = 20000 };
    size_t different = 0;
    char *text = allocate(SIZE);
    for (size_t f = 0; f < sizeof fragments / sizeof *fragments; f++) {
        const size_t length = strlen(fragments[f]);
        for (size_t i = 0; i < SIZE; i++) text[i] = fragments[f][i % length];
        different += !same_ids(p, text, SIZE / length * length);
    }
    free(text);
    return different;
}

static void run_tokens(const char *model, const char *strings) {
    pair p = open_pair(model);
    comparison c = { .p = &p };
    const size_t count = each_string(strings, compare_one, &c);
    char name[256];
    snprintf(name, sizeof name, "token ids of %zu hard strings equal llama.cpp's: %s", count, model);
    verdict(count > 0 && c.different == 0, name);
    snprintf(name, sizeof name, "token ids of %d random strings equal llama.cpp's: %s", RANDOM_STRINGS, model);
    verdict(compare_random(&p) == 0, name);
    snprintf(name, sizeof name, "token ids of long runs equal llama.cpp's: %s", model);
    verdict(compare_runs(&p) == 0, name);
    /* llama.cpp takes any token named </s> for an end, which in Qwen's vocabulary is plain HTML. */
    bool ends = true;
    for (uint32_t id = 0; id < spk_tokenizer_token_count(p.ours); id++)
        if (strcmp(llama_vocab_get_text(p.theirs, (int32_t)id), "</s>") != 0)
            ends = ends && spk_tokenizer_is_end(p.ours, id) == llama_vocab_is_eog(p.theirs, (int32_t)id);
    snprintf(name, sizeof name, "end tokens equal llama.cpp's: %s", model);
    verdict(ends, name);
    close_pair(&p);
}

/* Every character of the planes in use, in surroundings where its kind decides how the neighbours are cut. */
static void run_chars(const char *model) {
    static const struct { uint32_t first, last; } ranges[] = {
        { 1, 0xD7FF }, { 0xE000, 0x32FFF }, { 0xE0000, 0xE01FF },
    };
    pair p = open_pair(model);
    char *text = allocate(CHARACTERS_PER_TEXT * 48);
    size_t size = 0, count = 0, different = 0;
    for (size_t r = 0; r < sizeof ranges / sizeof *ranges; r++) {
        for (uint32_t code = ranges[r].first; code <= ranges[r].last; code++) {
            static const char *const around[] = { "\n", "'s  ", " ", " !", "\n\n", "the" };
            for (size_t i = 0; i < sizeof around / sizeof *around; i++) {
                size += put_code(text + size, code);
                memcpy(text + size, around[i], strlen(around[i]));
                size += strlen(around[i]);
            }
            if (++count % CHARACTERS_PER_TEXT == 0 || code == ranges[r].last) {
                different += !same_ids(&p, text, size);
                size = 0;
            }
        }
    }
    char name[256];
    snprintf(name, sizeof name, "token ids around %zu characters equal llama.cpp's: %s", count, model);
    verdict(different == 0, name);
    free(text);
    close_pair(&p);
}

static void print_json(void *context, const char *text, size_t size) {
    const pair *p = context;
    size_t count;
    uint32_t *ids = encode_ours(p, text, size, &count);
    printf("{\"text\":\"");
    for (size_t i = 0; i < size; i++) {
        const unsigned char c = (unsigned char)text[i];
        printf(c < 0x20 || c == '"' || c == '\\' ? "\\u%04x" : "%c", c);
    }
    printf("\",\"ids\":[");
    for (size_t i = 0; i < count; i++) printf("%s%u", i ? "," : "", ids[i]);
    printf("]}\n");
    free(ids);
}

static void run_ids(const char *model, const char *strings) {
    pair p = { .ours = load_ours(model) };
    each_string(strings, print_json, &p);
    spk_tokenizer_destroy(p.ours);
}

/* ---- Speed ---- */

static void run_speed(const char *model, char **paths, int path_count) {
    pair p = open_pair(model);
    printf("create: spk %.3f s, llama.cpp %.3f s (both from the file): %s\n", p.our_seconds, p.their_seconds, model);
    for (int i = 0; i < path_count; i++) {
        size_t size, count;
        char *text = read_all(paths[i], &size);
        double best[2] = { INFINITY, INFINITY };
        for (int round = 0; round < 3; round++) {
            double start = now_s();
            free(encode_ours(&p, text, size, &count));
            best[0] = fmin(best[0], now_s() - start);
            start = now_s();
            free(encode_theirs(&p, text, size, &count));
            best[1] = fmin(best[1], now_s() - start);
        }
        printf("encode: spk %.1f MB/s, llama.cpp %.1f MB/s (best of 3, %zu bytes, %zu tokens): %s\n",
               (double)size / 1e6 / best[0], (double)size / 1e6 / best[1], size, count, paths[i]);
        free(text);
    }
    close_pair(&p);
}

/* ---- Logits ---- */

/* sum p (ln p - ln q) of two rows of logits */
static double divergence(const float *p, const float *q, size_t count) {
    double p_max = -INFINITY, q_max = -INFINITY, p_sum = 0, q_sum = 0, kl = 0;
    for (size_t i = 0; i < count; i++) {
        p_max = fmax(p_max, (double)p[i]);
        q_max = fmax(q_max, (double)q[i]);
    }
    for (size_t i = 0; i < count; i++) {
        p_sum += exp((double)p[i] - p_max);
        q_sum += exp((double)q[i] - q_max);
    }
    const double shift = (p_max + log(p_sum)) - (q_max + log(q_sum));
    for (size_t i = 0; i < count; i++)
        kl += exp((double)p[i] - p_max) / p_sum * ((double)p[i] - (double)q[i] - shift);
    return kl;
}

static struct llama_context *open_context(struct llama_model *model, uint32_t token_count) {
    struct llama_context_params options = llama_context_default_params();
    options.n_ctx = token_count;
    options.n_batch = options.n_ubatch = token_count;
    options.n_threads = options.n_threads_batch = 2;
    options.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    options.type_k = options.type_v = GGML_TYPE_F32;
    struct llama_context *context = llama_init_from_model(model, options);
    if (!context) die("llama.cpp", "no context");
    return context;
}

static void run_logits(const char *path, const char *tokens_path, const char *ours_path, double limit,
                       const char *label) {
    size_t text_size, ours_size;
    char *text = read_all(tokens_path, &text_size);
    struct llama_batch batch = llama_batch_init((int32_t)text_size + 1, 0, 1);
    for (char *at = text, *end;; at = end) {
        const long id = strtol(at + strspn(at, ", \n"), &end, 10);
        if (end == at + strspn(at, ", \n")) break;
        batch.token[batch.n_tokens] = (llama_token)id;
        batch.pos[batch.n_tokens] = batch.n_tokens;
        batch.n_seq_id[batch.n_tokens] = 1;
        batch.seq_id[batch.n_tokens][0] = 0;
        batch.logits[batch.n_tokens++] = 1;
    }
    const size_t count = (size_t)batch.n_tokens;
    struct llama_model_params options = llama_model_default_params();
    options.use_extra_bufts = false;
    struct llama_model *model = llama_model_load_from_file(path, options);
    if (!model) die(path, "llama.cpp cannot load it");
    struct llama_context *context = open_context(model, (uint32_t)count);
    if (llama_decode(context, batch)) die(path, "llama_decode failed");

    const size_t vocab = (size_t)llama_vocab_n_tokens(llama_model_get_vocab(model));
    char *ours = read_all(ours_path, &ours_size);
    if (ours_size != count * vocab * sizeof(float)) die(ours_path, "is not [tokens][vocab] floats");
    float *row = allocate(vocab * sizeof *row);
    double sum = 0, worst = 0;
    size_t same_top = 0;
    for (size_t i = 0; i < count; i++) {
        const float *theirs = llama_get_logits_ith(context, (int32_t)i);
        memcpy(row, ours + i * vocab * sizeof *row, vocab * sizeof *row);
        const double kl = divergence(row, theirs, vocab);
        sum += kl;
        if (!(kl <= worst)) worst = kl;
        size_t our_top = 0, their_top = 0;
        for (size_t v = 1; v < vocab; v++) {
            if (row[v] > row[our_top]) our_top = v;
            if (theirs[v] > theirs[their_top]) their_top = v;
        }
        same_top += our_top == their_top;
    }
    const double mean = sum / (double)count;
    char name[320];
    snprintf(name, sizeof name, "logits: mean KL %.7f (limit %g), max %.6f, same top %zu of %zu: %s", mean, limit,
             worst, same_top, count, label);
    verdict(count > 0 && mean <= limit, name);
    free(row);
    free(ours);
    free(text);
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
}

/* ---- Requantizing with llama.cpp ---- */

static void run_requant(const char *in, const char *out, const char *type_name, char **parts, int part_count) {
    spk_gguf *gguf;
    spk_error err = {0};
    if (spk_gguf_open(in, &gguf, &err)) die(in, err.text);
    const spk_type_info *type = spk_type_find_name(type_name);
    if (!type) die("requant: unknown type", type_name);
    const uint64_t count = spk_gguf_tensor_count(gguf);
    struct llama_model_tensor_override *overrides = allocate((count + 1) * sizeof *overrides);
    char (*patterns)[SPK_GGUF_NAME_BYTES_MAX * 2 + 4] = allocate(count * sizeof *patterns);
    uint64_t weight_count = 0;
    for (uint64_t i = 0; i < count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, i);
        char *p = patterns[i];
        *p++ = '^';
        for (const char *c = t->name; *c; c++) {
            if (*c == '.') *p++ = '\\';
            *p++ = *c;
        }
        memcpy(p, "$", 2);
        overrides[i] = (struct llama_model_tensor_override){ patterns[i], (enum ggml_type)t->type };
        for (int part = 0; part < part_count; part++) {
            if (!strstr(t->name, parts[part])) continue;
            overrides[i].type = (enum ggml_type)type->type;
            weight_count += t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
            break;
        }
    }
    overrides[count] = (struct llama_model_tensor_override){0};
    struct llama_model_quantize_params options = llama_model_quantize_default_params();
    options.nthread = 2;
    options.ftype = LLAMA_FTYPE_MOSTLY_Q4_K_M;
    options.allow_requantize = true;
    options.tt_overrides = overrides;
    const double start = now_s();
    if (llama_model_quantize(in, out, &options)) die(in, "llama_model_quantize failed");
    const double seconds = now_s() - start;
    printf("requant: llama.cpp %.2f s, %llu weights, %.1f M weights/s: %s\n", seconds, (unsigned long long)weight_count,
           (double)weight_count / 1e6 / seconds, out);
    free(overrides);
    free(patterns);
    spk_gguf_close(gguf);
}

static void run_f32(const char *in, const char *out) {
    struct llama_model_quantize_params options = llama_model_quantize_default_params();
    options.nthread = 2;
    options.ftype = LLAMA_FTYPE_ALL_F32;
    options.allow_requantize = true;
    if (llama_model_quantize(in, out, &options)) die(in, "llama_model_quantize failed");
}

int main(int argc, char **argv) {
    if (argc < 4) die("usage", "peer LIBS tokens|chars|ids|speed|logits|f32|requant ...");
    const char *command = argv[2];
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(argv[1]);
    llama_backend_init();
    if (!strcmp(command, "tokens") && argc == 5) run_tokens(argv[3], argv[4]);
    else if (!strcmp(command, "chars") && argc == 4) run_chars(argv[3]);
    else if (!strcmp(command, "ids") && argc == 5) run_ids(argv[3], argv[4]);
    else if (!strcmp(command, "speed") && argc > 4) run_speed(argv[3], argv + 4, argc - 4);
    else if (!strcmp(command, "logits") && argc == 8) run_logits(argv[3], argv[4], argv[5], atof(argv[6]), argv[7]);
    else if (!strcmp(command, "f32") && argc == 5) run_f32(argv[3], argv[4]);
    else if (!strcmp(command, "requant") && argc > 6) run_requant(argv[3], argv[4], argv[5], argv + 6, argc - 6);
    else die("unknown command or wrong arguments", command);
    llama_backend_free();
    return CHECK_EXIT();
}
