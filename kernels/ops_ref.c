/* kernels/ops_ref.c - every operation but the products, by definition.
 *
 * Sums and transcendental functions in double, results rounded once to float (a stored state is such a result).
 * Written to be compared with, not to be fast.
 */
#include "kernels/kernels_internal.h"

#include <math.h>
#include <string.h>

static double sum_squares(const float *x, uint64_t n) {
    double sum = 0;
    for (uint64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
    return sum;
}

/* From exp(-|t|), which cannot overflow. */
static double sigmoid(double t) {
    double e = exp(-fabs(t));
    return t >= 0 ? 1 / (1 + e) : e / (1 + e);
}

static double silu(double t) { return t * sigmoid(t); }

void spk_ref_quantize(spk_activation *x) { (void)x; }

void spk_ref_rms_norm(const float *x, const float *w, uint64_t n, float eps, float *y) {
    double factor = 1 / sqrt(sum_squares(x, n) / (double)n + (double)eps);
    for (uint64_t i = 0; i < n; i++) y[i] = (float)((double)x[i] * factor * (double)w[i]);
}

void spk_ref_swiglu(const float *gate, const float *up, uint64_t n, float *out) {
    for (uint64_t i = 0; i < n; i++) out[i] = (float)(silu((double)gate[i]) * (double)up[i]);
}

void spk_ref_add_scaled(float *out, const float *x, float scale, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) out[i] = (float)((double)out[i] + (double)scale * (double)x[i]);
}

/* Keeps the best so far in order; an equal value never passes one that came before it. */
void spk_ref_top_k(const float *logits, uint32_t n, uint32_t k, uint32_t *index, float *weight) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = kept;
        while (at > 0 && logits[i] > logits[index[at - 1]]) at--;
        if (at == k) continue;
        if (kept < k) kept++;
        memmove(index + at + 1, index + at, (kept - 1 - at) * sizeof *index);
        index[at] = i;
    }
    double sum = 0;
    for (uint32_t i = 0; i < kept; i++) sum += exp((double)logits[index[i]] - (double)logits[index[0]]);
    for (uint32_t i = 0; i < kept; i++)
        weight[i] = (float)(exp((double)logits[index[i]] - (double)logits[index[0]]) / sum);
}

void spk_ref_qk_norm_rope(float *x, const float *w, uint32_t head_dim, uint32_t rope_dim, const float *cos_sin,
                          float eps) {
    spk_ref_rms_norm(x, w, head_dim, eps, x);
    uint32_t pairs = rope_dim / 2;
    for (uint32_t i = 0; i < pairs; i++) {
        double a = (double)x[i], b = (double)x[i + pairs];
        double cosine = (double)cos_sin[2 * i], sine = (double)cos_sin[2 * i + 1];
        x[i] = (float)(a * cosine - b * sine);
        x[i + pairs] = (float)(a * sine + b * cosine);
    }
}

void spk_ref_kv_store(const float *x, uint32_t head_dim, void *cache, uint64_t element_offset) {
    memcpy((float *)cache + element_offset, x, head_dim * sizeof(float));
}

void spk_ref_attend(const spk_attention_cache *cache, uint32_t head, uint64_t position, const float *q,
                    float *scores, float *out) {
    uint32_t dim = cache->head_dim, kv_head = head / (cache->head_count / cache->kv_head_count);
    uint64_t stride = (uint64_t)cache->kv_head_count * dim;
    const float *k = (const float *)cache->k + (uint64_t)kv_head * dim;
    const float *v = (const float *)cache->v + (uint64_t)kv_head * dim;
    double scale = 1 / sqrt((double)dim);

    float largest = -INFINITY;
    for (uint64_t j = 0; j <= position; j++) {
        double sum = 0;
        for (uint32_t i = 0; i < dim; i++) sum += (double)q[i] * (double)k[j * stride + i];
        scores[j] = (float)(sum * scale);
        if (scores[j] > largest) largest = scores[j];
    }
    double total = 0;
    for (uint64_t j = 0; j <= position; j++) {
        scores[j] = (float)exp((double)scores[j] - (double)largest);
        total += (double)scores[j];
    }
    for (uint32_t i = 0; i < dim; i++) {
        double sum = 0;
        for (uint64_t j = 0; j <= position; j++) sum += (double)scores[j] * (double)v[j * stride + i];
        out[i] = (float)(sum / total);
    }
}

void spk_ref_sigmoid_gate(float *out, const float *gate, uint64_t n) {
    for (uint64_t i = 0; i < n; i++) out[i] = (float)((double)out[i] * sigmoid((double)gate[i]));
}

void spk_ref_gdn_conv(const float *u, const float *taps, float *state, uint64_t channel_count, uint32_t conv_kernel,
                      uint64_t channel_begin, uint64_t channel_end, float *y) {
    uint32_t past = conv_kernel - 1;
    for (uint64_t c = channel_begin; c < channel_end; c++) {
        const float *tap = taps + c * conv_kernel;
        double sum = (double)tap[past] * (double)u[c];
        for (uint32_t t = 0; t < past; t++) {
            sum += (double)tap[t] * (double)state[t * channel_count + c];
            state[t * channel_count + c] = t + 1 < past ? state[(t + 1) * channel_count + c] : u[c];
        }
        y[c] = (float)silu(sum);
    }
}

void spk_ref_l2_norm(float *x, uint64_t n, float eps, float scale) {
    double factor = (double)scale / fmax(sqrt(sum_squares(x, n)), (double)eps);
    for (uint64_t i = 0; i < n; i++) x[i] = (float)((double)x[i] * factor);
}

void spk_ref_gdn_head(const spk_gdn_shape *shape, float *state, const float *q, const float *k, const float *v,
                      float decay, float beta, const float *norm_w, const float *z, float *out) {
    uint32_t k_dim = shape->k_dim, v_dim = shape->v_dim;
    for (uint32_t c = 0; c < v_dim; c++) {
        float *row = state + (uint64_t)c * k_dim;          /* S[c][.] */
        double predicted = 0, sum = 0;
        for (uint32_t i = 0; i < k_dim; i++) predicted += (double)row[i] * (double)k[i];
        double delta = (double)beta * ((double)v[c] - (double)decay * predicted);
        for (uint32_t i = 0; i < k_dim; i++) {
            row[i] = (float)((double)decay * (double)row[i] + delta * (double)k[i]);
            sum += (double)row[i] * (double)q[i];
        }
        out[c] = (float)sum;
    }
    spk_ref_rms_norm(out, norm_w, v_dim, shape->eps, out);
    for (uint32_t c = 0; c < v_dim; c++) out[c] = (float)((double)out[c] * silu((double)z[c]));
}
