"""MuData as a source: `.h5mu` files and Zarr folders without its package, and objects in memory."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.anndata.elements import frame_length, open_table, read_element, read_frame
from raggedatlas.formats.anndata.source import (
    describe_node,
    describe_value,
    read_object_parts,
    read_stored_parts,
    sound,
)
from raggedatlas.formats.composite_source import CompositeSource, MatrixPart, SourceParts, open_composite
from raggedatlas.formats.containers import (
    MAX_ELEMENT_BYTES,
    Container,
    attribute,
    check_elements,
    decode_texts,
    is_array,
    is_tree,
    open_hdf5,
    open_zarr,
)
from raggedatlas.formats.element_writer import is_nested
from raggedatlas.formats.matrix_readers import NUMBER_KINDS, DenseRows, MatrixLocation
from raggedatlas.store.location import AnyPath

if TYPE_CHECKING:
    import pandas as pd

SPACES = {
    "rna": "gene_expression",
    "gex": "gene_expression",
    "adt": "protein_abundance",
    "prot": "protein_abundance",
    "protein": "protein_abundance",
    "atac": "chromatin_accessibility",
}
"""Usual modality name -> feature space; other modalities leave the choice to the caller."""


def mudata_source(path: AnyPath, *, max_element_bytes: int = MAX_ELEMENT_BYTES) -> CompositeSource:
    """Open an `.h5mu` file or MuData-Zarr folder: one cell per row of the global `obs`, keys such as ``"mod/rna/X"``.

    Raises `SourceError` if its modalities do not fit its `obsmap`; `LimitError` also if elements outside of matrices
    declare more than `max_element_bytes`.
    """
    container = open_zarr(path) if is_tree(path) else open_hdf5(path)
    return open_composite(container, partial(_read_parts, limit=max_element_bytes), path, "h5mu")


def mudata_object_source(mdata: Any) -> CompositeSource:  # noqa: ANN401  (a MuData, whose package is optional)
    """Open a MuData in memory as a source."""
    mods: dict[str, SourceParts] = {}
    left_out: dict[str, str] = {}
    for name, part in mdata.mod.items():
        if type(part).__name__ == "MuData":
            left_out[f"mod/{name}"] = "a MuData within a MuData"
        else:
            mods[name] = read_object_parts(part)
    if nested := [name for name in mdata.mod if is_nested(name)]:
        raise SourceError(
            f"The MuData in memory has the modality {nested[0]!r}, which files take for groups within groups; rename it."
        )
    matrices = []
    elements: dict[str, Callable[[], Any]] = {"var": lambda: mdata.var}
    for key, value in mdata.obsm.items():
        if (
            isinstance(value, np.ndarray)
            and value.ndim > 1
            and value.dtype.kind in NUMBER_KINDS
            and key not in mdata.mod
        ):
            place = MatrixLocation("the MuData in memory", f"obsm/{key}", lambda row: str(mdata.obs_names[row]))
            matrices.append(MatrixPart.of(f"obsm/{key}", DenseRows(value, place)))
        elif key not in mdata.mod:
            left_out[f"obsm/{key}"] = describe_value(value)
            elements[f"obsm/{key}"] = partial(sound, f"obsm/{key}", value)
    elements |= {f"varmap/{name}": partial(lambda held: held, value) for name, value in mdata.varmap.items()}
    elements |= {"axis": lambda: mdata.axis} if mdata.axis else {}
    for group in ("obsp", "varp", "uns", "varm"):
        for key, value in getattr(mdata, group).items():
            if key not in mdata.mod:
                left_out[f"{group}/{key}"] = describe_value(value)
                elements[f"{group}/{key}"] = partial(sound, f"{group}/{key}", value)
    whole = SourceParts(mdata.n_obs, lambda: mdata.obs, tuple(matrices), {}, left_out, elements=elements)
    # Matched by name, because the obsmap of a view still refers to the rows of its parent.
    return CompositeSource(_joined(whole, mods, {}, "the MuData in memory"), name="mudata", uri="", format="mudata")


def _read_parts(container: Container, limit: int) -> SourceParts:
    if container.get("mod") is None:
        raise SourceError(f"{container.uri}: there is no group 'mod'; it is no MuData.")
    n_cells = frame_length(container, "obs")
    if n_cells is None:
        raise SourceError(f"{container.uri}: there is no table of cells (obs); it is no MuData.")
    mods: dict[str, SourceParts] = {}
    left_out: dict[str, str] = {}
    names = list(container.names("mod"))
    stated = container.get("mod").attrs.get("mod-order", [])
    order = decode_texts(np.atleast_1d(stated), f"{container.uri}: mod-order of mod")
    # An outdated `mod-order` would hide a modality or name one that does not exist.
    for name in order if sorted(order) == names else names:
        if attribute(container.get(f"mod/{name}"), "encoding-type") == "MuData":
            left_out[f"mod/{name}"] = "a MuData within a MuData"
        else:
            mods[name] = read_stored_parts(container, f"mod/{name}/", limit)

    def read_beside(key: str) -> Any:  # noqa: ANN401  (any member of obsm)
        value = read_element(container, key)
        n_rows = getattr(value, "shape", (n_cells,))[0]
        if n_rows != n_cells:
            raise SourceError(
                f"{container.uri}: {key} has {n_rows:,} rows, but there are {n_cells:,} cells; write it again, or leave it out."
            )
        return value

    maps = {m: container.whole(f"obsmap/{m}", n_cells) for m in mods if container.get(f"obsmap/{m}") is not None}
    matrices = []
    elements: dict[str, Callable[[], Any]] = {}
    for key in [k for k in container.names("obsm") if k not in mods]:
        node = container.get(f"obsm/{key}")
        if (
            is_array(node)
            and node.shape
            and len(node.shape) > 1
            and node.dtype.kind in NUMBER_KINDS
            and node.shape[0] == n_cells
        ):
            place = MatrixLocation(
                container.uri, f"obsm/{key}", lambda row: str(read_frame(container, "obs").index[row])
            )
            matrices.append(MatrixPart.of(f"obsm/{key}", DenseRows(node, place)))
        else:
            left_out[f"obsm/{key}"] = describe_node(node)
            elements[f"obsm/{key}"] = partial(read_beside, f"obsm/{key}")
    if frame_length(container, "var") is not None:
        elements["var"] = partial(read_frame, container, "var")
    elements |= {f"varmap/{m}": partial(container.whole, f"varmap/{m}") for m in container.names("varmap")}
    axis = str(container.root.attrs.get("axis", 0))
    elements |= {"axis": lambda: int(axis)} if axis in ("1", "-1") else {}
    for group in ("obsp", "varp", "uns", "varm"):
        for key in [k for k in container.names(group) if k not in mods]:
            left_out[f"{group}/{key}"] = describe_node(container.get(f"{group}/{key}"))
            elements[f"{group}/{key}"] = partial(read_element, container, f"{group}/{key}")
    check_elements(container, elements, limit)
    tables = {"obs": partial(open_table, container, "obs")}
    whole = SourceParts(
        n_cells, partial(read_frame, container, "obs"), tuple(matrices), {}, left_out, elements=elements, tables=tables
    )
    return _joined(whole, mods, maps, container.uri)


def _joined(whole: SourceParts, mods: Mapping[str, SourceParts], maps: Mapping[str, Any], uri: str) -> SourceParts:
    cells_of = {name: _cells_of(name, part, whole, maps.get(name), uri) for name, part in mods.items()}
    matrices = list(whole.matrices)
    present: dict[str, NDArray[np.int64]] = {}
    features: dict[str, Callable[[], pd.DataFrame]] = {}
    left_out = dict(whole.left_out)
    # The tables of the modalities, in addition to the joined one.
    elements = {"obs": whole.cells, **whole.elements}
    tables = dict(whole.tables)
    others: list[MatrixPart] = []
    for name, part in mods.items():
        # Feature types take precedence over the name of the modality.
        named = tuple(
            replace(matrix, info=replace(matrix.info, space=SPACES.get(name.lower(), "")))
            if matrix.info.space == "gene_expression"
            else matrix
            for matrix in part.matrices
        )
        placed = replace(part, matrices=named).under(f"mod/{name}/")
        elements |= {f"mod/{name}/obs": part.cells, **placed.elements}
        others += placed.others
        matrices += placed.matrices
        features |= placed.features
        left_out |= placed.left_out
        tables |= placed.tables
        if not placed.matrices:
            left_out[f"mod/{name}"] = "modality without a matrix"
        present[f"mod/{name}/obs"] = cells_of[name]
        if not np.array_equal(cells_of[name], np.arange(whole.n_cells)):
            present |= {p.info.key: cells_of[name] for p in placed.matrices}
    cells = partial(_cells, whole, mods, cells_of)
    return SourceParts(
        whole.n_cells, cells, tuple(matrices), features, left_out, present, tuple(others), elements, tables
    )


def _cells_of(name: str, part: SourceParts, whole: SourceParts, stated: Any, uri: str) -> NDArray[np.int64]:  # noqa: ANN401
    if stated is None:
        index, own = whole.cells().index, part.cells().index
        # Names may repeat where none has to be looked up.
        if part.n_cells == whole.n_cells and index.equals(own):
            return np.arange(whole.n_cells)
        if not index.is_unique or not own.is_unique:
            raise SourceError(
                f"{uri}: modality {name!r} can only be placed by the names of its cells, and these repeat; make obs_names unique "
                "and call update() on the MuData."
            )
        named: NDArray[np.int64] = index.get_indexer(own).astype(np.int64)
        if (named < 0).any():
            raise SourceError(
                f"{uri}: cell {own[int((named < 0).argmax())]!r} of modality {name!r} does not stand in the global obs; "
                "call update() on the MuData."
            )
        return named
    # `obsmap` has for each cell of the file its row in the modality, counted from 1, or 0.
    positions = np.asarray(stated).ravel().astype(np.int64)
    cells = np.flatnonzero(positions > 0)
    rows = positions[cells] - 1
    if len(rows) != part.n_cells or not np.array_equal(np.sort(rows), np.arange(part.n_cells)):
        raise SourceError(
            f"{uri}: obsmap/{name} places {len(rows):,} cells, but modality {name!r} has {part.n_cells:,} rows, each of which "
            "must stand there once; call update() on the MuData and write it again."
        )
    out = np.empty(part.n_cells, np.int64)
    out[rows] = cells
    return out


def _cells(
    whole: SourceParts, mods: Mapping[str, SourceParts], cells_of: Mapping[str, NDArray[np.int64]]
) -> "pd.DataFrame":
    import pandas as pd

    frame = whole.cells()
    added: dict[str, Any] = {}
    for name, part in mods.items():
        own = part.cells()
        rows = np.full(whole.n_cells, -1, np.int64)
        rows[cells_of[name]] = np.arange(part.n_cells)
        for column in own.columns:
            key = f"{name}:{column}"
            if key not in frame.columns:
                plain = own[column].reset_index(drop=True)
                if (rows < 0).any() and isinstance(plain.dtype, np.dtype) and plain.dtype.kind in "biu":
                    # Plain integer and boolean dtypes have no missing value for cells that lack the modality.
                    # pandas calls those that have one "boolean", "Int64" and "UInt64".
                    nullable: Any = plain.dtype.name.capitalize().replace("Uint", "UInt")
                    plain = plain.astype("boolean" if plain.dtype.kind == "b" else nullable)
                # -1 is no label of the plain index, so cells without the modality get missing values.
                taken = plain.reindex(rows)
                added[key] = pd.Series(taken.array, dtype=taken.dtype)
    more = pd.DataFrame({k: v.set_axis(frame.index) for k, v in added.items()}, index=frame.index)
    joined: pd.DataFrame = pd.concat([frame, more], axis=1)
    return joined
