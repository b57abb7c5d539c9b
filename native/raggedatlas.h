/* The compiled loops of raggedatlas: every function that Python calls.
 *
 * Rules that hold for all of them
 *
 * Arguments. Pointers come with the number of elements behind them, in elements unless the name says bytes. Nothing
 *   is kept after the call: memory belongs to the caller, who also says how much there is. Pointers with no elements
 *   behind them may be NULL. Arrays are C contiguous, in the machine's byte order, aligned to their elements; where
 *   bytes of a file are read, any address will do. No two arrays overlap unless it is said.
 * Trust. Sizes and addresses of the caller's own arrays are trusted; numbers that come out of stored bytes (bounds of
 *   rows, columns, lengths, heads, offsets) are not, and are checked against these sizes before they are used. A
 *   violation is a status, never an access out of bounds.
 * Status. Functions that can fail return one of `enum ra_status`; where the place matters they write it to
 *   `where`. After a failure the contents of outputs are unspecified.
 * Threads. No function keeps state, so any may run in several threads at once. Python releases its lock meanwhile.
 * Variants. Loops that gain by it are compiled for several levels of vector instructions (see `ra_set_level`) and
 *   give the same bytes at each.
 *
 * The C is C11 with the builtins that gcc, clang and zig share. It uses no libm, no allocator except where it is
 * said, and nothing of CPython, so that one library per platform serves every Python.
 */
#ifndef RAGGEDATLAS_H
#define RAGGEDATLAS_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define RA_API __declspec(dllexport)
#else
#define RA_API __attribute__((visibility("default")))
#endif

/* Changed with every change of a function's arguments or meaning; Python refuses a library with another number. */
#define RA_ABI 8

enum ra_status {
    RA_GOOD = 0,
    RA_BAD_CHECKSUM = 1, /* the crc32c behind a chunk is not that of its bytes */
    RA_BAD_SIZE = 2,     /* a chunk, its head or its tables do not fit the size that is expected or stored */
    RA_BAD_FRAME = 3,    /* compressed bytes cannot be decoded */
    RA_OUTSIDE = 4,      /* a row lies outside its group, or a column outside its map */
    RA_REPEATED = 5,     /* a row names a column twice */
    RA_OTHER_FRAME = 6,  /* a sound Blosc head of a compressor or filter that is not decoded here */
    RA_BAD_BOUNDS = 7,   /* bounds or places that fall, are negative, or lie beyond their array */
    RA_BAD_COLUMN = 8,   /* a column, or another number from a file, that is beyond those there are */
    RA_UNSORTED = 9,     /* the columns of a row do not ascend strictly */
    RA_BAD_TYPE = 10,    /* an element of a size that a function does not take */
    RA_CUT_SHORT = 11,   /* bytes end before what they declare */
    RA_TRAILING = 12,    /* bytes go on behind what they declare */
    RA_BAD_MODE = 13,    /* a block of a manifest has an unknown mode */
    RA_NEGATIVE = 14,    /* a start, a count or a row is negative */
    RA_NO_HEAD = 15,     /* a fragment index is shorter than its head */
    RA_NO_MAGIC = 16,    /* it begins with other bytes */
    RA_BAD_VERSION = 17, /* it has another version or flags */
    RA_BAD_RUNS = 18,    /* it declares more runs than fragments */
    RA_BAD_BITS = 19,    /* its bitmap has not as many bits as there are runs */
    RA_BAD_LISTS = 20,   /* it has other bytes than its lists need */
    RA_BAD_OFFSETS = 21, /* its offsets fall or do not begin at 0 */
    RA_BEYOND = 22,      /* it names a row that there is not */
    RA_MISSING = 23,     /* it is asked for a fragment that there is not */
    RA_REFUSED = 24,     /* the operating system refused a call */
    RA_UNKNOWN_CALL = 25, /* the operating system has no such call */
};

/* ---- levels.c: which vector instructions are used ---- */

enum ra_level { RA_BASELINE = 0, RA_AVX2 = 1, RA_AVX512 = 2 };

/* Return RA_ABI as it was when the library was compiled. */
RA_API int32_t ra_abi(void);

