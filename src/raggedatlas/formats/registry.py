"""Which reader and which writer belongs to what: one dictionary each, by structure, ending or type name."""

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, TypeGuard, cast

from raggedatlas.errors import NotFoundError, SourceError, StoreError
from raggedatlas.formats.containers import HDF5_ENDINGS, Container, attribute, open_hdf5, open_zarr, readable
from raggedatlas.model.arguments import checked
from raggedatlas.model.protocols import Sink, Source
from raggedatlas.model.wings import built_in_wings, every_wing, installed_wings
from raggedatlas.store.location import Address, AnyPath, Location, as_path
from raggedatlas.store.storage_errors import failure

Opener = Callable[..., Source]

READERS = {
    "h5ad": "raggedatlas.formats.anndata.source:h5ad_source",
    "zarr": "raggedatlas.formats.anndata.source:zarr_source",
    "h5mu": "raggedatlas.formats.mudata:mudata_source",
    "loom": "raggedatlas.formats.loom:loom_source",
    "soma": "raggedatlas.formats.soma:soma_source",
    "10x-h5": "raggedatlas.formats.tenx:tenx_h5_source",
    "10x-mtx": "raggedatlas.formats.tenx:tenx_mtx_source",
}
"""Format -> what opens a path of it, as an entry point names it: a short command imports one format, not all."""

OBJECTS = {
    ("anndata", "AnnData"): "raggedatlas.formats.anndata.source:object_source",
    ("mudata", "MuData"): "raggedatlas.formats.mudata:mudata_object_source",
    ("h5py", "Group"): "raggedatlas.formats.anndata.source:group_source",
    ("zarr", "Group"): "raggedatlas.formats.anndata.source:group_source",
}
"""Top package and class name -> what takes such an object, so that no library is imported to recognise it."""

WRITERS = {
    ".h5ad": "raggedatlas.formats.anndata.sink:h5ad_sink",
    ".h5mu": "raggedatlas.formats.anndata.sink:h5mu_sink",
    ".zarr": "raggedatlas.formats.anndata.sink:zarr_sink",
}
"""Ending -> what writes such a file."""

SUPPORTED = (
    ".h5ad and .h5mu files, 10x .h5 files, AnnData and MuData as .zarr folders or .zarr.zip files, CXG folders, SOMA experiments, .loom files, folders with "
    "matrix.mtx, and AnnData, MuData, open h5py.File and zarr.Group objects"
)

MATRICES = tuple(f"{name}{packed}" for name in ("matrix.mtx", "DGE.mtx", "cells_x_genes.mtx") for packed in ("", ".gz"))
"""How the name of a file with a matrix as text ends."""

BY_RANGES = ("h5ad", "h5mu", "10x-h5", "loom", "zarr", "cxg")
"""Formats of which parts are fetched from object stores and web servers; files of all others are copied before they are read."""


@checked
def open_source(
    what: Any,  # noqa: ANN401  (a path or any known object)
    *,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,  # noqa: ANN401  (each format has its own)
) -> Source:
    """Open a file, folder or object as a `Source`.

    Parameters
    ----------
    what : path, AnnData, MuData or Source
        Path, ``s3://``, ``gs://``, ``az://`` or ``https://`` address, or object to read; a `Source` is returned unchanged. What is in an
        object store or on a web server is not copied first: ranges of it are fetched as they are read, but for zip files, Market matrices,
        SOMA and formats of extensions, of which a temporary copy is made.
    storage_options : mapping of str to str, optional
        Credentials and endpoint of the object store, as of `RaggedAtlas.open`.
    **options
        Options of the format: ``genome=`` for 10x files of Cell Ranger 2; ``version=``, ``allow_unknown=`` and ``uns=`` for CXG;
        ``max_element_bytes=`` for AnnData, the size up to which elements outside of matrices are read (1 GiB by default).

    Raises
    ------
    NotFoundError
        If the path does not exist.
    SourceError
        If its format is unknown or it is damaged.
    StoreError
        If the object store or server cannot be reached, refuses access, or does not serve ranges.
    """
    if isinstance(what, str | os.PathLike):
        path = as_path(what, storage_options)
        name = detect(path)
        if is_copied(path, name):
            from raggedatlas.formats.transfer import CopiedSource

            return CopiedSource(path, lambda local: open_source(local, **options))
        opener = READERS.get(name) or next(wing.readers[name] for wing in every_wing() if name in wing.readers)
        return _opened(resolve_name(opener), path, options)
    # Base classes too: an `h5py.File` is found as `h5py.Group`.
    for kind in type(what).__mro__:
        known = OBJECTS.get((kind.__module__.partition(".")[0], kind.__name__))
        if known is not None:
            return _opened(resolve_name(known), what, options)
    if all(hasattr(what, name) for name in ("describe", "cells", "features", "blocks")):
        if options:
            raise SourceError(f"The options {sorted(options)} mean nothing for a source that is open already.")
        return cast("Source", what)
    raise SourceError(f"A {type(what).__qualname__} cannot be read; {SUPPORTED} can.")


