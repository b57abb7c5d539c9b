"""CELLxGENE's schema: files checked by its own program cellxgene-schema, and sources compared with its list of required facts."""

import os
import re
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from raggedatlas.errors import MissingExtraError, NotFoundError, SourceError, ValuesError
from raggedatlas.model.arguments import checked
from raggedatlas.model.batch import Block
from raggedatlas.model.protocols import Sink, SinkMatrix, Source
from raggedatlas.model.validation import Problem, Problems
from raggedatlas.query.query import Query
from raggedatlas.store.copies import local_copy
from raggedatlas.store.filters import calling_level
from raggedatlas.store.location import as_path

VARIABLE = "RAGGEDATLAS_CELLXGENE_SCHEMA"
"""Environment variable that names the program."""

PROGRAM = "cellxgene-schema"
INSTALL_HINT = (
    f"install it in an environment of its own, e.g. pipx install {PROGRAM}, or name the program by {VARIABLE}"
)

TIMEOUT = 3600
"""Seconds after which a check is ended; the program itself takes about a minute to start."""

REQUIRED_OBS = (
    "assay_ontology_term_id", "cell_type_ontology_term_id", "development_stage_ontology_term_id", "disease_ontology_term_id",
    "donor_id", "is_primary_data", "self_reported_ethnicity_ontology_term_id", "sex_ontology_term_id", "suspension_type",
    "tissue_ontology_term_id", "tissue_type",
)  # fmt: skip
"""Columns of obs that version 7.1 of the schema requires."""

REQUIRED_UNS = ("title", "organism_ontology_term_id")
"""Members of uns that version 7.1 of the schema requires."""

_FOUND = re.compile(r"^(ERROR|WARNING):cellxgene_schema[\w.]*:(?:(?:ERROR|WARNING): )?(.+)$")
_FEATURE_ID = re.compile(r"ENS[A-Z]*\d{6,}|ERCC-\d+")
_LEVELS: dict[str, Literal["must", "should"]] = {"ERROR": "must", "WARNING": "should"}


def find_program() -> Path:
    """Return the program that checks files against CELLxGENE's schema.

    Its pinned releases of anndata and pandas exclude those of this package, so it runs in an environment of its own.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise NotFoundError(f"{VARIABLE} names {named}, which is no program; {INSTALL_HINT}.")
        return Path(named)
    found = shutil.which(PROGRAM)
    if found is None:
        raise MissingExtraError(f"{PROGRAM} is not installed; {INSTALL_HINT}.")
    return Path(found)


@checked
def validate_schema(
    what: str | os.PathLike[str] | Query, schema: Literal["cellxgene"] = "cellxgene", *, title: str | None = None
) -> Problems:
    """List what a file, or the cells of a query, lack to be a dataset of CELLxGENE, by the program cellxgene-schema.

    Parameters
    ----------
    what : str, Path or Query
        An `.h5ad` file, or a query, which is written in the form of the schema to a temporary file first.
    schema : {"cellxgene"}
        The schema.
    title : str, optional
        Title of the dataset that a query becomes.

    Returns
    -------
    Problems
        Errors of the program as level ``must``, its warnings as ``should``; their rule is ``CELLxGENE``.

    Raises
    ------
    NotFoundError
        If there is no such file.
    SourceError
        If it is no `.h5ad` file, or the program ends without an answer.
    MissingExtraError
        If the program is not installed.

    Examples
    --------
    >>> validate_schema("absent.h5ad")
    Traceback (most recent call last):
    raggedatlas.errors.NotFoundError: There is no file absent.h5ad; check the path.
    """
    if not isinstance(what, str | os.PathLike):
        # Found here, so that nothing is written where the program is missing.
        find_program()
        with tempfile.TemporaryDirectory(prefix="raggedatlas-") as folder, warnings.catch_warnings():
            # The program reports what `write` warns of.
            warnings.simplefilter("ignore", UserWarning)
            what.write(f"{folder}/query.h5ad", schema=schema, title=title)
            return validate_schema(f"{folder}/query.h5ad", schema)
    path = as_path(what)
    if isinstance(path, Path) and not path.is_file():
        raise NotFoundError(f"There is no file {what}; check the path.")
    if path.suffix != ".h5ad":
        raise SourceError(f"{path} is no .h5ad file, which the schema {schema} is of; convert it first.")
    with local_copy(path) as file:
        # The environment of this Python would lead the program to the wrong packages.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        words = [str(find_program()), "validate", str(file.absolute())]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SourceError(f"{path} was not checked: {words[0]} cannot be run or did not end ({error}).") from error
        matches = [match for line in (done.stdout + done.stderr).splitlines() if (match := _FOUND.match(line))]
        fix = "See the schema of CELLxGENE, and add the fact to the file."
        problems = Problems([Problem("CELLxGENE", _LEVELS[match[1]], "", match[2], fix) for match in matches])
        if (done.returncode != 0) != problems.breaks_must:
            last = " ".join(done.stderr.split())[-300:]
            raise SourceError(f"{path} was not checked: {PROGRAM} ended with code {done.returncode} ({last}).")
        return problems


def missing_facts(source: Source) -> tuple[str, ...]:
    """Return what a source lacks of the facts that CELLxGENE's schema requires, one line each; values are not checked."""
    schema = source.describe()
    columns = set(source.cells().column_names[1:])
    elements = {*schema.elements, *schema.left_out}
    missing = [f"obs[{name!r}] is missing" for name in REQUIRED_OBS if name not in columns]
    missing += [f"uns[{name!r}] is missing" for name in REQUIRED_UNS if f"uns/{name}" not in elements]
    if not any(info.key.startswith("obsm/X_") for info in schema.matrices):
        missing.append("obsm has no embedding, such as X_umap")
    keys = {info.features for info in schema.matrices if info.key == "X"} - {""}
    for key in sorted(keys):
        names = source.features(key).column(0).to_pylist()
        other = [name for name in names if not _FEATURE_ID.fullmatch(str(name))]
        if other:
            missing.append(f"{len(other):,} of {len(names):,} names of {key} are no Ensembl ids, e.g. {other[0]!r}")
    return tuple(f"CELLxGENE: {line}" for line in missing)


