"""Unstructured metadata as JSON, the only form that is written, and the only one that is read: nothing is ever unpickled."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.cxg.options import ConversionLoss, CxgOptions
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
from raggedatlas.formats.cxg.table_encoder import Table

MAX_DEPTH = 100
"""JSON that is nested deeper is refused: everything that walks through it calls itself."""


class NotJsonError(Exception):
    """A value has no form in JSON; its text says what stands in the way."""


def as_json(value: Any) -> str:  # noqa: ANN401  (anything that uns holds)
    """Write a value as strict JSON: arrays as lists, NaN as null.

    Raises
    ------
    NoJsonError
        For bytes, tables, sparse matrices, infinities, keys that are no text, and what is nested too deeply.

    Examples
    --------
    >>> as_json({"scale": np.array([1.0, np.nan])})
    '{"scale": [1.0, null]}'
    """
    try:
        plain = _plain(value)
    except RecursionError as error:
        raise NotJsonError(f"more than {MAX_DEPTH} levels") from error
    if _is_deep(plain):
        raise NotJsonError(f"more than {MAX_DEPTH} levels")
    return json.dumps(plain, allow_nan=False)


def from_json(text: str) -> Any:  # noqa: ANN401
    """Read JSON; lists of numbers, truths or texts, also nested evenly, become arrays, null among numbers NaN.

    Text that is no JSON stays text.

    Examples
    --------
    >>> from_json('{"a": [1, 2], "b": [1.5, null], "c": ["x"], "d": [1, "x"]}')
    {'a': array([1, 2]), 'b': array([1.5, nan]), 'c': array(['x'], dtype=object), 'd': '[1, "x"]'}
    """
    try:
        return restore_arrays(parse_json(text))
    except ValueError:
        return text


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401
    """Parse JSON; bytes are UTF-8.

    Raises
    ------
    ValueError
        If it is none, or nested deeper than `MAX_DEPTH`.

    Examples
    --------
    >>> parse_json('[1, {"a": null}]')
    [1, {'a': None}]
    >>> parse_json(200 * "[" + 200 * "]")
    Traceback (most recent call last):
    ...
    ValueError: it is nested deeper than 100
    """
    text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
    deep = f"it is nested deeper than {MAX_DEPTH}"
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError(deep) from error
    if _is_deep(value):
        raise ValueError(deep)
    return value


def restore_arrays(value: Any) -> Any:  # noqa: ANN401
    """Turn parsed JSON into what AnnData holds: see `from_json`.

    A list that is no array (of objects, of lists of different lengths, of different types) is its JSON text, since no AnnData file
    can hold it.

    Examples
    --------
    >>> restore_arrays({"genes": [{"symbol": "CD4"}]})
    {'genes': '[{"symbol": "CD4"}]'}
    """
    if isinstance(value, dict):
        return {key: restore_arrays(inner) for key, inner in value.items()}
    if not isinstance(value, list):
        return value
    shape, kinds = _shape(value), _kinds(value)
    if shape is not None and kinds == {str}:
        out = np.empty(shape, object)
        out[...] = np.array(value, dtype=object)
        return out
    if shape is not None and kinds in ({int}, {bool}) and (found := np.array(value)).dtype.kind in "bi":
        return found
    if shape is not None and kinds <= {int, float, type(None)}:
        with suppress(OverflowError):
            return np.array(value, dtype=np.float64).reshape(shape)
    return json.dumps(value)


def has_arrays(value: Any) -> bool:  # noqa: ANN401
    """Say whether there is an array in a value, which comes back with another type of numbers.

    Examples
    --------
    >>> has_arrays({"a": {"b": np.zeros(2, np.float32)}}), has_arrays([1, 2])
    (True, False)
    """
    if isinstance(value, Mapping):
        return any(has_arrays(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(has_arrays(inner) for inner in value)
    return isinstance(value, np.ndarray) and value.ndim > 0


def _is_deep(value: Any) -> bool:  # noqa: ANN401
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(level)


def _plain(value: Any) -> Any:  # noqa: ANN401
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise NotJsonError("an infinite number")
        return None if math.isnan(value) else value
    if isinstance(value, np.ndarray):
        return _listed(value)
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise NotJsonError(f"the key {odd[0]!r}, which is no text")
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    raise NotJsonError(f"a {type(value).__name__}")


def _listed(values: NDArray[Any]) -> Any:  # noqa: ANN401
    if values.dtype.names is not None:
        raise NotJsonError("a structured array")
    if values.dtype.kind in "biu":
        return values.tolist()
    if values.dtype.kind == "f":
        if np.isinf(values).any():
            raise NotJsonError("an infinite number")
        return _plain(values.tolist()) if np.isnan(values).any() else values.tolist()
    if values.dtype.kind in "UOT":
        return _plain(values.tolist())
    raise NotJsonError(f"an array of {values.dtype}")


def _shape(value: Any) -> tuple[int, ...] | None:  # noqa: ANN401
    """Return the shape of nested lists, None where they are uneven."""
    if not isinstance(value, list):
        return ()
    inner = {_shape(each) for each in value}
    if not inner:
        return (0,)
    only = inner.pop()
    return None if inner or only is None else (len(value), *only)


def _kinds(value: Any) -> set[type]:  # noqa: ANN401
    if not isinstance(value, list):
        return {type(value)}
    return set().union(*map(_kinds, value)) if value else set()


_CSS = (
    "aliceblue=f0f8ff antiquewhite=faebd7 aqua=00ffff aquamarine=7fffd4 azure=f0ffff beige=f5f5dc bisque=ffe4c4 "
    "black=000000 blanchedalmond=ffebcd blue=0000ff blueviolet=8a2be2 brown=a52a2a burlywood=deb887 "
    "cadetblue=5f9ea0 chartreuse=7fff00 chocolate=d2691e coral=ff7f50 cornflowerblue=6495ed cornsilk=fff8dc "
    "crimson=dc143c cyan=00ffff darkblue=00008b darkcyan=008b8b darkgoldenrod=b8860b darkgray=a9a9a9 "
    "darkgreen=006400 darkkhaki=bdb76b darkmagenta=8b008b darkolivegreen=556b2f darkorange=ff8c00 darkorchid=9932cc "
    "darkred=8b0000 darksalmon=e9967a darkseagreen=8fbc8f darkslateblue=483d8b darkslategray=2f4f4f "
    "darkturquoise=00ced1 darkviolet=9400d3 deeppink=ff1493 deepskyblue=00bfff dimgray=696969 dodgerblue=1e90ff "
    "firebrick=b22222 floralwhite=fffaf0 forestgreen=228b22 fuchsia=ff00ff gainsboro=dcdcdc ghostwhite=f8f8ff "
    "gold=ffd700 goldenrod=daa520 gray=808080 green=008000 greenyellow=adff2f honeydew=f0fff0 hotpink=ff69b4 "
    "indianred=cd5c5c indigo=4b0082 ivory=fffff0 khaki=f0e68c lavender=e6e6fa lavenderblush=fff0f5 lawngreen=7cfc00 "
    "lemonchiffon=fffacd lightblue=add8e6 lightcoral=f08080 lightcyan=e0ffff lightgoldenrodyellow=fafad2 "
    "lightgray=d3d3d3 lightgreen=90ee90 lightpink=ffb6c1 lightsalmon=ffa07a lightseagreen=20b2aa "
    "lightskyblue=87cefa lightslategray=778899 lightsteelblue=b0c4de lightyellow=ffffe0 lime=00ff00 "
    "limegreen=32cd32 linen=faf0e6 magenta=ff00ff maroon=800000 mediumaquamarine=66cdaa mediumblue=0000cd "
    "mediumorchid=ba55d3 mediumpurple=9370db mediumseagreen=3cb371 mediumslateblue=7b68ee mediumspringgreen=00fa9a "
    "mediumturquoise=48d1cc mediumvioletred=c71585 midnightblue=191970 mintcream=f5fffa mistyrose=ffe4e1 "
    "moccasin=ffe4b5 navajowhite=ffdead navy=000080 oldlace=fdf5e6 olive=808000 olivedrab=6b8e23 orange=ffa500 "
    "orangered=ff4500 orchid=da70d6 palegoldenrod=eee8aa palegreen=98fb98 paleturquoise=afeeee palevioletred=db7093 "
    "papayawhip=ffefd5 peachpuff=ffdab9 peru=cd853f pink=ffc0cb plum=dda0dd powderblue=b0e0e6 purple=800080 "
    "rebeccapurple=663399 red=ff0000 rosybrown=bc8f8f royalblue=4169e1 saddlebrown=8b4513 salmon=fa8072 "
    "sandybrown=f4a460 seagreen=2e8b57 seashell=fff5ee sienna=a0522d silver=c0c0c0 skyblue=87ceeb slateblue=6a5acd "
    "slategray=708090 snow=fffafa springgreen=00ff7f steelblue=4682b4 tan=d2b48c teal=008080 thistle=d8bfd8 "
    "tomato=ff6347 turquoise=40e0d0 violet=ee82ee wheat=f5deb3 white=ffffff whitesmoke=f5f5f5 yellow=ffff00 "
    "yellowgreen=9acd32 "
)
_NAMED = dict(re.findall(r"(\w+)=(\w+)", _CSS))
"""Names of CSS -> hexadecimal digits; those spelled with "grey" are the same as with "gray"."""

_HEX = re.compile(r"#([0-9a-fA-F]{3}|[0-9a-fA-F]{6}|[0-9a-fA-F]{8})")


def as_hex(color: Any) -> str | None:  # noqa: ANN401  (a text, or three or four numbers)
    """Write a colour as ``#rrggbb``, or return None if it is none; transparency is dropped.

    Parameters
    ----------
    color : str or sequence of number
        A CSS name, ``#rgb``, ``#rrggbb``, ``#rrggbbaa``, or red, green, blue (and alpha) from 0 to 1, or from 0 to 255 as integers.

    Examples
    --------
    >>> as_hex("SteelBlue"), as_hex("#abc"), as_hex((1.0, 0.5, 0)), as_hex([255, 128, 0]), as_hex("blu")
    ('#4682b4', '#aabbcc', '#ff8000', '#ff8000', None)
    """
    if isinstance(color, str):
        return _of_text(color.strip().lower())
    parts = np.asarray(color)
    if parts.shape not in ((3,), (4,)) or parts.dtype.kind not in "iuf" or (parts < 0).any():
        return None
    scaled = parts[:3] if parts.dtype.kind in "iu" else np.round(parts[:3].astype(float) * 255)
    if (scaled > 255).any():
        return None
    return "#" + "".join(f"{int(part):02x}" for part in scaled)


def color_table(labels: Sequence[str], colors: Any) -> dict[str, str] | None:  # noqa: ANN401
    """Pair categories with their colours; None where there are too few, or one is none.

    Examples
    --------
    >>> color_table(["B", "T"], ["red", "#00f", "lime"])
    {'B': '#ff0000', 'T': '#0000ff'}
    """
    listed = [colors] if isinstance(colors, str) else list(colors) if isinstance(colors, Sequence | np.ndarray) else []
    made = [as_hex(color) for color in listed[: len(labels)]]
    plain = [color for color in made if color is not None]
    return dict(zip(labels, plain, strict=True)) if len(plain) == len(labels) and labels else None


def is_lossless(colors: Any, table: Mapping[str, str]) -> bool:  # noqa: ANN401
    """Say whether a table holds all that the colours said: nothing more, spelled alike but for capitals."""
    return [str(color).lower() for color in np.asarray(colors, dtype=object).reshape(-1).tolist()] == list(
        table.values()
    )


def _of_text(text: str) -> str | None:
    found = _HEX.fullmatch(text)
    if found is None:
        digits = _NAMED.get(text.replace("grey", "gray"))
        return None if digits is None else f"#{digits}"
    digits = found[1]
    return "#" + ("".join(2 * digit for digit in digits) if len(digits) == 3 else digits[:6])


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
class CxgMetadata:
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
    losses: list[ConversionLoss] = field(default_factory=list)


def collect_metadata(uns: Mapping[str, Any], obs: Table, options: CxgOptions) -> CxgMetadata:
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
    made = CxgMetadata(arrays=_side(uns).get("arrays", {}))
    side = _side(uns)
    left = {key: value for key, value in uns.items() if key != SIDE}
    made.obs.update(side.get("obs_metadata", {}))
    made.var.update(side.get("var_metadata", {}))
    corpora = _corpora(left, made)
    given = _text_or_none(left.pop("title", None))
    title = options.title if options.title is not None else given
    if corpora:
        made.group[CORPORA] = json.dumps({**corpora, "title": title if title is not None else corpora.get("title", "")})
    properties = {str(key): _json_value(value) for key, value in dict(side.get("properties", {})).items()}
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
    return CxgMetadata({VERSION: options.profile, **made.group}, made.obs, made.var, made.uns, made.arrays, made.losses)


def stored_var_index(uns: Mapping[str, Any]) -> str | None:
    """Return the column of ``var`` that viewers showed in the CXG where it all came from."""
    named = _side(uns).get("var_index")
    return str(named) if named is not None else None


def _side(uns: Mapping[str, Any]) -> Mapping[str, Any]:
    side = uns.get(SIDE, {})
    return side if isinstance(side, Mapping) else {}


def _text_or_none(value: Any) -> str | None:  # noqa: ANN401
    return None if value is None else str(value)


def _json_value(value: Any) -> Any:  # noqa: ANN401
    try:
        return json.loads(as_json(value))
    except NotJsonError:
        return str(value)


def _corpora(left: dict[str, Any], made: CxgMetadata) -> dict[str, Any]:
    """Take the keys of CELLxGENE's schema out of ``uns``, where it says that it follows one; viewers take no half of it."""
    if not isinstance(left.get("schema_version"), str):
        return {}
    found: dict[str, Any] = {}
    for key in CORPORA_KEYS:
        if key in left:
            try:
                found[key] = json.loads(as_json(left[key]))
            except NotJsonError as error:
                made.losses.append(ConversionLoss(f"uns/{key}", "lost", f"it holds {error}"))
            if key != "title":
                del left[key]
    return found


