"""What stands in a CXG: version and why, arrays with axes, columns, tiles, filters and sizes, and all metadata."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from raggedatlas.errors import SourceError
from raggedatlas.formats.cxg.arrays import Attribute, StoredArray, look_at, stored_bytes, written_cells
from raggedatlas.formats.cxg.detecting import Kind, detect, list_members
from raggedatlas.formats.cxg.schema import ANONYMOUS, GROUP_METADATA, HINTS, OBS, UNNAMED, VAR, X
from raggedatlas.formats.cxg.unstructured import parse_json
from raggedatlas.model.arguments import checked
from raggedatlas.model.inspections import Element, Inspection

_LONGEST = 80


@dataclass(frozen=True, slots=True)
class CxgInspection(Inspection):
    """What `inspect` found of a CXG; prints as a tree, and shows as one in a notebook.

    Parameters
    ----------
    path, store, n_bytes, root
        As of any `Inspection`; `store` is ``"CXG"`` with the version.
    version : str
        As it stands there; ``"unnamed"`` where there is none.
    layout : {"dense", "sparse", "split"} or None
        By the arrays that are there.
    reason : str
        Why it is taken for that.
    """

    version: str = UNNAMED
    layout: str | None = None
    reason: str = ""


@checked
def inspect(path: str | Path) -> CxgInspection:
    """Look at a CXG without reading its values.

    Parameters
    ----------
    path : str or Path
        Its folder.

    Returns
    -------
    CxgInspection
        A tree of arrays, columns and metadata; arrays that cannot be opened are in it, with the reason.

    Raises
    ------
    NotFoundError
        If there is no such folder.
    SourceError
        If it is no CXG (C01).

    Examples
    --------
    >>> from raggedatlas.testing.cxgs import write_cxg
    >>> import tempfile
    >>> found = inspect(write_cxg(tempfile.mkdtemp() + "/x.cxg"))
    >>> found.version, found.layout
    ('0.3.0', 'split')
    >>> found.reason
    'version 0.3.0: cxg_group_metadata says so; layout split: there are Xr and Xc'
    """
    path = Path(path)
    try:
        found = detect(path)
        version, layout, reason = found.version, found.layout, found.reason
    except SourceError as error:
        if not str(error).startswith("C00"):
            raise
        version, layout, reason = UNNAMED, None, str(error)
    children = tuple(_member(path, name, kind) for name, kind in list_members(path).items())
    shape = _shape(children)
    root = Element(
        "", path.name, reason, "group", shape, "", None, None, "", sum(child.n_bytes for child in children),
        sum(child.n_stored for child in children), None, "", children,
    )  # fmt: skip
    return CxgInspection(str(path), f"CXG {version}", stored_bytes(path), root, version, layout, reason)


def _shape(children: tuple[Element, ...]) -> tuple[int, ...] | None:
    lengths = {child.name: child.shape for child in children if child.name in (OBS, VAR) and child.shape}
    return (lengths[OBS][0], lengths[VAR][0]) if len(lengths) == 2 else None


def _member(folder: Path, name: str, kind: Kind, prefix: str = "") -> Element:
    path = folder / name
    if kind == "group":
        inner = tuple(_member(path, one, of, f"{prefix}{name}/") for one, of in list_members(path).items())
        sizes = (sum(child.n_bytes for child in inner), sum(child.n_stored for child in inner))
        return Element(f"{prefix}{name}", name, "group", "group", None, "", None, None, "", *sizes, None, "", inner)
    try:
        return _array(f"{prefix}{name}", path, look_at(path))
    except SourceError as error:
        said = str(error).removeprefix("C00: ")
        return Element(f"{prefix}{name}", name, "array", "array", None, "", None, None, "", 0, 0, None, said, ())


def _array(path: str, at: Path, found: StoredArray) -> Element:
    name, n_cells = at.name, written_cells(at) if found.sparse else prod(found.shape)
    form = "sparse array" if found.sparse else "dense array"
    metadata = tuple(_metadata(path, key, value) for key, value in sorted(found.metadata.items()))
    hints = _hints(found)
    table = name in (OBS, VAR) and not found.sparse
    columns = tuple(_column(path, one, found.shape if table else (n_cells,), hints) for one in found.attributes)
    whole = len(columns) == 1 and found.attributes[0].name == ANONYMOUS
    encoding = f"{form}, capacity {found.capacity:,}" if found.sparse else form
    if table:
        encoding = f"{encoding}, {len(columns):,} columns"
    if name == GROUP_METADATA:
        encoding = f"{encoding} for metadata"
    return Element(
        path, name, encoding, "array", found.shape, str(found.attributes[0].dtype) if whole else "", found.tile, None,
        found.attributes[0].filters if whole else "", _decoded(found, n_cells), stored_bytes(at),
        n_cells if found.sparse and name == X else None, "", (*(() if whole else columns), *metadata),
    )  # fmt: skip


def _decoded(found: StoredArray, n_cells: int) -> int:
    width = sum(one.dtype.itemsize for one in found.attributes if not one.variable)
    return n_cells * (width + sum(axis.dtype.itemsize for axis in found.axes if found.sparse))


def _hints(found: StoredArray) -> dict[str, Any]:
    try:
        hints = parse_json(found.metadata.get(HINTS, "{}"))
    except (ValueError, TypeError):
        return {}
    return hints if isinstance(hints, dict) else {}


def _column(path: str, one: Attribute, shape: tuple[int, ...], hints: dict[str, Any]) -> Element:
    hint = hints.get(one.name)
    said = _hint_text(hint) if isinstance(hint, dict) else "attribute"
    if hints.get("index") == one.name:
        said = f"{said}, the index"
    dtype = "text" if one.is_text else str(one.dtype)
    name = one.name or "(anonymous)"
    return Element(
        f"{path}/{one.name}", name, said, "column", shape, dtype, None, None, one.filters, 0, 0, None, "", ()
    )


def _hint_text(hint: dict[str, Any]) -> str:
    categories = hint.get("categories")
    kind = str(hint.get("type", "column"))
    return f"{kind} of {len(categories):,}" if isinstance(categories, list) else kind


def _metadata(path: str, key: str, value: Any) -> Element:  # noqa: ANN401
    text = value if isinstance(value, str) else repr(value)
    size = len(text.encode("utf-8", errors="replace"))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return Element(
        f"{path}@{key}", key, f"metadata {shown}", "metadata", None, "", None, None, "", 0,
        size if size > _LONGEST else 0, None, "", (),
    )  # fmt: skip
