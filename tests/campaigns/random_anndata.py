"""Random AnnData objects of anndata's own tests, through h5ad, Zarr 2, Zarr 3 and an atlas, compared with anndata's own writers."""

import argparse
import importlib
import json
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import scipy.sparse as sp

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import AtlasError
from raggedatlas.formats.copying import copy
from raggedatlas.formats.registry import open_sink
from support.anndata_strategies import assert_equal

WAYS = ("h5ad", "zarr 2", "zarr 3", "atlas")
"""Where an object is written to and read from again."""

NO_TEXT = "equal but for the type of no text"
"""Names or categories of an axis of length 0, of which pandas 3 makes ``str`` or ``object`` by how the nothing was stored."""

X_TYPES = ("none", "csr_matrix", "csc_matrix", "csr_array", "csc_array", "dense", "dask")
X_DTYPES = ("f4", "f8", "i2", "i4", "i8", "u1", "?")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one object on one way.

    Parameters
    ----------
    way : str
        Of `WAYS`.
    verdict : str
        ``"equal"``, `NO_TEXT`, ``"both refuse"``, or what is wrong: ``"differs"``, ``"only we refuse"``, ``"only anndata refuses"``, ``"foreign error"``.
    said : str
        The error or difference.
    """

    way: str
    verdict: str
    said: str = ""


@dataclass
class Tally:
    """Outcomes of all objects.

    Parameters
    ----------
    counts : Counter
        (way, verdict) -> how many.
    wrong : list of str
        One line for each outcome that is wrong.
    refusals : Counter
        First words of the errors that both raise -> how many.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)

    def note(self, seed: int, outcome: Outcome) -> None:
        """Count one outcome."""
        self.counts[outcome.way, outcome.verdict] += 1
        if outcome.verdict == "both refuse":
            self.refusals[outcome.said] += 1
        elif outcome.verdict not in ("equal", NO_TEXT):
            self.wrong.append(f"seed {seed}, {outcome.way}: {outcome.verdict}: {outcome.said}")


def random_anndata(seed: int) -> ad.AnnData:
    """Make the random AnnData of a seed, by `gen_adata` of anndata's tests, with text, missing text and sometimes a raw.

    Parameters
    ----------
    seed : int
        Decides everything.
    """
    da = importlib.import_module("dask.array")
    from anndata.tests import helpers

    rng = np.random.default_rng(seed)
    random.seed(seed)
    np.random.seed(seed)  # what gen_adata draws from
    makers: dict[str, Any] = {
        "none": None, "csr_matrix": sp.csr_matrix, "csc_matrix": sp.csc_matrix, "csr_array": sp.csr_array,
        "csc_array": sp.csc_array, "dense": np.asarray, "dask": da.from_array,
    }  # fmt: skip
    # anndata writes no tables of xarray, so that one of them ends it.
    kinds = {
        **dict.fromkeys([*helpers.DEFAULT_KEY_TYPES, helpers.AwkArray, helpers.DaskArray], 0.7),
        helpers.XDataset: 0.02,
    }
    some: Callable[[], Any] = lambda: tuple(kind for kind, share in kinds.items() if rng.random() < share)  # noqa: E731
    columns: Callable[[], Any] = lambda: [kind for kind in helpers.DEFAULT_COL_TYPES if rng.random() < 0.3]  # noqa: E731
    n_obs, n_var = (int(n) for n in rng.integers(1, (40, 30)) * (rng.random(2) < 0.97))
    maker: Any = makers[str(rng.choice(X_TYPES))]
    dtype = np.dtype(str(rng.choice(X_DTYPES)))
    adata: ad.AnnData = helpers.gen_adata(
        (n_obs, n_var), None if maker is None else lambda values: maker(values.astype(dtype)), obs_dtypes=columns(),
        var_dtypes=columns(), obsm_types=some(), varm_types=some(), layers_types=some(), random_state=rng,
        sparse_fmt=str(rng.choice(["csr", "csc"])),
    )  # fmt: skip
    for group in (adata.obsp, adata.varp, adata.uns):
        for key in [key for key in group if rng.random() < 0.6]:
            del group[key]
    adata.obs["text"] = [f"t{k}" for k in rng.integers(0, 9, n_obs)]
    adata.var["text"] = pd.array([f"v{k}" for k in rng.integers(0, 9, n_var)], dtype=object)
    if rng.random() < 0.3:
        adata.obs["missing"] = pd.array([None if rng.random() < 0.5 else "x" for _ in range(n_obs)], dtype="string")
    if rng.random() < 0.3 and adata.X is not None:
        adata.raw = adata
    if rng.random() < 0.3:
        adata.obs.index.name, adata.var.index.name = "barcode", "gene id"
    return adata


