"""What a served page asks for beyond data: comparisons, means, neighbours of a selection, and labels that are written into the atlas."""

import math
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.atlas import RaggedAtlas
from raggedatlas.errors import ArgumentError, QueryError, ReadOnlyError
from raggedatlas.query.compare import CompareOptions
from raggedatlas.query.neighbors import exact_neighbors
from raggedatlas.wings.viewer.means import compute_means, groups_of
from raggedatlas.wings.viewer.scene import Scene, match_ids
from raggedatlas.wings.viewer.sources import QueryCells

MOST_ASKED = 500
"""Cells of a larger selection whose neighbours are looked for; drawn from it by a fixed seed."""

MOST_SETS = 64
"""Sets of points of one request, as many as a page keeps by name."""

_MOST_NEIGHBORS = 200
_MOST_GENES = 200
_LONGEST = 256


def pack_rows(chosen: NDArray[np.bool_]) -> str:
    """Encode a set of points as the page does: one bit each, the lowest first, in base64.

    Examples
    --------
    >>> pack_rows(np.array([True, False, False, True]))
    'CQ=='
    """
    return b64encode(np.packbits(chosen, bitorder="little").tobytes()).decode("ascii")


@dataclass(frozen=True)
class Analysis:
    """Answers to the requests of one page, each checked against the cells that it shows."""

    scene: Scene
    # whether labels may be written, for which the cells must be those of a snapshot of an atlas
    allow_annotate: bool = False

    def __post_init__(self) -> None:
        """Check that labels have an atlas to go to."""
        if self.allow_annotate and (self._cells is None or self._cells.query.catalog.snapshot is None):
            raise QueryError(
                "allow_annotate=True writes labels into an atlas, and these cells are not of a snapshot of one."
            )

    def respond(self, path: str, body: Mapping[str, Any]) -> dict[str, Any] | None:
        """Answer a request; None if there is no such path.

        Raises `QueryError` or `ArgumentError` for a page of other cells and what cannot be answered, and
        `ReadOnlyError` for a label where none may be written.
        """
        answers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "compare": self._compare,
            "means": self._means,
            "neighbors": self._neighbors,
            "annotate": self._annotate,
        }
        if path not in answers:
            return None
        if body.get("scene") != self.scene.key:
            raise QueryError("This page shows other cells than its server; open the address that the server printed.")
        return answers[path](body)

    @property
    def _cells(self) -> QueryCells | None:
        return self.scene.origin if isinstance(self.scene.origin, QueryCells) else None

    def _rows(self, body: Mapping[str, Any], name: str) -> NDArray[np.int64]:
        """Decode a set of points."""
        try:
            packed = b64decode(body.get(name, ""), validate=True)
        except (Base64Error, TypeError, ValueError):
            packed = b""
        if len(packed) != -(-self.scene.n // 8):
            raise ArgumentError(f"{name} is no set of the {self.scene.n:,} points of this page.")
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=self.scene.n, bitorder="little")
        return np.flatnonzero(bits).astype(np.int64)

    def _ids(self, body: Mapping[str, Any], name: str) -> pa.Array:
        return self.scene.ids.take(pa.array(self._rows(body, name)))

    def _compare(self, body: Mapping[str, Any]) -> dict[str, Any]:
        ranked = getattr(self.scene.genes, "compare", None)
        if ranked is None:
            raise QueryError("This page has no genes of an atlas or a file to compare.")
        options = CompareOptions(_text(body, "method"))
        table = ranked(self._ids(body, "group"), self._ids(body, "reference"), options)
        columns = {name: table[name].tolist() for name in table.columns if name != "symbol"}
        if "symbol" in table:
            columns = {"names": table["symbol"].tolist(), "ids": columns.pop("names"), **columns}
        # JSON has no NaN.
        plain = {
            name: [None if isinstance(v, float) and not math.isfinite(v) else v for v in values]
            for name, values in columns.items()
        }
        return {**table.attrs["compare"], "table": plain}

    def _means(self, body: Mapping[str, Any]) -> dict[str, Any]:
        genes, sets = body.get("genes"), body.get("sets")
        if not isinstance(genes, list) or not 1 <= len(genes) <= _MOST_GENES:
            raise ArgumentError(f"genes is a list of 1 to {_MOST_GENES} names.")
        if sets is None:
            groups = groups_of(self.scene.column(str(body.get("by"))))
        elif isinstance(sets, list) and len(sets) <= MOST_SETS and all(isinstance(one, dict) for one in sets):
            groups = [(str(one.get("name")), self._rows(one, "rows")) for one in sets]
        else:
            raise ArgumentError(f"sets is a list of at most {MOST_SETS} names and sets of points.")
        return compute_means(self.scene.read_genes([str(name) for name in genes]), groups)

    def _neighbors(self, body: Mapping[str, Any]) -> dict[str, Any]:
        origin, name, k = self.scene.origin, _text(body, "embedding"), body.get("k")
        if origin is None or name not in origin.embeddings():
            raise QueryError(f"There is no embedding {name!r} to find neighbours by.")
        if not isinstance(k, int) or not 1 <= k <= _MOST_NEIGHBORS:
            raise ArgumentError(f"k={k!r} neighbours; ask for 1 to {_MOST_NEIGHBORS}.")
        # Of an atlas every cell of the snapshot is compared; a page may show a query or a sample of them.
        atlas = self._cells
        ids, vectors, datasets = (*origin.coordinates(name), None) if atlas is None else atlas.snapshot_vectors(name)
        row_of = match_ids(self.scene.ids, ids)
        point_of = np.full(len(ids), -1)
        point_of[row_of[row_of >= 0]] = np.flatnonzero(row_of >= 0)
        group, among = (row_of[self._rows(body, side)] for side in ("group", "among"))
        group, among = group[group >= 0], among[among >= 0]
        if datasets is not None:
            outside = point_of < 0
            if body.get("other_datasets") is True:
                outside &= ~np.isin(datasets, np.unique(datasets[group]))
            among = np.concatenate([among, np.flatnonzero(outside)])
        group, among = (np.sort(rows[np.isfinite(vectors[rows]).all(axis=1)]) for rows in (group, among))
        if not len(group) or not len(among):
            raise QueryError(f"No cell of the selection, or none elsewhere, has a vector in {name}.")
        asked = group
        if len(group) > MOST_ASKED:
            asked = np.sort(np.random.default_rng(0).choice(group, MOST_ASKED, replace=False))
        near = exact_neighbors(vectors.__getitem__, len(vectors), vectors[asked].astype(np.float64), k, among=among)
        # A cell may be near several of the selected ones; the least of its distances counts.
        least = np.full(len(vectors), np.inf)
        np.minimum.at(least, near.rows[near.rows >= 0], near.distances[near.rows >= 0])
        rows = np.flatnonzero(np.isfinite(least))
        rows = rows[np.argsort(least[rows], kind="stable")]
        distances = least[rows]
        chosen = np.zeros(self.scene.n, bool)
        inside = point_of[rows] >= 0
        chosen[point_of[rows[inside]]] = True
        answer: dict[str, Any] = {
            "rows": pack_rows(chosen),
            "n_asked": len(asked),
            "n_with_vector": len(group),
            "elsewhere": None,
        }
        if datasets is not None:
            answer["elsewhere"] = {
                "uid": ids.take(pa.array(rows[~inside])).to_pylist(),
                "dataset": datasets[rows[~inside]].tolist(),
                "distance": distances[~inside].tolist(),
            }
        return answer

    def _annotate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        import anndata as ad
        import pandas as pd

        cells = self._cells
        if not self.allow_annotate or cells is None:
            raise ReadOnlyError(
                "This server writes nothing; start it with allow_annotate=True, or save the labels as a file."
            )
        column, label, conflict = _text(body, "column"), _text(body, "label"), body.get("on_conflict", "error")
        if conflict not in ("error", "replace", "keep"):
            raise ArgumentError(f"on_conflict={conflict!r}; it is 'error', 'replace' or 'keep'.")
        catalog = cells.query.catalog
        place = catalog.location
        atlas = RaggedAtlas.open(place.uri, storage_options=place.storage_options)
        shown, newest = getattr(catalog.snapshot, "version", None), atlas.list_versions()[-1].version
        if shown != newest:
            raise QueryError(
                f"This page shows snapshot {shown}, and the atlas has snapshot {newest}; start the server again, then label."
            )
        uids = self._ids(body, "group").to_pylist()
        if not uids:
            raise QueryError("No cell is selected, so there is none to label.")
        # As AnnData, because `annotate` reads from `uns` what the labels were derived from.
        origin = {"uri": place.uri, "snapshot": shown, "summary": cells.query.spec.describe()}
        labels = ad.AnnData(obs=pd.DataFrame({column: [label] * len(uids)}, index=uids), uns={"atlas": origin})
        report = atlas.annotate(labels, f"{column}: {label}", columns=[column], on_conflict=conflict)
        return {"name": report.name, "n": len(uids), "status": report.status}


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value.strip()) <= _LONGEST:
        raise ArgumentError(f"{name} is a text of at most {_LONGEST} characters, not {str(value)[:40]!r}.")
    return value.strip()
