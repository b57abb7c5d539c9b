/* A libFuzzer target: hostile bytes for every function that reads numbers from a store. See scripts/fuzz.
 *
 * The first byte of an input chooses the functions, the next seven their small arguments, the others are what a store
 * would hold. Every array lies in memory of its own and has exactly its size, so that AddressSanitizer sees each access
 * beyond it. Where a checksum belongs behind the bytes, the right one is put there: hostile bytes may have it too. */
#include <stdio.h>
#include <stdlib.h>

#include "../bits.h"
#include "../raggedatlas.h"

enum { MOST_ARRAYS = 64 };

static void *arrays[MOST_ARRAYS];
static int n_arrays;

/* Return zeroed memory for so many elements until the input is done. */
static void *room(int64_t n, int64_t itemsize)
{
    void *made = calloc(n * itemsize > 0 ? (size_t)n : 1, (size_t)(n * itemsize > 0 ? itemsize : 1));
    if (!made || n_arrays == MOST_ARRAYS)
        abort();
    return arrays[n_arrays++] = made;
}

static void *copy_of(const void *from, int64_t n_bytes)
{
    void *made = room(n_bytes, 1);
    if (n_bytes)
        memcpy(made, from, (size_t)n_bytes);
    return made;
}

static void expect(int sound, const char *what)
{
    if (sound)
        return;
    fprintf(stderr, "not so: %s\n", what);
    abort();
}

static int64_t itemsize_of(uint8_t choice) { return (int64_t)1 << (choice & 3); }

/* A packed chunk: whole, then in pieces, which must agree. */
static void packed(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    int64_t itemsize = itemsize_of(choice[0]), n = 1 + load16(choice + 1) % 5000;
    uint8_t *whole = room(n, itemsize), *stored = room(size + 4, 1);
    const uint8_t *bytes = copy_of(data, size);
    int32_t status = ra_unpack(bytes, size, n, itemsize, whole);
    expect((status == RA_GOOD) == (ra_check_packed(bytes, size, n, itemsize) == RA_GOOD), "one check for all");
    if (itemsize == 8)
        return;
    memcpy(stored, bytes, (size_t)size);
    store32(stored + size, ra_crc32c(0, stored, size));
    int64_t from = load16(choice + 3) % n, count = 1 + load16(choice + 5) % (n - from), where = -1;
    uint64_t address = (uint64_t)(uintptr_t)stored;
    int64_t stored_size = size + 4, bounds[2] = {0, 1}, target = 0;
    struct ra_chunks chunks = {&address, &stored_size, 1};
    struct ra_pieces pieces = {bounds, &from, &count, &target, 1};
    uint8_t *part = room(count, itemsize);
    int32_t again = ra_unpack_chunks(&chunks, &pieces, n, itemsize, part, count, &where);
    expect((status == RA_GOOD) == (again == RA_GOOD), "pieces are refused as the whole is");
    if (status == RA_GOOD)
        expect(!memcmp(part, whole + from * itemsize, (size_t)(count * itemsize)), "pieces are those of the whole");
}

/* What is packed comes back. */
static void packing(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    int64_t itemsize = itemsize_of(choice[0]), n = size / itemsize, n_breaks = choice[1] % 8;
    if (!n)
        return;
    const uint8_t *values = copy_of(data, n * itemsize);
    int64_t *breaks = room(n_breaks, 8), bytes = ra_packed_room(n, (int32_t)itemsize), at = 0;
    for (int64_t i = 0; i < n_breaks; i++)
        breaks[i] = at = least(n, at + choice[2 + i % 5]);
    uint8_t *out = room(bytes, 1), *back = room(n, itemsize);
    int64_t used = ra_pack(values, n, (int32_t)itemsize, breaks, n_breaks, out, bytes);
    expect(used >= 0 && used <= bytes, "the room is enough");
    expect(ra_unpack(copy_of(out, used), used, n, itemsize, back) == RA_GOOD, "what was packed is sound");
    expect(!memcmp(back, values, (size_t)(n * itemsize)), "what was packed comes back");
}

