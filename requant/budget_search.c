/* requant/budget_search.c - the search of a budget: measure choices alone, propose sets, measure those.
 *
 * KL of parts adds up only roughly: where a router is near a tie, the first small error changes the experts of a token, and
 * the next ones cost little more.  So there are two passes.  The first measures every choice against the source as it is;
 * the second against the best set that this led to, which is what choices near that set cost.  In each pass a knapsack
 * proposes sets for a predicted KL, which is moved, between the largest that held the limit and the smallest that did not,
 * by what the sets measure.  Then single and paired changes of the best set use up what is left.
 */
#include "requant/budget_internal.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROUND_MAX      = 12,         /* predictions that a pass tries */
    SET_MAX        = 5,          /* sets that it measures for them */
    CHANGE_MAX     = 5,          /* and changes of the best one */
    FACTOR_MAX     = 48,         /* doublings and halvings of the price of a byte of the pack */
    OVERSHOOT_MAX  = 8
};
#define SLACK 0.01               /* a set this near to the limit is good enough */

static spk_status out_of_memory(spk_error *err) { return spk_fail(err, SPK_E_MEMORY, "out of memory for a budget"); }

/* ---- Measuring ---- */

/* Brings the meter to s->wanted.  SPK_E_LIMIT where a tensor has a weight that spk does not write as its new type. */
static spk_status set_wanted(spk_budget_search *s, spk_error *err) {
    const spk_convert_plan *plan = &s->budget->plan;
    const spk_budget_meter *meter = s->options->meter;
    for (uint64_t i = 0; i < plan->tensor_count; i++) {
        if (s->types[i] == s->wanted[i]) continue;
        spk_tensor tensor;
        uint8_t *block = NULL;
        if (s->wanted[i] != plan->tensors[i].source_type)
            SPK_TRY(spk_budget_requantize(s->options->convert, plan, i, s->wanted[i], s->pool, &tensor, &block, err));
        meter->set(meter->context, i, &tensor, block);
        s->types[i] = s->wanted[i];
    }
    return SPK_OK;
}

static void progress(const spk_budget_search *s, const char *what, uint64_t index, uint64_t count) {
    if (s->options->progress != NULL) s->options->progress(s->options->progress_context, what, index, count);
}

/* *is_beyond, unless it is NULL: a weight is beyond what its new type takes, and nothing is measured; else that is an error. */
static spk_status measure_choice(spk_budget_search *s, const uint32_t *choice, bool is_whole, spk_budget_cost *out, bool *is_beyond,
                                 spk_error *err) {
    const spk_convert_plan *plan = &s->budget->plan;
    spk_budget_types(s->budget, choice, s->wanted);
    bool is_native = true;
    for (uint64_t t = 0; t < plan->tensor_count; t++) is_native = is_native && s->wanted[t] == plan->tensors[t].source_type;
    *out = (spk_budget_cost){ 0, 0, 0 };                 /* what is as it was costs nothing */
    if (is_native) return SPK_OK;
    spk_status status = set_wanted(s, err);
    if (is_beyond != NULL && status == SPK_E_LIMIT) {
        *is_beyond = true;
        return SPK_OK;
    }
    SPK_TRY(status);
    return s->options->meter->measure(s->options->meter->context, is_whole, out, err);
}

static void drop_option(spk_budget_item *item, uint32_t index) {
    item->option_count--;
    memmove(&item->options[index], &item->options[index + 1], (item->option_count - index) * sizeof *item->options);
}

/* What each option of each item costs beside the others of `center`, into kl and base_kl; s->proposal is overwritten.  The first
 * time an option that cannot be made of a weight is dropped, since nobody asked for it. */
spk_status spk_budget_measure_around(spk_budget_search *s, const uint32_t *center, bool is_first, spk_error *err) {
    spk_budget *b = s->budget;
    spk_budget_cost at_center, cost;
    uint64_t count = 0;
    for (uint32_t i = 0; i < b->item_count; i++) count += b->items[i].option_count - 1;
    memcpy(s->proposal, center, spk_budget_choice_bytes(s));
    SPK_TRY(measure_choice(s, center, false, &at_center, NULL, err));
    s->base_kl = at_center.mean;
    for (uint32_t i = 0; i < b->item_count; i++) {
        spk_budget_item *item = &b->items[i];
        double least = 0;
        s->kl[i][center[i]] = 0;
        for (uint32_t o = 0; o < item->option_count; o++) {
            if (o == center[i]) continue;
            progress(s, "choice", s->choice_index++, 2 * count);
            s->proposal[i] = o;
            bool is_beyond = false;
            SPK_TRY(measure_choice(s, s->proposal, false, &cost, is_first ? &is_beyond : NULL, err));
            if (is_beyond) {
                drop_option(item, o--);
                s->choice_index--;
                count--;
                continue;
            }
            s->kl[i][o] = cost.mean - at_center.mean;
            if (is_first) item->options[o].cost = (spk_budget_cost){ s->kl[i][o], cost.se, cost.upper };
            if (s->kl[i][o] < least) least = s->kl[i][o];
        }
        s->proposal[i] = center[i];
        for (uint32_t o = 0; o < item->option_count; o++) s->kl[i][o] -= least;
        s->base_kl += least;
    }
    return SPK_OK;
}

