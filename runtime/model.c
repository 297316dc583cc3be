/* runtime/model.c - opening a model: a pack is mapped, a GGUF is laid out in memory as its native pack would be.
 *
 * After opening, kernels see spk_matrix views into the sections; only vectors (norms, conv taps, ...) are copied, as
 * floats.  Nothing here depends on the backend but the kernel table.
 */
#include "runtime/model_internal.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/dequant.h"

static spk_status out_of_memory(const char *path, spk_error *err) {
    return spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
}

/* ---- Binding tensors to roles ---- */

bool spk_role_is_vector(spk_role role) {
    switch (role) {
    case SPK_ROLE_ATTN_NORM: case SPK_ROLE_FFN_NORM: case SPK_ROLE_OUTPUT_NORM: case SPK_ROLE_ATTN_Q_NORM:
    case SPK_ROLE_ATTN_K_NORM: case SPK_ROLE_GDN_CONV: case SPK_ROLE_GDN_A: case SPK_ROLE_GDN_DT: case SPK_ROLE_GDN_NORM:
        return true;
    default:
        return false;
    }
}

static const float **vector_slot(spk_model *m, spk_layer *layer, spk_role role) {
    switch (role) {
    case SPK_ROLE_ATTN_NORM:   return &layer->attn_norm;
    case SPK_ROLE_FFN_NORM:    return &layer->ffn_norm;
    case SPK_ROLE_ATTN_Q_NORM: return &layer->q_norm;
    case SPK_ROLE_ATTN_K_NORM: return &layer->k_norm;
    case SPK_ROLE_GDN_CONV:    return &layer->gdn_taps;
    case SPK_ROLE_GDN_A:       return &layer->gdn_a;
    case SPK_ROLE_GDN_DT:      return &layer->gdn_dt;
    case SPK_ROLE_GDN_NORM:    return &layer->gdn_norm;
    default:                   return &m->output_norm;
    }
}

static spk_matrix *matrix_slot(spk_model *m, spk_layer *layer, spk_role role) {
    switch (role) {
    case SPK_ROLE_TOKEN_EMBD:    return &m->embedding;
    case SPK_ROLE_OUTPUT:        return &m->output;
    case SPK_ROLE_GDN_QKV:       return &layer->gdn_qkv;
    case SPK_ROLE_GDN_GATE:      return &layer->gdn_gate;
    case SPK_ROLE_GDN_ALPHA:     return &layer->gdn_alpha;
    case SPK_ROLE_GDN_BETA:      return &layer->gdn_beta;
    case SPK_ROLE_GDN_OUT:       return &layer->gdn_out;
    case SPK_ROLE_ATTN_Q:        return &layer->q;
    case SPK_ROLE_ATTN_K:        return &layer->k;
    case SPK_ROLE_ATTN_V:        return &layer->v;
    case SPK_ROLE_ATTN_OUT:      return &layer->attn_out;
    case SPK_ROLE_ROUTER:        return &layer->router;
    case SPK_ROLE_SHARED_ROUTER: return &layer->shared_router;
    case SPK_ROLE_SHARED_GATE: case SPK_ROLE_FFN_GATE: return &layer->shared_gate;
    case SPK_ROLE_SHARED_UP:   case SPK_ROLE_FFN_UP:   return &layer->shared_up;
    case SPK_ROLE_SHARED_DOWN: case SPK_ROLE_FFN_DOWN: return &layer->shared_down;
    default:                     return NULL;
    }
}

static spk_expert_matrix *expert_slot(spk_layer *layer, spk_role role) {
    switch (role) {
    case SPK_ROLE_EXPERT_GATE: return &layer->expert_gate;
    case SPK_ROLE_EXPERT_UP:   return &layer->expert_up;
    case SPK_ROLE_EXPERT_DOWN: return &layer->expert_down;
    default:                   return NULL;
    }
}

void spk_model_bind_matrix(spk_model *m, uint32_t layer, spk_role role, spk_matrix w, uint64_t matrix_stride_bytes) {
    spk_expert_matrix *expert = expert_slot(&m->layers[layer], role);
    if (expert != NULL) *expert = (spk_expert_matrix){ w, matrix_stride_bytes };
    else *matrix_slot(m, &m->layers[layer], role) = w;
    if (role == SPK_ROLE_TOKEN_EMBD && m->config.is_tied) m->output = w;
}

static void advise_sections(const spk_model *m, int advice) {
    for (uint32_t s = 0; s < SPK_PLACE_COUNT; s++)
        if (m->section_bytes[s] > 0) (void)madvise((void *)(uintptr_t)m->sections[s], m->section_bytes[s], advice);
}

