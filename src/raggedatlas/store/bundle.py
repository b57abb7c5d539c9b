"""The small files of a dataset, or of many, in one: a ZIP archive whose members are not compressed, so that each is read by its range."""

import hashlib
import io
import re
import struct
import threading
import zipfile
from collections.abc import Mapping

from raggedatlas.errors import CorruptError
from raggedatlas.model.records import BundleFacts, Span
from raggedatlas.store.codecs import Buffers
from raggedatlas.store.location import Location, joined

FILE = "bundle.zip"
"""Name of the file in the folder of a dataset, or in that of a bundle which datasets share."""

SHARED = re.compile(r"shared-[0-9a-f]{16}")
"""Folder of a bundle that datasets share; unlike that of a dataset no uid."""

MEMBER_BYTES = 4 * 2**20
"""Size beyond which a file is not put into a bundle: a request less matters little then, and memory does."""

BUNDLE_BYTES = 64 * 2**20
"""Size beyond which nothing is put into a bundle, which is in memory until it is written."""

_END_BYTES = 22
"""Bytes at the end of a ZIP file, which has no comment, that say where its directory is."""

_ALIGNMENT = 64
_PADDING = 0xD935
"""Id of the extra field by which Android's zipalign pads; its data are the alignment and zeros."""

_HEADER_BYTES = 30
_DATE = (1980, 1, 1, 0, 0, 0)


class Bundle:
    """Collects small files in memory, and writes them as one; any thread may add files until then.

    `folder` is a path below the Zarr store.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.sha256, self.n_bytes = "", 0
        self.spans: dict[str, Span] = {}
        self._members: list[tuple[zipfile.ZipInfo, bytes]] = []
        self._end = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Bundle"], tuple[str], dict[str, object]]:
        """Pickle a bundle that was written; its bytes are not needed any more."""
        return Bundle, (self.folder,), {"sha256": self.sha256, "n_bytes": self.n_bytes, "spans": self.spans}

    def add(self, files: Mapping[str, Buffers]) -> dict[str, Span] | None:
        """Add files together, or none of them if they are too large.

        Keys of `files` are paths below the Zarr store, within the folder. Returns where each will be; None where
        nothing was added, as once the bundle was written.
        """
        contents = {path: joined(data) for path, data in files.items()}
        size = sum(len(data) for data in contents.values())
        with self._lock:
            if self.sha256 or size > MEMBER_BYTES or self._end + size > BUNDLE_BYTES:
                return None
            added = {}
            for path, data in contents.items():
                info = zipfile.ZipInfo(path.removeprefix(f"{self.folder}/"), _DATE)
                # By default it tells the platform; equal content gives equal bytes on all.
                info.create_system = 3
                # Arrow and NumPy map values where they are in the file, and expect them at multiples of their size.
                padding = -(self._end + _HEADER_BYTES + len(info.filename) + 6) % _ALIGNMENT
                info.extra = struct.pack("<HHH", _PADDING, 2 + padding, _ALIGNMENT) + bytes(padding)
                self._members.append((info, data))
                offset = self._end + _HEADER_BYTES + len(info.filename) + len(info.extra)
                self._end = offset + len(data)
                added[path] = Span(f"{self.folder}/{FILE}", offset, len(data))
            self.spans |= added
        return added

    def write(self, location: Location) -> None:
        """Write the file to the Zarr store, unless it was written or there is nothing to write, and record its length and SHA-256."""
        with self._lock:
            if self.sha256 or not self.spans:
                return
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w") as archive:
                for info, content in self._members:
                    archive.writestr(info, content)
            data = buffer.getvalue()
            location.write_bytes(f"{self.folder}/{FILE}", data)
            self.sha256, self.n_bytes = hashlib.sha256(data).hexdigest(), len(data)
            self._members.clear()


def bundle_file(uid: str, facts: BundleFacts) -> str:
    """Return the path of a dataset's bundle below the Zarr store."""
    return facts.file or f"{uid}/{FILE}"


def member_names(location: Location, file: str) -> list[str] | None:
    """Return the names of the members of a bundle, a file below the Zarr store; None if its directory is damaged."""
    folder, _, name = file.rpartition("/")
    n_bytes = {key: size for key, size, _ in location.child(folder).list_objects()}.get(name, 0)
    try:
        end = location.read_range(file, max(0, n_bytes - _END_BYTES), min(n_bytes, _END_BYTES) or 1)
        size, offset = struct.unpack("<II", end[12:20])
        directory = location.read_range(file, offset, size) + end
        # With neither members nor a place in the file, the directory is a valid archive by itself as far as names go.
        with zipfile.ZipFile(io.BytesIO(directory)) as archive:
            return archive.namelist()
    except (CorruptError, struct.error, zipfile.BadZipFile, ValueError, OverflowError):
        return None
