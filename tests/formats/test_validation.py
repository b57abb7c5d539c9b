"""The validator and the inspection of AnnData files: every numbered rule is told where it is broken, and only there, on any file."""

import itertools
import json
import os
import re
import tracemalloc
import warnings
import zipfile
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import zarr
from anndata.io import write_elem
from hypothesis import given
from hypothesis import strategies as st

from raggedatlas import RaggedAtlas
from raggedatlas.errors import ArgumentError, AtlasError, NotFoundError, SourceError
from raggedatlas.formats.anndata import (
    RULES,
    Element,
    Limits,
    Problem,
    checks_arrays,
    file_tree,
    inspect,
    raise_if_invalid,
    repair,
    validate,
)
from raggedatlas.formats.anndata.checks_arrays import check_sparse
from raggedatlas.formats.anndata.file_tree import Node
from raggedatlas.formats.anndata.fixes import FIXES
from raggedatlas.formats.anndata.rules import AnnDataChecker, is_fixable
from raggedatlas.formats.copying import copy
from support.anndata_faults import (
    DAMAGES,
    FORMS,
    AnnDataDamage,
    Form,
    damage,
    declare,
    frame,
    open_for_writing,
    put,
    texts,
    write_good,
)
from support.anndata_strategies import anndatas
from support.hypothesis_profile import examples
from support.rules_page import rules_table, table_of


def rules_of(problems: list[Problem]) -> set[str]:
    return {problem.rule for problem in problems}


@pytest.mark.parametrize("form", FORMS)
def test_a_good_file_breaks_no_rule(form: Form, tmp_path: Path) -> None:
    """A file with every kind of element passes every rule at both levels; that awkward arrays are experimental is said."""
    path = write_good(tmp_path / "x", form)
    assert validate(path, "metadata") == validate(path, "full") == []
    assert rules_of(validate(write_good(tmp_path / "y", form, awkward=True), "full")) == {"A152"}


def test_files_of_formats_without_rules_are_refused(data_dir: Path, tmp_path: Path) -> None:
    """A sound 10x or loom file, or Market matrix, is not said to break the rules of AnnData; no copy of it is repaired."""
    with h5py.File(tmp_path / "a.loom", "w") as file:
        file["matrix"] = np.ones((2, 2))
        file.create_group("row_attrs")
        file.create_group("col_attrs")
    matrix = tmp_path / "run" / "GSM1_matrix.mtx.gz"
    matrix.parent.mkdir()
    matrix.touch()
    kinds = {data_dir / "lung_C144.h5": "10x file", tmp_path / "a.loom": "loom file"}
    for path, kind in {**kinds, matrix: "Market matrix", matrix.parent: "Market matrix"}.items():
        for limits in (None, Limits.of(path)):
            with pytest.raises(SourceError, match=f"is a {kind}, and the numbered rules are of AnnData"):
                validate(path, limits=limits)


def test_every_rule_has_a_damage() -> None:
    """There is a way to break each rule, none for a rule that does not exist, and mends only for rules that say so."""
    assert {found.rule for found in DAMAGES} == set(RULES)
    assert set(FIXES) == {rule.id for rule in RULES.values() if rule.fixed}


@pytest.fixture(scope="session")
def atlas(tmp_path_factory: pytest.TempPathFactory) -> RaggedAtlas:
    """An atlas without anything in it."""
    return RaggedAtlas.create(tmp_path_factory.mktemp("atlas") / "a.atlas")


