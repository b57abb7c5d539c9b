"""Arrays that the format does not name, as they are carried through AnnData and put back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raggedatlas.formats.cxg.embeddings import is_path_name
from raggedatlas.formats.cxg.engine import open_array
from raggedatlas.formats.cxg.schema import ANONYMOUS, COVERAGE, MEMBERS
from raggedatlas.formats.cxg.writers import (
    TEXT,
    Axis,
    Form,
    create,
    create_group,
    table_form,
    write_metadata,
    write_scattered,
)

KINDS = ("values", "table", "axes", "metadata")
"""Members of what stands for one array; anything else is a group of such."""


def write_carried(folder: Path, arrays: Any) -> None:  # noqa: ANN401
    """Write what `source` found in a CXG and no CXG has a name for; what is in another shape is passed over."""
    if not isinstance(arrays, Mapping):
        return
    for name, value in arrays.items():
        taken = name in MEMBERS and name != COVERAGE
        if isinstance(value, Mapping) and is_path_name(str(name)) and not taken:
            _write(folder / str(name), value)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    if "table" in value and isinstance(value.get("axes"), str):
        write_scattered(path, value["table"], json.loads(value["axes"]))
    elif "table" in value:
        _write_table(path, value["table"])
    elif isinstance(value.get("values"), np.ndarray):
        _write_values(path, value["values"])
    elif not set(value) & set(KINDS):
        create_group(path)
        write_carried(path, value)
        return
    else:
        return
    text = value.get("metadata")
    write_metadata(path, json.loads(text) if isinstance(text, str) else {})


def _write_values(path: Path, values: NDArray[Any]) -> None:
    text = values.dtype.kind in "OUS"
    if values.ndim == 0 or 0 in values.shape:
        return
    axes = tuple(Axis(f"__dim_{i}", n, min(n, 1000)) for i, n in enumerate(values.shape))
    create(path, Form(axes, {ANONYMOUS: TEXT if text else str(values.dtype)}))
    with open_array(path, "w") as array:
        array[:] = values.astype(object) if text else values


def _write_table(path: Path, frame: Any) -> None:  # noqa: ANN401  (a pandas frame)
    """Write a table with its row numbers as the only dimension."""
    if not len(frame):
        return
    columns = {str(name): frame[name].to_numpy() for name in frame.columns}
    plain = {
        name: values.astype(object) if values.dtype.kind not in "biuf" else values for name, values in columns.items()
    }
    create(path, table_form(len(frame), {n: TEXT if v.dtype == object else str(v.dtype) for n, v in plain.items()}))
    with open_array(path, "w") as array:
        array[:] = plain
