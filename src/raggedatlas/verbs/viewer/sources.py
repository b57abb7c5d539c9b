"""Where a scene comes from: results joined with the cells of a query by uid, or an embedding of an atlas."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.atlas import AtlasView, RaggedAtlas
from raggedatlas.catalog.datasets import group_by_dataset, read_records
from raggedatlas.catalog.features import read_registry
from raggedatlas.errors import NotFoundError, QueryError
from raggedatlas.query.filters import DATASET
from raggedatlas.query.plan import modalities, plan_rows
from raggedatlas.query.query import Query
from raggedatlas.query.results import vector_results, vectors_of
from raggedatlas.query.rows import known_columns
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.inference import InferenceDataSet
from raggedatlas.verbs.viewer.palette import is_color
from raggedatlas.verbs.viewer.scene import Look, Scene, make_scene, match_ids

Results = ResultDataset | InferenceDataSet
Cells = RaggedAtlas | AtlasView | Query

_SPACE = "gene_expression"


def as_query(cells: Cells) -> Query:
    """Give the query of what cells were named by: a query itself, all cells of a view, or of an atlas' newest snapshot.

    Raises
    ------
    NotFoundError
        If an atlas has no snapshot.
    """
    if isinstance(cells, Query):
        return cells
    if isinstance(cells, RaggedAtlas):
        known = cells.list_versions()
        if not known:
            raise NotFoundError(f"{cells.uri} has no snapshot to show; call atlas.snapshot() first.")
        cells = cells.checkout(known[-1].version)
    return cells.query()


@dataclass(frozen=True)
class QueryGenes:
    """Genes of a query, each read when it is asked for.

    Parameters
    ----------
    query : Query
        Which cells, layers and feature space.
    space : str
        Feature space.
    """

    query: Query
    space: str

    @cached_property
    def _names(self) -> list[tuple[str, str]]:
        """Pairs of the name that people search and the one beside it: symbol and id, or id alone."""
        table = read_registry(self.query.catalog, self.space).table
        ids = [one or uid for one, uid in zip(_texts(table, "feature_id"), _texts(table, "uid"), strict=True)]
        symbols = _texts(table, "symbol")
        once = {
            name for name, n in zip(*np.unique([s for s in symbols if s], return_counts=True), strict=True) if n == 1
        }
        return [
            (symbol, "" if symbol == one else one) if symbol in once else (one, symbol)
            for symbol, one in zip(symbols, ids, strict=True)
        ]

    def find(self, text: str, most: int) -> list[tuple[str, str]]:
        """Find genes by part of a symbol or id; those that begin with it come first, short ones before long ones."""
        wanted = text.lower()
        found = [pair for pair in self._names if wanted in pair[0].lower() or wanted in pair[1].lower()]
        return sorted(found, key=lambda p: (not p[0].lower().startswith(wanted), len(p[0]), p[0]))[:most]

    def values(self, name: str) -> tuple[pa.Array, NDArray[Any]]:
        """Read a gene of all cells of the query, NaN where a dataset did not measure it."""
        adata = self.query.features(name, space=self.space).spaces(self.space).missing("nan").to_anndata()
        dense = adata.X.toarray() if hasattr(adata.X, "toarray") else np.asarray(adata.X)
        return pa.array(list(adata.obs_names), pa.string()), dense[:, 0] if dense.shape[1] else np.zeros(0)


def _texts(table: pa.Table, name: str) -> list[str]:
    return [value or "" for value in table.column(name).cast(pa.string()).to_pylist()]


def scene_of_results(results: Results, cells: Cells, look: Look) -> Scene:
    """Join results with the cells of a query by uid.

    Parameters
    ----------
    results : ResultDataset or InferenceDataSet
        A place for every cell, ``(n, 2)`` or ``(n, 3)``.
    cells : RaggedAtlas, AtlasView or Query
        Which cells, and their metadata and genes.
    look : Look
        Title, colours, sampling.

    Returns
    -------
    Scene
        The cells that have both; how many lack the one or the other is among its notes.

    Raises
    ------
    QueryError
        If no cell has both, or results have no places.
    """
    ids, places = read_results(results)
    query = as_query(cells)
    table = query.to_arrow()
    uids = pc.cast(table.column("uid"), pa.string()).combine_chunks()
    rows = match_ids(uids, ids)
    here = rows >= 0
    if not here.any():
        raise QueryError(
            f"None of the {len(ids):,} ids of {results!r} is the uid of one of the {len(uids):,} chosen cells; are they of "
            f"this atlas? The first id is {ids[0].as_py() if len(ids) else None!r}, the first uid {uids[0].as_py() if len(uids) else None!r}."
        )
    kept = pa.array(here)
    scene = make_scene(
        uids.filter(kept),
        places[rows[here]],
        table.filter(kept),
        genes=_genes_of(query),
        look=_dressed(look, query, table),
    )
    lacking = int((~here).sum())
    others = len(ids) - int(here.sum())
    return scene.with_notes(
        *([f"{lacking:,} of {len(uids):,} chosen cells have no result."] if lacking else []),
        *([f"{others:,} of {len(ids):,} results are of cells that are not among the chosen."] if others else []),
    )


def scene_of_embedding(name: str, cells: Cells, look: Look) -> Scene:
    """Show an embedding that is in an atlas: a feature space without features, or a column of vectors.

    Parameters
    ----------
    name : str
        Of the space or the column.
    cells : RaggedAtlas, AtlasView or Query
        Which cells, and their metadata and genes.
    look : Look
        Title, colours, sampling.

    Raises
    ------
    NotFoundError
        If there is no embedding of that name; the message lists them.
    """
    query = as_query(cells)
    known = modalities(query.catalog)
    spaces = [key for key, m in known.items() if not m.space.has_features and m.space.rank == 1]
    table = query.to_arrow()
    vectors = [field.name for field in table.schema if pa.types.is_fixed_size_list(field.type)]
    held = vector_results(query.catalog)
    if name in held:
        ids, places = _held_vectors(query, name)
    elif name in spaces:
        adata = query.spaces(name).to_anndata()
        ids, places = pa.array(list(adata.obs_names), pa.string()), np.asarray(adata.X)
    elif name in vectors:
        column = table.column(name).combine_chunks()
        valid = column.is_valid()
        width = column.type.list_size
        ids = table.column("uid").combine_chunks().filter(valid)
        places = column.filter(valid).flatten().to_numpy(zero_copy_only=False).reshape(-1, width)
    else:
        raise NotFoundError(
            f"The atlas has no embedding {name!r}; it has {[*spaces, *vectors, *held]}. Add one with add(..., embeddings=['X_umap']), or "
            "name a folder of results."
        )
    plain = table.drop_columns(vectors)
    scene = make_scene(ids, places, plain, genes=_genes_of(query), look=_dressed(look, query, plain))
    lacking = table.num_rows - len(ids)
    return scene.with_notes(
        *([f"{lacking:,} of {table.num_rows:,} chosen cells are not in {name}."] if lacking else [])
    )


def _held_vectors(query: Query, name: str) -> tuple[pa.Array, NDArray[Any]]:
    """Read a result that lies in the cell table, of the cells that have it."""
    record = vector_results(query.catalog)[name]
    cells, _ = plan_rows(query.spec, query.catalog, known_columns(query.catalog), (), (record.column,))
    places, valid = vectors_of(cells, record.column)
    return cells.table.column("uid").combine_chunks().filter(pa.array(valid)), places


def read_results(results: Results) -> tuple[pa.Array, NDArray[Any]]:
    """Read ids and places of results, in the order of their rows."""
    ids = results.ids().to_arrow()
    if isinstance(results, ResultDataset):
        return ids, results.to_numpy()
    if not len(results):
        return ids, np.zeros((0, 2), np.float32)
    return ids, np.concatenate([values for _, values in results.iter_batches()])


def scene_of_old_results(results: InferenceDataSet, look: Look) -> Scene:
    """Show ``.npy`` results with the metadata of the dataset that they were made of, where it can be had (seed 003, visualize)."""
    ids, places = read_results(results)
    obs: pa.Table | None = None
    notes: tuple[str, ...] = ()
    try:
        fields = {name: _field(results, name) for name in results.metadata_fields()}
        obs = pa.table({"uid": ids, **fields})
    except (AttributeError, LookupError) as error:
        notes = (f"Without metadata: {error.args[0] if error.args else error}",)
    return make_scene(ids, places, obs, look=look).with_notes(*notes)


def _field(results: InferenceDataSet, name: str) -> pa.Array:
    """Read a field of metadata, which datasets give as a record array, a mapping, or the values alone."""
    found = results.metadata(range(len(results)), [name])
    fields = getattr(getattr(found, "dtype", None), "names", None)
    return pa.array(np.asarray(found[name] if fields or hasattr(found, "keys") else found).tolist())


def _genes_of(query: Query) -> QueryGenes | None:
    known = modalities(query.catalog)
    named = [key for key, m in known.items() if m.space.has_features and m.space.rank == 1]
    if not named:
        return None
    return QueryGenes(query, _SPACE if _SPACE in named else named[0])


def _dressed(look: Look, query: Query, table: pa.Table) -> Look:
    """Add the colours that the files of an atlas name for their categories; those of a caller come first."""
    found = stored_colors(query, table)
    merged = {name: {**found.get(name, {}), **look.colors.get(name, {})} for name in {*found, *look.colors}}
    snapshot = query.catalog.snapshot
    subtitle = look.subtitle or ("" if snapshot is None else f"snapshot {snapshot.version}")
    return replace(look, colors=merged, subtitle=subtitle)


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
        kept: dict[str, dict[str, str]] = json.loads(records[0].facts).get("colors", {})
        for column in shown & set(kept):
            for label, color in kept[column].items():
                if is_color(color):
                    found.setdefault(column, {}).setdefault(label, color[:7].lower())
    return found
