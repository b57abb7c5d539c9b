"""Which CXG a folder is: its version by what it says, its layout by the arrays that are there."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats.cxg.engine import open_array
from raggedatlas.formats.cxg.schema import (
    EMB,
    GROUP_METADATA,
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

Kind = Literal["array", "group"]

# The last three are those of an array that has lost its schema, which is to be refused and not overlooked.
_ARRAY_MARKS = ("__schema", "__array_schema.tdb", "__fragments", "__commits", "__lock.tdb")
_GROUP_MARKS = ("__tiledb_group.tdb", "__group")


@dataclass(frozen=True, slots=True)
class Detection:
    """What a folder is, told from its members and one metadata value.

    Parameters
    ----------
    path : Path
        The folder.
    version : str
        As it stands there; `UNNAMED` where there is none.
    layout : {"dense", "sparse", "split"} or None
        By the arrays that are there; None where there is no expression matrix.
    reason : str
        Why, in one line for people.
    members : mapping of str to str
        Name at the root -> ``"array"`` or ``"group"``; folders that are neither are not listed.
    embeddings : tuple of str
        Names of the arrays in ``emb``, sorted.
    """

    path: Path
    version: str
    layout: Layout | None
    reason: str
    members: Mapping[str, Kind]
    embeddings: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        """Whether the version is one of `VERSIONS`."""
        return self.version in VERSIONS

    @property
    def extras(self) -> tuple[str, ...]:
        """Members that the format does not name."""
        return tuple(name for name in self.members if name not in MEMBERS)


def kind_of(path: Path) -> Kind | None:
    """Say whether a folder is a TileDB array or group, by its files; the library is not needed.

    Examples
    --------
    >>> kind_of(Path("tests/data")) is None
    True
    """
    if any((path / mark).exists() for mark in _ARRAY_MARKS):
        return "array"
    return "group" if any((path / mark).exists() for mark in _GROUP_MARKS) else None


def is_cxg(path: Path) -> bool:
    """Say whether a folder looks like a CXG: a TileDB group with a member of that name, or arrays ``obs`` and ``var``."""
    if not path.is_dir() or kind_of(path) == "array":
        return False
    arrays = [name for name in MEMBERS if kind_of(path / name) is not None]
    return bool(arrays) if kind_of(path) == "group" else {OBS, VAR} <= set(arrays)


def detect(path: str | Path) -> Detection:
    """Find out which CXG a folder is; refuses nothing that it can describe.

    Raises
    ------
    NotFoundError
        If there is no such folder.
    SourceError
        If it is no CXG (C01), or its metadata cannot be opened (C00).
    MissingExtraError
        If tiledb is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"There is no file or folder {path}; check the path.")
    if not is_cxg(path):
        raise SourceError(
            f"C01: {path} is no CXG: it is no TileDB group with arrays such as obs, var and X. Give the folder that holds them."
        )
    members = list_members(path)
    version, said = _version(path, members)
    layout, shown = _layout(path, members)
    embeddings = tuple(name for name, kind in list_members(path / EMB).items() if kind == "array")
    return Detection(path, version, layout, f"{said}; {shown}", members, embeddings)


def list_members(path: Path) -> dict[str, Kind]:
    """List the arrays and groups in a group, sorted by name; members are found by looking, since none are registered."""
    if not path.is_dir():
        return {}
    kinds = {inner.name: kind_of(inner) for inner in sorted(path.iterdir()) if inner.is_dir()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def require(found: Detection, version: str | None = None, *, allow_unknown: bool = False) -> str:
    """Refuse what cannot be read, and settle by which version the rest is read.

    Parameters
    ----------
    found : Detection
        Of `detect`.
    version : str, optional
        The version to read it as, whatever it says.
    allow_unknown : bool
        Whether an unknown version is read as the newest known.

    Returns
    -------
    str
        One of `VERSIONS`.

    Raises
    ------
    SourceError
        By rule id: C10 and C11 for absent ``obs`` and ``var``, C17 for an absent or half matrix, C21 for absent embeddings, C50 for
        an unknown version.
    """
    if version is not None and version not in VERSIONS:
        raise SourceError(f"There is no CXG version {version!r}; choose one of {', '.join(VERSIONS)}.")
    _require_members(found)
    if version is not None or found.is_known:
        return version or found.version
    if allow_unknown:
        return VERSIONS[-1]
    raise SourceError(
        f"C50: {found.path} says it is of version {found.version!r}, and {', '.join(VERSIONS)} are known. Pass version= one of them to "
        "read it as such (raggedatlas convert --cxg-version), or allow_unknown=True to read it as the newest."
    )


def _require_members(found: Detection) -> None:
    needed = {OBS: "C10", VAR: "C11"}
    for name, rule in needed.items():
        if found.members.get(name) != "array":
            raise SourceError(
                f"{rule}: {found.path} has no array {name}; the CXG is not complete. Fetch or write it again."
            )
    if found.layout is None:
        half = next((name for name in (XR, XC) if name in found.members), "")
        said = f"{half} and not {XC if half == XR else XR}" if half else f"neither {X} nor {XR} and {XC}"
        raise SourceError(f"C17: {found.path} has {said}; the CXG is not complete. Fetch or write it again.")


def _version(path: Path, members: Mapping[str, Kind]) -> tuple[str, str]:
    if members.get(GROUP_METADATA) != "array":
        return UNNAMED, f"version {UNNAMED}: there is no {GROUP_METADATA}"
    with open_array(path / GROUP_METADATA) as array:
        stored = array.meta.get(VERSION)
    if stored is None:
        return UNNAMED, f"version {UNNAMED}: {GROUP_METADATA} holds no {VERSION}"
    text = stored.decode(errors="replace") if isinstance(stored, bytes) else str(stored)
    return text, f"version {text}: {GROUP_METADATA} says so"


def _layout(path: Path, members: Mapping[str, Kind]) -> tuple[Layout | None, str]:
    """Tell by presence: versions and layouts were mixed freely by what wrote them. Both halves win over ``X``, as in viewers."""
    if members.get(XR) == members.get(XC) == "array":
        return "split", f"layout split: there are {XR} and {XC}"
    if members.get(X) != "array":
        return None, "no layout: there is no whole expression matrix"
    with open_array(path / X) as array:
        sparse = bool(array.schema.sparse)
    return ("sparse", f"layout sparse: {X} is sparse") if sparse else ("dense", f"layout dense: {X} is dense")
