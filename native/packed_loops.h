/* What packed.c has for each level. */
#include "packed_read.h"

void VARIANT(ra_pack_full)(const uint32_t *in, int width, uint8_t *out);

#define WIDE uint32_t
#define NAME(f) VARIANT(RA_JOIN(f, _32))
#include "packed_write.h"
#undef WIDE
#undef NAME

#define WIDE uint64_t
#define NAME(f) VARIANT(RA_JOIN(f, _64))
#include "packed_write.h"
#undef WIDE
#undef NAME

static RA_TARGET int64_t VARIANT(pack)(const uint8_t *in, int itemsize, int64_t n, const int64_t *breaks,
                                       int64_t n_breaks, uint8_t *out, uint8_t *lengths)
{
    return itemsize == 8 ? VARIANT(pack_chunk_64)(in, itemsize, n, breaks, n_breaks, out, lengths)
                         : VARIANT(pack_chunk_32)(in, itemsize, n, breaks, n_breaks, out, lengths);
}

/* Unpack a checked chunk; see ra_unpack. */
static RA_TARGET void VARIANT(unpack)(const uint8_t *data, int64_t n, int64_t itemsize, void *out)
{
    uint32_t scratch[SCRATCH];
    if (itemsize < 8) {
        VARIANT(unpack_range)(data, 0, n, scratch, NULL, 0, out, byte_class(8 * (int)itemsize));
        return;
    }
    struct packed chunk = open_packed(data);
    struct place at = {0, 0, 0};
    while (at.start < n) {
        struct entry e = entry_at(&chunk, at.block);
        const uint8_t *body = chunk.payload + at.position;
        uint64_t base = load_bytes(body, chunk.base_bytes), *to = (uint64_t *)out + at.start;
        body += chunk.base_bytes;
        if (e.width == BITMAP)
            VARIANT(unpack_bitmap)(body, e.third, 0, NULL, scratch);
        else if (e.width != RAW && e.count < STREAM_BELOW)
            VARIANT(unpack_stream)(body, e.count, e.width, scratch);
        else if (e.width != RAW)
            VARIANT(unpack_lanes)(body, e.count, e.width, scratch);
        for (int64_t i = 0; i < e.count; i++)
            to[i] = e.width == RAW ? load64(body + 8 * i) : scratch[i];
        if (e.width <= MOST_WIDTH) {
            const uint8_t *places = body + body_bytes(e.count, e.width), *highs = places + e.third;
            int size = 1 << (e.kind >> 6);
            for (int i = 0; i < e.third; i++)
                to[places[i]] |= load_bytes(highs + i * size, size) << e.width;
        }
        int gaps = chunk.ascending && e.width != BITMAP;
        for (int64_t i = 0; i < e.count; i++) {
            to[i] += base + (gaps ? (uint64_t)i : 0);
            base += gaps ? to[i] - base - (uint64_t)i : 0;
        }
        go_on(&chunk, e, &at);
    }
}

/* Check packed chunks and unpack pieces of them; see ra_unpack_chunks. */
static RA_TARGET int32_t VARIANT(unpack_chunks)(const struct ra_chunks *chunks, const struct ra_pieces *pieces,
                                                int64_t per_chunk, int64_t itemsize, uint8_t *out, int64_t n_out,
                                                int64_t *where)
{
    uint32_t scratch[SCRATCH];
    for (int64_t chunk = 0; chunk < chunks->n; chunk++) {
        const uint8_t *data = (const uint8_t *)(uintptr_t)chunks->addresses[chunk];
        int64_t first = pieces->bounds[chunk], last = pieces->bounds[chunk + 1];
        *where = chunk;
        if (first < 0 || last < first || last > pieces->n)
            return RA_BAD_SIZE;
        if (chunks->sizes[chunk] >= 0) {
            int32_t status = ra_check_packed_chunk(data, chunks->sizes[chunk], per_chunk, itemsize);
            if (status != RA_GOOD)
                return status;
        }
        for (int64_t i = first; i < last; i++) {
            int64_t source = pieces->sources[i], n = pieces->lengths[i];
            uint8_t *target = out + pieces->targets[i] * itemsize;
            if (!ra_piece_fits(pieces, i, per_chunk, n_out))
                return RA_BAD_SIZE;
            if (chunks->sizes[chunk] < 0)
                memset(target, 0, (size_t)(n * itemsize));
            else if (n)
                VARIANT(unpack_range)(data, source, source + n, scratch, NULL, 0, target, byte_class(8 * (int)itemsize));
        }
    }
    return RA_GOOD;
}
