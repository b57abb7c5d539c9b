"""Arguments checked against their annotations at the doors of the package, so that a wrong one is named instead of failing inside."""

import collections.abc
import datetime as dt
import difflib
import functools
import inspect
import itertools
import math
import numbers
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from raggedatlas.errors import ArgumentError, QueryError

C = TypeVar("C", bound=Callable[..., Any])

Progress = Callable[[str, int, int], None]
"""Called with the name of a step, how much of it is done, and how much there is."""

_ARRAY: Any = get_origin(NDArray[Any])
"""What stands for arrays in annotations: a class, or an alias from NumPy 2.5 on."""

_TEXTS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    type(None): "None",
    dt.timedelta: "a datetime.timedelta",
    collections.abc.Callable: "a function",
    os.PathLike: "a path",
    _ARRAY: "an array",
}
_LONGEST = 255
"""Bytes of a name that every file system takes."""
_MOST = 1000
"""Members of a collection that are looked at; more would take time that is seen."""
_FUNCTION_TYPES = (types.FunctionType, classmethod, staticmethod)


def checked(given: C) -> C:
    """Check the arguments of a function, or of every public method of a class and of ``__init__``, against their annotations.

    Annotations that are given as text (types that are imported lazily), type variables and unknown generics accept everything.

    Examples
    --------
    >>> @checked
    ... class Door:
    ...     def open(self, how: Literal["wide", "narrow"], n: int = 1) -> None:
    ...         pass
    >>> Door().open("wiede")
    Traceback (most recent call last):
    raggedatlas.errors.ArgumentError: open() takes how as 'wide' or 'narrow', not 'wiede'; did you mean 'wide'?
    """
    if isinstance(given, types.FunctionType):
        owner, _, name = given.__qualname__.rpartition(".")
        return cast("C", _wrapped(given, owner if name == "__init__" else name))
    for name, member in list(vars(given).items()):
        # Private methods are called by public ones, which have checked the arguments.
        if (name.startswith("_") and name != "__init__") or not isinstance(member, _FUNCTION_TYPES):
            continue
        if isinstance(member, types.FunctionType):
            setattr(given, name, _wrapped(member, given.__name__ if name == "__init__" else name))
        else:
            setattr(given, name, type(member)(_wrapped(member.__func__, name)))
    return given


