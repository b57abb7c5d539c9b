"""Unstructured metadata as JSON, the only form that is written or read: nothing is ever unpickled."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raggedatlas.wings.cxg.options import (
    COLORS,
    CORPORA,
    GENESETS,
    GROUP_KEYS,
    HINTS,
    LIBRARY,
    MISSING_TEXT,
    PROPERTIES,
    SIDE,
    SPATIAL,
    VERSION,
    ConversionLoss,
    CxgOptions,
    LossKind,
)
from raggedatlas.wings.cxg.table_encoder import Table

MAX_DEPTH = 100
"""Maximum nesting of JSON, since all functions that walk through it are recursive."""


class NotJsonError(Exception):
    """A value cannot be written as JSON; the message names the part that prevents it."""


def as_json(value: Any) -> str:  # noqa: ANN401  (anything that uns holds)
    """Write a value as strict JSON: arrays as lists, NaN as null.

    Raises `NotJsonError` for bytes, tables, sparse matrices, infinities, keys that are not text, and values nested too
    deeply.

    Examples
    --------
    >>> as_json({"scale": np.array([1.0, np.nan])})
    '{"scale": [1.0, null]}'
    """
    try:
        plain = _plain(value)
    except RecursionError as error:
        raise NotJsonError(f"more than {MAX_DEPTH} levels") from error
    # What is deeper could be written, but `parse_json` would refuse it.
    if _is_deep(plain):
        raise NotJsonError(f"more than {MAX_DEPTH} levels")
    return json.dumps(plain, allow_nan=False)


def from_json(text: str) -> Any:  # noqa: ANN401
    """Read JSON; regular lists of numbers, booleans or texts become arrays, null among numbers NaN.

    Text that is not JSON is returned unchanged.

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
    """Parse JSON; bytes are UTF-8. Raises `ValueError` if it is not JSON, or nested deeper than `MAX_DEPTH`.

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
    # `json` recurses too, and gives up at a depth that depends on the interpreter.
    with suppress(RecursionError):
        value = json.loads(text)
        if not _is_deep(value):
            return value
    raise ValueError(f"it is nested deeper than {MAX_DEPTH}")


def restore_arrays(value: Any) -> Any:  # noqa: ANN401
    """Convert parsed JSON to values of AnnData, as `from_json` does.

    An irregular list (of objects, of lists of different lengths, of different types) becomes JSON text, since AnnData
    files cannot store it.

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
    # Kinds are exact types: a list of bool and int is irregular, although `True` is an `int`.
    if shape is not None and kinds == {str}:
        out = np.empty(shape, object)
        out[...] = np.array(value, dtype=object)
        return out
    if shape is not None and kinds in ({int}, {bool}) and (array := np.array(value)).dtype.kind in "bi":
        return array
    if shape is not None and kinds <= {int, float, type(None)}:
        # An integer that no float64 holds leaves the list as JSON text.
        with suppress(OverflowError):
            return np.array(value, dtype=np.float64).reshape(shape)
    return json.dumps(value)


def _is_deep(value: Any) -> bool:  # noqa: ANN401
    level = [value] if isinstance(value, dict | list) else []
    # Level by level, since a recursive walk would itself fail on what it is to find.
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
    return bool(level)


def _plain(value: Any) -> Any:  # noqa: ANN401
    if value is None or isinstance(value, bool | str):
        return value
    # Before the Python types: `np.float64` is a `float`, and `json` knows no other NumPy number.
    if isinstance(value, np.generic):
        return _plain(value.item())
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise NotJsonError("an infinite number")
        return None if math.isnan(value) else value
    if isinstance(value, np.ndarray):
        if value.dtype.names is not None:
            raise NotJsonError("a structured array")
        if value.dtype.kind not in "biufUOT":
            raise NotJsonError(f"an array of {value.dtype}")
        # Infinities, NaN and objects need a look at each value.
        plain = value.dtype.kind in "biu" or (value.dtype.kind == "f" and bool(np.isfinite(value).all()))
        return value.tolist() if plain else _plain(value.tolist())
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise NotJsonError(f"the key {odd[0]!r}, which is not text")
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    raise NotJsonError(f"a {type(value).__name__}")


