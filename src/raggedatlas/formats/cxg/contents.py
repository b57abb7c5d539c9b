"""Everything of a CXG that is neither table nor matrix: group metadata, colours, gene sets, ``uns``, and arrays carried along."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raggedatlas.formats.cxg.colors import color_table, keeps
from raggedatlas.formats.cxg.columns import Table
from raggedatlas.formats.cxg.losses import Loss
from raggedatlas.formats.cxg.options import CxgOptions
from raggedatlas.formats.cxg.schema import (
    COLORS,
    CORPORA,
    GENESETS,
    LIBRARY,
    MISSING_TEXT,
    PROPERTIES,
    SIDE,
    SPATIAL,
    VERSION,
)
from raggedatlas.formats.cxg.unstructured import NoJsonError, as_json, from_json, has_arrays, parse_json

CORPORA_KEYS = (
    "schema_version", "schema_reference", "title", "default_embedding", "X_approximate_distribution", "X_normalization", "batch_condition",
    "version", "contributors", "preprint_doi", "publication_doi", "default_field", "tags", "project_name", "project_description",
    "organism", "organism_ontology_term_id", "citation",
)  # fmt: skip
"""Keys of ``uns`` that belong to the schema of CELLxGENE, in files that follow one."""

_GREY = "#808080"
_SUFFIX = "_colors"
_TERM = "_ontology_term_id"


@dataclass(frozen=True, slots=True)
class Contents:
    """What is written beside tables and matrices.

    Parameters
    ----------
    group : dict of str to str
        Metadata of ``cxg_group_metadata``.
    obs, var : dict of str to any
        Metadata of the tables, beside their hints.
    uns : dict of str to str
        JSON by key.
    arrays : mapping
        Arrays carried along, as `source` gave them.
    shown : str or None
        The column of ``var`` that was shown before.
    losses : list of Loss
        What does not come through.
    """

    group: dict[str, Any] = field(default_factory=dict)
    obs: dict[str, Any] = field(default_factory=dict)
    var: dict[str, Any] = field(default_factory=dict)
    uns: dict[str, str] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)


def contents_of(uns: Mapping[str, Any], obs: Table, options: CxgOptions) -> Contents:
    """Sort unstructured metadata into its places.

    Parameters
    ----------
    uns : mapping of str to any
        Of the AnnData.
    obs : Table
        The cells, for the labels that colours are given for.
    options : CxgOptions
        The caller's choices.

    Returns
    -------
    Contents
        Whatever has no form in JSON is among the losses.
    """
    made = Contents(arrays=_side(uns).get("arrays", {}))
    side = _side(uns)
    left = {key: value for key, value in uns.items() if key != SIDE}
    made.obs.update(side.get("obs_metadata", {}))
    made.var.update(side.get("var_metadata", {}))
    corpora = _corpora(left, made)
    given = _text_or_none(left.pop("title", None))
    title = options.title if options.title is not None else given
    if corpora:
        made.group[CORPORA] = json.dumps({**corpora, "title": title if title is not None else corpora.get("title", "")})
    properties = {str(key): _plain(value) for key, value in dict(side.get("properties", {})).items()}
    about = options.about if options.about is not None else properties.pop("about", None)
    other = properties.pop("title", None)
    named = options.title if options.title is not None else other if other is not None else given
    # Viewers fail on every request where there are no properties.
    made.group[PROPERTIES] = json.dumps({**properties, "title": named, "about": about})
    made.group[COLORS] = json.dumps(_colors(left, obs, side, made.losses))
    for key, value in dict(side.get("metadata", {})).items():
        made.group.setdefault(str(key), getattr(value, "item", lambda value=value: value)())
    _genesets(left, made)
    if SPATIAL in left:
        _spatial(left.pop(SPATIAL), made)
    for key, value in left.items():
        _keep(key, value, made)
    return Contents({VERSION: options.profile, **made.group}, made.obs, made.var, made.uns, made.arrays, made.losses)


def shown_feature(uns: Mapping[str, Any]) -> str | None:
    """Return the column of ``var`` that viewers showed in the CXG where it all came from."""
    named = _side(uns).get("var_index")
    return str(named) if named is not None else None


def _side(uns: Mapping[str, Any]) -> Mapping[str, Any]:
    side = uns.get(SIDE, {})
    return side if isinstance(side, Mapping) else {}


def _text_or_none(value: Any) -> str | None:  # noqa: ANN401
    return None if value is None else str(value)


def _plain(value: Any) -> Any:  # noqa: ANN401
    try:
        return json.loads(as_json(value))
    except NoJsonError:
        return str(value)


def _corpora(left: dict[str, Any], made: Contents) -> dict[str, Any]:
    """Take the keys of CELLxGENE's schema out of ``uns``, where it says that it follows one; viewers take no half of it."""
    if not isinstance(left.get("schema_version"), str):
        return {}
    found: dict[str, Any] = {}
    for key in CORPORA_KEYS:
        if key in left:
            try:
                found[key] = json.loads(as_json(left[key]))
            except NoJsonError as error:
                made.losses.append(Loss(f"uns/{key}", "lost", f"it holds {error}"))
            if key != "title":
                del left[key]
    return found


