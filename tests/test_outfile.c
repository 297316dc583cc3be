/* tests/test_outfile.c - output files appear whole or not at all, and never in place of what should stay. */
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "formats/outfile.h"
#include "tests/check.h"
#include "tests/gguf_build.h"

static char dir[GB_PATH_MAX];

static void put_file(const char *path, const char *text) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0) abort();
}

static bool holds(const char *path, const char *text) {
    char  got[64] = { 0 };
    FILE *file = fopen(path, "rb");
    if (file == NULL) return false;
    size_t size = fread(got, 1, sizeof got - 1, file);
    fclose(file);
    return size == strlen(text) && memcmp(got, text, size) == 0;
}

static void write_text(spk_outfile *file, const char *text) {
    spk_error err = { 0 };
    CHECK_OK(spk_outfile_write(file, 0, text, strlen(text), &err), err);
}

static void the_file_appears_at_commit(void) {
    char         path[GB_PATH_MAX], got[5] = { 0 };
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    CHECK_OK(spk_outfile_create(gb_path(path, dir, "new"), false, 6, &file, &err), err);
    CHECK_OK(spk_outfile_write(file, 3, "def", 3, &err), err);
    CHECK_OK(spk_outfile_write(file, 0, "abc", 3, &err), err);
    CHECK_OK(spk_outfile_read(file, 1, got, 4, &err), err);
    CHECK(memcmp(got, "bcde", 4) == 0, "read back %s", got);
    CHECK(spk_outfile_read(file, 4, got, 4, &err) == SPK_E_IO, "reading past the end");
    CHECK(access(path, F_OK) != 0, "nothing there before commit");
    CHECK_OK(spk_outfile_commit(file, &err), err);
    CHECK(holds(path, "abcdef") && gb_file_count(dir) == 1, "the file, and nothing else");
    (void)remove(path);
}

static void abort_leaves_what_was_there(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    put_file(gb_path(path, dir, "old"), "old");
    CHECK_OK(spk_outfile_create(path, true, 3, &file, &err), err);
    write_text(file, "new");
    spk_outfile_abort(file);
    CHECK(holds(path, "old") && gb_file_count(dir) == 1, "unchanged");
    spk_outfile_abort(NULL);
    (void)remove(path);
}

static void replacing_needs_permission(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    put_file(gb_path(path, dir, "old"), "old");
    CHECK(spk_outfile_create(path, false, 3, &file, &err) == SPK_E_EXISTS, "%s", err.text);
    CHECK(strstr(err.text, path) != NULL && file == NULL, "%s", err.text);
    CHECK_OK(spk_outfile_create(path, true, 3, &file, &err), err);
    write_text(file, "new");
    CHECK_OK(spk_outfile_commit(file, &err), err);
    CHECK(holds(path, "new") && gb_file_count(dir) == 1, "replaced");
    (void)remove(path);
}

static void a_file_that_came_meanwhile_stays(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    CHECK_OK(spk_outfile_create(gb_path(path, dir, "race"), false, 3, &file, &err), err);
    write_text(file, "new");
    put_file(path, "other");
    CHECK(spk_outfile_commit(file, &err) == SPK_E_EXISTS, "%s", err.text);
    CHECK(holds(path, "other") && gb_file_count(dir) == 1, "the other file stays");
    (void)remove(path);
}

static void a_symbolic_link_stays_a_link(void) {
    char         path[GB_PATH_MAX], link[GB_PATH_MAX];
    struct stat  status;
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    put_file(gb_path(path, dir, "target"), "old");
    CHECK(symlink("target", gb_path(link, dir, "link")) == 0, "symlink");
    CHECK_OK(spk_outfile_create(link, true, 3, &file, &err), err);
    write_text(file, "new");
    CHECK_OK(spk_outfile_commit(file, &err), err);
    CHECK(holds(path, "new") && lstat(link, &status) == 0 && S_ISLNK(status.st_mode), "the target was replaced");
    (void)remove(path);
    CHECK(spk_outfile_create(link, true, 3, &file, &err) == SPK_E_IO, "a link to nothing");
    CHECK(strstr(err.text, link) != NULL && strstr(err.text, "does not exist") != NULL, "%s", err.text);
    (void)remove(link);
}

