"""PyTorch modules and their weights; nothing is unpickled but tensors."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raggedatlas.errors import MissingExtraError, QueryError, SourceError
from raggedatlas.store.location import file_digest

_SAFE = ".safetensors"
_STATE = "state_dict"


@dataclass(frozen=True)
class OpenModule:
    """A module in evaluation mode.

    Parameters
    ----------
    call : callable
        Computes without gradients.
    digest : str
        SHA-256 of the weights' file; empty without.
    """

    call: Callable[[Any], Any]
    digest: str


def open_module(
    module: Any,  # noqa: ANN401  (a torch.nn.Module, or a class of them)
    weights: str | os.PathLike[str] | None,
    options: Mapping[str, Any],
    device: str | None,
) -> OpenModule:
    """Create a module ready: built, weights in, on its device, in evaluation mode.

    Parameters
    ----------
    module : torch.nn.Module, or class of them
        A class is called with `options`.
    weights : str, path or None
        Its state; None leaves it as it is.
    options : mapping of str to object
        Arguments of the class.
    device : str or None
        E.g. ``"cuda"``.

    Raises
    ------
    SourceError
        If the class does not take the options, or the weights do not read or do not fit.
    """
    import torch

    digest = "" if weights is None else file_digest(weights)
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
            module.load_state_dict(read_weights(weights))
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

    return OpenModule(call, digest)


def read_weights(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Read the state of a module.

    Parameters
    ----------
    path : str or path
        ``.safetensors``, or what ``torch.save`` wrote of a state or of a checkpoint that has one as ``state_dict``.

    Returns
    -------
    mapping of str to torch.Tensor
        On the CPU.

    Raises
    ------
    SourceError
        If the file holds anything but tensors, or is damaged.
    MissingExtraError
        If safetensors is needed and not installed.
    """
    import torch

    if Path(path).suffix == _SAFE:
        return _read_safetensors(path)
    try:
        # To the CPU first: the tensors may be saved from a device that this machine does not have.
        found = torch.load(path, map_location="cpu", weights_only=True)
    # What PyTorch raises for a damaged file is of many types, depending on where reading fails.
    except Exception as error:
        message = " ".join(str(error).split())[:200]
        raise SourceError(
            f"The weights {os.fspath(path)} do not read: {message or type(error).__name__}. Expected what "
            "torch.save(module.state_dict(), path) writes, or .safetensors; a whole pickled module is never read."
        ) from error
    if isinstance(found, Mapping) and isinstance(found.get(_STATE), Mapping):
        found = found[_STATE]
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise SourceError(f"The weights {os.fspath(path)} hold a {type(found).__name__}; expected named tensors.")
    return found


def _read_safetensors(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise MissingExtraError(
            f"The weights {os.fspath(path)} need safetensors, which is not installed; pip install 'raggedatlas[infer]'."
        ) from error
    try:
        found: Mapping[str, Any] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise SourceError(f"The weights {os.fspath(path)} do not read: {error}.") from error
    return found
