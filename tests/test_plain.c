/* tests/test_plain.c - whatever bytes a name has, what is printed of it is one line of characters that can be seen. */
#include <stdlib.h>
#include <string.h>

#include "formats/plain.h"
#include "formats/status.h"
#include "formats/utf8.h"
#include "tests/check.h"

/* Writes a character as UTF-8, NUL behind it; surrogates, too, which are none. */
static size_t encode(uint32_t code, char out[8]) {
    size_t count = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    static const unsigned char leads[] = { 0, 0, 0xC0, 0xE0, 0xF0 };
    for (size_t i = count; i-- > 1; code >>= 6) out[i] = (char)(0x80 | (code & 0x3F));
    out[0] = (char)(leads[count] | code);
    out[count] = '\0';
    return count;
}

static bool all_plain(const char *text) {
    for (size_t at = 0, size = strlen(text), wanted; at < size; at += wanted) {
        uint32_t code;
        if (spk_utf8_decode((const unsigned char *)text + at, size - at, &wanted, &code) != wanted || !spk_is_plain(code)) return false;
    }
    return true;
}

static const struct { const char *text, *shown; } cases[] = {
    { "", "" },
    { "blk.0.attn_q.weight", "blk.0.attn_q.weight" },
    { "\xc3\xa4 \xe6\xbc\xa2 \xf0\x9f\x98\x80 \\n", "\xc3\xa4 \xe6\xbc\xa2 \xf0\x9f\x98\x80 \\n" },
    { "a\nb\tc\x7f", "a\\u{a}b\\u{9}c\\u{7f}" },
    { "\x1b[31m\x1b]0;title\x07", "\\u{1b}[31m\\u{1b}]0;title\\u{7}" },
    { "\xc2\x9b" "31m\xc2\x85\xc2\xa0", "\\u{9b}31m\\u{85}\xc2\xa0" },                        /* CSI and NEL as one C1 character each */
    { "\xe2\x80\xaegnp.exe", "\\u{202e}gnp.exe" },                                            /* right-to-left override */
    { "\xe2\x81\xa6\xe2\x81\xa9\xe2\x80\x8e\xd8\x9c", "\\u{2066}\\u{2069}\\u{200e}\\u{61c}" },
    { "a\xe2\x80\xa8" "b\xe2\x80\xa9", "a\\u{2028}b\\u{2029}" },
    { "\xe2\x80\x8b\xe2\x80\x8d\xef\xbb\xbf\xc2\xad", "\\u{200b}\\u{200d}\\u{feff}\\u{ad}" },
    { "\xf3\xa0\x81\xa1\xf4\x8f\xbf\xbf", "\\u{e0061}\\u{10ffff}" },                          /* a tag, a noncharacter */
    { "\xff\xc0\x80\xed\xa0\x80\xe2\x80", "\\xff\\xc0\\x80\\xed\\xa0\\x80\\xe2\\x80" },       /* no UTF-8 of any kind */
    { "\x9b" "31m", "\\x9b31m" },                                                             /* CSI of an 8-bit terminal */
};

static void what_is_not_plain_is_escaped(void) {
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        const spk_plain_text once = spk_plain(cases[c].text), twice = spk_plain(once.text);
        CHECK(strcmp(once.text, cases[c].shown) == 0, "case %zu: '%s', expected '%s'", c, once.text, cases[c].shown);
        CHECK(strcmp(once.text, twice.text) == 0, "case %zu: '%s' when done twice", c, twice.text);
    }
}

static void every_character_is_shown_as_it_is_or_escaped(void) {
    uint64_t escaped = 0;
    for (uint32_t code = 1; code <= 0x10FFFF; code++) {
        char text[8];
        (void)encode(code, text);
        const spk_plain_text shown = spk_plain(text);
        bool is_same = strcmp(shown.text, text) == 0, is_surrogate = code >= 0xD800 && code <= 0xDFFF;
        if (!all_plain(shown.text) || is_same != (spk_is_plain(code) && !is_surrogate) || (!is_same && shown.text[0] != '\\')) {
            CHECK(false, "U+%X is shown as '%s'", (unsigned)code, shown.text);
            return;
        }
        escaped += !is_same;
    }
    CHECK(escaped > 6000 && escaped < 6500, "%u characters are escaped", (unsigned)escaped);   /* 2,048 surrogates, 4,096 tags */
}

