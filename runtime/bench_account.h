/* runtime/bench_account.h - an account of a step's time, printed and as JSON.  Private to runtime/. */
#ifndef SPK_BENCH_ACCOUNT_H
#define SPK_BENCH_ACCOUNT_H

#include <cjson/cJSON.h>
#include "runtime/runtime.h"

/* A table, line by line: headings, the phases that there are, and their sum beside what a whole step takes.  floor is what bytes would
 * need at the bandwidth, and kernels if they did nothing.  JSON says the same. */
enum { SPK_BENCH_ACCOUNT_LINE = 200 };
uint32_t spk_bench_account_line_count(const spk_account *account);
void     spk_bench_account_line(const spk_account *account, uint32_t index, double step_s, double bytes_per_s,
                                char line[SPK_BENCH_ACCOUNT_LINE]);
cJSON *spk_bench_account_json(const spk_account *account, double step_s, double bytes_per_s);

#endif
