/* tests/generate_check.h - what spk_session_generate promises, on any backend: for test_generate.c and gpu_generate.c. */
#ifndef SPK_GENERATE_CHECK_H
#define SPK_GENERATE_CHECK_H

#include <stdlib.h>
#include <string.h>

#include "runtime/runtime.h"
#include "tests/check.h"

static const char *const GENERATE_MODELS[] = { "packs/tiny-qwen36/tiny-qwen36-ud-q4_k_m.gguf", "build/models/tiny-qwen36-bf16.gguf",
                                               "tests/models/tiny-qwen3moe-q4_k_m.gguf", "tests/models/tiny-qwen35-q4_k_m.gguf" };
enum { GENERATE_MODEL_COUNT = 4, GENERATE_TOKENS_MAX = 64, GENERATE_CONTEXT = 100 };
static const uint32_t GENERATE_INPUT[] = { 10, 200, 1999, 4, 17 };
enum { GENERATE_INPUT_COUNT = sizeof GENERATE_INPUT / sizeof *GENERATE_INPUT };

static const spk_sampler_options GENERATE_OPTIONS[] = {
    { .temperature = 0, .top_p = 1 }, { .temperature = 1, .top_p = 1, .seed = 3 },
    { .temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .seed = 4 }, { .temperature = 2, .top_p = 1, .min_p = 0.02f, .seed = UINT64_MAX } };
enum { GENERATE_OPTIONS_COUNT = sizeof GENERATE_OPTIONS / sizeof *GENERATE_OPTIONS };

/* What on_token saw, and when it is to say stop. */
typedef struct {
    uint32_t tokens[GENERATE_TOKENS_MAX], count, stop_count, stop_token;
} generate_trace;
static bool generate_note(void *context, uint32_t token) {
    generate_trace *t = context;
    if (t->count < GENERATE_TOKENS_MAX) t->tokens[t->count] = token;
    t->count++;
    return t->count != t->stop_count && token != t->stop_token;
}
static generate_trace generate_until(uint32_t count) { return (generate_trace){ .stop_count = count, .stop_token = UINT32_MAX }; }

static spk_status generate_run(spk_session *session, const uint32_t *input, uint32_t count, spk_sampler *sampler, uint32_t limit,
                               generate_trace *trace, spk_error *err) {
    spk_generation g = { .sampler = sampler, .token_limit = limit, .on_token = generate_note, .context = trace };
    return spk_session_generate(session, input, count, &g, err);
}

/* The same by evaluating and drawing in turn. */
static void generate_by_hand(const spk_model *model, spk_session *session, const uint32_t *input, uint32_t count, spk_sampler *sampler,
                             uint32_t limit, generate_trace *trace) {
    spk_error err = { 0 };
    uint32_t vocab = spk_model_vocab_size(model), token;
    float *logits = malloc(vocab * sizeof *logits);
    void *scratch = malloc(spk_sampler_scratch_bytes(vocab));
    CHECK_OK(spk_session_eval(session, input, count, SPK_LOGITS_LAST, logits, &err), err);
    for (uint32_t i = 0; i < limit; i++) {
        token = spk_sampler_next(sampler, logits, vocab, scratch);
        if (!generate_note(trace, token) || i + 1 == limit) break;
        CHECK_OK(spk_session_eval(session, &token, 1, SPK_LOGITS_LAST, logits, &err), err);
    }
    free(logits);
    free(scratch);
}

static void generate_check_same(const generate_trace *a, const generate_trace *b, const char *what) {
    CHECK(a->count == b->count, "%s: %u tokens, by hand %u", what, a->count, b->count);
    for (uint32_t i = 0; i < a->count && i < b->count && i < GENERATE_TOKENS_MAX; i++)
        if (a->tokens[i] != b->tokens[i]) {
            CHECK(0, "%s: token %u is %u, by hand %u", what, i, a->tokens[i], b->tokens[i]);
            return;
        }
}

static spk_session *generate_session(const spk_model *model, uint32_t context_tokens) {
    spk_error err = { 0 };
    spk_session *session = NULL;
    spk_session_options so = { .context_tokens = context_tokens };
    CHECK_OK(spk_session_create(model, &so, &session, &err), err);
    return session;
}

