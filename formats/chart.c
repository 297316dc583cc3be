/* formats/chart.c - see chart.h.  Coordinates are those of the viewBox; a chart is 420 wide, so that its 13-unit letters are
 * still 10 pixels high on a telephone. */
#include "formats/chart.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include "formats/units.h"

enum { WIDTH = 420, HEIGHT = 250, LEFT = 58, RIGHT = 396, TOP = 14, BOTTOM = 206, DECADES_MAX = 6 };

/* ---- Frames ---- */

static void begin_svg(spk_html *page, const spk_chart_text *text, const char *class_name, int width, int height) {
    spk_html_addf(page, "<svg role=\"img\" class=\"%s\" viewBox=\"0 0 %d %d\"", class_name, width, height);
    if (*class_name == '\0') spk_html_addf(page, " width=\"%d\" height=\"%d\"", width, height);
    spk_html_addf(page, "><title>");
    spk_html_string(page, text->title);
    spk_html_addf(page, "</title><desc>");
    spk_html_string(page, text->about);
    spk_html_addf(page, "</desc>\n");
}

static void begin_figure(spk_html *page, const spk_chart_text *text) {
    spk_html_addf(page, "<figure><h3>");
    spk_html_string(page, text->title);
    spk_html_addf(page, "</h3>\n");
}

static void end_figure(spk_html *page, const spk_chart_text *text) {
    spk_html_addf(page, "<figcaption>");
    spk_html_string(page, text->about);
    spk_html_addf(page, "</figcaption></figure>\n");
}

/* ---- Axes ---- */

typedef struct { double low, high, from, to; bool is_log; } axis;

static double place(const axis *a, double value) {
    double share = a->is_log ? log10(value / a->low) / log10(a->high / a->low)      /* of 0: -inf */
                             : (value - a->low) / (a->high - a->low);
    return a->from + (share < 0 ? 0 : share > 1 ? 1 : share) * (a->to - a->from);
}

/* 1, 2 or 5 times a power of ten, so that about five steps make the span. */
static double nice_step(double span) {
    double power = pow(10, floor(log10(span / 5))), rest = span / 5 / power;
    return power * (rest > 5 ? 10 : rest > 2 ? 5 : rest > 1 ? 2 : 1);
}

static const char *number_text(double value, char out[32]) {
    if (fabs(value) >= 1e6) (void)snprintf(out, 32, "%gM", value / 1e6);
    else if (fabs(value) >= 1e4) (void)snprintf(out, 32, "%gk", value / 1e3);
    else (void)snprintf(out, 32, "%.4g", value);
    return out;
}

static void x_tick(spk_html *page, double x, const char *label) {
    spk_html_addf(page, "<path class=\"g\" d=\"M%.1f %dv5\"/><text class=\"s m\" x=\"%.1f\" y=\"%d\">%s</text>\n", x, BOTTOM,
                  x, BOTTOM + 18, label);
}

static void y_tick(spk_html *page, double y, const char *label) {
    spk_html_addf(page, "<path class=\"g\" d=\"M%d %.1fH%d\"/><text class=\"s e\" x=\"%d\" y=\"%.1f\">%s</text>\n", LEFT, y,
                  RIGHT, LEFT - 6, y + 4, label);
}

static void linear_ticks(spk_html *page, const axis *a, bool is_x, const char *unit) {
    double step = nice_step(a->high - a->low);
    for (double value = ceil(a->low / step) * step; value <= a->high + step * 1e-6; value += step) {
        char number[32], label[48];
        (void)snprintf(label, sizeof label, "%s%s", number_text(value, number), unit);
        if (is_x) x_tick(page, place(a, value), label);
        else y_tick(page, place(a, value), label);
    }
}

static void log_ticks(spk_html *page, const axis *a, bool is_x) {
    int low = (int)lrint(log10(a->low)), high = (int)lrint(log10(a->high));
    for (int decade = low; decade <= high; decade++) {
        double value = pow(10, decade);
        char label[32];
        (void)snprintf(label, sizeof label, decade < -4 || decade > 4 ? "%.0e" : "%g", value);
        if (is_x) x_tick(page, place(a, value), label);
        else y_tick(page, place(a, value), label);
    }
}

static void axis_names(spk_html *page, const spk_chart_text *text) {
    spk_html_addf(page, "<text class=\"s m\" x=\"%d\" y=\"%d\">", (LEFT + RIGHT) / 2, HEIGHT - 6);
    spk_html_string(page, text->x_name);
    spk_html_addf(page, "</text><text class=\"s m\" transform=\"translate(11 %d) rotate(-90)\">", (TOP + BOTTOM) / 2);
    spk_html_string(page, text->y_name);
    spk_html_addf(page, "</text>\n");
}

