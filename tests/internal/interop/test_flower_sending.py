"""A round's messages are built one by one, and no more than one lies in memory."""

import gc
import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr.superlink.grid.http_grid")

import torch
from entry_points import sentence
from flwr.app import ArrayRecord, ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from bench.flower_memory import STRATEGIES, Link, LinkGrid, sending_peak
from pflcore.interop import _flower_sending
from pflcore.interop._flower_sending import OneByOneGrid

CLIENTS = 10
PARAMETERS = 100_000
MODEL_BYTES = 4 * PARAMETERS
ARRAYS = ArrayRecord({"weight": torch.zeros(1, 1)})


def round_messages(name, grid):
    strategy = STRATEGIES[name](CLIENTS, 3)
    return strategy.configure_train(1, ARRAYS, ConfigRecord(), grid)


@pytest.mark.parametrize("name", STRATEGIES)
def test_memory_of_sending_does_not_grow_with_clients(name):
    """Flower's grid of a deployment holds one message instead of all.

    Flower keeps about two further copies of the message that it sends.
    """
    make = STRATEGIES[name]

    one_by_one = sending_peak(make, CLIENTS, PARAMETERS, one_by_one=True)
    at_once = sending_peak(make, CLIENTS, PARAMETERS, one_by_one=False)

    assert one_by_one < 5 * MODEL_BYTES
    assert at_once > CLIENTS * MODEL_BYTES  # the measurement sees all models


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_message_is_gone_before_the_next_is_built(name):
    alive = []

    class Watching(LinkGrid):
        def push_messages(self, messages):
            (message,) = messages
            gc.collect()
            assert not any(reference() for reference in alive)
            alive.append(weakref.ref(message))
            return super().push_messages(messages)

    grid = Watching(Link(), list(range(100, 100 + CLIENTS)))
    OneByOneGrid(grid).send_and_receive(round_messages(name, grid), timeout=0)
    assert len(alive) == CLIENTS


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_array_reaches_the_other_side(name):
    nodes = list(range(100, 100 + CLIENTS))
    link, twin = Link(), Link()
    grids = [LinkGrid(link, nodes), LinkGrid(twin, nodes)]

    OneByOneGrid(grids[0]).send_and_receive(round_messages(name, grids[0]), timeout=0)
    grids[1].send_and_receive([*round_messages(name, grids[1])], timeout=0)

    assert sorted(link.nodes) == sorted(twin.nodes) == nodes
    # Alike objects go once in a list, and once for each message one by one.
    assert link.object_bytes >= twin.object_bytes > 0


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_second_reader_of_messages_is_refused(name):
    grid = LinkGrid(Link(), list(range(100, 100 + CLIENTS)))
    messages = round_messages(name, grid)
    with sentence("messages: expected to be read once, got a second reader; send them"):
        grid.send_and_receive(messages, timeout=0)  # Flower's grid reads them twice


class Late:
    """A grid whose reply to message i comes with the pull number `arrivals[i]`.

    None means that the message cannot be pushed.
    """

    def __init__(self, arrivals):
        self.arrivals = arrivals
        self.events = []
        self.pulls = 0

    def build(self, i):
        self.events.append(("build", i))
        return i

    def push_messages(self, messages):
        (i,) = messages
        self.events.append(("push", i))
        return [None if self.arrivals[i] is None else f"id {i}"]

    def pull_messages(self, ids):
        arrived = [
            SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=f"id {i}"))
            for i, pull in enumerate(self.arrivals)
            if pull == self.pulls and f"id {i}" in ids
        ]
        self.pulls += 1
        return arrived


@given(st.lists(st.none() | st.integers(0, 30), max_size=6), st.integers(0, 20))
def test_replies_are_those_that_come_in_time(arrivals, timeout):
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds

    grid = Late(arrivals)
    fake_time = SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_flower_sending, "time", fake_time)
        messages = (grid.build(i) for i in range(len(arrivals)))
        replies = OneByOneGrid(grid).send_and_receive(messages, timeout=timeout)

    got = {reply.metadata.reply_to_message_id for reply in replies}
    in_time = {
        f"id {i}"
        for i, pull in enumerate(arrivals)
        if pull is not None and pull < grid.pulls
    }
    assert got == in_time and len(replies) == len(got)
    each = [("build", "push")] * len(arrivals)
    assert grid.events == [
        (event, i) for i, events in enumerate(each) for event in events
    ]
    everything = {f"id {i}" for i, pull in enumerate(arrivals) if pull is not None}
    assert got == everything or timeout <= clock[0] <= timeout + 3.1
