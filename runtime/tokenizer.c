/* runtime/tokenizer.c - the tokenizer of a model: metadata in, token ids and bytes out.
 *
 * Refuses vocabularies other than byte-level BPE with the pre-tokenizers of Qwen, and never guesses: an array of
 * the wrong kind or length is an error, while a merge that cannot apply or an end token out of range is ignored.
 *
 * What a newcomer gets wrong: control tokens are found in text only when the caller asks for it (parse_special), and
 * merges never produce one, so text from a user cannot end a turn or open another.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include "runtime/model_internal.h"
#include "runtime/tokenizer_internal.h"

/* tokenizer.ggml.token_type */
enum { TYPE_NORMAL = 1, TYPE_UNKNOWN = 2, TYPE_CONTROL = 3, TYPE_USER_DEFINED = 4, TYPE_UNUSED = 5 };

enum {
    FLAG_CONTROL = 1,   /* found in text only with parse_special */
    FLAG_SPECIAL = 2,   /* cut out of the text before anything else; written as it is */
    FLAG_SILENT  = 4,   /* has no bytes unless render_special */
    FLAG_END     = 8
};

/* Tokens that are control tokens whatever their declared type says: files of the same model disagree on it. */
static const struct { const char *name; bool is_end; } known_controls[] = {
    { "<|im_start|>", false },  { "<|im_end|>", true },     { "<|endoftext|>", true }, { "<|fim_prefix|>", false },
    { "<|fim_middle|>", false }, { "<|fim_suffix|>", false }, { "<|fim_pad|>", true },   { "<|repo_name|>", true },
    { "<|file_sep|>", true },
};
static const char *const end_keys[] = {
    "tokenizer.ggml.eos_token_id",     "tokenizer.ggml.eot_token_id",     "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.fim_pad_token_id", "tokenizer.ggml.fim_rep_token_id", "tokenizer.ggml.fim_sep_token_id",
};

struct spk_tokenizer {
    char        *where;             /* the file's name, for messages */
    spk_bpe      bpe;               /* its first token_count symbols are the tokens' bytes */
    spk_splitter splitter;
    uint8_t     *flags;             /* of each token */
    spk_strings  specials;          /* texts of FLAG_SPECIAL tokens */
    spk_id_list  special_ids;       /* token of each */
    bool         special_first[256];                                    /* some special starts with this byte */
    bool         special_sizes[SPK_TOKENIZER_SPECIAL_BYTES_MAX + 1];    /* some special has this many bytes */
};

/* ---- Creation ---- */

static spk_status need(const spk_kv_set *kvs, const char *key, const char *where, const spk_kv **out, spk_error *err) {
    *out = spk_kv_find(kvs, key);
    return *out ? SPK_OK
                : spk_fail(err, SPK_E_MISSING, "%s: no metadata key %s, so it has no usable tokenizer", where, key);
}

static spk_status need_strings(const spk_kv_set *kvs, const char *key, uint64_t count_max, const char *where,
                               const spk_kv **out, spk_error *err) {
    SPK_TRY(need(kvs, key, where, out, err));
    if ((*out)->type != SPK_KV_ARRAY || (*out)->element_type != SPK_KV_STRING)
        return spk_fail(err, SPK_E_CORRUPT, "%s: %s is not an array of strings", where, key);
    if ((*out)->count > count_max)
        return spk_fail(err, SPK_E_LIMIT, "%s: %s has %" PRIu64 " entries, more than %" PRIu64, where, key,
                        (*out)->count, count_max);
    return SPK_OK;
}

static spk_status need_text(const spk_kv_set *kvs, const char *key, const char *where, spk_text *out, spk_error *err) {
    const spk_kv *kv;
    SPK_TRY(need(kvs, key, where, &kv, err));
    return spk_kv_text(kv, out) ? SPK_OK : spk_fail(err, SPK_E_CORRUPT, "%s: %s is not a string", where, key);
}

