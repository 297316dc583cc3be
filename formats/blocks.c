/* formats/blocks.c - the type table: see blocks.h.
 *
 * Owns which GGML types spk can read, their block sizes, and names for the ids that it cannot read, so that a message
 * says "IQ2_XS" and not "type 17".
 * What a newcomer gets wrong: a known id is not a readable one; ask spk_type_find() before using a size.
 */
#include "formats/blocks.h"

#include <stdio.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "spk reads block fields as they lie in the file, which is little-endian: this machine is not"
#endif
SPK_STATIC_ASSERT(sizeof(float) == 4, "weights are IEEE single precision");

#define TYPE_ROW(name, weights, bytes, quantized) \
    [SPK_TYPE_##name] = { SPK_TYPE_##name, #name, (weights), (bytes), (quantized) }

/* Indexed by id; rows without a name are ids that spk cannot read. */
static const spk_type_info types[SPK_TYPE_LIMIT] = {
    TYPE_ROW(F32, 1, 4, 0),
    TYPE_ROW(F16, 1, 2, 0),
    TYPE_ROW(BF16, 1, 2, 0),
    TYPE_ROW(Q4_0, 32, sizeof(spk_block_q4_0), 1),
    TYPE_ROW(Q4_1, 32, sizeof(spk_block_q4_1), 1),
    TYPE_ROW(Q5_0, 32, sizeof(spk_block_q5_0), 1),
    TYPE_ROW(Q5_1, 32, sizeof(spk_block_q5_1), 1),
    TYPE_ROW(Q8_0, 32, sizeof(spk_block_q8_0), 1),
    TYPE_ROW(Q2_K, SPK_SUPERBLOCK, sizeof(spk_block_q2_k), 1),
    TYPE_ROW(Q3_K, SPK_SUPERBLOCK, sizeof(spk_block_q3_k), 1),
    TYPE_ROW(Q4_K, SPK_SUPERBLOCK, sizeof(spk_block_q4_k), 1),
    TYPE_ROW(Q5_K, SPK_SUPERBLOCK, sizeof(spk_block_q5_k), 1),
    TYPE_ROW(Q6_K, SPK_SUPERBLOCK, sizeof(spk_block_q6_k), 1),
    TYPE_ROW(IQ4_NL, 32, sizeof(spk_block_iq4_nl), 1),
    TYPE_ROW(IQ4_XS, SPK_SUPERBLOCK, sizeof(spk_block_iq4_xs), 1),
};

/* Other ids that GGML has given out, for messages only. */
static const char *const other_names[SPK_TYPE_LIMIT] = {
    [4] = "Q4_2 (withdrawn)",
    [5] = "Q4_3 (withdrawn)",
    [9] = "Q8_1",
    [15] = "Q8_K",
    [16] = "IQ2_XXS",
    [17] = "IQ2_XS",
    [18] = "IQ3_XXS",
    [19] = "IQ1_S",
    [21] = "IQ3_S",
    [22] = "IQ2_S",
    [24] = "I8",
    [25] = "I16",
    [26] = "I32",
    [27] = "I64",
    [28] = "F64",
    [29] = "IQ1_M",
    [31] = "Q4_0_4_4 (withdrawn)",
    [32] = "Q4_0_4_8 (withdrawn)",
    [33] = "Q4_0_8_8 (withdrawn)",
    [34] = "TQ1_0",
    [35] = "TQ2_0",
    [36] = "IQ4_NL_4_4 (withdrawn)",
    [37] = "IQ4_NL_4_8 (withdrawn)",
    [38] = "IQ4_NL_8_8 (withdrawn)",
    [39] = "MXFP4",
    [40] = "NVFP4",
    [41] = "Q1_0",
    [42] = "Q2_0",
};

const spk_type_info *spk_type_find(uint32_t type) {
    return type < SPK_TYPE_LIMIT && types[type].name != NULL ? &types[type] : NULL;
}

const spk_type_info *spk_type_find_name(const char *name) {
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++)
        if (types[type].name != NULL && strcmp(types[type].name, name) == 0) return &types[type];
    return NULL;
}

const char *spk_type_name(uint32_t type) {
    if (type < SPK_TYPE_LIMIT && types[type].name != NULL) return types[type].name;
    if (type < SPK_TYPE_LIMIT && other_names[type] != NULL) return other_names[type];
    /* A few per thread, so that one message can name two unknown types. */
    static _Thread_local char unknown[4][16];
    static _Thread_local uint32_t next;
    char *text = unknown[next++ % 4];
    (void)snprintf(text, sizeof unknown[0], "type %u", type);
    return text;
}
