"""Annotations: what an analysis found out about cells comes back as cell columns, in one commit, and can be undone."""

import itertools
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raggedatlas import RaggedAtlas
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    ConflictError,
    CorruptError,
    DuplicateError,
    NotFoundError,
    SchemaError,
    SourceError,
)
from raggedatlas.ingest.annotations import UidIndex
from raggedatlas.model.assets import ANNOTATION_KEY, annotation_columns
from raggedatlas.model.ids import new_uids
from raggedatlas.store.tables import Tables
from support.atlases import small_anndata
from support.hypothesis_profile import examples


@pytest.fixture
def atlas(tmp_path: Path) -> RaggedAtlas:
    made = RaggedAtlas.create(tmp_path / "a")
    made.add([small_anndata(1, 8), small_anndata(2, 6)], organism="human", progress=False)
    return made


def query(atlas: RaggedAtlas) -> Any:
    return atlas.checkout(atlas.snapshot()).query()


def obs_of(atlas: RaggedAtlas) -> pd.DataFrame:
    frame: pd.DataFrame = query(atlas).to_pandas()
    return frame


def test_the_way_back(atlas: RaggedAtlas) -> None:
    """Clusters of an AnnData from a query come back with categories, order and colors, and can be filtered by."""
    adata = query(atlas).to_anndata()
    labels = np.array(["b", "a", None] * 5)[: adata.n_obs]
    adata.obs["leiden"] = pd.Categorical(labels, categories=["b", "c", "a"], ordered=True)
    adata.uns["leiden_colors"] = ["#111111", "#222222", "#333333"]
    adata.obs["score"] = np.where(np.arange(adata.n_obs) % 2, np.nan, 0.5).astype(np.float32)
    report = atlas.annotate(adata)
    assert (report.name, report.status, report.n_cells, report.snapshot) == ("annotation", "added", 14, 1)
    assert {c.name: (c.status, c.n_values) for c in report.columns if c.status != "unchanged"} == {
        "leiden": ("new", 10), "score": ("new", 7),
    }  # fmt: skip
    back = query(atlas).to_anndata()
    pd.testing.assert_series_equal(back.obs["leiden"], adata.obs["leiden"].cat.remove_unused_categories())
    pd.testing.assert_series_equal(back.obs["score"], adata.obs["score"])
    assert list(back.uns["leiden_colors"]) == ["#111111", "#333333"]
    assert query(atlas).where(leiden="a").count() == query(atlas).where("leiden = 'a'").count() == 5
    listed = atlas.annotations().loc["annotation"]
    assert (listed["columns"], listed["snapshot"], listed["source"], listed["n_values"]) == (
        "leiden, score", 1, "AnnData", 17,
    )  # fmt: skip
    assert not atlas.validate("deep")


@pytest.mark.long
def test_the_same_again_writes_nothing(atlas: RaggedAtlas) -> None:
    """A call that is repeated finds its values there: nothing is written twice."""
    adata = query(atlas).to_anndata()
    adata.obs["leiden"] = pd.Categorical(["0", "1"] * 7)
    atlas.annotate(adata)
    version = atlas._catalog.tables.version("cells")
    assert atlas.annotate(adata).status == "unchanged"
    assert atlas.annotate(adata, columns=["leiden"], on_conflict="replace").status == "unchanged"
    assert atlas._catalog.tables.version("cells") == version
    assert list(atlas.annotations().index) == ["leiden"]


@pytest.mark.parametrize("policy", ["error", "replace", "keep"])
def test_conflicts(atlas: RaggedAtlas, policy: Any) -> None:
    """Where a cell has another value the caller decides; missing values say nothing."""
    before = obs_of(atlas)
    new = before["cell_type"].astype(object).copy()
    new.iloc[0], new.iloc[1] = "Z", None
    frame = pd.DataFrame({"cell_type": new})
    if policy == "error":
        with pytest.raises(SourceError, match=r"1 cells have another value of 'cell_type' already.*'Z' here"):
            atlas.annotate(frame)
        pd.testing.assert_frame_equal(obs_of(atlas), before)
        return
    report = atlas.annotate(frame, "mine", on_conflict=policy)
    after = obs_of(atlas)
    expected = before["cell_type"].astype(object).copy()
    if policy == "replace":
        expected.iloc[0] = "Z"
        assert report.columns[0].n_replaced == 1
        assert atlas.diff(1, 2).cells_changed == 1
        assert atlas.diff(1, 2).assets_added["annotations"][0].startswith("mine (")
    else:
        assert (report.status, report.columns[0].n_kept) == ("unchanged", 1)
    assert after["cell_type"].tolist() == expected.tolist()
    pd.testing.assert_frame_equal(atlas.checkout(1).query().to_pandas(), before)


