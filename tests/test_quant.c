/* tests/test_quant.c - the quantizers: accuracy against plain fits, exactness, corner cases, always the same bytes. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/dequant.h"
#include "formats/spk.h"
#include "requant/quant.h"
#include "requant/quant_internal.h"
#include "tests/check.h"

enum { ROWS = 24, COLS = 512, WEIGHTS = ROWS * COLS, BLOCK_BYTES_MAX = WEIGHTS * 34 / 32, GUARD = 64 };

static const uint32_t types[] = { SPK_TYPE_Q4_K, SPK_TYPE_Q5_K, SPK_TYPE_Q6_K, SPK_TYPE_Q8_0 };
enum { TYPE_COUNT = sizeof types / sizeof *types };

/* In the order of the squared errors that they promise. */
static const spk_quant_effort efforts[] = { SPK_EFFORT_FAST, SPK_EFFORT_NORMAL, SPK_EFFORT_BEST };
enum { EFFORT_COUNT = sizeof efforts / sizeof *efforts };
static size_t at_effort = 1;             /* of every call: an index of efforts */

static float   weights[WEIGHTS], decoded[WEIGHTS], importance[COLS];
static uint8_t blocks[BLOCK_BYTES_MAX], other_blocks[BLOCK_BYTES_MAX];

/* ---- Data: sums of uniforms, near enough to a normal distribution and the same on every machine ---- */

static float bell(uint64_t *state) {
    float sum = 0;
    for (int i = 0; i < 8; i++) sum += check_uniform(state);
    return sum * 0.6f;                                       /* variance 1 within 4 % */
}

static void fill_bell(uint64_t seed, float scale) {
    for (size_t i = 0; i < WEIGHTS; i++) weights[i] = bell(&seed) * scale;
}

static void fill_importance(uint64_t seed) {
    for (size_t c = 0; c < COLS; c++) {
        float u = check_uniform(&seed);
        importance[c] = u * u * u * u * 20 + 0.05f;
    }
}

/* Rows of every kind that has a name below, repeated. */
static void fill_mixed(uint64_t seed) {
    for (size_t r = 0; r < ROWS; r++)
        for (size_t c = 0; c < COLS; c++) {
            float b = bell(&seed) * 0.02f, u = check_uniform(&seed), x = b;
            switch (r % 12) {
            case 1:  x = fabsf(b); break;
            case 2:  x = -fabsf(b); break;
            case 3:  x = 1 + b; break;
            case 4:  x = c == 77 ? 3.0f : b * 1e-3f; break;
            case 5:  x = c == 300 ? -3.0f : b * 1e-3f; break;
            case 6:  x = u < 0.8f ? 0.0f : b; break;
            case 7:  x = b * 1e-5f; break;
            case 8:  x = b * 1e6f; break;
            case 9:  x = b * b * b * 100; break;
            case 10: x = (c / 32) % 2 == 0 ? 0.0f : b; break;
            case 11: x = -0.7f; break;
            default: break;
            }
            weights[r * COLS + c] = x;
        }
}

/* ---- Calls ---- */

static size_t bytes_of(uint32_t type, size_t count) {
    uint64_t bytes = 0;
    CHECK(spk_type_bytes(type, count, &bytes, NULL) == SPK_OK, "%u", (unsigned)type);
    return (size_t)bytes;
}

static spk_quant_job job_of(uint32_t type, const float *column_importance, void *out) {
    return (spk_quant_job){ .type = type, .row_count = ROWS, .col_count = COLS, .weights = weights,
                            .importance = column_importance, .blocks = out,
                            .effort = efforts[at_effort] };
}

/* weights -> blocks -> decoded */
static void requantize(uint32_t type, const float *column_importance) {
    spk_error err = { 0 };
    spk_quant_job job = job_of(type, column_importance, blocks);
    CHECK_OK(spk_quantize(&job, &err), err);
    spk_dequantize(type, blocks, WEIGHTS, decoded);
}

