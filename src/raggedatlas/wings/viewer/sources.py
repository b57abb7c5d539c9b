"""Where a scene comes from: results joined with cells by id, or an embedding that the cells have; cells of an atlas or of a file."""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.atlas import AtlasView, RaggedAtlas, find_query
from raggedatlas.catalog.assets import find_kind, group_by_dataset, read_records
from raggedatlas.catalog.catalog import is_atlas
from raggedatlas.catalog.features import read_registry
from raggedatlas.errors import FeatureError, NotFoundError, QueryError, SourceError
from raggedatlas.formats.registry import detect, open_source
from raggedatlas.formats.subset import find_features
from raggedatlas.ingest.columns import SYMBOL_COLUMNS, merge_colors
from raggedatlas.model.batch import Block, DenseBlock
from raggedatlas.model.frames import DATASET, INDEX
from raggedatlas.model.protocols import MatrixInfo, Source, SourceSchema
from raggedatlas.query.cells import cell_columns, column_vectors
from raggedatlas.query.compare import CompareOptions, compare, describe, number_cells, rank_features
from raggedatlas.query.modalities import read_modalities, vector_results
from raggedatlas.query.plan import plan_rows
from raggedatlas.query.query import Query
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.location import Location, as_path
from raggedatlas.wings.viewer.palette import is_color
from raggedatlas.wings.viewer.scene import SPACE, Look, Scene, make_scene, match_ids

if TYPE_CHECKING:
    import pandas as pd


