"""Open a published atlas by its address, and compare what it serves with the root hash of a snapshot."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from raggedatlas.catalog.catalog import FORMAT, Catalog
from raggedatlas.catalog.inventory import Inventory
from raggedatlas.errors import AtlasError, CorruptError, NotFoundError, StoreError
from raggedatlas.store.cache_folder import CACHE_OPTIONS, user_cache
from raggedatlas.store.gateway import Gateway
from raggedatlas.store.location import WEB_SCHEMES, Location, digest_entries
from raggedatlas.store.manifests import FOLDER, FileEntry, read_manifest
from raggedatlas.store.published import ARRAYS, HEAD, TABLES, KeptBlocks, PackedFile, PublishedFiles, StoredFolder
from raggedatlas.store.shards import hash_shards, shard_entry, shards_below
from raggedatlas.store.sources import SourceAccess, Sources
from raggedatlas.store.tables import Tables
from raggedatlas.store.web import WebFolder

_ROOT = re.compile(r"sha256:([0-9a-f]{64})")
_FILE = re.compile(
    r"\.(h5ad|h5mu|h5|hdf5|zarr|zip|cxg|loom|parquet|csv|tsv|gz|json|geojson|ply|obj|stl)/?$", re.IGNORECASE
)
_ADDRESS = re.compile(rf"(?:{'|'.join(WEB_SCHEMES)}|hf)://|doi:", re.IGNORECASE)


def split_address(address: str) -> tuple[str, str | None]:
    """Split the snapshot from an address.

    It is what follows an ``@`` in the last part, unless a local file or folder is named so.

    Examples
    --------
    >>> split_address("https://lab.org/lung.atlas@v3"), split_address("s3://me@host/x")
    (('https://lab.org/lung.atlas', 'v3'), ('s3://me@host/x', None))
    """
    before, found, at = address.rpartition("@")
    if not found or "/" in at or not at or ("://" not in address and Path(address).expanduser().exists()):
        return address, None
    return before, at


def is_published(address: str, storage_options: Mapping[str, str] | None = None) -> bool:
    """Return whether an address is one of a published atlas: on a web server, on the Hub, a DOI, or a folder with a ``head.json``."""
    if _ADDRESS.match(address):
        return True
    place = Location.of(address, storage_options)
    if place.is_local:
        return (place.path / HEAD).is_file()
    try:
        place.read_bytes(HEAD)
    except NotFoundError:
        return False
    return True


def serves_atlas(address: str) -> bool:
    """Return whether a published atlas is at an address where a file may be too; a web server is asked unless the name is one of a file."""
    address = split_address(address)[0]
    if not _ADDRESS.match(address):
        return "://" not in address and (Path(address).expanduser() / HEAD).is_file()
    if not address.lower().startswith(WEB_SCHEMES):
        return True
    if _FILE.search(address.partition("?")[0]):
        return False
    try:
        PublishedFiles.read_head(WebFolder.of(address))
    except AtlasError:
        return False
    return True


def open_published(
    address: str,
    at: str | int | None = None,
    *,
    storage_options: Mapping[str, str] | None = None,
    cache: str | None = None,
    offline: bool = False,
    any_redirect: bool = False,
    sources: Sources = "deny",
) -> Catalog:
    """Open a snapshot of a published atlas.

    `address` is as of `RaggedAtlas.open_address`, without a snapshot. `at` is label or number of a snapshot, or
    ``"sha256:..."``, its root hash: then every file is compared with what the hash covers before it is used. None opens
    the newest. `cache` keeps what is read on the local disk, up to this size of each of tables and arrays; `offline`
    reads from that cache alone. `any_redirect` follows redirects to this machine and private networks, too. `sources`
    is the rule of `SourceAccess`. Raises `CorruptError` if the atlas is damaged, or not what the root hash says.
    """
    options = {name: value for name, value in (storage_options or {}).items() if name in CACHE_OPTIONS}
    if cache is not None:
        options["cache_size"] = cache
    if options.get("cache_size") or offline:
        folder = user_cache()
        if not options.get("cache_dir") and folder is None:
            raise StoreError(
                "There is no folder for caches, as this user has no home; name one with storage_options={'cache_dir': ...}."
            )
        options.setdefault("cache_dir", str(folder))
    kept = KeptBlocks.of_options(options) if options.get("cache_dir") else None
    place = None if _ADDRESS.match(address) else Location.of(address, storage_options)
    shown = address.partition("?")[0].rstrip("/") if place is None else place.uri
    gateway = Gateway(shown, partial(_read_published, place, address, kept, offline=offline, any_redirect=any_redirect))
    files, location = gateway.files, Location(shown, options, gateway)
    root = _ROOT.fullmatch(str(at))
    if root is None:
        record = files.head.find(at, location.uri)
    else:
        roots = {one.root_hash: one for one in files.head.snapshots}
        if root[1] not in roots:
            raise NotFoundError(f"No snapshot of {location.uri} has the root hash {root[1]}; published are {[*roots]}.")
        record = roots[root[1]]
    if files.head.atlas_format != FORMAT:
        raise AtlasError(
            f"The atlas at {location.uri} has format {files.head.atlas_format!r}, and this version of raggedatlas reads {FORMAT!r}; use the "
            "version that wrote it."
        )
    tables = Tables(location.child("lance_db"))
    view = Catalog(location, tables, location.child("zarr_store"), sources=SourceAccess(location, sources)).at(record)
    if root is not None:
        # The root hash covers the record, this the manifest, that the tables, and these all other files.
        manifest = f"{TABLES}{FOLDER}/{record.manifest}.json"
        gateway.trust({manifest: record.manifest})
        entries = read_manifest(view.tables.location, record.manifest)
        trusted = {manifest: record.manifest, **{f"{TABLES}{path}": entry.sha256 for path, entry in entries.items()}}
        gateway.trust(trusted)
        gateway.trust(trusted | covered_arrays(view, files.places))
    return view


def published_files(view: Catalog) -> PublishedFiles:
    """Return the files of an opened published atlas."""
    server = view.location.server
    assert isinstance(server, Gateway)
    return server.files


def _read_published(
    place: Location | None, address: str, cache: KeptBlocks | None, *, offline: bool, any_redirect: bool
) -> PublishedFiles:
    """Open the files of a published atlas, in this process or another: in a folder here or in an object store, or else at an address."""
    folder = StoredFolder(place) if place is not None else WebFolder.of(address, any_redirect=any_redirect)
    return PublishedFiles(folder, cache, offline=offline)


def covered_arrays(view: Catalog, places: Mapping[str, PackedFile]) -> dict[str, str]:
    """Return which files of the Zarr store the records of a snapshot cover: path -> SHA-256.

    Raises `CorruptError` if the hashes of files are not what is recorded.
    """
    by_folder: dict[str, list[str]] = {}
    for path in places:
        if path.startswith(ARRAYS):
            by_folder.setdefault(path.split("/", 2)[1], []).append(path.removeprefix(ARRAYS))
    covered: dict[str, str] = {}

    def refuse(path: str) -> None:
        raise CorruptError(
            f"{ARRAYS}{path} of {view.location.uri} does not have the SHA-256 that was recorded when it was written; run verify() on the atlas "
            "that it was published from, and publish it again from a sound copy."
        )

    there = Inventory(view)
    for path, sha256 in there.contents.items():
        place = places.get(ARRAYS + path)
        if place is not None:
            if place.sha256 != sha256:
                refuse(path)
            covered[ARRAYS + path] = sha256
            continue
        shards = shards_below(path, by_folder.get(path.partition("/")[0], ()))
        if not shards:
            # Empty, or a frame that is part of a bundle.
            continue
        found = {number: places[ARRAYS + key] for number, key in shards.items()}
        if hash_shards({n: shard_entry(one.n_bytes, bytes.fromhex(one.sha256)) for n, one in found.items()}) != sha256:
            refuse(path)
        covered |= {ARRAYS + key: places[ARRAYS + key].sha256 for key in shards.values()}
    for kind, one in there.visible_assets:
        if digest := kind.digest(one):
            keys = [key for key in by_folder.get(one.uid, ()) if key.startswith(f"{one.zarr_group}/")]
            entries = {
                key.removeprefix(f"{one.zarr_group}/"): FileEntry(
                    places[ARRAYS + key].n_bytes, places[ARRAYS + key].sha256
                )
                for key in keys
            }
            if digest_entries(entries) != digest:
                refuse(one.uid)
            covered |= {ARRAYS + key: places[ARRAYS + key].sha256 for key in keys}
    return covered
