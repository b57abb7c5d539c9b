"""Signatures: of the root hash, by a key of the user's; what is not signed, signed by another, or changed since is told apart."""

import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from command import ask, done, read, refused
from raggedatlas.catalog import maintenance, mirror, purge, signing, snapshots
from raggedatlas.catalog.catalog import Catalog, open_catalog
from raggedatlas.catalog.signing import sign
from raggedatlas.catalog.verification import verify
from raggedatlas.catalog.versions import FOLDER, change_versions
from raggedatlas.errors import (
    ArgumentError,
    AtlasError,
    CorruptError,
    MissingExtraError,
    MissingFileError,
    NotFoundError,
)
from raggedatlas.model.arguments import no_progress
from raggedatlas.store.location import Location

Two = tuple[Catalog, str, str]


def write_pair(folder: Path, key: Any) -> tuple[Path, Path]:
    """Write a private key and its public half as PEM files."""
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    folder.mkdir(exist_ok=True)
    (folder / "key.pem").write_bytes(private)
    (folder / "public.pem").write_bytes(public)
    return folder / "key.pem", folder / "public.pem"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path / "own", ed25519.Ed25519PrivateKey.generate())


def problems(catalog: Catalog, public: Any, version: int | None = None) -> list[tuple[str, str]]:
    """What verification with a key says of snapshots."""
    return [(p.path, p.message) for p in verify(catalog, version, public_key=public).problems if p.rule == "signature"]


def test_a_signed_snapshot_verifies_with_the_key_and_with_no_other(
    two: Two, keys: tuple[Path, Path], tmp_path: Path
) -> None:
    """Keys are files, bytes or objects; each snapshot counts on its own, and a second key adds a signature."""
    catalog, (private, public) = two[0], keys
    snapshots.snapshot(catalog)
    snapshots.snapshot(catalog)
    assert [place for place, text in problems(catalog, public) if "is not signed" in text] == [
        "snapshot 1",
        "snapshot 2",
    ]
    sign(catalog, 1, private)
    assert problems(catalog, public, 1) == []
    assert problems(catalog, public.read_bytes(), 1) == []
    assert [place for place, _ in problems(catalog, str(public))] == ["snapshot 2"]
    other = ed25519.Ed25519PrivateKey.generate()
    (found,) = problems(catalog, other.public_key(), 1)
    assert "signed with another key" in found[1]
    sign(catalog, 1, other)
    assert problems(catalog, other.public_key(), 1) == problems(catalog, public, 1) == []
    assert verify(catalog).sound


def test_a_snapshot_that_was_changed_since_does_not_count_as_signed(two: Two, keys: tuple[Path, Path]) -> None:
    """Another record with a right root hash of its own, and a signature that is moved to it."""
    catalog, (private, public) = two[0], keys
    record = snapshots.snapshot(catalog)
    sign(catalog, 1, private)
    forged = record.model_copy(update={"label": "forged"}).sealed()
    change_versions(catalog, lambda _: [forged])
    assert "is not signed, or was changed since" in problems(catalog, public)[0][1]
    (file,) = (catalog.tables.location.path / FOLDER).glob("*.sig")
    file.rename(file.with_name(file.name.replace(record.root, forged.root)))
    assert "not of this root hash" in problems(catalog, public)[0][1]


def test_damage_of_a_signature_is_found_without_the_key(two: Two, keys: tuple[Path, Path]) -> None:
    """By the hash in its first line; nothing of cryptography is needed."""
    catalog = two[0]
    snapshots.snapshot(catalog)
    sign(catalog, 1, keys[0])
    (file,) = (catalog.tables.location.path / FOLDER).glob("*.sig")
    good = file.read_bytes()
    for damaged in (good[:-1], good.replace(b"root", b"rOot"), b""):
        file.write_bytes(damaged)
        assert [p.path for p in verify(catalog).problems] == [f"{FOLDER}/{file.name}"]
    file.write_bytes(good)
    assert verify(catalog).sound


def test_signatures_go_with_their_snapshots(two: Two, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """A mirror has them, clean-up keeps them while the snapshot is there, and a purge ends them."""
    catalog, (private, public) = two[0], keys
    snapshots.snapshot(catalog)
    sign(catalog, 1, private)
    target = Location(tmp_path / "mirror")
    mirror.sync(catalog, target, dry_run=False, progress=no_progress)
    assert problems(open_catalog(target), public) == []
    maintenance.gc(catalog, dry_run=False, grace=dt.timedelta(0))
    assert problems(catalog, public) == []
    purge.purge(catalog, two[1])
    assert "changed since" in problems(catalog, public)[0][1]
    maintenance.gc(catalog, dry_run=False, grace=dt.timedelta(0))
    assert list((catalog.tables.location.path / FOLDER).glob("*.sig")) == []


WRONG: dict[str, tuple[Callable[[Path], Any], type[AtlasError], str]] = {
    "missing": (lambda folder: folder / "nothing.pem", MissingFileError, "there is no such file"),
    "a folder": (lambda folder: folder, AtlasError, "read the key"),
    "no key": (lambda folder: b"text", ArgumentError, "openssl genpkey"),
    "a number": (lambda folder: 7, ArgumentError, "is a path to a PEM file"),
    "another kind": (
        lambda folder: write_pair(folder / "ec", ec.generate_private_key(ec.SECP256R1()))[0], ArgumentError, "not of Ed25519",
    ),
    "the public half": (
        lambda folder: write_pair(folder / "p", ed25519.Ed25519PrivateKey.generate())[1], ArgumentError, "No private key",
    ),
    "a passphrase": (
        lambda folder: ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
        ),
        ArgumentError,
        "without a passphrase",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_keys_are_refused(two: Two, tmp_path: Path, name: str) -> None:
    """With what a key is, and how to make one; nothing is written."""
    make, error, message = WRONG[name]
    snapshots.snapshot(two[0])
    with pytest.raises(error, match=message):
        sign(two[0], 1, make(tmp_path))
    assert list((two[0].tables.location.path / FOLDER).glob("*.sig")) == []


def test_what_cannot_be_signed_is_refused(two: Two, keys: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot without hashes, one with a damaged record; and all without the library."""
    catalog = two[0]
    record = snapshots.snapshot(catalog)
    change_versions(catalog, lambda _: [record.model_copy(update={"manifest": "", "root": ""})])
    with pytest.raises(NotFoundError, match="has no hashes"):
        sign(catalog, 1, keys[0])
    change_versions(catalog, lambda _: [record.model_copy(update={"n_cells": 1})])
    with pytest.raises(CorruptError, match="its record is damaged"):
        sign(catalog, 1, keys[0])
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric", None)
    with pytest.raises(MissingExtraError, match=r"raggedatlas\[sign\]"):
        signing.private_key(keys[0])


def test_the_commands_sign_and_verify(two: Two, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """A wrong key is refused before there is a snapshot."""
    path = two[0].location.path
    assert "nothing.pem" in refused("snapshot", path, "--sign-key", tmp_path / "nothing.pem")
    assert read("versions", path) == []
    done("snapshot", path, "--sign-key", keys[0])
    done("snapshot", path)
    assert "snapshot 2" in ask("verify", path, "--public-key", keys[1]).stdout
    done("sign", path, 2, keys[0])
    assert "Nothing is wrong" in done("verify", path, "--public-key", keys[1])
