"""Options of a loader, and their checks that need no data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, get_args

import numpy as np

from raggedatlas.errors import QueryError
from raggedatlas.loader.order import Even, Sampler, Shuffle

OutputFormat = Literal["csr", "dense", "torch", "torch-dense"]
"""Compressed rows, dense arrays, sparse CSR tensors, or dense tensors."""


class ReadChoices(TypedDict, total=False):
    """Keyword arguments of `Loader` and `CellDataset` about what is read, all optional.

    Attributes
    ----------
    layers, features : sequence of str
        As `Query.layers` and `Query.features`, which they replace.
    categories : mapping of str to sequence
        Column -> its categories, in the order of their codes; so that a training and a test query number them alike. Values that are
        not among them become -1.
    dtype : str or numpy dtype, or None
        Of the values; None is ``float32`` for dense arrays and tensors, and the layers' own for ``"csr"``.
    sort : bool
        Sort the columns of every sparse row; they need not be else, but sparse tensors always are.
    buffers : int
        Buffers kept for reuse once their batch is released; 0 allocates new memory each time.
    results : sequence of str
        As `Query.with_results`: results of models, which are in ``batch.spaces`` by name.
    """

    layers: Sequence[str]
    features: Sequence[str]
    categories: Mapping[str, Sequence[Any]]
    dtype: Any
    sort: bool
    buffers: int
    results: Sequence[str]


class LoaderChoices(ReadChoices, total=False):
    """Keyword arguments of `Loader`, all optional; at most one of `weights`, `balance`, `group` and `sampler`.

    Attributes
    ----------
    rank, world_size : int
        This process among those that train together.
    even : {"pad", "drop"} or None
        None gives every cell to exactly one rank, so that ranks may differ by one cell and now and then by one batch; ``"pad"`` and
        ``"drop"`` give every rank the same number of cells and batches, as distributed training needs.
    drop_last : bool
        Whole batches only, on every rank the same number.
    weights : (n_cells,) array, or str
        Draw cells with replacement in proportion to a weight, or to a numeric column.
    balance : str
        Draw with replacement so that every value of this column is as likely; cells without a value are left out.
    group : str
        Batches of cells that share their value of this column; cells without a value are left out.
    sampler : callable
        A strategy of your own: called with the number of cells and a seeded generator, it returns the cells of an epoch.
        Equal arguments must give equal cells, and spawned workers need one that can be pickled.
    n_samples : int or None
        Cells of an epoch where they are drawn; None is as many as there are.
    block_size, buffer_size : int
        For ``shuffle="blocks"``: cells of a block, and how many cells are read and shuffled together.
    threads : int or None
        Threads that each read whole batches; 0 reads in the caller. None is one per core, at most 4, and 0 in a worker.
    prefetch : int or None
        Batches read ahead; None is one read for each thread. Memory is bounded by it.
    device : str or None
        For tensors: ``"cuda"`` moves batches through pinned memory on a stream of their own.
    pin_memory : bool
        For tensors: put them into pinned memory.
    """

    rank: int
    world_size: int
    even: Even
    drop_last: bool
    weights: Any
    balance: str
    group: str
    sampler: Sampler
    n_samples: int | None
    block_size: int
    buffer_size: int
    threads: int | None
    prefetch: int | None
    device: str | None
    pin_memory: bool


@dataclass(frozen=True)
class ReadOptions:
    """`ReadChoices` with every default filled in.

    Parameters
    ----------
    obs : tuple of str, or None
        Metadata columns; None takes those that the query names.
    as_ : {"csr", "dense", "torch", "torch-dense"}
        What values come as.
    """

    obs: tuple[str, ...] | None = None
    as_: OutputFormat = "csr"
    layers: Sequence[str] = ()
    features: Sequence[str] = ()
    categories: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    dtype: Any = None
    sort: bool = False
    device: str | None = None
    pin_memory: bool = False
    buffers: int = 8
    results: Sequence[str] = ()

    @property
    def tensors(self) -> bool:
        """Whether batches hold tensors."""
        return self.as_ in {"torch", "torch-dense"}

    @property
    def pins(self) -> bool:
        """Whether tensors are put into pinned memory."""
        return self.pin_memory or (self.device is not None and self.device.startswith("cuda"))

    @property
    def value_dtype(self) -> np.dtype[Any] | None:
        """The dtype of the values; None for the layers' own."""
        asked = self.dtype
        if asked is None and self.as_ != "csr":
            asked = np.float32
        dtype: np.dtype[Any] | None = None if asked is None else np.dtype(asked)
        return dtype


