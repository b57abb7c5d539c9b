"""Sources as objects in memory: an AnnData of one modality, or a MuData of all."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError
from raggedatlas.formats.modalities import MOD, Modality, select_modalities, split_modalities
from raggedatlas.model.arguments import checked
from raggedatlas.model.contracts import Source
from raggedatlas.store.runtime import warnings_as

if TYPE_CHECKING:
    from anndata import AnnData
    from mudata import MuData

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