static double square_error(const float *y, const float *column_importance) {
    double sum = 0;
    for (size_t i = 0; i < WEIGHTS; i++) {
        double off = (double)weights[i] - (double)y[i];
        sum += off * off * (column_importance != NULL ? (double)column_importance[i % COLS] : 1.0);
    }
    return sum;
}

static double relative_error(const float *y) {
    spk_quant_error sums = { 0 };
    spk_quant_error_add(&sums, weights, y, WEIGHTS);
    return spk_quant_error_relative_rmse(&sums);
}

/* Of one row: where rows have very different sizes, the sum over all would hide the small ones. */
static double row_error(const float *y, size_t row) {
    spk_quant_error sums = { 0 };
    spk_quant_error_add(&sums, weights + row * COLS, y + row * COLS, COLS);
    return spk_quant_error_relative_rmse(&sums);
}

/* ---- A plain fit for each type: the range of each sub-block, nothing searched ---- */

static float round_half(float f) { return spk_f16_to_f32(spk_f32_to_f16(f)); }

static float to_code(float v, float low, float high) { return fminf(fmaxf(nearbyintf(v), low), high); }

static void plain_affine(float code_max) {
    for (size_t start = 0; start < WEIGHTS; start += 256) {
        float low[8], step[8], most_low = 0, most_step = 0;
        for (size_t j = 0; j < 8; j++) {
            float high = 0;
            low[j] = 0;
            for (size_t i = 0; i < 32; i++) {
                low[j] = fminf(low[j], weights[start + 32 * j + i]);
                high = fmaxf(high, weights[start + 32 * j + i]);
            }
            step[j] = (high - low[j]) / code_max;
            most_low = fmaxf(most_low, -low[j]);
            most_step = fmaxf(most_step, step[j]);
        }
        float d = round_half(most_step / 63), dmin = round_half(most_low / 63);
        for (size_t j = 0; j < 8; j++)
            for (size_t i = 0; i < 32; i++) {
                float scale = d > 0 ? d * to_code(step[j] / d, 0, 63) : 0;
                float min = dmin > 0 ? dmin * to_code(-low[j] / dmin, 0, 63) : 0;
                float x = weights[start + 32 * j + i];
                decoded[start + 32 * j + i] = (scale > 0 ? scale * to_code((x + min) / scale, 0, code_max) : 0) - min;
            }
    }
}

static float largest_magnitude(const float *x, size_t count) {
    float largest = 0;
    for (size_t i = 0; i < count; i++) largest = fmaxf(largest, fabsf(x[i]));
    return largest;
}

static void plain_q6(void) {
    for (size_t start = 0; start < WEIGHTS; start += 256) {
        float d = round_half(largest_magnitude(weights + start, 256) / 31 / 127);
        for (size_t i = 0; i < 256; i++) {
            float step = largest_magnitude(weights + start + i / 16 * 16, 16) / 31;
            float scale = d > 0 ? d * to_code(step / d, 0, 127) : 0;
            decoded[start + i] = scale > 0 ? scale * to_code(weights[start + i] / scale, -32, 31) : 0;
        }
    }
}

static void plain_q8(void) {
    for (size_t i = 0; i < WEIGHTS; i++) {
        float d = round_half(largest_magnitude(weights + i / 32 * 32, 32) / 127);
        decoded[i] = d > 0 ? d * to_code(weights[i] / d, -127, 127) : 0;
    }
}

static double plain_error(uint32_t type, const float *column_importance) {
    switch (type) {
    case SPK_TYPE_Q4_K: plain_affine(15); break;
    case SPK_TYPE_Q5_K: plain_affine(31); break;
    case SPK_TYPE_Q6_K: plain_q6(); break;
    default:            plain_q8(); break;
    }
    return square_error(decoded, column_importance);
}

/* ---- Tests ---- */

static void makes_four_types_and_says_so(void) {
    for (uint32_t type = 0; type < SPK_TYPE_LIMIT; type++) {
        bool listed = false;
        for (size_t t = 0; t < TYPE_COUNT; t++) listed |= types[t] == type;
        CHECK(spk_quant_can_make(type) == listed, "type %u", (unsigned)type);
    }
}

