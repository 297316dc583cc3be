/* tests/host_device_sequence.h - of host_device.h: kernels with memory, the recurrent layers and attention over a cache. */
#ifndef SPK_HOST_DEVICE_SEQUENCE_H
#define SPK_HOST_DEVICE_SEQUENCE_H

#include "tests/attention_cache.h"
#include "tests/host_device.h"

/* ---- GDN ---- */

static void host_gdn_head(const spk_cuda_gdn *g, uint32_t head, float *y, float *o) {
    const uint32_t key_dim = g->k_head_count * g->k_dim, ratio = g->v_head_count / g->k_head_count;
    const uint32_t k_head = has_fault(FAULT_HEAD_MAP) ? head / ratio : head % g->k_head_count;
    const float *q = y + k_head * g->k_dim, *k = y + key_dim + k_head * g->k_dim, *v = y + 2 * key_dim + head * g->v_dim;
    float t = g->alpha[head] + g->dt[head], decay = expf(g->a[head] * (t > 20.0f ? t : log1pf(expf(t))));
    float beta = has_fault(FAULT_BETA) ? 1.0f : host_sigmoid(g->beta[head]), kq = 0;
    for (uint32_t i = 0; i < g->k_dim; i++) kq += k[i] * q[i];
    for (uint32_t r = 0; r < g->v_dim; r++) {
        const uint64_t at = ((uint64_t)head * g->v_dim + r) * g->k_dim,
                       size = (uint64_t)g->v_head_count * g->v_dim * g->k_dim;
        const float *s = g->delta_state + *g->d_position % SPK_CUDA_GDN_STATES * size + at;
        float *to = g->delta_state + (*g->d_position + 1) % SPK_CUDA_GDN_STATES * size + at, sk = 0, sq = 0;
        for (uint32_t i = 0; i < g->k_dim; i++) {
            sk += s[i] * k[i];
            sq += s[i] * q[i];
        }
        float delta = beta * (v[r] - decay * sk);
        bool is_kept = !(has_fault(FAULT_STATE_ROW) && r + 1 == g->v_dim);
        for (uint32_t i = 0; i < g->k_dim && is_kept; i++) to[i] = k[i] * delta + decay * s[i];
        o[r] = delta * kq + decay * sq;
    }
}
static void run_gdn(const launch_args *args) {
    const spk_cuda_gdn *g = &args->gdn;
    const uint32_t key_dim = g->k_head_count * g->k_dim, channels = 2 * key_dim + g->v_head_count * g->v_dim,
                   position = *g->d_position;
    const uint32_t slot = (position + (has_fault(FAULT_RING_SLOT) ? 1 : 0)) % g->conv_kernel;
    float *y = malloc(channels * sizeof(float));
    for (uint32_t c = 0; c < channels; c++) {
        float sum = 0;
        for (uint32_t tap = 0; tap + 1 < g->conv_kernel; tap++)
            sum += g->taps[c * g->conv_kernel + tap] * g->conv_state[(position + 1 + tap) % g->conv_kernel * channels + c];
        y[c] = host_silu(g->taps[c * g->conv_kernel + g->conv_kernel - 1] * g->u[c] + sum);
    }
    for (uint32_t c = 0; c < channels; c++) g->conv_state[slot * channels + c] = g->u[c];
    for (uint32_t h = 0; h < 2 * g->k_head_count; h++) {
        float squares = 0, *x = y + h * g->k_dim;
        for (uint32_t i = 0; i < g->k_dim; i++) squares += x[i] * x[i];
        float factor = 1.0f / fmaxf(sqrtf(squares), g->eps) * (h < g->k_head_count ? 1.0f / sqrtf((float)g->k_dim) : 1.0f);
        for (uint32_t i = 0; i < g->k_dim; i++) x[i] *= factor;
    }
    for (uint32_t h = 0; h < g->v_head_count; h++) {
        float o[256], squares = 0, *out = g->out + h * g->v_dim;
        const float *z = g->z + (has_fault(FAULT_Z_ROW) ? (h + 1) % g->v_head_count : h) * g->v_dim;
        const bool is_fused = running->fusion == SPK_CUDA_GDN_FUSED;
        host_gdn_head(g, h, y, o);
        if (!is_fused) memcpy(g->delta_out + h * g->v_dim, o, g->v_dim * sizeof *o);
        for (uint32_t r = 0; r < g->v_dim; r += 32) {
            float sum = 0;
            for (uint32_t i = r; i < r + 32; i++) sum += o[i] * o[i];
            if (is_fused) g->squares[(h * g->v_dim + (has_fault(FAULT_SQUARES) ? (r + 32) % g->v_dim : r)) / 32] = sum;
            squares += sum;
        }
        const uint32_t counted = has_fault(FAULT_NORM_LENGTH) ? g->v_dim - 1 : g->v_dim;
        float factor = is_fused ? 1.0f : 1.0f / sqrtf(squares / (float)counted + g->eps);
        for (uint32_t i = 0; i < g->v_dim; i++) out[i] = o[i] * g->norm_weight[i] * host_silu(z[i]) * factor;
    }
    free(y);
}
bool spk_cuda_gdn_can_fuse(uint32_t k_dim, uint32_t v_dim) { return k_dim == v_dim && k_dim <= 128; }
void spk_cuda_launch_gdn(spk_cuda *cuda, const spk_cuda_gdn *args, spk_cuda_gdn_fusion fusion) {
    recorded *r = record(cuda, run_gdn);
    r->args.gdn = *args;
    r->fusion = fusion;
}

