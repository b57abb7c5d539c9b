"""Models in ONNX files, run by ONNX Runtime."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import MissingExtraError, NotFoundError, SourceError
from raggedatlas.loader.batch import TrainingBatch
from raggedatlas.results.schema import DATA
from raggedatlas.store.location import file_digest
from raggedatlas.verbs.models import Model

VALUES = "X"
"""The word for the first layer of a batch among the inputs of a model."""

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int16)": "int16",
    "tensor(int8)": "int8",
    "tensor(uint64)": "uint64",
    "tensor(uint32)": "uint32",
    "tensor(uint16)": "uint16",
    "tensor(uint8)": "uint8",
}
_OTHER = re.compile(r"\W+")


@dataclass(frozen=True)
class _Input:
    """One input of a model: what of a batch it takes, and as what."""

    name: str
    takes: str
    dtype: "np.dtype[Any]"
    shape: tuple[Any, ...]


def open_onnx(
    path: str | os.PathLike[str], inputs: Mapping[str, str] | None = None, providers: Sequence[str] | None = None
) -> Model:
    """Open an ONNX file.

    Parameters
    ----------
    path : str or path
        The file.
    inputs : mapping of str to str, or None
        Input of the model -> what of a batch it takes: ``"X"``, or a metadata column (categories as codes). None is for a model
        with one input, which takes ``"X"``.
    providers : sequence of str, or None
        Execution providers of ONNX Runtime; None takes the CPU.

    Returns
    -------
    Model
        Its outputs are the model's; a single one is called ``data``, others by their names with ``_`` for what no column may
        have.

    Raises
    ------
    NotFoundError
        If there is no such file, or the model has no input of a given name.
    SourceError
        If the file does not read, an input is left out, or one takes something that is no tensor of numbers.
    MissingExtraError
        If ONNX Runtime is not installed.
    """
    digest = file_digest(path)
    session = _open_session(os.fspath(path), providers)
    wanted = _inputs_of(session, os.fspath(path), inputs)
    names = _outputs_of(session, os.fspath(path))
    values = [each for each in wanted if each.takes == VALUES]
    # A batch axis that is a name or None takes any size; only a positive number fixes it.
    sizes = {each.shape[0] for each in wanted if each.shape and isinstance(each.shape[0], int) and each.shape[0] > 0}
    if len(sizes) > 1:
        raise SourceError(f"{os.fspath(path)}: the inputs want batches of different sizes: {sorted(sizes)}.")
    return Model(
        _runner(session, wanted, names, next(iter(sizes), None)),
        os.fspath(path),
        "dense",
        digest,
        values[0].dtype if values else None,
        tuple(each.takes for each in wanted if each.takes != VALUES),
        _checker(values, os.fspath(path)),
        next(iter(sizes), None),
    )


def _open_session(path: str, providers: Sequence[str] | None) -> Any:  # noqa: ANN401  (an InferenceSession)
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingExtraError(
            f"{path} needs ONNX Runtime, which is not installed; pip install 'raggedatlas[onnx]'."
        ) from error
    known = onnxruntime.get_available_providers()
    chosen = list(providers or ["CPUExecutionProvider"])
    unknown = [each for each in chosen if each not in known]
    if unknown:
        raise NotFoundError(f"ONNX Runtime has no provider {unknown[0]!r} here; there are {known}.")
    options = onnxruntime.SessionOptions()
    # errors are raised, and need not be written to stderr too
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(path, sess_options=options, providers=chosen)
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


def _outputs_of(session: Any, path: str) -> list[tuple[str, str]]:  # noqa: ANN401
    """Name the outputs: in the model, and in the results."""
    found = session.get_outputs()
    strange = [each for each in found if not each.type.startswith("tensor(")]
    if strange:
        raise SourceError(
            f"{path}: the output {strange[0].name!r} is {strange[0].type}, and results hold tensors; export the model "
            "without it (scikit-learn's converter: zipmap=False)."
        )
    if len(found) == 1:
        return [(found[0].name, DATA)]
    return [(each.name, _OTHER.sub("_", each.name).strip("_")) for each in found]


def _checker(values: list[_Input], path: str) -> Callable[[Mapping[str, NDArray[np.object_]]], None]:
    def check(features: Mapping[str, NDArray[np.object_]]) -> None:
        """Compare the number of features with what the inputs take."""
        n = len(next(iter(features.values())))
        for each in values:
            width = each.shape[1] if len(each.shape) == 2 else None
            # A space without features, such as an embedding, has no uids: `n` is 0, and nothing can be compared.
            if n and isinstance(width, int) and width > 0 and width != n:
                raise SourceError(
                    f"{path}: the input {each.name!r} takes {width:,} features, and the query has {n:,}; choose the features that "
                    "the model was trained with, in their order."
                )

    return check


def _runner(
    session: Any,  # noqa: ANN401  (an InferenceSession)
    wanted: list[_Input],
    names: list[tuple[str, str]],
    size: int | None,
) -> Callable[[TrainingBatch], Any]:
    inside = [name for name, _ in names]

    def run(batch: TrainingBatch) -> dict[str, Any]:
        n = len(batch)
        fed = {each.name: _padded(_taken(each, batch), size) for each in wanted}
        given = session.run(inside, fed)
        # a model with batches of one size computes rows for padding too
        cut = [values[:n] if size is not None and n < size and len(values) == size else values for values in given]
        return {outside: values for (_, outside), values in zip(names, cut, strict=True)}

    return run


def _taken(each: _Input, batch: TrainingBatch) -> NDArray[Any]:
    if each.takes == VALUES:
        values: NDArray[Any] = np.ascontiguousarray(batch.X, each.dtype)
        return values
    column = np.asarray(batch.obs[each.takes]).astype(each.dtype)
    return column[:, None] if len(each.shape) == 2 else column


def _padded(values: NDArray[Any], size: int | None) -> NDArray[Any]:
    # `prepare_run` gives the loader the size of the model, so only the last batch can be shorter.
    if size is None or len(values) == size:
        return values
    return np.concatenate([values, np.zeros((size - len(values), *values.shape[1:]), values.dtype)])
