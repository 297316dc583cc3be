/* formats/spk_journal_internal.h - what an unfinished pack says about itself, so that a run that was killed can be gone on
 * with; private to formats/.
 *
 * Records of 256 bytes lie in the unfinished file past all that the pack can take, and are cut off before it is published.
 * The first one names the work (spk_pack_writer_options.job); then, in the order in which the bytes came, one for each chunk
 * of data that was written, with its digest, and one for each note of the caller.  A record is written after what it speaks
 * of, and each has a digest of its own, so what a kill has torn is seen.  Records are best effort: where one cannot be
 * written, later ones are not tried, and a resumed run goes on from there.  It
 * reads all of them first and writes its own over them.
 */
#ifndef SPK_SPK_JOURNAL_INTERNAL_H
#define SPK_SPK_JOURNAL_INTERNAL_H

#include "formats/outfile.h"
#include "formats/spk.h"

typedef enum { SPK_JOURNAL_JOB = 1, SPK_JOURNAL_CHUNK = 2, SPK_JOURNAL_NOTE = 3 } spk_journal_kind;

typedef struct {
    uint32_t   kind;
    uint32_t   note_bytes;
    uint64_t   end_bytes;                /* of data, where what this speaks of ends: a chunk, or the stretch of a note */
    spk_digest digest;                   /* JOB: the work; CHUNK: of its bytes */
    uint8_t    note[SPK_NOTE_BYTES_MAX];
    spk_digest check;                    /* of all before it, and of the job */
} spk_journal_record;
SPK_STATIC_ASSERT(sizeof(spk_journal_record) == 256 && offsetof(spk_journal_record, check) == 240, "on disk");

typedef struct {
    spk_outfile *file;                   /* NULL: no journal is kept */
    uint64_t     base_bytes;             /* where it begins */
    uint64_t     count;                  /* of records written or taken over */
    spk_digest   job;                    /* goes into each record's check: one that another job left is not this one's */
} spk_journal;

/* Appends a record; its check is filled in here. */
void spk_journal_put(spk_journal *journal, spk_journal_record record);
/* Copies of all records, for the caller to free, so that their blocks can be given back; NULL where they cannot be read. */
spk_journal_record *spk_journal_take(const spk_journal *journal, spk_outfile *file);
/* Writes such copies to where they were. */
SPK_MUST_CHECK spk_status spk_journal_put_back(const spk_journal *journal, spk_outfile *file, const spk_journal_record *records);
/* Record `index` as an earlier run left it; false if there is none, or it is torn. */
bool spk_journal_get(const spk_journal *journal, uint64_t index, spk_journal_record *out);

#endif
