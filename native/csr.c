/* Rows of sparse matrices: check their order, renumber and sort their columns, regroup them by column, make them dense. */
#include "levels.h"

/* Tell whether row r lies within the entries. */
RA_INLINE int is_within(const struct ra_csr *rows, int64_t r)
{
    return rows->bounds[r] >= 0 && rows->bounds[r] <= rows->bounds[r + 1] && rows->bounds[r + 1] <= rows->n;
}

/* One function for each width of a column. */
#define CHECK_ORDER(T)                                                                                               \
    RA_INLINE int32_t check_order_##T(const struct ra_csr *rows, uint64_t n_columns, int64_t *where)                 \
    {                                                                                                                \
        const T *columns = rows->columns;                                                                            \
        for (int64_t r = 0; r < rows->n_rows; r++) {                                                                 \
            *where = r;                                                                                              \
            if (!is_within(rows, r))                                                                                 \
                return RA_BAD_BOUNDS;                                                                                \
            const T *row = columns + rows->bounds[r];                                                                \
            int64_t n = rows->bounds[r + 1] - rows->bounds[r];                                                       \
            /* As wide as a column, so that as many fit a register. */                                               \
            T falls = 0;                                                                                             \
            for (int64_t i = 1; i < n; i++)                                                                          \
                falls |= (T)(row[i] <= row[i - 1]);                                                                  \
            if (falls)                                                                                               \
                return RA_UNSORTED;                                                                                  \
            if (n && row[n - 1] >= n_columns)                                                                        \
                return RA_BAD_COLUMN;                                                                                \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }
CHECK_ORDER(uint8_t)
CHECK_ORDER(uint16_t)
CHECK_ORDER(uint32_t)
CHECK_ORDER(uint64_t)

RA_INLINE int32_t check_order(const struct ra_csr *rows, uint64_t n_columns, int64_t *where)
{
    RA_CHOOSE_WIDTH(rows->itemsize, check_order, rows, n_columns, where)
}

RA_VARIANTS(check_order, (const struct ra_csr *rows, uint64_t n_columns, int64_t *where), (rows, n_columns, where))

int32_t ra_check_order(const struct ra_csr *rows, int64_t n_columns, int64_t *where)
{
    return RA_CHOOSE(check_order)(rows, (uint64_t)n_columns, where);
}

/* Columns by width, and maps and new columns of 32 or 64 bits. */
#define COUNT_KEPT(T, M)                                                                                             \
    RA_INLINE int32_t count_kept_##M##_##T(const struct ra_csr *rows, const void *map, uint64_t n_map,               \
                                           int64_t *counts, int64_t *where)                                          \
    {                                                                                                                \
        const T *columns = rows->columns;                                                                            \
        const M *to = map;                                                                                           \
        for (int64_t r = 0; r < rows->n_rows; r++) {                                                                 \
            int64_t kept = 0;                                                                                        \
            *where = r;                                                                                              \
            if (!is_within(rows, r))                                                                                 \
                return RA_BAD_BOUNDS;                                                                                \
            for (int64_t i = rows->bounds[r]; i < rows->bounds[r + 1]; i++) {                                        \
                if (columns[i] >= n_map)                                                                             \
                    return RA_BAD_COLUMN;                                                                            \
                kept += to[columns[i]] >= 0;                                                                         \
            }                                                                                                        \
            counts[r] = kept;                                                                                        \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }

/* Sort few entries by insertion, stably; return whether a column is there twice. */
#define INSERT(M)                                                                                                    \
    static int insert_##M(M *columns, int64_t *at, int64_t n)                                                        \
    {                                                                                                                \
        int repeated = 0;                                                                                            \
        for (int64_t i = 1; i < n; i++) {                                                                            \
            M column = columns[i];                                                                                   \
            int64_t place = at[i], j = i;                                                                            \
            for (; j > 0 && columns[j - 1] > column; j--) {                                                          \
                columns[j] = columns[j - 1];                                                                         \
                at[j] = at[j - 1];                                                                                   \
            }                                                                                                        \
            repeated |= j > 0 && columns[j - 1] == column;                                                           \
            columns[j] = column;                                                                                     \
            at[j] = place;                                                                                           \
        }                                                                                                            \
        return repeated;                                                                                             \
    }

/* Sort many entries by setting a bit for each column and walking the bits, which are left zero. */
#define WALK_BITS(M)                                                                                                 \
    RA_INLINE int walk_bits_##M(M *columns, int64_t *at, int64_t n, uint64_t *words, int64_t *slots)                 \
    {                                                                                                                \
        int64_t lowest = INT64_MAX, highest = -1, out = 0;                                                           \
        int repeated = 0;                                                                                            \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            int64_t word = columns[i] >> 6;                                                                          \
            uint64_t bit = (uint64_t)1 << (columns[i] & 63);                                                         \
            repeated |= (words[word] & bit) != 0;                                                                    \
            words[word] |= bit;                                                                                      \
            slots[columns[i]] = at[i];                                                                               \
            lowest = least(lowest, word);                                                                            \
            highest = most(highest, word);                                                                           \
        }                                                                                                            \
        for (int64_t word = lowest; word <= highest; word++) {                                                       \
            uint64_t bits = words[word];                                                                             \
            words[word] = 0;                                                                                         \
            for (; bits; bits &= bits - 1, out++) {                                                                  \
                columns[out] = (M)(word << 6 | __builtin_ctzll(bits));                                               \
                at[out] = slots[columns[out]];                                                                       \
            }                                                                                                        \
        }                                                                                                            \
        return repeated;                                                                                             \
    }