/* Return the highest level that this machine and its operating system allow. On other processors than x86-64 that is
 * RA_BASELINE, which there includes what every such processor has (NEON on arm64). */
RA_API int32_t ra_best_level(void);

/* Use the variants of a level from now on; return the level used, which is `ra_best_level()` if that is lower.
 * Loading the library chooses the best. To be called while no other function runs. RA_BASELINE also turns off
 * instructions for crc32c, so that every variant can be tested on one machine. */
RA_API int32_t ra_set_level(int32_t level);

/* ---- hashes.c ---- */

/* Extend a crc32c (Castagnoli, reflected, as in RFC 3720) by bytes; 0 begins a new one. Uses the instructions of
 * SSE4.2 in three streams, which hides their latency of three cycles, those of ARMv8, or tables. */
RA_API uint32_t ra_crc32c(uint32_t crc, const uint8_t *data, int64_t n_bytes);

/* Replace numbers, (n,), from 0 to below `size`, at most 2**62, by their images under a permutation of these, which `keys`
 * select: a Feistel network with a round for each key. Returns RA_OUTSIDE for a number that is not among them. */
RA_API int32_t ra_permute(int64_t *numbers, int64_t n, int64_t size, const uint64_t *keys, int64_t n_keys);

/* Replace each number, (n,), from 0 to below its size, at most 2**62, by its image under a permutation of that many, which its seed selects.
 * Neighbours of one seed and size share the work. Returns RA_OUTSIDE for a number that is not among them. */
RA_API int32_t ra_permute_each(int64_t *numbers, const int64_t *sizes, const uint64_t *seeds, int64_t n);

/* ---- files.c: ranges of bytes of a file ---- */

/* Read ranges of an open file, the descriptor `file`, whose position stays: `sizes[i]` bytes from `offsets[i]` on to `out + targets[i]`. Ranges
 * that are outside of `out`, (n_out,), are refused. Returns RA_CUT_SHORT where the file ends before the range `where` does, RA_REFUSED with the
 * error number in `where`, and on Windows RA_UNKNOWN_CALL. */
RA_API int32_t ra_read_file(int32_t file, const int64_t *offsets, const int64_t *sizes, const int64_t *targets, int64_t n, uint8_t *out,
                            int64_t n_out, int64_t *where);

/* ---- frames.c: chunks that are plain or Blosc, in runs ---- */

/* RA_STREAM is a chunk that the caller has decoded, of any number of entries. */
enum ra_chunk_kind { RA_PLAIN = 0, RA_BLOSC = 1, RA_PACKED = 2, RA_STREAM = 3 };

/* Return into how many pieces `ra_split_ranges` cuts. `starts` and `ends`, (n,), are row ranges that begin at 0 or
 * later; a range that ends before it begins has no piece. `chunk` is positive. */
RA_API int64_t ra_count_pieces(const int64_t *starts, const int64_t *ends, int64_t n, int64_t chunk);

/* Cut row ranges at chunk borders. Writes to `pieces`, (4, n_pieces) with the number that `ra_count_pieces` gives:
 * of each piece its chunk, its first row inside the chunk, its rows, and its first row in the output. */
RA_API void ra_split_ranges(const int64_t *starts, const int64_t *ends, int64_t n, int64_t chunk, int64_t *pieces,
                            int64_t n_pieces);

/* Stored chunks: where the bytes of each are and how many; -1 for one that is not stored, which holds fill values. */
struct ra_chunks {
    const uint64_t *addresses; /* (n,) */
    const int64_t *sizes;      /* (n,) */
    int64_t n;
};

/* Pieces of decoded chunks and where they go; piece i belongs to chunk c where bounds[c] <= i < bounds[c + 1]. */
struct ra_pieces {
    const int64_t *bounds;  /* (chunks + 1,), ascending, of numbers up to n */
    const int64_t *sources; /* (n,) first row inside the chunk */
    const int64_t *lengths; /* (n,) rows */
    const int64_t *targets; /* (n,) first row in the output */
    int64_t n;
};

