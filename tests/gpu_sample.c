/* tests/gpu_sample.c - the sampling kernel against spk_sampler_next: the same tokens from the same logits, whatever they are.
 *
 *   make build/tests/gpu_sample && build/tests/gpu_sample [--quick]
 *
 * Then, of what has just been checked, the time of a draw.  --quick is for a GPU that is emulated.  Exits 77 where there is no GPU. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda.h"
#include "runtime/sample_internal.h"
#include "tests/sample_cases.h"

/* As many draws as 15 seconds have time for: one is some 60 us on the GPU, and up to 0.2 s on the host. */
enum { EXIT_SKIPPED = 77, VOCAB_MAX = 1 << 20, STEPS_MAX = 200, SMALL_DRAWS = 20, TIMED_STEPS = STEPS_MAX, TIMED_RUNS = 3 };

typedef struct {
    spk_cuda     *cuda;
    float        *logits, *d_logits;         /* [VOCAB_MAX] */
    uint32_t     *chosen, *d_chosen_here;    /* [STEPS_MAX + 1], in host memory and on the device */
    uint32_t     *tokens;                    /* [STEPS_MAX + 1] */
    spk_sampling *d_sampling;
    spk_cuda_sequence sequence;
    uint32_t      compared;                  /* steps so far */
    void         *scratch;
} bench;

static spk_status open_bench(bench *b, spk_error *err) {
    void *memory[7] = { NULL };
    SPK_TRY(spk_cuda_open(&b->cuda, err));
    SPK_TRY(spk_cuda_allocate(b->cuda, VOCAB_MAX * sizeof(float), "logits", &memory[0], err));
    SPK_TRY(spk_cuda_allocate(b->cuda, (STEPS_MAX + 1) * sizeof(uint32_t), "tokens", &memory[1], err));
    SPK_TRY(spk_cuda_allocate(b->cuda, (STEPS_MAX + 1) * sizeof(uint32_t), "choices", &memory[2], err));
    SPK_TRY(spk_cuda_allocate(b->cuda, sizeof(uint32_t), "a position", &memory[3], err));
    SPK_TRY(spk_cuda_allocate(b->cuda, sizeof(spk_sampling), "options", &memory[4], err));
    SPK_TRY(spk_cuda_allocate(b->cuda, sizeof(uint32_t), "a count of steps", &memory[6], err));
    void *chosen = NULL;
    SPK_TRY(spk_cuda_share(b->cuda, (STEPS_MAX + 1) * sizeof(uint32_t), "choices", &chosen, &memory[5], err));
    b->d_logits = memory[0];
    b->d_chosen_here = memory[2];
    b->d_sampling = memory[4];
    b->chosen = chosen;
    b->sequence = (spk_cuda_sequence){ .d_tokens = memory[1], .d_chosen = memory[5], .d_position = memory[3], .d_step = memory[6] };
    b->logits = malloc(VOCAB_MAX * sizeof(float));
    b->tokens = malloc((STEPS_MAX + 1) * sizeof(uint32_t));
    b->scratch = malloc(spk_sampler_scratch_bytes(VOCAB_MAX));
    return b->logits && b->tokens && b->scratch ? SPK_OK : spk_fail(err, SPK_E_MEMORY, "out of memory");
}

static spk_status record(bench *b, uint32_t vocab, uint32_t cluster_max, spk_cuda_step **out, spk_error *err) {
    spk_cuda_sample draw = { .sequence = b->sequence, .logits = b->d_logits, .vocab_size = vocab, .cluster_max = cluster_max,
                             .d_sampling = b->d_sampling };
    SPK_TRY(spk_cuda_step_begin(b->cuda, err));
    spk_cuda_launch_sample(b->cuda, &draw);
    return spk_cuda_step_end(b->cuda, out, err);
}

/* Position 0, free tokens but every eighth, and the sampler. */
static spk_status prepare(bench *b, const spk_sampler *sampler, spk_error *err) {
    const spk_sampling plan = spk_sampler_plan(sampler);
    const uint32_t zero = 0;
    for (uint32_t i = 0; i <= STEPS_MAX; i++) b->tokens[i] = i % 8 == 0 ? 5 : SPK_CUDA_TOKEN_FREE;
    memset(b->chosen, 0xab, (STEPS_MAX + 1) * sizeof *b->chosen);
    SPK_TRY(spk_cuda_upload(b->cuda, b->d_sampling, &plan, sizeof plan, err));
    SPK_TRY(spk_cuda_upload(b->cuda, b->sequence.d_tokens, b->tokens, (STEPS_MAX + 1) * sizeof *b->tokens, err));
    return spk_cuda_upload(b->cuda, b->sequence.d_position, &zero, sizeof zero, err);
}

