/* requant/quant_blocks_internal.h - fits to GGML's blocks, for a GPU too: its eight threads take every eighth part each
 * (first = 0..7, step = 8), a CPU all (0, 1).
 */
#ifndef SPK_QUANT_BLOCKS_INTERNAL_H
#define SPK_QUANT_BLOCKS_INTERNAL_H

#include <string.h>

#include "requant/quant_internal.h"

/* Eight codes of a row as one little-endian word, lane 0 in the lowest byte. */
SPK_QUANT_INLINE uint64_t spk_quant_eight_codes(const void *codes) {
    uint64_t word;
    memcpy(&word, codes, sizeof word);
    return word;
}

/* The other way: spk_k4_scale_min. */
SPK_QUANT_INLINE void spk_quant_pack_scales(const uint8_t scale[8], const uint8_t min[8], size_t first, size_t step, uint8_t packed[12]) {
    for (size_t j = first; j < 4; j += step) {
        packed[j] = (uint8_t)(scale[j] | (scale[j + 4] >> 4) << 6);
        packed[j + 4] = (uint8_t)(min[j] | (min[j + 4] >> 4) << 6);
        packed[j + 8] = (uint8_t)((scale[j + 4] & 15) | (min[j + 4] & 15) << 4);
    }
}

/* The low nibbles of lanes 2c and 2c + 1 share a byte of chunk c. */
SPK_QUANT_INLINE void spk_quant_pack_nibbles(uint64_t codes, uint8_t *chunks, size_t l) {
    uint64_t low = codes & UINT64_C(0x0F0F0F0F0F0F0F0F), pairs = low | low >> 4;
    for (size_t c = 0; c < 4; c++) chunks[32 * c + l] = (uint8_t)(pairs >> (16 * c));
}

/* All but the codes. */
SPK_QUANT_INLINE void spk_quant_pack_q4_k_head(const spk_quant_affine_fit *fit, size_t first, size_t step, spk_block_q4_k *out) {
    if (first == 0) {
        out->d = fit->d;
        out->dmin = fit->dmin;
    }
    spk_quant_pack_scales(fit->scale, fit->min, first, step, out->scales);
}

SPK_QUANT_INLINE void spk_quant_pack_q4_k(const spk_quant_affine_fit *fit, size_t first, size_t step, spk_block_q4_k *out) {
    spk_quant_pack_q4_k_head(fit, first, step, out);
    for (size_t l = first; l < 32; l += step) spk_quant_pack_nibbles(spk_quant_eight_codes(fit->code[l]), out->qs, l);
}

SPK_QUANT_INLINE void spk_quant_pack_q5_k(const spk_quant_affine_fit *fit, size_t first, size_t step, spk_block_q5_k *out) {
    if (first == 0) {
        out->d = fit->d;
        out->dmin = fit->dmin;
    }
    spk_quant_pack_scales(fit->scale, fit->min, first, step, out->scales);
    for (size_t l = first; l < 32; l += step) {
        uint64_t codes = spk_quant_eight_codes(fit->code[l]), high = codes >> 4 & UINT64_C(0x0101010101010101);
        spk_quant_pack_nibbles(codes, out->qs, l);
        /* Gathers bit 8 j of the word into bit j of the top byte. */
        out->qh[l] = (uint8_t)(high * UINT64_C(0x0102040810204080) >> 56);
    }
}

SPK_QUANT_INLINE void spk_quant_pack_q6_k(const spk_quant_q6_fit *fit, size_t first, size_t step, spk_block_q6_k *out) {
    if (first == 0) out->d = fit->d;
    for (size_t s = first; s < 2 * SPK_QUANT_LANES; s += step) out->scales[s] = fit->scale[s];
    for (size_t i = first; i < 64; i += step) {
        /* Weights 128 t + 32 k + l, k = 0..3: lanes 2k + l / 16 of one row of the tile. */
        size_t t = i / 32, l = i % 32;
        const int8_t *row = fit->code[16 * t + l % 16] + l / 16;
        unsigned code[4];
        for (size_t k = 0; k < 4; k++) code[k] = (unsigned)(row[2 * k] - SPK_QUANT_Q6_CODE_MIN);
        out->ql[64 * t + l] = (uint8_t)((code[0] & 15) | (code[2] & 15) << 4);
        out->ql[64 * t + 32 + l] = (uint8_t)((code[1] & 15) | (code[3] & 15) << 4);
        out->qh[32 * t + l] = (uint8_t)(code[0] >> 4 | code[1] >> 4 << 2 | code[2] >> 4 << 4 | code[3] >> 4 << 6);
    }
}

SPK_QUANT_INLINE void spk_quant_pack_q8_0(const spk_quant_q8_fit *fit, size_t first, size_t step,
                                          spk_block_q8_0 out[SPK_QUANT_LANES]) {
    for (size_t j = first; j < SPK_QUANT_LANES; j += step) {
        out[j].d = fit->d[j];
        for (size_t i = 0; i < 32; i++) out[j].qs[i] = fit->code[i][j];
    }
}

#endif
