"""Bundles that many small datasets share: packing their files, finding what is not needed beside them, and leaving a purged dataset out."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from raggedatlas.catalog.assets import (
    array_columns,
    group_by_dataset,
    purged,
    read_records,
    read_specs,
    release_lease,
    take_lease,
)
from raggedatlas.catalog.catalog import DATASETS, Catalog, note_shared_bundles
from raggedatlas.catalog.cells import frame_file
from raggedatlas.catalog.inventory import dataset_folders
from raggedatlas.errors import AtlasError, ConflictError, CorruptError, NotFoundError, StoreError
from raggedatlas.model.arrays import ArraySpec, shards_path
from raggedatlas.model.ids import new_uid
from raggedatlas.model.records import DATASETS_SCHEMA, BundleFacts, DatasetRecord, Span, datasets_from_table
from raggedatlas.store.arrays import group_metadata, part_of
from raggedatlas.store.bundle import BUNDLE_BYTES, FILE, SHARED, Bundle, bundle_file, member_names
from raggedatlas.store.codecs import STANDARD, has_checksum
from raggedatlas.store.references import references_file
from raggedatlas.store.runtime import map_requests
from raggedatlas.store.shards import hash_shard, hash_shards, parse_shard, shard_key
from raggedatlas.store.sql import in_list

SMALL_BYTES = 2**20
"""Size beyond which the files of a dataset are left as they are: its objects matter little then."""

WORTH = 16
"""Datasets of one layout with files of their own from which these are moved into a bundle."""

_LIKELY_ENTRIES = 2**20
"""Stored entries of a dataset whose files are not even measured."""

_AT_ONCE = 64
"""Datasets whose files are requested at the same time."""

# ---- packing


@dataclass(frozen=True)
class _Small:
    """A dataset that may go into a bundle, the bundle that it shares now (empty if none), and about how many bytes it has."""

    records: tuple[DatasetRecord, ...]
    shared: str
    n_bytes: int = 0


def pack_datasets(catalog: Catalog) -> list[str]:
    """Move the files of small datasets of one layout into bundles that they share; return what was done, in words.

    Each bundle is written first and named by nothing; then the records of its datasets change in one commit. Their old
    files stay until `gc` finds that no snapshot needs them. A dataset that another process changes meanwhile stays as
    it is. A bundle is written again with others when those are as much together, or when fewer than half of its
    datasets are left: so the bytes written are the bytes stored times their logarithm, whatever the number of calls.
    """
    # Readers that cannot have this package find each array of such an atlas by its path.
    if catalog.codec() == STANDARD:
        return []
    notes: list[str] = []
    n_datasets = n_bundles = 0
    for chosen in _choose(catalog):
        for bundle, packed in _bundles(catalog, chosen, notes):
            n = _commit(catalog, bundle, packed)
            n_datasets, n_bundles = n_datasets + n, n_bundles + bool(n)
    return [*notes, f"{n_datasets:,} small datasets now share {n_bundles:,} bundles"] if n_datasets else notes


def _choose(catalog: Catalog) -> Iterator[list[_Small]]:
    """Choose the datasets that are packed together, those of one bundle in a row."""
    layouts: dict[tuple[str, ...], list[_Small]] = {}
    for own in group_by_dataset(read_records(catalog)).values():
        small = _as_small(own)
        if small is not None:
            layouts.setdefault(tuple(record.layout_uid for record in own), []).append(small)
    uids = {small.records[0].uid for every in layouts.values() for small in every if not small.shared}
    sizes: dict[str, int] = {}
    if any(sum(not small.shared for small in every) >= WORTH for every in layouts.values()):
        # The bytes in the folders of datasets, from one listing.
        for key, size, _ in catalog.arrays.list_objects():
            uid = key.partition("/")[0]
            if uid in uids:
                sizes[uid] = sizes.get(uid, 0) + size
    for every in layouts.values():
        shared: dict[str, list[_Small]] = {}
        for small in every:
            if small.shared:
                shared.setdefault(small.shared, []).append(small)
        fresh = [replace(s, n_bytes=sizes.get(s.records[0].uid, SMALL_BYTES + 1)) for s in every if not s.shared]
        fresh = [small for small in fresh if small.n_bytes <= SMALL_BYTES]
        chosen = fresh if len(fresh) >= WORTH else []
        for file, datasets in [*shared.items()]:
            bundle = datasets[0].records[0].file_facts.bundle
            # Fewer than half of its datasets are left.
            if bundle is not None and 2 * len(datasets) < bundle.n_datasets:
                chosen = [*shared.pop(file), *chosen]
        n_bytes = sum(small.n_bytes for small in chosen)
        for datasets in sorted(shared.values(), key=_live_bytes):
            if not chosen or _live_bytes(datasets) > min(n_bytes, BUNDLE_BYTES - n_bytes):
                break
            chosen, n_bytes = [*datasets, *chosen], n_bytes + _live_bytes(datasets)
        if chosen:
            yield chosen


def _as_small(own: Sequence[DatasetRecord]) -> _Small | None:
    """Return a dataset whose files may be small, and are of a kind that a bundle takes; None otherwise."""
    # The entries of those that are linked are elsewhere.
    if sum(record.n_entries for record in own if '"linked"' not in record.arrays) > _LIKELY_ENTRIES:
        return None
    try:
        facts, specs = own[0].file_facts, [spec for record in own for spec in record.array_specs.values()]
        specs = [spec for spec in specs if not spec.get("linked")]
        one_shard = all(spec["shard_shape"] and 0 < spec["shape"][0] <= spec["shard_shape"][0] for spec in specs)
        if not facts.frames or not all(record.array_specs for record in own) or not one_shard:
            return None
        if facts.bundle is None or own[0].uid in dataset_folders(own):
            return _Small((*own,), "")
        return _Small((*own,), facts.bundle.file, facts.bundle.n_bytes // max(1, facts.bundle.n_datasets))
    # Validation reports the record.
    except (CorruptError, TypeError, KeyError, IndexError):
        return None


def _live_bytes(datasets: Sequence[_Small]) -> int:
    return sum(small.n_bytes for small in datasets)


def _bundles(
    catalog: Catalog, chosen: Sequence[_Small], notes: list[str]
) -> Iterator["tuple[Bundle, list[tuple[DatasetRecord, ...]]]"]:
    """Read the files of datasets and collect them in bundles, each full or the last one, with the datasets of each."""
    bundle, packed = Bundle(f"shared-{new_uid()}"), list[tuple[DatasetRecord, ...]]()
    last: dict[str, bytes] = {}

    def read(small: _Small) -> dict[str, bytes] | AtlasError:
        try:
            return _read_files(catalog, small.records, last)
        except AtlasError as error:
            return error

    for start in range(0, len(chosen), _AT_ONCE):
        some = chosen[start : start + _AT_ONCE]
        # Those of one bundle one after the other, which reads it once.
        each = map if catalog.arrays.is_local or any(small.shared for small in some) else map_requests
        for small, found in zip(some, each(read, some), strict=True):
            # Its dataset may have been dropped and freed meanwhile, or is damaged, which `verify` reports.
            if isinstance(found, AtlasError):
                notes.append(f"the files of {small.records[0].name} were left as they are: {found}")
                continue
            if bundle.add(found) is None:
                yield bundle, packed
                bundle, packed = Bundle(f"shared-{new_uid()}"), []
                bundle.add(found)
            packed.append(small.records)
    if packed:
        yield bundle, packed


def _read_files(catalog: Catalog, own: Sequence[DatasetRecord], last: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files of a dataset, as they are in a bundle: path below the Zarr store -> bytes.

    They are compared with what is recorded of them, because a bundle gets a hash of its own. `last` keeps the shared
    bundle that was read last, by its path.
    """
    first, found, arrays = own[0], dict[str, bytes](), catalog.arrays
    facts = first.file_facts
    frames, bundles = dict[str, Span](), dict[str, bytes]()
    if facts.bundle is not None:
        file, frames = bundle_file(first.uid, facts.bundle), facts.bundle.frames
        bundles = {file: last.get(file) or arrays.read_bytes(file)}
        if file not in last and hashlib.sha256(bundles[file]).hexdigest() != facts.bundle.sha256:
            raise CorruptError(f"{file} does not have the SHA-256 that was recorded")
        # The next dataset is of the same bundle if it is shared.
        if facts.bundle.file and file not in last:
            last.clear()
            last |= bundles

    def read(path: str, span: Span | None) -> bytes:
        if span is None:
            return arrays.read_bytes(path)
        if span.file not in bundles:
            return arrays.read_range(span.file, span.offset, span.n_bytes)
        return bundles[span.file][span.offset : span.offset + span.n_bytes]

    for name, digest in facts.frames.items():
        path = frame_file(first.uid, name)
        found[path] = read(path, frames.get(name))
        if hashlib.sha256(found[path]).hexdigest() != digest:
            raise CorruptError(f"the frame {path} does not have the SHA-256 that was recorded")
    for record in own:
        specs, checksums = read_specs(record), record.array_checksums
        for path, spec in specs.items():
            key = member_of(record, spec)
            # The arrays that are linked share their references.
            if key in found:
                continue
            found[key] = read(key, part_of(spec))
            if spec.linked is None:
                wanted = checksums.get(shards_path(path))
                shard = parse_shard(found[key], spec.chunks_per_shard, spec.path)
                sound = all(has_checksum(shard.data[at : at + n]) for at, n in shard.index.tolist() if n >= 0)  # type: ignore[index]
                if not sound or (wanted is not None and hash_shards({0: hash_shard([found[key]])}) != wanted):
                    raise CorruptError(f"the array {spec.path} is not the one that was written")
            elif hashlib.sha256(found[key]).hexdigest() != spec.linked.sha256:
                raise CorruptError(f"the references {key} do not have the SHA-256 that was recorded")
        found[f"{record.zarr_group}/zarr.json"] = described(catalog, record, specs)
    return found


