"""Which layer is read from which group: the layer rule, and where each cell lies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.datasets import array_readers
from raggedatlas.errors import CorruptError, QueryError
from raggedatlas.model.pointers import PointerKind
from raggedatlas.model.records import DatasetRecord
from raggedatlas.model.spaces import FeatureSpace
from raggedatlas.query.parts import ColumnCopy, GroupPlan, PartPlan
from raggedatlas.store.location import Location
from raggedatlas.store.read import ArrayReader

USUAL_SPACE = "gene_expression"
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
        return tuple(sorted({pointer_of(r) for records in self.records.values() for r in records}))

    def layers(self, dataset: str) -> dict[str, DatasetRecord]:
        """Give a dataset's layers with the record that holds each; the main group comes first."""
        held: dict[str, DatasetRecord] = {}
        for record in sorted(self.records.get(dataset, ()), key=lambda r: (pointer_of(r) != self.name, r.zarr_group)):
            for layer in record.layers or ([LEGACY] if LEGACY in record.array_specs else []):
                held.setdefault(layer, record)
        return held


@dataclass(frozen=True)
class CellPointers:
    """Where some cells lie, per pointer column.

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
        """Tell which cells have a modality."""
        found = np.zeros(len(self.dataset_code), bool)
        for column in modality.pointers:
            if column in self.columns:
                found |= self.columns[column][2]
        return found

    def touched(self, modality: Modality) -> tuple[str, ...]:
        """List the datasets of the cells that have a modality."""
        n_cells = np.bincount(self.dataset_code[self.present(modality)], minlength=len(self.datasets))
        return tuple(uid for uid, n in zip(self.datasets, n_cells, strict=True) if n and uid in modality.records)


def pointer_of(record: DatasetRecord) -> str:
    """Name the cell column that points into a group."""
    return record.pointer or record.feature_space


def choose_layers(
    modality: Modality, datasets: Sequence[str], asked: Sequence[str], names: Mapping[str, str]
) -> tuple[str, ...]:
    """Decide which layers to read.

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
    """Say from which groups each layer is read; layers that lie together everywhere become one part.

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
    for column in sorted({pointer_of(record) for record in records}):
        if column not in cells.columns:
            continue
        group_of = np.full(len(cells.datasets) + 1, -1, np.int32)
        for uid, record in zip(datasets, records, strict=True):
            if pointer_of(record) == column and uid in position:
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
