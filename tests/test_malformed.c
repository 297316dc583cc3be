/* tests/test_malformed.c - broken and unusual GGUF files: each gets the right status and a message that names the file
 * and says what was found (and expected), or, where the file is merely unusual, opens.
 *
 * The files are the lines of malformed_rows.h, and the split models below.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include "formats/gguf.h"
#include "requant/convert.h"
#include "tests/check.h"
#include "tests/gguf_build.h"
#include "tests/malformed_rows.h"
#include "tests/model_build.h"

static char dir[GB_PATH_MAX];

/* Opening `path` must give `want` and a message with the texts and the name of the faulty file, which is `path` itself
 * if `faulty` is NULL. */
static void check_open(const char *id, const char *path, spk_status want, const char *faulty,
                       const char *const texts[3]) {
    const char *name = faulty != NULL ? faulty : strrchr(path, '/') + 1;
    spk_gguf   *gguf = NULL;
    spk_error   err = { 0 };
    spk_status  status = spk_gguf_open(path, &gguf, &err);
    CHECK(status == want, "%s: %s: %s", id, spk_status_name(status), err.text);
    if (status == SPK_OK) {
        spk_gguf_close(gguf);
        return;
    }
    CHECK(spk_gguf_open(path, &gguf, NULL) == want, "%s: without a place for the message", id);
    CHECK(gguf == NULL && err.status == status, "%s: output untouched, status %d", id, (int)err.status);
    CHECK(strstr(err.text, name) != NULL && strchr(err.text, '\n') == NULL, "%s: %s", id, err.text);
    for (int i = 0; i < 3 && texts[i] != NULL; i++)
        CHECK(strstr(err.text, texts[i]) != NULL, "%s: no \"%s\" in: %s", id, texts[i], err.text);
}

/* Packs the file, with the down projections requantized; OUT must not be there afterwards unless it is SPK_OK. */
static spk_status pack_row(const char *path, spk_error *err) {
    char out[GB_PATH_MAX];
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    int before = gb_file_count(dir);
    spk_status status = spk_gguf_open(path, &source, err);
    if (status == SPK_OK) status = spk_recipe_load("native", "", &recipe, err);
    if (status == SPK_OK) status = spk_recipe_set(recipe, "blk\\..*\\.ffn_down\\.weight=Q4_K", err);
    spk_convert_options options = { .source = source, .out_path = gb_path(out, dir, "row.spk"), .recipe = recipe,
                                    .imatrix_name = "", .thread_count = 2 };
    if (status == SPK_OK) status = spk_convert_plan_make(&options, &plan, err);
    if (status == SPK_OK) status = spk_convert_run(&options, &plan, err);
    if (status == SPK_OK) CHECK(remove(out) == 0, "%s: no pack", path);
    CHECK(gb_file_count(dir) == before, "%s: a file was left", path);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
    return status;
}

static spk_status take_moments(const char *path, spk_error *err) {
    float moments[9];
    spk_calibration *calibration = NULL;
    spk_calibration_answer answer = SPK_CALIBRATION_ABSENT;
    SPK_TRY(spk_calibration_open(path, &calibration, err));
    spk_status status = spk_calibration_moment(calibration, "a", 3, 1, 0, &answer, moments, err);
    CHECK(status != SPK_OK || answer == SPK_CALIBRATION_FOUND, "%s: answer %d", path, answer);
    spk_calibration_close(calibration);
    return status;
}

static void check_work(spk_status (*work)(const char *path, spk_error *err), const char *id, const char *path, spk_status want,
                       const char *const texts[3]) {
    spk_error  err = { 0 };
    spk_status status = work(path, &err);
    CHECK(status == want, "%s: %s: %s", id, spk_status_name(status), err.text);
    CHECK(status == SPK_OK || strstr(err.text, strrchr(path, '/') + 1) != NULL, "%s: %s", id, err.text);
    for (int i = 0; i < 3 && texts[i] != NULL; i++)
        CHECK(strstr(err.text, texts[i]) != NULL, "%s: no \"%s\" in: %s", id, texts[i], err.text);
}

/* The model that rows of stage PACK change. */
static void make_model(void) {
    static const model_shape shape = { 256, 2, 4, 2, 64, 2, 4, 64, 256, 64, SPK_TYPE_Q8_0 };
    char      path[GB_PATH_MAX];
    spk_gguf *gguf = NULL;
    spk_error err = { 0 };
    model_build(gb_path(path, dir, "model.gguf"), &shape, 1);
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    const spk_gguf_tensor *first = spk_gguf_tensor_at(gguf, 0);
    malformed_model_data = first->file_offset_bytes;
    gb_raw(&malformed_model, first->data - first->file_offset_bytes, spk_gguf_part_bytes(gguf, 0));
    spk_gguf_close(gguf);
}

