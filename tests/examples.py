"""How many examples hypothesis draws, where a law needs other numbers than the
suites' own."""

from hypothesis import settings

QUICK = 15  # also in conftest


def examples(count):
    """`count` in the deep suite, at most 15 in the quick one."""
    return settings(
        max_examples=min(count, QUICK) if settings().max_examples == QUICK else count
    )