static void normal_weights_lose_little(void) {
    /* Relative errors in percent, a little above what is reached. */
    static const double bounds[EFFORT_COUNT][TYPE_COUNT] = {
        { 7.00, 3.46, 1.75, 0.51 }, { 6.90, 3.40, 1.65, 0.48 }, { 6.85, 3.34, 1.64, 0.475 } };
    fill_bell(1, 0.02f);
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        requantize(types[t], NULL);
        double percent = 100 * relative_error(decoded);
        CHECK(percent < bounds[at_effort][t], "%s: %.4f %%, bound %.3f %%", spk_type_name(types[t]), percent,
              bounds[at_effort][t]);
    }
}

static void beats_a_plain_fit_clearly(void) {
    for (uint64_t seed = 2; seed < 5; seed++) {
        fill_bell(seed, 0.02f);
        fill_importance(seed);
        for (size_t t = 0; t < TYPE_COUNT; t++)
            for (int weighted = 0; weighted < 2; weighted++) {
                const float *w = weighted ? importance : NULL;
                double plain = plain_error(types[t], w);
                requantize(types[t], w);
                double ours = square_error(decoded, w);
                CHECK(ours < 0.85 * plain, "%s %s: squared error %.4f of the plain fit's", spk_type_name(types[t]),
                      weighted ? "weighted" : "unweighted", ours / plain);
            }
    }
}

static void is_never_worse_than_a_plain_fit_on_odd_rows(void) {
    fill_mixed(6);
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        double plain[ROWS];
        (void)plain_error(types[t], NULL);
        for (size_t r = 0; r < ROWS; r++) plain[r] = row_error(decoded, r);
        requantize(types[t], NULL);
        for (size_t r = 0; r < ROWS; r++)
            CHECK(row_error(decoded, r) <= plain[r] * (at_effort == 0 ? 1.01 : 1), "%s row %zu: %g, plain %g",
                  spk_type_name(types[t]), r, row_error(decoded, r), plain[r]);
    }
}

static void importance_lowers_the_weighted_error(void) {
    fill_bell(7, 0.02f);
    fill_importance(7);
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        requantize(types[t], NULL);
        double without = square_error(decoded, importance);
        requantize(types[t], importance);
        double with = square_error(decoded, importance);
        CHECK(with < 0.93 * without, "%s: %.4f of the error without", spk_type_name(types[t]), with / without);
    }
}

static void importance_has_no_unit(void) {
    fill_bell(8, 0.02f);
    fill_importance(8);
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        requantize(types[t], importance);
        size_t bytes = bytes_of(types[t], WEIGHTS);
        memcpy(other_blocks, blocks, bytes);
        for (int power = -100; power <= 100; power += 200) {
            float scaled[COLS];
            for (size_t c = 0; c < COLS; c++) scaled[c] = ldexpf(importance[c], power);
            requantize(types[t], scaled);
            CHECK(memcmp(blocks, other_blocks, bytes) == 0, "%s: times 2^%d", spk_type_name(types[t]), power);
        }
    }
}

static void columns_without_importance_are_not_neglected(void) {
    fill_bell(9, 0.02f);
    for (size_t c = 0; c < COLS; c++) importance[c] = c / 64 % 2 == 0 ? 0.0f : 3.0f;     /* whole sub-blocks */
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        requantize(types[t], importance);
        CHECK(relative_error(decoded) < 0.09, "%s: %g", spk_type_name(types[t]), relative_error(decoded));
    }
}

/* Squared errors of every 256 weights, and what the rounding of decoded weights to F32 can add to them; weighted where
 * importance is used. */
static void errors_by_super_block(const float *column_importance, double out[WEIGHTS / 256],
                                  double rounding[WEIGHTS / 256]) {
    for (size_t b = 0; b < WEIGHTS / 256; b++) {
        double squares = 0;
        out[b] = 0;
        for (size_t i = 256 * b; i < 256 * (b + 1); i++) {
            double off = (double)weights[i] - (double)decoded[i];
            double w = column_importance != NULL ? (double)column_importance[i % COLS] : 1.0;
            out[b] += w * off * off;
            squares += w * (double)weights[i] * (double)weights[i];
        }
        rounding[b] = 1e-6 * out[b] + 0x1p-20 * sqrt(out[b] * squares) + 0x1p-44 * squares;
    }
}

