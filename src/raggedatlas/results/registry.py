"""Datasets that a data request can name: one class to derive from, and the registry that deriving fills."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from raggedatlas.errors import NotFoundError, SchemaError


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
