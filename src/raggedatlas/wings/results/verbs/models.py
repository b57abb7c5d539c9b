"""Models: a function, a PyTorch module or an ONNX file, opened with one interface before anything is read."""

import hashlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import ArgumentError, MissingExtraError, NotFoundError, QueryError, SourceError
from raggedatlas.loader.batch import TrainingBatch
from raggedatlas.model.choices import OutputFormat
from raggedatlas.store.copies import local_copy
from raggedatlas.store.location import as_path, file_digest, local_path
from raggedatlas.wings.results.schema import DATA

Inputs = Callable[[TrainingBatch], Any]
"""What of a batch a model is given."""


@dataclass(frozen=True)
class Model:
    """A model that is ready to compute."""

    # takes a `TrainingBatch`; gives a row for each of its cells, or a mapping of these by name
    call: Callable[[TrainingBatch], Any]
    name: str  # in the facts of the results
    form: OutputFormat = "dense"  # of the values that it wants
    digest: str = ""  # SHA-256 of its weights, in hex; empty where there are none
    dtype: "np.dtype[Any] | None" = None  # of the values that it wants; None leaves it to the loader
    obs: tuple[str, ...] = ()  # metadata columns that it needs
    # called with the feature uids of each space before anything is read or written; refuses those that do not fit
    check: Callable[[Mapping[str, NDArray[np.object_]]], None] = field(default=lambda features: None)
    batch_size: int | None = None  # where it takes batches of one size only


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from; processes that share a run each open it."""

    # a callable, a module, or where one is imported from: ``"my_package.models:Encoder"``, ``"models.py:Encoder"``
    model: Any
    weights: str | os.PathLike[str] | None = None  # state of a PyTorch module, see `read_weights`
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of a class
    inputs: Inputs | None = None  # what of a batch the model is given; None takes ``batch.X``
    outputs: tuple[str, ...] = ()  # names of what a model gives as a tuple
    as_: OutputFormat | None = None  # what values come as; None takes dense arrays, and dense tensors for PyTorch
    device: str | None = None  # where a PyTorch module computes

    def open(self) -> Model:
        """Create the model; this imports it, and reads the weights."""
        if isinstance(self.model, str | os.PathLike) and os.fspath(self.model).endswith(".onnx"):
            raise QueryError(f"{os.fspath(self.model)} is an ONNX file; run it with `engine`.")
        found = import_object(self.model) if isinstance(self.model, str) else self.model
        named = found if hasattr(found, "__qualname__") else type(found)
        name = self.model if isinstance(self.model, str) else f"{named.__module__}:{named.__qualname__}"
        if is_torch(found):
            call, digest = open_module(found, self.weights, self.options, self.device)
            return Model(self._named(call), name, self.as_ or "torch-dense", digest)
        if self.device is not None and self.as_ not in {"torch", "torch-dense"}:
            raise ArgumentError(
                "device=... has no effect for a function that takes no tensors; leave it out, or pass as_='torch' with it."
            )
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
        inputs, outputs = self.inputs, self.outputs
        return lambda batch: name_outputs(call(batch.X if inputs is None else inputs(batch)), outputs)


def name_outputs(given: Any, names: Sequence[str]) -> Any:  # noqa: ANN401  (what any model gives)
    """Name the outputs of a model that gives a tuple, all of them; of a mapping, choose the named ones.

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
    """Import what a text names: ``"package.module:name"``, or ``"folder/file.py:name"``.

    The code of the module runs, as with ``import``.

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
        module = _import_file(local_path(place)) if place.endswith(".py") else import_module(place)
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


_STATE = "state_dict"


def open_module(
    module: Any,  # noqa: ANN401  (a torch.nn.Module, or a class of them)
    weights: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
    device: str | None,
) -> tuple[Callable[[Any], Any], str]:
    """Create a module with its weights, on its device, in evaluation mode.

    `module` is a `torch.nn.Module`, or a class of them, which is called with `options`. Returns a callable that
    computes without gradients, and the SHA-256 of the weights' file, empty without.
    """
    import torch

    digest = ""
    if isinstance(module, type):
        try:
            module = module(**options)
        except TypeError as error:
            raise SourceError(
                f"{module.__name__} cannot be made with the options {dict(options)!r}: {error}."
            ) from error
    elif options:
        raise SourceError(f"The module is made already; options {sorted(options)} are for a class.")
    if weights is not None:
        try:
            with local_copy(weights) as local:
                digest = file_digest(local)
                module.load_state_dict(read_weights(local))
        except RuntimeError as error:
            # PyTorch lists missing and unexpected keys in lines of their own.
            message = " ".join(str(error).split())
            raise SourceError(
                f"The weights {os.fspath(weights)} do not fit {type(module).__name__}: {message}"
            ) from error
    try:
        module = module.eval() if device is None else module.eval().to(device)
    except (RuntimeError, AssertionError) as error:
        raise QueryError(f"The module cannot be moved to the device {device!r}: {error}.") from error

    def call(*given: Any) -> Any:  # noqa: ANN401  (tensors)
        with torch.inference_mode():
            return module(*given)

    return call, digest


def read_weights(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read the state of a module, to the CPU; nothing but tensors is read.

    The file is ``.safetensors``, or what ``torch.save`` wrote of a state or of a checkpoint that has one as
    ``state_dict``.
    """
    with local_copy(path) as local:
        if local.suffix == ".safetensors":
            try:
                from safetensors import SafetensorError
                from safetensors.torch import load_file
            except ImportError as error:
                raise MissingExtraError(
                    f"The weights {os.fspath(local)} need safetensors, which is not installed; pip install 'raggedatlas[infer]'."
                ) from error
            try:
                tensors: Mapping[str, Any] = load_file(local)
            except (SafetensorError, OSError) as error:
                raise SourceError(f"The weights {os.fspath(local)} do not read: {error}.") from error
            return tensors
        import torch

        try:
            # To the CPU first: the tensors may be saved from a device that this machine does not have.
            found = torch.load(local, map_location="cpu", weights_only=True)
        # What PyTorch raises for a damaged file is of many types, depending on where reading fails.
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            raise SourceError(
                f"The weights {os.fspath(local)} do not read: {message or type(error).__name__}. Expected what "
                "torch.save(module.state_dict(), path) writes, or .safetensors; a whole pickled module is never read."
            ) from error
        if isinstance(found, Mapping) and isinstance(found.get(_STATE), Mapping):
            found = found[_STATE]
        if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise SourceError(f"The weights {os.fspath(local)} hold a {type(found).__name__}; expected named tensors.")
        return found


