"""Splits: which cells are for training, validation and test, stored and cited like other facts about cells."""

import csv
import hashlib
import io
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.features import read_registry
from raggedatlas.catalog.identity import GENE_SPACE
from raggedatlas.errors import ArgumentError, AtlasError, NotFoundError, QueryError, SourceError
from raggedatlas.model.arguments import checked
from raggedatlas.model.assets import RECIPE_KEY, annotation_of
from raggedatlas.model.batch import CsrBlock
from raggedatlas.model.frames import DATASET
from raggedatlas.model.ids import UidIndex
from raggedatlas.model.shown import Shown
from raggedatlas.query.cell_load import SECTIONS, assign_files
from raggedatlas.query.cells import cell_columns, hash_uids, uid_bytes
from raggedatlas.query.query import Query
from raggedatlas.query.spec import AND
from raggedatlas.store.copies import local_copy, local_target
from raggedatlas.store.filters import Filter, col
from raggedatlas.store.location import Address, as_path

if TYPE_CHECKING:
    import pandas as pd

_LEAK_COLUMNS = ("donor", "donor_id", "patient", "perturbation", "clone", "clone_id", "clonotype")

LEAST_DETECTED = 10
"""Cells with fewer features than this may have the same values by chance."""

_BATCH = 4096

_SEED = 1 << 64
"""`Query.sample` takes the cells whose hashes with small seeds are the lowest; a split of a sample must not see the same hashes."""


