/* runtime/bpe.c - byte-pair merges: from the bytes of one piece to token ids.
 *
 * Merges are pairs of symbols (strings), not of tokens: llama.cpp looks merges up by text, so a merge may go through a
 * string that is no token.  What is left without a token in the end is written byte by byte.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>
#include "formats/name_index.h"
#include "runtime/tokenizer_internal.h"

/* ---- The printable alphabet: bytes that print stand for themselves, the other 68 are U+0100 and up, in order. ---- */

static bool prints(unsigned byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
}

void spk_bpe_init(spk_bpe *bpe) {
    *bpe = (spk_bpe){0};
    uint32_t next = 256;
    for (unsigned byte = 0; byte < 256; byte++) bpe->byte_of[prints(byte) ? byte : next++] = (uint8_t)byte;
}

bool spk_bpe_decode(const spk_bpe *bpe, spk_text text, char *out, size_t *out_size) {
    size_t size = 0;
    for (uint64_t at = 0; at < text.size_bytes;) {
        size_t wanted;
        uint32_t code;
        const size_t count =
            spk_utf8_decode((const unsigned char *)text.bytes + at, text.size_bytes - at, &wanted, &code);
        if (count != wanted || code >= SPK_BPE_ALPHABET_SIZE) return false;
        if (bpe->byte_of[code] == 0 && code != 256) return false;   /* U+0100 stands for byte 0 */
        out[size++] = (char)bpe->byte_of[code];
        at += count;
    }
    *out_size = size;
    return true;
}

/* ---- Creation ---- */

/* The slot of a pair, or the empty one where it belongs; rank UINT32_MAX means empty.  Pairs come from a file: see spk_hash_seed. */
static inline spk_merge_slot *slot_of(const spk_bpe *bpe, uint32_t left, uint32_t right) {
    const uint64_t pair = (uint64_t)left << 32 | right;
    const uint64_t mask = bpe->slot_count - 1;
    for (uint64_t i = XXH3_64bits_withSeed(&pair, sizeof pair, spk_hash_seed()) & mask;; i = (i + 1) & mask) {
        spk_merge_slot *slot = &bpe->slots[i];
        if (slot->rank == UINT32_MAX || slot->pair == pair) return slot;
    }
}

static spk_status symbol_of(spk_bpe *bpe, const char *bytes, size_t size_bytes, uint32_t *out, spk_error *err) {
    *out = spk_strings_find(&bpe->symbols, bytes, size_bytes);
    if (*out != SPK_STRING_NONE) return SPK_OK;
    *out = bpe->symbols.count;
    return spk_strings_add(&bpe->symbols, bytes, size_bytes, true, err);
}

/* buffer has room for line.size_bytes. */
static spk_status add_merge(spk_bpe *bpe, spk_text line, uint32_t rank, char *buffer, spk_error *err) {
    /* The first character is never the separator. */
    const char *space = line.size_bytes > 1 ? memchr(line.bytes + 1, ' ', line.size_bytes - 1) : NULL;
    if (!space) return SPK_OK;
    const uint64_t left_size = (uint64_t)(space - line.bytes);
    const spk_text left_text = { line.bytes, left_size };
    const spk_text right_text = { space + 1, line.size_bytes - left_size - 1 };
    size_t left_bytes, right_bytes;
    if (!spk_bpe_decode(bpe, left_text, buffer, &left_bytes)) return SPK_OK;
    if (!spk_bpe_decode(bpe, right_text, buffer + left_bytes, &right_bytes) || !right_bytes) return SPK_OK;

    uint32_t left, right, merged;
    SPK_TRY(symbol_of(bpe, buffer, left_bytes, &left, err));
    SPK_TRY(symbol_of(bpe, buffer + left_bytes, right_bytes, &right, err));
    SPK_TRY(symbol_of(bpe, buffer, left_bytes + right_bytes, &merged, err));
    spk_merge_slot *slot = slot_of(bpe, left, right);
    if (slot->rank == UINT32_MAX)
        *slot = (spk_merge_slot){ .pair = (uint64_t)left << 32 | right, .rank = rank, .merged = merged };
    return SPK_OK;
}

spk_status spk_bpe_add_merges(spk_bpe *bpe, const spk_kv *merges, char *buffer, spk_error *err) {
    for (unsigned byte = 0; byte < 256; byte++) {
        const char text = (char)byte;
        SPK_TRY(symbol_of(bpe, &text, 1, &bpe->byte_symbols[byte], err));
    }
    bpe->slot_count = 1024;
    while (bpe->slot_count < merges->count * 2) bpe->slot_count *= 2;
    bpe->slots = malloc(bpe->slot_count * sizeof *bpe->slots);
    if (!bpe->slots) return spk_fail(err, SPK_E_MEMORY, "no memory for %" PRIu64 " merges", merges->count);
    for (uint64_t i = 0; i < bpe->slot_count; i++) bpe->slots[i].rank = UINT32_MAX;

    const uint8_t *cursor = NULL;
    spk_text line;
    for (uint32_t rank = 0; spk_kv_next_text(merges, &cursor, &line); rank++)
        SPK_TRY(add_merge(bpe, line, rank, buffer, err));
    return SPK_OK;
}

void spk_bpe_free(spk_bpe *bpe) {
    spk_strings_free(&bpe->symbols);
    free(bpe->slots);
    *bpe = (spk_bpe){0};
}

/* ---- Encoding: a doubly linked list of symbols, and a heap of the merges that are possible in it. ---- */