static bool is_integer(uint32_t type) {
    return type <= SPK_KV_I32 || type == SPK_KV_U64 || type == SPK_KV_I64;
}

/* *out gets NULL if the key is absent: then all tokens are normal. */
static spk_status find_types(const spk_kv_set *kvs, uint64_t token_count, const char *where, const spk_kv **out,
                             spk_error *err) {
    *out = spk_kv_find(kvs, "tokenizer.ggml.token_type");
    if (!*out) return SPK_OK;
    if ((*out)->type != SPK_KV_ARRAY || !is_integer((*out)->element_type))
        return spk_fail(err, SPK_E_CORRUPT, "%s: tokenizer.ggml.token_type is not an array of integers", where);
    if ((*out)->count < token_count)
        return spk_fail(err, SPK_E_CORRUPT,
                        "%s: tokenizer.ggml.token_type has %" PRIu64 " entries for %" PRIu64 " tokens", where,
                        (*out)->count, token_count);
    return SPK_OK;
}

static uint8_t flags_of(spk_text text, uint64_t type) {
    for (size_t i = 0; i < sizeof known_controls / sizeof *known_controls; i++)
        if (spk_text_equal(text, known_controls[i].name))
            return FLAG_CONTROL | FLAG_SPECIAL | FLAG_SILENT | (known_controls[i].is_end ? FLAG_END : 0);
    switch (type) {
    case TYPE_CONTROL:
    case TYPE_UNKNOWN: return FLAG_CONTROL | FLAG_SPECIAL | FLAG_SILENT;
    case TYPE_USER_DEFINED: return FLAG_SPECIAL;
    case TYPE_UNUSED: return FLAG_SILENT;
    default: return 0;
    }
}

static spk_status add_special(spk_tokenizer *t, spk_text text, uint32_t id, const char *where, spk_error *err) {
    if (!text.size_bytes) return SPK_OK;
    if (text.size_bytes > SPK_TOKENIZER_SPECIAL_BYTES_MAX)
        return spk_fail(err, SPK_E_LIMIT, "%s: special token %" PRIu32 " has %" PRIu64 " bytes, more than %d", where,
                        id, text.size_bytes, SPK_TOKENIZER_SPECIAL_BYTES_MAX);
    t->special_first[(unsigned char)text.bytes[0]] = true;
    t->special_sizes[text.size_bytes] = true;
    SPK_TRY(spk_fail_in(where, spk_id_list_push(&t->special_ids, id, err), err));
    return spk_fail_in(where, spk_strings_add(&t->specials, text.bytes, text.size_bytes, true, err), err);
}

static spk_status add_tokens(spk_tokenizer *t, const spk_kv *tokens, const spk_kv *types, const char *where,
                             char *buffer, spk_error *err) {
    const uint8_t *cursor = NULL;
    spk_text text;
    for (uint32_t id = 0; spk_kv_next_text(tokens, &cursor, &text); id++) {
        uint64_t type;
        if (!spk_kv_u64(types, id, &type)) type = TYPE_NORMAL;
        t->flags[id] = flags_of(text, type);
        const bool special = t->flags[id] & FLAG_SPECIAL;
        size_t size_bytes;
        if (special || !spk_bpe_decode(&t->bpe, text, buffer, &size_bytes)) {
            SPK_TRY(spk_fail_in(where, spk_strings_add(&t->bpe.symbols, text.bytes, text.size_bytes, false, err), err));
        } else {
            SPK_TRY(spk_fail_in(where, spk_strings_add(&t->bpe.symbols, buffer, size_bytes, size_bytes > 0, err), err));
        }
        if (special) SPK_TRY(add_special(t, text, id, where, err));
    }
    return SPK_OK;
}

/* Bytes of the longest string of an array. */
static uint64_t longest(const spk_kv *strings) {
    uint64_t size_bytes = 0;
    const uint8_t *cursor = NULL;
    spk_text text;
    while (spk_kv_next_text(strings, &cursor, &text))
        if (text.size_bytes > size_bytes) size_bytes = text.size_bytes;
    return size_bytes;
}

