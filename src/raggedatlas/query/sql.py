"""SQL on a snapshot, answered by DuckDB: views over its tables, and the values of features as the table function `expression`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads

from raggedatlas.catalog.assets import dataset_rows, read_results
from raggedatlas.catalog.catalog import CELLS, Catalog
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.identity import GENE_SPACE
from raggedatlas.catalog.versions import registry_tables
from raggedatlas.errors import AtlasError, MissingExtraError, QueryError
from raggedatlas.model.assets import ResultRecord
from raggedatlas.query.cells import DATASET_UID, cell_columns
from raggedatlas.query.query import Query
from raggedatlas.query.spec import QuerySpec
from raggedatlas.store.filters import Columns
from raggedatlas.store.sql import create_table, create_view

if TYPE_CHECKING:
    import duckdb

VALUES, ROWS = 1 << 20, 1 << 16
"""Values of features, and rows of the cells, that are read at once."""

DATASET_NAME = "dataset name"
"""What stands for the names of datasets among the stored columns, none of which can have it."""

EXPRESSION = "expression"
RESULTS = "results_"

_OPTIONS = {
    # A statement may come from somebody else: it reads the snapshot and nothing else of this machine.
    "enable_external_access": "false",
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}
_HELP = (
    "expression(features := ['CD79A', 'LYZ'], layer := 'counts', space := 'gene_expression', cells := 'n_genes > 500')"
)
_ARGUMENTS = ("features", "layer", "space", "cells")
_DATASETS = pa.schema(
    [
        (name, pa.int64() if name == "n_cells" else pa.string())
        for name in ("uid", "name", "n_cells", "spaces", "layers", "n_features", "source", "linked", "created_at")
    ]
)
_COLUMN = re.compile(r"\bc\d+\b")


def run_sql(catalog: Catalog, statement: str) -> pa.RecordBatchReader:
    """Answer a statement on the snapshot to which `catalog` is pinned; see `AtlasView.sql`.

    Rows are computed as they are read, so that `QueryError` for what DuckDB refuses may come from the reader too.
    """
    duckdb = _duckdb()
    # DuckDB runs on threads of its own and closes the connection with the last reader.
    connection, failed = duckdb.connect(":memory:", config=_OPTIONS), list[AtlasError]()
    with _explained(statement, failed):
        found = connection.extract_statements(statement)
        if len(found) != 1 or found[0].type not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
            raise QueryError(
                f"sql() answers one statement that reads, such as SELECT, and not {statement!r}; changes are made by annotate(), delete_cells() "
                "and the like, outside of SQL."
            )
        text = _Views(catalog, connection, failed).define(statement)
        connection.execute("SET lock_configuration = true")
        reader = pa.RecordBatchReader.from_stream(connection.sql(text))

    def rows() -> Iterator[pa.RecordBatch]:
        with _explained(statement, failed):
            yield from reader
        connection.close()

    return pa.RecordBatchReader.from_batches(reader.schema, rows())


def _duckdb() -> Any:  # noqa: ANN401 - a module
    try:
        import duckdb
    except ImportError:
        raise MissingExtraError("SQL is answered by DuckDB; install it with: pip install 'raggedatlas[sql]'.") from None
    return duckdb


@contextmanager
def _explained(statement: str, failed: Sequence[AtlasError]) -> Iterator[None]:
    """Raise errors of DuckDB, which come from Arrow while rows are read, as ours; of those that the views note in `failed`, the first."""
    duckdb = _duckdb()
    try:
        yield
    except AtlasError:
        # Some of ours are builtin errors, too.
        raise
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if failed:
            raise failed[0] from None
        if not isinstance(error, duckdb.PermissionException):
            raise QueryError(f"DuckDB does not answer {statement!r}: {_line(error)}") from error
        raise QueryError(
            f"The statement {statement!r} asks for files, the network or extensions, which sql() does not read: {_line(error)}"
        ) from error


def _line(error: Exception) -> str:
    """Return an error of DuckDB on one line, without the drawing of the place."""
    return " ".join(str(error).partition("\n\nLINE")[0].split())


class _Views:
    """The views of a snapshot that a statement names; a view is made where the statement has its name.

    `failed` gets what goes wrong where DuckDB reads cells.
    """

    def __init__(self, catalog: Catalog, connection: "duckdb.DuckDBPyConnection", failed: list[AtlasError]) -> None:
        self.catalog, self.connection, self.failed = catalog, connection, failed

    def define(self, statement: str) -> str:
        """Define the views that a statement names, and return it with a table in the place of each call of `expression`."""
        # In its arguments, too: these are evaluated before.
        written = {
            text.strip('"').replace('""', '"') for kind, text, _ in self._tokens(statement) if kind == "identifier"
        }
        names = {name.lower() for name in written}
        self._cells(written)
        if "datasets" in names:
            self.connection.register("datasets", pa.Table.from_pylist(dataset_rows(self.catalog), _DATASETS))
        if "features" in names:
            frames = [pa.table({name: pa.array([], pa.string()) for name in ("space", "uid", "feature_id", "symbol")})]
            for space in registry_tables(self.catalog):
                table = read_registry(self.catalog, space).table
                frames.append(table.add_column(0, "space", pa.array([space] * table.num_rows, pa.string())))
            self.connection.register("features", pa.concat_tables(frames, promote_options="permissive"))
        for record in self._results:
            if RESULTS + record.name.lower() in names:
                self._result(record)
        return self._with_expressions(statement)

    def _tokens(self, statement: str) -> list[tuple[str, str, int]]:
        """Return kind, text and position of each token."""
        # Positions are of bytes.
        found, data = _duckdb().tokenize(statement), statement.encode()
        ends = [at for at, _ in found[1:]] + [len(data)]
        return [
            (str(kind).rpartition(".")[2], data[at:end].decode().strip(), at)
            for (at, kind), end in zip(found, ends, strict=True)
        ]

    # ---- cells, features, results

    def _cells(self, written: set[str]) -> None:
        """Define the view of the cells for a statement in which some names are written."""
        columns = cell_columns(self.catalog)
        ids = {name: name for name in ("uid", "cell_name") if name in columns.schema.names}
        # In the order of a result; a column of the cells that is called `dataset` wins.
        shown = (
            {"uid": "uid"} | ids | {"dataset": DATASET_NAME} | {name: column for column, name in columns.shown.items()}
        )
        vectors = [record.column for record in self._results if record.kind == "vector"]
        stored = list(dict.fromkeys([*shown.values(), *vectors]))
        cells = _CellDataset(self.catalog, columns, stored, self.failed)
        self.connection.register("_cells", cells)
        self._at = {column: f"c{i}" for i, column in enumerate(stored)}
        named = _told_apart([*shown])
        if wrong := [name for name, own in named.items() if own != name and name in written]:
            raise QueryError(
                f"SQL ignores the case of names: the column {wrong[0]!r} of the cells is called {named[wrong[0]]!r} there, as another column has "
                f'the same letters; write "{named[wrong[0]]}".'
            )
        view = {named[name]: self._at[column] for name, column in shown.items()}
        self.connection.execute(create_view("cells", view, "_cells"))

    @cached_property
    def _results(self) -> list[ResultRecord]:
        return read_results(self.catalog)

    def _result(self, record: ResultRecord) -> None:
        """Define a result as its cells: uid and value."""
        name = RESULTS + record.name
        if record.kind == "vector":
            at = self._at[record.column]
            self.connection.execute(create_view(name, {"uid": self._at["uid"], "value": at}, "_cells", present=at))
            return
        query = Query(self.catalog, QuerySpec()).obs([]).with_results(record.name, missing="drop")

        def rows() -> Iterator[pa.RecordBatch]:
            for batch in query.batches(max(1, VALUES // max(1, record.width))):
                values = np.asarray(batch.obsm[record.name])
                flat = pa.array(np.ascontiguousarray(values).reshape(-1))
                width = values.shape[1] if values.ndim > 1 else 1
                yield pa.record_batch(
                    {
                        "uid": batch.obs.column("uid").combine_chunks(),
                        "value": pa.FixedSizeListArray.from_arrays(flat, width),
                    }
                )

        self._store(name, rows(), "uid VARCHAR, value FLOAT[]")

    def _store(self, name: str, rows: Iterator[pa.RecordBatch], columns: str) -> None:
        """Keep rows as a table, as a statement may read it more than once; `columns` are those of one without rows."""
        first = next(rows, None)
        if first is None:
            self.connection.execute(create_table(name, columns))
            return
        stream = pa.RecordBatchReader.from_batches(first.schema, chain([first], rows))
        self.connection.register("_stream", stream)
        self.connection.execute(create_table(name, source="_stream"))
        self.connection.unregister("_stream")

    # ---- expression(...)

    def _with_expressions(self, statement: str) -> str:
        """Replace the calls of `expression` by tables with what they give."""
        tokens, data, calls = self._tokens(statement), statement.encode(), list[tuple[int, int, str]]()
        n = 0
        while n < len(tokens):
            kind, text, start = tokens[n]
            if kind != "identifier" or text.lower() != EXPRESSION or n + 1 == len(tokens) or tokens[n + 1][1] != "(":
                n += 1
                continue
            depth, first = 1, n + 2
            n = first
            while n < len(tokens) and depth:
                depth += {"(": 1, ")": -1}.get(tokens[n][1], 0) if tokens[n][0] == "operator" else 0
                n += 1
            begin, end = tokens[first][2], tokens[n - 1][2]
            calls.append((start, end + 1, data[begin:end].decode()))
        for number, (start, end, arguments) in reversed([*enumerate(calls)]):
            name = f"_{EXPRESSION}_{number}"
            rows = self._expression(self._evaluated(arguments))
            self._store(name, rows, "uid VARCHAR, feature VARCHAR, value DOUBLE, measured BOOLEAN")
            data = data[:start] + name.encode() + data[end:]
        return data.decode()

    def _evaluated(self, arguments: str) -> dict[str, Any]:
        """Evaluate named arguments; constants, or subqueries on the views."""
        try:
            found: dict[str, Any] = self.connection.sql(f"SELECT struct_pack({arguments})").fetchall()[0][0]
        except _duckdb().Error as error:
            raise QueryError(
                f"{EXPRESSION}({arguments}): {_line(error)}. It takes named arguments: {_HELP}."
            ) from error
        wrong, names = sorted(found.keys() - {*_ARGUMENTS}), found.get("features")
        names = [names] if isinstance(names, str) else names
        if wrong or not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            what = f"it has no argument {wrong[0]!r}" if wrong else "it needs features, as a list of names"
            raise QueryError(f"{EXPRESSION}({arguments}): {what}. It takes: {_HELP}.")
        return {**found, "features": names}

    def _expression(self, given: dict[str, Any]) -> Iterator[pa.RecordBatch]:
        """Yield uid, feature, value and measured: one row for each cell and feature."""
        names = given["features"]
        query = Query(self.catalog, QuerySpec()).features(names, space=given.get("space") or GENE_SPACE).obs([])
        if given.get("layer"):
            query = query.layers(given["layer"])
        if given.get("cells"):
            query = query.where(given["cells"])
        labels = pa.array(names, pa.string())
        for batch in query.batches(max(1, VALUES // len(names))):
            (part,) = batch.spaces.values()
            values = part.block.first_rows()
            n_cells, n_features = values.shape
            layouts, code = np.unique(part.layout_uids, return_inverse=True)
            nothing = np.zeros(n_features, np.bool_)
            by_layout = np.array([part.measured.get(uid, nothing) for uid in layouts.tolist()]).reshape(-1, n_features)
            flat = (by_layout[code] & part.present[:, None]).reshape(-1)
            rows = np.repeat(np.arange(n_cells), n_features)
            yield pa.record_batch(
                {
                    "uid": batch.obs.column("uid").combine_chunks().take(pa.array(rows)),
                    "feature": labels.take(pa.array(np.tile(np.arange(n_features), n_cells))),
                    "value": pa.array(values.reshape(-1), mask=~flat),
                    "measured": pa.array(flat),
                }
            )


def _told_apart(names: Sequence[str]) -> dict[str, str]:
    """Return a name for each, by which DuckDB tells them apart: case of ASCII letters never counts there, and it would give the first for all."""
    first = {name.encode().lower(): name for name in reversed(names)}
    found = {}
    for name in names:
        own = name
        while first.setdefault(own.encode().lower(), name) != name:
            own += "_"
        found[name] = own
    return found


class _CellDataset(pads.Dataset):  # type: ignore[misc]  # pyarrow has no types
    """The table of cells as DuckDB scans it: columns that a statement needs, in bounded memory, as ``c0``, ``c1``, ...

    DuckDB names the columns of the result, and not those that only the filter has. Lance would evaluate that filter,
    but takes none for tables with columns of some types; so these columns are read too, which their plain names tell,
    and Arrow evaluates it.
    """

    def __init__(self, catalog: Catalog, columns: Columns, names: Sequence[str], failed: list[AtlasError]) -> None:
        self._tables, self._names, self._failed = catalog.tables, names, failed
        self._uids, self._datasets = (
            pa.array(part, pa.string()) for part in ([*columns.datasets], [*columns.datasets.values()])
        )
        # Cells of an `add` that was under way have no record.
        self._hides = catalog.snapshot is None or bool(catalog.snapshot.ignored)
        types = {DATASET_NAME: pa.string()} | {field.name: field.type for field in columns.schema}
        self._fields = pa.schema([pa.field(f"c{i}", types[name]) for i, name in enumerate(names)])

    @property
    def schema(self) -> pa.Schema:
        """Columns."""
        return self._fields

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **_: Any) -> pads.Scanner:  # noqa: ANN401 - the name is Arrow's
        """Return a scanner of some columns, with rows that meet a condition."""
        columns = self._fields.names if columns is None else [*columns]
        needed = dict.fromkeys([*columns, *_COLUMN.findall("" if filter is None else str(filter))])
        schema = pa.schema([self._fields.field(name) for name in needed if name in self._fields.names])
        names = [self._names[int(name[1:])] for name in schema.names]
        of_dataset = [DATASET_UID] if self._hides or DATASET_NAME in names else []
        stored = list(dict.fromkeys([*(name for name in names if name != DATASET_NAME), *of_dataset]))

        def batches() -> Iterator[pa.RecordBatch]:
            try:
                for batch in self._tables.batches(CELLS, stored, ROWS):
                    found = {name: batch.column(name) for name in stored}
                    if of_dataset:
                        number = pc.index_in(batch.column(DATASET_UID), value_set=self._uids)
                        found[DATASET_NAME] = self._datasets.take(number)
                    made = pa.RecordBatch.from_arrays([found[name] for name in names], schema=schema)
                    yield made.filter(number.is_valid()) if self._hides else made
            except AtlasError as error:
                # DuckDB makes a text of it.
                self._failed.append(error)
                raise

        return pads.Scanner.from_batches(batches(), schema=schema, columns=columns, filter=filter)
