"""Messages that are built one by one, each when it is sent.

A round's messages can be larger than all other memory of a server, because each holds
a model of its own. Flower's `Grid.send_and_receive` takes an iterable, but its grid of
a deployment reads it twice and keeps all messages until the last one is sent. So
`OneByOneGrid` hands it one message at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

# The pause between two questions for replies grows with the time that a round takes,
# within these bounds in seconds. The longer one is that of Flower's own grid.
MIN_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 3.0
PAUSE_FRACTION = 0.1


class OneTimeMessages:
    """Messages that can be read once, because each is built when it is read.

    Reading them twice raises ValueError. Otherwise the second reader would see no
    message, and a round would send nothing.
    """

    def __init__(self, messages: Iterator[Message]) -> None:
        self._messages: Iterator[Message] | None = messages

    def __iter__(self) -> Iterator[Message]:
        if self._messages is None:
            raise ValueError(
                "messages: expected to be read once, got a second reader; send them "
                "by the strategy's start, or make a list of them."
            )
        messages = self._messages
        self._messages = None
        return messages


class OneByOneGrid:
    """Flower's grid, which sends each message before the next one is built.

    Everything else is that of the grid that it wraps. Messages that are not pushed
    count as messages without a reply.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """The replies that come within `timeout` seconds; None waits for all."""
        waiting: set[str] = set()
        for message in messages:
            waiting.update(self._grid.push_messages([message]))
            # Otherwise this message would live until the next one is built.
            del message
        waiting.discard(None)  # type: ignore[arg-type]  # a message that was not pushed
        return self._receive(waiting, timeout)

    def _receive(self, waiting: set[str], timeout: float | None) -> list[Message]:
        """The replies to the messages with these ids."""
        replies: list[Message] = []
        start = time.monotonic()
        while waiting:
            arrived = list(self._grid.pull_messages(waiting))
            replies += arrived
            waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
            elapsed = time.monotonic() - start
            is_late = timeout is not None and elapsed >= timeout
            if not waiting or is_late:
                break
            pause = PAUSE_FRACTION * elapsed
            time.sleep(min(max(pause, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS))
        return replies
