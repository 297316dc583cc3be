/* formats/html.c - see html.h. */
#include "formats/html.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "formats/plain.h"
#include "formats/units.h"
#include "formats/utf8.h"

/* ---- The style ----
 *
 * --h0 .. --h8 is the heat scale: lightness falls (in the dark it rises) in equal steps of OKLab, so that a larger value
 * always stands out more, also in print and to the colour-blind.  --k is the ink on its lower part, --K on its upper. */
static const char STYLE[] =
    ":root{color-scheme:light dark;--page:#f6f5f2;--card:#fff;--ink:#1d1c1a;--soft:#5f5c56;--line:#dcd9d2;"
    "--a:#2563a8;--a2:#9dbfe2;--b:#b4540f;--mark:#ffe08a;--k:#2a1508;--K:#fff;"
    "--h0:#feedd7;--h1:#f7d0a6;--h2:#efb179;--h3:#e49152;--h4:#d57232;--h5:#c2551d;--h6:#a93b15;--h7:#8d2617;--h8:#6d1718}"
    "@media(prefers-color-scheme:dark){:root{--page:#151412;--card:#1f1e1b;--ink:#ece9e3;--soft:#a8a399;--line:#3a3732;"
    "--a:#79b0ea;--a2:#34587f;--b:#f0a35e;--mark:#6b5200;--k:#fff;--K:#241000;"
    "--h0:#442323;--h1:#642f29;--h2:#843d2a;--h3:#a34f26;--h4:#bf6420;--h5:#d77e1e;--h6:#ea9a2d;--h7:#fab84b;--h8:#ffd771}}"
    "*{box-sizing:border-box}"
    "body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:1240px;margin:0 auto;padding:20px 16px 48px}"
    "h1{font-size:1.5rem;line-height:1.25;margin:0 0 8px;overflow-wrap:anywhere}"
    "h2{font-size:1.15rem;margin:32px 0 8px;overflow-wrap:anywhere}h3{font-size:1rem;margin:0 0 4px}"
    "p{margin:6px 0;max-width:75ch;overflow-wrap:anywhere}.soft,figcaption{color:var(--soft);font-size:.87rem}"
    ".card,figure,.tile{background:var(--card);border:1px solid var(--line);border-radius:8px}"
    ".card,figure{padding:12px 14px;margin:0 0 14px;min-width:0}"
    ".grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,350px),1fr));gap:0 14px}"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:12px 0 14px}"
    ".tile{padding:8px 12px}"
    ".tile b{display:block;font-size:1.3rem;font-variant-numeric:tabular-nums}"
    ".scroll{overflow-x:auto;max-width:100%}"
    "table{border-collapse:collapse;font-size:.87rem;font-variant-numeric:tabular-nums}"
    "th,td{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}"
    "th{color:var(--soft);font-weight:600}td.n,th.n{text-align:right;white-space:nowrap}"
    "table.pair td{overflow-wrap:anywhere}table.pair th{white-space:nowrap}table.wide{white-space:nowrap}"
    "td.text{white-space:pre-wrap;min-width:230px;overflow-wrap:anywhere;font-family:ui-monospace,monospace}"
    "mark{background:var(--mark);color:inherit;border-radius:2px}"
    "details{margin:0 0 14px}summary{cursor:pointer;font-weight:600;margin:4px 0 8px}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.82rem;margin:4px 0}"
    "svg{display:block}svg.fit{width:100%;max-width:460px;height:auto}svg text{fill:var(--ink);font:13px system-ui,sans-serif}"
    "svg .s{fill:var(--soft)}svg .e{text-anchor:end}svg .m{text-anchor:middle}"
    ".g{stroke:var(--line);stroke-width:1}.fa{fill:var(--a)}.fa2{fill:var(--a2)}.fb{fill:var(--b)}"
    ".la{fill:none;stroke:var(--a);stroke-width:1.6}.lb{stroke:var(--b);stroke-width:1.2;stroke-dasharray:4 3}"
    "svg text.b{fill:var(--b);paint-order:stroke;stroke:var(--card);stroke-width:4px}"
    ".h0{fill:var(--h0)}.h1{fill:var(--h1)}.h2{fill:var(--h2)}.h3{fill:var(--h3)}.h4{fill:var(--h4)}.h5{fill:var(--h5)}"
    ".h6{fill:var(--h6)}.h7{fill:var(--h7)}.h8{fill:var(--h8)}.hc{fill:var(--page);stroke:var(--line)}"
    ".heat text{font-size:12px}svg .k,svg .K{font-size:11px;text-anchor:middle}svg .k{fill:var(--k)}svg .K{fill:var(--K)}"
    ".heat{display:flex}.heat>svg{flex:none}.heat .scroll{min-width:0}";

