"""Splits as configuration files of cell-load describe them: training, zero-shot and few-shot, by dataset, cell type and perturbation."""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.catalog.assets import group_by_dataset, read_records
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import QueryError, SourceError

PARTS = ("train", "val", "test")
SECTIONS = ("training", "zeroshot", "fewshot")
_FILES = (".h5", ".h5ad")


def assign_files(
    config: Mapping[str, Any],
    catalog: Catalog,
    dataset: pa.ChunkedArray,
    perturbation: pa.ChunkedArray,
    cell_type: pa.ChunkedArray,
    *,
    datasets: Mapping[str, Sequence[str]] | None,
    control: str,
    seed: int,
    shared: bool,
    path: str,
) -> NDArray[np.object_]:
    """Return the part of each cell, parts of a cell that is in several joined by ``+``, None for cells without one.

    `config` is the file, read, and `path` its name for messages. `dataset`, `perturbation` and `cell_type` are columns
    of the same cells. `datasets` maps a name in the file to datasets of the atlas; other names are looked up, see
    `_find_datasets`. `control` is the perturbation of control cells. `shared` tells whether controls of a cell type
    that is held out, or of which perturbations are, are in training too and in all of its parts; `seed` is for controls
    that are not shared. A file of another form raises `SourceError`.
    """
    training, zeroshot, fewshot = (_section(config, name, path) for name in SECTIONS)
    names = [*dict.fromkeys([*training, *(key.split(".")[0] for key in (*zeroshot, *fewshot))])]
    if not names:
        raise SourceError(
            f"{path} has none of the sections [training], [zeroshot] and [fewshot] of cell-load, and no [parts] as `Split.write` makes."
        )
    found = _find_datasets(names, _section(config, "datasets", path), catalog, datasets, path)
    columns = [np.asarray(column.to_pandas(), object) for column in (dataset, perturbation, cell_type)]
    made = np.full(len(columns[0]), None, object)
    for name in names:
        whole, some = _of(zeroshot, name), _of(fewshot, name)
        for own in found[name]:
            here = np.flatnonzero(columns[0] == own)
            for kind in dict.fromkeys(columns[2][here]):
                cells = here[columns[2][here] == kind]
                if kind in whole:
                    if whole[kind] not in PARTS:
                        raise SourceError(f"{path}: [zeroshot] {name}.{kind} = {whole[kind]!r} is none of {PARTS}.")
                    made[cells] = whole[kind]
                    if shared and whole[kind] != "train":
                        # cell-load trains on the controls of cell types that are held out.
                        both = "+".join(sorted(["train", whole[kind]]))
                        made[cells[columns[1][cells] == control]] = both
                elif kind in some:
                    made[cells] = _few_shot(columns[1][cells], some[kind], control, seed, shared=shared)
                elif training.get(name) == "train":
                    made[cells] = "train"
    return made


def _few_shot(
    perturbations: NDArray[np.object_], held: Mapping[str, Sequence[str]], control: str, seed: int, *, shared: bool
) -> NDArray[np.object_]:
    """Return the parts of the cells of one cell type of one file."""
    is_control = perturbations == control
    inside = {part: np.isin(perturbations.astype(str), [*held.get(part, ())]) & ~is_control for part in ("val", "test")}
    inside["train"] = ~(inside["val"] | inside["test"] | is_control)
    sizes = {part: int(inside[part].sum()) for part in ("val", "test", "train")}
    total, controls = sum(sizes.values()), np.flatnonzero(is_control)
    if total:
        if shared:
            # cell-load makes a part for training even where nothing is left but controls.
            for part in PARTS:
                inside[part][controls] = part == "train" or sizes[part] > 0
        else:
            order = np.random.default_rng(seed).permutation(controls)
            start = 0
            for part in ("val", "test", "train"):
                n = len(order) - start if part == "train" else int(len(order) * sizes[part] / total)
                if sizes[part]:
                    inside[part][order[start : start + n]] = True
                start += n
    made = np.full(len(perturbations), None, object)
    # By which parts, not by cell: there are seven of them.
    marks = inside["test"] * 1 + inside["train"] * 2 + inside["val"] * 4
    for mark in np.unique(marks[marks > 0]).tolist():
        made[marks == mark] = "+".join(part for bit, part in ((1, "test"), (2, "train"), (4, "val")) if mark & bit)
    return made


def _section(config: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise SourceError(f"{path}: [{name}] is no table.")
    return section


def _of(section: Mapping[str, Any], dataset: str) -> dict[str, Any]:
    """Return cell type -> value of the keys ``dataset.cell type``."""
    return {key.split(".", 1)[1]: value for key, value in section.items() if key.startswith(f"{dataset}.")}


def _find_datasets(
    names: Sequence[str],
    paths: Mapping[str, Any],
    catalog: Catalog,
    given: Mapping[str, Sequence[str]] | None,
    path: str,
) -> dict[str, list[str]]:
    """Return the datasets of the atlas that each name of the file means."""
    records = [records[0] for records in group_by_dataset(read_records(catalog)).values()]
    known = [record.name or record.uid for record in records]
    found: dict[str, list[str]] = {}
    for name in names:
        if given is not None and name in given:
            lacking = sorted({*given[name]} - {*known})
            if lacking:
                raise QueryError(
                    f"The atlas has no dataset {lacking[0]!r}, which datasets={{{name!r}: ...}} names; it has {sorted(known)[:10]}."
                )
            found[name] = [*given[name]]
            continue
        patterns = _patterns(str(paths.get(name, "")))
        found[name] = [
            record.name or record.uid for record in records if record.source and _fits(record.source, patterns)
        ] or [one for one in known if one == name]
        if not found[name]:
            raise QueryError(
                f"No dataset of the atlas was added from {str(paths.get(name, ''))!r} or is called {name!r}, which {path} names. Say which it "
                f"means with datasets={{{name!r}: [...]}}; there are {sorted(known)[:10]}."
            )
    return found


def _patterns(path: str) -> list[str]:
    """Return the paths that a path with ``{a,b}`` means."""
    braces = re.search(r"\{([^}]+)\}", path)
    if braces is None:
        return [path] if path else []
    before, after = path[: braces.start()], path[braces.end() :]
    return [one for option in braces[1].split(",") for one in _patterns(before + option.strip() + after)]


def _fits(source: str, patterns: Sequence[str]) -> bool:
    """Return whether a file is one of a path: the file, or a file of the folder, each with wildcards."""
    file = PurePosixPath(source)
    if file.suffix not in _FILES:
        return False
    for pattern in patterns:
        plain = pattern.rstrip("/")
        # Relative paths depend on where cell-load is started.
        wanted = [plain] if plain.endswith(_FILES) else [f"{plain}/*.h5", f"{plain}/*.h5ad"]
        depth = [len(PurePosixPath(one).parts) for one in wanted]
        ends = [
            "/".join(file.parts[-n:]) if not one.startswith("/") else source
            for one, n in zip(wanted, depth, strict=True)
        ]
        if any(
            fnmatch.fnmatchcase(end, one.removeprefix("./")) and end.count("/") == one.removeprefix("./").count("/")
            for end, one in zip(ends, wanted, strict=True)
        ):
            return True
    return False
