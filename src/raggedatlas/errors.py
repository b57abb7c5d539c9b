"""Every error raised on purpose, as one tree.

::

    AtlasError
    ├── SchemaError          (also TypeError)           a schema class or a column type that cannot be stored
    ├── NameRefusedError     (also ValueError)          a name that may not become part of a path, table or column
    ├── SourceError          (also ValueError)          a file or object that cannot be added unchanged
    │   ├── ValuesError                                 a value that the value policy refuses
    │   └── DuplicateError   (also FileExistsError)     the same content, name or uid already exists
    ├── FeatureError         (also KeyError)            a feature that is unknown, ambiguous or asked for twice
    ├── QueryError           (also ValueError)          a question that cannot be answered as asked
    │   ├── ArgumentError    (also TypeError)           an argument of a type or a word that the call does not take
    │   └── RowTypeError     (also TypeError)           rows asked for by something that is no row number
    ├── NotFoundError        (also LookupError)         no such atlas, snapshot, dataset, space, layer or column
    │   └── RowIndexError    (also IndexError)          a row number outside of what there is
    ├── ReadOnlyError        (also PermissionError)     a write on a checked-out view
    ├── ConflictError        (also RuntimeError)        another writer is in the way: collisions, or an unfinished purge
    ├── StoreError           (also OSError)             the place where bytes live refused or failed
    │   ├── MissingFileError (also FileNotFoundError)   a file, object or folder is not there
    │   ├── StaleSourceError                            a linked file is not the one that was linked
    │   └── WorkersError                                workers of an executor died, hang, or do not reach the atlas
    ├── CorruptError         (also ValueError)          stored bytes are not what was written
    ├── LimitError           (also MemoryError)         a declared size beyond what may be taken into memory
    └── MissingExtraError    (also ImportError)         an optional library is not installed

    UserWarning
    └── UnknownValueWarning                             a filter asks for a value that no cell has

One ``except AtlasError`` catches all of them::

    try:
        atlas.add("pbmc.h5ad")
    except AtlasError as error:
        print(error)
"""


class AtlasError(Exception):
    """The root of all errors raised on purpose; its text says what, where, what was expected and the way out."""

    def __str__(self) -> str:
        """Return the message as it was written (a ``KeyError`` would quote it)."""
        return str(self.args[0]) if self.args else ""


class SchemaError(AtlasError, TypeError):
    """A schema class breaks a rule, or a column's type clashes with the stored one."""


class NameRefusedError(AtlasError, ValueError):
    """A name holds characters that may not become part of a path, a table or a column."""


class SourceError(AtlasError, ValueError):
    """A file or object cannot be added unchanged."""


class ValuesError(SourceError):
    """A matrix holds a value that the value policy refuses (not finite, negative counts)."""


class DuplicateError(SourceError, FileExistsError):
    """The same content, dataset name or uid is in the atlas already."""


class FeatureError(AtlasError, KeyError):
    """A feature is unknown, ambiguous, or asked for twice."""


class QueryError(AtlasError, ValueError):
    """A query cannot be answered as asked."""


class ArgumentError(QueryError, TypeError):
    """An argument is of a type, or a word of a closed set, that the call does not take."""


class NotFoundError(AtlasError, LookupError):
    """There is no such atlas, snapshot, dataset, feature space, layer or column."""


class RowTypeError(QueryError, TypeError):
    """Rows are asked for by something that is not a row number, a slice, a mask or several row numbers."""


class RowIndexError(NotFoundError, IndexError):
    """A row number is negative or not below the number of rows."""


class ReadOnlyError(AtlasError, PermissionError):
    """A write was asked of a read-only view."""


class ConflictError(AtlasError, RuntimeError):
    """Another writer is in the way: writers kept colliding until patience ran out, or a purge is unfinished."""


# Code that converts an `OSError` lets this class pass first, as it is one (see `store_errors`).
class StoreError(AtlasError, OSError):
    """A folder or object store refused or failed."""


class MissingFileError(StoreError, FileNotFoundError):
    """A file, object or folder is not there."""


class StaleSourceError(StoreError):
    """A file that datasets are linked to has changed or is gone; no value is taken from it."""


class WorkersError(StoreError):
    """Workers of an executor died, hang, or do not reach the atlas."""


class CorruptError(AtlasError, ValueError):
    """Stored bytes are not what was written."""


class LimitError(AtlasError, MemoryError):
    """A declared size is beyond what may be taken into memory."""


class MissingExtraError(AtlasError, ImportError):
    """An optional library is needed; the message names the extra to install."""


class UnknownValueWarning(UserWarning):
    """A filter asks for a value that no cell has, probably a misspelt one; the message has the near matches."""
