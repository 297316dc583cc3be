/* runtime/tool.c - see tool.h. */
#include "runtime/tool.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "formats/plain.h"
#include "runtime/model_internal.h"

void spk_tool_signals(void) {
    (void)signal(SIGPIPE, SIG_IGN);
    spk_outfile_remove_on_signals();
}

spk_status spk_tool_backend(const char *option, const char *text, spk_backend *out, spk_error *err) {
    static const struct { const char *name; spk_backend backend; } backends[] = {
        { "auto", SPK_BACKEND_AUTO }, { "cpu", SPK_BACKEND_CPU }, { "ref", SPK_BACKEND_REF },
        { "cuda", SPK_BACKEND_CUDA } };
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (strcmp(text, backends[i].name) == 0) {
            *out = backends[i].backend;
            return SPK_OK;
        }
    return spk_fail(err, SPK_E_USAGE, "%s '%s': expected auto, cpu, ref or cuda", option, text);
}

spk_status spk_tool_fusions(const char *option, const char *list, uint32_t *out, spk_error *err) {
    static const struct { const char *name; uint32_t bits; } fusions[] = {
        { "router", SPK_FUSE_ROUTER }, { "addnorm3", SPK_FUSE_ADDNORM3 }, { "shexp", SPK_FUSE_SHEXP },
        { "gdn-conv", SPK_FUSE_GDN_CONV }, { "gdn-core", SPK_FUSE_GDN_CORE },
        { "held", SPK_FUSE_HELD }, { "all", SPK_FUSE_ALL } };
    uint32_t bits = 0;
    for (const char *word = list;; word++) {
        size_t length = strcspn(word, ","), i = 0, count = sizeof fusions / sizeof *fusions;
        while (i < count && (strlen(fusions[i].name) != length || memcmp(fusions[i].name, word, length) != 0)) i++;
        if (i == count)
            return spk_fail(err, SPK_E_USAGE, "%s '%.*s': expected router, addnorm3, shexp, gdn-conv, gdn-core, held or all", option,
                            (int)(length < 24 ? length : 24), word);
        bits |= fusions[i].bits;
        word += length;
        if (*word == '\0') break;
    }
    *out = bits;
    return SPK_OK;
}

spk_status spk_tool_fusions_off(bool is_only, const char *list, uint32_t *off, spk_error *err) {
    uint32_t bits = 0;
    SPK_TRY(spk_tool_fusions(is_only ? "--fuse" : "--no-fuse", list, &bits, err));
    *off = is_only ? SPK_FUSE_ALL & ~bits : *off | bits;
    return SPK_OK;
}

spk_status spk_tool_kv(const char *option, const char *text, bool *out_q8, spk_error *err) {
    *out_q8 = strcmp(text, "q8") == 0;
    if (*out_q8 || strcmp(text, "f16") == 0) return SPK_OK;
    return spk_fail(err, SPK_E_USAGE, "%s '%s': expected f16 or q8", option, text);
}