/* A pack's vectors are kilobytes that lie scattered over gigabytes: all of them are asked for at once, and nothing around
 * them.  From a cold disk, 375 of them in 3 GB took 0.01 s so and 2.2 s with the system's reading ahead. */
static void ask_for_vectors(const spk_model *m) {
    advise_sections(m, MADV_RANDOM);
    for (uint64_t i = 0; i < m->tensor_count; i++) {
        const spk_tensor *t = &m->tensors[i];
        uint32_t layer;
        if (!spk_role_is_vector(spk_model_role(&m->config, t->name, &layer))) continue;
        uint64_t begin = t->offset_bytes / SPK_BLOCK_ALIGN * SPK_BLOCK_ALIGN, end = t->offset_bytes + spk_tensor_span_bytes(t);
        (void)madvise((void *)(uintptr_t)(m->sections[t->section - 1] + begin), end - begin, MADV_WILLNEED);
    }
}

/* Vectors as floats, in one block. */
static spk_status bind(spk_model *m, spk_error *err) {
    uint32_t layer;
    uint64_t float_count = 0;
    for (uint64_t i = 0; i < m->tensor_count; i++)
        if (spk_role_is_vector(spk_model_role(&m->config, m->tensors[i].name, &layer)))
            float_count += m->tensors[i].dims[0] * m->tensors[i].dims[1];
    m->vector_count = float_count;
    m->vectors = malloc((float_count + 1) * sizeof *m->vectors);
    m->layers = calloc(m->config.layer_count, sizeof *m->layers);
    if (m->vectors == NULL || m->layers == NULL) return out_of_memory(m->path, err);
    float *next = m->vectors;
    for (uint64_t i = 0; i < m->tensor_count; i++) {
        const spk_tensor *t = &m->tensors[i];
        spk_role role = spk_model_role(&m->config, t->name, &layer);
        if (role == SPK_ROLE_EXTRA) continue;
        spk_matrix w = spk_tensor_matrix(t, m->sections[t->section - 1], 0);
        if (!spk_role_is_vector(role)) {
            spk_model_bind_matrix(m, layer, role, w, t->matrix_stride_bytes);
            continue;
        }
        *vector_slot(m, &m->layers[layer], role) = next;
        for (uint64_t r = 0; r < w.row_count; r++, next += w.col_count) spk_layout_dequantize_row(&w, r, next);
    }
    for (uint32_t i = 0; i < m->config.layer_count; i++)
        m->layers[i].is_attention = spk_model_layer_is_attention(&m->config, i);
    return SPK_OK;
}

/* ---- A GGUF as a native pack in memory ---- */

typedef struct {
    spk_model       *model;
    const spk_run   *runs;
    uint8_t         *sections[SPK_PLACE_COUNT];
    uint64_t         total_bytes;
    _Atomic uint64_t done_bytes;
    const spk_model_options *options;
} native_fill;

static void fill_runs(void *context, uint64_t begin, uint64_t end, uint32_t thread_index) {
    native_fill *fill = context;
    for (uint64_t i = begin; i < end; i++) {
        const spk_run *run = &fill->runs[i];
        uint8_t *buffer = fill->sections[run->section - 1] + run->offset_bytes;
        for (uint32_t p = 0; p < run->piece_count; p++) {
            const spk_piece *piece = &run->pieces[p];
            const spk_tensor *t = &fill->model->native_tensors[piece->tensor_index];
            const spk_type_info *type = spk_type_find(t->type);
            uint64_t row_bytes = t->dims[0] / type->block_weights * type->block_bytes;
            const uint8_t *data = spk_gguf_tensor_at(fill->model->gguf, piece->tensor_index)->data;
            spk_run_put(run, p, fill->model->native_tensors,
                        data + (piece->matrix_index * t->dims[1] + piece->row_begin) * row_bytes, buffer);
        }
        uint64_t done = atomic_fetch_add(&fill->done_bytes, run->size_bytes) + run->size_bytes;
        if (thread_index == 0 && fill->options->progress)
            fill->options->progress(fill->options->progress_context, done, fill->total_bytes);
    }
}

