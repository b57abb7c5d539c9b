/* Chunks that are plain or Blosc: cut ranges at their borders, decode them, copy pieces. */
#include "frames.h"
#include "bits.h"

#define BLOSC_HEAD 16
#define SHUFFLED 1
#define COPIED 2
#define BIT_SHUFFLED 4
#define RESERVED 8
#define NOT_SPLIT 16
#define LZ4_FORMAT 1

int64_t ra_count_pieces(const int64_t *starts, const int64_t *ends, int64_t n, int64_t chunk)
{
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++)
        if (ends[i] > starts[i])
            total += (ends[i] - 1) / chunk - starts[i] / chunk + 1;
    return total;
}

void ra_split_ranges(const int64_t *starts, const int64_t *ends, int64_t n, int64_t chunk, int64_t *pieces,
                     int64_t n_pieces)
{
    int64_t *chunks = pieces, *sources = chunks + n_pieces, *lengths = sources + n_pieces, *targets = lengths + n_pieces;
    int64_t piece = 0, position = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t row = starts[i];
        while (row < ends[i] && piece < n_pieces) {
            int64_t number = row / chunk, stop = least(ends[i], (number + 1) * chunk);
            chunks[piece] = number;
            sources[piece] = row - number * chunk;
            lengths[piece] = stop - row;
            targets[piece] = position;
            position += stop - row;
            row = stop;
            piece++;
        }
    }
}

/* Add the bytes of a long length; return where they end, or NULL where they leave the input or exceed `limit`. */
RA_INLINE const uint8_t *long_length(const uint8_t *in, const uint8_t *end, int64_t limit, int64_t *length)
{
    uint8_t byte;
    do {
        if (in >= end || *length > limit)
            return NULL;
        byte = *in++;
        *length += byte;
    } while (byte == 255);
    return in;
}

/* Copy a match that may reach into itself, within the output. */
RA_INLINE void copy_match(uint8_t *out, int64_t distance, int64_t length, const uint8_t *end)
{
    const uint8_t *from = out - distance;
    if (distance >= 16 && end - out >= length + 16) {
        for (int64_t i = 0; i < length; i += 16)
            memcpy(out + i, from + i, 16);
    } else if (distance >= 8 && end - out >= length + 8) {
        for (int64_t i = 0; i < length; i += 8)
            memcpy(out + i, from + i, 8);
    } else if (distance == 1) {
        memset(out, *from, (size_t)length);
    } else {
        for (int64_t i = 0; i < length; i++)
            out[i] = from[i];
    }
}

/* Decode an LZ4 block that must fill `n_out` bytes exactly; return whether it does. */
static int decode_lz4(const uint8_t *in, int64_t n_in, uint8_t *out, int64_t n_out)
{
    const uint8_t *in_end = in + n_in;
    uint8_t *begin = out, *end = out + n_out;
    while (in < in_end) {
        int64_t token = *in++, length = token >> 4;
        if (length == 15 && !(in = long_length(in, in_end, n_out, &length)))
            return 0;
        if (length > in_end - in || length > end - out)
            return 0;
        /* Most runs are short; sixteen bytes at once cost less than to find out how many. */
        if (length <= 16 && in_end - in >= 16 && end - out >= 16)
            memcpy(out, in, 16);
        else
            memcpy(out, in, (size_t)length);
        in += length;
        out += length;
        if (in == in_end)
            return out == end;
        if (in_end - in < 2)
            return 0;
        int64_t distance = load16(in);
        in += 2;
        length = token & 15;
        if (length == 15 && !(in = long_length(in, in_end, n_out, &length)))
            return 0;
        length += 4;
        if (distance == 0 || distance > out - begin || length > end - out)
            return 0;
        copy_match(out, distance, length, end);
        out += length;
    }
    return 0;
}

int32_t ra_decode_lzf(const uint8_t *in, int64_t n_in, uint8_t *out, int64_t n_out)
{
    const uint8_t *in_end = in + n_in;
    uint8_t *begin = out, *end = out + n_out;
    while (in < in_end) {
        int64_t code = *in++, length = code >> 5;
        if (length == 0) {
            length = code + 1;
            if (length > in_end - in || length > end - out)
                return RA_BAD_FRAME;
            memcpy(out, in, (size_t)length);
            in += length;
            out += length;
            continue;
        }
        if (in_end - in < 1 + (length == 7))
            return RA_BAD_FRAME;
        if (length == 7)
            length += *in++;
        length += 2;
        int64_t distance = ((code & 31) << 8) + *in++ + 1;
        if (distance > out - begin || length > end - out)
            return RA_BAD_FRAME;
        copy_match(out, distance, length, end);
        out += length;
    }
    return out == end ? RA_GOOD : RA_BAD_FRAME;
}

/* Put bytes back into order that were sorted by their place in an element; `n` elements of `width` bytes. */
RA_INLINE void interleave(const uint8_t *in, int64_t n, int64_t width, uint8_t *out)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < width; k++)
            out[i * width + k] = in[k * n + i];
}

