"""CUDA graphs of the clients' gradients.

The gradients of many small models take some hundred small kernels. On a GPU, launching
those kernels takes longer than running them. A CUDA graph is recorded from one step.
Every later step of the same shapes replays it by one launch.

A graph gathers the minibatches of a block of clients and computes their gradients. The
rest of a step is one fused kernel, which differs by algorithm and step size. It stays
outside, so one graph serves all algorithms and all rounds.

A replay repeats the recorded kernels at the recorded addresses, without Python. So a
recorded function may depend on its inputs and on what its key names, and on nothing
else. Before each replay the inputs, random seeds among them, are copied into memory at
fixed addresses (the arena). The graph itself copies its results into the arena.

Torch captures into a pool of memory as long as one graph of that pool lives. So there
is always one: a graph is dropped only where there are too many.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pflcore.check import warn_caller

Tensors = dict[str, Tensor]
GraphFunction = Callable[[Tensors], Tensors]

# A capture takes as long as about ten steps that launch one kernel after another. So it
# is too expensive for shapes that come seldom, such as those of the last batch of a
# cohort that is drawn anew in every round.
CAPTURE_AFTER_STEPS = 8
# With more graphs, the one that was not replayed for the longest time is dropped. Its
# shapes are never captured again: of more shapes than graphs that come in turn, each
# would be dropped before it comes again.
MAX_GRAPHS = 32
MAX_COUNTED_SHAPES = 4096  # shapes whose steps are counted


@dataclass
class _Graph:
    """A recorded function, with its inputs and results in the arena."""

    replay: Callable[[], None]
    # Nothing calls the function again. It keeps alive the memory that the graph reads.
    function: GraphFunction
    inputs: Tensors
    outputs: Tensors


class _FixedMemory:
    """The arena: memory at fixed addresses that graphs share.

    There is one piece of memory for each name and dtype. A larger piece replaces one
    that is too small. The graphs on the smaller one stay as they are, and keep it.

    Attributes:
        device: The device of the memory.
        rows: The number of rows for which a new piece has room.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rows = 0
        self._pieces: dict[tuple[str, torch.dtype], Tensor] = {}

    def views(self, tensors: Tensors) -> Tensors:
        """Views of the memory for tensors of these names, shapes and dtypes."""
        views = {}
        for name, t in tensors.items():
            piece = self._pieces.get((name, t.dtype))
            if piece is None or piece.numel() < t.numel():
                # A piece is twice the one before it at least, so that all of them
                # together take no more than twice the last.
                outgrown = 0 if piece is None else 2 * piece.numel()
                numbers = max(t.numel(), t[0].numel() * self.rows, outgrown)
                piece = torch.empty(numbers, dtype=t.dtype, device=self.device)
                self._pieces[name, t.dtype] = piece
            views[name] = piece[: math.prod(t.shape)].view(t.shape)
        return views


