"""Checks of categorical and nullable columns (A100 to A107, A120 to A146)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.anndata.checking import Checker, as_text, decode, encoding_of
from raggedatlas.formats.anndata.checks_arrays import check_text
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute


def check_categorical(checking: Checker, node: Node) -> None:
    """Check a categorical: a flag, codes and categories."""
    ordered = plain_attribute(node.attrs.get("ordered"))
    if not isinstance(ordered, bool):
        whole = isinstance(ordered, int) and ordered in (0, 1)
        said = "there is no attribute ordered" if ordered is None else f"its attribute ordered is {ordered!r}"
        checking.report("A102", node, f"{said}, where a boolean belongs.", "practice" if whole else None)
    codes, categories = node.child("codes"), node.child("categories")
    checking.inner(codes)
    checking.inner(categories)
    n_categories = _check_categories(checking, node, categories)
    if codes is None or not codes.is_array or codes.kind != "integer" or len(codes.shape or ()) != 1:
        said = "there are no codes" if codes is None else f"codes are {_described(codes)}"
        checking.report("A103", node, f"{said}, where integers of one axis belong.")
        return
    if codes.fault:
        checking.unreadable(codes, codes.fault)
    elif checking.full:
        check_codes(checking, codes, n_categories)


def _described(node: Node) -> str:
    return f"of type {node.dtype} and shape {node.shape}" if node.is_array else "a group"


def check_codes(checking: Checker, codes: Node, n_categories: int | None) -> None:
    """Read codes and compare them with how many categories there are (None if that is not known)."""
    low, high, n_over = -1, -1, 0
    for _, values in codes.blocks():
        if values.size:
            low, high = min(low, int(values.min())), max(high, int(values.max()))
            n_over += 0 if n_categories is None else int(np.count_nonzero(values >= n_categories))
    if n_over:
        checking.report("A104", codes, f"{n_over:,} codes up to {high:,} are beyond the {n_categories:,} categories.")
    if low < -1:
        checking.report("A105", codes, f"the lowest code is {low:,}, where nothing is below -1.")


def _check_categories(checking: Checker, node: Node, categories: Node | None) -> int | None:
    """Check the categories, and return how many there are."""
    inner = categories
    if categories is not None and not categories.is_array and encoding_of(categories) == "nullable-string-array":
        inner = categories.child("values")
    if categories is None or inner is None or not inner.is_array or len(inner.shape or ()) != 1:
        said = "there are none" if categories is None else f"they are {_described(categories)}"
        checking.report("A106", node, f"of its categories {said}, where an array of one axis belongs.")
        return None
    if categories is not inner:
        checking.element(categories, declared=False)
    elif inner.text is not None:
        checking.guarded(inner, check_text)
    if inner.fault:
        checking.unreadable(inner, inner.fault)
    elif checking.full:
        _check_unique(checking, node, inner.whole())
    return (inner.shape or (0,))[0]


def _check_unique(checking: Checker, node: Node, values: NDArray[Any]) -> None:
    listed = values.tolist()
    if values.dtype.kind == "f" and np.isnan(values).any():
        checking.report("A107", node, "a category is not a number, which stands for a missing value.")
        return
    known: set[Any] = set()
    for value in listed:
        if value in known:
            checking.report("A107", node, f"the category {value!r} is there more than once.")
            return
        known.add(value)


def check_nullable_integer(checking: Checker, node: Node) -> None:
    """Check a group of encoding nullable-integer."""
    values, mask = _masked(checking, node, ("A122", "A123"))
    if values is not None and values.kind != "integer":
        checking.report("A122", node, f"values are {_described(values)}, where integers belong.")
    _check_mask(checking, node, mask, "A123")
    _check_one_shape(checking, node, "A123")


def check_nullable_boolean(checking: Checker, node: Node) -> None:
    """Check a group of encoding nullable-boolean."""
    values, mask = _masked(checking, node, ("A132", "A133"))
    if values is not None and values.kind != "bool":
        checking.report("A132", node, f"values are {_described(values)}, where booleans belong.")
    _check_mask(checking, node, mask, "A133")
    _check_one_shape(checking, node, "A134")


def check_nullable_string(checking: Checker, node: Node) -> None:
    """Check a group of encoding nullable-string-array."""
    stated = plain_attribute(node.attrs.get("na-value"))
    if stated is not None and not as_text(stated):
        checking.report("A142", node, f"its na-value is {stated!r}, where NA or NaN belongs.")
    elif stated is not None and as_text(stated) not in ("NA", "NaN"):
        checking.report("A146", node, f"its na-value is {as_text(stated)!r}, which is read as NA.")
    values, mask = _masked(checking, node, ("A143", "A144"))
    if values is not None and values.text is None:
        checking.report("A143", node, f"values are {_described(values)}, where text belongs.")
    elif values is not None:
        checking.guarded(values, check_text)
    _check_mask(checking, node, mask, "A144")
    _check_one_shape(checking, node, "A145")


def _masked(checking: Checker, node: Node, rules: tuple[str, str]) -> tuple[Node | None, Node | None]:
    """Return values and mask, those that are arrays, after saying which are not."""
    found: list[Node | None] = []
    for name, rule in zip(("values", "mask"), rules, strict=True):
        member = node.child(name)
        checking.inner(member, text=rule != "A143")
        if member is None or not member.is_array:
            checking.report(rule, node, f"{name} is {'missing' if member is None else 'a group'}.")
            member = None
        elif member.fault:
            checking.unreadable(member, member.fault)
        elif not (name == "values" and member.text is not None):
            checking.guarded(member, decode)
        found.append(member)
    return found[0], found[1]


def _check_mask(checking: Checker, node: Node, mask: Node | None, rule: str) -> None:
    if mask is not None and mask.kind != "bool":
        checking.report(rule, node, f"mask is {_described(mask)}, where booleans belong.")


def _check_one_shape(checking: Checker, node: Node, rule: str) -> None:
    values, mask = node.child("values"), node.child("mask")
    if values is None or mask is None or not values.is_array or not mask.is_array:
        return
    if values.shape != mask.shape:
        checking.report(rule, node, f"values have shape {values.shape}, but mask has {mask.shape}.")
