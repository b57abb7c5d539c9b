"""Four processes add at once, one file all of them, while a fifth takes snapshots: nothing is lost, nothing is there twice."""

import sys
from contextlib import ExitStack
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import ConflictError
from support.anndata_strategies import assert_same
from support.processes import started

WRITERS, EACH = 3, 2
FILES = [(writer, i) for writer in range(WRITERS) for i in range(EACH)] + [(9, 0)]
"""Writer and number of every file; the last is added by all writers."""

ADD = """
import sys
from pathlib import Path
from raggedatlas.atlas import RaggedAtlas
atlas = RaggedAtlas.open(sys.argv[1])
print(atlas.add(Path(sys.argv[2]) / "9-0.h5ad", on_duplicate="skip", progress=False).status)
for file in sorted(Path(sys.argv[2]).glob(f"{sys.argv[3]}-*.h5ad")):
    atlas.add(file, progress=False)
"""

SNAPSHOT = """
import sys
from raggedatlas.atlas import RaggedAtlas
atlas = RaggedAtlas.open(sys.argv[1])
while True:
    number = atlas.snapshot()
    print(number, flush=True)
    if atlas.checkout(number).record.n_datasets == int(sys.argv[2]):
        break
"""


def make(writer: int, i: int) -> ad.AnnData:
    """A dataset whose genes overlap those of the others, with a column that only its writer brings."""
    rng = np.random.default_rng(10 * writer + i)
    genes = [f"g{(writer + i + k) % 13}" for k in range(8)] + [f"own-{writer}-{i}"]
    x = sp.csr_matrix(rng.poisson(1, (40, len(genes))).astype(np.float32))
    obs = pd.DataFrame(
        {"kind": pd.Categorical(rng.choice(["a", f"k{writer}"], 40)), f"only{writer}": rng.normal(size=40)},
        index=[f"cell {j}" for j in range(40)],
    )
    return ad.AnnData(x, obs=obs, var=pd.DataFrame(index=genes))


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[RaggedAtlas, list[int]]:
    """The atlas after all processes have ended, and the numbers that `snapshot` gave."""
    folder = tmp_path_factory.mktemp("together")
    for writer, i in FILES:
        make(writer, i).write_h5ad(folder / f"{writer}-{i}.h5ad")
    atlas = RaggedAtlas.create(str(folder / "atlas"))
    scripts = [(ADD, str(folder), str(writer)) for writer in range(WRITERS)] + [(SNAPSHOT, str(len(FILES)))]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started([sys.executable, "-c", script, atlas.uri, *arguments]))
            for script, *arguments in scripts
        ]
        told = [process.communicate(timeout=240) for process in processes]
    failed = [err for process, (_, err) in zip(processes, told, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    assert sorted(out.strip() for out, _ in told[:-1]) == ["added", *["skipped"] * (WRITERS - 1)]
    return RaggedAtlas.open(atlas.uri), [int(line) for line in told[-1][0].split()]


@pytest.mark.nightly
def test_nothing_is_lost(walked) -> None:  # noqa: ANN001
    """Every dataset is there once and equal to what was added, with exactly its cells and its group."""
    atlas, _ = walked
    expected = {f"{writer}-{i}" for writer, i in FILES}
    assert sorted(atlas.list_datasets()["name"]) == sorted(expected)
    for name in expected:
        writer, i = map(int, name.split("-"))
        assert_same(make(writer, i), atlas.dataset(name).to_anndata())
    assert atlas._catalog.tables.read("cells", ["uid"]).num_rows == 40 * len(expected)
    assert {n for n in atlas._catalog.arrays.list_children() if n != "zarr.json"} == set(atlas.list_datasets().index)


@pytest.mark.nightly
def test_features_are_there_once_and_indices_are_dense(walked) -> None:  # noqa: ANN001
    """No feature is registered twice, and global_index is 0, 1, ..., n - 1."""
    atlas, _ = walked
    atlas.optimize()
    features = atlas.features()
    wanted = {g for writer, i in FILES for g in make(writer, i).var_names}
    assert features.index.is_unique
    assert sorted(features["feature_id"]) == sorted(wanted)
    assert sorted(features["global_index"]) == list(range(len(wanted)))


@pytest.mark.nightly
def test_every_snapshot_is_whole(walked) -> None:  # noqa: ANN001
    """Numbers are distinct, every snapshot validates, and none loses what an earlier one had."""
    atlas, numbers = walked
    assert len(set(numbers)) == len(numbers)
    assert sorted(numbers) == [record.version for record in atlas.list_versions()]
    counts = []
    for number in sorted(numbers):
        view = atlas.checkout(number)
        assert [p for p in view.validate("rows") if p.level == "must"] == []
        counts.append(view.record.n_datasets)
        assert view.record.n_cells == 40 * counts[-1]
        if counts[-1]:
            assert view.query().to_anndata().n_obs == view.record.n_cells
    assert counts == sorted(counts)
    assert counts[-1] == len(FILES)


@pytest.mark.nightly
def test_a_folder_can_be_added_from_a_path_object(walked) -> None:  # noqa: ANN001
    """Adding the same folder again changes nothing: every file in it is recognised."""
    atlas, _ = walked
    reports = atlas.add(Path(atlas.uri.removeprefix("file://")).parent, on_duplicate="skip", progress=False)
    assert {r.status for r in reports} == {"skipped"}
    assert len(reports) == len(FILES)


def test_an_indexed_registry_takes_a_feature_once(tmp_path) -> None:  # noqa: ANN001
    """Of two writers that insert one feature into a registry with an index, having read the same version, one must try again."""
    atlas = RaggedAtlas.create(str(tmp_path / "atlas"))
    atlas.add(make(0, 0), "d", progress=False)
    atlas.optimize()
    tables, name = atlas._catalog.tables, "gene_expression_registry"
    version, known = tables.version(name), tables.read(name)
    new = known.slice(0, 1).set_column(known.column_names.index("uid"), known.schema.field("uid"), [["f" * 16]])
    tables.merge(name, ["uid"], new, update=True, retry=False, read_version=version)
    with pytest.raises(ConflictError):
        tables.merge(name, ["uid"], new, update=True, retry=False, read_version=version)
    assert atlas.features().index.is_unique