def _colors(left: dict[str, Any], obs: Table, side: Mapping[str, Any], losses: list[Loss]) -> dict[str, dict[str, str]]:
    given = side.get("colors")
    kept = from_json_or_none(given) if isinstance(given, str) else None
    found: dict[str, dict[str, str]] = kept if isinstance(kept, dict) else {}
    hints = obs.hints()
    for key in [key for key in left if key.endswith(_SUFFIX)]:
        column = key.removesuffix(_SUFFIX)
        named = column if column in obs.labels else column.removesuffix(_TERM)
        if named not in obs.labels:
            continue
        table = color_table(obs.labels[named], left[key])
        if table is None:
            losses.append(Loss(f"uns/{key}", "converted", "not a colour for each category; kept in uns, and not shown"))
            continue
        if not keeps(left[key], table):
            losses.append(Loss(f"uns/{key}", "converted", "colours are written as #rrggbb, one for each category"))
        shown = hints.get(obs.names[named], {}).get("categories", ())
        found[obs.names[named]] = {**{label: _GREY for label in shown if label == MISSING_TEXT}, **table}
        del left[key]
    return found


def _genesets(left: dict[str, Any], made: Contents) -> None:
    """Put gene sets where viewers look for them: a table of named sets, each with genes."""
    value = left.get(GENESETS)
    parsed = from_json_or_none(value) if isinstance(value, str) else value
    whole = isinstance(parsed, Mapping) and all(isinstance(s, Mapping) and "genes" in s for s in parsed.values())
    if not whole:
        return
    try:
        made.obs[GENESETS] = as_json(parsed)
    except NoJsonError:
        return
    del left[GENESETS]


def _spatial(value: Any, made: Contents) -> None:  # noqa: ANN401
    """Keep of ``uns["spatial"]`` what viewers read: sizes of images and scale factors of each library. They fail on anything else."""
    if not isinstance(value, Mapping):
        made.losses.append(Loss(f"uns/{SPATIAL}", "lost", "viewers take it for a table of libraries, and fail"))
        return
    libraries: dict[str, Any] = {}
    for name, given in value.items():
        where = f"uns/{SPATIAL}/{name}"
        library = _library(given) if isinstance(given, Mapping) else None
        if library is None:
            why = "it is no library with an image hires or fullres and the scale factors that viewers ask for"
            made.losses.append(Loss(where, "lost", why))
            continue
        libraries[str(name)] = library
        for part, inner in given.items():
            if part == "images":
                made.losses.append(Loss(f"{where}/images", "lost", "a CXG has the size of an image, and no pixels"))
            elif not isinstance(inner, Mapping) or part not in LIBRARY:
                made.losses.append(Loss(f"{where}/{part}", "lost", "a CXG has no place for it"))
            else:
                more = [key for key in inner if key not in LIBRARY[part]]
                made.losses.extend(Loss(f"{where}/{part}/{key}", "lost", "a CXG has no place for it") for key in more)
    made.uns[SPATIAL] = json.dumps(libraries)


def _library(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Describe a library as viewers ask for it; None where something of that is not known."""
    described = {"image_properties": _image_properties(given.get("images")), **given}
    made: dict[str, Any] = {}
    for part, keys in LIBRARY.items():
        held = described[part] if isinstance(described.get(part), Mapping) else {}
        if any(key not in held for key in keys):
            return None
        made[part] = {key: _plain(held[key]) for key in keys}
    numbers = [made["image_properties"]["width"], made["image_properties"]["height"], *made["scalefactors"].values()]
    return made if all(isinstance(number, int | float) for number in numbers) else None


def _image_properties(images: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Describe the square in the middle of an image, which is what viewers show; None where there is no image."""
    for resolution in ("fullres", "hires"):
        image = images.get(resolution) if isinstance(images, Mapping) else None
        shape: tuple[int, ...] = getattr(image, "shape", ())
        if len(shape) > 1 and 0 not in shape[:2]:
            height, width = shape[:2]
            side = min(height, width)
            left, upper, right, lower = (int((n + s) / 2) for s in (-side, side) for n in (width, height))
            crop = [left, upper, right, lower]
            return {"resolution": resolution, "crop_coords": crop, "width": side, "height": side}
    return None


def from_json_or_none(text: str) -> Any:  # noqa: ANN401
    """Parse JSON; None where it is none."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def _keep(key: str, value: Any, made: Contents) -> None:  # noqa: ANN401
    try:
        text = as_json(value)
    except NoJsonError as error:
        made.losses.append(Loss(f"uns/{key}", "lost", f"it holds {error}, which JSON does not"))
        return
    if has_arrays(value) or isinstance(value, list | tuple) or _changes(value, text):
        made.losses.append(
            Loss(f"uns/{key}", "converted", "written as JSON; arrays come back as int64, float64, bool or text")
        )
    made.uns[key] = text


def _changes(value: Any, text: str) -> bool:  # noqa: ANN401
    back = from_json(text)
    return type(back) is not type(value) and not isinstance(value, Mapping)
