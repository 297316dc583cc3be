/* tests/checkkern_cuda_gdn.h - spk_cuda_launch_gdn, several tokens in a row, in its three fusions.
 *
 * Each token starts from the states that the GPU left, so that bounds are those of one step.  All fusions start from equal
 * states and must leave equal bits.  FUSED leaves the norm's factors to a GEMV's source: then the products must have the
 * bits that they have with the other fusions' finished output.
 *
 * Bounds of one step (u = 2^-24; sums of n terms in any order: n u of the sum of sizes):
 *   conv       (taps + 1) u sum|tap x|, which silu passes on 1.1 fold, and silu's own error
 *   q, k       y f, f = scale / max(|y|, eps): e_y f + |y f| (sum |y| e_y / max(|y|^2, eps^2) + (dim/2 + 8) u)
 *   decay      exp(a softplus(alpha + dt)): expf and log1pf are within 2 ulp; the exponent is off by 12 u of itself, and
 *              of alpha + dt by u (|alpha| + |dt|), which softplus passes on at most once
 *   beta       a sigmoid (checkkern_cuda_product.h), and 2 u
 *   S k        p, off by P = n u sum|S k| + sum|S| e_k
 *   delta      beta (v - decay p), off by D = beta (e_v + decay P + |p| e_decay + 3 u (|v| + decay |p|)) + 9 u |delta|
 *   state      E_i = |S| e_decay + |k| D + |delta| e_k + 3 u (decay |S| + |delta k|)
 *   o          S' q, or decay (S q) + delta (k . q): F = sum |q| E_i + sum (decay |S| + |delta k|) e_q + (n + 6) u of the sum of
 *              sizes of the latter form
 *   out        o f w silu(z), f = 1/rms(o): |f w silu(z)| (F + |o| G), G = rms(F) / rms(o), and (v_dim/2 + 20) u, and silu's error.
 *              Where G is not small, f bounds |o f| by sqrt(v_dim) on both sides.  FUSED: o w silu(z) and the squares of o
 *              without f */
#ifndef SPK_CHECKKERN_CUDA_GDN_H
#define SPK_CHECKKERN_CUDA_GDN_H

#include "tests/checkkern_cuda_gemv.h"

enum { GDN_FUSIONS = 3, GDN_DIM_MAX = 256 };

typedef struct { uint32_t k_heads, ratio, k_dim, v_dim, taps; bool is_full; } gdn_spec;
static const gdn_spec gdn_specs[] = {
    { 2, 1, 128, 128, 4, false }, { 2, 2, 128, 128, 4, false }, { 2, 3, 128, 128, 4, false }, { 3, 2, 32, 32, 4, false },
    { 1, 3, 64, 64, 4, false },   { 2, 1, 256, 256, 4, false }, { 2, 2, 64, 32, 3, false },   { 1, 2, 128, 96, 2, false },
    { 2, 3, 32, 256, 5, false },  { 1, 1, 256, 64, 4, false },  { 5, 2, 64, 64, 2, false },
    { 16, 2, 128, 128, 4, true },
};
static const x_pattern gdn_tokens[] = { X_RANDOM,          X_ZERO,   X_ALTERNATING, X_SUBNORMAL, X_RANDOM,
                                        X_HUGE_AMONG_TINY, X_RANDOM, X_LARGE,       X_RANDOM };
enum { GDN_TOKEN_COUNT = 9 };

typedef struct {
    const gdn_spec *spec;
    uint32_t        v_heads, key_dim, value_dim, channels;
    spk_cuda_gdn    args[GDN_FUSIONS];       /* the same inputs, states and outputs of their own */
    spk_cuda_gemv   gated, ready;            /* the product after it: with the gated norm in its source, or done before */
} gdn_case;

