/* runtime/tool.h - what the runtime's tools share beyond formats/cli.h: backend names, token lists, output files,
 * checks of models and logits.
 *
 * Prints nothing and exits nowhere; the tools do.
 */
#ifndef SPK_TOOL_H
#define SPK_TOOL_H

#include <stddef.h>
#include <stdint.h>
#include <cjson/cJSON.h>
#include "formats/gguf.h"
#include "formats/outfile.h"
#include "formats/status.h"
#include "runtime/runtime.h"

#define SPK_TOOL_TEXT_BYTES_MAX (UINT64_C(256) << 20)    /* of a text or token file that a tool reads whole */

/* For main(): a closed pipe is a write error like any other, and what ends the process removes unfinished outputs. */
void spk_tool_signals(void);

/* "auto", "cpu", "ref" or "cuda"; else SPK_E_USAGE naming the option. */
SPK_MUST_CHECK spk_status spk_tool_backend(const char *option, const char *text, spk_backend *out, spk_error *err);

/* spk_fusion bits of names with commas: router, addnorm3, shexp, gdn-conv, gdn-core, held, or all; else SPK_E_USAGE naming the
 * option and the word. */
SPK_MUST_CHECK spk_status spk_tool_fusions(const char *option, const char *list, uint32_t *out, spk_error *err);
/* --fuse LIST (is_only: all others are off) or --no-fuse LIST (these are off, too), into spk_fusion bits that are off. */
SPK_MUST_CHECK spk_status spk_tool_fusions_off(bool is_only, const char *list, uint32_t *off, spk_error *err);
/* "f16" or "q8"; else SPK_E_USAGE naming the option. */
SPK_MUST_CHECK spk_status spk_tool_kv(const char *option, const char *text, bool *out_q8, spk_error *err);

/* Token ids in decimal, separated by white space or commas; SPK_E_CORRUPT names `where` and the position in the list of
 * anything else and of an id >= vocab_size.  text[size_bytes] is NUL.  The caller frees *out with free(). */
SPK_MUST_CHECK spk_status spk_tool_tokens(const char *where, const char *text, size_t size_bytes, uint32_t vocab_size,
                                          uint32_t **out, size_t *out_count, spk_error *err);

/* ---- Output files: begun before the work, so that a bad path costs no time, and published after it. ---- */

/* What no output may be: SPK_E_EXISTS, naming the option (or OUT), if `path` is one of inputs[input_count], NULLs among them
 * skipped; a part of a GGUF; a file that a model was opened from.  path, gguf: NULL is fine. */
SPK_MUST_CHECK spk_status spk_tool_output_check(const char *option, const char *path, const char *const *inputs,
                                                size_t input_count, spk_error *err);
SPK_MUST_CHECK spk_status spk_tool_output_check_gguf(const char *option, const char *path, const spk_gguf *gguf,
                                                     spk_error *err);
SPK_MUST_CHECK spk_status spk_tool_output_check_model(const char *option, const char *path, const spk_model *model,
                                                      spk_error *err);
/* spk_tool_output_check, then spk_outfile_create: `replace` is --force. */
SPK_MUST_CHECK spk_status spk_tool_output_begin(const char *option, const char *path, bool replace,
                                                const char *const *inputs, size_t input_count, uint64_t expected_bytes,
                                                spk_outfile **out, spk_error *err);

/* Adds a number, which must be finite (asserted: JSON has no others). */
void spk_tool_json_number(cJSON *object, const char *key, double value);
/* The report as the whole file, published.  Frees *file in every case. */
SPK_MUST_CHECK spk_status spk_tool_json_commit(spk_outfile *file, const cJSON *report, spk_error *err);

/* ---- Checks ---- */

/* SPK_E_MISMATCH, naming the first difference, unless both models have the same tokens and the same merges: a token id
 * then means the same text in both. */
SPK_MUST_CHECK spk_status spk_tool_same_tokenizer(const spk_model *base, const spk_model *other, spk_error *err);

/* SPK_E_NONFINITE, naming `where`, the position and the token, if one of logits[vocab_size] is NaN or infinite. */
SPK_MUST_CHECK spk_status spk_tool_logits_check(const char *where, uint64_t position, const float *logits,
                                                uint32_t vocab_size, spk_error *err);

#endif
