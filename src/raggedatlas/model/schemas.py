"""Schema classes that a user subclasses: rows of the cell table and rows of a feature registry."""

import datetime as dt
import types
import typing
from enum import Enum
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from raggedatlas.errors import SchemaError
from raggedatlas.model.ids import COLUMN, new_uid
from raggedatlas.model.spaces import (
    DenseZarrPointer,
    GeometryPointer,
    PointerKind,
    SparseZarrPointer,
    known_spaces,
    pointer_field,
)

PRIMARY_KEY = {b"lance-schema:unenforced-primary-key": b"true"}
"""Field metadata that lets parallel merges on a uid see each other's rows."""

RESERVED = ("uid", "dataset_uid", "cell_name")
"""Columns of the cell table that the atlas itself fills."""

_ARROW: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    dt.datetime: pa.timestamp("us"),
    dt.date: pa.date32(),
    list[str]: pa.list_(pa.string()),
    list[int]: pa.list_(pa.int64()),
    list[float]: pa.list_(pa.float32()),
}


class PointerField:
    """Declares a pointer column whose name is not its feature space's name."""

    @staticmethod
    def declare(*, feature_space: str) -> Any:  # noqa: ANN401  (used as the default of a field)
        """Return the default of a pointer field.

        Parameters
        ----------
        feature_space : str
            A registered feature space.

        Examples
        --------
        >>> class Twice(HoxBaseSchema):
        ...     spliced: SparseZarrPointer | None = PointerField.declare(feature_space="gene_expression")
        >>> Twice.pointer_fields()
        {'spliced': ('gene_expression', <PointerKind.SPARSE: 'sparse'>)}
        """
        return Field(default=None, json_schema_extra={"feature_space": feature_space})


class HoxBaseSchema(BaseModel):
    """Base of a cell table's schema.

    A subclass declares at least one pointer field, named after a registered feature space (or declared through
    `PointerField`), and any metadata fields. The rules are checked when the class is defined.

    Attributes
    ----------
    uid : str
        16 random hex digits, unique per cell.
    dataset_uid : str
        The `DatasetRecord` that the cell belongs to.

    Raises
    ------
    SchemaError
        At class definition: no pointer field, an unknown feature space, the wrong pointer kind, a type without an Arrow form.

    Examples
    --------
    >>> class Cells(HoxBaseSchema):
    ...     cell_type: str | None = None
    ...     gene_expression: SparseZarrPointer | None = None
    >>> Cells.arrow_schema().names
    ['uid', 'dataset_uid', 'cell_name', 'cell_type', 'gene_expression']
    """

    model_config = ConfigDict(extra="forbid")

    uid: str = Field(default_factory=new_uid, pattern=r"^[0-9a-f]{16}$")
    dataset_uid: str = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """Check the rules of the class when a subclass is defined."""
        # pydantic calls this after `model_fields` is complete; `__init_subclass__` runs before.
        super().__pydantic_init_subclass__(**kwargs)
        pointers = cls.pointer_fields()
        if not pointers:
            raise SchemaError(
                f"{cls.__name__} declares no pointer field; add at least one named after a feature space, "
                "e.g. `gene_expression: SparseZarrPointer | None = None`."
            )
        spaces = known_spaces()
        for name, (space, kind) in pointers.items():
            if space not in spaces:
                raise SchemaError(
                    f"{cls.__name__}.{name} points into the feature space {space!r}, which is not registered; known are "
                    f"{sorted(spaces)}. Rename the field, declare it with PointerField.declare(feature_space=...), or "
                    "call register_space first."
                )
            if spaces[space].kind is not kind:
                raise SchemaError(
                    f"{cls.__name__}.{name} is a {kind.value} pointer, but the feature space {space!r} is "
                    f"{spaces[space].kind.value}; use the other pointer type."
                )
        # Called for its error: a type without an Arrow form is refused with the class.
        cls.arrow_schema()

    @classmethod
    def pointer_fields(cls) -> dict[str, tuple[str, PointerKind]]:
        """Name the pointer fields: field -> (feature space, kind)."""
        fields = {}
        for name, info in cls.model_fields.items():
            pointers = (
                member.kind
                for member in _members(info.annotation)
                if isinstance(member, type)
                and issubclass(member, SparseZarrPointer | DenseZarrPointer | GeometryPointer)
            )
            if (kind := next(pointers, None)) is not None:
                extra = info.json_schema_extra
                space = extra.get("feature_space") if isinstance(extra, dict) else None
                fields[name] = ((space if isinstance(space, str) else None) or name, kind)
        return fields

    @classmethod
    def arrow_schema(cls) -> pa.Schema:
        """Return the Arrow schema of the cell table, with feature spaces as field metadata."""
        fields = [
            pa.field("uid", pa.string(), nullable=False),
            pa.field("dataset_uid", pa.string(), nullable=False),
            pa.field("cell_name", pa.string()),
        ]
        pointers = cls.pointer_fields()
        for name, info in cls.model_fields.items():
            if name in pointers:
                space, kind = pointers[name]
                fields.append(pointer_field(name, kind, space))
            elif name not in RESERVED:
                fields.append(_plain_field(cls.__name__, name, info))
        return pa.schema(fields)


