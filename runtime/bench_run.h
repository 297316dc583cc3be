/* runtime/bench_run.h - one session under a benchmark: timed prefill and decode over a fixed sequence of tokens.
 *
 * Prints nothing.  Private to runtime/.
 */
#ifndef SPK_BENCH_RUN_H
#define SPK_BENCH_RUN_H

#include "runtime/runtime.h"

typedef struct {
    const spk_model *model;              /* borrowed, as tokens are */
    const uint32_t  *tokens;             /* at least as many as the session's context */
    spk_session     *session;
    float           *logits;             /* [vocab], of the last token that was timed */
} spk_bench_run;

/* run is zero before.  After a failure, too, spk_bench_end frees what there is. */
SPK_MUST_CHECK spk_status spk_bench_start(const spk_model *model, const uint32_t *tokens, const spk_session_options *options,
                                          spk_bench_run *run, spk_error *err);
void spk_bench_end(spk_bench_run *run);

bool spk_bench_is_on_gpu(const spk_model *model);

/* Tokens a second of the first `count` tokens, evaluated together from an empty state. */
SPK_MUST_CHECK spk_status spk_bench_prefill(spk_bench_run *run, uint32_t count, double *out, spk_error *err);
/* To a context: from where the session stands, or from an empty state if that is past it. */
SPK_MUST_CHECK spk_status spk_bench_go_to(spk_bench_run *run, uint32_t context, spk_error *err);
/* Tokens a second of the next `count` tokens, one at a time; there is no way back, so what follows starts after them.
 * A GPU walks them by itself: only the last one's logits are copied to the host, on a CPU every one's are made. */
SPK_MUST_CHECK spk_status spk_bench_decode(spk_bench_run *run, uint32_t count, double *out, spk_error *err);

double spk_bench_now_s(void);            /* monotonic clock */

#endif
