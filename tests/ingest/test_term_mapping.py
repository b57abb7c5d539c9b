"""Terms for labels: what is certain is written, what is not is reported with candidates, and a file decides."""

from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest

import raggedatlas as ra
from raggedatlas import under
from raggedatlas.errors import AtlasError, SourceError

pytest.importorskip("cellxgene_ontology_guide")

FIVE = {
    "t CELL": ("name", "CL:0000084"),
    "T-lymphocyte": ("synonym", "CL:0000084"),
    "CL:0000044": ("old id", "CL:0000051"),
    "CD14+ monocites": ("near", None),
    "qqzzxx": ("none", None),
}
"""Labels, each of which is mapped in another way, and the ids that they get."""


def make(folder: Path, labels: list[Any], ids: list[Any] | None = None, column: str = "cell_type") -> ra.RaggedAtlas:
    atlas = ra.RaggedAtlas.create(folder)
    obs = pd.DataFrame({column: labels}, index=[f"c{i}" for i in range(len(labels))])
    if ids is not None:
        obs[f"{column}_ontology_term_id"] = ids
    cells = ad.AnnData(np.ones((len(labels), 1), np.float32), obs, pd.DataFrame(index=["CD3E"]))
    atlas.add(cells, "one", organism="human", progress=False)
    return atlas


def ids_of(atlas: ra.RaggedAtlas, column: str = "cell_type") -> dict[str, Any]:
    """The id of each label at a new snapshot."""
    frame = atlas.checkout(atlas.snapshot()).query().to_pandas().astype(object)
    name = f"{column}_ontology_term_id"
    frame = frame.where(frame.notna(), None)
    return dict(zip(frame[column], frame[name] if name in frame else [None] * len(frame), strict=True))


def test_five_labels_are_mapped_in_five_ways(tmp_path: Path) -> None:
    """A name, a synonym and an old id get their term; a near one gets candidates with scores, and one like nothing gets none."""
    atlas = make(tmp_path / "a", [*FIVE, None])
    report = atlas.map_terms("cell_type", ontology="CL")
    assert {one.label: (one.match, one.term) for one in report.labels} == FIVE
    by_label = {one.label: one for one in report.labels}
    assert by_label["CD14+ monocites"].candidates[0].startswith("CL:0001054 CD14-positive monocyte (0.")
    assert by_label["qqzzxx"].candidates == ()
    assert "CL:0000044 is deprecated" in by_label["CL:0000044"].note
    assert {one.label for one in report.open} == {"CD14+ monocites", "qqzzxx"}
    assert report.annotation is not None
    assert report.annotation.status == "added"
    assert ids_of(atlas) == {label: term for label, (_, term) in FIVE.items()} | {None: None}
    assert "by CL v" in atlas.annotations()["source"].iloc[0]
    assert atlas.checkout("latest").query().where(cell_type=under("T cell")).count() == 2


def test_nothing_is_written_in_a_dry_run(tmp_path: Path) -> None:
    """The report is the same, and the atlas as it was; so is a report without any certain label."""
    atlas = make(tmp_path / "a", [*FIVE])
    report = atlas.map_terms("cell_type", dry_run=True)
    assert report.annotation is not None
    assert report.annotation.status == "dry run"
    assert atlas.annotations().empty
    assert make(tmp_path / "b", ["qqzzxx"]).map_terms("cell_type").annotation is None


@pytest.mark.parametrize("ending", ["tsv", "csv"])
def test_a_file_decides_what_is_open(tmp_path: Path, ending: str) -> None:
    """The written file, edited, is given back: by id or name, for near labels too; an emptied term leaves a label without one."""
    atlas, path = make(tmp_path / "a", [*FIVE, 'with, "quotes"\tand tab']), tmp_path / f"labels.{ending}"
    atlas.map_terms("cell_type", dry_run=True).write(path)
    sep = "\t" if ending == "tsv" else ","
    frame = pd.read_csv(path, sep=sep).set_index("label")
    assert frame["term"].dropna().to_dict() == {label: term for label, (_, term) in FIVE.items() if term}
    frame["term"] = frame["term"].astype(object)
    frame.loc["CD14+ monocites", "term"] = "CL:0001054"
    frame.loc['with, "quotes"\tand tab', "term"] = "b CELL"
    frame.loc["t CELL", "term"] = None
    frame.reset_index().to_csv(path, index=False, sep=sep)
    report = atlas.map_terms("cell_type", "CL", confirm=path)
    assert {one.label: one.match for one in report.labels}["t CELL"] == "left out"
    assert [one.label for one in report.open] == []
    written = {"CD14+ monocites": "CL:0001054", "t CELL": None, 'with, "quotes"\tand tab': "CL:0000236"}
    assert ids_of(atlas) == {label: term for label, (_, term) in FIVE.items()} | written


