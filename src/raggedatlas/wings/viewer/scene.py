"""What a viewer shows: points with ids, in the plane, joined by id with metadata and genes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.errors import FeatureError, NotFoundError, QueryError
from raggedatlas.model.arguments import check_seed
from raggedatlas.wings.viewer.columns import PointColumn, as_table, read_column
from raggedatlas.wings.viewer.palette import read_colors

if TYPE_CHECKING:
    import pandas as pd

MOST_POINTS = 2_000_000
"""More points than this are sampled unless a caller says otherwise: a browser stays fluid below."""

SPACE = 3
"""Most dimensions of an embedding that are projected onto a plane."""


class GeneValues(Protocol):
    """Values of genes, read when they are asked for."""

    def find(self, text: str, most: int) -> list[tuple[str, str]]:
        """Find genes by part of a name: return at most this many pairs of a name and a note."""

    def values(self, names: Sequence[str]) -> tuple[pa.Array, NDArray[Any]]:
        """Return ids and the values of genes, (n_ids, n_names); NaN, or an id that is not there, was not measured.

        Raises `FeatureError` if there is no such gene.
        """


@dataclass(frozen=True)
class GivenGenes:
    """Genes whose values a caller has at hand.

    Examples
    --------
    >>> GivenGenes(pa.array(["a"]), {"CD3D": np.array([2])}).find("cd", 5)
    [('CD3D', '')]
    """

    ids: pa.Array  # (n,) strings: the cells
    table: Mapping[str, NDArray[Any]]  # gene -> its values, (n,), in the order of `ids`

    def find(self, text: str, most: int) -> list[tuple[str, str]]:
        """Find genes by part of their name."""
        return [(name, "") for name in self.table if text.lower() in name.lower()][:most]

    def values(self, names: Sequence[str]) -> tuple[pa.Array, NDArray[Any]]:
        """Return the values of genes."""
        absent = next((name for name in names if name not in self.table), None)
        if absent is not None:
            raise FeatureError(f"There are no values of {absent!r}; there are those of {list(self.table)[:20]}.")
        return self.ids, np.stack([self.table[name] for name in names], axis=1)


@dataclass(frozen=True)
class Look:
    """How a scene is made and first shown.

    Parameters
    ----------
    title : str
        Above the legend.
    subtitle : str
        Beside the number of cells.
    color : str or None
        The column or gene that it is first coloured by; None takes the first column of categories.
    colors : mapping of str to mapping of str to str
        Column -> category -> ``#rrggbb``.
    columns : sequence of str, or None
        Columns to take along; None takes all.
    max_points : int
        More are sampled.
    seed : int
        Another seed samples other points, and draws them in another order.
    theme : {"light", "dark"} or None
        None follows the reader's system.
    axes : (int, int) or None
        Which two columns of the coordinates; None takes the two of the plane, and the plane of most variance in space.
    address : str
        Where a folder for Vitessce will be served; Vitessce opens no address without a host.
    """

    title: str = "Cells"
    subtitle: str = ""
    color: str | None = None
    colors: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    columns: Sequence[str] | None = None
    max_points: int = MOST_POINTS
    seed: int = 0
    theme: str | None = None
    axes: tuple[int, int] | None = None
    address: str = "http://localhost:8000"


@dataclass(frozen=True)
class Scene:
    """Points with ids in the order in which they are drawn, and what is known of them."""

    ids: pa.Array  # (n,) strings: one per point, each once
    coordinates: NDArray[np.float32]  # (n, 2), finite
    columns: tuple[PointColumn, ...]  # metadata in the order of the points
    genes: GeneValues | None
    look: Look
    n_total: int  # number of points before sampling
    notes: tuple[str, ...] = ()  # what a reader should know: cells left out, columns that cannot be shown
    # a `KnownCells` or None: cells of an atlas or a file that the points are, from which embeddings are read
    origin: Any = None

    @cached_property
    def key(self) -> str:
        """Hash of ids and places, by which a page and its server, or a link, know that they mean the same points."""
        digest = sha256(self.coordinates.tobytes())
        for buffer in self.ids.buffers()[1:]:
            digest.update(buffer or b"")
        return digest.hexdigest()[:16]

    @property
    def n(self) -> int:
        """Number of points."""
        return len(self.ids)

    def column(self, name: str) -> PointColumn:
        """Find a column."""
        for column in self.columns:
            if column.name == name:
                return column
        raise NotFoundError(f"There is no column {name!r}; there are {[column.name for column in self.columns]}.")

    def gene(self, name: str) -> NDArray[np.float32]:
        """Read a gene for every point, NaN where it was not measured."""
        return self.read_genes([name])[name]

    def read_genes(self, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Read genes, as `gene` does each, at once; raise `FeatureError` if one is unknown."""
        names = list(dict.fromkeys(names))
        if not names:
            return {}
        if self.genes is None:
            raise FeatureError(f"There are no genes to show, so not {names[0]!r}; name an atlas to read them of.")
        ids, values = self.genes.values(names)
        rows = match_ids(self.ids, ids)
        found = np.full((len(names), self.n), np.nan, np.float32)
        found[:, rows >= 0] = np.asarray(values, np.float32)[rows[rows >= 0]].T
        return dict(zip(names, found, strict=True))

    def colored_by(self) -> str | None:
        """Return the column or gene that comes first."""
        if self.look.color is not None:
            return self.look.color
        several = [c.name for c in self.columns if c.kind == "category" and len(c.values.dictionary) > 1]
        others = [c.name for c in self.columns if c.kind != "text"]
        return next(iter([*several, *others]), None)

    def with_notes(self, *notes: str) -> "Scene":
        """Add what a reader should know."""
        return replace(self, notes=(*self.notes, *notes))