def member_of(record: DatasetRecord, spec: ArraySpec) -> str:
    """Return the path of the only shard of an array, or of the references to one that is linked."""
    if spec.linked is not None:
        return references_file(record.uid, spec.linked.sha256)
    return f"{spec.path}/{shard_key(spec.row_shape, 0)}"


def _is_in(spec: ArraySpec, file: str) -> bool:
    span = part_of(spec)
    return span is not None and span.file == file


def described(catalog: Catalog, record: DatasetRecord, specs: Mapping[str, ArraySpec]) -> bytes:
    """Return the metadata of a group that lists arrays of a bundle, for other readers."""
    facts = {"feature_space": record.feature_space, "kind": catalog.space(record.feature_space).kind.value}
    return group_metadata({"raggedatlas": facts}, {path: replace(spec, within=None) for path, spec in specs.items()})


def _commit(catalog: Catalog, bundle: Bundle, packed: Sequence[Sequence[DatasetRecord]]) -> int:
    """Write a bundle, and then the records of its datasets that are still as they were; return how many datasets."""
    # The lease keeps a purge away, whose dataset may be among these, and `gc` from a bundle that no record names yet.
    take_lease(catalog, bundle.folder)
    # One that has ended since the files were read is seen now, as the lease brings the tables up to date.
    if purged(catalog).keys() & {own[0].uid for own in packed}:
        catalog.arrays.child(bundle.folder).delete_prefix()
        return 0
    bundle.write(catalog.arrays)
    note_shared_bundles(catalog)
    facts = BundleFacts(
        n_bytes=bundle.n_bytes, sha256=bundle.sha256, file=f"{bundle.folder}/{FILE}", n_datasets=len(packed)
    )
    was = {record.zarr_group: record for own in packed for record in own}

    def now() -> tuple[int, dict[str, list[DatasetRecord]], set[str]]:
        """Return the version of the records, these of the datasets, and which of them name the bundle."""
        version = catalog.tables.version(DATASETS)
        rows = catalog.tables.at({DATASETS: version}).read(
            DATASETS, where=in_list("uid", [own[0].uid for own in packed])
        )
        found = group_by_dataset(datasets_from_table(rows))
        return version, found, {uid for uid, own in found.items() if any(_names(record, facts.file) for record in own)}

    def attempt() -> set[str]:
        # An earlier attempt may have been committed although its response was lost.
        version, found, moved = now()
        kept = {
            uid: own
            for uid, own in found.items()
            if all(
                r.zarr_group in was and (r.arrays, r.facts) == (was[r.zarr_group].arrays, was[r.zarr_group].facts)
                for r in own
            )
        }
        if kept:
            rows = [respanned(record, facts, bundle.spans).model_dump() for own in kept.values() for record in own]
            changed = pa.Table.from_pylist(rows, schema=DATASETS_SCHEMA)
            catalog.tables.merge(DATASETS, ["zarr_group"], changed, update=True, retry=False, read_version=version)
        return moved | kept.keys()

    try:
        moved = catalog.tables.retry(DATASETS, attempt)
    except ConflictError:
        catalog.tables.refresh([DATASETS])
        *_, moved = now()
    if moved:
        release_lease(catalog, bundle.folder)
    else:
        catalog.arrays.child(bundle.folder).delete_prefix()
    return len(moved)


