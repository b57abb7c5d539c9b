"""Checks of stored arrays: their descriptions, whether they are there, and every byte of them."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from raggedatlas.catalog.assets import column_layers, has_complete_rows, is_atlas_group, read_specs
from raggedatlas.errors import AtlasError, CorruptError, NotFoundError
from raggedatlas.model.arrays import ArraySpec, shards_path
from raggedatlas.model.records import COLUMNS, DatasetRecord, Span
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.model.validation import Problem
from raggedatlas.store.arrays import array_metadata, is_described, listed_nodes, part_of, read_group, read_spec
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader, iterate_slices, read_bounds, read_slice, verify
from raggedatlas.store.references import References

BACK = "Put the arrays back from a copy, or drop the dataset and add it again."


def described_paths(record: DatasetRecord) -> list[str]:
    """Return the paths of the arrays that a record describes; empty if the description is invalid (rule ``array-spec``)."""
    try:
        return sorted(record.array_specs)
    except CorruptError:
        return []


def check_specs(record: DatasetRecord, space: FeatureSpace | None) -> list[Problem]:
    """Check that the arrays of a record agree with each other and with its counts and layers, without reading them."""

    def wrong(message: str) -> Problem:
        return Problem("array-spec", "must", record.zarr_group, message, BACK)

    try:
        specs, checksums, _ = read_specs(record), record.array_checksums, record.file_facts
    except AtlasError as error:
        return [wrong(f"its record describes invalid arrays: {error}")]
    by_column = bool(column_layers(specs))
    sparse = "csr/indices" in specs or by_column or has_complete_rows(record, specs)
    folder = "csc/" if by_column else "csr/"
    prefix, length = (f"{folder}layers/", record.n_entries) if sparse else ("layers/", record.n_cells)
    wanted = {prefix + layer for layer in record.layers} | ({f"{folder}indices"} & {*specs} if sparse else set())
    problems = [wrong(f"the array {path} is not described") for path in sorted(wanted - set(specs))]
    lengths = dict.fromkeys(wanted & set(specs), length)
    # The column-sorted copy of a dense matrix has no zeros.
    if not has_complete_rows(record, specs):
        lengths |= {path: record.n_entries for path in specs if path.startswith(("csc/layers/", "csc/indices"))}
    lengths |= {"csr/indptr": record.n_cells + 1, "csc/indptr": record.n_features + 1, COLUMNS: record.n_features}
    for path, n in lengths.items():
        if path in specs and specs[path].n_rows != n:
            problems.append(wrong(f"{path} has {specs[path].n_rows:,} rows where {n:,} are expected"))
    for path, spec in specs.items():
        if spec.path != f"{record.zarr_group}/{path}":
            problems.append(wrong(f"{path} is described as lying at {spec.path!r}"))
        if spec.within is None and spec.linked is None and shards_path(path) not in checksums:
            problems.append(wrong(f"no hash of the shards of {path} is recorded"))
    if not sparse and space is not None and space.has_features:
        problems += [
            wrong(f"{path} has rows of shape {specs[path].row_shape} for {record.n_features:,} features")
            for path in sorted(wanted & set(specs))
            if specs[path].row_shape != (record.n_features,)
        ]
    return problems


def check_arrays(arrays: Location, record: DatasetRecord) -> list[Problem]:
    """Check that every array of a record is there, by metadata or single bytes alone (rule ``missing-array``).

    Of an array that is linked to a file outside of the atlas, the references must be there; the file itself is not
    looked at.
    """
    problems = []
    try:
        specs = read_specs(record)
    except AtlasError:
        return []  # rule array-spec
    listed = _listed(arrays, record.zarr_group) if _own_paths(record, specs) else None
    ends: dict[str, int] = {}
    for within in (part for part in map(part_of, specs.values()) if part is not None):
        ends[within.file] = max(ends.get(within.file, 0), within.offset + within.n_bytes)
    complete = set()
    for file, end in ends.items():
        # A file that has the last byte has all others.
        with suppress(AtlasError):
            arrays.read_range(file, end - 1, 1)
            complete.add(file)
    for path, spec in specs.items():
        try:
            if (part := part_of(spec)) is not None:
                if part.file not in complete or min(part.offset, part.n_bytes - 1) < 0:
                    arrays.read_range(part.file, part.offset + part.n_bytes - 1, 1)
            elif listed is None:
                arrays.read_bytes(f"{record.zarr_group}/{path}/zarr.json")
            elif path not in listed:
                raise NotFoundError(f"{record.zarr_group}/zarr.json does not list it")
        except NotFoundError:
            problems.append(Problem("missing-array", "must", record.zarr_group, f"the array {path} is not there", BACK))
        except AtlasError as error:
            text = f"the array {path} cannot be read: {error}"
            problems.append(Problem("missing-array", "must", record.zarr_group, text, BACK))
    return problems


def _own_paths(record: DatasetRecord, specs: Mapping[str, ArraySpec]) -> list[str]:
    """Return the arrays of a group that are in the folder of its dataset, and not in a bundle that datasets share."""
    parts = {path: part_of(spec) for path, spec in specs.items()}
    return [path for path, part in parts.items() if part is None or part.file.startswith(f"{record.uid}/")]


def _listed(arrays: Location, group: str) -> Mapping[str, object] | None:
    """Return what the metadata of a group list; None where each array has metadata of its own, or the group has none."""
    try:
        return read_group(arrays, group).listed
    except AtlasError:
        return None


def check_bytes(arrays: Location, record: DatasetRecord) -> list[Problem]:
    """Read every byte of a record's arrays, and check their metadata and values.

    Rules ``group-metadata``, ``array-metadata``, ``array-damaged``, ``checksum``, ``shards``, ``references``,
    ``entry-bounds``, ``feature-bounds``, ``column-order``.

    Notes
    -----
    Of arrays that are linked to a file outside of the atlas, the references are read, and not the file: `check_linked` reads that.
    """
    try:
        # A record that does not parse is reported by `check_specs`.
        specs = read_specs(record)
        checksums = record.array_checksums
    except AtlasError:
        return []
    own = _own_paths(record, specs)
    # What the folder of a dataset still has of the time when it had a bundle of its own is not part of it.
    listed = _listed(arrays, record.zarr_group) if own or not specs else None
    # A listed group has no metadata below it.
    paths = [""] if listed is not None else own
    folders = {f"{record.zarr_group}/{path}".rpartition("/")[0] for path in paths}
    folders |= {part.file.rpartition("/")[0] for part in map(part_of, specs.values()) if part is not None}
    problems = check_groups(arrays, record.zarr_group, folders, record.feature_space)
    if listed is not None:
        # What the metadata of the group list besides its arrays, which are compared one by one. Without arrays in a shared bundle nothing
        # else may be there, but for a copy that `add_csc` did not finish, which is not recorded.
        wanted = listed_nodes(specs)
        others = listed.keys() - specs.keys() if len(own) == len(specs) else set()
        # What was packed since, by `materialize`, is listed for the newest record.
        rows = {f"csr/layers/{layer}" for layer in column_layers(specs)}
        rows |= {"csr/indices"} if rows else set()
        linked = [path.split("/") for path in (*rows, *(path for path, spec in specs.items() if spec.linked))]
        others -= rows | {"/".join(parts[:n]) for parts in linked for n in range(1, len(parts))}
        nodes = {path for path in others if path.split("/")[0] != "csc"} | wanted.keys() - specs.keys()
        wrong = sorted(path for path in nodes if listed.get(path) != wanted.get(path))
        if wrong:
            text = f"{record.zarr_group}/zarr.json does not describe {', '.join(wrong)} as it was written"
            problems.append(Problem("group-metadata", "must", record.zarr_group, text, BACK))
    sound = set()
    problems += _check_references(arrays, record.zarr_group, specs)
    for path, spec in specs.items():
        found = [] if spec.linked else _check_array(arrays, record.zarr_group, path, spec, checksums, listed)
        problems += found
        if not found and spec.linked is None:
            sound.add(path)
    # Values are judged only in arrays that read without a problem, so one damage gives one problem.
    for path in sorted(path for path in sound if path.endswith("indptr")):
        entries = path.removesuffix("indptr") + "indices"
        if entries in sound or (entries in specs and specs[entries].linked is not None):
            try:
                # From 0 to the number of entries and ascending, which a correct checksum does not imply.
                read_bounds(ArrayReader(arrays, specs[path]), specs[path].n_rows - 1, specs[entries].n_rows)
            except AtlasError as error:
                problems.append(Problem("entry-bounds", "must", record.zarr_group, str(error), BACK))
                sound.remove(path)
    for path, limit in (("csr/indices", record.n_features), ("csc/indices", record.n_cells)):
        slices = iterate_slices(ArrayReader(arrays, specs[path])) if path in sound else ()
        beyond = sum(int(np.count_nonzero(values >= limit)) for values in slices)
        if beyond:
            text = f"{beyond:,} entries of {path} are {limit:,} or more"
            problems.append(Problem("feature-bounds", "must", record.zarr_group, text, BACK))
    if COLUMNS in sound:
        columns = read_slice(ArrayReader(arrays, specs[COLUMNS]), 0, record.n_features)
        if not np.array_equal(np.sort(columns), np.arange(record.n_features)):
            text = f"{COLUMNS} does not give every column of the file a place of its own"
            problems.append(Problem("column-order", "must", record.zarr_group, text, BACK))
    return problems


def check_groups(arrays: Location, place: str, folders: Iterable[str], space: str = "") -> list[Problem]:
    """Check the metadata of some groups and of all above them (rule ``group-metadata``, at `place`)."""
    parts = [folder.split("/") for folder in folders]
    groups = {"/".join(part[:n]) for part in parts for n in range(len(part) + 1)}
    problems = []
    for group in sorted(groups):
        try:
            if not is_atlas_group(read_group(arrays, group).attributes, space):
                text = f"{group}/zarr.json has attributes that were not written there"
                problems.append(Problem("group-metadata", "must", place, text, BACK))
        except NotFoundError:
            continue  # zarr-python takes a folder without metadata for a group
        except AtlasError as error:
            problems.append(Problem("group-metadata", "must", place, str(error), BACK))
    return problems


def _check_references(arrays: Location, group: str, specs: Mapping[str, ArraySpec]) -> list[Problem]:
    """Check the references to arrays in files outside of the atlas: their hash, and that they have every chunk (rule ``references``)."""
    problems, read = [], dict[Span, References]()
    for path, spec in specs.items():
        if spec.linked is None:
            continue
        link, span = spec.linked, spec.linked.references
        try:
            if span not in read:
                data = arrays.read_range(span.file, span.offset, span.n_bytes)
                if hashlib.sha256(data).hexdigest() != link.sha256:
                    raise CorruptError(f"the references in {span.file} do not have the SHA-256 that was recorded")
                read[span] = References.from_bytes(data, span.file)
            table = read[span].arrays.get(link.array)
            # An array that is stored in one piece has one reference.
            shape, chunks = link.matrix or spec.shape, link.chunks or spec.chunk_shape
            wanted = math.prod(-(-n // chunk) for n, chunk in zip(shape, chunks, strict=True))
            if table is None or len(table.sizes) not in (1, wanted):
                n = 0 if table is None else len(table.sizes)
                raise CorruptError(f"the references in {span.file} have {n:,} chunks of {path}, not {wanted:,}")
        except AtlasError as error:
            problems.append(Problem("references", "must", group, str(error), BACK))
    return list(dict.fromkeys(problems))


def _check_array(
    arrays: Location,
    group: str,
    path: str,
    spec: ArraySpec,
    checksums: Mapping[str, str],
    listed: Mapping[str, object] | None,
) -> list[Problem]:
    try:
        # Metadata within a bundle are covered by its hash.
        if spec.within is None:
            there = read_spec(arrays, f"{group}/{path}") if listed is None else spec
            good = is_described(arrays, spec) if listed is None else listed.get(path) == array_metadata(spec)
            if there != spec or not good:
                text = f"the metadata of {path} are not what was written: {there}, not {spec}"
                return [Problem("array-metadata", "must", group, text, BACK)]
        found = verify(ArrayReader(arrays, spec))
    except AtlasError as error:
        return [Problem("array-damaged", "must", group, str(error), BACK)]
    if found.problems:
        return [Problem("array-damaged", "must", group, text, BACK) for text in found.problems]
    checksum, shards = checksums.get(path), checksums.get(shards_path(path))
    if checksum is not None and found.checksum != checksum:
        text = f"the values of {path} have the checksum {found.checksum}, {checksum} was written"
        return [Problem("checksum", "must", group, text, BACK)]
    if shards is not None and found.shards != shards:
        text = f"the shards of {path} do not have the lengths and the SHA-256 that were recorded"
        return [Problem("shards", "must", group, text, BACK)]
    return []