@checked
def open_sink(
    path: Address,
    *,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,  # noqa: ANN401  (each format has its own)
) -> Sink:
    """Create a sink for a file or folder whose suffix determines the format.

    Parameters
    ----------
    path : str, Path or Location
        Ends in ``.h5ad``, ``.h5mu``, ``.zarr``, ``.cxg`` or the suffix of an installed extension; ``s3://``, ``gs://`` or ``az://`` too,
        which is written to a temporary folder and uploaded by `commit`.
    storage_options : mapping of str to str, optional
        Credentials and endpoint of the object store, as of `RaggedAtlas.open`.
    **options
        ``overwrite=``; ``compression=`` for HDF5; ``zarr_format=`` for Zarr; for CXG the fields of `CxgOptions`.

    Raises
    ------
    SourceError
        If the suffix or an option is unknown.
    DuplicateError
        If it exists and `overwrite` is not true.
    StoreError
        If the folder or the object store cannot be written.
    """
    target = as_path(path, storage_options)
    maker = find_writer(target)
    if maker is None:
        raise SourceError(f"{path} has the ending {target.suffix!r}; {', '.join(written_endings())} can be written.")
    _check_options(maker, path, options)
    if isinstance(target, Location):
        from raggedatlas.formats.transfer import UploadSink

        return UploadSink(target, maker, options)
    return maker(target, **options)


def find_writer(path: Address) -> Callable[..., Sink] | None:
    """Return what creates a sink for a path, built in or of an extension; None if nothing writes that suffix."""
    suffix = as_path(path).suffix
    found = WRITERS.get(suffix) or next((wing.writers[suffix] for wing in every_wing() if suffix in wing.writers), None)
    return resolve_name(found) if found else None


def written_endings() -> list[str]:
    """Return the endings that can be written, of formats and of wings."""
    return [*WRITERS, *(suffix for wing in every_wing() for suffix in wing.writers)]


def list_sources(folder: AnyPath) -> list[AnyPath]:
    """Return every path below a folder that `open_source` takes, sorted; the folder itself if it is one.

    Only names and suffixes are checked, one level deep. Raises `SourceError` if nothing in it is recognised.
    """
    from raggedatlas.formats.tenx import market_matrices, sample_prefix

    if not folder.exists():
        raise NotFoundError(f"There is no file or folder {folder}; check the path.")
    # Samples that share a folder have a prefix each, and are files among others.
    prefixed = folder.is_dir() and not any(not sample_prefix(path) for path in market_matrices(folder))
    kind = _folder_kind(folder)
    if not folder.is_dir() or (kind and not (kind == "10x-mtx" and prefixed)):
        return [folder]
    found = [
        p
        for p in folder.iterdir()
        if _folder_kind(p)
        or (p.is_file() and (p.suffix in HDF5_ENDINGS or p.name.endswith((*MATRICES, ".zarr.zip")) or _is_extension(p)))
    ]
    if not found:
        raise SourceError(f"{folder} holds nothing that can be read; {SUPPORTED} can.")
    return sorted(found, key=str)


def list_left_out(folder: AnyPath, sources: Sequence[AnyPath]) -> list[str]:
    """Return the names of what is in a folder beside its sources and the tables of its matrices, sorted; hidden files are not counted."""
    from raggedatlas.formats.tenx import sample_prefix

    known = {path.name for path in sources}
    tables = (".", *(prefix for path in sources if (prefix := sample_prefix(path))))
    return sorted(path.name for path in folder.iterdir() if path.name not in known and not path.name.startswith(tables))


def _is_extension(path: AnyPath) -> bool:
    # Suffixes of built-in formats are excluded first: the search for wings of other packages takes some 20 ms.
    known = ("", ".zip", *HDF5_ENDINGS, *WRITERS, *(suffix for wing in built_in_wings() for suffix in wing.writers))
    return path.suffix not in known and any(path.suffix in wing.readers for wing in installed_wings())


