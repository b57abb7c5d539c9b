"""10x count files: HDF5 of both ages and Market-matrix folders, compared with h5py and SciPy on the same bytes."""

import contextlib
import gzip
import re
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

import raggedatlas as ra
from raggedatlas.errors import NotFoundError, SourceError
from raggedatlas.formats import external_sort, tenx
from raggedatlas.formats.composite_source import CompositeSource
from raggedatlas.formats.registry import list_left_out, list_sources, open_source
from raggedatlas.formats.tenx import tenx_h5_source, tenx_mtx_source
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.frames import arrow_to_frame, frame_to_arrow

pytestmark = pytest.mark.fast

DATA = Path(__file__).parent.parent / "data"
MATRIX = sp.random_array((5, 7), density=0.5, rng=np.random.default_rng(3), format="csr")
MATRIX.data = np.arange(1, MATRIX.nnz + 1)
"""Five cells by seven features."""


def whole(source: CompositeSource, key: str, n_rows: int = 2) -> Any:
    parts = []
    for (block,) in source.blocks((key,), n_rows):
        assert isinstance(block, CsrBlock)
        parts.append(
            sp.csr_array((block.layers["values"], block.indices, block.indptr), shape=(block.n_rows, block.n_cols))
        )
    return sp.vstack(parts).toarray()


def write_h5(path: Path, types: list[str] | None) -> None:
    """Write the matrix as Cell Ranger 3 does, or as Cell Ranger 2 without types."""
    with h5py.File(path, "w") as file:
        group = file.create_group("matrix" if types else "GRCh38")
        for name in ("data", "indices", "indptr"):
            group[name] = getattr(MATRIX, name).astype(np.int64)
        group["shape"] = np.array([7, 5], np.int32)
        group["barcodes"] = np.array([f"BC{i}-1".encode() for i in range(5)])
        ids, names = np.array([f"ENSG{i}".encode() for i in range(7)]), np.array([f"G{i}".encode() for i in range(7)])
        if types:
            features = group.create_group("features")
            features["id"], features["name"] = ids, names
            features["feature_type"] = np.array([t.encode() for t in types])
            features["genome"] = np.array([b"GRCh38"] * 7)
            features["_all_tag_keys"] = np.array([b"genome"])
        else:
            group["genes"], group["gene_names"] = ids, names


def write_mtx(folder: Path, *, packed: bool, header: str = "", types: bool = True) -> None:
    """Write the matrix as a folder of Cell Ranger 3 (packed) or 2."""
    ending = ".gz" if packed else ""
    opener: Any = gzip.open if packed else open
    folder.mkdir(exist_ok=True)
    coo = sp.coo_array(MATRIX)
    lines = [header or "%%MatrixMarket matrix coordinate integer general", "%made by hand", f"7 5 {coo.nnz}"]
    lines += [f"{c + 1} {r + 1} {v}" for r, c, v in zip(*coo.coords, coo.data, strict=True)]
    third = "\tGene Expression" if types else ""
    for name, text in {
        "matrix.mtx": "\n".join(lines),
        "barcodes.tsv": "\n".join(f"BC{i}-1" for i in range(5)),
        "features.tsv" if packed else "genes.tsv": "\n".join(f"ENSG{i}\tG{i}{third}" for i in range(7)),
    }.items():
        with opener(folder / f"{name}{ending}", "wt") as file:
            file.write(text + "\n")


@pytest.mark.parametrize("name", sorted(p.name for p in DATA.glob("*.h5")))
@pytest.mark.parametrize("n_rows", [100, 10_000])
def test_real_files_equal_their_bytes(name: str, n_rows: int) -> None:
    """A real run gives its cells, ids, symbols and counts, whatever the block size."""
    with h5py.File(DATA / name) as file:
        group = file["matrix"]
        shape = group["shape"][()]
        expected = sp.csr_array(tuple(group[n][()] for n in ("data", "indices", "indptr")), shape=(shape[1], shape[0]))
        barcodes = [b.decode() for b in group["barcodes"][()]]
        ids = [i.decode() for i in group["features/id"][()]]
    source = open_source(DATA / name)
    blocks = [b for (b,) in source.blocks(("X",), n_rows)]
    np.testing.assert_array_equal(np.concatenate([b.layers["values"] for b in blocks]), expected.data)
    np.testing.assert_array_equal(np.concatenate([b.indices for b in blocks]), expected.indices)
    assert source.cells().column("_index").to_pylist() == barcodes
    features = source.features("var")
    assert features.column("_index").to_pylist() == ids
    assert features.column_names == ["_index", "symbol", "feature_types", "genome"]
    assert source.describe().matrices[0].space == "gene_expression"
    source.close()


