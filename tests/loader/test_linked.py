"""Loaders over linked files: every cell once, blocks along chunks, and the warning about single cells of compressed files."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raggedatlas as ra
from raggedatlas.loader import linked as order_of_linked
from support.atlases import small_anndata
from support.linked_files import WRITERS, write_file


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, ra.AtlasView]":
    """Return a view of an atlas that is linked to a file of each kind, and of one with copies."""
    folder = tmp_path_factory.mktemp("loader")
    found = {}
    for name, copy in {"linked": False, "copied": True}.items():
        atlas = ra.RaggedAtlas.create(folder / name)
        for seed, kind in enumerate(WRITERS):
            file = folder / f"{seed}-{kind}"
            if not file.exists():
                write_file(small_anndata(seed, 20 + seed), folder, str(seed), kind)
            atlas.add(file, f"data-{seed}", organism="human", copy=copy)
        found[name] = atlas.checkout(atlas.snapshot())
    return found


def by_name(loader: ra.Loader) -> dict[str, list[float]]:
    """Return the values of each cell by its name and dataset."""
    found: dict[str, list[float]] = {}
    for batch in loader:
        rows = batch.X.toarray()
        for name, row in zip(batch.labels("cell_name"), rows.tolist(), strict=True):
            assert name not in found
            found[str(name)] = row
    return found


@pytest.mark.filterwarnings("ignore:The matrices of .* are linked by column")
@pytest.mark.parametrize("shuffle", ["full", "blocks", None])
def test_batches_are_those_of_a_copied_atlas(views: "dict[str, ra.AtlasView]", shuffle: Any) -> None:
    """Each cell comes once with its values, whatever the order."""
    found = {}
    for name, view in views.items():
        sizes: Any = {"block_size": 3, "buffer_size": 10} if shuffle == "blocks" else {}
        loader = ra.Loader(view.query(), 7, shuffle=shuffle, obs=["cell_name"], **sizes)
        symbols = {uid: i for i, uid in enumerate(loader.features["gene_expression"].tolist())}
        order = [symbols[uid] for uid in sorted(symbols)]
        found[name] = {cell: [row[i] for i in order] for cell, row in by_name(loader).items()}
    assert found["linked"] == found["copied"]


def test_blocks_end_where_chunks_do(views: "dict[str, ra.AtlasView]") -> None:
    """Of a compressed linked file, no chunk of values begins within a block, but for blocks that hold several small chunks."""
    query = views["linked"].query().where(dataset="data-4")
    loader = ra.Loader(query, 4, shuffle="blocks", block_size=2)
    bounds = loader._order.blocks
    assert bounds is not None
    assert bounds[0] == 0
    assert bounds[-1] == loader.n_cells
    assert (np.diff(bounds) > 0).all()
    (part,) = loader.plan.spaces["gene_expression"].parts
    chunk = part.start // part.groups[0].layers["counts"].spec.chunk_shape[0]
    assert all(chunk[at] != chunk[at - 1] for at in bounds[1:-1].tolist())
    # Blocks are shuffled, and stay together within what is shuffled with each other.
    epochs = [np.concatenate([batch.rows for batch in loader]) for _ in range(2)]
    assert sorted(epochs[0].tolist()) == list(range(loader.n_cells))
    assert epochs[0].tolist() != epochs[1].tolist()


def test_a_copied_query_has_blocks_of_one_size(views: "dict[str, ra.AtlasView]") -> None:
    assert ra.Loader(views["copied"].query(), 4, shuffle="blocks")._order.blocks is None
    # Nor has one over files that are not compressed.
    plain = views["linked"].query().where(dataset=["data-0", "data-2"])
    assert ra.Loader(plain, 4, shuffle="blocks")._order.blocks is None


def test_random_cells_of_compressed_files_are_warned_about(
    views: "dict[str, ra.AtlasView]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where decoded chunks do not fit into memory; the warning names the ways out."""
    compressed = views["linked"].query().where(dataset="data-4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ra.Loader(compressed, 4)
    monkeypatch.setattr(order_of_linked, "KEPT_BYTES", 100)
    with pytest.warns(UserWarning, match=r"'data-4'.*cells per second.*blocks.*materialize"):
        ra.Loader(compressed, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ra.Loader(compressed, 4, shuffle="blocks")
        ra.Loader(views["linked"].query().where(dataset="data-0"), 4)


@pytest.mark.parametrize("shuffle", ["full", "blocks", None])
def test_files_by_column_are_warned_about(views: "dict[str, ra.AtlasView]", shuffle: Any) -> None:
    number = [*WRITERS].index("columns.h5ad")
    with pytest.warns(UserWarning, match=rf"'data-{number}' are linked by column.*pack=True.*materialize.*copy='rows'"):
        ra.Loader(views["linked"].query().where(dataset=f"data-{number}"), 4, shuffle=shuffle)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ra.Loader(views["copied"].query(), 4, shuffle=shuffle)


def test_pack_copies_the_values_first_and_leaves_the_snapshot_as_it_is(tmp_path: Path) -> None:
    """The loader reads from the atlas, even when the file is gone; the snapshot does not."""
    atlas, copied = ra.RaggedAtlas.create(tmp_path / "atlas"), ra.RaggedAtlas.create(tmp_path / "copied")
    files = [write_file(small_anndata(seed, 20), tmp_path, str(seed), kind) for seed, kind in enumerate(WRITERS)]
    for number, file in enumerate(files):
        atlas.add(file, f"data-{number}", copy=False, organism="human")
        copied.add(file, f"data-{number}", organism="human")
    view = atlas.checkout(atlas.snapshot())
    packed = ra.Loader(view.query(), 16, obs=["cell_name"], pack=True, sort=True)
    dataset = ra.CellDataset(view.query(), obs=["cell_name"], pack=True)
    for file in files:
        file.rename(file.with_suffix(".away"))
    expected = by_name(ra.Loader(copied.checkout(copied.snapshot()).query(), 16, obs=["cell_name"]))
    assert {name: sorted(row) for name, row in by_name(packed).items()} == {n: sorted(r) for n, r in expected.items()}
    assert len(by_name(pickle.loads(pickle.dumps(packed)))) == packed.n_cells
    assert dataset[[3, 1]].X.shape[0] == 2
    with pytest.raises(ra.AtlasError, match="linked"):
        view.query().to_anndata()
    assert atlas.materialize() == ()


def test_state_of_a_linked_order_is_not_that_of_a_copied_one(tmp_path: Path) -> None:
    """After materialize, blocks have other sizes, and a position means other cells."""
    file = write_file(small_anndata(1, 40), tmp_path, "a", "gzip.h5ad")
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    atlas.add(file, copy=False, organism="human")
    before = ra.Loader(atlas.checkout(atlas.snapshot()).query(), 4, shuffle="blocks", block_size=2)
    next(iter(before))
    state = before.state_dict()
    atlas.materialize()
    after = ra.Loader(atlas.checkout(atlas.snapshot()).query(), 4, shuffle="blocks", block_size=2)
    with pytest.raises(ra.AtlasError, match="blocks"):
        after.load_state_dict(state)
