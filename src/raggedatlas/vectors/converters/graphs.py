"""Graphs: GraphML (networkx), and edge lists with a table of their nodes beside them."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.converters.content import OBJECT_ID, Capabilities, Content, encode_categories, group_vertices
from raggedatlas.vectors.converters.tables import (
    axis_names,
    channel_losses,
    read_table,
    read_text,
    split_channels,
    write_table,
)
from raggedatlas.vectors.libraries import library
from raggedatlas.vectors.objects import AXES, NODE, build_networkx
from raggedatlas.vectors.shapes import Attribute, Shapes

GRAPHML_HOLDING = Capabilities(kinds=("graph", "skeleton"), object=())


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
    networkx = library("networkx")
    try:
        graph = networkx.read_graphml(path)
    except Exception as error:  # noqa: BLE001 - the library raises whatever a damaged file leads to
        raise SourceError(f"{path} is no GraphML that can be read: {type(error).__name__}: {error}.") from None
    return graph_content(graph, str(path))


def graph_content(graph: Any, what: str) -> Content:  # noqa: ANN401  (a networkx graph)
    """Return what a networkx graph draws; see `read_graphml`."""
    names = list(graph.nodes)
    rows = {name: row for row, name in enumerate(names)}
    nodes = [graph.nodes[name] for name in names]
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
    metadata = {"directed": True} if graph.is_directed() else {}
    return Content(_by_object(positions, links, columns, between, what), metadata)


def _node_names(names: list[Any]) -> Attribute:
    if all(isinstance(name, int) or (isinstance(name, str) and name.isdecimal()) for name in names):
        return Attribute(np.array([int(name) for name in names], np.int64))
    return encode_categories(np.array([str(name) for name in names], object))


def _columns(rows: Sequence[Mapping[str, Any]], names: list[str], what: str) -> dict[str, Attribute]:
    """Return values of nodes or edges as columns; every row must have all, texts may be missing."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    made = {}
    for key in keys:
        values = [row.get(key) for row in rows]
        if any(isinstance(value, str) for value in values):
            made[key] = encode_categories(np.array([None if v is None else str(v) for v in values], object))
            continue
        if None in values:
            raise SourceError(f"{what}: {names[values.index(None)]} has no value {key!r}, which others have.")
        made[key] = Attribute(np.array(values))
    return made


def _by_object(
    positions: NDArray[Any],
    links: NDArray[np.int64],
    columns: dict[str, Attribute],
    between: dict[str, Attribute],
    what: str,
) -> Shapes:
    owner = columns.pop(OBJECT_ID, None)
    if owner is None:
        return Shapes("graph", positions, links=links, vertex_attributes=columns, link_attributes=between)
    values = owner.values.astype(np.int64)
    if (values < 0).any() or not np.array_equal(values, owner.values):
        raise SourceError(f"{what}: {OBJECT_ID} of nodes goes to {values.min()}; expected whole numbers from 0.")
    place = np.empty(len(values), np.int64)
    place[np.argsort(values, kind="stable")] = np.arange(len(values))
    made = group_vertices("graph", positions, values, columns)
    return Shapes(
        "graph",
        made.positions,
        made.offsets,
        made.ids,
        place[links],
        vertex_attributes=made.vertex_attributes,
        link_attributes=between,
    )


def write_graphml(content: Content, path: Path) -> None:
    """Write a graph or skeletons as GraphML; edges of skeletons go from child to parent."""
    networkx = library("networkx")
    shapes = content.shapes
    directed = shapes.kind == "skeleton" or bool(content.metadata.get("directed"))
    graph = build_networkx(shapes, directed=directed, axes=axis_names(content))
    networkx.write_graphml(graph, path)


def read_edges(path: Path, *, nodes: str | None = None) -> Content:
    """Read an edge list: two nodes a line and perhaps values, with a table of the nodes beside it.

    Parameters
    ----------
    path : Path
        A ``.edgelist`` file. After the two nodes a line has nothing, or a dict as networkx writes it, or numbers named in a first line
        ``# source target weight``.
    nodes : str or None
        The table of nodes, with a column ``node`` (else the first one), positions and values; None: ``<name>.nodes.csv`` beside it.

    Raises
    ------
    SourceError
        If there is no such table, or a line names a node that it does not have.
    """
    table = Path(nodes) if nodes is not None else path.with_suffix(".nodes.csv")
    if not table.exists():
        raise SourceError(f"{path} says no positions; expected a table of its nodes, {table}. Name another: nodes=.")
    whole = read_table(table)
    columns = dict(whole.shapes.vertex_attributes)
    if NODE in columns:
        column = columns[NODE]
        codes = column.metadata.get("categories")
        names = [str(v if codes is None else codes[v]) for v in column.values.tolist()]
    else:
        names = [str(row) for row in range(whole.shapes.n_vertices)]
    rows = {name: row for row, name in enumerate(names)}
    if len(rows) != len(names):
        raise SourceError(f"{table} has a node twice; expected each once.")
    header: list[str] = []
    pairs: list[tuple[int, int]] = []
    values: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.startswith("#"):
            header = line[1:].split() if not pairs else header
            continue
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
    shapes = whole.shapes
    made = Shapes(
        "graph", shapes.positions, shapes.offsets, shapes.ids, links,
        vertex_attributes=shapes.vertex_attributes, link_attributes=between,
    )  # fmt: skip
    return Content(made, axes=whole.axes, left=whole.left)


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
    """Write the links as an edge list, and the vertices beside it as ``<name>.nodes.csv``."""
    shapes = content.shapes
    numbered = Attribute(np.arange(shapes.n_vertices))
    columns = {NODE: shapes.vertex_attributes.get(NODE, numbered), **shapes.vertex_attributes}
    names = list(_texts(columns[NODE]))
    if len({*names}) != len(names):
        columns[NODE], names = numbered, [str(row) for row in range(shapes.n_vertices)]
    nodes = Shapes("point_cloud", shapes.positions, shapes.offsets, shapes.ids, vertex_attributes=columns)
    write_table(Content(nodes, axes=content.axes), path.with_suffix(".nodes.csv"))
    between = dict(part for name, a in shapes.link_attributes.items() for part in split_channels(name, a))
    links = np.zeros((0, 2), np.int64) if shapes.links is None else shapes.links
    with path.open("w", encoding="utf-8") as file:
        file.write("# source target\n")
        for row, (a, b) in enumerate(links.tolist()):
            file.write(f"{names[a]} {names[b]} { ({name: _plain(column[row]) for name, column in between.items()}) }\n")


def _texts(attribute: Attribute) -> Iterable[str]:
    for value in next(column for _, column in split_channels("", attribute)).tolist():
        yield "_".join(str(value).split())


def _plain(value: Any) -> Any:  # noqa: ANN401
    return value.item() if isinstance(value, np.generic) else value


def graph_losses(shapes: Shapes) -> list[str]:
    """Say which attributes come back as several."""
    return list(channel_losses(shapes))
