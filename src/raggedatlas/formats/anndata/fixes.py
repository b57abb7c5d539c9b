"""Fixes of rule violations in a copy of a file: one function per rule that can be fixed without guessing values."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, DuplicateError, SourceError
from raggedatlas.formats.anndata.checks_frames import OLD_CATEGORIES
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute
from raggedatlas.formats.anndata.rules import (
    ENCODINGS,
    SPARSE,
    as_text,
    declared_encoding,
    encoding_of,
    index_node,
    infer,
    is_binary,
    layout_of,
    listed,
    n_rows,
    nested_members,
    sparse_shape,
)
from raggedatlas.formats.anndata.validation import check_root, validate
from raggedatlas.formats.containers import READ_ERRORS, filter_available, is_zip, unknown_encoding
from raggedatlas.formats.output_files import consolidate, writable, written_aside
from raggedatlas.model.validation import Depth, Problem, Problems
from raggedatlas.store.copies import local_copy, local_target
from raggedatlas.store.location import Address, as_path
from raggedatlas.store.runtime import warnings_as

MAX_ROUNDS = 10
"""Maximum number of passes over the copy, because a fix can reveal another problem."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Result of `repair`."""

    path: str  # path of the copy
    fixed: tuple[str, ...]  # applied fixes, one line each, starting with the rule and the element
    left: tuple[Problem, ...]  # milder problems that remain in the copy


def repair(path: Address, target: Address, level: Depth = "full") -> Repair:
    """Write a copy of an AnnData file in which all fixable problems are fixed.

    Values are never guessed: a file that would break a must nevertheless is refused. The copy appears under its name when it is
    complete; the original file is only read.

    Parameters
    ----------
    path : str or Path
        An `.h5ad` or `.h5mu` file, or a Zarr folder.
    target : str or Path
        Path of the copy, of the same kind as the file.
    level : {"metadata", "full"}
        Level of validation.

    Returns
    -------
    Repair
        Applied fixes and remaining problems, which are milder than a must.

    Raises
    ------
    NotFoundError, SourceError
        If the file cannot be opened, is a zip file, or breaks a must that cannot be fixed.
    DuplicateError
        If the target exists.
    StoreError
        If the copy cannot be written.

    Examples
    --------
    >>> repair("broken.h5ad", "fixed.h5ad").fixed  # doctest: +SKIP
    ('A02 uns/k: declared as array 0.2.0',)
    """
    with local_target(target) as copy, local_copy(path) as file:
        if copy.exists():
            raise DuplicateError(f"{copy} exists; choose another name for the repaired copy.")
        if is_zip(file):
            raise SourceError(
                f"{file} is a zip file, which cannot be changed in place; repair the folder that it holds."
            )
        left = validate(file, level)
        fixed: list[str] = []
        with writable(copy), written_aside(copy, overwrite=False) as new:
            if file.is_dir():
                shutil.copytree(file, new)
            else:
                shutil.copyfile(file, new)
                new.chmod(new.stat().st_mode | 0o600)
            # Without anything to fix, the copy is not opened and stays identical to the file.
            if any(problem.rule in FIXES for problem in left):
                with _open_for_writing(new) as root:
                    fixed, left = _fix(root, left, full=level == "full")
            broken = [problem for problem in left if problem.level == "must"]
            if broken:
                more = f" ({len(broken) - 1:,} more such)" if len(broken) > 1 else ""
                raise SourceError(f"{file}: {broken[0]}{more} No copy was written, since this cannot be fixed in it.")
            if new.is_file():
                with new.open("r+b") as written:
                    os.fsync(written.fileno())
    return Repair(str(as_path(target)), tuple(fixed), tuple(left))


