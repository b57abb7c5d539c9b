"""UMAP's fit, kept without pickle: the sample and where it was laid out, from which the rest is built again exactly."""

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
    """How the layout is made.

    Parameters
    ----------
    n_components : int
        Dimensions of the layout.
    n_neighbors : int
        Neighbours that shape it; more show the whole, fewer the detail.
    min_dist : float
        How close points may lie.
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
        """Refuse what UMAP cannot do.

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
        How it was made.
    sample : (n, width) float32
        The rows it was fitted to.
    layout : (n, n_components) float32
        Where they lie.
    fitted : umap.UMAP or None
        The library's own object; None builds it when it is first needed.
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
        """Place rows, ``(k, width)``, among those of the sample; where they land also depends on which others come with them.

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
            # without epochs only the graph and the search are made, by the same seed as before
            self._fitted = _fit(self.settings, self.sample, n_epochs=0, init="random")
            self._fitted.embedding_ = self.layout.copy()
            self._fitted.n_epochs = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.asarray(self._fitted.transform(values), np.float32)

    def save(self, path: Path) -> None:
        """Write the model; a file that is there is replaced whole."""
        told = np.array(json.dumps(asdict(self.settings)))
        with atomic_write(path) as beside, beside.open("wb") as file:
            np.savez(file, allow_pickle=False, settings=told, sample=self.sample, layout=self.layout)


def fit_umap(sample: NDArray[np.float32], settings: UmapSettings) -> UmapModel:
    """Lay a sample out.

    Parameters
    ----------
    sample : (n, width) float32
        Rows; finite.
    settings : UmapSettings
        How.

    Raises
    ------
    QueryError
        For settings that cannot be.
    MissingExtraError
        Without umap-learn.
    """
    settings.check(len(sample))
    fitted = _fit(settings, sample)
    return UmapModel(settings, sample, np.asarray(fitted.embedding_, np.float32), fitted)


def _fit(settings: UmapSettings, sample: NDArray[np.float32], **more: Any) -> Any:  # noqa: ANN401  (a umap.UMAP)
    with warnings.catch_warnings():
        # of a sample whose graph falls apart, and of libraries that are about to change
        warnings.simplefilter("ignore")
        try:
            import umap
        except ImportError as error:
            raise MissingExtraError(
                "UMAP needs umap-learn, which is not installed; pip install 'raggedatlas[umap]', or use pca."
            ) from error
        _keep_compiled()
        made = umap.UMAP(
            n_components=settings.n_components,
            n_neighbors=settings.n_neighbors,
            min_dist=settings.min_dist,
            metric=settings.metric,
            random_state=settings.seed,
            transform_seed=settings.seed,
            n_jobs=1,
            **more,
        )
        return made.fit(sample)


@cache
def _keep_compiled() -> None:
    """Let umap-learn's compiled functions be kept from one process to the next: to compile them takes 14 s, to load them 0.3 s.

    Versions stand in the folder's name, so that nothing is taken from the functions of other ones; where no folder can be
    written, everything is compiled anew.
    """
    import numba
    from numba.core.dispatcher import Dispatcher

    config: Any = numba.config
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    versions = [f"{name}-{version(name)}" for name in ("umap-learn", "pynndescent", "numba")]
    before, config.CACHE_DIR = config.CACHE_DIR, str(root / "raggedatlas" / "-".join(versions))
    try:
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in {"umap", "pynndescent"}:
                for function in vars(module).values():
                    if isinstance(function, Dispatcher):
                        function.enable_caching()
    except (OSError, RuntimeError):
        return
    finally:
        config.CACHE_DIR = before


def load_umap(path: str | os.PathLike[str]) -> UmapModel:
    """Read what `UmapModel.save` wrote; nothing is unpickled.

    Raises
    ------
    NotFoundError
        If there is no such file.
    CorruptError
        If it is no such model.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            told, sample, layout = json.loads(str(stored["settings"])), stored["sample"], stored["layout"]
        settings = UmapSettings(**{**told, "features": tuple(told["features"])})
    except FileNotFoundError as error:
        raise NotFoundError(f"There is no model {os.fspath(path)}.") from error
    except (KeyError, TypeError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise CorruptError(f"{os.fspath(path)} is no layout: {error}.") from error
    if sample.ndim != 2 or layout.shape != (len(sample), settings.n_components):
        raise CorruptError(f"{os.fspath(path)}: the layout does not fit the sample.")
    return UmapModel(settings, sample, layout)