/* Check and decode a run of chunks of one size and copy their pieces to the output.
 *
 * kind, checksum  an `ra_chunk_kind`, and whether a crc32c follows each chunk
 * scratch         chunk_bytes, for a decoded chunk
 * work            chunk_bytes, for a block before its bytes are put back into order
 * fill            (width,) bytes of a row of fill values; chunk_bytes is a multiple of width
 * out             out_bytes
 * where           the number of the first bad chunk
 *
 * Returns RA_BAD_SIZE also where a piece lies outside its chunk or the output; RA_OTHER_FRAME where a frame is sound
 * so far but of another compressor: the caller decodes it by other means and goes on behind it. LZ4 is decoded here
 * instead of through a library, because the frames are untrusted and no wheel promises to export its functions. */
RA_API int32_t ra_decode_chunks(const struct ra_chunks *chunks, const struct ra_pieces *pieces, int32_t kind,
                                int32_t checksum, int64_t chunk_bytes, uint8_t *scratch, uint8_t *work,
                                const uint8_t *fill, int64_t width, uint8_t *out, int64_t out_bytes, int64_t *where);

/* Decompress an LZF stream, as h5py writes them, that must fill `out`, (n_out,), exactly. Returns RA_BAD_FRAME if it does
 * not. */
RA_API int32_t ra_decode_lzf(const uint8_t *in, int64_t n_in, uint8_t *out, int64_t n_out);

/* ---- packed.c: the packed codec, see docs/reference/packed-codec.md ---- */

enum ra_type { RA_UINT8 = 0, RA_UINT16 = 1, RA_UINT32 = 2, RA_UINT64 = 3, RA_FLOAT32 = 4, RA_FLOAT64 = 5 };

/* Return the bytes of output that packing `n` values of `itemsize` bytes needs at most; a part of it is scratch. */
RA_API int64_t ra_packed_room(int64_t n, int32_t itemsize);

/* Pack one chunk of `n` unsigned integers, at least one, of `itemsize` (1, 2, 4, 8) bytes to `out`, `out_bytes` as
 * `ra_packed_room` says or more. `breaks` are places, ascending, where a block should begin if the chunk does not
 * ascend; they only make it smaller and faster. Returns the bytes written, -1 where the room is too small. */
RA_API int64_t ra_pack(const void *values, int64_t n, int32_t itemsize, const int64_t *breaks, int64_t n_breaks,
                       uint8_t *out, int64_t out_bytes);

/* Pack chunks of `per_chunk` values, each with its crc32c behind it, one behind the other. `breaks` are places among
 * all values; they are overwritten. `out_bytes` is at least n_chunks times `ra_packed_room` plus four. Writes where each
 * chunk ends to `ends`, (n_chunks,), and returns the bytes written or -1 as `ra_pack` does. */
RA_API int64_t ra_pack_chunks(const void *values, int64_t n_chunks, int64_t per_chunk, int32_t itemsize,
                              int64_t *breaks, int64_t n_breaks, uint8_t *out, int64_t out_bytes, int64_t *ends);

/* Check the head and tables of a packed chunk of `size` bytes, without a checksum, that must hold `n` values of
 * `itemsize` bytes: every block lies inside, together they have n values, a bitmap has as many bits as its block has
 * values, every exception a place in its block. Returns RA_GOOD or RA_BAD_SIZE. After this check no content can lead a
 * reader out of the chunk or its output, so that blocks are read without any. */
RA_API int32_t ra_check_packed(const uint8_t *data, int64_t size, int64_t n, int64_t itemsize);

/* Check a packed chunk as `ra_check_packed` does and unpack it to `out`, (n,) of its element type. */
RA_API int32_t ra_unpack(const uint8_t *data, int64_t size, int64_t n, int64_t itemsize, void *out);

/* Check packed chunks of `per_chunk` values of 1, 2 or 4 bytes, with a crc32c behind each, and unpack pieces of them,
 * and only the blocks that hold these, to `out`, (n_out,). A chunk that is not stored is zero. Writes the number of the
 * first bad chunk to `where`. */
RA_API int32_t ra_unpack_chunks(const struct ra_chunks *chunks, const struct ra_pieces *pieces, int64_t per_chunk,
                                int64_t itemsize, void *out, int64_t n_out, int64_t *where);

/* ---- gather.c: rows of many ragged groups into one CSR ---- */

