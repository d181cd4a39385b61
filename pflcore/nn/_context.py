"""What a forward pass needs beside row and input. One per thread: workers run different
clients at the same time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class _ForwardState(threading.local):
    train: bool = False
    # [b] or None; a forward pass in training replaces it by the updated row
    buffers: Any = None
    # [] int64, the client's and step's own, for pflcore.nn.Dropout
    seed: Tensor | None = None
    # counts the random layers of one forward pass, so that each draws its own numbers
    random_layer: int = 0
    # one client, no vmap around: kernels that know no vmap may run
    single_client: bool = False


forward_state = _ForwardState()


@contextmanager
def forward_context(
    train: bool,
    buffers: Tensor | None = None,
    seed: Tensor | None = None,
    single_client: bool = False,
) -> Iterator[None]:
    """Forward passes inside run in this mode; the caller's comes back afterwards."""
    mine = vars(forward_state)  # of this thread
    before = dict(mine)
    mine.update(
        train=train,
        buffers=buffers,
        seed=seed,
        random_layer=0,
        single_client=single_client,
    )
    try:
        yield
    finally:
        mine.clear()
        mine.update(before)
