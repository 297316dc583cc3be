/* requant/budget_internal.h - what the parts of a budget's choice share; private to requant/budget*.c. */
#ifndef SPK_BUDGET_INTERNAL_H
#define SPK_BUDGET_INTERNAL_H

#include "formats/pool.h"
#include "requant/budget.h"

enum {
    SPK_BUDGET_GROUP_MAX  = 4,       /* groups that the layers of a class are cut into */
    SPK_BUDGET_OPTION_MAX = 5        /* as it is, and four target types */
};

/* One choice of an item; option 0 leaves it as it is. */
typedef struct {
    uint32_t        type;            /* the target of those tensors that are wider; of option 0 SPK_TYPE_LIMIT */
    spk_budget_cost cost;            /* alone, over the sample */
    uint64_t        token_bytes, bytes;  /* of the item's tensors: read by a token; all */
} spk_budget_option;

/* Tensors that are requantized together: those of a class in a group of layers. */
typedef struct {
    const char       *class_name;
    uint32_t          layer_begin, layer_last;   /* of a class without layers both 0 */
    bool              has_layers;
    uint64_t         *tensors;                   /* [tensor_count] indices, owned */
    uint64_t          tensor_count;
    uint32_t          option_count;
    spk_budget_option options[SPK_BUDGET_OPTION_MAX];   /* types from the widest to the narrowest */
} spk_budget_item;

struct spk_budget {
    spk_budget_options options;
    spk_convert_plan   plan;         /* of the source as it is, but for --set; tensors[i].source_type is the source's */
    char              *text;         /* of the recipe, without the --set rules */
    char               fingerprint[SPK_FINGERPRINT_SIZE];
    uint64_t           overhead_bytes;   /* of a pack, at most: all but its data sections */
    spk_budget_item   *items;        /* [item_count] */
    uint32_t           item_count;
    uint32_t          *choice;       /* [item_count] the option of each item that was chosen */
    spk_budget_cost    cost;         /* of the chosen set, over the whole text */
    uint32_t           set_count;    /* sets that were measured as a whole */
};

/* The items of the plan's tensors that --set left alone, with the bytes of their options. */
SPK_MUST_CHECK spk_status spk_budget_list(spk_budget *budget, spk_error *err);
/* What an option makes of one of its item's tensors, which is `source_type` in the source. */
uint32_t spk_budget_target(uint32_t option_type, const spk_tensor *tensor);

/* The types of all tensors under a choice: types[tensor_count]. */
void spk_budget_types(const spk_budget *budget, const uint32_t *choice, uint32_t *types);
/* Exact bytes of a choice: what a token reads, and at most what the pack takes. */
typedef struct { uint64_t token_bytes, pack_bytes; } spk_budget_size;
SPK_MUST_CHECK spk_status spk_budget_size_of(const spk_budget *budget, const uint32_t *choice, spk_budget_size *out,
                                             spk_error *err);
/* The recipe's text for a choice; the caller frees *out. */
SPK_MUST_CHECK spk_status spk_budget_text(const spk_budget *budget, const uint32_t *choice, const char *about, char **out,
                                          spk_error *err);

/* One tensor of a plan as a pack would hold it: *block, freed by the caller, in which it lies as *out says. */
SPK_MUST_CHECK spk_status spk_budget_requantize(const spk_convert_options *options, const spk_convert_plan *plan,
                                                uint64_t index, uint32_t type, spk_pool *pool, spk_tensor *out,
                                                uint8_t **block, spk_error *err);

/* ---- The knapsack ---- */

/* weight >= 0 of an option, and what it is worth. */
typedef struct { double weight, value; } spk_knapsack_option;
typedef struct {
    uint32_t            option_count;
    spk_knapsack_option options[SPK_BUDGET_OPTION_MAX];
} spk_knapsack_item;

/* The largest sum of values whose weights sum to at most `capacity`, one option of each item, ties to the earlier one:
 * choice[item_count].  Weights are rounded up to capacity / 2^15.  SPK_E_LIMIT where nothing fits. */
SPK_MUST_CHECK spk_status spk_knapsack(const spk_knapsack_item *items, uint32_t item_count, double capacity,
                                       uint32_t *choice, spk_error *err);

/* ---- The search ---- */

/* A set that was measured as a whole. */
typedef struct {
    uint32_t       *choice;
    spk_budget_cost cost;
    spk_budget_size size;
} spk_budget_set;

typedef struct {
    spk_budget               *budget;
    const spk_budget_options *options;
    spk_pool                 *pool;
    uint32_t                 *types;         /* [tensor_count] what the meter has */
    uint32_t                 *wanted;        /* [tensor_count] what it is to have */
    /* Predictions over the sample: base_kl + the sum over items of kl[item][option] >= 0, the least of an item being 0. */
    double                    base_kl;
    double                  (*kl)[SPK_BUDGET_OPTION_MAX];
    double                    factor;        /* KL over the whole text by prediction, near the sets measured last */
    uint64_t                  choice_index;  /* choices measured so far */
    uint32_t                 *smallest;      /* [item_count] the narrowest option of each item */
    spk_budget_size           smallest_size;
    spk_knapsack_item        *knapsack;      /* [item_count] */
    uint32_t                 *proposal;      /* [item_count] */
    spk_budget_set           *sets;
    uint32_t                  set_count;
    uint32_t                  best;          /* of sets, among those that hold the limits; UINT32_MAX: none */
} spk_budget_search;

static inline bool spk_budget_has_max_kl(const spk_budget_search *s) { return s->options->max_kl >= 0; }
static inline size_t spk_budget_choice_bytes(const spk_budget_search *s) {
    return ((size_t)s->budget->item_count + 1) * sizeof(uint32_t);
}

/* All limits but that on what a token reads where there is one on KL: then that is what is made small. */
bool spk_budget_holds(const spk_budget_search *s, const spk_budget_set *set);
/* What each option of each item costs beside the others of `center`, over the sample, into kl and base_kl; is_first: into
 * the table, too, and an option of which a weight is beyond the type is dropped from its item.  Overwrites s->proposal. */
SPK_MUST_CHECK spk_status spk_budget_measure_around(spk_budget_search *s, const uint32_t *center, bool is_first,
                                                    spk_error *err);
/* The set of a choice, over the whole text, measured unless it was before; *out is good until the next one. */
SPK_MUST_CHECK spk_status spk_budget_measure_set(spk_budget_search *s, const uint32_t *choice, const spk_budget_set **out,
                                                 spk_error *err);
/* Measures sets near the limit on KL, beginning with one that is predicted to cost `target`. */
SPK_MUST_CHECK spk_status spk_budget_fit_kl(spk_budget_search *s, double target, bool is_first, spk_error *err);
/* Measures the set of least KL by prediction; the smallest one where limits of both kinds leave no other. */
SPK_MUST_CHECK spk_status spk_budget_fit_bytes(spk_budget_search *s, const spk_budget_set **out, spk_error *err);
/* Improves the best set. */
SPK_MUST_CHECK spk_status spk_budget_second_pass(spk_budget_search *s, spk_error *err);

#endif
