/* tests/test_faults.c - the k-th allocation, read, write, sync, ... fails, for k = 1, 2, 3 and so on until none is left to
 * fail: each time there is a status and a message, nothing leaks, and OUT is not there.  See faults.h for how.
 *
 * What may be survived: a fault in something that is only tried (the journal for --resume, reads past the page cache), and
 * interrupted or short reads and writes, which must be.  Then the result must be the right one.
 */
#include "tests/faults.h"

#include <fcntl.h>
#include <string.h>

#include "formats/outfile.h"
#include "requant/convert.h"
#include "requant/repair.h"
#include "runtime/tokenizer_internal.h"
#include "runtime/runtime.h"
#include "tests/check.h"
#include "tests/gguf_build.h"
#include "tests/model_build.h"

static const char IMATRIX[] = "tests/models/tiny-qwen36.imatrix.gguf";
static const char WITH_TOKENIZER[] = "tests/models/tiny-qwen35-q4_k_m.gguf";
static char dir[GB_PATH_MAX], source_path[GB_PATH_MAX], pack_path[GB_PATH_MAX], wanted_path[GB_PATH_MAX], out_path[GB_PATH_MAX],
    left_path[GB_PATH_MAX], temp_path[GB_PATH_MAX];

/* ---- What is tried ---- */

/* begins: OUT is begun before everything else, as spk-pack does. */
static spk_status convert(bool resumes, bool begins, spk_error *err) {
    spk_outfile *file = NULL;
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    spk_status status = begins ? spk_outfile_create(out_path, false, 0, &file, err) : SPK_OK;
    if (status == SPK_OK) status = spk_gguf_open(source_path, &source, err);
    if (status == SPK_OK) status = spk_recipe_load("native", "", &recipe, err);
    if (status == SPK_OK) status = spk_recipe_set(recipe, "blk\\..*\\.ffn_down\\.weight=Q4_K", err);
    spk_convert_options options = { .source = source, .out_path = out_path, .recipe = recipe, .imatrix_name = "",
                                    .thread_count = 2, .resume = resumes };
    if (status == SPK_OK) status = spk_convert_plan_make(&options, &plan, err);
    options.out_file = file;
    if (status == SPK_OK) status = spk_convert_run(&options, &plan, err);
    else spk_outfile_abort(file);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
    return status;
}

static spk_status pack(spk_error *err) { return convert(false, false, err); }
static spk_status begin_pack(spk_error *err) { return convert(false, true, err); }
static spk_status resume(spk_error *err) { return convert(true, false, err); }

static spk_status unpack(spk_error *err) {
    spk_pack *p = NULL;
    spk_unpack_result result;
    spk_status status = spk_pack_open(pack_path, &p, err);
    if (status == SPK_OK) status = spk_unpack(p, out_path, false, NULL, NULL, &result, err);
    spk_pack_close(p);
    return status;
}

static spk_status pack_by_reading(spk_error *err) {
    fault_is_viewless = true;
    const spk_status status = pack(err);
    fault_is_viewless = false;
    return status;
}

static spk_status verify(spk_error *err) {
    spk_pack *p = NULL;
    spk_status status = spk_pack_open(pack_path, &p, err);
    if (status == SPK_OK) status = spk_pack_verify(p, 2, NULL, NULL, err);
    spk_pack_close(p);
    return status;
}

static spk_status open_gguf(spk_error *err) {
    spk_gguf *gguf = NULL;
    spk_status status = spk_gguf_open(source_path, &gguf, err);
    spk_gguf_close(gguf);
    return status;
}

static bool take_token(void *context, uint32_t token) {
    (void)context;
    (void)token;
    return true;
}

static spk_status decode(const char *path, spk_error *err) {
    static const uint32_t tokens[] = { 1, 2, 3 };
    spk_model *model = NULL;
    spk_session *session = NULL;
    spk_model_options mo = { .backend = SPK_BACKEND_REF, .thread_count = 2 };
    spk_session_options so = { .context_tokens = 16 };
    spk_generation what = { .token_limit = 3, .on_token = take_token };
    spk_status status = spk_model_open(path, &mo, &model, err);
    if (status == SPK_OK) status = spk_session_create(model, &so, &session, err);
    if (status == SPK_OK) status = spk_session_generate(session, tokens, 3, &what, err);
    spk_session_destroy(session);
    spk_model_close(model);
    return status;
}

