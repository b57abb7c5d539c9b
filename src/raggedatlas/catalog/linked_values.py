"""The values of arrays that stay in a file outside of the atlas: reading all of them, row by row, and checking what was read."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.assets import (
    array_readers,
    column_layers,
    find_dataset,
    has_complete_rows,
    open_array,
    read_links,
    read_records,
    read_specs,
)
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import read_frame
from raggedatlas.catalog.features import read_layouts
from raggedatlas.errors import AtlasError, CorruptError, DuplicateError, SourceError, StaleSourceError, ValuesError
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.validation import Problem
from raggedatlas.store.content_hash import ContentHash
from raggedatlas.store.read import ArrayReader, TransposedReader, iterate_slices, read_bounds, read_slice
from raggedatlas.store.runtime import prefetch
from raggedatlas.store.sparse import canonicalize

STEP_BYTES = 64 * 2**20
"""About how many bytes of columns and values are in memory at once."""

_TRANSPOSED_STEP = 256 * 2**20

COUNTS = "counts"

_LOOK = "Put back the file as it was, name it by relink() if it was moved, or drop the dataset and add the file again."


def layer_paths(record: DatasetRecord) -> dict[str, str]:
    """Return the layers of a group whose values are linked: layer -> path of the array that `array_readers` reads their rows from."""
    links = read_links(record)
    rows = {path.rpartition("/")[2]: path for path in links if path.startswith(("csr/layers/", "layers/"))}
    return rows | {
        layer: f"csr/layers/{layer}" for layer in column_layers(record.array_specs) if f"csc/layers/{layer}" in links
    }


def iterate_linked(
    readers: Mapping[str, ArrayReader], record: DatasetRecord
) -> Iterator[tuple[int, Mapping[str, Block]]]:
    """Read the linked layers of a group from their file, each entry once, the next rows while these are used.

    `readers` are what `array_readers` gave. Yields the number of the first row of each step, and layer -> its rows, with
    the layer ``"values"`` and columns as they are in the file. Raises an `AtlasError` if the file is not there or not
    the recorded one, or holds something else.
    """
    paths = layer_paths(record)
    if not paths:
        return
    # Who reads all values looks at them itself, and can say where one is that is no count.
    values = {name: _unsampled(readers[path]) for name, path in paths.items()}
    itemsize = sum(np.dtype(reader.spec.dtype).itemsize for reader in values.values())

    def dense() -> Iterator[tuple[int, Mapping[str, Block]]]:
        spec = next(iter(values.values())).spec
        chunk, width = spec.chunk_shape[0], int(np.prod(spec.row_shape, dtype=np.int64)) * itemsize
        step = max(1, STEP_BYTES // max(1, chunk * width)) * chunk
        for row in range(0, record.n_cells, step):
            stop = min(record.n_cells, row + step)
            yield row, {name: DenseBlock({"values": read_slice(own, row, stop)}) for name, own in values.items()}

    def sparse() -> Iterator[tuple[int, Mapping[str, Block]]]:
        indices = readers["csr/indices"]
        indptr = read_bounds(readers["csr/indptr"], record.n_cells, record.n_entries)
        # Of a matrix that is stored by column, each step reads all of it.
        step = _TRANSPOSED_STEP if isinstance(indices, TransposedReader) else STEP_BYTES
        most = step // (np.dtype(indices.spec.dtype).itemsize + itemsize)
        row = 0
        while row < record.n_cells:
            # A row with more entries is a step of its own.
            stop = max(row + 1, int(np.searchsorted(indptr, indptr[row] + most, side="right")) - 1)
            start, end = int(indptr[row]), int(indptr[stop])
            bounds, columns = indptr[row : stop + 1] - start, read_slice(indices, start, end)
            yield (
                row,
                {
                    name: CsrBlock(bounds, columns, {"values": read_slice(own, start, end)}, record.n_features)
                    for name, own in values.items()
                },
            )
            row = stop

    with closing(prefetch(sparse() if "csr/indices" in readers else dense())) as ahead:
        yield from ahead


def _unsampled(reader: ArrayReader) -> ArrayReader:
    if isinstance(reader, TransposedReader) and reader.values is not None:
        return replace(reader, values=_unsampled(reader.values))
    link = reader.spec.linked
    return reader if link is None else replace(reader, spec=replace(reader.spec, linked=replace(link, sampled=False)))


def index_limits(record: DatasetRecord) -> dict[str, int]:
    """Return the numbers that arrays besides the rows of a group must stay below: those of columns, or of the rows of a column-sorted copy."""
    found = {f"{extra.path}/indices": extra.shape[1] for extra in record.file_facts.extras.values()}
    return found | {"csc/indices": record.n_cells}


def beyond(columns: NDArray[Any], n_columns: int) -> NDArray[np.bool_]:
    """Return which columns of entries are outside of the matrix."""
    outside: NDArray[np.bool_] = columns >= n_columns
    return outside | (columns < 0) if columns.dtype.kind == "i" else outside


def content_hash(catalog: Catalog, records: list[DatasetRecord]) -> ContentHash:
    """Return the hash of a dataset before its values: of cells and features, as `add` has it."""
    first = records[0]
    layout = read_layouts(catalog, [first.layout_uid]).get(first.layout_uid)
    if first.layout_uid and layout is None:
        raise CorruptError(f"The feature list {first.layout_uid} of {first.zarr_group} is not there; run validate().")
    return ContentHash(read_frame(catalog, first, "obs"), () if layout is None else tuple(layout.features.tolist()))


def update_hash(content: ContentHash, block: Block, key: str, row: int, *, complete: bool = False) -> None:
    """Add rows of the main matrix to the hash of a dataset, in the form that `add` has them: without zeros, if it is dense (`complete`)."""
    if isinstance(block, CsrBlock):
        if complete:
            values = block.layers["values"]
            kept = values != 0
            bounds = np.concatenate([[0], np.cumsum(kept)])[block.indptr]
            block = CsrBlock(bounds, block.indices[kept], {"values": values[kept]}, block.n_cols)
        block, _ = canonicalize(block, key, row, sum_duplicates=True)
    content.update(block)


def refuse_duplicate(catalog: Catalog, first: DatasetRecord, text: str) -> None:
    """Refuse a hash that another dataset of the newest state has."""
    same = [r for r in read_records(catalog.tip()) if r.content_hash == text and r.uid != first.uid]
    if any(record.feature_space == first.feature_space for record in same):
        raise DuplicateError(
            f"{first.name!r} has the same cells, features and values as the dataset {same[0].name!r}; nothing was changed. Drop one of them with "
            f"drop_dataset({same[0].uid!r}) or drop_dataset({first.uid!r})."
        )


def check_linked(catalog: Catalog, record: DatasetRecord) -> list[Problem]:
    """Read all values of the arrays of a group that stay in a file outside of the atlas.

    Rules ``source-changed``, ``source-missing``, ``array-damaged``, ``feature-bounds``, ``repeated-entries``,
    ``counts``, and ``content-hash``, where a hash of all values was recorded.
    """
    if not read_links(record):
        return []

    def problem(rule: str, text: str) -> list[Problem]:
        return [Problem(rule, "must", record.zarr_group, text, _LOOK)]

    try:
        return _check_values(catalog, record, array_readers(catalog, record), problem)
    except StaleSourceError as error:
        return problem("source-changed", str(error))
    except CorruptError as error:
        return problem("array-damaged", str(error))
    except ValuesError as error:
        return problem("counts", str(error))
    except AtlasError as error:
        return problem("source-missing", str(error))


def _check_values(
    catalog: Catalog,
    record: DatasetRecord,
    readers: Mapping[str, ArrayReader],
    problem: Callable[[str, str], list[Problem]],
) -> list[Problem]:
    records = find_dataset(catalog, record.uid)
    first, facts = records[0], records[0].file_facts
    is_hashed = facts.linked is not None and facts.linked.hashed == "full" and record.zarr_group == first.zarr_group
    content = content_hash(catalog, records) if is_hashed and record.layers[0] in layer_paths(record) else None
    complete = has_complete_rows(record, record.array_specs)
    n_beyond = n_uncounted = 0
    repeated = ""
    for row, layers in iterate_linked(readers, record):
        if COUNTS in layers:
            values = layers[COUNTS].layers["values"]
            counted = values >= 0
            if values.dtype.kind == "f":
                # NaN fails every comparison, and infinity is its own floor.
                counted &= (np.floor(values) == values) & (values < np.inf)
            n_uncounted += int(np.count_nonzero(~counted))
        main = next(iter(layers.values()))
        if isinstance(main, CsrBlock):
            n_beyond += int(np.count_nonzero(beyond(main.indices, record.n_features)))
            if not n_beyond and not repeated:
                try:
                    canonicalize(main, record.zarr_group, row, sum_duplicates=False)
                except SourceError as error:
                    repeated = str(error).partition(";")[0]
        if content is not None and not n_beyond:
            update_hash(content, layers[record.layers[0]], record.zarr_group, row, complete=complete)
    walked = {"csr/indices", *layer_paths(record).values()}
    walked |= {f"csc/layers/{layer}" for layer in column_layers(record.array_specs)}
    limits = index_limits(record)
    for path in sorted(read_links(record).keys() - walked):
        # Not of `readers`, which lack what may not be read.
        for values in iterate_slices(open_array(catalog, record, read_specs(record)[path])):
            if path in limits:
                n_beyond += int(np.count_nonzero(beyond(values, limits[path])))
    problems = []
    if n_beyond:
        problems += problem(
            "feature-bounds", f"{n_beyond:,} entries of the file name columns or rows that its matrices do not have"
        )
    if repeated:
        problems += problem("repeated-entries", repeated)
    if n_uncounted:
        problems += problem("counts", f"{n_uncounted:,} values of the layer {COUNTS!r} are not counts")
    if content is not None and not n_beyond and content.hexdigest() != first.content_hash:
        problems += problem(
            "content-hash", "the values of the file do not have the hash that was recorded when they were linked"
        )
    return problems
