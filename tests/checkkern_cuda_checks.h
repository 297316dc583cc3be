/* tests/checkkern_cuda_checks.h - the table of all checks of the CUDA kernels. */
#ifndef SPK_CHECKKERN_CUDA_CHECKS_H
#define SPK_CHECKKERN_CUDA_CHECKS_H

#include "tests/checkkern_cuda_attention.h"
#include "tests/checkkern_cuda_gdn.h"
#include "tests/checkkern_cuda_router.h"
#include "tests/checkkern_cuda_small.h"

/* is_quick: what a CPU that stands in for the GPU does in seconds; see test_checkkern_cuda.c. */
typedef void cuda_check(device_case *t, bool is_quick);

/* embed first: it copies the inputs of all others.  `ops` of the benchmark ask for the checks before them. */
typedef enum {
    CHECK_EMBED,
    CHECK_ELEMENTWISE,
    CHECK_NORM,
    CHECK_GEMV_TYPES,
    CHECK_GEMV_SOURCES,
    CHECK_GEMV_LAUNCHES,
    CHECK_GREEDY,
    CHECK_FOLDED,
    CHECK_GDN,
    CHECK_ATTENTION,
    CHECK_SUMS,
    CHECK_EXPERTS,
    CHECK_ROUTER,
    CUDA_CHECK_COUNT
} cuda_check_index;
static const struct { const char *name; cuda_check *check; } cuda_checks[CUDA_CHECK_COUNT] = {
    [CHECK_EMBED] = { "embed cuda", check_embed },
    [CHECK_ELEMENTWISE] = { "elementwise cuda", check_elementwise },
    [CHECK_NORM] = { "norm cuda", check_norm },
    [CHECK_GEMV_TYPES] = { "gemv types and widths cuda", check_gemv_types },
    [CHECK_GEMV_SOURCES] = { "gemv sources cuda", check_gemv_sources },
    [CHECK_GEMV_LAUNCHES] = { "gemv segments and pairs cuda", check_gemv_launches },
    [CHECK_GREEDY] = { "gemv greedy end cuda", check_greedy },
    [CHECK_FOLDED] = { "gemv folded or not: same bits cuda", check_folded },
    [CHECK_GDN] = { "gdn cuda", check_gdn_cuda },
    [CHECK_ATTENTION] = { "attention cuda", check_attention },
    [CHECK_SUMS] = { "router alone and out of a projection cuda", check_router_sums },
    [CHECK_EXPERTS] = { "experts_up experts_down cuda", check_experts },
    [CHECK_ROUTER] = { "top_k and selection among ties cuda", check_router },
};

#endif
