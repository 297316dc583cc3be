/* tests/checkkern_cuda_bench.h - times CUDA kernels that have just passed, cold, as the chains that a step is made of.
 *
 * A row is one op at a full shape: a step of as many launches as there are distinct weights (or states, or caches), together
 * several times larger than the L2 cache, replayed BENCH_REPLAYS times in a row; us is the time of a launch, chained to its
 * predecessor as in a decode step.  bytes_model counts weights, states and caches, once (states twice: read and written).
 * read_gbps is a kernel that only reads, measured before; "fraction" is of that.
 */
#ifndef SPK_CHECKKERN_CUDA_BENCH_H
#define SPK_CHECKKERN_CUDA_BENCH_H

#include "tests/checkkern_bench.h"
#include "tests/checkkern_cuda_checks.h"

#define CHAIN_BYTES (UINT64_C(600) << 20)
#define READ_BYTES  (UINT64_C(4) << 30)
enum { BENCH_REPLAYS = 10, CHAIN_MAX = 256 };

typedef struct {
    const char *op, *shape;
    uint64_t    bytes;              /* of a launch */
    uint32_t    launch_count;
} cuda_item;

static uint32_t chain_length(uint64_t bytes) {
    uint64_t count = CHAIN_BYTES / (bytes + 2 * GUARD_BYTES + EXPERT_ALIGN);
    return count < 1 ? 1 : count > CHAIN_MAX ? CHAIN_MAX : (uint32_t)count;
}

/* The step that has been recorded. */
static void bench_chain(device_case *t, const cuda_item *item, double read_gbps) {
    double us[BENCH_RUNS];
    spk_cuda_step *step = NULL;
    MUST(spk_cuda_step_end(t->cuda, &step, &must_error));
    upload_weights(t);
    MUST(spk_cuda_upload(t->cuda, t->d_memory, t->host, t->used, &must_error));
    for (int run = -1; run < BENCH_RUNS; run++) {
        double start = now_s();
        MUST(spk_cuda_step_run(t->cuda, step, BENCH_REPLAYS, &must_error));
        MUST(spk_cuda_wait(t->cuda, &must_error));
        if (run >= 0) us[run] = 1e6 * (now_s() - start) / BENCH_REPLAYS / item->launch_count;
    }
    spk_cuda_step_free(step);
    qsort(us, BENCH_RUNS, sizeof *us, by_value);
    double median = us[BENCH_RUNS / 2], gbps = 1e-3 * (double)item->bytes / median;
    printf("%s,%s,cuda,%u,checked,%llu,cold,%d,%.3f,%.3f,%.1f,%.1f,%.3f\n", item->op, item->shape, item->launch_count,
           (unsigned long long)item->bytes, (int)BENCH_RUNS, us[0], median, gbps, read_gbps,
           read_gbps > 0 ? gbps / read_gbps : 0);
    fflush(stdout);
}

/* ---- Chains ---- */

/* A projection: with its router, as out of a mixer. */
static void bench_gemv(device_case *t, const gemv_spec *spec, const projection_spec *projection, double read_gbps) {
    char shape[160];
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < SPK_CUDA_SEGMENT_MAX && spec->segments[i].rows != 0; i++)
        bytes += matrix_bytes(spec->segments[i].type, spec->segments[i].rows, spec->count) *
                 (spec->segments[i].is_pair ? 2 : 1);
    describe_gemv(spec, W_RANDOM, X_RANDOM);
    if (projection != NULL) describe_projection(projection, W_RANDOM, X_RANDOM, NULL);
    (void)snprintf(shape, sizeof shape, "%s", strstr(case_text, "gemv ") + 5);
    for (char *c = shape; *c != '\0'; c++) if (*c == ',') *c = ' ';
    const cuda_item item = { "gemv", shape, bytes, chain_length(bytes) };
    case_begin(t);
    weights_drop(t);
    spk_cuda_gemv g = make_gemv(t, spec, W_RANDOM, X_RANDOM), chain[CHAIN_MAX];
    test_router router = { 0 };
    if (projection != NULL) {                /* one for all: its weights are few */
        router = put_router(t, projection->row_count, spec->segments[0].rows, projection->type, projection->has_shared);
        g.router = make_router(t, &router);
    }
    for (uint32_t n = 0; n < item.launch_count; n++) {
        chain[n] = g;
        for (uint32_t i = 0; n > 0 && i < g.segment_count; i++)
            put_pair(t, g.segments[i].w.type, g.segments[i].w.layout, g.segments[i].w.row_count, spec->count, W_RANDOM,
                     &chain[n].segments[i].w, g.segments[i].up.data != NULL ? &chain[n].segments[i].up : NULL);
    }
    case_record(t);
    for (uint32_t n = 0; n < item.launch_count; n++) spk_cuda_launch_gemv(t->cuda, &chain[n]);
    bench_chain(t, &item, read_gbps);
    router_free(&router);
}

