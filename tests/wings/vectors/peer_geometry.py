"""Files of geometry by their own libraries, and a look at ours with them; run by the Python of an environment that has these.

``peer_geometry.py make FOLDER`` needs spatialdata (0.8.0 made the archive); ``check STORE`` opens what we wrote and prints what it sees as
JSON. `tests/data/geometry_peers.zip` holds what `make` wrote.
"""

import json
import sys
from pathlib import Path

import numpy as np


def make_spatialdata(folder: Path) -> None:
    import geopandas as gpd
    import pandas as pd
    import shapely
    from spatialdata import SpatialData
    from spatialdata._io import format as formats
    from spatialdata.models import PointsModel, ShapesModel
    from spatialdata.transformations import Affine, Identity, Scale, Sequence, Translation

    table = pd.DataFrame(
        {
            "x": [1.0, 2, 3.5, 4],
            "y": [5.0, 6, 7, 8],
            "gene": pd.Categorical(["A", "B", "A", "C"]),
            "cell_id": [3, 3, 9, 9],
            "qv": np.array([1, 2, 3, 4], np.float32),
        }
    )
    points = PointsModel.parse(
        table,
        coordinates={"x": "x", "y": "y"},
        feature_key="gene",
        instance_key="cell_id",
        transformations={"global": Scale([2, 3], axes=("x", "y")), "px": Identity()},
    )
    outlines = [
        shapely.Polygon([(0, 0), (2, 0), (2, 2), (0, 0)]),
        shapely.Polygon([(0, 0), (4, 0), (4, 4), (0, 4), (0, 0)], [[(1, 1), (2, 1), (2, 2), (1, 1)]]),
    ]
    swap = Affine([[0, 1, 0], [1, 0, 0], [0, 0, 1]], input_axes=("x", "y"), output_axes=("x", "y"))
    moved = Sequence([Translation([1, 2], axes=("y", "x")), swap])
    spots = ShapesModel.parse(
        np.array([[1.0, 2], [3, 4]]), geometry=0, radius=np.array([0.5, 1.5]), index=pd.Index([4, 7])
    )
    for name, index, versions in (
        ("new", ["c3", "c9"], None),
        ("old", ["c3", "c9"], (formats.ShapesFormatV02(), formats.PointsFormatV01())),
        ("oldest", [3, 9], (formats.ShapesFormatV01(), formats.PointsFormatV01())),
    ):
        cells = gpd.GeoDataFrame({"area": [3.0, 15.0]}, geometry=outlines, index=index)
        shapes = {"cells": ShapesModel.parse(cells, transformations={"global": moved}), "spots": spots}
        given = None if versions is None else [formats.SpatialDataContainerFormatV01(), *versions]
        SpatialData(points={"transcripts": points}, shapes=shapes).write(folder / f"{name}.zarr", sdata_formats=given)


def check_spatialdata(store: Path) -> dict[str, object]:
    import spatialdata

    data = spatialdata.read_zarr(store)
    seen: dict[str, object] = {}
    for name, points in data.points.items():
        table = points.compute()
        seen[name] = {column: table[column].astype(str).tolist() for column in table.columns}
    for name, shapes in data.shapes.items():
        seen[name] = {"index": [str(i) for i in shapes.index], "wkt": shapes.geometry.to_wkt().tolist()} | (
            {"radius": shapes["radius"].tolist()} if "radius" in shapes else {}
        )
    return seen


if __name__ == "__main__":
    verb, place = sys.argv[1:3]
    if verb == "make":
        make_spatialdata(Path(place))
    else:
        sys.stdout.write(json.dumps(check_spatialdata(Path(place))))