static spk_status lay_out(spk_model *m, const spk_model_options *options, spk_pool *pool, spk_error *err) {
    uint64_t section_bytes[SPK_PLACE_COUNT], total = 0, run_count;
    spk_run *runs;
    SPK_TRY(spk_fail_in(m->path, spk_model_place(&m->config, m->native_tensors, m->tensor_count, section_bytes, err), err));
    for (int s = 0; s < SPK_PLACE_COUNT; s++) total += section_bytes[s];
    void *memory = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return spk_fail(err, SPK_E_MEMORY, "%s: cannot allocate %" PRIu64 " bytes to lay the model out: %s", m->path, total,
                        strerror(errno));
    m->native = memory;
    m->native_bytes = total;
    (void)madvise(memory, total, MADV_HUGEPAGE);
    SPK_TRY(spk_fail_in(m->path, spk_model_runs(m->native_tensors, m->tensor_count, section_bytes, &runs, &run_count, err), err));
    native_fill fill = { .model = m, .runs = runs, .total_bytes = total, .options = options };
    uint8_t *at = m->native;
    for (int s = 0; s < SPK_PLACE_COUNT; s++) {
        m->sections[s] = fill.sections[s] = at;
        m->section_bytes[s] = section_bytes[s];
        at += section_bytes[s];
    }
    spk_pool_run(pool, run_count, 1, fill_runs, &fill);
    free(runs);
    return SPK_OK;
}

/* m->gguf, if it is open already. */
static spk_status open_gguf(spk_model *m, const spk_model_options *options, spk_error *err) {
    spk_pool *pool;
    if (m->gguf == NULL) SPK_TRY(spk_gguf_open(m->path, &m->own_gguf, err));
    if (m->gguf == NULL) m->gguf = m->own_gguf;
    m->kvs = spk_gguf_kvs(m->gguf);
    m->tensor_count = spk_gguf_tensor_count(m->gguf);
    m->tensors = m->native_tensors = calloc(m->tensor_count + 1, sizeof *m->native_tensors);
    if (m->native_tensors == NULL) return out_of_memory(m->path, err);
    for (uint64_t i = 0; i < m->tensor_count; i++)
        spk_tensor_from_gguf(spk_gguf_tensor_at(m->gguf, i), &m->native_tensors[i]);
    SPK_TRY(spk_model_config_read(m->kvs, m->tensors, m->tensor_count, m->path, &m->config, err));
    SPK_TRY(spk_pool_create(options->thread_count, &pool, err));
    spk_status status = lay_out(m, options, pool, err);
    spk_pool_destroy(pool);
    return status;
}

static spk_status open_pack(spk_model *m, spk_error *err) {
    SPK_TRY(spk_pack_open(m->path, &m->pack, err));
    m->kvs = spk_pack_kvs(m->pack);
    m->config = *spk_pack_config(m->pack);
    m->tensors = spk_pack_tensors(m->pack);
    m->tensor_count = spk_pack_tensor_count(m->pack);
    SPK_TRY(spk_model_config_check(&m->config, m->kvs, m->tensors, m->tensor_count, m->path, err));
    for (uint32_t place = 1; place <= SPK_PLACE_COUNT; place++)
        m->sections[place - 1] = spk_pack_section(m->pack, place, &m->section_bytes[place - 1]);
    return SPK_OK;
}

/* ---- The API ---- */

static spk_status choose_kernels(spk_model *m, spk_backend backend, spk_error *err) {
    const spk_kernels *fast = spk_kernels_fast();
    if (backend == SPK_BACKEND_CPU && fast == NULL)
        return spk_fail(err, SPK_E_UNSUPPORTED, "backend cpu: this machine or build has no AVX2, FMA and F16C; use ref");
    m->kernels = backend == SPK_BACKEND_REF || fast == NULL ? spk_kernels_ref() : fast;
    return SPK_OK;
}

static spk_status starts_like_gguf(const char *path, bool *out, spk_error *err) {
    char magic[4] = { 0 };
    struct stat info;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);   /* a FIFO must not block */
    if (fd < 0) return spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
        (void)close(fd);
        return spk_fail(err, SPK_E_MAGIC, "%s: not a regular file, expected a .spk pack or a .gguf model", path);
    }
    ssize_t got = read(fd, magic, sizeof magic);
    int read_errno = errno;
    (void)close(fd);
    if (got < 0) return spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(read_errno));
    *out = got == 4 && memcmp(magic, "GGUF", 4) == 0;
    return SPK_OK;
}

static spk_status open_host(spk_model *m, bool is_gguf, const spk_model_options *options, spk_error *err) {
    SPK_TRY(is_gguf ? open_gguf(m, options, err) : open_pack(m, err));
    if (m->pack != NULL) ask_for_vectors(m);
    SPK_TRY(bind(m, err));
    if (m->pack != NULL) advise_sections(m, MADV_NORMAL);
    return SPK_OK;
}

/* The GPU where it is asked for, or where nothing is asked for and there is one that takes the model.  It starts while the
 * host side is opened. */
