/* requant/budget_items.c - what a budget chooses among: items and their options, their bytes, and a choice as a recipe. */
#include "requant/budget_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "formats/census.h"
#include "requant/quant.h"

enum { CLASS_ROLES_MAX = 3 };
typedef struct {
    const char *name;
    bool        has_layers;
    spk_role    roles[CLASS_ROLES_MAX];      /* up to the first EXTRA */
} tensor_class;

/* Order of the table.  A tied embedding is the head: see class_of. */
static const tensor_class classes[] = {
    { "shared expert",   true,  { SPK_ROLE_SHARED_GATE, SPK_ROLE_SHARED_UP, SPK_ROLE_SHARED_DOWN } },
    { "routed gate, up", true,  { SPK_ROLE_EXPERT_GATE, SPK_ROLE_EXPERT_UP } },
    { "routed down",     true,  { SPK_ROLE_EXPERT_DOWN } },
    { "ffn gate, up",    true,  { SPK_ROLE_FFN_GATE, SPK_ROLE_FFN_UP } },
    { "ffn down",        true,  { SPK_ROLE_FFN_DOWN } },
    { "attention q, o",  true,  { SPK_ROLE_ATTN_Q, SPK_ROLE_ATTN_OUT } },
    { "attention k, v",  true,  { SPK_ROLE_ATTN_K, SPK_ROLE_ATTN_V } },
    { "GDN qkv",         true,  { SPK_ROLE_GDN_QKV } },
    { "GDN gate",        true,  { SPK_ROLE_GDN_GATE } },
    { "GDN out",         true,  { SPK_ROLE_GDN_OUT } },
    { "LM head",         false, { SPK_ROLE_OUTPUT } },
    { "embedding",       false, { SPK_ROLE_TOKEN_EMBD } },
};
enum { CLASS_COUNT = sizeof classes / sizeof *classes };

/* From the widest to the narrowest. */
static const uint32_t targets[] = { SPK_TYPE_Q8_0, SPK_TYPE_Q6_K, SPK_TYPE_Q5_K, SPK_TYPE_Q4_K };
enum { TARGET_COUNT = sizeof targets / sizeof *targets };
SPK_STATIC_ASSERT(TARGET_COUNT + 1 <= SPK_BUDGET_OPTION_MAX, "an option for each target, and one to leave all as it is");

static spk_status out_of_memory(spk_error *err) { return spk_fail(err, SPK_E_MEMORY, "out of memory for a budget"); }

/* ---- Options ---- */

static bool is_wider(uint32_t type, uint32_t than) {
    const spk_type_info *a = spk_type_find(type), *b = spk_type_find(than);
    return (uint64_t)a->block_bytes * b->block_weights > (uint64_t)b->block_bytes * a->block_weights;
}

uint32_t spk_budget_target(uint32_t option_type, const spk_tensor *tensor) {
    bool is_changed = option_type != SPK_TYPE_LIMIT && is_wider(tensor->source_type, option_type) &&
                      tensor->dims[0] % spk_type_find(option_type)->block_weights == 0;
    return is_changed ? option_type : tensor->source_type;
}

/* Of the class, not pinned by --set, and with some smaller type to take. */
static bool is_of_class(const spk_budget *budget, uint64_t index, const tensor_class *class, uint32_t *layer) {
    const spk_convert_plan *plan = &budget->plan;
    const spk_tensor *t = &plan->tensors[index];
    spk_role role = spk_model_role(&plan->config, t->name, layer);
    if (role == SPK_ROLE_TOKEN_EMBD && plan->config.is_tied) role = SPK_ROLE_OUTPUT;
    if (plan->choices[index].rule != NULL) return false;
    for (size_t r = 0; r < CLASS_ROLES_MAX && class->roles[r] != SPK_ROLE_EXTRA; r++) {
        if (class->roles[r] != role) continue;
        for (size_t k = 0; k < TARGET_COUNT; k++)
            if (spk_budget_target(targets[k], t) != t->source_type) return true;
    }
    return false;
}

static void add_option(const spk_budget *budget, spk_budget_item *item, uint32_t type) {
    spk_budget_option option = { .type = type };
    bool changes = type == SPK_TYPE_LIMIT;
    for (uint64_t i = 0; i < item->tensor_count; i++) {
        spk_tensor t = budget->plan.tensors[item->tensors[i]];
        t.type = spk_budget_target(type, &t);
        changes = changes || t.type != t.source_type;
        option.token_bytes += spk_tensor_bytes_per_token(&budget->plan.config, &t);
        option.bytes += spk_tensor_bytes(&t);
    }
    if (changes) item->options[item->option_count++] = option;
}

/* ---- Items ---- */

