/* requant/plan_report.c - see plan_report.h. */
#include "requant/plan_report.h"

#include <inttypes.h>
#include <string.h>

#include "formats/census.h"
#include "formats/chart.h"
#include "formats/pack_page.h"
#include "formats/plain.h"
#include "formats/units.h"

/* ---- Sizes ---- */

spk_tensor spk_plan_in_source(const spk_tensor *tensor) {
    spk_tensor source = *tensor;
    source.type = tensor->source_type;
    return source;
}

spk_size_change spk_plan_weight_bytes(const spk_convert_plan *plan) {
    spk_size_change sum = { 0, 0 };
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        spk_tensor source = spk_plan_in_source(&plan->tensors[i]);
        sum.source_bytes += spk_tensor_bytes(&source);
        sum.bytes += spk_tensor_bytes(&plan->tensors[i]);
    }
    return sum;
}

spk_size_change spk_plan_token_bytes(const spk_convert_plan *plan) {
    spk_size_change sum = { 0, 0 };
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        spk_tensor source = spk_plan_in_source(&plan->tensors[i]);
        sum.source_bytes += spk_tensor_bytes_per_token(&plan->config, &source);
        sum.bytes += spk_tensor_bytes_per_token(&plan->config, &plan->tensors[i]);
    }
    return sum;
}

uint64_t spk_plan_data_bytes(const spk_convert_plan *plan) {
    uint64_t sum = 0;
    for (int s = 0; s < SPK_PLACE_COUNT; s++) sum += plan->section_bytes[s];
    return sum;
}

spk_status spk_plan_check_pack(const spk_convert_plan *plan, const spk_pack *pack, spk_error *err) {
    bool is_same = spk_pack_tensor_count(pack) == plan->tensor_count;
    for (uint64_t i = 0; i < plan->tensor_count && is_same; i++) {
        const spk_tensor *found = &spk_pack_tensors(pack)[i], *made = &plan->tensors[i];
        is_same = strcmp(found->name, made->name) == 0 && found->type == made->type && found->source_type == made->source_type &&
                  memcmp(&found->relative_rmse, &made->relative_rmse, sizeof made->relative_rmse) == 0;
    }
    return is_same ? SPK_OK : spk_fail(err, SPK_E_IO, "%s: was replaced by another pack as soon as it was there", spk_pack_path(pack));
}

/* ---- Text ---- */

static void print_requantized(const spk_convert_plan *plan, uint64_t index, bool has_errors, FILE *out) {
    const spk_tensor *t = &plan->tensors[index], source = spk_plan_in_source(t);
    (void)fprintf(out, "  %-34s %s -> %s %12" PRIu64 " -> %12" PRIu64 " bytes", spk_plain(t->name).text, spk_type_name(t->source_type),
                  spk_type_name(t->type), spk_tensor_bytes(&source), spk_tensor_bytes(t));
    if (has_errors)
        (void)fprintf(out, "  rel. RMSE %.6f  max %.3e  cosine %.7f", t->relative_rmse, t->max_abs_error, t->cosine);
    (void)fputc('\n', out);
}

static void print_rules(const spk_convert_plan *plan, bool has_errors, FILE *out) {
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        if (!spk_tensor_is_requantized(&plan->tensors[i])) continue;
        const char *rule = plan->choices[i].rule;
        bool is_printed = false;
        for (uint64_t j = 0; j < i; j++)
            if (spk_tensor_is_requantized(&plan->tensors[j]) && plan->choices[j].rule == rule) is_printed = true;
        if (is_printed) continue;
        (void)fprintf(out, "rule %s\n", spk_plain(rule).text);
        for (uint64_t j = i; j < plan->tensor_count; j++)
            if (spk_tensor_is_requantized(&plan->tensors[j]) && plan->choices[j].rule == rule)
                print_requantized(plan, j, has_errors, out);
    }
}