static void what_cannot_be_a_file_is_refused(void) {
    char path[GB_PATH_MAX];
    CHECK(mkfifo(gb_path(path, dir, "pipe"), 0600) == 0, "mkfifo");
    const struct { const char *path, *text; } cases[] = {
        { dir, "is a directory" }, { path, "pipe" }, { "/dev/null", "device" }, { "", "empty" },
        { "/no/such/directory/x", "No such file or directory" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        spk_outfile *file = NULL;
        spk_error    err = { 0 };
        CHECK(spk_outfile_create(cases[i].path, true, 1, &file, &err) == SPK_E_IO && file == NULL, "%s", cases[i].path);
        CHECK(strstr(err.text, cases[i].text) != NULL && strstr(err.text, cases[i].path) != NULL, "%s", err.text);
    }
    (void)remove(path);
}

static void too_little_space_is_seen_before_writing(void) {
    char         path[GB_PATH_MAX];
    spk_outfile *file = NULL;
    spk_error    err = { 0 };
    gb_path(path, dir, "large");
    CHECK(spk_outfile_create(path, false, UINT64_C(1) << 60, &file, &err) == SPK_E_SPACE, "%s", err.text);
    CHECK(strstr(err.text, "needs 1152921504606846976 bytes") != NULL && strstr(err.text, "available") != NULL, "%s",
          err.text);
    CHECK(gb_file_count(dir) == 0, "nothing is left");
}

static void a_signal_removes_the_temporary_file(void) {
    static const int signals[] = { SIGHUP, SIGINT, SIGTERM };
    for (int i = 0; i < 3; i++) {
        char  path[GB_PATH_MAX];
        int   status = 0;
        pid_t child;
        gb_path(path, dir, "interrupted");
        (void)fflush(NULL);
        child = fork();
        if (child == 0) {
            spk_outfile *file = NULL;
            (void)signal(signals[i], SIG_DFL);           /* may come ignored, as under nohup */
            spk_outfile_remove_on_signals();
            if (spk_outfile_create(path, false, 3, &file, NULL) != SPK_OK || gb_file_count(dir) != 1) _exit(1);
            (void)raise(signals[i]);
            _exit(2);
        }
        CHECK(child > 0 && waitpid(child, &status, 0) == child, "fork");
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == signals[i], "ends by signal %d: %x", signals[i], status);
        CHECK(gb_file_count(dir) == 0, "nothing is left after signal %d", signals[i]);
    }
}

static void same_file_compares_what_paths_lead_to(void) {
    char a[GB_PATH_MAX], b[GB_PATH_MAX], link_path[GB_PATH_MAX];
    put_file(gb_path(a, dir, "a"), "x");
    put_file(gb_path(b, dir, "b"), "x");
    CHECK(link(a, gb_path(link_path, dir, "c")) == 0, "link");
    CHECK(spk_same_file(a, a) && spk_same_file(a, link_path), "one file by two names");
    CHECK(!spk_same_file(a, b), "two files with the same bytes");
    CHECK(!spk_same_file(a, gb_path(b, dir, "absent")) && !spk_same_file(b, b), "files that do not exist");
}

int main(void) {
    gb_make_dir(dir);
    RUN(the_file_appears_at_commit);
    RUN(abort_leaves_what_was_there);
    RUN(replacing_needs_permission);
    RUN(a_file_that_came_meanwhile_stays);
    RUN(a_symbolic_link_stays_a_link);
    RUN(what_cannot_be_a_file_is_refused);
    RUN(too_little_space_is_seen_before_writing);
    RUN(a_signal_removes_the_temporary_file);
    RUN(same_file_compares_what_paths_lead_to);
    gb_remove_dir(dir);
    return CHECK_EXIT();
}
