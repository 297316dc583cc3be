/* tests/test_imatrix.c - importance matrices: both forms, fallbacks for single experts, and files that are wrong. */
#include <math.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/blocks.h"
#include "formats/gguf.h"
#include "requant/imatrix.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

enum { COLS = 4 };

static char dir[GB_PATH_MAX], path[GB_PATH_MAX];

/* ---- Files ---- */

static void put_floats(gguf_build *b, const float *values, size_t count) { gb_raw(b, values, count * sizeof *values); }

/* NAME.in_sum2 [COLS, rows] and NAME.counts [1, count_count]. */
static void make_gguf(gguf_build *b, const char *general_type, const float *sums, size_t rows, const float *counts,
                      size_t count_count) {
    gb_header(b, 3, 2, 1);
    gb_kv_string(b, "general.type", general_type);
    gb_tensor(b, "a.weight.in_sum2", SPK_TYPE_F32, 0, GB_DIMS(COLS, rows));
    gb_tensor(b, "a.weight.counts", SPK_TYPE_F32, (rows * COLS * 4 + 31) / 32 * 32, GB_DIMS(1, count_count));
    gb_pad(b, 32);
    put_floats(b, sums, rows * COLS);
    gb_pad(b, 32);
    put_floats(b, counts, count_count);
    gb_pad(b, 32);
}

static void put_dat_entry(gguf_build *b, const char *name, int32_t calls, const float *values, int32_t value_count) {
    gb_u32(b, (uint32_t)strlen(name));
    gb_raw(b, name, strlen(name));
    gb_u32(b, (uint32_t)calls);
    gb_u32(b, (uint32_t)value_count);
    put_floats(b, values, (size_t)value_count);
}

static spk_imatrix *open_saved(gguf_build *b) {
    spk_error    err = { 0 };
    spk_imatrix *imatrix = NULL;
    gb_save(b, path);
    gb_free(b);
    CHECK_OK(spk_imatrix_open(path, &imatrix, &err), err);
    return imatrix;
}

static void expect_refusal(gguf_build *b, spk_status status, const char *text, const char *what) {
    spk_error    err = { 0 };
    spk_imatrix *imatrix = NULL;
    gb_save(b, path);
    gb_free(b);
    spk_status got = spk_imatrix_open(path, &imatrix, &err);
    CHECK(got == status, "%s: %s, %s", what, spk_status_name(got), err.text);
    CHECK(strstr(err.text, text) != NULL && strstr(err.text, path) != NULL, "%s: %s", what, err.text);
    CHECK(imatrix == NULL, "%s: an object on failure", what);
    spk_imatrix_close(imatrix);
}

static const float *look_up(const spk_imatrix *imatrix, const char *name, uint64_t matrix_count, uint64_t index,
                            spk_imatrix_answer want) {
    spk_error          err = { 0 };
    spk_imatrix_answer answer = SPK_IMATRIX_ABSENT;
    const float       *values = NULL;
    CHECK_OK(spk_imatrix_lookup(imatrix, name, COLS, matrix_count, index, &answer, &values, &err), err);
    CHECK(answer == want, "%s matrix %d: answer %d, expected %d", name, (int)index, (int)answer, (int)want);
    CHECK((values != NULL) == (answer == SPK_IMATRIX_FOUND), "%s matrix %d: values and answer %d", name, (int)index,
          (int)answer);
    return values;
}

static void expect_values(const float *values, const float want[COLS], const char *what) {
    for (size_t c = 0; c < COLS && values != NULL; c++)
        CHECK(fabsf(values[c] - want[c]) <= 1e-6f * want[c], "%s: column %zu is %g, expected %g", what, c,
              (double)values[c], (double)want[c]);
}

/* ---- Tests ---- */

