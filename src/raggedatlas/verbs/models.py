"""What computes results: a function, a PyTorch module or an ONNX file, made alike before anything is read."""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import NotFoundError, QueryError, SourceError
from raggedatlas.loader.batch import TrainingBatch
from raggedatlas.loader.options import OutputFormat

Inputs = Callable[[TrainingBatch], Any]
"""What of a batch a model is given."""


@dataclass(frozen=True)
class Model:
    """A model that is ready to compute.

    Parameters
    ----------
    call : callable
        Takes a `TrainingBatch`; gives a row for each of its cells, or a mapping of these by name.
    name : str
        What it is called in the results' facts.
    form : {"csr", "dense", "torch", "torch-dense"}
        What values it wants.
    digest : str
        SHA-256 of its weights, in hex; empty where there are none.
    dtype : numpy.dtype or None
        Of the values that it wants; None leaves it to the loader.
    obs : tuple of str
        Metadata columns that it needs.
    check : callable
        Called with the feature uids of each space before anything is read or written; refuses those that do not fit.
    batch_size : int or None
        Where it takes batches of one size only.
    """

    call: Callable[[TrainingBatch], Any]
    name: str
    form: OutputFormat = "dense"
    digest: str = ""
    dtype: "np.dtype[Any] | None" = None
    obs: tuple[str, ...] = ()
    check: Callable[[Mapping[str, NDArray[np.object_]]], None] = field(default=lambda features: None)
    batch_size: int | None = None


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; processes that share a run each open it.

    Parameters
    ----------
    model : callable, str or path
        A function or a module; or where it is imported from, ``"my_package.models:Encoder"`` or ``"models.py:Encoder"``.
    weights : str, path or None
        State of a PyTorch module: what ``torch.save(module.state_dict(), ...)`` wrote, or ``.safetensors``.
    options : mapping of str to object
        Arguments with which a class is called.
    inputs : callable or None
        What of a batch the model is given; None takes ``batch.X``.
    outputs : tuple of str
        Names of what a model gives as a tuple.
    as_ : str or None
        What values come as; None takes dense arrays, and dense tensors for PyTorch.
    device : str or None
        Where a PyTorch module computes.
    """

    model: Any
    weights: str | os.PathLike[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Inputs | None = None
    outputs: tuple[str, ...] = ()
    as_: OutputFormat | None = None
    device: str | None = None

    def open(self) -> Model:
        """Create the model.

        Returns
        -------
        Model

        Raises
        ------
        NotFoundError
            If the module, the name in it or the weights are not there.
        SourceError
            If it is nothing that computes, or the weights do not read or do not fit.
        MissingExtraError
            If PyTorch or safetensors is needed and not installed.
        """
        found = import_object(self.model) if isinstance(self.model, str) else self.model
        name = self.model if isinstance(self.model, str) else _name_of(found)
        if is_torch(found):
            from raggedatlas.verbs.torch_models import open_module

            opened = open_module(found, self.weights, self.options, self.device)
            return Model(self._named(opened.call), name, self.as_ or "torch-dense", opened.digest)
        if self.weights is not None:
            raise SourceError(f"{name} is no PyTorch module, so it cannot take the weights {os.fspath(self.weights)}.")
        if isinstance(found, type):
            found = found(**self.options)
        elif self.options:
            raise SourceError(f"{name} is a function already; options {sorted(self.options)} are for a class.")
        if not callable(found):
            raise SourceError(f"{name} is a {type(found).__name__}, which cannot be called with a batch.")
        return Model(self._named(found), name, self.as_ or "dense")

    def _named(self, call: Callable[[Any], Any]) -> Callable[[TrainingBatch], Any]:
        """Choose what of a batch goes in, and name what comes out."""
        inputs, outputs = self.inputs or _values, self.outputs
        return lambda batch: name_outputs(call(inputs(batch)), outputs)


def _values(batch: TrainingBatch) -> Any:  # noqa: ANN401  (arrays or tensors)
    return batch.X


def name_outputs(given: Any, names: Sequence[str]) -> Any:  # noqa: ANN401  (what any model gives)
    """Name the outputs of a model that gives a tuple of them.

    Raises
    ------
    SourceError
        If it gives a tuple and nobody named its parts, or another number of them.

    Examples
    --------
    >>> name_outputs((1, 2), ["mean", "scale"])
    {'mean': 1, 'scale': 2}
    """
    # Only a tuple means several outputs: a list is one output with an item for each cell.
    if isinstance(given, tuple):
        if len(names) != len(given):
            raise SourceError(
                f"The model gives a tuple of {len(given)}, and {len(names)} outputs are named; "
                "name each, e.g. outputs=['mean', 'scale']."
            )
        return dict(zip(names, given, strict=True))
    if not names:
        return given
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        if missing:
            raise SourceError(f"The model gives the outputs {list(given)}; {missing[0]!r} is none of them.")
        return {name: given[name] for name in names}
    if len(names) > 1:
        raise SourceError(f"The model gives one output, and {list(names)} are named.")
    return {names[0]: given}


def is_torch(value: object) -> bool:
    """Return whether something is a PyTorch module or a class of them; nothing is imported to find out."""
    torch = sys.modules.get("torch")
    module = getattr(getattr(torch, "nn", None), "Module", None)
    if module is None:
        return False
    return isinstance(value, module) or (isinstance(value, type) and issubclass(value, module))


def import_object(path: str) -> Any:  # noqa: ANN401  (whatever it is)
    """Import what a text names.

    Parameters
    ----------
    path : str
        ``"package.module:name"``, or ``"folder/file.py:name"``. The code of the module runs, as with ``import``.

    Raises
    ------
    NotFoundError
        If there is no such module, or nothing of that name in it.
    QueryError
        If the text has no colon.

    Examples
    --------
    >>> import_object("math:sqrt")(9)
    3.0
    """
    # The last colon, as a path may contain others.
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise QueryError(f"{path!r} names no model; expected 'package.module:name' or 'file.py:name'.")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else import_module(place)
        found: Any = module
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise NotFoundError(f"{path!r} cannot be imported: {error}.") from error
    return found


def _import_file(path: Path) -> Any:  # noqa: ANN401  (a module)
    # one name for one file: a class in it can be found again by pickle
    name = f"raggedatlas_model_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"there is no file {path}")
    module = module_from_spec(spec)
    # Registered before its code runs, as `import` does: `dataclass` looks the module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # Otherwise a second attempt would return the half-executed module.
        del sys.modules[name]
        raise
    return module


def _name_of(found: Any) -> str:  # noqa: ANN401
    named = found if hasattr(found, "__qualname__") else type(found)
    return f"{named.__module__}:{named.__qualname__}"
