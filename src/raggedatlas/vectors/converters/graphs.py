"""Graphs and neurons: GraphML (networkx), edge lists with a table of their nodes, and SWC."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import (
    OBJECT_ID,
    Capabilities,
    Content,
    axis_names,
    encode_categories,
    group_vertices,
    is_id,
    number_rows,
    read_errors,
    read_table,
    read_text,
    shortest,
    split_channels,
    write_table,
)
from raggedatlas.vectors.converters.interop import AXES, NODE, build_networkx
from raggedatlas.vectors.libraries import load_library
from raggedatlas.vectors.shapes import Attribute, Shapes, counts_to_offsets, each_object

GRAPHML_HOLDING = Capabilities(kinds=("graph", "skeleton"), object=(), columns=True)


def read_graphml(path: Path) -> Content:
    """Read a GraphML file whose nodes have positions ``x``, ``y`` (``z``).

    Parameters
    ----------
    path : Path
        A ``.graphml`` file.

    Returns
    -------
    Content
        Names of nodes become the vertex attribute ``node``; other values of nodes and edges become attributes. A value ``object_id``
        of nodes puts them into objects.

    Raises
    ------
    SourceError
        If the file cannot be read, or a node has no position or not the values that others have.
    MissingExtraError
        Without networkx.
    """
    networkx = load_library("networkx")
    with read_errors(path, "GraphML"):
        graph = networkx.read_graphml(path)
    return graph_content(graph, str(path))


def graph_content(graph: Any, what: str) -> Content:  # noqa: ANN401  (a networkx graph)
    """Return the content of a networkx graph; see `read_graphml`."""
    names = list(graph.nodes)
    rows = {name: row for row, name in enumerate(names)}
    nodes = [graph.nodes[name] for name in names]
    # The first node decides which axes there are; `_columns` refuses nodes that lack one of them.
    axes = [axis for axis in AXES if nodes and axis in nodes[0]]
    if nodes and len(axes) < 2:
        raise SourceError(f"{what}: node {names[0]!r} has no x and y; every node needs a position.")
    columns = _columns(nodes, [f"node {name!r}" for name in names], what)
    missing = [axis for axis in axes if axis not in columns or columns[axis].values.dtype.kind not in "iuf"]
    if missing:
        raise SourceError(f"{what}: the value {missing[0]!r} of nodes is no number in all of them.")
    positions = np.stack([columns.pop(axis).values for axis in axes], 1) if axes else np.zeros((0, 3))
    edges = list(graph.edges(data=True))
    links = np.array([(rows[a], rows[b]) for a, b, _ in edges], np.int64).reshape(-1, 2)
    between = _columns([data for _, _, data in edges], [f"edge {a!r} to {b!r}" for a, b, _ in edges], what)
    if NODE not in columns and names != [str(k) for k in range(len(names))] and names != list(range(len(names))):
        columns[NODE] = _node_names(names)
    owner = columns.pop(OBJECT_ID, None)
    shapes = Shapes("graph", positions, links=links, vertex_attributes=columns, link_attributes=between)
    if owner is not None:
        shapes = group_vertices(shapes, owner.values, what)
    return Content(shapes, {"directed": True} if graph.is_directed() else {})


def _node_names(names: list[Any]) -> Attribute:
    if all(is_id(str(name)) for name in names):
        return Attribute(np.array([int(name) for name in names], np.int64))
    return encode_categories(np.array([str(name) for name in names], object))


def _columns(rows: Sequence[Mapping[str, Any]], names: list[str], what: str) -> dict[str, Attribute]:
    """Return values of nodes or edges as columns; every row must have all, texts may be missing."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    result = {}
    for key in keys:
        values = [row.get(key) for row in rows]
        if any(isinstance(value, str) for value in values):
            result[key] = encode_categories(np.array([None if v is None else str(v) for v in values], object))
            continue
        if None in values:
            raise SourceError(f"{what}: {names[values.index(None)]} has no value {key!r}, which others have.")
        result[key] = Attribute(np.array(values))
    return result


def write_graphml(content: Content, path: Path) -> None:
    """Write a graph or skeletons as GraphML; edges of skeletons go from child to parent."""
    networkx = load_library("networkx")
    shapes = content.shapes
    directed = shapes.kind == "skeleton" or bool(content.metadata.get("directed"))
    graph = build_networkx(shapes, directed=directed, axes=axis_names(content))
    networkx.write_graphml(graph, path)


