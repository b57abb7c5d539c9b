"""Files of other libraries; the scripts that other environments run are no tests."""

import zipfile
from pathlib import Path

import pytest

collect_ignore = ["peer_geometry.py", "peer_zarr_vectors.py"]


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory, data_dir: Path) -> Path:
    """Folder with files that other libraries wrote."""
    folder = tmp_path_factory.mktemp("peers")
    with zipfile.ZipFile(data_dir / "geometry_peers.zip") as archive:
        archive.extractall(folder)
    return folder