static void mark_ends(spk_tokenizer *t, const spk_kv_set *kvs) {
    for (size_t i = 0; i < sizeof end_keys / sizeof *end_keys; i++) {
        uint64_t id;
        if (spk_kv_u64(spk_kv_find(kvs, end_keys[i]), 0, &id) && id < t->bpe.token_count) t->flags[id] |= FLAG_END;
    }
}

static spk_status fill(spk_tokenizer *t, const spk_kv_set *kvs, const char *where, spk_error *err) {
    spk_text model, pre;
    SPK_TRY(need_text(kvs, "tokenizer.ggml.model", where, &model, err));
    if (!spk_text_equal(model, "gpt2"))
        return spk_fail(err, SPK_E_UNSUPPORTED, "%s: tokenizer model '%.*s' is not supported (gpt2 is)", where,
                        (int)(model.size_bytes < 64 ? model.size_bytes : 64), model.bytes);
    SPK_TRY(need_text(kvs, "tokenizer.ggml.pre", where, &pre, err));
    SPK_TRY(spk_splitter_init(pre, where, &t->splitter, err));

    const spk_kv *tokens, *types, *merges;
    SPK_TRY(need_strings(kvs, "tokenizer.ggml.tokens", SPK_TOKENIZER_TOKEN_COUNT_MAX, where, &tokens, err));
    SPK_TRY(need_strings(kvs, "tokenizer.ggml.merges", SPK_TOKENIZER_MERGE_COUNT_MAX, where, &merges, err));
    SPK_TRY(find_types(kvs, tokens->count, where, &types, err));

    const uint64_t token_bytes = longest(tokens), merge_bytes = longest(merges);
    char *buffer = malloc((token_bytes > merge_bytes ? token_bytes : merge_bytes) + 1);
    t->flags = calloc(tokens->count + 1, 1);
    spk_status status = SPK_OK;
    if (!buffer || !t->flags) status = spk_fail(err, SPK_E_MEMORY, "%s: no memory for the tokenizer", where);
    if (status == SPK_OK) status = add_tokens(t, tokens, types, where, buffer, err);
    t->bpe.token_count = t->bpe.symbols.count;
    if (status == SPK_OK) status = spk_fail_in(where, spk_bpe_add_merges(&t->bpe, merges, buffer, err), err);
    if (status == SPK_OK) mark_ends(t, kvs);
    free(buffer);
    return status;
}

spk_status spk_tokenizer_from_kvs(const spk_kv_set *kvs, const char *where, spk_tokenizer **out, spk_error *err) {
    spk_tokenizer *t = calloc(1, sizeof *t);
    if (!t || !(t->where = strdup(where))) {
        free(t);
        return spk_fail(err, SPK_E_MEMORY, "%s: no memory for the tokenizer", where);
    }
    spk_bpe_init(&t->bpe);
    const spk_status status = fill(t, kvs, where, err);
    if (status != SPK_OK) {
        spk_tokenizer_destroy(t);
        return status;
    }
    *out = t;
    return SPK_OK;
}

spk_status spk_tokenizer_create(const spk_model *model, spk_tokenizer **out, spk_error *err) {
    const char *where = spk_model_path(model);
    spk_tokenizer *t;
    SPK_TRY(spk_tokenizer_from_kvs(spk_model_kvs(model), where, &t, err));
    const uint32_t token_count = t->bpe.token_count, vocab_size = spk_model_vocab_size(model);
    if (token_count > vocab_size) {
        spk_tokenizer_destroy(t);
        return spk_fail(err, SPK_E_MISMATCH, "%s: %" PRIu32 " tokens, but the model has only %" PRIu32 " logits", where,
                        token_count, vocab_size);
    }
    *out = t;
    return SPK_OK;
}

