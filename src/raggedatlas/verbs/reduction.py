"""The verbs ``pca`` and ``umap``: fitted to a sample, applied batch by batch, the same for the same seed."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import LimitError, QueryError, SourceError
from raggedatlas.model.arguments import Progress, checked, no_progress
from raggedatlas.results.dataset import ResultDataset
from raggedatlas.results.writer import ResultDatasetWriter
from raggedatlas.store.location import file_digest
from raggedatlas.verbs.pca_model import PcaModel, check_seed, fit_pca, load_pca
from raggedatlas.verbs.umap_model import UmapModel, UmapSettings, fit_umap, load_umap
from raggedatlas.verbs.vector_sources import Vectors, VectorSource, check_finite, log_normalize, open_vectors

if TYPE_CHECKING:
    from raggedatlas.formats.cxg.options import Embedder

PCA_FILE, UMAP_FILE = "pca.npz", "umap.npz"
"""Names of the models in the result folder."""

_MOST_BYTES = 2**31


class ReductionOptions(TypedDict, total=False):
    """Keyword arguments of `pca` and `umap`, all optional.

    Attributes
    ----------
    column : str
        Output of the results; ``data`` by default.
    target_sum : float
        Scale the counts of each cell to this sum, and take log(1 + x), before anything else; e.g. 10,000 for genes.
    model : str or path
        A model that an earlier run wrote (``pca.npz``, ``umap.npz``), which is applied instead of fitting one.
    batch_size : int
        Rows per batch.
    overwrite : bool
        Whether results that are in the folder may be replaced.
    """

    column: str
    target_sum: float
    model: str | os.PathLike[str]
    batch_size: int
    overwrite: bool


class UmapOptions(ReductionOptions, total=False):
    """Keyword arguments of `umap`, all optional.

    Attributes
    ----------
    n_neighbors : int
        Neighbours that shape the layout; 15 by default.
    min_dist : float
        Least distance of points; 0.1 by default.
    metric : str
        Distance of the rows: ``euclidean``, ``cosine``, ``manhattan``, ``correlation`` or ``chebyshev``.
    """

    n_neighbors: int
    min_dist: float
    metric: str


@checked
def pca(
    source: VectorSource,
    result_dir: str | os.PathLike[str],
    *,
    n_components: int = 50,
    sample_size: int = 50_000,
    seed: int = 0,
    progress: Progress = no_progress,
    **choices: Unpack[ReductionOptions],
) -> ResultDataset:
    """Reduce rows to their principal components.

    Parameters
    ----------
    source : ResultDataset, str, path or Query
        Results, the folder of some, or the cells of a query: an embedding, or features (sparse ones stay sparse).
    result_dir : str or path
        Local folder.
    n_components : int
        Number of components.
    sample_size : int
        Rows that the components are fitted to, chosen by `seed`; all where there are fewer.
    seed : int
        The same seed gives the same numbers.
    progress : callable
        Called as ``progress(step, done, total)``.
    **choices
        See `ReductionOptions`.

    Returns
    -------
    ResultDataset
        ``data`` (n_components,) float32, one row for each of the source, under its id and in its order. ``pca.npz`` in the same
        folder contains the model (see `load_pca`), without pickle.

    Raises
    ------
    QueryError, SourceError, NotFoundError, DuplicateError
        For what cannot be done as asked, also values that are not finite, by their row. Nothing is visible then.

    Examples
    --------
    >>> import tempfile
    >>> from raggedatlas import ResultDatasetWriter
    >>> folder = tempfile.mkdtemp()
    >>> with ResultDatasetWriter(f"{folder}/z") as writer:
    ...     writer.write_batch(["a", "b"], np.array([[0.0, 1.0], [6.0, 9.0]]))
    >>> pca(f"{folder}/z", f"{folder}/pca", n_components=1).to_numpy().ravel()
    array([-5.,  5.], dtype=float32)
    >>> found = pca(view.query(), "results/pca", n_components=30, target_sum=10_000)  # doctest: +SKIP
    """
    chosen = _check_options(choices, ReductionOptions)

    def fit(vectors: Vectors) -> PcaModel:
        sample = read_sample(vectors, sample_size, seed, chosen.get("target_sum"))
        return fit_pca(sample, n_components, seed=seed, features=vectors.features, target_sum=chosen.get("target_sum"))

    given = None if chosen.get("model") is None else load_pca(chosen["model"])
    vectors = open_vectors(source, chosen.get("column"), () if given is None else tuple(given.features.tolist()))
    model = given or fit(vectors)

    def placed() -> Iterator[tuple[Any, NDArray[np.float32]]]:
        for first, ids, values in _rows(vectors, int(chosen.get("batch_size", 8192))):
            check_finite(values, np.arange(first, first + len(ids)), "pca")
            yield ids, model.transform(log_normalize(values, model.scaled_to))

    return _write("pca", result_dir, vectors, placed(), model, chosen, progress)


@checked
def umap(
    source: VectorSource,
    result_dir: str | os.PathLike[str],
    *,
    n_components: int = 2,
    sample_size: int = 10_000,
    seed: int = 0,
    progress: Progress = no_progress,
    **choices: Unpack[UmapOptions],
) -> ResultDataset:
    """Lay rows out in few dimensions, preserving neighbourhoods (needs ``pip install 'raggedatlas[umap]'``).

    Parameters
    ----------
    source : ResultDataset, str, path or Query
        Results, the folder of some, or the cells of a query; dense, best an embedding.
    result_dir : str or path
        Local folder.
    n_components : int
        Dimensions of the layout.
    sample_size : int
        Rows that the layout is fitted to, chosen by `seed`; all where there are fewer. The others are placed among them.
    seed : int
        The same seed, `sample_size` and ``batch_size`` give the same layout.
    progress : callable
        Called as ``progress(step, done, total)``.
    **choices
        See `UmapOptions`.

    Returns
    -------
    ResultDataset
        ``data`` (n_components,) float32, one row for each of the source, under its id and in its order. ``umap.npz`` in the
        same folder contains the sample and its layout, from which the model is rebuilt exactly, without pickle.

    Raises
    ------
    QueryError, SourceError, NotFoundError, DuplicateError
        For what cannot be done as asked, also values that are not finite, by their row. Nothing is visible then.
    MissingExtraError
        Without umap-learn.

    Examples
    --------
    >>> found = umap("results/pca", "results/umap", seed=1)  # doctest: +SKIP
    """
    chosen = _check_options(choices, UmapOptions)
    given = None if chosen.get("model") is None else load_umap(chosen["model"])
    vectors = open_vectors(source, chosen.get("column"), () if given is None else given.settings.features)
    rows = np.empty(0, np.int64)
    if given is None:
        own = {name: chosen[name] for name in ("n_neighbors", "min_dist", "metric", "target_sum") if name in chosen}
        settings = UmapSettings(n_components=n_components, seed=seed, features=vectors.features, **own)
        rows = sample_rows(vectors.n, sample_size, seed)
        # Before the sample is read, which may take long.
        settings.check(len(rows))
        progress("fit", 0, 1)
        given = fit_umap(_dense(read_sample(vectors, sample_size, seed, settings.target_sum)), settings)
        progress("fit", 1, 1)
    model: UmapModel = given

    def placed() -> Iterator[tuple[Any, NDArray[np.float32]]]:
        for first, ids, values in _rows(vectors, int(chosen.get("batch_size", 8192))):
            check_finite(values, np.arange(first, first + len(ids)), "umap")
            # Rows of the sample keep their place of the fit; `transform` would put them elsewhere.
            # With a given model `rows` is empty, and all rows are transformed.
            own = (rows >= first) & (rows < first + len(ids))
            out = np.empty((len(ids), model.settings.n_components), np.float32)
            out[rows[own] - first] = model.layout[: len(rows)][own]
            others = np.setdiff1d(np.arange(len(ids)), rows[own] - first)
            if len(others):
                out[others] = model.transform(_dense(log_normalize(values[others], model.settings.target_sum)))
            yield ids, out

    return _write("umap", result_dir, vectors, placed(), model, chosen, progress)


def sample_rows(n: int, sample_size: int, seed: int) -> NDArray[np.int64]:
    """Choose random rows, ascending; all if there are no more than `sample_size`.

    Raises
    ------
    QueryError
        For a sample of less than two rows.

    Examples
    --------
    >>> sample_rows(3, 5, seed=0)
    array([0, 1, 2])
    """
    check_seed(seed)
    if sample_size < 2:
        raise QueryError(f"sample_size={sample_size}; a fit needs two rows at least.")
    if sample_size >= n:
        return np.arange(n)
    return np.sort(np.random.default_rng(seed).choice(n, sample_size, replace=False))


def read_sample(vectors: Vectors, sample_size: int, seed: int, target_sum: float | None) -> Any:  # noqa: ANN401
    """Read the rows that a model is fitted to; values that are not finite are refused by their row."""
    rows = sample_rows(vectors.n, sample_size, seed)
    values = vectors.take(rows)
    check_finite(values, rows, "The sample")
    return log_normalize(values, target_sum)


def _rows(vectors: Vectors, size: int) -> Iterator[tuple[int, Any, Any]]:
    first = 0
    for ids, values in vectors.batches(size):
        yield first, ids, values
        first += len(ids)


def _dense(values: Any) -> NDArray[np.float32]:  # noqa: ANN401  (an array or a sparse one)
    if hasattr(values, "indptr"):
        n, width = values.shape
        # A value of float32 takes 4 bytes; refused before `toarray` allocates them.
        if 4 * n * width > _MOST_BYTES:
            raise LimitError(
                f"{n:,} dense rows of {width:,} values take {4 * n * width:,} bytes; reduce them with pca first, or take a smaller "
                "sample_size and batch_size."
            )
        values = values.toarray()
    return np.ascontiguousarray(values, np.float32)


def _check_options(choices: Any, known: Any) -> dict[str, Any]:  # noqa: ANN401  (typed dictionaries)
    unknown = sorted(set(choices) - set(known.__annotations__))
    if unknown:
        raise QueryError(f"There is no choice {unknown[0]!r}; there are {', '.join(sorted(known.__annotations__))}.")
    given = {name: value for name, value in choices.items() if value is not None}
    size, target = given.get("batch_size", 1), given.get("target_sum", 1.0)
    if size < 1 or not np.isfinite(target) or target <= 0:
        raise QueryError(f"batch_size={size} and target_sum={target}; both must be positive.")
    return given


def _write(
    verb: str,
    result_dir: str | os.PathLike[str],
    vectors: Vectors,
    placed: Iterator[tuple[Any, NDArray[np.float32]]],
    model: PcaModel | UmapModel,
    chosen: dict[str, Any],
    progress: Progress,
) -> ResultDataset:
    """Write the rows, and the model into the same folder just before they become visible."""
    name = PCA_FILE if isinstance(model, PcaModel) else UMAP_FILE
    done = 0
    with ResultDatasetWriter(result_dir, overwrite=bool(chosen.get("overwrite", False)), facts=vectors.facts) as writer:
        writer.original_dataset_config, writer.original_dataset = vectors.config, vectors.dataset
        progress("rows", 0, vectors.n)
        for ids, values in placed:
            writer.write_batch(ids, values)
            done += len(ids)
            progress("rows", done, vectors.n)
        if done != vectors.n:
            raise SourceError(f"{vectors.n:,} rows were to be placed, and {done:,} came.")
        path = writer.result_dir / name
        # The commit follows at the end of the block. A crash in between leaves old results with a new model,
        # which `result:model_hash` of the old table shows.
        model.save(path)
        writer.facts.update({"result:verb": verb, "result:model": name, "result:model_hash": file_digest(path)})
    return ResultDataset({}, result_dir)


N_COMPONENTS = 30
"""Number of principal components that a UMAP is computed from."""


@checked
def embedder(
    method: Literal["pca", "umap"], *, n_neighbors: int = 15, min_dist: float = 0.1, seed: int = 0
) -> "Embedder":
    """Return an object that computes an embedding while a CXG is written, for its option ``compute_embedding``.

    Parameters
    ----------
    method : {"pca", "umap"}
        Two principal components, or a UMAP of thirty.
    n_neighbors, min_dist, seed
        Of the UMAP, as in `umap`.

    Returns
    -------
    Embedder
        For ``write("x.cxg", compute_embedding=...)`` and `open_sink`.

    Raises
    ------
    QueryError
        For another method.
    MissingExtraError
        When it is used, if umap-learn is not installed.

    Examples
    --------
    >>> embedder("umap").name
    'umap'
    """
    from raggedatlas.formats.cxg.options import PCA, Embedder

    check_seed(seed)
    if method == PCA.name:
        return PCA
    if method != "umap":
        raise QueryError(f"There is no embedding {method!r}; choose 'pca' or 'umap'.")

    def layout(components: NDArray[np.float32]) -> NDArray[Any]:
        from raggedatlas.verbs.umap_model import UmapSettings, fit_umap

        # UMAP takes at least 2 neighbours and fewer than there are cells, of which a CXG may have few.
        neighbors = max(2, min(n_neighbors, len(components) - 1))
        settings = UmapSettings(n_neighbors=neighbors, min_dist=min_dist, seed=seed)
        return fit_umap(components, settings).layout

    return Embedder("umap", N_COMPONENTS, layout)
