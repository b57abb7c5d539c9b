"""Guide libraries: the table of sequences that a screen was made with (``.library``), stored with its dataset."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from raggedatlas.catalog.assets import AssetKind, find_dataset
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import DuplicateError, SourceError
from raggedatlas.ingest.attachment import Attachment
from raggedatlas.model.arguments import Progress
from raggedatlas.model.assets import AssetRecord
from raggedatlas.model.ids import new_uid
from raggedatlas.model.options import AddOptions, read_options
from raggedatlas.model.records import entries_schema
from raggedatlas.model.reports import AddReport, Done, Status
from raggedatlas.store.location import digest_files


class LibraryRecord(AssetRecord):
    """A guide library of one dataset."""

    table: ClassVar[str] = "_libraries"

    n_guides: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class LibraryOptions(AddOptions):
    """`dataset` is the name or uid of the screen."""

    dataset: str = ""


class LibraryKind(AssetKind[LibraryRecord]):
    """Guide libraries."""

    noun = "library"
    record = LibraryRecord
    schema = entries_schema(LibraryRecord, {"n_guides": pa.int64()}, ("uid", "name"))
    columns = ("name", "datasets", "n_cells", "n_guides", "created_at")
    hint = "atlas.add('guides.library', dataset=...)"
    attachment = "raggedatlas_myformat.libraries:library_attachment"

    def accepts(self, source: Any) -> bool:
        return isinstance(source, str | os.PathLike) and os.fspath(source).endswith(".library")

    def describe(self, row: Mapping[Any, Any]) -> str:
        return f"{row['n_guides']:,} guides of {row['datasets']}"

    def digest(self, record: LibraryRecord) -> str:
        return record.digest


class LibraryAttachment(Attachment[AddReport]):
    """Adds one library: nothing is visible before its record."""

    def __init__(self, catalog: Catalog, path: Path, options: LibraryOptions) -> None:
        super().__init__(catalog, options)
        self.path, self.dataset = path, options.dataset

    def plan(self) -> bool:
        self.content = self.path.read_bytes()
        lines = self.content.decode().splitlines()
        if not lines or any(len(line.split("\t")) != 2 for line in lines):
            raise SourceError(f"{self.path} is no .library file: lines must be guide<TAB>sequence.")
        dataset = find_dataset(self.catalog, self.dataset)[0]
        self.uid, name = new_uid(), self.options.name or self.path.stem
        self.record = LibraryRecord(
            uid=self.uid, name=name, zarr_group=f"{self.uid}/library", source=str(self.path),
            content_hash=hashlib.sha256(self.content).hexdigest(), n_guides=len(lines),
            datasets=json.dumps({dataset.uid: dataset.n_cells_added}),
        )  # fmt: skip
        there = [record for record in LIBRARIES.read(self.catalog) if record.name == name]
        if there and self.options.on_duplicate == "error":
            raise DuplicateError(f"The atlas has a library {name!r}; choose another name, or on_duplicate='replace'.")
        return not there or self.options.on_duplicate == "replace"

    def stage(self, progress: Progress) -> None:
        folder = self.catalog.arrays.child(self.uid, "library")
        folder.write_bytes("guides.library", self.content)
        self.record = self.record.model_copy(update={"digest": digest_files(folder)[2]})

    def commit(self, progress: Progress) -> Done:
        replaced = False

        def change(old: list[LibraryRecord]) -> list[LibraryRecord]:
            nonlocal replaced
            kept = [record for record in old if record.name != self.record.name]
            replaced = len(kept) < len(old)
            if replaced and self.options.on_duplicate == "error":
                raise DuplicateError(f"Another process has added a library {self.record.name!r} meanwhile.")
            return [*kept, self.record]

        LIBRARIES.change(self.catalog, change)
        return "replaced" if replaced else "added"

    def discard(self) -> None:
        if self.uid not in {record.uid for record in LIBRARIES.read(self.catalog)}:
            self.catalog.arrays.child(self.uid).delete_prefix()

    def finish(self) -> None:
        pass  # `gc` frees the files of a replaced library once no snapshot needs them

    def report(self, status: Status) -> AddReport:
        return AddReport(
            name=self.record.name, status=status, n_cells=sum(self.record.cells_of.values()),
            content_hash=self.record.content_hash, source=str(self.path),
        )  # fmt: skip


def library_attachment(catalog: Catalog, source: Any, choices: Mapping[str, Any]) -> LibraryAttachment:
    return LibraryAttachment(catalog, Path(source), read_options(LibraryOptions, choices, "add() of a guide library"))


LIBRARIES = LibraryKind()