static void more_effort_is_never_worse(void) {
    static double errors[EFFORT_COUNT][WEIGHTS / 256], rounding[WEIGHTS / 256];
    for (uint64_t seed = 24; seed < 28; seed++)
        for (size_t t = 0; t < TYPE_COUNT; t++)
            for (int weighted = 0; weighted < 2; weighted++) {
                if (seed % 2 == 0) fill_mixed(seed); else fill_bell(seed, 0.02f);
                fill_importance(seed);
                const float *w = weighted ? importance : NULL;
                size_t better = 0;
                for (at_effort = 0; at_effort < EFFORT_COUNT; at_effort++) {
                    requantize(types[t], w);
                    errors_by_super_block(w, errors[at_effort], rounding);
                    for (size_t b = 0; at_effort > 0 && b < WEIGHTS / 256; b++) {
                        double less = errors[at_effort - 1][b], more = errors[at_effort][b];
                        CHECK(more <= less + rounding[b], "%s effort %zu block %zu: %g, before %g",
                              spk_type_name(types[t]), at_effort, b, more, less);
                        better += more < 0.999 * less;
                    }
                }
                CHECK(better > WEIGHTS / 256, "%s: only %zu of %d got better", spk_type_name(types[t]), better,
                      2 * WEIGHTS / 256);
            }
    at_effort = 1;
}

/* Blocks with any scales and codes, such as other writers make. */
static void random_blocks(uint32_t type, uint64_t *state) {
    const spk_type_info *info = spk_type_find(type);
    for (size_t at = 0; at < WEIGHTS / info->block_weights; at++) {
        uint8_t *block = blocks + at * info->block_bytes;
        for (size_t i = 0; i < info->block_bytes; i++) block[i] = (uint8_t)(check_random(state) >> 40);
        uint16_t d = spk_f32_to_f16(ldexpf(1.0f + fabsf(check_uniform(state)), (int)(check_random(state) % 16) - 14));
        uint16_t dmin = spk_f32_to_f16(spk_f16_to_f32(d) * (4 + 8 * fabsf(check_uniform(state))));
        if (type == SPK_TYPE_Q6_K && at % 2 == 1) d |= 0x8000;
        memcpy(type == SPK_TYPE_Q6_K ? block + offsetof(spk_block_q6_k, d) : block, &d, sizeof d);
        if (type == SPK_TYPE_Q4_K || type == SPK_TYPE_Q5_K) memcpy(block + offsetof(spk_block_q4_k, dmin), &dmin, 2);
        for (size_t i = 2; type == SPK_TYPE_Q8_0 && i < 34; i++)
            if (block[i] == 128) block[i] = 129;             /* -128 is no code of ours */
    }
    spk_dequantize(type, blocks, WEIGHTS, weights);
}

static void blocks_of_the_type_come_back(void) {
    uint64_t state = 10;
    for (size_t t = 0; t < TYPE_COUNT; t++)
        for (int round = 0; round < 4; round++) {
            random_blocks(types[t], &state);
            requantize(types[t], NULL);
            for (size_t r = 0; r < ROWS; r++)
                CHECK(row_error(decoded, r) < 1e-6, "%s row %zu: %g", spk_type_name(types[t]), r,
                      row_error(decoded, r));
        }
}

/* A row of ones with little spread leaves few digits to find a grid by. */
static void requantizing_again_changes_nothing(void) {
    static const double row_bounds[12] = { 1e-6, 1e-6, 1e-6, 2e-3, 2e-6, 2e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6, 1e-6 };
    for (size_t t = 0; t < TYPE_COUNT; t++)
        for (int weighted = 0; weighted < 2; weighted++) {
            fill_mixed(11);
            fill_importance(11);
            requantize(types[t], NULL);
            memcpy(weights, decoded, sizeof weights);
            requantize(types[t], weighted ? importance : NULL);
            for (size_t r = 0; r < ROWS; r++)
                CHECK(row_error(decoded, r) < row_bounds[r % 12], "%s row %zu: %g", spk_type_name(types[t]), r,
                      row_error(decoded, r));
        }
}

