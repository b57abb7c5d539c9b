"""A geometry store in an atlas: its row in the registry, which is what makes it visible (seed 002)."""

from dataclasses import asdict, dataclass
from html import escape
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from raggedatlas.model.entries import entries_from_table, entries_schema, entries_to_table, read_json
from raggedatlas.model.records import utc_now

TABLE = "_geometry"
"""Name of the registry's table."""


class Corners(NamedTuple):
    """Least and greatest corner of a box."""

    lo: tuple[float, ...]
    hi: tuple[float, ...]


class GeometryRecord(BaseModel):
    """One geometry store whose objects are cells of the atlas; its row in ``_geometry`` is the commit point of its `add`.

    Attributes
    ----------
    uid : str
        16 hex digits, another each time that a store is added; also the folder of its group.
    name : str
        What queries call it; by default its feature space. Stores of several datasets share a name; a dataset has one of a name.
    space, column, zarr_group : str
        Feature space, the cell column of its pointers, and the group ``<uid>/<space>``: the store as it was added.
    datasets : str
        JSON: dataset uid -> how many of its cells have an object here.
    types, axes : list of str
        Geometry types, and names of the space axes.
    layout : str
        ``"0.9"`` or ``"0.7"``.
    n_objects, n_vertices, n_levels : int
        Of the store; vertices at the finest level.
    bounds : str
        JSON: least and greatest corner over all objects; empty lists where there is no vertex.
    link : str
        JSON: the cell column and the object attribute (empty: the ids) whose values were matched.
    owner, genes : str
        Of transcripts: the vertex attributes that tell the cell (empty where objects are cells) and the gene.
    n_files, n_bytes : int
        Of the group.
    digest : str
        SHA-256 over names and bytes of its files.
    content_hash : str
        SHA-256 over what is stored, and what it was linked with; tells the same store.
    source : str
        Where it came from.
    created_at : str
        UTC ISO timestamp.

    Examples
    --------
    >>> record = GeometryRecord(uid="0" * 16, name="tract", space="tract", column="tract", zarr_group="0/tract")
    >>> record.cells_of
    {}
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str
    name: str
    space: str
    column: str
    zarr_group: str
    datasets: str = "{}"
    types: list[str] = Field(default_factory=list)
    axes: list[str] = Field(default_factory=list)
    layout: str = ""
    n_objects: int = 0
    n_vertices: int = 0
    n_levels: int = 1
    bounds: str = "[[], []]"
    link: str = "{}"
    owner: str = ""
    genes: str = ""
    n_files: int = 0
    n_bytes: int = 0
    digest: str = ""
    content_hash: str = ""
    source: str = ""
    created_at: str = Field(default_factory=utc_now)

    @property
    def cells_of(self) -> dict[str, int]:
        """`datasets`, read: dataset uid -> cells."""
        return read_json(dict[str, int], self.datasets, TABLE, self.uid, "datasets")

    @property
    def n_cells(self) -> int:
        """Cells of all datasets that have an object here."""
        return sum(self.cells_of.values())

    @property
    def extent(self) -> Corners:
        """`bounds`, read."""
        return read_json(Corners, self.bounds, TABLE, self.uid, "bounds")

    @property
    def linked(self) -> dict[str, str]:
        """`link`, read."""
        return read_json(dict[str, str], self.link, TABLE, self.uid, "link")


_NUMBERS = dict.fromkeys(("n_objects", "n_vertices", "n_levels", "n_files", "n_bytes"), pa.int64())
_LISTS = dict.fromkeys(("types", "axes"), pa.list_(pa.string()))
GEOMETRY_SCHEMA = entries_schema(
    GeometryRecord, {**_NUMBERS, **_LISTS}, ("uid", "name", "space", "column", "zarr_group")
)
"""Arrow schema of the table `_geometry`."""


def geometries_to_table(records: list[GeometryRecord]) -> pa.Table:
    """Write geometry stores as rows of ``_geometry``.

    Examples
    --------
    >>> geometries_to_table([]).num_rows
    0
    """
    return entries_to_table(records, GEOMETRY_SCHEMA)


def geometries_from_table(table: pa.Table) -> list[GeometryRecord]:
    """Read rows of ``_geometry``, in the order of adding.

    Examples
    --------
    >>> made = GeometryRecord(uid="0" * 16, name="tract", space="tract", column="tract", zarr_group="0/tract")
    >>> geometries_from_table(geometries_to_table([made])) == [made]
    True
    """
    return entries_from_table(GeometryRecord, table, TABLE)


@dataclass(frozen=True, slots=True)
class GeometryReport:
    """What `add` did with geometry, or would do (``dry_run``).

    Parameters
    ----------
    name, space, column, zarr_group : str
        What it is called, its feature space, and where pointers and shapes lie.
    types : tuple of str
        Geometry types.
    n_objects, n_vertices, n_levels : int
        Of the store.
    n_cells, n_new_cells, n_datasets : int
        Cells that have a shape now, those of them that are new, and datasets that these are of.
    status : {"added", "skipped", "replaced", "dry run"}
        What happened.
    n_bytes : int
        Of the store.
    dataset_uid : str
        Of the new cells; empty without any.
    content_hash, source : str
        Of what is stored and how it is linked, and where it came from.
    notes : tuple of str
        Everything else worth knowing: objects and cells left out, points of no cell.
    """

    name: str
    space: str
    column: str
    zarr_group: str
    types: tuple[str, ...]
    n_objects: int
    n_vertices: int
    n_levels: int
    n_cells: int
    n_new_cells: int
    n_datasets: int
    status: Literal["added", "skipped", "replaced", "dry run"]
    n_bytes: int = 0
    dataset_uid: str = ""
    content_hash: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Give the report as plain values, as ``--json`` prints it."""
        return asdict(self)

    def __repr__(self) -> str:
        """Say it in lines."""
        fresh = f" ({self.n_new_cells:,} new)" if self.n_new_cells else ""
        first = (
            f"{self.name}: {self.status}, {self.n_cells:,} cells{fresh} of {self.n_datasets:,} datasets, {self.n_objects:,} objects "
            f"({', '.join(self.types)}), {self.n_vertices:,} vertices, feature space {self.space}"
        )
        return "\n".join([first, *(f"  {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"