PORTAL_COLUMNS = (
    "assay", "cell_type", "development_stage", "disease", "organism", "organism_ontology_term_id", "self_reported_ethnicity", "sex",
    "tissue",
)  # fmt: skip
"""Columns of obs that files may not have, since CELLxGENE derives them from the terms or keeps them in uns."""

TAXA = {"human": "NCBITaxon:9606", "mouse": "NCBITaxon:10090"}
"""Organism of a registry -> its term."""

EXACT_FLOAT32 = 1 << 24
"""Integers up to here are exact in float32, the type that the schema asks for."""


class CurationSink:
    """A `Sink` that gives an AnnData the form of CELLxGENE's schema and warns of facts that are missing.

    `sink` is that of an `.h5ad` file, `path` names the file in messages, and `title` becomes ``uns["title"]``.

    Notes
    -----
    X becomes float32, and a warning tells if numbers were rounded; columns of obs that CELLxGENE derives itself are left out, and those of text become categories; var gets
    ``feature_is_filtered``; uns gets the title and the term of the organism. Nothing else is changed or made up.
    """

    by_column = False
    multimodal = False

    def __init__(self, sink: Sink, path: str, title: str | None) -> None:
        self._sink, self._path, self._title = sink, path, title
        self._missing: list[str] = []
        self._organisms: set[str] = set()
        self._rounded = False

    def begin(self, matrices: tuple[SinkMatrix, ...]) -> None:
        """Announce the matrices, X as float32."""
        stored = [replace(m, dtype=np.dtype(np.float32)) if m.key == "X" else m for m in matrices]
        x = next((m for m in matrices if m.key == "X"), None)
        if x is None or x.dtype.kind not in "biu":
            self._missing.append("X holds no raw counts; write the layer of counts by .layers()")
        if not any(m.key.startswith("obsm/X_") for m in matrices):
            self._missing.append("an embedding in obsm, such as X_umap")
        self._sink.begin(tuple(stored))

    def write(self, key: str, block: Block) -> None:
        """Append rows; raise `ValuesError` for an integer that float32 cannot hold, or a number that is beyond it."""
        if key == "X":
            values = block.layers["values"]
            with np.errstate(over="ignore"):
                stored = values.astype(np.float32, copy=False)
            if values.dtype.kind in "iu":
                wrong = values > EXACT_FLOAT32  # an atlas holds no negative counts
            else:
                wrong = np.isinf(stored) & np.isfinite(values)
                self._rounded |= bool((stored != values)[~np.isnan(values)].any())
            if wrong.any():
                raise ValuesError(
                    f"{self._path}: X has the value {values[wrong][0]:,}, which float32, the type of the schema, cannot hold; write "
                    "another layer by .layers()."
                )
            block = replace(block, layers={"values": stored})
        self._sink.write(key, block)

    def element(self, key: str, value: Any) -> None:  # noqa: ANN401  (any element that AnnData knows)
        """Write an element; obs, var and uns in the form of the schema."""
        if key == "obs":
            if "organism_ontology_term_id" in value:
                self._organisms |= set(value["organism_ontology_term_id"].dropna().astype(str))
            kept = value.drop(columns=[name for name in PORTAL_COLUMNS if name in value])
            for name in REQUIRED_OBS:
                if name not in kept:
                    self._missing.append(f"obs[{name!r}]")
                elif kept[name].isna().any():
                    self._missing.append(f"obs[{name!r}] of {int(kept[name].isna().sum()):,} cells")
                # Text is `object` or, by default of pandas 3, `str`.
                elif kept[name].dtype.kind == "O" and kept[name].dtype != "category":
                    kept[name] = kept[name].astype("category")
            value = kept
        elif key == "var":
            other = [name for name in value.index if not _FEATURE_ID.fullmatch(str(name))]
            if other:
                self._missing.append(f"Ensembl ids of {len(other):,} features, e.g. {other[0]!r}")
            if not self._organisms and "organism" in value:
                self._organisms = {TAXA.get(str(name), "") for name in value["organism"].dropna().unique()} - {""}
            value = value.assign(feature_is_filtered=False)
        elif key == "uns":
            facts: dict[str, Any] = {"title": self._title} if self._title else {}
            if not self._title:
                self._missing.append("uns['title'], which title= gives")
            if len(self._organisms) == 1:
                facts["organism_ontology_term_id"] = next(iter(self._organisms))
            else:
                self._missing.append(f"uns['organism_ontology_term_id'] (the cells are of {sorted(self._organisms)})")
            value = {**value, **facts}
        self._sink.element(key, value)

    def commit(self) -> str:
        """Complete the file, and warn of what is missing or was rounded."""
        done = self._sink.commit()
        if self._missing:
            facts = "; ".join(self._missing)
            warnings.warn(f"{self._path} lacks facts that CELLxGENE requires: {facts}.", stacklevel=calling_level())
        if self._rounded:
            warnings.warn(
                f"{self._path}: X was rounded to float32, the type of CELLxGENE's schema.", stacklevel=calling_level()
            )
        return done

    def abort(self) -> None:
        """Remove what was written so far."""
        self._sink.abort()
