"""Publish snapshots of an atlas as a few files, and copy a published atlas into an atlas of one's own."""

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from raggedatlas.catalog.assets import GRACE, read_links
from raggedatlas.catalog.catalog import DATASETS, FORMAT, UID_KEY, VERSIONS, Catalog, catalog_at, is_atlas
from raggedatlas.catalog.integrity import seal_versions
from raggedatlas.catalog.inventory import Inventory, dataset_folders
from raggedatlas.catalog.kept_tables import MARKERS
from raggedatlas.catalog.mirror import PARTIAL, named_files, refuse_nested, remove_partial, write_blocks
from raggedatlas.catalog.published import covered_arrays, published_files
from raggedatlas.catalog.versions import find_version, list_versions
from raggedatlas.errors import CorruptError, NotFoundError, StoreError
from raggedatlas.model.arguments import Progress
from raggedatlas.model.records import AtlasVersionRecord, versions_to_table
from raggedatlas.model.reports import MaintenanceReport
from raggedatlas.store.location import Location, read_blocks
from raggedatlas.store.manifests import FileEntry, read_manifest
from raggedatlas.store.published import (
    ARRAYS,
    HEAD,
    INDEX,
    MOST_OPENING,
    PACK,
    TABLES,
    Head,
    PackedFile,
    PublishedFiles,
    StoredFolder,
    parse_index,
    plan_packs,
    write_index,
)
from raggedatlas.store.runtime import map_groups, prefetch
from raggedatlas.store.tables import Tables

README, CITATION, CHECKSUMS = "README.md", "CITATION.cff", "checksums.sha256"

PACK_BYTES = 1 << 30
"""Bytes of a pack; only a larger file exceeds it."""

_MARK = "Written by raggedatlas publish."
"""In the card and the citation, which are written again; files of these names without it are left alone."""

_SMALL = 1 << 20
_LEAST_USED = 0.5
"""Share of a pack that is still used; of others the files that are needed are written into new packs."""

_MOST_LISTED = 1_000


@dataclass(frozen=True)
class Card:
    """What people write about a published atlas."""

    readme: str | Path = ""  # text in Markdown, or a file with it, for the head of the README
    license: str = ""  # of the published atlas, e.g. ``"CC-BY-4.0"``
    citation: str | Path = ""  # how to cite it, or a ``.cff`` file


@dataclass(frozen=True)
class _NeededFile:
    """A file of the atlas that a snapshot needs."""

    place: Location
    key: str
    n_bytes: int
    sha256: str = ""


