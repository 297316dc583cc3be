/* tests/checkkern_cuda.h - device memory of the CUDA checks, and running one case.
 *
 * Everything that kernels of a case may touch lies in one block, whose picture on the host is uploaded before each run and
 * downloaded after it.  So whatever a kernel writes outside its outputs shows: guard bytes around every buffer, and all inputs,
 * must come back as they went.  A case is recorded once and run twice: outputs are poisoned before either run and must have
 * the same bits after both.  Weights lie in a second block, uploaded once.
 *
 * Inputs that an earlier kernel of a step would have written are "staged": a kernel at the head of the step (an embedding row of floats, any
 * bits) copies them to where the kernels under test read them.  Whoever reads before chain_wait, or before the signal, finds poison there.
 */
#ifndef SPK_CHECKKERN_CUDA_H
#define SPK_CHECKKERN_CUDA_H

#include "formats/pool.h"
#include "kernels/cuda.h"
#include "tests/checkkern_common.h"

enum { REGION_MAX = 192, DEVICE_ALIGN = 256, STAGE_FLOATS = 1 << 17 };
#define WORK_BYTES_MAX   (UINT64_C(192) << 20)
#define WEIGHT_BYTES_MAX (UINT64_C(1) << 30)

/* INPUT    comes back as it went
 * OUTPUT   poisoned or given; compared by the caller, and between the two runs
 * SCRATCH  anything; not uploaded again between the runs
 * COUNTER  not uploaded again either, but must come back as it went */
typedef enum { INPUT, OUTPUT, SCRATCH, COUNTER } region_kind;
typedef struct { uint64_t begin, size_bytes; region_kind kind; } region;

typedef struct {
    spk_cuda *cuda;
    spk_pool *pool;                       /* for references */
    uint8_t  *host, *back[2], *d_memory;  /* the block as uploaded, and as it came back from each run */
    uint64_t  used;
    region    regions[REGION_MAX];
    uint32_t  region_count;
    uint8_t  *weights, *d_weights;
    uint64_t  weight_used, weight_uploaded;
    uint32_t *d_zero;                     /* the position of what is staged, and its token */
    float    *stage, *d_stage, *d_live;   /* host picture, where it is uploaded to, where kernels find it */
    uint32_t  stage_used;
} device_case;

/* A GPU that does not do what it is told ends the program: nothing after that means anything. */
#define MUST(call)                                                                               \
    do {                                                                                         \
        spk_error must_error = { 0 };                                                            \
        if ((call) != SPK_OK) {                                                                  \
            printf("FAIL cuda: [seed %llu; %s] %s\n", (unsigned long long)seed, case_text, must_error.text); \
            exit(1);                                                                             \
        }                                                                                        \
    } while (0)

/* ---- Memory ---- */

static void device_open(device_case *t, spk_cuda *cuda) {
    void *memory;
    *t = (device_case){ .cuda = cuda };
    MUST(spk_pool_create(0, &t->pool, &must_error));
    MUST(spk_cuda_allocate(cuda, WORK_BYTES_MAX, "the checker's buffers", &memory, &must_error));
    t->d_memory = memory;
    MUST(spk_cuda_allocate(cuda, WEIGHT_BYTES_MAX, "the checker's weights", &memory, &must_error));
    t->d_weights = memory;
    MUST(spk_cuda_allocate(cuda, sizeof *t->d_zero, "the checker's position", &memory, &must_error));
    t->d_zero = memory;
    t->host = must(malloc(WORK_BYTES_MAX));
    t->back[0] = must(malloc(WORK_BYTES_MAX));
    t->back[1] = must(malloc(WORK_BYTES_MAX));
    t->weights = must(malloc(WEIGHT_BYTES_MAX));
}

static void device_close(device_case *t) {
    spk_cuda_free(t->cuda, t->d_memory);
    spk_cuda_free(t->cuda, t->d_weights);
    spk_cuda_free(t->cuda, t->d_zero);
    spk_pool_destroy(t->pool);
    free(t->host), free(t->back[0]), free(t->back[1]), free(t->weights);
    spk_cuda_close(t->cuda);
}

/* size_bytes between guards, all poisoned.  Aligned as allocations are, plus shift_bytes: outputs of one launch may lie side
 * by side. */
