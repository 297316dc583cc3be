/* formats/plain.h - text from files and command lines as one line that a terminal only shows.
 *
 * Names, paths and provenance come from strangers.  Printed as they are, they could move a cursor, retitle a window, turn the
 * rest of a line around, or look like another name.  Whatever is not ours goes through here before it is printed; messages of
 * spk_fail have been through it.  What a model generates is not a name, and spk-run writes it as it is.
 */
#ifndef SPK_PLAIN_H
#define SPK_PLAIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cjson/cJSON.h>

/* Whether a character may be shown as it is.  Not so: controls (C0, DEL, C1), what separates lines or turns their order around
 * (U+2028, U+2029, marks, embeddings, overrides and isolates of direction), what cannot be seen (of zero width, fillers, tags:
 * Unicode's Default_Ignorable_Code_Point, but for variation selectors, which change the look of a character that is seen), and
 * what is no character. */
bool spk_is_plain(uint32_t code);

/* Room for any path that needs no escapes. */
enum { SPK_PLAIN_SIZE = 4224 };
typedef struct { char text[SPK_PLAIN_SIZE]; } spk_plain_text;

/* printf("%s", spk_plain(name).text): characters that are not plain become \u{202e}, bytes that are no UTF-8 \xff.  Doing it
 * twice changes nothing more.  A text that is too long loses its middle. */
spk_plain_text spk_plain(const char *text);
/* The same into out[out_size], out_size >= 16; one that is too long keeps at most head_bytes < out_size - 16 in front of "...",
 * and as much of its end as there is room for.  No character is cut.  NULs are not taken: `text` ends at the first. */
void spk_plain_into(const char *text, size_t head_bytes, char *out, size_t out_size);

/* cJSON_Print, or cJSON_PrintUnformatted, with the same characters in strings as \u202e, which means the same to who reads it as
 * JSON.  The caller frees it with free(); NULL when out of memory. */
char *spk_plain_json(const cJSON *root, bool is_indented);

#endif