/* ---- Bytes ---- */

static void add_bytes(spk_html *page, const void *bytes, size_t size_bytes) {
    if (page->is_out_of_memory) return;
    if (page->room_bytes - page->size_bytes < size_bytes) {
        size_t room_bytes = 2 * page->room_bytes + size_bytes + 4096;
        char *larger = realloc(page->bytes, room_bytes);
        if (larger == NULL) {
            page->is_out_of_memory = true;
            return;
        }
        page->bytes = larger;
        page->room_bytes = room_bytes;
    }
    memcpy(page->bytes + page->size_bytes, bytes, size_bytes);
    page->size_bytes += size_bytes;
}

static void add(spk_html *page, const char *markup) { add_bytes(page, markup, strlen(markup)); }

void spk_html_addf(spk_html *page, const char *format, ...) {
    char *text = NULL;
    va_list args;
    va_start(args, format);
    int size = vasprintf(&text, format, args);
    va_end(args);
    if (size < 0) {
        page->is_out_of_memory = true;
        return;
    }
    add_bytes(page, text, (size_t)size);
    free(text);
}

void spk_html_free(spk_html *page) {
    free(page->bytes);
    *page = (spk_html){ .bytes = NULL };
}

/* ---- Text ---- */

/* One whole character of size_bytes. */
static void add_character(spk_html *page, const unsigned char *bytes, size_t size_bytes, uint32_t code) {
    static const struct { unsigned char character; const char *entity; } escapes[] = {
        { '&', "&amp;" }, { '<', "&lt;" }, { '>', "&gt;" }, { '"', "&quot;" }, { '\'', "&#39;" },
        { '\n', "\xE2\x8F\x8E" }, { 0x7F, "\xE2\x90\xA1" } };
    for (size_t e = 0; e < sizeof escapes / sizeof *escapes; e++)
        if (code == escapes[e].character) {
            add(page, escapes[e].entity);
            return;
        }
    if (code < 0x20) {                                   /* U+2400 + code */
        const char picture[3] = { (char)0xE2, (char)0x90, (char)(0x80 + code) };
        add_bytes(page, picture, sizeof picture);
    } else if (!spk_is_plain(code)) {
        add(page, SPK_UTF8_REPLACEMENT);
    } else {
        add_bytes(page, bytes, size_bytes);
    }
}

void spk_html_text(spk_html *page, const void *bytes, size_t size_bytes) {
    const unsigned char *at = bytes, *end = at + size_bytes;
    while (at < end) {
        size_t wanted;
        uint32_t code;
        size_t count = spk_utf8_decode(at, (size_t)(end - at), &wanted, &code);
        if (count == wanted) add_character(page, at, count, code);
        else add(page, SPK_UTF8_REPLACEMENT);
        at += count;
    }
}

void spk_html_string(spk_html *page, const char *text) { spk_html_text(page, text, strlen(text)); }

void spk_html_tail(spk_html *page, const void *bytes, size_t size_bytes, size_t char_count) {
    const unsigned char *text = bytes;
    size_t begin = size_bytes;
    for (size_t count = 0; begin > 0 && count < char_count; count++) {
        size_t stop = begin > 4 ? begin - 4 : 0;         /* no character is longer, whatever the bytes say */
        do begin--; while (begin > stop && (text[begin] & 0xC0) == 0x80);
    }
    if (begin > 0) add(page, "\xE2\x80\xA6");
    spk_html_text(page, text + begin, size_bytes - begin);
}

/* ---- The page ---- */

void spk_html_begin(spk_html *page, const char *title) {
    add(page, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
              "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
              "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>");
    spk_html_string(page, title);
    add(page, "</title>\n<style>");
    add(page, STYLE);
    add(page, "</style>\n</head>\n<body>\n<main>\n<h1>");
    spk_html_string(page, title);
    add(page, "</h1>\n");
}

spk_status spk_html_commit(spk_html *page, spk_outfile *file, spk_error *err) {
    add(page, "</main>\n</body>\n</html>\n");
    spk_status status = page->is_out_of_memory ? spk_fail(err, SPK_E_MEMORY, "HTML report: out of memory")
                                               : spk_outfile_write(file, 0, page->bytes, page->size_bytes, err);
    spk_html_free(page);
    if (status == SPK_OK) return spk_outfile_commit(file, err);
    spk_outfile_abort(file);
    return status;
}

