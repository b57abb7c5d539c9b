"""Runs in the environment of a zarr-vectors package: writes stores of every kind and reads stores, both by that package.

python peer_zarr_vectors.py write FOLDER          makes FOLDER/<name> and beside each <name>.npz, what the package reads
python peer_zarr_vectors.py read FOLDER           reads every FOLDER/<kind>-<name> and writes <kind>-<name>.npz
python peer_zarr_vectors.py validate FOLDER       validates every store of FOLDER; prints a line of JSON for each
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np
from zarr_vectors.types.graphs import read_graph, write_graph
from zarr_vectors.types.lines import read_lines, write_lines
from zarr_vectors.types.meshes import read_mesh, write_mesh
from zarr_vectors.types.points import read_points, write_points
from zarr_vectors.types.polylines import read_polylines, write_polylines

EDGE = (50.0, 50.0, 50.0)


def make(folder: Path) -> None:
    """Write one store of each kind."""
    rng = np.random.default_rng(0)
    points = rng.uniform(-60, 60, (60, 3)).astype("f4")
    scalars = {"v": np.arange(60, dtype="f4"), "w": np.arange(120, dtype="i2").reshape(60, 2)}
    write_points(
        str(folder / "point_cloud-plain"), points, chunk_shape=EDGE, bin_shape=(25.0,) * 3, vertex_attributes=scalars
    )
    write_points(
        str(folder / "point_cloud-objects"),
        points,
        chunk_shape=EDGE,
        object_ids=np.repeat(np.arange(6), 10),
        object_attributes={"a": np.arange(6.0)},
        groups={0: [0, 1], 1: [2, 5, 0]},
        group_attributes={"code": np.array([3, 4])},
    )
    kinds = {"kind": np.arange(60) % 3, "v": np.arange(60, dtype="f4")}
    write_points(
        str(folder / "point_cloud-kinds"),
        points,
        chunk_shape=EDGE,
        vertex_attributes=kinds,
        chunk_by_attribute="kind",
    )
    write_lines(
        str(folder / "line-all"), points.reshape(30, 2, 3), chunk_shape=EDGE, object_attributes={"a": np.arange(30.0)}
    )
    paths = [np.cumsum(rng.normal(0, 9, (n, 3)), 0).astype("f4") for n in (5, 2, 12, 30)]
    along = {"fa": [np.arange(len(path), dtype="f4") for path in paths]}
    for kind in ("streamline", "polyline"):
        write_polylines(
            str(folder / f"{kind}-all"),
            paths,
            chunk_shape=EDGE,
            vertex_attributes=along,
            object_attributes={"a": np.arange(4.0)},
            geometry_type=kind,
        )
    edges = np.array([[i, (i * 7 + 3) % 60] for i in range(60)])
    write_graph(str(folder / "graph-all"), points, edges, chunk_shape=EDGE)
    tree = np.array([[i, (i - 1) // 2] for i in range(1, 60)])
    write_graph(str(folder / "skeleton-all"), points, tree, chunk_shape=EDGE, kind="skeleton")
    faces = np.array([[i, i + 1, i + 2] for i in range(58)])
    write_mesh(str(folder / "mesh-all"), points, faces, chunk_shape=EDGE)
    given = more(folder, points, edges, faces)
    many = rng.uniform(-60, 60, (400, 3)).astype("f4")
    write_points(str(folder / "point_cloud-pyramid"), many, chunk_shape=EDGE, object_ids=np.repeat(np.arange(20), 20))
    from zarr_vectors.multiresolution.coarsen import build_pyramid

    build_pyramid(str(folder / "point_cloud-pyramid"), factors=[(2.0, 1.0), (2.0, 1.0)])
    for path in sorted(folder.iterdir()):
        read(path, given.get(path.name, {}))


def more(folder: Path, points: np.ndarray, edges: np.ndarray, faces: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Write columns that no shape declares, texts, and fragments that two objects share; return what the package does not read back."""
    columns = {"v:normal": points / 60, "v:colour": np.arange(180, dtype="u1").reshape(60, 3)}
    texts = {"v:gene": np.array(["aa", "b"])[np.arange(60) % 2]}
    wide = (100.0,) * 3
    write_mesh(
        str(folder / "mesh-columns"),
        points,
        faces,
        chunk_shape=wide,
        vertex_attributes={key[2:]: value for key, value in columns.items()},
    )
    write_graph(
        str(folder / "graph-texts"),
        points,
        edges,
        chunk_shape=wide,
        node_attributes={"gene": texts["v:gene"]},
        chunk_by_attribute="gene",
    )
    write_mesh(str(folder / "mesh-halves"), points, faces, chunk_shape=wide, object_ids=np.arange(60) // 30)
    return {"mesh-columns": {"at": points, **columns}, "graph-texts": {"at": points, **texts}}


def joined(path: list) -> np.ndarray:
    """Return a polyline that comes in pieces as one array."""
    return np.concatenate(path) if isinstance(path, list) else np.asarray(path)


def tables(store: Path) -> dict[str, np.ndarray]:
    """Read attributes of objects and groups, and the members of every group."""
    from zarr_vectors.core import arrays
    from zarr_vectors.core.store import get_resolution_level, open_store

    level = get_resolution_level(open_store(str(store)), 0)
    found: dict[str, np.ndarray] = {}
    for family, key, get in (
        ("object_attributes", "oa", arrays.read_object_attributes),
        ("group_attributes", "ga", arrays.read_groupings_attributes),
    ):
        for path in sorted((store / "0" / family).glob("*")):
            if path.is_dir():
                values = np.asarray(get(level, path.name))
                found[f"{key}:{path.name}"] = np.array(list(map(str, values))) if values.dtype.kind in "OT" else values
    if (store / "0" / "groups").exists():
        for number, members in enumerate(arrays.read_all_groupings(level)):
            found[f"members:{number}"] = np.array(list(members), np.int64)
    return found


def some_ids(store: Path) -> list[int]:
    """Give the first three object ids, by the package where ids are no row numbers."""
    from zarr_vectors.core import arrays
    from zarr_vectors.core.store import get_resolution_level, open_store

    ids = None
    if hasattr(arrays, "read_object_id_table"):
        ids = arrays.read_object_id_table(get_resolution_level(open_store(str(store)), 0))
    return [0, 1, 2] if ids is None else [int(i) for i in ids[:3]]


def read(store: Path, given: dict[str, np.ndarray] | None = None) -> None:
    """Read one store by the package, and write what it gives, and what was given to it, to a file of the same name."""
    kind = store.name.split("-", maxsplit=1)[0]
    found: dict[str, np.ndarray] = dict(given or {})
    if kind == "point_cloud":
        kept = {"attribute_names": json.loads((store / "0" / "zarr.json").read_text())["attributes"].get("names")}
        names = sorted(path.name for path in (store / "0" / "vertex_attributes").glob("*") if path.is_dir())
        got = read_points(str(store), attribute_names=names or kept["attribute_names"])
        found["positions"] = got["positions"]
        values = got.get("attributes") or got.get("vertex_attributes") or {}
        found |= {f"v:{name}": value for name, value in values.items()}
        low, high = np.full(3, -30.0), np.full(3, 40.0)
        found["box"] = read_points(str(store), bbox=(low, high))["positions"]
        if (store / "0" / "object_index").exists() and "kinds" not in store.name:
            for i in some_ids(store):
                found[f"object:{i}"] = read_points(str(store), object_ids=[i])["positions"]
        if (store / "0" / "groups").exists():
            found["group:1"] = read_points(str(store), group_ids=[1])["positions"]
        for level in (1, 2):
            if (store / str(level)).exists():
                found[f"level:{level}"] = read_points(str(store), level=level)["positions"]
    elif kind == "line":
        found["positions"] = read_lines(str(store))["endpoints"].reshape(-1, 3)
    elif kind in {"polyline", "streamline"}:
        got = read_polylines(str(store))["polylines"]
        whole = [joined(path) for path in got]
        found["positions"] = np.concatenate(whole)
        found["offsets"] = np.cumsum([0, *map(len, whole)])
        found["object:2"] = joined(read_polylines(str(store), object_ids=[2])["polylines"][0])
    elif kind in {"graph", "skeleton"}:
        got = read_graph(str(store))
        found["positions"], found["links"] = got["positions"], got["edges"]
    else:
        got = read_mesh(str(store))
        found["positions"], found["links"] = got["vertices"], got["faces"]
    found |= tables(store)
    np.savez(store.with_suffix(".npz"), **{key.replace("/", "|"): np.asarray(value) for key, value in found.items()})


def main() -> None:
    warnings.simplefilter("ignore")
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "write":
        make(folder)
    elif what == "read":
        for path in sorted(folder.iterdir()):
            if path.is_dir():
                read(path)
    else:
        from zarr_vectors.validate import validate

        for path in sorted(folder.iterdir()):
            if path.is_dir():
                report = validate(str(path), level=5)
                sys.stdout.write(
                    json.dumps({"store": path.name, "ok": bool(report.ok), "text": str(report)[:600]}) + "\n"
                )


if __name__ == "__main__":
    main()