@runtime_checkable
class Results(Protocol):
    """Rows of coordinates with ids, as a `ResultDataset` or an `InferenceDataSet` has them."""

    def ids(self) -> Any:  # noqa: ANN401  (an Arrow array by `to_arrow`)
        """Return the id of each row."""

    def iter_batches(self, batch_size: int = 8192) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Iterate over ids and values."""


_SPACE = "gene_expression"
_STEP_BYTES = 16 << 20
_OBSM = "obsm/"


@runtime_checkable
class CellObject(Protocol):
    """An AnnData or MuData in memory."""

    obs: Any
    obsm: Any


Cells = RaggedAtlas | AtlasView | Query | CellObject | str | os.PathLike[str]
"""Cells of an atlas, or of a file: a query, a view, an atlas, an object in memory, or where an atlas or a file is."""


MAPS = ("umap", "tsne", "spatial", "pca")
"""Parts of names of embeddings, in the order in which they are chosen where none is named."""


def default_embedding(cells: "QueryCells | FileCells") -> str:
    """Choose the embedding that is shown where none is named."""
    names = cells.embeddings()
    if not names:
        raise NotFoundError(
            f"{cells.place or 'The object'} has no embedding to show; make one with scanpy (sc.tl.umap) or the verb umap, and name it."
        )
    rank = {name: next((i for i, part in enumerate(MAPS) if part in name.lower()), len(MAPS)) for name in names}
    return min(names, key=lambda name: rank[name])


def is_cells_path(path: str | os.PathLike[str]) -> bool:
    """Return whether an atlas, or a file or folder of cells, is at a path; the name of an embedding, or results, are not."""
    place = as_path(path)
    # Nothing else is named by an address.
    if isinstance(place, Location):
        return find_kind(place) is None
    if not place.exists():
        return False
    if place.is_file() or is_atlas(Location.of(place)):
        return True
    try:
        return bool(detect(place))
    except SourceError:
        return False


def open_cells(cells: Cells) -> "QueryCells | FileCells":
    """Open the cells of an atlas, a file or an object in memory.

    An atlas means all cells of its newest snapshot; a path is of an atlas, or of anything that `open_source` takes.
    """
    query = find_query(cells)
    if query is not None:
        return QueryCells(query)
    return FileCells(as_path(cells) if isinstance(cells, str | os.PathLike) else cells)


@dataclass(frozen=True)
class QueryGenes:
    """Genes of a query, read when they are asked for."""

    query: Query  # which cells and which layer
    space: str

    # `cached_property` writes to `__dict__`, which a frozen dataclass has unless it has slots.
    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        """Pairs of the name to search and its note: symbol and id, or id alone."""
        table = read_registry(self.query.catalog, self.space).table
        ids = [one or uid for one, uid in zip(_texts(table, "feature_id"), _texts(table, "uid"), strict=True)]
        return _searched(ids, _texts(table, "symbol"))

    def find(self, text: str, most: int) -> list[tuple[str, str]]:
        """Find genes by part of a symbol or id."""
        return _found(self._names, text, most)

    def values(self, names: Sequence[str]) -> tuple[pa.Array, NDArray[Any]]:
        """Read genes of all cells of the query, NaN where a dataset did not measure them."""
        asked = self.query.features(*names, space=self.space).spaces(self.space)
        # a gene that only some datasets measured is shown for these, whatever the query joins
        with self._layer_named():
            adata = asked.join("union").missing("nan").to_anndata()
        dense = adata.X.toarray() if hasattr(adata.X, "toarray") else np.asarray(adata.X)
        return pa.array(list(adata.obs_names), pa.string()), dense if dense.size else np.zeros((0, len(names)))

    def compare(self, group: pa.Array, reference: pa.Array, options: CompareOptions) -> "pd.DataFrame":
        """Compare two sets of cells; see `Query.compare`."""
        spec = replace(self.query.spec, spaces=(self.space,))
        with self._layer_named():
            return compare(spec, self.query.catalog, group, reference, options)

    @contextmanager
    def _layer_named(self) -> Iterator[None]:
        """Add to a refusal for want of a layer how the page is given one."""
        try:
            yield
        except QueryError as error:
            if self.query.spec.layers or "layers" not in str(error):
                raise
            raise QueryError(f"{error} In view and visualize, layer=... names it.") from error


def _searched(ids: list[str], symbols: list[str]) -> list[tuple[str, str]]:
    """Pair the name that people search with the other one: symbol and id, or id first where several features share the symbol."""
    once = {name for name, n in zip(*np.unique([s for s in symbols if s], return_counts=True), strict=True) if n == 1}
    return [
        (symbol, "" if symbol == one else one) if symbol in once else (one, symbol if symbol != one else "")
        for symbol, one in zip(symbols, ids, strict=True)
    ]


def _found(names: list[tuple[str, str]], text: str, most: int) -> list[tuple[str, str]]:
    """Search names by any part; those that begin with it come first, short ones before long ones."""
    wanted = text.lower()
    found = [pair for pair in names if wanted in pair[0].lower() or wanted in pair[1].lower()]
    return sorted(found, key=lambda p: (not p[0].lower().startswith(wanted), len(p[0]), p[0]))[:most]


def _texts(table: pa.Table, name: str) -> list[str]:
    return [value or "" for value in table.column(name).cast(pa.string()).to_pylist()]


@dataclass(frozen=True)
class QueryCells:
    """Cells of a query of an atlas."""

    query: Query

    @property
    def place(self) -> str:
        """The address of the atlas."""
        return self.query.catalog.location.uri

    def table(self) -> tuple[pa.Table, str]:
        """Read the metadata of the cells."""
        return self.query.to_arrow(), "uid"

    def embeddings(self) -> list[str]:
        """Name feature spaces without features, columns of vectors, and results that lie in the cell table."""
        stored = cell_columns(self.query.catalog).schema
        vectors = [field.name for field in stored if pa.types.is_fixed_size_list(field.type)]
        return list(dict.fromkeys([*self._spaces(), *vector_results(self.query.catalog), *vectors]))

    def _spaces(self) -> list[str]:
        known = read_modalities(self.query.catalog)
        return [key for key, m in known.items() if not m.space.has_features and m.space.rank == 1]

    def coordinates(self, name: str) -> tuple[pa.Array, NDArray[Any]]:
        """Read an embedding of the chosen cells."""
        if name in vector_results(self.query.catalog):
            record = vector_results(self.query.catalog)[name]
            cells, _ = plan_rows(
                self.query.spec, self.query.catalog, cell_columns(self.query.catalog), (), (record.column,)
            )
            places, valid = column_vectors(cells, record.column)
            return cells.table.column("uid").combine_chunks().filter(pa.array(valid)), places
        if name in self._spaces():
            # layers and features of the query are those of genes; an embedding has neither
            plain = Query(self.query.catalog, replace(self.query.spec, layers=(), features=()))
            adata = plain.spaces(name).to_anndata()
            return pa.array(list(adata.obs_names), pa.string()), np.asarray(adata.X)
        table = self.query.to_arrow()
        if name not in table.column_names or not pa.types.is_fixed_size_list(table.schema.field(name).type):
            raise NotFoundError(
                f"The atlas has no embedding {name!r}; it has {self.embeddings()}. Add one of a file with "
                "add(..., embeddings=['X_umap']), or name a folder of results."
            )
        column = table.column(name).combine_chunks()
        valid = column.is_valid()
        flat = column.filter(valid).flatten().to_numpy(zero_copy_only=False)
        return table.column("uid").combine_chunks().filter(valid), flat.reshape(-1, column.type.list_size)

    def snapshot_vectors(self, name: str) -> tuple[pa.Array, NDArray[Any], NDArray[Any]]:
        """Read an embedding of all cells of the snapshot that have it: their uids, their vectors, and their datasets.

        Datasets whose vectors have another length than those of the query are left out: their distances have no
        meaning.
        """
        ids, vectors = self.coordinates(name)
        catalog, spec = self.query.catalog, self.query.spec
        if spec.filters or spec.search or spec.sample or spec.limit is not None:
            whole = Query(catalog, QuerySpec())
            if name in self._spaces():
                records = [r for own in read_modalities(catalog)[name].records.values() for r in own]
                alike = {r.name for r in records if r.n_features == vectors.shape[1]}
                whole = whole.where({"dataset": sorted(alike)})
            ids, vectors = QueryCells(whole).coordinates(name)
        cells = Query(catalog, QuerySpec(obs=())).to_arrow()
        rows = match_ids(ids, cells.column("uid").combine_chunks())
        datasets = cells.column(DATASET).cast(pa.string()).take(pa.array(rows))
        return ids, vectors, np.asarray(datasets.to_pylist(), object)

    def genes(self, layer: str | None) -> QueryGenes | None:
        """Open the genes of the atlas."""
        known = read_modalities(self.query.catalog)
        named = [key for key, m in known.items() if m.space.has_features and m.space.rank == 1]
        space = next(iter([*([_SPACE] if _SPACE in named else []), *named]), None)
        query = self.query
        if layer is not None:
            records = {} if space is None else known[space].records
            held = dict.fromkeys(name for uid in records for name in known[str(space)].layers(uid))
            if layer not in held:
                raise NotFoundError(f"No dataset has the layer {layer!r} of genes; there are {list(held)}.")
            query = query.layers(layer)
        return None if space is None else QueryGenes(query, space)

    def dress(self, look: Look, table: pa.Table) -> Look:
        """Add the colours of the atlas' files, and the number of the snapshot."""
        snapshot = self.query.catalog.snapshot
        subtitle = look.subtitle or ("" if snapshot is None else f"snapshot {snapshot.version}")
        return _with_colors(replace(look, subtitle=subtitle), stored_colors(self.query, table))