/* Rows to read; (n_rows,) unless said. */
struct ra_rows {
    const int64_t *order; /* (n_order,) rows in the order in which they are read: that of the store, mostly */
    int64_t n_order;
    const int32_t *group;
    const int64_t *start[2]; /* first entry in the columns and in the values of the group */
    const int64_t *length;   /* entries */
    const int64_t *at;           /* (n_rows + 1,) first output entry of each, as `ra_arrange_rows` gives it */
    int64_t n_rows, n_groups;
};

/* The columns or the values of all groups: their chunks in slots, one group behind the other. */
struct ra_array {
    const uint64_t *addresses; /* (n_slots,) */
    const int64_t *sizes;      /* (n_slots,) bytes; -1 for a chunk that is not stored, which is zero */
    uint8_t *states;           /* (n_slots,) 1 for a packed chunk that has been checked; shared by threads */
    int64_t n_slots;
    const int64_t *groups; /* (n_groups, 4): first slot; entries of a chunk, at least 1; `ra_chunk_kind`, plus 8 where a
                              crc32c follows chunks that are not packed, plus 16 where values are of the result's type;
                              bytes of an entry, 1, 2 or 4, of such values also 8 */
};

/* What becomes of columns. */
struct ra_maps {
    const int32_t *columns;       /* maps one behind the other; -1 leaves a column out. Each ends with -2, for columns
                                     that it does not have. Other entries are below `ra_result.n_columns`. */
    const int64_t *bounds;        /* (n_groups + 1,) */
    const uint8_t *monotone;      /* (n_groups,) whether the kept entries ascend: then a sorted row stays sorted */
    const uint32_t *wanted;       /* kept columns, ascending, of packed groups that keep so few that these are searched */
    const int32_t *targets;       /* what they map to */
    const int64_t *wanted_bounds; /* (n_groups + 1,) of both */
};

/* The output: columns and values have room for n. `counts`, (n_rows,), is filled with the entries of each row where
 * columns are left out or sorted; if it is NULL, rows are written as stored, which needs complete maps. Stored values
 * are taken as unsigned integers and converted to the type (an `ra_type`), those of the result's type are copied as they
 * are; signed integers and floats of two bytes are unsigned integers of their size here. */
struct ra_result {
    int32_t *columns;
    void *values;
    int64_t *counts;
    int64_t n, n_columns;
    int32_t type;
};

/* Scratch of one thread. */
struct ra_room {
    uint8_t *chunks[2]; /* (chunk_bytes,) each, for a decoded chunk of columns and of values */
    uint8_t *work;      /* (chunk_bytes,) */
    int64_t chunk_bytes;
    int32_t *found;   /* (longest + 16,), like the next two; unused where rows are written as stored */
    void *values;     /* of eight bytes where the result's type has as many, else of four */
    int64_t *numbers;
    int64_t longest;  /* entries of the longest row */
    uint64_t *words;  /* (n_columns / 64 + 1,) zero, and left so */
    void *slots;      /* (n_columns + 1,) of the type, or at least of its size */
};

/* Check rows, bound their entries in the result, and list those that have any with where they are stored.
 *
 * group, start, stop  (n,); group -1 for an empty row
 * facts               (n_groups, 4): entries of each group, those of the groups before it, columns that it has, and
 *                     columns that are kept
 * column_grid, value_grid      (n_groups, 2): entries of a shard, and the group's first shard
 * column_mapped, value_mapped  by shard, whether it is mapped into memory
 * order, places       (n,): filled with the rows to read, and where each begins among the entries of all groups
 * at                  (n + 1,): filled with the first output entry of each row
 * found               (3,): rows to read, entries of the longest, whether all shards are mapped
 *
 * Returns RA_OUTSIDE, or RA_REPEATED for more entries than columns, with the row in `found[0]`. */
RA_API int32_t ra_arrange_rows(const int32_t *group, const int64_t *start, const int64_t *stop, int64_t n,
                               const int64_t *facts, int64_t n_groups, const int64_t *column_grid,
                               const uint8_t *column_mapped, const int64_t *value_grid, const uint8_t *value_mapped,
                               int64_t *order, int64_t *places, int64_t *at, int64_t *found);