/* A plain or Blosc chunk, and pieces of it that the input chooses; and an LZF stream. */
static void frames(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    int64_t width = itemsize_of(choice[0]), chunk_bytes = width * (1 + load16(choice + 1) % 4000), where = -1;
    int64_t n_rows = chunk_bytes / width, given = least(size, 24), piece[3] = {0, n_rows, 0}, bounds[2] = {0, 1};
    if (choice[3] & 1) {
        memcpy(piece, data, (size_t)given);
        data += given;
        size -= given;
    }
    int checksum = choice[3] >> 1 & 1, kind = choice[3] >> 2 & 1 ? RA_BLOSC : RA_PLAIN;
    uint8_t *stored = room(size + 4, 1);
    memcpy(stored, data, (size_t)size);
    store32(stored + size, ra_crc32c(0, stored, size));
    stored = copy_of(stored, size + 4 * checksum);
    uint64_t address = (uint64_t)(uintptr_t)stored;
    int64_t stored_size = size + 4 * checksum;
    struct ra_chunks chunks = {&address, &stored_size, 1};
    struct ra_pieces pieces = {bounds, piece, piece + 1, piece + 2, 1};
    ra_decode_chunks(&chunks, &pieces, kind, checksum, chunk_bytes, room(chunk_bytes, 1), room(chunk_bytes, 1),
                     room(width, 1), width, room(chunk_bytes, 1), chunk_bytes, &where);
    ra_decode_lzf(copy_of(data, size), size, room(chunk_bytes, 1), chunk_bytes);
}

/* Bounds, columns, maps and values of sparse rows. */
static void sparse(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    int64_t n_rows = choice[0] % 6, itemsize = itemsize_of(choice[1]), n_map = choice[2] % 40, where = -1;
    int64_t n_bounds = 8 * (n_rows + 1);
    if (size < n_bounds)
        return;
    int64_t *bounds = copy_of(data, n_bounds);
    for (int64_t i = 0; i <= n_rows && choice[6] & 1; i++)
        bounds[i] = (int64_t)((uint64_t)bounds[i] & 63);
    int64_t n = (size - n_bounds) / itemsize, wide = choice[3] & 1, value_size = itemsize_of(choice[4]);
    struct ra_csr rows = {bounds, n_rows, copy_of(data + n_bounds, n * itemsize), n, (int32_t)itemsize};
    ra_check_order(&rows, n_map, &where);
    void *map = room(n_map, 4 + 4 * wide);
    int64_t *counts = room(n_rows, 8), *targets = room(n_rows, 8), n_new = choice[5] % 40;
    for (int64_t i = 0; i < n_map; i++) {
        int64_t to = (i * choice[5] + choice[4]) % 41 - 1;
        wide ? store64((int64_t *)map + i, (uint64_t)to) : store32((int32_t *)map + i, (uint32_t)to);
    }
    int64_t n_out = 0, *at;
    if (ra_count_kept(&rows, map, n_map, 4 + 4 * (int32_t)wide, counts, &where) == RA_GOOD)
        for (int64_t r = 0; r < n_rows; n_out += counts[r++])
            targets[r] = n_out;
    at = room(n_out, 8);
    ra_map_rows(&rows, map, n_map, 4 + 4 * (int32_t)wide, targets, room(n_out, 4 + 4 * wide), at, n_out,
                room(n_new / 64 + 1, 8), room(n_new, 8), n_new);
    ra_write_dense(&rows, room(n, value_size), (int32_t)value_size, room(n_rows * n_map, value_size), n_map, &where);
    int64_t *found = room(7, 8);
    if (itemsize >= 4)
        ra_scan_entries(&rows, 0, choice[6] & 2 ? room(n_map, 8) : NULL, n_map, found);
    ra_count_columns(rows.columns, n, rows.itemsize, room(n_map, 8), n_map);
    if (itemsize == 4) {
        uint32_t *places = room(n_map, 4);
        for (int64_t i = 0; i < n_map; i++)
            places[i] = choice[6] & 4 ? (uint32_t)(n_map - 1 - i) : choice[i % 7];
        ra_place_rows(&rows, room(n, value_size), 0, places, n_map, room(n_map / 64 + 1, 8),
                      room(64 * (n_map / 64 + 1), value_size), room(n, 4), room(n, value_size), (int32_t)value_size,
                      &where);
        ra_claim_places(rows.columns, n, room(n_map, 8), n_map, room(n, 8));
    }
    if (itemsize == 8) {
        const int64_t *numbers = rows.columns;
        int64_t n_runs = least(n_rows, n / 2);
        ra_move_runs(room(n_map, value_size), n_map, rows.bounds, numbers, numbers + n_runs, n_runs, (int32_t)value_size,
                     room(n_map, value_size), n_map);
    }
}

