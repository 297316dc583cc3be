/* requant/budget.c - what is around the search of budget.h: the frame, named recipes, what is said where nothing holds. */
#include "requant/budget.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "requant/budget_internal.h"
#include "requant/recipes_builtin.h"

/* Of a pack, besides its data and metadata. */
#define PROVENANCE_BYTES (UINT64_C(16) << 10)
#define SET_RULE_BYTES 32                            /* of a --set rule in the recipe's text, besides itself */
#define DIRECTORY_ENTRY_BYTES 256
#define SECTION_PADDING_BYTES (UINT64_C(16) << 10)

static spk_status out_of_memory(spk_error *err) { return spk_fail(err, SPK_E_MEMORY, "out of memory for a budget"); }

/* ---- Named recipes ---- */

/* The choice that gives these types; false where there is none. */
static bool choice_of(const spk_budget_search *s, const spk_recipe_choice *types, uint32_t *choice) {
    const spk_budget *b = s->budget;
    memset(choice, 0, spk_budget_choice_bytes(s));
    for (uint32_t i = 0; i < b->item_count; i++) {
        const spk_budget_item *item = &b->items[i];
        bool is_found = false;
        for (uint32_t o = 0; o < item->option_count && !is_found; o++) {
            is_found = true;
            choice[i] = o;
            for (uint64_t t = 0; t < item->tensor_count; t++)
                if (spk_budget_target(item->options[o].type, &b->plan.tensors[item->tensors[t]]) != types[item->tensors[t]].type)
                    is_found = false;
        }
        if (!is_found) return false;
    }
    spk_budget_types(b, choice, s->wanted);
    for (uint64_t t = 0; t < b->plan.tensor_count; t++)
        if (s->wanted[t] != types[t].type) return false;
    return true;
}

/* A built-in recipe of this model that would be better than what was found is measured too. */
static spk_status try_recipe(spk_budget_search *s, spk_recipe *recipe, spk_recipe_choice *choices, spk_tensor *tensors,
                             spk_error *err) {
    const spk_convert_plan *plan = &s->budget->plan;
    for (size_t i = 0; i < s->options->set_count; i++) SPK_TRY(spk_recipe_set(recipe, s->options->sets[i], err));
    for (uint64_t t = 0; t < plan->tensor_count; t++) {
        tensors[t] = plan->tensors[t];
        tensors[t].type = tensors[t].source_type;
    }
    spk_status status = spk_recipe_apply(recipe, &plan->config, tensors, plan->tensor_count, choices, NULL);
    if (status == SPK_E_MEMORY) return out_of_memory(err);
    spk_budget_set set = { .choice = s->proposal };
    if (status != SPK_OK || !choice_of(s, choices, s->proposal)) return SPK_OK;      /* meant for other types */
    SPK_TRY(spk_budget_size_of(s->budget, s->proposal, &set.size, err));
    if (!spk_budget_holds(s, &set)) return SPK_OK;                  /* its bytes do not; the KL is not known yet, and 0 here */
    bool may_be_better = s->best == UINT32_MAX || !spk_budget_has_max_kl(s) || set.size.token_bytes < s->sets[s->best].size.token_bytes;
    const spk_budget_set *measured;
    return may_be_better ? spk_budget_measure_set(s, s->proposal, &measured, err) : SPK_OK;
}

static spk_status try_named(spk_budget_search *s, spk_error *err) {
    const uint64_t tensor_count = s->budget->plan.tensor_count;
    spk_recipe_choice *choices = calloc(tensor_count, sizeof *choices);
    spk_tensor *tensors = calloc(tensor_count, sizeof *tensors);
    spk_status status = choices == NULL || tensors == NULL ? out_of_memory(err) : SPK_OK;
    for (const spk_builtin_recipe *r = spk_builtin_recipes; r->path != NULL && status == SPK_OK; r++) {
        spk_recipe *recipe;
        status = spk_recipe_parse(r->text, r->path, &recipe, err);
        if (status != SPK_OK) break;
        if (spk_recipe_lists_model(recipe, s->budget->fingerprint)) status = try_recipe(s, recipe, choices, tensors, err);
        spk_recipe_free(recipe);
    }
    free(choices);
    free(tensors);
    return status;
}

/* ---- The whole ---- */

static spk_status check_reach(const spk_budget_search *s, spk_error *err) {
    const spk_budget_options *o = s->options;
    if (s->smallest_size.token_bytes > o->max_token_bytes)
        return spk_fail(err, SPK_E_MISMATCH, "--max-bytes-per-token %" PRIu64 ": the fewest that can be reached are %" PRIu64,
                        o->max_token_bytes, s->smallest_size.token_bytes);
    if (s->smallest_size.pack_bytes > o->max_pack_bytes)
        return spk_fail(err, SPK_E_MISMATCH, "--max-size %" PRIu64 ": the smallest pack that can be reached takes %" PRIu64 " bytes",
                        o->max_pack_bytes, s->smallest_size.pack_bytes);
    return SPK_OK;
}

