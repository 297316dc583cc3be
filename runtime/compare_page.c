/* runtime/compare_page.c - see compare_page.h. */
#include "runtime/compare_page.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>
#include "formats/chart.h"
#include "formats/pack_page.h"
#include "runtime/model_internal.h"
#include "runtime/tokenizer_internal.h"

enum {
    TEXT_BINS_MAX = 200, WINDOW_BINS_MAX = 128,
    DECADES_MAX = 8,                         /* of the histogram */
    WORST_COUNT = 20,
    CONTEXT_TOKENS = 24, CONTEXT_CHARS = 70, TOKEN_CHARS = 40,
    ROWS_MAX = 1000                          /* of a list from the JSON */
};

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash == NULL || slash[1] == '\0' ? path : slash + 1;
}

/* ---- Summary and sizes ---- */

static void add_summary(spk_html *page, const spk_compare_page *s) {
    spk_html_addf(page, "<p class=\"soft\">%" PRIu64 " positions of ", s->summaries[0].positions);
    spk_html_string(page, s->text_path);
    spk_html_addf(page, " in %" PRIu64 " windows of %" PRIu64 ". KL is KL(base || candidate) in nats over the full vocabulary; "
                  "&plusmn; is one standard error, positions taken as independent.</p>\n"
                  "<div class=\"card scroll\" tabindex=\"0\"><table class=\"wide\">"
                  "<tr><th scope=\"col\">model</th><th scope=\"col\">mean KL</th><th scope=\"col\">same top-1</th>"
                  "<th scope=\"col\">perplexity</th><th scope=\"col\">ln ratio to base</th><th scope=\"col\">read per token</th>"
                  "<th scope=\"col\">weights</th></tr>\n", s->summaries[0].window_count, s->window_positions);
    for (uint32_t m = 0; m < s->model_count; m++) {
        const spk_compare_summary *c = m > 0 ? &s->summaries[m - 1] : &s->summaries[0];
        spk_html_addf(page, "<tr><th scope=\"row\">");
        spk_html_tail(page, base_name(s->paths[m]), strlen(base_name(s->paths[m])), TOKEN_CHARS);
        if (m == 0)
            spk_html_addf(page, " (base)</th><td></td><td></td><td>%.4f</td><td></td><td>", c->ppl_base);
        else
            spk_html_addf(page, "</th><td>%.3g &plusmn; %.2g</td><td>%.3f %% &plusmn; %.3f</td><td>%.4f</td><td>%+.5f "
                          "&plusmn; %.5f</td><td>", c->kl_mean, c->kl_se, 100 * c->top1, 100 * c->top1_se, c->ppl_candidate,
                          c->ln_ppl_ratio, c->ln_ppl_ratio_se);
        spk_html_bytes(page, spk_model_bytes_per_token(s->models[m]));
        spk_html_addf(page, "</td><td>");
        spk_html_bytes(page, spk_model_weight_bytes(s->models[m]));
        spk_html_addf(page, "</td></tr>\n");
    }
    spk_html_addf(page, "</table></div>\n");
}

static void add_sizes(spk_html *page, const spk_compare_page *s) {
    spk_chart_bar weights[SPK_COMPARE_MODEL_COUNT_MAX], tokens[SPK_COMPARE_MODEL_COUNT_MAX];
    for (uint32_t m = 0; m < s->model_count; m++) {
        weights[m] = (spk_chart_bar){ base_name(s->paths[m]), { spk_model_weight_bytes(s->models[m]), 0 } };
        tokens[m] = (spk_chart_bar){ base_name(s->paths[m]), { spk_model_bytes_per_token(s->models[m]), 0 } };
    }
    const spk_chart_text weights_text = { .title = "Weights", .about = "Bytes of all weights, without padding and metadata." };
    const spk_chart_text tokens_text = { .title = "Read per token",
                                         .about = "Bytes of weights that one decode step reads; of experts the used ones." };
    spk_html_addf(page, "<div class=\"grid\">\n");
    spk_chart_bars(page, &weights_text, weights, s->model_count, NULL, 1);
    spk_chart_bars(page, &tokens_text, tokens, s->model_count, NULL, 1);
    spk_html_addf(page, "</div>\n");
}

