"""Objects without a cell that become new cells: a dataset of their own, with the objects' attributes as columns."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from raggedatlas.catalog.assets import read_records
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import CellColumn, cell_rows, write_frame
from raggedatlas.errors import DuplicateError
from raggedatlas.ingest.columns import ColumnPlan, column_values, plan_columns
from raggedatlas.ingest.geometry_plan import GeometryOptions, GeometryPlan
from raggedatlas.ingest.options import IngestOptions
from raggedatlas.model.assets import GeometryRecord
from raggedatlas.model.frames import INDEX
from raggedatlas.model.ids import new_uids
from raggedatlas.model.records import DatasetFacts, DatasetRecord


@dataclass(frozen=True)
class NewCells:
    """Cells that are made of objects.

    Parameters
    ----------
    n : int
        How many; 0 for none.
    name : str
        Of their dataset.
    frame : pyarrow.Table
        Their names and attributes.
    plans : sequence of ColumnPlan
        What becomes of the attributes.
    left : tuple of str
        Attributes that become no columns.
    """

    n: int
    name: str
    frame: pa.Table
    plans: Sequence[ColumnPlan] = ()
    left: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for the report."""
        notes = [f"{self.n:,} new cells in the dataset {self.name!r}"] if self.n else []
        if self.left:
            notes.append(
                f"object attributes of several channels are no cell columns, they stay in the store: {list(self.left)}"
            )
        return tuple(notes)

    @property
    def columns(self) -> list[CellColumn]:
        """Cell columns that they bring."""
        return [plan.column for plan in self.plans]

    def named(self, record: GeometryRecord) -> GeometryRecord:
        """Return the row of the registry with their dataset."""
        if not self.n:
            return record
        return record.model_copy(update={"datasets": json.dumps({**record.cells_of, record.uid: self.n})})

    def write(self, catalog: Catalog, record: GeometryRecord, pointers: pa.StructArray) -> DatasetRecord:
        """Append the cells, and return the record of their dataset, which makes all of it visible once it is committed."""
        uid = record.uid
        digest = write_frame(catalog, uid, "obs", self.frame)
        schema = catalog.tables.schema(CELLS)
        columns = {
            "uid": new_uids(self.n),
            "dataset_uid": pa.array([uid] * self.n, pa.string()),
            "cell_name": self.frame.column(INDEX).cast(pa.string()),
            record.column: pointers,
        }
        for plan in self.plans:
            values = column_values(plan, self.frame)
            columns[plan.column.stored] = values.cast(schema.field(plan.column.stored).type)
        catalog.tables.append(CELLS, cell_rows(schema, columns, self.n))
        return DatasetRecord(
            uid=uid, zarr_group=record.zarr_group, feature_space=record.space, n_cells=self.n, pointer=record.column, name=self.name,
            source=record.source, content_hash=record.content_hash,
            facts=DatasetFacts(format="zarr-vectors", n_cells=self.n, frames={"obs": digest}).to_json(),
        )  # fmt: skip


def plan_cells(catalog: Catalog, plan: GeometryPlan, options: GeometryOptions) -> NewCells:
    """Decide what the new cells of a plan will be.

    Raises
    ------
    SchemaError
        If an attribute clashes with a cell column.
    DuplicateError
        If a dataset is called so already, or the same cells were made before.
    """
    if not len(plan.fresh):
        return NewCells(0, "", pa.table({}))
    shapes = plan.source.shapes
    assert shapes.ids is not None
    ((_, attribute),) = plan.record.linked.items() or [("", "")]
    label = attribute or options.cells if (attribute or options.cells) in shapes.object_attributes else ""
    names = shapes.object_attributes[label].values[plan.fresh] if label else shapes.ids[plan.fresh]
    frame = {INDEX: pa.array([str(name) for name in names.tolist()])}
    left: list[str] = []
    for name, values in sorted(shapes.object_attributes.items()):
        if values.n_channels == 1 and name != label:
            frame[name] = pa.array(
                values.values[plan.fresh].tolist() if values.values.dtype.kind in "US" else values.values[plan.fresh]
            )
        elif name != label:
            left.append(name)
    table = pa.table(frame)
    plans, _ = plan_columns(table.schema, catalog.tables.schema(CELLS), IngestOptions(), [plan.record.column])
    name = dataset_name(read_records(catalog), plan, options)
    return NewCells(len(plan.fresh), name, table, plans, tuple(left))


def dataset_name(there: Iterable[DatasetRecord], plan: GeometryPlan, options: GeometryOptions) -> str:
    """Choose the name of the dataset of new cells, given the existing datasets.

    Raises
    ------
    DuplicateError
        If the name that the caller chose is taken.
    """
    gone = {old.uid for old in plan.replaces}
    taken = {record.name for record in there if record.uid not in gone}
    asked = options.dataset if options.link is None else None
    if asked is not None and asked in taken:
        raise DuplicateError(f"A dataset is called {asked!r} already; choose another name with dataset=...")
    base = name = asked or plan.source.name
    n = 2
    while name in taken:
        name, n = f"{base}-{n}", n + 1
    return name
