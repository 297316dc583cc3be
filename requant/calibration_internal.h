/* requant/calibration_internal.h - what the writer and the reader of calibration files share. */
#ifndef SPK_CALIBRATION_INTERNAL_H
#define SPK_CALIBRATION_INTERNAL_H

#include <stdint.h>

#define SPK_CALIBRATION_SUM2         ".in_sum2"
#define SPK_CALIBRATION_COUNTS       ".counts"
#define SPK_CALIBRATION_SCALE        ".in_scale"
#define SPK_CALIBRATION_MOMENT       ".in_moment"
#define SPK_CALIBRATION_METRIC_BASE  "blk.%" PRIu32 ".%s_out"
#define SPK_CALIBRATION_METRIC_SCALE ".scale"
#define SPK_CALIBRATION_METRIC       ".metric"

/* Elements below the diagonal of an n x n matrix; and where row n begins in rows that lie one after another. */
static inline uint64_t spk_triangle_count(uint64_t n) { return n * (n - 1) / 2; }

#endif