/* ---- Promises ---- */

static void generate_equals_the_loop(const spk_model *model) {
    spk_error err = { 0 };
    spk_session *session = generate_session(model, GENERATE_CONTEXT);
    generate_trace traces[GENERATE_OPTIONS_COUNT];
    for (int o = 0; o < GENERATE_OPTIONS_COUNT; o++) {
        spk_sampler sampler = spk_sampler_start(&GENERATE_OPTIONS[o]), by_hand = sampler;
        generate_trace expected = generate_until(0), *got = &traces[o];
        *got = expected;
        spk_session_reset(session);
        generate_by_hand(model, session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &by_hand, 24, &expected);
        spk_session_reset(session);
        CHECK_OK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &sampler, 24, got, &err), err);
        generate_check_same(got, &expected, "equals the loop");
        CHECK(got->count == 24, "%u tokens", got->count);
        CHECK(sampler.state == by_hand.state, "options %d: as many numbers were drawn", o);
        CHECK(spk_session_position(session) == GENERATE_INPUT_COUNT + 23, "position %u", spk_session_position(session));
    }
    CHECK(memcmp(traces[0].tokens, traces[3].tokens, sizeof traces[0].tokens) != 0, "greedy and hot are not the same");
    spk_sampler_options other = GENERATE_OPTIONS[3];
    other.seed = 5;
    spk_sampler sampler = spk_sampler_start(&other);
    generate_trace trace = generate_until(0), greedy = generate_until(0);
    spk_session_reset(session);
    CHECK_OK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &sampler, 24, &trace, &err), err);
    CHECK(memcmp(traces[3].tokens, trace.tokens, sizeof trace.tokens) != 0, "another seed gives other tokens");
    spk_session_reset(session);
    CHECK_OK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, NULL, 24, &greedy, &err), err);
    generate_check_same(&greedy, &traces[0], "no sampler is greedy");
    spk_session_destroy(session);
}

/* Stop after each number of tokens, go on with other input, and compare with a session that never went too far. */
static void generate_goes_on_after_a_stop(const spk_model *model) {
    spk_error err = { 0 };
    uint32_t vocab = spk_model_vocab_size(model);
    spk_session *session = generate_session(model, GENERATE_CONTEXT), *other = generate_session(model, GENERATE_CONTEXT);
    float *got = malloc(vocab * sizeof *got), *expected = malloc(vocab * sizeof *expected);
    for (uint32_t stop = 1; stop <= 5; stop++)
        for (int o = 0; o < 3; o += 2) {
            spk_sampler sampler = spk_sampler_start(&GENERATE_OPTIONS[o]), by_hand = sampler;
            generate_trace first = generate_until(stop), first_by_hand = first, second = generate_until(0), second_by_hand = second;
            spk_session_reset(session);
            spk_session_reset(other);
            CHECK_OK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &sampler, 50, &first, &err), err);
            generate_by_hand(model, other, GENERATE_INPUT, GENERATE_INPUT_COUNT, &by_hand, stop, &first_by_hand);
            generate_check_same(&first, &first_by_hand, "before a stop");
            CHECK(first.count == stop, "%u tokens", first.count);
            CHECK(spk_session_position(session) == GENERATE_INPUT_COUNT + stop - 1, "stop %u: position %u", stop, spk_session_position(session));
            const uint32_t next[] = { first.tokens[(stop - 1) % GENERATE_TOKENS_MAX], 33, 1044 };
            CHECK_OK(generate_run(session, next, 1 + stop % 3, &sampler, 7, &second, &err), err);
            generate_by_hand(model, other, next, 1 + stop % 3, &by_hand, 7, &second_by_hand);
            generate_check_same(&second, &second_by_hand, "after a stop");
            CHECK(sampler.state == by_hand.state, "as many numbers were drawn");
            CHECK_OK(spk_session_eval(session, second.tokens, 1, SPK_LOGITS_LAST, got, &err), err);
            CHECK_OK(spk_session_eval(other, second.tokens, 1, SPK_LOGITS_LAST, expected, &err), err);
            CHECK(memcmp(got, expected, vocab * sizeof *got) == 0, "stop %u: the logits after it have the same bits", stop);
        }
    free(got);
    free(expected);
    spk_session_destroy(session);
    spk_session_destroy(other);
}