/* Read rows into a CSR: find their chunks, unpack the blocks that hold them, map columns, sort where asked. `arrays`
 * are two: columns and values. On failure `where` is the slot of the bad chunk and `which` its array, or `where` is the
 * row for RA_OUTSIDE and RA_REPEATED.
 *
 * Packed chunks are checked when they are first read and not again; of the others the one decoded last is kept. While a
 * row is read, the cache lines of the next are asked for. Rows that must be sorted and do not come so are marked in a
 * bitmap over all columns and read off it, which takes no comparison; where few columns are wanted, packed blocks are
 * searched for them instead of unpacked into the map; such a row has the same start in columns and values. */
RA_API int32_t ra_gather(const struct ra_rows *rows, const struct ra_array *arrays, const struct ra_maps *maps,
                         const struct ra_result *out, const struct ra_room *room, int64_t *where, int32_t *which);

/* ---- csr.c: rows of sparse matrices ---- */

/* Rows: row r has the entries bounds[r] <= i < bounds[r + 1]. Columns may be signed integers: they are compared as
 * unsigned ones, so that a negative column is beyond every matrix. Every function that takes rows checks that bounds do
 * not fall and lie within the entries, RA_BAD_BOUNDS, and columns where they are used, RA_BAD_COLUMN. */
struct ra_csr {
    const int64_t *bounds; /* (n_rows + 1,) */
    int64_t n_rows;
    const void *columns; /* (n,) */
    int64_t n;
    int32_t itemsize; /* bytes of a column: 1, 2, 4 or 8 */
};

/* Check that the columns of every row ascend strictly and are below n_columns. Returns RA_UNSORTED where they do not
 * ascend; `where` is the row. */
RA_API int32_t ra_check_order(const struct ra_csr *rows, int64_t n_columns, int64_t *where);

/* Count the entries of every row whose column is kept: `map`, (n_map,), gives its new column in 4 or 8 bytes, -1 for none.
 * Writes `counts`, (n_rows,). */
RA_API int32_t ra_count_kept(const struct ra_csr *rows, const void *map, int64_t n_map, int32_t map_itemsize,
                             int64_t *counts, int64_t *where);

/* Write the new columns of every row, ascending, and for each the entry it came from.
 *
 * map, targets  as `ra_count_kept` takes the map; (n_rows,) the first output entry of every row
 * columns, at   (n_out,) of the map's type and int64_t; rows of several calls may go to one output
 * words, slots  (n_columns / 64 + 1,) zeros, left zero unless the call fails, and (n_columns,)
 * n_columns     how many new columns there are
 *
 * Returns RA_UNSORTED where a row had to be sorted, RA_REPEATED where two entries of a row have one new column. */
RA_API int32_t ra_map_rows(const struct ra_csr *rows, const void *map, int64_t n_map, int32_t map_itemsize,
                           const int64_t *targets, void *columns, int64_t *at, int64_t n_out,
                           uint64_t *words, int64_t *slots, int64_t n_columns);

/* Add to `counts`, (n_columns,), how often each column is named; others are not counted. */
RA_API int32_t ra_count_columns(const void *columns, int64_t n, int32_t itemsize, int64_t *counts, int64_t n_columns);

/* Give every entry the next free place of its column: `taken`, (n_columns,), has the next of each and is moved on;
 * `places`, (n,), is written. */
RA_API int32_t ra_claim_places(const uint32_t *columns, int64_t n, int64_t *taken, int64_t n_columns, int64_t *places);

/* Copy runs: `counts[i]` elements of `values`, (n,), from `starts[i]` on to `out`, (n_out,), from `targets[i]` on. */
RA_API int32_t ra_move_runs(const void *values, int64_t n, const int64_t *starts, const int64_t *counts,
                            const int64_t *targets, int64_t n_runs, int32_t itemsize, void *out, int64_t n_out);

/* Find the output row of every entry of a column-sorted copy, and count those of each.
 *
 * at      (n,) integers of 1, 2, 4 or 8 bytes, the stored row of each entry
 * place   (n_stored,) output row of every stored row, -1 where it is not wanted
 * counts  (n_rows + 1,), added to: unwanted entries, then those of each row
 * places  (n,), written */