def detect(path: AnyPath) -> str:
    """Return the format of a path, determined by its structure rather than its name.

    The format of an installed extension is the suffix that it is registered for; suffixes of built-in formats cannot be
    taken over.
    """
    if not isinstance(path, Location):
        # `exists` raises for a name that is too long and for a folder that may not be searched.
        try:
            there = path.exists()
        except OSError as error:
            raise StoreError(f"{path!s:.200}: {failure(error)}") from error
        if not there:
            raise NotFoundError(f"There is no file or folder {path}; check the path.")
    if _is_extension(path):
        return path.suffix
    # Of a remote path the ending decides, which costs no request.
    if isinstance(path, Location) or not path.is_dir():
        if path.suffix in HDF5_ENDINGS:
            return _hdf5_kind(open_hdf5(path), path)
        if path.name.endswith(MATRICES):
            return "10x-mtx"
        if path.suffix == ".zip":
            with readable(str(path), "its structure"), path.open("rb") as file, zipfile.ZipFile(file) as archive:
                names = set(archive.namelist())
            if not names & {"zarr.json", ".zgroup"}:
                raise SourceError(f"{path} holds no zarr.json or .zgroup at its top; {SUPPORTED} can be read.")
            # A remote one is copied, and looked into then.
            return "zarr" if isinstance(path, Location) else _zarr_kind(path)
    if not isinstance(path, Location):
        if not path.is_dir():
            raise SourceError(f"{path} has the ending {path.suffix!r}; {SUPPORTED} can be read.")
        kind = _folder_kind(path)
        if not kind:
            raise SourceError(
                f"{path} is a folder without matrix.mtx, zarr.json, .zgroup or the arrays of a CXG; {SUPPORTED} can be read."
            )
        return _zarr_kind(path) if kind == "zarr" else kind
    if (path / "zarr.json").is_file() or (path / ".zgroup").is_file():
        return _zarr_kind(path)
    if kind := _folder_kind(path):
        return kind
    if path.is_web or not path.exists():
        raise NotFoundError(f"There is no file or folder {path} that can be read; {SUPPORTED} can. Check the address.")
    raise SourceError(f"{path} is no file or folder of cells; {SUPPORTED} can be read.")


def is_copied(path: AnyPath, name: str) -> TypeGuard[Location]:
    """Return whether a path in an object store or on a web server, of a format that `detect` named, is copied before it is read."""
    return isinstance(path, Location) and (path.suffix == ".zip" or name not in BY_RANGES)


def _zarr_kind(path: AnyPath) -> str:
    """Return the format of a Zarr folder or zip file; what cannot be opened is left to the reader, which says why."""
    try:
        container = open_zarr(path)
    except SourceError:
        return "zarr"
    try:
        with readable(container.uri, "its structure"):
            return "h5mu" if _is_mudata(container) else "zarr"
    finally:
        container.close()


def _is_mudata(container: Container) -> bool:
    # `mod` decides only without a declaration: in an AnnData it is an unknown member (A28).
    encoding = attribute(container.root, "encoding-type").lower()
    return encoding == "mudata" or (not encoding and container.get("mod") is not None)


def _hdf5_kind(container: Container, path: AnyPath) -> str:
    """Return the format of an HDF5 file, and close it."""
    try:
        with readable(container.uri, "its structure"):
            if path.suffix == ".h5mu" or _is_mudata(container):
                return "h5mu"
            if path.suffix == ".loom":
                return "loom"
            from raggedatlas.formats.tenx import is_tenx

            # An AnnData has `obs`; what is neither gets the message of the reader of AnnData.
            return "10x-h5" if container.get("obs") is None and is_tenx(container) else "h5ad"
    finally:
        container.close()


def _folder_kind(path: AnyPath) -> str:
    """Return the format of a folder by the names in it, whatever a Zarr folder holds; ``""`` if it is of none."""
    if not path.is_dir():
        return ""
    if (path / "zarr.json").exists() or (path / ".zgroup").exists():
        return "zarr"
    from raggedatlas.formats.soma import is_soma
    from raggedatlas.formats.tenx import market_matrices

    # First, because an experiment has an array `obs` in a group, as a CXG does.
    if is_soma(path):
        return "soma"
    found = ((name, where) for wing in built_in_wings() for name, where in wing.detectors.items())
    return next((name for name, where in found if resolve_name(where)(path)), "") or (
        "10x-mtx" if market_matrices(path) else ""
    )


def _opened(opener: Opener, what: Any, options: dict[str, Any]) -> Source:  # noqa: ANN401
    _check_options(opener, what, options)
    return opener(what, **options)


def _check_options(maker: Callable[..., Any], what: Any, options: dict[str, Any]) -> None:  # noqa: ANN401
    import inspect

    parameters = inspect.signature(maker).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters][1:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        given, mean = ", ".join(f"{name}=..." for name in unknown), "means" if len(unknown) == 1 else "mean"
        raise SourceError(f"{given} {mean} nothing for {what!s:.200}; it takes {', '.join(known) or 'no options'}.")
