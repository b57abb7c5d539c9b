"""What a source holds, as one unit of cells by features for each of its modalities, whatever its format."""

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
    """One matrix of a unit.

    Parameters
    ----------
    key : str
        Where it belongs in an AnnData: ``"X"``, ``"layers/<name>"``, ``"obsp/<name>"``.
    infos : tuple of MatrixInfo
        The matrices of the source that stand in it side by side.
    """

    key: str
    infos: tuple[MatrixInfo, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        first = self.infos[0].shape
        return first if len(self.infos) == 1 else (first[0], sum(info.shape[1] for info in self.infos))


@dataclass(frozen=True, slots=True)
class Modality:
    """One table of cells by features.

    Parameters
    ----------
    name : str
        Of the modality.
    pieces : tuple of ModalityMatrix
        Its matrices.
    elements : mapping of str to callable
        Where it belongs in an AnnData -> reads it whole; ``"obs"``, ``"var"`` and ``"raw/var"`` among them.
    features : callable
        Reads the table of its features, for looking names up.
    cells : (n,) int64 or None
        Which cell of the source each of its rows is; None when row i is cell i.
    """

    name: str
    pieces: tuple[ModalityMatrix, ...]
    elements: Mapping[str, Callable[[], Any]]
    features: Callable[[], pa.Table]
    cells: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class Modalities:
    """All of a source.

    Parameters
    ----------
    units : tuple of Modality
        One per modality.
    pieces : tuple of ModalityMatrix
        Matrices over all cells, of sources with modalities.
    elements : mapping of str to callable
        Elements over all cells, of sources with modalities.
    """

    units: tuple[Modality, ...]
    pieces: tuple[ModalityMatrix, ...] = ()
    elements: Mapping[str, Callable[[], Any]] = field(default_factory=dict)


def split_modalities(source: Source) -> Modalities:
    """Take a source apart into its modalities; one that has none is one unit."""
    schema = source.describe()
    names = dict.fromkeys(key.split("/")[1] for key in _keys(schema) if key.startswith(MOD))
    if names:
        units = tuple(_modality(source, schema, name) for name in names)
        pieces = tuple(ModalityMatrix(i.key, (i,)) for i in _streamed(schema) if not i.key.startswith(MOD))
        return Modalities(units, pieces, _elements(source, schema, ""))
    kinds = [info for info in schema.matrices if info.key.startswith("X:")]
    return Modalities(tuple(_kind(source, (info,)) for info in kinds) if kinds else (_single(source, schema),))


def join_feature_types(source: Source) -> Modality:
    """Take a 10x source of several feature types as one unit, their columns side by side."""
    return _kind(source, tuple(info for info in source.describe().matrices if info.key.startswith("X:")))


def select_modalities(source: Source, modality: str | None, *, multimodal: bool) -> list[Modality]:
    """Take what is asked for of a source: one modality, all of them, or what fits into one AnnData.

    Parameters
    ----------
    source : Source
        What it is of.
    modality : str or None
        Which one; None is all.
    multimodal : bool
        Whether there is room for several; else feature types of a 10x source come side by side.

    Raises
    ------
    NotFoundError
        If there is no such modality.
    SourceError
        If there are several, and room for one.
    """
    whole = split_modalities(source)
    units = list(whole.units)
    names = [unit.name for unit in units]
    if modality is not None:
        if modality not in names:
            raise NotFoundError(f"There is no modality {modality!r}; there are {names}.")
        return [units[names.index(modality)]]
    if multimodal or len(units) == 1:
        return units
    if whole.elements or whole.pieces:
        raise SourceError(
            f"{source.describe().uri or 'The source'} has the modalities {names}, and the target holds one; "
            "choose it with modality=, or write a .h5mu."
        )
    return [join_feature_types(source)]


def _keys(schema: SourceSchema) -> list[str]:
    return [*(info.key for info in (*schema.matrices, *schema.others)), *schema.elements]


def _streamed(schema: SourceSchema) -> list[MatrixInfo]:
    """Return what is read in blocks: all matrices but those that are read whole to keep more of them."""
    return [info for info in (*schema.matrices, *schema.others) if info.key not in schema.elements]


def _elements(source: Source, schema: SourceSchema, prefix: str) -> dict[str, Callable[[], Any]]:
    keys = [key for key in schema.elements if key.startswith(prefix) and (prefix or not key.startswith(MOD))]
    return {key.removeprefix(prefix): ElementReader(source, key) for key in keys}


@dataclass(frozen=True, slots=True)
class ElementReader:
    """Reads one element of a source whole, or opens it to be read column by column.

    Parameters
    ----------
    source : Source
        What it is of.
    key : str
        Which one.
    """

    source: Source
    key: str

    def __call__(self) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Read it whole."""
        return self.source.element(self.key)

    def table(self) -> ColumnTable | None:
        """Open it as a table; None if it is none, or the source reads its tables whole."""
        open_table = getattr(self.source, "table", None)
        return None if open_table is None else open_table(self.key)


def _single(source: Source, schema: SourceSchema) -> Modality:
    space = next((info.space for info in schema.matrices if info.space), "")
    pieces = tuple(ModalityMatrix(info.key, (info,)) for info in _streamed(schema))
    elements: dict[str, Callable[[], Any]] = {"obs": ElementReader(source, "obs"), **_elements(source, schema, "")}
    return _with_features(source, Modality(MODALITIES.get(space, "rna"), pieces, elements, _nothing))


def _modality(source: Source, schema: SourceSchema, name: str) -> Modality:
    prefix = f"{MOD}{name}/"
    pieces = tuple(
        ModalityMatrix(info.key.removeprefix(prefix), (info,))
        for info in _streamed(schema)
        if info.key.startswith(prefix)
    )
    cells = source.present(f"{prefix}obs")
    return _with_features(source, Modality(name, pieces, _elements(source, schema, prefix), _nothing, cells))


def _with_features(source: Source, unit: Modality) -> Modality:
    """Find the tables of features that the matrices of a unit name."""
    elements, main = dict(unit.elements), ""
    for piece in unit.pieces:
        key = piece.infos[0].features
        head = piece.key.split("/")[0]
        if key and head in ("X", "layers"):
            elements.setdefault("var", ElementReader(source, key))
            main = main or key
        elif key and piece.key == "raw/X":
            elements.setdefault("raw/var", ElementReader(source, key))
    if not main and "var" not in elements:
        prefix = f"{MOD}{unit.name}/" if any(p.infos[0].key.startswith(MOD) for p in unit.pieces) else ""
        width = next((p.shape[1] for p in unit.pieces if p.key.split("/")[0] in ("X", "layers")), 0)
        elements["var"] = lambda: _table_or_numbers(source, f"{prefix}var", width)
        main = f"{prefix}var"
    features = (lambda: source.features(main)) if main else _nothing
    return Modality(unit.name, unit.pieces, elements, features, unit.cells)


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
    **options: Any,  # noqa: ANN401  (each format has its own)
) -> "AnnData | MuData":
    """Read a file into memory, without an atlas.

    Parameters
    ----------
    source : path, AnnData, MuData, h5py.File, zarr.Group or Source
        Anything that `open_source` takes: ``.h5ad``, ``.h5mu``, ``.zarr``, ``.zarr.zip``, ``.cxg``, 10x files and folders.
    modality : str, optional
        Which modality of a MuData or feature type of a 10x file; it comes as an AnnData.
    **options
        As of `open_source`.

    Returns
    -------
    anndata.AnnData or mudata.MuData
        Everything that the source holds; a MuData of a source with modalities.

    Raises
    ------
    NotFoundError
        If there is no such file or modality.
    SourceError, LimitError
        If it is of no known kind, damaged, or declares more than may be read.
    MissingExtraError
        If it takes a package that is not installed.

    Examples
    --------
    >>> read("tests/data/pbmc68k_reduced.h5ad").shape
    (300, 765)
    """
    from raggedatlas.formats.registry import open_source

    opened = open_source(source, **options)
    try:
        keys = [info.key for info in opened.describe().matrices]
        if modality is None and any(key.startswith(MOD) for key in (*keys, *opened.describe().elements)):
            return as_mudata(opened)
        return as_anndata(opened, *select_modalities(opened, modality, multimodal=False))
    finally:
        if opened is not source:
            opened.close()


def as_anndata(source: Source, unit: Modality) -> "AnnData":
    """Read one modality of a source whole.

    Parameters
    ----------
    source : Source
        What it is of.
    unit : Modality
        One of `split_modalities`.

    Returns
    -------
    anndata.AnnData
        With everything that the source has of it, matrices in the form that they have.
    """
    from anndata import AnnData

    parts: dict[str, Any] = {"X": None, "obs": None, "var": None, **{group: {} for group in GROUPS}}
    raw: dict[str, Any] = {"varm": {}}
    for key, value in _read(source, unit).items():
        group, _, name = key.partition("/")
        if group == "raw":
            inner, _, name = name.partition("/")
            _put(raw, inner, name, value)
        else:
            _put(parts, group, name, value)
    made = AnnData(**parts)
    if "X" in raw:
        # An AnnData takes raw from another one; only its varm has to be put in.
        made.raw = AnnData(X=raw["X"], obs=made.obs[[]], var=raw["var"], varm=raw["varm"])
    return made


def as_mudata(source: Source) -> "MuData":
    """Read all modalities of a source whole.

    Returns
    -------
    mudata.MuData
        As mudata would read it from a file: tables, maps and axis are those of the source.

    Raises
    ------
    MissingExtraError
        If mudata is not installed.
    """
    units = split_modalities(source)
    n_cells = source.describe().n_cells
    tables: dict[str, Any] = {group: {} for group in (*GROUPS[1:], "obsmap", "varmap")}
    for key, read in units.elements.items():
        group, _, name = key.partition("/")
        _put(tables, group, name, read())
    for piece in units.pieces:
        group, _, name = piece.key.partition("/")
        _put(tables, group, name, source.element(piece.infos[0].key))
    tables.setdefault("obs", source.element("obs"))
    for unit in units.units:
        tables["obsmap"][unit.name] = rows = _map(unit, n_cells)
        tables["obsm"][unit.name] = rows > 0
        if unit.name in tables["varmap"]:
            tables["varm"][unit.name] = np.asarray(tables["varmap"][unit.name]) > 0
    return make_mudata({unit.name: as_anndata(source, unit) for unit in units.units}, tables)


def make_mudata(parts: "dict[str, AnnData]", tables: dict[str, Any]) -> "MuData":
    """Put modalities together.

    Parameters
    ----------
    parts : dict of str to AnnData
        Modality -> its cells.
    tables : dict of str to any
        What stands over all of them: ``"obs"``, ``"obsm"``, ``"uns"``, ...

    Raises
    ------
    MissingExtraError
        If mudata is not installed.
    """
    try:
        import mudata as md
    except ImportError as error:
        raise MissingExtraError(
            "A MuData takes the package mudata; install it with: pip install 'raggedatlas[mudata]'."
        ) from error
    with warnings_as("ignore"):
        # mudata warns of its own use of pandas, and of names that two modalities share, which is no fault here.
        return md.MuData(parts, **tables)


def _map(unit: Modality, n_cells: int) -> NDArray[np.uint32]:
    """Say for each cell which row of a modality it is, counted from 1; 0 where it lacks it."""
    rows = np.zeros(n_cells, np.uint32)
    cells = np.arange(n_cells) if unit.cells is None else unit.cells
    rows[cells] = np.arange(1, len(cells) + 1)
    return rows


def _read(source: Source, unit: Modality) -> dict[str, Any]:
    found = {piece.key: source.element(piece.infos[0].key) for piece in unit.pieces}
    return found | {key: read() for key, read in unit.elements.items()}


def _put(parts: dict[str, Any], group: str, name: str, value: Any) -> None:  # noqa: ANN401
    if name:
        parts[group][name] = value
    else:
        parts[group] = value
