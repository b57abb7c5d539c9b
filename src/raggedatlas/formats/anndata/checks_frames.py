"""Checks of dataframes and their columns (A70 to A78, A100 to A146), of today and of anndata 0.5 to 0.7."""

from collections import Counter
from typing import Any, NamedTuple

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
"""Member of a frame of anndata 0.7 with the categories of its columns."""


def check_frame(checker: AnnDataChecker, node: Node) -> None:
    """Check a dataframe and each of its columns."""
    if node.is_array:  # a table of anndata 0.5 and 0.6 is one array of records
        if len(node.shape or ()) != 1:
            checker.report("A75", node, f"the table has shape {node.shape}; expected one axis.")
        decode(checker, node)
        return
    old = declared_encoding(node)[1] == "0.1.0"
    if old and not checker.layout:
        checker.report("A72", node, "it is of encoding dataframe 0.1.0, as anndata 0.7 wrote it.", "practice")
    members = _members(node)
    index = _check_index(checker, node)
    for child in members.values():
        # anndata 0.7 did not declare the encodings of columns.
        checker.element(child, declared=not old)
        if old:
            with checker.guarded(child):
                _check_old_codes(checker, child)
    _check_lengths(checker, node, members, index)
    _check_chunks(checker, node, members)
    _check_order(checker, node, members)


def _members(node: Node) -> dict[str, Node]:
    """Return the index and the columns; anndata 0.12 stores a column with a slash in its name in nested groups."""
    listing = listed(node.attrs.get("column-order")) or []
    nested = {name: child for name in listing if "/" in name and (child := node.child(name)) is not None}
    groups = {name.partition("/")[0] for name in nested} | {OLD_CATEGORIES}
    return {name: child for name, child in node.children.items() if name not in groups} | nested


def _check_index(checker: AnnDataChecker, node: Node) -> Node | None:
    name = as_text(node.attrs.get("_index"))
    if not name:
        checker.report("A71", node, "it has no text attribute _index.")
        return index_node(node)
    index = node.child(name)
    if index is None:
        checker.report("A71", node, f"its index {name!r} is not a member.")
    elif not index.fault and not index.is_array and encoding_of(index) != "nullable-string-array":
        checker.report("A74", node, f"its index {name!r} is of encoding {encoding_of(index)}.")
    return index


def _check_lengths(checker: AnnDataChecker, node: Node, members: dict[str, Node], index: Node | None) -> None:
    expected = n_rows(index) if index is not None else None
    names = listed(node.attrs.get("column-order"))
    # readers ignore members that are not listed
    ignored = set() if names is None else {name for name in members if name not in names and members[name] is not index}
    # Listed members first, so that an ignored one never sets the expected length.
    for name in sorted(members, key=ignored.__contains__):
        child = members[name]
        rows = n_rows(child)
        expected = rows if expected is None else expected
        if not child.fault and (rows is None or rows != expected):
            number = "no" if rows is None else f"{rows:,}"
            text = f"{name!r} has {number} rows, where " + (
                "some belong." if expected is None else f"there are {expected:,} in the others."
            )
        elif child.is_array and len(child.shape or ()) > 1:
            text = f"{name!r} has shape {child.shape}; expected one axis."
        else:
            continue
        checker.report("A75", node, text, "practice" if name in ignored else None)


def _check_chunks(checker: AnnDataChecker, node: Node, members: dict[str, Node]) -> None:
    sizes: dict[int, str] = {}
    for name, child in members.items():
        array = child if child.is_array else child.child("codes") or child.child("values")
        if array is not None and array.chunks:
            sizes.setdefault(array.chunks[0], name)
    if len(sizes) > 1:
        examples = ", ".join(f"{size:,} rows ({name})" for size, name in sorted(sizes.items())[:3])
        checker.report("A76", node, f"its members have chunks of {examples}.")


def _check_order(checker: AnnDataChecker, node: Node, members: dict[str, Node]) -> None:
    exists = "column-order" in node.attrs
    names = listed(node.attrs["column-order"]) if exists else None
    if names is None:
        what = "a column-order that is not a list of text" if exists else "no attribute column-order"
        checker.report("A73", node, f"it has {what}.")
        return
    absent = [name for name in names if name not in members and node.child(name) is None]
    repeated = [name for name, count in Counter(names).items() if count > 1]
    index = as_text(node.attrs.get("_index")) or "_index"
    unlisted = sorted(set(members) - set(names) - {index})
    nested = [name for name in names if "/" in name]
    for rule, wrong, text in (
        ("A73", absent, "lists a column that does not exist,"),
        ("A73", repeated, "lists twice"),
        ("A77", unlisted, "does not list"),
        ("A77", nested, "has a slash in"),
    ):
        if wrong:
            checker.report(rule, node, f"column-order {text} {wrong[0]!r} ({len(wrong):,} such).")
    if "_index" in names:
        checker.report("A78", node, "a column is called _index.")


def _check_old_codes(checker: AnnDataChecker, column: Node) -> None:
    """Compare the codes of a column of anndata 0.7 with its categories, which are another member of the frame."""
    if column.parent is None or "categories" not in column.attrs or column.kind != "integer":
        return
    categories = column.parent.child(f"{OLD_CATEGORIES}/{column.name}")
    if categories is None or not categories.is_array or not categories.shape:
        checker.report("A106", column, "its categories are missing.")
    elif checker.full:
        check_codes(checker, column, categories.shape[0])