static void every_row_gets_its_message(void) {
    make_model();
    for (size_t i = 0; i < ROW_COUNT; i++) {
        char       path[GB_PATH_MAX], name[100];
        gguf_build b = { 0 };
        (void)snprintf(name, sizeof name, "%s.gguf", rows[i].id);
        rows[i].build(&b);
        gb_save(&b, gb_path(path, dir, name));
        gb_free(&b);
        if (rows[i].stage == OPEN) check_open(rows[i].id, path, rows[i].want, NULL, rows[i].texts);
        else check_work(rows[i].stage == PACK ? pack_row : take_moments, rows[i].id, path, rows[i].want, rows[i].texts);
    }
    gb_free(&malformed_model);
}

static void paths_that_are_no_files(void) {
    char path[GB_PATH_MAX];
    check_open("absent", gb_path(path, dir, "absent.gguf"), SPK_E_IO, NULL, (const char *[3]){ "No such file" });
    gb_path(path, dir, "directory.gguf");
    CHECK(mkdir(path, 0700) == 0, "mkdir");
    check_open("directory", path, SPK_E_IO, NULL, (const char *[3]){ "is a directory", "expected a GGUF file" });
    gb_path(path, dir, "pipe.gguf");
    CHECK(mkfifo(path, 0600) == 0, "mkfifo");
    check_open("pipe", path, SPK_E_IO, NULL, (const char *[3]){ "is a pipe", "expected a GGUF file" });
    check_open("device", "/dev/null", SPK_E_IO, NULL, (const char *[3]){ "is a device", "expected a GGUF file" });
}

/* Parts of a split model with one tensor each. */
static void save_part(const char *name, uint16_t no, uint16_t count, int32_t total, const char *tensor) {
    char       path[GB_PATH_MAX];
    gguf_build b = { 0 };
    gb_header(&b, 3, 1, 3);
    gb_kv_split(&b, no, count, total);
    gb_tensor(&b, tensor, SPK_TYPE_F32, 0, GB_DIMS(8));
    gb_pad(&b, 32);
    gb_fill(&b, 0, 32);
    gb_save(&b, gb_path(path, dir, name));
    gb_free(&b);
}

typedef struct {
    const char *name;
    uint16_t    no, count;
    int32_t     total;
    const char *tensor;
} split_part;

/* Split models: reports of such files, the parts there are, the one that is opened, the one that the message names (NULL:
 * that one) and its texts. */
static const struct {
    const char *id, *report;
    split_part  parts[2];
    const char *open, *named;
    spk_status  want;
    const char *texts[3];
} splits[] = {
    { "first part missing", "llama.cpp#9613",
      { { "gone-00002-of-00003.gguf", 1, 3, 3, "b" }, { "gone-00003-of-00003.gguf", 2, 3, 3, "c" } },
      "gone-00002-of-00003.gguf", "gone-00001-of-00003.gguf", SPK_E_MISSING, { "part 1 of 3 is missing" } },
    { "two of three parts", "shimmy#170",
      { { "two-00001-of-00003.gguf", 0, 3, 3, "a" }, { "two-00002-of-00003.gguf", 1, 3, 3, "b" } },
      "two-00001-of-00003.gguf", "two-00003-of-00003.gguf", SPK_E_MISSING, { "part 3 of 3 is missing" } },
    { "second part given", "llama.cpp#15164",
      { { "any-00001-of-00002.gguf", 0, 2, 2, "a" }, { "any-00002-of-00002.gguf", 1, 2, 2, "b" } },
      "any-00002-of-00002.gguf", NULL, SPK_OK, { NULL } },
    { "reversed order", "llama.cpp#8264",
      { { "swap-00001-of-00002.gguf", 1, 2, 2, "b" }, { "swap-00002-of-00002.gguf", 0, 2, 2, "a" } },
      "swap-00001-of-00002.gguf", NULL, SPK_E_MISMATCH, { "part 2 of 2", "expected part 1 of 2" } },
    { "counts of parts differ", "llama.cpp#9613",
      { { "mix-00001-of-00002.gguf", 0, 2, 2, "a" }, { "mix-00002-of-00002.gguf", 1, 3, 2, "b" } },
      "mix-00001-of-00002.gguf", "mix-00002-of-00002.gguf", SPK_E_MISMATCH, { "part 2 of 3", "expected part 2 of 2" } },
    { "count differs from the name", "llama.cpp#9613",
      { { "mix-00001-of-00002.gguf", 0, 2, 2, "a" }, { "mix-00002-of-00002.gguf", 1, 3, 2, "b" } },
      "mix-00002-of-00002.gguf", NULL, SPK_E_MISMATCH, { "part 2 of 3", "expected part 2 of 2 by its name" } },
    { "total differs", "llama.cpp#8761",
      { { "total-00001-of-00002.gguf", 0, 2, 3, "a" }, { "total-00002-of-00002.gguf", 1, 2, 3, "b" } },
      "total-00001-of-00002.gguf", NULL, SPK_E_MISMATCH, { "split.tensors.count is 3", "2 parts have 2 tensors" } },
    { "name in two parts", "llama.cpp#6836",
      { { "twice-00001-of-00002.gguf", 0, 2, 2, "same" }, { "twice-00002-of-00002.gguf", 1, 2, 2, "same" } },
      "twice-00001-of-00002.gguf", "twice-00002-of-00002.gguf", SPK_E_CORRUPT,
      { "duplicate tensor name 'same'", "first in", "twice-00001-of-00002.gguf" } },
};