static void unshuffle(const uint8_t *in, int64_t n_bytes, int64_t width, uint8_t *out)
{
    int64_t n = n_bytes / width, rest = n_bytes % width;
    switch (width) {
    case 2:
        interleave(in, n, 2, out);
        break;
    case 4:
        interleave(in, n, 4, out);
        break;
    case 8:
        interleave(in, n, 8, out);
        break;
    default:
        interleave(in, n, width, out);
    }
    memcpy(out + n * width, in + n * width, (size_t)rest);
}

/* Decode one block of a frame, which is stored in `splits` parts, each with its length before it. */
static int decode_block(const uint8_t *in, const uint8_t *in_end, int64_t splits, uint8_t *out, int64_t n_out)
{
    int64_t part = n_out / splits;
    for (int64_t i = 0; i < splits; i++, out += part) {
        if (in_end - in < 4)
            return 0;
        int64_t stored = load32(in);
        in += 4;
        if (stored > in_end - in)
            return 0;
        if (stored == part)
            memcpy(out, in, (size_t)part);
        else if (!decode_lz4(in, stored, out, part))
            return 0;
        in += stored;
    }
    return 1;
}

static int32_t decode_blosc(const uint8_t *data, int64_t size, uint8_t *out, int64_t n_bytes, uint8_t *work)
{
    if (size < BLOSC_HEAD || load32(data + 4) != n_bytes || load32(data + 12) != size)
        return RA_BAD_SIZE;
    int flags = data[2];
    int64_t width = data[3], block = load32(data + 8);
    if (flags & COPIED) {
        if (size != BLOSC_HEAD + n_bytes)
            return RA_BAD_FRAME;
        memcpy(out, data + BLOSC_HEAD, (size_t)n_bytes);
        return RA_GOOD;
    }
    if (flags >> 5 != LZ4_FORMAT || flags & (BIT_SHUFFLED | RESERVED))
        return RA_OTHER_FRAME;
    if (n_bytes == 0)
        return RA_GOOD;
    if (block < 1 || block > n_bytes || width < 1)
        return RA_BAD_FRAME;
    int64_t n_blocks = (n_bytes + block - 1) / block;
    if (n_blocks > (size - BLOSC_HEAD) / 4)
        return RA_BAD_FRAME;
    int shuffled = flags & SHUFFLED && width > 1;
    for (int64_t i = 0; i < n_blocks; i++) {
        int64_t from = load32(data + BLOSC_HEAD + 4 * i), n = least(block, n_bytes - i * block);
        int64_t splits = flags & NOT_SPLIT || n < block ? 1 : width;
        if (from > size || n % splits)
            return RA_BAD_FRAME;
        uint8_t *target = shuffled ? work : out + i * block;
        if (!decode_block(data + from, data + size, splits, target, n))
            return RA_BAD_FRAME;
        if (shuffled)
            unshuffle(work, n, width, out + i * block);
    }
    return RA_GOOD;
}

int32_t ra_decode_frame(const uint8_t *data, int64_t size, int32_t kind, int32_t checksum, uint8_t *out,
                        int64_t n_bytes, uint8_t *work)
{
    if (checksum) {
        size -= 4;
        if (size < 0 || ra_crc32c(0, data, size) != load32(data + size))
            return RA_BAD_CHECKSUM;
    }
    if (kind == RA_BLOSC)
        return decode_blosc(data, size, out, n_bytes, work);
    if (size != n_bytes)
        return RA_BAD_SIZE;
    memcpy(out, data, (size_t)n_bytes);
    return RA_GOOD;
}

/* Fill a chunk with one row again and again. */
static void fill_chunk(uint8_t *out, int64_t n_bytes, const uint8_t *fill, int64_t width)
{
    for (int64_t at = 0; at < n_bytes; at += width)
        memcpy(out + at, fill, (size_t)width);
}

int32_t ra_decode_chunks(const struct ra_chunks *chunks, const struct ra_pieces *pieces, int32_t kind,
                         int32_t checksum, int64_t chunk_bytes, uint8_t *scratch, uint8_t *work, const uint8_t *fill,
                         int64_t width, uint8_t *out, int64_t out_bytes, int64_t *where)
{
    int64_t rows = chunk_bytes / width, out_rows = out_bytes / width;
    for (int64_t chunk = 0; chunk < chunks->n; chunk++) {
        int64_t first = pieces->bounds[chunk], last = pieces->bounds[chunk + 1];
        *where = chunk;
        if (first < 0 || last < first || last > pieces->n)
            return RA_BAD_SIZE;
        for (int64_t i = first; i < last; i++)
            if (!ra_piece_fits(pieces, i, rows, out_rows))
                return RA_BAD_SIZE;
        int direct = last == first + 1 && pieces->lengths[first] == rows;
        uint8_t *target = direct ? out + pieces->targets[first] * width : scratch;
        int32_t status = RA_GOOD;
        if (chunks->sizes[chunk] < 0)
            fill_chunk(target, chunk_bytes, fill, width);
        else
            status = ra_decode_frame((const uint8_t *)(uintptr_t)chunks->addresses[chunk], chunks->sizes[chunk], kind,
                                     checksum, target, chunk_bytes, work);
        if (status != RA_GOOD)
            return status;
        for (int64_t i = first; i < last && !direct; i++)
            memcpy(out + pieces->targets[i] * width, scratch + pieces->sources[i] * width,
                   (size_t)(pieces->lengths[i] * width));
    }
    return RA_GOOD;
}
