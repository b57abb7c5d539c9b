/* Ranges of bytes of a file, where a call of Python for each would take longer than reading it. */
#if !defined(_WIN32)
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <unistd.h>
#endif

#include "raggedatlas.h"

int32_t ra_read_file(int32_t file, const int64_t *offsets, const int64_t *sizes, const int64_t *targets, int64_t n,
                     uint8_t *out, int64_t n_out, int64_t *where)
{
#if defined(_WIN32)
    (void)file, (void)offsets, (void)sizes, (void)targets, (void)n, (void)out, (void)n_out;
    *where = 0;
    return RA_UNKNOWN_CALL;
#else
    for (int64_t i = 0; i < n; i++) {
        int64_t offset = offsets[i], left = sizes[i], target = targets[i];
        *where = i;
        if (offset < 0 || left < 0 || target < 0 || left > n_out || target > n_out - left || offset > INT64_MAX - left)
            return RA_BAD_BOUNDS;
        while (left > 0) {
            ssize_t got = pread(file, out + target, (size_t)left, (off_t)offset);
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0) {
                *where = errno;
                return RA_REFUSED;
            }
            if (got == 0)
                return RA_CUT_SHORT;
            offset += got, target += got, left -= got;
        }
    }
    return RA_GOOD;
#endif
}
