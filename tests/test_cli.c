/* tests/test_cli.c - what all command lines promise: strict numbers, options named in one line, JSON in UTF-8. */
#include <stdlib.h>
#include <string.h>

#include "formats/cli.h"
#include "formats/utf8.h"
#include "tests/check.h"

static void numbers_are_whole_decimal_and_in_range(void) {
    static const char *const bad_whole[] = { "", " 1", "1 ", "-1", "+1", "0x1", "1.0", "1e3", "9", "3",
                                             "18446744073709551617" };
    static const char *const bad[] = { "", " 1", "1 ", "0x1", "1p3", "nan", "inf", "infinity", "1e999", "-1e999",
                                       "-0.1", "2.1", "1,5", "1e", "." };
    static const struct { const char *text; double value; } good[] = {
        { "1", 1 }, { "0.5", 0.5 }, { ".5", 0.5 }, { "1e-2", 0.01 }, { "+2", 2 }, { "1e-320", 1e-320 },
        { "1e-999", 0 } };
    spk_error err;
    uint64_t whole = 0;
    double value = 0;
    CHECK(spk_cli_u64("-n", "8", 4, 8, &whole, &err) == SPK_OK && whole == 8, "8");
    for (size_t i = 0; i < sizeof bad_whole / sizeof *bad_whole; i++)
        CHECK(spk_cli_u64("-n", bad_whole[i], 4, 8, &whole, &err) == SPK_E_USAGE &&
              strstr(err.text, "-n '") == err.text, "'%s'", bad_whole[i]);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(spk_cli_double("--temp", bad[i], 0, 2, &value, &err) == SPK_E_USAGE &&
              strstr(err.text, "--temp '") == err.text, "'%s'", bad[i]);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        CHECK(spk_cli_double("--temp", good[i].text, 0, 2, &value, &err) == SPK_OK && value == good[i].value,
              "'%s': %g", good[i].text, value);
}

static void a_bad_option_is_named(void) {
    static const struct option longs[] = { { "threads", required_argument, NULL, 256 },
                                           { "text", no_argument, NULL, 257 }, { "help", no_argument, NULL, 'h' },
                                           { 0 } };
    static const struct { const char *words[3], *message; } cases[] = {
        { { "--nonsense" }, "unknown option '--nonsense'" },
        { { "--text", "-x" }, "unknown option '-x'" },
        { { "-hx" }, "unknown option '-x'" },
        { { "-:" }, "unknown option '-:'" },
        { { "--threads" }, "--threads needs a value" },
        { { "--thr" }, "--threads needs a value" },
        { { "-h", "-n" }, "-n needs a value" },
        { { "--text=1" }, "--text takes no value" },
        { { "--help=1" }, "--help takes no value" },
        { { "--t" }, "ambiguous option '--t'" },
        { { "--line\nbreak" }, "unknown option '--line\\u{a}break'" },
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        char words[3][32] = { "" }, *argv[5] = { (char[]){ "tool" } };
        int argc = 1, option;
        for (int w = 0; w < 3 && cases[c].words[w] != NULL; w++, argc++) {
            (void)snprintf(words[w], sizeof words[w], "%s", cases[c].words[w]);
            argv[argc] = words[w];
        }
        spk_error err = { 0 };
        optind = 0;                                      /* glibc: start over */
        while ((option = spk_cli_option(argc, argv, ":n:h", longs, &err)) != '?' && option != -1) continue;
        CHECK(option == '?' && err.status == SPK_E_USAGE && strcmp(err.text, cases[c].message) == 0,
              "'%s', expected '%s'", err.text, cases[c].message);
    }
}

static void good_options_come_out_in_order(void) {
    static const struct option longs[] = { { "threads", required_argument, NULL, 256 }, { 0 } };
    char words[5][16] = { "tool", "model", "--threads=4", "-n", "7" };
    char *argv[] = { words[0], words[1], words[2], words[3], words[4], NULL };
    spk_error err;
    optind = 0;
    CHECK(spk_cli_option(5, argv, ":n:", longs, &err) == 256 && strcmp(optarg, "4") == 0, "--threads");
    CHECK(spk_cli_option(5, argv, ":n:", longs, &err) == 'n' && strcmp(optarg, "7") == 0, "-n");
    CHECK(spk_cli_option(5, argv, ":n:", longs, &err) == -1 && optind == 4 && strcmp(argv[4], "model") == 0,
          "the rest");
}

static void json_texts_are_utf8_whatever_comes_in(void) {
    static const struct { const char *text, *valid; } cases[] = {
        { "", "" }, { "plain", "plain" },
        { "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z", "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z" },
        { "\xFF", SPK_UTF8_REPLACEMENT }, { "a\x80z", "a" SPK_UTF8_REPLACEMENT "z" },
        { "\xC3", SPK_UTF8_REPLACEMENT }, { "\xE2\x82", SPK_UTF8_REPLACEMENT },
        { "\xE2\x82z", SPK_UTF8_REPLACEMENT "z" },
        { "\xC0\xAF", SPK_UTF8_REPLACEMENT SPK_UTF8_REPLACEMENT },                           /* overlong */
        { "\xED\xA0\x80", SPK_UTF8_REPLACEMENT SPK_UTF8_REPLACEMENT SPK_UTF8_REPLACEMENT },  /* a surrogate */
    };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        cJSON *item = spk_cli_json_string(cases[c].text);
        const char *got = item != NULL ? cJSON_GetStringValue(item) : NULL;
        CHECK(got != NULL && strcmp(got, cases[c].valid) == 0, "case %zu: '%s'", c, got != NULL ? got : "NULL");
        cJSON_Delete(item);
    }
}

int main(void) {
    RUN(numbers_are_whole_decimal_and_in_range);
    RUN(a_bad_option_is_named);
    RUN(good_options_come_out_in_order);
    RUN(json_texts_are_utf8_whatever_comes_in);
    return CHECK_EXIT();
}
