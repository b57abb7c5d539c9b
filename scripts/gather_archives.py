"""Gathers the files that old and new versions of anndata and mudata wrote: ``gather_archives.py SDIST... [--to TARGET]``.

Each SDIST is a source distribution (``pip download --no-deps --no-binary anndata anndata==0.13.4``), whose tests keep such
files under ``tests/data/archives/v<version>``. They go unchanged into one Zip file under the names ``<package>-<version>/<file>``.
"""

import argparse
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

ENDINGS = (".h5ad", ".h5mu", ".zarr.zip")
LONG_AGO = (1980, 1, 1, 0, 0, 0)


def gather(sdists: list[Path], target: Path) -> None:
    """Write the Zip file; the same sources give the same bytes."""
    with zipfile.ZipFile(target, "w") as out:
        for sdist in sdists:
            with tarfile.open(sdist) as tar:
                for member in sorted(tar.getmembers(), key=lambda member: member.name):
                    path = PurePosixPath(member.name)
                    stored = tar.extractfile(member) if member.isfile() and member.name.endswith(ENDINGS) else None
                    if stored is not None and "/tests/data/archives/v" in member.name:
                        package, version = path.parts[0].rpartition("-")[0], path.parent.name.removeprefix("v")
                        about = zipfile.ZipInfo(f"{package}-{version}/{path.name}", LONG_AGO)
                        out.writestr(about, stored.read(), zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdists", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent.parent / "tests" / "data" / "archives.zip")
    chosen = parser.parse_args()
    gather(chosen.sdists, chosen.to)
