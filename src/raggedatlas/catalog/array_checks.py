"""Checks of a group's arrays against its record: their description, their existence, and every byte."""

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow.compute as pc

from raggedatlas.catalog.assets import read_specs
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.leases import is_atlas_group
from raggedatlas.errors import AtlasError, CorruptError, NotFoundError
from raggedatlas.model.records import COLUMNS, DatasetRecord
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.model.validation import AtlasProblem
from raggedatlas.store.arrays import ArraySpec, is_described, read_group_attributes
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, iterate_slices, read_bounds, read_slice, verify
from raggedatlas.store.sql import equals

_BACK = "Put the arrays back from a copy, or drop the dataset and add it again."


def described_paths(record: DatasetRecord) -> list[str]:
    """Return the paths of the arrays that a record describes; empty if the description is invalid (rule ``array-spec``)."""
    try:
        return sorted(record.array_specs)
    except CorruptError:
        return []


def check_specs(record: DatasetRecord, space: FeatureSpace | None) -> list[AtlasProblem]:
    """Check that the arrays of a record agree with each other and with its counts and layers, without reading them.

    Parameters
    ----------
    record : DatasetRecord
        One group.
    space : FeatureSpace or None
        Its feature space; None skips the checks that need it.
    """

    def wrong(message: str) -> AtlasProblem:
        return AtlasProblem("array-spec", record.zarr_group, message, _BACK)

    try:
        specs, _, _ = read_specs(record), record.array_checksums, record.file_facts
    except AtlasError as error:
        return [wrong(f"its record describes invalid arrays: {error}")]
    sparse = "csr/indices" in specs
    prefix, length = ("csr/layers/", record.n_entries) if sparse else ("layers/", record.n_cells)
    wanted = {prefix + layer for layer in record.layers} | ({"csr/indices"} if sparse else set())
    problems = [wrong(f"the array {path} is not described") for path in sorted(wanted - set(specs))]
    lengths = dict.fromkeys(wanted & set(specs), length)
    lengths |= {path: record.n_entries for path in specs if path.startswith(("csc/layers/", "csc/indices"))}
    lengths |= {"csr/indptr": record.n_cells + 1, "csc/indptr": record.n_features + 1, COLUMNS: record.n_features}
    for path, n in lengths.items():
        if path in specs and specs[path].n_rows != n:
            problems.append(wrong(f"{path} has {specs[path].n_rows:,} rows where {n:,} are expected"))
    for path, spec in specs.items():
        if spec.path != f"{record.zarr_group}/{path}":
            problems.append(wrong(f"{path} is described as lying at {spec.path!r}"))
    if not sparse and space is not None and space.has_features:
        problems += [
            wrong(f"{path} has rows of shape {specs[path].row_shape} for {record.n_features:,} features")
            for path in sorted(wanted & set(specs))
            if specs[path].row_shape != (record.n_features,)
        ]
    return problems


def check_arrays(arrays: Location, record: DatasetRecord) -> list[AtlasProblem]:
    """Check that every array of a record is there, by its metadata object alone (rule ``missing-array``)."""
    problems = []
    for path in described_paths(record):
        try:
            arrays.read_bytes(f"{record.zarr_group}/{path}/zarr.json")
        except NotFoundError:
            problems.append(AtlasProblem("missing-array", record.zarr_group, f"the array {path} is not there", _BACK))
        except AtlasError as error:
            problems.append(
                AtlasProblem("missing-array", record.zarr_group, f"the array {path} cannot be read: {error}", _BACK)
            )
    return problems


def check_bytes(catalog: Catalog, record: DatasetRecord) -> list[AtlasProblem]:
    """Read every byte of a record's arrays.

    Parameters
    ----------
    catalog : Catalog
        Pinned.
    record : DatasetRecord
        One group.

    Returns
    -------
    list of AtlasProblem
        Rules ``group-metadata``, ``array-metadata``, ``array-damaged``, ``checksum``, ``entry-bounds``, ``feature-bounds``, ``column-order``, ``pointer-bounds``.
    """
    try:
        specs = read_specs(record)
        checksums = record.array_checksums
    except AtlasError:
        return []
    problems = _check_groups(catalog.arrays, record, specs)
    sound = set()
    for path, spec in specs.items():
        found = _check_array(catalog.arrays, record.zarr_group, path, spec, checksums.get(path))
        problems += found
        if not found:
            sound.add(path)
    bounds = _check_bounds(catalog.arrays, record.zarr_group, {path: specs[path] for path in sound})
    problems += bounds.values()
    sound -= bounds.keys()
    for path, limit in (("csr/indices", record.n_features), ("csc/indices", record.n_cells)):
        if path in sound and (beyond := _count_beyond(catalog.arrays, specs[path], limit)):
            text = f"{beyond:,} entries of {path} are {limit:,} or more"
            problems.append(AtlasProblem("feature-bounds", record.zarr_group, text, _BACK))
    if COLUMNS in sound:
        columns = read_slice(ArrayReader(catalog.arrays, specs[COLUMNS]), 0, record.n_features)
        if not np.array_equal(np.sort(columns), np.arange(record.n_features)):
            text = f"{COLUMNS} does not give every column of the file a place of its own"
            problems.append(AtlasProblem("column-order", record.zarr_group, text, _BACK))
    if "csr/indptr" in sound and record.pointer:
        problems += _check_pointers(catalog, record, specs["csr/indptr"])
    return problems