def test_drop_shows_the_columns_below(atlas: RaggedAtlas) -> None:
    """Annotations of one column are undone newest first; what was there before is shown again, exactly."""
    states = [obs_of(atlas)]
    for name in ("one", "two"):
        atlas.annotate(pd.DataFrame({"cell_type": name, "fresh": name}, states[0].index), name, on_conflict="replace")
        states.append(obs_of(atlas))
        assert set(states[-1]["cell_type"]) == {name} == set(states[-1]["fresh"])
    with pytest.raises(ConflictError, match="drop 'two' first"):
        atlas.drop_annotation("one")
    for name in ("two", "one"):
        states.pop()
        assert atlas.drop_annotation(name).notes
        pd.testing.assert_frame_equal(obs_of(atlas), states[-1])
    assert list(atlas.checkout(3).annotations().index) == ["one", "two"]
    with pytest.raises(NotFoundError, match="no annotation 'one'"):
        atlas.drop_annotation("one")


@pytest.mark.long
def test_datasets_that_come_later(atlas: RaggedAtlas) -> None:
    """A column of a later file is seen through the annotation that covers it, and stays when the annotation goes."""
    frame = pd.DataFrame({"cell_type": "mine"}, obs_of(atlas).index)
    atlas.annotate(frame, "mine", on_conflict="replace")
    late = small_anndata(5, 4)
    late.obs["cell_type"] = pd.Categorical(["new", "B", "new", "B"])
    atlas.add(late, "late", organism="human", progress=False)
    after = obs_of(atlas)
    assert after.loc[after["dataset"] == "late", "cell_type"].tolist() == ["new", "B", "new", "B"]
    assert set(after.loc[after["dataset"] != "late", "cell_type"]) == {"mine"}
    atlas.drop_annotation("mine")
    dropped = obs_of(atlas)
    assert dropped.loc[dropped["dataset"] == "late", "cell_type"].tolist() == ["new", "B", "new", "B"]
    assert "mine" not in set(dropped["cell_type"])


@pytest.mark.long
def test_a_column_that_a_later_file_brings_too(atlas: RaggedAtlas) -> None:
    """A name that only an annotation had, and a file has later, holds the values of both."""
    atlas.annotate(pd.DataFrame({"leiden": "0"}, obs_of(atlas).index), "mine")
    late = small_anndata(5, 4)
    late.obs["leiden"] = ["x", "y", "x", "y"]
    atlas.add(late, "late", organism="human", progress=False)
    assert sorted(set(obs_of(atlas)["leiden"])) == ["0", "x", "y"]
    atlas.drop_annotation("mine")
    assert sorted(obs_of(atlas)["leiden"].dropna()) == ["x", "x", "y", "y"]


def sources(frame: pd.DataFrame, folder: Path) -> dict[str, Any]:
    """Every kind of source of one column of labels by uid, and what else a call needs."""
    keyed = frame.rename_axis("uid").reset_index()
    keyed.to_csv(folder / "a.csv", index=False)
    keyed.to_csv(folder / "a.tsv.gz", index=False, sep="\t")
    frame.to_csv(folder / "index.csv")
    frame.to_parquet(folder / "a.parquet")
    labels = [None if pd.isna(label) else label for label in keyed["label"]]
    pa.parquet.write_table(pa.table({"uid": list(keyed["uid"]), "label": labels}), folder / "plain.parquet")
    ad.AnnData(np.zeros((len(frame), 1), np.float32), frame).write_h5ad(folder / "a.h5ad")
    return {
        "frame": frame, "series": frame["label"], "columns": {"uid": list(keyed["uid"]), "label": list(keyed["label"])},
        "arrow": pa.table({"uid": list(keyed["uid"]), "label": labels}),
        **{path.name: path for path in folder.iterdir() if path.is_file()},
    }  # fmt: skip


