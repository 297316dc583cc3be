/* requant/feedback.h - quantizing a matrix for what it does to its outputs, not for the weights themselves.
 *
 * With E = decoded - weights, [rows][cols], the plain quantizer makes sum E^2 small.  Here it is
 *
 *     sum over tokens of w (E x)' G (E x)  =  trace(G E M E'),   M = sum of w x x'  [cols][cols],  G [rows][rows]
 *
 * where the inputs x and their weights w come from calibration (requant/calibration.h) and G says how much the outputs'
 * errors matter together; without G each row stands alone.  Errors of inputs that go together may cancel: a code that was
 * rounded up is made good by one that is rounded down.
 *
 * Pure functions of their arguments, without threads; the same bytes on every CPU.
 */
#ifndef SPK_FEEDBACK_H
#define SPK_FEEDBACK_H

#include "requant/quant.h"

typedef struct {
    spk_quant_job job;             /* Q4_K or Q5_K; the fit that is begun with */
    const float  *moment;          /* M [cols][cols], symmetric, its diagonal above 0; borrowed */
    const float  *metric;          /* G [rows][rows], symmetric, its diagonal above 0; or NULL */
} spk_feedback_job;

/* True for the types that spk_quantize_feedback makes. */
bool spk_feedback_can_make(uint32_t type);

/* As spk_quantize, which makes the blocks that this begins with; then codes, scales and factors are changed one by one as
 * long as the error above falls, so it is never larger than of those blocks.  SPK_E_MEMORY, and errors of spk_quantize. */
SPK_MUST_CHECK spk_status spk_quantize_feedback(const spk_feedback_job *job, spk_error *err);

#endif