static void *take(device_case *t, region_kind kind, uint64_t size_bytes, uint64_t shift_bytes) {
    uint64_t begin = (t->used + GUARD_BYTES + DEVICE_ALIGN - 1) / DEVICE_ALIGN * DEVICE_ALIGN + shift_bytes;
    uint64_t end = begin + size_bytes + GUARD_BYTES;
    if (end > WORK_BYTES_MAX || t->region_count == REGION_MAX) {
        fprintf(stderr, "checkkern: a case needs more than its memory: %s\n", case_text);
        exit(1);
    }
    memset(t->host + t->used, POISON, end - t->used);
    t->regions[t->region_count++] = (region){ begin, size_bytes, kind };
    t->used = end;
    return t->d_memory + begin;
}
static float *take_floats(device_case *t, region_kind kind, uint64_t count) {
    return take(t, kind, count * sizeof(float), 0);
}

/* Begin a case with no buffers; weights stay. */
static void case_begin(device_case *t) {
    t->used = t->region_count = t->stage_used = 0;
    t->d_stage = take_floats(t, INPUT, STAGE_FLOATS);
    t->d_live = take_floats(t, OUTPUT, STAGE_FLOATS);
    t->stage = (float *)(void *)(t->host + ((uint8_t *)t->d_stage - t->d_memory));
}
static void weights_drop(device_case *t) { t->weight_used = t->weight_uploaded = 0; }

/* What is uploaded to a device address of the block; of a staged buffer: what will be copied to it. */
static void *host_of(const device_case *t, const void *d_data) {
    uint64_t at = (uint64_t)((const uint8_t *)d_data - t->d_memory), live = (uint64_t)((uint8_t *)t->d_live - t->d_memory);
    if (at >= live && at < live + STAGE_FLOATS * sizeof(float)) return (uint8_t *)t->stage + (at - live);
    return t->host + at;
}
static float *host_floats(const device_case *t, const float *d_data) { return host_of(t, d_data); }
/* What came back from a run; results are those of the first. */
static const void *back_of(const device_case *t, int run, const void *d_data) {
    return t->back[run] + ((const uint8_t *)d_data - t->d_memory);
}
static const void *result_of(const device_case *t, const void *d_data) { return back_of(t, 0, d_data); }
static const float *result_floats(const device_case *t, const float *d_data) { return result_of(t, d_data); }

/* A staged input: the address that kernels read, its values to be written through host_of. */
static float *take_staged(device_case *t, uint32_t count) {
    uint32_t at = t->stage_used;
    t->stage_used = (at + count + 2 * DEVICE_ALIGN / 4 - 1) / (DEVICE_ALIGN / 4) * (DEVICE_ALIGN / 4);
    if (t->stage_used > STAGE_FLOATS) {
        fprintf(stderr, "checkkern: a case stages more than %d floats: %s\n", (int)STAGE_FLOATS, case_text);
        exit(1);
    }
    return t->d_live + at;
}
static float *take_staged_as(device_case *t, uint32_t count, x_pattern pattern) {
    float *d_data = take_staged(t, count);
    fill(pattern, host_floats(t, d_data), count);
    return d_data;
}
static float *take_input_as(device_case *t, uint32_t count, x_pattern pattern) {
    float *d_data = take_floats(t, INPUT, count);
    fill(pattern, host_floats(t, d_data), count);
    return d_data;
}

/* ---- Recording and running ---- */

/* Launches recorded after this follow the copy of the staged inputs. */
static void case_record(device_case *t) {
    MUST(spk_cuda_step_begin(t->cuda, &must_error));
    if (t->stage_used == 0) return;
    const uint8_t *staged = (const uint8_t *)t->d_stage;
    spk_cuda_embed copy = { .sequence = { .d_tokens = t->d_zero, .d_position = t->d_zero },
                            .embedding = { staged, t->stage_used * sizeof(float), SPK_TYPE_F32, SPK_LAYOUT_ROWS, 1, t->stage_used },
                            .d_x = t->d_live };
    spk_cuda_launch_embed(t->cuda, &copy);
}

static bool is_unchanged(region_kind kind) { return kind == INPUT || kind == COUNTER; }

static uint64_t first_difference(const uint8_t *a, const uint8_t *b, uint64_t size_bytes) {
    if (memcmp(a, b, size_bytes) == 0) return UINT64_MAX;
    uint64_t i = 0;
    while (a[i] == b[i]) i++;
    return i;
}

