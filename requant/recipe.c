/* requant/recipe.c - recipes: parsing, the built-in ones, and applying one to a model.  See recipe.h.
 *
 * A recipe is kept with its text, because the text goes into the pack's provenance: parsing that text again gives the
 * same rules.  So --set edits the text and parses it anew.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "requant/recipe.h"

#include <errno.h>
#include <inttypes.h>
#include <pcre2.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "formats/infile.h"
#include "requant/quant.h"
#include "requant/recipes_builtin.h"

#define FROM_ANY UINT64_MAX
SPK_STATIC_ASSERT(SPK_TYPE_LIMIT <= 64, "a set of types is one 64-bit mask");

typedef struct {
    char       *text;        /* "REGEX FROM -> TO [optional]", words one space apart */
    pcre2_code *regex;
    uint64_t    from_mask;   /* bit for each type id */
    uint32_t    to;
    bool        is_optional;
} recipe_rule;

struct spk_recipe {
    char        *text, *name, *about;
    size_t       name_end;   /* offset in text past the line of the name: --set rules go there */
    char       **models;
    size_t       model_count;
    bool         is_default;
    recipe_rule *rules;
    size_t       rule_count;
    size_t       set_count;  /* of rules, the first ones come from --set */
};

void spk_recipe_free(spk_recipe *recipe) {
    if (recipe == NULL) return;
    for (size_t i = 0; i < recipe->model_count; i++) free(recipe->models[i]);
    for (size_t i = 0; i < recipe->rule_count; i++) {
        free(recipe->rules[i].text);
        pcre2_code_free(recipe->rules[i].regex);
    }
    free(recipe->models);
    free(recipe->rules);
    free(recipe->about);
    free(recipe->name);
    free(recipe->text);
    free(recipe);
}

const char *spk_recipe_name(const spk_recipe *recipe) { return recipe->name; }
const char *spk_recipe_about(const spk_recipe *recipe) { return recipe->about == NULL ? "" : recipe->about; }
const char *spk_recipe_text(const spk_recipe *recipe) { return recipe->text; }

/* ---- Parsing ---- */

typedef struct {
    spk_recipe *recipe;
    const char *where;
    uint64_t    line_number;     /* from 1; 0: there are no lines */
    uint64_t    default_line;    /* of the default statement; 0 if none */
    spk_error  *err;
} parser;

/* "WHERE:LINE: message", or "WHERE: message" of what is no line of a file. */
__attribute__((format(printf, 2, 3)))
static spk_status parse_fail(const parser *p, const char *format, ...) {
    char message[400];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (p->line_number == 0) return spk_fail(p->err, SPK_E_USAGE, "%s: %s", p->where, message);
    return spk_fail(p->err, SPK_E_USAGE, "%s:%" PRIu64 ": %s", p->where, p->line_number, message);
}

static spk_status memory_fail(spk_error *err) { return spk_fail(err, SPK_E_MEMORY, "recipe: out of memory"); }

/* Cuts the next word off *rest; NULL at the end.  The word is terminated in place. */
static char *next_word(char **rest) {
    char *word = *rest + strspn(*rest, " \t\r");
    if (*word == '\0') return NULL;
    char *end = word + strcspn(word, " \t\r");
    *rest = end;
    if (*end != '\0') {
        *end = '\0';
        *rest = end + 1;
    }
    return word;
}

/* The rest of the line with words one space apart, newly allocated; NULL out of memory. */
static char *joined_words(char *rest) {
    char *joined = malloc(strlen(rest) + 1), *end = joined;
    if (joined == NULL) return NULL;
    for (char *word; (word = next_word(&rest)) != NULL;) {
        if (end != joined) *end++ = ' ';
        size_t length = strlen(word);
        memcpy(end, word, length);
        end += length;
    }
    *end = '\0';
    return joined;
}

