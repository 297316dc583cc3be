/* tests/test_checkkern_cuda.c - the checker of the CUDA kernels, against a host that stands in for the GPU.
 *
 * First the honest host must pass, then each planted fault must be found by the check that is there for it.
 */
#include "tests/host_device.h"
#include "tests/checkkern_cuda_checks.h"

/* Sanitizers look at the memory that checks touch, for which some of the faults do, not at what is found: that takes minutes. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { PLANTED_EVERY = 5 };
#else
enum { PLANTED_EVERY = 1 };
#endif

static device_case device;

/* Failures of a check, without its words. */
static int failures_of(cuda_check *check) {
    int before = check_failures;
    check(&device, true);
    int found = check_failures - before;
    check_failures = before;
    return found;
}

static void test_honest_host_passes(void) {
    for (int i = 0; i < CUDA_CHECK_COUNT; i++) {
        failures_of_op = 0;
        int found = failures_of(cuda_checks[i].check);
        CHECK(found == 0, "%s: %d failures", cuda_checks[i].name, found);
    }
    failures_of_op = 0;
    host_reads_late = true;
    for (int i = CHECK_EXPERTS; i <= CHECK_ROUTER; i++) {
        int found = failures_of(cuda_checks[i].check);
        CHECK(found == 0, "%s, read late: %d failures", cuda_checks[i].name, found);
    }
    host_reads_late = false;
    failures_of_op = FAILURES_SHOWN;      /* from here on failures are what is wanted: silent */
}