RA_API int32_t ra_count_places(const void *at, int64_t n, int32_t itemsize, const int32_t *place, int64_t n_stored,
                               int64_t *counts, int64_t n_rows, int32_t *places);

/* Columns of a column-sorted copy: column k has the entries bounds[k] <= i < bounds[k + 1]. */
struct ra_columns {
    const int64_t *bounds;  /* (n + 1,) */
    const int64_t *columns; /* (n,) the column of the output, ascending */
    int64_t n;
    int64_t n_entries;
};

/* Write entries that come column by column into their rows, so that the columns of every row ascend.
 *
 * places, values  (n_entries,) output row, -1 where it is not wanted; values of 1, 2, 4 or 8 bytes
 * cursor, last    (n_rows,) first output entry of every row, moved on; (n_rows,) zeros, used up
 * columns, out    (n_out,) columns of 8 bytes where `wide`, else of 4; values
 *
 * Returns RA_REPEATED where a column names a row twice. */
RA_API int32_t ra_fill_places(const struct ra_columns *of, const int32_t *places, const void *values,
                              int32_t itemsize, int64_t *cursor, int32_t *last, int64_t n_rows, void *columns,
                              int32_t wide, void *out, int64_t n_out);

/* Write rows into `out`, (n_rows, n_columns), zeros included, row by row, so that each is in the cache when its entries
 * are placed. Values have 1, 2, 4 or 8 bytes. */
RA_API int32_t ra_write_dense(const struct ra_csr *rows, const void *values, int32_t itemsize, void *out,
                              int64_t n_columns, int64_t *where);

/* Look for entries that are out of range, there twice, or out of order, in one block of a file's sparse matrix.
 *
 * rows   with signed columns of 4 or 8 bytes
 * first  number of the block's first row
 * seen   (n_minor,) for each column one more than the last row that was found to have it, kept between blocks; or NULL:
 *        then only neighbours are compared
 * found  (7,), added to: how many entries are out of range, twice, out of order; the first row of each, -1 for none; and
 *        the last column, which a row that began in the block before continues from, -1 for none */
RA_API int32_t ra_scan_entries(const struct ra_csr *rows, int64_t first, int64_t *seen, int64_t n_minor,
                               int64_t *found);

/* ---- ingest.c: passes over what is added ---- */

/* Return whether floats of 4 or 8 bytes are all whole and within 32 bits, and write the smallest and the largest to
 * `bounds`, (2,); they mean nothing if not. */
RA_API int32_t ra_scan_whole(const void *values, int64_t n, int32_t itemsize, int64_t *bounds);

/* Count the values of every row of `values`, (n_rows, n_columns), that are not zero: `bounds`, (n_rows + 1,), is where
 * each begins and the last ends. Of floats, also of 2 bytes, neither zero counts, and what is no number does. */
RA_API int32_t ra_count_dense(const void *values, int64_t n_rows, int64_t n_columns, int32_t itemsize, int32_t is_float,
                              int64_t *bounds);

/* Take those values and their columns, into arrays of bounds[n_rows] elements; never more than the bounds allow. */
RA_API int32_t ra_take_dense(const void *values, int64_t n_rows, int64_t n_columns, int32_t itemsize, int32_t is_float,
                             const int64_t *bounds, uint32_t *columns, void *kept);

/* Renumber the columns of rows and sort each row by the new numbers: one bit a column, then the bits in their order.
 *
 * rows          with columns of 4 bytes
 * values        (rows->n,) unsigned integers of the output's type, or floats of 4 bytes, which become such integers; of
 *               floats that are none the output is unspecified
 * places        (n_columns,) a permutation: the new number of each column
 * words, slots  (n_columns / 64 + 1,) zeros, left zero unless the call fails, and 64 * (n_columns / 64 + 1) elements of
 *               the output's type
 * columns, out  (rows->n,), of which the rows' own are written
 * itemsize      of the output: 1, 2, 4, or without floats 8
 * where         the row with a bad column
 *
 * Returns RA_REPEATED where a row names a column twice, RA_BAD_TYPE where `places` is no permutation. */
RA_API int32_t ra_place_rows(const struct ra_csr *rows, const void *values, int32_t floats, const uint32_t *places,
                             int64_t n_columns, uint64_t *words, void *slots, uint32_t *columns, void *out,
                             int32_t itemsize, int64_t *where);

