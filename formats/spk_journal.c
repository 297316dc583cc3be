/* formats/spk_journal.c - see spk_journal_internal.h. */
#include "formats/spk_journal_internal.h"

#include <stdlib.h>
#include <string.h>

/* With the job: a run of another job begins anew in the same file, and the records that it has not reached stay behind its own. */
static spk_digest check_of(const spk_journal *journal, const spk_journal_record *record) {
    spk_journal_record checked = *record;
    checked.check = journal->job;
    return spk_digest_of(&checked, sizeof checked);
}

void spk_journal_put(spk_journal *journal, spk_journal_record record) {
    if (journal->file == NULL) return;
    record.check = check_of(journal, &record);
    uint64_t at = journal->base_bytes + journal->count * sizeof record;
    if (spk_outfile_write(journal->file, at, &record, sizeof record, NULL) == SPK_OK) journal->count++;
    else journal->file = NULL;
}

spk_journal_record *spk_journal_take(const spk_journal *journal, spk_outfile *file) {
    uint64_t size_bytes = journal->count * sizeof(spk_journal_record);
    spk_journal_record *records = malloc(size_bytes + 1);
    if (records == NULL || spk_outfile_read(file, journal->base_bytes, records, size_bytes, NULL) == SPK_OK) return records;
    free(records);
    return NULL;
}

spk_status spk_journal_put_back(const spk_journal *journal, spk_outfile *file, const spk_journal_record *records) {
    return spk_outfile_write(file, journal->base_bytes, records, journal->count * sizeof *records, NULL);
}

bool spk_journal_get(const spk_journal *journal, uint64_t index, spk_journal_record *out) {
    uint64_t at = journal->base_bytes + index * sizeof *out;
    if (journal->file == NULL) return false;
    if (spk_outfile_read(journal->file, at, out, sizeof *out, NULL) != SPK_OK) return false;
    spk_digest check = check_of(journal, out);
    return memcmp(&check, &out->check, sizeof check) == 0 && out->note_bytes <= sizeof out->note;
}
