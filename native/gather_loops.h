/* Reading rows of ragged groups; included once per level of vector instructions by gather.c. */
#include "packed_read.h"

/* Copy decoded values, zeros if `in` is NULL, to `out`, through a map where there is one, in pieces that fit the scratch. */
static RA_TARGET void VARIANT(copy_values)(const uint8_t *in, int itemsize, int64_t n, uint32_t *scratch,
                                           const int32_t *map, int64_t n_map, void *out, int type)
{
    char *target = out;
    if (!map && type <= RA_UINT64 && itemsize == ra_type_bytes[type]) {
        if (in)
            memcpy(target, in, (size_t)(itemsize * n));
        else
            memset(target, 0, (size_t)(itemsize * n));
        return;
    }
    for (int64_t done = 0; done < n; done += BLOCK) {
        int64_t step = least(BLOCK, n - done);
        const uint8_t *from = in ? in + done * itemsize : NULL;
        if (!in) {
            memset(scratch, 0, sizeof(uint32_t) * BLOCK);
        } else if (itemsize == 1) {
            for (int64_t i = 0; i < step; i++)
                scratch[i] = from[i];
        } else if (itemsize == 2) {
            for (int64_t i = 0; i < step; i++)
                scratch[i] = load16(from + 2 * i);
        } else {
            memcpy(scratch, from, 4 * (size_t)step);
        }
        if (map) {
            VARIANT(write_mapped)(scratch, step, 0, map, n_map, (int32_t *)target);
            target += 4 * step;
        } else {
            VARIANT(write_values)(scratch, step, 0, target, type);
            target += ra_type_bytes[type] * step;
        }
    }
}

/* Read one range of one group's array; return a status, and the slot of a bad chunk. */
static RA_TARGET int32_t VARIANT(take)(struct reading *r, int which, int64_t group, int64_t start, int64_t stop,
                                       const int32_t *map, int64_t n_map, void *out, int type, int64_t *slot)
{
    const struct ra_array *array = r->arrays + which;
    struct group_facts g = facts_of(array, group);
    char *target = out;
    while (start < stop) {
        int64_t number = start / g.per_chunk, low = start - number * g.per_chunk;
        int64_t n = least(stop - start, g.per_chunk - low);
        const uint8_t *data;
        int32_t status = open_chunk(r, which, g, number, low + n, slot, &data);
        if (status != RA_GOOD)
            return status;
        if (g.kind == RA_PACKED && data)
            VARIANT(unpack_range)(data, low, low + n, r->scratch, map, n_map, target, type);
        else
            VARIANT(copy_values)(data ? data + low * g.itemsize : NULL, g.itemsize, n, r->scratch, map, n_map, target,
                                 type);
        target += (map ? 4 : ra_type_bytes[type]) * n;
        start += n;
    }
    return RA_GOOD;
}

/* Tell whether any of `n` columns is negative, which says that a stored column was outside its map. */
RA_INLINE RA_TARGET int VARIANT(any_negative)(const int32_t *found, int64_t n)
{
    int32_t all = 0;
    for (int64_t i = 0; i < n; i++)
        all |= found[i];
    return all < 0;
}

static RA_TARGET int32_t VARIANT(gather_plain)(struct reading *r, int64_t *where, int32_t *which)
{
    const struct ra_rows *rows = r->rows;
    const struct ra_result *out = r->out;
    for (int64_t i = 0; i < rows->n_order; i++) {
        int64_t row = rows->order[i];
        if (!row_fits(r, row, where))
            return RA_OUTSIDE;
        fetch_next(r, i, 2);
        int64_t g = rows->group[row], start = rows->start[0][row], n = rows->length[row], at = rows->at[row];
        int64_t first = r->maps->bounds[g], n_map = r->maps->bounds[g + 1] - first;
        int32_t *found = out->columns + at;
        *which = 0;
        int32_t status = VARIANT(take)(r, 0, g, start, start + n, r->maps->columns + first, n_map, found, RA_UINT32, where);
        if (status != RA_GOOD)
            return status;
        if (VARIANT(any_negative)(found, n)) {
            *where = row;
            return RA_OUTSIDE;
        }
        *which = 1;
        char *target = (char *)out->values + ra_type_bytes[out->type] * at;
        start = rows->start[1][row];
        int type = value_type(r, facts_of(r->arrays + 1, g));
        status = VARIANT(take)(r, 1, g, start, start + n, NULL, 0, target, type, where);
        if (status != RA_GOOD)
            return status;
    }
    return RA_GOOD;
}

