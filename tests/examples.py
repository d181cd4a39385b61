"""Number of examples that hypothesis draws for a test."""

from hypothesis import settings

QUICK = 15  # used by conftest.py too


def examples(count):
    """Draws `count` examples in the deep suite, at most 15 otherwise."""
    return settings(
        max_examples=min(count, QUICK) if settings().max_examples == QUICK else count
    )
