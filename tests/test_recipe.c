/* tests/test_recipe.c - the recipe grammar, its errors, the built-in recipes and applying them. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/gguf.h"
#include "requant/convert.h"
#include "requant/recipe.h"
#include "requant/recipes_builtin.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

static const char TINY36[] = "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf";
static const char QWEN36[] =
    "qwen35moe L40 H2048 V248320 attn16/2x256r64 gdn16/32x128x128c4i4 moe8/256x512+512";

/* The tiny Qwen3.6, on which recipes are tried. */
static spk_gguf          *source;
static spk_model_config   config;
static uint64_t           tensor_count;
static spk_tensor        *tensors;
static spk_recipe_choice *choices;

static void load_model(void) {
    spk_error err = { 0 };
    CHECK_OK(spk_gguf_open(TINY36, &source, &err), err);
    CHECK_OK(spk_convert_config(source, &config, &err), err);
    tensor_count = spk_gguf_tensor_count(source);
    tensors = calloc(tensor_count, sizeof *tensors);
    choices = calloc(tensor_count, sizeof *choices);
    for (uint64_t i = 0; i < tensor_count; i++) spk_tensor_from_gguf(spk_gguf_tensor_at(source, i), &tensors[i]);
}

static uint64_t index_of(const char *name) {
    for (uint64_t i = 0; i < tensor_count; i++)
        if (strcmp(tensors[i].name, name) == 0) return i;
    CHECK(0, "no tensor %s", name);
    exit(1);
}

static spk_status apply(const spk_recipe *recipe, spk_error *err) {
    return spk_recipe_apply(recipe, &config, tensors, tensor_count, choices, err);
}

/* Parses "recipe t" and more lines, and applies them. */
static spk_status apply_text(const char *lines, spk_recipe **recipe, spk_error *err) {
    char text[2000];
    (void)snprintf(text, sizeof text, "recipe t\n%s", lines);
    *recipe = NULL;
    spk_status status = spk_recipe_parse(text, "t", recipe, err);
    return status == SPK_OK ? apply(*recipe, err) : status;
}

static void expect_refusal(const char *lines, spk_status want, const char *in_message) {
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK(apply_text(lines, &recipe, &err) == want, "%s: %s", lines, err.text);
    CHECK(strstr(err.text, in_message) != NULL, "'%s' is not in: %s", in_message, err.text);
    spk_recipe_free(recipe);
}

static void a_recipe_is_parsed(void) {
    static const char text[] = "# a comment\n\n  recipe my-1.0_x  # another\r\nabout  what   it does\nmodel a  b\n"
                               "model c\ndefault\nrule blk#x\\.1 F32,Q8_0 -> Q4_K\nrule y * -> Q8_0 optional";
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(spk_recipe_parse(text, "t", &recipe, &err), err);
    CHECK(strcmp(spk_recipe_name(recipe), "my-1.0_x") == 0, "%s", spk_recipe_name(recipe));
    CHECK(strcmp(spk_recipe_about(recipe), "what it does") == 0, "%s", spk_recipe_about(recipe));
    CHECK(strncmp(spk_recipe_text(recipe), text, strlen(text)) == 0, "%s", spk_recipe_text(recipe));
    spk_recipe_free(recipe);
}

