"""Linked datasets answer as copied ones do, whatever is done to the atlas and however the file stores its matrices."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from support.atlases import small_anndata
from support.hypothesis_profile import examples
from support.linked_files import WRITERS, write_file
from walks.test_state_machine import AtlasMachine, extra_columns, gene_lists


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


def test_any_walk_with_linked_datasets_equals_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is called in whatever order, the tip and every kept snapshot equal the model."""
    monkeypatch.setattr("raggedatlas.catalog.bundles.WORTH", 1)
    run_state_machine_as_test(
        LinkedMachine,
        settings=settings(
            examples(4), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )  # fmt: skip
