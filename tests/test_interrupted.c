/* tests/test_interrupted.c - conversions that are killed, that meet another writer, or whose source changes: OUT is whole or not
 * there, and what a killed run had done can be gone on with.
 *
 * SPK_TEST_KILLS=n changes the number of kills [200].
 */
#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>

#include "formats/cli.h"
#include "formats/outfile.h"
#include "tests/interrupted_build.h"

static double now_s(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void sleep_s(double seconds) {
    struct timespec wait = { (time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds)) };
    (void)nanosleep(&wait, NULL);
}

/* ---- Kills ---- */

static void killed_conversions_leave_nothing_wrong_and_can_be_gone_on_with(void) {
    make_fast_dir();
    const char *wanted = in_dir("wanted.spk"), *old = in_dir("old.gguf"), *out = in_dir("out.spk"), *count = getenv("SPK_TEST_KILLS");
    int kills = count != NULL ? atoi(count) : 200, resumed = 0, clean = 0, finished = 0;
    uint64_t seed = 6;
    double whole_s = 1;
    for (int i = 0; i < 3; i++) {
        double start_s = now_s();
        CHECK_OK(convert(TINY36, wanted, &(run_request){ .replace = true }), err);
        if (now_s() - start_s < whole_s) whole_s = now_s() - start_s;
    }
    write_edited("tests/models/tiny-qwen35-q4_k_m.gguf", old, &(edit){ .tensor_end = 1 });
    for (int k = 0; k < kills; k++) {
        bool has_old = k % 2 == 1, resumes = k % 4 != 3;
        (void)remove(out);
        if (has_old) CHECK(link(old, out) == 0, "link");
        run_request first = { .replace = true };
        (void)fflush(NULL);
        pid_t child = fork();
        if (child == 0) _exit(convert(TINY36, out, &first) == SPK_OK ? 0 : 1);
        /* Any moment, or, two times of three, any of the later ones, when there is something to go on with. */
        double moment = (double)(check_random(&seed) % 1000) / 1000;
        sleep_s(whole_s * 1.1 * (k % 3 == 0 ? moment : 0.5 + 0.5 * moment));
        (void)kill(child, SIGKILL);
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child && (WIFSIGNALED(status) || status == 0), "kill %d: %x", k, status);
        bool is_there = access(out, F_OK) == 0, is_whole = is_there && same_file_bytes(out, wanted);
        CHECK(is_whole || (has_old ? is_there && same_file_bytes(out, old) : !is_there), "kill %d: OUT is neither", k);
        CHECK(WIFSIGNALED(status) || is_whole, "kill %d: done, but not whole", k);
        finished += is_whole;
        run_request second = { .replace = true, .resume = resumes };
        CHECK_OK(convert(TINY36, out, &second), err);
        CHECK(same_file_bytes(out, wanted), "kill %d: the second run's pack differs (%d bytes taken over)", k,
              (int)second.resumed_bytes);
        CHECK(resumes || second.resumed_bytes == 0, "kill %d: not asked to resume", k);
        CHECK(gb_file_count(dir) == 3, "kill %d: a file was left", k);
        resumed += second.resumed_bytes > 0;
        clean += second.resumed_bytes == 0;
    }
    printf("# %d kills of a conversion of %.3f s: %d were too late, %d second runs went on, %d began anew\n", kills, whole_s,
           finished, resumed, clean);
    CHECK(kills < 50 || (resumed > 0 && clean > 0), "too few of a kind");
    gb_remove_dir(dir);
}

static uint64_t copy_file(const char *from, const char *to) {
    static uint8_t bytes[1 << 16];
    FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
    uint64_t size_bytes = 0;
    CHECK(in != NULL && out != NULL, "%s to %s", from, to);
    for (size_t got; (got = fread(bytes, 1, sizeof bytes, in)) > 0; size_bytes += got) CHECK(fwrite(bytes, 1, got, out) == got, "%s", to);
    CHECK(fclose(in) == 0 && fclose(out) == 0, "%s", to);
    return size_bytes;
}