def _fix(root: Node, problems: Problems, *, full: bool) -> tuple[list[str], Problems]:
    """Apply fixes and validate again until none applies; return the applied fixes and the remaining problems."""
    done: list[str] = []
    tried: set[tuple[str, str, str]] = set()
    for _ in range(MAX_ROUNDS):
        # A problem that its fix did not remove comes back with the same message, and is not tried again.
        todo = [p for p in problems if p.rule in FIXES and (p.rule, p.path, p.message) not in tried]
        if not todo:
            break
        for problem in todo:
            tried.add((problem.rule, problem.path, problem.message))
            change = ""
            try:
                with warnings_as("ignore"):
                    change = FIXES[problem.rule](_node_at(root, problem.path))
            except (AtlasError, unknown_encoding(), *READ_ERRORS) as error:
                # An error with a number comes from the disk and ends the repair; h5py reports damaged data without one.
                if isinstance(error, OSError) and error.errno is not None:
                    raise
            if change:
                done.append(f"{problem.rule} {problem.path or 'the root'}: {change}")
        # A new node, because `attrs` and `children` of `root` are cached from before the fixes.
        problems = check_root(Node(root.uri, "", root.stored), full=full)
    return done, problems


def _node_at(root: Node, path: str) -> Node:
    """Return the node at a path, opened without the checks of a reader."""
    if not path:
        return Node(root.uri, "", root.stored)
    above, _, name = path.rpartition("/")
    parent = _node_at(root, above)
    return Node(root.uri, path, parent.stored[name], parent=parent)


@contextmanager
def _open_for_writing(hidden: Path) -> Iterator[Node]:
    if hidden.is_file():
        import h5py

        with h5py.File(hidden, "r+") as file:
            yield Node(str(hidden), "", file)
        return
    import zarr

    from raggedatlas.store.untrusted import guarded_zarr_store

    # Consolidated metadata would be outdated by the fixes; it is written anew.
    file, group = hidden / ".zmetadata", hidden / "zarr.json"
    consolidated = file.exists()
    file.unlink(missing_ok=True)
    if group.exists():
        metadata = json.loads(group.read_bytes())
        if metadata.pop("consolidated_metadata", None) is not None:
            group.write_text(json.dumps(metadata, indent=2))
            consolidated = True
    store = guarded_zarr_store(zarr.storage.LocalStore(hidden))
    yield Node(str(hidden), "", zarr.open_group(store=store, mode="r+", use_consolidated=False))
    if consolidated:
        consolidate(hidden)


Fix = Callable[[Node], str]

CORRECT_ENCODINGS = {"A91": "numeric-scalar", "A93": "string", "A111": "string-array"}
"""Rule about a wrongly declared element -> its correct encoding."""


def declare(node: Node, rule: str) -> str:
    """Declare the encoding inferred from the structure of an element."""
    kind, version = declared_encoding(node)
    # A frame of anndata 0.7 has its categories apart; declared as 0.2.0, its codes would be read as numbers.
    if version == "0.1.0" and kind == "dataframe" and rule == "A72":
        return ""
    if rule in CORRECT_ENCODINGS and kind in ("array", "string-array"):
        kind = CORRECT_ENCODINGS[rule]
    elif kind not in ENCODINGS:
        kind = infer(node)
    if rule == "A11":
        if layout_of(node):
            return ""
        kind = "anndata"
    if rule == "A27":
        if not {"X", "var"} <= set(node.children):
            return ""
        kind = "raw"
    if (kind, ENCODINGS[kind].versions[0]) == declared_encoding(node):
        return ""
    version = ENCODINGS[kind].versions[0]
    node.stored.attrs["encoding-type"], node.stored.attrs["encoding-version"] = kind, version
    return f"declared as {kind} {version}"


def write_as_text(node: Node) -> str:
    """Rewrite encoding attributes stored as bytes as text."""
    for name in ("encoding-type", "encoding-version"):
        if isinstance(plain_attribute(node.attrs.get(name)), bytes):
            node.stored.attrs[name] = as_text(node.attrs[name])
    return "attributes written as text"