@dataclass(frozen=True)
class FileCells:
    """Cells of a file or of an object in memory; their ids are the names of its `obs`."""

    what: Any  # anything that `open_source` takes

    @property
    def place(self) -> str:
        """The path; empty for an object."""
        return str(self.what) if isinstance(self.what, Path) else ""

    def table(self) -> tuple[pa.Table, str]:
        """Read `obs`."""
        with closing(open_source(self.what)) as source:
            return source.cells(), INDEX

    def embeddings(self) -> list[str]:
        """Name the matrices of `obsm`."""
        with closing(open_source(self.what)) as source:
            return [info.key for info in _members(source.describe())]

    def coordinates(self, name: str) -> tuple[pa.Array, NDArray[Any]]:
        """Read a member of `obsm`, by its key, its name, or its name without ``X_``."""
        with closing(open_source(self.what)) as source:
            offered = [info.key for info in _members(source.describe())]
            names = (name, f"X_{name}")
            found = [key for key in offered if key == name or key.rpartition(_OBSM)[2] in names]
            # A MuData may have an `X_umap` in each modality; then only the full key is unambiguous.
            if len(found) != 1:
                several = f"; {found} go by that name, so write one of these" if found else ""
                raise NotFoundError(
                    f"{self.place or 'The object'} has no embedding {name!r}{several}; it has {offered}. Make one with "
                    "scanpy (sc.tl.umap), or add the file to an atlas and use the verb umap."
                )
            blocks = [_dense(block) for (block,) in source.blocks((found[0],), 2**16)]
            ids = _ids_of(source, found[0])
        return ids, np.concatenate(blocks) if blocks else np.zeros((0, 2), np.float32)

    def genes(self, layer: str | None) -> "FileGenes | None":
        """Open the genes of a matrix: X, or another one by its name."""
        with closing(open_source(self.what)) as source:
            schema = source.describe()
        named = [info for info in schema.matrices if info.features and len(info.shape) == 2]
        held = list(dict.fromkeys(_layer_of(info.key) for info in named))
        if layer is None:
            layer = next((name for name in ("X", *held) if name in held), None)
        if layer is None:
            return None
        wanted = [info for info in named if layer in (_layer_of(info.key), _layer_of(info.key).rpartition("/")[2])]
        # `raw` alone means `raw/X`.
        wanted = wanted or [info for info in named if _layer_of(info.key) == f"{layer}/X"]
        if not wanted:
            raise NotFoundError(f"{self.place or 'The object'} has no layer {layer!r} of genes; there are {held}.")
        # `X` also matches `raw/X` above; only the modalities of the first layer belong together.
        first = _layer_of(wanted[0].key)
        return FileGenes(self.what, tuple(info for info in wanted if _layer_of(info.key) == first))

    def dress(self, look: Look, table: pa.Table) -> Look:
        """Add the colours of the file."""
        with closing(open_source(self.what)) as source:
            found = merge_colors(source, table, list(source.describe().elements))
        return _with_colors(look, found)


