"""Pack elements of any type into one zip file: a tree in JSON, arrays as `.npy`, tables as Arrow, never pickle."""

import io
import json
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, MissingExtraError, SchemaError
from raggedatlas.model.frames import ColumnFacts, arrow_to_frame, arrow_to_series, facts_of, frame_to_arrow

TREE = "tree.json"
PLAIN = (type(None), bool, int, float, str)
"""Values that stand in the tree itself."""

_ANNDATA = ("X", "obs", "var", "layers", "obsm", "varm", "obsp", "varp", "uns")
_DAMAGED = (
    *(KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, MemoryError, RuntimeError, EOFError),
    *(OSError, zipfile.BadZipFile, zlib.error, tokenize.TokenError, pa.ArrowException),
)
"""What zipfile, json, NumPy, SciPy, pandas and Arrow raise for damaged bytes, besides `numpy.ma.MAError`."""


def pack(elements: Mapping[str, Any]) -> bytes:
    """Pack elements so that `unpack` returns equal ones, with the same types and order of keys.

    Parameters
    ----------
    elements : mapping of str to any
        Key -> mappings with text keys, lists, tuples, numbers, text, None, NumPy arrays and scalars (masked, structured and of text
        too), CSR and CSC matrices, pandas frames, categoricals and nullable arrays, awkward arrays, AnnData objects.

    Returns
    -------
    bytes
        The file.

    Raises
    ------
    SchemaError
        If something of another kind is in there, or a table that would come back changed; the message names it.

    Examples
    --------
    >>> unpack(pack({"uns/a": {"odd/name": [1, None, 0.5]}}))
    {'uns/a': {'odd/name': [1, None, 0.5]}}
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        packer = _Packer(archive)
        tree = {key: packer.node(key, value) for key, value in elements.items()}
        archive.writestr(TREE, json.dumps(tree))
    return buffer.getvalue()


def unpack(data: bytes, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """Unpack elements written by `pack`.

    Parameters
    ----------
    data : bytes
        The file.
    keys : iterable of str, optional
        Which elements; all by default.

    Raises
    ------
    CorruptError
        If the bytes are not what was written.
    KeyError
        If there is no such element.
    MissingExtraError
        If an element takes a package that is not installed.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            tree = json.loads(archive.read(TREE))
            wanted = tree if keys is None else {key: tree[key] for key in keys if key in tree}
            return {key: _value(archive, node) for key, node in wanted.items()}
    except (*_DAMAGED, np.ma.MAError) as error:  # evaluated here, since numpy.ma is slow to import
        raise CorruptError(
            f"The kept elements of the dataset cannot be read ({error}); put the file back from a copy."
        ) from error