class GradientGraphs:
    """The CUDA graphs of one run on one GPU.

    Args:
        device: The GPU.
        capture_after_steps: The number of steps of the same shapes after which a step
            is captured; by default `CAPTURE_AFTER_STEPS`.

    Attributes:
        refusal_reason: The reason why no step is captured or replayed, or None.
        replays: The number of steps that were replayed.
    """

    def __init__(
        self, device: torch.device, capture_after_steps: int | None = None
    ) -> None:
        self.refusal_reason: str | None = None
        self.replays = 0
        self._device = device
        if capture_after_steps is None:
            capture_after_steps = CAPTURE_AFTER_STEPS
        self._capture_after_steps = capture_after_steps
        self._arena = _FixedMemory(device)
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._dropped: set[Hashable] = set()
        self._step_counts: Counter[Hashable] = Counter()

    @property
    def summary(self) -> str:
        """Phrase for the record: steps were replayed, or the reason why not."""
        if self.refusal_reason is not None:
            return f"eager: {self.refusal_reason}"
        if self.replays == 0:
            count = self._capture_after_steps
            return f"eager so far: a step is captured after {count} of its shapes"
        return "captured"

    def reserve(self, clients: int) -> None:
        """Lets new fixed memory have room for steps of this number of clients.

        Otherwise each step that is larger than those before it would take new memory,
        beside that of their graphs.
        """
        self._arena.rows = max(self._arena.rows, clients)

    def run(self, key: Hashable, function: GraphFunction, inputs: Tensors) -> Tensors:
        """The results of `function(inputs)`, by a replay where there is a graph.

        The next replay overwrites the results.

        Args:
            key: A name of everything but the inputs on which `function` depends.
            function: The function, which may be recorded.
            inputs: The function's inputs, by name.
        """
        if self.refusal_reason is not None:
            return function(inputs)
        shapes = tuple((name, t.shape, t.dtype) for name, t in inputs.items())
        graph = self._graphs.get((key, shapes))
        if graph is None:
            return self._run_eagerly((key, shapes), function, inputs)
        self._graphs.move_to_end((key, shapes))
        for name, view in graph.inputs.items():
            view.copy_(inputs[name])
        graph.replay()
        self.replays += 1
        return graph.outputs

    def _run_eagerly(
        self, key: Hashable, function: GraphFunction, inputs: Tensors
    ) -> Tensors:
        """The results of `function(inputs)` without a replay.

        The function is recorded once its key and shapes came often enough.
        """
        if key in self._dropped:
            return function(inputs)
        if len(self._step_counts) >= MAX_COUNTED_SHAPES:
            self._step_counts.clear()
        self._step_counts[key] += 1
        if self._step_counts[key] <= self._capture_after_steps:
            return function(inputs)
        try:
            outputs = _run_without_waiting(function, inputs)
        except Exception as error:
            self.refusal_reason = (
                f"a step makes the host wait for the GPU ({_first_error_line(error)})"
            )
            # An error with another cause is raised here.
            return function(inputs)
        try:
            self._graphs[key] = self._capture_graph(function, inputs, outputs)
        except RuntimeError as error:
            self.refusal_reason = _first_error_line(error)
            warn_caller(
                "a local step could not be captured as a CUDA graph "
                f"({self.refusal_reason}); the run goes on without graphs",
                RuntimeWarning,
            )
        while len(self._graphs) > MAX_GRAPHS:
            dropped_key, _ = self._graphs.popitem(last=False)
            self._dropped.add(dropped_key)
        return outputs

    def _capture_graph(
        self, function: GraphFunction, inputs: Tensors, outputs: Tensors
    ) -> _Graph:
        """A graph of `function` on memory of the arena.

        `outputs` are results of the function, which show their names and shapes.
        """
        results = {f"result {name}": t for name, t in outputs.items()}
        input_views = self._arena.views(inputs)
        result_views = self._arena.views(results)
        for name, view in input_views.items():
            view.copy_(inputs[name])
        with torch.cuda.device(self._device), _current_stream_kept():
            if self._pool is None:
                # In one pool, graphs may use the same memory for their temporaries.
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            # "thread_local" lets other threads use the GPU meanwhile. Their work is no
            # part of the graph.
            options = {"pool": self._pool, "stream": self._stream}
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
                for name, t in function(input_views).items():
                    result_views[f"result {name}"].copy_(t)
        graph_outputs = {name: result_views[f"result {name}"] for name in outputs}
        return _Graph(graph.replay, function, input_views, graph_outputs)


@contextmanager
def _current_stream_kept() -> Iterator[None]:
    """Context after which the stream before it is current again.

    `torch.cuda.graph` leaves its own stream current where a capture cannot begin, and
    where it cannot end.
    """
    stream = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(stream)


def _run_without_waiting(function: GraphFunction, inputs: Tensors) -> Tensors:
    """The results of `function(inputs)`, which must not wait for the GPU.

    Raises RuntimeError where the host would wait. A wait during a capture makes the
    capture fail, and torch does not recover from that completely.
    """
    saved_mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function(inputs)
    finally:
        torch.cuda.set_sync_debug_mode(saved_mode)


def _first_error_line(error: Exception) -> str:
    """First line of an error's text, or the name of its type."""
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