@pytest.mark.long
def test_every_source_gives_the_same(tmp_path: Path, atlas: RaggedAtlas) -> None:
    """Frames, Series, Arrow, mappings, CSV, TSV, Parquet and AnnData files write the same values."""
    (tmp_path / "files").mkdir()
    frame = pd.DataFrame({"label": ["0a", "b", None, "NA?"] * 3}, obs_of(atlas).index[:12])
    for i, (kind, source) in enumerate(sources(frame, tmp_path / "files").items()):
        report = atlas.annotate(source, columns={"label": f"label{i}"})
        assert (report.status, report.n_cells, report.columns[0].n_values) == ("added", 12, 9), kind
    after = obs_of(atlas)
    expected = [None if pd.isna(value) else value for value in [*frame["label"], None, None]]
    for j in range(i + 1):
        found = after[f"label{j}"].astype(object)
        assert [None if pd.isna(value) else value for value in found] == expected, j
    names = list(atlas.annotations().index)
    assert {"a", "a-2", "index", "plain", "label0", "label1"} <= {*names}


@pytest.mark.long
def test_quoted_digits_are_labels(tmp_path: Path, atlas: RaggedAtlas) -> None:
    """Digits are text in a file of labels that quotes every field, as the viewer saves it, and numbers without quotes."""
    uids = obs_of(atlas).index[:2]
    for name, form, expected in [("quoted", '"{}","{}"', ["01", "2"]), ("plain", "{},{}", [1, 2])]:
        rows = [("uid", name), (uids[0], "01"), (uids[1], "2")]
        (tmp_path / f"{name}.csv").write_text("".join(form.format(*row) + "\n" for row in rows))
        atlas.annotate(tmp_path / f"{name}.csv")
        assert obs_of(atlas)[name].loc[uids].tolist() == expected, name


def test_a_name_from_a_file_is_one_that_may_be_given(tmp_path: Path, atlas: RaggedAtlas) -> None:
    """An annotation takes the name of its file in a form that is no uid and is short enough."""
    for number, stem in enumerate(("0123456789abcdef", "n" * 240)):
        frame = pd.DataFrame({"uid": obs_of(atlas).index[:2], f"label{number}": ["a", "b"]})
        frame.to_csv(tmp_path / f"{stem}.csv", index=False)
        atlas.annotate(tmp_path / f"{stem}.csv")
    assert {"dataset-0123456789abcdef", "n" * 200} <= {*atlas.annotations().index}


def test_categories_without_rows_are_refused(atlas: RaggedAtlas) -> None:
    """A table of no chunks has no values to write, whatever its types are."""
    schema = pa.schema({"uid": pa.string(), "label": pa.dictionary(pa.int32(), pa.string())})
    with pytest.raises(SourceError, match="no rows"):
        atlas.annotate(pa.Table.from_batches([], schema=schema))


def test_cells_by_name(atlas: RaggedAtlas) -> None:
    """Rows can name cells as their file did, within a dataset that a column or the call names."""
    names = [str(name) for name in atlas.list_datasets()["name"]]
    obs = obs_of(atlas)
    frame = obs[["cell_name", "dataset"]].assign(label=[f"L{i}" for i in range(len(obs))])
    atlas.annotate(frame.sample(frac=1, random_state=0).reset_index(drop=True), on="cell_name")
    pd.testing.assert_series_equal(obs_of(atlas)["label"], frame["label"], check_dtype=False)
    one = frame[frame["dataset"] == names[1]].set_index("cell_name")[["label"]].rename(columns={"label": "other"})
    atlas.annotate(one, on="cell_name", dataset=names[1])
    assert obs_of(atlas)["other"].notna().sum() == len(one)


