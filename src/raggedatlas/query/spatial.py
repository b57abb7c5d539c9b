"""What a query can ask of geometry: cells in a box, the shapes of cells, their centroids beside their values."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from numpy.typing import ArrayLike

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.geometries import find_geometries, rows_of_stores
from raggedatlas.errors import QueryError
from raggedatlas.model.arguments import checked
from raggedatlas.query.boxes import Within, usual_geometry, within
from raggedatlas.query.geometry import read_shapes
from raggedatlas.query.plan import plan_rows
from raggedatlas.query.rows import known_columns
from raggedatlas.query.spec import QuerySpec

if TYPE_CHECKING:
    from raggedatlas.vectors.shapes import Shapes

Q = TypeVar("Q", bound="SpatialQuery")


@checked
class SpatialQuery:
    """The part of `Query` that knows geometry."""

    catalog: Catalog
    spec: QuerySpec

    def within(
        self, bbox: ArrayLike, space: str | None = None, *, by: Literal["bbox", "centroid", "exact"] = "bbox"
    ) -> Self:
        """Keep cells whose shape meets a box, beside the conditions asked before.

        Parameters
        ----------
        bbox : (2 D,) or (2, D) floats
            Least corner, then greatest, both inclusive, in world units and the order of the store's axes, D = 2 to 4:
            ``(xmin, ymin, xmax, ymax)``. Axes of the store beyond D are of no matter; an end may be infinite.
        space : str or None
            Name or feature space of the geometry; None takes the only one. A feature space means the stores of all datasets,
            whatever they are called.
        by : {"bbox", "centroid", "exact"}
            ``"bbox"``: the box of the shape meets this one; ``"centroid"``: the mean of its vertices lies in it. Both are answered from
            the cell table. ``"exact"`` reads the shapes of those whose box lies across the border: a point, edge or face meets the box,
            or an outline (``segmentation_boundary``) encloses it.

        Raises
        ------
        QueryError
            For a box that is none, or has more axes than the shapes; for a feature space in which a cell chosen so far has several
            geometries.
        NotFoundError
            If there is no such geometry in this snapshot.

        Examples
        --------
        >>> query.within((0, 0, 500, 500), space="segmentation_boundary")  # doctest: +SKIP
        """
        found = within(self.catalog, bbox, space, by)
        self._refuse_shared(found)
        return _changed(self, filters=(*self.spec.filters, found))

    def _refuse_shared(self, found: Within) -> None:
        """Refuse a box over stores of which a cell that was chosen so far has several."""
        having = [(uid, record.name) for record in found.records for uid in record.cells_of]
        if len({uid for uid, _ in having}) < len(set(having)):
            parts = tuple(dict.fromkeys(f"{record.column}.zarr_group" for record in found.records))
            spec = QuerySpec(filters=self.spec.filters)
            cells, _ = plan_rows(spec, self.catalog, known_columns(self.catalog), (), parts)
            rows_of_stores(found.records, cells.table, found.name)

    def geometry(
        self,
        space: str | None = None,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
    ) -> "Shapes":
        """Read the shapes of the chosen cells, in one pass over the touched chunks of every store.

        Parameters
        ----------
        space : str or None
            Name or feature space of the geometry; None takes the only one. A feature space means the stores of all datasets,
            whatever they are called.
        level, budget : int or None
            Which level of detail (0, the finest, by default), or the finest with at most so many vertices in a store.
        attributes : sequence of str or None
            Which attributes; None takes all.

        Returns
        -------
        Shapes
            Object ``i`` belongs to row ``i`` of the query, as `to_pandas` and `to_arrow` have it; ids are the rows. A cell without a shape
            is an empty object. Object attributes: ``uid``, ``object_id`` (in its own store, -1 without) and ``present``.

        Raises
        ------
        NotFoundError
            If there is no such geometry in this snapshot.
        QueryError
            If the touched stores hold different kinds or numbers of axes, or a chosen cell has several geometries of the feature space.
        """
        name = usual_geometry(self.catalog) if space is None else space
        return read_shapes(self.spec, self.catalog, name, level=level, budget=budget, attributes=attributes)

    def with_centroids(self, space: str | None = None, key: str = "spatial") -> Self:
        """Take centroids of shapes along as ``obsm[key]``, (n_cells, D) float64: what plotting tools expect in ``obsm["spatial"]``.

        Parameters
        ----------
        space : str or None
            Name or feature space of the geometry; None takes the only one. A feature space means the stores of all datasets,
            whatever they are called.
        key : str
            Under which name.

        Raises
        ------
        NotFoundError
            If there is no such geometry in this snapshot.
        QueryError
            If its stores have different numbers of axes.

        Notes
        -----
        Read from the cell table; NaN for a cell without a shape. A member of a file's `obsm` of the same name is left out.
        """
        name = usual_geometry(self.catalog) if space is None else space
        axes = {len(record.axes) for record in find_geometries(self.catalog, name)}
        if len(axes) > 1:
            raise QueryError(f"The stores of {name!r} have {sorted(axes)} axes; choose geometry that agrees.")
        kept = tuple(entry for entry in self.spec.centroids if entry[1] != key)
        return _changed(self, centroids=(*kept, (name, key)))


def _changed(query: Q, **changes: Any) -> Q:  # noqa: ANN401  (fields of the spec)
    return replace(query, spec=replace(query.spec, **changes))  # type: ignore[type-var]
