"""Complete tasks over an atlas: run a model, score it, reduce its output, look up neighbours, show cells.

Examples
--------
>>> from raggedatlas import verbs
>>> "infer" in verbs.__all__
True
"""

from raggedatlas.wings.results.verbs.evaluation import ScoredResults, Scores, test
from raggedatlas.wings.results.verbs.inference import engine, infer, infer_part
from raggedatlas.wings.results.verbs.lookup import IndexReport, lookup, neighbors, save_to_database
from raggedatlas.wings.results.verbs.reduction import embedder, pca, umap
from raggedatlas.wings.viewer.visualize import make_view, view, visualize

__all__ = [
    "IndexReport",
    "ScoredResults",
    "Scores",
    "embedder",
    "engine",
    "infer",
    "infer_part",
    "lookup",
    "make_view",
    "neighbors",
    "pca",
    "save_to_database",
    "test",
    "umap",
    "view",
    "visualize",
]
