"""Split a source of any format into modalities, and make AnnData and MuData objects of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError, NotFoundError, SourceError
from raggedatlas.formats.composite_source import SPACES, scipy_matrix
from raggedatlas.formats.containers import GROUPS, readable
from raggedatlas.formats.matrix_readers import needs_int64
from raggedatlas.formats.output_files import Appender
from raggedatlas.model.frames import ColumnTable
from raggedatlas.model.protocols import MatrixInfo, Source, SourceSchema
from raggedatlas.store.runtime import warnings_as

if TYPE_CHECKING:
    from anndata import AnnData
    from mudata import MuData

MODALITIES = {"gene_expression": "rna", "protein_abundance": "prot", "chromatin_accessibility": "atac"}
"""Feature space -> what its modality is called where it has no name."""

MOD = "mod/"


@dataclass(frozen=True, slots=True)
class ModalityMatrix:
    """One matrix of a modality."""

    key: str  # in an AnnData: "X", "layers/<name>", "obsp/<name>"
    infos: tuple[MatrixInfo, ...]  # matrices of the source whose columns are concatenated

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the concatenated matrix."""
        first = self.infos[0].shape
        return first if len(self.infos) == 1 else (first[0], sum(info.shape[1] for info in self.infos))


@dataclass(frozen=True, slots=True)
class Modality:
    """One modality: the contents of one AnnData."""

    name: str
    matrices: tuple[ModalityMatrix, ...]
    # Key in an AnnData -> reads the complete element; includes "obs", "var" and "raw/var".
    elements: Mapping[str, Callable[[], Any]]
    features: Callable[[], pa.Table]  # reads the table of features, for looking up names
    cells: NDArray[np.int64] | None = None  # (n,): cell of the source that each row belongs to; None if row i is cell i


@dataclass(frozen=True, slots=True)
class Modalities:
    """All modalities of a source, and what is shared by them."""

    modalities: tuple[Modality, ...]
    matrices: tuple[ModalityMatrix, ...] = ()  # over all cells of a multimodal source
    # As of `Modality`, over all cells of a multimodal source.
    elements: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


def split_modalities(source: Source) -> Modalities:
    """Split a source into its modalities; a source without modalities is a single one."""
    schema = source.describe()
    names = dict.fromkeys(key.split("/")[1] for key in _keys(schema) if key.startswith(MOD))
    if names:
        modalities = tuple(_modality(source, schema, name, f"{MOD}{name}/") for name in names)
        matrices = tuple(ModalityMatrix(i.key, (i,)) for i in _streamed(schema) if not i.key.startswith(MOD))
        return Modalities(modalities, matrices, _elements(source, schema, ""))
    kinds = [info for info in schema.matrices if info.key.startswith("X:")]
    if kinds:
        return Modalities(tuple(_join_kinds(source, (info,)) for info in kinds))
    space = next((info.space for info in schema.matrices if info.space), "")
    return Modalities((_modality(source, schema, MODALITIES.get(space, "rna"), ""),))


def is_multimodal(source: Source) -> bool:
    """Return whether a source has modalities, as MuData does."""
    return any(key.startswith(MOD) for key in _keys(source.describe()))


def select_modalities(source: Source, split: Modalities, modality: str | None, *, multimodal: bool) -> list[Modality]:
    """Return the requested modalities of a source, of which `split` has all: one, all, or all that fit into a single AnnData.

    `modality` is its name, or the feature type of 10x that it is made of; None is all. Unless the target is
    `multimodal`, the feature types of a 10x source are concatenated, and several modalities of any other source
    refused.
    """
    modalities = list(split.modalities)
    names = [mod.name for mod in modalities]
    if modality is not None:
        # A feature type, "Gene Expression", is another name of the modality that is made of it.
        name = modality if modality in names else MODALITIES.get(SPACES.get(modality, ""), modality)
        if name not in names:
            raise NotFoundError(f"There is no modality {modality!r}; there are {names}.")
        return [modalities[names.index(name)]]
    if multimodal or len(modalities) == 1:
        return modalities
    if split.elements or split.matrices:
        raise SourceError(
            f"{source.describe().uri or 'The source'} has the modalities {names}, and the target holds one; "
            "choose it with modality=..., or write a .h5mu."
        )
    # These are the feature types of a 10x source, which share their cells; a MuData always has elements.
    return [_join_kinds(source, tuple(info for info in source.describe().matrices if info.key.startswith("X:")))]


def _keys(schema: SourceSchema) -> list[str]:
    return [*(info.key for info in (*schema.matrices, *schema.others)), *schema.elements]


def _streamed(schema: SourceSchema) -> list[MatrixInfo]:
    """Return the matrices that are read in blocks: all but those that are also elements, which are read completely."""
    return [info for info in (*schema.matrices, *schema.others) if info.key not in schema.elements]