def _check_groups(arrays: Location, record: DatasetRecord, paths: Iterable[str]) -> list[AtlasProblem]:
    """Check the metadata of the groups that hold some arrays, the dataset's own and the group's included."""
    parts = [f"{record.zarr_group}/{path}".split("/")[:-1] for path in paths]
    groups = {"/".join(part[:n]) for part in parts for n in range(len(part) + 1)}
    problems = []
    for group in sorted(groups):
        try:
            if not is_atlas_group(read_group_attributes(arrays, group), record.feature_space):
                text = f"{group}/zarr.json has attributes that were not written there"
                problems.append(AtlasProblem("group-metadata", record.zarr_group, text, _BACK))
        except NotFoundError:
            continue  # zarr-python takes a folder without metadata for a group
        except AtlasError as error:
            problems.append(AtlasProblem("group-metadata", record.zarr_group, str(error), _BACK))
    return problems


def _check_array(arrays: Location, group: str, path: str, spec: ArraySpec, checksum: str | None) -> list[AtlasProblem]:
    try:
        there = ArraySpec.open(arrays, f"{group}/{path}")
        if there != spec or not is_described(arrays, spec):
            return [
                AtlasProblem(
                    "array-metadata", group, f"{path}/zarr.json is not what was written: {there}, not {spec}", _BACK
                )
            ]
        damaged, found = verify(ArrayReader(arrays, spec))
    except AtlasError as error:
        return [AtlasProblem("array-damaged", group, str(error), _BACK)]
    if damaged:
        return [AtlasProblem("array-damaged", group, text, _BACK) for text in damaged]
    if checksum is not None and found != checksum:
        text = f"the values of {path} have the checksum {found}, {checksum} was written"
        return [AtlasProblem("checksum", group, text, _BACK)]
    return []


def _check_bounds(arrays: Location, group: str, specs: Mapping[str, ArraySpec]) -> dict[str, AtlasProblem]:
    """Check that each `indptr` array ascends from 0 to the number of entries, which a correct checksum does not imply."""
    problems = {}
    for path, spec in specs.items():
        entries = specs.get(path.removesuffix("indptr") + "indices")
        if path.endswith("indptr") and entries is not None:
            try:
                read_bounds(ArrayReader(arrays, spec), spec.n_rows - 1, entries.n_rows)
            except AtlasError as error:
                problems[path] = AtlasProblem("entry-bounds", group, str(error), _BACK)
    return problems


def _count_beyond(arrays: Location, spec: ArraySpec, limit: int) -> int:
    return sum(int(np.count_nonzero(values >= limit)) for values in iterate_slices(ArrayReader(arrays, spec)))


def _check_pointers(catalog: Catalog, record: DatasetRecord, spec: ArraySpec) -> list[AtlasProblem]:
    indptr = read_slice(ArrayReader(catalog.arrays, spec), 0, spec.n_rows)
    rows = catalog.tables.read(CELLS, [record.pointer], equals("dataset_uid", record.uid))
    pointer = rows.column(record.pointer).combine_chunks()
    pointer = pointer.filter(pc.equal(pc.struct_field(pointer, "zarr_group"), record.zarr_group))
    row, start, end = (pc.struct_field(pointer, part).to_numpy() for part in ("zarr_row", "start", "end"))
    good = (row >= 0) & (row < len(indptr) - 1)
    row, start, end = row[good], start[good], end[good]
    n = int(np.count_nonzero((indptr[row] != start) | (indptr[row + 1] != end)))
    if n == 0:
        return []
    return [
        AtlasProblem(
            "pointer-bounds", record.zarr_group, f"{n:,} pointers are not where csr/indptr has their rows", _BACK
        )
    ]