static spk_status parse_name(parser *p, char *rest) {
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    const char *name = next_word(&rest);
    if (name == NULL || next_word(&rest) != NULL || name[strspn(name, allowed)] != '\0' ||
        strlen(name) > SPK_RECIPE_NAME_BYTES_MAX)
        return parse_fail(p, "expected 'recipe NAME', NAME of at most %d letters, digits, '.', '_' or '-'",
                          (int)SPK_RECIPE_NAME_BYTES_MAX);
    p->recipe->name = strdup(name);
    return p->recipe->name == NULL ? memory_fail(p->err) : SPK_OK;
}

static spk_status parse_model(parser *p, char *rest) {
    spk_recipe *recipe = p->recipe;
    if (recipe->model_count == SPK_RECIPE_MODEL_COUNT_MAX)
        return parse_fail(p, "more than %d model lines", (int)SPK_RECIPE_MODEL_COUNT_MAX);
    char **models = realloc(recipe->models, (recipe->model_count + 1) * sizeof *models);
    if (models == NULL) return memory_fail(p->err);
    recipe->models = models;
    char *fingerprint = joined_words(rest);
    if (fingerprint == NULL) return memory_fail(p->err);
    models[recipe->model_count++] = fingerprint;
    return *fingerprint == '\0' ? parse_fail(p, "expected 'model FINGERPRINT'") : SPK_OK;
}

/* "*", or types with commas between. */
static spk_status parse_from(const parser *p, const char *words, uint64_t *mask) {
    if (strcmp(words, "*") == 0) {
        *mask = FROM_ANY;
        return SPK_OK;
    }
    *mask = 0;
    for (const char *word = words;; word++) {
        size_t length = strcspn(word, ",");
        char name[16] = "";
        if (length < sizeof name) memcpy(name, word, length);
        const spk_type_info *type = spk_type_find_name(name);
        if (type == NULL) return parse_fail(p, "'%.*s' is not a weight type", (int)(length < 64 ? length : 64), word);
        *mask |= UINT64_C(1) << type->type;
        word += length;
        if (*word == '\0') return SPK_OK;
    }
}

static spk_status parse_to(const parser *p, const char *word, uint32_t *to) {
    const spk_type_info *type = spk_type_find_name(word);
    if (type == NULL || !spk_quant_can_make(type->type))
        return parse_fail(p, "cannot requantize to '%.64s', expected Q4_K, Q5_K, Q6_K or Q8_0", word);
    *to = type->type;
    return SPK_OK;
}

static spk_status compile_regex(const parser *p, const char *regex, pcre2_code **out) {
    int code;
    PCRE2_SIZE offset;
    *out = pcre2_compile((PCRE2_SPTR)regex, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED | PCRE2_ENDANCHORED, &code, &offset,
                         NULL);
    if (*out != NULL) return SPK_OK;
    PCRE2_UCHAR message[160];
    (void)pcre2_get_error_message(code, message, sizeof message);
    return parse_fail(p, "regex '%.128s': %s at character %zu", regex, (const char *)message, (size_t)offset + 1);
}

/* "REGEX FROM -> TO [optional]" */
static spk_status parse_rule(parser *p, char *rest) {
    spk_recipe *recipe = p->recipe;
    if (recipe->rule_count == SPK_RECIPE_RULE_COUNT_MAX)
        return parse_fail(p, "more than %d rules", (int)SPK_RECIPE_RULE_COUNT_MAX);
    const char *regex = next_word(&rest), *from = next_word(&rest), *arrow = next_word(&rest), *to = next_word(&rest);
    const char *optional = next_word(&rest);
    if (to == NULL || strcmp(arrow, "->") != 0 || (optional != NULL && strcmp(optional, "optional") != 0) ||
        next_word(&rest) != NULL)
        return parse_fail(p, "expected 'rule REGEX FROM -> TO [optional]'");
    recipe_rule *rules = realloc(recipe->rules, (recipe->rule_count + 1) * sizeof *rules);
    if (rules == NULL) return memory_fail(p->err);
    recipe->rules = rules;
    recipe_rule *rule = &rules[recipe->rule_count];
    *rule = (recipe_rule){ .is_optional = optional != NULL };
    SPK_TRY(parse_from(p, from, &rule->from_mask));
    SPK_TRY(parse_to(p, to, &rule->to));
    SPK_TRY(compile_regex(p, regex, &rule->regex));
    recipe->rule_count++; /* from here on the recipe owns what the rule holds */
    if (asprintf(&rule->text, "%s %s -> %s%s", regex, from, to, optional != NULL ? " optional" : "") < 0) {
        rule->text = NULL;
        return memory_fail(p->err);
    }
    return SPK_OK;
}