def make_scene(
    ids: Any,  # noqa: ANN401  (any sequence of ids)
    coordinates: Any,  # noqa: ANN401  (anything that NumPy reads)
    obs: "pa.Table | pd.DataFrame | None" = None,
    *,
    genes: GeneValues | Mapping[str, NDArray[Any]] | None = None,
    look: Look | None = None,
    id_column: str = "uid",
) -> Scene:
    """Join points with metadata and genes by id, never by position.

    Parameters
    ----------
    ids : (n,) sequence of str
        One per point.
    coordinates : (n, d) float
        d of 2, or 3, which are projected onto the plane of most variance; more need ``look.axes``.
    obs : pyarrow.Table, pandas.DataFrame or None
        Metadata of the same or other cells in any order, with the ids in `id_column` or in the frame's index.
    genes : GeneValues, mapping of str to (n,) array, or None
        Values of genes; a mapping has them in the order of `ids`.
    look : Look or None
        Title, colours, sampling.
    id_column : str
        Where a table of metadata has the ids.

    Returns
    -------
    Scene
        In an order drawn by chance from the seed, so that no dataset covers another.

    Raises
    ------
    QueryError
        For ids that are missing or there twice, shapes that do not fit, or colours that are none.
    NotFoundError
        If the first colour is neither a column nor a gene.

    Examples
    --------
    >>> scene = make_scene(["a", "b"], [[0, 1], [2, 3]], pa.table({"uid": ["b", "a"], "donor": ["d2", "d1"]}))
    >>> dict(zip(scene.ids.to_pylist(), scene.column("donor").values.to_pylist()))["a"]
    'd1'
    """
    look = look or Look()
    named = _read_ids(ids, "the points")
    places = project(coordinates, look.axes)
    if len(named) != len(places):
        raise QueryError(f"There are {len(named):,} ids and {len(places):,} points; each point has one id.")
    # Sampling comes before the join, so that metadata are taken only of the points that are shown.
    check_seed(look.seed)
    if look.max_points < 1:
        raise QueryError(f"max_points={look.max_points}; show at least one.")
    rows = np.flatnonzero(np.isfinite(places).all(axis=1))
    notes: tuple[str, ...] = ()
    if len(rows) < len(places):
        notes = (f"{len(places) - len(rows):,} cells have no place in the map and are left out.",)
    # The first entries of a permutation are a uniform sample, and its order is the order of drawing.
    rows = np.random.default_rng(look.seed).permutation(rows)[: look.max_points]
    scene = Scene(
        named.take(pa.array(rows)),
        places[rows],
        (),
        # Values of a mapping are in the order of all given ids, not of the chosen ones.
        GivenGenes(named, genes) if isinstance(genes, Mapping) else genes,
        look,
        len(places),
        notes,
    )
    if obs is not None:
        scene = _describe(scene, as_table(obs, id_column), id_column)
    color = look.color
    offered = [column.name for column in scene.columns if column.kind != "text"]
    if color is not None and color not in offered:
        if scene.genes is None:
            raise NotFoundError(f"color={color!r} is no column that can be coloured by; there are {offered}.")
        # Read only to raise for an unknown gene here instead of in the browser.
        scene.gene(color)
    return scene


