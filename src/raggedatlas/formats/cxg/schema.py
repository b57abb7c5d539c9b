"""Constants of the CXG format: names of arrays, layouts, versions, metadata keys and type limits."""

from typing import Literal

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

Profile = Literal["0.3.0", "0.2.0"]
PROFILES: tuple[Profile, ...] = ("0.3.0", "0.2.0")
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