/* Of launch n: its own `used` experts, so that a chain reads all experts. */
static spk_cuda_routing take_routing(device_case *t, const expert_spec *spec, uint32_t n) {
    const uint64_t bytes = sum_words(spec->count + 1) * sizeof(long long);
    long long *d_sums = take(t, INPUT, bytes, 0), *sums = host_of(t, d_sums);
    float *d_squares = take_floats(t, INPUT, spec->hidden / GROUP);
    for (uint32_t i = 0; i <= spec->count; i++) sums[place_of(i)] = (long long)(SUM_UNITS * (double)check_uniform(&random_state));
    for (uint32_t r = 0; r < spec->used; r++) sums[place_of((n * spec->used + r) % spec->count)] += (long long)(4 * SUM_UNITS);
    fill_squares(host_floats(t, d_squares), spec->hidden, 1);
    return (spk_cuda_routing){ .sums = d_sums, .squares = d_squares, .expert_count = spec->count, .used_count = spec->used,
                               .column_count = spec->hidden, .eps = GPU_EPS };
}

/* One that is set for good: what it speaks of was uploaded before the step. */
static spk_cuda_signal take_set_signal(device_case *t) {
    uint32_t *d_flag = take(t, INPUT, 4, 0), *d_step = take(t, INPUT, 4, 0);
    *(uint32_t *)host_of(t, d_flag) = 1;
    *(uint32_t *)host_of(t, d_step) = 0;
    return (spk_cuda_signal){ d_flag, d_step };
}

/* As in a step: the sums are there before down's predecessor ends, and up takes the shared expert along. */
static void bench_experts(device_case *t, const expert_spec *spec, double read_gbps) {
    char shape[96];
    (void)snprintf(shape, sizeof shape, "%s %u of %u %ux%u %s/%s", spec->name, spec->used, spec->count, spec->hidden,
                   spec->ff, spk_type_name(spec->gate_type), spk_type_name(spec->down_type));
    const uint32_t count = spec->count / spec->used;
    const bool has_shared = spec->shared_ff != 0;
    const uint64_t shared_bytes = has_shared ? matrix_bytes(spec->shared_type, spec->hidden, spec->shared_ff) : 0;
    const cuda_item items[2] = {
        { "experts_up", shape, 2 * (spec->used * matrix_bytes(spec->gate_type, spec->ff, spec->hidden) + shared_bytes), count },
        { "experts_down", shape, spec->used * matrix_bytes(spec->down_type, spec->hidden, spec->ff) + shared_bytes,
          count }
    };
    weights_drop(t);
    const expert_set set = put_experts(t, spec);
    for (int side = 0; side < 2; side++) {
        DESCRIBE("%s %s", items[side].op, shape);
        case_begin(t);
        const spk_cuda_signal set_signal = take_set_signal(t);
        spk_cuda_experts_up up = { .source = { .x = take_input_as(t, spec->hidden, X_RANDOM),
                                               .norm_weight = take_input_as(t, spec->hidden, X_RANDOM),
                                               .eps = GPU_EPS,
                                               .count = spec->hidden },
                                   .gate = set.gate,
                                   .up = set.up,
                                   .expert_stride_bytes = set.stride_bytes,
                                   .h = take_floats(t, OUTPUT, spec->used * spec->ff),
                                   .shared_gate = set.shared_gate,
                                   .shared_up = set.shared_up,
                                   .shared_h = has_shared ? take_floats(t, OUTPUT, spec->shared_ff) : NULL };
        spk_cuda_experts_down down = { .routed_ready = set_signal,
                                       .down = set.down,
                                       .shared_down = set.shared_down,
                                       .expert_stride_bytes = set.stride_bytes,
                                       .h = take_staged_as(t, spec->used * spec->ff, X_RANDOM),
                                       .shared_h = take_staged_as(t, spec->shared_ff + 32, X_RANDOM),
                                       .shared = take_floats(t, OUTPUT, spec->hidden) };
        take_parts(t, &down, spec->hidden);
        spk_cuda_routing routings[CHAIN_MAX];
        for (uint32_t n = 0; n < count; n++) routings[n] = take_routing(t, spec, n);
        case_record(t);
        for (uint32_t n = 0; n < count; n++) {
            up.routing = down.routing = routings[n];
            if (side == 0) spk_cuda_launch_experts_up(t->cuda, &up);
            else spk_cuda_launch_experts_down(t->cuda, &down);
        }
        bench_chain(t, &items[side], read_gbps);
    }
}

