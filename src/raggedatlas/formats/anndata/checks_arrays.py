"""Checks of arrays, text, scalars, mappings, sparse matrices and awkward arrays (A40 to A61, A80 to A96, A110 to A152)."""

import json
from collections.abc import Iterator, Mapping
from ctypes import byref
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute
from raggedatlas.formats.anndata.rules import (
    REWRITE,
    AnnDataChecker,
    as_text,
    decode,
    encoding_of,
    hash_names,
    sparse_shape,
)
from raggedatlas.model.batch import sparse_dtype
from raggedatlas.store.native import csr_of, library

NUMBERS = ("bool", "integer", "real", "complex")


def check_members(checker: AnnDataChecker, node: Node) -> None:
    """Check a mapping, or a group of encoding raw outside of an AnnData: each member is an element."""
    for child in node.children.values():
        checker.element(child)


def check_array(checker: AnnDataChecker, node: Node) -> None:
    """Check an array of encoding array."""
    if not checker.layout and node.shape == ():
        rule, encoding = ("A93", "string") if node.text is not None else ("A91", "numeric-scalar")
        checker.report(rule, node, f"one value is declared as array; expected {encoding}.")
    elif node.text is not None and (node.text.variable or node.kind == "text"):
        if not checker.layout:
            checker.report("A111", node, "text is declared as array; expected string-array.")
        check_text(checker, node)
        return
    decode(checker, node)


def check_string_array(checker: AnnDataChecker, node: Node) -> None:
    """Check an array of encoding string-array."""
    if node.shape == () and not checker.layout:
        checker.report("A93", node, "one text is declared as string-array; expected string.")
    check_text(checker, node)


def check_text(checker: AnnDataChecker, node: Node) -> None:
    """Check that an array is text of the right kind and, if values are read, valid."""
    rule = "A113" if node.in_hdf5 else "A112"
    if node.text is None:
        checker.report(rule, node, f"its values are of type {node.dtype}; expected text.", fix=REWRITE)
    elif not checker.layout and not (node.text.variable and node.text.utf8):
        text = "is not declared as UTF-8" if node.text.variable else f"is of fixed length ({node.dtype})"
        checker.report(rule, node, f"its text {text}.", "practice" if node.in_hdf5 else None)
    if node.text is None or not checker.full or node.fault:
        decode(checker, node)
        return
    names = checker.read_names.get(node.path)
    for start, values in node.blocks():
        invalid = invalid_utf8(values) if node.in_hdf5 else None
        if invalid is not None:
            checker.report("A113", node, f"the text in row {start + invalid:,} is not valid UTF-8.", fix=REWRITE)
            return
        if names is not None:
            names.append(hash_names(values))


def invalid_utf8(values: NDArray[Any]) -> int | None:
    """Return the position of the first value that is not valid UTF-8; None if all are."""
    flat: list[Any] = values.ravel().tolist()
    # A line break continues no character, so joining does not complete text that ends within one.
    try:
        b"\n".join(flat).decode("utf-8")  # much faster than one by one
    except UnicodeDecodeError:
        for i, value in enumerate(flat):
            try:
                value.decode("utf-8")
            except UnicodeDecodeError:
                return i
    except TypeError:
        return None
    return None


def check_number(checker: AnnDataChecker, node: Node) -> None:
    """Check an array of encoding numeric-scalar."""
    if node.kind not in NUMBERS:
        checker.report("A92", node, f"its value is of type {node.dtype}; expected a number.")
    _check_scalar(checker, node)


def check_string(checker: AnnDataChecker, node: Node) -> None:
    """Check an array of encoding string."""
    rule = "A95" if node.in_hdf5 else "A94"
    if node.text is None:
        checker.report(rule, node, f"its value is of type {node.dtype}; expected text.", fix=REWRITE)
    elif not checker.layout and (node.in_hdf5 and not node.text.variable):
        checker.report(rule, node, f"its text is of fixed length ({node.dtype}).")
    elif not checker.layout and not node.text.utf8:
        checker.report(rule, node, "its text is not declared as UTF-8.")
    if node.text is not None and node.in_hdf5 and checker.full and not node.fault:
        for _, values in node.blocks():
            if invalid_utf8(values) is not None:
                checker.report(rule, node, "its text is not valid UTF-8.", fix=REWRITE)
    _check_scalar(checker, node)


