/* runtime/gpu_start.c - the device's start-up on a thread of its own. */
#include "runtime/gpu_internal.h"

#include <pthread.h>
#include <stdlib.h>

struct spk_gpu_start {
    pthread_t  thread;
    bool       has_thread;       /* not joined yet */
    spk_cuda  *cuda;             /* NULL: failed, or taken */
    spk_status status;
    spk_error  error;
    double     start_s;
};

static void *start_main(void *argument) {
    spk_gpu_start *start = argument;
    double begin_s = spk_gpu_now_s();
    start->status = spk_cuda_open(&start->cuda, &start->error);
    start->start_s = spk_gpu_now_s() - begin_s;
    return NULL;
}

spk_status spk_gpu_start_begin(spk_gpu_start **out, spk_error *err) {
    spk_gpu_start *start = calloc(1, sizeof *start);
    if (start == NULL) return spk_fail(err, SPK_E_MEMORY, "out of memory");
    start->has_thread = pthread_create(&start->thread, NULL, start_main, start) == 0;
    if (!start->has_thread) (void)start_main(start);
    *out = start;
    return SPK_OK;
}

static void join(spk_gpu_start *start) {
    if (start->has_thread) (void)pthread_join(start->thread, NULL);
    start->has_thread = false;
}

spk_status spk_gpu_start_take(spk_gpu_start *start, spk_cuda **out, spk_load_times *times, spk_error *err) {
    double begin_s = spk_gpu_now_s();
    join(start);
    times->start_wait_s = spk_gpu_now_s() - begin_s;
    times->start_s = start->start_s;
    if (start->status != SPK_OK) {
        if (err != NULL) *err = start->error;
        return start->status;
    }
    *out = start->cuda;
    start->cuda = NULL;
    return SPK_OK;
}

bool spk_gpu_start_worked(spk_gpu_start *start) {
    join(start);
    return start->status == SPK_OK;
}

void spk_gpu_start_destroy(spk_gpu_start *start) {
    if (start == NULL) return;
    join(start);
    spk_cuda_close(start->cuda);
    free(start);
}
