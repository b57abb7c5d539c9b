"""What joins in real files, worked out by a script that uses nothing of the package, is what joins in an atlas."""

import importlib.util
import shutil
from pathlib import Path

import pytest

DATA = Path("tests/data")
TABLES = DATA / "gene_tables"


@pytest.mark.nightly
def test_genes_of_real_files_join_as_pandas_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A 10x run and two files of symbols: every name and every count agrees, without tables and with them; a wrong count ends the script."""
    spec = importlib.util.spec_from_file_location("joined_genes", "scripts/joined_genes.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name in ("lung_C144.h5", "pbmc_5k_protein_v3.h5ad", "pbmc_10k_protein_v3.h5ad"):
        shutil.copy(DATA / name, tmp_path)
    tables = [
        "--gencode",
        str(TABLES / "genes_homo_sapiens.csv.gz"),
        "--hgnc",
        str(TABLES / "hgnc_complete_set_extract.txt"),
    ]
    monkeypatch.setattr("sys.argv", ["joined_genes.py", str(tmp_path), *tables, "--check"])
    script.main()
    said = capsys.readouterr()
    assert said.err.count("counts agree") == 2
    row = next(line for line in said.out.splitlines() if "lung" in line)
    _, *counts = (int(value.replace(",", "")) for value in row.strip("| ").split(" | ")[1:])
    assert counts[0] == 0 < counts[1] <= counts[2]
    monkeypatch.setattr(script, "count", lambda files, ends, **_: dict.fromkeys(files, 1))
    with pytest.raises(SystemExit, match="counts of the atlas"):
        script.main()
