/* runtime/gpu_load.c - a model's sections to the device: what is loaded where, by which plan; the work is gpu_load_run.c.
 *
 * Refuses nothing that opening took: which tensors the kernels take was checked before.
 */
#include "runtime/gpu_internal.h"

#include "runtime/gpu_load_internal.h"

/* The fastest on an H200 with 16 CPUs, of those that tests/bench_load.c compares: pages that are cached are read into pinned
 * buffers at 38.7 GB/s, verified; pinning them where they lie takes 0.022 to 0.034 s a GiB however many threads do it, in all
 * 19.6 GB/s.  Two slots: a thread fills one while the other's copy is under way; one queue was faster than two. */
enum {
    LOAD_THREAD_MAX       = 16,
    LOAD_SLOTS_PER_THREAD = 2,
    LOAD_PIECE_BYTES      = 32 << 20,
    LOAD_BUFFER_BYTES     = SPK_CHUNK_BYTES,
    LOAD_STREAM_COUNT     = 1
};

static spk_load_plan plan_for(uint32_t thread_count) {
    if (thread_count == 0) thread_count = spk_cpu_count();
    if (thread_count > LOAD_THREAD_MAX) thread_count = LOAD_THREAD_MAX;
    return (spk_load_plan){ .cached_way = SPK_LOAD_READ, .uncached_way = SPK_LOAD_DIRECT, .thread_count = thread_count,
                            .slots_per_thread = LOAD_SLOTS_PER_THREAD, .piece_bytes = LOAD_PIECE_BYTES,
                            .buffer_bytes = LOAD_BUFFER_BYTES };
}

/* One allocation, whose layout is that of the sections.  EXTRA is not read by decode, and stays on the host. */
static spk_status allocate(const spk_model *m, spk_gpu_model *g, spk_load_range ranges[SPK_PLACE_COUNT], spk_error *err) {
    uint64_t total = 0;
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++) {
        g->section_bytes[s] = s + 1 == SPK_PLACE_EXTRA ? 0 : m->section_bytes[s];
        total += g->section_bytes[s];
    }
    void *memory = NULL;
    SPK_TRY(spk_cuda_allocate_raw(g->cuda, total, "the model's weights", &memory, err));
    uint8_t *at = memory;
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++) {
        g->d_sections[s] = at;
        ranges[s] = (spk_load_range){ .bytes = m->sections[s], .size_bytes = g->section_bytes[s], .d_to = at, .place = s + 1 };
        at += g->section_bytes[s];
    }
    g->times.bytes = total;
    return SPK_OK;
}

static spk_status load_sections(const spk_model *m, spk_gpu_model *g, const spk_model_options *options, spk_error *err) {
    spk_load_range ranges[SPK_PLACE_COUNT];
    uint64_t way_bytes[SPK_LOAD_WAY_COUNT] = { 0 };
    spk_load_plan plan = plan_for(options->thread_count);
    spk_transfer transfer;
    SPK_TRY(allocate(m, g, ranges, err));
    SPK_TRY(spk_cuda_transfer_open(g->cuda, spk_load_slot_count(&plan), LOAD_STREAM_COUNT, &transfer, err));
    spk_load_job job = { .pack = m->pack, .ranges = ranges, .range_count = SPK_PLACE_COUNT, .transfer = &transfer,
                         .progress = options->progress, .progress_context = options->progress_context };
    spk_status status = spk_load_run(&job, &plan, way_bytes, err);
    transfer.close(transfer.context);
    g->times.pinned_bytes = way_bytes[SPK_LOAD_PINNED];
    g->times.direct_bytes = way_bytes[SPK_LOAD_DIRECT];
    g->times.is_verified = m->pack != NULL;
    return status;
}

spk_matrix spk_gpu_matrix(const spk_model *m, const spk_gpu_model *g, spk_matrix w) {
    for (uint32_t i = 0; i < SPK_PLACE_COUNT; i++)
        if (w.data >= m->sections[i] && w.data < m->sections[i] + m->section_bytes[i]) {
            w.data = g->d_sections[i] + (w.data - m->sections[i]);
            return w;
        }
    w.data = NULL;
    return w;
}
const float *spk_gpu_vector(const spk_model *m, const spk_gpu_model *g, const float *v) { return v == NULL ? NULL : g->d_vectors + (v - m->vectors); }

/* Routers, from the device's own copies. */
static spk_status arrange_routers(const spk_model *m, spk_gpu_model *g, spk_error *err) {
    const spk_model_config *c = &m->config;
    uint64_t router_count = (uint64_t)spk_router_rows(c) * c->hidden_size;
    void *routers = NULL;
    spk_cuda_step *step = NULL;
    if (c->expert_count == 0) return SPK_OK;
    SPK_TRY(spk_cuda_allocate_raw(g->cuda, c->layer_count * router_count * sizeof(float), "the model's routers", &routers, err));
    g->d_routers = routers;
    SPK_TRY(spk_cuda_step_begin(g->cuda, err));
    for (uint32_t i = 0; i < c->layer_count; i++) {
        const spk_layer *layer = &m->layers[i];
        spk_cuda_router_source source = { .experts = spk_gpu_matrix(m, g, layer->router), .shared = spk_gpu_matrix(m, g, layer->shared_router),
                                          .norm_weight = spk_gpu_vector(m, g, layer->ffn_norm), .out = g->d_routers + i * router_count };
        spk_cuda_launch_router_source(g->cuda, &source);
    }
    SPK_TRY(spk_cuda_step_end(g->cuda, &step, err));
    spk_status status = spk_cuda_step_run(g->cuda, step, 1, err);
    if (status == SPK_OK) status = spk_cuda_wait(g->cuda, err);
    spk_cuda_step_free(step);
    return status;
}

spk_status spk_gpu_load(const spk_model *m, spk_gpu_model *g, const spk_model_options *options, spk_error *err) {
    double start_s = spk_gpu_now_s();
    void *vectors = NULL;
    uint64_t vector_bytes = m->vector_count * sizeof(float);
    SPK_TRY(load_sections(m, g, options, err));
    SPK_TRY(spk_cuda_allocate_raw(g->cuda, vector_bytes, "the model's vectors", &vectors, err));
    g->d_vectors = vectors;
    SPK_TRY(spk_cuda_upload(g->cuda, g->d_vectors, m->vectors, vector_bytes, err));
    SPK_TRY(arrange_routers(m, g, err));
    g->times.load_s = spk_gpu_now_s() - start_s;
    return SPK_OK;
}
