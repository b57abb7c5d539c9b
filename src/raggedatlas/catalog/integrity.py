"""Manifests of snapshots, which hash every file, and checks of stored arrays against their records."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import pyarrow.compute as pc

from raggedatlas.catalog.assets import is_atlas_group, read_specs
from raggedatlas.catalog.catalog import CELLS, VERSIONS, Catalog
from raggedatlas.catalog.inventory import inventory
from raggedatlas.catalog.versions import HEAD, list_versions
from raggedatlas.errors import AtlasError, CorruptError, NotFoundError
from raggedatlas.model.records import COLUMNS, AtlasVersionRecord, DatasetRecord
from raggedatlas.model.spaces import FeatureSpace, SparseZarrPointer
from raggedatlas.model.validation import Problem
from raggedatlas.store import manifests
from raggedatlas.store.arrays import ArraySpec, array_metadata, is_described, listed_nodes, read_group
from raggedatlas.store.location import Location, digest_file
from raggedatlas.store.manifests import COPY, FOLDER, FileEntry, Files, Manifest, parse_manifest
from raggedatlas.store.read import ArrayReader, iterate_slices, read_bounds, read_slice, verify
from raggedatlas.store.runtime import map_requests, submit_request
from raggedatlas.store.shards import shards_path
from raggedatlas.store.sql import equals
from raggedatlas.store.tables import Tables

_ATTEMPTS = 5


def write_manifest(
    catalog: Catalog,
    versions: Mapping[str, int],
    records: Sequence[AtlasVersionRecord] | None = None,
    hashed: dict[str, FileEntry] | None = None,
) -> str:
    """Write the manifest of some table versions, and return its SHA-256, which is also its name.

    Files never change once they are written, so those that an earlier snapshot reaches are not read again. Nothing refers to
    the manifest until a snapshot names it; `remove_manifests` removes one that no snapshot names.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    versions : mapping of str to int
        Table -> version, each held by a tag.
    records : sequence of AtlasVersionRecord or None
        The snapshots; None reads them.
    hashed : dict of str to FileEntry, or None
        Files that were hashed for other manifests; gets those that are hashed now.
    """
    tables = catalog.newest_tables()
    hashed = {} if hashed is None else hashed
    last, known = _newest(catalog, list_versions(catalog) if records is None else records)
    same = {name for name, version in versions.items() if last is not None and last.table_versions.get(name) == version}
    listed = _list_files(tables, {name: version for name, version in versions.items() if name not in same})
    paths = {path for path in known if path.partition(".lance/")[0] in same} | listed
    hashed |= _hash_files(tables.location, sorted(paths - known.keys() - hashed.keys()))
    data = Manifest(files={path: known.get(path) or hashed[path] for path in paths}).to_bytes()
    digest = hashlib.sha256(data).hexdigest()
    # Named by its content, so an existing file is this one.
    tables.location.write_bytes(f"{FOLDER}/{digest}.json", data, only_if_absent=True)
    return digest


def _list_files(tables: Tables, versions: Mapping[str, int]) -> set[str]:
    """List the files of some table versions: paths below ``lance_db``."""

    def files(name: str) -> list[str]:
        return [f"{name}.lance/{path}" for path in tables.files(name, versions[name], manifest=False)]

    def manifest(name: str) -> list[str]:
        return [f"{name}.lance/{tables.manifest(name, versions[name])[0]}"]

    tasks = [partial(task, name) for name in versions for task in (files, manifest)]
    each = (task() for task in tasks) if tables.location.is_local else map_requests(lambda task: task(), tasks)
    return {path for paths in each for path in paths}


def recorded_hashes(view: Catalog) -> dict[str, str]:
    """Return what is recorded of everything that a snapshot reaches: path below the atlas -> hash; no data are read.

    Parameters
    ----------
    view : Catalog
        Pinned to a snapshot.
    """
    files = {} if view.snapshot is None else read_manifest(view, view.snapshot.manifest)
    found = {f"lance_db/{path}": entry.sha256 for path, entry in files.items()}
    return found | {f"zarr_store/{path}": identity for path, identity in inventory(view).identities.items()}


def read_manifest(catalog: Catalog, digest: str) -> Files:
    """Read the manifest of a snapshot; see `store.manifests.read_manifest`."""
    return manifests.read_manifest(catalog.tables.location, digest)


def seal_versions(
    catalog: Catalog,
    written: Mapping[str, bytes] = MappingProxyType({}),
    records: Sequence[AtlasVersionRecord] | None = None,
    before: Callable[[], object] = list,
) -> None:
    """Record the hashes of the current list of snapshots, and of the tags on the versions it names.

    The list cannot name its own hash, so these are in a file of their own, the head. One that does not cover the newest version of
    the list, because a process died before this call or another wrote since, says nothing; the next call writes it anew.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    written : mapping of str to bytes
        Files of tags that the caller has just written, by their paths below ``lance_db``, which need not be read.
    records : sequence of AtlasVersionRecord or None
        The snapshots at the version of their list that is held; None reads them.
    before : callable
        Called before anything is written; the tags must be there when it returns.
    """
    tables = catalog.newest_tables()
    known_tags = {path: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for path, data in written.items()}
    for _ in range(_ATTEMPTS):
        version = tables.version(VERSIONS)
        listed = list_versions(catalog) if records is None else records
        records = None
        # Side by side with the listing.
        head = submit_request(_read_head, catalog)
        paths = _list_files(tables, {VERSIONS: version})
        tags = {f"{name}.lance/{tables.tag_file(record.tag)}" for record in listed for name in record.table_versions}
        try:
            known = head.result().files
        except CorruptError:
            known = {}
        # Tag files can change, but `delete_manifest_log` empties the head before a tag is moved.
        kept = {path: entry for path, entry in {**known, **known_tags}.items() if path in tags or path in paths}
        fresh = sorted((paths | tags) - set(kept))
        # A snapshot that another process has just recorded may not have its final tags yet.
        made = Manifest(files=kept | _hash_files(tables.location, fresh, missing_ok=True), version=version).to_bytes()
        before()
        tables.location.write_bytes(f"{FOLDER}/{HEAD}", hashlib.sha256(made).hexdigest().encode() + b"\n" + made)
        tables.forget(VERSIONS)
        if tables.version(VERSIONS) == version:
            return


def recorded_files(
    catalog: Catalog, records: Sequence[AtlasVersionRecord], *, head: bool
) -> tuple[dict[str, FileEntry], list[Problem]]:
    """Return what is recorded of the table files that snapshots reach, and what is wrong with the records.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    records : sequence of AtlasVersionRecord
        The snapshots.
    head : bool
        Whether to include the list of snapshots and their tags.

    Returns
    -------
    files : dict of str to FileEntry
        Path below ``lance_db`` -> length and hash.
    problems : list of Problem
        Rules ``root``, ``manifest``, and the note ``unverified-files``.
    """
    problems, files = [], dict[str, FileEntry]()
    for record in records:
        place = f"snapshot {record.version}"
        if record.root and record.root != record.root_hash:
            text = f"its record is not the one that was written: the root hash is {record.root_hash}, {record.root} was recorded"
            problems.append(Problem("root", "must", place, text, COPY))
        try:
            files |= read_manifest(catalog, record.manifest)
        except AtlasError as error:
            problems.append(Problem("manifest", "must", place, str(error), COPY))
    if head and records:
        try:
            sealed = _read_head(catalog)
            if sealed.version == Tables(catalog.tables.location).version(VERSIONS):
                files |= sealed.files
            else:
                text = "the newest list of snapshots has no recorded hashes"
                problems.append(Problem("unverified-files", "practice", VERSIONS, text, "Run optimize()."))
        except AtlasError as error:
            problems.append(Problem("manifest", "must", VERSIONS, str(error), COPY))
    return files, problems


def _newest(catalog: Catalog, records: Sequence[AtlasVersionRecord]) -> tuple[AtlasVersionRecord | None, Files]:
    """Return the newest snapshot with a readable manifest, and its entries."""
    for record in reversed(records):
        # `check_files` reports a damaged one; here it only means that files are hashed again.
        with contextlib.suppress(CorruptError, NotFoundError):
            return record, read_manifest(catalog, record.manifest)
    return None, {}


def _read_head(catalog: Catalog) -> Manifest:
    """Return the head; a missing head covers nothing."""
    key = f"{FOLDER}/{HEAD}"
    try:
        digest, _, data = catalog.tables.location.read_bytes(key).partition(b"\n")
    except NotFoundError:
        return Manifest()
    # Empty since `delete_manifest_log`: tags are being moved, or the process that moved them died.
    if not digest and not data:
        return Manifest()
    if hashlib.sha256(data).hexdigest().encode() != digest:
        raise CorruptError(
            f"{catalog.tables.location.uri}/{key} is damaged: its content does not have the SHA-256 in its first line."
        )
    return parse_manifest(data, key)


def _hash_files(location: Location, paths: Sequence[str], *, missing_ok: bool = False) -> dict[str, FileEntry]:
    def entry(path: str) -> FileEntry | None:
        try:
            return FileEntry(*digest_file(location, path))
        except NotFoundError:
            if not missing_ok:
                raise
            return None

    each: Iterable[FileEntry | None] = map(entry, paths) if location.is_local else map_requests(entry, paths)
    return {path: found for path, found in zip(paths, each, strict=True) if found is not None}


def compare_files(location: Location, files: Files) -> list[Problem]:
    """Compare files with their recorded lengths and hashes (rule ``table-file``)."""

    def differs(path: str) -> str:
        try:
            found = FileEntry(*digest_file(location, path))
        except AtlasError as error:
            return str(error)
        if found.n_bytes != files[path].n_bytes:
            return f"it has {found.n_bytes:,} bytes, {files[path].n_bytes:,} were written"
        return "" if found == files[path] else "its SHA-256 is not the one that was recorded"

    paths = sorted(files)
    each = map(differs, paths) if location.is_local else map_requests(differs, paths)
    return [Problem("table-file", "must", path, text, COPY) for path, text in zip(paths, each, strict=True) if text]


_BACK = "Put the arrays back from a copy, or drop the dataset and add it again."


def described_paths(record: DatasetRecord) -> list[str]:
    """Return the paths of the arrays that a record describes; empty if the description is invalid (rule ``array-spec``)."""
    try:
        return sorted(record.array_specs)
    except CorruptError:
        return []


def check_specs(record: DatasetRecord, space: FeatureSpace | None) -> list[Problem]:
    """Check that the arrays of a record agree with each other and with its counts and layers, without reading them.

    Parameters
    ----------
    record : DatasetRecord
        One group.
    space : FeatureSpace or None
        Its feature space; None skips the checks that need it.
    """

    def wrong(message: str) -> Problem:
        return Problem("array-spec", "must", record.zarr_group, message, _BACK)

    try:
        specs, checksums, _ = read_specs(record), record.array_checksums, record.file_facts
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
        if spec.within is None and shards_path(path) not in checksums:
            problems.append(wrong(f"no hash of the shards of {path} is recorded"))
    if not sparse and space is not None and space.has_features:
        problems += [
            wrong(f"{path} has rows of shape {specs[path].row_shape} for {record.n_features:,} features")
            for path in sorted(wanted & set(specs))
            if specs[path].row_shape != (record.n_features,)
        ]
    return problems


def check_arrays(arrays: Location, record: DatasetRecord) -> list[Problem]:
    """Check that every array of a record is there, by its metadata or the file that it is part of alone (rule ``missing-array``)."""
    problems = []
    try:
        specs = read_specs(record)
    except AtlasError:
        return []  # rule array-spec
    listed = _listed(arrays, record.zarr_group) if _own_paths(record, specs) else None
    for path, spec in specs.items():
        try:
            if spec.within is not None:
                arrays.read_range(spec.within.file, spec.within.offset + spec.within.n_bytes - 1, 1)
            elif listed is None:
                arrays.read_bytes(f"{record.zarr_group}/{path}/zarr.json")
            elif path not in listed:
                raise NotFoundError(f"{record.zarr_group}/zarr.json does not list it")
        except NotFoundError:
            problems.append(
                Problem("missing-array", "must", record.zarr_group, f"the array {path} is not there", _BACK)
            )
        except AtlasError as error:
            problems.append(
                Problem("missing-array", "must", record.zarr_group, f"the array {path} cannot be read: {error}", _BACK)
            )
    return problems


def _own_paths(record: DatasetRecord, specs: Mapping[str, ArraySpec]) -> list[str]:
    """Return the arrays of a group that are in the folder of its dataset, and not in a bundle that datasets share."""
    return [
        path for path, spec in specs.items() if spec.within is None or spec.within.file.startswith(f"{record.uid}/")
    ]


def _listed(arrays: Location, group: str) -> Mapping[str, object] | None:
    """Return what the metadata of a group list; None where each array has metadata of its own, or the group has none."""
    try:
        return read_group(arrays, group).listed
    except AtlasError:
        return None


def check_bytes(arrays: Location, record: DatasetRecord) -> list[Problem]:
    """Read every byte of a record's arrays.

    Parameters
    ----------
    arrays : Location
        The Zarr store.
    record : DatasetRecord
        One group.

    Returns
    -------
    list of Problem
        Rules ``group-metadata``, ``array-metadata``, ``array-damaged``, ``checksum``, ``shards``, ``entry-bounds``, ``feature-bounds``, ``column-order``.
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
    folders |= {spec.within.file.rpartition("/")[0] for spec in specs.values() if spec.within is not None}
    problems = check_groups(arrays, record.zarr_group, folders, record.feature_space)
    if listed is not None:
        problems += _check_listed(record.zarr_group, specs, listed, alone=len(own) == len(specs))
    sound = set()
    for path, spec in specs.items():
        found = _check_array(arrays, record.zarr_group, path, spec, checksums, listed)
        problems += found
        if not found:
            sound.add(path)
    # Values are judged only in arrays that read without a problem, so one damage gives one problem.
    bounds = _check_bounds(arrays, record.zarr_group, {path: specs[path] for path in sound})
    problems += bounds.values()
    sound -= bounds.keys()
    for path, limit in (("csr/indices", record.n_features), ("csc/indices", record.n_cells)):
        if path in sound and (beyond := _count_beyond(arrays, specs[path], limit)):
            text = f"{beyond:,} entries of {path} are {limit:,} or more"
            problems.append(Problem("feature-bounds", "must", record.zarr_group, text, _BACK))
    if COLUMNS in sound:
        columns = read_slice(ArrayReader(arrays, specs[COLUMNS]), 0, record.n_features)
        if not np.array_equal(np.sort(columns), np.arange(record.n_features)):
            text = f"{COLUMNS} does not give every column of the file a place of its own"
            problems.append(Problem("column-order", "must", record.zarr_group, text, _BACK))
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
                problems.append(Problem("group-metadata", "must", place, text, _BACK))
        except NotFoundError:
            continue  # zarr-python takes a folder without metadata for a group
        except AtlasError as error:
            problems.append(Problem("group-metadata", "must", place, str(error), _BACK))
    return problems


