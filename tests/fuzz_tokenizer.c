/* tests/fuzz_tokenizer.c - the tokenizer: any text comes back from its ids, and a hostile vocabulary is refused or does the
 * same.  The first byte chooses: a text for a trained vocabulary, or the metadata of one. */
#include "formats/gguf.h"
#include "runtime/tokenizer_internal.h"
#include "tests/fuzz.h"

static const char MODEL[] = "tests/models/tiny-qwen35-q4_k_m.gguf";
enum { TEXT = 0, METADATA = 1 };

/* The pieces of the ids, one after another, are the text; control tokens are only seen with parse_special. */
static void expect_round_trip(const spk_tokenizer *tokenizer, const char *text, size_t size, bool is_special, bool may_fail) {
    uint32_t *ids = NULL;
    size_t count = 0, at = 0;
    spk_error err = { 0 };
    spk_status status = spk_tokenizer_encode(tokenizer, text, size, is_special, &ids, &count, &err);
    FUZZ_ASSERT(status == SPK_OK || (may_fail && err.text[0] != '\0'), "%s", err.text);
    if (status != SPK_OK) return;
    fuzz_accepted_count++;
    for (size_t i = 0; i < count; i++) {
        size_t piece_bytes = 0;
        FUZZ_ASSERT(ids[i] < spk_tokenizer_token_count(tokenizer), "id %u", ids[i]);
        const char *piece = spk_tokenizer_piece(tokenizer, ids[i], true, &piece_bytes);
        FUZZ_ASSERT(piece_bytes <= size - at && memcmp(text + at, piece, piece_bytes) == 0, "piece %zu at byte %zu", i, at);
        at += piece_bytes;
    }
    FUZZ_ASSERT(at == size, "%zu of %zu bytes came back", at, size);
    free(ids);
}

static const spk_tokenizer *trained(void) {
    static spk_tokenizer *tokenizer;
    if (tokenizer != NULL) return tokenizer;
    spk_gguf *gguf = NULL;
    spk_error err = { 0 };
    FUZZ_ASSERT(spk_gguf_open(MODEL, &gguf, &err) == SPK_OK, "%s", err.text);
    FUZZ_ASSERT(spk_tokenizer_from_kvs(spk_gguf_kvs(gguf), MODEL, &tokenizer, &err) == SPK_OK, "%s", err.text);
    spk_gguf_close(gguf);
    return tokenizer;
}

/* Bytes of UTF-8 in pieces of any size give the same characters as all at once. */
static void expect_stream(const uint8_t *bytes, size_t size) {
    spk_utf8_stream whole = { 0 }, pieces = { 0 };
    char *a = malloc(3 * (size + 4)), *b = malloc(3 * (size + 4) + 16);
    size_t a_size = spk_utf8_push(&whole, (const char *)bytes, size, true, a), b_size = 0;
    for (size_t at = 0, step = 1; at < size; at += step, step = 1 + (step * 7 + at) % 5) {
        if (step > size - at) step = size - at;
        b_size += spk_utf8_push(&pieces, (const char *)bytes + at, step, false, b + b_size);
    }
    b_size += spk_utf8_push(&pieces, "", 0, true, b + b_size);
    FUZZ_ASSERT(a_size == b_size && memcmp(a, b, a_size) == 0, "%zu and %zu bytes", a_size, b_size);
    free(a);
    free(b);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    if (size == 0) return 0;
    if (bytes[0] == TEXT) {
        expect_round_trip(trained(), (const char *)bytes + 1, size - 1, false, false);
        expect_round_trip(trained(), (const char *)bytes + 1, size - 1, true, false);
        expect_stream(bytes + 1, size - 1);
        return 0;
    }
    spk_kv_set kvs = { 0 };
    uint64_t used = 0, count = bytes[0];
    spk_tokenizer *tokenizer = NULL;
    spk_error err = { 0 };
    if (spk_kv_parse(bytes + 1, size - 1, count, "x", &kvs, &used, &err) != SPK_OK) return 0;
    if (spk_tokenizer_from_kvs(&kvs, "x", &tokenizer, &err) == SPK_OK) {
        static const char text[] = "ab  abc \xc3\xa9\xff<|im_start|>user\n123";
        expect_round_trip(tokenizer, text, sizeof text - 1, false, true);
        expect_round_trip(tokenizer, text, sizeof text - 1, true, true);
    } else {
        FUZZ_ASSERT(err.text[0] != '\0', "no message");
    }
    spk_tokenizer_destroy(tokenizer);
    spk_kv_free(&kvs);
    return 0;
}

static void seed_text(const char *text, size_t size) {
    gguf_build b = { 0 };
    gb_u8(&b, TEXT);
    gb_raw(&b, text, size);
    fuzz_seed(b.bytes, b.size);
    gb_free(&b);
}

/* All bytes as tokens, some words, merges that make them, and token types. */
static void seed_metadata(const char *pre, bool is_typed) {
    static const char *const words[] = { "ab", "abc", "\xc4\xa0" "ab", "<|im_start|>", "<|im_end|>", "user" };
    static const char *const merges[] = { "a b", "ab c", "\xc4\xa0 ab", "x", "a  b", "u s", "us e" };
    enum { WORDS = 6, MERGES = 7 };
    gguf_build b = { 0 };
    gb_u8(&b, is_typed ? 6 : 4);
    gb_kv_string(&b, "tokenizer.ggml.model", "gpt2");
    gb_kv_string(&b, "tokenizer.ggml.pre", pre);
    gb_array(&b, "tokenizer.ggml.tokens", SPK_KV_STRING, 256 + WORDS);
    for (unsigned byte = 0; byte < 256; byte++) {
        const bool prints = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
        unsigned code = prints ? byte : 0x100 + (byte <= 0x20 ? byte : byte == 0xAD ? 67 : byte - 0x7F + 0x21);
        char text[3] = { (char)code };
        if (code >= 0x80) {
            text[0] = (char)(0xC0 | code >> 6);
            text[1] = (char)(0x80 | (code & 0x3F));
        }
        gb_string(&b, text);
    }
    for (int i = 0; i < WORDS; i++) gb_string(&b, words[i]);
    gb_array(&b, "tokenizer.ggml.merges", SPK_KV_STRING, MERGES);
    for (int i = 0; i < MERGES; i++) gb_string(&b, merges[i]);
    if (is_typed) {
        gb_array(&b, "tokenizer.ggml.token_type", SPK_KV_I32, 256 + WORDS);
        for (int i = 0; i < 256 + WORDS; i++) gb_u32(&b, i == 259 || i == 260 ? 3 : 1);
        gb_kv_u32(&b, "tokenizer.ggml.eos_token_id", 260);
    }
    fuzz_seed(b.bytes, b.size);
    gb_free(&b);
}

void fuzz_seeds(void) {
    static const char *const texts[] = {
        "", "In the beginning God created", "  \t\n\n x\r\n  y", "it's they'LL 12345 \xe2\x80\xa8", "\xff\xfe\x80 \xc3", "<|im_start|>user\n<|im_end|>",
        "\xf0\x9f\x98\x80\xcc\x81 \xe4\xb8\xad\xe6\x96\x87 \xd8\xb3", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) seed_text(texts[i], strlen(texts[i]));
    seed_text("a\0b\0\0", 5);
    seed_metadata("qwen2", true);
    seed_metadata("qwen35", false);
}
