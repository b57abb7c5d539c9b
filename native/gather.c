/* The gather: for every row find its chunks, unpack what it needs, map its columns, and write it into a CSR. */
#include "frames.h"
#include "levels.h"
#include "packed.h"

#define CHECKED 8 /* added to the kind of a chunk that is not packed but ends with its crc32c */
#define AS_IS 16  /* added where values are of the result's type */
#define SEEN 1
#define LINE 64

/* What one call reads, and the room of its thread. */
struct reading {
    const struct ra_rows *rows;
    const struct ra_array *arrays; /* columns, values */
    const struct ra_maps *maps;
    const struct ra_result *out;
    const struct ra_room *room;
    int64_t held[2]; /* slots whose decoded chunks are in the room */
    uint32_t scratch[SCRATCH];
};

struct group_facts {
    int64_t first_slot, per_chunk;
    int kind, checked, as_is, itemsize;
};

struct find {
    uint32_t place, number;
};

static struct group_facts facts_of(const struct ra_array *array, int64_t group)
{
    const int64_t *at = array->groups + 4 * group;
    int kind = (int)at[2];
    return (struct group_facts){at[0], at[1], kind % CHECKED, (kind & CHECKED) != 0, (kind & AS_IS) != 0, (int)at[3]};
}

/* Return the type by which values of a group are written: bits of their size where they are of the result's type. */
static int value_type(const struct reading *r, struct group_facts g)
{
    return !g.as_is ? r->out->type : g.itemsize == 8 ? RA_UINT64 : g.itemsize >> 1;
}

/* Check a packed chunk when it is first read, decode another unless it is at hand. `data` is then where it is, NULL for
 * one that is not stored: that is all zero. Of a stream, the entries before `end` must be there. */
static int32_t open_chunk(struct reading *r, int which, struct group_facts g, int64_t number, int64_t end, int64_t *slot,
                          const uint8_t **data)
{
    const struct ra_array *array = r->arrays + which;
    int64_t at = *slot = g.first_slot + number;
    if (at < 0 || at >= array->n_slots)
        return RA_BAD_SIZE;
    const uint8_t *stored = (const uint8_t *)(uintptr_t)array->addresses[at];
    int64_t size = array->sizes[at];
    *data = size < 0 ? NULL : g.kind == RA_PACKED || g.kind == RA_STREAM ? stored : r->room->chunks[which];
    if (size < 0)
        return RA_GOOD;
    if (g.kind == RA_STREAM)
        return end <= size / g.itemsize ? RA_GOOD : RA_BAD_SIZE;
    if (g.kind != RA_PACKED) {
        if (r->held[which] == at)
            return RA_GOOD;
        r->held[which] = -1;
        int64_t n_bytes = g.per_chunk * g.itemsize;
        if (n_bytes > r->room->chunk_bytes)
            return RA_BAD_SIZE;
        int32_t status = ra_decode_frame(stored, size, g.kind, g.checked, r->room->chunks[which], n_bytes, r->room->work);
        if (status == RA_GOOD)
            r->held[which] = at;
        return status;
    }
    /* Two threads may check one chunk at once; both come to the same answer. */
    if (__atomic_load_n(array->states + at, __ATOMIC_RELAXED) == SEEN)
        return RA_GOOD;
    int32_t status = ra_check_packed_chunk(stored, size, g.per_chunk, g.itemsize);
    if (status == RA_GOOD)
        __atomic_store_n(array->states + at, SEEN, __ATOMIC_RELAXED);
    return status;
}

/* Tell whether a row's group is one, and its entries fit the output and the room, their values the type. */
static int row_fits(const struct reading *r, int64_t row, int64_t *where)
{
    *where = row;
    const struct ra_rows *rows = r->rows;
    if (row < 0 || row >= rows->n_rows || rows->group[row] < 0 || rows->group[row] >= rows->n_groups)
        return 0;
    struct group_facts values = facts_of(r->arrays + 1, rows->group[row]);
    if (values.as_is && values.itemsize != ra_type_bytes[r->out->type])
        return 0;
    int64_t n = rows->length[row], at = rows->at[row], end = rows->at[row + 1];
    return rows->start[0][row] >= 0 && rows->start[1][row] >= 0 && n >= 0 && n <= r->room->longest && at >= 0 &&
           end >= at && end <= r->out->n && (r->out->counts || n <= end - at);
}

