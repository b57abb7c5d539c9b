"""One store for single-cell and spatial atlases whose datasets do not share their features.

Examples
--------
>>> import raggedatlas as ra
>>> "RaggedAtlas" in dir(ra)
True
"""

import os
from typing import TYPE_CHECKING

from raggedatlas.model.wings import lazy_attributes

if TYPE_CHECKING:
    from raggedatlas.atlas import AtlasView, RaggedAtlas
    from raggedatlas.errors import AtlasError
    from raggedatlas.formats.copying import copy, read
    from raggedatlas.formats.registry import open_sink, open_source
    from raggedatlas.loader.loader import CellDataset, Loader
    from raggedatlas.loader.set_loader import SetLoader
    from raggedatlas.model.records import AtlasVersionRecord, DatasetRecord, FeatureLayout
    from raggedatlas.model.schemas import FeatureBaseSchema, HoxBaseSchema, PointerField
    from raggedatlas.model.spaces import (
        DenseZarrPointer,
        FeatureSpace,
        GeometryPointer,
        PointerKind,
        SparseZarrPointer,
        register_space,
    )
    from raggedatlas.query.query import Query
    from raggedatlas.query.split import Split
    from raggedatlas.store.executors import Workers
    from raggedatlas.store.filters import col, under
    from raggedatlas.wings.results.dataset import ResultDataset
    from raggedatlas.wings.results.npy_results import InferenceDataSet, convert_results, load_results_dataset
    from raggedatlas.wings.results.provider import DataProvider
    from raggedatlas.wings.results.writer import ResultDatasetWriter, ResultPart, create_results_writer
    from raggedatlas.wings.vectors.attachment import make_transcripts, transcripts_to_counts
    from raggedatlas.wings.vectors.points import read_points

__version__ = "0.1.0"

# Lance prints warnings for developers unless these are set before it is imported; what users need to know is an error of ours.
os.environ.setdefault("LANCE_LOG", "error")
os.environ.setdefault("LANCEDB_LOG", "error")

_HOMES = {
    "AtlasError": "raggedatlas.errors",
    "AtlasVersionRecord": "raggedatlas.model.records",
    "AtlasView": "raggedatlas.atlas",
    "CellDataset": "raggedatlas.loader.loader",
    "DataProvider": "raggedatlas.wings.results.provider",
    "DatasetRecord": "raggedatlas.model.records",
    "DenseZarrPointer": "raggedatlas.model.spaces",
    "FeatureBaseSchema": "raggedatlas.model.schemas",
    "FeatureLayout": "raggedatlas.model.records",
    "FeatureSpace": "raggedatlas.model.spaces",
    "GeometryPointer": "raggedatlas.model.spaces",
    "HoxBaseSchema": "raggedatlas.model.schemas",
    "InferenceDataSet": "raggedatlas.wings.results.npy_results",
    "Loader": "raggedatlas.loader.loader",
    "PointerField": "raggedatlas.model.schemas",
    "PointerKind": "raggedatlas.model.spaces",
    "Query": "raggedatlas.query.query",
    "RaggedAtlas": "raggedatlas.atlas",
    "ResultDataset": "raggedatlas.wings.results.dataset",
    "ResultDatasetWriter": "raggedatlas.wings.results.writer",
    "ResultPart": "raggedatlas.wings.results.writer",
    "SetLoader": "raggedatlas.loader.set_loader",
    "SparseZarrPointer": "raggedatlas.model.spaces",
    "Split": "raggedatlas.query.split",
    "Workers": "raggedatlas.store.executors",
    "clone": "raggedatlas.atlas",
    "col": "raggedatlas.store.filters",
    "convert_results": "raggedatlas.wings.results.npy_results",
    "copy": "raggedatlas.formats.copying",
    "create_results_writer": "raggedatlas.wings.results.writer",
    "load_results_dataset": "raggedatlas.wings.results.npy_results",
    "make_transcripts": "raggedatlas.wings.vectors.attachment",
    "open": "raggedatlas.atlas",
    "open_sink": "raggedatlas.formats.registry",
    "open_source": "raggedatlas.formats.registry",
    "read": "raggedatlas.formats.copying",
    "read_points": "raggedatlas.wings.vectors.points",
    "register_space": "raggedatlas.model.spaces",
    "transcripts_to_counts": "raggedatlas.wings.vectors.attachment",
    "under": "raggedatlas.store.filters",
}

__all__ = [
    "AtlasError",
    "AtlasVersionRecord",
    "AtlasView",
    "CellDataset",
    "DataProvider",
    "DatasetRecord",
    "DenseZarrPointer",
    "FeatureBaseSchema",
    "FeatureLayout",
    "FeatureSpace",
    "GeometryPointer",
    "HoxBaseSchema",
    "InferenceDataSet",
    "Loader",
    "PointerField",
    "PointerKind",
    "Query",
    "RaggedAtlas",
    "ResultDataset",
    "ResultDatasetWriter",
    "ResultPart",
    "SetLoader",
    "SparseZarrPointer",
    "Split",
    "Workers",
    "clone",
    "col",
    "convert_results",
    "copy",
    "create_results_writer",
    "load_results_dataset",
    "make_transcripts",
    "open",
    "open_sink",
    "open_source",
    "read",
    "read_points",
    "register_space",
    "transcripts_to_counts",
    "under",
]


__getattr__ = lazy_attributes(__name__, _HOMES)


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
