"""Zarr v3 groups and their attributes."""

import json
from collections.abc import Mapping
from typing import Any

from raggedatlas.errors import CorruptError
from raggedatlas.store.location import Location


def create_group(location: Location, path: str, attributes: Mapping[str, Any] | None = None) -> None:
    """Write the metadata of a Zarr v3 group and of the groups above it, where they are missing.

    Parameters
    ----------
    location : Location
        The Zarr store.
    path : str
        Slash-separated path of the group; the empty string is the root.
    attributes : mapping, optional
        Attributes of the group itself; they replace those of a group that is there already.

    Raises
    ------
    NameRefusedError
        If a part of the path is not a plain name.
    """
    parts = path.split("/") if path else []
    location.child(*parts)
    for n in range(len(parts) + (attributes is None)):
        location.ensure_bytes("/".join([*parts[:n], "zarr.json"]), _group_metadata({}))
    if attributes is not None:
        write_group_attributes(location, path, attributes)


def write_group_attributes(location: Location, path: str, attributes: Mapping[str, Any]) -> None:
    """Write the metadata of one group with these attributes, replacing what was there."""
    location.write_bytes(f"{path}/zarr.json" if path else "zarr.json", _group_metadata(attributes))


def read_group_attributes(location: Location, path: str) -> dict[str, Any]:
    """Read the attributes of one group.

    Raises
    ------
    NotFoundError
        If there is no such group.
    CorruptError
        If its metadata is not that of a Zarr v3 group.
    """
    text = location.read_bytes(f"{path}/zarr.json" if path else "zarr.json")
    try:
        metadata = json.loads(text)
        if metadata["node_type"] != "group":
            raise CorruptError(f"{location.uri}/{path} is not a group but a {metadata['node_type']}.")
        unknown = sorted(set(metadata) - {"zarr_format", "node_type", "attributes", "consolidated_metadata"})
        if metadata["zarr_format"] != 3 or unknown:
            raise CorruptError(
                f"{location.uri}/{path}/zarr.json is not Zarr v3 group metadata: format {metadata['zarr_format']}, keys {unknown}."
            )
        return dict(metadata.get("attributes") or {})
    except CorruptError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{location.uri}/{path}/zarr.json is not Zarr v3 group metadata: {error!r}.") from error


def _group_metadata(attributes: Mapping[str, Any]) -> bytes:
    """Return the ``zarr.json`` of a group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}, indent=2).encode()
