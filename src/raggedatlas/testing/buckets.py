"""A place in an object store on loopback, behind a proxy, for tests; atlases are copied to and from it in one go."""

import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from raggedatlas.testing.proxy import FaultyProxy

if TYPE_CHECKING:
    from obstore.store import S3Store

_LOGIN = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}


@dataclass(frozen=True)
class Remote:
    """A prefix in a bucket of its own, with the proxy in front of it.

    Parameters
    ----------
    bucket : str
        Its name.
    proxy : FaultyProxy
        In front of an S3 server.
    """

    bucket: str
    proxy: FaultyProxy

    @classmethod
    def make(cls, proxy: FaultyProxy) -> "Remote":
        """Make an empty bucket; the proxy forgets what it has seen."""
        bucket = f"walk-{uuid4().hex[:12]}"
        request = urllib.request.Request(f"{proxy.upstream}/{bucket}", method="PUT")
        with urllib.request.urlopen(request):
            proxy.forget()
        return cls(bucket, proxy)

    @property
    def uri(self) -> str:
        """Address of the atlas."""
        return f"s3://{self.bucket}/my.atlas"

    @property
    def options(self) -> dict[str, str]:
        """Storage options that lead through the proxy."""
        login = {f"aws_{key}": value for key, value in _LOGIN.items()}
        return login | {"aws_endpoint": self.proxy.address, "allow_http": "true"}

    def upload(self, folder: Path) -> None:
        """Copy an atlas from a folder to here, past the proxy."""
        import obstore

        store = self._store()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                obstore.put(store, path.relative_to(folder).as_posix(), path.read_bytes())

    def download(self, folder: Path) -> Path:
        """Copy the atlas from here to a folder, past the proxy, and return the folder."""
        import obstore

        store = self._store()
        for page in obstore.list(store):
            for item in page:
                path = folder / item["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(obstore.get(store, item["path"]).bytes())
        return folder

    def _store(self) -> "S3Store":
        from obstore.store import S3Store

        options: dict[str, Any] = {**_LOGIN, "endpoint": self.proxy.upstream, "client_options": {"allow_http": True}}
        return S3Store(self.bucket, prefix="my.atlas", **options)
