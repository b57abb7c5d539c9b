"""Checks of arrays, text, scalars and mappings (A40, A41, A80 to A96, A110 to A113)."""

import json
from collections.abc import Iterator, Mapping
from ctypes import byref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, LimitError
from raggedatlas.formats.anndata.checking import AnnDataChecker, as_text, decode, encoding_of, hash_names, sparse_shape
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute
from raggedatlas.model.batch import sparse_dtype
from raggedatlas.model.validation import Level
from raggedatlas.store.native import csr_of, library

NUMBERS = ("bool", "integer", "real", "complex")


def check_dict(checker: AnnDataChecker, node: Node) -> None:
    """Check a mapping: each of its entries is an element."""
    for child in node.children.values():
        checker.element(child)


def check_array(checker: AnnDataChecker, node: Node) -> None:
    """Check a dataset of encoding array."""
    if not checker.layout and node.shape == ():
        rule, right = ("A93", "string") if node.text is not None else ("A91", "numeric-scalar")
        checker.report(rule, node, f"one value is declared as array, where {right} belongs.")
    elif node.text is not None and (node.text.variable or node.kind == "text"):
        if not checker.layout:
            checker.report("A111", node, "text is declared as array, where string-array belongs.")
        check_text(checker, node)
        return
    decode(checker, node)


def check_string_array(checker: AnnDataChecker, node: Node) -> None:
    """Check a dataset of encoding string-array."""
    if node.shape == () and not checker.layout:
        checker.report("A93", node, "one text is declared as string-array, where string belongs.")
    check_text(checker, node)


def check_text(checker: AnnDataChecker, node: Node) -> None:
    """Check that an array holds text of the right kind, and with all values read that it is valid."""
    rule = "A113" if node.in_hdf5 else "A112"
    if node.text is None:
        checker.report(rule, node, f"its values are of type {node.dtype}, where text belongs.")
    elif not checker.layout and not (node.text.variable and node.text.utf8):
        said = "is not declared to be UTF-8" if node.text.variable else f"is of fixed length ({node.dtype})"
        mild: Level | None = "practice" if node.in_hdf5 else None
        checker.report(rule, node, f"its text {said}.", mild)
    if node.text is None or not checker.full or node.fault:
        decode(checker, node)
        return
    names = checker.read_names.get(node.path)
    for start, values in node.blocks():
        at = not_utf8(values) if node.in_hdf5 else None
        if at is not None:
            checker.report("A113", node, f"the text in row {start + at:,} is not valid UTF-8.")
            return
        if names is not None:
            names.append(hash_names(values))


def not_utf8(values: NDArray[Any]) -> int | None:
    """Return the place of the first value that is not valid UTF-8; None if all are."""
    flat: list[Any] = values.ravel().tolist()
    try:
        b"\n".join(flat).decode("utf-8")
    except UnicodeDecodeError:
        return next(i for i, value in enumerate(flat) if not _decodes(value))
    except TypeError:
        return None
    return None


def _decodes(value: bytes) -> bool:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def check_number(checker: AnnDataChecker, node: Node) -> None:
    """Check a dataset of encoding numeric-scalar."""
    if node.kind not in NUMBERS:
        checker.report("A92", node, f"its value is of type {node.dtype}, where a number belongs.")
    _check_scalar(checker, node)


def check_string(checker: AnnDataChecker, node: Node) -> None:
    """Check a dataset of encoding string."""
    rule = "A95" if node.in_hdf5 else "A94"
    if node.text is None:
        checker.report(rule, node, f"its value is of type {node.dtype}, where text belongs.")
    elif not checker.layout and (node.in_hdf5 and not node.text.variable):
        checker.report(rule, node, f"its text is of fixed length ({node.dtype}).")
    elif not checker.layout and not node.text.utf8:
        checker.report(rule, node, "its text is not declared to be UTF-8.")
    if node.text is not None and node.in_hdf5 and checker.full and not node.fault:
        for _, values in node.blocks():
            if not_utf8(values) is not None:
                checker.report(rule, node, "its text is not valid UTF-8.")
    _check_scalar(checker, node)


def _check_scalar(checker: AnnDataChecker, node: Node) -> None:
    if node.shape != () and not checker.layout:
        checker.report("A90", node, f"it has shape {node.shape}, where one value belongs.")
    if not checker.in_uns(node):
        checker.report("A96", node, "a scalar stands outside of uns.")
    decode(checker, node)


PARTS = ("indptr", "indices", "data")

MOST_SEEN = 1 << 28
"""Longest minor axis whose places are all remembered to find entries that are there twice (eight bytes each)."""

POINTERS = 1 << 20
"""Pointers that are held at once."""


