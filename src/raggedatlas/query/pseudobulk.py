"""Sums of counts per sample for statistics on samples: streamed and sparse, with what was measured and what the design allows."""

import contextlib
import io
import re
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.errors import MissingExtraError, QueryError
from raggedatlas.model.batch import Block, CsrBlock
from raggedatlas.model.frames import DATASET
from raggedatlas.query.cells import cell_columns
from raggedatlas.query.compute import count_measured, frame_of, group_cells
from raggedatlas.query.modalities import make_var
from raggedatlas.query.outputs import atlas_facts
from raggedatlas.query.plan import plan_read
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.executors import Workers

if TYPE_CHECKING:
    import anndata as ad
    import pandas as pd
    from scipy.sparse import csr_matrix

LEAST_MEASURED = 0.5
"""Share of the features that a sample has to have measured; of those below, the notes tell."""

_MOST_NAMED = 5
_PARTIAL_BYTES = 1 << 26


@dataclass
class _Sums:
    """Sparse sums of groups by features, to which blocks are added.

    As in a log-structured merge tree: a matrix is added to another of its size, so that each entry is added a few times however many blocks
    there are, and what is in memory is about the result.
    """

    shape: tuple[int, int]
    levels: "list[csr_matrix]" = field(default_factory=list)

    def add(self, part: "csr_matrix") -> None:
        """Add a matrix."""
        while self.levels and self.levels[-1].nnz <= 2 * part.nnz:
            part = part + self.levels.pop()
        self.levels.append(part)

    @cached_property
    def total(self) -> "csr_matrix":
        """The sum of all, with sorted columns and without zeros."""
        from scipy.sparse import csr_matrix

        made = csr_matrix(self.shape, dtype=np.int64)  # type: ignore[arg-type]
        while self.levels:
            made = made + self.levels.pop()
        made.sum_duplicates()
        made.eliminate_zeros()
        return made


@dataclass(frozen=True)
class _SampleSums:
    """Sums and numbers of non-zero values of one block, for the groups in it."""

    groups: NDArray[np.int64]
    sums: "csr_matrix"
    nonzero: "csr_matrix"


def _add_counts(block: Block, codes: NDArray[np.int64], n_cols: int) -> _SampleSums:
    """Add up the cells of each group of a block."""
    from scipy.sparse import csr_matrix

    groups, own = np.unique(codes, return_inverse=True)
    (values,) = block.layers.values()
    if isinstance(block, CsrBlock):
        cells = csr_matrix((values, block.indices, block.indptr), shape=(len(codes), n_cols))
    else:
        cells = csr_matrix(values)
    if cells.dtype.kind == "f":
        rounded = np.rint(cells.data)
        wrong = ~np.isfinite(cells.data) | (rounded != cells.data) | (cells.data < 0)
        if wrong.any():
            raise QueryError(
                f"The layer holds {cells.data[wrong][0]}, which is no count; pseudobulk adds up counts. Name their layer with layer=..., or take "
                "aggregate() for sums of other values."
            )
    counts = csr_matrix((cells.data.astype(np.int64), cells.indices, cells.indptr), shape=cells.shape)
    counts.eliminate_zeros()
    there = csr_matrix((np.ones(counts.nnz, np.int32), counts.indices, counts.indptr), shape=counts.shape)
    # Cells to groups: a matrix of ones, so that the product adds up the rows of each group.
    ones = np.ones(len(codes), np.int64)
    groups_of = csr_matrix((ones, (own, np.arange(len(codes)))), shape=(len(groups), len(codes)))
    return _SampleSums(groups, groups_of @ counts, (groups_of.astype(np.int32) @ there).astype(np.int32))


def _spread(part: "csr_matrix", groups: NDArray[np.int64], n_groups: int) -> "csr_matrix":
    """Return a matrix of some groups as one of all."""
    from scipy.sparse import csr_matrix

    lengths = np.zeros(n_groups + 1, np.int64)
    lengths[groups + 1] = np.diff(part.indptr)
    return csr_matrix((part.data, part.indices, np.cumsum(lengths)), shape=(n_groups, part.shape[1]))


