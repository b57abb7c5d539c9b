"""Laws of splits: nobody is lost, values stay together, controls are in proportion; stored, cited, exported, and what leaks."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import raggedatlas as ra
from raggedatlas import Split
from raggedatlas.errors import ArgumentError, NotFoundError, QueryError, SourceError
from support.screens import CONTROL, screen, screens

pytestmark = pytest.mark.fast

CONFIG = """
[datasets]
many = "{folder}/set/"
single = "{folder}/other/{{three,four}}.h5ad"

[training]
many = "train"

[zeroshot]
"many.HEPG2" = "test"

[fewshot."many.RPE1"]
val = ["STAT1"]
test = ["STAT1", "JAK2"]

[fewshot."single.K562"]
test = ["IRF1"]
"""


@pytest.fixture(scope="module")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> ra.RaggedAtlas:
    made = screens(tmp_path_factory.mktemp("split") / "data")
    made.snapshot()
    return made


@pytest.fixture(scope="module")
def query(atlas: ra.RaggedAtlas) -> ra.Query:
    return atlas.checkout(1).query()


@pytest.fixture(scope="module")
def obs(query: ra.Query) -> pd.DataFrame:
    return query.to_pandas()


def parts_of(split: Split, obs: pd.DataFrame) -> pd.Series:
    return split.to_pandas()[split.name].astype(str).reindex(obs.index)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**40), st.sampled_from([None, "donor", ["donor", "batch"], "dose"]))
def test_every_cell_is_dealt_out_once_with_its_like(query: ra.Query, obs: pd.DataFrame, seed: int, column: Any) -> None:
    """All cells have a part, no value of the column is in two, and every part has cells; the same seed deals alike."""
    shares = {"train": 0.6, "test": 0.4}
    split = Split.by(query, column, shares, seed=seed)
    parts = parts_of(split, obs)
    assert split.parts.keys() == shares.keys()
    assert parts.isin([*shares]).all()
    if column is not None:
        columns = [column] if isinstance(column, str) else column
        assert (parts.groupby([obs[name].astype(str) for name in columns]).nunique() == 1).all()
    assert Split.by(query, column, shares, seed=seed).hash == split.hash


def test_shares_are_met(query: ra.Query, obs: pd.DataFrame) -> None:
    """Shares are met as well as whole values allow; a cell keeps its part whatever other cells there are; what is left is for training."""
    by_donor = Split.by(query, "donor", {"val": 0.2, "test": 0.2}).parts
    largest = obs["donor"].value_counts().iloc[0]
    for part, share in {"train": 0.6, "val": 0.2, "test": 0.2}.items():
        assert abs(by_donor[part] - share * len(obs)) <= largest
    single = Split.by(query)
    assert {part: n / len(obs) for part, n in single.parts.items()} == pytest.approx(
        {"train": 0.8, "val": 0.1, "test": 0.1}, abs=0.05
    )
    fewer = Split.by(query.where(dataset="two"))
    pd.testing.assert_series_equal(parts_of(fewer, obs).dropna(), parts_of(single, obs)[obs["dataset"] == "two"])
    assert Split.by(query, seed=1).hash != single.hash


@pytest.mark.parametrize("match", [["dataset"], ["dataset", "cell_type", "batch"], []])
def test_controls_are_dealt_in_proportion(query: ra.Query, obs: pd.DataFrame, match: list[str]) -> None:
    """Each control is in one part, and each part has of each stratum's controls what it has of the other cells."""
    split = Split.by(query, "gene", {"train": 0.5, "test": 0.5}, control={"gene": CONTROL}, match=match)
    parts, control = parts_of(split, obs), obs["gene"] == CONTROL
    assert (parts[~control].groupby(obs["gene"][~control].astype(str)).nunique() == 1).all()
    keys = [obs[name].astype(str) for name in match] or [pd.Series("all", obs.index)]
    for _, stratum in obs.groupby(keys):
        own, controls = parts[stratum.index][~control], parts[stratum.index][control]
        share = (own == "test").mean()
        assert abs((controls == "test").sum() - share * len(controls)) <= 1


def test_held_out_cells(query: ra.Query, obs: pd.DataFrame) -> None:
    """Zero-shot and few-shot: what satisfies the condition, and no control, is held out; controls follow."""
    line = parts_of(Split.hold_out(query, {"cell_type": ["HEPG2"]}), obs)
    assert ((line == "test") == (obs["cell_type"] == "HEPG2")).all()
    few = parts_of(
        Split.hold_out(
            query, {"gene": ["STAT1", "JAK2"], "cell_type": "RPE1"}, val=ra.col("gene") == "IRF1",
            control={"gene": CONTROL}, match=["dataset", "cell_type"],
        ),
        obs,
    )  # fmt: skip
    test = obs["gene"].isin(["STAT1", "JAK2"]) & (obs["cell_type"] == "RPE1")
    control = obs["gene"] == CONTROL
    assert ((few == "test") == test)[~control].all()
    assert ((few == "val") == (obs["gene"] == "IRF1"))[~control].all()
    assert set(few[control & (obs["cell_type"] == "RPE1")]) == {"train", "val", "test"}
    assert "test" not in set(few[control & (obs["cell_type"] != "RPE1")])


