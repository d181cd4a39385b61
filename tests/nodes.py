"""Flower's nodes in this process, for tests of a second: messages go through Flower's classes, but
through no network and no Ray."""

import os

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
}

import pickle

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def context(node, config=None):
    return Context(
        run_id=1, node_id=node, node_config=config or {}, state=RecordDict(), run_config={}
    )


class Nodes(Grid):
    """Nodes 100, 101, ... of partitions `partitions`, all with one ClientApp. What went to and fro
    is in `sent` and `answered`."""

    def __init__(self, app, partitions):
        self.app, self.sent, self.answered = app, [], []
        self.contexts = {
            100 + i: context(100 + i, {"partition-id": p}) for i, p in enumerate(partitions)
        }
        self.mute: set[int] = set()  # nodes that do not answer

    def get_node_ids(self):
        return list(self.contexts)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            self.sent.append(message)
            node = message.metadata.dst_node_id
            if node in self.mute:
                continue
            kept = pickle.loads(pickle.dumps(self.contexts[node]))  # as it travels
            try:
                replies.append(self.app(pickle.loads(pickle.dumps(message)), kept))
                self.contexts[node] = kept
            except Exception as error:  # as a node does
                replies.append(
                    Message(Error(code=0, reason=f"{type(error)}:<'{error}'>"), reply_to=message)
                )
        self.answered += replies
        return replies[::-1]

    def set_run(self, run): ...
    @property
    def run(self): ...
    def create_message(self, *args, **words): ...
    def push_messages(self, messages): ...
    def pull_messages(self, ids): ...
