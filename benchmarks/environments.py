"""Which systems can be measured here: their interpreters, their versions, and why one is missing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from compare import HERE, child_environment, versions

ROOT = HERE.parent
PEERS = ROOT / ".venv-peers"
PEERS_311 = ROOT / ".venv-peers-3.11"
TORCH = ROOT / ".venv-peers-torch"
MISSING = "missing.txt"


@dataclass(frozen=True)
class Environment:
    """Where one system is installed.

    Parameters
    ----------
    python
        Its interpreter.
    modules
        What must be there for the system to be measured.
    packages
        Distributions whose versions are worth telling.
    path
        Further folders to import from (torch is separate, because only one peer of its generation needs it).
    group
        What peers.sh is asked for to install it.
    """

    python: Path
    modules: tuple[str, ...]
    packages: tuple[str, ...]
    path: tuple[Path, ...] = ()
    group: str = "loader"

    def why_missing(self, name: str) -> str:
        """Say why the system cannot be measured; empty where it can."""
        folder = self.python.parent.parent
        if not self.python.exists():
            return noted_reason(folder, name) or f"{folder.name} is not there; run benchmarks/peers.sh {self.group}"
        # Found, not imported: some peers take many seconds, and peers.sh has imported them once.
        code = "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, sys.argv[1:])))"
        command = [str(self.python), "-c", code, *self.modules]
        if not subprocess.run(command, env=child_environment(*self.path), check=False).returncode:
            return noted_reason(folder, name)
        return noted_reason(folder, name) or f"not in {folder.name}; run benchmarks/peers.sh {self.group}"

    def versions(self) -> str:
        """Interpreter and package versions."""
        return versions(self.python, self.packages, self.path)


def noted_reason(folder: Path, name: str) -> str:
    """Look up what ``peers.sh`` noted about a peer that it could not install."""
    notes = folder / MISSING
    lines = notes.read_text().splitlines() if notes.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0] == name), "")


SYSTEMS = {
    "raggedatlas": Environment(
        Path(sys.executable), ("raggedatlas",), ("raggedatlas", "numpy", "pylance", "zarr", "anndata")
    ),
    "scipy": Environment(Path(sys.executable), ("scipy",), ("scipy", "numpy", "h5py")),
    "homeobox": Environment(
        PEERS / "bin/python", ("homeobox",), ("homeobox", "lancedb", "pylance", "obstore", "zarr", "torch"), (TORCH,)
    ),
    "annbatch": Environment(PEERS / "bin/python", ("annbatch", "zarrs"), ("annbatch", "zarrs", "zarr", "anndata")),
    "cellstream": Environment(PEERS / "bin/python", ("cellstream",), ("cellstream", "numpy", "scipy")),
    "tiledbsoma-ml": Environment(
        PEERS_311 / "bin/python", ("tiledbsoma_ml",), ("tiledbsoma-ml", "tiledbsoma", "torch")
    ),
    "slafdb": Environment(PEERS_311 / "bin/python", ("slaf",), ("slafdb", "pylance", "torch")),
    "scdataset": Environment(PEERS_311 / "bin/python", ("scdataset",), ("scdataset", "anndata", "h5py", "torch")),
    "bionemo-scdl": Environment(PEERS_311 / "bin/python", ("bionemo.scdl",), ("bionemo-scdl", "numpy", "torch")),
}


def missing_systems(wanted: Iterable[str]) -> dict[str, str]:
    """Give the reason for every wanted system that cannot be measured."""
    reasons = {name: SYSTEMS[name].why_missing(name) for name in wanted}
    return {name: reason for name, reason in reasons.items() if reason}