def test_targets_are_genes(tmp_path: Path) -> None:
    """A name of a gene means all that name it, and the order of a combination does not count."""
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    made = screen(4)
    made.obs["pair"] = (
        made.obs["gene"].astype(str).map({"SEPT7": "JAK2+SEPT7", "SEPTIN7": "SEPTIN7+JAK2"}).fillna("none")
    )
    made.var_names = ["SEPT7" if name == "GENE0" else name for name in made.var_names]
    atlas.add(made, "four", progress=False)
    atlas.identity.link("SEPT7", "SEPTIN7")
    query = atlas.checkout(atlas.snapshot()).query()
    obs = query.to_pandas()
    split = parts_of(Split.hold_out(query, {"gene": "SEPTIN7"}, targets="gene"), obs)
    assert ((split == "test") == obs["gene"].isin(["SEPT7", "SEPTIN7"])).all()
    pairs = parts_of(Split.hold_out(query, {"pair": ["SEPTIN7+JAK2"]}, targets="pair", separator="+"), obs)
    assert ((pairs == "test") == (obs["pair"] != "none")).all()
    with pytest.raises(QueryError, match=r"No cell has a 'gene' that names \['OAS1'\]"):
        Split.hold_out(query, {"gene": ["STAT1", "OAS1"]}, targets="gene")


def test_a_stored_split(tmp_path: Path) -> None:
    """A split is a column with its recipe: pinned by snapshots, shown by `diff`, read back equal, and a condition of queries."""
    atlas = screens(tmp_path / "data")
    query = atlas.checkout(atlas.snapshot()).query()
    split = Split.by(query, "donor", {"train": 0.5, "test": 0.5})
    atlas.annotate(split)
    second = Split.by(query, "batch", {"train": 0.5, "test": 0.5}, name="by_batch")
    before = atlas.snapshot()
    atlas.annotate(second)
    view = atlas.checkout(atlas.snapshot())
    assert "by_batch" in str(atlas.diff(before, view.version))
    stored = Split.of(view.query())
    assert stored == split
    assert stored.recipe["column"] == "donor"
    assert stored.recipe["hash"] == f"sha256:{split.hash}"
    assert stored.recipe["snapshot"] == 1
    test = view.query().split("test").to_pandas()
    assert sorted(test.index) == split.part("test").to_pylist()
    both = view.query().split("train", "test").split("train", name="by_batch").count()
    assert both == len(set(second.part("train").to_pylist()))
    assert Split.of(view.query().where(dataset="two")) != split
    with pytest.raises(QueryError, match=r"no part 'val'; it has \['test', 'train'\]"):
        view.query().split("val")
    with pytest.raises(QueryError, match="holds no split"):
        view.query().split("train", name="dose")
    with pytest.raises(QueryError, match="no column 'by_batch'"):
        atlas.checkout(before).query().split("train", name="by_batch")


def test_files(query: ra.Query, tmp_path: Path) -> None:
    """A split comes back from CSV and TOML; its hash is that of sorted lines; a changed file is refused."""
    split = Split.hold_out(query, {"cell_type": np.array(["K562"])}, name='#1 a, "name"')
    for ending, read in (("csv", Split.from_frame), ("toml", Split.from_toml)):
        path = tmp_path / f"s.{ending}"
        split.write(path)
        again = read(path)
        assert again.recipe == (split.recipe if ending == "toml" else {"method": "from_frame"})
        assert (again, again.name) == (split, '#1 a, "name"')
        changed = path.read_text().replace("test", "val", 2)
        path.write_text(changed)
        with pytest.raises(SourceError, match=r"was changed since|has no column|no split that"):
            read(path)
    split.write(tmp_path / "s.csv")
    lines = sorted((tmp_path / "s.csv").read_text().splitlines(keepends=True)[2:])
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == split.hash
    with pytest.raises(ArgumentError, match=r"\.csv or \.toml"):
        split.write(tmp_path / "s.txt")