static void an_error_names_its_line(void) {
    static const struct { const char *text, *want; } bad[] = {
        { "", "t:1: expected 'recipe NAME'" },
        { "# only this\n\n", "t:3: expected 'recipe NAME'" },
        { "about x\nrecipe a\n", "t:1: expected 'recipe NAME'" },
        { "recipe\n", "t:1: expected 'recipe NAME'" },
        { "recipe a b\n", "t:1: expected 'recipe NAME'" },
        { "recipe a/b\n", "t:1: expected 'recipe NAME'" },
        { "recipe a\n\nrecipe b\n", "t:3: a second 'recipe'" },
        { "recipe a\nabout x\nabout y\n", "t:3: a second 'about'" },
        { "recipe a\nmodel\n", "t:2: expected 'model FINGERPRINT'" },
        { "recipe a\nmodel x\ndefault yes\n", "t:3: expected nothing after 'default'" },
        { "recipe a\n\ndefault\n# end\n", "t:3: 'default' in a recipe without" },
        { "recipe a\n# x\nrules x F32 -> Q4_K\n", "t:3: 'rules' is no statement" },
        { "recipe a\nrule x\n", "t:2: expected 'rule REGEX FROM -> TO [optional]'" },
        { "recipe a\nrule x F32 Q4_K\n", "t:2: expected 'rule REGEX" },
        { "recipe a\nrule x F32 => Q4_K\n", "t:2: expected 'rule REGEX" },
        { "recipe a\nrule x F32 -> Q4_K maybe\n", "t:2: expected 'rule REGEX" },
        { "recipe a\nrule x F32 -> Q4_K optional optional\n", "t:2: expected 'rule REGEX" },
        { "recipe a\nrule x F32,,Q8_0 -> Q4_K\n", "t:2: '' is not a weight type" },
        { "recipe a\nrule x q8_0 -> Q4_K\n", "t:2: 'q8_0' is not a weight type" },
        { "recipe a\nrule x F32 -> Q4_0\n", "t:2: cannot requantize to 'Q4_0'" },
        { "recipe a\nrule x F32 -> Q4_K,Q5_K\n", "t:2: cannot requantize to 'Q4_K,Q5_K'" },
        { "recipe a\nrule x(y F32 -> Q4_K\n", "t:2: regex 'x(y'" },
        { "recipe a\nrule x F32 -> Q4_K\x01\n", "t:2: control character 0x01" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        spk_recipe *recipe;
        spk_error err = { 0 };
        CHECK(spk_recipe_parse(bad[i].text, "t", &recipe, &err) == SPK_E_USAGE, "case %zu: %s", i, err.text);
        CHECK(strncmp(err.text, bad[i].want, strlen(bad[i].want)) == 0, "case %zu: %s", i, err.text);
    }
}

static void a_byte_order_mark_is_skipped(void) {
    spk_recipe *recipe;
    spk_error err = { 0 };
    spk_status status = spk_recipe_parse("\xef\xbb\xbfrecipe a\nabout x\n", "t", &recipe, &err);
    CHECK(status == SPK_OK, "%s", err.text);
    if (status != SPK_OK) return;
    CHECK(strcmp(spk_recipe_text(recipe), "recipe a\nabout x\n") == 0, "%s", spk_recipe_text(recipe));
    spk_recipe_free(recipe);
    CHECK(spk_recipe_parse("recipe a\n\xef\xbb\xbf" "about x\n", "t", &recipe, &err) == SPK_E_USAGE, "inside");
}

static void limits_are_enforced(void) {
    char *text = malloc(SPK_RECIPE_BYTES_MAX + 100);
    spk_recipe *recipe;
    spk_error err = { 0 };
    char *end = text + sprintf(text, "recipe a\n");
    for (int i = 0; i <= SPK_RECIPE_RULE_COUNT_MAX; i++) end += sprintf(end, "rule x F32 -> Q4_K\n");
    CHECK(spk_recipe_parse(text, "t", &recipe, &err) == SPK_E_USAGE && strstr(err.text, "t:1026: more than 1024 rules"),
          "%s", err.text);
    end = text + sprintf(text, "recipe a\n");
    for (int i = 0; i <= SPK_RECIPE_MODEL_COUNT_MAX; i++) end += sprintf(end, "model x\n");
    CHECK(spk_recipe_parse(text, "t", &recipe, &err) == SPK_E_USAGE && strstr(err.text, "t:66: more than 64 model"),
          "%s", err.text);
    memset(text, '#', SPK_RECIPE_BYTES_MAX + 1);
    text[SPK_RECIPE_BYTES_MAX + 1] = '\0';
    CHECK(spk_recipe_parse(text, "t", &recipe, &err) == SPK_E_LIMIT, "%s", err.text);
    free(text);
}

static void the_first_rule_that_matches_the_name_wins(void) {
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(apply_text("rule blk\\.0\\.ffn_down_exps\\.weight Q6_K -> Q8_0 optional\n" /* takes layer 0, a Q5_K */
                        "rule blk\\.\\d\\.ffn_down_exps\\.weight Q5_K -> Q4_K\n", &recipe, &err), err);
    CHECK(choices[index_of("blk.0.ffn_down_exps.weight")].type == SPK_TYPE_Q5_K, "copied: FROM has no Q5_K");
    CHECK(choices[index_of("blk.0.ffn_down_exps.weight")].rule == NULL, "copied by no rule");
    const spk_recipe_choice *choice = &choices[index_of("blk.1.ffn_down_exps.weight")];
    CHECK(choice->type == SPK_TYPE_Q4_K, "requantized");
    CHECK(strcmp(choice->rule, "blk\\.\\d\\.ffn_down_exps\\.weight Q5_K -> Q4_K") == 0, "%s", choice->rule);
    CHECK(choices[index_of("blk.7.ffn_down_exps.weight")].type == SPK_TYPE_Q6_K, "copied: not in FROM");
    spk_recipe_free(recipe);
}

static void a_tensor_of_the_target_type_is_copied_and_counts(void) {
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(apply_text("rule blk\\.0\\.ffn_gate_exps\\.weight Q8_0 -> Q4_K\n", &recipe, &err), err);
    const spk_recipe_choice *choice = &choices[index_of("blk.0.ffn_gate_exps.weight")];
    CHECK(choice->type == SPK_TYPE_Q4_K && choice->rule != NULL, "type %u", choice->type);
    spk_recipe_free(recipe);
}

static void a_rule_without_effect_is_an_error(void) {
    expect_refusal("rule ffn_down_exps F32 -> Q4_K\n", SPK_E_MISMATCH,
                   "rule 'ffn_down_exps F32 -> Q4_K' matches no tensor");
    expect_refusal("rule blk\\.0\\.ffn_down_exps * -> Q4_K\n", SPK_E_MISMATCH, "matches no tensor"); /* half a name */
    expect_refusal("rule blk\\.\\d\\.ffn_down_exps\\.weight F16,Q8_0 -> Q4_K\n", SPK_E_MISMATCH,
                   "8 names, but none of those types (the first, 'blk.0.ffn_down_exps.weight', is Q5_K)");
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(apply_text("rule nothing F32 -> Q4_K optional\n", &recipe, &err), err);
    spk_recipe_free(recipe);
}

static void protected_tensors_are_refused(void) {
    static const char *const names[] = {
        "blk.0.attn_norm.weight", "blk.0.post_attention_norm.weight", "output_norm.weight", "blk.3.attn_q_norm.weight",
        "blk.3.attn_k_norm.weight", "blk.0.ssm_alpha.weight", "blk.0.ssm_beta.weight", "blk.0.ssm_conv1d.weight",
        "blk.0.ssm_a", "blk.0.ssm_dt.bias", "blk.0.ssm_norm.weight", "blk.0.ffn_gate_inp.weight",
        "blk.0.ffn_gate_inp_shexp.weight" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char rule[200];
        (void)snprintf(rule, sizeof rule, "rule \\Q%s\\E * -> Q8_0\n", names[i]);
        (void)index_of(names[i]);
        expect_refusal(rule, SPK_E_UNSUPPORTED, names[i]);
    }
}

static void a_row_width_that_does_not_fit_is_refused(void) {
    spk_tensor *t = &tensors[index_of("output.weight")];
    t->dims[0] = 288;
    expect_refusal("rule output\\.weight * -> Q4_K\n", SPK_E_SHAPE,
                   "'output.weight' are 288 wide, expected a multiple of 256 (remainder 32)");
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(apply_text("rule output\\.weight * -> Q8_0\n", &recipe, &err), err);
    spk_recipe_free(recipe);
    t->dims[0] = 256;
}

/* An MTP block has names that the rules of a recipe match, but it is not decode's. */
static void tensors_that_decode_does_not_read_are_left_alone(void) {
    spk_tensor *t = &tensors[index_of("blk.7.ffn_down_exps.weight")];
    char name[64];
    memcpy(name, t->name, sizeof name);
    strcpy(t->name, "blk.8.ffn_down_exps.weight");
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(apply_text("rule blk\\.\\d+\\.ffn_down_exps\\.weight * -> Q4_K\n", &recipe, &err), err);
    CHECK(choices[index_of("blk.6.ffn_down_exps.weight")].type == SPK_TYPE_Q4_K, "decode's own");
    CHECK(choices[index_of("blk.8.ffn_down_exps.weight")].type == SPK_TYPE_Q6_K, "an MTP block's");
    spk_recipe_free(recipe);
    expect_refusal("rule blk\\.8\\..* * -> Q4_K\n", SPK_E_MISMATCH, "matches no tensor that decode reads");
    memcpy(t->name, name, sizeof name);
}

static void an_exploding_regex_ends(void) {
    expect_refusal("rule (([a-z0-9._]+)+)+[!?] * -> Q4_K\n", SPK_E_LIMIT, "takes too many steps");
}

static void set_rules_come_first_and_the_last_one_wins(void) {
    spk_recipe *recipe, *again;
    spk_error err = { 0 };
    CHECK_OK(spk_recipe_load("ffn", "", &recipe, &err), err);
    CHECK_OK(spk_recipe_set(recipe, "blk\\.[01]\\.ffn_down_exps\\.weight=Q6_K", &err), err);
    CHECK_OK(spk_recipe_set(recipe, "blk\\.1\\.ffn_down_exps\\.weight=Q8_0", &err), err);
    CHECK_OK(spk_recipe_parse(spk_recipe_text(recipe), "text", &again, &err), err);
    const spk_recipe *both[] = { recipe, again };
    for (int i = 0; i < 2; i++) { /* the text that goes into the pack says the same */
        CHECK_OK(apply(both[i], &err), err);
        CHECK(choices[index_of("blk.0.ffn_down_exps.weight")].type == SPK_TYPE_Q6_K, "set");
        CHECK(choices[index_of("blk.1.ffn_down_exps.weight")].type == SPK_TYPE_Q8_0, "set later");
        CHECK(choices[index_of("blk.2.ffn_down_exps.weight")].type == SPK_TYPE_Q4_K, "the recipe's own");
    }
    spk_recipe_free(again);
    spk_recipe_free(recipe);
}

static void a_set_that_overrides_a_whole_rule_is_no_error(void) {
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(spk_recipe_load("ffn", "", &recipe, &err), err);
    CHECK_OK(spk_recipe_set(recipe, "blk\\.\\d\\.ffn_down_exps\\.weight=Q5_K", &err), err);
    CHECK_OK(apply(recipe, &err), err);
    CHECK(choices[index_of("blk.7.ffn_down_exps.weight")].type == SPK_TYPE_Q5_K, "set");
    spk_recipe_free(recipe);
}

/* Not SPK_E_MISMATCH, which is about the types of a file: a typo is no reason to take another recipe. */
static void a_set_that_matches_nothing_is_named(void) {
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(spk_recipe_load("ffn", "", &recipe, &err), err);
    CHECK_OK(spk_recipe_set(recipe, "output\\.weight=Q8_0", &err), err);
    CHECK_OK(apply(recipe, &err), err);
    CHECK_OK(spk_recipe_set(recipe, "nosuch=Q8_0", &err), err);
    CHECK_OK(spk_recipe_set(recipe, "token_embd\\.weight=Q8_0", &err), err);
    CHECK(apply(recipe, &err) == SPK_E_MISSING &&
          strcmp(err.text, "rule 'nosuch * -> Q8_0' of --set matches no tensor that decode reads") == 0, "%s",
          err.text);
    spk_recipe_free(recipe);
}

static void a_set_beyond_the_limit_is_refused(void) {
    char *text = malloc(SPK_RECIPE_BYTES_MAX), *end = text + sprintf(text, "recipe a\n");
    spk_recipe *recipe;
    spk_error err = { 0 };
    for (int i = 0; i < SPK_RECIPE_RULE_COUNT_MAX; i++) end += sprintf(end, "rule x F32 -> Q4_K\n");
    CHECK_OK(spk_recipe_parse(text, "t", &recipe, &err), err);
    CHECK(spk_recipe_set(recipe, "y=Q4_K", &err) == SPK_E_USAGE &&
          strcmp(err.text, "--set 'y=Q4_K': more than 1024 rules") == 0, "%s", err.text);
    spk_recipe_free(recipe);
    free(text);
}

static void a_bad_set_is_refused_and_changes_nothing(void) {
    static const char *const bad[][2] = {
        { "x", "REGEX=TYPE" }, { "=Q4_K", "REGEX=TYPE" }, { "x=", "REGEX=TYPE" }, { "#x=Q4_K", "REGEX=TYPE" },
        { "a b=Q4_K", "without spaces" }, { "a\x01=Q4_K", "without spaces" },
        { "x=Q4_0", "cannot requantize to 'Q4_0'" }, { "x(=Q4_K", "regex 'x('" } };
    spk_recipe *recipe;
    spk_error err = { 0 };
    CHECK_OK(spk_recipe_load("ffn", "", &recipe, &err), err);
    char *before = strdup(spk_recipe_text(recipe));
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK(spk_recipe_set(recipe, bad[i][0], &err) == SPK_E_USAGE, "%s: %s", bad[i][0], err.text);
        CHECK(strstr(err.text, bad[i][1]) != NULL && strncmp(err.text, "--set '", 7) == 0, "%s: %s", bad[i][0],
              err.text);
        CHECK(strstr(err.text, ":0") == NULL, "a line number where there are no lines: %s", err.text);
    }
    CHECK(strcmp(before, spk_recipe_text(recipe)) == 0, "%s", spk_recipe_text(recipe));
    CHECK_OK(spk_recipe_set(recipe, "x=y=Q4_K", &err), err); /* the last '=' divides */
    spk_recipe_free(recipe);
    free(before);
}

