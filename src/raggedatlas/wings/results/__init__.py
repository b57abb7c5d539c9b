"""Model outputs as Lance tables: writer, dataset, conversion of ``.npy`` results, and the verbs that make and read them."""

from typing import TYPE_CHECKING

from raggedatlas.model.wings import FileKind, Wing, lazy_attributes

if TYPE_CHECKING:
    from raggedatlas.wings.results.verbs.evaluation import ScoredResults, Scores, test
    from raggedatlas.wings.results.verbs.inference import engine, infer, infer_part
    from raggedatlas.wings.results.verbs.lookup import IndexReport, lookup, neighbors, save_to_database
    from raggedatlas.wings.results.verbs.reduction import embedder, pca, umap

WING = Wing(
    name="results",
    assets={"results": "raggedatlas.wings.results.assets:RESULTS"},
    answers={
        "add_vectors": "raggedatlas.wings.results.attachment:add_vectors",
        "embedder": "raggedatlas.wings.results.verbs.reduction:embedder",
        "load_results_dataset": "raggedatlas.wings.results.npy_results:load_results_dataset",
    },
    commands={
        "infer": "raggedatlas.wings.results.commands:infer",
        "test": "raggedatlas.wings.results.commands:measure",
        "engine": "raggedatlas.wings.results.commands:engine",
        "pca": "raggedatlas.wings.results.commands:pca",
        "umap": "raggedatlas.wings.results.commands:umap",
        "lookup": "raggedatlas.wings.results.commands:lookup",
        "save-to-database": "raggedatlas.wings.results.commands:save_to_database",
        "neighbors": "raggedatlas.wings.results.commands:neighbors",
        "convert-results": "raggedatlas.wings.results.commands:convert_results",
    },
    files=(
        FileKind(
            noun="results",
            accepts="raggedatlas.wings.results.assets:is_local_results",
            validate="raggedatlas.wings.results.validation:validate_results",
            levels=("quick", "deep"),
            default="deep",
            refusals={
                "fix": "results cannot be repaired; run the model again",
                "--at": "results have no snapshots",
                "--since": "results have no snapshots",
                "--root-hash": "results have no snapshots",
                "--workers": "results are read by one process",
            },
        ),
    ),
)

_HOMES = {
    "IndexReport": "raggedatlas.wings.results.verbs.lookup",
    "ScoredResults": "raggedatlas.wings.results.verbs.evaluation",
    "Scores": "raggedatlas.wings.results.verbs.evaluation",
    "embedder": "raggedatlas.wings.results.verbs.reduction",
    "engine": "raggedatlas.wings.results.verbs.inference",
    "infer": "raggedatlas.wings.results.verbs.inference",
    "infer_part": "raggedatlas.wings.results.verbs.inference",
    "lookup": "raggedatlas.wings.results.verbs.lookup",
    "neighbors": "raggedatlas.wings.results.verbs.lookup",
    "pca": "raggedatlas.wings.results.verbs.reduction",
    "save_to_database": "raggedatlas.wings.results.verbs.lookup",
    "test": "raggedatlas.wings.results.verbs.evaluation",
    "umap": "raggedatlas.wings.results.verbs.reduction",
}

__all__ = [
    "WING",
    "IndexReport",
    "ScoredResults",
    "Scores",
    "embedder",
    "engine",
    "infer",
    "infer_part",
    "lookup",
    "neighbors",
    "pca",
    "save_to_database",
    "test",
    "umap",
]

__getattr__ = lazy_attributes(__name__, _HOMES)
