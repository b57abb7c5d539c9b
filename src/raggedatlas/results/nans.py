"""What becomes of missing values in a batch: they stay, or are filled by zero or by a quantile of their own row."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import QueryError


@dataclass(frozen=True)
class NanMode:
    """How NaN is treated.

    Parameters
    ----------
    mode : {False, "zero", "quantile"}
        False leaves them.
    quantile : float
        Between 0 and 1; of the row's other values.

    Raises
    ------
    QueryError
        For another mode, or a quantile outside.
    """

    mode: Literal["zero", "quantile"] | Literal[False] = False
    quantile: float = 0.05

    def __post_init__(self) -> None:
        """Refuse what there is not."""
        if self.mode not in (False, "zero", "quantile"):
            raise QueryError(f"nan_mode is {self.mode!r}; expected false, 'zero' or 'quantile'.")
        if not 0 <= self.quantile <= 1:
            raise QueryError(f"nan_quantile is {self.quantile}; expected a number from 0 to 1.")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "NanMode":
        """Take ``data_set.nan_mode`` and ``data_set.nan_quantile`` of a configuration."""
        told = config.get("data_set", {})
        return cls(told.get("nan_mode") or False, float(told.get("nan_quantile", 0.05)))

    def fill(self, values: NDArray[Any]) -> NDArray[Any]:
        """Fill the NaN of a batch.

        Parameters
        ----------
        values : (k, ...) array
            Left as it is; arrays of other dtypes than floats come back unchanged.

        Returns
        -------
        (k, ...) array
            Filled; a row that has nothing but NaN is filled by zero.

        Examples
        --------
        >>> NanMode("quantile", 0.5).fill(np.array([[1.0, np.nan, 3.0], [np.nan] * 3]))
        array([[1., 2., 3.],
               [0., 0., 0.]])
        """
        if self.mode is False or values.dtype.kind != "f" or not len(values):
            return values
        missing = np.isnan(values)
        if not missing.any():
            return values
        if self.mode == "zero":
            return np.where(missing, values.dtype.type(0), values)
        rows = np.flatnonzero(missing.reshape(len(values), -1).any(axis=1))
        out = values.copy()
        for row in rows:
            here = missing[row]
            known = values[row][~here]
            out[row][here] = np.quantile(known, self.quantile) if known.size else 0
        return out