def _shape(value: Any) -> tuple[int, ...] | None:  # noqa: ANN401
    """Return the shape of nested lists, None if they are irregular."""
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
"""CSS name -> hexadecimal digits; names with "grey" are those with "gray"."""

_HEX = re.compile(r"#([0-9a-fA-F]{3}|[0-9a-fA-F]{6}|[0-9a-fA-F]{8})")


def as_hex(color: Any) -> str | None:  # noqa: ANN401  (a text, or three or four numbers)
    """Return a colour as ``#rrggbb`` without transparency, or None if it is not a colour.

    Accepts CSS names, ``#rgb``, ``#rrggbb``, ``#rrggbbaa``, and red, green, blue (and alpha) as floats from 0 to 1,
    or as integers from 0 to 255.

    Examples
    --------
    >>> as_hex("SteelBlue"), as_hex("#abc"), as_hex((1.0, 0.5, 0)), as_hex([255, 128, 0]), as_hex("blu")
    ('#4682b4', '#aabbcc', '#ff8000', '#ff8000', None)
    """
    if isinstance(color, str):
        text = color.strip().lower()
        match = _HEX.fullmatch(text)
        digits = match[1] if match else _NAMED.get(text.replace("grey", "gray"))
        if digits is None:
            return None
        return "#" + ("".join(2 * digit for digit in digits) if len(digits) == 3 else digits[:6])
    parts = np.asarray(color)
    if parts.shape not in ((3,), (4,)) or parts.dtype.kind not in "iuf" or not (parts >= 0).all():
        return None
    # The dtype decides the scale: (1, 1, 1) is nearly black, (1.0, 1.0, 1.0) is white.
    scaled = parts[:3] if parts.dtype.kind in "iu" else np.round(parts[:3].astype(float) * 255)
    if (scaled > 255).any():
        return None
    return "#" + "".join(f"{int(part):02x}" for part in scaled)


def color_table(labels: Sequence[str], colors: Any) -> dict[str, str] | None:  # noqa: ANN401
    """Return a table of the colours of categories; None if there are too few, or one is invalid.

    Examples
    --------
    >>> color_table(["B", "T"], ["red", "#00f", "lime"])
    {'B': '#ff0000', 'T': '#0000ff'}
    """
    listed = [colors] if isinstance(colors, str) else list(colors) if isinstance(colors, Sequence | np.ndarray) else []
    valid = [text for color in listed[: len(labels)] if (text := as_hex(color)) is not None]
    return dict(zip(labels, valid, strict=True)) if len(valid) == len(labels) and labels else None


CORPORA_KEYS = (
    "schema_version", "schema_reference", "title", "default_embedding", "X_approximate_distribution", "X_normalization", "batch_condition",
    "version", "contributors", "preprint_doi", "publication_doi", "default_field", "tags", "project_name", "project_description",
    "organism", "organism_ontology_term_id", "citation",
)  # fmt: skip
"""Keys of ``uns`` that belong to the schema of CELLxGENE, in files that follow it."""

_SIDE_PARTS: Mapping[str, type] = {
    **dict.fromkeys(("metadata", "obs_metadata", "properties", "var_metadata"), Mapping),
    **dict.fromkeys(("colors", "var_index"), str),
}
"""Keys of the side data, as `source` names them -> type of the value."""

_GREY = "#808080"
_SUFFIX = "_colors"
_TERM = "_ontology_term_id"


@dataclass(frozen=True, slots=True)
class CxgMetadata:
    """Metadata of a CXG."""

    group: dict[str, Any] = field(default_factory=dict)  # of ``cxg_group_metadata``
    obs: dict[str, Any] = field(default_factory=dict)  # metadata of the table other than its hints, like `var`
    var: dict[str, Any] = field(default_factory=dict)
    uns: dict[str, str] = field(default_factory=dict)  # JSON of ``spatial``, where there is some
    losses: list[ConversionLoss] = field(default_factory=list)

    def lose(self, key: str, fate: LossKind, what: str) -> None:
        """Record that an element is not preserved."""
        self.losses.append(ConversionLoss(key, fate, what))