VALUES = "X"
"""The word for the first layer of a batch among the inputs of a model."""

_DTYPES = {
    "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16",
    **{f"tensor({sign}int{bits})": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip


@dataclass(frozen=True)
class _Input:
    """One input of a model: what of a batch it takes, and as what."""

    name: str
    takes: str
    dtype: "np.dtype[Any]"
    shape: tuple[Any, ...]

    def read(self, batch: TrainingBatch) -> NDArray[Any]:
        """Return what the input takes of a batch."""
        if self.takes == VALUES:
            return np.ascontiguousarray(batch.X, self.dtype)
        column = np.asarray(batch.obs[self.takes]).astype(self.dtype)
        return column[:, None] if len(self.shape) == 2 else column


def open_onnx(path: str | os.PathLike[str], inputs: Mapping[str, str] | None = None) -> Model:
    """Open an ONNX file.

    `inputs` maps an input of the model to what of a batch it takes: ``"X"``, or a metadata column (categories as
    codes); None is for a model with one input, which takes ``"X"``. A single output is called ``data``, others by their
    names with ``_`` for what no column may have.
    """
    path = as_path(path)
    # Large weights lie in a file beside it.
    with local_copy(path, beside=(f"{path.name}.data", f"{path.name}_data")) as local:
        digest = file_digest(local)
        session = _open_session(os.fspath(local))
    wanted = _inputs_of(session, os.fspath(path), inputs)
    outputs = session.get_outputs()
    strange = [each for each in outputs if not each.type.startswith("tensor(")]
    if strange:
        raise SourceError(
            f"{os.fspath(path)}: the output {strange[0].name!r} is {strange[0].type}, and results hold tensors; export the model "
            "without it (scikit-learn's converter: zipmap=False)."
        )
    inside = [each.name for each in outputs]
    outside = [DATA] if len(inside) == 1 else [re.sub(r"\W+", "_", name).strip("_") for name in inside]
    values = [each for each in wanted if each.takes == VALUES]
    # A batch axis that is a name or None takes any size; only a positive number fixes it.
    sizes = {each.shape[0] for each in wanted if each.shape and isinstance(each.shape[0], int) and each.shape[0] > 0}
    if len(sizes) > 1:
        raise SourceError(f"{os.fspath(path)}: the inputs want batches of different sizes: {sorted(sizes)}.")
    size = next(iter(sizes), None)

    def run(batch: TrainingBatch) -> dict[str, Any]:
        n = len(batch)
        fed = {each.name: each.read(batch) for each in wanted}
        # `prepare_run` gives the loader the size of the model, so only the last batch can be shorter.
        if short := size is not None and n < size:
            fed = {
                name: np.concatenate([part, np.zeros((size - n, *part.shape[1:]), part.dtype)])
                for name, part in fed.items()
            }
        given = session.run(inside, fed)
        # a model with batches of one size computes rows for padding too
        cut = [part[:n] if short and len(part) == size else part for part in given]
        return dict(zip(outside, cut, strict=True))

    def check(features: Mapping[str, NDArray[np.object_]]) -> None:
        """Compare the number of features with what the inputs take."""
        n = len(next(iter(features.values())))
        for each in values:
            width = each.shape[1] if len(each.shape) == 2 else None
            # A space without features, such as an embedding, has no uids: `n` is 0, and nothing can be compared.
            if n and isinstance(width, int) and width > 0 and width != n:
                raise SourceError(
                    f"{os.fspath(path)}: the input {each.name!r} takes {width:,} features, and the query has {n:,}; choose the features "
                    "that the model was trained with, in their order."
                )

    dtype = values[0].dtype if values else None
    obs = tuple(each.takes for each in wanted if each.takes != VALUES)
    return Model(run, os.fspath(path), "dense", digest, dtype, obs, check, size)


def _open_session(path: str) -> Any:  # noqa: ANN401  (an InferenceSession)
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            f"{path} needs ONNX Runtime, which is not installed; pip install 'raggedatlas[onnx]'."
        ) from error
    options = onnxruntime.SessionOptions()
    # errors are raised, and need not be written to stderr too
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(path, sess_options=options, providers=["CPUExecutionProvider"])
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise SourceError(f"{path} does not read as an ONNX model: {message}.") from error


def _inputs_of(session: Any, path: str, given: Mapping[str, str] | None) -> list[_Input]:  # noqa: ANN401
    known = {each.name: each for each in session.get_inputs()}
    if given is None:
        if len(known) != 1:
            raise SourceError(
                f"{path} has the inputs {list(known)}; say what each takes, e.g. inputs={{{next(iter(known), 'x')!r}: 'X'}}."
            )
        given = dict.fromkeys(known, VALUES)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise NotFoundError(f"{path} has no input {unknown[0]!r}; it has {list(known)}.")
    missing = [name for name in known if name not in given]
    if missing:
        raise SourceError(f"{path} has the inputs {list(known)}; nothing is given for {missing[0]!r}.")
    found = []
    for name, takes in given.items():
        kind = known[name].type
        if kind not in _DTYPES:
            raise SourceError(f"{path}: the input {name!r} takes {kind}; a batch holds numbers.")
        found.append(_Input(name, takes, np.dtype(_DTYPES[kind]), tuple(known[name].shape)))
    return found
