"""The command: every verb once done and once refused, the whole walk, JSON, errors in one line, completion."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.sparse import csr_matrix

import raggedatlas as ra
from command import ask, done, read, refused
from raggedatlas import __version__
from raggedatlas.cli import printing
from raggedatlas.cli.commands import app
from raggedatlas.cli.options import parse_pairs, parse_version
from raggedatlas.cli.printing import fit_widths, format_value, plain, printable
from raggedatlas.errors import MissingExtraError
from support.command_page import options_page


def small(path: Path, name: str, genes: list[str], seed: int) -> str:
    """Write a small file with cell types."""
    rng = np.random.default_rng(seed)
    n = 12
    adata = ad.AnnData(
        X=csr_matrix(rng.poisson(1.5, (n, len(genes))).astype(np.float32)),
        obs=pd.DataFrame(
            {"cell_type": ["B", "T", "NK"] * 4, "donor": [f"d{seed}"] * n},
            index=[f"{name}_{i}" for i in range(n)],
        ),
        var=pd.DataFrame(index=genes),
    )
    adata.write_h5ad(path / f"{name}.h5ad")
    return str(path / f"{name}.h5ad")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two files that share one of their genes."""
    folder = tmp_path_factory.mktemp("files")
    return small(folder, "one", ["CD79A", "MS4A1", "CD3E"], 1), small(folder, "two", ["CD79A", "NKG7"], 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, files: tuple[str, str]) -> Path:
    """An atlas with a snapshot `first` of one dataset and `second` of two; tests that write take a copy."""
    path = tmp_path_factory.mktemp("made") / "my.atlas"
    done("create", path)
    done("add", path, files[0], "--organism", "human")
    done("snapshot", path, "--label", "first")
    done("add", path, files[1], "--organism", "human")
    done("snapshot", path, "--label", "second")
    return path


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "own.atlas"))


def test_the_whole_walk_takes_under_ten_commands(data_dir: Path, tmp_path: Path) -> None:
    """Two real files with different genes are created, added, snapshot, looked at, queried and written in eight commands."""
    atlas, out = tmp_path / "pbmc.atlas", tmp_path / "few.h5ad"
    sources = [data_dir / "lung_C144.h5", data_dir / "pbmc_5k_protein_v3.h5ad"]
    done("create", atlas)
    reports = read("add", atlas, *sources)
    assert [(r["status"], r["n_cells"]) for r in reports] == [("added", 250), ("added", 200)]
    assert len(read("ls", atlas)) == 2
    assert read("snapshot", atlas, "--label", "first") == {"version": 1, "label": "first"}
    assert "450 cells" in done("query", atlas, "-f", "CD79A", "-f", "MS4A1")
    assert read("query", atlas, "n_genes > 1000", "--count")["n_cells"] > 0
    done("export", atlas, out, "-f", "CD79A", "-f", "MS4A1", "--where", "n_genes > 1000")
    assert "Nothing is wrong" in done("validate", atlas, "--level", "deep")
    written = ad.read_h5ad(out)
    assert written.n_vars == 2
    assert (written.obs["n_genes"] > 1000).all()


def test_conditions_name_datasets_and_columns_as_they_are_shown(made: Path) -> None:
    """A dataset is chosen by its name, in every verb that takes SQL."""
    assert read("query", made, "dataset = 'one' AND cell_type IN ('B', 'T')", "--count") == {"n_cells": 8}
    assert read("query", made, "--where", "dataset LIKE 't%'", "--count") == {"n_cells": 12}


