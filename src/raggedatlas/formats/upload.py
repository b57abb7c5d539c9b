"""Write files to object stores: spooled to a local temporary folder, then uploaded so that no half of them is visible."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raggedatlas.errors import DuplicateError
from raggedatlas.model.batch import Block
from raggedatlas.model.protocols import Sink, SinkMatrix
from raggedatlas.store.remote_path import RemotePath, delete_below, put_file, refuse_web_target
from raggedatlas.store.runtime import map_requests

LAST = ("obs/", "__tiledb_group.tdb", "__group/", ".zmetadata", ".zgroup", "zarr.json")
"""What readers recognise a folder by: these files of its root are uploaded after all others, in this order, and removed first."""


class UploadSink:
    """A `Sink` that writes to an object store: the files of another sink are uploaded by `commit`.

    HDF5 and TileDB seek while they write, which object stores cannot. So the file is written to the folder for temporary files of the
    system (``TMPDIR``), which needs room for it.

    Parameters
    ----------
    target : RemotePath
        Where the file or folder will be.
    maker : callable
        Makes the sink of a local path.
    options : mapping
        Options of that sink; `overwrite` is that of the target.

    Raises
    ------
    DuplicateError
        If the target exists and is not to be overwritten.
    StoreError
        If the store cannot be asked, or is a web server.

    Notes
    -----
    A file is uploaded in parts and appears when it is complete; a file that it replaces is there until then. A folder appears with its
    root metadata, which are uploaded last. One that is replaced disappears with its root metadata, which are removed first. An upload that
    fails removes what it wrote; one that is killed leaves objects without root metadata, which writing again with ``overwrite=True`` removes.
    """

    def __init__(self, target: RemotePath, maker: Callable[..., Sink], options: Mapping[str, Any]) -> None:
        refuse_web_target(target)
        self._target, self._overwrite = target, bool(options.get("overwrite", False))
        self._spooled: Path | None = None
        self._refuse_existing()
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
        """Complete the file, upload it, and return its address.

        Raises
        ------
        DuplicateError
            If the target has come into being and is not to be overwritten.
        StoreError
            If the disk or the store fails; nothing is visible then.
        """
        spooled = self._spooled = Path(self._sink.commit())
        # Again, since writing may have taken hours.
        self._refuse_existing()
        if spooled.is_dir():
            _upload_folder(spooled, self._target)
        else:
            put_file(self._target, spooled)
        self._remove_spool()
        return str(self._target)

    def abort(self) -> None:
        """Remove what was written so far."""
        if self._spooled is None:
            self._sink.abort()
        self._remove_spool()

    def _refuse_existing(self) -> None:
        # Asked of a path of its own: a path keeps what it has seen.
        if not self._overwrite and RemotePath(self._target.uri, self._target.storage_options).exists():
            raise DuplicateError(f"{self._target} exists; choose another name, or pass overwrite=True to replace it.")

    def _remove_spool(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _upload_folder(folder: Path, target: RemotePath) -> None:
    """Upload a folder whose root metadata come last, and remove what was there before."""
    listed = sorted(_rank(file.relative_to(folder).as_posix()) for file in folder.rglob("*") if file.is_file())
    before = RemotePath(target.uri, target.storage_options)
    old = sorted((_rank(file.relative_to(before)) for file in before.rglob("*")), reverse=True)
    # One call for each rank: a store removes the objects of one call in any order.
    for rank in range(len(LAST), -1, -1):
        delete_below(target, [key for at, key in old if at == rank])
    sent: list[str] = []

    def send(key: str) -> None:
        sent.append(key)
        put_file(target / key, folder / key)

    try:
        for rank in range(len(LAST) + 1):
            map_requests(send, [key for at, key in listed if at == rank])
    except BaseException:
        delete_below(target, sorted(sent, key=_rank, reverse=True))
        raise


def _rank(key: str) -> tuple[int, str]:
    """Return when a file is uploaded: 0 for all that readers do not recognise a folder by."""
    ranks = (i for i, name in enumerate(LAST, 1) if key == name or (name.endswith("/") and key.startswith(name)))
    return next(ranks, 0), key