def _names(record: DatasetRecord, file: str) -> bool:
    """Return whether a record names a file."""
    return any(f'"{file}"' in text for text in (record.facts, record.arrays))


def respanned(
    record: DatasetRecord, bundle: BundleFacts, spans: Mapping[str, Span], old: str | None = None
) -> DatasetRecord:
    """Return a record whose files are where they are in a bundle.

    `bundle` is without frames; `spans` maps the path of a file to where it is in the bundle. With `old`, only what is
    in this file changes; None changes all.
    """
    specs = read_specs(record)
    for path, spec in specs.items():
        if old is None or _is_in(spec, old):
            span, linked = spans[member_of(record, spec)], spec.linked
            specs[path] = (
                replace(spec, within=span) if linked is None else replace(spec, linked=replace(linked, references=span))
            )
    changed = array_columns(specs, record.array_checksums)
    facts = record.file_facts
    if facts.frames and (old is None or (facts.bundle is not None and facts.bundle.file == old)):
        frames = {name: spans[frame_file(record.uid, name)] for name in facts.frames}
        changed["facts"] = facts.model_copy(update={"bundle": bundle.model_copy(update={"frames": frames})}).to_json()
    return record.model_copy(update=changed)


# ---- purging


Moves = Mapping[str, tuple[BundleFacts, Mapping[str, Span]]]
"""Shared bundle that was written again without one dataset -> the new one, without frames, and where each file is in it: path -> span."""


