"""Terms for free-text labels: proposed by name, synonym and similarity, confirmed by a file, and written back as ids."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.cells import visible_cells
from raggedatlas.catalog.terms import term_source
from raggedatlas.errors import QueryError, SourceError
from raggedatlas.formats.output_files import atomic_write
from raggedatlas.ingest.annotations import AnnotationSource, annotate, with_facts
from raggedatlas.model.options import AnnotateOptions, MapTermsOptions
from raggedatlas.model.reports import AnnotationReport, Report
from raggedatlas.model.terms import SUFFIX, Match, TermColumns, Terms, find_term
from raggedatlas.store.copies import local_target
from raggedatlas.store.filters import Columns
from raggedatlas.store.location import as_path, with_options
from raggedatlas.store.ontologies import read_text_table

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = 200
"""Labels that a report shows."""

_LEFT = ("left out", "ambiguous", "near", "deprecated", "none")
"""Ways in which a label gets no term."""


@dataclass(frozen=True, slots=True)
class LabelTerm:
    """A label and the term that it gets, or those that it may mean.

    `match` is how the term was found: ``confirmed`` by a file, or ``name``, ``synonym``, ``id`` or ``old id``. A label
    that is ``left out`` by a file, ``ambiguous``, ``near``, ``deprecated`` or ``none`` gets no term.
    """

    label: str  # the value of the column
    n_cells: int  # cells with it
    match: str
    term: str | None = None  # the id that its cells get
    name: str = ""  # label of the term
    # Terms to choose from: `id name (score)`, the score of near matches from 0 to 1.
    candidates: tuple[str, ...] = ()
    note: str = ""  # what became of a deprecated id


@dataclass(frozen=True)
class TermMapping(Report):
    """What `map_terms` proposes and what it wrote.

    Parameters
    ----------
    column, ontology : str
        The column of labels, and the ontology with its release.
    labels : tuple of LabelTerm
        Every label, those of most cells first.
    unknown : tuple of str
        Labels of the file that no cell has.
    annotation : AnnotationReport or None
        What was written, or would be; None where no label has a term.
    """

    column: str
    ontology: str
    labels: tuple[LabelTerm, ...]
    unknown: tuple[str, ...] = ()
    annotation: AnnotationReport | None = None

    @property
    def open(self) -> tuple[LabelTerm, ...]:
        """Labels without a term that no file has decided."""
        return tuple(one for one in self.labels if one.term is None and one.match != "left out")

    def to_pandas(self) -> "pd.DataFrame":
        """Return a frame with a row for each label: label, n_cells, match, term, name, candidates, note."""
        import pandas as pd

        rows = [{**asdict(one), "candidates": " | ".join(one.candidates)} for one in self.labels]
        return pd.DataFrame(rows, columns=[*LabelTerm.__dataclass_fields__])

    def write(self, path: str | os.PathLike[str]) -> str:
        """Write the labels to a ``.csv`` or ``.tsv`` file, to be edited and given back with ``confirm=``.

        The column ``term`` has the id that a label gets, and is empty where that is open: put one of the candidates there, or
        any other term by id or name. An empty one leaves the label without a term.

        Parameters
        ----------
        path : str or Path
            Where; a file there is replaced.

        Returns
        -------
        str
            The path.
        """
        with local_target(path, overwrite=True) as place, atomic_write(place) as temporary:
            self.to_pandas().to_csv(temporary, index=False, sep="\t" if place.suffix == ".tsv" else ",")
        return str(path)

    def __repr__(self) -> str:
        """Return the report as lines of text, open labels first."""
        n_open, n_cells = len(self.open), sum(one.n_cells for one in self.open)
        lines = [
            f"{self.column}: {len(self.labels) - n_open:,} of {len(self.labels):,} labels decided by {self.ontology}; {n_open:,} open, "
            f"{n_cells:,} cells"
        ]
        shown = sorted(self.labels, key=lambda one: one.match not in _LEFT)
        for one in shown[:_SHOWN]:
            found = f"{one.term} {one.name}" if one.term is not None else "; ".join(one.candidates) or "-"
            lines.append(
                f"  {one.label!r} ({one.n_cells:,} cells) {one.match}: {found}{f' ({one.note})' if one.note else ''}"
            )
        lines += [f"  ... and {len(shown) - _SHOWN:,} more"] if len(shown) > _SHOWN else []
        lines += [f"  no cell has {', '.join(map(repr, self.unknown[:8]))} of the file"] if self.unknown else []
        return "\n".join([*lines, *([] if self.annotation is None else [repr(self.annotation)])])


def map_terms(catalog: Catalog, column: str, options: MapTermsOptions) -> TermMapping:
    """Find a term for each label of a column, and write the ids of those that are certain; see `RaggedAtlas.map_terms`.

    If an error is raised, nothing is written.
    """
    catalog = catalog.session("map_terms()")
    known = Columns(catalog.tables.schema(CELLS), terms=partial(term_source, catalog))
    columns = known.term_columns(column)
    if columns.labels is None:
        raise QueryError(
            f"map_terms() takes a column of labels, and {column!r} has ids; name the column of their labels."
        )
    terms = known.term_source().find(columns, options.ontology)
    sizes: Counter[str] = Counter()
    for batch in visible_cells(catalog, [columns.labels]):
        for entry in pc.value_counts(batch.column(columns.labels).drop_null()).to_pylist():
            sizes[str(entry["values"])] += entry["counts"]
    # Every row of the file is looked up before the first write.
    confirm = with_options(options.confirm, catalog.location.storage_options)
    said = {} if confirm is None else _read_confirmed(confirm, terms)
    found = []
    for label, n in sizes.items():
        if label not in said:
            found.append(_propose(label, n, terms))
        elif said[label]:
            found.append(_decided(label, n, said[label], terms, "confirmed"))
        else:
            found.append(LabelTerm(label, n, "left out"))
    found.sort(key=lambda one: (-one.n_cells, one.label))
    unknown = tuple(label for label in said if label not in sizes)
    report = TermMapping(columns.name, terms.version, tuple(found), unknown)
    mapped = {one.label: one.term for one in found if one.term is not None}
    if not mapped:
        return report
    table = _ids_of_cells(catalog, columns, mapped)
    source = AnnotationSource(
        with_facts(table), columns.name + SUFFIX, f"map_terms({columns.name!r}) by {terms.version}"
    )
    written = annotate(catalog, source, AnnotateOptions(on_conflict=options.on_conflict, dry_run=options.dry_run))
    return TermMapping(columns.name, terms.version, tuple(found), unknown, written)


def _propose(label: str, n_cells: int, terms: Terms) -> LabelTerm:
    """Look a label up; one that is a name of a single term gets it, and all others get candidates."""
    matches = [terms.find(part.strip()) for part in label.split(" || ")]
    if all(len(match.rows) == 1 for match in matches):
        return _decided(label, n_cells, matches, terms)
    several = tuple(f"{terms.ids[row].as_py()} {terms.label(row)}" for match in matches for row in match.rows)
    if several:
        return LabelTerm(label, n_cells, "ambiguous", candidates=several)
    near = tuple(f"{terms.ids[row].as_py()} {terms.label(row)} ({score:.2f})" for row, score in terms.near(label))
    notes = "; ".join(match.note for match in matches if match.note)
    if any(match.kind == "deprecated" for match in matches):
        return LabelTerm(label, n_cells, "deprecated", candidates=near, note=notes)
    return LabelTerm(label, n_cells, "near" if near else "none", candidates=near)


def _decided(label: str, n_cells: int, matches: list[Match], terms: Terms, kind: str | None = None) -> LabelTerm:
    rows = [match.rows[0] for match in matches]
    return LabelTerm(
        label,
        n_cells,
        kind or matches[0].kind,
        " || ".join(terms.ids[row].as_py() for row in rows),
        " || ".join(map(terms.label, rows)),
        note="; ".join(match.note for match in matches if match.note),
    )


def _read_confirmed(confirm: Any, terms: Terms) -> dict[str, list[Match]]:  # noqa: ANN401  (a path, a mapping or a table)
    """Return the terms that a file gives to labels; none for labels that it leaves without."""
    if isinstance(confirm, Mapping) and not {"label", "term"} <= confirm.keys():
        pairs = [*confirm.items()]
        shown = "confirm"
    else:
        if isinstance(confirm, str | os.PathLike):
            path = as_path(confirm)
            table, shown = read_text_table(path), path.name
        else:
            shown = type(confirm).__name__
            try:
                table = pa.table(confirm)
            except (pa.ArrowException, TypeError, ValueError) as error:
                raise SourceError(
                    f"map_terms() takes confirm as a CSV or TSV file, a mapping of label to term or a table, not a {shown}."
                ) from error
        lacking = [name for name in ("label", "term") if name not in table.column_names]
        if lacking:
            raise SourceError(
                f"{shown} has no column {lacking[0]!r}, only {table.column_names}; a file that confirms terms has 'label' and 'term'."
            )
        pairs = [*zip(table.column("label").to_pylist(), table.column("term").to_pylist(), strict=True)]
    found: dict[str, list[Match]] = {}
    texts: dict[str, str] = {}
    for label, term in pairs:
        if label is None:
            continue
        text = "" if term is None or str(term) == "nan" else str(term).strip()
        if texts.setdefault(str(label), text) != text:
            raise SourceError(
                f"{shown} gives the label {label!r} the terms {texts[str(label)]!r} and {text!r}; a label has one."
            )
        found[str(label)] = []
        for part in (part.strip() for part in text.split(" || ") if part):
            try:
                match = find_term(terms, part)
            except QueryError as error:
                raise SourceError(f"{shown} cannot be used for the label {str(label)!r}: {error}") from error
            if len(match.rows) > 1:
                several = " and ".join(map(terms.describe, match.rows))
                raise SourceError(
                    f"{shown} gives the label {str(label)!r} the term {part!r}, which is {several}; name one by id."
                )
            found[str(label)].append(match)
    return found


def _ids_of_cells(catalog: Catalog, columns: TermColumns, term_of: Mapping[str, str]) -> pa.Table:
    """Return uid and id of all cells whose label has a term; ids are categories."""
    labels, ids = pa.array([*term_of], pa.string()), sorted({*term_of.values()})
    code_of = pa.array([ids.index(term) for term in term_of.values()], pa.int32())
    uids, codes = [], []
    for batch in visible_cells(catalog, ["uid", str(columns.labels)]):
        # One look-up for the batch: label -> place in `labels` -> code of its id.
        code = code_of.take(pc.index_in(batch.column(str(columns.labels)).cast(pa.string()), value_set=labels))
        uids.append(batch.column("uid").filter(code.is_valid()))
        codes.append(code.drop_null())
    # With their types, since without cells there are no blocks.
    codes_of_all = pa.chunked_array(codes, pa.int32()).combine_chunks()
    values = pa.DictionaryArray.from_arrays(codes_of_all, pa.array(ids, pa.string()))
    return pa.table({"uid": pa.chunked_array(uids, pa.string()), columns.name + SUFFIX: values})
