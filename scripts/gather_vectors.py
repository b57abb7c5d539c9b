"""Gathers stores that zarr-vectors wrote into the tests' data: ``gather_vectors.py FOLDER_OF_0.7 FOLDER_OF_0.9 [--to TARGET]``.

Each folder is what ``tests/wings/vectors/peer_zarr_vectors.py write FOLDER`` makes in the environment of a package, see
``benchmarks/peers.sh vectors``. The stores in `KEPT` go unchanged into one Zip file, under ``<layout>/<store>``.
"""

import argparse
import zipfile
from pathlib import Path

KEPT = {
    "0.7": ("graph-texts", "mesh-columns", "mesh-halves", "point_cloud-pyramid"),
    "0.9": ("graph-texts", "mesh-columns", "mesh-halves"),
}
LONG_AGO = (1980, 1, 1, 0, 0, 0)


def gather(folders: dict[str, Path], target: Path) -> None:
    """Write the Zip file; the same stores give the same bytes."""
    with zipfile.ZipFile(target, "w") as out:
        for layout, names in KEPT.items():
            for name in names:
                store = folders[layout] / name
                files = sorted(path for path in store.rglob("*") if path.is_file())
                for path in [*files, store.with_suffix(".npz")]:
                    about = zipfile.ZipInfo(f"{layout}/{path.relative_to(folders[layout]).as_posix()}", LONG_AGO)
                    out.writestr(about, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs=2, type=Path)
    data = Path(__file__).parent.parent / "tests" / "data"
    parser.add_argument("--to", type=Path, default=data / "zarr_vectors_peers.zip")
    chosen = parser.parse_args()
    gather(dict(zip(KEPT, chosen.folders, strict=True)), chosen.to)