@pytest.mark.parametrize("found", [d for d in DAMAGES if "hdf5" in d.forms], ids=lambda d: f"{d.rule}: {d.label}")
def test_each_damage_is_told(found: AnnDataDamage, atlas: RaggedAtlas, tmp_path: Path) -> None:
    """A damaged file is told by the rule that it breaks and by no other, and adding it is refused by that rule or works.

    It works where the rule says so; nothing of a refused file is left in the atlas.
    """
    path = write_good(tmp_path / "x.h5ad", "hdf5", awkward=found.awkward)
    damage(path, found.change)
    experimental = {"A152"} if found.awkward else set()
    problems = validate(path, "full")
    assert rules_of(problems) == {found.rule} | found.also | experimental, [str(p) for p in problems]
    assert all(
        p.message.endswith(".") and p.fix.endswith(".") and p.level in ("must", "should", "practice") for p in problems
    )
    assert told(found, problems)
    broken = {problem.rule for problem in problems if problem.level == "must"}
    stops = {rule for rule in broken if RULES[rule].refused}
    before = content(Path(atlas.uri))
    refused = ""
    try:
        report = atlas.add(path, dry_run=not stops, progress=False)
    except AtlasError as error:
        refused = str(error)
    assert content(Path(atlas.uri)) == before
    if refused:
        assert str(path) in refused
        assert any(rule in refused for rule in broken) or "A00" in broken, (refused, broken)
    else:
        assert not stops
        assert {rule for rule in broken if any(f"breaks {rule} " in note for note in report.notes)} == broken


ALONE = {"A11", "A12", "A13", "A70", "A74"}
"""Rules without which the others cannot be looked at."""

BY_VALUES = {"offsets go beyond the data", "invalid UTF-8", "a frame of other names"}
"""Damages that only values tell, of rules that can also be broken by metadata."""