static void reads_what_llama_imatrix_wrote(void) {
    enum { WIDTH = 256, EXPERTS = 8 };
    static const char file[] = "tests/models/tiny-qwen36.imatrix.gguf", name[] = "blk.3.ffn_gate_exps.weight";
    spk_error    err = { 0 };
    spk_imatrix *imatrix = NULL;
    spk_gguf    *gguf = NULL;
    CHECK_OK(spk_imatrix_open(file, &imatrix, &err), err);
    CHECK_OK(spk_gguf_open(file, &gguf, &err), err);
    if (imatrix != NULL && gguf != NULL) {
        CHECK(spk_imatrix_entry_count(imatrix) * 2 == spk_gguf_tensor_count(gguf), "%d entries",
              (int)spk_imatrix_entry_count(imatrix));
        const spk_gguf_tensor *sums = spk_gguf_tensor_find(gguf, "blk.3.ffn_gate_exps.weight.in_sum2");
        CHECK(sums != NULL && sums->size_bytes == sizeof(float) * WIDTH * EXPERTS, "the model has changed");
        for (uint64_t e = 0; e < EXPERTS; e++) {
            spk_imatrix_answer answer = SPK_IMATRIX_ABSENT;
            const float       *values = NULL;
            CHECK_OK(spk_imatrix_lookup(imatrix, name, WIDTH, EXPERTS, e, &answer, &values, &err), err);
            CHECK(answer == SPK_IMATRIX_FOUND, "expert %d", (int)e);
            double mean = 0, raw_mean = 0;
            float  raw[WIDTH] = { 0 };
            if (sums != NULL) memcpy(raw, sums->data + e * sizeof raw, sizeof raw);
            for (size_t c = 0; c < WIDTH && values != NULL; c++) {
                mean += (double)values[c] / WIDTH;
                raw_mean += (double)raw[c] / WIDTH;
            }
            CHECK(fabs(mean - 1) < 1e-6, "expert %d: mean %g", (int)e, mean);
            for (size_t c = 0; c < WIDTH && values != NULL; c++)
                CHECK(fabs((double)values[c] - (double)raw[c] / raw_mean) <= 1e-6 * (double)values[c],
                      "expert %d column %zu", (int)e, c);
        }
    }
    spk_gguf_close(gguf);
    spk_imatrix_close(imatrix);
}

static void one_expert_falls_back_alone(void) {
    static const float sums[7 * COLS] = {
        2, 4, 6, 8,   9, 9, 9, 9,   1, NAN, 1, 1,   1, 1, INFINITY, 1,   1, -1, 1, 1,   0, 0, 0, 0,   0, 0, 3, 5,
    };
    static const float counts[7] = { 100, 0, 5, 5, 5, 5, 2 };
    static const float first[COLS] = { 0.4f, 0.8f, 1.2f, 1.6f }, last[COLS] = { 0, 0, 1.5f, 2.5f };
    gguf_build b = { 0 };
    make_gguf(&b, "imatrix", sums, 7, counts, 7);
    spk_imatrix *imatrix = open_saved(&b);
    if (imatrix == NULL) return;
    CHECK(spk_imatrix_entry_count(imatrix) == 1, "%d entries", (int)spk_imatrix_entry_count(imatrix));
    expect_values(look_up(imatrix, "a.weight", 7, 0, SPK_IMATRIX_FOUND), first, "first");
    for (uint64_t e = 1; e < 6; e++) look_up(imatrix, "a.weight", 7, e, SPK_IMATRIX_UNUSABLE);
    expect_values(look_up(imatrix, "a.weight", 7, 6, SPK_IMATRIX_FOUND), last, "last");
    look_up(imatrix, "a", 7, 0, SPK_IMATRIX_ABSENT);
    look_up(imatrix, "a.weight.in_sum2", 7, 0, SPK_IMATRIX_ABSENT);
    spk_imatrix_close(imatrix);
}

static void counts_that_are_no_numbers_count_as_never(void) {
    static const float sums[3 * COLS] = { 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4 }, counts[3] = { NAN, -1, INFINITY };
    gguf_build b = { 0 };
    make_gguf(&b, "imatrix", sums, 3, counts, 3);
    spk_imatrix *imatrix = open_saved(&b);
    if (imatrix == NULL) return;
    look_up(imatrix, "a.weight", 3, 0, SPK_IMATRIX_UNUSABLE);
    look_up(imatrix, "a.weight", 3, 1, SPK_IMATRIX_UNUSABLE);
    spk_imatrix_close(imatrix);
}

