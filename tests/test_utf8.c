/* tests/test_utf8.c - the stream that prints tokens: whole characters out, wherever the bytes are cut. */
#include <stdlib.h>
#include <string.h>
#include "runtime/runtime.h"
#include "tests/check.h"

static size_t stream_all(const char *text, size_t size, size_t cut, char *out) {
    spk_utf8_stream stream = {0};
    size_t written = spk_utf8_push(&stream, text, cut, false, out);
    return written + spk_utf8_push(&stream, text + cut, size - cut, true, out + written);
}

static void streams_wait_for_whole_characters(void) {
    static const char text[] = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80z";
    char out[64];
    for (size_t cut = 0; cut < sizeof text; cut++) {
        const size_t size = stream_all(text, sizeof text - 1, cut, out);
        CHECK(size == sizeof text - 1 && memcmp(out, text, size) == 0, "cut at %zu", cut);
    }
    spk_utf8_stream stream = {0};
    CHECK(spk_utf8_push(&stream, "\xF0\x9F\x98", 3, false, out) == 0, "an incomplete character waits");
    CHECK(spk_utf8_push(&stream, "\x80", 1, false, out) == 4, "and comes when it is whole");
}

static void invalid_bytes_become_replacement_characters(void) {
#define R "\xEF\xBF\xBD"
    static const struct { const char *in, *out; } cases[] = {
        { "\x80", R }, { "a\xFF""b", "a" R "b" }, { "\xC0\xAF", R R }, { "\xE0\x80\x80", R R R },
        { "\xED\xA0\x80", R R R }, { "\xF4\x90\x80\x80", R R R R }, { "\xE2\x82""a", R "a" }, { "\xF0\x9F\x98", R },
        { "\xE2\x82\xE2\x82\xAC", R "\xE2\x82\xAC" }, { "\xC3\xC3\xA9", R "\xC3\xA9" }, { "\xF5\x80", R R },
        { "\xEF\xBF\xBF", "\xEF\xBF\xBF" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const size_t size = strlen(cases[i].in);
        for (size_t cut = 0; cut <= size; cut++) {
            char *out = malloc(3 * (size + 4));     /* as much as is promised to be enough */
            const size_t written = out ? stream_all(cases[i].in, size, cut, out) : 0;
            CHECK(written == strlen(cases[i].out) && memcmp(out, cases[i].out, written) == 0,
                  "case %zu cut at %zu: %zu bytes", i, cut, written);
            free(out);
        }
    }
}

int main(void) {
    RUN(streams_wait_for_whole_characters);
    RUN(invalid_bytes_become_replacement_characters);
    return CHECK_EXIT();
}
