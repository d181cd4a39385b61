"""A progress bar with the time left for the whole experiment.

Where stderr is no terminal, there are only lines of text.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from pflcore import metrics
from pflcore.check import import_optional

# Every interrupt of a command sets it. Where a library swallowed the exception, the end
# of the round raises it again.
INTERRUPTED = threading.Event()


class Progress:
    """A bar that counts the rounds of all runs of a command."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        """Shows a bar for `total` rounds, or none if it is to be quiet."""
        bar = import_optional("tqdm").tqdm
        hidden = True if quiet else None  # None hides it where there is no terminal
        self._bar = bar(total=total, unit="round", disable=hidden, dynamic_ncols=True)
        self.name = self._bar.set_description_str  # writes the run's name before it

    def step(self, line: Mapping[str, Any]) -> None:
        """Counts a round, and shows the accuracy of its record if it was evaluated."""
        if INTERRUPTED.is_set():
            raise KeyboardInterrupt
        if "accuracy" in (line.get("eval") or {}):
            percent = 100 * metrics.mean(line["eval"]["accuracy"])
            self._bar.set_postfix_str(f"accuracy {percent:.1f} %", refresh=False)
        self._bar.update()

    def skip(self, rounds: int) -> None:
        """Takes rounds that will not be played from the total."""
        self._bar.total -= rounds
        self._bar.refresh()

    def say(self, text: str) -> None:
        """Prints a line of text on stderr, above the bar."""
        self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar, below which everything is printed from now on."""
        self._bar.close()