/* Zeroed or random memory among the weights, for states and caches. */
static void *take_memory(device_case *t, uint64_t size_bytes, bool is_random) {
    uint8_t *d_memory = take_weights(t, size_bytes, DEVICE_ALIGN);
    const spk_matrix halves = { d_memory, 128, SPK_TYPE_F16, SPK_LAYOUT_ROWS, size_bytes / 128, 64 };
    if (is_random) fill_matrix(t, &halves, W_RANDOM);
    else memset(t->weights + (d_memory - t->d_weights), 0, size_bytes);
    return d_memory;
}

static void bench_gdn(device_case *t, const gdn_spec *spec, spk_cuda_gdn_fusion fusion, double read_gbps) {
    static const char *const names[] = { "gdn plain", "gdn conv fused", "gdn fused" };
    DESCRIBE("%s", names[fusion]);
    case_begin(t);
    weights_drop(t);
    gdn_case c = make_gdn(t, spec);
    fill_token(t, &c, 0, X_RANDOM);
    char shape[64];
    (void)snprintf(shape, sizeof shape, "k_heads=%u v_heads=%u %ux%u", spec->k_heads, c.v_heads, spec->k_dim, spec->v_dim);
    const uint64_t state_bytes = (uint64_t)c.value_dim * spec->k_dim * sizeof(float),
                   ring_bytes = (uint64_t)c.channels * spec->taps * sizeof(float);
    const cuda_item item = { names[fusion], shape, 2 * state_bytes + ring_bytes,
                             chain_length(SPK_CUDA_GDN_STATES * state_bytes + ring_bytes) };
    spk_cuda_gdn chain[CHAIN_MAX];
    for (uint32_t n = 0; n < item.launch_count; n++) {
        chain[n] = c.args[fusion];
        chain[n].delta_state = take_memory(t, SPK_CUDA_GDN_STATES * state_bytes, false);
        chain[n].conv_state = take_memory(t, ring_bytes, false);
    }
    case_record(t);
    for (uint32_t n = 0; n < item.launch_count; n++) spk_cuda_launch_gdn(t->cuda, &chain[n], fusion);
    bench_chain(t, &item, read_gbps);
}

static void bench_attention(device_case *t, const head_shape *s, uint32_t count, double read_gbps) {
    DESCRIBE("attention context=%u", count);
    case_begin(t);
    weights_drop(t);
    const uint32_t kv_width = s->kv_heads * s->dim, position = count - 1;
    const spk_cuda_attention width = { .kv_head_count = s->kv_heads, .head_dim = s->dim, .context_tokens = count };
    const uint64_t cache_bytes = spk_cuda_attention_cache_bytes(&width);
    char shape[96];
    (void)snprintf(shape, sizeof shape, "heads=%u/%u dim=%u context=%u", s->heads, s->kv_heads, s->dim, count);
    const cuda_item item = { "attention", shape, 2 * cache_bytes, chain_length(2 * cache_bytes) };
    uint32_t *d_position = take(t, INPUT, 4, 0);
    memcpy(host_of(t, d_position), &position, sizeof position);
    spk_cuda_attention a = { .d_position = d_position,
                             .head_count = s->heads,
                             .kv_head_count = s->kv_heads,
                             .head_dim = s->dim,
                             .rope_dim = s->rope_dim,
                             .is_gated = s->is_gated,
                             .context_tokens = count,
                             .eps = GPU_EPS,
                             .q = take_staged_as(t, s->heads * (s->is_gated ? 2 : 1) * s->dim, X_RANDOM),
                             .k = take_staged_as(t, kv_width, X_RANDOM),
                             .v = take_staged_as(t, kv_width, X_RANDOM),
                             .q_norm = take_input_as(t, s->dim, X_RANDOM),
                             .k_norm = take_input_as(t, s->dim, X_RANDOM),
                             .cos_sin = take_staged_as(t, s->rope_dim, X_RANDOM),
                             .out = take_floats(t, OUTPUT, s->heads * s->dim) },
                       chain[CHAIN_MAX];
    const uint64_t scratch_bytes = spk_cuda_attention_scratch_bytes(t->cuda, &a);
    a.partial = take(t, SCRATCH, scratch_bytes, 0);
    memset(host_of(t, a.partial), 0, scratch_bytes);
    for (uint32_t n = 0; n < item.launch_count; n++) {
        chain[n] = a;
        chain[n].k_cache = take_memory(t, cache_bytes, true);
        chain[n].v_cache = take_memory(t, cache_bytes, true);
    }
    case_record(t);
    for (uint32_t n = 0; n < item.launch_count; n++) spk_cuda_launch_attention(t->cuda, &chain[n]);
    bench_chain(t, &item, read_gbps);
}

