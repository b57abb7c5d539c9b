"""All that results need of PyTorch: tensors where it is installed, and the class that its DataLoader knows."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@cache
def find_torch() -> Any:  # noqa: ANN401  (a module)
    """Import PyTorch; None where it is not installed."""
    try:
        import torch.utils.data
    except ImportError:
        return None
    return torch


def dataset_class() -> type:
    """Give PyTorch's map-style dataset class; `object` where it is not installed."""
    torch = find_torch()
    return object if torch is None else torch.utils.data.Dataset


def as_tensor(values: NDArray[Any]) -> Any:  # noqa: ANN401  (a tensor or an array)
    """Make an array a tensor that shares its memory; without PyTorch it stays an array."""
    torch = find_torch()
    return values if torch is None else torch.from_numpy(values)


def samples_of(values: Any) -> list[Any]:  # noqa: ANN401
    """Take rows apart, as PyTorch's collation wants them."""
    return list(values) if isinstance(values, np.ndarray) else list(values.unbind())
