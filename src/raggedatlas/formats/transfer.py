"""Files of object stores that need a temporary folder: sinks that upload what they wrote, and sources that copy what they read."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raggedatlas.formats.tenx import companions
from raggedatlas.model.batch import Block
from raggedatlas.model.protocols import Sink, SinkMatrix, Source, SourceSchema
from raggedatlas.store.copies import local_copy, naming, refuse_target, upload
from raggedatlas.store.location import Location

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


class UploadSink:
    """A `Sink` that writes to an object store: the files of another sink are uploaded by `commit`.

    HDF5 and TileDB seek while they write, which object stores cannot. So the file is written to the folder for
    temporary files of the system (``TMPDIR``), which needs room for it. `maker` makes the sink of a local path with
    `options`, whose `overwrite` is that of the target. Raises `DuplicateError` if the target exists and is not to be
    overwritten.

    A file is uploaded in parts and appears when it is complete; a file that it replaces is there until then. A folder appears with its
    root metadata, which are uploaded last. One that is replaced disappears with its root metadata, which are removed first. An upload that
    fails removes what it wrote; one that is killed leaves objects without root metadata, which writing again with ``overwrite=True`` removes.
    """

    def __init__(self, target: Location, maker: Callable[..., Sink], options: Mapping[str, Any]) -> None:
        self._target, self._overwrite = target, bool(options.get("overwrite", False))
        self._spooled: Path | None = None
        refuse_target(target, overwrite=self._overwrite)
        self._folder = Path(tempfile.mkdtemp(prefix="raggedatlas-upload-"))
        try:
            self._sink = maker(self._folder / target.name, **options)
        except BaseException:
            self._remove_spool()
            raise

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  (what a sink declares besides its methods)
        """Return what the inner sink declares, such as `by_column` and `multimodal`."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sink, name)

    def begin(self, matrices: tuple[SinkMatrix, ...]) -> None:
        """Prepare for these matrices; see the inner sink."""
        self._sink.begin(matrices)

    def write(self, key: str, block: Block) -> None:
        """Append rows to one matrix; see the inner sink."""
        self._sink.write(key, block)

    def element(self, key: str, value: Any) -> None:  # noqa: ANN401  (any element that AnnData knows)
        """Write a whole element; see the inner sink."""
        self._sink.element(key, value)

    def commit(self) -> str:
        """Complete the file, upload it, and return its address; nothing is visible if the disk or the store fails.

        Raises `DuplicateError` if the target has come into being and is not to be overwritten.
        """
        spooled = self._spooled = Path(self._sink.commit())
        # Again, since writing may have taken hours.
        refuse_target(self._target, overwrite=self._overwrite)
        upload(spooled, self._target)
        self._remove_spool()
        return str(self._target)

    def abort(self) -> None:
        """Remove what was written so far."""
        if self._spooled is None:
            self._sink.abort()
        self._remove_spool()

    def _remove_spool(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class CopiedSource:
    """A `Source` of a file or folder that its reader takes from a local disk only.

    It is copied, and the copy removed by `close`. `opener` opens the local copy; messages name `path`.
    """

    def __init__(self, path: Location, opener: Callable[[Path], Source]) -> None:
        self._path = path
        with ExitStack() as stack:
            # A Market matrix has its cells and features in files beside it.
            self._copy = stack.enter_context(local_copy(path, beside=companions(path)))
            self._source = opener(self._copy)
            stack.callback(self._source.close)
            self._stack = stack.pop_all()

    def describe(self) -> SourceSchema:
        """Return the schema, with the address."""
        return replace(self._source.describe(), uri=str(self._path))

    def cells(self) -> "pa.Table":
        """Return one row per cell; see the inner source."""
        with naming(self._copy, self._path):
            return self._source.cells()

    def features(self, key: str) -> "pa.Table":
        """Return one row per feature; see the inner source."""
        with naming(self._copy, self._path):
            return self._source.features(key)

    def blocks(
        self, keys: tuple[str, ...], n_rows: int, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Block, ...]]:
        """Iterate over blocks of rows; see the inner source."""
        with naming(self._copy, self._path):
            return self._named(self._source.blocks(keys, n_rows, rows))

    def _named(self, blocks: Iterator[tuple[Block, ...]]) -> Iterator[tuple[Block, ...]]:
        with naming(self._copy, self._path):
            yield from blocks

    def element(self, key: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Return an element; see the inner source."""
        with naming(self._copy, self._path):
            return self._source.element(key)

    def present(self, key: str) -> "NDArray[np.int64] | None":
        """Return the rows that have values; see the inner source."""
        with naming(self._copy, self._path):
            return self._source.present(key)

    def close(self) -> None:
        """Close the source, and remove the copy."""
        self._stack.close()