static void shapes_must_agree(void) {
    static const float sums[2 * COLS] = { 1, 1, 1, 1, 1, 1, 1, 1 }, counts[2] = { 1, 1 };
    static const struct { uint64_t col_count, matrix_count; } wrong[] = {
        { COLS, 1 }, { COLS, 3 }, { 2 * COLS, 1 }, { 2, 4 }, { 3, 2 }, { COLS, UINT64_MAX } };
    gguf_build b = { 0 };
    make_gguf(&b, "imatrix", sums, 2, counts, 2);
    spk_imatrix *imatrix = open_saved(&b);
    if (imatrix == NULL) return;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        spk_error          err = { 0 };
        spk_imatrix_answer answer;
        const float       *values = NULL;
        spk_status status = spk_imatrix_lookup(imatrix, "a.weight", wrong[i].col_count, wrong[i].matrix_count, 0,
                                               &answer, &values, &err);
        CHECK(status == SPK_E_MISMATCH && strstr(err.text, "a.weight") != NULL, "case %zu: %s", i, err.text);
    }
    spk_imatrix_close(imatrix);
}

static void both_forms_say_the_same(void) {
    /* Two experts; .dat: means of x^2 times the number of calls, one after another. */
    static const float values[2 * COLS] = { 3, 6, 9, 12, 6, 6, 12, 6 };
    static const float want[2][COLS] = { { 0.4f, 0.8f, 1.2f, 1.6f }, { 0.8f, 0.8f, 1.6f, 0.8f } };
    for (int trailer = 0; trailer < 3; trailer++) {
        gguf_build b = { 0 };
        gb_u32(&b, 2);
        put_dat_entry(&b, "a.weight", 3, values, 2 * COLS);
        put_dat_entry(&b, "b.weight", 3, values + COLS, COLS);
        if (trailer > 0) gb_u32(&b, 3);
        if (trailer > 1) {
            gb_u32(&b, 5);
            gb_raw(&b, "x.txt", 5);
        }
        spk_imatrix *imatrix = open_saved(&b);
        if (imatrix == NULL) continue;
        CHECK(spk_imatrix_entry_count(imatrix) == 2, "%d entries", (int)spk_imatrix_entry_count(imatrix));
        expect_values(look_up(imatrix, "b.weight", 1, 0, SPK_IMATRIX_FOUND), want[1], "dat, one matrix");
        for (uint64_t e = 0; e < 2; e++) {
            const float *got = look_up(imatrix, "a.weight", 2, e, SPK_IMATRIX_FOUND);
            /* One mean over both experts: compare shapes. */
            for (size_t c = 1; c < COLS && got != NULL; c++)
                CHECK(fabsf(got[c] / got[0] - want[e][c] / want[e][0]) < 1e-6f, "dat, expert %d column %zu", (int)e, c);
        }
        spk_imatrix_close(imatrix);
    }
    gguf_build b = { 0 };                                  /* as made from a .dat file: one row, one count */
    gb_header(&b, 3, 2, 1);
    gb_kv_string(&b, "general.type", "imatrix");
    gb_tensor(&b, "a.weight.in_sum2", SPK_TYPE_F32, 0, GB_DIMS(2 * COLS, 1));
    gb_tensor(&b, "a.weight.counts", SPK_TYPE_F32, 32, GB_DIMS(1, 1));
    gb_pad(&b, 32);
    put_floats(&b, values, 2 * COLS);
    put_floats(&b, (const float[]){ 512 }, 1);
    gb_pad(&b, 32);
    spk_imatrix *imatrix = open_saved(&b);
    if (imatrix == NULL) return;
    for (uint64_t e = 0; e < 2; e++) look_up(imatrix, "a.weight", 2, e, SPK_IMATRIX_FOUND);
    spk_imatrix_close(imatrix);
}

