"""What every check of a stored AnnData shares: the encoding of a node, its extent, and the list of problems."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError, LimitError
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute
from raggedatlas.formats.anndata.rules import RULES
from raggedatlas.formats.containers import readable
from raggedatlas.model.validation import Checker, Rule

Layout = Literal["", "0.7", "0.5"]
Check = Callable[["AnnDataChecker", Node], None]

MOST_NODES = 1_000_000
"""Elements beyond which a file is not checked further: links can multiply without end."""

VERSIONS: dict[str, tuple[str, ...]] = {
    "anndata": ("0.1.0",),
    "raw": ("0.1.0",),
    "dict": ("0.1.0",),
    "dataframe": ("0.2.0", "0.1.0"),
    "array": ("0.2.0",),
    "string-array": ("0.2.0",),
    "rec-array": ("0.2.0",),
    "bytes": ("0.2.0",),
    "numeric-scalar": ("0.2.0",),
    "string": ("0.2.0",),
    "null": ("0.1.0",),
    "csr_matrix": ("0.1.0",),
    "csc_matrix": ("0.1.0",),
    "categorical": ("0.2.0",),
    "nullable-integer": ("0.1.0",),
    "nullable-boolean": ("0.1.0",),
    "nullable-string-array": ("0.1.0",),
    "awkward-array": ("0.1.0",),
}
"""Registered encoding-type -> its versions, the one that is written first."""

ARRAYS = {"array", "string-array", "rec-array", "bytes", "numeric-scalar", "string", "null"}
"""Encodings that are stored as an array; all others are groups."""

STRUCTURE_RULES = {
    "anndata": "A10", "raw": "A27", "dict": "A80", "dataframe": "A70", "array": "A40", "string-array": "A110",
    "numeric-scalar": "A90", "string": "A90", "csr_matrix": "A50", "csc_matrix": "A50", "categorical": "A100",
    "nullable-integer": "A120", "nullable-boolean": "A130", "nullable-string-array": "A140", "awkward-array": "A150",
}  # fmt: skip
"""Encoding -> the rule that says whether it is an array or a group; A03 for others."""

ENCODING_RULES = {
    "anndata": "A11", "raw": "A27", "dict": "A81", "dataframe": "A72", "array": "A41", "string-array": "A111",
    "numeric-scalar": "A91", "string": "A93", "csr_matrix": "A53", "csc_matrix": "A53", "categorical": "A101",
    "nullable-integer": "A121", "nullable-boolean": "A131", "nullable-string-array": "A141", "awkward-array": "A150",
}  # fmt: skip
"""Encoding -> the rule that says how it is declared; A03 for others."""

TEXT_RULES = {"string-array": ("A112", "A113"), "string": ("A94", "A95")}
"""Encoding of text -> the rules of Zarr and of HDF5 that say that it holds text."""

SPARSE = ("csr_matrix", "csc_matrix")

_VERSION = re.compile(r"v?\d+(\.\d+)*((a|b|rc|\.?dev|\.?post)\d*)?", re.IGNORECASE)


@dataclass
class AnnDataChecker(Checker[Node]):
    """Checker of one AnnData.

    Parameters
    ----------
    checks : mapping
        Encoding-type -> what checks such an element.
    full : bool
        Whether values are read.
    layout : {"", "0.7", "0.5"}
        The generation of the file where it is an old one, in which encodings need not be declared.
    prefix : str
        Where the AnnData stands in its file, such as ``"mod/rna"``.
    compare : bool
        Whether the names of frames along an axis are compared with those of the axis though other values are not read.
    n_nodes : int
        How many elements were looked at.
    read_names : dict
        Path of an index -> hashes of its blocks; who asks for them puts an empty list there, so that names are read once.
    """

    rules: ClassVar[Mapping[str, Rule]] = RULES
    damage: ClassVar[str] = "A00"

    checks: Mapping[str, Check]
    full: bool
    layout: Layout = ""
    prefix: str = ""
    compare: bool = False
    n_nodes: int = 0
    read_names: dict[str, list[NDArray[np.uint64]]] = field(default_factory=dict)

    def unreadable(self, node: Node, fault: str) -> None:
        """Note that an element cannot be read; the reason says the way out after its last semicolon."""
        said, _, way_out = fault.removeprefix(f"{node.uri}: ").rpartition("; ")
        if said and way_out.endswith("."):
            self.report("A00", node, f"{said}.", fix=f"{way_out[0].upper()}{way_out[1:]}")
        else:
            self.report("A00", node, fault)

    def element(self, node: Node, *, declared: bool = True) -> None:
        """Check an element and what it holds.

        Parameters
        ----------
        node : Node
            The element.
        declared : bool
            Whether it must declare its encoding; not so inside of frames of anndata 0.7.

        Raises
        ------
        LimitError
            If there are too many elements.
        """
        self.n_nodes += 1
        if self.n_nodes > MOST_NODES:
            raise LimitError(f"{node.uri} holds more than {MOST_NODES:,} elements; it is not checked further.")
        if node.fault:
            self.unreadable(node, node.fault)
        if node.stored is not None:
            with self.guarded(node):
                encoding = self._encoding(node, declared=declared and not self.layout)
                if encoding and self._fits(node, encoding):
                    self.checks.get(encoding, decode)(self, node)

    def inner(self, node: Node | None, *, text: bool = True) -> None:
        """Check how a part of an element, such as the codes of a categorical, declares its encoding, by which readers choose.

        A part that declares nothing is read by what it is. `text` is False for a part that a rule of its own asks to be text.
        """
        if node is not None and node.stored is not None and not node.fault:
            encoding = self._encoding(node, declared=False)
            fits = bool(encoding) and self._fits(node, encoding)
            if text and fits and encoding in TEXT_RULES and node.text is None:
                rule = TEXT_RULES[encoding][node.in_hdf5]
                self.report(rule, node, f"its values are of type {node.dtype}, where text belongs.")

    @contextmanager
    def guarded(self, place: Node, rule: str = "") -> Iterator[None]:
        """Report what cannot be read as a problem of its own."""
        with super().guarded(place, rule), readable(place.uri, str(place) or "the root"):
            yield

    def report_error(self, place: Node, error: BaseException, rule: str) -> None:
        """Report an exception, unless it ends the check or the node is already known to be unreadable."""
        if self.n_nodes > MOST_NODES and isinstance(error, LimitError):
            raise error
        if isinstance(error, MemoryError):
            reason = str(error) or "out of memory"
            self.unreadable(place, f"it cannot be read ({reason}); the file is damaged. Fetch or write it again.")
        elif not isinstance(error, AtlasError):
            super().report_error(place, error, rule)
        elif not place.fault:
            self.unreadable(place, str(error))

    def _encoding(self, node: Node, *, declared: bool) -> str:
        """Return what a node is to be checked as, ``""`` for nothing."""
        kind, version = declared_encoding(node)
        for name in ("encoding-type", "encoding-version"):
            if isinstance(plain_attribute(node.attrs.get(name)), bytes):
                self.report("A04", node, f"{name} is stored as bytes.")
        if not kind:
            stated = {"encoding-type", "encoding-version"} & set(node.attrs)
            if declared or (stated and not self.layout):
                rule = "A26" if self.in_uns(node) else "A01"
                self.report(rule, node, f"it has no text attribute encoding-type; it looks like {infer(node)}.")
            return infer(node)
        if kind not in VERSIONS:
            return self._unknown(node, kind)
        if not version or not _VERSION.fullmatch(version):
            if not self.layout:
                self.report("A02", node, f"its encoding-version is {version!r}, which is no version.")
        elif version not in VERSIONS[kind]:
            rule = ENCODING_RULES.get(kind, "A03")
            self.report(rule, node, f"its encoding is {kind} {version}, where {' or '.join(VERSIONS[kind])} is known.")
        return kind

    def _unknown(self, node: Node, kind: str) -> str:
        looks = infer(node)
        sparse = {"data", "indices", "indptr"} <= set(node.children)
        plain = looks in {"dict", "array", "string-array", "rec-array", "null", "numeric-scalar", "string"}
        rule = "A52" if sparse else "A03" if plain else ENCODING_RULES[looks]
        self.report(rule, node, f"its encoding-type is {kind!r}, which nothing knows; it looks like {looks}.")
        return "" if plain else looks

    def _fits(self, node: Node, encoding: str) -> bool:
        if (encoding in ARRAYS) == node.is_array or self._old_frame(node, encoding):
            return True
        has, wanted = ("an array", "a group") if node.is_array else ("a group", "an array")
        self.report(STRUCTURE_RULES.get(encoding, "A03"), node, f"{encoding} is {has} here, where {wanted} belongs.")
        return False

    def _old_frame(self, node: Node, encoding: str) -> bool:
        return bool(self.layout) and encoding == "dataframe" and node.kind == "record"

    def in_uns(self, node: Node) -> bool:
        """Tell whether a node is an entry of `uns`, or below one."""
        return node.path.removeprefix(self.prefix).strip("/").startswith("uns/")


def decode(checker: AnnDataChecker, node: Node) -> None:
    """Read all values of an array, which is all that can be said of most."""
    if checker.full and node.is_array and not node.fault:
        for _ in node.blocks():
            pass


def declared_encoding(node: Node) -> tuple[str, str]:
    """Return encoding-type and encoding-version as text; ``""`` for one that is missing or no text."""
    kind, version = (as_text(node.attrs.get(name)) for name in ("encoding-type", "encoding-version"))
    if not kind and "h5sparse_format" in node.attrs:
        return f"{as_text(node.attrs['h5sparse_format'])}_matrix", "0.1.0"
    return kind, version


def as_text(value: object) -> str:
    """Return an attribute that is text or bytes as text, anything else as ``""``.

    Examples
    --------
    >>> as_text(b"dict"), as_text("dict"), as_text(1), as_text(None)
    ('dict', 'dict', '', '')
    """
    value = plain_attribute(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return value if isinstance(value, str) else ""


def infer(node: Node) -> str:
    """Tell from its structure which encoding a node must have."""
    if node.is_array:
        return _infer_array(node)
    names = set(node.children)
    if "_index" in node.attrs or "column-order" in node.attrs:
        return "dataframe"
    if {"data", "indices", "indptr"} <= names:
        return _infer_sparse(node)
    if {"codes", "categories"} <= names:
        return "categorical"
    if {"values", "mask"} <= names:
        kind = node.children["values"].kind
        return {"bool": "nullable-boolean", "text": "nullable-string-array"}.get(kind, "nullable-integer")
    if {"form", "length"} <= set(node.attrs):
        return "awkward-array"
    return "anndata" if {"obs", "var"} <= names else "dict"


def _infer_array(node: Node) -> str:
    if node.shape is None:
        return "null"
    if node.kind == "record":
        return "rec-array"
    if node.text is not None and (node.shape == () or node.text.variable):
        return "string" if node.shape == () else "string-array"
    return "numeric-scalar" if node.shape == () else "array"


def _infer_sparse(node: Node) -> str:
    shape, pointers = sparse_shape(node), node.children["indptr"].shape
    by_rows = shape is None or not pointers or pointers[0] - 1 == shape[0]
    return "csr_matrix" if by_rows else "csc_matrix"


def encoding_of(node: Node) -> str:
    """Return the declared encoding-type where it is a known one, else the inferred one."""
    kind, _ = declared_encoding(node)
    return kind if kind in VERSIONS else infer(node)


def sparse_shape(node: Node) -> tuple[int, int] | None:
    """Return the declared shape of a sparse matrix; None where it is not two integers, zero or more."""
    stated = plain_attribute(node.attrs.get("shape", node.attrs.get("h5sparse_shape")))
    if not isinstance(stated, list | tuple) or len(stated) != 2:
        return None
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in stated):
        return None
    return int(stated[0]), int(stated[1])


def index_node(node: Node) -> Node | None:
    """Return the member of a frame that is its index."""
    return node.child(as_text(node.attrs.get("_index")) or "_index")


def n_rows(node: Node) -> int | None:
    """Return how many rows a frame, a column, or an array has; None where that cannot be told."""
    found = extent(node)
    return found[0] if found else None


def extent(node: Node) -> tuple[int, ...] | None:
    """Return the sizes of an element, whatever its encoding; None where they cannot be told."""
    if node.is_array:
        return node.shape
    encoding = encoding_of(node)
    if encoding in SPARSE:
        return sparse_shape(node)
    if encoding == "dataframe":
        index = index_node(node)
        rows = n_rows(index) if index is not None else None
        return None if rows is None else (rows, sum(child is not index for child in node.children.values()))
    if encoding == "awkward-array":
        length = plain_attribute(node.attrs.get("length"))
        return (length,) if isinstance(length, int) else None
    inner = node.children.get("codes") or node.children.get("values")
    return inner.shape if inner is not None else None


def layout_of(root: Node) -> Layout:
    """Tell which generation of anndata wrote an AnnData; ``""`` for 0.8 and later."""
    obs = root.child("obs")
    if obs is None:
        return ""
    if obs.is_array:
        return "0.5" if obs.kind == "record" and not declared_encoding(root)[0] else ""
    # mudata 0.1 declared the root of such a file, and nothing below.
    return "0.7" if declared_encoding(obs) == ("dataframe", "0.1.0") else ""


def listed(value: object) -> list[str] | None:
    """Return the names in an attribute such as column-order; None where it is no list of text.

    Examples
    --------
    >>> listed(np.array(["a", b"b"], dtype=object)), listed(np.array([])), listed([1])
    (['a', 'b'], [], None)
    """
    value = plain_attribute(value)
    names = [value] if isinstance(value, str | bytes) else value
    if not isinstance(names, list | tuple):
        return None
    if not all(isinstance(name, str | bytes) for name in names):
        return None
    return [name.decode("utf-8", errors="replace") if isinstance(name, bytes) else name for name in names]


Hashes = NDArray[np.uint64]


def names_node(frame: Node) -> Node | None:
    """Return the array that holds the names of a frame's rows; None if there is none that can be read."""
    index = index_node(frame)
    if index is not None and not index.is_array:
        index = index.child("values")
    readable = index is not None and index.is_array and not index.fault and len(index.shape or ()) == 1
    return index if readable else None