def follow_moves(moves: Moves, rows: pa.Table) -> pa.Table:
    """Return rows of `datasets` that name the new bundles."""
    records = datasets_from_table(rows) if moves else []
    if not any(_names(record, file) for record in records for file in moves):
        return rows
    for old, (facts, spans) in moves.items():
        records = [respanned(r, facts, spans, old) if _names(r, old) else r for r in records]
    return pa.Table.from_pylist([record.model_dump() for record in records], schema=DATASETS_SCHEMA)


def leave_out(catalog: Catalog, uid: str, versions: Iterable[int]) -> Moves:
    """Write every shared bundle that has files of a dataset again without them, and without what no version names; no other process writes."""
    files = {f"{folder}/{FILE}" for folder in bundles_with(catalog, uid)}
    named: dict[str, dict[str, DatasetRecord]] = {file: {} for file in files}
    for version in sorted(set(versions)) if files else []:
        for record in datasets_from_table(catalog.tables.at({DATASETS: version}).read(DATASETS)):
            for file in (file for file in files if record.uid != uid and _names(record, file)):
                named[file][record.zarr_group] = _united(named[file].get(record.zarr_group), record, file)
    return {file: _written_again(catalog, file, groups, uid) for file, groups in named.items() if groups}


def _united(known: DatasetRecord | None, record: DatasetRecord, file: str) -> DatasetRecord:
    """Return a record with the arrays in one file that it has in two versions."""
    own = {path: spec for path, spec in read_specs(record).items() if _is_in(spec, file)}
    facts = record.facts
    if known is not None:
        own, facts = {**read_specs(known), **own}, max(known.facts, facts, key=lambda text: f'"{file}"' in text)
    return record.model_copy(update={**array_columns(own, record.array_checksums), "facts": facts})


def _written_again(
    catalog: Catalog, file: str, groups: Mapping[str, DatasetRecord], uid: str
) -> "tuple[BundleFacts, dict[str, Span]]":
    bundle, arrays = Bundle(f"shared-{new_uid()}"), catalog.arrays

    def copied(span: Span) -> bytes:
        return arrays.read_range(span.file, span.offset, span.n_bytes)

    for record in groups.values():
        specs, facts = read_specs(record), record.file_facts
        spans = [(spec, part_of(spec)) for spec in specs.values()]
        found = {member_of(record, spec): copied(span) for spec, span in spans if span is not None}
        found[f"{record.zarr_group}/zarr.json"] = described(catalog, record, specs)
        if facts.bundle is not None and facts.bundle.file == file:
            found |= {frame_file(record.uid, name): copied(span) for name, span in facts.bundle.frames.items()}
        if bundle.add(found) is None:
            raise StoreError(
                f"The files of {record.zarr_group} do not fit into a bundle without dataset {uid}; nothing was changed."
            )
    bundle.write(arrays)
    n_datasets = len({record.uid for record in groups.values()})
    return BundleFacts(
        n_bytes=bundle.n_bytes, sha256=bundle.sha256, file=f"{bundle.folder}/{FILE}", n_datasets=n_datasets
    ), bundle.spans


def bundles_with(catalog: Catalog, uid: str) -> set[str]:
    """Return the folders of shared bundles with files of a dataset; also those of which that cannot be told."""
    found = set()
    for folder in catalog.arrays.list_children():
        if SHARED.fullmatch(folder):
            try:
                names = member_names(catalog.arrays, f"{folder}/{FILE}")
            except NotFoundError:  # its writer died before
                continue
            if names is None or any(name.startswith(f"{uid}/") for name in names):
                found.add(folder)
    return found