/* ---- Bars ---- */

void spk_chart_bars(spk_html *page, const spk_chart_text *text, const spk_chart_bar *bars, uint32_t bar_count,
                    const char *const *series_names, uint32_t series_count) {
    static const char *const fills[] = { "fa2", "fa" };
    enum { BAR = 16, ROOM = 76 };                        /* ROOM: for the value behind the longest bar */
    const int row = 24 + BAR * (int)series_count, legend = series_count > 1 ? 24 : 0;
    uint64_t most = 1;
    for (uint32_t b = 0; b < bar_count; b++)
        for (uint32_t s = 0; s < series_count; s++) most = bars[b].values[s] > most ? bars[b].values[s] : most;
    begin_figure(page, text);
    begin_svg(page, text, "fit", WIDTH, legend + row * (int)bar_count);
    for (uint32_t s = 0; s < series_count && legend > 0; s++) {
        spk_html_addf(page, "<rect class=\"%s\" x=\"%u\" y=\"3\" width=\"11\" height=\"11\"/><text class=\"s\" x=\"%u\" "
                      "y=\"13\">", fills[s], 140 * s, 140 * s + 17);
        spk_html_string(page, series_names[s]);
        spk_html_addf(page, "</text>\n");
    }
    for (uint32_t b = 0; b < bar_count; b++) {
        int top = legend + row * (int)b;
        spk_html_addf(page, "<text x=\"0\" y=\"%d\">", top + 14);
        spk_html_tail(page, bars[b].name, strlen(bars[b].name), 50);
        spk_html_addf(page, "</text>\n");
        for (uint32_t s = 0; s < series_count; s++) {
            char size[SPK_BYTES_TEXT_SIZE];
            double width = (WIDTH - ROOM) * (double)bars[b].values[s] / (double)most;
            int y = top + 20 + BAR * (int)s;
            spk_html_addf(page, "<rect class=\"%s\" x=\"0\" y=\"%d\" width=\"%.1f\" height=\"%d\"/><text x=\"%.1f\" y=\"%d\">%s"
                          "</text>\n", fills[series_count > 1 ? s : 1], y, width, BAR - 3, width + 6, y + 11,
                          spk_bytes_text(bars[b].values[s], size));
        }
    }
    spk_html_addf(page, "</svg>\n");
    end_figure(page, text);
}

/* ---- Line ---- */

static void add_steps(spk_html *page, const char *class_name, const double *values, uint32_t bin_count, const axis *x,
                      const axis *y, double x_bin_width) {
    spk_html_addf(page, "<path class=\"%s\" d=\"M", class_name);
    for (uint32_t i = 0; i < bin_count; i++)
        spk_html_addf(page, "%.1f %.1fH%.1f%s", place(x, x->low + i * x_bin_width), place(y, values[i]),
                      place(x, x->low + (i + 1) * x_bin_width), i + 1 < bin_count ? "L" : "");
    spk_html_addf(page, "\"/>\n");
}

void spk_chart_line(spk_html *page, const spk_chart_text *text, const double *means, const double *maxima,
                    uint32_t bin_count, double x_begin, double x_bin_width) {
    double least = INFINITY, most = 0;
    for (uint32_t i = 0; i < bin_count; i++) {
        if (means[i] > 0 && means[i] < least) least = means[i];
        if (maxima[i] > most) most = maxima[i];
    }
    double high = ceil(log10(most) - 1e-9), low = fmin(floor(log10(least)), high - 1);
    axis x = { x_begin, x_begin + bin_count * x_bin_width, LEFT, RIGHT, false };
    axis y = { pow(10, fmax(low, high - DECADES_MAX)), pow(10, high), BOTTOM, TOP, true };
    begin_figure(page, text);
    begin_svg(page, text, "fit", WIDTH, HEIGHT);
    log_ticks(page, &y, false);
    linear_ticks(page, &x, true, "");
    for (uint32_t i = 0; i < bin_count; i++) {
        double left = place(&x, x_begin + i * x_bin_width), top = place(&y, maxima[i]);
        double width = place(&x, x_begin + (i + 1) * x_bin_width) - left;
        spk_html_addf(page, "<path class=\"fa2\" d=\"M%.1f %dV%.1fh%.2fV%dz\"/>", left, BOTTOM, top, width, BOTTOM);
    }
    spk_html_addf(page, "\n");
    add_steps(page, "la", means, bin_count, &x, &y, x_bin_width);
    axis_names(page, text);
    spk_html_addf(page, "</svg>\n");
    end_figure(page, text);
}

