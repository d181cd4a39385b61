"""One client of any algorithm on a machine of its own: what it keeps, its work of a round, its
personalized model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pflcore.algorithms import algorithm_of
from pflcore.algorithms.protocol import Algorithm, Payload, Tensors, check_training
from pflcore.check import Buffers, Model, Seed, checked, device_of
from pflcore.data.federation import Federation
from pflcore.data.ragged import Ragged
from pflcore.data.roles import held_out, one_client
from pflcore.interop.wire import About, fingerprint, net_of, opened, packed
from pflcore.simulation.accept import finite_rows, nearer
from pflcore.simulation.personal import Personalized, larger
from pflcore.simulation.round import policy
from pflcore.simulation.settings import Hardware
from pflcore.train import Clients, Training, prepared
from pflcore.train.losses import Loss, default_loss
from pflcore.train.workers import one_thread


class Client:
    """One client's half of a round, for every algorithm: `train` on what `Server.download` gave,
    `model` for its personalized model.

    `model` must start as the server's template does (the same weights, or the same function and
    `seed`). `data`: (x, y), {"train": (x, y), "val": ...}, a Dataset or a Federation of one client.
    What the algorithm keeps at a client stays here, batch norm's statistics too unless they are
    averaged; a round that the server did not take this client's upload in, leaves no trace.
    """

    @checked
    def __init__(  # noqa: PLR0913 (what a run has)
        self,
        algorithm: Algorithm | type[Algorithm] | str,
        model: Model,
        data: Any,
        training: Training = Training(),  # noqa: B008 (frozen)
        *,
        seed: Seed = 0,
        hardware: Hardware = Hardware(workers=1),  # noqa: B008 (frozen)
        batch_norm: Buffers = "auto",
        loss: Loss | None = None,
    ) -> None:
        self.algorithm = algorithm_of(algorithm)
        check_training(self.algorithm, training)
        one, device = one_client(data, dtype=None), device_of(hardware.device)
        net = net_of(self.algorithm, model, loss or default_loss(one.y), seed).to(device)
        x, y = (t.to(net.dtype) if t.is_floating_point() else t for t in (one.x, one.y))
        one = replace(one, x=x, y=y).to(device)
        self.data = held_out(one, seed) if self.algorithm.traits.needs_val else one
        self.averages = policy(self.algorithm, net, batch_norm) == "average"
        self._setting = prepared(net, self.data, training, hardware.engine, hardware.workers, seed)
        net, classes = self._setting.net, self.data.classes
        if classes is not None and self.data.relabel is None and net.head_name is not None:
            # one client may not have samples of all classes
            self.data = replace(self.data, classes=max(classes, net.classes))
        self._fingerprint = fingerprint(self.algorithm, net, self.averages)
        self._statistics = net.b0[None]  # [1, b]
        self._own: Tensors = {}  # [1, ...]
        self._pending: tuple[int, Tensors, Tensor] | None = None  # a round, and what became of
        # state and statistics in it, until the server says whether it took the upload

    def train(self, download: Mapping[str, Tensor]) -> tuple[Tensors, int]:
        """This client's work of a round: its upload, a dict of tensors [1, ...], and its number of
        training samples, for `Server.aggregate`."""
        with one_thread():
            down, own, about, clients = self._opened(download)
            if about.round != about.done + 1:
                raise ValueError(
                    "download: expected one to train on, got one for an evaluation; ask for "
                    "download(client_id)."
                )
            new, up, fit = self.algorithm.train(down, own, clients)
        self._own, self._pending = own, (about.round, own | new, fit.buffers)
        if not finite_rows([*new.values(), fit.buffers], 1).all():  # so that the server drops it
            up = {k: v * torch.nan if v.is_floating_point() else v for k, v in up.items()}
        statistics = fit.buffers[0] if self.averages else None
        return packed(up, about, statistics), int(clients.size[0])

    def model(self, download: Mapping[str, Tensor]) -> Personalized:
        """The personalized model, from `Server.download(client_id, "evaluation")`, a dict of
        tensors [1, ...]."""
        model, clients = self._personalized(download)
        row = {k: v[0] for k, v in model.items()}
        classes = self.data.classes
        return Personalized(self.algorithm, clients.net, row, clients.buffers[0], classes)

    def evaluate(self, download: Mapping[str, Tensor], split: str = "test") -> dict[str, float]:
        """The personalized model of a download [1, ...] on this client's own samples: "loss", for
        classes "accuracy", and "size", how many they are."""
        size = int(self.data.size(split)[0]) if split in self.data.index else 0
        if not size:
            raise ValueError(
                f"split: this client has no sample of {split!r} to be evaluated on; give it some "
                f"as data={{..., {split!r}: (x, y)}}."
            )
        model, clients = self._personalized(download)
        with one_thread():
            scores = clients.scores(model, split, self.algorithm.predict)
            returns = self.algorithm.traits.returns
            loss, accuracy = clients.worth(scores, split, returns=returns)
        found = {"loss": float(loss), "size": size}
        return found if accuracy is None else {**found, "accuracy": float(accuracy)}

    def state_dict(self) -> dict[str, Any]:
        """What this client keeps between rounds, for `torch.save`."""
        return {
            "fingerprint": self._fingerprint,
            "own": dict(self._own),
            "statistics": self._statistics,
            "pending": self._pending,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave. ValueError, and nothing changed, where it is
        something else: another algorithm's, or of a model of other shapes."""
        if not isinstance(state, Mapping) or state.get("fingerprint") != self._fingerprint:
            raise ValueError(
                "state: expected what state_dict() of a Client of this algorithm and model gives."
            )
        self._own, self._statistics = dict(state["own"]), state["statistics"]
        self._pending = state["pending"]

    # inside -------------------------------------------------------------------------------------
    def _opened(self, download: Any) -> tuple[Payload, Tensors, About, Clients]:
        """What was sent, this client's own state [1, ...], the message's numbers, and what a hook
        is given to train with, when the last round is settled."""
        net = self._setting.net
        down, about, statistics = opened(download, net.w0.device, self._fingerprint, "download")
        self._settle(about)
        kept = self._own if about.accepted else {}
        first = {k: v[:1] for k, v in self.algorithm.newcomer(down, net, about.n).items()}
        own = {k: larger(kept[k], v) if k in kept else v.clone() for k, v in first.items()}
        mine = self._statistics if statistics is None else statistics[None]
        data = alone(self.data, about.number, about.n)
        setting = self._setting._replace(data=data, rounds=about.rounds)
        number = torch.tensor([about.number])
        return down, own, about, Clients(setting, number, about.round, mine.clone())

    def _settle(self, about: About) -> None:
        """The last round's work counts where the server took its upload, as far as it took it."""
        if self._pending is None or about.done < self._pending[0]:
            return
        round, own, statistics = self._pending
        if about.accepted == round:
            clipped = own.keys() & set(self.algorithm.traits.clipped)
            factor = torch.tensor([about.factor], dtype=torch.float64)
            own |= {k: nearer(own[k], self._own[k], factor) for k in clipped}
            self._own, self._statistics = own, statistics
        self._pending = None

    def _personalized(self, download: Any) -> tuple[Tensors, Clients]:
        """The model [1, ...] and the clients with the statistics of batch norm that go with it."""
        with one_thread():
            down, own, _, clients = self._opened(download)
            model = dict(self.algorithm.model(down, own, clients))
        return model, replace(clients, buffers=model.pop("batch_norm", clients.buffers))


def alone(one: Federation, number: int, n: int) -> Federation:
    """The federation of n clients as the client `number` sees it, who has data of its own only; its
    draws are those of its number."""
    mine = (torch.arange(n) == number).long()
    index = {k: Ragged(rows[0], len(rows[0]) * mine) for k, rows in one.index.items()}
    relabel = None if one.relabel is None else one.relabel.expand(n, -1)
    return one._with(index=index, relabel=relabel)
