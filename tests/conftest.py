"""What every test may use: the folder of real files, and how hard the property tests try."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=30,
    stateful_step_count=15,
    suppress_health_check=SLOW_IS_FINE,
    print_blob=True,
    derandomize=True,  # a run says something about the change, not about chance; the other profiles look further
)
settings.register_profile("campaign", settings.get_profile("ci"), max_examples=300, derandomize=False)
settings.register_profile("thorough", settings.get_profile("ci"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real files; its README names their sources and licences."""
    return Path(__file__).parent / "data"
