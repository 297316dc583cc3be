/* formats/pack_page.c - see pack_page.h. */
#include "formats/pack_page.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include "formats/census.h"
#include "formats/chart.h"

/* ---- The heat map ---- */

typedef enum {
    CLASS_GDN_QKV, CLASS_GDN_GATE, CLASS_GDN_OUT, CLASS_ATTN_QO, CLASS_ATTN_KV, CLASS_SHARED, CLASS_GATE_UP, CLASS_DOWN,
    CLASS_DENSE, CLASS_HEAD, CLASS_EMBEDDING, CLASS_OTHER, CLASS_COUNT
} tensor_class;
static const char *const CLASS_NAMES[CLASS_COUNT] = {
    "GDN qkv", "GDN gate", "GDN out", "attention q, out", "attention k, v", "shared expert", "routed gate, up",
    "routed down", "feed-forward", "LM head", "embedding", "other" };

/* CLASS_COUNT for what is never requantized. */
static tensor_class class_of(spk_role role) {
    switch (role) {
    case SPK_ROLE_GDN_QKV: return CLASS_GDN_QKV;
    case SPK_ROLE_GDN_GATE: return CLASS_GDN_GATE;
    case SPK_ROLE_GDN_OUT: return CLASS_GDN_OUT;
    case SPK_ROLE_ATTN_Q: case SPK_ROLE_ATTN_OUT: return CLASS_ATTN_QO;
    case SPK_ROLE_ATTN_K: case SPK_ROLE_ATTN_V: return CLASS_ATTN_KV;
    case SPK_ROLE_SHARED_GATE: case SPK_ROLE_SHARED_UP: case SPK_ROLE_SHARED_DOWN: return CLASS_SHARED;
    case SPK_ROLE_EXPERT_GATE: case SPK_ROLE_EXPERT_UP: return CLASS_GATE_UP;
    case SPK_ROLE_EXPERT_DOWN: return CLASS_DOWN;
    case SPK_ROLE_FFN_GATE: case SPK_ROLE_FFN_UP: case SPK_ROLE_FFN_DOWN: return CLASS_DENSE;
    case SPK_ROLE_OUTPUT: return CLASS_HEAD;
    case SPK_ROLE_TOKEN_EMBD: return CLASS_EMBEDDING;
    case SPK_ROLE_EXTRA: return CLASS_OTHER;
    default: return CLASS_COUNT;
    }
}

enum { COLUMNS_MAX = 128 };              /* of more layers, neighbours share a column */

/* Rows are classes that the model has; the first column is of tensors outside the layers, where one was requantized. */
typedef struct {
    double      values[CLASS_COUNT][COLUMNS_MAX + 1];    /* -1: none; 0: copied */
    bool        is_present[CLASS_COUNT];
    bool        has_global;
    uint32_t    layers_per_column, layer_columns;
    uint64_t    requantized_count;
} class_table;

static void fill_table(class_table *table, const spk_pack *pack) {
    const spk_model_config *config = spk_pack_config(pack);
    const spk_tensor *tensors = spk_pack_tensors(pack);
    table->layers_per_column = (config->layer_count + COLUMNS_MAX - 1) / COLUMNS_MAX;
    table->layer_columns = (config->layer_count + table->layers_per_column - 1) / table->layers_per_column;
    for (int k = 0; k < CLASS_COUNT; k++)
        for (int c = 0; c <= COLUMNS_MAX; c++) table->values[k][c] = -1;
    for (uint64_t i = 0; i < spk_pack_tensor_count(pack); i++) {
        uint32_t layer;
        tensor_class k = class_of(spk_model_role(config, tensors[i].name, &layer));
        bool is_requantized = spk_tensor_is_requantized(&tensors[i]), is_global = k >= CLASS_HEAD;
        if (k == CLASS_COUNT || (is_global && !is_requantized)) continue;
        double *value = &table->values[k][is_global ? 0 : 1 + layer / table->layers_per_column];
        double error = is_requantized ? tensors[i].relative_rmse : 0;
        if (error > *value) *value = error;
        table->is_present[k] = true;
        table->has_global |= is_global;
        table->requantized_count += is_requantized;
    }
}

static void draw_table(spk_html *page, const class_table *table) {
    static const spk_chart_text text = {
        .title = "Error of requantized weights, by layer and class",
        .about = "Relative RMSE in percent against the source's weights, which are themselves quantized where the source is; "
                 "the largest of the tensors that share a cell. Columns are layers; the column 'all', where there is "
                 "one, is of tensors outside them." };
    uint32_t columns = table->layer_columns + table->has_global, rows = 0;
    double *values = malloc(sizeof *values * CLASS_COUNT * columns);
    char (*names)[SPK_CHART_HEAT_NAME_SIZE] = malloc(sizeof *names * columns);
    const char *row_names[CLASS_COUNT];
    if (values != NULL && names != NULL) {
        uint32_t first = 1 - table->has_global, per_column = table->layers_per_column;
        for (uint32_t c = 0; c < columns; c++) {
            uint32_t layer = (c + first - 1) * per_column;
            if (c + first == 0) (void)snprintf(names[c], sizeof names[c], "all");
            else if (per_column == 1) (void)snprintf(names[c], sizeof names[c], "layer %" PRIu32, layer);
            else (void)snprintf(names[c], sizeof names[c], "%" PRIu32 " layers from %" PRIu32, per_column, layer);
        }
        for (int k = 0; k < CLASS_COUNT; k++) {
            if (!table->is_present[k]) continue;
            for (uint32_t c = 0; c < columns; c++) values[rows * columns + c] = table->values[k][c + first];
            row_names[rows++] = CLASS_NAMES[k];
        }
        spk_chart_heat_map map = { .row_count = rows, .column_count = columns, .values = values, .row_names = row_names,
                                   .column_names = names, .hollow_name = "as in the source" };
        spk_chart_heat(page, &text, &map);
    } else {
        page->is_out_of_memory = true;
    }
    free(values);
    free(names);
}

void spk_pack_page_errors(spk_html *page, const spk_pack *pack) {
    class_table *table = calloc(1, sizeof *table);
    if (table == NULL) {
        page->is_out_of_memory = true;
        return;
    }
    fill_table(table, pack);
    bool has_error = false;                              /* an exact requant has none, and then there is no scale */
    for (int k = 0; k < CLASS_COUNT; k++)
        for (int c = 0; c <= COLUMNS_MAX; c++) has_error |= table->values[k][c] > 0;
    if (table->requantized_count == 0)
        spk_html_paragraph(page, "Nothing was requantized: every weight is as in the source.");
    else if (!has_error)
        spk_html_paragraph(page, "Every requantized weight is exactly that of the source.");
    else
        draw_table(page, table);
    free(table);
}

/* ---- Provenance ---- */

static void add_digest(spk_html *page, const char *name, spk_digest digest) {
    char text[33];
    spk_digest_text(&digest, text);
    spk_html_row(page, name, text);
}

void spk_pack_page_provenance(spk_html *page, const spk_pack *pack) {
    const spk_provenance *p = spk_pack_provenance(pack);
    char text[64];
    spk_html_addf(page, "<table class=\"pair\">\n");
    spk_html_row(page, "pack", spk_pack_path(pack));
    (void)snprintf(text, sizeof text, "%" PRIu64 " bytes", spk_pack_file_bytes(pack));
    spk_html_row(page, "size", text);
    add_digest(page, "pack root, XXH3-128", spk_pack_root(pack));
    spk_html_row(page, "source", p->source_name);
    (void)snprintf(text, sizeof text, "%" PRIu64 " bytes, GGUF %" PRIu32, p->source_bytes, p->source_version);
    spk_html_row(page, "source size", text);
    add_digest(page, "source, XXH3-128", p->source_digest);
    spk_html_row(page, "recipe", p->recipe_name);
    if (*p->imatrix_name != '\0') spk_html_row(page, "importance matrix", p->imatrix_name);
    spk_html_row(page, "made by", p->tool_version);
    spk_html_addf(page, "</table>\n");
}
