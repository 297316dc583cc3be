/* formats/cli.c - see cli.h. */
#include "formats/cli.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int spk_cli_fail(const char *tool, const spk_error *err) {
    fprintf(stderr, "%s: %s\n", tool, err->text);
    return err->status == SPK_E_USAGE ? SPK_EXIT_USAGE : SPK_EXIT_FAILED;
}

int spk_cli_usage(const char *tool, const char *format, ...) {
    fprintf(stderr, "%s: ", tool);
    va_list args;
    va_start(args, format);
    (void)vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, "\nTry '%s --help'.\n", tool);
    return SPK_EXIT_USAGE;
}

spk_status spk_cli_u64(const char *option, const char *text, uint64_t low, uint64_t high, uint64_t *out,
                       spk_error *err) {
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (!isdigit((unsigned char)text[0]) || *end != '\0' || errno != 0 || value < low || value > high)
        return spk_fail(err, SPK_E_USAGE, "%s '%s': expected a whole number from %" PRIu64 " to %" PRIu64, option,
                        text, low, high);
    *out = value;
    return SPK_OK;
}

spk_status spk_cli_double(const char *option, const char *text, double low, double high, double *out,
                          spk_error *err) {
    char *end = NULL;
    errno = 0;
    double value = strtod(text, &end);
    if (end == text || *end != '\0' || errno != 0 || !isfinite(value) || value < low || value > high)
        return spk_fail(err, SPK_E_USAGE, "%s '%s': expected a number from %g to %g", option, text, low, high);
    *out = value;
    return SPK_OK;
}

spk_status spk_cli_read_file(const char *path, uint64_t max_bytes, char **out, size_t *out_size, spk_error *err) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) return spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
    size_t size = 0, room = 1 << 16;
    char *text = malloc(room + 1);
    spk_status status = SPK_OK;
    while (text != NULL) {
        size += fread(text + size, 1, room - size, file);
        if (size < room) break;
        if (size > max_bytes) break;
        char *larger = realloc(text, (room *= 2) + 1);
        if (larger == NULL) { free(text); text = NULL; break; }
        text = larger;
    }
    if (text == NULL)
        status = spk_fail(err, SPK_E_MEMORY, "%s: out of memory", path);
    else if (ferror(file))
        status = spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
    else if (size > max_bytes)
        status = spk_fail(err, SPK_E_LIMIT, "%s: larger than %" PRIu64 " bytes", path, max_bytes);
    (void)fclose(file);
    if (status != SPK_OK) {
        free(text);
        return status;
    }
    text[size] = '\0';
    *out = text;
    *out_size = size;
    return SPK_OK;
}

const char *spk_cli_bytes_text(uint64_t bytes, char out[24]) {
    static const char *const units[] = { "B", "kB", "MB", "GB", "TB", "PB" };
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 999.95 && unit + 1 < sizeof units / sizeof *units) value /= 1000, unit++;
    (void)snprintf(out, 24, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return out;
}

double spk_cli_now_s(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

void spk_cli_progress_show(void *context, uint64_t done_bytes, uint64_t total_bytes) {
    spk_cli_progress *p = context;
    if (!isatty(STDERR_FILENO)) return;
    double now = spk_cli_now_s();
    if (p->start_s <= 0) p->start_s = now;
    if (now - p->last_s < 0.1 && done_bytes < total_bytes) return;
    p->last_s = now;
    double elapsed = now - p->start_s, rate = elapsed > 0 ? (double)done_bytes / elapsed : 0;
    double left = rate > 0 ? (double)(total_bytes - done_bytes) / rate : 0;
    char done_text[24], total_text[24], rate_text[24];
    fprintf(stderr, "\r\033[K%s %3.0f %%  %s of %s, %s/s, %.0f s left", p->what,
            total_bytes ? 100.0 * (double)done_bytes / (double)total_bytes : 100.0,
            spk_cli_bytes_text(done_bytes, done_text), spk_cli_bytes_text(total_bytes, total_text),
            spk_cli_bytes_text((uint64_t)rate, rate_text), left);
}

void spk_cli_progress_end(spk_cli_progress *progress) {
    if (progress->last_s > 0) fprintf(stderr, "\r\033[K");
    progress->start_s = progress->last_s = 0;
}

int spk_cli_finish(const char *tool, int exit_status) {
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "%s: writing the output: %s\n", tool, strerror(errno));
        return SPK_EXIT_FAILED;
    }
    return exit_status;
}