def _members(schema: SourceSchema) -> list[MatrixInfo]:
    # Without the last part, which is the name of the matrix and may be anything, also `obsm`.
    return [info for info in schema.matrices if "obsm" in info.key.split("/")[:-1] and len(info.shape) == 2]


def _layer_of(key: str) -> str:
    """Name the layer of a matrix as people do, whatever the modality.

    Examples
    --------
    >>> _layer_of("mod/rna/layers/spliced"), _layer_of("raw/X"), _layer_of("X:Gene Expression")
    ('layers/spliced', 'raw/X', 'X')
    """
    own = key.split("/", 2)[2] if key.startswith("mod/") else key
    return own.partition(":")[0] if own.startswith("X:") else own


def _ids_of(source: Source, key: str) -> pa.Array:
    """Name the cells that the rows of a matrix belong to."""
    ids = source.cells().column(INDEX).cast(pa.string()).combine_chunks()
    # A modality may lack cells, so row i of its matrices need not be cell i.
    rows = source.present(key)
    return ids if rows is None else ids.take(pa.array(rows))


def _dense(block: Block) -> NDArray[Any]:
    if isinstance(block, DenseBlock):
        return np.asarray(block.layers["values"])
    from scipy.sparse import csr_array

    shape = (block.n_rows, block.n_cols)
    return np.asarray(csr_array((block.layers["values"], block.indices, block.indptr), shape).toarray())


KnownCells = QueryCells | FileCells
"""Cells with what is known of them; the ids of their embeddings are those of their table."""


