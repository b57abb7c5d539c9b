"""What was verified before: sizes and times of stored files, and a file in the cache folder that says what was found sound when."""

import contextlib
import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from raggedatlas.store.cache_folder import CacheFolder
from raggedatlas.store.location import Location
from raggedatlas.store.storage_errors import store_errors

FORMAT = 1
"""Part of every token: increased where a check becomes stricter, so that everything is checked again."""


class Stamps:
    """Size and time of every file below a location, from one listing."""

    def __init__(self, location: Location) -> None:
        found = sorted(_local(location) if location.is_local else _remote(location))
        self._keys = [key for key, *_ in found]
        self._sizes = [size for _, size, _ in found]
        self._stamps = [stamp for *_, stamp in found]

    def below(self, *paths: str) -> tuple[int, int, str]:
        """Return number and bytes of the files at or below some paths, and a hash of their names, sizes and times."""
        content, n_files, n_bytes = hashlib.sha256(), 0, 0
        for path in sorted(set(paths)):
            # "0" follows "/" in the order of characters, so between the two is what begins with "<path>/".
            own, first, last = (bisect_left(self._keys, path + end) for end in ("", "/", "0"))
            at = [own] if own < len(self._keys) and self._keys[own] == path else range(first, last)
            for i in at:
                content.update(f"{self._keys[i]}\0{self._stamps[i]}\0".encode())
                n_files, n_bytes = n_files + 1, n_bytes + self._sizes[i]
        return n_files, n_bytes, content.hexdigest()


def _local(location: Location) -> list[tuple[str, int, str]]:
    root, found = location.checked_path(), []
    with store_errors(f"list {location.uri}"):
        for folder, _, names in os.walk(root):
            for name in names:
                file = Path(folder, name)
                # Other writers rename temporary files during the walk.
                with contextlib.suppress(FileNotFoundError):
                    info = file.lstat()
                    # A copy keeps size and modification time, but neither the inode nor the time of its last change.
                    stamp = f"{info.st_size} {info.st_mtime_ns} {info.st_ctime_ns} {info.st_ino}"
                    found.append((file.relative_to(root).as_posix(), info.st_size, stamp))
    return found


def _remote(location: Location) -> list[tuple[str, int, str]]:
    import obstore

    with store_errors(f"list {location.uri}"):
        return [
            (item["path"], item["size"], f"{item['size']} {item['last_modified'].isoformat()} {item['e_tag']}")
            for page in obstore.list(location.store())
            for item in page
        ]


class _Checks(CacheFolder):
    kind: ClassVar[str] = "check"


class Ledger:
    """What of one place was found sound, and when.

    It is a cache: one that is lost, damaged or cannot be written means that more is read. It is not kept at the place,
    so that a copy of an atlas does not count as verified because the original was, and a place that cannot be written
    will do. `found` maps tokens to when each was found sound.
    """

    def __init__(self, location: Location) -> None:
        self._folder = _Checks.of_options(location.storage_options)
        self._place = location.uri if not location.is_local else str(location.path.absolute())
        # Buckets of two servers may have one name, as may containers of two accounts.
        told = ("aws_endpoint", "azure_storage_account_name")
        servers = [location.storage_options[key] for key in told if key in location.storage_options]
        self._key = hashlib.sha256("\0".join([self._place, *servers]).encode()).hexdigest()[:32]
        self.found = dict[str, str]()
        # Whatever is wrong with the file, it then says nothing.
        with (
            contextlib.suppress(OSError, ValueError, TypeError, AttributeError),
            self._folder.open(self._key) as handle,
        ):
            if handle is not None:
                with open(handle, "rb", closefd=False) as file:
                    kept = json.loads(file.read())["sound"]
                self.found = {str(token): str(when) for token, when in kept.items()}

    @staticmethod
    def token(name: str, digest: str, stamp: str) -> str:
        """Return what identifies stored bytes in the state that a check found: what is recorded of them, and their files' sizes and times."""
        return hashlib.sha256("\0".join([str(FORMAT), name, digest, stamp]).encode()).hexdigest()[:32]

    def when(self, token: str) -> str:
        """Return when something was found sound; empty if it was not, or has changed since."""
        return self.found.get(token, "")

    def save(self, sound: Mapping[str, str]) -> None:
        """Keep what is known now: token -> when it was found sound."""
        data = json.dumps({"place": self._place, "sound": sound}, sort_keys=True).encode()
        with contextlib.suppress(OSError):
            if self._folder.folder is not None:
                with self._folder.create(self._key) as (handle, _), open(handle, "wb", closefd=False) as file:
                    file.write(data)
                self._folder.make_room()
