/* formats/cpu_features.h - which of the vector builds (*_lanes.c) this CPU runs.  Pure functions; any thread. */
#ifndef SPK_CPU_FEATURES_H
#define SPK_CPU_FEATURES_H

#include <stdbool.h>

static inline bool spk_cpu_runs_plain(void) { return true; }
#if defined(__x86_64__)
static inline bool spk_cpu_runs_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
static inline bool spk_cpu_runs_avx512(void) {
    return spk_cpu_runs_avx2() && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

#endif