void spk_tokenizer_destroy(spk_tokenizer *tokenizer) {
    if (!tokenizer) return;
    spk_bpe_free(&tokenizer->bpe);
    spk_splitter_free(&tokenizer->splitter);
    spk_strings_free(&tokenizer->specials);
    free(tokenizer->special_ids.ids);
    free(tokenizer->flags);
    free(tokenizer->where);
    free(tokenizer);
}

/* ---- Encoding ---- */

static spk_status encode_plain(const spk_tokenizer *t, const char *text, size_t size_bytes, spk_bpe_work *work,
                               spk_id_list *out, spk_error *err) {
    for (size_t at = 0; at < size_bytes;) {
        const size_t piece_bytes = spk_splitter_next(&t->splitter, text + at, size_bytes - at);
        SPK_TRY(spk_fail_in(t->where, spk_bpe_encode(&t->bpe, text + at, piece_bytes, work, out, err), err));
        at += piece_bytes;
    }
    return SPK_OK;
}

/* What a byte of the text is part of. */
enum { MARK_PLAIN = 0, MARK_START = 1, MARK_INSIDE = 2 };   /* of a special token */

static uint32_t special_at(const spk_tokenizer *t, const char *text, size_t size_bytes, bool parse_special) {
    const uint32_t index = spk_strings_find(&t->specials, text, size_bytes);
    if (index == SPK_STRING_NONE) return SPK_STRING_NONE;
    const uint32_t id = t->special_ids.ids[index];
    return (t->flags[id] & FLAG_CONTROL) && !parse_special ? SPK_STRING_NONE : id;
}

/* Longer tokens first over the whole text, then from left to right, as llama.cpp: so an overlap goes to the longer
 * one.  A taken range is at least as long as the one that is tried, hence looking at the two ends is enough. */
static void mark_specials(const spk_tokenizer *t, const char *text, size_t size_bytes, bool parse_special,
                          uint8_t *marks) {
    for (size_t length = SPK_TOKENIZER_SPECIAL_BYTES_MAX; length; length--) {
        if (!t->special_sizes[length]) continue;
        for (size_t at = 0; at + length <= size_bytes; at++) {
            if (!t->special_first[(unsigned char)text[at]] || marks[at] || marks[at + length - 1]) continue;
            if (special_at(t, text + at, length, parse_special) == SPK_STRING_NONE) continue;
            memset(marks + at, MARK_INSIDE, length);
            marks[at] = MARK_START;
        }
    }
}

static bool may_have_special(const spk_tokenizer *t, const char *text, size_t size_bytes) {
    for (size_t at = 0; at < size_bytes; at++)
        if (t->special_first[(unsigned char)text[at]]) return true;
    return false;
}

static spk_status encode(const spk_tokenizer *t, const char *text, size_t size_bytes, bool parse_special,
                         spk_bpe_work *work, spk_id_list *out, spk_error *err) {
    if (size_bytes > SPK_TOKENIZER_TEXT_BYTES_MAX)
        return spk_fail(err, SPK_E_LIMIT, "text of %zu bytes, more than %" PRIu64, size_bytes,
                        SPK_TOKENIZER_TEXT_BYTES_MAX);
    if (!may_have_special(t, text, size_bytes)) return encode_plain(t, text, size_bytes, work, out, err);

    uint8_t *marks = calloc(size_bytes, 1);
    if (!marks) return spk_fail(err, SPK_E_MEMORY, "no memory to tokenize %zu bytes", size_bytes);
    mark_specials(t, text, size_bytes, parse_special, marks);
    spk_status status = SPK_OK;
    for (size_t at = 0, end; at < size_bytes && status == SPK_OK; at = end) {
        end = at + 1;
        if (marks[at] == MARK_START) {
            while (end < size_bytes && marks[end] == MARK_INSIDE) end++;
            status = spk_id_list_push(out, special_at(t, text + at, end - at, parse_special), err);
        } else {
            while (end < size_bytes && marks[end] == MARK_PLAIN) end++;
            status = encode_plain(t, text + at, end - at, work, out, err);
        }
    }
    free(marks);
    return status;
}

