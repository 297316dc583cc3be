/* kernels/activation.c - the memory of one prepared activation vector.
 *
 * Owns the order and alignment of its arrays.  What they mean is in kernels.h; filling them is each table's quantize.
 */
#include "kernels/kernels_internal.h"

#include <assert.h>

static const uint64_t ALIGN_BYTES = 64;

static uint64_t f32_bytes(uint64_t col_count) {
    return (col_count * sizeof(float) + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
}

uint64_t spk_activation_bytes(uint64_t col_count) {
    SPK_STATIC_ASSERT(sizeof(spk_activation_pair) % 64 == 0, "pairs stay aligned");
    if (col_count % SPK_SUPERBLOCK != 0) return f32_bytes(col_count);
    return f32_bytes(col_count) + spk_activation_pair_count(col_count) * sizeof(spk_activation_pair);
}

spk_activation spk_activation_carve(void *block, uint64_t col_count) {
    assert((uintptr_t)block % ALIGN_BYTES == 0);
    spk_activation x = { .col_count = col_count, .f32 = block };
    if (col_count % SPK_SUPERBLOCK == 0) x.pairs = (void *)((uint8_t *)block + f32_bytes(col_count));
    return x;
}

void spk_activation_residual(const spk_activation *x, float *rest) {
    uint64_t superblock_count = x->col_count / SPK_SUPERBLOCK;
    bool is_paired = superblock_count % 2 == 0;
    for (uint64_t kb = 0; kb < superblock_count; kb++) {
        const spk_activation_pair *pair = &x->pairs[is_paired ? kb / 2 : kb];
        uint64_t side = is_paired ? kb % 2 : 0;
        for (uint64_t c = 0; c < 16; c++) {
            float scale = pair->scale4[c / 2][side][0];
            for (uint64_t i = 0; i < 16; i++) {
                uint64_t at = SPK_SUPERBLOCK * kb + 16 * c + i;
                rest[at] = x->f32[at] - scale * (float)pair->q8[c][side][i];
            }
        }
    }
}
