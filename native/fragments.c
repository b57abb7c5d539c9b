/* Fragment indexes: all of many, some fragments of one, and the rows that they name. */
#include "bits.h"
#include "raggedatlas.h"

enum { MAGIC = 0x5A564647, VERSION = 1, HEAD = 16 };

/* A checked index: its counts, and where its tables are. */
struct index {
    const uint8_t *bits, *runs, *offsets, *rows;
    int64_t n, n_runs, n_rows;
};

static int32_t open_index(const uint8_t *data, int64_t n_bytes, struct index *found)
{
    if (n_bytes < HEAD)
        return RA_NO_HEAD;
    if (load32(data) != MAGIC)
        return RA_NO_MAGIC;
    if (load32(data + 4) != VERSION)
        return RA_BAD_VERSION;
    int64_t n = load32(data + 8), n_runs = load32(data + 12);
    if (n_runs > n)
        return RA_BAD_RUNS;
    int64_t n_words = (n + 63) / 64, runs = HEAD + 8 * n_words, offsets = runs + 16 * n_runs;
    int64_t rows = offsets + (n ? 4 * (n - n_runs + 1) : 0);
    if (rows > n_bytes)
        return RA_CUT_SHORT;
    int64_t bits = 0;
    for (int64_t i = 0; i < n_words; i++)
        bits += __builtin_popcountll(load64(data + HEAD + 8 * i));
    if (bits != n_runs || (n % 64 && load64(data + runs - 8) >> n % 64))
        return RA_BAD_BITS;
    *found = (struct index){
        .bits = data + HEAD,
        .runs = data + runs,
        .offsets = data + offsets,
        .rows = data + rows,
        .n = n,
        .n_runs = n_runs,
        .n_rows = n ? load32(data + rows - 4) : 0,
    };
    return rows + 8 * found->n_rows == n_bytes ? RA_GOOD : RA_BAD_LISTS;
}

/* Open index c of many. */
static int32_t open_one(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, int64_t c, struct index *found)
{
    if (bounds[c] < 0 || bounds[c] > bounds[c + 1] || bounds[c + 1] > n_bytes)
        return RA_BAD_BOUNDS;
    return open_index(data + bounds[c], bounds[c + 1] - bounds[c], found);
}

int32_t ra_count_fragments(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, int64_t n, int64_t *counts,
                           int64_t *where)
{
    struct index index;
    *where = 0;
    for (int64_t c = 0; c < n; c++) {
        *where = c;
        int32_t fault = open_one(data, n_bytes, bounds, c, &index);
        if (fault)
            return fault;
        counts[c] = index.n;
        counts[n + c] = index.n_rows;
    }
    return RA_GOOD;
}

/* Read starts and counts of the fragments of one index; those of lists begin at `row` among all rows. */
static int32_t read_spans(const struct index *from, uint8_t *is_run, int64_t *starts, int64_t *counts, int64_t row)
{
    const uint8_t *run = from->runs, *offset = from->offsets;
    int64_t sign = 0;
    if (from->n && load32(offset))
        return RA_BAD_OFFSETS;
    for (int64_t f = 0; f < from->n; f++) {
        is_run[f] = from->bits[f / 8] >> f % 8 & 1;
        if (is_run[f]) {
            starts[f] = (int64_t)load64(run);
            counts[f] = (int64_t)load64(run + 8);
            sign |= starts[f] | counts[f];
            run += 16;
        } else {
            int64_t low = load32(offset), high = load32(offset + 4);
            if (low > high)
                return RA_BAD_OFFSETS;
            starts[f] = row + low;
            counts[f] = high - low;
            offset += 4;
        }
    }
    return sign < 0 ? RA_NEGATIVE : RA_GOOD;
}

int32_t ra_read_fragments(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, int64_t n, uint8_t *is_run,
                          int64_t *starts, int64_t *counts, int64_t n_fragments, int64_t *rows, int64_t n_rows,
                          int64_t *where)
{
    struct index index;
    int64_t fragment = 0, row = 0;
    *where = 0;
    for (int64_t c = 0; c < n; c++) {
        *where = c;
        int32_t fault = open_one(data, n_bytes, bounds, c, &index);
        if (fault)
            return fault;
        if (index.n > n_fragments - fragment || index.n_rows > n_rows - row)
            return RA_BAD_SIZE;
        fault = read_spans(&index, is_run + fragment, starts + fragment, counts + fragment, row);
        if (fault)
            return fault;
        int64_t sign = 0;
        for (int64_t i = 0; i < index.n_rows; i++) {
            rows[row + i] = (int64_t)load64(index.rows + 8 * i);
            sign |= rows[row + i];
        }
        if (sign < 0)
            return RA_NEGATIVE;
        fragment += index.n;
        row += index.n_rows;
    }
    return fragment == n_fragments && row == n_rows ? RA_GOOD : RA_BAD_SIZE;
}

