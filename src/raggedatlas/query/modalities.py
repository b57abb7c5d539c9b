"""Modalities of an atlas, the choice of layers, and the groups that store them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.assets import RESULT_ASSETS, array_readers, group_by_dataset, read_records
from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.assets import ResultRecord
from raggedatlas.model.pointers import PointerKind
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.query.read_plan import ColumnCopy, GroupPlan, PartPlan
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader

DEFAULT_SPACE = "gene_expression"
"""The feature space that is read where a query names none."""

USUAL = "counts"
"""The layer that is taken where every dataset has it."""

LEGACY = "data"
"""The array of a dense group without named layers (seed 000, dense groups)."""


@dataclass(frozen=True)
class Modality:
    """One feature space as the cell table points into it: its main pointer column and those of single layers.

    Parameters
    ----------
    name : str
        Name of the main pointer column.
    space : FeatureSpace
        The feature space.
    records : mapping of str to tuple of DatasetRecord
        Dataset uid -> its groups.
    is_result : bool
        Whether a model computed it: it is read where it is named, and never by itself.
    """

    name: str
    space: FeatureSpace
    records: Mapping[str, tuple[DatasetRecord, ...]]
    is_result: bool = False

    @property
    def pointers(self) -> tuple[str, ...]:
        """The pointer columns, sorted."""
        return tuple(sorted({pointer_column(r) for records in self.records.values() for r in records}))

    def layers(self, dataset: str) -> dict[str, DatasetRecord]:
        """Return the layers of a dataset with the record that stores each; the main group comes first."""
        held: dict[str, DatasetRecord] = {}
        for record in sorted(
            self.records.get(dataset, ()), key=lambda r: (pointer_column(r) != self.name, r.zarr_group)
        ):
            for layer in record.layers or ([LEGACY] if LEGACY in record.array_specs else []):
                held.setdefault(layer, record)
        return held


@dataclass(frozen=True)
class CellPointers:
    """Array positions of cells, per pointer column.

    Parameters
    ----------
    dataset_code : (n_cells,) int32
        Position of each cell's dataset in `datasets`.
    datasets : tuple of str
        Dataset uids.
    columns : mapping of str to (start, end, valid)
        Pointer column -> entries of each cell, and whether it has any pointer there.
    """

    dataset_code: NDArray[np.int32]
    datasets: tuple[str, ...]
    columns: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]]

    def present(self, modality: Modality) -> NDArray[np.bool_]:
        """Return a mask of the cells that have a modality."""
        found = np.zeros(len(self.dataset_code), bool)
        for column in modality.pointers:
            if column in self.columns:
                found |= self.columns[column][2]
        return found

    def touched(self, modality: Modality) -> tuple[str, ...]:
        """List the datasets of the cells that have a modality."""
        n_cells = np.bincount(self.dataset_code[self.present(modality)], minlength=len(self.datasets))
        return tuple(uid for uid, n in zip(self.datasets, n_cells, strict=True) if n and uid in modality.records)


def pointer_column(record: DatasetRecord) -> str:
    """Return the cell column that points into a group."""
    return record.pointer or record.feature_space


def choose_layers(
    modality: Modality, datasets: Sequence[str], asked: Sequence[str], names: Mapping[str, str]
) -> tuple[str, ...]:
    """Choose the layers to read.

    Parameters
    ----------
    modality : Modality
        The space.
    datasets : sequence of str
        Touched datasets.
    asked : sequence of str
        Layers that were asked for; without any, `counts` where every touched dataset has it, else the one they share.
    names : mapping of str to str
        Dataset uid -> name, for messages.

    Raises
    ------
    QueryError
        If a dataset lacks an asked layer, or no single layer is shared; the message lists what each has.
    """
    held = {uid: list(modality.layers(uid)) for uid in datasets}
    shared = [layer for layer in next(iter(held.values()), []) if all(layer in layers for layers in held.values())]
    if asked:
        lacking = [layer for layer in asked if layer not in shared]
        if not lacking:
            return tuple(dict.fromkeys(asked))
        raise QueryError(
            f"Not every touched dataset has the layer {lacking[0]!r} of {modality.name!r}: {_listing(held, names)}. "
            "Ask for a layer they share with .layers(...), or leave datasets out with .where({'dataset': [...]})."
        )
    if USUAL in shared:
        return (USUAL,)
    if len(shared) == 1:
        return (shared[0],)
    why = f"share the layers {shared}" if shared else "share no layer"
    raise QueryError(
        f"The touched datasets {why} of {modality.name!r}, so none can be chosen for you: {_listing(held, names)}. "
        "Choose with .layers(...), or leave datasets out with .where({'dataset': [...]})."
    )


def _listing(held: Mapping[str, Sequence[str]], names: Mapping[str, str]) -> str:
    grouped: dict[tuple[str, ...], list[str]] = {}
    for uid, layers in held.items():
        grouped.setdefault(tuple(layers), []).append(names.get(uid) or uid)
    shown = [
        f"{', '.join(who[:3])}{f' and {len(who) - 3} more' if len(who) > 3 else ''} {'has' if len(who) == 1 else 'have'} {list(layers)}"
        for layers, who in grouped.items()
    ]
    return "; ".join(shown[:10])


def plan_parts(
    modality: Modality, datasets: Sequence[str], layers: Sequence[str], cells: CellPointers, catalog: Catalog
) -> tuple[PartPlan, ...]:
    """Plan the groups that each layer is read from; layers stored together in every dataset become one part.

    Parameters
    ----------
    modality : Modality
        The space.
    datasets : sequence of str
        Touched datasets; each has every layer.
    layers : sequence of str
        What `choose_layers` chose.
    cells : CellPointers
        The chosen cells.
    catalog : Catalog
        Whose Zarr store it is. A snapshot keeps what it has opened, so that paths are checked and specs parsed once.
    """
    together: dict[tuple[str, ...], list[str]] = {}
    for layer in layers:
        groups = tuple(modality.layers(uid)[layer].zarr_group for uid in datasets)
        together.setdefault(groups, []).append(layer)
    return tuple(_part(modality, datasets, tuple(names), cells, catalog) for names in together.values())


def _part(
    modality: Modality, datasets: Sequence[str], layers: tuple[str, ...], cells: CellPointers, catalog: Catalog
) -> PartPlan:
    records = [modality.layers(uid)[layers[0]] for uid in datasets]
    distinct = {record.zarr_group: record for record in records}

    def build() -> tuple[GroupPlan, ...]:
        return tuple(_group(record, modality.space.kind, layers, catalog.arrays) for record in distinct.values())

    groups = catalog.remember("groups", (tuple(distinct), modality.space.kind, layers), build)
    number = {path: i for i, path in enumerate(distinct)}
    n = len(cells.dataset_code)
    code = np.full(n, -1, np.int32)
    start, end = np.zeros(n, np.int64), np.zeros(n, np.int64)
    position = {uid: i for i, uid in enumerate(cells.datasets)}
    for column in sorted({pointer_column(record) for record in records}):
        if column not in cells.columns:
            continue
        group_of = np.full(len(cells.datasets) + 1, -1, np.int32)
        for uid, record in zip(datasets, records, strict=True):
            if pointer_column(record) == column and uid in position:
                group_of[position[uid]] = number[record.zarr_group]
        first, last, valid = cells.columns[column]
        found = np.where(valid, group_of[cells.dataset_code], np.int32(-1))
        here = found >= 0
        if here.all():
            code[:], start[:], end[:] = found, first, last
        else:
            code[here], start[here], end[here] = found[here], first[here], last[here]
    return PartPlan(layers, groups, code, start, end)


def _group(record: DatasetRecord, kind: PointerKind, layers: Sequence[str], arrays: Location) -> GroupPlan:
    readers = array_readers(arrays, record)

    def reader(*paths: str) -> ArrayReader:
        for path in paths:
            if path in readers:
                return readers[path]
        raise CorruptError(
            f"The group {record.zarr_group} of dataset {record.name or record.uid!r} has no array {paths[0]!r}, only {sorted(readers)}; "
            "run validate()."
        )

    if kind is PointerKind.SPARSE:
        found = {layer: reader(f"csr/layers/{layer}") for layer in layers}
        copied = [f"csc/layers/{layer}" for layer in layers]
        copy = None
        if all(path in readers for path in ("csr/indptr", "csc/indptr", "csc/indices", *copied)):
            values = {layer: reader(f"csc/layers/{layer}") for layer in layers}
            copy = ColumnCopy(reader("csr/indptr"), reader("csc/indptr"), reader("csc/indices"), values)
        return GroupPlan(record.zarr_group, record.layout_uid, reader("csr/indices"), found, copy)
    found = {
        layer: reader(f"layers/{layer}", *([LEGACY] if layer == LEGACY or not record.layers else []))
        for layer in layers
    }
    return GroupPlan(record.zarr_group, record.layout_uid, None, found)


def sum_dtype(stored: np.dtype[Any], n: int) -> np.dtype[Any] | None:
    """Return the smallest dtype that holds every sum of n values of a dtype; of floats, their own.

    Returns
    -------
    numpy.dtype or None
        None where no integer type is wide enough.

    Examples
    --------
    >>> sum_dtype(np.dtype("uint8"), 2), sum_dtype(np.dtype("uint64"), 2) is None
    (dtype('uint16'), True)
    """
    if stored.kind == "f" or n == 1:
        return stored
    stored = np.dtype(np.uint8) if stored.kind == "b" else stored
    widths = [np.dtype(f"{stored.kind}{size}") for size in (1, 2, 4, 8)]
    largest = n * int(np.iinfo(stored).max)
    return next((wide for wide in widths if np.iinfo(wide).max >= largest), None)


def join_dtypes(stored: set[np.dtype[np.generic]], *, nan: bool = False) -> np.dtype[np.generic] | None:
    """Find the smallest dtype that holds every value of several exactly; None when there is none.

    Parameters
    ----------
    stored : set of numpy dtype
        What the groups hold.
    nan : bool
        Whether it must also hold NaN.

    Examples
    --------
    >>> join_dtypes({np.dtype("uint8"), np.dtype("uint32")}), join_dtypes({np.dtype("uint16"), np.dtype("float32")})
    (dtype('uint32'), dtype('float32'))
    >>> join_dtypes({np.dtype("uint64"), np.dtype("float64")}) is None
    True
    """
    if not stored:
        return np.dtype(np.float32 if nan else np.uint8)
    joined = np.result_type(*stored, *([np.float32] if any(d.kind == "f" for d in stored) or nan else []))
    joined = np.dtype(np.uint8) if joined == np.dtype(bool) else joined
    if joined.kind == "f":
        largest = 2 ** (np.finfo(str(joined)).nmant + 1)
        if any(d.kind in "iu" and np.iinfo(str(d)).max > largest for d in stored):
            return None
    return joined


def read_modalities(catalog: Catalog) -> dict[str, Modality]:
    """Return the modalities of the atlas by main pointer column, in the order of adding."""
    spaces = catalog.spaces()
    found: dict[str, dict[str, list[object]]] = {}
    space_of: dict[str, str] = {}
    for uid, records in group_by_dataset(read_records(catalog)).items():
        for record in records:
            name = pointer_column(record).split("__", 1)[0]
            space_of[name] = record.feature_space
            found.setdefault(name, {}).setdefault(uid, []).append(record)
    known = {
        name: Modality(name, spaces[space_of[name]], {uid: tuple(r) for uid, r in held.items()})  # type: ignore[arg-type]
        for name, held in found.items()
        if space_of[name] in spaces and spaces[space_of[name]].kind is not PointerKind.GEOMETRY
    }
    return known | result_modalities(catalog)


def find_modality(known: Mapping[str, Modality], name: str, catalog: Catalog) -> Modality:
    """Find what a space name means: the pointer column of that name, or the only one that points into the space.

    Raises
    ------
    QueryError
        If nothing, or more than one pointer column, goes by it.
    """
    if name in known:
        return known[name]
    of_space = [m for m in known.values() if m.space.name == name]
    if len(of_space) == 1:
        return of_space[0]
    if of_space:
        raise QueryError(
            f"Several pointer columns point into {name!r}; name one of {sorted(m.name for m in of_space)}."
        )
    raise QueryError(f"No dataset of {catalog.location.uri} has the feature space {name!r}; there are {sorted(known)}.")


def result_modalities(catalog: Catalog) -> dict[str, Modality]:
    """Return the results that are feature spaces: name -> modality, whose datasets share one group."""
    spaces, found = catalog.spaces(), {}
    inventory = {record.uid for record in read_records(catalog)} if RESULT_ASSETS.read(catalog) else set()
    for result in RESULT_ASSETS.read(catalog):
        if result.kind != "space" or result.space not in spaces:
            continue
        group = (result.as_group(),)
        # The empty uid is a placeholder if no dataset of the result is left: an empty result keeps its width.
        records = {uid: group for uid in result.cells_of if uid in inventory} or {"": group}
        found[result.name] = Modality(result.name, spaces[result.space], records, is_result=True)
    return found


def vector_results(catalog: Catalog) -> dict[str, ResultRecord]:
    """Return the results stored in the cell table: name -> record."""
    return {record.name: record for record in RESULT_ASSETS.read(catalog) if record.kind == "vector"}
