/* requant/budget.h - choosing what to requantize, so that an accuracy or size budget holds.
 *
 * Tensors are taken by class (what they do) and by groups of layers; each such item may keep its types or take a smaller
 * one.  Every choice is measured alone, a knapsack over these figures proposes sets, and sets are measured as a whole;
 * then all choices are measured again beside the best of these, and it is improved until little of the budget is left.  What comes out is a recipe.
 *
 * Measuring takes a runtime, which requant/ does not know: the caller brings one (spk_budget_meter).  The result depends on
 * the files, the options and the meter's figures, and on nothing else.
 */
#ifndef SPK_BUDGET_H
#define SPK_BUDGET_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <cjson/cJSON.h>
#include "requant/convert.h"

/* KL of a set of requantized tensors against the source, in nats, by position of a text. */
typedef struct {
    double mean, se;             /* se: one standard error of the mean */
    double upper;                /* what spk-compare --max-kl looks at */
} spk_budget_cost;

typedef struct {
    void    *context;
    uint64_t position_count, sample_count;   /* positions of the whole text, and of a sample of it */
    /* From the next measurement on, tensor `index` of the source is `block`, in which it lies as `tensor` says, with
     * offset 0.  Takes `block` over, which free() frees; NULL: as in the source. */
    void   (*set)(void *context, uint64_t index, const spk_tensor *tensor, uint8_t *block);
    /* Of what was set, over the whole text or over the sample. */
    spk_status (*measure)(void *context, bool is_whole, spk_budget_cost *out, spk_error *err);
} spk_budget_meter;

enum {
    SPK_BUDGET_POSITIONS_MIN    = 256,       /* of a text that is worth measuring on */
    SPK_BUDGET_SAMPLE_POSITIONS = 4096,      /* choices are measured alone on about so many */
    SPK_BUDGET_SETS_EXPECTED    = 14         /* that are measured as a whole: a guess, to say how long it takes */
};
#define SPK_BUDGET_UNLIMITED UINT64_MAX

typedef struct {
    const spk_convert_options *convert;      /* borrowed; its recipe is not looked at */
    const char *const *sets;                 /* [set_count] --set rules: what they match is no longer up for choice */
    size_t             set_count;
    const spk_budget_meter *meter;
    const char        *text_name;            /* of the text, for the recipe's `about` */
    double             max_kl;               /* mean KL over the whole text; negative: no limit */
    uint64_t           max_token_bytes;      /* of weights that a decode step reads; or SPK_BUDGET_UNLIMITED */
    uint64_t           max_pack_bytes;       /* of the pack; or SPK_BUDGET_UNLIMITED */
    /* May be NULL; before each measurement.  what: "choice" of `count`, or "set", whose number is not known (count 0). */
    void             (*progress)(void *context, const char *what, uint64_t index, uint64_t count);
    void              *progress_context;
} spk_budget_options;

typedef struct spk_budget spk_budget;

/* At least one limit is given.  What the options point to must live as long as *out.  With max_kl: the fewest bytes a token; without: the least KL.
 * SPK_E_MISMATCH, with the nearest figure that can be reached, where no set holds every limit. */
SPK_MUST_CHECK spk_status spk_budget_choose(const spk_budget_options *options, spk_budget **out, spk_error *err);
void spk_budget_free(spk_budget *budget);                /* NULL is fine */

/* The choice, --set rules included; the same text read from a file is the same recipe.  The caller frees it. */
SPK_MUST_CHECK spk_status spk_budget_recipe(const spk_budget *budget, spk_recipe **out, spk_error *err);
/* The table of choices, and what the chosen set costs. */
void   spk_budget_print(const spk_budget *budget, FILE *out);
cJSON *spk_budget_json(const spk_budget *budget);        /* NULL when out of memory */

#endif
