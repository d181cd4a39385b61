"""Memory of Flower's server while it sends each client a model of its own.

    python -m bench.flower_memory --clients 100 --parameters 250000

Flower's own grid of a deployment sends the messages; in place of the network, the other
side takes every message and keeps nothing. "all at once" gives the grid a list of the
round's messages, "one by one" is what the strategies do. The bytes are those that
Python allocates, which are Flower's arrays and messages. Tensors of torch, the server's
rows among them, do not count.
"""

import argparse
import os
import tracemalloc
from collections.abc import Callable
from typing import Any

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid
from torch import nn

from bench.table import Table
from pflcore import Server
from pflcore.interop._flower_sending import OneByOneGrid
from pflcore.interop.flower import PersonalStrategy, PflStrategy

HEAD = "strategy | models | bytes of the models | all at once, peak | one by one, peak"


class Link:
    """A SuperLink that takes every message, and counts what it took.

    Attributes:
        nodes: The ids of the nodes that messages went to.
        object_bytes: The bytes of all objects that came.
    """

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.object_bytes = 0

    def PushMessages(self, request: Any) -> Any:
        """Takes messages, and asks for all of their objects."""
        objects = [*_object_ids(request.message_object_trees)]
        metadata = [message.metadata for message in request.messages_list]
        self.nodes += [one.dst_node_id for one in metadata]
        return PushAppMessagesResponse(
            message_ids=[one.message_id for one in metadata],
            objects_to_push=objects,
            session_id="session",
        )

    def PushObject(self, request: Any) -> Any:
        """Takes the content of one object."""
        self.object_bytes += len(request.object_content)
        return PushObjectResponse(stored=True)

    def PullMessages(self, request: Any) -> Any:
        """No reply."""
        return PullAppMessagesResponse()


def _object_ids(trees: Any) -> Any:
    """The ids of all objects in the trees of messages."""
    for tree in trees:
        yield tree.object_id
        yield from _object_ids(tree.children)


class LinkGrid(HttpGrid):  # type: ignore[misc]
    """Flower's grid of a deployment, with a `Link` on its other side.

    Args:
        link: What takes the messages.
        nodes: The ids of the connected nodes.
    """

    def __init__(self, link: Link, nodes: list[int]) -> None:
        super().__init__(insecure=True, token="none")
        self.set_run(Run.create_empty(1))
        self._client: Any = link
        self._nodes = nodes

    def get_node_ids(self) -> list[int]:
        """The ids of the connected nodes."""
        return self._nodes


def server_strategy(clients: int, parameters: int) -> PflStrategy:
    """FedAMP's server, which keeps one row for each client."""
    model = nn.Linear(parameters, 1, bias=False)
    strategy = PflStrategy(Server("fedamp", model, clients), min_available_nodes=1)
    strategy.clients = dict(enumerate(range(clients), 100))
    return strategy


def personal_strategy(clients: int, parameters: int) -> PersonalStrategy:
    """A strategy that has mixed a model for each node."""
    strategy = PersonalStrategy("fedamp", min_available_nodes=1)
    replies = []
    for node in range(100, 100 + clients):
        record = ArrayRecord({"weight": torch.randn(1, parameters)})
        metrics = MetricRecord({"num-examples": 1})
        content = RecordDict({"arrays": record, "metrics": metrics})
        asked = Message(RecordDict(), node, "train")
        replies.append(Message(content, reply_to=asked))
    strategy.aggregate_train(1, replies)
    return strategy


# Flower's messages carry the ids of their run, which a process of Flower's sets.
TaskIdentity.task_id = 1
TaskIdentity.run_id = 1
TaskIdentity.node_id = 1
Make = Callable[[int, int], Any]
STRATEGIES: dict[str, Make] = {
    "PflStrategy": server_strategy,
    "PersonalStrategy": personal_strategy,
}


def sending_peak(make: Make, clients: int, parameters: int, one_by_one: bool) -> int:
    """The peak of Python's bytes while a round's messages are sent."""
    strategy = make(clients, parameters)
    link = Link()
    nodes = list(range(100, 100 + clients))
    grid: Any = LinkGrid(link, nodes)
    arrays = ArrayRecord({"weight": torch.zeros(1, 1)})
    tracemalloc.start()
    messages = strategy.configure_train(1, arrays, ConfigRecord(), grid)
    if one_by_one:
        grid = OneByOneGrid(grid)
    else:
        messages = list(messages)
    grid.send_and_receive(messages, timeout=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    if sorted(link.nodes) != nodes:
        raise SystemExit(f"expected a message to each of {nodes}, got {link.nodes}")
    return peak


def main() -> None:
    """Prints a table with both strategies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=250_000)
    options = parser.parse_args()
    clients, parameters = options.clients, options.parameters
    table = Table(HEAD)
    for name, make in STRATEGIES.items():
        peaks = [
            sending_peak(make, clients, parameters, one_by_one)
            for one_by_one in (False, True)
        ]
        models = 4 * clients * parameters
        megabytes = [f"{count / 1e6:.1f} MB" for count in (models, *peaks)]
        table.add(" | ".join([name, str(clients), *megabytes]))


if __name__ == "__main__":
    main()
