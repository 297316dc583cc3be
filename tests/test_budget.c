/* tests/test_budget.c - the search of a budget with meters whose figures are known, and what it is built of: the knapsack,
 * tensors requantized in memory, windows of a comparison put together. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "requant/budget_internal.h"
#include "runtime/compare.h"
#include "tests/convert_build.h"

/* ---- The knapsack ---- */

typedef struct { double weight, value; } sums;

static void try_all(const spk_knapsack_item *items, uint32_t left, double capacity, sums so_far, double *best) {
    if (so_far.weight > capacity) return;
    if (left == 0) {
        if (so_far.value > *best) *best = so_far.value;
        return;
    }
    for (uint32_t o = 0; o < items->option_count; o++)
        try_all(items + 1, left - 1, capacity, (sums){ so_far.weight + items->options[o].weight,
                                                       so_far.value + items->options[o].value }, best);
}

static void the_knapsack_is_as_good_as_trying_everything(void) {
    enum { ITEMS = 7 };
    uint64_t random = 5;
    for (int round = 0; round < 40; round++) {
        spk_knapsack_item items[ITEMS];
        double total = 0, capacity, best = -INFINITY, nearly = -INFINITY;
        for (uint32_t i = 0; i < ITEMS; i++) {
            items[i].option_count = 1 + (uint32_t)(check_random(&random) % SPK_BUDGET_OPTION_MAX);
            for (uint32_t o = 0; o < items[i].option_count; o++)
                items[i].options[o] = (spk_knapsack_option){ o == 0 ? 0 : (double)(check_random(&random) % 1000) * 1e-6,
                                                             (double)(check_random(&random) % 1000) - 500 };
            total += items[i].options[items[i].option_count - 1].weight;
        }
        capacity = total * (double)(round % 10) / 10;
        if (round % 2 == 1) {                            /* a hair less than some set weighs: rounding must not let it in */
            capacity = 0;
            for (uint32_t i = 0; i < ITEMS; i++)
                capacity += items[i].options[check_random(&random) % items[i].option_count].weight;
            capacity *= 1 - 1e-7;
        }
        uint32_t choice[ITEMS];
        sums got = { 0, 0 };
        CHECK_OK(spk_knapsack(items, ITEMS, capacity, choice, &err), err);
        for (uint32_t i = 0; i < ITEMS; i++) {
            got.weight += items[i].options[choice[i]].weight;
            got.value += items[i].options[choice[i]].value;
        }
        try_all(items, ITEMS, capacity, (sums){ 0, 0 }, &best);
        try_all(items, ITEMS, capacity * (1 - ITEMS / 32768.0), (sums){ 0, 0 }, &nearly);
        CHECK(got.weight <= capacity * (1 + 1e-12), "round %d: %g of %g", round, got.weight, capacity);
        CHECK(got.value <= best && got.value >= nearly, "round %d: %g, expected %g to %g", round, got.value, nearly, best);
    }
    spk_knapsack_item none = { 1, { { 2, 0 } } };
    uint32_t choice[1];
    CHECK(spk_knapsack(&none, 1, 1, choice, &err) == SPK_E_LIMIT, "nothing fits: %s", err.text);
}

/* ---- A search with known figures ---- */

enum { TENSORS_MAX = 256 };

/* KL of a set: factor * (sum over requantized tensors of weight * bits lost squared) ^ power; of the sample without the factor.
 * Types equal to free_types cost nothing. */
typedef struct {
    uint32_t        types[TENSORS_MAX], source_types[TENSORS_MAX];
    const uint32_t *free_types;
    uint64_t        tensor_count, wrong_count, measured_count;
    double          factor, power;
} known_meter;

static double bits_of(uint32_t type) {
    const spk_type_info *info = spk_type_find(type);
    return 8.0 * info->block_bytes / info->block_weights;
}