static void zeros_decode_to_exactly_zero(void) {
    memset(weights, 0, sizeof weights);
    weights[3] = -0.0f;
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        memset(blocks, 0xA5, sizeof blocks);
        requantize(types[t], NULL);
        static const float zeros[WEIGHTS];
        CHECK(memcmp(decoded, zeros, sizeof zeros) == 0, "%s", spk_type_name(types[t]));
        uint16_t d;
        memcpy(&d, types[t] == SPK_TYPE_Q6_K ? blocks + offsetof(spk_block_q6_k, d) : blocks, sizeof d);
        CHECK(d == 0, "%s: d is %04x", spk_type_name(types[t]), (unsigned)d);
    }
}

static void constants_come_back(void) {
    for (size_t t = 0; t < TYPE_COUNT; t++)
        for (int k = -20; k <= 20; k++) {
            float value = ldexpf(k % 2 == 0 ? 1.37f : -1.37f, k / 2);
            for (size_t i = 0; i < WEIGHTS; i++) weights[i] = value;
            requantize(types[t], NULL);
            /* Below 2^-6 a d of Q4_K or Q5_K may be a subnormal F16, with fewer bits. */
            CHECK(relative_error(decoded) < (k < -8 ? 0x1p-7 : 0x1p-11), "%s: %g decodes to %g",
                  spk_type_name(types[t]), (double)value, (double)decoded[0]);
        }
}

static void an_outlier_does_not_drag_the_rest_along(void) {
    for (size_t t = 0; t < TYPE_COUNT; t++)
        for (int sign = -1; sign <= 1; sign += 2) {
            fill_bell(12, 1e-5f);
            for (size_t r = 0; r < ROWS; r++) weights[r * COLS + 40] = (float)sign * 3.0f;
            requantize(types[t], NULL);
            CHECK(relative_error(decoded) < 0x1p-11, "%s: %g", spk_type_name(types[t]), relative_error(decoded));
        }
}

static void tiny_weights_use_what_f16_has(void) {
    fill_bell(13, 1e-6f);                                     /* about 16 of the smallest F16 */
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        requantize(types[t], NULL);
        CHECK(relative_error(decoded) < 0.4, "%s: %g", spk_type_name(types[t]), relative_error(decoded));
    }
    for (size_t i = 0; i < WEIGHTS; i++) weights[i] = i % 2 == 0 ? FLT_TRUE_MIN : -FLT_MIN;
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        requantize(types[t], NULL);
        CHECK(largest_magnitude(decoded, WEIGHTS) == 0, "%s", spk_type_name(types[t]));
    }
}

/* The largest F16, times the largest scale, times the largest code that the searches use. */
static const float lowest[TYPE_COUNT] = { -65504.0f * 63, -65504.0f * 63, -65504.0f * 127 * 32, -65504.0f * 127 };
static const float highest[TYPE_COUNT] = { 65504.0f * 63 * 15, 65504.0f * 63 * 31, 65504.0f * 127 * 32, 65504.0f * 127 };

static void weights_up_to_the_limit_are_held(void) {
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        for (float limit = lowest[t]; limit != 0; limit = limit < 0 ? highest[t] : 0) {
            for (size_t i = 0; i < WEIGHTS; i++) weights[i] = limit;
            requantize(types[t], NULL);
            for (size_t i = 0; i < WEIGHTS; i++)
                CHECK(decoded[i] == limit, "%s: %g, expected %g", spk_type_name(types[t]), (double)decoded[i], (double)limit);
        }
        fill_mixed(14);
        for (size_t i = 0; i < WEIGHTS; i += 50) weights[i] = i % 100 == 0 ? highest[t] : lowest[t];
        requantize(types[t], NULL);
        CHECK(relative_error(decoded) < 0.1, "%s: error %g", spk_type_name(types[t]), relative_error(decoded));
    }
}

