"""Models that tests name by this file."""

import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sums(X: NDArray[np.float32]) -> dict[str, Any]:
    """Give two outputs: half of each value, and the sum of a cell."""
    return {"data": X / 2, "total": X.sum(axis=1)}


def slowly(X: NDArray[np.float32]) -> NDArray[np.float32]:
    """Take so long that somebody can kill the run."""
    time.sleep(0.2)
    return X


def dying(X: NDArray[np.float32]) -> NDArray[np.float32]:
    """End the process as a killer would, at the last cells."""
    if len(X) < 10:
        os._exit(9)
    return X


class Scaled:
    """A class that is called with options."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, X: NDArray[np.float32]) -> NDArray[np.float32]:
        """Scale the values."""
        return X * self.by
