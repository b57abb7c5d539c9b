"""Checks of a whole AnnData (A10 to A30): its members, and that they fit its two axes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from raggedatlas.formats.anndata.checking import (
    SPARSE,
    AnnDataChecker,
    Hashes,
    check_unique_names,
    declared_encoding,
    encoding_of,
    extent,
    n_rows,
    name_hashes,
    names_node,
)
from raggedatlas.formats.anndata.checks_arrays import NUMBERS
from raggedatlas.formats.anndata.file_tree import Node

MATRICES = ("array", *SPARSE)
ROWS = (*MATRICES, "dataframe", "awkward-array")

ROOT = {"X", "layers", "obs", "obsm", "obsp", "raw", "uns", "var", "varm", "varp"}
"""Members of the root of an AnnData."""

OLD_ROOT = {"raw.X", "raw.var", "raw.varm", "raw.cat"}
"""Further members in anndata 0.5 and 0.6."""


@dataclass(frozen=True, slots=True)
class _Axes:
    """Numbers of cells and features, and hashes of their names; None if unknown or not read."""

    n_obs: int | None
    n_var: int | None
    obs_names: Hashes | None = None
    var_names: Hashes | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rules of the entries of one mapping, and what they require."""

    types: str
    shape: str
    kinds: tuple[str, ...]
    sizes: Callable[[_Axes], tuple[int | None, ...]]
    names: Callable[[_Axes], Hashes | None] = lambda axes: None
    exact: bool = False


GROUPS = {
    "layers": _Group("A16", "A17", MATRICES, lambda axes: (axes.n_obs, axes.n_var), exact=True),
    "obsm": _Group("A18", "A19", ROWS, lambda axes: (axes.n_obs,), lambda axes: axes.obs_names),
    "varm": _Group("A20", "A21", ROWS, lambda axes: (axes.n_var,), lambda axes: axes.var_names),
    "obsp": _Group("A22", "A23", MATRICES, lambda axes: (axes.n_obs, axes.n_obs)),
    "varp": _Group("A24", "A25", MATRICES, lambda axes: (axes.n_var, axes.n_var)),
}
"""Mapping -> rules of its entries."""


def check_anndata(checker: AnnDataChecker, node: Node) -> None:
    """Check an AnnData and everything in it."""
    if node.is_array:
        checker.report("A10", node, "it is an array; expected a group.")
        return
    (n_obs, obs_names), (n_var, var_names) = (_check_axis(checker, node, name) for name in ("obs", "var"))
    axes = _Axes(n_obs, n_var, obs_names, var_names)
    _check_x(checker, node, axes)
    for name, group in GROUPS.items():
        mapping = node.child(name)
        if mapping is not None:
            check_mapping(checker, mapping, axes, group)
    uns = node.child("uns")
    if uns is not None:
        checker.element(uns)
    _check_raw(checker, node, axes)
    known = ROOT | (OLD_ROOT if checker.layout == "0.5" else set())
    for name in sorted(set(node.children) - known):
        if node.in_hdf5:
            checker.report("A28", node.children[name], "anndata refuses to read a file with this at its root.")


def _check_axis(checker: AnnDataChecker, node: Node, name: str) -> tuple[int | None, Hashes | None]:
    """Check obs or var, and return its length, and its names if values are read."""
    frame = node.child(name)
    if frame is None:
        checker.report("A12", node, f"there is no {name}.")
        return None, None
    if frame.fault:
        checker.unreadable(frame, frame.fault)
        return None, None
    if checker.layout and frame.kind == "record":
        with checker.guarded(frame):
            checker.checks["dataframe"](checker, frame)
        return n_rows(frame), None
    if encoding_of(frame) != "dataframe":
        checker.report("A13", frame, f"it is of encoding {encoding_of(frame)}; expected a dataframe.")
        return None, None
    index = names_node(frame)
    if checker.full and index is not None:
        # The key makes `check_text` collect the hashes while it reads the index.
        checker.read_names[index.path] = []
    checker.element(frame)
    return n_rows(frame), _names(checker, frame, node.child(f"{name}m"))


def _names(checker: AnnDataChecker, frame: Node, mapping: Node | None) -> Hashes | None:
    """Return the names of an axis if frames in a mapping are compared with them; if values are read, check that they are unique."""
    read: Callable[[Node], Hashes | None] = partial(check_unique_names, checker)
    if not checker.full:
        members = mapping.children.values() if mapping is not None else ()
        if not checker.compare or not any(encoding_of(member) == "dataframe" for member in members):
            return None
        read = name_hashes
    # `guarded` reports an error instead of raising it, so the last line is reached.
    with checker.guarded(frame):
        return read(frame)
    return None


