"""Words that arguments of several calls take, importable without any library: signatures and the command line share them."""

from typing import Literal, get_args

Metric = Literal["l2", "cosine", "dot"]
"""Distance of vectors: squared Euclidean, or one minus the cosine or the dot product."""

METRICS: tuple[Metric, ...] = get_args(Metric)

OnConflict = Literal["error", "replace", "keep"]
"""What to do with a cell that has another value."""
