"""State of forward passes, apart from their row and input.

Each thread has a state of its own, since workers run different clients at the same
time.

Symbols: b numbers of batch norm's statistics.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class _ForwardState(threading.local):
    """The state of the forward passes of one thread.

    Attributes:
        train: True for a pass in training mode.
        buffers: Batch norm's statistics [b], or None for those of the net. A pass in
            training mode replaces them by the updated ones.
        seed: The seed of `pflcore.nn.Dropout`, [] int64. Each client has another one in
            each step. None means torch's global generator.
        random_layer: The number of random layers that this pass has called. Each layer
            draws numbers of its own.
        single_client: True for one client without vmap, so that kernels that do not
            support vmap may run.
        body: What computes the features that the head sees, in place of the module's
            own layers; None for those.
    """

    train: bool = False
    buffers: Any = None
    seed: Tensor | None = None
    random_layer: int = 0
    single_client: bool = False
    body: Any = None


forward_state = _ForwardState()


@contextmanager
def forward_context(
    train: bool,
    buffers: Tensor | None = None,
    seed: Tensor | None = None,
    single_client: bool = False,
    body: Any = None,
) -> Iterator[None]:
    """Context with a state of forward passes; the caller's is restored afterwards.

    The arguments are those of the state, which begins with no random layer called.
    """
    thread_state = vars(forward_state)  # a thread sees its own attributes
    saved_state = dict(thread_state)
    thread_state.update(
        train=train,
        buffers=buffers,
        seed=seed,
        random_layer=0,
        single_client=single_client,
        body=body,
    )
    try:
        yield
    finally:
        thread_state.clear()
        thread_state.update(saved_state)
