/* requant/budget_solve.c - the multiple-choice knapsack of a budget, by dynamic programming over a rounded capacity. */
#include "requant/budget_internal.h"

#include <math.h>
#include <stdlib.h>

enum { STEPS = 1 << 15 };

/* Rounded up, so that a set that fits in steps fits; STEPS + 1 where it fits under no circumstances. */
static uint32_t steps_of(double weight, double capacity) {
    if (!(weight > 0)) return 0;
    if (!(weight <= capacity)) return STEPS + 1;
    double steps = ceil(weight / capacity * STEPS);
    return steps > STEPS ? STEPS : (uint32_t)steps;
}

/* best[c]: the largest value of the items so far within c steps, -inf where none fits. */
static void add_item(const spk_knapsack_item *item, double capacity, double *best, double *next, uint8_t *taken) {
    uint32_t steps[SPK_BUDGET_OPTION_MAX];
    for (uint32_t o = 0; o < item->option_count; o++) steps[o] = steps_of(item->options[o].weight, capacity);
    for (uint32_t c = 0; c <= STEPS; c++) {
        next[c] = -INFINITY;
        taken[c] = 0;
        for (uint32_t o = 0; o < item->option_count; o++) {
            if (steps[o] > c) continue;
            double value = best[c - steps[o]] + item->options[o].value;
            if (value > next[c]) {
                next[c] = value;
                taken[c] = (uint8_t)o;
            }
        }
    }
    for (uint32_t c = 0; c <= STEPS; c++) best[c] = next[c];
}

spk_status spk_knapsack(const spk_knapsack_item *items, uint32_t item_count, double capacity, uint32_t *choice,
                        spk_error *err) {
    double *best = calloc(STEPS + 1, sizeof *best), *next = calloc(STEPS + 1, sizeof *next);
    uint8_t *taken = calloc((size_t)item_count + 1, STEPS + 1);
    spk_status status = SPK_OK;
    if (best == NULL || next == NULL || taken == NULL) {
        status = spk_fail(err, SPK_E_MEMORY, "out of memory for a choice of %u items", item_count);
    } else {
        for (uint32_t i = 0; i < item_count; i++)
            add_item(&items[i], capacity, best, next, taken + (size_t)i * (STEPS + 1));
        if (isinf(best[STEPS])) status = spk_fail(err, SPK_E_LIMIT, "no choice fits");
        uint32_t c = STEPS;
        for (uint32_t i = item_count; i-- > 0 && status == SPK_OK;) {
            choice[i] = taken[(size_t)i * (STEPS + 1) + c];
            c -= steps_of(items[i].options[choice[i]].weight, capacity);
        }
    }
    free(best);
    free(next);
    free(taken);
    return status;
}
