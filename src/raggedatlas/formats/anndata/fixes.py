"""One mend for each rule that can be mended without guessing; each works on an opened copy."""

from collections.abc import Callable
from typing import Any

import numpy as np

from raggedatlas.formats.anndata.axis_names import names_node
from raggedatlas.formats.anndata.checking import (
    SPARSE,
    VERSIONS,
    as_text,
    declared_encoding,
    encoding_of,
    extent,
    index_node,
    infer,
    layout_of,
    listed,
    n_rows,
    sparse_shape,
)
from raggedatlas.formats.anndata.checks_frames import OLD_CATEGORIES
from raggedatlas.formats.anndata.file_tree import Node, plain_attribute
from raggedatlas.formats.anndata.rewriting import parent_of, recast, rechunk, sort_entries, write_small
from raggedatlas.model.batch import sparse_dtype
from raggedatlas.model.problems import Problem

Fix = Callable[[Node, Problem, Node], str]

RIGHT = {"A91": "numeric-scalar", "A93": "string", "A111": "string-array"}
"""Rules about what was declared as something else -> what it is."""


def declare(node: Node, problem: Problem, root: Node) -> str:
    """Declare the encoding that an element has by its structure."""
    del root
    kind, version = declared_encoding(node)
    if version == "0.1.0" and kind == "dataframe" and problem.rule == "A72":
        return ""
    if problem.rule in RIGHT and kind in ("array", "string-array"):
        kind = RIGHT[problem.rule]
    elif kind not in VERSIONS:
        kind = infer(node)
    if problem.rule == "A11":
        if layout_of(node):
            return ""
        kind = "anndata"
    if problem.rule == "A27":
        if not {"X", "var"} <= set(node.children):
            return ""
        kind = "raw"
    if (kind, VERSIONS[kind][0]) == declared_encoding(node):
        return ""
    node.stored.attrs["encoding-type"], node.stored.attrs["encoding-version"] = kind, VERSIONS[kind][0]
    return f"declared as {kind} {VERSIONS[kind][0]}"


def write_as_text(node: Node, problem: Problem, root: Node) -> str:
    """Write encoding attributes that are bytes as text."""
    del problem, root
    for name in ("encoding-type", "encoding-version"):
        if isinstance(plain_attribute(node.attrs.get(name)), bytes):
            node.stored.attrs[name] = as_text(node.attrs[name])
    return "attributes written as text"


def add_table(node: Node, problem: Problem, root: Node) -> str:
    """Write a table that is missing, with numbers for names where no table along the axis has names."""
    del root
    name = "obs" if "obs" in problem.message else "var"
    size = _axis_size(node, 0 if name == "obs" else 1)
    if size is None:
        return ""
    from anndata.io import write_elem

    names = _names_beside(node, "obsm" if name == "obs" else "varm", size)
    group = node.stored.create_group(name)
    write_elem(group, "_index", names if names is not None else np.array([str(i) for i in range(size)], dtype=object))
    group.attrs["_index"] = "_index"
    _set_names(group, "column-order", [], in_hdf5=node.in_hdf5)
    group.attrs["encoding-type"], group.attrs["encoding-version"] = "dataframe", "0.2.0"
    return f"{name} written with {'numbers for names' if names is None else 'the names of a table along it'}"


def _names_beside(node: Node, mapping: str, size: int) -> Any:  # noqa: ANN401  (an array of text)
    """Return the names that a frame along the axis has; they must be those of the axis."""
    for child in getattr(node.child(mapping), "children", {}).values():
        index = names_node(child) if encoding_of(child) == "dataframe" else None
        if index is not None and index.text is not None and index.shape == (size,):
            return np.array(
                [v.decode("utf-8") if isinstance(v, bytes) else str(v) for v in index.whole()], dtype=object
            )
    return None


def _axis_size(node: Node, axis: int) -> int | None:
    names = ("obsm", "obsp") if axis == 0 else ("varm", "varp")
    whole = [node.child("X"), *(child for child in getattr(node.child("layers"), "children", {}).values())]
    sizes = [extent(at) for at in whole if at is not None]
    found = {size[axis] for size in sizes if size and len(size) == 2}
    for name in names:
        along = [extent(at) for at in getattr(node.child(name), "children", {}).values()]
        found |= {size[0] for size in along if size}
    return found.pop() if len(found) == 1 else None


