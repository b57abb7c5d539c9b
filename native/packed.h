/* The format of a packed chunk, as docs/reference/packed-codec.md has it, and how its head and tables are read. */
#ifndef RAGGEDATLAS_PACKED_H
#define RAGGEDATLAS_PACKED_H

#include "bits.h"
#include "raggedatlas.h"

#define HEAD_BYTES 16
#define TAIL_BYTES 8 /* zero; they let the last payload be loaded in words */
#define MAGIC 0x7072
#define VERSION 1
#define ASCENDING 4
#define SKIP 8 /* blocks from one entry of the skips to the next */
#define SKIP_BYTES 8
#define BLOCK 256
#define LANES 8
#define STREAM_BELOW 64 /* fewer values than this are one stream of bits instead of eight lanes */
#define MOST_WIDTH 32
#define BITMAP 33
#define RAW 34
#define SCRATCH (BLOCK + 16) /* vectors may write up to fifteen values beyond a block */

struct entry {
    int64_t count;
    int kind, width, third;
};

/* A chunk whose head has been checked. */
struct packed {
    const uint8_t *skips, *table, *payload;
    int64_t n_blocks, n_skips;
    int base_bytes, itemsize, ascending;
};

/* Where a reader is: a block, the number of its first value, and where its payload begins. */
struct place {
    int64_t block, start, position;
};

/* Return c such that 1 << c bytes hold so many bits. */
RA_INLINE int byte_class(int bits) { return bits <= 8 ? 0 : bits <= 16 ? 1 : bits <= 32 ? 2 : 3; }

RA_INLINE int bits_of(uint64_t value) { return value ? 64 - __builtin_clzll(value) : 0; }

RA_INLINE uint64_t low_bytes(int n_bytes) { return n_bytes == 8 ? ~(uint64_t)0 : ((uint64_t)1 << 8 * n_bytes) - 1; }

/* Load 1, 2, 4 or 8 bytes; the tail of a chunk lets eight be read. */
RA_INLINE uint64_t load_bytes(const uint8_t *at, int n_bytes) { return load64(at) & low_bytes(n_bytes); }

RA_INLINE void store_bytes(uint8_t *at, int n_bytes, uint64_t value) { memcpy(at, &value, (size_t)n_bytes); }

/* Return the bytes of `n` values of `width` bits. */
RA_INLINE int64_t body_bytes(int64_t n, int width)
{
    if (n < STREAM_BELOW)
        return (n * width + 7) >> 3;
    return 4 * LANES * (((n + LANES - 1) / LANES * width + 31) >> 5);
}

/* Return the payload bytes of a block; -1 for a kind that does not exist. */
RA_INLINE int64_t block_bytes(struct entry e, int base_bytes, int itemsize)
{
    if (e.width <= MOST_WIDTH)
        return base_bytes + body_bytes(e.count, e.width) + e.third * (1 + ((int64_t)1 << (e.kind >> 6)));
    if (e.width == BITMAP)
        return base_bytes + e.third;
    return e.width == RAW && e.third == 0 ? base_bytes + e.count * itemsize : -1;
}

RA_INLINE struct entry entry_at(const struct packed *chunk, int64_t block)
{
    const uint8_t *at = chunk->table + block;
    int kind = at[chunk->n_blocks];
    return (struct entry){at[0] + 1, kind, kind & 63, at[2 * chunk->n_blocks]};
}

RA_INLINE struct packed open_packed(const uint8_t *data)
{
    struct packed chunk;
    int flags = data[3];
    chunk.n_blocks = load32(data + 8);
    chunk.n_skips = (chunk.n_blocks + SKIP - 1) / SKIP;
    chunk.skips = data + HEAD_BYTES;
    chunk.table = chunk.skips + SKIP_BYTES * chunk.n_skips;
    chunk.payload = chunk.table + 3 * chunk.n_blocks;
    chunk.base_bytes = 1 << (flags >> 3 & 3);
    chunk.itemsize = 1 << (flags & 3);
    chunk.ascending = flags & ASCENDING;
    return chunk;
}

/* Find the block that holds a value of a checked chunk. */
RA_INLINE struct place seek(const struct packed *chunk, int64_t value)
{
    int64_t low = 0, high = chunk->n_skips;
    while (high - low > 1) {
        int64_t middle = (low + high) >> 1;
        if (load32(chunk->skips + SKIP_BYTES * middle) <= value)
            low = middle;
        else
            high = middle;
    }
    const uint8_t *skip = chunk->skips + SKIP_BYTES * low;
    struct place at = {low * SKIP, load32(skip), load32(skip + 4)};
    for (;;) {
        struct entry e = entry_at(chunk, at.block);
        if (value < at.start + e.count)
            return at;
        at.position += block_bytes(e, chunk->base_bytes, chunk->itemsize);
        at.start += e.count;
        at.block++;
    }
}

RA_INLINE void go_on(const struct packed *chunk, struct entry e, struct place *at)
{
    at->position += block_bytes(e, chunk->base_bytes, chunk->itemsize);
    at->start += e.count;
    at->block++;
}

/* Of each byte the places of its set bits, lowest first, a byte each. */
extern uint64_t ra_bit_places[256];

/* Bytes of an element of each `ra_type`. */
extern const int64_t ra_type_bytes[6];

/* Check the crc32c at the end of a packed chunk and then its head and tables; return a status. A chunk that passes can
 * be read by everything in packed_read.h, whatever it holds. */
int32_t ra_check_packed_chunk(const uint8_t *data, int64_t size, int64_t n, int64_t itemsize);

#endif
