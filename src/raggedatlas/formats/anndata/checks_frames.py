"""Checks of dataframes (A70 to A78), of today and of anndata 0.5 to 0.7."""

from collections import Counter

from raggedatlas.formats.anndata.checking import (
    Checker,
    as_text,
    declared_encoding,
    decode,
    encoding_of,
    index_node,
    listed,
    n_rows,
)
from raggedatlas.formats.anndata.checks_columns import check_codes
from raggedatlas.formats.anndata.file_tree import Node

OLD_CATEGORIES = "__categories"
"""Member of a frame of anndata 0.7 that holds the categories of its columns."""


def check_frame(checking: Checker, node: Node) -> None:
    """Check a dataframe and each of its columns."""
    if node.is_array:
        _check_records(checking, node)
        return
    old = declared_encoding(node)[1] == "0.1.0"
    if old and not checking.layout:
        checking.report("A72", node, "it is of encoding dataframe 0.1.0, as anndata 0.7 wrote it.", "practice")
    members = _members(node)
    index = _check_index(checking, node)
    for child in members.values():
        checking.element(child, declared=not old)
        if old:
            checking.guarded(child, _check_old_codes)
    _check_lengths(checking, node, members, index)
    _check_chunks(checking, node, members)
    _check_order(checking, node, members, index)


def _members(node: Node) -> dict[str, Node]:
    """Return the index and the columns; one with a slash in its name stands further down, as anndata 0.12 writes it."""
    listing = listed(node.attrs.get("column-order")) or []
    nested = {name: node.child(name) for name in listing if "/" in name}
    tops = {name.partition("/")[0] for name, child in nested.items() if child is not None} | {OLD_CATEGORIES}
    found = {name: child for name, child in node.children.items() if name not in tops}
    return found | {name: child for name, child in nested.items() if child is not None}


def _check_index(checking: Checker, node: Node) -> Node | None:
    stated = as_text(node.attrs.get("_index"))
    if not stated:
        checking.report("A71", node, "it has no text attribute _index.")
        return index_node(node)
    index = node.child(stated)
    if index is None:
        checking.report("A71", node, f"its index {stated!r} is no member.")
    elif not index.fault and not index.is_array and encoding_of(index) != "nullable-string-array":
        checking.report("A74", node, f"its index {stated!r} is of encoding {encoding_of(index)}.")
    return index


def _check_lengths(checking: Checker, node: Node, members: dict[str, Node], index: Node | None) -> None:
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
        checking.report("A75", node, text, "practice" if name in ignored else None)


def _check_chunks(checking: Checker, node: Node, members: dict[str, Node]) -> None:
    sizes: dict[int, str] = {}
    for name, child in members.items():
        inner = child if child.is_array else child.child("codes") or child.child("values")
        if inner is not None and inner.chunks:
            sizes.setdefault(inner.chunks[0], name)
    if len(sizes) > 1:
        said = ", ".join(f"{size:,} rows ({name})" for size, name in sorted(sizes.items())[:3])
        checking.report("A76", node, f"its members have chunks of {said}.")


def _check_order(checking: Checker, node: Node, members: dict[str, Node], index: Node | None) -> None:
    names = listed(node.attrs["column-order"]) if "column-order" in node.attrs else None
    if names is None:
        said = (
            "no attribute column-order"
            if "column-order" not in node.attrs
            else "a column-order that is no list of text"
        )
        checking.report("A73", node, f"it has {said}.")
        return
    absent = [name for name in names if name not in members and node.child(name) is None]
    if absent:
        checking.report("A73", node, f"column-order names {absent[0]!r}, which is no member ({len(absent):,} such).")
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
            checking.report(rule, node, f"column-order {said} {wrong[0]!r} ({len(wrong):,} such).")
    if "_index" in names:
        checking.report("A78", node, "a column is called _index.")


def _check_old_codes(checking: Checker, column: Node) -> None:
    """Compare the codes of a column of anndata 0.7 with its categories beside it."""
    if column.parent is None or "categories" not in column.attrs or column.kind != "integer":
        return
    categories = column.parent.child(f"{OLD_CATEGORIES}/{column.name}")
    if categories is None or not categories.is_array or not categories.shape:
        checking.report("A106", column, "its categories are missing.")
    elif checking.full:
        check_codes(checking, column, categories.shape[0])


def _check_records(checking: Checker, node: Node) -> None:
    """Check a frame of anndata 0.5 and 0.6, which is one array of records."""
    if len(node.shape or ()) != 1:
        checking.report("A75", node, f"the table has shape {node.shape}, where one axis belongs.")
    decode(checking, node)