def check_sparse(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of encoding csr_matrix or csc_matrix."""
    parts = [node.child(name) for name in PARTS]
    whole = True
    for name, part in zip(PARTS, parts, strict=True):
        if part is None or not part.is_array or len(part.shape or ()) != 1:
            said = "is missing" if part is None or part.stored is None else f"has shape {part.shape}"
            checker.report("A51", node, f"{name} {said}.")
            whole = False
        elif part.fault:
            checker.unreadable(part, part.fault)
    shape = sparse_shape(node)
    if shape is None:
        stated = node.attrs.get("shape", node.attrs.get("h5sparse_shape"))
        checker.report("A54", node, f"its shape is {_said(stated)}, where two integers belong.")
    if not whole or shape is None:
        return
    by_rows = encoding_of(node) == "csr_matrix"
    indptr, indices, data = (part for part in parts if part is not None)
    if data.kind not in NUMBERS:
        checker.report("A51", node, f"data are of type {data.dtype}, where numbers or booleans belong.")
    elif sparse_dtype(data.dtype) != data.dtype:
        checker.report("A61", data, f"data are of type {data.dtype.str}, of which SciPy makes no sparse matrix.")
    if _check_types(checker, indptr, indices) and _check_lengths(checker, node, shape[0 if by_rows else 1]):
        if checker.full and not (indptr.fault or indices.fault):
            _check_entries(checker, node, shape[1 if by_rows else 0], by_rows=by_rows)
        with checker.guarded(data):
            decode(checker, data)


def _said(value: object) -> str:
    return "missing" if value is None else str(value)


def _check_types(checker: AnnDataChecker, indptr: Node, indices: Node) -> bool:
    """Tell whether the pointers and indices are integers."""
    for part in (indptr, indices):
        if part.kind != "integer":
            checker.report("A60", part, f"{part.name} are of type {part.dtype}, where integers belong.")
    if indptr.kind == "integer" and indptr.dtype.kind == "u":
        # scipy refuses pointers of unsigned type outright.
        checker.report("A60", indptr, f"indptr is of type {indptr.dtype}, where a signed one belongs.", "practice")
    if indices.kind == "integer" and indices.dtype.kind == "u":
        checker.report("A60", indices, f"indices are of type {indices.dtype}, where a signed one belongs.", "practice")
    return indptr.kind == indices.kind == "integer"


def _check_lengths(checker: AnnDataChecker, node: Node, n_major: int) -> bool:
    """Compare the lengths of the parts and the last pointer."""
    n_pointers, n_indices, n_data = (_length(node.children[name]) for name in PARTS)
    if n_pointers != n_major + 1:
        checker.report("A55", node, f"there are {n_pointers:,} pointers, where {n_major + 1:,} belong.")
        return False
    indptr = node.children["indptr"]
    last = -1 if indptr.fault else int(indptr.part(n_pointers - 1, n_pointers)[0])
    if n_indices != n_data or (not indptr.fault and last != n_indices):
        checker.report(
            "A57", node, f"the last pointer is {last:,}, but there are {n_indices:,} indices and {n_data:,} values."
        )
    return True


def _length(node: Node) -> int:
    return node.shape[0] if node.shape else 0


def _check_entries(checker: AnnDataChecker, node: Node, n_minor: int, *, by_rows: bool) -> None:
    if n_minor > 2**48:
        raise LimitError(f"{node.uri}: {node.path} declares an axis of {n_minor:,}, more than can be checked.")
    seen = np.zeros(n_minor if n_minor <= MOST_SEEN else 0, np.int64)
    found = np.array([0, 0, 0, -1, -1, -1, -1], np.int64)
    for first, bounds, indices in _entry_blocks(checker, node):
        if not first.continues:
            found[6] = -1
        wide = indices if indices.dtype in (np.int32, np.int64) else indices.astype(np.int64)
        given = csr_of(bounds, np.ascontiguousarray(wide))
        if library().ra_scan_entries(byref(given), first.row, seen if seen.size else None, n_minor, found):
            raise CorruptError(f"{node.uri}: {node.path}/indptr changed while it was read; let nothing write the file.")
    outside, twice, fallen, *rows, _ = (int(n) for n in found)
    line, across = ("row", "column") if by_rows else ("column", "row")
    if outside:
        checker.report(
            "A58", node, f"{outside:,} indices lie outside its {n_minor:,} {across}s, the first in {line} {rows[0]:,}."
        )
    if twice:
        checker.report("A59", node, f"{twice:,} entries are there twice or more, the first in {line} {rows[1]:,}.")
    if fallen:
        checker.report(
            "A59", node, f"indices do not ascend in {fallen:,} places, the first in {line} {rows[2]:,}; readers cope."
        )


class _Start:
    """Where a block of entries starts: its first row, and whether that row began in the block before."""

    __slots__ = ("continues", "row")

    def __init__(self, row: int, *, continues: bool) -> None:
        self.row, self.continues = row, continues


def _entry_blocks(
    checker: AnnDataChecker, node: Node
) -> Iterator[tuple[_Start, NDArray[np.int64], NDArray[np.integer]]]:
    """Yield the entries in order, a block at a time, with where rows begin in each; stop where the pointers are wrong."""
    indices = node.children["indices"]
    step, n_entries = indices.step(), _length(indices)
    held, held_at = np.empty(0, np.int64), 0
    for row, pointers in _pointer_blocks(checker, node, n_entries):
        at, end = int(pointers[0]), int(pointers[-1])
        while at < end:
            if not held_at <= at < held_at + len(held):
                held_at = at - at % step
                held = indices.part(held_at, min(held_at + step, n_entries))
            stop = min(end, held_at + len(held))
            low = int(np.searchsorted(pointers, at, side="right")) - 1
            high = int(np.searchsorted(pointers, stop, side="left"))
            bounds = np.clip(pointers[low : high + 1], at, stop) - at
            yield _Start(row + low, continues=int(pointers[low]) < at), bounds, held[at - held_at : stop - held_at]
            at = stop


def _pointer_blocks(checker: AnnDataChecker, node: Node, n_entries: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield blocks of pointers, each beginning with the last of the one before, until one is wrong."""
    indptr = node.children["indptr"]
    n = _length(indptr)
    unit = indptr.chunks[0] if indptr.chunks else 1
    step = max(unit, POINTERS - POINTERS % unit)
    before = 0
    for start in range(0, n, step):
        read = indptr.part(start, min(start + step, n)).astype(np.int64)
        pointers = read if start == 0 else np.concatenate([[before], read])
        if start == 0 and pointers[0] != 0:
            checker.report("A56", node, f"the first pointer is {int(pointers[0]):,} instead of 0.")
            return
        falls = np.flatnonzero(pointers[1:] < pointers[:-1])
        if len(falls):
            line = max(0, start - 1) + int(falls[0])
            checker.report("A56", node, f"pointers go down from place {line:,} to the next.")
            return
        before = int(pointers[-1])
        if before > n_entries:
            return
        yield max(0, start - 1), pointers


DEEPEST = 64
"""Levels of a form below which nothing is looked at."""

Form = Mapping[str, Any]


def check_awkward(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of encoding awkward-array."""
    checker.report("A152", node, "it is an awkward array.")
    length = plain_attribute(node.attrs.get("length"))
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        checker.report("A150", node, f"its length is {length!r}, where a number of rows belongs.")
        return
    try:
        form = json.loads(as_text(node.attrs.get("form")))
    except ValueError:
        form = None
    if not isinstance(form, dict):
        checker.report("A150", node, "its attribute form is no JSON object.")
        return
    for child in node.children.values():
        checker.element(child, declared=False)
    wrong = _walk(node, form, length if checker.full else None, 0)
    if wrong:
        checker.report("A150", node, wrong)


def _walk(node: Node, form: Form | str, length: int | None, depth: int) -> str:
    """Follow a form down its buffers, and return what is wrong first, or ``""``.

    `length` is how many items the form must have, None where that is not to be looked at.
    """
    if depth > DEEPEST or not isinstance(form, dict) or not isinstance(form.get("class"), str):
        return "its form is no form of awkward." if not isinstance(form, str) else ""
    follow = _FORMS.get(form["class"])
    if follow is None:
        return f"its form has the unknown class {form['class']!r}."
    lacking = [key for key in _KEYS.get(form["class"], ("content",)) if key not in form]
    return (
        f"its form of the class {form['class']!r} lacks {lacking[0]!r}."
        if lacking
        else follow(node, form, length, depth)
    )


def _buffer(node: Node, form: Form, part: str, length: int | None) -> str:
    """Look for one buffer, and return what is wrong with it."""
    name = f"{form.get('form_key')}-{part}"
    buffer = node.child(name)
    if buffer is None or not buffer.is_array or len(buffer.shape or ()) != 1:
        return f"its buffer {name!r} is missing."
    stated = form.get("primitive" if part == "data" else part)
    width = _item_bytes(stated) if part == "data" else _INDEX_BYTES.get(str(stated))
    if width not in (None, buffer.dtype.itemsize):
        # its bytes are taken for that type, whatever the file says of them
        return f"its buffer {name!r} is of type {buffer.dtype}, where its form has {stated}."
    n = (buffer.shape or (0,))[0]
    return f"its buffer {name!r} has {n:,} items, where {length:,} belong." if length is not None and n < length else ""


def _item_bytes(primitive: object) -> int | None:
    """Return how many bytes a number of a form takes; None where that is not known."""
    try:
        return np.dtype(str(primitive)).itemsize
    except TypeError:
        return None


def _largest(node: Node, form: Form, part: str) -> int:
    """Return the largest value of a buffer, -1 for none."""
    largest = -1
    for _, values in node.children[f"{form.get('form_key')}-{part}"].blocks():
        largest = max(largest, int(values.max(initial=-1)))
    return largest


def _numbers(node: Node, form: Form, length: int | None, depth: int) -> str:
    del depth
    inner = form.get("inner_shape") or []
    for size in inner:
        length = None if length is None else length * int(size)
    return _buffer(node, form, "data", length)


def _empty(node: Node, form: Form, length: int | None, depth: int) -> str:
    del node, form, depth
    return "its form has nothing where there are rows." if length else ""


def _list(node: Node, form: Form, length: int | None, depth: int) -> str:
    wrong = _buffer(node, form, "offsets", None if length is None else length + 1)
    if wrong:
        return wrong
    inner = None
    if length is not None:
        offsets = node.children[f"{form['form_key']}-offsets"].whole()[: length + 1]
        if (offsets[1:] < offsets[:-1]).any() or (len(offsets) and offsets[0] < 0):
            return f"its offsets {form['form_key']!r} go down."
        inner = int(offsets[-1]) if len(offsets) else 0
    return _walk(node, form.get("content") or {}, inner, depth + 1)


def _spans(node: Node, form: Form, length: int | None, depth: int) -> str:
    wrong = _buffer(node, form, "starts", length) or _buffer(node, form, "stops", length)
    inner = max(0, _largest(node, form, "stops")) if length is not None and not wrong else None
    return wrong or _walk(node, form.get("content") or {}, inner, depth + 1)


def _fixed(node: Node, form: Form, length: int | None, depth: int) -> str:
    size = form.get("size")
    inner = length * size if length is not None and isinstance(size, int) else None
    return _walk(node, form.get("content") or {}, inner, depth + 1)


def _indexed(node: Node, form: Form, length: int | None, depth: int) -> str:
    wrong = _buffer(node, form, "index", length)
    inner = _largest(node, form, "index") + 1 if length is not None and not wrong else None
    return wrong or _walk(node, form.get("content") or {}, inner, depth + 1)


def _bytemask(node: Node, form: Form, length: int | None, depth: int) -> str:
    return _buffer(node, form, "mask", length) or _walk(node, form.get("content") or {}, length, depth + 1)


def _bitmask(node: Node, form: Form, length: int | None, depth: int) -> str:
    needed = None if length is None else (length + 7) // 8
    return _buffer(node, form, "mask", needed) or _walk(node, form.get("content") or {}, length, depth + 1)


def _unmasked(node: Node, form: Form, length: int | None, depth: int) -> str:
    return _walk(node, form.get("content") or {}, length, depth + 1)


def _record(node: Node, form: Form, length: int | None, depth: int) -> str:
    contents = form.get("contents") or []
    parts = contents.values() if isinstance(contents, dict) else contents
    return next((wrong for part in parts if (wrong := _walk(node, part, length, depth + 1))), "")


def _union(node: Node, form: Form, length: int | None, depth: int) -> str:
    wrong = _buffer(node, form, "tags", length) or _buffer(node, form, "index", length)
    parts = form.get("contents") or []
    return wrong or next((said for part in parts if (said := _walk(node, part, None, depth + 1))), "")


_FORMS = {
    "NumpyArray": _numbers, "EmptyArray": _empty, "ListOffsetArray": _list, "ListArray": _spans,
    "RegularArray": _fixed, "IndexedArray": _indexed, "IndexedOptionArray": _indexed,
    "ByteMaskedArray": _bytemask, "BitMaskedArray": _bitmask, "UnmaskedArray": _unmasked,
    "RecordArray": _record, "UnionArray": _union,
}  # fmt: skip
"""Class of a form -> what follows it."""

_INDEX_BYTES = {"i8": 1, "u8": 1, "i32": 4, "u32": 4, "i64": 8}
"""What a form calls the type of offsets, starts, stops, tags, indices and masks -> bytes of one."""

_KEYS = {
    "NumpyArray": ("primitive",), "EmptyArray": (), "ListOffsetArray": ("offsets", "content"), "RecordArray": ("contents",),
    "ListArray": ("starts", "stops", "content"), "RegularArray": ("size", "content"), "IndexedArray": ("index", "content"),
    "IndexedOptionArray": ("index", "content"), "ByteMaskedArray": ("mask", "valid_when", "content"),
    "BitMaskedArray": ("mask", "valid_when", "lsb_order", "content"), "UnionArray": ("tags", "index", "contents"),
}  # fmt: skip
"""Class of a form -> the keys without which awkward refuses it."""
