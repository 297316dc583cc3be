/* requant/recipes_builtin.h - packs/<model>/<name>.recipe, built into the tools by the Makefile. */
#ifndef SPK_RECIPES_BUILTIN_H
#define SPK_RECIPES_BUILTIN_H

typedef struct {
    const char *path; /* "packs/tiny-qwen36/ffn.recipe" */
    const char *text;
} spk_builtin_recipe;

extern const spk_builtin_recipe spk_builtin_recipes[]; /* sorted by path, ends with { NULL, NULL } */

#endif
