"""What a view of an atlas reaches in the Zarr store; copying, comparing, checking and deleting all go by it.

A view is the tables of an atlas at fixed versions: a snapshot, the newest state, or versions that a tag holds. It reaches the folder that is
named by the uid of each dataset and asset that its tables list. Of a dataset, the arrays, the kept frames and the file that
holds the small ones of both (its bundle) lie in that folder, or in the folder of a bundle that datasets share, whichever its records say; the
lists of its deleted rows always lie in its own. Of arrays that are linked to a file outside, the references to it lie there in their place. What is attached to cells, such as a result or a geometry store, is stored in a folder of its own,
unless it is only a column of the cells. A view reaches nothing else there: a folder that no kept view reaches, and that no living process
has a lease on, is free. Which files of tables a snapshot reaches is in its manifest.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raggedatlas.catalog.assets import AssetKind, group_by_dataset, read_assets, read_links, read_records
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.cells import frame_file
from raggedatlas.errors import CorruptError
from raggedatlas.model.arrays import shards_path
from raggedatlas.model.assets import DeletedCells
from raggedatlas.model.records import BundleFacts, DatasetRecord
from raggedatlas.store.bundle import SHARED, bundle_file
from raggedatlas.store.references import references_file

_IN_TEXT = re.compile(rf'"file": "({SHARED.pattern})/')


@dataclass(frozen=True)
class Inventory:
    """What a view reaches; each part is read when it is first asked for."""

    view: Catalog

    @cached_property
    def datasets(self) -> Mapping[str, Sequence[DatasetRecord]]:
        """Dataset uid -> its records."""
        return group_by_dataset(read_records(self.view))

    @cached_property
    def assets(self) -> Mapping[AssetKind[Any], Sequence[Any]]:
        """Kind of what is attached to cells -> its records, those included that `AssetKind.visible` leaves out because all of their datasets are gone."""
        return read_assets(self.view)

    @cached_property
    def visible_assets(self) -> Sequence[tuple[AssetKind[Any], Any]]:
        """Kind and record of what readers see."""
        known = self.datasets.keys()
        return [(kind, one) for kind, found in self.assets.items() for one in found if kind.is_visible(one, known)]

    @cached_property
    def asset_groups(self) -> Sequence[DatasetRecord]:
        """Groups of arrays of what is attached to cells."""
        found = (kind.group(record) for kind, records in self.assets.items() for record in records)
        return [group for group in found if group is not None]

    @cached_property
    def groups(self) -> Sequence[DatasetRecord]:
        """Groups of arrays: those of datasets, and of what is attached to cells."""
        return [*(record for records in self.datasets.values() for record in records), *self.asset_groups]

    @cached_property
    def deleted(self) -> Mapping[str, Mapping[str, DeletedCells]]:
        """Dataset uid -> path of a list of deleted rows -> what is recorded of it."""
        found: dict[str, dict[str, DeletedCells]] = {}
        for deletion in self.view.deletions():
            for uid in deletion.datasets.keys() & self.datasets.keys():
                found.setdefault(uid, {})[frame_file(uid, deletion.frame)] = deletion.datasets[uid]
        return found

    @cached_property
    def bundles(self) -> Mapping[str, BundleFacts]:
        """Path of a bundle -> what is recorded of it; a record whose facts are damaged names none."""
        found = {}
        for uid, own in self.datasets.items():
            try:
                facts = own[0].file_facts.bundle
            except CorruptError:
                continue
            if facts is not None:
                found[bundle_file(uid, facts)] = facts
        return found

    @property
    def uids(self) -> set[str]:
        """Uids of datasets and of what is attached to cells; each has a folder of this name, even where a bundle has all of its files."""
        return {*self.datasets, *(one.uid for records in self.assets.values() for one in records)}

    @property
    def folders(self) -> set[str]:
        """Folders with files."""
        found = {*self.deleted, *(one.uid for records in self.assets.values() for one in records)}
        return found.union(*(dataset_folders(own) for own in self.datasets.values()))

    @property
    def files(self) -> dict[str, str]:
        """Path of a frame, of a bundle, of references, or of a list of deleted rows -> its hash; a frame in a bundle goes by the path that it would have, as references do."""
        found = {file: facts.sha256 for file, facts in self.bundles.items()}
        for uid, own in self.datasets.items():
            found |= {frame_file(uid, name): sha for name, sha in own[0].file_facts.frames.items()}
            links = [link for record in own for link in read_links(record).values()]
            found |= {references_file(uid, link.sha256): link.sha256 for link in links}
        return found | {file: cells.rows for files in self.deleted.values() for file, cells in files.items()}

    @property
    def contents(self) -> dict[str, str]:
        """Path of a file, or of the shards of an array that is in no bundle -> its hash."""
        found = self.files
        for group in self.groups:
            checksums = group.array_checksums
            folders = [shards_path(path) for path, spec in group.array_specs.items() if not spec.get("within")]
            found |= {f"{group.zarr_group}/{path}": checksums[path] for path in folders if path in checksums}
        return found

    @property
    def identities(self) -> dict[str, str]:
        """Path of a file, an array or a folder of files -> what tells it from another: its hash, and the description of an array."""
        found = self.files
        found |= {one.zarr_group: sha for kind, one in self.visible_assets if (sha := kind.digest(one))}
        for group in self.groups:
            checksums = group.array_checksums
            for path, spec in group.array_specs.items():
                # Of an array whose shards have no hash, that of its values was recorded.
                sha = checksums.get(shards_path(path)) or checksums.get(path, "")
                # Which file an array is part of is not what it contains, and changes with the bundles.
                link = spec.get("linked") and {**spec["linked"], "references": None}
                described = json.dumps({**spec, "within": None, "linked": link}, sort_keys=True)
                found[f"{group.zarr_group}/{path}"] = f"{sha} {described}"
        return found


def dataset_folders(own: Sequence[DatasetRecord]) -> set[str]:
    """Return the folders with files of a dataset, apart from its deleted rows; damaged records name all that their text may name."""
    uid, found = own[0].uid, set[str]()
    try:
        facts = own[0].file_facts
        spans = {} if facts.bundle is None else facts.bundle.frames
        found |= {frame_file(uid, name) if name not in spans else spans[name].file for name in facts.frames}
        found.add(f"{uid}/" if facts.bundle is None else bundle_file(uid, facts.bundle))
        for record in own:
            found |= group_files(record)
    except (CorruptError, TypeError, KeyError):
        found |= {
            f"{uid}/",
            *(f"{folder}/" for record in own for folder in shared_folders([record.facts, record.arrays])),
        }
    return {file.partition("/")[0] for file in found}


def group_files(record: DatasetRecord) -> set[str]:
    """Return where the arrays of a group are: their folders, the bundles that they are part of, or the files with the references to them."""
    specs = record.array_specs.items()
    spans = [(path, spec["linked"]["references"] if spec.get("linked") else spec.get("within")) for path, spec in specs]
    return {f"{record.zarr_group}/{path}" if span is None else span["file"] for path, span in spans}


def shared_folders(texts: Iterable[str]) -> set[str]:
    """Return the folders of the shared bundles that some facts or descriptions of arrays, as they are stored, name."""
    return {folder for text in texts if '"shared-' in text for folder in _IN_TEXT.findall(text)}
