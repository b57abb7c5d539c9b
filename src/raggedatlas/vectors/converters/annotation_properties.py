"""Properties of annotations as attributes, and back: numbers, colours, and codes with their labels."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.vectors.converters.annotation_records import COLOURS
from raggedatlas.vectors.converters.content import decode_categories, encode_categories
from raggedatlas.vectors.converters.precomputed import TYPES, stored_type
from raggedatlas.vectors.shapes import Attribute, Attributes

PROPERTY = "annotation_property"
"""The key of an attribute's metadata with what its property says beside its name and type."""

NAME = re.compile(r"[a-z][a-zA-Z0-9_]*")
"""Names that properties may have."""


def as_attribute(values: NDArray[Any], said: dict[str, Any], taken: set[str]) -> tuple[str, Attribute]:
    """Return the name and values of a property; what it says beside its name and type is kept as metadata.

    Parameters
    ----------
    values : (N,) structured array
        With a field of its name.
    said : dict
        What the info says of it.
    taken : set of str
        Names that mean something else in the geometry; a property of such a name gets a ``_`` behind it, and its own back on writing.
    """
    name = str(said["id"])
    title = name
    while title in taken or (title != name and title in (values.dtype.names or ())):
        title += "_"
    rest = {key: value for key, value in said.items() if key != "id" or title != name}
    metadata: dict[str, Any] = {PROPERTY: rest} if len(rest) > 1 else {}
    column = values[name].astype(values[name].dtype.newbyteorder("="))
    if said["type"] in COLOURS:
        return title, Attribute(column, ("red", "green", "blue", "alpha")[: COLOURS[said["type"]]], metadata=metadata)
    labels, codes = said.get("enum_labels"), said.get("enum_values")
    if not labels or not codes or len(labels) != len(codes) or not np.isin(column, codes).all():
        return title, Attribute(column, metadata=metadata)
    order = np.argsort(codes, kind="stable")
    found = order[np.searchsorted(np.array(codes)[order], column)]
    metadata |= {
        "encoding": "dictionary",
        "categories": [str(label) for label in labels],
        "ordered": False,
        "_FillValue": -1,
    }
    return title, Attribute(found.astype(np.int32), metadata=metadata)


def written(attributes: Attributes) -> Iterator[tuple[str, Attribute]]:
    """Yield the attributes that the format holds; texts as codes."""
    for name, attribute in attributes.items():
        made = attribute
        if attribute.values.dtype.kind not in "iuf":
            made = encode_categories(attribute.values.astype(object))
        colour = made.values.dtype == np.uint8 and made.n_channels in COLOURS.values()
        if NAME.fullmatch(name) and (colour if made.values.ndim == 2 else stored_type(made)):
            yield name, made


def as_property(name: str, attribute: Attribute) -> tuple[dict[str, Any], NDArray[Any]]:
    """Return what the info says of one of the `written` attributes, and its values."""
    before = dict(attribute.metadata.get(PROPERTY, {}))
    name = str(before.pop("id", name))
    if attribute.values.ndim == 2:
        return {**before, "id": name, "type": "rgb" if attribute.n_channels == 3 else "rgba"}, attribute.values
    kind = str(before.get("type"))
    if "categories" not in attribute.metadata:
        stored = str(stored_type(attribute))
        rest = {key: value for key, value in before.items() if stored == kind or not key.startswith("enum_")}
        return {**rest, "id": name, "type": stored}, attribute.values.astype(stored)
    labels = [str(label) for label in attribute.metadata["categories"]]
    missing = [""] if any(value is None for value in decode_categories(attribute)) else []
    codes = before.get("enum_values", ())
    if not missing and kind in TYPES and before.get("enum_labels") == labels and len(codes) == len(labels):
        return {**before, "id": name}, np.array(codes)[attribute.values].astype(kind)
    rest = {key: value for key, value in before.items() if not key.startswith("enum_")}
    values = np.where(attribute.values < 0, len(labels), attribute.values).astype(np.int32)
    every = {"enum_values": [*range(len(labels) + len(missing))], "enum_labels": labels + missing}
    return {**rest, "id": name, "type": "int32", **every}, values