static gdn_case make_gdn(device_case *t, const gdn_spec *spec) {
    gdn_case c = { .spec = spec, .v_heads = spec->k_heads * spec->ratio, .key_dim = spec->k_heads * spec->k_dim };
    c.value_dim = c.v_heads * spec->v_dim;
    c.channels = 2 * c.key_dim + c.value_dim;
    spk_cuda_gdn g = { .k_head_count = spec->k_heads, .v_head_count = c.v_heads, .k_dim = spec->k_dim, .v_dim = spec->v_dim,
                       .conv_kernel = spec->taps, .eps = GPU_EPS };
    uint32_t *d_position = take(t, INPUT, 4, 0);
    g.d_position = d_position;
    g.u = take_staged(t, c.channels);
    g.z = take_staged(t, c.value_dim);
    g.alpha = take_staged(t, c.v_heads);
    g.beta = take_staged(t, c.v_heads);
    g.taps = take_input_as(t, c.channels * spec->taps, X_RANDOM);
    g.dt = take_input_as(t, c.v_heads, X_RANDOM);
    g.norm_weight = take_input_as(t, spec->v_dim, X_RANDOM);
    float *d_a = take_input_as(t, c.v_heads, X_RANDOM), *a = host_floats(t, d_a);
    for (uint32_t i = 0; i < c.v_heads; i++) a[i] = i % 3 == 0 ? -0.05f : -2 * fabsf(a[i]);
    g.a = d_a;
    for (int f = 0; f < GDN_FUSIONS; f++) {
        g.conv_state = take_floats(t, OUTPUT, c.channels * spec->taps);
        g.delta_state = take_floats(t, OUTPUT, SPK_CUDA_GDN_STATES * (uint64_t)c.value_dim * spec->k_dim);
        g.conv_out = take_floats(t, SCRATCH, c.channels);
        g.delta_out = take_floats(t, f == SPK_CUDA_GDN_PLAIN ? OUTPUT : SCRATCH, c.value_dim);
        g.out = take_floats(t, OUTPUT, c.value_dim);
        g.squares = take_floats(t, f == SPK_CUDA_GDN_FUSED ? OUTPUT : SCRATCH, c.value_dim / 32);
        c.args[f] = g;
    }
    return c;
}

static void record_gdn(device_case *t, gdn_case *c, bool can_fuse) {
    const spk_cuda_gdn *fused = &c->args[SPK_CUDA_GDN_FUSED];
    const uint32_t types[] = { SPK_TYPE_F32, SPK_TYPE_Q8_0 };
    for (uint32_t i = 0; i < (c->value_dim % 256 == 0 ? 2 : 1); i++) {
        c->gated.segments[i].w = c->ready.segments[i].w = put_matrix(t, types[i], 33, c->value_dim, W_RANDOM);
        c->gated.segments[i].y = take_floats(t, OUTPUT, 33);
        c->ready.segments[i].y = take_floats(t, OUTPUT, 33);
        c->gated.segment_count = c->ready.segment_count = i + 1;
    }
    c->ready.source = (spk_cuda_source){ .x = c->args[SPK_CUDA_GDN_CONV_FUSED].out, .count = c->value_dim, .has_rest = 1 };
    c->gated.source = (spk_cuda_source){ .x = fused->out, .squares = fused->squares, .eps = GPU_EPS, .count = c->value_dim,
                                         .head_dim = c->spec->v_dim, .has_rest = 1 };
    case_record(t);
    spk_cuda_launch_gdn(t->cuda, &c->args[SPK_CUDA_GDN_PLAIN], SPK_CUDA_GDN_PLAIN);
    spk_cuda_launch_gdn(t->cuda, &c->args[SPK_CUDA_GDN_CONV_FUSED], SPK_CUDA_GDN_CONV_FUSED);
    if (!can_fuse) return;
    spk_cuda_launch_gemv(t->cuda, &c->ready);
    spk_cuda_launch_gdn(t->cuda, fused, SPK_CUDA_GDN_FUSED);
    spk_cuda_launch_gemv(t->cuda, &c->gated);
}

/* ---- The reference of one token ---- */

typedef struct { double value[GDN_DIM_MAX], error[GDN_DIM_MAX]; } gdn_vector;

/* `n` channels from `first`: convolution and silu, from the ring as it was before. */
static void conv_bounds(const device_case *t, const spk_cuda_gdn *g, uint32_t channels, uint32_t position,
                        uint32_t first, uint32_t n, gdn_vector *out) {
    const float *u = host_floats(t, g->u), *taps = host_floats(t, g->taps), *ring = host_floats(t, g->conv_state);
    for (uint32_t i = 0; i < n; i++) {
        const float *tap = taps + (uint64_t)(first + i) * g->conv_kernel;
        double sum = (double)tap[g->conv_kernel - 1] * (double)u[first + i], size = fabs(sum);
        for (uint32_t j = 0; j + 1 < g->conv_kernel; j++) {          /* tap j: conv_kernel - 1 - j tokens ago */
            double product = (double)tap[j] *
                             (double)ring[(uint64_t)((position + 1 + j) % g->conv_kernel) * channels + first + i];
            sum += product;
            size += fabs(product);
        }
        out->value[i] = silu_of(sum);
        out->error[i] = 1.1 * ((g->conv_kernel + 1) * U * size + FLOOR * g->conv_kernel) + silu_error(sum);
    }
}

