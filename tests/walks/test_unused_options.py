"""An option that is given and has no effect beside the others is refused by name, in every public call."""

import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raggedatlas as ra
from raggedatlas.errors import ArgumentError
from raggedatlas.query.dataset import Dataset
from raggedatlas.wings import results, viewer
from support.atlases import small_anndata, write_results
from support.spatial import make_slide

SLIDE = make_slide(4, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An atlas of two datasets, results of its cells, and a file."""
    made = tmp_path_factory.mktemp("unused")
    atlas = ra.RaggedAtlas.create(made / "a")
    atlas.add(small_anndata(1, 12), "d1", organism="human", progress=False)
    atlas.add(SLIDE.data, "slide", progress=False)
    atlas.snapshot("first")
    small_anndata(3, 6).write_h5ad(made / "third.h5ad")
    uids = query(made).to_pandas().index.to_numpy(dtype=object)
    write_results(made / "z", uids, np.arange(2 * len(uids), dtype=np.float32).reshape(-1, 2), model="m")
    return made


def atlas(folder: Path) -> ra.RaggedAtlas:
    return ra.RaggedAtlas.open(folder / "a")


def query(folder: Path) -> ra.Query:
    return atlas(folder).checkout("first").query().where(dataset="d1")


def add(folder: Path, what: Any, **given: Any) -> Any:
    source = {"file": folder / "third.h5ad", "result": folder / "z", "shapes": SLIDE.outlines}[what]
    return atlas(folder).add(source, "new", dry_run=True, progress=False, **given)


def sets(folder: Path, **given: Any) -> Any:
    return ra.SetLoader(query(folder), "cell_type", "others", set_size=2, **given)


def double(values: Any) -> Any:
    """Be a model."""
    return np.asarray(values)[:, :2]


def part(folder: Path) -> ra.ResultPart:
    """Return a part of a run whose folder is not made."""
    return ra.ResultPart(str(folder / "y"), "run", 0)


LINK = {"link": "segment_id", "dataset": "slide"}
FITTED: dict[str, Any] = {
    "n_components": 2, "sample_size": 9, "seed": 1, "target_sum": 10.0, "n_neighbors": 3, "min_dist": 0.5, "metric": "cosine",
}  # fmt: skip

# Call and option -> a call in which the option, given beside the others, has no effect.
UNUSED: dict[str, Callable[[Path], Any]] = {
    "Query.compare tie_correct": lambda f: query(f).compare("cell_type = 'B'", tie_correct=True),
    "Query.score normalize": lambda f: query(f).score({"a": ["GENE1"]}, "aucell", normalize=False),
    "Query.score top": lambda f: query(f).score({"a": ["GENE1"]}, "ulm", top=9),
    "Query.search metric": lambda f: query(f).search("B", column="cell_type", metric="cosine"),
    "Query.write title": lambda f: query(f).write(f / "x.h5ad", title="t"),
    "Query.write schema": lambda f: query(f).write(f / "x.zarr", schema="cellxgene"),
    "RaggedAtlas.annotate dataset": lambda f: atlas(f).annotate({"uid": ["a"], "b": [1]}, on="uid", dataset="d1"),
    "RaggedAtlas.delete_cells condition": lambda f: atlas(f).delete_cells("n_genes > 1", uids=["a"], dry_run=True),
    "RaggedAtlas.drop_asset dataset": lambda f: atlas(f).drop_asset("results", "z", dataset="d1"),
    "RaggedAtlas.validate incremental": lambda f: atlas(f).validate("quick", incremental=True),
    "RaggedAtlas.validate root_hash": lambda f: atlas(f).validate("quick", root_hash="ab"),
    "AtlasView.validate incremental": lambda f: atlas(f).checkout("first").validate("quick", incremental=True),
    "RaggedAtlas.add metric": lambda f: add(f, "result", metric="cosine"),
    "RaggedAtlas.add max_columns": lambda f: add(f, "file", obs=["n_genes"], max_columns=3),
    "RaggedAtlas.add hash": lambda f: add(f, "file", hash="full"),
    "RaggedAtlas.add new_cells": lambda f: add(f, "shapes", new_cells=True),
    "RaggedAtlas.add unknown": lambda f: add(f, "shapes", unknown="skip"),
    "RaggedAtlas.add lacking": lambda f: add(f, "shapes", lacking="allow"),
    "RaggedAtlas.add unassigned": lambda f: add(f, "shapes", **LINK, unassigned="x"),
    "RaggedAtlas.add genes": lambda f: add(f, "shapes", **LINK, genes="x"),
    "Loader block_size": lambda f: ra.Loader(query(f), 4, block_size=2),
    "Loader buffer_size": lambda f: ra.Loader(query(f), 4, shuffle=None, buffer_size=2),
    "Loader n_samples": lambda f: ra.Loader(query(f), 4, n_samples=3),
    "Loader prefetch": lambda f: ra.Loader(query(f), 4, threads=0, prefetch=3),
    "Loader device": lambda f: ra.Loader(query(f), 4, as_="csr", device="cpu"),
    "Loader pin_memory": lambda f: ra.Loader(query(f), 4, as_="dense", pin_memory=True),
    "SetLoader n_sets": lambda f: sets(f, n_sets=3),
    "SetLoader space": lambda f: sets(f, space="x"),
    "SetLoader controls_from": lambda f: sets(f, controls_from=["train"]),
    "SetLoader separator": lambda f: sets(f, separator="+"),
    "SetLoader prefetch": lambda f: sets(f, threads=0, prefetch=3),
    "SetLoader device": lambda f: sets(f, device="cpu"),
    "SetLoader pin_memory": lambda f: sets(f, as_="dense", pin_memory=True),
    "SetLoader sort": lambda f: sets(f, as_="dense", sort=True),
    "Loader sort": lambda f: ra.Loader(query(f), 4, as_="dense", sort=True),
    "CellDataset sort": lambda f: ra.CellDataset(query(f), as_="dense", sort=True),
    "load_results_dataset verb": lambda f: ra.load_results_dataset({}, f / "z", verb="infer"),
    "embedder n_neighbors": lambda f: results.embedder("pca", n_neighbors=3),
    "embedder min_dist": lambda f: results.embedder("pca", min_dist=0.5),
    "embedder seed": lambda f: results.embedder("pca", seed=3),
    "infer device": lambda f: results.infer(double, query(f), f / "y", device="cpu"),
    "infer_part device": lambda f: results.infer_part(double, query(f), part(f), 2, device="cpu"),
    "test device": lambda f: results.test(double, query(f), f / "y", "n_genes", device="cpu"),
    "visualize address": lambda f: viewer.visualize(f / "z", query(f), path=f / "x.html", address="http://x"),
    "visualize columns": lambda f: viewer.visualize(f / "z", query(f), path=f / "x.png", columns=["n_genes"]),
    "visualize colors": lambda f: viewer.visualize(f / "z", query(f), path=f / "x.parquet", colors={}),
    "visualize title": lambda f: viewer.visualize(f / "z", query(f), path=f / "x.parquet", title="t"),
    "visualize theme": lambda f: viewer.visualize(f / "z", query(f), path=f / "x.vitessce", theme="dark"),
    "visualize genes": lambda f: viewer.visualize(f / "z", query(f), path=f / "x.png", genes=["GENE1"]),
    "visualize layer": lambda f: viewer.visualize(f / "z", query(f), path=f / "x.html", layer="counts"),
    "view address": lambda f: viewer.view(f / "z", query(f), browser=False, address="http://x"),
}
UNUSED |= {
    f"{verb.__name__} {option}": lambda f, verb=verb, option=option: verb(  # type: ignore[misc]
        f / "z", f / "y", model=f / "m.npz", **{option: FITTED[option]}
    )
    for verb, options in ((results.pca, [*FITTED][:4]), (results.umap, [*FITTED]))
    for option in options
}

# The other optional arguments: they have an effect whatever else is given, or the call that they do not fit refuses them as unknown.
USED: dict[str, str] = {
    "RaggedAtlas.add": "name on_duplicate dry_run progress executor storage_options obs cast on_clash layers spaces feature_id organism nonfinite duplicate_entries column_order curate genome license embeddings extras copy space as_ output link dataset cells counts layout",
    "RaggedAtlas.add_csc": "space layers executor",
    "RaggedAtlas.materialize": "datasets executor",
    "RaggedAtlas.relink": "path hash storage_options",
    "RaggedAtlas.annotate": "name on columns obsm cast on_conflict unknown dry_run",
    "RaggedAtlas.checkout_latest": "schema store storage_options sources",
    "RaggedAtlas.create": "cell_schema registries spaces codec storage_options",
    "RaggedAtlas.delete_cells": "uids dry_run",
    "RaggedAtlas.diff_files": "other storage_options",
    "RaggedAtlas.drop_geometry": "dataset",
    "RaggedAtlas.expire_snapshots": "older_than keep_last keep_labels dry_run",
    "RaggedAtlas.features": "space",
    "RaggedAtlas.find_datasets_with_features": "space every",
    "RaggedAtlas.gc": "dry_run grace",
    "RaggedAtlas.load_terms": "ontology release",
    "RaggedAtlas.markers": "within layer normalize snapshot executor",
    "RaggedAtlas.map_terms": "ontology confirm on_conflict dry_run",
    "RaggedAtlas.open": "storage_options sources",
    "RaggedAtlas.presence": "features space",
    "RaggedAtlas.publish": "snapshot keep readme license citation require_license storage_options dry_run progress",
    "RaggedAtlas.register_features": "space",
    "RaggedAtlas.register_space": "registry",
    "RaggedAtlas.reindex_registry": "space",
    "RaggedAtlas.snapshot": "label",
    "RaggedAtlas.sync": "values storage_options dry_run progress",
    "RaggedAtlas.validate": "level since executor",
    "RaggedAtlas.verify": "version since root_hash incremental executor",
    "AtlasView.diff_files": "other storage_options",
    "AtlasView.features": "space",
    "AtlasView.find_datasets_with_features": "space every",
    "AtlasView.markers": "within layer normalize executor",
    "AtlasView.presence": "features space",
    "AtlasView.query": "identity on_merge names",
    "AtlasView.sql": "as_",
    "AtlasView.validate": "level since root_hash executor",
    "AtlasView.verify": "version since root_hash incremental executor",
    "Query.aggregate": "layer executor",
    "Query.compare": "reference method layer normalize",
    "Query.count": "by level executor",
    "Query.features": "space orthologs",
    "Query.geometry": "space level budget attributes",
    "Query.join": "how min_datasets orthologs",
    "Query.lazy": "chunk_bytes lazy_obs",
    "Query.map": "executor progress",
    "Query.markers": "within layer normalize executor",
    "Query.order_by": "descending",
    "Query.pseudobulk": "layer min_cells executor",
    "Query.sample": "by seed",
    "Query.score": "method layer min_features unknown executor progress",
    "Query.search": "k",
    "Query.split": "name",
    "Query.test": "layer min_cells executor",
    "Query.to_anndata": "max_bytes",
    "Query.to_mudata": "max_bytes",
    "Query.tree": "ontology executor",
    "Query.where": "condition",
    "Query.with_centroids": "space key",
    "Query.with_results": "missing",
    "Query.within": "space by",
    "Query.write": "executor",
    "Dataset.to_anndata": "space",
    "Dataset.var": "space",
    "clone": "datasets where cache allow_redirects storage_options progress",
    "open": "cache offline allow_redirects anonymous storage_options sources",
    "convert_results": "overwrite promote spot_check progress",
    "copy": "where features layers modality storage_options progress",
    "load_results_dataset": "results_dir",
    "make_transcripts": "attributes",
    "open_sink": "storage_options",
    "open_source": "storage_options",
    "read": "modality storage_options",
    "read_points": "positions columns storage_options",
    "transcripts_to_counts": "genes cells unassigned gene_names",
    "under": "ontology part_of",
    "engine": "inputs batch_size resume progress layers features dtype obs threads overwrite",
    "infer": "weights batch_size progress layers features dtype obs threads overwrite options inputs outputs as_ n_parts executor resume update",
    "infer_part": "weights batch_size layers features dtype obs threads overwrite options inputs outputs as_",
    "lookup": "column",
    "make_view": "cells title color colors columns max_points seed theme axes layer address",
    "neighbors": "k among column metric exact",
    "pca": "progress column model batch_size overwrite",
    "save_to_database": "column metric least_rows least_recall n_queries progress",
    "test": "batch_size progress layers features dtype obs threads overwrite options inputs outputs as_ categories output loss weights",
    "umap": "progress column model batch_size overwrite",
    "view": "cells port browser allow_annotate title color colors columns max_points seed theme axes layer",
    "visualize": "cells overwrite color max_points seed axes",
    "SetLoader": "set_by control match set_size sets split replace min_cells min_controls weights targets seed obs as_ layers features categories dtype "
    "buffers results pack rank world_size even drop_last threads",
    "Loader": "batch_size shuffle seed obs as_ layers features categories dtype buffers results pack rank world_size even drop_last weights balance group sampler threads",
    "CellDataset": "obs as_ layers features categories dtype buffers results pack",
    "ResultDatasetWriter": "overwrite facts resume grace",
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSED)
def test_what_has_no_effect_is_refused(folder: Path, name: str) -> None:
    """The error is an `ArgumentError` of one line that names the option, and nothing is written."""
    before = sorted(folder.iterdir())
    with pytest.raises(ArgumentError, match=name.split()[1]) as refused:
        UNUSED[name](folder)
    assert "\n" not in str(refused.value)
    assert sorted(folder.iterdir()) == before


def public_calls() -> Iterator[tuple[str, Any]]:
    """Yield the functions of the package, of results and of the viewer, and the methods of an atlas, a view, a query and a dataset."""
    for cls in (ra.RaggedAtlas, ra.AtlasView, ra.Query, Dataset):
        for name, member in inspect.getmembers(cls, callable):
            if not name.startswith("_"):
                yield f"{cls.__name__}.{name}", member
    for module in (ra, results, viewer):
        for name in module.__all__:
            member = getattr(module, name)
            if inspect.isfunction(member):
                yield name, member
    yield from (
        ("Loader", ra.Loader),
        ("SetLoader", ra.SetLoader),
        ("CellDataset", ra.CellDataset),
        ("ResultDatasetWriter", ra.ResultDatasetWriter),
    )


def options_of(call: Any) -> list[str]:
    """Return the optional arguments of a call, also those that a typed dictionary lists."""
    found = []
    for parameter in inspect.signature(call).parameters.values():
        hint = parameter.annotation
        if parameter.kind is parameter.VAR_KEYWORD and typing.get_origin(hint) is typing.Unpack:
            found += typing.get_type_hints(typing.get_args(hint)[0])
        elif parameter.default is not parameter.empty:
            found.append(parameter.name)
    return found


def test_every_optional_argument_is_known() -> None:
    """A new option of a public call is entered in one of the two tables above."""
    known = {*UNUSED, *(f"{call} {option}" for call, options in USED.items() for option in options.split())}
    found = {f"{name} {option}" for name, call in public_calls() for option in options_of(call)}
    assert found - known == set()
    assert {name for name in known - found if not name.startswith("Query.write")} == set()