static double predicted_kl(const spk_budget_search *s, const uint32_t *choice) {
    double sum = s->base_kl;
    for (uint32_t i = 0; i < s->budget->item_count; i++) sum += s->kl[i][choice[i]];
    return sum;
}

/* ---- Sets ---- */

/* Limits but that on what a token reads where there is one on KL: then that is what is made small. */
bool spk_budget_holds(const spk_budget_search *s, const spk_budget_set *set) {
    if (set->size.pack_bytes > s->options->max_pack_bytes) return false;
    return spk_budget_has_max_kl(s) ? set->cost.mean <= s->options->max_kl : set->size.token_bytes <= s->options->max_token_bytes;
}

static bool is_better(const spk_budget_search *s, const spk_budget_set *a, const spk_budget_set *b) {
    bool is_smaller = a->size.token_bytes < b->size.token_bytes, is_nearer = a->cost.mean < b->cost.mean;
    if (spk_budget_has_max_kl(s)) return is_smaller || (a->size.token_bytes == b->size.token_bytes && is_nearer);
    return is_nearer || (!(b->cost.mean < a->cost.mean) && is_smaller);
}

static spk_budget_set *find_set(const spk_budget_search *s, const uint32_t *choice) {
    for (uint32_t i = 0; i < s->set_count; i++)
        if (memcmp(s->sets[i].choice, choice, s->budget->item_count * sizeof *choice) == 0) return &s->sets[i];
    return NULL;
}

/* The set of a choice, measured unless it was before. */
spk_status spk_budget_measure_set(spk_budget_search *s, const uint32_t *choice, const spk_budget_set **out, spk_error *err) {
    if ((*out = find_set(s, choice)) != NULL) return SPK_OK;
    spk_budget_set set = { .choice = malloc(spk_budget_choice_bytes(s)) };
    spk_budget_set *larger = realloc(s->sets, (s->set_count + 1) * sizeof *larger);
    if (larger != NULL) s->sets = larger;
    spk_status status = larger == NULL || set.choice == NULL ? out_of_memory(err) : SPK_OK;
    if (status == SPK_OK) status = spk_budget_size_of(s->budget, choice, &set.size, err);
    if (status == SPK_OK) {
        memcpy(set.choice, choice, spk_budget_choice_bytes(s));
        progress(s, "set", s->set_count, 0);
        status = measure_choice(s, choice, true, &set.cost, NULL, err);
        if (set.cost.mean > 0) s->budget->set_count++;
    }
    if (status != SPK_OK) {
        free(set.choice);
        return status;
    }
    s->sets[s->set_count] = set;
    *out = &s->sets[s->set_count];
    if (spk_budget_holds(s, *out) && (s->best == UINT32_MAX || is_better(s, *out, &s->sets[s->best]))) s->best = s->set_count;
    s->set_count++;
    return SPK_OK;
}

/* ---- Proposals ---- */

/* What is made large, what is limited, and by how much: with max_kl bytes that a token does not read within a KL, without
 * it as little KL as possible within bytes.  `price` is what a byte of the pack is worth besides. */
static spk_status solve(spk_budget_search *s, double kl_capacity, double price, uint64_t overshoot_bytes, spk_error *err) {
    const spk_budget *b = s->budget;
    const spk_budget_options *o = s->options;
    bool is_by_token = o->max_token_bytes != SPK_BUDGET_UNLIMITED;
    double capacity = kl_capacity;
    if (!spk_budget_has_max_kl(s) && is_by_token) capacity = (double)(o->max_token_bytes - s->smallest_size.token_bytes);
    else if (!spk_budget_has_max_kl(s)) capacity = (double)(o->max_pack_bytes - s->smallest_size.pack_bytes) - (double)overshoot_bytes;
    for (uint32_t i = 0; i < b->item_count; i++) {
        const spk_budget_item *item = &b->items[i];
        const spk_budget_option *least = &item->options[s->smallest[i]];
        s->knapsack[i].option_count = item->option_count;
        for (uint32_t k = 0; k < item->option_count; k++) {
            const spk_budget_option *option = &item->options[k];
            spk_knapsack_option *out = &s->knapsack[i].options[k];
            double token_bytes = (double)(option->token_bytes - least->token_bytes), bytes = (double)(option->bytes - least->bytes);
            if (spk_budget_has_max_kl(s)) *out = (spk_knapsack_option){ s->kl[i][k], -token_bytes - price * bytes };
            else *out = (spk_knapsack_option){ is_by_token ? token_bytes : bytes, -s->kl[i][k] - price * bytes };
        }
    }
    return spk_knapsack(s->knapsack, b->item_count, capacity < 0 ? 0 : capacity, s->proposal, err);
}