@pytest.mark.long
def test_members_of_obsm_become_results(atlas: RaggedAtlas) -> None:
    """An embedding comes back as a result of its name; the same again is left alone, another is refused or replaces it."""
    adata = query(atlas).to_anndata()
    adata.obsm["X_umap"] = np.arange(28, dtype=np.float32).reshape(14, 2)
    report = atlas.annotate(adata[:10].copy(), columns=[], obsm=["X_umap"])
    assert (report.status, report.results[0].n_cells) == ("added", 10)
    assert atlas.annotate(adata[:10].copy(), columns=[], obsm=["X_umap"]).status == "unchanged"
    found = query(atlas).with_results("X_umap").to_anndata().obsm["X_umap"]
    np.testing.assert_array_equal(found[:10], adata.obsm["X_umap"][:10])
    adata.obsm["X_umap"] += 1
    with pytest.raises(DuplicateError, match="other values already"):
        atlas.annotate(adata, columns=[], obsm=["X_umap"])
    atlas.annotate(adata, columns=[], obsm=["X_umap"], on_conflict="replace")
    found = query(atlas).with_results("X_umap").to_anndata().obsm["X_umap"]
    np.testing.assert_array_equal(found, adata.obsm["X_umap"])
    with pytest.raises(NotFoundError, match="no array 'X_tsne' in obsm"):
        atlas.annotate(adata, obsm=["X_tsne"])
    with pytest.raises(SourceError, match="names members of an AnnData"):
        atlas.annotate(adata.obs, obsm=["X_umap"])


BAD: dict[str, tuple[Any, dict[str, Any], type[AtlasError], str]] = {
    "no cell": ({"uid": ["zz"], "x": [1]}, {}, SourceError, "None of the 1 rows names"),
    "one unknown": ({"uid": ["U0", "zz"], "x": [1, 2]}, {}, SourceError, r"1 of 2 rows.*first row 1 \('zz'\)"),
    "twice": ({"uid": ["U0", "U0"], "x": [1, 2]}, {}, SourceError, "has 2 rows"),
    "no uid": ({"x": [1]}, {}, SourceError, "no column 'uid' and no index"),
    "missing uid": ({"uid": [None, "U0"], "x": [1, 2]}, {}, SourceError, "Row 0 has no uid"),
    "no columns": ({"uid": ["U0"]}, {}, SourceError, "no columns beside"),
    "no rows": ({"uid": [], "x": []}, {}, SourceError, "no rows"),
    "no values": ({"uid": ["U0"], "x": [None]}, {}, SourceError, "nothing to write"),
    "no such column": ({"uid": ["U0"], "x": [1]}, {"columns": ["y"]}, NotFoundError, r"no columns \['y'\]"),
    "pointer": ({"uid": ["U0"], "gene_expression": [1]}, {}, AtlasError, "'gene_expression' is taken"),
    "seed field": ({"uid": ["U0"], "x": [1]}, {"columns": {"x": "dataset_uid"}}, AtlasError, "'dataset_uid' is taken"),
    "one name twice": ({"uid": ["U0"], "x": [1], "y": [1]}, {"columns": {"x": "z", "y": "z"}}, AtlasError, "called 'z'"),
    "type": ({"uid": ["U0"], "cell_type": [1]}, {}, SchemaError, r"int64 here and string in the atlas.*columns="),
    "vectors": ({"uid": ["U0"], "x": [[1, 2]]}, {}, SchemaError, "one value for each cell"),
    "mixed": ({"uid": ["U0", "U1"], "x": [1, "a"]}, {}, SourceError, "no table"),
    "no cast": ({"uid": ["U0"], "x": [1]}, {"cast": {"x": "complex"}}, SchemaError, "complex"),
    "name taken": ({"uid": ["U1"], "x": [1]}, {"name": "there"}, DuplicateError, "'there' already"),
    "no dataset": ({"cell_name": ["c0"], "x": [1]}, {"on": "cell_name"}, SourceError, "needs the dataset"),
    "wrong dataset": (
        {"cell_name": ["c0"], "dataset": ["q"], "x": [1]}, {"on": "cell_name"}, NotFoundError, r"no datasets \['q'\]",
    ),
    "dataset of uids": ({"uid": ["U0"], "x": [1]}, {"dataset": "q"}, ArgumentError, "on='cell_name'"),
    "no file": ("nowhere.csv", {}, AtlasError, "nowhere.csv"),
    "what is this": (5, {}, AtlasError, "int"),
}  # fmt: skip


