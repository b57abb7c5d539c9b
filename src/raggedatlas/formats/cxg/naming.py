"""Names of cells and features: how many are shared, and one of its own for each feature where a symbol is shared or missing."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd


MOST_HASHED = 1 << 23
"""Names whose hashes are held at once; they take 8 bytes each, and twice that while they are sorted."""


def count_shared(blocks: Callable[[], Iterable[NDArray[Any]]], n: int) -> int:
    """Count the names that occur before, by hashes of 64 bits, in bounded memory.

    Parameters
    ----------
    blocks : callable
        Each call walks over all names, as (k,) arrays of text; called once for each `MOST_HASHED` names.
    n : int
        How many names there are.

    Examples
    --------
    >>> count_shared(lambda: [np.array(["a", "b"], object), np.array(["a", "a"], object)], 4)
    2
    """
    import pandas as pd

    n_parts, shared = np.uint64(1 + n // MOST_HASHED), 0
    for part in range(int(n_parts)):
        hashes = (pd.util.hash_array(block.astype(object), categorize=False) for block in blocks())
        found = np.concatenate([np.empty(0, np.uint64), *(each[each % n_parts == part] for each in hashes)])
        found.sort()
        shared += int(np.count_nonzero(found[1:] == found[:-1]))
    return shared


def distinct_names(names: "pd.Series[Any]") -> "list[str]":
    """Give each feature a name of its own: the one it has, with the feature's id where others have it too; the id where it has none.

    Parameters
    ----------
    names : pandas.Series
        Text, indexed by id.

    Returns
    -------
    list of str
        In the same order; unique where ids are.

    Examples
    --------
    >>> import pandas as pd
    >>> distinct_names(pd.Series(["CD3D", "TBCE", "TBCE", None], index=["a", "b", "c", "d"]))
    ['CD3D', 'TBCE (b)', 'TBCE (c)', 'd']
    """
    texts = ["" if missing else str(name) for name, missing in zip(names, names.isna(), strict=True)]
    taken: dict[str, int] = {}
    for text in texts:
        taken[text] = taken.get(text, 0) + 1
    ids = map(str, names.index)
    return [
        text if text and taken[text] == 1 else f"{text} ({one})" if text else one
        for text, one in zip(texts, ids, strict=True)
    ]