static void bench_small_kernels(device_case *t) {
    enum { COUNT = 2048, LAUNCHES = 64 };
    const cuda_item items[] = { { "elementwise add", "2048", 0, LAUNCHES },
                                { "norm", "2048", 0, LAUNCHES },
                                { "top_k", "256 k=8", 0, LAUNCHES },
                                { "router", "257x2048", 0, LAUNCHES } };
    for (int op = 0; op < 4; op++) {
        DESCRIBE("%s", items[op].op);
        case_begin(t);
        weights_drop(t);
        const expert_spec selecting = { .hidden = COUNT, .count = 256, .used = 8 };
        test_router routed = put_router(t, 257, COUNT, SPK_TYPE_F32, true);
        const spk_cuda_router router = make_router(t, &routed);
        spk_cuda_norm norm = { .source = make_source(t, &source_kinds[S_NORM], COUNT, 0, false, X_RANDOM),
                               .out = take_floats(t, OUTPUT, COUNT),
                               .factor = take_floats(t, OUTPUT, 1) };
        spk_cuda_top_k top = { .routing = take_routing(t, &selecting, 0), .choice = take(t, OUTPUT, 32, 0), .weight = take_floats(t, OUTPUT, 8) };
        spk_cuda_elementwise add = {
            .op = SPK_CUDA_ADD, .a = norm.source.x, .b = norm.source.x, .out = norm.out, .count = COUNT
        };
        case_record(t);
        for (int n = 0; n < LAUNCHES; n++) {
            if (op == 0) spk_cuda_launch_elementwise(t->cuda, &add);
            else if (op == 1) spk_cuda_launch_norm(t->cuda, &norm);
            else if (op == 2) spk_cuda_launch_top_k(t->cuda, &top);
            else spk_cuda_launch_router(t->cuda, &router, norm.source.x);
        }
        bench_chain(t, &items[op], 0);
        router_free(&routed);
    }
}

static void bench_cuda(device_case *t, const bool *passed) {
    static const uint32_t contexts[] = { 128, 4096, 32768 };
    enum { READ_PASSES = 5 };
    spk_cuda_bandwidth read;
    MUST(spk_cuda_read_bandwidth(t->cuda, READ_BYTES, READ_PASSES, &read, &must_error));
    const double read_gbps = 1e-9 * read.bytes_per_s;
    printf("op,shape,variant,launches,status,bytes_model,cache,runs,us_min,us_median,gbps_median,read_gbps,fraction\n");
    if (passed[CHECK_ELEMENTWISE] && passed[CHECK_NORM] && passed[CHECK_SUMS] && passed[CHECK_ROUTER]) bench_small_kernels(t);
    bool gemv_passed = passed[CHECK_GEMV_TYPES] && passed[CHECK_GEMV_SOURCES] && passed[CHECK_GEMV_LAUNCHES];
    for (size_t i = 0; gemv_passed && i < sizeof gemv_launches / sizeof *gemv_launches; i++)
        if (gemv_launches[i].is_full) bench_gemv(t, &gemv_launches[i], NULL, read_gbps);
    for (size_t i = 0; gemv_passed && passed[CHECK_SUMS] && i < sizeof projection_specs / sizeof *projection_specs; i++)
        if (projection_specs[i].gemv.is_full) bench_gemv(t, &projection_specs[i].gemv, &projection_specs[i], read_gbps);
    for (size_t i = 0; passed[CHECK_EXPERTS] && passed[CHECK_ROUTER] && i < sizeof expert_specs / sizeof *expert_specs; i++)
        if (expert_specs[i].is_full) bench_experts(t, &expert_specs[i], read_gbps);
    for (size_t i = 0; passed[CHECK_GDN] && i < sizeof gdn_specs / sizeof *gdn_specs; i++)
        for (int fusion = 0; gdn_specs[i].is_full && fusion < GDN_FUSIONS; fusion++)
            bench_gdn(t, &gdn_specs[i], (spk_cuda_gdn_fusion)fusion, read_gbps);
    for (int s = 0; passed[CHECK_ATTENTION] && s < 2; s++)
        for (int n = 0; n < 3; n++) bench_attention(t, &head_shapes[s], contexts[n], read_gbps);
}

#endif