int32_t ra_locate_fragments(const uint8_t *data, int64_t n_bytes, const int64_t *wanted, int64_t n, int64_t n_rows,
                            int64_t *spans)
{
    struct index index;
    int32_t fault = open_index(data, n_bytes, &index);
    if (fault)
        return fault;
    int64_t word = 0, before = 0; /* runs of the words before this one */
    for (int64_t p = 0; p < n; p++, spans += 3) {
        int64_t f = wanted[p];
        if (f < 0 || f >= index.n || (p && f < wanted[p - 1]))
            return RA_MISSING;
        for (; word < f / 64; word++)
            before += __builtin_popcountll(load64(index.bits + 8 * word));
        uint64_t bits = load64(index.bits + 8 * word);
        int64_t runs = before + __builtin_popcountll(bits & (((uint64_t)1 << f % 64) - 1));
        if (bits >> f % 64 & 1) {
            int64_t start = (int64_t)load64(index.runs + 16 * runs), count = (int64_t)load64(index.runs + 16 * runs + 8);
            if (start < 0 || count < 0)
                return RA_NEGATIVE;
            if (start > n_rows || count > n_rows - start)
                return RA_BEYOND;
            spans[0] = start;
            spans[1] = 0;
            spans[2] = count;
        } else {
            int64_t low = load32(index.offsets + 4 * (f - runs)), high = load32(index.offsets + 4 * (f - runs) + 4);
            if (low > high || high > index.n_rows)
                return RA_BAD_OFFSETS;
            spans[0] = -1;
            spans[1] = (index.rows - data) + 8 * low;
            spans[2] = high - low;
        }
    }
    return RA_GOOD;
}

int32_t ra_expand_fragments(const struct ra_fragments *of, const int64_t *wanted, int64_t n, int64_t *out, int64_t n_out)
{
    int64_t at = 0;
    for (int64_t p = 0; p < n; p++) {
        int64_t f = wanted[p];
        if (f < 0 || f >= of->n)
            return RA_BEYOND;
        int64_t start = of->starts[f], count = of->counts[f];
        if (count < 0)
            return RA_BEYOND;
        if (count > n_out - at)
            return RA_BAD_SIZE;
        if (of->is_run[f]) {
            for (int64_t k = 0; k < count; k++)
                out[at + k] = (int64_t)((uint64_t)start + (uint64_t)k);
        } else {
            if (start < 0 || start > of->n_rows || count > of->n_rows - start)
                return RA_BEYOND;
            for (int64_t k = 0; k < count; k++)
                out[at + k] = of->rows[start + k];
        }
        at += count;
    }
    return at == n_out ? RA_GOOD : RA_BAD_SIZE;
}

int32_t ra_copy_fragments(const uint8_t *data, int64_t n_bytes, const uint8_t *cell, int64_t cell_bytes,
                          const int64_t *spans, const int64_t *places, int64_t n, int64_t size, uint8_t *out,
                          int64_t out_bytes)
{
    int64_t n_rows = cell_bytes / size, n_out = out_bytes / size;
    for (int64_t p = 0; p < n; p++, spans += 3) {
        int64_t start = spans[0], at = spans[1], count = spans[2];
        if (places[p] < 0 || places[p] > n_out || count < 0 || count > n_out - places[p])
            return RA_BEYOND;
        uint8_t *to = out + places[p] * size;
        if (start >= 0) {
            if (start > n_rows || count > n_rows - start)
                return RA_BEYOND;
            if (count)
                memcpy(to, cell + start * size, (size_t)(count * size));
            continue;
        }
        if (at < 0 || at > n_bytes || count > (n_bytes - at) / 8)
            return RA_BEYOND;
        for (int64_t k = 0; k < count; k++, to += size) {
            uint64_t row = load64(data + at + 8 * k);
            if (row >= (uint64_t)n_rows)
                return RA_BEYOND;
            memcpy(to, cell + (int64_t)row * size, (size_t)size);
        }
    }
    return RA_GOOD;
}
