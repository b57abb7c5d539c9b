"""Split a source of any format into modalities, and read them into AnnData and MuData objects."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError, NotFoundError, SourceError
from raggedatlas.formats.composite_source import SPACES
from raggedatlas.model.arguments import checked
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
    """One matrix of a modality.

    Parameters
    ----------
    key : str
        Key in an AnnData: ``"X"``, ``"layers/<name>"``, ``"obsp/<name>"``.
    infos : tuple of MatrixInfo
        Matrices of the source whose columns are concatenated.
    """

    key: str
    infos: tuple[MatrixInfo, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the concatenated matrix."""
        first = self.infos[0].shape
        return first if len(self.infos) == 1 else (first[0], sum(info.shape[1] for info in self.infos))


@dataclass(frozen=True, slots=True)
class Modality:
    """One modality: the contents of one AnnData.

    Parameters
    ----------
    name : str
        Name of the modality.
    matrices : tuple of ModalityMatrix
        Matrices of the modality.
    elements : mapping of str to callable
        Key in an AnnData -> reads the complete element; includes ``"obs"``, ``"var"`` and ``"raw/var"``.
    features : callable
        Reads the table of features, for looking up names.
    cells : (n,) int64 or None
        Cell of the source that each row belongs to; None if row i is cell i.
    """

    name: str
    matrices: tuple[ModalityMatrix, ...]
    elements: Mapping[str, Callable[[], Any]]
    features: Callable[[], pa.Table]
    cells: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Modalities:
    """All modalities of a source, and what is shared by them.

    Parameters
    ----------
    modalities : tuple of Modality
        One entry per modality.
    matrices : tuple of ModalityMatrix
        Matrices over all cells of a multimodal source.
    elements : mapping of str to callable
        Elements over all cells of a multimodal source.
    """

    modalities: tuple[Modality, ...]
    matrices: tuple[ModalityMatrix, ...] = ()
    elements: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


def split_modalities(source: Source) -> Modalities:
    """Split a source into its modalities; a source without modalities is a single one."""
    schema = source.describe()
    names = dict.fromkeys(key.split("/")[1] for key in _keys(schema) if key.startswith(MOD))
    if names:
        modalities = tuple(_modality(source, schema, name) for name in names)
        matrices = tuple(ModalityMatrix(i.key, (i,)) for i in _streamed(schema) if not i.key.startswith(MOD))
        return Modalities(modalities, matrices, _elements(source, schema, ""))
    kinds = [info for info in schema.matrices if info.key.startswith("X:")]
    return Modalities(tuple(_kind(source, (info,)) for info in kinds) if kinds else (_single(source, schema),))


def is_multimodal(source: Source) -> bool:
    """Return whether a source has modalities, as MuData does."""
    return any(key.startswith(MOD) for key in _keys(source.describe()))


def join_feature_types(source: Source) -> Modality:
    """Return the feature types of a 10x source as one modality, with their columns concatenated."""
    return _kind(source, tuple(info for info in source.describe().matrices if info.key.startswith("X:")))