/* ---- KL ---- */

typedef struct {
    double   means[TEXT_BINS_MAX], maxima[TEXT_BINS_MAX];
    uint64_t counts[TEXT_BINS_MAX], width;   /* positions in it; of its range */
    uint32_t bin_count;
} bins;

/* Positions by their place in runs of `period`, in at most bins_max bins; period = the position count is the text's order. */
static void bin_positions(const spk_compare_page *s, uint32_t candidate, uint64_t period, uint32_t bins_max, bins *out) {
    const uint64_t count = spk_compare_position_count(s->compare);
    if (period > count) period = count;
    *out = (bins){ .width = (period + bins_max - 1) / bins_max };
    out->bin_count = (uint32_t)((period + out->width - 1) / out->width);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t b = i % period / out->width;
        double kl = spk_compare_at(s->compare, candidate, i).kl;
        out->means[b] += kl;
        out->maxima[b] = fmax(out->maxima[b], kl);
        out->counts[b]++;
    }
    for (uint32_t b = 0; b < out->bin_count; b++) out->means[b] /= (double)out->counts[b];
}

static void add_lines(spk_html *page, const spk_compare_page *s, uint32_t candidate) {
    const spk_chart_text along = { .title = "KL along the text", .x_name = "position in the text", .y_name = "KL, nats",
        .about = "Line: mean of neighbouring positions; light: the largest among them." };
    const spk_chart_text within = { .title = "KL by place in the window", .x_name = "tokens before it in its window",
        .y_name = "KL, nats",
        .about = "Over all windows, each of which begins from an empty state. Line: mean; light: the largest." };
    bins b;
    bin_positions(s, candidate, spk_compare_position_count(s->compare), TEXT_BINS_MAX, &b);
    spk_chart_line(page, &along, b.means, b.maxima, b.bin_count, 0, (double)b.width);
    bin_positions(s, candidate, s->window_positions, WINDOW_BINS_MAX, &b);
    spk_chart_line(page, &within, b.means, b.maxima, b.bin_count, 0, (double)b.width);
}

static void add_distribution(spk_html *page, const spk_compare_page *s, uint32_t candidate) {
    const spk_chart_text text = { .title = "Distribution of KL", .x_name = "KL, nats", .y_name = "share of positions",
        .about = "Bins of a quarter decade; the first also has everything below it, zeros included." };
    const spk_compare_summary *c = &s->summaries[candidate];
    const uint64_t count = spk_compare_position_count(s->compare);
    double least = c->kl_max;
    for (uint64_t i = 0; i < count; i++) {
        double kl = spk_compare_at(s->compare, candidate, i).kl;
        if (kl > 0 && kl < least) least = kl;
    }
    int high = (int)floor(log10(c->kl_max)) + 1, low = (int)floor(log10(least));
    if (low < high - DECADES_MAX) low = high - DECADES_MAX;
    uint64_t counts[DECADES_MAX * SPK_CHART_BINS_PER_DECADE] = { 0 };
    const int bin_count = (high - low) * SPK_CHART_BINS_PER_DECADE;
    for (uint64_t i = 0; i < count; i++) {
        double kl = spk_compare_at(s->compare, candidate, i).kl;
        int b = kl > 0 ? (int)fmax(floor((log10(kl) - low) * SPK_CHART_BINS_PER_DECADE), 0) : 0;
        counts[b < bin_count ? b : bin_count - 1]++;
    }
    const spk_chart_mark marks[] = { { "median", c->kl_median }, { "mean", c->kl_mean }, { "99 %", c->kl_p99 } };
    spk_chart_histogram(page, &text, counts, (uint32_t)bin_count, low, marks, sizeof marks / sizeof *marks);
}