def test_mappings_and_frames_decide_too(tmp_path: Path) -> None:
    """Labels that they lack are looked up, and those that no cell has are named."""
    atlas = make(tmp_path / "a", ["T cell", "mono"])
    report = atlas.map_terms("cell_type", confirm={"mono": "monocyte", "gone": "B cell"})
    assert report.unknown == ("gone",)
    assert "no cell has 'gone'" in repr(report)
    assert ids_of(atlas) == {"T cell": "CL:0000084", "mono": "CL:0000576"}
    frame = pd.DataFrame({"label": ["mono"], "term": ["CL:0000860"]})
    atlas.map_terms("cell_type", confirm=frame, on_conflict="replace")
    assert ids_of(atlas)["mono"] == "CL:0000860"


def test_ids_that_cells_have_are_kept(tmp_path: Path) -> None:
    """By default only cells without an id get one; `replace` and `error` do what they do in `annotate`."""
    atlas = make(tmp_path / "a", ["T cell", "T cell", "B cell"], ["CL:0000625", None, None])
    with pytest.raises(SourceError, match="another value"):
        atlas.map_terms("cell_type", on_conflict="error")
    atlas.map_terms("cell_type")
    frame = atlas.checkout(atlas.snapshot()).query().to_pandas()
    assert frame["cell_type_ontology_term_id"].tolist() == ["CL:0000625", "CL:0000084", "CL:0000236"]
    again = atlas.map_terms("cell_type")
    assert again.annotation is not None
    assert again.annotation.status == "unchanged"
    atlas.map_terms("cell_type", on_conflict="replace")
    assert set(ids_of(atlas).values()) == {"CL:0000084", "CL:0000236"}


@pytest.mark.long
def test_values_of_several_parts_and_ambiguous_names(tmp_path: Path) -> None:
    """Each part of a value gets its term; a name of several terms gets none, and lists them."""
    atlas = make(tmp_path / "a", ["asthma || COVID-19", "normal"], column="disease")
    atlas.map_terms("disease")
    assert ids_of(atlas, "disease") == {
        "asthma || COVID-19": "MONDO:0004979 || MONDO:0100096",
        "normal": "PATO:0000461",
    }
    terms = {"id": ["MY:1", "MY:2", "MY:3"], "label": ["a", "b", "c"], "synonyms": ["x", "x", ""]}
    atlas = make(tmp_path / "c", ["x", "c"], column="kind")
    atlas.load_terms(terms)
    report = atlas.map_terms("kind", "MY")
    assert {one.label: (one.match, one.candidates) for one in report.labels} == {
        "x": ("ambiguous", ("MY:1 a", "MY:2 b")), "c": ("name", ()),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        ("cell_typ", {}, "Did you mean 'cell_type'"),
        ("cell_type_ontology_term_id", {}, "no column|has ids"),
        ("cell_type", {"ontology": "CLX"}, "There is no ontology 'CLX'"),
        (
            "cell_type",
            {"confirm": {"T cell": "T cel"}},
            r"for the label 'T cell': There is no term 'T cel'.* Did you mean 'T cell'",
        ),
        ("cell_type", {"confirm": {"T cell": "UBERON:0002048"}}, "another ontology than CL"),
        ("cell_type", {"confirm": {"T cell": "CL:0000002"}}, "is deprecated"),
        ("cell_type", {"confirm": {"label": ["T cell", "T cell"], "term": ["B cell", "T cell"]}}, "a label has one"),
        ("cell_type", {"confirm": {"label": ["a"], "term": ["b"], "x": []}}, "confirm as a CSV"),
        ("cell_type", {"confirm": pd.DataFrame({"label": ["T cell"]})}, "no column 'term'"),
        ("cell_type", {"confirm": "nowhere.tsv"}, "There is no file"),
        ("cell_type", {"confirm": 3}, "takes confirm as"),
    ],
)
def test_refusals_write_nothing(tmp_path: Path, column: str, options: dict[str, Any], message: str) -> None:
    """A wrong column, ontology or file is refused in one line before anything is written."""
    atlas = make(tmp_path / "a", ["T cell"])
    with pytest.raises(AtlasError, match=message) as refused:
        atlas.map_terms(column, **options)
    assert "\n" not in str(refused.value)
    assert atlas.annotations().empty


def test_the_report_is_readable(tmp_path: Path) -> None:
    """Open labels come first in the text, and plain values have everything."""
    atlas = make(tmp_path / "a", ["T cell", "T cell", "<b>&"])
    report = atlas.map_terms("cell_type", dry_run=True)
    lines = repr(report).splitlines()
    assert lines[0].startswith("cell_type: 1 of 2 labels decided by CL v")
    assert lines[1].startswith("  '<b>&' (1 cells)")
    assert report.to_dict()["labels"][0]["term"] == "CL:0000084"
