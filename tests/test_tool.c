/* tests/test_tool.c - what the runtime's tools share: inputs that no output may replace, tokenizers that must agree. */
#include "runtime/tool.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/blocks.h"
#include "runtime/model_internal.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

static char dir[GB_PATH_MAX];

static void every_part_of_a_split_model_is_an_input(void) {
    static const char *const names[] = { "m-00001-of-00002.gguf", "m-00002-of-00002.gguf" };
    char path[GB_PATH_MAX];
    for (uint16_t part = 0; part < 2; part++) {
        gguf_build b = { 0 };
        gb_header(&b, 3, part, 3);
        gb_kv_split(&b, part, 2, 1);
        if (part == 1) gb_tensor(&b, "a", SPK_TYPE_F32, 0, GB_DIMS(8));
        gb_pad(&b, 32);
        if (part == 1) gb_fill(&b, 1, 32);
        gb_save(&b, gb_path(path, dir, names[part]));
        gb_free(&b);
    }
    spk_error err = { 0 };
    spk_model model = { .path = path };
    CHECK_OK(spk_gguf_open(gb_path(path, dir, names[0]), &model.own_gguf, &err), err);
    if (model.own_gguf == NULL) return;
    model.gguf = model.own_gguf;
    for (int part = 0; part < 2; part++) {
        char target[GB_PATH_MAX];
        CHECK(spk_tool_output_check_model("--logits", gb_path(target, dir, names[part]), &model, &err) == SPK_E_EXISTS,
              "part %d", part);
        CHECK(strstr(err.text, "--logits") == err.text && strstr(err.text, names[part]) != NULL, "%s", err.text);
    }
    CHECK_OK(spk_tool_output_check_model("--logits", "README.md", &model, &err), err);
    CHECK_OK(spk_tool_output_check_model("--json", NULL, &model, &err), err);
    CHECK_OK(spk_tool_output_check_gguf("--json", names[0], NULL, &err), err);
    spk_gguf_close(model.own_gguf);
}

static void an_output_never_replaces_an_input(void) {
    char path[GB_PATH_MAX], input[GB_PATH_MAX];
    gguf_build b = { 0 };
    gb_string(&b, "words");
    gb_save(&b, gb_path(input, dir, "input"));
    gb_free(&b);
    CHECK(symlink("input", gb_path(path, dir, "link")) == 0, "a link");
    const char *const inputs[] = { NULL, input };
    const int count = gb_file_count(dir);
    spk_outfile *file = NULL;
    spk_error err = { 0 };
    CHECK(spk_tool_output_begin("--json", path, true, inputs, 2, 0, &file, &err) == SPK_E_EXISTS, "through a link");
    CHECK(gb_file_count(dir) == count, "nothing is begun");
    CHECK_OK(spk_tool_output_begin("--json", gb_path(path, dir, "report"), false, inputs, 2, 0, &file, &err), err);
    cJSON *report = cJSON_CreateObject();
    spk_tool_json_number(report, "x", 1);
    CHECK_OK(spk_tool_json_commit(file, report, &err), err);
    cJSON_Delete(report);
    CHECK(gb_file_count(dir) == count + 1, "the report, and nothing else");
    CHECK(spk_tool_output_begin("--json", path, false, inputs, 2, 0, &file, &err) == SPK_E_EXISTS, "a report that is there");
    CHECK_OK(spk_tool_output_begin("--json", path, true, inputs, 2, 0, &file, &err), err);
    spk_outfile_abort(file);
    CHECK(gb_file_count(dir) == count + 1, "still the report, and nothing else");
}

/* Entries of a vocabulary; NULL ends a list. */
static spk_kv_set vocabulary(gguf_build *b, const char *const *tokens, const char *const *merges) {
    const char *const keys[] = { "tokenizer.ggml.tokens", "tokenizer.ggml.merges" };
    const char *const *const lists[] = { tokens, merges };
    for (size_t k = 0; k < 2; k++) {
        uint64_t count = 0, i = 0;
        while (lists[k][count] != NULL) count++;
        gb_array(b, keys[k], SPK_KV_STRING, count);
        while (i < count) gb_string(b, lists[k][i++]);
    }
    spk_kv_set set = { 0 };
    spk_error err = { 0 };
    uint64_t used_bytes;
    CHECK_OK(spk_kv_parse(b->bytes, b->size, 2, "vocabulary", &set, &used_bytes, &err), err);
    return set;
}

static void the_first_difference_of_two_tokenizers_is_named(void) {
    static const char *const tokens[] = { "a", "b", "ab", NULL }, *const merges[] = { "a b", NULL };
    static const char *const other_token[] = { "a", "c", "ab", NULL };
    static const char *const longer_token[] = { "a", "b", "abc", NULL };
    static const char *const more[] = { "a", "b", "ab", "d", NULL }, *const fewer[] = { "a", NULL };
    static const char *const none[] = { NULL };
    static const struct { const char *const *tokens, *const *merges, *message; } cases[] = {
        { tokens, merges, NULL },
        { other_token, merges, "OTHER: another tokenizer than that of BASE: entry 1 of tokenizer.ggml.tokens differs" },
        { longer_token, merges, "entry 2 of tokenizer.ggml.tokens" },
        { more, merges, "entry 3 of tokenizer.ggml.tokens" },
        { fewer, merges, "entry 1 of tokenizer.ggml.tokens" },
        { tokens, none, "entry 0 of tokenizer.ggml.merges" },
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        gguf_build base_bytes = { 0 }, other_bytes = { 0 };
        spk_kv_set base_kvs = vocabulary(&base_bytes, tokens, merges);
        spk_kv_set other_kvs = vocabulary(&other_bytes, cases[c].tokens, cases[c].merges);
        spk_model base = { .path = (char[]){ "BASE" }, .kvs = &base_kvs }, other = { .path = (char[]){ "OTHER" },
                                                                                    .kvs = &other_kvs };
        spk_error err = { 0 };
        spk_status status = spk_tool_same_tokenizer(&base, &other, &err);
        CHECK(status == (cases[c].message == NULL ? SPK_OK : SPK_E_MISMATCH), "case %zu: %s", c,
              spk_status_name(status));
        CHECK(cases[c].message == NULL || strstr(err.text, cases[c].message) != NULL, "case %zu: %s", c, err.text);
        spk_kv_free(&base_kvs);
        spk_kv_free(&other_kvs);
        gb_free(&base_bytes);
        gb_free(&other_bytes);
    }
}