def publish(
    catalog: Catalog,
    target: Location,
    *,
    at: str | int | None = None,
    keep: Sequence[str | int] = (),
    card: Card | None = None,
    require_license: bool = False,
    dry_run: bool,
    progress: Progress,
) -> MaintenanceReport:
    """Write snapshots of an atlas into a flat folder of a few files that any web server can serve.

    The target is an empty place, or one with earlier snapshots of this atlas. `at` is the snapshot; None takes the
    newest. `keep` are others to publish with it. `card` is for the README and the citation. `require_license` refuses
    if a dataset has no licence. Datasets that are linked to files outside are refused.

    Notes
    -----
    ``head.json`` is written last, so that readers see what was there before until all is there. Packs are named by what they hold, and those
    that are there are not written again: so a call that died goes on where it stopped, and the next snapshot adds what is new.
    """
    catalog.refuse_unfinished_purge("publish()")
    card = card or Card()
    chosen = {record.version: record for record in (find_version(catalog, one) for one in (at, *keep))}
    records = [chosen[number] for number in sorted(chosen)]
    views = [catalog.at(record) for record in records]
    refuse_nested(catalog.location, target)
    for view in views:
        linked = [own[0].name or own[0].uid for own in Inventory(view).datasets.values() if any(map(read_links, own))]
        if linked:
            raise StoreError(
                f"The dataset {linked[0]!r} is linked to a file outside of {view.location.uri}, which readers of a published atlas would not "
                f"reach; run materialize({linked[0]!r}) and take a snapshot first."
            )
    newest = Inventory(views[-1]).datasets
    without = [own[0].name or uid for uid, own in newest.items() if not own[0].file_facts.license]
    if without and require_license:
        raise StoreError(
            f"{len(without):,} dataset(s) of {catalog.location.uri} have no licence: {', '.join(without[:5])}{', ...' if len(without) > 5 else ''}. "
            "Add them with license=..., or set it with set_license(dataset, license)."
        )
    old, old_places = _read_target(target, catalog)
    notes = [f"no licence: {', '.join(without[:20])}{', ...' if len(without) > 20 else ''}"] if without else []
    with tempfile.TemporaryDirectory(prefix="raggedatlas-") as scratch:
        files = _table_files(catalog, records)
        for view in views:
            files |= _array_files(view)
        there = {key: size for key, size, _ in target.list_objects()}
        # The list of snapshots that was published before, where it is of the same ones; its files are in packs alone.
        same = old is not None and old.snapshots == records
        listed = {
            path: _NeededFile(Location("."), path, one.n_bytes, one.sha256)
            for path, one in old_places.items()
            if same and path.startswith(f"{TABLES}{VERSIONS}.lance/")
        }
        places = _reuse(files | listed, old, old_places, there)
        opening, packs = _plan(files | listed, places)
        if packs or not listed:
            # The list of the published snapshots has other bytes whenever it is made.
            made, rows = Tables(Location(scratch).child("lance_db")), versions_to_table(records)
            made.create(VERSIONS, rows.schema, rows)
            files |= {TABLES + key: _NeededFile(made.location, key, n) for key, n, _ in made.location.list_objects()}
            places = _reuse(files, old, old_places, there)
            opening, packs = _plan(files, places)
        n_new = sum(files[path].n_bytes for paths in packs.values() for path in paths)
        stay = {place.pack for place in places.values()}
        if dry_run:
            notes.append(f"{len(packs):,} pack(s) would be written, {len(stay):,} stay")
            return MaintenanceReport(n_bytes=n_new, dry_run=True, notes=tuple(notes))
        entries = {} if old is None else {name: entry for name, entry in old.packs.items() if name in stay}
        for done, (pack, paths) in enumerate(packs.items()):
            progress("packs", done, len(packs))
            own = [(path, files[path]) for path in paths]
            entries[pack], placed = _write_pack(target, pack, own, there.get(pack))
            places |= placed
        progress("packs", len(packs), len(packs))
    for view, record in zip(views, records, strict=True):
        # What was published must be what the snapshot records.
        covered_arrays(view, places)
        for path, entry in read_manifest(view.tables.location, record.manifest).items():
            place = places[TABLES + path]
            if (place.n_bytes, place.sha256) != tuple(entry):
                raise CorruptError(f"{path} of {view.location.uri} does not have its recorded SHA-256; run verify().")
    n_opening = max((p.offset + p.n_bytes for p in places.values() if p.pack == opening), default=0)
    index, n_index = write_index(places)
    head = Head(
        format="1", atlas_format=FORMAT, snapshots=records, index=f"index-{hashlib.sha256(index).hexdigest()[:16]}.tsv.zst",
        index_entry=FileEntry(len(index), hashlib.sha256(index).hexdigest()), index_bytes=n_index, packs=entries,
        opening=(opening, n_opening), n_bytes=sum(p.n_bytes for p in places.values()),
    )  # fmt: skip
    for name, text in (
        (README, _readme(views[-1], head, card, target)),
        (CITATION, _citation(views[-1], card, target)),
    ):
        if name in there and _MARK.encode() not in target.read_bytes(name):
            notes.append(f"{name} is not one that publish() wrote, and stays as it is")
        else:
            target.write_bytes(name, text.encode())
    texts = {name: target.read_bytes(name) for name in (README, CITATION)}
    hashes = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in {**texts, head.index: index, HEAD: head.to_bytes()}.items()
    }
    hashes |= {name: entry.sha256 for name, entry in entries.items()}
    target.write_bytes(head.index, index)
    target.write_bytes(CHECKSUMS, "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items())).encode())
    # Last: until then readers see what was there before.
    target.write_bytes(HEAD, head.to_bytes())
    # Readers of the head before may need what is younger.
    oldest = datetime.now(UTC) - GRACE
    unused = [
        key
        for key, _, when in target.list_objects()
        if (PACK.fullmatch(key) or INDEX.fullmatch(key)) and key not in {*head.packs, head.index} and when < oldest
    ]
    target.delete_objects(unused)
    remove_partial(target.child(PARTIAL))
    notes.insert(
        0, f"snapshots: {len(records)}, in {len(entries) + 5:,} files at {target.uri}; {len(packs):,} pack(s) written"
    )
    notes += [f"{len(unused):,} file(s) of earlier snapshots removed"] if unused else []
    return MaintenanceReport(n_bytes=n_new, notes=tuple(notes))


def _read_target(target: Location, catalog: Catalog) -> tuple[Head | None, Mapping[str, PackedFile]]:
    """Return head and index of what was published there before; refuse an atlas, and what was published of another one."""
    if is_atlas(target):
        raise StoreError(f"{target.uri} is an atlas, in which nothing is published; name an empty place.")
    try:
        head = Head.parse(target.read_bytes(HEAD), target.uri)
    except NotFoundError:
        return None, {}
    known = {record.root_hash for record in list_versions(catalog)}
    if not known & {record.root_hash for record in head.snapshots}:
        raise StoreError(
            f"What is published at {target.uri} has no snapshot in common with {catalog.location.uri}; name an empty place, or that of this atlas."
        )
    return head, parse_index(StoredFolder(target).read(head.index, 1 << 30), head, target.uri)


def _table_files(catalog: Catalog, records: Sequence[AtlasVersionRecord]) -> dict[str, _NeededFile]:
    """Return the files of tables that snapshots reach, by their paths in the atlas, but for the list of snapshots."""
    place = catalog.tables.location
    files: dict[str, _NeededFile] = {}
    for record in records:
        entries = read_manifest(catalog.tables.location, record.manifest)
        files |= {f"{TABLES}{path}": _NeededFile(place, path, *entry) for path, entry in entries.items()}
    for path in sorted(named_files(place, records)):
        data = place.read_bytes(path)
        files[TABLES + path] = _NeededFile(place, path, len(data), hashlib.sha256(data).hexdigest())
    return files


def _array_files(view: Catalog) -> dict[str, _NeededFile]:
    """Return the files of the Zarr store that a snapshot reaches, dataset by dataset."""
    files: dict[str, _NeededFile] = {}
    there = Inventory(view)
    recorded = there.files
    for uid in sorted(there.folders):
        for key, n_bytes, _ in sorted(view.arrays.child(uid).list_objects()):
            path = f"{uid}/{key}"
            files[ARRAYS + path] = _NeededFile(view.arrays, path, n_bytes, recorded.get(path, ""))
    return files


def _reuse(
    files: Mapping[str, _NeededFile], old: Head | None, old_places: Mapping[str, PackedFile], there: Mapping[str, int]
) -> dict[str, PackedFile]:
    """Return where files are that were published before, apart from those in packs that are mostly unused."""
    if old is None:
        return {}
    same = {}
    for path, place in old_places.items():
        file = files.get(path)
        if file is None or file.n_bytes != place.n_bytes or (file.sha256 and file.sha256 != place.sha256):
            continue
        if there.get(place.pack) == old.packs[place.pack].n_bytes:
            same[path] = place
    used: dict[str, int] = {}
    for place in same.values():
        used[place.pack] = used.get(place.pack, 0) + place.n_bytes
    kept = {pack for pack, n in used.items() if n >= _LEAST_USED * old.packs[pack].n_bytes}
    return {path: place for path, place in same.items() if place.pack in kept}


def _plan(files: Mapping[str, _NeededFile], places: dict[str, PackedFile]) -> tuple[str, dict[str, list[str]]]:
    """Distribute the files that are not in `places` over new packs; return these, and which pack has all that opening needs, from its start on."""
    opening, n_bytes = list[str](), 0
    # Tables of markers are read by few.
    own = [path for path in files if path.startswith(TABLES) and not path.startswith(f"{TABLES}{MARKERS}/")]
    small = {path: files[path].n_bytes for path in own if files[path].n_bytes <= _SMALL}
    for path in sorted(small, key=lambda path: (small[path], path)):
        if n_bytes + small[path] > MOST_OPENING:
            break
        opening.append(path)
        n_bytes += small[path]
    held = {places[path].pack if path in places else "" for path in opening}
    if len(held) > 1:
        # Written again with what is new, so that they can be fetched at once.
        for path in opening:
            places.pop(path, None)
    done = {*places, *opening}
    rest = [path for path in files if path not in done]
    parts = [sorted(path for path in opening if path not in places)]
    parts += [[path for path in rest if path.startswith(part)] for part in (TABLES, ARRAYS)]
    planned = [
        plan_packs([(path, files[path].n_bytes, files[path].sha256) for path in part], PACK_BYTES) for part in parts
    ]
    return next(iter(planned[0]), max(held)), {**planned[0], **planned[1], **planned[2]}


def _write_pack(
    target: Location, pack: str, files: Sequence[tuple[str, _NeededFile]], n_there: int | None
) -> tuple[FileEntry, dict[str, PackedFile]]:
    """Write a pack, or read it where an earlier call has written it; return what it is and where its files are.

    `n_there` is the length of the file of this name in the target. Raises `CorruptError` if a file does not have its
    recorded hash or length.
    """
    n_bytes = sum(file.n_bytes for _, file in files)
    # Renamed when it was complete, or an object, which appears as a whole.
    is_there = n_there == n_bytes
    places: dict[str, PackedFile] = {}
    whole = hashlib.sha256()
    ready, rest = read_blocks(target, pack) if is_there else iter(()), memoryview(b"")

    def take(n: int) -> Iterator[memoryview]:
        """Yield the next bytes of the pack that is there."""
        nonlocal rest
        while n > 0 and (rest := rest or memoryview(next(ready, b""))):
            part, rest = rest[:n], rest[n:]
            n -= len(part)
            yield part

    def blocks() -> Iterator[bytes | memoryview]:
        offset = 0
        for path, file in files:
            hashed, n = hashlib.sha256(), 0
            for block in take(file.n_bytes) if is_there else read_blocks(file.place, file.key):
                hashed.update(block)
                whole.update(block)
                n += len(block)
                yield block
            if n != file.n_bytes or (file.sha256 and file.sha256 != hashed.hexdigest()):
                raise CorruptError(
                    f"{file.place.uri}/{file.key} does not have the length and the SHA-256 that were recorded when it was written, or the pack "
                    f"{pack} was changed; run verify() on the atlas, remove what was published of it, and publish it again."
                )
            places[path] = PackedFile(pack, offset, n, hashed.hexdigest())
            offset += n

    if is_there:
        for _ in blocks():
            pass
        return FileEntry(n_bytes, whole.hexdigest()), places
    # On a thread of its own: obstore takes the blocks of an upload where no other request can be made.
    with contextlib.closing(prefetch(blocks(), depth=4)) as ahead:
        return write_blocks(ahead, target, pack, target.child(PARTIAL)), places


def _text(given: str | Path) -> str:
    """Return a text, or that of a file."""
    path = Path(given) if isinstance(given, Path) or (given and "\n" not in given and len(given) < 1000) else None
    with contextlib.suppress(OSError):
        if path is not None and path.is_file():
            return path.read_text(encoding="utf-8")
    if isinstance(given, Path):
        raise StoreError(f"There is no file {given}; give the text, or a file with it.")
    return given


def _cell(value: object) -> str:
    """Return text for a cell of a table in Markdown, in which nothing of it is markup."""
    text = escape(" ".join(str(value).split()), quote=False)
    return "".join(f"\\{c}" if c in "\\`*_{}[]()#+!|~" else c for c in text)


def _title(target: Location) -> str:
    return target.uri.rstrip("/").rpartition("/")[2]


def _readme(view: Catalog, head: Head, card: Card, target: Location) -> str:
    record, there = head.snapshots[-1], Inventory(view).datasets
    spaces: dict[str, int] = {}
    organisms = set[str]()
    for space in view.spaces().values():
        if space.has_features and space.registry in (view.tables.pinned or {}):
            names = view.tables.read(space.registry, ["organism"]).column(0)
            if len(names):
                spaces[space.name] = len(names)
                organisms |= {str(one) for one in pc.unique(names).to_pylist() if one and one != "unknown"}
    rows = []
    for own in there.values():
        n = own[0].file_facts.n_cells
        n = max(group.n_cells for group in own) if n is None else n
        names = ", ".join(_cell(group.feature_space) for group in own)
        license = _cell(own[0].file_facts.license) or "-"
        rows.append(f"| {_cell(own[0].name or own[0].uid)} | {n:,} | {names} | {license} |")
    shown = rows[:_MOST_LISTED]
    more = f"\n... and {len(rows) - len(shown):,} more.\n" if len(rows) > len(shown) else ""
    label = f"{record.version} ({_cell(record.label)})" if record.label else f"{record.version}"
    title = _title(target)
    front = {"license": card.license.lower() or "other", "tags": ["single-cell", "raggedatlas"], "pretty_name": title}
    at = record.label or str(record.version)
    lines = [
        "---", *(f"{name}: {json.dumps(value)}" for name, value in front.items()), "---", f"<!-- {_MARK} -->", "", f"# {_cell(title)}", "",
        _text(card.readme), "",
        f"- Snapshot {label}, {record.created_at[:10]}: {record.n_cells:,} cells of {record.n_datasets:,} datasets",
        *(f"- {n:,} features of {_cell(name)}" for name, n in spaces.items()),
        f"- Organisms: {', '.join(map(_cell, sorted(organisms))) or 'not known'}",
        f"- Licence: {_cell(card.license) or 'see the datasets'}",
        f"- {head.n_bytes / 1e6:,.1f} MB in {len(head.packs) + 5:,} files",
        f"- Root hash of the snapshot: `{record.root_hash}`", "",
        "## Open it", "", "Nothing is downloaded but what is asked for. In Python, after `pip install raggedatlas`:", "",
        "```python", "import raggedatlas as ra", "", f'atlas = ra.open("ADDRESS@{_code(at)}")  # the address of this folder', "print(atlas)",
        'atlas.query().where("...").to_anndata()', "```", "",
        "With SQL, through DuckDB (`pip install 'raggedatlas[sql]'`):", "",
        "```python", 'atlas.sql("select dataset, count(*) from cells group by 1")', "```", "",
        "In R, with the package `raggedatlas` of the same project:", "",
        "```r", f'atlas <- raggedatlas::open_atlas("ADDRESS@{_code(at)}")', "raggedatlas::atlas_datasets(atlas)", "```", "",
        "A copy of one's own: `raggedatlas clone ADDRESS my.atlas`.", "",
        "## Datasets", "", "| Dataset | Cells | Feature spaces | Licence |", "|---|---|---|---|", *shown, more,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    return text.replace("\\", "").replace('"', "").replace("`", "")


def _citation(view: Catalog, card: Card, target: Location) -> str:
    """Return the citation in the Citation File Format; JSON texts are texts of YAML."""
    given = card.citation
    if str(given).endswith(".cff"):
        return f"# {_MARK}\n{_text(Path(given))}"
    record = view.snapshot
    assert record is not None
    title = _title(target)
    text = _text(given)
    facts: dict[str, Any] = {
        "cff-version": "1.2.0",
        "message": text or f"If you use these data, cite this atlas and the datasets in its {README}.",
        "title": title,
        "type": "dataset",
        "version": record.label or str(record.version),
        "date-released": record.created_at[:10],
        "authors": [{"name": f"The authors of {title}"}],
        **({"license": card.license} if card.license else {}),
        "identifiers": [
            {"type": "other", "value": f"sha256:{record.root_hash}", "description": "root hash of the snapshot"}
        ],
    }
    return f"# {_MARK}\n" + "".join(
        f"{name}: {json.dumps(value, ensure_ascii=False)}\n" for name, value in facts.items()
    )


def clone(
    view: Catalog,
    target: Location,
    *,
    datasets: Sequence[str] | None = None,
    progress: Progress,
) -> MaintenanceReport:
    """Copy the files of a published atlas into an atlas that can be written; each is compared with its hash.

    `view` is the published atlas, at a snapshot. The target is an empty place, or one where an earlier call ended.
    `datasets` are the uids of those whose arrays are copied; None copies all.

    Notes
    -----
    Arrays come first, then the files of tables, and the list of snapshots last: until it is written there is no atlas.
    """
    files = published_files(view)
    _refuse_other(view, files.head.snapshots, target)
    folders: set[str] | None = None
    if datasets is not None:
        there = Inventory(view)
        folders = {*there.deleted.keys() & set(datasets)}.union(
            *(dataset_folders(there.datasets[uid]) for uid in datasets)
        )
        folders |= {
            one.uid for kind, found in there.assets.items() for one in found if kind.is_visible(one, set(datasets))
        }
    steps = _clone_steps(files, folders)
    missing = [[path for path in step if _size(target, path) != files.places[path].n_bytes] for step in steps]
    total, done = sum(map(len, missing)), 0

    def copy(path: str) -> FileEntry:
        with contextlib.closing(prefetch(files.read_file(path))) as ahead:
            return write_blocks(ahead, target, path, target.child(PARTIAL))

    for step in missing:
        for at in range(0, len(step), _AT_ONCE):
            progress("files", done, total)
            done += len(map_groups(copy, step[at : at + _AT_ONCE]))
    progress("files", total, total)
    seal_versions(catalog_at(target))
    remove_partial(target.child(PARTIAL))
    n_bytes = sum(files.places[path].n_bytes for step in missing for path in step)
    return MaintenanceReport(
        n_bytes=n_bytes, notes=(f"{total:,} file(s) copied from {view.location.uri} to {target.uri}",)
    )


_AT_ONCE = 64


def _refuse_other(view: Catalog, records: Sequence[AtlasVersionRecord], target: Location) -> None:
    """Raise if the target is an atlas, unless all of it is of these snapshots."""
    if not target.holds_files() or not is_atlas(target):
        return
    there = catalog_at(target)
    known = {record.root_hash for record in list_versions(there)}
    # An earlier call that died may have left a part without snapshots, as another atlas may have none yet.
    same = known <= {record.root_hash for record in records} and _uid(there) == _uid(view)
    if not same or Inventory(there).datasets.keys() - {uid for r in records for uid in Inventory(view.at(r)).datasets}:
        raise StoreError(f"{target.uri} is another atlas, or was written to since it was cloned; name an empty place.")


def _uid(catalog: Catalog) -> str | None:
    return catalog.tables.metadata(DATASETS).get(UID_KEY)


def _clone_steps(files: PublishedFiles, folders: set[str] | None) -> list[list[str]]:
    """Return the files to copy, in the order in which they may become visible."""
    arrays = [p for p in files.paths if p.startswith(ARRAYS) and (folders is None or p.split("/", 2)[1] in folders)]
    tables = [p for p in files.paths if p.startswith(TABLES)]
    listed = f"{TABLES}{VERSIONS}.lance/"
    own, rest = ([p for p in tables if p.startswith(listed) is of_list] for of_list in (True, False))

    def split(paths: Sequence[str], is_last: Callable[[str], bool]) -> list[list[str]]:
        return [[p for p in paths if not is_last(p)], [p for p in paths if is_last(p)]]

    return [arrays, *split(rest, lambda p: "/_versions/" in p), *split(own, lambda p: "/_versions/" in p)]


def _size(target: Location, path: str) -> int:
    if target.is_local:
        file = target.path / path
        return file.stat().st_size if file.is_file() else -1
    import obstore

    try:
        return int(obstore.head(target.store(), path)["size"])
    except FileNotFoundError:
        return -1
