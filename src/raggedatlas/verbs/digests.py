"""The digest by which results name the file of a model."""

import hashlib
import os
from pathlib import Path

from raggedatlas.errors import NotFoundError

_PIECE = 2**20


def file_digest(path: str | os.PathLike[str]) -> str:
    """Give the SHA-256 of a file in hex.

    Raises
    ------
    NotFoundError
        If there is no such file.
    """
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFoundError(f"There is no file {os.fspath(path)}.") from error
    return digest.hexdigest()