def read_edges(path: Path, *, nodes: str | None = None) -> Content:
    """Read an edge list: two nodes per line, optionally with values, and a table of the nodes.

    Parameters
    ----------
    path : Path
        A ``.edgelist`` file. After the two nodes a line has nothing, or a dict as networkx writes it, or numbers named in a first line
        ``# source target weight``.
    nodes : str or None
        The table of nodes, with positions, values and a column ``node`` of names, in which lines have ``_`` for spaces; without that column
        nodes are named 0, 1, ... by row. None: ``<name>.nodes.csv`` next to it.

    Raises
    ------
    SourceError
        If there is no such table, or a line names a node that it does not have.
    """
    table = Path(nodes) if nodes is not None else path.with_suffix(".nodes.csv")
    if not table.exists():
        raise SourceError(f"{path} says no positions; expected a table of its nodes, {table}. Name another: nodes=.")
    points = read_table(table)
    columns = dict(points.shapes.vertex_attributes)
    names = list(_texts(columns[NODE] if NODE in columns else Attribute(np.arange(points.shapes.n_vertices))))
    rows = {name: row for row, name in enumerate(names) if name}
    if len(rows) != sum(map(bool, names)):
        raise SourceError(f"{table} has a node twice; expected each once, also with _ for spaces.")
    header: list[str] = []
    pairs: list[tuple[int, int]] = []
    values: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.startswith("#"):
            # The last comment before the first edge names the columns; later ones are only comments.
            header = line[1:].split() if not pairs else header
            continue
        # What follows the two nodes stays one text, as a dict contains spaces.
        words = line.split(maxsplit=2)
        if not words:
            continue
        missing = [word for word in words[:2] if word not in rows]
        if missing or len(words) < 2:
            raise SourceError(
                f"{path}, line {number} names {missing[0] if missing else 'one node'!r}; {table} has no such node."
            )
        pairs.append((rows[words[0]], rows[words[1]]))
        values.append(_edge_values(words[2:], header, f"{path}, line {number}"))
    between = _columns(values, [f"edge {k}" for k in range(len(values))], str(path))
    links = np.array(pairs, np.int64).reshape(-1, 2)
    shapes = replace(points.shapes, kind="graph", links=links, link_attributes=between)
    return replace(points, shapes=shapes)


def _edge_values(words: list[str], header: list[str], where: str) -> dict[str, Any]:
    if not words:
        return {}
    try:
        if words[0].startswith("{"):
            return dict(ast.literal_eval(words[0]))
        numbers = [float(word) for word in words[0].split()]
        names = header[2:] if len(header) == len(numbers) + 2 else [f"value_{k}" for k in range(len(numbers))]
        return dict(zip(names, numbers, strict=True))
    except (ValueError, SyntaxError):
        raise SourceError(f"{where} has {words[0][:60]!r} after its nodes; expected a dict or numbers.") from None


def write_edges(content: Content, path: Path) -> None:
    """Write the links as an edge list, and the vertices as ``<name>.nodes.csv``."""
    shapes = content.shapes
    columns, names = dict(shapes.vertex_attributes), _edge_names(shapes)
    if names is None:
        columns[NODE] = Attribute(np.arange(shapes.n_vertices))
        names = [str(row) for row in range(shapes.n_vertices)]
    nodes = Shapes("point_cloud", shapes.positions, shapes.offsets, shapes.ids, vertex_attributes=columns)
    write_table(Content(nodes, axes=content.axes), path.with_suffix(".nodes.csv"))
    between = dict(part for name, a in shapes.link_attributes.items() for part in split_channels(name, a))
    links = shapes.edges()
    with path.open("w", encoding="utf-8") as file:
        file.write("# source target\n")
        for row, (a, b) in enumerate(links.tolist()):
            file.write(f"{names[a]} {names[b]} { ({name: _plain(column[row]) for name, column in between.items()}) }\n")


def _texts(attribute: Attribute) -> Iterable[str]:
    """Yield values as words, empty where there is none."""
    for value in next(column for _, column in split_channels("", attribute)).tolist():
        yield "" if value is None else "_".join(str(value).split())


def _edge_names(shapes: Shapes) -> list[str] | None:
    """Return the words by which lines name the vertices; None if they have none, or not one each that no comment begins with."""
    names = list(_texts(shapes.vertex_attributes[NODE])) if NODE in shapes.vertex_attributes else []
    words = len({*names}) == len(names) and all(name and name[0] != "#" for name in names)
    return names if names and words and _as_read(names) == names else None


def _as_read(names: list[str]) -> list[str]:
    """Return words as they come back from a table, in which a column of numbers alone is one of numbers."""
    for kind in (np.int64, np.float64):
        try:
            return [str(number) for number in np.array(names, dtype=str).astype(kind).tolist()]
        except (ValueError, OverflowError):
            continue
    return names


def _plain(value: Any) -> Any:  # noqa: ANN401
    return value.item() if isinstance(value, np.generic) else value


def edge_losses(shapes: Shapes) -> Iterator[str]:
    """Yield whether names are left out, which are not one word each."""
    if shapes.n_vertices and NODE in shapes.vertex_attributes and _edge_names(shapes) is None:
        yield f"vertex attribute {NODE!r} is left out: it is not another word for each vertex; they are numbered from 0"


