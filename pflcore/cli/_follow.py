"""Stand-ins for the record and the progress bar on ranks other than the first.

The first of several ranks alone reads and writes the folder of a command, and prints.
The others play the same runs with it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pflcore.results.record import Facts, Line, OnRound


class NoRecord:
    """A record that is written by another rank."""

    path = Path("the record of rank 0")

    def write(self, line: Facts) -> None:
        """Writes nothing."""

    def run(
        self,
        header: Facts,
        play: Callable[[OnRound], Any],
        on_round: OnRound | None = None,
    ) -> Any:
        """The result of `play`, without a line of it."""

        def ignore(round: int, line: Line) -> None:
            """Takes the place of a function that writes."""

        return play(ignore)


class NoProgress:
    """A progress bar that is shown by another rank."""

    def name(self, text: str) -> None:
        """Shows nothing."""

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows nothing."""

    def skip(self, rounds: int) -> None:
        """Shows nothing."""

    def say(self, text: str) -> None:
        """Prints nothing."""

    def close(self) -> None:
        """Ends nothing."""