static spk_status parse_statement(parser *p, char *line) {
    spk_recipe *recipe = p->recipe;
    char *rest = line;
    const char *keyword = next_word(&rest);
    if (keyword == NULL) return SPK_OK;
    bool is_name = strcmp(keyword, "recipe") == 0;
    if (is_name != (recipe->name == NULL))
        return parse_fail(p, is_name ? "a second 'recipe' statement" : "expected 'recipe NAME' as the first statement");
    if (is_name) return parse_name(p, rest);
    if (strcmp(keyword, "model") == 0) return parse_model(p, rest);
    if (strcmp(keyword, "rule") == 0) return parse_rule(p, rest);
    if (strcmp(keyword, "about") == 0) {
        if (recipe->about != NULL) return parse_fail(p, "a second 'about' statement");
        recipe->about = joined_words(rest);
        return recipe->about == NULL ? memory_fail(p->err) : SPK_OK;
    }
    if (strcmp(keyword, "default") == 0) {
        if (next_word(&rest) != NULL) return parse_fail(p, "expected nothing after 'default'");
        recipe->is_default = true;
        p->default_line = p->line_number;
        return SPK_OK;
    }
    return parse_fail(p, "'%.64s' is no statement, expected recipe, about, model, default or rule", keyword);
}

/* Cuts a comment off: '#' where a word could begin.  Elsewhere it may be part of a regex. */
static void cut_comment(char *line) {
    for (char *c = strchr(line, '#'); c != NULL; c = strchr(c + 1, '#'))
        if (c == line || c[-1] == ' ' || c[-1] == '\t') {
            *c = '\0';
            return;
        }
}

static spk_status parse_lines(parser *p, char *text) {
    char *line = text;
    for (p->line_number = 1; *line != '\0'; p->line_number++) {
        char *end = line + strcspn(line, "\n");
        char *next = *end == '\0' ? end : end + 1;
        *end = '\0';
        bool had_name = p->recipe->name != NULL;
        for (const char *c = line; *c != '\0'; c++)
            if (((unsigned char)*c < 0x20 && *c != '\t' && *c != '\r') || *c == 0x7f)
                return parse_fail(p, "control character 0x%02x", (unsigned)*c);
        cut_comment(line);
        SPK_TRY(parse_statement(p, line));
        if (!had_name && p->recipe->name != NULL) p->recipe->name_end = (size_t)(next - text);
        line = next;
    }
    if (p->recipe->name == NULL) return parse_fail(p, "expected 'recipe NAME' as the first statement");
    if (p->default_line != 0 && p->recipe->model_count == 0) {
        p->line_number = p->default_line;
        return parse_fail(p, "'default' in a recipe without a 'model' line");
    }
    return SPK_OK;
}