static void split_models_that_do_not_fit(void) {
    char path[GB_PATH_MAX];
    for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
        for (int p = 0; p < 2; p++) {
            const split_part *part = &splits[i].parts[p];
            save_part(part->name, part->no, part->count, part->total, part->tensor);
        }
        check_open(splits[i].id, gb_path(path, dir, splits[i].open), splits[i].want, splits[i].named, splits[i].texts);
    }
    CHECK(truncate(gb_path(path, dir, "mix-00002-of-00002.gguf"), 50) == 0, "truncate");
    check_open("sibling cut", gb_path(path, dir, "mix-00001-of-00002.gguf"), SPK_E_CORRUPT, "mix-00002-of-00002.gguf",
               (const char *[3]){ "truncated" });
}

/* A tensor of 5 GiB whose data is a hole: sizes do not pass through 32 bits, and nothing reads the weights. */
static void large_sparse_files_open(void) {
    char            path[GB_PATH_MAX];
    gguf_build      b = { 0 };
    spk_gguf       *gguf = NULL;
    spk_error       err = { 0 };
    const uint64_t  size = UINT64_C(5) << 30;
    uint8_t         last[4] = { 1, 1, 1, 1 };
    one(&b, SPK_TYPE_F32, 0, GB_DIMS(1 << 20, 1280), 0);
    gb_save(&b, gb_path(path, dir, "large.gguf"));
    CHECK(truncate(path, (off_t)(b.size + size)) == 0, "truncate");
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    if (gguf != NULL) {
        CHECK(spk_gguf_tensor_at(gguf, 0)->size_bytes == size, "size");
        CHECK_OK(spk_gguf_read(gguf, 0, b.size + size - 4, 4, last, &err), err);
        CHECK(last[0] == 0 && last[3] == 0, "a hole reads as zeros");
        spk_gguf_close(gguf);
    }
    gb_free(&b);
    (void)remove(path);
}

static void a_file_that_shrinks_is_an_error(void) {
    char       path[GB_PATH_MAX];
    gguf_build b = { 0 };
    spk_gguf  *gguf = NULL;
    spk_error  err = { 0 };
    uint8_t    data[64];
    good(&b);
    gb_save(&b, gb_path(path, dir, "shrinks.gguf"));
    gb_free(&b);
    CHECK_OK(spk_gguf_open(path, &gguf, &err), err);
    if (gguf == NULL) return;
    const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, 0);
    CHECK(truncate(path, (off_t)t->file_offset_bytes + 10) == 0, "truncate");
    CHECK(spk_gguf_read(gguf, 0, t->file_offset_bytes, 64, data, &err) == SPK_E_IO, "%s", err.text);
    CHECK(strstr(err.text, "shrinks.gguf: the file shrank") != NULL && strstr(err.text, "expected 192 bytes") != NULL,
          "%s", err.text);
    spk_gguf_close(gguf);
}

