"""Dataset classes that a data request can name, and parsing of data requests."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from raggedatlas.errors import NotFoundError, QueryError, SchemaError
from raggedatlas.store.location import local_path
from raggedatlas.wings.results.schema import OBJECT_ID


class HyraxDataset:
    """Base class of datasets that a data request can name by class.

    A subclass defines ``__len__``, is constructed as ``cls(config=..., data_location=...)``, and each method ``get_<field>(row)``
    defines a field. If it also has ``read_batch(rows, fields)``, complete batches are read with that.

    Parameters
    ----------
    config : mapping
        Configuration, available as `config`.

    References
    ----------
    Hyrax, Lance Storage Layer Design Document, Step 2.

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
        """Register the class under its name; a later class of the same name replaces it."""
        super().__init_subclass__(**options)
        if not hasattr(cls, "__len__"):
            raise SchemaError(f"Dataset class {cls.__name__} does not define __len__, the number of its objects.")
        HyraxDataset.registry[cls.__name__] = cls

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration of the dataset."""
        return self._config


def field_names(dataset: object) -> tuple[str, ...]:
    """Return the sorted field names of a dataset, one for each method ``get_<field>``."""
    # `dir` of the instance: `ResultDataset` lists getters that are known only from its table.
    return tuple(sorted(name.removeprefix("get_") for name in dir(dataset) if name.startswith("get_")))


def find_class(name: str, known: Iterable[type] = ()) -> type[Any]:
    """Find a dataset class by its name or import path, e.g. ``"my_package.datasets.Images"``.

    `known` are classes to find by name in addition to registered ones.
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
            raise NotFoundError(f"Dataset class {name!r} cannot be imported: {error}.") from error
        if isinstance(found, type):
            return found
    raise NotFoundError(
        f"There is no dataset class {name!r}; known are {', '.join(sorted(classes))}. Other classes are named by their import path, "
        "e.g. 'my_package.datasets.Images'."
    )


_KEYS = {"dataset_class", "data_location", "fields", "primary_id_field", "join_field", "dataset_config"}


@dataclass(frozen=True)
class DatasetRequest:
    """One dataset of a data request group."""

    name: str  # of the dataset in the request
    dataset_class: str  # name or import path
    data_location: str | None = None  # absolute path or URL
    fields: tuple[str, ...] | None = None  # to read; None means all
    primary_id_field: str | None = None  # for the dataset that defines the rows: the field with their ids
    # for any other dataset: the field that is matched with those ids; without it, rows are matched by position
    join_field: str | None = None
    dataset_config: Mapping[str, Any] = field(default_factory=dict)  # overrides the general one


def parse_group(group: Any) -> tuple[DatasetRequest, ...]:  # noqa: ANN401  (whatever a configuration holds)
    """Parse and validate a group of a data request: name of a dataset -> its definition.

    The result is in the requested order, and exactly one dataset has a `primary_id_field`. A group of one dataset needs
    none: it is ``object_id`` then. Raises `QueryError`, which names the dataset, if the group is incomplete, has
    unknown keys or contradicts itself.

    Examples
    --------
    >>> parse_group({"a": {"dataset_class": "ResultDataset", "data_location": "s3://b/run"}})[0].primary_id_field
    'object_id'
    """
    if not isinstance(group, Mapping) or not group:
        raise QueryError(
            "The data request names no datasets; expected at least one, e.g. {'results': {'dataset_class': ...}}."
        )
    requests = [_read_one(name, definition) for name, definition in group.items()]
    primary = [request for request in requests if request.primary_id_field is not None]
    if not primary and len(requests) == 1:
        only = requests[0]
        if only.join_field is not None:
            raise QueryError(f"Dataset {only.name!r} has a join_field, but there is no other dataset to join.")
        return (DatasetRequest(**{**vars(only), "primary_id_field": OBJECT_ID}),)
    if len(primary) != 1:
        raise QueryError(
            f"Exactly one dataset of a data request must have a primary_id_field, which defines the rows; of "
            f"{[each.name for each in requests]}, {[each.name for each in primary]} have one."
        )
    return tuple(requests)


def _read_one(name: str, definition: Any) -> DatasetRequest:  # noqa: ANN401
    if not isinstance(definition, Mapping):
        raise QueryError(f"Dataset {name!r} is {definition!r:.80}; expected a table with a dataset_class.")
    if name == OBJECT_ID:
        raise QueryError(f"A dataset cannot be called {OBJECT_ID!r}, which is the key of the ids in a sample.")
    unknown = sorted(map(str, definition.keys() - _KEYS))
    if unknown:
        raise QueryError(f"Dataset {name!r} has unknown keys {unknown}; known are {sorted(_KEYS)}.")
    # TOML has no null, so configurations say false for what is not set.
    options = {key: value for key, value in definition.items() if value not in (None, False)}
    if not isinstance(options.get("dataset_class"), str):
        raise QueryError(f"Dataset {name!r} has no dataset_class.")
    if "primary_id_field" in options and "join_field" in options:
        raise QueryError(f"Dataset {name!r} has both a primary_id_field and a join_field; expected only one of them.")
    fields = options.get("fields")
    if fields is not None and (isinstance(fields, str) or not isinstance(fields, Sequence)):
        raise QueryError(f"Dataset {name!r} requests fields {fields!r}; expected a list of names.")
    location = options.get("data_location")
    return DatasetRequest(
        **{**options, "name": name, "fields": None if fields is None else tuple(fields),
           "data_location": None if location is None else absolute_location(location)}
    )  # fmt: skip


def absolute_location(location: str | os.PathLike[str]) -> str:
    """Make a path absolute; the address of an object store is returned unchanged.

    Examples
    --------
    >>> absolute_location("s3://bucket/run")
    's3://bucket/run'
    """
    folder = local_folder(location)
    return os.fspath(location) if folder is None else str(folder.absolute())


def local_folder(location: str | os.PathLike[str]) -> Path | None:
    """Return the folder of a location; None for an object store and addresses that only a user's dataset class knows.

    Examples
    --------
    >>> local_folder("hf://datasets/x") is None, local_folder("file:///runs/z").name
    (True, 'z')
    """
    scheme, colon, _ = os.fspath(location).partition("://")
    return local_path(location) if not colon or scheme.lower() == "file" else None


def merge_config(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configurations recursively; `override` takes precedence, and neither is modified.

    Examples
    --------
    >>> merge_config({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
    {'a': {'b': 3, 'c': 2}}
    """
    config = dict(base)
    for key, value in override.items():
        nested = config.get(key)
        config[key] = (
            merge_config(nested, value) if isinstance(nested, Mapping) and isinstance(value, Mapping) else value
        )
    return config