static void a_logit_that_is_no_number_is_named(void) {
    static const struct { float value; const char *name; } bad[] = { { NAN, "NaN" }, { INFINITY, "+inf" },
                                                                     { -INFINITY, "-inf" } };
    float logits[100] = { 0 };
    spk_error err = { 0 };
    logits[3] = 3.4e38f;
    CHECK_OK(spk_tool_logits_check("MODEL", 7, logits, 100, &err), err);
    for (size_t b = 0; b < sizeof bad / sizeof *bad; b++) {
        char expected[80];
        logits[99] = bad[b].value;
        CHECK(spk_tool_logits_check("MODEL", 7, logits, 100, &err) == SPK_E_NONFINITE, "%s", bad[b].name);
        (void)snprintf(expected, sizeof expected, "MODEL: position 7: the logit of token 99 is %s", bad[b].name);
        CHECK(strcmp(err.text, expected) == 0, "%s", err.text);
    }
    CHECK_OK(spk_tool_logits_check("MODEL", 7, logits, 99, &err), err);
}

static void token_lists_are_strict(void) {
    static const struct { const char *text; size_t count; } good[] = { { "", 0 }, { " ,\n", 0 }, { "0", 1 },
                                                                       { "1,2 3\r\n\t9,", 4 }, { "007", 1 } };
    static const char *const bad[] = { "10", "-1", "1 x", "1.5", "1;2", "99999999999999999999", "+1", "0x1" };
    spk_error err = { 0 };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        uint32_t *tokens = NULL;
        size_t count = 99;
        CHECK_OK(spk_tool_tokens("LIST", good[i].text, strlen(good[i].text), 10, &tokens, &count, &err), err);
        CHECK(count == good[i].count, "'%s': %zu", good[i].text, count);
        free(tokens);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        uint32_t *tokens = NULL;
        size_t count = 0;
        CHECK(spk_tool_tokens("LIST", bad[i], strlen(bad[i]), 10, &tokens, &count, &err) == SPK_E_CORRUPT, "'%s'",
              bad[i]);
        CHECK(strstr(err.text, "LIST: entry ") == err.text, "%s", err.text);
    }
}

static void fusions_go_by_their_names(void) {
    static const struct { const char *list; uint32_t bits; } good[] = {
        { "router", SPK_FUSE_ROUTER }, { "addnorm3,shexp", SPK_FUSE_ADDNORM3 | SPK_FUSE_SHEXP }, { "all", SPK_FUSE_ALL },
        { "gdn-core,gdn-conv,gdn-core", SPK_FUSE_GDN_CONV | SPK_FUSE_GDN_CORE } };
    static const struct { const char *list, *word; } bad[] = { { "", "" }, { "router,", "" }, { ",router", "" }, { "rout", "rout" },
                                                               { "router,shexp2", "shexp2" }, { "router shexp", "router shexp" } };
    spk_error err = { 0 };
    uint32_t bits = 0;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        CHECK_OK(spk_tool_fusions("--fuse", good[i].list, &bits, &err), err);
        CHECK(bits == good[i].bits, "'%s': %u", good[i].list, bits);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char expected[120];
        CHECK(spk_tool_fusions("--fuse", bad[i].list, &bits, &err) == SPK_E_USAGE, "'%s'", bad[i].list);
        (void)snprintf(expected, sizeof expected, "--fuse '%s': expected router, addnorm3, shexp, gdn-conv, gdn-core, held or all", bad[i].word);
        CHECK(strcmp(err.text, expected) == 0, "%s", err.text);
    }
    bool is_q8 = false;
    CHECK_OK(spk_tool_kv("--kv", "q8", &is_q8, &err), err);
    CHECK(is_q8, "q8");
    CHECK_OK(spk_tool_kv("--kv", "f16", &is_q8, &err), err);
    CHECK(!is_q8, "f16");
    CHECK(spk_tool_kv("--kv", "q4", &is_q8, &err) == SPK_E_USAGE && strcmp(err.text, "--kv 'q4': expected f16 or q8") == 0, "%s", err.text);
}

int main(void) {
    gb_make_dir(dir);
    RUN(every_part_of_a_split_model_is_an_input);
    RUN(an_output_never_replaces_an_input);
    RUN(the_first_difference_of_two_tokenizers_is_named);
    RUN(a_logit_that_is_no_number_is_named);
    RUN(token_lists_are_strict);
    RUN(fusions_go_by_their_names);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
