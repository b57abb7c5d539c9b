"""The two loops of coarsening: how much each vertex of a line matters, and the unbranched chains of a graph.

This module imports numba at the top, so it is imported inside functions only.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def _offset(points: NDArray[np.float64], i: int, a: int, b: int) -> float:
    """Return the squared distance of point i from the segment between points a and b."""
    along, length = 0.0, 0.0
    for d in range(points.shape[1]):
        edge = points[b, d] - points[a, d]
        along += (points[i, d] - points[a, d]) * edge
        length += edge * edge
    share = min(max(along / length, 0.0), 1.0) if length > 0 else 0.0
    total = 0.0
    for d in range(points.shape[1]):
        gap = points[i, d] - points[a, d] - share * (points[b, d] - points[a, d])
        total += gap * gap
    return total


@njit(cache=True, nogil=True)
def weigh_lines(points: NDArray[np.float64], offsets: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
    """Give each vertex of each line the largest tolerance at which Douglas and Peucker's algorithm keeps it.

    Ends get infinity. A vertex never weighs more than the one that split its piece, so that what is kept at a larger
    tolerance is part of what is kept at a smaller one.
    """
    longest = 1
    for line in range(offsets.size - 1):
        longest = max(longest, offsets[line + 1] - offsets[line])
    pieces = np.empty((longest + 1, 2), np.int64)
    bounds = np.empty(longest + 1)
    for line in range(offsets.size - 1):
        first, last = offsets[line], offsets[line + 1] - 1
        if last < first:
            continue
        weights[first] = weights[last] = np.inf
        pieces[0, 0], pieces[0, 1], bounds[0] = first, last, np.inf
        n = 1
        while n:
            n -= 1
            a, b, bound = pieces[n, 0], pieces[n, 1], bounds[n]
            if b - a < 2:
                continue
            worst, at = -1.0, a + 1
            for i in range(a + 1, b):
                gap = _offset(points, i, a, b)
                if gap > worst:
                    worst, at = gap, i
            weight = min(bound, np.sqrt(worst))
            weights[at] = weight
            pieces[n, 0], pieces[n, 1], bounds[n] = a, at, weight
            pieces[n + 1, 0], pieces[n + 1, 1], bounds[n + 1] = at, b, weight
            n += 2


@njit(cache=True, nogil=True)
def walk_chains(
    adjacency: NDArray[np.int64],
    bounds: NDArray[np.int64],
    fixed: NDArray[np.bool_],
    members: NDArray[np.int64],
    chains: NDArray[np.int64],
) -> int:
    """Follow every edge from fixed vertex to fixed vertex; return how many chains there are.

    `adjacency` has rows of (other end, edge) and those of vertex v are ``bounds[v]`` to ``bounds[v + 1]``. `members` (room for two
    vertices for each edge) takes the vertices of the chains, both ends included, and `chains` has rows of (end in `members`, first
    edge). A ring without a fixed vertex begins and ends at its lowest one.
    """
    used = np.zeros(adjacency.shape[0] // 2, np.bool_)
    n_members, n_chains = 0, 0
    for ring in range(2):
        for start in range(fixed.size):
            if fixed[start] == (ring == 1):
                continue
            for entry in range(bounds[start], bounds[start + 1]):
                here, edge = adjacency[entry, 0], adjacency[entry, 1]
                if used[edge]:
                    continue
                used[edge] = True
                chains[n_chains, 1] = edge
                members[n_members], members[n_members + 1] = start, here
                n_members += 2
                while not fixed[here] and here != start:
                    for follow in range(bounds[here], bounds[here + 1]):
                        if not used[adjacency[follow, 1]]:
                            used[adjacency[follow, 1]] = True
                            here = adjacency[follow, 0]
                            break
                    members[n_members] = here
                    n_members += 1
                chains[n_chains, 0] = n_members
                n_chains += 1
    return n_chains
