/* formats/html.h - one self-contained HTML page, written into memory and published as a whole.
 *
 * The page refers to nothing: styles are inside, pictures are inline SVG (formats/chart.h), there is no script, and its
 * content security policy lets a browser load nothing.  Light or dark as the reader's system is.
 *
 * What a newcomer gets wrong: whatever comes from a file or a command line goes through spk_html_text or
 * spk_html_string, never through spk_html_addf.
 */
#ifndef SPK_HTML_H
#define SPK_HTML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cjson/cJSON.h>
#include "formats/outfile.h"
#include "formats/status.h"

/* Zero-initialise; spk_html_commit or spk_html_free ends it.  A lack of memory is remembered and told by commit. */
typedef struct {
    char  *bytes;
    size_t size_bytes, room_bytes;
    bool   is_out_of_memory;
} spk_html;

/* Everything up to the heading, which is `title`. */
void spk_html_begin(spk_html *page, const char *title);
/* The page ends and becomes the file, published.  Frees both in every case. */
SPK_MUST_CHECK spk_status spk_html_commit(spk_html *page, spk_outfile *file, spk_error *err);
void spk_html_free(spk_html *page);

/* Markup; the arguments are numbers and our own words. */
void spk_html_addf(spk_html *page, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Any bytes as text, in content or in a quoted attribute: markup is escaped, what is no UTF-8 becomes U+FFFD, control
 * characters the pictures of themselves (a line feed U+23CE), and what else is not plain (formats/plain.h) U+FFFD. */
void spk_html_text(spk_html *page, const void *bytes, size_t size_bytes);
void spk_html_string(spk_html *page, const char *text);
/* The same of at most char_count characters, the last ones after an ellipsis where there are more. */
void spk_html_tail(spk_html *page, const void *bytes, size_t size_bytes, size_t char_count);

/* <p>, escaped. */
void spk_html_paragraph(spk_html *page, const char *text);
/* A row of a table of two columns, both escaped. */
void spk_html_row(spk_html *page, const char *name, const char *value);
/* "22.1 GB", as spk_bytes_text (formats/units.h). */
void spk_html_bytes(spk_html *page, uint64_t bytes);

/* The members of an object that are neither lists nor objects, as a table: the number shown is rounded, that of <data> is
 * the one that JSON has. */
void spk_html_json(spk_html *page, const cJSON *object);
/* A list of objects with the same keys: a row each, of the first row_count_max; or, across, a column each. */
void spk_html_json_list(spk_html *page, const cJSON *list, bool is_across, int row_count_max);

#endif
