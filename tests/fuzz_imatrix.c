/* tests/fuzz_imatrix.c - importance matrices in both forms: what is found is finite, not negative, and not all zero. */
#include <math.h>

#include "formats/blocks.h"
#include "requant/imatrix.h"
#include "tests/fuzz.h"

static const char *const names[] = { "a.weight", "b.weight" };

static void look_up(const spk_imatrix *imatrix, const char *name, uint64_t cols, uint64_t matrices) {
    for (uint64_t m = 0; m < matrices; m++) {
        spk_imatrix_answer answer;
        const float *values = NULL;
        spk_error err;
        spk_status status = spk_imatrix_lookup(imatrix, name, cols, matrices, m, &answer, &values, &err);
        if (status != SPK_OK) {
            FUZZ_ASSERT(status == SPK_E_MISMATCH, "%s", err.text);
            return;
        }
        FUZZ_ASSERT((values != NULL) == (answer == SPK_IMATRIX_FOUND), "answer %d", (int)answer);
        if (values == NULL) continue;
        fuzz_accepted_count++;
        double sum = 0;
        for (uint64_t c = 0; c < cols; c++) {
            FUZZ_ASSERT(isfinite(values[c]) && values[c] >= 0, "value %g", (double)values[c]);
            sum += (double)values[c];
        }
        FUZZ_ASSERT(sum > 0, "all of %s are zero", name);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const uint64_t cols[] = { 1, 4, 8, 16, 32 }, matrices[] = { 1, 2, 4 };
    spk_imatrix *imatrix = NULL;
    spk_error err = { 0 };
    if (spk_imatrix_open(fuzz_file(bytes, size), &imatrix, &err) != SPK_OK) {
        FUZZ_ASSERT(err.text[0] != '\0', "no message");
        return 0;
    }
    for (size_t n = 0; n < 2; n++)
        for (size_t c = 0; c < 5; c++)
            for (size_t m = 0; m < 3; m++) look_up(imatrix, names[n], cols[c], matrices[m]);
    spk_imatrix_close(imatrix);
    return 0;
}

static void put_floats(gguf_build *b, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float value = (float)(i % 7) * 0.5f;
        gb_raw(b, &value, sizeof value);
    }
}

void fuzz_seeds(void) {
    gguf_build b = { 0 };
    gb_u32(&b, 2);                                       /* .dat */
    for (int i = 0; i < 2; i++) {
        gb_u32(&b, 8);
        gb_raw(&b, names[i], 8);
        gb_u32(&b, 3);
        gb_u32(&b, 16);
        put_floats(&b, 16);
    }
    gb_u32(&b, 0);
    fuzz_seed(b.bytes, b.size);
    gb_free(&b);
    for (uint64_t matrices = 1; matrices <= 2; matrices++) {
        gb_header(&b, 3, 4, 2);
        gb_kv_string(&b, "general.type", "imatrix");
        gb_array(&b, "imatrix.datasets", SPK_KV_STRING, 1);
        gb_string(&b, "x");
        uint64_t at = 0;
        for (int i = 0; i < 2; i++) {
            char name[32];
            (void)snprintf(name, sizeof name, "%s.in_sum2", names[i]);
            gb_tensor(&b, name, SPK_TYPE_F32, at, GB_DIMS(8, matrices));
            at += 32 * matrices;
            (void)snprintf(name, sizeof name, "%s.counts", names[i]);
            gb_tensor(&b, name, SPK_TYPE_F32, at, GB_DIMS(1, matrices));
            at += 32;
        }
        gb_pad(&b, 32);
        for (int i = 0; i < 2; i++) {
            put_floats(&b, 8 * matrices);
            for (uint64_t m = 0; m < matrices; m++) gb_raw(&b, &(float){ 2 }, 4);
            gb_pad(&b, 32);
        }
        fuzz_seed(b.bytes, b.size);
        gb_free(&b);
    }
}