COLUMNS = 7
"""Sample, type, x, y, z, radius, parent."""

TYPE, RADIUS, SAMPLE = "swc_type", "radius", "swc_id"

SWC_HOLDING = Capabilities(
    kinds=("skeleton",), dims=(3,), objects="one", vertex=(TYPE, RADIUS, SAMPLE), link=(), object=("header", "name")
)
SWC_FOLDER_HOLDING = Capabilities(
    kinds=("skeleton",), dims=(3,), vertex=(TYPE, RADIUS, SAMPLE), link=(), object=("header", "name")
)


def read_swc(path: Path) -> Content:
    """Read one SWC file, or a folder of them: each becomes a skeleton.

    Parameters
    ----------
    path : Path
        A ``.swc`` file, or a folder with such files.

    Returns
    -------
    Content
        Vertex attributes ``swc_type``, ``radius`` and ``swc_id`` (the sample's number); object attributes ``name`` (of the file) and
        ``header`` (its comments). Ids are the names where all are numbers, else 0, 1, ... by name.

    Raises
    ------
    SourceError
        If a line is not a sample, a number occurs twice, a parent is missing, or parents form a circle; with file and line.
    """
    files = sorted(path.glob("*.swc")) if path.is_dir() else [path]
    if not files:
        raise SourceError(f"{path} holds no .swc files.")
    trees = [_read_tree(file) for file in files]
    offsets = counts_to_offsets(np.array([len(tree[0]) for tree in trees]))
    names = [file.stem for file in files]
    # Distinct as numbers too: `7.swc` and `07.swc` would have one id.
    numbers = all(name.isdecimal() and int(name) < 2**63 for name in names) and len({*map(int, names)}) == len(names)
    links = [np.stack([child, parent], 1) + start for (_, child, parent, _), start in zip(trees, offsets, strict=False)]
    values = np.concatenate([tree[0] for tree in trees])
    objects = {"name": Attribute(np.array(names, dtype=str))}
    if any(tree[3] for tree in trees):
        objects["header"] = Attribute(np.array([tree[3] for tree in trees], dtype=str))
    shapes = Shapes(
        "skeleton",
        values[:, 2:5],
        offsets,
        np.array([int(name) for name in names], np.int64) if numbers else np.arange(len(names)),
        np.concatenate(links),
        counts_to_offsets(np.array([len(part) for part in links])),
        {
            TYPE: Attribute(values[:, 1].astype(np.int32)),
            RADIUS: Attribute(values[:, 5]),
            SAMPLE: Attribute(values[:, 0].astype(np.int64)),
        },
        object_attributes=objects,
    )
    return Content(shapes)


def write_swc(content: Content, path: Path) -> None:
    """Write all skeletons as one SWC file; see `swc_text`."""
    path.write_text(swc_text(content.shapes), encoding="utf-8")


def write_swc_folder(content: Content, path: Path) -> None:
    """Write a folder with an SWC file for each skeleton, named by its name, else by its id."""
    shapes = content.shapes
    names = [str(number) for number in np.asarray(shapes.ids)]
    if "name" in shapes.object_attributes:
        given = [str(name) for name in shapes.object_attributes["name"].values]
        if len({*given}) == len(given) and all(name and not set(name) & set('/\\:*?"<>|') for name in given):
            names = given
    path.mkdir()
    for name, (_, one) in zip(names, each_object(shapes), strict=True):
        (path / f"{name}.swc").write_text(swc_text(one), encoding="utf-8")


def swc_text(shapes: Shapes) -> str:
    """Return skeletons as the text of an SWC file, every parent before its children.

    Samples are in the order of the vertices, else by ``swc_id``, else by their distance from the root: the first of these orders that puts
    parents first. Their numbers are ``swc_id`` if these are unique, else 1, 2, ...; types default to 0, radii to 1.
    """
    parent = _parents(shapes)
    depths, circle = _depths(parent)
    if circle >= 0:
        raise SourceError(f"Vertex {circle} is its own ancestor; expected trees.")
    numbers = np.zeros(0, np.int64)
    if SAMPLE in shapes.vertex_attributes:
        numbers = shapes.vertex_attributes[SAMPLE].values.astype(np.int64)
    named = len(np.unique(numbers)) == len(parent) and bool((numbers >= 0).all())
    orders = [np.arange(len(parent)), *([np.argsort(numbers)] if named else []), np.argsort(depths, kind="stable")]
    order = next(order for order in orders if _parents_first(parent, order))
    if not named:
        numbers = np.empty(len(parent), np.int64)
        numbers[order] = np.arange(1, len(parent) + 1)
    types = shapes.vertex_attributes[TYPE].values if TYPE in shapes.vertex_attributes else np.zeros(len(parent), int)
    radii = shapes.vertex_attributes[RADIUS].values if RADIUS in shapes.vertex_attributes else np.ones(len(parent))
    parents = np.where(parent >= 0, numbers[parent], -1)
    columns = [shortest(column).tolist() for column in (*shapes.positions.T, radii)]
    lines = [f"# {line}" for line in _header(shapes).splitlines()]
    lines += [
        f"{numbers[i]} {types[i]} {columns[0][i]!r} {columns[1][i]!r} {columns[2][i]!r} {columns[3][i]!r} {parents[i]}"
        for i in order
    ]
    return "\n".join([*lines, ""])