/* ---- Histogram ---- */

void spk_chart_histogram(spk_html *page, const spk_chart_text *text, const uint64_t *counts, uint32_t bin_count,
                         int decade_low, const spk_chart_mark *marks, uint32_t mark_count) {
    uint64_t sum = 0, most = 1;
    for (uint32_t i = 0; i < bin_count; i++) {
        sum += counts[i];
        if (counts[i] > most) most = counts[i];
    }
    double decades = ceil((double)bin_count / SPK_CHART_BINS_PER_DECADE), percent = sum > 0 ? 100.0 / (double)sum : 0;
    axis x = { pow(10, decade_low), pow(10, decade_low + decades), LEFT, RIGHT, true };
    axis y = { 0, 1.3 * (double)most * percent, BOTTOM, TOP, false };       /* the marks' names are above the bars */
    double width = (RIGHT - LEFT) / decades / SPK_CHART_BINS_PER_DECADE;
    begin_figure(page, text);
    begin_svg(page, text, "fit", WIDTH, HEIGHT);
    linear_ticks(page, &y, false, " %");
    log_ticks(page, &x, true);
    for (uint32_t i = 0; i < bin_count; i++) {
        double share = (double)counts[i] * percent, top = place(&y, share), begin = log10(x.low) + i / 4.0;
        spk_html_addf(page, "<rect class=\"fa\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"><title>"
                      "%s%.2g to %.2g: %.3g %% (%" PRIu64 ")</title></rect>\n", LEFT + i * width + 0.5, top, width - 1,
                      BOTTOM - top,
                      i == 0 ? "below, and " : "", pow(10, begin), pow(10, begin + 0.25), share, counts[i]);
    }
    for (uint32_t m = 0; m < mark_count; m++)            /* lines first: names go over them */
        spk_html_addf(page, "<path class=\"lb\" d=\"M%.1f %dV%d\"/>\n", place(&x, marks[m].value), TOP + 13 * (int)m, BOTTOM);
    for (uint32_t m = 0; m < mark_count; m++) {
        double at = place(&x, marks[m].value);
        bool is_left = m == 0 ? at > LEFT + 110 : at > RIGHT - 90;    /* of its line: marks come in rising order */
        spk_html_addf(page, "<text class=\"b%s\" x=\"%.1f\" y=\"%d\">", is_left ? " e" : "", at + (is_left ? -4 : 4),
                      TOP + 13 * (int)m + 9);
        spk_html_string(page, marks[m].name);
        spk_html_addf(page, " %.3g</text>\n", marks[m].value);
    }
    axis_names(page, text);
    spk_html_addf(page, "</svg>\n");
    end_figure(page, text);
}

/* ---- Heat map ---- */

enum { SHADES = 9, CELL_HEIGHT = 24, HEAD = 22, NAME_WIDTH = 112, DARK_FROM = 5 };

typedef struct { double low, high; } shade_scale;

static shade_scale scale_of(const spk_chart_heat_map *map) {
    shade_scale scale = { INFINITY, 0 };
    for (uint32_t i = 0; i < map->row_count * map->column_count; i++) {
        if (!(map->values[i] > 0)) continue;
        scale.low = fmin(scale.low, map->values[i]);
        scale.high = fmax(scale.high, map->values[i]);
    }
    if (scale.high < 1.2 * scale.low) {                  /* nearly equal values must not look far apart */
        double middle = sqrt(scale.low * scale.high);
        scale = (shade_scale){ middle / 1.1, middle * 1.1 };
    }
    return scale;
}

static int shade_of(const shade_scale *scale, double value) {
    int shade = (int)(SHADES * log(value / scale->low) / log(scale->high / scale->low));
    return shade < 0 ? 0 : shade >= SHADES ? SHADES - 1 : shade;
}

/* Percent, in two digits: a cell has room for three characters, as in ".34", "6.9" and "12"; its title has more. */
static void add_percent(spk_html *page, double value) {
    double percent = 100 * value;
    if (percent < 0.005) spk_html_addf(page, "~0");
    else if (percent < 0.995) spk_html_addf(page, ".%02.0f", 100 * percent);
    else spk_html_addf(page, percent < 9.95 ? "%.1f" : "%.0f", percent);
}

