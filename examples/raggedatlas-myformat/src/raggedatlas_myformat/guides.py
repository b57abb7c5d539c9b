"""The format ``.guides``: a text file with a line ``cell<TAB>guide<TAB>count`` for each entry."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from scipy import sparse

from raggedatlas.errors import DuplicateError, SourceError
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.frames import INDEX
from raggedatlas.model.protocols import MatrixInfo, SinkMatrix, SourceSchema


class GuideSource:
    """Read a ``.guides`` file; it is small enough to be parsed at once."""

    def __init__(self, path: Path) -> None:
        try:
            rows = [line.split("\t") for line in path.read_text("utf-8").splitlines()]
            names, guides, counts = zip(*rows, strict=True)
            values = np.array(counts, np.uint32)
        except ValueError as error:
            raise SourceError(f"{path} is no .guides file: lines must be cell<TAB>guide<TAB>count.") from error
        self.path = path
        self._names, row = np.unique(names, return_inverse=True)
        self._guides, column = np.unique(guides, return_inverse=True)
        shape = (len(self._names), len(self._guides))
        self._matrix = sparse.csr_array((values, (row, column)), shape=shape)

    def describe(self) -> SourceSchema:
        x = self._matrix
        info = MatrixInfo("X", "csr", x.dtype, x.shape, "var", space="guide_counts", n_entries=x.nnz)
        return SourceSchema(self.path.stem, str(self.path), x.shape[0], (info,), format="guides")

    def cells(self) -> pa.Table:
        return pa.table({INDEX: self._names})

    def features(self, key: str) -> pa.Table:
        return pa.table({INDEX: self._guides})

    def blocks(
        self, keys: tuple[str, ...], n_rows: int, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Block, ...]]:
        start, stop = rows or (0, len(self._names))
        for first in range(start, stop, n_rows):
            x = self._matrix[first : min(first + n_rows, stop)]
            yield (CsrBlock(x.indptr.astype(np.int64), x.indices, {"values": x.data}, x.shape[1]),)

    def element(self, key: str) -> Any:
        import pandas as pd

        return pd.DataFrame(index=self._names if key == "obs" else self._guides)

    def present(self, key: str) -> None:
        return None  # row i is cell i

    def close(self) -> None:
        pass


class GuideSink:
    """Write a ``.guides`` file; only counts are kept, and nothing is visible before `commit`."""

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not overwrite:
            raise DuplicateError(f"{path} exists; choose another name, or pass overwrite=True.")
        self._blocks: list[sparse.csr_array] = []
        self._names: dict[str, list[str]] = {}

    def begin(self, matrices: tuple[SinkMatrix, ...]) -> None:
        pass

    def write(self, key: str, block: Block) -> None:
        if key == "X":
            if not isinstance(block, CsrBlock):
                raise SourceError(f"{self.path}: a .guides file stores sparse counts, and X is dense.")
            shape = (block.n_rows, block.n_cols)
            self._blocks.append(sparse.csr_array((block.layers["values"], block.indices, block.indptr), shape=shape))

    def element(self, key: str, value: Any) -> None:
        if key in ("obs", "var"):
            self._names[key] = value.index.astype(str).tolist()

    def commit(self) -> str:
        x = sparse.vstack(self._blocks).tocoo()
        cells, guides = self._names["obs"], self._names["var"]
        part = self.path.with_name(f".{self.path.name}.part")
        entries = zip(x.row, x.col, x.data, strict=True)
        part.write_text(
            "".join(f"{cells[row]}\t{guides[column]}\t{value}\n" for row, column, value in entries), "utf-8"
        )
        part.replace(self.path)
        return str(self.path)

    def abort(self) -> None:
        self._blocks.clear()