@checked
class Split(Shown):
    """Cells assigned to named parts, such as train, val and test, with the recipe that assigned them.

    Make one with `by`, `hold_out`, `from_frame` or `from_toml`; ``atlas.annotate(split)`` stores it as a column of the cells, which
    snapshots pin and `diff` shows, and ``query.split("train")`` chooses the cells of a part.

    Parameters
    ----------
    cells : pyarrow.Table
        Column ``uid``, and as second column the part of each cell; parts joined by ``+`` for a cell that is in several. Cells without a
        part are left out.
    recipe : mapping
        How it was made, in JSON's types.
    name : str
        Of the column that stores it.

    Raises
    ------
    SourceError
        For cells that appear twice or have no uid, and a split without cells.

    Examples
    --------
    >>> split = Split(pa.table({"uid": ["0" * 16, "1" * 16], "split": ["train", "test"]}), {})
    >>> split
    Split 'split' of 2 cells: test 1, train 1 (sha256:6bb8fdd5...)
    """

    def __init__(self, cells: pa.Table, recipe: Mapping[str, Any], name: str = "split") -> None:
        if cells.num_columns != 2 or cells.column_names[0] != "uid":
            raise SourceError(f"A split has the columns 'uid' and that of its parts, not {cells.column_names}.")
        uids, parts = (column.cast(pa.string()).combine_chunks() for column in cells.columns)
        has = pc.and_(parts.is_valid(), pc.not_equal(parts, ""))
        uids, parts = uids.filter(has), parts.filter(has)
        if not len(uids):
            raise SourceError("The split assigns no cell to a part.")
        if uids.null_count:
            raise SourceError(f"{uids.null_count:,} cells of the split have no uid.")
        order = pc.sort_indices(uids)
        self._uids = uids.take(order)
        self._parts = parts.take(order).dictionary_encode()
        self._index = UidIndex(self._uids)
        if len(again := self._index.repeated()[0]):
            raise SourceError(
                f"The cell {self._uids[int(again[0])].as_py()!r} appears twice in the split; join parts by {AND!r} for a cell that is in several."
            )
        wrong = [label for label in self._labels if re.search(r'[,"#\r\n]', label) or not all(label.split(AND))]
        if wrong:
            raise SourceError(
                f"{wrong[0]!r} is no name of a part: it is empty, or holds a comma, a quote, '#' or a new line."
            )
        self._recipe, self.name = json.loads(json.dumps(recipe, default=_to_json)), name

    # How splits are made.

    @classmethod
    def by(
        cls,
        query: Query,
        column: str | Sequence[str] | None = None,
        fractions: Mapping[str, float] | None = None,
        *,
        control: Mapping[str, Any] | None = None,
        match: Sequence[str] = (DATASET,),
        seed: int = 0,
        name: str = "split",
    ) -> "Split":
        """Deal cells out at random, those with the same value of a column together.

        Parameters
        ----------
        query : Query
            The cells.
        column : str, sequence of str or None
            What stays together, such as the donor; None deals out cell by cell.
        fractions : mapping of str to float, or None
            Part -> its share of the cells; None is train 0.8, val 0.1, test 0.1. They sum to at most 1, and what is left is for ``train``.
        control : mapping or None
            Control cells, as a condition of `Query.where`. They are dealt out apart: in proportion to the other cells of each part, among
            cells that agree in `match`, so that no control is in two parts and every part has some.
        match : sequence of str
            For `control`.
        seed : int
            Another seed deals out otherwise.
        name : str
            Of the column that stores the split.

        Returns
        -------
        Split
            Without a column, a cell's part depends on its uid, its seed and nothing else. With one, the values come in the order of a hash,
            and each part gets values until it is as close to its share of the cells as it can be, but at least one.

        Raises
        ------
        QueryError
            For shares that are none, a column that is not known of every cell, or fewer values than parts.

        Examples
        --------
        >>> split = ra.Split.by(view.query(), "donor", {"train": 0.8, "test": 0.2})  # doctest: +SKIP
        """
        import pandas as pd

        shares = _shares(fractions)
        columns = [] if column is None else [column] if isinstance(column, str) else [*column]
        table, uids = _read(query, [*columns, *(match if control is not None else ())])
        controls = np.zeros(len(uids), bool) if control is None else _chosen(query, control, uids)
        names = np.array([*shares], object)
        if not columns:
            place = hash_uids(uid_bytes(pa.chunked_array([uids])), seed + _SEED) / 2.0**64
            ends = np.cumsum([*shares.values()])
            ends[-1] = 1.0
            codes = np.minimum(np.searchsorted(ends, place, side="right"), len(ends) - 1)
        else:
            frame = pd.DataFrame({name: table.column(name).to_pandas() for name in columns})
            if (n := int((frame.isna().any(axis=1).to_numpy() & ~controls).sum())) > 0:
                raise QueryError(
                    f"{n:,} of {len(frame):,} cells have no {' and '.join(map(repr, columns))} to split by; leave them out, e.g. "
                    f"query.where(~col({columns[0]!r}).is_null())."
                )
            texts = frame.astype(str).agg("\0".join, axis=1) if len(columns) > 1 else frame[columns[0]].astype(str)
            group, known = pd.factorize(texts, sort=True)
            values = [*map(str, known)]
            sizes = np.bincount(group[~controls], minlength=len(values))
            codes = _deal_values(values, sizes, shares, seed)[group]
        parts = names[codes]
        if control is not None:
            parts = _deal_controls(table, match, controls, parts, uids, seed)
        recipe = {
            "method": "by", "column": column if isinstance(column, str | None) else columns, "fractions": shares, "control": control,
            "match": list(match) if control is not None else None, "seed": seed,
        }  # fmt: skip
        return cls._made(query, uids, parts, recipe, name)

    @classmethod
    def hold_out(
        cls,
        query: Query,
        test: Mapping[str, Any] | Filter,
        *,
        val: Mapping[str, Any] | Filter | None = None,
        control: Mapping[str, Any] | None = None,
        match: Sequence[str] = (DATASET,),
        targets: str | None = None,
        separator: str | None = None,
        seed: int = 0,
        name: str = "split",
    ) -> "Split":
        """Hold cells out that satisfy a condition; training has the others.

        A condition on the cell line alone holds whole cell lines out (zero-shot); one on the cell line and on perturbations holds these
        perturbations out in this cell line, and training sees the others there (few-shot).

        Parameters
        ----------
        query : Query
            The cells.
        test, val : mapping or Filter
            Conditions as of `Query.where`: all columns of a mapping have to agree.
        control, match, seed
            As of `by`: controls are in proportion to the other cells of each part, among cells that agree in `match`. Without `control`,
            controls are cells like others.
        targets : str or None
            Column whose values name genes: values of a condition that name a gene mean all values that name it, by the atlas's identity.
        separator : str or None
            Between the genes of a value of `targets`; their order does not count.
        name : str
            Of the column that stores the split.

        Returns
        -------
        Split
            With the parts ``train``, ``test`` and ``val``; a cell of both conditions is refused.

        Raises
        ------
        QueryError
            For a condition that no cell satisfies, a listed value that no cell has, or cells that two conditions hold out.

        Examples
        --------
        >>> ra.Split.hold_out(view.query(), {"cell_line": ["K562"]})  # doctest: +SKIP
        >>> ra.Split.hold_out(
        ...     view.query(),
        ...     {"perturbation": ["STAT1", "JAK2"], "cell_line": "K562"},
        ...     control={"perturbation": "non-targeting"},
        ...     match=["cell_line"],
        ... )  # doctest: +SKIP
        """
        table, uids = _read(query, match if control is not None else ())
        controls = np.zeros(len(uids), bool) if control is None else _chosen(query, control, uids)
        parts = np.full(len(uids), "train", object)
        for part, given in {"test": test, "val": val}.items():
            if given is None:
                continue
            condition = _with_targets(query, given, targets, separator)
            # A typing error in a list would hold out less than was meant.
            for key, values in condition.items() if isinstance(condition, Mapping) else ():
                for one in values if isinstance(values, list | tuple | set | frozenset | np.ndarray) else ():
                    if not query.where(col(key) == one).limit(1).count():
                        raise QueryError(f"No cell of the query has {key!r} = {one!r}.")
            held = _chosen(query, condition, uids) & ~controls
            if not held.any():
                raise QueryError(f"No cell is for {part!r}: none that is no control satisfies {condition!r}.")
            if (parts[held] != "train").any():
                n = int((parts[held] != "train").sum())
                raise QueryError(f"{n:,} cells satisfy the conditions of both test and val; a cell is in one part.")
            parts[held] = part
        if control is not None:
            parts = _deal_controls(table, match, controls, parts, uids, seed)
        recipe = {
            "method": "hold_out", "test": test, "val": val, "control": control,
            "match": list(match) if control is not None else None, "targets": targets, "separator": separator, "seed": seed,
        }  # fmt: skip
        return cls._made(query, uids, parts, recipe, name)

    @classmethod
    def from_frame(cls, frame: Any, column: str | None = None, *, name: str | None = None) -> "Split":  # noqa: ANN401
        """Take the parts of cells from a table.

        Parameters
        ----------
        frame : pandas.DataFrame, Series, pyarrow.Table, mapping or path of a CSV file
            With uids as its index or in a column ``uid``. A file that `write` made is compared with the hash in its first line.
        column : str or None
            Of the parts; None takes ``split``, or the only one there is.
        name : str or None
            Of the column that stores the split; None takes that of `frame`.

        Raises
        ------
        SourceError
            For a table without uids or parts, or a file that was changed.

        Examples
        --------
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"fold": ["a", "b"]}, index=["0" * 16, "1" * 16])
        >>> Split.from_frame(frame).parts
        {'a': 1, 'b': 1}
        """
        import pandas as pd

        expected = None
        if isinstance(frame, str | os.PathLike):
            text = _read_text(frame)
            first, _, rest = text.partition("\n")
            expected = first.removeprefix("# ") if first.startswith("# sha256:") else None
            # Below the hash there is no comment: what begins with `#` there is of the name of the column.
            lines, comment = (text, "#") if expected is None else (rest, None)
            try:
                frame = pd.read_csv(io.StringIO(lines), comment=comment, dtype=str, keep_default_na=False)
            except (ValueError, pd.errors.ParserError) as error:
                raise SourceError(f"{frame} is no table: {error}.") from error
        table = _table_of(frame)
        names = [one for one in table.column_names if one != "uid"]
        chosen = column or ("split" if "split" in names else names[0] if len(names) == 1 else None)
        if chosen is None or chosen not in names:
            raise SourceError(
                f"The table has the columns {names}; name that of the parts with column=..."
                if column is None
                else f"The table has no column {column!r}; it has {names}."
            )
        made = cls(table.select(["uid", chosen]), {"method": "from_frame"}, name or chosen)
        _compare_hash(made, expected, "The table")
        return made

    @classmethod
    def from_toml(
        cls,
        path: Address,
        query: Query | None = None,
        *,
        perturbation: str = "gene",
        cell_type: str = "cell_type",
        control: str = "non-targeting",
        datasets: Mapping[str, Sequence[str]] | None = None,
        controls: Literal["shared", "split"] = "shared",
        seed: int = 42,
        name: str = "split",
    ) -> "Split":
        """Read a split that `write` made, or assign cells as a configuration file of cell-load does.

        Parameters
        ----------
        path : path
            The file.
        query : Query or None
            For a file of cell-load: the cells.
        perturbation, cell_type : str
            Columns of the cells, cell-load's ``pert_col`` and ``cell_type_key``.
        control : str
            Value of `perturbation` for control cells, its ``control_pert``.
        datasets : mapping of str to sequence of str, or None
            Name in the file -> datasets of the atlas. None takes those that were added from the file's paths, else that of the name.
        controls : {"shared", "split"}
            Controls of a cell type of which perturbations are held out: in all of its parts, as cell-load has them, or each in one part,
            in proportion to the other cells, as its first versions had them.
        seed : int
            For ``controls="split"``; 42 is cell-load's own.
        name : str
            Of the column that stores the split.

        Returns
        -------
        Split
            The same assignment as cell-load's: sections ``training``, ``zeroshot`` and ``fewshot``; a perturbation that is listed for both
            val and test has its cells in both parts, which `leakage` shows. Cells of datasets that are not for training, and are not
            named, have no part.

        Raises
        ------
        SourceError
            For a file that is no such file, or was changed since it was written.
        QueryError
            For a file of cell-load without a query, or a dataset that is not found in it.
        """
        text = _read_text(path)
        try:
            config = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise SourceError(f"{path} is no TOML: {error}.") from error
        if "parts" in config:
            try:
                stored, recipe, held = str(config["name"]), json.loads(config["recipe"]), config["parts"]
                uids = [str(uid) for some in held.values() for uid in some]
                labels = [label for label, some in held.items() for _ in some]
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise SourceError(f"{path} is no split that `Split.write` made: {error!r}.") from error
            cells = pa.table({"uid": pa.array(uids, pa.string()), stored: pa.array(labels, pa.string())})
            made = cls(cells, recipe, stored)
            _compare_hash(made, str(config.get("hash", "")), str(path))
            return made
        if query is None:
            raise QueryError(f"{path} names datasets and perturbations; pass the query whose cells it is for.")
        table, uids = _read(query, [DATASET, perturbation, cell_type])
        # Cells of a dataset come in the order of its file, which decides what a seed means.
        columns = [table.column(key).cast(pa.string()) for key in (DATASET, perturbation, cell_type)]
        parts = assign_files(
            config, query.catalog, *columns, datasets=datasets, control=control, seed=seed,
            shared=controls == "shared", path=str(path),
        )  # fmt: skip
        recipe = {
            "method": "from_toml", "sections": {key: config.get(key, {}) for key in SECTIONS}, "perturbation": perturbation, "cell_type": cell_type, "control": control,
            "datasets": None if datasets is None else {key: list(some) for key, some in datasets.items()}, "controls": controls,
            "seed": seed,
        }  # fmt: skip
        return cls._made(query, uids, parts, recipe, name)

    @classmethod
    def of(cls, query: Query, name: str = "split") -> "Split":
        """Read the split that a column of the cells stores.

        Raises
        ------
        QueryError
            If there is no such column, or no cell of the query has a part.

        Examples
        --------
        >>> ra.Split.of(view.query(), "split").recipe["method"]  # doctest: +SKIP
        'by'
        """
        columns = cell_columns(query.catalog)
        record = annotation_of(columns.schema.field(columns.stored(name)))
        table, uids = _read(query, [name])
        recipe = json.loads(record.recipe) if record is not None and record.recipe else {"method": "column"}
        if not isinstance(recipe, dict):
            recipe = {"method": "column"}
        column = table.column(name).cast(pa.string())
        if column.null_count == len(column):
            raise QueryError(f"No cell of the query has a part in the column {name!r}.")
        return cls(pa.table({"uid": uids, name: column}), recipe, name)

    # What a split says.

    @property
    def recipe(self) -> dict[str, Any]:
        """How it was made: the method, its arguments, and the query and snapshot."""
        return dict(self._recipe)

    @property
    def uids(self) -> pa.Array:
        """Uids of its cells, ascending."""
        return self._uids

    @property
    def parts(self) -> dict[str, int]:
        """Part -> number of its cells, by name; a cell that is in several counts in each."""
        sizes = dict.fromkeys(self._names, 0)
        label_sizes = np.bincount(self._parts.indices.to_numpy(), minlength=len(self._labels))
        for label, n in zip(self._labels, label_sizes, strict=True):
            for part in label.split(AND):
                sizes[part] += int(n)
        return sizes

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the lines ``uid,part`` of its cells, in ascending order, by which the split can be cited."""
        digest = hashlib.sha256()
        for start in range(0, len(self._uids), 1 << 16):
            uids, parts = (
                self._uids[start : start + (1 << 16)],
                self._parts[start : start + (1 << 16)].cast(pa.string()),
            )
            lines = pc.binary_join_element_wise(uids, parts, ",")
            digest.update("".join(f"{line}\n" for line in lines.to_pylist()).encode())
        return digest.hexdigest()

    def part(self, name: str) -> pa.Array:
        """Return the uids of the cells of a part, ascending.

        Raises
        ------
        NotFoundError
            If there is no such part.
        """
        return self._uids.filter(pa.array(self._holds(name)[self._parts.indices.to_numpy()]))

    def contains(self, uids: pa.Array, part: str) -> NDArray[np.bool_]:
        """Return which of some cells are in a part, (n,) bool.

        Raises
        ------
        NotFoundError
            If there is no such part.
        """
        rows = self._index.find(uids)
        held: NDArray[np.bool_] = self._holds(part)[self._parts.indices.to_numpy()[rows]] & (rows >= 0)
        return held

    def to_pandas(self) -> "pd.DataFrame":
        """Return a frame indexed by uid with the part of each cell, a categorical column."""
        frame: pd.DataFrame = self._table().to_pandas()
        return frame.set_index("uid")

    def leakage(self, query: Query, columns: Sequence[str] | None = None, *, counts: bool = True) -> "pd.DataFrame":
        """List what stands in two parts or more.

        Parameters
        ----------
        query : Query
            The cells, and the values that are compared.
        columns : sequence of str or None
            Columns of which no value should be in two parts. None takes those that are there of donor, donor_id, patient, perturbation,
            clone, clone_id and clonotype.
        counts : bool
            Whether values are read, for cells with the same values in different parts.

        Returns
        -------
        pandas.DataFrame
            A row for each finding: `kind` is a column, ``cell`` (a cell that is in several parts), ``cell_name`` (cells of one name) or
            ``values`` (cells with at least ten features that have the same values, other than zero); `value` says which, and a column for
            each part how many cells. Without rows nothing was found.

        Examples
        --------
        >>> split.leakage(view.query(), ["donor"])  # doctest: +SKIP
        """
        there = cell_columns(query.catalog).names
        asked = [name for name in _LEAK_COLUMNS if name in there] if columns is None else [*columns]
        table, uids = _read(query, asked, "cell_name")
        at = self._index.find(uids)
        kept = pa.array(np.flatnonzero(at >= 0))
        parts = self._parts.take(pa.array(at[at >= 0]))
        return find_leaks(query, table.take(kept), uids.take(kept), parts, counts=counts)

    def write(self, path: Address) -> None:
        """Write the split with its hash, as ``.csv`` (a line for each cell) or ``.toml`` (with the recipe).

        Parameters
        ----------
        path : path
            `from_frame` reads the one, `from_toml` the other.

        Raises
        ------
        ArgumentError
            For another ending.
        """
        suffix = as_path(path).suffix
        if suffix == ".csv":
            header = io.StringIO()
            csv.writer(header, lineterminator="\n").writerow(["uid", self.name])
            lines = [f"# sha256:{self.hash}\n", header.getvalue()]
            uids, parts = self._uids.to_pylist(), self._parts.cast(pa.string()).to_pylist()
            lines += [f"{uid},{part}\n" for uid, part in zip(uids, parts, strict=True)]
        elif suffix == ".toml":
            lines = [
                f'name = {_toml(self.name)}\nhash = "sha256:{self.hash}"\n',
                f"recipe = {_toml(json.dumps(self._recipe, sort_keys=True))}\n",
                "\n[parts]\n",
            ]
            for code, label in sorted(enumerate(self._labels), key=lambda one: one[1]):
                own = self._uids.filter(pc.equal(self._parts.indices, code)).to_pylist()
                lines += [f"{_toml(label)} = [\n", *(f'  "{uid}",\n' for uid in own), "]\n"]
        else:
            raise ArgumentError(f"write() takes the path of a .csv or .toml file, not {str(path)!r}.")
        with local_target(path, overwrite=True) as target:
            target.write_text("".join(lines), encoding="utf-8")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Hand the cells and the recipe over to what takes Arrow tables, such as `RaggedAtlas.annotate`."""
        return self._table().__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        """Count the cells."""
        return len(self._uids)

    def __eq__(self, other: object) -> bool:
        """Compare the assignment."""
        return isinstance(other, Split) and self.hash == other.hash

    def __hash__(self) -> int:
        """Hash the assignment."""
        return int(self.hash[:15], 16)

    def __repr__(self) -> str:
        """Return the parts, how many cells each has, and the start of the hash."""
        parts = ", ".join(f"{part} {n:,}" for part, n in self.parts.items())
        return f"Split {self.name!r} of {len(self):,} cells: {parts} (sha256:{self.hash[:8]}...)"

    @property
    def _labels(self) -> list[str]:
        labels: list[str] = self._parts.dictionary.to_pylist()
        return labels

    @cached_property
    def _names(self) -> list[str]:
        return sorted({part for label in self._labels for part in label.split(AND)})

    def _holds(self, part: str) -> NDArray[np.bool_]:
        """Return which labels are of cells in a part."""
        if part not in self._names:
            raise NotFoundError(f"The split {self.name!r} has the parts {self._names}, not {part!r}.")
        return np.array([part in label.split(AND) for label in self._labels])

    def _table(self) -> pa.Table:
        recipe = json.dumps({**self._recipe, "hash": f"sha256:{self.hash}"}, sort_keys=True)
        table = pa.table({"uid": self._uids, self.name: self._parts})
        return table.replace_schema_metadata({RECIPE_KEY: recipe.encode()})

    @classmethod
    def _made(
        cls, query: Query, uids: pa.Array, parts: NDArray[np.object_], recipe: dict[str, Any], name: str
    ) -> "Split":
        snapshot = query.catalog.snapshot
        where = {"snapshot": snapshot.version, "root_hash": snapshot.root_hash} if snapshot is not None else {}
        return cls(
            pa.table({"uid": uids, name: pa.array(parts, pa.string())}),
            {**recipe, "query": query.to_dict(), **where},
            name,
        )