def pseudobulk(
    spec: QuerySpec, catalog: Catalog, by: Sequence[str], min_cells: int, executor: Executor | Workers | None = None
) -> "ad.AnnData":
    """Sum counts per sample; see `Query.pseudobulk`."""
    import anndata as ad

    if min_cells < 1:
        raise QueryError(f"min_cells={min_cells}: a sample has at least one cell.")
    grouped = group_cells(spec, catalog, by, "pseudobulk")
    space, n_groups = grouped.space, grouped.n_groups
    if not space.space.is_counts:
        raise QueryError(
            f"The feature space {space.name!r} holds no counts; take aggregate() for sums of other values."
        )
    missing = grouped.obs[list(by)].isna().any(axis=1).to_numpy()
    few = ~missing & (grouped.obs["n_cells"].to_numpy() < min_cells)
    sums, nonzero = _Sums((n_groups, space.n_cols)), _Sums((n_groups, space.n_cols))
    for one in grouped.partials(_add_counts, executor, catalog.location, _PARTIAL_BYTES):
        sums.add(_spread(one.sums, one.groups, n_groups))
        nonzero.add(_spread(one.nonzero, one.groups, n_groups))
    kept = np.flatnonzero(~missing & ~few)
    measured = (count_measured(space, grouped.codes, n_groups) > 0)[kept]
    obs = grouped.obs.iloc[kept].copy()
    total, detected = sums.total[kept], nonzero.total[kept].astype(np.int32)
    obs["n_counts"] = np.asarray(total.sum(axis=1)).ravel()
    obs["n_features"] = np.diff(total.indptr)
    obs["measured_share"] = measured.mean(axis=1) if space.n_cols else 1.0
    constant, varying = _constant_columns(spec, catalog, by, grouped.codes, kept)
    obs = obs.join(constant.set_axis(obs.index))
    notes = [
        *_dropped(grouped.obs[missing], "cells without a value of what makes the samples"),
        *_dropped(grouped.obs[few], f"samples of fewer than {min_cells} cells"),
        *check_design(obs, [*by]),
    ]
    var = make_var(space, catalog, spec.names)
    made = ad.AnnData(total, obs=obs, var=var.frame(), layers={"count_nonzero": detected, "measured": measured})
    if space.space.has_features:
        made.varm["measured"] = var.measured(space)
    made.uns["atlas"] = atlas_facts(grouped.plan) | {"by": np.array(list(by), dtype=object)}
    made.uns["pseudobulk"] = {
        "by": np.array(list(by), dtype=object), "min_cells": min_cells, "varying": np.array(varying, dtype=object),
        "notes": np.array(notes, dtype=object),
    }  # fmt: skip
    return made


def _dropped(groups: "pd.DataFrame", what: str) -> list[str]:
    if not len(groups):
        return []
    names = [*map(str, groups.index[:_MOST_NAMED])]
    more = ", ..." if len(groups) > _MOST_NAMED else ""
    return [f"left out: {len(groups):,} {what} ({', '.join(names)}{more}), {int(groups['n_cells'].sum()):,} cells"]


def _constant_columns(
    spec: QuerySpec, catalog: Catalog, by: Sequence[str], codes: NDArray[np.int64], kept: NDArray[np.int64]
) -> "tuple[pd.DataFrame, list[str]]":
    """Return the columns of the cells that have one value in each sample, and the names of the others; one column at a time is read."""
    import pandas as pd

    columns, found, varying = cell_columns(catalog), {}, list[str]()
    names = [DATASET, *columns.shown.values()]
    if spec.obs is not None:
        names = [name for name in names if name in spec.obs]
    n_groups = int(codes.max(initial=-1)) + 1
    first = np.full(n_groups, -1, np.int64)
    first[codes[::-1]] = np.arange(len(codes))[::-1]
    for name in names:
        if name in by:
            continue
        plan = plan_read(_one_column(spec, name), catalog)
        try:
            values = frame_of(plan.obs, [name], columns)[name]
        except QueryError:
            # Vectors, such as embeddings, are of cells.
            continue
        numbers, _ = pd.factorize(values, use_na_sentinel=False)
        if (numbers == numbers[first][codes]).all():
            found[name] = values.iloc[first[kept]].reset_index(drop=True)
        else:
            varying.append(name)
    return pd.DataFrame(found, index=pd.RangeIndex(len(kept))), varying


def _one_column(spec: QuerySpec, name: str) -> QuerySpec:
    return replace(spec, obs=() if name == DATASET else (name,))


