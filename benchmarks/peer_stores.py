"""Make and read the stores of peers for `stores.py`; run by the interpreters of their environments.

``peer_stores.py SYSTEM make STORE FILE...`` writes the store, ``peer_stores.py SYSTEM read ADDRESS BUCKET/PREFIX SEED`` prints the steps of
an epoch as `stores.perform` does, ``peer_stores.py SYSTEM commit ADDRESS BUCKET/PREFIX FILE...`` those of making a store and of a commit for each file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 512
LOGIN = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


def step(name: str, action: Callable[[], Any], cells: Callable[[Any], int] = lambda _: 0) -> Any:
    """Run an action, print name, seconds, processor seconds and cells, and wait for a line."""
    began, worked = time.perf_counter(), time.process_time()
    result = action()
    took = [time.perf_counter() - began, time.process_time() - worked]
    print(json.dumps([name, *took, cells(result)]), flush=True)
    sys.stdin.readline()
    return result


def make_annbatch(store: str, *files: str) -> None:
    """Write the shuffled collection with annbatch's defaults."""
    import annbatch
    import numpy as np

    annbatch.DatasetCollection(store).add_adatas(files, rng=np.random.default_rng(0))


def read_annbatch(address: str, place: str, seed: str) -> None:
    """Iterate over one epoch with annbatch's own sizes of chunks: 512 neighbours, 32 of them at once."""
    import annbatch
    import anndata as ad
    import numpy as np
    import zarr
    from obstore.store import S3Store
    from zarr.storage import ObjectStore

    bucket, prefix = place.split("/", 1)
    login: dict[str, Any] = {**LOGIN, "endpoint": address, "client_options": {"allow_http": True}}
    store = ObjectStore(S3Store(bucket, prefix=prefix, **login), read_only=True)

    def load(group: Any) -> ad.AnnData:
        return ad.AnnData(X=ad.io.sparse_dataset(group["X"]), obs=ad.io.read_elem(group["obs"])[["cell_type"]])

    def begin() -> Any:
        collection = annbatch.DatasetCollection(zarr.open_group(store, mode="r"), mode="r")
        loader = annbatch.Loader(
            batch_size=BATCH,
            chunk_size=512,
            preload_nchunks=32,
            shuffle=True,
            preload_to_gpu=False,
            rng=np.random.default_rng(int(seed)),
        )
        return loader.use_collection(collection, load_adata=load)

    loader = step("open and loader", begin)
    step("epoch", lambda: sum(batch["X"].shape[0] for batch in loader), int)


def make_soma(store: str, *files: str) -> None:
    """Write the files as one experiment."""
    import anndata as ad
    import tiledbsoma.io

    adata = ad.concat([ad.read_h5ad(file) for file in files], index_unique="-")
    tiledbsoma.io.from_anndata(store, adata, measurement_name="RNA")


def _soma_context(address: str) -> Any:
    import tiledbsoma

    config = {
        "vfs.s3.endpoint_override": address.removeprefix("http://"),
        "vfs.s3.scheme": "http",
        "vfs.s3.use_virtual_addressing": "false",
        "vfs.s3.region": LOGIN["region"],
        "vfs.s3.aws_access_key_id": LOGIN["access_key_id"],
        "vfs.s3.aws_secret_access_key": LOGIN["secret_access_key"],
    }
    return tiledbsoma.SOMATileDBContext(tiledb_config=config)


def read_soma(address: str, place: str, seed: str) -> None:
    """Iterate over one epoch with tiledbsoma-ml's own sizes: runs of 64 cells, 65,536 cells at once."""
    import tiledbsoma
    import tiledbsoma_ml

    context = _soma_context(address)
    opened = step("open", lambda: tiledbsoma.Experiment.open(f"s3://{place}", context=context))
    with opened as experiment, experiment.axis_query(measurement_name="RNA") as query:

        def begin() -> Any:
            return tiledbsoma_ml.ExperimentDataset(
                query,
                layer_name="data",
                obs_column_names=["cell_type"],
                batch_size=BATCH,
                shuffle=True,
                seed=int(seed),
                return_sparse_X=True,
            )

        def sizes(dataset: Any) -> Iterator[int]:
            for matrix, _ in tiledbsoma_ml.experiment_dataloader(dataset):
                yield matrix.shape[0]

        dataset = step("loader", begin)
        step("epoch", lambda: sum(sizes(dataset)), int)


