"""A progress bar with the time left for the whole experiment; without tqdm, or where stderr is no
terminal, only lines."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from typing import Any

from pflcore import metrics

# set with every interrupt of a command: where a library swallowed it, the round's end brings it
# back
INTERRUPTED = threading.Event()


class Progress:
    """Counts rounds. `say` prints a line beside the bar."""

    def __init__(self, total: int, quiet: bool = False) -> None:
        """`total` rounds over all runs."""
        self._bar: Any = None
        if quiet:
            return
        try:
            from tqdm import tqdm
        except ImportError:
            self.say(
                "There is no progress bar, because tqdm is not installed; get it with: pip install "
                "'pflcore[cli]'."
            )
            return
        self._bar = tqdm(total=total, unit="round", disable=None, dynamic_ncols=True)

    def name(self, text: str) -> None:
        """What runs now."""
        if self._bar is not None:
            self._bar.set_description_str(text)

    def step(self, line: Mapping[str, Any]) -> None:
        """One round is done; its record shows the accuracy, where it was evaluated."""
        if INTERRUPTED.is_set():
            raise KeyboardInterrupt
        if self._bar is None:
            return
        if line.get("eval") and "accuracy" in line["eval"]:
            self._bar.set_postfix_str(
                f"accuracy {100 * metrics.mean(line['eval']['accuracy']):.1f} %", refresh=False
            )
        self._bar.update()

    def skip(self, rounds: int) -> None:
        """So many rounds will not be played."""
        if self._bar is not None:
            self._bar.total -= rounds
            self._bar.refresh()

    def say(self, text: str) -> None:
        if self._bar is not None and not self._bar.disable:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
