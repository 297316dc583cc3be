/* formats/chart.h - the pictures of a report: inline SVG that scales with its page, each with a title and a description.
 *
 * Knows numbers and words, not what they are about.
 */
#ifndef SPK_CHART_H
#define SPK_CHART_H

#include <stdint.h>
#include "formats/html.h"

/* title and about are shown above and below the picture, and are its text alternative; escaped, as are names. */
typedef struct { const char *title, *about, *x_name, *y_name; } spk_chart_text;

typedef struct {
    const char *name;
    uint64_t    values[2];               /* before and after, as bytes; a bar each */
} spk_chart_bar;
/* One bar a value: of bar_count names, series_count (1 or 2) values each; series_names[series_count] is the legend. */
void spk_chart_bars(spk_html *page, const spk_chart_text *text, const spk_chart_bar *bars, uint32_t bar_count,
                    const char *const *series_names, uint32_t series_count);

/* Mean and maximum (both >= 0) of bin_count >= 1 bins of equal width that begin at x_begin, over a logarithmic y axis.  Of
 * more than six decades only the upper six are drawn; what lies below is drawn on the axis.  Some maximum must be > 0. */
void spk_chart_line(spk_html *page, const spk_chart_text *text, const double *means, const double *maxima,
                    uint32_t bin_count, double x_begin, double x_bin_width);

typedef struct { const char *name; double value; } spk_chart_mark;
enum { SPK_CHART_BINS_PER_DECADE = 4 };
/* Shares of values in bins of a quarter decade, the first of which begins at 10^decade_low and also has what is smaller.
 * Marks are vertical lines with names, in rising order. */
void spk_chart_histogram(spk_html *page, const spk_chart_text *text, const uint64_t *counts, uint32_t bin_count,
                         int decade_low, const spk_chart_mark *marks, uint32_t mark_count);

enum { SPK_CHART_HEAT_NAME_SIZE = 24 };
/* Values (> 0) of row_count x column_count cells, [row][column], coloured on a logarithmic scale, with a legend: 0 is a hollow
 * cell, a negative value none. */
typedef struct {
    uint32_t           row_count, column_count;      /* both >= 1 */
    const double      *values;
    const char *const *row_names;
    char             (*column_names)[SPK_CHART_HEAT_NAME_SIZE];
    const char        *hollow_name;                  /* what a hollow cell means */
} spk_chart_heat_map;
/* Some value must be > 0. */
void spk_chart_heat(spk_html *page, const spk_chart_text *text, const spk_chart_heat_map *map);

#endif
