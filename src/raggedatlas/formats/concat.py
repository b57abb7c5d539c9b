"""Several sources one below the other, as anndata's `concat` puts objects together, in bounded memory."""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import ArgumentError, AtlasError, FeatureError, NotFoundError, SourceError
from raggedatlas.formats.copying import copy
from raggedatlas.formats.matrix_readers import NUMBER_KINDS
from raggedatlas.formats.modalities import ElementReader, Modality, select_modalities
from raggedatlas.formats.registry import open_source
from raggedatlas.formats.subset import hstack_blocks
from raggedatlas.model.arguments import Progress
from raggedatlas.model.batch import Block, CsrBlock, DenseBlock
from raggedatlas.model.choices import Join, Merge
from raggedatlas.model.frames import Column, ColumnTable, Texts, frame_to_arrow
from raggedatlas.model.protocols import MatrixInfo, Sink, Source, SourceSchema
from raggedatlas.store.remote_path import AnyPath
from raggedatlas.store.runtime import warnings_as
from raggedatlas.store.sparse import remap_csr

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData


VALUES = 1 << 22
"""Number of values of a table of cells that are concatenated at once; at least one column."""


@dataclass(frozen=True, slots=True)
class ConcatOptions:
    """Options of `concat`, which are the arguments of `anndata.concat`.

    Parameters
    ----------
    join : {"inner", "outer"}
        Which features, layers and columns are kept: those of all, or of any.
    merge, uns_merge : {"same", "unique", "first", "only"} or None
        What is kept of `var`, `varm` and `varp`, and of `uns`; None keeps nothing.
    label : str or None
        Name of the column of cells that says where each is from.
    keys : tuple
        What each source is called there.
    index_unique : str or None
        What stands between the name of a cell and the key of its source; None leaves names as they are.
    fill_value : number or None
        What stands where a source has not measured; None is 0 in sparse matrices and NaN in dense ones.
    """

    join: Join
    merge: Merge | None
    uns_merge: Merge | None
    label: str | None
    keys: tuple[Any, ...]
    index_unique: str | None
    fill_value: float | None

    def joined(self, parts: "Iterable[AnnData]") -> "AnnData":
        """Concatenate objects in memory with anndata, raising its errors as `SourceError`.

        Raises
        ------
        SourceError
            If they cannot be concatenated.
        """
        import anndata
        import pandas as pd

        options = {name: getattr(self, name) for name in ("join", "merge", "uns_merge", "index_unique", "fill_value")}
        try:
            with warnings_as("ignore"):
                return anndata.concat(list(parts), keys=self.keys, **options)
        except AtlasError:
            raise
        except (
            ValueError, TypeError, KeyError, AttributeError, IndexError, NotImplementedError, pd.errors.InvalidIndexError
        ) as error:  # fmt: skip
            said = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise SourceError(f"The sources cannot be put together ({said}); convert what differs first.") from error


