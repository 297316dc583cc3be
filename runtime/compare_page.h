/* runtime/compare_page.h - spk-compare's report for people: what compare.h knows, as an HTML page. */
#ifndef SPK_COMPARE_PAGE_H
#define SPK_COMPARE_PAGE_H

#include <stdint.h>
#include <cjson/cJSON.h>
#include "formats/html.h"
#include "runtime/compare.h"
#include "runtime/runtime.h"

/* Everything is borrowed. */
typedef struct {
    const char *const         *paths;        /* [model_count]: base, then candidates */
    spk_model *const          *models;
    uint32_t                   model_count;
    const spk_compare         *compare;
    const spk_compare_summary *summaries;    /* [model_count - 1] */
    const uint32_t            *tokens;       /* position i was scored with tokens[i + 1] as the true next one */
    uint64_t                   window_positions;
    const char                *text_path;
    const spk_tokenizer       *tokenizer;    /* NULL: tokens are shown as ids */
    const cJSON               *report;       /* the figures, as --json has them */
} spk_compare_page;

/* From spk_html_begin to before spk_html_commit. */
void spk_compare_page_write(spk_html *page, const spk_compare_page *source);

#endif
