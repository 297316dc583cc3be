/* kernels/dispatch.c - which fast tables this CPU can run.  Compiled for the plainest CPU, unlike what it chooses. */
#include "kernels/kernels_internal.h"

#if defined(__x86_64__)
#include <cpuid.h>

/* Asked of the CPU itself: not every compiler's __builtin_cpu_supports knows F16C. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
#endif

const spk_kernels *spk_kernels_avx2(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) return &spk_avx2_table;
#endif
    return NULL;
}

const spk_kernels *spk_kernels_vnni(void) {
#if defined(__x86_64__)
    if (spk_kernels_avx2() != NULL && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("gfni"))
        return &spk_vnni_table;
#endif
    return NULL;
}

const spk_kernels *spk_kernels_fast(void) {
    const spk_kernels *vnni = spk_kernels_vnni();
    return vnni != NULL ? vnni : spk_kernels_avx2();
}
