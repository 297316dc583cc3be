/* tests/checkkern.c - every kernel against the reference, and the reference against double arithmetic.
 *
 *   checkkern [--seed N] [--bench] [--cuda] [--quick]
 *
 * Prints `ok NAME` or `FAIL NAME` for each operation and, after a failure, the parameters that caused it.  --bench then
 * times those that passed, and only those.  --cuda leaves the CPU's tables out.  --quick gives a GPU the cases that one which is
 * emulated has time for.  Where the CPU has no fast table, or there is
 * no GPU, that is said in a SKIP line.
 */
#include "tests/checkkern_matmul.h"
#include "tests/checkkern_ops.h"
#include "tests/checkkern_sequence.h"
#include "tests/checkkern_bench.h"
#include "tests/checkkern_cuda_bench.h"

/* One op: `ok NAME` or `FAIL NAME`; true if it passed, which is what --bench asks. */
static bool report(const char *name, int failures_before) {
    bool passed = check_failures == failures_before;
    printf("%-4s %s\n", passed ? "ok" : "FAIL", name);
    fflush(stdout);
    failures_of_op = 0;
    return passed;
}

/* A table whose slot is the same function as one already checked is not checked again. */
static void check_products_of_all_types(const spk_kernels *ref, const spk_kernels *table, const spk_kernels *checked,
                                        passed_ops *passed) {
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++) {
        const spk_type_info *info = spk_type_find(type);
        if (info == NULL) continue;
        for (uint32_t layout = SPK_LAYOUT_ROWS; layout <= SPK_LAYOUT_T32; layout++) {
            if (layout == SPK_LAYOUT_T32 && !spk_t32_accepts(type, SPK_SUPERBLOCK)) continue;
            const spk_kernels *named = table != NULL ? table : ref;
            if (checked != NULL && named->matmul[type][layout] == checked->matmul[type][layout]) continue;
            char name[64];
            (void)snprintf(name, sizeof name, "matmul %s %s %s", info->name, spk_layout_name(layout), named->name);
            int before = check_failures;
            check_matmul(ref, table, info, layout);
            passed->matmul[type][layout] = report(name, before);
        }
    }
}

static void check_operations(const spk_kernels *ref, const spk_kernels *fast, passed_ops *passed) {
    int before = check_failures;
    check_quantize(fast);
    check_residual(fast);
    passed->quantize = report("quantize residual", before);
    before = check_failures;
    check_norms(ref, fast);
    passed->norms = report("rms_norm l2_norm", before);
    before = check_failures;
    check_gates(ref, fast);
    passed->gates = report("swiglu sigmoid_gate add_scaled", before);
    before = check_failures;
    check_rope(ref, fast);
    passed->rope = report("qk_norm_rope", before);
    before = check_failures;
    check_top_k(fast);
    passed->top_k = report("top_k", before);
    before = check_failures;
    check_kv_store(fast);
    (void)report("kv_store", before);
    before = check_failures;
    check_attend(ref, fast);
    passed->attend = report("attend", before);
    before = check_failures;
    check_conv(ref, fast);
    passed->conv = report("gdn_conv", before);
    before = check_failures;
    check_gdn(ref, fast);
    passed->gdn = report("gdn_head", before);
}

static void check_reference(const spk_kernels *ref, passed_ops *passed) {
    int before = check_failures;
    check_top_k(ref);
    (void)report("top_k ref", before);
    before = check_failures;
    check_kv_store(ref);
    (void)report("kv_store ref", before);
    if (spk_kernels_avx2() == NULL) check_products_of_all_types(ref, NULL, NULL, passed);
}

static int check_cpu(bool is_bench) {
    const spk_kernels *ref = spk_kernels_ref(), *avx2 = spk_kernels_avx2(), *vnni = spk_kernels_vnni();
    passed_ops passed[3] = { 0 };
    check_reference(ref, &passed[0]);
    if (avx2 != NULL) {
        check_products_of_all_types(ref, avx2, NULL, &passed[1]);
        check_operations(ref, avx2, &passed[1]);
    } else {
        SKIP("this CPU or build has no AVX2 table");
    }
    if (vnni != NULL)
        check_products_of_all_types(ref, vnni, avx2, &passed[2]);
    else
        SKIP("this CPU or build has no VNNI table");
    if (is_bench && avx2 != NULL && bench(avx2, &passed[1]) != 0) return 1;
    if (is_bench && vnni != NULL && bench(vnni, &passed[2]) != 0) return 1;
    return 0;
}

static void check_cuda(bool is_bench, bool is_quick) {
    spk_cuda *cuda;
    spk_error err = { 0 };
    device_case t;
    bool passed[CUDA_CHECK_COUNT];
    if (spk_cuda_open(&cuda, &err) != SPK_OK) {
        SKIP(err.text);
        return;
    }
    device_open(&t, cuda);
    for (int i = 0; i < CUDA_CHECK_COUNT; i++) {
        int before = check_failures;
        double start = now_s();
        cuda_checks[i].check(&t, is_quick);
        passed[i] = report(cuda_checks[i].name, before);
        fprintf(stderr, "  %.1f s\n", now_s() - start);
    }
    if (is_bench) bench_cuda(&t, passed);
    device_close(&t);
}

int main(int argc, char **argv) {
    bool is_bench = false, is_cuda_only = false, is_quick = false;
    for (int i = 1; i < argc; i++) {
        char *end = argv[i];
        if (strcmp(argv[i], "--bench") == 0) {
            is_bench = true;
            continue;
        }
        if (strcmp(argv[i], "--cuda") == 0) {
            is_cuda_only = true;
            continue;
        }
        if (strcmp(argv[i], "--quick") == 0) {
            is_quick = true;
            continue;
        }
        if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = strtoull(argv[++i], &end, 10);
        if (end == argv[i] || *end != '\0') {
            fprintf(stderr, "usage: checkkern [--seed N] [--bench] [--cuda] [--quick]\n");
            return 2;
        }
    }
    printf("seed %llu\n", (unsigned long long)seed);
    random_state = seed;
    if (!is_cuda_only && check_cpu(is_bench) != 0) return 1;
    check_cuda(is_bench, is_quick);
    return CHECK_EXIT();
}
