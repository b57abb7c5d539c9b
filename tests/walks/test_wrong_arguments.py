"""Every public call, given something else than it takes, answers with an error of ours that names the argument, or works."""

import datetime as dt
import functools
import inspect
import itertools
import math
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import raggedatlas as ra
from raggedatlas.errors import ArgumentError, AtlasError, NameRefusedError, NotFoundError
from raggedatlas.formats import anndata as anndata_rules
from raggedatlas.loader.plan import LoaderChoices
from raggedatlas.model.options import AddChoices
from raggedatlas.query.dataset import Dataset
from raggedatlas.query.spec import QuerySpec
from raggedatlas.wings import cxg, results, vectors, viewer
from raggedatlas.wings.trainers.lightning import split_loader
from raggedatlas.wings.vectors.builder import ChunkingOptions, make_geometry
from raggedatlas.wings.vectors.converters.convert import Conversion, convert, read_file
from raggedatlas.wings.vectors.reader import open_vectors
from raggedatlas.wings.vectors.writer import write as write_vectors
from raggedatlas.wings.viewer.verbs import ViewOptions
from support.atlases import GENES, small_anndata, write_results
from support.spatial import spots


class Strange:
    """An object of a class that no call knows."""

    def __repr__(self) -> str:
        return "Strange()"


WRONG: list[Any] = [
    None, 5, -1, 1.5, math.nan, 10**30, "", "x" * 300, "Deep", "no such", "\0", b"x", [], ["nope"], [5], {}, {"a": Strange()},
    {5: 6}, Strange(), True, np.array([1.5]), int, pd.DataFrame({"a": [1]}),
]  # fmt: skip
"""What no argument takes, or only a few do."""


@functools.wraps(ra.SetLoader, updated=())
def make_sets(query: ra.Query, **given: Any) -> Any:
    # What a small atlas leaves out is warned of.
    with warnings.catch_warnings(action="ignore"):
        return iter(ra.SetLoader(query, **given))


SPECIAL = {("add", "progress"), ("Loader", "sampler")}
"""Functions of the user, whose own errors pass."""


OTHERS = {"progress", "limits", "shared", "whole"}
"""Optional arguments that are functions, or that other modules of the package pass."""


@dataclass
class Places:
    """An atlas of two datasets with a snapshot, and paths that are free."""

    folder: Path
    atlas: ra.RaggedAtlas
    numbers: itertools.count = field(default_factory=itertools.count)  # type: ignore[type-arg]

    @property
    def query(self) -> ra.Query:
        return self.atlas.checkout("first").query()

    def free(self, ending: str) -> str:
        """Return a path where nothing is."""
        return str(self.folder / f"out{next(self.numbers)}{ending}")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    """Make the atlas."""
    folder = tmp_path_factory.mktemp("wrong")
    atlas = ra.RaggedAtlas.create(folder / "a")
    atlas.add(small_anndata(1, 12), "d1", organism="human")
    atlas.add(small_anndata(2, 12, GENES[5:15]), "d2", organism="human")
    atlas.snapshot("first")
    small_anndata(3, 6).write_h5ad(folder / "third.h5ad")
    uids = atlas.checkout("first").query().to_pandas().index.to_numpy(dtype=object)
    write_results(folder / "z", uids, np.arange(2 * len(uids), dtype=np.float32).reshape(-1, 2), model="m")
    write_vectors(make_geometry(spots()), str(folder / "spots.zv"))
    atlas.publish(folder / "published")
    return Places(folder, atlas)


def spent(result: Any) -> None:
    """Use up what comes piece by piece."""
    if hasattr(result, "__next__"):
        list(result)


# Each call with the arguments that it needs; the test replaces these and its optional ones, one by one, by everything in WRONG.
Call = Callable[[Places], tuple[Callable[..., Any], dict[str, Any]]]


def arguments_of(call: Callable[..., Any], given: dict[str, Any]) -> list[str]:
    """Return the names of the given arguments, and of the optional ones that are no functions of the user."""
    optional = [p.name for p in inspect.signature(call).parameters.values() if p.default is not p.empty]
    return list(dict.fromkeys([*given, *(name for name in optional if name not in OTHERS)]))


