"""One sentence for each error of another package that reads a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def explain_read_errors(text: str) -> Iterator[None]:
    """Raises OSError for each error inside, with `text` and the reason.

    An ImportError stays, as its text names the missing package.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:  # each library raises errors of its own kinds
        raise OSError(f"{text} ({one_line(error)}).") from error


def one_line(error: BaseException) -> str:
    """The text of an error on one line, for a sentence."""
    words = " ".join(str(error).split()).replace(". ", "; ")
    return words[:200].rstrip(" :.") or type(error).__name__