def move_up(node: Node) -> str:
    """Move what a group in a mapping holds into the mapping, under the names of both: ``x/y`` becomes ``x_y``."""
    assert node.parent is not None
    mapping, leaves = node.parent, list(nested_members(node))
    names: list[str] = []
    for leaf in leaves:
        name = leaf.path.removeprefix(f"{mapping.path}/").replace("/", "_")
        while name in mapping.children or name in names:
            name += "_"
        names.append(name)
    for leaf, name in zip(leaves, names, strict=True):
        if node.in_hdf5:
            mapping.stored.move(leaf.path.removeprefix(f"{mapping.path}/"), name)
        else:
            (Path(node.uri) / leaf.path).rename(Path(node.uri) / mapping.path / name)
    if not leaves:
        return ""
    if node.in_hdf5:
        del mapping.stored[node.name]
    else:
        shutil.rmtree(Path(node.uri) / node.path)
    return f"its members are {', '.join(f'{mapping.path}/{name}' for name in names)}"


def sort_sparse(node: Node) -> str:
    """Sort the indices of a sparse matrix within each row (CSR) or column (CSC) and sum duplicates.

    Nothing is changed where the pointers are invalid or a sum overflows the dtype.
    """
    shape = sparse_shape(node)
    if shape is None or encoding_of(node) not in SPARSE:
        return ""
    pointers = node.children["indptr"]
    indptr = pointers.whole().astype(np.int64)
    parts = node.children["indices"], node.children["data"]
    if indptr[0] != 0 or (np.diff(indptr) < 0).any() or any(part.shape != (indptr[-1],) for part in parts):
        return ""
    lengths = _summed_lengths(parts, indptr, shape[0 if encoding_of(node) == "csr_matrix" else 1])
    if lengths is None:
        return ""
    # All three arrays are written anew before one is replaced, so that an error leaves the matrix as it was.
    bounds = np.cumsum(lengths)
    with (
        _new_array(pointers, pointers.dtype, bounds.shape) as new_pointers,
        _new_array(parts[0], parts[0].dtype, (int(bounds[-1]),)) as new_indices,
        _new_array(parts[1], parts[1].dtype, (int(bounds[-1]),)) as new_data,
    ):
        new_pointers[...] = bounds.astype(pointers.dtype)
        for first, last, indices, data in _row_blocks(parts, indptr):
            _, places, sums = _sum_duplicates(np.diff(indptr[first : last + 1]), indices, data)
            new_indices[bounds[first] : bounds[last]] = places
            new_data[bounds[first] : bounds[last]] = sums
    removed = int(indptr[-1] - bounds[-1])
    return f"entries sorted{f', {removed:,} summed into others' if removed else ''}"


def make_signed(node: Node) -> str:
    """Convert unsigned pointers or indices to int64."""
    if node.kind != "integer" or any(len(v) and int(v.max()) > np.iinfo(np.int64).max for _, v in node.blocks()):
        return ""
    with _new_array(node, np.dtype(np.int64), node.shape or ()) as array:
        for start, values in node.blocks():
            array[start : start + len(values)] = values.astype(np.int64, copy=False)
    return "written as int64"


def name_index(node: Node) -> str:
    """Set `_index` of a frame if it has a member with a usual name."""
    for name in ("_index", "index"):
        if name in node.children:
            node.stored.attrs["_index"] = name
            return f"_index set to {name!r}"
    return ""


def list_columns(node: Node) -> str:
    """Set column-order of a frame: the listed columns that exist, in order, then all others."""
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
    if node.in_hdf5:
        import h5py

        # With a dtype, because h5py stores an empty list as float64, which is no list of text.
        texts = np.array(names, dtype=object)
        node.stored.attrs.create("column-order", texts, dtype=h5py.string_dtype(), shape=texts.shape)
    else:
        node.stored.attrs["column-order"] = names
    return f"column-order lists {len(names):,} columns"


