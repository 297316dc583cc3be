#include "runtime/bench_account.h"

#include <inttypes.h>
#include <stdio.h>

#include "runtime/tool.h"

static const char *const PHASES[SPK_PHASE_COUNT] = {
    [SPK_PHASE_EMBED] = "embedding",           [SPK_PHASE_GDN_IN] = "GDN in",          [SPK_PHASE_GDN] = "GDN core",
    [SPK_PHASE_ATTENTION_IN] = "attention in", [SPK_PHASE_ATTENTION] = "attention",    [SPK_PHASE_MIXER_OUT] = "mixer out",
    [SPK_PHASE_ROUTER] = "router, shared in",  [SPK_PHASE_EXPERTS_UP] = "experts up",  [SPK_PHASE_EXPERTS_DOWN] = "experts down",
    [SPK_PHASE_FFN] = "feed-forward",          [SPK_PHASE_HEAD] = "head",
};

typedef struct { double measured_s, floor_s; } times;
static times of_phase(const spk_account *a, uint32_t phase, double bytes_per_s) {
    return (times){ a->phases[phase].s, a->phases[phase].kernel_count * a->node_s + (double)a->phases[phase].bytes / bytes_per_s };
}
static times of_all(const spk_account *a, double bytes_per_s) {
    times sum = { 0 };
    for (uint32_t i = 0; i < SPK_PHASE_COUNT; i++) {
        const times t = of_phase(a, i, bytes_per_s);
        sum.measured_s += t.measured_s;
        sum.floor_s += t.floor_s;
    }
    return sum;
}

/* The n-th phase that has kernels; SPK_PHASE_COUNT: there are fewer. */
static uint32_t find_phase(const spk_account *a, uint32_t n) {
    uint32_t phase = 0;
    while (phase < SPK_PHASE_COUNT && (a->phases[phase].kernel_count == 0 || n-- > 0)) phase++;
    return phase;
}

uint32_t spk_bench_account_line_count(const spk_account *a) {
    uint32_t count = 2;
    while (find_phase(a, count - 2) < SPK_PHASE_COUNT) count++;
    return count;
}

void spk_bench_account_line(const spk_account *a, uint32_t index, double step_s, double bytes_per_s, char line[SPK_BENCH_ACCOUNT_LINE]) {
    const uint32_t phase = index > 0 ? find_phase(a, index - 1) : 0;
    if (index == 0) {
        (void)snprintf(line, SPK_BENCH_ACCOUNT_LINE, "%-18s %7s %9s %9s %9s %9s %7s", "phase", "kernels", "us each", "us", "MB", "GB/s", "floor");
    } else if (phase < SPK_PHASE_COUNT) {
        const uint32_t count = a->phases[phase].kernel_count;
        const double bytes = (double)a->phases[phase].bytes;
        const times t = of_phase(a, phase, bytes_per_s);
        (void)snprintf(line, SPK_BENCH_ACCOUNT_LINE, "%-18s %7" PRIu32 " %9.2f %9.1f %9.1f %9.0f %7.1f", PHASES[phase], count,
                       t.measured_s / count * 1e6, t.measured_s * 1e6, bytes * 1e-6, bytes / t.measured_s * 1e-9, t.floor_s * 1e6);
    } else {
        const times all = of_all(a, bytes_per_s);
        (void)snprintf(line, SPK_BENCH_ACCOUNT_LINE, "%-18s %7" PRIu32 " %9s %9.1f of the %.1f that a step takes (%+.1f %%); floor %.1f: bytes at "
                       "the bandwidth, %.2f us a kernel", "sum", a->kernel_count, "", all.measured_s * 1e6, step_s * 1e6,
                       100 * (all.measured_s / step_s - 1), all.floor_s * 1e6, a->node_s * 1e6);
    }
}

cJSON *spk_bench_account_json(const spk_account *a, double step_s, double bytes_per_s) {
    cJSON *object = cJSON_CreateObject(), *phases = cJSON_AddArrayToObject(object, "phases");
    for (uint32_t i = 0; i < SPK_PHASE_COUNT; i++) {
        if (a->phases[i].kernel_count == 0) continue;
        cJSON *phase = cJSON_CreateObject();
        cJSON_AddStringToObject(phase, "name", PHASES[i]);
        spk_tool_json_number(phase, "kernels", a->phases[i].kernel_count);
        spk_tool_json_number(phase, "bytes", (double)a->phases[i].bytes);
        spk_tool_json_number(phase, "seconds", a->phases[i].s);
        spk_tool_json_number(phase, "floor_s", of_phase(a, i, bytes_per_s).floor_s);
        cJSON_AddItemToArray(phases, phase);
    }
    const times all = of_all(a, bytes_per_s);
    spk_tool_json_number(object, "sum_s", all.measured_s);
    spk_tool_json_number(object, "step_s", step_s);
    spk_tool_json_number(object, "node_s", a->node_s);
    return object;
}
