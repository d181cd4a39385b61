"""Errors that end a command, as one sentence for its user."""

from __future__ import annotations


class RunFailed(Exception):
    """An error in the middle of a run."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or else its class's name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
