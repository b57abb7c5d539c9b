"""The geometry stores and the annotations of an atlas as frames."""

from typing import TYPE_CHECKING

from raggedatlas.catalog.annotations import read_annotations
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.datasets import group_by_dataset, read_records
from raggedatlas.catalog.geometries import read_geometries

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "uid", "name", "space", "types", "axes", "n_cells", "datasets", "n_objects", "n_vertices", "n_levels", "bounds", "n_bytes",
    "layout", "source", "created_at",
)  # fmt: skip
"""What is told of a geometry store in a list."""


def list_geometries(catalog: Catalog) -> "pd.DataFrame":
    """List the geometry stores of an atlas, in the order of adding.

    Returns
    -------
    pandas.DataFrame
        Indexed by uid, with the other `COLUMNS`; cells and names of the datasets that are there.
    """
    import pandas as pd

    found = read_geometries(catalog)
    names = {uid: group[0].name for uid, group in group_by_dataset(read_records(catalog)).items()} if found else {}
    rows = []
    for record in found:
        cells = {uid: n for uid, n in record.cells_of.items() if uid in names}
        told = {
            column: getattr(record, column) for column in COLUMNS if column not in {"n_cells", "datasets", "bounds"}
        }
        told |= {"types": ", ".join(record.types), "axes": "".join(record.axes), "bounds": record.extent}
        rows.append({**told, "n_cells": sum(cells.values()), "datasets": ", ".join(names[uid] for uid in cells)})
    return pd.DataFrame(rows, columns=list(COLUMNS)).set_index("uid")


def list_annotations(catalog: Catalog) -> "pd.DataFrame":
    """List the annotations of an atlas, oldest first.

    Returns
    -------
    pandas.DataFrame
        Indexed by name: columns (names, separated by commas), n_cells, n_values, on_conflict, source, snapshot, query, created_at, uid.
    """
    import pandas as pd

    rows = [
        {
            "name": record.name, "columns": ", ".join(record.columns), "n_cells": record.n_cells,
            "n_values": sum(column.n_values for column in record.columns.values()), "on_conflict": record.on_conflict,
            "source": record.source, "snapshot": record.snapshot, "query": record.query, "created_at": record.created_at,
            "uid": record.uid,
        }
        for record in read_annotations(catalog)
    ]  # fmt: skip
    columns = (
        "name",
        "columns",
        "n_cells",
        "n_values",
        "on_conflict",
        "source",
        "snapshot",
        "query",
        "created_at",
        "uid",
    )
    return pd.DataFrame(rows, columns=list(columns)).set_index("name")