class _Packer:
    """Turns values into nodes of the tree; what is large goes into members of the archive."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, self._n = archive, 0

    def node(self, path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401
        # By exact type: `np.float64` is a `float`, and as a plain value would lose its type.
        if type(value) in PLAIN:
            return {"is": "value", "value": value}
        for kind, (fits, make) in _ENCODERS.items():
            if fits(value):
                return {"is": kind, **make(self, path, value)}
        raise SchemaError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which AnnData files cannot hold; convert it, remove "
            "it, or leave it out with extras=[...]."
        )

    def member(self, data: bytes | memoryview) -> str:
        """Put bytes into the archive, and return their name."""
        name, self._n = str(self._n), self._n + 1
        self._archive.writestr(name, bytes(data))
        return name

    def mapping(self, path: str, value: Mapping[Any, Any]) -> dict[str, Any]:
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise SchemaError(
                f"{path} has the key {odd[0]!r}, which is no text; AnnData files cannot hold it. Rename it."
            )
        return {"items": [[str(key), self.node(f"{path}/{key}", inner)] for key, inner in value.items()]}

    def sequence(self, path: str, value: list[Any] | tuple[Any, ...]) -> dict[str, Any]:
        return {"items": [self.node(f"{path}/{i}", inner) for i, inner in enumerate(value)]}

    def array(self, path: str, value: NDArray[Any]) -> dict[str, Any]:
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.asarray(value), allow_pickle=False)
        return {"at": self.member(buffer.getbuffer()), "records": isinstance(value, np.recarray)}

    def masked(self, path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"data": self.node(path, value.data), "mask": self.node(path, np.ma.getmaskarray(value))}

    def texts(self, path: str, value: NDArray[Any]) -> dict[str, Any]:
        flat = value.reshape(-1).astype(object).tolist()
        odd = [inner for inner in flat if type(inner) not in PLAIN]
        if odd:
            raise SchemaError(
                f"{path} is an array that holds {type(odd[0]).__qualname__}, which AnnData files cannot hold; convert or remove it."
            )
        kind = "object" if value.dtype == object else "text"
        return {"at": self.member(json.dumps(flat).encode()), "shape": value.shape, "dtype": kind}

    def records(self, path: str, value: NDArray[Any]) -> dict[str, Any]:
        fields = {name: self.node(f"{path}/{name}", value[name]) for name in value.dtype.names or ()}
        return {"fields": fields, "shape": value.shape, "records": isinstance(value, np.recarray)}

    def frame(self, path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401
        import pandas as pd

        try:
            table = frame_to_arrow(pd.DataFrame(value))
            back = arrow_to_frame(table)
            # Names of columns are text; which of its dtypes for text pandas has them in does not matter.
            pd.testing.assert_frame_equal(back, pd.DataFrame(value), check_column_type=False)
        except (SchemaError, AssertionError, pa.ArrowException, TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise SchemaError(
                f"{path} is a table that cannot be kept as it is ({reason}); convert the column, or leave it out with extras=[...]."
            ) from error
        # Arrow has no ranges, and `assert_frame_equal` takes equal int64 numbers for a `RangeIndex`.
        ranged = isinstance(value.index, pd.RangeIndex)
        return {
            "at": self.member(_ipc(table)),
            "index": [value.index.start, value.index.stop, value.index.step] if ranged else None,
            "no_columns": ""
            if len(value.columns) or isinstance(value.columns, pd.RangeIndex)
            else str(value.columns.dtype),
        }

    def column(self, path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401
        import pandas as pd

        return self.frame(path, pd.DataFrame({"values": value}))

    def sparse(self, path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401
        parts = {name: self.node(path, getattr(value, name)) for name in ("data", "indices", "indptr")}
        return {"class": type(value).__name__, "shape": value.shape, **parts}

    def awkward(self, path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401
        ak = _awkward()
        form, length, buffers = ak.to_buffers(ak.to_packed(value))
        kept = {name: self.node(path, np.asarray(buffer)) for name, buffer in buffers.items()}
        return {"form": form.to_json(), "length": length, "buffers": kept}

    def anndata(self, path: str, value: Any) -> dict[str, Any]:  # noqa: ANN401
        if value.raw is not None:
            raise SchemaError(f"{path} is an AnnData with raw within another one; set its raw to None, or remove it.")
        parts = {name: getattr(value, name) for name in _ANNDATA}
        # Since anndata 0.13 the layers contain X under None.
        parts["layers"] = {name: layer for name, layer in value.layers.items() if name is not None}
        return {"parts": {name: self.node(f"{path}/{name}", part) for name, part in parts.items()}}


def _is(module: str, *names: str) -> Callable[[Any], bool]:
    """Recognise a class of a library without importing it."""

    def fits(value: Any) -> bool:  # noqa: ANN401
        return any(
            kind.__module__.partition(".")[0] == module and kind.__name__ in names for kind in type(value).__mro__
        )

    return fits


def _holds_objects(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, np.ndarray) and bool(value.dtype.names) and value.dtype.hasobject


def _holds_texts(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, np.ndarray) and value.dtype.kind in "OT"


_ENCODERS: dict[str, tuple[Callable[[Any], bool], Callable[[_Packer, str, Any], dict[str, Any]]]] = {
    "dict": (lambda value: isinstance(value, Mapping), _Packer.mapping),
    "list": (lambda value: type(value) is list, _Packer.sequence),
    "tuple": (lambda value: type(value) is tuple, _Packer.sequence),
    "complex": (lambda value: type(value) is complex, lambda _, path, value: {"parts": [value.real, value.imag]}),
    "bytes": (lambda value: type(value) is bytes, lambda packer, _, value: {"at": packer.member(value)}),
    "scalar": (lambda value: isinstance(value, np.generic) and not value.dtype.hasobject, _Packer.array),
    # These three are ndarrays too: `array` would drop the mask, and refuse objects, which `.npy` pickles.
    "masked": (lambda value: isinstance(value, np.ma.MaskedArray), _Packer.masked),
    "records": (_holds_objects, _Packer.records),
    "texts": (_holds_texts, _Packer.texts),
    "array": (lambda value: isinstance(value, np.ndarray), _Packer.array),
    "frame": (_is("pandas", "DataFrame"), _Packer.frame),
    "column": (_is("pandas", "Categorical", "BaseMaskedArray", "BaseStringArray"), _Packer.column),
    "sparse": (_is("scipy", "csr_matrix", "csc_matrix", "csr_array", "csc_array"), _Packer.sparse),
    "awkward": (_is("awkward", "Array"), _Packer.awkward),
    "anndata": (_is("anndata", "AnnData"), _Packer.anndata),
}
"""Kind of node -> whether a value is one, and what makes it; the first that fits."""


def _value(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    decoder = _DECODERS.get(node["is"])
    if decoder is None:
        raise CorruptError(f"There is no kind of element {node['is']!r}; a newer version of this package wrote it.")
    return decoder(archive, node)


def _read_array(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    values = np.lib.format.read_array(io.BytesIO(archive.read(node["at"])), allow_pickle=False)
    return values.view(np.recarray) if node.get("records") else values


def _read_texts(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    listed = json.loads(archive.read(node["at"]))
    values = np.empty(len(listed), object)
    values[:] = listed
    made: NDArray[Any] = values if node["dtype"] == "object" else values.astype(np.dtypes.StringDType())
    return made.reshape(node["shape"])


def _read_records(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    fields = {name: _value(archive, inner) for name, inner in node["fields"].items()}
    shape = tuple(node["shape"])
    # Without this check the assignment below would broadcast a damaged field of shape (1,) to all records.
    if any(part.shape[: len(shape)] != shape for part in fields.values()):
        raise CorruptError(f"An array of records has the shape {shape}, and fields of another.")
    dtype: Any = [(name, part.dtype, part.shape[len(shape) :]) for name, part in fields.items()]
    made = np.empty(shape, dtype)
    for name, part in fields.items():
        made[name] = part
    return made.view(np.recarray) if node["records"] else made


def _read_table(archive: zipfile.ZipFile, node: dict[str, Any]) -> pa.Table:
    with pa.ipc.open_file(pa.BufferReader(archive.read(node["at"]))) as reader:
        return reader.read_all()


def _read_frame(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    import pandas as pd

    frame = arrow_to_frame(_read_table(archive, node))
    if node["index"] is not None:
        start, stop, step = node["index"]
        frame.index = pd.RangeIndex(start, stop, step, name=frame.index.name)
    if node["no_columns"]:
        frame.columns = pd.Index([], dtype=node["no_columns"])
    return frame


def _read_column(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    table = _read_table(archive, node)
    facts = facts_of(table.schema.field("values")) or ColumnFacts("values", "")
    return arrow_to_series(table.column("values"), facts).array


def _read_sparse(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    import scipy.sparse as sp

    parts = tuple(_value(archive, node[name]) for name in ("data", "indices", "indptr"))
    kinds = {kind.__name__: kind for kind in (sp.csr_matrix, sp.csc_matrix, sp.csr_array, sp.csc_array)}
    made = kinds[node["class"]](parts, shape=tuple(node["shape"]))
    # The constructor does not check indices, and SciPy's compiled loops read memory by them.
    made.check_format()
    return made


def _read_awkward(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    buffers = {name: _value(archive, inner) for name, inner in node["buffers"].items()}
    return _awkward().from_buffers(node["form"], node["length"], buffers)


def _read_anndata(archive: zipfile.ZipFile, node: dict[str, Any]) -> Any:  # noqa: ANN401
    from anndata import AnnData

    return AnnData(**{name: _value(archive, inner) for name, inner in node["parts"].items()})


_DECODERS: dict[str, Callable[[zipfile.ZipFile, dict[str, Any]], Any]] = {
    "value": lambda _, node: node["value"],
    "dict": lambda archive, node: {key: _value(archive, inner) for key, inner in node["items"]},
    "list": lambda archive, node: [_value(archive, inner) for inner in node["items"]],
    "tuple": lambda archive, node: tuple(_value(archive, inner) for inner in node["items"]),
    "complex": lambda _, node: complex(*node["parts"]),
    "bytes": lambda archive, node: archive.read(node["at"]),
    "scalar": lambda archive, node: _read_array(archive, node)[()],
    "masked": lambda archive, node: np.ma.MaskedArray(_value(archive, node["data"]), _value(archive, node["mask"])),
    "records": _read_records,
    "texts": _read_texts,
    "array": _read_array,
    "frame": _read_frame,
    "column": _read_column,
    "sparse": _read_sparse,
    "awkward": _read_awkward,
    "anndata": _read_anndata,
}


def _ipc(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return memoryview(sink.getvalue())


def _awkward() -> Any:  # noqa: ANN401  (a module)
    try:
        import awkward
    except ImportError as error:
        raise MissingExtraError(
            "An element holds records of varying length, which take a package; install raggedatlas[awkward]."
        ) from error
    return awkward