def test_each_feature_type_is_a_matrix(tmp_path: Path) -> None:
    """Genes, antibodies, peaks and others become matrices of their own, whose columns together are all."""
    types = [
        "Gene Expression",
        "Antibody Capture",
        "Peaks",
        "Gene Expression",
        "CRISPR Guide Capture",
        "Peaks",
        "Peaks",
    ]
    write_h5(tmp_path / "x.h5", types)
    source = tenx_h5_source(tmp_path / "x.h5")
    spaces = {m.key: m.space for m in source.describe().matrices}
    assert spaces == {
        "X:Gene Expression": "gene_expression",
        "X:Antibody Capture": "protein_abundance",
        "X:Peaks": "chromatin_accessibility",
        "X:CRISPR Guide Capture": "",
    }
    for matrix in source.describe().matrices:
        columns = np.flatnonzero(np.array(types) == matrix.key[2:])
        np.testing.assert_array_equal(whole(source, matrix.key), MATRIX.toarray()[:, columns])
        assert source.features(matrix.features).column(0).to_pylist() == [f"ENSG{i}" for i in columns]
    for genes, peaks in source.blocks(("X:Gene Expression", "X:Peaks"), 2):
        assert genes.n_rows == peaks.n_rows
    source.close()


def test_further_columns_replace_none_of_cell_rangers(tmp_path: Path) -> None:
    """A column that has the name which ours of Cell Ranger's has is left out, and told."""
    write_h5(tmp_path / "run.h5", ["Gene Expression"] * 7)
    with h5py.File(tmp_path / "run.h5", "r+") as file:
        file["matrix/features/symbol"] = np.array([b"other"] * 7)
    source = tenx_h5_source(tmp_path / "run.h5")
    assert source.features("var")["symbol"].to_pylist() == [f"G{i}" for i in range(7)]
    assert source.describe().left_out["features/symbol"] == "array (7,)"
    source.close()


def test_cell_ranger_2(tmp_path: Path) -> None:
    """The older layout reads alike; of two genomes one must be chosen."""
    write_h5(tmp_path / "x.h5", None)
    source = open_source(tmp_path / "x.h5")
    np.testing.assert_array_equal(whole(source, "X"), MATRIX.toarray())
    assert source.features("var").column("symbol").to_pylist()[0] == "G0"
    source.close()
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file.copy("GRCh38", "mm10")
    with pytest.raises(SourceError, match="genome="):
        open_source(tmp_path / "x.h5")
    chosen = open_source(tmp_path / "x.h5", genome="mm10")
    assert set(chosen.features("var").column("genome").to_pylist()) == {"mm10"}
    with pytest.raises(SourceError, match="open already"):
        open_source(chosen, genome="mm10")
    chosen.close()
    atlas = ra.RaggedAtlas.create(tmp_path / "atlas")
    with pytest.raises(SourceError, match=r"and no 'rn6'; choose one with genome="):
        atlas.add(tmp_path / "x.h5", genome="rn6")
    assert atlas.add(tmp_path / "x.h5", "mouse", genome="mm10").n_cells == MATRIX.shape[0]
    write_h5(tmp_path / "one.h5", ["Gene Expression"] * 7)
    with pytest.raises(SourceError, match="one matrix for all genomes"):
        open_source(tmp_path / "one.h5", genome="mm10")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("band", [64, 64 << 20])