static void l2_bounds(gdn_vector *y, uint32_t n, double eps, double scale) {
    double squares = 0, weighted = 0;
    for (uint32_t i = 0; i < n; i++) {
        squares += y->value[i] * y->value[i];
        weighted += fabs(y->value[i]) * y->error[i];
    }
    double factor = scale / fmax(sqrt(squares), eps), relative = weighted / fmax(squares, eps * eps) + (n / 2.0 + 8) * U;
    for (uint32_t i = 0; i < n; i++) {
        y->value[i] *= factor;
        y->error[i] = y->error[i] * factor + fabs(y->value[i]) * relative + FLOOR;
    }
}

typedef struct { double decay, decay_error, beta, beta_error; } gdn_gate_bounds;
static gdn_gate_bounds gate_bounds(const device_case *t, const spk_cuda_gdn *g, uint32_t head) {
    double alpha = (double)host_floats(t, g->alpha)[head], dt = (double)host_floats(t, g->dt)[head],
           a = (double)host_floats(t, g->a)[head];
    double softplus = log1p(exp(alpha + dt)), exponent = a * softplus, beta = (double)host_floats(t, g->beta)[head];
    gdn_gate_bounds b = { .decay = exp(exponent), .beta = sigmoid_of(beta), .beta_error = sigmoid_error(beta) };
    b.decay_error = b.decay * (12 * U * fabs(exponent) + U * fabs(a) * (fabs(alpha) + fabs(dt)) + 5 * U) + 0x1p-126;
    return b;
}

/* Row c of a head: checks the new state against `after`, returns o and its bound F. */
static double check_state_row(const float *before, const float *after, uint32_t n, const gdn_vector *q,
                              const gdn_vector *k, double v, double v_error, const gdn_gate_bounds *b, uint64_t at,
                              double *bound) {
    double p = 0, size = 0, passed = 0;
    for (uint32_t i = 0; i < n; i++) {
        double s = (double)before[i];
        p += s * k->value[i];
        size += fabs(s * k->value[i]);
        passed += fabs(s) * k->error[i];
    }
    double P = n * (U * size + FLOOR) + passed, delta = b->beta * (v - b->decay * p);
    double D = b->beta * (v_error + b->decay * P + fabs(p) * b->decay_error + 3 * U * (fabs(v) + b->decay * fabs(p))) +
               (b->beta_error / b->beta + 2 * U) * fabs(delta) + 3 * FLOOR;
    double o = 0, F = 0;
    for (uint32_t i = 0; i < n; i++) {
        double s = (double)before[i], kept = b->decay * s, written = delta * k->value[i],
               parts = fabs(kept) + fabs(written);
        double E = fabs(s) * b->decay_error + fabs(k->value[i]) * D + (fabs(delta) + D) * k->error[i] + 3 * U * parts +
                   3 * FLOOR;
        near("delta state", at + i, (double)after[i], kept + written, E);
        o += (kept + written) * q->value[i];
        F += fabs(q->value[i]) * E + (parts + E) * q->error[i] + (n + 6) * (U * parts * fabs(q->value[i]) + FLOOR);
    }
    *bound = F;
    return o;
}

/* Where the state before a position begins. */
static uint64_t state_at(const gdn_case *c, uint32_t position) {
    return (uint64_t)(position % SPK_CUDA_GDN_STATES) * c->value_dim * c->spec->k_dim;
}

/* FUSED's out and squares of a head, from o and its bounds. */
static void check_fused_head(const device_case *t, const gdn_case *c, uint32_t head, const gdn_vector *o) {
    const spk_cuda_gdn *g = &c->args[SPK_CUDA_GDN_FUSED];
    for (uint32_t r = 0; r < g->v_dim; r += 32) {
        double sum = 0, error = 0;
        for (uint32_t i = r; i < r + 32; i++) {
            double z = (double)host_floats(t, g->z)[head * g->v_dim + i], w = (double)host_floats(t, g->norm_weight)[i];
            double want = o->value[i] * w * silu_of(z);
            near("fused head", head * g->v_dim + i, (double)result_floats(t, g->out)[head * g->v_dim + i], want,
                 fabs(w) * (o->error[i] * fabs(silu_of(z)) + (fabs(o->value[i]) + o->error[i]) * silu_error(z)) +
                     3 * U * fabs(want) + FLOOR);
            sum += o->value[i] * o->value[i];
            error += 2 * fabs(o->value[i]) * o->error[i] + o->error[i] * o->error[i];
        }
        uint32_t at = (head * g->v_dim + r) / 32;
        near("squares", at, (double)result_floats(t, g->squares)[at], sum, error + 34 * (U * sum + FLOOR));
    }
}

