/* formats/cli.h - what every tool's main() needs: strict parsing, messages, progress, JSON texts.
 *
 * The only code outside *_main.c that prints; included by *_main.c alone.
 * Results go to stdout, everything else to stderr.  Exit status: 0 done, 1 failed, 2 usage.
 */
#ifndef SPK_CLI_H
#define SPK_CLI_H

#include <getopt.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cjson/cJSON.h>
#include "formats/status.h"

enum { SPK_EXIT_DONE = 0, SPK_EXIT_FAILED = 1, SPK_EXIT_USAGE = 2 };

/* What they print may have come from a file or a command line: it is made plain (formats/plain.h).
 *
 * Prints "tool: text" for the error and returns the exit status it deserves (USAGE for SPK_E_USAGE, else FAILED). */
int spk_cli_fail(const char *tool, const spk_error *err);
/* "tool: what: why" on stderr, where something went on all the same; nothing if why is NULL. */
void spk_cli_note(const char *tool, const char *what, const char *why);
/* Prints "tool: message; see tool --help"; returns SPK_EXIT_USAGE. */
int spk_cli_usage(const char *tool, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* getopt_long without its messages: the next option, -1 after the last, or '?' with *err naming the option and what is
 * wrong with it (SPK_E_USAGE).  `shorts` begins with ':'. */
int spk_cli_option(int argc, char **argv, const char *shorts, const struct option *longs, spk_error *err);

/* Whole string, decimal, within [low, high]; else SPK_E_USAGE naming option, text and range. */
SPK_MUST_CHECK spk_status spk_cli_u64(const char *option, const char *text, uint64_t low, uint64_t high,
                                      uint64_t *out, spk_error *err);
/* 1e-999 is the nearest number, 0. */
SPK_MUST_CHECK spk_status spk_cli_double(const char *option, const char *text, double low, double high,
                                         double *out, spk_error *err);
/* A whole file of at most max_bytes; *out is NUL-terminated (not counted), freed by the caller. */
SPK_MUST_CHECK spk_status spk_cli_read_file(const char *path, uint64_t max_bytes, char **out, size_t *out_size,
                                            spk_error *err);

/* "22.1 GB", "417.2 MB", "36 B" (decimal units); out has room for 24. */
const char *spk_cli_bytes_text(uint64_t bytes, char out[24]);

/* A progress line on stderr, with rate and time left; silent unless stderr is a terminal.  Throttled to ten a second.
 * Zero-initialise, set `what`; context for the libraries' progress callbacks. */
typedef struct { const char *what; double start_s, last_s; } spk_cli_progress;
void spk_cli_progress_show(void *context, uint64_t done_bytes, uint64_t total_bytes);
void spk_cli_progress_end(spk_cli_progress *progress);   /* clears the line */

double spk_cli_now_s(void);                              /* monotonic clock */

/* A JSON string of a text that may hold any bytes (a path, a name or a recipe from a file): what is not UTF-8 becomes
 * U+FFFD, since JSON must be UTF-8.  NULL when out of memory, which cJSON_AddItemTo... takes as nothing. */
cJSON *spk_cli_json_string(const char *text);

/* An input is mapped, and touching a part of it that somebody has cut off meanwhile raises SIGBUS: from now on that ends the
 * program with a message and exit status 1, after clean_up (async-signal-safe; NULL: none).  And a standard stream that is closed is
 * held by a descriptor that cannot be written to: the next file, perhaps an output, would get its number and what is printed.
 * The first call of a main(), so that no file is opened before it. */
void spk_cli_guard_inputs(const char *tool, void (*clean_up)(void));

/* Flushes stdout and makes a write error (full disk, closed pipe) a failure, with a message unless exit_status says
 * that there was one already: the last call of a main(). */
int spk_cli_finish(const char *tool, int exit_status);

#endif