static void print_change(const char *what, spk_size_change change, FILE *out) {
    char before_text[SPK_BYTES_TEXT_SIZE], after_text[SPK_BYTES_TEXT_SIZE];
    double before = (double)change.source_bytes;
    double percent = before > 0 ? 100.0 * ((double)change.bytes - before) / before : 0;
    (void)fprintf(out, "%-10s %s -> %s (%" PRIu64 " -> %" PRIu64 " bytes, %+.1f %%)\n", what,
                  spk_bytes_text(change.source_bytes, before_text), spk_bytes_text(change.bytes, after_text),
                  change.source_bytes, change.bytes, percent);
}

void spk_plan_print(const spk_convert_plan *plan, bool has_errors, FILE *out) {
    spk_census census;
    spk_census_take(plan->tensors, plan->tensor_count, &census);
    print_rules(plan, has_errors, out);
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++)
        if (census.of[type][type].tensor_count > 0)
            (void)fprintf(out, "copied     %-5s %5" PRIu64 " tensors %15" PRIu64 " bytes\n", spk_type_name(type),
                          census.of[type][type].tensor_count, census.of[type][type].byte_count);
    print_change("weights", spk_plan_weight_bytes(plan), out);
    print_change("per token", spk_plan_token_bytes(plan), out);
}

/* ---- The page ---- */

enum { REPORT_TENSORS_MAX = 1000 };      /* of the list below the pictures */

static void add_sizes(spk_html *page, const spk_plan_page *s) {
    static const char *const series[] = { "source", "pack" };
    spk_size_change weights = spk_plan_weight_bytes(s->plan), per_token = spk_plan_token_bytes(s->plan);
    const spk_chart_bar bars[] = { { "all weights", { weights.source_bytes, weights.bytes } },
                                   { "the file", { s->source_bytes, s->pack_bytes } } };
    const spk_chart_bar token_bars[] = { { "read per token", { per_token.source_bytes, per_token.bytes } } };
    const spk_chart_text text = { .title = "Size", .about = "Weights without padding and metadata; the file with both." };
    const spk_chart_text token_text = { .title = "Read per token",
        .about = "Bytes of weights that one decode step reads; of experts the used ones." };
    spk_html_addf(page, "<div class=\"grid\">\n");
    spk_chart_bars(page, &text, bars, 2, series, 2);
    spk_chart_bars(page, &token_text, token_bars, 1, series, 2);
    spk_html_addf(page, "</div>\n");
}

void spk_plan_page_write(spk_html *page, const spk_plan_page *s) {
    spk_html_begin(page, "What became of the weights");
    spk_html_addf(page, "<p>");
    spk_html_string(page, s->in_path);
    spk_html_addf(page, " &rarr; ");
    spk_html_string(page, s->out_path);
    spk_html_addf(page, "</p>\n<p class=\"soft\">%s; recipe ", s->fingerprint);
    spk_html_string(page, spk_recipe_name(s->recipe));
    spk_html_addf(page, ": ");
    spk_html_string(page, spk_recipe_about(s->recipe));
    spk_html_addf(page, "</p>\n");
    spk_pack_page_errors(page, s->pack);
    add_sizes(page, s);
    spk_html_addf(page, "<h2>Provenance</h2>\n<div class=\"card\">\n");
    spk_pack_page_provenance(page, s->pack);
    spk_html_addf(page, "</div>\n<h2>All figures</h2>\n<details class=\"card\"><summary>As --json has them</summary>\n");
    spk_html_json(page, s->figures);
    spk_html_addf(page, "<h3>requantized</h3>\n");
    spk_html_json_list(page, cJSON_GetObjectItemCaseSensitive(s->figures, "requantized"), false, REPORT_TENSORS_MAX);
    spk_html_addf(page, "<h3>copied</h3>\n");
    spk_html_json_list(page, cJSON_GetObjectItemCaseSensitive(s->figures, "copied"), false, REPORT_TENSORS_MAX);
    spk_html_addf(page, "</details>\n");
}
