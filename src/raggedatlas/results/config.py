"""The file ``original_dataset_config.toml``: what the data were that a model saw, kept along a chain of runs."""

import os
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from raggedatlas.errors import CorruptError, SourceError
from raggedatlas.results.folder import CONFIG_FILE, removed_on_error

_UNKNOWN = "# The configuration of the original dataset was not told to the writer of these results.\n"


def config_text(result_dir: Path, config: Mapping[str, Any] | None, dataset: Any, *, replace: bool) -> str | None:  # noqa: ANN401
    """Give what the file is to hold, or None where there is one already that is to stay.

    Parameters
    ----------
    result_dir : pathlib.Path
        Result folder.
    config : mapping or None
        The configuration.
    dataset : object or None
        Where it is None: an object with the attribute ``original_config``, or ``data_location`` with such a file in it, or
        ``config``, asked in this order. So a chain of runs keeps the configuration of the first data.
    replace : bool
        Whether a file that is there is replaced by a known configuration.

    Raises
    ------
    SourceError
        For a configuration that TOML cannot hold.
    """
    text = to_toml(config) if config is not None else _text_of(dataset)
    if (result_dir / CONFIG_FILE).exists() and not (replace and text is not None):
        return None
    return _UNKNOWN if text is None else text


def write_config(result_dir: Path, text: str | None) -> None:
    """Write what `config_text` gives, in one step."""
    if text is not None:
        with removed_on_error(result_dir / CONFIG_FILE) as beside:
            beside.write_text(text, encoding="utf-8")


def _text_of(dataset: Any) -> str | None:  # noqa: ANN401
    if dataset is None:
        return None
    config = getattr(dataset, "original_config", None)
    if config is None:
        location = getattr(dataset, "data_location", None)
        if isinstance(location, str | os.PathLike) and (Path(location) / CONFIG_FILE).is_file():
            return (Path(location) / CONFIG_FILE).read_text(encoding="utf-8")
        config = getattr(dataset, "config", None)
    return to_toml(config) if isinstance(config, Mapping) else None


def read_config(result_dir: Path) -> dict[str, Any]:
    """Read the configuration of the original dataset; empty where there is none.

    Raises
    ------
    CorruptError
        If the file is no TOML.
    """
    path = result_dir / CONFIG_FILE
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is no TOML: {error}.") from error


def to_toml(config: Mapping[str, Any]) -> str:
    """Write a configuration as TOML; entries that are None are left out, as TOML has no word for them.

    Raises
    ------
    SourceError
        For a value that TOML cannot hold.

    Examples
    --------
    >>> print(to_toml({"a": 1, "b": {"c": 0.5, "d": None}}))
    a = 1
    <BLANKLINE>
    [b]
    c = 0.5
    <BLANKLINE>
    """
    import tomli_w

    return tomli_w.dumps(_plain(config, ()))


def _plain(value: Any, names: tuple[str, ...]) -> Any:  # noqa: ANN401
    """Return a value in the types that TOML has; NumPy's, paths, sets and other sequences become those."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(each, (*names, str(key))) for key, each in value.items() if each is not None}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool | int | float | str | datetime | date | time):
        return value
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [_plain(each, names) for each in value if each is not None]
    raise SourceError(f"The configuration's {'.'.join(names)} is a {type(value).__name__}, which TOML cannot hold.")
