"""Turn one sitting of the loader benchmark into a Markdown page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compare import row, spread
from measurements import EVERY, READS, Measurement
from targets import (
    TARGETS,
    Sitting,
    add_rate,
    anonymous_mb,
    cells_per_second,
    first_seconds,
    milliseconds,
    threads,
    warm_seconds,
)

RATE_ROWS = {
    "random": "Shuffled, batch 512",
    "standard": "Standard codec, shuffled, batch 512",
    "batch": "Shuffled, other batch sizes",
    "scan": "Sequential scan, batch 512",
}
QUERY_ROWS = {
    "type": "One cell type to AnnData, union of the genes",
    "genes": "50 genes x all cells",
    "genes_csc": "50 genes x all cells, with column-sorted copies",
}
KINDS = ("indices", "values", "indptr", "other", "csc", "whole")


def target_table(sitting: Sitting) -> list[str]:
    """Every goal with its figure and whether it is reached."""
    rows = [row(["goal", "figure", "at least", "aim", "verdict"]), row(["---"] * 5)]
    for target in TARGETS:
        value = target.value(sitting)
        goal = "at most" if target.less else "at least"
        unit = "x" if target.unit == "x" else f" {target.unit}".rstrip()
        shown = "-" if value is None else f"{value:,.3g}{unit}" if value < 1000 else f"{value:,.0f}{unit}"
        aim = "-" if target.aim is None else f"{target.aim:g}{unit}"
        rows.append(row([target.what, shown, f"{goal} {target.least:g}{unit}", aim, target.verdict(value)]))
    return rows


def rate_table(sitting: Sitting, chosen: Sequence[Measurement]) -> list[str]:
    """Cells a second of every loader and reader."""
    heads = ["shuffled and ordered reads", "order", "cells/s", "range", "cores used", "per core"]
    heads += ["first batch, ms", "anon MB", "ready at", "threads", "at most"]
    rows = [row(heads), row(["---"] * len(heads))]
    for measurement in chosen:
        figures = sitting.figures.get(measurement.key, [])
        if not figures or measurement.row not in RATE_ROWS:
            continue
        rates = sitting.values(measurement.key, cells_per_second)
        used = statistics.median(figure["extra"]["cores"] for figure in figures)
        middle = statistics.median(rates)
        rows.append(
            row(
                [
                    f"{measurement.label} ({measurement.row})",
                    measurement.order,
                    f"{middle:,.0f}",
                    f"{min(rates):,.0f}-{max(rates):,.0f} ({len(rates)})",
                    f"{used:.2f}",
                    f"{middle / used:,.0f}" if used else "-",
                    f"{statistics.median(f['extra']['first_batch_seconds'] for f in figures) * 1e3:,.1f}",
                    spread(sitting.values(measurement.key, anonymous_mb), 0),
                    f"{statistics.median(f['extra']['ready_anon_mb'] for f in figures):.0f}",
                    f"{sitting.median(measurement.key, threads):.0f}",
                    f"{max(figure['peak_threads'] for figure in figures)}",
                ]
            )
        )
    return rows


def add_table(sitting: Sitting, chosen: Sequence[Measurement]) -> list[str]:
    """How fast files are taken in."""
    rows = [row(["add from h5ad", "cells/s", "with snapshot", "seconds", "anon MB"]), row(["---"] * 5)]
    for measurement in chosen:
        if measurement.op != "add" or measurement.key not in sitting.figures:
            continue
        values = _of(sitting, measurement)
        rows.append(
            row(
                [
                    measurement.label,
                    spread(values(add_rate), 0),
                    spread(values(cells_per_second), 0),
                    spread(values(first_seconds), 1),
                    spread(values(anonymous_mb), 0),
                ]
            )
        )
    return rows


def query_table(sitting: Sitting, chosen: Sequence[Measurement]) -> list[str]:
    """Seconds of queries, of single rows and of column-sorted copies."""
    rows = [row(["query", "system", "first, s", "warm, s", "anon MB"]), row(["---"] * 5)]
    for measurement in chosen:
        if measurement.row not in QUERY_ROWS or measurement.key not in sitting.figures:
            continue
        values = _of(sitting, measurement)
        what = "write column-sorted copies" if measurement.op == "add_csc" else QUERY_ROWS[measurement.row]
        cells = [spread(values(first_seconds)), spread(values(warm_seconds)), spread(values(anonymous_mb), 0)]
        rows.append(row([what, measurement.label, *cells]))
    for measurement in chosen:
        if measurement.op == "row" and measurement.key in sitting.figures:
            values = _of(sitting, measurement)
            shown = spread([v / 1e3 for v in values(milliseconds)], 6)
            rows.append(row(["one random row", measurement.label, "-", shown, spread(values(anonymous_mb), 0)]))
    return rows


def _of(sitting: Sitting, measurement: Measurement) -> Callable[[Callable[[dict[str, Any]], float]], list[float]]:
    return lambda of: sitting.values(measurement.key, of)


def size_table(sitting: Sitting) -> list[str]:
    """Bytes per non-zero of every store."""
    rows = [row(["bytes per non-zero", *KINDS]), row(["---"] * (len(KINDS) + 1))]
    for store, held in sitting.sizes.items():
        rows.append(row([store, *(f"{held[kind]:.3f}" if held.get(kind) else "-" for kind in KINDS)]))
    return rows


def disagreements(sitting: Sitting, totals: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the measurements whose answers differ: complete epochs from the data, queries from each other."""
    found = []
    for measurement in READS:
        for figure in sitting.figures.get(measurement.key, []):
            cells, nnz = totals.get(measurement.store, totals[""])
            whole = figure["extra"].get("whole_epochs", 0)
            if measurement.row in RATE_ROWS and figure["cells"] == whole * cells and figure["nnz"] != whole * nnz:
                found.append(f"- {measurement.key}: {figure['nnz']:,} non-zeros in {whole} epochs of {nnz:,}")
    for group in ("type", "genes", "genes_csc"):
        answers: dict[str, list[str]] = {}
        for measurement in READS:
            for figure in sitting.figures.get(measurement.key, []) if measurement.row == group else []:
                said = ", ".join(f"{k} {v:,.0f}" for k, v in sorted(figure["answer"].items()))
                answers.setdefault(said, []).append(measurement.system)
        if len(answers) > 1:
            found += [f"- {group}: {'/'.join(sorted(set(who)))}: {said}" for said, who in answers.items()]
    return list(dict.fromkeys(found))


def page(sitting: Sitting, heading: Sequence[str], notes: Sequence[Sequence[str]]) -> str:
    """Return all tables under a heading, with notes."""
    chosen = [m for m in EVERY if m.key in sitting.figures]
    tables = [
        target_table(sitting),
        rate_table(sitting, chosen),
        add_table(sitting, chosen),
        query_table(sitting, chosen),
        size_table(sitting),
    ]
    parts = [list(heading), *(table for table in tables if len(table) > 2), *(list(note) for note in notes if note)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"