/* One V head: state, raw output, gated output. */
static void check_gdn_head(const device_case *t, const gdn_case *c, uint32_t position, uint32_t head, bool can_fuse) {
    const spk_cuda_gdn *g = &c->args[SPK_CUDA_GDN_PLAIN];
    const uint32_t k_head = head % g->k_head_count, n = g->v_dim;
    gdn_vector q, k, v, o;
    conv_bounds(t, g, c->channels, position, k_head * g->k_dim, g->k_dim, &q);
    conv_bounds(t, g, c->channels, position, c->key_dim + k_head * g->k_dim, g->k_dim, &k);
    conv_bounds(t, g, c->channels, position, 2 * c->key_dim + head * n, n, &v);
    l2_bounds(&q, g->k_dim, (double)g->eps, 1 / sqrt((double)g->k_dim));
    l2_bounds(&k, g->k_dim, (double)g->eps, 1);
    const gdn_gate_bounds b = gate_bounds(t, g, head);
    const float *before = host_floats(t, g->delta_state) + state_at(c, position);
    const float *after = result_floats(t, g->delta_state) + state_at(c, position + 1);
    double F_squares = 0, squares = 0;
    for (uint32_t r = 0; r < n; r++) {
        uint64_t at = ((uint64_t)head * n + r) * g->k_dim;
        o.value[r] = check_state_row(before + at, after + at, g->k_dim, &q, &k, v.value[r], v.error[r], &b, at,
                                     &o.error[r]);
        near("raw head", head * n + r, (double)result_floats(t, g->delta_out)[head * n + r], o.value[r], o.error[r]);
        F_squares += o.error[r] * o.error[r];
        squares += o.value[r] * o.value[r];
    }
    if (can_fuse) check_fused_head(t, c, head, &o);
    double mean = squares / n + (double)g->eps, factor = 1 / sqrt(mean), G = sqrt(F_squares / n / mean);
    for (uint32_t r = 0; r < n; r++) {
        double z = (double)host_floats(t, g->z)[head * n + r], w = fabs((double)host_floats(t, g->norm_weight)[r]);
        double normed = o.value[r] * factor, sign = host_floats(t, g->norm_weight)[r] < 0 ? -1 : 1,
               want = normed * sign * w * silu_of(z);
        double off = G < 0.01 ? 1.02 * (factor * o.error[r] + fabs(normed) * (G + (n / 2.0 + 20) * U))
                              : 2 * sqrt((double)n);
        near("gated head", head * n + r, (double)result_floats(t, g->out)[head * n + r], want,
             off * w * fabs(silu_of(z)) + (fabs(normed) + off) * w * silu_error(z) + FLOOR);
    }
}

/* ---- Tokens in a row ---- */

static void fill_token(device_case *t, const gdn_case *c, uint32_t position, x_pattern pattern) {
    const spk_cuda_gdn *g = &c->args[0];
    float *z = host_floats(t, g->z), *alpha = host_floats(t, g->alpha), *beta = host_floats(t, g->beta);
    memcpy(host_of(t, g->d_position), &position, sizeof position);
    fill(pattern, host_floats(t, g->u), c->channels);
    fill(X_RANDOM, z, c->value_dim);
    fill(X_RANDOM, alpha, c->v_heads);
    fill(X_RANDOM, beta, c->v_heads);
    for (uint32_t i = 0; i < c->value_dim; i++) z[i] *= 6;
    for (uint32_t i = 0; i < c->v_heads; i++) {
        alpha[i] *= position % 3 == 1 ? 60.0f : 4.0f;
        beta[i] *= 8;
    }
}

