"""An S3 server on loopback that counts what it is asked, and locations on it."""

import urllib.request
import warnings
from collections.abc import Iterator
from uuid import uuid4

import pytest

from raggedatlas.store.location import Location
from raggedatlas.store.native import LEVELS, library


class CountingServer:
    """A moto server; `requests` lists (method, path with query) of everything it was asked."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moto.server import ThreadedMotoServer
        self.requests: list[tuple[str, str]] = []
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        application = self.server._server.app

        def counted(environ, start_response):  # noqa: ANN001, ANN202 - WSGI
            self.requests.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
            return application(environ, start_response)

        self.server._server.app = counted
        host, port = self.server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"

    def location(self) -> Location:
        """Return a prefix in a new bucket."""
        bucket = f"b{uuid4().hex[:12]}"
        request = urllib.request.Request(f"{self.endpoint}/{bucket}", method="PUT")
        urllib.request.urlopen(request).close()
        options = {
            "aws_access_key_id": "test",
            "aws_secret_access_key": "test",
            "aws_region": "us-east-1",
            "aws_endpoint": self.endpoint,
            "allow_http": "true",
        }
        return Location(f"s3://{bucket}/atlas", options)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[CountingServer]:
    server = CountingServer()
    yield server
    server.server.stop()


@pytest.fixture
def s3(s3_server: CountingServer) -> Location:
    return s3_server.location()


@pytest.fixture
def local(tmp_path) -> Location:  # noqa: ANN001
    return Location(str(tmp_path / "zarr_store"))


@pytest.fixture(params=range(len(LEVELS)), ids=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[int]:
    """Use each level that this machine has."""
    best = library().ra_best_level()
    if request.param > best:
        pytest.skip(f"this machine has no {LEVELS[request.param]}")
    library().ra_set_level(request.param)
    yield request.param
    library().ra_set_level(best)