void spk_html_paragraph(spk_html *page, const char *text) {
    add(page, "<p>");
    spk_html_string(page, text);
    add(page, "</p>\n");
}

void spk_html_row(spk_html *page, const char *name, const char *value) {
    add(page, "<tr><th scope=\"row\">");
    spk_html_string(page, name);
    add(page, "</th><td>");
    spk_html_string(page, value);
    add(page, "</td></tr>\n");
}

void spk_html_bytes(spk_html *page, uint64_t bytes) {
    char text[SPK_BYTES_TEXT_SIZE];
    add(page, spk_bytes_text(bytes, text));
}

/* ---- JSON ---- */

static bool is_scalar(const cJSON *item) { return !cJSON_IsArray(item) && !cJSON_IsObject(item); }

/* A text may hold line feeds: they stay, as lines. */
static void add_lines(spk_html *page, const char *text) {
    for (const char *line = text;;) {
        const char *end = strchr(line, '\n');
        spk_html_text(page, line, end == NULL ? strlen(line) : (size_t)(end - line));
        if (end == NULL || end[1] == '\0') return;
        add(page, "<br>");
        line = end + 1;
    }
}

static void add_cell(spk_html *page, const cJSON *item) {
    if (!cJSON_IsNumber(item)) {
        add(page, "<td>");
        if (cJSON_IsString(item)) add_lines(page, item->valuestring);
        else if (cJSON_IsBool(item)) add(page, cJSON_IsTrue(item) ? "yes" : "no");
        add(page, "</td>");
        return;
    }
    double value = item->valuedouble;
    char *exact = cJSON_PrintUnformatted(item);
    if (exact == NULL) page->is_out_of_memory = true;
    bool is_whole = value == floor(value) && fabs(value) < 1e15;
    spk_html_addf(page, is_whole ? "<td class=\"n\"><data value=\"%s\">%.0f</data></td>"
                                 : "<td class=\"n\"><data value=\"%s\">%.5g</data></td>", exact ? exact : "", value);
    cJSON_free(exact);
}

void spk_html_json(spk_html *page, const cJSON *object) {
    if (object == NULL) {                                /* cJSON's way to say that memory ran out */
        page->is_out_of_memory = true;
        return;
    }
    add(page, "<table class=\"pair\">\n");
    for (const cJSON *item = object->child; item != NULL; item = item->next) {
        if (!is_scalar(item)) continue;
        add(page, "<tr><th scope=\"row\">");
        spk_html_string(page, item->string);
        add(page, "</th>");
        add_cell(page, item);
        add(page, "</tr>\n");
    }
    add(page, "</table>\n");
}

static void add_rows(spk_html *page, const cJSON *list, int row_count_max) {
    add(page, "<tr>");
    for (const cJSON *item = list->child->child; item != NULL; item = item->next) {
        add(page, "<th scope=\"col\">");
        spk_html_string(page, item->string);
        add(page, "</th>");
    }
    add(page, "</tr>\n");
    int count = 0;
    for (const cJSON *object = list->child; object != NULL && count < row_count_max; object = object->next, count++) {
        add(page, "<tr>");
        for (const cJSON *item = object->child; item != NULL; item = item->next) add_cell(page, item);
        add(page, "</tr>\n");
    }
}

static void add_columns(spk_html *page, const cJSON *list) {
    for (const cJSON *key = list->child->child; key != NULL; key = key->next) {
        add(page, "<tr><th scope=\"row\">");
        spk_html_string(page, key->string);
        add(page, "</th>");
        for (const cJSON *object = list->child; object != NULL; object = object->next) {
            const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, key->string);
            if (item != NULL) add_cell(page, item);
            else add(page, "<td></td>");
        }
        add(page, "</tr>\n");
    }
}

void spk_html_json_list(spk_html *page, const cJSON *list, bool is_across, int row_count_max) {
    if (list == NULL || list->child == NULL) return;
    add(page, "<div class=\"scroll\"><table class=\"wide\">\n");
    if (is_across) add_columns(page, list);
    else add_rows(page, list, row_count_max);
    add(page, "</table></div>\n");
    int left_count = is_across ? 0 : cJSON_GetArraySize(list) - row_count_max;
    if (left_count > 0) spk_html_addf(page, "<p class=\"soft\">%d more rows are left out; --json has all.</p>\n", left_count);
}