def _colors(
    left: dict[str, Any], obs: Table, side: Mapping[str, Any], losses: list[ConversionLoss]
) -> dict[str, dict[str, str]]:
    given = side.get("colors")
    kept = parse_json_or_none(given) if isinstance(given, str) else None
    found: dict[str, dict[str, str]] = kept if isinstance(kept, dict) else {}
    hints = obs.hints()
    for key in [key for key in left if key.endswith(_SUFFIX)]:
        column = key.removesuffix(_SUFFIX)
        named = column if column in obs.labels else column.removesuffix(_TERM)
        if named not in obs.labels:
            continue
        table = color_table(obs.labels[named], left[key])
        if table is None:
            losses.append(
                ConversionLoss(f"uns/{key}", "converted", "not a colour for each category; kept in uns, and not shown")
            )
            continue
        if not is_lossless(left[key], table):
            losses.append(
                ConversionLoss(f"uns/{key}", "converted", "colours are written as #rrggbb, one for each category")
            )
        shown = hints.get(obs.names[named], {}).get("categories", ())
        found[obs.names[named]] = {**{label: _GREY for label in shown if label == MISSING_TEXT}, **table}
        del left[key]
    return found


def _genesets(left: dict[str, Any], made: CxgMetadata) -> None:
    """Put gene sets where viewers look for them: a table of named sets, each with genes."""
    value = left.get(GENESETS)
    parsed = parse_json_or_none(value) if isinstance(value, str) else value
    whole = isinstance(parsed, Mapping) and all(isinstance(s, Mapping) and "genes" in s for s in parsed.values())
    if not whole:
        return
    try:
        made.obs[GENESETS] = as_json(parsed)
    except NotJsonError:
        return
    del left[GENESETS]


