"""The verbs ``pca`` and ``umap``: fitted to a sample, applied batch by batch, the same for the same seed."""

import json
import os
import sys
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import (
    ArgumentError,
    CorruptError,
    LimitError,
    MissingExtraError,
    NotFoundError,
    QueryError,
    SourceError,
)
from raggedatlas.formats.output_files import atomic_write
from raggedatlas.model.arguments import Progress, check_seed, checked, no_progress
from raggedatlas.model.choices import PCA as PCA_EMBEDDER
from raggedatlas.model.choices import Embedder, UmapMetric, refuse_unused
from raggedatlas.store.cache_folder import user_cache
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import file_digest
from raggedatlas.wings.results.dataset import ResultDataset
from raggedatlas.wings.results.verbs.vector_sources import (
    Vectors,
    VectorSource,
    check_finite,
    log_normalize,
    open_vectors,
)
from raggedatlas.wings.results.writer import ResultDatasetWriter

EXACT_WIDTH = 2048
"""Up to this width the full covariance is decomposed; beyond it, only as many components as are wanted are computed."""


def _save_arrays(path: Path, **arrays: Any) -> None:  # noqa: ANN401  (arrays)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


@contextmanager
def _stored_arrays(path: str | os.PathLike[str], what: str) -> Iterator[Any]:
    """Open the arrays of a model; nothing is unpickled. Errors of the block mean that the file is damaged."""
    try:
        with local_copy(path) as local, np.load(local, allow_pickle=False) as stored:
            yield stored
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no model {os.fspath(path)}.") from error
    except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise CorruptError(f"{os.fspath(path)} is no {what}: {error}.") from error