/* The next float beyond, and far beyond; by every build, since they are different code. */
static void refuses_what_the_type_cannot_hold(void) {
    for (size_t k = 0; k < 4 * TYPE_COUNT; k++) {
        spk_error err = { 0 };
        size_t t = k / 4;
        float limit = k % 2 == 0 ? highest[t] : lowest[t], beyond = k % 4 < 2 ? nextafterf(limit, 4 * limit) : copysignf(1e30f, limit);
        char says[160];
        fill_bell(15, 1.0f);
        weights[3 * COLS + 200] = limit;
        weights[7 * COLS + 300] = weights[9 * COLS] = beyond;
        (void)snprintf(says, sizeof says, "row 7, column 300: weight %.9g is beyond what spk writes as %s (%.9g to %.9g)", (double)beyond,
                       spk_type_name(types[t]), (double)lowest[t], (double)highest[t]);
        spk_quant_job job = job_of(types[t], NULL, blocks);
        double scale;
        for (const spk_quant_build *b = spk_quant_builds; b < spk_quant_builds + spk_quant_build_count; b++)
            CHECK(!b->usable() || (spk_quantize_with(b, &job, &err) == SPK_E_LIMIT && strcmp(err.text, says) == 0),
                  "%s: %s, expected %s", b->name, err.text, says);
        CHECK(spk_quant_check(&job, &scale, &err) == SPK_E_LIMIT && strcmp(err.text, says) == 0, "%s, expected %s", err.text, says);
    }
}

static void refuses_what_is_not_finite(void) {
    static const float bad[] = { NAN, -NAN, INFINITY, -INFINITY };
    for (size_t t = 0; t < TYPE_COUNT; t++)
        for (size_t b = 0; b < 4; b++) {
            spk_error err = { 0 };
            fill_bell(15, 1.0f);
            weights[7 * COLS + 300] = bad[b];
            weights[9 * COLS] = bad[b];
            spk_quant_job job = job_of(types[t], NULL, blocks);
            CHECK(spk_quantize(&job, &err) == SPK_E_NONFINITE, "case %zu", b);
            CHECK(strstr(err.text, "row 7, column 300") != NULL, "%s", err.text);
        }
}

static void refuses_columns_that_make_no_blocks(void) {
    static const uint64_t bad[TYPE_COUNT] = { 288, 128, 511, 48 };
    for (size_t t = 0; t < TYPE_COUNT; t++)
        for (int k = 0; k < 2; k++) {
            spk_error err = { 0 };
            spk_quant_job job = job_of(types[t], NULL, blocks);
            job.col_count = k == 0 ? bad[t] : 0;
            CHECK(spk_quantize(&job, &err) == SPK_E_SHAPE, "%s: %s", spk_type_name(types[t]), err.text);
        }
}

static void writes_every_byte_and_none_beside(void) {
    static uint8_t room[BLOCK_BYTES_MAX + 2 * GUARD];
    fill_mixed(16);
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        size_t bytes = bytes_of(types[t], WEIGHTS);
        requantize(types[t], NULL);
        for (int fill = 0; fill < 2; fill++) {
            memset(room, fill == 0 ? 0x5A : 0xA5, sizeof room);
            spk_error err = { 0 };
            spk_quant_job job = job_of(types[t], NULL, room + GUARD - 1);      /* not aligned */
            CHECK_OK(spk_quantize(&job, &err), err);
            CHECK(memcmp(room + GUARD - 1, blocks, bytes) == 0, "%s: bytes depend on what was there",
                  spk_type_name(types[t]));
            for (size_t i = 0; i < GUARD; i++)
                CHECK((i == GUARD - 1 || room[i] == room[0]) && room[GUARD - 1 + bytes + i] == room[0], "%s: guard %zu",
                      spk_type_name(types[t]), i);
        }
    }
}

