/* requant/imatrix.h - importance matrices of llama.cpp: the GGUF form and the older .dat form.
 *
 * For a tensor NAME the importance of input column c is the mean of x[c]^2 over the tokens that reached the matrix; a
 * tensor of experts has one vector for each expert.  Entries with NaN, infinite, negative or all-zero values, or a
 * count of zero, fall back to "no importance" for that expert alone; spk_imatrix_lookup says so.
 */
#ifndef SPK_IMATRIX_H
#define SPK_IMATRIX_H

#include <stdint.h>
#include "formats/status.h"

typedef struct spk_imatrix spk_imatrix;

SPK_MUST_CHECK spk_status spk_imatrix_open(const char *path, spk_imatrix **out, spk_error *err);
void spk_imatrix_close(spk_imatrix *imatrix);            /* NULL is fine */
uint64_t spk_imatrix_entry_count(const spk_imatrix *imatrix);

typedef enum {
    SPK_IMATRIX_FOUND = 0,
    SPK_IMATRIX_ABSENT,       /* no entry of this name */
    SPK_IMATRIX_UNUSABLE      /* entry, but this expert's values are all zero, non-finite, negative, or never counted */
} spk_imatrix_answer;

/* Importance of one matrix: *out points to col_count floats (owned by the imatrix, scaled to a mean of 1), or is
 * NULL unless FOUND.  Where the file has one count for all experts, as .dat files do, the mean is over all of them.
 * SPK_E_MISMATCH if the entry's shape is not col_count x matrix_count. */
SPK_MUST_CHECK spk_status spk_imatrix_lookup(const spk_imatrix *imatrix, const char *tensor_name, uint64_t col_count,
                                             uint64_t matrix_count, uint64_t matrix_index,
                                             spk_imatrix_answer *answer, const float **out, spk_error *err);

#endif