/* How many of `draws` tokens differ from the host's, and what else is left as it must be. */
static spk_status compare(bench *b, const spk_cuda_step *step, uint32_t vocab, spk_sampler sampler, uint32_t draws, uint32_t *wrong,
                          spk_error *err) {
    spk_sampling after;
    uint32_t position = 0, step_count = 0;
    SPK_TRY(prepare(b, &sampler, err));
    SPK_TRY(spk_cuda_step_run(b->cuda, step, draws, err));
    SPK_TRY(spk_cuda_download(b->cuda, b->tokens, b->sequence.d_tokens, (STEPS_MAX + 1) * sizeof *b->tokens, err));
    SPK_TRY(spk_cuda_download(b->cuda, &position, b->sequence.d_position, sizeof position, err));
    SPK_TRY(spk_cuda_download(b->cuda, &step_count, b->sequence.d_step, sizeof step_count, err));
    SPK_TRY(spk_cuda_download(b->cuda, &after, b->d_sampling, sizeof after, err));
    for (uint32_t i = 1; i <= draws; i++) {
        const uint32_t expected = spk_sampler_next(&sampler, b->logits, vocab, b->scratch);
        const uint32_t next = i % 8 == 0 ? 5 : expected == SPK_TOKEN_NONE ? 0 : expected;
        if (b->chosen[i] != expected || b->tokens[i] != next) (*wrong)++;
    }
    b->compared += draws;
    if (position != draws || step_count != b->compared || after.state != sampler.state) (*wrong)++;
    return SPK_OK;
}

/* `draws` of every share-th pair of logits and options, so that each of either has its turn. */
static void check_vocab(bench *b, uint32_t vocab, uint32_t cluster_max, int share, uint32_t draws) {
    spk_error err = { 0 };
    spk_cuda_step *step = NULL;
    uint64_t total = 0;
    CHECK_OK(record(b, vocab, cluster_max, &step, &err), err);
    for (int kind = 0; kind < SAMPLE_LOGITS_COUNT && check_failures < 20; kind++) {
        sample_fill(kind, b->logits, vocab, vocab + (uint64_t)kind);
        CHECK_OK(spk_cuda_upload(b->cuda, b->d_logits, b->logits, vocab * sizeof(float), &err), err);
        for (int option = (share - kind % share) % share; option < SAMPLE_OPTIONS_COUNT; option += share) {
            uint32_t wrong = 0;
            spk_sampler_options o = sample_options(option, vocab);
            o.seed = (uint64_t)(kind * 1000 + option);
            CHECK_OK(compare(b, step, vocab, spk_sampler_start(&o), draws, &wrong, &err), err);
            CHECK(wrong == 0, "vocabulary %u, at most %u CTAs, logits '%s', options %d: %u of %u differ", vocab, cluster_max,
                  SAMPLE_LOGITS[kind], option, wrong, draws);
            total += draws;
        }
    }
    spk_cuda_step_free(step);
    printf("# vocabulary %u, at most %u CTAs: %llu draws compared\n", vocab, cluster_max, (unsigned long long)total);
}

static bench shared;

static void the_device_draws_what_the_host_draws(void) {
    static const uint32_t vocabs[] = { 1, 5, 1000, 4096, 5003 };
    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++) check_vocab(&shared, vocabs[v], 0, 1, SMALL_DRAWS);
}
static void of_large_vocabularies_too(void) {
    check_vocab(&shared, 248320, 0, 4, 2);
    check_vocab(&shared, 151936, 0, 4, 2);
    check_vocab(&shared, VOCAB_MAX, 0, 8, 1);
}
static void some_of_all(void) {
    check_vocab(&shared, 5, 0, 10, 2);
    check_vocab(&shared, 5003, 0, 10, 2);
    check_vocab(&shared, 5003, 8, 40, 2);
    check_vocab(&shared, 5003, 1, 20, 2);
    check_vocab(&shared, 460000, 0, 200, 1);        /* more than is kept in shared memory */
}
static void the_size_of_the_cluster_changes_nothing(void) {
    check_vocab(&shared, 5003, 8, 1, 8);
    check_vocab(&shared, 5003, 1, 1, 8);
    check_vocab(&shared, 248320, 8, 8, 2);
    check_vocab(&shared, 248320, 1, 8, 2);
}