static void check_gdn_token(device_case *t, const gdn_case *c, uint32_t position, bool can_fuse) {
    const spk_cuda_gdn *plain = &c->args[SPK_CUDA_GDN_PLAIN], *conv = &c->args[SPK_CUDA_GDN_CONV_FUSED],
                       *fused = &c->args[SPK_CUDA_GDN_FUSED];
    const uint64_t ring_count = (uint64_t)c->channels * c->spec->taps,
                   state_count = SPK_CUDA_GDN_STATES * (uint64_t)c->value_dim * c->spec->k_dim;
    const float *ring = result_floats(t, plain->conv_state);
    for (uint64_t i = 0; i < ring_count; i++) {          /* u in its slot, the others untouched */
        bool is_slot = i / c->channels == position % c->spec->taps;
        const float *want = is_slot ? &host_floats(t, plain->u)[i % c->channels] : &host_floats(t, plain->conv_state)[i];
        EXPECT(memcmp(&ring[i], want, sizeof *want) == 0 || (ring[i] == 0 && *want == 0),
               "ring slot %llu channel %llu: got %.9g want %.9g", (unsigned long long)(i / c->channels),
               (unsigned long long)(i % c->channels), (double)ring[i], (double)*want);
    }
    for (uint32_t head = 0; head < c->v_heads; head++) check_gdn_head(t, c, position, head, can_fuse);
    if (SPK_CUDA_GDN_STATES > 1) {                       /* the state before stays, so that the token can be taken back */
        const float *before = plain->delta_state + state_at(c, position);
        EXPECT(memcmp(result_of(t, before), host_of(t, before), state_count / SPK_CUDA_GDN_STATES * sizeof(float)) == 0,
               "the state before the token was written");
    }
    same_floats(t, "ring of conv-fused", plain->conv_state, conv->conv_state, ring_count);
    same_floats(t, "state of conv-fused", plain->delta_state, conv->delta_state, state_count);
    same_floats(t, "out of conv-fused", plain->out, conv->out, c->value_dim);
    if (!can_fuse) return;
    same_floats(t, "ring of fused", plain->conv_state, fused->conv_state, ring_count);
    same_floats(t, "state of fused", plain->delta_state, fused->delta_state, state_count);
    for (uint32_t i = 0; i < c->gated.segment_count; i++)
        same_floats(t, "product after fused", c->ready.segments[i].y, c->gated.segments[i].y, 33);
}

static void check_gdn_spec(device_case *t, const gdn_spec *spec, uint32_t token_count) {
    bool can_fuse = spk_cuda_gdn_can_fuse(spec->k_dim, spec->v_dim);
    DESCRIBE("gdn k_heads=%u v:k=%u k_dim=%u v_dim=%u taps=%u", spec->k_heads, spec->ratio, spec->k_dim, spec->v_dim,
             spec->taps);
    EXPECT(can_fuse == (spec->k_dim == spec->v_dim && spec->k_dim <= 128), "can_fuse answers %d", can_fuse);
    case_begin(t);
    weights_drop(t);
    gdn_case c = make_gdn(t, spec);
    const uint64_t state_bytes = SPK_CUDA_GDN_STATES * (uint64_t)c.value_dim * spec->k_dim * sizeof(float);
    for (int f = 0; f < GDN_FUSIONS; f++) {             /* a sequence begins with zeros */
        memset(host_of(t, c.args[f].conv_state), 0, (uint64_t)c.channels * spec->taps * sizeof(float));
        memset(host_of(t, c.args[f].delta_state), 0, state_bytes);
    }
    record_gdn(t, &c, can_fuse);
    spk_cuda_step *step = NULL;
    MUST(spk_cuda_step_end(t->cuda, &step, &must_error));
    for (uint32_t position = 0; position < token_count; position++) {
        DESCRIBE("gdn k_heads=%u v:k=%u k_dim=%u v_dim=%u taps=%u position=%u u=%s", spec->k_heads, spec->ratio,
                 spec->k_dim, spec->v_dim, spec->taps, position, x_names[gdn_tokens[position]]);
        fill_token(t, &c, position, gdn_tokens[position]);
        step_check(t, step, 1);
        check_gdn_token(t, &c, position, can_fuse);
        for (int f = 0; f < GDN_FUSIONS; f++) {         /* the next token starts from here, all fusions alike */
            memcpy(host_of(t, c.args[f].conv_state), result_of(t, c.args[0].conv_state),
                   (uint64_t)c.channels * spec->taps * sizeof(float));
            memcpy(host_of(t, c.args[f].delta_state), result_of(t, c.args[0].delta_state), state_bytes);
        }
    }
    spk_cuda_step_free(step);
}

static void check_gdn_cuda(device_case *t, bool is_quick) {
    for (size_t i = 0; i < sizeof gdn_specs / sizeof *gdn_specs; i++)
        if (!is_quick || (!gdn_specs[i].is_full && i % 2 == 0))
            check_gdn_spec(t, &gdn_specs[i], is_quick ? 6 : GDN_TOKEN_COUNT);
}

#endif