spk_status spk_recipe_parse(const char *text, const char *where, spk_recipe **out, spk_error *err) {
    if (strncmp(text, "\xef\xbb\xbf", 3) == 0) text += 3; /* a byte order mark, as some editors write it */
    size_t length = strlen(text);
    if (length > SPK_RECIPE_BYTES_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: larger than %d bytes", where, (int)SPK_RECIPE_BYTES_MAX);
    spk_recipe *recipe = calloc(1, sizeof *recipe);
    bool is_ended = length == 0 || text[length - 1] == '\n';
    char *lines = NULL;
    spk_status status;
    if (recipe == NULL || asprintf(&recipe->text, "%s%s", text, is_ended ? "" : "\n") < 0) {
        if (recipe != NULL) recipe->text = NULL;
        status = memory_fail(err);
    } else if ((lines = strdup(recipe->text)) == NULL) {
        status = memory_fail(err);
    } else {
        parser p = { .recipe = recipe, .where = where, .err = err };
        status = parse_lines(&p, lines);
    }
    free(lines);
    if (status != SPK_OK) {
        spk_recipe_free(recipe);
        return status;
    }
    *out = recipe;
    return SPK_OK;
}

spk_status spk_recipe_set(spk_recipe *recipe, const char *assignment, spk_error *err) {
    const char *equals = strrchr(assignment, '=');
    if (equals == NULL || equals == assignment || equals[1] == '\0' || *assignment == '#')
        return spk_fail(err, SPK_E_USAGE, "--set '%.200s': expected REGEX=TYPE", assignment);
    for (const char *c = assignment; *c != '\0'; c++)
        if ((unsigned char)*c <= 0x20 || *c == 0x7f)
            return spk_fail(err, SPK_E_USAGE, "--set '%.200s': expected REGEX=TYPE without spaces", assignment);
    if (recipe->rule_count == SPK_RECIPE_RULE_COUNT_MAX)
        return spk_fail(err, SPK_E_USAGE, "--set '%.200s': more than %d rules", assignment,
                        (int)SPK_RECIPE_RULE_COUNT_MAX);
    char *where = NULL, *words = NULL, *text = NULL;
    int name_end = (int)recipe->name_end, regex_length = (int)(equals - assignment);
    if (asprintf(&where, "--set '%.200s'", assignment) < 0) where = NULL;
    if (asprintf(&words, "%.*s * -> %s", regex_length, assignment, equals + 1) < 0) words = NULL;
    if (words == NULL ||
        asprintf(&text, "%.*srule %s\n%s", name_end, recipe->text, words, recipe->text + name_end) < 0)
        text = NULL;
    spk_status status = text == NULL || where == NULL ? memory_fail(err) : SPK_OK;
    if (status == SPK_OK) { /* once alone, so that an error names the option and not a line of the recipe */
        spk_recipe *alone = calloc(1, sizeof *alone);
        parser p = { .recipe = alone, .where = where, .err = err };
        status = alone == NULL ? memory_fail(err) : parse_rule(&p, words);
        spk_recipe_free(alone);
    }
    spk_recipe *edited = NULL;
    if (status == SPK_OK) status = spk_recipe_parse(text, recipe->name, &edited, err);
    if (status == SPK_OK) {
        spk_recipe old = *recipe;
        *recipe = *edited;
        *edited = old;
        recipe->set_count = old.set_count + 1;
    }
    spk_recipe_free(edited);
    free(where);
    free(words);
    free(text);
    return status;
}

/* ---- Built-in recipes and files ---- */

/* True if `path` is packs/<model>/NAME.recipe. */
static bool path_has_name(const char *path, const char *name) {
    const char *slash = strrchr(path, '/'), *base = slash == NULL ? path : slash + 1;
    size_t length = strlen(name);
    return strncmp(base, name, length) == 0 && strcmp(base + length, ".recipe") == 0;
}

bool spk_recipe_lists_model(const spk_recipe *recipe, const char *fingerprint) {
    for (size_t i = 0; i < recipe->model_count; i++)
        if (strcmp(recipe->models[i], fingerprint) == 0) return true;
    return false;
}

/* The first built-in recipe, in order of path, called `name` (NULL: any) that lists the fingerprint (NULL: whether it
 * does or not) and, if only_default, says so.  *out is NULL if there is none. */
static spk_status find_builtin(const char *name, const char *fingerprint, bool only_default, spk_recipe **out,
                               spk_error *err) {
    *out = NULL;
    for (const spk_builtin_recipe *b = spk_builtin_recipes; b->path != NULL; b++) {
        if (name != NULL && !path_has_name(b->path, name)) continue;
        spk_recipe *recipe;
        SPK_TRY(spk_recipe_parse(b->text, b->path, &recipe, err));
        if ((fingerprint == NULL || spk_recipe_lists_model(recipe, fingerprint)) && (!only_default || recipe->is_default)) {
            *out = recipe;
            return SPK_OK;
        }
        spk_recipe_free(recipe);
    }
    return SPK_OK;
}

static spk_status load_file(const char *path, spk_recipe **out, spk_error *err) {
    if (access(path, F_OK) != 0 && errno == ENOENT)
        return spk_fail(err, SPK_E_MISSING, "recipe '%s': neither a built-in recipe nor a file", path);
    int fd;
    uint64_t size_bytes;
    SPK_TRY(spk_infile_open(path, "a recipe file", &fd, &size_bytes, err));
    char *text = malloc(SPK_RECIPE_BYTES_MAX + 2);   /* a byte too many, to see that there are too many, and a NUL */
    FILE *file = fdopen(fd, "rb");
    spk_status status = SPK_OK;
    size_t size = text == NULL || file == NULL ? 0 : fread(text, 1, SPK_RECIPE_BYTES_MAX + 1, file);
    if (text == NULL) status = memory_fail(err);
    else if (file == NULL || ferror(file)) status = spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
    else if (size < size_bytes && size <= SPK_RECIPE_BYTES_MAX)
        status = spk_fail(err, SPK_E_IO, "%s: only %zu of %" PRIu64 " bytes could be read", path, size, size_bytes);
    else if (memchr(text, '\0', size) != NULL) status = spk_fail(err, SPK_E_USAGE, "%s: not a text file", path);
    if (file != NULL) (void)fclose(file);
    else (void)close(fd);
    if (status == SPK_OK) {
        text[size] = '\0';
        status = spk_recipe_parse(text, path, out, err);
    }
    free(text);
    return status;
}

spk_status spk_recipe_load(const char *name_or_path, const char *fingerprint, spk_recipe **out, spk_error *err) {
    spk_recipe *recipe;
    SPK_TRY(find_builtin(name_or_path, fingerprint, false, &recipe, err));
    if (recipe == NULL) SPK_TRY(find_builtin(name_or_path, NULL, false, &recipe, err));
    if (recipe == NULL) return load_file(name_or_path, out, err);
    *out = recipe;
    return SPK_OK;
}

spk_status spk_recipe_default(const char *fingerprint, spk_recipe **out, bool *is_named, spk_error *err) {
    spk_recipe *recipe;
    SPK_TRY(find_builtin(NULL, fingerprint, true, &recipe, err));
    *is_named = recipe != NULL;
    if (recipe == NULL) return spk_recipe_load("native", fingerprint, out, err);
    *out = recipe;
    return SPK_OK;
}

/* ---- Applying ---- */

typedef struct {
    bool     is_matched;         /* it requantizes some tensor, or finds one of its target type */
    uint64_t name_count;         /* tensors that the regex alone matches */
    uint64_t first_index;        /* of the first of them */
} rule_use;

/* PCRE2's own limit on steps ends a regex that explodes. */
static spk_status match_name(pcre2_match_data *data, const recipe_rule *rule, const char *name, bool *out,
                             spk_error *err) {
    int rc = pcre2_match(rule->regex, (PCRE2_SPTR)name, PCRE2_ZERO_TERMINATED, 0, 0, data, NULL);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH)
        return spk_fail(err, SPK_E_LIMIT, "rule '%s': matching '%s' takes too many steps", rule->text, name);
    *out = rc >= 0;
    return SPK_OK;
}

