"""Gene tables: gene annotations of an external source in one schema, independent of the file format."""

import json
from dataclasses import asdict, dataclass

import pyarrow as pa

GENES_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("accession", pa.string(), nullable=False),
        pa.field("organism", pa.string(), nullable=False),
        pa.field("symbol", pa.string()),
        pa.field("previous", pa.list_(pa.string()), nullable=False),
        pa.field("aliases", pa.list_(pa.string()), nullable=False),
        pa.field("same", pa.list_(pa.string()), nullable=False),
        pa.field("biotype", pa.string()),
    ]
)
"""One row per gene of a loaded table: its accession without version, current symbol, previous symbols, aliases, and the accessions
that the table gives as the same gene."""

ORTHOLOGS_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("accession", pa.string(), nullable=False),
        pa.field("organism", pa.string(), nullable=False),
        pa.field("symbol", pa.string()),
        pa.field("other", pa.string(), nullable=False),
        pa.field("other_organism", pa.string(), nullable=False),
        pa.field("other_symbol", pa.string()),
        pa.field("relation", pa.string(), nullable=False),
    ]
)
"""One row per pair of genes of two organisms; `relation` is ``one2one``, ``one2many``, ``many2one`` or ``many2many``."""

GENES, ORTHOLOGS = "genes", "orthologs"
"""Kinds of tables."""

NOMENCLATURE = frozenset({"HGNC", "MGI"})
"""Authorities that name genes; others repeat their names in annotations."""


@dataclass(frozen=True)
class GeneTableInfo:
    """Which table it is, and where it comes from.

    Parameters
    ----------
    name : str
        Its name in the atlas; a table of this name replaces the one before.
    kind : {"genes", "orthologs"}
        What it says.
    source : str
        Who says it, e.g. ``"HGNC"``, ``"GENCODE"``.
    release : str
        Release or date; empty where neither the file nor the caller says.
    organisms : tuple of str
        Common names.
    n_rows : int
        Genes, or pairs.
    sha256 : str
        Of the file's text, unpacked.
    loaded_at : str
        When the atlas got it, in ISO format; empty for a table that no atlas has, or that an earlier version loaded.
    """

    name: str
    kind: str
    source: str
    release: str
    organisms: tuple[str, ...]
    n_rows: int
    sha256: str
    loaded_at: str = ""

    @property
    def rank(self) -> int:
        """Rank of its symbols: 0 of the authority that names the genes, 1 of an annotation."""
        return 0 if self.source in NOMENCLATURE else 1

    def cite(self, what: str) -> str:
        """Format the evidence of a row, e.g. ``"HGNC previous symbol, release 2026-07"``."""
        return f"{self.source} {what}" + (f", release {self.release}" if self.release else "")


@dataclass(frozen=True)
class GeneTable:
    """A table as it was read from a file, before an atlas has it.

    Parameters
    ----------
    info : GeneTableInfo
        Which it is.
    rows : pyarrow.Table
        Of `GENES_SCHEMA` or `ORTHOLOGS_SCHEMA`, by `info.kind`.
    """

    info: GeneTableInfo
    rows: pa.Table


def infos_to_json(infos: tuple[GeneTableInfo, ...]) -> str:
    """Write the list of tables as JSON, ordered by name."""
    return json.dumps([asdict(info) for info in sorted(infos, key=lambda info: info.name)])


def infos_from_json(text: str) -> tuple[GeneTableInfo, ...]:
    """Read the list of tables.

    Examples
    --------
    >>> infos_from_json(infos_to_json((GeneTableInfo("HGNC", "genes", "HGNC", "", ("human",), 2, "ab"),)))[0].organisms
    ('human',)
    """
    return tuple(GeneTableInfo(**{**entry, "organisms": tuple(entry["organisms"])}) for entry in json.loads(text))
