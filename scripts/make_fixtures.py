"""Cuts the real files that tests and demo use out of the published ones: ``make_fixtures.py SOURCE [TARGET]``.

SOURCE is a folder with the published files (their origins stand in ``tests/data/README.md``). Nothing is
computed: every value of a fixture is at the same cell and feature of its source. Cuts are prefixes or
even strides, so that running this twice gives the same values.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np

GZIP = {"compression": "gzip", "compression_opts": 9, "shuffle": True, "track_times": False}
TENX = {
    "GSM4339772_C144_filtered_feature_bc_matrix.h5": "lung_C144.h5",
    "GSM4475052_C149_filtered_feature_bc_matrix.h5": "lung_C149.h5",
}
TENX_CELLS = 250
MULTIMODAL_CELLS = 60
MULTIMODAL_STRIDE = 3
REDUCED_CELLS = 300


def write_array(group: h5py.Group, name: str, values: Any, like: h5py.Dataset) -> None:
    """Write values under a name, with the dtype and the attributes of another array, compressed."""
    options = GZIP if np.ndim(values) else {}
    made = group.create_dataset(name, data=values, dtype=like.dtype, **options)
    made.attrs.update(like.attrs)


def copy_tree(source: h5py.Group, target: h5py.Group, replaced: dict[str, Any]) -> None:
    """Copy a tree of groups and arrays, taking the arrays named in `replaced` from there."""
    target.attrs.update(source.attrs)
    for name, item in source.items():
        if isinstance(item, h5py.Group):
            copy_tree(item, target.create_group(name), replaced)
        else:
            write_array(target, name, replaced.get(item.name, item[()]), item)


def cut_rows(matrix: h5py.Group, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Take rows of a compressed sparse row matrix without touching the order of its entries."""
    indptr = matrix["indptr"][:]
    taken = np.concatenate([np.arange(indptr[row], indptr[row + 1]) for row in rows])
    lengths = indptr[rows + 1] - indptr[rows]
    return {
        "data": matrix["data"][:][taken],
        "indices": matrix["indices"][:][taken],
        "indptr": np.concatenate([[0], np.cumsum(lengths)]),
    }


def cut_tenx(source: Path, target: Path) -> None:
    """Keep every k-th barcode of a 10x matrix and all of its features, in the order of the source."""
    with h5py.File(source) as old, h5py.File(target, "w") as new:
        matrix = old["matrix"]
        n_cells = matrix["barcodes"].shape[0]
        rows = np.linspace(0, n_cells - 1, TENX_CELLS).astype(np.int64)
        cut: dict[str, Any] = cut_rows(matrix, rows)
        cut["barcodes"] = matrix["barcodes"][:][rows]
        cut["shape"] = np.array([matrix["shape"][0], len(rows)])
        copy_tree(old, new, {f"/matrix/{name}": values for name, values in cut.items()})


def cut_reduced(source: Path, target: Path) -> None:
    """Keep the first cells of the reduced PBMC file in everything that has a row per cell."""
    keep = np.arange(REDUCED_CELLS)
    with h5py.File(source) as old, h5py.File(target, "w") as new:
        n_cells = old["X"].shape[0]
        replaced: dict[str, Any] = {"/X": old["X"][: len(keep)]}
        replaced |= {f"/raw/X/{name}": values for name, values in cut_rows(old["raw/X"], keep).items()}
        for axis in ("obs", "obsm"):
            old[axis].visititems(
                lambda _, item: (
                    replaced.update({item.name: item[: len(keep)]})
                    if isinstance(item, h5py.Dataset) and item.shape[0] == n_cells
                    else None
                )
            )
        for graph in old["obsp"].values():
            cut = cut_rows(graph, keep)
            inside = cut["indices"] < len(keep)
            starts = np.concatenate([[0], np.cumsum(inside)])
            replaced |= {
                f"{graph.name}/data": cut["data"][inside],
                f"{graph.name}/indices": cut["indices"][inside],
                f"{graph.name}/indptr": starts[cut["indptr"]],
            }
        copy_tree(old, new, replaced)
        new["raw/X"].attrs["shape"] = [len(keep), old["X"].shape[1]]
        for graph in new["obsp"].values():
            graph.attrs["shape"] = [len(keep), len(keep)]


def make_sparse(source: Path, target: Path) -> None:
    """Write a file with a dense X in the layout of today, its X as a compressed sparse row matrix."""
    import anndata
    from scipy import sparse

    adata = anndata.read_h5ad(source)
    adata.X = sparse.csr_matrix(adata.X)
    adata.write_h5ad(target, compression="gzip", compression_opts=9)