static spk_status add_item(spk_budget *budget, const tensor_class *class, const bool *in_group, spk_error *err) {
    const uint64_t tensor_count = budget->plan.tensor_count;
    spk_budget_item *larger = realloc(budget->items, (budget->item_count + 1) * sizeof *larger);
    if (larger == NULL) return out_of_memory(err);
    budget->items = larger;
    spk_budget_item *item = &larger[budget->item_count];
    *item = (spk_budget_item){ .class_name = class->name, .has_layers = class->has_layers, .layer_begin = UINT32_MAX,
                               .tensors = malloc(tensor_count * sizeof *item->tensors) };
    if (item->tensors == NULL) return out_of_memory(err);
    budget->item_count++;
    for (uint64_t i = 0; i < tensor_count; i++) {
        uint32_t layer;
        if (!is_of_class(budget, i, class, &layer) || !in_group[layer]) continue;
        item->tensors[item->tensor_count++] = i;
        if (layer < item->layer_begin) item->layer_begin = layer;
        if (layer > item->layer_last) item->layer_last = layer;
    }
    add_option(budget, item, SPK_TYPE_LIMIT);
    for (size_t k = 0; k < TARGET_COUNT; k++) add_option(budget, item, targets[k]);
    return SPK_OK;
}

/* The layers in which the class has something to choose, cut into groups of as equal a number as they go. */
static spk_status add_class(spk_budget *budget, const tensor_class *class, spk_error *err) {
    bool has_class[SPK_LAYER_COUNT_MAX] = { false }, in_group[SPK_LAYER_COUNT_MAX];
    uint32_t layers[SPK_LAYER_COUNT_MAX], count = 0, layer;
    for (uint64_t i = 0; i < budget->plan.tensor_count; i++)
        if (is_of_class(budget, i, class, &layer)) has_class[layer] = true;
    for (layer = 0; layer < SPK_LAYER_COUNT_MAX; layer++)
        if (has_class[layer]) layers[count++] = layer;
    uint32_t group_count = count < SPK_BUDGET_GROUP_MAX ? count : SPK_BUDGET_GROUP_MAX;
    for (uint32_t g = 0; g < group_count; g++) {
        memset(in_group, 0, sizeof in_group);
        for (uint32_t l = g * count / group_count; l < (g + 1) * count / group_count; l++) in_group[layers[l]] = true;
        SPK_TRY(add_item(budget, class, in_group, err));
    }
    return SPK_OK;
}

spk_status spk_budget_list(spk_budget *budget, spk_error *err) {
    for (size_t k = 0; k < CLASS_COUNT; k++) SPK_TRY(add_class(budget, &classes[k], err));
    budget->choice = calloc((size_t)budget->item_count + 1, sizeof *budget->choice);
    return budget->choice == NULL ? out_of_memory(err) : SPK_OK;
}

/* ---- A choice ---- */

void spk_budget_types(const spk_budget *budget, const uint32_t *choice, uint32_t *types) {
    const spk_convert_plan *plan = &budget->plan;
    for (uint64_t i = 0; i < plan->tensor_count; i++) types[i] = plan->tensors[i].type;
    for (uint32_t i = 0; i < budget->item_count; i++) {
        const spk_budget_item *item = &budget->items[i];
        for (uint64_t t = 0; t < item->tensor_count; t++)
            types[item->tensors[t]] = spk_budget_target(item->options[choice[i]].type, &plan->tensors[item->tensors[t]]);
    }
}

spk_status spk_budget_size_of(const spk_budget *budget, const uint32_t *choice, spk_budget_size *out, spk_error *err) {
    const spk_convert_plan *plan = &budget->plan;
    spk_tensor *tensors = malloc(plan->tensor_count * sizeof *tensors);
    uint32_t *types = malloc(plan->tensor_count * sizeof *types);
    uint64_t section_bytes[SPK_PLACE_COUNT];
    spk_status status = tensors == NULL || types == NULL ? out_of_memory(err) : SPK_OK;
    if (status == SPK_OK) {
        memcpy(tensors, plan->tensors, plan->tensor_count * sizeof *tensors);
        spk_budget_types(budget, choice, types);
        for (uint64_t i = 0; i < plan->tensor_count; i++) tensors[i].type = types[i];
        status = spk_model_place(&plan->config, tensors, plan->tensor_count, section_bytes, err);
    }
    if (status == SPK_OK) {
        *out = (spk_budget_size){ .pack_bytes = budget->overhead_bytes };
        for (int s = 0; s < SPK_PLACE_COUNT; s++) out->pack_bytes += section_bytes[s];
        for (uint64_t i = 0; i < plan->tensor_count; i++)
            out->token_bytes += spk_tensor_bytes_per_token(&plan->config, &tensors[i]);
    }
    free(tensors);
    free(types);
    return status;
}

/* ---- The recipe ---- */