static spk_status decode_pack(spk_error *err) { return decode(pack_path, err); }
static spk_status decode_gguf(spk_error *err) { return decode(source_path, err); }

static spk_status tokenize(spk_error *err) {
    static const char text[] = "In the beginning, \xff 123";
    spk_gguf *gguf = NULL;
    spk_tokenizer *tokenizer = NULL;
    uint32_t *ids = NULL;
    size_t count = 0;
    spk_status status = spk_gguf_open(WITH_TOKENIZER, &gguf, err);
    if (status == SPK_OK) status = spk_tokenizer_from_kvs(spk_gguf_kvs(gguf), WITH_TOKENIZER, &tokenizer, err);
    if (status == SPK_OK) status = spk_tokenizer_encode(tokenizer, text, sizeof text - 1, true, &ids, &count, err);
    free(ids);
    spk_tokenizer_destroy(tokenizer);
    spk_gguf_close(gguf);
    return status;
}

static spk_status read_imatrix(spk_error *err) {
    spk_imatrix *imatrix = NULL;
    spk_status status = spk_imatrix_open(IMATRIX, &imatrix, err);
    spk_imatrix_close(imatrix);
    return status;
}

static spk_status read_recipe(spk_error *err) {
    spk_recipe *recipe = NULL;
    spk_status status = spk_recipe_load("packs/qwen3.6-35b-a3b/ffn.recipe", "", &recipe, err);
    spk_recipe_free(recipe);
    return status;
}

static const struct {
    const char *name;
    spk_status (*run)(spk_error *err);
    const char *wanted;         /* what OUT must be the same as where it is there; NULL: there is no OUT */
} works[] = {
    { "pack", pack, wanted_path }, { "pack by reading", pack_by_reading, wanted_path }, { "begin, pack", begin_pack, wanted_path }, { "resume", resume, wanted_path },
    { "unpack", unpack, source_path },
    { "verify", verify, NULL }, { "open GGUF", open_gguf, NULL }, { "decode pack", decode_pack, NULL },
    { "decode GGUF", decode_gguf, NULL }, { "tokenize", tokenize, NULL }, { "imatrix", read_imatrix, NULL },
    { "recipe", read_recipe, NULL },
};

/* ---- Trials ---- */

/* Holes stay holes: an unfinished pack has a large one in front of its journal. */
static void copy_file(const char *from, const char *to) {
    static const uint8_t zeros[65536];
    uint8_t piece[65536];
    struct stat info;
    int in = open(from, O_RDONLY | O_CLOEXEC), out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(in >= 0 && out >= 0 && fstat(in, &info) == 0 && ftruncate(out, info.st_size) == 0, "%s to %s", from, to);
    for (off_t at = 0, next; at < info.st_size && (at = lseek(in, at, SEEK_DATA)) >= 0; at = next) {
        next = at - at % (off_t)sizeof piece + (off_t)sizeof piece;
        ssize_t got = pread(in, piece, (size_t)(next - at), at);
        CHECK(got > 0, "%s", from);
        if (memcmp(piece, zeros, (size_t)got) != 0) CHECK(pwrite(out, piece, (size_t)got, at) == got, "%s", to);
    }
    (void)close(in);
    (void)close(out);
}

static bool same_bytes(const char *a, const char *b) {
    uint8_t x[65536], y[65536];
    FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
    bool is_same = f != NULL && g != NULL;
    for (size_t got = 1; is_same && got > 0;) {
        got = fread(x, 1, sizeof x, f);
        is_same = fread(y, 1, sizeof y, g) == got && memcmp(x, y, got) == 0;
    }
    if (f != NULL) (void)fclose(f);
    if (g != NULL) (void)fclose(g);
    return is_same;
}

static int open_files(void) {
    int count = 0;
    for (int fd = 0; fd < 64; fd++) {
        struct stat info;
        count += fstat(fd, &info) == 0;
    }
    return count;
}

