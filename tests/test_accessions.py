"""Laws of accessions: what is found for many texts at once is what is found for each."""

from hypothesis import example, given
from hypothesis import strategies as st

from raggedatlas.model.accessions import parse_accession, parse_symbols

PIECES = [
    "ENS", "ENSG", "ENSMUSG", "00000105369", "00000105369", ".12", "_PAR_Y", "GRCh38", "mm10", "_", "___", "CD79A", "FBgn0000008", "MGI:97490",
    "SGD:", "S000000001", "YAL001C", "YAL001C-A", "HGNC:5", "LRG_1", "ERCC-00002", "NM_000059", "NR_046018.2", "ZFIN:", "ZDB-GENE-000112-47",
    "MGP_", "RGD:1", "WBGene00000001", "\n", " ", "é", "\u0661", "\uff11", "\0",
]  # fmt: skip


@given(st.lists(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=4).map("".join), max_size=8))
@example(["ENSG\u0661\u0661\u0661\u0661\u0661\u0661", "HGNC:\uff11", "GRCh38_\nA", "MGI:1\n", ""])
def test_symbols_of_many_texts_are_those_of_each(texts: list[str]) -> None:
    """`parse_symbols` gives the name of each text that `parse_accession` takes for a symbol, and nothing for accessions."""
    texts = [text.encode(errors="replace").decode() for text in texts]
    each = [parse_accession(text) for text in texts]
    assert parse_symbols(texts) == [one.name if one.namespace == "symbol" else "" for one in each]