/* Checks that `rule` may requantize the tensor. */
static spk_status check_target(const recipe_rule *rule, const spk_tensor *tensor, spk_role role, spk_error *err) {
    if (spk_role_is_protected(role))
        return spk_fail(err, SPK_E_UNSUPPORTED,
                        "rule '%s': tensor '%s' is protected: routers, norms, convolutions and GDN parameters keep "
                        "their type", rule->text, tensor->name);
    uint64_t block = spk_type_find(rule->to)->block_weights;
    if (tensor->dims[0] % block != 0)
        return spk_fail(err, SPK_E_SHAPE,
                        "rule '%s': rows of tensor '%s' are %" PRIu64 " wide, expected a multiple of %" PRIu64
                        " (remainder %" PRIu64 ")",
                        rule->text, tensor->name, tensor->dims[0], block, tensor->dims[0] % block);
    return SPK_OK;
}

/* The choice for one tensor; every rule that matches its name is noted in uses[]. */
static spk_status choose(const spk_recipe *recipe, pcre2_match_data *data, const spk_tensor *tensor,
                         uint64_t tensor_index, spk_role role, rule_use *uses, spk_recipe_choice *choice,
                         spk_error *err) {
    bool is_taken = false;
    for (size_t r = 0; r < recipe->rule_count; r++) {
        const recipe_rule *rule = &recipe->rules[r];
        bool is_match = false;
        SPK_TRY(match_name(data, rule, tensor->name, &is_match, err));
        if (!is_match) continue;
        if (uses[r].name_count++ == 0) uses[r].first_index = tensor_index;
        bool fits = tensor->type == rule->to || (rule->from_mask >> tensor->type & 1) != 0;
        if (fits) uses[r].is_matched = true;
        if (fits && !is_taken) {
            if (tensor->type != rule->to) SPK_TRY(check_target(rule, tensor, role, err));
            *choice = (spk_recipe_choice){ rule->to, rule->text };
        }
        is_taken = true;
    }
    return SPK_OK;
}

