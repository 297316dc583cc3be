/* runtime/tool.c - see tool.h. */
#include "runtime/tool.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/outfile.h"

spk_status spk_tool_backend(const char *option, const char *text, spk_backend *out, spk_error *err) {
    static const struct { const char *name; spk_backend backend; } backends[] = {
        { "auto", SPK_BACKEND_AUTO }, { "cpu", SPK_BACKEND_CPU }, { "ref", SPK_BACKEND_REF } };
    for (size_t i = 0; i < sizeof backends / sizeof *backends; i++)
        if (strcmp(text, backends[i].name) == 0) {
            *out = backends[i].backend;
            return SPK_OK;
        }
    return spk_fail(err, SPK_E_USAGE, "%s '%s': expected auto, cpu or ref", option, text);
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
            return spk_fail(err, SPK_E_USAGE, "%s: entry %zu, '%.*s': expected a token id below %" PRIu32, where, count,
                            (int)(length < 24 ? length : 24), c, vocab_size);
        }
        tokens[count++] = (uint32_t)id;
        c = digit;
    }
    *out = tokens;
    *out_count = count;
    return SPK_OK;
}

spk_status spk_tool_json_check(const char *path, const char *const *model_paths, uint32_t model_count, spk_error *err) {
    for (uint32_t m = 0; m < model_count && path != NULL; m++)
        if (spk_same_file(path, model_paths[m]))
            return spk_fail(err, SPK_E_USAGE, "--json %s: that is one of the models", path);
    return SPK_OK;
}

void spk_tool_json_number(cJSON *object, const char *key, double value) {
    assert(isfinite(value));
    cJSON_AddNumberToObject(object, key, value);
}

spk_status spk_tool_json_write(const char *path, const cJSON *report, spk_error *err) {
    char *text = cJSON_Print(report);
    if (text == NULL) return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
    uint64_t size = strlen(text);
    text[size] = '\n';                                   /* in place of the NUL; size + 1 bytes are written */
    spk_outfile *file = NULL;
    spk_status status = spk_outfile_create(path, true, size + 1, &file, err);
    if (status == SPK_OK) {
        status = spk_outfile_write(file, 0, text, size + 1, err);
        if (status == SPK_OK) status = spk_outfile_commit(file, err);
        else spk_outfile_abort(file);
    }
    cJSON_free(text);
    return status;
}