def select_modalities(source: Source, modality: str | None, *, multimodal: bool) -> list[Modality]:
    """Return the requested modalities of a source: one, all, or all that fit into a single AnnData.

    Parameters
    ----------
    source : Source
        The source.
    modality : str or None
        Name of the modality, or feature type of 10x that it is made of; None is all.
    multimodal : bool
        Whether the target can hold several; if not, the feature types of a 10x source are concatenated.

    Raises
    ------
    NotFoundError
        If there is no such modality.
    SourceError
        If there are several and the target can hold only one.
    """
    whole = split_modalities(source)
    modalities = list(whole.modalities)
    names = [mod.name for mod in modalities]
    if modality is not None:
        # A feature type, "Gene Expression", is another name of the modality that is made of it.
        name = modality if modality in names else MODALITIES.get(SPACES.get(modality, ""), modality)
        if name not in names:
            raise NotFoundError(f"There is no modality {modality!r}; there are {names}.")
        return [modalities[names.index(name)]]
    if multimodal or len(modalities) == 1:
        return modalities
    if whole.elements or whole.matrices:
        raise SourceError(
            f"{source.describe().uri or 'The source'} has the modalities {names}, and the target holds one; "
            "choose it with modality=, or write a .h5mu."
        )
    # These are the feature types of a 10x source, which share their cells; a MuData always has elements.
    return [join_feature_types(source)]


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
    """Reads one element of a source, completely or column by column.

    Parameters
    ----------
    source : Source
        The source.
    key : str
        Key of the element.
    """

    source: Source
    key: str

    def __call__(self) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Read the complete element."""
        return self.source.element(self.key)

    def table(self) -> ColumnTable | None:
        """Open the element as a table; None if it is not one or the source reads tables completely."""
        open_table = getattr(self.source, "table", None)
        return None if open_table is None else open_table(self.key)


def _single(source: Source, schema: SourceSchema) -> Modality:
    space = next((info.space for info in schema.matrices if info.space), "")
    matrices = tuple(ModalityMatrix(info.key, (info,)) for info in _streamed(schema))
    elements: dict[str, Callable[[], Any]] = {"obs": ElementReader(source, "obs"), **_elements(source, schema, "")}
    return _with_features(source, Modality(MODALITIES.get(space, "rna"), matrices, elements, _nothing), "")


def _modality(source: Source, schema: SourceSchema, name: str) -> Modality:
    prefix = f"{MOD}{name}/"
    matrices = tuple(
        ModalityMatrix(info.key.removeprefix(prefix), (info,))
        for info in _streamed(schema)
        if info.key.startswith(prefix)
    )
    cells = source.present(f"{prefix}obs")
    return _with_features(source, Modality(name, matrices, _elements(source, schema, prefix), _nothing, cells), prefix)


def _with_features(source: Source, mod: Modality, prefix: str) -> Modality:
    """Add the tables of features that the matrices of a modality, whose keys start with `prefix`, refer to."""
    elements, main = dict(mod.elements), ""
    for matrix in mod.matrices:
        key = matrix.infos[0].features
        head = matrix.key.split("/")[0]
        if key and head in ("X", "layers"):
            elements.setdefault("var", ElementReader(source, key))
            main = main or key
        elif key and matrix.key == "raw/X":
            elements.setdefault("raw/var", ElementReader(source, key))
    # No matrix refers to features: the file may have `var` nevertheless, otherwise columns are numbered.
    if not main and "var" not in elements:
        width = next((p.shape[1] for p in mod.matrices if p.key.split("/")[0] in ("X", "layers")), 0)
        elements["var"] = lambda: _table_or_numbers(source, f"{prefix}var", width)
        main = f"{prefix}var"
    features = (lambda: source.features(main)) if main else _nothing
    return Modality(mod.name, mod.matrices, elements, features, mod.cells)


def _kind(source: Source, infos: tuple[MatrixInfo, ...]) -> Modality:
    keys = [info.features for info in infos]
    elements: dict[str, Callable[[], Any]] = {"obs": ElementReader(source, "obs")}
    elements["var"] = lambda: _stacked([source.element(key) for key in keys])
    space = SPACES.get(infos[0].key.removeprefix("X:"), "")
    name = MODALITIES.get(space, infos[0].key.removeprefix("X:"))
    return Modality(
        name, (ModalityMatrix("X", infos),), elements, lambda: pa.concat_tables([source.features(key) for key in keys])
    )


def _stacked(frames: list[Any]) -> Any:  # noqa: ANN401  (pandas frames)
    import pandas as pd

    return pd.concat(frames)


def _table_or_numbers(source: Source, key: str, n: int) -> Any:  # noqa: ANN401  (a pandas frame)
    try:
        return source.element(key)
    except NotFoundError:
        return _numbered(n)


def _numbered(n: int) -> Any:  # noqa: ANN401  (a pandas frame)
    import pandas as pd

    return pd.DataFrame(index=pd.Index([str(i) for i in range(n)], dtype=object))


def _nothing() -> pa.Table:
    return pa.table({"_index": pa.array([], pa.string())})


GROUPS = ("layers", "obsm", "varm", "obsp", "varp", "uns")


@checked
def read(
    source: Any,  # noqa: ANN401  (a path, an object or a Source)
    *,
    modality: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    **options: Any,  # noqa: ANN401  (each format has its own)
) -> "AnnData | MuData":
    """Read a file into memory without an atlas.

    Parameters
    ----------
    source : path, AnnData, MuData, h5py.File, zarr.Group or Source
        Anything that `open_source` takes: ``.h5ad``, ``.h5mu``, ``.zarr``, ``.zarr.zip``, ``.cxg``, 10x files and folders, here, in an
        object store or on a web server.
    modality : str, optional
        Modality of a MuData or feature type of a 10x file, by the name of the modality (``"rna"``, ``"prot"``, ``"atac"``) or the feature
        type (``"Gene Expression"``), returned as an AnnData.
    storage_options : mapping of str to str, optional
        Credentials and endpoint of the object store, as of `RaggedAtlas.open`.
    **options
        Passed to `open_source`.

    Returns
    -------
    anndata.AnnData or mudata.MuData
        Contents of the source; a MuData if it has several modalities, as a 10x file with several feature types does.

    Raises
    ------
    NotFoundError
        If there is no such file or modality.
    SourceError, LimitError
        If its kind is unknown, it is damaged, or it declares more than may be read.
    MissingExtraError
        If a required package is not installed.

    Examples
    --------
    >>> read("tests/data/pbmc68k_reduced.h5ad").shape
    (300, 765)
    """
    from raggedatlas.formats.registry import open_source

    opened = open_source(source, storage_options=storage_options, **options)
    try:
        modalities = select_modalities(opened, modality, multimodal=True)
        several = modality is None and (len(modalities) > 1 or is_multimodal(opened))
        return as_mudata(opened) if several else as_anndata(opened, *modalities)
    finally:
        if opened is not source:
            opened.close()


def as_anndata(source: Source, mod: Modality) -> "AnnData":
    """Read one modality of a source into memory.

    Parameters
    ----------
    source : Source
        What it is of.
    mod : Modality
        A modality returned by `split_modalities`.

    Returns
    -------
    anndata.AnnData
        All matrices and elements of the modality, matrices in their stored form.
    """
    from anndata import AnnData

    parts: dict[str, Any] = {"X": None, "obs": None, "var": None, **{group: {} for group in GROUPS}}
    raw: dict[str, Any] = {"varm": {}}
    for key, value in _read(source, mod).items():
        inner = key.removeprefix("raw/")
        _put(parts if inner == key else raw, inner, value)
    made = AnnData(**parts)
    if "X" in raw:
        # AnnData copies raw from another AnnData, except for varm.
        made.raw = AnnData(X=raw["X"], obs=made.obs[[]], var=raw["var"], varm=raw["varm"])
    return made


def as_mudata(source: Source) -> "MuData":
    """Read all modalities of a source into memory.

    Returns
    -------
    mudata.MuData
        As mudata would read it from a file, with the tables, maps and axis of the source.

    Raises
    ------
    MissingExtraError
        If mudata is not installed.
    """
    modalities = split_modalities(source)
    n_cells = source.describe().n_cells
    tables: dict[str, Any] = {group: {} for group in (*GROUPS[1:], "obsmap", "varmap")}
    for key, read in modalities.elements.items():
        _put(tables, key, read())
    for matrix in modalities.matrices:
        _put(tables, matrix.key, source.element(matrix.infos[0].key))
    tables.setdefault("obs", source.element("obs"))
    for mod in modalities.modalities:
        tables["obsmap"][mod.name] = rows = _map(mod, n_cells)
        # MuData also has the masks of the cells and features of each modality, in obsm and varm.
        tables["obsm"][mod.name] = rows > 0
        if mod.name in tables["varmap"]:
            tables["varm"][mod.name] = np.asarray(tables["varmap"][mod.name]) > 0
    return make_mudata({mod.name: as_anndata(source, mod) for mod in modalities.modalities}, tables)


def make_mudata(parts: "dict[str, AnnData]", tables: dict[str, Any]) -> "MuData":
    """Create a MuData from modalities.

    Parameters
    ----------
    parts : dict of str to AnnData
        Name of a modality -> its AnnData.
    tables : dict of str to any
        Elements shared by all modalities: ``"obs"``, ``"obsm"``, ``"uns"``, ...

    Raises
    ------
    MissingExtraError
        If mudata is not installed.
    """
    try:
        import mudata as md
    except ImportError as error:
        raise MissingExtraError(
            "MuData needs the package mudata; install it with: pip install 'raggedatlas[mudata]'."
        ) from error
    with warnings_as("ignore"):
        # mudata warns about its own use of pandas and about names shared by modalities, which is allowed here.
        return md.MuData(parts, **tables)


def _map(mod: Modality, n_cells: int) -> NDArray[np.uint32]:
    """Return for each cell its row in a modality, counted from 1; 0 if it is missing there."""
    rows = np.zeros(n_cells, np.uint32)
    cells = np.arange(n_cells) if mod.cells is None else mod.cells
    rows[cells] = np.arange(1, len(cells) + 1)
    return rows


def _read(source: Source, mod: Modality) -> dict[str, Any]:
    found = {matrix.key: source.element(matrix.infos[0].key) for matrix in mod.matrices}
    for key, read in mod.elements.items():
        found[key] = read()
        refuse_other_names(source, mod.elements, key, found[key])
    return found


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