@dataclass(frozen=True)
class LoaderOptions:
    """What of `LoaderChoices` is not about reading, with every default filled in."""

    batch_size: int = 512
    shuffle: Shuffle = "full"
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    even: Even = None
    drop_last: bool = False
    weights: Any = None
    balance: str | None = None
    group: str | None = None
    sampler: Sampler | None = None
    n_samples: int | None = None
    block_size: int = 64
    buffer_size: int = 4096
    threads: int | None = None
    prefetch: int | None = None

    @property
    def strategy_column(self) -> str | None:
        """The metadata column that the strategy needs."""
        return self.weights if isinstance(self.weights, str) else self.balance or self.group


def split_choices(call: str, choices: Mapping[str, Any]) -> tuple[ReadOptions, LoaderOptions]:
    """Check keyword arguments and fill in the defaults.

    Raises
    ------
    QueryError
        For an unknown name, or a value that means nothing.
    """
    reading, walking = set(ReadOptions.__dataclass_fields__), set(LoaderOptions.__dataclass_fields__)
    if call != "Loader":
        reading, walking = reading - {"device", "pin_memory"}, set()
    unknown = sorted(set(choices) - reading - walking)
    if unknown:
        raise QueryError(f"{call} does not know {unknown}; it takes {sorted(reading | walking)}.")
    read = ReadOptions(**{k: v for k, v in choices.items() if k in reading})
    walk = LoaderOptions(**{k: v for k, v in choices.items() if k in walking})
    _check_read(call, read)
    _check_numbers(walk)
    _check_walk(walk)
    return read, walk


def _check_read(call: str, options: ReadOptions) -> None:
    _among(call, "as_", options.as_, get_args(OutputFormat))
    # A text is a sequence too, and would be taken for a list of letters.
    for name in ("obs", "layers", "features", "results"):
        if isinstance(getattr(options, name), str):
            raise QueryError(f"{call} takes {name} as a list of names, not {getattr(options, name)!r}.")
    _whole(call, "buffers", options.buffers, 0)
    if (options.device is not None or options.pin_memory) and not options.tensors:
        raise QueryError(
            f"{call}: device and pin_memory are for tensors, not as_={options.as_!r}; ask for as_='torch'."
        )
    try:
        kind = np.dtype(options.dtype).kind if options.dtype is not None else "f"
    except TypeError as error:
        raise QueryError(f"{call} does not know the dtype {options.dtype!r}; e.g. 'float32'.") from error
    if kind not in "fiu":
        raise QueryError(f"{call} gives numbers, not {options.dtype!r}; e.g. dtype='float32'.")


def _check_numbers(options: LoaderOptions) -> None:
    least = {"batch_size": 1, "seed": 0, "rank": 0, "world_size": 1, "block_size": 1, "buffer_size": 1}
    for name, lowest in least.items():
        _whole("Loader", name, getattr(options, name), lowest)
    for name, lowest in {"n_samples": 1, "threads": 0, "prefetch": 1}.items():
        if getattr(options, name) is not None:
            _whole("Loader", name, getattr(options, name), lowest)
    if options.rank >= options.world_size:
        raise QueryError(
            f"Loader: rank {options.rank} is not one of {options.world_size} ranks; they are numbered from 0."
        )


def _check_walk(options: LoaderOptions) -> None:
    _among("Loader", "shuffle", options.shuffle, ("full", "blocks", None))
    _among("Loader", "even", options.even, ("pad", "drop", None))
    given = [name for name in ("weights", "balance", "group", "sampler") if getattr(options, name) is not None]
    if len(given) > 1:
        raise QueryError(f"Loader takes one of {given}, not {len(given)}: each decides alone which cells are chosen.")
    if given and options.shuffle == "blocks":
        raise QueryError(f"Loader: shuffle='blocks' shuffles every cell; with {given[0]} leave it out.")
    if given and given[0] in {"weights", "balance"} and options.shuffle is None:
        raise QueryError(f"Loader: {given[0]} draws by chance, which shuffle=None excludes; leave it out.")
    # An epoch of groups has every cell with a value once, so its length is given.
    if options.n_samples is not None and (not given or given[0] == "group"):
        raise QueryError("Loader: n_samples is for weights, balance and sampler; other epochs hold every cell once.")
    if options.sampler is not None and not callable(options.sampler):
        raise QueryError(f"Loader: sampler is a function of (n_cells, generator), not {options.sampler!r}.")


def _among(call: str, name: str, value: object, known: Sequence[object]) -> None:
    # Only texts are compared by `==`, which gives an array for an array.
    if not any(value is one or (isinstance(value, str) and value == one) for one in known):
        raise QueryError(f"{call} takes {name} from {list(known)}, not {value!r}.")


def _whole(call: str, name: str, value: object, least: int) -> None:
    # A bool is an `int` in Python.
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise QueryError(f"{call} takes {name} as a whole number from {least} on, not {value!r}.")