def _check_listed(
    group: str, specs: Mapping[str, ArraySpec], listed: Mapping[str, object], *, alone: bool
) -> list[Problem]:
    """Check what the metadata of a group list besides its arrays, which are compared one by one; `alone` says that nothing else may be there."""
    wanted = listed_nodes(specs)
    # What is listed of a copy that `add_csc` did not finish is not recorded.
    nodes = {
        path for path in listed.keys() - specs.keys() if alone and path.split("/")[0] != "csc"
    } | wanted.keys() - specs.keys()
    wrong = sorted(path for path in nodes if listed.get(path) != wanted.get(path))
    if not wrong:
        return []
    text = f"{group}/zarr.json does not describe {', '.join(wrong)} as it was written"
    return [Problem("group-metadata", "must", group, text, _BACK)]


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
            there = ArraySpec.open(arrays, f"{group}/{path}") if listed is None else spec
            good = is_described(arrays, spec) if listed is None else listed.get(path) == array_metadata(spec)
            if there != spec or not good:
                text = f"the metadata of {path} are not what was written: {there}, not {spec}"
                return [Problem("array-metadata", "must", group, text, _BACK)]
        found = verify(ArrayReader(arrays, spec))
    except AtlasError as error:
        return [Problem("array-damaged", "must", group, str(error), _BACK)]
    if found.problems:
        return [Problem("array-damaged", "must", group, text, _BACK) for text in found.problems]
    checksum, shards = checksums.get(path), checksums.get(shards_path(path))
    if checksum is not None and found.checksum != checksum:
        text = f"the values of {path} have the checksum {found.checksum}, {checksum} was written"
        return [Problem("checksum", "must", group, text, _BACK)]
    if shards is not None and found.shards != shards:
        text = f"the shards of {path} do not have the lengths and the SHA-256 that were recorded"
        return [Problem("shards", "must", group, text, _BACK)]
    return []


