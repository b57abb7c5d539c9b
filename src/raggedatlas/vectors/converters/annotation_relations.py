"""What annotations are related to, as groups of a geometry store: a group for each relationship, related id and place in the lists."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.vectors.selection import counts_to_offsets
from raggedatlas.vectors.shapes import Attribute, Groups, Shapes, as_attributes

RELATIONSHIPS = "relationships"
"""The key of a store's root that names the relationships, also those that no annotation has."""

RELATIONSHIP, RELATED, PLACE = "relationship", "related_id", "place"
"""Attributes of the groups: what relates, to which id, and which place it has in an annotation's list (optional on writing)."""

Lists = tuple[NDArray[np.int64], NDArray[np.uint64]]


def groups_of(names: Sequence[str], related: Sequence[Lists], ids: NDArray[np.int64]) -> Groups:
    """Return groups of annotations that are related to the same id.

    Parameters
    ----------
    names : sequence of str
        Of the relationships.
    related : sequence of ((N + 1,) int64, (R,) uint64)
        For each of them, the ids that each annotation names.
    ids : (N,) int64
        Of the annotations.

    Returns
    -------
    Groups
        By relationship, place and related id; a list comes back in its order, as what stands in it several times does.

    Examples
    --------
    >>> made = groups_of(["pre"], [(np.array([0, 2, 3]), np.array([7, 8, 7], np.uint64))], np.array([1, 5]))
    >>> made.attributes["related_id"].values.tolist(), made.members(0).tolist()
    ([7, 8], [1, 5])
    """
    columns = []
    for k, (offsets, one) in enumerate(related):
        counts = np.diff(offsets)
        within = np.arange(len(one)) - np.repeat(offsets[:-1], counts)
        columns.append((np.full(len(one), k), within, one, np.repeat(np.arange(len(ids)), counts)))
    empty = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.int64))
    number, place, named, owner = (np.concatenate(column) for column in zip(empty, *columns, strict=True))
    order = np.lexsort((owner, named, place, number))
    number, place, named, owner = number[order], place[order], named[order], owner[order]
    new = (np.diff(number) != 0) | (np.diff(place) != 0) | (named[1:] != named[:-1])
    first = np.flatnonzero(np.concatenate([np.ones(min(1, len(order)), bool), new]))
    attributes = {
        RELATIONSHIP: Attribute(np.array([names[k] for k in number[first].tolist()], dtype=str)),
        RELATED: Attribute(named[first]),
        PLACE: Attribute(place[first].astype(np.int32)),
    }
    return Groups(np.append(first, len(order)).astype(np.int64), ids[owner], attributes)


def relates(groups: Groups | None) -> bool:
    """Tell whether groups say what annotations are related to."""
    if groups is None or not {RELATIONSHIP, RELATED} <= set(groups.attributes):
        return False
    named = as_attributes(groups.attributes)[RELATED]
    return named.n_channels == 1 and named.values.dtype.kind in "iu" and named.values.ndim == 1


def lists_of(shapes: Shapes, names: Sequence[str]) -> tuple[list[str], tuple[Lists, ...]]:
    """Return the names of relationships and, for each, what each object is related to.

    Parameters
    ----------
    shapes : Shapes
        With ids, and maybe groups that `relates` is true of.
    names : sequence of str
        Relationships that are known; those of the groups come behind them.

    Raises
    ------
    SourceError
        If a group names an object that is not there, or a related id is negative.
    """
    groups = shapes.groups
    if groups is None or not relates(groups):
        return [*names], tuple((np.zeros(shapes.n_objects + 1, np.int64), np.zeros(0, np.uint64)) for _ in names)
    said = as_attributes(groups.attributes)
    labels = np.asarray(said[RELATIONSHIP].values).astype(str)
    found = [*dict.fromkeys([*names, *labels.tolist()])]
    named = said[RELATED].values
    if named.size and named.min() < 0:
        raise SourceError(f"A group is of the related id {named.min()}; expected 0 to 2**64 - 1.")
    ids = np.asarray(shapes.ids)
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids, groups.ids, sorter=order), max(len(ids) - 1, 0))
    rows = order[at] if len(ids) else np.zeros(len(groups.ids), np.int64)
    stray = np.flatnonzero(ids[rows] != groups.ids) if len(ids) else np.arange(len(groups.ids))
    if len(stray):
        raise SourceError(f"A group names annotation {groups.ids[stray[0]]}, which is not there.")
    owner = np.repeat(np.arange(groups.n_groups), np.diff(groups.offsets))
    place = said[PLACE].values if PLACE in said else np.zeros(groups.n_groups, np.int64)
    return found, tuple(_lists(rows, owner, place, (labels == name, named), len(ids)) for name in found)


def _lists(
    rows: NDArray[np.int64],
    owner: NDArray[np.int64],
    place: NDArray[np.int64],
    groups: tuple[NDArray[np.bool_], NDArray[np.uint64]],
    n_objects: int,
) -> Lists:
    """Return what each object is related to by the groups that are meant."""
    meant, named = groups
    inside = np.flatnonzero(meant[owner])
    inside = inside[np.lexsort((owner[inside], place[owner[inside]], rows[inside]))]
    return counts_to_offsets(np.bincount(rows[inside], minlength=n_objects)), named[owner[inside]].astype(np.uint64)


def by_related(lists: Lists) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each related id and the rows of the annotations that name it, each once.

    Examples
    --------
    >>> [(key, rows.tolist()) for key, rows in by_related((np.array([0, 2, 3]), np.array([8, 7, 8], np.uint64)))]
    [(7, [0]), (8, [0, 1])]
    """
    offsets, named = lists
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((owner, named))
    keys, first = np.unique(named[order], return_index=True)
    for key, rows in zip(keys.tolist(), np.split(owner[order], first[1:]), strict=False):
        yield key, np.unique(rows)