static void rows_do_not_depend_on_each_other(void) {
    fill_mixed(17);
    fill_importance(17);
    for (size_t t = 0; t < TYPE_COUNT; t++) {
        requantize(types[t], importance);
        size_t row_bytes = bytes_of(types[t], COLS);
        for (size_t r = 0, count; r < ROWS; r += count) {
            count = 1 + r % 5 < ROWS - r ? 1 + r % 5 : ROWS - r;       /* searches take rows in twos */
            spk_error err = { 0 };
            spk_quant_job job = job_of(types[t], importance, other_blocks);
            job.row_count = count;
            job.weights = weights + r * COLS;
            CHECK_OK(spk_quantize(&job, &err), err);
            CHECK(memcmp(other_blocks, blocks + r * row_bytes, count * row_bytes) == 0, "%s %zu rows from %zu",
                  spk_type_name(types[t]), count, r);
        }
    }
}

static void q8_0_takes_rows_of_any_block_count(void) {
    fill_bell(18, 0.02f);
    fill_importance(18);
    requantize(SPK_TYPE_Q8_0, NULL);
    for (uint64_t cols = 32; cols <= COLS; cols += 32) {
        spk_error err = { 0 };
        spk_quant_job job = job_of(SPK_TYPE_Q8_0, NULL, other_blocks);
        job.col_count = cols;
        job.row_count = WEIGHTS / cols;
        CHECK_OK(spk_quantize(&job, &err), err);
        size_t bytes = bytes_of(SPK_TYPE_Q8_0, job.row_count * cols);
        CHECK(memcmp(other_blocks, blocks, bytes) == 0, "%d columns", (int)cols);
    }
}

static void every_build_gives_the_same_bytes(void) {
    if (spk_quant_build_count < 2 || !spk_quant_builds[spk_quant_build_count - 1].usable())
        SKIP("one build of the searches only");
    for (uint64_t seed = 19; seed < 23; seed++) {
        if (seed % 2 == 0) fill_mixed(seed); else fill_bell(seed, 0.02f);
        fill_importance(seed);
        for (size_t t = 0; t < TYPE_COUNT; t++)
            for (int weighted = 0; weighted < 2; weighted++)
                for (size_t b = 0; b < spk_quant_build_count; b++) {
                    if (!spk_quant_builds[b].usable()) continue;
                    spk_error err = { 0 };
                    spk_quant_job job = job_of(types[t], weighted ? importance : NULL, b == 0 ? other_blocks : blocks);
                    CHECK_OK(spk_quantize_with(&spk_quant_builds[b], &job, &err), err);
                    CHECK(b == 0 || memcmp(blocks, other_blocks, bytes_of(types[t], WEIGHTS)) == 0, "%s: %s build",
                          spk_type_name(types[t]), spk_quant_builds[b].name);
                }
    }
}

/* A change of these is a change of every pack that is made from now on. */
static void bytes_are_those_of_the_last_version(void) {
    static const char *const golden[EFFORT_COUNT][TYPE_COUNT][2] = {
        {
            { "ed3c723978355ab78b0d75357c23b430", "95b92dc7497d0a5bccda641299d2838e" },
            { "86d8d4b6ab958394dfd852517de18f62", "2633a03094c89cfe08e98b4a77f06002" },
            { "202b5b9e38d5f36f08f6eaee83dde2f1", "a682c3ae9e327b6de8d5825129c15e04" },
            { "4ec1b19a944098ccafb1ad359b38f647", "b6ba18c52b73a7b60788b24f6c406ee7" },
        },
        {
            { "110cbf391ab043aa90a51232b348d8ff", "995311140a1f8ceeab6100c50ebca366" },
            { "c3da9e6cffaa46b95dae6435e83221d4", "987a76ac507ac9be1f263ed34da141df" },
            { "d1fcf8e48a3fc9cd29af1653ae2ef433", "673c8bd24dd9c672e19d6d14edd097a3" },
            { "d9a5458ab2fae6b45c7cb99c6e68855e", "23caf33cdb8a64084a56a95c40f7929d" },
        },
        {
            { "b4a3b11061d44383a3b0dc3c77e14fca", "9be6952c2c263e683e926e4c860178f0" },
            { "9f02fdc86cd04477bb8fe066a4d12f7d", "bc07a3a8e5645e8ab027b0645fd2514d" },
            { "8c1ade5dba6052e6e0d67384c2e117a5", "54f923db2d80caa6bf7cdc5eaee9bef3" },
            { "30eff2d21ad546618a6793aa74e10889", "24c7a6ff4c262a76ef8fd0ea3a76370b" },
        },
    };
    fill_mixed(23);
    fill_importance(23);
    for (size_t t = 0; t < TYPE_COUNT; t++)
        for (int weighted = 0; weighted < 2; weighted++) {
            requantize(types[t], weighted ? importance : NULL);
            spk_digest digest = spk_digest_of(blocks, bytes_of(types[t], WEIGHTS));
            char text[33];
            spk_digest_text(&digest, text);
            CHECK(strcmp(text, golden[at_effort][t][weighted]) == 0, "%s %d: %s", spk_type_name(types[t]),
                  weighted, text);
        }
}