def _shares(fractions: Mapping[str, float] | None) -> dict[str, float]:
    shares = dict({"train": 0.8, "val": 0.1, "test": 0.1} if fractions is None else fractions)
    total = sum(shares.values())
    if not shares or not all(0 < share <= 1 for share in shares.values()) or not total <= 1 + 1e-9:
        raise QueryError(f"fractions are shares above 0 that sum to at most 1, not {dict(shares)}.")
    if any(not part or AND in part for part in shares):
        raise QueryError(f"Names of parts are not empty and hold no {AND!r}: {[*shares]}.")
    if total < 1 - 1e-9:
        shares["train"] = shares.get("train", 0.0) + 1 - total
    return shares


def _read(query: Query, columns: Sequence[str], *ids: str) -> tuple[pa.Table, pa.Array]:
    """Return columns of the cells of a query, and their uids."""
    named = [*dict.fromkeys(columns)]
    # Spaces decide which cells values are read of, and not which cells there are.
    table = query.obs([name for name in named if name not in {"uid", "cell_name", DATASET}]).to_arrow()
    if not table.num_rows:
        raise QueryError(f"{query!r} has no cells; there is nothing to split.")
    return table.select([*dict.fromkeys([*named, *ids])]), table.column("uid").cast(pa.string()).combine_chunks()


