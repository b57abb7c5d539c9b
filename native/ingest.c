/* Passes over blocks that are added: bounds of floats, dense to sparse, new numbers for columns, a running hash. */
#include "levels.h"

/* ---- floats that are whole ---- */

/* The limit is the largest float of 32 bits that is an int32, too; what is beyond it, or no number, is not equal to
 * the integer that is made of it. */
#define STEP 256 /* floats that are looked at in one turn: in one loop for all, compilers make a jump of the limit */
#define SCAN_WHOLE(T, BITS)                                                                                          \
    RA_INLINE int32_t scan_whole_##T(const T *values, int64_t n, int64_t *bounds)                                    \
    {                                                                                                                \
        const T limit = 2147483520;                                                                                  \
        int32_t low = INT32_MAX, high = INT32_MIN, whole[STEP];                                                      \
        T inside[STEP];                                                                                              \
        BITS strange = 0;                                                                                            \
        for (int64_t start = 0; start < n; start += STEP) {                                                          \
            const T *value = values + start;                                                                         \
            int64_t m = least(STEP, n - start);                                                                      \
            for (int64_t i = 0; i < m; i++)                                                                          \
                inside[i] = value[i] < limit ? value[i] : limit;                                                     \
            for (int64_t i = 0; i < m; i++)                                                                          \
                whole[i] = (int32_t)(inside[i] > -limit ? inside[i] : -limit);                                       \
            for (int64_t i = 0; i < m; i++)                                                                          \
                strange |= (BITS)((T)whole[i] != value[i]);                                                          \
            for (int64_t i = 0; i < m; i++) {                                                                        \
                low = whole[i] < low ? whole[i] : low;                                                               \
                high = whole[i] > high ? whole[i] : high;                                                            \
            }                                                                                                        \
        }                                                                                                            \
        bounds[0] = low;                                                                                             \
        bounds[1] = high;                                                                                            \
        return !strange;                                                                                             \
    }
SCAN_WHOLE(float, int32_t)
SCAN_WHOLE(double, int64_t)

RA_INLINE int32_t scan_integers(const void *values, int64_t n, int32_t itemsize, int64_t *bounds)
{
    return itemsize == 4 ? scan_whole_float(values, n, bounds) : scan_whole_double(values, n, bounds);
}

RA_VARIANTS(scan_integers, (const void *values, int64_t n, int32_t itemsize, int64_t *bounds),
            (values, n, itemsize, bounds))

int32_t ra_scan_whole(const void *values, int64_t n, int32_t itemsize, int64_t *bounds)
{
    return RA_CHOOSE(scan_integers)(values, n, itemsize, bounds);
}

/* ---- dense to sparse ---- */