def collect_metadata(uns: Mapping[str, Any], obs: Table, options: CxgOptions) -> CxgMetadata:
    """Distribute the unstructured metadata of an AnnData over a CXG; what has no place there becomes a loss.

    `obs` has the categories that have colours.
    """
    side = _side(uns)
    result = CxgMetadata({VERSION: options.profile})
    # Whatever finds a place below is removed from `left`; the rest is reported as lost.
    left = {key: value for key, value in uns.items() if key != SIDE}
    # Users may have put something of their own under the key of side data.
    reserved = "the key is reserved for what is read from a CXG"
    if not isinstance(uns.get(SIDE, {}), Mapping):
        result.lose(f"uns/{SIDE}", "lost", reserved)
    for key, value in side.items():
        kind = _SIDE_PARTS.get(key)
        if kind is None or not isinstance(value, kind):
            result.lose(f"uns/{SIDE}/{key}", "lost", reserved)
    result.obs.update(_kept_metadata(side, "obs_metadata", (HINTS, GENESETS), result))
    result.var.update(_kept_metadata(side, "var_metadata", (HINTS,), result))
    corpora = _corpora(left, result)
    value = left.pop("title", None)
    given = None if value is None else str(value)
    title = options.title if options.title is not None else given
    if corpora:
        result.group[CORPORA] = json.dumps(
            {**corpora, "title": title if title is not None else corpora.get("title", "")}
        )
    properties = {str(key): _json_value(value) for key, value in _mapping(side.get("properties")).items()}
    about = options.about if options.about is not None else properties.pop("about", None)
    other = properties.pop("title", None)
    named = options.title if options.title is not None else other if other is not None else given
    # Viewers fail on every request without properties.
    result.group[PROPERTIES] = json.dumps({**properties, "title": named, "about": about})
    result.group[COLORS] = json.dumps(_colors(left, obs, side, result))
    result.group.update(_kept_metadata(side, "metadata", GROUP_KEYS, result))
    # Gene sets, a table of named sets with genes each, are metadata that viewers read.
    sets = left.get(GENESETS)
    sets = parse_json_or_none(sets) if isinstance(sets, str) else sets
    if isinstance(sets, Mapping) and all(isinstance(s, Mapping) and "genes" in s for s in sets.values()):
        with suppress(NotJsonError):
            # Raises before `del`, so gene sets that are not JSON stay in `left`.
            result.obs[GENESETS] = as_json(sets)
            del left[GENESETS]
    if SPATIAL in left:
        _spatial(left.pop(SPATIAL), result)
    for key in left:
        result.lose(f"uns/{key}", "lost", "a CXG has no place for it")
    return result


def stored_var_index(uns: Mapping[str, Any]) -> str | None:
    """Return the column of ``var`` that viewers showed in the CXG from which the AnnData was read."""
    named = _side(uns).get("var_index")
    return str(named) if named is not None else None


