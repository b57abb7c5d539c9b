"""CELLxGENE's schema: its own program's findings as problems, missing facts of an add, and files that queries write in its form."""

import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.command import ask

import raggedatlas as ra
from raggedatlas.errors import MissingExtraError, NotFoundError, QueryError, SourceError, ValuesError
from raggedatlas.wings.cxg.curation import PROGRAM, REQUIRED_OBS, VARIABLE, validate_schema

TERMS = {
    "cell_type_ontology_term_id": "CL:0000084",
    "assay_ontology_term_id": "EFO:0009922",
    "disease_ontology_term_id": "PATO:0000461",
    "sex_ontology_term_id": "PATO:0000384",
    "self_reported_ethnicity_ontology_term_id": "unknown",
    "development_stage_ontology_term_id": "HsapDv:0000003",
    "tissue_ontology_term_id": "UBERON:0002048",
    "tissue_type": "tissue",
    "suspension_type": "cell",
    "donor_id": "d1",
}
IDS = ["ENSG00000290826", "ENSG00000308579", "ENSG00000278757", "ENSG00000290385", "ENSG00000225880"]


def curated(n: int = 20) -> ad.AnnData:
    """Return cells with every fact that the schema requires."""
    counts = sp.csr_matrix(np.random.default_rng(0).poisson(2, (n, len(IDS))).astype(np.float32))
    adata = ad.AnnData(counts, var=pd.DataFrame({"feature_is_filtered": False}, index=IDS))
    for name, term in TERMS.items():
        adata.obs[name] = pd.Categorical([term] * n)
    adata.obs["is_primary_data"] = True
    adata.obs["cell_type"] = "T cell"
    adata.obsm["X_umap"] = np.random.default_rng(1).normal(size=(n, 2)).astype(np.float32)
    adata.uns = {"title": "T cells", "organism_ontology_term_id": "NCBITaxon:9606"}
    return adata


def program(folder: Path, script: str) -> str:
    """Write a program that answers as cellxgene-schema does."""
    file = folder / PROGRAM
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(file)


ERRORS = """echo "INFO:cellxgene_schema.validate:Starting validation..." >&2
echo "WARNING:cellxgene_schema.validate:WARNING: Only raw data was found." >&2
echo "ERROR:cellxgene_schema.validate:ERROR: 'title' in 'uns' is not present." >&2
exit 1"""


