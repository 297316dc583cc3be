/* tests/interrupted_build.h - conversions that take no time, that are killed, and that are gone on with. */
#ifndef SPK_TEST_INTERRUPTED_BUILD_H
#define SPK_TEST_INTERRUPTED_BUILD_H

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/convert_build.h"

/* Memory where there is some, since 200 conversions sync their files. */
static inline void make_fast_dir(void) {
    if (access("/dev/shm", W_OK) == 0 && getenv("TMPDIR") == NULL) (void)setenv("TMPDIR", "/dev/shm", 1);
    gb_make_dir(dir);
}

static inline bool same_file_bytes(const char *a, const char *b) {
    const char *const paths[2] = { a, b };
    const void *maps[2] = { NULL, NULL };
    struct stat info[2] = { { .st_size = 0 }, { .st_size = 0 } };
    for (int i = 0; i < 2; i++) {
        int fd = open(paths[i], O_RDONLY | O_CLOEXEC);
        CHECK(fd >= 0 && fstat(fd, &info[i]) == 0, "%s", paths[i]);
        maps[i] = mmap(NULL, (size_t)info[i].st_size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
        CHECK(maps[i] != MAP_FAILED && close(fd) == 0, "%s", paths[i]);
    }
    bool is_same = info[0].st_size == info[1].st_size && memcmp(maps[0], maps[1], (size_t)info[0].st_size) == 0;
    for (int i = 0; i < 2; i++) (void)munmap((void *)(uintptr_t)maps[i], (size_t)info[i].st_size);
    return is_same;
}

typedef struct {
    bool        resume, replace;
    const char *set;                /* NULL: a little is requantized */
    uint64_t    resumed_bytes;      /* out */
} run_request;

/* A little is requantized, so that there is work to lose, and a kill of it costs no seconds. */
static inline spk_status convert(const char *source_path, const char *out_path, run_request *request) {
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    spk_status status = spk_gguf_open(source_path, &source, &err);
    if (status == SPK_OK) status = spk_recipe_load("native", "", &recipe, &err);
    const char *set = request->set != NULL ? request->set : ".*_(gate|up|down)_shexp\\.weight=Q4_K";
    if (status == SPK_OK) status = spk_recipe_set(recipe, set, &err);
    spk_convert_options options = { .source = source, .out_path = out_path, .replace = request->replace, .recipe = recipe,
                                    .imatrix_name = "", .effort = SPK_EFFORT_FAST, .thread_count = 2,
                                    .resume = request->resume };
    if (status == SPK_OK) status = spk_convert_plan_make(&options, &plan, &err);
    if (status == SPK_OK) status = spk_convert_run(&options, &plan, &err);
    request->resumed_bytes = plan.resumed_bytes;
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
    return status;
}

static const char *job_source = TINY36;              /* of leave_job and resume_native */

/* What a run leaves that dies when `limit` bytes of data have been reported. */
static uint64_t progress_limit;
static inline void die_at(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    (void)context;
    (void)total_bytes;
    if (done_bytes >= progress_limit) (void)raise(SIGKILL);
}

/* Runs in a child; with a limit it dies, without one (UINT64_MAX) it ends. */
static inline void leave_job(const char *out, const char *recipe_name, spk_quant_effort effort, bool resume, uint64_t limit) {
    (void)fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        spk_gguf *source = NULL;
        spk_recipe *recipe = NULL;
        spk_convert_plan plan;
        progress_limit = limit;
        if (spk_gguf_open(job_source, &source, NULL) != SPK_OK || spk_recipe_load(recipe_name, "", &recipe, NULL) != SPK_OK) _exit(1);
        spk_convert_options options = { .source = source, .out_path = out, .recipe = recipe, .imatrix_name = "", .effort = effort,
                                        .thread_count = 1, .resume = resume, .progress = die_at };
        _exit(spk_convert_plan_make(&options, &plan, NULL) == SPK_OK && spk_convert_run(&options, &plan, NULL) == SPK_OK ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child, "waitpid");
    CHECK(limit == UINT64_MAX ? status == 0 : WIFSIGNALED(status), "how the child ended: %x", status);
}
static inline void leave_unfinished(const char *out, uint64_t limit) { leave_job(out, "native", SPK_EFFORT_NORMAL, false, limit); }

/* The path of the one unfinished file in the directory. */
static inline const char *unfinished(void) {
    static char path[GB_PATH_MAX];
    DIR *list = opendir(dir);
    path[0] = '\0';
    for (struct dirent *e; list != NULL && (e = readdir(list)) != NULL;)
        if (strncmp(e->d_name, ".spk-", 5) == 0) (void)gb_path(path, dir, e->d_name);
    if (list != NULL) closedir(list);
    CHECK(path[0] != '\0', "no unfinished file");
    return path;
}

static inline spk_status resume_native(const char *out, uint64_t *resumed_bytes) {
    spk_gguf *source = NULL;
    spk_recipe *recipe = NULL;
    spk_convert_plan plan = { .tensor_count = 0 };
    spk_status status = spk_gguf_open(job_source, &source, &err);
    if (status == SPK_OK) status = spk_recipe_load("native", "", &recipe, &err);
    spk_convert_options options = { .source = source, .out_path = out, .recipe = recipe, .imatrix_name = "", .resume = true };
    if (status == SPK_OK) status = spk_convert_plan_make(&options, &plan, &err);
    if (status == SPK_OK) status = spk_convert_run(&options, &plan, &err);
    *resumed_bytes = plan.resumed_bytes;
    spk_convert_plan_free(&plan);
    spk_recipe_free(recipe);
    spk_gguf_close(source);
    return status;
}

#endif