/* A column-sorted copy: stored rows of its entries, and bounds of its columns. */
static void columns(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    int64_t n_columns = choice[0] % 5, itemsize = itemsize_of(choice[1]), n_stored = 1 + choice[2] % 30;
    int64_t n_bounds = 8 * (n_columns + 1), n_rows = 1 + choice[3] % 20, value_size = itemsize_of(choice[4]);
    if (size < n_bounds)
        return;
    int64_t n = (size - n_bounds) / itemsize, *numbers = room(n_columns, 8), *counts = room(n_rows + 1, 8), n_out = 0;
    int64_t *cursor = room(n_rows, 8);
    int32_t *place = room(n_stored, 4), *places = room(n, 4);
    for (int64_t i = 0; i < n_stored; i++)
        place[i] = (int32_t)((i * choice[5]) % (n_rows + 1)) - 1;
    for (int64_t i = 0; i < n_columns; i++)
        numbers[i] = i;
    const void *at = copy_of(data + n_bounds, n * itemsize);
    if (ra_count_places(at, n, (int32_t)itemsize, place, n_stored, counts, n_rows, places) != RA_GOOD)
        memcpy(places, at, (size_t)least(4 * n, n * itemsize));
    for (int64_t r = 0; r < n_rows; n_out += counts[++r])
        cursor[r] = n_out;
    int64_t *bounds = copy_of(data, n_bounds);
    for (int64_t i = 0; i <= n_columns && choice[6] & 1; i++)
        bounds[i] = (int64_t)((uint64_t)bounds[i] & 31);
    struct ra_columns of = {bounds, numbers, n_columns, n};
    int32_t wide = choice[6] >> 1 & 1;
    ra_fill_places(&of, places, room(n, value_size), (int32_t)value_size, cursor, room(n_rows, 4), n_rows,
                   room(n_out, 4 + 4 * wide), wide, room(n_out, value_size), n_out);
}

/* A fragment index: all of it, some fragments, and the rows they name. */
static void fragments(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    enum { SOME = 5, WIDTH = 3 };
    int64_t cut = choice[0] & 1 ? load16(choice + 1) % (size + 1) : size, where = -1, n = cut < size ? 2 : 1;
    int64_t bounds[3] = {0, cut, size}, *counts = room(2 * n, 8), n_rows = choice[3], n_out = 0;
    const uint8_t *bytes = copy_of(data, size);
    if (ra_count_fragments(bytes, size, bounds, n, counts, &where) == RA_GOOD) {
        int64_t all = counts[0] + (n > 1 ? counts[1] : 0), listed = counts[n] + (n > 1 ? counts[n + 1] : 0);
        uint8_t *is_run = room(all, 1);
        int64_t *starts = room(all, 8), *sizes = room(all, 8), *rows = room(listed, 8);
        if (ra_read_fragments(bytes, size, bounds, n, is_run, starts, sizes, all, rows, listed, &where) == RA_GOOD) {
            struct ra_fragments known = {is_run, starts, sizes, all, rows, listed};
            for (int64_t f = 0; f < all && sizes[f] < 1000 && n_out < 5000; f++) {
                n_out = sizes[f];
                expect(ra_expand_fragments(&known, &f, 1, copy_of(NULL, 0), 0) == (n_out ? RA_BAD_SIZE : RA_GOOD), "room");
                if (n_arrays > MOST_ARRAYS - 16)
                    break;
                ra_expand_fragments(&known, &f, 1, room(n_out, 8), n_out);
            }
        }
    }
    int64_t wanted[SOME], *spans = room(3 * SOME, 8), *places = room(SOME, 8), out_rows = choice[4];
    for (int i = 0; i < SOME; i++) {
        wanted[i] = (i ? wanted[i - 1] : 0) + choice[5] % 50;
        places[i] = (int64_t)choice[6] * i - 1;
    }
    if (ra_locate_fragments(bytes, size, wanted, SOME, n_rows, spans) == RA_GOOD)
        ra_copy_fragments(bytes, size, room(n_rows, WIDTH), n_rows * WIDTH, spans, places, SOME, WIDTH,
                          room(out_rows, WIDTH), out_rows * WIDTH);
}