def test_findings_of_the_program_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors break a must, warnings a should; the command prints them and ends with 1."""
    curated().write_h5ad(tmp_path / "a.h5ad")
    monkeypatch.setenv(VARIABLE, program(tmp_path, ERRORS))
    found = validate_schema(tmp_path / "a.h5ad")
    assert [(p.level, p.message) for p in found] == [
        ("should", "Only raw data was found."),
        ("must", "'title' in 'uns' is not present."),
    ]
    result = ask("validate", tmp_path / "a.h5ad", "--schema", "cellxgene")
    assert result.exit_code == 1
    assert "'title' in 'uns' is not present." in result.output
    monkeypatch.setenv(VARIABLE, program(tmp_path, "exit 0"))
    assert validate_schema(tmp_path / "a.h5ad") == []


REFUSED: dict[str, tuple[str, str, type[Exception], str]] = {
    "no program": ("", "a.h5ad", MissingExtraError, "pipx install"),
    "a variable that names nothing": ("absent", "a.h5ad", NotFoundError, VARIABLE),
    "a program that crashes": ("exit 1", "a.h5ad", SourceError, "ended with code 1"),
    "no file": ("exit 0", "none.h5ad", NotFoundError, "There is no file"),
    "another format": ("exit 0", "a.zarr", SourceError, "no .h5ad file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_checked_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line names the program or the file, and the way out."""
    script, name, kind, words = REFUSED[case]
    for file in ("a.h5ad", "a.zarr"):
        (tmp_path / file).write_bytes(b"")
    if script == "":
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv(VARIABLE, "absent" if script == "absent" else program(tmp_path, script))
    with pytest.raises(kind, match=words) as caught:
        validate_schema(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_add_lists_what_is_missing(tmp_path: Path) -> None:
    """Notes name columns, members of uns and names that are no ids; strict refuses and writes nothing, and a complete file has none."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    bad = curated()
    bad.obs = bad.obs.drop(columns=["donor_id", "tissue_type"])
    del bad.uns["title"], bad.obsm["X_umap"]
    bad.var_names = [*IDS[:4], "CD3E"]
    with pytest.raises(SourceError, match=r"obs\['donor_id'\] is missing.*CD3E") as caught:
        atlas.add(bad, "bad", curate="cellxgene-strict", progress=False)
    assert "\n" not in str(caught.value)
    assert len(atlas.list_datasets()) == 0
    report: Any = atlas.add(bad, "bad", curate="cellxgene", progress=False)
    assert [note for note in report.notes if note.startswith("CELLxGENE")] == [
        "CELLxGENE: obs['donor_id'] is missing",
        "CELLxGENE: obs['tissue_type'] is missing",
        "CELLxGENE: uns['title'] is missing",
        "CELLxGENE: obsm has no embedding, such as X_umap",
        "CELLxGENE: 1 of 5 names of var are no Ensembl ids, e.g. 'CD3E'",
    ]
    # Threads share what opens a source, which each opens several times.
    bad.write_h5ad(tmp_path / "bad.h5ad")
    curated(22).write_h5ad(tmp_path / "third.h5ad")
    files, others = [tmp_path / "bad.h5ad", tmp_path / "third.h5ad"], ra.RaggedAtlas.create(str(tmp_path / "b"))
    with ThreadPoolExecutor(1) as pool:
        by_worker: Any = others.add(files, curate="cellxgene", executor=pool, progress=False)
    assert by_worker[0].notes == report.notes
    good: Any = atlas.add(curated(21), "good", curate="cellxgene-strict", progress=False)
    assert not [note for note in good.notes if "CELLxGENE" in note]


def written(tmp_path: Path, adata: ad.AnnData, **options: Any) -> ad.AnnData:
    """Return what a query of an atlas of these cells writes."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add(adata, "x", progress=False)
    return ad.read_h5ad(
        atlas.checkout(atlas.snapshot()).query().write(tmp_path / "x.h5ad", schema="cellxgene", **options)
    )


def test_a_query_writes_the_form_of_the_schema(tmp_path: Path) -> None:
    """Counts become float32, derived columns go, terms are categories, and title and organism are in uns; no warning is given."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = written(tmp_path, curated(), title="T cells")
    assert found.X.dtype == np.float32
    assert sp.isspmatrix_csr(found.X)
    np.testing.assert_array_equal(np.sort(found.X.toarray().ravel()), np.sort(curated().X.toarray().ravel()))
    assert set(REQUIRED_OBS) <= set(found.obs.columns)
    assert "cell_type" not in found.obs
    assert all(found.obs[name].dtype == "category" for name in TERMS)
    assert (found.uns["title"], found.uns["organism_ontology_term_id"]) == ("T cells", "NCBITaxon:9606")
    assert not found.var["feature_is_filtered"].any()


def test_a_query_names_the_facts_that_are_missing(tmp_path: Path) -> None:
    """What the atlas does not have is in one warning, and the file is written all the same."""
    adata = curated()
    adata.obs = adata.obs.drop(columns="donor_id")
    with pytest.warns(UserWarning, match=r"obs\['donor_id'\].*title") as caught:
        found = written(tmp_path, adata)
    assert len(caught) == 1
    assert "donor_id" not in found.obs
    assert "title" not in found.uns


def test_what_the_schema_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Another format, an unknown schema, a title without one, and numbers that float32 cannot hold; nothing is written."""
    query = query_with(tmp_path / "a", (1 << 24) + 1)
    cases: list[tuple[str, dict[str, Any], type[Exception]]] = [
        ("x.zarr", {"schema": "cellxgene"}, QueryError),
        ("x.h5ad", {"schema": "other"}, QueryError),
        ("x.h5ad", {"title": "x"}, QueryError),
        ("x.h5ad", {"schema": "cellxgene", "title": "x"}, ValuesError),
    ]
    for name, options, kind in cases:
        with pytest.raises(kind):
            query.write(tmp_path / name, **options)
        assert not (tmp_path / name).exists()
    with pytest.raises(ValuesError, match="float32"):
        query_with(tmp_path / "b", 1e300).write(tmp_path / "x.h5ad", schema="cellxgene", title="x")
    assert not (tmp_path / "x.h5ad").exists()


def query_with(folder: Path, value: float) -> ra.Query:
    """Make an atlas of cells with a number among their values, and ask for all of it."""
    adata = curated()
    adata.X = adata.X.astype(np.float64)
    adata.X.data[0] = value
    atlas = ra.RaggedAtlas.create(str(folder))
    atlas.add(adata, "x", progress=False)
    return atlas.checkout(atlas.snapshot()).query()


def test_rounding_is_told(tmp_path: Path) -> None:
    """Numbers that float32 rounds are written, with a warning; those that it holds without."""
    for value, n in ((0.1, 1), (0.25, 0)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            query_with(tmp_path / str(value), value).write(
                tmp_path / "x.h5ad", schema="cellxgene", title="x", overwrite=True
            )
        assert len([each for each in caught if "X was rounded to float32" in str(each.message)]) == n


def test_a_query_is_checked_as_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program sees a file in the form of the schema, which is gone afterwards; without the program nothing is written."""
    atlas = ra.RaggedAtlas.create(str(tmp_path / "a"))
    atlas.add(curated(), "x", progress=False)
    query = atlas.checkout(atlas.snapshot()).query()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(NotFoundError, match="no program"):
        validate_schema(query)
    monkeypatch.setenv(
        VARIABLE, program(tmp_path, f'cp "$2" {tmp_path}/seen.h5ad; echo "$2" > {tmp_path}/name; {ERRORS}')
    )
    assert validate_schema(query, title="T cells").breaks_must
    assert ad.read_h5ad(tmp_path / "seen.h5ad").uns["title"] == "T cells"
    assert not Path((tmp_path / "name").read_text().strip()).exists()


@pytest.mark.long
def test_the_program_accepts_what_a_query_writes(tmp_path: Path) -> None:
    """A file with all facts passes cellxgene-schema itself, where that is installed."""
    import os

    if not os.environ.get(VARIABLE) and shutil.which(PROGRAM) is None:
        pytest.skip("no cellxgene-schema here")
    written(tmp_path, curated(), title="T cells")
    assert not validate_schema(tmp_path / "x.h5ad").breaks_must