def check_categorical(checker: AnnDataChecker, node: Node) -> None:
    """Check a categorical: a flag, codes and categories."""
    ordered = plain_attribute(node.attrs.get("ordered"))
    if not isinstance(ordered, bool):
        is_flag = isinstance(ordered, int) and ordered in (0, 1)
        text = "there is no attribute ordered" if ordered is None else f"its attribute ordered is {ordered!r}"
        checker.report("A102", node, f"{text}; expected a boolean.", "practice" if is_flag else None)
    codes, categories = node.child("codes"), node.child("categories")
    checker.inner(codes)
    checker.inner(categories)
    n_categories = _check_categories(checker, node, categories)
    if codes is None or not codes.is_array or codes.kind != "integer" or len(codes.shape or ()) != 1:
        text = "there are no codes" if codes is None else f"codes are {_described(codes)}"
        checker.report("A103", node, f"{text}; expected integers of one axis.")
    elif codes.fault:
        checker.unreadable(codes, codes.fault)
    elif checker.full:
        check_codes(checker, codes, n_categories)


def _described(node: Node) -> str:
    return f"of type {node.dtype} and shape {node.shape}" if node.is_array else "a group"


def check_codes(checker: AnnDataChecker, codes: Node, n_categories: int | None) -> None:
    """Read codes and compare them with the number of categories (None if unknown)."""
    # -1 is a valid code, so these starting values report nothing for an array without codes.
    low, high, n_over = -1, -1, 0
    for _, values in codes.blocks():
        if values.size:
            low, high = min(low, int(values.min())), max(high, int(values.max()))
            n_over += 0 if n_categories is None else int(np.count_nonzero(values >= n_categories))
    if n_over:
        checker.report("A104", codes, f"{n_over:,} codes up to {high:,} are beyond the {n_categories:,} categories.")
    if low < -1:
        checker.report("A105", codes, f"the lowest code is {low:,}; expected -1 or more.")


def _check_categories(checker: AnnDataChecker, node: Node, categories: Node | None) -> int | None:
    """Check the categories, and return their number."""
    array = categories
    if categories is not None and not categories.is_array and encoding_of(categories) == "nullable-string-array":
        array = categories.child("values")
    if categories is None or array is None or not array.is_array or len(array.shape or ()) != 1:
        text = "there are no categories" if categories is None else f"categories are {_described(categories)}"
        checker.report("A106", node, f"{text}; expected an array of one axis.")
        return None
    if categories is not array:
        checker.element(categories, declared=False)
    elif array.text is not None:
        with checker.guarded(array):
            check_text(checker, array)
    if array.fault:
        checker.unreadable(array, array.fault)
    elif checker.full:
        _check_unique(checker, node, array.whole())
    return (array.shape or (0,))[0]


def _check_unique(checker: AnnDataChecker, node: Node, values: NDArray[Any]) -> None:
    if values.dtype.kind == "f" and np.isnan(values).any():
        checker.report("A107", node, "a category is NaN, which is a missing value.")
        return
    repeated = [value for value, count in Counter(values.tolist()).items() if count > 1]
    if repeated:
        checker.report("A107", node, f"the category {repeated[0]!r} occurs more than once.")


class _Nullable(NamedTuple):
    """What the values of a nullable array must be, and the rules for values, mask and their shape."""

    kind: str
    noun: str
    values: str
    mask: str
    shape: str


_NULLABLE = {
    "nullable-integer": _Nullable("integer", "integers", "A122", "A123", "A123"),
    "nullable-boolean": _Nullable("bool", "booleans", "A132", "A133", "A134"),
    "nullable-string-array": _Nullable("text", "text", "A143", "A144", "A145"),
}


def check_nullable(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of values and a mask."""
    form = _NULLABLE[encoding_of(node)]
    if form.kind == "text":
        na_value = plain_attribute(node.attrs.get("na-value"))
        if na_value is not None and not as_text(na_value):
            checker.report("A142", node, f"its na-value is {na_value!r}; expected NA or NaN.")
        elif na_value is not None and as_text(na_value) not in ("NA", "NaN"):
            checker.report("A146", node, f"its na-value is {as_text(na_value)!r}, which is read as NA.")
    arrays = {}
    for name, rule, kind, noun in (("values", form.values, *form[:2]), ("mask", form.mask, "bool", "booleans")):
        member = node.child(name)
        # A143 itself reports values that are not text, and must not be joined by A112 or A113.
        checker.inner(member, text=rule != "A143")
        if member is None or not member.is_array:
            checker.report(rule, node, f"{name} is {'missing' if member is None else 'a group'}.")
            continue
        arrays[name] = member
        if member.fault:
            checker.unreadable(member, member.fault)
        else:
            with checker.guarded(member):
                (check_text if kind == "text" and member.text is not None else decode)(checker, member)
        if member.text is None if kind == "text" else member.kind != kind:
            verb = "is" if name == "mask" else "are"
            checker.report(rule, node, f"{name} {verb} {_described(member)}; expected {noun}.")
    if len(arrays) == 2 and arrays["values"].shape != arrays["mask"].shape:
        shapes = f"values have shape {arrays['values'].shape}, but mask has {arrays['mask'].shape}"
        checker.report(form.shape, node, f"{shapes}.")