/* Manifests back to back, which must be written as they were read; and the same bytes as a list of byte strings. */
static void manifests(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    int64_t n = choice[0] % 5, n_dims = choice[1] % 5, totals[2], where = -1, *bounds = room(n + 1, 8);
    const uint8_t *bytes = copy_of(data, size);
    if (size >= 4) {
        int64_t items = least(load32(bytes), size);
        ra_frame_items(bytes, size, room(items, 8), room(items, 8), items);
    }
    if (ra_measure_manifests(bytes, size, n_dims, bounds, n) != RA_GOOD)
        return;
    expect(ra_count_manifests(bytes, size, bounds, n, n_dims, totals, &where) == RA_GOOD, "what was measured counts");
    int64_t k = totals[0];
    struct ra_manifests out = {room(n + 1, 8), room(k * n_dims, 8), room(k, 1), room(k, 8), room(k, 8),
                               room(totals[1], 8), n, n_dims, k, totals[1]};
    expect(ra_read_manifests(bytes, size, bounds, &out, &where) == RA_GOOD, "what was counted reads");
    uint8_t *again = room(size, 1);
    expect(ra_write_manifests(&out, again, size) == RA_GOOD && !memcmp(again, bytes, (size_t)size), "manifests come back");
}

/* Rows of one group, columns in one chunk, values in another; each is packed or a stream. */
static void gather(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    enum { ROWS = 4, COLUMNS = 200 };
    int64_t itemsize = (int64_t)1 << choice[0] % 3, n = 1 + load16(choice + 1) % 700, half = size / 2, where = -1;
    int type = choice[6] >> 4 & 3, streamed[2] = {choice[0] / 3 & 1, choice[6] >> 6 & 1};
    int as_is = streamed[1] && choice[6] >> 7, wide = type == RA_UINT64;
    int64_t widths[2] = {itemsize, as_is ? (int64_t)1 << type : itemsize};
    int64_t order[ROWS], start[ROWS], others[ROWS], stop[ROWS], length[ROWS], at[ROWS + 1] = {0}, counts[ROWS], longest = 0, sizes[2];
    int32_t group[ROWS] = {0}, which = -1;
    uint64_t addresses[2];
    for (int i = 0; i < ROWS; i++) {
        start[i] = choice[3] * i % (n + 1);
        stop[i] = least(n, start[i] + choice[4] % COLUMNS);
        order[i] = i;
        others[i] = streamed[1] ? choice[5] * i : start[i];
        length[i] = stop[i] - start[i];
        longest = most(longest, length[i]);
        at[i + 1] = at[i] + length[i];
    }
    struct ra_array stored[2];
    int64_t groups[2][4];
    for (int k = 0; k < 2; k++) {
        int64_t bytes = k ? size - half : half, sum = streamed[k] ? 0 : 4;
        uint8_t *chunk = room(bytes + sum, 1);
        memcpy(chunk, k ? data + half : data, (size_t)bytes);
        if (sum)
            store32(chunk + bytes, ra_crc32c(0, chunk, bytes));
        addresses[k] = (uint64_t)(uintptr_t)chunk;
        sizes[k] = bytes + sum;
        int64_t facts[4] = {0, streamed[k] ? INT64_MAX : n, (streamed[k] ? RA_STREAM : RA_PACKED) + 16 * (k && as_is), widths[k]};
        memcpy(groups[k], facts, sizeof facts);
        stored[k] = (struct ra_array){addresses + k, sizes + k, room(1, 1), 1, groups[k]};
    }
    int32_t *map = room(COLUMNS + 1, 4), *targets = room(COLUMNS, 4), kept = 0, step = 1 + choice[5] % 9;
    uint32_t *wanted = room(COLUMNS, 4);
    for (int32_t i = 0; i < COLUMNS; i++) {
        map[i] = choice[6] & 1 || i % step == 0 ? (choice[6] & 2 ? COLUMNS - 1 - i : i) : -1;
        if (map[i] >= 0 && kept < 30) {
            wanted[kept] = (uint32_t)i;
            targets[kept++] = map[i];
        }
    }
    map[COLUMNS] = -2;
    int64_t bounds[2] = {0, COLUMNS + 1}, wanted_bounds[2] = {0, choice[6] & 4 && !streamed[0] && !streamed[1] ? kept : 0};
    uint8_t monotone = !(choice[6] & 2);
    struct ra_rows rows = {order, ROWS, group, {start, others}, length, at, ROWS, 1};
    struct ra_maps maps = {map, bounds, &monotone, wanted, targets, wanted_bounds};
    int plain = choice[6] & 8 && choice[6] & 1;
    struct ra_result out = {room(at[ROWS], 4), room(at[ROWS], 8), plain ? NULL : counts, at[ROWS], COLUMNS, type};
    struct ra_room scratch = {{NULL, NULL}, NULL, 0, room(longest + 16, 4), room(longest + 16, 4 + 4 * wide), room(longest + 16, 8),
                              longest, room(COLUMNS / 64 + 1, 8), room(COLUMNS + 1, 4 + 4 * wide)};
    int32_t status = ra_gather(&rows, stored, &maps, &out, &scratch, &where, &which);
    if (status != RA_GOOD || !plain || (type != RA_UINT32 && !as_is))
        return;
    /* Rows as stored are what unpacking gives. */
    for (int k = 0; k < 2; k++) {
        const uint8_t *whole = room(n, widths[k]), *found = k ? out.values : (void *)out.columns;
        int64_t width = k ? (int64_t)1 << type : 4, *from = k ? others : start;
        if (streamed[k])
            whole = (const uint8_t *)(uintptr_t)addresses[k];
        else if (at[ROWS])
            expect(ra_unpack((const uint8_t *)(uintptr_t)addresses[k], sizes[k] - 4, n, itemsize, (void *)whole) == RA_GOOD,
                   "a chunk that was gathered from unpacks");
        for (int i = 0; i < ROWS; i++)
            for (int64_t j = 0; j < stop[i] - start[i]; j++) {
                uint64_t value = 0;
                memcpy(&value, whole + (from[i] + j) * widths[k], (size_t)widths[k]);
                if (!k && (choice[6] & 2))
                    value = COLUMNS - 1 - value;
                expect(!memcmp(found + width * (at[i] + j), &value, (size_t)width), "gathered rows are those of the chunk");
            }
    }
}