/* Return the first place among `n` ascending numbers that is not below a value. */
RA_INLINE RA_TARGET int64_t VARIANT(from)(const uint32_t *words, int64_t n, uint64_t value)
{
    int64_t low = 0;
    while (n > 0) {
        /* The comparison moves on, not a branch: that would be guessed wrongly every other time. */
        int64_t half = (n + 1) >> 1;
        low += words[low + half - 1] < value ? half : 0;
        n -= half;
    }
    return low;
}

/* Test the bit of every wanted column, and count the bits below the set ones; return how many are set. */
RA_INLINE RA_TARGET int VARIANT(pick_bitmap)(const uint8_t *body, int64_t n_bytes, uint64_t base, int64_t start,
                                             const uint32_t *wanted, int64_t n_wanted, struct find *finds)
{
    int n = 0;
    int64_t byte = 0, rank = start;
    for (int64_t i = VARIANT(from)(wanted, n_wanted, base); i < n_wanted; i++) {
        int64_t place = (int64_t)(wanted[i] - base);
        if (place >> 3 >= n_bytes)
            break;
        for (; byte + 8 <= place >> 3; byte += 8)
            rank += __builtin_popcountll(load64(body + byte));
        for (; byte < place >> 3; byte++)
            rank += __builtin_popcount(body[byte]);
        if (body[byte] >> (place & 7) & 1)
            finds[n++] = (struct find){(uint32_t)i, (uint32_t)(rank + __builtin_popcount(body[byte] & ((1u << (place & 7)) - 1)))};
    }
    return n;
}

/* Search every wanted column among ascending values; return how many are there. */
RA_INLINE RA_TARGET int VARIANT(pick_ascending)(const uint32_t *values, int64_t size, int64_t start,
                                                const uint32_t *wanted, int64_t n_wanted, struct find *finds)
{
    int n = 0;
    int64_t group = 0;
    uint32_t last = values[size - 1];
    for (int64_t i = VARIANT(from)(wanted, n_wanted, values[0]); i < n_wanted && wanted[i] <= last; i++) {
        while (group + 16 < size && values[group + 15] < wanted[i])
            group += 16;
        /* Among sixteen, those below are counted at once. What lies behind the last value does not matter: the last
         * is not below the column, and comes first. */
        int64_t at = group;
#if RA_LEVEL == 2
        __m512i words = _mm512_loadu_si512(values + group);
        __mmask16 reached = _mm512_cmpge_epu32_mask(words, _mm512_set1_epi32((int)wanted[i]));
        at += __builtin_ctz(reached | 0x10000u);
#else
        while (values[at] < wanted[i])
            at++;
#endif
        if (values[at] == wanted[i])
            finds[n++] = (struct find){(uint32_t)i, (uint32_t)(start + at)};
    }
    return n;
}

/* Look every value, plus a number, up among the wanted columns; return how many are. */
RA_INLINE RA_TARGET int VARIANT(pick_any)(const uint32_t *values, int64_t size, uint32_t more, int64_t start,
                                          const uint32_t *wanted, int64_t n_wanted, struct find *finds)
{
    int n = 0;
    for (int64_t j = 0; j < size; j++) {
        uint32_t column = values[j] + more;
        int64_t i = VARIANT(from)(wanted, n_wanted, column);
        if (i < n_wanted && wanted[i] == column)
            finds[n++] = (struct find){(uint32_t)i, (uint32_t)(start + j)};
    }
    return n;
}