static void add_cell(spk_html *page, const spk_chart_heat_map *map, const shade_scale *scale, uint32_t r, uint32_t c,
                     int cell_width) {
    double value = map->values[(uint64_t)r * map->column_count + c];
    if (value < 0) return;
    int x = cell_width * (int)c, y = HEAD + CELL_HEIGHT * (int)r, shade = value > 0 ? shade_of(scale, value) : 0;
    spk_html_addf(page, "<g><title>%s, ", map->column_names[c]);
    spk_html_string(page, map->row_names[r]);
    if (value > 0) spk_html_addf(page, ": %.3g %%</title>", 100 * value);
    else spk_html_addf(page, ": %s</title>", map->hollow_name);
    if (value > 0) {
        spk_html_addf(page, "<rect class=\"h%d\" x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/>"
                      "<text class=\"%c\" x=\"%.1f\" y=\"%d\">", shade, x, y, cell_width - 1,
                      CELL_HEIGHT - 1, shade < DARK_FROM ? 'k' : 'K', x + cell_width / 2.0,
                      y + 16);
        add_percent(page, value);
        spk_html_addf(page, "</text>");
    } else {
        spk_html_addf(page, "<rect class=\"hc\" x=\"%d.5\" y=\"%d.5\" width=\"%d\" height=\"%d\"/>", x, y, cell_width - 2,
                      CELL_HEIGHT - 2);
    }
    spk_html_addf(page, "</g>\n");
}

static void add_legend(spk_html *page, const spk_chart_heat_map *map, const shade_scale *scale) {
    enum { BOX = 28, HOLLOW = SHADES * BOX + 20 };
    spk_html_addf(page, "<svg class=\"fit\" viewBox=\"0 -6 420 44\" role=\"img\">"
                  "<title>Colour scale: %.3g %% to %.3g %%</title>\n", 100 * scale->low, 100 * scale->high);
    for (int shade = 0; shade < SHADES; shade++)
        spk_html_addf(page, "<rect class=\"h%d\" x=\"%d\" y=\"2\" width=\"%d\" height=\"14\"/>", shade, BOX * shade, BOX);
    for (int edge = 0; edge <= SHADES; edge += 3) {
        spk_html_addf(page, "<text class=\"s%s\" x=\"%d\" y=\"32\">", edge == 0 ? "" : edge == SHADES ? " e" : " m", BOX * edge);
        spk_html_addf(page, "%.3g %%</text>", 100 * scale->low * pow(scale->high / scale->low, edge / (double)SHADES));
    }
    spk_html_addf(page, "<rect class=\"hc\" x=\"%d.5\" y=\"2.5\" width=\"%d\" height=\"13\"/><text class=\"s\" x=\"%d\" "
                  "y=\"13\">%s</text></svg>\n", HOLLOW, BOX, HOLLOW + BOX + 8, map->hollow_name);
}

void spk_chart_heat(spk_html *page, const spk_chart_text *text, const spk_chart_heat_map *map) {
    const int columns = (int)map->column_count, height = HEAD + CELL_HEIGHT * (int)map->row_count;
    const int cell_width = columns > 40 ? 26 : 1040 / columns < 34 ? 1040 / columns : 34;
    shade_scale scale = scale_of(map);
    begin_figure(page, text);
    spk_html_addf(page, "<div class=\"heat\"><svg aria-hidden=\"true\" width=\"%d\" height=\"%d\">", NAME_WIDTH, height);
    for (uint32_t r = 0; r < map->row_count; r++) {      /* beside what scrolls, so that they stay in sight */
        spk_html_addf(page, "<text class=\"e\" x=\"%d\" y=\"%d\">", NAME_WIDTH - 8, HEAD + CELL_HEIGHT * (int)r + 16);
        spk_html_string(page, map->row_names[r]);
        spk_html_addf(page, "</text>");
    }
    spk_html_addf(page, "</svg><div class=\"scroll\" tabindex=\"0\">");
    begin_svg(page, text, "", cell_width * columns, height);
    for (uint32_t c = 0; c < map->column_count; c++) {
        const char *name = strrchr(map->column_names[c], ' ');
        spk_html_addf(page, "<text class=\"s m\" x=\"%.1f\" y=\"15\">%s</text>", cell_width * (c + 0.5),
                      name == NULL ? map->column_names[c] : name + 1);
    }
    for (uint32_t r = 0; r < map->row_count; r++)
        for (uint32_t c = 0; c < map->column_count; c++) add_cell(page, map, &scale, r, c, cell_width);
    spk_html_addf(page, "</svg></div></div>\n");
    add_legend(page, map, &scale);
    end_figure(page, text);
}