/* A small file with a bit of everything; *data_end gets the end of the last tensor, before padding. */
static void build_rich(gguf_build *b, size_t *data_end) {
    gb_header(b, 3, 2, 5);
    gb_kv_u32(b, "general.alignment", 16);
    gb_kv_string(b, "general.name", "rich");
    gb_array(b, "s", SPK_KV_STRING, 2);
    gb_string(b, "one");
    gb_string(b, "");
    gb_array(b, "f", SPK_KV_F32, 2);
    gb_u64(b, 0);
    gb_kv(b, "b", SPK_KV_BOOL, "\1", 1);
    gb_tensor(b, "a", SPK_TYPE_Q8_0, 0, GB_DIMS(32));
    gb_tensor(b, "c", SPK_TYPE_F16, 48, GB_DIMS(5, 2));
    gb_pad(b, 16);
    gb_fill(b, 1, 34);
    gb_pad(b, 16);
    gb_fill(b, 2, 20);
    *data_end = b->size;
    gb_pad(b, 16);
}

/* Open, and read all that was accepted; the sanitizer build turns a read out of bounds into a failure. */
static void open_and_touch(const char *path, spk_status *status, spk_error *err) {
    spk_gguf *gguf = NULL;
    *status = spk_gguf_open(path, &gguf, err);
    if (*status != SPK_OK) return;
    uint64_t sum = 0;
    for (uint64_t i = 0; i < spk_gguf_tensor_count(gguf); i++) {
        const spk_gguf_tensor *t = spk_gguf_tensor_at(gguf, i);
        CHECK(t->file_offset_bytes + t->size_bytes <= spk_gguf_part_bytes(gguf, 0), "%s in the file", t->name);
        for (uint64_t k = 0; k < t->size_bytes; k++) sum += t->data[k];
    }
    for (uint64_t i = 0; i < spk_gguf_kvs(gguf)->count; i++) {
        const spk_kv  *kv = &spk_gguf_kvs(gguf)->items[i];
        const uint8_t *cursor = NULL;
        spk_text       text;
        while (spk_kv_next_text(kv, &cursor, &text)) sum += text.size_bytes;
        for (uint64_t k = 0; k < kv->value_bytes; k++) sum += kv->value[k];
    }
    CHECK(sum > 0, "something was read");
    spk_gguf_close(gguf);
}

static void every_truncation_is_an_error(void) {
    char       path[GB_PATH_MAX];
    gguf_build b = { 0 };
    size_t     data_end;
    build_rich(&b, &data_end);
    gb_path(path, dir, "cut.gguf");
    for (size_t size = b.size + 1; size-- > 0;) {
        spk_error  err = { 0 };
        spk_status status;
        gb_save(&(gguf_build){ b.bytes, size, size }, path);
        open_and_touch(path, &status, &err);
        CHECK((status == SPK_OK) == (size >= data_end), "%d bytes: %s", (int)size, err.text);
        CHECK(size >= data_end || strstr(err.text, "cut.gguf") != NULL, "%d bytes: %s", (int)size, err.text);
        CHECK(status == SPK_OK || status == SPK_E_CORRUPT || size == 0, "%d bytes: %s", (int)size, err.text);
    }
    gb_free(&b);
}

/* Whatever a byte becomes, the file is refused with a message or all that it offers can be read. */
static void every_changed_byte_is_survived(void) {
    char       path[GB_PATH_MAX];
    gguf_build b = { 0 };
    size_t     data_end;
    int        refused = 0;
    build_rich(&b, &data_end);
    gb_path(path, dir, "change.gguf");
    for (size_t at = 0; at < b.size; at++) {
        const uint8_t original = b.bytes[at], changed[] = { 0, 0xff, (uint8_t)(original + 1) };
        for (int i = 0; i < 3; i++) {
            spk_error  err = { 0 };
            spk_status status;
            b.bytes[at] = changed[i];
            gb_save(&b, path);
            open_and_touch(path, &status, &err);
            CHECK(status == SPK_OK || strstr(err.text, "change.gguf") != NULL, "byte %d: %s", (int)at, err.text);
            refused += status != SPK_OK;
        }
        b.bytes[at] = original;
    }
    CHECK(refused > 200, "only %d changes were refused", refused);
    gb_free(&b);
}

int main(void) {
    gb_make_dir(dir);
    RUN(every_row_gets_its_message);
    RUN(paths_that_are_no_files);
    RUN(split_models_that_do_not_fit);
    RUN(large_sparse_files_open);
    RUN(a_file_that_shrinks_is_an_error);
    RUN(every_truncation_is_an_error);
    RUN(every_changed_byte_is_survived);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