static void sums_describe_the_difference(void) {
    static const float x[7] = { 1, -2, 3, 0, 5, 6, -7 }, y[7] = { 1, -2, 2, 1, 5, 8, -7 };
    spk_quant_error whole = { 0 }, parts = { 0 }, part = { 0 }, none = { 0 };
    spk_quant_error_add(&whole, x, y, 7);
    CHECK(whole.error_square_sum == 6 && whole.source_square_sum == 124 && whole.result_square_sum == 148, "%g %g %g",
          whole.error_square_sum, whole.source_square_sum, whole.result_square_sum);
    CHECK(whole.product_sum == 133 && whole.max_abs_error == 2, "%g %g", whole.product_sum, whole.max_abs_error);
    spk_quant_error_add(&parts, x, y, 3);
    spk_quant_error_add(&part, x + 3, y + 3, 4);
    spk_quant_error_merge(&parts, &part);
    CHECK(memcmp(&parts, &whole, sizeof parts) == 0, "parts add up");
    double rmse = spk_quant_error_relative_rmse(&whole), cosine = spk_quant_error_cosine(&whole);
    CHECK(fabs(rmse - sqrt(6.0 / 124)) < 1e-15, "%g", rmse);
    CHECK(fabs(cosine - 133 / sqrt(124.0 * 148)) < 1e-15, "%g", cosine);
    CHECK(spk_quant_error_relative_rmse(&none) == 0 && spk_quant_error_cosine(&none) == 1, "nothing is lost of 0");
}

int main(void) {
    RUN(makes_four_types_and_says_so);
    RUN(beats_a_plain_fit_clearly);
    RUN(refuses_columns_that_make_no_blocks);
    RUN(more_effort_is_never_worse);
    RUN(sums_describe_the_difference);
    for (at_effort = 0; at_effort < EFFORT_COUNT; at_effort++) {
        RUN(normal_weights_lose_little);
        RUN(is_never_worse_than_a_plain_fit_on_odd_rows);
        RUN(importance_lowers_the_weighted_error);
        RUN(importance_has_no_unit);
        RUN(columns_without_importance_are_not_neglected);
        RUN(blocks_of_the_type_come_back);
        RUN(requantizing_again_changes_nothing);
        RUN(zeros_decode_to_exactly_zero);
        RUN(constants_come_back);
        RUN(an_outlier_does_not_drag_the_rest_along);
        RUN(tiny_weights_use_what_f16_has);
        RUN(weights_up_to_the_limit_are_held);
        RUN(refuses_what_the_type_cannot_hold);
        RUN(refuses_what_is_not_finite);
        RUN(writes_every_byte_and_none_beside);
        RUN(rows_do_not_depend_on_each_other);
        RUN(q8_0_takes_rows_of_any_block_count);
        RUN(every_build_gives_the_same_bytes);
        RUN(bytes_are_those_of_the_last_version);
    }
    return CHECK_EXIT();
}
