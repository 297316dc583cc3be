/* tests/checkkern_guarded.h - buffers on the host in which a write outside, or a read past the end, shows. */
#ifndef SPK_CHECKKERN_GUARDED_H
#define SPK_CHECKKERN_GUARDED_H

#include "tests/checkkern_common.h"

/* Poisoned bytes with poisoned guards on both sides; data is 64-byte aligned. */
typedef struct {
    uint8_t *block, *data;
    size_t   size_bytes;
} guarded;

static guarded guarded_new(size_t size_bytes) {
    size_t whole = (size_bytes + 2 * GUARD_BYTES + 63) / 64 * 64;
    guarded g = { .block = must(aligned_alloc(64, whole)), .size_bytes = size_bytes };
    memset(g.block, POISON, whole);
    g.data = g.block + GUARD_BYTES;
    return g;
}

static float *guarded_floats(const guarded *g) { return (float *)(void *)g->data; }

static bool guards_hold(const guarded *g) {
    for (size_t i = 0; i < GUARD_BYTES; i++)
        if (g->block[i] != POISON || g->data[g->size_bytes + i] != POISON) return false;
    return true;
}

static void guarded_free(guarded *g) {
    EXPECT(guards_hold(g), "wrote outside its output");
    free(g->block);
}

/* Inputs end where their allocation ends, so that the sanitizer sees a read too far. */
static float *new_floats(size_t count) {
    return must(aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64));
}

#endif