def compare(adata: ad.AnnData, way: str, folder: Path) -> Outcome:
    """Write an object on one way by us and by anndata, and compare what anndata reads.

    Parameters
    ----------
    adata : AnnData
        What is written; copies are.
    way : str
        Of `WAYS`. What an atlas gives back is compared with what anndata reads of its own h5ad.
    folder : Path
        Empty.
    """
    theirs, refused = _tried(lambda: _by_anndata(adata.copy(), way, folder))
    ours, error = _tried(lambda: _by_us(adata.copy(), way, folder))
    said = "" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if error is not None and not isinstance(error, AtlasError):
        return Outcome(way, "foreign error", said)
    if error is not None:
        if refused is not None:
            return Outcome(way, "both refuse", f"{type(error).__name__} / {type(refused).__name__}")
        return Outcome(way, "only we refuse", said)
    if refused is not None:
        return Outcome(way, "only anndata refuses", f"{type(refused).__name__}: {refused}"[:300])
    try:
        assert_equal(theirs, ours)
    except AssertionError as difference:
        said = " ".join(str(difference).split())[:300]
        empty = 0 in adata.shape and any(sign in said for sign in ("]: empty", "categories=[]"))
        return Outcome(way, NO_TEXT if empty else "differs", said)
    return Outcome(way, "equal")


def _tried(act: Callable[[], ad.AnnData]) -> tuple[ad.AnnData | None, Exception | None]:
    try:
        return act(), None
    except Exception as error:  # noqa: BLE001  (whatever either raises is what is compared)
        return None, error


def _by_anndata(adata: ad.AnnData, way: str, folder: Path) -> ad.AnnData:
    path = folder / ("theirs.zarr" if way.startswith("zarr") else "theirs.h5ad")
    if path.suffix == ".h5ad":
        adata.write_h5ad(path, convert_strings_to_categoricals=False)
        return ad.read_h5ad(path)
    with ad.settings.override(zarr_write_format=int(way[-1])):
        adata.write_zarr(path, convert_strings_to_categoricals=False)
    return ad.read_zarr(path)


def _by_us(adata: ad.AnnData, way: str, folder: Path) -> ad.AnnData:
    if way == "atlas":
        atlas = RaggedAtlas.create(str(folder / "atlas"))
        atlas.add(adata, "d", progress=False)
        back: ad.AnnData = atlas.dataset("d").to_anndata()
        return back
    options: dict[str, Any] = {} if way == "h5ad" else {"zarr_format": int(way[-1])}
    path = folder / ("ours.h5ad" if way == "h5ad" else "ours.zarr")
    copy(adata, open_sink(path, **options))
    return ad.read_h5ad(path) if way == "h5ad" else ad.read_zarr(path)


def main() -> None:
    """Compare as many objects as asked, and print the counts as JSON; exit with 1 if any outcome is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--n", type=int, default=321, help="how many objects")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    asked = parser.parse_args()
    tally = Tally()
    with warnings.catch_warnings(action="ignore"), ad.settings.override(allow_write_nullable_strings=True):
        for seed in range(asked.seed, asked.seed + asked.n):
            adata = random_anndata(seed)
            for way in asked.ways:
                with tempfile.TemporaryDirectory() as folder:
                    tally.note(seed, compare(adata, way, Path(folder)))
    counts = {f"{way}, {verdict}": n for (way, verdict), n in sorted(tally.counts.items())}
    versions = {"anndata": ad.__version__, "pandas": pd.__version__, "numpy": np.__version__}
    sys.stdout.write(
        json.dumps({**versions, "counts": counts, "refused by both": tally.refusals, "wrong": tally.wrong}, indent=1)
        + "\n"
    )
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