static void dat_experts_fall_back_alone(void) {
    static const float values[4 * COLS] = { 1, 2, 3, 4, 0, 0, 0, 0, 1, NAN, 2, 3, 5, 5, 5, 5 };
    gguf_build b = { 0 };
    gb_u32(&b, 3);
    put_dat_entry(&b, "a", 2, values, 4 * COLS);
    put_dat_entry(&b, "never", 0, values, COLS);
    put_dat_entry(&b, "less", -3, values, COLS);
    spk_imatrix *imatrix = open_saved(&b);
    if (imatrix == NULL) return;
    look_up(imatrix, "a", 4, 0, SPK_IMATRIX_FOUND);
    look_up(imatrix, "a", 4, 1, SPK_IMATRIX_UNUSABLE);
    look_up(imatrix, "a", 4, 2, SPK_IMATRIX_UNUSABLE);
    look_up(imatrix, "a", 4, 3, SPK_IMATRIX_FOUND);
    look_up(imatrix, "never", 1, 0, SPK_IMATRIX_UNUSABLE);
    look_up(imatrix, "less", 1, 0, SPK_IMATRIX_UNUSABLE);
    spk_imatrix_close(imatrix);
}

static void wrong_gguf_files_are_refused(void) {
    static const float sums[2 * COLS] = { 1, 1, 1, 1, 1, 1, 1, 1 }, counts[3] = { 1, 1, 1 };
    gguf_build b = { 0 };
    make_gguf(&b, "model", sums, 2, counts, 2);
    expect_refusal(&b, SPK_E_MISMATCH, "'model'", "a model");
    make_gguf(&b, "imatrix", sums, 2, counts, 3);
    expect_refusal(&b, SPK_E_CORRUPT, "2 rows, but 3 counts", "counts");

    gb_header(&b, 3, 0, 0);
    expect_refusal(&b, SPK_E_MISMATCH, "general.type", "no type");
    gb_header(&b, 3, 0, 1);
    gb_kv_string(&b, "general.type", "imatrix");
    expect_refusal(&b, SPK_E_CORRUPT, "no entries", "nothing in it");

    static const char *const lonely[] = { "a.in_sum2", "a.counts" };
    for (size_t i = 0; i < 2; i++) {
        gb_header(&b, 3, 1, 1);
        gb_kv_string(&b, "general.type", "imatrix");
        gb_tensor(&b, lonely[i], SPK_TYPE_F32, 0, GB_DIMS(COLS, 1));
        gb_pad(&b, 32);
        put_floats(&b, sums, COLS);
        gb_pad(&b, 32);
        expect_refusal(&b, SPK_E_CORRUPT, "beside it", lonely[i]);
    }
    for (size_t i = 0; i < 2; i++) {
        gb_header(&b, 3, 2, 1);
        gb_kv_string(&b, "general.type", "imatrix");
        gb_tensor(&b, "a.in_sum2", i == 0 ? SPK_TYPE_F16 : SPK_TYPE_F32, 0, GB_DIMS(COLS, 1));
        gb_tensor(&b, "a.counts", i == 1 ? SPK_TYPE_F16 : SPK_TYPE_F32, 32, GB_DIMS(1, 1));
        gb_pad(&b, 32);
        gb_fill(&b, 0, 64);
        expect_refusal(&b, SPK_E_CORRUPT, "must be F32", i == 0 ? "half sums" : "half counts");
    }
}