def ones(batch: Any) -> dict[str, Any]:
    """Give one for each cell."""
    return {"a": np.ones(batch.obs.num_rows, np.int8)}


def dry(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have a call write nothing, unless the test says something else."""

    @functools.wraps(call)
    def run(**given: Any) -> Any:
        return call(**{"dry_run": True, **given})

    return run


def fresh(places: Places, function: Callable[..., Any], name: str, ending: str) -> Callable[..., Any]:
    """Have an argument that is ``"free"`` be a path where nothing is, another one each time."""

    @functools.wraps(function)
    def call(**given: Any) -> Any:
        if isinstance(given[name], str) and given[name] == "free":
            given[name] = places.free(ending)
        return function(**given)

    return call


CALLS: dict[str, Call] = {
    "create": lambda p: (fresh(p, ra.RaggedAtlas.create, "uri", ".atlas"), {"uri": "free"}),
    "open": lambda p: (ra.RaggedAtlas.open, {"uri": p.folder / "a"}),
    "checkout_latest": lambda p: (ra.RaggedAtlas.checkout_latest, {"db_uri": p.folder / "a"}),
    "add": lambda p: (dry(p.atlas.add), {"source": p.folder / "third.h5ad", "name": "d3"}),
    "add_csc": lambda p: (p.atlas.add_csc, {"dataset": "d1"}),
    "materialize": lambda p: (p.atlas.materialize, {"datasets": "d1"}),
    "relink": lambda p: (p.atlas.relink, {"dataset": "d1", "path": p.folder / "third.h5ad"}),
    "annotate": lambda p: (
        dry(p.atlas.annotate),
        {"source": {"uid": p.query.to_pandas().index.tolist(), "label": ["B"] * 24}, "name": "labels", "on": "uid"},
    ),
    "sql": lambda p: (p.atlas.checkout("first").sql, {"statement": "SELECT 1"}),
    "load_terms": lambda p: (p.atlas.load_terms, {"source": p.folder / "no.csv"}),
    "map_terms": lambda p: (dry(p.atlas.map_terms), {"column": "cell_type", "ontology": "CL"}),
    "drop_annotation": lambda p: (p.atlas.drop_annotation, {"name": "nope"}),
    "checkout": lambda p: (p.atlas.checkout, {"version": "first"}),
    "dataset": lambda p: (p.atlas.dataset, {"uid_or_name": "d1"}),
    "diff": lambda p: (p.atlas.diff, {"old": "first", "new": "first"}),
    "diff_files": lambda p: (p.atlas.diff_files, {"old": "first", "new": "first"}),
    "drop_dataset": lambda p: (p.atlas.drop_dataset, {"uid_or_name": "nope"}),
    "delete_cells": lambda p: (dry(p.atlas.delete_cells), {"uids": p.query.to_pandas().index.tolist()[:1]}),
    "where.delete_cells": lambda p: (
        lambda condition: p.atlas.delete_cells(condition, dry_run=True),
        {"condition": "n_genes < 3"},
    ),
    "drop_snapshot": lambda p: (p.atlas.drop_snapshot, {"version": "nope"}),
    "expire_snapshots": lambda p: (dry(p.atlas.expire_snapshots), {"keep_last": 1}),
    "rename_dataset": lambda p: (p.atlas.rename_dataset, {"uid_or_name": "nope", "name": "x"}),
    "presence": lambda p: (p.atlas.presence, {}),
    "drop_geometry": lambda p: (p.atlas.drop_geometry, {"name": "nope"}),
    "drop_asset": lambda p: (p.atlas.drop_asset, {"kind": "results", "name": "nope"}),
    "list_assets": lambda p: (p.atlas.list_assets, {"kind": "results"}),
    "drop_result": lambda p: (p.atlas.drop_result, {"name": "nope"}),
    "features": lambda p: (p.atlas.features, {}),
    "find_datasets_with_features": lambda p: (p.atlas.find_datasets_with_features, {"features": ["GENE1"]}),
    "gc": lambda p: (p.atlas.gc, {}),
    "markers": lambda p: (p.atlas.markers, {"by": "cell_type"}),
    "view.markers": lambda p: (p.atlas.checkout("first").markers, {"by": "cell_type"}),
    "publish": lambda p: (dry(p.atlas.publish), {"target": p.folder / "published"}),
    "set_license": lambda p: (p.atlas.set_license, {"uid_or_name": "d1", "license": "CC0-1.0"}),
    "sync": lambda p: (dry(p.atlas.sync), {"target": p.atlas.uri}),
    "purge": lambda p: (p.atlas.purge, {"uid_or_name": "nope"}),
    "register_features": lambda p: (p.atlas.register_features, {"features": pd.DataFrame({"feature_id": ["X"]})}),
    "register_space": lambda p: (p.atlas.register_space, {"space": ra.FeatureSpace("scores", ra.PointerKind.DENSE)}),
    "reindex_registry": lambda p: (p.atlas.reindex_registry, {}),
    "restore": lambda p: (p.atlas.restore, {"version": "nope"}),
    "snapshot": lambda p: (p.atlas.snapshot, {"label": "ok"}),
    "validate": lambda p: (p.atlas.validate, {}),
    "verify": lambda p: (p.atlas.verify, {"version": "first"}),
    "query": lambda p: (
        lambda **given: p.atlas.checkout("first").query(**given).to_anndata(),
        {"identity": "default", "on_merge": "counts"},
    ),
    "query.pseudobulk": lambda p: (p.query.pseudobulk, {"by": "cell_type", "min_cells": 1}),
    "query.test": lambda p: (
        p.query.test,
        {"design": "~ cell_type", "contrast": ("cell_type", "B", "T"), "by": "cell_type", "min_cells": 1},
    ),
    "query.aggregate": lambda p: (p.query.aggregate, {"by": "cell_type"}),
    "query.map": lambda p: (
        functools.partial(p.query.map, ones),
        {"batch_size": 3, "output_schema": pa.schema([("a", "int8")])},
    ),
    "query.lazy": lambda p: (p.query.lazy, {"chunk_bytes": 1000}),
    "query.batches": lambda p: (p.query.batches, {"n": 5}),
    "query.score": lambda p: (p.query.score, {"sets": {"a": ["GENE1"]}, "min_features": 1}),
    "query.markers": lambda p: (p.query.markers, {"by": "cell_type"}),
    "query.compare": lambda p: (p.query.compare, {"group": "cell_type = 'B'"}),
    "query.tree": lambda p: (p.query.tree, {"column": "cell_type"}),
    "query.count": lambda p: (p.query.count, {}),
    "query.features": lambda p: (
        lambda names, space: p.query.features(names, space=space).to_anndata(),
        {"names": "GENE1", "space": None},
    ),
    "query.join": lambda p: (
        lambda how, least: p.query.join(how, min_datasets=least).to_anndata(),
        {"how": "union", "least": None},
    ),
    "query.layers": lambda p: (lambda names: p.query.layers(names).to_anndata(), {"names": "counts"}),
    "query.limit": lambda p: (lambda n: p.query.limit(n).to_pandas(), {"n": 3}),
    "query.missing": lambda p: (lambda how: p.query.missing(how).to_anndata(), {"how": "zero"}),
    "query.obs": lambda p: (lambda names: p.query.obs(names).to_pandas(), {"names": "cell_type"}),
    "query.order_by": lambda p: (
        lambda names, descending: p.query.order_by(names, descending=descending).to_pandas(),
        {"names": "cell_type", "descending": False},
    ),
    "query.sample": lambda p: (
        lambda **given: p.query.sample(**given).to_pandas(),
        {"n": 3, "by": None, "seed": 0},
    ),
    "query.search": lambda p: (
        lambda **given: p.query.search(**given).to_pandas(),
        {"query": "B", "column": "cell_type", "k": 3, "metric": "l2"},
    ),
    "query.spaces": lambda p: (lambda names: p.query.spaces(names).to_anndata(), {"names": "gene_expression"}),
    "query.split": lambda p: (
        lambda parts, name: p.query.split(parts, name=name),
        {"parts": "train", "name": "split"},
    ),
    "Split.by": lambda p: (ra.Split.by, {"query": p.query, "match": ["dataset"]}),
    "Split.hold_out": lambda p: (ra.Split.hold_out, {"query": p.query, "test": {"cell_type": "B"}}),
    "Split.from_frame": lambda p: (
        ra.Split.from_frame,
        {"frame": {"uid": ["0" * 16], "split": ["a"]}, "column": "split"},
    ),
    "Split.from_toml": lambda p: (ra.Split.from_toml, {"path": p.folder / "none.toml", "query": p.query, "seed": 1}),
    "SetLoader": lambda p: (
        make_sets,
        {"query": p.query, "set_by": "cell_type", "control": "others", "match": ["dataset"], "set_size": 2, "sets": 2}
        | {"min_cells": 1, "min_controls": 1, "obs": None, "as_": "csr"},
    ),
    "query.to_anndata": lambda p: (p.query.to_anndata, {}),
    "query.where": lambda p: (lambda c: p.query.where(c).to_pandas(), {"c": "cell_type = 'B'"}),
    "query.where_equal": lambda p: (lambda c: p.query.where(cell_type=c).to_pandas(), {"c": "B"}),
    "query.with_centroids": lambda p: (p.query.with_centroids, {}),
    "query.with_results": lambda p: (
        lambda names, missing: p.query.with_results(names, missing=missing).to_anndata(),
        {"names": "z", "missing": "nan"},
    ),
    "query.within": lambda p: (p.query.within, {"bbox": (0, 0, 1, 1)}),
    "query.from_dict": lambda p: (ra.Query.from_dict, {"view": p.atlas.checkout("first"), "asked": {}}),
    "query.geometry": lambda p: (p.query.geometry, {}),
    "query.write": lambda p: (
        lambda path, **given: p.query.write(
            p.free(".h5ad") if isinstance(path, str) and path == "free" else path, **given
        ),
        {"path": "free", "overwrite": False, "no_such_option": 1},
    ),
    "dataset.element": lambda p: (p.atlas.dataset("d1").element, {"key": "obs"}),
    "dataset.to_anndata": lambda p: (p.atlas.dataset("d1").to_anndata, {}),
    "dataset.var": lambda p: (p.atlas.dataset("d1").var, {}),
    "dataset.write": lambda p: (
        lambda path: p.atlas.dataset("d1").write(p.free(".h5ad") if isinstance(path, str) and path == "free" else path),
        {"path": "free"},
    ),
    "Loader": lambda p: (
        lambda query, **given: iter(ra.Loader(query, **given)),
        {"query": p.query, "batch_size": 4, "shuffle": "full", "seed": 0, "obs": None, "as_": "csr"},
    ),
    "Loader.iterate": lambda p: (ra.Loader(p.query, 4).iterate, {}),
    "Loader.state_dict": lambda p: (ra.Loader(p.query, 4).state_dict, {}),
    "Loader.load_state_dict": lambda p: (ra.Loader(p.query, 4).load_state_dict, {"state": {}}),
    "Loader.set_epoch": lambda p: (ra.Loader(p.query, 4).set_epoch, {"epoch": 1}),
}
CALLS |= {
    f"add({name})": lambda p, name=name: (  # type: ignore[misc]
        lambda given: p.atlas.add(p.folder / "third.h5ad", "d3", dry_run=True, **{name: given}),
        {"given": None},
    )
    for name in typing.get_type_hints(AddChoices)
}
CALLS |= {
    f"Loader({name})": lambda p, name=name: (  # type: ignore[misc]
        lambda given: iter(ra.Loader(p.query, 4, **{name: given})),
        {"given": None},
    )
    for name in typing.get_type_hints(LoaderChoices)
    if ("Loader", name) not in SPECIAL
}
CALLS |= {
    f"query.from_dict({part.name})": lambda p, name=part.name: (  # type: ignore[misc]
        lambda given: ra.Query.from_dict(p.atlas.checkout("first"), {name: given}),
        {"given": None},
    )
    for part in fields(QuerySpec)
}


def double(batch: Any) -> Any:
    """Be a model."""
    return np.asarray(batch.todense() if hasattr(batch, "todense") else batch)[:, :2]


def written(ids: Any, data: Any, where: str) -> None:
    """Write a batch, and leave nothing."""
    writer = ra.ResultDatasetWriter(where)
    try:
        writer.write_batch(ids, data)
    finally:
        writer.abort()


def stored(p: Places) -> Any:
    """Open the results."""
    return ra.ResultDataset({}, p.folder / "z")


# Functions of modules, likewise.
FUNCTIONS: dict[str, Call] = {
    "open": lambda p: (ra.open, {"address": p.atlas.uri}),
    "clone": lambda p: (fresh(p, ra.clone, "target", ".atlas"), {"address": p.folder / "published", "target": "free"}),
    "open_source": lambda p: (ra.open_source, {"what": p.folder / "third.h5ad"}),
    "open_source(option)": lambda p: (lambda option: ra.open_source(p.folder / "third.h5ad", no=option), {"option": 1}),
    "open_sink": lambda p: (lambda path: ra.open_sink(path).abort(), {"path": p.folder / "x.h5ad"}),
    "copy": lambda p: (fresh(p, ra.copy, "sink", ".h5ad"), {"source": p.folder / "third.h5ad", "sink": "free"}),
    "read": lambda p: (ra.read, {"source": p.folder / "third.h5ad"}),
    "col": lambda p: (lambda name: p.query.where(ra.col(name) == 1).to_pandas(), {"name": "n_genes"}),
    "under": lambda p: (ra.under, {"term": "T cell"}),
    "col >": lambda p: (lambda value: p.query.where(ra.col("n_genes") > value).to_pandas(), {"value": 1}),
    "register_space function": lambda p: (
        ra.register_space,
        {"space": ra.FeatureSpace("scores", ra.PointerKind.DENSE)},
    ),
    "make_transcripts": lambda p: (
        ra.make_transcripts,
        {"positions": np.zeros((2, 2)), "genes": ["A", "B"], "cells": [1, 2]},
    ),
    "read_points": lambda p: (
        ra.read_points,
        {"source": pa.table({"x": [0.5], "y": [1.5], "gene": ["A"]}), "positions": ["x", "y"], "columns": ["gene"]},
    ),
    "transcripts_to_counts": lambda p: (
        ra.transcripts_to_counts,
        {"source": ra.make_transcripts(np.zeros((2, 2)), ["A", "B"], [1, 2]), "genes": "gene", "cells": ""},
    ),
    "convert_results": lambda p: (ra.convert_results, {"results_dir": p.folder / "z", "progress": None}),
    "create_results_writer": lambda p: (
        fresh(p, lambda result_dir: ra.create_results_writer(result_dir).abort(), "result_dir", ""),
        {"result_dir": "free"},
    ),
    "ResultDatasetWriter": lambda p: (
        fresh(p, lambda **given: ra.ResultDatasetWriter(**given).abort(), "result_dir", ""),
        {"result_dir": "free", "overwrite": False, "facts": None, "resume": False, "grace": dt.timedelta(hours=1)},
    ),
    "write_batch": lambda p: (
        lambda **given: written(where=p.free(""), **given),
        {"ids": ["a"], "data": np.zeros((1, 2))},
    ),
    "load_results_dataset": lambda p: (ra.load_results_dataset, {"config": {}, "results_dir": p.folder / "z"}),
    "InferenceDataSet": lambda p: (ra.InferenceDataSet, {"config": {}, "results_dir": p.folder / "z"}),
    "ResultDataset": lambda p: (ra.ResultDataset, {"config": {}, "data_location": p.folder / "z"}),
    "ResultDataset[]": lambda p: (lambda idx: stored(p)[idx], {"idx": 1}),
    "get_data": lambda p: (stored(p).get_data, {"idx": 1}),
    "get_object_id": lambda p: (stored(p).get_object_id, {"idx": 1}),
    "to_numpy": lambda p: (stored(p).to_numpy, {}),
    "iter_batches": lambda p: (stored(p).iter_batches, {"batch_size": 8}),
    "DataProvider": lambda p: (
        ra.DataProvider,
        {"config": {}, "request": {"z": {"dataset_class": "ResultDataset", "data_location": str(p.folder / "z")}}},
    ),
    "CellDataset": lambda p: (ra.CellDataset, {"query": p.query, "buffers": 2}),
    "CellDataset[]": lambda p: (ra.CellDataset(p.query).__getitem__, {"index": 1}),
    "split_loader": lambda p: (split_loader, {"loader": ra.Loader(p.query, 4), "split": ra.Split.by(p.query)}),
    "infer": lambda p: (
        fresh(p, results.infer, "result_dir", ""),
        {"model": double, "query": p.query, "result_dir": "free", "batch_size": 16},
    ),
    "infer_part": lambda p: (
        lambda part, n_parts: results.infer_part(double, p.query, part, n_parts),
        {"part": None, "n_parts": 2},
    ),
    "test": lambda p: (
        fresh(p, results.test, "result_dir", ""),
        {
            "model": lambda x: double(x)[:, 0],
            "query": p.query,
            "result_dir": "free",
            "target": "n_genes",
            "batch_size": 16,
        },
    ),
    "engine": lambda p: (
        results.engine,
        {"path": p.folder / "no.onnx", "query": p.query, "result_dir": p.folder / "e", "batch_size": 16},
    ),
    "pca": lambda p: (
        fresh(p, results.pca, "result_dir", ""),
        {"source": p.folder / "z", "result_dir": "free", "n_components": 2, "sample_size": 100},
    ),
    # Of results that are not there, because a layout takes seconds.
    "umap": lambda p: (
        lambda **given: results.umap(result_dir=p.free(""), **given),
        {"source": p.folder / "nothing", "n_components": 2, "sample_size": 100, "seed": 0},
    ),
    "embedder": lambda p: (results.embedder, {"method": "pca"}),
    "lookup": lambda p: (results.lookup, {"results": p.folder / "z", "uids": "a"}),
    "neighbors": lambda p: (results.neighbors, {"results": p.folder / "z", "of": np.zeros((1, 2)), "k": 2}),
    "save_to_database": lambda p: (
        results.save_to_database,
        {"results": p.folder / "z", "least_rows": 50, "least_recall": 0.9, "n_queries": 5},
    ),
    "visualize": lambda p: (
        fresh(p, viewer.visualize, "path", ".html"),
        {"embedding": p.folder / "z", "cells": p.query, "path": "free"},
    ),
    "make_view": lambda p: (viewer.make_view, {"embedding": p.folder / "z", "cells": p.query}),
    "view": lambda p: (
        lambda **given: viewer.view(p.folder / "z", p.query, **given).close(),
        {"port": 0, "browser": False},
    ),
    "vectors.inspect": lambda p: (vectors.inspect, {"location": p.folder / "spots.zv"}),
    "vectors.validate": lambda p: (vectors.validate, {"location": p.folder / "spots.zv"}),
    "open_vectors": lambda p: (open_vectors, {"location": p.folder / "spots.zv"}),
    "VectorStore.read": lambda p: (open_vectors(p.folder / "spots.zv").read, {}),
    "VectorStore.box": lambda p: (open_vectors(p.folder / "spots.zv").box, {"lo": [0, 0, 0], "hi": [1, 1, 1]}),
    "VectorStore.objects": lambda p: (open_vectors(p.folder / "spots.zv").objects, {"ids": [3]}),
    "VectorStore.group": lambda p: (open_vectors(p.folder / "spots.zv").group, {"group": 0}),
    "make_geometry": lambda p: (make_geometry, {"shapes": spots()}),
    "ChunkingOptions": lambda p: (
        functools.wraps(ChunkingOptions, updated=())(lambda **given: make_geometry(spots(), ChunkingOptions(**given))),
        {},
    ),
    "vectors.write": lambda p: (
        fresh(p, write_vectors, "location", ".zv"),
        {"geometry": make_geometry(spots()), "location": "free"},
    ),
    "vectors.convert": lambda p: (
        convert,
        {"source": p.folder / "spots.zv", "target": p.folder / "out.ply", "how": Conversion(overwrite=True)},
    ),
    "vectors.read_file": lambda p: (read_file, {"path": p.folder / "third.h5ad"}),
    "anndata.validate": lambda p: (anndata_rules.validate, {"path": p.folder / "third.h5ad"}),
    "anndata.inspect": lambda p: (anndata_rules.inspect, {"path": p.folder / "third.h5ad"}),
    "cxg.validate": lambda p: (cxg.validate, {"path": p.folder / "third.h5ad"}),
    "cxg.inspect": lambda p: (cxg.inspect, {"path": p.folder / "third.h5ad"}),
}
FUNCTIONS |= {
    f"make_view({name})": lambda p, name=name: (  # type: ignore[misc]
        lambda given: viewer.make_view(p.folder / "z", p.query, **{name: given}),
        {"given": None},
    )
    for name in typing.get_type_hints(ViewOptions)
}


@pytest.mark.filterwarnings("ignore:No cell has")
@pytest.mark.filterwarnings("ignore:Scores are missing")
@pytest.mark.filterwarnings("ignore:InferenceDataSet:DeprecationWarning")
@pytest.mark.parametrize("name", [*CALLS, *FUNCTIONS])
def test_wrong_arguments_are_refused_by_name(
    places: Places, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only errors of `errors.py` come out; none takes a page to say, or shows where an object is in memory."""
    monkeypatch.chdir(tmp_path)
    call, given = (CALLS | FUNCTIONS)[name](places)
    for argument, wrong in itertools.product(arguments_of(call, given), WRONG):
        if name == "snapshot" and wrong is None:
            continue
        try:
            spent(call(**{**given, argument: wrong}))
        except AtlasError as error:
            said = str(error)
            if len(said) > 1500 or " at 0x" in said:
                pytest.fail(f"{name}({argument}=...) says: {said}")


@pytest.mark.parametrize("cls", [ra.RaggedAtlas, ra.AtlasView, ra.Query, Dataset])
def test_no_public_call_is_left_out(cls: type) -> None:
    """Each public method that takes arguments is in the table above."""
    in_table = {name.rpartition(".")[2] for name in CALLS}
    exempt = {"find", "to_mudata"}  # made from a catalog; takes what to_anndata takes
    for name, member in inspect.getmembers(cls, callable):
        if not name.startswith("_") and len(inspect.signature(member).parameters) > 1:
            assert name in in_table | exempt, f"{cls.__name__}.{name}"


def test_no_public_function_is_left_out() -> None:
    """Each function that the package and its wings export is in the table above."""
    for module, prefix in ((ra, ""), (results, ""), (viewer, ""), (vectors, "vectors.")):
        names = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
        assert [name for name in names if not {prefix + name, f"{name} function"} & {*FUNCTIONS}] == []


def test_the_message_names_the_argument_and_the_near_word(places: Places) -> None:
    """A word of a closed set is refused with the words there are and the nearest; a wrong type with what is taken."""
    for act, message in (
        (lambda: places.atlas.add(places.folder / "third.h5ad", on_duplicate="skpi"), "did you mean 'skip'"),  # type: ignore[arg-type]
        (lambda: places.atlas.validate("Deep"), "'quick', 'rows', 'files' or 'deep', not 'Deep'; did you mean 'deep'"),  # type: ignore[arg-type]
        (lambda: places.atlas.gc(grace=5), "grace as a datetime.timedelta, not 5"),  # type: ignore[arg-type]
        (lambda: places.atlas.gc(grace=dt.timedelta(-1)), "grace as a datetime.timedelta of 0 or more"),
        (lambda: places.atlas.features(5), "space as text, not 5"),  # type: ignore[arg-type]
        (lambda: places.atlas.checkout(None), "version as a whole number or text, not None"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match=message):
            act()
    with pytest.raises(TypeError):
        places.atlas.features(5)  # type: ignore[arg-type]


def test_long_and_unprintable_names_are_refused_at_once(places: Places) -> None:
    """A name that no file system, table or terminal takes is refused before anything is written."""
    for name in ("x" * 300, "a\nb"):
        for act in (
            lambda name=name: places.atlas.add(places.folder / "third.h5ad", name, dry_run=True),
            lambda name=name: places.atlas.snapshot(name),
        ):
            with pytest.raises(NameRefusedError):
                act()
    with pytest.raises(NameRefusedError, match="name of a feature space"):
        places.atlas.register_space(ra.FeatureSpace("x" * 300, ra.PointerKind.DENSE))


def test_the_newest_snapshot_is_called_latest(places: Places) -> None:
    """`latest` is the newest snapshot, and no snapshot may be labelled so."""
    assert places.atlas.checkout("latest").record.version == places.atlas.list_versions()[-1].version
    with pytest.raises(NameRefusedError, match="latest"):
        places.atlas.snapshot("latest")
    with pytest.raises(NotFoundError):
        places.atlas.checkout("Latest!")