static void generate_stops_at_an_end_token(const spk_model *model) {
    spk_error err = { 0 };
    spk_session *session = generate_session(model, GENERATE_CONTEXT);
    generate_trace all = generate_until(0);
    spk_sampler sampler = spk_sampler_start(&GENERATE_OPTIONS[1]);
    CHECK_OK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &sampler, 20, &all, &err), err);
    generate_trace trace = { .stop_token = all.tokens[12] };
    uint32_t expected = 1;
    while (all.tokens[expected - 1] != trace.stop_token) expected++;
    sampler = spk_sampler_start(&GENERATE_OPTIONS[1]);
    spk_session_reset(session);
    CHECK_OK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &sampler, 20, &trace, &err), err);
    CHECK(trace.count == expected, "%u tokens to an end token that is token %u", trace.count, expected);
    CHECK(spk_session_position(session) == GENERATE_INPUT_COUNT + expected - 1, "position %u", spk_session_position(session));
    spk_session_destroy(session);
}

static void generate_ends_with_the_context(const spk_model *model) {
    spk_error err = { 0 };
    enum { ROOM = GENERATE_INPUT_COUNT + 6 };       /* the last of seven tokens needs no place */
    spk_session *session = generate_session(model, ROOM);
    for (int o = 0; o < GENERATE_OPTIONS_COUNT; o++) {
        spk_sampler sampler = spk_sampler_start(&GENERATE_OPTIONS[o]), by_hand = sampler;
        generate_trace trace = generate_until(0), expected = trace;
        spk_session_reset(session);
        generate_by_hand(model, session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &by_hand, 7, &expected);
        spk_session_reset(session);
        CHECK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &sampler, 60, &trace, &err) == SPK_E_LIMIT, "the context ends");
        CHECK(strstr(err.text, "the context of 11 tokens is full: 11 used, 1 more asked") != NULL, "%s", err.text);
        generate_check_same(&trace, &expected, "to the context's end");
        CHECK(spk_session_position(session) == ROOM, "position %u", spk_session_position(session));
        CHECK(generate_run(session, GENERATE_INPUT, 1, &sampler, 1, &trace, &err) == SPK_E_LIMIT, "no room for input");
        CHECK(trace.count == 7, "nothing was chosen");
        spk_session_reset(session);
        trace = generate_until(7);
        CHECK_OK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &sampler, 60, &trace, &err), err);
        spk_session_reset(session);
        trace = generate_until(0);
        CHECK_OK(generate_run(session, GENERATE_INPUT, GENERATE_INPUT_COUNT, &sampler, 7, &trace, &err), err);
        CHECK(trace.count == 7, "%u tokens", trace.count);
    }
    spk_session_destroy(session);
}

static void generate_checks_its_input(const spk_model *model) {
    spk_error err = { 0 };
    uint32_t vocab = spk_model_vocab_size(model);
    spk_session *session = generate_session(model, 8);
    generate_trace trace = generate_until(0);
    CHECK(generate_run(session, NULL, 0, NULL, 4, &trace, &err) == SPK_E_USAGE, "no input");
    CHECK(generate_run(session, &vocab, 1, NULL, 4, &trace, &err) == SPK_E_USAGE, "an id beyond the vocabulary");
    CHECK(spk_session_position(session) == 0 && trace.count == 0, "nothing was done");
    CHECK_OK(generate_run(session, GENERATE_INPUT, 3, NULL, 0, &trace, &err), err);
    CHECK(spk_session_position(session) == 3 && trace.count == 0, "a limit of 0 evaluates the input");
    CHECK_OK(generate_run(session, GENERATE_INPUT, 2, NULL, 1, &trace, &err), err);
    CHECK(spk_session_position(session) == 5 && trace.count == 1, "a limit of 1 evaluates no token of its own");
    spk_session_destroy(session);
}

static void generate_check_model(const spk_model *model) {
    generate_equals_the_loop(model);
    generate_goes_on_after_a_stop(model);
    generate_stops_at_an_end_token(model);
    generate_ends_with_the_context(model);
    generate_checks_its_input(model);
}

#endif
