"""CELLxGENE's schema: files checked by its own program cellxgene-schema, and sources compared with its list of required facts."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from raggedatlas.errors import MissingExtraError, NotFoundError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.model.protocols import Source
from raggedatlas.model.validation import Problem, Problems

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

    Raises
    ------
    NotFoundError
        If the variable names a program that does not exist.
    MissingExtraError
        If it is not installed.
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
def validate_schema(path: str | Path, schema: Literal["cellxgene"] = "cellxgene") -> Problems:
    """List what a file lacks to be a dataset of CELLxGENE, by the program cellxgene-schema.

    Parameters
    ----------
    path : str or Path
        An `.h5ad` file on a local disk.
    schema : {"cellxgene"}
        The schema.

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
    file = Path(path)
    if not file.is_file():
        raise NotFoundError(f"There is no file {path}; check the path.")
    if file.suffix != ".h5ad":
        raise SourceError(f"{path} is no .h5ad file, which the schema {schema} is of; convert it first.")
    # The environment of this Python would lead the program to the wrong packages.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    words = [str(find_program()), "validate", str(file.absolute())]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(f"{path} was not checked: {words[0]} cannot be run or did not end ({error}).") from error
    problems = Problems(_problems(done.stdout + done.stderr))
    if (done.returncode != 0) != problems.breaks_must:
        last = " ".join(done.stderr.split())[-300:]
        raise SourceError(f"{path} was not checked: {PROGRAM} ended with code {done.returncode} ({last}).")
    return problems


def _problems(output: str) -> list[Problem]:
    matches = [match for line in output.splitlines() if (match := _FOUND.match(line))]
    fix = "See the schema of CELLxGENE, and add the fact to the file."
    return [Problem("CELLxGENE", _LEVELS[match[1]], "", match[2], fix) for match in matches]


def missing_facts(source: Source) -> tuple[str, ...]:
    """Return what a source lacks of the facts that CELLxGENE's schema requires, one line each; values are not checked.

    Parameters
    ----------
    source : Source
        Any open source.
    """
    schema = source.describe()
    columns = set(source.cells().column_names[1:])
    elements = {*schema.elements, *schema.left_out}
    missing = [f"obs[{name!r}] is missing" for name in REQUIRED_OBS if name not in columns]
    missing += [f"uns[{name!r}] is missing" for name in REQUIRED_UNS if f"uns/{name}" not in elements]
    keys = {info.features for info in schema.matrices if info.key == "X"} - {""}
    for key in sorted(keys):
        names = source.features(key).column(0).to_pylist()
        other = [name for name in names if not _FEATURE_ID.fullmatch(str(name))]
        if other:
            missing.append(f"{len(other):,} of {len(names):,} names of {key} are no Ensembl ids, e.g. {other[0]!r}")
    return tuple(f"CELLxGENE: {line}" for line in missing)