#define FEW 24 /* entries that are sorted sooner by insertion */

#define MAP_ROWS(T, M)                                                                                               \
    RA_INLINE int32_t map_rows_##M##_##T(const struct ra_csr *rows, const void *map, int64_t n_map,                  \
                                         const int64_t *targets, void *out, int64_t *at, int64_t n_out,              \
                                         uint64_t *words, int64_t *slots, int64_t n_columns)                         \
    {                                                                                                                \
        const T *columns = rows->columns;                                                                            \
        const M *to = map;                                                                                           \
        int32_t state = RA_GOOD;                                                                                     \
        for (int64_t r = 0; r < rows->n_rows; r++) {                                                                 \
            M *found = (M *)out + targets[r];                                                                        \
            int64_t *places = at + targets[r], room = n_out - targets[r], n = 0;                                     \
            M previous = -1;                                                                                         \
            int ascending = 1;                                                                                       \
            if (!is_within(rows, r) || targets[r] < 0)                                                               \
                return RA_BAD_BOUNDS;                                                                                \
            for (int64_t i = rows->bounds[r]; i < rows->bounds[r + 1]; i++) {                                        \
                if (columns[i] >= (uint64_t)n_map)                                                                   \
                    return RA_BAD_COLUMN;                                                                            \
                M column = to[columns[i]];                                                                           \
                if (column < 0)                                                                                      \
                    continue;                                                                                        \
                if (column >= n_columns || n >= room)                                                                \
                    return RA_BAD_COLUMN;                                                                            \
                ascending &= column > previous;                                                                      \
                previous = column;                                                                                   \
                found[n] = column;                                                                                   \
                places[n++] = i;                                                                                     \
            }                                                                                                        \
            if (ascending)                                                                                           \
                continue;                                                                                            \
            if (n <= FEW ? insert_##M(found, places, n) : walk_bits_##M(found, places, n, words, slots))             \
                return RA_REPEATED;                                                                                  \
            state = RA_UNSORTED;                                                                                     \
        }                                                                                                            \
        return state;                                                                                                \
    }

#define EACH_WIDTH(F, M) F(uint8_t, M) F(uint16_t, M) F(uint32_t, M) F(uint64_t, M)
INSERT(int32_t)
INSERT(int64_t)
WALK_BITS(int32_t)
WALK_BITS(int64_t)
EACH_WIDTH(COUNT_KEPT, int32_t)
EACH_WIDTH(COUNT_KEPT, int64_t)
EACH_WIDTH(MAP_ROWS, int32_t)
EACH_WIDTH(MAP_ROWS, int64_t)

int32_t ra_count_kept(const struct ra_csr *rows, const void *map, int64_t n_map, int32_t map_itemsize,
                      int64_t *counts, int64_t *where)
{
    if (map_itemsize == 4)
        RA_CHOOSE_WIDTH(rows->itemsize, count_kept_int32_t, rows, map, (uint64_t)n_map, counts, where)
    RA_CHOOSE_WIDTH(rows->itemsize, count_kept_int64_t, rows, map, (uint64_t)n_map, counts, where)
}

RA_INLINE int32_t map_rows(const struct ra_csr *rows, const void *map, int64_t n_map, int32_t map_itemsize,
                           const int64_t *targets, void *columns, int64_t *at, int64_t n_out, uint64_t *words,
                           int64_t *slots, int64_t n_columns)
{
    if (map_itemsize == 4)
        RA_CHOOSE_WIDTH(rows->itemsize, map_rows_int32_t, rows, map, n_map, targets, columns, at, n_out, words, slots,
                        n_columns)
    RA_CHOOSE_WIDTH(rows->itemsize, map_rows_int64_t, rows, map, n_map, targets, columns, at, n_out, words, slots,
                 n_columns)
}

RA_VARIANTS(map_rows,
            (const struct ra_csr *rows, const void *map, int64_t n_map, int32_t map_itemsize, const int64_t *targets,
             void *columns, int64_t *at, int64_t n_out, uint64_t *words, int64_t *slots, int64_t n_columns),
            (rows, map, n_map, map_itemsize, targets, columns, at, n_out, words, slots, n_columns))

int32_t ra_map_rows(const struct ra_csr *rows, const void *map, int64_t n_map, int32_t map_itemsize,
                    const int64_t *targets, void *columns, int64_t *at, int64_t n_out, uint64_t *words,
                    int64_t *slots, int64_t n_columns)
{
    return RA_CHOOSE(map_rows)(rows, map, n_map, map_itemsize, targets, columns, at, n_out, words, slots, n_columns);
}

#define COUNT_COLUMNS(T)                                                                                             \
    static int32_t count_columns_##T(const void *columns, int64_t n, int64_t *counts, uint64_t n_columns)            \
    {                                                                                                                \
        const T *column = columns;                                                                                   \
        for (int64_t i = 0; i < n; i++)                                                                              \
            if (column[i] < n_columns)                                                                               \
                counts[column[i]]++;                                                                                 \
        return RA_GOOD;                                                                                              \
    }
COUNT_COLUMNS(uint8_t)
COUNT_COLUMNS(uint16_t)
COUNT_COLUMNS(uint32_t)
COUNT_COLUMNS(uint64_t)

int32_t ra_count_columns(const void *columns, int64_t n, int32_t itemsize, int64_t *counts, int64_t n_columns)
{
    RA_CHOOSE_WIDTH(itemsize, count_columns, columns, n, counts, (uint64_t)n_columns)
}

int32_t ra_claim_places(const uint32_t *columns, int64_t n, int64_t *taken, int64_t n_columns, int64_t *places)
{
    for (int64_t i = 0; i < n; i++) {
        if (columns[i] >= n_columns)
            return RA_BAD_COLUMN;
        places[i] = taken[columns[i]]++;
    }
    return RA_GOOD;
}

int32_t ra_move_runs(const void *values, int64_t n, const int64_t *starts, const int64_t *counts,
                     const int64_t *targets, int64_t n_runs, int32_t itemsize, void *out, int64_t n_out)
{
    for (int64_t run = 0; run < n_runs; run++) {
        int64_t start = starts[run], count = counts[run], target = targets[run];
        if (start < 0 || count < 0 || target < 0 || start > n || count > n - start || target > n_out || count > n_out - target)
            return RA_BAD_BOUNDS;
        if (count)
            memcpy((uint8_t *)out + target * itemsize, (const uint8_t *)values + start * itemsize,
                   (size_t)(count * itemsize));
    }
    return RA_GOOD;
}

#define COUNT_PLACES(T)                                                                                              \
    static int32_t count_places_##T(const void *at, int64_t n, const int32_t *place, uint64_t n_stored,              \
                                    int64_t *counts, int64_t n_rows, int32_t *places)                                \
    {                                                                                                                \
        const T *stored = at;                                                                                        \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            if (stored[i] >= n_stored)                                                                               \
                return RA_BAD_COLUMN;                                                                                \
            int32_t row = place[stored[i]];                                                                          \
            if (row < -1 || row >= n_rows)                                                                           \
                return RA_BAD_BOUNDS;                                                                                \
            places[i] = row;                                                                                         \
            /* Unwanted rows are counted, too: to leave them out would be a jump that is guessed wrongly. */         \
            counts[row + 1]++;                                                                                       \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }
COUNT_PLACES(uint8_t)
COUNT_PLACES(uint16_t)
COUNT_PLACES(uint32_t)
COUNT_PLACES(uint64_t)

int32_t ra_count_places(const void *at, int64_t n, int32_t itemsize, const int32_t *place, int64_t n_stored,
                        int64_t *counts, int64_t n_rows, int32_t *places)
{
    RA_CHOOSE_WIDTH(itemsize, count_places, at, n, place, (uint64_t)n_stored, counts, n_rows, places)
}

#define FILL_PLACES(V)                                                                                               \
    RA_INLINE int32_t fill_places_##V(const struct ra_columns *of, const int32_t *places,                            \
                                      const void *values, int64_t *cursor, int32_t *last, int64_t n_rows,            \
                                      void *columns, int32_t wide, void *out, int64_t n_out)                         \
    {                                                                                                                \
        const V *value = values;                                                                                     \
        for (int64_t k = 0; k < of->n; k++) {                                                                        \
            int64_t column = of->columns[k];                                                                         \
            if (of->bounds[k] < 0 || of->bounds[k + 1] > of->n_entries)                                              \
                return RA_BAD_BOUNDS;                                                                                \
            for (int64_t i = of->bounds[k]; i < of->bounds[k + 1]; i++) {                                            \
                int32_t row = places[i];                                                                             \
                if (row < 0)                                                                                         \
                    continue;                                                                                        \
                if (row >= n_rows)                                                                                   \
                    return RA_BAD_BOUNDS;                                                                            \
                if (last[row] == k + 1)                                                                              \
                    return RA_REPEATED;                                                                              \
                last[row] = (int32_t)(k + 1);                                                                        \
                int64_t at = cursor[row]++;                                                                          \
                if ((uint64_t)at >= (uint64_t)n_out)                                                                 \
                    return RA_BAD_BOUNDS;                                                                            \
                if (wide)                                                                                            \
                    ((int64_t *)columns)[at] = column;                                                               \
                else                                                                                                 \
                    ((int32_t *)columns)[at] = (int32_t)column;                                                      \
                ((V *)out)[at] = value[i];                                                                           \
            }                                                                                                        \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }
FILL_PLACES(uint8_t)
FILL_PLACES(uint16_t)
FILL_PLACES(uint32_t)
FILL_PLACES(uint64_t)

int32_t ra_fill_places(const struct ra_columns *of, const int32_t *places, const void *values,
                       int32_t itemsize, int64_t *cursor, int32_t *last, int64_t n_rows, void *columns, int32_t wide,
                       void *out, int64_t n_out)
{
    RA_CHOOSE_WIDTH(itemsize, fill_places, of, places, values, cursor, last, n_rows, columns, wide, out, n_out)
}

/* Columns by width, values by width. */
#define WRITE_DENSE(T, V)                                                                                            \
    RA_INLINE int32_t write_dense_##V##_##T(const struct ra_csr *rows, const void *values, void *out,                \
                                            int64_t n_columns, int64_t *where)                                       \
    {                                                                                                                \
        const T *columns = rows->columns;                                                                            \
        const V *value = values;                                                                                     \
        for (int64_t r = 0; r < rows->n_rows; r++) {                                                                 \
            V *line = (V *)out + r * n_columns;                                                                      \
            *where = r;                                                                                              \
            if (!is_within(rows, r))                                                                                 \
                return RA_BAD_BOUNDS;                                                                                \
            memset(line, 0, (size_t)n_columns * sizeof(V));                                                          \
            for (int64_t i = rows->bounds[r]; i < rows->bounds[r + 1]; i++) {                                        \
                if (columns[i] >= (uint64_t)n_columns)                                                               \
                    return RA_BAD_COLUMN;                                                                            \
                line[columns[i]] = value[i];                                                                         \
            }                                                                                                        \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }
EACH_WIDTH(WRITE_DENSE, uint8_t)
EACH_WIDTH(WRITE_DENSE, uint16_t)
EACH_WIDTH(WRITE_DENSE, uint32_t)
EACH_WIDTH(WRITE_DENSE, uint64_t)

int32_t ra_write_dense(const struct ra_csr *rows, const void *values, int32_t itemsize, void *out, int64_t n_columns,
                       int64_t *where)
{
    switch (itemsize) {
    case 1:
        RA_CHOOSE_WIDTH(rows->itemsize, write_dense_uint8_t, rows, values, out, n_columns, where)
    case 2:
        RA_CHOOSE_WIDTH(rows->itemsize, write_dense_uint16_t, rows, values, out, n_columns, where)
    case 4:
        RA_CHOOSE_WIDTH(rows->itemsize, write_dense_uint32_t, rows, values, out, n_columns, where)
    case 8:
        RA_CHOOSE_WIDTH(rows->itemsize, write_dense_uint64_t, rows, values, out, n_columns, where)
    default:
        return RA_BAD_TYPE;
    }
}

/* What is wrong with the entries of a file so far, as Python passes it in one array. */
enum finding { OUTSIDE, TWICE, FALLEN, FIRST_OUTSIDE, FIRST_TWICE, FIRST_FALLEN, LAST };

RA_INLINE void note(int64_t *found, enum finding kind, int64_t row)
{
    if (found[kind]++ == 0)
        found[kind + FIRST_OUTSIDE] = row;
}

#define SCAN_ENTRIES(T)                                                                                              \
    static void scan_row_##T(const T *places, int64_t n, int64_t row, int64_t *seen, int64_t *found,                 \
                             int64_t n_minor, int64_t last)                                                          \
    {                                                                                                                \
        for (int64_t i = 0; i < n; i++) {                                                                            \
            int64_t place = places[i];                                                                               \
            int twice = place == last;                                                                               \
            if (place < 0 || place >= n_minor) {                                                                     \
                note(found, OUTSIDE, row);                                                                           \
                continue;                                                                                            \
            }                                                                                                        \
            if (seen) {                                                                                              \
                twice = seen[place] == row + 1;                                                                      \
                seen[place] = row + 1;                                                                               \
            }                                                                                                        \
            if (twice)                                                                                               \
                note(found, TWICE, row);                                                                             \
            else if (place < last)                                                                                   \
                note(found, FALLEN, row);                                                                            \
            last = place;                                                                                            \
        }                                                                                                            \
        found[LAST] = last;                                                                                          \
    }                                                                                                                \
                                                                                                                     \
    RA_INLINE int32_t scan_entries_##T(const struct ra_csr *rows, int64_t first, int64_t *seen, int64_t n_minor,     \
                                       int64_t *found)                                                               \
    {                                                                                                                \
        for (int64_t r = 0; r < rows->n_rows; r++) {                                                                 \
            if (!is_within(rows, r))                                                                                 \
                return RA_BAD_BOUNDS;                                                                                \
            const T *row = (const T *)rows->columns + rows->bounds[r];                                               \
            int64_t n = rows->bounds[r + 1] - rows->bounds[r];                                                       \
            /* A row that may go on in another block is remembered place by place; of any other it is enough that it \
             * ascends. */                                                                                           \
            if (r > 0 && r < rows->n_rows - 1) {                                                                     \
                T falls = 0;                                                                                         \
                for (int64_t i = 1; i < n; i++)                                                                      \
                    falls |= (T)(row[i] <= row[i - 1]);                                                              \
                if (!n || (!falls && row[0] >= 0 && row[n - 1] < n_minor))                                           \
                    continue;                                                                                        \
            }                                                                                                        \
            scan_row_##T(row, n, first + r, seen, found, n_minor, r ? -1 : found[LAST]);                             \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }
SCAN_ENTRIES(int32_t)
SCAN_ENTRIES(int64_t)

RA_INLINE int32_t scan_entries(const struct ra_csr *rows, int64_t first, int64_t *seen, int64_t n_minor,
                               int64_t *found)
{
    if (rows->itemsize == 4)
        return scan_entries_int32_t(rows, first, seen, n_minor, found);
    return rows->itemsize == 8 ? scan_entries_int64_t(rows, first, seen, n_minor, found) : RA_BAD_TYPE;
}

RA_VARIANTS(scan_entries,
            (const struct ra_csr *rows, int64_t first, int64_t *seen, int64_t n_minor, int64_t *found),
            (rows, first, seen, n_minor, found))

int32_t ra_scan_entries(const struct ra_csr *rows, int64_t first, int64_t *seen, int64_t n_minor, int64_t *found)
{
    return RA_CHOOSE(scan_entries)(rows, first, seen, n_minor, found);
}
