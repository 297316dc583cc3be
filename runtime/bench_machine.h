/* runtime/bench_machine.h - what spk-bench says of the machine: names, clocks, and the read bandwidth that decode cannot
 * pass, of the CPU and of the GPU.
 *
 * Prints nothing.  Private to runtime/.
 */
#ifndef SPK_BENCH_MACHINE_H
#define SPK_BENCH_MACHINE_H

#include <stdbool.h>
#include <stdint.h>
#include "formats/status.h"
#include "kernels/cuda.h"

enum { SPK_BENCH_PASSES = 7 };       /* of a bandwidth; the fastest counts */

typedef struct {
    char     cpu[128], date[32];
    uint32_t thread_count;           /* as resolved */
    double   cpu_bytes_per_s;        /* 0: not measured */
    uint64_t cpu_buffer_bytes, cache_bytes;   /* cache: the last level, 0 if the system does not say */
    bool     has_gpu;                /* the rest holds only then; gpu_start_s is the caller's */
    char     gpu_driver[32];         /* "580.159", or "" if the system does not say */
    double   gpu_start_s;            /* of opening it: the first time in a process, driver and context */
    spk_cuda_description gpu;
    spk_cuda_bandwidth   gpu_read;
    uint64_t gpu_free_bytes, gpu_memory_bytes;   /* before any model */
} spk_bench_machine;

/* The date and the CPU's name. */
void spk_bench_describe(spk_bench_machine *machine);
/* Read bandwidth of thread_count threads (0: all CPUs) over a buffer larger than the caches. */
SPK_MUST_CHECK spk_status spk_bench_measure_cpu(spk_bench_machine *machine, uint32_t thread_count, spk_error *err);
/* Names, clocks, memory and read bandwidth of an opened GPU. */
SPK_MUST_CHECK spk_status spk_bench_measure_gpu(spk_bench_machine *machine, spk_cuda *cuda, spk_error *err);

#endif
