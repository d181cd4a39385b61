"""A progress bar with the remaining time of the whole experiment.

Where stderr is no terminal, only lines of text are printed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from pflcore import metrics
from pflcore.check import import_optional

# Every interrupt of a command sets this event. Where a library swallows the exception,
# the end of the round raises it again.
INTERRUPTED = threading.Event()


class Progress:
    """A bar that counts the rounds of all runs of a command.

    Args:
        total: The number of rounds.
        quiet: True shows no bar.
        silent: True prints no lines of text, as on ranks other than the first.
    """

    def __init__(self, total: int, quiet: bool = False, silent: bool = False) -> None:
        """Shows the bar."""
        self._is_silent = silent
        bar = import_optional("tqdm").tqdm
        self._is_quiet = quiet
        # To tqdm, None means to hide the bar where there is no terminal.
        hidden = True if quiet else None
        self._bar = bar(total=total, unit="round", disable=hidden, dynamic_ncols=True)
        # A function that writes a run's name before the bar.
        self.name = self._bar.set_description_str

    def begin(self, name: str) -> None:
        """Says which run begins, where no bar does and the user wants to know."""
        if self._bar.disable and not self._is_quiet:
            self.say(name)

    def step(self, line: Mapping[str, Any]) -> None:
        """Counts a round, and shows the accuracy in its line, if any."""
        if INTERRUPTED.is_set():
            raise KeyboardInterrupt
        if "accuracy" in (line.get("eval") or {}):
            percent = 100 * metrics.mean(line["eval"]["accuracy"])
            self._bar.set_postfix_str(f"accuracy {percent:.1f} %", refresh=False)
        self._bar.update()

    def skip(self, rounds: int) -> None:
        """Subtracts rounds that will not be played from the total."""
        self._bar.total -= rounds
        self._bar.refresh()

    def say(self, text: str) -> None:
        """Prints a line of text on stderr, above the bar."""
        if not self._is_silent:
            self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar. Later output stands below it."""
        self._bar.close()