/* Tell whether unpacked values ascend: sums of hostile gaps do not where they pass 32 bits. */
RA_INLINE RA_TARGET int VARIANT(ascends)(const uint32_t *values, int64_t n)
{
    uint32_t falls = 0;
    for (int64_t i = 1; i < n; i++)
        falls += values[i] <= values[i - 1];
    return falls == 0;
}

/* Find wanted columns among values first to last of a checked chunk; append what they map to and the number of each
 * entry, `before` more than its number in the chunk. Returns how many there are then. */
static RA_TARGET int64_t VARIANT(pick_range)(struct reading *r, const uint8_t *data, int64_t first, int64_t last,
                                             int64_t g, int64_t before, int64_t kept)
{
    const struct ra_maps *maps = r->maps;
    int64_t n_wanted = maps->wanted_bounds[g + 1] - maps->wanted_bounds[g];
    const uint32_t *wanted = maps->wanted + maps->wanted_bounds[g];
    const int32_t *targets = maps->targets + maps->wanted_bounds[g];
    struct packed chunk = open_packed(data);
    struct place at = seek(&chunk, first);
    struct find finds[BLOCK];
    while (at.start < last) {
        struct entry e = entry_at(&chunk, at.block);
        const uint8_t *body = chunk.payload + at.position;
        uint32_t base = (uint32_t)load_bytes(body, chunk.base_bytes);
        int n = 0;
        if (chunk.ascending && wanted[n_wanted - 1] < base) {
            n = 0;
        } else if (e.width == BITMAP && base < UINT32_MAX - 8u * 255) {
            n = VARIANT(pick_bitmap)(body + chunk.base_bytes, e.third, base, at.start, wanted, n_wanted, finds);
        } else {
            uint32_t more = VARIANT(unpack_block)(&chunk, at, e, r->scratch);
            if (chunk.ascending && VARIANT(ascends)(r->scratch, e.count))
                n = VARIANT(pick_ascending)(r->scratch, e.count, at.start, wanted, n_wanted, finds);
            else
                n = VARIANT(pick_any)(r->scratch, e.count, more, at.start, wanted, n_wanted, finds);
        }
        for (int i = 0; i < n; i++)
            if (finds[i].number >= first && finds[i].number < last) {
                r->room->found[kept] = targets[finds[i].place];
                r->room->numbers[kept++] = before + finds[i].number;
            }
        go_on(&chunk, e, &at);
    }
    return kept;
}

/* Unpack the values of a checked chunk whose numbers are given, ascending, from `before` on; every block that holds one
 * is unpacked once. Returns how many of the numbers are in this chunk. */
static RA_TARGET int64_t VARIANT(read_numbers)(struct reading *r, const uint8_t *data, int64_t per_chunk,
                                               int64_t before, const int64_t *numbers, int64_t n, uint32_t *out)
{
    struct packed chunk = open_packed(data);
    struct place at = seek(&chunk, numbers[0] - before);
    int64_t i = 0;
    while (i < n && numbers[i] < before + per_chunk) {
        struct entry e = entry_at(&chunk, at.block);
        if (numbers[i] - before < at.start + e.count) {
            uint32_t more = VARIANT(unpack_block)(&chunk, at, e, r->scratch);
            for (; i < n && numbers[i] - before < at.start + e.count; i++)
                out[i] = r->scratch[numbers[i] - before - at.start] + more;
        }
        go_on(&chunk, e, &at);
    }
    return i;
}

/* Find the wanted columns of one row, map them and read their values. Writes how many to `kept`, -1 where a chunk is
 * not stored: then the caller reads the row as any other. */