def test_verify_names_what_is_damaged(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root hashes and counts; a second incremental call reads nothing, and damage ends with exit code 1 and its path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    record = read("versions", own)[0]
    told = done("verify", own, "--incremental")
    assert f"Snapshot 1: root hash {record['root']}" in told
    assert "Nothing is wrong" in told
    assert "0 files of 0 bytes read" in done("verify", own, "--incremental")
    assert read("verify", own, "--snapshot", "first")["sound"]
    assert read("validate", own, "--level", "deep", "--incremental") == []
    assert "--level files or deep" in refused("validate", own, "--incremental", code=2)
    file = next(own.glob("zarr_store/*/bundle.zip"))
    file.write_bytes(b"")
    result = ask("verify", own, "--incremental", "--at", 2)
    assert (result.exit_code, f"{file.parent.name}/bundle.zip" in result.stdout) == (1, True)
    assert not json.loads(ask("verify", own, "--json").stdout)["sound"]


def test_a_misspelt_value_warns_and_is_refused_when_strict(made: Path, tmp_path: Path) -> None:
    """A value that no cell has is answered with the near ones on stderr; --strict makes it exit code 1 and writes nothing."""
    asked = ("query", made, "cell_type = 'nk'", "--count")
    loose = ask(*asked)
    assert (loose.exit_code, loose.stdout) == (0, "0\n")
    assert loose.stderr == "raggedatlas: warning: No cell has cell_type 'nk'. Did you mean 'NK'?\n"
    assert "Did you mean 'NK'?" in refused(*asked, "--strict")
    assert "Did you mean 'one'?" in refused("export", made, tmp_path / "x.h5ad", "-w", "dataset = 'onee'", "--strict")
    assert not (tmp_path / "x.h5ad").exists()
    assert ask("query", made, "cell_type = 'NK'", "--count", "--strict").exit_code == 0


def test_create(tmp_path: Path) -> None:
    """An atlas is made once."""
    assert read("create", tmp_path / "a")["uri"].endswith("a")
    assert "atlas" in refused("create", tmp_path / "a")
    assert "raggedatlas snapshot" in refused("query", tmp_path / "a")


def test_add_takes_choices(tmp_path: Path, files: tuple[str, str]) -> None:
    """Columns are chosen and renamed, the layer and the dataset get the names asked for, a dry run writes nothing."""
    atlas = tmp_path / "a"
    done("create", atlas)
    words = ["add", atlas, files[0], "--obs", "cell_type=kind", "--layer", "X=counts", "--organism", "human"]
    words += ["--name", "mine"]
    assert read(*words, "--dry-run")[0]["status"] == "dry run"
    assert read("ls", atlas) == []
    fates = {c["name"]: (c["fate"], c["stored_as"]) for c in read(*words)[0]["columns"]}
    assert fates["cell_type"] == ("renamed", "kind")
    assert fates["donor"] == ("kept", "donor")
    listed = read("ls", atlas)
    assert [(row["name"], row["layers"]) for row in listed] == [("mine", ["gene_expression/counts"])]
    assert read(*words, "--on-duplicate", "skip")[0]["status"] == "skipped"
    columns = read("add", atlas, files[1], "--obs", "donor", "--organism", "human")[0]["columns"]
    assert [c["name"] for c in columns if c["fate"] == "left out"] == ["cell_type"]


def test_add_tells_progress_in_lines(tmp_path: Path, files: tuple[str, str]) -> None:
    """Where there is no terminal, progress goes to stderr line by line, and stdout has the answer alone."""
    atlas = tmp_path / "a"
    done("create", atlas)
    result = ask("add", atlas, *files, "--organism", "human", "--json")
    assert len(json.loads(result.stdout)) == 2
    assert "add: block 12 of 12" in result.stderr.splitlines()


def test_ls(made: Path, tmp_path: Path) -> None:
    """Datasets are listed, of the newest state or a snapshot."""
    assert [row["name"] for row in read("ls", made)] == ["one", "two"]
    assert [row["name"] for row in read("ls", made, "--at", "first")] == ["one"]
    lines = done("ls", made).splitlines()
    assert lines[0].split() == ["name", "cells", "features", "layers", "added", "uid"]
    assert len(lines) == 3
    assert "no atlas" in refused("ls", tmp_path / "none")


def test_info(made: Path) -> None:
    """Counts, features, columns and snapshots are told."""
    facts = read("info", made)
    assert (facts["datasets"], facts["cells"], facts["features"]) == (2, 24, {"gene_expression": 4})
    assert facts["columns"] == ["cell_type", "donor"]
    assert facts["snapshots"] == ["first", "second"]
    assert read("info", made, "--at", "1")["cells"] == 12
    assert "gene_expression: 4" in done("info", made)
    assert "first" in refused("info", made, "--at", "third")


def test_features(made: Path) -> None:
    """Names are looked up; an unknown one is told and gives exit code 1."""
    found = read("features", made, "CD79A", "NKG7")
    assert [row["asked"] for row in found["found"]] == ["CD79A", "NKG7"]
    assert found["unknown"] == []
    assert len(read("features", made, "--limit", "3")) == 3
    assert "4 in all" in done("features", made, "--limit", "3")
    assert "NOPE" in refused("features", made, "CD79A", "NOPE")
    assert "space" in refused("features", made, "--space", "nowhere")


def test_find(made: Path) -> None:
    """Datasets are found by all or any of the features."""
    assert [row["name"] for row in read("find", made, "CD79A", "NKG7")] == ["two"]
    assert {row["name"] for row in read("find", made, "MS4A1", "NKG7", "--any")} == {"one", "two"}
    assert "two" in done("find", made, "NKG7")
    assert "NOPE" in refused("find", made, "NOPE")


def test_query_shows_cells_and_values(made: Path, files: tuple[str, str]) -> None:
    """Cells come with the values of the asked features, equal to the file's."""
    words = ["query", made, "cell_type = 'B'", "--where", "dataset_uid IS NOT NULL", "-f", "CD79A", "-f", "NKG7"]
    words += ["--head", "100"]
    document = read(*words, "--at", "second")
    assert (document["snapshot"], document["n_cells"], len(document["cells"])) == (2, 8, 8)
    source = ad.read_h5ad(files[1]).to_df()
    for cell in document["cells"]:
        if cell["dataset"] == "two":
            assert cell["values"] == source.loc[cell["cell_name"], ["CD79A", "NKG7"]].to_dict()
        else:
            assert cell["values"]["NKG7"] == 0
    nan = read(*words, "--missing", "nan")
    assert {cell["values"]["NKG7"] for cell in nan["cells"] if cell["dataset"] == "one"} == {None}
    text = done(*words)
    assert text.splitlines()[0].split()[:3] == ["CD79A", "NKG7", "cell_name"]
    assert "8 cells at snapshot 2" in text


def test_query_counts_and_explains(made: Path, tmp_path: Path) -> None:
    """Counts, group counts, the plan and a file can be had of the same question."""
    assert done("query", made, "cell_type = 'B'", "--count") == "8\n"
    assert read("query", made, "--by", "cell_type") == [{"cell_type": t, "n_cells": 8} for t in ("B", "NK", "T")]
    assert "n_cells" in done("query", made, "--by", "cell_type", "--by", "donor")
    assert "filter" in done("query", made, "cell_type = 'B'", "--explain")
    out = tmp_path / "b.h5ad"
    assert read("query", made, "cell_type = 'B'", "--limit", "3", "-o", out)["n_cells"] == 3
    assert ad.read_h5ad(out).n_obs == 3


def test_query_orders_samples_and_joins(made: Path) -> None:
    """Order, sample, limit, columns and join reach the query."""
    rows = read("query", made, "--order-by", "cell_type", "--descending", "--obs", "cell_type", "--limit", "8")["cells"]
    assert [row["cell_type"] for row in rows] == ["T"] * 8
    assert "donor" not in rows[0]
    assert read("query", made, "--sample", "2", "--sample-by", "donor", "--seed", "3")["n_cells"] == 4
    words = ["query", made, "--space", "gene_expression", "--layers", "counts", "--explain"]
    assert "1 columns" in done(*words, "--join", "intersection")
    assert "1 columns" in done(*words, "--join", "2")
    assert "4 columns" in done(*words)
    assert done("query", made, "cell_type = 'no such'").endswith("0 cells at snapshot 2\n")


def test_export(made: Path, tmp_path: Path) -> None:
    """Cells go to an AnnData file or folder, or their metadata to a table; nothing is overwritten unasked."""
    out = tmp_path / "b.zarr"
    document = read("export", made, out, "--where", "cell_type = 'B'", "--at", "first")
    assert document == {"path": str(out), "snapshot": 1, "n_cells": 4}
    assert ad.read_zarr(out).shape == (4, 3)
    done("export", made, tmp_path / "b.csv", "--where", "cell_type = 'B'")
    assert len(pd.read_csv(tmp_path / "b.csv")) == 8
    assert "24 cells" in done("export", made, tmp_path / "all.parquet")
    assert len(pd.read_parquet(tmp_path / "all.parquet")) == 24
    assert "--overwrite" in refused("export", made, tmp_path / "b.csv")
    done("export", made, tmp_path / "b.csv", "--overwrite")
    assert "overwrite" in refused("export", made, out)
    assert ".xlsx" in refused("export", made, tmp_path / "b.xlsx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.parquet", "b.csv", "b.zarr"]


def test_snapshot_and_versions(own: Path, tmp_path: Path) -> None:
    """Snapshots get numbers and labels; a label is taken once."""
    assert done("snapshot", own).startswith("Snapshot 3 of")
    assert [(v["version"], v["label"]) for v in read("versions", own)] == [(1, "first"), (2, "second"), (3, None)]
    assert "second" in done("versions", own)
    assert "first" in refused("snapshot", own, "--label", "first")
    assert "no atlas" in refused("versions", tmp_path / "none")


def test_checkout(made: Path) -> None:
    """A snapshot is described by number or label."""
    document = read("checkout", made, "first")
    assert (document["version"], document["n_cells"], [d["name"] for d in document["datasets"]]) == (1, 12, ["one"])
    assert read("checkout", made, "1") == document
    assert "two" in done("checkout", made, "second")
    assert "second" in refused("checkout", made, "third")


def test_diff(made: Path) -> None:
    """What changed between two snapshots is told."""
    found = read("diff", made, "first", "2")
    assert (found["cells_added"], found["cells_removed"], len(found["datasets_added"])) == (12, 0, 1)
    assert "gene_expression features added" in done("diff", made, "1", "2")
    assert done("diff", made, "1", "2") == f"{ra.RaggedAtlas.open(str(made)).diff(1, 2)}\n"
    assert "do not differ" in done("diff", made, "1", "1")
    assert "third" in refused("diff", made, "1", "third")


def test_restore(own: Path) -> None:
    """An older snapshot becomes the newest state again."""
    done("restore", own, "first")
    assert [row["name"] for row in read("ls", own)] == ["one"]
    assert "third" in refused("restore", own, "third")


def test_validate(own: Path) -> None:
    """A sound atlas gives exit code 0, a damaged one 1 with the problems on stdout."""
    assert read("validate", own) == []
    assert "Nothing is wrong" in done("validate", own, "--at", "first")
    uid = read("ls", own)[0]["uid"]
    shutil.rmtree(own / "zarr_store" / uid)
    result = ask("validate", own, "--level", "rows", "--json")
    assert result.exit_code == 1
    assert {problem["rule"] for problem in json.loads(result.stdout)} == {"missing-array"}
    assert "--level" in refused("validate", own, "--level", "thorough", code=2)


def test_repair_optimize_gc(own: Path, tmp_path: Path) -> None:
    """Care leaves a sound atlas as it is; gc frees only when told to."""
    done("optimize", own)
    assert read("optimize", own) == {"optimized": str(own)}
    assert read("repair", own)["n_cells"] == 0
    assert read("gc", own)["dry_run"] is True
    assert done("gc", own).startswith("Dry run: ")
    assert done("gc", own, "--delete", "--grace", "0").startswith("Done: ")
    assert len(read("ls", own)) == 2
    for verb in ("repair", "optimize", "gc"):
        assert "no atlas" in refused(verb, tmp_path / "none")


def test_add_csc(own: Path) -> None:
    """A column-sorted copy is written once."""
    assert read("add-csc", own, "one")["layers"] == ["counts"]
    assert "already" in done("add-csc", own, "one")
    assert "three" in refused("add-csc", own, "three")


def test_drop_and_purge(own: Path) -> None:
    """A dropped dataset stays in its snapshots; a purged one does not, and purging must be meant."""
    done("drop", own, "two")
    assert [row["name"] for row in read("ls", own)] == ["one"]
    assert len(read("ls", own, "--at", "second")) == 2
    assert "two" in refused("drop", own, "two")
    assert "--yes" in refused("purge", own, "one", code=2)
    assert "three" in refused("purge", own, "three", "--yes")
    done("purge", own, "one", "--yes")
    assert read("ls", own, "--at", "first") == []


def test_delete_cells(own: Path, tmp_path: Path) -> None:
    """Cells go by condition or by file; a dry run only counts them, and snapshots keep them."""
    n_cells = {row["name"]: row["n_cells"] for row in read("ls", own)}
    (tmp_path / "uids.txt").write_text(
        "\n".join(row["uid"] for row in read("query", own, "dataset = 'one'", "--limit", "2")["cells"])
    )
    report = read("delete-cells", own, "--uids", tmp_path / "uids.txt", "--dry-run")
    assert (report["n_cells"], report["dry_run"], list(report["datasets"].values())) == (2, True, [2])
    assert "Dry run: 2 cells" in done("delete-cells", own, "--uids", tmp_path / "uids.txt", "--dry-run")
    assert {row["name"]: row["n_cells"] for row in read("ls", own)} == n_cells
    shown = done("delete-cells", own, "--uids", tmp_path / "uids.txt")
    assert f"one: 2 of {n_cells['one']} cells" in shown
    assert "raggedatlas restore ATLAS" in shown
    assert read("ls", own)[0]["n_cells"] == n_cells["one"] - 2
    assert read("ls", own, "--at", "second")[0]["n_cells"] == n_cells["one"]
    done("snapshot", own)
    assert int(done("query", own, "dataset = 'one'", "--count")) == n_cells["one"] - 2
    assert "no cell matches; nothing was written" in done("delete-cells", own, "cell_name = 'nobody'")
    assert "raggedatlas drop ATLAS" in refused("delete-cells", own, "dataset = 'one'")
    assert "--uids" in refused("delete-cells", own, code=2)
    assert "nope.txt" in refused("delete-cells", own, "--uids", "nope.txt")


def test_snapshots_go_and_datasets_are_renamed(own: Path) -> None:
    """By number, by label or by age; what would go is listed first."""
    done("rename", own, "two", "zwei")
    assert [row["name"] for row in read("ls", own)] == ["one", "zwei"]
    assert "three" in refused("rename", own, "three", "x")
    done("snapshot", own)
    assert "snapshot 1 (first) of" in done("expire-snapshots", own, "--keep-last", "1", "--labels", "--dry-run")
    assert "Done\n  snapshot 1 (first) of" in done("drop-snapshot", own, "first")
    assert "nope" in refused("drop-snapshot", own, "nope")
    assert "--keep-last" in refused("expire-snapshots", own, code=2)
    done("expire-snapshots", own, "--keep-last", "1", "--labels")
    assert [row["version"] for row in read("versions", own)] == [3]


@pytest.mark.parametrize(
    "words", [["--nope"], ["nope"], ["ls"], ["query", "a", "--limit", "-1"], ["ls", "a", "--storage-option", "b"]]
)
def test_a_command_that_is_not_understood_gives_exit_code_2(words: list[str]) -> None:
    """Usage errors are one line that names the help."""
    assert "--help" in refused(*words, code=2)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    """With --debug, before or after the verb, the error itself comes through."""
    for words in (["--debug", "ls", tmp_path], ["ls", tmp_path, "--debug"]):
        assert type(ask(*words).exception).__name__ == "NotFoundError"


@pytest.mark.long
def test_help_of_every_verb_has_an_example() -> None:
    """Every verb has a help text that ends with an example of itself."""
    for command in app.registered_commands:
        name = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        assert f"Example: raggedatlas {name} " in done(name, "--help")
        assert (command.callback.__doc__ or "").strip()


def run(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as people do."""
    return subprocess.run(
        [sys.executable, "-m", "raggedatlas", *map(str, words)],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.long
def test_the_process_exits_as_it_should(made: Path, tmp_path: Path) -> None:
    """A process prints JSON and exits 0, or one line without a traceback and exits 1 or 2, or the traceback when asked."""
    told = run("versions", made, "--json")
    assert (told.returncode, told.stderr, len(json.loads(told.stdout))) == (0, "", 2)
    for words, code in ((["ls", tmp_path], 1), (["ls", "--nope"], 2)):
        wrong = run(*words)
        assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (code, "", 1)
        assert wrong.stderr.startswith("raggedatlas: ")
    assert "Traceback" in run("--debug", "ls", tmp_path).stderr
    assert run("--version").stdout == f"raggedatlas {__version__}\n"
    assert run().returncode == 2


def test_a_reader_that_leaves_is_no_error(made: Path) -> None:
    """A closed pipe ends the command without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(
        [sys.executable, "-m", "raggedatlas", "ls", str(made)], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )  # fmt: skip
    os.close(writer)
    assert (child.returncode, child.stderr) == (0, "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints(shell: str) -> None:
    """The completion script of each shell can be printed."""
    script = run(_RAGGEDATLAS_COMPLETE=f"source_{shell}")
    assert script.returncode == 0
    assert "_RAGGEDATLAS_COMPLETE" in script.stdout


def test_verbs_are_completed() -> None:
    """The beginning of a verb is answered with the verbs that begin so."""
    answer = run(_RAGGEDATLAS_COMPLETE="complete_bash", COMP_WORDS="raggedatlas sn", COMP_CWORD="1")
    assert "snapshot" in answer.stdout


def test_values_are_written_for_people_and_for_scripts() -> None:
    """Numbers, missing values and names with control characters come out on one line; JSON has null for what it cannot hold."""
    assert [format_value(v) for v in (True, np.int64(1234), 2.0, np.float32(0.5), pd.NA, pd.NaT, ("a", 1))] == [
        "yes", "1,234", "2", "0.5", "", "", "a, 1",
    ]  # fmt: skip
    assert plain({"a": [float("inf"), np.nan, np.bool_(True)], "b": {"c": None}}) == {
        "a": [None, None, True],
        "b": {"c": None},
    }
    assert printable("red\x1b[31m\nline") == "red?[31m?line"


@pytest.mark.nightly
def test_processes_share_the_work(files: tuple[str, str], tmp_path: Path) -> None:
    """With --workers, atlas and export are what they are without, and what one process does is refused."""
    found = []
    for workers in (1, 2):
        atlas, out = tmp_path / f"{workers}.atlas", tmp_path / f"{workers}.h5ad"
        done("create", atlas)
        reports = read("add", atlas, *files, "--workers", workers)
        done("snapshot", atlas)
        assert read("validate", atlas, "--level", "deep", "--workers", workers) == []
        done("export", atlas, out, "--workers", workers)
        written = ad.read_h5ad(out)
        found.append(
            ([report["content_hash"] for report in reports], written.X.toarray().tolist(), list(written.var_names))
        )
    assert found[0] == found[1]
    assert "is read by one process" in refused("validate", files[0], "--workers", 2, code=2)


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(1, 120))
def test_tables_fit(wanted: list[int], total: int) -> None:
    """Columns fit the terminal, none is wider than it wants, and none is cut or left out where there is room for all."""
    widths = fit_widths(wanted, total)
    assert sum(widths) + 2 * max(len(widths) - 1, 0) <= total
    assert all(width <= want for width, want in zip(widths, wanted, strict=False))
    assert all(width >= min(want, 12) for width, want in zip(widths, wanted, strict=False))
    if sum(wanted) + 2 * max(len(wanted) - 1, 0) <= total:
        assert widths == wanted


def test_a_narrow_terminal_cuts_what_is_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long texts end in an ellipsis, columns without room are named below, and no line is wider than the terminal."""
    monkeypatch.setattr(printing, "console", lambda: Console(width=40, highlight=False))
    printing.print_table([{"a": "x" * 60, "n": 1234, "c": "y" * 30, "d": "z" * 30}], ["a", "n", "c", "d"], empty="")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert "1,234" in lines[1]
    assert "…" in lines[1]
    assert lines[-1] == "... and 1 more columns: d"


def test_words_are_read() -> None:
    """The first equals sign divides a pair; a text of digits is a number of a snapshot."""
    assert parse_pairs(["a=b=c", "d="], "--x") == {"a": "b=c", "d": ""}
    assert (parse_version("12"), parse_version("v12")) == (12, "v12")


@pytest.mark.nightly
def test_lancedb_reads_the_tables_without_a_warning(made: Path) -> None:
    """Through `atlas.db` a filter finds the rows that are there, and nothing is printed about indexes."""
    script = (
        f"import raggedatlas as ra\natlas = ra.RaggedAtlas.open({str(made)!r})\n"
        "uid = atlas.checkout('latest').query().to_pandas().index[0]\n"
        "table = atlas.db.open_table('cells')\n"
        "assert table.count_rows(f\"uid = '{uid}'\") == 1\ntable.list_indices()\n"
    )
    # The lowest pydantic warns of names in models of lancedb's dependencies.
    words = [sys.executable, "-W", "ignore::UserWarning", "-c", script]
    run = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_without_lancedb_only_the_connection_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`db` names the extra to install."""
    monkeypatch.setitem(sys.modules, "lancedb", None)
    atlas = ra.RaggedAtlas.open(made)
    with pytest.raises(MissingExtraError, match=r"pip install 'raggedatlas\[lancedb\]'"):
        _ = atlas.db


def test_the_page_of_options_is_that_of_the_commands() -> None:
    """docs/reference/options.md is what `options_page` makes of the commands; write it again after a change."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
    assert page.read_text("utf-8") == options_page()


def test_groups_are_added_up_and_compared_as_in_python(made: Path, tmp_path: Path) -> None:
    """The tables of `aggregate` and `compare`, as JSON, as a file, and the first rows on the terminal."""
    query = ra.RaggedAtlas.open(made).checkout("second").query()
    groups = query.features("CD79A", "NKG7").aggregate(["dataset", "cell_type"])
    rows = read("aggregate", made, "--by", "dataset", "--by", "cell_type", "-f", "CD79A", "-f", "NKG7")
    assert [(r["dataset"], r["cell_type"], r["feature"]) for r in rows] == [
        (dataset, kind, feature)
        for dataset, kind in zip(groups.obs["dataset"], groups.obs["cell_type"], strict=True)
        for feature in groups.var_names
    ]
    np.testing.assert_array_equal([r["sum"] for r in rows], groups.layers["sum"].ravel())
    expected = query.compare({"cell_type": "B"}, {"cell_type": "T"}, method="wilcoxon")
    found = read("compare", made, "B", "T", "--by", "cell_type", "--method", "wilcoxon")
    assert [r["names"] for r in found] == [*expected["names"]]
    np.testing.assert_allclose([r["scores"] for r in found], expected["scores"])
    by_condition = read("compare", made, "cell_type = 'B'", "cell_type = 'T'", "--method", "wilcoxon")
    assert by_condition == found
    done("compare", made, "B", "--by", "cell_type", "-o", tmp_path / "b.csv")
    others = query.compare({"cell_type": "B"})
    np.testing.assert_allclose(pd.read_csv(tmp_path / "b.csv")["pvals"], others["pvals"])
    assert "the first 2 shown" in done("compare", made, "B", "--by", "cell_type", "--head", 2)
    assert "cannot be written" in refused("compare", made, "B", "--by", "cell_type", "-o", tmp_path / "b.txt")
    assert "exists" in refused("compare", made, "B", "--by", "cell_type", "-o", tmp_path / "b.csv")


def test_a_file_is_fixed(data_dir: Path, tmp_path: Path) -> None:
    """What was written is read as it was meant."""
    file = data_dir / "pbmc68k_reduced.h5ad"
    assert "1 fixed" in done("fix", file, tmp_path / "a.h5ad")
    assert "only files can be repaired" in refused(
        "fix", ra.RaggedAtlas.create(tmp_path / "c.atlas").uri, tmp_path / "d", code=2
    )
    one, other = (ad.read_h5ad(name).raw.X for name in (tmp_path / "a.h5ad", file))
    np.testing.assert_array_equal(one.toarray(), other.toarray())


def test_names_of_commands_may_have_underscores() -> None:
    """As the functions that they call."""
    one, other = (ask(name, "--help").stdout for name in ("save_to_database", "save-to-database"))
    assert "Give results an index" in one
    assert one == other.replace("raggedatlas save-to-database [", "raggedatlas save_to_database [")


def test_lists_are_lists_in_json(made: Path) -> None:
    """And times have zones."""
    (one, _) = read("ls", made)
    assert (one["spaces"], one["n_features"], one["layers"]) == (["gene_expression"], [3], ["gene_expression/counts"])
    assert one["created_at"].endswith("+00:00")


def test_a_misspelt_command_is_answered_with_one_full_stop() -> None:
    assert (
        refused("quer", code=2) == "raggedatlas: No such command 'quer'. Did you mean 'query'? See raggedatlas --help."
    )
