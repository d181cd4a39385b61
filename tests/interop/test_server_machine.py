"""Clients join, leave, train, fall silent and come back, servers are saved and loaded,
in any order: what must hold, holds."""

import torch
from hypothesis import settings
from hypothesis import stateful as sf
from hypothesis import strategies as st
from parts.interop import DATA, SETTING, TRAINING, again, model

from pflcore import Client, Server


class Comings(sf.RuleBasedStateMachine):
    names = sf.Bundle("names")

    @sf.initialize(name=st.sampled_from(["fedavg", "feddwa", "fedamp", "ditto"]))
    def start(self, name):
        self.name, self.server = name, Server(name, model, 2)
        self.clients = {}
        self.uploads = {}  # on their way, of the round that is open
        self.rounds, self.made, self.begun = 0, 0, False
        self.x = self.state().get("server.x")  # FedAvg's, by hand

    def state(self):
        return self.server.state_dict()["state"]

    @sf.rule(target=names)
    def join(self):
        # the round has begun: growth waits for its end
        if self.made > 1 and self.begun:
            self.close()
        name, own = f"client {self.made}", DATA.subset([self.made % DATA.n])
        assert self.server.join(name) == self.made  # nobody has or had it
        self.made += 1
        self.clients[name] = Client(self.name, model, own, TRAINING, **SETTING)
        return name

    @sf.rule(name=names, breaks=st.booleans())
    def train(self, name, breaks):
        if name in self.clients:
            up, n = self.clients[name].train(self.server.download(name))
            if breaks:
                up = {k: v if k[0] == "@" else v * torch.nan for k, v in up.items()}
            self.uploads[name], self.begun = ((up, n), breaks), True

    @sf.precondition(lambda self: self.begun)
    @sf.rule()
    def close(self):
        before, uploads, self.uploads, self.begun = (
            self.state(),
            self.uploads,
            {},
            False,
        )
        sent = {k: v for k, (v, _) in uploads.items()}
        # who trained may have left since: a round of nobody
        done = self.server.aggregate(sent, strict=bool(sent))
        self.rounds += 1
        broken = [k for k, (_, breaks) in uploads.items() if breaks]
        assert sorted(done.dropped) == sorted(broken)
        assert done.void is (len(broken) == len(uploads))
        if done.void:
            assert all(map(torch.equal, before.values(), self.state().values()))
        elif self.name == "fedavg":
            fine = [
                (up["delta"], n) for (up, n), breaks in uploads.values() if not breaks
            ]
            self.x = self.x + sum(d * n for d, n in fine) / sum(n for _, n in fine)
            torch.testing.assert_close(self.state()["server.x"], self.x)

    @sf.rule(name=names)
    def leave(self, name):
        if self.clients.pop(name, None) is not None:
            self.uploads.pop(name, None)
            self.server.leave(name)

    @sf.precondition(lambda self: not self.uploads)
    @sf.rule()
    def restart(self):
        kept = {k: c.state_dict() for k, c in self.clients.items()}
        server, clients = again([self.server.state_dict(), kept])
        self.server = Server(self.name, model, 1)
        self.server.load_state_dict(server)
        for name, client in clients.items():
            self.clients[name].load_state_dict(client)

    @sf.invariant()
    def what_must_hold(self):
        x = torch.ones(1, 6, dtype=torch.float64)
        assert self.server.round == self.rounds
        # each has the number that it got
        assert self.server.clients == {k: int(k.split()[1]) for k in self.clients}
        assert all(
            v.isfinite().all() for v in self.state().values() if v.is_floating_point()
        )
        for name, client in self.clients.items():
            assert (
                client.model(self.server.download(name, "evaluation"))(x)
                .isfinite()
                .all()
            )


TestComings = Comings.TestCase
TestComings.settings = settings(max_examples=8, stateful_step_count=10)
