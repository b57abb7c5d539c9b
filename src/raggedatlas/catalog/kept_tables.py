"""Tables that are computed of a snapshot and kept beside it, by its root hash: never of another content, and computed again where they are gone."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import pyarrow as pa

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import encode_frame
from raggedatlas.catalog.versions import list_versions
from raggedatlas.errors import AtlasError, ConflictError, CorruptError, NotFoundError
from raggedatlas.model.records import AtlasVersionRecord
from raggedatlas.store.gateway import Gateway
from raggedatlas.store.location import Location
from raggedatlas.store.manifests import FileEntry, Files

MARKERS = "_markers"
"""Folder of marker tables below ``lance_db``, with a folder for each snapshot, which is called by its root hash."""

AGAIN = "Delete the file; markers() of the atlas computes the table again."

_NAME = re.compile(r"[0-9a-f]{64}/[0-9a-f]{16}\.[0-9a-f]{64}\.arrow")
"""Root hash of the snapshot, key, and SHA-256 of the file."""

_ASKED = b"raggedatlas.markers"
"""Metadata of the schema of a table: JSON of what it answers, and of what is known of it."""

Facts = Mapping[str, Any]
"""What JSON holds."""


@dataclass(frozen=True)
class KeptTable:
    """A table that was computed of a snapshot."""

    table: pa.Table  # as `model.frames.frame_to_arrow` makes it
    known: Facts  # what is known of it


def read_kept(view: Catalog, asked: Facts) -> KeptTable | None:
    """Return the table that is kept of a snapshot and answers what is asked; None where there is none."""
    server = view.location.server
    # The root hash of a snapshot does not cover what is computed of it, so a reader who relies on it alone computes anew.
    if view.snapshot is None or (isinstance(server, Gateway) and server.trusts_hashes):
        return None
    folder = view.tables.location.child(MARKERS, view.snapshot.root_hash)
    for name in sorted(key for key, _, _ in folder.list_objects() if key.startswith(f"{_key(asked)}.")):
        try:
            data = folder.read_bytes(name)
        except NotFoundError:
            # `gc` of another process, after the snapshot was dropped.
            continue
        if hashlib.sha256(data).hexdigest() != _hash_in(name):
            raise CorruptError(f"{folder.uri}/{name} does not have the SHA-256 in its name. {AGAIN}")
        with pa.ipc.open_file(data) as reader:
            table = reader.read_all()
        facts = json.loads(table.schema.metadata[_ASKED])
        if facts["asked"] == asked:
            return KeptTable(table, facts["known"])
    return None


def keep_table(catalog: Catalog, record: AtlasVersionRecord, asked: Facts, kept: KeptTable) -> None:
    """Keep a table of a snapshot, and what it answers, unless the snapshot was dropped or purged meanwhile."""
    facts = json.dumps({"asked": asked, "known": kept.known}, sort_keys=True)
    data = encode_frame(kept.table.replace_schema_metadata({_ASKED: facts}))
    key = f"{MARKERS}/{record.root_hash}/{_key(asked)}.{hashlib.sha256(data).hexdigest()}.arrow"
    place = catalog.tables.location
    # Named by its content, so an existing file is this one.
    place.write_bytes(key, data, only_if_absent=True)
    # After the write: a purge that ends between would leave what was computed of the purged cells.
    if not _is_listed(catalog, record):
        place.delete_objects([key])


def refuse_gone(catalog: Catalog, record: AtlasVersionRecord, error: AtlasError) -> NoReturn:
    """Raise what an error of reading a snapshot is due to: a purge, another process that dropped the snapshot, or the error itself."""
    catalog.refuse_unfinished_purge("markers()")
    if not _is_listed(catalog, record):
        raise ConflictError(
            f"Another process dropped snapshot {record.version} of {catalog.location.uri}, or purged a dataset of it, while markers() read it; "
            "run it again."
        ) from error
    raise error


def kept_files(tables: Location, records: Iterable[AtlasVersionRecord]) -> Files:
    """Return the tables that are kept of snapshots: path below ``lance_db`` -> length and SHA-256."""
    roots = {record.root_hash for record in records}
    # Not the temporary file of a process that writes one, or died.
    there = [(key, n, when) for key, n, when in tables.child(MARKERS).list_objects() if _NAME.fullmatch(key)]
    return {
        f"{MARKERS}/{key}": FileEntry(n_bytes, _hash_in(key))
        for key, n_bytes, _ in there
        if key.partition("/")[0] in roots
    }


def _is_listed(catalog: Catalog, record: AtlasVersionRecord) -> bool:
    return record.root_hash in {one.root_hash for one in list_versions(catalog.tip())}


def _key(asked: Facts) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def _hash_in(name: str) -> str:
    return name.removesuffix(".arrow").rpartition(".")[2]