/* Take unsigned integers into a running hash, in turn into each of its 16 lanes; where blocks begin makes no difference.
 * `state`, (17,), has the lanes and how many numbers they took in. It tells different contents apart, not forged ones. */
RA_API int32_t ra_mix(const void *values, int64_t n, int32_t itemsize, uint64_t *state);

/* ---- manifests.c: lists of bytes and manifests of vector stores, docs/reference/vectors.md ---- */

/* Find the items of a vlen-bytes chunk: a count of 4 bytes, then of each item its length in 4 bytes and its bytes.
 * Writes to `starts` and `stops`, (n,) for the n that the chunk declares, the bytes of every item. Returns RA_CUT_SHORT
 * or RA_TRAILING where the chunk has other bytes. */
RA_API int32_t ra_frame_items(const uint8_t *data, int64_t n_bytes, int64_t *starts, int64_t *stops, int64_t n);

/* Find where n manifests end that stand back to back: `bounds`, (n + 1,), is written. `n_dims` is the number of
 * coordinates of a chunk. Returns RA_CUT_SHORT, RA_TRAILING, RA_BAD_MODE or RA_NEGATIVE. */
RA_API int32_t ra_measure_manifests(const uint8_t *data, int64_t n_bytes, int64_t n_dims, int64_t *bounds, int64_t n);

/* Manifests, taken apart: object i has the blocks bounds[i] <= b < bounds[i + 1]. A block has a chunk and a mode: one
 * fragment (0), a run (1), or a list (2), which is `counts[b]` of `items` from `starts[b]` on. */
struct ra_manifests {
    int64_t *bounds; /* (n + 1,), ascending */
    int64_t *chunks; /* (n_blocks, n_dims) */
    uint8_t *modes;  /* (n_blocks,), like the next two */
    int64_t *starts;
    int64_t *counts;
    int64_t *items; /* (n_items,) */
    int64_t n, n_dims, n_blocks, n_items;
};

/* Count the blocks and the list items of manifests: manifest i is the bytes bounds[i] to bounds[i + 1]. `totals`, (2,),
 * is written; `where` is the first bad manifest. Returns what ra_measure_manifests does, or RA_BAD_BOUNDS. */
RA_API int32_t ra_count_manifests(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, int64_t n,
                                  int64_t n_dims, int64_t *totals, int64_t *where);

/* Take manifests apart; `out` has the room that ra_count_manifests told, and all its arrays are written. */
RA_API int32_t ra_read_manifests(const uint8_t *data, int64_t n_bytes, const int64_t *bounds,
                                 const struct ra_manifests *out, int64_t *where);

/* Write manifests back to back into `out`, which they fill. Returns RA_BAD_BOUNDS where a block lies beyond the items
 * or the blocks, RA_BAD_SIZE where `out` has not exactly the room. */
RA_API int32_t ra_write_manifests(const struct ra_manifests *of, uint8_t *out, int64_t n_bytes);

/* ---- fragments.c: fragment indexes (ZVFG) of vector stores ----
 *
 * An index says which rows of a chunk belong to each fragment. It has a head (magic, version, fragments F, runs R: four
 * bytes each), a bitmap of F bits, padded to 8 bytes, that are 1 for runs, R runs (start and count, 8 bytes each), and
 * where F is not 0 the offsets of the F - R lists and their end (4 bytes each) and the rows that the lists name (8 bytes
 * each). Head, bitmap and sizes are checked by every function that reads an index: it is cheap, and no call depends on
 * another having been made. */

/* Count the fragments and the rows of lists of indexes: index c is the bytes bounds[c] to bounds[c + 1]. `counts`,
 * (2, n), is written; `where` is the first bad index. */
RA_API int32_t ra_count_fragments(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, int64_t n,
                                  int64_t *counts, int64_t *where);

/* Read indexes one behind the other: of each fragment whether it is a run, its first row, or where its list begins among
 * all `rows`, and its count. The room is what ra_count_fragments told, else RA_BAD_SIZE. */