/* Hands the list over, or frees it. */
static spk_status finish(spk_status status, spk_id_list *list, spk_bpe_work *work, uint32_t **out, size_t *out_count) {
    spk_bpe_work_free(work);
    if (status != SPK_OK) {
        free(list->ids);
        return status;
    }
    *out = list->ids;
    *out_count = list->count;
    return SPK_OK;
}

spk_status spk_tokenizer_encode(const spk_tokenizer *tokenizer, const char *text, size_t size_bytes, bool parse_special,
                                uint32_t **out, size_t *out_count, spk_error *err) {
    spk_bpe_work work = {0};
    spk_id_list list = {0};
    const spk_status status = encode(tokenizer, text, size_bytes, parse_special, &work, &list, err);
    return finish(status, &list, &work, out, out_count);
}

/* "<|im_start|>user\nTEXT<|im_end|>\n<|im_start|>assistant\n".  What is between two control tokens is one text for the
 * pre-tokenizer, so "user\n" and the user's text are encoded together, without control tokens. */
static spk_status encode_chat(const spk_tokenizer *t, const char *user_text, size_t size_bytes, spk_bpe_work *work,
                              spk_id_list *list, spk_error *err) {
    static const char opening[] = "<|im_start|>", header[] = "user\n";
    static const char footer[] = "<|im_end|>\n<|im_start|>assistant\n";
    const size_t header_bytes = sizeof header - 1;
    if (special_at(t, opening, sizeof opening - 1, true) == SPK_STRING_NONE ||
        special_at(t, footer, strlen("<|im_end|>"), true) == SPK_STRING_NONE)
        return spk_fail(err, SPK_E_UNSUPPORTED,
                        "%s: the vocabulary has no <|im_start|> and <|im_end|>, so no chat template", t->where);
    if (size_bytes > SPK_TOKENIZER_TEXT_BYTES_MAX)
        return spk_fail(err, SPK_E_LIMIT, "text of %zu bytes, more than %" PRIu64, size_bytes,
                        SPK_TOKENIZER_TEXT_BYTES_MAX);
    char *turn = malloc(header_bytes + size_bytes);
    if (!turn) return spk_fail(err, SPK_E_MEMORY, "no memory to tokenize %zu bytes", size_bytes);
    memcpy(turn, header, header_bytes);
    if (size_bytes) memcpy(turn + header_bytes, user_text, size_bytes);
    spk_status status = encode(t, opening, sizeof opening - 1, true, work, list, err);
    if (status == SPK_OK) status = encode(t, turn, header_bytes + size_bytes, false, work, list, err);
    if (status == SPK_OK) status = encode(t, footer, sizeof footer - 1, true, work, list, err);
    free(turn);
    return status;
}

spk_status spk_tokenizer_chat(const spk_tokenizer *tokenizer, const char *user_text, size_t size_bytes, uint32_t **out,
                              size_t *out_count, spk_error *err) {
    spk_bpe_work work = {0};
    spk_id_list list = {0};
    const spk_status status = encode_chat(tokenizer, user_text, size_bytes, &work, &list, err);
    return finish(status, &list, &work, out, out_count);
}

/* ---- Tokens ---- */

uint32_t spk_tokenizer_token_count(const spk_tokenizer *tokenizer) {
    return tokenizer->bpe.token_count;
}

const char *spk_tokenizer_piece(const spk_tokenizer *tokenizer, uint32_t token, bool render_special,
                                size_t *size_bytes) {
    *size_bytes = 0;
    if (token >= tokenizer->bpe.token_count) return "";
    if ((tokenizer->flags[token] & FLAG_SILENT) && !render_special) return "";
    return spk_strings_at(&tokenizer->bpe.symbols, token, size_bytes);
}

bool spk_tokenizer_is_end(const spk_tokenizer *tokenizer, uint32_t token) {
    return token < tokenizer->bpe.token_count && (tokenizer->flags[token] & FLAG_END);
}
