"""Checks of dataframes (A70 to A78), of today and of anndata 0.5 to 0.7."""

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.anndata.checking import (
    AnnDataChecker,
    as_text,
    declared_encoding,
    decode,
    encoding_of,
    index_node,
    listed,
    n_rows,
)
from raggedatlas.formats.anndata.checks_arrays import check_text
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute

OLD_CATEGORIES = "__categories"
"""Member of a frame of anndata 0.7 that holds the categories of its columns."""


def check_frame(checker: AnnDataChecker, node: Node) -> None:
    """Check a dataframe and each of its columns."""
    if node.is_array:
        _check_records(checker, node)
        return
    old = declared_encoding(node)[1] == "0.1.0"
    if old and not checker.layout:
        checker.report("A72", node, "it is of encoding dataframe 0.1.0, as anndata 0.7 wrote it.", "practice")
    members = _members(node)
    index = _check_index(checker, node)
    for child in members.values():
        checker.element(child, declared=not old)
        if old:
            with checker.guarded(child):
                _check_old_codes(checker, child)
    _check_lengths(checker, node, members, index)
    _check_chunks(checker, node, members)
    _check_order(checker, node, members, index)


def _members(node: Node) -> dict[str, Node]:
    """Return the index and the columns; one with a slash in its name stands further down, as anndata 0.12 writes it."""
    listing = listed(node.attrs.get("column-order")) or []
    nested = {name: node.child(name) for name in listing if "/" in name}
    tops = {name.partition("/")[0] for name, child in nested.items() if child is not None} | {OLD_CATEGORIES}
    found = {name: child for name, child in node.children.items() if name not in tops}
    return found | {name: child for name, child in nested.items() if child is not None}


def _check_index(checker: AnnDataChecker, node: Node) -> Node | None:
    stated = as_text(node.attrs.get("_index"))
    if not stated:
        checker.report("A71", node, "it has no text attribute _index.")
        return index_node(node)
    index = node.child(stated)
    if index is None:
        checker.report("A71", node, f"its index {stated!r} is no member.")
    elif not index.fault and not index.is_array and encoding_of(index) != "nullable-string-array":
        checker.report("A74", node, f"its index {stated!r} is of encoding {encoding_of(index)}.")
    return index


def _check_lengths(checker: AnnDataChecker, node: Node, members: dict[str, Node], index: Node | None) -> None:
    expected = n_rows(index) if index is not None else None
    names = listed(node.attrs.get("column-order"))
    # readers take the columns that are listed, and leave the others alone
    ignored = {
        name for name, child in members.items() if names is not None and name not in names and child is not index
    }
    for name in sorted(members, key=ignored.__contains__):
        child = members[name]
        found = n_rows(child)
        if expected is None:
            expected = found
        if not child.fault and (found is None or found != expected):
            said = "no" if found is None else f"{found:,}"
            wanted = "some belong" if expected is None else f"there are {expected:,} in the others"
            text = f"{name!r} has {said} rows, where {wanted}."
        elif child.is_array and len(child.shape or ()) > 1:
            text = f"{name!r} has the shape {child.shape}, where one axis belongs."
        else:
            continue
        checker.report("A75", node, text, "practice" if name in ignored else None)


def _check_chunks(checker: AnnDataChecker, node: Node, members: dict[str, Node]) -> None:
    sizes: dict[int, str] = {}
    for name, child in members.items():
        inner = child if child.is_array else child.child("codes") or child.child("values")
        if inner is not None and inner.chunks:
            sizes.setdefault(inner.chunks[0], name)
    if len(sizes) > 1:
        said = ", ".join(f"{size:,} rows ({name})" for size, name in sorted(sizes.items())[:3])
        checker.report("A76", node, f"its members have chunks of {said}.")


