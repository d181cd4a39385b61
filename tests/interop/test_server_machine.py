"""A server's invariants hold under any order of events.

Clients join, leave, train and send nothing; the server is saved and loaded.
"""

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
        self.name = name
        self.server = Server(name, model, 2)
        self.clients = {}
        self.uploads = {}  # uploads of the open round, with "is it non-finite"
        self.rounds = 0  # rounds that the server has ended
        self.joined = 0  # clients that ever joined
        self.begun = False  # True where a client has trained in the open round
        self.x = self.state().get("server.x")  # FedAvg's model, computed by hand

    def state(self):
        return self.server.state_dict()["state"]

    @sf.rule(target=names)
    def join(self):
        # A newcomer beyond the two expected clients must wait for the end of the round.
        if self.joined > 1 and self.begun:
            self.close()
        name = f"client {self.joined}"
        samples = DATA.subset([self.joined % DATA.n])
        assert self.server.join(name) == self.joined  # no client has or had this number
        self.joined += 1
        self.clients[name] = Client(self.name, model, samples, TRAINING, **SETTING)
        return name

    @sf.rule(name=names, breaks=st.booleans())
    def train(self, name, breaks):
        if name in self.clients:
            up, n = self.clients[name].train(self.server.download(name))
            if breaks:
                up = {k: v if k[0] == "@" else v * torch.nan for k, v in up.items()}
            self.uploads[name] = ((up, n), breaks)
            self.begun = True

    @sf.precondition(lambda self: self.begun)
    @sf.rule()
    def close(self):
        before = self.state()
        uploads = self.uploads
        self.uploads = {}
        self.begun = False
        sent = {k: v for k, (v, _) in uploads.items()}
        # All clients that trained may have left: then the round has no upload.
        done = self.server.aggregate(sent, strict=bool(sent))
        self.rounds += 1
        broken = [k for k, (_, breaks) in uploads.items() if breaks]
        assert sorted(done.dropped) == sorted(broken)
        assert done.void is (len(broken) == len(uploads))
        if done.void:
            assert all(map(torch.equal, before.values(), self.state().values()))
        elif self.name == "fedavg":
            finite = [
                (up["delta"], n) for (up, n), breaks in uploads.values() if not breaks
            ]
            total = sum(n for _, n in finite)
            self.x = self.x + sum(d * n for d, n in finite) / total
            torch.testing.assert_close(self.state()["server.x"], self.x)

    @sf.rule(name=names)
    def leave(self, name):
        if self.clients.pop(name, None) is not None:
            self.uploads.pop(name, None)
            self.server.leave(name)

    @sf.precondition(lambda self: not self.uploads)
    @sf.rule()
    def restart(self):
        states = {k: c.state_dict() for k, c in self.clients.items()}
        server, clients = again([self.server.state_dict(), states])
        self.server = Server(self.name, model, 1)
        self.server.load_state_dict(server)
        for name, client in clients.items():
            self.clients[name].load_state_dict(client)

    @sf.invariant()
    def what_must_hold(self):
        x = torch.ones(1, 6, dtype=torch.float64)
        assert self.server.round == self.rounds
        # Each client keeps the number that it got when it joined.
        assert self.server.clients == {k: int(k.split()[1]) for k in self.clients}
        assert all(
            v.isfinite().all() for v in self.state().values() if v.is_floating_point()
        )
        for name, client in self.clients.items():
            personal = client.model(self.server.download(name, "evaluation"))
            assert personal(x).isfinite().all()


TestComings = Comings.TestCase
TestComings.settings = settings(max_examples=8, stateful_step_count=10)