/* A source that changed while its times did not cannot be told; but what is made again from it is what the pack then has and says. */
static void what_is_made_again_is_written(void) {
    make_fast_dir();
    const char *source = in_dir("source.gguf"), *out = in_dir("out.spk");
    spk_pack *made = NULL;
    uint64_t resumed_bytes, size_bytes = copy_file(TINY36, source);
    struct stat info;
    job_source = source;
    CHECK(stat(source, &info) == 0, "%s", source);
    leave_unfinished(out, 9 << 20);
    FILE *file = fopen(source, "r+b");
    CHECK(file != NULL, "%s", source);
    for (long at = 1 << 20; at < (long)size_bytes; at += 50000) {
        CHECK(fseek(file, at, SEEK_SET) == 0, "%s", source);
        int byte = fgetc(file);
        CHECK(fseek(file, at, SEEK_SET) == 0 && fputc(byte ^ 1, file) != EOF, "%s", source);
    }
    CHECK(fclose(file) == 0, "%s", source);
    const struct timespec times[2] = { info.st_atim, info.st_mtim };
    CHECK(utimensat(AT_FDCWD, source, times, 0) == 0, "%s", source);
    CHECK_OK(resume_native(out, &resumed_bytes), err);
    CHECK(resumed_bytes > 0, "nothing was taken over");
    CHECK_OK(spk_pack_open(out, &made, &err), err);
    CHECK_OK(spk_pack_verify(made, 2, NULL, NULL, &err), err);
    spk_pack_close(made);
    job_source = TINY36;
    gb_remove_dir(dir);
}

/* A flipped bit in what was left: that section is made anew from its chunk on.  And a journal that is cut, or of another job. */
static void what_is_damaged_in_an_unfinished_pack_is_made_anew(void) {
    make_fast_dir();
    const char *wanted = in_dir("wanted.spk"), *out = in_dir("out.spk");
    uint64_t resumed[4], all = UINT64_C(13) << 20;
    CHECK_OK(pack(TINY36, wanted, &(pack_request){ .recipe = "native" }), err);
    for (int damage = 0; damage < 4; damage++) {
        leave_unfinished(out, all);
        const char *left = unfinished();
        if (damage == 1 || damage == 2) {
            FILE *file = fopen(left, "r+b");
            int at = damage == 1 ? 13 << 20 : 1 << 20;     /* in the chunk that is whole first, the embedding's; in a later one */
            CHECK(file != NULL && fseek(file, at, SEEK_SET) == 0, "%s", left);
            int byte = fgetc(file);
            CHECK(fseek(file, at, SEEK_SET) == 0 && fputc(byte ^ 4, file) != EOF && fclose(file) == 0, "%s", left);
        }
        if (damage == 3) CHECK(truncate(left, 10 << 20) == 0, "truncate");   /* the journal, and data */
        CHECK_OK(resume_native(out, &resumed[damage]), err);
        CHECK(same_file_bytes(out, wanted), "damage %d: another pack", damage);
        CHECK(gb_file_count(dir) == 2, "damage %d: a file was left", damage);
        (void)remove(out);
    }
    CHECK(resumed[0] > resumed[1] && resumed[0] > resumed[2] && resumed[1] > 0 && resumed[2] > 0 && resumed[3] == 0, "%d %d %d %d", (int)resumed[0],
          (int)resumed[1], (int)resumed[2], (int)resumed[3]);
    leave_unfinished(out, all);
    run_request other = { .resume = true };              /* another recipe: nothing of it may be used */
    CHECK_OK(convert(TINY36, out, &other), err);
    CHECK(other.resumed_bytes == 0, "%d bytes of another job", (int)other.resumed_bytes);
    gb_remove_dir(dir);
}

/* A job that began anew in the file of another one leaves that one's data and records behind its own; when it is killed, too, and gone
 * on with, none of them may count. */
