"""Members of `obsm` that become embeddings: vectors of the cells, each a feature space that can be queried and searched."""

from collections.abc import Mapping
from dataclasses import replace

from raggedatlas.errors import NotFoundError, SchemaError
from raggedatlas.ingest.options import IngestOptions
from raggedatlas.model.contracts import SourceSchema
from raggedatlas.model.ids import column_name
from raggedatlas.model.pointers import PointerKind
from raggedatlas.model.spaces import FeatureSpace


def with_embeddings(
    schema: SourceSchema, options: IngestOptions, spaces: Mapping[str, FeatureSpace]
) -> tuple[IngestOptions, dict[str, FeatureSpace]]:
    """Turn `embeddings=` into spaces.

    Parameters
    ----------
    schema : SourceSchema
        What the source holds.
    options : IngestOptions
        The caller's choices.
    spaces : mapping of str to FeatureSpace
        Those that the atlas knows.

    Returns
    -------
    tuple
        The choices with their `spaces`, and the spaces with those that are new.

    Raises
    ------
    NotFoundError
        If there is no such member of `obsm`, or several modalities have one.
    SchemaError
        If a space of that name holds something else.
    """
    asked = options.embeddings
    if isinstance(asked, str):
        asked = [asked]
    named = dict(asked) if isinstance(asked, Mapping) else {key: _name(key) for key in asked}
    known, chosen = dict(spaces), dict(options.spaces)
    for key, name in named.items():
        space = known.setdefault(
            name,
            FeatureSpace(
                name, PointerKind.DENSE, has_features=False, is_counts=False, description=f"Vectors of {key}."
            ),
        )
        if space.kind is not PointerKind.DENSE or space.has_features or space.rank != 1:
            raise SchemaError(
                f"embeddings={{{key!r}: {name!r}}}: the feature space {name!r} is no embedding but {space}; choose another name."
            )
        chosen[_find(schema, key)] = name
    return replace(options, spaces=chosen), known


def _name(key: str) -> str:
    return column_name(key.rpartition("/")[2].removeprefix("X_"))


def _find(schema: SourceSchema, key: str) -> str:
    offered = [info.key for info in schema.matrices if "obsm" in info.key.split("/")[:-1]]
    found = [name for name in offered if name == key or name.rpartition("obsm/")[2] == key.removeprefix("obsm/")]
    if len(found) != 1:
        several = f"; it is one of {found}, name it in full" if found else ""
        raise NotFoundError(f"embeddings: the source has no matrix obsm/{key}{several}; it has {offered}.")
    return found[0]