def _check_order(checker: AnnDataChecker, node: Node, members: dict[str, Node], index: Node | None) -> None:
    names = listed(node.attrs["column-order"]) if "column-order" in node.attrs else None
    if names is None:
        said = (
            "no attribute column-order"
            if "column-order" not in node.attrs
            else "a column-order that is no list of text"
        )
        checker.report("A73", node, f"it has {said}.")
        return
    absent = [name for name in names if name not in members and node.child(name) is None]
    if absent:
        checker.report("A73", node, f"column-order names {absent[0]!r}, which is no member ({len(absent):,} such).")
    own = as_text(node.attrs.get("_index")) or "_index"
    twice = [name for name, count in Counter(names).items() if count > 1]
    left = sorted(set(members) - set(names) - {own})
    nested = [name for name in names if "/" in name]
    for rule, wrong, said in (
        ("A73", twice, "lists twice"),
        ("A77", left, "does not list"),
        ("A77", nested, "has a slash in"),
    ):
        if wrong:
            checker.report(rule, node, f"column-order {said} {wrong[0]!r} ({len(wrong):,} such).")
    if "_index" in names:
        checker.report("A78", node, "a column is called _index.")


def _check_old_codes(checker: AnnDataChecker, column: Node) -> None:
    """Compare the codes of a column of anndata 0.7 with its categories beside it."""
    if column.parent is None or "categories" not in column.attrs or column.kind != "integer":
        return
    categories = column.parent.child(f"{OLD_CATEGORIES}/{column.name}")
    if categories is None or not categories.is_array or not categories.shape:
        checker.report("A106", column, "its categories are missing.")
    elif checker.full:
        check_codes(checker, column, categories.shape[0])


def _check_records(checker: AnnDataChecker, node: Node) -> None:
    """Check a frame of anndata 0.5 and 0.6, which is one array of records."""
    if len(node.shape or ()) != 1:
        checker.report("A75", node, f"the table has shape {node.shape}, where one axis belongs.")
    decode(checker, node)


def check_categorical(checker: AnnDataChecker, node: Node) -> None:
    """Check a categorical: a flag, codes and categories."""
    ordered = plain_attribute(node.attrs.get("ordered"))
    if not isinstance(ordered, bool):
        whole = isinstance(ordered, int) and ordered in (0, 1)
        said = "there is no attribute ordered" if ordered is None else f"its attribute ordered is {ordered!r}"
        checker.report("A102", node, f"{said}, where a boolean belongs.", "practice" if whole else None)
    codes, categories = node.child("codes"), node.child("categories")
    checker.inner(codes)
    checker.inner(categories)
    n_categories = _check_categories(checker, node, categories)
    if codes is None or not codes.is_array or codes.kind != "integer" or len(codes.shape or ()) != 1:
        said = "there are no codes" if codes is None else f"codes are {_described(codes)}"
        checker.report("A103", node, f"{said}, where integers of one axis belong.")
        return
    if codes.fault:
        checker.unreadable(codes, codes.fault)
    elif checker.full:
        check_codes(checker, codes, n_categories)


def _described(node: Node) -> str:
    return f"of type {node.dtype} and shape {node.shape}" if node.is_array else "a group"


def check_codes(checker: AnnDataChecker, codes: Node, n_categories: int | None) -> None:
    """Read codes and compare them with how many categories there are (None if that is not known)."""
    low, high, n_over = -1, -1, 0
    for _, values in codes.blocks():
        if values.size:
            low, high = min(low, int(values.min())), max(high, int(values.max()))
            n_over += 0 if n_categories is None else int(np.count_nonzero(values >= n_categories))
    if n_over:
        checker.report("A104", codes, f"{n_over:,} codes up to {high:,} are beyond the {n_categories:,} categories.")
    if low < -1:
        checker.report("A105", codes, f"the lowest code is {low:,}, where nothing is below -1.")


