"""Warnings of libraries kept from the user, or made errors: one thread at a time, since Python has one set of filters for all."""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

_ONE = threading.RLock()


@contextmanager
def warnings_as(
    action: Literal["ignore", "error"], category: type[Warning] = Warning, message: str = ""
) -> Iterator[None]:
    """Ignore warnings, or raise them as errors, inside the context.

    Two threads that changed the filters at the same time would put back each other's, for good; so others wait.

    Parameters
    ----------
    action : {"ignore", "error"}
        What becomes of a warning.
    category : type
        Which warnings.
    message : str
        Regular expression of what they begin with.

    Examples
    --------
    >>> import warnings
    >>> with warnings_as("ignore"):
    ...     warnings.warn("nobody reads this", stacklevel=1)
    """
    with _ONE, warnings.catch_warnings():
        warnings.filterwarnings(action, message, category)
        yield