def check_design(obs: "pd.DataFrame", columns: Sequence[str]) -> list[str]:
    """Return what a table of samples does not allow to tell apart, a line each.

    Parameters
    ----------
    obs : pandas.DataFrame
        A row for each sample, with `measured_share` where it is known.
    columns : sequence of str
        What is to be compared or adjusted for.

    Examples
    --------
    >>> import pandas as pd
    >>> check_design(pd.DataFrame({"condition": ["a", "a", "b"], "batch": ["1", "1", "2"]}), ["condition", "batch"])
    ["condition = 'b' has a single sample", "batch = '2' has a single sample", 'condition and batch go together in all samples: their effects cannot be told apart']
    """
    notes = []
    for name in columns:
        sizes = obs[name].astype(str).value_counts()
        alone = [one for one, n in sizes.items() if n == 1]
        if len(sizes) == 1 and len(obs) > 1:
            notes.append(f"{name} is {sizes.index[0]!r} in all samples")
        # Where each sample has a value of its own, such as a donor, that is what makes the samples.
        elif alone and len(alone) < len(sizes):
            shown = ", ".join(map(repr, alone[:_MOST_NAMED])) + (", ..." if len(alone) > _MOST_NAMED else "")
            notes.append(
                f"{name} = {shown} has a single sample"
                if len(alone) == 1
                else f"{name} = {shown} have a single sample each"
            )
    for i, one in enumerate(columns):
        for other in columns[i + 1 :]:
            pairs = obs[[one, other]].astype(str).drop_duplicates()
            n, m = pairs[one].nunique(), pairs[other].nunique()
            if n > 1 and n == m == len(pairs) < len(obs):
                notes.append(f"{one} and {other} go together in all samples: their effects cannot be told apart")
    if "measured_share" in obs:
        poor = obs.index[obs["measured_share"] < LEAST_MEASURED]
        if len(poor):
            shown = ", ".join(map(str, poor[:_MOST_NAMED])) + (", ..." if len(poor) > _MOST_NAMED else "")
            notes.append(f"measured fewer than half of the features: {shown}")
    return notes


def test_samples(samples: "ad.AnnData", design: str, contrast: Sequence[str]) -> "pd.DataFrame":
    """Test sums of samples by the model of DESeq2; see `Query.test`."""
    try:
        from pydeseq2.dds import DeseqDataSet
        from pydeseq2.ds import DeseqStats
    except ImportError as error:
        raise MissingExtraError("test() needs pydeseq2; install it with pip install 'raggedatlas[stats]'.") from error
    import pandas as pd

    if len(contrast) != 3:
        raise QueryError(
            f"contrast={tuple(contrast)!r} has not three parts; expected (column, tested value, reference)."
        )
    column, tested, reference = contrast
    terms = _names_in(design)
    for name in dict.fromkeys([column, *terms]):
        if name not in samples.obs:
            raise QueryError(
                f"The samples have no column {name!r}. They have {[*samples.obs.columns]}; columns that vary within samples are "
                f"{[*samples.uns['pseudobulk']['varying']]}."
            )
    if column not in terms:
        raise QueryError(f"The contrast is of {column!r}, which the design {design!r} does not name.")
    # As text: values of a formula are levels.
    metadata = (
        samples.obs[[*dict.fromkeys([column, *terms])]]
        .astype(object)
        .map(lambda value: value if isinstance(value, int | float) else str(value))
    )
    for side in (tested, reference):
        n = int((metadata[column].astype(str) == str(side)).sum())
        if n < 2:
            there = sorted(set(metadata[column].astype(str)))
            raise QueryError(
                f"{column} = {side!r} has {n} sample(s), and a test needs two of each side; there are {there}."
            )
    metadata[column] = metadata[column].astype(str)
    shared = np.asarray(samples.layers["measured"]).all(axis=0)
    found = np.asarray(samples.X.sum(axis=0)).ravel() > 0
    kept = np.flatnonzero(shared & found)
    if not len(kept):
        raise QueryError(
            "No feature was measured by all samples and has a count in one. Leave out samples that measured others; obs['measured_share'] says how "
            "much each measured."
        )
    counts = pd.DataFrame(samples.X[:, kept].toarray(), index=samples.obs_names, columns=samples.var_names[kept])
    model = DeseqDataSet(counts=counts, metadata=metadata, design=design, quiet=True)
    model.deseq2()
    tests = DeseqStats(model, contrast=[column, str(tested), str(reference)], quiet=True)
    # It prints its table otherwise.
    with contextlib.redirect_stdout(io.StringIO()):
        tests.summary()
    table: pd.DataFrame = tests.results_df
    if "symbol" in samples.var:
        table = table.assign(symbol=samples.var["symbol"].iloc[kept].to_numpy())
    table = table.sort_values("padj", kind="stable")
    notes = [*samples.uns["pseudobulk"]["notes"], *check_design(samples.obs, [*dict.fromkeys([column, *terms])])]
    table.attrs["pseudobulk"] = {
        "design": design, "contrast": tuple(contrast), "n_samples": samples.n_obs, "notes": [*dict.fromkeys(map(str, notes))],
        "not_measured_by_all": int((~shared).sum()), "without_counts": int((shared & ~found).sum()),
    }  # fmt: skip
    return table


def _names_in(design: str) -> list[str]:
    """Return the columns that a formula names."""
    names = re.findall(r"[^\W\d][\w.]*(?!\w*\()", re.sub(r"['\"][^'\"]*['\"]", "", design))
    return [*dict.fromkeys(names)]