static void what_another_job_left_is_never_taken_over(void) {
    make_fast_dir();
    const char *wanted = in_dir("wanted.spk"), *out = in_dir("out.spk");
    leave_job(wanted, "safe", SPK_EFFORT_FAST, false, UINT64_MAX);
    static const uint64_t second_limits[] = { 1, 1 << 20, 5 << 20 };
    for (size_t i = 0; i < sizeof second_limits / sizeof *second_limits; i++) {
        leave_job(out, "safe", SPK_EFFORT_NORMAL, false, 11 << 20);
        leave_job(out, "safe", SPK_EFFORT_FAST, true, second_limits[i]);
        leave_job(out, "safe", SPK_EFFORT_FAST, true, UINT64_MAX);
        CHECK(same_file_bytes(out, wanted), "second job killed after %d bytes: another pack", (int)second_limits[i]);
        (void)remove(out);
    }
    gb_remove_dir(dir);
}

/* ---- Two writers ---- */

static void a_second_writer_of_a_path_is_refused(void) {
    make_fast_dir();
    const char *out = in_dir("out.spk");
    spk_outfile *first = NULL, *second = NULL, *other = NULL;
    CHECK_OK(spk_outfile_create(out, false, 3, &first, &err), err);
    CHECK_OK(spk_outfile_create(in_dir("other.spk"), false, 3, &other, &err), err);
    CHECK(spk_outfile_create(out, true, 3, &second, &err) == SPK_E_EXISTS && second == NULL, "%s", err.text);
    CHECK(strstr(err.text, out) != NULL && strstr(err.text, "is being written already") != NULL, "%s", err.text);
    CHECK(convert(TINY36, out, &(run_request){ .replace = true }) == SPK_E_EXISTS, "%s", err.text);
    CHECK(convert(TINY36, out, &(run_request){ .resume = true }) == SPK_E_EXISTS, "%s", err.text);
    CHECK_OK(spk_outfile_write(first, 0, "abc", 3, &err), err);
    CHECK_OK(spk_outfile_commit(first, &err), err);
    gguf_build b = gb_read(out);
    CHECK(b.size == 3 && memcmp(b.bytes, "abc", 3) == 0, "the first writer's file");
    gb_free(&b);
    CHECK_OK(convert(TINY36, out, &(run_request){ .replace = true }), err);
    spk_outfile_abort(other);
    CHECK(gb_file_count(dir) == 1, "a file was left");
    gb_remove_dir(dir);
}

/* Several processes at once, again and again: without --force one succeeds; the others are refused. */
static void many_packers_of_one_path_make_one_pack(void) {
    enum { PACKERS = 6, ROUNDS = 4 };
    make_fast_dir();
    const char *wanted = in_dir("wanted.spk"), *out = in_dir("out.spk");
    CHECK_OK(convert(TINY36, wanted, &(run_request){ 0 }), err);
    for (int round = 0; round < ROUNDS; round++) {
        pid_t children[PACKERS];
        int done = 0, refused = 0;
        (void)fflush(NULL);
        for (int i = 0; i < PACKERS; i++)
            if ((children[i] = fork()) == 0) {
                spk_status status = convert(TINY36, out, &(run_request){ .replace = round % 2, .resume = i % 2 });
                _exit(status == SPK_OK ? 0 : status == SPK_E_EXISTS ? 1 : 2);
            }
        for (int i = 0; i < PACKERS; i++) {
            int status = 0;
            CHECK(waitpid(children[i], &status, 0) == children[i] && WIFEXITED(status) && WEXITSTATUS(status) < 2, "%x", status);
            done += WEXITSTATUS(status) == 0;
            refused += WEXITSTATUS(status) == 1;
        }
        CHECK(done >= 1 && done + refused == PACKERS && (round % 2 == 1 || done == 1), "%d done, %d refused", done, refused);
        CHECK(same_file_bytes(out, wanted) && gb_file_count(dir) == 2, "round %d", round);
        (void)remove(out);
    }
    gb_remove_dir(dir);
}

