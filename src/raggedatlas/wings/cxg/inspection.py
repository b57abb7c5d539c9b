"""Detection of version and layout of a CXG, and `inspect`, which describes its arrays and metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats.soma import TiledbKind, tiledb_kind
from raggedatlas.model.arguments import checked
from raggedatlas.model.reports import Element, Inspection
from raggedatlas.store.location import Address, AnyPath, as_path
from raggedatlas.wings.cxg.options import (
    ANONYMOUS,
    EMB,
    GROUP_METADATA,
    HINTS,
    MEMBERS,
    OBS,
    UNNAMED,
    VAR,
    VERSION,
    VERSIONS,
    XC,
    XR,
    Layout,
    X,
)
from raggedatlas.wings.cxg.tiledb_arrays import (
    ArrayAttribute,
    open_array,
    read_array_info,
    stored_bytes,
    written_cells,
)
from raggedatlas.wings.cxg.unstructured import parse_json


@dataclass(frozen=True, slots=True)
class Detection:
    """Version, layout and members of a CXG."""

    path: AnyPath
    version: str  # the stored version; `UNNAMED` if there is none
    layout: Layout | None  # by the existing arrays; None if there is no expression matrix
    reason: str  # of version and layout, in one line for people
    members: Mapping[str, TiledbKind]  # name in the root group -> kind; other folders are not listed
    embeddings: tuple[str, ...]  # sorted names of the arrays in ``emb``


def is_cxg(path: AnyPath) -> bool:
    """Return whether a folder looks like a CXG: a TileDB group with a known member, or arrays ``obs`` and ``var``."""
    if not path.is_dir() or tiledb_kind(path) == "array":
        return False
    arrays = [name for name in MEMBERS if tiledb_kind(path / name) is not None]
    # Copying can drop the empty file that marks the group, so two arrays of a CXG are enough without it (C01).
    return bool(arrays) if tiledb_kind(path) == "group" else {OBS, VAR} <= set(arrays)


def is_named_cxg(path: AnyPath) -> bool:
    """Return whether a path ends in ``.cxg`` or looks like one; in an object store its ending decides, so that no atlas is listed."""
    return path.suffix == ".cxg" or (isinstance(path, Path) and is_cxg(path))


def detect(path: AnyPath) -> Detection:
    """Detect version and layout of a CXG; an unknown version or a missing matrix is no error.

    Raises C01 if it is not a CXG, C00 if its metadata cannot be opened.
    """
    if not path.exists():
        raise NotFoundError(f"File or folder {path} does not exist; check the path.")
    if not is_cxg(path):
        raise SourceError(
            f"C01: {path} is not a CXG: it is not a TileDB group with arrays such as obs, var and X. Pass the folder that contains them."
        )
    members = list_members(path)
    version, said = UNNAMED, f"there is no {GROUP_METADATA}"
    if members.get(GROUP_METADATA) == "array":
        with open_array(path / GROUP_METADATA) as array:
            stored = array.meta.get(VERSION)
        said = f"{GROUP_METADATA} has no {VERSION}"
        if stored is not None:
            # The value is untrusted: bytes or a number must end as an unknown version (C50), not as a crash.
            version = stored.decode(errors="replace") if isinstance(stored, bytes) else str(stored)
            said = f"{GROUP_METADATA} says so"
    # By the existing arrays: writers mixed versions and layouts freely. As in viewers, both halves win over `X`.
    layout: Layout | None = None
    shown = "no layout: there is no complete expression matrix"
    if members.get(XR) == members.get(XC) == "array":
        layout, shown = "split", f"layout split: there are {XR} and {XC}"
    elif members.get(X) == "array":
        with open_array(path / X) as array:
            layout = "sparse" if array.schema.sparse else "dense"
        shown = f"layout {layout}: {X} is {layout}"
    embeddings = tuple(name for name, kind in list_members(path / EMB).items() if kind == "array")
    return Detection(path, version, layout, f"version {version}: {said}; {shown}", members, embeddings)


def list_members(path: AnyPath) -> dict[str, TiledbKind]:
    """Return the arrays and groups in a group, sorted by name; found in the file system, since none are registered."""
    if not path.is_dir():
        return {}
    kinds = {inner.name: tiledb_kind(inner) for inner in path.iterdir() if inner.is_dir()}
    return {name: kind for name, kind in sorted(kinds.items()) if kind is not None}


def require_readable(detection: Detection, version: str | None = None, *, allow_unknown: bool = False) -> str:
    """Raise if a CXG cannot be read, and return the version to read it as, one of `VERSIONS`.

    `version` overrides the stored one; with `allow_unknown` an unknown version is read as the newest known one. Raises
    C10 and C11 if ``obs`` or ``var`` is missing, C17 for a missing or incomplete matrix, C50 for an unknown version.
    """
    if version is not None and version not in VERSIONS:
        raise SourceError(f"Unknown CXG version {version!r}; choose one of {', '.join(VERSIONS)}.")
    needed = {OBS: "C10", VAR: "C11"}
    for name, rule in needed.items():
        if detection.members.get(name) != "array":
            raise SourceError(
                f"{rule}: {detection.path} has no array {name}; the CXG is incomplete. Fetch or write it again."
            )
    if detection.layout is None:
        half = next((name for name in (XR, XC) if name in detection.members), "")
        reason = f"{half} and not {XC if half == XR else XR}" if half else f"neither {X} nor {XR} and {XC}"
        raise SourceError(f"C17: {detection.path} has {reason}; the CXG is incomplete. Fetch or write it again.")
    if version is not None or detection.version in VERSIONS:
        return version or detection.version
    if allow_unknown:
        return VERSIONS[-1]
    raise SourceError(
        f"C50: {detection.path} has version {detection.version!r}; known are {', '.join(VERSIONS)}. Pass one of them as version=... "
        "to read it as such, or allow_unknown=True to read it as the newest."
    )


_MAX_TEXT = 80


@dataclass(frozen=True, slots=True)
class CxgInspection(Inspection):
    """Structure of a CXG, as found by `inspect`; prints as a tree, also in notebooks. `store` is ``"CXG"`` with the version."""

    version: str = UNNAMED  # the stored version; ``"unnamed"`` if there is none
    layout: str | None = None  # ``"dense"``, ``"sparse"``, ``"split"``; None if there is no complete matrix
    reason: str = ""  # of version and layout, for people


@checked
def inspect(path: Address) -> CxgInspection:
    """Inspect a CXG without reading its values.

    Parameters
    ----------
    path : str or Path
        Path of the folder.

    Returns
    -------
    CxgInspection
        A tree of arrays, columns and metadata; arrays that cannot be opened are included with the reason.

    Raises
    ------
    NotFoundError
        If the folder does not exist.
    SourceError
        If it is not a CXG (C01).

    Examples
    --------
    >>> import raggedatlas as ra
    >>> import tempfile
    >>> inspection = inspect(ra.copy("tests/data/pbmc68k_reduced.h5ad", tempfile.mkdtemp() + "/x.cxg"))
    >>> inspection.version, inspection.layout
    ('0.3.0', 'dense')
    """
    path = as_path(path)
    try:
        detection = detect(path)
        version, layout, reason = detection.version, detection.layout, detection.reason
    except SourceError as error:
        # C00 is damage of a single array, and the others can still be described; anything else is no CXG.
        if not str(error).startswith("C00"):
            raise
        version, layout, reason = UNNAMED, None, str(error)
    children = tuple(_member(path, name, kind) for name, kind in list_members(path).items())
    lengths = {child.name: child.shape for child in children if child.name in (OBS, VAR) and child.shape}
    root = replace(
        _group("", path.name, children),
        encoding=reason,
        shape=(lengths[OBS][0], lengths[VAR][0]) if len(lengths) == 2 else None,
    )
    return CxgInspection(str(path), f"CXG {version}", stored_bytes(path), root, version, layout, reason)


def _group(path: str, name: str, children: tuple[Element, ...]) -> Element:
    n_bytes, n_stored = sum(child.n_bytes for child in children), sum(child.n_stored for child in children)
    return Element(path, name, "group", "group", n_bytes=n_bytes, n_stored=n_stored, children=children)


def _member(folder: AnyPath, name: str, kind: TiledbKind, prefix: str = "") -> Element:
    path, at = folder / name, f"{prefix}{name}"
    if kind == "group":
        return _group(at, name, tuple(_member(path, *member, f"{at}/") for member in list_members(path).items()))
    try:
        info = read_array_info(path)
        # A sparse array is declared with every possible cell; fragments know how many are stored.
        n_cells = written_cells(path) if info.sparse else prod(info.shape)
        encoding = f"sparse array, capacity {info.capacity:,}" if info.sparse else "dense array"
        metadata = tuple(_metadata(at, key, value) for key, value in sorted(info.metadata.items()))
        try:
            hints = parse_json(info.metadata.get(HINTS, "{}"))
        except (ValueError, TypeError):
            hints = {}
        hints = hints if isinstance(hints, dict) else {}
        table = name in (OBS, VAR) and not info.sparse
        columns = tuple(_column(at, one, info.shape if table else (n_cells,), hints) for one in info.attributes)
        anonymous = len(columns) == 1 and info.attributes[0].name == ANONYMOUS
        if table:
            encoding = f"{encoding}, {len(columns):,} columns"
        if name == GROUP_METADATA:
            encoding = f"{encoding} for metadata"
        width = sum(one.dtype.itemsize for one in info.attributes if not one.variable)
        return Element(
            at,
            name,
            encoding,
            "array",
            info.shape,
            str(info.attributes[0].dtype) if anonymous else "",
            info.tile,
            compression=info.attributes[0].filters if anonymous else "",
            n_bytes=n_cells * (width + sum(axis.dtype.itemsize for axis in info.axes if info.sparse)),
            n_stored=stored_bytes(path),
            n_entries=n_cells if info.sparse and name == X else None,
            children=(*(() if anonymous else columns), *metadata),
        )
    except SourceError as error:
        return Element(at, name, "array", "array", fault=str(error).removeprefix("C00: "))


def _column(path: str, one: ArrayAttribute, shape: tuple[int, ...], hints: dict[str, Any]) -> Element:
    hint = hints.get(one.name)
    reason = str(hint.get("type", "column")) if isinstance(hint, dict) else "attribute"
    if isinstance(hint, dict) and isinstance(hint.get("categories"), list):
        reason = f"{reason} of {len(hint['categories']):,}"
    if hints.get("index") == one.name:
        reason = f"{reason}, the index"
    dtype = "text" if one.is_text else str(one.dtype)
    name = one.name or "(anonymous)"
    return Element(f"{path}/{one.name}", name, reason, "column", shape, dtype, compression=one.filters)


def _metadata(path: str, key: str, value: Any) -> Element:  # noqa: ANN401
    text = value if isinstance(value, str) else repr(value)
    size = len(text.encode("utf-8", errors="replace"))
    shown = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"
    stored = size if size > _MAX_TEXT else 0
    return Element(f"{path}@{key}", key, f"metadata {shown}", "metadata", n_stored=stored)
