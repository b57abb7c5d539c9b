"""Datasets that a data request can name: one class to derive from, and the registry that deriving fills."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from raggedatlas.errors import NotFoundError, QueryError, SchemaError
from raggedatlas.results.schema import OBJECT_ID


class HyraxDataset:
    """A dataset that a data request can name by its class (seed 003, steps 2 and 5).

    A subclass has ``__len__``, is made as ``cls(config=..., data_location=...)``, and every method ``get_<field>(row)`` of it
    is a field. Where it also has ``read_batch(rows, fields)``, whole batches are read through that.

    Parameters
    ----------
    config : mapping
        Configuration, kept as `config`.

    Examples
    --------
    >>> class Ones(HyraxDataset):
    ...     def __len__(self) -> int:
    ...         return 2
    >>> HyraxDataset.registry["Ones"] is Ones
    True
    """

    registry: ClassVar[dict[str, type["HyraxDataset"]]] = {}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def __init_subclass__(cls, **options: Any) -> None:  # noqa: ANN401
        """Enter the class under its name; the last of a name counts."""
        super().__init_subclass__(**options)
        if not hasattr(cls, "__len__"):
            raise SchemaError(f"Dataset class {cls.__name__} has no __len__; a dataset says how many objects it has.")
        HyraxDataset.registry[cls.__name__] = cls

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration that the dataset was made with."""
        return self._config


def field_names(dataset: object) -> tuple[str, ...]:
    """Name the fields of a dataset: what its methods ``get_<field>`` are called after, sorted."""
    return tuple(sorted(name.removeprefix("get_") for name in dir(dataset) if name.startswith("get_")))


def find_class(name: str, known: Iterable[type] = ()) -> type[Any]:
    """Find a dataset class by its name, or by the path it is imported from.

    Parameters
    ----------
    name : str
        ``"ResultDataset"``, or e.g. ``"my_package.datasets.Images"``.
    known : iterable of type
        Further classes.

    Raises
    ------
    NotFoundError
        If there is none.
    """
    from importlib import import_module

    classes = {**HyraxDataset.registry, **{each.__name__: each for each in known}}
    if name in classes:
        return classes[name]
    module, _, last = name.rpartition(".")
    if module:
        try:
            found = getattr(import_module(module), last, None)
        except ImportError as error:
            raise NotFoundError(f"There is no dataset class {name!r}: {error}.") from error
        if isinstance(found, type):
            return found
    raise NotFoundError(
        f"There is no dataset class {name!r}; known are {', '.join(sorted(classes))}. Others are named by where they are "
        "imported from, e.g. 'my_package.datasets.Images'."
    )


_KEYS = {"dataset_class", "data_location", "fields", "primary_id_field", "join_field", "dataset_config"}


@dataclass(frozen=True)
class DatasetRequest:
    """One dataset of a group.

    Parameters
    ----------
    name : str
        What the request calls it.
    dataset_class : str
        Name of the class, or where it is imported from.
    data_location : str or None
        Absolute path, or URL.
    fields : tuple of str or None
        Which fields; None means all.
    primary_id_field : str or None
        Of the one dataset that says which rows there are: the field of its ids.
    join_field : str or None
        Of another dataset: the field that is matched with those ids. Without, its rows stand in the same order.
    dataset_config : mapping
        Configuration of this dataset, over the general one.
    """

    name: str
    dataset_class: str
    data_location: str | None = None
    fields: tuple[str, ...] | None = None
    primary_id_field: str | None = None
    join_field: str | None = None
    dataset_config: Mapping[str, Any] = field(default_factory=dict)


def parse_group(group: Any) -> tuple[DatasetRequest, ...]:  # noqa: ANN401  (whatever a configuration holds)
    """Check a group of a data request.

    Parameters
    ----------
    group : mapping
        Name of a dataset -> its definition.

    Returns
    -------
    tuple of DatasetRequest
        In the order asked for; exactly one has a `primary_id_field`.

    Raises
    ------
    QueryError
        If something is missing, unknown, or contradicts the rest; the dataset is named. A group of one dataset needs no
        ``primary_id_field``: it is ``object_id`` then.

    Examples
    --------
    >>> parse_group({"a": {"dataset_class": "ResultDataset", "data_location": "s3://b/run"}})[0].primary_id_field
    'object_id'
    """
    if not isinstance(group, Mapping) or not group:
        raise QueryError(
            "A data request names no datasets; expected at least one, e.g. {'results': {'dataset_class': ...}}."
        )
    requests = [_read_one(name, definition) for name, definition in group.items()]
    primary = [request for request in requests if request.primary_id_field is not None]
    if not primary and len(requests) == 1:
        only = requests[0]
        if only.join_field is not None:
            raise QueryError(f"Dataset {only.name!r} has a join_field, but there is no other dataset to join with.")
        return (DatasetRequest(**{**vars(only), "primary_id_field": OBJECT_ID}),)
    if len(primary) != 1:
        raise QueryError(
            f"A data request has one dataset with a primary_id_field, and {[each.name for each in primary]} have one; it says "
            f"which of {[each.name for each in requests]} decides which rows there are."
        )
    return tuple(requests)


def _read_one(name: str, definition: Any) -> DatasetRequest:  # noqa: ANN401
    if not isinstance(definition, Mapping):
        raise QueryError(f"Dataset {name!r} is {definition!r:.80}; expected a table with its dataset_class.")
    if name == OBJECT_ID:
        raise QueryError(f"No dataset can be called {OBJECT_ID!r}, which is where the ids stand in a sample.")
    unknown = sorted(map(str, definition.keys() - _KEYS))
    if unknown:
        raise QueryError(f"Dataset {name!r} has unknown keys {unknown}; known are {sorted(_KEYS)}.")
    told = {key: value for key, value in definition.items() if value not in (None, False)}
    if not isinstance(told.get("dataset_class"), str):
        raise QueryError(f"Dataset {name!r} names no dataset_class.")
    if "primary_id_field" in told and "join_field" in told:
        raise QueryError(f"Dataset {name!r} has a primary_id_field and a join_field; it has one or the other.")
    fields = told.get("fields")
    if fields is not None and (isinstance(fields, str) or not isinstance(fields, Sequence)):
        raise QueryError(f"Dataset {name!r} asks for the fields {fields!r}; expected a list of names.")
    location = told.get("data_location")
    return DatasetRequest(
        **{**told, "name": name, "fields": None if fields is None else tuple(fields),
           "data_location": None if location is None else absolute_location(location)}
    )  # fmt: skip


def absolute_location(location: str | os.PathLike[str]) -> str:
    """Make a path absolute; a URL stays as it is.

    Examples
    --------
    >>> absolute("s3://bucket/run")
    's3://bucket/run'
    """
    text = os.fspath(location)
    return text if "://" in text else str(Path(text).expanduser().absolute())


def merge_config(base: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one configuration over another, table by table; neither is changed.

    Examples
    --------
    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    made = dict(base)
    for key, value in above.items():
        below = made.get(key)
        made[key] = merge_config(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return made