static void wrong_dat_files_are_refused(void) {
    static const float values[COLS] = { 1, 2, 3, 4 };
    static const struct { uint32_t entries, name_bytes, value_count; spk_status status; const char *text; } bad[] = {
        { 0, 1, COLS, SPK_E_MAGIC, "neither GGUF" },
        { 0xFFFFFFFF, 1, COLS, SPK_E_MAGIC, "neither GGUF" },
        { 65537, 1, COLS, SPK_E_MAGIC, "neither GGUF" },
        { 1, 0, COLS, SPK_E_CORRUPT, "name of 0 bytes" },
        { 1, 0x80000000, COLS, SPK_E_CORRUPT, "name of -2147483648 bytes" },
        { 1, 64, COLS, SPK_E_CORRUPT, "name of 64 bytes" },
        { 1, 1, 0, SPK_E_CORRUPT, "0 values" },
        { 1, 1, 0xFFFFFFFF, SPK_E_CORRUPT, "-1 values" },
        { 1, 1, 1 << 26, SPK_E_CORRUPT, "67108864 values need" },
        { 1, 1, 0x7FFFFFFF, SPK_E_LIMIT, "2147483647 values" },
        { 2, 1, COLS, SPK_E_CORRUPT, "ends in a name's length" },
    };
    gguf_build b = { 0 };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        gb_u32(&b, bad[i].entries);
        put_dat_entry(&b, "a", 1, values, COLS);
        gb_u32_at(&b, 4, bad[i].name_bytes);
        gb_u32_at(&b, 13, bad[i].value_count);
        expect_refusal(&b, bad[i].status, bad[i].text, bad[i].text);
    }
    gb_u32(&b, 2);
    put_dat_entry(&b, "twice", 1, values, COLS);
    put_dat_entry(&b, "twice", 1, values, COLS);
    expect_refusal(&b, SPK_E_CORRUPT, "'twice'", "duplicate");
    gb_u32(&b, 1);
    put_dat_entry(&b, "abc", 1, values, COLS);
    b.bytes[9] = 0;
    expect_refusal(&b, SPK_E_CORRUPT, "NUL", "NUL in a name");
}

static void every_shortened_file_is_refused(void) {
    static const float values[2 * COLS] = { 1, 2, 3, 4, 5, 6, 7, 8 }, counts[2] = { 1, 1 };
    for (int form = 0; form < 2; form++) {
        gguf_build whole = { 0 };
        if (form == 0) {
            gb_u32(&whole, 2);
            put_dat_entry(&whole, "a", 1, values, COLS);
            put_dat_entry(&whole, "b", 1, values, 2 * COLS);
        } else {
            make_gguf(&whole, "imatrix", values, 2, counts, 2);
            while (whole.bytes[whole.size - 1] == 0) whole.size--;     /* padding may be missing */
        }
        for (size_t size = 0; size < whole.size; size++) {
            gguf_build   part = { whole.bytes, size, size };
            spk_error    err = { 0 };
            spk_imatrix *imatrix = NULL;
            gb_save(&part, path);
            CHECK(spk_imatrix_open(path, &imatrix, &err) != SPK_OK, "form %d, %zu bytes", form, size);
            CHECK(strlen(err.text) > 0, "form %d, %zu bytes: no message", form, size);
        }
        gb_free(&whole);
    }
}

static void what_is_no_file_is_refused(void) {
    spk_error    err = { 0 };
    spk_imatrix *imatrix = NULL;
    CHECK(spk_imatrix_open(dir, &imatrix, &err) == SPK_E_IO, "directory: %s", err.text);
    char absent[GB_PATH_MAX];
    CHECK(spk_imatrix_open(gb_path(absent, dir, "absent"), &imatrix, &err) == SPK_E_IO, "absent: %s", err.text);
    CHECK(strstr(err.text, "absent") != NULL, "%s", err.text);
    char pipe[GB_PATH_MAX];
    CHECK(mkfifo(gb_path(pipe, dir, "pipe"), 0600) == 0, "mkfifo");
    CHECK(spk_imatrix_open(pipe, &imatrix, &err) == SPK_E_IO && strstr(err.text, "is a pipe"), "a pipe: %s", err.text);
    (void)remove(pipe);
    spk_imatrix_close(NULL);
}

int main(void) {
    gb_make_dir(dir);
    gb_path(path, dir, "test.imatrix");
    RUN(reads_what_llama_imatrix_wrote);
    RUN(one_expert_falls_back_alone);
    RUN(counts_that_are_no_numbers_count_as_never);
    RUN(shapes_must_agree);
    RUN(both_forms_say_the_same);
    RUN(dat_experts_fall_back_alone);
    RUN(wrong_gguf_files_are_refused);
    RUN(wrong_dat_files_are_refused);
    RUN(every_shortened_file_is_refused);
    RUN(what_is_no_file_is_refused);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