/* ---- The worst tokens ---- */

/* Positions of the largest KL, largest first, ties to the earlier one; returns how many. */
static uint32_t find_worst(const spk_compare_page *s, uint32_t candidate, uint64_t worst[WORST_COUNT]) {
    double kls[WORST_COUNT];
    uint32_t found = 0;
    for (uint64_t i = 0; i < spk_compare_position_count(s->compare); i++) {
        double kl = spk_compare_at(s->compare, candidate, i).kl;
        if (!(kl > 0) || (found == WORST_COUNT && !(kl > kls[found - 1]))) continue;
        uint32_t at = found < WORST_COUNT ? found++ : found - 1;
        for (; at > 0 && kl > kls[at - 1]; at--) {
            kls[at] = kls[at - 1];
            worst[at] = worst[at - 1];
        }
        kls[at] = kl;
        worst[at] = i;
    }
    return found;
}

static void add_token(spk_html *page, const spk_compare_page *s, uint32_t token) {
    size_t size_bytes = 0;
    const char *piece = s->tokenizer == NULL || token >= spk_tokenizer_token_count(s->tokenizer) ? NULL :
                        spk_tokenizer_piece(s->tokenizer, token, true, &size_bytes);
    if (piece == NULL) {
        spk_html_addf(page, "%" PRIu32, token);
        return;
    }
    spk_html_addf(page, "<bdi>");
    spk_html_tail(page, piece, size_bytes, TOKEN_CHARS);
    spk_html_addf(page, "</bdi>");
}

/* The text before a position of its window, joined first: a character may be spread over tokens. */
static void add_context(spk_html *page, const spk_compare_page *s, uint64_t position) {
    enum { BYTES = 4 * CONTEXT_CHARS };
    const uint64_t begin = position - position % s->window_positions;
    char bytes[BYTES];
    size_t from = BYTES;
    for (uint64_t i = position + 1; i > begin && from > 0 && position + 1 - i < CONTEXT_TOKENS; i--) {
        size_t size_bytes = 0;
        uint32_t token = s->tokens[i - 1];
        const char *piece = token < spk_tokenizer_token_count(s->tokenizer)
                          ? spk_tokenizer_piece(s->tokenizer, token, true, &size_bytes) : NULL;
        if (piece == NULL) continue;
        size_t taken = size_bytes < from ? size_bytes : from;
        memcpy(bytes + from - taken, piece + size_bytes - taken, taken);
        from -= taken;
    }
    spk_html_addf(page, "<bdi>");
    spk_html_tail(page, bytes + from, BYTES - from, CONTEXT_CHARS);
    spk_html_addf(page, "</bdi>");
}

static void add_worst(spk_html *page, const spk_compare_page *s, uint32_t candidate) {
    uint64_t worst[WORST_COUNT];
    uint32_t count = find_worst(s, candidate, worst);
    spk_html_addf(page, "<div class=\"card\"><h3>Where they differ most</h3><div class=\"scroll\" tabindex=\"0\"><table>\n<tr>"
                  "<th class=\"n\" scope=\"col\">KL</th><th scope=\"col\">%s</th><th scope=\"col\">base's choice</th>"
                  "<th scope=\"col\">candidate's</th><th class=\"n\" scope=\"col\">p base</th>"
                  "<th class=\"n\" scope=\"col\">p cand.</th><th class=\"n\" scope=\"col\">position</th></tr>\n",
                  s->tokenizer == NULL ? "true next token" : "text, and the true next token");
    for (uint32_t w = 0; w < count; w++) {
        spk_compare_point p = spk_compare_at(s->compare, candidate, worst[w]);
        spk_html_addf(page, "<tr><td class=\"n\">%.3g</td><td class=\"text\">", p.kl);
        if (s->tokenizer != NULL) add_context(page, s, worst[w]);
        spk_html_addf(page, "<mark>");
        add_token(page, s, s->tokens[worst[w] + 1]);
        spk_html_addf(page, "</mark></td><td><code>");
        add_token(page, s, p.top_base);
        spk_html_addf(page, "</code></td><td><code>");
        add_token(page, s, p.top_candidate);
        spk_html_addf(page, "</code></td><td class=\"n\">%.3g</td><td class=\"n\">%.3g</td><td class=\"n\">%" PRIu64
                      "</td></tr>\n", exp(-p.nll_base), exp(-p.nll_candidate), worst[w]);
    }
    spk_html_addf(page, "</table></div><p class=\"soft\">p is the probability of the true next token.%s</p></div>\n",
                  s->tokenizer == NULL ? " The base has no tokenizer that could turn ids into text." : "");
}

