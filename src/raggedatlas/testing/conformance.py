"""Tests that every `Source` and every `Sink` must pass, for packages that add a format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import AtlasError
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.protocols import MatrixInfo, Sink, SinkMatrix, Source


def dense(blocks: list[Block], info: MatrixInfo) -> NDArray[Any]:
    """Return blocks of rows of one matrix as one dense array, entries that are there twice added.

    Examples
    --------
    >>> info = MatrixInfo("X", "csr", np.dtype("uint8"), (2, 3), "var")
    >>> block = CsrBlock(np.array([0, 1, 2]), np.array([2, 0]), {"values": np.array([5, 7], np.uint8)}, 3)
    >>> dense([block], info)
    array([[0., 0., 5.],
           [7., 0., 0.]])
    """
    parts = [np.zeros((0, *info.shape[1:]))]
    for block in blocks:
        values = block.layers["values"]
        if isinstance(block, CsrBlock):
            part = np.zeros((block.n_rows, block.n_cols))
            rows = np.repeat(np.arange(block.n_rows), np.diff(block.indptr))
            np.add.at(part, (rows, block.indices), values)
        else:
            part = np.asarray(values, np.float64)
        parts.append(part)
    return np.concatenate(parts)


class SourceTests:
    r"""Tests of a `Source`; a subclass whose name begins with ``Test`` has the fixture `open_source`.

    The fixture returns a callable that opens a new source on each call. The source needs at least two cells and a matrix.

    Examples
    --------
    >>> import pytest
    >>> from raggedatlas import open_source
    >>> class TestGuides(SourceTests):
    ...     @pytest.fixture
    ...     def open_source(self, tmp_path):
    ...         (tmp_path / "x.guides").write_text("a\tguide1\t3\nb\tguide2\t1\n")
    ...         return lambda: open_source(tmp_path / "x.guides")
    """

    def read(self, source: Source, key: str, n_rows: int, rows: tuple[int, int] | None = None) -> list[Block]:
        """Return the blocks of one matrix."""
        return [block for (block,) in source.blocks((key,), n_rows, rows)]

    def matrices(self, source: Source) -> tuple[MatrixInfo, ...]:
        """Return all matrices of a source."""
        schema = source.describe()
        return (*schema.matrices, *schema.others)

    def test_it_is_a_source(self, open_source: Callable[[], Source]) -> None:
        """It has all methods, describes itself the same twice, and can be closed twice."""
        source = open_source()
        for method in ("describe", "cells", "features", "blocks", "element", "present", "close"):
            assert callable(getattr(source, method, None)), method
        assert source.describe() == source.describe()
        source.close()
        source.close()

    def test_its_tables_fit_its_matrices(self, open_source: Callable[[], Source]) -> None:
        """There is one row for each cell, and for each column of a matrix that has names; keys are not repeated."""
        source = open_source()
        schema = source.describe()
        assert schema.n_cells >= 2
        assert source.cells().num_rows == schema.n_cells
        assert len({info.key for info in self.matrices(source)}) == len(self.matrices(source)) > 0
        for info in schema.matrices:
            if info.features:
                assert source.features(info.features).num_rows == info.shape[1], info.key
            present = source.present(info.key)
            if present is None:
                assert info.shape[0] == schema.n_cells, info.key
            else:
                assert present.shape == info.shape[:1], info.key
                assert present.dtype == np.int64
                assert ((present >= 0) & (present < schema.n_cells)).all(), info.key
                assert len(np.unique(present)) == len(present), info.key

    def test_blocks_have_the_described_form(self, open_source: Callable[[], Source]) -> None:
        """Blocks have the type, the columns and at most the rows that were asked for; sparse ones have sound pointers."""
        source = open_source()
        for info in self.matrices(source):
            for block in self.read(source, info.key, 3):
                assert 0 < block.n_rows <= 3, info.key
                assert block.layers["values"].dtype == info.dtype, info.key
                assert isinstance(block, CsrBlock) == (info.form != "dense"), info.key
                if isinstance(block, CsrBlock):
                    assert block.n_cols == info.shape[1], info.key
                    assert block.indptr[0] == 0
                    assert block.indptr[-1] == len(block.indices) == len(block.layers["values"]), info.key
                    assert (np.diff(block.indptr) >= 0).all(), info.key
                    assert ((block.indices >= 0) & (block.indices < info.shape[1])).all(), info.key

    def test_a_walk_does_not_depend_on_its_steps(self, open_source: Callable[[], Source]) -> None:
        """Rows one by one, a few at a time, all at once, and a range of rows are the same rows; entries are as many as described."""
        source = open_source()
        for info in self.matrices(source):
            blocks = self.read(source, info.key, info.shape[0] + 1)
            whole = dense(blocks, info)
            assert whole.shape == info.shape, info.key
            for step in (1, 2, 7):
                assert np.array_equal(dense(self.read(source, info.key, step), info), whole, equal_nan=True), info.key
            low, high = info.shape[0] // 3, info.shape[0] - 1
            part = dense(self.read(source, info.key, 2, (low, high)), info)
            assert np.array_equal(part, whole[low:high], equal_nan=True), info.key
            n_entries = sum(len(block.indices) for block in blocks if isinstance(block, CsrBlock))
            if info.n_entries is not None and info.form != "dense":
                assert n_entries == info.n_entries if info.exact else n_entries <= info.n_entries, info.key

    def test_walks_are_independent(self, open_source: Callable[[], Source]) -> None:
        """Two walks at once do not disturb each other; matrices with the same rows can be walked together."""
        source = open_source()
        info = source.describe().matrices[0]
        expected = dense(self.read(source, info.key, 2), info)
        pairs = list(zip(source.blocks((info.key,), 2), source.blocks((info.key,), 2), strict=True))
        for walk in (0, 1):
            assert np.array_equal(dense([pair[walk][0] for pair in pairs], info), expected, equal_nan=True)
        keys = tuple(m.key for m in source.describe().matrices if m.shape[0] == info.shape[0])
        for blocks in source.blocks(keys, 3):
            assert len(blocks) == len(keys)
            assert len({block.n_rows for block in blocks}) == 1

    def test_elements_can_be_read(self, open_source: Callable[[], Source]) -> None:
        """Every listed element can be read, and ``"obs"``, which has a row for each cell."""
        source = open_source()
        assert len(source.element("obs")) == source.describe().n_cells
        for key in source.describe().elements:
            source.element(key)


class SinkTests:
    """Tests of a `Sink`; a subclass whose name begins with ``Test`` has the fixture `new_sink`.

    The fixture returns a callable that takes a path and returns a new sink that writes there; `open_source` opens what it wrote.
    `suffix` is that of the path. The sink must take a sparse matrix ``"X"`` of uint32.
    """

    suffix = ""

    def open_source(self, path: Path) -> Source:
        """Open what the sink wrote."""
        from raggedatlas.formats.registry import open_source

        return open_source(path)

    def fill(self, sink: Sink) -> NDArray[np.uint32]:
        """Write cells, features and two blocks of rows, without `commit`; return the matrix."""
        import pandas as pd

        matrix = np.array([[0, 3, 0], [1, 0, 0], [0, 0, 2], [4, 5, 6]], np.uint32)
        sink.begin((SinkMatrix("X", "csr", matrix.dtype, matrix.shape, 6),))
        sink.element("obs", pd.DataFrame(index=["a", "b", "c", "d"]))
        sink.element("var", pd.DataFrame(index=["x", "y", "z"]))
        for rows in (matrix[:1], matrix[1:]):
            row, column = np.nonzero(rows)
            indptr = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(rows)))]).astype(np.int64)
            sink.write("X", CsrBlock(indptr, column.astype(np.int32), {"values": rows[row, column]}, rows.shape[1]))
        return matrix

    def left(self, folder: Path) -> list[str]:
        """Return what is in a folder, without the remains that a name marks as such."""
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))

    def test_what_is_committed_is_read(self, new_sink: Callable[[Path], Sink], tmp_path: Path) -> None:
        """The result is at the path after `commit`, not before, and holds the values that were written."""
        path = tmp_path / f"out{self.suffix}"
        sink = new_sink(path)
        assert isinstance(sink, Sink)
        matrix = self.fill(sink)
        assert not path.exists()
        assert sink.commit() == str(path)
        source = self.open_source(path)
        info = source.describe().matrix("X")
        assert info is not None
        found = dense([block for (block,) in source.blocks(("X",), 3)], info)
        names = [source.cells().column(0).to_pylist(), source.features(info.features).column(0).to_pylist()]
        order = [[listed.index(name) for name in wanted] for listed, wanted in zip(names, ("abcd", "xyz"), strict=True)]
        assert np.array_equal(found[np.ix_(*order)], matrix)
        source.close()

    def test_an_aborted_one_leaves_nothing(self, new_sink: Callable[[Path], Sink], tmp_path: Path) -> None:
        """After `abort` nothing is visible, and the same path can be written."""
        path = tmp_path / f"out{self.suffix}"
        sink = new_sink(path)
        self.fill(sink)
        sink.abort()
        assert self.left(tmp_path) == []
        again = new_sink(path)
        self.fill(again)
        again.commit()
        assert self.left(tmp_path) == [path.name]

    def test_what_exists_is_not_overwritten(self, new_sink: Callable[[Path], Sink], tmp_path: Path) -> None:
        """A second sink for the same path is refused by one of our errors, and the first result stays."""
        path = tmp_path / f"out{self.suffix}"
        sink = new_sink(path)
        self.fill(sink)
        sink.commit()
        try:
            new_sink(path)
        except AtlasError:
            assert path.exists()
        else:
            raise AssertionError(f"A second sink for {path.name} was opened without overwrite.")