def _wrapped(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that checks its arguments first."""
    signature = inspect.signature(function)
    spread = {p.name for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL}
    choices = {p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD}
    hints = _hints(signature)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any function
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ArgumentError(f"{name}() cannot be called like this: {error}.") from None
        for parameter, value in given.items():
            if parameter in choices:
                pairs = list(value.items())
            else:
                pairs = [(parameter, one) for one in (value if parameter in spread else [value])]
            for key, one in pairs:
                _check(name, key, hints.get(key, Any), one)
        return function(*args, **kwargs)

    return call


def _hints(signature: inspect.Signature) -> dict[str, Any]:
    """Collect the annotations of parameters, and of the keywords that a typed dictionary lists."""
    hints: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        # `get_type_hints` would fail on annotations in text, which name types imported for type checking only.
        hint = parameter.annotation
        if parameter.kind is parameter.VAR_KEYWORD and get_origin(hint) is typing.Unpack:
            hints.update(typing.get_type_hints(get_args(hint)[0]))
        elif parameter.kind is not parameter.VAR_KEYWORD and hint is not parameter.empty:
            hints[parameter.name] = hint
    return hints


def _check(function: str, parameter: str, hint: Any, value: object) -> None:  # noqa: ANN401 - an annotation
    """Refuse a value that does not fit its annotation, and a path with a name that no file system takes."""
    if _accepts(hint, value):
        is_path = any(get_origin(one) is os.PathLike or one is Path for one in get_args(hint))
        if is_path and isinstance(value, str | Path) and "://" not in str(value):
            # `Path.exists` raises an OSError for such a name.
            longest = max(len(os.fsencode(name)) for name in re.split(r"[/\\]", str(value)))
            if longest > _LONGEST or "\0" in str(value):
                raise ArgumentError(
                    f"{function}() takes {parameter} as a path whose names have {_LONGEST} bytes or fewer and no NUL character, not "
                    f"{brief(str(value))}."
                )
        return
    words = [word for word in _literals(hint) if isinstance(word, str)]
    near = difflib.get_close_matches(value.lower(), words, 1) if isinstance(value, str) else []
    tip = f"; did you mean {near[0]!r}?" if near else "."
    raise ArgumentError(f"{function}() takes {parameter} as {_describe(hint)}, not {brief(value)}{tip}")


def brief(value: object) -> str:
    """Show a value that was refused: plain ones as they are if they are short, others by their type."""
    if isinstance(value, str) and len(value) > 60:
        return f"a text of {len(value)} characters"
    if value is None or isinstance(value, str | bool | int | float | bytes | dt.timedelta | tuple | list | dict):
        shown = repr(value)
        if len(shown) <= 60 and " at 0x" not in shown:
            return shown
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"an object of type {type(value).__name__}"


def _accepts(hint: Any, value: object) -> bool:  # noqa: ANN401 - an annotation
    """Return whether a value fits an annotation; annotations that are not understood accept everything."""
    origin = get_origin(hint)
    if hint is Any or isinstance(hint, str):
        return True
    if origin in _GENERICS:
        return _GENERICS[origin](get_args(hint), value)
    if hint in _PLAIN:
        return _PLAIN[hint](value)
    if isinstance(hint, type) and origin is None and hint is not object:
        return isinstance(value, hint)
    return True


def _accepts_many(hint: Any, value: object) -> bool:  # noqa: ANN401 - an annotation
    """Return whether a value holds many that fit: any collection but text, bytes and mappings."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) != 1:
        return False
    # What has no length may be an iterator, which looking at its members would use up.
    return not isinstance(value, Sized) or all(_accepts(hint, one) for one in itertools.islice(value, _MOST))


def _accepts_tuple(inner: tuple[Any, ...], value: object) -> bool:
    """Return whether a value holds as many members as a tuple has, or any number of one kind; lists and arrays count as tuples."""
    if inner[1:] == (...,):
        return _accepts_many(inner[0], value)
    if isinstance(value, str | bytes | Mapping) or not (isinstance(value, Iterable) and isinstance(value, Sized)):
        return False
    return len(value) == len(inner) and all(_accepts(hint, one) for hint, one in zip(inner, value, strict=True))


def _accepts_mapping(inner: tuple[Any, ...], value: object) -> bool:
    """Return whether a value is a mapping whose keys and values fit."""
    return isinstance(value, Mapping) and all(
        _accepts(inner[0], key) and _accepts(inner[1], one) for key, one in value.items()
    )


_GENERICS: dict[Any, Callable[[tuple[Any, ...], object], bool]] = {
    Union: lambda inner, value: any(_accepts(one, value) for one in inner),
    types.UnionType: lambda inner, value: any(_accepts(one, value) for one in inner),
    # `True == 1`, so the types must agree as well.
    Literal: lambda inner, value: any(type(value) is type(one) and value == one for one in inner),
    # A class below another.
    type: lambda inner, value: (
        isinstance(value, type) and (not isinstance(inner[0], type) or issubclass(value, inner[0]))
    ),
    tuple: _accepts_tuple,
    list: lambda inner, value: _accepts_many(inner[0], value),
    dict: _accepts_mapping,
    collections.abc.Sequence: lambda inner, value: _accepts_many(inner[0], value),
    collections.abc.Iterable: lambda inner, value: _accepts_many(inner[0], value),
    collections.abc.Mapping: _accepts_mapping,
    _ARRAY: lambda _, value: hasattr(value, "__array__") or _accepts_many(Any, value),
    collections.abc.Callable: lambda _, value: callable(value),
    os.PathLike: lambda _, value: isinstance(value, os.PathLike),
}


def _accepts_number(kind: type, value: Any) -> bool:  # noqa: ANN401 - any value
    """Return whether a value is a number of a kind that fits into 64 bits, and neither NaN nor a boolean."""
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    number: Any = value
    return bool(abs(number) < 2**63 if kind is numbers.Integral else not math.isnan(number))


_PLAIN: dict[Any, Callable[[object], bool]] = {
    None: lambda value: value is None,
    type(None): lambda value: value is None,
    bool: lambda value: isinstance(value, bool | np.bool_),
    int: lambda value: _accepts_number(numbers.Integral, value),
    float: lambda value: _accepts_number(numbers.Real, value),
}


def _literals(hint: Any) -> list[object]:  # noqa: ANN401 - an annotation
    """List the words of a closed set."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for one in get_args(hint) for word in _literals(one)] if get_origin(hint) is not None else []


def _describe(hint: Any) -> str:  # noqa: ANN401 - an annotation
    """Describe in words what an annotation accepts."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        parts = list(dict.fromkeys(_describe(one) for one in inner))
        return f"{', '.join(parts[:-1])} or {parts[-1]}"
    if origin is Literal:
        words = [repr(word) for word in inner]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    if origin in {tuple, list, collections.abc.Sequence, collections.abc.Iterable}:
        return f"a list of {_plural(inner[0])}"
    if origin in {dict, collections.abc.Mapping}:
        return f"a mapping of {_plural(inner[0])} to {_plural(inner[1])}"
    if origin is type:
        return f"a subclass of {getattr(inner[0], '__name__', inner[0])}"
    return _TEXTS.get(origin or hint, f"a {getattr(hint, '__name__', hint)}")


def _plural(hint: Any) -> str:  # noqa: ANN401 - an annotation
    """Describe in words the members of a collection."""
    known = {str: "texts", int: "whole numbers", float: "numbers", Any: "values"}
    return known.get(hint) or f"{getattr(hint, '__name__', _describe(hint))} objects"


def no_progress(step: str, done: int, total: int) -> None:
    """Ignore a step."""


def check_seed(seed: int) -> None:
    """Refuse a seed that NumPy's generators do not take: one that is negative or has more than 32 bits."""
    if not 0 <= seed < 2**32:
        raise QueryError(f"The seed {seed} is out of range; expected 0 to {2**32 - 1}.")
