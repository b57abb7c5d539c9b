"""Fixtures of all tests, and the hypothesis profiles: `ci` for the usual run, `nightly` for `scripts/test --nightly`."""

import logging
import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

from support.object_store import FaultyProxy, Remote

# Making the commands of an application from its functions takes longer than most of them run.
typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=15,
    stateful_step_count=8,
    suppress_health_check=SLOW_IS_FINE,
    print_blob=True,
    derandomize=True,  # a failure is due to the change, not to chance; the nightly profile looks further
)
settings.register_profile(
    "nightly",
    settings.get_profile("ci"),
    max_examples=int(os.environ.get("EXAMPLES", "100")),
    stateful_step_count=15,
    derandomize=False,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


# Programs that tests start import `support`, too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]).rstrip(
    os.pathsep
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that `scripts/test` uses."""
    parser.addoption(
        "--ends", choices=["long", "all"], help="of parametrized tests, of those marked `long` or of all, run the first and the last case"
    )  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases between the first and the last, after marks have chosen."""
    ends = config.getoption("--ends", default=None)
    if ends is None:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        shortened = ends == "all" or item.get_closest_marker("long")
        cases.setdefault(item.nodeid.partition("[")[0] if shortened else item.nodeid, []).append(item)
    kept = {item for own in cases.values() for item in (own[0], own[-1])}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real files; its README names their sources and licences."""
    return Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def s3_proxy() -> Iterator[FaultyProxy]:
    """An object store on loopback behind a proxy that counts and fails on demand."""
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