def write_text(node: Node) -> str:
    """Rewrite text as variable-length UTF-8; fails if it cannot be decoded."""
    if node.text is None:
        return ""
    values = np.asarray(node.whole(), dtype=object)
    flat = [v.decode("utf-8") if isinstance(v, bytes) else str(v) for v in values.reshape(-1).tolist()]
    if values.shape == ():
        write_small(node, flat[0])
    else:
        array = np.empty(len(flat), dtype=object)
        array[:] = flat
        write_small(node, array.reshape(values.shape))
    return "written as UTF-8 text of variable length"


def set_ordered(node: Node) -> str:
    """Set the ordered flag of a categorical to a boolean; a missing flag becomes false."""
    stated = plain_attribute(node.attrs.get("ordered"))
    if stated is not None and not isinstance(stated, int):
        return ""
    node.stored.attrs["ordered"] = bool(stated)
    return f"ordered set to {str(bool(stated)).lower()}"


def make_boolean(node: Node, name: str) -> str:
    """Convert values or a mask that contain only 0 and 1 to booleans."""
    member = node.child(name)
    if member is None or not member.is_array or not is_binary(member):
        return ""
    write_small(member, member.whole().astype(bool))
    return f"{member.name} written as booleans"


def set_missing_value(node: Node) -> str:
    """Set na-value to the value that readers assume for an unknown one."""
    node.stored.attrs["na-value"] = "NA"
    return "na-value set to NA"


_DECLARED = (
    "A01", "A02", "A11", "A26", "A27", "A41", "A52", "A53", "A72", "A81", "A91", "A93", "A101", "A111", "A121", "A131",
    "A141",
)  # fmt: skip

FIXES: dict[str, Fix] = {
    **{rule: partial(declare, rule=rule) for rule in _DECLARED},
    "A04": write_as_text,
    "A05": lambda _: "metadata consolidated again",  # by `_open_for_writing`, as after every fix
    **dict.fromkeys(("A16", "A18", "A20", "A22", "A24"), move_up),
    "A59": sort_sparse,
    "A60": make_signed,
    "A71": name_index,
    "A73": list_columns,
    "A77": list_columns,
    "A94": write_text,
    "A95": write_text,
    "A102": set_ordered,
    "A112": write_text,
    "A113": write_text,
    "A123": partial(make_boolean, name="mask"),
    "A132": partial(make_boolean, name="values"),
    "A133": partial(make_boolean, name="mask"),
    "A142": set_missing_value,
    "A144": partial(make_boolean, name="mask"),
    "A146": set_missing_value,
}
"""Rule -> its fix, which returns a description of the change, or ``""`` if it cannot be fixed."""


ENTRIES = 1 << 20
"""Number of entries of a sparse matrix that are sorted at once; a longer row is sorted at once."""

LAST_BUILTIN_FILTER = 255
"""Numbers of HDF5 filters above this are those of plugins."""

Blocks = Iterator[tuple[int, NDArray[Any]]]


def parent_of(node: Node) -> Any:  # noqa: ANN401  (a group of either library)
    """Return the stored parent group of a node."""
    assert node.parent is not None
    return node.parent.stored


def write_small(node: Node, value: Any) -> None:  # noqa: ANN401  (any element that AnnData knows)
    """Rewrite an element with anndata's writer and keep its other attributes; an element that cannot be written stays."""
    from anndata.io import write_elem

    kept = {name: value for name, value in node.attrs.items() if not name.startswith("encoding-")}
    with _replacement(node) as temporary:
        group = parent_of(node)
        write_elem(group, temporary, value)
        for name, attribute in kept.items():
            group[temporary].attrs[name] = attribute


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


