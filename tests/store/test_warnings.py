"""Filters of warnings: whatever threads do, they are afterwards what they were before."""

import threading
import warnings

import pytest

from raggedatlas.store.runtime import warnings_as

pytestmark = pytest.mark.fast


def test_threads_leave_the_filters_as_they_were() -> None:
    """Contexts that would overlap wait for each other, so none puts back the filters of another."""
    before = list(warnings.filters)
    inside, go_on = threading.Event(), threading.Event()

    def first() -> None:
        with warnings_as("ignore"):
            inside.set()
            go_on.wait(10)

    def second() -> None:
        inside.wait(10)
        with warnings_as("error", DeprecationWarning):
            pass

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    assert inside.wait(10)
    threads[1].join(0.1)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert list(warnings.filters) == before


def test_warnings_are_ignored_or_raised_inside_alone() -> None:
    """Inside, the chosen warnings do what was chosen; after an error too, the filters are the old ones."""
    with warnings_as("ignore"):
        warnings.warn("not seen", UserWarning, stacklevel=1)
    with (
        warnings_as("ignore"),
        pytest.raises(DeprecationWarning, match="raised"),
        warnings_as("error", DeprecationWarning),
    ):
        warnings.warn("raised", DeprecationWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", UserWarning, stacklevel=1)
