"""Flower's nodes in one process, without a network."""

import os
import pickle
from uuid import uuid4

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from parts.interop import DATA, SETTING, TRAINING
from parts.interop import bn_model as model

from pflcore import Client

TaskIdentity.task_id = 1
TaskIdentity.run_id = 1
TaskIdentity.node_id = 1


def context(node, config=None):
    return Context(
        run_id=1,
        run_config={},
        node_id=node,
        node_config=config or {},
        state=RecordDict(),
    )


class Nodes(Grid):
    """A grid of nodes 100, 101, ... in one process and ClientApp.

    The nodes have the partitions `partitions`. Messages go through Flower's classes,
    but not through a network or Ray.
    """

    def __init__(self, app, partitions):
        self.app = app
        self.answered = []  # the replies of all rounds
        self.asked = []  # the kind and node of each message to a node
        self.lies = {}  # false answers of nodes to the question which client they are
        each = enumerate(partitions, 100)
        self.contexts = {node: context(node, {"partition-id": p}) for node, p in each}
        self.mute = set()  # nodes that do not answer
        self.spoil = None  # function that replaces the trained model of node 102
        self.arrived = []  # the replies that were not pulled yet

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        return [self.push(message) for message in messages]

    def push(self, message):
        """The id of a message that a node answers, or None."""
        node = message.metadata.dst_node_id
        self.asked.append((message.metadata.message_type, node))
        if node in self.mute:
            return None
        message.metadata.__dict__["_message_id"] = uuid4().hex
        self.arrived.append(self.answer(message, node))
        return message.metadata.message_id

    def answer(self, message, node):
        kind = message.metadata.message_type
        if kind == "query.pflcore" and node in self.lies:
            return Message(self.lies[node], reply_to=message)
        # Contexts and messages are pickled, as on their way through Flower.
        node_context = pickle.loads(pickle.dumps(self.contexts[node]))
        received = pickle.loads(pickle.dumps(message))
        try:
            reply = self.app(received, node_context)
            self.contexts[node] = node_context
        except Exception as exception:  # a node of Flower catches all errors
            error = Error(code=0, reason=f"{type(exception)}:<'{exception}'>")
            reply = Message(error, reply_to=message)
        if self.spoil and node == 102 and kind == "train":
            reply.content = self.spoil(reply)
        return reply

    def pull_messages(self, message_ids):
        arrived = sorted(self.arrived, key=lambda reply: reply.metadata.src_node_id)
        self.arrived = []
        self.answered += arrived
        return arrived[::-1]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))

    def trainers(self):
        """The nodes that were asked to train since the last call."""
        nodes = sorted(node for kind, node in self.asked if kind == "train")
        self.asked.clear()
        return nodes

    def trained(self):
        """The trained models that nodes have sent, round after round."""
        train = [m for m in self.answered if m.metadata.message_type == "train"]
        return [m.content["arrays"] for m in train]


# The abstract methods of Grid are those of a network, and no test calls them.
Nodes.__abstractmethods__ = frozenset()


def maker(alg, net=model):
    def make(context):
        part = DATA.subset([int(context.node_config["partition-id"])])
        return Client(alg, net, part, TRAINING, **SETTING)

    return make
