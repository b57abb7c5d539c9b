"""Any sequence of calls leaves an atlas that equals a plain model of it, in all its kept snapshots too."""

import datetime as dt
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import raggedatlas as ra
from raggedatlas.errors import DuplicateError, NotFoundError, QueryError
from support.atlases import GENES, small_anndata, write_results
from support.hypothesis_profile import examples

Model = dict[str, Any]

Results = dict[str, frozenset[str]]
"""Name of a result -> the datasets that were there when it was added."""

gene_lists = st.lists(st.sampled_from(GENES), min_size=5, max_size=15, unique=True)
extra_columns = st.none() | st.sampled_from(["age", "score", "percent.mt"])


def assert_equal(view: Any, model: Model) -> None:
    """Compare what a view answers with what the model holds: rows, values, columns and what was measured."""
    assert view.list_datasets()["name"].tolist() == list(model)
    if not model:
        return
    result = view.query().to_anndata()
    genes = sorted({gene for source in model.values() for gene in source.var_names})
    symbols = result.var["symbol"].tolist()
    assert sorted(symbols) == genes
    assert result.obs["dataset"].tolist() == [name for name, source in model.items() for _ in range(source.n_obs)]
    assert result.obs["cell_name"].tolist() == [cell for source in model.values() for cell in source.obs_names]
    uids = view.list_datasets().index
    start = 0
    for uid, (_name, source) in zip(uids, model.items(), strict=True):
        rows = slice(start, start + source.n_obs)
        start += source.n_obs
        expected = np.zeros((source.n_obs, len(symbols)), np.float32)
        where = [symbols.index(gene) for gene in source.var_names]
        expected[:, where] = source.X.toarray()
        np.testing.assert_array_equal(result.X[rows].toarray(), expected)
        for column in source.obs.columns:
            pd.testing.assert_series_equal(
                result.obs[column].iloc[rows].astype(source.obs[column].dtype).reset_index(drop=True),
                source.obs[column].reset_index(drop=True),
            )
        layout = result.obs["layout_uid"].iloc[rows].unique()
        assert len(layout) == 1, uid
        measured = np.asarray(result.varm["measured"][layout[0]])
        np.testing.assert_array_equal(np.flatnonzero(measured), sorted(where))


def value_of(uid: str, name: str) -> list[float]:
    """Give the result of a cell as its uid and the result's name make it."""
    return [int(uid[:6], 16) / 2**24, float(name.rpartition("_")[2])]


def assert_results(view: Any, found: Results) -> None:
    """Compare the results of a view: names, and for each cell its own value, or NaN where its dataset came later."""
    assert sorted(view.results().index) == sorted(found)
    if not found or not len(view.list_datasets()):
        return
    adata = view.query().with_results(sorted(found)).to_anndata()
    for name, datasets in found.items():
        expected = [value_of(uid, name) if of in datasets else [np.nan] * 2 for uid, of in adata.obs["dataset"].items()]
        np.testing.assert_array_equal(adata.obsm[name], np.array(expected, np.float32))


def number_of(source: Any) -> str:
    """Return by which a dataset is known in `AtlasMachine.files`; its cells are called after it."""
    return str(source.obs_names[0].partition("-")[0])