/* ---- The page ---- */

static void add_candidate(spk_html *page, const spk_compare_page *s, uint32_t candidate) {
    const spk_compare_summary *c = &s->summaries[candidate];
    const spk_pack *pack = s->models[candidate + 1]->pack;
    spk_html_addf(page, "<h2>");
    spk_html_string(page, s->paths[candidate + 1]);
    spk_html_addf(page, "</h2>\n<div class=\"tiles\"><div class=\"tile\">mean KL<b>%.3g</b></div>"
                  "<div class=\"tile\">99 %% of KL below<b>%.3g</b></div><div class=\"tile\">same top-1<b>%.2f %%</b></div>"
                  "<div class=\"tile\">perplexity, base<b>%.4f</b></div>"
                  "<div class=\"tile\">perplexity, candidate<b>%.4f</b></div></div>\n", c->kl_mean, c->kl_p99, 100 * c->top1,
                  c->ppl_base, c->ppl_candidate);
    if (c->kl_max > 0) {
        spk_html_addf(page, "<div class=\"grid\">\n");
        add_lines(page, s, candidate);
        add_distribution(page, s, candidate);
        spk_html_addf(page, "</div>\n");
        add_worst(page, s, candidate);
    } else {
        spk_html_paragraph(page, "Every KL is zero: at no position do the predictions differ.");
    }
    if (pack != NULL) spk_pack_page_errors(page, pack);
    else spk_html_paragraph(page, "A GGUF does not say how far its weights are from those that it was made of, so there is no "
                                  "map of errors.");
}

static void add_provenance(spk_html *page, const spk_compare_page *s) {
    spk_html_addf(page, "<h2>Provenance</h2>\n");
    for (uint32_t m = 0; m < s->model_count; m++) {
        spk_html_addf(page, "<div class=\"card\"><h3>%s</h3>\n<p>", m == 0 ? "base" : "candidate");
        spk_html_string(page, s->paths[m]);
        spk_html_addf(page, "</p>\n<p>%s, ", spk_model_fingerprint_text(s->models[m]));
        spk_html_string(page, spk_model_backend_name(s->models[m]));
        spk_html_addf(page, " backend</p>\n");
        if (s->models[m]->pack != NULL) spk_pack_page_provenance(page, s->models[m]->pack);
        else spk_html_paragraph(page, "A GGUF, which records no provenance.");
        spk_html_addf(page, "</div>\n");
    }
}

void spk_compare_page_write(spk_html *page, const spk_compare_page *s) {
    spk_html_begin(page, "What smaller weights cost");
    add_summary(page, s);
    add_sizes(page, s);
    for (uint32_t i = 0; i + 1 < s->model_count; i++) add_candidate(page, s, i);
    add_provenance(page, s);
    spk_html_addf(page, "<h2>All figures</h2>\n<details class=\"card\"><summary>As --json has them</summary>\n");
    spk_html_json(page, s->report);
    spk_html_addf(page, "<h3>base</h3>\n");
    spk_html_json(page, cJSON_GetObjectItemCaseSensitive(s->report, "base"));
    spk_html_addf(page, "<h3>candidates</h3>\n");
    spk_html_json_list(page, cJSON_GetObjectItemCaseSensitive(s->report, "candidates"), true, ROWS_MAX);
    spk_html_addf(page, "</details>\n");
}