def _check_categories(checker: AnnDataChecker, node: Node, categories: Node | None) -> int | None:
    """Check the categories, and return how many there are."""
    inner = categories
    if categories is not None and not categories.is_array and encoding_of(categories) == "nullable-string-array":
        inner = categories.child("values")
    if categories is None or inner is None or not inner.is_array or len(inner.shape or ()) != 1:
        said = "there are none" if categories is None else f"they are {_described(categories)}"
        checker.report("A106", node, f"of its categories {said}, where an array of one axis belongs.")
        return None
    if categories is not inner:
        checker.element(categories, declared=False)
    elif inner.text is not None:
        with checker.guarded(inner):
            check_text(checker, inner)
    if inner.fault:
        checker.unreadable(inner, inner.fault)
    elif checker.full:
        _check_unique(checker, node, inner.whole())
    return (inner.shape or (0,))[0]


def _check_unique(checker: AnnDataChecker, node: Node, values: NDArray[Any]) -> None:
    listed = values.tolist()
    if values.dtype.kind == "f" and np.isnan(values).any():
        checker.report("A107", node, "a category is not a number, which stands for a missing value.")
        return
    known: set[Any] = set()
    for value in listed:
        if value in known:
            checker.report("A107", node, f"the category {value!r} is there more than once.")
            return
        known.add(value)


def check_nullable_integer(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of encoding nullable-integer."""
    values, mask = _masked(checker, node, ("A122", "A123"))
    if values is not None and values.kind != "integer":
        checker.report("A122", node, f"values are {_described(values)}, where integers belong.")
    _check_mask(checker, node, mask, "A123")
    _check_one_shape(checker, node, "A123")


def check_nullable_boolean(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of encoding nullable-boolean."""
    values, mask = _masked(checker, node, ("A132", "A133"))
    if values is not None and values.kind != "bool":
        checker.report("A132", node, f"values are {_described(values)}, where booleans belong.")
    _check_mask(checker, node, mask, "A133")
    _check_one_shape(checker, node, "A134")


def check_nullable_string(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of encoding nullable-string-array."""
    stated = plain_attribute(node.attrs.get("na-value"))
    if stated is not None and not as_text(stated):
        checker.report("A142", node, f"its na-value is {stated!r}, where NA or NaN belongs.")
    elif stated is not None and as_text(stated) not in ("NA", "NaN"):
        checker.report("A146", node, f"its na-value is {as_text(stated)!r}, which is read as NA.")
    values, mask = _masked(checker, node, ("A143", "A144"))
    if values is not None and values.text is None:
        checker.report("A143", node, f"values are {_described(values)}, where text belongs.")
    elif values is not None:
        with checker.guarded(values):
            check_text(checker, values)
    _check_mask(checker, node, mask, "A144")
    _check_one_shape(checker, node, "A145")


def _masked(checker: AnnDataChecker, node: Node, rules: tuple[str, str]) -> tuple[Node | None, Node | None]:
    """Return values and mask, those that are arrays, after saying which are not."""
    found: list[Node | None] = []
    for name, rule in zip(("values", "mask"), rules, strict=True):
        member = node.child(name)
        checker.inner(member, text=rule != "A143")
        if member is None or not member.is_array:
            checker.report(rule, node, f"{name} is {'missing' if member is None else 'a group'}.")
            member = None
        elif member.fault:
            checker.unreadable(member, member.fault)
        elif not (name == "values" and member.text is not None):
            with checker.guarded(member):
                decode(checker, member)
        found.append(member)
    return found[0], found[1]


def _check_mask(checker: AnnDataChecker, node: Node, mask: Node | None, rule: str) -> None:
    if mask is not None and mask.kind != "bool":
        checker.report(rule, node, f"mask is {_described(mask)}, where booleans belong.")


def _check_one_shape(checker: AnnDataChecker, node: Node, rule: str) -> None:
    values, mask = node.child("values"), node.child("mask")
    if values is None or mask is None or not values.is_array or not mask.is_array:
        return
    if values.shape != mask.shape:
        checker.report(rule, node, f"values have shape {values.shape}, but mask has {mask.shape}.")
