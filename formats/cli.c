/* formats/cli.c - see cli.h. */
#include "formats/cli.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "formats/plain.h"
#include "formats/units.h"
#include "formats/utf8.h"

int spk_cli_fail(const char *tool, const spk_error *err) {
    fprintf(stderr, "%s: %s\n", tool, err->text);
    return err->status == SPK_E_USAGE ? SPK_EXIT_USAGE : SPK_EXIT_FAILED;
}

void spk_cli_note(const char *tool, const char *what, const char *why) {
    if (why != NULL) fprintf(stderr, "%s: %s: %s\n", tool, what, spk_plain(why).text);
}

int spk_cli_usage(const char *tool, const char *format, ...) {
    char message[SPK_PLAIN_SIZE];
    va_list args;
    va_start(args, format);
    (void)vsnprintf(message, sizeof message, format, args);
    va_end(args);
    fprintf(stderr, "%s: %s; see %s --help\n", tool, spk_plain(message).text, tool);
    return SPK_EXIT_USAGE;
}

/* Empty if no long option has this value. */
static const char *long_name(const struct option *longs, int value) {
    while (longs->name != NULL && longs->val != value) longs++;
    return longs->name != NULL ? longs->name : "";
}

int spk_cli_option(int argc, char **argv, const char *shorts, const struct option *longs, spk_error *err) {
    opterr = 0;
    int option = getopt_long(argc, argv, shorts, longs, NULL);
    if (option != '?' && option != ':') return option;
    const char *name = optopt != 0 ? long_name(longs, optopt) : "";
    if (optopt == 0) {
        const char *word = argv[optind - 1];
        size_t size_bytes = strcspn(word + 2, "="), match_count = 0;
        for (const struct option *o = longs; o->name != NULL; o++)
            match_count += strncmp(o->name, word + 2, size_bytes) == 0;
        (void)spk_fail(err, SPK_E_USAGE, "%s option '%s'", match_count > 1 ? "ambiguous" : "unknown", word);
    } else if (option == '?' && *name == '\0') {
        (void)spk_fail(err, SPK_E_USAGE, "unknown option '-%c'", optopt);
    } else {
        const char *what = option == ':' ? "needs a value" : "takes no value";
        if (*name != '\0') (void)spk_fail(err, SPK_E_USAGE, "--%s %s", name, what);
        else (void)spk_fail(err, SPK_E_USAGE, "-%c %s", optopt, what);
    }
    return '?';
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
    static const char decimal[] = "+-.0123456789eE";     /* strtod takes more: blanks, hexadecimal, names */
    char *end = NULL;
    double value = strtod(text, &end);
    /* Too large becomes infinite; too small becomes the nearest number there is, which is meant. */
    if (end == text || *end != '\0' || text[strspn(text, decimal)] != '\0' || !isfinite(value) || value < low ||
        value > high)
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

const char *spk_cli_bytes_text(uint64_t bytes, char out[24]) { return spk_bytes_text(bytes, out); }

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
    fprintf(stderr, "\r\033[K%s %3.0f %%  %s of %s, %s/s, %.0f s left", spk_plain(p->what).text,
            total_bytes ? 100.0 * (double)done_bytes / (double)total_bytes : 100.0,
            spk_cli_bytes_text(done_bytes, done_text), spk_cli_bytes_text(total_bytes, total_text),
            spk_cli_bytes_text((uint64_t)rate, rate_text), left);
}

void spk_cli_progress_end(spk_cli_progress *progress) {
    if (progress->last_s > 0) fprintf(stderr, "\r\033[K");
    progress->start_s = progress->last_s = 0;
}

static const char *guarded_tool;
static void (*guard_clean_up)(void);

static void input_was_cut(int signal_number) {
    static const char text[] = ": an input file was cut short, or could not be read, while it was in use (bus error)\n";
    (void)signal_number;
    if (guard_clean_up != NULL) guard_clean_up();
    ssize_t said = write(STDERR_FILENO, guarded_tool, strlen(guarded_tool));
    if (said >= 0) said = write(STDERR_FILENO, text, sizeof text - 1);
    _exit(SPK_EXIT_FAILED);
}

static void hold_standard_streams(void) {
    int fd;
    while ((fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0 && fd <= STDERR_FILENO) {}
    if (fd > STDERR_FILENO) (void)close(fd);
}

void spk_cli_guard_inputs(const char *tool, void (*clean_up)(void)) {
    hold_standard_streams();
    guarded_tool = tool;
    guard_clean_up = clean_up;
    (void)signal(SIGBUS, input_was_cut);
}

int spk_cli_finish(const char *tool, int exit_status) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return exit_status;
    if (exit_status == SPK_EXIT_DONE) fprintf(stderr, "%s: writing the output: %s\n", tool, strerror(errno));
    return SPK_EXIT_FAILED;
}

cJSON *spk_cli_json_string(const char *text) {
    size_t size_bytes = strlen(text), written = 0;
    char *valid = malloc(3 * size_bytes + 1);
    if (valid == NULL) return NULL;
    for (size_t at = 0, count; at < size_bytes; at += count) {
        size_t wanted;
        uint32_t code;
        count = spk_utf8_decode((const unsigned char *)text + at, size_bytes - at, &wanted, &code);
        bool is_whole = count == wanted;
        memcpy(valid + written, is_whole ? text + at : SPK_UTF8_REPLACEMENT, is_whole ? count : 3);
        written += is_whole ? count : 3;
    }
    valid[written] = '\0';
    cJSON *item = cJSON_CreateString(valid);
    free(valid);
    return item;
}
