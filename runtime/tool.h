/* runtime/tool.h - what the runtime's tools share beyond formats/cli.h: backend names, token lists, JSON reports.
 *
 * Prints nothing and exits nowhere; the tools do.
 */
#ifndef SPK_TOOL_H
#define SPK_TOOL_H

#include <stddef.h>
#include <stdint.h>
#include <cjson/cJSON.h>
#include "formats/status.h"
#include "runtime/runtime.h"

#define SPK_TOOL_TEXT_BYTES_MAX (UINT64_C(256) << 20)    /* of a text or token file that a tool reads whole */

/* "auto", "cpu" or "ref"; else SPK_E_USAGE naming the option. */
SPK_MUST_CHECK spk_status spk_tool_backend(const char *option, const char *text, spk_backend *out, spk_error *err);

/* Token ids in decimal, separated by white space or commas; SPK_E_USAGE names `where` and the position in the list of
 * anything else and of an id >= vocab_size.  text[size_bytes] is NUL.  The caller frees *out with free(). */
SPK_MUST_CHECK spk_status spk_tool_tokens(const char *where, const char *text, size_t size_bytes, uint32_t vocab_size,
                                          uint32_t **out, size_t *out_count, spk_error *err);

/* SPK_E_USAGE if `path` is the file of one of the models: a report must not replace a model.  path may be NULL. */
SPK_MUST_CHECK spk_status spk_tool_json_check(const char *path, const char *const *model_paths, uint32_t model_count,
                                              spk_error *err);
/* Adds a number, which must be finite (asserted: JSON has no others). */
void spk_tool_json_number(cJSON *object, const char *key, double value);
/* The report as text, whole or not at all; a regular file at `path` is replaced. */
SPK_MUST_CHECK spk_status spk_tool_json_write(const char *path, const cJSON *report, spk_error *err);

#endif