def add_axis(node: Node, problem: Problem, root: Node) -> str:
    """Give an array of one axis a second one, of length 1."""
    if problem.level != "practice" or not node.is_array:
        return ""
    write_small(node, root, node.whole()[:, None])
    return "written with a second axis of length 1"


def move_to_uns(node: Node, problem: Problem, root: Node) -> str:
    """Move a stray member of an HDF5 root into uns."""
    del problem
    group = parent_of(node, root)
    if "uns" not in group:
        made = group.create_group("uns")
        made.attrs["encoding-type"], made.attrs["encoding-version"] = "dict", "0.1.0"
    if node.name in group["uns"]:
        return ""
    group.move(node.name, f"uns/{node.name}")
    return "moved into uns"


def sort_sparse(node: Node, problem: Problem, root: Node) -> str:
    """Sort the entries of a sparse matrix, and sum what is there twice."""
    del problem
    shape = sparse_shape(node)
    if shape is None or encoding_of(node) not in SPARSE:
        return ""
    removed = sort_entries(node, root, shape[0 if encoding_of(node) == "csr_matrix" else 1])
    if removed < 0:
        return ""
    return f"entries sorted{f', {removed:,} summed into others' if removed else ''}"


def make_signed(node: Node, problem: Problem, root: Node) -> str:
    """Write unsigned pointers or indices as int64."""
    del problem
    if node.kind != "integer" or any(len(v) and int(v.max()) > np.iinfo(np.int64).max for _, v in node.blocks()):
        return ""
    recast(node, root, np.dtype(np.int64))
    return "written as int64"


def make_computable(node: Node, problem: Problem, root: Node) -> str:
    """Write values of a sparse matrix in a type that SciPy holds."""
    del problem
    recast(node, root, sparse_dtype(node.dtype))
    return f"written as {sparse_dtype(node.dtype)}"


def name_index(node: Node, problem: Problem, root: Node) -> str:
    """Name the index of a frame, where there is a member of one of the usual names."""
    del problem, root
    for name in ("_index", "index"):
        if name in node.children:
            node.stored.attrs["_index"] = name
            return f"_index set to {name!r}"
    return ""


def list_columns(node: Node, problem: Problem, root: Node) -> str:
    """List the columns of a frame: those that were listed and are there, in their order, then the others."""
    del problem, root
    index = index_node(node)
    rows = n_rows(index) if index is not None else None
    own = as_text(node.attrs.get("_index")) or "_index"
    before = (listed(node.attrs["column-order"]) if "column-order" in node.attrs else None) or []
    names = [name for name in dict.fromkeys(before) if node.child(name) is not None]
    tops = {name.partition("/")[0] for name in names}
    others = [name for name, child in node.children.items() if name not in tops and n_rows(child) == rows]
    names += [name for name in others if name not in (own, OLD_CATEGORIES)]
    if names == before and "column-order" in node.attrs:
        return ""
    _set_names(node.stored, "column-order", names, in_hdf5=node.in_hdf5)
    return f"column-order lists {len(names):,} columns"


def _set_names(stored: Any, attribute: str, names: list[str], *, in_hdf5: bool) -> None:  # noqa: ANN401
    if not in_hdf5:
        stored.attrs[attribute] = names
        return
    import h5py

    stored.attrs.create(attribute, np.array(names, dtype=object), dtype=h5py.string_dtype(), shape=(len(names),))


def share_chunks(node: Node, problem: Problem, root: Node) -> str:
    """Write the columns of a frame with the chunks of the one that has the longest."""
    del problem
    inner = [at if at.is_array else at.child("codes") or at.child("values") for at in node.children.values()]
    chunked = [at for at in inner if at is not None and at.is_array and getattr(at.stored, "chunks", None)]
    rows = max(at.stored.chunks[0] for at in chunked)
    for at in chunked:
        if at.stored.chunks[0] != rows or (at.chunks or (rows,))[0] != rows:
            rechunk(at, root, rows)
    return f"columns written in chunks of {rows:,} rows"