def _spatial(value: Any, made: CxgMetadata) -> None:  # noqa: ANN401
    """Keep of ``uns["spatial"]`` what viewers read: sizes of images and scale factors of each library. They fail on anything else."""
    if not isinstance(value, Mapping):
        made.losses.append(
            ConversionLoss(f"uns/{SPATIAL}", "lost", "viewers take it for a table of libraries, and fail")
        )
        return
    libraries: dict[str, Any] = {}
    for name, given in value.items():
        where = f"uns/{SPATIAL}/{name}"
        library = _library(given) if isinstance(given, Mapping) else None
        if library is None:
            why = "it is no library with an image hires or fullres and the scale factors that viewers ask for"
            made.losses.append(ConversionLoss(where, "lost", why))
            continue
        libraries[str(name)] = library
        for part, inner in given.items():
            if part == "images":
                made.losses.append(
                    ConversionLoss(f"{where}/images", "lost", "a CXG has the size of an image, and no pixels")
                )
            elif not isinstance(inner, Mapping) or part not in LIBRARY:
                made.losses.append(ConversionLoss(f"{where}/{part}", "lost", "a CXG has no place for it"))
            else:
                more = [key for key in inner if key not in LIBRARY[part]]
                made.losses.extend(
                    ConversionLoss(f"{where}/{part}/{key}", "lost", "a CXG has no place for it") for key in more
                )
    made.uns[SPATIAL] = json.dumps(libraries)


