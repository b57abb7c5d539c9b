"""A dataset as a source: its matrices as row readers in the file's own order, its tables, and all that was kept beside."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.frames import open_frame, read_frame
from raggedatlas.formats.bundle import unpack
from raggedatlas.formats.parts import Part, Parts, PartsSource
from raggedatlas.formats.rows import BLOCK_BYTES, ENTRIES, stop_by_entries
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.contracts import NARROW, MatrixForm
from raggedatlas.model.frames import arrow_to_frame
from raggedatlas.model.records import COLUMNS, ELEMENTS, DatasetRecord
from raggedatlas.model.tables import ColumnTable, arrow_table
from raggedatlas.store.arrays import ArraySpec
from raggedatlas.store.ranges import ArrayReader, read_slice

if TYPE_CHECKING:
    import pandas as pd

PRESENT = "present/"


class Returning:
    """What a dataset was added with, read when asked for.

    Parameters
    ----------
    catalog : Catalog
        At the tip or pinned.
    records : sequence of DatasetRecord
        Its groups; the first keeps what stands beside them.
    """

    def __init__(self, catalog: Catalog, records: Sequence[DatasetRecord]) -> None:
        self._catalog, self._records = catalog, records
        self._facts: list[dict[str, Any]] = [json.loads(record.facts) for record in records]
        self._specs = [
            {path: ArraySpec.from_json(json.dumps(spec)) for path, spec in record.array_specs.items()}
            for record in records
        ]

    @cached_property
    def elements(self) -> dict[str, Any]:
        """All that is kept whole: key -> element; nobody may change them."""
        spec = self._specs[0].get(ELEMENTS)
        return {} if spec is None else unpack(self._all(spec).tobytes())

    @property
    def arrays(self) -> dict[str, dict[str, Any]]:
        """What is kept in arrays: key -> its facts."""
        return dict(self._facts[0].get("extras", {}))

    def source(self) -> PartsSource:
        """Make a source of it, as of the file that was added."""
        record, facts = self._records[0], self._facts[0]
        matrices, tables = [], {}
        for i, group in enumerate(self._records):
            shared = _Entries(self._specs[i], self._read) if "csr/indices" in self._specs[i] else None
            for layer in group.layers:
                part = self._layer(i, layer, shared)
                matrices.append(part)
                if part.info.features:
                    tables[part.info.features] = partial(self._table, f"var.{group.pointer}")
        beside = [self._beside(key, facts) for key, facts in self.arrays.items()]
        elements = {key: value for key, value in self.elements.items() if not key.startswith(PRESENT)}
        present = {key.removeprefix(PRESENT): cells for key, cells in self.elements.items() if key.startswith(PRESENT)}
        n_cells = int(facts.get("n_cells", record.n_cells))
        for part in matrices:
            cells = present.get("/".join([*part.info.key.split("/")[:2], "obs"]))
            if cells is not None and not np.array_equal(cells, np.arange(n_cells)):
                present[part.info.key] = cells
        parts = Parts(
            n_cells,
            partial(self._table, "obs"),
            tuple(matrices),
            tables,
            present=present,
            others=tuple(beside),
            elements={key: partial(_same, value) for key, value in elements.items()},
            tables={"obs": partial(self._cells, n_cells)},
        )
        return PartsSource(parts, name=record.name, uri=record.source, format=str(facts.get("format", "")))

    def _table(self, name: str) -> "pd.DataFrame":
        return arrow_to_frame(read_frame(self._catalog, self._records[0].uid, name))

    def _cells(self, n_cells: int) -> ColumnTable:
        frame = open_frame(self._catalog, self._records[0].uid, "obs")
        return arrow_table(frame.schema, n_cells, frame.chunks)

    def _layer(self, i: int, layer: str, entries: "_Entries | None") -> Part:
        record, specs = self._records[i], self._specs[i]
        fact = self._facts[i]["layers"][layer]
        if entries is not None:
            spec, shape = specs[f"csr/layers/{layer}"], (record.n_cells, record.n_features)
            rows = _GroupRows(entries, partial(self._read, spec), fact, shape)
        else:
            spec = specs[f"layers/{layer}"]
            rows = _GroupRows(None, partial(self._read, spec), fact, spec.shape)
        features = fact.get("features", _usual_features(fact["key"])) if record.layout_uid else ""
        return Part.of(fact["key"], rows, features, record.feature_space)

    def _beside(self, key: str, facts: Mapping[str, Any]) -> Part:
        specs = {
            path.rpartition("/")[2]: spec
            for path, spec in self._specs[0].items()
            if path.startswith(f"{facts['path']}/")
        }
        entries = None
        if facts["form"] != "dense":
            entries = _Entries({f"csr/{name}": specs[name] for name in ("indices", "indptr")}, self._read)
        return Part.of(key, _GroupRows(entries, partial(self._read, specs["data"]), facts, tuple(facts["shape"])))

    def _all(self, spec: ArraySpec) -> NDArray[Any]:
        return self._read(spec, 0, spec.shape[0])

    def _read(self, spec: ArraySpec, start: int, stop: int) -> NDArray[Any]:
        return read_slice(ArrayReader(self._catalog.arrays, spec), start, stop)


class _Entries:
    """The entries of a sparse group, which its layers share; the last rows are kept for the next layer."""

    def __init__(self, specs: Mapping[str, ArraySpec], read: Callable[[ArraySpec, int, int], NDArray[Any]]) -> None:
        self._specs, self._read = specs, read
        self._last: tuple[tuple[int, int], tuple[NDArray[Any], NDArray[Any] | None]] | None = None
        self.n_entries = specs["csr/indices"].shape[0]

    @cached_property
    def indptr(self) -> NDArray[np.int64]:
        """Bounds of the rows, (n_rows + 1,) int64."""
        spec = self._specs["csr/indptr"]
        return self._read(spec, 0, spec.shape[0])

    @cached_property
    def _of_file(self) -> NDArray[np.int64] | None:
        spec = self._specs.get(COLUMNS)
        return None if spec is None else np.argsort(self._read(spec, 0, spec.shape[0]))

    def rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Return the columns of some rows as the file has them, and which stored entry each one is (None for its own)."""
        from raggedatlas.store.kernels import remap_csr

        if self._last is not None and self._last[0] == (start, stop):
            return self._last[1]
        bounds = self.indptr[start : stop + 1]
        indices, order = self._read(self._specs["csr/indices"], int(bounds[0]), int(bounds[-1])), None
        if self._of_file is not None:
            pointers = bounds - bounds[0]
            places = np.arange(len(indices), dtype=np.int32 if len(indices) < 2**31 else np.int64)
            _, indices, order = remap_csr(pointers, indices, places, self._of_file, len(self._of_file))
        self._last = ((start, stop), (indices.astype(np.int32, copy=False), order))
        return self._last[1]