static void what_is_no_unfinished_file_of_ours_is_not_touched(void) {
    make_fast_dir();
    const char *out = in_dir("out.spk"), *victim = in_dir("victim");
    spk_outfile *file = NULL;
    CHECK_OK(spk_outfile_create(out, false, 3, &file, &err), err);
    char temp[GB_PATH_MAX];
    (void)snprintf(temp, sizeof temp, "%s", unfinished());
    spk_outfile_abort(file);
    gguf_build b = { 0 };
    gb_raw(&b, "keep", 4);
    gb_save(&b, victim);
    for (int kind = 0; kind < 3; kind++) {
        CHECK((kind == 0 ? symlink(victim, temp) : kind == 1 ? link(victim, temp) : mkfifo(temp, 0600)) == 0, "kind %d", kind);
        for (int resumes = 0; resumes < 2; resumes++) {
            file = NULL;
            CHECK((resumes ? spk_outfile_reopen : spk_outfile_create)(out, false, 3, &file, &err) == SPK_E_IO && file == NULL,
                  "kind %d: %s", kind, err.text);
            CHECK(strstr(err.text, temp) != NULL, "%s", err.text);
        }
        struct stat info;
        CHECK(lstat(temp, &info) == 0 && unlink(temp) == 0, "it stays");
    }
    gguf_build still = gb_read(victim);
    CHECK(still.size == 4 && memcmp(still.bytes, "keep", 4) == 0, "what it leads to stays");
    gb_free(&still);
    gb_free(&b);
    gb_remove_dir(dir);
}

/* ---- Sources that change ---- */

/* A conversion whose source is changed in its middle by `change`. */
static void (*change_source)(void);
static const char *changing_source;
static void change_at_first_progress(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    (void)context;
    (void)done_bytes;
    (void)total_bytes;
    if (change_source != NULL) change_source();
    change_source = NULL;
}

static void cut_it(void) { CHECK(truncate(changing_source, 10000000) == 0, "truncate"); }
static void touch_it(void) { CHECK(utimes(changing_source, NULL) == 0, "utimes"); }
static void rewrite_a_byte(void) {
    FILE *file = fopen(changing_source, "r+b");
    CHECK(file != NULL && fseek(file, -7, SEEK_END) == 0 && fputc(1, file) != EOF && fclose(file) == 0, "a byte");
}
static void grow_it(void) {
    FILE *file = fopen(changing_source, "ab");
    CHECK(file != NULL && fputc(1, file) != EOF && fclose(file) == 0, "a byte");
}

static void a_source_that_changes_is_noticed(void) {
    static const struct { void (*change)(void); const char *text; } cases[] = {
        { cut_it, "shrank while it was read" }, { touch_it, "was changed while it was read" },
        { rewrite_a_byte, "was changed while it was read" }, { grow_it, "was changed while it was read (13946945 bytes" } };
    make_fast_dir();
    const char *source_path = in_dir("source.gguf"), *out = in_dir("out.spk");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        spk_gguf *source = NULL;
        spk_recipe *recipe = NULL;
        spk_convert_plan plan = { .tensor_count = 0 };
        gguf_build b = gb_read(TINY36);
        gb_save(&b, source_path);
        gb_free(&b);
        sleep_s(0.02);                                   /* times of change come in ticks of the kernel */
        changing_source = source_path;
        change_source = cases[i].change;
        CHECK_OK(spk_gguf_open(source_path, &source, &err), err);
        CHECK_OK(spk_recipe_load("native", "", &recipe, &err), err);
        spk_convert_options options = { .source = source, .out_path = out, .recipe = recipe, .imatrix_name = "",
                                        .thread_count = 1, .progress = change_at_first_progress };
        CHECK_OK(spk_convert_plan_make(&options, &plan, &err), err);
        if (cases[i].change == cut_it) change_at_first_progress(NULL, 0, 0);     /* before the last run has been read */
        spk_status status = spk_convert_run(&options, &plan, &err);
        CHECK(status == SPK_E_IO && strstr(err.text, cases[i].text) != NULL && strstr(err.text, source_path) != NULL, "%s: %s",
              spk_status_name(status), err.text);
        CHECK(gb_file_count(dir) == 1, "a file was left");
        spk_convert_plan_free(&plan);
        spk_recipe_free(recipe);
        spk_gguf_close(source);
    }
    gb_remove_dir(dir);
}