/* Guards and inputs against what was uploaded; the staged copies against what was staged. */
static void check_block(const device_case *t, const uint8_t *back) {
    uint64_t at = 0;
    for (uint32_t r = 0; r <= t->region_count; r++) {
        uint64_t begin = r < t->region_count ? t->regions[r].begin : t->used;
        uint64_t diff = first_difference(back + at, t->host + at, begin - at);
        EXPECT(diff == UINT64_MAX, "byte %llu between buffers %u and %u was written", (unsigned long long)diff, r, r + 1);
        if (r == t->region_count) break;
        at = begin + t->regions[r].size_bytes;
        if (!is_unchanged(t->regions[r].kind)) continue;
        diff = first_difference(back + begin, t->host + begin, t->regions[r].size_bytes);
        EXPECT(diff == UINT64_MAX, "byte %llu of buffer %u, %s, was written", (unsigned long long)diff, r,
               t->regions[r].kind == COUNTER ? "a counter that must be left as it was" : "an input");
    }
    at = first_difference(back + ((uint8_t *)t->d_live - t->d_memory), (uint8_t *)t->stage, STAGE_FLOATS * sizeof(float));
    EXPECT(at == UINT64_MAX, "byte %llu of the staged inputs was written, or not copied", (unsigned long long)at);
}

static void upload_weights(device_case *t) {
    if (t->weight_uploaded == t->weight_used) return;
    MUST(spk_cuda_upload(t->cuda, t->d_weights + t->weight_uploaded, t->weights + t->weight_uploaded,
                         t->weight_used - t->weight_uploaded, &must_error));
    t->weight_uploaded = t->weight_used;
}

/* Run a recorded step twice, `count` replays each, and check all that needs no reference. */
static void step_check(device_case *t, const spk_cuda_step *step, uint32_t count) {
    upload_weights(t);
    for (int run = 0; run < 2; run++) {
        uint8_t *from = t->host;
        if (run == 1) {              /* counters and scratch as the first run left them */
            from = t->back[1];
            memcpy(from, t->host, t->used);
            for (uint32_t r = 0; r < t->region_count; r++)
                if (t->regions[r].kind == COUNTER || t->regions[r].kind == SCRATCH)
                    memcpy(from + t->regions[r].begin, t->back[0] + t->regions[r].begin, t->regions[r].size_bytes);
        }
        MUST(spk_cuda_upload(t->cuda, t->d_memory, from, t->used, &must_error));
        MUST(spk_cuda_step_run(t->cuda, step, count, &must_error));
        MUST(spk_cuda_wait(t->cuda, &must_error));
        MUST(spk_cuda_download(t->cuda, t->back[run], t->d_memory, t->used, &must_error));
        check_block(t, t->back[run]);
    }
    for (uint32_t r = 0; r < t->region_count; r++) {
        if (t->regions[r].kind != OUTPUT) continue;
        uint64_t diff = first_difference(t->back[0] + t->regions[r].begin, t->back[1] + t->regions[r].begin,
                                         t->regions[r].size_bytes);
        EXPECT(diff == UINT64_MAX, "byte %llu of buffer %u differs between two runs", (unsigned long long)diff, r);
    }
}

/* The case that has been recorded. */
static void case_run(device_case *t, uint32_t count) {
    spk_cuda_step *step = NULL;
    MUST(spk_cuda_step_end(t->cuda, &step, &must_error));
    step_check(t, step, count);
    spk_cuda_step_free(step);
}

/* ---- Comparing ---- */

/* Beyond the largest float anything may come out. */
static void near_floats(const device_case *t, const char *what, const float *d_got, const double *want,
                        const double *tolerance, uint64_t count) {
    const float *got = result_floats(t, d_got);
    for (uint64_t i = 0; i < count; i++) {
        if (fabs(want[i]) + tolerance[i] > (double)FLT_MAX) continue;
        near(what, i, (double)got[i], want[i], tolerance[i]);
    }
}

/* Two outputs that must have the same bits. */
static void same_floats(const device_case *t, const char *what, const float *d_a, const float *d_b, uint64_t count) {
    const float *a = result_floats(t, d_a), *b = result_floats(t, d_b);
    for (uint64_t i = 0; i < count; i++)
        EXPECT(memcmp(&a[i], &b[i], sizeof(float)) == 0, "%s[%llu]: %.9g and %.9g have not the same bits", what,
               (unsigned long long)i, (double)a[i], (double)b[i]);
}

#endif
