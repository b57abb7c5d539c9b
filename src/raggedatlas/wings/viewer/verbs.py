"""Looking at an embedding: a page for a browser, a picture, or files for other viewers."""

import os
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from raggedatlas.errors import QueryError
from raggedatlas.model.arguments import checked
from raggedatlas.model.choices import refuse_unused
from raggedatlas.model.wings import answer
from raggedatlas.store.copies import local_target
from raggedatlas.store.location import Address, AnyPath, as_path
from raggedatlas.wings.viewer.exports import write_parquet, write_vitessce
from raggedatlas.wings.viewer.page import write_page
from raggedatlas.wings.viewer.scene import Look, Scene
from raggedatlas.wings.viewer.server import ViewerServer
from raggedatlas.wings.viewer.sources import (
    Cells,
    KnownCells,
    Results,
    is_cells_path,
    open_cells,
    scene_of_embedding,
    scene_of_old_results,
    scene_of_results,
)
from raggedatlas.wings.viewer.static_plot import write_picture

Embedding = Results | Scene | Cells
"""Results, the folder of some, the name of an embedding, a scene that is made already, or the cells themselves: an atlas, a
snapshot, a query, a file or an object, of which the first of `MAPS` is shown."""


class ViewOptions(TypedDict, total=False):
    """Keyword arguments of `visualize` and `view`, all optional.

    Attributes
    ----------
    title, color, columns, max_points, seed, theme, axes, address
        As in `Look`; a title of None takes the atlas' name.
    colors : mapping of str to mapping of str to str
        As in `Look`; else the colours that the atlas' files name, else a palette that people with any kind of colour vision can read.
    layer : str
        Which layer the values of genes are read from; None takes the layer of the query, else the usual one.
    """

    title: str | None
    color: str | None
    colors: Mapping[str, Mapping[str, str]]
    columns: Sequence[str] | None
    max_points: int
    seed: int
    theme: str | None
    axes: tuple[int, int] | None
    layer: str | None
    address: str | None


@checked
def visualize(
    embedding: Embedding,
    cells: Cells | None = None,
    *,
    path: Address,
    genes: Sequence[str] = (),
    overwrite: bool = False,
    **choices: Unpack[ViewOptions],
) -> AnyPath:
    """Write a map of cells to a file; its ending says which.

    Parameters
    ----------
    embedding : ResultDataset, InferenceDataSet, RaggedAtlas, AtlasView, Query, AnnData, MuData, path or str
        Coordinates of each cell: results, their folder, or the name of an embedding of the atlas or file (``"X_umap"``, ``"umap"``).
        Alone, the cells themselves: their map is the first embedding called umap, tsne, spatial or pca, else any.
    cells : Query, AtlasView, RaggedAtlas, path, AnnData, MuData or None
        Which cells, joined with the embedding by id, with their metadata and genes: of an atlas by uid, of a file or object by the names
        in `obs`. Only ``.npy`` results go without.
    path : str or path
        ``.html`` is one page that needs no network; ``.png`` a picture; ``.parquet`` is opened by Embedding Atlas; and
        ``.vitessce`` a folder that Vitessce opens.
    genes : sequence of str
        Genes whose values go into it, by symbol, id or uid.
    overwrite : bool
        Whether what is there is replaced.
    **choices
        See `ViewOptions`.

    Returns
    -------
    Path
        What was written.

    Raises
    ------
    QueryError
        For another ending; for Lance results without cells; for ids that match no cell; for an address that
        is none.
    NotFoundError, FeatureError
        For an embedding, column or gene that is not there.
    DuplicateError, StoreError
        If the path is there, or cannot be written.

    References
    ----------
    Hyrax, Lance Storage Layer Design Document, Step 4, Visualize Verb.

    Examples
    --------
    >>> visualize("umap", view, path="cells.html", color="cell_type", genes=["CD3D"])  # doctest: +SKIP
    >>> visualize("X_umap", "pbmc.h5ad", path="pbmc.html", color="cell_type")  # doctest: +SKIP
    >>> visualize(
    ...     "results/20260101-120000-umap-AbCd", view.query().where(tissue="lung"), path="lung.png"
    ... )  # doctest: +SKIP
    """
    target = as_path(path)
    # First, so that an unknown ending is refused before cells are read.
    if target.suffix not in WRITERS:
        raise QueryError(
            f"{target} ends in {target.suffix!r}; what can be written ends in one of {', '.join(WRITERS)}."
        )
    writer = WRITERS[target.suffix]
    unused = {name: choices.get(name) is not None for name in _UNUSED.get(target.suffix, ())}
    refuse_unused("visualize", f"on a {target.suffix} file", **unused)
    plain = not genes and choices.get("color") is None
    refuse_unused("visualize", "without genes=... or color=...", layer=plain and choices.get("layer") is not None)
    with local_target(target, overwrite=overwrite) as local:
        writer(make_view(embedding, cells, **choices), local, genes=list(genes), overwrite=overwrite)
    return target