static double kl_of_types(const known_meter *m, const uint32_t *types, bool is_whole) {
    double sum = 0;
    if (m->free_types != NULL && memcmp(types, m->free_types, m->tensor_count * sizeof *types) == 0) return 0;
    for (uint64_t i = 0; i < m->tensor_count; i++) {
        if (types[i] == m->source_types[i]) continue;
        uint64_t random = i * 7919 + types[i];
        double lost = bits_of(m->source_types[i]) - bits_of(types[i]);
        sum += (1.5 + (double)check_uniform(&random)) * lost * lost * 1e-5;
    }
    return (is_whole ? m->factor : 1) * pow(sum, m->power);
}

static void known_set(void *context, uint64_t index, const spk_tensor *tensor, uint8_t *block) {
    known_meter *m = context;
    if (block != NULL && tensor->type == m->source_types[index]) m->wrong_count++;
    if (block == NULL && m->types[index] == m->source_types[index]) m->wrong_count++;
    m->types[index] = block == NULL ? m->source_types[index] : tensor->type;
    free(block);
}

static spk_status known_measure(void *context, bool is_whole, spk_budget_cost *out, spk_error *error) {
    (void)error;
    known_meter *m = context;
    m->measured_count++;
    double kl = kl_of_types(m, m->types, is_whole);
    *out = (spk_budget_cost){ kl, kl / 10, kl * 1.2 };
    return SPK_OK;
}

typedef struct {
    spk_gguf           *source;
    known_meter         meter;
    spk_budget_meter    hooks;
    spk_convert_options convert;
    spk_budget_options  options;
    spk_budget         *budget;
    uint32_t            thread_count;
} search_case;

static search_case open_case(double factor, double power) {
    search_case c = { .meter = { .factor = factor, .power = power }, .thread_count = 2 };
    CHECK_OK(spk_gguf_open(TINY36, &c.source, &err), err);
    c.meter.tensor_count = spk_gguf_tensor_count(c.source);
    for (uint64_t i = 0; i < c.meter.tensor_count; i++)
        c.meter.types[i] = c.meter.source_types[i] = spk_gguf_tensor_at(c.source, i)->type;
    c.options = (spk_budget_options){ .text_name = "a\ntext # of 5", .max_kl = -1, .max_token_bytes = SPK_BUDGET_UNLIMITED,
                                      .max_pack_bytes = SPK_BUDGET_UNLIMITED };
    return c;
}

static spk_status choose(search_case *c) {
    c->convert = (spk_convert_options){ .source = c->source, .effort = SPK_EFFORT_FAST, .thread_count = c->thread_count };
    c->hooks = (spk_budget_meter){ .context = &c->meter, .position_count = 1000, .sample_count = 500, .set = known_set,
                                   .measure = known_measure };
    c->options.convert = &c->convert;
    c->options.meter = &c->hooks;
    return spk_budget_choose(&c->options, &c->budget, &err);
}

static void close_case(search_case *c) {
    CHECK(c->meter.wrong_count == 0, "%d sets of what was there", (int)c->meter.wrong_count);
    spk_budget_free(c->budget);
    spk_gguf_close(c->source);
}

/* The types that the budget's recipe gives, by the path that a pack takes. */
static spk_convert_plan plan_of(search_case *c, spk_recipe **recipe) {
    spk_convert_plan plan = { .tensor_count = 0 };
    CHECK_OK(spk_budget_recipe(c->budget, recipe, &err), err);
    c->convert.recipe = *recipe;
    CHECK_OK(spk_convert_plan_make(&c->convert, &plan, &err), err);
    return plan;
}

static uint64_t token_bytes_of(const spk_convert_plan *plan) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < plan->tensor_count; i++) sum += spk_tensor_bytes_per_token(&plan->config, &plan->tensors[i]);
    return sum;
}

