"""Clients join, leave, train, fall silent and come back, servers are saved and loaded, in any
order: what must hold, holds."""

import io
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from torch import nn

from pflcore import Client, Hardware, Server, Training


def model():
    return nn.Linear(2, 2).double()


def data(seed):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(5, 2, generator=gen, dtype=torch.float64), torch.arange(5) % 2


class Comings(RuleBasedStateMachine):
    names = Bundle("names")

    @initialize(name=st.sampled_from(["fedavg", "feddwa", "fedamp", "ditto"]))
    def start(self, name):
        self.name, self.server = name, Server(name, model, 2)
        self.clients: dict[str, Client] = {}
        self.uploads: dict[str, Any] = {}  # on their way, of the round that is open
        self.rounds = self.made = 0
        self.begun = False
        self.held: set[int] = set()  # numbers that somebody has or had
        self.x = self.server.state_dict()["state"].get("server.x")  # FedAvg's, by hand

    @rule(target=names)
    def join(self):
        self.made += 1
        name = f"client {self.made}"
        # the round has begun: growth waits for its end
        if len(self.held) >= 2 and self.begun:
            self.close()
        number = self.server.join(name)
        # the first that nobody has or had
        assert number == min({*range(len(self.held) + 1)} - self.held)
        self.held.add(number)
        self.clients[name] = Client(
            self.name, model, data(self.made), Training(batch_size=5), hardware=Hardware("loop", 1)
        )
        return name

    @rule(name=names, breaks=st.booleans())
    def train(self, name, breaks):
        if name not in self.clients:
            return
        up, n = self.clients[name].train(self.server.download(name))
        self.begun = True
        self.uploads[name] = (
            ({k: v if k[0] == "@" or not breaks else v * torch.nan for k, v in up.items()}, n),
            breaks,
        )

    @precondition(lambda self: self.uploads)
    @rule()
    def close(self):
        before, uploads, self.uploads = self.server.state_dict(), self.uploads, {}
        self.begun = False
        done = self.server.aggregate({k: v for k, (v, _) in uploads.items()})
        self.rounds += 1
        assert sorted(done.dropped) == sorted(k for k, (_, breaks) in uploads.items() if breaks)
        assert done.void is all(breaks for _, breaks in uploads.values())
        if self.name == "fedavg":
            fine = [(up["delta"], n) for (up, n), breaks in uploads.values() if not breaks]
            self.x = self.x + sum((d * n for d, n in fine), torch.zeros(())) / max(
                1, sum(n for _, n in fine)
            )
            torch.testing.assert_close(self.server.state_dict()["state"]["server.x"], self.x)
        if done.void:
            assert all(
                torch.equal(v, before["state"][k])
                for k, v in self.server.state_dict()["state"].items()
            )

    @rule(name=names)
    def leave(self, name):
        if self.clients.pop(name, None) is not None:
            self.uploads.pop(name, None)
            self.server.leave(name)

    @precondition(lambda self: not self.uploads)
    @rule()
    def restart(self):
        file = io.BytesIO()
        torch.save(
            [self.server.state_dict(), {k: c.state_dict() for k, c in self.clients.items()}], file
        )
        server, clients = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        self.server = Server(self.name, model, 1)
        self.server.load_state_dict(server)
        for name, client in clients.items():
            self.clients[name].load_state_dict(client)

    @invariant()
    def what_must_hold(self):
        state, numbers = self.server.state_dict(), list(self.server.clients.values())
        assert self.server.round == self.rounds and set(self.server.clients) == set(self.clients)
        assert len(set(numbers)) == len(numbers) and not set(numbers) & set(state["gone"])
        assert all(
            bool(v.isfinite().all()) for v in state["state"].values() if v.is_floating_point()
        )
        for name, client in self.clients.items():
            scores = client.model(self.server.download(name, "evaluation"))(
                torch.ones(1, 2, dtype=torch.float64)
            )
            assert scores.isfinite().all()


TestComings = Comings.TestCase
TestComings.settings = settings(max_examples=8, stateful_step_count=10)