@checked
def view(
    embedding: Embedding,
    cells: Cells | None = None,
    *,
    port: int = 0,
    browser: bool = True,
    allow_annotate: bool = False,
    **choices: Unpack[ViewOptions],
) -> ViewerServer:
    """Serve a map of cells on this machine, with every gene of the atlas or file read when it is asked for.

    Parameters
    ----------
    embedding : ResultDataset, RaggedAtlas, AtlasView, Query, path, str, ...
        As for `visualize`.
    cells : Query, AtlasView, RaggedAtlas, path, AnnData, MuData or None
        As for `visualize`.
    port : int
        Port on loopback; 0 takes a free one.
    browser : bool
        Whether to open the page in the browser.
    allow_annotate : bool
        Whether labels given on the page are written into the atlas by `annotate`. Without, the page saves them as a file.
    **choices
        See `ViewOptions`.

    Returns
    -------
    ViewerServer
        Runs until it is closed, or the process ends; ``url`` is the address, which holds a secret.

    Raises
    ------
    QueryError, NotFoundError, FeatureError
        As `visualize`.
    StoreError
        If the port is taken.

    Examples
    --------
    >>> with view(atlas) as server:  # doctest: +SKIP
    ...     server.wait()
    """
    refuse_unused("view", "on a page that is served", address=choices.get("address") is not None)
    server = ViewerServer(make_view(embedding, cells, **choices), port, allow_annotate=allow_annotate)
    if browser:
        webbrowser.open(server.url)
    return server


@checked
def make_view(embedding: Embedding, cells: Cells | None = None, **choices: Unpack[ViewOptions]) -> Scene:
    """Join an embedding with the cells of an atlas or a file, as `visualize` and `view` show it; arguments are those of `visualize`."""
    if isinstance(embedding, Scene):
        if cells is not None or choices:
            raise QueryError(
                "A scene that is made already takes neither cells nor choices; give them where it is made."
            )
        return embedding
    # Whether it is cells that are to be shown, and not results or the name of an embedding.
    if isinstance(embedding, str | os.PathLike):
        alone = cells is None and is_cells_path(embedding)
    else:
        alone = cells is None and not isinstance(embedding, Results)
    given: Any = embedding if alone else cells
    known = None if given is None else open_cells(given)
    # None means not given, so that `Look` has the defaults; `layer` is no part of the look.
    given = {name: value for name, value in choices.items() if value is not None and name != "layer"}
    unknown = sorted(set(given) - set(ViewOptions.__annotations__))
    if unknown:
        raise QueryError(f"There is no choice {unknown[0]!r}; there are {sorted(ViewOptions.__annotations__)}.")
    if given.get("theme", "light") not in {"light", "dark"}:
        raise QueryError(f"theme={given['theme']!r}; it is 'light' or 'dark', or None to follow the reader's system.")
    if "title" not in given:
        place = str(getattr(embedding, "data_location", embedding)) if known is None else known.place
        name = Path(place.rstrip("/")).name
        for ending in (".atlas", ".h5ad", ".h5mu", ".h5", ".zarr", ".cxg"):
            name = name.removesuffix(ending)
        given["title"] = name or "Cells"
    look = Look(**given)
    layer = choices.get("layer")
    if known is None and layer is not None:
        raise QueryError(
            f"layer={layer!r} says which values of genes are shown; name an atlas or file to read them from."
        )
    if known is not None and alone:
        return scene_of_embedding(None, known, look, layer)
    results = _results(embedding, known)
    if results is None:
        if known is None:
            raise QueryError(
                f"{embedding!s:.200} is no folder of results, no atlas and no file; to show an embedding, name the atlas or the file too."
            )
        return scene_of_embedding(str(embedding), known, look, layer)
    if known is not None:
        return scene_of_results(results, known, look, layer)
    if hasattr(results, "visualize"):
        # Lance results have no metadata of their own; this raises, with a message that names the alternatives.
        results.visualize()
    return scene_of_old_results(results, look)


def _results(embedding: Any, cells: KnownCells | None) -> Results | None:  # noqa: ANN401
    """Open the results in a folder; None if a name is not a folder, or is an embedding of the cells."""
    if isinstance(embedding, Results):
        return embedding
    place = as_path(embedding)
    if isinstance(place, Path) and not place.is_dir():
        return None
    # A text that is also a folder means the embedding; a `Path` always means the folder.
    if cells is not None and isinstance(embedding, str) and embedding in cells.embeddings():
        return None
    found: Results = answer("load_results_dataset")({}, embedding)
    return found


WRITERS: dict[str, Callable[..., Path]] = {
    ".html": write_page,
    ".png": write_picture,
    ".parquet": write_parquet,
    ".vitessce": write_vitessce,
}


_UNUSED = {
    ".html": ("address",),
    ".png": ("address", "columns"),
    ".parquet": ("address", "title", "theme", "colors"),
    ".vitessce": ("theme",),
}
"""Choices that have no effect on a kind of file."""
