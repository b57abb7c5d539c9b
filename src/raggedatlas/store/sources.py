"""Which files outside of an atlas its readers may open, and under which address and options."""

import json
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from raggedatlas.errors import NotFoundError, SourceError, StoreError
from raggedatlas.model.records import Link, read_json
from raggedatlas.store.linked import LinkedSource
from raggedatlas.store.location import AnyPath, Location, as_location

Sources: TypeAlias = Literal["allow", "deny", "ask"] | Callable[[str], "bool | Mapping[str, str]"]
"""What `open` takes as `sources`: may the files that datasets are linked to be read?"""

RULES = ("allow", "deny", "ask")

COPIES = "linked.json"
"""File in the Zarr store of a mirror that lists the linked files of which it has complete copies."""

_ASKING = threading.RLock()
"""Held while it is decided whether a source may be read; by all atlases, as they share a terminal."""

_PLAIN_PARAMETERS = frozenset({"download", "dl", "raw", "versionid"})
"""Parameters of a web address that are no secret; any other may be a signature, which must not be stored."""


@dataclass(frozen=True)
class SourceAccess:
    """Finds the files that the datasets of an atlas are linked to, if they may be read.

    The rule ``"allow"`` reads the files that records name, ``"deny"`` none, and ``"ask"`` asks on the terminal once for
    each file; a callable takes an address and returns whether it may be read, or the storage options to read it with.
    """

    atlas: Location  # addresses of local files near the atlas are relative to it
    rule: Sources = "allow"
    _known: dict[str, Location | None] = field(default_factory=dict, repr=False, compare=False)
    _copies: frozenset[str] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse an unknown rule."""
        if self.rule not in RULES and not callable(self.rule):
            raise SourceError(
                f"sources={self.rule!r}: expected 'allow', 'deny', 'ask' or a callable that takes an address."
            )

    def __getstate__(self) -> dict[str, object]:
        """Give other processes the answers that are known; whoever would be asked for more may be in this one only."""
        rule = self.rule
        try:
            pickle.dumps(rule)
        except (pickle.PicklingError, TypeError, AttributeError):
            rule = _refuse
        rule = _refuse if rule == "ask" else rule
        return {**vars(self), "rule": rule}

    def remember(self, source: str, place: Location) -> None:
        """Note how this process reaches a source that it has just linked, with options that are not stored."""
        self._known[source] = place

    def open_link(self, link: Link, uid: str, dataset: str) -> LinkedSource:
        """Return what an array is linked to: the copy of the file in a mirror, else the file at the recorded address.

        `uid` and `dataset` are uid and name of the dataset.
        """
        copy = copy_path(uid, link.sha256)
        if copy in self.copies():
            return LinkedSource(self.atlas.child("zarr_store", *copy.split("/")), dataset, is_copy=True)
        return self.open(link.source, dataset)

    def open(self, source: str, dataset: str) -> LinkedSource:
        """Return a source, found by its recorded address, if it may be read."""
        if source not in self._known:
            # Threads read several sources at once, and a person answers once.
            with _ASKING:
                if source not in self._known:
                    self._known[source] = self._decide(source)
        place = self._known[source]
        if place is None:
            shown = repr(self.rule) if isinstance(self.rule, str) else "<callable>"
            raise StoreError(
                f"The dataset {dataset!r} is linked to {source}, which may not be read: the atlas was opened with sources={shown}. "
                "Open it with sources='allow', or drop the dataset."
            )
        return LinkedSource(place, dataset)

    def copies(self) -> frozenset[str]:
        """Return the paths of the copies that `sync` made of linked files, below the Zarr store; read once."""
        if self._copies is None:
            object.__setattr__(self, "_copies", read_copies(self.atlas))
        return self._copies or frozenset()

    def _decide(self, source: str) -> Location | None:
        if "://" in source:
            # Credentials are not stored; those of the atlas are tried where both are in stores of one kind.
            same = self.atlas.uri.startswith(f"{source.partition('://')[0]}://")
            place = Location(source, self.atlas.storage_options if same else {})
        elif not self.atlas.is_local:
            # `recorded_address` names no local file in an atlas that others read from elsewhere.
            raise StoreError(
                f"{self.atlas} is linked to the local file {source!r}, which is not read; drop the dataset."
            )
        else:
            place = Location(source if Path(source).is_absolute() else str(self.atlas.path / source))
        if self.rule == "allow":
            return place
        if self.rule == "deny":
            return None
        if self.rule == "ask":
            try:
                answer = input(f"The atlas {self.atlas} is linked to {place}. Read it? [y/N] ")
            except EOFError:
                # Nobody is there to answer.
                return None
            return place if answer.strip().lower() in ("y", "yes") else None
        answered = self.rule(str(place))
        if isinstance(answered, Mapping):
            return Location(place.uri, answered)
        return place if answered is True else None


def copy_path(uid: str, sha256: str) -> str:
    """Return the path below the Zarr store of the copy of a linked source: a file, or a folder if the original is one."""
    return f"{uid}/source.{sha256[:16]}"


def copy_manifest(path: str) -> str:
    """Return the path of the manifest of a copy: the length and hash of each of its files, by path below the Zarr store."""
    return f"{path}.json"


def read_copies(atlas: Location) -> frozenset[str]:
    """Return which copies of linked files an atlas has, as paths below its Zarr store."""
    try:
        text = atlas.child("zarr_store").read_bytes(COPIES).decode(errors="replace")
    except NotFoundError:
        return frozenset()
    return frozenset(read_json(list[str], text, f"{atlas}/zarr_store/{COPIES}", "copies", "paths"))


def write_copies(atlas: Location, paths: Iterable[str]) -> None:
    """Write the list that `read_copies` reads."""
    atlas.child("zarr_store").write_bytes(COPIES, json.dumps(sorted(paths), indent=0).encode())


def _refuse(address: str) -> bool:
    """Answer for one that cannot be asked."""
    return False


def recorded_address(place: AnyPath, atlas: Location) -> str:
    """Return the address of a file as an atlas records it.

    A local file below the folder of the atlas or next to it is named relative to the atlas, so that both can be moved
    together. Refused are web addresses that may hold a secret, and local files if the atlas is not local.
    """
    location = as_location(place)
    if location.is_web:
        names = {name.lower() for name, _ in parse_qsl(urlsplit(location.uri).query, keep_blank_values=True)}
        if names - _PLAIN_PARAMETERS:
            raise SourceError(
                f"{location} is given with parameters that may be a secret or expire, which an atlas does not store. Give an address without, or "
                "its object store (s3://, gs://, az://), or add the file with copy=True."
            )
        return location.uri
    if not location.is_local:
        return location.uri
    if not atlas.is_local:
        raise SourceError(
            f"{location.path} is on this machine, the atlas in {atlas}; others who open the atlas could not read the file. Put the file into "
            "an object store or on a web server first, or add it with copy=True."
        )
    path, folder = location.path, atlas.path
    return os.path.relpath(path, folder).replace(os.sep, "/") if path.is_relative_to(folder.parent) else str(path)
