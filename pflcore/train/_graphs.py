"""CUDA graphs of the clients' gradients.

A gradient of many small models is some hundred small kernels. On a GPU, launching them
takes longer than running them. A CUDA graph is recorded from one step; every later step
of the same shapes replays it by one launch.

A graph holds the gradients of a block of clients with the gathering of their
minibatches. What follows in a step is one fused kernel, which differs by algorithm and
step size. So it stays outside, and one graph serves all algorithms and all rounds.

A replay repeats the recorded kernels at the recorded addresses, without Python. So a
recorded function may depend on its inputs and on what its key names, and on nothing
else. Before each replay the inputs, random seeds among them, are copied into memory at
fixed addresses (the arena). The graph itself copies its results into the arena.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pflcore.check import warn_caller

Tensors = dict[str, Tensor]
GraphFunction = Callable[[Tensors], Tensors]

# A capture takes as long as some ten steps that launch one kernel after another. It is
# not worth it for shapes that come less often, such as those of a last batch of a
# cohort that is drawn anew in every round.
CAPTURE_AFTER_STEPS = 8
# With more graphs, the one that was not replayed for the longest time is dropped.
MAX_GRAPHS = 32
MAX_COUNTED_SHAPES = 4096  # shapes whose steps are counted


@dataclass
class _Graph:
    """A recorded gradient, with its inputs and results in the arena."""

    replay: Callable[[], None]
    # The recorded function keeps alive the memory that the graph reads.
    function: GraphFunction
    inputs: Tensors
    outputs: Tensors


class _FixedMemory:
    """Memory at fixed addresses that all graphs of a run share.

    There is one piece for each name and dtype.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pieces: dict[tuple[str, torch.dtype], Tensor] = {}

    def has_room(self, tensors: Tensors) -> bool:
        """Whether all pieces are large enough for tensors of these shapes.

        A piece that grows moves to another address.
        """
        for name, t in tensors.items():
            piece = self._pieces.get((name, t.dtype))
            if piece is not None and piece.numel() < t.numel():
                return False
        return True

    def clear(self) -> None:
        self._pieces.clear()

    def views(self, tensors: Tensors) -> Tensors:
        """Memory for tensors of these names, shapes and dtypes."""
        views = {}
        for name, t in tensors.items():
            piece = self._pieces.get((name, t.dtype))
            if piece is None:
                piece = torch.empty(t.numel(), dtype=t.dtype, device=self.device)
                self._pieces[name, t.dtype] = piece
            views[name] = piece[: math.prod(t.shape)].view(t.shape)
        return views


class GradientGraphs:
    """The graphs of one run on one GPU."""

    def __init__(
        self, device: torch.device, capture_after_steps: int | None = None
    ) -> None:
        self.refusal_reason: str | None = None  # why nothing is captured any more
        self.replays = 0
        self._device = device
        self._capture_after_steps = (
            CAPTURE_AFTER_STEPS if capture_after_steps is None else capture_after_steps
        )
        self._arena = _FixedMemory(device)
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._graphs: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._step_counts: Counter[Hashable] = Counter()

    @property
    def summary(self) -> str:
        """Whether gradients are captured, for the record."""
        if self.refusal_reason is None:
            return "captured"
        return f"eager: {self.refusal_reason}"

    def run(self, key: Hashable, function: GraphFunction, inputs: Tensors) -> Tensors:
        """`function(inputs)`, by a replay where there is one for this key and shapes.

        The next replay overwrites the results.
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
        """`function(inputs)`, which is recorded once its shapes came often enough."""
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
            return function(inputs)  # an error with another cause is raised here
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
            self._graphs.popitem(last=False)
        return outputs

    def _capture_graph(
        self, function: GraphFunction, inputs: Tensors, outputs: Tensors
    ) -> _Graph:
        """A graph of `function` on memory of the arena.

        `outputs` show the shapes of its results.
        """
        results = {f"result {name}": t for name, t in outputs.items()}
        if not self._arena.has_room({**inputs, **results}):
            self._graphs.clear()  # they use addresses that are about to be freed
            self._arena.clear()
        input_views = self._arena.views(inputs)
        result_views = self._arena.views(results)
        for name, view in input_views.items():
            view.copy_(inputs[name])
        with torch.cuda.device(self._device):
            if self._pool is None:
                # In one pool, graphs may use the same memory for their temporaries.
                self._pool = torch.cuda.graph_pool_handle()
                self._stream = torch.cuda.Stream()
            graph = torch.cuda.CUDAGraph()
            # "thread_local": other threads may use the GPU meanwhile; what they do is
            # no part of the graph.
            options = {"pool": self._pool, "stream": self._stream}
            with torch.cuda.graph(graph, capture_error_mode="thread_local", **options):
                for name, t in function(input_views).items():
                    result_views[f"result {name}"].copy_(t)
        graph_outputs = {name: result_views[f"result {name}"] for name in outputs}
        return _Graph(graph.replay, function, input_views, graph_outputs)


def _run_without_waiting(function: GraphFunction, inputs: Tensors) -> Tensors:
    """`function(inputs)`; raises RuntimeError where the host would wait for the GPU.

    A wait during a capture makes the capture fail, and torch does not recover from that
    completely.
    """
    saved_mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return function(inputs)
    finally:
        torch.cuda.set_sync_debug_mode(saved_mode)


def _first_error_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