def apart(one: str, other: str) -> bool:
    return not (f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/"))


def batches(form: Form) -> list[list[AnnDataDamage]]:
    """Gather damages that do not touch each other into few files; of Zarr only the first of each rule."""
    found: list[list[AnnDataDamage]] = []
    firsts = {d.rule: d for d in reversed(DAMAGES) if form in d.forms}
    for new in (d for d in DAMAGES if form in d.forms and (form == "hdf5" or firsts[d.rule] is d)):
        alone = new.rule in ALONE or not new.place
        fitting = (b for b in found if all(d.rule not in ALONE and d.place and apart(d.place, new.place) for d in b))
        batch = None if alone else next(fitting, None)
        if batch is None:
            found.append([new])
        else:
            batch.append(new)
    return found


BATCHES = [("hdf5", batch) for batch in batches("hdf5")]
BATCHES += [("zarr2" if i % 2 else "zarr3", batch) for i, batch in enumerate(batches("zarr3"))]


def told(found: AnnDataDamage, problems: list[Problem]) -> bool:
    """Tell whether a damage is among the problems of a file that has several."""
    inside = (p for p in problems if p.rule == found.rule)
    return any(not p.path or not apart(p.path, found.place) for p in inside)


@pytest.mark.parametrize(
    ("form", "batch"), BATCHES, ids=[f"{form}: {' '.join(d.rule for d in batch)}" for form, batch in BATCHES]
)
def test_damages_are_told_and_mended_in_every_kind_of_file(
    form: Form, batch: list[AnnDataDamage], tmp_path: Path
) -> None:
    """Many faults of one file are all told, by metadata where that is enough; a copy has those mended that have the rule's own advice.

    The file stays as it was. A copy that would break a must is refused, and anndata reads any other.
    """
    path = write_good(tmp_path / "bad", form, awkward=any(found.awkward for found in batch))
    for found in batch:
        damage(path, found.change)
    before = content(path)
    lists = {level: validate(path, level) for level in ("metadata", "full")}
    for found in batch:
        assert told(found, lists["full"]), found
        by_metadata = RULES[found.rule].depth == "metadata" and found.label not in BY_VALUES
        assert told(found, lists["metadata"]) == by_metadata or RULES[found.rule].depth == "full", found
    if any(problem.level == "must" and not is_fixable(problem) for problem in lists["full"]):
        with pytest.raises(SourceError, match="No copy was written"):
            repair(path, tmp_path / "fixed")
        assert sorted(at.name for at in tmp_path.iterdir()) == ["bad"]
    assert content(path) == before
    unfixed = {rule.id for rule in RULES.values() if rule.level == "must" and not rule.fixed}
    mendable = [
        found
        for found in batch
        if not found.also & unfixed and not any(musts_left(found, problem) for problem in lists["full"])
    ]
    path = write_good(tmp_path / "mendable", form, awkward=any(found.awkward for found in mendable))
    for found in mendable:
        damage(path, found.change)
    fixable = {problem.rule for problem in validate(path, "full") if is_fixable(problem)}
    done = repair(path, tmp_path / "fixed")
    assert list(done.left) == validate(tmp_path / "fixed", "full")
    for found in mendable:
        assert told(found, list(done.left)) != (found.rule in fixable), (found, done)
        assert any(line.startswith(f"{found.rule} ") for line in done.fixed) == (found.rule in fixable), (found, done)
    read = ad.read_h5ad if form == "hdf5" else ad.read_zarr
    with warnings.catch_warnings(action="ignore"):
        read(tmp_path / "fixed")


def musts_left(found: AnnDataDamage, problem: Problem) -> bool:
    """Tell whether a problem of a damaged place is a must that no fix is offered for."""
    inside = not problem.path or not apart(problem.path, found.place)
    return inside and problem.level == "must" and not is_fixable(problem)


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(at for at in path.rglob("*") if at.is_file())
    return {str(at.relative_to(path)): at.read_bytes() for at in files}


def musts(problems: list[Problem]) -> list[str]:
    return [str(problem) for problem in problems if problem.level == "must"]


def everything() -> ad.AnnData:
    """An AnnData with entries of uns of every kind that anndata writes."""
    adata = ad.AnnData(sp.random(4, 3, 0.5, format="csr", dtype=np.float32, rng=np.random.default_rng(0)))
    adata.layers["dense"], adata.layers["csc"] = np.ones((4, 3), np.float16), sp.csc_matrix(np.eye(4, 3))
    adata.obsm["e"], adata.obsp["g"], adata.varm["v"] = np.ones((4, 2)), sp.eye(4, format="csr"), np.ones((3, 1, 2))
    adata.raw = adata.copy()
    adata.uns = {
        "text": "ü", "whole": 3, "flag": True, "none": None, "bytes": np.array([b"a", b"bc"]), "empty": np.array([]),
        "texts": np.array([["a", "b"]]), "zero": np.array(5.0), "deep": {"er": {"k": [1, 2]}, "nothing": {}},
        "frame": adata.obs[[]].copy(), "matrix": sp.eye(2, format="csr"), "list": ["a", "b"],
    }  # fmt: skip
    return adata


@pytest.mark.nightly
@examples(5)
@given(anndatas())
def test_what_anndata_writes_breaks_no_must(tmp_path_factory: pytest.TempPathFactory, adata: ad.AnnData) -> None:
    """Whatever anndata writes as HDF5 keeps every rule that must be kept, and so does the file that a copy of it is."""
    folder = tmp_path_factory.mktemp("x")
    # Text with holes is what anndata 0.12 cannot write.
    adata.obs["text"] = [str(text) for text in adata.obs["text"]]
    with warnings.catch_warnings(action="ignore"):
        adata.write_h5ad(folder / "x.h5ad")
    assert musts(validate(folder / "x.h5ad", "full")) == []
    copy(folder / "x.h5ad", folder / "y.h5ad")
    assert {problem.rule for problem in validate(folder / "y.h5ad", "full")} <= {"A59"}


@pytest.mark.parametrize("form", FORMS)
def test_all_kinds_of_elements_break_no_must(form: Form, tmp_path: Path) -> None:
    """The same for all kinds of entries of uns, in each kind of file, compressed or not, and for what our sinks write."""
    with warnings.catch_warnings(action="ignore"):
        if form == "hdf5":
            everything().write_h5ad(tmp_path / "x.h5ad", compression="gzip")
        else:
            with ad.settings.override(zarr_write_format=2 if form == "zarr2" else 3):
                everything().write_zarr(tmp_path / "x.zarr")
    (path,) = tmp_path.iterdir()
    assert musts(validate(path, "full")) == []
    copy(path, tmp_path / f"y{path.suffix}")
    assert musts(validate(tmp_path / f"y{path.suffix}", "full")) == []


@pytest.mark.parametrize("name", ["pbmc68k_reduced.h5ad", "pbmc_5k_protein_v3.h5ad", "wu2020.h5mu"])
def test_real_files_break_no_must(data_dir: Path, name: str) -> None:
    """Published files of today's layout, and a MuData with awkward arrays, keep every rule that must be kept."""
    assert musts(validate(data_dir / name, "full")) == []


def test_old_layouts_are_told_as_old(data_dir: Path, tmp_path: Path) -> None:
    """A file of anndata 0.7, and one of records as 0.5 wrote it, are told to be old, and their faults are found all the same."""
    found = validate(data_dir / "pbmc_10k_protein_v3.h5ad", "full")
    assert musts(found) == []
    assert ("A11", "practice") in {(problem.rule, problem.level) for problem in found}
    write_old(tmp_path / "old.h5ad", (3, 2))
    assert [(p.rule, p.level) for p in validate(tmp_path / "old.h5ad", "full")] == [("A11", "practice")]
    write_old(tmp_path / "wrong.h5ad", (2, 2))
    assert [p.rule for p in validate(tmp_path / "wrong.h5ad", "full") if p.level == "must"] == ["A15"]


def write_old(path: Path, shape: tuple[int, int]) -> None:
    """Write the layout of anndata 0.5: tables are arrays of records, sparse groups have attributes of their own."""
    with h5py.File(path, "w") as file:
        file["obs"] = np.array([(b"c1", 0), (b"c2", 1), (b"c3", 0)], dtype=[("index", "S2"), ("kind", "i1")])
        file["var"] = np.array([(b"g1",), (b"g2",)], dtype=[("index", "S2")])
        file["uns/kind_categories"] = np.array([b"B", b"T"])
        matrix = sp.csr_matrix(np.ones(shape, np.float32))
        for name in ("data", "indices", "indptr"):
            file[f"X/{name}"] = getattr(matrix, name)
        file["X"].attrs["h5sparse_format"], file["X"].attrs["h5sparse_shape"] = "csr", shape


@given(st.data())
@examples(30)
def test_entries_are_counted_block_by_block(data: st.DataObject) -> None:
    """However a sparse matrix is cut into blocks, what is out of range, twice, or out of order is counted as by hand."""
    n_major, n_minor = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5))
    lengths = data.draw(st.lists(st.integers(0, 5), min_size=n_major, max_size=n_major))
    indptr = np.concatenate([[0], np.cumsum(lengths)])
    places = st.integers(-1, n_minor) if data.draw(st.booleans()) else st.integers(0, n_minor - 1)
    indices = np.array(data.draw(st.lists(places, min_size=int(indptr[-1]), max_size=int(indptr[-1]))), np.int32)
    rows = [indices[a:b].tolist() for a, b in itertools.pairwise(indptr)]
    with pytest.MonkeyPatch.context() as patch, h5py.File("x", "w", driver="core", backing_store=False) as file:
        patch.setattr(file_tree, "BLOCK_BYTES", data.draw(st.sampled_from([4, 8, 12, 1 << 20])))
        patch.setattr(checks_arrays, "POINTERS", data.draw(st.sampled_from([1, 2, 3, 1 << 20])))
        group = file.create_group("X")
        group["indptr"], group["indices"], group["data"] = indptr, indices, np.ones(len(indices))
        declare(group, "csr_matrix", "0.1.0").attrs["shape"] = (n_major, n_minor)
        checker = AnnDataChecker({}, full=True)
        check_sparse(checker, Node("x", "X", group))
    said = {
        (p.rule, p.message.split()[0] if "do not ascend" not in p.message else "unsorted") for p in checker.problems
    }
    inside = [[place for place in row if 0 <= place < n_minor] for row in rows]
    outside = sum(map(len, rows)) - sum(map(len, inside))
    twice = sum(len(row) - len(set(row)) for row in inside)
    assert ({n for rule, n in said if rule == "A58"} == {str(outside)}) == (outside > 0)
    assert (("A59", str(twice)) in said) == (twice > 0)
    assert (("A59", "unsorted") in said) == any(falls(row) for row in inside)