class AtlasMachine(RuleBasedStateMachine):
    """An atlas in a folder beside a model in memory."""

    snapshots = Bundle("snapshots")

    @initialize()
    def create(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.atlas = ra.RaggedAtlas.create(f"{self.folder.name}/machine.atlas")
        self.tip: Model = {}
        self.found: Results = {}
        self.kept: dict[int, tuple[Model, Results]] = {}
        self.added = 0
        # Datasets as they were added, by their number: the model has them without deleted cells.
        self.files: Model = {}

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        try:
            for version, (model, found) in self.kept.items():
                assert_equal(self.atlas.checkout(version), model)
                assert_results(self.atlas.checkout(version), found)
            assert [problem for problem in self.atlas.validate("rows") if problem.level == "must"] == []
        finally:
            self.folder.cleanup()

    @rule(n_cells=st.integers(5, 20), genes=gene_lists, extra=extra_columns)
    def add(self, n_cells: int, genes: list[str], extra: str | None) -> None:
        self.added += 1
        source = small_anndata(self.added, n_cells, genes, extra)
        self.atlas.add(source, f"data-{self.added}", organism="human")
        self.tip[f"data-{self.added}"] = self.files[f"CELL{self.added}"] = source

    @precondition(lambda self: self.tip)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        source = self.tip[data.draw(st.sampled_from(sorted(self.tip)))]
        # The file is recognized, whichever of its cells were deleted.
        source = self.files[number_of(source)]
        with pytest.raises(DuplicateError):
            self.atlas.add(source, "another name", organism="human")

    @precondition(lambda self: self.tip)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.tip)))
        self.atlas.drop_dataset(name)
        del self.tip[name]

    @precondition(lambda self: self.tip)
    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        """Take a dataset out of the tip and every snapshot, whatever it is called there."""
        name = data.draw(st.sampled_from(sorted(self.tip)))
        number = number_of(self.tip[name])
        self.atlas.purge(name)
        self.tip = {of: source for of, source in self.tip.items() if number_of(source) != number}
        for version, (model, found) in self.kept.items():
            self.kept[version] = ({n: s for n, s in model.items() if number_of(s) != number}, found)

    @precondition(lambda self: self.tip)
    @rule(data=st.data())
    def delete_cells(self, data: st.DataObject) -> None:
        """Delete some cells of some datasets, or all of one, which is refused."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.tip)), min_size=1, max_size=2, unique=True))
        gone: list[str] = []
        left = dict(self.tip)
        for name in names:
            chosen = data.draw(st.sets(st.sampled_from(self.tip[name].obs_names.tolist()), min_size=1))
            gone += chosen
            left[name] = self.tip[name][~self.tip[name].obs_names.isin(chosen)].copy()
        if all(source.n_obs for source in left.values()):
            assert self.atlas.delete_cells({"cell_name": gone}).n_cells == len(gone)
            self.tip = left
        else:
            with pytest.raises(QueryError, match="drop_dataset"):
                self.atlas.delete_cells({"cell_name": gone})

    @precondition(lambda self: self.tip)
    @rule(data=st.data())
    def read_back(self, data: st.DataObject) -> None:
        """The file given back has the cells of the model, and names the others."""
        name = data.draw(st.sampled_from(sorted(self.tip)))
        found, source = self.atlas.dataset(name).to_anndata(), self.tip[name]
        assert list(found.obs_names) == list(source.obs_names)
        # As it is in the file, which may be dense.
        values = found.X if isinstance(found.X, np.ndarray) else found.X.toarray()
        np.testing.assert_array_equal(values, source.X.toarray())
        missing = found.uns.get("deleted_cells", {"cell_name": []})["cell_name"]
        whole = self.files[number_of(source)]
        assert sorted([*missing, *found.obs_names]) == sorted(whole.obs_names)

    @precondition(lambda self: self.tip)
    @rule(form=st.sampled_from(["space", "vector"]))
    def add_result(self, form: str) -> None:
        self.added += 1
        name = f"z_{self.added}"
        cells = self.atlas._catalog.tables.read("cells", ["uid", "dataset_uid"])
        there = set(self.atlas.list_datasets().index)
        uids = [row["uid"] for row in cells.to_pylist() if row["dataset_uid"] in there]
        values = np.array([value_of(uid, name) for uid in uids], np.float32)
        folder = write_results(Path(self.folder.name) / name, uids, values)
        self.atlas.add(folder, name, as_=form, progress=False)
        self.found[name] = frozenset(self.tip)

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def drop_result(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.found)))
        self.atlas.drop_result(name)
        del self.found[name]

    @rule()
    def optimize(self) -> None:
        self.atlas.optimize()

    @rule(target=snapshots)
    def snapshot(self) -> int:
        version = self.atlas.snapshot()
        assert version not in self.kept
        self.kept[version] = dict(self.tip), dict(self.found)
        return version

    @rule(version=snapshots)
    def checkout(self, version: int) -> None:
        assert_equal(self.atlas.checkout(version), self.kept[version][0])
        assert_results(self.atlas.checkout(version), self.kept[version][1])

    @rule(version=snapshots)
    def restore(self, version: int) -> None:
        self.atlas.restore(version)
        self.tip, self.found = (dict(part) for part in self.kept[version])

    @rule(version=consumes(snapshots))
    def drop_snapshot(self, version: int) -> None:
        self.atlas.drop_snapshot(version)
        del self.kept[version]
        with pytest.raises(NotFoundError):
            self.atlas.checkout(version)

    @precondition(lambda self: self.tip)
    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(sorted(self.tip)))
        self.added += 1
        new = f"data-{self.added}"
        self.atlas.rename_dataset(old, new)
        self.tip = {new if name == old else name: source for name, source in self.tip.items()}
        self.found = {
            name: frozenset(new if of == old else of for of in datasets) for name, datasets in self.found.items()
        }

    @rule()
    def gc(self) -> None:
        self.atlas.gc(dry_run=False, grace=dt.timedelta(0))

    @rule()
    def repair(self) -> None:
        self.atlas.repair()

    @rule()
    def reopen(self) -> None:
        self.atlas = ra.RaggedAtlas.open(self.atlas.uri)

    @invariant()
    def the_tip_is_the_model(self) -> None:
        if hasattr(self, "tip"):
            assert self.atlas.list_datasets()["name"].tolist() == list(self.tip)
            assert sorted(self.atlas.results().index) == sorted(self.found)
            assert self.atlas.list_datasets()["n_cells"].tolist() == [source.n_obs for source in self.tip.values()]


def test_any_walk_equals_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is called in whatever order, the tip and every kept snapshot equal the model."""
    # So few datasets share bundles, too.
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", 1)
    run_state_machine_as_test(
        AtlasMachine,
        settings=settings(
            examples(4),
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
