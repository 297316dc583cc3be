/* tests/test_html.c - reports: what comes from outside stays text, figures stay exact, charts stand extreme values.
 * test_html FILE writes a page of charts as large as they come, for tests/test_report.sh to look at in a browser. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "formats/chart.h"
#include "formats/html.h"
#include "tests/check.h"

#define R "\xEF\xBF\xBD"

/* The page so far as a string; ends the page. */
static char *take(spk_html *page) {
    CHECK(!page->is_out_of_memory, "memory");
    spk_html_addf(page, "%c", 0);
    char *text = page->bytes;
    *page = (spk_html){ .bytes = NULL };
    return text;
}

static void whatever_comes_from_outside_is_text(void) {
    static const struct { const char *in, *out; } cases[] = {
        { "plain", "plain" }, { "<script>", "&lt;script&gt;" }, { "a&b\"c'd", "a&amp;b&quot;c&#39;d" },
        { "\xC3\xA9\xF0\x9F\x98\x80", "\xC3\xA9\xF0\x9F\x98\x80" },
        { "\xFF<", R "&lt;" }, { "\xC3<", R "&lt;" }, { "\xE2\x82", R }, { "\xC0\xBC", R R },      /* an overlong '<' */
        { "a\nb\tc", "a\xE2\x8F\x8E""b\xE2\x90\x89""c" }, { "\x1B[2J", "\xE2\x90\x9B[2J" }, { "\x7F", "\xE2\x90\xA1" },
        { "\xC2\x85\xE2\x80\xA8", R R }, { "\xE2\x80\xAE" "abc", R "abc" }, { "\xE2\x81\xA6", R }, { "\xEF\xBF\xBE", R },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        spk_html page = { 0 };
        spk_html_string(&page, cases[i].in);
        char *text = take(&page);
        CHECK(strcmp(text, cases[i].out) == 0, "case %zu: %s", i, text);
        free(text);
    }
    spk_html page = { 0 };
    spk_html_text(&page, "a\0b", 3);
    char *text = take(&page);
    CHECK(strcmp(text, "a\xE2\x90\x80""b") == 0, "NUL: %s", text);
    free(text);
}

static void a_long_text_shows_its_end(void) {
    static const struct { const char *in; size_t chars; const char *out; } cases[] = {
        { "abc", 3, "abc" }, { "abcd", 3, "\xE2\x80\xA6""bcd" }, { "", 3, "" }, { "abc", 0, "\xE2\x80\xA6" },
        { "x\xE2\x82\xAC\xC3\xA9", 2, "\xE2\x80\xA6\xE2\x82\xAC\xC3\xA9" }, { "\x80\x80\x80\x80\x80", 1, "\xE2\x80\xA6" R R R R },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        spk_html page = { 0 };
        spk_html_tail(&page, cases[i].in, strlen(cases[i].in), cases[i].chars);
        char *text = take(&page);
        CHECK(strcmp(text, cases[i].out) == 0, "case %zu: %s", i, text);
        free(text);
    }
}

static void figures_are_those_of_json(void) {
    cJSON *object = cJSON_Parse("{\"<k>\":0.12345678, \"count\":12345678, \"s\":\"<b>\\nx\", "
                                "\"list\":[{\"a\":1},{\"a\":2},{\"a\":3}]}");
    spk_html page = { 0 };
    spk_html_json(&page, object);
    spk_html_json_list(&page, cJSON_GetObjectItem(object, "list"), false, 2);
    spk_html_json_list(&page, cJSON_GetObjectItem(object, "list"), true, 2);
    char *text = take(&page);
    CHECK(strstr(text, "<data value=\"0.12345678\">0.12346</data>") != NULL, "exact and rounded: %s", text);
    CHECK(strstr(text, ">12345678</data>") != NULL, "a count in full: %s", text);
    CHECK(strstr(text, "&lt;k&gt;") != NULL && strstr(text, "&lt;b&gt;<br>x") != NULL, "escaped: %s", text);
    CHECK(strstr(text, "1 more rows") != NULL, "says what is left out: %s", text);
    CHECK(strstr(text, ">3</data>") != NULL, "across, nothing is: %s", text);
    free(text);
    cJSON_Delete(object);
}

static void a_page_is_published_whole_or_not_at_all(void) {
    char path[] = "/tmp/test_html_XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0, "%s", path);
    (void)close(fd);
    for (int fails = 0; fails < 2; fails++) {
        spk_outfile *file = NULL;
        spk_error err = { 0 };
        spk_html page = { 0 };
        CHECK_OK(spk_outfile_create(path, true, 0, &file, &err), err);
        spk_html_begin(&page, "A <title>");
        page.is_out_of_memory = fails == 1;
        spk_status status = spk_html_commit(&page, file, &err);
        CHECK(status == (fails ? SPK_E_MEMORY : SPK_OK), "%d: %s", fails, err.text);
        CHECK(page.bytes == NULL, "freed");
    }
    char text[16384] = "";
    FILE *file = fopen(path, "rb");
    size_t size = file != NULL ? fread(text, 1, sizeof text - 1, file) : 0;
    CHECK(size > 8 && strncmp(text, "<!DOCTYPE html>", 15) == 0 && strcmp(text + size - 8, "</html>\n") == 0, "%zu bytes", size);
    CHECK(strstr(text, "A &lt;title&gt;") != NULL, "title");
    if (file != NULL) (void)fclose(file);
    (void)unlink(path);
}

/* ---- Charts ---- */

static const spk_chart_text TEXT = { .title = "A <b>title", .about = "about & about", .x_name = "x", .y_name = "y" };