def _chosen(query: Query, condition: Mapping[str, Any] | Filter, uids: pa.Array) -> NDArray[np.bool_]:
    """Return which cells satisfy a condition."""
    found = query.where(condition).obs([]).to_arrow().column("uid").cast(pa.string()).combine_chunks()
    return UidIndex(found).find(uids) >= 0


def _deal_values(
    values: Sequence[str], sizes: NDArray[np.int64], shares: Mapping[str, float], seed: int
) -> NDArray[np.int64]:
    """Return the part of each value: small parts first, each as close to its share as it can be, but with one value at least."""
    there = np.flatnonzero(sizes)
    if len(there) < len(shares):
        raise QueryError(
            f"The cells have {len(there)} values to split by, and there are {len(shares)} parts ({', '.join(shares)}); every part needs one."
        )
    texts = (f"split {seed} {values[i]}".encode() for i in there.tolist())
    order = there[np.argsort(np.array([hashlib.sha256(text).hexdigest() for text in texts]), kind="stable")].tolist()
    parts = np.zeros(len(values), np.int64)
    total = int(sizes.sum())
    by_size = sorted(range(len(shares)), key=lambda i: ([*shares.values()][i], i))
    for number, part in enumerate(by_size):
        wanted, held = [*shares.values()][part] * total, 0
        later = len(by_size) - number - 1
        while len(order) > later:
            size = int(sizes[order[0]])
            if later and held and abs(held + size - wanted) >= abs(held - wanted):
                break
            parts[order.pop(0)] = part
            held += size
    return parts