def _parents_first(parent: NDArray[np.int64], order: NDArray[np.int64]) -> bool:
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    child = np.flatnonzero(parent >= 0)
    return bool((place[parent[child]] < place[child]).all())


def _header(shapes: Shapes) -> str:
    if "header" not in shapes.object_attributes:
        return ""
    return "\n".join(str(text) for text in shapes.object_attributes["header"].values if str(text))


def _parents(shapes: Shapes) -> NDArray[np.int64]:
    """Return each vertex's parent, -1 for roots, after checking that links make trees."""
    links = shapes.edges()
    parent = np.full(shapes.n_vertices, -1, np.int64)
    parent[links[:, 0]] = links[:, 1]
    if len(np.unique(links[:, 0])) != len(links):
        children, counts = np.unique(links[:, 0], return_counts=True)
        raise SourceError(f"Vertex {children[counts.argmax()]} has {counts.max()} parents; SWC holds trees only.")
    return parent


def _depths(parent: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return how many ancestors each vertex has, by doubling, and the first vertex that is its own ancestor, or -1."""
    depths, above = (parent >= 0).astype(np.int64), parent.copy()
    # After k rounds `above` is the ancestor 2**k steps up; only vertices on or below a circle keep one.
    for _ in range(len(parent).bit_length() + 1):
        has = np.flatnonzero(above >= 0)
        depths[has] += depths[above[has]]
        above[has] = above[above[has]]
    # That many steps up from anywhere lead into the circle; what only descends from it is no own ancestor.
    return depths, int(above[above >= 0].min(initial=len(parent))) if (above >= 0).any() else -1


def _read_tree(path: Path) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64], str]:
    """Return samples (n, 7), children and parents as rows, and the comments."""
    lines = read_text(path).splitlines()
    comments = [line.strip()[1:].strip() for line in lines if line.strip().startswith("#")]
    rows = [(n, line.split("#")[0].split()) for n, line in enumerate(lines, 1)]
    rows = [(n, row) for n, row in rows if row]
    if not rows:
        raise SourceError(f"{path} holds no samples.")
    for line, row in rows:
        if len(row) < COLUMNS:
            raise SourceError(
                f"{path}, line {line} has {len(row)} values; expected sample, type, x, y, z, radius, parent."
            )
    values = number_rows([(line, row[:COLUMNS]) for line, row in rows], path)
    numbers, parents = _whole(values[:, 0], rows, path), _whole(values[:, 6], rows, path)
    _whole(values[:, 1], rows, path)
    order = np.argsort(numbers, kind="stable")
    twice = np.flatnonzero(np.diff(numbers[order]) == 0)
    if len(twice):
        at = int(order[twice[0] + 1])
        raise SourceError(f"{path}, line {rows[at][0]} has the sample {numbers[at]} again.")
    # Any negative parent marks a root.
    child = np.flatnonzero(parents >= 0)
    # A parent above all samples would be out of range; clipped, it fails the comparison below.
    place = np.minimum(np.searchsorted(numbers[order], parents[child]), len(order) - 1)
    parent_rows = order[place]
    missing = np.flatnonzero(numbers[parent_rows] != parents[child])
    if len(missing):
        at = int(child[missing[0]])
        raise SourceError(
            f"{path}, line {rows[at][0]}: sample {numbers[at]} has the parent {parents[at]}, which is not there. "
            "A root has the parent -1."
        )
    above = np.full(len(rows), -1, np.int64)
    above[child] = parent_rows
    circle = _depths(above)[1]
    if circle >= 0:
        line, row = rows[circle]
        raise SourceError(f"{path}, line {line}: sample {row[0]} is its own ancestor; expected trees.")
    return values, child, parent_rows, "\n".join(comments)


def _whole(column: NDArray[np.float64], rows: list[tuple[int, list[str]]], path: Path) -> NDArray[Any]:
    broken = np.flatnonzero(column != np.rint(column))
    if len(broken):
        line = rows[int(broken[0])][0]
        raise SourceError(f"{path}, line {line} has {column[broken[0]]}; samples, types and parents are whole numbers.")
    return column.astype(np.int64)
