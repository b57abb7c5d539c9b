"""A plan whose cells are not held: the spaces that a query reads, and the places of its cells a block at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.assets import find_result
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.model.spaces import pointer_columns
from raggedatlas.query.cells import Cells, cell_columns, pointer_parts, warn_of_values
from raggedatlas.query.modalities import (
    CellPointers,
    PartSource,
    SpacePointers,
    find_modality,
    part_sources,
    read_modalities,
)
from raggedatlas.query.plan import chosen_datasets, default_spaces, layout_codes, pin_cells, plan_spaces
from raggedatlas.query.read_plan import QuerySpec, SpacePlan
from raggedatlas.query.selection import walk_cells
from raggedatlas.store.filters import Columns
from raggedatlas.store.sql_parser import to_sql
from raggedatlas.store.tables import ROW_ID


def can_stream(spec: QuerySpec, catalog: Catalog) -> bool:
    """Return whether the cells of a query come in table order, and nothing of them but pointers and metadata is needed."""
    plain = spec.search is None and spec.sample is None and spec.limit is None and not spec.order and not spec.centroids
    return plain and all(find_result(catalog, name).kind == "space" for name in spec.results)


@dataclass(frozen=True)
class Kinds:
    """The combinations of dataset and pointers that cells have.

    Parameters
    ----------
    datasets : (k,) int32
        Position of the dataset among those of the atlas.
    pointing : (k, n_pointers) bool
        Which pointer columns have a value.
    """

    datasets: NDArray[np.int32]
    pointing: NDArray[np.bool_]


@dataclass(frozen=True)
class Survey:
    """What one walk over the cells found.

    Parameters
    ----------
    kinds : Kinds
        What kinds of cells there are.
    n : int
        How many cells.
    in_order : bool
        Whether they are stored in the order of their row ids.
    """

    kinds: Kinds
    n: int
    in_order: bool


@dataclass(frozen=True, eq=False)
class CellStream:
    """The cells of a query of one snapshot, in the order of the table.

    Parameters
    ----------
    catalog : Catalog
        Whose cell table is pinned.
    spec : QuerySpec
        Which `can_stream` allows.
    columns : Columns
        What may be named.
    pointers : tuple of str
        Pointer columns that are read.
    modalities : mapping of str to Modality
        The spaces and results that are read; a cell needs one of the spaces.
    n_spaces : int
        How many of `modalities` are spaces; the others are results.
    """

    catalog: Catalog
    spec: QuerySpec
    columns: Columns
    pointers: tuple[str, ...]
    modalities: Mapping[str, SpacePointers]
    n_spaces: int
    _sources: dict[str, tuple[PartSource, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: QuerySpec, catalog: Catalog) -> "CellStream":
        """Find what a query reads."""
        catalog = pin_cells(catalog)
        known = read_modalities(catalog)
        chosen = [find_modality(known, name, catalog) for name in default_spaces(spec, known, catalog)]
        read = {m.name: m for m in chosen} | {name: known[name] for name in spec.results}
        kinds = pointer_columns(catalog.tables.schema(CELLS))
        pointers = dict.fromkeys(p for m in read.values() for p in m.pointers if p in kinds)
        return cls(catalog, spec, cell_columns(catalog), tuple(pointers), read, len(chosen))

    def survey(self, look: Callable[[Cells], None], wanted: Sequence[str]) -> Survey:
        """Walk over the cells once.

        Parameters
        ----------
        look : callable
            Called with the cells of each block that have a space.
        wanted : sequence of str
            Stored columns that these have.

        """
        found: dict[bytes, tuple[int, NDArray[np.bool_]]] = {}
        in_order, last, n_seen = True, -1, 0
        firsts = [self._parts(name)[0] for name in self.pointers]
        n = 0
        for every in walk_cells(self.catalog.tables, self.spec, self.columns, [*wanted, *firsts]):
            n_seen += every.n
            valid = np.zeros((every.n, len(firsts)), bool)
            for i, first in enumerate(firsts):
                valid[:, i] = every.table.column(first).is_valid().to_numpy()
            kept = np.flatnonzero(valid[:, self._of_spaces()].any(axis=1)) if self.n_spaces else np.arange(every.n)
            cells, valid = (every, valid) if len(kept) == every.n else (every.take(kept), valid[kept])
            n += cells.n
            ids = cells.table.column(ROW_ID).to_numpy()
            in_order = in_order and bool((ids[1:] > ids[:-1]).all()) and not (len(ids) and int(ids[0]) <= last)
            last = int(ids[-1]) if len(ids) else last
            # Most cells are of one kind with the cell before them, so few are sorted.
            own = cells.dataset_code
            at = np.flatnonzero(np.r_[cells.n > 0, (own[1:] != own[:-1]) | (valid[1:] != valid[:-1]).any(axis=1)])
            rows = np.concatenate([own[at, None].view(np.uint8), np.packbits(valid[at], axis=1)], axis=1)
            _, first_rows = np.unique(rows.view(f"V{rows.shape[1]}").ravel(), return_index=True)
            found |= {rows[i].tobytes(): (int(own[at[i]]), valid[at[i]]) for i in first_rows.tolist()}
            look(cells)
        warn_of_values(self.catalog, self.spec, self.columns, n_seen)
        listed = [found[key] for key in sorted(found)]
        pointing = np.array([valid for _, valid in listed], bool).reshape(len(listed), len(self.pointers))
        return Survey(Kinds(np.array([code for code, _ in listed], np.int32), pointing), n, in_order)

    def plan(self, kinds: Kinds) -> dict[str, SpacePlan]:
        """Plan the spaces and results; their cells are one of each kind.

        Raises
        ------
        QueryError, FeatureError
            As `plan_read` does.
        """
        n = len(kinds.datasets)
        places = {
            p: (np.zeros(n, np.int64), kinds.pointing[:, i].astype(np.int64), kinds.pointing[:, i])
            for i, p in enumerate(self.pointers)
        }
        pointers = CellPointers(kinds.datasets, tuple(self.columns.datasets), places)
        results = [find_result(self.catalog, name) for name in self.spec.results]
        chosen = [*self.modalities.values()][: self.n_spaces]
        spaces, beside = plan_spaces(self.spec, self.catalog, chosen, results, pointers)
        planned = {**spaces, **beside}
        for name, space in planned.items():
            modality = self.modalities[name]
            datasets = chosen_datasets(modality, pointers, self.spec.layers if name in spaces else ())
            self._sources[name] = part_sources(modality, datasets, space.layers, pointers.datasets, self.catalog)
        return planned

    def blocks(
        self, planned: Mapping[str, SpacePlan], wanted: Sequence[str]
    ) -> Iterator[tuple[Cells, dict[str, SpacePlan]]]:
        """Walk over the cells, and give each block with the plans of its cells.

        Parameters
        ----------
        planned : mapping of str to SpacePlan
            From `plan`.
        wanted : sequence of str
            Stored columns that the cells have.
        """
        parts = [part for name in self.pointers for part in dict.fromkeys(self._parts(name))]
        for cells in walk_cells(self.catalog.tables, self.spec, self.columns, [*wanted, *parts]):
            pointers = cells.pointers(self.columns.schema)
            having = pointers.having([*self.modalities.values()][: self.n_spaces])
            if not having.all():
                cells = cells.take(np.flatnonzero(having))  # noqa: PLW2901
                pointers = cells.pointers(self.columns.schema)
            yield cells, {name: self._located(name, space, pointers) for name, space in planned.items()}

    def _located(self, name: str, space: SpacePlan, pointers: CellPointers) -> SpacePlan:
        parts = tuple(source.locate(pointers) for source in self._sources[name])
        codes, present = layout_codes(space.layouts, parts[0]), pointers.present(self.modalities[name])
        return replace(space, parts=parts, layout_code=codes, present=present)

    def _parts(self, pointer: str) -> tuple[str, str]:
        return pointer_parts(pointer, pointer_columns(self.columns.schema)[pointer][1])

    def _of_spaces(self) -> list[int]:
        """Return which of the pointers are of spaces."""
        own = {p for m in [*self.modalities.values()][: self.n_spaces] for p in m.pointers}
        return [i for i, name in enumerate(self.pointers) if name in own]

    def identity(self, wanted: Sequence[str]) -> dict[str, Any]:
        """Return what decides the places of the cells and some of their columns, of types that JSON has; for a pinned cell table."""
        table = self.catalog.tables.open(CELLS)
        # Files never change and have random names, so they tell the content, of a moved or replaced atlas too.
        fragments = [([file.path for file in f.data_files()], f.deletion_file()) for f in table.get_fragments()]
        kept = {
            name: str(self.columns.schema.field(name).metadata) for name in wanted if name in self.columns.schema.names
        }
        return {
            "spec": repr(self.spec), "where": to_sql(self.spec.filters, self.columns), "fragments": fragments, "datasets": list(self.columns.datasets.items()),
            "pointers": self.pointers, "columns": kept,
        }  # fmt: skip
