"""The geometry stores of an atlas as a list."""

from typing import TYPE_CHECKING

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