def match_ids(wanted: pa.Array, among: pa.Array) -> NDArray[np.int64]:
    """Find each wanted id, (n,), among others, (m,), by a hash join: its position, -1 where it is not there.

    Examples
    --------
    >>> match_ids(pa.array(["b", "x"]), pa.array(["a", "b"]))
    array([ 1, -1])
    """
    found = pc.index_in(wanted.cast(pa.large_string()), value_set=among.cast(pa.large_string()))
    rows: NDArray[np.int64] = found.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return rows


def project(coordinates: Any, axes: tuple[int, int] | None = None) -> NDArray[np.float32]:  # noqa: ANN401
    """Return coordinates, (n, d), in the plane, (n, 2).

    `axes` are two columns. Without, d of 2 is taken as it is, and d of 3 is projected onto the plane of most variance,
    whose axes point to where their largest weight is positive; other shapes raise `QueryError`.

    Examples
    --------
    >>> project([[0, 0, 5], [0, 4, 5], [0, 8, 5]]).tolist()
    [[-4.0, 0.0], [0.0, 0.0], [4.0, 0.0]]
    """
    values = np.asarray(coordinates)
    if values.ndim != 2 or values.shape[1] < 2 or not np.issubdtype(values.dtype, np.number):
        raise QueryError(f"Coordinates have shape {values.shape} and dtype {values.dtype}; expected numbers (n, 2).")
    if axes is not None:
        if not all(0 <= axis < values.shape[1] for axis in axes):
            raise QueryError(f"axes={axes} are not two of the {values.shape[1]} columns of the coordinates.")
        return np.ascontiguousarray(values[:, list(axes)], np.float32)
    if values.shape[1] == 2:
        return np.ascontiguousarray(values, np.float32)
    if values.shape[1] > SPACE:
        raise QueryError(
            f"The embedding has {values.shape[1]} dimensions; make a map of it first with the verbs umap or pca, or name two "
            "of them with axes=(0, 1)."
        )
    values = values.astype(np.float64)
    finite = np.isfinite(values).all(axis=1)
    if not finite.any():
        return np.full((len(values), 2), np.nan, np.float32)
    # Rows with NaN stay, so that places remain aligned with ids; `make_scene` leaves them out.
    centred = values - values[finite].mean(axis=0)
    _, vectors = np.linalg.eigh(centred[finite].T @ centred[finite])
    plane = vectors[:, ::-1][:, :2]
    # The sign of an eigenvector is arbitrary, and another library could mirror the map.
    plane = plane * np.sign(plane[np.abs(plane).argmax(axis=0), [0, 1]])
    return np.asarray(centred @ plane, np.float32)


def _read_ids(ids: Any, whose: str) -> pa.Array:  # noqa: ANN401
    if isinstance(ids, pa.ChunkedArray):
        ids = ids.combine_chunks()
    array = ids if isinstance(ids, pa.Array) else pa.array([None if i is None else str(i) for i in ids], pa.string())
    array = array.cast(pa.string())
    if array.null_count:
        raise QueryError(f"{array.null_count:,} of the ids of {whose} are missing; each needs one, to be joined by.")
    if pc.count_distinct(array).as_py() != len(array):
        counts = pc.value_counts(array)
        twice = counts.filter(pc.greater(counts.field("counts"), 1))
        raise QueryError(
            f"The id {twice[0]['values'].as_py()!r} occurs {twice[0]['counts'].as_py()} times among {whose}, and "
            f"{len(twice):,} ids more than once; each must occur once, so keep one row of each."
        )
    return array


def _describe(scene: Scene, table: pa.Table, id_column: str) -> Scene:
    """Add metadata to the points that it belongs to."""
    found = _read_ids(table.column(id_column), "the metadata")
    rows = match_ids(scene.ids, found)
    unknown = int((rows < 0).sum())
    notes = [f"{unknown:,} of {scene.n:,} cells have no metadata."] if unknown else []
    wanted = scene.look.columns
    if wanted is not None and (absent := [name for name in wanted if name not in table.column_names]):
        raise NotFoundError(f"The metadata have no columns {absent}; they have {table.column_names[:40]}.")
    # `take` gives null for a null index, so cells without metadata have missing values.
    at = pa.array(rows, mask=rows < 0)
    colors = read_colors(scene.look.colors)
    columns, unshown = [], []
    for name in table.column_names if wanted is None else wanted:
        if name == id_column:
            continue
        kept = table.column(name)
        column = read_column(name, kept.combine_chunks().take(at), colors.get(name))
        if column is None:
            unshown.append(name)
        elif column.values.null_count < len(column.values) or not len(column.values):
            columns.append(column)
    if unshown:
        notes.append(f"Not shown, being neither numbers nor texts: {', '.join(unshown)}.")
    return replace(scene, columns=tuple(columns)).with_notes(*notes)
