/* Decoding one plain or Blosc chunk; used by frames.c and gather.c. */
#ifndef RAGGEDATLAS_FRAMES_H
#define RAGGEDATLAS_FRAMES_H

#include "raggedatlas.h"

/* Check and decode one stored chunk of `size` bytes to `out`, (n_bytes,); `work` has room for n_bytes. */
int32_t ra_decode_frame(const uint8_t *data, int64_t size, int32_t kind, int32_t checksum, uint8_t *out,
                        int64_t n_bytes, uint8_t *work);

/* Tell whether a piece lies inside its chunk and the output. */
static inline int ra_piece_fits(const struct ra_pieces *pieces, int64_t i, int64_t rows, int64_t out_rows)
{
    int64_t source = pieces->sources[i], n = pieces->lengths[i], target = pieces->targets[i];
    return n >= 0 && n <= rows && source >= 0 && source <= rows - n && target >= 0 && target <= out_rows - n;
}

#endif
