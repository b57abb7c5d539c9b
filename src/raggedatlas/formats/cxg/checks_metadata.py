"""The rules of what a CXG says of itself: version, properties, colours, corpora, and uns."""

import re
from typing import Any
from urllib.parse import urlsplit

from raggedatlas.formats.cxg.checking import Checking
from raggedatlas.formats.cxg.detecting import list_members
from raggedatlas.formats.cxg.schema import (
    COLORS,
    CORPORA,
    EMB,
    GROUP_KEYS,
    GROUP_METADATA,
    LIBRARY,
    OBS,
    OBSM_PREFIX,
    PROPERTIES,
    SPATIAL,
    TITLED_BY_PROPERTIES,
    UNNAMED,
    UNS,
    VERSION,
    VERSIONS,
    XR,
)
from raggedatlas.formats.cxg.unstructured import parse_json

_SEMVER = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
_COLOR = re.compile(r"#[0-9A-Fa-f]{6}")
_ENDING = "_colors"
_OWN = "cxg_"
_NAMED = "Name the table after its column, without _colors."


def check_metadata(checking: Checking) -> None:
    """Check the metadata of the whole: C26, C27, C29, C50 to C53, C60, C61, C70."""
    _check_uns(checking)
    if GROUP_METADATA not in checking.arrays:
        kind = checking.members.get(GROUP_METADATA)
        if kind == "group":
            checking.report("C26", GROUP_METADATA, "it is a group, where an array belongs.")
        elif kind is None:
            checking.report("C26", GROUP_METADATA, "it is not there, so this is the unnamed version.", "practice")
        return
    _check_version(checking)
    for key in checking.arrays[GROUP_METADATA].metadata:
        if key.startswith(_OWN) and key not in GROUP_KEYS:
            checking.report("C52", GROUP_METADATA, f"it has the unknown key {key}.")
    properties = _check_properties(checking)
    _check_colors(checking)
    corpora = _check_corpora(checking)
    _compare(checking, properties or {}, corpora or {})


def version_of(checking: Checking) -> str:
    """Return the version that a CXG says it is of, `UNNAMED` where it says none."""
    found = checking.arrays.get(GROUP_METADATA)
    said = None if found is None else found.metadata.get(VERSION)
    return said if isinstance(said, str) else UNNAMED


def _check_version(checking: Checking) -> None:
    stored = checking.arrays[GROUP_METADATA].metadata.get(VERSION)
    known = VERSIONS[1:]
    if stored is None:
        checking.report("C50", GROUP_METADATA, f"it has no {VERSION}.")
    elif not isinstance(stored, str):
        checking.report("C50", GROUP_METADATA, f"{VERSION} is {stored!r:.40}, where text belongs.")
    elif stored not in known and not _SEMVER.fullmatch(stored):
        checking.report("C50", GROUP_METADATA, f"{VERSION} is {stored!r:.40}, which is no version.")
    elif stored not in known:
        checking.report("C50", GROUP_METADATA, f"{VERSION} is {stored}, and {', '.join(known)} are known.")
    if checking.version in (UNNAMED, "0.1", "0.2.0") and XR in checking.arrays and stored is not None:
        checking.report("C70", GROUP_METADATA, f"it says version {checking.version}, and {XR} is there.")
    if checking.version == "0.1" and CORPORA in checking.arrays[GROUP_METADATA].metadata:
        checking.report("C70", GROUP_METADATA, f"it says version 0.1, and {CORPORA} is there.")


