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
