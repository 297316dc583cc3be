/* requant/recipe.h - which tensor gets which type, as a small text file.
 *
 * Grammar, one statement a line; '#' starts a comment, blank lines are skipped, words are separated by spaces:
 *
 *   recipe NAME                          first statement
 *   about TEXT                           one line for humans
 *   model FINGERPRINT                    a model this recipe is meant for (spk_model_fingerprint); any number
 *   default                              it is the default for those models
 *   rule REGEX FROM -> TO [optional]     tensors whose whole name matches REGEX (PCRE2) and whose type is in FROM
 *                                        (types with commas, or *) become TO; the first rule that matches a name wins
 *
 * '#' inside a word is part of the word; a UTF-8 byte order mark before the text is skipped.  Where the winning rule's
 * FROM does not have the tensor's type, the tensor is copied.  A rule that finds no tensor of a type in FROM is an
 * error unless it is optional: SPK_E_MISMATCH, or SPK_E_MISSING where it comes from --set, since that is a mistake in
 * the regex and not a file of other types.  A tensor that already has type TO is copied and counts; so does one that an
 * earlier rule won, or else a --set would break the rules that it overrides.  A rule that would requantize a protected
 * tensor (router, norms, conv, ssm_a, dt, alpha, beta) is an error that names it.  There is no fallback to another
 * type, ever.  Tensors that decode does not read (MTP blocks, unknown names) are carried as they are: rules do not see
 * them.
 *
 * Recipes in packs/<model>/<name>.recipe are built into the tools.
 */
#ifndef SPK_RECIPE_H
#define SPK_RECIPE_H

#include <stddef.h>
#include <stdint.h>
#include "formats/model.h"
#include "formats/status.h"

typedef struct spk_recipe spk_recipe;

enum {
    SPK_RECIPE_BYTES_MAX      = 1 << 20,
    SPK_RECIPE_NAME_BYTES_MAX = 63,
    SPK_RECIPE_RULE_COUNT_MAX = 1024,
    SPK_RECIPE_MODEL_COUNT_MAX = 64
};

/* SPK_E_USAGE names `where` and the line. */
SPK_MUST_CHECK spk_status spk_recipe_parse(const char *text, const char *where, spk_recipe **out, spk_error *err);
/* NAME of a built-in recipe, else the path of a file.  A name that several models' folders define is taken from the
 * folder whose recipe lists the fingerprint, else from the first in order of path. */
SPK_MUST_CHECK spk_status spk_recipe_load(const char *name_or_path, const char *fingerprint, spk_recipe **out,
                                          spk_error *err);
/* The default recipe of a fingerprint; where no recipe names it, `native`, and *is_named gets false. */
SPK_MUST_CHECK spk_status spk_recipe_default(const char *fingerprint, spk_recipe **out, bool *is_named, spk_error *err);
/* Put --set REGEX=TYPE before all rules, earlier --set rules included: "rule REGEX * -> TYPE". */
SPK_MUST_CHECK spk_status spk_recipe_set(spk_recipe *recipe, const char *assignment, spk_error *err);
void spk_recipe_free(spk_recipe *recipe);                /* NULL is fine */

bool spk_recipe_lists_model(const spk_recipe *recipe, const char *fingerprint);   /* in a `model` line */
const char *spk_recipe_name(const spk_recipe *recipe);
const char *spk_recipe_about(const spk_recipe *recipe);  /* "" if it says nothing */
const char *spk_recipe_text(const spk_recipe *recipe);   /* complete, --set lines included */

/* What the recipe does to one tensor. */
typedef struct {
    uint32_t    type;        /* target */
    const char *rule;        /* the rule's text, owned by the recipe; NULL: copied, no rule matched */
} spk_recipe_choice;

/* Apply to a model: choices[tensor_count].  Fails as the grammar above says; messages name rule and tensor, and the
 * caller adds the model's file. */
SPK_MUST_CHECK spk_status spk_recipe_apply(const spk_recipe *recipe, const spk_model_config *config,
                                           const spk_tensor *tensors, uint64_t tensor_count,
                                           spk_recipe_choice *choices, spk_error *err);

#endif