static void a_model_gets_its_default(void) {
    char tiny[SPK_FINGERPRINT_SIZE];
    (void)spk_model_fingerprint(&config, tiny, sizeof tiny);
    static const char other[] = "qwen3moe L4 H256 V4096 attn8/2x64r64 moe4/12x256+0";
    const struct { const char *fingerprint, *want; bool is_named; } cases[] = {
        { tiny, "ffn", true }, { QWEN36, "ffn", true }, { other, "native", false }, { "", "native", false } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        spk_recipe *recipe;
        spk_error err = { 0 };
        bool is_named = !cases[i].is_named;
        CHECK_OK(spk_recipe_default(cases[i].fingerprint, &recipe, &is_named, &err), err);
        CHECK(strcmp(spk_recipe_name(recipe), cases[i].want) == 0, "%s: %s", cases[i].fingerprint,
              spk_recipe_name(recipe));
        CHECK(is_named == cases[i].is_named, "%s", cases[i].fingerprint);
        spk_recipe_free(recipe);
    }
}

static void built_in_recipes_are_named_as_their_files(void) {
    int count = 0;
    for (const spk_builtin_recipe *b = spk_builtin_recipes; b->path != NULL; b++, count++) {
        spk_recipe *recipe;
        spk_error err = { 0 };
        CHECK_OK(spk_recipe_parse(b->text, b->path, &recipe, &err), err);
        char file[100];
        (void)snprintf(file, sizeof file, "/%s.recipe", spk_recipe_name(recipe));
        size_t length = strlen(b->path), tail = strlen(file);
        CHECK(length > tail && strcmp(b->path + length - tail, file) == 0, "%s is called %s", b->path, file);
        CHECK(*spk_recipe_about(recipe) != '\0', "%s says nothing about itself", b->path);
        CHECK(b[1].path == NULL || strcmp(b->path, b[1].path) < 0, "%s is out of order", b->path);
        spk_recipe_free(recipe);
    }
    CHECK(count >= 4, "%d built-in recipes", count);
}