def test_frames() -> None:
    """Tables of all kinds name the parts; cells without one are left out, and what is no split is refused."""
    uids = [f"{i:016x}" for i in range(4)]
    parts = ["train", None, "train+test", "test"]
    series = pd.Series(parts, index=uids, name="fold")
    for frame in (
        series,
        series.to_frame(),
        pa.table({"uid": uids, "fold": parts}),
        {"uid": uids, "fold": series.tolist()},
    ):
        split = Split.from_frame(frame)
        assert (split.parts, len(split), split.name) == ({"test": 2, "train": 2}, 3, "fold")
    assert split.contains(pa.array([uids[2], "f" * 16, uids[0]]), "test").tolist() == [True, False, False]
    for frame, message in (
        (pd.DataFrame({"a": ["x"], "b": ["y"]}, index=uids[:1]), "name that of the parts"),
        ({"uid": [uids[0], uids[0]], "s": ["a", "b"]}, "appears twice"),
        ({"uid": uids[:1], "s": [None]}, "no cell"),
        ({"cell": uids[:1], "s": ["a"]}, "no column 'uid'"),
        ({"uid": [None], "s": ["a"]}, "have no uid"),
        ({"uid": uids[:1], "s": ["a,b"]}, "is no name of a part"),
        ({"uid": uids[:1], "s": ["a+"]}, "is no name of a part"),
    ):
        with pytest.raises(SourceError, match=message):
            Split.from_frame(frame)
    with pytest.raises(SourceError, match="no column 'part'"):
        Split.from_frame(series, "part")
    with pytest.raises(NotFoundError, match="not 'val'"):
        split.part("val")