class FeatureBaseSchema(BaseModel):
    """Base of a feature registry's schema.

    Attributes
    ----------
    uid : str
        Stable canonical identifier, never reassigned.
    global_index : int or None
        Dense index ``0 .. N-1``, assigned by ``reindex_registry()`` and never reassigned; None until then.
    feature_id : str or None
        The id as the field knows it (Ensembl id, antibody name, peak), without version.
    symbol : str or None
        The name people use.
    aliases : list of str
        Other names that resolve to this feature: earlier symbols and ids, versions.
    organism : str or None
        For instance ``"human"``.
    symbol_source : str or None
        Where the symbol comes from: ``"file"`` or ``"by hand"``. A file's symbol never replaces one given by hand.
    other_type : str or None
        What it is where it stands among genes and is none, as the file calls it, e.g. ``"Antibody Capture"``; its name joins no gene.

    Examples
    --------
    >>> FeatureBaseSchema(uid="75bd9972429b821b", symbol="CD79A").global_index is None
    True
    """

    model_config = ConfigDict(extra="forbid")
    index_columns: ClassVar[tuple[str, ...]] = ("uid", "feature_id", "symbol")

    uid: str
    global_index: int | None = None
    feature_id: str | None = None
    symbol: str | None = None
    aliases: list[str] = Field(default_factory=list)
    organism: str | None = None
    symbol_source: str | None = None
    other_type: str | None = None

    @classmethod
    def arrow_schema(cls) -> pa.Schema:
        """Return the Arrow schema of the registry table; `uid` is its merge key."""
        fields = [_plain_field(cls.__name__, name, info) for name, info in cls.model_fields.items() if name != "uid"]
        return pa.schema([pa.field("uid", pa.string(), nullable=False, metadata=PRIMARY_KEY), *fields])


def _members(annotation: Any) -> list[Any]:  # noqa: ANN401  (an annotation is any object)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [a for a in typing.get_args(annotation) if a is not type(None)]
    return [annotation]


def _plain_field(owner: str, name: str, info: FieldInfo) -> pa.Field:
    if COLUMN.fullmatch(name) is None:
        raise SchemaError(f"{owner}.{name} is not a column name; use letters, digits and '_'.")
    members = _members(info.annotation)
    member = members[0]
    if len(members) == 1 and typing.get_origin(member) is typing.Literal:
        kinds = {type(value) for value in typing.get_args(member)}
        member = kinds.pop() if len(kinds) == 1 else member
    if isinstance(member, type) and issubclass(member, Enum):
        member = str
    if len(members) != 1 or member not in _ARROW:
        raise SchemaError(
            f"{owner}.{name} has type {info.annotation}, which no column can hold; use one of "
            f"{sorted(str(getattr(t, '__name__', t)) for t in _ARROW)}, or a Literal of values of one of them, optionally with `| None`."
        )
    return pa.field(
        name, _ARROW[member], nullable=type(None) in typing.get_args(info.annotation) or not info.is_required()
    )
