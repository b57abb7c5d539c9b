"""What a person asks for end to end: a model over an atlas, its scores, its reductions, its neighbours.

Examples
--------
>>> from raggedatlas import verbs
>>> "infer" in verbs.__all__
True
"""

from raggedatlas.verbs.database import IndexReport, save_to_database
from raggedatlas.verbs.embedding import embedder
from raggedatlas.verbs.evaluation import ScoredResults, test
from raggedatlas.verbs.finding import lookup, neighbors
from raggedatlas.verbs.inference import engine, infer
from raggedatlas.verbs.reduction import pca, umap
from raggedatlas.verbs.scores import Scores
from raggedatlas.verbs.sharing import infer_part
from raggedatlas.verbs.visualize import make_view, view, visualize

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