def name_hashes(frame: Node) -> Hashes | None:
    """Read the names of a frame's rows as hashes, (n,) uint64; None if there are none.

    Raises
    ------
    SourceError
        If they cannot be read.
    """
    index = names_node(frame)
    return None if index is None else joined([hash_names(values) for _, values in index.blocks()])


def hash_names(values: NDArray[Any]) -> Hashes:
    """Hash names, (n,) uint64; text and its UTF-8 bytes have one hash."""
    import pandas as pd

    flat = values.astype(object) if values.dtype.kind in "SUT" else values
    found: Hashes = pd.util.hash_array(flat, categorize=False)
    return found


def joined(parts: list[Hashes]) -> Hashes:
    """Put the hashes of blocks together."""
    return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def check_unique_names(checker: AnnDataChecker, frame: Node) -> Hashes | None:
    """Say if a name of a frame's rows is there twice (A29), and return the hashes of all."""
    index = names_node(frame)
    if index is None:
        return None
    parts = checker.read_names.pop(index.path, [])
    hashes = joined(parts)
    if len(hashes) != (index.shape or (0,))[0]:
        hashes = joined([hash_names(values) for _, values in index.blocks()])
    ordered = np.sort(hashes)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(twice):
        _report_twice(checker, index, hashes, twice)
    return hashes


def _report_twice(checker: AnnDataChecker, index: Node, hashes: Hashes, twice: Hashes) -> None:
    """Let the names themselves decide: equal hashes may be of different names."""
    known: set[object] = set()
    for start, values in index.blocks():
        for at in np.flatnonzero(np.isin(hashes[start : start + len(values)], twice)):
            name = values[at]
            if name in known:
                said = name.decode("utf-8", errors="replace") if isinstance(name, bytes) else str(name)
                checker.report("A29", index, f"the name {said!r} is there more than once.")
                return
            known.add(name)