/* The recipe makes what was measured; returns the bytes that a token reads. */
static uint64_t check_recipe(search_case *c) {
    spk_recipe *recipe;
    spk_convert_plan plan = plan_of(c, &recipe);
    uint32_t types[TENSORS_MAX], chosen[TENSORS_MAX];
    spk_budget_types(c->budget, c->budget->choice, chosen);
    for (uint64_t i = 0; i < plan.tensor_count; i++) {
        types[i] = plan.tensors[i].type;
        CHECK(types[i] == chosen[i], "%s: the recipe says %s, the choice %s", plan.tensors[i].name, spk_type_name(types[i]),
              spk_type_name(chosen[i]));
        CHECK(types[i] == plan.tensors[i].source_type || bits_of(types[i]) < bits_of(plan.tensors[i].source_type),
              "%s grew", plan.tensors[i].name);
    }
    double kl = kl_of_types(&c->meter, types, true);
    CHECK(fabs(kl - c->budget->cost.mean) <= 1e-15, "KL %.9g of the recipe, %.9g reported", kl, c->budget->cost.mean);
    uint64_t bytes = token_bytes_of(&plan);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    return bytes;
}

/* No set of additive costs within `kl` reads fewer bytes a token: the bound of Lagrange at every price. */
static double least_token_bytes(const spk_budget *b, double kl) {
    double least = 0;
    spk_budget_size native;
    uint32_t *nothing = calloc((size_t)b->item_count + 1, sizeof *nothing);
    CHECK_OK(spk_budget_size_of(b, nothing, &native, &err), err);
    free(nothing);
    for (double price = 1e4; price < 1e13; price *= 1.05) {
        double bound = (double)native.token_bytes - price * kl;
        for (uint32_t i = 0; i < b->item_count; i++) {
            double most = 0;
            for (uint32_t o = 1; o < b->items[i].option_count; o++) {
                const spk_budget_option *option = &b->items[i].options[o];
                double gain = (double)(b->items[i].options[0].token_bytes - option->token_bytes) - price * option->cost.mean;
                if (gain > most) most = gain;
            }
            bound -= most;
        }
        if (bound > least) least = bound;
    }
    return least;
}

static void costs_that_add_up_are_spent_to_the_last(void) {
    for (double limit = 0.0005; limit < 0.03; limit *= 3) {
        search_case c = open_case(1, 1);
        c.options.max_kl = limit;
        CHECK_OK(choose(&c), err);
        if (c.budget == NULL) return;
        uint64_t bytes = check_recipe(&c);
        double least = least_token_bytes(c.budget, limit), saved_most = 6887376 - least, saved = 6887376 - (double)bytes;
        CHECK(c.budget->cost.mean <= limit, "KL %g", c.budget->cost.mean);
        CHECK((double)bytes >= least && saved >= 0.97 * saved_most, "limit %g: %g saved, at most %g can be", limit, saved, saved_most);
        close_case(&c);
    }
}

