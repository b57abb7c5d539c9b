"""Everything of a CXG that is neither table nor matrix: group metadata, colours, gene sets, ``uns``, and arrays carried along."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raggedatlas.formats.cxg.colors import color_table, keeps
from raggedatlas.formats.cxg.columns import Table
from raggedatlas.formats.cxg.losses import Loss
from raggedatlas.formats.cxg.options import CxgOptions
from raggedatlas.formats.cxg.schema import COLORS, CORPORA, GENESETS, MISSING_TEXT, PROPERTIES, SIDE, VERSION
from raggedatlas.formats.cxg.unstructured import NoJsonError, as_json, from_json, has_arrays

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
    # Viewers fail on every request where there are no properties.
    made.group[PROPERTIES] = json.dumps({**properties, "title": title, "about": about})
    made.group[COLORS] = json.dumps(_colors(left, obs, side, made.losses))
    for key, value in dict(side.get("metadata", {})).items():
        made.group.setdefault(str(key), getattr(value, "item", lambda value=value: value)())
    _genesets(left, made)
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
    found: dict[str, dict[str, str]] = dict(json.loads(given)) if isinstance(given, str) else {}
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


def from_json_or_none(text: str) -> Any:  # noqa: ANN401
    """Parse JSON; None where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
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
