"""Linked datasets answer as copied ones do, whatever is done to the atlas and however the file stores its matrices."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from anndata.tests.helpers import assert_equal
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import raggedatlas as ra
from support.atlases import small_anndata
from support.hypothesis_profile import examples
from support.linked_files import WRITERS, write_file
from walks.test_state_machine import AtlasMachine, extra_columns, gene_lists

DATA = Path(__file__).parents[1] / "data"


class LinkedMachine(AtlasMachine):
    """The machine of `test_state_machine`, most of whose datasets are linked to files next to the atlas."""

    @rule(
        n_cells=st.integers(5, 20), genes=gene_lists, extra=extra_columns, kind=st.sampled_from(sorted(WRITERS)),
        copy=st.sampled_from([True, False, "rows"]),
    )  # fmt: skip
    def add(self, n_cells: int, genes: list[str], extra: str | None, kind: str, copy: bool | str) -> None:  # type: ignore[override]
        self.added += 1
        source = small_anndata(self.added, n_cells, genes, extra)
        written, choices = source, dict[str, Any](copy=copy)
        if copy == "rows" and not kind.startswith(("dense", "tiled")):
            written = source.copy()
            written.X = source.X.tocsc()
        elif not copy or copy == "rows":
            choices = {"copy": False, "hash": "full"}
        file = write_file(written, Path(self.folder.name), f"file-{self.added}", kind)
        self.atlas.add(file, f"data-{self.added}", organism="human", **choices)
        self.tip[f"data-{self.added}"] = self.files[f"CELL{self.added}"] = source

    @precondition(lambda self: self.tip)
    @rule(data=st.data())
    def materialize(self, data: st.DataObject) -> None:
        """Copy the values of some datasets, or of those that are linked."""
        self.atlas.materialize(
            data.draw(st.none() | st.lists(st.sampled_from(sorted(self.tip)), min_size=1, unique=True))
        )

    @precondition(lambda self: self.tip)
    @rule(data=st.data())
    def add_csc(self, data: st.DataObject) -> None:
        self.atlas.add_csc(data.draw(st.sampled_from(sorted(self.tip))))


FILES = ("pbmc_5k_protein_v3.h5ad", "pbmc_10k_protein_v3.h5ad", "pbmc68k_reduced.h5ad", "lung_C144.h5", "wu2020.h5mu")
"""Real files: CSR and dense, compressed and not, with raw, of 10x and of several modalities."""


def equal(found: Any, expected: Any) -> None:
    """Compare two AnnData or MuData exactly, where NaN equals NaN."""
    if hasattr(expected, "mod"):
        for name in expected.mod:
            equal(found.mod[name], expected.mod[name])
        return
    for one in (found, expected):
        for group in (one.obsm, one.varm):
            for key, values in list(group.items()):
                if isinstance(values, np.ndarray) and values.dtype.kind == "f":
                    group[key] = np.nan_to_num(values)
    assert_equal(found, expected, exact=True)


@pytest.mark.filterwarnings("ignore:Support for Awkward")
def test_real_files_come_back_as_from_a_copied_atlas(tmp_path: Path) -> None:
    """Linked or copied, `dataset` gives the same; nothing of the files is in the atlas that is not small."""
    atlases = {copy: ra.RaggedAtlas.create(tmp_path / str(copy)) for copy in (True, False)}
    for name in FILES:
        shutil.copy(DATA / name, tmp_path / name)
        for copy, atlas in atlases.items():
            atlas.add(tmp_path / name, organism="human", copy=copy)
    linked, copied = (atlases[copy].checkout(atlases[copy].snapshot()) for copy in (False, True))
    for name in linked.list_datasets()["name"]:
        one, other = linked.dataset(name), copied.dataset(name)
        mudata = name == "wu2020"
        equal(one.to_mudata() if mudata else one.to_anndata(), other.to_mudata() if mudata else other.to_anndata())
    assert [*atlases[False].validate("deep")] == []
    found, expected = (view.query().layers("counts").where("dataset != 'pbmc68k_reduced'") for view in (linked, copied))
    for genes in (["CD3D", "CD79A"], ["LYZ"]):
        a, b = found.features(genes).to_anndata(), expected.features(genes).to_anndata()
        assert abs(a.X - b[:, a.var_names].X).sum() == 0
    assert found.lazy().X.sum().compute() == expected.lazy().X.sum().compute()


def test_any_walk_with_linked_datasets_equals_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is called in whatever order, the tip and every kept snapshot equal the model."""
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", 1)
    run_state_machine_as_test(
        LinkedMachine,
        settings=settings(
            examples(4), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip
