"""CUDA graphs of the pretended GPU (tests/pretend_gpu.py).

During a capture, every operation on the device is noted, with the numbers that Python
gave it. A replay repeats the noted operations on the same memory. As on a GPU, Python's
decisions at the capture are kept. Memory that is no result of the graph may change:
temporaries of all graphs are made invalid before a replay.

A capture refuses what a GPU refuses: reading a value on the host, and copying memory of
the host. Outside a capture, `torch.cuda.set_sync_debug_mode("error")` refuses waits.

Torch counts the living graphs of a pool of memory. It refuses a capture into a pool
whose graphs are all gone, as it is here: on a GPU a library's workspace keeps the pool
from being forgotten. A capture makes its stream current before it begins. The stream
stays current where the capture cannot begin, and where it ends with an error.
"""

import contextlib
import weakref
from collections import Counter
from itertools import count
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

captured = weakref.WeakSet()  # the graphs that live
_state = {"graph": None, "debug": "default", "stream": "default"}
_pools = Counter()  # number of living graphs, by pool
_pool_numbers = count()


class Graph:
    """Noted operations: function, arguments, results."""

    def __init__(self):
        self.noted = []
        self.memory = []  # floating-point tensors that its operations allocated
        self.replays = 0
        captured.add(self)

    def replay(self):
        self.replays += 1
        with _disable_current_modes(), torch.no_grad():
            for graph in captured:
                graph.spoil()
            for func, args, kwargs, old in self.noted:
                new = func(*args, **kwargs)
                for old_result, new_result in zip(
                    tensors(old), tensors(new), strict=True
                ):
                    if old_result.data_ptr() != new_result.data_ptr():
                        old_result.copy_(new_result)

    def note(self, func, args, kwargs, out):
        self.noted.append((func, args, kwargs, out))
        taken = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        for t in tensors(out):
            if t.untyped_storage().data_ptr() not in taken and t.is_floating_point():
                self.memory.append(t)

    def spoil(self):
        """Makes the memory invalid that this graph's operations allocated."""
        for t in self.memory:
            t.fill_(torch.nan)


def tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


@contextlib.contextmanager
def capture(graph, pool=None, stream=None, **_):
    assert _state["graph"] is None, "one capture at a time"
    stream_before = _state["stream"]
    _state["stream"] = stream
    take_pool(graph, pool)
    _state["graph"] = graph
    try:
        yield
    finally:
        _state["graph"] = None
    _state["stream"] = stream_before


def take_pool(graph, pool):
    """Counts a graph of a pool; refuses a pool whose graphs are all gone."""
    if pool is None:  # the graph has a pool of its own
        return
    if pool in _pools and _pools[pool] == 0:
        raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
    _pools[pool] += 1
    weakref.finalize(graph, _pools.subtract, [pool])


def note(func, args, kwargs, out, from_host):
    """Notes an operation on the device if a capture is running.

    Raises RuntimeError where the operation reads memory of the host (`from_host`).
    """
    graph = _state["graph"]
    if graph is None:
        return
    if from_host:
        raise RuntimeError(
            "CUDA error: operation not permitted when stream is capturing"
        )
    graph.note(func, args, kwargs, out)


def refuse_wait(name):
    """Raises RuntimeError where the host may not wait for the device now."""
    if _state["graph"] is not None:
        raise RuntimeError(
            "CUDA error: operation not permitted when stream is capturing"
        )
    if _state["debug"] == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation ({name})")


@contextlib.contextmanager
def patches():
    """Replaces torch.cuda's graphs by these graphs."""
    captured.clear()
    _state.update(stream="default")
    fakes = {
        "CUDAGraph": Graph,
        "graph": capture,
        "graph_pool_handle": lambda: (0, next(_pool_numbers)),
        "Stream": lambda *_: object(),
        "current_stream": lambda *_: _state["stream"],
        "set_stream": lambda stream: _state.update(stream=stream),
        "get_sync_debug_mode": lambda: _state["debug"],
        "set_sync_debug_mode": lambda mode: _state.update(debug=mode),
    }
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch(f"torch.cuda.{name}", fake))
        yield
