"""What a forward pass needs beside row and input.

Each thread has its own: workers run different clients at the same time.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class _ForwardState(threading.local):
    train: bool = False
    # [b] or None; a forward pass in training replaces it by the updated row.
    buffers: Any = None
    # [] int64, for `pflcore.nn.Dropout`; each client has another one in each step.
    seed: Tensor | None = None
    # Counts the random layers of one forward pass, so that each draws its own numbers.
    random_layer: int = 0
    # One client without vmap: kernels that do not support vmap may run.
    single_client: bool = False


forward_state = _ForwardState()


@contextmanager
def forward_context(
    train: bool,
    buffers: Tensor | None = None,
    seed: Tensor | None = None,
    single_client: bool = False,
) -> Iterator[None]:
    """Sets the state of forward passes inside, and restores the caller's afterwards."""
    thread_state = vars(forward_state)  # a thread sees its own attributes
    saved_state = dict(thread_state)
    thread_state.update(
        train=train,
        buffers=buffers,
        seed=seed,
        random_layer=0,
        single_client=single_client,
    )
    try:
        yield
    finally:
        thread_state.clear()
        thread_state.update(saved_state)
