/* Lists of bytes and manifests of vector stores: records whose lengths stand in the records before them. */
#include "bits.h"
#include "raggedatlas.h"

enum { SINGLE = 0, RUN = 1, LIST = 2 };

/* More coordinates than bytes could hold anyway; keeps sums of sizes within 64 bits. */
#define MOST_DIMS ((int64_t)1 << 40)

int32_t ra_frame_items(const uint8_t *data, int64_t n_bytes, int64_t *starts, int64_t *stops, int64_t n)
{
    int64_t at = 4;
    for (int64_t i = 0; i < n; i++) {
        if (at + 4 > n_bytes)
            return RA_CUT_SHORT;
        starts[i] = at + 4;
        at += 4 + (int64_t)load32(data + at);
        if (at > n_bytes)
            return RA_CUT_SHORT;
        stops[i] = at;
    }
    return at == n_bytes ? RA_GOOD : at > n_bytes ? RA_CUT_SHORT : RA_TRAILING;
}

struct block {
    int64_t start, count, listed, size; /* `listed` items of a list, and the bytes behind the mode */
    uint8_t mode;
};

/* Read the block whose chunk begins at `at`, of bytes that end at `end`. */
static int32_t read_block(const uint8_t *data, int64_t at, int64_t end, int64_t n_dims, struct block *found)
{
    int64_t body = at + 8 * n_dims + 1;
    if (body + 4 > end)
        return RA_CUT_SHORT;
    uint8_t mode = data[body - 1];
    if (mode > LIST)
        return RA_BAD_MODE;
    int64_t listed = mode == LIST ? (int64_t)load32(data + body) : 0;
    int64_t size = mode == LIST ? 4 + 8 * listed : 8 + 8 * (int64_t)mode;
    if (body + size > end)
        return RA_CUT_SHORT;
    *found = (struct block){.start = 0, .count = listed, .listed = listed, .size = size, .mode = mode};
    if (mode != LIST) {
        found->start = (int64_t)load64(data + body);
        found->count = mode == RUN ? (int64_t)load64(data + body + 8) : 1;
    }
    return found->start < 0 || found->count < 0 ? RA_NEGATIVE : RA_GOOD;
}

int32_t ra_measure_manifests(const uint8_t *data, int64_t n_bytes, int64_t n_dims, int64_t *bounds, int64_t n)
{
    int64_t at = 0;
    struct block block;
    if (n_dims < 0 || n_dims > MOST_DIMS)
        return RA_CUT_SHORT;
    for (int64_t i = 0; i < n; i++) {
        bounds[i] = at;
        if (at + 4 > n_bytes)
            return RA_CUT_SHORT;
        uint32_t left = load32(data + at);
        for (at += 4; left; left--) {
            int32_t fault = read_block(data, at, n_bytes, n_dims, &block);
            if (fault)
                return fault;
            at += 8 * n_dims + 1 + block.size;
        }
    }
    bounds[n] = at;
    return at == n_bytes ? RA_GOOD : RA_TRAILING;
}

/* Read manifests into `out`, or only count their blocks and items where it has no room for blocks. */
static int32_t read_manifests(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, int64_t n, int64_t n_dims,
                              const struct ra_manifests *out, int64_t *totals, int64_t *where)
{
    int64_t n_blocks = 0, n_items = 0;
    struct block block;
    *where = 0;
    if (n_dims < 0 || n_dims > MOST_DIMS)
        return RA_CUT_SHORT;
    for (int64_t i = 0; i < n; i++) {
        *where = i;
        int64_t at = bounds[i], end = bounds[i + 1];
        if (at < 0 || at > end || end > n_bytes)
            return RA_BAD_BOUNDS;
        if (end - at < 4)
            return RA_CUT_SHORT;
        uint32_t left = load32(data + at);
        if (out)
            out->bounds[i] = n_blocks;
        for (at += 4; left; left--, n_blocks++) {
            int32_t fault = read_block(data, at, end, n_dims, &block);
            if (fault)
                return fault;
            int64_t body = at + 8 * n_dims + 1;
            if (out) {
                if (n_blocks >= out->n_blocks || block.listed > out->n_items - n_items)
                    return RA_BAD_SIZE;
                memcpy(out->chunks + n_blocks * n_dims, data + at, (size_t)(8 * n_dims));
                out->modes[n_blocks] = block.mode;
                out->starts[n_blocks] = block.mode == LIST ? n_items : block.start;
                out->counts[n_blocks] = block.count;
                if (block.listed)
                    memcpy(out->items + n_items, data + body + 4, (size_t)(8 * block.listed));
            }
            n_items += block.listed;
            at = body + block.size;
        }
        if (at != end)
            return RA_TRAILING;
    }
    if (out)
        out->bounds[n] = n_blocks;
    totals[0] = n_blocks;
    totals[1] = n_items;
    return RA_GOOD;
}

int32_t ra_count_manifests(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, int64_t n, int64_t n_dims,
                           int64_t *totals, int64_t *where)
{
    return read_manifests(data, n_bytes, bounds, n, n_dims, NULL, totals, where);
}

int32_t ra_read_manifests(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, const struct ra_manifests *out,
                          int64_t *where)
{
    int64_t totals[2];
    int32_t fault = read_manifests(data, n_bytes, bounds, out->n, out->n_dims, out, totals, where);
    if (fault)
        return fault;
    return totals[0] == out->n_blocks && totals[1] == out->n_items ? RA_GOOD : RA_BAD_SIZE;
}

int32_t ra_write_manifests(const struct ra_manifests *of, uint8_t *out, int64_t n_bytes)
{
    int64_t at = 0, chunk_bytes = 8 * of->n_dims;
    for (int64_t i = 0; i < of->n; i++) {
        int64_t first = of->bounds[i], last = of->bounds[i + 1];
        if (first < 0 || first > last || last > of->n_blocks)
            return RA_BAD_BOUNDS;
        if (last - first > UINT32_MAX || n_bytes - at < 4)
            return RA_BAD_SIZE;
        store32(out + at, (uint32_t)(last - first));
        at += 4;
        for (int64_t b = first; b < last; b++) {
            int64_t start = of->starts[b], count = of->counts[b];
            int listed = of->modes[b] == LIST;
            if (listed && (start < 0 || count < 0 || start > of->n_items || count > of->n_items - start))
                return RA_BAD_BOUNDS;
            int64_t size = listed ? 4 + 8 * count : 8 + 8 * (of->modes[b] == RUN);
            if ((listed && count > UINT32_MAX) || n_bytes - at < chunk_bytes + 1 + size)
                return RA_BAD_SIZE;
            memcpy(out + at, of->chunks + b * of->n_dims, (size_t)chunk_bytes);
            at += chunk_bytes;
            out[at++] = of->modes[b];
            if (listed) {
                store32(out + at, (uint32_t)count);
                if (count)
                    memcpy(out + at + 4, of->items + start, (size_t)(8 * count));
            } else {
                store64(out + at, (uint64_t)start);
                if (of->modes[b] == RUN)
                    store64(out + at + 8, (uint64_t)count);
            }
            at += size;
        }
    }
    return at == n_bytes ? RA_GOOD : RA_BAD_SIZE;
}