/* True if the fault fired; *status gets what came of it. */
static bool try_once(size_t work, fault_kind kind, int64_t k, spk_status *status, spk_error *err) {
    if (works[work].run == resume) copy_file(left_path, temp_path);
    int files_before = gb_file_count(dir) - (works[work].run == resume), open_before = open_files();
    *err = (spk_error){ .status = SPK_OK };
    is_counting = true;
    fault_left = k;
    fault_fired = false;
    fault_armed = kind;
    *status = works[work].run(err);
    fault_armed = FAULT_NONE;
    is_counting = false;
    const char *name = works[work].name, *what = fault_names[kind];
    CHECK(block_count == 0 && mapped_bytes == 0 && thread_count == 0, "%s, %s %d: %d blocks, %d bytes mapped, %d threads left",
          name, what, (int)k, (int)block_count, (int)mapped_bytes, (int)thread_count);
    CHECK(open_files() == open_before, "%s, %s %d: a file is still open", name, what, (int)k);
    CHECK(*status == SPK_OK || (err->status == *status && err->text[0] != '\0'), "%s, %s %d: no message", name, what, (int)k);
    bool is_out = access(out_path, F_OK) == 0, is_synced = kind != FAULT_SYNC || strstr(err->text, "is complete") == NULL;
    if (works[work].wanted == NULL) return fault_fired;
    CHECK(is_out == (*status == SPK_OK) || !is_synced, "%s, %s %d: OUT is%s there: %s", name, what, (int)k, is_out ? "" : " not",
          err->text);
    CHECK(!is_out || same_bytes(out_path, works[work].wanted), "%s, %s %d: OUT is not right", name, what, (int)k);
    if (is_out) (void)remove(out_path);
    /* Where opening failed before anything was done, what --resume found is kept. */
    if (works[work].run == resume && *status != SPK_OK) (void)remove(temp_path);
    CHECK(gb_file_count(dir) == files_before, "%s, %s %d: a file was left", name, what, (int)k);
    return fault_fired;
}

static bool must_be_survived(fault_kind kind) {
    return kind == FAULT_READ_SHORT || kind == FAULT_WRITE_SHORT || kind == FAULT_INTERRUPT || kind == FAULT_VIEW;
}

/* A message names its file, or memory and threads that are of no file. */
static bool says_of_what(const char *text) {
    static const char *const words[] = { "tests/models/", "packs/", "thread pool: out of memory", "starting thread ", "cannot start ",
                                         "recipe: out of memory", "out of memory for a digest", " buffers of ", "out of memory for a session",
                                         "out of memory for a vocabulary", " bytes of state and " };
    if (strstr(text, dir) != NULL) return true;
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (strstr(text, words[i]) != NULL) return true;
    return false;
}

static void every_fault_is_an_error_or_survived(void) {
    for (size_t work = 0; work < sizeof works / sizeof *works; work++) {
        printf("# %s:", works[work].name);
        for (fault_kind kind = FAULT_MEMORY; kind < FAULT_KIND_COUNT; kind++) {
            int refused = 0, survived = 0;
            spk_status status;
            spk_error err;
            for (int64_t k = 1; try_once(work, kind, k, &status, &err); k++) {
                refused += status != SPK_OK;
                survived += status == SPK_OK;
                CHECK(status == SPK_OK || !must_be_survived(kind), "%s, %s %d: %s", works[work].name, fault_names[kind], (int)k,
                      err.text);
                bool is_right = kind == FAULT_FULL ? status == SPK_OK || status == SPK_E_SPACE : true;
                CHECK(is_right, "%s, %s %d: %s", works[work].name, fault_names[kind], (int)k, err.text);
                CHECK(status == SPK_OK || says_of_what(err.text), "%s, %s %d: names no file: %s", works[work].name, fault_names[kind],
                      (int)k, err.text);
                CHECK(status == SPK_OK || kind != FAULT_READ || status == SPK_E_IO, "%s, %s %d: %s", works[work].name,
                      fault_names[kind], (int)k, err.text);
                if (check_failures > 20) return;
            }
            CHECK(status == SPK_OK, "%s without a fault: %s", works[work].name, err.text);
            if (refused + survived > 0) printf(" %s %d", fault_names[kind], refused + survived);
            if (survived > 0) printf(" (%d survived)", survived);
            if (refused + survived > 0) printf(";");
        }
        printf("\n");
    }
}

