"""How hard a property test tries: as often as it says in the usual run, as often as the profile says in a campaign."""

from hypothesis import settings

USUAL = "ci"
"""Profile of the usual run, in which each test knows how much of its time it is worth."""


def examples(usual: int) -> settings:
    """Give the settings of a property test.

    Parameters
    ----------
    usual : int
        Examples of the usual run; every other profile has one number for all tests.

    Examples
    --------
    >>> examples(4).max_examples >= 4
    True
    """
    if settings.get_current_profile_name() != USUAL:
        return settings()
    return settings(max_examples=usual)
