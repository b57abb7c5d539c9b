"""Inspection of an AnnData file: a tree of elements with encodings, shapes, types, chunks, compression and sizes."""

from collections import Counter
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from raggedatlas.formats.anndata.checking import SPARSE, declared_encoding, extent, infer, sparse_shape
from raggedatlas.formats.anndata.file_tree import MAX_DEPTH, Node, disk_bytes, open_tree
from raggedatlas.formats.containers import READ_ERRORS, is_zip
from raggedatlas.model.arguments import checked
from raggedatlas.model.reports import FOLDED, Element, Inspection

HDF5_FILTERS = {
    1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc",
    32004: "lz4", 32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32026: "blosc2",
}  # fmt: skip
"""Registered number of an HDF5 filter -> its name."""

ZARR_METADATA = ("zarr.json", ".zarray", ".zattrs")
"""Names of the files of a Zarr array that hold no values."""

_MAIN = ("data", "codes", "values")


@checked
def inspect(path: str | Path) -> Inspection:
    """Inspect an AnnData or MuData file without reading its values.

    Parameters
    ----------
    path : str or Path
        An HDF5 file or a Zarr folder.

    Returns
    -------
    Inspection
        A tree of elements; those that cannot be opened are included with the reason.

    Raises
    ------
    NotFoundError
        If there is no such file.
    SourceError
        If it is neither HDF5 nor Zarr, or is cut short.

    Examples
    --------
    >>> inspection = inspect("tests/data/pbmc_5k_protein_v3.h5ad")  # doctest: +SKIP
    >>> print(inspection)  # doctest: +SKIP
    """
    path = Path(path)
    with open_tree(path) as root:
        return Inspection(str(path), _store(root), disk_bytes(path), _described(root))


def _store(root: Node) -> str:
    return "HDF5" if root.in_hdf5 else f"Zarr {root.stored.metadata.zarr_format}"


def _described(node: Node) -> Element:
    kind, version = declared_encoding(node)
    encoding = f"{kind} {version}".strip()
    kind = kind or ("" if node.stored is None else infer(node))
    if node.is_array or node.stored is None:
        return _described_array(node, encoding, kind)
    children = tuple(_described(child) for child in node.children.values())
    main = next((child for child in children if child.name in _MAIN), None) if kind in FOLDED else None
    shape = sparse_shape(node) if kind in SPARSE else extent(node)
    return Element(
        node.path, node.name, encoding, kind, shape, "" if main is None else main.dtype,
        None if main is None else main.chunks, None if main is None else main.shards,
        "" if main is None else main.compression, sum(child.n_bytes for child in children),
        sum(child.n_stored for child in children),
        main.shape[0] if kind in SPARSE and main is not None and main.shape else None, node.fault, children,
    )  # fmt: skip


def _described_array(node: Node, encoding: str, kind: str) -> Element:
    if node.stored is None:
        return Element(node.path, node.name, encoding, kind, None, "", None, None, "", 0, 0, None, node.fault, ())
    array = node.stored
    variable = node.text is not None and node.text.variable
    fields = node.dtype.names
    dtype = "text" if variable else str(node.dtype) if fields is None else f"records of {len(fields):,} fields"
    chunks, shards = getattr(array, "chunks", None), getattr(array, "shards", None)
    n_bytes = 0 if variable or node.shape is None else prod(node.shape) * node.dtype.itemsize
    compression = _hdf5_compression(array) if node.in_hdf5 else _zarr_compression(array)
    return Element(
        node.path, node.name, encoding, kind, node.shape, dtype, tuple(chunks) if chunks else None,
        tuple(shards) if shards else None, compression, n_bytes, _stored_bytes(node), None, node.fault, (),
    )  # fmt: skip


def _stored_bytes(node: Node) -> int:
    if node.in_hdf5:
        return int(node.stored.id.get_storage_size())
    if is_zip(Path(node.uri)):
        return _zip_bytes(node.uri, Path(node.uri).stat().st_mtime_ns)[node.path]
    folder = Path(node.uri) / node.path
    files = (path for path in folder.rglob("*") if path.is_file())
    return sum(file.stat().st_size for file in files if file.name not in ZARR_METADATA)


@lru_cache(maxsize=1)
def _zip_bytes(uri: str, changed: int) -> Counter[str]:
    """Return the stored bytes of all values below each folder of a zip file that was changed at a time."""
    del changed  # only tells the cache when to read again
    sizes: Counter[str] = Counter()
    with ZipFile(uri) as archive:
        for member in archive.infolist():
            *folders, name = member.filename.split("/")
            if name not in ZARR_METADATA:
                for depth in range(min(len(folders), MAX_DEPTH) + 1):
                    sizes["/".join(folders[:depth])] += member.compress_size
    return sizes


def _hdf5_compression(array: Any) -> str:  # noqa: ANN401
    plist = array.id.get_create_plist()
    names = []
    for i in range(plist.get_nfilters()):
        code, _, values, label = plist.get_filter(i)
        name = HDF5_FILTERS.get(code) or label.decode(errors="replace") or f"filter {code}"
        names.append(f"{name} {values[0]}" if code == 1 and values else name)
    return " + ".join(names)


def _zarr_compression(array: Any) -> str:  # noqa: ANN401
    try:
        codecs = [*(array.filters or ()), *(array.compressors or ())]
    except READ_ERRORS:
        return ""
    names = [_codec_text(codec) for codec in codecs]
    # These codecs encode text of variable length and compress nothing.
    return " + ".join(name for name in names if name not in ("vlen-utf8", "vlen-bytes"))


def _codec_text(codec: Any) -> str:  # noqa: ANN401
    # Codecs of Zarr format 2 are those of numcodecs, codecs of format 3 those of zarr-python.
    if hasattr(codec, "get_config"):
        settings = dict(codec.get_config())
        name = str(settings.pop("id", ""))
    else:
        config = codec.to_dict()
        name, settings = str(config.get("name", "")), config.get("configuration") or {}
    values = [settings[key] for key in ("cname", "level", "clevel") if settings.get(key) is not None]
    return " ".join(map(str, [name, *values]))
