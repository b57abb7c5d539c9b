"""A fitted UMAP, stored without pickle: the sample and its layout, from which the model is rebuilt exactly."""

import json
import os
import sys
import warnings
import zipfile
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import CorruptError, MissingExtraError, NotFoundError, QueryError
from raggedatlas.results.folder import atomic_write
from raggedatlas.verbs.pca_model import check_seed

METRICS = ("euclidean", "cosine", "manhattan", "correlation", "chebyshev")


@dataclass(frozen=True)
class UmapSettings:
    """Settings of the layout.

    Parameters
    ----------
    n_components : int
        Dimensions of the layout.
    n_neighbors : int
        Neighbours considered; more preserve the global structure, fewer the local one.
    min_dist : float
        Least distance of points.
    metric : str
        Distance of the rows.
    seed : int
        The same seed gives the same layout.
    target_sum : float or None
        What the counts of a cell are scaled to before log(1 + x); None takes values as they are.
    features : tuple of str
        Feature uids of the columns; empty for results.
    """

    n_components: int = 2
    n_neighbors: int = 15
    min_dist: float = 0.1
    metric: str = "euclidean"
    seed: int = 0
    target_sum: float | None = None
    features: tuple[str, ...] = ()

    def check(self, n_rows: int) -> None:
        """Check the settings.

        Raises
        ------
        QueryError
            For settings out of range, or fewer rows than neighbours.
        """
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

    Parameters
    ----------
    settings : UmapSettings
        Settings of the fit.
    sample : (n, width) float32
        The rows it was fitted to.
    layout : (n, n_components) float32
        Their coordinates.
    fitted : umap.UMAP or None
        The library's object; None builds it when it is first needed.
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
        """Place rows, ``(k, width)``, among those of the sample; positions also depend on the other rows of the call.

        Raises
        ------
        QueryError
            If the rows have another width.
        """
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
        with atomic_write(path) as temporary, temporary.open("wb") as file:
            np.savez(file, allow_pickle=False, settings=settings, sample=self.sample, layout=self.layout)


def fit_umap(sample: NDArray[np.float32], settings: UmapSettings) -> UmapModel:
    """Fit a layout to a sample.

    Parameters
    ----------
    sample : (n, width) float32
        Rows; finite.
    settings : UmapSettings
        Settings of the fit.

    Raises
    ------
    QueryError
        For settings out of range.
    MissingExtraError
        Without umap-learn.
    """
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
                "UMAP needs umap-learn, which is not installed; pip install 'raggedatlas[umap]', or use pca."
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

    The folder's name contains the versions, so that functions of other versions are never loaded; where no folder can be
    written, everything is compiled again.
    """
    import numba
    from numba.core.dispatcher import Dispatcher

    config: Any = numba.config
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
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
    """Read what `UmapModel.save` wrote; without unpickling.

    Raises
    ------
    NotFoundError
        If there is no such file.
    CorruptError
        If it is no such model.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            stored_settings, sample, layout = json.loads(str(stored["settings"])), stored["sample"], stored["layout"]
        settings = UmapSettings(**{**stored_settings, "features": tuple(stored_settings["features"])})
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no model {os.fspath(path)}.") from error
    except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise CorruptError(f"{os.fspath(path)} is no layout: {error}.") from error
    if sample.ndim != 2 or layout.shape != (len(sample), settings.n_components):
        raise CorruptError(f"{os.fspath(path)}: the layout does not fit the sample.")
    return UmapModel(settings, sample, layout)
