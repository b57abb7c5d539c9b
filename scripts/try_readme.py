"""Runs the first block of the README with the installed package, and checks what the text after it says; for an environment without test packages."""

import os
import re
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Run the block where ``tests/data`` is, in a folder of its own."""
    text = (ROOT / "README.md").read_text("utf-8")
    block = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    n_cells = re.search(r"`adata` is an AnnData with (\d+) cells and two genes", text)
    assert block is not None
    assert n_cells is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shutil.copytree(ROOT / "tests/data", Path(folder, "tests/data"))
        os.chdir(folder)
        names: dict[str, object] = {}
        exec(compile(block[1], "README.md", "exec"), names)
        os.chdir(ROOT)
    assert getattr(names["adata"], "shape", None) == (int(n_cells[1]), 2), names["adata"]


if __name__ == "__main__":
    main()