@dataclass(frozen=True)
class FileGenes:
    """Genes of a file; those that are asked for are read in one walk down their matrix."""

    what: Any  # anything that `open_source` takes
    matrices: tuple[MatrixInfo, ...]  # one for each modality

    @cached_property
    def _features(self) -> list[pa.Table]:
        with closing(open_source(self.what)) as source:
            return [source.features(info.features) for info in self.matrices]

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        for table in self._features:
            symbols = next((name for name in SYMBOL_COLUMNS if name in table.column_names), None)
            ids = _texts(table, INDEX)
            found += _searched(ids, ids if symbols is None else _texts(table, symbols))
        return found

    def find(self, text: str, most: int) -> list[tuple[str, str]]:
        """Find genes by part of a symbol or id."""
        return _found(self._names, text, most)

    def values(self, names: Sequence[str]) -> tuple[pa.Array, NDArray[Any]]:
        """Read genes of all cells, NaN where a modality lacks a cell."""
        places = [self._place_of(name) for name in names]
        with closing(open_source(self.what)) as source:
            ids = source.cells().column(INDEX).cast(pa.string()).combine_chunks()
            found = np.full((len(ids), len(names)), np.nan, np.float32)
            for info in self.matrices:
                own = [(i, column) for i, (matrix, column) in enumerate(places) if matrix is info]
                present = source.present(info.key)
                rows = np.arange(len(ids)) if present is None else present
                start = 0
                for (block,) in source.blocks((info.key,), self._step(info)) if own else ():
                    for i, column in own:
                        found[rows[start : start + block.n_rows], i] = _column(block, column)
                    start += block.n_rows
            return ids, found

    def compare(self, group: pa.Array, reference: pa.Array, options: CompareOptions) -> "pd.DataFrame":
        """Compare two sets of cells of the first modality, in one or a few walks down its matrix."""
        import pandas as pd

        info = self.matrices[0]
        with closing(open_source(self.what)) as source:
            ids = _ids_of(source, info.key)
        codes = number_cells(ids, group, reference)

        def walk() -> Iterator[tuple[NDArray[np.int64], Block]]:
            with closing(open_source(self.what)) as source:
                start = 0
                for (block,) in source.blocks((info.key,), self._step(info)):
                    yield np.arange(start, start + block.n_rows), block
                    start += block.n_rows

        # Files keep counts as floats; the first cells tell whether all are whole.
        values = next((next(iter(block.layers.values())) for _, block in walk()), np.zeros(0))
        counts = bool(((values >= 0) & (values == np.floor(values))).all())
        measured = np.repeat(np.bincount(codes[codes >= 0], minlength=2)[:, None], info.shape[1], axis=1)
        n_entries = info.shape[0] * info.shape[1] if info.n_entries is None else info.n_entries
        ranks = rank_features(walk, codes, measured, n_entries, replace(options, normalize=counts))
        frame = ranks.to_frame(pd.DataFrame(index=[name for name, _ in self._names[: info.shape[1]]]))
        frame.attrs["compare"] = describe(options, ranks, codes, _layer_of(info.key))
        return frame

    def _step(self, info: MatrixInfo) -> int:
        row_bytes = info.shape[1] * info.dtype.itemsize
        if info.n_entries is not None:
            # Mean entries of a row, each a value and an index of at most eight bytes.
            row_bytes = info.n_entries // max(1, info.shape[0]) * (info.dtype.itemsize + 8)
        return max(1, _STEP_BYTES // max(1, row_bytes))

    def _place_of(self, name: str) -> tuple[MatrixInfo, int]:
        refusals = []
        for info, table in zip(self.matrices, self._features, strict=True):
            try:
                return info, int(find_features(table, [name])[0])
            except FeatureError as error:
                refusals.append(error)
        near = [one for one, _ in self.find(name, 5)]
        raise FeatureError(
            f"There is no gene {name!r} in {', '.join(info.key for info in self.matrices)}"
            + (f"; did you mean {near}?" if near else f": {refusals[0]}")
        )


def _column(block: Block, column: int) -> NDArray[Any]:
    """Return one column of a block; duplicate entries of a cell are summed."""
    values = block.layers["values"]
    if isinstance(block, DenseBlock):
        return np.asarray(values[:, column], np.float64)
    at = np.flatnonzero(block.indices == column)
    # The row of each entry; the right side skips empty rows, which begin at the same entry.
    rows = np.searchsorted(block.indptr, at, side="right") - 1
    return np.bincount(rows, values[at].astype(np.float64), block.n_rows)


def _with_colors(look: Look, found: dict[str, dict[str, str]]) -> Look:
    kept = {
        name: {label: color[:7].lower() for label, color in colors.items() if is_color(color)}
        for name, colors in found.items()
    }
    merged = {name: {**kept.get(name, {}), **look.colors.get(name, {})} for name in {*kept, *look.colors}}
    return replace(look, colors=merged)


def _plain_table(cells: KnownCells) -> tuple[pa.Table, str]:
    """Read the metadata without columns of vectors, which cannot be shown; left in, a note would list them."""
    table, id_column = cells.table()
    return table.drop_columns([f.name for f in table.schema if pa.types.is_fixed_size_list(f.type)]), id_column


def scene_of_results(results: Results, cells: KnownCells, look: Look, layer: str | None = None) -> Scene:
    """Join results, coordinates (n, 2) or (n, 3), with cells by id.

    The scene has the cells that have both; how many lack the one or the other is among its notes. Values of genes are
    read from `layer`; None takes that of the query, else the usual one. Raises `QueryError` if no cell has both.
    """
    ids, places = read_results(results)
    table, id_column = _plain_table(cells)
    uids = pc.cast(table.column(id_column), pa.string()).combine_chunks()
    rows = match_ids(uids, ids)
    here = rows >= 0
    if not here.any():
        raise QueryError(
            f"None of the {len(ids):,} ids of {results!r} is the {'uid' if id_column == 'uid' else 'name'} of one of the "
            f"{len(uids):,} chosen cells; are they of {cells.place or 'this object'}? The first id is "
            f"{ids[0].as_py() if len(ids) else None!r}, that of the first cell {uids[0].as_py() if len(uids) else None!r}."
        )
    kept = pa.array(here)
    scene = make_scene(
        uids.filter(kept),
        places[rows[here]],
        table.filter(kept),
        genes=cells.genes(layer),
        look=cells.dress(look, table),
        id_column=id_column,
    )
    lacking = int((~here).sum())
    others = len(ids) - int(here.sum())
    return replace(scene, origin=cells).with_notes(
        *([f"{lacking:,} of {len(uids):,} chosen cells have no result."] if lacking else []),
        *([f"{others:,} of {len(ids):,} results are of cells that are not among the chosen."] if others else []),
    )


def scene_of_embedding(name: str | None, cells: KnownCells, look: Look, layer: str | None = None) -> Scene:
    """Show an embedding that cells have; None shows the default one.

    Of an atlas it is a feature space without features or a column of vectors, of a file a member of `obsm`. Values of
    genes are read from `layer`; None takes that of the query, else the usual one. Raises `NotFoundError`, which lists
    what there is, if there is no embedding of that name, or no dataset has the layer.
    """
    shown = default_embedding(cells) if name is None else name
    ids, places = cells.coordinates(shown)
    # Of more than three dimensions that nobody chose the first two, as scanpy draws principal components.
    if name is None and look.axes is None and places.shape[1] > SPACE:
        look = replace(look, axes=(0, 1))
    table, id_column = _plain_table(cells)
    look = cells.dress(look, table)
    scene = make_scene(ids, places, table, genes=cells.genes(layer), look=look, id_column=id_column)
    lacking = table.num_rows - len(ids)
    return replace(scene, origin=cells).with_notes(
        *([f"{lacking:,} of {table.num_rows:,} chosen cells are not in {shown}."] if lacking else [])
    )


def read_results(results: Results) -> tuple[pa.Array, NDArray[Any]]:
    """Read ids and places of results, in the order of their rows."""
    ids = results.ids().to_arrow()
    values = [values for _, values in results.iter_batches()]
    return ids, np.concatenate(values) if values else np.zeros((0, 2), np.float32)


def scene_of_old_results(results: Any, look: Look) -> Scene:  # noqa: ANN401  (an `InferenceDataSet`)
    """Show ``.npy`` results with the metadata of the dataset that they were made of, where it can be had."""
    ids, places = read_results(results)
    obs: pa.Table | None = None
    notes: tuple[str, ...] = ()
    try:
        fields: dict[str, pa.Array] = {}
        for name in results.metadata_fields():
            # Datasets give a record array, a mapping, or the values alone.
            found = results.metadata(range(len(results)), [name])
            named = getattr(getattr(found, "dtype", None), "names", None) or hasattr(found, "keys")
            fields[name] = pa.array(np.asarray(found[name] if named else found).tolist())
        obs = pa.table({"uid": ids, **fields})
    # Metadata are optional here: the original dataset may have none, or lack some of the ids.
    except (AttributeError, LookupError) as error:
        notes = (f"Without metadata: {error.args[0] if error.args else error}",)
    return make_scene(ids, places, obs, look=look).with_notes(*notes)


def stored_colors(query: Query, table: pa.Table) -> dict[str, dict[str, str]]:
    """Read the colours that the atlas keeps of its files (``uns/cell_type_colors``): column -> category -> ``#rrggbb``.

    Of files that disagree, the one that was added first decides; only files with cells in the table have a say.
    """
    shown = set(table.column_names)
    names = set(pc.unique(table.column(DATASET)).to_pylist()) if DATASET in shown else None
    found: dict[str, dict[str, str]] = {}
    for records in group_by_dataset(read_records(query.catalog)).values():
        if names is not None and records[0].name not in names:
            continue
        kept = records[0].file_facts.colors
        for column in shown & set(kept):
            for label, color in kept[column].items():
                if is_color(color):
                    found.setdefault(column, {}).setdefault(label, color[:7].lower())
    return found
