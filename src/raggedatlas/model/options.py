"""Options of `add` and `annotate`, importable without any library: the command line takes choices and defaults from here.

The report of an `add` contains every default.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, TypeVar

from raggedatlas.errors import SourceError
from raggedatlas.model.choices import CellKey, Curation, Layout, Metric, OnConflict, StoredAs, Unmatched, refuse_unused

STEPS = ("plan", "lease", "block", "arrays", "frames", "columns", "features", "layouts", "cells", "records", "done")
"""The steps of an `add`, in order; each is reported just before the next begins. With an executor, ``sources`` reports how many
sources workers have written, in place of all steps before ``columns``."""


OnClash = Literal["error", "text", "rename"]
CopyMode = bool | Literal["rows"]


class AddChoices(TypedDict, total=False):
    """Keyword arguments of `RaggedAtlas.add`, all optional.

    Attributes
    ----------
    obs : "all", sequence of str, or mapping of str to str
        Which obs columns become cell columns; a mapping also renames (``{old: new}``).
    cast : mapping of str to str
        Column -> ``"str"``, ``"int"``, ``"float"`` or ``"bool"``.
    on_clash : {"error", "text", "rename"}
        What to do with a column whose type conflicts with that of the existing cell column. Refuse it, keep both as text (numbers that
        are in the atlas become text too), or put it into a column of its own, such as ``age_text`` next to ``age``.
    layers : "auto", sequence of str, or mapping of str to str
        Which matrices to take (``"X"``, ``"raw/X"``, ``"layers/spliced"``, within MuData ``"mod/rna/X"``); a mapping also names
        the layer.
    spaces : mapping of str to str
        Matrix key or modality -> feature space, e.g. ``{"obsm/protein_expression": "protein_abundance"}``.
    feature_id : str or mapping of str to str
        ``"auto"``, ``"index"``, or the var column that holds the ids; a mapping says it per space.
    organism : str
        Organism; ``"auto"`` infers it from Ensembl ids.
    nonfinite : {"refuse", "keep"}
        What to do with NaN and infinities in a matrix of values.
    duplicate_entries : {"sum", "refuse"}
        What to do with duplicate entries of a sparse row.
    max_columns : int
        Refuse more cell columns than this without a choice.
    column_order : {"detected", "file"}
        Order of sparse columns: ``"detected"`` is smallest. It puts those first that many cells detect, and follows a dataset with
        the same features where there is one. What `dataset` gives back is in the file's order either way.
    curate : {"cellxgene", "cellxgene-strict"}
        List what the file lacks of this schema's required facts; strict refuses the file. The notes of the report have the list.
    genome : str
        Genome to read from an old 10x file with several.
    license : str
        Licence of the dataset, such as ``"CC-BY-4.0"``; by default what ``uns["license"]`` says. `publish` lists it.
    copy : bool or "rows"
        Whether values are copied into the atlas. With False the dataset is linked: its matrices stay in the file and are read from there,
        everything else is copied. The file must be one of `RaggedAtlas.add` with matrices of HDF5 or Zarr. Of CSC matrices few features are read
        fast, and rows by a walk over all of the matrix; with ``"rows"`` their rows are copied, and the arrays of the file serve as column-sorted copies.
    hash : {"metadata", "full"}
        Of a linked file, what its content is recognized by: the places of its chunks, or all its values, which are read for that once.
    embeddings : sequence of str, or mapping of str to str
        Which members of `obsm` become embeddings, each a feature space of its own that can be queried and searched:
        ``{"X_pca": "pca"}``, or names alone, which lose a leading ``X_``.
    extras : "all" or sequence of str
        What is kept of `obsm`, `varm`, `obsp`, `varp`, `uns` and ``raw/varm``: keys (``"uns/neighbors"``) or whole
        groups (``"uns"``).
    space : str
        Of a model's result: the feature space that it becomes, ``"embedding"`` by default. Of geometry: its feature space; by default the
        usual one of its type.
    as_ : {"space", "vector"}
        Store a result as an array (``"space"``), or as indexed vectors in the cell table (``"vector"``). Cells point into the array;
        few cells need no index.
    output : str
        Output of a result. It is needed where there are several.
    unknown : {"error", "skip"}
        What to do with ids of a result or geometry that match no cell.
    metric : {"l2", "cosine", "dot"}
        Distance of the vector index: squared Euclidean (``"l2"``), cosine or dot.
    link : str, mapping of str to str, or None
        Of geometry: the cell column, ``"cell_name"`` or ``"uid"`` whose values are the object attribute of the same name, or else the object
        ids; ``{column: attribute}`` names both. Without it every object becomes a new cell.
    dataset : str
        Geometry: dataset of the cells; without a link, name of the new dataset.
    new_cells : bool
        Geometry: objects without a cell become new cells.
    lacking : {"error", "allow"}
        Geometry: what to do if cells of the dataset have no shape.
    cells : str
        Transcripts: attribute with the cell; by default the object.
    genes : str
        Transcripts: attribute with the gene.
    unassigned : value
        Of transcripts: the value that means no cell, in addition to negative and missing values.
    counts : bool
        Transcripts: also add their counts as expression. The counts are a matrix of new cells.
    layout : {"0.9", "0.7"}
        Of geometry in memory: how it is stored.
    """

    obs: Literal["all"] | Sequence[str] | Mapping[str, str]
    cast: Mapping[str, str]
    on_clash: OnClash
    layers: Literal["auto"] | Sequence[str] | Mapping[str, str]
    spaces: Mapping[str, str]
    feature_id: str | Mapping[str, str]
    organism: str
    nonfinite: Literal["refuse", "keep"]
    duplicate_entries: Literal["sum", "refuse"]
    max_columns: int
    column_order: Literal["detected", "file"]
    curate: Curation
    genome: str
    license: str
    copy: CopyMode
    hash: Literal["metadata", "full"]
    embeddings: Sequence[str] | Mapping[str, str]
    extras: Literal["all"] | Sequence[str]
    space: str
    as_: StoredAs
    output: str
    unknown: Unmatched
    metric: Metric
    link: str | Mapping[str, str] | None
    dataset: str
    new_cells: bool
    lacking: Literal["error", "allow"]
    cells: str
    genes: str
    unassigned: Any
    counts: bool
    layout: Layout


OnDuplicate = Literal["error", "skip", "replace"]


@dataclass(frozen=True, slots=True)
class AddOptions:
    """Options of every `add`: of files, results and geometry.

    Parameters
    ----------
    name : str or None
        Name of the dataset, result or geometry; else the file's, or the space's.
    on_duplicate : {"error", "skip", "replace"}
        What to do with content that already exists.
    dry_run : bool
        Check and report; write nothing.
    """

    name: str | None = None
    on_duplicate: OnDuplicate = "error"
    dry_run: bool = False


Options = TypeVar("Options", bound=AddOptions)


def read_options(kind: type[Options], choices: Mapping[str, Any], call: str) -> Options:
    """Build the options of one kind of `add` from keyword arguments."""
    known = kind.__dataclass_fields__
    unknown = sorted(set(choices) - set(known))
    if unknown:
        raise SourceError(f"{call} does not know {unknown}; it takes {sorted(known)}.")
    return kind(**choices)


@dataclass(frozen=True, slots=True)
class IngestOptions(AddOptions):
    """Options of adding a file of cells; `AddChoices` describes each."""

    obs: Literal["all"] | Sequence[str] | Mapping[str, str] = "all"
    cast: Mapping[str, str] = field(default_factory=dict)
    on_clash: OnClash = "error"
    layers: Literal["auto"] | Sequence[str] | Mapping[str, str] = "auto"
    spaces: Mapping[str, str] = field(default_factory=dict)
    feature_id: str | Mapping[str, str] = "auto"
    organism: str = "auto"
    nonfinite: Literal["refuse", "keep"] = "refuse"
    duplicate_entries: Literal["sum", "refuse"] = "sum"
    max_columns: int = 200
    column_order: Literal["detected", "file"] = "detected"
    curate: Curation | None = None
    genome: str | None = None
    license: str | None = None
    copy: CopyMode = True
    hash: Literal["metadata", "full"] = "metadata"
    embeddings: Sequence[str] | Mapping[str, str] = ()
    extras: Literal["all"] | Sequence[str] = "all"

    def __post_init__(self) -> None:
        """Refuse choices that have no effect."""
        chosen = not isinstance(self.obs, str)
        refuse_unused("add", "where obs=... names the columns", max_columns=chosen and self.max_columns != 200)
        refuse_unused("add", "where values are copied, and all are hashed", hash=self.copy and self.hash != "metadata")
        refuse_unused(
            "add", "with copy=False, which leaves the entries as they are", duplicate_entries=not self.copy and self.duplicate_entries != "sum",
            nonfinite=not self.copy and self.nonfinite != "refuse",
        )  # fmt: skip

    def feature_id_of(self, space: str) -> str:
        """Return the column with the ids of a space's features."""
        return self.feature_id if isinstance(self.feature_id, str) else self.feature_id.get(space, "auto")


