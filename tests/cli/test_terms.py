"""Ontologies from the command line: labels mapped by way of a file, cells asked and counted by term, refusals in one line."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tests.command import done, read, refused

import raggedatlas as ra

pytest.importorskip("cellxgene_ontology_guide")


@pytest.mark.long
def test_from_labels_to_a_tree(tmp_path: Path, data_dir: Path) -> None:
    """`map-terms` proposes and writes only with --apply; then `--under`, SQL, `--level` and `--tree` ask by term."""
    atlas, file = tmp_path / "a", tmp_path / "labels.tsv"
    ra.RaggedAtlas.create(atlas).add(data_dir / "pbmc68k_reduced.h5ad", progress=False)
    assert "10 open" in done("map-terms", atlas, "bulk_labels", "--ontology", "CL", "--write", file)
    assert done("annotations", atlas).startswith("No annotations yet")
    frame = pd.read_csv(file, sep="\t", dtype=str).set_index("label")
    for label, term in (("CD19+ B", "B cell"), ("CD56+ NK", "CL:0000623"), ("CD14+ Monocyte", "CL:0001054")):
        frame.loc[label, "term"] = term
    frame.reset_index().to_csv(file, sep="\t", index=False)
    words = ("map-terms", atlas, "bulk_labels", "--ontology", "CL", "--confirm", file)
    assert read(*words)["annotation"]["status"] == "dry run"
    report = read(*words, "--apply")
    assert report["annotation"]["status"] == "added"
    n = {one["label"]: one["n_cells"] for one in report["labels"]}
    done("snapshot", atlas)
    lymphocytes = n["CD19+ B"] + n["CD56+ NK"]
    for words in (
        ["--under", "bulk_labels=lymphocyte"],
        ["under(bulk_labels, 'lymphocyte')"],
        ["-w", "under(bulk_labels, 'CL:0000542')"],
    ):
        assert done("query", atlas, "--count", *words) == f"{lymphocytes}\n"
    assert f"lymphocyte (CL:0000542): {lymphocytes}" in done("query", atlas, "--tree", "bulk_labels")
    tree: Any = read("query", atlas, "--tree", "bulk_labels")
    assert {row["id"]: row["n_cells"] for row in tree["terms"]}["CL:0000236"] == n["CD19+ B"]
    rows = read("query", atlas, "--by", "bulk_labels", "--level", "0")
    assert rows[0]["bulk_labels"] == "cell"
    assert rows[0]["n_cells"] == lymphocytes + n["CD14+ Monocyte"]
    assert "(missing)" in done("query", atlas, "--by", "bulk_labels", "--level", "cell_class")
    assert "T cel" in refused("query", atlas, "--under", "bulk_labels=T cel")
    assert "--under" in refused("query", atlas, "--under", "bulk_labels", code=2)
    assert "--level: has no effect without --by" in refused("query", atlas, "--level", "2", code=2)


def test_own_terms_are_loaded_and_listed(tmp_path: Path) -> None:
    """`load-terms` keeps a table, which `genes tables` lists and `genes remove` takes away; a cycle is named."""
    atlas, file = tmp_path / "a", tmp_path / "t.csv"
    ra.RaggedAtlas.create(atlas)
    file.write_text("id,label,parents\nMY:1,arm,\nMY:2,hand,MY:1\n")
    assert done("load-terms", atlas, file, "--release", "1").startswith("MY: 2 terms, sha256 ")
    assert "terms" in done("genes", "tables", atlas)
    done("genes", "remove", atlas, "MY")
    file.write_text("id,label,parents\nMY:1,arm,MY:2\nMY:2,hand,MY:1\n")
    said = refused("load-terms", atlas, file)
    assert "cycle: MY:1 under MY:2 under MY:1" in said
    assert "No gene tables" in done("genes", "tables", atlas)