static void add_heat(spk_html *page, uint32_t columns, double low, double high) {
    enum { ROWS = 9 };
    static const char *const row_names[ROWS] = { "<row>", "attention q, out", "a", "b", "c", "d", "e", "f", "g" };
    double *values = malloc(sizeof *values * ROWS * columns);
    char (*names)[SPK_CHART_HEAT_NAME_SIZE] = malloc(sizeof *names * columns);
    if (values == NULL || names == NULL) abort();
    for (uint32_t i = 0; i < ROWS * columns; i++)
        values[i] = i % 7 == 6 ? -1 : i % 5 == 4 ? 0 : low * pow(high / low, i / (ROWS * columns - 1.0));
    for (uint32_t c = 0; c < columns; c++) (void)snprintf(names[c], sizeof names[c], "layer %u", c);
    spk_chart_heat_map map = { .row_count = ROWS, .column_count = columns, .values = values, .row_names = row_names,
                               .column_names = names, .hollow_name = "copied" };
    spk_chart_heat(page, &TEXT, &map);
    free(values);
    free(names);
}

static void add_charts(spk_html *page) {
    static const double ranges[][2] = { { 0.05, 0.07 }, { 0.06, 0.06 }, { 1e-9, 1 }, { 1e-4, 2.5 } };
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        add_heat(page, i == 0 ? 41 : i == 1 ? 1 : 129, ranges[i][0], ranges[i][1]);
    static const spk_chart_bar bars[] = {
        { "a <very> long name, of which only the end is shown, as it is in file names.spk",
          { 999940000000000, 999949999 } },
        { "nothing", { 0, 0 } } };
    static const char *const series[] = { "before", "after" };
    spk_html_addf(page, "<div class=\"grid\">");
    spk_chart_bars(page, &TEXT, bars, 2, series, 2);
    spk_chart_bars(page, &TEXT, bars + 1, 1, series, 1);
    static const struct { double value, begin, width; uint32_t count; } lines[] = {
        { 1, 0, 1, 1 }, { 1e-300, 0, 1, 2 }, { 1e300, 0, 83887, 200 }, { 0.999999, 5, 0.5, 3 }, { 1e-3, 0, 1000, 5 } };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        double means[200] = { 0 }, maxima[200] = { 0 };
        for (uint32_t b = 0; b + 1 < lines[i].count || b == 0; b++) {    /* the last bin is zero, unless it is alone */
            means[b] = lines[i].value / (b + 1);
            maxima[b] = lines[i].value;
        }
        spk_chart_line(page, &TEXT, means, maxima, lines[i].count, lines[i].begin, lines[i].width);
    }
    static const double places[] = { 1e-300, 1e-6, 0.01, 3, 1e9 };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const uint64_t counts[8] = { 0, i * 1000000, 3, 0, 1 };
        const spk_chart_mark marks[] = { { "median", places[i] }, { "mean", 1.5 * places[i] }, { "99 %", 2 * places[i] } };
        spk_chart_histogram(page, &TEXT, counts, 8, -3, marks, 3);
    }
    spk_html_addf(page, "</div>");
}

static void charts_stand_extreme_values(void) {
    spk_html page = { 0 };
    add_charts(&page);
    char *text = take(&page);
    CHECK(strstr(text, "nan") == NULL && strstr(text, "inf") == NULL, "a coordinate is no number");
    CHECK(strstr(text, "<b>") == NULL && strstr(text, "<row>") == NULL && strstr(text, "<very>") == NULL, "markup in names");
    CHECK(strstr(text, "<desc>about &amp; about</desc>") != NULL, "a text alternative");
    free(text);
}

static void shades_are_in_order(void) {
    spk_html page = { 0 };
    static const char *const row_names[] = { "r" };
    char names[9][SPK_CHART_HEAT_NAME_SIZE];
    double values[9];
    for (int i = 0; i < 9; i++) {
        values[i] = 0.01 * (1 << i);
        (void)snprintf(names[i], sizeof names[i], "layer %d", i);
    }
    spk_chart_heat_map map = { .row_count = 1, .column_count = 9, .values = values, .row_names = row_names, .column_names = names,
                               .hollow_name = "copied" };
    spk_chart_heat(&page, &TEXT, &map);
    char *text = take(&page), *at = strstr(text, "<g>");
    for (int i = 0; i < 9 && at != NULL; i++, at = strstr(at + 1, "<g>")) {
        char want[32];
        (void)snprintf(want, sizeof want, "<rect class=\"h%d\"", i);
        char *rect = strstr(at, "<rect");
        CHECK(rect != NULL && strncmp(rect, want, strlen(want)) == 0, "value %d: %.20s", i, rect);
    }
    CHECK(strstr(text, ">1 %</text>") != NULL && strstr(text, ">256 %</text>") != NULL,
          "the legend's ends: %s", strstr(text, "Colour"));
    free(text);
}

static int write_page(const char *path) {
    spk_html page = { 0 };
    spk_outfile *file = NULL;
    spk_error err;
    if (spk_outfile_create(path, true, 0, &file, &err) != SPK_OK) return 1;
    spk_html_begin(&page, "Charts as large as they come, and "
                   "a_title_without_any_place_to_break_the_line_which_is_longer_than_a_telephone");
    add_charts(&page);
    return spk_html_commit(&page, file, &err) == SPK_OK ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc == 2) return write_page(argv[1]);
    RUN(whatever_comes_from_outside_is_text);
    RUN(a_long_text_shows_its_end);
    RUN(figures_are_those_of_json);
    RUN(a_page_is_published_whole_or_not_at_all);
    RUN(charts_stand_extreme_values);
    RUN(shades_are_in_order);
    return CHECK_EXIT();
}
