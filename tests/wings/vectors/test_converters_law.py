"""The law of converters: what is read back, and what is told as lost, is what was written."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raggedatlas.wings.vectors.converters.content import decode_categories, encode_categories
from raggedatlas.wings.vectors.converters.convert import CONVERTERS, read_file, write_file
from raggedatlas.wings.vectors.shapes import SEQUENTIAL, Attribute, Groups, Shapes, sequence_links

NAMES = st.sampled_from(["cell#1", "cell#2", "7", "a b", " edge ", "", "Ä\n", "b\\", "usemtl x"])
COLUMNS = st.sampled_from(["q", "Q", "name", "x", "z", "object_id", "geometry", "radius", "color", "nx", "a b", "id"])
PARTS = ("ids", "names", "attributes", "groups", "links")


@st.composite
def written(draw: st.DrawFn, kind: str, parts: set[str], holds: tuple[int, ...]) -> Shapes:
    """Return objects, some of them empty, with vertices of none; and with some of the parts."""
    counts = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4]), min_size=1, max_size=3))
    dims, n = draw(st.sampled_from([d for d in holds if d < 4 and (d == 3 or kind != "mesh")])), sum(counts)
    total = n + draw(st.sampled_from([0, 1]))
    rows = range(total)
    values = st.integers(-4, 4).map(lambda value: value / 4)
    positions = np.array([draw(st.lists(values, min_size=dims, max_size=dims)) for _ in rows]).reshape(total, dims)
    width = 3 if kind == "mesh" else 2
    links = None
    if kind in ("mesh", "graph", "skeleton"):
        count = draw(st.integers(0, 4)) if "links" in parts and total else 0
        links = np.array([[draw(st.integers(0, total - 1)) for _ in range(width)] for _ in range(count)], int)
        links = links.reshape(-1, width)
    ids = draw(st.permutations([0, 5, 9, 2**33]))[: len(counts)] if "ids" in parts else None
    vertex, link, own = {}, {}, {}
    if "attributes" in parts:
        texts = np.array([draw(st.sampled_from(["A", "7", None])) for _ in rows], object)
        vertex = {
            draw(COLUMNS): Attribute(np.array([draw(st.sampled_from([1, 2, 2**40])) for _ in rows], np.int64)),
            "text": encode_categories(texts),
            draw(COLUMNS) + "2": Attribute(np.arange(3 * total, dtype=np.uint8).reshape(-1, 3)),
            "color": Attribute(np.arange(3 * total, dtype=np.uint8).reshape(-1, 3)),
        }
        own = {
            draw(COLUMNS): Attribute(np.arange(len(counts)) / 2),
            "pair": Attribute(np.arange(2 * len(counts)).reshape(-1, 2)),
        }
        link = {} if links is None else {"w": np.arange(len(links)) / 2}
    if "names" in parts:
        own["name"] = Attribute(np.array([draw(NAMES) for _ in counts], dtype=str))
    groups = Groups(np.array([0, 1]), np.array([5])) if "groups" in parts else None
    offsets = np.cumsum([0, *counts])
    return Shapes(
        kind, positions, offsets, None if ids is None else np.array(ids), links, None, vertex, link, own, groups=groups
    )


def objects(shapes: Shapes, named: dict[str, list[str]], told: str) -> Counter[Any]:
    """Return what is seen of each object, of attributes those that are named."""
    links = shapes.edges(3 if shapes.kind == "mesh" else 2)
    if shapes.kind in SEQUENTIAL:
        links = sequence_links(shapes)
    places = [tuple(row) for row in np.round(np.asarray(shapes.positions, float) + 0.0, 6).tolist()]
    columns = [decode_categories(shapes.vertex_attributes[name]).tolist() for name in named["vertex"] if places]
    between = [shapes.link_attributes[name].values.tolist() for name in named["link"] if len(links)]
    own = [shapes.object_attributes[name].values for name in named["object"] if shapes.n_objects]
    own = [[str(row) for row in values] if values.ndim == 2 else values.tolist() for values in own]
    ids = None if "their ids" in told else shapes.ids
    seen: Counter[Any] = Counter()
    for row in range(shapes.n_objects):
        inside = range(shapes.offsets[row], shapes.offsets[row + 1])
        inner = [k for k, ends in enumerate(links.tolist()) if all(end in inside for end in ends)]
        drawn = Counter(str(([places[end] for end in links[k]], [column[k] for column in between])) for k in inner)
        vertices = Counter(str((places[k], [column[k] for column in columns])) for k in inside)
        if re.search("of no link|at one place", told):
            vertices = Counter({str((places[end], [c[end] for c in columns])) for k in inner for end in links[k]})
        parts = (
            frozenset(vertices.items()),
            frozenset() if re.search(r"links: (a|\d+ are) ", told) else frozenset(drawn.items()),
        )
        seen[ids if ids is None else int(ids[row]), *parts, *(column[row] for column in own)] += 1
    return seen


def outlines(shapes: Shapes) -> Shapes:
    """Return triangles, each object a closed one at places of its own, with what the objects of other lines have."""
    n = shapes.n_objects
    corners = np.array([[0, 0], [1, 0], [0, 1], [0, 0]]) / 2
    places = np.concatenate([corners + np.array([3 * row, 0]) for row in range(n)])
    return Shapes(
        "polyline",
        places,
        np.arange(n + 1) * 4,
        shapes.ids,
        object_attributes=shapes.object_attributes,
        groups=shapes.groups,
    )


@pytest.mark.parametrize("name", [*CONVERTERS])
@settings(max_examples=15)
@given(data=st.data(), parts=st.sets(st.sampled_from(PARTS)))
def test_nothing_is_lost_in_silence(name: str, data: st.DataObject, parts: set[str], tmp_path_factory: Any) -> None:
    """Any part of any kind comes back with its object, or is named among the losses."""
    converter = CONVERTERS[name]
    shapes = data.draw(written(data.draw(st.sampled_from(converter.holding.kinds)), parts, converter.holding.dims))
    if name == "spatialdata" and shapes.kind != "point_cloud":
        shapes = outlines(shapes)  # circles and polygons alone are held
    file = tmp_path_factory.mktemp("law") / f"a{[*converter.endings, '.zarr'][0]}"
    losses = write_file(shapes, file, format=name)
    told = "\n".join(losses)
    back = read_file(file, format=name).shapes
    lost = {match[0] for match in re.finditer(r"(?:vertex|link|object) attribute '[^\n]*?'(?= )", told)}
    named = {
        family: [n for n in getattr(shapes, f"{family}_attributes") if f"{family} attribute {n!r}" not in lost]
        for family in ("vertex", "link", "object")
    }
    assert back.kind == shapes.kind or "links: " in told or not back.n_objects
    if "joined" in told:
        if not shapes.n_links:
            assert not back.n_objects
            return
        everything = {"offsets": np.array([0, shapes.n_vertices]), "ids": np.zeros(1, int), "link_offsets": None}
        shapes = replace(shapes, **everything, object_attributes={})
    before, after = objects(shapes, named, told), objects(back, named, told)
    left = re.search(r"objects: (\d+) with nothing", told)
    assert after <= before, losses
    assert (before - after).total() == (int(left[1]) if left else 0), losses
    assert not any(vertices and links for _, vertices, links, *_ in before - after)
    assert ("groups" in told) == (shapes.groups is not None)
    assert ("between objects" in told) <= ("links" in parts)
