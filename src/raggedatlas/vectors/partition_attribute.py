"""The attribute by which the chunks of a level are also cut: it stands in their keys, and nowhere else."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError
from raggedatlas.vectors.shapes import Attribute


def read_partition_attribute(
    facts: Mapping[str, Any], keys: NDArray[np.int64], counts: NDArray[np.int64], n_dims: int, where: str
) -> dict[str, Attribute]:
    """Return the attribute that the keys of chunks tell, by its name; nothing where chunks are cut in space alone.

    Parameters
    ----------
    facts : mapping
        What the level says: ``chunk_attribute_name`` and ``chunk_attribute_values``.
    keys : (n, K) int64
        Keys of chunks or fragments; the first part is the number of a value.
    counts : (n,) int64
        Vertices of each.
    n_dims : int
        How many of the parts are space.
    where : str
        The level, for messages.

    Returns
    -------
    dict
        Numbers as they are, texts as codes of categories.

    Raises
    ------
    CorruptError
        If a key has the number of a value that is not there.

    Examples
    --------
    >>> facts = {"chunk_attribute_name": "gene", "chunk_attribute_values": [5, 9]}
    >>> read_partition_attribute(facts, np.array([[0, 0, 0], [1, 0, 0]]), np.array([2, 1]), 2, "0")[
    ...     "gene"
    ... ].values.tolist()
    [5, 5, 9]
    """
    name, values = facts.get("chunk_attribute_name"), facts.get("chunk_attribute_values")
    if not name or not isinstance(values, list) or keys.shape[1] != n_dims + 1:
        return {}
    codes = keys[:, 0]
    if ((codes < 0) | (codes >= len(values))).any():
        bad = codes[(codes < 0) | (codes >= len(values))][0]
        raise CorruptError(f"{where} has a chunk of value {bad} of {name!r}; it names {len(values)} values.")
    numbers = all(isinstance(value, int | float) for value in values)
    if numbers:
        return {str(name): Attribute(np.repeat(np.array(values)[codes] if values else codes, counts))}
    categories = [str(value) for value in values]
    metadata = {"encoding": "dictionary", "categories": categories, "ordered": False, "_FillValue": -1}
    return {str(name): Attribute(np.repeat(codes, counts).astype(np.int32), metadata=metadata)}
