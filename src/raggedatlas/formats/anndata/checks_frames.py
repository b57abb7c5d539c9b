"""Checks of an AnnData: its members and their shapes (A10 to A30), and dataframes and their columns (A70 to A78, A100 to A146)."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from raggedatlas.formats.anndata.checks_arrays import NUMBERS, check_text
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute
from raggedatlas.formats.anndata.rules import (
    AGAIN,
    REWRITE,
    SHAPE,
    SPARSE,
    TYPED,
    AnnDataChecker,
    Hashes,
    as_text,
    check_unique_names,
    declared_encoding,
    decode,
    encoding_of,
    extent,
    index_node,
    is_binary,
    listed,
    n_rows,
    name_hashes,
    names_node,
    nested_members,
)
from raggedatlas.formats.containers import MEMBERS

_RAW = "Write raw again, or remove it."

MATRICES = ("array", *SPARSE)
ROWS = (*MATRICES, "dataframe", "awkward-array")

OLD_ROOT = {"raw.X", "raw.var", "raw.varm", "raw.cat"}
"""Further members of the root in anndata 0.5 and 0.6."""


@dataclass(frozen=True, slots=True)
class _Axis:
    """Number of cells or features, and hashes of their names; None if unknown or not read."""

    size: int | None = None
    names: Hashes | None = None


@dataclass(frozen=True, slots=True)
class _Group:
    """Rules of the entries of one mapping, the encodings that they may have, and the axes that they begin with."""

    types: str
    shape: str
    kinds: tuple[str, ...]
    axes: tuple[str, ...]
    exact: bool = False


GROUPS = {
    "layers": _Group("A16", "A17", MATRICES, MEMBERS["layers"], exact=True),
    "obsm": _Group("A18", "A19", ROWS, MEMBERS["obsm"]),
    "varm": _Group("A20", "A21", ROWS, MEMBERS["varm"]),
    "obsp": _Group("A22", "A23", MATRICES, MEMBERS["obsp"]),
    "varp": _Group("A24", "A25", MATRICES, MEMBERS["varp"]),
}
"""Mapping -> rules of its entries."""

Axes = dict[str, _Axis]
"""``"obs"`` and ``"var"``."""


def check_anndata(checker: AnnDataChecker, node: Node) -> None:
    """Check an AnnData and everything in it."""
    if node.is_array:
        checker.report("A10", node, "it is an array; expected a group.")
        return
    axes = {name: _check_axis(checker, node, name) for name in ("obs", "var")}
    _check_x(checker, node, axes)
    for name, group in GROUPS.items():
        mapping = node.child(name)
        if mapping is not None:
            check_mapping(checker, mapping, axes, group)
    uns = node.child("uns")
    if uns is not None:
        checker.element(uns)
    _check_raw(checker, node, axes)
    known = {*MEMBERS, *(OLD_ROOT if checker.layout == "0.5" else ())}
    for name in sorted(set(node.children) - known):
        if node.in_hdf5:
            checker.report("A28", node.children[name], "anndata refuses to read a file with this at its root.")


def _check_axis(checker: AnnDataChecker, node: Node, name: str) -> _Axis:
    """Check obs or var, and return its length, and its names if values are read."""
    frame = node.child(name)
    if frame is None:
        checker.report("A12", node, f"there is no {name}.")
        return _Axis()
    if frame.fault:
        checker.unreadable(frame, frame.fault)
        return _Axis()
    if checker.layout and frame.kind == "record":
        with checker.guarded(frame):
            checker.checks["dataframe"](checker, frame)
        return _Axis(n_rows(frame))
    if encoding_of(frame) != "dataframe":
        checker.report("A13", frame, f"it is of encoding {encoding_of(frame)}; expected a dataframe.")
        return _Axis()
    index = names_node(frame)
    if checker.full and index is not None:
        # The key makes `check_text` collect the hashes while it reads the index.
        checker.read_names[index.path] = []
    checker.element(frame)
    return _Axis(n_rows(frame), _names(checker, frame, node.child(f"{name}m")))


def _names(checker: AnnDataChecker, frame: Node, mapping: Node | None) -> Hashes | None:
    """Return the names of an axis if frames in a mapping are compared with them; if values are read, check that they are unique."""
    members = () if checker.full or mapping is None else mapping.children.values()
    # `guarded` reports an error instead of raising it, so the last line is reached.
    with checker.guarded(frame):
        if checker.full:
            return check_unique_names(checker, frame)
        if checker.compare and any(encoding_of(member) == "dataframe" for member in members):
            return name_hashes(frame)
    return None


def _check_x(checker: AnnDataChecker, node: Node, axes: Axes) -> None:
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
    _check_shape(checker, x, "A15", (axes["obs"].size, axes["var"].size), exact=True)
    values = x if x.is_array else x.child("data")
    flat = len(extent(x) or (0, 0)) == 2
    if values is not None and values.is_array and not (flat and values.kind in NUMBERS):
        checker.report(
            "A30",
            x,
            f"its values are of type {values.dtype} on {len(extent(x) or ())} axes; expected numbers on two.",
        )


def check_mapping(checker: AnnDataChecker, mapping: Node, axes: Axes, group: _Group) -> None:
    """Check a mapping along an axis, and its entries."""
    sizes = tuple(axes[name].size for name in group.axes)
    if mapping.is_array:
        # anndata 0.5 and 0.6 stored obsm and varm as arrays of records, with a field for each member.
        if not (checker.layout and mapping.kind == "record"):
            checker.element(mapping)
            checker.report("A80", mapping, "it is an array; expected a group.")
        elif mapping.shape and mapping.shape[:1] != sizes[:1]:
            checker.report(group.shape, mapping, f"it has {mapping.shape[0]:,} rows.", fix=SHAPE)
        return
    checker.element(mapping)
    for child in mapping.children.values():
        kind = encoding_of(child)
        if child.stored is None:
            continue
        if kind not in group.kinds:
            expected = f"{', '.join(group.kinds[:-1])} or {group.kinds[-1]}"
            inner = list(nested_members(child)) if kind == "dict" else []
            nested = bool(inner) and all(encoding_of(one) in group.kinds for one in inner)
            checker.report(
                group.types, child, f"it is of encoding {kind}; expected {expected}.", fix="" if nested else TYPED
            )
            continue
        rule = "A151" if kind == "awkward-array" else group.shape
        _check_shape(checker, child, rule, sizes, exact=group.exact)
        if child.is_array and len(child.shape or ()) == 1 and "dataframe" in group.kinds:
            checker.report(group.types, child, "it has one axis; expected two or more.", "practice", TYPED)
        names = axes[group.axes[0]].names if kind == "dataframe" and not child.is_array else None
        if names is not None:
            with checker.guarded(child):
                own = name_hashes(child)
                if own is not None and len(own) == len(names) and not np.array_equal(own, names):
                    row = int(np.argmax(own != names))
                    reordered = np.array_equal(np.sort(own), np.sort(names))
                    fix = (
                        "It has these names in another order: write the file again with its rows in the order of the axis."
                        if reordered
                        else ""
                    )
                    checker.report(
                        rule, child, f"its row {row:,} has another name than row {row:,} of the axis.", fix=fix
                    )


def _check_shape(checker: AnnDataChecker, node: Node, rule: str, sizes: tuple[int | None, ...], *, exact: bool) -> None:
    shape = extent(node)
    if shape is None:
        return
    # `sizes` may be shorter than `shape`: further axes, as of an array in obsm, are not compared.
    n_axes = len(shape) == len(sizes) if exact else len(shape) >= len(sizes)
    if not n_axes or any(size not in (None, n) for n, size in zip(shape, sizes, strict=False)):
        wanted = ", ".join("any" if size is None else f"{size:,}" for size in sizes)
        more = "" if exact else ", ..."
        text = f"its shape is {shape}; expected ({wanted}{more}) according to obs and var."
        checker.report(rule, node, text, fix=_RAW if rule == "A27" else SHAPE)


def _check_raw(checker: AnnDataChecker, node: Node, axes: Axes) -> None:
    n_obs = axes["obs"].size
    raw, dotted = node.child("raw"), node.child("raw.X")
    if raw is None and dotted is not None:
        checker.element(dotted)
        _check_shape(checker, dotted, "A27", (n_obs, None), exact=True)
    if raw is not None and raw.fault:
        checker.unreadable(raw, raw.fault)
    if raw is None or raw.stored is None or encoding_of(raw) == "null":
        return
    if raw.is_array:
        checker.report("A27", raw, "it is an array; expected a group.", fix=_RAW)
        return
    declared = declared_encoding(raw)
    if declared != ("raw", "0.1.0") and not checker.layout:
        encoding = " ".join(declared).strip() or "undeclared"
        whole = {"X", "var"} <= set(raw.children)
        checker.report("A27", raw, f"its encoding is {encoding}; expected raw 0.1.0.", fix="" if whole else _RAW)
    x, var, varm = (raw.child(name) for name in ("X", "var", "varm"))
    for name, part in (("X", x), ("var", var)):
        if part is None:
            checker.report("A27", raw, f"it has no {name}.", fix=_RAW)
    features = _Axis()
    if var is not None:
        checker.element(var)
        features = _Axis(n_rows(var), _names(checker, var, varm))
    if x is not None:
        checker.element(x)
        _check_shape(checker, x, "A27", (n_obs, features.size), exact=True)
    if varm is not None:
        check_mapping(checker, varm, {"var": features}, GROUPS["varm"])


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
        checker.report("A72", node, "it is of encoding dataframe 0.1.0, as anndata 0.7 wrote it.", "practice", AGAIN)
    listing = listed(node.attrs.get("column-order")) or []
    # anndata 0.12 stores a column with a slash in its name in nested groups.
    nested = {name: child for name in listing if "/" in name and (child := node.child(name)) is not None}
    groups = {name.partition("/")[0] for name in nested} | {OLD_CATEGORIES}
    members = {name: child for name, child in node.children.items() if name not in groups} | nested
    index = _check_index(checker, node)
    for child in members.values():
        # anndata 0.7 did not declare the encodings of columns.
        checker.element(child, declared=not old)
        if old:
            with checker.guarded(child):
                if child.parent is not None and "categories" in child.attrs and child.kind == "integer":
                    # In anndata 0.7 the categories are another member of the frame.
                    categories = child.parent.child(f"{OLD_CATEGORIES}/{child.name}")
                    if categories is None or not categories.is_array or not categories.shape:
                        checker.report("A106", child, "its categories are missing.")
                    elif checker.full:
                        check_codes(checker, child, categories.shape[0])
    _check_lengths(checker, node, members, index)
    sizes: dict[int, str] = {}
    for name, child in members.items():
        array = child if child.is_array else child.child("codes") or child.child("values")
        if array is not None and array.chunks:
            sizes.setdefault(array.chunks[0], name)
    if len(sizes) > 1:
        examples = ", ".join(f"{size:,} rows ({name})" for size, name in sorted(sizes.items())[:3])
        checker.report("A76", node, f"its members have chunks of {examples}.")
    _check_order(checker, node, members)


def _check_index(checker: AnnDataChecker, node: Node) -> Node | None:
    name = as_text(node.attrs.get("_index"))
    unnamed = "" if {"_index", "index"} & set(node.children) else REWRITE
    if not name:
        checker.report("A71", node, "it has no text attribute _index.", fix=unnamed)
        return index_node(node)
    index = node.child(name)
    if index is None:
        checker.report("A71", node, f"its index {name!r} is not a member.", fix=unnamed)
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
            fix = "Rename the column." if wrong is nested else ""
            checker.report(rule, node, f"column-order {text} {wrong[0]!r} ({len(wrong):,} such).", fix=fix)
    if "_index" in names:
        checker.report("A78", node, "a column is called _index.")


def check_categorical(checker: AnnDataChecker, node: Node) -> None:
    """Check a categorical: a flag, codes and categories."""
    ordered = plain_attribute(node.attrs.get("ordered"))
    if not isinstance(ordered, bool):
        is_flag = isinstance(ordered, int) and ordered in (0, 1)
        text = "there is no attribute ordered" if ordered is None else f"its attribute ordered is {ordered!r}"
        fix = "" if ordered is None or isinstance(ordered, int) else REWRITE
        checker.report("A102", node, f"{text}; expected a boolean.", "practice" if is_flag else None, fix)
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
        values = array.whole()
        repeated = [value for value, count in Counter(values.tolist()).items() if count > 1]
        if values.dtype.kind == "f" and np.isnan(values).any():
            checker.report("A107", node, "a category is NaN, which is a missing value.")
        elif repeated:
            checker.report("A107", node, f"the category {repeated[0]!r} occurs more than once.")
    return (array.shape or (0,))[0]


_NULLABLE = {
    "nullable-integer": ("integer", "integers", "A122", "A123", "A123"),
    "nullable-boolean": ("bool", "booleans", "A132", "A133", "A134"),
    "nullable-string-array": ("text", "text", "A143", "A144", "A145"),
}
"""Encoding-type -> what the values must be, as a kind and in words, and the rules for values, mask and their shape."""


def check_nullable(checker: AnnDataChecker, node: Node) -> None:
    """Check a group of values and a mask."""
    values_kind, values_noun, values_rule, mask_rule, shape_rule = _NULLABLE[encoding_of(node)]
    if values_kind == "text":
        na_value = plain_attribute(node.attrs.get("na-value"))
        if na_value is not None and not as_text(na_value):
            checker.report("A142", node, f"its na-value is {na_value!r}; expected NA or NaN.")
        elif na_value is not None and as_text(na_value) not in ("NA", "NaN"):
            checker.report("A146", node, f"its na-value is {as_text(na_value)!r}, which is read as NA.")
    arrays = {}
    for name, rule, kind, noun in (
        ("values", values_rule, values_kind, values_noun),
        ("mask", mask_rule, "bool", "booleans"),
    ):
        member = node.child(name)
        # A143 itself reports values that are not text, and must not be joined by A112 or A113.
        checker.inner(member, text=rule != "A143")
        if member is None or not member.is_array:
            checker.report(rule, node, f"{name} is {'missing' if member is None else 'a group'}.", fix=REWRITE)
            continue
        arrays[name] = member
        if member.fault:
            checker.unreadable(member, member.fault)
        else:
            with checker.guarded(member):
                (check_text if kind == "text" and member.text is not None else decode)(checker, member)
        if member.text is None if kind == "text" else member.kind != kind:
            verb = "is" if name == "mask" else "are"
            fix = "" if kind == "bool" and is_binary(member) else REWRITE
            checker.report(rule, node, f"{name} {verb} {_described(member)}; expected {noun}.", fix=fix)
    if len(arrays) == 2 and arrays["values"].shape != arrays["mask"].shape:
        shapes = f"values have shape {arrays['values'].shape}, but mask has {arrays['mask'].shape}"
        checker.report(shape_rule, node, f"{shapes}.", fix=REWRITE)