static spk_status pack_overshoot(const spk_budget_search *s, uint64_t *out, spk_error *err) {
    spk_budget_size size;
    SPK_TRY(spk_budget_size_of(s->budget, s->proposal, &size, err));
    *out = size.pack_bytes > s->options->max_pack_bytes ? size.pack_bytes - s->options->max_pack_bytes : 0;
    return SPK_OK;
}

/* The pack's size limits, but another sum is the knapsack's: the lowest price of a byte at which the size fits. */
static spk_status solve_with_price(spk_budget_search *s, double kl_capacity, spk_error *err) {
    double unit = 0x1p-10, low = 0, high;
    uint64_t over = 1;
    if (!spk_budget_has_max_kl(s)) unit = fmax(predicted_kl(s, s->smallest) - s->base_kl, 1e-12) / (double)s->smallest_size.pack_bytes * 0x1p-10;
    high = unit;
    for (int k = 0; over > 0; k++, low = high, high *= 2) {
        if (k == FACTOR_MAX) return spk_fail(err, SPK_E_LIMIT, "no choice fits");
        SPK_TRY(solve(s, kl_capacity, high, 0, err));
        SPK_TRY(pack_overshoot(s, &over, err));
        if (over == 0) break;
    }
    for (int k = 0; k < FACTOR_MAX / 4; k++) {
        double middle = (low + high) / 2;
        SPK_TRY(solve(s, kl_capacity, middle, 0, err));
        SPK_TRY(pack_overshoot(s, &over, err));
        if (over == 0) high = middle;
        else low = middle;
    }
    return solve(s, kl_capacity, high, 0, err);
}

/* s->proposal: the best set by prediction.  SPK_E_LIMIT where the size of the pack cannot be held within the KL. */
static spk_status propose(spk_budget_search *s, double kl_capacity, spk_error *err) {
    uint64_t over, sum = 0;
    SPK_TRY(solve(s, kl_capacity, 0, 0, err));
    SPK_TRY(pack_overshoot(s, &over, err));
    if (over == 0) return SPK_OK;
    if (spk_budget_has_max_kl(s) || s->options->max_token_bytes != SPK_BUDGET_UNLIMITED) return solve_with_price(s, kl_capacity, err);
    for (int k = 0; k < OVERSHOOT_MAX && over > 0; k++) {        /* padding is not in the options' bytes */
        sum += over;
        SPK_TRY(solve(s, kl_capacity, 0, sum, err));
        SPK_TRY(pack_overshoot(s, &over, err));
    }
    if (over > 0) memcpy(s->proposal, s->smallest, spk_budget_choice_bytes(s));
    return SPK_OK;
}

/* ---- A limit on KL ---- */

/* Sets for a target, a prediction that is moved to where the limit is just held: the set that is measured is off by a
 * factor in the first pass, whose sums are far from what sets cost, and by a difference in the second. */
spk_status spk_budget_fit_kl(spk_budget_search *s, double target, bool is_first, spk_error *err) {
    const double limit = s->options->max_kl;
    double low = -INFINITY, high = INFINITY;
    const uint32_t count_before = s->set_count;
    for (int round = 0; round < ROUND_MAX && s->set_count - count_before < SET_MAX; round++) {
        const spk_budget_set *set;
        spk_status status = propose(s, target - s->base_kl, err);
        if (status == SPK_E_LIMIT) return SPK_OK;        /* the caller finds that no set holds */
        if (status != SPK_OK) return status;
        SPK_TRY(spk_budget_measure_set(s, s->proposal, &set, err));
        bool is_held = set->cost.mean <= limit;
        double predicted = predicted_kl(s, set->choice);
        if (is_held && (set->cost.mean >= limit * (1 - SLACK) ||
                        memcmp(s->proposal, s->smallest, s->budget->item_count * sizeof *s->proposal) == 0))
            break;
        if (is_held) low = target;
        else high = target;
        if (is_first && predicted > 0 && set->cost.mean > 0) s->factor = set->cost.mean / predicted;
        target = predicted + (limit - set->cost.mean) / s->factor;
        if (target > low && target < high) continue;
        if (isinf(high)) target = low + (limit - set->cost.mean) / s->factor;
        else if (isinf(low)) target = high - (set->cost.mean - limit) / s->factor;
        else target = (low + high) / 2;
    }
    return SPK_OK;
}

/* ---- Limits on bytes alone ---- */