/* A small file, whose size was not known when it was begun: written at once, or found to have no room when it is synced. */
static void a_full_disk_says_what_is_needed(void) {
    static const struct { fault_kind kind; int code; const char *says; } cases[] = {
        { FAULT_FULL, ENOSPC, "small: needs 11 bytes, but the file system has only " },
        { FAULT_FULL, EDQUOT, "small: needs 11 bytes, but the disk quota is used up" },
        { FAULT_SYNC, ENOSPC, "small: needs 11 bytes, but the file system has only " },
        { FAULT_SYNC, EDQUOT, "small: needs 11 bytes, but the disk quota is used up" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[GB_PATH_MAX];
        int files_before = gb_file_count(dir);
        spk_outfile *file = NULL;
        spk_error err = { 0 };
        CHECK_OK(spk_outfile_create(gb_path(path, dir, "small"), false, 0, &file, &err), err);
        fault_full_code = fault_sync_code = cases[i].code;
        fault_left = 1;
        fault_armed = cases[i].kind;
        spk_status status = spk_outfile_write(file, 0, "hello world", 11, &err);
        if (status == SPK_OK) status = spk_outfile_commit(file, &err);
        else spk_outfile_abort(file);
        fault_armed = FAULT_NONE;
        fault_full_code = ENOSPC;
        fault_sync_code = EIO;
        CHECK(status == SPK_E_SPACE && strstr(err.text, cases[i].says) != NULL, "case %d: %s: %s", (int)i, spk_status_name(status),
              err.text);
        CHECK(gb_file_count(dir) == files_before, "case %d: a file was left", (int)i);
    }
}

static void exchange_pack(const char *path, int flags) {
    if (strcmp(path, out_path) == 0 && (flags & O_ACCMODE) == O_RDWR) CHECK(rename(left_path, out_path) == 0, "%s", left_path);
}

/* Another file takes the damaged pack's name between the opening to read and the one to write. */
static void a_pack_that_is_exchanged_is_not_repaired(void) {
    spk_gguf *source = NULL;
    spk_repair_result result;
    spk_error err = { 0 };
    struct stat info;
    copy_file(pack_path, out_path);
    copy_file(wanted_path, left_path);
    int fd = open(out_path, O_RDWR | O_CLOEXEC);
    CHECK(fstat(fd, &info) == 0 && pwrite(fd, "damage", 6, info.st_size / 2) == 6, "%s", out_path);
    (void)close(fd);
    CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
    spk_repair_options options = { .source = source };
    fault_before_open = exchange_pack;
    spk_status status = spk_repair(out_path, &options, &result, &err);
    fault_before_open = NULL;
    CHECK(status == SPK_E_IO && strstr(err.text, "was replaced") != NULL, "%s: %s", spk_status_name(status), err.text);
    CHECK(same_bytes(out_path, wanted_path), "the other file was written to");
    spk_gguf_close(source);
    (void)remove(out_path);
}

/* ---- Files ---- */

static void stop_converting(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    (void)context;
    if (2 * done_bytes < total_bytes) return;
    DIR *list = opendir(dir);                            /* what a kill would leave at this moment */
    for (struct dirent *e; list != NULL && (e = readdir(list)) != NULL;)
        if (strncmp(e->d_name, ".spk-", 5) == 0) (void)gb_path(temp_path, dir, e->d_name);
    if (list != NULL) closedir(list);
    copy_file(temp_path, left_path);
}

static void make_files(void) {
    static const model_shape shape = { 256, 2, 4, 2, 64, 2, 4, 64, 256, 64, SPK_TYPE_Q8_0 };
    spk_error err = { 0 };
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    if (access("/dev/shm", W_OK) == 0 && getenv("TMPDIR") == NULL) (void)setenv("TMPDIR", "/dev/shm", 1);
    gb_make_dir(dir);
    model_build(gb_path(source_path, dir, "source.gguf"), &shape, 3);
    gb_path(out_path, dir, "out");
    gb_path(left_path, dir, "left");
    gb_path(pack_path, dir, "native.spk");
    gb_path(wanted_path, dir, "wanted.spk");
    CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
    CHECK_OK(spk_recipe_load("native", "", &recipe, &err), err);
    spk_convert_options options = { .source = source, .out_path = pack_path, .recipe = recipe, .imatrix_name = "" };
    CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
    CHECK_OK(spk_convert_run(&options, &plan, &err), err);
    spk_convert_plan_free(&plan);
    CHECK_OK(spk_recipe_set(recipe, "blk\\..*\\.ffn_down\\.weight=Q4_K", &err), err);
    options.out_path = out_path;
    options.thread_count = 1;
    options.progress = stop_converting;
    CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
    CHECK_OK(spk_convert_run(&options, &plan, &err), err);
    CHECK(rename(out_path, wanted_path) == 0, "%s", wanted_path);
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
}

int main(void) {
    make_files();
    RUN(every_fault_is_an_error_or_survived);
    RUN(a_full_disk_says_what_is_needed);
    RUN(a_pack_that_is_exchanged_is_not_repaired);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
