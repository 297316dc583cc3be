/* tests/fuzz_imatrix.c - importance matrices in both forms: what is found is finite, not negative, and not all zero.  And what
 * spk-calibrate adds to them: moments are finite and symmetric, their diagonal is above zero, with a mean of 1. */
#include <math.h>

#include "formats/blocks.h"
#include "requant/calibration.h"
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

static void look_up_moments(const spk_calibration *calibration, const char *name, uint64_t cols, uint64_t matrices) {
    float moment[32 * 32];
    for (uint64_t m = 0; m < matrices; m++) {
        spk_calibration_answer answer;
        spk_error err;
        spk_status status = spk_calibration_moment(calibration, name, cols, matrices, m, &answer, moment, &err);
        if (status != SPK_OK) {
            FUZZ_ASSERT(status == SPK_E_MISMATCH || status == SPK_E_CORRUPT, "%s", err.text);
            continue;
        }
        if (answer != SPK_CALIBRATION_FOUND) continue;
        fuzz_accepted_count++;
        double trace = 0;
        for (uint64_t i = 0; i < cols; i++) {
            FUZZ_ASSERT(moment[i * cols + i] > 0, "diagonal %g", (double)moment[i * cols + i]);
            trace += (double)moment[i * cols + i];
            for (uint64_t j = 0; j < i; j++) {
                float below = moment[i * cols + j], above = moment[j * cols + i];
                FUZZ_ASSERT(isfinite(below) && memcmp(&below, &above, sizeof below) == 0, "moment %g", (double)below);
            }
        }
        FUZZ_ASSERT(fabs(trace / (double)cols - 1) < 1e-3, "mean of the diagonal %g", trace / (double)cols);
    }
}

static void read_as_calibration(const char *path) {
    static const uint64_t cols[] = { 2, 4, 8, 16, 32 };
    spk_calibration *calibration = NULL;
    spk_error err = { 0 };
    if (spk_calibration_open(path, &calibration, &err) != SPK_OK) {
        FUZZ_ASSERT(err.text[0] != '\0', "no message");
        return;
    }
    for (size_t n = 0; n < 2; n++)
        for (size_t c = 0; c < 5; c++)
            for (uint64_t m = 1; m <= 2; m++) look_up_moments(calibration, names[n], cols[c], m);
    spk_calibration_close(calibration);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
    static const uint64_t cols[] = { 1, 4, 8, 16, 32 }, matrices[] = { 1, 2, 4 };
    spk_imatrix *imatrix = NULL;
    spk_error err = { 0 };
    const char *path = fuzz_file(bytes, size);
    read_as_calibration(path);
    if (spk_imatrix_open(path, &imatrix, &err) != SPK_OK) {
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

/* As spk-calibrate writes it: one matrix of 8 columns, or two. */
static void seed_calibration(uint64_t matrices) {
    gguf_build b = { 0 };
    gb_header(&b, 3, 4, 1);
    gb_kv_string(&b, "general.type", "imatrix");
    gb_tensor(&b, "a.weight.in_sum2", SPK_TYPE_F32, 0, GB_DIMS(8, matrices));
    gb_tensor(&b, "a.weight.counts", SPK_TYPE_F32, 32 * matrices, GB_DIMS(1, matrices));
    gb_tensor(&b, "a.weight.in_scale", SPK_TYPE_F32, 32 * matrices + 32, GB_DIMS(8, matrices));
    gb_tensor(&b, "a.weight.in_moment", SPK_TYPE_F16, 64 * matrices + 32, GB_DIMS(28, matrices));
    gb_pad(&b, 32);
    put_floats(&b, 8 * matrices);
    for (uint64_t m = 0; m < matrices; m++) gb_raw(&b, &(float){ 20 }, 4);
    gb_pad(&b, 32);
    put_floats(&b, 8 * matrices);
    for (uint64_t i = 0; i < 28 * matrices; i++) {
        uint16_t half = spk_f32_to_f16(0.25f - 0.125f * (float)(i % 3));
        gb_raw(&b, &half, sizeof half);
    }
    gb_pad(&b, 32);
    fuzz_seed(b.bytes, b.size);
    gb_free(&b);
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
        seed_calibration(matrices);
    }
}