#define DENSE(T)                                                                                                     \
    RA_INLINE int32_t count_dense_##T(const void *values, int64_t n_rows, int64_t n_columns, int32_t is_float,       \
                                      int64_t *bounds)                                                               \
    {                                                                                                                \
        const T *row = values, ignored = is_float ? (T)((T)1 << (8 * sizeof(T) - 1)) : 0, counted = (T)~ignored;     \
        bounds[0] = 0;                                                                                               \
        for (int64_t r = 0; r < n_rows; r++, row += n_columns) {                                                     \
            int64_t count = 0;                                                                                       \
            for (int64_t i = 0; i < n_columns; i++)                                                                  \
                count += (row[i] & counted) != 0;                                                                    \
            bounds[r + 1] = bounds[r] + count;                                                                       \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }                                                                                                                \
                                                                                                                     \
    RA_INLINE int32_t take_dense_##T(const void *values, int64_t n_rows, int64_t n_columns, int32_t is_float,        \
                                     const int64_t *bounds, uint32_t *columns, void *kept)                           \
    {                                                                                                                \
        const T *row = values, ignored = is_float ? (T)((T)1 << (8 * sizeof(T) - 1)) : 0, counted = (T)~ignored;     \
        for (int64_t r = 0; r < n_rows; r++, row += n_columns) {                                                     \
            /* Every value is written, and the next one over it unless it is kept: nothing to be guessed wrongly. */ \
            int64_t at = bounds[r], end = bounds[r + 1];                                                             \
            for (int64_t i = 0; i < n_columns && at < end; i++) {                                                    \
                columns[at] = (uint32_t)i;                                                                           \
                ((T *)kept)[at] = row[i];                                                                            \
                at += (row[i] & counted) != 0;                                                                       \
            }                                                                                                        \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }
DENSE(uint8_t)
DENSE(uint16_t)
DENSE(uint32_t)
DENSE(uint64_t)

RA_INLINE int32_t count_dense(const void *values, int64_t n_rows, int64_t n_columns, int32_t itemsize,
                              int32_t is_float, int64_t *bounds)
{
    RA_CHOOSE_WIDTH(itemsize, count_dense, values, n_rows, n_columns, is_float, bounds)
}

RA_VARIANTS(count_dense,
            (const void *values, int64_t n_rows, int64_t n_columns, int32_t itemsize, int32_t is_float, int64_t *bounds),
            (values, n_rows, n_columns, itemsize, is_float, bounds))

int32_t ra_count_dense(const void *values, int64_t n_rows, int64_t n_columns, int32_t itemsize, int32_t is_float,
                       int64_t *bounds)
{
    return RA_CHOOSE(count_dense)(values, n_rows, n_columns, itemsize, is_float, bounds);
}

int32_t ra_take_dense(const void *values, int64_t n_rows, int64_t n_columns, int32_t itemsize, int32_t is_float,
                      const int64_t *bounds, uint32_t *columns, void *kept)
{
    RA_CHOOSE_WIDTH(itemsize, take_dense, values, n_rows, n_columns, is_float, bounds, columns, kept)
}

/* ---- new numbers for columns ---- */

/* List the set bits from `first` on, ascending, and clear them, with the value of each. The number of the first word is
 * word; up to `room` entries may be written, which is at least as many as there are bits. */
#define TAKE_MARKED(O)                                                                                               \
    RA_INLINE int64_t take_marked_##O(uint64_t *restrict words, int64_t n_words, const O *restrict slots,            \
                                      uint32_t *restrict columns, O *restrict values, int64_t room)                  \
    {                                                                                                                \
        int64_t n = 0;                                                                                               \
        for (int64_t w = 0; w < n_words; w++) {                                                                      \
            uint64_t bits = words[w];                                                                                \
            if (!bits)                                                                                               \
                continue;                                                                                            \
            words[w] = 0;                                                                                            \
            int64_t end = n + __builtin_popcountll(bits);                                                            \
            if (end + 3 <= room) {                                                                                   \
                /* Most words have few bits or very many; four at a time wastes little and is foretold well. */      \
                for (int64_t at = n; at < end; at += 4)                                                              \
                    for (int k = 0; k < 4; k++) {                                                                    \
                        /* Bit 63 stands in where no bit is left: to ask would be a branch. */                       \
                        int64_t place = 64 * w + __builtin_ctzll(bits | (uint64_t)1 << 63);                          \
                        columns[at + k] = (uint32_t)place;                                                           \
                        values[at + k] = slots[place];                                                               \
                        bits &= bits - 1;                                                                            \
                    }                                                                                                \
            } else {                                                                                                 \
                for (int64_t at = n; bits; bits &= bits - 1, at++) {                                                 \
                    columns[at] = (uint32_t)(64 * w + __builtin_ctzll(bits));                                        \
                    values[at] = slots[columns[at]];                                                                 \
                }                                                                                                    \
            }                                                                                                        \
            n = end;                                                                                                 \
        }                                                                                                            \
        return n;                                                                                                    \
    }
TAKE_MARKED(uint8_t)
TAKE_MARKED(uint16_t)
TAKE_MARKED(uint32_t)
TAKE_MARKED(uint64_t)