#define NOWHERE UINT32_MAX

typedef struct spk_bpe_node {
    uint32_t previous, next;
    uint32_t symbol;
    uint32_t rank;      /* of the merge with the next node; UINT32_MAX: none */
    uint32_t merged;    /* its result */
} node;

/* An entry is rank << 32 | place, so the smallest is the lowest rank, leftmost.  Entries are not removed when their
 * node changes: an entry counts only while the node still has that rank. */
typedef struct { uint64_t *entries; size_t count; } heap;

static void heap_push(heap *h, uint64_t entry) {
    size_t i = h->count++;
    while (i && h->entries[(i - 1) / 2] > entry) {
        h->entries[i] = h->entries[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    h->entries[i] = entry;
}

static uint64_t heap_pop(heap *h) {
    const uint64_t top = h->entries[0], last = h->entries[--h->count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < h->count; i = child) {
        if (child + 1 < h->count && h->entries[child + 1] < h->entries[child]) child++;
        if (h->entries[child] >= last) break;
        h->entries[i] = h->entries[child];
    }
    h->entries[i] = last;
    return top;
}

void spk_bpe_work_free(spk_bpe_work *work) {
    free(work->nodes);
    free(work->heap);
    *work = (spk_bpe_work){0};
}

static spk_status work_reserve(spk_bpe_work *work, size_t count, spk_error *err) {
    if (count <= work->capacity) return SPK_OK;
    spk_bpe_work_free(work);
    const size_t capacity = count + count / 2 + 64;
    work->nodes = malloc(capacity * sizeof *work->nodes);
    /* One entry for each pair at the start; a merge takes one out and puts at most two in. */
    work->heap = malloc(2 * capacity * sizeof *work->heap);
    if (!work->nodes || !work->heap) return spk_fail(err, SPK_E_MEMORY, "no memory to tokenize %zu bytes", count);
    work->capacity = capacity;
    return SPK_OK;
}

/* Look up the merge of a node with its next one, and note it. */
static void offer(const spk_bpe *bpe, node *nodes, uint32_t at, heap *h) {
    node *n = &nodes[at];
    n->rank = UINT32_MAX;
    if (n->next == NOWHERE) return;
    const spk_merge_slot *slot = slot_of(bpe, n->symbol, nodes[n->next].symbol);
    if (slot->rank == UINT32_MAX) return;
    n->rank = slot->rank;
    n->merged = slot->merged;
    heap_push(h, (uint64_t)slot->rank << 32 | at);
}

spk_status spk_id_list_push(spk_id_list *list, uint32_t id, spk_error *err) {
    if (list->count == list->capacity) {
        const size_t capacity = list->capacity * 2 + 256;
        uint32_t *ids = realloc(list->ids, capacity * sizeof *ids);
        if (!ids) return spk_fail(err, SPK_E_MEMORY, "no memory for %zu token ids", capacity);
        list->ids = ids;
        list->capacity = capacity;
    }
    list->ids[list->count++] = id;
    return SPK_OK;
}

static spk_status put_symbol(const spk_bpe *bpe, uint32_t symbol, spk_id_list *out, spk_error *err) {
    if (symbol < bpe->token_count) return spk_id_list_push(out, symbol, err);
    size_t size_bytes;
    const char *bytes = spk_strings_at(&bpe->symbols, symbol, &size_bytes);
    for (size_t i = 0; i < size_bytes; i++) {
        const uint32_t id = bpe->byte_symbols[(unsigned char)bytes[i]];
        if (id >= bpe->token_count)
            return spk_fail(err, SPK_E_MISSING, "the vocabulary has no token for byte 0x%02X",
                            (unsigned)(unsigned char)bytes[i]);
        SPK_TRY(spk_id_list_push(out, id, err));
    }
    return SPK_OK;
}

spk_status spk_bpe_encode(const spk_bpe *bpe, const char *piece, size_t size_bytes, spk_bpe_work *work,
                          spk_id_list *out, spk_error *err) {
    if (size_bytes == 1) return put_symbol(bpe, bpe->byte_symbols[(unsigned char)piece[0]], out, err);
    SPK_TRY(work_reserve(work, size_bytes, err));
    node *nodes = work->nodes;
    heap h = { .entries = work->heap };
    for (uint32_t i = 0; i < size_bytes; i++) {
        nodes[i].symbol = bpe->byte_symbols[(unsigned char)piece[i]];
        nodes[i].previous = i ? i - 1 : NOWHERE;
        nodes[i].next = i + 1 < size_bytes ? i + 1 : NOWHERE;
    }
    for (uint32_t i = 0; i < size_bytes; i++) offer(bpe, nodes, i, &h);

    while (h.count) {
        const uint64_t entry = heap_pop(&h);
        const uint32_t at = (uint32_t)entry;
        node *left = &nodes[at];
        if (left->rank != entry >> 32) continue;
        node *right = &nodes[left->next];
        right->rank = UINT32_MAX;
        left->symbol = left->merged;
        left->next = right->next;
        if (left->next != NOWHERE) nodes[left->next].previous = at;
        offer(bpe, nodes, at, &h);
        if (left->previous != NOWHERE) offer(bpe, nodes, left->previous, &h);
    }
    for (uint32_t i = 0; i != NOWHERE; i = nodes[i].next) SPK_TRY(put_symbol(bpe, nodes[i].symbol, out, err));
    return SPK_OK;
}