@dataclass(frozen=True, slots=True)
class ResultOptions(AddOptions):
    """Options of adding a model's result; `AddChoices` describes each."""

    space: str | None = None
    as_: StoredAs = "space"
    output: str | None = None
    unknown: Unmatched = "error"
    metric: Metric = "l2"

    def __post_init__(self) -> None:
        """Refuse choices that contradict each other."""
        if self.as_ == "vector" and self.space is not None:
            raise SourceError(
                f"as_='vector' puts values into the cell table, and space={self.space!r} into an array; choose one of them."
            )
        refuse_unused("add", "with as_='space', which has no index", metric=self.as_ == "space" and self.metric != "l2")


@dataclass(frozen=True, slots=True)
class GeometryOptions(AddOptions):
    """Options of adding geometry; `AddChoices` describes each."""

    space: str | None = None
    link: str | Mapping[str, str] | None = None
    dataset: str | None = None
    new_cells: bool = False
    unknown: Unmatched = "error"
    lacking: Literal["error", "allow"] = "error"
    cells: str = ""
    genes: str = "gene"
    unassigned: Any = None
    counts: bool = False
    organism: str = "auto"
    layout: Layout = "0.9"

    def __post_init__(self) -> None:
        """Refuse choices that contradict each other, or have no effect."""
        refuse_unused(
            "add", "without link=..., as every object becomes a new cell", new_cells=self.link is None and self.new_cells,
            unknown=self.link is None and self.unknown == "skip", lacking=self.link is None and self.lacking == "allow",
        )  # fmt: skip
        refuse_unused("add", "without cells=...", unassigned=self.unassigned is not None and not self.cells)
        if self.new_cells and self.unknown == "skip":
            raise SourceError(
                "new_cells=True makes cells of objects without one, and unknown='skip' leaves them out; choose one."
            )
        if self.counts and self.link is not None:
            raise SourceError(
                "counts=True makes new cells of the transcripts, and link=... takes those that are there; leave one out. To have both, add "
                "the transcripts with counts=True first and link the other shapes with link='cell_name'; transcripts_to_counts(...) gives "
                "the matrix alone."
            )


@dataclass(frozen=True, slots=True)
class AnnotateOptions:
    """What a caller may choose about an annotation; `RaggedAtlas.annotate` says what each means."""

    name: str | None = None
    on: CellKey = "uid"
    dataset: str | None = None
    columns: Sequence[str] | Mapping[str, str] | None = None
    obsm: Sequence[str] = ()
    cast: Mapping[str, str] = field(default_factory=dict)
    on_conflict: OnConflict = "error"
    unknown: Unmatched = "error"
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class MapTermsOptions:
    """What a caller may choose about a mapping; `RaggedAtlas.map_terms` says what each means."""

    ontology: str | None = None
    confirm: Any = None
    on_conflict: OnConflict = "keep"
    dry_run: bool = False
