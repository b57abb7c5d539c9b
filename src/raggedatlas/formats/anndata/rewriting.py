"""Arrays of a copied file written anew: cast, cut into other chunks, sorted; a block at a time."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.anndata.file_tree import Node

ENTRIES = 1 << 20
"""Entries of a sparse matrix that are sorted at once, or one row where that has more."""

Blocks = Iterator[tuple[int, NDArray[Any]]]


def parent_of(node: Node, root: Node) -> Any:  # noqa: ANN401  (a group of either library)
    """Return the group that holds a node."""
    above = node.path.rpartition("/")[0]
    return root.stored[above] if above else root.stored


def write_small(node: Node, root: Node, value: Any) -> None:  # noqa: ANN401  (any element that AnnData knows)
    """Write an element anew through anndata's own writer; its other attributes stay."""
    from anndata.io import write_elem

    kept = {name: value for name, value in node.attrs.items() if not name.startswith("encoding-")}
    group = parent_of(node, root)
    del group[node.name]
    write_elem(group, node.name, value)
    for name, attribute in kept.items():
        group[node.name].attrs[name] = attribute


def recast(node: Node, root: Node, dtype: np.dtype[Any]) -> None:
    """Give an array another type, a block at a time."""
    _swap(node, root, dtype, node.shape or (), _chunks(node), node.blocks())


def rechunk(node: Node, root: Node, rows: int) -> None:
    """Give an array chunks of another number of rows, a block at a time."""
    shape = node.shape or ()
    _swap(node, root, node.dtype, shape, (min(rows, max(1, shape[0])), *(_chunks(node) or shape)[1:]), node.blocks())


def sort_entries(node: Node, root: Node, n_major: int) -> int:
    """Sort the indices of a sparse matrix within each row (CSR) or column (CSC), and sum what is there twice.

    Returns
    -------
    int
        How many entries were summed into others; -1 where a sum does not fit the type, and nothing was changed.
    """
    indptr = node.children["indptr"].whole().astype(np.int64)
    parts = node.children["indices"], node.children["data"]
    if not _sums_fit(parts, indptr):
        return -1
    # The sorted entries are never more than those read, so they take their place from the front.
    at = 0
    lengths = np.zeros(n_major + 1, np.int64)
    for first, last, indices, data in _row_blocks(parts, indptr):
        rows, places, sums = _summed(np.diff(indptr[first : last + 1]), indices, data)
        lengths[first + 1 : last + 1] = np.bincount(rows, minlength=last - first)
        parts[0].stored[at : at + len(places)] = places
        parts[1].stored[at : at + len(sums)] = sums
        at += len(places)
    removed = int(indptr[-1]) - at
    if removed:
        for part in parts:
            _shorten(part, root, at)
        node.children["indptr"].stored[...] = np.cumsum(lengths).astype(node.children["indptr"].dtype)
    return removed


def _row_blocks(
    parts: tuple[Node, Node], indptr: NDArray[np.int64]
) -> Iterator[tuple[int, int, NDArray[Any], NDArray[Any]]]:
    n_rows, first = len(indptr) - 1, 0
    while first < n_rows:
        last = int(np.searchsorted(indptr, indptr[first] + ENTRIES, side="right")) - 1
        last = min(n_rows, max(first + 1, last))
        start, stop = int(indptr[first]), int(indptr[last])
        yield first, last, parts[0].part(start, stop), parts[1].part(start, stop)
        first = last


def _summed(
    lengths: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Return the row, place and value of each entry, sorted, none twice."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    order = np.lexsort((indices, rows))
    rows, indices, data = rows[order], indices[order], data[order]
    fresh = np.ones(len(rows), bool)
    fresh[1:] = (rows[1:] != rows[:-1]) | (indices[1:] != indices[:-1])
    if fresh.all():
        return rows, indices, data
    starts = np.flatnonzero(fresh)
    sums = np.logical_or.reduceat(data, starts) if data.dtype.kind == "b" else np.add.reduceat(_wide(data), starts)
    return rows[starts], indices[starts], sums.astype(data.dtype)


def _wide(data: NDArray[Any]) -> NDArray[Any]:
    return data.astype({"i": np.int64, "u": np.uint64}.get(data.dtype.kind, data.dtype))


def _sums_fit(parts: tuple[Node, Node], indptr: NDArray[np.int64]) -> bool:
    """Tell whether all sums fit the type of the values."""
    if parts[1].dtype.kind not in "iu":
        return True
    limits = np.iinfo(parts[1].dtype)
    for first, last, indices, data in _row_blocks(parts, indptr):
        sums = _summed(np.diff(indptr[first : last + 1]), indices, _wide(data))[2]
        if len(sums) and (sums.min() < limits.min or sums.max() > limits.max):
            return False
    return True


def _shorten(node: Node, root: Node, n: int) -> None:
    array = node.stored
    if not node.in_hdf5 or (array.chunks and array.maxshape[0] is None):
        array.resize((n,))
        return

    def blocks() -> Blocks:
        for start in range(0, n, node.step()):
            yield start, node.part(start, min(start + node.step(), n))

    _swap(node, root, node.dtype, (n,), _chunks(node), blocks())


def _chunks(node: Node) -> tuple[int, ...] | None:
    found = getattr(node.stored, "chunks", None)
    return tuple(found) if found else None


def _swap(
    node: Node, root: Node, dtype: np.dtype[Any], shape: tuple[int, ...], chunks: tuple[int, ...] | None, blocks: Blocks
) -> None:
    """Write an array beside the old one with the same compression and attributes, then put it in its place."""
    group = parent_of(node, root)
    beside = f"{node.name}.{uuid4().hex[:8]}"
    make: Callable[..., Any] = _made_hdf5 if node.in_hdf5 else _made_zarr
    made = make(group, beside, node, dtype, shape, chunks)
    for start, values in blocks:
        made[start : start + len(values)] = values.astype(dtype, copy=False)
    for name, value in node.attrs.items():
        made.attrs[name] = value
    if node.in_hdf5:
        del group[node.name]
        group.move(beside, node.name)
    else:
        folder = Path(root.uri) / node.path
        shutil.rmtree(folder)
        folder.with_name(beside).rename(folder)


def _made_hdf5(group: Any, name: str, node: Node, dtype: Any, shape: Any, chunks: Any) -> Any:  # noqa: ANN401
    array = node.stored
    options: dict[str, Any] = {}
    if chunks and 0 not in shape:
        fitting = tuple(min(c, s) for c, s in zip(chunks, shape, strict=True))
        options = {"chunks": fitting, "maxshape": tuple(None for _ in shape)}
        options |= {"compression": array.compression, "compression_opts": array.compression_opts}
        options |= {"shuffle": array.shuffle}
    return group.create_dataset(name, shape, dtype, **options)


def _made_zarr(group: Any, name: str, node: Node, dtype: Any, shape: Any, chunks: Any) -> Any:  # noqa: ANN401
    array = node.stored
    same = chunks == _chunks(node) and shape == node.shape
    return group.create_array(
        name,
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        shards=array.shards if same else None,
        compressors=array.compressors,
    )
