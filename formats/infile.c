/* formats/infile.c - see infile.h. */
#include "formats/infile.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *kind_of(mode_t mode) {
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a pipe";
    return S_ISSOCK(mode) ? "a socket" : "a device";
}

spk_status spk_infile_open(const char *path, const char *expected, int *fd, uint64_t *size_bytes, spk_error *err) {
    struct stat info;
    int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (opened < 0) return spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
    spk_status status = SPK_OK;
    if (fstat(opened, &info) != 0)
        status = spk_fail(err, SPK_E_IO, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(info.st_mode))
        status = spk_fail(err, SPK_E_IO, "%s: is %s, expected %s", path, kind_of(info.st_mode), expected);
    if (status != SPK_OK) {
        (void)close(opened);
        return status;
    }
    *fd = opened;
    *size_bytes = (uint64_t)info.st_size;
    return SPK_OK;
}

const char *spk_infile_kind(const uint8_t *bytes, uint64_t size_bytes) {
    static const struct { const char *start, *kind; } known[] = {
        { "FUGG", "GGUF with its magic in reverse byte order (big-endian)" },
        { "tjgg", "GGML (ggjt), older than GGUF" },
        { "fmgg", "GGML (ggmf), older than GGUF" },
        { "lmgg", "GGML, older than GGUF" },
        { "PK\x03\x04", "a zip archive (such as a PyTorch checkpoint)" },
        { "\x1f\x8b", "gzip data" },
        { "\x28\xb5\x2f\xfd", "zstd data" },
        { "version https://git-lfs", "a Git LFS pointer: the model itself was not downloaded" },
        { "<", "HTML or XML text: probably an error page, not the model" },
        { "{", "JSON text" },
    };
    if (size_bytes > 10 && bytes[8] == '{' && bytes[9] == '"') return "safetensors";      /* behind a length, which may look like text */
    uint64_t skip = size_bytes >= 3 && memcmp(bytes, "\xef\xbb\xbf", 3) == 0 ? 3 : 0;
    while (skip < size_bytes && strchr(" \t\r\n", bytes[skip]) != NULL && bytes[skip] != '\0') skip++;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        size_t length = strlen(known[i].start);
        if (size_bytes - skip >= length && memcmp(bytes + skip, known[i].start, length) == 0) return known[i].kind;
    }
    return NULL;
}