static RA_TARGET int32_t VARIANT(pick_row)(struct reading *r, int64_t g, int64_t start, int64_t stop, int64_t *kept,
                                           int64_t *slot, int32_t *which)
{
    struct group_facts facts = facts_of(r->arrays, g);
    const uint8_t *data;
    int64_t n = 0;
    *kept = -1;
    *which = 0;
    while (start < stop) {
        int64_t number = start / facts.per_chunk, before = number * facts.per_chunk;
        int32_t status = open_chunk(r, 0, facts, number, facts.per_chunk, slot, &data);
        if (status != RA_GOOD || !data)
            return status;
        int64_t end = least(stop, before + facts.per_chunk);
        n = VARIANT(pick_range)(r, data, start - before, end - before, g, before, n);
        start = end;
    }
    facts = facts_of(r->arrays + 1, g);
    *which = 1;
    for (int64_t i = 0; i < n;) {
        int64_t number = r->room->numbers[i] / facts.per_chunk;
        int32_t status = open_chunk(r, 1, facts, number, facts.per_chunk, slot, &data);
        if (status != RA_GOOD || !data)
            return status;
        i += VARIANT(read_numbers)(r, data, facts.per_chunk, number * facts.per_chunk, r->room->numbers + i, n - i,
                                   (uint32_t *)r->room->values + i);
    }
    *kept = n;
    return RA_GOOD;
}

/* List the set bits, ascending, and clear them; return how many. Eight bits of a word are listed whether they are set
 * or not: that is faster than to guess wrongly how many are. */
static RA_TARGET int64_t VARIANT(walk_bits)(uint64_t *words, int64_t n_words, int32_t *out)
{
    int64_t n = 0;
    for (int64_t w = 0; w < n_words; w++) {
        uint64_t bits = words[w];
        if (!bits)
            continue;
        words[w] = 0;
        int64_t left = __builtin_popcountll(bits), at = n;
        n += left;
        for (; left > 0; left -= 8)
            for (int k = 0; k < 8; k++, bits &= bits - 1)
                out[at++] = (int32_t)(64 * w) + lowest_bit(bits);
    }
    return n;
}

#define SLOTS(number, slot, type)                                                                                    \
    {                                                                                                                \
        const number *numbers = read;                                                                                \
        slot *slots = r->room->slots;                                                                                \
        type *values = (type *)r->out->values + at;                                                                  \
        for (int64_t i = 0; i < n; i++)                                                                              \
            if (found[i] >= 0) {                                                                                     \
                words[(uint32_t)found[i] >> 6] |= (uint64_t)1 << (found[i] & 63);                                    \
                slots[found[i]] = (slot)numbers[i];                                                                  \
            }                                                                                                        \
        n_set = VARIANT(walk_bits)(words, r->out->n_columns / 64 + 1, found);                                        \
        for (int64_t i = 0; i < least(n_set, room); i++)                                                             \
            values[i] = (type)slots[found[i]];                                                                       \
    }                                                                                                                \
    break;

/* Move the kept entries of a row together, whose values have four bytes or, if `wide`, eight; return whether their
 * columns ascend. */
RA_INLINE RA_TARGET int VARIANT(close_up)(int32_t *found, void *read, int wide, int64_t n, int64_t kept)
{
    uint32_t *narrow = read;
    uint64_t *broad = read;
    if (kept < n) {
        int64_t to = 0;
        for (int64_t i = 0; i < n; i++) {
            found[to] = found[i];
            if (wide)
                broad[to] = broad[i];
            else
                narrow[to] = narrow[i];
            to += found[i] >= 0;
        }
    }
    uint32_t falls = 0;
    for (int64_t i = 1; i < kept; i++)
        falls += found[i] <= found[i - 1];
    return falls == 0;
}

/* Write the kept entries of a row by ascending column; return whether no column is there twice. `found` and `read` are
 * its columns, negative where left out, and values, of eight bytes if `wide`, else of four; the output has `room`
 * entries from `at` on. */
