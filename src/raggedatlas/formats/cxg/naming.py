"""Names by which viewers show features: each feature by one of its own, also where a symbol is shared or missing."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


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