@pytest.mark.long
def test_refusals(atlas: RaggedAtlas) -> None:
    """Bad input is refused in one line, and nothing is written."""
    uids = obs_of(atlas).index
    atlas.annotate(pd.DataFrame({"there": [1]}, uids[:1]), "there")
    version = atlas._catalog.tables.version("cells")
    for case, (source, options, error, said) in BAD.items():
        given = source
        if isinstance(source, dict) and "uid" in source:
            names = [uids[int(u[1:])] if u is not None and u.startswith("U") else u for u in source["uid"]]
            given = {**source, "uid": pa.array(names, pa.string())}
        for dry_run in (True, False):
            with pytest.raises(error, match=said) as caught:
                atlas.annotate(given, dry_run=dry_run, **options)
            assert isinstance(caught.value, AtlasError), case
            assert "\n" not in str(caught.value), case
    assert atlas._catalog.tables.version("cells") == version
    report = atlas.annotate({"uid": [uids[0], "zz"], "x": [1, 2]}, unknown="skip")
    assert (report.n_cells, report.n_unknown) == (1, 1)


UIDS = ["00000000000000ff", "ffffffffffffffff", "0123456789abcdef", "0000000000000000"]
TEXTS = st.lists(
    st.sampled_from([*UIDS, UIDS[0].upper(), "0123456789abcde", "0123456789abcdeg", "", "c0", None]), max_size=12
)


@given(texts=TEXTS, asked=TEXTS, start=st.integers(0, 2))
def test_uids_are_found_as_in_a_dict(texts: list[str | None], asked: list[str | None], start: int) -> None:
    """The first row of each uid is found, further rows of it are known, and what is no uid as the atlas writes them is not found."""
    given_rows = pa.array(texts, pa.string()).slice(start)
    index, rows = UidIndex(given_rows), given_rows.to_pylist()
    first = {uid: rows.index(uid) for uid in rows if uid in UIDS}
    assert index.find(pa.array(asked, pa.string()).slice(start)).tolist() == [
        first.get(uid, -1) for uid in asked[start:]
    ]
    again, firsts = index.repeated()
    expected = {(row, first[uid]) for row, uid in enumerate(rows) if uid in first and row != first[uid]}
    assert {*zip(again.tolist(), firsts.tolist(), strict=True)} == expected


def test_finding_cells_takes_little_memory() -> None:
    """Looking up 400,000 uids holds at most 64 bytes for each, blocks of the atlas's cells included."""
    uids = new_uids(400_000)
    tracemalloc.start()
    try:
        index = UidIndex(uids)
        found = [index.find(uids.slice(start, 8192)) for start in range(0, len(uids), 8192)]
        assert tracemalloc.get_traced_memory()[1] < 64 * len(uids)
    finally:
        tracemalloc.stop()
    assert np.array_equal(np.concatenate(found), np.arange(len(uids)))


def test_cells_of_a_dropped_dataset_are_unknown(atlas: RaggedAtlas) -> None:
    obs = obs_of(atlas)
    gone = obs["dataset"].iloc[0]
    atlas.drop_dataset(gone)
    with pytest.raises(SourceError, match="None of the"):
        atlas.annotate(pd.DataFrame({"x": 1}, obs.index[obs["dataset"] == gone]))


def test_an_anndata_of_a_query_is_not_added_again(atlas: RaggedAtlas) -> None:
    with pytest.raises(DuplicateError, match=r"atlas\.annotate"):
        atlas.add(query(atlas).to_anndata(), "again", progress=False)


@pytest.mark.long
def test_four_annotators_at_once(atlas: RaggedAtlas) -> None:
    """Annotators of different columns all succeed; of one column, one does, and the others see its values."""
    index = obs_of(atlas).index
    outcomes: list[str] = []

    def write(i: int) -> None:
        handle = RaggedAtlas.open(atlas.uri)
        handle.annotate(pd.DataFrame({f"own{i}": i}, index))
        try:
            outcomes.append(handle.annotate(pd.DataFrame({"shared": i}, index)).status)
        except SourceError:
            outcomes.append("conflict")

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["added", "conflict", "conflict", "conflict"]
    after = obs_of(atlas)
    assert [after[f"own{i}"].tolist() for i in range(4)] == [[i] * len(index) for i in range(4)]
    assert after["shared"].nunique() == 1