static RA_TARGET int VARIANT(place_row)(struct reading *r, int32_t *found, void *read, int64_t n, int64_t kept,
                                        int64_t at, int64_t room, int monotone, int type, int wide)
{
    enum { WIDE = -1 };
    uint64_t *words = r->room->words;
    if (monotone) {
        int ascend = wide ? VARIANT(close_up)(found, read, 1, n, kept) : VARIANT(close_up)(found, read, 0, n, kept);
        if (ascend && kept <= room) {
            char *target = (char *)r->out->values + ra_type_bytes[type] * at;
            memcpy(r->out->columns + at, found, 4 * (size_t)kept);
            if (wide)
                memcpy(target, read, 8 * (size_t)kept);
            else
                VARIANT(write_values)(read, kept, 0, target, type);
            return 1;
        }
        n = kept;
    }
    int64_t n_set = 0;
    switch (wide ? WIDE : type) {
    case WIDE:
        SLOTS(uint64_t, uint64_t, uint64_t)
    case RA_UINT8:
        SLOTS(uint32_t, uint8_t, uint8_t)
    case RA_UINT16:
        SLOTS(uint32_t, uint16_t, uint16_t)
    case RA_UINT32:
        SLOTS(uint32_t, uint32_t, uint32_t)
    case RA_UINT64:
        SLOTS(uint32_t, uint32_t, uint64_t)
    case RA_FLOAT32:
        SLOTS(uint32_t, uint32_t, float)
    default:
        SLOTS(uint32_t, uint32_t, double)
    }
    memcpy(r->out->columns + at, found, 4 * (size_t)least(n_set, room));
    return n_set == kept && n_set <= room;
}
#undef SLOTS

/* Count the columns that are kept, and where the first and the last of them are; -1 for one outside its map. */
RA_INLINE RA_TARGET int64_t VARIANT(count_kept)(const int32_t *found, int64_t n, int64_t *first, int64_t *end)
{
    int64_t kept = 0;
    int32_t lowest = 0;
    for (int64_t i = 0; i < n; i++) {
        kept += found[i] >= 0;
        lowest = found[i] < lowest ? found[i] : lowest;
    }
    if (lowest < -1)
        return -1;
    *first = 0;
    *end = kept ? n : 0;
    while (kept && found[*first] < 0)
        ++*first;
    while (kept && found[*end - 1] < 0)
        --*end;
    return kept;
}

static RA_TARGET int32_t VARIANT(gather_placed)(struct reading *r, int64_t *where, int32_t *which)
{
    const struct ra_rows *rows = r->rows;
    const struct ra_maps *maps = r->maps;
    for (int64_t i = 0; i < rows->n_order; i++) {
        int64_t row = rows->order[i];
        if (!row_fits(r, row, where))
            return RA_OUTSIDE;
        fetch_next(r, i, 1);
        int64_t g = rows->group[row], start = rows->start[0][row], n = rows->length[row];
        struct group_facts of = facts_of(r->arrays + 1, g);
        int type = value_type(r, of), wide = of.as_is && of.itemsize == 8;
        int64_t first = 0, end = 0, kept = -1;
        int32_t status = RA_GOOD;
        if (maps->wanted_bounds[g + 1] > maps->wanted_bounds[g]) {
            status = VARIANT(pick_row)(r, g, start, start + n, &kept, where, which);
            end = kept;
        }
        if (status == RA_GOOD && kept < 0) {
            int64_t begin = maps->bounds[g], n_map = maps->bounds[g + 1] - begin;
            *which = 0;
            status = VARIANT(take)(r, 0, g, start, start + n, maps->columns + begin, n_map, r->room->found, RA_UINT32, where);
            if (status == RA_GOOD) {
                kept = VARIANT(count_kept)(r->room->found, n, &first, &end);
                if (kept < 0) {
                    *where = row;
                    return RA_OUTSIDE;
                }
                *which = 1;
                start = rows->start[1][row];
                status = VARIANT(take)(r, 1, g, start + first, start + end, NULL, 0, r->room->values,
                                       wide ? RA_UINT64 : RA_UINT32, where);
            }
        }
        if (status != RA_GOOD)
            return status;
        int64_t at = rows->at[row], room = rows->at[row + 1] - at;
        if (kept > 0 && !VARIANT(place_row)(r, r->room->found + first, r->room->values, end - first, kept, at, room,
                                            maps->monotone[g], type, wide)) {
            *where = row;
            return RA_REPEATED;
        }
        r->out->counts[row] = kept;
    }
    return RA_GOOD;
}
