"""An object store on loopback behind a proxy that counts and fails on demand."""

import logging
import warnings
from collections.abc import Iterator

import pytest

from support.object_store import FaultyProxy, Remote


@pytest.fixture(scope="session")
def s3_proxy() -> Iterator[FaultyProxy]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from moto.server import ThreadedMotoServer
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    host, port = server.get_host_and_port()
    with FaultyProxy(f"http://{host}:{port}") as proxy:
        yield proxy
    server.stop()


@pytest.fixture
def remote(s3_proxy: FaultyProxy) -> Iterator[Remote]:
    """Give an empty bucket; no fault outlives the test."""
    yield Remote.make(s3_proxy)
    s3_proxy.forget()
