"""Run the speed tests as plain tests unless measuring is asked for."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_configure(config: pytest.Config) -> None:
    """Switch measuring off unless ``--benchmark-only`` or ``--benchmark-enable`` is given."""
    asked = config.getoption("benchmark_only", False) or config.getoption("benchmark_enable", False)
    if not asked:
        config.option.benchmark_disable = True
