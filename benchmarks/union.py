"""Join the made datasets into one h5ad file over all genes, for systems that know no ragged features.

``python benchmarks/union.py DATA`` reads the files that ``maker.py`` wrote, 2,000 cells at a time,
and writes ``DATA/union.h5ad``: columns in the order of the universe, rows sorted by column.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from maker import Made, append, dataset_genes, gene_ids, open_matrix, read_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator

    import h5py

UNION = "union.h5ad"
_BLOCK = 2_000


def make_union(folder: Path) -> Path:
    """Write the union of a folder of made data, unless it is there; its path."""
    import h5py

    target = folder / UNION
    if target.exists():
        return target
    made = read_manifest(folder)
    part = target.with_suffix(".part")
    with h5py.File(part, "w") as file:
        file.attrs["encoding-type"] = "anndata"
        file.attrs["encoding-version"] = "0.1.0"
        matrix = file.create_group("X")
        open_matrix(matrix, (sum(made.cells), made.recipe.universe))
        lengths: list[Any] = [np.zeros(1, dtype=np.int64)]
        for number, name in enumerate(made.files):
            with h5py.File(folder / name) as source:
                for counts, indices, sizes in _blocks(source, dataset_genes(made.recipe, number)):
                    append(matrix["data"], counts)
                    append(matrix["indices"], indices)
                    lengths.append(sizes)
        indptr = np.cumsum(np.concatenate(lengths))
        matrix.create_dataset("indptr", data=indptr.astype(np.int32 if indptr[-1] < 2**31 else np.int64))
        _write_frames(file, folder, made)
    part.rename(target)
    return target


def _blocks(source: h5py.File, genes: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Counts, universe columns and row lengths of consecutive cells, rows sorted."""
    from scipy import sparse

    matrix, n_universe = source["X"], int(genes.max()) + 1
    indptr = matrix["indptr"][:].astype(np.int64)
    for first in range(0, indptr.size - 1, _BLOCK):
        rows = indptr[first : first + _BLOCK + 1]
        span = slice(int(rows[0]), int(rows[-1]))
        columns = genes[matrix["indices"][span]].astype(np.int32)
        block = sparse.csr_matrix((matrix["data"][span], columns, rows - rows[0]), (rows.size - 1, n_universe))
        block.sort_indices()
        yield block.data, block.indices.astype(np.int32), np.diff(block.indptr)


def _write_frames(file: h5py.File, folder: Path, made: Made) -> None:
    import h5py
    import pandas as pd
    from anndata.io import read_elem, write_elem

    frames = []
    for name in made.files:
        with h5py.File(folder / name) as source:
            frames.append(read_elem(source["obs"]))
    obs = pd.concat(frames)
    for column in ("cell_type", "donor"):
        obs[column] = obs[column].astype("category")
    write_elem(file, "obs", obs)
    write_elem(file, "var", pd.DataFrame(index=gene_ids(made.recipe).astype(object)))
    for name in ("obsm", "varm", "obsp", "varp", "layers", "uns"):
        write_elem(file, name, {})


def main() -> None:
    """Join the files of one folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path)
    print(make_union(parser.parse_args().data))


if __name__ == "__main__":
    main()
