/* The packed codec: writing chunks, checking them, and unpacking them whole or in pieces. */
#include "packed.h"
#include "frames.h"
#include "levels.h"

#define SHORT 32 /* a block ends at a break only where it would not be shorter */
#define MOST_SPAN (8 * 255)
#define EXCEPTION_PENALTY 1
#define LEAST_EXCEPTION (2 + EXCEPTION_PENALTY)

struct packed_block {
    uint8_t kind, third;
    int64_t n_bytes;
};

uint64_t ra_bit_places[256];
const int64_t ra_type_bytes[6] = {1, 2, 4, 8, 4, 8};

__attribute__((constructor)) static void fill_bit_places(void)
{
    for (int byte = 0; byte < 256; byte++) {
        int n = 0;
        for (uint64_t bit = 0; bit < 8; bit++)
            if (byte >> bit & 1)
                ra_bit_places[byte] |= bit << 8 * n++;
    }
}

/* Pack values into one stream of bits, lowest first. */
static void pack_stream(const uint32_t *x, int64_t n, int width, uint8_t *out)
{
    uint64_t held = 0;
    int n_held = 0;
    for (int64_t i = 0; i < n; i++) {
        held |= (uint64_t)x[i] << n_held;
        for (n_held += width; n_held >= 8; n_held -= 8, held >>= 8)
            *out++ = (uint8_t)held;
    }
    if (n_held)
        *out = (uint8_t)held;
}

#define RA_LOOPS "packed_loops.h"
#include "each_level.h"

static int64_t most_blocks(int64_t n) { return n / 8 + n / SHORT + 2; }

int64_t ra_packed_room(int64_t n, int32_t itemsize)
{
    int64_t blocks = most_blocks(n);
    return HEAD_BYTES + TAIL_BYTES + n * itemsize + blocks * (3 + 1 + itemsize) + SKIP_BYTES + blocks;
}

int64_t ra_pack(const void *values, int64_t n, int32_t itemsize, const int64_t *breaks, int64_t n_breaks, uint8_t *out,
                int64_t out_bytes)
{
    if (n < 1 || n > UINT32_MAX || out_bytes < ra_packed_room(n, itemsize))
        return -1;
    return RA_CHOOSE(pack)(values, itemsize, n, breaks, n_breaks, out, out + out_bytes - most_blocks(n));
}

int64_t ra_pack_chunks(const void *values, int64_t n_chunks, int64_t per_chunk, int32_t itemsize, int64_t *breaks,
                       int64_t n_breaks, uint8_t *out, int64_t out_bytes, int64_t *ends)
{
    int64_t at = 0, last = 0;
    for (int64_t i = 0; i < n_chunks; i++) {
        int64_t first = last;
        for (; last < n_breaks && breaks[last] < (i + 1) * per_chunk; last++)
            breaks[last] -= i * per_chunk;
        const uint8_t *chunk = (const uint8_t *)values + i * per_chunk * itemsize;
        int64_t n = ra_pack(chunk, per_chunk, itemsize, breaks + first, last - first, out + at, out_bytes - at - 4);
        if (n < 0)
            return -1;
        store32(out + at + n, ra_crc32c(0, out + at, n));
        at += n + 4;
        ends[i] = at;
    }
    return at;
}

/* Tell whether a bitmap has as many bits as its block has values, and every exception has a place in its block. */
static int is_sound(const uint8_t *body, struct entry e, int ascending)
{
    if (e.width == BITMAP) {
        int bits = 0;
        for (int i = 0; i < e.third; i++)
            bits += __builtin_popcount(body[i]);
        return ascending && e.third && bits == e.count && body[0] & 1;
    }
    if (e.width <= MOST_WIDTH) {
        const uint8_t *places = body + body_bytes(e.count, e.width);
        for (int i = 0; i < e.third; i++)
            if (places[i] >= e.count)
                return 0;
    }
    return 1;
}

int32_t ra_check_packed(const uint8_t *data, int64_t size, int64_t n, int64_t itemsize)
{
    if (size < HEAD_BYTES + TAIL_BYTES || load16(data) != MAGIC || data[2] != VERSION)
        return RA_BAD_SIZE;
    if (data[3] >> 5 || 1 << (data[3] & 3) != itemsize || load32(data + 4) != n || load32(data + 12) != size)
        return RA_BAD_SIZE;
    struct packed chunk = open_packed(data);
    int64_t room = size - TAIL_BYTES - HEAD_BYTES - SKIP_BYTES * chunk.n_skips - 3 * chunk.n_blocks;
    if (chunk.n_blocks > n || room < 0)
        return RA_BAD_SIZE;
    struct place at = {0, 0, 0};
    while (at.block < chunk.n_blocks) {
        const uint8_t *skip = chunk.skips + SKIP_BYTES * (at.block / SKIP);
        if (at.block % SKIP == 0 && (load32(skip) != at.start || load32(skip + 4) != at.position))
            return RA_BAD_SIZE;
        struct entry e = entry_at(&chunk, at.block);
        int64_t taken = block_bytes(e, chunk.base_bytes, chunk.itemsize);
        if (taken < 0 || taken > room - at.position)
            return RA_BAD_SIZE;
        if (!is_sound(chunk.payload + at.position + chunk.base_bytes, e, chunk.ascending))
            return RA_BAD_SIZE;
        go_on(&chunk, e, &at);
    }
    return at.start == n && at.position == room ? RA_GOOD : RA_BAD_SIZE;
}

int32_t ra_check_packed_chunk(const uint8_t *data, int64_t size, int64_t n, int64_t itemsize)
{
    if (size < 4 || ra_crc32c(0, data, size - 4) != load32(data + size - 4))
        return RA_BAD_CHECKSUM;
    return ra_check_packed(data, size - 4, n, itemsize);
}

int32_t ra_unpack(const uint8_t *data, int64_t size, int64_t n, int64_t itemsize, void *out)
{
    int32_t status = ra_check_packed(data, size, n, itemsize);
    if (status == RA_GOOD)
        RA_CHOOSE(unpack)(data, n, itemsize, out);
    return status;
}

int32_t ra_unpack_chunks(const struct ra_chunks *chunks, const struct ra_pieces *pieces, int64_t per_chunk,
                         int64_t itemsize, void *out, int64_t n_out, int64_t *where)
{
    return RA_CHOOSE(unpack_chunks)(chunks, pieces, per_chunk, itemsize, out, n_out, where);
}
