"""Reading a geometry store: whole, by a box, by object, by group; on any level; any of its attributes."""

import os
from collections.abc import Iterable, Mapping, Sequence

from numpy.typing import ArrayLike

from raggedatlas.store.location import Location
from raggedatlas.vectors.geometry import Geometry
from raggedatlas.vectors.shapes import Attribute, Groups, Shapes


class VectorStore:
    """An open geometry store. Metadata are read once; local shards are memory-mapped; safe between threads.

    Every call that reads takes ``level`` (0 is the finest), or ``budget`` instead: the finest level with at most so many vertices
    (the coarsest, if none has so few); and ``attributes``: names of any family, None for all.
    """

    def read(
        self, *, level: int | None = None, budget: int | None = None, attributes: Sequence[str] | None = None
    ) -> Shapes:
        """Return all of a level: objects by ascending id, their vertices in order of traversal."""
        raise AssertionError

    def box(
        self,
        lo: ArrayLike,
        hi: ArrayLike,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
        whole: bool | None = None,
    ) -> Shapes:
        """Return what lies in a box, both ends inclusive.

        Parameters
        ----------
        lo, hi : (D,) floats
            Corners in world units.
        whole : bool or None
            True: whole objects that have a vertex in the box. False: the vertices in the box, and the links between them. None: whole
            objects for lines, polylines, streamlines and skeletons, vertices for points, graphs and meshes.
        """
        raise AssertionError

    def objects(
        self,
        ids: Iterable[int],
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
    ) -> Shapes:
        """Return objects by id, in the asked order; one pass over the chunks that hold them. `NotFoundError` for an unknown id."""
        raise AssertionError

    def group(
        self,
        group: int | str,
        *,
        level: int | None = None,
        budget: int | None = None,
        attributes: Sequence[str] | None = None,
    ) -> Shapes:
        """Return the objects of a group, by its number or by its value of the group attribute ``name``."""
        raise AssertionError

    def load(self) -> Geometry:
        """Return the whole store as it is cut, every level and array: what `write` takes."""
        raise AssertionError

    def object_ids(self, level: int = 0) -> ArrayLike:
        """Return the ids of all objects, ascending, (B,) int64."""
        raise AssertionError

    def object_attributes(self, level: int = 0) -> Mapping[str, Attribute]:
        """Return the attributes of all objects."""
        raise AssertionError

    def groups(self, level: int = 0) -> Groups | None:
        """Return the groups of a level with their attributes."""
        raise AssertionError


def open_vectors(location: Location | str | os.PathLike[str]) -> VectorStore:
    """Open a geometry store of either layout.

    Raises
    ------
    NotFoundError
        If there is no geometry store.
    SourceError
        If it is of a generation that is not read, mixes two, or requires a capability that is unknown.
    """
    raise AssertionError
