"""A repaired copy of a file: what breaks a rule is mended where the fix is certain, and told where it is not."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, DuplicateError, StoreError
from raggedatlas.formats.anndata.checking import (
    SPARSE,
    VERSIONS,
    as_text,
    declared_encoding,
    encoding_of,
    extent,
    index_node,
    infer,
    layout_of,
    listed,
    n_rows,
    names_node,
    sparse_shape,
)
from raggedatlas.formats.anndata.checks_frames import OLD_CATEGORIES
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute
from raggedatlas.formats.anndata.validation import check_root, validate
from raggedatlas.formats.containers import READ_ERRORS, unknown_encoding
from raggedatlas.formats.output_files import writable
from raggedatlas.model.batch import sparse_dtype
from raggedatlas.model.reports import Depth, Problem
from raggedatlas.store.runtime import warnings_as

MOST_ROUNDS = 10
"""A fix can bring another problem to light; so often is the copy looked through again."""


@dataclass(frozen=True, slots=True)
class Repair:
    """What `repair` did.

    Parameters
    ----------
    path : str
        The copy.
    mended : tuple of str
        What was mended, a line each, beginning with the rule and the element.
    left : tuple of Problem
        What is still wrong with the copy.
    """

    path: str
    mended: tuple[str, ...]
    left: tuple[Problem, ...]


def repair(path: str | Path, target: str | Path, level: Depth = "full") -> Repair:
    """Write a copy of an AnnData file in which what can be mended is.

    Values are never guessed: a file whose pointers or indices are wrong keeps them, and the report says so. The copy appears
    under its name when it is done; the file itself is only read.

    Parameters
    ----------
    path : str or Path
        An `.h5ad` or `.h5mu` file, or a Zarr folder.
    target : str or Path
        Where the copy goes; of the same kind as the file.
    level : {"metadata", "full"}
        How far problems are looked for.

    Returns
    -------
    Repair
        What was mended and what was left.

    Raises
    ------
    NotFoundError, SourceError
        If the file cannot be opened.
    DuplicateError
        If the target exists.
    StoreError
        If the copy cannot be written.

    Examples
    --------
    >>> repair("broken.h5ad", "mended.h5ad").mended  # doctest: +SKIP
    ('A02 uns/k: declared as array 0.2.0',)
    """
    path, target = Path(path), Path(target)
    if target.exists():
        raise DuplicateError(f"{target} exists; choose another name for the repaired copy.")
    if not target.parent.is_dir():
        raise StoreError(f"{target} cannot be written: there is no folder {target.parent}; make it first.")
    left = validate(path, level)
    mended: list[str] = []
    hidden = target.with_name(f".{target.name}.{uuid4().hex[:8]}.partial")
    try:
        with writable(target):
            _copy(path, hidden)
            if any(problem.rule in FIXES for problem in left):
                with _opened_for_writing(hidden) as root:
                    mended, left = _fix(root, left, full=level == "full")
        _publish(hidden, target)
    except BaseException:
        shutil.rmtree(hidden) if hidden.is_dir() else hidden.unlink(missing_ok=True)
        raise
    return Repair(str(target), tuple(mended), tuple(left))


def _fix(root: Node, found: list[Problem], *, full: bool) -> tuple[list[str], list[Problem]]:
    """Mend what can be mended, and look again until nothing more can; return what was done, and what is left."""
    done: list[str] = []
    tried: set[tuple[str, str, str]] = set()
    for _ in range(MOST_ROUNDS):
        todo = [p for p in found if p.rule in FIXES and (p.rule, p.path, p.message) not in tried]
        if not todo:
            break
        for problem in todo:
            tried.add((problem.rule, problem.path, problem.message))
            said = _fix_one(root, problem)
            if said:
                done.append(f"{problem.rule} {problem.path or 'the root'}: {said}")
        found = check_root(Node(root.uri, "", root.stored), full=full)
    return done, found


def _fix_one(root: Node, problem: Problem) -> str:
    """Mend one problem; nothing is said where that cannot be done."""
    try:
        node = Node(root.uri, problem.path, root.stored[problem.path] if problem.path else root.stored)
        with warnings_as("ignore"):
            return FIXES[problem.rule](node, problem, root)
    except (AtlasError, unknown_encoding(), *READ_ERRORS) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        return ""


def _copy(path: Path, hidden: Path) -> None:
    if path.is_dir():
        shutil.copytree(path, hidden)
    else:
        shutil.copyfile(path, hidden)
        hidden.chmod(hidden.stat().st_mode | 0o600)


@contextmanager
def _opened_for_writing(hidden: Path) -> Iterator[Node]:
    if hidden.is_file():
        import h5py

        with h5py.File(hidden, "r+") as file:
            yield Node(str(hidden), "", file)
        return
    import zarr

    from raggedatlas.store.untrusted import guarded_zarr_store

    consolidated = _unconsolidated(hidden)
    store = guarded_zarr_store(zarr.storage.LocalStore(hidden))
    yield Node(str(hidden), "", zarr.open_group(store=store, mode="r+", use_consolidated=False))
    if consolidated:
        with warnings_as("ignore"):
            zarr.consolidate_metadata(zarr.storage.LocalStore(hidden))


def _unconsolidated(folder: Path) -> bool:
    """Remove consolidated metadata, which what is mended would contradict, and say whether there were any."""
    gathered, head = folder / ".zmetadata", folder / "zarr.json"
    found = gathered.exists()
    gathered.unlink(missing_ok=True)
    if head.exists():
        stated = json.loads(head.read_bytes())
        if stated.pop("consolidated_metadata", None) is not None:
            head.write_text(json.dumps(stated, indent=2))
            found = True
    return found


def _publish(hidden: Path, target: Path) -> None:
    with writable(target):
        if hidden.is_file():
            with hidden.open("r+b") as file:
                os.fsync(file.fileno())
        if target.exists():
            raise DuplicateError(f"{target} exists by now; choose another name for the repaired copy.")
        hidden.rename(target)


Fix = Callable[[Node, Problem, Node], str]

RIGHT = {"A91": "numeric-scalar", "A93": "string", "A111": "string-array"}
"""Rules about what was declared as something else -> what it is."""


def declare(node: Node, problem: Problem, root: Node) -> str:
    """Declare the encoding that an element has by its structure."""
    del root
    kind, version = declared_encoding(node)
    if version == "0.1.0" and kind == "dataframe" and problem.rule == "A72":
        return ""
    if problem.rule in RIGHT and kind in ("array", "string-array"):
        kind = RIGHT[problem.rule]
    elif kind not in VERSIONS:
        kind = infer(node)
    if problem.rule == "A11":
        if layout_of(node):
            return ""
        kind = "anndata"
    if problem.rule == "A27":
        if not {"X", "var"} <= set(node.children):
            return ""
        kind = "raw"
    if (kind, VERSIONS[kind][0]) == declared_encoding(node):
        return ""
    node.stored.attrs["encoding-type"], node.stored.attrs["encoding-version"] = kind, VERSIONS[kind][0]
    return f"declared as {kind} {VERSIONS[kind][0]}"


def write_as_text(node: Node, problem: Problem, root: Node) -> str:
    """Write encoding attributes that are bytes as text."""
    del problem, root
    for name in ("encoding-type", "encoding-version"):
        if isinstance(plain_attribute(node.attrs.get(name)), bytes):
            node.stored.attrs[name] = as_text(node.attrs[name])
    return "attributes written as text"


def add_table(node: Node, problem: Problem, root: Node) -> str:
    """Write a table that is missing, with numbers for names where no table along the axis has names."""
    del root
    name = "obs" if "obs" in problem.message else "var"
    size = _axis_size(node, 0 if name == "obs" else 1)
    if size is None:
        return ""
    from anndata.io import write_elem

    names = _names_beside(node, "obsm" if name == "obs" else "varm", size)
    group = node.stored.create_group(name)
    write_elem(group, "_index", names if names is not None else np.array([str(i) for i in range(size)], dtype=object))
    group.attrs["_index"] = "_index"
    _set_names(group, "column-order", [], in_hdf5=node.in_hdf5)
    group.attrs["encoding-type"], group.attrs["encoding-version"] = "dataframe", "0.2.0"
    return f"{name} written with {'numbers for names' if names is None else 'the names of a table along it'}"


def _names_beside(node: Node, mapping: str, size: int) -> Any:  # noqa: ANN401  (an array of text)
    """Return the names that a frame along the axis has; they must be those of the axis."""
    for child in getattr(node.child(mapping), "children", {}).values():
        index = names_node(child) if encoding_of(child) == "dataframe" else None
        if index is not None and index.text is not None and index.shape == (size,):
            return np.array(
                [v.decode("utf-8") if isinstance(v, bytes) else str(v) for v in index.whole()], dtype=object
            )
    return None


def _axis_size(node: Node, axis: int) -> int | None:
    names = ("obsm", "obsp") if axis == 0 else ("varm", "varp")
    whole = [node.child("X"), *(child for child in getattr(node.child("layers"), "children", {}).values())]
    sizes = [extent(at) for at in whole if at is not None]
    found = {size[axis] for size in sizes if size and len(size) == 2}
    for name in names:
        along = [extent(at) for at in getattr(node.child(name), "children", {}).values()]
        found |= {size[0] for size in along if size}
    return found.pop() if len(found) == 1 else None


def add_axis(node: Node, problem: Problem, root: Node) -> str:
    """Give an array of one axis a second one, of length 1."""
    if problem.level != "practice" or not node.is_array:
        return ""
    write_small(node, root, node.whole()[:, None])
    return "written with a second axis of length 1"


def move_to_uns(node: Node, problem: Problem, root: Node) -> str:
    """Move a stray member of an HDF5 root into uns."""
    del problem
    group = parent_of(node, root)
    if "uns" not in group:
        made = group.create_group("uns")
        made.attrs["encoding-type"], made.attrs["encoding-version"] = "dict", "0.1.0"
    if node.name in group["uns"]:
        return ""
    group.move(node.name, f"uns/{node.name}")
    return "moved into uns"


def sort_sparse(node: Node, problem: Problem, root: Node) -> str:
    """Sort the entries of a sparse matrix, and sum what is there twice."""
    del problem
    shape = sparse_shape(node)
    if shape is None or encoding_of(node) not in SPARSE:
        return ""
    removed = sort_entries(node, root, shape[0 if encoding_of(node) == "csr_matrix" else 1])
    if removed < 0:
        return ""
    return f"entries sorted{f', {removed:,} summed into others' if removed else ''}"


def make_signed(node: Node, problem: Problem, root: Node) -> str:
    """Write unsigned pointers or indices as int64."""
    del problem
    if node.kind != "integer" or any(len(v) and int(v.max()) > np.iinfo(np.int64).max for _, v in node.blocks()):
        return ""
    recast(node, root, np.dtype(np.int64))
    return "written as int64"


def make_computable(node: Node, problem: Problem, root: Node) -> str:
    """Write values of a sparse matrix in a type that SciPy holds."""
    del problem
    recast(node, root, sparse_dtype(node.dtype))
    return f"written as {sparse_dtype(node.dtype)}"


def name_index(node: Node, problem: Problem, root: Node) -> str:
    """Name the index of a frame, where there is a member of one of the usual names."""
    del problem, root
    for name in ("_index", "index"):
        if name in node.children:
            node.stored.attrs["_index"] = name
            return f"_index set to {name!r}"
    return ""


def list_columns(node: Node, problem: Problem, root: Node) -> str:
    """List the columns of a frame: those that were listed and are there, in their order, then the others."""
    del problem, root
    index = index_node(node)
    rows = n_rows(index) if index is not None else None
    own = as_text(node.attrs.get("_index")) or "_index"
    before = (listed(node.attrs["column-order"]) if "column-order" in node.attrs else None) or []
    names = [name for name in dict.fromkeys(before) if node.child(name) is not None]
    tops = {name.partition("/")[0] for name in names}
    others = [name for name, child in node.children.items() if name not in tops and n_rows(child) == rows]
    names += [name for name in others if name not in (own, OLD_CATEGORIES)]
    if names == before and "column-order" in node.attrs:
        return ""
    _set_names(node.stored, "column-order", names, in_hdf5=node.in_hdf5)
    return f"column-order lists {len(names):,} columns"


def _set_names(stored: Any, attribute: str, names: list[str], *, in_hdf5: bool) -> None:  # noqa: ANN401
    if not in_hdf5:
        stored.attrs[attribute] = names
        return
    import h5py

    stored.attrs.create(attribute, np.array(names, dtype=object), dtype=h5py.string_dtype(), shape=(len(names),))


def share_chunks(node: Node, problem: Problem, root: Node) -> str:
    """Write the columns of a frame with the chunks of the one that has the longest."""
    del problem
    inner = [at if at.is_array else at.child("codes") or at.child("values") for at in node.children.values()]
    chunked = [at for at in inner if at is not None and at.is_array and getattr(at.stored, "chunks", None)]
    rows = max(at.stored.chunks[0] for at in chunked)
    for at in chunked:
        if at.stored.chunks[0] != rows or (at.chunks or (rows,))[0] != rows:
            rechunk(at, root, rows)
    return f"columns written in chunks of {rows:,} rows"


def fit_scalar(node: Node, problem: Problem, root: Node) -> str:
    """Write a scalar of one element without axes; declare one of several as the array that it is."""
    del problem
    value = node.whole()
    if value.size != 1:
        kind = "string-array" if node.text is not None else "array"
        node.stored.attrs["encoding-type"], node.stored.attrs["encoding-version"] = kind, VERSIONS[kind][0]
        return f"declared as {kind} {VERSIONS[kind][0]}"
    single = value.reshape(-1)[0]
    write_small(node, root, single.decode("utf-8") if isinstance(single, bytes) else single)
    return "written without axes"


def write_text(node: Node, problem: Problem, root: Node) -> str:
    """Write text as UTF-8 of variable length; nothing where it cannot be decoded."""
    del problem
    if node.text is None:
        return ""
    values = np.asarray(node.whole(), dtype=object)
    flat = [v.decode("utf-8") if isinstance(v, bytes) else str(v) for v in values.reshape(-1).tolist()]
    if values.shape == ():
        write_small(node, root, flat[0])
    else:
        made = np.empty(len(flat), dtype=object)
        made[:] = flat
        write_small(node, root, made.reshape(values.shape))
    return "written as UTF-8 text of variable length"


def set_ordered(node: Node, problem: Problem, root: Node) -> str:
    """Write the flag of a categorical as a boolean; a missing one is false."""
    del problem, root
    stated = plain_attribute(node.attrs.get("ordered"))
    if stated is not None and not isinstance(stated, int):
        return ""
    node.stored.attrs["ordered"] = bool(stated)
    return f"ordered set to {str(bool(stated)).lower()}"


def merge_categories(node: Node, problem: Problem, root: Node) -> str:
    """Merge equal categories, and code those that are missing as -1."""
    del problem
    codes, categories = node.children["codes"], node.children["categories"]
    if not categories.is_array:
        return ""
    values = categories.whole()
    known: dict[Any, int] = {}
    to = np.full(len(values) + 1, -1, np.int64)
    for i, value in enumerate(values.tolist()):
        if not (isinstance(value, float) and np.isnan(value)):
            to[i] = known.setdefault(value, len(known))
    before = codes.whole()
    if before.size and (before.min() < -1 or before.max() >= len(values)):
        return ""
    signed = before.dtype if before.dtype.kind == "i" else np.dtype(np.int64)
    write_small(codes, root, to[before.astype(np.int64)].astype(signed))
    kept = [v.decode("utf-8") if isinstance(v, bytes) else v for v in known]
    write_small(categories, root, np.array(kept, dtype=object if categories.text is not None else values.dtype))
    return f"{len(values) - len(kept):,} categories merged"


def make_boolean(node: Node, problem: Problem, root: Node) -> str:
    """Write values or mask that are all 0 or 1 as booleans."""
    member = node.child("values" if problem.rule == "A132" else "mask")
    if member is None or not member.is_array or member.kind not in ("integer", "real"):
        return ""
    values = member.whole()
    if not np.isin(values, (0, 1)).all():
        return ""
    write_small(member, root, values.astype(bool))
    return f"{member.name} written as booleans"


def set_missing_value(node: Node, problem: Problem, root: Node) -> str:
    """State the missing value that readers take an unknown one for."""
    del problem, root
    node.stored.attrs["na-value"] = "NA"
    return "na-value set to NA"


_DECLARED = (
    "A01", "A02", "A11", "A26", "A27", "A41", "A52", "A53", "A72", "A81", "A91", "A93", "A101", "A111", "A121", "A131",
    "A141",
)  # fmt: skip

FIXES: dict[str, Fix] = {
    **dict.fromkeys(_DECLARED, declare),
    "A04": write_as_text,
    "A12": add_table,
    "A18": add_axis,
    "A20": add_axis,
    "A28": move_to_uns,
    "A59": sort_sparse,
    "A60": make_signed,
    "A61": make_computable,
    "A71": name_index,
    "A73": list_columns,
    "A76": share_chunks,
    "A77": list_columns,
    "A90": fit_scalar,
    "A94": write_text,
    "A95": write_text,
    "A102": set_ordered,
    "A107": merge_categories,
    "A112": write_text,
    "A113": write_text,
    "A123": make_boolean,
    "A132": make_boolean,
    "A133": make_boolean,
    "A142": set_missing_value,
    "A144": make_boolean,
    "A146": set_missing_value,
}
"""Rule -> its fix, which says what it did, or nothing where it cannot be done."""


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