def _elements(source: Source, schema: SourceSchema, prefix: str) -> dict[str, Callable[[], Any]]:
    keys = [key for key in schema.elements if key.startswith(prefix) and (prefix or not key.startswith(MOD))]
    return {key.removeprefix(prefix): ElementReader(source, key) for key in keys}


@dataclass(frozen=True, slots=True)
class ElementReader:
    """Reads one element of a source, completely or column by column."""

    source: Source
    key: str

    def __call__(self) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Read the complete element."""
        return self.source.element(self.key)

    def table(self) -> ColumnTable | None:
        """Open the element as a table; None if it is not one or the source reads tables completely."""
        open_table = getattr(self.source, "table", None)
        return None if open_table is None else open_table(self.key)


def _modality(source: Source, schema: SourceSchema, name: str, prefix: str) -> Modality:
    """Return the modality whose keys start with `prefix`, or the only one of a source, whose keys have none."""
    matrices = tuple(
        ModalityMatrix(info.key.removeprefix(prefix), (info,))
        for info in _streamed(schema)
        if info.key.startswith(prefix)
    )
    elements: dict[str, Callable[[], Any]] = {} if prefix else {"obs": ElementReader(source, "obs")}
    elements |= _elements(source, schema, prefix)
    main = ""
    for matrix in matrices:
        key = matrix.infos[0].features
        head = matrix.key.split("/")[0]
        if key and head in ("X", "layers"):
            elements.setdefault("var", ElementReader(source, key))
            main = main or key
        elif key and matrix.key == "raw/X":
            elements.setdefault("raw/var", ElementReader(source, key))
    # No matrix refers to features: the file may have `var` nevertheless, otherwise columns are numbered.
    if not main and "var" not in elements:
        width = next((p.shape[1] for p in matrices if p.key.split("/")[0] in ("X", "layers")), 0)
        main = f"{prefix}var"

        def table_or_numbers() -> Any:  # noqa: ANN401  (a pandas frame)
            try:
                return source.element(main)
            except NotFoundError:
                import pandas as pd

                return pd.DataFrame(index=pd.Index([str(i) for i in range(width)], dtype=str))

        elements["var"] = table_or_numbers

    def features() -> pa.Table:
        return source.features(main) if main else pa.table({"_index": pa.array([], pa.string())})

    return Modality(name, matrices, elements, features, source.present(f"{prefix}obs") if prefix else None)


def _join_kinds(source: Source, infos: tuple[MatrixInfo, ...]) -> Modality:
    """Return feature types of a 10x source as one modality, with their columns concatenated."""
    keys = [info.features for info in infos]
    elements: dict[str, Callable[[], Any]] = {"obs": ElementReader(source, "obs")}

    def stacked() -> Any:  # noqa: ANN401  (a pandas frame)
        import pandas as pd

        return pd.concat([source.element(key) for key in keys])

    elements["var"] = stacked
    space = SPACES.get(infos[0].key.removeprefix("X:"), "")
    name = MODALITIES.get(space, infos[0].key.removeprefix("X:"))
    return Modality(
        name, (ModalityMatrix("X", infos),), elements, lambda: pa.concat_tables([source.features(key) for key in keys])
    )


class MemoryOutput:
    """An object in memory, written as files are; `made` is the AnnData or MuData once it is published.

    It takes any name, and elements as they are read. `uri` is what is read, for messages.
    """

    in_memory = True
    made: Any = None

    def __init__(self, uri: str) -> None:
        self.path = Path(uri or "memory")
        self._nodes: dict[str, _Node] = {}
        self._elements: dict[str, Any] = {}

    def group(self, path: str, encoding: tuple[str, str] | None = None) -> "_Node":
        """Return a group, created if necessary, with these encoding attributes."""
        made = self._nodes.setdefault(path, _Node(path))
        made.attrs |= {} if encoding is None else {"encoding-type": encoding[0]}
        return made

    def array(self, path: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> Appender:
        """Create an array to append to."""
        self._nodes[path] = made = _Array(path, dtype, shape)
        return Appender(made, 1, grows=shape is None)

    def element(self, path: str, value: Any) -> None:  # noqa: ANN401
        """Keep a complete element."""
        self._elements[path] = value

    def publish(self, header: bytes, check: Callable[[Path], None]) -> None:
        """Make the object."""
        del header, check
        values: dict[str, Any] = {}
        for path, node in self._nodes.items():
            form = node.attrs.get("encoding-type", "").removesuffix("_matrix")
            if isinstance(node, _Array) and form:
                values[path] = node.values()
            elif form in ("csr", "csc"):
                csr = tuple(self._nodes[f"{path}/{name}"].values() for name in ("data", "indices", "indptr"))
                shape = tuple(node.attrs["shape"].tolist())
                values[path] = scipy_matrix(form, csr, shape, needs_int64(csr[2], csr[1]))
        values |= self._elements
        with readable(str(self.path), "the object that its elements make"):
            if "mod" not in self._nodes:
                self.made = make_anndata(values)
                return
            parts: dict[str, dict[str, Any]] = {name: {} for name in self._nodes["mod"].attrs["mod-order"]}
            tables: dict[str, Any] = {group: {} for group in (*GROUPS[1:], "obsmap", "varmap")}
            for key, value in values.items():
                if key.startswith(MOD):
                    _, name, inner = key.split("/", 2)
                    parts[name][inner] = value
                else:
                    _put(tables, key, value)
            made = {name: make_anndata(inner) for name, inner in parts.items()}
            self.made = make_mudata(made, {**tables, "axis": self._nodes[""].attrs["axis"]})

    def discard(self) -> None:
        """Forget what was kept."""
        self._nodes, self._elements = {}, {}


class _Node:
    """A group, with the attributes that say what it encodes."""

    def __init__(self, name: str) -> None:
        self.name, self.attrs = name, dict[str, Any]()

    def values(self) -> NDArray[Any]:
        raise SourceError(f"The element {self.name!r} is a group where an array is expected.")


class _Array(_Node):
    """An array that an `Appender` fills; one without a shape keeps what comes, in one piece after the other."""

    def __init__(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...] | None) -> None:
        super().__init__(name)
        self.shape = (0,) if shape is None else shape
        self._pieces = [np.empty(self.shape, dtype)]
        self._grows = shape is None

    def resize(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __setitem__(self, rows: slice, values: NDArray[Any]) -> None:
        if self._grows:
            self._pieces.append(values.copy())
        else:
            self._pieces[0][rows] = values

    def values(self) -> NDArray[Any]:
        return np.concatenate(self._pieces) if self._grows else self._pieces[0]


def make_anndata(values: Mapping[str, Any]) -> "AnnData":
    """Create an AnnData from its matrices and elements by key; `raw` is what the keys below ``"raw/"`` make."""
    from anndata import AnnData

    parts: dict[str, Any] = {"X": None, "obs": None, "var": None, **{group: {} for group in GROUPS}}
    raw: dict[str, Any] = {"varm": {}}
    for key, value in values.items():
        inner = key.removeprefix("raw/")
        _put(parts if inner == key else raw, inner, value)
    made = AnnData(**parts)
    if "X" in raw:
        # AnnData copies raw from another AnnData, except for varm.
        made.raw = AnnData(X=raw["X"], obs=made.obs[[]], var=raw["var"], varm=raw["varm"])
    return made


def make_mudata(parts: "dict[str, AnnData]", tables: dict[str, Any]) -> "MuData":
    """Create a MuData from modalities; `tables` are the elements shared by all of them: ``"obs"``, ``"obsm"``, ``"uns"``, ..."""
    try:
        import mudata as md
    except ImportError as error:
        raise MissingExtraError(
            "MuData needs the package mudata; install it with: pip install 'raggedatlas[mudata]'."
        ) from error
    with warnings_as("ignore"):
        # mudata warns about its own use of pandas and about names shared by modalities, which is allowed here.
        return md.MuData(parts, **tables)


def refuse_other_names(
    source: Source,
    readers: Mapping[str, Callable[[], Any]],
    key: str,
    value: Any,  # noqa: ANN401  (any element that AnnData knows)
) -> None:
    """Raise for a frame in obsm or varm whose row names differ from those of its axis, which AnnData does not allow."""
    axis = {"obsm": "obs", "varm": "var"}.get(key.partition("/")[0])
    own = getattr(value, "index", None)
    if axis is None or axis not in readers or own is None or not hasattr(value, "columns"):
        return
    read = readers[axis]
    table = read.table() if isinstance(read, ElementReader) else None
    # Only the names are read from a table that can be read column by column.
    names = read().index if table is None else ColumnTable(len(table), table.index, ()).frame().index
    if len(own) == len(names) and not (own == names).all():
        row = int((own != names).argmax())
        raise SourceError(
            f"{source.describe().uri}: {key} has the name {own[row]!r} in row {row:,}, where {axis} has {names[row]!r}; frames of {axis}m "
            f"have the names of {axis}. Write it again with those, or leave it out."
        )


def _put(parts: dict[str, Any], key: str, value: Any) -> None:  # noqa: ANN401
    group, slash, name = key.partition("/")
    if slash:  # the name of a member may be empty
        parts[group][name] = value
    else:
        parts[group] = value
