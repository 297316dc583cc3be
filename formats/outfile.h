/* formats/outfile.h - a file that appears whole or not at all.
 *
 * Writes go to a temporary file, .spk-<16 hexadecimal digits of PATH's name>, in the same directory; commit does fsync,
 * rename and fsync of the directory.  The temporary file is locked (flock), so a second writer of PATH is refused; one that
 * a killed run left is removed, or gone on with.  Whatever fails before the rename leaves PATH as it was and removes the
 * temporary file, unless that was left and nothing has been written to it since, or spk_outfile_keep was called.  A file that is replaced hands its
 * permissions on, and its owner where the system lets us; hard links to it keep the old content.
 */
#ifndef SPK_OUTFILE_H
#define SPK_OUTFILE_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/status.h"

typedef struct spk_outfile spk_outfile;

/* SPK_E_EXISTS if PATH exists and replace is false, or another process is writing it; SPK_E_SPACE if the file system has
 * less than expected_bytes free, or files may not be as large (message: needed, and available with what it has taken);
 * SPK_E_IO otherwise.  A PATH that exists and is no regular file, or that the user may not write to (root may write to
 * any), is refused, and a directory that cannot be opened to sync it. */
SPK_MUST_CHECK spk_status spk_outfile_create(const char *path, bool replace, uint64_t expected_bytes,
                                             spk_outfile **out, spk_error *err);
/* As spk_outfile_create, but what a run that was killed left in the temporary file stays: the caller must check it. */
SPK_MUST_CHECK spk_status spk_outfile_reopen(const char *path, bool replace, uint64_t expected_bytes,
                                             spk_outfile **out, spk_error *err);
/* Of a file that was begun before its size was known: SPK_E_SPACE as above.  Before the first write. */
SPK_MUST_CHECK spk_status spk_outfile_expect(spk_outfile *file, uint64_t expected_bytes, spk_error *err);
/* Thread-safe: threads may write different ranges at the same time.  A full disk is SPK_E_SPACE (message: as above).
 * Pieces of at least 1 MiB whose address, size and offset are multiples of 4096 go past the page cache where the file
 * system can. */
SPK_MUST_CHECK spk_status spk_outfile_write(spk_outfile *file, uint64_t offset_bytes, const void *bytes,
                                            uint64_t size_bytes, spk_error *err);
/* Of what has been written, or was left; SPK_E_IO where the file ends before.  Thread-safe. */
SPK_MUST_CHECK spk_status spk_outfile_read(spk_outfile *file, uint64_t offset_bytes, void *bytes, uint64_t size_bytes,
                                           spk_error *err);
/* Whether bytes far past the end cost only themselves: FAT and NTFS write zeros up to there. */
bool spk_outfile_has_holes(const spk_outfile *file);
/* Syncs the file, then cuts it to that size: what was written behind that is not needed, in a message about space either. */
SPK_MUST_CHECK spk_status spk_outfile_cut(spk_outfile *file, uint64_t size_bytes, spk_error *err);
/* Gives the blocks of a range back, which reads as zeros then, where the file system can: best effort. */
void spk_outfile_release(spk_outfile *file, uint64_t offset_bytes, uint64_t size_bytes);
/* Frees *file in every case.  SPK_E_IO, with nothing of others touched, if somebody has removed or replaced the temporary file.
 * Where only the directory cannot be synced, the complete file is there and the message says so. */
SPK_MUST_CHECK spk_status spk_outfile_commit(spk_outfile *file, spk_error *err);
void spk_outfile_abort(spk_outfile *file);               /* NULL is fine */
/* Abort leaves the temporary file, for a spk_outfile_reopen; a signal still removes it.  Returns its path, which is the file's. */
const char *spk_outfile_keep(spk_outfile *file);

/* For main(): signals that come from outside and end a process by default (SIGINT, SIGTERM, SIGPIPE, SIGALRM, ...)
 * remove the temporary files of open outfiles (the first eight) and then end the process as they would have; one that
 * is ignored or handled already stays so.  SIGXFSZ is ignored, so that a write beyond a file-size limit is SPK_E_SPACE. */
void spk_outfile_remove_on_signals(void);
/* What those handlers do before the process ends: async-signal-safe.  No outfile can be committed afterwards. */
void spk_outfile_remove_all(void);

/* True if both paths exist and are the same file (device and inode). */
bool spk_same_file(const char *a, const char *b);

#endif
