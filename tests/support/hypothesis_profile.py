"""Number of examples of a property test: its own in the usual run, that of the profile in any other."""

from hypothesis import settings

USUAL = "ci"
"""Profile of the usual run."""


def examples(usual: int) -> settings:
    """Return the settings of a property test.

    Parameters
    ----------
    usual : int
        Number of examples in the usual run. Every other profile has one number for all tests.

    Examples
    --------
    >>> examples(4).max_examples >= 4
    True
    """
    if settings.get_current_profile_name() != USUAL:
        return settings()
    return settings(max_examples=usual)