/* The part of a name that all layers share: "ffn_down_exps.weight" of "blk.3.ffn_down_exps.weight". */
static const char *suffix_of(const spk_tensor *t, bool has_layers) {
    return has_layers ? strchr(t->name + strlen("blk."), '.') + 1 : t->name;
}

/* Decode reads it, and its name differs at most in the layer. */
static bool is_same_kind(const spk_budget *budget, uint64_t a, uint64_t b, bool has_layers) {
    const spk_tensor *x = &budget->plan.tensors[a], *y = &budget->plan.tensors[b];
    uint32_t layer;
    return spk_model_role(&budget->plan.config, y->name, &layer) != SPK_ROLE_EXTRA &&
           (strncmp(y->name, "blk.", strlen("blk.")) == 0) == has_layers &&
           strcmp(suffix_of(x, has_layers), suffix_of(y, has_layers)) == 0;
}

static bool has_same_rule(const spk_budget *budget, const uint32_t *types, uint64_t a, uint64_t b, bool has_layers) {
    return types[a] == types[b] && types[b] != budget->plan.tensors[b].source_type &&
           budget->plan.choices[b].rule == NULL && is_same_kind(budget, a, b, has_layers);
}

/* The rule for `first` and all tensors of its kind that become the same type; \d+ where these are all of the kind. */
static void put_rule(FILE *text, const spk_budget *budget, const uint32_t *types, uint64_t first, bool has_layers) {
    const spk_convert_plan *plan = &budget->plan;
    uint64_t from_mask = 0;
    uint32_t layer;
    bool is_whole_kind = true;
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        if (!is_same_kind(budget, first, i, has_layers)) continue;
        if (has_same_rule(budget, types, first, i, has_layers)) from_mask |= UINT64_C(1) << plan->tensors[i].source_type;
        else is_whole_kind = false;
    }
    (void)fprintf(text, "rule %s", !has_layers ? "" : is_whole_kind ? "blk\\.\\d+\\." : "blk\\.");
    const char *separator = "(";
    for (uint64_t i = 0; i < plan->tensor_count && has_layers && !is_whole_kind; i++) {
        if (!has_same_rule(budget, types, first, i, has_layers)) continue;
        (void)spk_model_role(&plan->config, plan->tensors[i].name, &layer);
        (void)fprintf(text, "%s%" PRIu32, separator, layer);
        separator = "|";
    }
    if (has_layers && !is_whole_kind) (void)fprintf(text, ")\\.");
    for (const char *c = suffix_of(&plan->tensors[first], has_layers); *c != '\0'; c++)
        (void)fprintf(text, *c == '.' ? "\\%c" : "%c", *c);
    separator = " ";
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++) {
        if ((from_mask >> type & 1) == 0) continue;
        (void)fprintf(text, "%s%s", separator, spk_type_name(type));
        separator = ",";
    }
    (void)fprintf(text, " -> %s\n", spk_type_name(types[first]));
}

/* True if no earlier tensor of the items brought the same rule. */
static bool is_first_of_rule(const spk_budget *budget, const uint32_t *types, uint32_t item_index, uint64_t tensor) {
    for (uint32_t i = 0; i <= item_index; i++)
        for (uint64_t t = 0; t < budget->items[i].tensor_count; t++) {
            uint64_t other = budget->items[i].tensors[t];
            if (other == tensor) return true;
            if (has_same_rule(budget, types, tensor, other, budget->items[item_index].has_layers)) return false;
        }
    return true;
}

spk_status spk_budget_text(const spk_budget *budget, const uint32_t *choice, const char *about, char **out,
                           spk_error *err) {
    const spk_convert_plan *plan = &budget->plan;
    char *bytes = NULL;
    size_t size_bytes = 0;
    uint32_t *types = malloc(plan->tensor_count * sizeof *types);
    FILE *text = open_memstream(&bytes, &size_bytes);
    bool has_failed = types == NULL || text == NULL;
    if (!has_failed) {
        spk_budget_types(budget, choice, types);
        (void)fprintf(text, "recipe budget\nabout %s\nmodel %s\n", about, budget->fingerprint);
        for (uint32_t i = 0; i < budget->item_count; i++) {
            const spk_budget_item *item = &budget->items[i];
            for (uint64_t t = 0; t < item->tensor_count; t++) {
                uint64_t tensor = item->tensors[t];
                if (types[tensor] != plan->tensors[tensor].source_type && is_first_of_rule(budget, types, i, tensor))
                    put_rule(text, budget, types, tensor, item->has_layers);
            }
        }
        has_failed = ferror(text) != 0;
    }
    if (text != NULL) has_failed = fclose(text) != 0 || has_failed;
    free(types);
    if (has_failed) {
        free(bytes);
        return out_of_memory(err);
    }
    *out = bytes;
    return SPK_OK;
}
