"""Draw one sitting of the loader benchmark: cells a second and memory of every system, as a PNG.

``python benchmarks/plot.py RESULT.json OUT.png``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measurements import RANDOM, STANDARD, Measurement
from targets import anonymous_mb, cells_per_second

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "ours": "#0b6e4f",
    "fully random": "#6c8ebf",
    "block-shuffled": "#d8a657",
    "in memory": "#b0b0b0",
}
LEGEND = {
    "ours": "raggedatlas, fully random",
    "fully random": "fully random",
    "block-shuffled": "block-shuffled: runs of neighbours stay together",
    "in memory": "fully random, the whole matrix already in memory",
}


def draw(source: Path, target: Path) -> bool:
    """Draw the figures of a JSON file; False where matplotlib is missing or nothing was measured."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    result = json.loads(source.read_text())
    bars = sorted(_bars(result.get("figures", {})), key=lambda bar: bar[1])
    if not bars:
        return False
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(bars)), dpi=150, layout="constrained")
    rates, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2.4, 1))
    _draw_rates(rates, bars)
    _draw_memory(memory, bars)
    figure.suptitle(_title(result), x=0.01, ha="left", fontsize=11, fontweight="bold")
    seen = [kind for kind in COLOURS if any(bar[0][1] == kind for bar in bars)]
    handles = [rates.barh([0], [0], color=COLOURS[kind], label=LEGEND[kind]) for kind in seen]
    figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False, fontsize=9)
    figure.savefig(target)
    return True


Bar = tuple[tuple[str, str], float, tuple[float, float], float]
"""(label, kind), median rate, range of rates, median memory."""


def _bars(figures: Mapping[str, list[dict[str, Any]]]) -> list[Bar]:
    found: list[Bar] = []
    for measurement in (*RANDOM, *STANDARD):
        if taken := figures.get(measurement.key):
            rates = [cells_per_second(figure) for figure in taken]
            held = statistics.median(anonymous_mb(figure) for figure in taken)
            named = (measurement.label, _kind(measurement))
            found.append((named, statistics.median(rates), (min(rates), max(rates)), held))
    return found


def _kind(measurement: Measurement) -> str:
    if measurement.system == "raggedatlas":
        return "ours"
    return "in memory" if measurement.system == "scipy" else measurement.order


def _draw_rates(axes: Axes, bars: Sequence[Bar]) -> None:
    middles = [bar[1] for bar in bars]
    lows = [bar[1] - bar[2][0] for bar in bars]
    highs = [bar[2][1] - bar[1] for bar in bars]
    axes.barh(
        range(len(bars)),
        middles,
        xerr=[lows, highs],
        color=[COLOURS[bar[0][1]] for bar in bars],
        error_kw={"ecolor": "#333333", "elinewidth": 1, "capsize": 2.5},
        height=0.7,
    )
    axes.set_yticks(range(len(bars)), [bar[0][0] for bar in bars], fontsize=9)
    for label, bar in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if bar[0][1] == "ours" else "normal")
    widest = max(bar[2][1] for bar in bars)
    for place, bar in enumerate(bars):
        text = f"{bar[1] / 1e3:,.1f}k" if bar[1] < 1e5 else f"{bar[1] / 1e3:,.0f}k"
        axes.text(bar[2][1] + widest * 0.012, place, text, va="center", fontsize=9)
    axes.set_xlim(0, widest * 1.13)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:,.0f}k" if value else "0")
    axes.set_xlabel("cells per second: median, whiskers from lowest to highest", fontsize=9)
    _tidy(axes)


def _draw_memory(axes: Axes, bars: Sequence[Bar]) -> None:
    from matplotlib.ticker import NullLocator

    held = [bar[3] for bar in bars]
    axes.barh(range(len(bars)), held, color=[COLOURS[bar[0][1]] for bar in bars], height=0.7)
    axes.set_xscale("log")
    axes.set_xlim(min(held) / 2, max(held) * 5)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: _amount(value))
    for place, value in enumerate(held):
        axes.text(value * 1.1, place, _amount(value), va="center", fontsize=9)
    axes.set_xlabel("peak memory, log scale", fontsize=9)
    _tidy(axes)


def _amount(megabytes: float) -> str:
    if megabytes < 1000:
        return f"{megabytes:.0f} MB"
    return f"{megabytes / 1000:.0f} GB" if megabytes % 1000 < 1 else f"{megabytes / 1024:.1f} GB"


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def _title(result: Mapping[str, Any]) -> str:
    data = result["data"]
    cells, nnz = sum(data["cells"]), sum(data["nnz"])
    where = f"{result['machine']['cores']} cores" if "machine" in result else ""
    return (
        f"Training batches of 512 cells from {cells:,} cells in {len(data['files'])} ragged datasets "
        f"({nnz / cells:,.0f} non-zeros a cell), {where}"
    )


def main() -> None:
    """Draw one JSON file."""
    if not draw(Path(sys.argv[1]), Path(sys.argv[2])):
        sys.exit("nothing drawn: matplotlib is missing, or the file holds no shuffled reads")


if __name__ == "__main__":
    main()