@dataclass(frozen=True, eq=False)
class PcaModel:
    """Fitted principal components."""

    mean: NDArray[np.float64]  # (width,): of the sample
    # (n_components, width): orthonormal rows; the entry of each that is largest in size is positive
    components: NDArray[np.float64]
    explained_variance: NDArray[np.float64]  # (n_components,): along each component, descending
    explained_variance_ratio: NDArray[np.float64]  # (n_components,): share of the total variance
    features: NDArray[np.str_]  # (width,): feature uids of the columns; empty for results
    # what the counts of a cell were scaled to before log(1 + x); NaN where values were taken as they are
    target_sum: float
    seed: int  # of the sample
    n_rows: int  # of the sample

    @property
    def scaled_to(self) -> float | None:
        """The sum that counts are scaled to; None where values are taken as they are."""
        return None if np.isnan(self.target_sum) else float(self.target_sum)

    def transform(self, values: Any) -> NDArray[np.float32]:  # noqa: ANN401  (an array or a sparse one)
        """Project rows, ``(k, width)`` to ``(k, n_components)``; raise `QueryError` if they have another width."""
        if values.shape[1] != len(self.mean):
            raise QueryError(f"The model was fitted to rows of {len(self.mean):,} values, not of {values.shape[1]:,}.")
        projected = values @ self.components.T - self.mean @ self.components.T
        return np.asarray(projected).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the model; an existing file is replaced atomically."""
        _save_arrays(path, **{each.name: getattr(self, each.name) for each in fields(self)})


def load_pca(path: str | os.PathLike[str]) -> PcaModel:
    """Read what `PcaModel.save` wrote; without unpickling."""
    with _stored_arrays(path, "model of principal components") as stored:
        stored_fields = {each.name: stored[each.name] for each in fields(PcaModel)}
    if stored_fields["components"].ndim != 2 or stored_fields["components"].shape[1:] != stored_fields["mean"].shape:
        raise CorruptError(f"{os.fspath(path)}: the components do not fit the mean.")
    plain: dict[str, Any] = {
        "target_sum": float(stored_fields.pop("target_sum")),
        "seed": int(stored_fields.pop("seed")),
        "n_rows": int(stored_fields.pop("n_rows")),
    }
    return PcaModel(**stored_fields, **plain)


def fit_pca(
    values: Any,  # noqa: ANN401  (an array or a sparse one)
    n_components: int,
    *,
    seed: int = 0,
    features: tuple[str, ...] = (),
    target_sum: float | None = None,
) -> PcaModel:
    """Fit principal components to rows, (n, width), which are not changed.

    `seed` is for the solvers of wide rows; narrow ones need none. `features` and `target_sum` are only kept with the
    model. Raises `QueryError` if there are fewer rows or columns than components.

    Examples
    --------
    >>> fit_pca(np.array([[0.0, 0.0], [2.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), 1).explained_variance_ratio
    array([0.8])
    """
    n, width = values.shape
    if not 1 <= n_components <= min(n - 1, width):
        raise QueryError(
            f"{n_components} components of {n:,} rows of {width:,} values; there can be 1 to {min(n - 1, width)}, of which n_components=... chooses."
        )
    try:
        from sklearn.decomposition import PCA
    except ImportError as error:
        raise MissingExtraError(
            "pca needs scikit-learn, which is not installed; pip install 'raggedatlas[umap]'."
        ) from error
    solver = "covariance_eigh"
    if width > EXACT_WIDTH and n_components < min(n, width):
        # Of these only arpack takes sparse rows, which it centres in its products.
        solver = "arpack" if hasattr(values, "indptr") else "randomized"
    with np.errstate(invalid="ignore", divide="ignore"):  # rows that are all equal have no variance
        fitted = PCA(n_components, svd_solver=solver, random_state=seed).fit(values.astype(np.float64))
    # An array without pickle cannot hold None; `scaled_to` turns NaN back.
    scaled = float("nan") if target_sum is None else float(target_sum)
    ratio = np.nan_to_num(fitted.explained_variance_ratio_)
    names = np.array(features, np.str_)
    return PcaModel(fitted.mean_, fitted.components_, fitted.explained_variance_, ratio, names, scaled, seed, n)


METRICS = get_args(UmapMetric)


@dataclass(frozen=True)
class UmapSettings:
    """Settings of the layout."""

    n_components: int = 2  # dimensions of the layout
    n_neighbors: int = 15  # more preserve the global structure, fewer the local one
    min_dist: float = 0.1  # least distance of points
    metric: str = "euclidean"  # distance of the rows
    seed: int = 0  # the same seed gives the same layout
    # what the counts of a cell are scaled to before log(1 + x); None takes values as they are
    target_sum: float | None = None
    features: tuple[str, ...] = ()  # feature uids of the columns; empty for results

    def check(self, n_rows: int) -> None:
        """Raise `QueryError` for settings out of range, or fewer rows than neighbours."""
        if self.metric not in METRICS:
            raise QueryError(f"UMAP is asked for the metric {self.metric!r}; there are {', '.join(METRICS)}.")
        check_seed(self.seed)
        if not (1 <= self.n_components < n_rows and 2 <= self.n_neighbors < n_rows and 0 <= self.min_dist <= 1):
            raise QueryError(
                f"UMAP of {n_rows:,} rows takes n_components from 1, n_neighbors from 2 to {n_rows - 1:,}, and min_dist from 0 to 1; "
                f"not {self.n_components}, {self.n_neighbors} and {self.min_dist}."
            )


class UmapModel:
    """A fitted layout.

    `sample`, (n, width), are the rows that it was fitted to, and `layout`, (n, n_components), their coordinates.
    `fitted` is the library's object; None builds it when it is first needed.
    """

    def __init__(
        self,
        settings: UmapSettings,
        sample: NDArray[np.float32],
        layout: NDArray[np.float32],
        fitted: Any = None,  # noqa: ANN401
    ) -> None:
        self.settings, self.sample, self.layout = settings, sample, layout
        self._fitted = fitted

    def transform(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Place rows, ``(k, width)``, among those of the sample; positions also depend on the other rows of the call."""
        if values.shape[1] != self.sample.shape[1]:
            raise QueryError(f"The layout is of rows of {self.sample.shape[1]:,} values, not of {values.shape[1]:,}.")
        if not len(values):
            return np.empty((0, self.settings.n_components), np.float32)
        if self._fitted is None:
            # without epochs UMAP builds only the graph and the search index, from the same seed as the original fit
            self._fitted = _fit(self.settings, self.sample, n_epochs=0, init="random")
            self._fitted.embedding_ = self.layout.copy()
            # Left at 0, `transform` would run no epochs either; None makes it choose their number.
            self._fitted.n_epochs = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(self._fitted.transform(values), np.float32)

    def save(self, path: Path) -> None:
        """Write the model; an existing file is replaced atomically."""
        settings = np.array(json.dumps(asdict(self.settings)))
        _save_arrays(path, settings=settings, sample=self.sample, layout=self.layout)


def fit_umap(sample: NDArray[np.float32], settings: UmapSettings) -> UmapModel:
    """Fit a layout to a sample, (n, width), of finite values."""
    settings.check(len(sample))
    fitted = _fit(settings, sample)
    return UmapModel(settings, sample, np.asarray(fitted.embedding_, np.float32), fitted)


def _fit(settings: UmapSettings, sample: NDArray[np.float32], **more: Any) -> Any:  # noqa: ANN401  (a umap.UMAP)
    with warnings.catch_warnings():
        # warnings of a disconnected graph, and deprecations in umap-learn's dependencies
        warnings.simplefilter("ignore")
        try:
            import umap
        except ImportError as error:
            raise MissingExtraError(
                "UMAP needs umap-learn, which is not installed; pip install 'raggedatlas[umap]'."
            ) from error
        _keep_compiled()
        model = umap.UMAP(
            n_components=settings.n_components,
            n_neighbors=settings.n_neighbors,
            min_dist=settings.min_dist,
            metric=settings.metric,
            random_state=settings.seed,
            transform_seed=settings.seed,
            # With a seed umap-learn runs in one thread and warns of any other number.
            n_jobs=1,
            **more,
        )
        return model.fit(sample)


@cache
def _keep_compiled() -> None:
    """Cache umap-learn's compiled functions between processes: compiling takes 14 s, loading 0.3 s.

    The folder's name contains the versions, so that functions of other versions are never loaded; where no folder can
    be written, everything is compiled again.
    """
    import numba
    from numba.core.dispatcher import Dispatcher

    config: Any = numba.config
    root = user_cache()
    if root is None:
        return
    versions = [f"{name}-{version(name)}" for name in ("umap-learn", "pynndescent", "numba")]
    # The folder is read when caching is enabled. The setting is global, so it is restored below.
    before, config.CACHE_DIR = config.CACHE_DIR, str(root / "raggedatlas" / "-".join(versions))
    try:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in {"umap", "pynndescent"}:
                for function in vars(module).values():
                    if isinstance(function, Dispatcher):
                        function.enable_caching()
    # A RuntimeError is what numba raises if it finds no folder to write to.
    except (OSError, RuntimeError):
        return
    finally:
        config.CACHE_DIR = before


def load_umap(path: str | os.PathLike[str]) -> UmapModel:
    """Read what `UmapModel.save` wrote; without unpickling."""
    with _stored_arrays(path, "layout") as stored:
        stored_settings, sample, layout = json.loads(str(stored["settings"])), stored["sample"], stored["layout"]
        settings = UmapSettings(**{**stored_settings, "features": tuple(stored_settings["features"])})
    if sample.ndim != 2 or layout.shape != (len(sample), settings.n_components):
        raise CorruptError(f"{os.fspath(path)}: the layout does not fit the sample.")
    return UmapModel(settings, sample, layout)


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
    n_components: int | None = None,
    sample_size: int | None = None,
    seed: int | None = None,
    progress: Progress = no_progress,
    **choices: Unpack[ReductionOptions],
) -> ResultDataset:
    """Reduce rows to their principal components, as `sklearn.decomposition.PCA` finds them (needs ``pip install 'raggedatlas[umap]'``).

    Parameters
    ----------
    source : ResultDataset, str, path or Query
        Results, the folder of some, or the cells of a query: an embedding, or features (sparse ones stay sparse).
    result_dir : str or path
        Local folder.
    n_components : int, optional
        Number of components; 50 by default.
    sample_size : int, optional
        Rows that the components are fitted to, chosen by `seed`; all where there are fewer. 50,000 by default.
    seed : int, optional
        The same seed gives the same numbers; 0 by default.
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
    ArgumentError
        For an option of the fit together with `model`, which is fitted already.
    MissingExtraError
        Without scikit-learn.

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
    chosen = _check_options(choices, ReductionOptions, n_components=n_components, sample_size=sample_size, seed=seed)
    given = None if chosen.get("model") is None else load_pca(chosen["model"])
    vectors = open_vectors(source, chosen.get("column"), () if given is None else tuple(given.features.tolist()))
    if given is None:
        target_sum, fit_seed = chosen.get("target_sum"), chosen.get("seed", 0)
        sample = read_sample(vectors, chosen.get("sample_size", 50_000), fit_seed, target_sum)
        n = chosen.get("n_components", 50)
        given = fit_pca(sample, n, seed=fit_seed, features=vectors.features, target_sum=target_sum)
    model: PcaModel = given

    def placed() -> Iterator[tuple[Any, NDArray[np.float32]]]:
        for _, ids, values in _finite_batches(vectors, chosen, "pca"):
            yield ids, model.transform(log_normalize(values, model.scaled_to))

    return _write("pca", result_dir, vectors, placed(), model, chosen, progress)


@checked
def umap(
    source: VectorSource,
    result_dir: str | os.PathLike[str],
    *,
    n_components: int | None = None,
    sample_size: int | None = None,
    seed: int | None = None,
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
    n_components : int, optional
        Dimensions of the layout; 2 by default.
    sample_size : int, optional
        Rows that the layout is fitted to, chosen by `seed`; all where there are fewer. The others are placed among them. 10,000 by default.
    seed : int, optional
        The same seed, `sample_size` and ``batch_size`` give the same layout; 0 by default.
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
    ArgumentError
        For an option of the fit together with `model`, which is fitted already.
    MissingExtraError
        Without umap-learn.

    Examples
    --------
    >>> found = umap("results/pca", "results/umap", seed=1)  # doctest: +SKIP
    """
    chosen = _check_options(choices, UmapOptions, n_components=n_components, sample_size=sample_size, seed=seed)
    given = None if chosen.get("model") is None else load_umap(chosen["model"])
    vectors = open_vectors(source, chosen.get("column"), () if given is None else given.settings.features)
    rows = np.empty(0, np.int64)
    if given is None:
        own = {name: chosen[name] for name in _FIT_OPTIONS if name in chosen and name != "sample_size"}
        settings = UmapSettings(**{"n_components": 2, "seed": 0, **own}, features=vectors.features)
        size = chosen.get("sample_size", 10_000)
        rows = sample_rows(vectors.n, size, settings.seed)
        # Before the sample is read, which may take long.
        settings.check(len(rows))
        progress("fit", 0, 1)
        given = fit_umap(_dense(read_sample(vectors, size, settings.seed, settings.target_sum)), settings)
        progress("fit", 1, 1)
    model: UmapModel = given

    def placed() -> Iterator[tuple[Any, NDArray[np.float32]]]:
        for first, ids, values in _finite_batches(vectors, chosen, "umap"):
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
    """Choose random rows, ascending; all if there are no more than `sample_size`, which is at least two.

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


def _finite_batches(vectors: Vectors, chosen: dict[str, Any], verb: str) -> Iterator[tuple[int, Any, Any]]:
    """Iterate over the number of the first row, ids and values; values that are not finite are refused by their row."""
    first = 0
    for ids, values in vectors.batches(int(chosen.get("batch_size", 8192))):
        check_finite(values, np.arange(first, first + len(ids)), verb)
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


_FIT_OPTIONS = ("n_components", "sample_size", "seed", "target_sum", "n_neighbors", "min_dist", "metric")
"""Options that a fitted model has already."""


def _check_options(choices: Any, known: Any, **fit: int | None) -> dict[str, Any]:  # noqa: ANN401  (typed dictionaries)
    unknown = sorted(set(choices) - set(known.__annotations__))
    if unknown:
        raise QueryError(f"There is no choice {unknown[0]!r}; there are {', '.join(sorted(known.__annotations__))}.")
    given = {name: value for name, value in {**fit, **choices}.items() if value is not None}
    if "model" in given and (without_effect := [name for name in _FIT_OPTIONS if name in given]):
        raise ArgumentError(
            f"With model=, {', '.join(without_effect)} have no effect, because the model is fitted already: leave them out, or fit a new model "
            "without model=."
        )
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
) -> Embedder:
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
    check_seed(seed)
    usual = UmapSettings()
    refuse_unused(
        "embedder", "with method='pca'", n_neighbors=method == PCA_EMBEDDER.name and n_neighbors != usual.n_neighbors,
        min_dist=method == PCA_EMBEDDER.name and min_dist != usual.min_dist, seed=method == PCA_EMBEDDER.name and seed != 0,
    )  # fmt: skip
    if method == PCA_EMBEDDER.name:
        return PCA_EMBEDDER
    if method != "umap":
        raise QueryError(f"There is no embedding {method!r}; choose 'pca' or 'umap'.")

    def layout(components: NDArray[np.float32]) -> NDArray[Any]:
        # UMAP takes at least 2 neighbours and fewer than there are cells, of which a CXG may have few.
        neighbors = max(2, min(n_neighbors, len(components) - 1))
        settings = UmapSettings(n_neighbors=neighbors, min_dist=min_dist, seed=seed)
        return fit_umap(components, settings).layout

    return Embedder("umap", N_COMPONENTS, layout)
