"""Name the place that the file of a linked dataset has moved to, once it is known to have the same values."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Literal

import numpy as np

from raggedatlas.catalog.assets import (
    array_columns,
    array_readers,
    find_dataset,
    has_complete_rows,
    hold_lease,
    open_array,
    read_links,
    read_specs,
    source_facts,
    with_transposed,
)
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import read_frame
from raggedatlas.catalog.linked_values import content_hash, iterate_linked, layer_paths, refuse_duplicate, update_hash
from raggedatlas.errors import AtlasError, SourceError
from raggedatlas.formats.linking import Linker
from raggedatlas.formats.registry import open_source
from raggedatlas.ingest.group_changes import change_records
from raggedatlas.ingest.linking import describe_source, read_indptr
from raggedatlas.model.arrays import ArraySpec
from raggedatlas.model.frames import INDEX
from raggedatlas.model.protocols import Source
from raggedatlas.model.records import DatasetRecord, Link, Span
from raggedatlas.store.content_hash import as_bits
from raggedatlas.store.linked import LinkedSource, keep_references, load_references
from raggedatlas.store.location import AnyPath, Location, as_location, as_path
from raggedatlas.store.read import ArrayReader, TransposedReader, iterate_slices, read_all, read_slice
from raggedatlas.store.references import References, references_file
from raggedatlas.store.sources import recorded_address

_WAY_OUT = "Drop the dataset and add this file instead."


def relink(
    catalog: Catalog, dataset: str, place: AnyPath | None = None, hash: Literal["metadata", "full"] = "metadata"
) -> str:
    """Read a linked dataset from another file with the same values from now on; snapshots keep the old address.

    A file with the recorded size, time (or ETag) and places of chunks was moved or copied, and is taken at once. Of any
    other, all values are compared: with the hash that was recorded of them, where it covers all that is linked, or else
    with the old file.

    `dataset` is a name or uid. `place` is the file or Zarr folder; None is the recorded one. ``hash="full"`` hashes all
    values of the main matrix, as `add` does, unless that was done before. Returns the address that is recorded now.
    Refused are a file that has other values or cannot be compared, a dataset that is changed meanwhile, and values with
    the hash of another dataset.
    """
    catalog = catalog.session("relink()")
    records = find_dataset(catalog, dataset)
    first, facts = records[0], source_facts(records[0])
    if facts is None:
        raise SourceError(f"The dataset {first.name!r} is not linked to a file: its values are in the atlas.")
    links = {record.zarr_group: read_links(record) for record in records}
    old = next(link for own in links.values() for link in own.values())
    if place is None:
        place = as_path(catalog.sources.open_link(old, first.uid, first.name).location)
    address = recorded_address(place, catalog.location)
    with closing(open_source(place)) as source:
        linker = Linker(source, place)
        keys = dict.fromkeys(link.array.rpartition("/")[0] for own in links.values() for link in own.values())
        found = {f"{key}/{name}": spec for key in keys for name, spec in linker.add(key).items()}
        references = linker.references()
        content = references.to_bytes()
        digest = hashlib.sha256(content).hexdigest()
        span = Span(references_file(first.uid, digest), 0, len(content))
        # What has not changed but for its address keeps its references, which may be in a bundle.
        moved = (
            {"source": address} if digest == old.sha256 else {"source": address, "references": span, "sha256": digest}
        )
        new = {
            record.zarr_group: {
                path: _described(spec, found[spec.linked.array], replace(spec.linked, **moved), place)
                for path, spec in read_specs(record).items()
                if spec.linked is not None
            }
            for record in records
        }
        there = LinkedSource(as_location(place), first.name)
        if not _was_moved(load_references(catalog.arrays, old), references):
            keep_references(digest, references)
            _compare(catalog, records, new, source, there)
        is_hashed = facts.hashed == "full"
        text = first.content_hash
        if hash == "full" and not is_hashed:
            keep_references(digest, references)
            text, is_hashed = _hash_values(catalog, records, new[first.zarr_group], there), True
    # The folder of a dataset whose files are in a shared bundle is named by no record until the references are.
    with hold_lease(catalog, first, "relink()"):
        if digest != old.sha256:
            catalog.arrays.write_bytes(span.file, content)
        changed = describe_source(address, references.objects, "full" if is_hashed else "metadata")

        def change(now: list[DatasetRecord]) -> list[DatasetRecord]:
            if {record.zarr_group: read_links(record) for record in now} == links:
                refuse_duplicate(catalog, now[0], text)
                fresh = []
                for record in now:
                    specs, facts = read_specs(record) | new[record.zarr_group], record.file_facts
                    update = {**array_columns(specs, record.array_checksums), "content_hash": text}
                    if facts.linked is not None:
                        update["facts"] = facts.model_copy(update={"linked": changed}).to_json()
                    fresh.append(record.model_copy(update=update))
                return [record for record, before in zip(fresh, now, strict=True) if record != before]
            if all(record.file_facts.linked in (None, changed) for record in now) and now:
                return []  # A commit whose response was lost.
            raise SourceError(
                f"The dataset {first.name!r} of {catalog.location.uri} was changed or dropped while relink() compared its files; call it again."
            )

        change_records(catalog, first.uid, "relink()", change)
    if isinstance(place, Location):
        catalog.sources.remember(address, place)
    return address


def _described(spec: ArraySpec, fresh: ArraySpec, link: Link, place: AnyPath) -> ArraySpec:
    """Return the description of an array that is as `fresh` says in the new file."""
    shape = link.matrix or spec.shape
    if (fresh.shape, fresh.dtype) != (shape, spec.dtype):
        raise SourceError(
            f"{link.array} in {place} has the shape {fresh.shape} and the dtype {fresh.dtype}; the dataset is linked to one of {shape} and "
            f"{spec.dtype}. {_WAY_OUT}"
        )
    if link.matrix is None:
        return replace(
            spec, chunk_shape=fresh.chunk_shape, codecs=fresh.codecs, fill_value=fresh.fill_value, linked=link
        )
    rows, columns = fresh.chunk_shape
    return replace(
        spec, chunk_shape=(rows * shape[1],), codecs=fresh.codecs, fill_value=fresh.fill_value,
        linked=replace(link, chunks=(rows, columns)),
    )  # fmt: skip


def _was_moved(old: References, new: References) -> bool:
    """Return whether a file has the recorded size, time or ETag, and places of chunks."""
    was, now = old.objects, new.objects
    if (was.keys, was.probe) != (now.keys, now.probe) or not np.array_equal(was.n_bytes, now.n_bytes):
        return False
    times = zip(was.modified.tolist(), now.modified.tolist(), was.etags, now.etags, strict=True)
    same = all((a == b != "") or (a == b == "" and then == since != 0) for then, since, a, b in times)
    return (
        same
        and old.arrays.keys() == new.arrays.keys()
        and all(
            np.array_equal(getattr(table, name), getattr(new.arrays[array], name))
            for array, table in old.arrays.items()
            for name in ("objects", "offsets", "sizes")
        )
    )


def _compare(
    catalog: Catalog,
    records: Sequence[DatasetRecord],
    new: Mapping[str, Mapping[str, ArraySpec]],
    source: Source,
    there: LinkedSource,
) -> None:
    """Refuse a file that has other cells, features or values."""
    first, facts = records[0], source_facts(records[0])
    if not source.cells().column(INDEX).equals(read_frame(catalog, first, "obs").column(INDEX)):
        raise _other(first, there, "it has other cells")
    for record in records:
        frame, layer = f"var.{record.pointer}", next(iter(record.file_facts.layers.values()), None)
        if layer is None or not layer.features or frame not in first.file_facts.frames:
            continue
        if not source.features(layer.features).column(INDEX).equals(read_frame(catalog, first, frame).column(INDEX)):
            raise _other(first, there, f"{layer.key} has other features")
    for record in records:
        fresh = {path: ArrayReader(catalog.arrays, spec, source=there) for path, spec in new[record.zarr_group].items()}
        readers = array_readers(catalog, record)
        for path in [path for path in fresh if path.endswith("indices")]:
            bounds = readers[path.removesuffix("indices") + "indptr"]
            key = (fresh[path].spec.linked or bounds.spec.linked).array.rpartition("/")[0]  # type: ignore[union-attr]
            if not np.array_equal(read_all(bounds), read_indptr(source, key)):
                raise _other(first, there, f"{key} has its entries in other rows")
        hashed = {"csr/indices", *(f"{folder}layers/{name}" for name in record.layers[:1] for folder in ("csr/", ""))}
        if (
            facts is not None
            and facts.hashed == "full"
            and record is first
            and fresh.keys() <= hashed
            and len(records) == 1
        ):
            if _hash_values(catalog, records, new[record.zarr_group], there) != first.content_hash:
                raise _other(first, there, "its values do not have the hash that was recorded")
            continue
        for path, reader in fresh.items():
            # Not of `readers`, which lack column-sorted arrays in a file that may not be read.
            _compare_values(first, open_array(catalog, record, read_specs(record)[path]), reader, there)


def _hash_values(
    catalog: Catalog, records: Sequence[DatasetRecord], new: Mapping[str, ArraySpec], there: LinkedSource
) -> str:
    """Return the hash of a dataset with the values of its main matrix in a file; a main matrix that is not linked is refused."""
    first, paths = records[0], layer_paths(records[0])
    if first.layers[0] not in paths:
        raise SourceError(
            f"The layer {first.layers[0]!r} of the dataset {first.name!r} is in the atlas, and hashed already."
        )
    fresh = {path: ArrayReader(catalog.arrays, spec, source=there) for path, spec in new.items()}
    content, complete = content_hash(catalog, [*records]), has_complete_rows(first, first.array_specs)
    old = array_readers(catalog, first).items()
    stored = {path: reader for path, reader in old if not isinstance(reader, TransposedReader)}
    for row, layers in iterate_linked(with_transposed({**stored, **fresh}, first.zarr_group), first):
        update_hash(content, layers[first.layers[0]], first.zarr_group, row, complete=complete)
    return content.hexdigest()


def _compare_values(first: DatasetRecord, old: ArrayReader, new: ArrayReader, there: LinkedSource) -> None:
    start = 0
    for values in iterate_slices(new):
        try:
            before = read_slice(old, start, start + len(values))
        except AtlasError as error:
            raise SourceError(
                f"{there.location} is not the recorded file, by its size, time or ETag, and the values of the dataset {first.name!r} cannot be compared "
                f"with it: no hash of all of them was recorded, and the old file cannot be read ({error}). Drop the dataset and add this file instead, "
                "with hash='full' to have it compared by its hash."
            ) from error
        if not np.array_equal(as_bits(before), as_bits(values)):
            raise _other(first, there, f"the values of {new.name} are not those of {old.name}")
        start += len(values)


def _other(first: DatasetRecord, there: LinkedSource, text: str) -> SourceError:
    return SourceError(f"{there.location} is not the file of the dataset {first.name!r}: {text}. {_WAY_OUT}")
