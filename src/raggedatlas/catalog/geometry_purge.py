"""Geometry stores that have shapes of a dataset, out of the registry and of every snapshot's."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from raggedatlas.catalog.catalog import GEOMETRY, Catalog
from raggedatlas.catalog.versions import list_versions
from raggedatlas.errors import ConflictError
from raggedatlas.model.assets import geometries_from_table, geometries_to_table
from raggedatlas.store.tables import Tables


def find_stores_with_dataset(catalog: Catalog, uid: str, tips: Mapping[str, int]) -> set[str]:
    """Find the stores that have, or ever had, shapes of a dataset, at the tip or in a snapshot; they go whole.

    Parameters
    ----------
    catalog : Catalog
        At the tip.
    uid : str
        The dataset.
    tips : mapping of str to int
        The versions of the tables that are the true tip.
    """
    versions = {r.table_versions[GEOMETRY] for r in list_versions(catalog) if GEOMETRY in r.table_versions}
    versions |= {tips[GEOMETRY]} if GEOMETRY in tips else set()
    found = set()
    for version in versions:
        rows = geometries_from_table(Tables(catalog.tables.location, {GEOMETRY: version}).read(GEOMETRY))
        found |= {row.uid for row in rows if uid in row.cells_of}
    return found


def rewrite_geometries(catalog: Catalog, stores: AbstractSet[str], version: int) -> int:
    """Make a registry like that of a version, without some stores, the newest; return its version."""
    rows = geometries_from_table(Tables(catalog.tables.location, {GEOMETRY: version}).read(GEOMETRY))
    at = catalog.tables.version(GEOMETRY)
    kept = geometries_to_table([row for row in rows if row.uid not in stores])
    if not catalog.tables.overwrite_if(GEOMETRY, kept, at):
        raise ConflictError(
            f"Somebody wrote to {catalog.location.uri} during a purge, which needs it alone; run repair() to finish it."
        )
    return at + 1