static spk_status open_both(spk_model *m, bool is_gguf, const spk_model_options *options, spk_error *err) {
    if (options->backend != SPK_BACKEND_CUDA && options->backend != SPK_BACKEND_AUTO)
        return open_host(m, is_gguf, options, err);
    spk_gpu_start *start;
    SPK_TRY(spk_gpu_start_begin(&start, err));
    spk_status status = open_host(m, is_gguf, options, err);
    if (status == SPK_OK) {
        spk_error refusal;
        status = spk_gpu_model_create(m, options, start, &m->gpu, &refusal);
        if (options->backend == SPK_BACKEND_AUTO && (status == SPK_E_UNSUPPORTED || status == SPK_E_MEMORY)) {
            if (spk_gpu_start_worked(start)) m->gpu_refusal = strdup(refusal.text);
            status = SPK_OK;
        } else if (status != SPK_OK && err != NULL) {
            *err = refusal;
        }
    }
    spk_gpu_start_destroy(start);
    return status;
}

/* gguf: NULL to open `path`. */
static spk_status open_model(const char *path, bool is_gguf, const spk_gguf *gguf, const spk_model_options *options,
                             spk_model **out, spk_error *err) {
    spk_model *m = calloc(1, sizeof *m);
    if (m == NULL) return out_of_memory(path, err);
    m->thread_count = options->thread_count;
    m->gguf = gguf;
    m->path = strdup(path);
    spk_status status = m->path == NULL ? out_of_memory(path, err) : choose_kernels(m, options->backend, err);
    if (status == SPK_OK) status = open_both(m, is_gguf, options, err);
    if (status != SPK_OK) {
        spk_model_close(m);
        return status;
    }
    (void)spk_model_fingerprint(&m->config, m->fingerprint, sizeof m->fingerprint);
    *out = m;
    return SPK_OK;
}

spk_status spk_model_open(const char *path, const spk_model_options *options, spk_model **out, spk_error *err) {
    bool is_gguf = false;
    SPK_TRY(starts_like_gguf(path, &is_gguf, err));
    return open_model(path, is_gguf, NULL, options, out, err);
}

spk_status spk_model_open_gguf(const spk_gguf *gguf, const spk_model_options *options, spk_model **out, spk_error *err) {
    assert(options->backend == SPK_BACKEND_CPU || options->backend == SPK_BACKEND_REF);
    return open_model(spk_gguf_part_path(gguf, 0), true, gguf, options, out, err);
}

void spk_model_close(spk_model *m) {
    if (m == NULL) return;
    spk_gpu_model_destroy(m->gpu);
    if (m->native != NULL) (void)munmap(m->native, m->native_bytes);
    free(m->native_tensors);
    spk_gguf_close(m->own_gguf);
    spk_pack_close(m->pack);
    free(m->vectors);
    free(m->layers);
    free(m->path);
    free(m->gpu_refusal);
    free(m);
}

spk_status spk_model_verify(const spk_model *m, spk_error *err) {
    if (m->pack == NULL)
        return spk_fail(err, SPK_E_UNSUPPORTED, "%s: a GGUF file has no checksums to verify", m->path);
    return spk_pack_verify(m->pack, m->thread_count, NULL, NULL, err);
}

uint32_t    spk_model_vocab_size(const spk_model *m) { return m->config.vocab_size; }
uint32_t    spk_model_context_length(const spk_model *m) { return m->config.context_length; }
const char *spk_model_arch(const spk_model *m) { return spk_arch_name(m->config.arch); }
const char *spk_model_fingerprint_text(const spk_model *m) { return m->fingerprint; }
const char *spk_model_gpu_refusal(const spk_model *m) { return m->gpu_refusal; }
const char *spk_model_backend_name(const spk_model *m) { return m->gpu != NULL ? "cuda" : m->kernels->name; }
bool spk_model_load_times(const spk_model *m, spk_load_times *out) {
    if (m->gpu != NULL) *out = *spk_gpu_model_times(m->gpu);
    return m->gpu != NULL;
}
bool        spk_model_is_pack(const spk_model *m) { return m->pack != NULL; }
const spk_kv_set *spk_model_kvs(const spk_model *m) { return m->kvs; }
const char *spk_model_path(const spk_model *m) { return m->path; }

uint64_t spk_model_weight_bytes(const spk_model *m) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < m->tensor_count; i++) sum += spk_tensor_bytes(&m->tensors[i]);
    return sum;
}

uint64_t spk_model_bytes_per_token(const spk_model *m) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < m->tensor_count; i++) sum += spk_tensor_bytes_per_token(&m->config, &m->tensors[i]);
    return sum;
}
