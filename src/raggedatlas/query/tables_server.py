"""A snapshot served on loopback to programs in other languages, such as R: datasets, features, cells and matrices, in Arrow or in plain columns."""

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from raggedatlas.catalog.identity import GENE_SPACE
from raggedatlas.errors import AtlasError, QueryError
from raggedatlas.query.browse import AtlasView
from raggedatlas.store.loopback import ThreadedServer

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

_MOST_BODY = 16 << 20
_MOST_VALUES = 2**31 - 1
"""Entries of a matrix, which R counts with 32 bits."""

ARROW, COLUMNS = "application/vnd.apache.arrow.stream", "application/vnd.raggedatlas.columns"
"""What is sent: frames as an Arrow stream where `Accept` asks for it, else plain columns, as `encode` writes them."""

_NA_INTEGER = -(2**31)
"""A missing integer, as R stores it."""


class TablesServer(ThreadedServer):
    """Server of a snapshot on loopback, usable as a context manager; port 0 picks a free one.

    Requests are POSTs of a JSON object to ``<url><name>``: ``info``, ``datasets``, ``features`` (``space``), ``cells``
    (``where``, ``limit``), ``expression`` (``where``, ``features``, ``layer``, ``space``, ``join``, ``limit``), and
    ``close``, which stops the server. Raises `StoreError` if the port is in use.

    Examples
    --------
    >>> view = ra.open("pbmc.atlas")  # doctest: +SKIP
    >>> with TablesServer(view) as server:  # doctest: +SKIP
    ...     server.wait()
    """

    def __init__(self, view: AtlasView, port: int = 0) -> None:
        record = view.record
        info = {
            "uri": view.uri, "snapshot": record.version, "label": record.label, "root_hash": record.root_hash, "n_cells": record.n_cells,
            "n_datasets": record.n_datasets, "spaces": sorted(record.spaces),
        }  # fmt: skip
        self.token = secrets.token_urlsafe(24)
        self._answers: dict[str, Callable[[Mapping[str, Any]], bytes | pd.DataFrame]] = {
            "info": lambda _: json.dumps(info).encode(),
            "datasets": lambda _: view.list_datasets().reset_index(names="uid"),
            "features": lambda asked: view.features(asked.get("space", GENE_SPACE)).reset_index(),
            "cells": lambda asked: _narrow(view, asked).to_pandas().reset_index(names="uid"),
            "expression": lambda asked: _matrix(_narrow(view, asked).to_anndata()),
        }
        server = self

        class Handler(_TablesHandler):
            owner = server

        self._start(Handler, port, "tables")

    def answer(self, name: str, asked: Mapping[str, Any], *, arrow: bool) -> tuple[bytes, str] | None:
        """Return an answer and its type, or None if there is none of that name."""
        made = self._answers.get(name)
        if made is None:
            return None
        found = made(asked)
        if isinstance(found, bytes):
            return found, "application/json" if name == "info" else COLUMNS
        return (_arrow_stream(found), ARROW) if arrow else (encode({"frame": found}), COLUMNS)