def fit_scalar(node: Node, problem: Problem, root: Node) -> str:
    """Write a scalar of one element without axes; declare one of several as the array that it is."""
    del problem
    value = node.whole()
    if value.size != 1:
        kind = "string-array" if node.text is not None else "array"
        node.stored.attrs["encoding-type"], node.stored.attrs["encoding-version"] = kind, VERSIONS[kind][0]
        return f"declared as {kind} {VERSIONS[kind][0]}"
    single = value.reshape(-1)[0]
    write_small(node, root, single.decode("utf-8") if isinstance(single, bytes) else single)
    return "written without axes"


def write_text(node: Node, problem: Problem, root: Node) -> str:
    """Write text as UTF-8 of variable length; nothing where it cannot be decoded."""
    del problem
    if node.text is None:
        return ""
    values = np.asarray(node.whole(), dtype=object)
    flat = [v.decode("utf-8") if isinstance(v, bytes) else str(v) for v in values.reshape(-1).tolist()]
    if values.shape == ():
        write_small(node, root, flat[0])
    else:
        made = np.empty(len(flat), dtype=object)
        made[:] = flat
        write_small(node, root, made.reshape(values.shape))
    return "written as UTF-8 text of variable length"


def set_ordered(node: Node, problem: Problem, root: Node) -> str:
    """Write the flag of a categorical as a boolean; a missing one is false."""
    del problem, root
    stated = plain_attribute(node.attrs.get("ordered"))
    if stated is not None and not isinstance(stated, int):
        return ""
    node.stored.attrs["ordered"] = bool(stated)
    return f"ordered set to {str(bool(stated)).lower()}"


def merge_categories(node: Node, problem: Problem, root: Node) -> str:
    """Merge equal categories, and code those that are missing as -1."""
    del problem
    codes, categories = node.children["codes"], node.children["categories"]
    if not categories.is_array:
        return ""
    values = categories.whole()
    known: dict[Any, int] = {}
    to = np.full(len(values) + 1, -1, np.int64)
    for i, value in enumerate(values.tolist()):
        if not (isinstance(value, float) and np.isnan(value)):
            to[i] = known.setdefault(value, len(known))
    before = codes.whole()
    if before.size and (before.min() < -1 or before.max() >= len(values)):
        return ""
    signed = before.dtype if before.dtype.kind == "i" else np.dtype(np.int64)
    write_small(codes, root, to[before.astype(np.int64)].astype(signed))
    kept = [v.decode("utf-8") if isinstance(v, bytes) else v for v in known]
    write_small(categories, root, np.array(kept, dtype=object if categories.text is not None else values.dtype))
    return f"{len(values) - len(kept):,} categories merged"


def make_boolean(node: Node, problem: Problem, root: Node) -> str:
    """Write values or mask that are all 0 or 1 as booleans."""
    member = node.child("values" if problem.rule == "A132" else "mask")
    if member is None or not member.is_array or member.kind not in ("integer", "real"):
        return ""
    values = member.whole()
    if not np.isin(values, (0, 1)).all():
        return ""
    write_small(member, root, values.astype(bool))
    return f"{member.name} written as booleans"


def set_missing_value(node: Node, problem: Problem, root: Node) -> str:
    """State the missing value that readers take an unknown one for."""
    del problem, root
    node.stored.attrs["na-value"] = "NA"
    return "na-value set to NA"


_DECLARED = (
    "A01", "A02", "A11", "A26", "A27", "A41", "A52", "A53", "A72", "A81", "A91", "A93", "A101", "A111", "A121", "A131",
    "A141",
)  # fmt: skip

FIXES: dict[str, Fix] = {
    **dict.fromkeys(_DECLARED, declare),
    "A04": write_as_text,
    "A12": add_table,
    "A18": add_axis,
    "A20": add_axis,
    "A28": move_to_uns,
    "A59": sort_sparse,
    "A60": make_signed,
    "A61": make_computable,
    "A71": name_index,
    "A73": list_columns,
    "A76": share_chunks,
    "A77": list_columns,
    "A90": fit_scalar,
    "A94": write_text,
    "A95": write_text,
    "A102": set_ordered,
    "A107": merge_categories,
    "A112": write_text,
    "A113": write_text,
    "A123": make_boolean,
    "A132": make_boolean,
    "A133": make_boolean,
    "A142": set_missing_value,
    "A144": make_boolean,
    "A146": set_missing_value,
}
"""Rule -> its mend, which says what it did, or nothing where it cannot be done."""