def cut_multimodal(source: Path, target: Path) -> None:
    """Keep the first cells of both modalities and every third gene; receptor lists stay nested.

    The union of cells keeps its old order. The genes are thinned because names are stored twice and
    cannot be compressed; the features of the file are those of its expression, the receptors have none.
    """
    with h5py.File(source) as old, h5py.File(target, "w") as new:
        expression, receptors = old["mod/gex"], old["mod/airr"]
        n_genes = expression["var/_index"].shape[0]
        genes = np.arange(0, n_genes, MULTIMODAL_STRIDE)
        replaced = cut_union(old)
        for kind in ("gex", "airr"):
            for item in old[f"mod/{kind}/obs"].values():
                array = item["codes"] if isinstance(item, h5py.Group) else item
                replaced[array.name] = array[:MULTIMODAL_CELLS]
            replaced[f"/varm/{kind}"] = old[f"varm/{kind}"][:][genes]
            present = old[f"varmap/{kind}"][:][genes]
            replaced[f"/varmap/{kind}"] = np.where(present > 0, np.arange(1, len(genes) + 1), 0)
        replaced["/var/_index"] = old["var/_index"][:][genes]
        replaced["/mod/gex/var/_index"] = expression["var/_index"][:][genes]
        cut = cut_rows(expression["X"], np.arange(MULTIMODAL_CELLS))
        kept = cut["indices"] % MULTIMODAL_STRIDE == 0
        starts = np.concatenate([[0], np.cumsum(kept)])
        replaced["/mod/gex/X/data"] = cut["data"][kept]
        replaced["/mod/gex/X/indices"] = cut["indices"][kept] // MULTIMODAL_STRIDE
        replaced["/mod/gex/X/indptr"] = starts[cut["indptr"]]
        replaced["/mod/gex/obsm/X_umap_orig"] = expression["obsm/X_umap_orig"][:MULTIMODAL_CELLS]
        replaced["/mod/airr/X"] = receptors["X"][:MULTIMODAL_CELLS]
        cut_lists(receptors["obsm/airr"], replaced)
        copy_tree(old, new, replaced)
        new["mod/gex/X"].attrs["shape"] = [MULTIMODAL_CELLS, len(genes)]
        new["mod/airr/obsm/airr"].attrs["length"] = MULTIMODAL_CELLS


def cut_union(old: h5py.File) -> dict[str, Any]:
    """Find the cells of the whole file that the kept prefixes of the two modalities leave."""
    names = [old[f"mod/{kind}/obs/_index"][:MULTIMODAL_CELLS] for kind in ("gex", "airr")]
    union = old["obs/_index"][:]
    kept = np.flatnonzero(np.isin(union, np.concatenate(names)))
    replaced: dict[str, Any] = {"/obs/_index": union[kept]}
    for kind in ("gex", "airr"):
        places = old[f"obsmap/{kind}"][:][kept]
        places[places > MULTIMODAL_CELLS] = 0
        replaced[f"/obsmap/{kind}"] = places
        replaced[f"/obsm/{kind}"] = places > 0
    return replaced


def cut_lists(lists: h5py.Group, replaced: dict[str, Any]) -> None:
    """Keep the first lists of an array of lists of records, and of the records those in them.

    The text buffers below the records are kept whole: they are addressed by offset and may be longer.
    """
    form = json.loads(lists.attrs["form"])
    outer = lists[f"{form['form_key']}-offsets"]
    offsets = outer[: MULTIMODAL_CELLS + 1]
    n_records = outer[-1]
    replaced[outer.name] = offsets
    for item in lists.values():
        if item is not outer and item.shape == (n_records,):
            replaced[item.name] = item[: offsets[-1]]


def main(source: Path, target: Path) -> None:
    """Write every fixture into the target folder."""
    target.mkdir(parents=True, exist_ok=True)
    for name, short in TENX.items():
        cut_tenx(source / name, target / short)
    shutil.copyfile(source / "pbmc_10k_protein_v3.h5ad", target / "pbmc_10k_protein_v3.h5ad")
    make_sparse(source / "pbmc_5k_protein_v3.h5ad", target / "pbmc_5k_protein_v3.h5ad")
    cut_reduced(source / "10x_pbmc68k_reduced.h5ad", target / "pbmc68k_reduced.h5ad")
    cut_multimodal(source / "wu2020_200.h5mu", target / "wu2020.h5mu")


if __name__ == "__main__":
    here = Path(__file__).parent.parent / "tests" / "data"
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else here)