/* Ask for the cache lines that the next row will need: the head of its chunk, and about where its blocks lie. */
static void fetch_next(const struct reading *r, int64_t i, int n_arrays)
{
    const struct ra_rows *rows = r->rows;
    if (i + 1 >= rows->n_order)
        return;
    int64_t row = rows->order[i + 1];
    if (row < 0 || row >= rows->n_rows || rows->group[row] < 0 || rows->group[row] >= rows->n_groups)
        return;
    for (int which = 0; which < n_arrays; which++) {
        int64_t start = rows->start[which][row], stop = start + rows->length[row];
        const struct ra_array *array = r->arrays + which;
        struct group_facts g = facts_of(array, rows->group[row]);
        int64_t number = start / g.per_chunk, slot = g.first_slot + number;
        if (g.kind != RA_PACKED || start >= stop || slot < 0 || slot >= array->n_slots || array->sizes[slot] < 0)
            continue;
        uint64_t address = array->addresses[slot], size = (uint64_t)array->sizes[slot];
        for (int line = 0; line < 5; line++)
            __builtin_prefetch((const void *)(uintptr_t)(address + (uint64_t)(LINE * line)));
        uint64_t low = (uint64_t)(start - number * g.per_chunk);
        uint64_t high = (uint64_t)least(stop - number * g.per_chunk, g.per_chunk);
        uint64_t end = address + high * size / (uint64_t)g.per_chunk;
        for (uint64_t at = address + low * size / (uint64_t)g.per_chunk; at < end; at += LINE)
            __builtin_prefetch((const void *)(uintptr_t)at);
    }
}

#define RA_LOOPS "gather_loops.h"
#include "each_level.h"

int32_t ra_arrange_rows(const int32_t *group, const int64_t *start, const int64_t *stop, int64_t n,
                        const int64_t *facts, int64_t n_groups, const int64_t *column_grid,
                        const uint8_t *column_mapped, const int64_t *value_grid, const uint8_t *value_mapped,
                        int64_t *order, int64_t *places, int64_t *at, int64_t *found)
{
    const int64_t *grids[] = {column_grid, value_grid};
    const uint8_t *mapped[] = {column_mapped, value_mapped};
    int64_t n_read = 0, longest = 0, all = 1;
    at[0] = 0;
    for (int64_t row = 0; row < n; row++) {
        int64_t g = group[row], low = start[row], high = stop[row];
        at[row + 1] = at[row];
        if (g < 0)
            continue;
        const int64_t *of = facts + 4 * g;
        found[0] = row;
        if (g >= n_groups || low < 0 || high < low || high > of[0])
            return RA_OUTSIDE;
        if (high - low > of[2])
            return RA_REPEATED;
        if (high == low)
            continue;
        at[row + 1] += least(high - low, of[3]);
        longest = most(longest, high - low);
        order[n_read] = row;
        places[n_read++] = of[1] + low;
        for (int k = 0; k < 2; k++) {
            int64_t per_shard = grids[k][2 * g], first = grids[k][2 * g + 1];
            for (int64_t shard = low / per_shard; shard <= (high - 1) / per_shard; shard++)
                all &= mapped[k][first + shard];
        }
    }
    found[0] = n_read;
    found[1] = longest;
    found[2] = all;
    return RA_GOOD;
}

int32_t ra_gather(const struct ra_rows *rows, const struct ra_array *arrays, const struct ra_maps *maps,
                  const struct ra_result *out, const struct ra_room *room, int64_t *where, int32_t *which)
{
    struct reading r = {.rows = rows, .arrays = arrays, .maps = maps, .out = out, .room = room, .held = {-1, -1}};
    return out->counts ? RA_CHOOSE(gather_placed)(&r, where, which) : RA_CHOOSE(gather_plain)(&r, where, which);
}
