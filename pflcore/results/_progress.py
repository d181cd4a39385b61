"""A progress bar with the time left for the whole experiment; where stderr is no
terminal, only lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from pflcore import metrics
from pflcore.check import import_optional

# set with every interrupt of a command: where a library swallowed it, the round's end
# brings it back
INTERRUPTED = threading.Event()


class Progress:
    """Counts rounds, by tqdm. `say` prints a line beside the bar."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        """`total` rounds over all runs."""
        bar = import_optional("tqdm").tqdm
        off = True if quiet else None  # None: where there is no terminal
        self._bar = bar(total=total, unit="round", disable=off, dynamic_ncols=True)
        self.name = self._bar.set_description_str  # what runs now

    def step(self, line: Mapping[str, Any]) -> None:
        """One round is done; its record shows the accuracy, where it was evaluated."""
        if INTERRUPTED.is_set():
            raise KeyboardInterrupt
        if "accuracy" in (line.get("eval") or {}):
            said = f"accuracy {100 * metrics.mean(line['eval']['accuracy']):.1f} %"
            self._bar.set_postfix_str(said, refresh=False)
        self._bar.update()

    def skip(self, rounds: int) -> None:
        """So many rounds will not be played."""
        self._bar.total -= rounds
        self._bar.refresh()

    def say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the bar: what is printed now stands below it."""
        self._bar.close()
