"""Compare the compiled loops with what NumPy or SciPy does in a plain expression, on one thread, and check that both agree.

    python benchmarks/loops.py                    # some minutes
    python benchmarks/loops.py --entries 200000   # the same on less: does it all run?

A loop whose expression takes less than 1.3 times as long does not belong into ``native/``. Loops that NumPy and SciPy have no
expression for (a checksum, codecs, parsing of items whose length stands before them, lines and graphs that are walked) are not timed;
`SEQUENTIAL` names them with the reason. Each pair is measured in turns; the ratio of the medians is printed as a page in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from ctypes import byref, c_int64
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from raggedatlas.ingest.csc import STEP_ENTRIES, _sorted
from raggedatlas.ingest.group_writer import reorder_columns
from raggedatlas.ingest.values import scan_integers, to_csr
from raggedatlas.model.batch import CsrBlock, DenseBlock
from raggedatlas.store.native import I64, RaColumns, csr_of, library
from raggedatlas.store.sparse import count_columns, count_kept, move_runs, remap_csr
from raggedatlas.wings.vectors.geometry import Fragments, Objects
from raggedatlas.wings.vectors.storage.codecs import (
    LIST,
    RUN,
    SINGLE,
    encode_fragments,
    encode_manifests,
    fragment_rows,
    locate_fragments,
)

ROUNDS = 7
N_COLUMNS = 30_000
PER_ROW = 2_000

SEQUENTIAL = {
    "ra_crc32c": "a checksum; the core has no package that computes crc32c",
    "ra_decode_chunks": "decodes LZ4 and copies pieces; measured as the standard codec in kernels.py",
    "ra_pack, ra_pack_chunks, ra_check_packed, ra_unpack, ra_unpack_chunks": "the packed codec",
    "ra_gather": "reads packed chunks; measured against SciPy in kernels.py",
    "ra_mix": "each step of the hash needs the one before",
    "ra_frame_items, ra_measure_manifests, ra_count_manifests, ra_read_manifests": "where an item begins is known after the one before",
    "ra_count_fragments, ra_read_fragments, ra_locate_fragments": "many small blobs, each with a head of its own",
    "ra_weigh_lines, ra_walk_chains": "walk lines and graphs",
}


class Pair(NamedTuple):
    """A compiled loop and the expression that does the same; both return what they made."""

    name: str
    calls: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--entries", type=int, default=4_000_000)
    parser.add_argument("--only", help="loops whose name contains this")
    asked = parser.parse_args()
    print("| loop | by | loop, ms | expression, ms | ratio |\n|---|---|---|---|---|")
    for pair in pairs(asked.entries):
        if asked.only and asked.only not in pair.name:
            continue
        assert_equal(pair)
        ours, theirs = zip(*((seconds(pair.ours), seconds(pair.theirs)) for _ in range(ROUNDS)), strict=True)
        times = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
        print(
            f"| `{pair.name}` | {pair.calls} | {times[0]:.3g} | {times[1]:.3g} | {times[1] / times[0]:.2f} |",
            flush=True,
        )
    print("\n| no expression | why |\n|---|---|")
    for name, why in SEQUENTIAL.items():
        print(f"| `{name}` | {why} |")


def seconds(call: Callable[[], Any]) -> float:
    """Time one call, or as many as 20 ms hold."""
    n, start = 0, time.process_time()
    while True:
        call()
        n += 1
        passed = time.process_time() - start
        if passed > 0.02:
            return passed / n


def assert_equal(pair: Pair) -> None:
    """Require that loop and expression give the same."""
    for ours, theirs in zip(pair.ours(), pair.theirs(), strict=True):
        assert np.array_equal(ours, theirs), pair.name


def pairs(n: int) -> Iterator[Pair]:
    """Make the data, some `n` entries of rows of about `PER_ROW`, and yield the pairs."""
    rng = np.random.default_rng(0)
    for n_ranges in 512, 100_000:
        yield from _ranges(rng, n_ranges)
    n_rows = n // PER_ROW
    columns = np.concatenate([np.sort(rng.choice(N_COLUMNS, PER_ROW, replace=False)) for _ in range(n_rows)]).astype(
        np.uint32
    )
    indptr = np.arange(0, n_rows * PER_ROW + 1, PER_ROW)
    values = rng.poisson(2, columns.size).astype(np.float32)
    yield from _checked(indptr, columns)
    yield from _renumbered(rng, indptr, columns, values)
    yield from _by_column(indptr, columns, values)
    yield from _dense(rng, indptr, columns, values)
    yield from _geometry(rng, n)


def _ranges(rng: np.random.Generator, n: int) -> Iterator[Pair]:
    """Ranges of entries, one for each row."""
    starts = np.sort(rng.integers(0, 2**30, n))
    ends, chunk = starts + rng.integers(0, 2 * PER_ROW, n), 2**16

    def cut() -> Any:
        n_pieces = library().ra_count_pieces(starts, ends, starts.size, chunk)
        pieces = np.empty((4, n_pieces), np.int64)
        library().ra_split_ranges(starts, ends, starts.size, chunk, pieces, n_pieces)
        return pieces

    def cut_numpy() -> Any:
        first = starts // chunk
        counts = np.where(ends > starts, (ends - 1) // chunk - first + 1, 0)
        begin = np.cumsum(counts) - counts
        chunks = np.repeat(first - begin, counts) + np.arange(counts.sum())
        low = np.maximum(np.repeat(starts, counts), chunks * chunk)
        lengths = np.minimum(np.repeat(ends, counts), (chunks + 1) * chunk) - low
        return chunks, low - chunks * chunk, lengths, np.cumsum(lengths) - lengths

    yield Pair("ra_count_pieces, ra_split_ranges", f"NumPy, {n:,} ranges", cut, cut_numpy)

    group, facts = np.zeros(n, np.int32), np.array([[2**31, 0, N_COLUMNS, N_COLUMNS]])
    grid, mapped = np.array([[2**24, 0]]), np.ones(128, np.uint8)
    rows = group, starts, np.minimum(ends, starts + N_COLUMNS)

    def arrange() -> Any:
        order, places, at, found = (np.empty(size, np.int64) for size in (n, n, n + 1, 3))
        assert not library().ra_arrange_rows(*rows, n, facts, 1, grid, mapped, grid, mapped, order, places, at, found)
        return order[: found[0]], places[: found[0]], at, found

    def arrange_numpy() -> Any:
        group, low, high = rows
        known = facts[group]
        if ((group >= len(facts)) | (low < 0) | (high < low) | (high > known[:, 0])).any():
            raise AssertionError
        counts = high - low
        if (counts > known[:, 2]).any():
            raise AssertionError
        order = np.flatnonzero((group >= 0) & (counts > 0))
        at = np.zeros(len(group) + 1, np.int64)
        np.cumsum(np.minimum(counts, known[:, 3]), out=at[1:])
        per_shard, first = grid[group[order]].T
        begun = np.bincount(first + low[order] // per_shard, minlength=len(mapped) + 1)
        ended = np.bincount(first + (high[order] - 1) // per_shard + 1, minlength=len(mapped) + 1)
        touched = np.cumsum(begun - ended)[:-1] > 0
        found = np.array([len(order), counts.max(), (mapped[touched] != 0).all()])
        return order, known[order, 1] + low[order], at, found

    yield Pair("ra_arrange_rows", f"NumPy, {n:,} rows", arrange, arrange_numpy)


def _checked(indptr: NDArray[np.int64], columns: NDArray[np.uint32]) -> Iterator[Pair]:
    """Rows whose order is checked."""
    rows, where = csr_of(indptr, columns), c_int64()

    def order() -> Any:
        return [library().ra_check_order(byref(rows), N_COLUMNS, byref(where)) == 0]

    def order_numpy() -> Any:
        if (indptr[1:] < indptr[:-1]).any() or indptr[0] < 0 or indptr[-1] > columns.size:
            return [False]
        falls = columns[1:] <= columns[:-1]
        falls[indptr[1:-1] - 1] = False
        return [not falls.any() and columns.max() < N_COLUMNS]

    yield Pair("ra_check_order", "NumPy", order, order_numpy)

    seen, counts = np.zeros(N_COLUMNS, np.int64), np.array([0, 0, 0, -1, -1, -1, -1], np.int64)
    entries = csr_of(indptr, columns.view(np.int32))

    def scan() -> Any:
        counts[:] = [0, 0, 0, -1, -1, -1, -1]
        return [not library().ra_scan_entries(byref(entries), 0, seen, N_COLUMNS, counts) and not counts[:3].any()]

    yield Pair("ra_scan_entries", "NumPy, of a sound file", scan, order_numpy)


def _renumbered(
    rng: np.random.Generator, indptr: NDArray[np.int64], columns: NDArray[np.uint32], values: NDArray[np.float32]
) -> Iterator[Pair]:
    """Rows whose columns are renumbered and sorted, and of which a part is kept."""
    n_rows = len(indptr) - 1
    few = np.full(N_COLUMNS, -1, np.int32)
    few[np.sort(rng.choice(N_COLUMNS, N_COLUMNS // 2, replace=False))] = rng.permutation(N_COLUMNS // 2)

    def kept_numpy() -> Any:
        kept = np.zeros(columns.size + 1, np.int64)
        np.cumsum(few[columns] >= 0, out=kept[1:])
        return [kept[indptr[1:]] - kept[indptr[:-1]]]

    yield Pair("ra_count_kept", "NumPy", lambda: [count_kept(indptr, columns, few, "x")], kept_numpy)

    def map_scipy() -> Any:
        new = few[columns]
        kept = np.flatnonzero(new >= 0)
        bounds = np.searchsorted(kept, indptr)
        matrix = sp.csr_matrix((values[kept], new[kept], bounds), shape=(n_rows, N_COLUMNS // 2))
        matrix.sort_indices()
        return matrix.indptr, matrix.indices, matrix.data

    yield Pair(
        "ra_count_kept, ra_map_rows", "SciPy `sort_indices`",
        lambda: remap_csr(indptr, columns, values, few.astype(np.int64), N_COLUMNS // 2), map_scipy,
    )  # fmt: skip

    places = rng.permutation(N_COLUMNS)
    block = CsrBlock(indptr, columns, {}, N_COLUMNS)

    def place() -> Any:
        moved, (stored,) = reorder_columns(block, [(values, np.uint8)], places)
        return moved, stored

    def place_scipy() -> Any:
        matrix = sp.csr_matrix(
            (values.astype(np.uint8), places.astype(np.int32)[columns], indptr), shape=(n_rows, N_COLUMNS)
        )
        matrix.sort_indices()
        return matrix.indices, matrix.data

    yield Pair("ra_place_rows", "SciPy `sort_indices`", place, place_scipy)

    signed, at, lengths = columns.view(np.int32), indptr[:-1], rng.integers(PER_ROW // 2, PER_ROW, n_rows)
    closed = np.concatenate([[0], np.cumsum(lengths)])

    def close() -> Any:
        out = np.empty(closed[-1], np.int32), np.empty(closed[-1], np.float32)
        for array, target in zip((signed, values), out, strict=True):
            move_runs(array, at, lengths, closed[:-1], target)
        return out

    def close_numpy() -> Any:
        taken = np.repeat(at - closed[:-1], lengths) + np.arange(closed[-1])
        return signed[taken], values[taken]

    yield Pair("ra_move_runs", "NumPy, the rows of a batch", close, close_numpy)


def _by_column(indptr: NDArray[np.int64], columns: NDArray[np.uint32], values: NDArray[np.float32]) -> Iterator[Pair]:
    """Entries that are put in the order of their columns, a step of `add_csc` at a time, and back."""
    for every in 1, 2:
        yield from _from_columns(columns.size, every)
    n_rows = min(len(indptr) - 1, STEP_ENTRIES // PER_ROW)
    indptr = indptr[: n_rows + 1]
    n = int(indptr[-1])
    columns, values = columns[:n], values[:n].astype(np.uint8)
    yield Pair(
        "ra_count_columns", "NumPy `bincount`", lambda: [count_columns(columns, N_COLUMNS)],
        lambda: [np.bincount(columns, minlength=N_COLUMNS)],
    )  # fmt: skip
    starts = np.concatenate([[0], np.cumsum(np.bincount(columns, minlength=N_COLUMNS))])
    rows = np.repeat(np.arange(n_rows, dtype=np.uint32), np.diff(indptr))

    def by_column() -> Any:
        return _sorted(columns, [rows, values], N_COLUMNS)[1]

    def tocsc() -> Any:
        turned = sp.csr_matrix((values, columns.view(np.int32), indptr), shape=(n_rows, N_COLUMNS)).tocsc()
        return turned.indices.view(np.uint32), turned.data

    yield Pair("ra_count_columns, ra_claim_places", "SciPy `tocsc`", by_column, tocsc)
    at = starts[:-1] + np.arange(N_COLUMNS) * 4

    def move() -> Any:
        out = np.zeros(n + 4 * N_COLUMNS, np.uint8)
        move_runs(values, starts[:-1], np.diff(starts), at, out)
        return [out]

    def move_numpy() -> Any:
        out = np.zeros(n + 4 * N_COLUMNS, np.uint8)
        out[np.repeat(at - starts[:-1], np.diff(starts)) + np.arange(n)] = values
        return [out]

    yield Pair("ra_move_runs", "NumPy, the columns of a step", move, move_numpy)


def _from_columns(n: int, every: int) -> Iterator[Pair]:
    """Fifty columns of a column-sorted copy, every tenth value not zero, to rows, of which one in `every` is wanted."""
    rng, n_rows = np.random.default_rng(0), n // 5
    place = np.full(n_rows, -1, np.int32)
    place[::every] = np.arange(len(place[::every]))
    n_out = len(place[::every])
    found = [np.flatnonzero(rng.random(n_rows) < 0.1).astype(np.uint32) for _ in range(50)]
    bounds, stored = np.concatenate([[0], np.cumsum([*map(len, found)])]), np.concatenate(found)
    n = stored.size
    values = rng.poisson(2, n).astype(np.float32)

    def count() -> Any:
        counts, places = np.zeros(n_out + 1, np.int64), np.empty(n, np.int32)
        assert not library().ra_count_places(stored, n, 4, place, n_rows, counts, n_out, places)
        return places, counts[1:]

    def count_numpy() -> Any:
        places = place[stored]
        return places, np.bincount(places + 1, minlength=n_out + 1)[1:]

    yield Pair("ra_count_places", f"NumPy `take`, `bincount`, one row in {every}", count, count_numpy)
    places, counts = count()
    indptr = np.concatenate([[0], np.cumsum(counts)])
    columns = np.arange(len(bounds) - 1)

    def fill() -> Any:
        of = RaColumns(I64.address(bounds), I64.address(columns), len(columns), n)
        out = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.float32)
        last = np.zeros(n_out, np.int32)
        assert not library().ra_fill_places(
            byref(of), places, values, 4, indptr[:-1].copy(), last, n_out, out[0], 0, out[1], out[0].size
        )
        return out

    def fill_scipy() -> Any:
        kept = places >= 0
        before = np.zeros(n + 1, np.int64)
        np.cumsum(kept, out=before[1:])
        turned = sp.csc_matrix((values[kept], places[kept], before[bounds]), shape=(n_out, len(columns))).tocsr()
        return turned.indices, turned.data

    yield Pair("ra_fill_places", f"SciPy `tocsr`, one row in {every}", fill, fill_scipy)


def _dense(
    rng: np.random.Generator, indptr: NDArray[np.int64], columns: NDArray[np.uint32], values: NDArray[np.float32]
) -> Iterator[Pair]:
    """Dense rows, and floats that hold integers."""
    yield Pair(
        "ra_scan_whole", "NumPy", lambda: scan_integers(values),
        lambda: (values.min(), values.max(), (np.floor(values) == values).all()),
    )  # fmt: skip
    n_rows = min(512, len(indptr) - 1)
    n = indptr[n_rows]
    signed, memory = columns.view(np.int32), np.empty((n_rows, N_COLUMNS), np.float32)
    rows, where = csr_of(indptr[: n_rows + 1], columns[:n]), c_int64()

    def write() -> Any:
        assert not library().ra_write_dense(byref(rows), values[:n], 4, memory, N_COLUMNS, byref(where))
        return [memory]

    def write_scipy() -> Any:
        if columns[:n].max() >= N_COLUMNS:
            raise AssertionError
        memory[:] = 0
        return [sp.csr_matrix((values[:n], signed[:n], indptr[: n_rows + 1]), shape=memory.shape).toarray(out=memory)]

    yield Pair("ra_write_dense", "SciPy `toarray`", write, write_scipy)
    for share in 0.01, 0.1, 0.5, 1.0:
        dense = np.where(rng.random((512, 4_000)) < share, rng.poisson(2, (512, 4_000)) + 1, 0).astype(np.float32)

        def take_numpy(dense: NDArray[np.float32] = dense) -> Any:
            kept = np.flatnonzero(dense)
            bounds = np.searchsorted(kept, np.arange(0, dense.size + 1, dense.shape[1]))
            return bounds, (kept % dense.shape[1]).astype(np.uint32), dense.reshape(-1)[kept]

        def take_scipy(dense: NDArray[np.float32] = dense) -> Any:
            matrix = sp.csr_matrix(dense)
            return matrix.indptr, matrix.indices, matrix.data

        def ours(dense: NDArray[np.float32] = dense) -> Any:
            return to_csr(DenseBlock({"values": dense}))

        yield Pair("ra_count_dense, ra_take_dense", f"NumPy `flatnonzero`, {share:.0%} not zero", ours, take_numpy)
        yield Pair("ra_count_dense, ra_take_dense", f"SciPy `csr_matrix`, {share:.0%} not zero", ours, take_scipy)


def _geometry(rng: np.random.Generator, n: int) -> Iterator[Pair]:
    """Positions, and rows of fragments."""
    positions = rng.random((n // 4, 3)).astype(np.float32) * 999
    edges, low, spans = np.full(3, 50.0), np.zeros(3, np.int64), np.full(3, 20)

    def number() -> Any:
        codes = np.empty(len(positions), np.int64)
        assert not library().ra_number_cells(positions, len(positions), 3, 4, edges, low, spans, codes)
        return [codes]

    def number_numpy() -> Any:
        codes = np.zeros(len(positions), np.int64)
        for axis in range(3):
            cell = np.floor(positions[:, axis].astype(np.float64) / edges[axis]).astype(np.int64) - low[axis]
            if cell.min() < 0 or cell.max() >= spans[axis]:
                raise AssertionError
            codes = codes * spans[axis] + cell
        return [codes]

    yield Pair("ra_number_cells", "NumPy, axis by axis", number, number_numpy)
    yield from _fragments(rng, n)
    yield from _manifests(rng, n // 20)


def _fragments(rng: np.random.Generator, n: int) -> Iterator[Pair]:
    """Fragments of a chunk, a third of them lists; their rows, and copies of their rows."""
    n_fragments = n // 400
    is_range = rng.random(n_fragments) < 0.67
    counts = rng.integers(1, 200, n_fragments)
    begin = np.cumsum(counts) - counts
    listed = np.repeat(~is_range, counts)
    starts = np.where(is_range, begin, np.cumsum(np.where(is_range, 0, counts)) - np.where(is_range, 0, counts))
    fragments = Fragments(np.array([0, n_fragments]), is_range, starts, counts, np.flatnonzero(listed))
    which = np.sort(rng.choice(n_fragments, n_fragments // 2, replace=False))

    def expand_numpy() -> Any:
        lengths = counts[which]
        ends = np.cumsum(lengths)
        rows = np.repeat(starts[which] - (ends - lengths), lengths) + np.arange(ends[-1])
        in_list = np.repeat(~is_range[which], lengths)
        rows[in_list] = fragments.rows[rows[in_list]]
        return [rows]

    yield Pair("ra_expand_fragments", "NumPy", lambda: [fragment_rows(fragments, which)[0]], expand_numpy)
    blob = encode_fragments(fragments)[0]
    n_rows, size = int(counts.sum()), 12
    cell = rng.integers(0, 255, n_rows * size).astype(np.uint8)
    spans = np.empty((len(which), 3), np.int64)
    locate_fragments(blob, which, n_rows, spans)
    places = np.cumsum(spans[:, 2]) - spans[:, 2]

    def copy() -> Any:
        out = np.empty(int(spans[:, 2].sum()) * size, np.uint8)
        assert not library().ra_copy_fragments(
            blob, blob.size, cell, cell.size, spans, places, len(which), size, out, out.size
        )
        return [out]

    def copy_numpy() -> Any:
        return [cell.reshape(n_rows, size)[expand_numpy()[0]].reshape(-1)]

    yield Pair("ra_copy_fragments", "NumPy, with the expression above", copy, copy_numpy)


def _manifests(rng: np.random.Generator, n: int) -> Iterator[Pair]:
    """Manifests of objects of one to five blocks, a third of each mode."""
    bounds = np.concatenate([[0], np.cumsum(rng.integers(1, 6, n))])
    n_blocks = int(bounds[-1])
    modes, chunks = rng.integers(0, 3, n_blocks).astype(np.uint8), rng.integers(0, 9, (n_blocks, 3))
    counts = np.where(modes == SINGLE, 1, rng.integers(1, 9, n_blocks))
    in_lists = np.where(modes == LIST, counts, 0)
    starts = np.where(modes == LIST, np.cumsum(in_lists) - in_lists, rng.integers(0, 99, n_blocks))
    objects = Objects(np.arange(n), bounds, chunks, modes, starts, counts, rng.integers(0, 99, in_lists.sum()))

    def write_numpy() -> Any:
        sizes = 25 + np.where(modes == LIST, 4 + 8 * counts, 8 + 8 * (modes == RUN))
        before = np.cumsum(sizes) - sizes
        out = np.empty(4 * n + sizes.sum(), np.uint8)

        def put(at: NDArray[np.int64], numbers: NDArray[Any]) -> None:
            raw = numbers.view(np.uint8).reshape(len(at), -1)
            out[at[:, None] + np.arange(raw.shape[1])] = raw

        at = before + 4 * (1 + np.repeat(np.arange(n), np.diff(bounds)))
        put(at[bounds[:-1]] - 4, np.diff(bounds).astype(np.uint32))
        put(at, chunks)
        out[at + 24] = modes
        is_list, is_run = modes == LIST, modes == RUN
        put(at[~is_list] + 25, starts[~is_list])
        put(at[is_run] + 33, counts[is_run])
        put(at[is_list] + 25, counts[is_list].astype(np.uint32))
        put(
            np.repeat(at[is_list] + 29 - 8 * starts[is_list], counts[is_list]) + 8 * np.arange(in_lists.sum()),
            objects.fragments,
        )
        return [out]

    yield Pair("ra_write_manifests", "NumPy", lambda: [encode_manifests(objects).data], write_numpy)


if __name__ == "__main__":
    main()