def _deal_controls(
    table: pa.Table,
    match: Sequence[str],
    controls: NDArray[np.bool_],
    parts: NDArray[np.object_],
    uids: pa.Array,
    seed: int,
) -> NDArray[np.object_]:
    """Deal controls out in proportion to the other cells of each part, among cells that agree in `match`."""
    import pandas as pd

    strata = np.zeros(len(parts), np.int64)
    for name in match:
        own, known = pd.factorize(table.column(name).to_pandas(), use_na_sentinel=False)
        strata, _ = pd.factorize(strata * len(known) + own)
    names, codes = np.unique(parts.astype(str), return_inverse=True)
    n_strata = int(strata.max(initial=0)) + 1
    treated = ~controls
    counts = np.bincount(strata[treated] * len(names) + codes[treated], minlength=n_strata * len(names))
    shares = counts.reshape(n_strata, len(names)).astype(float)
    # Controls without other cells are for training, if there is that part.
    shares[shares.sum(axis=1) == 0, int(np.flatnonzero(names == "train")[0]) if "train" in names else 0] = 1
    ends = np.cumsum(shares, axis=1) / shares.sum(axis=1, keepdims=True)
    at = np.flatnonzero(controls)
    hashes = hash_uids(uid_bytes(pa.chunked_array([uids.take(pa.array(at))])), seed + _SEED + 1)
    order = np.lexsort((hashes, strata[at]))
    own = strata[at][order]
    sizes = np.bincount(own, minlength=n_strata)
    rank = np.arange(len(own)) - (np.cumsum(sizes) - sizes)[own]
    place = (rank + 0.5) / sizes[own]
    dealt = np.minimum((place[:, None] >= ends[own]).sum(axis=1), len(names) - 1)
    made = parts.copy()
    made[at[order]] = names[dealt]
    return made