/* What is mapped and then cut short is no bus error: the tools say so and end with status 1, their output removed. */
static void a_mapped_input_that_is_cut_ends_a_tool_in_order(void) {
    make_fast_dir();
    const char *path = in_dir("a.gguf");
    gguf_build b = gb_read(TINY36);
    gb_save(&b, path);
    gb_free(&b);
    int ends[2], status = 0;
    char text[256] = { 0 };
    CHECK(pipe(ends) == 0, "pipe");
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        spk_gguf *source = NULL;
        spk_outfile *file = NULL;
        (void)dup2(ends[1], STDERR_FILENO);
        spk_cli_guard_inputs("spk-test", spk_outfile_remove_all);
        if (spk_gguf_open(path, &source, NULL) != SPK_OK) _exit(3);
        if (spk_outfile_create(in_dir("out"), false, 3, &file, NULL) != SPK_OK) _exit(4);
        if (truncate(path, 8192) != 0) _exit(5);
        const spk_gguf_tensor *last = spk_gguf_tensor_at(source, spk_gguf_tensor_count(source) - 1);
        _exit(*(const volatile uint8_t *)last->data == 1 ? 6 : 7);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 1, "the child: %x", status);
    CHECK(read(ends[0], text, sizeof text - 1) > 0 && strstr(text, "spk-test: an input file was cut short") == text, "%s", text);
    CHECK(gb_file_count(dir) == 1, "a file was left");
    (void)close(ends[0]);
    (void)close(ends[1]);
    gb_remove_dir(dir);
}

/* ---- Packs that are replaced ---- */

static void an_open_pack_outlives_its_replacement(void) {
    make_fast_dir();
    const char *path = in_dir("a.spk");
    spk_pack *old = NULL, *new = NULL;
    CHECK_OK(pack(TINY36, path, &(pack_request){ .recipe = "native" }), err);
    CHECK_OK(spk_pack_open(path, &old, &err), err);
    spk_digest root = spk_pack_root(old), digest;
    CHECK_OK(pack(TINY36, path, &(pack_request){ .recipe = "ffn", .replace = true }), err);
    CHECK_OK(spk_pack_verify(old, 1, NULL, NULL, &err), err);
    CHECK_OK(spk_unpack(old, in_dir("back.gguf"), false, NULL, NULL, &unpacked_as, &err), err);
    CHECK(unpacked_as == SPK_UNPACK_IDENTICAL && same_file_bytes(in_dir("back.gguf"), TINY36), "the old pack's weights");
    CHECK_OK(spk_pack_open(path, &new, &err), err);
    digest = spk_pack_root(new);
    CHECK(memcmp(&digest, &root, sizeof root) != 0, "the path leads to the new pack");
    (void)unlink(path);
    CHECK_OK(spk_pack_verify(old, 1, NULL, NULL, &err), err);
    spk_pack_close(old);
    spk_pack_close(new);
    gb_remove_dir(dir);
}

int main(void) {
    RUN(killed_conversions_leave_nothing_wrong_and_can_be_gone_on_with);
    RUN(what_is_made_again_is_written);
    RUN(what_is_damaged_in_an_unfinished_pack_is_made_anew);
    RUN(what_another_job_left_is_never_taken_over);
    RUN(a_second_writer_of_a_path_is_refused);
    RUN(many_packers_of_one_path_make_one_pack);
    RUN(what_is_no_unfinished_file_of_ours_is_not_touched);
    RUN(a_source_that_changes_is_noticed);
    RUN(a_mapped_input_that_is_cut_ends_a_tool_in_order);
    RUN(an_open_pack_outlives_its_replacement);
    return CHECK_EXIT();
}