static spk_status check_uses(const spk_recipe *recipe, const rule_use *uses, const spk_tensor *tensors,
                             spk_error *err) {
    for (size_t r = 0; r < recipe->rule_count; r++) {
        const recipe_rule *rule = &recipe->rules[r];
        if (uses[r].is_matched || rule->is_optional) continue;
        if (r < recipe->set_count)                        /* any type will do there: no name matches */
            return spk_fail(err, SPK_E_MISSING, "rule '%s' of --set matches no tensor that decode reads", rule->text);
        if (uses[r].name_count == 0)
            return spk_fail(err, SPK_E_MISMATCH, "recipe %s: rule '%s' matches no tensor that decode reads",
                            recipe->name, rule->text);
        const spk_tensor *first = &tensors[uses[r].first_index];
        return spk_fail(err, SPK_E_MISMATCH,
                        "recipe %s: rule '%s' requantizes nothing: it matches %" PRIu64
                        " names, but none of those types (the first, '%s', is %s)",
                        recipe->name, rule->text, uses[r].name_count, first->name, spk_type_name(first->type));
    }
    return SPK_OK;
}

spk_status spk_recipe_apply(const spk_recipe *recipe, const spk_model_config *config, const spk_tensor *tensors,
                            uint64_t tensor_count, spk_recipe_choice *choices, spk_error *err) {
    rule_use *uses = calloc(recipe->rule_count + 1, sizeof *uses);
    pcre2_match_data *data = pcre2_match_data_create(1, NULL);
    spk_status status = uses == NULL || data == NULL ? memory_fail(err) : SPK_OK;
    for (uint64_t i = 0; i < tensor_count && status == SPK_OK; i++) {
        uint32_t layer;
        spk_role role = spk_model_role(config, tensors[i].name, &layer);
        choices[i] = (spk_recipe_choice){ tensors[i].type, NULL };
        if (role != SPK_ROLE_EXTRA)
            status = choose(recipe, data, &tensors[i], i, role, uses, &choices[i], err);
    }
    if (status == SPK_OK) status = check_uses(recipe, uses, tensors, err);
    pcre2_match_data_free(data);
    free(uses);
    return status;
}
