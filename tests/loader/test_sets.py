"""Laws of sets: of one stratum each, beside controls that match, every cell in its turn, the same on any number of ranks and workers."""

import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

import raggedatlas as ra
from raggedatlas import SetLoader, Split
from raggedatlas.errors import ArgumentError, NotFoundError, QueryError
from raggedatlas.loader.order import NeighborSets, Order, Share, StratumSets, epoch_batches
from support.screens import CONTROL, screen, screens
from support.spatial import make_slide

KEYS = ["gene", "cell_type"]
CONTROLS = {"gene": CONTROL}
MATCH = ["dataset", "cell_type", "batch"]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> ra.AtlasView:
    atlas = screens(tmp_path_factory.mktemp("sets") / "data")
    query = atlas.checkout(atlas.snapshot()).query()
    atlas.annotate(Split.by(query, "gene", {"train": 0.5, "test": 0.5}, control=CONTROLS, match=MATCH))
    return atlas.checkout(atlas.snapshot())


@pytest.fixture(scope="module")
def obs(view: ra.AtlasView) -> pd.DataFrame:
    return view.query().to_pandas()


def rows(batches: Any) -> list[tuple[list[str], list[str]]]:
    return [(batch.uids.tolist(), batch.control.uids.tolist()) for batch in batches]


def quiet(*args: Any, **choices: Any) -> SetLoader:
    with warnings.catch_warnings(action="ignore"):
        return SetLoader(*args, **choices)


@settings(max_examples=12, deadline=None)
@given(
    size=st.integers(1, 12), sets=st.integers(1, 9), seed=st.integers(0, 2**40), replace=st.sampled_from([None, True, False]),
    match=st.sampled_from([[], ["dataset"], MATCH]), keys=st.sampled_from(["gene", KEYS, ["gene", "dose"]]),
    weights=st.sampled_from([None, "equal", "dose"]),
)  # fmt: skip
def test_sets_are_of_one_stratum_beside_controls_that_match(
    view: ra.AtlasView,
    obs: pd.DataFrame,
    size: int,
    sets: int,
    seed: int,
    replace: Any,
    match: Any,
    keys: Any,
    weights: Any,
) -> None:
    """Every set is of one stratum, its controls are controls that agree with it, and without `replace` no cell is in a set twice in vain."""
    loader = quiet(
        view.query(),
        keys,
        CONTROLS,
        match,
        set_size=size,
        sets=sets,
        seed=seed,
        replace=replace,
        weights=weights,
        obs=["donor"],
    )
    names = [*dict.fromkeys([*([keys] if isinstance(keys, str) else keys), *match])]
    treated = obs[obs["gene"] != CONTROL]
    sizes = treated.groupby([treated[name].astype(str) for name in names]).size()
    table = loader.strata
    assert table.set_index([table[name].astype(str) for name in names])["n_cells"].to_dict() == dict(sizes.items())
    seen: Counter[str] = Counter()
    for batch in loader:
        assert len(batch) == len(batch.control) == batch.n_sets * size
        own, compared = obs.loc[batch.uids], obs.loc[batch.control.uids]
        assert (compared["gene"] == CONTROL).all()
        for i in range(batch.n_sets):
            part = slice(i * size, (i + 1) * size)
            for name in names:
                assert set(own[name].iloc[part].astype(str)) == {str(batch.key[name][i])}
            for name in match:
                assert set(compared[name].iloc[part].astype(str)) == {str(batch.key[name][i])}
            if replace is not True:
                n = (
                    sizes[tuple(str(batch.key[name][i]) for name in names)]
                    if len(names) > 1
                    else sizes[str(batch.key[names[0]][i])]
                )
                assert len(set(batch.uids[part])) == min(size, n)
            seen.update(batch.uids[part].tolist())
    assert loader.n_sets == sum(len(uids) for uids, _ in rows(loader)) // size
    if weights is None and replace is None:
        assert set(seen) == set(treated.index)
        assert max(seen.values()) <= max(2, -(-size // sizes.min()))


def test_values_and_masks_are_those_of_the_query(view: ra.AtlasView) -> None:
    """Rows of values, controls and measured masks are those of the cells, with the same features in all batches."""
    data = view.query().to_anndata()
    measured = {uid: data.varm["measured"][uid].to_numpy() for uid in data.varm["measured"].columns}
    for as_ in ("csr", "dense"):
        for batch in quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=7, sets=5, as_=as_):
            for part in (batch.cells, batch.control):
                values = part.X.toarray() if as_ == "csr" else part.X
                np.testing.assert_array_equal(values, data[part.uids].X.toarray())
            expected = np.stack([measured[uid] for uid in data[batch.uids].obs["layout_uid"]])
            np.testing.assert_array_equal(batch.measured, expected)


def test_any_number_of_ranks_has_the_same_sets(view: ra.AtlasView) -> None:
    """Ranks together have the sets of one; with `even`, as many batches each; and the next epoch has others."""
    whole = quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=6, sets=4, seed=3)
    first, second = rows(whole), rows(whole)
    assert first != second
    for even in (None, "pad", "drop"):
        ranks = [
            quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=6, sets=4, seed=3, rank=rank, world_size=3, even=even)
            for rank in range(3)
        ]
        lengths = [len(rank) for rank in ranks]
        assert even is None or len(set(lengths)) == 1
        found = [batch for rank in ranks for batch in rows(rank)]
        assert len(found) == sum(lengths)
        if even is None:
            assert found == first
        else:
            assert all(batch in first for batch in found)
    assert {
        len(uids) for uids, _ in rows(quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=6, sets=5, drop_last=True))
    } == {30}