static void costs_that_do_not_add_up_are_repaired(void) {
    static const struct { double factor, power, limit; } cases[] = {
        { 1.6, 1, 0.004 }, { 1.1, 1, 0.004 }, { 0.5, 1, 0.004 }, { 1, 0.8, 0.02 }, { 8, 1.25, 0.004 }, { 1, 1, 0 }, { 1, 1, 1e6 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        search_case c = open_case(cases[i].factor, cases[i].power);
        c.options.max_kl = cases[i].limit;
        CHECK_OK(choose(&c), err);
        if (c.budget == NULL) return;
        (void)check_recipe(&c);
        CHECK(c.budget->cost.mean <= cases[i].limit, "case %zu: KL %g of %g", i, c.budget->cost.mean, cases[i].limit);
        CHECK(c.budget->cost.mean >= 0.95 * cases[i].limit || cases[i].limit > 1, "case %zu: only %g of %g is used", i,
              c.budget->cost.mean, cases[i].limit);
        CHECK(c.meter.measured_count < (cases[i].limit > 0 && cases[i].limit < 1 ? 165 : 75), "case %zu: %d measurements", i, (int)c.meter.measured_count);
        close_case(&c);
    }
}

/* Alone, each part of ffn costs as much as before; all of it costs nothing, which no sum of parts shows. */
static void a_named_recipe_that_holds_is_never_beaten(void) {
    uint32_t ffn[TENSORS_MAX];
    search_case c = open_case(1, 1);
    spk_recipe *recipe;
    spk_convert_plan plan = { .tensor_count = 0 };
    CHECK_OK(spk_recipe_load("ffn", "", &recipe, &err), err);
    c.convert = (spk_convert_options){ .source = c.source, .recipe = recipe };
    CHECK_OK(spk_convert_plan_make(&c.convert, &plan, &err), err);
    for (uint64_t i = 0; i < plan.tensor_count; i++) ffn[i] = plan.tensors[i].type;
    uint64_t ffn_bytes = token_bytes_of(&plan);
    c.meter.free_types = ffn;
    c.options.max_kl = 0.0002;
    CHECK_OK(choose(&c), err);
    if (c.budget == NULL) return;
    CHECK(check_recipe(&c) <= ffn_bytes, "ffn saves more");
    close_case(&c);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
}

static void limits_on_bytes_hold_at_little_kl(void) {
    search_case c = open_case(1, 1);
    c.options.max_token_bytes = 6000000;
    CHECK_OK(choose(&c), err);
    if (c.budget == NULL) return;
    uint64_t bytes = check_recipe(&c);
    CHECK(bytes <= 6000000 && bytes > 5950000, "%d bytes a token", (int)bytes);
    /* No set of the same KL reads fewer: then none of these bytes costs less. */
    double least = least_token_bytes(c.budget, c.budget->cost.mean * 0.97);
    CHECK(least > 5950000, "%g bytes a token at 0.97 of the KL", least);
    close_case(&c);

    c = open_case(1, 1);
    c.options.max_pack_bytes = 12900000;
    CHECK_OK(choose(&c), err);
    if (c.budget == NULL) return;
    spk_budget_size size;
    (void)check_recipe(&c);
    CHECK_OK(spk_budget_size_of(c.budget, c.budget->choice, &size, &err), err);
    CHECK(size.pack_bytes <= 12900000 && size.pack_bytes > 12700000, "a pack of %d bytes", (int)size.pack_bytes);
    close_case(&c);

    uint64_t most = 0;                   /* all three, of which the pack's size is the one that costs bytes a token */
    for (int k = 0; k < 2; k++) {
        c = open_case(1, 1);
        c.options.max_kl = 0.01;
        if (k == 1) c.options.max_token_bytes = 6500000;
        if (k == 1) c.options.max_pack_bytes = most - 150000;
        CHECK_OK(choose(&c), err);
        if (c.budget == NULL) return;
        bytes = check_recipe(&c);
        CHECK_OK(spk_budget_size_of(c.budget, c.budget->choice, &size, &err), err);
        CHECK(size.pack_bytes <= c.options.max_pack_bytes && bytes <= 6500000 && c.budget->cost.mean <= 0.01,
              "%d bytes, %d a token, KL %g", (int)size.pack_bytes, (int)bytes, c.budget->cost.mean);
        most = size.pack_bytes;
        close_case(&c);
    }
}

static void an_impossible_budget_says_what_is_possible(void) {
    static const char *const pin = "token_embd\\.weight=Q4_K";
    static const struct { double kl; uint64_t token_bytes, pack_bytes; const char *set, *text; } cases[] = {
        { -1, 1000000, SPK_BUDGET_UNLIMITED, NULL, "--max-bytes-per-token 1000000: the fewest that can be reached are 4" },
        { -1, SPK_BUDGET_UNLIMITED, 1000000, NULL, "--max-size 1000000: the smallest pack that can be reached takes 1" },
        { 0.0005, 5000000, SPK_BUDGET_UNLIMITED, NULL, "--max-bytes-per-token 5000000: the fewest that were found with a mean KL of at most 0.0005 are 6" },
        { 0.0001, SPK_BUDGET_UNLIMITED, 11500000, NULL, "--max-kl 0.0001: the smallest that was found for a pack of at most 11500000 bytes is 0.0" },
        { 1e-9, SPK_BUDGET_UNLIMITED, SPK_BUDGET_UNLIMITED, pin, "--max-kl 1e-09: what --set requantizes alone has a mean KL of 0.0" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        search_case c = open_case(1, 1);
        c.options.max_kl = cases[i].kl;
        c.options.max_token_bytes = cases[i].token_bytes;
        c.options.max_pack_bytes = cases[i].pack_bytes;
        c.options.sets = &cases[i].set;
        c.options.set_count = cases[i].set != NULL;
        CHECK(choose(&c) == SPK_E_MISMATCH && strstr(err.text, cases[i].text) != NULL, "case %zu: %s", i, err.text);
        close_case(&c);
    }
}

static void what_set_matches_is_left_alone(void) {
    static const char *const sets[] = { "blk\\.[0-3]\\.ffn_down_exps\\.weight=Q5_K", "output\\.weight=Q4_K",
                                        "blk\\.\\d+\\.ffn_up_shexp\\.weight=Q8_0" };
    search_case c = open_case(1, 1);
    spk_recipe *recipe;
    c.options.max_kl = 1;
    c.options.sets = sets;
    c.options.set_count = 3;
    CHECK_OK(choose(&c), err);
    if (c.budget == NULL) return;
    (void)check_recipe(&c);
    spk_convert_plan plan = plan_of(&c, &recipe);
    for (uint64_t i = 0; i < plan.tensor_count; i++) {
        const spk_tensor *t = &plan.tensors[i];
        bool is_low = strncmp(t->name, "blk.", 4) == 0 && t->name[4] < '4';
        uint32_t expected = strstr(t->name, "ffn_down_exps") != NULL ? (is_low ? SPK_TYPE_Q5_K : SPK_TYPE_Q4_K) :
                            strcmp(t->name, "output.weight") == 0 ? SPK_TYPE_Q4_K :
                            strstr(t->name, "ffn_up_shexp") != NULL ? SPK_TYPE_Q8_0 :
                            strstr(t->name, "ffn_gate_shexp") != NULL ? SPK_TYPE_Q4_K : t->type;
        CHECK(t->type == expected, "%s is %s, expected %s", t->name, spk_type_name(t->type), spk_type_name(expected));
    }
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    close_case(&c);
}

static void every_tensor_that_can_shrink_is_in_one_item(void) {
    search_case c = open_case(1, 1);
    uint32_t count[TENSORS_MAX] = { 0 };
    c.options.max_kl = 0;
    CHECK_OK(choose(&c), err);
    if (c.budget == NULL) return;
    for (uint32_t i = 0; i < c.budget->item_count; i++) {
        const spk_budget_item *item = &c.budget->items[i];
        for (uint64_t t = 0; t < item->tensor_count; t++) count[item->tensors[t]]++;
        CHECK(item->option_count >= 2, "item %u has nothing to choose", i);
        for (uint32_t o = 1; o < item->option_count; o++)
            CHECK(item->options[o].bytes < item->options[o - 1].bytes, "item %u, option %u is no smaller", i, o);
    }
    for (uint64_t i = 0; i < c.meter.tensor_count; i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(c.source, i);
        CHECK(count[i] == (spk_type_find(t->type)->is_quantized && t->type != SPK_TYPE_Q4_K), "%s is in %u items", t->name, count[i]);
    }
    close_case(&c);
}

/* The lowest weight of a Q8_0 block is below what Q5_K and Q4_K reach, the highest of a Q6_K block above them: one option is left of
 * the shared experts' first group, none of the last group's routed down matrices. */
static void write_extreme(const char *path) {
    gguf_build b = gb_read(TINY36);
    spk_gguf *source;
    CHECK_OK(spk_gguf_open(TINY36, &source, &err), err);
    spk_block_q8_0 q8 = { .d = 0x7bff, .qs = { -127 } };
    spk_block_q6_k q6 = { .d = 0x7bff };
    memset(q6.ql, 0xff, sizeof q6.ql);
    memset(q6.qh, 0xff, sizeof q6.qh);
    memset(q6.scales, 127, sizeof q6.scales);
    memcpy(b.bytes + spk_gguf_tensor_find(source, "blk.1.ffn_up_shexp.weight")->file_offset_bytes, &q8, sizeof q8);
    const spk_gguf_tensor *last = spk_gguf_tensor_find(source, "blk.6.ffn_down_exps.weight");
    memcpy(b.bytes + last->file_offset_bytes + last->size_bytes - sizeof q6, &q6, sizeof q6);
    spk_gguf_close(source);
    gb_save(&b, path);
    gb_free(&b);
}

static search_case open_extreme(void) {
    search_case c = open_case(1, 1);
    spk_gguf_close(c.source);
    CHECK_OK(spk_gguf_open(in_dir("extreme.gguf"), &c.source, &err), err);
    return c;
}

static const spk_budget_item *item_of(const spk_budget *b, const char *class_name, uint32_t layer) {
    const spk_budget_item *item = b->items;
    while (item < b->items + b->item_count - 1 && (strcmp(item->class_name, class_name) != 0 || layer < item->layer_begin || layer > item->layer_last)) item++;
    return item;
}

static void what_a_type_cannot_hold_is_no_choice(void) {
    static const char *const pin = "blk\\.1\\.ffn_up_shexp\\.weight=Q4_K";
    uint64_t least = 0;
    char text[4000] = "";
    gb_make_dir(dir);
    write_extreme(in_dir("extreme.gguf"));
    for (int k = 0; k < 4; k++) {                        /* everything, twice; the least; one byte less than that */
        search_case c = open_extreme();
        c.thread_count = k == 0 ? 1 : 5;
        if (k < 2) c.options.max_kl = 1e6;
        else c.options.max_token_bytes = least - (k == 3);
        if (k == 3) {
            CHECK(choose(&c) == SPK_E_MISMATCH && strstr(err.text, "the fewest that can be reached are ") != NULL &&
                  strtoull(strstr(err.text, "are ") + 4, NULL, 10) == least, "%s", err.text);
        } else {
            CHECK_OK(choose(&c), err);
            if (c.budget == NULL) return;
            const spk_budget_item *q6 = item_of(c.budget, "shared expert", 1), *none = item_of(c.budget, "routed down", 6);
            CHECK(q6->option_count == 2 && q6->options[1].type == SPK_TYPE_Q6_K, "%u options", q6->option_count);
            CHECK(none->option_count == 1 && item_of(c.budget, "routed down", 1)->option_count > 1, "%u options", none->option_count);
            least = check_recipe(&c);
            CHECK(k != 1 || strcmp(text, c.budget->text) == 0, "another recipe with 5 threads: %s", c.budget->text);
            (void)snprintf(text, sizeof text, "%s", c.budget->text);
        }
        close_case(&c);
    }
    search_case c = open_extreme();                      /* what is asked for is not dropped */
    c.options.max_kl = 1e6;
    c.options.sets = &pin;
    c.options.set_count = 1;
    CHECK(choose(&c) == SPK_E_LIMIT && strstr(err.text, "'blk.1.ffn_up_shexp.weight', row 0, block 0: weight -8319008 is beyond") != NULL, "%s", err.text);
    close_case(&c);
    gb_remove_dir(dir);
}

/* ---- Parts ---- */

static void a_tensor_in_memory_is_that_of_the_pack(void) {
    char out_path[GB_PATH_MAX];
    pack_request request = { .recipe = "fast", .thread_count = 2 };
    spk_pack *p = NULL;
    spk_pool *pool = NULL;
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    gb_make_dir(dir);
    (void)gb_path(out_path, dir, "fast.spk");
    CHECK_OK(pack(TINY36, out_path, &request), err);
    CHECK_OK(spk_pack_open(out_path, &p, &err), err);
    CHECK_OK(spk_pool_create(2, &pool, &err), err);
    CHECK_OK(spk_gguf_open(TINY36, &source, &err), err);
    CHECK_OK(spk_recipe_load("native", "", &recipe, &err), err);
    spk_convert_options options = { .source = source, .recipe = recipe };
    CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
    for (uint64_t i = 0; i < spk_pack_tensor_count(p); i++) {
        const spk_tensor *t = &spk_pack_tensors(p)[i];
        if (t->type == t->source_type) continue;
        spk_tensor alone;
        uint8_t *block = NULL;
        uint64_t index = 0, section_bytes, row_bytes = spk_layout_unit_bytes(SPK_LAYOUT_ROWS, t->type, t->dims[0]);
        while (strcmp(plan.tensors[index].name, t->name) != 0) index++;
        CHECK_OK(spk_budget_requantize(&options, &plan, index, t->type, pool, &alone, &block, &err), err);
        uint8_t *rows = malloc(2 * row_bytes * t->dims[1]), *pack_rows = rows + row_bytes * t->dims[1];
        for (uint64_t m = 0; m < spk_tensor_matrix_count(t); m++) {
            spk_matrix a = spk_tensor_matrix(&alone, block, m), b = spk_tensor_matrix(t, spk_pack_section(p, t->section, &section_bytes), m);
            spk_layout_get_rows(&a, 0, t->dims[1], rows);
            spk_layout_get_rows(&b, 0, t->dims[1], pack_rows);
            CHECK(a.layout == b.layout && memcmp(rows, pack_rows, row_bytes * t->dims[1]) == 0, "%s, matrix %d", t->name, (int)m);
        }
        free(rows);
        free(block);
    }
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
    spk_pool_destroy(pool);
    spk_pack_close(p);
    gb_remove_dir(dir);
}

static void windows_put_together_are_one_comparison(void) {
    enum { VOCAB = 3, POSITIONS = 9000, BATCH = 60 };
    static const char *const names[] = { "a", "b" };
    static float base[BATCH * VOCAB], candidate[BATCH * VOCAB];
    const uint32_t next[BATCH] = { 0 };
    const float *logits[2] = { base, candidate };
    spk_compare_options options = { VOCAB, 2, names, 512 };
    spk_compare *one, *parts, *part;
    spk_compare_summary whole, joined;
    spk_pool *pool;
    uint64_t random = 3;
    CHECK_OK(spk_pool_create(1, &pool, &err), err);
    CHECK_OK(spk_compare_create(&options, &one, &err), err);
    CHECK_OK(spk_compare_create(&options, &parts, &err), err);
    CHECK_OK(spk_compare_create(&options, &part, &err), err);
    for (uint32_t done = 0; done < POSITIONS; done += BATCH) {
        for (int i = 0; i < BATCH * VOCAB; i++) {
            base[i] = check_uniform(&random);
            candidate[i] = base[i] + 0.1f * check_uniform(&random);
        }
        CHECK_OK(spk_compare_add(one, logits, next, BATCH, pool, &err), err);
        CHECK_OK(spk_compare_add(part, logits, next, BATCH, pool, &err), err);
        if (done != 60 && done + BATCH != POSITIONS) continue;       /* parts of 120 and of 8880 positions */
        CHECK_OK(spk_compare_append(parts, part, &err), err);
        spk_compare_destroy(part);
        CHECK_OK(spk_compare_create(&options, &part, &err), err);
    }
    CHECK_OK(spk_compare_summarize(one, 0, &whole, &err), err);
    CHECK_OK(spk_compare_summarize(parts, 0, &joined, &err), err);
    CHECK(memcmp(&whole, &joined, sizeof whole) == 0, "KL %.17g and %.17g", whole.kl_mean, joined.kl_mean);
    spk_compare_destroy(one);
    spk_compare_destroy(parts);
    spk_compare_destroy(part);
    spk_pool_destroy(pool);
}

int main(void) {
    RUN(the_knapsack_is_as_good_as_trying_everything);
    RUN(costs_that_add_up_are_spent_to_the_last);
    RUN(costs_that_do_not_add_up_are_repaired);
    RUN(a_named_recipe_that_holds_is_never_beaten);
    RUN(limits_on_bytes_hold_at_little_kl);
    RUN(an_impossible_budget_says_what_is_possible);
    RUN(what_set_matches_is_left_alone);
    RUN(every_tensor_that_can_shrink_is_in_one_item);
    RUN(what_a_type_cannot_hold_is_no_choice);
    RUN(a_tensor_in_memory_is_that_of_the_pack);
    RUN(windows_put_together_are_one_comparison);
    return CHECK_EXIT();
}