def _check_x(checker: AnnDataChecker, node: Node, axes: _Axes) -> None:
    x = node.child("X")
    if x is None:
        return
    checker.element(x)
    kind = encoding_of(x)
    if x.fault or x.stored is None or kind == "null":
        return
    # Text is an array and so satisfies A14; its type breaks A30 below.
    if kind not in MATRICES and not (x.is_array and x.text is not None):
        checker.report("A14", x, f"it is of encoding {kind}; expected a dense or sparse array.")
        return
    _check_shape(checker, x, "A15", (axes.n_obs, axes.n_var), exact=True)
    values = x if x.is_array else x.child("data")
    flat = len(extent(x) or (0, 0)) == 2
    if values is not None and values.is_array and not (flat and values.kind in NUMBERS):
        checker.report(
            "A30",
            x,
            f"its values are of type {values.dtype} on {len(extent(x) or ())} axes; expected numbers on two.",
        )


def check_mapping(checker: AnnDataChecker, mapping: Node, axes: _Axes, group: _Group) -> None:
    """Check a mapping along an axis, and its entries."""
    if mapping.is_array:
        # anndata 0.5 and 0.6 stored obsm and varm as arrays of records, with a field for each member.
        if not (checker.layout and mapping.kind == "record"):
            checker.element(mapping)
            checker.report("A80", mapping, "it is an array; expected a group.")
        elif mapping.shape and mapping.shape[:1] != group.sizes(axes)[:1]:
            checker.report(group.shape, mapping, f"it has {mapping.shape[0]:,} rows.")
        return
    checker.element(mapping)
    for child in mapping.children.values():
        kind = encoding_of(child)
        if child.stored is None:
            continue
        if kind not in group.kinds:
            checker.report(
                group.types,
                child,
                f"it is of encoding {kind}; expected {', '.join(group.kinds[:-1])} or {group.kinds[-1]}.",
            )
            continue
        rule = "A151" if kind == "awkward-array" else group.shape
        _check_shape(checker, child, rule, group.sizes(axes), exact=group.exact)
        if child.is_array and len(child.shape or ()) == 1 and "dataframe" in group.kinds:
            checker.report(group.types, child, "it has one axis; expected two or more.", "practice")
        names = group.names(axes) if kind == "dataframe" and not child.is_array else None
        if names is not None:
            with checker.guarded(child):
                _check_names(checker, child, names, rule)


def _check_names(checker: AnnDataChecker, frame: Node, names: Hashes, rule: str) -> None:
    """Compare the row names of a frame with those of its axis."""
    own = name_hashes(frame)
    if own is not None and len(own) == len(names) and not np.array_equal(own, names):
        row = int(np.argmax(own != names))
        checker.report(rule, frame, f"its row {row:,} has another name than row {row:,} of the axis.")


def _check_shape(checker: AnnDataChecker, node: Node, rule: str, sizes: tuple[int | None, ...], *, exact: bool) -> None:
    shape = extent(node)
    if shape is None:
        return
    # `sizes` may be shorter than `shape`: further axes, as of an array in obsm, are not compared.
    n_axes = len(shape) == len(sizes) if exact else len(shape) >= len(sizes)
    if not n_axes or any(size not in (None, n) for n, size in zip(shape, sizes, strict=False)):
        wanted = ", ".join("any" if size is None else f"{size:,}" for size in sizes)
        more = "" if exact else ", ..."
        checker.report(rule, node, f"its shape is {shape}; expected ({wanted}{more}) according to obs and var.")


def _check_raw(checker: AnnDataChecker, node: Node, axes: _Axes) -> None:
    raw, dotted = node.child("raw"), node.child("raw.X")
    if raw is None and dotted is not None:
        checker.element(dotted)
        _check_shape(checker, dotted, "A27", (axes.n_obs, None), exact=True)
    if raw is not None and raw.fault:
        checker.unreadable(raw, raw.fault)
    if raw is None or raw.stored is None or encoding_of(raw) == "null":
        return
    if raw.is_array:
        checker.report("A27", raw, "it is an array; expected a group.")
        return
    declared = declared_encoding(raw)
    if declared != ("raw", "0.1.0") and not checker.layout:
        encoding = " ".join(declared).strip() or "undeclared"
        checker.report("A27", raw, f"its encoding is {encoding}; expected raw 0.1.0.")
    parts = {name: raw.child(name) for name in ("X", "var", "varm")}
    for name in ("X", "var"):
        if parts[name] is None:
            checker.report("A27", raw, f"it has no {name}.")
    _check_raw_parts(checker, axes.n_obs, parts["X"], parts["var"], parts["varm"])


def _check_raw_parts(
    checker: AnnDataChecker, n_obs: int | None, x: Node | None, var: Node | None, varm: Node | None
) -> None:
    axes = _Axes(n_obs, None if var is None else n_rows(var))
    if var is not None:
        checker.element(var)
        axes = replace(axes, var_names=_names(checker, var, varm))
    if x is not None:
        checker.element(x)
        _check_shape(checker, x, "A27", (axes.n_obs, axes.n_var), exact=True)
    if varm is not None:
        check_mapping(checker, varm, axes, GROUPS["varm"])
