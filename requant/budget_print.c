/* requant/budget_print.c - a budget's table of choices, as text and as JSON. */
#include <inttypes.h>
#include <string.h>

#include "requant/budget_internal.h"

static const uint32_t columns[] = { SPK_TYPE_Q8_0, SPK_TYPE_Q6_K, SPK_TYPE_Q5_K, SPK_TYPE_Q4_K };
enum { COLUMN_COUNT = sizeof columns / sizeof *columns };

static void layers_text(const spk_budget_item *item, char out[24]) {
    if (!item->has_layers) (void)snprintf(out, 24, "-");
    else if (item->layer_begin == item->layer_last) (void)snprintf(out, 24, "%" PRIu32, item->layer_begin);
    else (void)snprintf(out, 24, "%" PRIu32 "-%" PRIu32, item->layer_begin, item->layer_last);
}

/* The types of an item's tensors in the source: "Q5_K,Q6_K". */
static void source_text(const spk_budget *budget, const spk_budget_item *item, char out[48]) {
    uint64_t seen = 0;
    size_t length = 0;
    out[0] = '\0';
    for (uint64_t i = 0; i < item->tensor_count; i++) {
        uint32_t type = budget->plan.tensors[item->tensors[i]].source_type;
        if ((seen >> type & 1) == 0 && length < 48)
            length += (size_t)snprintf(out + length, 48 - length, "%s%s", seen == 0 ? "" : ",", spk_type_name(type));
        seen |= UINT64_C(1) << type;
    }
}

static void print_item(const spk_budget *budget, uint32_t index, FILE *out) {
    const spk_budget_item *item = &budget->items[index];
    const spk_budget_option *chosen = &item->options[budget->choice[index]];
    char layers[24], source[48], cell[24];
    layers_text(item, layers);
    source_text(budget, item, source);
    (void)fprintf(out, "  %-16s %-7s %-10s", item->class_name, layers, source);
    for (size_t c = 0; c < COLUMN_COUNT; c++) {
        (void)snprintf(cell, sizeof cell, "- ");
        for (uint32_t o = 1; o < item->option_count; o++)
            if (item->options[o].type == columns[c])
                (void)snprintf(cell, sizeof cell, "%.2e%c", item->options[o].cost.mean,
                               budget->choice[index] == o ? '*' : ' ');
        (void)fprintf(out, " %10s", cell);
    }
    if (chosen->type != SPK_TYPE_LIMIT)
        (void)fprintf(out, " %10" PRIu64, item->options[0].token_bytes - chosen->token_bytes);
    (void)fprintf(out, "\n");
}

static double sum_of_parts(const spk_budget *budget) {
    double sum = 0;
    for (uint32_t i = 0; i < budget->item_count; i++) sum += budget->items[i].options[budget->choice[i]].cost.mean;
    return sum;
}

void spk_budget_print(const spk_budget *budget, FILE *out) {
    const spk_budget_meter *meter = budget->options.meter;
    (void)fprintf(out, "choices    mean KL of each alone, on %" PRIu64 " positions; * is taken, and saves so many bytes a token\n"
                  "  %-16s %-7s %-10s", meter->sample_count, "class", "layers", "is");
    for (size_t c = 0; c < COLUMN_COUNT; c++) (void)fprintf(out, " %9s ", spk_type_name(columns[c]));
    (void)fprintf(out, "%10s\n", "saves");
    for (uint32_t i = 0; i < budget->item_count; i++) print_item(budget, i, out);
    (void)fprintf(out, "together   mean KL %.3g +- %.2g on %" PRIu64 " positions (upper bound %.3g; the parts sum to %.3g); %" PRIu32
                  " sets measured\n", budget->cost.mean, budget->cost.se, meter->position_count, budget->cost.upper,
                  sum_of_parts(budget), budget->set_count);
}

/* ---- JSON ---- */

static cJSON *item_json(const spk_budget *budget, uint32_t index) {
    const spk_budget_item *item = &budget->items[index];
    const uint32_t chosen = budget->choice[index];
    char layers[24], source[48];
    layers_text(item, layers);
    source_text(budget, item, source);
    cJSON *object = cJSON_CreateObject();
    (void)cJSON_AddStringToObject(object, "class", item->class_name);
    (void)cJSON_AddStringToObject(object, "layers", layers);
    (void)cJSON_AddStringToObject(object, "is", source);
    if (chosen == 0) (void)cJSON_AddNullToObject(object, "becomes");
    else (void)cJSON_AddStringToObject(object, "becomes", spk_type_name(item->options[chosen].type));
    cJSON *options = cJSON_AddArrayToObject(object, "options");
    for (uint32_t o = 1; o < item->option_count; o++) {
        const spk_budget_option *option = &item->options[o];
        cJSON *entry = cJSON_CreateObject();
        (void)cJSON_AddStringToObject(entry, "to", spk_type_name(option->type));
        (void)cJSON_AddNumberToObject(entry, "kl_alone", option->cost.mean);
        (void)cJSON_AddNumberToObject(entry, "kl_alone_se", option->cost.se);
        (void)cJSON_AddNumberToObject(entry, "token_bytes_saved", (double)(item->options[0].token_bytes - option->token_bytes));
        (void)cJSON_AddNumberToObject(entry, "bytes_saved", (double)(item->options[0].bytes - option->bytes));
        (void)cJSON_AddItemToArray(options, entry);
    }
    return object;
}

cJSON *spk_budget_json(const spk_budget *budget) {
    const spk_budget_options *o = &budget->options;
    cJSON *object = cJSON_CreateObject();
    if (o->max_kl >= 0) (void)cJSON_AddNumberToObject(object, "max_kl", o->max_kl);
    if (o->max_token_bytes != SPK_BUDGET_UNLIMITED)
        (void)cJSON_AddNumberToObject(object, "max_bytes_per_token", (double)o->max_token_bytes);
    if (o->max_pack_bytes != SPK_BUDGET_UNLIMITED) (void)cJSON_AddNumberToObject(object, "max_size", (double)o->max_pack_bytes);
    (void)cJSON_AddNumberToObject(object, "positions", (double)o->meter->position_count);
    (void)cJSON_AddNumberToObject(object, "sample_positions", (double)o->meter->sample_count);
    (void)cJSON_AddNumberToObject(object, "kl_mean", budget->cost.mean);
    (void)cJSON_AddNumberToObject(object, "kl_se", budget->cost.se);
    (void)cJSON_AddNumberToObject(object, "kl_upper", budget->cost.upper);
    (void)cJSON_AddNumberToObject(object, "kl_sum_of_parts", sum_of_parts(budget));
    (void)cJSON_AddNumberToObject(object, "sets_measured", budget->set_count);
    cJSON *choices = cJSON_AddArrayToObject(object, "choices");
    for (uint32_t i = 0; i < budget->item_count; i++) (void)cJSON_AddItemToArray(choices, item_json(budget, i));
    return object;
}