def test_a_run_resumes_and_goes_on_in_another_process(view: ra.AtlasView) -> None:
    """After a state, and after pickling, the batches are those of an uninterrupted run; a state of other sets is refused."""
    loader = quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=6, sets=4, seed=3)
    expected = [*rows(loader), *rows(loader)]
    loader.set_epoch(0)
    found = []
    for batch in loader:
        found.append((batch.uids.tolist(), batch.control.uids.tolist()))
        if len(found) == 5:
            break
    other = pickle.loads(pickle.dumps(quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=6, sets=4, seed=3)))
    other.load_state_dict(loader.state_dict())
    found += [*rows(other), *rows(other)]
    assert found == expected
    for changed in ({"set_size": 5}, {"match": ["dataset"]}, {"seed": 4}, {"sets": 3}, {"replace": True}):
        choices = {"match": MATCH, "set_size": 6, "sets": 4, "seed": 3, **changed}
        with pytest.raises(QueryError, match="state was taken with"):
            quiet(view.query(), KEYS, CONTROLS, **choices).load_state_dict(loader.state_dict())


def test_mapped_cells_make_the_same_sets(view: ra.AtlasView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells in a file make the sets of cells in memory, and a pickle finds them again without taking them along."""
    choices: dict[str, Any] = {"set_size": 6, "sets": 4, "split": "train", "targets": "gene"}
    expected = rows(quiet(view.query(), KEYS, CONTROLS, MATCH, **choices))
    monkeypatch.setattr("raggedatlas.loader.cells.IN_MEMORY_CELLS", 0)
    monkeypatch.setenv("RAGGEDATLAS_CACHE_DIR", str(tmp_path / "cache"))
    loader = quiet(view.query(), KEYS, CONTROLS, MATCH, **choices)
    assert loader.plan.cells.records is not None
    assert rows(loader) == expected
    sent = pickle.dumps(loader)
    again = pickle.loads(sent)
    again.set_epoch(0)
    assert rows(again) == expected
    assert again.strata.equals(loader.strata)


def test_parts_of_a_split(view: ra.AtlasView, obs: pd.DataFrame) -> None:
    """Cells are of the part, and controls too, unless other parts are named; stored and given splits choose alike."""
    stored = Split.of(view.query())
    parts = stored.to_pandas()["split"].astype(str)
    for split in ("test", ("split", "test"), (stored, "test")):
        alone = quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=6, split=split)
        wide = quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=6, split=split, controls_from=["train"])
        for loader, wanted in ((alone, {"test"}), (wide, {"test", "train"})):
            batches = list(loader)
            assert {parts[uid] for batch in batches for uid in batch.uids} == {"test"}
            assert {parts[uid] for batch in batches for uid in batch.control.uids} == wanted
            cells = {uid for batch in batches for uid in batch.uids}
            assert cells == set(obs.index[(obs["gene"] != CONTROL) & (parts[obs.index] == "test")])
    control = obs["gene"] == CONTROL
    for shared_cells, said in (
        (control, [f"{int(control.sum()):,} controls of 'test' are in other parts"]),
        (~control, []),
    ):
        shared = parts.copy()
        shared[obs.index[shared_cells]] = "test+train"
        loader = quiet(view.query(), KEYS, CONTROLS, MATCH, split=(Split.from_frame(shared), "test"))
        assert [note[: len(text)] for note, text in zip(loader.notes, said, strict=True)] == said
    with pytest.raises(QueryError, match="no part 'val'"):
        SetLoader(view.query(), KEYS, CONTROLS, MATCH, split="val")
    with pytest.raises(NotFoundError, match="not 'val'"):
        SetLoader(view.query(), KEYS, CONTROLS, MATCH, split=(stored, "val"))


def test_strata_without_controls_are_left_out(view: ra.AtlasView) -> None:
    """What has no or too few controls or cells is listed with the reason, warned of, and in no batch."""
    query = view.query().where(~((ra.col("gene") == CONTROL) & (ra.col("cell_type") == "HEPG2")))
    with pytest.warns(UserWarning, match="left out for no controls: 10 of 50 strata"):
        loader = SetLoader(query, KEYS, CONTROLS, MATCH, set_size=4, min_cells=5)
    table = loader.strata
    assert set(table.loc[table["left_out"] == "no controls", "cell_type"]) == {"HEPG2"}
    few = table["left_out"] == "fewer than 5 cells"
    assert (table.loc[few, "n_cells"] < 5).all()
    assert (table.loc[table["left_out"] == "", "n_cells"] >= 5).all()
    assert (table.loc[table["left_out"] != "", "n_sets"] == 0).all()
    assert "HEPG2" not in {line for batch in loader for line in batch.key["cell_type"]}
    strict = quiet(query, KEYS, CONTROLS, MATCH, set_size=10, replace=False)
    assert (strict.strata.query("left_out == ''")[["n_cells", "n_controls"]] >= 10).all().all()


def test_targets_and_combinations(tmp_path: Path) -> None:
    """Names of one gene are one set, and so are combinations in any order, in one column or two."""
    made = screen(4)
    names = made.obs["gene"].astype(str)
    made.obs["pair"] = names.map({"SEPT7": "JAK2+SEPT7", "SEPTIN7": "SEPTIN7+JAK2", CONTROL: CONTROL}).fillna("IRF1")
    made.obs["a"] = names.map({"SEPT7": "SEPT7", "SEPTIN7": "JAK2", CONTROL: CONTROL}).fillna("IRF1")
    made.obs["b"] = names.map({"SEPT7": "JAK2", "SEPTIN7": "SEPTIN7", CONTROL: CONTROL}).fillna("none")
    made.var_names = ["SEPT7" if name == "GENE0" else name for name in made.var_names]
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(made, "four", progress=False)
    atlas.identity.link("SEPT7", "SEPTIN7")
    query = atlas.checkout(atlas.snapshot()).query()
    n = names.value_counts()
    both = int(n["SEPT7"] + n["SEPTIN7"])
    apart = quiet(query, "gene", CONTROLS).strata.set_index("gene")["n_cells"]
    assert apart["SEPT7"] == n["SEPT7"]
    one = quiet(query, "gene", CONTROLS, targets="gene").strata.set_index("gene")["n_cells"]
    assert one["SEPTIN7"] == both
    assert "SEPT7" not in one.index
    pairs = quiet(query, "pair", {"pair": CONTROL}, targets=["pair"], separator="+").strata.set_index("pair")["n_cells"]
    assert pairs["JAK2+SEPTIN7"] == both
    columns = quiet(query, [("a", "b")], {"a": CONTROL, "b": CONTROL}, targets=["a", "b"]).strata
    assert columns.set_index("a+b")["n_cells"].to_dict() == {
        "JAK2+SEPTIN7": both,
        "IRF1+none": int(n[["STAT1", "JAK2", "IRF1"]].sum()),
    }


def test_weights_draw_the_strata(view: ra.AtlasView) -> None:
    """Strata come in proportion to their weights, up to chance, in as many sets as asked for."""
    loader = quiet(view.query(), "gene", CONTROLS, [], set_size=2, sets=50, weights="equal", n_sets=5000)
    seen = Counter(gene for batch in loader for gene in batch.key["gene"])
    assert sum(seen.values()) == 5000
    np.testing.assert_allclose([n / 5000 for n in seen.values()], 1 / 5, atol=0.03)
    loader = quiet(view.query(), "gene", CONTROLS, [], set_size=2, sets=50, weights="dose", n_sets=5000)
    seen = Counter(gene for batch in loader for gene in batch.key["gene"])
    obs = view.query().where(ra.col("gene") != CONTROL).to_pandas()
    sums = obs.groupby(obs["gene"].astype(str))["dose"].sum()
    for gene, share in (sums / sums.sum()).items():
        assert seen[gene] / 5000 == pytest.approx(share, abs=0.03)


def test_others_are_negatives(view: ra.AtlasView) -> None:
    """Contrastive sets are compared with cells of other values that agree in `match`, each in its turn."""
    loader = quiet(view.query(), "cell_type", "others", ["dataset"], set_size=8, sets=4)
    for batch in loader:
        kinds, datasets = batch.control.labels("cell_type"), batch.control.labels("dataset")
        for i in range(batch.n_sets):
            own = slice(i * 8, (i + 1) * 8)
            assert batch.key["cell_type"][i] not in set(kinds[own])
            assert set(datasets[own]) == {batch.key["dataset"][i]}
            assert len(set(batch.control.uids[own])) == 8
    assert loader.strata.set_index("dataset").loc["three", "left_out"] == "no cells of others"


def test_neighbors_in_space(tmp_path: Path) -> None:
    """Each cell comes with the nearest cells of its dataset, nearest first, once in an epoch."""
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    for name, n, seed in (("a", 30, 3), ("b", 12, 4), ("few", 3, 6)):
        slide = make_slide(n, seed=seed, first=500 * seed)
        atlas.add(slide.data, name, progress=False)
        atlas.add(slide.outlines, link="segment_id", dataset=name, progress=False)
    atlas.add(make_slide(4, seed=5, first=900).data, "plain", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    data = query.with_centroids("segmentation_boundary").to_anndata()
    with pytest.warns(UserWarning, match=r"fewer than 4 neighbours|have no place"):
        loader = SetLoader(query, match="neighbors", set_size=4, sets=5, space="segmentation_boundary")
    place = {uid: i for i, uid in enumerate(data.obs_names)}
    distances = cdist(data.obsm["spatial"], data.obsm["spatial"])
    names = data.obs["dataset"].astype(str).to_numpy()
    seen = []
    for batch in loader:
        assert len(batch.control) == 4 * len(batch)
        for i, uid in enumerate(batch.uids):
            own = np.flatnonzero(names == names[place[uid]])
            nearest = own[np.argsort(distances[place[uid], own])][1:5]
            found = [place[one] for one in batch.control.uids[4 * i : 4 * i + 4]]
            np.testing.assert_allclose(distances[place[uid], found], distances[place[uid], nearest])
            assert place[uid] not in found
        seen += batch.uids.tolist()
    assert sorted(seen) == sorted(uid for uid in data.obs_names if names[place[uid]] in "ab")
    assert loader.strata.set_index("dataset")["left_out"].to_dict() == {
        "a": "",
        "b": "",
        "few": "fewer than 4 neighbours",
    }
    assert rows(pickle.loads(pickle.dumps(loader))) != []


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 3)), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 5), st.booleans(),
)  # fmt: skip
def test_every_control_is_used_in_turn(
    strata: list[tuple[int, int]], size: int, per_batch: int, drop_last: bool
) -> None:
    """Every cell is in a set, controls of a pool are used as evenly as whole sets allow, and single positions have the rows of a whole read."""
    pools, own = [10, 7, 24, 3], [n for n, _ in strata]
    starts = np.cumsum([0, *pools, *own])
    of = [pool for _, pool in strata]
    cells = np.arange(starts[-1])[::-1]
    recipe = StratumSets(
        cells, starts[len(pools) : -1], np.array(own), starts[:-1][of], np.array(pools)[of], size, per_batch
    )
    order = Order(int(starts[-1]), per_batch, 7, share=Share(drop_last=drop_last), sets=recipe)
    batches = epoch_batches(order, 2)
    whole = batches.take(np.arange(len(batches)))
    for i in range(len(batches)):
        part = batches.take(np.array([i]))
        np.testing.assert_array_equal(part.rows, whole.rows[whole.bounds[i] : whole.bounds[i + 1]])
    at = np.arange(len(whole.rows))[::3]
    np.testing.assert_array_equal(batches.locate(at), whole.rows[at])
    if drop_last:
        assert len(batches) == recipe.total // per_batch
        return
    uses = Counter(whole.rows.tolist())
    treated = recipe.cells[starts[len(pools)] :]
    assert all(uses[int(cell)] >= 1 for cell in treated)
    for pool, n in enumerate(pools):
        turns = sum(-(-own[i] // size) for i in range(len(own)) if of[i] == pool)
        counts = [uses[int(cell)] for cell in recipe.cells[starts[pool] : starts[pool] + n]]
        assert sum(counts) == turns * size
        if n % size == 0:
            assert max(counts) - min(counts) <= 1


def test_neighbors_of_a_table() -> None:
    """Every cell comes once, with its row of the table."""
    table = np.arange(20).reshape(10, 2) % 10
    recipe = NeighborSets(np.arange(10), table, 3)
    batches = epoch_batches(Order(10, 3, 1, sets=recipe), 0)
    found = batches.take(np.arange(len(batches)))
    seen = []
    for start, stop in zip(found.bounds[:-1], found.bounds[1:], strict=True):
        part = found.rows[start:stop]
        n = len(part) // 3
        np.testing.assert_array_equal(part[n:].reshape(n, 2), table[part[:n]])
        seen += part[:n].tolist()
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize(
    ("choices", "error", "said"),
    [
        ({"set_by": ()}, ArgumentError, "takes set_by and control"),
        ({"control": None}, ArgumentError, "takes set_by and control"),
        ({"control": {}}, ArgumentError, "names no control"),
        ({"control": {"gene": "non-targetting"}}, QueryError, "no cell has 'gene' = 'non-targetting'"),
        ({"control": {"colour": "red"}}, QueryError, "no column 'colour'"),
        ({"set_by": ["genes"]}, QueryError, "no column 'genes'"),
        ({"set_by": ["n_cells"]}, QueryError, "cannot name 'n_cells'"),
        ({"match": "dataset"}, (ArgumentError, QueryError), "match as a list"),
        ({"set_size": 0}, QueryError, "set_size as a whole number from 1"),
        ({"sets": 0}, QueryError, "sets as a whole number from 1"),
        ({"weights": "gene"}, QueryError, "holds no numbers"),
        ({"targets": "dose"}, ArgumentError, r"targets names \['dose'\]"),
        ({"set_by": ["gene", "dose"], "targets": "dose"}, QueryError, "column of numbers"),
        ({"min_controls": 1000}, QueryError, "no set is left of 50 strata; fewer than 1000 controls in 50"),
        ({"world_size": 2, "rank": 2}, QueryError, "rank 2 is not one of 2"),
        ({"sets": 500, "drop_last": True}, QueryError, "leave no batch"),
        ({"batch_size": 3}, QueryError, "does not know"),
    ],
)
def test_what_means_nothing_is_refused(view: ra.AtlasView, choices: dict[str, Any], error: Any, said: str) -> None:
    given_ = {"set_by": KEYS, "control": CONTROLS, "match": MATCH, **choices}
    with pytest.raises(error, match=said):
        SetLoader(view.query(), **given_)


def test_neighbors_take_no_strata(view: ra.AtlasView) -> None:
    with pytest.raises(ArgumentError, match=r"\['set_by', 'control'\] say nothing"):
        SetLoader(view.query(), KEYS, CONTROLS, "neighbors")
    with pytest.raises((NotFoundError, QueryError), match="geometr"):
        SetLoader(view.query(), match="neighbors")


def test_missing_values_make_no_set(tmp_path: Path) -> None:
    """Cells without a value of `set_by` or `match` are in no set, and are counted."""
    made = screen(6)
    made.obs.loc[made.obs_names[:40], "batch"] = np.nan
    made.obs.loc[made.obs_names[40:50], "gene"] = np.nan
    atlas = ra.RaggedAtlas.create(tmp_path / "a.atlas")
    atlas.add(made, "six", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    with pytest.warns(UserWarning, match="50 cells lack a value"):
        loader = SetLoader(query, KEYS, CONTROLS, ["batch"], set_size=4)
    missing = set(query.where("batch IS NULL OR gene IS NULL").to_pandas().index)
    assert len(missing) == 50
    assert not missing & {uid for own, controls in rows(loader) for uid in [*own, *controls]}


def test_workers_and_tensors(view: ra.AtlasView) -> None:
    """Workers of a DataLoader give the batches of the loader, in its order, as tensors that move together."""
    data = pytest.importorskip("torch.utils.data")
    loader = quiet(view.query(), KEYS, CONTROLS, MATCH, set_size=6, sets=8, as_="torch-dense")
    expected = rows(loader)
    loader.set_epoch(0)
    dealt = data.DataLoader(loader.torch_dataset(), batch_size=None, num_workers=2, multiprocessing_context="spawn")
    batches = list(dealt)
    assert rows(batches) == expected
    first = batches[0]
    assert first.X.reshape(first.n_sets, 6, -1).shape[0] == first.n_sets
    assert first.measured.shape == tuple(first.X.shape)
    assert {tensor.device.type for tensor in first.to("meta").tensors()} == {"meta"}
    assert len(pa.array(first.key["gene"])) == first.n_sets
