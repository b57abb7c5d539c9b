"""Encoding of table columns for a CXG: 32-bit numbers, text, bytes for booleans, codes for categories; and their hints.

Encoded columns of long tables wait in temporary files until their table is written, so that memory is bounded.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raggedatlas.errors import SourceError
from raggedatlas.formats.element_writer import time_texts
from raggedatlas.model.frames import ColumnTable, Texts
from raggedatlas.model.frames import TableColumn as Given
from raggedatlas.store.runtime import release_unused_memory
from raggedatlas.wings.cxg.options import IN_TISSUE, INDEX, MISSING_TEXT, OBS, TRUTHS, VAR, ConversionLoss, CxgOptions
from raggedatlas.wings.cxg.tiledb_arrays import tiledb_errors

if TYPE_CHECKING:
    import pandas as pd

SPILL_ROWS = 1 << 17
"""Maximum rows of tables that stay in memory, where an encoded column takes about ten megabytes."""

BATCH_ROWS = 1 << 14
"""Rows of one batch in a file."""


@dataclass(frozen=True, slots=True)
class SpilledColumn:
    """A column in a file; rows are read on demand."""

    path: Path  # an Arrow file of one column
    n_rows: int
    dtype: np.dtype[Any]  # of a slice; text as objects

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        """Read consecutive rows, (k,) of its dtype."""
        start, stop, _ = rows.indices(self.n_rows)
        with tiledb_errors(self.path, writes=True), pa.memory_map(str(self.path)) as file:
            # On a memory map `read_all` copies nothing; only the chosen rows become NumPy values.
            column = pa.ipc.open_file(file).read_all().column(0).slice(start, stop - start)
            values: NDArray[Any] = column.to_numpy().astype(self.dtype)
            return values


def spill_column(path: Path, parts: Iterable[NDArray[Any]]) -> SpilledColumn:
    """Write a column to a file, in parts, (k,), of one dtype: numbers without missing values, or text as objects.

    The folder is created with the first column; its owner removes it.

    Examples
    --------
    >>> import tempfile
    >>> parts = [np.array(["a", "b"], object), np.array(["c"], object)]
    >>> kept = spill_column(Path(tempfile.mkdtemp()) / "0.arrow", parts)
    >>> len(kept), kept[1:3].tolist()
    (3, ['b', 'c'])
    """
    writer, n_rows, dtype = None, 0, np.dtype(object)
    with tiledb_errors(path, writes=True):
        path.parent.mkdir(exist_ok=True)
        with pa.OSFile(str(path), "wb") as file:
            for part in (batch for values in parts for batch in _batches(values)):
                dtype = part.dtype
                # `large_string` has 64-bit offsets, which a batch of long texts may need.
                values = pa.array(part, pa.large_string() if dtype.kind == "O" else None)
                batch = pa.record_batch([values], ["values"])
                writer = pa.ipc.new_file(file, batch.schema) if writer is None else writer
                writer.write_batch(batch)
                n_rows += len(part)
            if writer is not None:
                writer.close()
    release_unused_memory()
    return SpilledColumn(path, n_rows, dtype)


INT32 = np.iinfo(np.int32)
EXACT_IN_FLOAT32 = 2**24
"""Integers up to this size are exact in float32."""

MAX_CATEGORIES = 1000
MAX_CATEGORY_SHARE = 0.75
"""More categories than both are written as text, since viewers do not list them and the hints would be as long as the column."""

_ROWS = {OBS: "cells", VAR: "features"}


@dataclass(frozen=True, slots=True)
class EncodedColumn:
    """An encoded column."""

    name: str  # of the attribute
    values: NDArray[Any] | SpilledColumn  # (n,); text as objects; long columns are in a file
    hint: dict[str, Any]  # its entry in the hints


@dataclass(frozen=True, slots=True)
class Table:
    """An encoded table."""

    columns: tuple[EncodedColumn, ...]  # including the index
    index: str  # the column that viewers show
    losses: tuple[ConversionLoss, ...]
    # column of the frame -> its categories as labelled in the CXG, in the order of the frame
    labels: dict[str, list[str]]
    names: dict[str, str]  # column of the frame -> its name in the CXG

    def hints(self) -> dict[str, Any]:
        """Return the content of ``cxg_schema``."""
        return {INDEX: self.index, **{column.name: column.hint for column in self.columns}}


def encode_table(
    frame: "pd.DataFrame | ColumnTable",
    options: CxgOptions,
    axis: str = OBS,
    shown: str | None = None,
    spool: Path | None = None,
) -> Table:
    """Encode a table for a CXG, column by column.

    `axis` is ``"obs"`` or ``"var"``, whose categories are text, since viewers decode codes of cells only. `shown` is
    the column that viewers show as the index; None: the index itself. `spool` is a folder for the files of encoded
    columns, which stay in memory without. Raises C28 for integers beyond 32 bits, numbers beyond float32, and text that is not Unicode.

    Examples
    --------
    >>> import pandas as pd
    >>> table = encode_table(pd.DataFrame({"n": [1, 2]}, index=["a", "b"]), CxgOptions())
    >>> table.hints()
    {'index': 'name_0', 'name_0': {'type': 'string'}, 'n': {'type': 'int32'}}
    """
    if isinstance(frame, ColumnTable):
        given = frame
    else:
        # By position, since names of columns may repeat.
        series = [Given(str(name), partial(lambda i: frame.iloc[:, i], i)) for i, name in enumerate(frame.columns)]
        label: Any = frame.index.name
        given = ColumnTable(len(frame), Given(label, lambda: frame.index), tuple(series))
    names, losses = _names(axis, [str(column.name) for column in given.columns])
    encoder = _Encoder(options, axis, losses, spool)
    taken = set(names)
    at = _index_name(given.index.name, taken)
    if given.index.name is not None and at != given.index.name:
        encoder.note("index", "converted", f"its name {given.index.name!r} is taken; the column is {at!r}")
    columns = [encoder.index(at, given.index)]
    for name, column in zip(names, given.columns, strict=True):
        encoded = encoder.column(name, column)
        columns += [] if encoded is None else [encoded]
    kept = {column.name for column in columns}
    own = {str(column.name): name for column, name in zip(given.columns, names, strict=True) if name in kept}
    labels = {given_name: encoder.labels[name] for given_name, name in own.items() if name in encoder.labels}
    shown_as = own.get(shown, at) if shown is not None else at
    for stored in columns:
        if stored.name not in (at, shown_as) or stored.values.dtype != object:
            continue
        n_repeated = count_duplicates(partial(_batches, stored.values), len(stored.values))
        if n_repeated:
            what = f"{n_repeated:,} of its names occur before; viewers show one of the {_ROWS[axis]} of a name"
            encoder.note("index" if stored.name == at else stored.name, "kept", what)
    return Table(tuple(columns), shown_as, tuple(encoder.losses), labels, own)


def _batches(values: NDArray[Any] | SpilledColumn) -> Iterator[NDArray[Any]]:
    for start in range(0, len(values), BATCH_ROWS):
        yield values[start : start + BATCH_ROWS]


def _names(axis: str, given: list[str]) -> tuple[list[str], list[ConversionLoss]]:
    """Rename columns whose name is not a valid attribute, or a key of the hints."""
    names: list[str] = []
    losses = []
    for name in given:
        # TileDB ends names at NUL, takes no half characters and reserves those with `__`; `index` is a key of the hints with another meaning.
        plain = name.replace("\0", "").encode(errors="replace").decode()
        plain = f"_{plain.lstrip('_')}" if plain.startswith("__") else plain
        plain = f"{plain or 'column'}_" if plain in (INDEX, "") else plain
        while plain in names or (plain != name and plain in given):
            plain += "_"
        if plain != name:
            text = f"a CXG has no column of that name; it is written as {plain!r}"
            losses.append(ConversionLoss(f"{axis}/{name}", "converted", text))
        names.append(plain)
    return names, losses


def _index_name(name: Any, taken: Collection[str]) -> str:  # noqa: ANN401
    if isinstance(name, str) and name not in taken and not _names(OBS, [name])[1]:
        return name
    k = 0
    while f"name_{k}" in taken:
        k += 1
    return f"name_{k}"


class _Encoder:
    """Encoder of columns, which records changes."""

    def __init__(self, options: CxgOptions, axis: str, losses: list[ConversionLoss], spool: Path | None) -> None:
        self.options, self.axis, self.losses, self._spool = options, axis, losses, spool
        # In 0.2.0 all categories are text.
        self.by_codes = axis == OBS and options.profile == "0.3.0"
        self._numbers = count()
        self.labels: dict[str, list[str]] = {}

    def note(self, name: str, fate: Any, what: str) -> None:  # noqa: ANN401
        self.losses.append(ConversionLoss(f"{self.axis}/{name}", fate, what))

    def index(self, name: str, given: Given) -> EncodedColumn:
        import pandas as pd

        index = given.read()
        if isinstance(index, Texts):
            return self._texts(name, index)
        encoded = self._text(name, pd.Series(index.to_numpy(object)))
        if not all(isinstance(value, str) for value in index):
            self.note("index", "converted", "its names are written as text")
        return self._spill(encoded)

    def column(self, name: str, given: Given) -> EncodedColumn | None:
        values = given.read()
        if isinstance(values, Texts):
            return self._texts(name, values)
        encoded = self._encoded(name, values)
        return None if encoded is None else self._spill(encoded)

    def _spill(self, column: EncodedColumn) -> EncodedColumn:
        if self._spool is None or isinstance(column.values, SpilledColumn):
            return column
        return replace(column, values=self._spilled(self._spool, [column.values]))

    def _spilled(self, spool: Path, parts: Iterable[NDArray[Any]]) -> SpilledColumn:
        return spill_column(spool / f"{next(self._numbers)}.arrow", parts)

    def _texts(self, name: str, texts: Texts) -> EncodedColumn:
        """Encode text in blocks, without missing values."""
        blocks = (self._checked(name, block) for block in texts.even(BATCH_ROWS))
        values = np.concatenate(list(blocks)) if self._spool is None else self._spilled(self._spool, blocks)
        return EncodedColumn(name, values, {"type": "string"})

    def _checked(self, name: str, block: NDArray[np.object_]) -> NDArray[np.object_]:
        self._require_unicode(name, block.tolist())
        return block

    def _encoded(self, name: str, series: "pd.Series[Any]") -> EncodedColumn | None:
        import pandas as pd

        numeric = getattr(series.dtype, "kind", "O") in "iuf"
        if self.axis == OBS and name == IN_TISSUE and numeric and series.isin((0, 1)).all():
            self.note(name, "converted", "0 and 1 are written as booleans, as viewers expect")
            series = series.astype(bool)
        dtype: Any = series.dtype
        if isinstance(dtype, pd.CategoricalDtype):
            values: Any = series.array
            if values.ordered:
                self.note(name, "converted", "that the categories are ordered; they keep their order")
            kind = values.categories.dtype
            if isinstance(kind, np.dtype) and kind.kind in "iuf":
                return self._numeric_categories(name, values)
            if kind.kind == "b":
                self.note(name, "converted", "booleans as categories are written as text")
            labels = self.labels[name] = [_text(category) for category in values.categories]
            if len(set(labels)) < len(labels):
                self.note(name, "changed", "different categories with the same text become one")
                texts = pd.Series(pd.Categorical(values)).map(dict(zip(values.categories, labels, strict=True)))
                values = pd.Categorical(texts, categories=list(dict.fromkeys(labels)))
            else:
                values = pd.Categorical.from_codes(values.codes, categories=pd.Index(labels, dtype=object))
            if self.options.sort_categories:
                values = values.reorder_categories(sorted(values.categories))
            if _has_too_many(values):
                self.note(name, "converted", f"its {len(values.categories):,} categories are written as text")
                # `collect_metadata` writes colours for every column with labels; as text this one has no categories.
                del self.labels[name]
                return self._text(name, pd.Series(values.astype(object)))
            return self._categories(name, values)
        if isinstance(dtype, pd.StringDtype) or dtype.kind in "OUS":
            if not all(isinstance(value, str) for value in series.dropna()):
                self.note(name, "converted", "values that are no text are written as text")
            return self._text(name, series, by_codes=self.by_codes)
        nullable = not isinstance(dtype, np.dtype)
        if dtype.kind == "b":
            return self._booleans(name, series, nullable=nullable)
        if dtype.kind in "iu":
            return self._integers(name, series, nullable=nullable)
        if dtype.kind == "f":
            if nullable or dtype.itemsize == 2:
                self.note(name, "converted", f"{dtype} is written as float32")
            return self._floats(name, series.to_numpy(np.float64 if nullable else None, na_value=np.nan))
        if dtype.kind in "mM":
            self.note(name, "converted", "times are written as text")
            return self._text(name, time_texts(series), by_codes=self.by_codes)
        self.note(name, "lost", f"a CXG has no columns of {dtype}")
        return None

    def _text(self, name: str, series: "pd.Series[Any]", *, by_codes: bool = False) -> EncodedColumn:
        """Encode text; with `by_codes`, text with missing values as categories, whose code -1 says what text cannot."""
        import pandas as pd

        missing = series.isna().to_numpy()
        values = np.empty(len(series), object)
        values[:] = [_text(v) for v in series.to_numpy(object)]
        self._require_unicode(name, values.tolist())
        if missing.any():
            values[missing] = None
            categories: Any = pd.Categorical(values)
            if by_codes and not _has_too_many(categories):
                self.note(name, "converted", "text with missing values is written as categories")
                return self._categories(name, categories)
            text = f"{int(missing.sum()):,} missing values are written as the text {MISSING_TEXT!r}"
            self.note(name, "changed", text)
            values[missing] = MISSING_TEXT
        return EncodedColumn(name, values, {"type": "string"})

    def _require_unicode(self, name: str, values: list[str]) -> None:
        try:
            # Joined, the column is encoded by one call; halves of characters do not merge into a valid one.
            "".join(values).encode()
        except UnicodeEncodeError as error:
            raise SourceError(
                f"C28: {self.axis} column {name!r} has text that is not Unicode ({error.reason}); correct it, or leave the column out."
            ) from error

    def _booleans(self, name: str, series: "pd.Series[Any]", *, nullable: bool) -> EncodedColumn:
        missing = series.isna().to_numpy()
        if missing.any():
            self.note(name, "converted", "booleans with missing values are written as categories")
            import pandas as pd

            codes = np.where(missing, -1, series.fillna(value=False).to_numpy(bool))
            return self._categories(name, pd.Categorical.from_codes(codes, categories=pd.Index(TRUTHS, dtype=object)))
        if nullable:
            self.note(name, "converted", f"{series.dtype} is written as booleans without missing values")
        values = series.to_numpy(bool)
        # Viewers list the categories that occur; a column without a False has codes beyond them.
        whole = self.by_codes and bool(values.all())
        hint = {"type": "categorical", "categories": list(TRUTHS)} if whole else {"type": "boolean"}
        return EncodedColumn(name, values.astype(np.uint8), hint)

    def _integers(self, name: str, series: "pd.Series[Any]", *, nullable: bool) -> EncodedColumn:
        missing = series.isna().to_numpy()
        # By default pandas returns objects for some dtypes.
        known = series[~missing].to_numpy(f"{series.dtype.kind}8" if nullable else None)
        low, high = (int(known.min()), int(known.max())) if len(known) else (0, 0)
        if low < INT32.min or high > INT32.max or (missing.any() and max(-low, high) > EXACT_IN_FLOAT32):
            extent = (low, high)
            if self.options.wide_integers != "text":
                raise SourceError(
                    f"C28: {self.axis} column {name!r} ({series.dtype}) has integers from {extent[0]:,} to {extent[1]:,}, and a CXG "
                    "has 32 bits (24 with missing values). Scale them, leave the column out, or pass wide_integers='text'."
                )
            self.note(name, "converted", f"{series.dtype} beyond 32 bits is written as text")
            return self._text(name, series, by_codes=self.by_codes)
        if missing.any():
            self.note(name, "converted", f"{series.dtype} with missing values is written as float32 with NaN")
            return EncodedColumn(name, series.to_numpy(np.float32, na_value=np.nan), {"type": "float32"})
        if str(series.dtype) != "int32":
            self.note(name, "converted", f"{series.dtype} is written as int32")
        # `known` is the column itself here, since nothing is missing.
        return EncodedColumn(name, known.astype(np.int32), {"type": "int32"})

    def _floats(self, name: str, values: NDArray[Any]) -> EncodedColumn:
        with np.errstate(over="ignore"):
            small = values.astype(np.float32)
        over = np.flatnonzero(np.isinf(small) & np.isfinite(values))
        if len(over):
            raise SourceError(
                f"C28: {self.axis} column {name!r} has the value {values[over[0]]} in row {int(over[0]):,}, beyond 32 bits. "
                "Scale the column, or leave it out."
            )
        changed = int((small.astype(values.dtype) != values)[~np.isnan(values)].sum())
        if changed:
            self.note(name, "rounded", f"{changed:,} of {len(values):,} values of {values.dtype}")
        elif values.dtype == np.float64:
            self.note(name, "converted", "float64 is written as float32; every value is exact")
        return EncodedColumn(name, small, {"type": "float32"})

    def _categories(self, name: str, categorical: "pd.Categorical") -> EncodedColumn:
        labels = [str(category) for category in categorical.categories]
        # Where they are text, `_encoded` has set them in the order of the frame, in which `uns` has the colours.
        self.labels.setdefault(name, labels)
        if self.by_codes:
            return EncodedColumn(name, np.asarray(categorical.codes), {"type": "categorical", "categories": labels})
        codes = np.asarray(categorical.codes)
        missing = int((codes < 0).sum())
        shown = labels
        if missing and self.axis == OBS:
            self.note(name, "changed", f"{missing:,} missing values become the category {MISSING_TEXT!r}")
            shown = list(dict.fromkeys([*labels, MISSING_TEXT]))
        elif missing and MISSING_TEXT in labels:
            self.note(name, "changed", f"{missing:,} missing values join the category {MISSING_TEXT!r}")
        # Code -1, a missing value, takes the last item, which is `nan`.
        values = np.array([*labels, MISSING_TEXT], object)[codes]
        return EncodedColumn(name, values, {"type": "categorical", "categories": shown})

    def _numeric_categories(self, name: str, categorical: "pd.Categorical") -> EncodedColumn:
        """Encode categories that are numbers as those numbers, which viewers enumerate."""
        import pandas as pd

        kept = np.unique(categorical.categories.to_numpy()[np.unique(categorical.codes[categorical.codes >= 0])])
        if list(kept) != list(categorical.categories):
            self.note(name, "changed", "numbers as categories lose unused ones, and are read back sorted")
        self.labels[name] = [label_of(value) for value in categorical.categories.tolist()]
        values = pd.Series(categorical.astype("Int64" if categorical.categories.dtype.kind in "iu" else np.float64))
        # `Int64` would be reported as a nullable column, which the frame does not have.
        whole = values.astype(categorical.categories.dtype) if not values.isna().any() else values
        encoded = self._encoded(name, whole)
        assert encoded is not None
        is_text = encoded.values.dtype == object
        return encoded if is_text else replace(encoded, hint={"type": "categorical"})


def _has_too_many(values: "pd.Categorical") -> bool:
    return len(values.categories) > max(MAX_CATEGORIES, MAX_CATEGORY_SHARE * len(values))


def label_of(value: Any) -> str:  # noqa: ANN401
    """Return the label of a category in viewers: integers without a decimal point, whatever the dtype.

    Examples
    --------
    >>> label_of(2), label_of(2.0), label_of(0.5), label_of("B")
    ('2', '2', '0.5', 'B')
    """
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _text(value: Any) -> str:  # noqa: ANN401
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else str(value)


MAX_HASHES = 1 << 23
"""Number of hashes kept at once; they take 8 bytes each, and twice that while they are sorted."""


def count_duplicates(blocks: Callable[[], Iterable[NDArray[Any]]], n: int) -> int:
    """Count repeated names, by hashes of 64 bits, in bounded memory.

    Each call of `blocks` iterates over all `n` names, as (k,) arrays of text; it is called once for each `MAX_HASHES`
    names.

    Examples
    --------
    >>> count_duplicates(lambda: [np.array(["a", "b"], object), np.array(["a", "a"], object)], 4)
    2
    """
    import pandas as pd

    n_parts, n_repeated = np.uint64(1 + n // MAX_HASHES), 0
    # Equal names have equal hashes and so fall into one part, which is sorted by itself.
    for part in range(int(n_parts)):
        hashes = (pd.util.hash_array(block.astype(object), categorize=False) for block in blocks())
        own = np.sort(np.concatenate([np.empty(0, np.uint64), *(each[each % n_parts == part] for each in hashes)]))
        n_repeated += int(np.count_nonzero(own[1:] == own[:-1]))
    return n_repeated


def make_names_unique(names: "pd.Series[Any]") -> "list[str]":
    """Return unique names of features: the name, followed by the id if it is not unique; the id if the name is missing.

    `names` is text, indexed by id. The result has its order, and is unique if ids are.

    Examples
    --------
    >>> import pandas as pd
    >>> make_names_unique(pd.Series(["CD3D", "TBCE", "TBCE", None], index=["a", "b", "c", "d"]))
    ['CD3D', 'TBCE (b)', 'TBCE (c)', 'd']
    """
    texts = ["" if missing else str(name) for name, missing in zip(names, names.isna(), strict=True)]
    counts = Counter(texts)
    ids = map(str, names.index)
    return [
        text if text and counts[text] == 1 else f"{text} ({one})" if text else one
        for text, one in zip(texts, ids, strict=True)
    ]