def _side(uns: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(uns.get(SIDE))


def _mapping(value: Any) -> Mapping[str, Any]:  # noqa: ANN401
    return value if isinstance(value, Mapping) else {}


def _kept_metadata(side: Mapping[str, Any], name: str, reserved: Sequence[str], result: CxgMetadata) -> dict[str, Any]:
    """Return metadata of an array that `source` read, as TileDB stores it: scalars, text, and tuples of numbers for arrays."""
    kept: dict[str, Any] = {}
    for key, value in _mapping(side.get(name)).items():
        plain = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        parts = plain if isinstance(plain, list) else [plain]
        if key in reserved or not parts or not all(isinstance(part, str | int | float) for part in parts):
            result.lose(f"uns/{SIDE}/{name}/{key}", "lost", "the writer sets it, or TileDB has no metadata of its type")
        else:
            kept[str(key)] = tuple(plain) if isinstance(plain, list) else plain
    return kept


def _json_value(value: Any) -> Any:  # noqa: ANN401
    try:
        return json.loads(as_json(value))
    except NotJsonError:
        return str(value)


def _corpora(left: dict[str, Any], result: CxgMetadata) -> dict[str, Any]:
    """Remove and return the keys of CELLxGENE's schema if ``uns`` declares one; viewers need all of them."""
    if not isinstance(left.get("schema_version"), str):
        return {}
    values: dict[str, Any] = {}
    for key in CORPORA_KEYS:
        if key in left:
            try:
                values[key] = json.loads(as_json(left[key]))
            except NotJsonError as error:
                result.lose(f"uns/{key}", "lost", f"it has {error}")
            if key != "title":
                del left[key]
    return values


def _colors(
    left: dict[str, Any], obs: Table, side: Mapping[str, Any], result: CxgMetadata
) -> dict[str, dict[str, str]]:
    given = side.get("colors")
    side_tables = parse_json_or_none(given) if isinstance(given, str) else None
    tables: dict[str, dict[str, str]] = side_tables if isinstance(side_tables, dict) else {}
    hints = obs.hints()
    for key in [key for key in left if key.endswith(_SUFFIX)]:
        column = key.removesuffix(_SUFFIX)
        # Colours of `cell_type_ontology_term_id` are taken for `cell_type` if it has no labels of its own.
        named = column if column in obs.labels else column.removesuffix(_TERM)
        if named not in obs.labels:
            continue
        table = color_table(obs.labels[named], left[key])
        if table is None:
            continue
        given = np.asarray(left[key], dtype=object).reshape(-1).tolist()
        if [str(color).lower() for color in given] != list(table.values()):
            result.lose(f"uns/{key}", "converted", "colours are written as #rrggbb, one for each category")
        shown = hints.get(obs.names[named], {}).get("categories", ())
        # In 0.2.0 missing values are a category `nan`, which has no colour in AnnData.
        tables[obs.names[named]] = {**{label: _GREY for label in shown if label == MISSING_TEXT}, **table}
        del left[key]
    return tables


def _spatial(value: Any, result: CxgMetadata) -> None:  # noqa: ANN401
    """Keep the parts of ``uns["spatial"]`` that viewers read, the image size and scale factors of each library; they fail on others."""
    if not isinstance(value, Mapping):
        result.lose(f"uns/{SPATIAL}", "lost", "viewers read it as a table of libraries, and fail")
        return
    libraries: dict[str, Any] = {}
    for name, given in value.items():
        where = f"uns/{SPATIAL}/{name}"
        library = _library(given) if isinstance(given, Mapping) else None
        if library is None:
            why = "it is not a library with an image hires or fullres and the scale factors that viewers need"
            result.lose(where, "lost", why)
            continue
        libraries[str(name)] = library
        for part, inner in given.items():
            if part == "images":
                result.lose(f"{where}/images", "lost", "a CXG has the size of an image, but no pixels")
            elif not isinstance(inner, Mapping) or part not in LIBRARY:
                result.lose(f"{where}/{part}", "lost", "a CXG has no place for it")
            else:
                for key in (key for key in inner if key not in LIBRARY[part]):
                    result.lose(f"{where}/{part}/{key}", "lost", "a CXG has no place for it")
    # Written even if empty: `{}` is what viewers read as no image (C29).
    result.uns[SPATIAL] = json.dumps(libraries)


def _library(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the description of a library that viewers need; None if a part is missing."""
    # A library that came from a CXG has `image_properties` and no image; its own win.
    described = {"image_properties": _image_properties(given.get("images")), **given}
    library: dict[str, Any] = {}
    for part, keys in LIBRARY.items():
        values = described[part] if isinstance(described.get(part), Mapping) else {}
        if any(key not in values for key in keys):
            return None
        library[part] = {key: _json_value(values[key]) for key in keys}
    image = library["image_properties"]
    numbers = [image["width"], image["height"], *library["scalefactors"].values()]
    return library if all(isinstance(number, int | float) for number in numbers) else None


def _image_properties(images: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Return the square in the middle of an image, which viewers show; None if there is no image."""
    for resolution in ("fullres", "hires"):
        image = images.get(resolution) if isinstance(images, Mapping) else None
        shape: tuple[int, ...] = getattr(image, "shape", ())
        if len(shape) > 1 and 0 not in shape[:2]:
            height, width = shape[:2]
            side = min(height, width)
            # The order of the loops is that of the names: (width - side) / 2, (height - side) / 2, and so on.
            left, upper, right, lower = (int((n + s) / 2) for s in (-side, side) for n in (width, height))
            crop = [left, upper, right, lower]
            return {"resolution": resolution, "crop_coords": crop, "width": side, "height": side}
    return None


def parse_json_or_none(text: str) -> Any:  # noqa: ANN401
    """Return parsed JSON; None if it is not JSON."""
    try:
        return parse_json(text)
    except ValueError:
        return None