def commit_homeobox(address: str, place: str, *files: str) -> None:
    """Register the features of each file and add it, as its documentation does; then optimize and snapshot."""
    import anndata as ad
    import homeobox as hox
    import pandas as pd
    import polars as pl
    from peer_homeobox_schemas import CellSchema, GeneFeature

    space = "gene_expression"
    login = {**LOGIN, "endpoint": address, "client_options": {"allow_http": True}}
    # LanceDB does not get the options of the client.
    os.environ["AWS_ALLOW_HTTP"] = "true"

    def create() -> Any:
        return hox.create_or_open_atlas(
            f"s3://{place}", {"cells": CellSchema}, "datasets", hox.DatasetSchema,
            registry_schemas={space: GeneFeature}, store_kwargs=login,
        )  # fmt: skip

    atlas = step("create", create)

    def add(file: str, name: str) -> None:
        adata = ad.read_h5ad(file)
        adata.var = pd.DataFrame({"gene_id": adata.var_names.to_numpy(), "gene_symbol": ""}, index=adata.var_names)
        GeneFeature.compute_stable_uids(adata.var)
        atlas.register_features(space, pl.from_pandas(adata.var))
        adata.obs = pd.DataFrame({"cell_type": adata.obs["cell_type"].astype(str)}, index=adata.obs_names)
        record = hox.DatasetSchema(zarr_group=name, feature_space=space, n_rows=adata.n_obs)
        hox.add_from_anndata(atlas, adata, field_name=space, zarr_layer="counts", dataset_record=record)

    for number, file in enumerate(files):
        step(f"dataset {number + 1}", lambda file=file, number=number: add(file, f"d{number}"))

    def snapshot() -> None:
        atlas.optimize()
        atlas.snapshot()

    step("optimize and snapshot", snapshot)


def commit_soma(address: str, place: str, *files: str) -> None:
    """Write the first file as an experiment, and append the others, as its documentation does."""
    import anndata as ad
    import tiledbsoma.io

    context = _soma_context(address)
    uri, names = f"s3://{place}", {"measurement_name": "RNA"}

    def add(number: int, file: str) -> None:
        adata = ad.read_h5ad(file)
        # It appends no embeddings.
        del adata.obsm
        if not number:
            tiledbsoma.io.from_anndata(uri, adata, context=context, **names)
            return
        mapping = tiledbsoma.io.register_anndatas(
            uri, [adata], obs_field_name="obs_id", var_field_name="var_id", context=context, **names
        )
        mapping.prepare_experiment(uri, context=context)
        tiledbsoma.io.from_anndata(uri, adata, registration_mapping=mapping, context=context, **names)

    for number, file in enumerate(files):
        step(f"dataset {number + 1}", lambda file=file, number=number: add(number, file))


def commit_icechunk(address: str, place: str, *files: str) -> None:
    """Commit the three arrays of the matrix of each file, a chunk each."""
    import icechunk
    import numpy as np
    import zarr

    bucket, prefix = place.split("/", 1)
    storage = icechunk.s3_storage(
        bucket=bucket, prefix=prefix, region=LOGIN["region"], endpoint_url=address, allow_http=True, force_path_style=True,
        access_key_id=LOGIN["access_key_id"], secret_access_key=LOGIN["secret_access_key"],
    )  # fmt: skip
    repository = step("create", lambda: icechunk.Repository.create(storage))
    values = np.random.default_rng(0).integers(0, 20_000, 125_000).astype(np.int32)

    def commit(name: str) -> None:
        session = repository.writable_session("main")
        group = zarr.create_group(session.store, path=name)
        for key, array in {"data": values, "indices": values, "indptr": values[:251]}.items():
            group.create_array(key, data=array, chunks=array.shape)
        session.commit(name)

    for number in range(len(files)):
        step(f"dataset {number + 1}", lambda number=number: commit(f"d{number}"))


if __name__ == "__main__":
    steps = {
        ("annbatch", "make"): make_annbatch,
        ("annbatch", "read"): read_annbatch,
        ("tiledbsoma-ml", "make"): make_soma,
        ("tiledbsoma-ml", "read"): read_soma,
        ("homeobox", "commit"): commit_homeobox,
        ("tiledbsoma", "commit"): commit_soma,
        ("icechunk", "commit"): commit_icechunk,
    }
    steps[sys.argv[1], sys.argv[2]](*sys.argv[3:])