def concat_cells(tables: Sequence[ColumnTable], how: ConcatOptions) -> ColumnTable:
    """Concatenate tables of cells; dtypes and categories are combined as in anndata.

    Parameters
    ----------
    tables : sequence of ColumnTable
        One of each source.
    how : ConcatOptions
        Says which columns are kept and what cells are called.

    Raises
    ------
    SourceError
        If a table has two columns of one name.
    """
    import pandas as pd

    lengths = [len(table) for table in tables]
    found = [{column.name: column for column in table.columns} for table in tables]
    for table, columns in zip(tables, found, strict=True):
        if len(columns) < len(table.columns):
            raise SourceError(
                f"A table of cells has two columns of one name among {[c.name for c in table.columns]}; rename one."
            )
    names = list(dict.fromkeys(name for columns in found for name in columns))
    names = [name for name in names if how.join == "outer" or all(name in columns for columns in found)]
    step = max(1, VALUES // max(1, sum(lengths)))

    # Columns are read in order, so keeping the last group joins each group only once.
    @lru_cache(maxsize=1)
    def read(start: int) -> dict[Any, Any]:
        few = names[start : start + step]
        return _joined_columns([{n: columns[n].read() for n in few if n in columns} for columns in found], lengths, how)

    made = {
        name: Column(name, partial(lambda i, name: read(i - i % step)[name], i, name)) for i, name in enumerate(names)
    }
    if how.label is not None:
        codes = np.repeat(np.arange(len(tables)), lengths)
        kind: Any = pd.CategoricalDtype(list(how.keys))
        made[how.label] = Column(how.label, lambda: pd.Series(pd.Categorical.from_codes(codes, dtype=kind)))
    called = {table.index.name for table in tables}
    index = Column(called.pop() if len(called) == 1 else None, partial(_joined_names, tables, how))
    return ColumnTable(sum(lengths), index, tuple(made.values()))


def _joined_columns(values: Sequence[dict[Any, Any]], lengths: list[int], how: ConcatOptions) -> dict[Any, Any]:
    """Concatenate some columns of all tables; text that is read in blocks is still read in blocks."""
    import pandas as pd
    from anndata import AnnData

    every = dict.fromkeys(name for columns in values for name in columns)
    chained = {
        name: texts for name in every if (texts := _chained([columns.get(name) for columns in values])) is not None
    }
    # All rows share one name because it is not used: references to one string take eight bytes per row.
    parts = (
        AnnData(
            obs=pd.DataFrame(
                {name: _array(value) for name, value in columns.items() if name not in chained},
                index=pd.Index(np.full(n, "cell", object)),
            )
        )
        for columns, n in zip(values, lengths, strict=True)
    )
    obs = how.joined(parts).obs
    return chained | {name: pd.Series(obs[name].array) for name in obs}


def _array(value: Any) -> Any:  # noqa: ANN401  (an array of pandas)
    import pandas as pd

    return pd.Series(value.whole(), dtype=value.dtype).array if isinstance(value, Texts) else value.array


def _chained(values: Sequence[Any]) -> Texts | None:
    """Chain text columns of one dtype without missing values if any is read in blocks; else return None."""
    import pandas as pd

    # A source without the column, or with missing text, changes the dtype; anndata then decides which it is.
    if not any(isinstance(value, Texts) for value in values) or any(value is None for value in values):
        return None
    if len({pd.api.types.pandas_dtype(value.dtype) for value in values}) > 1:
        return None
    if not all(
        isinstance(value, Texts) or pd.api.types.infer_dtype(value, skipna=False) == "string" for value in values
    ):
        return None
    return Texts(
        sum(v.n_rows if isinstance(v, Texts) else len(v) for v in values), partial(_texts, values), values[0].dtype
    )


def _texts(values: Sequence[Any], endings: Sequence[str] | None = None) -> Iterator[NDArray[np.object_]]:
    for i, value in enumerate(values):
        for block in value.blocks() if isinstance(value, Texts) else [np.asarray(value, object)]:
            yield np.asarray(block + endings[i] if endings else block, object)


def _joined_names(tables: Sequence[ColumnTable], how: ConcatOptions) -> Texts:
    """Return the names of all cells, read in blocks."""
    endings = None if how.index_unique is None else [f"{how.index_unique}{key}" for key in how.keys]
    return Texts(sum(map(len, tables)), partial(_texts, [table.index.read() for table in tables], endings))


def concat(
    sources: "Sequence[Any] | Mapping[Any, Any]",
    target: "Sink | str | AnyPath",
    *,
    join: Join = "inner",
    merge: Merge | None = None,
    uns_merge: Merge | None = None,
    label: str | None = None,
    keys: Sequence[Any] | None = None,
    index_unique: str | None = None,
    fill_value: float | None = None,
    modality: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> str:
    """Concatenate the cells of several files or objects into one file in bounded memory.

    The result is that of `anndata.concat` along ``"obs"`` on the same data in memory, whose arguments these are.

    Parameters
    ----------
    sources : sequence, or mapping of key to source
        Anything that `open_source` takes.
    target : path or Sink
        A path's ending decides the format; `open_sink` takes options.
    join : {"inner", "outer"}
        Which features, layers, members of `obsm` and columns of `obs` are kept: those of all sources, or of any.
    merge : {"same", "unique", "first", "only"}, optional
        Which columns of `var` and members of `varm` and `varp` are kept: equal in all, of one value only, of the first source
        that has them, of the only one that has them. By default none.
    uns_merge : {"same", "unique", "first", "only"}, optional
        The same of `uns`, key by key.
    label : str, optional
        Name of a column of `obs` that is to hold the key of each cell's source.
    keys : sequence, optional
        Keys of the sources; ``"0"``, ``"1"``, ... by default.
    index_unique : str, optional
        Put between the name of a cell and the key of its source, so that names are unique.
    fill_value : number, optional
        What stands where a source lacks a feature or layer; by default 0 in sparse matrices and NaN in dense ones.
    modality : str, optional
        Which modality of MuData.
    storage_options : mapping of str to str, optional
        Credentials and endpoint of the object store of sources and target, as of `RaggedAtlas.open`.
    progress : callable, optional
        Called with what is written, how many rows of it are, and how many there are.

    Returns
    -------
    str
        Result of the sink's `commit`.

    Raises
    ------
    ArgumentError
        If there is no source, an argument is none of the words above, or the keys do not fit.
    FeatureError
        If a source names two features alike.
    SourceError
        If a source is damaged or has several modalities, or the sources cannot be put together: X in some only, a table in
        one and an array in another under the same name of `obsm`, booleans that would have to hold NaN.
    DuplicateError, StoreError
        If the target exists or refuses.

    Warns
    -----
    UserWarning
        If only some sources have `raw`: it is left out.

    Notes
    -----
    `obsp` is left out, as cells of different sources have no pairs; `raw` is kept where all sources have it, with its features
    joined likewise. A matrix is sparse (CSR) if it is in any source. Matrices are walked down in steps of about 16 MiB, and a few
    columns of `obs` are held at once; `var`, `uns` and the tables of `obsm` are held whole.

    Examples
    --------
    >>> import tempfile, anndata, scipy.sparse
    >>> eye = anndata.AnnData(scipy.sparse.eye_array(3, format="csr"))
    >>> made = concat({"a": eye, "b": eye[:2]}, tempfile.mkdtemp() + "/both.h5ad", label="batch", index_unique="-")
    >>> anndata.read_h5ad(made).obs["batch"].to_dict()
    {'0-a': 'a', '1-a': 'a', '2-a': 'a', '0-b': 'b', '1-b': 'b'}
    """
    with ExitStack() as opened:
        try:
            how = ConcatOptions(join, merge, uns_merge, label, _keys(sources, keys), index_unique, fill_value)
            _check_words(how)
            stacked = ConcatSource(_members(sources, modality, opened, storage_options), how)
        except BaseException:
            # `copy` aborts the sink on errors of its own, but has not been called yet.
            if not isinstance(target, str | AnyPath):
                target.abort()
            raise
        return copy(stacked, target, storage_options=storage_options, progress=progress)


def _keys(sources: "Sequence[Any] | Mapping[Any, Any]", keys: Sequence[Any] | None) -> tuple[Any, ...]:
    listed: object = sources
    if isinstance(listed, str) or not isinstance(listed, Sequence | Mapping) or not sources:
        raise ArgumentError(
            f"concat() takes a list or mapping of one or more sources, not {sources!r:.100}; put it into a list."
        )
    if isinstance(sources, Mapping) and keys is not None:
        raise ArgumentError("concat() takes keys= or a mapping, not both; leave out keys=.")
    if keys is None:
        keys = list(sources) if isinstance(sources, Mapping) else [str(i) for i in range(len(sources))]
    if isinstance(keys, str) or len(keys) != len(sources) or len(set(keys)) != len(keys):
        raise ArgumentError(
            f"concat() takes a key of its own for each of the {len(sources)} sources, not keys={keys!r}."
        )
    return tuple(keys)


def _check_words(how: ConcatOptions) -> None:
    choices = {"join": get_args(Join), "merge": (*get_args(Merge), None), "uns_merge": (*get_args(Merge), None)}
    for name, words in choices.items():
        if getattr(how, name) not in words:
            raise ArgumentError(f"concat() takes {name} as one of {list(words)}, not {getattr(how, name)!r}.")


def _members(
    sources: "Sequence[Any] | Mapping[Any, Any]",
    modality: str | None,
    opened: ExitStack,
    storage_options: Mapping[str, str] | None,
) -> "list[ConcatInput]":
    members = []
    for given in sources.values() if isinstance(sources, Mapping) else sources:
        source = open_source(given, storage_options=storage_options)
        if source is not given:
            opened.callback(source.close)
        members.append(ConcatInput.of(source, *select_modalities(source, modality, multimodal=False)))
    return members


@dataclass(frozen=True, slots=True)
class ConcatInput:
    """One of the sources, or one of its modalities.

    Parameters
    ----------
    source : Source
        What it is of.
    mod : Modality
        Its matrices and elements.
    cells : ColumnTable
        Its table of cells.
    matrices : mapping of str to tuple of MatrixInfo
        Where a matrix belongs in an AnnData -> the matrices of the source that stand in it side by side.
    """

    source: Source
    mod: Modality
    cells: ColumnTable
    matrices: Mapping[str, tuple[MatrixInfo, ...]]

    @classmethod
    def of(cls, source: Source, mod: Modality) -> "ConcatInput":
        """Collect the contents of a source without reading values."""
        read = mod.elements["obs"]
        table = read.table() if isinstance(read, ElementReader) else None
        walked = [p for p in mod.matrices if p.key in ("X", "raw/X") or p.key.split("/")[0] in ("layers", "obsm")]
        return cls(source, mod, _table_of(read()) if table is None else table, {p.key: p.infos for p in walked})

    @property
    def name(self) -> str:
        """Return the name used in messages."""
        schema = self.source.describe()
        return schema.uri or schema.name or "an object in memory"

    def features(self, key: str) -> "pd.DataFrame":
        """Read ``"var"`` or ``"raw/var"``.

        Raises
        ------
        FeatureError
            If two features have the same name.
        """
        table: pd.DataFrame = self.mod.elements[key]()
        if not table.index.is_unique:
            raise FeatureError(
                f"{self.name}: {key} names several features {table.index[table.index.duplicated()][0]!r}; features are joined by name. "
                "Make names unique first, for instance with AnnData.var_names_make_unique()."
            )
        return table

    def group(self, name: str) -> dict[str, Any]:
        """Read all members of a group without rows of cells: ``"varm"``, ``"varp"``, ``"uns"``."""
        inside = f"{name}/"
        found = {p.key: self.source.element(p.infos[0].key) for p in self.mod.matrices if p.key.startswith(inside)}
        found |= {key: read() for key, read in self.mod.elements.items() if key.startswith(inside)}
        return {key.removeprefix(inside): value for key, value in found.items()}


def _table_of(frame: Any) -> ColumnTable:  # noqa: ANN401  (a pandas frame)
    columns = (Column(str(name), partial(frame.iloc.__getitem__, np.s_[:, i])) for i, name in enumerate(frame.columns))
    return ColumnTable(len(frame), Column(frame.index.name, lambda: frame.index), tuple(columns))


class ConcatSource:
    """A `Source` that concatenates the cells of other sources.

    The result's features, layers, dtypes, `var` and `uns` are determined by `anndata.concat` on one row of each source; rows are
    then read from the sources and converted to that form.

    Parameters
    ----------
    members : sequence of ConcatInput
        The sources.
    how : ConcatOptions
        How they are joined.

    Raises
    ------
    FeatureError, SourceError
        As of `concat`.
    """

    def __init__(self, members: Sequence[ConcatInput], how: ConcatOptions) -> None:
        self._members, self._how = tuple(members), how
        self._first = np.concatenate([[0], np.cumsum([len(member.cells) for member in members])]).tolist()
        keep_raw = self._keeps_raw()
        self._check_x()
        # In this order: `_sample_of` uses `_tables` and `_features`, `_columns` uses `_rows`, `_info` uses `_moves`.
        self._tables = self._whole_keys()
        self._features = {key: [m.features(key) for m in members] for key in ("var", "raw/var")[: 1 + keep_raw]}
        self._sample = how.joined(self._sample_of(i, keep_raw=keep_raw) for i in range(len(members)))
        self._rows = self._joined_rows()
        self._moves = {key: [self._columns(i, key) for i in range(len(members))] for key in self._rows}
        elements = dict.fromkeys((*self._tables, *self._features), "table")
        for group in ("varm", "varp", "uns"):
            elements |= {
                f"{group}/{name}": type(value).__name__ for name, value in getattr(self._sample, group).items()
            }
        infos = tuple(self._info(key) for key in self._rows)
        self._schema = SourceSchema("concat", "", self._first[-1], infos, {}, "concat", (), elements)

    def describe(self) -> SourceSchema:
        """Return the schema of the source without reading values."""
        return self._schema

    def cells(self) -> pa.Table:
        """Return the table of cells, the index as first column."""
        return frame_to_arrow(self._cells.frame())

    def features(self, key: str) -> pa.Table:
        """Return the table of features, the index as first column."""
        return frame_to_arrow(self.element(key))

    def table(self, key: str) -> ColumnTable | None:
        """Return the table of cells for reading a few columns at a time; None for other tables."""
        return self._cells if key == "obs" else None

    def element(self, key: str) -> Any:  # noqa: ANN401  (any element that AnnData knows)
        """Read a complete table or other element.

        Raises
        ------
        NotFoundError
            If there is none.
        SourceError
            If it cannot be put together.
        """
        group, _, name = key.partition("/")
        if key == "obs":
            return self._cells.frame()
        if key in self._tables:
            return getattr(self._how.joined(self._with_table(group, name)), group)[name]
        if key in self._features:
            return self._sample.raw.var if key == "raw/var" else self._sample.var
        if key in self._schema.elements:
            return getattr(self._sample, group)[name]
        raise NotFoundError(f"The sources have no element {key!r} together; they have {sorted(self._schema.elements)}.")

    def blocks(
        self, keys: tuple[str, ...], n_rows: int, rows: tuple[int, int] | None = None
    ) -> Iterator[tuple[Block, ...]]:
        """Iterate over blocks of rows of matrices, source by source, with at most `n_rows` per block; see `Source`."""
        start, stop = rows or (0, self._first[-1])
        for i, member in enumerate(self._members):
            low, high = max(start - self._first[i], 0), min(stop - self._first[i], len(member.cells))
            infos = [member.matrices.get(key, ()) for key in keys]
            asked = tuple(info.key for found in infos for info in found)
            # A source without any of these matrices still has rows, which are filled.
            if not asked:
                for at in range(low, high, n_rows):
                    yield tuple(self._filled(key, min(n_rows, high - at)) for key in keys)
            elif low < high:
                for blocks in member.source.blocks(asked, n_rows, (low, high)):
                    # One block for each matrix in `asked`; a key of a 10x source takes several, side by side.
                    waiting = iter(blocks)
                    parts = [[next(waiting) for _ in found] for found in infos]
                    yield tuple(
                        self._fitted(i, key, hstack_blocks(part)) if part else self._filled(key, blocks[0].n_rows)
                        for key, part in zip(keys, parts, strict=True)
                    )

    def present(self, key: str) -> NDArray[np.int64] | None:
        """Return None: row i of each matrix is cell i."""
        del key
        return None

    def close(self) -> None:
        """Leave the sources open; the caller closes them."""

    @cached_property
    def _cells(self) -> ColumnTable:
        return concat_cells([member.cells for member in self._members], self._how)

    def _keeps_raw(self) -> bool:
        having = [member.name for member in self._members if "raw/X" in member.matrices]
        if having and len(having) < len(self._members):
            said = f"raw is left out: {len(having)} of {len(self._members)} sources have it, {having[0]} among them."
            # Level 4 is the caller of `concat`, above `__init__` and this method.
            warnings.warn(said, UserWarning, stacklevel=4)
        return len(having) == len(self._members)

    def _check_x(self) -> None:
        without = [member.name for member in self._members if "X" not in member.matrices]
        if without and len(without) < len(self._members):
            raise SourceError(
                f"{without[0]} has no X, and other sources have; give it one, or copy the others without theirs (layers=)."
            )

    def _whole_keys(self) -> tuple[str, ...]:
        """Return which members of `obsm` and `layers` are no matrices of numbers in some source: they are joined whole."""
        having = [{*member.mod.elements, *member.matrices} for member in self._members]
        tables = {
            key for member in self._members for key in member.mod.elements if key.startswith(("obsm/", "layers/"))
        }
        return tuple(
            key for key in sorted(tables) if self._how.join == "outer" or all(key in present for present in having)
        )

    def _sample_of(self, i: int, *, keep_raw: bool) -> "AnnData":
        """Make an object of one row of zeros (none where there are no cells), with all that has no rows of cells."""
        import pandas as pd
        from anndata import AnnData

        member, how = self._members[i], self._how
        n = min(1, len(member.cells))
        obs = pd.DataFrame(index=pd.Index(["cell"] * n, dtype=object))
        rows = {key: _zeros(infos, n) for key, infos in member.matrices.items() if key not in self._tables}
        axes = {
            head: {key.removeprefix(f"{head}/"): row for key, row in rows.items() if key.startswith(f"{head}/")}
            for head in ("layers", "obsm")
        }
        for group, kept in (("varm", how.merge), ("varp", how.merge), ("uns", how.uns_merge)):
            axes[group] = member.group(group) if kept else {}
        var = self._features["var"][i]
        made = AnnData(X=rows.get("X"), obs=obs, var=var if how.merge else var[[]], **axes)
        if keep_raw:
            made.raw = AnnData(X=rows["raw/X"], obs=obs, var=self._features["raw/var"][i][[]])
        return made

    def _joined_rows(self) -> dict[str, Any]:
        """Return where matrices belong -> one row of each as it is joined."""
        made: Any = self._sample
        found = {} if made.X is None else {"X": made.X}
        for group in ("layers", "obsm"):
            found |= {f"{group}/{name}": row for name, row in getattr(made, group).items() if name is not None}
        return found if made.raw is None else {**found, "raw/X": made.raw.X}

    def _columns(self, i: int, key: str) -> NDArray[np.int64] | None:
        """Return which column of the result each of a source's is, -1 for none; None where they are the same."""
        width = self._rows[key].shape[1]
        if key.startswith("obsm/"):
            own = sum(info.shape[1] for info in self._members[i].matrices.get(key, ()))
            # anndata joins arrays of obsm by column number: an inner join keeps as many as the narrowest has.
            found = np.where(np.arange(own) < width, np.arange(own), -1)
        else:
            raw = key == "raw/X"
            names = self._sample.raw.var_names if raw else self._sample.var_names
            found = names.get_indexer(self._features["raw/var" if raw else "var"][i].index).astype(np.int64)
        return None if np.array_equal(found, np.arange(width)) else found

    def _info(self, key: str) -> MatrixInfo:
        row = self._rows[key]
        if row.dtype.kind not in NUMBER_KINDS:
            raise SourceError(
                f"{key} would have missing values among values of a type that has none, as some sources lack it or some of its "
                "features; say with fill_value= what stands for them, for instance False."
            )
        shape = (self._first[-1], *row.shape[1:])
        features = "" if key.startswith("obsm/") else "raw/var" if key == "raw/X" else "var"
        form = "csr" if hasattr(row, "format") else "dense"
        stored = [info for member in self._members for info in member.matrices.get(key, ())]
        counts = [info.n_entries for info in stored if info.form != "dense"]
        kept = all(columns is None or (columns >= 0).all() for columns in self._moves[key])
        # A fill value other than 0 is stored for each feature that a source lacks, so the sum would be too low.
        known = not self._fill(key) and form == "csr" and None not in counts and len(counts) == len(stored)
        n_entries = sum(n for n in counts if n is not None) if known else None
        return MatrixInfo(
            key, "csr" if form == "csr" else "dense", row.dtype, shape, features, n_entries=n_entries, exact=kept
        )

    def _fill(self, key: str) -> Any:  # noqa: ANN401  (a number)
        default = 0 if hasattr(self._rows[key], "format") else np.nan
        return default if self._how.fill_value is None else self._how.fill_value

    def _fitted(self, i: int, key: str, block: Block) -> Block:
        """Bring rows of a source into the form of the result."""
        row, columns = self._rows[key], self._moves[key][i]
        if hasattr(row, "format"):
            return _moved(_as_csr(block), columns, row, self._fill(key))
        if columns is None:
            return block
        out = self._filled(key, block.n_rows)
        out.layers["values"][:, columns[columns >= 0]] = block.layers["values"][:, columns >= 0]
        return out

    def _filled(self, key: str, n_rows: int) -> Block:
        """Make rows of a matrix that a source lacks."""
        row = self._rows[key]
        if not hasattr(row, "format"):
            shape = (n_rows, *row.shape[1:])
            return DenseBlock({"values": np.full(shape, self._fill(key) if row.size else 0, row.dtype)})
        nothing = CsrBlock(np.zeros(n_rows + 1, np.int64), np.empty(0, np.int32), {"values": np.empty(0, row.dtype)}, 0)
        return _moved(nothing, np.empty(0, np.int64), row, self._fill(key))

    def _with_table(self, group: str, name: str) -> "Iterator[AnnData]":
        """Give objects that hold one element, which is no matrix of numbers, of each source."""
        import pandas as pd
        from anndata import AnnData

        for member, var in zip(self._members, self._features["var"], strict=True):
            key = f"{group}/{name}"
            infos = member.matrices.get(key, ())
            read = member.mod.elements.get(key, partial(member.source.element, infos[0].key) if infos else None)
            found = {} if read is None else {name: read()}
            obs = ColumnTable(len(member.cells), member.cells.index, ()).frame()
            shared = {"var": pd.DataFrame(index=var.index)} if group == "layers" else {}
            yield AnnData(obs=obs, **shared, **{group: found})


def _zeros(infos: tuple[MatrixInfo, ...], n_rows: int) -> Any:  # noqa: ANN401  (an array or a sparse matrix)
    from scipy.sparse import csr_matrix

    shape: Any = (n_rows, sum(info.shape[1] for info in infos), *infos[0].shape[2:])
    dtype = np.result_type(*(info.dtype for info in infos))
    return np.zeros(shape, dtype) if infos[0].form == "dense" else csr_matrix(shape, dtype=dtype)


def _as_csr(block: Block) -> CsrBlock:
    if isinstance(block, CsrBlock):
        return block
    from scipy.sparse import csr_array

    made = csr_array(block.layers["values"])
    return CsrBlock(made.indptr.astype(np.int64), made.indices, {"values": made.data}, int(made.shape[1]))


def _moved(block: CsrBlock, columns: NDArray[np.int64] | None, row: Any, fill: float) -> CsrBlock:  # noqa: ANN401
    """Send columns where they belong, and put a value that is not 0 into those that the source lacks."""
    from scipy.sparse import csr_array

    if columns is None:
        return block
    width = row.shape[1]
    pointers, indices, values = remap_csr(block.indptr, block.indices, block.layers["values"], columns, width)
    if fill == 0:  # implicit entries are already 0
        return CsrBlock(pointers, indices, {"values": values}, width)
    lacking = np.setdiff1d(np.arange(width), columns)
    if not len(lacking):
        return CsrBlock(pointers, indices, {"values": values}, width)
    shape = (block.n_rows, width)
    bounds = np.arange(block.n_rows + 1) * len(lacking)
    filled = csr_array((np.full(bounds[-1], fill, row.dtype), np.tile(lacking, block.n_rows), bounds), shape)
    # The columns are disjoint, so the sum only merges rows; like any sum of SciPy it drops stored zeros.
    both = csr_array((values.astype(row.dtype), indices, pointers), shape) + filled
    return CsrBlock(both.indptr.astype(np.int64), both.indices, {"values": both.data}, width)
