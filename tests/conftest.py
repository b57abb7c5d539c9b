"""Fixtures of all tests, and the hypothesis profiles: `ci` for the usual run, `nightly` for `scripts/test --nightly`."""

import os
from functools import cache
from pathlib import Path

import pytest
import typer.testing
from hypothesis import HealthCheck, settings

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


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real files; its README names their sources and licences."""
    return Path(__file__).parent / "data"
