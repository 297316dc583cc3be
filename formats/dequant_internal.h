/* formats/dequant_internal.h - the types that are decoded in vectors, compiled once for each kind; private to formats/. */
#ifndef SPK_DEQUANT_INTERNAL_H
#define SPK_DEQUANT_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Blocks lying one after another to floats; no alignment is needed. */
typedef void spk_dequant_rows(const uint8_t *restrict blocks, uint64_t block_count, float *restrict out);

typedef struct {
    const char       *name;
    bool            (*usable)(void);
    spk_dequant_rows *f16, *bf16, *q8_0, *q4_k, *q5_k, *q6_k;
} spk_dequant_build;

#define SPK_DEQUANT_DECLARE(build)                                                                                    \
    spk_dequant_rows spk_dequant_f16_##build, spk_dequant_bf16_##build, spk_dequant_q8_0_##build,                    \
                     spk_dequant_q4_k_##build, spk_dequant_q5_k_##build, spk_dequant_q6_k_##build
SPK_DEQUANT_DECLARE(plain);
SPK_DEQUANT_DECLARE(avx2);
SPK_DEQUANT_DECLARE(avx512);

/* The plain build first; all builds give the same bits. */
extern const spk_dequant_build spk_dequant_builds[];
extern const size_t            spk_dequant_build_count;

/* spk_dequantize with a chosen build. */
void spk_dequantize_with(const spk_dequant_build *build, uint32_t type, const void *blocks, uint64_t count, float *out);

#endif
