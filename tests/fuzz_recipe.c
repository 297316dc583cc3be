/* tests/fuzz_recipe.c - the recipe parser: what it accepts reads back as itself from its own text, and applying it to a model
 * ends, in a choice for each tensor or in a message. */
#include "formats/blocks.h"
#include "requant/quant.h"
#include "requant/recipe.h"
#include "requant/recipes_builtin.h"
#include "tests/fuzz.h"

static const spk_model_config config = { .arch = SPK_ARCH_QWEN35, .layer_count = 2, .full_attention_interval = 2,
                                         .hidden_size = 256, .vocab_size = 8, .dense_ff_size = 256 };
static const spk_tensor tensors[] = {
    { .name = "token_embd.weight", .type = SPK_TYPE_Q8_0, .source_type = SPK_TYPE_Q8_0, .dim_count = 2, .dims = { 256, 8, 1, 1 } },
    { .name = "blk.0.ffn_gate.weight", .type = SPK_TYPE_Q6_K, .source_type = SPK_TYPE_Q6_K, .dim_count = 2, .dims = { 256, 256, 1, 1 } },
    { .name = "blk.1.ffn_down.weight", .type = SPK_TYPE_Q8_0, .source_type = SPK_TYPE_Q8_0, .dim_count = 2, .dims = { 256, 256, 1, 1 } },
    { .name = "blk.0.attn_norm.weight", .type = SPK_TYPE_F32, .source_type = SPK_TYPE_F32, .dim_count = 1, .dims = { 256, 1, 1, 1 } },
};
enum { TENSORS = sizeof tensors / sizeof *tensors };

static void apply(const spk_recipe *recipe) {
    spk_recipe_choice choices[TENSORS] = { { 0 } };
    spk_error err = { 0 };
    if (spk_recipe_apply(recipe, &config, tensors, TENSORS, choices, &err) != SPK_OK) {
        FUZZ_ASSERT(err.text[0] != '\0', "no message");
        return;
    }
    for (int i = 0; i < TENSORS; i++) {
        if (choices[i].type == tensors[i].type) continue;
        FUZZ_ASSERT(spk_quant_can_make(choices[i].type) && choices[i].rule != NULL, "%s: type %u", tensors[i].name, choices[i].type);
        FUZZ_ASSERT(i != 3, "a norm was requantized");
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    spk_recipe *recipe = NULL, *again = NULL;
    spk_error err = { 0 };
    char *text = malloc(size + 1);
    if (text == NULL) abort();
    if (size > 0) memcpy(text, bytes, size);
    text[size] = '\0';
    spk_status status = spk_recipe_parse(text, "x", &recipe, &err);
    if (status != SPK_OK) {
        FUZZ_ASSERT(err.text[0] != '\0' && strchr(err.text, '\n') == NULL, "'%s'", err.text);
    } else {
        fuzz_accepted_count++;
        FUZZ_ASSERT(strlen(spk_recipe_name(recipe)) <= SPK_RECIPE_NAME_BYTES_MAX, "%s", spk_recipe_name(recipe));
        FUZZ_ASSERT(spk_recipe_parse(spk_recipe_text(recipe), "its own text", &again, &err) == SPK_OK, "%s", err.text);
        FUZZ_ASSERT(strcmp(spk_recipe_text(recipe), spk_recipe_text(again)) == 0, "%s", spk_recipe_text(again));
        FUZZ_ASSERT(strcmp(spk_recipe_name(recipe), spk_recipe_name(again)) == 0, "%s", spk_recipe_name(again));
        spk_recipe_free(again);
        apply(recipe);
        if (spk_recipe_set(recipe, text, &err) == SPK_OK) apply(recipe);
    }
    spk_recipe_free(recipe);
    free(text);
    return 0;
}

void fuzz_seeds(void) {
    static const char *const texts[] = {
        "recipe a\nrule blk\\..*\\.ffn_down\\.weight Q8_0 -> Q4_K\n", "recipe b # c\nabout x\ndefault\nrule (a|b)*c * -> Q6_K optional\n",
        "\xef\xbb\xbfrecipe bom\n", "recipe x\nrule (?<n>a+)+$ F32,Q8_0 -> Q5_K\n", "recipe y\nrule (.*)*[^z]x * -> Q4_K optional\n",
        "recipe z\nmodel qwen35 L2 H256\n", ".*ffn_down.*=Q4_K", "recipe r\r\nrule .*ffn.* * -> Q4_K\r\n", "recipe " };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) fuzz_seed(texts[i], strlen(texts[i]));
    for (const spk_builtin_recipe *r = spk_builtin_recipes; r->path != NULL; r++) fuzz_seed(r->text, strlen(r->text));
}
