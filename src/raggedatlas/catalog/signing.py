"""Signatures of snapshots: Ed25519 over the root hash, each in a file beside the manifests."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from raggedatlas.catalog.catalog import Catalog
from raggedatlas.catalog.versions import FOLDER, SIGNATURE, find_version
from raggedatlas.errors import ArgumentError, CorruptError, MissingExtraError, NotFoundError
from raggedatlas.model.records import AtlasVersionRecord
from raggedatlas.model.validation import Problem
from raggedatlas.store.location import store_errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_PREFIX = b"raggedatlas root hash 1\n"
"""Before the root hash in what is signed, so that a signature of the key for another purpose is none of a snapshot."""

_MAKE = "`openssl genpkey -algorithm ed25519 -out key.pem` makes one, `openssl pkey -in key.pem -pubout -out public.pem` its public half"
_RESTORE = "Restore the atlas from a copy."


class Signature(BaseModel):
    """A signature of a snapshot, as stored.

    Attributes
    ----------
    root : str
        Root hash of the snapshot.
    public_key, signature : str
        Raw bytes of Ed25519 in hex.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    root: str
    public_key: str
    signature: str


def sign(catalog: Catalog, version: int | str, key: Any) -> Signature:  # noqa: ANN401 (a path, bytes, or a key of cryptography)
    """Sign a snapshot; see `RaggedAtlas.sign`."""
    private = private_key(key)
    record = find_version(catalog, version)
    if not record.manifest:
        raise NotFoundError(
            f"Snapshot {record.version} of {catalog.location.uri} has no hashes of its files, because it was taken before they were "
            "recorded; take another one with snapshot() and sign that."
        )
    if record.root and record.root != record.root_hash:
        raise CorruptError(
            f"Snapshot {record.version} of {catalog.location.uri} is not signed: its record is damaged. Run verify()."
        )
    public = private.public_key().public_bytes_raw()
    made = private.sign(_PREFIX + record.root_hash.encode())
    signature = Signature(root=record.root_hash, public_key=public.hex(), signature=made.hex())
    data = signature.model_dump_json().encode()
    # With its own hash in the first line, so that damage is noticed without the public key.
    name = f"{FOLDER}/{record.root_hash}.{hashlib.sha256(public).hexdigest()[:16]}{SIGNATURE}"
    catalog.tables.location.write_bytes(name, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
    return signature


def signature_files(catalog: Catalog, records: Iterable[AtlasVersionRecord]) -> dict[str, int]:
    """Return the files of all signatures of some snapshots: path below ``lance_db`` -> number of the snapshot."""
    numbers = {record.root_hash: record.version for record in records if record.manifest}
    there = (key for key, *_ in catalog.tables.location.child(FOLDER).list_objects() if key.endswith(SIGNATURE))
    return {f"{FOLDER}/{key}": numbers[key.split(".")[0]] for key in sorted(there) if key.split(".")[0] in numbers}


def check_signatures(
    catalog: Catalog,
    records: Iterable[AtlasVersionRecord],
    public_key: Any = None,  # noqa: ANN401 (a path, bytes, or a key of cryptography)
) -> list[Problem]:
    """Check the files of all signatures of some snapshots, and that each is signed with a key, if one is given (rule ``signature``)."""
    records, public = list(records), None if public_key is None else _public_key(public_key)
    signed: dict[int, list[Signature]] = {record.version: [] for record in records}
    problems = []
    for path, number in signature_files(catalog, records).items():
        try:
            signed[number].append(_read(catalog, path))
        except CorruptError as error:
            problems.append(Problem("signature", "must", path, str(error), _RESTORE))
    for record in records if public is not None else ():
        assert public is not None
        wrong = _judge(record, signed[record.version], public)
        if wrong:
            fix = "Do not use it unless you know why; whoever has the private key can sign it with sign()."
            problems.append(Problem("signature", "must", f"snapshot {record.version}", wrong, fix))
    return problems


def _judge(record: AtlasVersionRecord, signatures: list[Signature], public: "Ed25519PublicKey") -> str:
    """Return why a snapshot does not count as signed with a key; empty if it does."""
    from cryptography.exceptions import InvalidSignature

    if not signatures:
        return "it is not signed, or was changed since"
    own = [s for s in signatures if s.public_key == public.public_bytes_raw().hex()]
    if not own:
        return f"it is signed with another key: {', '.join(s.public_key for s in signatures)}"
    for signature in own:
        try:
            public.verify(bytes.fromhex(signature.signature), _PREFIX + record.root_hash.encode())
        except (InvalidSignature, ValueError):
            return "its signature is not of this root hash and key"
        if signature.root != record.root_hash:
            return f"its signature is of another root hash, {signature.root}"
    return ""


def _read(catalog: Catalog, path: str) -> Signature:
    digest, _, data = catalog.tables.location.read_bytes(path).partition(b"\n")
    if hashlib.sha256(data).hexdigest().encode() != digest:
        raise CorruptError("its content does not have the SHA-256 in its first line")
    try:
        return Signature.model_validate_json(data)
    except ValidationError as error:
        raise CorruptError(f"it does not parse: {error.errors()[0]['msg']}") from error


def private_key(key: Any) -> "Ed25519PrivateKey":  # noqa: ANN401 (a path, bytes, or a key of cryptography)
    """Return a private key, which may be a path to a PEM file, or the bytes of one.

    Raises
    ------
    MissingExtraError
        If cryptography is not installed.
    ArgumentError
        If it is no unencrypted private key of Ed25519.
    MissingFileError, StoreError
        If the file is missing or cannot be read.
    """
    serialization, ed25519 = _cryptography()
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key  # type: ignore[no-any-return]
    return _load(key, "private", lambda data: serialization.load_pem_private_key(data, None), ed25519.Ed25519PrivateKey)  # type: ignore[no-any-return]


def _public_key(key: Any) -> "Ed25519PublicKey":  # noqa: ANN401
    serialization, ed25519 = _cryptography()
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key  # type: ignore[no-any-return]
    return _load(key, "public", serialization.load_pem_public_key, ed25519.Ed25519PublicKey)  # type: ignore[no-any-return]


def _load(key: Any, which: str, load: Any, kind: type) -> Any:  # noqa: ANN401
    if not isinstance(key, str | os.PathLike | bytes) or (isinstance(key, str) and "\0" in key):
        raise ArgumentError(f"A {which} key is a path to a PEM file, its bytes, or a key of cryptography, not {key!r}.")
    shown = "the bytes" if isinstance(key, bytes) else os.fspath(key)
    data = key
    if not isinstance(key, bytes):
        with store_errors(f"read the key {shown}"):
            data = Path(key).read_bytes()
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        found = load(data)
    # A TypeError means that a passphrase is needed.
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ArgumentError(
            f"No {which} key can be read from {shown}: {error} Expected PEM without a passphrase; {_MAKE}."
        ) from error
    if not isinstance(found, kind):
        raise ArgumentError(f"{shown} is a key of {type(found).__name__}, not of Ed25519; {_MAKE}.")
    return found


def _cryptography() -> Any:  # noqa: ANN401 (two modules of an optional library)
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingExtraError("Signatures need cryptography: pip install 'raggedatlas[sign]'.") from error
    return serialization, ed25519
