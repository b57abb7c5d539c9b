"""Checks of arrays, text, scalars and mappings (A40, A41, A80 to A96, A110 to A113)."""

from typing import Any

from numpy.typing import NDArray

from raggedatlas.formats.anndata.axis_names import hash_names
from raggedatlas.formats.anndata.checking import Checker, decode
from raggedatlas.formats.anndata.file_tree import Node
from raggedatlas.model.problems import Level

NUMBERS = ("bool", "integer", "real", "complex")


def check_dict(checking: Checker, node: Node) -> None:
    """Check a mapping: each of its entries is an element."""
    for child in node.children.values():
        checking.element(child)


def check_array(checking: Checker, node: Node) -> None:
    """Check a dataset of encoding array."""
    if not checking.layout and node.shape == ():
        rule, right = ("A93", "string") if node.text is not None else ("A91", "numeric-scalar")
        checking.report(rule, node, f"one value is declared as array, where {right} belongs.")
    elif node.text is not None and (node.text.variable or node.kind == "text"):
        if not checking.layout:
            checking.report("A111", node, "text is declared as array, where string-array belongs.")
        check_text(checking, node)
        return
    decode(checking, node)


def check_string_array(checking: Checker, node: Node) -> None:
    """Check a dataset of encoding string-array."""
    if node.shape == () and not checking.layout:
        checking.report("A93", node, "one text is declared as string-array, where string belongs.")
    check_text(checking, node)


def check_text(checking: Checker, node: Node) -> None:
    """Check that an array holds text of the right kind, and with all values read that it is valid."""
    rule = "A113" if node.in_hdf5 else "A112"
    if node.text is None:
        checking.report(rule, node, f"its values are of type {node.dtype}, where text belongs.")
    elif not checking.layout and not (node.text.variable and node.text.utf8):
        said = "is not declared to be UTF-8" if node.text.variable else f"is of fixed length ({node.dtype})"
        mild: Level | None = "practice" if node.in_hdf5 else None
        checking.report(rule, node, f"its text {said}.", mild)
    if node.text is None or not checking.full or node.fault:
        decode(checking, node)
        return
    names = checking.read_names.get(node.path)
    for start, values in node.blocks():
        at = not_utf8(values) if node.in_hdf5 else None
        if at is not None:
            checking.report("A113", node, f"the text in row {start + at:,} is not valid UTF-8.")
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


def check_number(checking: Checker, node: Node) -> None:
    """Check a dataset of encoding numeric-scalar."""
    if node.kind not in NUMBERS:
        checking.report("A92", node, f"its value is of type {node.dtype}, where a number belongs.")
    _check_scalar(checking, node)


def check_string(checking: Checker, node: Node) -> None:
    """Check a dataset of encoding string."""
    rule = "A95" if node.in_hdf5 else "A94"
    if node.text is None:
        checking.report(rule, node, f"its value is of type {node.dtype}, where text belongs.")
    elif not checking.layout and (node.in_hdf5 and not node.text.variable):
        checking.report(rule, node, f"its text is of fixed length ({node.dtype}).")
    elif not checking.layout and not node.text.utf8:
        checking.report(rule, node, "its text is not declared to be UTF-8.")
    if node.text is not None and node.in_hdf5 and checking.full and not node.fault:
        for _, values in node.blocks():
            if not_utf8(values) is not None:
                checking.report(rule, node, "its text is not valid UTF-8.")
    _check_scalar(checking, node)


def _check_scalar(checking: Checker, node: Node) -> None:
    if node.shape != () and not checking.layout:
        checking.report("A90", node, f"it has shape {node.shape}, where one value belongs.")
    if not checking.in_uns(node):
        checking.report("A96", node, "a scalar stands outside of uns.")
    decode(checking, node)