static void test_planted_faults_are_found(void) {
    static const struct { host_fault_kind fault; cuda_check_index check; } faults[] = {
        { FAULT_LAST_ROW, CHECK_GEMV_LAUNCHES },      { FAULT_LAST_ROW, CHECK_EXPERTS },
        { FAULT_PAST_THE_END, CHECK_GEMV_LAUNCHES },  { FAULT_PAST_THE_END, CHECK_EXPERTS },
        { FAULT_ONE_WEIGHT, CHECK_GEMV_TYPES },       { FAULT_ONE_WEIGHT, CHECK_EXPERTS },
        { FAULT_NO_REST, CHECK_GEMV_TYPES },          { FAULT_NO_REST, CHECK_EXPERTS },
        { FAULT_COARSE_CODES, CHECK_GEMV_TYPES },     { FAULT_COARSE_CODES, CHECK_GEMV_SOURCES },
        { FAULT_NORM_LENGTH, CHECK_GEMV_SOURCES },    { FAULT_NORM_LENGTH, CHECK_NORM },
        { FAULT_NORM_LENGTH, CHECK_GDN },             { FAULT_THIRD_ADD, CHECK_GEMV_SOURCES },
        { FAULT_THIRD_ADD, CHECK_ELEMENTWISE },       { FAULT_X_OUT, CHECK_GEMV_SOURCES },
        { FAULT_NORMS_TWICE, CHECK_GEMV_SOURCES },    { FAULT_GREEDY_TIE, CHECK_GREEDY },
        { FAULT_COUNTER, CHECK_GREEDY },              { FAULT_GIVEN_TOKEN, CHECK_GREEDY },
        { FAULT_DIFFERS, CHECK_GEMV_TYPES },          { FAULT_SLOW_ORDER, CHECK_FOLDED },
        { FAULT_EMBED_TOKEN, CHECK_EMBED },           { FAULT_ANGLE, CHECK_EMBED },
        { FAULT_HEAD_MAP, CHECK_GDN },                { FAULT_RING_SLOT, CHECK_GDN },
        { FAULT_STATE_ROW, CHECK_GDN },               { FAULT_BETA, CHECK_GDN },
        { FAULT_Z_ROW, CHECK_GDN },                   { FAULT_ATTEND_LAST, CHECK_ATTENTION },
        { FAULT_ATTEND_TAIL, CHECK_ATTENTION },       { FAULT_ROPE, CHECK_ATTENTION },
        { FAULT_CACHE_ROW, CHECK_ATTENTION },         { FAULT_TIE_ORDER, CHECK_ROUTER },
        { FAULT_PART_BORDER, CHECK_ATTENTION },       { FAULT_PART_TOP, CHECK_ATTENTION },
        { FAULT_LAST_PART, CHECK_GEMV_SOURCES },      { FAULT_PART_TOTALS, CHECK_GEMV_SOURCES },
        { FAULT_WEIGHTS, CHECK_ROUTER },
        { FAULT_EXPERT_STRIDE, CHECK_EXPERTS },       { FAULT_EXPERT_STRIDE, CHECK_ROUTER },
        { FAULT_SECOND_PART, CHECK_EXPERTS },         { FAULT_SHARED_GATE, CHECK_EXPERTS },
        { FAULT_DOWN_BY_CHOICE, CHECK_ROUTER },       { FAULT_SQUARES, CHECK_GDN },
        { FAULT_HEAD_FACTOR, CHECK_GEMV_SOURCES },    { FAULT_RESIDUAL, CHECK_GEMV_SOURCES },
        { FAULT_RESIDUAL, CHECK_FOLDED },             { FAULT_SUM, CHECK_EXPERTS },
        { FAULT_SUM_AND_PARTS, CHECK_EXPERTS },       { FAULT_HELD_TIES, CHECK_ROUTER },
        { FAULT_STREAMED_TIES, CHECK_ROUTER },        { FAULT_DOWN_TIES, CHECK_ROUTER },
        { FAULT_DOWN_RANK, CHECK_ROUTER },            { FAULT_DOWN_RANK, CHECK_EXPERTS },
        { FAULT_ROUTED_EARLY, CHECK_EXPERTS },
        { FAULT_ROUTED_EARLY, CHECK_ROUTER },         { FAULT_NO_AWAIT, CHECK_EXPERTS },
        { FAULT_NO_AWAIT, CHECK_ROUTER },             { FAULT_STALE_SIGNAL, CHECK_EXPERTS },
        { FAULT_STALE_SIGNAL, CHECK_ROUTER },         { FAULT_STEP, CHECK_GREEDY },
        { FAULT_NOT_CLEARED, CHECK_EMBED },           { FAULT_NOT_CLEARED, CHECK_EXPERTS },
        { FAULT_CLEARED_SHORT, CHECK_EMBED },
        { FAULT_ROUTER_PLACE, CHECK_EMBED },          { FAULT_ROUTER_PLACE, CHECK_SUMS },
        { FAULT_ROUTER_PLACE, CHECK_ROUTER },         { FAULT_ROUTER_PLACE, CHECK_ELEMENTWISE },
        { FAULT_ROUTER_NORM, CHECK_SUMS },            { FAULT_ROUTER_SHARED_ROW, CHECK_SUMS },
        { FAULT_ROUTER_LAST_GROUP, CHECK_SUMS },      { FAULT_ROUTER_CLAMP, CHECK_SUMS },
        { FAULT_ROUTER_NAN, CHECK_SUMS },             { FAULT_ROUTER_ROUNDING, CHECK_SUMS },
        { FAULT_ROUTER_ORDER, CHECK_SUMS },
        { FAULT_ROUTER_FOLDED, CHECK_SUMS },          { FAULT_ROUTER_FOLDED, CHECK_EXPERTS },
        { FAULT_ROUTER_SQUARES, CHECK_SUMS },         { FAULT_ROUTER_PAST_THE_END, CHECK_SUMS },
        { FAULT_ROUTER_SCALE, CHECK_ROUTER },         { FAULT_ROUTER_SCALE, CHECK_ELEMENTWISE },
        { FAULT_ROUTER_EXACT, CHECK_ROUTER },
        { FAULT_SHARED_PLACE, CHECK_EXPERTS },        { FAULT_SHARED_PLACE, CHECK_ELEMENTWISE },
        { FAULT_SHARED_GATE, CHECK_ELEMENTWISE },     { FAULT_SHARED_UP, CHECK_EXPERTS },
        { FAULT_SHARED_H, CHECK_EXPERTS },
    };
    bool is_tried[FAULT_COUNT] = { [FAULT_NONE] = true, [FAULT_NO_ROUTED_SIGNAL] = true, [FAULT_ROUTER_LAYER] = true };     /* test_gpu_step.c */
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        host_fault = faults[i].fault;
        is_tried[host_fault] = true;
        if (i % PLANTED_EVERY != 0) continue;
        int found = failures_of(cuda_checks[faults[i].check].check);
        CHECK(found > 0, "fault %d is not found by '%s'", (int)host_fault, cuda_checks[faults[i].check].name);
    }
    host_fault = FAULT_NONE;
    for (int f = 0; f < FAULT_COUNT; f++) CHECK(is_tried[f], "fault %d is never planted", f);
}

int main(void) {
    spk_cuda *cuda;
    spk_error err;
    random_state = seed;
    CHECK_OK(spk_cuda_open(&cuda, &err), err);
    device_open(&device, cuda);
    RUN(test_honest_host_passes);
    RUN(test_planted_faults_are_found);
    device_close(&device);
    return CHECK_EXIT();
}
