"""Checks of awkward arrays (A150 to A152): each buffer that the form asks for is there and long enough."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from raggedatlas.formats.anndata.checking import Checker, as_text
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute

DEEPEST = 64
"""Levels of a form below which nothing is looked at."""

Form = Mapping[str, Any]


def check_awkward(checking: Checker, node: Node) -> None:
    """Check a group of encoding awkward-array."""
    checking.report("A152", node, "it is an awkward array.")
    length = plain_attribute(node.attrs.get("length"))
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        checking.report("A150", node, f"its length is {length!r}, where a number of rows belongs.")
        return
    try:
        form = json.loads(as_text(node.attrs.get("form")))
    except ValueError:
        form = None
    if not isinstance(form, dict):
        checking.report("A150", node, "its attribute form is no JSON object.")
        return
    for child in node.children.values():
        checking.element(child, declared=False)
    wrong = _walk(node, form, length if checking.full else None, 0)
    if wrong:
        checking.report("A150", node, wrong)


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