/* No set holds all limits: what each side of them comes to without the other. */
static spk_status refuse(spk_budget_search *s, spk_error *err) {
    const double limit = s->options->max_kl;
    if (s->best != UINT32_MAX)
        return spk_fail(err, SPK_E_MISMATCH, "--max-bytes-per-token %" PRIu64 ": the fewest that were found with a mean KL of at "
                        "most %g are %" PRIu64, s->options->max_token_bytes, limit, s->sets[s->best].size.token_bytes);
    const spk_budget_set *set;
    memset(s->proposal, 0, spk_budget_choice_bytes(s));
    if (s->options->max_pack_bytes == SPK_BUDGET_UNLIMITED) {    /* --set costs it all */
        SPK_TRY(spk_budget_measure_set(s, s->proposal, &set, err));
        return spk_fail(err, SPK_E_MISMATCH, "--max-kl %g: what --set requantizes alone has a mean KL of %.6g", limit,
                        set->cost.mean);
    }
    spk_budget_options by_size = *s->options;
    by_size.max_kl = -1;
    s->options = &by_size;
    spk_status status = spk_budget_fit_bytes(s, &set, err);
    s->options = &s->budget->options;
    if (status != SPK_OK) return status;
    return spk_fail(err, SPK_E_MISMATCH, "--max-kl %g: the smallest that was found for a pack of at most %" PRIu64
                    " bytes is %.6g", limit, s->options->max_pack_bytes, set->cost.mean);
}

static spk_status find_smallest(spk_budget_search *s, spk_error *err) {
    const spk_budget *b = s->budget;
    memset(s->smallest, 0, spk_budget_choice_bytes(s));
    for (uint32_t i = 0; i < b->item_count; i++)
        for (uint32_t o = 1; o < b->items[i].option_count; o++)
            if (b->items[i].options[o].bytes < b->items[i].options[s->smallest[i]].bytes) s->smallest[i] = o;
    return spk_budget_size_of(b, s->smallest, &s->smallest_size, err);
}

static spk_status find_best(spk_budget_search *s, spk_error *err) {
    const spk_budget_set *set;
    uint32_t *nothing = s->budget->choice;               /* all zero: nothing but --set */
    SPK_TRY(check_reach(s, err));
    SPK_TRY(spk_budget_measure_around(s, nothing, true, err));
    SPK_TRY(find_smallest(s, err));                      /* of the options that are left */
    SPK_TRY(check_reach(s, err));
    s->factor = 1;
    if (spk_budget_has_max_kl(s)) {
        SPK_TRY(spk_budget_measure_set(s, nothing, &set, err));     /* what must hold if anything does */
        if (set->cost.mean <= s->options->max_kl) SPK_TRY(spk_budget_fit_kl(s, s->options->max_kl, true, err));
    } else {
        SPK_TRY(spk_budget_fit_bytes(s, &set, err));
    }
    SPK_TRY(try_named(s, err));
    if (s->best != UINT32_MAX) SPK_TRY(spk_budget_second_pass(s, err));
    if (s->best == UINT32_MAX || s->sets[s->best].size.token_bytes > s->options->max_token_bytes) return refuse(s, err);
    return SPK_OK;
}

static spk_status begin_search(spk_budget_search *s, spk_error *err) {
    spk_budget *b = s->budget;
    const uint64_t tensor_count = b->plan.tensor_count;
    SPK_TRY(spk_pool_create(s->options->convert->thread_count, &s->pool, err));
    s->types = malloc(tensor_count * sizeof *s->types);
    s->wanted = malloc(tensor_count * sizeof *s->wanted);
    s->smallest = calloc(1, spk_budget_choice_bytes(s));
    s->proposal = calloc(1, spk_budget_choice_bytes(s));
    s->knapsack = calloc((size_t)b->item_count + 1, sizeof *s->knapsack);
    s->kl = calloc((size_t)b->item_count + 1, sizeof *s->kl);
    if (s->kl == NULL || s->types == NULL || s->wanted == NULL || s->smallest == NULL || s->proposal == NULL || s->knapsack == NULL)
        return out_of_memory(err);
    for (uint64_t t = 0; t < tensor_count; t++) s->types[t] = b->plan.tensors[t].source_type;
    return find_smallest(s, err);
}

static void end_search(spk_budget_search *s) {
    for (uint32_t i = 0; i < s->set_count; i++) free(s->sets[i].choice);
    free(s->sets);
    free(s->kl);
    free(s->types);
    free(s->wanted);
    free(s->smallest);
    free(s->proposal);
    free(s->knapsack);
    spk_pool_destroy(s->pool);
}

/* All but the data sections: header, configuration, metadata (zstd does not make them larger than this), directory,
 * provenance with the recipe, checksums of 16 bytes for 4 MiB. */