class _GroupRows:
    """One layer of a group, or one matrix kept beside, in the form and dtype that it had."""

    def __init__(
        self,
        entries: _Entries | None,
        values: Callable[[int, int], NDArray[Any]],
        facts: Mapping[str, Any],
        shape: tuple[int, ...],
    ) -> None:
        self._entries, self._values, self.shape = entries, values, shape
        self.form: MatrixForm = facts["form"]
        self.dtype: np.dtype[Any] = np.dtype(facts["dtype"])
        pointers, indices = facts.get("wide", NARROW)
        self.wide: tuple[bool, bool] = (pointers, indices)
        sparse = entries is not None and self.form != "dense"
        self.n_entries: int | None = entries.n_entries if sparse and entries is not None else None

    def stop(self, start: int, stop: int) -> int:
        """Return how far one step may go."""
        if self.n_entries is None:
            width = max(1, int(np.prod(self.shape[1:], dtype=object)))
            stop = min(stop, start + max(1, BLOCK_BYTES // (width * self.dtype.itemsize)))
        return stop if self._entries is None else stop_by_entries(self._entries.indptr, start, stop, ENTRIES)

    def read(self, start: int, stop: int) -> Block:
        """Read rows ``[start, stop)``."""
        if self._entries is None:
            dense = self._values(start, stop).astype(self.dtype, copy=False)
            return DenseBlock({"values": dense}) if self.form == "dense" else _sparse(dense)
        bounds = self._entries.indptr[start : stop + 1]
        values = self._values(int(bounds[0]), int(bounds[-1]))
        indices, order = self._entries.rows(start, stop)
        values = (values if order is None else values[order]).astype(self.dtype, copy=False)
        pointers = bounds - bounds[0]
        if self.form != "dense":
            return CsrBlock(pointers, indices.copy(), {"values": values}, self.shape[1])
        made = np.zeros((stop - start, self.shape[1]), self.dtype)
        made[np.repeat(np.arange(stop - start), np.diff(pointers)), indices] = values
        return DenseBlock({"values": made})

    def close(self) -> None:
        """Keep nothing."""


def _sparse(dense: NDArray[Any]) -> CsrBlock:
    rows, columns = np.nonzero(dense)
    pointers = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(dense)))])
    return CsrBlock(pointers, columns.astype(np.int32), {"values": dense[rows, columns]}, dense.shape[1])


def _usual_features(key: str) -> str:
    """Name the table of a matrix's features in datasets that were added before it was noted."""
    parts = key.split("/")
    prefix = "/".join(parts[:2]) + "/" if parts[0] == "mod" else ""
    own = key.removeprefix(prefix)
    return f"{prefix}raw/var" if own == "raw/X" else key if own.startswith("obsm/") else f"{prefix}var"


def _same(value: Any) -> Any:  # noqa: ANN401
    return value