static void built_in_recipes_do_what_they_say(void) {
    static const char *const classes[] = { /* a tensor of each class */
        "blk.0.ffn_gate_shexp.weight", "blk.0.ffn_down_shexp.weight", "blk.0.ffn_down_exps.weight",
        "blk.7.ffn_down_exps.weight", "blk.3.attn_q.weight", "blk.3.attn_output.weight", "blk.0.attn_qkv.weight",
        "blk.0.attn_gate.weight", "blk.0.ssm_out.weight", "output.weight",
        "blk.3.attn_k.weight", "blk.3.attn_v.weight", "token_embd.weight", "blk.0.ffn_gate_exps.weight" };
    static const struct { const char *name; int requantized[14]; uint64_t count; } want[] = {
        { "native", { 0 },                            0 },
        { "ffn",    { 1, 1, 1, 1 },                   24 + 8 },
        { "safe",   { 1, 1, 0, 0, 1, 1, 1, 1, 1, 0 }, 24 + 2 * 2 + 6 * 3 },
        { "fast",   { 1, 1, 1, 1, 1, 1, 1, 1, 1, 1 }, 24 + 8 + 2 * 2 + 6 * 3 + 1 } };
    for (size_t r = 0; r < sizeof want / sizeof *want; r++) {
        spk_recipe *recipe;
        spk_error err = { 0 };
        CHECK_OK(spk_recipe_load(want[r].name, QWEN36, &recipe, &err), err);
        CHECK_OK(apply(recipe, &err), err);
        for (size_t c = 0; c < sizeof classes / sizeof *classes; c++) {
            uint64_t i = index_of(classes[c]);
            uint32_t type = want[r].requantized[c] ? (uint32_t)SPK_TYPE_Q4_K : tensors[i].type;
            CHECK(choices[i].type == type, "%s: %s becomes %s", want[r].name, classes[c],
                  spk_type_name(choices[i].type));
        }
        uint64_t count = 0;
        for (uint64_t i = 0; i < tensor_count; i++) count += choices[i].type != tensors[i].type;
        CHECK(count == want[r].count, "%s requantizes %d tensors", want[r].name, (int)count);
        spk_recipe_free(recipe);
    }
}