def test_market_folder_equals_scipys_reading(
    tmp_path: Path, packed: bool, band: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, packed or plain, read in small pieces and through files, equals what SciPy reads."""
    monkeypatch.setattr(external_sort, "BAND_BYTES", band)
    monkeypatch.setattr(tenx, "TEXT", 50)
    write_mtx(tmp_path / "run", packed=packed)
    source = open_source(tmp_path / "run")
    with warnings.catch_warnings(action="ignore"):
        expected = scipy.io.mmread(tmp_path / "run" / ("matrix.mtx.gz" if packed else "matrix.mtx")).T.toarray()
    np.testing.assert_array_equal(whole(source, "X"), expected)
    np.testing.assert_array_equal(whole(source, "X", 5), expected)
    assert source.cells().column(0).to_pylist()[4] == "BC4-1"
    assert source.features("var").column_names[:2] == ["_index", "symbol"]
    source.close()


def damage(folder: Path, name: str) -> str:
    """Break a folder in one way, and return what must be said."""
    path = folder / "matrix.mtx"
    text = path.read_text()
    if name == "cut":
        path.write_text("\n".join(text.splitlines()[:-2]) + "\n")
        return "cut short"
    if name == "words":
        path.write_text(text.replace("\n1 ", "\none ", 1) if "\n1 " in text else text + "x y z\n")
        return "not 3 numbers"
    if name == "outside":
        lines = text.splitlines()
        path.write_text("\n".join([*lines[:-1], "8 1 1"]) + "\n")
        return "outside its shape"
    if name == "header":
        path.write_text("%%MatrixMarket matrix array real general\n" + text)
        return "header"
    if name == "announced":
        path.write_text(re.sub(r"7 5 \d+", "7 5 99999999999", text, count=1))
        return "announces 99,999,999,999 entries"
    if name == "other run":
        (folder / "barcodes.tsv").write_text("A\nB\n")
        return "tables next to it"
    if name == "ragged table":
        (folder / "genes.tsv").write_text("A\tB\nC\n")
        return "as many"
    path.write_text(text.replace("7 5 ", "7 x ", 1))
    return "size line"


@pytest.mark.parametrize(
    "name",
    ["cut", "words", "outside", "header", "announced", "other run", "ragged table", "size"],
)
def test_damaged_market_folders_are_refused_by_name(tmp_path: Path, name: str) -> None:
    """Each way for a folder to be wrong is told with the file."""
    write_mtx(tmp_path / "run", packed=False)
    said = damage(tmp_path / "run", name)
    with pytest.raises(SourceError, match=said):
        list(tenx_mtx_source(tmp_path / "run").blocks(("X",), 10))


@pytest.mark.parametrize(
    "ends", [["1 1", "2 1 1 1"], [f"1 1 {1 << 70}"], ["1.5 1 1"]], ids=["shifted", "huge", "fraction"]
)
def test_lines_that_are_no_entry_are_refused(tmp_path: Path, ends: list[str]) -> None:
    """Numbers that slipped into another line, do not fit 64 bits, or are no place are told instead of being read as others."""
    header = f"%%MatrixMarket matrix coordinate {'real' if '.' in ends[0] else 'integer'} general"
    write_mtx(tmp_path / "run", packed=False, header=header)
    path = tmp_path / "run" / "matrix.mtx"
    path.write_text("\n".join([*path.read_text().splitlines()[: -len(ends)], *ends]) + "\n")
    with pytest.raises(SourceError, match="not 3 numbers"):
        list(tenx_mtx_source(tmp_path / "run").blocks(("X",), 10))


def test_a_cut_gzip_is_refused(tmp_path: Path) -> None:
    """A packed file that ends early is told."""
    write_mtx(tmp_path / "run", packed=True)
    path = tmp_path / "run" / "matrix.mtx.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(SourceError, match="cut short"):
        list(tenx_mtx_source(tmp_path / "run").blocks(("X",), 10))


def test_absent_tables_are_named(tmp_path: Path) -> None:
    """A folder without its features says so."""
    write_mtx(tmp_path / "run", packed=False)
    (tmp_path / "run" / "genes.tsv").unlink()
    with pytest.raises(NotFoundError, match=r"features\.tsv or genes\.tsv"):
        tenx_mtx_source(tmp_path / "run")


def test_tables_that_do_not_fit_an_h5_are_refused(tmp_path: Path) -> None:
    """Too few barcodes or ids are told with the element."""
    for name in ("barcodes", "features/id"):
        write_h5(tmp_path / "x.h5", ["Gene Expression"] * 7)
        with h5py.File(tmp_path / "x.h5", "r+") as file:
            del file[f"matrix/{name}"]
            file[f"matrix/{name}"] = np.array([b"A"])
        with pytest.raises(SourceError, match=f"matrix/{name}"):
            tenx_h5_source(tmp_path / "x.h5")


def test_texts_become_the_table_of_their_frame(tmp_path: Path) -> None:
    """Features and cells are read as `frame_to_arrow` writes frames of them, metadata too."""
    write_h5(tmp_path / "a.h5", ["Gene Expression"] * 7)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        del file["matrix/barcodes"]
        file["matrix/barcodes"] = np.array([b"a", b"c", "\u00e9".encode(), b"", b"b"])
    source = tenx_h5_source(tmp_path / "a.h5")
    for table in (source.cells(), source.features("var")):
        assert frame_to_arrow(arrow_to_frame(table)).equals(table, check_metadata=True)
    assert source.cells().column("_index").to_pylist() == ["a", "c", "\u00e9", "", "b"]


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    """The message names the element and its text, or the line of a table."""
    write_h5(tmp_path / "a.h5", ["Gene Expression"] * 7)
    with h5py.File(tmp_path / "a.h5", "a") as file:
        del file["matrix/barcodes"]
        file["matrix/barcodes"] = np.array([b"a", b"caf\xe9", b"c", b"d", b"b"])
    with pytest.raises(SourceError, match=r"matrix/barcodes has the text b'caf\\xe9', which is not UTF-8"):
        tenx_h5_source(tmp_path / "a.h5").cells()
    write_mtx(tmp_path / "run", packed=True)
    with gzip.open(tmp_path / "run" / "barcodes.tsv.gz", "wb") as file:
        file.write(b"a\nb\ncaf\xe9\nd\ne\n")
    with pytest.raises(SourceError, match=r"barcodes\.tsv\.gz is not UTF-8 in line 3; convert it"):
        open_source(tmp_path / "run")


def test_samples_of_a_folder_have_prefixes(tmp_path: Path) -> None:
    """One sample is read from its folder, of two each by its matrix; both are found, and quotes of R are no part of names."""
    write_mtx(tmp_path, packed=True)
    for path in list(tmp_path.iterdir()):
        path.rename(tmp_path / f"GSM1_A_{path.name}")
    source = open_source(tmp_path)
    np.testing.assert_array_equal(whole(source, "X"), MATRIX.toarray())
    assert source.describe().name == "GSM1_A"
    source.close()
    for path in list(tmp_path.iterdir()):
        (tmp_path / path.name.replace("GSM1_A", "GSM2_B")).write_bytes(path.read_bytes())
    with gzip.open(tmp_path / "GSM2_B_barcodes.tsv.gz", "wt") as file:
        file.write("".join(f'"b\\"{i}"\n' for i in range(5)))
    with pytest.raises(SourceError, match="GSM2_B_matrix"):
        open_source(tmp_path)
    matrices = [tmp_path / f"{name}_matrix.mtx.gz" for name in ("GSM1_A", "GSM2_B")]
    assert list_sources(tmp_path) == matrices
    (tmp_path / "nested").mkdir()
    for name in ("tree.swc", ".hidden"):
        (tmp_path / name).touch()
    assert list_left_out(tmp_path, matrices) == ["nested", "tree.swc"]
    source = open_source(matrices[1])
    assert source.cells().column(0).to_pylist() == [f'b"{i}' for i in range(5)]
    source.close()


@pytest.mark.parametrize("packed", [False, True])
def test_matrices_of_kallisto_and_parse_are_cells_by_features(tmp_path: Path, packed: bool) -> None:
    """Their rows are cells; names, symbols and columns of the cells come from the tables beside them."""
    opener, ending = (gzip.open, ".gz") if packed else (open, "")
    coo = sp.coo_array(MATRIX)
    text = "\n".join([
        "%%MatrixMarket matrix coordinate integer general", f"5 7 {coo.nnz}",
        *(f"{r + 1} {c + 1} {v}" for r, c, v in zip(*coo.coords, coo.data, strict=True)),
    ])  # fmt: skip
    files = {
        "kallisto": {
            "cells_x_genes.mtx": text,
            "cells_x_genes.barcodes.txt": "\n".join(f"BC{i}" for i in range(5)),
            "cells_x_genes.genes.txt": "\n".join(f"ENSG{i}" for i in range(7)),
            "cells_x_genes.genes.names.txt": "\n".join(f"G{i}" for i in range(7)),
        },
        "parse": {
            "count_matrix.mtx": text,
            "cell_metadata.csv": "bc_wells,sample,count\n" + "\n".join(f"BC{i},s{i % 2},{i}" for i in range(5)),
            "all_genes.csv": "gene_id,gene_name,genome\n" + "\n".join(f"ENSG{i},G{i},hg38" for i in range(7)),
        },
    }
    for name, parts in files.items():
        (tmp_path / name).mkdir()
        for part, content in parts.items():
            with opener(tmp_path / name / (part + ending), "wt") as file:
                file.write(content + "\n")
        found = ra.read(tmp_path / name)
        np.testing.assert_array_equal(found.X.toarray(), MATRIX.toarray())
        assert found.obs_names.tolist() == [f"BC{i}" for i in range(5)]
        assert found.var_names.tolist() == [f"ENSG{i}" for i in range(7)]
        assert found.var["symbol"].tolist() == [f"G{i}" for i in range(7)]
        assert [path.name for path in list_sources(tmp_path / name)] == [name]
    assert found.obs["sample"].tolist() == ["s0", "s1", "s0", "s1", "s0"]
    assert found.obs["count"].tolist() == [0, 1, 2, 3, 4]


def test_names_are_taken_as_they_are(tmp_path: Path) -> None:
    """Names that a table of numbers could have for missing values or numbers stay text; only a line break ends a line."""
    matrix = "%%MatrixMarket matrix coordinate integer general\n2 3 1\n1 1 5\n"
    genes = [("NA", "nan"), ("007", "1.10"), ("x", "a\x85\u2028b")]
    for name in ("parse", "cellranger"):
        (tmp_path / name).mkdir()
    (tmp_path / "parse/DGE.mtx").write_text(matrix)
    (tmp_path / "parse/cell_metadata.csv").write_text("bc_wells,n\nNA,1\n01,\n")
    table = "".join(f"{key},{symbol}\n" for key, symbol in genes)
    (tmp_path / "parse/all_genes.csv").write_text("gene_id,gene_name\n" + table, encoding="utf-8")
    (tmp_path / "cellranger/matrix.mtx").write_text(matrix.replace("2 3 1", "3 2 1"))
    (tmp_path / "cellranger/barcodes.tsv").write_text("NA\r\n01\r\n")
    (tmp_path / "cellranger/features.tsv").write_text(table.replace(",", "\t"), encoding="utf-8")
    for name in ("parse", "cellranger"):
        found = ra.read(tmp_path / name)
        assert found.obs_names.tolist() == ["NA", "01"]
        assert list(found.var["symbol"].items()) == genes


def test_other_matrices_of_a_folder_are_left_out_by_name(tmp_path: Path) -> None:
    """STARsolo writes a second matrix, of reads that map to several genes."""
    write_mtx(tmp_path / "solo", packed=False)
    (tmp_path / "solo" / "UniqueAndMult-EM.mtx").write_text("%%MatrixMarket matrix coordinate real general\n")
    with contextlib.closing(open_source(tmp_path / "solo")) as source:
        assert source.describe().left_out == {"UniqueAndMult-EM.mtx": "another matrix of the folder"}