@pytest.mark.parametrize("pointers", [[0, 9, 9, 3], [0, 9, 3, 3], [0, 2, 9, 3]])
def test_pointers_that_decrease_in_a_later_block_are_told(pointers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers beyond the entries are told by their decrease, in whichever block it is."""
    monkeypatch.setattr(checks_arrays, "POINTERS", 2)
    with h5py.File("x", "w", driver="core", backing_store=False) as file:
        group = file.create_group("X")
        group["indptr"], group["indices"], group["data"] = pointers, np.arange(3, dtype=np.int32), np.ones(3)
        declare(group, "csr_matrix", "0.1.0").attrs["shape"] = (3, 5)
        checker = AnnDataChecker({}, full=True)
        check_sparse(checker, Node("x", "X", group))
    assert [problem.rule for problem in checker.problems] == ["A56"]


def falls(row: list[int]) -> bool:
    """Tell whether a place is smaller than the one before it and was not there yet."""
    return any(b < a and b not in row[: i + 1] for i, (a, b) in enumerate(itertools.pairwise(row)))


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 320 MB of values is read whole in blocks of 8 MiB and the like, and no more than a few of them are held at once."""
    n_obs, each, n_var = 40_000, 1_000, 2_000
    path = tmp_path / "large.h5ad"
    with h5py.File(path, "w") as file:
        declare(file, "anndata", "0.1.0")
        frame(file, "obs", "_index", texts(*(f"c{i}" for i in range(n_obs))), {})
        frame(file, "var", "_index", texts(*(f"g{i}" for i in range(n_var))), {})
        group = declare(file.create_group("X"), "csr_matrix", "0.1.0")
        group.attrs["shape"] = (n_obs, n_var)
        group["indptr"] = np.arange(n_obs + 1) * each
        packed = {"chunks": (1 << 18,), "compression": "gzip", "compression_opts": 1, "shuffle": True}
        for name, row in (("indices", np.arange(0, n_var, 2, np.int32)), ("data", np.ones(each, np.float32))):
            made = group.create_dataset(name, (n_obs * each,), row.dtype, **packed)
            rows = np.tile(row, 1_000)
            for start in range(0, n_obs * each, rows.size):
                made[start : start + rows.size] = rows
    reads: list[int] = []
    part = Node.part

    def counted(node: Node, start: int, stop: int) -> Any:
        values = part(node, start, stop)
        reads.append(values.nbytes)
        return values

    monkeypatch.setattr(Node, "part", counted)
    validate(write_good(tmp_path / "small.h5ad", "hdf5"), "full")  # loads what is loaded once
    tracemalloc.start()
    reads.clear()
    try:
        assert validate(path, "full") == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(reads) > 8 * n_obs * each
    assert max(reads) <= file_tree.BLOCK_BYTES
    assert peak < 8 * file_tree.BLOCK_BYTES


def test_a_cut_file_is_refused_and_a_damaged_chunk_is_told(tmp_path: Path) -> None:
    """A truncated file cannot be opened; a chunk that does not decode is told by element, once values are read."""
    with h5py.File(tmp_path / "x.h5ad", "w") as file:
        good = write_good(tmp_path / "good.h5ad", "hdf5")
        with h5py.File(good) as source:
            for name in source:
                source.copy(name, file)
            file.attrs.update(source.attrs)
        del file["layers/dense"]
        values = np.random.default_rng(0).normal(size=(3, 4))
        declare(file.create_dataset("layers/dense", data=values, chunks=(3, 4), compression="gzip"), "array", "0.2.0")
        offset = file["layers/dense"].id.get_chunk_info(0).byte_offset
    with (tmp_path / "x.h5ad").open("r+b") as raw:
        raw.seek(offset + 4)
        raw.write(b"\x00" * 16)
    assert validate(tmp_path / "x.h5ad") == []
    assert [(p.rule, p.path) for p in validate(tmp_path / "x.h5ad", "full")] == [("A00", "layers/dense")]
    os.truncate(good, good.stat().st_size - 100)
    with pytest.raises(SourceError, match="truncated"):
        validate(good)
    with pytest.raises(NotFoundError):
        validate(tmp_path / "absent.h5ad")
    with pytest.raises(ArgumentError, match="takes level"):
        validate(tmp_path / "x.h5ad", "deep")  # type: ignore[arg-type]


def test_a_zarr_array_is_no_anndata(tmp_path: Path) -> None:
    """A Zarr folder that holds one array, or a chunk that was overwritten, is told."""
    zarr.create_array(tmp_path / "a.zarr", shape=(3,), dtype="f4")
    assert [p.rule for p in validate(tmp_path / "a.zarr")] == ["A10"]
    good = write_good(tmp_path / "x.zarr", "zarr3")
    (good / "X" / "indices" / "c" / "0").write_bytes(b"not a frame")
    assert [(p.rule, p.path) for p in validate(good, "full")] == [("A00", "X")]


def test_declared_sizes_take_no_memory(tmp_path: Path) -> None:
    """Arrays and axes of sizes that nothing can hold are told before anything of that size is made."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    with open_for_writing(path) as root:
        root.create_dataset("uns/huge", (10**12,), "f8", chunks=(1 << 16,), compression="gzip")
        declare(root["uns/huge"], "array", "0.2.0")
        root["X"].attrs["shape"] = [3, 2**60]
        write_elem(root["obs"]["kind"], "categories", np.array(["B", "T"], dtype=object))
    assert {p.rule for p in validate(path, "full")} >= {"A00", "A15"}


def test_names_with_equal_hashes_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Different names of one hash are no duplicates: the names decide."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    monkeypatch.setattr("pandas.util.hash_array", lambda values, categorize: np.zeros(len(values), np.uint64))
    assert validate(path, "full") == []
    damage(path, lambda root: put(root, "obs/_index", np.array([b"a", b"b", b"a"])))
    assert "A29" in {p.rule for p in validate(path, "full")}


def test_adding_refuses_by_rule(tmp_path: Path) -> None:
    """What cannot be added is refused with the rule's id, the element and the way out; milder problems are handed back."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    assert raise_if_invalid(path) == []
    damage(path, lambda root: root["uns/list"].attrs.__delitem__("encoding-type"))
    assert [p.rule for p in raise_if_invalid(path)] == ["A26"]
    damage(path, lambda root: put(root, "layers/dense", np.ones((3, 9))))
    with pytest.raises(SourceError, match=r"x\.h5ad: A17 must: layers/dense: its shape is \(3, 9\).*Write"):
        raise_if_invalid(path)


def test_the_page_of_rules_is_the_registry() -> None:
    """The table of docs/reference/anndata-rules.md is what `rules_table` makes of the rules; write it again after a change."""
    columns = {
        "needs": lambda rule: rule.depth,
        "fixed in a copy": lambda rule: "yes" if rule.fixed else "",
        "refused by add": lambda rule: "yes" if rule.refused else "",
    }
    assert table_of("anndata-rules.md") == rules_table(RULES.values(), columns)
    assert list(RULES) == sorted(RULES, key=lambda name: int(name[1:]))
    assert all(rule.sentence.endswith(".") and rule.fix.endswith(".") for rule in RULES.values())


def all_of(element: Element) -> list[Element]:
    return [element, *(inner for child in element.children for inner in all_of(child))]


@pytest.mark.parametrize("form", FORMS)
def test_a_tree_says_what_stands_there(form: Form, tmp_path: Path) -> None:
    """Encodings, shapes, types, chunks and sizes are those of the file, in every kind of file; parts of a value are folded."""
    path = write_good(tmp_path / "x", form, awkward=True)
    found = inspect(path)
    by_path = {element.path: element for element in all_of(found.root)}
    x, kind, pca = by_path["X"], by_path["obs/kind"], by_path["obsm/pca"]
    assert (x.encoding, x.shape, x.dtype, x.n_entries, x.shown) == ("csr_matrix 0.1.0", (3, 4), "float32", 5, ())
    assert (kind.shape, kind.dtype, by_path["obs"].shape) == ((3,), "int8", (3, 6))
    assert (pca.shape, pca.dtype, pca.n_bytes) == ((3, 2), "float32", 24)
    assert by_path["obs/word"].dtype == "text"
    assert found.n_bytes > sum(element.n_stored for element in found.root.children) > 0
    text = str(found)
    assert text.count("\n") == len(list(found.lines()))
    assert "X: csr_matrix 0.1.0, 3 x 4, float32, 5 entries (41.7%)" in text
    assert [branch for branch, element in found.lines(1)][-1] == "└── "
    assert len(list(found.lines(1))) == len(found.root.children)
    assert json.loads(json.dumps(found.to_dict()))["root"]["encoding"] == "anndata 0.1.0"


def test_a_zip_file_has_the_stored_bytes_of_its_folder(tmp_path: Path) -> None:
    """Each element of a zipped Zarr folder takes as many bytes as in the folder."""
    folder = write_good(tmp_path / "x.zarr", "zarr3")
    packed = tmp_path / "x.zarr.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for file in folder.rglob("*"):
            archive.write(file, file.relative_to(folder))
    stored = {element.path: element.n_stored for element in all_of(inspect(folder).root)}
    assert {element.path: element.n_stored for element in all_of(inspect(packed).root)} == stored
    assert stored["X"] > 0


def test_chunks_and_filters_are_told(tmp_path: Path) -> None:
    """Filters are named in the order of writing, with what they saved."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    with h5py.File(path, "r+") as file:
        file.create_dataset("uns/big", data=np.zeros(10_000), chunks=(500,), shuffle=True, compression="gzip")
    line = next(element.facts() for element in all_of(inspect(path).root) if element.name == "big")
    assert re.fullmatch(
        r"\(array, undeclared\), 10,000, float64, chunks 500, shuffle \+ gzip 4, \S+ k?B of 80 kB", line
    )


def test_what_cannot_be_opened_is_in_the_tree(tmp_path: Path) -> None:
    """A link to another file and an unknown filter are shown with the reason, and nothing is followed."""
    path = write_good(tmp_path / "x.h5ad", "hdf5")
    damage(path, lambda root: root.__setitem__("uns/away", h5py.ExternalLink("elsewhere.h5", "x")))
    element = next(element for element in all_of(inspect(path).root) if element.name == "away")
    assert "UNREADABLE: uns/away is a link to another file (elsewhere.h5)" in element.facts()


def test_notebooks_see_a_tree(tmp_path: Path) -> None:
    """The HTML is balanced, folds its groups, and escapes the names of elements and files."""
    path = write_good(tmp_path / "<b>x.h5ad", "hdf5")
    damage(path, lambda root: root["uns"].create_group("<script>alert(1)<").attrs.update({"encoding-type": "<i>"}))
    page = inspect(path)._repr_html_()
    tags = re.findall(r"<(/?)(\w+)", page)
    assert {name for _, name in tags} == {"div", "b", "span", "details", "summary"}
    opened: list[str] = []
    for end, name in tags:
        assert not end or opened.pop() == name
        opened += [] if end else [name]
    assert opened == []
    assert "&lt;script&gt;alert(1)&lt;" in page
    assert "&lt;b&gt;x.h5ad" in page