static void a_long_text_loses_its_middle_between_characters(void) {
    char text[600], out[64];
    for (size_t i = 0; i < sizeof text - 1; i++) text[i] = "\xe2\x80\xae"[i % 3];             /* each becomes eight characters */
    text[sizeof text - 1] = '\0';
    memcpy(text + sizeof text - 4, "end", 3);
    for (size_t size = 16; size <= sizeof out; size++)
        for (size_t head = 0; head + 16 <= size; head++) {
            memset(out, '#', sizeof out);
            spk_plain_into(text, head, out, size);
            size_t length = strlen(out), lead = strcspn(out, ".");
            CHECK(length < size && lead <= head && lead % 8 == 0 && head - lead < 8 && memcmp(out + lead, "...", 3) == 0, "%zu, %zu: %s", size, head, out);
            CHECK((length - lead - 3) % 8 == 3 && size - 1 - length < 8 && strcmp(out + length - 3, "end") == 0, "%zu, %zu: %s", size, head, out);
            CHECK(size == sizeof out || out[size] == '#', "%zu: one byte too many", size);
        }
    spk_plain_into("as long as fits", 0, out, 16);
    CHECK(strcmp(out, "as long as fits") == 0, "%s", out);
}

static void messages_are_plain(void) {
    spk_error err;
    (void)spk_fail(&err, SPK_E_IO, "%s: tensor '%s'", "\x1b]0;x\x07.gguf", "a\xe2\x80\xae\xff");
    CHECK(strcmp(err.text, "\\u{1b}]0;x\\u{7}.gguf: tensor 'a\\u{202e}\\xff'") == 0, "%s", err.text);
    char path[2000];
    memset(path, 0xC3, sizeof path);
    path[sizeof path - 1] = '\0';
    (void)spk_fail(&err, SPK_E_IO, "%s: what is wrong", path);
    CHECK(all_plain(err.text) && strlen(err.text) > 470 && strstr(err.text, "...") != NULL && strstr(err.text, "\\xc3: what is wrong"), "%s",
          err.text);
}

static void the_file_comes_in_front_of_an_error(void) {
    spk_error err;
    (void)spk_fail(&err, SPK_E_LIMIT, "tensor 'x' is too large");
    CHECK(spk_fail_in("a.gguf", SPK_E_LIMIT, &err) == SPK_E_LIMIT && strcmp(err.text, "a.gguf: tensor 'x' is too large") == 0, "%s", err.text);
    CHECK(spk_fail_in("b.gguf", SPK_OK, &err) == SPK_OK && err.text[0] == 'a', "%s", err.text);
    CHECK(spk_fail_in("b.gguf", SPK_E_IO, NULL) == SPK_E_IO, "no error to fill");
}

/* What is printed is plain, and read as JSON the same text. */
static void json_keeps_its_texts(void) {
    for (int is_indented = 0; is_indented < 2; is_indented++)
        for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
            cJSON *root = cJSON_CreateObject();
            cJSON_AddStringToObject(root, "text", cases[c].text);
            cJSON_AddNumberToObject(root, "number", 0.1);
            char *printed = spk_plain_json(root, is_indented != 0), *lines = printed;
            cJSON *back = cJSON_Parse(printed);
            const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(back, "text"));
            bool is_utf8 = strstr(cases[c].shown, "\\x") == NULL;
            CHECK(text != NULL && (!is_utf8 || strcmp(text, cases[c].text) == 0), "case %zu comes back as '%s'", c, text ? text : "nothing");
            CHECK(is_indented == (strchr(printed, '\n') != NULL), "case %zu: %s", c, printed);
            while ((lines = strpbrk(lines, "\n\t")) != NULL) *lines = ' ';
            CHECK(all_plain(printed), "case %zu: %s", c, printed);
            cJSON_Delete(back);
            cJSON_Delete(root);
            free(printed);
        }
}

int main(void) {
    RUN(what_is_not_plain_is_escaped);
    RUN(every_character_is_shown_as_it_is_or_escaped);
    RUN(a_long_text_loses_its_middle_between_characters);
    RUN(messages_are_plain);
    RUN(the_file_comes_in_front_of_an_error);
    RUN(json_keeps_its_texts);
    return CHECK_EXIT();
}