def _check_scalar(checker: AnnDataChecker, node: Node) -> None:
    if node.shape != () and not checker.layout:
        checker.report("A90", node, f"it has shape {node.shape}; expected one value.")
    if not checker.in_uns(node):
        checker.report("A96", node, "it is a scalar outside of uns.")
    decode(checker, node)


PARTS = ("indptr", "indices", "data")

MAX_TRACKED = 1 << 28
"""Longest minor axis on which duplicate entries are looked for (eight bytes for each position)."""

POINTERS = 1 << 20
"""Number of pointers read at once."""


def check_sparse(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of encoding csr_matrix or csc_matrix."""
    parts = [node.child(name) for name in PARTS]
    complete = True
    for name, part in zip(PARTS, parts, strict=True):
        if part is None or not part.is_array or len(part.shape or ()) != 1:
            text = "is missing" if part is None or part.stored is None else f"has shape {part.shape}"
            checker.report("A51", node, f"{name} {text}.")
            complete = False
        elif part.fault:
            checker.unreadable(part, part.fault)
    shape = sparse_shape(node)
    if shape is None:
        declared = node.attrs.get("shape", node.attrs.get("h5sparse_shape", "missing"))
        checker.report("A54", node, f"its shape is {declared}; expected two integers.")
    if not complete or shape is None:
        return
    by_rows = encoding_of(node) == "csr_matrix"
    indptr, indices, data = (part for part in parts if part is not None)
    if data.kind not in NUMBERS:
        checker.report("A51", node, f"data are of type {data.dtype}; expected numbers or booleans.")
    elif sparse_dtype(data.dtype) != data.dtype:
        checker.report("A61", data, f"data are of type {data.dtype.str}, which SciPy's sparse matrices do not support.")
    for part, verb in ((indptr, "is"), (indices, "are")):
        if part.kind != "integer":
            checker.report("A60", part, f"{part.name} {verb} of type {part.dtype}; expected integers.", fix=REWRITE)
        elif part.dtype.kind == "u":  # scipy refuses unsigned pointers
            checker.report("A60", part, f"{part.name} {verb} of type {part.dtype}; expected a signed one.", "practice")
    if indptr.kind == indices.kind == "integer" and _check_lengths(checker, node, shape[0 if by_rows else 1]):
        if checker.full and not (indptr.fault or indices.fault):
            _check_entries(checker, node, shape[1 if by_rows else 0], by_rows=by_rows)
        with checker.guarded(data):
            decode(checker, data)


def _check_lengths(checker: AnnDataChecker, node: Node, n_major: int) -> bool:
    """Check the lengths of the parts and the last pointer; return whether entries can be checked."""
    n_pointers, n_indices, n_data = (_length(node.children[name]) for name in PARTS)
    if n_pointers != n_major + 1:
        checker.report("A55", node, f"there are {n_pointers:,} pointers; expected {n_major + 1:,}.")
        return False
    indptr = node.children["indptr"]
    last = -1 if indptr.fault else int(indptr.part(n_pointers - 1, n_pointers)[0])
    if n_indices != n_data or (not indptr.fault and last != n_indices):
        text = f"the last pointer is {last:,}, but there are {n_indices:,} indices and {n_data:,} values."
        checker.report("A57", node, text)
    return True


def _length(node: Node) -> int:
    return node.shape[0] if node.shape else 0


def _check_entries(checker: AnnDataChecker, node: Node, n_minor: int, *, by_rows: bool) -> None:
    if n_minor > 2**48:
        raise LimitError(f"{node.uri}: {node.path} declares an axis of {n_minor:,}, more than can be checked.")
    seen = np.zeros(n_minor if n_minor <= MAX_TRACKED else 0, np.int64)
    # numbers of entries outside, duplicate and unsorted; the first row of each; the last index of the previous block
    counts = np.array([0, 0, 0, -1, -1, -1, -1], np.int64)
    indices = node.children["indices"]
    step, n_entries = indices.step(), _length(indices)
    cached, cached_at = np.empty(0, np.int64), 0
    for row, pointers in _pointer_blocks(checker, node, n_entries):
        at, end = int(pointers[0]), int(pointers[-1])
        while at < end:
            # Indices are read in aligned steps and kept, because a block of pointers may end within a step.
            if not cached_at <= at < cached_at + len(cached):
                cached_at = at - at % step
                cached = indices.part(cached_at, min(cached_at + step, n_entries))
            stop = min(end, cached_at + len(cached))
            low = int(np.searchsorted(pointers, at, side="right")) - 1
            high = int(np.searchsorted(pointers, stop, side="left"))
            bounds = np.clip(pointers[low : high + 1], at, stop) - at
            part = cached[at - cached_at : stop - cached_at]
            # A row that begins here must not be compared with the last index of the row before.
            if int(pointers[low]) == at:
                counts[6] = -1
            # The compiled loop takes int32 and int64; uint64 beyond int64 becomes negative, which is outside as well.
            part = part if part.dtype in (np.int32, np.int64) else part.astype(np.int64)
            entries = csr_of(bounds, np.ascontiguousarray(part))
            if library().ra_scan_entries(byref(entries), row + low, seen if seen.size else None, n_minor, counts):
                raise CorruptError(
                    f"{node.uri}: {node.path}/indptr changed while it was read; let nothing write the file."
                )
            at = stop
    outside, duplicate, unsorted, *rows, _ = (int(n) for n in counts)
    line, across = ("row", "column") if by_rows else ("column", "row")
    for rule, n, row, text in (
        ("A58", outside, rows[0], f"indices are outside its {n_minor:,} {across}s, the first in {line}"),
        ("A59", duplicate, rows[1], f"entries are duplicates, the first in {line}"),
        ("A59", unsorted, rows[2], f"indices do not ascend, the first in {line}"),
    ):
        if n:
            checker.report(rule, node, f"{n:,} {text} {row:,}.")


def _pointer_blocks(checker: AnnDataChecker, node: Node, n_entries: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield blocks of pointers with their first row, each beginning with the last of the one before; stop at the first wrong one."""
    indptr = node.children["indptr"]
    n = _length(indptr)
    unit = indptr.chunks[0] if indptr.chunks else 1
    step = max(unit, POINTERS - POINTERS % unit)
    last = 0
    for start in range(0, n, step):
        pointers = indptr.part(start, min(start + step, n)).astype(np.int64)
        pointers = pointers if start == 0 else np.concatenate([[last], pointers])
        if start == 0 and pointers[0] != 0:
            checker.report("A56", node, f"the first pointer is {int(pointers[0]):,} instead of 0.")
            return
        decreasing = np.flatnonzero(pointers[1:] < pointers[:-1])
        if len(decreasing):
            row = max(0, start - 1) + int(decreasing[0])
            checker.report("A56", node, f"pointers decrease from position {row:,} to the next.")
            return
        last = int(pointers[-1])
        # Pointers beyond the entries only make sense of a wrong last one (A57) or of a decrease that is still to come.
        if last <= n_entries:
            yield max(0, start - 1), pointers


MAX_FORM_DEPTH = 64
"""Levels of an awkward form below which nothing is checked."""

_FORM_KEYS = {
    "NumpyArray": ("primitive",), "EmptyArray": (), "RecordArray": ("contents",), "UnmaskedArray": ("content",),
    "ListOffsetArray": ("offsets", "content"), "ListArray": ("starts", "stops", "content"),
    "RegularArray": ("size", "content"), "IndexedArray": ("index", "content"), "IndexedOptionArray": ("index", "content"),
    "ByteMaskedArray": ("mask", "valid_when", "content"), "UnionArray": ("tags", "index", "contents"),
    "BitMaskedArray": ("mask", "valid_when", "lsb_order", "content"),
}  # fmt: skip
"""Class of an awkward form -> the keys without which awkward refuses it."""

_BUFFERS = ("offsets", "starts", "stops", "tags", "index", "mask")
"""Keys of a form that name the type of a buffer."""

_INDEX_BYTES = {"i8": 1, "u8": 1, "i32": 4, "u32": 4, "i64": 8}
"""Name of a type of these buffers -> bytes of one item."""


def check_awkward(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of encoding awkward-array."""
    checker.report("A152", node, "it is an awkward array.")
    length = plain_attribute(node.attrs.get("length"))
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        checker.report("A150", node, f"its length is {length!r}; expected a number of rows.")
        return
    try:
        form = json.loads(as_text(node.attrs.get("form")))
    except ValueError:
        form = None
    if not isinstance(form, dict):
        checker.report("A150", node, "its attribute form is not a JSON object.")
        return
    for child in node.children.values():
        checker.element(child, declared=False)
    fault = _form_fault(node, form, length if checker.full else None)
    if fault:
        checker.report("A150", node, fault)


def _form_fault(node: Node, form: Any, length: int | None, depth: int = 0) -> str:  # noqa: ANN401  (any JSON)
    """Return the first fault of a form of some length (None: not checked) and of its buffers, or ``""``."""
    if depth > MAX_FORM_DEPTH or not isinstance(form, dict) or not isinstance(form.get("class"), str):
        return "" if isinstance(form, str) else "its form is not a form of awkward."
    kind = form["class"]
    if kind not in _FORM_KEYS:
        return f"its form has the unknown class {kind!r}."
    missing = [key for key in _FORM_KEYS[kind] if key not in form]
    if missing:
        return f"its form of the class {kind!r} lacks {missing[0]!r}."
    if kind == "EmptyArray":
        return "its form has nothing where there are rows." if length else ""
    if kind == "NumpyArray":
        n_items = None if length is None else length * prod(int(size) for size in form.get("inner_shape") or ())
        return _buffer_fault(node, form, "data", n_items)
    for part in (part for part in _BUFFERS if part in _FORM_KEYS[kind]):
        more = {"offsets": 1}.get(part, 0)
        n_items = (length + 7) // 8 if length is not None and kind == "BitMaskedArray" else length
        fault = _buffer_fault(node, form, part, None if n_items is None else n_items + more)
        if fault:
            return fault
    try:
        inner = None if length is None else _inner_length(node, form, length)
    except ValueError as error:
        return str(error)
    contents = form["contents"] if "contents" in _FORM_KEYS[kind] else [form["content"]]
    contents = contents.values() if isinstance(contents, dict) else contents
    return next((fault for part in contents if (fault := _form_fault(node, part, inner, depth + 1))), "")


def _inner_length(node: Node, form: Mapping[str, Any], length: int) -> int | None:
    """Return the length that the forms in a form need; None if it is not checked."""

    def largest(part: str) -> int:
        blocks = node.children[f"{form.get('form_key')}-{part}"].blocks()
        return max((int(values.max(initial=-1)) for _, values in blocks), default=-1)

    match form["class"]:
        case "ListOffsetArray":
            offsets = node.children[f"{form['form_key']}-offsets"].whole()[: length + 1]
            if (offsets[1:] < offsets[:-1]).any() or (len(offsets) and offsets[0] < 0):
                raise ValueError(f"its offsets {form['form_key']!r} decrease.")
            return int(offsets[-1]) if len(offsets) else 0
        case "ListArray":
            return max(0, largest("stops"))
        case "IndexedArray" | "IndexedOptionArray":
            return largest("index") + 1
        case "RegularArray":
            return length * form["size"] if isinstance(form["size"], int) else None
        # How long each content must be follows only from tags and index together, which are not read.
        case "UnionArray":
            return None
    return length


def _buffer_fault(node: Node, form: Mapping[str, Any], part: str, n_items: int | None) -> str:
    """Return what is wrong with a buffer that needs some number of items (None: not checked), or ``""``."""
    name = f"{form.get('form_key')}-{part}"
    buffer = node.child(name)
    if buffer is None or not buffer.is_array or len(buffer.shape or ()) != 1:
        return f"its buffer {name!r} is missing."
    declared = str(form.get("primitive" if part == "data" else part))
    try:
        width = np.dtype(declared).itemsize if part == "data" else _INDEX_BYTES.get(declared)
    except TypeError:
        width = None
    if width not in (None, buffer.dtype.itemsize):
        # awkward reads the bytes as the type of the form, whatever the type of the array
        return f"its buffer {name!r} is of type {buffer.dtype}, where its form has {declared}."
    n = (buffer.shape or (0,))[0]
    return f"its buffer {name!r} has {n:,} items; expected {n_items:,}." if n_items is not None and n < n_items else ""
