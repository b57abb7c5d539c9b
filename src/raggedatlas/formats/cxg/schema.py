"""What a CXG is made of, as data: names of arrays, layouts, versions, metadata keys, and the limits of its types."""

from typing import Literal

Layout = Literal["dense", "sparse", "split"]
"""How expression values lie: `dense` and `sparse` are one array ``X`` of two dimensions; `split` is ``Xr`` and ``Xc``, each sparse in
one dimension, for slices of cells and of features."""

OBS, VAR = "obs", "var"
X, XR, XC = "X", "Xr", "Xc"
SHIFT = "X_col_shift"
EMB = "emb"
GROUP_METADATA = "cxg_group_metadata"
UNS = "uns"
COVERAGE = "coverage"

MEMBERS = (OBS, VAR, X, XR, XC, SHIFT, EMB, GROUP_METADATA, UNS, COVERAGE)
"""What may stand at the root; anything else is carried through by name and ignored by viewers."""

ANONYMOUS = ""
"""Name of the attribute that holds the values of a matrix or embedding."""

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
"""Key of the hints that names the column which is the index."""

UNNAMED = "unnamed"
"""What the version is called that was written before versions were; viewers call it 0.0."""

VERSIONS = (UNNAMED, "0.1", "0.2.0", "0.3.0")
"""Versions that are known, old to new."""

TITLED_BY_PROPERTIES = ("0.1",)
"""Versions in which the title of `PROPERTIES` is taken where `CORPORA` has another."""

Profile = Literal["0.3.0", "0.2.0"]
PROFILES: tuple[Profile, ...] = ("0.3.0", "0.2.0")
"""Versions that are written: the first for the Explorer of today, the second for cellxgene 0.15 to 0.16.8."""

HINT_TYPES = ("string", "categorical", "boolean", "int32", "float32", "int64", "float64")
"""Types that a hint may name; the first five are what viewers serve."""

FEATURE_NAME = "feature_name"
"""The column of ``var`` that viewers show where its names are unique and no other is chosen."""

CODE_TYPES = ("int8", "int16", "int32")
"""Types of codes of categoricals, as pandas has them."""

SPATIAL = "spatial"
"""The one key of `UNS` that viewers read, and the one embedding that keeps its name in AnnData."""

IN_TISSUE = "in_tissue"
"""The column of ``obs`` that viewers take for booleans where there is an image of tissue."""

LIBRARY = {
    "image_properties": ("resolution", "crop_coords", "width", "height"),
    "scalefactors": ("spot_diameter_fullres", "tissue_hires_scalef"),
}
"""What viewers ask of each library in the value of `SPATIAL` in `UNS`; they take every key of that value for a library."""

OBSM_PREFIX = "X_"
"""What names in ``obsm`` begin with, and names of embeddings do not."""

MISSING_TEXT = "nan"
"""What stands for a missing value where only text can stand."""

TRUTHS = ("False", "True")
"""Categories of booleans where viewers would stumble over a column without a False."""

SIDE = "cxg"
"""Key of ``uns`` under which an AnnData carries what only a CXG has a place for."""