def _with_targets(
    query: Query, condition: Mapping[str, Any] | Filter, targets: str | None, separator: str | None
) -> Mapping[str, Any] | Filter:
    """Return a condition whose values of the column of targets are all that name the same genes."""
    if targets is None or not isinstance(condition, Mapping) or targets not in condition:
        return condition
    given = condition[targets]
    asked = [given] if isinstance(given, str) else [*given]
    counted: Any = query.count(targets)
    there = [str(value) for value in counted.index.dropna()]
    labels = target_labels(query.catalog, [*asked, *there], separator)
    wanted = {labels[value] for value in asked}
    lacking = [value for value in asked if labels[value] not in {labels[one] for one in there}]
    if lacking:
        raise QueryError(f"No cell has a {targets!r} that names {lacking}.")
    return {**condition, targets: [value for value in there if labels[value] in wanted]}


def target_labels(catalog: Catalog, values: Iterable[str], separator: str | None = None) -> dict[str, str]:
    """Return one label for all values that name the same targets: value -> the symbols of its targets, sorted.

    The genes of the atlas, and which of them count as the same, decide; what names no gene, or several, stays as it is.
    `separator` stands between the targets of a combination, whose order does not count.
    """
    parts = {value: [value] if separator is None else value.split(separator) for value in values}
    names = [*dict.fromkeys(name for some in parts.values() for name in some if name)]
    known: dict[str, str] = {}
    if GENE_SPACE in catalog.spaces():
        registry = read_registry(catalog, GENE_SPACE)
        found = registry.resolve(names)
        left_out = {*found.unknown, *(found.ambiguous or ())}
        resolved = [name for name in names if name not in left_out]
        # Two features may have one symbol; these stay apart, by their ids.
        symbols = registry.names_of(found.uids)
        owners: dict[str, set[str]] = {}
        for uid, symbol in zip(found.uids, symbols, strict=True):
            owners.setdefault(symbol, set()).add(uid)
        ids = registry.ids_of(found.uids)
        shown = (symbol if len(owners[symbol]) == 1 else one for symbol, one in zip(symbols, ids, strict=True))
        known = dict(zip(resolved, shown, strict=True))
    joined = {}
    for value, some in parts.items():
        targets = [known.get(name, name) for name in some]
        joined[value] = targets[0] if separator is None else separator.join(sorted(targets))
    return joined