#define PLACE_ROWS(NAME, V, O)                                                                                       \
    RA_INLINE int32_t place_rows_##NAME##_##O(const struct ra_csr *rows, const void *values, const uint32_t *places, \
                                           int64_t n_columns, uint64_t *words, void *slots, uint32_t *columns,       \
                                           void *out, int64_t *where)                                                \
    {                                                                                                                \
        int64_t n_words = (n_columns + 63) / 64, end = rows->bounds[rows->n_rows];                                   \
        O *restrict slot = slots;                                                                                    \
        uint64_t *restrict word = words;                                                                             \
        for (int64_t r = 0; r < rows->n_rows; r++) {                                                                 \
            int64_t first = rows->bounds[r], last = rows->bounds[r + 1];                                             \
            *where = r;                                                                                              \
            if (first < 0 || first > last || last > end || end > rows->n)                                            \
                return RA_BAD_BOUNDS;                                                                                \
            const uint32_t *column = (const uint32_t *)rows->columns;                                                \
            const V *value = values;                                                                                 \
            for (int64_t i = first; i < last; i++) {                                                                 \
                if (column[i] >= (uint64_t)n_columns)                                                                \
                    return RA_BAD_COLUMN;                                                                            \
                uint32_t place = places[column[i]];                                                                  \
                word[place >> 6] |= (uint64_t)1 << (place & 63);                                                     \
                slot[place] = (O)(int64_t)value[i];                                                                  \
            }                                                                                                        \
            if (take_marked_##O(words, n_words, slot, columns + first, (O *)out + first, end - first) < last - first)\
                return RA_REPEATED;                                                                                  \
        }                                                                                                            \
        return RA_GOOD;                                                                                              \
    }
PLACE_ROWS(same, uint8_t, uint8_t)
PLACE_ROWS(same, uint16_t, uint16_t)
PLACE_ROWS(same, uint32_t, uint32_t)
PLACE_ROWS(same, uint64_t, uint64_t)
PLACE_ROWS(float, float, uint8_t)
PLACE_ROWS(float, float, uint16_t)
PLACE_ROWS(float, float, uint32_t)

RA_INLINE int32_t place_rows(const struct ra_csr *rows, const void *values, int32_t floats, const uint32_t *places,
                             int64_t n_columns, uint64_t *words, void *slots, uint32_t *columns, void *out,
                             int32_t itemsize, int64_t *where)
{
    if (!floats)
        RA_CHOOSE_WIDTH(itemsize, place_rows_same, rows, values, places, n_columns, words, slots, columns, out, where)
    if (itemsize == 1)
        return place_rows_float_uint8_t(rows, values, places, n_columns, words, slots, columns, out, where);
    if (itemsize == 2)
        return place_rows_float_uint16_t(rows, values, places, n_columns, words, slots, columns, out, where);
    if (itemsize == 4)
        return place_rows_float_uint32_t(rows, values, places, n_columns, words, slots, columns, out, where);
    return RA_BAD_TYPE;
}

RA_VARIANTS(place_rows,
            (const struct ra_csr *rows, const void *values, int32_t floats, const uint32_t *places, int64_t n_columns,
             uint64_t *words, void *slots, uint32_t *columns, void *out, int32_t itemsize, int64_t *where),
            (rows, values, floats, places, n_columns, words, slots, columns, out, itemsize, where))

int32_t ra_place_rows(const struct ra_csr *rows, const void *values, int32_t floats, const uint32_t *places,
                      int64_t n_columns, uint64_t *words, void *slots, uint32_t *columns, void *out, int32_t itemsize,
                      int64_t *where)
{
    if (rows->itemsize != 4)
        return RA_BAD_TYPE;
    for (int64_t i = 0; i < n_columns; i++)
        if (places[i] >= (uint64_t)n_columns)
            return RA_BAD_TYPE;
    return RA_CHOOSE(place_rows)(rows, values, floats, places, n_columns, words, slots, columns, out, itemsize, where);
}

/* ---- a running hash ---- */

#define HASH_LANES 16

RA_INLINE uint64_t mixed(uint64_t lane, uint64_t value)
{
    lane = (lane ^ value) * 0x9e3779b97f4a7c15u;
    return lane ^ lane >> 29;
}

#define MIX(T)                                                                                                       \
    RA_INLINE int32_t mix_##T(const void *values, int64_t n, uint64_t *state)                                        \
    {                                                                                                                \
        const T *value = values;                                                                                     \
        uint64_t lanes[HASH_LANES];                                                                                  \
        int64_t at = (int64_t)(state[HASH_LANES] % HASH_LANES), i = 0;                                               \
        state[HASH_LANES] += (uint64_t)n;                                                                            \
        for (; i < n && at % HASH_LANES; i++, at++)                                                                  \
            state[at] = mixed(state[at], value[i]);                                                                  \
        memcpy(lanes, state, sizeof lanes);                                                                          \
        for (; n - i >= HASH_LANES; i += HASH_LANES)                                                                 \
            for (int lane = 0; lane < HASH_LANES; lane++)                                                            \
                lanes[lane] = mixed(lanes[lane], value[i + lane]);                                                   \
        memcpy(state, lanes, sizeof lanes);                                                                          \
        for (int lane = 0; i < n; i++, lane++)                                                                       \
            state[lane] = mixed(state[lane], value[i]);                                                              \
        return RA_GOOD;                                                                                              \
    }
MIX(uint8_t)
MIX(uint16_t)
MIX(uint32_t)
MIX(uint64_t)

RA_INLINE int32_t mix(const void *values, int64_t n, int32_t itemsize, uint64_t *state)
{
    RA_CHOOSE_WIDTH(itemsize, mix, values, n, state)
}

RA_VARIANTS(mix, (const void *values, int64_t n, int32_t itemsize, uint64_t *state), (values, n, itemsize, state))

int32_t ra_mix(const void *values, int64_t n, int32_t itemsize, uint64_t *state)
{
    return RA_CHOOSE(mix)(values, n, itemsize, state);
}