/* ---- Attention ---- */

static void host_norm_rope(const spk_cuda_attention *a, const float *x, const float *w, float *out) {
    float factor = host_rms(x, a->head_dim, a->eps, false);
    for (uint32_t i = 0; i < a->head_dim; i++) out[i] = x[i] * factor * w[i];
    for (uint32_t i = 0, half = a->rope_dim / 2; i < half; i++) {
        float c = a->cos_sin[2 * i], s = has_fault(FAULT_ROPE) ? -a->cos_sin[2 * i + 1] : a->cos_sin[2 * i + 1],
              p = out[i], q = out[i + half];
        out[i] = p * c - q * s;
        out[i + half] = p * s + q * c;
    }
}
/* out [head_dim] of a head over positions begin to end - 1; its largest score and, relative to that, its weights' sum. */
typedef struct { float top, total; } host_total;
static host_total host_attend(const spk_cuda_attention *a, uint32_t head, uint32_t begin, uint32_t end, float *out) {
    const uint32_t dim = a->head_dim, kv_head = head / (a->head_count / a->kv_head_count);
    const float *from = a->q + head * (a->is_gated ? 2 : 1) * dim;
    host_total t = { -INFINITY, 0 };
    float q[256];
    host_norm_rope(a, from, a->q_norm, q);
    memset(out, 0, dim * sizeof *out);
    for (uint32_t j = begin; j < end; j++) {                /* online softmax */
        float score = 0;
        for (uint32_t i = 0; i < dim; i++)
            score += q[i] * (1.0f / sqrtf((float)dim)) * attention_value(a, a->k_cache, false, j, kv_head, i);
        float shrink = score > t.top ? expf(t.top - score) : 1.0f;
        t.top = fmaxf(t.top, score);
        float weight = expf(score - t.top);
        t.total = t.total * shrink + weight;
        for (uint32_t i = 0; i < dim; i++)
            out[i] = out[i] * shrink + weight * attention_value(a, a->v_cache, true, j, kv_head, i);
    }
    for (uint32_t i = 0; i < dim; i++) out[i] = out[i] / t.total * (a->is_gated ? host_sigmoid(from[dim + i]) : 1.0f);
    return t;
}
static void run_attention(const launch_args *args) {
    const spk_cuda_attention *a = &args->attention;
    const uint32_t dim = a->head_dim, position = *a->d_position, store = position + (has_fault(FAULT_CACHE_ROW) ? 1 : 0);
    const uint32_t part_count = a->part_totals != NULL ? attention_part_count(position) : 1;
    uint32_t end = position + 1;
    if (has_fault(FAULT_ATTEND_LAST) && position > 0) end--;
    if (has_fault(FAULT_ATTEND_TAIL)) end++;
    float k[256];
    for (uint32_t h = 0; h < a->kv_head_count; h++) {
        host_norm_rope(a, a->k + h * dim, a->k_norm, k);
        attention_put(a, a->k_cache, false, store, h, k);
        attention_put(a, a->v_cache, true, store, h, a->v + h * dim);
    }
    for (uint32_t h = 0; h < a->head_count; h++) {
        float top = 0;
        for (uint32_t p = 0; p < part_count; p++) {
            const uint32_t begin = p * SPK_CUDA_PART_POSITIONS + (p == 1 && has_fault(FAULT_PART_BORDER) ? 1 : 0);
            const host_total t = host_attend(a, h, begin, p + 1 < part_count ? (p + 1) * SPK_CUDA_PART_POSITIONS : end,
                                             a->out + ((uint64_t)p * a->head_count + h) * dim);
            if (part_count == 1) break;
            float *own = a->part_totals + 2 * (p * a->head_count + h);
            own[0] = (has_fault(FAULT_PART_TOP) && p > 0 ? top : t.top) * 1.44269504f;       /* of powers of 2 */
            own[1] = t.total;
            top = t.top;
        }
    }
}
bool spk_cuda_attention_has_parts(const spk_cuda *cuda, const spk_cuda_attention *args) {
    (void)cuda, (void)args;
    return true;
}
uint64_t spk_cuda_attention_cache_bytes(const spk_cuda_attention *args) {
    return args->kv_head_count * attention_head_bytes(args);
}
uint64_t spk_cuda_attention_scratch_bytes(const spk_cuda *cuda, const spk_cuda_attention *args) {
    (void)cuda, (void)args;
    return 64;
}
void spk_cuda_launch_attention(spk_cuda *cuda, const spk_cuda_attention *args) {
    record(cuda, run_attention)->args.attention = *args;
}

#endif