spk_status spk_tool_tokens(const char *where, const char *text, size_t size_bytes, uint32_t vocab_size, uint32_t **out,
                           size_t *out_count, spk_error *err) {
    static const char separators[] = " \t\r\n,";
    /* Every id takes a digit and, but for the last, a separator. */
    uint32_t *tokens = malloc((size_bytes / 2 + 1) * sizeof *tokens);
    if (tokens == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", where);
    size_t count = 0;
    for (const char *c = text + strspn(text, separators); c < text + size_bytes; c += strspn(c, separators)) {
        uint64_t id = 0;
        const char *digit = c;
        while (*digit >= '0' && *digit <= '9' && id < vocab_size) id = 10 * id + (uint64_t)(*digit++ - '0');
        if (digit == c || (digit < text + size_bytes && !strspn(digit, separators)) || id >= vocab_size) {
            size_t length = strcspn(c, separators);
            free(tokens);
            return spk_fail(err, SPK_E_CORRUPT, "%s: entry %zu, '%.*s': expected a token id below %" PRIu32, where,
                            count, (int)(length < 24 ? length : 24), c, vocab_size);
        }
        tokens[count++] = (uint32_t)id;
        c = digit;
    }
    *out = tokens;
    *out_count = count;
    return SPK_OK;
}

/* ---- Output files ---- */

static spk_status check_not_input(const char *option, const char *path, const char *input, spk_error *err) {
    if (!spk_same_file(path, input)) return SPK_OK;
    return spk_fail(err, SPK_E_EXISTS, "%s %s: that is the input %s", option, path, input);
}

spk_status spk_tool_output_check(const char *option, const char *path, const char *const *inputs, size_t input_count,
                                 spk_error *err) {
    for (size_t i = 0; i < input_count && path != NULL; i++)
        if (inputs[i] != NULL) SPK_TRY(check_not_input(option, path, inputs[i], err));
    return SPK_OK;
}

spk_status spk_tool_output_check_gguf(const char *option, const char *path, const spk_gguf *gguf, spk_error *err) {
    for (uint32_t part = 0; path != NULL && gguf != NULL && part < spk_gguf_part_count(gguf); part++)
        SPK_TRY(check_not_input(option, path, spk_gguf_part_path(gguf, part), err));
    return SPK_OK;
}

spk_status spk_tool_output_check_model(const char *option, const char *path, const spk_model *model, spk_error *err) {
    const char *const inputs[] = { model->path };
    SPK_TRY(spk_tool_output_check(option, path, inputs, 1, err));
    return spk_tool_output_check_gguf(option, path, model->gguf, err);
}

spk_status spk_tool_output_begin(const char *option, const char *path, bool replace, const char *const *inputs,
                                 size_t input_count, uint64_t expected_bytes, spk_outfile **out, spk_error *err) {
    SPK_TRY(spk_tool_output_check(option, path, inputs, input_count, err));
    return spk_outfile_create(path, replace, expected_bytes, out, err);
}

void spk_tool_json_number(cJSON *object, const char *key, double value) {
    assert(isfinite(value));
    cJSON_AddNumberToObject(object, key, value);
}

spk_status spk_tool_json_commit(spk_outfile *file, const cJSON *report, spk_error *err) {
    char *text = spk_plain_json(report, true);
    spk_status status = SPK_OK;
    if (text == NULL) {
        status = spk_fail(err, SPK_E_MEMORY, "JSON report: out of memory");
    } else {
        uint64_t size_bytes = strlen(text);
        text[size_bytes] = '\n';                         /* in place of the NUL; size + 1 bytes are written */
        status = spk_outfile_write(file, 0, text, size_bytes + 1, err);
    }
    free(text);
    if (status == SPK_OK) return spk_outfile_commit(file, err);
    spk_outfile_abort(file);
    return status;
}

/* ---- Checks ---- */

spk_status spk_tool_same_tokenizer(const spk_model *base, const spk_model *other, spk_error *err) {
    static const char *const keys[] = { "tokenizer.ggml.tokens", "tokenizer.ggml.merges" };
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
        const spk_kv *base_list = spk_kv_find(base->kvs, keys[k]), *other_list = spk_kv_find(other->kvs, keys[k]);
        const uint8_t *base_cursor = NULL, *other_cursor = NULL;
        spk_text base_text, other_text;
        for (uint64_t i = 0;; i++) {
            bool base_has = spk_kv_next_text(base_list, &base_cursor, &base_text);
            bool other_has = spk_kv_next_text(other_list, &other_cursor, &other_text);
            if (!base_has && !other_has) break;
            if (base_has && other_has && base_text.size_bytes == other_text.size_bytes &&
                memcmp(base_text.bytes, other_text.bytes, base_text.size_bytes) == 0)
                continue;
            return spk_fail(err, SPK_E_MISMATCH, "%s: another tokenizer than that of %s: entry %" PRIu64
                            " of %s differs", other->path, base->path, i, keys[k]);
        }
    }
    return SPK_OK;
}

/* By the exponent's bits, in a loop that the compiler can vectorise: it runs for every token. */
static bool all_finite(const float *values, uint32_t count) {
    uint32_t bad = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bad |= (bits & 0x7f800000u) == 0x7f800000u;
    }
    return bad == 0;
}

spk_status spk_tool_logits_check(const char *where, uint64_t position, const float *logits, uint32_t vocab_size,
                                 spk_error *err) {
    if (all_finite(logits, vocab_size)) return SPK_OK;
    for (uint32_t i = 0; i < vocab_size; i++)
        if (!isfinite(logits[i]))
            return spk_fail(err, SPK_E_NONFINITE, "%s: position %" PRIu64 ": the logit of token %" PRIu32 " is %s",
                            where, position, i, isnan(logits[i]) ? "NaN" : logits[i] > 0 ? "+inf" : "-inf");
    return SPK_OK;
}