def test_leakage(tmp_path: Path) -> None:
    """Values, cells, names and counts that stand in two parts are listed, and nothing else."""
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    one = screen(5, 60)
    atlas.add(one, "one", progress=False)
    # Three cells of `one` again, their genes in another order, one with another count.
    again = one[[3, 4, 5]].copy()[:, ::-1].copy()
    again.obs_names = ["new0", "new1", "s5-5"]
    again.X[1, 0] += 1
    atlas.add(again, "again", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    obs = query.to_pandas()
    place = {(row.dataset, row.cell_name): uid for uid, row in zip(obs.index, obs.itertuples(), strict=True)}
    parts = pd.Series("train", obs.index, name="split")
    parts[obs["dataset"] == "again"] = "test"
    split = Split.from_frame(parts)
    found = split.leakage(query, ["batch"])
    assert set(found.loc[found["kind"] == "batch", "value"]) == set(again.obs["batch"])
    assert found.loc[found["kind"] == "cell_name", "value"].tolist() == ["s5-5"]
    same = found[found["kind"] == "values"]
    assert len(same) == 2
    assert (same[["test", "train"]] == 1).all().all()
    wanted = {place["one", "s5-3"], place["one", "s5-5"], place["again", "new0"], place["again", "s5-5"]}
    assert {text.split()[-1] for text in same["value"]} <= wanted
    assert "values" not in set(split.leakage(query, ["batch"], counts=False)["kind"])
    parts.iloc[0] = "test+train"
    both = Split.from_frame(parts).leakage(query, [])
    assert both.loc[both["kind"] == "cell", "value"].tolist() == [obs.index[0]]
    # Columns and parts called as what the table or its making has.
    atlas.annotate(pd.DataFrame({"cell": "a", "values": "b"}, obs.index), "names")
    named = Split.from_frame(parts.str.replace("train", "row")).leakage(
        atlas.checkout(atlas.snapshot()).query(), ["cell", "values"]
    )
    assert {obs.index[0], "a", "b"} <= {*named["value"]}
    assert len(named[named["value"].str.startswith("as of the cell")]) == 2
    assert named.loc[named["value"] == "a", "row"].item() == 60
    assert not len(Split.by(query, "donor", {"train": 0.5, "test": 0.5}).leakage(query.where(dataset="one"), ["donor"]))
    assert split.leakage(query)["kind"].isin(["donor", "cell_name", "values"]).all()


def expected_of_config(obs: pd.DataFrame) -> pd.Series:
    """What the sections of `CONFIG` say, cell by cell."""

    def part(cell: Any) -> str | None:
        control = cell.gene == CONTROL
        if cell.dataset == "three":
            return "test+train" if control else "test" if cell.gene == "IRF1" else "train"
        if cell.cell_type == "HEPG2":
            return "test+train" if control else "test"
        if cell.cell_type == "RPE1":
            return "test+train+val" if control else {"STAT1": "test+val", "JAK2": "test"}.get(cell.gene, "train")
        return "train"

    return pd.Series([part(cell) for cell in obs.itertuples()], obs.index, dtype=object)


def test_a_configuration_of_cell_load(atlas: ra.RaggedAtlas, query: ra.Query, obs: pd.DataFrame) -> None:
    """Sections mean what they mean to cell-load; controls are shared as there, or each in one part."""
    folder = Path(atlas.uri).parent
    path = folder / "c.toml"
    path.write_text(CONFIG.format(folder=folder))
    expected = expected_of_config(obs)
    split = Split.from_toml(path, query)
    pd.testing.assert_series_equal(parts_of(split, obs), expected, check_names=False, check_dtype=False)
    named = Split.from_toml(path, query, datasets={"many": ["one", "two"], "single": ["three"]})
    assert named == split
    alone = parts_of(Split.from_toml(path, query, controls="split"), obs)
    control = obs["gene"] == CONTROL
    assert (alone[~control] == expected[~control]).all()
    assert not alone[control].str.contains("+", regex=False).any()
    assert set(alone[control & (obs["cell_type"] == "RPE1")]) == {"train", "val", "test"}
    assert str(folder) not in str(split.recipe)


def test_configurations_that_do_not_fit(query: ra.Query, tmp_path: Path) -> None:
    """Files without sections, unknown datasets and parts, and a missing query are refused by name."""
    path = tmp_path / "c.toml"
    for text, error, message, choices in (
        ("x = ", SourceError, "no TOML", {}),
        ("[datasets]\na = 'b'", SourceError, "none of the sections", {}),
        ("training = 3", SourceError, "is no table", {}),
        ("[training]\nmany = 'train'", QueryError, "is called 'many'", {}),
        ("[training]\none = 'train'", QueryError, "no dataset 'five'", {"datasets": {"one": ["five"]}}),
        ("[zeroshot]\n'one.K562' = 'later'", SourceError, "none of", {}),
        ("[parts]\ntrain = ['a']", SourceError, "no split that", {}),
    ):
        path.write_text(text)
        with pytest.raises(error, match=message):
            Split.from_toml(path, query, **choices)
    path.write_text("[training]\none = 'train'")
    assert Split.from_toml(path, query).parts == {"train": 240}
    with pytest.raises(QueryError, match="pass the query"):
        Split.from_toml(path)
    with pytest.raises(SourceError, match="cannot be read"):
        Split.from_toml(tmp_path / "none.toml", query)


@pytest.mark.filterwarnings("ignore:No cell has")
def test_what_cannot_be_split_is_refused(query: ra.Query) -> None:
    """Shares that are none, too few values, missing values, conditions that hold nothing or a cell twice."""
    for call, message in (
        (lambda: Split.by(query, None, {"train": 1.2}), "sum to at most 1"),
        (lambda: Split.by(query, None, {"train": -0.5, "test": 0.5}), "above 0"),
        (lambda: Split.by(query, None, {"a+b": 0.5}), "hold no"),
        (lambda: Split.by(query, "batch"), "2 values to split by, and there are 3 parts"),
        (lambda: Split.by(query.where(dataset="none"), "batch"), "has no cells"),
        (lambda: Split.by(query, "colour"), "no column 'colour'"),
        (lambda: Split.hold_out(query, {"gene": ["STAT1", "STAT9"]}), "'gene' = 'STAT9'"),
        (lambda: Split.hold_out(query, {"gene": CONTROL}, control={"gene": CONTROL}), "No cell is for 'test'"),
        (lambda: Split.hold_out(query, {"gene": "STAT1"}, val={"cell_type": "RPE1"}), "both test and val"),
    ):
        with pytest.raises(QueryError, match=message):
            call()


@pytest.mark.peers
def test_cell_load_gives_the_same(tmp_path: Path) -> None:
    """The assignment is that of cell-load's own module for the same file."""
    module = pytest.importorskip("cell_load.data_modules")
    atlas = screens(tmp_path / "data")
    query = atlas.checkout(atlas.snapshot()).query()
    path = tmp_path / "c.toml"
    path.write_text(CONFIG.format(folder=tmp_path / "data"))
    peer = module.PerturbationDataModule(
        toml_config_path=str(path), embed_key="X_hvg", num_workers=0, batch_col="batch", pert_col="gene",
        cell_type_key="cell_type", control_pert=CONTROL, batch_size=2, cell_sentence_len=8,
    )  # fmt: skip
    peer.setup()
    found: dict[str, set[str]] = {}
    numbers = {"one": 1, "two": 2, "three": 3}
    for part in ("train", "val", "test"):
        for subset in getattr(peer, f"{part}_datasets"):
            number = numbers[Path(subset.dataset.h5_path).stem]
            for row in np.asarray(subset.indices).tolist():
                found.setdefault(f"s{number}-{row}", set()).add(part)
    obs = query.to_pandas()
    ours = parts_of(Split.from_toml(path, query), obs)
    ours.index = obs["cell_name"].astype(str)
    assert ours.dropna().to_dict() == {name: "+".join(sorted(parts)) for name, parts in found.items()}