@pytest.mark.nightly
def test_annotators_next_to_running_adds(atlas: RaggedAtlas) -> None:
    """Adds and annotations that run at once all succeed, and each value is at its cell."""
    index = obs_of(atlas).index

    def add(first: int) -> None:
        for seed in (first, first + 1):
            RaggedAtlas.open(atlas.uri).add(small_anndata(seed, 5), name=f"d{seed}", organism="human", progress=False)

    def annotate(name: str) -> None:
        for i in range(3):
            RaggedAtlas.open(atlas.uri).annotate(pd.DataFrame({f"{name}{i}": range(len(index))}, index))

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(add, 10), pool.submit(add, 20), pool.submit(annotate, "x"), pool.submit(annotate, "y")]
    for job in jobs:
        job.result()
    after = obs_of(atlas)
    assert len(atlas.list_datasets()) == 6
    assert len(after) == len(index) + 4 * 5
    for name in ("x", "y"):
        for i in range(3):
            assert after.loc[index, f"{name}{i}"].tolist() == list(range(len(index)))
            assert after[f"{name}{i}"].notna().sum() == len(index)


ANNOTATE_AND_DIE = """
import os, signal, sys
import pandas as pd
from raggedatlas import RaggedAtlas
from raggedatlas.store.tables import Tables
left = int(sys.argv[3])
def dying(method):
    def call(*given, **named):
        global left
        done = method(*given, **named)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return call
atlas = RaggedAtlas.open(sys.argv[1])
adata = atlas.checkout(1).query().to_anndata()
adata.obs["kind"] = pd.Categorical(["a", "b"] * 7)
adata.obsm["X_umap"] = adata.X[:, :2].toarray().astype("f4")
for name in sys.argv[2].split():
    setattr(Tables, name, dying(getattr(Tables, name)))
atlas.annotate(adata, "labels", columns=["kind"], obsm=["X_umap"])
"""


@pytest.mark.nightly
def test_an_annotator_killed_after_each_write(atlas: RaggedAtlas, tmp_path: Path) -> None:
    """Whatever table it wrote last, the same call finishes what is missing: labels and embedding are there once, at their cells."""
    writes = [
        n
        for n in ("append", "append_alone", "create", "add_columns", "overwrite_if", "merge", "fill_columns", "delete")
        if hasattr(Tables, n)
    ]
    atlas.snapshot()
    n_killed = 0
    for at in itertools.count(1):
        place = tmp_path / f"own{at}"
        shutil.copytree(tmp_path / "a", place)
        command = [sys.executable, "-W", "ignore", "-c", ANNOTATE_AND_DIE, str(place), " ".join(writes)]
        killed = subprocess.run([*command, str(at)], capture_output=True, check=False).returncode
        assert killed in {0, -signal.SIGKILL}
        finished = subprocess.run([*command, "1000"], capture_output=True, check=False, text=True)
        assert finished.returncode == 0, finished.stderr[-600:]
        again = RaggedAtlas.open(place)
        again.repair()
        found = again.checkout(again.snapshot()).query().with_results("X_umap").to_anndata()
        assert found.obs["kind"].tolist() == ["a", "b"] * 7
        np.testing.assert_array_equal(found.obsm["X_umap"], found.X[:, :2].toarray())
        assert list(again.annotations().index) == ["labels"]
        assert again.validate("deep") == []
        if killed == 0:
            break
        n_killed += 1
    assert n_killed >= 2


