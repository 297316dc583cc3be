/* formats/pack_page.h - the parts of a report that are about one pack: what requantizing did to its tensors, and where it
 * comes from.  All of it is in the pack.
 */
#ifndef SPK_PACK_PAGE_H
#define SPK_PACK_PAGE_H

#include "formats/html.h"
#include "formats/spk.h"

/* Heat map of relative error, layer by tensor class; a sentence where nothing was requantized.  SPK_E_MEMORY is left to
 * spk_html_commit. */
void spk_pack_page_errors(spk_html *page, const spk_pack *pack);
/* Source, digests, recipe and tool version as a table. */
void spk_pack_page_provenance(spk_html *page, const spk_pack *pack);

#endif