/* Lines and graphs, whose offsets and links are numbers of a store too. */
static void geometry(const uint8_t *choice, const uint8_t *data, int64_t size)
{
    int64_t n = choice[0] % 9, n_lines = choice[1] % 4, need = 8 * (n_lines + 1), n_edges = choice[2] % 8, found;
    if (size >= need)
        ra_weigh_lines(room(3 * n, 8), n, 3, copy_of(data, need), n_lines, room(n, 8), room(2 * (n + 1), 8),
                       room(n + 1, 8), n + 1);
    need = 8 * (4 * n_edges + n + 1);
    if (size < need)
        return;
    int64_t *numbers = copy_of(data, need);
    for (int64_t i = 0; i < need / 8 && choice[3] & 1; i++)
        numbers[i] = (int64_t)((uint64_t)numbers[i] & 15);
    ra_walk_chains(copy_of(numbers, 32 * n_edges), n_edges, copy_of(numbers + 4 * n_edges, 8 * (n + 1)),
                   copy_of(data, n), n, room(n_edges, 1), room(2 * n_edges, 8), room(2 * n_edges, 8), &found);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const targets[])(const uint8_t *, const uint8_t *, int64_t) = {
        packed, packing, frames, sparse, columns, fragments, manifests, gather, geometry,
    };
    if (size < 8)
        return 0;
    int level = data[0] >> 6;
    ra_set_level(level < 3 ? level : RA_AVX512);
    targets[(data[0] & 63) % (sizeof targets / sizeof *targets)](data + 1, data + 8, (int64_t)size - 8);
    while (n_arrays)
        free(arrays[--n_arrays]);
    return 0;
}