def _check_bounds(arrays: Location, group: str, specs: Mapping[str, ArraySpec]) -> dict[str, Problem]:
    """Check that each `indptr` array ascends from 0 to the number of entries, which a correct checksum does not imply."""
    problems = {}
    for path, spec in specs.items():
        entries = specs.get(path.removesuffix("indptr") + "indices")
        if path.endswith("indptr") and entries is not None:
            try:
                read_bounds(ArrayReader(arrays, spec), spec.n_rows - 1, entries.n_rows)
            except AtlasError as error:
                problems[path] = Problem("entry-bounds", "must", group, str(error), _BACK)
    return problems


def _count_beyond(arrays: Location, spec: ArraySpec, limit: int) -> int:
    return sum(int(np.count_nonzero(values >= limit)) for values in iterate_slices(ArrayReader(arrays, spec)))


def check_pointers(catalog: Catalog, record: DatasetRecord) -> list[Problem]:
    """Compare the pointers of the cells with the bounds of the rows of a group whose arrays are sound (rule ``pointer-bounds``)."""
    if not record.pointer or "csr/indptr" not in described_paths(record):
        return []
    spec = read_specs(record)["csr/indptr"]
    indptr = read_slice(ArrayReader(catalog.arrays, spec), 0, spec.n_rows)
    rows = catalog.tables.read(CELLS, [record.pointer], equals("dataset_uid", record.uid))
    pointer = rows.column(record.pointer).combine_chunks()
    # A damaged record names a column of another kind, in which `check_rows` misses the rows.
    if pointer.type != SparseZarrPointer.arrow_type:
        return []
    pointer = pointer.filter(pc.equal(pc.struct_field(pointer, "zarr_group"), record.zarr_group))
    row, start, end = (pc.struct_field(pointer, part).to_numpy() for part in ("zarr_row", "start", "end"))
    # Other rows would index beyond `indptr`; `check_rows` reports them.
    good = (row >= 0) & (row < len(indptr) - 1)
    row, start, end = row[good], start[good], end[good]
    n = int(np.count_nonzero((indptr[row] != start) | (indptr[row + 1] != end)))
    if n == 0:
        return []
    return [
        Problem(
            "pointer-bounds",
            "must",
            record.zarr_group,
            f"{n:,} pointers are not where csr/indptr has their rows",
            _BACK,
        )
    ]