RA_API int32_t ra_read_fragments(const uint8_t *data, int64_t n_bytes, const int64_t *bounds, int64_t n,
                                 uint8_t *is_run, int64_t *starts, int64_t *counts, int64_t n_fragments, int64_t *rows,
                                 int64_t n_rows, int64_t *where);

/* Find fragments of one index, `wanted`, (n,), ascending, of a chunk of `n_rows` rows, without reading the others. Writes
 * to `spans`, (n, 3), the first row of a run, or -1; the byte of the index where a list begins; and how many rows. */
RA_API int32_t ra_locate_fragments(const uint8_t *data, int64_t n_bytes, const int64_t *wanted, int64_t n,
                                   int64_t n_rows, int64_t *spans);

/* Fragments as ra_read_fragments gives them. */
struct ra_fragments {
    const uint8_t *is_run; /* (n,), like the next two */
    const int64_t *starts;
    const int64_t *counts;
    int64_t n;
    const int64_t *rows; /* (n_rows,) */
    int64_t n_rows;
};

/* Write the rows of fragments `wanted`, (n,), one after the other into `out`, (n_out,), which they fill. Returns RA_BEYOND
 * for a fragment or a list that is not there, RA_BAD_SIZE where they do not fill `out`. */
RA_API int32_t ra_expand_fragments(const struct ra_fragments *of, const int64_t *wanted, int64_t n, int64_t *out,
                                   int64_t n_out);

/* Copy rows of `size` bytes, at least 1, of a chunk's cell. Fragment p, a row of `spans` as ra_locate_fragments wrote it
 * for the index `data`, goes to row places[p] of `out` and those behind it. */
RA_API int32_t ra_copy_fragments(const uint8_t *data, int64_t n_bytes, const uint8_t *cell, int64_t cell_bytes,
                                 const int64_t *spans, const int64_t *places, int64_t n, int64_t size, uint8_t *out,
                                 int64_t out_bytes);

/* ---- geometry.c: positions, lines and graphs ---- */

/* Number the cells of a grid that positions, (n, n_dims) floats of 4 or 8 bytes, lie in: `codes`, (n,), counts them from
 * `low`, the first axis first, with `spans` cells on each axis; `edges` are their lengths, n_dims of each. The product of
 * the spans is below 2**62. Returns RA_OUTSIDE where a position lies in none of these cells. */
RA_API int32_t ra_number_cells(const void *positions, int64_t n, int64_t n_dims, int32_t itemsize, const double *edges,
                               const int64_t *low, const int64_t *spans, int64_t *codes);

/* Give each point of each line the largest tolerance at which Douglas and Peucker's algorithm keeps it; ends infinity.
 * A point never weighs more than the one that split its piece, so that what is kept at a larger tolerance is part of what
 * is kept at a smaller one.
 *
 * points, weights  (n, n_dims) and (n,); weights of points of no line are left as they are
 * offsets          (n_lines + 1,): line i has the points offsets[i] <= j < offsets[i + 1]
 * pieces, bounds   (room, 2) and (room,) scratch; room is one more than the longest line has points */
RA_API int32_t ra_weigh_lines(const double *points, int64_t n, int64_t n_dims, const int64_t *offsets, int64_t n_lines,
                              double *weights, int64_t *pieces, double *bounds, int64_t room);

/* Follow every edge of a graph from fixed vertex to fixed vertex.
 *
 * adjacency  (2 * n_edges, 2): the other end and the edge; those of vertex v are bounds[v] to bounds[v + 1]
 * fixed      (n,), among them all vertices that have not two edges
 * used       (n_edges,) zeros, used up
 * members    (2 * n_edges,): the vertices of the chains, both ends included
 * chains     (n_edges, 2): of each chain its end in `members` and its first edge
 * n_chains   (1,): how many there are
 *
 * A ring without a fixed vertex begins and ends at its lowest one. Returns RA_BAD_BOUNDS, or RA_OUTSIDE for an end or an
 * edge that there is not, or a chain that goes on nowhere. */
RA_API int32_t ra_walk_chains(const int64_t *adjacency, int64_t n_edges, const int64_t *bounds, const uint8_t *fixed,
                              int64_t n, uint8_t *used, int64_t *members, int64_t *chains, int64_t *n_chains);

#endif