def test_a_commit_that_fails_leaves_nothing(atlas: RaggedAtlas, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and record are one commit: before it nothing is there, after it the same call finds all of it."""
    frame = pd.DataFrame({"x": 1}, obs_of(atlas).index)
    fill = Tables.fill_columns

    def lost(self: Tables, name: str, make: Any) -> None:
        fill(self, name, make)
        raise OSError("the answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Tables, "fill_columns", lost)
        with pytest.raises(OSError, match="lost"):
            atlas.annotate(frame)
    assert atlas.annotate(frame).status == "unchanged"
    assert len(atlas.annotations()) == 1


def test_a_damaged_record(atlas: RaggedAtlas) -> None:
    """A record that does not parse is an error that names its column and field."""
    atlas.annotate(pd.DataFrame({"x": 1}, obs_of(atlas).index), "mine")
    (column,) = annotation_columns(atlas._catalog.tables.schema("cells"))
    damaged = {column: {ANNOTATION_KEY: b'{"uid": 5'}}
    atlas._catalog.tables.update_field_metadata("cells", lambda _: damaged)
    with pytest.raises(CorruptError, match=rf"{column}.*raggedatlas\.annotation"):
        atlas.annotations()


class Annotated(RuleBasedStateMachine):
    """Annotate, drop, add, drop datasets, snapshot and restore, against frames in memory."""

    @initialize()
    def start(self) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.atlas = RaggedAtlas.create(Path(self.folder.name) / "a")
        self.files = pd.DataFrame({"stage": pd.Series(dtype=object), "dataset": pd.Series(dtype=object)})
        self.stack: list[tuple[str, pd.Series]] = []
        self.past: list[tuple[pd.DataFrame, list[tuple[str, pd.Series]]]] = []
        self.n = 0
        self.add(2)

    def teardown(self) -> None:
        self.folder.cleanup()

    def shown(self) -> pd.Series:
        """The column as results must show it: every annotation over what was below it when it was written, and what came since."""
        values = self.files["stage"].copy()
        for _, written in self.stack:
            values = written.reindex(values.index).combine_first(values)
        return values

    @rule(n=st.integers(1, 3))
    def add(self, n: int) -> None:
        self.n += 1
        adata = small_anndata(self.n, n)
        adata.obs = pd.DataFrame({"stage": [f"f{self.n}", None, "f"][:n]}, index=[f"d{self.n}-{i}" for i in range(n)])
        adata.obs["stage"] = adata.obs["stage"].astype(object)
        self.atlas.add(adata, f"d{self.n}", organism="human", progress=False)
        self.files = pd.concat([self.files, adata.obs.assign(dataset=f"d{self.n}")])

    @rule(data=st.data(), policy=st.sampled_from(["replace", "keep"]))
    def annotate(self, data: st.DataObject, policy: Any) -> None:
        if self.files.empty:
            return
        values = data.draw(
            st.lists(st.sampled_from(["a", "b", None]), min_size=len(self.files), max_size=len(self.files))
        )
        new = pd.Series(values, index=self.files.index, dtype=object, name="stage")
        if new.isna().all():
            return
        frame = pd.DataFrame({"cell_name": self.files.index, "dataset": self.files["dataset"], "stage": new})
        self.n += 1
        before = self.shown()
        report = self.atlas.annotate(frame.reset_index(drop=True), f"n{self.n}", on="cell_name", on_conflict=policy)
        merged = new.combine_first(before) if policy == "replace" else before.combine_first(new)
        merged = merged.reindex(self.files.index)
        has_changed = (merged.fillna("") != before.reindex(self.files.index).fillna("")).any()
        assert report.status == ("added" if has_changed else "unchanged")
        if has_changed:
            self.stack.append((f"n{self.n}", merged.dropna()))

    @rule()
    def drop_annotation(self) -> None:
        if self.stack:
            name, _ = self.stack.pop()
            self.atlas.drop_annotation(name)

    @rule(data=st.data())
    def drop_dataset(self, data: st.DataObject) -> None:
        if not self.files.empty:
            name = data.draw(st.sampled_from(sorted(self.files["dataset"].unique())))
            self.atlas.drop_dataset(name)
            self.files = self.files[self.files["dataset"] != name]

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if self.past:
            at = data.draw(st.integers(0, len(self.past) - 1))
            self.atlas.restore(at + 1)
            self.files, stack = self.past[at]
            self.stack = list(stack)

    @invariant()
    def same(self) -> None:
        found = obs_of(self.atlas)
        self.past.append((self.files, list(self.stack)))
        assert list(self.atlas.annotations().index) == [name for name, _ in self.stack]
        told = dict(zip(found["cell_name"], found["stage"].astype(object), strict=True)) if len(found) else {}
        wanted = self.shown()
        assert {name: None if pd.isna(value) else value for name, value in told.items()} == {
            name: None if pd.isna(value) else value for name, value in wanted.items()
        }


Annotated.TestCase.settings = settings(examples(2), suppress_health_check=list(HealthCheck))
TestAnnotated = Annotated.TestCase