static uint64_t overhead_of(const spk_budget *b) {
    const spk_kv_set *kvs = spk_gguf_kvs(b->options.convert->source);
    uint64_t kv_bytes = 0, data_bytes = 0, set_bytes = 0;
    for (uint64_t i = 0; i < kvs->count; i++) kv_bytes += kvs->items[i].entry_bytes;
    for (uint64_t i = 0; i < b->plan.tensor_count; i++) data_bytes += spk_tensor_bytes(&b->plan.tensors[i]);
    for (size_t i = 0; i < b->options.set_count; i++) set_bytes += strlen(b->options.sets[i]) + SET_RULE_BYTES;
    return set_bytes + SECTION_PADDING_BYTES + kv_bytes + kv_bytes / 256 + b->plan.tensor_count * DIRECTORY_ENTRY_BYTES + PROVENANCE_BYTES +
           b->plan.config.layer_count * UINT64_C(256) + data_bytes / (UINT64_C(4) << 20) * 16;
}

/* The plan of a recipe text with --set before it. */
static spk_status make_plan(const spk_budget *b, const char *text, spk_recipe **recipe, spk_convert_plan *plan,
                            spk_error *err) {
    spk_status status = spk_recipe_parse(text, "budget", recipe, err);
    for (size_t i = 0; i < b->options.set_count && status == SPK_OK; i++)
        status = spk_recipe_set(*recipe, b->options.sets[i], err);
    if (status != SPK_OK) return status;
    spk_convert_options convert = *b->options.convert;
    convert.recipe = *recipe;
    return spk_convert_plan_make(&convert, plan, err);
}

/* With everything at its smallest: what does not fit (the importance matrix, the better weights) is told before the work. */
static spk_status check_inputs(const spk_budget_search *s, spk_error *err) {
    char *text;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    SPK_TRY(spk_budget_text(s->budget, s->smallest, "everything", &text, err));
    spk_status status = make_plan(s->budget, text, &recipe, &plan, err);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    free(text);
    return status;
}

static spk_status write_text(const spk_budget_search *s, spk_error *err) {
    spk_budget *b = s->budget;
    const spk_budget_set *best = &s->sets[s->best];
    char about[400];
    (void)snprintf(about, sizeof about, "mean KL %.6g +- %.2g on %" PRIu64 " positions of %s, %" PRIu64 " bytes a token",
                   best->cost.mean, best->cost.se, b->options.meter->position_count, b->options.text_name,
                   best->size.token_bytes);
    for (char *c = about; *c != '\0'; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f || *c == '#') *c = '_';     /* of a file's name */
    memcpy(b->choice, best->choice, spk_budget_choice_bytes(s));
    b->cost = best->cost;
    return spk_budget_text(b, b->choice, about, &b->text, err);
}

static spk_status choose(spk_budget *b, spk_error *err) {
    spk_recipe *nothing = NULL;
    spk_status status = make_plan(b, "recipe budget\n", &nothing, &b->plan, err);
    spk_budget_search s = { .budget = b, .options = &b->options, .best = UINT32_MAX };
    if (status == SPK_OK) {
        (void)spk_model_fingerprint(&b->plan.config, b->fingerprint, sizeof b->fingerprint);
        b->overhead_bytes = overhead_of(b);
        status = spk_budget_list(b, err);
        if (status == SPK_OK) status = begin_search(&s, err);
        if (status == SPK_OK) status = check_inputs(&s, err);
        if (status == SPK_OK) status = find_best(&s, err);
        if (status == SPK_OK) status = write_text(&s, err);
        end_search(&s);
    }
    spk_recipe_free(nothing);    /* plan.choices[].rule is only asked whether it is there */
    return status;
}

spk_status spk_budget_choose(const spk_budget_options *options, spk_budget **out, spk_error *err) {
    assert(options->max_kl >= 0 || options->max_token_bytes != SPK_BUDGET_UNLIMITED ||
           options->max_pack_bytes != SPK_BUDGET_UNLIMITED);
    spk_budget *b = calloc(1, sizeof *b);
    if (b == NULL) return out_of_memory(err);
    b->options = *options;
    spk_status status = choose(b, err);
    if (status == SPK_OK) *out = b;
    else spk_budget_free(b);
    return status;
}

spk_status spk_budget_recipe(const spk_budget *budget, spk_recipe **out, spk_error *err) {
    spk_recipe *recipe;
    SPK_TRY(spk_recipe_parse(budget->text, "budget", &recipe, err));
    for (size_t i = 0; i < budget->options.set_count; i++) {
        spk_status status = spk_recipe_set(recipe, budget->options.sets[i], err);
        if (status == SPK_OK) continue;
        spk_recipe_free(recipe);
        return status;
    }
    *out = recipe;
    return SPK_OK;
}

void spk_budget_free(spk_budget *budget) {
    if (budget == NULL) return;
    for (uint32_t i = 0; i < budget->item_count; i++) free(budget->items[i].tensors);
    free(budget->items);
    free(budget->choice);
    free(budget->text);
    spk_convert_plan_free(&budget->plan);
    free(budget);
}