def _check_properties(checking: Checking) -> dict[str, Any] | None:
    if PROPERTIES not in checking.arrays[GROUP_METADATA].metadata:
        checking.report("C51", GROUP_METADATA, f"it has no {PROPERTIES}.", "practice")
        return None
    found: dict[str, Any] | None = checking.json_of(GROUP_METADATA, PROPERTIES, "C51")
    title, about = (found or {}).get("title"), (found or {}).get("about")
    if title is not None and not isinstance(title, str):
        checking.report("C51", GROUP_METADATA, f"the title is {title!r:.40}, where text belongs.")
    if about is not None and not _is_address(about):
        checking.report("C51", GROUP_METADATA, f"about is {about!r:.80}, where an http or https address belongs.")
    return found


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        parts = urlsplit(value)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def _check_colors(checking: Checking) -> None:
    tables = checking.json_of(GROUP_METADATA, COLORS, "C53")
    if not tables:
        return
    columns = checking.arrays[OBS].names if OBS in checking.arrays else ()
    for name, table in tables.items():
        where = f"{GROUP_METADATA}/{COLORS}/{name}"
        if name not in columns and name.endswith(_ENDING) and name.removesuffix(_ENDING) in columns:
            checking.report("C53", where, "its name ends in _colors.", "practice", _NAMED)
        elif name not in columns and OBS in checking.arrays:
            checking.report("C53", where, "obs has no such column.", "practice")
        if not isinstance(table, dict):
            checking.report("C53", where, f"it is {table!r:.40}, where a JSON object belongs.")
            continue
        wrong = [one for one in table.values() if not (isinstance(one, str) and _COLOR.fullmatch(one))]
        if wrong:
            checking.report("C53", where, f"{wrong[0]!r:.40} is no colour of the form #RRGGBB.")


def _check_corpora(checking: Checking) -> dict[str, Any] | None:
    found: dict[str, Any] | None = checking.json_of(GROUP_METADATA, CORPORA, "C60")
    if found is None:
        return None
    old = found.get("version")
    schema = found.get("schema_version") or (old.get("corpora_schema_version") if isinstance(old, dict) else None)
    needed = {"schema_version": schema, "title": found.get("title")}
    if isinstance(schema, str) and schema.startswith(("1.", "2.")):
        needed["X_normalization"] = found.get("X_normalization")
    missing = [name for name, value in needed.items() if value is None]
    if missing:
        checking.report("C60", GROUP_METADATA, f"{CORPORA} has no {' and no '.join(missing)}.", "practice")
    default = found.get("default_embedding")
    names = {name.removeprefix(OBSM_PREFIX) for name in list_members(checking.path / EMB)}
    if isinstance(default, str) and names and default.removeprefix(OBSM_PREFIX) not in names:
        checking.report("C60", GROUP_METADATA, f"the default embedding {default} is not there.", "practice")
    return found


def _compare(checking: Checking, properties: dict[str, Any], corpora: dict[str, Any]) -> None:
    for mine, theirs in (("title", "title"), ("about", "project_link")):
        a, b = properties.get(mine), corpora.get(theirs)
        if isinstance(a, str) and isinstance(b, str) and a and b and a != b:
            right = PROPERTIES if checking.version in TITLED_BY_PROPERTIES else CORPORA
            said = f"{mine} is {a!r:.60} in {PROPERTIES} and {b!r:.60} in {CORPORA}; {right} is right."
            checking.report("C61", GROUP_METADATA, said)


def _check_uns(checking: Checking) -> None:
    kind = checking.members.get(UNS)
    if kind == "group":
        checking.report("C27", UNS, "it is a group, which no reader looks into.", "practice")
    if UNS not in checking.arrays:
        return
    for key, value in checking.arrays[UNS].metadata.items():
        where = f"{UNS}/{key}"
        if isinstance(value, bytes):
            checking.report("C27", where, "it is bytes, which are not read.")
        elif isinstance(value, str):
            try:
                found = parse_json(value)
            except ValueError as error:
                checking.report("C27", where, f"it is no JSON: {error}.")
                continue
            if key == SPATIAL:
                _check_spatial(checking, found)


def _check_spatial(checking: Checking, libraries: Any) -> None:  # noqa: ANN401  (any JSON)
    where = f"{UNS}/{SPATIAL}"
    if not isinstance(libraries, dict):
        checking.report("C29", where, f"it is {libraries!r:.40}, where a JSON object belongs.")
        return
    for name, library in libraries.items():
        if not isinstance(library, dict):
            checking.report("C29", where, f"{name} is {library!r:.40}, where a library belongs.")
            continue
        for part, keys in LIBRARY.items():
            held = library.get(part)
            missing = [key for key in keys if key not in (held if isinstance(held, dict) else {})]
            if missing:
                checking.report("C29", where, f"{name} has no {part} with {', '.join(missing)}.")