def _library(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Describe a library as viewers ask for it; None where something of that is not known."""
    described = {"image_properties": _image_properties(given.get("images")), **given}
    made: dict[str, Any] = {}
    for part, keys in LIBRARY.items():
        held = described[part] if isinstance(described.get(part), Mapping) else {}
        if any(key not in held for key in keys):
            return None
        made[part] = {key: _json_value(held[key]) for key in keys}
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


def parse_json_or_none(text: str) -> Any:  # noqa: ANN401
    """Parse JSON; None where it is none."""
    try:
        return parse_json(text)
    except ValueError:
        return None


def _keep(key: str, value: Any, made: CxgMetadata) -> None:  # noqa: ANN401
    try:
        text = as_json(value)
    except NotJsonError as error:
        made.losses.append(ConversionLoss(f"uns/{key}", "lost", f"it holds {error}, which JSON does not"))
        return
    if has_arrays(value) or isinstance(value, list | tuple) or _changes(value, text):
        made.losses.append(
            ConversionLoss(
                f"uns/{key}", "converted", "written as JSON; arrays come back as int64, float64, bool or text"
            )
        )
    made.uns[key] = text


def _changes(value: Any, text: str) -> bool:  # noqa: ANN401
    back = from_json(text)
    return type(back) is not type(value) and not isinstance(value, Mapping)
