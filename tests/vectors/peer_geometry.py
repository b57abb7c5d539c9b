"""Files of geometry by their own libraries, and a look at ours with them; run by the Python of an environment that has these.

``peer_geometry.py make spatialdata FOLDER`` needs spatialdata (0.8.0 made the archive), ``make neuroglancer FOLDER`` needs
cloud-volume (12.15.2); ``check spatialdata STORE`` and ``check neuroglancer FOLDER`` open what we wrote and print what they see as JSON. `tests/data/geometry_peers.zip` holds what `make` wrote.
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


def make_neuroglancer(folder: Path) -> None:
    from cloudvolume import CloudVolume, Mesh, Skeleton
    from cloudvolume.datasource.precomputed.sharding import ShardingSpecification

    info = CloudVolume.create_new_info(
        num_channels=1, layer_type="segmentation", data_type="uint64", encoding="raw", resolution=[1, 1, 1],
        voxel_offset=[0, 0, 0], volume_size=[16, 16, 16], mesh="mesh", skeletons="skeletons", chunk_size=[16, 16, 16],
    )  # fmt: skip
    volume = CloudVolume(f"file://{folder}/volume", info=info, compress=False)
    volume.commit_info()
    volume.skeleton.meta.commit_info()
    skeleton = Skeleton(
        np.array([[0, 0, 0], [1, 2, 3], [4, 5, 6], [4, 5, 9]], np.float32),
        np.array([[0, 1], [1, 2], [1, 3]], np.uint32),
        radii=np.array([1, 2, 3, 4.5], np.float32),
        vertex_types=np.array([1, 2, 3, 4], np.uint8),
        segid=77,
    )
    volume.skeleton.upload([skeleton])
    tetrahedron = np.array([[0, 1, 2], [0, 3, 1], [0, 2, 3], [1, 3, 2]], np.uint32)
    mesh = Mesh(np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32), tetrahedron, None, segid=5)
    (folder / "meshes").mkdir()
    (folder / "meshes" / "5:0:0_16").write_bytes(mesh.to_precomputed())
    (folder / "meshes" / "5:0").write_text(json.dumps({"fragments": ["5:0:0_16"]}))
    (folder / "meshes" / "info").write_text(json.dumps({"@type": "neuroglancer_legacy_mesh"}))
    sharding = ShardingSpecification(
        "neuroglancer_uint64_sharded_v1", preshift_bits=1, hash="murmurhash3_x86_128", minishard_bits=1, shard_bits=1,
        minishard_index_encoding="gzip", data_encoding="gzip",
    )  # fmt: skip
    (folder / "sharded").mkdir()
    said = {**volume.skeleton.meta.info, "sharding": sharding.to_dict()}
    (folder / "sharded" / "info").write_text(json.dumps(said, default=int))
    data = {key: skeleton.to_precomputed() for key in (77, 5, 9, 123456789, 10)}
    for name, shard in sharding.synthesize_shards(data).items():
        (folder / "sharded" / name).write_bytes(shard)


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


def check_neuroglancer(folder: Path) -> dict[str, object]:
    from cloudvolume import CloudVolume, Mesh

    seen: dict[str, object] = {}
    info = CloudVolume.create_new_info(
        num_channels=1, layer_type="segmentation", data_type="uint64", encoding="raw", resolution=[1, 1, 1],
        voxel_offset=[0, 0, 0], volume_size=[16, 16, 16], mesh="meshes", skeletons="skeletons", chunk_size=[16, 16, 16],
    )  # fmt: skip
    (folder / "info").write_text(json.dumps(info, default=int))
    volume = CloudVolume(f"file://{folder}")
    skeleton = volume.skeleton.get(12)
    seen["skeleton"] = [skeleton.vertices.tolist(), skeleton.edges.tolist(), skeleton.radius.tolist()]
    mesh = volume.mesh.get(7, remove_duplicate_vertices=False)
    mesh = mesh[7] if isinstance(mesh, dict) else mesh
    assert isinstance(mesh, Mesh)
    seen["mesh"] = [mesh.vertices.tolist(), mesh.faces.tolist()]
    return seen


if __name__ == "__main__":
    verb, what, place = sys.argv[1:4]
    if verb == "make":
        {"spatialdata": make_spatialdata, "neuroglancer": make_neuroglancer}[what](Path(place))
    else:
        found = {"spatialdata": check_spatialdata, "neuroglancer": check_neuroglancer}[what](Path(place))
        sys.stdout.write(json.dumps(found))