static void a_recipe_is_read_from_a_file(void) {
    char dir[GB_PATH_MAX], path[GB_PATH_MAX];
    spk_recipe *recipe;
    spk_error err = { 0 };
    gb_make_dir(dir);
    gguf_build b = { 0 };
    gb_raw(&b, "recipe mine\n", 12);
    gb_save(&b, gb_path(path, dir, "x.recipe"));
    CHECK_OK(spk_recipe_load(path, QWEN36, &recipe, &err), err);
    CHECK(strcmp(spk_recipe_name(recipe), "mine") == 0, "%s", spk_recipe_name(recipe));
    spk_recipe_free(recipe);
    gb_u8(&b, 0);
    gb_save(&b, path);
    CHECK(spk_recipe_load(path, QWEN36, &recipe, &err) == SPK_E_USAGE && strstr(err.text, "not a text file"), "%s",
          err.text);
    gb_fill(&b, '#', SPK_RECIPE_BYTES_MAX);
    b.bytes[12] = '\n';
    gb_save(&b, path);
    CHECK(spk_recipe_load(path, QWEN36, &recipe, &err) == SPK_E_LIMIT, "%s", err.text);
    CHECK(spk_recipe_load(dir, QWEN36, &recipe, &err) == SPK_E_IO, "%s", err.text);
    CHECK(mkfifo(gb_path(path, dir, "pipe"), 0600) == 0, "mkfifo");
    CHECK(spk_recipe_load(path, QWEN36, &recipe, &err) == SPK_E_IO && strstr(err.text, "is a pipe"), "%s", err.text);
    CHECK(spk_recipe_load("nosuch", QWEN36, &recipe, &err) == SPK_E_MISSING && strstr(err.text, "nosuch"), "%s",
          err.text);
    gb_free(&b);
    gb_remove_dir(dir);
}

int main(void) {
    load_model();
    RUN(a_recipe_is_parsed);
    RUN(an_error_names_its_line);
    RUN(a_byte_order_mark_is_skipped);
    RUN(limits_are_enforced);
    RUN(the_first_rule_that_matches_the_name_wins);
    RUN(a_tensor_of_the_target_type_is_copied_and_counts);
    RUN(a_rule_without_effect_is_an_error);
    RUN(protected_tensors_are_refused);
    RUN(a_row_width_that_does_not_fit_is_refused);
    RUN(tensors_that_decode_does_not_read_are_left_alone);
    RUN(an_exploding_regex_ends);
    RUN(set_rules_come_first_and_the_last_one_wins);
    RUN(a_set_that_overrides_a_whole_rule_is_no_error);
    RUN(a_set_that_matches_nothing_is_named);
    RUN(a_set_beyond_the_limit_is_refused);
    RUN(a_bad_set_is_refused_and_changes_nothing);
    RUN(a_model_gets_its_default);
    RUN(built_in_recipes_are_named_as_their_files);
    RUN(built_in_recipes_do_what_they_say);
    RUN(a_recipe_is_read_from_a_file);
    free(choices);
    free(tensors);
    spk_gguf_close(source);
    return CHECK_EXIT();
}
