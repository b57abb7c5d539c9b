"""Reads cells of a plan into blocks; the one place where the loader meets the store."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from raggedatlas.model.batch import Block
from raggedatlas.query.parts import SpacePlan
from raggedatlas.query.read import SpaceReader
from raggedatlas.store.runtime import BufferPool


class CellReader:
    """Read any cells, any number of times, from any thread; made anew in every process.

    Parameters
    ----------
    spaces : mapping of str to SpacePlan
        What to read.
    threads : int
        Threads of one read.
    pool : BufferPool
        Where the memory of sparse rows comes from.
    """

    def __init__(self, spaces: Mapping[str, SpacePlan], threads: int, pool: BufferPool) -> None:
        self._readers = {name: SpaceReader(space, threads, pool) for name, space in spaces.items()}

    def read(self, rows: NDArray[np.int64], *, sort: bool) -> dict[str, Block]:
        """Read some cells of every space, in the order given; rows may repeat.

        Parameters
        ----------
        rows : (k,) int64
            Positions in the plan.
        sort : bool
            Whether the columns of every row must ascend.
        """
        return {name: reader.read(rows, sort=sort) for name, reader in self._readers.items()}