/* ---- Time ---- */

static double now_us(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* Of one replay of a step of this kernel alone, queued behind others: the graph's own cost is in it. */
static spk_status time_draw(bench *b, uint32_t vocab, const spk_sampler *sampler, double *us, spk_error *err) {
    spk_cuda_step *step = NULL;
    SPK_TRY(record(b, vocab, 0, &step, err));
    *us = 1e9;
    for (int run = 0; run < TIMED_RUNS; run++) {
        SPK_TRY(prepare(b, sampler, err));
        double start = now_us();
        SPK_TRY(spk_cuda_step_run(b->cuda, step, TIMED_STEPS, err));
        SPK_TRY(spk_cuda_wait(b->cuda, err));
        double each = (now_us() - start) / TIMED_STEPS;
        if (each < *us) *us = each;
    }
    spk_cuda_step_free(step);
    return SPK_OK;
}

static void print_times(void) {
    static const struct { const char *name; spk_sampler_options options; } ways[] = {
        { "temperature 1", { .temperature = 1, .top_p = 1 } },
        { "0.7, top-k 20, top-p 0.8", { .temperature = 0.7f, .top_k = 20, .top_p = 0.8f } },
        { "1, top-p 0.95", { .temperature = 1, .top_p = 0.95f } },
        { "0.6, 20, 0.95, min-p 0.05", { .temperature = 0.6f, .top_k = 20, .top_p = 0.95f, .min_p = 0.05f } } };
    static const int kinds[] = { SAMPLE_LOGITS_COUNT - 1, 0, 2 };
    static const uint32_t vocabs[] = { 151936, 248320 };
    spk_error err = { 0 };
    printf("us a step of one draw (the graph's launch included)\n%-12s %-24s %-28s %8s %8s\n", "vocabulary", "logits", "options",
           "to host", "to GPU");
    for (size_t v = 0; v < 2; v++)
        for (size_t k = 0; k < 3; k++) {
            sample_fill(kinds[k], shared.logits, vocabs[v], 1);
            CHECK_OK(spk_cuda_upload(shared.cuda, shared.d_logits, shared.logits, vocabs[v] * sizeof(float), &err), err);
            for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
                spk_sampler sampler = spk_sampler_start(&ways[w].options);
                bench on_device = shared;
                on_device.sequence.d_chosen = shared.d_chosen_here;
                double to_host = 0, to_device = 0;
                CHECK_OK(time_draw(&shared, vocabs[v], &sampler, &to_host, &err), err);
                CHECK_OK(time_draw(&on_device, vocabs[v], &sampler, &to_device, &err), err);
                printf("%-12u %-24s %-28s %8.2f %8.2f\n", vocabs[v], SAMPLE_LOGITS[kinds[k]], ways[w].name, to_host, to_device);
            }
        }
}

int main(int argc, char **argv) {
    spk_error err = { 0 };
    const bool is_quick = argc > 1 && strcmp(argv[1], "--quick") == 0;
    spk_status status = open_bench(&shared, &err);
    if (status == SPK_E_UNSUPPORTED) {
        printf("no GPU: skipped (%s)\n", err.text);
        return EXIT_SKIPPED;
    }
    CHECK_OK(status, err);
    if (status != SPK_OK) return CHECK_EXIT();
    if (is_quick) {
        RUN(some_of_all);
    } else {
        RUN(the_device_draws_what_the_host_draws);
        RUN(of_large_vocabularies_too);
        RUN(the_size_of_the_cluster_changes_nothing);
        if (check_failures == 0) print_times();
    }
    free(shared.logits);
    free(shared.tokens);
    free(shared.scratch);
    spk_cuda_unshare(shared.cuda, shared.chosen);
    void *const on_device[] = { shared.d_logits, shared.sequence.d_tokens, shared.d_chosen_here, shared.sequence.d_position,
                               shared.sequence.d_step, shared.d_sampling };
    for (size_t i = 0; i < sizeof on_device / sizeof *on_device; i++) spk_cuda_free(shared.cuda, on_device[i]);
    spk_cuda_close(shared.cuda);
    return CHECK_EXIT();
}
