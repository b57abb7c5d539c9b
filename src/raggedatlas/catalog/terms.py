"""Ontologies of an atlas: tables of terms that it keeps, else those of cellxgene-ontology-guide, and the values of its columns."""

from functools import partial

import pyarrow.compute as pc

from raggedatlas.catalog.catalog import CELLS, TERM_TABLE, Catalog
from raggedatlas.catalog.cells import visible_cells
from raggedatlas.catalog.genes import list_tables, read_rows
from raggedatlas.errors import ConflictError, MissingExtraError
from raggedatlas.model.frames import is_text, metadata_columns
from raggedatlas.model.terms import TERMS, TERMS_SCHEMA, Terms, TermSource
from raggedatlas.store.ontologies import packaged_ontologies, read_packaged


def term_source(catalog: Catalog) -> TermSource:
    """Return where `under` finds terms and the values of columns."""
    return TermSource(partial(column_values, catalog), partial(known_ontologies, catalog), partial(read_terms, catalog))


def known_ontologies(catalog: Catalog) -> dict[str, str]:
    """Return every ontology by its name and the prefixes of its ids.

    Without cellxgene-ontology-guide, these are those that the atlas keeps; if it keeps none, `MissingExtraError` is
    raised.
    """
    kept = {info.name: info.name for info in list_tables(catalog) if info.kind == TERMS}
    try:
        return packaged_ontologies() | kept
    except MissingExtraError:
        if not kept:
            raise
        return kept


def read_terms(catalog: Catalog, name: str) -> Terms:
    """Read an ontology: the table that the atlas keeps, else that of cellxgene-ontology-guide."""
    infos = tuple(info for info in list_tables(catalog) if info.kind == TERMS and info.name == name)
    if not infos:
        if name not in packaged_ontologies():
            raise ConflictError(
                f"Another process has removed the ontology {name!r} from {catalog.location.uri} meanwhile; run it again."
            )
        return read_packaged(name)
    return catalog.remember(
        "terms", infos, lambda: Terms(infos, read_rows(catalog, TERM_TABLE, TERMS_SCHEMA, infos).combine_chunks())
    )


def column_values(catalog: Catalog, stored: str) -> list[str]:
    """Return the distinct texts of a stored column of the cell table; categories are known without reading cells."""
    facts = metadata_columns(catalog.tables.schema(CELLS)).get(stored)
    if facts is not None and facts.kind == "categorical" and facts.categories and is_text(facts.category_kind):
        return [*map(str, facts.categories)]

    def read() -> list[str]:
        found: dict[str, None] = {}
        for batch in visible_cells(catalog, [stored]):
            found |= dict.fromkeys(pc.unique(batch.column(stored)).drop_null().to_pylist())
        return list(found)

    return catalog.remember("values", stored, read)
