/* tests/checkkern.c - every kernel against the reference, and the reference against double arithmetic.
 *
 *   checkkern [--seed N] [--bench]
 *
 * Prints `ok NAME` or `FAIL NAME` for each operation and, after a failure, the parameters that caused it.  --bench then
 * times those that passed, and only those.  Where the CPU has no fast table that is said in a SKIP line, and the
 * reference is checked alone.
 */
#include "tests/checkkern_common.h"
#include "tests/checkkern_matmul.h"
#include "tests/checkkern_ops.h"
#include "tests/checkkern_sequence.h"
#include "tests/checkkern_bench.h"

static void check_products_of_all_types(const spk_kernels *ref, const spk_kernels *fast, passed_ops *passed) {
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++) {
        const spk_type_info *info = spk_type_find(type);
        if (info == NULL) continue;
        for (uint32_t layout = SPK_LAYOUT_ROWS; layout <= SPK_LAYOUT_T32; layout++) {
            if (layout == SPK_LAYOUT_T32 && !spk_t32_accepts(type, SPK_SUPERBLOCK)) continue;
            char name[64];
            (void)snprintf(name, sizeof name, "matmul %s %s", info->name, spk_layout_name(layout));
            int before = check_failures;
            check_matmul(ref, fast, info, layout);
            passed->matmul[type][layout] = report(name, before);
        }
    }
}

static void check_operations(const spk_kernels *ref, const spk_kernels *fast, passed_ops *passed) {
    int before = check_failures;
    check_quantize(fast);
    passed->quantize = report("quantize", before);
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
    passed->kv_store = report("kv_store", before);
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

static void check_reference_operations(const spk_kernels *ref) {
    int before = check_failures;
    check_top_k(ref);
    (void)report("top_k of the reference", before);
    before = check_failures;
    check_kv_store(ref);
    (void)report("kv_store of the reference", before);
}

int main(int argc, char **argv) {
    bool is_bench = false;
    for (int i = 1; i < argc; i++) {
        char *end = "x";
        if (strcmp(argv[i], "--bench") == 0) {
            is_bench = true;
            continue;
        }
        if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) seed = strtoull(argv[++i], &end, 10);
        if (*end != '\0') {
            fprintf(stderr, "usage: checkkern [--seed N] [--bench]\n");
            return 2;
        }
    }
    printf("seed %llu\n", (unsigned long long)seed);
    random_state = seed;
    const spk_kernels *ref = spk_kernels_ref(), *fast = spk_kernels_avx2();
    passed_ops passed = { 0 };
    check_products_of_all_types(ref, fast, &passed);
    check_reference_operations(ref);
    if (fast != NULL)
        check_operations(ref, fast, &passed);
    else
        SKIP("this CPU or build has no AVX2 table");
    if (is_bench && fast != NULL && bench(fast, &passed) != 0) return 1;
    return CHECK_EXIT();
}