def _sum_duplicates(
    lengths: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[Any]]:
    """Return the row, index and value of each entry, sorted, with duplicates summed."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    # `lexsort` sorts by its last key first: by row, and by index within a row.
    order = np.lexsort((indices, rows))
    rows, indices, data = rows[order], indices[order], data[order]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows[1:] != rows[:-1]) | (indices[1:] != indices[:-1])
    if is_first.all():
        return rows, indices, data
    starts = np.flatnonzero(is_first)
    sums = np.logical_or.reduceat(data, starts) if data.dtype.kind == "b" else np.add.reduceat(_wide(data), starts)
    return rows[starts], indices[starts], sums.astype(data.dtype)


def _wide(data: NDArray[Any]) -> NDArray[Any]:
    return data.astype({"i": np.int64, "u": np.uint64}.get(data.dtype.kind, data.dtype))


def _summed_lengths(parts: tuple[Node, Node], indptr: NDArray[np.int64], n_major: int) -> NDArray[np.int64] | None:
    """Return 0 and the length of each row without duplicates; None if a sum does not fit the dtype of the values."""
    lengths = np.zeros(n_major + 1, np.int64)
    dtype = parts[1].dtype
    for first, last, indices, data in _row_blocks(parts, indptr):
        rows, _, sums = _sum_duplicates(np.diff(indptr[first : last + 1]), indices, _wide(data))
        lengths[first + 1 : last + 1] = np.bincount(rows, minlength=last - first)
        if len(sums) == len(data) or dtype.kind == "b":
            continue
        if dtype.kind in "iu":
            limits, largest = np.iinfo(dtype), max(abs(int(data.min())), abs(int(data.max())))
            # Values so large that 64-bit sums could wrap around do not fit.
            could_wrap = dtype.itemsize == 8 and largest * len(data) > limits.max
            fits = not could_wrap and sums.min() >= limits.min and sums.max() <= limits.max
        else:
            fits = np.isfinite(sums).all() or not np.isfinite(data).all()
        if not fits:
            return None
    return lengths


@contextmanager
def _new_array(node: Node, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[Any]:
    """Yield a new array with the chunks, compression and attributes of another, which it replaces unless there is an error."""
    old = node.stored
    options: dict[str, Any] = {}
    if not node.in_hdf5:
        options = {"chunks": old.chunks, "shards": old.shards, "compressors": old.compressors}
    elif old.chunks and 0 not in shape:
        fitting = tuple(min(c, s) for c, s in zip(old.chunks, shape, strict=True))
        options = {"chunks": fitting, "maxshape": tuple(None for _ in shape)}
        options |= {"compression": old.compression, "compression_opts": old.compression_opts}
        options |= {"shuffle": old.shuffle, "fletcher32": old.fletcher32}
        if old.compression not in ("gzip", "lzf", "szip"):
            # h5py names no plugin: it has None or "unknown" for them.
            plist = old.id.get_create_plist()
            filters = [plist.get_filter(i) for i in range(plist.get_nfilters())]
            plugins = [one for one in filters if one[0] > LAST_BUILTIN_FILTER and filter_available(one[0])]
            code, _, values, _ = plugins[0] if plugins else (None, 0, None, b"")
            options |= {"compression": code, "compression_opts": values}
    with _replacement(node) as temporary:
        create = parent_of(node).create_dataset if node.in_hdf5 else parent_of(node).create_array
        array = create(temporary, shape=shape, dtype=dtype, **options)
        for name, value in node.attrs.items():
            array.attrs[name] = value
        yield array


@contextmanager
def _replacement(node: Node) -> Iterator[str]:
    """Yield a name next to that of an element; what is written there replaces the element, or is removed after an error."""
    group, temporary = parent_of(node), f"{node.name}.{uuid4().hex[:8]}"
    folder = Path(node.uri) / node.path
    try:
        yield temporary
    except BaseException:
        if temporary in group:
            del group[temporary]
        raise
    if node.in_hdf5:
        del group[node.name]
        group.move(temporary, node.name)
    else:
        shutil.rmtree(folder)
        folder.with_name(temporary).rename(folder)
