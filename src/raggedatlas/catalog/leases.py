"""Leases: markers that protect the arrays of a running `add` from being collected."""

import os
import socket
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import CorruptError, NotFoundError
from raggedatlas.model.pointers import PointerKind
from raggedatlas.model.records import utc_now
from raggedatlas.store.arrays import create_group, read_group_attributes, write_group_attributes
from raggedatlas.store.location import Location

GRACE = timedelta(hours=1)
"""How long the arrays of a writer on another machine may be unchanged before the writer counts as dead."""

_YOUNG = timedelta(minutes=1)
_ATTRIBUTE, _LEASE = "raggedatlas", "ingest"


def take_lease(catalog: Catalog, dataset_uid: str, owner: Mapping[str, Any] | None = None) -> None:
    """Create the group of a dataset, with a lease that names the process that will commit it.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    dataset_uid : str
        The new dataset.
    owner : mapping or None
        What `this_process` gave in that process; None is this one.

    Raises
    ------
    ConflictError
        If a purge is unfinished.
    """
    create_group(catalog.arrays, dataset_uid, {_ATTRIBUTE: {_LEASE: dict(owner or this_process())}})
    # A purge leaves its mark before it looks for leases, and an add its lease before it looks for the mark: one of them sees the other.
    catalog.refuse_unfinished_purge("add()")


def release_lease(catalog: Catalog, dataset_uid: str) -> None:
    """Remove the lease of a dataset that is committed or dropped; a deleted group is not created again."""
    if read_lease(catalog, dataset_uid):
        write_group_attributes(catalog.arrays, dataset_uid, {_ATTRIBUTE: {}})


def is_atlas_group(attributes: Mapping[str, Any], space: str) -> bool:
    """Return whether the attributes of a group are empty, a lease, or a description that this package writes."""
    ours = attributes.get(_ATTRIBUTE, {})
    if not set(attributes) <= {_ATTRIBUTE} or not isinstance(ours, dict):
        return False
    holds = {"feature_space": space, "kind": ours.get("kind")}
    return set(ours) <= {_LEASE} or (ours == holds and ours["kind"] in {kind.value for kind in PointerKind})


def read_lease(catalog: Catalog, dataset_uid: str) -> dict[str, Any] | None:
    """Return the lease of a dataset's group: empty after its add has finished, None if there never was one."""
    try:
        attributes = read_group_attributes(catalog.arrays, dataset_uid)
    except (NotFoundError, CorruptError):
        return None
    ours = attributes.get(_ATTRIBUTE)
    if not isinstance(ours, dict):
        return None
    lease = ours.get(_LEASE)
    return lease if isinstance(lease, dict) else {}


def lease_alive(catalog: Catalog, dataset_uid: str, grace: timedelta = GRACE) -> bool:
    """Return whether an `add` may still be writing a dataset's group.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    dataset_uid : str
        The dataset.
    grace : timedelta
        For a writer on another machine: how long its newest object may be unchanged.

    Returns
    -------
    bool
        On this machine and since this boot, whether that very process runs. For other machines, whether something was
        written within `grace`. Without a note, whether something was written within the last minute.
    """
    lease = read_lease(catalog, dataset_uid)
    if lease == {}:
        return False
    return process_alive(lease, catalog.arrays.child(dataset_uid), grace)


def process_alive(note: Mapping[str, Any] | None, place: Location, grace: timedelta = GRACE) -> bool:
    """Return whether a process may still be writing.

    Parameters
    ----------
    note : mapping or None
        What `this_process` gave in that process; None where it left nothing.
    place : Location
        Where it writes.
    grace : timedelta
        For a process on another machine: how long the newest object of the location may be unchanged.
    """
    here = this_process()
    if note is not None and all(note.get(key) == here[key] for key in ("host", "boot_id", "namespace")):
        return _runs(note.get("pid"), note.get("process_start"))
    newest = place.last_modified()
    if newest is None:
        return False
    age = datetime.now(UTC) - newest
    return age < (_YOUNG if note is None else grace)


def this_process() -> dict[str, Any]:
    """Return a description of this process, from which `process_alive` later determines whether it still runs."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": _process_start(os.getpid()),
        "boot_id": _text(Path("/proc/sys/kernel/random/boot_id")),
        "namespace": _namespace(),
        "started_at": utc_now(),
    }


def _runs(pid: object, process_start: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    if Path("/proc/self/stat").exists():
        return bool(process_start) and _process_start(pid) == process_start
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _process_start(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if unknown or a zombie."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in {"Z", "X"} else ""


def _namespace() -> str:
    """Return the process namespace: two containers on one machine may share host name, boot id and process ids."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