def find_leaks(
    query: Query, table: pa.Table, uids: pa.Array, parts: pa.DictionaryArray, *, counts: bool
) -> "pd.DataFrame":
    """List what stands in two parts; see `Split.leakage`.

    `table` has the columns that are compared, a row for each cell that has a part; `uids` and `parts` are those of
    these cells. `counts` tells whether to compare values.
    """
    import pandas as pd

    labels, codes = [str(one).split(AND) for one in parts.dictionary.to_pylist()], parts.indices.to_numpy()
    listed = sorted({part for label in labels for part in label})
    inside = {part: np.array([part in label for label in labels], np.int64) for part in listed}
    several = np.array([len(label) > 1 for label in labels])[codes]
    # What is compared, and of which cells; columns may be called "cell" and "values" too.
    kinds: list[tuple[str, Any, NDArray[np.int64]]] = [
        ("cell", uids.filter(pa.array(several)).to_pylist(), np.flatnonzero(several))
    ]
    for name in table.column_names:
        column = table.column(name).cast(pa.string())
        kinds.append((name, column.drop_null().to_pylist(), np.flatnonzero(column.is_valid().to_numpy())))
    if counts:
        prints = _fingerprints(query, uids)
        kinds.append(("values", prints[prints != 0], np.flatnonzero(prints)))
    found = []
    for number, (kind, values, rows) in enumerate(kinds):
        grouped = pd.DataFrame({part: own[codes[rows]] for part, own in inside.items()}).groupby(
            np.asarray(values), dropna=False
        )
        # A cell that is in several parts is listed as that.
        sums = grouped[listed].sum()[(grouped.size() > 1) | (number == 0)]
        sums = sums[(sums > 0).sum(axis=1) > 1]
        shown = [*map(str, sums.index)]
        if number > table.num_columns:
            # A cell says more than a hash.
            firsts = pd.Series(rows).groupby(np.asarray(values)).first()
            shown = [f"as of the cell {uids[int(row)]}" for row in firsts.loc[sums.index]]
        found.append(sums.assign(kind=kind, value=shown))
    return pd.concat(found)[["kind", "value", *listed]].reset_index(drop=True)


