"""A box as a condition on cells: by the boxes or centroids in their pointers, or by the shapes themselves."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.geometries import find_geometries
from raggedatlas.errors import QueryError
from raggedatlas.model.geometries import GeometryRecord
from raggedatlas.model.pointers import AXES
from raggedatlas.query.meeting import shapes_meet_box
from raggedatlas.store.filters import Columns, Filter
from raggedatlas.store.sql import all_of, any_of, comparison, in_list, is_not_null, negation

By = Literal["bbox", "centroid", "exact"]


@dataclass(frozen=True)
class Box:
    """A box with both ends inclusive.

    Parameters
    ----------
    lo, hi : tuple of 2 to 4 floats
        Corners in world units, in the order of the store's axes.
    """

    lo: tuple[float, ...]
    hi: tuple[float, ...]

    @classmethod
    def of(cls, bbox: ArrayLike) -> "Box":
        """Read a box as people write it.

        Parameters
        ----------
        bbox : (2 D,) or (2, D) floats
            Least corner, then greatest: ``(xmin, ymin, xmax, ymax)`` or ``((xmin, ymin), (xmax, ymax))``.

        Raises
        ------
        QueryError
            If it is no such box of 2 to 4 axes, or ends before it begins.

        Examples
        --------
        >>> Box.of([0, 0, 10, 5]).hi
        (10.0, 5.0)
        """
        try:
            flat = np.asarray(bbox, np.float64).ravel()
        except (TypeError, ValueError) as error:
            raise QueryError(f"within({bbox!r}): a box is numbers, (xmin, ymin, xmax, ymax).") from error
        n = len(flat) // 2
        if len(flat) % 2 or not 2 <= n <= len(AXES):
            raise QueryError(
                f"within() got {len(flat)} numbers; a box of 2 to 4 axes has 4, 6 or 8: (xmin, ymin, xmax, ymax), the least corner first."
            )
        lo, hi = flat[:n], flat[n:]
        if np.isnan(flat).any() or (lo > hi).any():
            raise QueryError(
                f"within({flat.tolist()}): the box ends before it begins, or holds NaN; the least corner comes first."
            )
        return cls(tuple(lo.tolist()), tuple(hi.tolist()))


@dataclass(frozen=True, eq=False, repr=False)
class Within(Filter):
    """Cells whose shape meets a box.

    Parameters
    ----------
    box : Box
        The box.
    name : str
        Of the geometry.
    records : tuple of GeometryRecord
        The stores that it means.
    by : {"bbox", "centroid", "exact"}
        What is compared.
    catalog : Catalog
        Where shapes are read, for ``exact``.
    """

    box: Box
    name: str
    records: tuple[GeometryRecord, ...]
    by: By
    catalog: Catalog
    _memo: dict[str, str] = field(default_factory=dict)

    def _sql(self, columns: Columns, depth: int) -> str:
        if self.by != "exact":
            return self._either(self.by)
        if "exact" not in self._memo:
            self._memo["exact"] = self._exact()
        return self._memo["exact"]

    def _either(self, by: str, *, inside: bool = False) -> str:
        found: dict[str, list[str]] = {}
        for record in self.records:
            found.setdefault(record.column, []).append(record.zarr_group)
        parts = [
            [in_list(f"{column}.zarr_group", groups), *_compared(column, self.box, by, inside=inside)]
            for column, groups in found.items()
        ]
        return any_of(*(all_of(*part) for part in parts))

    def _exact(self) -> str:
        """Read the shapes of cells whose box meets this one and does not lie in it."""
        whole = self._either("bbox", inside=True)
        where = all_of(self._either("bbox"), negation(whole))
        uids: list[str] = []
        for column in dict.fromkeys(record.column for record in self.records):
            rows = self.catalog.tables.read(CELLS, ["uid", f"{column}.zarr_group", f"{column}.object_id"], where)
            for record in self.records:
                if record.column == column:
                    uids += self._meeting(record, rows)
        return any_of(whole, in_list("uid", sorted(uids)))

    def _meeting(self, record: GeometryRecord, rows: pa.Table) -> list[str]:
        from raggedatlas.query.geometry import read_objects

        own = rows.filter(pa.array([group == record.zarr_group for group in rows.column(1).to_pylist()], pa.bool_()))
        if not own.num_rows:
            return []
        shapes = read_objects(self.catalog, record, own.column(2).to_numpy(), level=0, attributes=())
        closed = record.space == "segmentation_boundary"
        met = shapes_meet_box(shapes, np.array(self.box.lo), np.array(self.box.hi), closed=closed)
        uids: list[str] = own.column(0).filter(pa.array(met)).to_pylist()
        return uids

    def __repr__(self) -> str:
        return f"within({[*self.box.lo, *self.box.hi]}, space={self.name!r}, by={self.by!r})"


def within(catalog: Catalog, bbox: ArrayLike, name: str | None, by: str) -> Within:
    """Make the condition; refuse what cannot be asked.

    Raises
    ------
    QueryError
        For a box that is none, more axes than a store has, or an unknown `by`.
    NotFoundError
        If there is no such geometry.
    """
    if by not in {"bbox", "centroid", "exact"}:
        raise QueryError(f"within takes by='bbox', 'centroid' or 'exact', not {by!r}.")
    box = Box.of(bbox)
    name = usual_geometry(catalog) if name is None else name
    records = find_geometries(catalog, name)
    for record in records:
        if len(record.axes) < len(box.lo):
            raise QueryError(
                f"within() got a box of {len(box.lo)} axes; the geometry {name!r} from {record.source} has the axes {record.axes}."
            )
    return Within(box, name, tuple(records), by, catalog)  # type: ignore[arg-type]


def usual_geometry(catalog: Catalog) -> str:
    """Return the only name of geometry there is, or the only feature space of it.

    Raises
    ------
    QueryError
        If there are several, or none.
    """
    from raggedatlas.catalog.geometries import read_geometries

    records = read_geometries(catalog)
    names = sorted({record.name for record in records})
    spaces = sorted({record.space for record in records})
    if not names:
        raise QueryError(
            f"{catalog.location.uri} has no geometry; add one with atlas.add('shapes.zv', link=...), and take a snapshot."
        )
    if len(names) > 1 and len(spaces) > 1:
        raise QueryError(f"The atlas has the geometries {names}; name one with space=...")
    return names[0] if len(names) == 1 else spaces[0]


def _compared(column: str, box: Box, by: str, *, inside: bool) -> list[str]:
    """Compare every axis; an infinite end needs no comparison, but the box must be there."""
    parts = [is_not_null(f"{column}.x")]
    for axis, lo, hi in zip(AXES, box.lo, box.hi, strict=False):
        own = f"{column}.{axis}"
        least, greatest = (own, own) if by == "centroid" else (f"{own}_min", f"{own}_max")
        ends = ((least, ">=", lo), (greatest, "<=", hi)) if inside else ((greatest, ">=", lo), (least, "<=", hi))
        parts += [comparison(side, sign, float(end)) for side, sign, end in ends if np.isfinite(end)]
    return parts
