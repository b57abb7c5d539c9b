"""A still picture of a scene, for scripts and papers; needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import ArgumentError, MissingExtraError
from raggedatlas.formats.output_files import written_aside
from raggedatlas.wings.viewer.palette import MISSING, category_colors
from raggedatlas.wings.viewer.scene import Scene

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INCHES = (8.0, 5.6)
_DPI = 200
_INK, _MUTED, _DARK = "#1c1d22", "#676a75", "#14151a"
_MOST_NAMED = 36
_ROWS = 18


def write_picture(scene: Scene, path: Path, *, genes: Sequence[str] = (), overwrite: bool = False) -> Path:
    """Draw a scene into a PNG, coloured by its first colour; `genes` must be empty: a picture shows one gene, which is its colour."""
    if genes:
        raise ArgumentError(f"A picture shows one gene: color={genes[0]!r}, without genes=...")
    with written_aside(path, overwrite=overwrite) as new:
        figure = draw(scene)
        # Matplotlib's version would make the file differ from one installation to the next.
        figure.savefig(new, dpi=_DPI, format="png", facecolor=figure.get_facecolor(), metadata={"Software": None})
    return path


def draw(scene: Scene) -> "Figure":
    """Draw a scene as a matplotlib figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("Pictures need matplotlib: pip install 'raggedatlas[plot]'.") from error
    dark = scene.look.theme == "dark"
    ink = "#eceef3" if dark else _INK
    # Not by `pyplot`, which keeps figures in a global list and may look for a display.
    figure = Figure(figsize=_INCHES, facecolor=_DARK if dark else "white", layout="constrained")
    axes = figure.add_subplot()
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_axis_off()
    axes.set_title(scene.look.title, loc="left", color=ink, fontsize=12, fontweight="bold")
    name = scene.colored_by()
    column = next((c for c in scene.columns if c.name == name and c.kind != "text"), None)
    if column is not None and column.kind == "category":
        from matplotlib.lines import Line2D

        labels = column.values.dictionary.to_pylist()
        # The last colour is for missing values, whose code is the number of labels.
        palette = np.array([*category_colors(labels, column.colors), MISSING])
        codes = column.values.indices.fill_null(len(labels)).to_numpy(zero_copy_only=False)
        _dots(axes, scene, np.arange(scene.n), palette[codes])
        handles = [
            Line2D([], [], marker="o", linestyle="", markersize=6, color=color, label=_short(label))
            for label, color in zip(labels[:_MOST_NAMED], palette, strict=False)
        ]
        if len(labels) > _MOST_NAMED:
            handles.append(Line2D([], [], linestyle="", label=f"and {len(labels) - _MOST_NAMED} more"))
        legend = axes.legend(
            handles=handles,
            title=column.name,
            loc="center left",
            bbox_to_anchor=(1.01, 0.5),
            frameon=False,
            fontsize=8.5,
            labelcolor=ink,
            ncols=1 + (len(handles) - 1) // _ROWS,
            handletextpad=0.2,
            alignment="left",
        )
        legend.get_title().set_color(ink)
        legend.get_title().set_fontweight("bold")
    elif name is not None:
        values = scene.gene(name) if column is None else column.values.to_numpy(zero_copy_only=False)
        _draw_numbers(figure, axes, scene, values, name, ink)
    else:
        _dots(axes, scene, np.arange(scene.n), "#3d6fb6")
    shown = f"{scene.n:,} of {scene.n_total:,} cells" if scene.n < scene.n_total else f"{scene.n:,} cells"
    axes.text(0, -0.01, shown, transform=axes.transAxes, color=_MUTED, fontsize=8, va="top")
    return figure


def _dots(axes: "Axes", scene: Scene, rows: NDArray[Any], colors: Any, **more: Any) -> Any:  # noqa: ANN401
    size = float(np.clip(12_000 / max(scene.n, 1), 0.15, 12))
    places = scene.coordinates[rows]
    return axes.scatter(places[:, 0], places[:, 1], s=size, c=colors, linewidths=0, rasterized=True, **more)


def _short(label: str) -> str:
    # Text between two dollar signs would be typeset as a formula.
    return (label if len(label) <= 32 else f"{label[:31]}…").replace("$", r"\$") or "(empty)"


def _draw_numbers(figure: "Figure", axes: "Axes", scene: Scene, values: NDArray[Any], name: str, ink: str) -> None:
    known = np.isfinite(values)
    # Missing values are drawn first and large values last, so that these are not covered.
    _dots(axes, scene, np.flatnonzero(~known), MISSING)
    if not known.any():
        return
    rows = np.flatnonzero(known)
    rows = rows[np.argsort(values[rows], kind="stable")]
    low, high = np.quantile(values[rows], [0.005, 0.995])
    drawn = _dots(axes, scene, rows, values[rows], cmap="viridis", vmin=low, vmax=high if high > low else low + 1)
    bar = figure.colorbar(drawn, ax=axes, shrink=0.6, aspect=24, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.set_title(_short(name), loc="left", color=ink, fontsize=9, fontweight="bold")
    bar.ax.tick_params(colors=ink, labelsize=8, length=0)