/* The set of least KL by prediction; the smallest one where limits of both kinds leave no other. */
spk_status spk_budget_fit_bytes(spk_budget_search *s, const spk_budget_set **out, spk_error *err) {
    spk_status status = propose(s, 0, err);
    if (status == SPK_E_LIMIT) memcpy(s->proposal, s->smallest, spk_budget_choice_bytes(s));
    else if (status != SPK_OK) return status;
    return spk_budget_measure_set(s, s->proposal, out, err);
}

/* ---- What is left of a limit on KL ---- */

/* Changes of one or two items of the best set: the one that saves most of those that should hold the limits. */
typedef struct {
    spk_budget_search *s;
    double    slack;
    uint32_t *changed;           /* [item_count] the set under consideration */
    uint64_t  saved_bytes;       /* by s->proposal; 0: there is none yet */
} change_hunt;

/* Item i takes option o, and item j option p; where they are the same item, o. */
static spk_status consider(change_hunt *hunt, uint32_t i, uint32_t o, uint32_t j, uint32_t p, spk_error *err) {
    spk_budget_search *s = hunt->s;
    const uint32_t *best = s->sets[s->best].choice;
    const spk_budget_item *a = &s->budget->items[i], *b = &s->budget->items[j];
    double kl = s->kl[i][o] - s->kl[i][best[i]];
    uint64_t before = a->options[best[i]].token_bytes, after = a->options[o].token_bytes;
    if (j != i) {
        kl += s->kl[j][p] - s->kl[j][best[j]];
        before += b->options[best[j]].token_bytes;
        after += b->options[p].token_bytes;
    }
    if (after >= before || before - after <= hunt->saved_bytes || s->factor * kl > hunt->slack) return SPK_OK;
    memcpy(hunt->changed, best, spk_budget_choice_bytes(s));
    hunt->changed[j] = p;
    hunt->changed[i] = o;
    spk_budget_size size;
    if (find_set(s, hunt->changed) != NULL) return SPK_OK;
    SPK_TRY(spk_budget_size_of(s->budget, hunt->changed, &size, err));
    if (size.pack_bytes > s->options->max_pack_bytes) return SPK_OK;
    hunt->saved_bytes = before - after;
    memcpy(s->proposal, hunt->changed, spk_budget_choice_bytes(s));
    return SPK_OK;
}

/* s->proposal is the change; *is_found: there is one. */
static spk_status propose_change(spk_budget_search *s, bool *is_found, spk_error *err) {
    const spk_budget *b = s->budget;
    const spk_budget_set *best = &s->sets[s->best];
    change_hunt hunt = { .s = s, .slack = s->options->max_kl - best->cost.mean,
                         .changed = malloc(spk_budget_choice_bytes(s)) };
    spk_status status = hunt.changed == NULL ? out_of_memory(err) : SPK_OK;
    for (uint32_t i = 0; i < b->item_count; i++)
        for (uint32_t o = 0; o < b->items[i].option_count; o++)
            for (uint32_t j = i; j < b->item_count; j++)
                for (uint32_t p = 0; p < (j == i ? 1 : b->items[j].option_count) && status == SPK_OK; p++)
                    status = consider(&hunt, i, o, j, p, err);
    free(hunt.changed);
    *is_found = hunt.saved_bytes > 0;
    return status;
}

static spk_status use_up_slack(spk_budget_search *s, spk_error *err) {
    for (int k = 0; k < CHANGE_MAX && s->best != UINT32_MAX; k++) {
        const spk_budget_set *set;
        bool is_found = false;
        SPK_TRY(propose_change(s, &is_found, err));
        if (!is_found) break;
        SPK_TRY(spk_budget_measure_set(s, s->proposal, &set, err));
    }
    return SPK_OK;
}

/* ---- The second pass ---- */

/* Around the best set, whose own figures say what the sample is worth. */
spk_status spk_budget_second_pass(spk_budget_search *s, spk_error *err) {
    spk_budget_set center = s->sets[s->best];              /* its choice stays where it is */
    bool is_smallest = memcmp(center.choice, s->smallest, s->budget->item_count * sizeof *center.choice) == 0;
    if (!(center.cost.mean > 0) || (spk_budget_has_max_kl(s) && is_smallest)) return SPK_OK;      /* there is no better one */
    SPK_TRY(spk_budget_measure_around(s, center.choice, false, err));
    double at_center = predicted_kl(s, center.choice);
    s->factor = at_center > 0 ? center.cost.mean / at_center : 1;
    const spk_budget_set *set;
    if (!spk_budget_has_max_kl(s)) return spk_budget_fit_bytes(s, &set, err);
    SPK_TRY(spk_budget_fit_kl(s, at_center + (s->options->max_kl - center.cost.mean) / s->factor, false, err));
    return use_up_slack(s, err);
}
