/* requant/plan_report.h - what a conversion's plan comes to, for people: sizes, rules and their tensors, the report page. */
#ifndef SPK_PLAN_REPORT_H
#define SPK_PLAN_REPORT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <cjson/cJSON.h>
#include "formats/html.h"
#include "formats/spk.h"
#include "requant/convert.h"

/* A tensor as it is in the source, in the place that it has in the pack. */
spk_tensor spk_plan_in_source(const spk_tensor *tensor);

/* Sums over all tensors, in the source's types and in the plan's. */
typedef struct { uint64_t source_bytes, bytes; } spk_size_change;
spk_size_change spk_plan_weight_bytes(const spk_convert_plan *plan);
spk_size_change spk_plan_token_bytes(const spk_convert_plan *plan);
uint64_t        spk_plan_data_bytes(const spk_convert_plan *plan);       /* of the pack's data sections */

/* Requantized tensors under the rule that chose them, rules in the order of their first tensor; has_errors: with what
 * spk_convert_run found.  Then what is copied, and the sums. */
void spk_plan_print(const spk_convert_plan *plan, bool has_errors, FILE *out);
/* SPK_E_IO unless the pack has the tensors that spk_convert_run has made of the plan: another may have taken its name. */
SPK_MUST_CHECK spk_status spk_plan_check_pack(const spk_convert_plan *plan, const spk_pack *pack, spk_error *err);

/* Everything is borrowed. */
typedef struct {
    const char             *in_path, *out_path, *fingerprint;
    const spk_recipe       *recipe;
    const spk_convert_plan *plan;
    const spk_pack         *pack;            /* that was made */
    uint64_t                source_bytes, pack_bytes;
    const cJSON            *figures;         /* as --json has them */
} spk_plan_page;
/* From spk_html_begin to before spk_html_commit. */
void spk_plan_page_write(spk_html *page, const spk_plan_page *source);

#endif