def _fingerprints(query: Query, uids: pa.Array) -> NDArray[np.uint64]:
    """Return a hash of the values of each cell, 0 for cells with few features or without values, whatever the order of the features."""
    index, prints = UidIndex(uids), np.zeros(len(uids), np.uint64)
    hashes: NDArray[np.uint64] | None = None
    for batch in query.obs([]).batches(_BATCH):
        space = next(iter(batch.spaces.values()))
        values = next(iter(space.block.layers.values()))
        if isinstance(space.block, CsrBlock):
            bounds, columns, n_cols = space.block.indptr, space.block.indices, space.block.n_cols
        else:
            flat = values.reshape(len(values), -1)
            rows, columns = np.nonzero(flat)
            values, bounds, n_cols = flat[rows, columns], np.searchsorted(rows, np.arange(len(flat) + 1)), flat.shape[1]
        if hashes is None:
            # Columns of a space without features, such as an embedding, are known by their number.
            names = [*map(str, space.features)] or [*map(str, range(n_cols))]
            hashes = np.array([int(hashlib.sha256(one.encode()).hexdigest()[:16], 16) for one in names], np.uint64)
        entries = values.astype(np.float64)
        # A sum does not depend on the order of what is added.
        mixed = (entries.view(np.uint64) ^ hashes[columns]) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        there = (entries != 0) & ~np.isnan(entries)
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(np.where(there, mixed, 0), dtype=np.uint64)])
        detected = np.concatenate([[0], np.cumsum(there)])
        own = sums[bounds[1:]] - sums[bounds[:-1]]
        own[detected[bounds[1:]] - detected[bounds[:-1]] < LEAST_DETECTED] = 0
        at = index.find(batch.obs.column("uid").cast(pa.string()).combine_chunks())
        prints[at[at >= 0]] = own[at >= 0]
    return prints


def _to_json(value: Any) -> Any:  # noqa: ANN401  (what a condition holds)
    """Return a value that JSON has no type for as one that it has."""
    if isinstance(value, Filter):
        return value.to_dict()
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _table_of(frame: Any) -> pa.Table:  # noqa: ANN401
    import pandas as pd

    if isinstance(frame, pd.Series):
        frame = frame.to_frame("split" if frame.name is None else frame.name)
    if isinstance(frame, pd.DataFrame) and "uid" not in frame.columns:
        frame = frame.rename_axis("uid").reset_index()
    try:
        # NaN among texts is a missing value, as in pandas.
        columns = (
            {str(k): pa.array(v, from_pandas=True) for k, v in frame.items()} if isinstance(frame, Mapping) else frame
        )
        table = (
            pa.Table.from_pandas(frame, preserve_index=False) if isinstance(frame, pd.DataFrame) else pa.table(columns)
        )
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SourceError(f"This is no table of cells: {error}.") from error
    if "uid" not in table.column_names:
        raise SourceError(f"The table has no column 'uid', only {table.column_names}; name the cells by uid.")
    return table


def _read_text(path: Address) -> str:
    try:
        with local_copy(path) as local:
            return local.read_text(encoding="utf-8")
    except AtlasError:
        raise
    except (OSError, ValueError) as error:  # not UTF-8, or a name that no file has
        raise SourceError(f"{str(path)!r} cannot be read: {error}.") from error


def _compare_hash(split: Split, expected: str | None, what: str) -> None:
    if expected is not None and expected != f"sha256:{split.hash}":
        raise SourceError(
            f"{what} says {expected or 'no hash'}, and its cells and parts have sha256:{split.hash}: it was changed since it was written."
        )


def _toml(text: str) -> str:
    """Return a basic string of TOML; JSON escapes as TOML does, but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