class _TablesHandler(BaseHTTPRequestHandler):
    owner: TablesServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a request whose path begins with the token."""
        token, _, name = self.path.removeprefix("/").partition("/")
        length = self.headers.get("Content-Length", "")
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.owner.token.encode()):
            self._send(
                HTTPStatus.FORBIDDEN, b"This address needs its token; take the one that raggedatlas serve printed."
            )
            return
        if self.headers.get_content_type() != "application/json" or not length.isdecimal() or int(length) > _MOST_BODY:
            self._send(HTTPStatus.BAD_REQUEST, b"A request has a JSON object of at most 16 MiB as its body.")
            return
        try:
            asked = json.loads(self.rfile.read(int(length)) or b"{}")
            if not isinstance(asked, dict):
                raise QueryError("The body is no JSON object.")
            if name == "close":
                self._send(HTTPStatus.OK, b"{}")
                threading.Thread(target=self.owner.close, daemon=True).start()
                return
            found = self.owner.answer(name, asked, arrow=ARROW in self.headers.get("Accept", ""))
        # A `RecursionError` comes of JSON that is nested too deep.
        except (AtlasError, ValueError, RecursionError) as error:
            self._send(HTTPStatus.BAD_REQUEST, str(error).encode())
            return
        if found is None:
            self._send(HTTPStatus.NOT_FOUND, b"There is no such request.")
        else:
            self._send(HTTPStatus.OK, *found)

    def _send(self, status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        if status != HTTPStatus.OK:
            # A refused body may be unread.
            self.close_connection = True
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _narrow(view: AtlasView, asked: Mapping[str, Any]) -> Any:  # noqa: ANN401  (a Query, which this module cannot name without its imports)
    unknown = asked.keys() - {"where", "features", "layer", "space", "limit", "join"}
    if unknown:
        raise QueryError(f"A request has no {sorted(unknown)[0]!r}; it has where, features, layer, space, join, limit.")
    query = view.query()
    if asked.get("where"):
        query = query.where(asked["where"])
    if asked.get("space"):
        query = query.spaces(asked["space"])
    if asked.get("features"):
        query = query.features(asked["features"], space=asked.get("space", GENE_SPACE))
    if asked.get("join"):
        query = query.join(asked["join"])
    if asked.get("layer"):
        query = query.layers(asked["layer"])
    limit = asked.get("limit")
    # R counts in floats: what is no whole number is refused by `limit`.
    limit = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
    return query if limit is None else query.limit(limit)


def _matrix(found: "AnnData") -> bytes:
    """Return matrix, cells, features and what was measured; columns of the matrix are cells, as R has it."""
    import pandas as pd
    from scipy.sparse import csr_matrix

    values = csr_matrix(found.X)
    if values.nnz > _MOST_VALUES:
        raise QueryError(
            f"The matrix has {values.nnz:,} values, more than R's sparse matrices hold; ask for fewer cells or features."
        )
    values.sort_indices()
    # A frame with a column for each list of features, whose names `layout_uid` of the cells has.
    measured = (
        found.varm["measured"].reset_index(drop=True)
        if "measured" in found.varm
        else pd.DataFrame(index=range(found.n_vars))
    )
    parts: dict[str, Any] = {
        "cells": found.obs.reset_index(names="uid"),
        "features": found.var.reset_index(names="name"),
        "measured": measured,
        "matrix": {"i": values.indices.astype("<i4"), "p": values.indptr.astype("<i4"), "x": values.data.astype("<f8")},
    }
    parts |= {
        f"obsm:{key}": pd.DataFrame(np.asarray(found.obsm[key], float))
        for key in found.obsm
        if np.ndim(found.obsm[key]) == 2
    }
    return encode(parts)


def encode(parts: Mapping[str, Any]) -> bytes:
    r"""Return frames, and mappings of arrays, as a head in JSON and columns behind it.

    4 bytes, the length of the head (little-endian); the head,
    ``{part: {"n_rows": n, "columns": [{"name", "n", "type", "levels"}]}}``; then all columns one behind the other:
    ``double`` 8 bytes a value, ``integer``, ``logical``, ``factor`` and ``text`` 4, of which the last two count from 1
    in the levels.
    """
    head: dict[str, Any] = {}
    buffers: list[bytes] = []
    for name, part in parts.items():
        columns = []
        for column in part:
            facts, data = _column(part[column])
            columns.append({"name": str(column), "n": len(data), **facts})
            buffers.append(data.tobytes())
        # Of a frame without columns, its index has the number of rows.
        head[name] = {"n_rows": columns[0]["n"] if columns else len(part), "columns": columns}
    text = json.dumps(head).encode()
    return b"".join([len(text).to_bytes(4, "little"), text, *buffers])


def _column(values: Any) -> "tuple[dict[str, Any], np.ndarray[Any, Any]]":  # noqa: ANN401  (a Series or an array)
    import pandas as pd

    if isinstance(values, np.ndarray):
        return {"type": "double" if values.dtype.kind == "f" else "integer"}, values
    missing = values.isna().to_numpy()
    if isinstance(values.dtype, pd.CategoricalDtype):
        codes = values.cat.codes.to_numpy().astype(np.int64) + 1
        facts = {
            "type": "factor",
            "levels": [str(one) for one in values.cat.categories],
            "ordered": bool(values.cat.ordered),
        }
        return facts, np.where(missing, _NA_INTEGER, codes).astype("<i4")
    if pd.api.types.is_bool_dtype(values.dtype):
        return {"type": "logical"}, np.where(missing, _NA_INTEGER, values.fillna(False).astype(bool)).astype("<i4")  # noqa: FBT003
    if pd.api.types.is_integer_dtype(values.dtype):
        # Not as int64 at first, in which large numbers without a sign would be small ones.
        whole = values.fillna(0)
        if whole.between(-(2**31) + 1, 2**31 - 1).all():
            return {"type": "integer"}, np.where(missing, _NA_INTEGER, whole.astype("int64")).astype("<i4")
    if pd.api.types.is_numeric_dtype(values.dtype):
        return {"type": "double"}, values.astype("float64").to_numpy().astype("<f8")
    codes, levels = pd.factorize(values.map(_text, na_action="ignore"))
    return {"type": "text", "levels": [str(one) for one in levels]}, np.where(codes < 0, _NA_INTEGER, codes + 1).astype(
        "<i4"
    )


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple | np.ndarray) else str(value)


def _arrow_stream(frame: "pd.DataFrame") -> bytes:
    """Return a frame as an Arrow stream; columns of mixed values as text."""
    import pandas as pd

    shown = {
        name: column.map(_text, na_action="ignore") if column.dtype == object else column
        for name, column in frame.items()
    }
    table = pa.Table.from_pandas(pd.DataFrame(shown), preserve_index=False)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())
