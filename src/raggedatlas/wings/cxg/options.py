"""The CXG format: names of arrays, versions and metadata keys; options of its writer; and reports of what a CXG cannot represent."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np

from raggedatlas.errors import SourceError
from raggedatlas.model.choices import PCA, Embedder, Profile, WideIntegers
from raggedatlas.model.ids import is_unicode

Layout = Literal["dense", "sparse", "split"]
"""Storage layout of the matrix: `dense` and `sparse` are one two-dimensional array ``X``; `split` is ``Xr`` and ``Xc``, each
sparse in one dimension, for slices of cells and of features."""

OBS, VAR = "obs", "var"
X, XR, XC = "X", "Xr", "Xc"
SHIFT = "X_col_shift"
EMB = "emb"
GROUP_METADATA = "cxg_group_metadata"
UNS = "uns"
COVERAGE = "coverage"

MEMBERS = (OBS, VAR, X, XR, XC, SHIFT, EMB, GROUP_METADATA, UNS, COVERAGE)
"""Members of the root group; others are preserved by name and ignored by viewers."""

ANONYMOUS = ""
"""Name of the attribute with the values of a matrix or embedding."""

VERSION = "cxg_version"
PROPERTIES = "cxg_properties"
COLORS = "cxg_category_colors"
CORPORA = "corpora"
GROUP_KEYS = (VERSION, PROPERTIES, COLORS, CORPORA)
"""Keys of the metadata of `GROUP_METADATA`; all but the version are JSON."""

HINTS = "cxg_schema"
GENESETS = "genesets"
"""Keys of the metadata of ``obs`` and ``var``, both JSON."""

INDEX = "index"
"""Key of the hints that names the index column."""

UNNAMED = "unnamed"
"""Name of the version without a version number; viewers call it 0.0."""

VERSIONS = (UNNAMED, "0.1", "0.2.0", "0.3.0")
"""Known versions, old to new."""

# In newer files the title of the properties may be a file name, see `source._read_group_metadata`.
TITLED_BY_PROPERTIES = ("0.1",)
"""Versions in which the title in `PROPERTIES` takes precedence over the one in `CORPORA`."""

PROFILES: tuple[Profile, ...] = get_args(Profile)
"""Versions that can be written: the first for the current Explorer, the second for cellxgene 0.15 to 0.16.8."""

HINT_TYPES = ("string", "categorical", "boolean", "int32", "float32", "int64", "float64")
"""Types that a hint may name; viewers serve the first five."""

FEATURE_NAME = "feature_name"
"""Column of ``var`` that viewers show by default if its names are unique."""

CODE_TYPES = ("int8", "int16", "int32")
"""Types of categorical codes, as in pandas."""

SPATIAL = "spatial"
"""The only key of `UNS` that viewers read, and the only embedding that keeps its name in AnnData."""

IN_TISSUE = "in_tissue"
"""Column of ``obs`` that viewers treat as boolean if there is a tissue image."""

LIBRARY = {
    "image_properties": ("resolution", "crop_coords", "width", "height"),
    "scalefactors": ("spot_diameter_fullres", "tissue_hires_scalef"),
}
"""Keys that viewers require for each library in `SPATIAL` of `UNS`; they treat every key of that value as a library."""

OBSM_PREFIX = "X_"
"""Prefix of names in ``obsm`` that names of embeddings do not have."""

MISSING_TEXT = "nan"
"""Text that represents a missing value in text columns."""

TRUTHS = ("False", "True")
"""Categories of booleans for columns without a False, which viewers do not support as booleans."""

SIDE = "cxg"
"""Key of ``uns`` under which AnnData holds what only a CXG has a place for."""


LossKind = Literal["lost", "changed", "kept", "rounded", "converted"]

LOSS_KINDS: dict[LossKind, str] = {
    "lost": "left out",
    "changed": "written with another meaning or value",
    "kept": "written unchanged, although viewers do not support it",
    "rounded": "rounded to 32 bits",
    "converted": "written with another type but the same values",
}
"""Kind of loss -> its meaning, worst first."""

STRICT_KINDS: tuple[LossKind, ...] = ("lost", "changed")
"""Kinds that ``strict`` rejects. The format rounds all 64-bit values, so rounding is only reported."""


@dataclass(frozen=True, slots=True)
class ConversionLoss:
    """One element that is not preserved exactly.

    Examples
    --------
    >>> print(ConversionLoss("raw", "lost", "a CXG has one matrix"))
    lost: raw (a CXG has one matrix)
    """

    key: str  # ``"layers/counts"``, ``"obs/n_genes"``
    fate: LossKind  # what happens to it, see `LOSS_KINDS`
    what: str  # short explanation, with a workaround if there is one

    def __str__(self) -> str:
        """Return the loss as one line."""
        return f"{self.fate}: {self.key} ({self.what})"


def sort_losses(losses: Iterable[ConversionLoss]) -> tuple[ConversionLoss, ...]:
    """Sort losses, worst first, otherwise in the given order."""
    order = list(LOSS_KINDS)
    # A sink is asked for the same key more than once and records a loss each time; `fromkeys` keeps the first.
    return tuple(sorted(dict.fromkeys(losses), key=lambda loss: order.index(loss.fate)))


OBSM = "obsm/"


def embedding_name(name: str) -> str:
    """Return the name of an embedding in a CXG for a key of ``obsm``, i.e. without ``X_``.

    Examples
    --------
    >>> embedding_name("X_umap"), embedding_name("spatial"), embedding_name("X_")
    ('umap', 'spatial', 'X_')
    """
    return name.removeprefix(OBSM_PREFIX) or name


def is_embedding(name: str, width: int, dtype: np.dtype[Any]) -> bool:
    """Return whether an array of ``obsm`` becomes an embedding: ``spatial``, ``X_...``, or two or three float columns.

    Examples
    --------
    >>> is_embedding("umap", 2, np.dtype("f4")), is_embedding("protein", 14, np.dtype("f4"))
    (True, False)
    """
    named = name == SPATIAL or (name.startswith(OBSM_PREFIX) and len(name) > len(OBSM_PREFIX))
    return named or (width in (2, 3) and dtype.kind == "f")


def is_path_name(name: str) -> bool:
    """Return whether an array can have a name: no slash, nothing that the file system or TileDB reserves."""
    return bool(name) and not name.startswith(("__", ".")) and not set(name) & set('/\\\0:*?"<>|') and is_unicode(name)


SPARSE_BELOW = 25.0
"""Percentage of non-zero entries below which the matrix is written sparse."""


@dataclass(frozen=True, slots=True)
class CxgOptions:
    """Options of the CXG writer.

    Parameters
    ----------
    overwrite : bool
        Whether an existing CXG may be replaced.
    profile : {"0.3.0", "0.2.0"}
        Version to write. 0.3.0 stores categories as codes and a sparse matrix as ``Xr`` and ``Xc``; 0.2.0, served by cellxgene 0.15 to
        0.16.8, stores categories as text and a single ``X``.
    strict : bool
        Whether to raise an error if anything would be lost or changed.
    title, about : str, optional
        Title and URL of the dataset. None uses ``uns["title"]`` and ``uns["cxg"]["properties"]``.
    layout : {"auto", "dense", "sparse"}
        Layout of the matrix; ``"auto"`` decides by `sparse_below`.
    sparse_below : float
        Percentage of non-zero entries below which the matrix is written sparse. If a source does not know its number of entries,
        it is estimated from the first rows.
    x : str
        Matrix to write: ``"X"``, or ``"layers/<name>"``.
    embeddings : sequence of str, optional
        Keys of ``obsm`` to write as embeddings; None selects ``spatial`` and all names that begin with ``X_``.
    compute_embedding : str or Embedder, optional
        ``"pca"`` computes two principal components if there is no embedding of that name; an `Embedder` allows other methods.
    var_index : str, optional
        Column of ``var`` with the feature names that viewers show; if names are not unique, a column ``feature_name`` is added in
        which they are extended by the ids. None uses ``feature_name`` if its names are unique, else the index.
    sort_categories : bool
        Whether to sort categories by name instead of keeping their order.
    wide_integers : {"refuse", "text"}
        Handling of integers beyond 32 bits.
    on_losses : callable, optional
        Called with the losses before anything is written, and again at the end if the matrix has NaN or infinite values.

    References
    ----------
    CXG 0.3.0.
    """

    overwrite: bool = False
    profile: Profile = "0.3.0"
    strict: bool = False
    title: str | None = None
    about: str | None = None
    layout: Literal["auto", "dense", "sparse"] = "auto"
    sparse_below: float = SPARSE_BELOW
    x: str = "X"
    embeddings: Sequence[str] | None = None
    compute_embedding: str | Embedder | None = None
    var_index: str | None = None
    sort_categories: bool = False
    wide_integers: WideIntegers = "refuse"
    on_losses: Callable[[tuple[ConversionLoss, ...]], None] | None = None

    @property
    def embedder(self) -> Embedder | None:
        """The embedder, or None."""
        what = self.compute_embedding
        if what is None or isinstance(what, Embedder):
            return what
        if what == PCA.name:
            return PCA
        raise SourceError(
            f"compute_embedding={what!r} is unknown; use 'pca', or raggedatlas.wings.results.verbs.reduction.embedder('umap') for a UMAP."
        )

    @classmethod
    def of(cls, choices: dict[str, Any]) -> "CxgOptions":
        """Create from keyword arguments.

        Raises
        ------
        SourceError
            If an option or value is unknown.

        Examples
        --------
        >>> CxgOptions.of({"profile": "0.2.0"}).profile
        '0.2.0'
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(choices) - set(known))
        if unknown:
            raise SourceError(f"Unknown CXG options {unknown}; available are {known}.")
        options = cls(**choices)
        values: dict[str, tuple[Any, ...]] = {
            "profile": PROFILES, "layout": ("auto", "dense", "sparse"), "wide_integers": get_args(WideIntegers)
        }  # fmt: skip
        for name, legal in values.items():
            if getattr(options, name) not in legal:
                raise SourceError(
                    f"Invalid {name} {getattr(options, name)!r} for a CXG; choose one of {', '.join(legal)}."
                )
        # Evaluated for its error: an unknown embedder must fail before anything is written.
        _ = options.embedder
        return options
